"""The files that TensorBoard reads, written as cheaply as a log that is there in each update must be."""

from __future__ import annotations

import functools
import os
import socket
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ignite_train.handler.crc32c import ChangingBytes, crc32c, masked

__all__ = ["EventFile"]

_MAX_RECORDS = 8
_HEAD = 12  # bytes of a record before its event

_numbers_of_files: Iterator[int] = count()


class EventFile:
    """A file of events, each of which has the number of an update and what is shown there.

    It holds what torch's `SummaryWriter` writes, without its queue and thread: an event is with the operating system when `add`
    returns, so that a killed process loses none, and an error is raised where it happens. For each combination of tags there is
    a record, of which an event changes the numbers and the checksum. `SummaryWriter` takes more than ten times as long, most of
    it for checksums that are computed in Python.

    Args:
        directory: it is made; TensorBoard reads its files in the order of their names, which begin with the second.
        hidden_from: the update from which on TensorBoard hides what earlier files have.

    Attributes:
        is_empty: whether nothing was added yet.

    Raises:
        OSError: the file cannot be written. None is left behind.
    """

    def __init__(self, directory: Path, hidden_from: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers_of_files)}"
        self._path, self.is_empty = directory / name, True
        self._file = self._path.open("wb", buffering=0)
        weakref.finalize(self, self._file.close)
        self._make_event: Any = Event
        self._records: dict[tuple[tuple[str, ...], int], _NumbersRecord] = {}
        self._latest: tuple[tuple[str, ...], int] | None = None  # the key of the record that was written last
        self._record: _NumbersRecord | None = None  # which is this one
        begin = Event(wall_time=time.time(), step=hidden_from, session_log=SessionLog(status=SessionLog.START))
        try:
            self._write(_record(Event(wall_time=time.time(), file_version="brain.Event:2")))
            self._write(_record(begin))
        except OSError:
            self.remove()
            raise

    def add_numbers(self, tags: tuple[str, ...], values: Sequence[float], update: int) -> None:
        """Writes numbers as one event.

        Args:
            tags: their names, each once.
            values: the number of each.
            update: where they are shown.

        Raises:
            OSError: they cannot be written.
        """
        key = tags, (update.bit_length() + 6) // 7 or 1
        if key != self._latest:  # or else nothing need be looked up
            if key not in self._records:
                if len(self._records) == _MAX_RECORDS:
                    self._records.clear()
                self._records[key] = _NumbersRecord(*key)
            self._latest, self._record = key, self._records[key]
        assert self._record is not None  # noqa: S101  # of the key
        self._write(self._record.filled(time.time(), update, values))
        self.is_empty = False

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

    def close(self) -> None:
        """Closes the file, as far as the disk lets it."""
        with suppress(OSError):
            self._file.close()

    def remove(self) -> None:
        """Closes the file and deletes it, as far as the disk lets it."""
        self.close()
        with suppress(OSError):
            self._path.unlink()

    def _write(self, record: bytes | bytearray) -> None:
        while record:  # a disk that is nearly full may take a part
            record = record[self._file.write(record) :]


class _NumbersRecord:
    """The record of an event that has a number for each of some tags.

    Args:
        tags: their names.
        step_length: the bytes of the update in protobuf's encoding: 7 bits in each.
    """

    def __init__(self, tags: tuple[str, ...], step_length: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        encoded, ends = b"", []
        for tag in tags:  # the number is the last field of a value, and has four bytes
            encoded += Summary(value=[Summary.Value(tag=tag, simple_value=1.0)]).SerializeToString()
            ends.append(len(encoded))
        summary = Event(summary=Summary.FromString(encoded)).SerializeToString()
        # Parts of a message one behind the other are the message. The time has one byte for the field, and eight; so has the
        # update one for the field.
        head = Event(wall_time=1.0).SerializeToString() + Event(step=1 << 7 * (step_length - 1)).SerializeToString()
        before = len(head) + len(summary) - len(encoded)
        places = [*range(1, 9), *range(10, len(head))]
        places += [place for end in ends for place in range(before + end - 4, before + end)]
        event = bytearray(head + summary)
        for place in places:
            event[place] = 0
        self._checksum = ChangingBytes(event, places)
        self._step_length, self._crc_at = step_length, _HEAD + len(event)
        self._changing = struct.Struct(f"<d{step_length}s{len(tags)}f")
        self._record = bytearray(_head(len(event)) + event + bytes(4))
        self._bytes, self._places = np.frombuffer(self._record, np.uint8), _HEAD + np.array(places, np.intp)

    def filled(self, wall_time: float, update: int, values: Sequence[float]) -> bytearray:
        """The record with these numbers, as float32; infinite where they are too large for it. The next call changes it."""
        step = [update >> shift & 127 | 128 for shift in range(0, 7 * self._step_length, 7)]
        step[-1] &= 127
        try:
            packed = self._changing.pack(wall_time, bytes(step), *values)
        except OverflowError:
            packed = self._changing.pack(wall_time, bytes(step), *_rounded(values))
        changed = np.frombuffer(packed, np.uint8)
        self._bytes[self._places] = changed
        struct.pack_into("<I", self._record, self._crc_at, masked(self._checksum.crc32c(changed)))
        return self._record


def _rounded(values: Sequence[float]) -> list[float]:
    """The numbers as float32 has them, infinite where they are too large for it."""
    with np.errstate(over="ignore"):
        rounded: list[float] = np.array(values, np.float64).astype(np.float32).tolist()
    return rounded


def _record(event: Any) -> bytes:
    """A record of TensorFlow's format: the length of the event, its checksum, the event, its checksum."""
    encoded = event.SerializeToString()
    return b"".join((_head(len(encoded)), encoded, struct.pack("<I", masked(crc32c(encoded)))))


@functools.lru_cache(maxsize=64)
def _head(length: int) -> bytes:
    encoded = struct.pack("<Q", length)
    return encoded + struct.pack("<I", masked(crc32c(encoded)))
