"""Micro-batches that wait while more is read: they must still be what was read when they are computed."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["Held"]

_MOST_PARTS = 64  # of a micro-batch are looked at
_CHUNKS, _CHUNK_BYTES = 8, 128  # of the contents of an array
_FEW_BYTES = 1024  # are compared in full
_Part = tuple[Any, int, int, bytes]  # an object, which is kept so that no other gets its identity; address, version, contents
_OPAQUE = (str, bytes, int, float, complex, type, FunctionType, ModuleType, nn.Module)


class Held:
    """Micro-batches that were read and wait for their turn while others are read.

    In a loop that reads one micro-batch, computes, and reads the next, a loader may give each in the same dict, list, object or
    memory. Here several are read before the first is computed, which would then be computed with the contents of the last one.

    The parts of a micro-batch are noted when it is read: which objects it holds, the address and the version of each tensor,
    and a sample of the contents of what lies in memory of this process, since NumPy counts no versions. It takes microseconds.

    Args:
        micro_batches: those that are held already.
    """

    def __init__(self, micro_batches: Iterable[Any] = ()) -> None:
        self._noted = [(micro_batch, _parts(micro_batch)) for micro_batch in micro_batches]

    def add(self, micro_batch: Any) -> None:
        """Notes one that was read."""
        self._noted.append((micro_batch, _parts(micro_batch)))

    def check(self) -> None:
        """Compares all of them with what was noted. Call it when no more is read before they are computed.

        Raises:
            ValueError: one of them has changed.
        """
        for micro_batch, parts in self._noted:
            if not _same(_parts(micro_batch), parts):
                raise _changed_error()

    def check_against(self, micro_batch: Any) -> None:
        """Compares those that have a part in common with one that was read later. The others may have been computed by now.

        Raises:
            ValueError: one of them has changed.
        """
        there = _marks(_parts(micro_batch))
        for earlier, parts in self._noted:
            if there & _marks(parts) and not _same(_parts(earlier), parts):
                raise _changed_error()


def _parts(micro_batch: Any) -> list[_Part]:
    """The objects that a micro-batch is made of: containers, what they hold, and the attributes of other objects."""
    found, seen, left = list[_Part](), set[int](), [micro_batch]
    while left and len(found) < _MOST_PARTS:
        value = left.pop()
        if isinstance(value, Tensor):
            found.append(_of_tensor(value))
        elif isinstance(value, np.ndarray):
            strides = None if value.flags.c_contiguous else list(value.strides)
            address = value.ctypes.data
            found.append((value, address, 0, _sample(address, value.shape, value.itemsize, strides) if value.size else b""))
        else:
            found.append((value, 0, 0, b""))
            if value is None or isinstance(value, _OPAQUE) or id(value) in seen:
                continue
            seen.add(id(value))
            left += _within(value)
    return found


def _of_tensor(tensor: Tensor) -> _Part:
    version = 0 if tensor.is_inference() else tensor._version
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
        return tensor, 0, version, b""
    address = tensor.data_ptr()
    if not (tensor.is_cpu and tensor.numel()):
        return tensor, address, version, b""
    size = tensor.element_size()
    strides = None if tensor.is_contiguous() else [size * stride for stride in tensor.stride()]
    return tensor, address, version, _sample(address, tensor.shape, size, strides)


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value[:_MOST_PARTS]
    try:
        variables: Mapping[str, Any] = vars(value)
    except TypeError:  # it has none
        return ()
    return variables.values()


def _same(ones: list[_Part], others: list[_Part]) -> bool:
    return len(ones) == len(others) and all(
        one[1:] == other[1:] and (one[0] is other[0] or (isinstance(one[0], _OPAQUE) and one[0] == other[0]))
        for one, other in zip(ones, others, strict=True)
    )


def _marks(parts: list[_Part]) -> set[tuple[str, int]]:
    """Keys of the objects and memory in a micro-batch: two micro-batches with a common key share something."""
    own = [part for part in parts if part[0] is not None and not isinstance(part[0], _OPAQUE)]
    return {("object", id(part[0])) for part in own} | {("address", part[1]) for part in own if part[1]}


def _sample(address: int, shape: Sequence[int], size: int, strides: Sequence[int] | None) -> bytes:
    """Bytes from all over an array.

    Args:
        address: of the first element.
        shape: of the array.
        size: of an element, in bytes.
        strides: in bytes; None if it is contiguous.
    """
    num_elements = math.prod(shape)
    if strides is None:
        num_bytes = num_elements * size
        if num_bytes <= _FEW_BYTES:
            return ctypes.string_at(address, num_bytes)
        last = num_bytes - _CHUNK_BYTES
        return b"".join(ctypes.string_at(address + last * k // (_CHUNKS - 1), _CHUNK_BYTES) for k in range(_CHUNKS))
    elements = []
    for k in range(min(num_elements, _CHUNKS)):
        index, offset = (num_elements - 1) * k // max(1, min(num_elements, _CHUNKS) - 1), 0
        for length, stride in zip(shape[::-1], strides[::-1], strict=True):
            index, place = divmod(index, length)
            offset += place * stride
        elements.append(ctypes.string_at(address + offset, size))
    return b"".join(elements)


def _changed_error() -> ValueError:
    return ValueError(
        "data must give each micro-batch in a container and memory of its own, got one that changed when a later one was "
        "read: micro-batches are read ahead, so that forward would find the later one in its place; yield a new dict, list or "
        "object each time, and a copy of what is written over, such as tensor.clone()"
    )
