"""Which settings can be varied in a training, and the values to try for each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ignite_train.arguments import describe, did_you_mean, positive_int, whole_number
from ignite_train.tuning.settings import Settings
from ignite_train.update.compilation import Compile

__all__ = ["COMPILE_VALUES", "Dimension", "dimensions", "present_layout"]

COMPILE_VALUES: tuple[Compile, ...] = (False, True)  # the values of `compile` that are tried
_STEP = 1.5  # one size of micro-batches is at least this many times the one before


class Dimension(NamedTuple):
    """One setting, and the values to try.

    Attributes:
        name: of the setting.
        values: all values, with the present one; in order of size where `is_ordered`.
        is_ordered: whether a value that is slower makes those behind it not worth trying.
    """

    name: str
    values: tuple[Any, ...]
    is_ordered: bool

    def directions(self, settings: Settings) -> list[list[Any]]:
        """The other values: those above and those below, from near to far; or all of them."""
        now = getattr(settings, self.name)
        if not self.is_ordered:
            return [[value for value in self.values if value != now]]
        return [[value for value in self.values if value > now], [value for value in reversed(self.values) if value < now]]

    def apply(self, settings: Settings, value: Any) -> Settings:
        """These settings with another value. The samples of an update stay."""
        changes = {self.name: value}
        if self.name == "micro_batch" and settings.micro_batch is not None:
            changes["accumulation_steps"] = settings.micro_batch * settings.accumulation_steps // value
        return replace(settings, **changes)


def dimensions(
    present: Settings,
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    why_fixed: Mapping[str, str],
    given: Mapping[str, Iterable[Any]],
) -> tuple[list[Dimension], dict[str, str]]:
    """What to vary, in the order in which it is searched; compiling is last, since it costs most.

    Args:
        present: the settings of the program.
        model: the user's.
        optimizers: the user's.
        why_fixed: settings that the loader does not allow to vary, by name, with the reason.
        given: values by name, from the user, in place of the usual ones; none leaves a setting alone.

    Returns:
        The dimensions with more than the present value, and why the other settings are left alone, by name.

    Raises:
        TypeError: `given` is not a mapping of names to values.
        ValueError: a name is unknown, or a value cannot be tried.
    """
    usual = {
        "threads": _powers() if all(p.device.type == "cpu" for p in model.parameters()) else (),
        "micro_batch": _sizes(present),
        "fused": _fused(present, optimizers),
        "channels_last": (False, True) if any(p.dim() == 4 for p in model.parameters()) else (),
        "workers": (0, *_powers()),
        "compile": COMPILE_VALUES,
    }
    reasons = {
        "micro_batch": "the samples of an update cannot be divided otherwise",
        "fused": "the optimizer has no argument of this name",
        "channels_last": "no weight has 4 dimensions",
        "threads": "the model computes on an accelerator",
        **why_fixed,
    }
    chosen = {**usual, **_checked(present, given, usual)}
    found, left_alone = [], {}
    for name, values in chosen.items():
        now = getattr(present, name)
        others = () if name in why_fixed else [value for value in values if value != now]
        if others:
            is_ordered = name in ("micro_batch", "threads", "workers")
            found.append(Dimension(name, tuple(sorted([now, *others]) if is_ordered else [now, *others]), is_ordered))
        elif name in given and name not in why_fixed:
            left_alone[name] = "left out by values"
        else:
            left_alone[name] = reasons.get(name, "there is one value")
    return found, left_alone


def _checked(present: Settings, given: Any, usual: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    if not isinstance(given, Mapping):
        raise TypeError(f'values must be a mapping such as {{"threads": [1, 2]}}, got {describe(given)}')
    chosen = {}
    for name, values in given.items():
        if name not in usual:
            raise ValueError(f"values must have keys among {', '.join(usual)}, got {name!r}{did_you_mean(name, usual)}")
        if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
            raise TypeError(f"values[{name!r}] must be a list of values, got {describe(values)}")
        chosen[name] = tuple(_value(name, value) for value in values)
    total = (present.micro_batch or 1) * present.accumulation_steps
    for size in chosen.get("micro_batch", ()):
        if present.micro_batch is not None and total % size:
            raise ValueError(f"values['micro_batch'] must divide the {total} samples of an update, got {size}")
    return chosen


def _value(name: str, value: Any) -> Any:
    if name in ("micro_batch", "threads"):
        return positive_int(f"values[{name!r}]", value)
    if name == "workers":
        return whole_number(f"values[{name!r}]", value)
    if name in ("fused", "channels_last") and not isinstance(value, bool):
        raise TypeError(f"values[{name!r}] must hold True and False only, got {describe(value)}")
    return value


def _sizes(present: Settings) -> tuple[int, ...]:
    """Sizes of micro-batches that divide the samples of an update, above and below the present one."""
    if present.micro_batch is None:
        return ()
    now, total = present.micro_batch, present.micro_batch * present.accumulation_steps
    divisors = [size for size in range(1, total + 1) if total % size == 0]
    above, below = [now], [now]
    for size in divisors:
        if size >= above[-1] * _STEP:
            above.append(size)
    for size in reversed(divisors):
        if size * _STEP <= below[-1]:
            below.append(size)
    return (*reversed(below[1:]), *above)


def _fused(present: Settings, optimizers: Iterable[Optimizer]) -> tuple[bool | None, ...]:
    if not any("fused" in optimizer.defaults for optimizer in optimizers):
        return ()
    return (None, True) if present.fused is None else (False, True)


def _powers() -> tuple[int, ...]:
    """Powers of 2 up to the processors that this process may use, and their number."""
    number = len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count() or 1
    powers = [1 << exponent for exponent in range(number.bit_length())]
    return tuple(dict.fromkeys([*powers, number]))


def present_layout(model: nn.Module) -> bool:
    """Whether weights of 4 dimensions lie as `torch.channels_last`."""
    weights = [p for p in model.parameters() if p.dim() == 4 and not p.is_contiguous()]
    return any(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
