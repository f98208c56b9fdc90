"""The manifest, which makes a directory a checkpoint: it holds size and checksum of each file in it, and of itself."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zlib_ng import zlib_ng

from ignite_train.arguments import field_names
from ignite_train.checkpoint.disk import naming
from ignite_train.checkpoint.tree import MAX_NODES, decode
from ignite_train.errors import CheckpointError, CheckpointFormatError, DamagedCheckpointError, UnreadableCheckpointError

__all__ = [
    "FORMAT",
    "MANIFEST",
    "MAX_INDEX_BYTES",
    "MAX_MARKS",
    "FileRecord",
    "Manifest",
    "UnusableCheckpoint",
    "checked_json",
    "checkpoint_name",
    "compact_json",
    "count_marks",
    "file_names",
    "frozen_name",
    "is_checkpoint_name",
    "is_frozen_name",
    "one_line",
    "open_regular",
    "parse_manifest",
    "printable",
    "read_manifest",
    "read_regular",
    "reading_error",
    "seal",
]

FORMAT = 1
"""The format that is written. All from 1 to it are read; see docs/reliability.md for when it is raised."""
MANIFEST = "manifest.json"
MAX_INDEX_BYTES = 256 * 2**20
MAX_MARKS = 16 * MAX_NODES
"""See `count_marks`. A state of `MAX_NODES` values has less, with the entries of as many tensors as fit into it."""
_MAX_MANIFEST_BYTES = 16 * 2**20
_MAX_MANIFEST_MARKS = MAX_MARKS // 4
_MAX_REASON_LENGTH = 500
_NO_FORMAT = 10_000  # from here on a format is not taken for that of a newer version
_NOT_AS_WRITTEN = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}
_HEAD = re.compile(rb'\{"crc32":"([0-9a-f]{8})","manifest":')
_FROZEN = re.compile(r"frozen-[0-9a-f]{16}\.safetensors")
_CHECKPOINT = re.compile(r"update-\d{8,12}(\.\d{1,6})?")


UnusableCheckpoint = DamagedCheckpointError | UnreadableCheckpointError | CheckpointFormatError
"""Why a checkpoint cannot be used: it is damaged, the disk failed, or it has a format that this version does not read."""


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
        if zlib_ng.crc32(checked) != self.crc32:
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


def checkpoint_name(update: int, copy: int = 0) -> str:
    """The name of a checkpoint's directory; `copy` numbers further ones of the same update."""
    return f"update-{update:08d}" + (f".{copy}" if copy else "")


def file_names(rank: int) -> tuple[str, str]:
    """The names of the two files of a rank: its index, and its tensors."""
    return f"rank-{rank:05d}.json", f"rank-{rank:05d}.safetensors"


def frozen_name(digest: int) -> str:
    """The name of a file of frozen weights beside the checkpoints that refer to it, by a digest of what is in it."""
    return f"frozen-{digest:016x}.safetensors"


def is_frozen_name(name: str) -> bool:
    """Whether a file with this name holds frozen weights."""
    return _FROZEN.fullmatch(name) is not None


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory with this name should be a checkpoint."""
    return _CHECKPOINT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of a checkpoint without opening its other files.

    Attributes:
        update: `state.iteration` when it was taken.
        epoch: `state.epoch` then.
        serial: counts the checkpoints of a directory in the order in which they were written; the largest is the newest.
        world_size: ranks that wrote it.
        score: the metric that decides which are the best; None if the state was not evaluated.
        config: the user's configuration, as a tree of `tree.py`.
        versions: of the packages that wrote it.
        files: each file beside the manifest, and those of frozen weights, which lie beside the checkpoint.
    """

    update: int
    epoch: int
    serial: int
    world_size: int
    score: float | None
    config: Any
    versions: dict[str, str]
    files: dict[str, FileRecord]

    @property
    def scored_by(self) -> tuple[str, str] | None:
        """The metric of the score, and `"min"` or `"max"` for what is best, as its run was told; None if it does not say."""
        best = _value(_value(self.config, "trainer"), "best")
        metric, mode = _value(best, "metric"), _value(best, "mode")
        return (metric, mode) if isinstance(metric, str) and mode in ("min", "max") else None


def compact_json(value: Any) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def seal(manifest: Manifest) -> bytes:
    """The manifest as a file: JSON, with a checksum of itself in front.

    Raises:
        CheckpointError: it is larger than a reader accepts.
    """
    body = compact_json({"format": FORMAT, **asdict(manifest)})
    data = b'{"crc32":"%08x","manifest":%b}\n' % (zlib_ng.crc32(body), body)
    if len(data) > _MAX_MANIFEST_BYTES or count_marks(body) > _MAX_MANIFEST_MARKS:
        raise CheckpointError(
            f"config must be small, got a manifest of {len(data)} bytes with {count_marks(body)} values; at most "
            f"{_MAX_MANIFEST_BYTES} bytes and {_MAX_MANIFEST_MARKS} values are read; pass less in config"
        )
    return data


def read_manifest(checkpoint: Path) -> Manifest:
    """Reads the manifest of a checkpoint, and only that.

    Raises:
        DamagedCheckpointError: it is missing, or not what was written.
        CheckpointFormatError: it has a format that is not read.
        UnreadableCheckpointError: the disk gave an error.
    """
    try:
        if stat.S_ISLNK(checkpoint.lstat().st_mode):
            raise ValueError("it is a link; pass the path that it points to")
        path = checkpoint / MANIFEST
        if (size := path.lstat().st_size) > _MAX_MANIFEST_BYTES:
            raise ValueError(f"its manifest has {size} bytes, more than a manifest may have")
        return parse_manifest(read_regular(path, size), checkpoint)
    except (ValueError, TypeError, OSError) as error:
        raise reading_error(checkpoint, error) from error


def reading_error(checkpoint: Path, error: Exception) -> UnusableCheckpoint:
    """What an error while reading a checkpoint means: it is not what was written, its format is not read, or the disk failed.

    Of the system's errors only these speak of the checkpoint itself: something is not there, or is not of the kind that was
    written. Any other one (no permission, an error of the device, a stale handle) may have passed by the next attempt.
    """
    if isinstance(error, UnusableCheckpoint):
        return error
    if isinstance(error, OSError) and error.errno not in _NOT_AS_WRITTEN:
        return UnreadableCheckpointError(str(checkpoint), one_line(error))
    return DamagedCheckpointError(str(checkpoint), one_line(error))


def parse_manifest(data: bytes, checkpoint: Path) -> Manifest:
    """The manifest that `seal` made into `data`.

    Raises:
        ValueError: it is invalid; or TypeError.
        CheckpointFormatError: it has a format that is not read.
    """
    if len(data) > _MAX_MANIFEST_BYTES:
        raise ValueError(f"its manifest has {len(data)} bytes, more than a manifest may have")
    head = _HEAD.match(data)
    if head is None or data[-2:] != b"}\n":
        raise ValueError("its manifest has no checksum")
    body = data[head.end() : -2]
    if int(head[1], 16) != zlib_ng.crc32(body):
        raise ValueError("its manifest is not the one that was written: the checksum differs")
    return _checked(checked_json(body, max_marks=_MAX_MANIFEST_MARKS), checkpoint)


def count_marks(data: bytes) -> int:
    """The brackets, braces and commas in JSON: each value that it makes takes one, and tens of bytes of memory."""
    return sum(data.count(mark) for mark in (b"[", b"{", b","))


def checked_json(data: bytes, *, max_marks: int = MAX_MARKS) -> Any:
    """Parses JSON. Duplicate keys, NaN, too many values, and depth that would exhaust the stack are refused.

    Raises:
        ValueError: it is invalid.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            raise ValueError("its JSON has the same key twice")
        return dict(pairs)

    def refuse(constant: str) -> Any:
        raise ValueError(f"its JSON holds {constant}")

    if count_marks(data) > max_marks:
        raise ValueError(f"its JSON has more than {max_marks} values, more than a checkpoint may have")
    try:
        return json.loads(data, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _checked(values: Any, checkpoint: Path) -> Manifest:
    """Raises ValueError if `values` are not a manifest of this format."""
    found = values.get("format") if isinstance(values, dict) else None
    if type(found) is int and FORMAT < found < _NO_FORMAT:
        raise CheckpointFormatError(str(checkpoint), found, FORMAT)
    if type(found) is not int or not 1 <= found <= FORMAT:
        raise ValueError(f"its manifest has the invalid format {found!r:.20}")
    fields = {key: value for key, value in values.items() if key != "format"}
    needed, known = field_names(Manifest)
    if not needed <= fields.keys() <= known:
        raise ValueError("its manifest has unexpected or missing fields")
    counts = [fields[name] for name in ("update", "epoch", "serial", "world_size")]
    if not all(type(count) is int and 0 <= count < 2**53 for count in counts) or not 1 <= fields["world_size"] < 100_000:
        raise ValueError(f"its manifest has invalid counters: {counts}")
    score = fields["score"]
    if score is not None and not (type(score) in (int, float) and abs(score) <= sys.float_info.max):
        raise ValueError("its manifest has an invalid score")
    decode(fields["config"], ("config",))
    versions, files = fields["versions"], fields["files"]
    if not isinstance(versions, dict) or not all(isinstance(version, str) for version in versions.values()):
        raise ValueError("its manifest has invalid versions")
    expected = {name for rank in range(fields["world_size"]) for name in file_names(rank)}
    if not isinstance(files, dict) or {name for name in files if not is_frozen_name(name)} != expected:
        if isinstance(files, dict) and {*files} == {name.replace(".safetensors", ".bin") for name in expected}:
            raise CheckpointFormatError(str(checkpoint), found, FORMAT, "before 0.1.0, in another format")
        raise ValueError("its manifest does not list the two files of each rank")
    return Manifest(**{**fields, "files": {name: _checked_record(name, record) for name, record in files.items()}})


def _checked_record(name: str, record: Any) -> FileRecord:
    if not isinstance(record, dict) or set(record) != {"size", "crc32"}:
        raise ValueError(f"its manifest has an invalid record of {name}")
    size, crc32 = record["size"], record["crc32"]
    if type(size) is not int or not 0 <= size < 2**63 or type(crc32) is not int or not 0 <= crc32 < 2**32:
        raise ValueError(f"its manifest has an invalid size or checksum of {name}")
    return FileRecord(size, crc32)


def _value(tree: Any, key: str) -> Any:
    """What a dict has for a key, by their trees, or None: `decode` reads all of it, which is slow for each of many."""
    pairs = tree.get("dict", ()) if isinstance(tree, dict) else ()
    return next((value for name, value in pairs if name == key), None)


def one_line(error: Exception) -> str:
    """The text of an error about a checkpoint, as one line of limited length without control characters from a file."""
    missing = error.filename if isinstance(error, FileNotFoundError) else None
    return printable(f"it has no {Path(missing).name}" if isinstance(missing, (str, Path)) else str(error))


def printable(text: str, limit: int = _MAX_REASON_LENGTH) -> str:
    """A text, which a file may have given, as one line of at most `limit` characters, without control characters."""
    line = " ".join(text[: 4 * limit].split())
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line[:limit])
    return shown if len(shown) <= limit and len(line) <= limit and len(text) <= 4 * limit else f"{shown[:limit]}..."
