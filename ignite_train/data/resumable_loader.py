"""A DataLoader that can resume at any sample, and whose samples do not depend on the number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ignite_train.arguments import positive_int
from ignite_train.data.samplers import HasEpoch, ShardedSampler
from ignite_train.model.random_state import capture_random_state, restore_random_state, seed_random_state
from ignite_train.ranks import collectives

__all__ = ["ResumableLoader"]


class ResumableLoader(DataLoader[Any]):
    """A DataLoader over this rank's share of a dataset, in which a resumed run jumps to its position.

    The order is that of `ShardedSampler`: a function of (seed, epoch). Before each sample is fetched, Python's, NumPy's and
    torch's generators are seeded with (seed, epoch, index of the sample), and afterwards they get their state back: random
    augmentation is the same with any number of workers, and does not draw from the generators that the model uses. This does
    not cover a random `collate_fn`. It takes about 50 µs a sample; `seed_samples=False` saves that if a dataset draws no
    random numbers.

    Args:
        dataset: map-style.
        batch_size: samples to a micro-batch of this rank.
        shuffle: a new order in each epoch.
        seed: of the order and of the samples; the same on all ranks.
        drop_last: leave out a last micro-batch that is not full.
        seed_samples: seed the generators for each sample, see above.
        options: `num_workers`, `collate_fn`, `pin_memory` and other options of a DataLoader, except those about order.

    Raises:
        ValueError: one of `options` is about order or seeds.
        TypeError: the dataset has no length.

    Example:
        >>> import torch
        >>> from ignite_train import ResumableLoader
        >>> loader = ResumableLoader(torch.arange(10), batch_size=4, shuffle=True, seed=7)
        >>> [len(micro_batch) for micro_batch in loader]
        [4, 4, 2]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        drop_last: bool = False,
        seed_samples: bool = True,
        **options: Any,
    ) -> None:
        refused = sorted({"sampler", "batch_sampler", "generator", "worker_init_fn"} & options.keys())
        if refused:
            raise ValueError(f"{refused[0]} must be left out of a ResumableLoader, which chooses order and seeds by itself")
        sampler = _KeySampler(dataset, shuffle=shuffle, seed=seed)
        super().__init__(
            _Samples(dataset, seed, seed_samples=seed_samples),
            batch_size=positive_int("batch_size", batch_size),
            sampler=sampler,
            drop_last=drop_last,
            generator=torch.Generator(),  # for the seeds of the workers, so that the model's generator is not used
            **options,
        )
        self._order, self._seed = sampler, seed

    def __repr__(self) -> str:
        samples = f"{self._order.describe()['samples']} samples, batch_size={self.batch_size}"
        return f"{type(self).__name__}({samples}, shuffle={self._order.describe()['shuffle']}, seed={self._seed})"

    @property
    def samples_per_round(self) -> int:
        """Samples in one micro-batch of each rank."""
        return int(self.batch_size or 0) * collectives.world_size()

    def seek(self, samples: int) -> None:
        """Lets the next pass start after `samples` samples, counted over all ranks; `len()` then counts what is left."""
        self._order.seek(samples)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass; a trainer calls it."""
        self._order.set_epoch(epoch)

    def __iter__(self) -> Any:
        self.generator.manual_seed(self._seed)
        return super().__iter__()


class _KeySampler(ShardedSampler):
    """Gives the epoch with each index, because persistent workers do not learn it otherwise."""

    def __iter__(self) -> Iterator[Any]:
        return zip(repeat(self._epoch), super().__iter__())


class _Samples(Dataset[Any]):
    """Fetches samples, each with the generators seeded for it.

    Args:
        dataset: the user's.
        seed: the first part of each key.
        seed_samples: False leaves the generators alone.
    """

    def __init__(self, dataset: Any, seed: int, *, seed_samples: bool) -> None:
        self._dataset, self._seed, self._seed_samples = dataset, seed, seed_samples

    def set_epoch(self, epoch: int) -> None:
        """Passes it on to a dataset that has `set_epoch`."""
        if isinstance(self._dataset, HasEpoch):
            self._dataset.set_epoch(epoch)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        if not self._seed_samples:
            return [self._dataset[index] for _, index in keys]
        before = capture_random_state(accelerators=False) if get_worker_info() is None else None
        try:
            return [self._fetch(epoch, index) for epoch, index in keys]
        finally:
            if before is not None:
                restore_random_state(before)

    def _fetch(self, epoch: int, index: int) -> Any:
        seed_random_state(self._seed, epoch, index)
        return self._dataset[index]
