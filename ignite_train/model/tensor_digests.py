"""Digests of tensors, by which ranks find out whether they hold the same bits."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ignite_train.model.composed_tensor import plain_parts
from ignite_train.model.memory_layout import as_bytes

__all__ = ["content_digest", "tensor_digests"]

_COLUMNS = 257  # prime, so that what repeats in a tensor does not fall into one column


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Digests of 64 bits of the name and content of each tensor. One transfer to the host from each device that holds some."""
    digests: dict[str, int] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        parts = {
            name: [one for part in plain_parts(tensor.detach()) for one in _column_sums(part)]
            for name, tensor in tensors.items()
            if tensor.device == device
        }
        numbers = torch.cat([part for several in parts.values() for part in several]).cpu()  # sync
        content, start = memoryview(ctypes.string_at(numbers.data_ptr(), numbers.nbytes)), 0
        for name, several in parts.items():
            end = start + sum(part.nbytes for part in several)
            tensor = tensors[name]
            digests[name] = content_digest(f"{name} {tensor.dtype} {tuple(tensor.shape)}", content[start:end])
            start = end
    return digests


def _column_sums(tensor: Tensor) -> list[Tensor]:
    """A few int64 numbers, computed in one pass, of which at least one changes when a single bit of the tensor flips.

    The bytes are arranged in rows of int64 words, and the columns are summed modulo 2^64. A flipped sign of a float64 adds
    2^63 to a column, so that two of them in one column cancel: hence short rows, and an odd number of them, so that flipping
    all signs does not cancel. The rest, less than two rows and less than one word, is not summed.
    """
    tensor = (tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor).contiguous()
    data = as_bytes(tensor)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = len(data) // 8 * 8
    words, rest = data[:whole].view(torch.int64), data[whole:].long()
    rows = len(words) // _COLUMNS
    rows -= rows % 2 == 0
    if rows < 3:
        return [words, rest]
    cut = rows * _COLUMNS
    return [words[:cut].view(rows, _COLUMNS).sum(0), words[cut:], rest]


def content_digest(name: str, content: bytes | memoryview) -> int:
    """A hash of 64 bits of a name and its content."""
    hasher = hashlib.blake2b(f"{name}\0".encode(), digest_size=8)
    hasher.update(content)
    return int.from_bytes(hasher.digest())
