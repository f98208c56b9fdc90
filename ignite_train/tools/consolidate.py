"""Writes one object of a checkpoint, such as the model, as a plain file that `torch.load` reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ignite_train.arguments import did_you_mean, path_of
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.run_objects import HANDLERS
from ignite_train.errors import CheckpointError
from ignite_train.tools.inspection import chosen_checkpoint

__all__ = ["consolidate", "read_entry", "write_weights"]


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
    with CheckpointReader(chosen_checkpoint(path, best=best)) as stored:
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
