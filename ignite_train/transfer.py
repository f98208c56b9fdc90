"""Moving micro-batches to the device of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Transfer", "transfer_to"]

Transfer = Callable[[Any], Any]


@runtime_checkable
class _Movable(Protocol):
    def to(self, device: torch.device, *, non_blocking: bool) -> Any: ...


def transfer_to(device: torch.device) -> Transfer:
    """Returns a function that moves every tensor of a micro-batch to `device`.

    A micro-batch is any nesting of dicts, lists, tuples, named tuples and whatever else is registered with torch's pytree;
    leaves with a `to` method (packed sequences, graph batches) move themselves; all other leaves stay as they are. From
    pinned memory the copy does not block the host. For the CPU there is nothing to move and nothing is looked at.
    """
    if device.type == "cpu":
        return _stay

    def move_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device, non_blocking=True) if isinstance(leaf, _Movable) else leaf

    def move(micro_batch: Any) -> Any:
        return pytree.tree_map(move_leaf, micro_batch)

    return move


def _stay(micro_batch: Any) -> Any:
    return micro_batch
