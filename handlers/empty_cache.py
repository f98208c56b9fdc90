"""Returning cached accelerator memory to the driver."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ignite.engine import Events, RemovableEventHandle

from ignite_train.arguments import real_number
from ignite_train.events import Event, every
from ignite_train.kinds_of_handlers import Handler
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Piggyback
from ignite_train.trainer import Trainer

__all__ = ["EmptyCache"]


class EmptyCache(Handler, Piggyback):
    """Empties the cache of the accelerator's allocator, in the same update on every rank, so that all ranks wait together.

    Without an accelerator it does nothing. fairseq (`empty_cache_freq`) also empties after the first update, which allocates
    differently: attach to `Events.ITERATION_COMPLETED(once=1) | Events.ITERATION_COMPLETED(every=500)` for that. And it empties
    after each micro-batch until the first step: attach another one to
    `TrainEvents.BACKWARD_COMPLETED(event_filter=lambda trainer, _: trainer.state.num_steps == 0)`.

    Args:
        fragmentation: empty only if this share of the memory that the allocator has reserved, or more, is not in use by
            tensors on some rank; in (0, 1]. On several ranks what each finds travels with the statistics of the next update,
            after which all of them empty. None: always.

    Raises:
        TypeError, ValueError: `fragmentation` is not a number in (0, 1].

    Example:
        >>> handle = EmptyCache().attach(trainer, Events.ITERATION_COMPLETED(every=500))  # after updates 500, 1000, ...
        >>> handle = EmptyCache(fragmentation=0.3).attach(trainer, Events.ITERATION_COMPLETED(every=50))
    """

    def __init__(self, fragmentation: float | None = None) -> None:
        if fragmentation is not None and real_number("fragmentation", fragmentation, above=0) > 1:
            raise ValueError(f"fragmentation must be at most 1, got {fragmentation!r}; it is a share of the reserved memory")
        self.fragmentation = fragmentation
        self._is_fragmented = False  # on this rank, and not yet told to the others
        self._is_due = False  # on all ranks

    def attach(self, trainer: Trainer, event: Event = every(1000, Events.ITERATION_COMPLETED)) -> RemovableEventHandle:
        """Empties the cache at `event`, or checks there whether to do so. All ranks must attach it."""
        if self.fragmentation is not None and collectives.world_size() > 1 and self not in trainer.piggybacks:
            trainer.piggybacks.append(self)
            trainer.add_event_handler(Events.ITERATION_COMPLETED, self._empty_if_due)
        return trainer.add_event_handler(event, self)

    def __call__(self) -> None:
        """Empties the cache, or looks whether to do so. Emptying synchronises with the device."""
        if not torch.accelerator.is_available():
            return
        if self.fragmentation is None:
            torch.accelerator.empty_cache()
        elif _unused_share() >= self.fragmentation:
            self._is_fragmented = True
            if collectives.world_size() == 1:
                self._is_due = True
                self._empty_if_due()

    def payload(self) -> Sequence[float]:
        """Whether this rank's memory is fragmented."""
        told, self._is_fragmented = self._is_fragmented, False
        return [float(told)]

    def on_reduced(self, sums: list[float]) -> None:
        """Has all ranks empty after this update, if some rank needs it."""
        self._is_due = sums[0] > 0

    def _empty_if_due(self) -> None:
        if self._is_due:
            self._is_due = self._is_fragmented = False
            torch.accelerator.empty_cache()


def _unused_share() -> float:
    """The share of the reserved memory of the current device that no tensor uses."""
    reserved = torch.accelerator.memory_reserved()
    return 1 - torch.accelerator.memory_allocated() / reserved if reserved else 0.0
