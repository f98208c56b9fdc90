"""The step of torch's optimizers without the two wrappers that torch puts around it, which cost a small model much.

They open a range for a profiler, call hooks and switch gradients off. Without a profiler and without hooks the function inside
does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from types import FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from ignite_train.internals.of_torch import (
    grad_mode_wrapper,
    profiler_is_on,
    step_post_hooks_of,
    step_post_hooks_of_all,
    step_pre_hooks_of,
    step_pre_hooks_of_all,
)
from ignite_train.model.optimizers import is_torchs, is_wrapped_by_scheduler
from ignite_train.update.stepper import OneStepper

__all__ = ["UnwrappedStep", "why_wrapped"]

_FUSED = methodcaller("get", "fused")
_SETTABLE = {"grad_scale", "found_inf", "_init_group", "_optimizer_step_code"}  # attributes that change a step


class UnwrappedStep:
    """Steps an optimizer of torch's, of any class, without its wrappers; the plain stepper steps where they might do anything.

    Args:
        plain: that stepper.

    Attributes:
        watch: see `Stepper`.
    """

    def __init__(self, plain: OneStepper) -> None:
        self._plain, self._optimizer, self.watch = plain, plain.optimizer, plain.watch
        self._gradients, self._watched = plain.gradients, plain.watch.stepping(plain.optimizer)
        self._class_step = type(plain.optimizer).step
        self._function = _inside(self._class_step)
        self._known_own: Any = None  # the latest `step` of the object that was found to be a scheduler's

    def __call__(self, mean_factor: float, *clip_coefficients: float) -> None:
        """See `Stepper`."""
        optimizer, own = self._optimizer, vars(self._optimizer).get("step")
        if (
            self._function is None
            or any(map(_FUSED, optimizer.param_groups))
            or why_wrapped(optimizer, self._class_step) is not None
            or not (own is None or own is self._known_own or is_wrapped_by_scheduler(own, type(optimizer)))
            or optimizer.defaults["differentiable"]
        ):
            self._plain(mean_factor, *clip_coefficients)
            return
        (clip_coefficient,) = clip_coefficients
        if (factor := mean_factor * clip_coefficient) != 1.0:
            self._gradients.multiply(factor)
        with self._watched:
            if own is not None:  # a scheduler counts the calls, and does nothing else
                self._known_own, optimizer._opt_called = own, True  # type: ignore[attr-defined]
            grad_enabled = torch.is_grad_enabled()
            try:
                torch._C._set_grad_enabled(False)
                self._function(optimizer)
            except RuntimeError as error:
                self._plain.explain(error)
                raise
            finally:
                torch._C._set_grad_enabled(grad_enabled)


def why_wrapped(optimizer: Optimizer, class_step: Callable[..., Any]) -> str | None:
    """Why the wrappers of a step are needed now: asked before each step, as hooks and profilers come and go.

    Args:
        optimizer: whose step.
        class_step: that of its class when this was first looked at.
    """
    if type(optimizer).step is not class_step:
        return "the step of its class has been replaced"
    if not _SETTABLE.isdisjoint(vars(optimizer)):
        return "an attribute of it changes what its step does"
    if step_post_hooks_of(optimizer) or step_post_hooks_of_all or step_pre_hooks_of(optimizer) or step_pre_hooks_of_all:
        return "its step has a hook"
    if profiler_is_on():
        return "a profiler is running, which shows its step"
    return None


def _inside(step: Callable[..., Any]) -> Callable[[Optimizer], Any] | None:
    """The function in a step of torch's that has the two wrappers that are known here; None for any other step."""
    if not is_torchs(step):
        return None
    for wrapper in (Optimizer.profile_hook_step, grad_mode_wrapper):
        if not isinstance(step, FunctionType) or step.__code__ is not wrapper(_any).__code__:
            return None
        step = vars(step)["__wrapped__"]
    return None if "__wrapped__" in vars(step) else step


def _any(optimizer: Optimizer) -> None:
    """A function to wrap, so that torch's wrappers are known by their code."""
