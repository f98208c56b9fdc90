"""Checkpoints without a run: lists them, verifies them, and writes the model of one as a file that `torch.load` reads.

python -m ignite_train.checkpoint list DIR
python -m ignite_train.checkpoint verify DIR
python -m ignite_train.checkpoint consolidate DIR [--output FILE] [--entry NAME] [--best]

DIR is one checkpoint, or a directory of them: then `consolidate` takes the newest that is whole, or with `--best` the one
with the best score. With `--entry` it writes another object than the model, such as `ModelEMA`, or `to_save/teacher`.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ignite_train.arguments import did_you_mean, path_of
from ignite_train.checkpoint.directory import CheckpointDirectory
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.manifest import MANIFEST, Manifest, UnusableCheckpoint, read_manifest
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.run_objects import HANDLERS
from ignite_train.errors import CheckpointError, CheckpointFormatError, DamagedCheckpointError, UnreadableCheckpointError

__all__ = [
    "Found",
    "best",
    "chosen_checkpoint",
    "consolidate",
    "find",
    "latest",
    "main",
    "read_entry",
    "verify",
    "write_weights",
]


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
            _damage(found)  # raises if the manifest could not be read
    for found in reversed(entries):
        if not _damage(found):
            return found.path
    return None


def best(directory: str | Path) -> Found | None:
    """The checkpoint in `directory` with the best score; None if none has one. Of equal ones the first.

    Of which metric, and whether a lower score is better, is what the newest with a score says; those with a score of another
    metric, which an earlier script has named, do not count. Reads manifests only; see `verify`.

    Raises:
        CheckpointError: the directory does not exist, or an older version has written the newest, which does not say it.
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


def chosen_checkpoint(path: str | Path, *, best: bool = False) -> Path:
    """One checkpoint: `path` itself if it is one; of a directory of them the newest whole one, or the one with the best score.

    Raises:
        CheckpointError: `path` holds no whole checkpoint, or none with a score.
    """
    path = path_of("path", path)
    if (path / MANIFEST).exists() and not best:
        return path
    found = _best_path_in(path) if best else latest(path)
    if found is None:
        raise CheckpointError(f"{path} has no {'checkpoint with a score' if best else 'whole checkpoint'}")
    return found


def _best_path_in(directory: Path) -> Path | None:
    found = best(directory)
    return None if found is None else found.path


def consolidate(path: str | Path, output: str | Path, *, entry: str = "model", best: bool = False) -> None:
    """Writes the model of a checkpoint, assembled from its shards, as one plain state_dict: `torch.load` reads it.

    The file appears whole or not at all, and replaces one of that name.

    Args:
        path: the checkpoint, or a directory of them, of which the newest whole one counts.
        output: the file.
        entry: what is written: the name of an object in the checkpoint, such as `"to_save/teacher"`, which may be left without
            `to_save/` or `handlers/`. Of an object that holds a model under `"model"`, as `ModelEMA` does, that model.
        best: of a directory, the checkpoint with the best score.

    Raises:
        DamagedCheckpointError: something that was needed is not what was written.
        CheckpointError: the checkpoint has no such object, or `output` is a directory.
    """
    _write_entry(chosen_checkpoint(path, best=best), output, entry)


def _write_entry(path: Path, output: str | Path, entry: str) -> None:
    with CheckpointReader(path) as stored:
        state = read_entry(stored, entry)
    write_weights(state, output)


def write_weights(state: Any, output: str | Path) -> None:
    """Writes a state_dict as a file that `torch.load` reads; the file appears whole or not at all.

    Raises:
        CheckpointError: `output` is a directory.
    """
    output = path_of("output", output)
    if not output.name or output.is_dir():
        raise CheckpointError(f"output must be the path of a file, got {str(output)!r}")
    unfinished = output.with_name(f".{output.name}.{os.urandom(4).hex()}")
    try:
        with unfinished.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)
    Disk().sync_directory(output.absolute().parent)


def read_entry(stored: CheckpointReader, entry: str) -> Any:
    """The state of an object; of one that holds a model, that of the model.

    Raises:
        CheckpointError: the checkpoint has no such object.
    """
    known = stored.names()
    name = next((name for prefix in ("", "to_save/", HANDLERS) if (name := prefix + entry) in known), None)
    if name is None:
        raise CheckpointError(
            f"entry must be an object of {stored.path}, any of {known}, got {entry!r}{did_you_mean(entry, known)}"
        )
    state = stored.read(name)
    return state["model"] if isinstance(state, dict) and isinstance(state.get("model"), dict) else state


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status: 0, or 1 if something is damaged or missing."""
    parser = argparse.ArgumentParser(prog="python -m ignite_train.checkpoint", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("list", "what is there"), ("verify", "read every byte"), ("consolidate", "make it one file")):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("directory", type=Path, help="one checkpoint, or a directory of them")
        if name == "consolidate":
            command.add_argument("--output", type=Path, default=Path("model.pt"), help="the file to write (default: model.pt)")
            command.add_argument("--entry", default="model", help="the object to write, such as ModelEMA (default: model)")
            command.add_argument("--best", action="store_true", help="take the checkpoint with the best score")
    options = parser.parse_args(arguments)
    try:
        if options.command == "consolidate":
            return _consolidate(options.directory, options.output, options.entry, is_best=options.best)
        return _list(options.directory, thoroughly=options.command == "verify")
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1


def _list(directory: Path, *, thoroughly: bool) -> int:
    status, found = 0, find(directory)
    best_path = _best_path(directory)
    for entry in found:
        damage = _damage(entry) if thoroughly and not entry.unreadable else entry.damage
        status |= bool(damage or entry.unreadable)
        notes = [f"damaged: {damage}" if damage else "whole" if thoroughly else ""]
        if entry.unreadable:
            notes = [f"cannot be read: {entry.unreadable}"]
        if entry.manifest is not None:
            manifest = entry.manifest
            size = sum(record.size for record in manifest.files.values())
            notes = [
                f"epoch {manifest.epoch}, update {manifest.update}, {size / 1e6:.1f} MB, ranks: {manifest.world_size}",
                *notes,
            ]
            notes += [] if manifest.score is None else [f"score {manifest.score:g}"]
        notes += ["best"] if entry.path == best_path else []
        notes += ["latest"] if entry is found[-1] and not (damage or entry.unreadable) else []
        print(f"{entry.path.absolute().name}  {', '.join(note for note in notes if note)}")  # noqa: T201
    for name in CheckpointDirectory(directory, Disk()).set_aside_before():
        print(f"{name}  damaged, and renamed by an earlier start")  # noqa: T201
    if not found:
        print(f"no checkpoint in {directory}")  # noqa: T201
        status |= thoroughly
    return status


def _best_path(directory: Path) -> Path | None:
    """The checkpoint that is marked as the best; None if that is not known."""
    try:
        return _best_path_in(directory)
    except CheckpointError:
        return None


def _consolidate(directory: Path, output: Path, entry: str, *, is_best: bool) -> int:
    path = chosen_checkpoint(directory, best=is_best)
    _write_entry(path, output, entry)
    try:
        torch.load(output, map_location="meta", mmap=True, weights_only=True)  # reads no numbers
        is_safe = True
    except pickle.UnpicklingError:  # it holds arrays, or frozen sets: torch reads those as pickled objects only
        is_safe = False
    print(f"{output}  the {entry} of {path}; torch.load({str(output)!r}, weights_only={is_safe}) reads it")  # noqa: T201
    return 0


def _damage(found: Found) -> str:
    try:
        verify(found.path)
    except DamagedCheckpointError as error:
        return error.reason
    return ""
