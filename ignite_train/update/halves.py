"""Cutting a micro-batch in two along the samples."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from ignite_train.device.leaves import leaves, map_leaves
from ignite_train.device.to_device import moves_itself

__all__ = ["halves", "holds_samples", "is_of_samples", "num_samples", "uncut"]

_CONTENTS = (Tensor, np.ndarray, Number, Mapping, list, tuple, type(None))


@runtime_checkable
class _Joined(Protocol):
    """Graphs that were joined to one, such as a batch of PyTorch Geometric."""

    num_graphs: int

    def to_data_list(self) -> list[Any]: ...

    def from_data_list(self, data_list: list[Any]) -> Any: ...


def is_of_samples(micro_batch: Any) -> list[bool]:
    """Of each leaf of a whole micro-batch, whether its first dimension is that of the samples.

    These are the leaves that are as long as the micro-batch. It cannot be told from a part: a table may be as long as that.
    """
    size = num_samples(micro_batch)
    return [size is not None and _length(leaf) == size for leaf in _leaves(micro_batch)]


def halves(part: Any, of_samples: Sequence[bool]) -> list[Any]:
    """Both halves of a micro-batch, or of a part of one.

    Args:
        part: one that `num_samples` knows the length of.
        of_samples: what `is_of_samples` has found for the whole micro-batch.
    """
    size = num_samples(part)
    assert size is not None  # noqa: S101  # the caller has looked
    middle = (size + 1) // 2

    def cut(where: slice) -> Any:
        remaining = iter(of_samples)
        return map_leaves(lambda leaf: _cut(leaf, where) if next(remaining) else leaf, part, whole=_is_whole)

    return [cut(slice(0, middle)), cut(slice(middle, size))]


def num_samples(micro_batch: Any) -> int | None:
    """The length of its first tensor or batch; None without one, and with a part that cannot be cut."""
    if uncut(micro_batch) is not None:
        return None
    found = _leaves(micro_batch)
    return next((length for leaf in found if holds_samples(leaf) and (length := _length(leaf)) is not None), None)


def uncut(micro_batch: Any) -> Any:
    """The first part of it that knows alone what belongs together, and cannot be cut; None without one."""
    return next((leaf for leaf in _leaves(micro_batch) if moves_itself(leaf) and _length(leaf) is None), None)


def holds_samples(leaf: Any) -> bool:
    """Whether the length of a leaf is a number of samples: that of a tensor, or of a batch that moves itself."""
    return isinstance(leaf, Tensor) or moves_itself(leaf)


def _leaves(micro_batch: Any) -> list[Any]:
    return leaves(micro_batch, whole=_is_whole)


def _is_whole(part: Any) -> bool:
    """Whether it is cut as one: what moves itself, but for a mapping of tensors, and a list of strings or other objects."""
    if isinstance(part, list):
        return len(part) > 0 and not any(isinstance(entry, _CONTENTS) or moves_itself(entry) for entry in part)
    return moves_itself(part) and not isinstance(part, UserDict)


def _length(leaf: Any) -> int | None:
    """How many samples a leaf has, if it can be cut; None if not."""
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.shape[0] if leaf.ndim > 0 else None
    if isinstance(leaf, list):
        return len(leaf)
    if not moves_itself(leaf):
        return None
    if isinstance(leaf, _Joined):
        return leaf.num_graphs
    try:  # a class may raise anything where its values have no order
        length = len(leaf)
        fits = type(leaf[0:length]) is type(leaf) and len(leaf[0:length]) == length
    except Exception:
        return None
    return length if fits else None


def _cut(leaf: Any, where: slice) -> Any:
    return leaf.from_data_list(leaf.to_data_list()[where]) if isinstance(leaf, _Joined) else leaf[where]
