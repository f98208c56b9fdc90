"""The recipes of examples/ in plain torch, on one process, without checkpoints: what the trainer must be equal to.

Each takes the script, whose model, optimizer and data it uses, and the number of epochs. It returns what the `train` of the
script returns: the model, the loss of each update, and what the last evaluation has found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

Trained = tuple[nn.Module, list[float], dict[str, Any]]


def groups(loader: Any, epoch: int, size: int) -> Iterator[list[Any]]:
    """The micro-batches of each update of an epoch."""
    loader.set_epoch(epoch)
    micro_batches = iter(loader)
    while group := list(islice(micro_batches, size)):
        yield group


def divide_gradients(model: nn.Module, size: float) -> None:
    """Makes the mean gradient of the sum."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1 / size)


def finetune_lora(recipe: Any, epochs: int, _directory: Path) -> Trained:
    from transformers import get_linear_schedule_with_warmup

    model = recipe.build()
    optimizer, (loader, held_out) = recipe.optimizer_of(model), recipe.loaders()
    total = epochs * -(-len(loader) // recipe.ACCUMULATION_STEPS)
    schedule = get_linear_schedule_with_warmup(optimizer, total // 10, total)

    def summed(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        right = (logits.argmax(-1) == labels).sum()
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=recipe.IGNORED, reduction="sum"), right

    def count(batches: list[dict[str, torch.Tensor]]) -> int:
        return sum(int((batch["labels"][:, 1:] != recipe.IGNORED).sum()) for batch in batches)

    losses = []
    for epoch in range(epochs):
        model.train()
        for group in groups(loader, epoch, recipe.ACCUMULATION_STEPS):
            optimizer.zero_grad()
            size, found = count(group), 0.0
            for batch in group:
                loss, _ = summed(batch)
                loss.backward()
                found += loss.item()
            divide_gradients(model, size)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(found / size)
        model.eval()
        with torch.no_grad():
            both = [summed(batch) for batch in held_out]
    size = count(list(held_out))
    return (
        model,
        losses,
        {"loss": sum(float(one) for one, _ in both) / size, "accuracy": sum(int(one) for _, one in both) / size},
    )


def train_vit(recipe: Any, epochs: int, _directory: Path) -> Trained:
    from timm.utils import ModelEmaV3

    model = recipe.build()
    optimizer, (loader, held_out) = recipe.optimizer_of(model), recipe.loaders()
    average = ModelEmaV3(model, decay=recipe.AVERAGE_DECAY)
    schedule = recipe.schedule_of(optimizer, epochs * -(-len(loader) // recipe.ACCUMULATION_STEPS))
    losses: list[float] = []
    for epoch in range(epochs):
        model.train()
        for group in groups(loader, epoch, recipe.ACCUMULATION_STEPS):
            optimizer.zero_grad()
            size, found = sum(len(images) for images, _ in group), 0.0
            for images, targets in group:
                loss = -(targets * model(images).log_softmax(-1)).sum()
                loss.backward()
                found += loss.item()
            divide_gradients(model, size)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update(model)
            schedule.step_update(len(losses) + 1)
            losses.append(found / size)
        with torch.no_grad():
            right = [average.module.eval()(images).argmax(-1) == classes for images, classes in held_out]
    return average.module, losses, {"accuracy": float(torch.cat(right).double().mean())}


def segment_monai(recipe: Any, epochs: int, _directory: Path) -> Trained:
    from monai.metrics import DiceMetric
    from monai.networks.utils import one_hot

    model = recipe.build()
    optimizer, (loader, held_out) = recipe.optimizer_of(model), recipe.loaders()
    schedule, dice = recipe.schedule_of(optimizer, epochs), DiceMetric(include_background=False)
    losses: list[float] = []
    for epoch in range(epochs):
        model.train()
        for group in groups(loader, epoch, recipe.ACCUMULATION_STEPS):
            optimizer.zero_grad()
            size, found = sum(len(batch["image"]) for batch in group), 0.0
            for batch in group:
                loss = recipe.loss_of(model(batch["image"]), batch["label"]) * len(batch["image"])
                loss.backward()
                found += loss.item()
            divide_gradients(model, size)
            optimizer.step()
            losses.append(found / size)
        schedule.step()
        model.eval()
        dice.reset()
        with torch.no_grad():
            for batch in held_out:
                dice(one_hot(model(batch["image"]).argmax(1, keepdim=True), 2), one_hot(batch["label"], 2))
    return model, losses, {"dice": float(dice.aggregate())}


BY_HAND: dict[str, Callable[[Any, int, Path], Trained]] = {
    "finetune_lora": finetune_lora,
    "train_vit": train_vit,
    "segment_monai": segment_monai,
}
