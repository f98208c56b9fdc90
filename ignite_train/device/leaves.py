"""The leaves of a micro-batch: what is moved, compared and cut, in any nesting of containers."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ignite_train.internals.of_torch import pytree

__all__ = ["leaves", "map_leaves", "own_to"]

Whole = Callable[[Any], bool]
"""Says of a part of a micro-batch that it is not taken apart, although it is a container."""


def map_leaves(change: Callable[[Any], Any], micro_batch: Any, *, whole: Whole) -> Any:
    """The micro-batch with each leaf changed; containers are rebuilt, and keep their class.

    Taken apart are dicts, lists, tuples, named tuples and whatever else is registered with torch's pytree, and also
    `UserDict`, dataclasses and `SimpleNamespace`. Their attributes are set on a shallow copy: no constructor is called.

    Args:
        change: gives what takes the place of a leaf.
        micro_batch: any value.
        whole: containers that are leaves.
    """

    def changed(part: Any) -> Any:
        found = None if whole(part) else _fields_of(part)
        if found is None:
            return change(part)
        new = {name: map_leaves(change, value, whole=whole) for name, value in found.items()}
        if all(new[name] is value for name, value in found.items()):
            return part
        result = copy.copy(part)
        for name, value in new.items():
            object.__setattr__(result, name, value)  # a frozen dataclass has no other way
        return result

    return pytree.tree_map(changed, micro_batch, is_leaf=lambda part: whole(part) or _fields_of(part) is not None)


def leaves(micro_batch: Any, *, whole: Whole = lambda _: False) -> list[Any]:
    """The leaves in the order in which `map_leaves` goes through them."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(note, micro_batch, whole=whole)
    return found


@lru_cache(maxsize=256)
def own_to(kind: type) -> Callable[..., Any] | None:
    """The `to` method of a class that is no tensor. A named tuple with a field of that name does not have one."""
    if issubclass(kind, Tensor):
        return None
    found = next((vars(base)["to"] for base in kind.__mro__ if "to" in vars(base)), None)
    return found if callable(found) else None


def _fields_of(value: Any) -> dict[str, Any] | None:
    """The attributes that hold the parts of a container that pytree does not know; None for everything else."""
    if isinstance(value, (UserDict, SimpleNamespace)):
        return vars(value)
    if not _is_plain_dataclass(type(value)):  # type: ignore[arg-type]  # a type is hashable
        return None
    return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}


@lru_cache(maxsize=256)
def _is_plain_dataclass(kind: type) -> bool:
    """Whether a class is one whose fields are all that it holds: one that is a dict too must keep both alike."""
    return is_dataclass(kind) and not issubclass(kind, (dict, list, tuple, Tensor, nn.Module))
