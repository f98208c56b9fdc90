"""Checkpoints of a few kilobytes, written without a run: number N holds only N, so that a reader can tell which one it is."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch

from ignite_train import checkpoint
from ignite_train.checkpoint.capture import own_piece
from ignite_train.checkpoint.directory import CheckpointDirectory, Contents, Exchange, commit
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.manifest import Manifest, compact_json
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.retention import Retention
from ignite_train.checkpoint.tree import TreeEncoder
from ignite_train.ranks import collectives


class QuickDisk(Disk):
    """Does not wait for the disk; what a power cut would leave is worked out in `power_cuts.py`."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        path.stat()  # an error where the real one has one


def contents(value: Any, name: str = "model") -> Contents:
    """What a rank writes if its only object has the state `value`."""
    encoder = TreeEncoder()
    tree = encoder.encode(value, (name,))
    pieces = {key: own_piece(tensor, everything=True) for key, tensor in encoder.tensors.items()}
    return Contents({name: tree}, {key: piece for key, piece in pieces.items() if piece is not None})


def manifest(update: int, **fields: Any) -> Manifest:
    """One that knows nothing but the update."""
    defaults: dict[str, Any] = {"epoch": 0, "serial": 0, "world_size": 1, "score": None, "config": None, "versions": {}}
    return Manifest(update=update, files={}, **{**defaults, **fields})


def keep(last: int) -> Retention:
    """The last ones, and nothing else."""
    return Retention(last=last, best=1, mode="min", every=None)


def save(
    directory: Path,
    number: int,
    *,
    disk: Disk | None = None,
    last: int = 2,
    exchange: Exchange = collectives.gather_objects,
    place: CheckpointDirectory | None = None,
    **fields: Any,
) -> Path:
    """Commits checkpoint `number`; through `place`, if it is given, which remembers what it has written."""
    state = {"weight": torch.full((40, 30), float(number)), "step": torch.tensor(float(number)), "number": number}
    place = place or CheckpointDirectory(directory, disk or QuickDisk())
    return commit(place, contents(state), manifest(number, **fields), keep(last), exchange)


def read(path: Path) -> int:
    """The number of a checkpoint; an AssertionError if it was taken for whole and is not of one piece.

    Raises:
        DamagedCheckpointError: it is not what was written.
    """
    with CheckpointReader(path) as stored:
        stored.verify()
        found: set[float] = {stored.manifest.update}
        for rank in range(stored.manifest.world_size):
            state = stored.read("model", rank=rank)
            assert state["weight"].shape == (40, 30)
            found |= {state["number"], float(state["step"]), *state["weight"].unique().tolist()}
    assert len(found) == 1, f"{path} was read as {sorted(found)}"
    return int(found.pop())


def newest(directory: Path) -> int | None:
    """The number that a run would resume from; None without a checkpoint."""
    found = checkpoint.latest(directory) if directory.is_dir() else None
    return None if found is None else read(found)


def taken_apart(file: bytes) -> tuple[Any, bytearray]:
    """The header of a file of tensors, and the numbers after it."""
    end = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:end]), bytearray(file[end:])


def put_together(header: Any, numbers: bytes) -> tuple[bytes, dict[str, int]]:
    """The file, and what the manifest records of it."""
    text = header if isinstance(header, bytes) else compact_json(header)
    head = len(text).to_bytes(8, "little") + text
    return head + numbers, {"size": len(head) + len(numbers), "crc32": zlib.crc32(head)}


def names(directory: Path) -> list[str]:
    """What is in the directory, of any kind."""
    return sorted(path.name for path in directory.iterdir())
