"""The weights of a checkpoint, or of a plain file, for a model without a run: to use it, or to begin another run with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy

from ignite_train.arguments import describe, path_of
from ignite_train.checkpoint.fits import check_tied, tied_names
from ignite_train.checkpoint.manifest import is_frozen_name, one_line
from ignite_train.checkpoint.run_objects import SavedModule
from ignite_train.errors import CheckpointError
from ignite_train.internals.of_torch import versions_of
from ignite_train.model.averaged_tensors import plain_name
from ignite_train.ranks.wrapping import unwrap
from ignite_train.tools.consolidate import read_object
from ignite_train.tools.inspection import holds_checkpoints, is_distributed_checkpoint

__all__ = ["load_weights", "read_weights"]

# A model in one file and the index of one in several, in the order in which transformers, and then diffusers, looks for them.
_HUB_FILES = (
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin"),
)
_SHARD = re.compile(r"-\d{5}-of-(?!00001\.)\d{5}\.")  # one of several
_WRAPPER = "module."  # what DistributedDataParallel adds to each name


def load_weights(
    model: nn.Module,
    path: str | Path,
    *,
    entry: str = "model",
    best: bool = False,
    evaluated: bool = False,
    strict: bool = True,
) -> list[str]:
    """Loads weights and buffers into `model`, and nothing else: no optimizer, no counters, no trainer is needed.

    Each rank reads them by itself, without a collective; it holds the whole state for a moment, and keeps its shards of a model
    that is sharded. The names may be those of a compiled or wrapped model.

    Args:
        model: the model; wrapped, compiled or sharded ones too.
        path: the directory of a run, of which the newest whole checkpoint counts, whatever else lies in it; or one checkpoint;
            or a file that `consolidate` or `torch.save(model.state_dict(), ...)` has written. It may hold the state under
            `"model"` or `"state_dict"`. Files are read with `weights_only=True`. Or the folder, the file or the index that
            `save_pretrained` of Hugging Face's libraries has written; files of safetensors need that package. Of tied weights
            one name is enough. Or a directory of `torch.distributed.checkpoint`.
        entry: as for `consolidate`: `"ModelEMA"` loads the average. Only for a directory.
        best: the checkpoint with the best score, of the directory of a run.
        evaluated: the weights with which a schedule-free optimizer evaluates, and not the weights that it trains. Only for a
            directory.
        strict: False leaves out weights that only the file or only the model has, or that differ in shape, or whose numbers
            would not be the same in the model's dtype: for a model with another last layer. Floating-point numbers, and complex
            ones, are rounded to the model's dtype.

    Returns:
        The names of the model's parameters and buffers that were not loaded; empty if `strict`.

    Raises:
        TypeError: `model` is not a module.
        CheckpointError: the checkpoint or file is missing, or it is of another model, or what it has is on the meta device or
            lazy in the model; the model is unchanged. Or its own `load_state_dict` refuses the state, which it may have loaded
            in part.
        DamagedCheckpointError: something that was needed is not what was written.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from ignite_train.checkpoint import load_weights
        >>> file = tempfile.mkdtemp() + "/model.pt"
        >>> torch.save(torch.nn.Linear(4, 1).state_dict(), file)
        >>> model = torch.nn.Linear(4, 1)
        >>> load_weights(model, file)
        []
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    module, path = SavedModule(unwrap(model)), path_of("path", path)
    wanted = module.state_dict()
    state = _read(path, entry, best=best, evaluated=evaluated)
    found = {plain: state[name] for name, plain in _plain_names(state).items()}
    plain = _plain_names(wanted)
    _refuse_without_memory({name: value for name, value in wanted.items() if plain[name] in found})
    for names in tied_names(wanted):  # a file may have each tensor once
        there = next((plain[name] for name in names if plain[name] in found), None)
        found |= {} if there is None else {plain[name]: found[there] for name in names if plain[name] not in found}
    left = [name for name, value in wanted.items() if plain[name] not in found or not _fits(value, found[plain[name]])]
    unknown = [name for name in found if name not in plain.values()]
    if (strict and (left or unknown)) or len(left) == len(wanted):
        name = (left or unknown)[0]
        wrong = (
            "it has another shape there, or numbers that would be cut off"
            if name in left and plain[name] in found
            else "only one of them has it"
        )
        raise CheckpointError(
            f"{path} is of another model: {name!r} does not fit ({wrong}), and {len(left) + len(unknown) - 1} more; "
            "strict=False loads what fits"
        )
    fitting = {name: found[plain[name]] for name in wanted if name not in left}
    check_tied(str(path), "model", wanted, fitting)
    parts = {name: _as_part_of(wanted[name], value) for name, value in fitting.items()}
    try:
        _hand_over(module, wanted, parts, _versions(state, wanted))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a module may raise anything
        raise CheckpointError(f"the model refuses what {path} holds: {type(error).__name__}: {one_line(error)}") from error
    return left


def _hand_over(module: SavedModule, wanted: Mapping[str, Any], parts: Mapping[str, Any], versions: Mapping[str, int]) -> None:
    """Loads the parts of a state, with the module's own values for the others, since a module may look for all of its names."""
    try:
        module.load_state_dict({**wanted, **parts}, versions=versions)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or parts.keys() == wanted.keys():
            raise
        module.load_state_dict(parts, strict=False, versions=versions)  # some do not take back what they give themselves


def _versions(state: Mapping[str, Any], wanted: Iterable[str]) -> dict[str, int]:
    """The versions of modules that a file of torch's has, by the prefixes that their names have in `wanted`."""
    there, here = _wrappers(state), _wrappers(wanted)
    versions = {plain_name(f"{name}.").lstrip("."): version for name, version in versions_of(state).items()}
    if there == here:
        return versions
    return {here + prefix.removeprefix(there): version for prefix, version in versions.items() if prefix.startswith(there)}


def _refuse_without_memory(wanted: Mapping[str, Any]) -> None:
    """Raises CheckpointError if a parameter or buffer is on the meta device, or has no shape yet."""
    tensors = ((name, value) for name, value in wanted.items() if isinstance(value, Tensor))
    name = next((name for name, value in tensors if is_lazy(value) or value.is_meta), None)
    if name is not None:
        raise CheckpointError(
            f"{name!r} of the model has no memory yet, so that nothing can be loaded into it; call a lazy module with a batch "
            "first, and give a model on the meta device memory with to_empty(device=...)"
        )


def read_weights(path: str | Path, *, entry: str = "model") -> Mapping[str, Any]:
    """The state that `load_weights` would load. Names in files of torch lose the wrapper of a model; checkpoints keep theirs.

    Raises:
        CheckpointError: the checkpoint or file is missing, or it holds no state_dict.
        DamagedCheckpointError: something that was needed is not what was written.
    """
    path = path_of("path", path)
    path = _hub_file(path) or path
    state = _read(path, entry)
    is_of_torch = path.is_file() or is_distributed_checkpoint(path)
    return {plain: state[name] for name, plain in _plain_names(state).items()} if is_of_torch else state


def _read(path: Path, entry: str, *, best: bool = False, evaluated: bool = False) -> Mapping[str, Any]:
    path = _hub_file(path) or path
    if not path.is_file():
        return _read_checkpoint(path, entry, best=best, evaluated=evaluated)
    if entry != "model" or best or evaluated:
        raise CheckpointError(f"entry, best and evaluated are for checkpoints, and {path} is a file; leave them out")
    return _read_file(path)


def _hub_file(path: Path) -> Path | None:
    """The file that tells where the weights in a folder of Hugging Face's are; None for all others.

    Raises:
        CheckpointError: there is more than one, or shards without an index.
    """
    if not path.is_dir() or holds_checkpoints(path) or is_distributed_checkpoint(path):
        return None
    files = [one for one in sorted(path.iterdir()) if not is_frozen_name(one.name)]  # those lie beside checkpoints
    found = next((some for pattern in _HUB_FILES if (some := [one for one in files if one.match(pattern)])), [])
    if found and _SHARD.search(found[0].name):
        raise CheckpointError(f"{path} has {found[0].name!r} and no index that names it; fetch or write all of the files again")
    if len(found) > 1:
        raise CheckpointError(f"{path} has weights in {[one.name for one in found]}; pass the file that is to be loaded")
    return found[0] if found else None


def _read_checkpoint(path: Path, entry: str, *, best: bool, evaluated: bool) -> Mapping[str, Any]:
    state: Mapping[str, Any] = read_object(path, entry, best=best, evaluated=evaluated)
    if not _has_names(state) or not state:
        raise CheckpointError(f"entry must be an object with weights, got {entry!r} in {path}, which is {describe(state)}")
    return state


def _read_file(path: Path) -> Mapping[str, Any]:
    state: Mapping[str, Any] = _read_shards(path) if path.name.endswith(".index.json") else _loaded(path)
    for name in ("model", "state_dict"):
        if isinstance(state, Mapping) and isinstance(state.get(name), Mapping):
            state = state[name]
    if not _has_names(state) or not any(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path} must hold a state_dict, got {describe(state)}")
    return state


def _read_shards(path: Path) -> dict[str, Any]:
    """The tensors that an index names, from the files beside it."""
    try:
        files: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = {file: path.parent / file for file in files.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} must have a weight_map of names to files") from error
    wrong = next((file for file, shard in shards.items() if shard.parent != path.parent or not shard.is_file()), None)
    if wrong is not None:
        raise CheckpointError(f"{path.parent} has no file {wrong!r}, which {path.name} names; fetch all of its files")
    states = {file: _loaded(shard) for file, shard in shards.items()}
    missing = next(
        (name for name, file in files.items() if not isinstance(states[file], Mapping) or name not in states[file]), None
    )
    if missing is not None:
        raise CheckpointError(f"{path.parent / files[missing]} must have {missing!r}, as {path.name} says, and has not")
    return {name: states[file][name] for name, file in files.items()}


def _loaded(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":  # which `torch.load` of older versions of torch does not read
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except ImportError as error:
        raise CheckpointError(f"{path} needs the package safetensors; install it: pip install safetensors") from error
    except Exception as error:  # torch raises any of ten kinds for a file that is cut short or is of another format
        reason = str(error).partition("\n")[0]
        what = "file of safetensors" if path.suffix == ".safetensors" else "state_dict that torch.save has written"
        raise CheckpointError(f"{path} must be a {what}, but: {reason:.120}") from error


def _has_names(state: Any) -> bool:
    return isinstance(state, Mapping) and all(isinstance(name, str) for name in state)


def _plain_names(state: Iterable[str]) -> dict[str, str]:
    """The names in a state without what wrappers around the whole model, or parts of it, have added; by the names with it."""
    wrappers = _wrappers(state)
    return {name: plain_name(name).removeprefix(wrappers) for name in state}


def _wrappers(state: Iterable[str]) -> str:
    """The beginning that all names of a state have where a wrapper was around the whole model."""
    names, wrappers = [plain_name(name) for name in state], ""
    while names and all(name.startswith(wrappers + _WRAPPER) for name in names):
        wrappers += _WRAPPER
    return wrappers


def _fits(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, Tensor) and isinstance(found, Tensor):
        if wanted.is_quantized or found.is_quantized:
            return wanted.shape == found.shape and wanted.dtype == found.dtype
        return wanted.shape == found.shape and _is_kept(found, wanted.dtype)
    return not isinstance(wanted, Tensor) and not isinstance(found, Tensor)


def _is_kept(found: Tensor, dtype: torch.dtype) -> bool:
    """Whether numbers stay the same in `dtype`, or are rounded; torch itself would cut off fractions and imaginary parts."""
    if found.is_complex():
        return dtype.is_complex
    real = dtype.to_real()
    if found.dtype == real or (found.is_floating_point() and real.is_floating_point):
        return True
    return torch.equal(found.to(real).to(found.dtype), found)


def _as_part_of(wanted: Any, found: Any) -> Any:
    """The shards of this rank, for a sharded tensor."""
    if not isinstance(wanted, DTensor):
        return found
    whole = found.to(wanted.device, wanted.dtype)
    return distribute_tensor(whole, wanted.device_mesh, wanted.placements, src_data_rank=None)
