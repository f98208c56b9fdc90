"""The tensors that an average of a model's weights consists of, by plain names, and moving an average towards them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.internals.of_torch import WRAPPED, RunningNorm, foreach_lerp_
from ignite_train.model.composed_tensor import is_composed
from ignite_train.model.reshard import reshard

__all__ = [
    "averaged_statistics",
    "averaged_tensors",
    "can_move",
    "check_alike",
    "in_order_of",
    "local_tensors",
    "move_towards",
    "names_of_tensors",
    "plain_name",
]

plain_name: Callable[[str], str] = partial(re.compile("|".join(rf"{name}\." for name in WRAPPED)).sub, "")
"""The name of a parameter, buffer or module without what `torch.compile` and activation checkpointing add to it."""


def averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Averages are of these, by name: parameters, as shards where they are sharded, and statistics of normalisation layers."""
    reshard(model)  # an evaluation by another engine may have left whole parameters in their place
    parameters = {plain_name(name): value for name, value in model.named_parameters()}
    return {name: value for name, value in parameters.items() if _has_average(value)} | averaged_statistics(model)


def _has_average(value: Tensor) -> bool:
    """Whether it is of numbers that can be averaged. Quantised weights that are frozen are not, and stay what they are."""
    return (value.is_floating_point() or value.is_complex()) and (value.requires_grad or not is_composed(value))


def can_move(value: Tensor) -> bool:
    """Whether a step, or an average that is kept in its dtype, can move it. Torch has no arithmetic in floats of one byte."""
    return value.requires_grad or (value.itemsize > 1 and _has_average(value))


def averaged_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running means and variances of the normalisation layers that have them."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, RunningNorm) and module.running_mean is not None:
            for name in ("running_mean", "running_var"):
                found[plain_name(f"{prefix}.{name}".lstrip("."))] = module.get_buffer(name)
    return found


def names_of_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under each of their names."""
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, value in named:
            yield plain_name(name), value


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, or the shards of this rank, which share their memory. Call it under `no_grad`."""
    return [value.to_local() if isinstance(value, DTensor) else value for value in tensors]


def check_alike(
    averages: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    rule: str = "a model must keep the parameters that its average follows",
    remedy: str = "call remove() on what attach returned, and attach another to the changed model",
) -> None:
    """Raises ValueError, in these words, unless both have the same names, and shapes and shards by these names."""
    wrong = sorted(averages.keys() ^ weights.keys()) or [n for n in averages if _kind(averages[n]) != _kind(weights[n])]
    if wrong:
        raise ValueError(f"{rule}, got a difference in {wrong[0]!r}; {remedy}")


def in_order_of(averages: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The weights, or the shards of this rank, in the order of their averages: a module may have been put in again.

    Raises:
        ValueError: the names differ.
    """
    if weights.keys() != averages.keys():
        check_alike(averages, weights)
    return local_tensors(weights[name] for name in averages)


def move_towards(averages: Mapping[str, Tensor], weights: Mapping[str, Tensor], share: float) -> None:
    """Moves each average: average ← average + share · (weight - average), in one call of a kernel.

    Args:
        averages: by name; changed in place.
        weights: by the same names; on another device or in another dtype they are copied first.
        share: in [0, 1].
    """
    with torch.no_grad():
        moved, targets = local_tensors(averages.values()), in_order_of(averages, weights)
        targets = [target.to(average.device, average.dtype) for target, average in zip(targets, moved, strict=True)]
        foreach_lerp_(moved, targets, share)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """The shape and the sharding, which two tensors must share to be averaged."""
    return (tensor.shape, tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else (tensor.shape,)
