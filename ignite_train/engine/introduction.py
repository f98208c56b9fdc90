"""A run in a few lines: its model, its device, what an update is, and how many there will be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from ignite_train.ranks import collectives
from ignite_train.state import TrainState

__all__ = ["introduction"]

_MANY = 10_000_000  # parameters
_PREFIXES = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


def introduction(
    model: nn.Module, optimizers: Iterable[Optimizer], config: Mapping[str, Any], updates: int | None, state: TrainState
) -> list[str]:
    """Two lines: what is trained where, and what the updates are. A third names an optimizer that would be quicker fused.

    Args:
        model: without its wrapper.
        optimizers: all of them.
        config: how the trainer was made.
        updates: of the whole run; None if unknown.
        state: with the limits of the run, as far as they are known, and the loader, if there is one.
    """
    parameters, ranks, optimizers = [*model.parameters()], collectives.world_size(), [*optimizers]
    total, trained = (sum(p.numel() for p in parameters if p.requires_grad or not only) for only in (False, True))
    size = f"{_rounded(total)} parameters" + (f", {_rounded(trained)} of them trained" if trained < total else "")
    steps = config.get("accumulation_steps", 1)
    device = f"{parameters[0].device}" + (f" × {ranks} ranks" if ranks > 1 else "")
    names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    return [
        f"{type(model).__name__}, {size}, on {device} in {config.get('precision', 'fp32')}, {names}",
        f"{_updates(updates, state)}: {_of_each(steps, ranks, state.dataloader)}",
        *_unfused(optimizers),
    ]


def _unfused(optimizers: Sequence[Optimizer]) -> Iterator[str]:
    """Where a step takes long enough to be noticed: its passes over memory grow with the parameters."""
    for optimizer in optimizers:
        number = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        is_fused = any(
            group.get(name) for group in optimizer.param_groups for name in ("fused", "capturable", "differentiable")
        )
        if type(optimizer) in (Adam, AdamW) and number >= _MANY and not is_fused:
            name, many = type(optimizer).__name__, _rounded(number)
            yield f"{name} reads its {many} parameters several times a step; {name}(..., fused=True) reads them once"


def _updates(number: int | None, state: TrainState) -> str:
    updates = "updates" if number is None else f"{number} updates"
    if state.max_epochs is None:
        return updates
    epochs = f"{state.max_epochs} epoch" + "s" * (state.max_epochs != 1)
    return epochs if number is None else f"{updates} in {epochs}"


def _of_each(accumulation_steps: Any, ranks: int, data: Any) -> str:
    """The samples of an update: those of a micro-batch, times micro-batches, times ranks."""
    size = data.batch_size if isinstance(data, DataLoader) else None
    on_ranks = f" × {ranks} ranks" if ranks > 1 else ""
    if size is None or not isinstance(accumulation_steps, int):
        return f"{accumulation_steps} micro-batch{'es' * (accumulation_steps != 1)}{on_ranks} each"
    return f"{size * accumulation_steps * ranks} samples each ({size} × {accumulation_steps} micro-batches{on_ranks})"


def _rounded(number: int) -> str:
    """`"1.23M"`."""
    return next((f"{number / unit:.3g}{prefix}" for unit, prefix in _PREFIXES if number >= unit), str(number))
