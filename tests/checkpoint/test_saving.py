"""Saving behind the run: what is written is the state at the step, one at a time, in memory that is used again."""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import mmap
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ignite.engine import Events
from torch import Tensor

from ignite_train import CheckpointError, checkpoint, create_trainer
from ignite_train.checkpoint import disk as disk_module
from ignite_train.checkpoint import tree
from ignite_train.checkpoint import writer as writer_module
from ignite_train.checkpoint.capture import plain_config
from ignite_train.checkpoint.directory import Contents
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.retention import Retention
from ignite_train.checkpoint.tensor_files import Piece
from ignite_train.checkpoint.tree import TreeEncoder, decode, dtype_name
from ignite_train.checkpoint.writer import CheckpointWriter, Snapshot
from ignite_train.handlers import Checkpoint
from ignite_train.ranks import collectives
from processes import DEADLINE_SECONDS
from small_checkpoints import QuickDisk, contents, keep, manifest, names

SAVES = 200


class Training:
    """What a run moves, in place, with every step: parameters, moments, and a count of the steps that is a tensor."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parameters = [torch.randn(shape, generator=generator) for shape in ((100, 50), (64,), (2, 3, 4, 4))]
        self.parameters[2] = self.parameters[2].to(memory_format=torch.channels_last)
        self.steps = [torch.tensor(0.0) for _ in self.parameters]
        self.moments = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.count = 0

    def step(self) -> None:
        self.count += 1
        for parameter, moment, step in zip(self.parameters, self.moments, self.steps, strict=True):
            step += 1
            moment.mul_(0.9).add_(parameter, alpha=0.1)
            parameter.sub_(moment, alpha=0.01)

    def state_dict(self) -> dict[str, Any]:
        groups = {"parameters": self.parameters, "moments": self.moments, "steps": self.steps}
        return {"count": self.count, "half": self.parameters[0][:, ::2], **groups}


def digest(value: Any) -> str:
    """Equal only if every bit of every tensor in `value` is, and each plain value."""
    if isinstance(value, Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        text = f"{dtype_name(value.dtype)} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    elif isinstance(value, dict):
        text = str([(key, digest(entry)) for key, entry in value.items()])
    else:
        text = str([digest(entry) for entry in value]) if isinstance(value, list) else repr(value)
    return hashlib.sha256(text.encode()).hexdigest()


class Gate(QuickDisk):
    """Lets a save begin to write only when the run has moved on, and sees to it that there is one save at a time."""

    def __init__(self) -> None:
        self.moved = threading.Event()
        self.begun = 0

    def make_directory(self, path: Path) -> None:
        assert len([thread for thread in threading.enumerate() if thread.name == "Checkpoint"]) == 1
        self.begun += 1
        super().make_directory(path)

    def create(self, path: Path) -> int:
        assert self.moved.wait(DEADLINE_SECONDS)
        return super().create(path)


_runs = ExitStack()


def saver(directory: Path, *, warns: bool = False, asynchronous: bool = True, last: int = 2) -> CheckpointWriter:
    made = CheckpointWriter(directory, keep(last), asynchronous=asynchronous, warns=warns)
    made.directory.disk = QuickDisk()
    made.prepare()
    return made


def in_a_run(writer: CheckpointWriter) -> CheckpointWriter:
    """The same writer, in a run that lasts until the end of the test: between runs a save is written at once."""
    _runs.enter_context(writer.holding())
    return writer


@pytest.fixture(autouse=True)
def _ends_runs() -> Iterator[None]:
    yield
    _runs.close()


def loaded(path: Path | None) -> str:
    assert path is not None
    with CheckpointReader(path) as stored:
        return digest(stored.read("run"))


@pytest.mark.slow
def test_asynchronous_saves_are_not_torn(tmp_path):
    """200 saves while steps continue at full speed, the first before anything is written: what is loaded is the state then."""
    training, writer = Training(), in_a_run(saver(tmp_path))
    writer.directory.disk = gate = Gate()
    for number in range(SAVES):
        training.step()
        before = digest(training.state_dict())
        gate.moved.clear()
        writer.save(contents(training.state_dict(), "run"), manifest(number))
        training.step()
        gate.moved.set()
        while writer._durable is not None and not writer._durable.is_set():
            training.step()
        writer.wait()
        assert loaded(writer.latest) == before
        assert digest(training.state_dict()) != before

    assert gate.begun == SAVES


def test_without_a_copy_saves_would_be_torn(tmp_path, monkeypatch):
    """The test above sees it: if the tensors were written without a copy, the state would be that of a later step."""
    training, writer = Training(), in_a_run(saver(tmp_path))
    writer.directory.disk = gate = Gate()
    monkeypatch.setattr(Snapshot, "take", lambda self, pieces: dict(pieces))
    training.step()
    before = digest(training.state_dict())
    writer.save(contents(training.state_dict(), "run"), manifest(1))
    training.step()
    gate.moved.set()
    writer.wait()

    assert loaded(writer.latest) != before


def test_a_save_waits_for_the_one_before(tmp_path):
    """The second save does not begin before the first one is on the disk; nor does it touch the copy that is being written."""
    training, writer = Training(), in_a_run(saver(tmp_path, last=5))
    writer.directory.disk = gate = Gate()
    first = digest(training.state_dict())
    writer.save(contents(training.state_dict(), "run"), manifest(1))
    training.step()
    second = digest(training.state_dict())
    save_second = threading.Thread(target=writer.save, args=(contents(training.state_dict(), "run"), manifest(2)))
    save_second.start()
    assert gate.begun <= 1
    assert all(name.startswith(".") for name in names(tmp_path))  # asked once: the other thread makes directories meanwhile
    gate.moved.set()
    save_second.join(DEADLINE_SECONDS)
    writer.wait()

    assert gate.begun == 2
    assert [loaded(tmp_path / f"update-0000000{number}") for number in (1, 2)] == [first, second]


def test_a_save_that_is_not_asynchronous_is_done_when_it_returns(tmp_path):
    """Without a thread of its own nothing is copied, and the checkpoint is there."""
    training, writer = Training(), saver(tmp_path, asynchronous=False)
    writer.save(contents(training.state_dict(), "run"), manifest(3))

    assert loaded(tmp_path / "update-00000003") == digest(training.state_dict())


class Full(QuickDisk):
    """Has no room for another file."""

    def create(self, _path: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("then", ["save", "wait"])
def test_a_failure_surfaces_at_the_next_save_or_at_the_end(tmp_path, then):
    """The save that fails returns; the next call gets the error, once. Then saving continues."""
    training, writer = Training(), in_a_run(saver(tmp_path))
    again = partial(writer.save, contents(training.state_dict(), "run"), manifest(2))
    writer.directory.disk = Full()
    writer.save(contents(training.state_dict(), "run"), manifest(1))
    with pytest.raises(CheckpointError, match=r"rank 0, OSError: \[Errno 28\] No space left on device: '.*\.safetensors'$"):
        {"save": again, "wait": writer.wait}[then]()
    writer.directory.disk = QuickDisk()
    writer.wait()
    again()
    writer.wait()

    _runs.close()
    assert names(tmp_path) == ["update-00000002"]
    assert writer.latest == tmp_path / "update-00000002"


def test_a_failure_is_a_warning_if_that_was_asked_for(tmp_path, caplog, monkeypatch):
    """`warns` makes it one line in the log; what is not an error of a save is raised in any case."""
    training, writer = Training(), in_a_run(saver(tmp_path, warns=True))
    writer.directory.disk = Full()
    writer.save(contents(training.state_dict(), "run"), manifest(1))
    writer.wait()
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    assert "rank-00000.safetensors'; training continues" in caplog.text

    writer.directory.disk.names = lambda path: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    writer.save(contents(training.state_dict(), "run"), manifest(2))
    writer.wait()
    assert "ZeroDivisionError" in caplog.text

    def lost(*_: Any, **__: Any) -> list[Any]:
        raise ConnectionError("another rank does not answer")

    monkeypatch.setattr(collectives, "gather_objects", lost)
    writer.save(contents(training.state_dict(), "run"), manifest(3))
    with pytest.raises(CheckpointError, match="another rank does not answer"):
        writer.wait()


def test_a_copy_is_complete_when_the_run_continues(tmp_path, monkeypatch):
    """Copies from a device are only queued: each device is waited for, before the next update and before a file is written.

    Tensors without data stand for those of an accelerator here.
    """
    done: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: done.append(f"waits for {device}"))
    monkeypatch.setattr(writer_module, "foreach_copy_", lambda *_arguments, non_blocking: done.append("copies"))
    pieces = {device: Piece(torch.empty(2, device=device), (0,), (2,)) for device in ("cpu", "meta")}
    Snapshot().take(pieces)
    assert done == ["copies", "waits for meta"]
    done.clear()
    Snapshot().take({"cpu": pieces["cpu"]})
    assert done == ["copies"]
    done.clear()
    writer = saver(tmp_path, asynchronous=False)
    with pytest.raises(CheckpointError, match="writing a checkpoint failed"):  # there is nothing to write
        writer.save(Contents({}, pieces), manifest(1))
    assert done == ["waits for meta"]


def test_no_thread_of_a_checkpoint_keeps_the_process(tmp_path, monkeypatch):
    """A script that has failed ends, whatever the disk does: the interpreter waits for threads that are not daemons."""
    started: dict[str, bool] = {}
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        started[thread.name] = thread.daemon
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    writer = saver(tmp_path, last=1)
    with writer.holding():
        for number in (1, 2):
            writer.save(contents(number, "run"), manifest(number))
            writer.wait()
    assert started == {"Checkpoint": True, "CheckpointLock": True}


def test_the_copies_lie_in_the_same_memory_each_time():
    """A snapshot takes memory once: the next one of the same state reuses it, and only a tensor of another shape gets more."""
    training, snapshot = Training(), Snapshot()

    def take() -> dict[str, int]:
        pieces = contents(training.state_dict(), "run").pieces
        copies = snapshot.take(pieces)
        for name, piece in pieces.items():
            assert copies[name].data.data_ptr() != piece.data.data_ptr()
            assert torch.equal(copies[name].data, piece.data)
        return {name: copy.data.data_ptr() for name, copy in copies.items()}

    first = take()
    training.step()
    assert take() == first
    training.parameters[1] = torch.ones(65)
    later = take()
    assert {name for name in first if first[name] != later[name]} <= {"run['parameters'][1]"}


def test_a_copy_lies_in_memory_as_the_tensor_does():
    """Channels-last stays channels-last, also if a tensor becomes so only later: what computes with it takes the same path."""
    snapshot, weight = Snapshot(), torch.randn(2, 3, 4, 4)
    for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        tensor = weight.to(memory_format=layout)
        (copy,) = snapshot.take(contents(tensor).pieces).values()
        assert copy.data.stride() == tensor.stride()
        assert torch.equal(copy.data, weight)


class InjectedError(Exception):
    """Raised by a test on purpose."""


def breaks_off(directory: Path, disk: Disk) -> CheckpointWriter:
    """The writer of a run that an exception ends after it has saved."""
    writer = saver(directory)
    writer.directory.disk = disk

    def run() -> None:
        with writer.holding():
            writer.save(contents(1, "run"), manifest(1))
            raise InjectedError

    with pytest.raises(InjectedError):
        run()
    return writer


def test_a_run_that_breaks_off_says_what_is_known_of_its_last_save(tmp_path, monkeypatch, caplog):
    """The log says that the save has failed, or that it takes long. Where it was written, the log is empty."""
    breaks_off(tmp_path / "quick", QuickDisk())
    assert names(tmp_path / "quick") == ["update-00000001"]
    assert not caplog.messages
    breaks_off(tmp_path / "full", Full()).wait()  # which does not raise what was logged
    monkeypatch.setattr(writer_module, "_PATIENCE_SECONDS", 0.01)
    writer = breaks_off(tmp_path / "slow", gate := Gate())
    assert [line.partition(": ")[0] for line in caplog.messages] == [
        "the last checkpoint was not written",
        "the last checkpoint is not written after another 0.01 s",
    ]
    assert "No space left on device" in caplog.text
    gate.moved.set()
    with pytest.raises(CheckpointError, match="this run has ended and writes no more checkpoints"):
        writer.wait()


class SlowRemoval(QuickDisk):
    """Removes an old checkpoint only when it is told to; it may give an error until then."""

    def __init__(self) -> None:
        self.removing, self.released = threading.Event(), threading.Event()
        self.fails_with = 0
        self.attempts = 0

    def remove_tree(self, path: Path) -> None:
        self.removing.set()
        assert self.released.wait(DEADLINE_SECONDS)
        super().remove_tree(path)

    def create(self, path: Path) -> int:
        self.attempts += path.suffix == ".safetensors"
        if self.fails_with:
            self.released.set()
            raise OSError(self.fails_with, os.strerror(self.fails_with))
        return super().create(path)


def writer_removing(writer: CheckpointWriter) -> tuple[CheckpointWriter, SlowRemoval]:
    """Of which one checkpoint stays: it has saved the second, and is removing the first."""
    disk = SlowRemoval()
    writer.directory.disk = disk
    for number in (1, 2):
        writer.save(contents(number, "run"), manifest(number))
        writer.wait()
    assert disk.removing.wait(DEADLINE_SECONDS)
    return writer, disk


def test_a_run_does_not_wait_for_a_removal(tmp_path):
    """It goes on when its state is copied; the thread writes when the old one is gone, so the disk holds one more at most."""
    directory = tmp_path / "runs"
    writer = saver(directory, last=1)
    with writer.holding():
        writer, disk = writer_removing(writer)
        writer.save(contents(3, "run"), manifest(3))
        assert (disk.attempts, writer.latest) == (2, directory / "update-00000002")
        assert [name.partition("-")[0] for name in names(directory) if name.startswith(".r")] == [".removed"]
        disk.released.set()
        writer.wait()
        assert writer.latest == directory / "update-00000003"
        assert loaded(writer.latest) == digest(3)
    assert names(directory) == ["update-00000003"]
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("Checkpoint")] == []


def test_a_removal_that_fails_is_a_warning(tmp_path, caplog):
    """As where the save waits for it; each next save tries again, and says it once of each."""
    writer = saver(tmp_path, last=1)
    with writer.holding():
        writer.directory.disk.remove_tree = lambda path: Full().create(path) and None  # type: ignore[method-assign]
        for number in (1, 2, 3):
            writer.save(contents(number, "run"), manifest(number))
            writer.wait()
    assert [line.partition(": ")[0] for line in caplog.messages] == ["an old checkpoint could not be removed"] * 2
    writer.directory.disk = QuickDisk()
    writer.save(contents(4, "run"), manifest(4))
    writer.wait()
    assert names(tmp_path) == ["update-00000004"]


def test_a_run_that_breaks_off_does_not_wait_for_a_removal_for_ever(tmp_path, monkeypatch, caplog):
    """The log says that it still runs, and that the next start continues with it. The directory is free."""
    monkeypatch.setattr(writer_module, "_PATIENCE_SECONDS", 0.01)
    writer = saver(tmp_path, last=1)

    def run() -> None:
        with writer.holding():
            writer_removing(writer)
            raise InjectedError

    with pytest.raises(InjectedError):
        run()
    assert caplog.messages == [f"an old checkpoint in {tmp_path} is still being removed; the next start continues"]
    assert ".lock.json" not in names(tmp_path)
    thread = next(thread for thread in threading.enumerate() if thread.name == "Checkpoint")
    writer.directory.tidy()  # as the next save does: it leaves alone what that thread removes
    assert not writer.directory.disk.released.is_set()  # type: ignore[attr-defined]
    writer.directory.disk.released.set()  # type: ignore[attr-defined]
    thread.join(DEADLINE_SECONDS)
    assert names(tmp_path) == ["update-00000002"]


def test_a_thread_that_cannot_be_started_leaves_nothing_waiting(tmp_path, monkeypatch):
    """The system may have no thread left: the save says it, and the next one works."""
    start = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        if thread.name == "Checkpoint":
            raise RuntimeError("can't start new thread")
        start(thread)

    writer = saver(tmp_path)
    with writer.holding():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", starting)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                writer.save(contents(1, "run"), manifest(1))
        writer.save(contents(2, "run"), manifest(2))
        writer.wait()
    assert names(tmp_path) == ["update-00000002"]


def test_control_c_while_a_removal_is_awaited_releases_the_directory(tmp_path, monkeypatch):
    """Another run of this process, or of another one, can take it."""
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "Checkpoint":
            raise KeyboardInterrupt
        join(thread, timeout)

    writer = saver(tmp_path)

    def run() -> None:
        with writer.holding():
            writer.save(contents(1, "run"), manifest(1))
            writer.wait()
            patch.setattr(threading.Thread, "join", interrupted)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        run()
    assert names(tmp_path) == ["update-00000001"]
    with saver(tmp_path).holding():
        pass


def test_a_removal_that_is_too_deep_for_python_is_a_warning(tmp_path, caplog):
    """As where the next save finds what was left."""

    def too_deep(path: Path) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    writer = saver(tmp_path, last=1)
    writer.directory.disk.remove_tree = too_deep  # type: ignore[method-assign]
    for number in (1, 2):
        writer.save(contents(number, "run"), manifest(number))
        writer.wait()
    assert "an old checkpoint could not be removed" in caplog.text
    assert writer.latest == tmp_path / "update-00000002"


def test_what_a_killed_process_has_left_goes_first(tmp_path):
    """Before another old checkpoint is renamed, so that never two are half removed, and before a new one needs the space."""
    order: list[str] = []

    class Ordered(QuickDisk):
        def rename(self, source: Path, target: Path) -> None:
            order.extend(["rename"] * target.name.startswith(".removed"))
            super().rename(source, target)

        def remove_tree(self, path: Path) -> None:
            order.append("remove")
            super().remove_tree(path)

        def create(self, path: Path) -> int:
            order.extend(["write"] * (path.suffix == ".safetensors"))
            return super().create(path)

    for number in (1, 2):
        saver(tmp_path).save(contents(number, "run"), manifest(number), is_last=True)
    (tmp_path / ".removed-update-00000000-left").mkdir()
    writer = saver(tmp_path, last=1)
    writer.directory.disk = Ordered()
    with writer.holding():
        writer.resume_from(tmp_path / "update-00000002")
        writer.save(contents(3, "run"), manifest(3))
        writer.wait()
    assert [step for step in order if step != "write"] == ["remove", "rename", "remove", "rename", "remove"]
    assert [step for step in order if step != "remove"] == ["rename", "write", "rename"]
    assert names(tmp_path) == ["update-00000003"]


def test_the_end_of_a_run_waits_for_the_last_removal(tmp_path, monkeypatch):
    """Also where the thread of the last save has not got to it yet: what the rule does not keep is gone."""
    is_awaited, join = threading.Event(), threading.Thread.join

    class Late(QuickDisk):
        def rename(self, source: Path, target: Path) -> None:
            if target.name.startswith(".removed"):
                is_awaited.wait(DEADLINE_SECONDS)
            super().rename(source, target)

    def joining(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "Checkpoint":
            is_awaited.set()
        join(thread, timeout)

    writer = saver(tmp_path, last=1)
    writer.directory.disk = Late()
    with writer.holding():
        for number in (1, 2):
            writer.save(contents(number, "run"), manifest(number))
            writer.wait()
        monkeypatch.setattr(threading.Thread, "join", joining)
    found = names(tmp_path)
    is_awaited.set()
    assert found == ["update-00000002"]


@pytest.mark.parametrize("resumed_from", [None, "update-00000001"], ids=["anew", "from an older one"])
def test_nothing_is_removed_before_the_first_save_is_done(tmp_path, resumed_from):
    """The checkpoint that the run resumes from may be one that the rule does not keep: it stays if that save fails."""
    for number in (1, 2, 3):
        saver(tmp_path, last=9).save(contents(number, "run"), manifest(number), is_last=True)
    writer = saver(tmp_path, last=1)
    writer.directory.disk = Full()
    with writer.holding():
        if resumed_from:
            writer.resume_from(tmp_path / resumed_from)
        writer.save(contents(4, "run"), manifest(4))
        with pytest.raises(CheckpointError, match="No space left"):
            writer.wait()
    assert names(tmp_path) == [f"update-0000000{number}" for number in (1, 2, 3)]


def test_a_copy_that_fails_leaves_nothing_waiting(tmp_path, monkeypatch):
    """The error is raised by the save, and the next one works."""
    writer = in_a_run(saver(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "take", lambda self, pieces: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            writer.save(contents(1, "run"), manifest(1))
    writer.save(contents(2, "run"), manifest(2))
    writer.wait()
    _runs.close()
    assert names(tmp_path) == ["update-00000002"]


class Noting(Disk):
    """Writes down how many bytes each write has, and whether it is a direct one."""

    def __init__(self) -> None:
        self.log: list[tuple[int, bool]] = []

    def write(self, descriptor: int, data: memoryview) -> None:
        self.log.append((len(data), bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)))
        super().write(descriptor, data)


PAGE = mmap.PAGESIZE
PARTS = {
    "small": [3],
    "whole pages": [PAGE, 2 * PAGE],
    "with a rest": [1, 5 * PAGE, 7],
    "a buffer": [4 * PAGE],
    "less than a page": [100, 0, 200],
    "several buffers": [3 * PAGE + 1] * 9,
    "a large one": [50 * PAGE + 5],
}


def write(path: Path, lengths: list[int]) -> tuple[bytes, list[tuple[int, bool]]]:
    """Has a file of parts of these lengths written as a large one, by buffers of four pages."""
    content, disk = bytes(number % 251 for number in range(sum(lengths))), Noting()
    view, ends = memoryview(content), [*accumulate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "_LARGE_BYTES", 10)
        patch.setattr(disk_module, "_BUFFER_BYTES", 4 * PAGE)
        disk.write_file(path, [view[end - length : end] for length, end in zip(lengths, ends, strict=True)], len(content))
    return content, disk.log


def has_direct_writes(directory: Path) -> bool:
    """Whether the file system of the tests has them."""
    try:
        os.close(os.open(directory / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="others have no direct writes")


@on_linux
@pytest.mark.parametrize("lengths", PARTS.values(), ids=PARTS)
def test_a_large_file_is_written_directly_but_for_its_end(tmp_path, lengths):
    """In whole pages of one buffer, whatever its parts are; what is less than a page goes the usual way, as small files do."""
    content, log = write(tmp_path / "file", lengths)
    assert (tmp_path / "file").read_bytes() == content
    if len(content) < 10:
        assert log == [(len(content), False)]
    elif has_direct_writes(tmp_path):
        whole, rest = divmod(len(content), PAGE)
        direct = [4 * PAGE] * (whole // 4) + [whole % 4 * PAGE] * (whole % 4 > 0)
        assert log == [*((length, True) for length in direct), *[(rest, False)] * (rest > 0)]


@on_linux
@pytest.mark.parametrize("lengths", PARTS.values(), ids=PARTS)
def test_a_file_system_without_direct_writes_is_no_error(tmp_path, monkeypatch, lengths):
    """Some refuse the flag."""

    def refuse(descriptor: int, command: int, *arguments: int) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "no direct writes")
        return fcntl.fcntl(descriptor, command, *arguments)

    monkeypatch.setattr(disk_module, "fcntl", SimpleNamespace(**{**vars(fcntl), "fcntl": refuse}))
    content, log = write(tmp_path / "file", lengths)
    assert (tmp_path / "file").read_bytes() == content
    assert not any(is_direct for _, is_direct in log)


@on_linux
@pytest.mark.parametrize("first", [0, 2 * PAGE], ids=["at once", "after a part"])
def test_a_file_system_that_wants_other_lengths_is_no_error(tmp_path, monkeypatch, first):
    """Some take the flag, and refuse a write, or the rest of one."""
    taken, os_write = list[int](), os.write

    def refuse(descriptor: int, data: memoryview) -> int:
        if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            return os_write(descriptor, data)
        if taken or not first:
            raise OSError(errno.EINVAL, "not these")
        taken.append(os_write(descriptor, data[:first]))
        return taken[0]

    monkeypatch.setattr(disk_module.os, "write", refuse)
    content, _ = write(tmp_path / "file", PARTS["several buffers"])
    assert (tmp_path / "file").read_bytes() == content


def test_an_invalid_write_is_an_error_where_nothing_is_direct(tmp_path, monkeypatch):
    """It is tried once."""

    def refuse(*_: Any) -> int:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(disk_module.os, "write", refuse)
    with pytest.raises(OSError, match="no"):
        Disk().write_file(tmp_path / "file", [memoryview(b"123")], 3)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ((1, 2**70, -3), 3),
        ([], 0),
        (((1, 2), [3]), 5),
        ({"a": 1, (1, 2): [2.0, None]}, 8),
        ([1j], 3),
        pytest.param({1, 2}, 2, id="a set"),
        (np.ones(3), 0),
    ],
    ids=str,
)
def test_each_value_is_counted_as_the_reader_counts_it(value, count, monkeypatch):
    """The keys of a dict too, and what is in them; so what is written can be read, and its depth is the same."""
    encoder = TreeEncoder()
    found = encoder.encode(value, ("run",))
    assert encoder._nodes == count
    for limit in (count, count + 1):
        monkeypatch.setattr(tree, "MAX_NODES", limit)
        if limit > count:
            decode(found, ("run",), lambda *_: None)
        elif not isinstance(value, np.ndarray):
            with pytest.raises(ValueError, match="values"):
                decode(found, ("run",))


def test_too_many_integers_are_refused(monkeypatch):
    """By their number, as any values are, and by their depth."""
    monkeypatch.setattr(tree, "MAX_NODES", 10)
    assert TreeEncoder().encode([1] * 9, ("run",)) == [1] * 9
    with pytest.raises(CheckpointError, match="more than 10 values"):
        TreeEncoder().encode([1] * 10, ("run",))
    monkeypatch.setattr(tree, "MAX_DEPTH", 2)
    assert TreeEncoder().encode([[1]], ("run",)[:0]) == [[1]]
    with pytest.raises(CheckpointError, match="nested deeper than 2"):
        TreeEncoder().encode([[1]], ("run",))


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
def test_the_thread_beside_training_gives_way(tmp_path):
    """The thread alone; where the run waits for the save it does not."""
    found: list[int] = []

    class Asking(QuickDisk):
        def create(self, path: Path) -> int:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return super().create(path)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    for asynchronous in (True, False):
        writer = in_a_run(saver(tmp_path / str(asynchronous), asynchronous=asynchronous))
        writer.directory.disk = Asking()
        writer.save(contents(1, "run"), manifest(1))
        writer.wait()
    assert {*found[:3]} == {min(19, own + 15)}
    assert {*found[3:]} == {own} == {os.getpriority(os.PRIO_PROCESS, 0)}


# --- which checkpoints stay ---

_saves = st.lists(
    st.tuples(st.integers(1, 12), st.none() | st.sampled_from([-1.0, 0.0, 0.5, 2.0]) | st.floats(-9, 9)), max_size=14
)
_rules = st.builds(
    Retention,
    last=st.integers(1, 4),
    best=st.integers(1, 3),
    mode=st.sampled_from(["min", "max"]),
    every=st.none() | st.integers(1, 5),
)


def _stays(saves: list[tuple[int, float | None]], rule: Retention, index: int) -> bool:
    """By the words of the rule, one save at a time; `saves` are in the order in which they were written."""
    update, score = saves[index]
    latest = [i for i, (other, _) in enumerate(saves) if other not in [later for later, _ in saves[i + 1 :]]]
    newer = [i for i in latest if i > index]

    def beats(theirs: float) -> bool:
        assert score is not None
        return theirs < score if rule.mode == "min" else theirs > score

    if score is not None and (update, score) not in saves[index + 1 :]:
        earlier = {save for save in saves[: saves.index((update, score))] if save[1] == score}
        before = {save for save in saves if save[1] is not None and beats(save[1])} | earlier
        if len(before) < rule.best:
            return True
    return index in latest and (len(newer) < rule.last or (rule.every is not None and update % rule.every == 0))


@pytest.mark.slow
@given(_saves, _rules, st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_what_stays_is_what_the_rule_says(saves, rule, random):
    """The last, the best and every so many of what was saved, an update with a score only once; in any order."""
    manifests = [manifest(update, score=score, serial=serial) for serial, (update, score) in enumerate(saves, start=1)]
    shuffled = random.sample(manifests, len(manifests))
    gone = {shuffled[index].serial - 1 for index in rule.surplus(shuffled)}

    assert gone == {index for index in range(len(saves)) if not _stays(saves, rule, index)}
    assert not saves or len(saves) - 1 not in gone


@pytest.mark.parametrize(
    ("updates", "stays"),
    [([3, 6, 9], "update-00000003"), ([3, 6, 6, 9], "update-00000003"), ([3, 6, 3, 9], "update-00000003.1")],
    ids=["three", "another again", "itself again"],
)
def test_of_equal_scores_the_first_is_the_best(tmp_path, updates, stays):
    """As for Validation and EarlyStopping; of an update that was saved again the latest copy."""
    rule = Retention(last=1, best=1, mode="max", every=None, metric="accuracy")
    writer = CheckpointWriter(tmp_path, rule, asynchronous=False, warns=False)
    config = plain_config({}, {"best": {"metric": "accuracy", "mode": "max"}})
    for update in updates:
        writer.save(contents(update), replace(manifest(update, score=0.5), config=config))
    found = checkpoint.best(tmp_path)
    assert found is not None
    assert [found.path.name, "update-00000009"] == [stays, names(tmp_path)[-1]]
    assert len(names(tmp_path)) == 2


@pytest.mark.slow
@given(_saves, _rules)
def test_the_best_score_is_the_best(saves, rule):
    """Better means lower or higher, as the rule says; a state stays if there are too few, and with NaN it does not."""
    scored = [*dict.fromkeys((update, score) for update, score in saves if score is not None)]
    best = rule.best_of(rule.scored(manifest(update, score=score) for update, score in saves))

    assert best == sorted(scored, key=lambda save: save[1] if rule.mode == "min" else -save[1])[: rule.best]
    assert not rule.is_among_best(float("nan"), best)
    assert len(best) == rule.best or rule.is_among_best(1e9, best)
    if len(best) == rule.best:
        worst = best[-1][1]
        assert not rule.is_among_best(worst, best)
        assert rule.is_among_best(worst - 1 if rule.mode == "min" else worst + 1, best)


def test_pruning_follows_the_rule_on_the_disk(tmp_path):
    """Ten saves, of which the last two, the best and each fourth stay; the same update again takes its own place."""
    rule = Retention(last=2, best=1, mode="max", every=4)
    writer = CheckpointWriter(tmp_path, rule, asynchronous=False, warns=False)
    writer.directory.disk = QuickDisk()
    tell: Callable[[int], float] = {2: 9.0, 9: 1.0}.get  # type: ignore[assignment]
    for update in [*range(1, 11), 10]:
        writer.save(contents(update), manifest(update, score=tell(update)))

    assert names(tmp_path) == [f"update-{name}" for name in ("00000002", "00000004", "00000008", "00000009", "00000010.1")]


# --- permissions ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    """Sets the umask of this process, until the end of the test."""
    before = os.umask(0)
    os.umask(before)
    yield lambda mask: os.umask(mask) and None
    os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0o000], ids=["022", "002", "077", "000"])
def test_files_and_directories_follow_the_umask(mask, umask, tmp_path):
    """As any new file does: a group that may write to new files may write to checkpoints."""
    umask(mask)
    model = torch.nn.Linear(4, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
    saver = Checkpoint(tmp_path / "runs/first", every=1)
    saver.attach(trainer)
    modes: dict[str, int] = {}

    def look() -> None:
        found = [Path(top, name) for top, directories, files in os.walk(tmp_path) for name in (*directories, *files)]
        for path in found:
            with suppress(FileNotFoundError):  # the thread that writes renames and removes
                modes[path.name] = stat.S_IMODE(path.stat().st_mode) ^ ((0o777 if path.is_dir() else 0o666) & ~mask)

    trainer.add_event_handler(Events.ITERATION_COMPLETED, look)
    trainer.run([torch.ones(2, 4)] * 3, max_epochs=1)
    look()
    checkpoint.consolidate(saver.latest, tmp_path / "runs/model.pt")
    look()

    expected = {
        "runs",
        "first",
        ".lock.json",
        saver.latest.name,
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
        "model.pt",
    }
    assert expected <= set(modes)
    assert {name: oct(difference) for name, difference in modes.items() if difference} == {}


@pytest.mark.parametrize("call", ["O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "preadv", "pwrite"])
def test_a_system_without_the_calls_is_refused(call, tmp_path, monkeypatch):
    """When the handler is made, in one line that names the call and what to do; nothing is written."""
    monkeypatch.delattr(os, call)
    with pytest.raises(NotImplementedError, match=rf"Checkpoint needs os\.{call}, which this system .* does not have; train"):
        Checkpoint(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_system_without_relative_removal_is_refused(tmp_path, monkeypatch):
    """As Windows is, where no call takes the descriptor of a directory."""
    monkeypatch.setattr(os, "supports_dir_fd", frozenset())
    with pytest.raises(NotImplementedError, match="files relative to the descriptor of a directory, which this system"):
        Checkpoint(tmp_path / "run")


class SeesTheCollector:
    """Notes whether Python may collect garbage whenever its state is asked for or given back."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def state_dict(self) -> dict[str, Any]:
        self.seen.append(gc.isenabled())
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        self.seen.append(gc.isenabled())


def test_python_collects_no_garbage_while_the_run_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of a thousand tensors takes so many objects that every second save would look through all memory."""
    take, taken = Snapshot.take, list[bool]()
    monkeypatch.setattr(Snapshot, "take", lambda *given: (taken.append(gc.isenabled()), take(*given))[1])
    first, resumed = SeesTheCollector(), SeesTheCollector()
    for probe in (first, resumed):
        model = torch.nn.Linear(2, 1)
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: (model(x).sum(), len(x)))
        checkpoint = Checkpoint(tmp_path, every=100, to_save={"probe": probe})
        checkpoint.attach(trainer)
        with trainer.session():
            trainer.update([torch.ones(1, 2)])
            checkpoint.save()
        assert gc.isenabled()
        assert probe.seen[-1] is taken[-1] is False
    assert resumed.seen[0] is False


NEVER_LEFT = """
import sys, time
import torch
from ignite_train import create_trainer
from ignite_train.checkpoint.disk import Disk
from ignite_train.handlers import Checkpoint

sync = Disk.sync
Disk.sync = lambda self, descriptor: (time.sleep(0.3), sync(self, descriptor))
model = torch.nn.Linear(2, 1)
trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().sum())
Checkpoint(sys.argv[1], every=1).attach(trainer)
session = trainer.session()
session.__enter__()
trainer.update([torch.ones(1, 2)])
"""


@pytest.mark.slow
def test_the_save_of_a_session_that_is_never_left_ends_before_the_interpreter(tmp_path):
    """As where a notebook's kernel ends: Python stops the thread that writes. The disk is slow here."""
    done = subprocess.run([sys.executable, "-c", NEVER_LEFT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [*tmp_path.glob("update-*")] == [tmp_path / "update-00000001"]
