"""The modules, generators and the like that a function of a user refers to, such as a teacher or a loss with a buffer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

__all__ = ["modules_used", "objects_used"]

_MAX_ENTRIES = 1000  # of a list that is looked into, which may hold the data


def modules_used(functions: Iterable[Any]) -> Iterator[nn.Module]:
    """The modules among `objects_used`."""
    return (one for one in objects_used(functions) if isinstance(one, nn.Module))


def objects_used(functions: Iterable[Any]) -> Iterator[Any]:
    """What these functions are, or find in the scopes around them, in their object, or by way of others.

    Of lists and mappings the entries are looked at, and of functions those that are defined beside them in the same file.

    Args:
        functions: of a user, such as `forward` and a loss.
    """
    known = (nn.Module, FunctionType, MethodType, partial)
    queue = [one if isinstance(one, known) else one.__call__ for one in functions]  # of another object that can be called
    seen = set[int]()
    for value in queue:  # grows
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            queue += [] if isinstance(value, nn.Module) else _used_by(value)


def _used_by(value: Any) -> list[Any]:
    """Objects that a function can reach: closure, globals, `self`, and items of containers."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        with suppress(TypeError):  # an object without attributes
            return [value.__func__, value.__self__, *vars(value.__self__).values()]
    if isinstance(value, FunctionType):
        with suppress(ValueError):  # a variable around it has no value yet
            scopes = inspect.getclosurevars(value)
            found = [*scopes.nonlocals.values(), *scopes.globals.values()]
            return [one for one in found if not isinstance(one, FunctionType) or one.__module__ == value.__module__]
    if type(value) in (list, tuple, dict) and len(value) <= _MAX_ENTRIES:
        return list(value.values() if type(value) is dict else value)
    return []
