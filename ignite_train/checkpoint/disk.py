"""What a checkpoint asks of a file system, each one call, so that a test can replace any of them."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform == "linux":
    import fcntl

__all__ = ["Disk", "naming", "refuse_other_systems"]

_NEEDED = ("O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "preadv", "pwrite")  # of `os`; Windows has none of them

_LARGE_BYTES = 32 * 2**20  # of a file that is worth a buffer
_BUFFER_BYTES = 8 * 2**20


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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path of the file to an error of a call that was given only a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


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
            try:
                data = data[os.write(descriptor, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not _set_direct(descriptor, on=False):
                    raise  # else the file system has direct writes, and wants other places or lengths than pages

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
            with naming(path):
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

    def write_file(self, path: Path, parts: Iterable[memoryview], size: int) -> None:
        """Writes a new file of `size` bytes, to the disk.

        A large one goes there from a buffer of our own, where the file system has direct writes. The system then makes no copy
        of it among the files that it holds in memory: that copy would take time of the processor and the memory bus from
        training, and the place of what the loaders have read.
        """
        with naming(path):
            self._write_file(self.create(path), parts, size)

    def _write_file(self, descriptor: int, parts: Iterable[memoryview], size: int) -> None:
        try:
            if size >= _LARGE_BYTES and _set_direct(descriptor, on=True):
                self._write_directly(descriptor, parts)
            else:
                for part in parts:
                    self.write(descriptor, part)
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def _write_directly(self, descriptor: int, parts: Iterable[memoryview]) -> None:
        for pages in _in_pages(parts):
            if len(pages) % mmap.PAGESIZE:  # the end of the file
                _set_direct(descriptor, on=False)
            self.write(descriptor, pages)


def _set_direct(descriptor: int, *, on: bool) -> bool:
    """Has writes to an open file go past the system's memory of files, or no longer. Returns whether that changed anything."""
    if sys.platform != "linux":
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) == on:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags ^ os.O_DIRECT)
    except OSError:  # the file system has no direct writes
        return False
    return True


def _in_pages(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in whole pages of memory, as direct writes want them, and at the end what is left.

    Write each of them before you ask for the next, which lies in the same memory.
    """
    buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
    filled = 0
    for part in parts:
        begin = 0
        while begin < len(part):
            taken = min(len(part) - begin, len(buffer) - filled)
            buffer[filled : filled + taken] = part[begin : begin + taken]
            begin, filled = begin + taken, filled + taken
            if filled == len(buffer):
                yield buffer
                filled = 0
    whole = filled - filled % mmap.PAGESIZE
    yield from (buffer[begin:end] for begin, end in ((0, whole), (whole, filled)) if begin < end)
