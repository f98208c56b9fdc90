"""Tensors in files of the format safetensors, which other programs read too.

A file begins with a length in 8 bytes and a header of that length, which has dtype, shape and place of each tensor in JSON; the
numbers follow, row by row. What the format lacks stands in the index of the rank, in a note on each tensor: its checksum, the
order of its dimensions in memory, which part of a sharded tensor it is, and a dtype that the format, or the first versions of
its readers, do not have: then the file has complex numbers as pairs, and others as bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from zlib_ng import zlib_ng

from ignite_train.checkpoint.disk import Disk, naming
from ignite_train.checkpoint.manifest import FileRecord, checked_json, compact_json, open_regular
from ignite_train.checkpoint.tree import DTYPES, dtype_name
from ignite_train.errors import CheckpointError
from ignite_train.model.memory_layout import as_bytes

__all__ = [
    "Box",
    "Entry",
    "Piece",
    "TensorFile",
    "assemble",
    "check_cover",
    "check_entries",
    "is_plain_dtype",
    "local_box",
    "write_tensors",
]

_CHUNK_BYTES = 2**20  # what the checksum has read is written before the processor forgets it
_FREE_BYTES = 2**28  # of memory that a file may ask for in any case
_MOST_PER_BYTE = 16  # and for each byte that is on the disk: file systems compress, and copies leave out zeros
_LENGTH_BYTES = 8  # of the length in front of the header
_MAX_HEADER_BYTES = 100_000_000  # what the package safetensors reads
_PLAIN = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPE_OF = {stored: name for name, stored in _PLAIN.items()}
_PAIRS = {"complex32": "F16", "complex64": "F32", "complex128": "F64"}


def is_plain_dtype(dtype: torch.dtype) -> bool:
    """Whether the format has this dtype, so that other programs read a tensor of it."""
    return dtype_name(dtype) in _PLAIN


class Box(NamedTuple):
    """A block of a tensor: where it starts and how long it is in each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def overlap(self, other: Box) -> Box | None:
        """What both have in common."""
        starts = tuple(map(max, self.start, other.start))
        ends = (min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(length > 0 for length in shape) else None

    def slices(self, inside: Box) -> tuple[slice, ...]:
        """Where this block is in one that holds it."""
        offsets = (start - origin for start, origin in zip(self.start, inside.start, strict=True))
        return tuple(slice(offset, offset + length) for offset, length in zip(offsets, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a tensor that one rank writes.

    Attributes:
        data: the numbers, on any device.
        start: where they begin in the whole tensor.
        whole: the shape of the whole tensor.
    """

    data: Tensor
    start: tuple[int, ...]
    whole: tuple[int, ...]


def local_box(tensor: DTensor) -> Box:
    """The part of a sharded tensor that this rank holds."""
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def assemble(box: Box, dtype: torch.dtype, parts: Iterable[tuple[Box, Callable[[], Tensor]]]) -> Tensor:
    """The numbers of `box`, from parts that do not overlap; only those that are needed are read.

    Raises:
        ValueError: the parts do not cover the box, or overlap. Known before any memory is asked for.
    """
    needed = [(common, part, read) for part, read in parts if (common := box.overlap(part)) is not None]
    check_cover(box, [common for common, _, _ in needed])
    if len(needed) == 1 and needed[0][1] == box:
        return needed[0][2]()
    result = torch.empty(box.shape, dtype=dtype)
    for common, part, read in needed:
        result[common.slices(box)] = read()[common.slices(part)]
    return result


def check_cover(box: Box, parts: Iterable[Box]) -> None:
    """Checks that `parts`, which lie in `box`, hold each of its numbers once.

    Raises:
        ValueError: they do not.
    """
    ordered = sorted(parts)
    held, whole = sum(math.prod(part.shape) for part in ordered), math.prod(box.shape)
    if held != whole:
        raise ValueError(f"its parts hold {held} of {whole} numbers")
    for index, part in enumerate(ordered):
        for other in islice(ordered, index + 1, None):
            if other.start[:1] >= tuple(first + length for first, length in zip(*part, strict=True))[:1]:
                break
            if part.overlap(other) is not None:
                raise ValueError("its parts overlap")


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the numbers of one tensor, or of a rank's part of it, are in a file.

    Attributes:
        dtype: name of the dtype.
        shape: of what is stored here.
        start: where that part starts in the whole tensor.
        whole: the shape of the whole tensor.
        order: the dimensions from the slowest to the fastest, as they lie in memory.
        offset: first byte, counted from the end of the header.
        crc32: of the bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    whole: tuple[int, ...]
    order: tuple[int, ...]
    offset: int
    crc32: int = 0

    @classmethod
    def of(cls, piece: Piece, offset: int) -> Entry:
        """That of a piece, without the checksum."""
        data = piece.data
        strides = data.stride()
        order = sorted(range(data.dim()), key=lambda dimension: -strides[dimension])
        if not data.permute(order).is_contiguous():  # it has gaps, which are not stored
            order.sort()
        return cls(dtype_name(data.dtype), tuple(data.shape), piece.start, tuple(piece.whole), tuple(order), offset)

    @property
    def box(self) -> Box:
        """Which part of the tensor it is."""
        return Box(self.start, self.shape)

    @property
    def num_bytes(self) -> int:
        """How many there are."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def described(self) -> dict[str, Any]:
        """What the header says of it, as the format has it."""
        shape = [*self.shape, 2] if self.dtype in _PAIRS else [*self.shape]
        stored = _PLAIN.get(self.dtype) or _PAIRS.get(self.dtype, "U8")
        return {"dtype": stored, "shape": shape, "data_offsets": [self.offset, self.offset + self.num_bytes]}

    def note(self, crc32: int) -> dict[str, Any]:
        """What the index says of it, which the format lacks."""
        note: dict[str, Any] = {"crc32": crc32}
        if self.dtype not in _PLAIN:
            note["dtype"] = self.dtype
        if self.order != tuple(range(len(self.shape))):
            note["order"] = self.order
        if self.shape != self.whole:
            note |= {"start": self.start, "whole": self.whole}
        return note

    @classmethod
    def from_json(cls, described: Any, note: Any) -> Entry:
        """From a header and an index, which may be forged.

        Raises:
            ValueError: a field is missing or invalid.
        """
        if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
            raise ValueError("the header has unexpected or missing fields")
        if not isinstance(note, dict) or not {"crc32"} <= set(note) <= {"crc32", "dtype", "order", "start", "whole"}:
            raise ValueError("an index entry has unexpected or missing fields")
        stored, offsets, shape = described["dtype"], _numbers(described["data_offsets"]), _numbers(described["shape"])
        dtype = note.get("dtype", _DTYPE_OF.get(stored) if isinstance(stored, str) else None)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"an index entry has the unknown dtype {dtype!r:.40}")
        shape = shape[:-1] if dtype in _PAIRS else shape
        start, whole = _numbers(note.get("start", [0] * len(shape))), _numbers(note.get("whole", [*shape]))
        order, crc32 = _numbers(note.get("order", [*range(len(shape))])), _numbers([note["crc32"]])[0]
        if len(offsets) != 2 or not len(start) == len(whole) == len(shape) or sorted(order) != [*range(len(shape))]:
            raise ValueError("an index entry has an invalid shape")
        entry = cls(dtype, shape, start, whole, order, offsets[0], crc32)
        if described != entry.described():
            raise ValueError("an index entry has a size or a dtype that does not fit the header")
        if any(first + length > total for first, length, total in zip(start, shape, whole, strict=True)):
            raise ValueError("an index entry reaches beyond its tensor")
        if math.prod(max(1, length) for length in whole) >= 2**60:
            raise ValueError("an index entry has a shape that no memory could hold")
        return entry

    def empty(self) -> Tensor:
        """A tensor for the numbers, with its order in memory."""
        tensor = torch.empty([self.shape[dimension] for dimension in self.order], dtype=DTYPES[self.dtype])
        return tensor.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


def _numbers(values: Any) -> tuple[int, ...]:
    """A list of counts from a file."""
    if not isinstance(values, (list, tuple)) or len(values) > 64:
        raise ValueError("an index entry has an invalid shape")
    if not all(type(number) is int and 0 <= number < 2**63 for number in values):
        raise ValueError("an index entry has an invalid number")
    return tuple(values)


def check_entries(entries: Mapping[str, Entry], size: int) -> None:
    """Checks that the numbers of `entries` take `size` bytes one after another, without gaps or overlaps.

    Raises:
        ValueError: they do not.
    """
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != end:
            raise ValueError(f"index entries overlap or leave a gap at byte {end}")
        end += entry.num_bytes
    if end != size:
        raise ValueError(f"index entries cover {end} bytes of {size}")


def write_tensors(
    disk: Disk, path: Path, pieces: Mapping[str, Piece], metadata: Mapping[str, str] | None = None
) -> tuple[FileRecord, dict[str, Any]]:
    """Writes a new file, to the disk. Returns what must be known to read it: its record, and the note on each tensor.

    Args:
        disk: the file system.
        path: the file.
        pieces: by their names.
        metadata: words for other programs; the files of a checkpoint have none.

    Raises:
        CheckpointError: there are too many tensors.
    """
    entries, offset = {}, 0
    for name in sorted(pieces, key=lambda name: -pieces[name].data.itemsize):  # so that each number is aligned
        entries[name] = entry = Entry.of(pieces[name], offset)
        offset += entry.num_bytes
    header, notes = _header(entries, metadata), {}

    def parts() -> Iterator[memoryview]:
        yield memoryview(header)
        for name, entry in entries.items():
            crc = 0
            for block in _blocks(pieces[name].data):
                part = _bytes(block.contiguous())
                crc = zlib_ng.crc32(part, crc)
                yield part
            notes[name] = entry.note(crc)

    disk.write_file(path, parts(), len(header) + offset)
    return FileRecord(len(header) + offset, zlib_ng.crc32(header)), notes


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str] | None) -> bytes:
    described = {name: entry.described() for name, entry in entries.items()}
    text = compact_json({"__metadata__": metadata} | described if metadata else described)
    text += b" " * (-len(text) % _LENGTH_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(f"the state has {len(entries)} tensors, whose list is too long for a file; use fewer tensors")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of a tensor, on the CPU, of about `_CHUNK_BYTES`, in the order in which they stand in a file."""
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    rows = tensor.view(-1) if tensor.is_contiguous() else tensor
    yield from torch.split(rows, max(1, _CHUNK_BYTES * len(rows) // max(1, rows.nbytes)))


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = as_bytes(tensor).numpy()
    return memoryview(array)


class TensorFile:
    """Reads tensors out of one open file, checking each.

    Args:
        path: the file. It must be a regular one, not a link.
        record: its size, and the checksum of its header.
        notes: what the index says of each tensor.

    Attributes:
        entries: where each tensor is in it.

    Raises:
        OSError: it cannot be opened, or is a link.
        ValueError: it is not what was written, or the notes are not those of its tensors.
    """

    def __init__(self, path: Path, record: FileRecord, notes: Mapping[str, Any]) -> None:
        self._path, self._size, self._file = path, record.size, open_regular(path, record.size)
        try:
            header = self._read_header(record)
            self._begin = len(header)
            described = checked_json(header[_LENGTH_BYTES:])
            if not isinstance(described, dict) or described.keys() != notes.keys():
                raise ValueError(f"{path.name} has other tensors than its index")
            self.entries = {name: Entry.from_json(described[name], note) for name, note in notes.items()}
            check_entries(self.entries, record.size - self._begin)
        except BaseException:
            self.close()
            raise

    def _read_header(self, record: FileRecord) -> bytes:
        """The header and its length."""
        with naming(self._path):
            length = int.from_bytes(self._read_begin(_LENGTH_BYTES), "little")
            if length > min(_MAX_HEADER_BYTES, record.size - _LENGTH_BYTES):
                raise ValueError(f"{self._path.name} has no header")
            header = self._read_begin(_LENGTH_BYTES + length)
        record.check(self._path, header)
        return header

    def _read_begin(self, size: int) -> bytes:
        """So many bytes; fewer where the file ends before. One call of the system may give fewer than there are."""
        found = b""
        while part := os.pread(self._file, size - len(found), len(found)):
            found += part
        return found

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def read(self, name: str) -> Tensor:
        """The tensor of this name, on the CPU.

        Raises:
            ValueError: its bytes are not those that were written.
            OSError: they cannot be read.
            CheckpointError: the file has holes, and so claims much more memory than it takes on the disk.
        """
        on_disk = os.fstat(self._file).st_blocks * 512
        if self._size > max(_FREE_BYTES, _MOST_PER_BYTE * on_disk):
            raise CheckpointError(
                f"{self._path} claims {self._size} bytes, and {on_disk} are on the disk; copy it without holes"
            )
        tensor = self.entries[name].empty()

        def views() -> Iterator[memoryview]:
            for block in _blocks(tensor):
                numbers = block if block.is_contiguous() else torch.empty(block.shape, dtype=block.dtype)
                yield _bytes(numbers)
                if numbers is not block:
                    block.copy_(numbers)

        self.fill(name, views())
        return tensor

    def check(self, name: str) -> None:
        """Reads the bytes of this name, any number of them, with one small buffer.

        Raises:
            ValueError: they are not those that were written.
        """
        size = self.entries[name].num_bytes
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, size)))
        self.fill(name, (buffer[: size - begin] for begin in range(0, size, _CHUNK_BYTES)))

    def fill(self, name: str, views: Iterable[memoryview]) -> None:
        """Reads the bytes of this name into one view after another.

        Raises:
            ValueError: they are not those that were written.
            OSError: they cannot be read.
        """
        entry, crc, position = self.entries[name], 0, self._begin + self.entries[name].offset
        for view in views:
            while len(view):
                with naming(self._path):
                    part = view[: os.preadv(self._file, [view], position)]
                if not len(part):
                    raise ValueError(f"{name} is cut short")
                crc, position, view = zlib_ng.crc32(part, crc), position + len(part), view[len(part) :]
        if crc != entry.crc32:
            raise ValueError(f"{name} has the checksum {crc:08x}, it was written with {entry.crc32:08x}")
