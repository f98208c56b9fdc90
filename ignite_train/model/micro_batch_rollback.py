"""Writes of forward into its micro-batch: noticed, and taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ignite_train.device.leaves import leaves
from ignite_train.internals.of_torch import version_of
from ignite_train.model.memory_layout import as_bytes, has_plain_memory

__all__ = ["MicroBatchRollback", "arrays_in", "content_of", "same_content", "writing_error", "written_into"]


class MicroBatchRollback:
    """Remembers the plain tensors and arrays of a micro-batch, and puts them back.

    A forward may write into them, as `x.sub_(mean)` does. Where it is run once more than it would be, it would otherwise find
    what it has written.

    Args:
        micro_batch: which one, in any containers.
    """

    def __init__(self, micro_batch: Any) -> None:
        self.arrays = arrays_in(micro_batch)
        self._copies = [array.clone() if isinstance(array, Tensor) else array.copy() for array in self.arrays]

    @torch.no_grad()
    def roll_back(self) -> None:
        """Puts them back."""
        for array, before in zip(self.arrays, self._copies, strict=True):
            if not same_content(content_of(array), content_of(before)):
                array[...] = before


def written_into(micro_batch: Any) -> Callable[[], bool]:
    """Asked later, says whether torch has written into a tensor of the micro-batch since; copies nothing."""
    versions = [(one, version_of(one)) for one in arrays_in(micro_batch) if isinstance(one, Tensor) and not one.is_inference()]
    return lambda: any(version_of(tensor) != version for tensor, version in versions)


def writing_error(reason: str) -> ValueError:
    """For a forward that has written into its micro-batch, which it may not for this reason."""
    return ValueError(
        f"{reason}, and forward has written into its tensors; have it write into copies, as in x = x - mean for x.sub_(mean)"
    )


def arrays_in(micro_batch: Any) -> list[Any]:
    """The plain tensors and arrays in a micro-batch that are not empty."""
    return [leaf for leaf in leaves(micro_batch) if _is_array(leaf)]


def _is_array(leaf: Any) -> bool:
    if type(leaf) is Tensor:
        return has_plain_memory(leaf) and leaf.numel() > 0
    return type(leaf) is np.ndarray and leaf.size > 0


def content_of(array: Any) -> Any:
    """The bytes of a tensor or an array, in which NaN is equal to itself; of a contiguous tensor they are not a copy."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    return as_bytes(array.detach().resolve_conj().resolve_neg().contiguous())


def same_content(one: Any, other: Any) -> bool:
    """Compares what `content_of` gave."""
    return bool(one == other if isinstance(one, bytes) else torch.equal(one, other))
