"""Models whose parameters are DTensors on a mesh: each gradient is summed once over the ranks whose samples differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.model.gradients import Gradients, may_trust_norm
from ignite_train.model.memory_layout import as_gradient_of, gradient_dtype, local_part
from ignite_train.ranks import collectives
from ignite_train.ranks.begin_alike import begin_alike
from ignite_train.ranks.crossing import Crossing
from ignite_train.ranks.data_ranks import DataRanks
from ignite_train.ranks.messages import Outgoing, Piggyback
from ignite_train.ranks.placeholders import Placeholders
from ignite_train.ranks.replicas import buckets
from ignite_train.ranks.root_mesh import copies, missing_dims, names_of, refuse_unordered_meshes
from ignite_train.ranks.same_micro_batches import SameMicroBatches
from ignite_train.ranks.statistics import Statistics

__all__ = ["MeshCrossing", "join_parts", "split_parts"]

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands


class MeshCrossing(Crossing):
    """Tensor, sequence, context and expert parallel, with data parallel over the other dimensions of the mesh.

    Over the dimensions that a DTensor's own mesh covers torch has summed its gradient in backward, or the placements say that
    this is left to do. Over the dimensions that it does not cover the parameter is replicated: of these the data dimensions are
    summed here, after the last backward, in buckets; over the others all ranks have the same gradient. The norm counts each
    part once, however many ranks hold it: each rank's share of it travels with the statistics.

    Forward may have collectives over any dimension, so a rank without data runs on what another rank runs at the same time.

    Args:
        model: without a wrapper. Parameters and buffers begin alike on all ranks that hold the same part of them. Collective.
        placeholders: what a rank without data runs on.
        data_ranks: over which ranks samples differ.
    """

    may_drop_micro_batches = False
    forward_is_local = False
    learns_outcome = True

    def __init__(self, model: nn.Module, placeholders: Placeholders, data_ranks: DataRanks) -> None:
        super().__init__(model)
        self.data_ranks = data_ranks
        self._placeholders = placeholders
        self._same_micro_batches = SameMicroBatches(data_ranks) if len(data_ranks.groups[0]) > 1 else None
        self._plan: list[tuple[tuple[str, ...], list[nn.Parameter]]] = []
        self._planned: list[tuple[nn.Parameter, torch.dtype]] = []
        if collectives.world_size() > 1:
            refuse_unordered_meshes(model)
            begin_alike(model)

    def num_placeholders(self, group: Sequence[Any], max_micro_batches: int | None) -> int:
        """As many as the rank with the most micro-batches has more: all run the same number of forwards.

        Collective where the choice of placeholders is, in every update if the loaders have no length, and where some rank has
        fewer than another.

        Args:
            group: this rank's micro-batches.
            max_micro_batches: how many the rank with the most of them has; None if that is unknown, or if some rank has fewer.
        """
        if self._same_micro_batches is not None:
            self._same_micro_batches.look(group)
        if max_micro_batches is None:
            lengths = [int(length) for length in collectives.everyones(len(group))]
            max_micro_batches = max(lengths)
            if min(lengths) < max_micro_batches:
                self._placeholders.borrow(group, lengths)
                return max_micro_batches - len(group)
        return max_micro_batches - len(group) if self._placeholders.choose(group) else 0

    def take_part(self, loss_of: Callable[[Any], Tensor], backward: Callable[[Tensor], object]) -> None:
        """Runs the forward of a micro-batch that does not count; its backward adds zeros. Collective, as any forward."""
        self._placeholders.run(loss_of, backward)

    def finish(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> None:
        """Sums what is left to sum, and starts the statistics, with this rank's share of the squared norm."""
        self.complete(gradients)
        piggybacks = [*outgoing.piggybacks, *self._riders(gradients)]
        statistics.start(outgoing.requests, piggybacks, norm_squared=gradients.shard_norm_squared(copies))

    def norm(self, gradients: Gradients) -> float:
        """The norm, from each rank's shards. Collective; all ranks see the same sum, and so take it again alike."""
        norm = math.sqrt(collectives.total([float(gradients.shard_norm_squared(copies))])[0])
        if may_trust_norm(norm):
            return norm
        return math.sqrt(collectives.total([gradients.scaled_shard_norm_squared(copies)])[0])

    def close(self, *, applied: bool) -> None:
        """Tells the placeholders."""
        self._placeholders.close(applied=applied)

    def _riders(self, gradients: Gradients) -> list[Piggyback]:  # noqa: ARG002  # `FSDPCrossing` adds one
        """The piggybacks of the mesh itself, beside those of handlers."""
        return [] if self._same_micro_batches is None else [self._same_micro_batches]

    def complete(self, gradients: Gradients) -> None:
        """Sums gradients over the dimensions of their own mesh, where that is left to do, and over those that it lacks."""
        stepped = gradients.parameters()
        trainable = [(p, gradient_dtype(p)) for p in stepped if p.requires_grad]
        if not _are_same(trainable, self._planned):
            self._make_plan([parameter for parameter, _ in trainable])
            self._planned = trainable
        if len(trainable) < len(stepped):
            gradients.drop_frozen()
        for parameter, _ in trainable:
            gradient = parameter.grad
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            if isinstance(gradient, DTensor) and gradient.placements != placements:  # sums that are left to do
                parameter.grad = gradient.redistribute(placements=placements)
        for dims, parameters in self._plan:
            self._sum(dims, parameters)

    def _make_plan(self, parameters: Sequence[nn.Parameter]) -> None:
        """Which parameters are summed here, over which dimensions."""
        mesh, plan = self.data_ranks.mesh, dict[tuple[str, ...], list[nn.Parameter]]()
        if mesh is not None:
            for parameter in parameters:
                if missing := missing_dims(parameter, mesh, self.data_ranks.dims):
                    plan.setdefault(missing, []).append(parameter)
        self._plan = [(dims, bucket) for dims, mine in plan.items() for bucket in buckets(mine, gradient_dtype)]

    def _sum(self, dims: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Sums the gradients of a bucket. A parameter for which no rank has one keeps none."""
        mesh = self.data_ranks.mesh
        assert mesh is not None  # noqa: S101  # there is something to sum
        flat = join_parts(parameters)
        for name in dims:
            dist.all_reduce(flat, group=mesh.get_group(names_of(mesh).index(name)))
        split_parts(parameters, flat)


def join_parts(parameters: Sequence[nn.Parameter]) -> Tensor:
    """This rank's parts of the gradients of a bucket end to end, and behind them which of these there are."""
    parts = [_local_gradient(parameter).reshape(-1) for parameter in parameters]
    return torch.cat([*parts, parts[0].new_tensor([parameter.grad is not None for parameter in parameters])])


def split_parts(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Makes the parts in `flat`, which has come of `join_parts`, the gradients; of one that there was nowhere none."""
    own = [local_part(parameter.detach()) for parameter in parameters]
    *sums, flags = torch.split(flat, [*map(Tensor.numel, own), len(own)])
    present = [parameter.grad is not None for parameter in parameters]
    exist = present if all(present) else (flags > 0).tolist()  # sync, only if one is missing on this rank
    for parameter, mine, part, exists in zip(parameters, own, sums, exist, strict=True):
        parameter.grad = _with_local(parameter, as_gradient_of(part, mine)) if exists else None


def _are_same(ours: Sequence[tuple[Any, Any]], others: Sequence[tuple[Any, Any]]) -> bool:
    return len(ours) == len(others) and all(a is b and x == y for (a, x), (b, y) in zip(ours, others, strict=True))


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient; zeros for one that is missing."""
    if parameter.grad is None:
        return torch.zeros_like(local_part(parameter.detach()), dtype=gradient_dtype(parameter))
    return local_part(parameter.grad)


def _with_local(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """A gradient of `parameter`, of which this is the part of this rank."""
    if not isinstance(parameter, DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    gradient: Tensor = DTensor.from_local(
        values, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return gradient
