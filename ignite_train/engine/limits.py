"""The limits of a run: which values are allowed, and whether the data lasts that long."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ignite_train.arguments import describe, positive_int
from ignite_train.state import TrainState

__all__ = [
    "checked_limits",
    "checked_loader",
    "is_read_once",
    "refuse_ended_iterator",
    "refuse_used_iterator",
    "without_full_batch",
]

_READ_ONCE = ("builtins", "itertools", "torch.utils.data.dataloader")  # a generator's class is a built-in one
_IN_STAGES = "; if a later call of run in the script has trained them, give each call a trainer and a Checkpoint of its own"


def checked_loader(data: Any) -> Iterable[Any]:
    """The data of a run.

    Raises:
        TypeError: it cannot be iterated, or is a mapping, text, a tensor, an array or several loaders.
    """
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes, Mapping, Tensor, np.ndarray)):
        raise TypeError(f"data must be a loader of micro-batches, got {describe(data)}{_instead_of(data)}")
    # Looked at and not iterated: a list of another class may read its data where it is iterated.
    if (type(data) is list or type(data) is tuple) and isinstance(next(iter(data), None), DataLoader):
        raise TypeError(
            f"data must be one loader of micro-batches, got a {type(data).__name__} of {len(data)} loaders; for training pass "
            "one of them, for evaluation attach a Validation for each"
        )
    return data


def _instead_of(data: Any) -> str:
    if isinstance(data, (Tensor, np.ndarray)):
        return "; write DataLoader(data, batch_size=32), list(data) if its rows are micro-batches, or [data] if it is one"
    if isinstance(data, Dataset) or (isinstance(data, Sized) and not isinstance(data, Iterable)):
        return "; write DataLoader(dataset, batch_size=32)"
    return "; call it, and pass what it returns" if inspect.isroutine(data) or isinstance(data, type) else ""


def without_full_batch(data: Any) -> str:
    """The end of a message about a loader that gave nothing: what to do where it leaves out a batch that is not full."""
    if not isinstance(data, DataLoader) or not data.drop_last:
        return ""
    return (
        f"; drop_last=True leaves out a batch that is not full: pass drop_last=False, or a batch_size below {data.batch_size}"
    )


def is_read_once(data: Iterable[Any]) -> bool:
    """Whether it is an iterator of Python's or of a DataLoader. One of another library may begin again where it is iterated."""
    return isinstance(data, Iterator) and type(data).__module__ in _READ_ONCE


def refuse_used_iterator(loader: Iterable[Any], max_epochs: int | None, *, half_read: bool = False, name: str = "data") -> None:
    """Refuses an iterator that a run would have to read more than once.

    Args:
        loader: the data of the run.
        max_epochs: the number of passes over it.
        half_read: whether the run continues in the middle of a pass.
        name: what the message calls it.

    Raises:
        TypeError: it is an iterator, and more than one pass is needed.
    """
    if isinstance(loader, Iterator) and (half_read or (max_epochs or 1) > 1):
        why = "is half read" if half_read else f"can be iterated once, not {max_epochs} times"
        raise TypeError(f"{name} must be a loader, got an iterator ({type(loader).__name__}), which {why}; pass a DataLoader")


def refuse_ended_iterator(state: TrainState, data: Iterable[Any]) -> None:
    """Says that `data`, of which the run needs more, has ended.

    Raises:
        ValueError: always.
    """
    limit = f"max_iters={state.max_iters}" if state.max_iters is not None else f"max_epochs={state.max_epochs}"
    remedy, what = "pass a loader that can be iterated again, such as a DataLoader or a list", "an iterator"
    if not isinstance(data, Iterator):
        remedy = "pass a loader that gives micro-batches on each rank; without epoch_length a rank may have none"
        what = "one that gives nothing"
    raise ValueError(
        f"data ended after {state.iteration} updates of {limit}; {remedy}, got {what} ({type(data).__name__})"
        f"{without_full_batch(data)}"
    )


def checked_limits(state: TrainState, max_epochs: Any, max_iters: Any) -> tuple[int | None, int | None]:
    """The limits of a run: those that are given, or those it had, or one epoch.

    Raises:
        TypeError: a limit is not an integer.
        ValueError: both are given, or one is below 1 or below what was trained already.
    """
    if max_epochs is not None and max_iters is not None:
        raise ValueError(f"max_epochs and max_iters exclude each other, got {max_epochs!r} and {max_iters!r}; pass one")
    if max_epochs is not None:
        if isinstance(max_epochs, DataLoader):  # in its place others take the data of a validation
            got = describe(max_epochs)
            raise TypeError(
                f"max_epochs must be a positive integer, got {got}; for validation data attach Validation(evaluator, loader)"
            )
        begun, limit = state.epoch, positive_int("max_epochs", max_epochs)
        if limit < begun:
            raise ValueError(f"max_epochs must not be below the {begun} epochs already begun, got {max_epochs}{_IN_STAGES}")
        return limit, None
    if max_iters is not None:
        limit = positive_int("max_iters", max_iters)
        if limit < state.iteration:
            raise ValueError(
                f"max_iters must not be below the {state.iteration} updates already done, got {max_iters}{_IN_STAGES}"
            )
        return None, limit
    return (1, None) if state.max_epochs is None and state.max_iters is None else (state.max_epochs, state.max_iters)
