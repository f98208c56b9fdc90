"""The ranks that `ignite.distributed` sees: some of them with tensors of any length, or this one alone."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ignite.distributed.comp_models.base import ComputationModel
from torch import Tensor

from ignite_train.arguments import describe_error
from ignite_train.internals.of_ignite import SerialModel, computation_model, computation_model_now

__all__ = ["Computed", "compute_on", "is_computing"]

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)) if isinstance(a, Tensor) else min(a, b),
    "MAX": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)) if isinstance(a, Tensor) else max(a, b),
}


class Computed(NamedTuple):
    """The end of a computation on one rank.

    Attributes:
        result: as the first of the ranks that compute has found it; None from the others.
        failure: the error in words; empty without one, and where only another rank had one.
    """

    result: Any = None
    failure: str = ""


class _OtherRankHasEndedError(Exception):
    """Ends a computation that waits for a rank which has ended its own, most likely by an error."""


def compute_on(ranks: Sequence[int], compute: Callable[[], Any], *, of: str) -> tuple[Any, Exception | None, list[Computed]]:
    """Calls `compute` on some ranks, between which it may use collectives of `ignite.distributed`. Collective on all ranks.

    Those ranks see no other ones. Each collective gathers objects of all ranks, so that a rank that does not compute, or has
    ended by an error, can take part until the last one has ended.

    Args:
        ranks: which ranks.
        compute: the computation.
        of: what computes, for errors.

    Returns:
        The result here, the error here, and how the computation ended on each rank.
    """
    result, error = None, None
    if (own := dist.get_rank()) in ranks:
        try:
            with computation_model(_SomeRanks(ranks, computation_model_now(), of)):
                result = compute()
        except _OtherRankHasEndedError:
            pass
        except Exception as raised:  # whatever it is, all ranks are to know
            error = raised
    is_sent = own == ranks[0] and len(ranks) < dist.get_world_size()
    failure = "" if error is None else describe_error(error)
    ended = Computed(result if is_sent else None, failure)
    while True:
        met = _gather(ended)
        if all(isinstance(entry, Computed) for entry in met):
            return result, error, met


def is_computing() -> bool:
    """Whether this is called within a computation of `compute_on`, in which the other ranks take no part."""
    return isinstance(computation_model_now(), _SomeRanks)


class _SomeRanks(SerialModel):
    """Some of the ranks, for the thread that makes it; other threads, such as one that saves, see all of them.

    Tensors may differ in their first dimension where they are gathered, and are added up only if they have one shape.
    """

    def __init__(self, ranks: Sequence[int], all_ranks: ComputationModel, of: str) -> None:
        super().__init__()
        self._ranks, self._all, self._of = ranks, all_ranks, of
        self._thread = threading.get_ident()

    def get_rank(self) -> int:
        own = self._all.get_rank()
        return self._ranks.index(own) if self._thread == threading.get_ident() else own

    def get_world_size(self) -> int:
        return len(self._ranks) if self._thread == threading.get_ident() else self._all.get_world_size()

    def device(self) -> torch.device:
        return self._all.device()

    def all_reduce(self, tensor: Any, op: str = "SUM", group: Any = None) -> Any:
        if group is not None:
            return self._all.all_reduce(tensor, op, group)
        entries = self._meet(tensor)
        shapes = sorted({tuple(entry.shape) for entry in entries if isinstance(entry, Tensor)})
        if len(shapes) > 1:
            raise ValueError(f"{self._of} must have a state of one shape on all ranks, got shapes {shapes}")
        return reduce(_OPERATIONS[op.upper()], entries)

    def all_gather(self, tensor: Any, group: Any = None) -> Any:
        if group is not None:
            return self._all.all_gather(tensor, group)
        entries = self._meet(tensor)
        if not isinstance(tensor, Tensor):
            return entries
        shapes = [tuple(entry.shape) for entry in entries]
        if len({shape[1:] for shape in shapes}) > 1:
            raise ValueError(f"{self._of} may gather tensors that differ in their first dimension only, got shapes {shapes}")
        return torch.cat([entry.reshape(-1) if entry.ndim == 0 else entry for entry in entries])

    def broadcast(self, tensor: Any, src: int = 0, safe_mode: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002  # Ignite's
        return self._meet(tensor if self.get_rank() == src else None)[src]

    def barrier(self) -> None:
        self._meet(None)

    def _meet(self, value: Any) -> list[Any]:
        """The value of each of these ranks. Tensors are where this rank's are."""
        device = value.device if isinstance(value, Tensor) else self.device()
        met = _gather(value.detach().cpu() if isinstance(value, Tensor) else value)
        entries = [met[rank] for rank in self._ranks]
        if any(isinstance(entry, Computed) for entry in entries):
            raise _OtherRankHasEndedError
        return [entry.to(device) if isinstance(entry, Tensor) else entry for entry in entries]


def _gather(value: Any) -> list[Any]:
    """The value of every rank: of all of them, also inside `computation_model`."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
