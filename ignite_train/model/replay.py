"""What running a model changes besides gradients, to go back to: random state, buffers, and what forward carries."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from ignite_train.carried import Carried
from ignite_train.model.buffer_rollback import BufferRollback
from ignite_train.model.micro_batch_rollback import MicroBatchRollback
from ignite_train.model.random_state import (
    RandomState,
    capture_random_state,
    generators_within,
    get_generator_state,
    restore_random_state,
    set_generator_state,
)

__all__ = ["ReplayPoint", "SideEffects", "TrialRun"]


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
        self._buffers = BufferRollback(module)
        self._buffers.mark()

    def undo(self) -> None:
        """Puts them back."""
        self._random_state.restore()
        self._carried.replace(self._values)
        self._buffers.roll_back()


class TrialRun:
    """The same for a forward that is run once more than it would be, and not in each update.

    It also remembers NumPy's generator, those that the modules and forward itself hold, the micro-batch, and the attributes of
    the modules, so that a counter which forward increments does not count this run. What forward changes inside of a list or a
    dict, or keeps outside of the modules, stays as the run has left it.

    Args:
        model: whose modules.
        carried: what forward carries.
        forward: the user's.
        micro_batch: that it will be run on.
    """

    def __init__(self, model: nn.Module, carried: Carried, forward: Any, micro_batch: Any) -> None:
        self._side_effects, self._micro_batch = SideEffects(model, carried), MicroBatchRollback(micro_batch)
        self._random_state = capture_random_state(accelerators=False)  # that of the device is among the side effects
        owners = [*model.modules(), forward.__self__ if isinstance(forward, MethodType) else forward]
        generators = {id(one): one for owner in owners for one in generators_within(owner).values()}
        self._generators = [(one, get_generator_state(one)) for one in generators.values()]
        self._attributes = [(vars(one), {**vars(one)}) for one in model.modules()]

    def undo(self) -> None:
        """Puts them back."""
        for now, before in self._attributes:
            if now.keys() != before.keys() or any(now[name] is not value for name, value in before.items()):
                now.clear()
                now.update(before)
        self._side_effects.undo()
        self._micro_batch.roll_back()
        restore_random_state(self._random_state)
        for generator, state in self._generators:
            set_generator_state(generator, state)
