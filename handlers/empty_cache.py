"""Handing cached accelerator memory back to the driver."""

from __future__ import annotations

import torch
from ignite.engine import Events, RemovableEventHandle

from ignite_train.events import Event, every
from ignite_train.handler import Handler
from ignite_train.trainer import Trainer

__all__ = ["EmptyCache"]


class EmptyCache(Handler):
    """Empties the allocator's cache of the accelerator, in the same update on every rank, so that ranks wait together.

    Without an accelerator it does nothing. fairseq also empties once after the first update, which allocates unlike all
    others: attach to `Events.ITERATION_COMPLETED(once=1) | Events.ITERATION_COMPLETED(every=500)` for that.

    Example:
        >>> from ignite.engine import Events
        >>> from ignite_train.handlers import EmptyCache
        >>> trainer = getfixture("trainer")
        >>> handle = EmptyCache().attach(trainer, Events.ITERATION_COMPLETED(every=500))  # after updates 500, 1000, ...
    """

    def attach(self, trainer: Trainer, event: Event = every(1000, Events.ITERATION_COMPLETED)) -> RemovableEventHandle:
        """Empties the cache at `event`."""
        return trainer.add_event_handler(event, self)

    def __call__(self) -> None:
        """Empties the cache. Synchronises with the device."""
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
