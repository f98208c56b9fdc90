"""The first run of the user's forward, in which mistakes are looked for that cost too much to look for in each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ignite_train.forward import BoundForward, refuse_fraction
from ignite_train.model.loss_declaration import LossDeclarationWarning

__all__ = ["FirstForward", "without_first_look"]


class FirstForward:
    """Stands in the place of `forward` until that has run once, and then leaves it to `forward` itself.

    Args:
        forward: the user's.
        guard: makes the `with` in which it runs.
        check: says what is wrong with its declarations, given a micro-batch.
        replace: puts another function into the place where this stands.

    Attributes:
        forward: the user's.
    """

    def __init__(
        self,
        forward: BoundForward,
        guard: Callable[[], AbstractContextManager[None]],
        check: Callable[[Any], list[str]],
        replace: Callable[[BoundForward], None],
    ) -> None:
        self.forward, self._guard, self._check, self._replace = forward, guard, check, replace
        self._is_checked = False

    def __call__(self, model: nn.Module, micro_batch: Any) -> Any:
        """Runs `forward`."""
        messages: list[str] = []
        with self._guard():
            if not self._is_checked:
                self._is_checked, messages = True, self._check(micro_batch)
            returned = self.forward(model, micro_batch)
        if _size_is_known(returned):
            self._replace(self.forward)
        for message in messages:
            warnings.warn(message, LossDeclarationWarning, stacklevel=2)
        return returned


def without_first_look(forward: BoundForward) -> BoundForward:
    """The user's function, of what may be a `FirstForward`."""
    return forward.forward if isinstance(forward, FirstForward) else forward


def _size_is_known(returned: Any) -> bool:
    """Refuses a pair whose second is a tensor with a fraction; False while it is 0, which an accuracy may be at first.

    Waits for the device, if forward returns a plain pair with a floating-point tensor.
    """
    if type(returned) is not tuple or len(returned) != 2 or not isinstance(returned[1], Tensor):
        return True
    if returned[1].numel() != 1 or returned[1].requires_grad or not returned[1].is_floating_point():
        return True
    size = float(returned[1])  # sync, once in a process
    refuse_fraction(size)
    return size != 0
