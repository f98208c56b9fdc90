"""Typed wrappers of the collectives in use, with counters for HangWatch; the rest is `ignite.distributed`."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol, TypeVar

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import Tensor

from ignite_train.internals.of_distributed import process_groups, sequence_number_of
from ignite_train.model.memory_layout import as_bytes

__all__ = [
    "StartedSum",
    "any_rank",
    "broadcast",
    "collectives_begun",
    "end_process",
    "everyones",
    "from_main_rank",
    "gather_bytes",
    "gather_objects",
    "gather_objects_on_main_rank",
    "is_main_rank",
    "largest",
    "own_group",
    "rank",
    "start_sum",
    "sum_over_ranks",
    "total",
    "world_size",
]

T = TypeVar("T")

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands

_GATHERED_BYTES = 2**18  # of all ranks together: more than that takes longer to send than it saves in turns round the ring


def world_size() -> int:
    """Number of ranks; 1 without a process group. The first call adopts a process group made elsewhere (collective)."""
    return idist.get_world_size()


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return idist.get_rank()


def is_main_rank() -> bool:
    """Whether this is the rank that prints and writes."""
    return rank() == 0


class StartedSum(Protocol):
    """A sum over the ranks that is under way."""

    def wait(self) -> object:
        """Returns once the sum is in the vector."""


class _GatheredSum:
    """A sum over the ranks to which each of them gives all others its numbers, and which each adds up for itself.

    An all-reduce of gloo goes twice round the ring of ranks, this once. All ranks come to the same bits: they add in the order
    of the ranks, one element at a time.

    Args:
        vector: what to sum, in place.
        ranks: how many there are.
    """

    def __init__(self, vector: Tensor, ranks: int) -> None:
        self._vector = vector.detach()
        self._each = list(self._vector.new_empty(ranks, vector.numel()).unbind())
        self._work = dist.all_gather(self._each, self._vector.view(-1), async_op=True)

    def wait(self) -> None:
        """Waits for the numbers of the other ranks, and puts the sum into the vector."""
        self._work.wait()
        total, *others = self._each
        for other in others:
            total.add_(other)
        self._vector.copy_(total.view_as(self._vector))


def start_sum(vector: Tensor) -> StartedSum:
    """Starts to sum `vector` over several ranks, in place. Wait on what it returns before reading."""
    ranks = world_size()
    if vector.is_cpu and ranks * vector.nbytes <= _GATHERED_BYTES:
        return _GatheredSum(vector, ranks)
    work: StartedSum = dist.all_reduce(vector, async_op=True)
    return work


def sum_over_ranks(*vectors: Tensor) -> None:
    """Sums each vector over the ranks, in place; all are under way at once. Blocking; nothing in a single process."""
    for started in [start_sum(vector) for vector in vectors if world_size() > 1]:
        started.wait()


def largest(*values: float) -> list[float]:
    """The largest of each value over the ranks. One blocking all-reduce; none in a single process."""
    return _all_reduce(values, dist.ReduceOp.MAX)


def total(values: Sequence[float]) -> list[float]:
    """The sum of each value over the ranks. One blocking all-reduce; none in a single process."""
    return _all_reduce(values, dist.ReduceOp.SUM)


def everyones(value: float) -> list[float]:
    """The value of each rank, in rank order. One blocking all-reduce; none in a single process."""
    return largest(*(value if rank() == number else float("-inf") for number in range(world_size())))


def any_rank(flag: object) -> bool:
    """Whether `flag` is true on any rank: the same answer on all. One blocking all-reduce; none in a single process."""
    return largest(float(bool(flag)))[0] > 0


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """`value` of every rank, in rank order; pickled between the ranks, which trust each other. Blocking.

    `group`: of all ranks; from `own_group`, for a thread beside the one that trains.
    """
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def from_main_rank(value: T) -> T:
    """The `value` of rank 0, on every rank; pickled between the ranks. Blocking."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_objects_on_main_rank(value: Any) -> list[Any] | None:
    """`value` of every rank, in rank order, on rank 0, and None on the others; pickled between the ranks. Blocking."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if is_main_rank() else None
    dist.gather_object(value, values, dst=0)
    return values


def gather_bytes(content: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The bytes of every rank, in rank order. One blocking collective, which carries as much for each as for the longest.

    Args:
        content: this rank's, uint8, on the device of the process group.
        lengths: how long that of each rank is.
    """
    padded = content.new_zeros(max(lengths))
    padded[: len(content)] = content
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded)
    return [one[:length] for one, length in zip(gathered, lengths, strict=True)]


def own_group() -> dist.ProcessGroup | None:
    """A group of all ranks over gloo, for a thread whose collectives must not mix with others. None in a single process."""
    return dist.new_group(backend="gloo") if world_size() > 1 else None


def broadcast(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gives `tensor` the values that it has on rank 0, whatever its strides are there and here. Blocking, collective.

    With `group` it is the first rank of that group which gives them to the others in it.

    A collective copies memory, and so takes elements to other indices where the strides of the ranks differ, and writes over
    what lies between the elements of a tensor with gaps. Bytes cross, since gloo does not know int16 and other dtypes.
    """
    tensor = tensor.detach()
    values = tensor.resolve_conj().resolve_neg().contiguous()
    dist.broadcast(as_bytes(values), group=group, group_src=0)
    if values is not tensor:
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0:  # an expanded dimension holds one element, which may be written once only
                tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
        tensor.copy_(values)


def collectives_begun() -> int:
    """How many collectives this rank has begun, in all process groups; 0 where the backend does not count them.

    Any thread may ask. A rank that takes part in collectives makes progress, also where no update is begun.
    """
    try:
        return sum(map(sequence_number_of, process_groups()))
    except RuntimeError:  # not every backend counts; and a group may be made at this moment
        return 0


def end_process(status: int) -> NoReturn:
    """Ends this process within a second, from any thread: for one whose main thread waits in a collective forever.

    Logs and standard streams are written out first, as far as that takes no longer. Nothing else is: no `finally`, no `atexit`.
    """
    threading.Timer(1.0, os._exit, [status]).start()
    with suppress(Exception):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _all_reduce(values: Sequence[float], op: Any) -> list[float]:
    if world_size() == 1:
        return list(values)
    vector = torch.tensor(values, dtype=torch.float64, device=_own_device())
    dist.all_reduce(vector, op=op)
    return [float(value) for value in vector.tolist()]  # sync


def _own_device() -> torch.device:
    """Where the process group wants its small tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
