"""The step of an optimizer as arithmetic, run operation by operation: torch's step, and torch's state after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ignite_train.fast.compiled_step import CompiledStep, stepped
from textbook import Textbook

Make = Callable[..., Optimizer]
KINDS: dict[str, Make] = {
    "sgd": partial(SGD, lr=0.1),
    "sgd-decay": partial(SGD, lr=0.1, weight_decay=0.1, maximize=True),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(Adam, lr=0.05, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3),
    "adam-amsgrad": partial(Adam, lr=0.05, amsgrad=True, maximize=True, eps=1e-3),
    "adam-decoupled": partial(Adam, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True, eps=1e-3),
    "adamw": partial(AdamW, lr=0.05, eps=1e-3),
    "adamw-fused": partial(AdamW, lr=0.05, eps=1e-3, fused=True, amsgrad=True),
}


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def set_gradients(model: nn.Module, number: int) -> None:
    """Others in each update; those of the second smaller, so that a largest moment is not the latest."""
    for place, parameter in enumerate(model.parameters()):
        values = torch.arange(parameter.numel(), dtype=torch.float64).view(parameter.shape)
        parameter.grad = ((values + place + 3 * number).cos() / (1 + 5 * (number == 1))).to(parameter.dtype)


class ByGraph:
    """Steps as a graph of a whole update does.

    Args:
        model: whose parameters are stepped.
        optimizer: which.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.step = model, CompiledStep(optimizer, model)

    def __call__(self) -> str | None:
        """Steps along the gradients, or gives the reason why no graph can."""
        if self.step.has_changed():
            self.step.look(frozenset(name for name, p in self.model.named_parameters() if p.grad is not None))
        begun = self.step.begin()
        if isinstance(begun, str):
            return begun
        plans, (states, given) = begun
        numbers = [torch.tensor(number, dtype=torch.float64) for number in given]
        states = [*states]
        for plan in plans:
            of_group, numbers = numbers[: plan.num_numbers], numbers[plan.num_numbers :]
            for parameter in map(self.model.get_parameter, plan.names):
                of_parameter, states = states[: plan.num_states], states[plan.num_states :]
                new, new_states = stepped(plan, of_group, parameter.detach(), parameter.grad, of_parameter)  # type: ignore[arg-type]
                with torch.no_grad():
                    for old, value in zip((parameter, *of_parameter), (new, *new_states), strict=True):
                        old.copy_(value)
        assert (numbers, states) == ([], [])
        self.step.commit()
        return None


def in_groups(make: Make, model: nn.Module) -> Optimizer:
    """With two groups of other options, of which the second has no weight decay."""
    first, last = model.children()
    return make([{"params": [*first.parameters()]}, {"params": [*last.parameters()], "lr": 0.02, "weight_decay": 0.0}])


@pytest.mark.parametrize("name", KINDS)
def test_it_steps_as_the_formulas_say(name):
    """Four steps of two groups, with a rate that changes, are those of the textbook in float64."""
    model, right = network(), network()
    optimizer, options = (in_groups(KINDS[name], one) for one in (model, right))
    step, textbook = ByGraph(model, optimizer), Textbook(options, [*right.parameters()])
    for number in range(4):
        for one in (optimizer, options):
            one.param_groups[0]["lr"] = 0.1 / (1 + number)
        set_gradients(model, number)
        set_gradients(right, number)
        assert step() is None
        textbook.step()
    for found, expected in zip(model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def changed(name: str, number: int, model: nn.Module, optimizer: Optimizer) -> None:
    """What a user does before update `number`."""
    if name == "frozen at first":
        model[0].requires_grad_(number > 0)  # type: ignore[index]
        if number == 0:
            model[0].weight.grad = model[0].bias.grad = None  # type: ignore[index]
    elif name == "maximised later" and number == 2:
        optimizer.param_groups[1]["maximize"] = True
    elif name == "cleared" and number == 2:
        optimizer.state.clear()


@pytest.mark.parametrize("change", ["nothing", "frozen at first", "maximised later", "cleared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", KINDS)
def test_its_state_is_torchs(name, dtype, change):
    """After steps of both in turn, weights and state are those of torch alone: keys, dtypes, strides and values."""
    ours, theirs = network(dtype), network(dtype)
    optimizers = [in_groups(partial(KINDS[name], foreach=None if "fused" in name else False), one) for one in (ours, theirs)]
    step = ByGraph(ours, optimizers[0])
    for number in range(4):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(model, number)
            changed(change, number, model, optimizer)
        assert number == 3 or step() is None
        for optimizer in optimizers[number != 3 :]:
            optimizer.step()
    tolerance = 1e-12 if dtype is torch.float64 else 2e-6  # the gradient enters the moments in another order of rounding
    for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    assert [[*state] for state in states[0].values()] == [[*state] for state in states[1].values()]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        for one, tensor in state.items():
            assert (tensor.dtype, tensor.stride()) == (states[1][key][one].dtype, states[1][key][one].stride())
            torch.testing.assert_close(tensor, states[1][key][one], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["sgd", "adamw-fused"])
def test_half_precision_is_rounded_once(name):
    """The step is that of float32, rounded to bfloat16 at its end."""
    model, right = network(torch.bfloat16), network(torch.bfloat16)
    optimizer, options = KINDS[name](model.parameters()), KINDS[name](right.parameters())
    for one in (model, right):
        set_gradients(one, 0)
    wide = [parameter.detach().double() for parameter in right.parameters()]
    for value, parameter in zip(wide, right.parameters(), strict=True):
        value.grad = parameter.grad.double()
    Textbook(options, wide).step()
    assert ByGraph(model, optimizer)() is None
    for found, expected in zip(model.parameters(), wide, strict=True):
        assert torch.equal(found, expected.to(torch.bfloat16))


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_scheduler_hears_of_the_step(name, recwarn):
    """It warns if it is stepped before the optimizer."""
    model = network()
    optimizer = KINDS[name](model.parameters())
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    set_gradients(model, 0)
    assert ByGraph(model, optimizer)() is None
    scheduler.step()
    assert [str(warning.message) for warning in recwarn] == []


# --- what is looked at again ---


def replace_module(model: Any, _: Optimizer) -> None:
    model[1] = nn.Linear(4, 2).double()


def replace_parameter(model: Any, _: Optimizer) -> None:
    model[1].bias = nn.Parameter(model[1].bias.detach().clone())


def add_parameter(model: Any, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})


def drop_parameter(model: Any, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def freeze(model: Any, _: Optimizer) -> None:
    model[0].bias.requires_grad_(False)


def switch(name: str, value: Any) -> Callable[[Any, Optimizer], None]:
    return lambda model, optimizer: optimizer.param_groups[0].update({name: value})


CHANGES: dict[str, tuple[Callable[[Any, Optimizer], None], bool]] = {
    "module": (replace_module, True),
    "parameter": (replace_parameter, True),
    "group": (add_parameter, True),
    "one less": (drop_parameter, True),
    "frozen": (freeze, True),
    "switched on": (switch("maximize", True), True),
    "switched off": (switch("weight_decay", 0.0), True),
    "rate": (switch("lr", 1.0), False),
    "betas": (switch("betas", (0.5, 0.5)), False),
    "decay": (switch("weight_decay", 0.3), False),
    "state": (lambda model, optimizer: optimizer.state.clear(), False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_graph_was_compiled_for_is_noticed_to_change(name):
    """Parameters and switches; numbers and states are given to each call."""
    model = network()
    optimizer = KINDS["adam"](model.parameters())
    step = ByGraph(model, optimizer)
    assert step.step.has_changed()
    set_gradients(model, 0)
    assert step() is None
    assert not step.step.has_changed()
    change, is_change = CHANGES[name]
    change(model, optimizer)
    assert step.step.has_changed() is is_change
    step.step.look(frozenset(name for name, p in model.named_parameters() if p.grad is not None))
    assert not step.step.has_changed()


def test_a_plan_tells_what_has_a_gradient_from_what_has_not():
    """Of those that are trained; a graph asks autograd for both."""
    model = network()
    model[1].bias.requires_grad_(False)  # type: ignore[index]
    step = CompiledStep(in_groups(KINDS["adam"], model), model)
    step.look(frozenset(["0.weight", "1.weight"]))
    begun = step.begin()
    assert not isinstance(begun, str)
    assert [(plan.names, plan.unused) for plan in begun[0]] == [(("0.weight",), ("0.bias",)), (("1.weight",), ())]


# --- what takes another way ---


def some_have_moments(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.pop(next(model.parameters()))


def none_for_a_moment(model: nn.Module, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = None


STATES: dict[str, tuple[str, Callable[[nn.Module, Optimizer], None], str]] = {
    "first gradient later": ("adam", some_have_moments, "some parameters of a group have all of their moments"),
    "as torch once wrote it": ("momentum", none_for_a_moment, "a parameter has None for a moment"),
    "foreign": ("adam", add_parameter, "a parameter of the optimizer is not in the model"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_no_graph_can_step(name):
    """The reason, before anything has changed."""
    kind, change, reason = STATES[name]
    model = network()
    optimizer = KINDS[kind](model.parameters())
    step = ByGraph(model, optimizer)
    set_gradients(model, 0)
    assert step() is None
    change(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert str(step()).startswith(reason)
    assert all(map(torch.equal, model.parameters(), before))


class Mine(AdamW):
    """A subclass, which might do anything."""


def of_a_later_torch(parameters: Any) -> Optimizer:
    optimizer = AdamW(parameters)
    optimizer.defaults["cautious"] = True
    return optimizer


NEVER: dict[str, tuple[Make, torch.dtype, str]] = {
    "another": (RMSprop, torch.float64, "the step of RMSprop is not known here as a formula"),
    "subclass": (Mine, torch.float64, "the step of Mine is not known here as a formula"),
    "option": (of_a_later_torch, torch.float64, "the optimizer has the option 'cautious', which is not known here"),
    "complex": (AdamW, torch.complex64, "a parameter has the dtype torch.complex64"),
}


@pytest.mark.parametrize("name", NEVER)
def test_optimizers_that_are_not_known(name):
    make, dtype, reason = NEVER[name]
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(2, dtype=dtype))})
    assert str(CompiledStep(make(model.parameters()), model).why_never()).startswith(reason)


@pytest.mark.parametrize("name", KINDS)
def test_optimizers_that_are_known(name):
    model = network()
    step = CompiledStep(KINDS[name](model.parameters()), model)
    assert (step.why_never(), step.why_not()) == (None, None)


def test_a_class_whose_step_is_not_torchs_is_not_known(monkeypatch):
    """What replaced it might do anything."""
    model = network()
    monkeypatch.setattr(SGD, "step", lambda self, closure=None: None)
    reason = CompiledStep(SGD(model.parameters(), lr=0.1), model).why_never()
    assert str(reason).startswith("the step of SGD is not known here as a formula")


@pytest.mark.parametrize("rate", [1, 0, np.float64(0.5)], ids=["integer", "zero", "of NumPy"])
def test_a_rate_may_be_any_number(rate):
    """A graph is given its value."""
    model, right = network(), network()
    for one in (model, right):
        set_gradients(one, 0)
    step = ByGraph(model, SGD(model.parameters(), lr=rate))
    assert step() is None
    assert step.step.why_not() is None
    SGD(right.parameters(), lr=float(rate)).step()
    for found, expected in zip(model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def replace_step(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step = lambda closure=None: None  # type: ignore[assignment,method-assign,misc]


WHY_NOT: dict[str, tuple[Callable[[Any, Optimizer], Any], str]] = {
    "pre-hook": (lambda m, o: o.register_step_pre_hook(lambda *_: None), "the optimizer's step has a hook"),
    "post-hook": (lambda m, o: o.register_step_post_hook(lambda *_: None), "the optimizer's step has a hook"),
    "hook": (lambda m, o: m[1].bias.register_hook(lambda g: g), "a parameter has a hook that looks at its gradient"),
    "late hook": (
        lambda m, o: m[1].bias.register_post_accumulate_grad_hook(lambda p: None),
        "a parameter has a hook that looks at its gradient",
    ),
    "step": (replace_step, "the optimizer's step has been replaced"),
    "differentiable": (switch("differentiable", True), "a group of the optimizer is differentiable, or has a tensor"),
    "rate": (switch("lr", torch.tensor(0.1)), "a group of the optimizer is differentiable, or has a tensor"),
    "first beta": (switch("betas", (torch.tensor(0.9), 0.9)), "a group of the optimizer has a tensor for a beta"),
    "second beta": (switch("betas", (0.9, torch.tensor(0.9))), "a group of the optimizer has a tensor for a beta"),
    "capturable": (switch("capturable", True), "a group of the optimizer is capturable on the CPU"),
    "infinite": (switch("lr", math.inf), "a learning rate is not finite"),
    "unknown": (switch("lr", math.nan), "a learning rate is not finite"),
}


@pytest.mark.parametrize("name", WHY_NOT)
def test_what_stands_in_the_way_of_a_graph(name):
    model = network()
    optimizer = KINDS["adam"](model.parameters())
    step = ByGraph(model, optimizer)
    set_gradients(model, 0)
    assert step() is None
    change, reason = WHY_NOT[name]
    change(model, optimizer)
    assert str(step.step.why_not()).startswith(reason)


@pytest.mark.parametrize(
    ("option", "reason"),
    [("fused", None), ("capturable", None), ("foreach", "the optimizer counts its steps on the CPU; make it with fused=True")],
)
def test_elsewhere_steps_are_counted_on_the_device(option, reason):
    """Adam's for-loops count them on the host, for which each update would wait."""
    model = nn.Linear(3, 1, device="meta")
    optimizer = Adam(model.parameters())
    optimizer.param_groups[0][option] = True
    step = CompiledStep(optimizer, model)
    assert step.why_not() == reason
    if reason is None:
        step.look(frozenset(["weight", "bias"]))
        begun = step.begin()
        assert not isinstance(begun, str)
        assert {state.device.type for state in begun[1].states} == {"meta"}


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook], ids=["pre", "post"])
def test_a_hook_of_all_optimizers_stands_in_the_way(register):
    model = network()
    step = CompiledStep(KINDS["sgd"](model.parameters()), model)
    handle = register(lambda *_: None)
    try:
        assert step.why_not() == "the optimizer's step has a hook"
    finally:
        handle.remove()
    assert step.why_not() is None


def test_a_scheduler_does_not_stand_in_the_way():
    """It replaces the step, to count its calls."""
    model = network()
    optimizer = KINDS["sgd"](model.parameters())
    step = CompiledStep(optimizer, model)
    LambdaLR(optimizer, lambda _: 1.0)
    assert step.why_not() is None


def test_steps_are_counted_in_the_dtype_of_torch():
    """Its default dtype decides, but for the fused kernel."""
    dtypes = []
    for fused in (False, True):
        ours, theirs = network(), network()
        optimizers = [AdamW(one.parameters(), lr=0.1, fused=fused) for one in (ours, theirs)]
        for one in (ours, theirs):
            set_gradients(one, 0)
        torch.set_default_dtype(torch.float64)
        try:
            assert ByGraph(ours, optimizers[0])() is None
            optimizers[1].step()
        finally:
            torch.set_default_dtype(torch.float32)
        dtypes.append([state["step"].dtype for one in optimizers for state in one.state.values()])
    assert dtypes == [[torch.float64] * 8, [torch.float32] * 8]
