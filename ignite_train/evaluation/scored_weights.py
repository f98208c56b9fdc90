"""Handlers that put other weights into the model for each run of an evaluator, so that its score is of those."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ignite.engine import Engine

__all__ = ["PutsScoredWeightsIn", "handlers_of_score", "note_scored_weights"]


class PutsScoredWeightsIn(Protocol):
    """Such a handler."""

    @property
    def has_weights(self) -> Any:
        """The object from whose state in a checkpoint the weights come: an optimizer, or the handler itself."""

    def left_in(self) -> AbstractContextManager[None]:
        """In this `with` that state and the model are loaded; at its end the weights are put in, and stay."""


_noted: WeakKeyDictionary[Engine, list[PutsScoredWeightsIn]] = WeakKeyDictionary()


def note_scored_weights(evaluator: Engine, handler: PutsScoredWeightsIn) -> None:
    """Notes that `handler` puts weights in for the runs of `evaluator`, after those that were noted before."""
    _noted.setdefault(evaluator, []).append(handler)


def handlers_of_score(evaluator: Engine | None) -> Sequence[PutsScoredWeightsIn]:
    """The handlers that put weights in for `evaluator`, in their order; none if it evaluates those that are trained."""
    return () if evaluator is None else tuple(_noted.get(evaluator, ()))
