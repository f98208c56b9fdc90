"""Replicas that are killed and suspended, and come again: what they have made is what one process would have."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import elastic_runs
import elastic_script
from ignite_train import checkpoint
from tiers import nightly, slow

pytest.importorskip("torchft", reason="elastic replicas need the extra ignite_train[elastic]")

from ignite_train.elastic import ElasticLauncher  # it needs torchft

RUNS = Path(elastic_runs.__file__)
CARDS = 12


def run(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `elastic_runs` in a process of its own, which forks its replicas before it has a thread."""
    command = [sys.executable, str(RUNS), str(directory), *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=elastic_runs.SECONDS_WITH_KILLS + 60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its replicas, of which some are suspended
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ends_of(directory: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in directory.glob("*.json")]


def card(place: str) -> elastic_runs.Card:
    return elastic_runs.Card(place, signal.SIGKILL, "alone", 0, 0.0)


def test_a_card_that_nobody_will_play_goes_back() -> None:
    """One that is to be healed and has joined without that holds its card for ever; so do all others that wait for it."""
    healer, late, free = card("healing another"), card("being healed"), None

    assert elastic_runs.to_shake({1: healer, 2: late, 3: free}, {1, 2, 3}) == [2, 3]
    assert elastic_runs.to_shake({1: free, 2: free}, {1, 2}) == [1, 2]  # number 0 may need another card
    assert not elastic_runs.to_shake({1: healer, 2: late}, {1})  # it may still be healed
    assert not elastic_runs.to_shake({1: healer, 2: card("step")}, {1, 2})  # it will be played
    assert not elastic_runs.to_shake({1: late}, {1})  # the others are being started


@pytest.mark.slow
def test_a_replica_that_hangs_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HangWatch ends it, the launcher starts it again, and it joins the others, which have made its update meanwhile."""
    monkeypatch.setenv("HANGS", "1")
    command = [sys.executable, elastic_script.__file__, str(tmp_path), "2", "96", "0.05", "samples"]
    with ElasticLauncher(command, 2, heartbeat_ms=1500, join_ms=10_000, hang_seconds=10) as launcher:
        deadline = time.monotonic() + elastic_runs.SECONDS
        while not launcher.look():
            assert time.monotonic() < deadline, "the replicas have not ended"
            time.sleep(0.02)

    assert (tmp_path / "hung").exists()
    assert launcher.num_restarts > 0
    elastic_runs.check(ends_of(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["lonely", nightly("dark"), nightly("frozen")])
def test_a_replica_that_waits_in_vain_ends_with_a_checkpoint(tmp_path: Path, what: str) -> None:
    """Without enough others, or without a lighthouse, it waits for its patience, and then says in one line why it ends."""
    done = run(tmp_path, 0, 2, 0, "samples", what)

    assert done.returncode == 1, done.stderr[-20_000:]
    ends = [line for line in done.stderr.splitlines() if ": NoQuorumError: " in line and line[0].isdigit()]
    assert [line.split(": the lighthouse at http://127.0.0.1:")[0] for line in sorted(ends)] == [
        f"{number}: NoQuorumError" for number in range(1 if what == "lonely" else 2)
    ]
    assert all("has named no members for 20 s" in line for line in ends)
    for number in range(len(ends)):
        assert checkpoint.latest(tmp_path / f"saves-{number}").name >= "update-00000002"


CASES = [(seed, 2 + seed % 3, ("samples", "tokens", "workers")[seed // 2 % 3], "") for seed in range(18)]
WITH_LIGHTHOUSE = [(100, 3, "samples", "lighthouse"), (101, 4, "tokens", "lighthouse")]


@pytest.mark.parametrize(
    ("seed", "num_replicas", "batches", "more"),
    [slow(*CASES[4]), *(nightly(*case) for case in (*CASES[:4], *CASES[5:], *WITH_LIGHTHOUSE))],
)
def test_replicas_that_are_killed(tmp_path: Path, seed: int, num_replicas: int, batches: str, more: str) -> None:
    """Each update is that of the samples that it has counted, each sample counts once, and all replicas are bitwise equal.

    They are killed and suspended at each of the places in an update and beside it, one of them, two at once and all but one;
    in some cases the lighthouse dies too.
    """
    done = run(tmp_path, seed, num_replicas, CARDS, batches, *([more] if more else []))
    assert done.returncode == 0, done.stderr[-20_000:]
    kills = json.loads((tmp_path / "kills").read_text())

    assert kills["number"] >= CARDS
    assert {place for place, _, _ in kills["played"]} == {*elastic_runs.PLACES}
    elastic_runs.check(ends_of(tmp_path))
