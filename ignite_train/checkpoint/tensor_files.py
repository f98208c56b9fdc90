"""Tensors in files: their bytes one after another, and an index with the place and the checksum of each."""

from __future__ import annotations

import math
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.shards import Box, Piece
from ignite_train.checkpoint.tree import DTYPES, dtype_name
from ignite_train.device.streams import has_streams
from ignite_train.model.memory_layout import as_bytes

__all__ = [
    "Entry",
    "Snapshot",
    "TensorFile",
    "await_devices",
    "check_entries",
    "holds",
    "naming",
    "open_regular",
    "write_tensors",
]

_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the numbers of one tensor, or of a rank's part of it, are in a file.

    Attributes:
        dtype: name of the dtype.
        shape: of what is stored here.
        start: where that part starts in the whole tensor.
        whole: the shape of the whole tensor.
        order: the dimensions from the slowest to the fastest, as they lie in the file (and lay in memory).
        offset: first byte.
        num_bytes: how many.
        crc32: of these bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    whole: tuple[int, ...]
    order: tuple[int, ...]
    offset: int
    num_bytes: int
    crc32: int

    @property
    def box(self) -> Box:
        """Which part of the tensor it is."""
        return Box(self.start, self.shape)

    def as_json(self) -> dict[str, Any]:
        """For the index."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Entry:
        """From an index in a file, which may be forged.

        Raises:
            ValueError: a field is missing or invalid.
        """
        if not isinstance(values, dict) or set(values) != set(cls.__slots__):
            raise ValueError("an index entry has unexpected or missing fields")
        lists = [values[name] for name in ("shape", "start", "whole", "order")]
        numbers = [values[name] for name in ("offset", "num_bytes", "crc32")]
        if not all(isinstance(entries, list) and len(entries) == len(lists[0]) <= 64 for entries in lists):
            raise ValueError("an index entry has an invalid shape")
        if not all(type(number) is int and 0 <= number < 2**63 for entries in [*lists, numbers] for number in entries):
            raise ValueError("an index entry has an invalid number")
        if values["dtype"] not in DTYPES:
            raise ValueError(f"an index entry has the unknown dtype {values['dtype']!r:.40}")
        shape, start, whole, order = map(tuple, lists)
        entry = cls(values["dtype"], shape, start, whole, order, *numbers)
        if math.prod(shape) * DTYPES[entry.dtype].itemsize != entry.num_bytes or sorted(order) != [*range(len(shape))]:
            raise ValueError("an index entry has a size that does not fit its shape")
        if any(first + length > total for first, length, total in zip(start, shape, whole, strict=True)):
            raise ValueError("an index entry reaches beyond its tensor")
        if math.prod(max(1, length) for length in whole) >= 2**60:
            raise ValueError("an index entry has a shape that no memory could hold")
        return entry


def check_entries(entries: Mapping[str, Entry], size: int) -> None:
    """Checks that `entries` lie in a file of `size` bytes one after another, without gaps or overlaps.

    Raises:
        ValueError: they do not.
    """
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != end:
            raise ValueError(f"index entries overlap or leave a gap at byte {end}")
        end += entry.num_bytes
    if end != size:
        raise ValueError(f"index entries cover {end} bytes of a file of {size}")


class Snapshot:
    """Copies of tensors in the memory of the host, in buffers that the next snapshot uses again: one copy of the state.

    The first one also has to get the memory; pages that were never touched cost more than the copy itself.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._layouts: dict[str, tuple[torch.dtype, torch.Size, tuple[int, ...]]] = {}

    def take(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Copies the numbers of `pieces`. Synchronises with the devices that hold some."""
        layouts = {name: (piece.data.dtype, piece.data.shape, piece.data.stride()) for name, piece in pieces.items()}
        buffers = {
            name: self._buffers[name] if self._layouts.get(name) == layouts[name] else _empty_copy(piece.data)
            for name, piece in pieces.items()
        }
        sources = [piece.data for piece in pieces.values()]
        if sources:
            torch._foreach_copy_([*buffers.values()], sources, non_blocking=True)
        await_devices(pieces)
        self._buffers, self._layouts = buffers, layouts
        return {name: Piece(buffers[name], piece.box, piece.whole) for name, piece in pieces.items()}


def await_devices(pieces: Mapping[str, Piece]) -> None:
    """Returns when the devices have finished the work that `pieces` may depend on. Synchronises."""
    for device in {piece.data.device for piece in pieces.values() if piece.data.device.type != "cpu"}:
        torch.accelerator.synchronize(device)  # sync


def _empty_copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=has_streams(tensor.device))


def write_tensors(disk: Disk, path: Path, pieces: Mapping[str, Piece]) -> dict[str, Entry]:
    """Writes a new file, to the disk, and returns where each tensor is in it."""
    entries: dict[str, Entry] = {}
    disk.write_file(path, _parts(pieces, entries))
    return entries


def _parts(pieces: Mapping[str, Piece], entries: dict[str, Entry]) -> Iterator[memoryview]:
    """The bytes of `pieces`; notes each in `entries` once they are through."""
    offset = 0
    for name, piece in pieces.items():
        data, order = _dense(piece.data)
        view, crc = _bytes(data), 0
        for begin in range(0, len(view), _CHUNK_BYTES):
            part = view[begin : begin + _CHUNK_BYTES]
            crc = zlib.crc32(part, crc)
            yield part
        shape, start = tuple(piece.data.shape), piece.box.start
        entries[name] = Entry(dtype_name(data.dtype), shape, start, piece.whole, order, offset, len(view), crc)
        offset += len(view)


def holds(path: Path, entries: Mapping[str, Entry], pieces: Mapping[str, Piece]) -> bool:
    """Whether a file that was written with `entries` is what `write_tensors` would write now, byte for byte.

    The smallest tensors, such as those of the random generators, are compared first: they change soonest.
    """
    if list(entries) != list(pieces):
        return False
    try:
        file = TensorFile(path, sum(entry.num_bytes for entry in entries.values()), entries)
    except (OSError, ValueError):
        return False
    try:
        by_size = sorted(pieces, key=lambda name: entries[name].num_bytes)
        return all(file.is_same(name, pieces[name]) for name in by_size)
    except OSError:
        return False
    finally:
        file.close()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = as_bytes(tensor).numpy()
    return memoryview(array)


def _dense(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The numbers as they lie in memory where they lie densely, and the order of the dimensions there.

    So a channels-last tensor is restored as one, and computations with it take the same path as before.
    """
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    permuted = tensor.permute(order)
    return (permuted, order) if permuted.is_contiguous() else (tensor.contiguous(), tuple(range(tensor.dim())))


class TensorFile:
    """Reads tensors out of one open file, checking each.

    Args:
        path: the file. It must be a regular one, not a link.
        size: bytes it must have.
        entries: where each tensor is in it.

    Raises:
        OSError: it cannot be opened, or is a link.
        ValueError: it is not a regular file, has another size, or the entries do not fit it.
    """

    def __init__(self, path: Path, size: int, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        check_entries(entries, size)
        self._path, self._file = path, open_regular(path, size)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    @property
    def bytes_on_disk(self) -> int:
        """What the file takes there."""
        return os.fstat(self._file).st_blocks * 512

    def read(self, name: str) -> Tensor:
        """The tensor of this name, on the CPU.

        Raises:
            ValueError: its bytes are not those that were written.
            OSError: they cannot be read.
        """
        entry = self.entries[name]
        tensor = torch.empty([entry.shape[dimension] for dimension in entry.order], dtype=DTYPES[entry.dtype])
        view, crc, position = _bytes(tensor), 0, entry.offset
        while len(view):
            part = self._next(name, view[:_CHUNK_BYTES], position)
            crc, position, view = zlib.crc32(part, crc), position + len(part), view[len(part) :]
        self._compare(name, crc)
        inverse = sorted(range(len(entry.order)), key=entry.order.__getitem__)
        return tensor.permute(inverse)

    def check(self, name: str) -> None:
        """Reads the bytes of this name, any number of them, with one small buffer.

        Raises:
            ValueError: they are not those that were written.
        """
        entry, crc, done = self.entries[name], 0, 0
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, entry.num_bytes)))
        while done < entry.num_bytes:
            part = self._next(name, buffer[: entry.num_bytes - done], entry.offset + done)
            crc, done = zlib.crc32(part, crc), done + len(part)
        self._compare(name, crc)

    def _next(self, name: str, buffer: memoryview, position: int) -> memoryview:
        with naming(self._path):
            part = buffer[: os.preadv(self._file, [buffer], position)]
        if not len(part):
            raise ValueError(f"{name} is cut short")
        return part

    def _compare(self, name: str, crc: int) -> None:
        written = self.entries[name].crc32
        if crc != written:
            raise ValueError(f"{name} has the checksum {crc:08x}, it was written with {written:08x}")

    def is_same(self, name: str, piece: Piece) -> bool:
        """Whether the numbers of `piece` are stored under this name, bit for bit and in the same order.

        Raises:
            OSError: the file cannot be read.
        """
        entry = self.entries[name]
        data, order = _dense(piece.data)
        found = (dtype_name(data.dtype), tuple(piece.data.shape), piece.box.start, tuple(piece.whole), order)
        if found != (entry.dtype, entry.shape, entry.start, entry.whole, entry.order):
            return False
        view, buffer = _bytes(data), bytearray(min(_CHUNK_BYTES, entry.num_bytes))
        for begin in range(0, len(view), _CHUNK_BYTES):
            part = view[begin : begin + _CHUNK_BYTES]
            stored = memoryview(buffer)[: len(part)]
            if os.preadv(self._file, [stored], entry.offset + begin) != len(part) or not np.array_equal(stored, part):
                return False
        return True


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
