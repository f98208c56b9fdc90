"""Finding out, without a collective, whether all ranks have come to the same point."""

from __future__ import annotations

import time
from contextlib import suppress

from ignite_train.ranks import collectives
from ignite_train.ranks.sealed_messages import SealedMessages

__all__ = ["RankVote"]

_PATIENCE_SECONDS = 10.0  # between the first rank and the last: they were in the same reduction just before
_POLL_SECONDS = 0.02


class RankVote:
    """Lets a rank ask whether all others stand where it stands, before it enters a collective that they might not join.

    A rank that enters a collective alone would meet the next collective of the others there, which is another one. So the
    ranks write to the store at which they met instead. Making one is collective; voting is not, and a training in which no
    vote is taken pays nothing for it. All votes of one object are taken by all ranks in the same order.
    """

    def __init__(self) -> None:
        self._messages = SealedMessages.start()
        self._rank, self._world_size = collectives.rank(), collectives.world_size()
        self._number = 0

    def cast(self) -> None:
        """Says that this rank stands here. `absent` is called after it."""
        self._number += 1
        if self._messages is not None:
            with suppress(RuntimeError):  # a store that is gone; `absent` finds that out too
                self._messages.write(f"{self._number}/{self._rank}", "here")

    def absent(self) -> tuple[int, ...]:
        """The ranks that have not said so within ten seconds; empty on every rank, or on none."""
        if self._messages is None:
            return ()
        try:
            return self._count(self._messages)
        except RuntimeError:  # the store is gone, and with it most likely the process that held it
            return tuple(rank for rank in range(self._world_size) if rank != self._rank)

    def _count(self, messages: SealedMessages) -> tuple[int, ...]:
        number, deadline = self._number, time.monotonic() + _PATIENCE_SECONDS
        while missing := [rank for rank in range(self._world_size) if messages.read(f"{number}/{rank}") is None]:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        # A rank may vote at the moment at which another loses patience. The first that writes here decides for all of them.
        outcome: list[int] = messages.write_once(f"{number}/outcome", missing)
        return tuple(outcome)
