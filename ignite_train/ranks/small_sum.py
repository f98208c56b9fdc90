"""Summing a small vector over the ranks, where the delay of a collective counts and not its bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ignite_train.ranks import collectives

__all__ = ["SmallSum"]

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands

_MOST_BYTES = 2**18  # of a vector that is gathered, which needs memory for those of both ranks


class SmallSum:
    """Sums a small vector over the ranks, in place, and waits for it: one collective.

    Two processes over gloo gather the vectors of both, and each adds them up: as many bytes as an all-reduce, but one message
    each way, where gloo's all-reduce sends pieces twice, and each piece wakes other threads. Everywhere else it is an
    all-reduce. The bits are the same in both ways, and on both ranks, because a + b is b + a.

    Attributes:
        gathers: whether there are two processes over gloo.
    """

    def __init__(self) -> None:
        self.gathers = collectives.world_size() == 2 and dist.get_backend() == "gloo"
        self._both: list[Tensor] = []  # memory for the vectors of both ranks, kept for the next sum of this length

    def __call__(self, vector: Tensor) -> None:
        """Sums. Collective; the vectors of all ranks are contiguous and of one length."""
        if not self.gathers or not vector.is_cpu or vector.nbytes > _MOST_BYTES:
            dist.all_reduce(vector)
            return
        if not (self._both and self._both[0].shape == vector.shape and self._both[0].dtype is vector.dtype):
            self._both = [torch.empty_like(vector), torch.empty_like(vector)]
        self.gather(vector, self._both)
        torch.add(*self._both, out=vector)

    def gather(self, vector: Tensor, both: list[Tensor]) -> None:
        """Puts the vectors of the two ranks into `both`, in rank order. Collective, where `gathers` is true."""
        group = dist.group.WORLD
        assert group is not None  # noqa: S101  # there are two ranks
        group.allgather([both], [vector]).wait()  # as torch's function does, whose checks take as long as the rest
