"""The commit protocol: a save that is cut short anywhere leaves the older checkpoints whole, and no half-written one.

All ranks write their files into a new directory and fsync them. Once all have done so, rank 0 writes the manifest, fsyncs it
and the directory, renames the directory to its final name (the commit) and fsyncs the parent. Rank 0 removes older
checkpoints only after all ranks know of the commit, each by a rename first.

Rank 0 of a run holds the lock of the directory, and checks that it still does before it commits or removes anything.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from zlib_ng import zlib_ng

from ignite_train.arguments import describe_error
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.lock import LOCK, DirectoryLock, writer_of
from ignite_train.checkpoint.manifest import (
    MANIFEST,
    MAX_INDEX_BYTES,
    MAX_MARKS,
    FileRecord,
    Manifest,
    UnusableCheckpoint,
    checkpoint_name,
    compact_json,
    count_marks,
    file_names,
    is_checkpoint_name,
    is_frozen_name,
    parse_manifest,
    printable,
    read_manifest,
    seal,
)
from ignite_train.checkpoint.retention import Retention
from ignite_train.checkpoint.tensor_files import Piece, write_tensors
from ignite_train.errors import (
    CheckpointError,
    CheckpointFormatError,
    DamagedCheckpointError,
    LockTakenOverError,
    UnreadableCheckpointError,
)
from ignite_train.ranks import collectives
from ignite_train.ranks.unlike_ranks import exchanged

__all__ = ["CheckpointDirectory", "Contents", "Exchange", "commit", "on_main", "refuse_unreadable", "together", "try_out"]

_logger = logging.getLogger(__name__)
_UNFINISHED, _REMOVED, _DAMAGED = ".unfinished-", ".removed-", "damaged-"
_MAX_LENGTH = 700  # of what is told of an error of one rank
_TRIAL_BYTES = 4096  # so that a full disk refuses them
T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]
"""Gives every rank what each of them passed, in rank order; see `collectives.gather_objects`."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What one rank writes.

    Attributes:
        trees: its objects, by name, as trees of `tree.py`.
        pieces: their tensors, or this rank's part of them.
        failure: why this rank has nothing to write; all ranks then fail with it.
        frozen: the tensors that lie in a file beside the checkpoint, which others refer to as well.
        frozen_name: the name of that file, which stands for what is in it.
    """

    trees: dict[str, Any]
    pieces: dict[str, Piece]
    failure: CheckpointError | None = None
    frozen: dict[str, Piece] = field(default_factory=dict)
    frozen_name: str = ""

    @property
    def all_pieces(self) -> dict[str, Piece]:
        """The tensors of both files."""
        return {**self.pieces, **self.frozen}


@dataclass(frozen=True, slots=True)
class _FrozenFile:
    """A file of frozen weights that this rank has written and the newest checkpoint refers to.

    Attributes:
        name: of it, in the directory of the checkpoints.
        record: of it.
        notes: what the index says of each tensor in it.
    """

    name: str
    record: FileRecord
    notes: dict[str, Any]


def together(exchange: Exchange, what: str, work: Callable[[], T]) -> list[T]:
    """Does `work` on every rank, and returns the results of all of them, in rank order. Collective.

    Raises:
        CheckpointError: `work` raised on some rank. All ranks raise the same error, which names each that failed; it is a
            `LockTakenOverError` if one of these was.
        ValueError: a rank has no such work, because its trainer was made otherwise.
    """
    try:
        mine: tuple[type[CheckpointError] | None, Any] = (None, work())
    except Exception as error:
        kind = LockTakenOverError if isinstance(error, LockTakenOverError) else CheckpointError
        mine = (kind, printable(describe_error(error), _MAX_LENGTH))
    outcomes = exchanged(exchange, "of Checkpoint", mine)
    failures = [f"rank {rank}, {text}" for rank, (kind, text) in enumerate(outcomes) if kind is not None]
    if failures:
        kind = LockTakenOverError if any(kind is LockTakenOverError for kind, _ in outcomes) else CheckpointError
        raise kind(f"{what} failed: {'; '.join(failures)}")
    return [value for _, value in outcomes]


def on_main(exchange: Exchange, what: str, work: Callable[[], T]) -> T:
    """Does `work` on rank 0 alone, and returns its result on every rank; an error is raised as by `together`. Collective."""
    results: list[Any] = together(exchange, what, work if collectives.is_main_rank() else lambda: None)
    result: T = results[0]
    return result


class CheckpointDirectory:
    """A directory of checkpoints, as rank 0 keeps it.

    A manifest is read once: a directory of ten thousand checkpoints is not read again at each save.

    Args:
        path: the directory.
        disk: the file system that it is on.
        lock: held while something is written; None where no other process writes.

    Attributes:
        frozen: the frozen weights of this rank that need not be written again; None before the first.
        later_than: the serial number of the newest checkpoint that a mirror has; what is written here comes after it.
        known_serial: the serial number of the newest checkpoint here that this object has written, or that `know` has found.
    """

    def __init__(self, path: Path, disk: Disk, lock: DirectoryLock | None = None) -> None:
        self.path, self.disk, self.lock = path, disk, lock
        self.frozen: _FrozenFile | None = None
        self.later_than = self.known_serial = 0
        self._being_removed: set[str] = set()  # by this process; a run that broke off may still do it beside the next
        self._manifests: dict[str, Manifest] = {}
        self._frozen_names: list[str] = []  # what the latest scan has found
        self._warned_about: set[str] = set()

    def exists(self) -> bool:
        """Whether the directory is there.

        Raises:
            OSError: the system cannot tell.
        """
        try:
            return stat.S_ISDIR(self.path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def scan(self, *, afresh: bool = False) -> tuple[list[tuple[str, Manifest]], list[UnusableCheckpoint]]:
        """The checkpoints by name, oldest first, and the errors of those whose manifest is unusable. Reads no other files.

        Args:
            afresh: read again what was read before.

        Raises:
            OSError: the directory cannot be read.
        """
        known = {} if afresh else self._manifests
        found, failed = dict[str, Manifest](), list[UnusableCheckpoint]()
        names = self.disk.names(self.path) if self.exists() else []
        self._frozen_names = [name for name in names if is_frozen_name(name)]
        for name in names:
            if is_checkpoint_name(name):
                try:
                    found[name] = known[name] if name in known else read_manifest(self.path / name)
                except (DamagedCheckpointError, UnreadableCheckpointError, CheckpointFormatError) as error:
                    failed.append(error)
        self._manifests = found  # now, since the thread that removes old checkpoints may scan at the same time
        return sorted(found.items(), key=lambda entry: entry[1].serial), failed

    def know(self) -> None:
        """Notes that a run continues what is here now.

        Raises:
            OSError: the directory cannot be read.
        """
        self.known_serial = max((manifest.serial for _, manifest in self.scan()[0]), default=0)

    def set_aside_before(self) -> list[str]:
        """The damaged checkpoints that were renamed by an earlier start."""
        names = self.disk.names(self.path) if self.exists() else []
        return [name for name in names if name.startswith(f"{_DAMAGED}update-")]

    def tidy(self) -> None:
        """Removes what a save or a removal that was cut short has left. What another run is writing stays.

        What cannot be removed does no harm; it is logged once.
        """
        writer, own = writer_of(self.path), "" if self.lock is None else self.lock.token
        foreign = f"{_UNFINISHED}{writer}-" if writer and writer != own else None
        left = (_UNFINISHED, _REMOVED, f"{LOCK}-") if own else (_UNFINISHED, _REMOVED)
        for name in self.disk.names(self.path):
            is_foreign = foreign is not None and name.startswith(foreign)
            if name.startswith(left) and not is_foreign and name not in self._being_removed:
                try:
                    self._remove(name)
                except (OSError, RecursionError) as error:
                    self._warn_once(name, f"what an earlier save left could not be removed: {error}")

    def begin(self) -> str:
        """Makes a directory for the files of a new checkpoint, and returns its name.

        Raises:
            CheckpointError: another run writes here; or the directory is no longer that of the saves before, in this run.
            CheckpointFormatError, UnreadableCheckpointError: there is a checkpoint of a format that is not read, or the disk
                failed, so that it can be neither ordered nor replaced: it may be the newest.
        """
        if self.lock is None or not self.lock.token:  # once it is held, a directory that is gone must not be made again
            self._make()
        if self.lock is not None:
            self.lock.hold()
        refuse_unreadable(self.scan()[1])
        self.tidy()
        token = "" if self.lock is None else f"{self.lock.token}-"
        name = f"{_UNFINISHED}{token}{os.urandom(6).hex()}"
        self.disk.make_directory(self.path / name)
        return name

    def _make(self) -> None:
        for path in reversed([path for path in (self.path, *self.path.parents) if not path.exists()]):
            with suppress(FileExistsError):  # another run beside this one has just made it
                self.disk.make_directory(path)
            self.disk.sync_directory(path.parent)  # a checkpoint is as durable as the way to it

    def abandon(self, name: str) -> None:
        """Removes the files of a save that failed, as far as possible."""
        with suppress(OSError):
            self._remove(name)

    def discard(self, name: str) -> None:
        """Ends a trial: syncs its directory and removes it, as a commit and a removal would.

        Raises:
            OSError: one of them would fail.
        """
        self.disk.sync_directory(self.path / name)
        self._remove(name)
        self.disk.sync_directory(self.path)

    def publish(self, unfinished: str, manifest: Manifest) -> str:
        """Commits: the directory `unfinished`, with the files of all ranks in it, becomes a checkpoint. Returns its name."""
        directory = self.path / unfinished
        written = self.disk.names(directory)
        for name, record in manifest.files.items():
            place = self.path if is_frozen_name(name) and name not in written else directory
            if (place / name).lstat().st_size != record.size:
                raise CheckpointError(
                    f"{name} has another size here than on the rank that wrote it: all ranks must share {self.path}"
                )
        found, _ = self.scan()
        manifest = replace(manifest, serial=1 + max([self.later_than, *(other.serial for _, other in found)]))
        sealed = seal(manifest)
        parse_manifest(sealed, directory)  # what no reader accepts must not be committed
        self.disk.write_file(directory / MANIFEST, [memoryview(sealed)], len(sealed))
        self.disk.sync_directory(directory)
        copy, taken = 0, set(self.disk.names(self.path))
        while (name := checkpoint_name(manifest.update, copy)) in taken:
            copy += 1
        self._check_lock()
        self._manifests[name] = manifest
        self.known_serial = manifest.serial  # before it is there: an error afterwards does not make it another run's
        self._put_in_place([directory / one for one in written if is_frozen_name(one)], directory, name)
        return name

    def adopt(self, unfinished: str, name: str) -> None:
        """Puts in place a checkpoint that lies whole in the directory `unfinished`, with its frozen weights beside it."""
        source = self.path / unfinished
        self.disk.sync_directory(source / name)
        self._check_lock()
        if name in self.disk.names(self.path):
            self.set_aside(name)  # its manifest is damaged, or it would not be replaced
        self._put_in_place([source / one for one in self.disk.names(source) if is_frozen_name(one)], source / name, name)

    def _put_in_place(self, frozen: list[Path], checkpoint: Path, name: str) -> None:
        """Renames frozen weights, and then the checkpoint that refers to them."""
        for one in frozen:  # in place of an equal one, if there is one; a kill after this leaves one too many
            self.disk.rename(one, self.path / one.name)
        if frozen:
            self.disk.sync_directory(self.path)
        self.disk.rename(checkpoint, self.path / name)
        self.disk.sync_directory(self.path)

    def prune(self, retention: Retention, *, newest: Path | None = None) -> None:
        """Removes the checkpoints that `retention` does not keep. Each is renamed first, so that none is read half removed.

        A failure is logged.

        Args:
            retention: which of them stay.
            newest: nothing is removed unless this is the newest one, because an older one may be surplus itself.
        """
        if self.lock is not None and not self.lock.token:
            return
        try:
            self._check_lock()
            found, _ = self.scan()
        except (OSError, CheckpointError) as error:
            _logger.warning(f"old checkpoints could not be removed: {error}")
            return
        if newest is not None and (not found or self.path / found[-1][0] != newest):
            return
        if newest is not None:
            self.tidy()  # what the process before has renamed
        for index in retention.surplus([manifest for _, manifest in found]):
            name = found[index][0]
            removed = f"{_REMOVED}{name}-{os.urandom(4).hex()}"
            try:
                self._being_removed.add(removed)
                self.disk.rename(self.path / name, self.path / removed)
                self.disk.sync_directory(self.path)
                self.disk.remove_tree(self.path / removed)
            except (OSError, RecursionError) as error:
                self._warned_about.add(removed)
                self._warn_once(name, f"an old checkpoint could not be removed: {error}")
            finally:
                self._being_removed.discard(removed)
        self._remove_frozen()

    def _remove_frozen(self) -> None:
        """Removes the files of frozen weights that no checkpoint refers to."""
        try:
            found, failed = self.scan() if self._frozen_names else ([], [])
            used = {name for _, manifest in found for name in manifest.files}
            for name in self._frozen_names if not failed else ():  # one that cannot be read may refer to any
                if name not in used:
                    self.disk.remove_tree(self.path / name)
        except OSError as error:
            self._warn_once("frozen", f"frozen weights that are not needed any more could not be removed: {error}")

    def set_aside(self, name: str) -> bool:
        """Renames a damaged checkpoint, so that no later start tries it again. Returns whether that was possible."""
        try:
            self.disk.rename(self.path / name, self.path / f"{_DAMAGED}{name}-{os.urandom(2).hex()}")
        except OSError:
            return False
        return True

    def _remove(self, name: str) -> None:
        """Renames it first, so that a suspended process that wakes up cannot commit what is half removed."""
        if name.startswith(_UNFINISHED):
            removed = f"{_REMOVED}{name.lstrip('.')}-{os.urandom(4).hex()}"
            self.disk.rename(self.path / name, self.path / removed)
            name = removed
        self.disk.remove_tree(self.path / name)

    def _check_lock(self) -> None:
        if self.lock is not None:
            self.lock.check()

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._warned_about:
            self._warned_about.add(name)
            _logger.warning(text)


def refuse_unreadable(failed: Iterable[UnusableCheckpoint]) -> None:
    """Raises the first failure of a scan that is not damage: such a checkpoint may be whole, and must not be passed over."""
    for failure in failed:
        if not isinstance(failure, DamagedCheckpointError):
            raise failure


def commit(
    directory: CheckpointDirectory,
    contents: Contents,
    manifest: Manifest,
    retention: Retention,
    exchange: Exchange,
    on_durable: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Writes a checkpoint, and then removes older ones. Collective over the ranks of `exchange`.

    Args:
        directory: where.
        contents: what this rank writes.
        manifest: without the files and the serial number, which are found here.
        retention: which of the older ones stay.
        exchange: between the ranks.
        on_durable: called with the checkpoint once it is durable, before older ones are removed.

    Raises:
        CheckpointError: it failed, on all ranks alike. The older checkpoints are untouched.
    """
    with _new_directory(directory, exchange) as unfinished:
        written = together(exchange, "writing a checkpoint", lambda: _write(directory, unfinished, contents))
        whole = replace(manifest, files={name: record for files in written for name, record in files.items()})
        name = on_main(exchange, "committing a checkpoint", partial(directory.publish, unfinished, whole))
    on_durable(directory.path / name)
    if collectives.is_main_rank():
        directory.prune(retention)
    return directory.path / name


def try_out(directory: CheckpointDirectory, contents: Contents, exchange: Exchange) -> None:
    """Tries all that a save does, except for writing the tensors, so that an error that each save would meet shows at once.

    Collective over the ranks of `exchange`. Leaves no files.

    Raises:
        CheckpointError: it failed, on all ranks alike.
    """
    with _new_directory(directory, exchange) as unfinished:
        place = on_main(exchange, "trying to write a checkpoint", lambda: directory.path)
        together(exchange, "trying to write a checkpoint", lambda: _write_page(directory, unfinished, contents, place))
        on_main(exchange, "trying to commit a checkpoint", partial(directory.discard, unfinished))


@contextmanager
def _new_directory(directory: CheckpointDirectory, exchange: Exchange) -> Iterator[str]:
    """Gives the name of a directory for the files of all ranks, which is removed if the `with` fails. Collective."""
    unfinished = on_main(exchange, "making a directory for a checkpoint", directory.begin)
    try:
        yield unfinished
    except BaseException:
        directory.frozen = None  # it may have been in that directory
        if collectives.is_main_rank():
            directory.abandon(unfinished)
        raise


def _write_page(directory: CheckpointDirectory, unfinished: str, contents: Contents, place: Path) -> None:
    """Writes a page into the directory that rank 0 has just made in `place`, as it sees it."""
    if contents.failure is not None:
        raise contents.failure
    path = directory.path / unfinished / file_names(collectives.rank())[0]
    try:
        directory.disk.write_file(path, [memoryview(bytes(_TRIAL_BYTES))], _TRIAL_BYTES)
    except FileNotFoundError as error:
        if collectives.is_main_rank():
            raise
        seen = f"{str(directory.path)!r} here and {str(place)!r} on rank 0"
        raise CheckpointError(f"ranks must share one directory, got {seen}; {error}") from error


def _write(directory: CheckpointDirectory, unfinished: str, contents: Contents) -> dict[str, FileRecord]:
    """Writes this rank's files, its frozen weights only if the newest checkpoint refers to others."""
    if contents.failure is not None:
        raise contents.failure
    disk, path = directory.disk, directory.path / unfinished
    index_name, tensors_name = file_names(collectives.rank())
    record, notes = write_tensors(disk, path / tensors_name, contents.pieces)
    index_of, files, frozen = {"objects": contents.trees, "tensors": notes}, {tensors_name: record}, directory.frozen
    if contents.frozen_name:
        if frozen is None or frozen.name != contents.frozen_name:
            written = write_tensors(disk, path / contents.frozen_name, contents.frozen)
            directory.frozen = frozen = _FrozenFile(contents.frozen_name, *written)
        index_of["frozen"] = {"file": frozen.name, "tensors": frozen.notes}
        files[frozen.name] = frozen.record
    index = compact_json(index_of)
    if len(index) > MAX_INDEX_BYTES:
        raise CheckpointError(f"the state has {len(index)} bytes beside its tensors, {MAX_INDEX_BYTES} at most; use tensors")
    if count_marks(index) > MAX_MARKS:  # or else the reader would refuse it
        raise CheckpointError(f"the state has more than {MAX_MARKS} values beside the numbers in its tensors; use tensors")
    disk.write_file(path / index_name, [memoryview(index)], len(index))
    return files | {index_name: FileRecord(len(index), zlib_ng.crc32(index))}
