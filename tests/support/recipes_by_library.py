"""The recipes of examples/ with the trainer that the library itself brings; timm's is a script, and no part of the package.

Each takes and returns what the loops in recipes_by_hand.py do. All of them read the micro-batches of the script, in its order.
Programs take a number of updates in place of epochs. TRL's micro-batches are equally large, for the same updates.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes_by_hand import Trained


def finetune_lora(recipe: Any, epochs: int, directory: Path) -> Trained:
    from transformers import Trainer, TrainingArguments, get_linear_schedule_with_warmup

    class InThisOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

        def get_eval_dataloader(self, *_: Any) -> Any:
            return held_out

    model = recipe.build()
    optimizer, (loader, held_out) = recipe.optimizer_of(model), recipe.loaders()
    total = epochs * -(-len(loader) // recipe.ACCUMULATION_STEPS)
    arguments = TrainingArguments(
        str(directory),
        max_steps=total,
        gradient_accumulation_steps=recipe.ACCUMULATION_STEPS,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = InThisOrder(
        model,
        arguments,
        train_dataset=loader.dataset,
        eval_dataset=held_out.dataset,
        optimizers=(optimizer, get_linear_schedule_with_warmup(optimizer, total // 10, total)),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return model, losses, {"loss": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][-1]}


def segment_monai(recipe: Any, epochs: int, directory: Path) -> Trained:
    from ignite.engine import Events
    from monai.engines import SupervisedEvaluator, SupervisedTrainer
    from monai.handlers import CheckpointSaver, LrScheduleHandler, MeanDice, ValidationHandler, from_engine
    from monai.transforms import AsDiscreted

    model = recipe.build()
    optimizer, (loader, held_out) = recipe.optimizer_of(model), recipe.loaders()
    schedule, keys = recipe.schedule_of(optimizer, epochs), ["pred", "label"]
    evaluator = SupervisedEvaluator(
        device="cpu",
        val_data_loader=held_out,
        network=model,
        postprocessing=AsDiscreted(keys, argmax=(True, False), to_onehot=recipe.CLASSES),
        key_val_metric={"dice": MeanDice(include_background=False, output_transform=from_engine(keys))},
        val_handlers=[CheckpointSaver(str(directory), {"model": model}, save_key_metric=True)],
    )
    saved = {"model": model, "optimizer": optimizer, "schedule": schedule}
    trainer = SupervisedTrainer(
        device="cpu",
        max_epochs=epochs,
        train_data_loader=loader,
        network=model,
        optimizer=optimizer,
        loss_function=recipe.loss_of,
        decollate=False,
        accumulation_steps=recipe.ACCUMULATION_STEPS,
        train_handlers=[
            ValidationHandler(1, evaluator),
            LrScheduleHandler(schedule, print_lr=False),
            CheckpointSaver(str(directory), saved, save_interval=1),
        ],
    )
    found: list[float] = []
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: loader.set_epoch(trainer.state.epoch - 1))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: found.append(trainer.state.output["loss"].item()))
    trainer.run()
    together = range(0, len(found), recipe.ACCUMULATION_STEPS)
    losses = [sum(found[at : at + recipe.ACCUMULATION_STEPS]) / recipe.ACCUMULATION_STEPS for at in together]
    return model, losses, dict(evaluator.state.metrics)


def as_causal_lm(program: Any, speaker: nn.Module, directory: Path) -> tuple[Any, Any]:
    """A language model of transformers around the model of a program, saved as a reference to load, and a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
    from transformers import PreTrainedTokenizerFast as FastTokenizer
    from transformers.modeling_outputs import BaseModelOutput

    class SpokenConfig(PreTrainedConfig):
        model_type, auto_map = "spoken", {}  # TRL reads both

    class Spoken(PreTrainedModel):
        config_class = SpokenConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.speaker, self.generation_config = program.Speaker(), GenerationConfig()
            self.post_init()

        def forward(self, input_ids: Tensor, **_: Any) -> BaseModelOutput:
            return BaseModelOutput(self.speaker.memory(self.speaker.embedding(input_ids))[0])

        def get_output_embeddings(self) -> nn.Module:
            return self.speaker.head

    AutoConfig.register("spoken", SpokenConfig, exist_ok=True)
    AutoModelForCausalLM.register(SpokenConfig, Spoken, exist_ok=True)
    model = Spoken(SpokenConfig())
    model.speaker = speaker
    model.save_pretrained(directory)
    model.config._name_or_path = str(directory)
    words = [str(word) for word in range(program.WORDS)]
    tokenizer = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, unk_token=words[0]))
    return model, FastTokenizer(tokenizer_object=tokenizer, pad_token=words[0], eos_token=words[0])


# Settings with which the trainers of TRL do the same as the programs.
BARE = {
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
}


def dpo(program: Any, num_updates: int, directory: Path) -> Trained:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class OfNumbers(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset  # words are numbers already

    speaker, optimizer = program.build()
    model, tokenizer = as_causal_lm(program, speaker, directory / "reference")
    chosen, rejected = (torch.cat(part) for part in list(zip(*program.data(speaker), strict=True))[:2])
    pairs = {"prompt_ids": chosen[:, :1], "chosen_ids": chosen[:, 1:], "rejected_ids": rejected[:, 1:]}
    trainer = OfNumbers(
        model,
        args=DPOConfig(
            str(directory),
            max_steps=num_updates,
            per_device_train_batch_size=16,
            train_sampling_strategy="sequential",
            beta=program.BETA,
            precompute_ref_log_probs=True,
            **BARE,
        ),
        train_dataset=Dataset.from_dict({name: words.tolist() for name, words in pairs.items()}),
        processing_class=tokenizer,
        optimizers=(optimizer, None),
    )
    trainer.train()
    return speaker, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], {}


def grpo(program: Any, num_updates: int, directory: Path) -> Trained:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def roll_out(prompts: list[str], _trainer: Any) -> dict[str, Any]:
        answers = [program.answer(speaker, int(prompt)) for prompt in prompts[:: program.ANSWERS]]
        texts, rewards = (torch.cat(part) for part in zip(*answers, strict=True))
        return {
            "prompt_ids": texts[:, :1].tolist(),
            "completion_ids": texts[:, 1:].tolist(),
            "logprobs": None,
            "reward": rewards.tolist(),
        }

    speaker, optimizer = program.build()
    model, tokenizer = as_causal_lm(program, speaker, directory / "reference")
    trainer = GRPOTrainer(
        model,
        lambda reward, **_: reward,
        args=GRPOConfig(
            str(directory),
            max_steps=num_updates,
            per_device_train_batch_size=program.ANSWERS,
            num_generations=program.ANSWERS,
            shuffle_dataset=False,
            beta=program.PENALTY,
            use_bias_correction_kl=False,
            **BARE,
        ),
        train_dataset=Dataset.from_dict({"prompt": [str(prompt) for prompt in range(program.GROUP * num_updates)]}),
        processing_class=tokenizer,
        optimizers=(optimizer, None),
        rollout_func=roll_out,
    )
    trainer.train()
    return speaker, [entry["reward"] for entry in trainer.state.log_history if "reward" in entry], {}


BY_LIBRARY: dict[str, Callable[[Any, int, Path], Trained]] = {
    "finetune_lora": finetune_lora,
    "segment_monai": segment_monai,
    "dpo": dpo,
    "grpo": grpo,
}
