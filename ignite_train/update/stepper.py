"""Steppers: the one place in which an optimizer moves the parameters, along gradients that become those of the clipped mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from operator import methodcaller
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_train.model.fused_kernels import FusedKernels
from ignite_train.model.gradients import Gradients
from ignite_train.model.in_full import in_full
from ignite_train.model.optimizers import each_optimizer
from ignite_train.model.step_watch import StepWatch

__all__ = ["OneStepper", "SeveralSteppers", "Stepper"]

_NOTHING = nullcontext()
_FUSED = methodcaller("get", "fused")
_OUT_OF_MEMORY = (
    "the optimizer ran out of memory in its step; its first step makes moments, of the size of the parameters: use smaller "
    "micro-batches with more accumulation_steps, or an optimizer with fewer moments"
)
_OTHER_DTYPE = (
    "takes no gradients of another dtype than the parameters, as grad_dtype has made them; torch's SGD does, and for others a "
    "handler of GRADIENTS_REDUCED can round the mean once (docs/programs.md)"
)


class Stepper(Protocol):
    """Steps the optimizers of an update.

    Attributes:
        watch: told of each step.
    """

    watch: StepWatch

    def __call__(self, mean_factor: float, *clip_coefficients: float) -> None:
        """Steps along the gradients times `mean_factor`, which makes them a mean, times a clip coefficient.

        There is one coefficient for all optimizers, or one for each of them.
        """


class OneStepper:
    """Steps one optimizer. The gradients are multiplied first, in one pass over memory.

    Args:
        optimizer: which to step.
        gradients: those of its parameters.
        watch: told of each step.

    Attributes:
        optimizer, gradients, watch: the same.
        kernels: what is known about the optimizer's fused kernels.
    """

    def __init__(self, optimizer: Optimizer, gradients: Gradients, watch: StepWatch) -> None:
        self.optimizer, self.gradients, self.watch = optimizer, gradients, watch
        self._watched = watch.stepping(optimizer)
        said = set[str]()
        self.kernels = FusedKernels(optimizer, gradients, said)
        # The optimizers inside it, as SAM has one, step with kernels of their own.
        _itself, *inner = each_optimizer(optimizer, with_own_state=False)
        self.inner = [FusedKernels(one, gradients, said) for one in inner]

    def __call__(self, mean_factor: float, *clip_coefficients: float) -> None:
        """See `Stepper`."""
        (clip_coefficient,) = clip_coefficients
        if self.inner or self.kernels.unfused or any(map(_FUSED, self.optimizer.param_groups)):
            self.look()
        self.step_along(mean_factor * clip_coefficient)

    def look(self) -> None:
        """Looks at what the step to come is about: a fused kernel may not be able to make it; see `FusedKernels`."""
        for kernels in (self.kernels, *self.inner):
            kernels.look()

    def step_along(self, factor: float) -> None:
        """Steps along the gradients times `factor`, after a `look`."""
        if factor != 1.0:
            self.gradients.multiply(factor)
        self.step()

    def step_with_closure(self, closure: Callable[[], Tensor]) -> None:
        """Steps an optimizer that evaluates the loss again, along gradients that are the clipped mean.

        Args:
            closure: leaves such gradients, at the present parameters, and returns the loss.
        """

        def evaluate() -> Tensor:
            loss = closure()
            for kernels in (self.kernels, *self.inner):
                kernels.look_again()
            return loss

        self.look()
        self.step(evaluate)

    def step(self, *closure: Callable[[], Tensor]) -> None:
        """Calls the optimizer's own step, along the gradients in `.grad`."""
        # A closure may find other gradients, for which groups are switched within the step.
        switches = closure or self.inner or self.kernels.unfused
        with self._all_kernels() if switches else _NOTHING, self._watched:
            try:
                self.optimizer.step(*closure)  # type: ignore[arg-type]  # torch declares that a closure returns a float
            except RuntimeError as error:
                self.explain(error, has_closure=bool(closure))
                raise

    def explain(self, error: RuntimeError, *, has_closure: bool = False) -> None:
        """Adds to an error of the step what to do, where that is known."""
        if isinstance(error, torch.OutOfMemoryError):
            if not has_closure:
                error.add_note(_OUT_OF_MEMORY)
        elif any(p.grad is not None and p.grad.dtype != p.dtype for p in self.gradients.parameters()):
            error.add_note(f"{type(self.optimizer).__name__} {_OTHER_DTYPE}")

    @contextmanager
    def _all_kernels(self) -> Iterator[None]:
        everyone = self.kernels, *self.inner

        def put_back() -> None:
            for kernels in everyone:
                kernels.__exit__()

        try:
            for kernels in everyone:
                kernels.__enter__()
            yield
        finally:
            in_full(put_back)


class SeveralSteppers:
    """Steps several optimizers, each by a stepper of its own.

    Args:
        parts: by name the stepper of each optimizer, and the gradients of its parameters.
        watch: told of each step by the parts.

    Attributes:
        parts, watch: the same.
    """

    def __init__(self, parts: Mapping[str, tuple[Stepper, Gradients]], watch: StepWatch) -> None:
        self.parts, self.watch = parts, watch

    def __call__(self, mean_factor: float, *clip_coefficients: float) -> None:
        """See `Stepper`. An optimizer whose parameters have no gradient is stepped too, as in a loop by hand."""
        if len(clip_coefficients) == 1:
            clip_coefficients *= len(self.parts)
        for (stepper, gradients), coefficient in zip(self.parts.values(), clip_coefficients, strict=True):
            gradients.note_kinds()
            if gradients.kinds:
                stepper(mean_factor, coefficient)
            else:
                stepper(1.0, 1.0)  # there is nothing to multiply
