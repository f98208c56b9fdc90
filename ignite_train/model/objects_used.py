"""The modules, generators, containers and functions that a function of a user refers to, such as a teacher or a counter."""

from __future__ import annotations

import dis
import enum
import os
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import CallableProxyType, ProxyType

import torch
from torch import Tensor, nn

from ignite_train.internals.of_torch import forward_hooks_of, forward_pre_hooks_of

__all__ = ["CONTAINERS", "MAX_ENTRIES", "attributes_of", "is_accounted_for", "objects_used", "variables_around"]

MAX_ENTRIES = 1000  # of a container that is looked into, which may hold the data
CONTAINERS = (list, dict, set, deque)
_NUMBERS = (type(None), bool, int, float, complex, str, bytes, range, enum.Enum)
_OF_TORCH = (Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (*_NUMBERS, *_OF_TORCH, ModuleType, type, BuiltinFunctionType)
_FIXED = (tuple, frozenset)
_ASSIGNS = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"}
_EMPTY = CellType()
_OURS = str(Path(__file__).parents[1])
_INSTALLED = (str(Path(os.__file__).parent), str(Path(torch.__file__).parents[1]))


def objects_used(functions: Iterable[Any]) -> Iterator[Any]:
    """What these functions are, or find in the scopes around them, in their object, in containers, or by way of others.

    Functions of installed packages are not looked into, and of modules only what their classes and hooks refer to.

    Args:
        functions: of a user, such as `forward` and a loss; and modules.
    """
    known = (nn.Module, FunctionType, MethodType, partial)
    queue = [one if isinstance(one, known) else one.__call__ for one in functions]  # of another object that can be called
    seen = dict[int, Any]()
    for value in queue:  # grows
        if id(value) not in seen:
            seen[id(value)] = value  # held, so that no other object gets its address
            yield value
            queue += _used_by(value)


def variables_around(function: FunctionType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Finds the variables around a function, and the global ones, that it refers to; those without a value are left out.

    `inspect.getclosurevars` raises where one has none.
    """
    code, everywhere = function.__code__, function.__globals__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    around = {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}
    return around, {name: everywhere[name] for name in code.co_names if name in everywhere}


def is_accounted_for(value: Any) -> bool:
    """Whether what `value` holds is watched by others, cannot change, or can be copied and put back.

    Iterators, files, and objects that hold others are not accounted for, nor is a function that assigns variables around it.
    """
    if isinstance(value, FunctionType):
        return not any(step.opname in _ASSIGNS and _is_outside(step, value) for step in dis.get_instructions(value))
    if type(value) in (*CONTAINERS, *_FIXED):
        return len(value) <= MAX_ENTRIES
    return isinstance(value, (nn.Module, MethodType, partial, *_PLAIN)) or attributes_of(value) is not None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object of a class written in Python that holds nothing but numbers, texts and the like."""
    if isinstance(value, (Namespace, SimpleNamespace)):
        return vars(value)
    if type(value).__base__ is not object or type(value).__dictoffset__ == 0 or isinstance(value, _PLAIN):
        return None
    attributes = vars(value)
    return attributes if all(isinstance(one, _PLAIN) for one in attributes.values()) else None


def _used_by(value: Any) -> Iterable[Any]:
    if isinstance(value, nn.Module):
        return _code_of(value)
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, MethodType):
        return value.__func__, value.__self__, *_held_by(value.__self__)
    if isinstance(value, FunctionType):
        return _around(value)
    if type(value) in (*CONTAINERS, *_FIXED) and len(value) <= MAX_ENTRIES:
        return [*(value.values() if isinstance(value, dict) else value)]
    attributes = attributes_of(value)
    return [] if attributes is None else [*_functions_in(type(value)), *attributes.values()]


def _held_by(owner: Any) -> Iterable[Any]:
    with suppress(TypeError):  # an object without attributes
        return () if isinstance(owner, nn.Module) else vars(owner).values()
    return ()


def _around(function: FunctionType) -> list[Any]:
    """The values in the scopes around a function."""
    file = function.__code__.co_filename
    if file.startswith(_OURS):  # what the library wraps a function of the user in
        return [one for one in variables_around(function)[0].values() if not _is_ours(one)]
    if file.startswith(_INSTALLED):
        return []
    around, everywhere = variables_around(function)
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*around.values(), *everywhere.values(), *defaults]


def _code_of(module: nn.Module) -> list[Any]:
    """The functions of the classes in a module that a user wrote, and its hooks."""
    kinds = {type(one) for one in module.modules()}
    found = [one for kind in kinds if not kind.__module__.startswith("torch.") for one in _functions_in(kind)]
    return found + [
        hook for one in module.modules() for hook in (*forward_hooks_of(one).values(), *forward_pre_hooks_of(one).values())
    ]


def _functions_in(kind: type) -> list[FunctionType]:
    return [one for one in vars(kind).values() if isinstance(one, FunctionType)]


def _is_ours(value: Any) -> bool:
    """Whether it is an object of the library, or a weak reference to one."""
    return type(value) in (ProxyType, CallableProxyType) or type(value).__module__.startswith("ignite_train.")


def _is_outside(step: dis.Instruction, function: FunctionType) -> bool:
    return "GLOBAL" in step.opname or step.argval in function.__code__.co_freevars
