"""A candidate of a search for fast settings: a trainer with these settings, measured in windows of updates."""

from __future__ import annotations

import copy
import gc
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, cycle, islice
from time import perf_counter
from typing import Any

import torch
from ignite.engine import Events
from torch.utils.data import DataLoader, IterableDataset, Subset

from ignite_train.arguments import describe, positive_int
from ignite_train.data.resumable_loader import ResumableLoader
from ignite_train.data.unmoved import unmoved
from ignite_train.internals.of_ignite import computation_model
from ignite_train.internals.of_torch import end_workers
from ignite_train.ranks import collectives
from ignite_train.tools.tuned import Settings
from ignite_train.trainer import Trainer
from ignite_train.update.new_trainer import new_trainer

__all__ = ["Trial", "TrialError", "TrialSamples", "set_threads"]

_SILENT = logging.Logger("ignite_train.tools", level=logging.CRITICAL + 1)  # it has no parent
_WORDS = 300  # of an error, in a table
_MOST_FETCHED = 64  # updates whose micro-batches are held in memory


class TrialError(RuntimeError):
    """Settings could not be measured on some rank; the message is the reason, and the same on all ranks."""


class TrialSamples:
    """The samples of the first updates over a loader, which is not moved: each trial reads them again.

    Of a DataLoader over a map-style dataset only the order is taken, from a copy of its sampler, and the samples are loaded
    while they are measured, by the loader's own options. What any other loader gives is fetched once and held in memory, so
    that loading is not measured. Where there are fewer samples, they are used repeatedly.

    Args:
        loader: the user's.
        updates: how many.
        steps_name: the setting that says how many micro-batches are an update; None: one.
        settings: the present settings.

    Raises:
        TypeError: the loader is an iterator, which cannot be read without moving it; or the setting is not one number.
        ValueError: the loader is empty.

    Attributes:
        micro_batch: samples to a micro-batch; None if these cannot be cut otherwise.
        workers: the worker processes of the loader; None if another number cannot be tried.
        why_fixed: why `micro_batch` or `workers` is None, by their names.
    """

    def __init__(self, loader: Iterable[Any], updates: int, steps_name: str | None, settings: Mapping[str, Any]) -> None:
        self.updates, self._steps_name = updates, steps_name
        self.micro_batch: int | None = None
        self.workers: int | None = None
        self.why_fixed: dict[str, str] = {}
        if steps_name is None:
            self.why_fixed["micro_batch"] = "make_trainer has no parameter accumulation_steps"
        steps, kind = self.accumulation_steps(settings), type(loader).__name__
        self._source: DataLoader[Any] | None = None  # from which the samples are loaded again
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            self._given = _first(_fetch(loader, min(updates, _MOST_FETCHED) * steps), steps * updates)
            self.why_fixed["micro_batch"] = f"what a {kind} without an order of indices gives cannot be cut otherwise"
            self.why_fixed["workers"] = "the micro-batches were fetched beforehand, so that no figure contains loading"
            return
        self._source, self.workers, self.micro_batch = loader, loader.num_workers, loader.batch_size
        if isinstance(loader, ResumableLoader) and loader.fetches_in_thread:
            self.workers = None
            self.why_fixed["workers"] = "fetch_in_thread=True takes their place; the figures are without that thread"
        if self.micro_batch is None:
            self.why_fixed["micro_batch"] = f"the batch_sampler of the {kind} decides which samples are a micro-batch"
        sampler = loader.batch_sampler if self.micro_batch is None else loader.sampler
        self._given = _first(_copy_of(sampler, loader), steps * updates * (self.micro_batch or 1))

    def accumulation_steps(self, settings: Settings) -> int:
        """Returns the micro-batches to an update with these settings; 1 where no setting says it."""
        name = self._steps_name
        return 1 if name is None else positive_int(f"make_trainer's default of {name}", settings[name])

    def check(self, trainer: Trainer, settings: Settings) -> None:
        """Sees to it that an update of `trainer` has the micro-batches of `settings`: others train on other samples.

        Raises:
            ValueError: it has others.
        """
        name, made = self._steps_name, trainer.config["accumulation_steps"]
        if made == self.accumulation_steps(settings):
            return
        instead = f"for {name}={settings[name]}" if name else "and no such parameter; add one, with one number as its default"
        raise ValueError(
            f"make_trainer must pass its {name or 'accumulation_steps'} on to create_trainer, got a trainer with "
            f"accumulation_steps={made} {instead}"
        )

    def loader(self, settings: Settings) -> Iterable[Any]:
        """All samples in the micro-batches of `settings`; a pass over it can be made any number of times."""
        loader, given = self._source, self._given
        if loader is None:
            return given
        size, workers = settings["micro_batch"], settings["workers"] or 0
        batches = given if size is None else [given[at : at + size] for at in range(0, len(given), size)]
        places = iter(range(sum(map(len, batches))))
        return DataLoader(
            Subset(loader.dataset, list(chain(*batches))),  # without the dataset's set_epoch, which must not be called here
            batch_sampler=[list(islice(places, len(batch))) for batch in batches],
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


def set_threads(number: int) -> None:
    """Sets the number of torch's threads, if it is another one."""
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _first(values: Iterable[Any], number: int) -> list[Any]:
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


def _fetch(loader: Iterable[Any], number: int) -> list[Any]:
    """The first micro-batches of a loader, in this process."""
    if isinstance(loader, Iterator):
        raise TypeError(f"loader must be one that can be read again, got {describe(loader)}; pass a DataLoader or a list")
    if isinstance(loader, DataLoader):  # before its state is asked for, which may start its workers
        loader = here = copy.copy(loader)
        here.num_workers, here.timeout, here.prefetch_factor, here.generator = 0, 0, None, torch.Generator()
    with unmoved(loader) as own:
        return list(islice(own, number))


class Trial:
    """A trainer and a loader with these settings, which compute some updates in each window.

    A window is a pass over the samples. Its first update is not measured: it waits for workers, and brings memory and threads
    back into use. On several ranks each measures alone, so that a candidate that fails on one leaves none waiting.

    Args:
        make_trainer: the user's function.
        settings: its arguments among them.
        arguments: the names of these arguments.
        samples: what it is trained on, at least 2 updates.
        patience: seconds after which a window ends with the updates that it has.

    Raises:
        TrialError: it cannot be made, or its first window fails, on some rank. Collective.

    Attributes:
        settings: the same.
        trainer: what the function has made; None after `close`.
        samples: in an update of this rank; micro-batches, where their size is not known.
        peak_memory: in bytes, of its first window with weights and states; None on the CPU.
        first_update: loss and gradient norm of its first update.
        num_collectives: of its first window.
    """

    def __init__(
        self,
        make_trainer: Callable[..., Trainer],
        settings: Settings,
        arguments: Iterable[str],
        samples: TrialSamples,
        *,
        patience: float = math.inf,
    ) -> None:
        self.settings, self.samples = settings, samples.accumulation_steps(settings) * (settings.get("micro_batch") or 1)
        self.peak_memory: int | None = None
        self.first_update = {"loss": 0.0, "gradient norm": 0.0}
        self.num_collectives = 0
        self.trainer: Trainer | None = None
        self._updates, self._patience = samples.updates, patience
        self._count = self._measured = 0  # updates of the running window, and the number of them that is timed
        self._begun = self._ended = 0.0
        self._loader: Iterable[Any] = ()
        chosen = {name: settings[name] for name in arguments}
        try:
            _slowest(lambda: self._begin(make_trainer, chosen, samples))
        except BaseException:
            self.close()
            raise

    def seconds(self) -> float:
        """Measures one window: seconds of an update, on the slowest rank. Collective, and what it measures is not.

        Raises:
            TrialError: it failed on some rank.
        """
        return _slowest(self._window)

    def close(self) -> None:
        """Ends its workers and gives its memory back."""
        loader, self._loader, self.trainer = self._loader, (), None
        if isinstance(loader, DataLoader):
            end_workers(loader)
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def _begin(self, make_trainer: Callable[..., Trainer], arguments: dict[str, Any], samples: TrialSamples) -> float:
        """Makes the trainer and runs a first window, in which memory is allocated, models are compiled and workers start."""
        on_cuda = torch.cuda.is_available()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_cuda else 0
        if arguments.get("compile"):
            torch.compiler.reset()  # so that the graphs of another candidate do not count towards torch's limit
        set_threads(self.settings["threads"])
        self.trainer = trainer = new_trainer(make_trainer, **arguments)
        samples.check(trainer, self.settings)
        self._loader = samples.loader(self.settings)
        trainer.logger = _SILENT
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._mark)
        begun = collectives.collectives_begun()
        seconds = self._window()
        self.num_collectives = collectives.collectives_begun() - begun
        self.peak_memory = torch.cuda.max_memory_allocated() - before if on_cuda else None
        return seconds

    def _window(self) -> float:
        assert self.trainer is not None  # noqa: S101  # it is not closed
        set_threads(self.settings["threads"])
        self._count = self._measured = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer.run(self._loader, max_epochs=self.trainer.state.epoch + 1)
        if not self._measured:
            raise ValueError(
                "make_trainer must attach no handler that ends an epoch or the run, such as EarlyStopping, got one after "
                f"{self._count} of {self._updates} updates; attach it to the trainer that make_trainer returns for the run"
            )
        return (self._ended - self._begun) / self._measured

    def _mark(self, trainer: Trainer) -> None:
        """Takes the times after the first and the last update."""
        self._count += 1
        output = trainer.state.update_output
        if trainer.state.iteration == 1 and output is not None:
            self.first_update = {"loss": output.loss, "gradient norm": output.grad_norm}
        is_last = self._count == self._updates or (self._count > 1 and perf_counter() - self._begun > self._patience)
        if not is_last and self._count > 1:
            return
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        if not is_last:
            self._begun = perf_counter()
            return
        self._ended, self._measured = perf_counter(), self._count - 1
        if self._count < self._updates:
            trainer.terminate_epoch()


def _slowest(measure: Callable[[], float]) -> float:
    """Calls `measure` on each rank alone, and returns the largest of what it returned. Collective: one small all-reduce.

    Raises:
        TrialError: it raised on some rank. Two more small collectives carry the reason.
    """
    seconds, reason, cause = 0.0, "", None
    try:
        with computation_model():
            seconds = measure()
    except Exception as error:  # whatever the user's code raises is the reason that is reported
        words = " ".join(str(error).split())
        reason, cause = (f"{type(error).__name__}: {words}" if words else type(error).__name__)[:_WORDS], error
    seconds, failed = collectives.largest(seconds, bool(reason))
    if not failed:
        return seconds
    reasons = collectives.gather_objects(reason)
    rank = next(number for number, one in enumerate(reasons) if one)
    raise TrialError(reasons[rank] + (f" (rank {rank})" if len(reasons) > 1 else "")) from cause
