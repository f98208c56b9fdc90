"""One checkpoint on disk; every byte is checked before it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ignite_train.checkpoint.manifest import MAX_INDEX_BYTES, checked_json, file_names, read_manifest, reading_error
from ignite_train.checkpoint.tensor_files import Box, Entry, TensorFile, assemble, check_cover, local_box
from ignite_train.checkpoint.tree import DTYPES, MAX_NODES, Composed, ComposedTensor, KeyPath, decode, path_name
from ignite_train.errors import CheckpointError

__all__ = ["CheckpointReader", "Like", "TensorClaim", "composed_claim"]

Like = Callable[[KeyPath, tuple[int, ...]], DTensor | None]
"""Gives the sharded tensor that the one stored at a path, with a shape, is read for; None: the whole tensor is wanted."""


@dataclass(slots=True)
class TensorClaim:
    """What an index says of a tensor that was not read yet. Like a tensor, it cannot be a key of a dict.

    Attributes:
        key: its name in the index.
        shape: of the whole tensor.
        dtype: of its numbers.
        of_class: the name of its class, if it is made of other tensors.
        parts: what is claimed of these.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    of_class: str = ""
    parts: tuple[TensorClaim, ...] = ()

    @property
    def num_bytes(self) -> int:
        """The memory that it would take, in bytes."""
        if self.of_class:
            return sum(part.num_bytes for part in self.parts)
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank wrote."""

    trees: dict[str, Any]
    tensors: TensorFile


def composed_claim(composed: Composed, path: KeyPath) -> TensorClaim:
    """The record of a tensor that consists of other tensors.

    Raises:
        ValueError: one of its parts is not a tensor.
    """
    parts = [*composed.parts.values()]
    if not all(isinstance(part, TensorClaim) for part in parts):
        raise ValueError(f"{path_name(path)} is not a tensor")
    return TensorClaim(path_name(path), composed.shape, composed.dtype, composed.of_class, tuple(parts))


def _composed(classes: Mapping[str, type[ComposedTensor]], composed: Composed, path: KeyPath) -> Tensor:
    kind = classes.get(composed.of_class)
    if kind is None or not all(isinstance(part, Tensor) for part in composed.parts.values()):
        raise CheckpointError(
            f"{path_name(path)} is of the class {composed.of_class:.100}, and nothing in this run is; build what was saved"
        )
    strides = [math.prod(composed.shape[place + 1 :]) for place in range(len(composed.shape))]
    return kind.__tensor_unflatten__(composed.parts, composed.context, torch.Size(composed.shape), tuple(strides))


def _whole(_path: KeyPath, _shape: tuple[int, ...]) -> None:
    """Every tensor is wanted whole."""


class CheckpointReader:
    """Reads a checkpoint. Close it, or use it in a `with`.

    Anything wrong with it raises a `DamagedCheckpointError`, an error of the disk an `UnreadableCheckpointError`, and a newer
    format a `CheckpointFormatError`. Only what is asked for is read and checked; `verify` reads everything.

    Args:
        path: the checkpoint's directory.

    Attributes:
        manifest: its manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._parts: dict[int, _Part] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its files."""
        for part in self._parts.values():
            part.tensors.close()
        self._parts.clear()

    def names(self, rank: int = 0) -> list[str]:
        """The objects that a rank wrote."""
        return [*self._part(rank).trees]

    def read(
        self, name: str, *, rank: int = 0, like: Like = _whole, classes: Mapping[str, type[ComposedTensor]] | None = None
    ) -> Any:
        """An object's state. A tensor that stands in it twice is one tensor, as it was when it was written.

        Args:
            name: one of `names(rank)`.
            rank: who wrote it.
            like: for tensors that are to be sharded.
            classes: those that a tensor may have which is made of others, by their names.
        """
        met: dict[str, Tensor] = {}

        def tensor(key: str, path: KeyPath) -> Tensor:
            return met[key] if key in met else self._tensor(key, path, rank, like, met)

        try:
            return decode(self._part(rank).trees[name], (name,), tensor, partial(_composed, classes or {}))
        except (ValueError, TypeError, OSError, KeyError) as error:
            raise reading_error(self.path, error) from error

    def outline(self, name: str, *, rank: int = 0) -> Any:
        """An object's state with a `TensorClaim` in the place of each tensor: nothing is allocated for what a file claims."""
        try:
            return decode(self._part(rank).trees[name], (name,), partial(self._claim, rank), composed_claim)
        except (ValueError, TypeError, OSError, KeyError) as error:
            raise reading_error(self.path, error) from error

    @property
    def bytes_on_disk(self) -> int:
        """What the opened files take on the disk, in bytes. A file with holes takes less than its size."""
        return sum(part.tensors.bytes_on_disk for part in self._parts.values())

    def verify(self) -> None:
        """Reads every byte of it, and everything that was stored. Keeps no tensor in memory."""
        for rank in range(self.manifest.world_size):
            part = self._part(rank)
            try:
                for key in part.tensors.entries:
                    part.tensors.check(key)
                for name, tree in part.trees.items():
                    decode(tree, (name,), partial(self._claim, rank), composed_claim)
            except (ValueError, TypeError, OSError, KeyError) as error:
                raise reading_error(self.path, error) from error

    def _part(self, rank: int) -> _Part:
        if rank not in self._parts:
            try:
                self._parts[rank] = self._open(rank)
            except (ValueError, TypeError, OSError) as error:
                raise reading_error(self.path, error) from error
        return self._parts[rank]

    def _open(self, rank: int) -> _Part:
        index_name, tensors_name = file_names(rank)
        records = self.manifest.files
        if records[index_name].size > MAX_INDEX_BYTES:
            raise ValueError(f"{index_name} has {records[index_name].size} bytes, more than an index may have")
        index = checked_json(records[index_name].read(self.path / index_name))
        if not isinstance(index, dict) or set(index) != {"objects", "tensors"}:
            raise ValueError(f"{index_name} is not an index")
        trees, notes = index["objects"], index["tensors"]
        if not isinstance(trees, dict) or not isinstance(notes, dict) or len(notes) > MAX_NODES:
            raise ValueError(f"{index_name} is not an index")
        return _Part(trees, TensorFile(self.path / tensors_name, records[tensors_name], notes))

    def _tensor(self, key: str, path: KeyPath, rank: int, likes: Like, met: dict[str, Tensor]) -> Tensor:
        entry, holders = self._find(key, rank)
        like = likes(path, entry.whole)
        box = Box((0,) * len(entry.whole), entry.whole) if like is None else local_box(like)
        parts = ((file.entries[key].box, partial(file.read, key)) for file in holders)
        try:
            numbers = assemble(box, DTYPES[entry.dtype], parts)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        if like is None:
            met[key] = numbers
            return numbers
        mesh, placements = like.device_mesh, like.placements
        return DTensor.from_local(
            numbers.to(like.device), mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _find(self, key: str, rank: int) -> tuple[Entry, list[TensorFile]]:
        """An entry of the tensor, and the files that hold it: that of `rank` alone if it has the whole."""
        own = self._part(rank).tensors
        entry = own.entries.get(key)
        if entry is not None and entry.shape == entry.whole:
            return entry, [own]
        files = [self._part(other).tensors for other in range(self.manifest.world_size)]
        holders = [file for file in files if key in file.entries]
        if len({(file.entries[key].dtype, file.entries[key].whole) for file in holders}) != 1:
            raise ValueError(f"{key} is missing, or stored with several dtypes or shapes")
        return holders[0].entries[key], holders

    def _claim(self, rank: int, key: str, _path: KeyPath) -> TensorClaim:
        """Looks only for the parts of a tensor, and whether they are all there."""
        entry, holders = self._find(key, rank)
        try:
            check_cover(Box((0,) * len(entry.whole), entry.whole), [file.entries[key].box for file in holders])
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        return TensorClaim(key, entry.whole, DTYPES[entry.dtype])
