"""Writes a state_dict as files that other programs read: of torch, of safetensors, of torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ignite_train.arguments import describe, one_of, path_of
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.fits import tied_names
from ignite_train.checkpoint.manifest import printable
from ignite_train.checkpoint.tensor_files import Piece, is_plain_dtype, write_tensors
from ignite_train.errors import CheckpointError

__all__ = ["MAX_SHARD_BYTES", "Format", "index_of", "write_weights"]

Format = Literal["torch", "safetensors", "distributed"]
MAX_SHARD_BYTES = 5_000_000_000
_SUFFIX = ".safetensors"


def write_weights(
    state: Any, output: str | Path, *, file_format: Format | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Format:
    """Writes a state_dict. A file appears whole or not at all, and replaces a single file of that name, and no other files.

    Args:
        state: the state_dict.
        output: the file, or the directory of the distributed format.
        file_format: see `consolidate`.
        max_shard_bytes: see `consolidate`.

    Returns:
        The format.

    Raises:
        CheckpointError: `output` is something else than a file, or shards of its name lie beside it; or the format cannot hold
            what is in the state, or the disk cannot.
    """
    output = path_of("output", output)
    if file_format is None:
        file_format = "safetensors" if output.suffix == _SUFFIX else "torch"
    one_of("file_format", file_format, ("torch", "safetensors", "distributed"))
    try:
        _write(state, output, file_format, max_shard_bytes)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # torch raises its own, while that of the disk is handled
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise CheckpointError(f"{output} could not be written: {printable(reason)}") from error
    return file_format


def _write(state: Any, output: Path, file_format: Format, max_shard_bytes: int) -> None:
    if file_format == "distributed":
        from ignite_train.tools.distributed_checkpoint import write_distributed_checkpoint

        write_distributed_checkpoint(_tensors(state, output), output)
        return
    if not output.name or output.is_symlink() or (output.exists() and not output.is_file()):
        raise CheckpointError(
            f"output must be the path of a file, got {str(output)!r}; no directory, link or device is replaced, choose another"
        )
    if (file_format == "safetensors") != (output.suffix == _SUFFIX):
        must, name = ("must not", "model.pt") if file_format == "torch" else ("must", "model.safetensors")
        raise CheckpointError(
            f"output {must} end in {_SUFFIX} with file_format={file_format!r}, got {str(output)!r}, by which it would be read "
            f"as the other format; leave file_format out, or choose a name such as {name}"
        )
    if file_format == "torch":
        _put(output, lambda path: _save(state, path))
    else:
        _write_safetensors(_each_once(_tensors(state, output)), output, max_shard_bytes)
    Disk().sync_directory(output.absolute().parent)


def _put(output: Path, write: Callable[[Path], None]) -> None:
    """Has a file written under another name, and gives it its own when it is on the disk."""
    unfinished = output.with_name(f".{output.name}.{os.urandom(4).hex()}")
    try:
        write(unfinished)
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)


def _save(state: Any, path: Path) -> None:
    with path.open("xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _tensors(state: Any, output: Path) -> dict[str, Tensor]:
    """The state, if it is tensors by their names.

    Raises:
        CheckpointError: it is not.
    """
    if not isinstance(state, Mapping) or not state:
        raise CheckpointError(f"{output.name} must be written of tensors by their names, got {describe(state)}")
    wrong = next((name for name, value in state.items() if not isinstance(name, str) or not isinstance(value, Tensor)), None)
    if wrong is not None:
        raise CheckpointError(
            f"{output.name} can hold tensors by their names only, got {wrong!r}, {describe(state[wrong])}; "
            "file_format='torch' with an output such as model.pt holds everything"
        )
    return dict(state)


def _each_once(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of tied weights, which share memory in a state that was read, the first name."""
    others = {name for _, *others in tied_names(state) for name in others}
    return {name: tensor for name, tensor in state.items() if name not in others}


def _write_safetensors(state: Mapping[str, Tensor], output: Path, max_shard_bytes: int) -> None:
    """Writes a file, or several with an index, named as Hugging Face's libraries expect."""
    wrong = next((name for name, tensor in state.items() if not is_plain_dtype(tensor.dtype)), None)
    if wrong is not None:
        raise CheckpointError(
            f"{output.name} cannot hold {state[wrong].dtype}, as {wrong!r} has it; use "
            "file_format='torch' with an output such as model.pt"
        )
    shards = [*_shards(state, max_shard_bytes)]
    _refuse_earlier(output, in_shards=len(shards) > 1)
    if len(shards) == 1:
        _put(output, lambda path: _write_file(path, state))
        return
    names = [f"{output.stem}-{number:05d}-of-{len(shards):05d}{_SUFFIX}" for number in range(1, len(shards) + 1)]
    where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in state.values())
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode()
    try:
        for name, shard in zip(names, shards, strict=True):
            _put(output.with_name(name), lambda path, shard=shard: _write_file(path, shard))  # type: ignore[misc]
        _put(index_of(output), lambda path: Disk().write_file(path, [memoryview(index)], len(index)))
    except BaseException:
        for name in names:  # none of them was there before
            output.with_name(name).unlink(missing_ok=True)
        raise


def index_of(output: Path) -> Path:
    """The index of shards, which has the name of the file that they stand for."""
    return output.with_name(f"{output.name}.index.json")


def _refuse_earlier(output: Path, *, in_shards: bool) -> None:
    """Raises CheckpointError if an earlier export, whole or broken off, would be mixed up with this one."""
    shard = re.compile(re.escape(output.stem) + r"-\d{5}-of-\d{5}" + re.escape(_SUFFIX))
    others = {index_of(output).name} | ({output.name} if in_shards else set())
    names = sorted(one.name for one in output.absolute().parent.iterdir())
    found = next((name for name in names if name in others or shard.fullmatch(name)), None)
    if found is not None:
        raise CheckpointError(
            f"output must be in a folder without an earlier export of its name, got {str(output)!r} beside {found!r}; "
            "remove that export, or choose another folder"
        )


def _shards(state: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in their order, so many together as fit; one that does not fit is alone."""
    shard: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if shard and sum(one.nbytes for one in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    pieces = {name: Piece(one.detach().contiguous(), (0,) * one.dim(), tuple(one.shape)) for name, one in tensors.items()}
    # Without this word Hugging Face's libraries refuse a file.
    write_tensors(Disk(), path, pieces, metadata={"format": "pt"})
