"""Stepping: the optimizer moves the parameters, and the gradients become those of the clipped mean on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ignite_train.device.to_host import is_on_host
from ignite_train.model.direct_step import DirectStep
from ignite_train.model.fused_kernels import FusedKernels
from ignite_train.model.gradients import Gradients
from ignite_train.model.group_tensors import GroupTensors, SteppedGroup, gather
from ignite_train.model.optimizers import inner_optimizers, is_wrapped_by_scheduler
from ignite_train.model.step_watch import StepWatch

__all__ = ["LARGEST_DIVISOR", "SMALLEST_DIVISOR", "Stepping", "SteppingTogether"]

_FOLDING = (Adagrad, Adam, AdamW, SGD)  # with fused=True they divide by `grad_scale` while they read the gradient
LARGEST_DIVISOR = torch.finfo(torch.float32).max  # in which the kernel holds it
SMALLEST_DIVISOR = torch.finfo(torch.float32).tiny
_NOTHING = nullcontext()
_DTYPES, _DTYPE = {torch.float32, torch.bfloat16, torch.float16}, itemgetter(1)


class Stepping:
    """Steps `optimizer` along its gradients times a factor: unscaled, normalised and clipped at once.

    The factor is folded into the optimizer's own kernel, so that it costs no pass over memory, if

    - the optimizer is torch's own Adagrad, Adam, AdamW or SGD, with `fused=True` in all its groups;
    - no parameter is wider than float32, which is what the kernel holds the factor in;
    - the kernel is right, and can step all of the parameters; see `FusedKernels`;
    - nothing looks at the gradients between here and there: no pre-hook of the step, no `step` of the user's own.

    Otherwise the gradients are multiplied first. Which of the two, and why, is logged at the first step. Both are within one
    unit in the last place of the gradient times the factor, and the same bits where the factor is a power of two. (In bfloat16
    and float16 the kernel rounds after its own arithmetic, the multiplication before it.)

    Args:
        optimizer: which to step.
        gradients: those of its parameters.
        watch: told of each step.
        takes_closure: whether its step is given a closure.

    Attributes:
        watch: the same.
    """

    def __init__(self, optimizer: Optimizer, gradients: Gradients, watch: StepWatch, *, takes_closure: bool = False) -> None:
        self._optimizer, self._gradients, self._takes_closure = optimizer, gradients, takes_closure
        self.watch = watch
        tensors, said = GroupTensors(gradients), set[str]()
        self._kernels = FusedKernels(optimizer, gradients, tensors, said)
        # The optimizers inside it, as SAM has one, step with kernels of their own.
        inner = inner_optimizers(optimizer, with_own_state=False).values()
        self._inner = [FusedKernels(one, gradients, GroupTensors(gradients), said) for one in inner]
        self._direct = DirectStep(optimizer, gradients, tensors, watch)
        self._logged = False
        self._host_number = np.zeros((), dtype=np.float32)  # the memory of this tensor: torch takes longer to make one
        self._host_divisor = torch.from_numpy(self._host_number)

    def __call__(self, mean_factor: float, clip_coefficient: float) -> None:
        """Steps along the gradients times `mean_factor`, which makes them a mean, times `clip_coefficient`."""
        factor, groups = mean_factor * clip_coefficient, gather(self._optimizer)
        obstacle = self._why_not_fused(groups)
        if not self._logged:
            self._say_how(obstacle)
        if obstacle is None and factor == 1.0:
            self._step_with(groups)
        elif obstacle is None and factor > 0 and SMALLEST_DIVISOR <= 1.0 / factor <= LARGEST_DIVISOR:
            self._step_with(groups, grad_scale=self._divisor(1.0 / factor))
        else:
            if factor != 1.0:
                self._gradients.multiply(factor)
            self._step()

    def step_with_closure(self, closure: Callable[[], Tensor]) -> None:
        """Steps an optimizer that evaluates the loss again, along gradients that are the clipped mean.

        Args:
            closure: leaves such gradients, at the present parameters, and returns the loss.
        """
        kernels = (self._kernels, *self._inner)

        def evaluate() -> Tensor:
            loss = closure()
            for one in kernels:
                one.look_again()
            return loss

        for one in kernels:
            one.look()
        self._step(evaluate)

    def step_if(self, may_step: Tensor, divisor: Tensor) -> None:
        """Steps along the gradients divided by `divisor` if `may_step` is 1, and not if it is 0; both float32, on the device.

        A step that is not made leaves parameters, gradients, moments and numbers of steps as they are. Only where there is no
        `why_not_fused`, and no `why_not_queued`.
        """
        self._step_with(gather(self._optimizer), grad_scale=divisor, found_inf=1.0 - may_step)

    def _divisor(self, value: float) -> Tensor:
        """A float32 on the device of the gradients; if there are several, torch copies it to the others."""
        device, _ = next(iter(self._gradients.kinds))
        if not is_on_host(device):
            return torch.full((), value, dtype=torch.float32, device=device)
        self._host_number[()] = value
        return self._host_divisor

    def _step_with(self, groups: Sequence[SteppedGroup], **given: Tensor) -> None:
        """Has the kernel divide by `grad_scale`, and skip the step if `found_inf` is not 0."""
        if self._direct(groups, **given) is None:
            return
        attributes: dict[str, Any] = vars(self._optimizer)
        attributes.update(given)
        try:
            self._step()
        finally:
            for name in given:
                del attributes[name]

    def _step(self, *closure: Callable[[], Tensor]) -> None:
        """Calls the optimizer's own step."""
        # A closure may find other gradients, for which groups are switched within the step.
        switches = closure or self._inner or self._kernels.unfused
        with self._all_kernels() if switches else _NOTHING, self.watch.stepping(self._optimizer):
            try:
                self._optimizer.step(*closure)  # type: ignore[arg-type]  # torch declares that a closure returns a float
            except torch.OutOfMemoryError as error:
                if not closure:
                    error.add_note(
                        "the optimizer ran out of memory in its step; its first step makes moments, of the size of the "
                        "parameters: use smaller micro-batches with more accumulation_steps, or an optimizer with fewer moments"
                    )
                raise

    def _all_kernels(self) -> ExitStack:
        contexts = ExitStack()
        for kernels in (self._kernels, *self._inner):
            contexts.enter_context(kernels)
        return contexts

    def why_not_queued(self) -> str | None:
        """Why a folded step could not be skipped by the device without a trace; asked at each step."""
        optimizer = self._optimizer
        if self._takes_closure:
            return "its step evaluates the loss again"
        if optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks:
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
        for kernels in self._inner:
            kernels.look()
        if type(optimizer) not in _FOLDING:
            return "it has no fused kernel that this library knows"
        for group in optimizer.param_groups:
            if not group["fused"]:
                return "it was made without fused=True"
        if optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
            return "a pre-hook of its step may look at the gradients"
        step = vars(optimizer).get("step")
        if step is not None and not is_wrapped_by_scheduler(step, type(optimizer)):
            return "its step has been replaced"
        if not _DTYPES.issuperset(map(_DTYPE, self._gradients.kinds)):
            return "there are gradients wider than float32, in which that kernel holds the factor"
        return wrong

    def _say_how(self, obstacle: str | None) -> None:
        name = type(self._optimizer).__name__
        how = "inside its fused kernel" if obstacle is None else f"in a pass over memory of their own, since {obstacle}"
        logging.getLogger("ignite_train").info(f"gradients for {name} are unscaled, normalised and clipped {how}")
        self._logged = True


class SteppingTogether:
    """Steps several optimizers, each in the way that suits it; see `Stepping`.

    Args:
        parts: for each optimizer its step, and the gradients of its parameters.
        watch: told of each step by the parts.
        limits_each: whether each optimizer has a limit of its own for the norm, so that their factors differ.

    Attributes:
        watch: the same.
    """

    def __init__(self, parts: Sequence[tuple[Stepping, Gradients]], watch: StepWatch, *, limits_each: bool = False) -> None:
        self._parts, self.watch, self._limits_each = tuple(parts), watch, limits_each

    def __call__(self, mean_factor: float, *clip_coefficients: float) -> None:
        """Steps along the gradients times `mean_factor`, and a coefficient: one for all optimizers, or one for each of them.

        An optimizer whose parameters have no gradient is stepped too, as in a loop by hand.
        """
        if len(clip_coefficients) == 1:
            clip_coefficients *= len(self._parts)
        for (stepping, gradients), coefficient in zip(self._parts, clip_coefficients, strict=True):
            if gradients.count:
                stepping(mean_factor, coefficient)
            else:
                stepping(1.0, 1.0)  # there is nothing to multiply

    def step_if(self, may_step: Tensor, divisor: Tensor) -> None:
        """See `Stepping.step_if`."""
        for stepping, _ in self._parts:
            stepping.step_if(may_step, divisor)

    def why_not_queued(self) -> str | None:
        """See `Stepping.why_not_queued`: what hinders one of them."""
        if self._limits_each:
            return "each optimizer has a limit of its own for the norm"
        return next((why for stepping, _ in self._parts if (why := stepping.why_not_queued())), None)

    def why_not_fused(self) -> str | None:
        """See `Stepping.why_not_fused`: what hinders one of them."""
        return next((why for stepping, _ in self._parts if (why := stepping.why_not_fused())), None)
