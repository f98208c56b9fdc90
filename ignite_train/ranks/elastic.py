"""Plain replicas that come and go: gradients and statistics cross those that take part in the update."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from ignite_train.model.gradients import Gradients
from ignite_train.model.memory_layout import gradient_dtype
from ignite_train.ranks.crossing import Crossing
from ignite_train.ranks.members import Members
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.replicas import buckets, unflatten
from ignite_train.ranks.statistics import Statistics

__all__ = ["ElasticCrossing"]


class ElasticCrossing(Crossing):
    """Sums gradients over the members of the update after the last backward, and the statistics beside them.

    The mean is over the samples of those that take part, and does not care how many they are. The members are known before the
    first forward, since samples are dealt to them; whether they are still the same is asked while forward runs, and looked at
    here. See `Members`.

    Args:
        model: without a wrapper.
        members: the replicas that take part.
    """

    def __init__(self, model: nn.Module, members: Members) -> None:
        super().__init__(model)
        self.members = members

    def finish(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor:
        """Sums gradients and statistics; a parameter that no member has a gradient for keeps none.

        Raises:
            MembersChangedError: other replicas take part now, or one of them was lost. Nothing has moved.
        """
        self.members.confirm()
        statistics.ranks = self.members
        if self.members.size == 1:
            statistics.pack(*outgoing, alone=True)
            return gradients.norm()
        trainable = [parameter for parameter in gradients.parameters() if parameter.requires_grad]
        for parameter in gradients.parameters():
            if not parameter.requires_grad:  # frozen within this update: what is there is of this replica alone
                parameter.grad = None
        cut = [tuple(bucket) for bucket in buckets(trainable, gradient_dtype)]
        here = [parameter.grad is not None for parameter in chain(*cut)]
        vector = statistics.pack(*outgoing, beside=len(here))
        assert vector is not None  # noqa: S101  # there are several members
        message = torch.cat([vector, torch.tensor(here, dtype=vector.dtype, device=vector.device)])
        flats = [_flatten(bucket) for bucket in cut]
        self.members.sum([message, *flats])
        vector.copy_(message[: len(vector)])
        exists = iter((message[len(vector) :] > 0).tolist())  # sync
        for bucket, flat in zip(cut, flats, strict=True):
            unflatten(bucket, flat, exists)
        return gradients.norm()


def _flatten(parameters: tuple[nn.Parameter, ...]) -> Tensor:
    """The gradients end to end; zeros for those that are missing."""
    return torch.cat(
        [(torch.zeros_like(p, dtype=gradient_dtype(p)) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    )
