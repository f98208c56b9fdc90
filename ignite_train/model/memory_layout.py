"""How the elements of a tensor lie in memory, for what pairs tensors by memory and not by index: fused kernels, collectives."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = [
    "as_bytes",
    "as_gradient_of",
    "bytes_at",
    "gradient_dtype",
    "has_plain_memory",
    "is_dense",
    "is_lost",
    "local_part",
    "own_memory",
    "pairs_with",
]

_CHUNKS, _CHUNK_BYTES = 8, 128  # of a large block of memory
_FEW_BYTES = 1024  # are read in full


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether its memory is one block of numbers, which can be copied and compared."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as one row of uint8, of shape (number of bytes,); not a copy.

    A contiguous tensor of one element, or of none, may have any stride. `reshape` keeps it, and torch views only a stride of 1
    as bytes.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def own_memory(tensor: Tensor) -> Tensor:
    """The part of a tensor that has memory of its own, as `mask` of `mask.expand(heads, -1, -1)`: torch writes to no more."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and stride == 0:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def local_part(tensor: Tensor) -> Tensor:
    """The tensor, or of a sharded one the shard of this rank, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, each of them once, in whatever order of the dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def pairs_with(tensor: Tensor, other: Tensor) -> bool:
    """Whether equal places in memory are equal indices, for two dense tensors of one shape."""
    if tensor.stride() == other.stride() or tensor.numel() == 0:
        return True
    strides = zip(tensor.stride(), other.stride(), tensor.shape, strict=True)
    return all(one == another or size == 1 for one, another, size in strides)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of the parameter's gradient, which may be wider than its own."""
    dtype: torch.dtype | None = parameter.grad_dtype
    return parameter.dtype if dtype is None else dtype


def as_gradient_of(values: Tensor, parameter: Tensor) -> Tensor:
    """`values`, in the order of the indices, with the shape and the strides that backward gives a gradient of `parameter`.

    Those are the strides of the parameter; or, where the parameter has gaps in memory, those of a contiguous tensor.
    """
    gradient = values.view_as(parameter)
    if parameter.is_contiguous() or not is_dense(parameter):
        return gradient
    return torch.empty_like(parameter, dtype=values.dtype, requires_grad=False).copy_(gradient)


def is_lost(tensor: Tensor) -> bool:
    """Whether what a graph writes into it is lost, as it is with torch 2.13: it takes such a tensor for a number of Python."""
    return tensor.dim() == 0 and tensor.dtype is torch.float64 and tensor.device.type == "cpu"


def bytes_at(address: int, num_bytes: int) -> bytes:
    """All bytes of a small block of the host's memory, and some from all over a large one."""
    if num_bytes <= _FEW_BYTES:
        return ctypes.string_at(address, num_bytes) if num_bytes else b""
    last = num_bytes - _CHUNK_BYTES
    return b"".join(ctypes.string_at(address + last * k // (_CHUNKS - 1), _CHUNK_BYTES) for k in range(_CHUNKS))
