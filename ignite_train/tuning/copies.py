"""Copies of a model and its optimizer, to train on in place of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_train.model.optimizers import OneOrSeveralOptimizers, load_optimizer_state
from ignite_train.ranks.wrapping import unwrap

__all__ = ["copies_of", "each_optimizer", "empty_copies", "set_fused", "set_memory_layout"]


def copies_of(
    model: nn.Module, optimizer: OneOrSeveralOptimizers, *, compiled: bool
) -> tuple[nn.Module, OneOrSeveralOptimizers]:
    """A copy of the module without its wrapper, and of what steps it. Hooks of the optimizer are left out.

    Modules that are compiled in place are compiled in the copy too, with torch's default options, because a copy of a module
    is not compiled.

    Args:
        model: the user's.
        optimizer: over its parameters; what schedulers have put in the place of its `step` is not copied, which would step
            the user's.
        compiled: whether the trainer has compiled the model as a whole, which is then left to the copy's trainer.

    Raises:
        ValueError: the copy has tensors of the original, which would be trained and emptied with it.
        Exception: what `copy.deepcopy` raises where something in them cannot be copied.
    """
    memo: dict[int, Any] = {}
    module = unwrap(model)
    twin = copy.deepcopy(module, memo)
    _refuse_shared(module, twin)
    for original, copied in zip(module.modules(), twin.modules(), strict=True):
        if original._compiled_call_impl is not None and not (compiled and original is module):
            copied.compile()
    return twin, each_optimizer(optimizer, lambda one: _copy_of(one, memo))


def _refuse_shared(module: nn.Module, twin: nn.Module) -> None:
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        if id(tensor) in own:
            raise ValueError(
                f"model must be copied whole by copy.deepcopy, got a copy that has the tensor {name!r} of the original; remove "
                "the __deepcopy__ that returns the module itself while tune is used"
            )


def each_optimizer(given: OneOrSeveralOptimizers, change: Callable[[Optimizer], Optimizer]) -> OneOrSeveralOptimizers:
    """What `change` makes of the optimizer, or of each of several, in the form in which they were given."""
    if isinstance(given, Optimizer):
        return change(given)
    if isinstance(given, Mapping):
        return {name: change(optimizer) for name, optimizer in given.items()}
    return [change(optimizer) for optimizer in given]


def _copy_of(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Torch copies groups and states; the attributes of subclasses are added."""
    twin = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not callable(value):
            setattr(twin, name, copy.deepcopy(value, memo))
    return twin


def empty_copies(model: nn.Module, optimizer: OneOrSeveralOptimizers) -> None:
    """Gives the memory of their tensors back, whatever still refers to the objects."""

    def empty(one: Optimizer) -> Optimizer:
        one.state.clear()
        return one

    each_optimizer(optimizer, empty)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data, tensor.grad = tensor.data.new_empty(0), None


def set_fused(optimizer: Optimizer, *, fused: bool | None) -> Optimizer:
    """An optimizer over the same parameters with this argument `fused`; itself if its class does not know the argument.

    Raises:
        Exception: what its class raises where the argument is refused.
    """
    if "fused" not in optimizer.defaults:
        return optimizer
    changes: dict[str, Any] = {"fused": fused, **({"foreach": None} if fused else {})}
    accepted = inspect.signature(type(optimizer)).parameters.keys() - {"params"}
    arguments = {name: value for name, value in (optimizer.defaults | changes).items() if name in accepted}
    twin: Optimizer = type(optimizer)([group | changes for group in optimizer.param_groups], **arguments)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group |= changes
    load_optimizer_state(twin, saved)
    return twin


def set_memory_layout(model: nn.Module, optimizer: OneOrSeveralOptimizers, *, channels_last: bool) -> None:
    """Lays out weights of 4 dimensions, and the states of the optimizer for them, as `torch.channels_last` or contiguous."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stub wants a device too

    def lay_out(one: Optimizer) -> Optimizer:
        for parameter, state in one.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() == 4 and value.shape == parameter.shape:
                    state[name] = value.to(memory_format=layout)
        return one

    each_optimizer(optimizer, lay_out)
