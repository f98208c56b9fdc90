"""Which samples a rank sees: each one on exactly one rank, in an order that is a function of seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import Sampler

from ignite_train.arguments import describe, real_number
from ignite_train.ranks import collectives

__all__ = ["HasEpoch", "ShardedSampler"]


@runtime_checkable
class HasEpoch(Protocol):
    """A sampler, loader or dataset whose order or content changes from epoch to epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch (0-based) the next pass is."""


class ShardedSampler(Sampler[int]):
    """Deals a dataset out to the ranks like cards: sample i of the epoch's order goes to rank i mod world size.

    Nothing is repeated and nothing dropped, so shards differ by one at most; the trainer and the evaluator can take that.
    Because of the dealing, W ranks with a batch of B see in each round the same samples as one process with a batch of W·B.

    Args:
        dataset: anything with a length.
        shuffle: a new order in each epoch, from (seed, epoch) alone, by a generator of its own.
        seed: of the order; the same on all ranks.
    """

    def __init__(self, dataset: Sized, *, shuffle: bool, seed: int = 0) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(f"dataset must have a length, got {describe(dataset)}")
        self._length, self._shuffle = len(dataset), shuffle
        self._seed = int(real_number("seed", seed, at_least=0))
        if self._seed != seed:
            raise ValueError(f"seed must be a whole number, got {seed!r}")
        self._epoch = self._start = 0
        self._rank, self._world_size = collectives.rank(), collectives.world_size()

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass; a trainer does so by itself."""
        self._epoch = epoch

    def seek(self, samples: int) -> None:
        """Has the next pass start after the first `samples` of the epoch's order, counted over all ranks.

        Since the order does not depend on the number of ranks, another number of them can go on there: each sample that is
        left is still used once.
        """
        self._start = min(samples, self._length)

    def describe(self) -> dict[str, Any]:
        """What the order depends on, in plain types."""
        return {"samples": self._length, "shuffle": self._shuffle, "seed": self._seed}

    def __len__(self) -> int:
        return len(range(self._start + self._rank, self._length, self._world_size))

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        if not self._shuffle:
            return iter(range(start + self._rank, self._length, self._world_size))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(self._length, generator=generator)
        return iter(order[start + self._rank :: self._world_size].tolist())
