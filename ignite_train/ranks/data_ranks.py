"""Which ranks are fed samples of their own, and which are fed the same ones, as those of a tensor-parallel group are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ignite_train.arguments import describe, did_you_mean
from ignite_train.ranks import collectives
from ignite_train.ranks.root_mesh import names_of, root_mesh

__all__ = ["DataRanks", "checked_data_dims", "data_ranks_of", "share_of"]


@dataclass(frozen=True)
class DataRanks:
    """The ranks of a training by the samples that they are fed.

    Attributes:
        groups: for each data rank the ranks that are fed its samples; without a mesh each rank is a data rank.
        mesh: the mesh, and None without one.
        dims: the names of its dimensions over which samples differ.
    """

    groups: tuple[tuple[int, ...], ...]
    mesh: DeviceMesh | None = None
    dims: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The data rank of this process."""
        own = collectives.rank()
        return next(number for number, group in enumerate(self.groups) if own in group)

    @property
    def counts(self) -> bool:
        """Whether samples, losses and logs of this rank are counted: of each group those of the first rank are."""
        return self.groups[self.rank][0] == collectives.rank()

    @classmethod
    def all_ranks(cls) -> DataRanks:
        """Each rank is fed samples of its own."""
        return cls(tuple((rank,) for rank in range(collectives.world_size())))


def checked_data_dims(data_dims: object) -> tuple[str, ...] | None:
    """The names, or None for none given.

    Raises:
        TypeError: they are not a sequence of strings.
    """
    if data_dims is None:
        return None
    if not isinstance(data_dims, (tuple, list)) or not all(isinstance(name, str) for name in data_dims):
        raise TypeError(f"data_dims must be a tuple of names of mesh dimensions, got {describe(data_dims)}; pass ('dp',), say")
    return tuple(data_dims)


def data_ranks_of(model: nn.Module, data_dims: Sequence[str] | None, *, all_differ: bool, option: str) -> DataRanks:
    """Finds the data ranks of a model.

    Args:
        model: some of its parameters are DTensors; or none, and then each rank is a data rank.
        data_dims: the names of the mesh dimensions over which samples differ; None where they can be found.
        all_differ: whether the model is sharded by `fully_shard` alone, over all ranks: samples differ over all of these.
        option: how `data_dims` is passed, for an error, with `{}` for its value.

    Raises:
        ValueError: `data_dims` is missing, or has a name that is not one of the mesh; or a mesh does not hold all ranks.
    """
    sharded = {name: parameter for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
    if collectives.world_size() == 1:
        return DataRanks.all_ranks()
    if not sharded:
        if data_dims is not None:
            raise ValueError(
                f"data_dims must be left out for a model without DTensors, got {data_dims!r}: its ranks are replicas, which "
                "have samples of their own"
            )
        return DataRanks.all_ranks()
    if data_dims is None and all_differ:
        return DataRanks.all_ranks()
    mesh = _common_root(sharded, data_dims or ())
    names = names_of(mesh)
    if data_dims is None:
        raise ValueError(
            f"data_dims must name the dimensions of the mesh over which samples differ, among {', '.join(map(repr, names))}, "
            f"got None; pass {option.format(f'({names[0]!r},)')}, say, and () if all ranks are fed the same"
        )
    for name in data_dims:
        if name not in names:
            among = ", ".join(map(repr, names))
            raise ValueError(
                f"data_dims must have names among {among}, got {name!r}{did_you_mean(name, names)}; if the model's mesh has "
                f"{name!r}, an earlier mesh of this process has a part with the same ranks and names, and torch takes that "
                "part: give the dimensions of the two meshes different names"
            )
    table, dims = _table(mesh, data_dims)
    return DataRanks(tuple(map(tuple, table)), mesh, dims)


def _table(mesh: DeviceMesh, data_dims: Sequence[str]) -> tuple[list[list[int]], tuple[str, ...]]:
    """A row of ranks for each data rank, and the data dimensions in the order of the mesh."""
    names = names_of(mesh)
    ours = [index for index, name in enumerate(names) if name in data_dims]
    others = [index for index, name in enumerate(names) if name not in data_dims]
    number = math.prod(mesh.size(index) for index in ours)
    rows: list[list[int]] = mesh.mesh.permute(*ours, *others).reshape(number, -1).tolist()
    return rows, tuple(names[index] for index in ours)


def share_of(mesh: DeviceMesh | None) -> tuple[int, int]:
    """This rank's place among those that have samples of their own, and how many they are.

    Args:
        mesh: the data dimensions of a mesh, such as `mesh["dp"]`; None: all ranks.
    """
    if mesh is None:
        return collectives.rank(), collectives.world_size()
    place = 0
    for coordinate, size in zip(mesh.get_coordinate() or [0] * mesh.ndim, mesh.shape, strict=True):
        place = place * size + coordinate
    return place, mesh.size()


def _common_root(sharded: Mapping[str, DTensor], data_dims: Sequence[str]) -> DeviceMesh:
    """The mesh of all parameters, or of which theirs are parts.

    torch takes meshes of the same ranks for one, so that a parameter may know the mesh of another model under other names. Of
    such meshes it is the one with the names that are asked for.
    """
    roots = {name: root_mesh(parameter) for name, parameter in sharded.items()}
    (first, mesh), *_ = roots.items()
    for name, other in roots.items():
        if not torch.equal(other.mesh, mesh.mesh):
            raise ValueError(
                f"model must have all parameters on one mesh, or on parts of it, got {first!r} on {names_of(mesh)} and "
                f"{name!r} on {names_of(other)}; make one mesh by init_device_mesh and take its parts by mesh['name']"
            )
    mesh = next((other for other in roots.values() if {*data_dims} <= {*names_of(other)}), mesh)
    if mesh.size() != collectives.world_size():
        raise ValueError(
            f"model must be sharded or replicated over all {collectives.world_size()} ranks, got a mesh of {mesh.size()}; give "
            "fully_shard a mesh of all ranks, of two dimensions if each shard must be on several of them"
        )
    return mesh
