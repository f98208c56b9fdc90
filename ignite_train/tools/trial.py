"""One candidate of a search for fast settings: a trainer with these settings, measured in windows of updates."""

from __future__ import annotations

import gc
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import ignite.distributed as idist
import torch
from ignite.distributed.comp_models.base import _SerialModel
from ignite.engine import Events
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ignite_train.arguments import describe
from ignite_train.ranks import collectives
from ignite_train.tools.fixed_samples import FixedSamples
from ignite_train.tools.tuned import Settings
from ignite_train.trainer import Trainer

__all__ = ["Trial", "TrialError"]

_SILENT = logging.Logger("ignite_train.tools", level=logging.CRITICAL + 1)  # it has no parent
_WORDS = 300  # of an error, in a table


class TrialError(RuntimeError):
    """Settings could not be measured on some rank; the message is the reason, and the same on all ranks."""


class Trial:
    """A trainer and a loader with these settings, which compute some updates in each window.

    A window is a pass over the fixed samples. Its first update is not measured: it waits for workers, and brings memory and
    threads back into use. On several ranks each measures alone, so that a candidate that fails on one leaves none waiting.

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
        samples: FixedSamples,
        *,
        patience: float = math.inf,
    ) -> None:
        self.settings, self.samples = settings, samples.accumulation_steps(settings) * (settings.get("micro_batch") or 1)
        self.peak_memory: int | None = None
        self.first_update = {"loss": 0.0, "gradient norm": 0.0}
        self.num_collectives = 0
        self.trainer: Trainer | None = None
        self._updates, self._patience = samples.updates, patience
        self._count = self._measured = 0  # updates of the running window, and those of them that are timed
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
        if isinstance(loader, DataLoader) and isinstance(loader._iterator, _MultiProcessingDataLoaderIter):
            loader._iterator._shutdown_workers()
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def _begin(self, make_trainer: Callable[..., Trainer], arguments: dict[str, Any], samples: FixedSamples) -> float:
        """Makes the trainer and runs a first window, in which memory is allocated, models are compiled and workers start."""
        on_cuda = torch.cuda.is_available()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_cuda else 0
        if arguments.get("compile"):
            torch.compiler.reset()  # so that the graphs of another candidate do not count towards torch's limit
        torch.set_num_threads(self.settings["threads"])
        self.trainer = trainer = make_trainer(**arguments)
        if not isinstance(trainer, Trainer):
            raise TypeError(f"make_trainer must return a Trainer, got {describe(trainer)}")
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
        if torch.get_num_threads() != self.settings["threads"]:
            torch.set_num_threads(self.settings["threads"])
        self._count = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.trainer.run(self._loader, max_epochs=self.trainer.state.epoch + 1)
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


@contextmanager
def _alone() -> Iterator[None]:
    """In this `with` the process is the only one for `ignite.distributed`, and so for this library."""
    module = idist.utils
    before = module._model, module._need_to_sync
    module._model, module._need_to_sync = _SerialModel(), False
    try:
        yield
    finally:
        module._model, module._need_to_sync = before


def _slowest(measure: Callable[[], float]) -> float:
    """Calls `measure` on each rank alone, and returns the largest of what it returned. Collective: one small all-reduce.

    Raises:
        TrialError: it raised on some rank. Two more small collectives carry the reason.
    """
    seconds, reason, cause = 0.0, "", None
    try:
        with _alone():
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
