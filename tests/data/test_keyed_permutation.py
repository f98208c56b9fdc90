"""The computed order: a bijection for any number of samples, the same everywhere, begun at once, as random as a drawn one."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from functools import partial
from hashlib import blake2b
from itertools import islice, pairwise, permutations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ignite_train import ResumableLoader, ShardedSampler
from ignite_train.data.epoch_order import KeyedPermutation
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
    """A run that was left within an epoch would miss samples in another order."""
    sampler = ShardedSampler(range(HUGE), shuffle=True, seed=5)
    sampler.set_epoch(3)
    assert sampler.describe() == {"samples": HUGE, "shuffle": True, "seed": 5}
    assert [*islice(sampler, 5)] == [729548687, 750824025, 561676510, 440363653, 510416336]


# --- begun at once, anywhere, and dealt out to ranks ---


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions were computed, call by call."""
    numbers: list[int] = []

    class Recorded(KeyedPermutation):
        def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
            numbers.append(len(positions))
            return super().__call__(positions)

    monkeypatch.setattr("ignite_train.data.epoch_order.KeyedPermutation", Recorded)
    return numbers


@pytest.mark.parametrize("start", [0, 7, HUGE - 3])
def test_an_epoch_begins_at_once(start: int, asked: list[int]) -> None:
    """Of a thousand million samples only the first few indices are computed, from the start or anywhere else."""
    sampler = ShardedSampler(range(HUGE), shuffle=True, seed=5)
    sampler.seek(start)
    tracemalloc.start()
    try:
        first = next(iter(sampler))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert first == by_hand(start, HUGE, (5, 0))
    assert asked == [min(2**10, HUGE - start)]
    assert most < 2**20


def test_any_part_of_the_order_is_that_of_the_whole() -> None:
    """A pass of the sampler, which computes it in pieces, from any sample on."""
    order = whole(LARGE, 5, 2).tolist()
    sampler = ShardedSampler(range(LARGE), shuffle=True, seed=5)
    sampler.set_epoch(2)
    for start in (0, 1, 1023, 1024, 40_000, LARGE - 1, LARGE, LARGE + 5):
        sampler.seek(start)
        assert [*sampler] == order[start:]


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_rank_computes_its_own_share(world_size: int, monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    order = whole(LARGE, 5, 0).tolist()
    monkeypatch.setattr("ignite_train.ranks.collectives.world_size", lambda: world_size)
    for rank in range(world_size):
        monkeypatch.setattr("ignite_train.ranks.collectives.rank", partial(int, rank))
        sampler = ShardedSampler(range(LARGE), shuffle=True, seed=5)
        sampler.seek(9)
        assert [*sampler] == order[9 + rank :: world_size]
    assert sum(asked) == LARGE - 9


def test_a_loader_has_the_order_of_the_sampler() -> None:
    loader = ResumableLoader(range(HUGE), 4, shuffle=True, seed=5)
    loader.set_epoch(1)
    loader.seek(12_345_678)
    assert next(iter(loader)).tolist() == [by_hand(12_345_678 + i, HUGE, (5, 1)) for i in range(4)]


def test_a_short_order_is_drawn() -> None:
    """So each order of a few samples is equally likely."""
    sampler = ShardedSampler(range(LARGE - 1), shuffle=True, seed=5)
    sampler.set_epoch(2)
    drawn = torch.randperm(LARGE - 1, generator=torch.Generator().manual_seed(5 * 1_000_003 + 2))
    assert [*sampler] == drawn.tolist()
    assert "order" not in sampler.describe()

    sampler, found = ShardedSampler(range(4), shuffle=True, seed=5), Counter[tuple[int, ...]]()
    for epoch in range(2400):
        sampler.set_epoch(epoch)
        found[tuple(sampler)] += 1
    assert_uniform(np.array([found[order] for order in permutations(range(4))]), 23, 100)


# --- as random as a drawn one ---


def assert_uniform(counts: NDArray[np.int64], degrees: int, expected: float) -> None:
    """Chi-square lies where it lies for a drawn order, but for one in 15,000: neither too uneven nor too even."""
    square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(square - degrees) < 4 * math.sqrt(2 * degrees), square / degrees


def assert_independent(a: NDArray[np.int64], b: NDArray[np.int64], length: int, cells: int = 64) -> None:
    """Of two lists of numbers below `length`: an entry of one says nothing about the entry of the other at the same place."""
    counts = np.zeros((cells, cells), np.int64)
    np.add.at(counts, (a * cells // length, b * cells // length), 1)
    assert_uniform(counts, (cells - 1) ** 2, len(a) / cells**2)


@pytest.mark.parametrize("length", [LARGE, slow(2**16), slow(100_003), slow(2**18 - 5), slow(2**20 + 7)])
def test_places_neighbours_and_orders_are_unrelated(length: int) -> None:
    """A number and its place, also its last bits; a number and those after it; orders of two epochs and of two seeds."""
    order, places = whole(length, 1, 0), np.arange(length)
    assert_independent(order, places, length)
    assert_independent(order % 64, places % 64, 64)
    for distance in (1, 2, 256):
        assert_independent(order[:-distance], order[distance:], length)
    for other in (whole(length, 1, 1), whole(length, 2, 0)):
        assert_independent(order, other, length)


@pytest.mark.slow
@pytest.mark.parametrize("length", [257, 64, 1000])
def test_chance_meetings_are_as_rare_as_in_drawn_orders(length: int) -> None:
    """A number followed by the next one, and a number in its place of the epoch before: 1 / k! / e of all epochs have k such.

    So few numbers are harder for the network than the many that it is used for, since its halves have a few bits.
    """
    orders = [whole(length, 9, epoch) for epoch in range(601)]
    followed = [int((np.diff(order) == 1).sum()) for order in orders[1:]]
    repeated = [int((one == other).sum()) for one, other in pairwise(orders)]
    chances = [math.exp(-1) / math.factorial(k) for k in range(4)]
    expected = np.array([*chances, 1 - sum(chances)]) * 600
    for meetings in (followed, repeated):
        counts = np.bincount(np.minimum(meetings, 4), minlength=5)
        assert ((counts - expected) ** 2 / expected).sum() < 18.5  # but for one in a thousand, with four degrees of freedom


def test_orders_of_two_lengths_are_unrelated() -> None:
    """A dataset that grew by one sample gets another order, not the old one with a sample put in."""
    shorter, longer = whole(LARGE, 1, 0), whole(LARGE + 1, 1, 0)[:-1]
    assert (shorter == longer).sum() < 10
