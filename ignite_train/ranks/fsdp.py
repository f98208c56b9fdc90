"""Models sharded by `fully_shard` (FSDP2): gradients are reduced to shards in the last backward only, or in each."""

from __future__ import annotations

import math
import zlib
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.errors import UnlikeParametersError
from ignite_train.internals.of_distributed import forget_iteration, grouped_parameters, parameter_groups
from ignite_train.internals.of_torch import version_of
from ignite_train.model.gradients import Gradients
from ignite_train.ranks import collectives
from ignite_train.ranks.data_ranks import DataRanks
from ignite_train.ranks.digest_words import differ, differ_on_device, digest_words, with_squares
from ignite_train.ranks.mesh import MeshCrossing
from ignite_train.ranks.messages import Outgoing, Piggyback
from ignite_train.ranks.placeholders import Placeholders
from ignite_train.ranks.root_mesh import names_of
from ignite_train.ranks.statistics import Statistics

__all__ = ["FSDPCrossing", "SameParameters", "check_sharding", "spans_all_ranks"]


class FSDPCrossing(MeshCrossing):
    """FSDP2: gradients stay whole and local until the last backward scatters their mean over the ranks.

    That keeps a whole gradient in memory for the price of one reduction an update. With `in_each` every backward scatters, and
    what a rank keeps between micro-batches is its shards. The norm needs the shards of all ranks: each rank's share of it
    travels with the statistics, whose reduction therefore starts after the last backward.

    Every forward and backward gathers parameters from all ranks, so a rank without data has to run them too: on what another
    rank runs at the same time, so that both use the same modules.

    What an update that was broken off has left inside of FSDP2 is dropped when the next one begins, and not at once: other
    ranks may be in a collective that will not be joined.

    Args:
        root: the module that `fully_shard` was applied to last.
        placeholders: what a rank without data runs on.
        data_ranks: over which ranks samples differ.
        in_each: whether each backward reduces.
    """

    def __init__(self, root: nn.Module, placeholders: Placeholders, data_ranks: DataRanks, *, in_each: bool) -> None:
        super().__init__(root, placeholders, data_ranks)
        self.averaged_over = max(_num_ranks(group.mesh_info) for group in parameter_groups(root))
        self._root: Any = root
        self._in_each, self._used = in_each, list[set[int]]()
        self._same_parameters = SameParameters()
        self._has_begun = False  # an update, which has not ended

    def num_placeholders(self, group: Sequence[Any], max_micro_batches: int | None) -> int:
        """See `MeshCrossing`. Has FSDP2 forget an update that was broken off first."""
        if self._has_begun:
            forget_iteration(self._root)
        self._has_begun, self._used = True, []
        return super().num_placeholders(group, max_micro_batches)

    def context(self, *, last: bool) -> AbstractContextManager[Any]:
        """Backward leaves whole gradients on this rank, unless it is the last or each one reduces."""
        if self._in_each:
            return self._noting()
        return nullcontext() if last else self._unsynchronised()

    def start(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients, loss: Tensor) -> None:  # noqa: ARG002
        """Sends nothing yet: the last backward begins, which frees each whole gradient once it is reduced."""
        gradients.let_go()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Notes which parameters this backward has reduced a gradient of."""
        parameters = list(self._root.parameters())
        before = [*map(_gradient_mark, parameters)]
        yield
        self._used.append({id(one) for one, was in zip(parameters, before, strict=True) if _gradient_mark(one) != was})

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        try:
            self._root.set_requires_gradient_sync(False)
            yield
        finally:
            try:
                self._root.set_requires_gradient_sync(True)
            except BaseException:  # by Ctrl-C: the modules that are left would never reduce
                self._root.set_requires_gradient_sync(True)
                raise

    def close(self, *, applied: bool) -> None:
        """Tells the placeholders."""
        self._has_begun = False
        super().close(applied=applied)

    def compare_parameters(self, gradients: Gradients) -> None:
        """Does what else travels with the statistics: compares of which parameters the ranks have gradients. Collective.

        Raises:
            UnlikeParametersError: some ranks have gradients of other parameters than the rest.
        """
        same = self._same_parameters
        same.look(gradients, self._used)
        same.on_reduced(collectives.total(same.payload()))

    def _riders(self, gradients: Gradients) -> list[Piggyback]:
        self._same_parameters.look(gradients, self._used)
        return [*super()._riders(gradients), self._same_parameters]


class SameParameters(Piggyback):
    """Compares over the ranks of which parameters each reduction had a gradient, before the step.

    FSDP2 reduces those gradients of a group of parameters that there are on each rank, end to end. Where a rank has used other
    parameters than the rest, of the same shapes, it adds up gradients of different parameters without an error.
    """

    payload_size = 4

    def __init__(self) -> None:
        self._present: list[bool] = []  # of each reduction, one after the other
        self._words = [0.0] * self.payload_size
        self._gradients: Gradients | None = None

    def look(self, gradients: Gradients, used: Sequence[Container[int]] = ()) -> None:
        """Looks which parameters have one, after the last backward.

        Args:
            gradients: of the trainer's optimizers.
            used: for each reduction the ids of the parameters that it was about; empty if there was one, in the last backward.
        """
        self._gradients = gradients
        parameters = gradients.parameters()
        present = [id(one) in ids for ids in used for one in parameters] or [one.grad is not None for one in parameters]
        if present != self._present:
            self._present, self._words = present, with_squares(digest_words(zlib.crc32(bytes(present)), 2))

    def payload(self) -> Sequence[float]:
        """A checksum of this rank's; see `ignite_train.ranks.digest_words`."""
        return self._words

    def vetoes(self, sums: Tensor) -> Tensor:
        """See `Piggyback`: whether the ranks differ."""
        return differ_on_device(sums, collectives.world_size())

    def on_reduced(self, sums: list[float]) -> None:
        """Compares.

        Raises:
            UnlikeParametersError: some ranks have gradients of other parameters than the rest.
        """
        if not differ(sums, collectives.world_size()):
            return
        of_ranks = collectives.gather_objects(self._present)
        parameters = [] if self._gradients is None else self._gradients.parameters()
        for parameter, on_rank in zip(cycle(parameters), zip(*of_ranks, strict=True), strict=False):
            if len({*on_rank}) > 1 and self._gradients is not None:
                have = tuple(rank for rank, has_one in enumerate(on_rank) if has_one)
                raise UnlikeParametersError(self._gradients.name(parameter), have)


def check_sharding(root: nn.Module, data_ranks: DataRanks) -> None:
    """Sees to it that FSDP2 reduces all gradients, and divides them by one number: the most ranks that it sums some over.

    Where it sums the gradients of some modules over fewer ranks, such as experts, it is told that number.

    Args:
        root: the module that `fully_shard` was applied to last.
        data_ranks: over which ranks samples differ.

    Raises:
        ValueError: a setting of torch's is in the way of that.
    """
    if collectives.world_size() > 1:
        _refuse_ungrouped(root)
    groups = parameter_groups(root)
    sizes = [_num_ranks(group.mesh_info) for group in groups]
    for group in groups:
        _check_data_dims(group.mesh_info, data_ranks)
        if not (group.reduce_grads and group.all_reduce_grads):
            name = "set_requires_all_reduce" if group.reduce_grads else "set_requires_gradient_sync"
            raise ValueError(
                f"model must leave it to the trainer when gradients are reduced, got {name}(False); leave that call out: they "
                "are reduced in the last backward, or in each with options=UpdateOptions(reduce_each_micro_batch=True)"
            )
        if not group.reshard_after_backward:
            raise ValueError(
                "model must be sharded again after each backward, or the next forward would run on the weights before the "
                "step, got set_reshard_after_backward(False); leave that call out"
            )
        factor = group.gradient_divide_factor
        if factor is not None and factor != max(sizes):
            raise ValueError(
                f"model must have its gradients averaged over {max(sizes)} ranks by fully_shard, got "
                f"set_gradient_divide_factor({factor:g}); leave that call out: the trainer makes the mean over all samples"
            )
        if _num_ranks(group.mesh_info) != max(sizes):
            group.gradient_divide_factor = float(max(sizes))


def _refuse_ungrouped(root: nn.Module) -> None:
    """Refuses what `fully_shard` was told to ignore: its gradient would not be divided by the ranks, as the others are."""
    grouped = {*map(id, grouped_parameters(root))}
    for name, parameter in root.named_parameters():
        if parameter.requires_grad and id(parameter) not in grouped:
            raise ValueError(
                f"model must have all trainable parameters sharded by fully_shard, got {name!r} ignored, whose gradient would "
                "count several times; leave it out of ignored_params, and first apply fully_shard to its module over the "
                "dimensions that its own mesh lacks, as in fully_shard(model.experts, mesh=mesh['dp'])"
            )


def _check_data_dims(mesh_info: Any, data_ranks: DataRanks) -> None:
    """Refuses to average gradients over ranks that are fed the same samples: each would count several times."""
    place = {rank: number for number, group in enumerate(data_ranks.groups) for rank in group}
    for dimension in _averaged_dimensions(mesh_info):
        ranks = dist.get_process_group_ranks(mesh_info.mesh.get_group(dimension))
        if len({place[rank] for rank in ranks}) < len(ranks):
            raise ValueError(_lacking(ranks, data_ranks))


def _lacking(ranks: Sequence[int], data_ranks: DataRanks) -> str:
    mesh, dims = data_ranks.mesh, data_ranks.dims
    assert mesh is not None  # noqa: S101  # without one all samples differ
    among = [{*ranks}.intersection(dist.get_process_group_ranks(group)) for group in mesh.get_all_groups()]
    lacking = [name for name, one in zip(names_of(mesh), among, strict=True) if len(one) > 1 and name not in dims]
    instead = f"call fully_shard with mesh=mesh[{', '.join(map(repr, dims))}]" if dims else "leave fully_shard out"
    return (
        f"data_dims must name each dimension over which fully_shard averages, got {dims!r} without "
        f"{' and '.join(map(repr, lacking))}; add it if samples differ over it, or parts of them, whose number each rank then "
        f"returns, or else {instead}"
    )


def _gradient_mark(parameter: nn.Parameter) -> tuple[int, int]:
    """Another one after a backward that has reduced a gradient of it."""
    gradient = parameter.grad
    if gradient is None:
        return 0, 0
    return id(gradient), version_of(gradient.to_local() if isinstance(gradient, DTensor) else gradient)


def spans_all_ranks(root: nn.Module) -> bool:
    """Whether `fully_shard` alone has made DTensors of all parameters, over all ranks: samples differ over all of them."""
    meshes = [p.device_mesh.size() for p in root.parameters() if isinstance(p, DTensor)]
    groups = [_num_ranks(group.mesh_info) for group in parameter_groups(root)]
    return bool(groups) and {*meshes, *groups} == {collectives.world_size()}


def _num_ranks(mesh_info: Any) -> int:
    """Over how many ranks a gradient is averaged."""
    return math.prod(mesh_info.mesh.size(dimension) for dimension in _averaged_dimensions(mesh_info))


def _averaged_dimensions(mesh_info: Any) -> list[int]:
    return [one for one in (mesh_info.shard_mesh_dim, mesh_info.replicate_mesh_dim) if one is not None]
