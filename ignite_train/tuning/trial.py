"""One candidate: a copy of the training with other settings, measured in windows of updates."""

from __future__ import annotations

import copy
import gc
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from ignite.engine import Events
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ignite_train.events import TrainEvents
from ignite_train.forward import is_declared
from ignite_train.ranks import collectives
from ignite_train.trainer import Creation, Trainer
from ignite_train.tuning.alone import TrialError, slowest
from ignite_train.tuning.copies import copies_of, each_optimizer, empty_copies, set_fused, set_memory_layout
from ignite_train.tuning.fixed_samples import FixedSamples
from ignite_train.tuning.settings import Settings
from ignite_train.update.options import UpdateOptions

__all__ = ["Trial"]

_SILENT = logging.Logger("ignite_train.tuning", level=logging.CRITICAL + 1)  # it has no parent


class Trial:
    """A copy of model and optimizer, and a trainer and a loader with these settings. No handler of the user is attached.

    A window is a pass over the fixed samples. Its first update is not measured: it waits for workers, and brings memory and
    threads back into use. Where values are not finite the step is skipped, since the copy may be trained for longer on these
    few samples than is good for it.

    Args:
        creation: how the user's trainer was made.
        loss_scaling: of the user's trainer, with its present scale.
        settings: for the copy.
        present: those of the user's trainer.
        samples: what it is trained on, at least 2 updates.
        patience: seconds after which a window ends with the updates that it has.

    Raises:
        TrialError: it cannot be made, or its first window fails, on some rank. Collective.

    Attributes:
        settings: the same.
        samples: in an update of this rank; micro-batches, where their size is not known.
        peak_memory: in bytes, of its first window with weights and states; None on the CPU.
        first_loss: of its first update, from the weights of the user.
        first_norm: the norm of the gradient there.
        declares: whether forward gives a sample size.
        num_collectives: of its first window.
    """

    def __init__(
        self,
        creation: Creation,
        loss_scaling: Any,
        settings: Settings,
        present: Settings,
        samples: FixedSamples,
        *,
        patience: float = math.inf,
    ) -> None:
        self.settings, self._updates = settings, samples.updates
        self.samples = settings.accumulation_steps * (settings.micro_batch or 1)
        self.peak_memory: int | None = None
        self.first_loss = self.first_norm = 0.0
        self.declares = True
        self.num_collectives = 0
        self._patience = patience
        self._count = self._measured = 0  # updates of the running window, and those of them that are timed
        self._begun = self._ended = 0.0
        self._trainer: Trainer | None = None
        self._loader: Iterable[Any] = ()
        try:
            slowest(lambda: self._begin(creation, loss_scaling, present, samples))
        except BaseException:
            self.close()
            gc.collect()  # of what the failed forward left
            raise

    def seconds(self) -> float:
        """Measures one window: seconds of an update, on the slowest rank. Collective, and what it measures is not.

        Raises:
            TrialError: it failed on some rank.
        """
        try:
            return slowest(self._window)
        except TrialError:
            gc.collect()  # as above
            raise

    def close(self) -> None:
        """Ends its workers and gives its memory back; the objects are left to Python's garbage collection, which is slow."""
        loader, trainer, self._loader, self._trainer = self._loader, self._trainer, (), None
        if isinstance(loader, DataLoader) and isinstance(loader._iterator, _MultiProcessingDataLoaderIter):
            loader._iterator._shutdown_workers()
        if trainer is not None and trainer._creation is not None:
            empty_copies(trainer._creation.arguments["model"], trainer._creation.arguments["optimizer"])
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def _begin(self, creation: Creation, loss_scaling: Any, present: Settings, samples: FixedSamples) -> float:
        """Makes the copy and runs a first window, in which memory is allocated, models are compiled and workers start."""
        on_cuda = next(creation.arguments["model"].parameters()).device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_cuda else 0
        if self.settings.compile is not False:
            torch.compiler.reset()  # so that the graphs of another candidate do not count towards torch's limit
        self._trainer = _trainer_like(creation, loss_scaling, self.settings, present)
        self._loader = samples.loader(self.settings)
        self._trainer.logger = _SILENT
        self._trainer.add_event_handler(Events.ITERATION_COMPLETED, self._mark)
        self._trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), self._look)
        self._forward_look = self._trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED(once=1), self._look_at_forward)
        begun = collectives.collectives_begun()
        seconds = self._window()
        self.num_collectives = collectives.collectives_begun() - begun
        self.peak_memory = torch.cuda.max_memory_allocated() - before if on_cuda else None
        return seconds

    def _window(self) -> float:
        assert self._trainer is not None  # noqa: S101  # it is not closed
        if torch.get_num_threads() != self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        self._count = 0
        self._trainer.run(self._loader, max_epochs=self._trainer.state.epoch + 1)
        return (self._ended - self._begun) / self._measured

    def _mark(self, trainer: Trainer) -> None:
        """Takes the times after the first and the last update."""
        self._count += 1
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

    def _look(self, trainer: Trainer) -> None:
        self._forward_look.remove()  # while it has a handler, no update is one graph
        output = trainer.state.update_output
        if output is not None:
            self.first_loss, self.first_norm = output.loss, output.grad_norm

    def _look_at_forward(self, trainer: Trainer) -> None:
        output = trainer.state.forward_output
        self.declares = output is None or is_declared(output)


def _trainer_like(creation: Creation, loss_scaling: Any, settings: Settings, present: Settings) -> Trainer:
    """A trainer as the user's, of copies, with these settings."""
    arguments = dict(creation.arguments)
    model, optimizer = copies_of(
        arguments["model"], arguments["optimizer"], compiled=arguments["compile"] is not False
    )  # fmt: skip
    if settings.channels_last != present.channels_last:
        set_memory_layout(model, optimizer, channels_last=settings.channels_last)
    if settings.fused != present.fused:
        optimizer = each_optimizer(optimizer, lambda one: set_fused(one, fused=settings.fused))
    options = arguments["options"] or UpdateOptions()
    arguments |= {
        "model": model,
        "optimizer": optimizer,
        creation.accumulation_argument: settings.accumulation_steps,
        "compile": settings.compile,
        "loss_scaling": copy.deepcopy(loss_scaling),
        "protect": False,
        "output_transform": None,
        "options": replace(
            options, reduction="auto", on_nonfinite="skip", give_up_after=None, on_out_of_memory="raise", uneven="all"
        ),
    }
    if "deterministic" in arguments:
        arguments["deterministic"] = False  # it sets switches of the process, which are set already or else not wanted
    return creation.function(**arguments)
