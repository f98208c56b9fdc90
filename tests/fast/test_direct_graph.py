"""What inductor has compiled is called directly where the layers of torch around it do nothing, and through them elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.output_code import CompiledFxGraph

import compiling
from control_c import at_each_place, unlike
from ignite_train.fast import direct_graph
from ignite_train.fast.direct_graph import inductor

pytestmark = [*compiling.ALONE, pytest.mark.slow]


@pytest.fixture
def through_layers(monkeypatch: pytest.MonkeyPatch) -> list[CompiledFxGraph]:
    """The graphs that are called by the layers."""
    found: list[CompiledFxGraph] = []
    ordinary = CompiledFxGraph.__call__

    def call(graph: CompiledFxGraph, inputs: Any) -> Any:
        found.append(graph)
        return ordinary(graph, inputs)

    monkeypatch.setattr(CompiledFxGraph, "__call__", call)
    return found


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    backend = inductor({})
    assert backend is not None
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def stepped(parameter: Tensor, moment: Tensor, x: Tensor) -> Tensor:
    """Changes two of its inputs in place, as an update does. The product of matrices is made by torch, and not by inductor."""
    (gradient,) = torch.autograd.grad((x @ parameter).square().sum(), parameter)
    with torch.no_grad():
        moment.mul_(0.5).add_(gradient)
        parameter.sub_(moment)
    return gradient.square().sum()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(4, 3, requires_grad=True), torch.zeros(4, 3), torch.arange(20.0).view(5, 4) / 8


def test_the_second_call_goes_past_the_layers(through_layers):
    """Its results are the same bits, gradients are recorded afterwards as before, and what it changes has another version."""
    direct, ordinary = compiled(stepped), torch.compile(stepped, fullgraph=True, dynamic=False)
    ours, theirs = inputs(), inputs()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for number in range(4):
            before = [one._version for one in (*ours, *theirs)]
            mine = direct(*ours)
            assert len(through_layers) == 1 + number  # its first call, and those of the other
            other = ordinary(*theirs)
            assert torch.equal(mine, other)
            assert all(map(torch.equal, ours, theirs))
            assert not mine.requires_grad
            assert torch.is_grad_enabled()
            moved = [one._version > version for one, version in zip((*ours, *theirs), before, strict=True)]
            assert moved == [True, True, False] * 2


def test_control_c_leaves_gradients_on_and_the_class_of_graphs_alone():
    """In the first call, which is watched, and in the second one, which is direct."""
    ordinary = CompiledFxGraph.__call__

    def run(pressing: Callable[[], Any]) -> Any:
        torch.compiler.reset()
        direct = compiled(lambda x: x * 2)
        with suppress(KeyboardInterrupt), pressing():
            direct(torch.ones(3))
            direct(torch.ones(3))
        found = torch.is_grad_enabled(), CompiledFxGraph.__call__ is ordinary
        torch.set_grad_enabled(True)
        CompiledFxGraph.__call__ = ordinary
        return found

    assert unlike(at_each_place(run, direct_graph.direct_graph, direct_graph._watched)) == []


@pytest.mark.parametrize("name", ["returns-a-view", "under-autocast", "while-profiling", "of-inference-mode"])
def test_where_the_layers_do_something_they_are_kept(through_layers, name):
    """Outputs that are views of inputs are made by the layers; autocast and profilers are theirs too.

    Tensors of inference mode count no versions.
    """
    with torch.inference_mode(name == "of-inference-mode"):
        x = torch.arange(4.0)
    direct = compiled((lambda x: (x.view(2, 2), x + 1)) if name == "returns-a-view" else (lambda x: (x * 2, x + 1)))
    if name == "under-autocast":
        with torch.autocast("cpu", torch.bfloat16):
            results = [direct(x) for _ in range(3)]
    elif name == "while-profiling":
        direct(x)
        with torch.autograd.profiler.profile():
            results = [direct(x) for _ in range(2)]
    else:
        results = [direct(x) for _ in range(3)]
    assert len(through_layers) == 3
    assert all(torch.equal(one, other) for result in results for one, other in zip(result, results[0], strict=True))
    if name == "returns-a-view":
        assert all(result[0].data_ptr() == x.data_ptr() for result in results)


def test_other_backends_are_left_alone():
    """Only inductor's code is known here."""
    assert inductor({"backend": "eager"}) is None
    assert inductor({"dynamic": True}) is None
    assert inductor({"mode": "max-autotune-no-cudagraphs", "options": {"cpp_wrapper": True}}) is None  # torch.compile refuses
    assert inductor({"backend": "inductor", "options": {"cpp_wrapper": True}}) is not None
    assert inductor({"backend": "inductor", "mode": None, "options": {"cpp_wrapper": True}}) is not None
