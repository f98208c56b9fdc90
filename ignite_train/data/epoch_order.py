"""The order of one epoch: drawn where it is short, computed index by index where it is long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ignite_train.data.keyed_permutation import KeyedPermutation

__all__ = ["Order", "epoch_order", "is_drawn"]

_MAX_DRAWN = 2**16  # numbers; drawing the order of so many takes some milliseconds
Order: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""From positions in the epoch to the numbers that stand there."""


def is_drawn(length: int) -> bool:
    """Whether the order of so many numbers is drawn and not computed; part of what the order depends on."""
    return length <= _MAX_DRAWN


def epoch_order(length: int, *, key: tuple[int, int], drawn_seed: int) -> Order:
    """A random order of the whole numbers below `length`; the same on all ranks.

    Args:
        length: how many.
        key: of an order that is computed, which costs no time or memory before it is used.
        drawn_seed: of an order that is drawn, here and now.
    """
    if not is_drawn(length):
        return KeyedPermutation(length, key)
    generator = torch.Generator("cpu").manual_seed(drawn_seed)
    drawn: NDArray[np.int64] = torch.randperm(length, generator=generator, device="cpu").numpy()  # not torch's default device
    return drawn.__getitem__
