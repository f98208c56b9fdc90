"""Messages of the ranks that travel with the statistics of an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Outgoing", "Piggyback", "RankRequests"]


@dataclass(slots=True)
class RankRequests:
    """Requests of a rank to all ranks; the update carries them on its packed statistics.

    Attributes:
        stop: end the run after this update.
        stop_epoch: end the epoch after this update.
        more_data: this rank's vote on another update: 1 for it, 0 if it has no more micro-batches, less to veto. In what was
            agreed: whether there is one. Looked at only where the loader has no length.
        interrupt: interrupt the run after this update; the next `run` continues in the same epoch.
        changes_gradients: a handler of this rank may change the mean gradient. Then all ranks multiply it out before the step,
            since a factor inside of a kernel rounds otherwise.
    """

    stop: bool = False
    stop_epoch: bool = False
    more_data: int = 1
    interrupt: bool = False
    changes_gradients: bool = False

    def begin(self, *, stop_epoch: bool = False) -> None:
        """Asks for nothing else in a run that begins; whether gradients are changed depends on the handlers alone."""
        self.stop, self.stop_epoch, self.more_data, self.interrupt = False, stop_epoch, 1, False


class Piggyback(Protocol):
    """A few numbers of this rank that travel with the next update's statistics and come back summed over the ranks.

    Attributes:
        payload_size: how many; the same on all ranks.
    """

    payload_size: int = 1

    def payload(self) -> Sequence[float]:
        """Returns the numbers to send. Called once an update, on every rank."""

    def on_reduced(self, sums: list[float]) -> None:
        """Takes the sums over the ranks: the same on every rank, so that an error raised here is raised on all of them."""

    def vetoes(self, sums: Tensor) -> Tensor:
        """Whether `on_reduced` is going to raise for these sums, before the step: a bool tensor without dimensions, not read.

        An accelerator asks before it makes the step without the host. The default never vetoes; override it if `on_reduced` can
        raise.
        """
        return sums.new_zeros((), dtype=torch.bool)

    def settle(self) -> None:
        """Compares numbers that no update has sent to the other ranks yet. Collective; does nothing by default."""
        return


class Outgoing(NamedTuple):
    """The numbers that a rank sends with the statistics of an update.

    Attributes:
        requests: what it asks for.
        piggybacks: whose numbers travel too; attached alike on all ranks.
    """

    requests: RankRequests
    piggybacks: Sequence[Piggyback]
