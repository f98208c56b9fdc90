"""The step of an optimizer as arithmetic, for a graph that holds a whole update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ignite_train.fast.direct_step import unknown_option
from ignite_train.internals.of_torch import (
    backward_hooks_of,
    late_hooks_of,
    modules_of,
    parameters_of,
    step_post_hooks_of,
    step_post_hooks_of_all,
    step_pre_hooks_of,
    step_pre_hooks_of_all,
)
from ignite_train.model.memory_layout import is_lost
from ignite_train.model.optimizers import is_torchs, is_wrapped_by_scheduler

__all__ = ["CompiledStep", "StepPlan", "StepTensors", "computed_once", "stepped"]

_SWITCHES_OF_SGD = ("maximize", "momentum", "nesterov", "weight_decay")
_SWITCHES_OF_ADAM = ("amsgrad", "decoupled_weight_decay", "maximize", "weight_decay")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# called by `map`: what is asked in each update about each tensor must cost little
_REQUIRES_GRAD = attrgetter("requires_grad")


class StepPlan(NamedTuple):
    """The facts about a group that a graph is compiled for. Whatever else changes a step is given to each call of it.

    Attributes:
        is_adam: Adam's formula, which is AdamW's too; or else that of SGD.
        switches: the options that are on, or not zero.
        names: those of the parameters in the model.
        unused: the names of those that are trained, and on which the loss does not depend.
        num_numbers: how many numbers each call is given for it.
        num_states: how many tensors the state of each parameter has.
    """

    is_adam: bool
    switches: frozenset[str]
    names: tuple[str, ...]
    unused: tuple[str, ...]
    num_numbers: int
    num_states: int


class StepTensors(NamedTuple):
    """The tensors that each call of a graph is given.

    Attributes:
        states: the tensors of the optimizer's state of each parameter, one behind the other; the graph changes them in place.
        numbers: those that the formula of each group takes, one group behind the other.
    """

    states: list[Tensor]
    numbers: list[float]


class _Group(NamedTuple):
    """A group as it was found in an earlier update.

    Attributes:
        listed: its parameters, all of them.
        requires_grad: whether each of them did.
        options: whether each of its switches was on.
        parameters: those that have a gradient.
        keys: what the state of each has.
        tensors_of: gives them of a state.
        plan: for the graph.
    """

    listed: list[nn.Parameter]
    requires_grad: list[bool]
    options: list[Any]
    parameters: list[nn.Parameter]
    keys: list[str]
    tensors_of: Callable[[dict[str, Any]], tuple[Tensor, ...]]
    plan: StepPlan


class CompiledStep:
    """The step of torch's SGD, Adam or AdamW, as a graph makes it; the optimizer's own state stays the truth.

    Rates, betas and the like are read from the groups in each update and are numbers that the graph is given, so that a
    schedule compiles nothing. Moments, and the tensors that count steps, are those of the optimizer's state. Before its first
    step they are made as torch makes them, and are the optimizer's once that step is made: one that is skipped leaves none.

    Args:
        optimizer: which to step.
        model: gives the parameters their names.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer, self._model = optimizer, model
        self._class_step = type(optimizer).step
        self._is_adam = not isinstance(optimizer, SGD)
        self._switches = itemgetter(*(_SWITCHES_OF_ADAM if self._is_adam else _SWITCHES_OF_SGD))
        self._names: dict[nn.Parameter, str] = {}
        self._owners: list[dict[str, Any]] = []  # where the model has modules and parameters: they may be replaced in a run
        self._there: list[str | nn.Module | nn.Parameter | None] = []  # what was there, by name
        self._find_names()
        self._is_on_cpu = next(model.parameters()).device.type == "cpu"
        self._groups: list[_Group] = []  # as they were in the latest update
        self._plans: tuple[StepPlan, ...] = ()
        self._obstacle: str | None = None  # found with the groups
        self._own: list[dict[str, Any]] = []  # the states of all parameters, as the optimizer had them in the latest update
        self._of_group: list[list[dict[str, Any]]] = []  # the same, of the parameters of each group
        self._is_narrow = False  # graphs can write into each of these states
        self._fresh: list[tuple[_Group, list[tuple[Tensor, ...]]]] = []  # states that are not the optimizer's yet

    def why_never(self) -> str | None:
        """Why no graph can make the steps of this optimizer."""
        optimizer, kind = self._optimizer, type(self._optimizer)
        if kind not in (SGD, Adam, AdamW) or not is_torchs(kind.step):
            return f"the step of {kind.__name__} is not known here as a formula, as those of SGD, Adam and AdamW are"
        if (unknown := unknown_option(optimizer)) is not None:
            return unknown
        for parameter in self._names:
            if type(parameter) is not nn.Parameter:
                return f"a parameter is a {type(parameter).__name__}"
            if is_lost(parameter):
                return "a parameter is a float64 number without dimensions, into which torch's graphs cannot write on the CPU"
            if parameter.dtype not in _DTYPES:
                return f"a parameter has the dtype {parameter.dtype}"
        return None

    def why_not(self) -> str | None:
        """Why no graph can make the step of this update; asked in each, as hooks and options come and go."""
        optimizer = self._optimizer
        if step_pre_hooks_of(optimizer) or step_post_hooks_of(optimizer) or step_pre_hooks_of_all or step_post_hooks_of_all:
            return "the optimizer's step has a hook"
        for known in self._groups:
            if any(map(backward_hooks_of, known.listed)) or any(map(late_hooks_of, known.listed)):
                return "a parameter has a hook that looks at its gradient"
        step, kind = vars(optimizer).get("step"), type(optimizer)
        if kind.step is not self._class_step or not (step is None or is_wrapped_by_scheduler(step, kind)):
            return "the optimizer's step has been replaced"
        for group in optimizer.param_groups:
            rate = group["lr"]
            if group["differentiable"] or (type(rate) is not float and isinstance(rate, Tensor)):
                return "a group of the optimizer is differentiable, or has a tensor for its learning rate"
            if self._is_adam and (why := self._why_not_adam(group)) is not None:
                return why
            if not math.isfinite(rate):
                return "a learning rate is not finite"
        return None

    def _why_not_adam(self, group: Mapping[str, Any]) -> str | None:
        beta1, beta2 = group["betas"]
        if isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
            return "a group of the optimizer has a tensor for a beta"
        is_counted_on_device = group["fused"] or group["capturable"]
        if group["capturable"] and self._is_on_cpu:
            return "a group of the optimizer is capturable on the CPU"
        if not (is_counted_on_device or self._is_on_cpu):
            return "the optimizer counts its steps on the CPU; make it with fused=True"
        return None

    def has_changed(self) -> bool:
        """Whether groups, their switches, parameters or the modules of the model are not what the latest `look` saw.

        Options that are numbers, and states, are read in each update.
        """
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            return True
        for options, group in zip(groups, self._groups, strict=True):
            listed = options["params"]
            if (
                not _are_same(listed, group.listed)
                or [*map(_REQUIRES_GRAD, listed)] != group.requires_grad
                or [*map(bool, self._switches(options))] != group.options
            ):
                return True
        return not _are_same(_contents(self._owners), self._there)

    def look(self, used: frozenset[str]) -> None:
        """Looks at the groups.

        Args:
            used: the names of the parameters that have a gradient.
        """
        self._find_names()
        groups = self._optimizer.param_groups
        self._groups = [self._look_at(options, used) for options in groups]
        self._plans, self._own = tuple([group.plan for group in self._groups]), []
        self._obstacle = self.why_never()
        if any(parameter not in self._names for group in self._groups for parameter in group.listed):
            self._obstacle = "a parameter of the optimizer is not in the model"

    def begin(self) -> tuple[tuple[StepPlan, ...], StepTensors] | str:
        """The arguments of the graph of this update, or the reason why no graph can make its step; after `look`."""
        if self._obstacle is not None:
            return self._obstacle
        self._find_states()
        self._fresh = []
        tensors = StepTensors([], [])
        for options, group, states in zip(self._optimizer.param_groups, self._groups, self._of_group, strict=True):
            is_fresh = bool(group.keys) and not any(states)
            if is_fresh:
                made = [_new_state(parameter, options, group.keys) for parameter in group.parameters]
                self._fresh.append((group, made))
            else:
                try:
                    made = [*map(group.tensors_of, states)]
                except KeyError:
                    return "some parameters of a group have all of their moments and others do not"
            tensors.states.extend(chain.from_iterable(made))
            tensors.numbers.extend((_adam_numbers if self._is_adam else _sgd_numbers)(options, is_first=is_fresh))
            self._is_narrow = self._is_narrow and not is_fresh
        if any(map(is_, tensors.states, repeat(None))):  # as torch once wrote it for SGD
            return "a parameter has None for a moment"
        if self._is_narrow:
            return self._plans, tensors
        given = [one.view(1) if is_lost(one) else one for one in tensors.states]
        self._is_narrow = all(map(is_, given, tensors.states))
        return self._plans, tensors._replace(states=given)

    def commit(self) -> None:
        """To be called once when the graph has made the step: states that are new become the optimizer's."""
        for group, made in self._fresh:
            for parameter, tensors in zip(group.parameters, made, strict=True):
                self._optimizer.state[parameter].update(zip(group.keys, tensors, strict=True))
        self._fresh = []
        if "step" in vars(self._optimizer):  # a scheduler looks whether there was one
            self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _find_names(self) -> None:
        self._names = {parameter: name for name, parameter in self._model.named_parameters()}
        owners = [owner for module in self._model.modules() for owner in (modules_of(module), parameters_of(module))]
        self._owners = [owner for owner in owners if owner]
        self._there = _contents(self._owners)

    def _look_at(self, options: Mapping[str, Any], used: frozenset[str]) -> _Group:
        listed = options["params"]
        on = [*map(bool, self._switches(options))]
        names_of_switches = _SWITCHES_OF_ADAM if self._is_adam else _SWITCHES_OF_SGD
        switches = frozenset([name for name, is_on in zip(names_of_switches, on, strict=True) if is_on])
        trained = [p for p in listed if p.requires_grad and p in self._names]
        parameters = [p for p in trained if self._names[p] in used]
        unused = tuple([name for p in trained if (name := self._names[p]) not in used])
        names, numbers = tuple([self._names[p] for p in parameters]), _NUM_OF_ADAM if self._is_adam else _NUM_OF_SGD
        if self._is_adam:
            keys = ["step", "exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * ("amsgrad" in switches)
        else:
            keys = ["momentum_buffer"] * ("momentum" in switches)
        plan = StepPlan(self._is_adam, switches, names, unused, numbers, len(keys))
        return _Group([*listed], [p.requires_grad for p in listed], on, parameters, keys, _getter(keys), plan)

    def _find_states(self) -> None:
        """Looks up the states again where one of them is not what it was: a tensor takes long to look up."""
        state = self._optimizer.state
        own = [*state.values()]
        if not _are_same(own, self._own) or not self._own:
            self._own, self._is_narrow = own, False
            self._of_group = [[state.get(parameter, {}) for parameter in group.parameters] for group in self._groups]


def _are_same(ones: Sequence[object], others: Sequence[object]) -> bool:
    """Whether both hold the very same objects."""
    return len(ones) == len(others) and all(map(is_, ones, others))


def _contents(owners: Sequence[dict[str, Any]]) -> list[Any]:
    """Keys and values of all of them."""
    return [*chain.from_iterable(owners), *chain.from_iterable(map(dict.values, owners))]


def _getter(keys: Sequence[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Gives what a mapping has under these keys; an `itemgetter` of one key gives no tuple."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda state: tuple([state[key] for key in keys])


def _new_state(parameter: nn.Parameter, options: Mapping[str, Any], keys: Sequence[str]) -> tuple[Tensor, ...]:
    """The state that torch makes for a first step."""
    tensors = []
    for key in keys:
        if key == "step":
            on_device = options["fused"] or options["capturable"]
            is_wide = torch.get_default_dtype() is torch.float64 and not options["fused"]
            device = parameter.device if on_device else torch.device("cpu")
            tensors.append(torch.zeros((), dtype=torch.float64 if is_wide else torch.float32, device=device))
        else:
            tensors.append(torch.zeros_like(parameter, memory_format=torch.preserve_format))
    return tuple(tensors)


# --- the formulas: what the graph is given, and what it does with it ----------------------------------------------------------

_NUM_OF_SGD, _NUM_OF_ADAM = 4, 5


def _sgd_numbers(options: Mapping[str, Any], *, is_first: bool) -> list[float]:
    """Rate, weight decay, momentum, and how much of the gradient enters the momentum: all of it at first."""
    share = 1.0 if is_first else 1 - options["dampening"]
    return [options["lr"], options["weight_decay"], options["momentum"], share]


def _adam_numbers(options: Mapping[str, Any], *, is_first: bool) -> list[float]:  # noqa: ARG001  # as for SGD
    """Rate, weight decay, both betas and epsilon."""
    return [options["lr"], options["weight_decay"], *options["betas"], options["eps"]]


def stepped(
    plan: StepPlan, numbers: Sequence[Tensor], parameter: Tensor, gradient: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """The new parameter and its new state after a step; nothing is changed in place. Runs inside a graph.

    The formulas are those of torch's documentation, in the order of operations of its for-loops. What is narrower than float32
    is computed in float32 and rounded once, as torch's fused kernels do.

    Args:
        plan: of its group.
        numbers: of its group, each a float64 tensor without dimensions.
        parameter: the parameter.
        gradient: of the mean loss, clipped.
        states: of the parameter.
    """
    wide = torch.promote_types(parameter.dtype, torch.float32)
    along = -gradient.to(wide) if "maximize" in plan.switches else gradient.to(wide)
    formula = _adam if plan.is_adam else _sgd
    new, new_states = formula(plan.switches, numbers, parameter.to(wide), along, states)
    return new.to(parameter.dtype), [one.to(state.dtype) for one, state in zip(new_states, states, strict=True)]


def _sgd(
    switches: frozenset[str], numbers: Sequence[Tensor], parameter: Tensor, along: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    rate, decay, momentum, share = computed_once(*[number.to(parameter.dtype) for number in numbers])
    if "weight_decay" in switches:
        along = along + decay * parameter
    new_states: list[Tensor] = []
    if "momentum" in switches:
        buffer = momentum * states[0].to(parameter.dtype) + share * along
        along = along + momentum * buffer if "nesterov" in switches else buffer
        new_states = [buffer]
    return parameter - rate * along, new_states


def _adam(
    switches: frozenset[str], numbers: Sequence[Tensor], parameter: Tensor, along: Tensor, states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    rate, decay, beta1, beta2, eps = numbers
    wide = parameter.dtype
    step = states[0].reshape(()) + 1
    length = rate / (1 - beta1 ** step.to(torch.float64))  # in float64, as torch's for-loop computes it on the host
    root = (1 - beta2 ** step.to(torch.float64)).sqrt()
    wanted = (length, root, 1 - rate * decay, decay, 1 - beta1, beta2, 1 - beta2, eps)
    length, root, kept, decay, share1, beta2, share2, eps = computed_once(*[number.to(wide) for number in wanted])
    if "weight_decay" in switches:
        if "decoupled_weight_decay" in switches:
            parameter = parameter * kept
        else:
            along = along + decay * parameter
    moments = [state.to(wide) for state in states[1:]]
    first = moments[0] + share1 * (along - moments[0])
    second = beta2 * moments[1] + share2 * along * along
    largest = [torch.maximum(moments[2], second)] if "amsgrad" in switches else []
    divisor = [second, *largest][-1].sqrt() / root + eps
    return parameter - length * first / divisor, [step, first, second, *largest]


def computed_once(*numbers: Tensor) -> Sequence[Tensor]:
    """The same numbers, two or more without dimensions, one after the other in memory.

    Inductor would compute them again in its loop over the elements, with two powers for each vector of them.
    """
    return torch.stack(numbers).unbind()
