"""Checks of arguments: one line that names the argument, its value, what is allowed and what to do."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

__all__ = ["nearest", "one_of", "positive_int", "real_number", "shown"]


def positive_int(name: str, value: Any) -> int:
    """Returns `value` as an int of at least 1.

    Raises:
        TypeError: it is no integer (a bool is none).
        ValueError: it is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a positive integer, got {shown(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return int(value)


def real_number(name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
    """Returns `value` as a finite float within the bounds.

    Raises:
        TypeError: it is no real number (a bool is none).
        ValueError: it is NaN, infinite or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}")
    if number <= above:
        raise ValueError(f"{name} must be greater than {above:g}, got {value!r}")
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least:g}, got {value!r}")
    return number


def one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """Returns `value` if it is one of `choices`.

    Raises:
        ValueError: it is none of them; the message names the nearest.
    """
    choices = tuple(choices)
    if isinstance(value, str) and value in choices:
        return value
    allowed = ", ".join(repr(choice) for choice in choices)
    raise ValueError(f"{name} must be one of {allowed}, got {value!r}{nearest(value, choices)}")


def shown(value: Any) -> str:
    """Returns the value and its type for a message: one line, however the value prints, and a short one."""
    return f"{' '.join(repr(value).split()):.60} of type {type(value).__name__}"


def nearest(value: Any, choices: Iterable[str]) -> str:
    """Returns `"; did you mean '...'?"` for a misspelt name, or nothing if no choice is near."""
    by_folded = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(str(value).lower(), by_folded, n=1, cutoff=0.5)
    return f"; did you mean {by_folded[matches[0]]!r}?" if matches else ""
