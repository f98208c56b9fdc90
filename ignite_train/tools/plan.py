"""A calculator for a long run: how long it will take, how much of that is useful work, and how often to save.

    python -m ignite_train.plan --updates 100000 --compute 8 --ranks 64 --gradients 5e9 --bandwidth 20e9 --mtbf 2000

docs/scaling.md has the formulas and where the numbers come from.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

__all__ = ["Plan", "Run", "expected_seconds", "main", "plan", "save_interval"]


@dataclass(frozen=True)
class Run:
    """A run, and the machines that it runs on.

    Attributes:
        updates: optimizer steps in all.
        compute: seconds that one rank alone would need for forward, backward and step of a whole update.
        ranks: processes that share the samples of an update.
        gradients: bytes that cross the ranks in an update, such as 4 for each trained parameter in float32.
        bandwidth: bytes a second from a rank to its neighbour.
        overlap: which part of that traffic is hidden behind backward, from 0 to 1.
        spread: standard deviation of the time of an update between ranks, in parts of it.
        mtbf: hours between two failures of one machine, on average.
        ranks_per_machine: a failure of a machine ends the run on all of them.
        save: seconds that the run is held while it is saved.
        restart: seconds from a failure to the first new update: noticing it, starting, reading the checkpoint.
    """

    updates: int
    compute: float
    ranks: int = 1
    gradients: float = 0.0
    bandwidth: float = 1e10
    overlap: float = 0.0
    spread: float = 0.0
    mtbf: float = 10_000.0
    ranks_per_machine: int = 8
    save: float = 1.0
    restart: float = 120.0

    def __post_init__(self) -> None:
        may_be_zero = {"gradients", "overlap", "spread", "restart"}
        for name, value in vars(self).items():
            if not math.isfinite(value) or value < 0 or (value == 0 and name not in may_be_zero):
                least = "at least 0" if name in may_be_zero else "greater than 0"
                raise ValueError(f"{name} must be a number {least}, got {value!r}")
        if self.overlap > 1:
            raise ValueError(f"overlap must be from 0 to 1, got {self.overlap!r}")


@dataclass(frozen=True)
class Plan:
    """The forecast of a `Run`; `print` shows it.

    Attributes:
        update: seconds of an update.
        efficiency: of the ranks, without failures: the speed-up over one rank, divided by the ranks.
        mtbf: seconds between two failures of the run.
        interval: seconds between two saves, by Daly's formula.
        every: the same in updates, for `Checkpoint(every=...)`.
        total: seconds of the run, with saves, failures and what is computed again.
        goodput: the part of that which is spent on updates that stay.
    """

    update: float
    efficiency: float
    mtbf: float
    interval: float
    every: int
    total: float
    goodput: float

    def __str__(self) -> str:
        return (
            f"an update takes {self.update:.3g} s, {self.efficiency:.0%} of the ranks' time is computing\n"
            f"a failure every {self.mtbf / 3600:.3g} h: save every {self.interval:.3g} s, Checkpoint(every={self.every})\n"
            f"the run takes {self.total / 3600:.4g} h, with a goodput of {self.goodput:.1%}"
        )


def save_interval(save: float, mtbf: float) -> float:
    """Seconds of work between two saves for which a run is shortest, after Daly (2006); to first order Young's √(2·save·mtbf).

    Args:
        save: seconds of a save.
        mtbf: seconds between two failures, on average.
    """
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def expected_seconds(work: float, interval: float, *, save: float, restart: float, mtbf: float) -> float:
    """Seconds that a run takes on average, with failures at random (Daly 2006, equation 20); infinite if it never ends.

    Args:
        work: seconds of a run without saves and failures.
        interval: seconds of work between two saves.
        save: seconds of a save.
        restart: seconds from a failure until work begins again, in which another one may come.
        mtbf: seconds between two failures, on average.
    """
    try:
        return mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf) * work / interval
    except OverflowError:
        return math.inf


def plan(run: Run) -> Plan:
    """Forecasts a run, and says how often to save it.

    Example:
        >>> print(plan(Run(updates=100_000, compute=8.0, ranks=64, gradients=5e9, bandwidth=20e9, mtbf=2000)))
        an update takes 0.617 s, 20% of the ranks' time is computing
        a failure every 250 h: save every 1.34e+03 s, Checkpoint(every=2173)
        the run takes 17.17 h, with a goodput of 99.8%
    """
    share = run.compute / run.ranks
    # The slowest of n ranks, of a normal distribution.
    waiting = share * run.spread * math.sqrt(2 * math.log(run.ranks))
    # A ring passes each byte on 2 (n - 1) / n times.
    traffic = 2 * (run.ranks - 1) / run.ranks * run.gradients / run.bandwidth
    update = share + waiting + (1 - run.overlap) * traffic
    mtbf = run.mtbf * 3600 / math.ceil(run.ranks / run.ranks_per_machine)
    every = max(1, round(save_interval(run.save, mtbf) / update))
    work, interval = run.updates * update, every * update
    total = expected_seconds(work, interval, save=run.save, restart=run.restart, mtbf=mtbf)
    return Plan(update, share / update, mtbf, interval, every, total, work / total)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan that the arguments of the command line describe, and gives the code to exit with."""
    parser = argparse.ArgumentParser(prog="python -m ignite_train.plan", description=(__doc__ or "").split("\n\n")[0])
    for field in fields(Run):
        kind, is_needed = int if field.type == "int" else float, field.name in ("updates", "compute")
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, required=is_needed)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        print(plan(Run(**given)))  # noqa: T201  # it is a command
    except ValueError as error:
        parser.error(str(error))
    return 0
