"""Tensors that are made of others, as quantised weights are of codes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["ComposedTensor", "is_composed", "plain_parts"]

_NOT_COMPOSED = {Tensor, nn.Parameter, DTensor}


@runtime_checkable
class ComposedTensor(Protocol):
    """A tensor that is made of others."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The names of the attributes that are tensors, and what else makes it up."""

    @classmethod
    def __tensor_unflatten__(cls, parts: Mapping[str, Tensor], context: Any, size: Any, stride: Any) -> Tensor:
        """The tensor of these parts."""


def is_composed(value: Any) -> bool:
    """Whether a value is a tensor that is made of others. A sharded one does not count: each rank has its part of it."""
    if type(value) in _NOT_COMPOSED:  # most are; to ask for a protocol takes longer than to copy a small tensor
        return False
    return isinstance(value, Tensor) and isinstance(value, ComposedTensor) and not isinstance(value, DTensor)


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors of which it is made, as quantised weights are of codes and scales; itself, if it is one."""
    if not is_composed(tensor):
        return [tensor]
    composed: Any = tensor
    return [part for name in composed.__tensor_flatten__()[0] for part in plain_parts(getattr(tensor, name))]
