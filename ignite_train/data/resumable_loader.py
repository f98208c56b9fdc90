"""A DataLoader that can resume at any sample, and whose samples do not depend on the number of workers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from ignite_train.arguments import describe, positive_int, whole_number
from ignite_train.data.dealing import Dealing
from ignite_train.data.fetch_thread import FetchThread
from ignite_train.data.samplers import HasEpoch, ShardedSampler, refuse_other_length
from ignite_train.data.token_budget_sampler import TokenBudgetSampler
from ignite_train.model.random_state import NUMPY, PYTHON, RandomState, generators_within, seed_of, seed_random_state
from ignite_train.other_words import answers_other_words

__all__ = ["HasSampleSeed", "ResumableLoader"]

_READ_AHEAD = 2  # micro-batches, as for each worker of torch's DataLoader


@runtime_checkable
class HasSampleSeed(Protocol):
    """A dataset that draws from generators of its own."""

    def seed_sample(self, seed: int) -> None:
        """Seeds them for the sample that is fetched next, with a number of 64 bits."""


class ResumableLoader(DataLoader[Any]):
    """A DataLoader over this rank's share of a dataset, in which a resumed run jumps to its position.

    The order is that of `ShardedSampler`, or of the `TokenBudgetSampler` in `batches`: a function of (seed, epoch). Before each
    sample is fetched, Python's, NumPy's and torch's generators are seeded with (seed, epoch, index of the sample), and
    afterwards they get their state back: random augmentation is the same with any number of workers, and does not draw from
    the generators that the model uses. This does not cover a random `collate_fn`. It takes about 50 µs a sample;
    `seed_samples=False` saves that if a dataset draws no random numbers. A dataset that has a method `seed_sample(seed)`, for
    generators of its own, gets a number of 64 bits before each sample, a function of the same key.

    With `fetch_in_thread` a thread of this process reads the next micro-batches while the model computes. That helps where a
    sample waits (for a disk, a network) or is made by code that releases Python's lock, as reading and decoding in C does. A
    dataset that computes in Python needs worker processes. The thread leaves the generators of the process alone, since
    forward draws from them at the same time; a dataset that draws from them is refused, and one with generators of its own
    must have `seed_sample`. So the numbers of a run are the same with and without the thread, and a run that is interrupted
    resumes bitwise, at what was trained on and not at what was read. The dataset and `collate_fn` are called by the thread,
    also while handlers run: an object that they share with these, or with another loader, must be safe for that.

    Args:
        dataset: map-style.
        batch_size: samples to a micro-batch of this rank.
        shuffle: a new order in each epoch.
        seed: of the order and of the samples; the same on all ranks.
        drop_last: leave out a last micro-batch that is not full.
        seed_samples: seed the generators for each sample, see above.
        batches: makes the micro-batches, instead of `batch_size`, `shuffle` and `drop_last`; `seed` is for the samples.
        fetch_in_thread: read ahead in a thread, see above.
        mesh: as for `ShardedSampler`; with `batches` give it to those.
        options: `num_workers`, `collate_fn`, `pin_memory` and other options of a DataLoader, except those about order. With
            `fetch_in_thread` `prefetch_factor` is how many micro-batches are read ahead at most; 2 by default.

    Attributes:
        dealt_by: the sampler that deals samples or batches out to the ranks.

    Raises:
        ValueError: one of `options` is about order or seeds, or `batches` is of another number of samples; or
            `fetch_in_thread` is asked for with worker processes, without `seed_samples`, or with a dataset that has generators
            and no `seed_sample`. A pass raises it where the thread draws from the generators of the process, or the dataset
            has another length than when the loader was made.
        TypeError: the dataset has no length, or `shuffle` or `batches` is missing or has the wrong type.

    Example:
        >>> import torch
        >>> from ignite_train import ResumableLoader
        >>> loader = ResumableLoader(torch.arange(10), batch_size=4, shuffle=True, seed=7)
        >>> [len(micro_batch) for micro_batch in loader]
        [4, 4, 2]
    """

    @answers_other_words
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        seed_samples: bool = True,
        batches: TokenBudgetSampler | None = None,
        fetch_in_thread: bool = False,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise TypeError(
                f"dataset must be a dataset, got a {type(dataset).__name__}; write ResumableLoader(loader.dataset, batch_size, "
                "shuffle=True)"
            )
        if type(dataset) is dict and 0 not in dataset:
            raise TypeError(
                f"dataset must have its samples at 0, 1, ..., got a dict with the keys {[*dataset]!r:.60}; "
                "for columns write datasets.Dataset.from_dict(columns), or a list with a dict for each sample"
            )
        refused = sorted({"sampler", "batch_sampler", "generator", "worker_init_fn"} & options.keys())
        if not options.get("in_order", True):  # the place in the order would not say which samples are done
            refused.append("in_order")
        if refused:
            raise ValueError(f"{refused[0]} must be left out of a ResumableLoader, which chooses order and seeds by itself")
        self.dealt_by: ShardedSampler | TokenBudgetSampler
        if batches is None:
            if not isinstance(shuffle, bool):
                raise TypeError(
                    f"shuffle must be given, as True or False, got {describe(shuffle)}; or pass batches=TokenBudgetSampler(...)"
                )
            self.dealt_by = sampler = _KeySampler(dataset, shuffle=shuffle, seed=seed, mesh=mesh)
            options |= {"batch_size": positive_int("batch_size", batch_size), "sampler": sampler, "drop_last": drop_last}
        else:
            given = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last or None, "mesh": mesh}
            _check_batches(batches, dataset, **given)
            self.dealt_by, options["batch_sampler"] = batches, _KeyBatches(batches)
        self._ahead = 0
        if fetch_in_thread:
            given = options.pop("prefetch_factor", None)
            self._ahead = positive_int("prefetch_factor", _READ_AHEAD if given is None else given)
            _check_thread(dataset, seed_samples=seed_samples, num_workers=options.get("num_workers", 0))
        super().__init__(
            _Samples(dataset, seed, seed_samples=seed_samples, in_thread=fetch_in_thread),
            generator=torch.Generator(),  # for the seeds of the workers, so that the model's generator is not used
            **options,
        )
        self._seed = whole_number("seed", seed)

    def __repr__(self) -> str:
        if isinstance(self.dealt_by, TokenBudgetSampler):
            return f"{type(self).__name__}(batches={self.dealt_by!r}, seed={self._seed})"
        samples = f"{self.dealt_by.describe()['samples']} samples, batch_size={self.batch_size}"
        return f"{type(self).__name__}({samples}, shuffle={self.dealt_by.describe()['shuffle']}, seed={self._seed})"

    @property
    def fetches_in_thread(self) -> bool:
        """Whether a thread reads ahead."""
        return self._ahead > 0

    @property
    def seeds_generators(self) -> bool:
        """Whether the generators that the dataset holds are seeded for each sample, so that their states mean nothing."""
        return isinstance(self.dataset, _Samples) and self.dataset.seeds_generators

    @property
    def samples_per_round(self) -> int:
        """Samples in one micro-batch of each rank; with `batches` the place is counted in these, and it is one of each rank."""
        return int(self.batch_size or 1) * self.dealt_by.dealing.size

    def seek(self, samples: int) -> None:
        """Lets the next pass start after `samples` samples, counted over all ranks; `len()` then counts what is left.

        With `batches` it is so many batches.
        """
        self.dealt_by.seek(samples)

    def deal_by(self, dealing: Dealing) -> None:
        """Has the next passes deal samples to others than the ranks; a trainer whose replicas come and go calls it."""
        self.dealt_by.dealing = dealing

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass; a trainer calls it."""
        self.dealt_by.set_epoch(epoch)

    def __iter__(self) -> Any:
        refuse_other_length(len(self.dataset), self.dealt_by.describe()["samples"])  # type: ignore[arg-type]
        self.generator.manual_seed(self._seed % 2**64)
        if not self._ahead:
            return super().__iter__()
        return FetchThread(super().__iter__(), ahead=self._ahead, name=repr(self))


def _check_batches(batches: Any, dataset: Any, **left_out: Any) -> None:
    """Checks what makes the micro-batches.

    Raises:
        TypeError: it is not a TokenBudgetSampler.
        ValueError: it is of another number of samples, or an argument that it replaces is given too.
    """
    if not isinstance(batches, TokenBudgetSampler):
        raise TypeError(f"batches must be a TokenBudgetSampler, got {describe(batches)}")
    given = [name for name, value in left_out.items() if value is not None]
    if given:
        raise ValueError(f"{given[0]} must be left out with batches, which chooses the micro-batches and their order")
    if batches.num_samples != len(dataset):
        raise ValueError(
            f"batches must have the length of each of the {len(dataset)} samples, got {batches.num_samples} lengths"
        )


def _check_thread(dataset: Any, *, seed_samples: bool, num_workers: int) -> None:
    """Checks what a thread needs.

    Raises:
        ValueError: there are worker processes, or samples depend on the order in which they are read.
    """
    if num_workers:
        raise ValueError(
            f"num_workers must be 0 with fetch_in_thread=True, got {num_workers}: worker processes read ahead already, and to "
            "fork them beside a thread that reads the dataset could copy a lock that it holds; pass one of the two"
        )
    if not seed_samples:
        raise ValueError(
            "seed_samples must be True with fetch_in_thread=True: samples that depend on the order in which they are read "
            "would not be the same after resuming; leave it out"
        )
    held = next(iter(generators_within(dataset)), None)
    if held is not None and not isinstance(dataset, HasSampleSeed):
        raise ValueError(
            f"fetch_in_thread=True needs samples that do not depend on the order in which they are read, got a "
            f"{type(dataset).__name__} with the generator {held!r}; give it a method seed_sample(seed) that seeds it for the "
            "sample that is fetched next, or pass num_workers=1 in place of fetch_in_thread"
        )


class _KeySampler(ShardedSampler):
    """Gives the epoch with each index, because persistent workers do not learn it otherwise."""

    def __iter__(self) -> Iterator[Any]:
        return zip(repeat(self.epoch), super().__iter__())


class _KeyBatches(Sampler[list[tuple[int, int]]]):
    """Gives the epoch with each index of each batch.

    Args:
        batches: of indices.
    """

    def __init__(self, batches: TokenBudgetSampler) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self._batches.epoch
        for batch in self._batches:
            yield [(epoch, index) for index in batch]


class _Turn:
    """A lock: one thread at a time calls the dataset, also if that of an earlier pass is not back yet. A copy has another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class _Samples(Dataset[Any]):
    """Fetches samples, each with the generators seeded for it.

    Args:
        dataset: the user's.
        seed: the first part of each key.
        seed_samples: False leaves the generators alone.
        in_thread: a thread calls it, and the generators of the process are left alone too.

    Attributes:
        seeds_generators: whether the generators of the dataset's own are seeded for each sample.
    """

    def __init__(self, dataset: Any, seed: int, *, seed_samples: bool, in_thread: bool) -> None:
        self._dataset, self._seed, self._seed_samples = dataset, seed, seed_samples
        self._turn = _Turn() if in_thread else None
        self._epoch: int | None = None  # what the dataset was told last, here or in the process that this one is a copy of
        self.seeds_generators = seed_samples and isinstance(dataset, HasSampleSeed)

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self._dataset

    def set_epoch(self, epoch: int) -> None:
        """Passes it on to a dataset that has `set_epoch`."""
        if isinstance(self._dataset, HasEpoch):
            self._dataset.set_epoch(epoch)
            self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        if self._epoch not in (None, keys[0][0]) and get_worker_info() is not None:  # a worker that is kept from epoch to epoch
            self.set_epoch(keys[0][0])
        if self._turn is not None:
            with self._turn.lock:
                return [self._fetch(seed_of(self._seed, epoch, index), index) for epoch, index in keys]
        if not self._seed_samples:
            return [self._dataset[index] for _, index in keys]
        before = RandomState([], [PYTHON, NUMPY]) if get_worker_info() is None else None
        try:
            return [self._fetch(seed_random_state(self._seed, epoch, index), index) for epoch, index in keys]
        finally:
            if before is not None:
                try:
                    before.restore()
                except BaseException:  # by Ctrl-C: forward would draw from the generators of a sample
                    before.restore()
                    raise

    def _fetch(self, seed: int, index: int) -> Any:
        if self.seeds_generators:
            self._dataset.seed_sample(seed)
        return self._dataset[index]
