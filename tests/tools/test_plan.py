"""The calculator for long runs against Young's formula, a search for the best interval, and simulated failures."""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ignite_train.plan import Run, expected_seconds, plan, save_interval

ROOT = Path(__file__).parents[2]
PAGE, SIMULATION = ROOT / "docs/scaling.md", ROOT / "benchmarks/goodput.py"


@pytest.fixture(scope="module")
def goodput() -> Any:
    """The simulation of failures, event by event."""
    spec = importlib.util.spec_from_file_location("goodput", SIMULATION)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["goodput"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not SIMULATION.is_file(), reason="looks at a checkout, and here is none")
@pytest.mark.parametrize(("machines", "failures"), [(8, 1_000), (1_000, 1_000), (10_000, 1_000), (100_000, 50_000)])
@pytest.mark.parametrize("restart", [0.0, 300.0])
def test_the_plan_is_what_a_simulation_of_failures_shows(machines: int, failures: int, restart: float, goodput: Any) -> None:
    """To four standard errors of its mean, and the mean is known to 1.5 percent."""
    costs = goodput.Costs(restart=restart)
    run = Run(
        updates=1_000_000, compute=float(machines), ranks=machines, ranks_per_machine=1, mtbf=24 * costs.days,
        save=costs.checkpoint, restart=restart,
    )  # fmt: skip
    expected = plan(run)
    simulate = partial(goodput.restarts, machines, costs, expected.interval, failures)
    shares = [simulate(random.Random(seed)) for seed in range(20)]  # noqa: S311
    error, mean = statistics.stdev(shares) / math.sqrt(len(shares)), statistics.fmean(shares)

    assert expected.update == 1.0
    if machines < 10_000:  # there one update is short beside the interval
        assert expected.interval == pytest.approx(goodput.best_interval(machines, costs), rel=0.03)
    assert error < 0.015 * mean
    assert expected.goodput == pytest.approx(mean, abs=4 * error)


@pytest.mark.skipif(not SIMULATION.is_file(), reason="looks at a checkout, and here is none")
def test_elastic_replicas_lose_what_their_parts_add_up_to(goodput: Any) -> None:
    """Where losses are rare; and where they are not, they are better off than with restarts."""
    costs, draws = goodput.Costs(), random.Random(0)  # noqa: S311
    simulated = goodput.elastic(100, costs, 20_000, draws)

    assert 1 - simulated == pytest.approx(1 - goodput.first_order(100, costs), rel=0.05)
    assert goodput.elastic(10_000, costs, 5_000, draws) > 1.5 * goodput.daly(10_000, costs, 400.0)


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


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, and here is none")
def test_the_command_prints_what_the_page_shows() -> None:
    """The first command of docs/scaling.md, and its output."""
    block = PAGE.read_text(encoding="utf-8").partition("```console\n$ python ")[2].partition("```")[0]
    command, _, shown = block.partition("\n")
    printed = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, timeout=600, check=True)

    assert printed.stdout == shown
