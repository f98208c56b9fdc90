"""The order of one epoch: drawn where it is short, computed index by index where it is long."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray  # which takes as long to import as a third of this library

__all__ = ["KeyedPermutation", "Order", "epoch_order"]

_MULTIPLIERS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)  # those of the hash "lowbias32" by C. Wellons, 2018
_15, _16, _32 = np.uint32(15), np.uint32(16), np.uint64(32)
_MAX_DRAWN = 2**16  # numbers; drawing the order of so many takes some milliseconds
Order: TypeAlias = "Callable[[NDArray[np.int64]], NDArray[np.int64]]"
"""From positions in the epoch to the numbers that stand there."""


def epoch_order(length: int, *, key: tuple[int, int], drawn_seed: int) -> Order:
    """A random order of the whole numbers below `length`; the same on all ranks.

    Args:
        length: how many.
        key: of an order that is computed, which costs no time or memory before it is used.
        drawn_seed: of an order that is drawn, here and now.
    """
    if length > _MAX_DRAWN:
        return KeyedPermutation(length, key)
    generator = torch.Generator("cpu").manual_seed(drawn_seed)
    drawn: NDArray[np.int64] = torch.randperm(length, generator=generator, device="cpu").numpy()  # not torch's default device
    return drawn.__getitem__


class KeyedPermutation:
    """Puts the whole numbers below n into an order that is a function of n and a key. It holds no list, so n may be large.

    A number is cut into a high and a low half, which pass through a Feistel network of eight rounds (Luby and Rackoff, "How to
    construct pseudorandom permutations from pseudorandom functions", 1988): each round changes one half by a function of the
    other half and the key, and so can be undone; therefore no two numbers become the same. The low half has half of the bits
    that n needs and changes by exclusive or. The high half has as many values as are needed to hold n, and changes by addition.
    A result that is not below n passes through again until it is ("cycle walking"; both from Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002); fewer than one number in √n / 2 does. Everything is integer arithmetic, so that the order
    is the same on every machine.

    The order is as random as training needs, see `tests/data/test_keyed_permutation.py`, but an observer can find the key from
    it. For a few samples a drawn order is better, since all orders of them are then equally likely.

    Args:
        length: n, up to 2⁶².
        key: two whole numbers of any size, such as seed and epoch. Another key or another n gives an unrelated order.

    Example:
        >>> import numpy as np
        >>> from ignite_train.data.epoch_order import KeyedPermutation
        >>> sorted(KeyedPermutation(5, (0, 1))(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, length: int, key: tuple[int, int]) -> None:
        low_bits = max(length - 1, 0).bit_length() // 2
        num_high = max(-(-length >> low_bits), 1)
        self._length, self._low_bits, self._low_mask = length, np.int64(low_bits), np.uint32(2**low_bits - 1)
        self._num_high, self._modulus = np.uint64(num_high), np.uint32(num_high)
        digest = hashlib.blake2b(f"{key[0]} {key[1]} {length}".encode(), digest_size=64).digest()
        self._keys = np.frombuffer(digest, dtype="<u4").astype(np.uint32).reshape(4, 4)  # two rounds to a row

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers at these positions; each position is from 0 to n - 1. Costs time for each position, and none for n."""
        numbers = self._shuffle(positions)
        outside = np.flatnonzero(numbers >= self._length)
        while len(outside):
            numbers[outside] = self._shuffle(numbers[outside])
            outside = outside[numbers[outside] >= self._length]
        return numbers

    def _shuffle(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """A pass through the network, over all pairs of a high and a low half."""
        low = numbers.astype(np.uint32) & self._low_mask
        high = (numbers >> self._low_bits).astype(np.uint32)
        wide = np.empty(numbers.shape, np.uint64)
        for first, second, third, fourth in self._keys:
            wide[...] = _hash(low, first, second)
            wide *= self._num_high
            wide >>= _32  # a number below `num_high`, as likely as any other within 2^-32 times num_high
            high += wide.astype(np.uint32)
            np.minimum(high, high - self._modulus, out=high)  # a difference below zero wraps round to a large number
            low ^= _hash(high, third, fourth) & self._low_mask
        numbers = high.astype(np.int64)
        numbers <<= self._low_bits
        numbers |= low
        return numbers


def _hash(half: NDArray[np.uint32], first: np.uint32, second: np.uint32) -> NDArray[np.uint32]:
    """A number of 32 bits for each half, each bit of which depends on all bits of the half and of the keys."""
    hashed = half ^ first
    hashed *= _MULTIPLIERS[0]
    hashed ^= hashed >> _15
    hashed += second
    hashed *= _MULTIPLIERS[1]
    hashed ^= hashed >> _16
    return hashed
