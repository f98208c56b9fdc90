"""Replicas that come and go, plain or sharded: gradients and statistics cross those that take part in the update."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ignite_train.model.gradients import Gradients
from ignite_train.model.memory_layout import gradient_dtype
from ignite_train.ranks import collectives
from ignite_train.ranks.crossing import Crossing
from ignite_train.ranks.data_ranks import DataRanks
from ignite_train.ranks.fsdp import FSDPCrossing
from ignite_train.ranks.members import Members
from ignite_train.ranks.mesh import join_parts, split_parts
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.placeholders import Placeholders
from ignite_train.ranks.replicas import buckets
from ignite_train.ranks.statistics import Statistics

__all__ = ["ElasticCrossing", "ElasticShardsCrossing"]


class ElasticCrossing(Crossing):
    """Sums gradients over the members of the update after the last backward, and the statistics beside them.

    The mean is over the samples of those that take part, and does not care how many they are. The members are known before the
    first forward, since samples are dealt to them; whether they are still the same is asked while forward runs, and looked at
    here. See `Members`.

    Args:
        model: without a wrapper.
        members: the replicas that take part.
    """

    members: Members

    def __init__(self, model: nn.Module, members: Members) -> None:
        super().__init__(model)
        self.members = members

    def finish(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor:
        """Sums gradients and statistics; a parameter that no member has a gradient for keeps none.

        Raises:
            MembersChangedError: other replicas take part now, or a member was lost. Nothing has moved.
        """
        self.members.confirm()
        statistics.ranks = self.members
        cut = _cut(gradients)
        _sum(self.members, cut, statistics.pack(*outgoing, beside=sum(map(len, cut))))
        return gradients.norm()


class ElasticShardsCrossing(FSDPCrossing):
    """Elastic replicas, each of which is several ranks that `fully_shard` has shared the model out to.

    FSDP2 adds gradients up within the replica. Then each rank adds up its shards with the ranks of its number in the other
    replicas, and the sums of the replica beside them. The parts of the norm cross the ranks of the replica last, as they are
    those of the whole sum. So each sample counts once.

    Args:
        root: see `FSDPCrossing`.
        placeholders: see there.
        members: the replicas that take part.
        in_each: see there.
    """

    members: Members

    def __init__(self, root: nn.Module, placeholders: Placeholders, members: Members, *, in_each: bool) -> None:
        super().__init__(root, placeholders, DataRanks.all_ranks(), in_each=in_each)
        self.members = members

    def finish(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float:  # type: ignore[override]
        """See `ElasticCrossing`. What fails on one rank of the replica fails on all of them.

        Raises:
            MembersChangedError: other replicas take part now, or a member was lost. Nothing has moved.
            UnlikeParametersError: a rank of this replica has gradients of other parameters than the rest.
        """
        self.members.confirm()
        statistics.ranks = _AllRanksOfAll(self.members)
        cut = _cut(gradients)
        self.complete(gradients)
        self.compare_parameters(gradients)  # within the replica, since one without samples has no gradients
        vector = statistics.pack(*outgoing)
        if vector is not None:
            collectives.sum_over_ranks(vector)
        _sum(self.members, cut, vector)
        return self.norm(gradients)


class _AllRanksOfAll:
    """The ranks of all replicas, for `Statistics`."""

    def __init__(self, members: Members) -> None:
        self._members, self.size = members, members.size * collectives.world_size()

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """See `Ranks`."""
        collectives.sum_over_ranks(*tensors)
        self._members.sum(tensors)

    def gather_objects(self, value: Any) -> list[Any]:
        """See `Ranks`."""
        return [*chain(*self._members.gather_objects(collectives.gather_objects(value)))]


def _cut(gradients: Gradients) -> list[list[nn.Parameter]]:
    """The parameters whose gradients cross, in buckets."""
    gradients.drop_frozen()
    return buckets((parameter for parameter in gradients.parameters() if parameter.requires_grad), gradient_dtype)


def _sum(members: Members, cut: Sequence[Sequence[nn.Parameter]], vector: Tensor | None) -> None:
    """Sums the gradients in these buckets over the members, if there are several, and a vector beside them."""
    if members.size == 1:
        return
    flats = [join_parts(bucket) for bucket in cut]
    members.sum(flats if vector is None else [vector, *flats])
    for bucket, flat in zip(cut, flats, strict=True):
        split_parts(bucket, flat)
