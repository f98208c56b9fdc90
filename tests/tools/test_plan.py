"""The calculator for long runs against Young's formula, a search for the best interval, and simulated failures."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from ignite_train.tools.plan import Run, expected_seconds, plan, save_interval

PAGE = Path(__file__).parents[2] / "docs/scaling.md"


def simulated(pieces: int, interval: float, save: float, restart: float, mtbf: float, draws: random.Random) -> float:
    """Seconds of one run in which failures come at random, event by event."""
    now, done, failure = 0.0, 0, draws.expovariate(1 / mtbf)
    while done < pieces:
        if now + interval + save <= failure:  # a piece of work is done and saved
            now, done = now + interval + save, done + 1
            continue
        now = failure  # it is lost, and the run starts again, until no failure interrupts the start
        failure = now + draws.expovariate(1 / mtbf)
        while now + restart > failure:
            now, failure = failure, failure + draws.expovariate(1 / mtbf)
        now += restart
    return now


@pytest.mark.parametrize(("save", "restart", "mtbf"), [(5.0, 60.0, 3600.0), (30.0, 300.0, 1800.0), (1.0, 0.0, 600.0)])
def test_the_expected_time_is_that_of_a_simulation(save: float, restart: float, mtbf: float) -> None:
    """To four standard errors of its mean, and the mean is known to 1.5 percent."""
    interval = save_interval(save, mtbf)
    draws = random.Random(0)  # noqa: S311
    times = [simulated(100, interval, save, restart, mtbf, draws) for _ in range(1000)]
    error, expected = statistics.stdev(times) / math.sqrt(len(times)), statistics.fmean(times)

    assert error < 0.015 * expected
    assert expected_seconds(100 * interval, interval, save=save, restart=restart, mtbf=mtbf) == pytest.approx(
        expected, abs=4 * error
    )


@pytest.mark.parametrize(("save", "mtbf"), [(1.0, 100.0), (10.0, 3600.0), (60.0, 36000.0)])
def test_the_interval_is_the_best_one(save: float, mtbf: float) -> None:
    """No other is better by more than a thousandth; for rare failures it is Young's."""
    chosen = save_interval(save, mtbf)
    others = [chosen * 1.02**power for power in range(-150, 151)]
    best = min(expected_seconds(1.0, one, save=save, restart=0.0, mtbf=mtbf) for one in others)

    assert expected_seconds(1.0, chosen, save=save, restart=0.0, mtbf=mtbf) <= 1.001 * best
    assert save_interval(1.0, 1e9) == pytest.approx(math.sqrt(2e9), rel=1e-4)
    assert save_interval(10.0, 4.0) == 4.0


def test_parts_add_up() -> None:
    """Compute, traffic of a ring, and the slowest rank; one rank has neither of the last two."""
    run = Run(updates=10, compute=8.0, ranks=4, gradients=4e9, bandwidth=1e10, overlap=0.5, spread=0.1, ranks_per_machine=2)
    update = 2.0 + 2.0 * 0.1 * math.sqrt(2 * math.log(4)) + 0.5 * 2 * 3 / 4 * 0.4

    assert plan(run).update == pytest.approx(update)
    assert plan(run).mtbf == 10_000 * 3600 / 2
    assert plan(Run(updates=10, compute=8.0)).update == 8.0
    assert 0.99 < plan(Run(updates=10, compute=8.0)).goodput < 1


@pytest.mark.parametrize("wrong", [{"updates": 0}, {"compute": -1.0}, {"overlap": 1.5}, {"mtbf": math.nan}, {"save": 0.0}])
def test_a_wrong_number_is_an_error(wrong: dict[str, float]) -> None:
    """With its name."""
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
        Run(**{"updates": 1, "compute": 1.0, **wrong})


@pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, and here is none")
def test_the_command_prints_what_the_page_shows() -> None:
    """The first command of docs/scaling.md, and its output."""
    block = PAGE.read_text(encoding="utf-8").partition("```console\n$ python ")[2].partition("```")[0]
    command, _, shown = block.partition("\n")
    printed = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=600, check=True)

    assert printed.stdout == shown
