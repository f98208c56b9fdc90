"""Metrics of Ignite that take over a state from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from ignite.metrics import Metric
from torch import Tensor

from ignite_train.internals.of_ignite import device_of_metric, states_of_metric
from ignite_train.internals.of_torch import pytree
from ignite_train.ranks import collectives

__all__ = ["load_metric"]


def load_metric(metric: Metric, state_dict: Mapping[str, Any]) -> None:
    """Loads a state into a metric, and into the metrics inside of it, with each tensor where the metric adds up.

    A checkpoint gives tensors on the CPU, and Ignite's `load_state_dict` leaves them there; the next micro-batch on an
    accelerator would then end the run. A tensor goes to the device of the tensor that it replaces. Where there was none, as in
    metrics that begin with a zero, None or an empty list, it goes to the device that the metric was made with.
    """
    ranks = next(iter(state_dict.values()), None)
    if isinstance(ranks, (list, tuple)) and len(ranks) == collectives.world_size():
        _make_room(metric, ranks[collectives.rank()])
    places = [(vars(one), name, _place(one, name)) for one in _metrics_in(metric) for name in states_of_metric(one)]
    metric.load_state_dict(state_dict)
    for attributes, name, device in places:
        if device is not None and name in attributes:
            attributes[name] = _moved(attributes[name], device)


def _metrics_in(metric: Metric) -> Iterator[Metric]:
    """The metric, and the metrics that it holds: of a group, or the arguments of a function."""
    yield metric
    for leaf in pytree.tree_leaves([*vars(metric).values()]):
        if isinstance(leaf, Metric):
            yield from _metrics_in(leaf)


def _place(metric: Metric, name: str) -> torch.device | None:
    """Where a tensor of this attribute belongs; None where the metric does not say."""
    held = vars(metric).get(name)
    return held.device if isinstance(held, Tensor) else device_of_metric(metric)


def _moved(value: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def _make_room(held: Any, saved: Any) -> None:
    """Lists get the lengths of those that are loaded: Ignite loads a list, of predictions say, only over one as long."""
    held = vars(held) if isinstance(held, Metric) else held
    if isinstance(held, list) and isinstance(saved, list):
        if not any(isinstance(leaf, Metric) for leaf in pytree.tree_leaves(held)):
            held[:] = saved
        pairs = [*zip(held, saved, strict=False)]  # Ignite refuses other lengths
    elif isinstance(held, dict) and isinstance(saved, Mapping):
        pairs = [(held[name], value) for name, value in saved.items() if name in held]
    else:
        return
    for inside, value in pairs:
        _make_room(inside, value)
