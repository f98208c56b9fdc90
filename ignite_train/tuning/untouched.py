"""Putting back what measuring on copies can still change."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ignite_train.model.random_state import (
    capture_random_state,
    generators_within,
    get_generator_state,
    restore_random_state,
    set_generator_state,
)

__all__ = ["untouched"]

_MAX_ENTRIES = 1000  # of a list that is looked into, which may hold the data


@contextmanager
def untouched(modules: Iterable[nn.Module], functions: Iterable[Any], loader: Any) -> Iterator[None]:
    """At the end of this `with`, also after an exception or Ctrl-C, these are bit by bit what they were at its beginning.

    The default random generators, those that the loader holds, torch's number of threads; and the gradients, buffers and modes
    of the modules, and of those that the functions use from outside, such as a loss with a buffer: from the scopes around them,
    from the object whose method they are, and from other functions of the same file.

    Args:
        modules: of the user.
        functions: of the user.
        loader: of the user.
    """
    used = {id(part): part for module in [*modules, *_modules_used(functions)] for part in module.modules()}
    parameters = {id(p): p for module in used.values() for p in module.parameters(recurse=False)}.values()
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    buffers = [(buffer, buffer.clone()) for module in used.values() for buffer in module.buffers(recurse=False)]
    modes = [(module, module.training) for module in used.values()]
    threads, random_state = torch.get_num_threads(), capture_random_state()
    generators = [(generator, get_generator_state(generator)) for generator in generators_within(loader).values()]
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with torch.no_grad():
            for parameter, gradient, values in gradients:
                parameter.grad = gradient if gradient is None or values is None else gradient.copy_(values)
            for buffer, values in buffers:
                buffer.copy_(values)
        for module, training in modes:
            module.training = training
        for generator, state in generators:
            set_generator_state(generator, state)
        restore_random_state(random_state)


def _modules_used(functions: Iterable[Any]) -> Iterator[nn.Module]:
    """The modules that these functions are or use."""
    known = (nn.Module, FunctionType, MethodType, partial)
    queue = [one if isinstance(one, known) else one.__call__ for one in functions]  # of another object that can be called
    seen = set[int]()
    for value in queue:  # grows
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        else:
            queue += _used_by(value)


def _used_by(value: Any) -> list[Any]:
    """What a function finds in the scopes around it, or in its object; and what is in a list or in a mapping."""
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
