"""When and how gradients and statistics cross ranks: what the update asks, and one process alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from ignite_train.model.gradients import Gradients, may_trust_norm
from ignite_train.ranks.data_ranks import DataRanks
from ignite_train.ranks.members import Members
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.statistics import Statistics

__all__ = ["AloneCrossing", "Crossing"]

_NOTHING = nullcontext()


class Crossing:
    """The way in which gradients cross the ranks: the base class of all ways, with no collective in forward or backward.

    Args:
        model: the model, without a wrapper.

    Attributes:
        averaged_over: by how many ranks the gradient is divided that crossing leaves; 1 where it is the sum.
        module: the model without a wrapper around it, whose parameters have the names the user gave them.
        may_drop_micro_batches: whether a rank may drop a micro-batch on its own, since no collective is issued before all of
            its backwards are done.
        forward_is_local: whether a rank can run `module` on its own: its forward has no collective.
        learns_outcome: whether `close` has something to do.
        members: the replicas that take part, where they come and go; None where they do not.
        data_ranks: over which ranks samples differ.
    """

    averaged_over = 1
    learns_outcome = False
    may_drop_micro_batches = True
    forward_is_local = True
    members: Members | None = None

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.data_ranks = DataRanks.all_ranks()

    def context(self, *, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """The context of a forward and its backward, whose gradients stay on this rank unless it is the update's `last`."""
        return _NOTHING

    def num_placeholders(self, group: Sequence[Any], max_micro_batches: int | None) -> int:  # noqa: ARG002
        """How often this rank has to run `take_part` to take part in an update. May be collective.

        Args:
            group: this rank's micro-batches.
            max_micro_batches: how many the rank with the most of them has; None if unknown.
        """
        return 0

    def take_part(self, loss_of: Callable[[Any], Tensor], backward: Callable[[Tensor], object]) -> None:
        """On a rank that lacks a micro-batch: makes a loss whose `backward` takes part in what others reduce in theirs.

        Collective. `loss_of` runs the user's forward on a micro-batch, for those who cannot do without.
        """
        raise NotImplementedError

    def start(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients, loss: Tensor) -> None:
        """Starts what can overlap the last backward, which begins at `loss`. Collective."""

    def finish(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor | None:  # noqa: ARG002
        """After the last backward: reduces what is left. Collective.

        Returns:
            The gradients' norm, as `Gradients.norm` gives it; None if the statistics carry each rank's share of it.
        """
        return gradients.norm()

    def norm(self, gradients: Gradients) -> float:
        """The norm of the reduced gradients as they are now, also where float32 cannot hold their squares.

        Waits for the device. May be collective.
        """
        norm = float(gradients.norm())  # sync
        return norm if may_trust_norm(norm) else gradients.scaled_norm()

    def close(self, *, applied: bool) -> None:
        """After the update, where `learns_outcome`: whether it was applied, which is the same on all ranks."""


class AloneCrossing(Crossing):
    """One process: there are no other ranks to reduce with."""

    def finish(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor:
        """The norm."""
        statistics.pack(*outgoing)
        return gradients.norm()
