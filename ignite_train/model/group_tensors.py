"""The tensors that the next step of an optimizer is about, and whether they have been looked at before."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_train.model.gradients import Gradients

__all__ = ["GroupTensors", "SteppedGroup", "gather"]

_NOTHING, _GRADIENT, _VALUES = repeat(None), attrgetter("grad"), methodcaller("values")
_PARAMETERS, _GRADIENTS = attrgetter("parameters"), attrgetter("gradients")


class SteppedGroup(NamedTuple):
    """The tensors that the next step of an optimizer changes and reads, in one group that is fused.

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
    """The tensors that were there at a look. Moments are known by their ids, so that none is kept alive.

    Parameters are held, as their group does until a script takes one out of it: `torch.utils.swap_tensors` refuses a tensor to
    which there is a weak reference.

    Attributes:
        kinds: of the gradients.
        options: of the groups.
        ids: of the parameters and of what the states hold.
        places: where the elements of the parameters lie: `model.to` moves them without making another parameter.
        strides: of the gradients, which a handler may have replaced.
        freed: gets an entry when one of the moments is freed, so that its id may be that of another one.
        references: put it there.
        others: the parameters, and what else the states hold.
    """

    kinds: set[tuple[torch.device, torch.dtype]]
    options: list[dict[str, Any]]
    ids: list[int]
    places: list[int]
    strides: list[tuple[int, ...]]
    freed: list[Any]
    references: list[weakref.ref[Any]]
    others: list[Any]


def gather(optimizer: Optimizer) -> list[SteppedGroup]:
    """The tensors of the next step in each fused group. To be dropped after the step: it holds the gradients."""
    found = []
    for index, group in enumerate(optimizer.param_groups):
        if group.get("fused"):
            parameters = group["params"]
            gradients = [*map(_GRADIENT, parameters)]
            if any(map(is_, gradients, _NOTHING)):
                parameters = [
                    parameter for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is not None
                ]
                gradients = [gradient for gradient in gradients if gradient is not None]
            found.append(SteppedGroup(index, group, parameters, gradients, []))
    if not found:
        return found
    every = found[0].parameters if len(found) == 1 else [*chain(*[stepped.parameters for stepped in found])]
    states = _states(optimizer.state, every)
    for stepped in found:
        stepped.states.extend(islice(states, len(stepped.parameters)))
    return found


class GroupTensors:
    """Which tensors of an optimizer's groups have been looked at, so that what was found need not be found again.

    Groups and state stay the truth, see `gather`: what is remembered of a look are the ids of the parameters and the moments,
    where parameters lie in memory, the strides of gradients, and which options were switched on. A moment that is given other
    memory by its `.data` is not noticed, as to ask each of them for its address takes longer than all of this.

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
        if last is None or last.freed or last.ids != [*map(id, _state_of(groups))] or last.kinds != self._gradients.kinds:
            return False
        if last.places != _places(groups) or last.strides != _strides(groups):
            return False
        options = _options(groups)
        return last.options == options or [*map(_switched, last.options)] == [*map(_switched, options)]

    def note(self, groups: Sequence[SteppedGroup]) -> None:
        """Remembers that all of it has been looked at."""
        freed: list[Any] = []
        values = _state_of(groups)
        parameters = {id(parameter) for group in groups for parameter in group.parameters}
        moments = [value for value in values if isinstance(value, Tensor) and id(value) not in parameters]
        references = [weakref.ref(moment, freed.append) for moment in moments]
        others = [value for value in values if not isinstance(value, Tensor) or id(value) in parameters]
        ids, places, strides = [*map(id, values)], _places(groups), _strides(groups)
        self._last = _Look({*self._gradients.kinds}, _options(groups), ids, places, strides, freed, references, others)
        self.num_looks += 1


def _states(states: Mapping[Tensor, Any], parameters: Sequence[nn.Parameter]) -> Iterator[Any]:
    """The states of the parameters. They are not looked up where they have the same order: the hash of a tensor is slow."""
    if not states:
        return repeat({})
    if len(states) == len(parameters) and all(map(is_, states, parameters)):
        return iter(states.values())
    return (states.get(parameter, {}) for parameter in parameters)


def _state_of(groups: Sequence[SteppedGroup]) -> list[Any]:
    """The parameters, and what the states hold."""
    found: list[Any] = []
    for group in groups:
        found += group.parameters
        if any(group.states):
            found += chain.from_iterable(map(_VALUES, group.states))
    return found


def _places(groups: Sequence[SteppedGroup]) -> list[int]:
    return [*map(Tensor.data_ptr, chain.from_iterable(map(_PARAMETERS, groups)))]


def _strides(groups: Sequence[SteppedGroup]) -> list[tuple[int, ...]]:
    return [*map(Tensor.stride, chain.from_iterable(map(_GRADIENTS, groups)))]


def _options(groups: Sequence[SteppedGroup]) -> list[dict[str, Any]]:
    """All but the rates, which differ from step to step."""
    found = [group.group.copy() for group in groups]
    for options in found:
        options["params"], options["lr"] = None, isinstance(options.get("lr"), Tensor)
    return found


def _switched(options: dict[str, Any]) -> list[tuple[str, bool]]:
    """Which of them are switched on, or not zero: this chooses what a kernel computes."""
    return [(name, bool(value)) for name, value in options.items()]
