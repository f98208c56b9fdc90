"""Looks at checkpoints without a run: whether each byte is what was written, and which is the newest that is whole."""

from __future__ import annotations

from pathlib import Path

from ignite_train.arguments import path_of
from ignite_train.checkpoint.manifest import MANIFEST
from ignite_train.checkpoint.read_checkpoint import Found, best, find
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.errors import CheckpointError, DamagedCheckpointError

__all__ = ["best_path", "chosen_checkpoint", "damage_of", "latest", "verify"]


def verify(path: str | Path) -> None:
    """Reads every byte of a checkpoint. Holds one tensor in memory at a time.

    Raises:
        DamagedCheckpointError: something in it is not what was written.
        CheckpointFormatError: it has a newer format.
        UnreadableCheckpointError: the disk gave an error.
    """
    with CheckpointReader(path_of("path", path)) as reader:
        reader.verify()


def latest(directory: str | Path) -> Path | None:
    """The newest checkpoint in `directory` that is whole, with every byte of it checked; None without one.

    Raises:
        UnreadableCheckpointError: the disk gave an error, so that it cannot be known.
        CheckpointFormatError: one has a newer format, and may be the newest.
    """
    entries = find(directory)
    for found in entries:
        if found.manifest is None:
            damage_of(found)  # raises if the manifest could not be read
    for found in reversed(entries):
        if not damage_of(found):
            return found.path
    return None


def chosen_checkpoint(path: str | Path, *, best: bool = False) -> Path:
    """One checkpoint: `path` itself if it is one; of a directory of them the newest whole one, or the one with the best score.

    Raises:
        CheckpointError: `path` holds no whole checkpoint, or none with a score.
    """
    path = path_of("path", path)
    if (path / MANIFEST).exists() and not best:
        return path
    found = best_path(path) if best else latest(path)
    if found is None:
        raise CheckpointError(f"{path} has no {'checkpoint with a score' if best else 'whole checkpoint'}")
    return found


def best_path(directory: Path) -> Path | None:
    """The checkpoint in `directory` with the best score; None if none has one.

    Raises:
        CheckpointError: see `best`.
    """
    found = best(directory)
    return None if found is None else found.path


def damage_of(found: Found) -> str:
    """What is wrong with a checkpoint, every byte of which is read; empty if it is whole.

    Raises:
        UnreadableCheckpointError, CheckpointFormatError: it cannot be read.
    """
    try:
        verify(found.path)
    except DamagedCheckpointError as error:
        return error.reason
    return ""
