"""A loader that gives each micro-batch in the memory of an earlier one is noticed before a group of them is trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ignite_train.model.memory_layout import as_bytes

__all__ = ["ReusedMemory"]


class ReusedMemory:
    """Looks at the first micro-batches of a pass, and refuses those of a loader that writes each over an earlier one.

    That is right in a loop that reads one micro-batch, computes, and reads the next. Here all micro-batches of an update are
    read before its first forward, which would find the last one in place of each. So the first one is copied, and compared with
    its copy where a later one has the same address. The same micro-batch may be given again, if it was not changed.

    Attributes:
        num_seen: how many micro-batches it has looked at.
    """

    def __init__(self) -> None:
        self.num_seen = 0
        self._first: dict[int, tuple[Any, Any]] = {}  # of the arrays in the first one: address, array, content

    def see(self, micro_batch: Any) -> None:
        """Looks at one that was read after those before.

        Raises:
            ValueError: it was written over the first one.
        """
        self.num_seen += 1
        arrays = _arrays(micro_batch)
        if self.num_seen == 1:
            self._first = {address: (array, _content(array)) for address, array in arrays.items()}
        elif any(_has_changed(*self._first[address]) for address in arrays if address in self._first):
            raise ValueError(
                "data must give each micro-batch in memory of its own, got one that was written over an earlier one: all "
                "micro-batches of an update are read before its first forward, which would find the last one in each; give a "
                "copy of each micro-batch, such as micro_batch.clone()"
            )


def _arrays(micro_batch: Any) -> dict[int, Any]:
    """The plain tensors and arrays in a micro-batch that are not empty, by their address."""
    found: dict[int, Any] = {}
    for leaf in pytree.tree_leaves(micro_batch):
        if type(leaf) is Tensor and _has_bytes(leaf):
            found[leaf.data_ptr()] = leaf
        elif type(leaf) is np.ndarray and leaf.size > 0:
            found[leaf.ctypes.data] = leaf
    return found


def _has_bytes(tensor: Tensor) -> bool:
    unusual = tensor.is_nested or tensor.is_meta or tensor.is_quantized
    return tensor.layout is torch.strided and not unusual and tensor.numel() > 0


def _content(array: Any) -> Any:
    """A copy of the bytes, in which NaN is equal to itself."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    return as_bytes(array.detach().resolve_conj().resolve_neg().contiguous()).clone()


def _has_changed(array: Any, before: Any) -> bool:
    now = _content(array)
    return now != before if isinstance(now, bytes) else not torch.equal(now, before)
