"""The command that lists checkpoints, verifies them, and writes the model of one as files that other programs read.

python -m ignite_train.checkpoint list DIR
python -m ignite_train.checkpoint verify DIR
python -m ignite_train.checkpoint consolidate DIR [--output FILE] [--entry NAME] [--best] [--trained-only] [--evaluated]
    [--format torch|safetensors|distributed] [--max-shard-bytes N]

DIR is one checkpoint, or a directory of them: then `consolidate` takes the newest that is whole, or with `--best` the one
with the best score. With `--entry` it writes another object than the model, such as `ModelEMA`, or `to_save/teacher`; with
`--trained-only` the model without its frozen weights, as LoRA adapters; with `--evaluated` the point at which a schedule-free
optimizer is evaluated. A name that ends in `.safetensors` gives that format. DIR of `consolidate` may also be a directory that
torch.distributed.checkpoint has written, and `--format distributed` writes one.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from ignite_train.arguments import path_on_command_line
from ignite_train.checkpoint.directory import CheckpointDirectory
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.read_checkpoint import Found, best_of, find, is_removed, use_chosen
from ignite_train.errors import CheckpointError, DamagedCheckpointError, UnreadableCheckpointError
from ignite_train.tools.consolidate import consolidate
from ignite_train.tools.inspection import chosen_checkpoint, is_distributed_checkpoint, verify
from ignite_train.tools.write_weights import MAX_SHARD_BYTES, Format, index_of

__all__ = ["checkpoint_command"]


def checkpoint_command(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status: 0, or 1 if something is damaged or missing."""
    parser = argparse.ArgumentParser(prog="python -m ignite_train.checkpoint", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    what_else = {"consolidate": ", or one of torch.distributed.checkpoint"}
    for name, what in (("list", "what is there"), ("verify", "read every byte"), ("consolidate", "make it one file")):
        command = commands.add_parser(name, help=what, description=what)
        which = f"a checkpoint of ignite_train, or a directory of them{what_else.get(name, '')}"
        command.add_argument("directory", type=path_on_command_line, help=which)
        if name == "consolidate":
            command.add_argument(
                "--output", type=path_on_command_line, default="model.pt", help="the file to write (default: %(default)s)"
            )
            command.add_argument("--entry", default="model", help="the object to write, such as ModelEMA (default: model)")
            command.add_argument("--best", action="store_true", help="take the checkpoint with the best score")
            command.add_argument("--trained-only", action="store_true", help="leave out frozen weights")
            command.add_argument(
                "--evaluated", action="store_true", help="the weights that a schedule-free run is evaluated with"
            )
            command.add_argument(
                "--format", dest="file_format", choices=get_args(Format), help="default: by the name of the output"
            )
            command.add_argument("--max-shard-bytes", type=int, default=MAX_SHARD_BYTES, help="of one file of safetensors")
    options = parser.parse_args(arguments)
    try:
        if options.command == "consolidate":
            return _consolidate(options)
        return _list(options.directory, thoroughly=options.command == "verify")
    except (CheckpointError, OSError, ValueError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1


def _list(directory: Path, *, thoroughly: bool) -> int:
    status, found = 0, find(directory)
    is_alone = bool(found) and found[0].path == directory  # others, of which nothing is known here, may lie beside it
    marked = None if is_alone else _known_best(found)
    for number, one in enumerate(found, start=1):
        entry = _verified(one) if thoroughly and not one.error else one
        if is_removed(entry.path):  # by its run
            print(f"{entry.path.absolute().name}  removed meanwhile")  # noqa: T201
            continue
        status |= entry.error is not None
        notes = [f"damaged: {entry.damage}" if entry.damage else "whole" if thoroughly else ""]
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
        notes += ["best"] if marked is not None and entry.path == marked.path else []
        notes += ["latest"] if number == len(found) and not (is_alone or entry.error) else []
        print(f"{entry.path.absolute().name}  {', '.join(note for note in notes if note)}")  # noqa: T201
    for name in CheckpointDirectory(directory, Disk()).set_aside_before():
        print(f"{name}  damaged, and renamed by an earlier start")  # noqa: T201
    if not found:
        other = (
            ", but one of torch.distributed.checkpoint, which consolidate reads" if is_distributed_checkpoint(directory) else ""
        )
        print(f"no checkpoint in {directory}{other}")  # noqa: T201
        status |= thoroughly
    return status


def _verified(found: Found) -> Found:
    """A checkpoint, every byte of which is read, with what is wrong with it."""
    try:
        verify(found.path)
    except (DamagedCheckpointError, UnreadableCheckpointError) as error:
        return replace(found, error=error)
    return found


def _known_best(checkpoints: Sequence[Found]) -> Found | None:
    """The checkpoint that is marked as the best; None if that is not known, since another one may be better."""
    try:
        return None if any(found.error for found in checkpoints) else best_of(checkpoints)
    except CheckpointError:
        return None


def _consolidate(options: argparse.Namespace) -> int:
    output, entry, directory = options.output, options.entry, options.directory
    names = ("entry", "best", "trained_only", "evaluated", "file_format", "max_shard_bytes")
    given = {name: getattr(options, name) for name in names}

    def choose() -> Path:
        return directory if is_distributed_checkpoint(directory) else chosen_checkpoint(directory, best=options.best)

    path, written = use_chosen(choose, lambda path: (path, consolidate(path, output, **given)))
    output = output if output.exists() else index_of(output)  # of shards
    readers = {
        "safetensors": f"load_weights(model, {str(output)!r})",
        "distributed": f"torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id={str(output)!r})",
    }
    if written == "torch":
        readers["torch"] = f"torch.load({str(output)!r}, weights_only={_is_safe(output)})"
    print(f"{output}  the {entry} of {path}; {readers[written]} reads it")  # noqa: T201
    return 0


def _is_safe(output: Path) -> bool:
    """Whether torch reads the file without running pickled objects: arrays and frozen sets are such."""
    try:
        torch.load(output, map_location="meta", mmap=True, weights_only=True)  # reads no numbers
    except pickle.UnpicklingError:
        return False
    return True
