"""Plain replicas, whose gradients cross the ranks with the statistics, once all backwards are done, or never."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_train.model.gradients import Gradients
from ignite_train.model.memory_layout import as_gradient_of, gradient_dtype
from ignite_train.model.sparse_parameters import sparse_parameters
from ignite_train.ranks import collectives
from ignite_train.ranks.bare_forward import BareForward
from ignite_train.ranks.buckets import buckets
from ignite_train.ranks.joint_message import JointMessage
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.reduction import PlainReduction
from ignite_train.ranks.sparse_rows import SparseRows
from ignite_train.ranks.statistics import Statistics
from ignite_train.ranks.unlike_ranks import described_parameters, refuse_unlike_ranks

__all__ = ["ExplicitReduction", "LocalReduction", "SmallReplicas"]

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands

_grad_dtype = operator.attrgetter("grad_dtype")
_TAIL_ELEMENTS = 2**14  # how much of the gradient travels beside the statistics, in float64


class ExplicitReduction(PlainReduction):
    """Sums gradients over ranks after the last backward, in buckets; a vector of its own carries the statistics too.

    No collective is issued before every rank is done with its micro-batches, so whatever happens to one of them in forward or
    backward on one rank leaves the others undisturbed. Nothing overlaps backward in return. The smallest parameters' gradients
    and the statistics share one vector in float64, so that the statistics cost no collective of their own and stay exact.

    Args:
        model: the same on all ranks, without a wrapper.
        synchronise: give parameters and buffers of rank 0 to all ranks. Collective.
    """

    def __init__(self, model: nn.Module, *, synchronise: bool = True) -> None:
        super().__init__(model)
        if synchronise:
            _begin_alike(model)
        self._sparse: SparseRows | None = None
        self._buckets: tuple[tuple[nn.Parameter, ...], ...] = ()
        self._tail: tuple[nn.Parameter, ...] = ()  # whose gradients travel beside the statistics
        self._num_small = 0  # how many elements they have
        self._planned: list[nn.Parameter] = []
        self._dtypes: list[torch.dtype | None] = []  # of their gradients; None: of any
        self._message: JointMessage | None = None
        self._compared = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}

    def end(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor:
        """Sums gradients and statistics; a parameter that no rank has a gradient for keeps none."""
        self._make_plan(gradients, statistics.device)
        small = [parameter.grad for parameter in self._tail]
        here = [gradient is not None for gradient in small]
        here += [parameter.grad is not None for parameter in chain(*self._buckets)]
        under_way = []
        for bucket in self._buckets:
            flat = _flatten(bucket)
            under_way.append((bucket, flat, collectives.start_sum(flat)))

        announced = None if self._sparse is None else self._sparse.announcement()
        num_announced = 0 if announced is None else announced.numel()
        vector = statistics.pack(*outgoing, beside=len(here) + num_announced + self._num_small)
        assert vector is not None  # noqa: S101  # there are several ranks
        message = self._message_like(vector, len(here), num_announced)
        message.pack(vector, here, announced, small)
        message.cross()
        statistics.take(message.statistics)

        exists = here if all(here) else (message.flags > 0).tolist()  # sync, only if one is missing on this rank
        message.unpack(small, exists[: len(small)])
        of_buckets = iter(exists[len(small) :])
        for bucket, flat, work in under_way:
            if work is not None:
                work.wait()
            _unflatten(bucket, flat, of_buckets)
        if self._sparse is not None:
            self._sparse.add_over_ranks(message.announced)
        return gradients.norm()

    def _message_like(self, statistics: Tensor, num_flags: int, num_announced: int) -> JointMessage:
        """The message of the update before; another one where other parameters have become trainable, or names are logged."""
        if self._message is None or self._message.statistics.numel() != statistics.numel():
            self._message = JointMessage(statistics, num_flags, num_announced, self._tail)
        return self._message

    def _make_plan(self, gradients: Gradients, device: torch.device) -> None:
        """Cuts the trainable parameters into buckets; again only when those, or the dtypes of gradients, are others."""
        trainable = [parameter for parameter in gradients.parameters() if parameter.requires_grad]
        dtypes = [*map(_grad_dtype, trainable)]
        if dtypes == self._dtypes and all(map(operator.is_, trainable, self._planned)):
            return
        self._planned, self._dtypes, self._message = trainable, dtypes, None
        self._compare_new(gradients)
        for parameter in gradients.parameters():
            if not parameter.requires_grad:  # frozen within this update: what is there is of this rank alone
                parameter.grad = None
        known = sparse_parameters(self.module)
        sparse = [parameter for parameter in trainable if parameter in known]
        trainable = [parameter for parameter in trainable if parameter not in known]
        self._sparse = SparseRows(sparse) if sparse else None
        tail: list[nn.Parameter] = []
        elements = 0
        for parameter in sorted((p for p in trainable if p.is_floating_point() and p.device == device), key=Tensor.numel):
            elements += parameter.numel()
            if elements > _TAIL_ELEMENTS:
                break
            tail.append(parameter)
        in_tail = {*map(id, tail)}
        whole = (parameter for parameter in trainable if id(parameter) not in in_tail)
        self._buckets, self._tail = tuple(map(tuple, buckets(whole, gradient_dtype))), tuple(tail)
        self._num_small = sum(map(Tensor.numel, tail))

    def _compare_new(self, gradients: Gradients) -> None:
        """Looks at parameters that were not in the model at first, whose values no reduction of gradients makes equal.

        Raises:
            ValueError: one of them has other values on some rank than on rank 0.
        """
        for parameter in self._planned:
            known = self._compared.get(id(parameter))
            if known is None or known() is not parameter:
                self._compared[id(parameter)] = weakref.ref(parameter)
                of_first = parameter.detach().clone()
                collectives.broadcast(of_first)
                if collectives.any_rank(not torch.equal(parameter, of_first)):
                    raise ValueError(
                        f"model must be the same on all ranks, got other values of {gradients.name(parameter)} than on rank 0, "
                        "which came into the optimizer during the run; give all ranks the same values, say by "
                        "torch.distributed.broadcast(parameter.data, src=0), before it is trained"
                    )


class SmallReplicas(ExplicitReduction):
    """A `DistributedDataParallel` so small that all of its gradients travel beside the statistics, in one collective.

    DDP would reduce them in one bucket at the end of backward, which overlaps nothing, and the statistics would need a
    collective of their own, which on so small a network costs as much again.

    Args:
        model: `ddp`, or what holds it.
        ddp: the wrapped model; see `suits`.
    """

    may_drop_micro_batches = False  # as in any other DDP: what is allowed is not to depend on the size

    def __init__(self, model: nn.Module, ddp: DistributedDataParallel) -> None:
        super().__init__(ddp.module if model is ddp else model, synchronise=False)  # DDP has done so
        self._ddp, self._bare_forward = ddp, BareForward(ddp)
        logging.getLogger("ignite_train").info(
            "the gradients are so small that they cross the ranks with the statistics, in one collective, and not by the hooks "
            "of DistributedDataParallel; reduction='ddp' insists on those"
        )

    @staticmethod
    def suits(ddp: DistributedDataParallel) -> bool:
        """Whether `ddp` is small, and does nothing but average gradients."""
        does_more = ddp._comm_hooks or ddp.parameters_to_ignore or ddp.mixed_precision is not None or ddp.static_graph
        has_buffers = ddp.broadcast_buffers and next(ddp.module.buffers(), None) is not None
        return not does_more and not has_buffers and sum(map(Tensor.numel, ddp.module.parameters())) <= _TAIL_ELEMENTS

    def num_placeholders(self, group: Sequence[Any], max_micro_batches: int | None) -> int:  # noqa: ARG002
        """None. Disarms the hooks of DDP in each update, on all ranks: also on those without a micro-batch."""
        self._bare_forward.disarm()
        return 0

    def context(self, *, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """A context in which DDP reduces nothing, as in its `no_sync`; the same for each backward.

        Raises:
            ValueError: a communication hook was registered meanwhile.
        """
        if self._ddp._comm_hooks:
            raise ValueError(
                "model must have its communication hook before it is given to create_trainer; call register_comm_hook earlier, "
                "or pass reduction='ddp'"
            )
        return self._bare_forward


class LocalReduction(PlainReduction):
    """Leaves gradients on their rank, for an outer optimizer that makes the replicas equal from time to time.

    The packed statistics cross in each update all the same, so that all ranks know the loss, the logs and when to stop.

    Args:
        model: without a wrapper; all ranks begin with the weights and buffers of rank 0. Collective.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        _begin_alike(model)

    def end(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor:  # noqa: ARG002
        """Sends the statistics. The norm is a placeholder: each rank has its own, which `LocalUpdate` takes and sends."""
        statistics.start(*outgoing)
        return 1.0


def _begin_alike(model: nn.Module) -> None:
    """Gives parameters and buffers of rank 0 to all ranks. Collective.

    Raises:
        ValueError: the model is not the same on all ranks.
    """
    refuse_unlike_ranks(described_parameters(model))
    for tensor in chain(model.parameters(), model.buffers()):
        collectives.broadcast(tensor)


def _flatten(parameters: tuple[nn.Parameter, ...]) -> Tensor:
    """The gradients end to end, each in the order of its indices, whatever its strides; zeros for those that are missing."""
    return torch.cat(
        [(torch.zeros_like(p, dtype=gradient_dtype(p)) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    )


def _unflatten(parameters: tuple[nn.Parameter, ...], flat: Tensor, present: Iterator[bool]) -> None:
    """Gives each parameter its part of `flat` for a gradient, with the strides of the parameter, unless no rank has one."""
    parts = torch.split(flat, [p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        if next(present):
            contiguous = parameter.is_contiguous()  # asked here because a call for each parameter would cost more
            parameter.grad = part.view_as(parameter) if contiguous else as_gradient_of(part, parameter)
