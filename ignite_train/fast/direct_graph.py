"""Calling what inductor has compiled directly, past the layers of torch that do nothing for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ignite_train.internals.of_torch import version_of

__all__ = ["direct_graph", "inductor"]

_watching = threading.RLock()  # a call is watched in the class of all graphs

Compiled = Callable[..., Any]
"""Takes the inputs of a graph and gives its outputs, in a list or a tuple."""


def inductor(settings: Mapping[str, Any]) -> Callable[[torch.fx.GraphModule, list[Tensor]], Compiled] | None:
    """Torch's default backend, whose graphs are called directly.

    Args:
        settings: arguments of `torch.compile`.

    Returns:
        The backend; None if these settings name another one, or are more than it takes, or this torch has it elsewhere.

    Raises:
        RuntimeError: inductor does not know an option.
    """
    if not settings.keys() <= {"backend", "mode", "options"} or settings.get("backend", "inductor") != "inductor":
        return None
    make = vars(torch).get("_TorchCompileInductorWrapper")  # what torch.compile makes of them
    mode, options = settings.get("mode"), settings.get("options")
    if make is None or (mode and options):  # of which torch.compile takes one
        return None
    backend = make(mode, options, None)
    return lambda graph, inputs: direct_graph(backend(graph, inputs))


def direct_graph(compiled: Compiled) -> Compiled:
    """Makes later calls of a compiled graph faster, if the first one shows that the layers around it do nothing.

    What torch compiles is code of inductor's inside layers that were made for the graph: they may drop, copy or replace inputs
    and outputs, and what they do does not depend on the call. The first call goes through all of them and is watched. Where
    the code was given the very inputs, in their order, and its outputs are what came back, later calls go straight to the
    code. What is left of the layers is done here: no gradients are recorded, and the inputs that the graph changes count one
    version more. This is for the CPU; elsewhere, under autocast, and while a profiler runs, calls go through the layers.

    Args:
        compiled: what the backend has made of a graph. The caller knows by guards that it fits the inputs.
    """
    code: Compiled | None = None
    changed: tuple[int, ...] = ()
    is_watched = False

    def call(*inputs: Any) -> Any:
        nonlocal code, changed, is_watched
        if not is_watched:
            is_watched = True
            outputs, code, changed = _watched(compiled, inputs)
            return outputs
        if code is None or torch.autograd.profiler._is_profiler_enabled:
            return compiled(*inputs)
        torch.autograd.graph.increment_version([inputs[index] for index in changed])
        records = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return code([*inputs])
        finally:
            torch._C._set_grad_enabled(records)

    return call


def _watched(compiled: Compiled, inputs: Sequence[Any]) -> tuple[Any, Compiled | None, tuple[int, ...]]:
    """Calls it.

    Returns:
        The outputs; the code inside, if it can be called directly; and which inputs it has changed.
    """
    try:
        from torch._inductor.output_code import CompiledFxGraph
    except ImportError:
        return compiled(*inputs), None, ()
    if not all(map(_is_plain, inputs)) or torch._C._is_any_autocast_enabled():
        return compiled(*inputs), None, ()
    calls: list[tuple[Any, list[Any], Any]] = []

    def watching(graph: Any, given: Any) -> Any:
        kept = [*given]  # the code empties the list
        returned = ordinary(graph, given)
        calls.append((graph, kept, returned))
        return returned

    versions = [version_of(one) for one in inputs]
    with _watching:
        ordinary = CompiledFxGraph.__call__
        try:
            CompiledFxGraph.__call__ = watching  # type: ignore[assignment, method-assign]
            outputs = compiled(*inputs)
        finally:
            CompiledFxGraph.__call__ = ordinary  # type: ignore[method-assign]
    changed = tuple([index for index, one in enumerate(inputs) if version_of(one) != versions[index]])
    if len(calls) != 1:
        return outputs, None, changed
    (graph, given, returned), made = calls[0], [*outputs]
    same = _are_same(given, inputs) and _are_same([*returned], made)
    code = vars(graph).get("current_callable") if same and not any(one.requires_grad for one in made) else None
    return outputs, code, changed


def _is_plain(one: Any) -> bool:
    return isinstance(one, Tensor) and one.device.type == "cpu" and not one.is_inference()


def _are_same(ones: Sequence[object], others: Sequence[object]) -> bool:
    return len(ones) == len(others) and all(map(is_, ones, others))
