"""The mean of tensors over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ignite_train.ranks import collectives

__all__ = ["mean_over_ranks"]

_BUCKET_BYTES = 25 * 2**20  # as much as a gradient's bucket


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
        buckets = [(bucket, torch.cat([tensor.reshape(-1) for tensor in bucket])) for bucket in _buckets(tensors)]
        for work in [collectives.start_sum(flat) for _, flat in buckets]:
            if work is not None:
                work.wait()
        for bucket, flat in buckets:
            parts = torch.split(flat.div_(world_size), [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors, put together by dtype and device and cut where a bucket is full."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        same = kinds.setdefault((tensor.dtype, tensor.device), [[]])
        if same[-1] and sum(one.nbytes for one in same[-1]) + tensor.nbytes > _BUCKET_BYTES:
            same.append([])
        same[-1].append(tensor)
    return [bucket for same in kinds.values() for bucket in same]
