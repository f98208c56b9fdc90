"""Two measurements beside each other, and what counts as a difference between them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median, quantiles
from typing import Literal, NamedTuple

__all__ = ["Outcome", "Race", "race", "spread"]

Outcome = Literal["faster", "slower", "no difference"]

_LEAST_GAIN = 0.02  # a gain below this is not worth a change, however certain it is
_HOPELESS = 0.5  # one with such a ratio in two rounds is out


class Race(NamedTuple):
    """What was measured in the rounds of a race.

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
    def ratio(self) -> float:
        """The median over the rounds."""
        return median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the rounds lie between these two ratios."""
        low, _, high = quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    @property
    def outcome(self) -> Outcome:
        """Whether three quarters of the rounds speak for the others, by more than 2 %, or three quarters against them.

        What changes between two rounds, such as other programs on the machine, is in both times of a round. So the spread of
        the ratios is the noise that a gain must exceed.
        """
        low, high = self.quartiles
        return "faster" if low > 1.0 + _LEAST_GAIN else "slower" if high < 1.0 else "no difference"


def race(before: Callable[[], float], after: Callable[[], float], *, rounds: int, ends_early: bool = True) -> Race:
    """Measures both in each round, in turn; which one is first alternates.

    Args:
        before: measures the settings that are to be beaten, in seconds.
        after: measures the others.
        rounds: how often, at least 2.
        ends_early: stop where the others cannot win any more, or are half as fast in each of two rounds.

    Returns:
        The measurements.
    """
    found, losses = Race([], []), (rounds - 1) // 4 + 2  # this many, and the lower quartile is below a gain
    for number in range(rounds):
        for is_after in (number % 2 == 1, number % 2 == 0):
            (found.after if is_after else found.before).append(after() if is_after else before())
        lost = sum(ratio <= 1.0 + _LEAST_GAIN for ratio in found.ratios)
        if ends_early and number >= 1 and (lost >= losses or max(found.ratios) < _HOPELESS):
            break
    return found


def spread(seconds: list[float]) -> float:
    """The distance between the quartiles, as a share of the median."""
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle
