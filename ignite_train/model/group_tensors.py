"""The tensors that the next step of an optimizer is about, and whether they have been looked at before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from operator import call, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_train.model.gradients import Gradients

__all__ = ["GroupTensors", "SteppedGroup", "gather"]

_NOTHING = repeat(None)


class SteppedGroup(NamedTuple):
    """What the next step of an optimizer changes, and what it reads, in one group that is fused.

    Attributes:
        number: which of the optimizer's groups it is.
        group: the group itself, with its options.
        parameters: those that have a gradient.
        gradients: theirs.
        states: what the optimizer remembers of each of them; empty before its first step.
    """

    number: int
    group: dict[str, Any]
    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    states: list[dict[str, Any]]


class _Look(NamedTuple):
    """What was there at a look: nothing of it is kept alive by this."""

    kinds: set[tuple[torch.device, torch.dtype]]
    options: list[dict[str, Any]]
    tensors: list[Callable[[], Any]]


def gather(optimizer: Optimizer) -> list[SteppedGroup]:
    """What the next step is about in each fused group. To be dropped after the step: it holds the gradients."""
    found = []
    for index, group in enumerate(optimizer.param_groups):
        if group.get("fused"):
            parameters, gradients = group["params"], [parameter.grad for parameter in group["params"]]
            if any(map(is_, gradients, _NOTHING)):
                parameters = [
                    parameter for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is not None
                ]
                gradients = [gradient for gradient in gradients if gradient is not None]
            found.append((index, group, parameters, gradients))
    states = _states(optimizer.state, [*chain(*[parameters for _, _, parameters, _ in found])])
    return [SteppedGroup(*one, [*islice(states, len(one[2]))]) for one in found]


class GroupTensors:
    """Which tensors of an optimizer's groups have been looked at, so that what was found need not be found again.

    Groups and state stay the truth, see `gather`: what is remembered of a look are weak references to the parameters and the
    moments, and which options were switched on.

    Args:
        gradients: those of the optimizer's parameters.

    Attributes:
        num_looks: how many times `note` was called: the number of the latest look.
    """

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        self._last: _Look | None = None
        self.num_looks = 0

    def are_known(self, groups: Sequence[SteppedGroup]) -> bool:
        """Whether all of it was there at the latest look, with the same options switched on."""
        last = self._last
        if last is None or last.kinds != self._gradients.kinds:
            return False
        tensors = _tensors(groups)
        if len(last.tensors) != len(tensors) or not all(map(is_, map(call, last.tensors), tensors)):
            return False
        options = _options(groups)
        return last.options == options or [*map(_switched, last.options)] == [*map(_switched, options)]

    def note(self, groups: Sequence[SteppedGroup]) -> None:
        """Remembers that all of it has been looked at."""
        self._last = _Look({*self._gradients.kinds}, _options(groups), [*map(_reference, _tensors(groups))])
        self.num_looks += 1


def _states(states: Mapping[Tensor, Any], parameters: Sequence[nn.Parameter]) -> Iterator[Any]:
    """Those of the parameters. They are not looked up where they have the same order: the hash of a tensor is slow."""
    if not states:
        return repeat({})
    if len(states) == len(parameters) and all(map(is_, states, parameters)):
        return iter(states.values())
    return (states.get(parameter, {}) for parameter in parameters)


def _tensors(groups: Sequence[SteppedGroup]) -> list[Any]:
    return [*chain(*[(*group.parameters, *chain(*[state.values() for state in group.states])) for group in groups])]


def _options(groups: Sequence[SteppedGroup]) -> list[dict[str, Any]]:
    """All but the rates, which differ from step to step."""
    return [{**group.group, "params": None, "lr": isinstance(group.group.get("lr"), Tensor)} for group in groups]


def _switched(options: dict[str, Any]) -> list[tuple[str, bool]]:
    """Which of them are switched on, or not zero: this chooses what a kernel computes."""
    return [(name, bool(value)) for name, value in options.items()]


def _reference(value: Any) -> Callable[[], Any]:
    """Gives the value; None where it is a tensor that was freed."""
    return weakref.ref(value) if isinstance(value, Tensor) else lambda: value
