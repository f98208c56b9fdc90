"""What a trainer asks of its data: passes over it, in groups of micro-batches that all ranks go through together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ignite_train.loop.loop import Batches

__all__ = ["Groups", "OpenGroups"]


class Groups(Batches, Protocol):
    """One pass over the data of all ranks, in groups of micro-batches.

    Attributes:
        more: this rank's vote on another group after the one given last; see `RankRequests`.
        widest: micro-batches of the rank that had the most of them in the group given last; None if nobody knows.
    """

    more: int
    widest: int | None

    def __next__(self) -> list[Any]:
        """The micro-batches of the next update; empty where only other ranks have some."""

    def position(self, done: int) -> dict[str, Any]:
        """Where this rank stands after the first `done` groups of the epoch: all that were given, or all but the last."""

    def finish(self) -> None:
        """To be called when the epoch is over, before anybody asks for the position there."""


class OpenGroups(Protocol):
    """Starts a pass over a loader; see `MicroBatchGrouping`, the one there is."""

    def __call__(
        self, loader: Iterable[Any], *, epoch: int, first_update: int, skip: int, position: Mapping[str, Any]
    ) -> Groups:
        """Starts epoch `epoch`, past its first `skip` groups, after which `position` was taken. Collective."""
