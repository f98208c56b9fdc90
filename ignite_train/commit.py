"""The commit protocol: wherever it is cut short, what was committed before is whole, and nothing half is taken for whole.

All ranks write their files into a new directory and fsync them. Once each has said so, rank 0 writes the manifest, fsyncs it
and the directory, renames the directory to its final name (the commit) and fsyncs the parent. Only when all ranks know of
that does rank 0 remove older checkpoints, each by a rename first.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ignite_train import distributed
from ignite_train.disk import Disk
from ignite_train.errors import CheckpointError, DamagedCheckpointError
from ignite_train.manifest import (
    MANIFEST,
    MAX_INDEX_BYTES,
    MAX_MARKS,
    FileRecord,
    Manifest,
    checkpoint_name,
    compact_json,
    count_marks,
    is_checkpoint_name,
    parse_manifest,
    read_manifest,
    seal,
)
from ignite_train.retention import Retention
from ignite_train.shards import Piece
from ignite_train.tensor_files import write_tensors

__all__ = ["CheckpointDirectory", "Contents", "Exchange", "commit", "together"]

_logger = logging.getLogger(__name__)
_UNFINISHED, _REMOVED, _DAMAGED = ".unfinished-", ".removed-", "damaged-"
T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]
"""Gives every rank what each of them passed, in rank order; see `distributed.gather_objects`."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What one rank writes.

    Attributes:
        trees: its objects, by name, as trees of `encoding.py`.
        pieces: their tensors, or this rank's part of them, in the memory of the host.
        failure: why this rank has nothing to write; all ranks then fail with it.
    """

    trees: dict[str, Any]
    pieces: dict[str, Piece]
    failure: CheckpointError | None = None


def together(exchange: Exchange, what: str, work: Callable[[], T]) -> list[T]:
    """Does `work` on every rank and gives all of them what each one's gave. Collective.

    Raises:
        CheckpointError: it raised on some rank; on all of them the same, naming each that failed.
    """
    try:
        mine: tuple[bool, Any] = (True, work())
    except Exception as error:
        mine = (False, f"{type(error).__name__}: {' '.join(str(error).split())}")
    outcomes = exchange(mine)
    failures = [f"rank {rank}, {text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
    if failures:
        raise CheckpointError(f"{what} failed: {'; '.join(failures)}")
    return [value for _, value in outcomes]


class CheckpointDirectory:
    """A directory of checkpoints, as rank 0 keeps it.

    Args:
        path: the directory.
        disk: what it is on.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path, self.disk = path, disk

    def scan(self) -> tuple[list[tuple[str, Manifest]], list[DamagedCheckpointError]]:
        """The checkpoints by name, oldest first, and those without a whole manifest. Other files are not read."""
        found: list[tuple[str, Manifest]] = []
        damaged: list[DamagedCheckpointError] = []
        for name in self.disk.names(self.path) if self.path.is_dir() else []:
            if is_checkpoint_name(name):
                try:
                    found.append((name, read_manifest(self.path / name)))
                except DamagedCheckpointError as error:
                    damaged.append(error)
        return sorted(found, key=lambda entry: entry[1].serial), damaged

    def tidy(self) -> None:
        """Removes what a save that was cut short, or a removal, has left; what cannot be removed is in nobody's way."""
        for name in self.disk.names(self.path):
            if name.startswith((_UNFINISHED, _REMOVED)):
                try:
                    self.disk.remove_tree(self.path / name)
                except OSError as error:
                    _logger.warning(f"what an earlier save left could not be removed: {error}")

    def begin(self) -> str:
        """Makes a directory for the files of a new checkpoint, and gives its name."""
        for path in reversed([path for path in (self.path, *self.path.parents) if not path.exists()]):
            self.disk.make_directory(path)
            self.disk.sync_directory(path.parent)  # a checkpoint is as durable as the way to it
        self.tidy()
        name = f"{_UNFINISHED}{os.urandom(6).hex()}"
        self.disk.make_directory(self.path / name)
        return name

    def abandon(self, name: str) -> None:
        """Removes the files of a checkpoint that came to nothing, as far as that is possible."""
        with suppress(OSError):
            self.disk.remove_tree(self.path / name)

    def publish(self, unfinished: str, manifest: Manifest) -> str:
        """Commits: the directory `unfinished`, with the files of all ranks in it, becomes a checkpoint. Gives its name."""
        directory = self.path / unfinished
        for name, record in manifest.files.items():
            if (directory / name).lstat().st_size != record.size:
                raise CheckpointError(
                    f"{name} has another size here than on the rank that wrote it: all must share {self.path}"
                )
        found, _ = self.scan()
        manifest = replace(manifest, serial=1 + max((other.serial for _, other in found), default=0))
        sealed = seal(manifest)
        parse_manifest(sealed)  # what no reader would take must not be committed
        self.disk.write_file(directory / MANIFEST, iter([memoryview(sealed)]))
        self.disk.sync_directory(directory)
        copy, taken = 0, set(self.disk.names(self.path))
        while (name := checkpoint_name(manifest.update, copy)) in taken:
            copy += 1
        self.disk.rename(directory, self.path / name)
        self.disk.sync_directory(self.path)
        return name

    def prune(self, retention: Retention, *, newest: Path | None = None) -> None:
        """Removes what `retention` can do without. Each vanishes by a rename: none is ever half there. A failure is logged.

        Args:
            retention: which of them stay.
            newest: nothing is removed unless this is the newest one, for one that is not may be surplus itself.
        """
        try:
            found, _ = self.scan()
            if newest is not None and (not found or self.path / found[-1][0] != newest):
                return
            for index in retention.surplus([manifest for _, manifest in found]):
                name = found[index][0]
                removed = self.path / f"{_REMOVED}{name}-{os.urandom(4).hex()}"
                self.disk.rename(self.path / name, removed)
                self.disk.sync_directory(self.path)
                self.disk.remove_tree(removed)
        except OSError as error:
            _logger.warning(f"an old checkpoint could not be removed: {error}")

    def set_aside(self, name: str) -> None:
        """Renames a damaged checkpoint, so that nobody stumbles over it again, if that is possible."""
        with suppress(OSError):
            self.disk.rename(self.path / name, self.path / f"{_DAMAGED}{name}-{os.urandom(2).hex()}")


def commit(
    directory: CheckpointDirectory, contents: Contents, manifest: Manifest, retention: Retention, exchange: Exchange
) -> Path:
    """Writes a checkpoint. Collective over the ranks of `exchange`; returns once it is durable.

    Args:
        directory: where.
        contents: what this rank writes.
        manifest: without the files and the serial number, which are found here.
        retention: what becomes of the others.
        exchange: between the ranks.

    Raises:
        CheckpointError: it failed, on all ranks alike. The others are as they were.
    """
    main = distributed.is_main_rank()
    unfinished = together(exchange, "making a directory for a checkpoint", lambda: directory.begin() if main else "")[0]
    try:
        written = together(exchange, "writing a checkpoint", lambda: _write(directory, unfinished, contents))
        whole = replace(manifest, files={name: record for files in written for name, record in files.items()})
        publish: Callable[[], str] = lambda: directory.publish(unfinished, whole) if main else ""  # noqa: E731
        name = together(exchange, "committing a checkpoint", publish)[0]
    except BaseException:
        if main:
            directory.abandon(unfinished)
        raise
    if main:
        directory.prune(retention)
    return directory.path / name


def _write(directory: CheckpointDirectory, unfinished: str, contents: Contents) -> dict[str, FileRecord]:
    if contents.failure is not None:
        raise contents.failure
    stem, disk, path = f"rank-{distributed.rank():05d}", directory.disk, directory.path / unfinished
    entries = write_tensors(disk, path / f"{stem}.bin", contents.pieces)
    index = compact_json({"objects": contents.trees, "tensors": {key: entry.as_json() for key, entry in entries.items()}})
    if len(index) > MAX_INDEX_BYTES:
        raise CheckpointError(f"the state has {len(index)} bytes beside its tensors, {MAX_INDEX_BYTES} at most; use tensors")
    if count_marks(index) > MAX_MARKS:  # or else the reader would refuse it
        raise CheckpointError(f"the state has more than {MAX_MARKS} values beside the numbers in its tensors; use tensors")
    disk.write_file(path / f"{stem}.json", iter([memoryview(index)]))
    return {
        f"{stem}.bin": FileRecord(sum(entry.num_bytes for entry in entries.values()), None),
        f"{stem}.json": FileRecord(len(index), zlib.crc32(index)),
    }
