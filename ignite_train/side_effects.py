"""What running a model changes besides gradients, to go back to: random state and buffers."""

from __future__ import annotations

import random
import types

import torch
from torch import nn

__all__ = ["RandomState", "SideEffects"]


class RandomState:
    """Remembers torch's generators of the CPU and of the model's device, and Python's, as they are when it is made.

    Args:
        module: whose device counts.
    """

    def __init__(self, module: nn.Module) -> None:
        self._cpu = torch.get_rng_state()
        self._python = random.getstate()
        device = next(module.parameters()).device
        self._device = device
        self._backend: types.ModuleType | None = None if device.type == "cpu" else torch.get_device_module(device)
        self._on_device = None if self._backend is None else self._backend.get_rng_state(device)

    def restore(self) -> None:
        """Goes back to it."""
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        if self._backend is not None:
            self._backend.set_rng_state(self._on_device, self._device)


class SideEffects:
    """Remembers the random state and the buffers of a module, so that what runs it from now on can leave no trace.

    Args:
        module: whose buffers, and whose device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._random_state = RandomState(module)
        self._buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def undo(self) -> None:
        """Puts them back."""
        self._random_state.restore()
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
