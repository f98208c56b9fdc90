"""The search: one setting after another, each candidate in a race against the fastest settings so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Protocol

from ignite_train.tuning.alone import TrialError
from ignite_train.tuning.dimensions import Dimension
from ignite_train.tuning.race import Race, race, spread
from ignite_train.tuning.settings import Settings
from ignite_train.tuning.tuned import Measured

__all__ = ["Measurable", "Search"]

_ROUNDS, _LAST_ROUNDS = 5, 9


class Measurable(Protocol):
    """Settings that are ready to be measured; see `Trial`, the one there is outside of tests.

    Attributes:
        settings: which ones.
        samples: in an update of one rank.
        peak_memory: in bytes, of its first window; None where it is not known.
    """

    settings: Settings
    samples: int
    peak_memory: int | None

    def seconds(self) -> float:
        """Measures one window: seconds of an update, of the slowest rank."""

    def close(self) -> None:
        """Gives its memory and processes back."""


class Search:
    """Coordinate by coordinate: the best value of the first setting is kept for the search of the second, and so on.

    At most two candidates are in memory together. One that raises is a row of the table, and ends nothing.

    Args:
        build: makes settings ready; raises `TrialError` where it cannot.
        present: the settings of the program.
        is_over: whether the time is over: the same on all ranks.

    Attributes:
        rows: what was measured, in order.
        fastest: the fastest settings so far.
        num_unmeasured: candidates that were left out because the time was over.
        last_race: of the present and the fastest settings, at the end; None if they are the same.
    """

    def __init__(self, build: Callable[[Settings], Measurable], present: Settings, is_over: Callable[[], bool]) -> None:
        self._build, self._present, self._is_over = build, present, is_over
        self.rows: list[Measured] = []
        self.fastest = present
        self.last_race: Race | None = None
        self._ratio = 1.0  # of the fastest settings to the present ones
        self.num_unmeasured = 0
        self._best: Measurable | None = None
        self._other: Measurable | None = None

    def __call__(self, dimensions: Iterable[Dimension]) -> None:
        """Searches.

        Raises:
            TrialError: the present settings cannot be measured.
        """
        try:
            self._best = self._build(self._present)
            seconds = [self._best.seconds() for _ in range(5)]
            self._note(self._best, seconds, 1.0, "")
            for dimension in dimensions:
                self._search(dimension)
            if self.fastest != self._present:
                self._confirm()
        finally:
            self._close()

    def _search(self, dimension: Dimension) -> None:
        start = self.fastest
        for values in dimension.directions(start):
            for value in values:
                if self._is_over():
                    self.num_unmeasured += 1
                elif self._try(dimension.apply(self.fastest, value)) in ("slower", "failed") and dimension.is_ordered:
                    break
            if self.fastest != start and dimension.is_ordered:
                return

    def _try(self, settings: Settings) -> str:
        """Races these settings against the fastest so far, whose place they take if they win."""
        assert self._best is not None  # noqa: S101  # it was built before
        try:
            self._other = self._build(settings)
            found = race(self._best.seconds, self._other.seconds, rounds=_ROUNDS)
        except TrialError as error:
            self.rows.append(Measured(settings, None, 0.0, 0.0, None, f"failed: {error}"))
            self._drop_other()
            return "failed"
        ratio = self._ratio * found.ratio
        self._note(self._other, found.after, ratio, found.outcome)
        if found.outcome == "faster":
            self._best, self._other = self._other, self._best
            self.fastest, self._ratio = settings, ratio
        self._drop_other()
        return found.outcome

    def _confirm(self) -> None:
        """Measures the winner once more beside the present settings: the best of many is in part the luckiest."""
        assert self._best is not None  # noqa: S101  # as above
        try:
            self._other = self._build(self._present)
            self.last_race = found = race(self._other.seconds, self._best.seconds, rounds=_LAST_ROUNDS, ends_early=False)
        except TrialError as error:
            self.rows.append(Measured(self.fastest, None, 0.0, 0.0, None, f"not measured once more: {error}"))
            self.fastest = self._present
            return
        self._note(self._best, found.after, found.ratio, f"once more, beside the present settings: {found.outcome}")
        if found.outcome != "faster":
            self.fastest = self._present

    def _note(self, trial: Measurable, seconds: list[float], ratio: float, outcome: str) -> None:
        rate = trial.samples / median(seconds)
        self.rows.append(Measured(trial.settings, rate, spread(seconds), ratio, trial.peak_memory, outcome))

    def _drop_other(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            other.close()

    def _close(self) -> None:
        for trial in (self._best, self._other):
            if trial is not None:
                trial.close()
        self._best = self._other = None
