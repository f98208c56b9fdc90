"""Counting the updates in a row that failed, and giving up after too many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignite_train.arguments import check_state_dict
from ignite_train.errors import GaveUpError
from ignite_train.state import UpdateOutput

__all__ = ["FailuresInARow"]


class FailuresInARow:
    """Counts updates in a row that were skipped because they are not finite, or that ran out of memory.

    Args:
        limit: how many end the run; None: no number does.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._counts: dict[str, int] = {}

    def count(self, update: int, output: UpdateOutput, *, scale_fell: bool) -> None:
        """Counts an update. An overflow that lowered the loss scale (`scale_fell`) may end by itself, so it does not count.

        Raises:
            GaveUpError: it is one too many.
        """
        if output.applied or scale_fell:
            self._counts.pop("was skipped", None)
        elif output.skipped_reason in ("nonfinite", "overflow"):  # one without samples does not show that the next is finite
            self._count(update, "was skipped")
        if output.num_out_of_memory == 0:
            self._counts.pop("ran out of memory", None)
        else:
            self._count(update, "ran out of memory")

    def _count(self, update: int, what: str) -> None:
        count = self._counts.get(what, 0) + 1
        if self._limit is not None and count >= self._limit:
            raise GaveUpError(update, count, what)
        self._counts[what] = count

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return dict(self._counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes counts over.

        Raises:
            TypeError: it is not a mapping.
            ValueError: a count is not an integer of at least 0.
        """
        check_state_dict("Trainer", state_dict, (), state_dict)
        self._counts = dict(state_dict)
