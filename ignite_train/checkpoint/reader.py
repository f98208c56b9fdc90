"""One checkpoint on disk; every byte is checked before it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ignite_train.checkpoint.manifest import (
    MAX_INDEX_BYTES,
    FileRecord,
    checked_json,
    file_names,
    is_frozen_name,
    one_line,
    read_manifest,
    reading_error,
)
from ignite_train.checkpoint.tensor_files import Box, Entry, TensorFile, assemble, check_cover, local_box
from ignite_train.checkpoint.tree import DTYPES, MAX_NODES, Composed, KeyPath, TensorForm, decode, path_name
from ignite_train.errors import CheckpointError, UnreadableCheckpointError
from ignite_train.model.composed_tensor import ComposedTensor

__all__ = ["CheckpointReader", "Like", "composed_form"]

Like = Callable[[KeyPath, tuple[int, ...]], DTensor | None]
"""Gives the sharded tensor that the one stored at a path, with a shape, is read for; None: the whole tensor is wanted."""


class _FrozenWeights(TensorFile):
    """A file of frozen weights. Other checkpoints need it too, so where it is damaged an older one is no way out.

    Args:
        checkpoint: which refers to it.
        path: of the file.
        record: see `TensorFile`.
        notes: see `TensorFile`.

    Raises:
        UnreadableCheckpointError: it is missing or damaged, or the disk failed.
    """

    def __init__(self, checkpoint: Path, path: Path, record: FileRecord, notes: Mapping[str, Any]) -> None:
        self._needed_by, self._name = checkpoint, path.name
        with self._explaining():
            super().__init__(path, record, notes)

    def fill(self, name: str, views: Iterable[memoryview]) -> None:
        """See `TensorFile`."""
        with self._explaining():
            super().fill(name, views)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be used: {one_line(error)}"
            reason = f"{self._name}, which has its frozen weights and lies beside it, {reason}"
            raise UnreadableCheckpointError(str(self._needed_by), reason, "copy that file there") from error


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank wrote: its objects, its files, and which of them has a tensor."""

    trees: dict[str, Any]
    files: list[TensorFile]
    tensors: dict[str, TensorFile]


def composed_form(composed: Composed, path: KeyPath) -> TensorForm:
    """The form of a tensor that consists of other tensors.

    Raises:
        ValueError: one of its parts is not a tensor.
    """
    if not all(isinstance(part, TensorForm) for part in composed.parts.values()):
        raise ValueError(f"{path_name(path)} is not a tensor")
    return composed.form


def _composed(classes: Mapping[str, type[ComposedTensor]], composed: Composed, path: KeyPath) -> Tensor:
    kind, shape = classes.get(composed.form.name), composed.form.shape
    if kind is None or not all(isinstance(part, Tensor) for part in composed.parts.values()):
        raise CheckpointError(
            f"{path_name(path)} is of the class {composed.form.name:.100}, and nothing in this run is; build what was saved"
        )
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return kind.__tensor_unflatten__(composed.parts, composed.context, torch.Size(shape), tuple(strides))


def _whole(_path: KeyPath, _shape: tuple[int, ...]) -> None:
    """Every tensor is wanted whole."""


class CheckpointReader:
    """Reads a checkpoint. Close it, or use it in a `with`.

    Anything wrong with it raises a `DamagedCheckpointError`, an error of the disk an `UnreadableCheckpointError`, and a
    format that is not read a `CheckpointFormatError`. Only what is asked for is read and checked; `verify` reads everything.

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
            for file in part.files:
                file.close()
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

        with self._naming():
            return decode(self._part(rank).trees[name], (name,), tensor, partial(_composed, classes or {}))

    def outline(self, name: str, *, rank: int = 0) -> Any:
        """An object's state with a `TensorForm` in the place of each tensor: nothing is allocated for what a file claims."""
        with self._naming():
            return decode(self._part(rank).trees[name], (name,), partial(self._form, rank), composed_form)

    def verify(self, ranks: Iterable[int] | None = None) -> None:
        """Reads every byte of it, and everything that was stored. Keeps no tensor in memory.

        Args:
            ranks: only what these have written; of the others the index of each.
        """
        for rank in range(self.manifest.world_size) if ranks is None else ranks:
            part = self._part(rank)
            with self._naming():
                for key, file in part.tensors.items():
                    file.check(key)
                for name, tree in part.trees.items():
                    decode(tree, (name,), partial(self._form, rank), composed_form)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """In it, what is wrong with the files becomes an error about this checkpoint."""
        try:
            yield
        except (ValueError, TypeError, OSError, KeyError) as error:
            raise reading_error(self.path, error) from error

    def _part(self, rank: int) -> _Part:
        if rank not in self._parts:
            with self._naming():
                self._parts[rank] = self._open(rank)
        return self._parts[rank]

    def _open(self, rank: int) -> _Part:
        index_name, tensors_name = file_names(rank)
        records = self.manifest.files
        if records[index_name].size > MAX_INDEX_BYTES:
            raise ValueError(f"{index_name} has {records[index_name].size} bytes, more than an index may have")
        index = checked_json(records[index_name].read(self.path / index_name))
        if not isinstance(index, dict) or not {"objects", "tensors"} <= set(index) <= {"objects", "tensors", "frozen"}:
            raise ValueError(f"{index_name} is not an index")
        trees, notes = index["objects"], index["tensors"]
        if not isinstance(trees, dict) or not isinstance(notes, dict) or len(notes) > MAX_NODES:
            raise ValueError(f"{index_name} is not an index")
        files: list[TensorFile] = []
        try:
            files.append(TensorFile(self.path / tensors_name, records[tensors_name], notes))
            files += [self._frozen_weights(index["frozen"])] if "frozen" in index else []
            tensors = {key: file for file in files for key in file.entries}
            if len(tensors) != sum(len(file.entries) for file in files):
                raise ValueError(f"{index_name} has a tensor twice")
        except BaseException:
            for file in files:
                file.close()
            raise
        return _Part(trees, files, tensors)

    def _frozen_weights(self, described: Any) -> TensorFile:
        """The file of frozen weights that an index, which may be forged, refers to."""
        name, notes = (described.get(key) if isinstance(described, dict) else None for key in ("file", "tensors"))
        record = self.manifest.files.get(name) if isinstance(name, str) and is_frozen_name(name) else None
        if record is None or not isinstance(notes, dict) or len(notes) > MAX_NODES:
            raise ValueError("an index refers to frozen weights that its manifest does not have")
        return _FrozenWeights(self.path, self.path.resolve().parent / str(name), record, notes)

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
        own = self._part(rank).tensors.get(key)
        if own is not None and own.entries[key].shape == own.entries[key].whole:
            return own.entries[key], [own]
        tensors = [self._part(other).tensors for other in range(self.manifest.world_size)]
        holders = [found[key] for found in tensors if key in found]
        if len({(file.entries[key].dtype, file.entries[key].whole) for file in holders}) != 1:
            raise ValueError(f"{key} is missing, or stored with several dtypes or shapes")
        return holders[0].entries[key], holders

    def _form(self, rank: int, key: str, _path: KeyPath) -> TensorForm:
        """Looks only for the parts of a tensor, and whether they are all there."""
        entry, holders = self._find(key, rank)
        try:
            check_cover(Box((0,) * len(entry.whole), entry.whole), [file.entries[key].box for file in holders])
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        return TensorForm(entry.whole, DTYPES[entry.dtype])
