"""One run at a time writes to a directory of checkpoints, whatever happened to the run before, on this host or on another."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import small_checkpoints
from ignite_train import CheckpointError, UpdateOptions, checkpoint
from ignite_train.checkpoint import lock
from ignite_train.checkpoint.directory import CheckpointDirectory
from ignite_train.checkpoint.lock import LOCK, DirectoryLock, writer_of
from ignite_train.handlers import Checkpoint
from killing import Job, Life, Stop, committed, until
from processes import DEADLINE_SECONDS
from ranks import run_ranks
from small_checkpoints import QuickDisk, names, save


class Clock:
    """Stands for the clock of a start that waits: each sleep takes its time at once, and then `then` happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[int], None] = lambda _number: None) -> None:
        self.now, self.sleeps, self._then = 100.0, 0, then
        monkeypatch.setattr(lock, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        self._then(self.sleeps)


@pytest.fixture
def taken(tmp_path: Path) -> Any:
    """A lock on `tmp_path` that is given back at the end."""
    made = DirectoryLock(tmp_path)
    yield made
    made.release()


def leave(directory: Path, **fields: Any) -> None:
    """Writes the lock file of somebody else: a process on another host, if nothing else is said."""
    content = json.loads(lock._content("f" * 16, 0))
    (directory / LOCK).write_text(json.dumps({**content, "host": "elsewhere", "pid": 123, **fields}))


def here(pid: int) -> dict[str, Any]:
    """What a process of this host writes."""
    return {"host": lock._host(), "pid": pid, "born": lock._born(pid)[0]}


@pytest.fixture
def ended() -> int:
    """The number of a process that is no longer there."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# --- who may have it ---


@pytest.mark.parametrize("place", ["start", "join"])
def test_ctrl_c_as_the_thread_starts_or_ends_leaves_the_directory_free(
    place: str, tmp_path: Path, taken: DirectoryLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run of a notebook could not write there, and was told that another Checkpoint of the process did."""

    def pressed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(threading.Thread, place, pressed)
        try:
            taken.hold()
        finally:
            taken.release()
    assert taken.token == ""
    assert not (tmp_path / LOCK).exists()
    other = DirectoryLock(tmp_path)
    other.hold()
    other.release()


def test_a_lock_whose_count_stands_still_is_taken_over(tmp_path, taken, monkeypatch, caplog):
    """After the time that is documented, and no earlier; the log names who had it, and says at once what is waited for."""
    leave(tmp_path)
    clock = Clock(monkeypatch)
    with caplog.at_level(logging.INFO, "ignite_train"):
        taken.hold()

    assert lock.STALE_SECONDS <= clock.now - 100 < lock.STALE_SECONDS + 1
    assert writer_of(tmp_path) == taken.token
    assert f"pid 123 on host 'elsewhere' holds {tmp_path / LOCK}: waiting for up to 12 s to see" in caplog.messages[0]
    assert "pid 123 on host 'elsewhere' has shown no sign of life for 12 s: this run takes over" in caplog.text


def test_a_lock_whose_count_advances_is_refused(tmp_path, taken, monkeypatch):
    """As soon as it does: one line that names host and process. The lock stays."""
    leave(tmp_path)
    clock = Clock(monkeypatch, lambda number: leave(tmp_path, beats=1) if number == 7 else None)
    with pytest.raises(CheckpointError) as caught:
        taken.hold()

    assert clock.sleeps == 7
    assert str(caught.value).startswith(
        f"pid 123 on host 'elsewhere' writes checkpoints to {tmp_path}; end that run, or choose"
    )
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == [LOCK]
    assert writer_of(tmp_path) == "f" * 16
    assert taken.token == ""


def test_a_lock_that_is_given_back_meanwhile_is_free(tmp_path, taken, monkeypatch):
    """A run that ends while another start waits for it."""
    leave(tmp_path)
    clock = Clock(monkeypatch, lambda number: (tmp_path / LOCK).unlink() if number == 3 else None)
    taken.hold()

    assert clock.sleeps == 3
    assert writer_of(tmp_path) == taken.token


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"pid": "x\\u001b[31m", "token": 7}', b'{"token": [7]}'])
def test_a_file_that_is_no_lock_is_taken_over(tmp_path, taken, monkeypatch, content):
    """Its owner was killed before it had written it, or somebody else put it there."""
    (tmp_path / LOCK).write_bytes(content)
    Clock(monkeypatch)
    taken.hold()

    assert writer_of(tmp_path) == taken.token


def test_a_pipe_in_place_of_a_lock_is_taken_over(tmp_path, taken, monkeypatch):
    """A start that opened it as a file would wait for a writer for ever."""
    os.mkfifo(tmp_path / LOCK)
    Clock(monkeypatch)
    start = threading.Thread(target=taken.hold, daemon=True)
    start.start()
    start.join(DEADLINE_SECONDS)

    assert not start.is_alive()
    assert writer_of(tmp_path) == taken.token


def test_a_link_in_place_of_a_lock_is_an_error(tmp_path, taken, monkeypatch):
    """Somebody else has put it there: neither the link nor the file behind it is touched."""
    (tmp_path / "file").write_text("theirs")
    (tmp_path / LOCK).symlink_to(tmp_path / "file")
    Clock(monkeypatch)
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.ELOOP))):
        taken.hold()

    assert (tmp_path / LOCK).is_symlink()
    assert (tmp_path / "file").read_text() == "theirs"


def test_a_killed_process_of_this_host_is_not_waited_for(tmp_path, taken, monkeypatch, ended, caplog):
    """It is known to be gone."""
    leave(tmp_path, **here(ended))
    clock = Clock(monkeypatch)
    taken.hold()

    assert clock.sleeps == 0
    assert f"pid {ended} on host" in caplog.text
    assert "is no longer running: this run takes over" in caplog.text


def test_a_killed_process_that_its_parent_has_not_noticed_is_gone(tmp_path, taken, monkeypatch):
    """As a launcher leaves it for a moment: its number is still taken."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    leave(tmp_path, **here(process.pid))
    clock = Clock(monkeypatch)
    taken.hold()

    assert clock.sleeps == 0
    process.wait()


def test_a_number_that_another_process_has_by_now_is_gone(tmp_path, taken, monkeypatch):
    """A process is known by its number and by when it was started."""
    leave(tmp_path, **{**here(os.getppid()), "born": "1"})
    clock = Clock(monkeypatch)
    taken.hold()

    assert clock.sleeps == 0


def test_the_number_of_this_process_was_that_of_one_that_is_gone(tmp_path, taken, monkeypatch):
    """Where it cannot be known when a process was started, and this one has not taken the lock."""
    leave(tmp_path, **{**here(os.getpid()), "born": ""})
    clock = Clock(monkeypatch)
    taken.hold()

    assert clock.sleeps == 0


@pytest.mark.parametrize("differs", [{"host": "elsewhere"}, {"space": "another container"}], ids=str)
def test_a_process_that_cannot_be_looked_for_is_waited_for(tmp_path, taken, monkeypatch, ended, differs):
    """On another host, or in a container with process numbers of its own, the same number means nothing."""
    leave(tmp_path, **{**here(ended), **differs})
    clock = Clock(monkeypatch)
    taken.hold()

    assert clock.now - 100 >= lock.STALE_SECONDS


def test_a_suspended_process_of_this_host_is_waited_for(tmp_path, taken, monkeypatch):
    """It is there, and may wake up; that it does not count shows only with time."""
    leave(tmp_path, **here(os.getppid()))
    clock = Clock(monkeypatch)
    taken.hold()

    assert clock.now - 100 >= lock.STALE_SECONDS


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EPERM, "Operation not permitted"), OverflowError("too large")], ids=["other user", "number"]
)
def test_a_process_that_may_not_be_asked_is_waited_for(tmp_path, taken, monkeypatch, error):
    """Another user's process lives, although this one may send it no signals; and a number may be too large for the system."""

    def refuse(pid: int, signal: int) -> None:
        assert (pid, signal) == (os.getppid(), 0)  # any other signal could end it
        raise error

    leave(tmp_path, **here(os.getppid()))
    monkeypatch.setattr(os, "kill", refuse)
    clock = Clock(monkeypatch, lambda _: leave(tmp_path, **here(os.getppid()), beats=1))
    with pytest.raises(CheckpointError, match=f"pid {os.getppid()} on host .* writes checkpoints to .*; end that run"):
        taken.hold()

    assert clock.sleeps == 1


def test_two_in_one_process(tmp_path, taken, monkeypatch):
    """The same directory twice is refused at once, two directories are not."""
    clock = Clock(monkeypatch)
    taken.hold()
    with pytest.raises(
        CheckpointError, match=r"another Checkpoint of this process is writing to .*; give each its own directory"
    ):
        DirectoryLock(tmp_path).hold()
    (tmp_path / "other").mkdir()
    other = DirectoryLock(tmp_path / "other")
    other.hold()
    other.release()

    assert clock.sleeps == 0
    assert names(tmp_path / "other") == []


def test_of_two_that_take_over_at_the_same_time_one_gives_way(tmp_path, taken, monkeypatch):
    """What stands in the file is looked at again just before it is replaced."""
    leave(tmp_path)
    clock = Clock(monkeypatch)
    read = lock._read

    def read_late(path: Path) -> bytes | None:
        found = read(path)
        if clock.now - 100 >= lock.STALE_SECONDS:
            leave(tmp_path, token="e" * 16)
        return found

    monkeypatch.setattr(lock, "_read", read_late)
    with pytest.raises(CheckpointError, match="another run has just taken over"):
        taken.hold()

    assert writer_of(tmp_path) == "e" * 16
    assert names(tmp_path) == [LOCK]


def test_a_run_of_this_host_that_lives_is_waited_for(tmp_path, taken, monkeypatch):
    """By what it has written itself, as another process reads it."""
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", DEADLINE_SECONDS)
    taken.hold()
    monkeypatch.setattr(lock, "_held_here", set())
    monkeypatch.setattr(os, "getpid", lambda: 1)
    clock, other = Clock(monkeypatch), DirectoryLock(tmp_path)
    other.hold()
    other.release()

    assert clock.now - 100 >= lock.STALE_SECONDS


def test_a_process_that_has_grown_is_still_the_same(tmp_path, taken, monkeypatch):
    """It is known by when it was started, which does not change; what it takes and what it has done do."""
    grows = "input(); more = bytearray(2**26); print(sum(range(10**6)), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", grows], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        leave(tmp_path, **here(process.pid))
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        clock = Clock(monkeypatch)
        taken.hold()
        process.stdin.write("\n")

    assert clock.now - 100 >= lock.STALE_SECONDS


# --- while it is held ---


def test_the_count_advances_while_the_run_lives(tmp_path, taken, monkeypatch):
    """By a thread, in the file that others read; at the end both are gone."""
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.01)
    before = {*threading.enumerate()}
    taken.hold()
    until(lambda: json.loads((tmp_path / LOCK).read_bytes())["beats"] >= 3, "the count advances")
    taken.release()

    assert names(tmp_path) == []
    assert {*threading.enumerate()} <= before


def test_a_process_that_wakes_up_leaves_the_lock_to_the_other(tmp_path, taken):
    """Its count does not go into the file of the run that has taken over, its commits fail, and its end leaves that file."""
    taken.hold()
    other = DirectoryLock(tmp_path)
    other._take_over("a" * 16, (tmp_path / LOCK).read_bytes(), "stood still")
    before = (tmp_path / LOCK).read_bytes()
    taken._count(taken.token)
    for look in (taken.check, taken.hold):
        with pytest.raises(
            CheckpointError, match=r"has taken over .* while this run stood still; this run must not write there"
        ):
            look()
    taken.release()

    assert (tmp_path / LOCK).read_bytes() == before
    assert names(tmp_path) == [LOCK]


@pytest.mark.parametrize("is_held", [False, True], ids=["new", "of another"])
def test_a_full_disk_leaves_no_part_of_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_held: bool) -> None:
    """A later start does not wait for it. The file of an owner from whom it would have been taken over stays as it was."""
    Clock(monkeypatch)
    if is_held:
        leave(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            DirectoryLock(tmp_path).hold()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_lock_file_that_somebody_removed_is_made_again(tmp_path, taken):
    """As the directory is: a run continues to save."""
    taken.hold()
    (tmp_path / LOCK).unlink()
    taken.check()

    assert writer_of(tmp_path) == taken.token


def test_what_was_given_back_is_not_held(tmp_path, taken):
    """A thread that still writes when the run is over commits nothing; the one that counted has ended."""
    taken.hold()
    assert "CheckpointLock" in [thread.name for thread in threading.enumerate()]
    taken.release()
    assert "CheckpointLock" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(CheckpointError, match="this run has ended and writes no more checkpoints"):
        taken.check()


# --- commits ---


class Overtaken(QuickDisk):
    """A disk on which another run takes over when the manifest is there, and writes a checkpoint of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write_file(self, path: Path, parts: Any, size: int) -> None:
        super().write_file(path, parts, size)
        if path.name == "manifest.json":
            leave(self._directory, token="b" * 16)
            (self._directory / f".unfinished-{'b' * 16}-1234").mkdir()


def test_a_run_that_was_overtaken_commits_nothing_and_removes_nothing_of_the_other(tmp_path, taken):
    """A process that is suspended between its last write and the commit: one line, and the other run's files stay."""
    save(tmp_path, 1)
    place = CheckpointDirectory(tmp_path, Overtaken(tmp_path), taken)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"rank 0, LockTakenOverError: pid 123 on host 'elsewhere' has taken over"):
            save(tmp_path, 2, place=place)

    assert names(tmp_path) == sorted([f".unfinished-{'b' * 16}-1234", LOCK, "update-00000001"])


class OvertakenLater(QuickDisk):
    """A disk on which another run takes over when a checkpoint has got its name."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if target.name.startswith("update-"):
            leave(target.parent, token="b" * 16)


def test_a_run_that_was_overtaken_after_its_commit_removes_no_old_checkpoint(tmp_path, taken, caplog):
    """Which of them stay is for the other run to say. The commit stands, and the log says why nothing was removed."""
    save(tmp_path, 1)
    save(tmp_path, 2, place=CheckpointDirectory(tmp_path, OvertakenLater(), taken), last=1)

    assert names(tmp_path) == [LOCK, "update-00000001", "update-00000002"]
    assert "old checkpoints could not be removed: pid 123 on host 'elsewhere' has taken over" in caplog.text


def test_what_another_run_writes_is_not_tidied_away(tmp_path, taken):
    """A start that was refused, or looks only, leaves it; what earlier processes have left is removed."""
    leave(tmp_path, token="b" * 16)
    mine = [f".unfinished-{'b' * 16}-1234", LOCK]
    for name in (*mine[:1], ".unfinished-5678", f".unfinished-{'c' * 16}-1234", ".removed-update-00000001-12"):
        (tmp_path / name).mkdir()
    CheckpointDirectory(tmp_path, QuickDisk()).tidy()
    assert names(tmp_path) == sorted(mine)

    taken._take_over("d" * 16, (tmp_path / LOCK).read_bytes(), "stood still")
    CheckpointDirectory(tmp_path, QuickDisk()).tidy()
    assert names(tmp_path) == [LOCK]


def test_what_a_killed_takeover_has_left_is_removed(tmp_path, taken):
    """By the next run that holds the lock."""
    (tmp_path / f"{LOCK}-{'c' * 16}").write_text("")
    taken.hold()
    CheckpointDirectory(tmp_path, QuickDisk(), taken).tidy()

    assert names(tmp_path) == [LOCK]


def test_the_token_is_in_the_name_of_what_is_not_finished(tmp_path, taken):
    """So that another run knows whose it is, and leaves it; the next save of this run removes it."""
    place = CheckpointDirectory(tmp_path, QuickDisk(), taken)
    name = place.begin()

    assert name.startswith(f".unfinished-{taken.token}-")
    CheckpointDirectory(tmp_path, QuickDisk()).tidy()
    assert names(tmp_path) == [LOCK, name]
    again = place.begin()
    assert names(tmp_path) == [LOCK, again]
    assert again != name


# --- runs ---


@pytest.mark.slow
def test_a_run_holds_its_directory_and_gives_it_back_however_it_ends(tmp_path, build, micro_batches):
    """At its end, at an error, where there is nothing to do, where it is refused; inside, the same directory is refused."""

    def run(directory: Path, **options: Any) -> None:
        setup = build()
        Checkpoint(directory).attach(setup.trainer)
        handler = options.pop("handler", lambda: seen.append(LOCK in names(directory)))
        setup.trainer.add_event_handler("EPOCH_STARTED", handler)
        setup.trainer.run(micro_batches, **{"max_epochs": 1, **options})

    def fail() -> None:
        raise ZeroDivisionError

    seen: list[bool] = []
    run(tmp_path / "a")
    run(tmp_path / "a")  # nothing to do
    with pytest.raises(ValueError, match="max_epochs must not be below"):
        run(tmp_path / "a", max_epochs=2, handler=lambda: None) or run(tmp_path / "a")
    with pytest.raises(ValueError, match="resume must not be 'never'"):
        run(tmp_path / "a", resume="never")
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "a", max_epochs=3, handler=fail)
    with pytest.raises(CheckpointError, match="another Checkpoint of this process is writing to"):
        run(tmp_path / "a", max_epochs=3, handler=lambda: run(tmp_path / "a", max_epochs=4))
    run(tmp_path / "a", max_epochs=3, handler=lambda: run(tmp_path / "b"))

    assert seen == [True, True]
    assert LOCK not in names(tmp_path / "a") + names(tmp_path / "b")


def _refused(directory: Path, advances: bool) -> str:
    """What the start of two ranks says where another run writes."""
    import torch

    from ignite_train import create_trainer
    from ignite_train.ranks import collectives

    if collectives.is_main_rank():
        leave(directory)
        lock.STALE_SECONDS = 0.2
        if advances:
            sleep = lock.time.sleep
            lock.time = SimpleNamespace(  # type: ignore[assignment]
                monotonic=lambda: 0.0, sleep=lambda seconds: (sleep(seconds), leave(directory, beats=1))
            )
    model = torch.nn.Linear(1, 1)
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, x: model(x).sum(),
        options=UpdateOptions(reduction="explicit"),
    )
    Checkpoint(directory).attach(trainer)
    try:
        trainer.run([torch.ones(1, 1)], max_epochs=1)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("advances", [True, False])
def test_all_ranks_are_refused_alike(tmp_path, advances):
    """Rank 0 alone looks at the lock; with the other run alive both raise the same line, without it both train."""
    first, second = run_ranks(_refused, tmp_path, advances)

    assert first == second
    assert ("rank 0, CheckpointError: pid 123 on host 'elsewhere' writes checkpoints to" in first) == advances
    assert names(tmp_path) == ([LOCK] if advances else [LOCK, "update-00000001.1"])  # a mark, for an owner who may wake up


@pytest.mark.slow
def test_a_second_start_of_a_running_job_is_refused(tmp_path: Path) -> None:
    """Two processes: the second ends with a line that names the first, which is not disturbed."""
    job = Job(tmp_path, world_size=1, epochs=1, every=1)
    with Life(job, 0, Stop(0, "training", 4)) as first:
        until(first.halted, "the first trains")
        with Life(job, 1) as second:
            assert second.wait() == [1]
            assert f"pid {first.processes[0].pid} on host" in second.stderr()
            assert "writes checkpoints to" in second.stderr()
        first.release()
        assert first.wait() == [0], first.stderr()
    assert all(checkpoint.verify(path) is None for path in committed(job))
    assert all(path in committed(job) for path in job.checkpoints.iterdir())


def test_an_owner_who_wakes_up_after_the_next_run_has_ended_is_told(tmp_path, taken, monkeypatch):
    """The run that took over leaves a mark when it gives the lock back, as the starts after it do, which need not wait."""
    leave(tmp_path)
    Clock(monkeypatch)
    taken.hold()
    taken.release()
    sleeper = DirectoryLock(tmp_path)
    sleeper.token, sleeper._held_in = "f" * 16, (os.getpid(), *lock._identity(tmp_path))
    with pytest.raises(CheckpointError, match="has taken over"):
        sleeper.check()
    for _ in range(2):
        clock, later = Clock(monkeypatch), DirectoryLock(tmp_path)
        later.hold()
        later.check()
        assert clock.sleeps == 0
        with pytest.raises(CheckpointError, match="has taken over"):
            sleeper.check()
        later.release()
        assert writer_of(tmp_path) == ""
        with pytest.raises(CheckpointError, match="has taken over"):
            sleeper.check()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [Stop(0, "training", 4), Stop(0, "save", 8), Stop(0, "rename", 5)], ids=str)
def test_a_suspended_job_that_wakes_up_writes_nothing_more(tmp_path: Path, stop: Stop) -> None:
    """Another start has taken over: the first ends with a line, and what the second has written is whole and the newest."""
    job = replace(Job(tmp_path, world_size=1, epochs=2, every=1), stale_seconds=0.5)
    with Life(job, 0, stop) as first:
        until(first.halted, "the first is somewhere")
        first.send(signal.SIGSTOP, 0)
        stat = Path(f"/proc/{first.processes[0].pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it counts no more")
        with Life(job, 1) as second:
            assert second.wait() == [0], second.stderr()
            assert "has shown no sign of life" in second.stderr()
        before = {path.name: sorted(file.read_bytes() for file in path.iterdir()) for path in committed(job)}
        first.release()
        first.send(signal.SIGCONT, 0)
        assert first.wait() == [1]
        assert "CheckpointError" in first.stderr()
    after = {path.name: sorted(file.read_bytes() for file in path.iterdir()) for path in committed(job)}
    assert {name: after.get(name) for name in before} == before
    assert all(checkpoint.verify(path) is None for path in committed(job))
    assert newest_update(job) == 14


def newest_update(job: Job) -> int:
    found = checkpoint.find(job.checkpoints)[-1].manifest
    assert found is not None
    return found.update


# --- another directory under a run ---


def _renamed(directory: Path) -> None:
    directory.rename(directory.with_name("elsewhere"))


def _removed(directory: Path) -> None:
    """Gone at once. The thread that removes old checkpoints would write a lock file again while the directory is emptied."""
    gone = directory.with_name("gone")
    directory.rename(gone)
    shutil.rmtree(gone)


def _replaced(directory: Path) -> None:
    _renamed(directory)
    directory.mkdir()


def _link_is_switched(directory: Path) -> None:
    """As where a disk is no longer mounted there: the way is the same, and leads elsewhere."""
    directory.parent.joinpath("other").mkdir()
    directory.unlink()
    directory.symlink_to(directory.parent / "other", target_is_directory=True)


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("change", [_renamed, _removed, _replaced, _link_is_switched])
def test_a_run_does_not_save_to_another_directory_than_it_began_with(
    tmp_path: Path, build: Any, micro_batches: Any, caplog: Any, change: Callable[[Path], None], on_error: str
) -> None:
    """One that is gone, or not the same, is a failed save: nothing is made there; `on_error` decides, the last one raises."""
    directory = tmp_path / "run"
    if change is _link_is_switched:
        (tmp_path / "disk").mkdir()
        directory.symlink_to(tmp_path / "disk", target_is_directory=True)
    setup = build()
    Checkpoint(directory, every=1, on_error=on_error, asynchronous=False).attach(setup.trainer)  # type: ignore[arg-type]

    def act(trainer: Any) -> None:
        if trainer.state.iteration == 2:
            change(directory)

    setup.trainer.add_event_handler("ITERATION_COMPLETED", act)
    with pytest.raises(CheckpointError, match=r"was (renamed, )?removed, replaced or unmounted") as caught:
        setup.trainer.run(micro_batches, max_epochs=2)

    assert not directory.exists() or names(directory) == []
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)
    lost = [line for line in caplog.messages if "training continues" in line]
    assert bool(lost) == (on_error == "warn")
    assert setup.trainer.state.iteration == (2 if on_error == "raise" else 6)


def test_a_directory_that_comes_back_is_saved_to_again(tmp_path: Path, taken: DirectoryLock) -> None:
    """As one does that is mounted again; and what a run has given back may be removed before the next."""
    directory = tmp_path / "run"
    place = CheckpointDirectory(directory, QuickDisk(), DirectoryLock(directory))
    save(directory, 1, place=place)
    _renamed(directory)
    with pytest.raises(CheckpointError, match="unmounted"):
        save(directory, 2, place=place)
    (tmp_path / "elsewhere").rename(directory)
    save(directory, 3, place=place)
    assert place.lock is not None
    place.lock.release()
    shutil.rmtree(directory)
    save(directory, 4, place=place)
    place.lock.release()
    assert names(directory) == ["update-00000004"]


def test_a_run_that_has_lost_its_lock_ends_also_with_warnings(
    tmp_path: Path, build: Any, micro_batches: Any, caplog: Any
) -> None:
    """A lock that was taken over never comes back: no line says that training continues."""
    setup = build()
    Checkpoint(tmp_path, every=1, on_error="warn", asynchronous=False).attach(setup.trainer)

    def act(trainer: Any) -> None:
        if trainer.state.iteration == 2:
            leave(tmp_path, token="b" * 16)

    setup.trainer.add_event_handler("ITERATION_COMPLETED", act)
    with pytest.raises(CheckpointError, match="has taken over"):
        setup.trainer.run(micro_batches, max_epochs=2)
    assert setup.trainer.state.iteration == 2
    assert "training continues" not in caplog.text


FORKED = """
import os, sys, threading
from pathlib import Path
from ignite_train.checkpoint import lock, writer as writer_module
from small_checkpoints import QuickDisk, contents, keep, manifest
from ignite_train.checkpoint.writer import CheckpointWriter

writer_module._PATIENCE_SECONDS = 1000.0

class Slow(QuickDisk):
    begun, go_on = threading.Event(), threading.Event()
    def create(self, path):
        self.begun.set()
        assert self.go_on.wait(100)
        return super().create(path)

writer = CheckpointWriter(Path(sys.argv[1]), keep(2), asynchronous=True, warns=False)
writer.directory.disk = Slow()
with writer.holding():
    writer.prepare()
    writer.save(contents(1, "run"), manifest(1))
    assert Slow.begun.wait(100)
    child = os.fork()
    if child == 0:
        try:
            raise SystemExit(3)
        finally:
            writer.wait()
    token = lock.writer_of(writer.directory.path)
    status = os.waitpid(child, 0)[1]
    assert token and lock.writer_of(writer.directory.path) == token
    assert os.waitstatus_to_exitcode(status) == 3
    Slow.go_on.set()
    writer.wait()
print(writer.latest.name)
"""


@pytest.mark.slow
def test_a_forked_child_neither_waits_for_its_parents_save_nor_releases_its_lock(tmp_path: Path) -> None:
    """It leaves at once by an exception, while the parent's thread, which it does not have, is busy."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path)]
    support = str(Path(small_checkpoints.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), support])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS / 4, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "update-00000001"), done.stderr
