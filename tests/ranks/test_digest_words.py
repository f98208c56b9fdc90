"""Digests are compared by a sum over the ranks, of any number of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ignite_train.errors import UnlikeMicroBatchesError
from ignite_train.ranks.data_ranks import DataRanks
from ignite_train.ranks.digest_words import differ, differ_on_device, digest_words, with_squares
from ignite_train.ranks.same_micro_batches import SameMicroBatches


def summed(digests: list[int]) -> list[float]:
    """Adds up as a ring of ranks does, one after the other."""
    sums = torch.zeros(4, dtype=torch.float64)
    for digest in digests:
        sums += torch.tensor(with_squares(digest_words(digest, 2)), dtype=torch.float64)
    return sums.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 33, 64, 1000, 4097])
@pytest.mark.parametrize("digest", [0, 1, 0xFFFFFFFF, 0xFFFEFFFF, 0x80018001, 0xDEADBEEF])
def test_digests_differ_where_one_bit_does(num_ranks: int, digest: int) -> None:
    same = [digest] * num_ranks
    for bit in (None, 0, 15, 16, 31):
        odd = [digest ^ (1 << bit), *same[1:]] if bit is not None else same
        sums, wrong = summed(odd), odd != same and num_ranks > 1
        assert differ(sums, num_ranks) == wrong
        assert bool(differ_on_device(torch.tensor(sums, dtype=torch.float64), num_ranks)) == wrong


@pytest.mark.parametrize("odd", [None, 0, 63])
def test_a_large_group_is_fed_the_same_micro_batches(odd: int | None) -> None:
    """Its squares were too large for float64 once, so that some updates of more than 32 ranks were refused."""
    groups = tuple(range(64)), tuple(range(64, 128))
    for number in range(50):
        batch = torch.randn(4, generator=torch.Generator().manual_seed(number))
        same = SameMicroBatches(DataRanks(groups))
        sums = torch.zeros(same.payload_size, dtype=torch.float64)
        for rank in range(128):
            sums += _sent(groups, rank, batch + 1.0 if rank == odd else batch)
        assert bool(same.vetoes(sums)) == (odd is not None)
        if odd is None:
            same.on_reduced(sums.tolist())
        else:
            with pytest.raises(UnlikeMicroBatchesError) as raised:
                same.on_reduced(sums.tolist())
            assert raised.value.ranks == groups[0]


def _sent(groups: tuple[tuple[int, ...], ...], rank: int, batch: Tensor) -> Tensor:
    same = SameMicroBatches(DataRanks(groups))
    same._own = next(number for number, group in enumerate(groups) if rank in group)
    same.look([batch])
    return torch.tensor(same.payload(), dtype=torch.float64)
