"""The random state of this process, to go back to."""

from __future__ import annotations

import random
import types

import torch
from torch import nn

__all__ = ["RandomState"]


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
