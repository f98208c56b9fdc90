"""Other weights than the trained ones, which a handler puts into the model for each run of an evaluator."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["ScoredWeights"]


class ScoredWeights(Protocol):
    """A handler that puts such weights in, so that the evaluator's score is of them."""

    @property
    def has_weights(self) -> Any:
        """The object from whose state in a checkpoint the weights come: an optimizer, or the handler itself."""

    def left_in(self) -> AbstractContextManager[None]:
        """In this `with` that state and the model are loaded; at its end the weights are put in, and stay."""
