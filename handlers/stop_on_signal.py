"""Ending a run in good order when a scheduler or a launcher asks for it."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from ignite.engine import Events

from ignite_train import distributed
from ignite_train.arguments import real_number
from ignite_train.engine import Trainer

__all__ = ["StopOnSignal"]

_logger = logging.getLogger(__name__)
_STDERR = 2
_SAME_REQUEST_SECONDS = 0.5  # scheduler and launcher both pass it on
_OVER = 0  # no signal has this number
_ENDS = (Events.COMPLETED, Events.TERMINATE, Events.INTERRUPT, Events.EXCEPTION_RAISED)
_SIGNALS = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGUSR1"))


class StopOnSignal:
    """Ends the run on all ranks after the same update when any of them gets a signal, so that handlers of COMPLETED can save.

    For torchrun, SLURM and all who send SIGTERM some time before SIGKILL. The signal may reach one rank or all. What runs in
    the signal handler is two assignments; the request travels with the statistics of the running update or the next, as that
    of `Trainer.terminate` does, and costs no collective. `run` then returns as usual, and `received` is the signal on the
    ranks that got one, for a script that wants to end with status `128 + received`.

    Python runs no handler while the main thread is inside a collective or another call that does not return. A thread hears
    of the signal all the same. If the run has not ended `grace_seconds` later, that thread logs so, writes the stacks of all
    threads to standard error and ends the process with status `128 + signal`. A second signal, which comes half a second after
    the first or later, ends the process at once.

    Handlers are installed at STARTED, in the main thread only, and what was installed before is back when the run is over,
    however it ends. Processes forked in between, such as workers of a DataLoader, have the earlier handlers.

    Args:
        signals: SIGTERM and SIGUSR1, where the system has them, or others.
        grace_seconds: how long the end of the run may take, with all that is saved; a little less than the scheduler gives.

    Attributes:
        received: the signal that asked for the end of the latest run, or None.

    Example:
        >>> import signal
        >>> from ignite.engine import Events
        >>> from ignite_train.handlers import StopOnSignal
        >>> trainer, stop = getfixture("trainer"), StopOnSignal()
        >>> stop.attach(trainer)
        >>> handle = trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: signal.raise_signal(signal.SIGTERM))
        >>> trainer.run(getfixture("loader"), max_epochs=1).iteration
        2
        >>> stop.received.name
        'SIGTERM'
    """

    def __init__(self, signals: Iterable[signal.Signals] = _SIGNALS, *, grace_seconds: float = 25.0) -> None:
        self.signals = tuple(signal.Signals(number) for number in signals)
        self.grace_seconds = real_number("grace_seconds", grace_seconds, above=0)
        self.received: signal.Signals | None = None
        self._trainer: Trainer | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._watch: _Watch | None = None

    def attach(self, trainer: Trainer) -> None:
        """Listens during each run of `trainer`, from STARTED until the last handler of COMPLETED."""
        trainer.prepend_event_handler(Events.STARTED, self._start)
        trainer.add_event_handler(Events.EPOCH_STARTED, self._finish_last)

    def _start(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("run must be called in the main thread, where Python handles signals, if StopOnSignal is attached")
        self.received, self._trainer = None, trainer
        self._watch = _Watch(self.signals, self.grace_seconds, trainer)
        _listening.append(self)
        self._previous = {number: signal.signal(number, self._receive) for number in self.signals}
        self._finish_last(trainer)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler: no lock, no log, no collective. `Trainer.terminate` logs in a single process, so it is not used."""
        if self._trainer is not None:
            self.received = self.received or signal.Signals(number)
            self._trainer.signals.stop = True

    def _finish_last(self, trainer: Trainer) -> None:
        """Moves the end behind what others do when the run is over: saving, above all."""
        for event in _ENDS:
            if trainer.has_event_handler(self._finish, event):
                trainer.remove_event_handler(self._finish, event)
            trainer.add_event_handler(event, self._finish)

    def _finish(self, trainer: Trainer, *_error: BaseException) -> None:
        completed_follows = trainer.last_event_name == Events.TERMINATE and trainer.should_terminate != "skip_completed"
        if self._watch is not None and not completed_follows:
            self._restore()

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
