"""Where a tensor lies on a mesh of several dimensions: which ranks hold the same part of it.

A parameter may be a DTensor on a part of the mesh only, such as its tensor-parallel dimension. Each dimension that its own mesh
does not cover is one over which it is replicated, although its placements do not say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ignite_train.internals.of_distributed import root_mesh_of
from ignite_train.ranks import collectives

__all__ = ["copies", "is_first_holder", "missing_dims", "names_of", "part_and_copy", "refuse_unordered_meshes", "root_mesh"]


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


def refuse_unordered_meshes(model: nn.Module) -> None:
    """Sees to it that the parts of each DTensor lie in the order in which torch gathers them. Collective.

    The place of a part in a checkpoint is that of the rank in the mesh, but torch sends parts in increasing order of the ranks.

    Raises:
        ValueError: on some rank these differ; on all ranks alike.
    """
    named = (*model.named_parameters(), *model.named_buffers())
    here = next((name for name, tensor in named if _is_unordered(tensor)), None)
    unordered = next(filter(None, collectives.gather_objects(here)), None)
    if unordered is not None:
        raise ValueError(
            f"model must be split over a mesh whose ranks increase along each dimension, got {unordered!r} on one whose ranks "
            "do not, where a checkpoint would have its parts in another order; make the mesh by init_device_mesh, or sort the "
            "ranks of each row and column"
        )


def _is_unordered(tensor: Tensor) -> bool:
    """Whether this rank's place in the mesh of a tensor is another than among the ranks, along a dimension that splits it."""
    if not isinstance(tensor, DTensor):
        return False
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
    places = zip(tensor.placements, coordinate, mesh.get_all_groups(), strict=False)  # no place outside of the mesh
    return any(dist.get_rank(group) != place for placement, place, group in places if not placement.is_replicate())


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
