"""If a save is cut short anywhere, by a crash, a power cut or an error of the disk, a whole checkpoint remains."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ignite.engine import Events

import ignite_train
from ignite_train import CheckpointError, TrainEvents, checkpoint
from ignite_train.checkpoint.directory import CheckpointDirectory, Contents, try_out
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.tree import TreeEncoder
from ignite_train.errors import DamagedCheckpointError
from ignite_train.handlers import Checkpoint
from ignite_train.ranks import collectives
from power_cuts import Operation, Recorder, disk_states, lay_out
from processes import DEADLINE_SECONDS
from ranks import run_ranks
from small_checkpoints import QuickDisk, keep, names, newest, read, save

READERS = (ignite_train.checkpoint.tensor_files, ignite_train.checkpoint.manifest, ignite_train.checkpoint.manifest)
OPERATIONS = (
    *("make_directory", "create", "write", "sync", "close", "rename", "sync_directory"),
    *("remove_file", "remove_directory", "names"),
)


class Crash(BaseException):
    """The process ends here."""


class Faulty(QuickDisk):
    """A disk on which something happens before one of the operations.

    Args:
        at: number of the operation, from 0.
        fault: what happens, given the name of the operation.
        lasting: whether it happens at all later ones too.

    Attributes:
        done: the operations that were asked for.
    """

    def __init__(self, at: int | None, fault: Callable[[str], None], *, lasting: bool = False) -> None:
        self.at, self.fault, self.lasting = at, fault, lasting
        self.done: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._faulty(name, found) if name in OPERATIONS else found

    def _faulty(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.done.append(name)
            number = len(self.done) - 1
            if self.at is not None and (number == self.at or (self.lasting and number > self.at)):
                try:
                    self.fault(name)
                except OSError:
                    if name == "close":
                        operation(*arguments)  # as close does, whatever it says
                    raise
            return operation(*arguments)

        return call


def fault(code: int) -> Callable[[str], None]:
    """An error of the system."""

    def fail(_name: str) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def crash(_name: str) -> None:
    raise Crash


def ignore(_name: str) -> None:
    pass


def failure(directory: Path, number: int, disk: Disk, **fields: Any) -> str:
    """What a save says that fails; nothing if it does not."""
    try:
        save(directory, number, disk=disk, **fields)
    except CheckpointError as error:
        return str(error)
    return ""


def number_of_operations(directory: Path, number: int) -> int:
    """How many operations the next save has; it is done in a copy."""
    copy = directory.with_name("counted")
    if directory.exists():
        shutil.copytree(directory, copy)
    disk = Faulty(None, ignore)
    save(copy, number, disk=disk)
    shutil.rmtree(copy)
    return len(disk.done)


@pytest.fixture
def attempts(tmp_path: Path) -> Callable[[], Iterator[tuple[int, Path]]]:
    """Gives, for each operation of save 4, a directory with saves 2 and 3 in it; at most as often as it has operations."""
    whole = tmp_path / "whole"
    for number in (1, 2, 3):
        save(whole, number)

    def attempts() -> Iterator[tuple[int, Path]]:
        total = number_of_operations(whole, 4)
        assert total >= 25
        for at in range(total):
            directory = tmp_path / f"at-{at}"
            shutil.copytree(whole, directory)
            yield at, directory
            shutil.rmtree(directory, ignore_errors=True)

    return attempts


def is_tidy(directory: Path, last: int = 2) -> bool:
    """Whether there are checkpoints only, and no more of them than are kept."""
    return all(name.startswith("update-") for name in names(directory)) and len(names(directory)) <= last


# --- crashes ---


def test_a_crash_before_any_operation_leaves_the_old_or_the_new_one(attempts):
    """Stopped before each operation in turn, also those of removing older ones: what is found is whole, and nothing is lost."""
    found = []
    for at, directory in attempts():
        with pytest.raises(Crash):
            save(directory, 4, disk=Faulty(at, crash, lasting=True))
        found.append(newest(directory))
        save(directory, 5)
        assert is_tidy(directory), names(directory)
        assert newest(directory) == 5

    assert set(found) == {3, 4}
    assert found == sorted(found)  # from one moment on it is the new one


def test_a_crash_in_the_first_save_leaves_nothing_or_the_new_one(tmp_path):
    """Without an older one, in a directory that must be created: no checkpoint, or a whole one."""
    found = []
    for at in range(number_of_operations(tmp_path / "runs/first", 1)):
        directory = tmp_path / f"at-{at}/first"
        with pytest.raises(Crash):
            save(directory, 1, disk=Faulty(at, crash, lasting=True))
        found.append(newest(directory))
        save(directory, 2)
        assert is_tidy(directory)
        assert newest(directory) == 2

    assert [number for number in found if number is not None] == [1, 1]  # before the rename is durable, and the look round
    assert found[-1] == 1


def test_crash_after_crash_leaves_no_more_than_one_save_does(attempts):
    """Saves that are stopped one after the other, each at another operation, leave nothing to pile up."""
    for at, directory in attempts():
        if at % 5 == 0:
            for number in range(4, 9):
                with suppress(Crash):
                    save(directory, number, disk=Faulty(at + number - 4, crash, lasting=True))
                assert len([name for name in names(directory) if name.startswith(".")]) <= 2
            assert newest(directory) is not None
            save(directory, 9)
            assert is_tidy(directory)


# --- power cuts ---


class Turns:
    """Threads that stand for ranks: one works at a time, in rank order from exchange to exchange, so each time the same."""

    def __init__(self, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world_size, self._local = world_size, threading.local()
        self._turn, self._changed = 0, threading.Condition()
        self._values: dict[int, dict[int, Any]] = {}
        monkeypatch.setattr(collectives, "rank", lambda: self._local.rank)

    def exchange(self, value: Any) -> list[Any]:
        self._local.rounds += 1
        values = self._values.setdefault(self._local.rounds, {})
        values[self._local.rank] = value
        self._pass_on()
        self._await_turn()
        return [values[rank] for rank in range(self.world_size)]

    def run(self, work: Callable[[], Any]) -> None:
        """Does `work` on each rank."""
        failures: list[BaseException] = []

        def rank(number: int) -> None:
            self._local.rank, self._local.rounds = number, 0
            try:
                self._await_turn()
                work()
            except BaseException as error:
                failures.append(error)
            self._pass_on()

        threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        self._values.clear()
        if failures:
            raise failures[0]

    def _pass_on(self) -> None:
        with self._changed:
            self._turn = (self._turn + 1) % self.world_size
            self._changed.notify_all()

    def _await_turn(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == self._local.rank, timeout=DEADLINE_SECONDS)


def record(root: Path, monkeypatch: pytest.MonkeyPatch, *, world_size: int = 1, last: int = 1, saves: int = 4) -> Recorder:
    """The operations of a few saves, in a directory that does not exist before."""
    disk, turns, here = Recorder(root), Turns(world_size, monkeypatch), root / "runs/here"
    for number in range(1, saves + 1):
        arguments = {"disk": disk, "last": last, "exchange": turns.exchange, "world_size": world_size}
        turns.run(partial(save, here, number, **arguments))
        disk.note("returned", number)
    monkeypatch.undo()
    return disk


def violations(log: list[Operation], scratch: Path, *, after_commit: bool = False) -> Iterator[str]:
    """Goes through all states and gives `ok`, or what is wrong there.

    `wrong`: something false is read. `lost`: what was committed is not found. `damaged`: it is, but something that is not
    whole has the name of a checkpoint.
    """
    for number, (tree, returned) in enumerate(disk_states(log, after_commit=after_commit)):
        root = scratch / f"state-{number}"
        root.mkdir()
        lay_out(tree, root)
        try:
            found = newest(root / "runs/here")
        except AssertionError:
            yield "wrong"
        else:
            damaged = any(not is_whole(path) for path in (root / "runs/here").glob("update-*"))
            yield "lost" if (found or 0) < (returned or 0) else "damaged" if damaged else "ok"
        shutil.rmtree(root)


def is_whole(path: Path) -> bool:
    """Whether a checkpoint is one."""
    try:
        checkpoint.verify(path)
    except DamagedCheckpointError:
        return False
    return True


def without(kind: str, log: list[Operation]) -> list[Operation]:
    """What would be on record if the disk did not do this."""
    return [operation for operation in log if operation[0] != kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "last", "saves"),
    [(1, 1, 3), (1, 2, 4), (2, 1, 1), pytest.param(2, 1, 4, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])],
)
def test_a_power_cut_loses_nothing_that_was_committed(tmp_path, monkeypatch, world_size, last, saves):
    """In every state that the disk can be in, the save that returned last, or one after it, is found, and all are whole."""
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    root.mkdir()
    scratch.mkdir()
    found = [*violations(record(root, monkeypatch, world_size=world_size, last=last, saves=saves).log, scratch)]

    assert len(found) >= 150
    assert {*found} == {"ok"}


@pytest.mark.slow
def test_after_a_power_cut_the_next_save_tidies(tmp_path, monkeypatch):
    """From any of these states a run continues to save, and nothing of what was cut short or damaged is left over."""
    root = tmp_path / "root"
    root.mkdir()
    for number, (tree, _) in enumerate(disk_states(record(root, monkeypatch, saves=2).log)):
        there = tmp_path / f"state-{number}"
        there.mkdir()
        lay_out(tree, there)
        save(there / "runs/here", 9, last=1)
        assert newest(there / "runs/here") == 9
        assert len(names(there / "runs/here")) == 1
        shutil.rmtree(there)


@pytest.mark.parametrize("kind", ["sync", "sync_directory"])
def test_the_model_of_power_cuts_sees_what_is_not_waited_for(tmp_path, monkeypatch, kind):
    """With a disk that does not wait for the bytes of files, or for names, the same states hold one in which a save is lost."""
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    root.mkdir()
    scratch.mkdir()
    log = record(root, monkeypatch, saves=1).log

    assert "lost" in violations(without(kind, log), scratch, after_commit=True)


def test_every_wait_is_needed(tmp_path, monkeypatch):
    """Without any single one of the waits of a first save, some state loses it. So none is there in vain, and none missing."""
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    root.mkdir()
    log = record(root, monkeypatch, saves=1).log
    waits = [index for index, operation in enumerate(log) if operation[0].startswith("sync")]
    needless = []
    for number, index in enumerate(waits):
        (scratch / str(number)).mkdir(parents=True)
        if "lost" not in violations([*log[:index], *log[index + 1 :]], scratch / str(number), after_commit=True):
            needless.append(log[index])

    assert len(waits) == 7  # two names on the way, three files, the names in the checkpoint, its own name
    assert needless == []


def test_the_model_of_power_cuts_sees_a_removal_before_the_commit(tmp_path, monkeypatch):
    """If older ones went before the new one is there, as in Ignite, some state would hold none."""
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    root.mkdir()
    scratch.mkdir()
    prune = CheckpointDirectory.prune
    monkeypatch.setattr(CheckpointDirectory, "prune", lambda self, _retention: None)
    begin = CheckpointDirectory.begin

    def remove_and_begin(self: CheckpointDirectory) -> str:
        name = begin(self)
        prune(self, keep(0))
        return name

    monkeypatch.setattr(CheckpointDirectory, "begin", remove_and_begin)

    assert "lost" in violations(record(root, monkeypatch, saves=2).log, scratch)


@pytest.mark.slow
def test_the_model_of_power_cuts_sees_a_reader_without_checksums(tmp_path, monkeypatch):
    """Without waiting and without checksums, some state is read as something that was never saved."""
    root, scratch = tmp_path / "root", tmp_path / "scratch"
    root.mkdir()
    scratch.mkdir()
    with monkeypatch.context() as patch:
        for module in (*READERS, ignite_train.checkpoint.directory):
            patch.setattr(module, "zlib_ng", SimpleNamespace(crc32=lambda *_: 0))
        log = without("sync", record(root, patch, saves=1).log)
        for module in READERS:
            patch.setattr(module, "zlib_ng", SimpleNamespace(crc32=lambda *_: 0))

        assert "wrong" in violations(log, scratch, after_commit=True)


def test_the_disk_waits_for_what_it_is_told_to(tmp_path, monkeypatch):
    """The record is of what is asked for. The real disk does it: each file with all its bytes, and the names, in order."""
    synced: list[tuple[int, int | None]] = []

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, None if os.path.isdir(f"/proc/self/fd/{descriptor}") else status.st_size))  # noqa: PTH112

    monkeypatch.setattr(os, "fsync", fsync)
    path = save(tmp_path / "run", 1, disk=Disk())
    files = [path / name for name in ("rank-00000.safetensors", "rank-00000.json", "manifest.json")]

    inodes = [(tmp_path.stat().st_ino, None), *[(file.stat().st_ino, file.stat().st_size) for file in files]]
    assert synced == [*inodes, (path.stat().st_ino, None), (path.parent.stat().st_ino, None)]


# --- errors of the disk ---


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_an_error_at_any_operation_is_told_and_harms_nothing(attempts, caplog, code):
    """Each operation fails once: an error in one line that names rank and cause, or a warning if it was only about removing."""
    outcomes = []
    for at, directory in attempts():
        caplog.clear()
        disk = Faulty(at, fault(code))
        message = failure(directory, 4, disk)
        outcomes.append("error" if message else "warning")
        if message:
            assert "rank 0, OSError" in message
            assert os.strerror(code) in message
            assert "\n" not in message
            assert newest(directory) == (3 if "rename" not in disk.done[:at] else 4)
            assert not [name for name in names(directory) if name.startswith(".")]
        else:
            assert os.strerror(code) in caplog.text
            assert newest(directory) == 4
        save(directory, 5)
        assert is_tidy(directory)
        assert newest(directory) == 5

    assert outcomes.count("error") >= 20
    assert outcomes.count("warning") >= 5


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fails_for_good_keeps_what_it_has(attempts, caplog, code):
    """From some operation on nothing works any more, tidying neither: what was there is still there when the disk is mended."""
    for at, directory in attempts():
        message = failure(directory, 4, Faulty(at, fault(code), lasting=True))
        assert os.strerror(code) in message + caplog.text
        assert newest(directory) in (3, 4)
        save(directory, 5)
        assert is_tidy(directory)


def test_a_directory_that_is_deleted_at_any_operation(attempts):
    """Somebody removes the directory while it is written to: an error that says so, and the next save makes a new one."""
    messages = []
    for at, directory in attempts():
        message = failure(directory, 4, Faulty(at, lambda _name: shutil.rmtree(directory, ignore_errors=True)))  # noqa: B023
        messages.append(message)
        assert message == "" or ("rank 0, FileNotFoundError" in message and "\n" not in message)
        save(directory, 5)
        assert newest(directory) == 5
        assert is_tidy(directory)

    assert len([message for message in messages if message]) >= 15


def test_leftovers_that_cannot_be_removed_are_in_nobodys_way(tmp_path, caplog):
    """What is left of an earlier save is warned about if it cannot be removed; saving continues."""
    save(tmp_path, 1)
    (tmp_path / ".unfinished-abc").mkdir()
    disk = Faulty(None, ignore)
    disk.remove_directory = lambda *_: fault(errno.EACCES)("")  # type: ignore[method-assign]
    save(tmp_path, 2, disk=disk)

    assert newest(tmp_path) == 2
    assert "could not be removed: [Errno 13]" in caplog.text


def test_what_a_user_put_into_a_checkpoint_does_not_stop_saving(tmp_path):
    """Directories and links in a checkpoint that is due for removal go with it; what the links point to stays."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("mine")
    path = save(tmp_path / "run", 1)
    (path / "notes").mkdir()
    (path / "notes/file").write_text("")
    (path / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "run/.unfinished-file").write_text("")
    for number in (2, 3, 4):
        save(tmp_path / "run", number)

    assert names(tmp_path / "run") == ["update-00000003", "update-00000004"]
    assert (tmp_path / "precious/file").read_text() == "mine"


def test_a_link_in_place_of_a_leftover_is_not_followed(tmp_path):
    """A user who can write to the directory could lead the tidying anywhere: only the link itself is removed."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("mine")
    save(tmp_path / "run", 1)
    for name in (".removed-x", ".unfinished-x"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    save(tmp_path / "run", 2)

    assert is_tidy(tmp_path / "run")
    assert (tmp_path / "precious/file").read_text() == "mine"


@pytest.mark.parametrize("swapped", ["top", "inner"])
def test_a_link_that_is_put_in_place_during_the_removal_is_not_followed(tmp_path, swapped):
    """At each call to the system in turn a stranger swaps the directory that is being removed for a link: nothing else goes."""
    for moment in count():
        root = tmp_path / str(moment)
        (root / "precious").mkdir(parents=True)
        (root / "precious/file").write_text("mine")
        (root / "run/.unfinished-x/inner").mkdir(parents=True)
        for name in ("inner/file", "file"):
            (root / "run/.unfinished-x" / name).write_text("")
        with pytest.MonkeyPatch.context() as patch:
            calls = swap_at(patch, moment, root, swapped)
            CheckpointDirectory(root / "run", Disk()).tidy()
            patch.undo()
        assert (root / "precious/file").read_text() == "mine", f"call {moment}"
        if next(calls) <= moment:
            break
        CheckpointDirectory(root / "run", Disk()).tidy()
        assert [name for name in names(root / "run") if name.startswith(".")] == []

    assert moment >= 10


def swap_at(patch: pytest.MonkeyPatch, moment: int, root: Path, swapped: str) -> Iterator[int]:
    """Before the call of this number, what is being removed moves away, and a link to something precious has its name."""
    calls, rename, symlink = count(), os.rename, os.symlink

    def watch(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == moment:
                (top,) = (path for path in os.scandir(root / "run") if path.name.startswith("."))
                target = top.path if swapped == "top" else f"{top.path}/inner"
                if os.path.isdir(target):  # noqa: PTH112
                    rename(target, root / "aside")
                    symlink(root / "precious", target)
            return real(*arguments, **options)

        patch.setattr(os, name, call)

    for name in ("open", "listdir", "unlink", "rmdir", "stat", "lstat"):
        watch(name)
    return calls


def test_what_nobody_could_read_is_not_committed(tmp_path, monkeypatch):
    """A manifest or an index that the reader would refuse is refused when it is written: the older ones stay."""
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"config must be small, got a manifest of \d+ bytes"):
        save(tmp_path, 2, config=TreeEncoder().encode("x" * 17 * 2**20, ("config",)))
    with pytest.raises(CheckpointError, match="invalid counters"):
        save(tmp_path, 2, epoch=2**60)
    monkeypatch.setattr(ignite_train.checkpoint.directory, "MAX_INDEX_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"the state has .* bytes beside its tensors, 100 at most"):
        save(tmp_path, 3)

    assert names(tmp_path) == ["update-00000001"]


def _limited_file_size(directory: Path) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save(directory, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        return failure(directory, 2, QuickDisk())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Shared(QuickDisk):
    """Another process has made each directory of a path just before."""

    def make_directory(self, path: Path) -> None:
        if not path.name.startswith("."):
            path.mkdir()
        super().make_directory(path)


def test_two_runs_that_make_their_common_directory_at_once(tmp_path):
    """Both find it missing, and one of them makes it first."""
    assert failure(tmp_path / "runs" / "first", 1, Shared()) == ""
    assert newest(tmp_path / "runs" / "first") == 1


def test_a_real_limit_on_the_size_of_files(tmp_path):
    """The system itself writes a part of a file and then refuses the rest."""
    (message,) = run_ranks(_limited_file_size, tmp_path, world_size=1)

    assert "rank 0, OSError: [Errno 27] File too large" in message
    assert names(tmp_path) == ["update-00000001"]
    assert newest(tmp_path) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_real_directory_that_may_not_be_written(tmp_path):
    """A directory without the right to write: the error of the system, and what is in it can be read."""
    save(tmp_path, 1)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(CheckpointError, match="rank 0, PermissionError"):
            save(tmp_path, 2)
        assert newest(tmp_path) == 1
    finally:
        tmp_path.chmod(0o755)


# --- what the run does ---


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_that_warns_trains_on_and_saves_again(tmp_path, build, micro_batches, caplog, asynchronous):
    """With `on_error="warn"` a full disk costs one checkpoint: one warning, all updates, and the later ones are saved."""
    setup = build()
    saver = Checkpoint(tmp_path, every=1, keep=9, on_error="warn", asynchronous=asynchronous)
    saver.attach(setup.trainer)
    numbers = count()

    def second_save_fails(name: str) -> None:
        if name == "create" and next(numbers) == 4:  # one for the trial at the start, and three files each
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saver.saver.directory.disk = Faulty(0, second_save_fails, lasting=True)
    setup.trainer.run(micro_batches, max_epochs=1)
    warnings = [entry.message for entry in caplog.records if "No space left" in entry.message]

    assert setup.trainer.state.iteration == 5
    assert len(warnings) == 1
    assert "rank 0, OSError: [Errno 28]" in warnings[0]
    assert "training continues" in warnings[0]
    assert sorted({entry.manifest.update for entry in checkpoint.find(tmp_path) if entry.manifest}) == [1, 3, 4, 5]
    assert not [name for name in names(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("failing", [2, 5])
def test_a_run_that_raises_ends_at_the_next_save_or_at_the_end(tmp_path, build, micro_batches, failing):
    """With `on_error="raise"` the run ends with the error of a save behind it when the next is due, or when it is over."""
    setup = build()
    saver = Checkpoint(tmp_path, every=2, keep=9)
    saver.attach(setup.trainer)

    files = count()

    def full(name: str) -> None:
        if name == "create" and next(files) >= {2: 1, 5: 7}[failing]:  # one for the trial at the start, and three files each
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saver.saver.directory.disk = Faulty(0, full, lasting=True)
    with pytest.raises(CheckpointError, match=r"rank 0, OSError: \[Errno 28\] No space left on device"):
        setup.trainer.run(micro_batches, max_epochs=1)

    assert setup.trainer.state.iteration == {2: 4, 5: 5}[failing]
    assert [entry.manifest.update for entry in checkpoint.find(tmp_path) if entry.manifest] == {2: [], 5: [2, 4]}[failing]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("outcomes", "last", "warnings"),
    [([True, False, False, True, False, False, False, False], 7, 4), ([False] * 4, 3, 2)],
    ids=["between others", "from the first on"],
)
def test_a_run_whose_saves_all_fail_ends(tmp_path, build, micro_batches, caplog, asynchronous, outcomes, last, warnings):
    """`on_error="warn"` is for failures that pass: that many in a row are raised; one that works starts the count anew."""
    setup = build()
    saver = Checkpoint(tmp_path, every=1, on_error="warn", give_up_after=3, asynchronous=asynchronous)
    saver.attach(setup.trainer)
    works = iter(outcomes)

    def decide() -> None:
        await_thread(saver)
        saver.saver.directory.disk = QuickDisk() if next(works) else Faulty(0, fault(errno.ENOSPC), lasting=True)

    setup.trainer.append_event_handler(Events.ITERATION_STARTED, decide)
    with pytest.raises(
        CheckpointError, match=r"No space left on device; that is failure 3 in a row, and give_up_after=3: make"
    ):
        setup.trainer.run(micro_batches, max_epochs=2)

    assert setup.trainer.state.iteration == last + asynchronous  # a failure behind the run shows at the next save
    assert caplog.text.count("training continues") == warnings


def test_a_run_whose_last_state_is_not_on_the_disk_fails(tmp_path, build, micro_batches):
    """Also with `on_error="warn"`: nothing comes after it that could make up for it."""
    setup = build()
    saver = Checkpoint(tmp_path, every=2, on_error="warn")
    saver.attach(setup.trainer)
    full = Faulty(0, fault(errno.ENOSPC), lasting=True)

    def fill_up() -> None:
        await_thread(saver)
        saver.saver.directory.disk = full

    setup.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), fill_up)
    with pytest.raises(CheckpointError, match="the run is over, and its last state is not on the disk"):
        setup.trainer.run(micro_batches, max_epochs=1)

    assert newest_update(tmp_path) == 4


def await_thread(saver: Checkpoint) -> None:
    """Returns when the disk may be replaced, because no thread writes to it; a failure of the thread is reported later."""
    if saver.saver._thread is not None and saver.saver._work is not None:
        is_idle = threading.Event()
        saver.saver._work.put(is_idle.set)
        assert is_idle.wait(DEADLINE_SECONDS)


def newest_update(directory: Path) -> int | None:
    """The update of the checkpoint that a run would resume from."""
    path = checkpoint.latest(directory)
    return None if path is None else int(path.name.removeprefix("update-").partition(".")[0])


def test_what_cannot_be_removed_is_warned_about_once(tmp_path, build, micro_batches, caplog):
    """Old checkpoints of another user, or what an earlier save left: one line each in a run, and all others are removed."""
    for number in (1, 2):
        save(tmp_path, number, serial=number, last=9)
    (tmp_path / ".removed-update-00000000-1234/theirs").mkdir(parents=True)
    disk = QuickDisk()
    rename, remove = disk.rename, disk.remove_directory

    def renames_own(source: Path, target: Path) -> None:
        if source.name == "update-00000001":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source))
        rename(source, target)

    def removes_own(path: Path, parent: int) -> None:
        if path.name == "theirs":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        remove(path, parent)

    disk.rename, disk.remove_directory = renames_own, removes_own  # type: ignore[method-assign]
    setup = build()
    saver = Checkpoint(tmp_path / "mine", every=1, keep=1)
    saver.attach(setup.trainer)
    for name in names(tmp_path):
        if name != "mine":
            (tmp_path / "mine").mkdir(exist_ok=True)
            (tmp_path / name).rename(tmp_path / "mine" / name)
    saver.saver.directory.disk = disk
    saver.restore = lambda resume: None  # type: ignore[method-assign]
    setup.trainer.run(micro_batches, max_epochs=1)

    assert names(tmp_path / "mine") == [".removed-update-00000000-1234", "update-00000001", "update-00000005.1"]
    assert caplog.text.count("could not be removed") == 2


def test_nothing_is_committed_beside_a_checkpoint_that_cannot_be_read(tmp_path, monkeypatch):
    """It may be the newest, and a new one that is taken for older would be lost at the next start: the save fails instead."""
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    with monkeypatch.context() as patch:
        real = os.open

        def fails(target: Any, *arguments: Any, **options: Any) -> int:
            if Path(target) == path / "manifest.json":
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
            return real(target, *arguments, **options)

        patch.setattr(os, "open", fails)
        assert "update-00000002 cannot be read: [Errno 5] Input/output error" in failure(tmp_path, 3, QuickDisk())
    save(tmp_path, 3)

    assert newest(tmp_path) == 3
    assert is_tidy(tmp_path)


def test_a_manifest_is_read_once(tmp_path, build, micro_batches, monkeypatch):
    """In a directory of many checkpoints a save reads none of those that it has read before."""
    for number in range(1, 31):
        save(tmp_path, number, last=99)
    seen: list[str] = []
    read_manifest = ignite_train.checkpoint.directory.read_manifest
    monkeypatch.setattr(
        ignite_train.checkpoint.directory, "read_manifest", lambda path: (seen.append(path.name), read_manifest(path))[1]
    )
    setup = build()
    saver = Checkpoint(tmp_path, every=1, keep=99)
    saver.attach(setup.trainer)
    saver.restore = lambda resume: None  # type: ignore[method-assign]
    setup.trainer.run(micro_batches, max_epochs=1)

    assert sorted(seen) == [f"update-{number:08d}" for number in range(1, 31)]
    assert newest_update(tmp_path) == 5


def test_a_look_beside_another_finds_all_checkpoints(tmp_path, monkeypatch):
    """The run may look for its best while the thread looks for old ones: neither sees what the other has found so far."""
    for number in (1, 2, 3):
        save(tmp_path, number, last=9)
    place, disk = CheckpointDirectory(tmp_path, QuickDisk()), QuickDisk()
    read_manifest = ignite_train.checkpoint.directory.read_manifest

    def read_beside_another(path: Path) -> Any:
        if path.name == "update-00000002":  # the other one has just begun
            disk.names = fault(errno.EIO)  # type: ignore[assignment]
            place.disk, here = disk, place.disk
            with pytest.raises(OSError, match="Input/output"):
                place.scan()
            place.disk = here
        return read_manifest(path)

    monkeypatch.setattr(ignite_train.checkpoint.directory, "read_manifest", read_beside_another)
    assert [name for name, _ in place.scan()[0]] == [f"update-{number:08d}" for number in (1, 2, 3)]


# --- before the first batch ---


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("operation", ["make_directory", "create", "write", "sync", "sync_directory", "rename", "remove_file"])
def test_a_directory_that_no_save_could_write_to_is_found_before_the_first_update(
    tmp_path, build, micro_batches, operation, asynchronous
):
    """However rarely is saved, and whatever it is that cannot be done there."""
    setup = build()
    saver = Checkpoint(tmp_path / "new/run", every=1000, asynchronous=asynchronous)
    saver.attach(setup.trainer)
    setattr(saver.saver.directory.disk, operation, lambda *_: fault(errno.EROFS)(""))
    before = setup.contents()
    with pytest.raises(CheckpointError, match=r"rank 0, OSError: \[Errno 30\] Read-only file system"):
        setup.trainer.run(micro_batches, max_epochs=1)

    assert setup.trainer.state.iteration == 0
    assert setup.contents()[:2] == before[:2]


@pytest.mark.parametrize("names_a_checkpoint", [True, False], ids=["of the checkpoint", "of its files"])
def test_a_trial_waits_for_both_directories(tmp_path, build, micro_batches, names_a_checkpoint):
    """Some file systems cannot put the names in one on the disk: a save would fail there, so the trial does."""
    setup = build()
    saver = Checkpoint(tmp_path, every=1000)
    saver.attach(setup.trainer)
    saver.saver.directory.disk = disk = QuickDisk()

    def fails(path: Path) -> None:
        if (path == tmp_path) == names_a_checkpoint:
            fault(errno.EINVAL)("")

    disk.sync_directory = fails  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"trying to commit a checkpoint failed: rank 0, OSError: \[Errno 22\]"):
        setup.trainer.run(micro_batches, max_epochs=1)

    assert setup.trainer.state.iteration == 0


def test_a_run_that_warns_says_before_the_first_update_what_cannot_be_written(tmp_path, build, micro_batches, caplog):
    """With `on_error="warn"` it is the first warning; the directory may be writable at the next save."""
    setup = build()
    saver = Checkpoint(tmp_path, every=1000, on_error="warn")
    saver.attach(setup.trainer)

    def read_only(name: str) -> None:
        if name != "names":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    saver.saver.directory.disk = Faulty(0, read_only, lasting=True)
    seen: list[str] = []
    setup.trainer.add_event_handler(
        Events.ITERATION_STARTED(once=1),
        lambda: (seen.append(caplog.text), setattr(saver.saver.directory, "disk", QuickDisk())),
    )
    setup.trainer.run(micro_batches, max_epochs=1)

    assert "Read-only file system; training continues" in seen[0]
    assert newest_update(tmp_path) == 5


@pytest.mark.slow
def test_a_trial_that_is_cut_short_leaves_nothing_that_stays(tmp_path, build, micro_batches):
    """A crash before each operation of it in turn: the next run removes what is left, and nothing is taken for a checkpoint."""

    def run(directory: Path, disk: Disk) -> None:
        setup = build()
        saver = Checkpoint(directory)
        saver.attach(setup.trainer)
        saver.saver.directory.disk = disk
        setup.trainer.add_event_handler(Events.EPOCH_STARTED, lambda: crash(""))
        setup.trainer.run(micro_batches, max_epochs=1)

    done: list[str] = []
    for at in count():
        disk = Faulty(at, crash, lasting=True)
        with pytest.raises(Crash):
            run(tmp_path / str(at), disk)
        assert not (tmp_path / str(at)).exists() or newest(tmp_path / str(at)) is None
        with pytest.raises(Crash):
            run(tmp_path / str(at), QuickDisk())
        assert not (tmp_path / str(at)).exists() or names(tmp_path / str(at)) == []
        done = disk.done
        if len(done) <= at:
            break

    assert len(done) >= 12


# --- the last state ---


class Counting(QuickDisk):
    """Notes which files are written."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def create(self, path: Path) -> int:
        self.log.append(f"write {path.name}")
        return super().create(path)

    def tensors(self) -> list[str]:
        """What happened to the files of tensors."""
        return [entry for entry in self.log if entry.endswith(".safetensors")]


def _ends(build: Any, directory: Path, micro_batches: Any, *, at_end: Any = None, disk: Any = None, **options: Any) -> Any:
    setup = build()
    saver = Checkpoint(directory, **options)
    saver.attach(setup.trainer)
    saver.saver.directory.disk = disk = disk or Counting()
    if at_end is not None:
        setup.trainer.add_event_handler(Events.COMPLETED, at_end, setup)
    return setup, saver, disk


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("options", [{}, {"every": 5}, {"every": 5, "every_epochs": 1}], ids=str)
def test_the_last_state_is_written_again_at_the_end(tmp_path, build, micro_batches, options, asynchronous):
    """Saved at the end of the epoch and again at that of the run, one of which stays: it resumes as ended."""
    setup, _, disk = _ends(build, tmp_path, micro_batches, asynchronous=asynchronous, **options)
    setup.trainer.run(micro_batches, max_epochs=1)
    saves = 3 if len(options) == 2 else 2

    assert disk.tensors() == ["write rank-00000.safetensors"] * saves
    (name,) = names(tmp_path)
    assert name.startswith("update-00000005")
    checkpoint.verify(tmp_path / name)
    expected = setup.contents()
    setup, _, disk = _ends(build, tmp_path, micro_batches)
    setup.trainer.run(micro_batches, max_epochs=1)
    assert setup.contents() == expected
    assert disk.log == []  # nothing to do


def test_a_last_state_that_is_another_is_written(tmp_path, build, micro_batches):
    """A handler of the end of the run may change anything, one bit of one weight as well: that is what is saved."""

    def negates(setup: Any) -> None:
        with torch.no_grad():
            setup.model[2].bias.copy_(-setup.model[2].bias)

    def zeroes(setup: Any) -> None:
        with torch.no_grad():
            setup.model[2].bias.zero_()

    def negative_zero(setup: Any) -> None:
        with torch.no_grad():
            setup.model[2].bias.copy_(-setup.model[2].bias * 0)

    for number, change in enumerate((negates, zeroes, negative_zero, lambda setup: torch.rand(1))):
        directory = tmp_path / str(number)
        setup, _, disk = _ends(build, directory, micro_batches, at_end=change)
        setup.trainer.run(micro_batches, max_epochs=1)
        assert disk.tensors() == ["write rank-00000.safetensors"] * 2
        state = torch.get_rng_state()
        with CheckpointReader(directory / "update-00000005.1") as stored:
            stored.verify()
            saved = stored.read("model")["2.bias"]
            assert torch.equal(stored.read("generators")["torch"], state)
        assert torch.equal(saved.view(torch.int32), setup.model[2].bias.detach().view(torch.int32))


def test_a_run_that_is_told_to_stop_writes_its_state_once(tmp_path, build, micro_batches):
    """As SIGTERM does: the save that is due in that update is the one of the end."""
    setup, _, disk = _ends(build, tmp_path, micro_batches, every=1, keep=9)
    setup.trainer.add_event_handler(TrainEvents.GRADIENTS_READY(once=3), lambda engine: engine.terminate())
    setup.trainer.run(micro_batches, max_epochs=1)

    assert disk.tensors() == ["write rank-00000.safetensors"] * 3
    assert names(tmp_path) == ["update-00000001", "update-00000002", "update-00000003"]


@pytest.mark.parametrize("asks", [False, True])
def test_a_stopped_run_is_saved_before_the_handlers_of_its_end_and_after_them_if_asked(tmp_path, build, micro_batches, asks):
    """The first is what an undisturbed run continues from; a handler that changes something may want it otherwise."""
    setup, saver, disk = _ends(build, tmp_path, micro_batches, every=1, keep=9)
    setup.trainer.add_event_handler(TrainEvents.GRADIENTS_READY(once=3), lambda engine: engine.terminate())
    before: list[torch.Tensor] = []

    @setup.trainer.on(Events.COMPLETED)
    def change() -> None:
        before.append(setup.model[2].bias.detach().clone())
        with torch.no_grad():
            setup.model[2].bias.neg_()
        if asks:
            saver.save()

    setup.trainer.run(micro_batches, max_epochs=1)
    assert disk.tensors() == ["write rank-00000.safetensors"] * (3 + asks)
    with CheckpointReader(max(tmp_path.glob("update-00000003*"))) as stored:
        saved = stored.read("model")["2.bias"]
    assert torch.equal(saved, setup.model[2].bias if asks else before[0])


# --- two ranks ---


def _rank_1_fails(directory: Path, at: int | None) -> tuple[str, int]:
    save(directory, 1, world_size=2)
    disk = Faulty(at if collectives.rank() == 1 else None, fault(errno.ENOSPC))
    return failure(directory, 2, disk, world_size=2), len(disk.done)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [0, 5, 8])
def test_a_failure_of_one_rank_is_told_by_all(tmp_path, at):
    """Rank 1 alone cannot open, sync or close a file: both ranks raise the same message, which names it. The old one stays."""
    (first, _), (second, operations) = run_ranks(_rank_1_fails, tmp_path, at)

    assert first == second
    assert re.search(r"rank 1, OSError: \[Errno 28\] No space left on device: '.*/rank-00001\.(safetensors|json)'$", first)
    assert operations == {0: 1, 5: 6, 8: 10}[at]  # nothing is tried after that, but for closing
    assert names(tmp_path) == ["update-00000001"]
    assert read(tmp_path / "update-00000001") == 1


def _one_rank_has_another_directory(directory: Path) -> str:
    return failure(directory / f"host-{collectives.rank()}", 1, QuickDisk(), world_size=2)


def test_ranks_that_do_not_share_the_directory(tmp_path):
    """On a machine that does not see the same files, the first save fails on all ranks."""
    first, second = run_ranks(_one_rank_has_another_directory, tmp_path)

    assert first == second
    assert "rank 1, FileNotFoundError" in first


def _tries_another_directory(directory: Path) -> str:
    own = CheckpointDirectory(directory / f"host-{collectives.rank()}", QuickDisk())
    try:
        try_out(own, Contents({}, {}), collectives.gather_objects)
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_share_the_directory_are_told_where_each_looks(tmp_path):
    """Before the first update; nothing is left."""
    first, second = run_ranks(_tries_another_directory, tmp_path)

    assert first == second
    seen = f"got '{tmp_path}/host-1' here and '{tmp_path}/host-0' on rank 0; [Errno 2] No such file"
    assert f"failed: rank 1, CheckpointError: ranks must share one directory, {seen}" in first
    assert names(tmp_path / "host-0") == []


class Elsewhere(QuickDisk):
    """A disk that this rank has for itself."""

    def create(self, path: Path) -> int:
        own = path.parents[2] / "own"
        own.mkdir(exist_ok=True)
        return super().create(own / path.name)


def _rank_1_writes_elsewhere(directory: Path, stale: bool) -> str:
    disk: Disk = QuickDisk()
    if collectives.rank() == 1:
        disk = Elsewhere()
    elif stale:  # what rank 0 sees under the name is not what rank 1 has written
        disk = Stale()
    return failure(directory / "run", 1, disk, world_size=2)


class Stale(QuickDisk):
    """A disk on which files of rank 1 have been before."""

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        for kind in ("safetensors", "json") if path.name.startswith(".") else ():
            (path / f"rank-00001.{kind}").write_bytes(b"")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stale", [False, True])
def test_ranks_that_see_other_files_under_the_same_name(tmp_path, stale):
    """What rank 1 has written must be there where rank 0 looks, with all its bytes; or else nothing is committed."""
    first, second = run_ranks(_rank_1_writes_elsewhere, tmp_path, stale)

    assert first == second
    assert ("another size here than on the rank that wrote it" if stale else "FileNotFoundError") in first
    assert names(tmp_path / "run") == []


def _open_files(directory: Path) -> list[str]:
    """What this process has open there."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
    return [path for path in found if path.startswith(str(directory))]


@pytest.mark.skipif(sys.platform != "linux", reason="lists the open files of this process as Linux does")
def test_no_file_stays_open(tmp_path, build, micro_batches):
    """A process can open a thousand files or so, and a long run saves, and removes, more often than that."""
    runs = tmp_path / "runs"
    for epochs in (1, 2):
        setup, _, _ = _ends(build, runs, micro_batches, disk=Disk(), every=1, keep=1)
        setup.trainer.run(micro_batches, max_epochs=epochs)
        left = runs / ".removed-update-00000001-left"
        left.mkdir()
        (left / "link").symlink_to("elsewhere")
    (path,) = (path for path in runs.iterdir() if path != left)
    checkpoint.verify(path)
    file = path / "rank-00000.safetensors"
    for harm in (lambda: file.write_bytes(bytes(file.stat().st_size)), lambda: os.truncate(file, 7), file.unlink):
        harm()
        with pytest.raises(DamagedCheckpointError):
            checkpoint.verify(path)
    for at in range(number_of_operations(tmp_path / "failing", 1)):
        failure(tmp_path / "failing", 1, Faulty(at, fault(errno.EIO)))
    assert _open_files(tmp_path) == []
    with file.open("wb"):
        assert _open_files(tmp_path) == [str(file)]


def test_what_a_trainer_saves_is_one_checkpoint_of_this_protocol(tmp_path, build, micro_batches):
    """The handler goes through the same disk: operation by operation it is a save as those above."""
    setup = build()
    saver = Checkpoint(tmp_path / "run", every_epochs=1)
    saver.attach(setup.trainer)
    disk = Faulty(None, ignore)
    setup.trainer.append_event_handler(Events.STARTED, lambda: setattr(saver.saver.directory, "disk", disk))  # after the trial
    setup.trainer.run(micro_batches, max_epochs=1)
    reference = Faulty(None, ignore)
    (tmp_path / "other").mkdir()
    place = CheckpointDirectory(tmp_path / "other", reference)
    for _ in range(2):  # the end of the epoch, and that of the run
        save(tmp_path / "other", 5, place=place)

    assert [name for name in disk.done if name != "write"] == [name for name in reference.done if name != "write"]
    assert names(tmp_path / "run") == names(tmp_path / "other") == ["update-00000005.1"]
