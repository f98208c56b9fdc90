"""Plain replicas, whose gradients cross the ranks with the statistics, once all backwards are done, or never."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_train.device.streams import copy_on
from ignite_train.internals.of_distributed import check_reducer_finished, comm_hooks_of, disarm_reducer
from ignite_train.model.gradients import Gradients
from ignite_train.model.memory_layout import as_gradient_of, gradient_dtype
from ignite_train.model.sparse_parameters import sparse_parameters
from ignite_train.ranks import collectives
from ignite_train.ranks.begin_alike import begin_alike
from ignite_train.ranks.crossing import Crossing
from ignite_train.ranks.first_buffers import FirstBuffers, has_buffer_hook
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.sparse_rows import SparseRows
from ignite_train.ranks.statistics import Statistics

__all__ = ["LocalCrossing", "ReplicasCrossing", "SmallReplicasCrossing", "buckets", "mean_over_ranks", "unflatten"]

T = TypeVar("T", bound=Tensor)

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands

_grad_dtype = operator.attrgetter("grad_dtype")
_BUCKET_BYTES = 25 * 2**20  # DDP's default
_TAIL_ELEMENTS = 2**14  # how much of the gradient travels beside the statistics, in float64


class ReplicasCrossing(Crossing):
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
            begin_alike(model)
        self._sparse: SparseRows | None = None
        self._buckets: tuple[tuple[nn.Parameter, ...], ...] = ()
        self._tail: tuple[nn.Parameter, ...] = ()  # whose gradients travel beside the statistics
        self._planned: list[nn.Parameter] = []
        self._dtypes: list[torch.dtype | None] = []  # of their gradients; None: of any
        self._compared = {id(parameter): weakref.ref(parameter) for parameter in model.parameters()}

    def finish(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor:
        """Sums gradients and statistics; a parameter that no rank has a gradient for keeps none."""
        self._make_plan(gradients, statistics.device)
        here = [parameter.grad is not None for parameter in chain(self._tail, *self._buckets)]
        under_way = [(bucket, flat, collectives.start_sum(flat)) for bucket in self._buckets for flat in [_flatten(bucket)]]

        announced = self._sparse.announcement().tolist() if self._sparse is not None else []
        numbers = [*map(float, here), *announced]
        tail = _flatten(self._tail) if self._tail else torch.empty(0, device=statistics.device)
        vector = statistics.pack(*outgoing, beside=len(numbers) + tail.numel())
        assert vector is not None  # noqa: S101  # there are several ranks
        message = torch.cat([vector, copy_on(vector.device, torch.tensor(numbers, dtype=vector.dtype)), tail])
        collectives.sum_over_ranks(message)
        sums, flags, announced_by_all, summed_tail = torch.split(
            message, [len(vector), len(here), len(announced), tail.numel()]
        )
        vector.copy_(sums)

        exists = iter(here if all(here) else (flags > 0).tolist())  # sync, only if one is missing on this rank
        unflatten(self._tail, summed_tail.to(tail.dtype), exists)
        for bucket, flat, work in under_way:
            work.wait()
            unflatten(bucket, flat, exists)
        if self._sparse is not None:
            self._sparse.add_over_ranks(announced_by_all)
        return gradients.norm()

    def _make_plan(self, gradients: Gradients, device: torch.device) -> None:
        """Cuts the trainable parameters into buckets; again only when those, or the dtypes of gradients, are others."""
        stepped = gradients.parameters()
        trainable = [parameter for parameter in stepped if parameter.requires_grad]
        if len(trainable) < len(stepped):
            gradients.drop_frozen()
        dtypes = [*map(_grad_dtype, trainable)]
        if dtypes == self._dtypes and all(map(operator.is_, trainable, self._planned)):
            return
        self._planned, self._dtypes = trainable, dtypes
        self._compare_new(gradients)
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

    def _compare_new(self, gradients: Gradients) -> None:
        """Looks at parameters that were not in the model at first, whose values no reduction of gradients makes equal.

        Raises:
            ValueError: a parameter has other values on some rank than on rank 0.
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


class SmallReplicasCrossing(ReplicasCrossing):
    """A `DistributedDataParallel` so small that all of its gradients travel beside the statistics, in one collective.

    DDP would reduce them in one bucket at the end of backward, which overlaps nothing, and the statistics would need a
    collective of their own, which on so small a network costs as much again. Buffers go as in any other DDP.

    Args:
        module: the model without `ddp`, unless it holds `ddp`.
        ddp: the wrapped model; see `fits`.
    """

    may_drop_micro_batches = False  # as in any other DDP: what is allowed is not to depend on the size

    def __init__(self, module: nn.Module, ddp: DistributedDataParallel) -> None:
        super().__init__(module, synchronise=False)  # DDP has done so
        self._ddp, self._first_buffers = ddp, FirstBuffers(ddp)
        logging.getLogger("ignite_train").info(
            "the gradients are so small that they cross the ranks with the statistics, in one collective, and not by the hooks "
            "of DistributedDataParallel; reduction='ddp' insists on those"
        )

    @staticmethod
    def fits(ddp: DistributedDataParallel) -> bool:
        """Whether `ddp` is small, and does nothing but average gradients."""
        does_more = _has_hooks(ddp) or ddp.parameters_to_ignore or ddp.mixed_precision is not None or ddp.static_graph
        return not does_more and sum(map(Tensor.numel, ddp.module.parameters())) <= _TAIL_ELEMENTS

    def num_placeholders(self, group: Sequence[Any], max_micro_batches: int | None) -> int:  # noqa: ARG002
        """1 on a rank without data if there are buffers, which each rank takes from rank 0; else 0.

        Disarms the hooks of DDP in each update, on all ranks: also on those without a micro-batch.
        """
        self._disarm()
        self._first_buffers.begin()
        return 0 if group else int(self._first_buffers.cross)

    def take_part(self, loss_of: Callable[[Any], Tensor], backward: Callable[[Tensor], object]) -> None:  # noqa: ARG002
        """With a loss that depends on nothing: what there is to take part in, the context has done."""
        backward(torch.zeros((), requires_grad=True))

    def context(self, *, last: bool) -> AbstractContextManager[Any]:
        """DDP's `no_sync`, for each backward. Collective, where there are buffers.

        Raises:
            ValueError: a communication hook, of gradients or of buffers, was registered meanwhile.
        """
        if _has_hooks(self._ddp):
            register = "call register_comm_hook" if comm_hooks_of(self._ddp) else "register the hook of its buffers"
            raise ValueError(
                f"model must have its communication hook before it is given to create_trainer; {register} earlier, or "
                "pass reduction='ddp'"
            )
        self._disarm()
        return self._first_buffers.context(self._ddp.no_sync(), last=last)

    def _disarm(self) -> None:
        """Has the hooks of DDP wait for no backward, until its next forward outside of `context`.

        A forward with gradients has them reduce in the next backward on this rank, also in one under `no_sync`. The buckets are
        laid out once more in the second of such forwards, by a broadcast. So all ranks disarm alike.

        Raises:
            RuntimeError: torch's own, as in the next forward of DDP: it has the gradients of some parameters only and waits for
                those of others.
        """
        check_reducer_finished(self._ddp.reducer)
        disarm_reducer(self._ddp.reducer)


def _has_hooks(ddp: DistributedDataParallel) -> bool:
    return bool(comm_hooks_of(ddp)) or has_buffer_hook(ddp)


class LocalCrossing(Crossing):
    """Leaves gradients on their rank, for an outer optimizer that makes the replicas equal from time to time.

    The packed statistics cross in each update all the same, so that all ranks know the loss, the logs and when to stop.

    Args:
        model: without a wrapper; all ranks begin with the weights and buffers of rank 0. Collective.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        begin_alike(model)

    def finish(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor:  # noqa: ARG002
        """Sends the statistics. The norm is a placeholder: each rank has its own, which `LocalUpdate` takes and sends."""
        statistics.start(*outgoing)
        return 1.0


def buckets(tensors: Iterable[T], dtype_of: Callable[[T], torch.dtype] = lambda tensor: tensor.dtype) -> list[list[T]]:
    """Puts tensors together by dtype and device, in their order, and begins another bucket where one would exceed 25 MiB.

    Args:
        tensors: which.
        dtype_of: the dtype in which a tensor, or what belongs to it, crosses the ranks.
    """
    found: dict[tuple[torch.dtype, torch.device], list[list[T]]] = {}
    for tensor in tensors:
        same = found.setdefault((dtype_of(tensor), tensor.device), [[]])
        num_bytes = sum(one.numel() * dtype_of(one).itemsize for one in (*same[-1], tensor))
        if same[-1] and num_bytes > _BUCKET_BYTES:
            same.append([])
        same[-1].append(tensor)
    return [bucket for same in found.values() for bucket in same]


def mean_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Puts the mean over all ranks into each tensor, in place. Nothing in a single process.

    One blocking sum for each 25 MiB of a dtype and device; all are under way at once. The result has the same bits on
    all ranks. Needs memory for a copy of the tensors.

    Args:
        tensors: of the same shapes and dtypes on all ranks, in the same order.
    """
    world_size = collectives.world_size()
    if world_size == 1:
        return
    with torch.no_grad():
        flats = [(bucket, torch.cat([tensor.reshape(-1) for tensor in bucket])) for bucket in buckets(tensors)]
        collectives.sum_over_ranks(*(flat for _, flat in flats))
        for bucket, flat in flats:
            parts = torch.split(flat.div_(world_size), [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _flatten(parameters: tuple[nn.Parameter, ...]) -> Tensor:
    """The gradients end to end, each in the order of its indices, whatever its strides; zeros for those that are missing."""
    return torch.cat(
        [(torch.zeros_like(p, dtype=gradient_dtype(p)) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    )


def unflatten(parameters: tuple[nn.Parameter, ...], flat: Tensor, present: Iterator[bool]) -> None:
    """Gives each parameter its part of `flat` for a gradient, with the strides of the parameter, unless no rank has one."""
    parts = torch.split(flat, [p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        if next(present):
            contiguous = parameter.is_contiguous()  # asked here because a call for each parameter would cost more
            values = part.view_as(parameter) if contiguous else as_gradient_of(part, parameter)
            parameter.grad = values.to(gradient_dtype(parameter))
        else:
            parameter.grad = None
