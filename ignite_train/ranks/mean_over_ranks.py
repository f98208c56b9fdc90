"""The mean of tensors over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ignite_train.ranks import collectives
from ignite_train.ranks.buckets import buckets

__all__ = ["mean_over_ranks"]

_WAITS_FOR_RANKS = True  # HangWatch looks for it in the file where a rank stands


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
