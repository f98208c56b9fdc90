"""The step of an optimizer as arithmetic, for a graph that holds a whole update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["CompiledStep", "StepPlan", "StepTensors", "stepped"]

_EVERYWHERE = {"lr", "weight_decay", "maximize", "foreach", "differentiable", "fused"}
_KNOWN = {  # the options that each of them has in torch 2.13; one that is not here might change what a step is
    SGD: _EVERYWHERE | {"momentum", "dampening", "nesterov"},
    Adam: _EVERYWHERE | {"betas", "eps", "amsgrad", "capturable", "decoupled_weight_decay"},
}
_KNOWN[AdamW] = _KNOWN[Adam]
_SWITCHES = ("amsgrad", "decoupled_weight_decay", "maximize", "momentum", "nesterov", "weight_decay")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_NO_STATE: Mapping[str, Any] = {}


class StepPlan(NamedTuple):
    """What a graph is told about a group when it is compiled. Whatever else changes a step is given to each call of it.

    Attributes:
        is_adam: Adam's formula, which is AdamW's too; or else that of SGD.
        switches: the options that are on, or not zero.
        names: those of the parameters in the model.
        num_numbers: how many numbers each call is given for it.
    """

    is_adam: bool
    switches: frozenset[str]
    names: tuple[str, ...]
    num_numbers: int


class StepTensors(NamedTuple):
    """What each call of the graph is given.

    Attributes:
        moments: the tensors of the optimizer's state of each parameter, group by group; the graph changes them in place.
        numbers: those that the formula of each group takes, one group behind the other.
    """

    moments: list[list[Tensor]]
    numbers: list[float]


class _Group(NamedTuple):
    """A group in the update that runs.

    Attributes:
        place: its place in the optimizer.
        parameters: those that have a gradient.
        moments: the tensors of the optimizer's state of each of them.
        steps: the tensors in which the optimizer counts the steps of each.
        is_fresh: whether these are not the optimizer's yet, because it has made no step.
    """

    place: int
    parameters: list[nn.Parameter]
    moments: list[list[Tensor]]
    steps: list[Tensor]
    is_fresh: bool = False


class _Counted(NamedTuple):
    """Tensors that count steps: what they said when they were read last, and their versions then."""

    steps: list[Tensor]
    versions: list[int]
    number: int


class CompiledStep:
    """What a graph needs to make the step of torch's SGD, Adam or AdamW; the optimizer's own state stays the truth.

    Rates, betas and the like are read from the groups in each update and are numbers that the graph is given, so that a
    schedule compiles nothing. The moments are those of the optimizer's state. Before its first step they are made as torch
    makes them, and are the optimizer's once that step is made: a step that is withheld leaves none behind.

    Nothing is kept here from update to update but the numbers of steps that were read from the state. They are read again
    where the tensors that count them are others, or were changed.

    Args:
        optimizer: which to step.
        model: gives the parameters their names.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._is_adam = not isinstance(optimizer, SGD)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._counted: dict[int, _Counted] = {}  # by index of the group
        self._groups: list[_Group] = []

    def why_never(self) -> str | None:
        """Why no graph can make the steps of this optimizer."""
        optimizer, kind = self._optimizer, type(self._optimizer)
        if kind not in _KNOWN:
            return f"the step of {kind.__name__} is not known here as a formula, as those of SGD, Adam and AdamW are"
        if unknown := sorted(optimizer.defaults.keys() - _KNOWN[kind]):
            return f"the optimizer has the option {unknown[0]!r}, which is not known here"
        for parameter in self._names:
            if type(parameter) is not nn.Parameter:
                return f"a parameter is a {type(parameter).__name__}"
            if parameter.dtype not in _DTYPES:
                return f"a parameter has the dtype {parameter.dtype}"
        return None

    def why_not(self) -> str | None:
        """Why no graph can make the step of this update; asked in each, as hooks and options come and go."""
        optimizer = self._optimizer
        if (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        ):
            return "the optimizer's step has a hook"
        step = vars(optimizer).get("step")
        if step is not None and not vars(step).get("_wrapped_by_lr_sched", False):
            return "the optimizer's step has been replaced"
        for group in optimizer.param_groups:
            if group["differentiable"] or isinstance(group["lr"], Tensor):
                return "a group of the optimizer is differentiable, or has a tensor for its learning rate"
            if self._is_adam and any(isinstance(beta, Tensor) for beta in group["betas"]):
                return "a group of the optimizer has a tensor for a beta"
            if not math.isfinite(group["lr"]):
                return "a learning rate is not finite"
        return None

    def begin(self, used: frozenset[str]) -> tuple[tuple[StepPlan, ...], StepTensors] | str:
        """What the graph of this update takes, or the reason why no graph can make its step.

        Args:
            used: the names of the parameters that have a gradient.
        """
        self._groups = []
        plans: list[StepPlan] = []
        tensors = StepTensors([], [])
        for index, options in enumerate(self._optimizer.param_groups):
            parameters = [p for p in options["params"] if p.requires_grad and self._names[p] in used]
            group = self._gather(index, options, parameters)
            if isinstance(group, str):
                return group
            number = 0 if group.is_fresh or not group.steps else self._number_of_steps(group)
            if number is None:
                return "parameters of one group have made different numbers of steps"
            self._groups.append(group)
            switches = frozenset([name for name in _SWITCHES if options.get(name)])
            numbers = (_adam_numbers if self._is_adam else _sgd_numbers)(options, number + 1, is_first=group.is_fresh)
            plans.append(StepPlan(self._is_adam, switches, tuple([self._names[p] for p in parameters]), len(numbers)))
            tensors.moments.extend(group.moments)
            tensors.numbers.extend(numbers)
        return tuple(plans), tensors

    def commit(self) -> None:
        """To be called once when the graph has made the step: it is counted, and new moments become the optimizer's."""
        for group in self._groups:
            if group.is_fresh:
                self._install(group)
            if group.steps:
                torch._foreach_add_(group.steps, 1)
                self._count(group, 1 if group.is_fresh else self._counted[group.place].number + 1)
        if "step" in vars(self._optimizer):  # a scheduler looks whether there was one
            self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def _install(self, group: _Group) -> None:
        """Puts new moments into the optimizer's state."""
        keys = self._keys(self._optimizer.param_groups[group.place])
        for place, (parameter, moments) in enumerate(zip(group.parameters, group.moments, strict=True)):
            tensors = [group.steps[place], *moments] if group.steps else moments
            self._optimizer.state[parameter].update(zip(keys, tensors, strict=True))

    def _keys(self, options: Mapping[str, Any]) -> list[str]:
        """What the state of each parameter of a group has, in torch's order."""
        if not self._is_adam:
            return ["momentum_buffer"] if options["momentum"] else []
        return ["step", "exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * options["amsgrad"]

    def _gather(self, index: int, options: Mapping[str, Any], parameters: list[nn.Parameter]) -> _Group | str:
        keys = self._keys(options)
        states = [self._optimizer.state.get(parameter, _NO_STATE) for parameter in parameters]
        try:
            entries = [[state[key] for key in keys] for state in states]
        except KeyError:
            if any(states):
                return "some parameters of a group have all of their moments and others do not"
            return _fresh(index, options, parameters, keys)
        if any(entry is None for entry in entries for entry in entry):  # as torch once wrote it for SGD without momentum
            return "a parameter has None for a moment"
        if self._is_adam:
            return _Group(index, parameters, [entry[1:] for entry in entries], [entry[0] for entry in entries])
        return _Group(index, parameters, entries, [])

    def _number_of_steps(self, group: _Group) -> int | None:
        """How many steps a group has made; None if its parameters differ. Synchronises only where it must read."""
        counted = self._counted.get(group.place)
        if (
            counted is None
            or len(counted.steps) != len(group.steps)
            or not all(map(is_, counted.steps, group.steps))
            or counted.versions != [step._version for step in group.steps]
        ):
            numbers = {float(step) for step in group.steps}  # sync
            if len(numbers) > 1:
                return None
            self._count(group, int(numbers.pop()))
        return self._counted[group.place].number

    def _count(self, group: _Group, number: int) -> None:
        self._counted[group.place] = _Counted(group.steps, [step._version for step in group.steps], number)


def _fresh(index: int, options: Mapping[str, Any], parameters: list[nn.Parameter], keys: Sequence[str]) -> _Group:
    """Moments as torch makes them for a first step."""
    count = sum(key != "step" for key in keys)
    moments = [[torch.zeros_like(p, memory_format=torch.preserve_format) for _ in range(count)] for p in parameters]
    steps: list[Tensor] = []
    if "step" in keys:
        on_device = options["fused"] or options["capturable"]
        wide = torch.get_default_dtype() is torch.float64 and not options["fused"]
        dtype = torch.float64 if wide else torch.float32
        steps = [torch.zeros((), dtype=dtype, device=p.device if on_device else "cpu") for p in parameters]
    return _Group(index, parameters, moments, steps, is_fresh=True)


# --- the formulas: the numbers that the host computes, in float64 as torch does, and what the graph does with them -----------


def _sgd_numbers(options: Mapping[str, Any], step: int, *, is_first: bool) -> list[float]:  # noqa: ARG001
    """Weight decay, momentum, what of the gradient enters the momentum (all of it at first), and the rate."""
    share = 1.0 if is_first else 1 - options["dampening"]
    return [options["weight_decay"], options["momentum"], share, options["lr"]]


def _adam_numbers(options: Mapping[str, Any], step: int, *, is_first: bool) -> list[float]:  # noqa: ARG001
    """Weight decay, or what it leaves; the weights of both averages, the length of the step, and what its divisor takes."""
    rate, decay, (beta1, beta2) = options["lr"], options["weight_decay"], options["betas"]
    if options["decoupled_weight_decay"]:
        decay = 1 - rate * decay
    root = math.sqrt(1 - beta2**step)
    return [decay, 1 - beta1, beta2, 1 - beta2, rate / (1 - beta1**step), root, options["eps"]]


def stepped(
    plan: StepPlan, numbers: Sequence[Tensor], parameter: Tensor, gradient: Tensor, moments: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """What a step makes of a parameter and its moments; nothing is changed in place. Runs inside a graph.

    The formulas are those of torch's documentation, in the order of operations of its for-loops. What is narrower than float32
    is computed in float32 and rounded once, as torch's fused kernels do.

    Args:
        plan: of its group.
        numbers: of its group, each a float64 tensor without dimensions.
        parameter: the parameter.
        gradient: of the mean loss, clipped.
        moments: of the parameter.
    """
    wide = torch.promote_types(parameter.dtype, torch.float32)
    formula = _adam if plan.is_adam else _sgd
    along = -gradient.to(wide) if "maximize" in plan.switches else gradient.to(wide)
    scalars = [number.to(wide) for number in numbers]
    new, new_moments = formula(plan.switches, scalars, parameter.to(wide), along, [moment.to(wide) for moment in moments])
    return new.to(parameter.dtype), [one.to(moment.dtype) for one, moment in zip(new_moments, moments, strict=True)]


def _sgd(
    switches: frozenset[str], numbers: Sequence[Tensor], parameter: Tensor, along: Tensor, moments: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    decay, momentum, share, rate = numbers
    if "weight_decay" in switches:
        along = along + decay * parameter
    new_moments: list[Tensor] = []
    if "momentum" in switches:
        buffer = momentum * moments[0] + share * along
        along = along + momentum * buffer if "nesterov" in switches else buffer
        new_moments = [buffer]
    return parameter - rate * along, new_moments


def _adam(
    switches: frozenset[str], numbers: Sequence[Tensor], parameter: Tensor, along: Tensor, moments: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    decay, weight1, beta2, weight2, length, root, eps = numbers
    if "weight_decay" in switches:
        decoupled = "decoupled_weight_decay" in switches
        parameter, along = (parameter * decay, along) if decoupled else (parameter, along + decay * parameter)
    first = moments[0] + weight1 * (along - moments[0])
    second = beta2 * moments[1] + weight2 * along * along
    largest = [torch.maximum(moments[2], second)] if "amsgrad" in switches else []
    divisor = [second, *largest][-1].sqrt() / root + eps
    return parameter - length * first / divisor, [first, second, *largest]
