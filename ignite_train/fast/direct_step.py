"""Torch's fused kernels, called without `Optimizer.step` around them, which costs a small model more than the kernel does.

What is private in torch about a step that is made this way stands in this file, and is compared with `Optimizer.step` before it
is used, see `is_direct_right`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ignite_train.fast.unwrapped_step import why_wrapped
from ignite_train.internals.of_torch import foreach_add_, foreach_sub_
from ignite_train.model.gradients import Gradients
from ignite_train.model.group_tensors import GroupTensors, SteppedGroup, gather
from ignite_train.model.memory_layout import pairs_with
from ignite_train.model.optimizers import is_torchs
from ignite_train.model.step_watch import StepWatch

__all__ = ["DirectStep", "is_direct_right", "unknown_option"]

_DEVICES, _DTYPES = ("cpu", "cuda"), (torch.float32, torch.bfloat16, torch.float16)
_EVERYWHERE = {"lr", "weight_decay", "maximize", "foreach", "differentiable", "fused"}
_KNOWN = {  # the options that each of them has in torch 2.13; one that is not here might change what a step is
    SGD: _EVERYWHERE | {"momentum", "dampening", "nesterov"},
    Adam: _EVERYWHERE | {"betas", "eps", "amsgrad", "capturable", "decoupled_weight_decay"},
    Adagrad: _EVERYWHERE | {"lr_decay", "eps", "initial_accumulator_value"},
}
_KNOWN[AdamW] = _KNOWN[Adam]
_SWITCHES = {"amsgrad", "dampening", "lr_decay", "maximize", "momentum", "nesterov", "weight_decay"}
_PRIVATE = [(torch, name) for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")]
_PRIVATE += [(torch._C, "_set_grad_enabled")]
_NOTHING, _STRIDED, _LAYOUT = repeat(None), repeat(torch.strided), attrgetter("layout")
_FLOAT32, _DTYPE = {torch.float32}, attrgetter("dtype")
_Number = ctypes.c_float  # how a number of steps of dtype float32 lies in memory


class _Call(NamedTuple):
    """The call of a kernel for one group.

    Attributes:
        kernel: which one.
        lists: parameters, gradients and moments, in its order.
        steps: the numbers of steps, which go up by one before it; empty for SGD, which does not count them.
        options: those of the group that it takes.
    """

    kernel: Callable[..., Any]
    lists: tuple[list[Tensor], ...]
    steps: list[Tensor]
    options: dict[str, Any]


class DirectStep:
    """Makes the step of an optimizer whose groups are all fused by calling torch's kernel, where it is the very same step.

    In each step parameters, gradients, moments and options are gathered from the groups and the state of the optimizer, as its
    `step` does, by `gather`; what is remembered is which of them have been looked at. What was changed or loaded counts in the
    next step.
    The optimizer's own `step` is called in each case in which it might do anything else:

    - it is another one than torch's own, of the class or of the object; that it counts calls for a scheduler is done here too;
    - it has hooks; a profiler runs, which is to show its range; a CUDA graph is being captured;
    - an option that this file does not know, or that is a tensor where torch reads it: `lr` and `betas`; `capturable`,
      `differentiable`, `foreach`;
    - a group whose tensors are not plain dense ones of one dtype, on the CPU or CUDA, with moments alike; several devices;
    - parameters without moments yet, as before the first step;
    - a trial step has shown that this torch does something else.

    Args:
        optimizer: which to step.
        gradients: those of its parameters.
        tensors: which of the groups' tensors have been looked at; noted by `FusedKernels`.
        watch: told when parameters begin to move.
    """

    def __init__(self, optimizer: Optimizer, gradients: Gradients, tensors: GroupTensors, watch: StepWatch) -> None:
        self._optimizer, self._gradients, self._tensors, self._watch = optimizer, gradients, tensors, watch
        kind = type(optimizer)
        self._class_step = kind.step
        self._never: str | None = None
        if kind not in _KNOWN:
            self._never = "torch has no fused kernel for its class that is known here"
        elif not is_torchs(kind.step):
            self._never = "the step of its class is not torch's"
        elif not all(hasattr(owner, name) for owner, name in _PRIVATE):
            self._never = "this torch does not have the functions that are known here"
        else:
            self._never = unknown_option(optimizer)
        self._seen = 0  # the number of the look at which the obstacle was found
        self._obstacle: str | None = None
        self._on_cuda = False

    def __call__(
        self, groups: Sequence[SteppedGroup], grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> str | None:
        """Steps, or gives the reason why `Optimizer.step` has to, and changes nothing.

        Only where `FoldedStep.why_not_fused` has found nothing.

        Args:
            groups: what the step is about, as `gather` gave it, and noted in `tensors` if it was not known.
            grad_scale: what the gradients are divided by, on their device.
            found_inf: 1 if the step is not to be made, on their device.
        """
        if (reason := self._never or why_wrapped(self._optimizer, self._class_step)) is not None:
            return reason
        calls = []
        for group in groups:
            if group.parameters:
                call = _call_for(type(self._optimizer), group)
                if isinstance(call, str):
                    return call
                calls.append(call)
        if (reason := self._why_not(calls)) is not None:
            return reason
        self._watch.enter(self._optimizer)
        _make(calls, grad_scale, found_inf)
        self._watch.leave(self._optimizer)
        if "step" in vars(self._optimizer):  # a scheduler counts the calls, as `FoldedStep` has seen
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
        return None

    def _why_not(self, calls: Sequence[_Call]) -> str | None:
        """The obstacle to these calls, or None; looks again only after a look has found other tensors or options."""
        if self._seen != self._tensors.num_looks:
            self._seen, self._obstacle = self._tensors.num_looks, self._look(calls)
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being captured"
        return self._obstacle

    def _look(self, calls: Sequence[_Call]) -> str | None:
        devices = {device for device, _ in self._gradients.kinds}
        self._on_cuda = any(device.type == "cuda" for device in devices)
        if len(devices) > 1:
            return "its gradients are on several devices, each of which needs the numbers"
        return next((obstacle for call in calls if (obstacle := _irregularity(call) or self._difference(call))), None)

    def _difference(self, call: _Call) -> str | None:
        first, kind = call.lists[0][0], type(self._optimizer)
        switched = frozenset(name for name in _SWITCHES if call.options.get(name))
        decoupled = call.kernel is torch._fused_adamw_
        if is_direct_right(kind, switched, first.dtype, first.device, decoupled=decoupled):  # type: ignore[arg-type]
            return None
        return "a trial step has shown that torch does something else"


def unknown_option(optimizer: Optimizer) -> str | None:
    """The reason against a step of this folder's in place of the optimizer's, if that has an option which is not known here."""
    unknown = sorted(optimizer.defaults.keys() - _KNOWN[type(optimizer)])
    return f"the optimizer has the option {unknown[0]!r}, which is not known here" if unknown else None


# --- what each kernel is given ----------------------------------------------------------------------------------------------


def _call_for(kind: type[Optimizer], stepped: SteppedGroup) -> _Call | str:
    """The call for a group, or the reason against it."""
    _, group, _, gradients, _ = stepped
    if any(map(is_not, map(_LAYOUT, gradients), _STRIDED)):
        return "a gradient is sparse"
    if group["foreach"] or group["differentiable"] or group.get("capturable"):
        return "a group is foreach, differentiable or capturable"
    if isinstance(group["lr"], Tensor):
        return "a learning rate is a tensor"
    try:
        return _CALLS[kind](*stepped[1:])
    except (KeyError, TypeError):  # a state that is empty, or none
        return "a parameter has no moments yet"


_Tensors = list[Tensor]
_Group = Mapping[str, Any]
_States = list[dict[str, Any]]
_SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
_ADAM = ("lr", "weight_decay", "eps", "amsgrad", "maximize")
_sgd_options, _adam_options = itemgetter(*_SGD), itemgetter(*_ADAM)


def _sgd(group: _Group, parameters: _Tensors, gradients: _Tensors, states: _States) -> _Call | str:
    options = dict(zip(_SGD, _sgd_options(group), strict=True))
    options["is_first_step"] = False
    moments = [] if group["momentum"] == 0 else [state["momentum_buffer"] for state in states]
    if any(map(is_, moments, _NOTHING)):  # as in states of old versions of torch, which wrote None without momentum
        return "a parameter has no moments yet"
    return _Call(torch._fused_sgd_, (parameters, gradients, moments), [], options)


def _adam(group: _Group, parameters: _Tensors, gradients: _Tensors, states: _States) -> _Call | str:
    options = dict(zip(_ADAM, _adam_options(group), strict=True))
    options["beta1"], options["beta2"] = beta1, beta2 = group["betas"]
    if isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
        return "a beta is a tensor"
    moments = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
    largest = [state["max_exp_avg_sq"] for state in states] if options["amsgrad"] else []
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    return _Call(kernel, (parameters, gradients, *moments, largest), [state["step"] for state in states], options)


def _adagrad(group: _Group, parameters: _Tensors, gradients: _Tensors, states: _States) -> _Call:
    options = {name: group[name] for name in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}
    return _Call(
        torch._fused_adagrad_,
        (parameters, gradients, [state["sum"] for state in states]),
        [state["step"] for state in states],
        options,
    )


_CALLS: dict[type[Optimizer], Callable[..., _Call | str]] = {SGD: _sgd, Adam: _adam, AdamW: _adam, Adagrad: _adagrad}


def _make(calls: Sequence[_Call], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Calls the kernels, as the functions behind `Optimizer.step` do once they have sorted their arguments."""
    grad_enabled = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)
        for kernel, lists, steps, options in calls:
            if not steps:
                kernel(*lists, **options, grad_scale=grad_scale, found_inf=found_inf)
                continue
            _count_up(steps)
            kernel(*lists, steps, **options, grad_scale=grad_scale, found_inf=found_inf)
            if found_inf is not None:
                foreach_sub_(steps, [found_inf] * len(steps))
    finally:
        torch._C._set_grad_enabled(grad_enabled)


def _count_up(steps: list[Tensor]) -> None:
    """Adds one to each number of steps; on the CPU by writing to memory, in a fourth of the instructions of torch's function.

    The dtype is asked each time: `.data` may have been given another one since the numbers were looked at.
    """
    if steps[0].is_cpu and _FLOAT32.issuperset(map(_DTYPE, steps)):
        for step in steps:
            _Number.from_address(step.data_ptr()).value += 1.0  # rounded as torch rounds it
        torch.autograd.graph.increment_version(steps)
    else:
        foreach_add_(steps, 1)


def _irregularity(call: _Call) -> str | None:
    """Why the kernel cannot be called with these tensors as they are: `Optimizer.step` would sort, refuse or dispatch them."""
    first = call.lists[0][0]
    if first.device.type not in _DEVICES or first.dtype not in _DTYPES:
        return f"a group has {first.dtype} on {first.device}"
    for tensors in filter(None, call.lists):
        for tensor, parameter in zip(tensors, call.lists[0], strict=True):
            if type(tensor) not in (Tensor, nn.Parameter):
                return "a parameter, its gradient or a moment is not a plain tensor"
            if tensor.dtype is not first.dtype or tensor.device != first.device:
                return "a group has tensors of several dtypes or devices"
            if tensor.shape != parameter.shape or not pairs_with(tensor, parameter):
                return "a gradient or a moment lies in memory otherwise than its parameter"
    for step in call.steps:
        if type(step) is not Tensor or step.dtype is not torch.float32 or step.device != first.device or step.numel() != 1:
            return "a number of steps is not a tensor that the kernel takes"
    return None


# --- whether it is the very same step ---------------------------------------------------------------------------------------

_GIVEN = [(None, None), (None, None), (4.0, None), (4.0, 1.0), (4.0, 0.0), (None, None)]  # `grad_scale` and `found_inf`


@functools.cache
def is_direct_right(
    kind: type[Optimizer], switched: frozenset[str], dtype: torch.dtype, device: torch.device, *, decoupled: bool = False
) -> bool:
    """Whether trial steps come bitwise to what `Optimizer.step` comes to, and says in the log where they do not.

    Args:
        kind: of the optimizer.
        switched: the options of its group that are switched on, or not zero.
        dtype: that of parameters, gradients and moments.
        device: where they are. An accelerator is waited for.
        decoupled: whether the weight decay of Adam is that of AdamW.
    """
    right, direct = (_trial(kind, switched, dtype, device, decoupled=decoupled) for _ in range(2))
    try:
        for number, (scale, found_inf) in enumerate(_GIVEN):
            given = {"grad_scale": scale, "found_inf": found_inf}
            tensors = {
                name: torch.full((), value, dtype=torch.float32, device=device)
                for name, value in given.items()
                if value is not None
            }
            _step_by_torch(right, number, tensors)
            _step_directly(direct, number, tensors)
        same = all(map(torch.equal, _tensors_of(right), _tensors_of(direct)))  # sync
    except (AttributeError, RuntimeError, TypeError):  # other arguments, or others in the state
        same = False
    if not same:
        logging.getLogger("ignite_train").warning(
            f"the fused kernel of {kind.__name__} for {dtype} on {device}, called directly, differs from optimizer.step in "
            f"torch {torch.__version__}, as a trial step has shown; optimizer.step is called, which is slower"
        )
    return same


def _step_by_torch(optimizer: Optimizer, number: int, tensors: Mapping[str, Tensor]) -> None:
    _set_gradients(optimizer, number)
    vars(optimizer).update(tensors)
    optimizer.step()
    for name in tensors:
        delattr(optimizer, name)


def _step_directly(optimizer: Optimizer, number: int, tensors: Mapping[str, Tensor]) -> None:
    _set_gradients(optimizer, number)
    call = _call_for(type(optimizer), *gather(optimizer))
    if isinstance(call, _Call):
        _make([call], tensors.get("grad_scale"), tensors.get("found_inf"))
    elif number == 0:
        optimizer.step()  # which makes the moments
    else:
        raise TypeError(call)


def _set_gradients(optimizer: Optimizer, number: int) -> None:
    for place, parameter in enumerate(optimizer.param_groups[0]["params"]):
        parameter.grad = (parameter.detach() * (1 + place) - number).to(parameter.dtype)


def _trial(
    kind: type[Optimizer], switched: frozenset[str], dtype: torch.dtype, device: torch.device, *, decoupled: bool
) -> Optimizer:
    """An optimizer over two small parameters, always the same."""
    places = torch.arange(135, dtype=torch.float32, device=device)
    parameters = [nn.Parameter((1.0 + places / 135).to(dtype)), nn.Parameter((places[:15].view(3, 5) / 7).to(dtype))]
    optimizer = kind(parameters, lr=0.5, fused=True)  # type: ignore[call-arg]
    group = optimizer.param_groups[0]
    for name in _KNOWN[kind] & _SWITCHES:
        on = name in switched
        group[name] = on if isinstance(group[name], bool) else 0.125 * on
    if issubclass(kind, Adam):
        group["decoupled_weight_decay"] = decoupled
    return optimizer


def _tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Parameters, gradients and state."""
    parameters = optimizer.param_groups[0]["params"]
    states = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return [*parameters, *(parameter.grad for parameter in parameters), *states]
