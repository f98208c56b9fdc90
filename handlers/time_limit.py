"""Ending a run after a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from ignite.engine import Events, RemovableEventHandle

from ignite_train.arguments import NUMBER, check_fields, real_number
from ignite_train.events import Event
from ignite_train.kinds_of_handlers import Handler
from ignite_train.trainer import Trainer

__all__ = ["TimeLimit"]

_logger = logging.getLogger(__name__)


class TimeLimit(Handler):
    """Ends the run, on all ranks after the same update, once it has taken `seconds` of wall-clock time.

    The clock runs from the start of `run` and is saved, so that the time of earlier runs counts. In a single process no
    update begins after the limit; with several ranks, whose clocks differ, at most one.

    Args:
        seconds: the limit, greater than 0.

    Raises:
        TypeError, ValueError: `seconds` is not a number greater than 0.

    Example:
        >>> handle = TimeLimit(seconds=3600).attach(trainer)
        >>> trainer.run(data, max_epochs=1).iteration
        4
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = real_number("seconds", seconds, above=0)
        self._before = 0.0
        self._started: float | None = None
        self._has_said = False
        self._running: set[int] = set()  # trainers: one may run in the session of another

    @property
    def elapsed_seconds(self) -> float:
        """Seconds that the run has taken, with the time of earlier runs."""
        return self._before + (0.0 if self._started is None else time.monotonic() - self._started)

    def attach(self, trainer: Trainer, event: Event = Events.ITERATION_COMPLETED) -> RemovableEventHandle:
        """Checks the clock at `event`, and before the first update."""
        trainer.enter_with(self._start)
        trainer.on_exit.append(partial(self._stop, id(trainer)))
        trainer.enter_with(self)
        return trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Ends the run if the time is over."""
        if (elapsed := self.elapsed_seconds) < self.seconds:
            return
        if not self._has_said:
            self._has_said = True
            _logger.warning(
                f"update {trainer.state.iteration}: TimeLimit ends the run: it has taken {elapsed:.0f} s, earlier starts "
                f"included, of seconds={self.seconds:g}; to continue, give it more"
            )
        trainer.terminate()

    def state_dict(self) -> dict[str, Any]:
        """The seconds taken so far."""
        return {"elapsed_seconds": self.elapsed_seconds}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues to count from there.

        Raises:
            ValueError: something in it is not what `state_dict()` gives.
        """
        check_fields("TimeLimit", state_dict, {"elapsed_seconds": NUMBER})
        self._before = state_dict["elapsed_seconds"]
        self._started = None if self._started is None else time.monotonic()

    def _start(self, trainer: Trainer) -> None:
        self._before, self._started, self._has_said = self.elapsed_seconds, time.monotonic(), False
        self._running.add(id(trainer))

    def _stop(self, trainer: int) -> None:
        """The time until the next run does not count."""
        self._running.discard(trainer)
        if not self._running:
            self._before, self._started = self.elapsed_seconds, None
