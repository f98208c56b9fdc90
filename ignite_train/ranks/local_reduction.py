"""Replicas that train on their own: statistics cross the ranks in each update, gradients never do."""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn

from ignite_train.model.gradients import Gradients
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.reduction import PlainReduction
from ignite_train.ranks.statistics import Statistics

__all__ = ["LocalReduction"]


class LocalReduction(PlainReduction):
    """Leaves gradients on their rank, for an outer optimizer that makes the replicas equal from time to time.

    The packed statistics cross in each update all the same, so that all ranks know the loss, the logs and when to stop.

    Args:
        model: without a wrapper; all ranks begin with the weights and buffers of rank 0. Collective.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for tensor in chain(model.parameters(), model.buffers()):
            collectives.broadcast(tensor)

    def end(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor:  # noqa: ARG002
        """Sends the statistics. The norm is a placeholder: each rank has its own, which `LocalUpdate` takes and sends."""
        statistics.start(*outgoing)
        return 1.0
