"""The state that a user's forward carries from one micro-batch to the next, and its way back when a forward does not count."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from ignite_train.arguments import check_state_dict, describe
from ignite_train.internals.of_torch import pytree

__all__ = ["Carried"]


class Carried(UserDict[Any, Any]):
    """A dict for what forward carries from micro-batch to micro-batch: an RNN's hidden state, a queue, a centre.

    Each rank has its own. It is saved with every checkpoint, so it may hold what a checkpoint can: tensors, arrays, numbers,
    strings, and lists, tuples and dicts of them. It is taken back with every forward that does not count: of a micro-batch
    that ran out of memory, of a placeholder, of the search for a value that is not finite, of an update that broke off with
    an exception, and of one that was skipped because it overflowed or was not finite. (Otherwise a NaN that such an update
    leaves here would spoil all updates after it.) It is not emptied between epochs.

    A value is stored without the graphs of its tensors when it is assigned to a key, also inside lists, tuples and dicts, so
    the memory of a micro-batch is freed with it. Code that appends a tensor to a stored list must call `detach` on it first.
    Read values from here each time: after an update was taken back they are other objects.

    The price is a copy of the values in each update, and nothing where the dict is empty.
    """

    def __init__(self, values: Mapping[Any, Any] | None = None) -> None:
        self._before: dict[Any, Any] | None = None  # while an update runs: copies of the values at its beginning
        super().__init__(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, _without_graphs(value))

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The value of a key, after `default` is stored where there is none: a list that is returned may be appended to."""
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]  # UserDict goes past __setitem__
        self.update(other)
        return self

    def replace(self, values: Mapping[Any, Any]) -> None:
        """Holds copies of `values`, and nothing else."""
        self.data = _copies(values)

    def copies(self) -> dict[Any, Any]:
        """Copies of the current values, for `replace`."""
        return _copies(self.data)

    def begin_update(self) -> None:
        """Remembers the values, for `rewind` and `roll_back`."""
        self._before = _copies(self.data) if self.data else {}

    def end_update(self) -> None:
        """Keeps what the update has made of them."""
        self._before = None

    def rewind(self) -> None:
        """Goes back to the beginning of the running update, to run its forwards again."""
        if self._before is not None:
            self.replace(self._before)

    def roll_back(self) -> None:
        """Goes back to the beginning of the running update, which does not count. Does nothing where none is running."""
        if self._before is not None:
            self.data, self._before = self._before, None

    def state_dict(self) -> dict[str, Any]:
        """The values after the latest update that is done, not copied, and what kind of device each tensor is on."""
        values = dict(self.data if self._before is None else self._before)
        devices = [leaf.device.type for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
        return {"values": values, "devices": devices}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Holds copies of the values that `state_dict` gave, and nothing else. A checkpoint gives them on the CPU.

        Raises:
            ValueError: `state_dict` did not give them.
        """
        check_state_dict("Carried", state_dict, ("values", "devices"), ())
        values, devices = state_dict["values"], state_dict["devices"]
        num_tensors = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(values))
        if not isinstance(values, dict) or not isinstance(devices, list) or len(devices) != num_tensors:
            raise ValueError(f"state_dict must be what Carried.state_dict() gave, got {describe(state_dict)}")
        accelerator, kinds = torch.accelerator.current_accelerator(), iter(devices)

        def moved(leaf: Any) -> Any:
            on_accelerator = isinstance(leaf, Tensor) and next(kinds) != "cpu" and accelerator is not None
            return leaf.to(accelerator) if on_accelerator else leaf

        self._before = None
        self.replace(pytree.tree_map(moved, values))


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _without_graphs(value: Any) -> Any:
    """The value itself where no tensor in it has a graph. Otherwise a copy with new containers: the user's are in use."""
    if not any(map(_has_graph, pytree.tree_leaves(value))):
        return value
    return pytree.tree_map(lambda leaf: leaf.detach() if _has_graph(leaf) else leaf, value)


def _copies(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copies of all tensors without their graphs, of all containers, and of whatever else is in them."""
    if not values:
        return {}

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)

    result: dict[Any, Any] = pytree.tree_map(copied, dict(values))
    return result
