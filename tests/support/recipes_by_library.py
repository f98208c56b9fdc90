"""The recipes of examples/ with the trainer that the library itself brings; timm's is a script, and no part of the package.

Each takes and returns what the loops in recipes_by_hand.py do. All of them read the micro-batches of the script, in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


BY_LIBRARY: dict[str, Callable[[Any, int, Path], Trained]] = {"finetune_lora": finetune_lora, "segment_monai": segment_monai}
