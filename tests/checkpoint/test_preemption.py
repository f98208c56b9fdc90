"""A signal ends a job with a checkpoint, the same command goes on from there, and a job that is done stays done."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ignite_train.checkpoint.manifest import is_checkpoint_name
from killing import Job, Life, Reference, Stop, committed, compare_ends, done, history, stored, until
from processes import DEADLINE_SECONDS
from tiers import nightly

pytestmark = pytest.mark.timeout(6 * DEADLINE_SECONDS)

SIGTERM, SIGUSR1 = signal.SIGTERM, signal.SIGUSR1
References = Callable[[Job], Reference]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The undisturbed run of a job."""

    @cache
    def of(world_size: int, epochs: int) -> Reference:
        return Reference.of(Job(tmp_path_factory.mktemp("reference"), world_size, epochs=epochs))

    return lambda job: of(job.world_size, job.epochs)


def newest(job: Job) -> tuple[Any, dict[str, str]]:
    """What moment the newest checkpoint is of, and what is in it."""
    names = [path for path in job.checkpoints.iterdir() if is_checkpoint_name(path.name)]
    return max((stored(path) for path in names), key=lambda found: (found[0][0], found[0][2]))


def updates(job: Job, rank: int, life: int) -> list[int]:
    return [line["update"] for line in history(job, rank) if line["life"] == life]


def assert_as_expected(job: Job, expected: Reference) -> None:
    """Each update that was ever done is that of the undisturbed run."""
    for rank in range(job.world_size):
        lines = history(job, rank)
        assert [done(line) for line in lines] == [expected.updates[rank][line["update"]] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "number", "to"),
    [
        (Stop(0, "training", 3), SIGTERM, 0),
        (Stop(0, "training", 6), SIGUSR1, 1),
        nightly(Stop(1, "training", 4), SIGTERM, 1),
        nightly(Stop(0, "validation", 2), SIGTERM, 1),
        (Stop(0, "validation", 5), SIGUSR1, 0),
        (Stop(0, "save", 21), SIGTERM, 0),
        nightly(Stop(1, "save", 9), SIGUSR1, 1),
        (Stop(0, "prune", 2), SIGTERM, 1),
    ],
    ids=lambda value: f"{value.phase} of rank {value.rank}" if isinstance(value, Stop) else str(value),
)
def test_a_signal_ends_a_job_with_a_checkpoint(
    tmp_path: Path, reference: References, stop: Stop, number: signal.Signals, to: int
) -> None:
    """To one rank, wherever one of them is: all exit in order, and the next start redoes nothing and ends bitwise equal."""
    job = Job(tmp_path, epochs=3, every=3, grace_seconds=DEADLINE_SECONDS)
    expected = reference(job)
    with Life(job, 0, stop) as life:
        until(life.halted, "the place")
        life.send(number, to)
        until(lambda: f"{number.name}: the run ends" in life.stderr(), "the signal is heard of")
        life.release()
        assert life.wait() == [0, 0], life.stderr()
        assert life.started() == []
    moment, content = newest(job)
    assert updates(job, 0, 0) == updates(job, 1, 0) == [*range(1, moment[0] + 1)]
    assert moment[0] < 12
    assert not moment[2], "its end is left to the next start"
    undisturbed = expected.checkpoints[moment[0], moment[1], False]
    assert [key for key, entry in undisturbed.items() if content.get(key) != entry and not key.startswith("trainer ")] == []
    with Life(job, 1) as life:
        assert life.wait() == [0, 0], life.stderr()
    assert updates(job, 0, 1) == updates(job, 1, 1) == [*range(moment[0] + 1, 13)]
    assert_as_expected(job, expected)
    compare_ends(job, expected)


@pytest.mark.slow
@pytest.mark.parametrize("to", [(0, 1), (0,), (1,)])
def test_a_rank_that_is_stuck_leaves_the_checkpoint_as_it_was(
    tmp_path: Path, reference: References, to: tuple[int, ...]
) -> None:
    """Rank 1 does not come back, rank 0 waits for it in a collective: those that got the signal end when the grace is over."""
    job = Job(tmp_path, epochs=3, every=2, grace_seconds=1.0, end_together=to)
    expected = reference(job)
    with Life(job, 0, Stop(1, "training", 6)) as life:
        until(lambda: life.halted() and life.trail(0).count("training") == 6, "rank 0 waits for rank 1")
        until(lambda: [path.name for path in committed(job)] == ["update-00000004.1"], "the save after the epoch is done")
        before = newest(job)
        for rank in to:
            life.send(SIGTERM, rank)
        for rank in to:
            life.processes[rank].join(DEADLINE_SECONDS)
            assert life.processes[rank].exitcode == 128 + SIGTERM, life.stderr()
        life.kill([0, 1])  # as the launcher does when one has ended
        life.wait()
        assert newest(job) == before
        assert before[1] == expected.checkpoints[before[0]]
    with Life(job, 1) as life:
        assert life.wait() == [0, 0], life.stderr()
    assert updates(job, 0, 1) == [*range(5, 13)]
    assert_as_expected(job, expected)
    compare_ends(job, expected)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_finished_run_started_again_does_nothing_and_says_so(tmp_path: Path, reference: References, world_size: int) -> None:
    """Raising the limit continues it; lowering it is an error that names both numbers, on every rank."""
    job = Job(tmp_path, world_size, epochs=1)
    each, last = range(world_size), 4 if world_size == 2 else 7
    with Life(job, 0) as life:
        assert life.wait() == [0] * world_size, life.stderr()
    before = newest(job)
    with Life(job, 1) as life:
        assert life.wait() == [0] * world_size, life.stderr()
        says = f"nothing to do: epoch 1 and update {last} are done and the limit is max_epochs=1, max_iters=None; raise it"
        assert life.stderr().count(says) == 1  # of rank 0
    assert [updates(job, rank, 1) for rank in each] == [[]] * world_size
    assert newest(job) == before
    with Life(replace(job, epochs=2), 2) as life:
        assert life.wait() == [0] * world_size, life.stderr()
    assert [updates(job, rank, 2) for rank in each] == [[*range(last + 1, 2 * last + 1)]] * world_size
    expected = reference(replace(job, epochs=2))
    for rank in each:
        for line in history(job, rank):
            same = expected.updates[rank][line["update"]]
            assert [line[key] for key in ("samples", "output", "weights")] == [
                same[key] for key in ("samples", "output", "weights")
            ]
    before = newest(job)
    with Life(job, 3) as life:
        assert life.wait() == [1] * world_size
        error = "ValueError: max_epochs must not be below the 2 epochs already begun, got 1"
        assert life.stderr().count(error) == world_size
    assert newest(job) == before
