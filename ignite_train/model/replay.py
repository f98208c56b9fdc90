"""What running a model changes besides gradients, to go back to: random state, buffers, and what forward carries."""

from __future__ import annotations

import torch
from torch import nn

from ignite_train.carried import Carried
from ignite_train.model.random_state import RandomState

__all__ = ["ReplayPoint", "SideEffects"]


class ReplayPoint:
    """Remembers the random state at the start of each update, so that one in a million can be run again as it was.

    Python's generator is remembered in each update from when on it has been seen to move, and that is looked at in the updates
    1, 2, 4, 8, ...: most forwards never use it.

    Args:
        device: where the model lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._updates = 0
        self._python_moves = self._looks = False
        self._state: RandomState | None = None

    def mark(self) -> None:
        """Remembers the state as it is now."""
        self._updates += 1
        if not self._python_moves and self._state is not None and self._looks:
            self._python_moves = self._state.python_has_moved()
        self._looks = self._updates & (self._updates - 1) == 0
        self._state = RandomState(self._device, python=self._looks or self._python_moves)

    def restore(self) -> None:
        """Goes back to where `mark` was last called."""
        assert self._state is not None  # noqa: S101  # `mark` comes before
        self._state.restore()


class SideEffects:
    """Remembers random state, the buffers of a module and what forward carries, so that running it can leave no trace.

    Args:
        module: whose buffers, and whose device.
        carried: what forward carries.
    """

    def __init__(self, module: nn.Module, carried: Carried) -> None:
        self._carried, self._values = carried, carried.copies()
        self._random_state = RandomState(next((p.device for p in module.parameters()), torch.device("cpu")))
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def undo(self) -> None:
        """Puts them back."""
        self._random_state.restore()
        self._carried.replace(self._values)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
