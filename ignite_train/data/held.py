"""Micro-batches that wait while more is read: they must still be what was read when they are computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ignite_train.internals.of_torch import version_of
from ignite_train.model.memory_layout import as_bytes
from ignite_train.model.memory_layout import bytes_at as _bytes_at

__all__ = ["Held", "is_looked_at"]

_MOST_PARTS = 64  # of a micro-batch are looked at
_FEW_GROUPS = 16
_CHUNKS = 8  # numbers of what does not lie in one piece
# The objects of a micro-batch, kept so that no other gets the identity of one; and of each address, version and contents.
_Parts = tuple[list[Any], list[tuple[int, int, bytes]]]
_NO_MEMORY = 0, 0, b""
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
        self._noted: list[tuple[Any, _Parts]] = []
        for micro_batch in micro_batches:
            self.add(micro_batch)

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


def is_looked_at(number: int) -> bool:
    """Whether the micro-batches of a group are looked at.

    A loader that gives an object or its memory again does so from the beginning, so the first 16 are, and then each 16th.

    Args:
        number: of the group, counted from 0 in its pass and again where one is larger than all before.
    """
    return number < _FEW_GROUPS or number % _FEW_GROUPS == 0


def _parts(micro_batch: Any) -> _Parts:
    """The objects that a micro-batch is made of: containers, what they hold, and the attributes of other objects.

    It is asked twice for each micro-batch, so usual containers cost no call of their own.
    """
    found, facts, seen, left = list[Any](), list[tuple[int, int, bytes]](), set[int](), [micro_batch]
    while left and len(found) < _MOST_PARTS:
        value = left.pop()
        found.append(value)
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            facts.append(_of_tensor(value))
        elif isinstance(value, np.ndarray):
            address = value.ctypes.data
            facts.append((address, 0, _of_array(value)))
        else:
            facts.append(_NO_MEMORY)
            if value is None or isinstance(value, _OPAQUE) or id(value) in seen:
                continue
            seen.add(id(value))
            left += value if kind is tuple and len(value) < _MOST_PARTS else _within(value)
    return found, facts


def _of_tensor(tensor: Tensor) -> tuple[int, int, bytes]:
    version = 0 if tensor.is_inference() else version_of(tensor)
    is_usual = not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not is_usual:
        return 0, version, b""
    address = tensor.data_ptr()
    if not tensor.is_cpu:
        return address, version, b""
    if tensor.is_contiguous():
        return address, version, _bytes_at(address, tensor.nbytes)
    places = torch.linspace(0, tensor.numel() - 1, min(tensor.numel(), _CHUNKS), dtype=torch.float64).long()
    return address, version, as_bytes(tensor.detach().take(places).resolve_conj().resolve_neg()).numpy().tobytes()


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


def _same(ones: _Parts, others: _Parts) -> bool:
    """Whether the facts are the same, and the objects too; of numbers, strings and the like equal ones are."""
    if ones[1] != others[1] or len(ones[0]) != len(others[0]):
        return False
    if all(map(is_, ones[0], others[0])):
        return True
    pairs = zip(ones[0], others[0], strict=True)
    return all(one is other or (isinstance(one, _OPAQUE) and one == other) for one, other in pairs)


def _marks(parts: _Parts) -> set[tuple[str, int]]:
    """The keys that another micro-batch has too if it shares an object, or its memory, with this one."""
    own = [
        (part, address) for part, (address, _, _) in zip(*parts, strict=True) if not isinstance(part, (*_OPAQUE, type(None)))
    ]
    return {("object", id(part)) for part, _ in own} | {("address", address) for _, address in own if address}


def _of_array(array: np.ndarray[Any, Any]) -> bytes:
    if array.flags.c_contiguous:
        return _bytes_at(array.ctypes.data, array.nbytes)
    places = np.linspace(0, array.size - 1, min(array.size, _CHUNKS)).astype(np.int64)
    return bytes(array.flat[places].tobytes())


def _changed_error() -> ValueError:
    return ValueError(
        "data must give each micro-batch in a container and memory of its own, got one that changed when a later one was "
        "read: micro-batches are read ahead, so that forward would find the later one in its place; yield a new dict, list or "
        "object each time, and a copy of what is written over, such as tensor.clone()"
    )
