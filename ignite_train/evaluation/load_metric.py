"""Metrics of Ignite that take over a state from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from ignite.metrics import Metric
from torch import Tensor

from ignite_train.internals.of_ignite import device_of_metric
from ignite_train.ranks import collectives

__all__ = ["load_metric"]


def load_metric(metric: Metric, state_dict: Any) -> None:
    """Loads a state into a metric, and into the metrics of its state, with each tensor where the metric adds up.

    A checkpoint gives tensors on the CPU, and Ignite's `load_state_dict` leaves them there; the next micro-batch on an
    accelerator would then end the run. A tensor goes to the device of the tensor that it replaces, or of the first one of its
    list. Where there was none, as in metrics that begin with a zero, None or an empty list, it goes to the device that the
    metric was made with. Containers stay the same objects.
    """
    if isinstance(state_dict, Mapping) and state_dict:
        name, ranks = next(iter(state_dict.items()))  # Ignite's form: the states of all ranks
        if isinstance(ranks, (list, tuple)) and len(ranks) == collectives.world_size():
            own = collectives.rank()
            state_dict = {**state_dict, name: [*ranks[:own], _placed(metric, ranks[own], None), *ranks[own + 1 :]]}
    metric.load_state_dict(state_dict)


def _placed(held: Any, saved: Any, device: torch.device | None) -> Any:
    """The saved value with its tensors where they belong, by what the metric holds in its place; lists make room for it.

    Args:
        held: what the metric holds.
        saved: what the checkpoint has.
        device: for tensors that replace none.
    """
    if isinstance(held, Metric):
        held, device = vars(held), device_of_metric(held)
    if isinstance(saved, Tensor):
        place = held.device if isinstance(held, Tensor) else device
        return saved if place is None else saved.to(place)
    if isinstance(saved, Mapping):
        known = held if isinstance(held, Mapping) else {}
        return {name: _placed(known.get(name), value, device) for name, value in saved.items()}
    if not isinstance(saved, list):
        return saved
    listed = held if isinstance(held, list) else []
    first = listed[0].device if listed and isinstance(listed[0], Tensor) else device
    pairs = zip_longest(listed[: len(saved)], saved)
    placed = [_placed(one, value, first) for one, value in pairs]
    if isinstance(held, list) and _may_have_grown(held, saved):
        held[:] = placed
    return placed


def _may_have_grown(held: list[Any], saved: list[Any]) -> bool:
    """Whether a list has the length of what was seen, such as predictions; Ignite loads a list only over one as long.

    So have lists of tensors, and lists that are empty. Others, of a number for each class say, keep their length, by which
    Ignite knows another metric.
    """
    if not held:
        return not any(isinstance(one, Mapping) for one in saved)
    return all(isinstance(one, Tensor) for one in (*held, *saved))
