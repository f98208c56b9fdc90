"""Returning cached accelerator memory to the driver."""

from __future__ import annotations

import torch
from ignite.engine import Events, RemovableEventHandle

from ignite_train.events import Event, every
from ignite_train.handler import Handler
from ignite_train.trainer import Trainer

__all__ = ["EmptyCache"]


class EmptyCache(Handler):
    """Empties the cache of the accelerator's allocator, in the same update on every rank, so that all ranks wait together.

    Without an accelerator it does nothing. fairseq (`empty_cache_freq`) also empties after the first update, which allocates
    differently: attach to `Events.ITERATION_COMPLETED(once=1) | Events.ITERATION_COMPLETED(every=500)` for that.

    Example:
        >>> import torch
        >>> from ignite.engine import Events
        >>> from ignite_train import create_trainer
        >>> from ignite_train.handlers import EmptyCache
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
        >>> handle = EmptyCache().attach(trainer, Events.ITERATION_COMPLETED(every=500))  # after updates 500, 1000, ...
    """

    def attach(self, trainer: Trainer, event: Event = every(1000, Events.ITERATION_COMPLETED)) -> RemovableEventHandle:
        """Empties the cache at `event`."""
        return trainer.add_event_handler(event, self)

    def __call__(self) -> None:
        """Empties the cache. Synchronises with the device."""
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
