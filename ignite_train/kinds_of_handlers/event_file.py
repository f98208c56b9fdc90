"""The files that TensorBoard reads: its own messages, in TensorFlow's record format."""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from google_crc32c import value as crc32c

__all__ = ["EventFile", "event_files", "is_finished"]

_MASK = 0xA282EAD8  # TensorFlow's record format adds it to a checksum that it has rotated

_PREFIX = "events.out.tfevents."

_numbers_of_files: Iterator[int] = count()
_made_here: set[Path] = set()  # the files of this class in this process; another writer has names of the same form


def event_files(directory: Path) -> list[Path]:
    """The files of events in a directory."""
    return [path for path in directory.iterdir() if path.name.startswith(_PREFIX)] if directory.is_dir() else []


def is_finished(path: Path) -> bool:
    """Whether a file of events is not empty, and no other writer of this process may still be writing to it."""
    return path.stat().st_size > 0 and (f".{_writer()}." not in path.name or path.resolve() in _made_here)


def _writer() -> str:
    return f"{socket.gethostname()}.{os.getpid()}"


class EventFile:
    """A file of events, each of which has the number of an update and what is shown there.

    It holds what torch's `SummaryWriter` writes, without its queue and thread: an event is with the operating system when `add`
    returns, so that a killed process loses none, and an error is raised where it happens. `SummaryWriter` takes more than ten
    times as long, most of it for checksums that are computed in Python.

    Args:
        directory: it is made; TensorBoard reads its files in the order of their names, which begin with a second: the present
            one, or the one after that of the newest file, as where a clock was set back.
        hidden_from: the update from which on TensorBoard hides what earlier files have.

    Attributes:
        path: where it is.
        is_empty: whether nothing was added yet.

    Raises:
        OSError: the file cannot be written. None is left behind.
    """

    def __init__(self, directory: Path, hidden_from: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        directory.mkdir(parents=True, exist_ok=True)
        names = [path.name.removeprefix(_PREFIX)[:10] for path in event_files(directory)]
        newest = max((int(name) for name in names if name.isdecimal()), default=0)
        name = f"{_PREFIX}{max(int(time.time()), newest + 1):010d}.{_writer()}.{next(_numbers_of_files)}"
        self.path, self.is_empty = directory / name, True
        _made_here.add(self.path.resolve())
        self._file = self.path.open("wb", buffering=0)
        weakref.finalize(self, self._file.close)
        self._make_event: Any = Event
        self._make_summary: Any = Summary
        self._make_value: Any = Summary.Value
        begin = Event(wall_time=time.time(), step=hidden_from, session_log=SessionLog(status=SessionLog.START))
        try:
            self._write(_record(Event(wall_time=time.time(), file_version="brain.Event:2")))
            self._write(_record(begin))
        except OSError:
            self.remove()
            raise

    def add_numbers(self, numbers: Mapping[str, float], update: int) -> None:
        """Writes numbers as one event.

        Args:
            numbers: by their tags.
            update: where they are shown.

        Raises:
            OSError: they cannot be written.
        """
        values = [self._make_value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        self.add(self._make_summary(value=values), update)

    def add(self, summary: Any, update: int) -> None:
        """Writes a summary, which may have several values, as one event.

        Args:
            summary: a `Summary` of TensorBoard's, as the functions in `torch.utils.tensorboard.summary` make them.
            update: where it is shown.

        Raises:
            OSError: it cannot be written.
        """
        self._write(_record(self._make_event(wall_time=time.time(), step=update, summary=summary)))
        self.is_empty = False

    def fileno(self) -> int:
        """The descriptor of the open file."""
        return self._file.fileno()

    def close(self) -> None:
        """Closes the file, as far as the disk lets it."""
        with suppress(OSError):
            self._file.close()

    def remove(self) -> None:
        """Closes the file and deletes it, as far as the disk lets it."""
        self.close()
        with suppress(OSError):
            self.path.unlink()

    def _write(self, record: bytes) -> None:
        while record:  # a disk that is nearly full may take a part
            record = record[self._file.write(record) :]


def _record(event: Any) -> bytes:
    """A record of TensorFlow's format: the length of the event, its checksum, the event, its checksum."""
    encoded = event.SerializeToString()
    length = struct.pack("<Q", len(encoded))
    return b"".join((length, _masked_checksum(length), encoded, _masked_checksum(encoded)))


def _masked_checksum(data: bytes) -> bytes:
    checksum: int = crc32c(data)
    return struct.pack("<I", ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF)
