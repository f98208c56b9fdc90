"""What a trainer asks of its data: passes over it, in groups of micro-batches that all ranks go through together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ignite_train.loop.loop import Batches

__all__ = ["Groups", "OpenGroups"]


class Groups(Batches, Protocol):
    """One pass over the data of all ranks, in groups of micro-batches.

    Attributes:
        more: this rank's vote on another group after the latest; see `RankRequests`.
        widest: the largest number of micro-batches that any rank has in the latest group; None if unknown.
    """

    more: int
    widest: int | None

    def __next__(self) -> list[Any]:
        """The micro-batches of the next update; empty if only other ranks have some."""

    def position(self, done: int) -> dict[str, Any]:
        """The position of this rank after the first `done` groups of the epoch: all that were given, or all but the last."""

    def finish(self) -> None:
        """Ends the epoch. Call it before the position at the end of the epoch is read."""


class OpenGroups(Protocol):
    """Starts a pass over a loader; see `MicroBatchGrouping`, the one there is."""

    def __call__(
        self, loader: Iterable[Any], *, epoch: int, first_update: int, skip: int, position: Mapping[str, Any]
    ) -> Groups:
        """Starts epoch `epoch`, past its first `skip` groups, after which `position` was taken. Collective."""

    def updates(self, loader: Iterable[Any], *, epoch: int, first_update: int) -> int | None:
        """Updates of an epoch, where they can be known before it. Collective."""

    def widest(self, group: list[Any]) -> int | None:
        """What `Groups.widest` is for a group that comes from no loader: the ranks have equally many, or it is unknown."""
