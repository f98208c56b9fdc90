"""Fused kernels of torch: whether they are right, and whether what they are given lies in memory as they take it to."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ignite_train.model.gradients import Gradients
from ignite_train.model.group_tensors import GroupTensors, SteppedGroup, gather
from ignite_train.model.memory_layout import is_dense, local_part, pairs_with

__all__ = ["FusedKernels", "can_step_shards", "is_kernel_right"]

_SIZE = 135  # elements of a trial step: at least two blocks of any CPU's vector instructions, and a tail
_ROUNDINGS = 8  # how far a trial step may be off, in units of the last place; it moves by more than thirty, in bfloat16 too
_RATE, _EPSILON = 0.5, 2.0**-6
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_OPTIONS = ("amsgrad", "dampening", "decoupled_weight_decay", "lr_decay", "maximize", "momentum", "nesterov", "weight_decay")


class FusedKernels:
    """Steps an optimizer, and takes the unfused step for a group whose fused kernel would get it wrong.

    A fused kernel pairs a parameter, its gradient and its moments by their places in memory, not by their indices. And some
    kernels are broken: with torch 2.13 the one of SGD leaves most of a bfloat16 parameter on the CPU where it is. So

    - a trial step with the kernel must come to what float64 arithmetic comes to, see `is_kernel_right`; torch must have a way
      to apply it to shards, where parameters are sharded; and parameters may have no gaps in memory. Otherwise the group takes
      the unfused step from then on;
    - gradients must have the strides of their parameters. Backward makes such gradients. Where something else has put others
      in their place, they are copied into those strides;
    - moments must have those strides too. Moments from a checkpoint that have others are laid out again.

    Each of these is said in the log once. It is all looked at when the trainer is made, as far as it is known then; at the
    first step; and again when other parameters have gradients, when moments or options are others, and when groups become
    fused. A group that SGD's kernel cannot step, because some of its parameters have momentum and others have their first
    gradient, takes the unfused step this once.

    The options of a group are switched while the optimizer steps only, so that a checkpoint stores what the user has set.

    Args:
        optimizer: which to step.
        gradients: those of its parameters.
        said: what has been said in the log, also by the objects of optimizers around this one.

    Attributes:
        tensors: which of the groups' tensors have been looked at.
        unfused: the groups whose kernel is not used in the step to come. Without any, it need not stand in this context.
    """

    def __init__(self, optimizer: Optimizer, gradients: Gradients, said: set[str]) -> None:
        self._optimizer, self._gradients, self.tensors = optimizer, gradients, GroupTensors(gradients)
        self._avoided: set[int] = set()  # indices of the groups whose kernel is not used any more
        self.unfused: list[dict[str, Any]] = []
        self._obstacle: str | None = None
        self._said = said
        for index, group in enumerate(optimizer.param_groups):
            if group.get("fused"):
                self._check_kernel(index, group, [p for p in group["params"] if p.requires_grad])

    def why_not_fused(self, groups: Sequence[SteppedGroup]) -> str | None:
        """Why some fused group does not take its fused step; asked before each step.

        Args:
            groups: what the step is about, as `gather` gave it. A gradient that is copied is replaced there too.
        """
        if not groups:
            self.unfused = []
            return None
        if not self.tensors.are_known(groups):
            self._look(groups)
            self.tensors.note(groups)
        return self._obstacle

    def __enter__(self) -> None:
        """The optimizer steps, in the way that `why_not_fused` has found."""
        for group in self.unfused:
            group["fused"] = None

    def __exit__(self, *_: object) -> None:
        """The groups have the options again that the user has set."""
        for group in self.unfused:
            group["fused"] = True

    def look(self) -> None:
        """Looks at what the next step is about, without a question for the reason."""
        self.why_not_fused(gather(self._optimizer))

    def look_again(self) -> None:
        """Looks within a step at the gradients of another evaluation of the loss, and switches groups accordingly."""
        self.__exit__()
        self.look()
        self.__enter__()

    def _look(self, groups: Sequence[SteppedGroup]) -> None:
        self.unfused, self._obstacle = [], None
        for stepped in groups:
            index, group, parameters, _, _ = stepped
            self._check_kernel(index, group, parameters)
            self._check_gaps(index, parameters)
            if index in self._avoided:
                self._avoid(group, "the fused kernel would get it wrong, as logged before")
            elif self._has_late(stepped):
                self._avoid(group, "a parameter has its first gradient later than others, which the fused kernel cannot step")
            else:
                self._lay_out(stepped)

    def _avoid(self, group: dict[str, Any], why: str) -> None:
        self.unfused.append(group)
        self._obstacle = self._obstacle or why

    def _check_kernel(self, index: int, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
        kind = next((kind for kind in _TRIALS if isinstance(self._optimizer, kind)), None)
        if kind is None:
            return
        for mesh in {p.device_mesh for p in parameters if isinstance(p, DTensor)}:
            if not can_step_shards(kind, mesh):
                self._avoided.add(index)
                self._say(
                    f"torch {torch.__version__} cannot apply the fused kernel of {kind.__name__} to the shards of fully_shard; "
                    f"param_groups[{index}] takes the unfused step; build the optimizer with foreach=True"
                )
                return
        options = frozenset(name for name in _OPTIONS if group.get(name))
        for dtype, device in sorted({(p.dtype, p.device) for p in parameters}, key=str):
            if not is_kernel_right(kind, options, dtype, device, tensor_lr=isinstance(group["lr"], Tensor)):
                self._avoided.add(index)
                self._say(
                    f"the fused kernel of {kind.__name__} steps {dtype} on {device} wrongly in torch {torch.__version__}, as a "
                    f"trial step has shown; param_groups[{index}] takes the unfused step"
                )

    def _check_gaps(self, index: int, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if not is_dense(local_part(parameter)):
                self._avoided.add(index)
                self._say(
                    f"{self._gradients.name(parameter)} has gaps between its elements in memory, which a fused kernel would "
                    f"write to; param_groups[{index}] takes the unfused step; build the parameter from a .clone()"
                )

    def _has_late(self, stepped: SteppedGroup) -> bool:
        """Whether some of the parameters have momentum and others, whose first gradient this is, do not."""
        if not isinstance(self._optimizer, SGD) or stepped.group["momentum"] == 0:
            return False
        have = {state.get("momentum_buffer") is not None for state in stepped.states}
        return len(have) == 2

    def _lay_out(self, stepped: SteppedGroup) -> None:
        """Copies what a kernel would pair wrongly into the strides of its parameter."""
        for place, (parameter, gradient) in enumerate(zip(stepped.parameters, stepped.gradients, strict=True)):
            if not pairs_with(local_part(gradient), local_part(parameter)):
                parameter.grad = copied = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
                stepped.gradients[place] = copied
                self._say(
                    f"the gradient of {self._gradients.name(parameter)} does not have the strides of its parameter, which a "
                    "fused kernel takes for granted; such gradients are copied in each step; look for a hook or a handler that "
                    "sets .grad, and have it keep the strides"
                )
            moments = stepped.states[place]
            for key, moment in moments.items():
                alike = isinstance(moment, Tensor) and moment.shape == parameter.shape
                if alike and not pairs_with(local_part(moment), local_part(parameter)):
                    moments[key] = torch.empty_like(parameter, dtype=moment.dtype, requires_grad=False).copy_(moment)
                    self._say("moments of the optimizer are laid out again, with the strides that the parameters have now")

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logging.getLogger("ignite_train").warning(what)


@functools.cache
@torch.no_grad()
def can_step_shards(kind: type[Optimizer], mesh: DeviceMesh) -> bool:
    """Whether torch can apply a fused kernel to DTensors: with torch 2.13 it can apply that of Adam only. No collective.

    Args:
        kind: as for `is_kernel_right`.
        mesh: of the parameters.
    """

    def as_shard(tensor: Tensor) -> Tensor:
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)

    parameter = torch.ones(1, device=mesh.device_type)
    try:
        _TRIALS[kind](parameter, torch.ones_like(parameter), frozenset(), _RATE, as_shard)
    except NotImplementedError:  # "does not have a sharding strategy registered"
        return False
    return True


@functools.cache
@torch.no_grad()
def is_kernel_right(
    kind: type[Optimizer], options: frozenset[str], dtype: torch.dtype, device: torch.device, *, tensor_lr: bool = False
) -> bool:
    """Whether two trial steps with a fused kernel come to what arithmetic in float64 comes to.

    Args:
        kind: `SGD`, `Adam` (of which AdamW is a case) or `Adagrad`.
        options: which of the options of a group are switched on, or not zero.
        dtype: that of parameters, gradients and moments.
        device: where they are. An accelerator is waited for.
        tensor_lr: whether the learning rate is a tensor, for which there are kernels of their own.
    """
    if dtype not in _DTYPES:
        return True  # torch refuses to step them
    places = torch.arange(_SIZE, dtype=torch.float64, device="cpu")
    signs = 1.0 - 2.0 * (places % 2)
    parameter = (1.0 + places / _SIZE).to(device, dtype)
    gradient = (signs * (1.0 - 0.25 * (places % 3))).to(device, dtype)  # 1, 0.75 and 0.5, and their negatives
    rate = torch.tensor(_RATE, device=device) if tensor_lr else _RATE
    trial = _TRIALS[kind]
    right = trial(parameter, gradient, options, rate)
    off = (parameter.cpu().double() - right).abs().max().item()  # sync, once for each kind of kernel
    return off <= _ROUNDINGS * torch.finfo(dtype).eps


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _scaled(gradient: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Gradient and `grad_scale` of two trial steps: one into which a factor is folded, and one without a factor."""
    yield 4.0 * gradient, torch.full((), 4.0, dtype=torch.float32, device=gradient.device)
    yield gradient.clone(), None


def _try_sgd(
    parameter: Tensor, gradient: Tensor, options: frozenset[str], rate: Any, wrap: Callable[[Tensor], Tensor] = _as_it_is
) -> Tensor:
    """Steps twice, and gives what `parameter` should be then. The formulas are those in the documentation of torch.

    The kernel is given what `wrap` makes of parameter, gradient and moments.
    """
    decay, momentum, dampening = (0.125 * (name in options) for name in ("weight_decay", "momentum", "dampening"))
    nesterov, maximize = "nesterov" in options, "maximize" in options
    right, moment = parameter.cpu().double(), torch.zeros(())
    buffers: list[Tensor | None] = [None] if momentum else []
    for number, (given, scale) in enumerate(_scaled(gradient)):
        along = (-1.0 if maximize else 1.0) * gradient.cpu().double() + decay * right
        moment = along if number == 0 else momentum * moment + (1.0 - dampening) * along
        right = right - _RATE * (along + momentum * moment if nesterov else moment if momentum else along)
        sgd(
            [wrap(parameter)],
            [wrap(given)],
            buffers,
            foreach=False,
            fused=True,
            grad_scale=scale,
            weight_decay=decay,
            momentum=momentum,
            lr=rate,
            dampening=dampening,
            nesterov=nesterov,
            maximize=maximize,
        )
    return right


def _try_adam(
    parameter: Tensor, gradient: Tensor, options: frozenset[str], rate: Any, wrap: Callable[[Tensor], Tensor] = _as_it_is
) -> Tensor:
    """Tries Adam, as `_try_sgd` does SGD.

    The epsilon is one that float16 holds: at 1e-8, torch's default, any kernel divides zero by zero in it.
    """
    decay = 0.125 * ("weight_decay" in options)
    decoupled, maximize, amsgrad = (name in options for name in ("decoupled_weight_decay", "maximize", "amsgrad"))
    right, first, second = parameter.cpu().double(), torch.zeros(()), torch.zeros(())
    moments = [wrap(torch.zeros_like(parameter)) for _ in range(3)]
    steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
    for number, (given, scale) in enumerate(_scaled(gradient), start=1):
        along = (-1.0 if maximize else 1.0) * gradient.cpu().double() + (0.0 if decoupled else decay) * right
        first, second = 0.5 * first + 0.5 * along, 0.75 * second + 0.25 * along**2
        root = (second / (1.0 - 0.75**number)).sqrt() + _EPSILON
        right = right * (1.0 - _RATE * decay * decoupled) - _RATE * first / (1.0 - 0.5**number) / root
        adam(
            [wrap(parameter)],
            [wrap(given)],
            [moments[0]],
            [moments[1]],
            [moments[2]] if amsgrad else [],
            [steps],
            foreach=False,
            fused=True,
            grad_scale=scale,
            decoupled_weight_decay=decoupled,
            amsgrad=amsgrad,
            beta1=0.5,
            beta2=0.75,
            lr=rate,
            weight_decay=decay,
            eps=_EPSILON,
            maximize=maximize,
        )
    return right


def _try_adagrad(
    parameter: Tensor, gradient: Tensor, options: frozenset[str], rate: Any, wrap: Callable[[Tensor], Tensor] = _as_it_is
) -> Tensor:
    """Tries Adagrad, as `_try_sgd` does SGD."""
    decay, lr_decay = (0.125 * (name in options) for name in ("weight_decay", "lr_decay"))
    maximize = "maximize" in options
    right, total = parameter.cpu().double(), torch.zeros(())
    sums = wrap(torch.zeros_like(parameter))
    steps = torch.zeros((), dtype=torch.float32, device=parameter.device)
    for number, (given, scale) in enumerate(_scaled(gradient)):
        along = (-1.0 if maximize else 1.0) * gradient.cpu().double() + decay * right
        total = total + along**2
        right = right - _RATE / (1.0 + number * lr_decay) * along / (total.sqrt() + _EPSILON)
        adagrad(
            [wrap(parameter)],
            [wrap(given)],
            [sums],
            [steps],
            fused=True,
            grad_scale=scale,
            foreach=False,
            lr=rate,
            weight_decay=decay,
            lr_decay=lr_decay,
            eps=_EPSILON,
            maximize=maximize,
        )
    return right


_TRIALS = {SGD: _try_sgd, Adam: _try_adam, Adagrad: _try_adagrad}
