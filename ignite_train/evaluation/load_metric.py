"""Metrics of Ignite that take over a state from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from ignite.metrics import Metric
from torch import Tensor

from ignite_train.internals.of_ignite import device_of_metric, states_of_metric
from ignite_train.ranks import collectives

__all__ = ["load_metric"]


class _Spot(NamedTuple):
    """Where a tensor of a state stands: its container and key there, the way to it, and the device of the metric around it."""

    container: Any
    key: Any
    path: tuple[Any, ...]
    device: torch.device | None


def load_metric(metric: Metric, state_dict: Any) -> None:
    """Loads a state into a metric, and into the metrics of its state, with each tensor where the metric adds up.

    A checkpoint gives tensors on the CPU, and Ignite's `load_state_dict` leaves them there; the next micro-batch on an
    accelerator would then end the run. A tensor goes to the device of the tensor that it replaces, or of the first one of its
    list. Where there was none, as in metrics that begin with a zero, None or an empty list, it goes to the device that the
    metric was made with. Containers stay the same objects.
    """
    if not isinstance(state_dict, Mapping):  # of a metric with a form of its own, or one that Ignite refuses
        metric.load_state_dict(state_dict)
        return
    before = {spot.path: spot.container[spot.key].device for spot in _spots(metric)}
    ranks = next(iter(state_dict.values()), None)
    if isinstance(ranks, (list, tuple)) and len(ranks) == collectives.world_size():
        _make_room(metric, ranks[collectives.rank()])
    metric.load_state_dict(state_dict)
    for container, key, path, device in _spots(metric):
        first = before.get((*path[:-1], 0)) if isinstance(container, list) else None
        place = before.get(path, first or device)
        if place is not None:
            container[key] = container[key].to(place)


def _spots(
    held: Any, path: tuple[Any, ...] = (), device: torch.device | None = None, seen: set[int] | None = None
) -> Iterator[_Spot]:
    """The tensors in the state of a metric, in its lists and dicts, and in the metrics there."""
    seen = set() if seen is None else seen
    if not isinstance(held, (Metric, dict, list)) or id(held) in seen:
        return
    seen.add(id(held))
    device = device_of_metric(held) if isinstance(held, Metric) else device
    container: Any = vars(held) if isinstance(held, Metric) else held
    for key in range(len(held)) if isinstance(held, list) else _names(held):
        if isinstance(container[key], Tensor):
            yield _Spot(container, key, (*path, key), device)
        else:
            yield from _spots(container[key], (*path, key), device, seen)


def _names(held: Metric | dict[Any, Any]) -> list[Any]:
    if isinstance(held, Metric):
        return [name for name in states_of_metric(held) if name in vars(held)]
    return [*held]


def _make_room(held: Any, saved: Any) -> None:
    """Lists of tensors get the lengths of the saved ones: Ignite loads a list, of predictions say, only over one as long.

    So do lists that are empty. Others, of a number for each class say, keep their length, by which Ignite knows another metric.
    """
    if isinstance(held, list) and isinstance(saved, list):
        if (not held and not any(isinstance(one, Mapping) for one in saved)) or (
            all(isinstance(one, Tensor) for one in (*held, *saved))
        ):
            held[:] = saved
        pairs = [*zip(held, saved, strict=False)]  # Ignite refuses other lengths
    elif isinstance(held, (Metric, dict)) and isinstance(saved, Mapping):
        entries = vars(held) if isinstance(held, Metric) else held
        pairs = [(entries[name], saved[name]) for name in _names(held) if name in saved]
    else:
        return
    for inside, value in pairs:
        _make_room(inside, value)
