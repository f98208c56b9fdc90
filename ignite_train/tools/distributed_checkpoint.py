"""Directories of `torch.distributed.checkpoint`, which torchtitan and others write: the weights in them, in and out.

Torch's modules for it take long to import, so this file is imported by the functions that use it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ignite_train.checkpoint.disk import Disk
from ignite_train.errors import CheckpointError
from ignite_train.tools.inspection import DISTRIBUTED_METADATA

__all__ = ["read_distributed_checkpoint", "write_distributed_checkpoint"]

# What torch writes into the description of a checkpoint, which is a pickle: nothing else in it is imported.
_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata"),
            *("BytesStorageMetadata", "TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if (module, name) not in _CLASSES and not is_dtype:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such checkpoint needs")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """Reads the files of a checkpoint, and runs nothing that stands in them."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with Path(self.path, DISTRIBUTED_METADATA).open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError("it describes no checkpoint")
        return found


def read_distributed_checkpoint(path: Path, entry: str = "model") -> dict[str, Tensor]:
    """The tensors that a directory holds under `entry`, or at its top if it has no such entry; each whole, on the CPU.

    Raises:
        CheckpointError: it cannot be read, or holds no such tensors.
    """
    reader = _Reader(path)
    try:
        metadata = reader.read_metadata()
        wanted = {
            name: where
            for name, where in _places(metadata)
            if isinstance(metadata.state_dict_metadata[name], TensorStorageMetadata)
        }
        inside = {name: where[1:] for name, where in wanted.items() if len(where) > 1 and where[0] == entry}
        inside = inside or {name: where for name, where in wanted.items() if len(where) == 1 and entry == "model"}
        state = {name: _room(metadata.state_dict_metadata[name]) for name in inside}
        with _quiet():
            load(state, storage_reader=reader, no_dist=True)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # torch raises any of ten kinds for files that are cut short or missing
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{path} cannot be read as a torch.distributed.checkpoint: {reason:.200}") from error
    if not state:
        tops = sorted({str(where[0]) for where in wanted.values()})
        raise CheckpointError(f"{path} has no tensors under {entry!r}; it has {tops[:10]}")
    return {".".join(map(str, where)): state[name] for name, where in inside.items()}


def write_distributed_checkpoint(state: Mapping[str, Tensor], path: Path) -> None:
    """Writes tensors at the top of a directory; it appears whole or not at all.

    Raises:
        CheckpointError: there is something of that name.
        OSError: the disk cannot hold it.
    """
    if path.exists():
        raise CheckpointError(
            f"output must be a directory that does not exist, got {str(path)!r}; remove it, or choose another"
        )
    unfinished = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with _quiet():
            save(dict(state), checkpoint_id=unfinished, no_dist=True)
        Disk().sync_directory(unfinished)
        unfinished.rename(path)
    except CheckpointException as error:  # which is no Exception
        (first, _), *_ = error.failures.values()
        raise OSError(str(first.__context__ or first)) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    Disk().sync_directory(path.absolute().parent)


def _places(metadata: Metadata) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each entry, and the keys that led to it in the nested state that was saved."""
    places = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    for name in metadata.state_dict_metadata:
        where = places.get(name, (name,))
        yield name, where if isinstance(where, tuple) else (name,)


def _room(claim: Any) -> Tensor:
    return torch.empty(claim.size, dtype=claim.properties.dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a single process reads or writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
