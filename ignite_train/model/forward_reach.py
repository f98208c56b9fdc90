"""Objects outside of the model that another run of a user's function could change, as far as its code shows."""

from __future__ import annotations

import dis
import enum
import inspect
import os
from argparse import Namespace
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import is_
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import CallableProxyType, ProxyType

import torch
from torch import Tensor, nn

__all__ = ["ForwardReach"]

_NUMBERS = (type(None), bool, int, float, complex, str, bytes, range, enum.Enum)
_OF_TORCH = (Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (*_NUMBERS, *_OF_TORCH, ModuleType, type, BuiltinFunctionType)
_MOST_ENTRIES = 1000  # of a list, which may hold the data
_OF_EACH_MODULE = vars(nn.Module()).keys()
_CONTAINERS = (list, dict, set, deque)
_ASSIGNS = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"}
_OURS = str(Path(__file__).parents[1])
_OTHERS = (str(Path(os.__file__).parent), str(Path(torch.__file__).parents[1]))


class ForwardReach:
    """The modules, containers and functions that a function refers to, in the scopes around it, by way of others too.

    Functions of installed packages are taken to change nothing; so are builtins, and tensors, whose contents others watch.

    Args:
        functions: of a user, such as `forward`; and modules, whose classes are looked at.

    Attributes:
        is_known: whether all of it is of a kind whose changes can be put back: modules, and containers and simple objects of
            numbers, texts and the like. Iterators, files and objects that hold others are not.
        modules: those that were found.
    """

    def __init__(self, *functions: Any) -> None:
        self.is_known, self.modules = True, list[nn.Module]()
        self._containers: list[tuple[Any, Any]] = []
        queue, seen = list(functions), dict[int, Any]()
        while queue and self.is_known:
            value = queue.pop()
            if id(value) not in seen:
                seen[id(value)] = value  # held, so that no other object gets its address
                with suppress(ValueError):  # a variable around it has no value yet
                    queue += self._within(value)

    def put_back(self) -> None:
        """Puts back what containers and objects held when they were found."""
        for container, before in self._containers:
            same = len(container) == len(before) and all(map(is_, _flat(container), _flat(before)))
            if not same:
                container.clear()
                fill = container.update if isinstance(container, (dict, set)) else container.extend
                fill(before)

    def _within(self, value: Any) -> list[Any]:
        """The objects that a value refers to."""
        if isinstance(value, nn.Module):
            self.modules.append(value)
            self._note_attributes(value)
            return _code_of(value)
        if isinstance(value, _PLAIN):
            return []
        if isinstance(value, FunctionType):
            return self._around(value)
        if isinstance(value, (MethodType, partial)):
            return [value.__func__, value.__self__] if isinstance(value, MethodType) else _parts(value)
        if type(value) in (tuple, frozenset):
            return [*value]
        if type(value) in _CONTAINERS:
            return self._contents(value, value.values() if isinstance(value, dict) else value)
        attributes = vars(value) if isinstance(value, (Namespace, SimpleNamespace)) or _is_simple(value) else None
        if attributes is None:
            self.is_known = False
            return []
        methods = [one for one in vars(type(value)).values() if isinstance(one, FunctionType)]
        return [*methods, *self._contents(attributes, attributes.values())]

    def _around(self, function: FunctionType) -> list[Any]:
        """The values in the scopes around a function."""
        file, ours = function.__code__.co_filename, function.__code__.co_filename.startswith(_OURS)
        if not ours and file.startswith(_OTHERS):
            return []
        if any(step.opname in _ASSIGNS and _is_outside(step, function) for step in dis.get_instructions(function)):
            self.is_known = False
        scopes = inspect.getclosurevars(function)
        if ours:  # what the library wraps a function of the user in
            return [one for one in scopes.nonlocals.values() if not _is_ours(one)]
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return [*scopes.nonlocals.values(), *scopes.globals.values(), *defaults]

    def _note_attributes(self, module: nn.Module) -> None:
        """Notes the entries of the containers that modules hold. What else they hold is taken to stay as it is."""
        for attributes in map(vars, module.modules()):
            for name in attributes.keys() - _OF_EACH_MODULE:
                if isinstance(one := attributes[name], _CONTAINERS) and len(one) <= _MOST_ENTRIES:
                    self._containers.append((one, one.copy()))

    def _contents(self, container: Any, entries: Any) -> list[Any]:
        if len(container) > _MOST_ENTRIES:
            self.is_known = False
            return []
        self._containers.append((container, container.copy()))
        return [*entries]


def _flat(container: Any) -> Iterable[Any]:
    return chain.from_iterable(container.items()) if isinstance(container, dict) else container


def _code_of(module: nn.Module) -> list[Any]:
    """The functions of the classes in a module that a user wrote, and its hooks."""
    kinds = {type(one) for one in module.modules()}
    found = [one for kind in kinds if not kind.__module__.startswith("torch.") for one in vars(kind).values()]
    hooks = [hook for one in module.modules() for hook in (*one._forward_hooks.values(), *one._forward_pre_hooks.values())]
    return [one for one in found if isinstance(one, FunctionType)] + hooks


def _is_simple(value: Any) -> bool:
    """Whether it is an object of a class written in Python that holds nothing but numbers, texts and the like."""
    has_attributes = type(value).__base__ is object and type(value).__dictoffset__ != 0
    return has_attributes and all(isinstance(one, _PLAIN) for one in vars(value).values())


def _is_ours(value: Any) -> bool:
    """Whether it is an object of the library, or a weak reference to one."""
    return type(value) in (ProxyType, CallableProxyType) or type(value).__module__.startswith("ignite_train.")


def _is_outside(step: dis.Instruction, function: FunctionType) -> bool:
    return "GLOBAL" in step.opname or step.argval in function.__code__.co_freevars


def _parts(value: partial[Any]) -> list[Any]:
    return [value.func, *value.args, *value.keywords.values()]
