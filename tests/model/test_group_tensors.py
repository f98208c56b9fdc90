"""What a step is about, and whether it has been looked at before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from ignite_train.model.gradients import Gradients
from ignite_train.model.group_tensors import GroupTensors, gather

Change = Callable[[nn.Module, Optimizer], Any]


def made(make: Callable[[Any], Optimizer] = lambda p: AdamW(p, fused=True)) -> tuple[nn.Module, Optimizer, GroupTensors]:
    """A model with gradients, an optimizer that has stepped, and what was looked at then."""
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    gradients = Gradients(model, optimizer)
    gradients.norm()
    tensors = GroupTensors(gradients)
    tensors.note(gather(optimizer))
    return model, optimizer, tensors


def new_gradients(model: nn.Module, _: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def group(**options: Any) -> Change:
    return lambda _, optimizer: optimizer.param_groups[0].update(options)


def moment(model: nn.Module, optimizer: Optimizer) -> None:
    state = optimizer.state[model.bias]
    state["exp_avg"] = state["exp_avg"].clone()


def fewer_gradients(model: nn.Module, _: Optimizer) -> None:
    model.bias.grad = None


def another_group(_: nn.Module, optimizer: Optimizer) -> None:
    extra = nn.Parameter(torch.ones(2))
    extra.grad = torch.ones(2)
    optimizer.add_param_group({"params": [extra]})


def forgotten(model: nn.Module, optimizer: Optimizer) -> None:
    del optimizer.state[model.weight]


def other_layout(model: nn.Module, _: Optimizer) -> None:
    """As `model.to(memory_format=...)` gives it to a parameter that stays the same object."""
    model.weight.data = model.weight.detach().t().contiguous().t()


def other_strides(model: nn.Module, _: Optimizer) -> None:
    model.weight.grad = torch.ones(3, 2).t()


KNOWN: dict[str, Change] = {
    "nothing": lambda *_: None,
    "new gradients": new_gradients,
    "rate": group(lr=0.5),
    "decay that stays on": group(weight_decay=0.5),
    "betas": group(betas=(0.5, 0.5)),
    "another step": lambda _, optimizer: optimizer.step(),
}
UNKNOWN: dict[str, Change] = {
    "moment": moment,
    "layout of a parameter": other_layout,
    "strides of a gradient": other_strides,
    "loaded state": lambda _, optimizer: optimizer.load_state_dict(deepcopy(optimizer.state_dict())),
    "state of a parameter": forgotten,
    "gradient": fewer_gradients,
    "group": another_group,
    "switched on": group(maximize=True),
    "switched off": group(weight_decay=0.0),
    "rate that is a tensor": group(lr=torch.tensor(0.1)),
    "not fused": group(fused=False),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_does_not_matter_is_known(name):
    model, optimizer, tensors = made()
    KNOWN[name](model, optimizer)

    assert tensors.are_known(gather(optimizer))


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_changed_is_noticed(name):
    """And it is known once it was looked at."""
    model, optimizer, tensors = made()
    UNKNOWN[name](model, optimizer)
    groups = gather(optimizer)

    assert not tensors.are_known(groups)
    tensors.note(groups)
    assert tensors.are_known(groups)
    assert tensors.num_looks == 2


def test_gradients_of_another_kind_are_noticed():
    _, optimizer, tensors = made()
    tensors._gradients.kinds = {(torch.device("cpu"), torch.bfloat16)}

    assert not tensors.are_known(gather(optimizer))


def test_the_groups_that_are_fused_are_gathered():
    """With their places among all groups, the parameters that have a gradient, and the states of these."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    options: list[dict[str, Any]] = [{"fused": False}, {"fused": True}, {"fused": True}]
    split = zip((parameters[:1], parameters[1:3], parameters[3:]), options, strict=True)
    optimizer = SGD([{"params": part, **option} for part, option in split], lr=0.1, momentum=0.5)
    for parameter in parameters[:3]:
        parameter.grad = torch.ones(2)
    optimizer.step()
    parameters[1].grad = None
    second, third = gather(optimizer)

    assert (second.number, third.number) == (1, 2)
    assert [id(parameter) for parameter in second.parameters] == [id(parameters[2])]
    assert second.gradients[0] is parameters[2].grad
    assert second.states[0] is optimizer.state[parameters[2]]
    assert (third.parameters, third.gradients, third.states) == ([], [], [])


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["in order", "in another order"])
def test_each_parameter_gets_its_own_state(order):
    """Whatever the order in which the optimizer has them."""
    _, optimizer, _ = made()
    entries = [*optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update([entries[place] for place in order])
    (gathered,) = gather(optimizer)

    for parameter, state in zip(gathered.parameters, gathered.states, strict=True):
        assert state is optimizer.state[parameter]


def test_a_look_keeps_nothing_alive():
    model, optimizer, tensors = made()
    gone = [weakref.ref(model.bias.grad), weakref.ref(optimizer.state[model.bias]["exp_avg"])]
    model.bias.grad = None
    moment(model, optimizer)

    assert [tensor() for tensor in gone] == [None, None]
    assert not tensors.are_known(gather(optimizer))


def test_a_tensor_in_the_place_of_a_freed_one_is_noticed():
    """Also where it has the address of that one, and so its id."""
    model, optimizer, tensors = made()
    state = optimizer.state[model.bias]
    freed = id(state.pop("exp_avg_sq"))  # the last entry
    state["exp_avg_sq"] = torch.zeros(2)
    assert id(state["exp_avg_sq"]) == freed  # as the allocator of CPython has it

    assert not tensors.are_known(gather(optimizer))


def test_parameters_may_be_swapped():
    """`torch.utils.swap_tensors` refuses those to which something refers weakly; another memory is noticed."""
    model, optimizer, tensors = made()
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.zeros_like(model.weight)))
    model.weight.grad = torch.ones_like(model.weight)

    assert not tensors.are_known(gather(optimizer))
