"""Putting back what measuring on copies can still change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ignite_train.model.memory_layout import own_memory
from ignite_train.model.modules_used import modules_used
from ignite_train.model.random_state import (
    capture_random_state,
    generators_within,
    get_generator_state,
    restore_random_state,
    set_generator_state,
)

__all__ = ["untouched"]


@contextmanager
def untouched(modules: Iterable[nn.Module], functions: Iterable[Any], loader: Any) -> Iterator[None]:
    """At the end of this `with`, also after an exception or Ctrl-C, these are bit by bit what they were at its beginning.

    The default random generators, those that the loader holds, torch's number of threads; and the gradients, buffers and modes
    of the modules, and of those that the functions use from outside, such as a loss with a buffer.

    Args:
        modules: of the user.
        functions: of the user.
        loader: of the user.
    """
    used = {id(part): part for module in [*modules, *modules_used(functions)] for part in module.modules()}
    parameters = {id(p): p for module in used.values() for p in module.parameters(recurse=False)}.values()
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    buffers = [(buffer, own_memory(buffer).clone()) for module in used.values() for buffer in module.buffers(recurse=False)]
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
                own_memory(buffer).copy_(values)
        for module, training in modes:
            module.training = training
        for generator, state in generators:
            set_generator_state(generator, state)
        restore_random_state(random_state)
