"""Measuring contestants against each other on a machine that others use too.

All contestants take part in every round, in an order that changes from round to round, and each is compared with the reference
beside it: a machine that slows down slows both. What is reported is the median of the rounds' ratios and its quartiles, never
a time of one run against that of another.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_REPETITIONS = 7


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of `values`; of a single one it is that one."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def show(self, digits: int = 2) -> str:
        """As a cell of a table."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass
class Rounds:
    """What each contestant took in each round, in pairs with what the reference took beside it."""

    pairs: dict[str, list[tuple[float, float]]]

    def ratios(self, name: str) -> Spread:
        """The contestant's time over that of the reference."""
        return Spread.of([mine / reference for mine, reference in self.pairs[name]])

    def difference(self, name: str, *, unit: float = 1e-6) -> Spread:
        """The contestant's time less that of the reference."""
        return Spread.of([(mine - reference) / unit for mine, reference in self.pairs[name]])

    def typical(self, name: str) -> float:
        """The contestant's median."""
        return statistics.median(mine for mine, _ in self.pairs[name])


def interleave(
    contestants: dict[str, Callable[[], float]],
    *,
    repetitions: int,
    bracket: bool = True,
    warm_up: bool = True,
    quiet: bool = False,
    until: float | None = None,
) -> Rounds:
    """Runs every contestant once in each round. Each returns the seconds it took.

    Args:
        contestants: by name; the first is the reference.
        repetitions: rounds.
        bracket: run the reference before and after every other contestant, and compare with the mean of the two; otherwise
            it runs once a round.
        warm_up: begin with a round that does not count.
        quiet: do not show how far it is.
        until: when no further round begins, by `time.perf_counter`; the first that counts always does.
    """
    reference, *others = contestants
    rounds, shuffled = Rounds({name: [] for name in contestants}), random.Random(0)  # noqa: S311  # the same on every rank
    started = time.perf_counter()

    def measure(name: str) -> float:
        gc.collect()
        return contestants[name]()

    for number in range(0 if warm_up else 1, repetitions + 1):
        if until is not None and number > 1 and time.perf_counter() > until:
            break
        before = measure(reference)
        taken = [before]
        for name in others:
            mine = measure(name)
            after = measure(reference) if bracket else before
            if number:
                rounds.pairs[name].append((mine, (before + after) / 2))
            taken.append(after)
            before = after
        if number == 0:
            gc.collect()
            gc.freeze()  # what was imported; collecting it before each measurement would take longer than the measurement
        else:
            rounds.pairs[reference].append((statistics.median(taken), statistics.median(taken)))
        shuffled.shuffle(others)
        if not quiet:
            print(f"round {number} of {repetitions}, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    gc.unfreeze()  # what is measured next needs the memory
    return rounds


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
