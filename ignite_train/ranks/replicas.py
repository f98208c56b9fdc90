"""Plain replicas: gradients and statistics cross the ranks together, once all backwards are done."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_train.model.gradients import Gradients
from ignite_train.model.memory_layout import as_gradient_of
from ignite_train.model.sparse_parameters import sparse_parameters
from ignite_train.ranks import collectives
from ignite_train.ranks.buckets import buckets
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.reduction import PlainReduction
from ignite_train.ranks.sparse_rows import SparseRows
from ignite_train.ranks.statistics import Statistics

__all__ = ["ExplicitReduction", "SmallReplicas"]

_TAIL_ELEMENTS = 2**14  # how much of the gradient travels beside the statistics, in float64


class ExplicitReduction(PlainReduction):
    """Sums gradients over ranks after the last backward, in buckets; the last bucket carries the statistics too.

    No collective is issued before every rank is done with its micro-batches, so whatever happens to one of them in forward or
    backward on one rank leaves the others undisturbed. Nothing overlaps backward in return. The smallest parameters' gradients
    and the statistics share one bucket in float64, so that the statistics cost no collective of their own and stay exact.

    Args:
        model: the same on all ranks, without a wrapper.
        synchronise: give parameters and buffers of rank 0 to all ranks. Collective.
    """

    def __init__(self, model: nn.Module, *, synchronise: bool = True) -> None:
        super().__init__(model)
        for tensor in chain(model.parameters(), model.buffers()) if synchronise else ():
            collectives.broadcast(tensor)
        self._sparse: SparseRows | None = None
        self._buckets: tuple[tuple[nn.Parameter, ...], ...] = ()
        self._tails: tuple[tuple[nn.Parameter, ...], ...] = ()  # by dtype
        self._planned: list[nn.Parameter] = []

    def end(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor:
        """Sums gradients and statistics; a parameter that no rank has a gradient for keeps none."""
        self._make_plan(gradients, statistics.device)
        vector = statistics.pack(*outgoing)
        assert vector is not None  # noqa: S101  # there are several ranks
        groups = (*self._buckets, *self._tails)
        here = [parameter.grad is not None for parameter in chain(*groups)]
        ranks_with_gradient = torch.tensor(here, dtype=vector.dtype).to(vector.device, non_blocking=True)
        announced = () if self._sparse is None else (self._sparse.announcement().to(vector),)
        large, small = [_flatten(bucket) for bucket in self._buckets], [_flatten(tail) for tail in self._tails]

        message = _Message.pack(vector, ranks_with_gradient, *announced, *small)
        _sum_over_ranks(*large, message.flat)
        sums, ranks_with_gradient, *small = message.unpack()
        if self._sparse is not None:
            self._sparse.add_over_ranks(small.pop(0))

        vector.copy_(sums)
        anywhere = here if all(here) else (ranks_with_gradient > 0).tolist()  # sync, only if one is missing on this rank
        exists = iter(anywhere)
        for bucket, flat in zip(groups, (*large, *small), strict=True):
            _unflatten(bucket, flat, exists)
        return gradients.norm()

    def _make_plan(self, gradients: Gradients, device: torch.device) -> None:
        """Cuts the trainable parameters into buckets; again only when others have become trainable."""
        trainable = [parameter for parameter in gradients.parameters() if parameter.requires_grad]
        if len(trainable) == len(self._planned) and all(map(operator.is_, trainable, self._planned)):
            return
        self._planned = trainable
        known = sparse_parameters(self.module)
        sparse = [parameter for parameter in trainable if parameter in known]
        trainable = [parameter for parameter in trainable if parameter not in known]
        self._sparse = SparseRows(sparse) if sparse else None
        tails: dict[torch.dtype, list[nn.Parameter]] = {}
        in_tails: set[int] = set()
        elements = 0
        for parameter in sorted((p for p in trainable if p.is_floating_point() and p.device == device), key=Tensor.numel):
            elements += parameter.numel()
            if elements > _TAIL_ELEMENTS:
                break
            tails.setdefault(_dtype(parameter), []).append(parameter)
            in_tails.add(id(parameter))
        whole = (parameter for parameter in trainable if id(parameter) not in in_tails)
        self._buckets = tuple(map(tuple, buckets(whole, _dtype)))
        self._tails = tuple(map(tuple, tails.values()))


class SmallReplicas(ExplicitReduction):
    """A `DistributedDataParallel` so small that all of its gradients travel beside the statistics, in one all-reduce.

    DDP would reduce them in one bucket at the end of backward, which overlaps nothing, and the statistics would need a
    collective of their own, which on so small a network costs as much again.

    Args:
        model: `ddp`, or what holds it.
        ddp: the wrapped model; see `suits`.
    """

    may_drop_micro_batches = False  # as in any other DDP: what is allowed is not to depend on the size

    def __init__(self, model: nn.Module, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp.module if model is ddp else model, synchronise=False)  # DDP has done so
        self._ddp = ddp
        logging.getLogger("ignite_train").info(
            "the gradients are so small that they cross the ranks with the statistics, in one all-reduce, and not by the hooks "
            "of DistributedDataParallel; reduction='ddp' insists on those"
        )

    @staticmethod
    def suits(ddp: DistributedDataParallel) -> bool:
        """Whether `ddp` is small, and does nothing but average gradients."""
        does_more = ddp._comm_hooks or ddp.parameters_to_ignore or ddp.mixed_precision is not None or ddp.static_graph
        has_buffers = ddp.broadcast_buffers and next(ddp.module.buffers(), None) is not None
        return not does_more and not has_buffers and sum(map(Tensor.numel, ddp.module.parameters())) <= _TAIL_ELEMENTS

    def context(self, *, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """DDP's `no_sync`, always.

        Raises:
            ValueError: a communication hook was registered meanwhile.
        """
        if self._ddp._comm_hooks:
            raise ValueError(
                "model must have its communication hook before it is given to create_trainer; call register_comm_hook earlier, "
                "or pass reduction='ddp'"
            )
        context: AbstractContextManager[Any] = self._ddp.no_sync()
        return context


class _Message(NamedTuple):
    """Several vectors end to end, in the widest of their dtypes, to cross the ranks in one collective."""

    flat: Tensor
    lengths: list[int]

    @classmethod
    def pack(cls, *parts: Tensor) -> _Message:
        return cls(torch.cat(parts), [len(part) for part in parts])

    def unpack(self) -> tuple[Tensor, ...]:
        return torch.split(self.flat, self.lengths)


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    """That of its gradient, which may be wider than its own."""
    dtype: torch.dtype | None = parameter.grad_dtype
    return parameter.dtype if dtype is None else dtype


def _sum_over_ranks(*vectors: Tensor) -> None:
    """Sums each over the ranks, in place; all are under way at once."""
    for work in [collectives.start_sum(vector) for vector in vectors]:
        if work is not None:
            work.wait()


def _flatten(parameters: tuple[nn.Parameter, ...]) -> Tensor:
    """The gradients end to end, each in the order of its indices, whatever its strides; zeros for those that are missing."""
    return torch.cat([(torch.zeros_like(p, dtype=_dtype(p)) if p.grad is None else p.grad).reshape(-1) for p in parameters])


def _unflatten(parameters: tuple[nn.Parameter, ...], flat: Tensor, present: Iterator[bool]) -> None:
    """Gives each parameter its part of `flat` for a gradient, with the strides of the parameter, unless no rank has one."""
    parts = torch.split(flat.to(_dtype(parameters[0])), [p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        if next(present):
            contiguous = parameter.is_contiguous()  # asked here because a call for each parameter would cost more
            parameter.grad = part.view_as(parameter) if contiguous else as_gradient_of(part, parameter)
