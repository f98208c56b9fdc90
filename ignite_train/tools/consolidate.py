"""Writes one object of a checkpoint, such as the model, as files that other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ignite_train.arguments import did_you_mean, path_of, positive_int
from ignite_train.checkpoint.read_checkpoint import use_chosen
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.run_objects import HANDLERS
from ignite_train.errors import CheckpointError
from ignite_train.tools.inspection import chosen_checkpoint, is_distributed_checkpoint
from ignite_train.tools.write_weights import MAX_SHARD_BYTES, Format, write_weights

__all__ = ["consolidate", "read_entry", "read_object"]


def consolidate(
    path: str | Path,
    output: str | Path,
    *,
    entry: str = "model",
    best: bool = False,
    trained_only: bool = False,
    evaluated: bool = False,
    file_format: Format | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Format:
    """Writes the model of a checkpoint, assembled from its shards, as one plain state_dict.

    A file appears whole or not at all, and replaces a file of that name. Nothing else is replaced or removed: shards beside an
    earlier export of that name are refused, and so is a file beside shards of that name.

    Args:
        path: the checkpoint, or a directory of them, of which the newest whole one counts; or a directory that
            `torch.distributed.checkpoint` has written, whose tensors under `entry`, or at its top, are taken.
        output: the file; or the directory, which must not exist, of the distributed format.
        entry: what is written: the name of an object in the checkpoint, such as `"to_save/teacher"`, which may be left without
            `to_save/` or `handlers/`. Of an object that holds a model under `"model"`, as `ModelEMA` does, that model.
        best: of a directory, the checkpoint with the best score.
        trained_only: leave out the parameters of the model that were frozen when it was saved: of a model with LoRA only the
            adapters are left. `load_weights(..., strict=False)` puts them into a model that has the others.
        evaluated: of a run with a schedule-free optimizer, the weights at which it is evaluated, as its `eval()` computes them.
        file_format: `"torch"`: `torch.load` reads it. `"safetensors"`, for an output that ends in `.safetensors`: each of tied
            weights once, and where they are more than `max_shard_bytes` several files with an index, named as Hugging Face's
            libraries expect. `"distributed"`: a directory of `torch.distributed.checkpoint`, with the tensors at its top.
            None: safetensors if the output ends in `.safetensors`, else torch.
        max_shard_bytes: of one file of safetensors, if it holds more than one tensor.

    Returns:
        The format.

    Raises:
        DamagedCheckpointError: something that was needed is not what was written.
        CheckpointError: the checkpoint has no such object, or the format cannot hold it, or `output` is something else than a
            file, or shards of its name lie beside it, or the disk cannot hold it.
    """
    path = path_of("path", path)
    positive_int("max_shard_bytes", max_shard_bytes)
    state = read_object(path, entry, best=best, trained_only=trained_only, evaluated=evaluated)
    return write_weights(state, output, file_format=file_format, max_shard_bytes=max_shard_bytes)


def read_object(path: Path, entry: str, *, best: bool = False, trained_only: bool = False, evaluated: bool = False) -> Any:
    """The state that `consolidate` would write; for the arguments and errors see there."""
    if (trained_only or evaluated) and entry != "model":
        raise CheckpointError(f"trained_only and evaluated are about the model that is trained, got entry={entry!r}; use one")
    if is_distributed_checkpoint(path):
        if best or trained_only or evaluated:
            raise CheckpointError(
                f"best, trained_only and evaluated need a checkpoint of this library, got {path}; leave them out"
            )
        from ignite_train.tools.distributed_checkpoint import read_distributed_checkpoint

        return read_distributed_checkpoint(path, entry)
    return use_chosen(
        lambda: chosen_checkpoint(path, best=best),
        lambda chosen: _read(chosen, entry, trained_only=trained_only, evaluated=evaluated),
    )


def _read(path: Path, entry: str, *, trained_only: bool, evaluated: bool) -> Any:
    with CheckpointReader(path) as stored:
        state = read_entry(stored, entry)
        state = _evaluated_weights(stored, state) if evaluated else state
        if trained_only:
            frozen = {*stored.read("description")["frozen"]}
            state = {name: value for name, value in state.items() if name not in frozen}
    return state


def read_entry(stored: CheckpointReader, entry: str) -> Any:
    """The state of an object; if the object holds a model, the state of that model.

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


def _evaluated_weights(stored: CheckpointReader, state: Mapping[str, Any]) -> dict[str, Any]:
    """The model's state at the point where schedule-free optimizers are evaluated.

    They hold y = (1 - beta) z + beta x in the model while they train, and z in their state; x is what counts (Defazio et al.,
    The Road Less Scheduled, arXiv:2405.15682). It is computed as their `eval()` does: y + (1 - 1 / beta) (z - y).

    Args:
        stored: the checkpoint.
        state: its model's.

    Raises:
        CheckpointError: no optimizer in the checkpoint is schedule-free.
    """
    found, changed = False, dict(state)
    for name, described in stored.read("description")["optimizers"].items():
        optimizer = stored.read(name)
        if not isinstance(optimizer, dict) or not any("z" in one for one in optimizer.get("state", {}).values()):
            continue
        found = True
        for group, names in zip(optimizer["param_groups"], described["names"], strict=True):
            if group.get("train_mode") is False:
                continue
            weight = 1 - 1 / _beta(name, group)
            for index, of in zip(group["params"], names, strict=True):
                z = optimizer["state"].get(index, {}).get("z")
                if isinstance(z, Tensor) and of in state:
                    point = torch.lerp(state[of], z.to(state[of].dtype), weight)
                    changed |= {other: point for other, value in state.items() if value is state[of]}
    if not found:
        raise CheckpointError(
            f"evaluated=True needs a schedule-free optimizer, and {stored.path} has none whose state has z; the weights of an "
            "average are an entry, such as entry='ModelEMA'"
        )
    return changed


def _beta(name: str, group: Mapping[str, Any]) -> float:
    beta = group["betas"][0] if "betas" in group else group.get("momentum")
    if not isinstance(beta, (int, float)) or not 0 < beta <= 1:
        raise CheckpointError(f"{name} must have betas or a momentum in its groups, got {sorted(map(str, group))}")
    return float(beta)
