"""The share of the machines' time that is training: elastic replicas beside restarts from checkpoints.

A discrete-event simulation. Machines fail independently; the time to the next failure of each is exponential.

- Restart: all machines go back to the latest checkpoint when one fails, and start again. The interval between checkpoints is
  the best one, found by a search; where failures are rare it is Young's (1974): √(2 · checkpoint · time between failures).
- Elastic: the others lose the running update and a gap. The machine that failed is missing until it is back; when it is, all
  wait while it gets the state.

`--check` compares restarts with Daly's expected time in closed form (2006), and elastic replicas with the sum of their losses
to first order, where losses are rare. `--picture` draws what the table says.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from dataclasses import dataclass
from pathlib import Path

DAY = 86_400.0
MACHINES = (8, 32, 100, 320, 1_000, 3_200, 10_000, 32_000, 100_000)


@dataclass(frozen=True)
class Costs:
    """Seconds, but for the first.

    Attributes:
        days: between two failures of one machine.
        checkpoint: for which a checkpoint holds up the run.
        restart: from a failure until all machines train again from a checkpoint, or until one machine is back.
        gap: for which elastic replicas wait before they continue without a lost one.
        update: length of an update; a failure loses half of one on average.
        state: for which all wait while a machine that joins gets the state.
    """

    days: float = 100.0
    checkpoint: float = 10.0
    restart: float = 300.0
    gap: float = 1.1
    update: float = 10.0
    state: float = 5.0

    def mtbf(self, machines: int) -> float:
        """Seconds between two failures of so many machines."""
        return self.days * DAY / machines


def daly(machines: int, costs: Costs, interval: float) -> float:
    """The goodput of restarts in closed form."""
    mean = costs.mtbf(machines)
    return interval / (mean * math.exp(costs.restart / mean) * math.expm1((interval + costs.checkpoint) / mean))


def best_interval(machines: int, costs: Costs) -> float:
    """Seconds of training between two checkpoints, with the highest goodput, to a thousandth of Young's interval."""
    young = math.sqrt(2 * costs.checkpoint * costs.mtbf(machines))
    return max((young * step / 1000 for step in range(1, 2001)), key=lambda interval: daly(machines, costs, interval))


def first_order(machines: int, costs: Costs) -> float:
    """The goodput of elastic replicas if no two losses overlap: of a machine while it is away, of all of them around it."""
    of_all = costs.gap + costs.update / 2 + costs.state
    return 1 - costs.restart / (costs.days * DAY) - of_all / costs.mtbf(machines)


def restarts(machines: int, costs: Costs, interval: float, failures: int, draw: random.Random) -> float:
    """The goodput of a run with so many failures that goes back to its latest checkpoint at each of them."""
    rate, time, kept, begun = 1 / costs.mtbf(machines), 0.0, 0.0, 0.0
    for _ in range(failures):
        failure = time + draw.expovariate(rate)
        if failure > begun:  # it may fail again while it starts
            kept += interval * ((failure - begun) // (interval + costs.checkpoint))
        time, begun = failure, failure + costs.restart
    return kept / time


def elastic(machines: int, costs: Costs, failures: int, draw: random.Random) -> float:
    """The goodput of a run with so many failures whose machines go and come."""
    rate, time, useful, present = 1 / (costs.days * DAY), 0.0, 0.0, machines
    waits_until, comes_back = 0.0, list[float]()
    while failures:
        failure = time + draw.expovariate(rate * present) if present else math.inf
        now = min(failure, comes_back[0] if comes_back else math.inf)
        useful += present * max(0.0, now - max(time, waits_until))
        time = now
        if now == failure:  # of a machine that is there
            failures, present = failures - 1, present - 1
            lost = costs.gap + draw.uniform(0, costs.update)
            heapq.heappush(comes_back, now + costs.restart)
        else:
            heapq.heappop(comes_back)
            present, lost = present + 1, costs.state
        waits_until = max(now, waits_until) + lost
    return useful / (machines * time)


def draw_picture(rows: list[tuple[int, float, float, float]], costs: Costs, output: Path) -> None:
    """Goodput against the number of machines."""
    import matplotlib as mpl

    mpl.use("Agg")  # draws to a file: no window, no display
    import matplotlib.pyplot as plt

    machines, restarted, closed_form, elastic_ones = zip(*rows, strict=True)
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    axes.semilogx(machines, elastic_ones, "o-", color="#1d4e89", label="elastic replicas")
    axes.semilogx(machines, restarted, "o", color="#c4572e", label="restart from the latest checkpoint")
    axes.semilogx(machines, closed_form, "-", color="#c4572e", linewidth=1, label="the same, by Daly's formula")
    title = f"one failure a machine in {costs.days:g} days"
    axes.set(xlabel=f"machines ({title})", ylabel="share of the time that is training", ylim=(0, 1.03))
    axes.yaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0))
    axes.legend(frameon=False, loc="lower left")
    figure.savefig(output, dpi=110)


def main() -> None:
    """Prints a table, or checks it, or draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Costs()).items():
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--failures", type=int, default=200_000, help="in each simulation")
    parser.add_argument("--check", action="store_true", help="compare the simulations with closed forms")
    parser.add_argument("--picture", type=Path, help="a file for the picture, which needs matplotlib")
    given = parser.parse_args()
    costs, rows = Costs(**{name: vars(given)[name] for name in vars(Costs())}), []
    print(f"{'machines':>9}  {'restart':>8}  {'closed form':>11}  {'elastic':>8}")
    for machines in MACHINES:
        interval = best_interval(machines, costs)
        draw = random.Random(machines)  # noqa: S311  # a simulation
        simulated = restarts(machines, costs, interval, given.failures, draw)
        exact, other = daly(machines, costs, interval), elastic(machines, costs, given.failures, draw)
        rows.append((machines, simulated, exact, other))
        print(f"{machines:>9}  {simulated:8.2%}  {exact:11.2%}  {other:8.2%}")
        if given.check and abs(simulated - exact) > 0.01 * exact + 1e-4:
            raise SystemExit(f"at {machines} machines the simulation of restarts and the closed form differ")
        estimate = first_order(machines, costs)
        if given.check and abs(other - estimate) > (1 - estimate) ** 2 + 1e-4:
            raise SystemExit(f"at {machines} machines the simulation of elastic replicas and the sum of losses differ")
    if given.picture is not None:
        draw_picture(rows, costs, given.picture)


if __name__ == "__main__":
    main()
