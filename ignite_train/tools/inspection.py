"""Looks at checkpoints without a run: verifies each byte, and finds the newest whole checkpoint."""

from __future__ import annotations

from pathlib import Path

from ignite_train.arguments import path_of
from ignite_train.checkpoint.directory import CheckpointDirectory
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.manifest import MANIFEST, is_checkpoint_name
from ignite_train.checkpoint.read_checkpoint import MOST_LOOKS, is_removed, pass_over, readable
from ignite_train.checkpoint.read_checkpoint import best as best_in
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.errors import CheckpointError, DamagedCheckpointError

__all__ = ["DISTRIBUTED_METADATA", "chosen_checkpoint", "holds_checkpoints", "is_distributed_checkpoint", "latest", "verify"]

DISTRIBUTED_METADATA = ".metadata"
"""The file by which a directory that `torch.distributed.checkpoint` has written is known."""


def verify(path: str | Path) -> None:
    """Reads every byte of a checkpoint. Holds one tensor in memory at a time.

    Raises:
        DamagedCheckpointError: something in it is not what was written.
        CheckpointFormatError: it has a format that is not read.
        UnreadableCheckpointError: the disk gave an error.
    """
    with CheckpointReader(path_of("path", path)) as reader:
        reader.verify()


def latest(directory: str | Path) -> Path | None:
    """The newest checkpoint in `directory` that is whole, with every byte of it checked; None without one.

    A warning names each damaged one. One that a run removes meanwhile does not count.

    Raises:
        CheckpointError: the directory does not exist, or its run removes each checkpoint before it is read.
        UnreadableCheckpointError: the disk gave an error, so that it cannot be known.
        CheckpointFormatError: one has a format that is not read, and may be the newest.
    """
    for _ in range(MOST_LOOKS):
        entries = readable(directory)
        for found in reversed(entries):
            try:
                verify(found.path)
            except DamagedCheckpointError as error:
                pass_over(error)
            else:
                return found.path
        if not any(is_removed(found.path) for found in entries):
            return None
    raise CheckpointError(f"{directory} has no checkpoint that stays while it is read; train with Checkpoint(keep=...) of more")


def holds_checkpoints(path: Path) -> bool:
    """Whether a path is a checkpoint of this library, or a directory of some, damaged ones too: no other files in it count."""
    return (path / MANIFEST).exists() or _is_of_a_run(path)


def is_distributed_checkpoint(path: Path) -> bool:
    """Whether a directory is one that `torch.distributed.checkpoint` has written, whatever else has a `manifest.json` in it."""
    return (path / DISTRIBUTED_METADATA).is_file() and not _is_of_a_run(path)


def _is_of_a_run(path: Path) -> bool:
    if not path.is_dir():
        return False
    damaged = CheckpointDirectory(path, Disk()).set_aside_before()
    return bool(damaged) or any(is_checkpoint_name(one.name) for one in path.iterdir())


def chosen_checkpoint(path: str | Path, *, best: bool = False) -> Path:
    """The checkpoint `path`; or in a directory of checkpoints the newest whole one, or the one with the best score.

    Raises:
        CheckpointError: `path` holds no whole checkpoint, or none with a score.
    """
    path = path_of("path", path)
    if (path / MANIFEST).exists() and not best:
        return path
    scored = best_in(path) if best else None
    found = scored.path if scored else None if best else latest(path)
    if found is None:
        raise CheckpointError(f"{path} has no {'checkpoint with a score' if best else 'whole checkpoint'}")
    return found
