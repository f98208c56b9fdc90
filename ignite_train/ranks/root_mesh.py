"""Where a tensor lies on a mesh of several dimensions: which ranks hold the same part of it.

A parameter may be a DTensor on a part of the mesh only, such as its tensor-parallel dimension. Each dimension that its own mesh
does not cover is one over which it is replicated, although its placements do not say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ignite_train.internals.of_distributed import root_mesh_of
from ignite_train.ranks import collectives

__all__ = ["copies", "is_first_holder", "missing_dims", "names_of", "part_and_copy", "root_mesh"]


def root_mesh(tensor: DTensor) -> DeviceMesh:
    """The mesh from which the mesh of a tensor was sliced; that mesh itself, if it is a whole one."""
    return root_mesh_of(tensor.device_mesh)


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of its dimensions; their numbers, where it was made without names."""
    return mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))


def missing_dims(tensor: Tensor, root: DeviceMesh, names: Iterable[str]) -> tuple[str, ...]:
    """The dimensions among `names` of `root` that the mesh of a tensor does not cover; all of them for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(names)
    own = {*tensor.device_mesh.mesh.flatten().tolist()}
    known = names_of(root)
    return tuple(name for name in names if not own.issuperset(dist.get_process_group_ranks(root.get_group(known.index(name)))))


def copies(tensor: Tensor) -> int:
    """How many ranks hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return collectives.world_size()
    placements = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    parts = math.prod(size for placement, size in placements if not placement.is_replicate())
    return max(1, collectives.world_size() // parts)


def part_and_copy(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which part of a tensor this rank holds, and which of the copies of that part: 0 everywhere on the first holder."""
    root, mesh = root_mesh(tensor), tensor.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    places = [*zip(tensor.placements, coordinate, strict=True)]
    part = tuple(place for placement, place in places if not placement.is_replicate())
    copy = [place for placement, place in places if placement.is_replicate()]
    if root is not mesh:
        everywhere, known = root.get_coordinate() or [0] * root.ndim, names_of(root)
        copy += [everywhere[known.index(name)] for name in missing_dims(tensor, root, known)]
    return part, tuple(copy)


def is_first_holder(tensor: DTensor) -> bool:
    """Whether this rank is the first holder of its part, so that exactly one rank writes it."""
    return tensor.device_mesh.get_coordinate() is not None and not any(part_and_copy(tensor)[1])
