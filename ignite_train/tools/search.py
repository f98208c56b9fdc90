"""Search: one setting after another, each candidate in a race against the fastest settings so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median, quantiles
from typing import Any, NamedTuple

from ignite_train.tools.trial import TrialError
from ignite_train.tools.tuned import Measured, Settings

__all__ = ["Dimension", "Race", "Search", "race"]

_ROUNDS, _LAST_ROUNDS = 5, 9
_LEAST_GAIN = 0.02  # a gain below this is not worth a change, however certain it is
_HOPELESS = 0.5  # one with such a ratio in two rounds is out


class Dimension(NamedTuple):
    """A setting and the values to try.

    Attributes:
        name: of the setting.
        values: all values, with the present one; in order of size where `is_ordered`.
        is_ordered: whether a value that is slower makes those behind it not worth trying.
        change: the settings with another value.
    """

    name: str
    values: tuple[Any, ...]
    is_ordered: bool
    change: Callable[[Settings, Any], Settings]

    def directions(self, settings: Settings) -> list[list[Any]]:
        """Returns the other values: those above and those below, from near to far; or all of them."""
        now = settings[self.name]
        if not self.is_ordered:
            return [[value for value in self.values if value != now]]
        return [[value for value in self.values if value > now], [value for value in reversed(self.values) if value < now]]


class Race(NamedTuple):
    """Two settings that were measured in turn, round by round, so that what else the machine does slows both.

    Attributes:
        before: seconds of an update with the settings that are to be beaten, one for each round.
        after: seconds of an update with the others, measured in the same rounds.
    """

    before: list[float]
    after: list[float]

    @property
    def ratios(self) -> list[float]:
        """How many times as fast the others were, round by round."""
        return [before / after for before, after in zip(self.before, self.after, strict=True)]

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the rounds lie between these two ratios."""
        low, _, high = quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    @property
    def outcome(self) -> str:
        """Whether three quarters of the rounds speak for the others, by more than 2 %, or three quarters against them."""
        low, high = self.quartiles
        return "faster" if low > 1.0 + _LEAST_GAIN else "slower" if high < 1.0 else "no difference"


def race(before: Callable[[], float], after: Callable[[], float], *, rounds: int, ends_early: bool = True) -> Race:
    """Measures both in each round, in turn; which one is first alternates.

    Args:
        before: measures the settings that are to be beaten, in seconds.
        after: measures the others.
        rounds: how often, at least 2.
        ends_early: stop where the others cannot win any more, or are half as fast in each of two rounds.
    """
    found, losses = Race([], []), (rounds - 1) // 4 + 2  # this many, and the lower quartile is below a gain
    for number in range(rounds):
        for is_after in (number % 2 == 1, number % 2 == 0):
            (found.after if is_after else found.before).append(after() if is_after else before())
        lost = sum(ratio <= 1.0 + _LEAST_GAIN for ratio in found.ratios)
        if ends_early and number >= 1 and (lost >= losses or max(found.ratios) < _HOPELESS):
            break
    return found


class Search:
    """Coordinate by coordinate: the best value of the first setting is kept for the search of the second, and so on.

    At most two candidates are in memory together. One that raises is a row of the table, and ends nothing.

    Args:
        build: makes the `Trial` of settings; raises `TrialError` where it cannot.
        present: the settings of the program.
        is_over: whether the time is over: the same on all ranks.

    Attributes:
        rows: what was measured, in order.
        fastest: the fastest settings so far.
        num_unmeasured: candidates that were left out because the time was over.
        last_race: of the present and the fastest settings, at the end; None if the fastest are the present ones.
    """

    def __init__(self, build: Callable[[Settings], Any], present: Settings, is_over: Callable[[], bool]) -> None:
        self._build, self._present, self._is_over = build, present, is_over
        self.rows: list[Measured] = []
        self.fastest = present
        self.last_race: Race | None = None
        self.num_unmeasured = 0
        self._ratio = 1.0  # of the fastest settings to the present ones
        self._open: list[Any] = []  # the fastest, and beside it the candidate

    def __call__(self, dimensions: Iterable[Dimension]) -> None:
        """Searches.

        Raises:
            TrialError: the fastest settings so far cannot be measured, which are the present ones at first.
        """
        try:
            self._open = [self._build(self._present)]
            self._note(self._open[0], [self._open[0].seconds() for _ in range(5)], 1.0, "")
            for dimension in dimensions:
                self._search(dimension)
            if self.fastest != self._present:
                self._confirm()
        finally:
            while self._open:
                self._open.pop().close()

    def _search(self, dimension: Dimension) -> None:
        start = self.fastest
        for values in dimension.directions(start):
            for value in values:
                if self._is_over():
                    self.num_unmeasured += 1
                elif self._try(dimension.change(self.fastest, value)) in ("slower", "failed") and dimension.is_ordered:
                    break
            if self.fastest != start and dimension.is_ordered:
                return

    def _try(self, settings: Settings) -> str:
        """Races these settings against the fastest so far, whose place they take if they win."""
        try:
            self._open.append(self._build(settings))
            best, other = self._open
            found = race(best.seconds, other.seconds, rounds=_ROUNDS)
        except TrialError as error:
            self.rows.append(Measured(settings, None, 0.0, 0.0, None, f"failed: {error}"))
            self._drop_candidate()
            self._open[0].seconds()  # it raises if it was the fastest settings that failed, as they would beside each candidate
            return "failed"
        ratio = self._ratio * median(found.ratios)
        self._note(other, found.after, ratio, found.outcome)
        if found.outcome == "faster":
            self._open.reverse()
            self.fastest, self._ratio = settings, ratio
        self._drop_candidate()
        return found.outcome

    def _confirm(self) -> None:
        """Measures the winner once more beside the present settings: the best of many is in part the luckiest."""
        try:
            self._open.append(self._build(self._present))
            best, present = self._open
            found = race(present.seconds, best.seconds, rounds=_LAST_ROUNDS, ends_early=False)
        except TrialError as error:
            self.rows.append(Measured(self.fastest, None, 0.0, 0.0, None, f"not measured once more: {error}"))
            self.fastest = self._present
            return
        self._note(best, found.after, median(found.ratios), f"once more, beside the present settings: {found.outcome}")
        if found.outcome == "faster":
            self.last_race = found
        else:
            self.fastest = self._present

    def _note(self, trial: Any, seconds: list[float], ratio: float, outcome: str) -> None:
        low, middle, high = quantiles(seconds, n=4, method="inclusive")
        rate = trial.samples / median(seconds)
        self.rows.append(Measured(trial.settings, rate, (high - low) / middle, ratio, trial.peak_memory, outcome))

    def _drop_candidate(self) -> None:
        if len(self._open) == 2:
            self._open.pop().close()
