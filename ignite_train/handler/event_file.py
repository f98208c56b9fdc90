"""The files that TensorBoard reads, written as cheaply as a log that is there in each update must be."""

from __future__ import annotations

import functools
import os
import socket
import struct
import sys
import time
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["EventFile"]

_POLYNOMIAL = 0x82F63B78  # of CRC-32C (Castagnoli), with its bits reversed
_ONES = 0xFFFFFFFF
_MASK = 0xA282EAD8  # TensorFlow's record format adds it to a checksum that it has rotated
_BLOCK = 2048  # bytes that are looked up at once

_numbers_of_files: Iterator[int] = count()


class EventFile:
    """A file of events, each of which has the number of an update and what is shown there.

    It holds what torch's `SummaryWriter` writes, without its queue and thread: an event is with the operating system when `add`
    returns, so that a killed process loses none, and an error is raised where it happens. An event of thirty numbers takes
    about 25 µs; `SummaryWriter` takes ten times as long, most of it for checksums that are computed in Python.

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
        self._numbers = _Numbers(())
        begin = Event(wall_time=time.time(), step=hidden_from, session_log=SessionLog(status=SessionLog.START))
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            self._write(begin.SerializeToString())
        except OSError:
            self.remove()
            raise

    def add_numbers(self, numbers: Mapping[str, float], update: int) -> None:
        """Writes numbers by their tags, as one event.

        Raises:
            OSError: they cannot be written.
        """
        tags = tuple(numbers)
        if tags != self._numbers.tags:
            self._numbers = _Numbers(tags)
        event: bytes = self._make_event(wall_time=time.time(), step=update).SerializeToString()
        self._write(event + self._numbers.encoded(numbers.values()))
        self.is_empty = False

    def add(self, summary: Any, update: int) -> None:
        """Writes a summary, which may have several values, as one event.

        Args:
            summary: a `Summary` of TensorBoard's, as the functions in `torch.utils.tensorboard.summary` make them.
            update: where it is shown.

        Raises:
            OSError: it cannot be written.
        """
        self._write(self._make_event(wall_time=time.time(), step=update, summary=summary).SerializeToString())
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

    def _write(self, event: bytes) -> None:
        """Writes one record of TensorFlow's format: length, its checksum, the event, its checksum."""
        record = b"".join((_head(len(event)), event, _checksum(event)))
        while record:  # a disk that is nearly full may take a part
            record = record[self._file.write(record) :]


class _Numbers:
    """The field `summary` of an event with one number for each of `tags`, as protobuf encodes it: it knows where they stand."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self.tags = tags
        encoded, ends = b"", []
        for tag in tags:  # the number is the last field of a value, and has four bytes
            encoded += Summary(value=[Summary.Value(tag=tag, simple_value=1.0)]).SerializeToString()
            ends.append(len(encoded))
        field = Event(summary=Summary.FromString(encoded)).SerializeToString()
        before = len(field) - len(encoded)
        self._field = np.frombuffer(bytearray(field), np.uint8)
        self._places = np.array([range(before + end - 4, before + end) for end in ends], np.intp).ravel()

    def encoded(self, numbers: Iterable[float]) -> bytes:
        """The field with these numbers, as float32; infinite where they are too large for it."""
        values = array("f", numbers)
        if sys.byteorder == "big":
            values.byteswap()
        self._field[self._places] = np.frombuffer(values, np.uint8)
        return self._field.tobytes()


@functools.lru_cache(maxsize=64)
def _head(length: int) -> bytes:
    encoded = struct.pack("<Q", length)
    return encoded + _checksum(encoded)


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of `data`, in four bytes.

    A CRC is linear over bits. So that of a block is the sum (xor) of what each byte adds by its value and its distance from the
    end, which a table has, and of what the register before the block adds to its first four bytes.
    """
    table, places, register = _contributions(), _places(), _ONES
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start)
        length = len(block)
        sums = int(np.bitwise_xor.reduce(table.take(places[-length:] + block)))
        for byte in range(min(4, length)):
            sums ^= int(table[256 * (length - 1 - byte) + (register >> 8 * byte & 255)])
        register = sums ^ register >> 8 * length
    crc = register ^ _ONES
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & _ONES)


@functools.cache
def _contributions() -> NDArray[np.uint32]:
    """What each value of a byte adds to the CRC of a block, by its distance from the end: `256 * distance + value`."""
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, values >> 1 ^ np.uint32(_POLYNOMIAL), values >> 1)
    rows = [values]
    for _ in range(_BLOCK - 1):
        rows.append(rows[-1] >> 8 ^ values[rows[-1] & 255])
    return np.concatenate(rows)


@functools.cache
def _places() -> NDArray[np.intp]:
    """Where the contributions of each byte of a whole block begin."""
    return 256 * np.arange(_BLOCK - 1, -1, -1)
