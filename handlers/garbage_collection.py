"""Python's garbage collector, run at chosen updates and not in between."""

from __future__ import annotations

import gc
from functools import partial

from ignite.engine import Events, RemovableEventHandle

from ignite_train.events import Event, every
from ignite_train.kinds_of_handlers import Handler
from ignite_train.ranks.whereabouts import COLLECTOR
from ignite_train.trainer import Trainer

__all__ = ["GarbageCollection"]


class GarbageCollection(Handler):
    """Switches the automatic garbage collection off during a run, and collects at chosen updates, on all ranks together.

    Python collects on its own whenever a rank has made many objects. Each rank does so at another time, and all others wait for
    it in the next collective. With this handler they collect after the same update. Between two collections objects that refer
    to each other in a circle stay in memory: collect more often where memory grows. After the run, also after an exception, the
    automatic collection is as it was before.

    Example:
        >>> handle = GarbageCollection().attach(trainer, Events.ITERATION_COMPLETED(every=500))  # after updates 500, 1000, ...
    """

    def __init__(self) -> None:
        self._was_enabled = False  # before the runs that last
        self._running: set[int] = set()  # trainers: one may run in the session of another

    def attach(self, trainer: Trainer, event: Event = every(1000, Events.ITERATION_COMPLETED)) -> RemovableEventHandle:
        """Collects when a run of `trainer` begins, and at `event`."""
        trainer.on_enter.append(self._begin)
        trainer.on_exit.append(partial(self._end, id(trainer)))
        return trainer.add_event_handler(event, self)

    def __call__(self) -> None:
        """Collects now."""
        gc.collect()

    def _begin(self, trainer: Trainer) -> None:
        with COLLECTOR:  # a thread that has switched it off for a moment would switch it on again
            if not self._running:
                self._was_enabled = gc.isenabled()
            gc.disable()
        self._running.add(id(trainer))
        gc.collect()

    def _end(self, trainer: int) -> None:
        if trainer in self._running:
            self._running.remove(trainer)
            if self._was_enabled and not self._running:
                with COLLECTOR:
                    gc.enable()
