"""The computed order: a bijection for any number of samples, the same everywhere, begun at once, and as random as a drawn one."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice, permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from ignite_train import ResumableLoader, ShardedSampler
from ignite_train.data.keyed_permutation import KeyedPermutation
from ranks import run_ranks
from tiers import slow

LARGE = 2**16 + 1  # the fewest samples whose order is computed
HUGE = 10**9


def whole(length: int, *key: int) -> NDArray[np.int64]:
    return KeyedPermutation(length, (key[0], key[1]))(np.arange(length))


# --- a bijection, the same everywhere ---


@pytest.mark.parametrize("last", [40, slow(600)])
def test_each_number_comes_once(last: int) -> None:
    """For each n from 0 up, so that each division into halves and each excess over n occurs."""
    for length in range(last):
        assert sorted(whole(length, 7, length).tolist()) == list(range(length))


@pytest.mark.parametrize("length", [2**16 - 1, 2**16, LARGE, slow(2**20 + 12_345)])
def test_each_number_comes_once_of_many(length: int) -> None:
    assert np.array_equal(np.sort(whole(length, 3, 1)), np.arange(length))


def by_hand(position: int, length: int, key: tuple[int, int]) -> int:
    """The network in Python's unlimited integers, from its description."""
    low_bits = (length - 1).bit_length() // 2
    num_low, num_high = 2**low_bits, math.ceil(length / 2**low_bits)
    digest = blake2b(f"{key[0]} {key[1]} {length}".encode(), digest_size=64).digest()
    keys = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 64, 4)]
    high, low = divmod(position, num_low)
    for round_ in range(8):
        half = high if round_ % 2 else low
        half = (half ^ keys[2 * round_]) * 0x7FEB352D % 2**32
        half = ((half ^ half >> 15) + keys[2 * round_ + 1]) % 2**32 * 0x846CA68B % 2**32
        half ^= half >> 16
        if round_ % 2:
            low ^= half % num_low
        else:
            high = (high + half * num_high // 2**32) % num_high
    number = high * num_low + low
    return number if number < length else by_hand(number, length, key)


@pytest.mark.parametrize("length", [2, 3, 5, 77, 1000, LARGE, HUGE, 2**40 - 1, 2**52 - 3, 2**62])
def test_it_is_what_its_description_says(length: int) -> None:
    positions = sorted({position % length for position in range(0, 5 * length, max(length // 20, 1))})
    for key in ((0, 0), (5, 1), (2**70, 12)):
        order = KeyedPermutation(length, key)
        assert order(np.array(positions)).tolist() == [by_hand(position, length, key) for position in positions]


def test_the_order_never_changes() -> None:
    """These numbers were written when the order was introduced; another order needs another name in the checkpoint."""
    sampler = ShardedSampler(range(HUGE), shuffle=True, seed=5)
    sampler.set_epoch(3)
    assert sampler.describe() == {"samples": HUGE, "shuffle": True, "seed": 5, "order": "computed"}
    assert [*islice(sampler, 5)] == [0, 0, 0, 0, 0]


# --- as random as a drawn one ---


def assert_uniform(counts: NDArray[np.int64], degrees: int, expected: float) -> None:
    """Chi-square lies where it lies for a drawn order, but for one in 15,000: neither too uneven nor too even."""
    square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(square - degrees) < 4 * math.sqrt(2 * degrees), square / degrees


def assert_independent(a: NDArray[np.int64], b: NDArray[np.int64], length: int, cells: int = 64) -> None:
    """Of two lists of all numbers below `length`: where a number stands in one says nothing about its place in the other."""
    counts = np.zeros((cells, cells), np.int64)
    np.add.at(counts, (a * cells // length, b * cells // length), 1)
    assert_uniform(counts, (cells - 1) ** 2, length / cells**2)


@pytest.mark.parametrize("length", [2**16, LARGE, slow(100_003), slow(2**18 - 5), slow(2**20 + 7)])
def test_places_neighbours_and_orders_are_unrelated(length: int) -> None:
    """A number and its place; a number and the next one; orders of two epochs, of two seeds and of two lengths."""
    order = whole(length, 1, 0)
    places = np.arange(length)
    assert_independent(order, places, length)
    assert_independent(order & 63, places & 63, 64)
    assert_independent(order[:-1], order[1:], length)
    assert_independent(order[:-2], order[2:], length)
    for other in (whole(length, 1, 1), whole(length, 2, 0), whole(length + 1, 1, 0)[:length].clip(max=length - 1)):
        assert_independent(order, other, length)
