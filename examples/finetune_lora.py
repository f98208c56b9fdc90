"""Fine-tunes a language model of transformers with LoRA of peft: it learns to say what a function of Python is for.

    pip install transformers peft
    python examples/finetune_lora.py                                   # one process
    python examples/finetune_lora.py --nproc 2                         # two: the same samples in the same updates

The model is a tiny Llama with random weights, so that nothing is downloaded. For a real one put `from_pretrained` and its
tokenizer into `build` and `samples`; the rest needs no change. The loss is the mean over the bytes of all answers of an update,
however long each is and however the samples are cut into micro-batches.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads sleep, before torch starts them

import importlib
import inspect
from pathlib import Path
from typing import Annotated, Any

import ignite.distributed as idist
import torch
import typer
from ignite.engine import Events
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup
from typer import Option

from ignite_train import ForwardOutput, ResumableLoader, attach_defaults, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, LearningRateSchedule, Validation
from launching import launch, number_of_processes

MODULES = ("argparse", "ast", "calendar", "collections", "difflib", "email.utils", "fractions", "functools", "heapq", "inspect")
MICRO_BATCH, ACCUMULATION_STEPS, LENGTH = 8, 2, 96
IGNORED = -100  # the label of bytes that are not learned: the question, and the filling of a row


def samples() -> list[tuple[list[int], list[int]]]:
    """Pairs of bytes: the name and arguments of a function, and the first line of its docstring."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and function.__doc__:
                question = f"{name}({', '.join(inspect.signature(function).parameters)}) # "[:LENGTH]
                found[name] = list(question.encode()), list(f"{function.__doc__.strip().splitlines()[0]}\n"[:LENGTH].encode())
    return [found[name] for name in sorted(found)]


def collate(chosen: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    """A micro-batch of rows that are filled up at their right; labels are for the answers alone."""
    rows = [torch.tensor(question + answer) for question, answer in chosen]
    labels = [torch.tensor([IGNORED] * len(question) + answer) for question, answer in chosen]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def loaders() -> tuple[ResumableLoader, DataLoader[Any]]:
    """Of what is learned, in another order in each epoch, and of every eighth sample, which is held out."""
    data = samples()
    learned = [sample for index, sample in enumerate(data) if index % 8]
    share = MICRO_BATCH // idist.get_world_size()
    return (
        ResumableLoader(learned, share, shuffle=True, seed=0, seed_samples=False, collate_fn=collate),
        DataLoader(data[::8][idist.get_rank() :: idist.get_world_size()], batch_size=32, collate_fn=collate),
    )


def build() -> nn.Module:
    """The model with its adapters, which are all that is trained."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, max_position_embeddings=2 * LENGTH, pad_token_id=0, initializer_range=0.2, **sizes)
    )
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    return adapted


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of the adapters."""
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


def forward(model: nn.Module, batch: dict[str, Tensor]) -> ForwardOutput:
    """The loss summed over the bytes of the answers, and how many they are."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return ForwardOutput(loss, sample_size=(labels != IGNORED).sum(), logs={"accuracy": (logits.argmax(-1) == labels).sum()})


def train(_local_rank: int, epochs: int, directory: Path) -> tuple[nn.Module, list[float], dict[str, Any]]:
    """The run; returns the model, the loss of each update, and what the last validation has found."""
    torch.set_num_threads(1)
    model = build().to(idist.device())
    optimizer = optimizer_of(model)
    wrapped = idist.auto_model(model) if idist.get_world_size() > 1 else model
    trainer = create_trainer(wrapped, optimizer, forward, accumulation_steps=ACCUMULATION_STEPS, max_grad_norm=1.0)
    loader, held_out = loaders()
    total = trainer.total_updates(loader, max_epochs=epochs)
    LearningRateSchedule(get_linear_schedule_with_warmup(optimizer, total // 10, total)).attach(trainer)
    evaluator = create_evaluator(model, forward)
    Validation(evaluator, held_out).attach(trainer)
    Checkpoint(directory, frozen="once").attach(trainer)
    attach_defaults(trainer, evaluator=evaluator, directory=directory)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.update_output.loss))
    trainer.run(loader, max_epochs=epochs)
    if idist.get_rank() == 0:
        model.save_pretrained(directory / "adapters")  # for peft's from_pretrained
    return model, losses, dict(evaluator.state.metrics)


def main(
    nproc: Annotated[int, Option(min=1, help="Processes to start; leave at 1 under torchrun.")] = 1,
    epochs: Annotated[int, Option(min=1, help="Passes over the samples.")] = 20,
    directory: Annotated[Path, Option(help="Where metrics, checkpoints and the adapters lie.")] = Path("runs/lora"),
) -> None:
    """Fine-tune a language model with LoRA."""
    launch(train, number_of_processes(nproc), epochs, directory)


if __name__ == "__main__":
    typer.run(main)
