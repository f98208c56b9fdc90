"""Which samples a rank sees: each one on exactly one rank, in an order that is a function of seed and epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import chain
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import BatchSampler, DataLoader

from ignite_train.arguments import describe, whole_number
from ignite_train.data.dealing import DealtSampler
from ignite_train.data.epoch_order import Order, epoch_order
from ignite_train.model.random_state import objects_within

__all__ = ["HasEpoch", "ShardedSampler", "cuts_batches", "inner_loaders", "refuse_other_length", "samplers_of", "set_epoch"]

_FIRST_CHUNK, _LAST_CHUNK = 2**10, 2**15  # indices that are computed at once, at the start of an epoch and later


@runtime_checkable
class HasEpoch(Protocol):
    """A sampler, loader or dataset whose order or content changes from epoch to epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch (0-based) the next pass is."""


@runtime_checkable
class _HasSampler(Protocol):
    """A sampler of batches that takes the indices from another sampler, such as torch's BatchSampler."""

    sampler: Any


@runtime_checkable
class _CutsBatches(_HasSampler, Protocol):
    """Cuts batches as torch's BatchSampler does. A class that derives from BatchSampler may not have called its `__init__`."""

    batch_size: int
    drop_last: bool


def set_epoch(loader: Iterable[Any], epoch: int) -> None:
    """Tells `loader`, its samplers and its dataset which epoch (0-based) the next pass is, as far as they want to know.

    If a loader of the user's own has no `set_epoch`, its inner loaders are told.
    """
    for one in [loader] if isinstance(loader, DataLoader | HasEpoch) else inner_loaders(loader, DataLoader | HasEpoch):
        for owner in (one, *samplers_of(one), *([one.dataset] if isinstance(one, DataLoader) else [])):
            if isinstance(owner, HasEpoch):
                owner.set_epoch(epoch)


def inner_loaders(loader: Iterable[Any], kinds: Any = DataLoader) -> list[Any]:
    """The objects of these kinds that a loader of the user's own holds; only the loader itself if it is of these kinds.

    They are looked for in its attributes, and in short containers and other loaders there. An iterator has begun its pass, so
    none are looked for.
    """

    def is_no_loader(_owner: Any, _name: Any, value: Any) -> bool:
        return not issubclass(type(value), (Iterable, HasEpoch))

    found = {} if isinstance(loader, Iterator) else objects_within(loader, is_no_loader, kinds=kinds)
    return [one for one in found.values() if isinstance(one, Iterable)]


def samplers_of(loader: Iterable[Any]) -> Iterator[Any]:
    """The samplers of a DataLoader, each once; also the one from which its `batch_sampler` takes the indices. Else none.

    Where `batch_sampler` is given to a DataLoader, its attribute `sampler` is another one, which is not used.
    """
    if not isinstance(loader, DataLoader):
        return
    batch_sampler: Any = loader.batch_sampler
    yield loader.sampler
    if batch_sampler is not None:
        yield batch_sampler
    if isinstance(batch_sampler, _HasSampler) and batch_sampler.sampler is not loader.sampler:
        yield batch_sampler.sampler


def cuts_batches(batch_sampler: Any) -> TypeGuard[BatchSampler]:
    """Whether a batch sampler is torch's, or derives from it and has its attributes."""
    return isinstance(batch_sampler, BatchSampler) and isinstance(batch_sampler, _CutsBatches)


def refuse_other_length(now: int, before: int) -> None:
    """Refuses a pass over a dataset that had another length when its order was chosen.

    Raises:
        ValueError: it had.
    """
    if now != before:
        raise ValueError(
            f"dataset must keep its length, got {now} samples after {before}: the order is of those that there were; make "
            "another loader when it changes, and pass that to trainer.set_data at the end of an epoch"
        )


class ShardedSampler(DealtSampler[int]):
    """Deals a dataset out to the ranks like cards: sample i of the epoch's order goes to rank i mod world size.

    No sample is repeated or dropped, so shards differ by at most one sample, which trainer and evaluator allow. W ranks with a
    batch of B see in each round the same samples as one process with a batch of W·B.

    The order of up to 65,536 samples is drawn. That of more samples is computed while it is used, each index by itself
    (`KeyedPermutation`), so that an epoch of any length starts and resumes within milliseconds, without a list of its samples.

    Args:
        dataset: anything with a length.
        shuffle: a new order in each epoch, which depends on (seed, epoch) only.
        seed: of the order; the same on all ranks.
        mesh: the dimensions of a device mesh over which samples differ, such as `mesh["dp"]`: the samples are dealt out to the
            ranks along these, and ranks that differ in other dimensions only get the same. None: each rank gets its own.

    Attributes:
        dealing: to whom.

    Raises:
        TypeError: the dataset has no length.
        ValueError: `seed` is negative or not a whole number.

    Example:
        >>> from ignite_train import ShardedSampler
        >>> list(ShardedSampler("abcd", shuffle=False))  # in a single process
        [0, 1, 2, 3]
    """

    def __init__(self, dataset: Sized, *, shuffle: bool, seed: int = 0, mesh: DeviceMesh | None = None) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(f"dataset must have a length, got {describe(dataset)}")
        super().__init__(len(dataset), mesh)
        self._length_now = dataset.__len__  # and not the dataset, in which generators would be found a second time
        self._shuffle, self._seed = shuffle, whole_number("seed", seed)

    def describe(self) -> dict[str, Any]:
        """The settings that decide the order, in plain types."""
        return {"samples": self.num_entries, "shuffle": self._shuffle, "seed": self._seed}

    def __repr__(self) -> str:
        rank = f"rank {self.dealing.rank} of {self.dealing.size}"
        return f"{type(self).__name__}({self.num_entries} samples, shuffle={self._shuffle}, seed={self._seed}, {rank})"

    def __iter__(self) -> Iterator[int]:
        refuse_other_length(self._length_now(), self.num_entries)
        positions = self.begin_pass()
        yield from chain.from_iterable(_chunks(positions, self._order_of_epoch())) if self._shuffle else positions

    def _order_of_epoch(self) -> Order:
        """The order that `epoch` chooses; the same on all ranks."""
        drawn_seed = (self._seed * 1_000_003 + self.epoch) % 2**64  # what a generator of torch takes
        return epoch_order(self.num_entries, key=(self._seed, self.epoch), drawn_seed=drawn_seed)


def _chunks(positions: range, order: Order) -> Iterator[list[int]]:
    """The entries at these positions, in lists; the first one is short, so that the first sample comes at once."""
    size = _FIRST_CHUNK
    while positions:
        now, positions = positions[:size], positions[size:]
        yield order(np.arange(now.start, now.stop, now.step)).tolist()
        size = min(2 * size, _LAST_CHUNK)
