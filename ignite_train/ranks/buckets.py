"""Which tensors cross the ranks in one collective, and the mean of tensors over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ignite_train.ranks import collectives

__all__ = ["buckets", "mean_over_ranks"]

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands

_BUCKET_BYTES = 25 * 2**20  # DDP's default

T = TypeVar("T", bound=Tensor)


def buckets(tensors: Iterable[T], dtype_of: Callable[[T], torch.dtype] = lambda tensor: tensor.dtype) -> list[list[T]]:
    """Puts tensors together by dtype and device, in their order, and begins another bucket where one would exceed 25 MiB.

    Args:
        tensors: which.
        dtype_of: that in which a tensor, or what belongs to it, crosses the ranks.
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

    One blocking all-reduce for each 25 MiB of a dtype and device; all are under way at once. The result has the same bits on
    all ranks. Needs memory for a copy of the tensors.

    Args:
        tensors: of the same shapes and dtypes on all ranks, in the same order.
    """
    world_size = collectives.world_size()
    if world_size == 1:
        return
    with torch.no_grad():
        flats = [(bucket, torch.cat([tensor.reshape(-1) for tensor in bucket])) for bucket in buckets(tensors)]
        for work in [collectives.start_sum(flat) for _, flat in flats]:
            if work is not None:
                work.wait()
        for bucket, flat in flats:
            parts = torch.split(flat.div_(world_size), [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
