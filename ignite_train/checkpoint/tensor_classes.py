"""Tensors that are made of plain ones, as torchao's quantised weights and states are: torch's protocol to take them apart.

A checkpoint holds their plain parts and the name of their class. The class itself comes from the objects of the run: a name
in a file is only compared, and nothing is imported or called that the run does not have already.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ignite_train.model.optimizers import each_optimizer

__all__ = ["ComposedTensor", "class_name", "copied", "is_composed", "tensor_classes"]


@runtime_checkable
class ComposedTensor(Protocol):
    """A tensor that is made of others."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The names of the attributes that are tensors, and what else makes it up."""

    @classmethod
    def __tensor_unflatten__(cls, parts: Mapping[str, Tensor], context: Any, size: Any, stride: Any) -> Tensor:
        """The tensor of these parts."""


def is_composed(value: Any) -> bool:
    """Whether a value is such a tensor. A sharded one does not count: each rank has its part of it."""
    return isinstance(value, Tensor) and isinstance(value, ComposedTensor) and not isinstance(value, DTensor)


def copied(state: Any) -> Any:
    """A deep copy. Of such tensors their parts are copied, since not every class of them can be cloned."""
    composed = [leaf for leaf in pytree.tree_leaves(state) if is_composed(leaf)]
    return copy.deepcopy(state, {id(leaf): _made_of_copies(leaf) for leaf in composed})


def _made_of_copies(composed: Any) -> Tensor:
    names, context = composed.__tensor_flatten__()
    parts = {name: copied(getattr(composed, name)) for name in names}
    made: Tensor = type(composed).__tensor_unflatten__(parts, context, composed.shape, composed.stride())
    return made


def class_name(kind: type) -> str:
    """The name by which a class is compared."""
    return f"{kind.__module__}.{kind.__qualname__}"


def tensor_classes(objects: Mapping[str, Any]) -> dict[str, type[ComposedTensor]]:
    """The classes of such tensors that a checkpoint may name: those in the states of these objects, by name.

    A state that does not exist before the first step may have those, too, that the package of its optimizer has defined.
    """
    found: dict[str, type[ComposedTensor]] = {}
    packages: set[str] = set()
    for entry in objects.values():
        found |= {class_name(kind): kind for kind in _classes_in(entry.state_dict())}
        if isinstance(entry, Optimizer):
            packages |= {_package(type(one)) for one in each_optimizer(entry)}
    known = {kind for kind in _subclasses(Tensor) if issubclass(kind, ComposedTensor)}
    return found | {class_name(kind): kind for kind in known if _package(kind) in packages - {"torch"}}


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    for one in subclasses:
        yield one
        yield from _subclasses(one)


def _classes_in(value: Any) -> Iterator[type[ComposedTensor]]:
    if is_composed(value):
        yield type(value)
        for name in value.__tensor_flatten__()[0]:
            yield from _classes_in(getattr(value, name))
    elif isinstance(value, (Mapping, list, tuple)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _classes_in(entry)
