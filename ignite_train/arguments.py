"""Checks of arguments: one line that names the argument, its value, what is allowed and what to do."""

from __future__ import annotations

import argparse
import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "AMOUNT",
    "ANYTHING",
    "COUNT",
    "COUNTS",
    "FLAG",
    "MAPPING",
    "NUMBER",
    "NUMBERS",
    "SEQUENCE",
    "TEXT",
    "TEXTS",
    "Field",
    "check_fields",
    "check_same_model",
    "describe",
    "describe_error",
    "did_you_mean",
    "directory_of",
    "field_names",
    "mapping_of",
    "named_ranks",
    "one_of",
    "optional",
    "path_of",
    "path_on_command_line",
    "positive_int",
    "real_number",
    "settings_of",
    "whole_number",
]


_MAX_COUNT = 2**53


class Field(NamedTuple):
    """The kind of an entry of a state.

    Attributes:
        what: in words.
        accepts: whether a value is that.
    """

    what: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < _MAX_COUNT)


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


ANYTHING = Field("anything", lambda _: True)
COUNT = Field("an integer of at least 0", lambda value: type(value) is int and 0 <= value < _MAX_COUNT)
COUNTS = Field(
    "integers of at least 0 by name", lambda value: isinstance(value, Mapping) and all(map(COUNT.accepts, value.values()))
)
NUMBER = Field("a number", _is_number)
AMOUNT = Field("a number of at least 0", lambda value: _is_number(value) and value >= 0)
FLAG = Field("True or False", lambda value: isinstance(value, bool))
TEXT = Field("a string", lambda value: isinstance(value, str))
TEXTS = Field("a list of strings", lambda value: isinstance(value, (list, tuple)) and _are_texts(value))
MAPPING = Field("a mapping", lambda value: isinstance(value, Mapping))
SEQUENCE = Field("a list", lambda value: isinstance(value, (list, tuple)))
NUMBERS = Field(
    "numbers by name", lambda value: isinstance(value, Mapping) and _are_texts(value) and all(map(_is_number, value.values()))
)


def optional(field: Field) -> Field:
    """The field, or None."""
    return Field(f"{field.what}, or None", lambda value: value is None or field.accepts(value))


def check_fields(owner: str, state_dict: Any, fields: Mapping[str, Field]) -> None:
    """Checks that `state_dict` has all `fields`, of the kinds that they must have: a file may hold anything.

    Other keys are left alone, since a class of the user's may add some. A key that a later version adds must be read with a
    default and not be among `fields`, because the checkpoints of earlier versions lack it.

    Raises:
        TypeError: `state_dict` is not a mapping.
        ValueError: a key is missing, or a value is of another kind.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be what {owner}.state_dict() gave, got {describe(state_dict)}")
    missing = [key for key in fields if key not in state_dict]
    if missing:
        raise ValueError(f"state_dict must have the keys of {owner}.state_dict(), got one without {', '.join(missing)}")
    for key, field in fields.items():
        if not field.accepts(state_dict[key]):
            raise ValueError(
                f"state_dict[{key!r}] must be {field.what}, got {state_dict[key]!r:.60}; it is not that of {owner}"
            )


def field_names(kind: Any) -> tuple[set[str], set[str]]:
    """The names that the record of a dataclass must have, and all that it may: a field with a default may be newer than it."""
    needed = {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}
    return needed, {one.name for one in fields(kind)}


def check_same_model(saved: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Checks that the tensors of a state are of the model whose `tensors` it is to replace, by their names and shapes.

    Raises:
        ValueError: one is missing, or has another shape.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"state_dict must be of the same model, got {describe(saved)}")
    found = ((name, saved.get(name), value) for name, value in tensors.items())
    wrong = [name for name, other, value in found if not isinstance(other, Tensor) or other.shape != value.shape]
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


def path_on_command_line(text: str) -> Path:
    """The `type` of a path of a command: no shell replaces the `~` of `--output=~/model.pt`."""
    try:
        return path_of("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def directory_of(name: str, value: Any) -> Path:
    """Returns `value` as the absolute path of a directory that is there or can be made, as far as can be told.

    So a script that goes into another directory later still means this one.

    Raises:
        TypeError: `value` is not a path.
        ValueError: files can never be written there.
    """
    directory = path_of(name, value).absolute()
    above = next((path for path in (directory, *directory.parents) if path.exists() or path.is_symlink()), directory)
    problem = ""
    if above.exists() and not above.is_dir():
        problem = (
            f"got {str(value)!r}, where {str(above)!r} is a file" if above != directory else f"got the file {str(value)!r}"
        )
    elif above.is_symlink() and not above.exists():
        link = f"{str(above)!r} is a link to a path that does not exist"
        problem = f"got {str(value)!r}, where {link}; create its target, or remove the link"
    elif above.exists() and not os.access(above, os.W_OK | os.X_OK):
        problem = f"got {str(value)!r}, where {str(above)!r} may not be written to"
    if problem:
        raise ValueError(f"{name} must be a directory, or not exist yet, {problem}")
    return directory


def mapping_of(name: str, value: Any) -> dict[str, Any]:
    """Returns `value` as a dict; None is an empty one.

    Raises:
        TypeError: `value` is not a mapping.
    """
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping, got {describe(value)}; vars({name}) makes one of a Namespace")
    return dict(value or {})


def describe(value: Any) -> str:
    """Returns the value, cut to 60 characters on one line, and its type, for a message."""
    return f"{' '.join(repr(value).split()):.60} of type {type(value).__name__}"


def describe_error(error: BaseException) -> str:
    """Returns its class and its message, where it has one, for a message; its `__str__` may fail."""
    try:
        text = str(error).strip()
    except Exception as failure:
        text = f"(its text could not be made: {type(failure).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
