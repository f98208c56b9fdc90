"""Dealing: who gets which samples of an epoch's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from ignite_train.ranks import collectives
from ignite_train.ranks.data_ranks import share_of
from ignite_train.ranks.members import Members

__all__ = ["Dealing", "DealtSampler", "ElasticDealing"]

T = TypeVar("T")


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


class DealtSampler(Sampler[T]):
    """A sampler whose entries, samples or batches, are dealt out like cards: entry i of the epoch's order goes to rank i mod W.

    Args:
        num_entries: of an epoch, over all ranks.
        mesh: see `Dealing`.

    Attributes:
        dealing: to whom.
        epoch: the epoch of the next pass.
        num_entries: of an epoch, over all ranks.
    """

    def __init__(self, num_entries: int, mesh: DeviceMesh | None) -> None:
        self.num_entries, self.dealing = num_entries, Dealing(mesh)
        self.epoch = self._start = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass. A trainer calls it, with 0 for the first epoch, which `state.epoch` calls 1."""
        self.epoch = epoch

    def seek(self, samples: int) -> None:
        """Lets the next pass start after the first `samples` entries of the epoch's order, counted over all ranks, at once.

        The order does not depend on the number of ranks, so another number of ranks can continue there: each entry that is
        left is used once.
        """
        self._start = min(samples, self.num_entries)

    def __len__(self) -> int:
        return len(self._positions())

    def begin_pass(self) -> range:
        """The positions of this rank's entries in a pass that begins; the pass after it starts at the first entry again.

        Call it in a generator: where torch has workers it asks a sampler for two iterators, and drops the first unread.
        """
        positions, self._start = self._positions(), 0
        return positions

    def _positions(self) -> range:
        return range(self._start + self.dealing.rank, self.num_entries, self.dealing.size)
