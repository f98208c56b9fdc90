"""Python's garbage collector, run at chosen updates and not in between."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from functools import partial

from ignite.engine import Events, RemovableEventHandle

from ignite_train.checkpoint.capture import paused_collection
from ignite_train.events import Event, every
from ignite_train.kinds_of_handlers import Handler
from ignite_train.trainer import Trainer

__all__ = ["GarbageCollection"]


class GarbageCollection(Handler):
    """Switches the automatic garbage collection off during a run, and collects at chosen updates, on all ranks together.

    Python collects on its own whenever a rank has made many objects. Each rank does so at another time, and all others wait for
    it in the next collective. With this handler they collect after the same update. Between two collections objects that refer
    to each other in a circle stay in memory: collect more often where memory grows. After the run, also after an exception, the
    automatic collection is as it was before. Worker processes that are forked in the run collect on their own.

    Example:
        >>> handle = GarbageCollection().attach(trainer, Events.ITERATION_COMPLETED(every=500))  # after updates 500, 1000, ...
    """

    def attach(self, trainer: Trainer, event: Event = every(1000, Events.ITERATION_COMPLETED)) -> RemovableEventHandle:
        """Collects when a run of `trainer` begins, and at `event`."""
        pause = ExitStack()
        trainer.enter_with(partial(self._begin, pause))
        trainer.on_exit.append(pause.close)
        return trainer.add_event_handler(event, self)

    def __call__(self) -> None:
        """Collects now."""
        gc.collect()

    def _begin(self, pause: ExitStack, _: Trainer) -> None:
        pause.enter_context(paused_collection())
        self()
