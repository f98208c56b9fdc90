"""Files that must be what was written: each is a regular one, with the size and the checksum that another file records."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileRecord", "naming", "open_regular", "read_regular"]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size and checksum that a file must have.

    Attributes:
        size: in bytes.
        crc32: of all bytes; of a file of tensors that of its header, since an index has the checksum of each tensor.
    """

    size: int
    crc32: int

    def check(self, path: Path, checked: bytes) -> None:
        """Compares the checksum.

        Raises:
            ValueError: these bytes of the file are others than were written.
        """
        if zlib.crc32(checked) != self.crc32:
            raise ValueError(f"{path.name} is not the file that was written: the checksum differs")

    def read(self, path: Path) -> bytes:
        """The contents of the file, in one read.

        Raises:
            OSError: it cannot be read, or is a link.
            ValueError: it is not what was written.
        """
        data = read_regular(path, self.size)
        self.check(path, data)
        return data


def read_regular(path: Path, size: int) -> bytes:
    """The contents of a regular file of `size` bytes.

    Raises:
        OSError: it cannot be read, or is a link.
        ValueError: it is something else, or has another size.
    """
    descriptor = open_regular(path, size)
    try:
        parts, left = [], size
        with naming(path):
            while left and (part := os.read(descriptor, left)):
                parts.append(part)
                left -= len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)  # one part is not copied


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path of the file to an error of a call that was given only a descriptor."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_regular(path: Path, size: int) -> int:
    """Opens a regular file of `size` bytes for reading and returns its descriptor.

    Raises:
        OSError: it cannot be opened, or is a link.
        ValueError: it is something else, or has another size.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        if status.st_size != size:
            raise ValueError(f"{path.name} has {status.st_size} bytes, it was written with {size}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
