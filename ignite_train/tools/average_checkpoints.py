"""The mean of the weights of several checkpoints, as fairseq's script `average_checkpoints.py` makes it after a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ignite_train.arguments import describe, path_of, positive_int
from ignite_train.checkpoint.fits import tied_names, untied
from ignite_train.checkpoint.read_checkpoint import find
from ignite_train.errors import CheckpointError
from ignite_train.tools.load_weights import read_weights
from ignite_train.tools.write_weights import write_weights

__all__ = ["average_checkpoints"]


def average_checkpoints(
    paths: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    *,
    last: int | None = None,
    entry: str = "model",
) -> dict[str, Any]:
    """The mean (Σ wᵢ) / N of the floating-point parameters and buffers of N checkpoints.

    The sum is taken in float64 and rounded once, to the dtype of the tensor; fairseq adds in float32, with a rounding at each
    addition, and divides integer buffers too. Here integers, such as the counter of BatchNorm, and values other than tensors
    are taken from the last checkpoint. One checkpoint at a time is in memory, and the sum in float64. No collective:
    on several ranks a single rank may call it.

    Args:
        paths: checkpoints, or files of `consolidate` or `torch.save(model.state_dict(), ...)`, in their order; with `last`, the
            directory of a run.
        output: a file to write it to, which `load_weights` and `torch.load` read, and which replaces an earlier one.
        last: the newest so many checkpoints of the directory, one for each update. Have `Checkpoint(keep=...)` keep as many.
        entry: as for `consolidate`: the object in the checkpoints that is averaged.

    Returns:
        The averaged state_dict. Names of files have lost what a wrapper has put before them.

    Raises:
        TypeError: `paths` is of the wrong type, or `last` is not an integer.
        ValueError: `paths` is empty, or `last` is below 1.
        CheckpointError: there are fewer than `last` checkpoints, or they are not of one model.
        DamagedCheckpointError: something that was needed is not what was written; with `last`, the manifest of any checkpoint.
        CheckpointFormatError: with `last`, one of the checkpoints has a format that is not read.
        UnreadableCheckpointError: with `last`, the disk gave an error for some checkpoint.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from ignite_train.checkpoint import average_checkpoints
        >>> files = [f"{tempfile.mkdtemp()}/model.pt" for _ in range(2)]
        >>> for file, value in zip(files, (1.0, 4.0)):
        ...     torch.save({"weight": torch.full((2,), value)}, file)
        >>> average_checkpoints(files)
        {'weight': tensor([2.5000, 2.5000])}
    """
    chosen = _chosen(paths, last)
    newest = read_weights(chosen[-1], entry=entry)
    if not any(isinstance(value, Tensor) for value in newest.values()):
        raise CheckpointError(f"entry must be an object with weights, got {entry!r} in {chosen[-1]}, which has no tensors")
    first = {other: names[0] for names in tied_names(newest) for other in names[1:]}
    sums = {name: _wide(value) for name, value in newest.items() if _is_averaged(value) and name not in first}
    for path in chosen[:-1]:
        state = read_weights(path, entry=entry)
        _check(state, newest, path, chosen[-1])
        for name, total in sums.items():
            total += _wide(state[name])  # in place
    mean = {name: (sums[name] / len(chosen)).to(v.dtype) if name in sums else v for name, v in newest.items()}
    mean |= {name: mean[one] for name, one in first.items()}  # tied weights stay one tensor
    if output is not None:
        write_weights(mean, output)
    return mean


def _chosen(paths: str | Path | Sequence[str | Path], last: int | None) -> list[Path]:
    """The checkpoints that are averaged, in order."""
    if last is not None:
        positive_int("last", last)
        if not isinstance(paths, str | Path):
            raise TypeError(f"paths must be the directory of a run with last={last}, got {describe(paths)}")
        by_update: dict[int, Path] = {}  # in the order in which they were written: the newest last
        for found in find(paths):
            if found.error is not None:
                raise found.error  # it may be one of the newest
            if found.manifest is not None:
                by_update.pop(found.manifest.update, None)
                by_update[found.manifest.update] = found.path
        if len(by_update) < last:
            raise CheckpointError(
                f"{paths} must have {last} checkpoints of different updates, as last={last} asks, and has {len(by_update)}; "
                "lower last, or train with Checkpoint(keep=...)"
            )
        return [*by_update.values()][-last:]
    if isinstance(paths, str | Path) or not isinstance(paths, Sequence):
        raise TypeError(f"paths must be a list of checkpoints or files, or a directory with last=..., got {describe(paths)}")
    if not paths:
        raise ValueError("paths must name at least one checkpoint or file, got none")
    return [path_of("paths", path) for path in paths]


def _is_averaged(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64, copy=True)


def _check(state: Mapping[str, Any], newest: Mapping[str, Any], path: Path, last: Path) -> None:
    """Raises CheckpointError if they are not of one model."""
    names = [name for name in {**newest, **state} if _kind(state.get(name)) != _kind(newest.get(name))]
    if names or state.keys() != newest.keys():
        name = names[0] if names else sorted(state.keys() ^ newest.keys())[0]
        raise CheckpointError(
            f"paths must be checkpoints of one model: {name!r} is {_shown(state, name)} in {path} and "
            f"{_shown(newest, name)} in {last}"
        )
    for one, where, other, there in ((newest, last, state, path), (state, path, newest, last)):  # in either order
        for first, second in untied(one, other):
            raise CheckpointError(
                f"paths must be checkpoints of one model: {first!r} and {second!r} are one tensor in {where}, and "
                f"differ in {there}"
            )


def _kind(value: Any) -> Any:
    """The shape and the dtype of a tensor, which two values must share to be averaged."""
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def _shown(state: Mapping[str, Any], name: str) -> str:
    if name not in state:
        return "missing"
    value = state[name]
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else describe(value)
