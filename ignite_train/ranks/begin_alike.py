"""Ranks begin with the same values of what several of them hold: those of the first of these ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.model.composed_tensor import plain_parts
from ignite_train.model.memory_layout import has_plain_memory, local_part
from ignite_train.ranks import collectives
from ignite_train.ranks.root_mesh import missing_dims, names_of, root_mesh
from ignite_train.ranks.unlike_ranks import described_model, refuse_unlike_ranks

__all__ = ["begin_alike"]


def begin_alike(model: nn.Module) -> None:
    """Gives parameters and buffers to all ranks that hold the same part of them. Blocking, collective.

    A plain tensor comes from rank 0. A part of a DTensor comes from its first holder, over the dimensions along which its mesh
    has copies, and over each dimension that its mesh lacks. A buffer that some rank lacks, or has in another shape or dtype,
    such as a queue of its own, stays as it is on each rank; so does one without plain memory, such as a sparse one.

    Raises:
        ValueError: the model is not the same on all ranks, as where each has a stage of a pipeline.
    """
    refuse_unlike_ranks(described_model(model))
    for tensor in (*model.parameters(), *_common_buffers(model)):
        if isinstance(tensor, DTensor):
            _send_part(tensor)
        else:
            for part in plain_parts(tensor):
                collectives.broadcast(part)


def _common_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that all ranks have, in the same order on all of them. Collective."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if has_plain_memory(buffer)}
    kinds = {name: (tuple(buffer.shape), str(buffer.dtype)) for name, buffer in buffers.items()}
    first, *others = collectives.gather_objects(kinds)
    return [buffers[name] for name, kind in first.items() if all(other.get(name) == kind for other in others)]


def _send_part(tensor: DTensor) -> None:
    root, mesh, part = root_mesh(tensor), tensor.device_mesh, local_part(tensor.detach())
    names = names_of(root)
    groups = [root.get_group(names.index(name)) for name in missing_dims(tensor, root, names)]
    groups += [mesh.get_group(dimension) for dimension, one in enumerate(tensor.placements) if one.is_replicate()]
    for group in groups:
        collectives.broadcast(part, group)
