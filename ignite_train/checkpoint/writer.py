"""Writing checkpoints beside the run, which waits for a copy of its state; one thread writes, commits and removes old ones."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ignite_train.checkpoint.directory import CheckpointDirectory, Contents, commit, on_main, refuse_unreadable
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.lock import DirectoryLock
from ignite_train.checkpoint.manifest import Manifest
from ignite_train.checkpoint.mirror import Mirror
from ignite_train.checkpoint.retention import Retention
from ignite_train.checkpoint.tensor_files import Piece
from ignite_train.device.streams import has_streams
from ignite_train.errors import CheckpointError, LockTakenOverError
from ignite_train.internals.of_torch import foreach_copy_
from ignite_train.ranks import collectives

__all__ = ["GIVE_UP_AFTER", "CheckpointWriter", "Snapshot"]

GIVE_UP_AFTER = 5
_PATIENCE_SECONDS = 30.0  # for a save and a removal that are under way, when the run breaks off
_NICENESS = 15  # added to the niceness of the process for the thread that writes, so that training goes first
_WAITS_FOR_THREADS = _THREAD = "Checkpoint"  # HangWatch looks for the first name in the file where a thread stands

_DEVICE = attrgetter("data.device")  # of a piece

_logger = logging.getLogger(__name__)


class Snapshot:
    """Copies of tensors in the memory of the host, in buffers that the next snapshot uses again: one copy of the state.

    The first one also has to get the memory; pages that were never touched cost more than the copy itself.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._layouts: dict[str, tuple[torch.dtype, torch.Size, tuple[int, ...]]] = {}

    def take(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Copies the numbers of `pieces`. Synchronises with the devices that hold some."""
        layouts = {name: (piece.data.dtype, piece.data.shape, piece.data.stride()) for name, piece in pieces.items()}
        buffers = {
            name: self._memory[name] if self._layouts.get(name) == layouts[name] else _empty_copy(piece.data)
            for name, piece in pieces.items()
        }
        sources = [piece.data for piece in pieces.values()]
        if sources:
            foreach_copy_([*buffers.values()], sources, non_blocking=True)
        _await_devices(pieces)
        self._memory, self._layouts = buffers, layouts
        return {name: Piece(buffers[name], piece.start, piece.whole) for name, piece in pieces.items()}


class CheckpointWriter:
    """Saves one checkpoint at a time. All ranks must call it.

    Args:
        path: the directory of the checkpoints.
        retention: which of them stay.
        asynchronous: whether training continues while a thread writes.
        warns: whether a failure is logged; otherwise it is raised.
        give_up_after: this many failures in a row are raised in any case.
        mirror: where each checkpoint is copied once it is committed. The save is over when the copy is.

    Attributes:
        directory: what they are written to.
        latest: the newest one that is committed.
        has_lost_one: whether a failure was only logged; the caller sets it back.
    """

    def __init__(
        self,
        path: Path,
        retention: Retention,
        *,
        asynchronous: bool,
        warns: bool,
        give_up_after: int = GIVE_UP_AFTER,
        mirror: Mirror | None = None,
    ) -> None:
        self.retention, self.asynchronous, self.warns, self.give_up_after = retention, asynchronous, warns, give_up_after
        self.directory, self.mirror = CheckpointDirectory(path, Disk(), DirectoryLock(path)), mirror
        self.latest: Path | None = None
        self.has_lost_one = False
        self._is_taken_over = False
        self._is_held = False  # by a run; otherwise each save takes the lock
        self._failures = 0  # in a row
        self._snapshot = Snapshot()
        self._group: Any = None
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # what the thread does, in order; None ends it
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # which started it; a forked one does not have it
        self._durable: threading.Event | None = None  # whether the save that the run has not waited for is, or has failed
        self._place = "disk"  # or "mirror": what it is being written to, or has failed at
        self._error: BaseException | None = None

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keeps other runs from writing to the directory until the end of the `with`. Collective.

        A directory that does not exist yet, or cannot be written to, is taken by the first save. The newest and the best
        checkpoints are fetched from the mirror, where the directory lacks them.

        Raises:
            CheckpointError: another run writes to it, or the mirror cannot be reached.
        """
        self._is_held, patience = True, _PATIENCE_SECONDS
        try:
            on_main(collectives.gather_objects, "taking the directory of the checkpoints", self._hold)
            if self.mirror is not None:
                self.mirror.fetch(self.directory, self.retention, collectives.gather_objects)
            yield
            patience = threading.TIMEOUT_MAX
        finally:
            try:
                self._end_thread(patience)
            finally:  # after Ctrl-C in that wait too
                self._is_held = False
                self._release()

    def _end_thread(self, patience_seconds: float) -> None:
        """Returns when the old checkpoints are removed, or when that took too long: the next start removes what is left.

        After an exception it waits as long for a save that is still being written, whose failure is only logged.
        """
        thread, self._thread = self._thread, None
        if thread is None or self._process != os.getpid():
            return
        work, self._work = self._work, SimpleQueue()
        work.put(None)
        atexit.unregister(self._await_at_exit)
        if self._durable is not None and not self._durable.wait(patience_seconds):
            why = f"the {self._place} is slow, or other ranks do not answer"
            _logger.warning(f"the last checkpoint is not written after another {patience_seconds:g} s: {why}")
            return
        if self._error is not None:
            _logger.warning(f"the last checkpoint was not written: {self._error}")
            self._durable = self._error = None  # the next run of this process does not end by it
        thread.join(patience_seconds)
        if thread.is_alive():
            _logger.warning(f"an old checkpoint in {self.directory.path} is still being removed; the next start continues")

    def _await_at_exit(self) -> None:
        """Python stops the thread at its exit, before the `with` of a session ends that was never left."""
        if self._durable is not None and self._process == os.getpid():
            self._durable.wait(_PATIENCE_SECONDS)

    def _hold(self) -> None:
        with suppress(OSError):  # the first save reports it, and a run that saves nothing need not know
            self._lock.hold()

    def _release(self) -> None:
        if collectives.is_main_rank():
            self._lock.release()

    @property
    def _lock(self) -> DirectoryLock:
        assert self.directory.lock is not None  # noqa: S101  # it is made with one
        return self.directory.lock

    def prepare(self) -> None:
        """Makes the process group in which the threads of the ranks agree, beside the run's own collectives. Collective."""
        if self._group is None:
            self._group = collectives.own_group()

    def resume_from(self, path: Path) -> None:
        """Notes that the run resumes from a checkpoint that every rank has read whole, and continues its directory. Collective.

        Raises:
            CheckpointError: the directory cannot be read.
        """
        self.latest, self._is_taken_over = path, True
        on_main(collectives.gather_objects, "looking for checkpoints", self.directory.know)

    def refuse_unread(self, update: int) -> None:
        """Refuses to save beside later checkpoints that this run has neither written nor read, and would remove. Collective.

        Args:
            update: of the trainer, for the message.

        Raises:
            CheckpointError: another trainer has saved to the directory since this one has saved or read there.
        """
        if name := on_main(collectives.gather_objects, "looking for checkpoints", self._newest_of_others):
            raise CheckpointError(
                f"a trainer must not save where later checkpoints are that it has neither written nor read, got {name} in "
                f"{self.directory.path} and a trainer at update {update}; pass resume='must' to run, which goes back to that "
                "checkpoint, or choose another directory; a new trainer resumes from it in its first run, if Checkpoint is "
                "attached before"
            )

    def _newest_of_others(self) -> str:
        """The newest checkpoint in the directory, if this run does not know it; for rank 0."""
        known = self.directory.known_serial
        try:
            found, failed = self.directory.scan()
        except OSError:
            if known:  # it has saved there, and a save to come tells what is wrong
                return ""
            raise
        if not known:
            refuse_unreadable(failed)
        damaged = [] if known else [Path(one.path).name for one in failed]
        later = [name for name, manifest in found if manifest.serial > known]
        return ([*damaged, *later] or [""])[-1]

    def catch_up(self) -> None:
        """Copies the checkpoints that the mirror lacks, at the start, since a run that is over makes no save. Collective.

        Raises:
            CheckpointError: it failed.
        """
        if self.mirror is not None:
            self.attempt(partial(self.mirror.send, self.directory, self.retention, collectives.gather_objects), place="mirror")

    def attempt(self, work: Callable[[], object], *, place: str = "disk") -> None:
        """Does something of what a save does, so that an error is found now. Collective.

        Args:
            work: raises a CheckpointError on all ranks if it fails on one.
            place: where it fails, `"disk"` or `"mirror"`.

        Raises:
            CheckpointError: it failed.
        """
        try:
            work()
        except CheckpointError as error:
            self._report(error, is_last=False, place=place)

    def save(self, contents: Contents, manifest: Manifest, *, is_last: bool = False) -> None:
        """Waits for the save before, then takes a copy of the tensors and starts.

        Args:
            contents: what this rank writes.
            manifest: see `commit`.
            is_last: the run is over. It waits until all is written, so nothing is copied, and a failure is always raised.

        Raises:
            CheckpointError: the save before failed; or this one, if it is not asynchronous or is the last.
        """
        self.wait()
        if self._process != os.getpid():
            self._thread, self._process = None, os.getpid()
        is_beside = self.asynchronous and self._is_held and not is_last
        if is_beside:
            known = self.directory.frozen is not None and self.directory.frozen.name == contents.frozen_name
            frozen = {} if known else Snapshot().take(contents.frozen)  # copied once, so without memory that stays
            contents = replace(contents, pieces=self._snapshot.take(contents.pieces), frozen=frozen)
        else:
            _await_devices(contents.pieces | contents.frozen)  # the thread that writes does not know the streams of this one
        if self._is_held and self._thread is None:
            target = partial(_do, self._work, calm=self.asynchronous)
            thread = threading.Thread(target=target, name=_THREAD, daemon=True)
            thread.start()
            self._thread = thread
            atexit.register(self._await_at_exit)
        self._durable = durable = threading.Event()
        write = partial(self._write, contents, manifest, durable)
        if self._is_held:
            self._work.put(write)
        else:
            write()  # no training runs beside it, and the process may end next
        if not is_beside:
            self.wait(is_last=is_last)

    def wait(self, *, is_last: bool = False) -> None:
        """Returns when the latest save is durable. Older checkpoints may still be removed then.

        Args:
            is_last: the run is over, and a failure is always raised.

        Raises:
            CheckpointError: the latest save failed, on all ranks alike.
        """
        if self._durable is None or self._process != os.getpid():
            return
        self._durable.wait()
        self._durable, error, self._error = None, self._error, None
        if error is None:
            self._failures = 0
        else:
            self._report(error, is_last=is_last, place=self._place)

    def _report(self, error: BaseException, *, is_last: bool, place: str) -> None:
        if not isinstance(error, Exception):  # Ctrl-C, in a save between runs
            raise error
        self._failures += 1
        if not self.warns or not isinstance(error, CheckpointError):
            raise CheckpointError(str(error)) from error
        if isinstance(error, LockTakenOverError):
            raise error
        if is_last:
            raise CheckpointError(f"{error}; the run is over, and its last state is not on the {place}") from error
        if self._failures >= self.give_up_after:
            raise CheckpointError(
                f"{error}; that is failure {self._failures} in a row, and give_up_after={self.give_up_after}: make the "
                f"{'directory' if place == 'disk' else place} writable, and start again"
            ) from error
        self.has_lost_one = True
        if collectives.is_main_rank():
            _logger.warning(f"{error}; training continues, and the older checkpoints are untouched")

    def _write(self, contents: Contents, manifest: Manifest, durable: threading.Event) -> None:
        """Writes one checkpoint. The next save waits until `durable` is set, and not until older ones are removed."""

        def note_durable(path: Path) -> None:
            self.latest = path
            if self.mirror is None:
                durable.set()

        self._place = "disk"
        try:
            if self._is_taken_over and collectives.is_main_rank():  # by a process that was killed too early to remove it
                self.directory.prune(self.retention, newest=self.latest)
            self._is_taken_over = False
            exchange = partial(collectives.gather_objects, group=self._group)
            commit(self.directory, contents, manifest, self.retention, exchange, note_durable)
            if self.mirror is not None:
                self._place = "mirror"
                self.mirror.send(self.directory, self.retention, exchange)
        except BaseException as error:
            self._error = error
        finally:
            if not self._is_held:
                self._release()
            durable.set()


def _await_devices(pieces: Mapping[str, Piece]) -> None:
    """Returns when the devices have finished the work that `pieces` may depend on. Synchronises."""
    for device in {*map(_DEVICE, pieces.values())}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)  # sync


def _empty_copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=has_streams(tensor.device))


def _do(work: SimpleQueue[Callable[[], None] | None], *, calm: bool) -> None:
    """What the thread is: it does one thing after another. `calm`: training goes first."""
    if calm:
        _give_way()
    while (one := work.get()) is not None:
        one()
        del one  # it refers to all that was written


def _give_way() -> None:
    """Lets training go first where there are fewer processors than threads. Linux alone has this for a single thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
