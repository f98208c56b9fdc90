"""The share of the machines' time that is training: elastic replicas beside restarts from checkpoints.

A discrete-event simulation. Machines fail independently; the time to the next failure of each is exponential.

- Restart: all machines go back to the latest checkpoint when one fails, and start again. The interval between checkpoints is
  the best one by the formula of Young (1974): the root of twice the cost of a checkpoint times the time between failures.
- Elastic: the others lose the running update and a gap. The machine that failed is missed until it is back; when it is, all
  wait while it gets the state.

The simulation of restarts is checked against the expected time in closed form (Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", 2006): `--check`.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from dataclasses import dataclass

DAY = 86_400.0


@dataclass(frozen=True)
class Costs:
    """Seconds, but for the first.

    Attributes:
        days: between two failures of one machine.
        checkpoint: that a checkpoint holds the run.
        restart: from a failure until all machines train again from a checkpoint, or one is back.
        gap: that elastic replicas wait before they continue without a lost one.
        update: that an update takes; a failure loses half of one on average.
        state: that all wait while a machine that comes gets the state.
    """

    days: float = 100.0
    checkpoint: float = 10.0
    restart: float = 300.0
    gap: float = 1.1
    update: float = 10.0
    state: float = 5.0


def best_interval(machines: int, costs: Costs) -> float:
    """Young's: seconds of training between two checkpoints."""
    return math.sqrt(2 * costs.checkpoint * costs.days * DAY / machines)


def daly(machines: int, costs: Costs, interval: float) -> float:
    """The goodput of restarts in closed form."""
    mean = costs.days * DAY / machines
    return interval / (mean * math.exp(costs.restart / mean) * math.expm1((interval + costs.checkpoint) / mean))


def restarts(machines: int, costs: Costs, interval: float, failures: int, draw: random.Random) -> float:
    """The goodput of a run with so many failures that goes back to its latest checkpoint at each of them."""
    rate, time, kept, begun = machines / (costs.days * DAY), 0.0, 0.0, 0.0
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


def main() -> None:
    """Prints a table, or the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Costs()).items():
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--failures", type=int, default=200_000, help="in each simulation")
    parser.add_argument("--check", action="store_true", help="compare the simulation of restarts with the closed form")
    given = parser.parse_args()
    costs = Costs(**{name: vars(given)[name] for name in vars(Costs())})
    print(f"{'machines':>9}  {'restart':>8}  {'closed form':>11}  {'elastic':>8}")
    for machines in (8, 100, 1_000, 10_000, 100_000):
        interval = best_interval(machines, costs)
        draw = random.Random(machines)  # noqa: S311  # a simulation
        simulated = restarts(machines, costs, interval, given.failures, draw)
        exact, other = daly(machines, costs, interval), elastic(machines, costs, given.failures, draw)
        print(f"{machines:>9}  {simulated:8.2%}  {exact:11.2%}  {other:8.2%}")
        if given.check and abs(simulated - exact) > 0.01 * exact + 1e-4:
            raise SystemExit(f"at {machines} machines the simulation and the closed form differ")


if __name__ == "__main__":
    main()
