"""Checks of arguments: one line that names the argument, its value, what is allowed and what to do."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

__all__ = [
    "check_same_model",
    "check_state_dict",
    "describe",
    "did_you_mean",
    "named_ranks",
    "one_of",
    "path_of",
    "positive_int",
    "real_number",
    "settings_of",
    "whole_number",
]


def check_state_dict(owner: str, state_dict: Any, keys: Iterable[str], counters: Iterable[str]) -> None:
    """Checks that `state_dict` has all `keys`, and that those in `counters` are integers of at least 0.

    Raises:
        TypeError: `state_dict` is not a mapping.
        ValueError: a key is missing, or a counter is not an integer of at least 0.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be what {owner}.state_dict() gave, got {describe(state_dict)}")
    missing = [key for key in keys if key not in state_dict]
    if missing:
        raise ValueError(f"state_dict must have the keys of {owner}.state_dict(), got one without {', '.join(missing)}")
    for key in counters:
        if isinstance(state_dict[key], bool) or not isinstance(state_dict[key], int) or state_dict[key] < 0:
            raise ValueError(f"state_dict[{key!r}] must be an integer of at least 0, got {state_dict[key]!r}")


def check_same_model(saved: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Checks that the tensors of a state are of the model whose `tensors` it is to replace, by their names and shapes.

    Raises:
        ValueError: one is missing, or has another shape.
    """
    wrong = [name for name, value in tensors.items() if name not in saved or saved[name].shape != value.shape]
    if wrong:
        raise ValueError(f"state_dict must be of the same model, got one without a fitting {wrong[0]!r}")


def positive_int(name: str, value: Any) -> int:
    """Returns `value` as an int of at least 1.

    Raises:
        TypeError: `value` is not an integer, or is a bool.
        ValueError: `value` is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a positive integer, got {describe(value)}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return int(value)


def real_number(name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf) -> float:
    """Returns `value` as a finite float within the bounds.

    Raises:
        TypeError: `value` is not a real number, or is a bool.
        ValueError: `value` is NaN, infinite or out of bounds.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {describe(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}")
    if number <= above:
        raise ValueError(f"{name} must be greater than {above:g}, got {value!r}")
    if number < at_least:
        raise ValueError(f"{name} must be at least {at_least:g}, got {value!r}")
    return number


def whole_number(name: str, value: Any) -> int:
    """Returns `value` as an int of at least 0; a float without a fraction is taken.

    Raises:
        TypeError: `value` is not a real number, or is a bool.
        ValueError: `value` is negative, not finite or has a fraction.
    """
    number = real_number(name, value, at_least=0)
    if isinstance(value, Integral):  # a float does not hold all digits of a seed of 64 bits
        return int(value)
    if number != int(number):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(number)


def one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """Returns `value` if it is one of `choices`.

    Raises:
        ValueError: `value` is not one of them; the message names the nearest.
    """
    choices = tuple(choices)
    if isinstance(value, str) and value in choices:
        return value
    allowed = ", ".join(repr(choice) for choice in choices)
    raise ValueError(f"{name} must be one of {allowed}, got {value!r}{did_you_mean(value, choices)}")


def path_of(name: str, value: Any) -> Path:
    """Returns `value` as a path, in which a `~` at the beginning is the home directory.

    Raises:
        TypeError: `value` is not a path.
        ValueError: the home directory is not known.
    """
    if not isinstance(value, (str, PathLike)) or isinstance(value, bytes):
        raise TypeError(f"{name} must be a path, got {describe(value)}")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"{name} must not begin with an unknown '~', got {str(value)!r}; write the whole path") from None


def describe(value: Any) -> str:
    """Returns the value, cut to 60 characters on one line, and its type, for a message."""
    return f"{' '.join(repr(value).split()):.60} of type {type(value).__name__}"


def named_ranks(ranks: Sequence[int], one: str = "", several: str = "") -> str:
    """The subject of a message, `"rank 1"` or `"ranks 1, 3"`, followed by its verb where there is one."""
    subject, verb = ("rank", one) if len(ranks) == 1 else ("ranks", several)
    return f"{subject} {', '.join(map(str, ranks))} {verb}".rstrip()


def did_you_mean(value: Any, choices: Iterable[str]) -> str:
    """Returns `"; did you mean '...'?"` for a misspelt name, and `""` if no choice is near."""
    by_folded = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(str(value).lower(), by_folded, n=1, cutoff=0.5)
    return f"; did you mean {by_folded[matches[0]]!r}?" if matches else ""


def settings_of(entry: object) -> dict[str, Any]:
    """The arguments of an object's construction that are attributes too, where they are plain values."""
    names = inspect.signature(type(entry)).parameters
    return {name: value for name, value in vars(entry).items() if name in names and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
