"""Parameters and buffers that several ranks hold begin with the values of the first of these ranks, and evaluate with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.model.composed_tensor import plain_parts
from ignite_train.model.in_full import in_full
from ignite_train.model.memory_layout import has_plain_memory, local_part, own_memory
from ignite_train.model.micro_batch_rollback import content_of
from ignite_train.ranks import collectives
from ignite_train.ranks.root_mesh import missing_dims, names_of, root_mesh
from ignite_train.ranks.unlike_ranks import described_model, refuse_unlike_ranks

__all__ = ["begin_alike", "buffers_of_first_rank", "common_buffers"]


def begin_alike(model: nn.Module) -> None:
    """Gives parameters and buffers to all ranks that hold the same part of them. Blocking, collective.

    A plain tensor comes from rank 0. A part of a DTensor comes from its first holder, over the dimensions along which its mesh
    has copies, and over each dimension that its mesh lacks. A buffer that some rank lacks, or has in another shape or dtype,
    such as a queue of its own, stays as it is on each rank; so does one without plain memory, such as a sparse one.

    Raises:
        ValueError: the model is not the same on all ranks, as where each has a stage of a pipeline.
    """
    refuse_unlike_ranks(described_model(model))
    for tensor in (*model.parameters(), *common_buffers(model)):
        if isinstance(tensor, DTensor):
            _send_part(tensor)
        else:
            for part in plain_parts(tensor):
                collectives.broadcast(part)


def common_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that all ranks have in the same shape and dtype, in the same order on all of them. Collective, blocking."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if has_plain_memory(buffer)}
    kinds = {name: (tuple(buffer.shape), str(buffer.dtype)) for name, buffer in buffers.items()}
    first, *others = collectives.gather_objects(kinds)
    return [buffers[name] for name, kind in first.items() if all(other.get(name) == kind for other in others)]


@contextmanager
def buffers_of_first_rank(model: nn.Module) -> Iterator[None]:
    """In this `with` every rank has the buffers of rank 0 (running statistics of BatchNorm, say), and afterwards its own.

    A buffer that was the same as on rank 0 keeps what is written into it meanwhile. DTensors are left alone, and so are buffers
    that `begin_alike` leaves to each rank, such as a cache that forward has grown by its own samples. Entering it is collective
    and blocking: a small exchange, a broadcast for each buffer, and elsewhere than on rank 0 a look at its values (sync) and
    memory for a copy of those that differ. Nothing in a single process.
    """
    buffers = common_buffers(model) if collectives.world_size() > 1 else []
    own: list[tuple[Tensor, Tensor]] = []

    def put_back() -> None:
        for memory, values in reversed(own):  # of two in the same memory, the first was copied before rank 0 wrote
            memory.copy_(values)

    try:
        for buffer in (one.detach() for one in buffers if not isinstance(one, DTensor)):
            if collectives.is_main_rank():
                collectives.broadcast(buffer)
                continue
            memory = own_memory(buffer)
            own.append((memory, memory.clone()))
            collectives.broadcast(buffer)
            if torch.equal(*map(content_of, own[-1])):  # by bytes: NaN is equal to itself, in all dtypes
                own.pop()
        yield
    finally:
        in_full(put_back)


def _send_part(tensor: DTensor) -> None:
    root, mesh, part = root_mesh(tensor), tensor.device_mesh, local_part(tensor.detach())
    names = names_of(root)
    groups = [root.get_group(names.index(name)) for name in missing_dims(tensor, root, names)]
    groups += [mesh.get_group(dimension) for dimension, one in enumerate(tensor.placements) if one.is_replicate()]
    for group in groups:
        collectives.broadcast(part, group)
