"""Which checkpoints a directory has, by their manifests, and which of them is the best."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ignite_train.arguments import path_of
from ignite_train.checkpoint.directory import CheckpointDirectory
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.manifest import MANIFEST, Manifest, UnusableCheckpoint, read_manifest
from ignite_train.errors import CheckpointError, CheckpointFormatError, DamagedCheckpointError, UnreadableCheckpointError

__all__ = ["Found", "best", "find"]


@dataclass(frozen=True, slots=True)
class Found:
    """A directory that is, or should be, a checkpoint.

    Attributes:
        path: of it.
        manifest: what it says of itself; None if that cannot be read.
        damage: what is wrong with it; empty if it is not known to be damaged.
        unreadable: why it cannot be read, although it may be whole: an error of the disk, or a newer format; empty if it can.
    """

    path: Path
    manifest: Manifest | None
    damage: str = ""
    unreadable: str = ""

    @classmethod
    def failed(cls, error: UnusableCheckpoint) -> Found:
        """One whose manifest cannot be used."""
        if isinstance(error, DamagedCheckpointError):
            return cls(Path(error.path), None, damage=error.reason)
        return cls(Path(error.path), None, unreadable=error.reason)


def find(directory: str | Path) -> list[Found]:
    """The checkpoints in `directory`, or the one that it is; the newest last, those without a whole manifest first.

    Reads manifests only; see `verify`.

    Raises:
        CheckpointError: the directory does not exist.
    """
    root = path_of("directory", directory)
    if not root.is_dir():
        raise CheckpointError(f"the directory {root} does not exist")
    if (root / MANIFEST).exists():
        try:
            return [Found(root, read_manifest(root))]
        except (DamagedCheckpointError, UnreadableCheckpointError, CheckpointFormatError) as error:
            return [Found.failed(error)]
    found, failed = CheckpointDirectory(root, Disk()).scan()
    return [*map(Found.failed, failed), *(Found(root / name, manifest) for name, manifest in found)]


def best(directory: str | Path) -> Found | None:
    """The checkpoint in `directory` with the best score; None if none has one. Of equal ones the first.

    Of which metric, and whether a lower score is better, is what the newest with a score says; those with a score of another
    metric, which an earlier script has named, do not count. Reads manifests only; see `verify`.

    Raises:
        CheckpointError: the directory does not exist, or the newest with a score does not say it.
    """
    scored = [(found, found.manifest) for found in find(directory) if found.manifest and found.manifest.score is not None]
    if not scored:
        return None
    newest, manifest = scored[-1]
    if manifest.scored_by is None:
        raise CheckpointError(f"{newest.path} does not say whether a lower score is better; name the best checkpoint itself")
    metric, mode = manifest.scored_by
    sign = 1.0 if mode == "min" else -1.0
    alike = [entry for entry in scored if entry[1].scored_by is None or entry[1].scored_by[0] == metric]
    latest_copies = {entry[1].update: entry for entry in alike}  # in the order of their first copies
    return min(latest_copies.values(), key=lambda entry: sign * (entry[1].score or 0.0))[0]
