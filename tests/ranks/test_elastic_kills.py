"""Replicas that are killed and suspended at random, and come again: what they have made is what one process would have."""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_script
from tiers import nightly, slow

pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")

from ignite_train.elastic import ElasticLauncher  # it needs torchft

SCRIPT = Path(elastic_script.__file__)
EPOCHS, SAMPLES, KILLS = 4, 96, 6
SECONDS = 240.0  # for a run; a run without a kill takes about fifteen


class Killer:
    """Kills or suspends random replicas of a launcher, from time to time; at most all but one at once.

    It begins when an update was made. A replica that is suspended is continued or killed later: so it finds that the others
    have continued without it.
    """

    def __init__(self, seed: int, launcher: ElasticLauncher, begun: Path) -> None:
        self._random, self._launcher = random.Random(seed), launcher  # noqa: S311  # a test
        self._begun, self._next = begun, math.inf
        self._suspended: list[tuple[float, Any]] = []
        self.num_kills = 0

    def look(self) -> None:
        now, draw = time.monotonic(), self._random
        if self._next == math.inf and self._begun.exists():
            self._next = now + draw.uniform(0, 2)
        for entry in [entry for entry in self._suspended if entry[0] < now]:
            self._suspended.remove(entry)
            if entry[1].poll() is None:
                entry[1].send_signal(draw.choice([signal.SIGCONT, signal.SIGKILL]))
        if self.num_kills >= KILLS or now < self._next:
            return
        running = [replica.process for replica in self._launcher.replicas.values() if replica.process.poll() is None]
        number = draw.choice([1, 1, 1, 2, len(self._launcher.replicas) - 1])
        for process in draw.sample(running, min(number, len(running) - 1)) if running else []:
            how = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            process.send_signal(how)
            self.num_kills += 1
            if how == signal.SIGSTOP:
                self._suspended.append((now + draw.uniform(0.3, 3), process))
        self._next = now + draw.choice([0.05, draw.uniform(0.2, 2), draw.uniform(3, 8)])


def run(directory: Path, num_replicas: int, seed: int | None, batches: str) -> tuple[list[Any], int]:
    """Gives what the replicas that have ended wrote, and how many were killed."""
    numbers = [str(EPOCHS), str(SAMPLES), "0.1", batches]
    command = [sys.executable, str(SCRIPT), str(directory), *numbers]
    with ElasticLauncher(command, num_replicas, heartbeat_ms=600, join_ms=8000, hang_seconds=8) as launcher:
        killer = None if seed is None else Killer(seed, launcher, directory / "begun")
        deadline = time.monotonic() + SECONDS
        while not launcher.look():
            assert time.monotonic() < deadline, "the replicas have not ended"
            if killer is not None:
                killer.look()
            time.sleep(0.02)
    ends = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    return ends, 0 if killer is None else killer.num_kills


def check(ends: list[Any]) -> None:
    """The replicas are bitwise equal, each sample counts once an epoch, and one process that replays them ends there too."""
    assert ends
    first = ends[0]
    assert all(other == first for other in ends[1:])
    for epoch in range(1, EPOCHS + 1):
        counted = [counts for of_epoch, counts in first["updates"] if of_epoch == epoch]
        assert [sum(column) for column in zip(*counted, strict=True)] == [1] * SAMPLES
    assert first["steps"] == len(first["updates"])
    samples, model = elastic_script.Samples(SAMPLES), elastic_script.make_model()
    model.load_state_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in first["start"].items()})
    optimizer, schedule = elastic_script.make_optimizer(model)
    for _, counts in first["updates"]:
        taken = [samples[index] for index, count in enumerate(counts) if count]
        x, y = (torch.stack([sample[part] for sample in taken]) for part in (1, 2))
        optimizer.zero_grad()
        ((model(x) - y).square().sum() / len(taken)).backward()
        optimizer.step()
        schedule.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(torch.tensor(first["parameters"][name], dtype=torch.float64), value, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_replicas_without_a_kill(tmp_path: Path) -> None:
    """All of them end, with the same parameters as a replay in one process."""
    ends, _ = run(tmp_path, 2, None, "samples")

    assert len(ends) == 2
    check(ends)


CASES = [(seed, 2 + seed % 3, ("samples", "samples", "workers", "tokens")[seed % 4]) for seed in range(34)]


@pytest.mark.parametrize(
    ("seed", "num_replicas", "batches"), [slow(*case) for case in CASES[:2]] + [nightly(*c) for c in CASES[2:]]
)
def test_replicas_that_are_killed(tmp_path: Path, seed: int, num_replicas: int, batches: str) -> None:
    """After any sequence of kills each update is that of the samples that it has counted, and each sample counts once."""
    ends, num_kills = run(tmp_path, num_replicas, seed, batches)

    assert num_kills > 0
    check(ends)
