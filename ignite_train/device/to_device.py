"""Moving micro-batches to the device of the model, each while the one before it is computed on."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_train.device.leaves import leaves, map_leaves, own_to
from ignite_train.device.streams import has_streams

__all__ = ["ToDevice", "moves_itself", "transfer_to"]

_logger = logging.getLogger(__name__)


class _Coming(NamedTuple):
    """A micro-batch, what becomes of it on the device, and the event behind the copies, which is None if nothing is copied."""

    micro_batch: Any
    moved: Any
    event: Any


class ToDevice:
    """Moves every tensor of a micro-batch to `device`.

    A micro-batch is any nesting of dicts, lists, tuples, named tuples, `UserDict`, dataclasses, `SimpleNamespace` and whatever
    else is registered with torch's pytree; what has a `to` method of its own (packed sequences, graph batches, also where they
    are tuples) moves itself. All other leaves are left alone; a class of objects that hold tensors and are left alone is named
    in one warning. For the CPU there is nothing to move and nothing is looked at.

    On an accelerator with streams, tensors are copied from pinned memory on a stream of their own, so that neither the host nor
    the copy waits for what is computed; `ahead` has that happen before they are asked for. What a loader has pinned is not
    pinned again. Sparse and nested tensors, and what moves itself, move when they are asked for, without waiting where their
    `to` takes `non_blocking`. Memory that the loader has pinned is read while the host continues: before a loader may write
    over it, call `await_copies`, or read a number that depends on the micro-batch. Tensors that lie on the device already are
    handed over unchanged. On other devices each copy waits.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._target = device
        self._has_streams = has_streams(device)
        self._stream: Any = None  # made when it is needed
        self._coming: _Coming | None = None
        self._copied: Any = None  # the event behind the copies of the micro-batch that was asked for last
        self._left_alone: set[type] = set()  # classes of leaves that were looked at, and are not moved

    def __call__(self, micro_batch: Any) -> Any:
        """The micro-batch on the device, for what is computed next."""
        if not self._has_streams:
            return micro_batch if self._target.type == "cpu" else _map(self._move, micro_batch)
        coming = self._moved_ahead(micro_batch)
        if coming is None:
            coming = self._start(micro_batch)
        else:
            self._coming = None
        if coming.event is None:
            self._copied = None
            return coming.moved
        stream, copied_late = _current_stream(self._target), False
        stream.wait_event(coming.event)

        def hand_over(leaf: Any) -> Any:
            nonlocal copied_late
            if not _is_plain(leaf):
                moved = self._move(leaf)
                copied_late = copied_late or moved is not leaf
                return moved
            leaf.record_stream(stream)  # or its memory would be given to the next copy before what is computed is done with it
            return leaf

        handed_over = _map(hand_over, coming.moved)
        self._copied = stream.record_event() if copied_late else coming.event
        return handed_over

    def await_copies(self) -> None:
        """Returns when the micro-batch that was asked for last has been read from the memory of the host. Synchronises."""
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()  # sync, with copies alone unless something was moved late

    def ahead(self, micro_batch: Any) -> None:
        """Starts to move the next micro-batch. If there is no room for it, it is moved when it is asked for."""
        if not self._has_streams or self._moved_ahead(micro_batch) is not None:
            return
        try:
            self._coming = self._start(micro_batch)
        except torch.OutOfMemoryError:
            self._coming = None

    def forget(self) -> None:
        """Lets go of what was moved ahead."""
        self._coming = None

    def _moved_ahead(self, micro_batch: Any) -> _Coming | None:
        return self._coming if self._coming is not None and self._coming.micro_batch is micro_batch else None

    def _start(self, micro_batch: Any) -> _Coming:
        if self._stream is None:
            self._stream = _new_stream(self._target)

        is_there = True

        def copy(leaf: Any) -> Any:
            nonlocal is_there
            if not _is_plain(leaf):
                is_there = False  # it is looked at when it is asked for
                return leaf
            moved = _pinned(leaf).to(self._target, non_blocking=True)
            is_there = is_there and moved is leaf
            return moved

        with self._stream:
            moved = _map(copy, micro_batch)
        return _Coming(micro_batch, micro_batch, None) if is_there else _Coming(micro_batch, moved, self._stream.record_event())

    def _move(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) and not moves_itself(leaf):
            self._warn_of(leaf)
            return leaf
        if self._has_streams and (isinstance(leaf, Tensor) or _takes_non_blocking(type(leaf))):  # type: ignore[arg-type]
            return leaf.to(self._target, non_blocking=True)
        return leaf.to(self._target)

    def _warn_of(self, leaf: Any) -> None:
        """Names, once, a class of objects that hold tensors in a way that nothing here knows."""
        if type(leaf) in self._left_alone:
            return
        self._left_alone.add(type(leaf))
        if any(isinstance(one, Tensor) for one in leaves(_attributes(leaf))):
            _logger.warning(
                f"the micro-batch holds a {type(leaf).__qualname__} whose tensors are not moved to {self._target}: give the "
                "class a method to(device) that returns the moved object, or use a dict or a dataclass"
            )


def transfer_to(device: torch.device) -> ToDevice | None:
    """The object that copies micro-batches to a device; None for the CPU, where there is nothing to copy."""
    return None if device.type == "cpu" and not has_streams(device) else ToDevice(device)


def moves_itself(value: Any) -> bool:
    """Whether a value that is not a tensor has a `to` method: only it knows which of its parts belong on a device."""
    return own_to(type(value)) is not None  # type: ignore[arg-type]  # a type is hashable


@lru_cache(maxsize=256)
def _takes_non_blocking(kind: type) -> bool:
    to: Any = own_to(kind)  # `moves_itself` has seen that there is one
    try:
        parameters = inspect.signature(to).parameters
    except ValueError:  # some methods that are not written in Python have none
        return True
    return "non_blocking" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _map(change: Callable[[Any], Any], micro_batch: Any) -> Any:
    return map_leaves(change, micro_batch, whole=moves_itself)


def _attributes(leaf: Any) -> dict[str, Any]:
    """The values of a mapping, or the attributes of an object, which may have none."""
    try:
        return dict(leaf) if isinstance(leaf, Mapping) else vars(leaf)
    except TypeError:
        return {}


def _is_plain(leaf: Any) -> bool:
    """Whether it is a tensor whose memory is its own, and not that of parts."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _new_stream(device: torch.device) -> Any:
    return torch.Stream(device)


def _current_stream(device: torch.device) -> Any:
    return torch.accelerator.current_stream(device)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
