"""The same samples for all settings, in micro-batches of any size, without moving the loader that they come from."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ignite_train.arguments import describe
from ignite_train.data.resumable_loader import ResumableLoader
from ignite_train.data.samplers import HasEpoch
from ignite_train.engine.dispatch import Stateful
from ignite_train.tools.tuned import Settings

__all__ = ["FixedSamples"]


_MOST_FETCHED = 64  # updates whose micro-batches are held in memory


class FixedSamples:
    """The samples of the first updates over a loader, read again by each candidate.

    Of a DataLoader over a map-style dataset only the order is taken, from a copy of its sampler, and the samples are loaded
    while they are measured, by the loader's own options. What any other loader gives is fetched once and held in memory, so
    that loading is not measured. Where there are fewer samples, they are used repeatedly.

    Args:
        loader: the user's; no pass over it is begun unless its micro-batches are fetched.
        updates: how many.
        steps_name: the setting that says how many micro-batches are an update; None: one.
        settings: the present settings.

    Raises:
        TypeError: the loader is an iterator, which cannot be read without moving it.
        ValueError: it is empty.

    Attributes:
        updates: the same.
        micro_batch: samples to a micro-batch; None if these cannot be cut otherwise.
        workers: the worker processes of the loader; None if another number cannot be tried.
        why_fixed: why `micro_batch` or `workers` is None, by their names.
    """

    def __init__(
        self, loader: Iterable[Any], updates: int, steps_name: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._loader, self.updates, self._steps_name = loader, updates, steps_name
        self._keys: list[Any] = []  # of the samples in their order, or of each micro-batch where its size is fixed
        self._fetched: list[Any] = []
        self.micro_batch: int | None = None
        self.workers: int | None = None
        self.why_fixed: dict[str, str] = {}
        if steps_name is None:
            self.why_fixed["micro_batch"] = "make_trainer has no parameter accumulation_steps"
        elif not isinstance((settings or {})[steps_name], int):
            self.why_fixed["micro_batch"] = f"{steps_name} is not one number"
        accumulation_steps = self.accumulation_steps(settings or {})
        number, kind = accumulation_steps * updates, type(loader).__name__
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            self._fetched = _first(_fetch(loader, min(number, _MOST_FETCHED * accumulation_steps)), number)
            self.why_fixed["micro_batch"] = f"what a {kind} without an order of indices gives cannot be cut otherwise"
            self.why_fixed["workers"] = "the micro-batches were fetched beforehand, so that no figure contains loading"
            return
        self.workers, self.micro_batch = loader.num_workers, loader.batch_size
        if isinstance(loader, ResumableLoader) and loader.fetches_in_thread:
            self.workers = None
            self.why_fixed["workers"] = "fetch_in_thread=True takes their place; the figures are without that thread"
        if self.micro_batch is None:
            self._keys = _first(iter(_copy_of(loader.batch_sampler, loader)), number)
            self.why_fixed["micro_batch"] = f"the batch_sampler of the {kind} decides which samples are a micro-batch"
        else:
            number *= self.micro_batch
            self._keys = _first(iter(_copy_of(loader.sampler, loader)), number)

    def accumulation_steps(self, settings: Settings) -> int:
        """Returns the micro-batches to an update with these settings; 1 where they are not one number."""
        steps = 1 if self._steps_name is None else settings[self._steps_name]
        return steps if isinstance(steps, int) else 1

    def loader(self, settings: Settings) -> Iterable[Any]:
        """All samples in the micro-batches of `settings`; a pass over it can be made any number of times."""
        if not isinstance(self._loader, DataLoader) or self._fetched:
            return self._fetched
        size, workers, loader = settings["micro_batch"], settings["workers"] or 0, self._loader
        batches = self._keys if size is None else [self._keys[at : at + size] for at in range(0, len(self._keys), size)]
        dataset: Any = loader.dataset
        return DataLoader(
            _WithoutEpochs(dataset) if isinstance(dataset, HasEpoch) else dataset,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout if workers else 0,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context if workers else None,
            generator=torch.Generator(),
            prefetch_factor=loader.prefetch_factor if workers else None,
            persistent_workers=workers > 0,
        )


@runtime_checkable
class _FetchesMany(Protocol):
    """A dataset that fetches the samples of a batch together."""

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]: ...


class _WithoutEpochs(Dataset[Any]):
    """Hides the `set_epoch` of a dataset, so that the epochs of copies do not reach it.

    Args:
        dataset: the user's.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        if isinstance(self._dataset, _FetchesMany):
            return self._dataset.__getitems__(keys)
        return [self._dataset[key] for key in keys]


def _first(values: Iterator[Any], number: int) -> list[Any]:
    """So many values; if there are fewer, they are repeated."""
    found = list(islice(values, number))
    if not found:
        raise ValueError("loader must give at least one micro-batch, got none")
    return list(islice(cycle(found), number))


def _copy_of(sampler: Any, loader: DataLoader[Any]) -> Any:
    """A sampler with the same order, whose pass leaves the place and the generators of this one alone."""
    try:
        return copy.deepcopy(sampler, {id(loader.dataset): loader.dataset})
    except (TypeError, RuntimeError, AttributeError):  # something in it cannot be copied, such as a generator of older torch
        return copy.copy(sampler)


def _fetch(loader: Iterable[Any], number: int) -> Iterator[Any]:
    """The first micro-batches of a loader, in this process. A loader with a state of its own is put back, also if it raises."""
    if isinstance(loader, Iterator):
        raise TypeError(f"loader must be one that can be read again, got {describe(loader)}; pass a DataLoader or a list")
    if isinstance(loader, DataLoader):
        own: DataLoader[Any] = copy.copy(loader)
        own.num_workers, own.timeout, own.prefetch_factor = 0, 0, None
        own._iterator, own.generator = None, torch.Generator()
        loader = own
    state = copy.deepcopy(loader.state_dict()) if isinstance(loader, Stateful) else None
    try:
        return iter(list(islice(iter(loader), number)))
    finally:
        if isinstance(loader, Stateful) and state is not None:
            loader.load_state_dict(state)
