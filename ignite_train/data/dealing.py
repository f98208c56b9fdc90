"""Dealing: who gets which samples of an epoch's order."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh

from ignite_train.ranks import collectives
from ignite_train.ranks.data_ranks import share_of
from ignite_train.ranks.members import Members

__all__ = ["Dealing", "ElasticDealing"]


class Dealing:
    """To the ranks of the process group, which are the same in the whole run.

    Args:
        mesh: the dimensions of a device mesh over which samples differ; None: each rank gets its own.

    Attributes:
        again: whether samples can be dealt again within an epoch.
    """

    again = False

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the process group among which samples are dealt out, as far as this process knows."""
        return tuple(range(collectives.world_size()) if self._mesh is None else sorted(self._mesh.mesh.flatten().tolist()))

    @property
    def rank(self) -> int:
        """Who this process is among those that get samples."""
        return share_of(self._mesh)[0]

    @property
    def size(self) -> int:
        """How many get samples."""
        return share_of(self._mesh)[1]

    def lengths(self, own: Callable[[], int | None]) -> list[int]:
        """How many micro-batches each of them has, -1 where it is unknown. Collective, unless samples can be dealt again.

        Args:
            own: looks at how many this process has; asked as any of them where samples can be dealt again.
        """
        length = own()
        return [int(one) for one in collectives.everyones(-1 if length is None else length)]


class ElasticDealing(Dealing):
    """To the members of the update, who may be others in the next one, and to each of the ranks of a member.

    The order of the samples is a function of seed and epoch. Each member takes its own from the place after the samples that
    are counted; so the samples of a member that is lost are dealt again with the rest.

    Args:
        members: the members.
    """

    again = True

    def __init__(self, members: Members) -> None:
        super().__init__()
        self._members = members
        self._rank: int | None = None  # whose share is looked at

    @property
    def rank(self) -> int:
        """See `Dealing`."""
        own = self._members.rank * collectives.world_size() + collectives.rank()
        return own if self._rank is None else self._rank

    @property
    def size(self) -> int:
        """See `Dealing`."""
        return self._members.size * collectives.world_size()

    def lengths(self, own: Callable[[], int | None]) -> list[int]:
        """See `Dealing`. Not collective: each member knows the shares of all."""
        found = []
        try:
            for rank in range(self.size):
                self._rank = rank
                length = own()
                found.append(-1 if length is None else length)
        finally:
            self._rank = None
        return found
