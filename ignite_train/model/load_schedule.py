"""How a learning-rate schedule takes a state of a checkpoint, which has a dict for every kind of mapping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from ignite_train.internals.of_torch import parts_of_schedule

__all__ = ["load_schedule"]


def load_schedule(schedule: LRScheduler, state: Mapping[str, Any]) -> None:
    """Loads a state into a schedule, and gives each `MultiStepLR` in it the `Counter` of milestones that it counts on."""
    schedule.load_state_dict(dict(state))
    _count_milestones(schedule)


def _count_milestones(schedule: LRScheduler) -> None:
    if isinstance(schedule, MultiStepLR) and isinstance(schedule.milestones, Mapping):
        schedule.milestones = Counter(schedule.milestones)
    for part in parts_of_schedule(schedule):
        _count_milestones(part)
