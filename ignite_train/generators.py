"""The random generators that a training run draws from: Python's, NumPy's and torch's, on the CPU and on the accelerators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["check_generators", "generator_states", "restore_generators", "seed_generators"]


def generator_states(*, accelerators: bool = True) -> dict[str, Any]:
    """The state of each default generator of this process, in plain types."""
    numpy = np.random.get_state(legacy=False)
    states: dict[str, Any] = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    if accelerators and torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        states["accelerators"] = [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]
    return states


def check_generators(states: Mapping[str, Any]) -> None:
    """Tries `states` on generators that are thrown away, so that those in use change only if all of them can be restored.

    Raises:
        ValueError: one of them is not a state of its generator.
    """
    try:
        _check_numpy(states["numpy"])
        version, internal, gauss = states["python"]
        random.Random().setstate((version, tuple(internal), gauss))  # noqa: S311
        np.random.RandomState().set_state(states["numpy"])
        torch.Generator().set_state(states["torch"])
        if "accelerators" in states and torch.accelerator.is_available():
            for state in states["accelerators"][: torch.accelerator.device_count()]:
                torch.Generator(torch.accelerator.current_accelerator()).set_state(state)
    except (KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise ValueError(f"the states of the random generators cannot be restored: {error}") from error


def restore_generators(states: Mapping[str, Any]) -> None:
    """Goes back to `states`; accelerators of which nothing is in it are left alone.

    Raises:
        ValueError: NumPy's state has an invalid position.
    """
    _check_numpy(states["numpy"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "accelerators" in states and torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        for index, state in enumerate(states["accelerators"][: torch.accelerator.device_count()]):
            module.set_rng_state(state, index)


def _check_numpy(state: Any) -> None:
    """NumPy would take any position, and read beyond its table at the next draw."""
    position = state["state"].get("pos", 0)
    if type(position) is not int or not 0 <= position <= len(state["state"].get("key", ())):
        raise ValueError(f"the state of NumPy's generator has the position {position!r:.40}, which cannot be")


def seed_generators(*key: int) -> None:
    """Seeds those of the CPU with a hash of `key`; fast enough for each sample, which `torch.manual_seed` is not."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
