"""What a checkpoint asks of a file system, each one call, so that a test can replace any of them."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Disk", "refuse_other_systems"]

_NEEDED = ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "preadv", "pwrite")  # of `os`; Windows has none of them


_BEGIN_BYTES = 8 * 2**20
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE, see sync_file_range(2): starts to write dirty pages, and waits for none


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        found: Any = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):  # a C library without it
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    found.restype = ctypes.c_int
    call: Callable[[int, int, int, int], int] = found
    return call


_sync_file_range = _find_sync_file_range()


def refuse_other_systems() -> None:
    """Checks that the system has the calls on files and directories that checkpoints need.

    Raises:
        NotImplementedError: one is missing, as on Windows.
    """
    missing = [f"os.{name}" for name in _NEEDED if name not in vars(os)]
    if missing or not {os.open, os.unlink, os.rmdir} <= os.supports_dir_fd:
        what = missing[0] if missing else "files relative to the descriptor of a directory"
        raise NotImplementedError(
            f"Checkpoint needs {what}, which this system ({platform.system()}) does not have; train without a Checkpoint, or "
            "use Linux, macOS or WSL"
        )


class Disk:
    """A file system, as a checkpoint sees it. Nothing here follows a symbolic link in the last part of a path."""

    def make_directory(self, path: Path) -> None:
        """Makes a directory that must not exist yet. The umask decides who may use it."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Opens a new file for writing, and returns its descriptor. The umask decides who may read and write it."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Writes all of `data`."""
        while len(data):
            data = data[os.write(descriptor, data) :]

    def begin_sync(self, descriptor: int, start: int, length: int) -> None:
        """Has the system begin to put some bytes of a file on the disk, so that `sync` finds less to do.

        A hint: it does nothing where the system or the file system lacks the call.
        """
        if _sync_file_range is not None:
            _sync_file_range(descriptor, start, length, _BEGIN_WRITING)

    def sync(self, descriptor: int) -> None:
        """Returns when what was written is on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Closes a file."""
        os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a directory a new name: at once, or not at all."""
        source.rename(target)

    def sync_directory(self, path: Path) -> None:
        """Returns when the names in a directory are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_file(self, path: Path, parent: int) -> None:
        """Removes a file or a link from the directory that has the descriptor `parent`; `path` ends with its name."""
        os.unlink(path.name, dir_fd=parent)

    def remove_directory(self, path: Path, parent: int) -> None:
        """Removes an empty directory, in the same way."""
        os.rmdir(path.name, dir_fd=parent)

    def names(self, path: Path | int) -> list[str]:
        """What is in a directory, sorted; an open one can be named by its descriptor."""
        return sorted(os.listdir(path))  # noqa: PTH208

    def remove_tree(self, path: Path) -> None:
        """Removes a file, a link, or a directory with all that is in it. The target of a link stays.

        A directory is opened without following a link, and what is in it is named by its descriptor from then on. So a link
        that another process puts in its place meanwhile cannot lead the removal elsewhere.
        """
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._remove(path, parent)
        finally:
            os.close(parent)

    def _remove(self, path: Path, parent: int) -> None:
        try:
            descriptor = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            self.remove_file(path, parent)
            return
        try:
            for name in self.names(descriptor):
                self._remove(path / name, descriptor)
        finally:
            os.close(descriptor)
        self.remove_directory(path, parent)

    def write_file(self, path: Path, parts: Iterator[memoryview]) -> None:
        """Writes a new file, to the disk."""
        descriptor = self.create(path)
        begun = end = 0
        try:
            for part in parts:
                self.write(descriptor, part)
                end += len(part)
                if end - begun >= _BEGIN_BYTES:
                    self.begin_sync(descriptor, begun, end - begun)
                    begun = end
            self.sync(descriptor)
        finally:
            self.close(descriptor)
