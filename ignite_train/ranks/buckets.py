"""Which tensors cross the ranks in one collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["buckets"]

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
