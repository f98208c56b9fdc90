"""Killed by SIGKILL anywhere, on any rank, a job that is started again ends bitwise as if nothing had happened."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch

from ignite_train.checkpoint.manifest import is_checkpoint_name, read_manifest
from killing import Job, Life, Reference, Stop, Toll, committed, endure, kills, stored, until
from processes import DEADLINE_SECONDS
from tiers import nightly, one_in, slow

pytestmark = pytest.mark.timeout(6 * DEADLINE_SECONDS)

REPORT = Path(__file__).parents[2] / "docs/reliability.md"
References = Callable[[Job], Reference]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """The undisturbed run of a job; one for each number of ranks is enough, since nothing else may change a bit."""

    @cache
    def of(world_size: int) -> Reference:
        return Reference.of(Job(tmp_path_factory.mktemp("reference"), world_size))

    return lambda job: of(job.world_size)


def jobs(directory: Path, **options: int) -> Iterator[Job]:
    """One after the other, with other cadences and ways of saving."""
    return (Job(directory / str(number), every=1 + number % 2, asynchronous=number % 3 < 2, **options) for number in count())


@pytest.mark.parametrize("half", [slow(slice(7)), nightly(slice(7, 14))], ids=["first half", "second half"])
def test_killed_anywhere_two_ranks_end_bitwise_as_if_nothing_had_happened(
    tmp_path: Path, reference: References, half: slice
) -> None:
    """Each place and each set of victims; see `kills` for the places and `inspect` for what is looked at after each."""
    toll = endure(jobs(tmp_path), kills(14, seed=1)[half], reference)
    assert toll.kills == 7
    assert set(toll.by_place) == {"progress", "save", "agreement", "rename", "prune"}
    assert toll.equal == toll.runs


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [nightly(0), 2])
def test_killed_anywhere_one_process_ends_bitwise_with_any_number_of_workers(
    tmp_path: Path, reference: References, num_workers: int
) -> None:
    """The reference has no workers. Those of a process that was killed end by themselves."""
    toll = endure(jobs(tmp_path, world_size=1, num_workers=num_workers), kills(4, seed=2, world_size=1), reference)
    assert toll.kills == 4
    assert toll.equal == toll.runs


@pytest.mark.nightly
def test_killed_anywhere_three_ranks_end_bitwise(tmp_path: Path, reference: References) -> None:
    """Sums of three ranks depend on the order in which they are taken, which each start must find again."""
    toll = endure(jobs(tmp_path, world_size=3), kills(4, seed=4, world_size=3), reference)
    assert toll.kills == 4
    assert toll.equal == toll.runs


@pytest.mark.nightly
@pytest.mark.timeout(30_000)
def test_two_hundred_kills(tmp_path: Path, reference: References) -> None:
    """What docs/reliability.md reports; the loader has workers in each sixth job."""
    started, plan = time.monotonic(), kills(200, seed=int(datetime.now(UTC).timestamp()))
    various = (
        Job(job.directory, num_workers=2 * (number % 6 == 5), every=job.every, asynchronous=job.asynchronous)
        for number, job in enumerate(jobs(tmp_path))
    )
    toll = endure(various, plan, reference)
    assert toll.kills == 200
    assert toll.equal == toll.runs
    report(toll, time.monotonic() - started)


def report(toll: Toll, seconds: float) -> None:
    """Writes the result into docs/reliability.md, between its two marks."""

    def listed(counts: Counter[str], name: str) -> str:
        return ", ".join(f"{count} {name} {key}" for key, count in sorted(counts.items()))

    rows = [
        ("date", f"{datetime.now(UTC):%Y-%m-%d}"),
        ("torch", torch.__version__),
        ("kills", f"{toll.kills}: {listed(toll.by_victims, 'of rank')}"),
        ("where", listed(toll.by_place, "in")),
        ("runs", f"{toll.runs}, started again {toll.lives - toll.runs} times"),
        ("runs that ended bitwise equal", f"{toll.equal}"),
        ("updates done twice", f"{toll.redone}"),
        ("loader workers that had to be ended", f"{toll.orphans}"),
        ("seconds", f"{seconds:.0f}"),
    ]
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
    text = REPORT.read_text(encoding="utf-8")
    marked = re.sub(
        r"(<!-- kills -->\n).*(\n<!-- end of kills -->)", lambda mark: mark[1] + table + mark[2], text, flags=re.DOTALL
    )
    REPORT.write_text(marked, encoding="utf-8")


# --- one protection each ---


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_nothing_is_committed_before_every_rank_has_written(tmp_path: Path, number: int) -> None:
    """Rank 1 is held at some operation on its files: rank 0 comes as far as the agreement, and no further."""
    job = Job(tmp_path, epochs=1, every=1)
    with Life(job, 0, Stop(1, "save", number)) as life:
        until(lambda: life.halted() and life.trail(0).count("agreement") == 2, "rank 1 writes, and rank 0 waits for it")
        assert life.trail(0)[-1] == "agreement"
        assert [path.name for path in job.checkpoints.iterdir() if is_checkpoint_name(path.name)] == []
        life.release()
        assert life.wait() == [0, 0], life.stderr()


@pytest.mark.parametrize("stop", one_in(3, [Stop(0, "agreement", 4), Stop(0, "agreement", 5), Stop(0, "rename", 3)]), ids=str)
def test_nothing_is_removed_before_the_next_is_committed(tmp_path: Path, stop: Stop) -> None:
    """Wherever the second save is cut short, the first is there and whole."""
    job = Job(tmp_path, epochs=1, every=1)
    with Life(job, 0, stop) as life:
        until(life.halted, "the second save has begun")
        life.kill([0, 1])
        life.wait()
        assert "prune" not in life.trail(0)
    whole = [path for path in job.checkpoints.iterdir() if is_checkpoint_name(path.name)]
    assert [stored(path)[0][0] for path in whole] == [1]


@pytest.mark.slow
def test_no_more_stay_than_were_asked_for(tmp_path: Path) -> None:
    """The newest and the best, each time that a save is begun."""
    job = Job(tmp_path, world_size=1, epochs=1, every=1)
    with Life(job, 0, Stop(0, "rename", 7)) as life:  # the fourth save
        until(life.halted, "the fourth save")
        assert [stored(path)[0][0] for path in job.checkpoints.iterdir() if is_checkpoint_name(path.name)] == [3]
        life.release()
        assert life.wait() == [0], life.stderr()
    assert [stored(path)[0] for path in committed(job)] == [(7, 1, True)]


@pytest.mark.slow
def test_kills_before_the_removal_do_not_add_up(tmp_path: Path) -> None:
    """Each process commits one checkpoint and is killed before it has removed the one before: the next one does."""
    job, left = Job(tmp_path, world_size=1, epochs=1, every=1), []
    for number in range(4):
        with Life(job, number, Stop(0, "rename", 2)) as life:
            until(life.halted, "a checkpoint is committed")
            life.kill([0])
            life.wait()
        left.append(sorted(stored(path)[0][0] for path in committed(job)))
    assert left == [[1], [1, 2], [2, 3], [3, 4]]


@pytest.mark.slow
def test_the_best_stays_the_best_when_its_update_is_saved_again(tmp_path: Path) -> None:
    """Killed between the save after the last validation and that of the end, which takes the place of the first."""
    job = Job(tmp_path, world_size=1, epochs=1, every=100)
    with Life(job, 0, Stop(0, "rename", 3)) as life:
        until(life.halted, "the second save")
        [path] = [path for path in job.checkpoints.iterdir() if is_checkpoint_name(path.name)]
        score = read_manifest(path).score
        assert score is not None
        life.kill([0])
        life.wait()
    with Life(job, 1) as life:
        assert life.wait() == [0], life.stderr()
    assert [read_manifest(path).score for path in job.checkpoints.iterdir()] == [score]


@pytest.mark.slow
def test_a_finished_run_that_is_started_again_removes_what_a_kill_has_left(tmp_path: Path) -> None:
    """Killed while it removed an old checkpoint after its last save, it has nothing more to save, and still nothing stays."""
    job = Job(tmp_path, world_size=1, epochs=1)
    with Life(job, 0) as life:
        assert life.wait() == [0], life.stderr()
    before = sorted(job.checkpoints.iterdir())
    for name in (".removed-update-00000002-1234", ".unfinished-5678"):
        (job.checkpoints / name).mkdir()
        (job.checkpoints / name / "rank-00000.safetensors").write_bytes(b"left")
    with Life(job, 1) as life:
        assert life.wait() == [0], life.stderr()
        assert "nothing to do: epoch 1 and update 7 are done" in life.stderr()
    assert sorted(job.checkpoints.iterdir()) == before
