"""A step whose fused kernel divides the gradients while it reads them, so that no pass multiplies them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ignite_train.device.to_host import is_on_host
from ignite_train.fast.direct_step import DirectStep
from ignite_train.fast.unwrapped_step import UnwrappedStep
from ignite_train.internals.of_torch import step_post_hooks_of, step_post_hooks_of_all, step_pre_hooks_of, step_pre_hooks_of_all
from ignite_train.model.group_tensors import SteppedGroup, gather
from ignite_train.model.optimizers import is_wrapped_by_scheduler
from ignite_train.update.stepper import OneStepper, SeveralSteppers

__all__ = ["LARGEST_DIVISOR", "SMALLEST_DIVISOR", "FoldedStep", "FoldedSteps", "why_never_folded"]

_FOLDING = (Adagrad, Adam, AdamW, SGD)  # with fused=True they divide by `grad_scale` while they read the gradient
_NOT_FUSED = "it was made without fused=True"
LARGEST_DIVISOR = torch.finfo(torch.float32).max  # in which the kernel holds it
SMALLEST_DIVISOR = torch.finfo(torch.float32).tiny
_DTYPES, _DTYPE = {torch.float32, torch.bfloat16, torch.float16}, itemgetter(1)


class FoldedStep:
    """Steps one optimizer, and folds the factor of the gradients into its own kernel where it can be, which costs no pass.

    It can be, if

    - the optimizer is torch's own Adagrad, Adam, AdamW or SGD, with `fused=True` in all its groups;
    - no parameter is wider than float32, which is what the kernel holds the factor in;
    - the kernel is right, and can step all of the parameters; see `FusedKernels`;
    - nothing looks at the gradients between here and there: no pre-hook of the step, no `step` of the user's own.

    Otherwise the plain stepper steps. Which of the two, and why, is logged at the first step. Of an optimizer of another class,
    or without a fused group, it is known when the trainer is made; see `why_never_folded`.

    Both are within one unit in the last place of the gradient times the factor, and the same bits where the factor is a power
    of two. (In bfloat16 and float16 the kernel rounds after its own arithmetic, the multiplication before it.)

    Args:
        plain: steps where the factor cannot be folded.

    Attributes:
        watch: see `Stepper`.
    """

    def __init__(self, plain: OneStepper) -> None:
        self._plain, self.watch = plain, plain.watch
        self._optimizer, self._gradients, self._kernels = plain.optimizer, plain.gradients, plain.kernels
        self._direct = DirectStep(plain.optimizer, plain.gradients, plain.kernels.tensors, plain.watch)
        self._logged = False
        self._host_number = ctypes.c_float()  # the memory of this tensor: torch takes longer to make one
        self._host_divisor = torch.frombuffer(self._host_number, dtype=torch.float32).view(())

    def __call__(self, mean_factor: float, *clip_coefficients: float) -> None:
        """See `Stepper`."""
        (clip_coefficient,) = clip_coefficients
        factor = mean_factor * clip_coefficient
        groups = gather(self._optimizer)
        obstacle = self._why_not_fused(groups)
        if not self._logged:
            _say_how(self._optimizer, obstacle)
            self._logged = True
        if obstacle is None and factor == 1.0:
            self._step_with(groups)
        elif obstacle is None and factor > 0 and SMALLEST_DIVISOR <= 1.0 / factor <= LARGEST_DIVISOR:
            self._step_with(groups, grad_scale=self._divisor(1.0 / factor))
        else:
            self._plain.step_along(factor)

    def step_if(self, may_step: Tensor, divisor: Tensor) -> None:
        """Steps along the gradients divided by `divisor` if `may_step` is 1, and not if it is 0; both on the device.

        A step that is not made leaves parameters, gradients, moments and numbers of steps as they are. Only where there is no
        `why_not_fused`, and no `why_not_queued`.

        Args:
            may_step: of any dtype.
            divisor: float32.
        """
        found_inf = torch.lt(may_step, 1.0, out=torch.empty_like(divisor))  # as the kernel takes it, in one operation
        self._step_with(gather(self._optimizer), grad_scale=divisor, found_inf=found_inf)

    def _divisor(self, value: float) -> Tensor:
        """A float32 on the device of the gradients; if there are several, torch copies it to the others."""
        device, _ = next(iter(self._gradients.kinds))
        if not is_on_host(device):
            return torch.full((), value, dtype=torch.float32, device=device)
        self._host_number.value = value
        return self._host_divisor

    def _step_with(self, groups: Sequence[SteppedGroup], **given: Tensor) -> None:
        """Has the kernel divide by `grad_scale`, and skip the step if `found_inf` is not 0."""
        if self._direct(groups, **given) is None:
            return
        attributes: dict[str, Any] = vars(self._optimizer)
        try:
            attributes.update(given)
            self._plain.step()
        finally:
            try:
                for name in given:
                    attributes.pop(name, None)
            except BaseException:  # by Ctrl-C: a later step would be divided by one that is left
                for name in given:
                    attributes.pop(name, None)
                raise

    def why_not_queued(self) -> str | None:
        """Why a folded step could not be skipped by the device without a trace; asked at each step."""
        optimizer = self._optimizer
        if step_post_hooks_of(optimizer) or step_post_hooks_of_all:
            return "a post-hook of its step would be called for a step that was skipped"
        for group in optimizer.param_groups:
            if type(optimizer) is SGD and group["momentum"] == 0:
                continue  # has no state
            key = "momentum_buffer" if type(optimizer) is SGD else "step"
            for parameter in group["params"]:
                if parameter.grad is not None and optimizer.state.get(parameter, {}).get(key) is None:
                    return "a parameter has no moments yet, and a step that was skipped would leave some behind"
        return None

    def why_not_fused(self) -> str | None:
        """Why the factor cannot be folded into the step; asked at each step, as hooks and groups come and go."""
        return self._why_not_fused(gather(self._optimizer))

    def _why_not_fused(self, groups: Sequence[SteppedGroup]) -> str | None:
        optimizer = self._optimizer
        wrong = self._kernels.why_not_fused(groups)  # looks at what a subclass has of them too
        for kernels in self._plain.inner:
            kernels.look()
        if len(groups) != len(optimizer.param_groups):  # `gather` leaves out a group that is not fused
            return _NOT_FUSED
        if step_pre_hooks_of(optimizer) or step_pre_hooks_of_all:
            return "a pre-hook of its step may look at the gradients"
        step = vars(optimizer).get("step")
        if step is not None and not is_wrapped_by_scheduler(step, type(optimizer)):
            return "its step has been replaced"
        if not _DTYPES.issuperset(map(_DTYPE, self._gradients.kinds)):
            return "there are gradients wider than float32, in which that kernel holds the factor"
        return wrong


def why_never_folded(optimizer: Optimizer) -> str | None:
    """Why no step of an optimizer could be a `FoldedStep`, as far as that is known when the trainer is made. It is logged."""
    why = None
    if type(optimizer) not in _FOLDING:
        why = "it has no fused kernel that this library knows"
    elif not any(group["fused"] for group in optimizer.param_groups):
        why = _NOT_FUSED
    if why is not None:
        _say_how(optimizer, why)
    return why


def _say_how(optimizer: Optimizer, obstacle: str | None) -> None:
    how = "inside its fused kernel" if obstacle is None else f"in a pass over memory of their own, since {obstacle}"
    name = type(optimizer).__name__
    logging.getLogger("ignite_train").info(f"gradients for {name} are unscaled, normalised and clipped {how}")


class FoldedSteps(SeveralSteppers):
    """The same for several optimizers.

    Args:
        plain: the plain steppers.
        limits_each: whether each optimizer has a limit of its own for the norm, so that their factors differ.
    """

    def __init__(self, plain: SeveralSteppers, *, limits_each: bool = False) -> None:
        plain_ones = {name: one for name, (one, _) in plain.parts.items() if isinstance(one, OneStepper)}
        never = {name: why_never_folded(one.optimizer) for name, one in plain_ones.items()}
        steps = {name: (UnwrappedStep if never[name] else FoldedStep)(one) for name, one in plain_ones.items()}
        super().__init__({name: (one, plain.parts[name][1]) for name, one in steps.items()}, plain.watch)
        self._folded = [stepper for stepper in steps.values() if isinstance(stepper, FoldedStep)]
        self._never = next(filter(None, never.values()), None)
        self._limits_each = limits_each

    def step_if(self, may_step: Tensor, divisor: Tensor) -> None:
        """See `FoldedStep.step_if`."""
        for stepper in self._folded:
            stepper.step_if(may_step, divisor)

    def why_not_queued(self) -> str | None:
        """See `FoldedStep.why_not_queued`: what hinders one of them."""
        if self._limits_each:
            return "each optimizer has a limit of its own for the norm"
        return next((why for stepper in self._folded if (why := stepper.why_not_queued())), None)

    def why_not_fused(self) -> str | None:
        """See `FoldedStep.why_not_fused`: what hinders one of them."""
        if self._never is not None:
            return self._never
        for _, gradients in self.parts.values():
            gradients.note_kinds()
        return next((why for stepper in self._folded if (why := stepper.why_not_fused())), None)
