"""Conversion of a state that a stock Ignite engine saved into that of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignite_train.arguments import positive_int

__all__ = ["from_ignite_state", "is_ignite_state"]

_OURS = frozenset({"num_steps", "epochs_completed", "update"})  # keys that only the state of a trainer has


def is_ignite_state(state_dict: Any) -> bool:
    """Whether `Engine.state_dict()` of stock Ignite gave it: counters and limits, and nothing of an update."""
    return isinstance(state_dict, Mapping) and "epoch_length" in state_dict and _OURS.isdisjoint(state_dict)


def from_ignite_state(state_dict: Mapping[str, Any], accumulation_steps: Any) -> dict[str, Any]:
    """Counters of a trainer that stands where the engine stood. Ignite's counters are of batches: our micro-batches.

    Args:
        state_dict: with `epoch_length` and one of `iteration` and `epoch`; `max_epochs` or `max_iters` in Ignite's meaning.
        accumulation_steps: micro-batches to an update, a number.

    Raises:
        ValueError: the engine did not stop between two updates, or a number is missing or out of range, or two contradict.
        TypeError: a number is not an integer.
    """
    if state_dict["epoch_length"] is None:
        raise ValueError(
            "state_dict['epoch_length'] must be a number of batches, got None; save a state of a run that has begun"
        )
    length = positive_int("state_dict['epoch_length']", state_dict["epoch_length"])
    if not isinstance(accumulation_steps, int):
        raise ValueError(
            "accumulation_steps must be a number to continue from a state of Ignite, whose counters are of batches, got "
            f"{accumulation_steps!r}; load it into a trainer with accumulation_steps=N, save that, and resume from it"
        )
    given = [key for key in ("iteration", "epoch") if key in state_dict]
    if len(given) != 1:
        raise ValueError(f"state_dict must have one of the keys 'iteration' and 'epoch', got {given or sorted(state_dict)}")
    batches = state_dict[given[0]]
    if given == ["epoch"] and isinstance(batches, int):
        batches *= length
    if not isinstance(batches, int) or isinstance(batches, bool) or batches < 0:
        raise ValueError(f"state_dict['iteration'] must be a number of batches, at least 0, got {batches!r}")
    epochs, in_epoch = divmod(batches, length)
    if in_epoch % accumulation_steps:
        raise ValueError(
            f"state_dict['iteration'] must be at the end of an update of {accumulation_steps} micro-batches, got {batches}, "
            f"{in_epoch} batches into an epoch of {length}"
        )
    updates = _updates_of(batches, length, accumulation_steps)
    max_epochs, max_iters = _limits(state_dict, batches, epochs)
    return {
        "iteration": updates,
        "num_steps": updates,
        "num_skipped": 0,
        "num_micro_batches": batches,
        "epochs_completed": epochs,
        "epoch_iteration": in_epoch // accumulation_steps,
        "epoch_length": _updates_of(length, length, accumulation_steps),
        "max_epochs": max_epochs,
        "max_iters": None if max_iters is None else _updates_of(max_iters, length, accumulation_steps),
        "ended": False,
    }


def _updates_of(batches: int, length: int, accumulation_steps: int) -> int:
    """Updates in which so many batches are done, from the beginning of a run; the last group of an epoch may be smaller."""
    epochs, in_epoch = divmod(batches, length)
    return epochs * -(-length // accumulation_steps) - (-in_epoch // accumulation_steps)


def _limits(state_dict: Mapping[str, Any], batches: int, epochs: int) -> tuple[Any, Any]:
    """The limits in Ignite's meaning: one of them, which is not below what was done."""
    max_epochs, max_iters = state_dict.get("max_epochs"), state_dict.get("max_iters")
    if max_epochs is not None and max_iters is not None:
        raise ValueError(f"state_dict must have one of max_epochs and max_iters, got {max_epochs!r} and {max_iters!r}")
    for key, limit, done in (("max_epochs", max_epochs, epochs), ("max_iters", max_iters, batches)):
        if limit is not None and positive_int(f"state_dict[{key!r}]", limit) < done:
            raise ValueError(f"state_dict[{key!r}] must not be below the {done} that are done, got {limit}")
    return max_epochs, max_iters
