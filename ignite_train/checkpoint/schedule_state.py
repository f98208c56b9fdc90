"""Whether the state of a learning-rate schedule that a checkpoint holds can be that of a schedule in this run.

torch's `load_state_dict` of a schedule sets any attributes that it is given, unchecked.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.arguments import describe
from ignite_train.checkpoint.reader import TensorClaim
from ignite_train.errors import CheckpointError
from ignite_train.model.warm_up_schedule import WarmUpSchedule

__all__ = [
    "check_schedule",
    "describe_schedule",
    "rescale_schedule",
    "schedule_changes",
    "schedules_of",
    "why_not_rescaled",
]

_PROGRESS = {"last_epoch", "base_lrs", "verbose", "T_cur", "T_i", "best", "cooldown_counter", "num_bad_epochs"}
_PROPORTIONAL = (
    schedulers.ChainedScheduler,
    schedulers.ConstantLR,
    schedulers.CosineAnnealingLR,
    schedulers.CosineAnnealingWarmRestarts,
    schedulers.ExponentialLR,
    schedulers.LambdaLR,
    schedulers.LinearLR,
    schedulers.MultiplicativeLR,
    schedulers.MultiStepLR,
    schedulers.PolynomialLR,
    schedulers.SequentialLR,
    schedulers.StepLR,
    WarmUpSchedule,
)
"""Those whose rate is a multiple of the base rate, if their `eta_min` is 0."""


@runtime_checkable
class _HasSchedule(Protocol):
    """A handler that steps one of torch's schedules, such as `LearningRateSchedule`."""

    scheduler: Any


def schedules_of(entries: Mapping[str, Any]) -> dict[str, LRScheduler]:
    """The schedules of torch among what is saved, by name."""
    found = {name: entry.scheduler if isinstance(entry, _HasSchedule) else entry for name, entry in entries.items()}
    return {name: schedule for name, schedule in found.items() if isinstance(schedule, LRScheduler)}


def describe_schedule(schedule: LRScheduler) -> dict[str, Any]:
    """What a checkpoint stores beside the state, so that the next run can compare."""
    return {"class": type(schedule).__qualname__, "options": _options(schedule.state_dict())}


def check_schedule(
    path: str, name: str, schedule: LRScheduler, saved: Any, description: Any, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Checks that a saved state is of this schedule.

    Args:
        path: of the checkpoint.
        name: of the schedule.
        schedule: of this run, fresh.
        saved: its state in the checkpoint.
        description: what `describe_schedule` gave for it; None if it is not known.
        groups: the parameter groups of its optimizer, as saved; those that were added later have no base rate.

    Raises:
        CheckpointError: it is of another schedule.
    """
    problem = _why_other(schedule, saved, description, len(groups)) or _why_not_stepped(schedule, saved, groups)
    if problem:
        handler = name.partition("/")[2]
        raise CheckpointError(
            f"{path} is of another schedule at {name!r}: {problem}; build the one that was saved, or restart it with "
            f"Checkpoint(..., leave_out=({handler!r},))"
        )


def schedule_changes(name: str, schedule: LRScheduler, description: Any) -> list[str]:
    """What the script sets to other values than the script that wrote the checkpoint, whose values are used."""
    before = description.get("options") if isinstance(description, Mapping) else None
    now = _options(schedule.state_dict())
    return [
        f"{name}.{key}: {before[key]!r} -> {now[key]!r} (the checkpoint's is used)"
        for key in now
        if isinstance(before, Mapping) and key in before and before[key] != now[key]
    ]


def why_not_rescaled(schedule: Any) -> str:
    """Why the rates of a schedule cannot follow the optimizer's `lr` of the script; empty if they can."""
    if not isinstance(schedule, _PROPORTIONAL):
        return f"{type(schedule).__name__} does not compute its rates as multiples of lr"
    values = schedule.state_dict()
    if values.get("eta_min"):
        return f"{type(schedule).__name__} has eta_min={values['eta_min']!r}, which is not a multiple of lr"
    return next((reason for part in _parts(schedule) if (reason := why_not_rescaled(part))), "")


def rescale_schedule(schedule: LRScheduler, optimizer: Optimizer, bases: Sequence[float]) -> None:
    """Gives a schedule other base rates at its current place; the rates of `optimizer` are multiples of them already."""
    if "base_lrs" in vars(schedule):  # a sequence of schedules has none of its own
        schedule.base_lrs = [*bases[: len(schedule.base_lrs)]]
    schedule._last_lr = [float(group["lr"]) for group in optimizer.param_groups]
    for part in _parts(schedule):
        rescale_schedule(part, optimizer, bases)


def _why_other(schedule: LRScheduler, saved: Any, description: Any, num_groups: int) -> str:
    mine = type(schedule).__qualname__
    if isinstance(description, Mapping) and description.get("class") != mine:
        return f"{description.get('class')!s:.60} wrote it, and this run has {mine}"
    if not isinstance(saved, Mapping):
        return f"it is {describe(saved)}"
    current = schedule.state_dict()
    public = {key for key in current if not key.startswith("_")} - _PROGRESS
    found = {key for key in saved if isinstance(key, str) and not key.startswith("_")} - _PROGRESS
    if public != found:
        return f"it has {sorted(found)!r:.200}, and {mine} has {sorted(public)!r:.200}"
    other = [key for key in sorted(public) if not _same_kind(current[key], saved[key])]
    if other:
        return f"its {other[0]} is {describe(saved[other[0]])} and not like {current[other[0]]!r:.60}"
    for key in ("base_lrs", "_last_lr"):
        if key in current and not (isinstance(saved.get(key), list) and 0 < len(saved[key]) <= num_groups):
            return f"it has {saved.get(key)!r:.60} for the {num_groups} parameter groups"
    return ""


def _why_not_stepped(schedule: LRScheduler, saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """Why the next step with a saved state fails, where one with the state of the fresh schedule does not.

    Only those of torch and of this library are tried: a step of another class may need more, or do more.
    """
    if not f"{type(schedule).__module__}.".startswith(("torch.", "ignite_train.")):
        return ""
    if isinstance(schedule, schedulers.OneCycleLR) and saved.get("last_epoch") == saved.get("total_steps"):
        return ""  # it is at its end, and torch raises at one more step
    problem = _failure(schedule, saved, groups)
    return problem if problem and not _failure(schedule, schedule.state_dict(), schedule.optimizer.param_groups) else ""


def _failure(schedule: LRScheduler, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """How a step of a copy of the schedule fails on an optimizer without a model; empty if it does not."""
    stand_in = SGD([{"params": [torch.zeros(1)]} for _ in groups], lr=0.1)
    for group, options in zip(stand_in.param_groups, groups, strict=True):
        group |= {key: _plain_option(value) for key, value in options.items() if key not in ("params", "param_names")}
    try:
        tried: Any = copy.deepcopy(schedule, {id(schedule.optimizer): stand_in})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the order of steps, which is not that of a training
            tried.load_state_dict(copy.deepcopy({key: value for key, value in state.items() if key != "_latest_update"}))
            tried.step(*([1.0] if isinstance(tried, schedulers.ReduceLROnPlateau) else []))
            _options(tried.state_dict())
        rates = [float(group["lr"]) for group in stand_in.param_groups]
    except Exception as error:
        return f"its next step fails by {type(error).__name__}: {error!s:.200}"
    return "" if all(map(math.isfinite, rates)) else f"its next step sets the learning rates {rates!r:.100}"


def _plain_option(value: Any) -> Any:
    """An option as the stand-in takes it; instead of a tensor that is not read yet, or lies on a device, some number."""
    return 0.1 if isinstance(value, (Tensor, TensorClaim)) else copy.deepcopy(value)


def _same_kind(mine: Any, other: Any) -> bool:
    """Whether another value of an option may stand in the place of one: a number for a number, a string for a string."""
    kinds = ((bool,), (int, float), (str,))
    return next((type(other) in kind for kind in kinds if type(mine) in kind), True)


def _options(state: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a script sets, if they are plain values."""
    return {
        key: value
        for key, value in state.items()
        if not key.startswith("_") and key not in _PROGRESS and (value is None or isinstance(value, (bool, int, float, str)))
    }


def _parts(schedule: Any) -> list[LRScheduler]:
    parts = vars(schedule).get("_schedulers", ())
    return [part for part in parts if isinstance(part, LRScheduler)]
