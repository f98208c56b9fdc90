"""Which samples a rank sees: each one on exactly one rank, in an order that is a function of seed and epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Sampler

from ignite_train.arguments import describe, real_number
from ignite_train.ranks import collectives

__all__ = ["HasEpoch", "ShardedSampler", "set_epoch"]


@runtime_checkable
class HasEpoch(Protocol):
    """A sampler, loader or dataset whose order or content changes from epoch to epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch (0-based) the next pass is."""


def set_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Tells `loader`, its samplers and its dataset which epoch (0-based) the next pass is, as far as they want to know."""
    owners: list[Any] = [loader]
    if isinstance(loader, DataLoader):
        owners += [loader.sampler, loader.batch_sampler, loader.dataset]
    for owner in owners:
        if isinstance(owner, HasEpoch):
            owner.set_epoch(epoch)


class ShardedSampler(Sampler[int]):
    """Deals a dataset out to the ranks like cards: sample i of the epoch's order goes to rank i mod world size.

    No sample is repeated or dropped, so shards differ by at most one sample, which trainer and evaluator allow. W ranks with a
    batch of B see in each round the same samples as one process with a batch of W·B.

    Args:
        dataset: anything with a length.
        shuffle: a new order in each epoch, which depends on (seed, epoch) only.
        seed: of the order; the same on all ranks.

    Raises:
        TypeError: the dataset has no length.
        ValueError: `seed` is negative or not a whole number.

    Example:
        >>> from ignite_train import ShardedSampler
        >>> list(ShardedSampler("abcd", shuffle=False))  # in a single process
        [0, 1, 2, 3]
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
        """Chooses the order of the next pass; a trainer calls it."""
        self._epoch = epoch

    def seek(self, samples: int) -> None:
        """Lets the next pass start after the first `samples` of the epoch's order, counted over all ranks.

        The order does not depend on the number of ranks, so another number of ranks can continue there: each sample that is
        left is used once.
        """
        self._start = min(samples, self._length)

    def describe(self) -> dict[str, Any]:
        """What the order depends on, in plain types."""
        return {"samples": self._length, "shuffle": self._shuffle, "seed": self._seed}

    def __repr__(self) -> str:
        rank = f"rank {self._rank} of {self._world_size}"
        return f"{type(self).__name__}({self._length} samples, shuffle={self._shuffle}, seed={self._seed}, {rank})"

    def __len__(self) -> int:
        return len(range(self._start + self._rank, self._length, self._world_size))

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        if not self._shuffle:
            return iter(range(start + self._rank, self._length, self._world_size))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(self._length, generator=generator)
        return iter(order[start + self._rank :: self._world_size].tolist())
