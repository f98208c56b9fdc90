"""A run in a few lines: its model, its device, what an update is, and how many there will be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from ignite_train.ranks import collectives
from ignite_train.state import TrainState

__all__ = ["introduction", "precision_of"]

_MANY = 10_000_000  # parameters
_PREFIXES = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


def introduction(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    config: Mapping[str, Any],
    state: TrainState,
    *,
    updates: int | None,
    data_ranks: int,
) -> list[str]:
    """Two lines: the model and its device, and the updates. Further lines tell of what many do not expect.

    They name a loader which gives all samples to each rank, and an optimizer that would be quicker fused.

    Args:
        model: without its wrapper.
        optimizers: all of them.
        config: how the trainer was made.
        state: with the limits of the run, as far as they are known, and the loader, if there is one.
        updates: of the whole run; None if unknown.
        data_ranks: how many ranks, or groups of them, have samples of their own.
    """
    parameters, ranks, optimizers = [*model.parameters()], collectives.world_size(), [*optimizers]
    total, trained = (sum(p.numel() for p in parameters if p.requires_grad or not only) for only in (False, True))
    size = f"{_rounded(total)} parameters" + (f", {_rounded(trained)} of them trained" if trained < total else "")
    steps = config.get("accumulation_steps", 1)
    device = f"{parameters[0].device}" + (f" × {ranks} ranks" if ranks > 1 else "")
    names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    return [
        f"{type(model).__name__}, {size}, on {device} in {precision_of(model, config)}, {names}",
        f"{_updates(updates, state)}: {_of_each(steps, data_ranks, state)}",
        *_undealt(state.dataloader, data_ranks),
        *_unfused(optimizers),
    ]


def precision_of(model: nn.Module, config: Mapping[str, Any]) -> str:
    """The precision of forward: `"fp32"`, the dtype of autocast, or the dtypes of the parameters if they are not all float32.

    Integers, such as quantised weights, are not counted, since forward does not compute in them.
    """
    precision = str(config.get("precision", "fp32"))
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point() or parameter.is_complex()}
    if dtypes <= {torch.float32}:
        return precision
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    return names if precision == "fp32" else f"{precision} with parameters in {names}"


def _undealt(data: Any, data_ranks: int) -> Iterator[str]:
    """Where torch's own samplers go through all samples on each rank. They may be its own, so nothing warns of it."""
    batches = data.batch_sampler if type(data) is DataLoader else None
    sampler = batches.sampler if type(batches) is BatchSampler else None
    is_random = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if data_ranks > 1 and (is_random or type(sampler) is SequentialSampler):
        yield f"each of {data_ranks} ranks reads all of its DataLoader; unless that is its share, use a ResumableLoader"


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
    return f"{updates} in {state.max_epochs} epoch" + "s" * (state.max_epochs != 1)


def _of_each(accumulation_steps: Any, data_ranks: int, state: TrainState) -> str:
    """The samples of an update: those of a micro-batch, times micro-batches, times ranks with samples of their own."""
    data, several = state.dataloader, accumulation_steps != 1
    size = data.batch_size if isinstance(data, DataLoader) else None
    on_ranks = f" × {data_ranks} ranks" if data_ranks > 1 else ""
    up_to = "up to " * (state.epoch_length == 1)  # all the data may be less
    if size is None or not isinstance(accumulation_steps, int):
        return f"{up_to * several}{accumulation_steps} micro-batch{'es' * several}{on_ranks} each"
    samples = size * accumulation_steps * data_ranks
    return f"{up_to}{samples} samples each ({size} × {accumulation_steps} micro-batches{on_ranks})"


def _rounded(number: int) -> str:
    """`"1.23M"`."""
    return next((f"{number / unit:.3g}{prefix}" for unit, prefix in _PREFIXES if number >= unit), str(number))
