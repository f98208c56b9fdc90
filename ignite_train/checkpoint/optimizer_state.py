"""Whether the state of an optimizer that a checkpoint holds can be that of an optimizer in this run.

torch's `load_state_dict` only counts parameters. It would accept the moments of another parameter silently, and a fused kernel
that is given a moment of another shape reads and writes beyond its memory.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_train.arguments import describe
from ignite_train.checkpoint.expected_state import WAYS, Expected, expected_state, torchs_class
from ignite_train.checkpoint.reader import TensorClaim
from ignite_train.checkpoint.tree import dtype_name
from ignite_train.errors import CheckpointError
from ignite_train.model.optimizers import GathersState, has_own_form

__all__ = [
    "check_loads",
    "check_optimizer_state",
    "describe_optimizer",
    "option_changes",
    "script_options",
]

_NOT_OPTIONS = ("params", "param_names")
Shape = tuple[int, ...]


def check_loads(name: str, optimizer: Optimizer) -> None:
    """Checks that an optimizer can load the state that it gives. To be called before the first batch.

    Raises:
        TypeError: its `state_dict` has a form of its own, and its `load_state_dict` is torch's, which loads no such form.
    """
    if isinstance(optimizer, GathersState) or type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return
    state = optimizer.state_dict()
    if not isinstance(state, Mapping) or has_own_form(state):
        kind = type(optimizer).__name__
        raise TypeError(
            f"{name} must load the state that it gives, to be saved: the state_dict of {kind} has a form of its own, and its "
            f"load_state_dict is torch's; use a subclass of {kind} with a load_state_dict, or pass the optimizers inside it to "
            "create_trainer as a list, or train without a Checkpoint"
        )


def script_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group as the script has set them. To be called before anything is loaded or trained."""

    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    return [{key: copied(value) for key, value in group.items() if key not in _NOT_OPTIONS} for group in optimizer.param_groups]


def describe_optimizer(
    optimizer: Optimizer, names: Mapping[int, Sequence[str]], options: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What a checkpoint stores beside the state, so that the next run can compare.

    Args:
        optimizer: the optimizer.
        names: the names of each parameter, by its `id`.
        options: what `script_options` gave.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    return {
        "class": _class_name(optimizer),
        "names": [[_first(names.get(id(parameter), ())) for parameter in group] for group in groups],
        "shapes": [[list(parameter.shape) for parameter in group] for group in groups],
        "dtypes": [[dtype_name(parameter.dtype) for parameter in group] for group in groups],
        "options": [_plain_options(group) for group in options],
    }


def option_changes(name: str, saved: Any, current: Sequence[Mapping[str, Any]], script_wins: Sequence[str]) -> list[str]:
    """What the script sets to other values than the script that wrote the checkpoint, and which of the two is used.

    Args:
        name: of the optimizer.
        saved: the description in the checkpoint; None in older checkpoints.
        current: what `script_options` gave.
        script_wins: the options that the script decides.
    """
    if not isinstance(saved, Mapping):
        return []
    changes: dict[str, list[int]] = {}
    pairs = list(zip(saved["options"], (_plain_options(group) for group in current), strict=False))  # what is added is equal
    for index, (before, now) in enumerate(pairs):
        for key in (key for key in now if key in before and now[key] != before[key]):
            if key != "initial_lr" or now.get("lr") == before.get("lr"):
                kept = "the script's is used" if key in script_wins else f"the checkpoint's is used; script_wins=({key!r},) "
                kept += "" if key in script_wins else "takes the script's"
                changes.setdefault(f"{key}: {before[key]!r} -> {now[key]!r} ({kept})", []).append(index)
    everywhere = [*range(len(pairs))]
    return [
        f"{name}.{text}" if groups == everywhere else f"{name}.param_groups{groups}.{text}" for text, groups in changes.items()
    ]


def check_optimizer_state(
    path: str,
    name: str,
    optimizer: Optimizer,
    saved: Any,
    description: Any,
    names: Mapping[int, Sequence[str]],
    options: Sequence[Mapping[str, Any]],
    missing: Sequence[Sequence[Tensor]] = (),
) -> None:
    """Checks that a saved state is of this optimizer, before any tensor of it is read.

    For an optimizer of torch each tensor of the state must have the shape that its class gives it, and what its step takes must
    be there. Other classes may keep what they want.

    Args:
        path: of the checkpoint.
        name: of the optimizer.
        optimizer: of this run.
        saved: its state in the checkpoint, with a `TensorClaim` for each tensor.
        description: what `describe_optimizer` gave for it; older checkpoints have none.
        names: the names of each parameter of this run, by its `id`.
        options: by group, the options that the script decides.
        missing: the parameters of groups that will be added before it is loaded; see `RunObjects.missing_groups`.

    Raises:
        CheckpointError: it is of another optimizer.
    """
    groups = [*(group["params"] for group in optimizer.param_groups), *missing]
    current = {} if isinstance(optimizer, GathersState) else optimizer.state_dict()
    if current and has_own_form(current):  # its own `load_state_dict` reads it
        problem = _other_keys(current, saved) or _other_class(optimizer, {}, description)
        problem = problem or _other_parameters(groups, description, names)
    else:
        problem = _why_other_state(optimizer, groups, saved, description, names, options)
    if problem:
        raise CheckpointError(
            f"{path} is of another {name}: {problem}; build the one that was saved, or start in another directory"
        )


def _other_keys(current: Mapping[str, Any], saved: Any) -> str:
    if not isinstance(saved, Mapping):
        return f"is {describe(saved)}"
    return "" if saved.keys() == current.keys() else f"has the keys {[*saved]!r:.80} and not {[*current]!r:.80}"


def _why_other_state(
    optimizer: Optimizer,
    groups: Sequence[Sequence[Tensor]],
    saved: Any,
    description: Any,
    names: Mapping[int, Sequence[str]],
    options: Sequence[Mapping[str, Any]],
) -> str:
    return (
        _why_not_torch_shape(saved, None)
        or _other_class(optimizer, saved, description)
        or _why_not_torch_shape(saved, [len(group) for group in groups])
        or _other_parameters(groups, description, names)
        or _why_not_stepped(_part(optimizer), saved["param_groups"], options)
        or next(_other_state(_part(optimizer), _members(groups, saved, names, options)), "")
    )


def _why_not_stepped(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], decided: Sequence[Mapping[str, Any]]) -> str:
    """Why a step with the saved options fails, where one with the script's does not. Tries the class of torch alone."""
    kind = torchs_class(type(optimizer))
    if kind is None:
        return ""
    tried: set[str] = set()
    for index, group in enumerate(saved):
        merged = {**group, **(decided[index] if index < len(decided) else {}), "params": []}
        if repr(merged) in tried:  # many groups have the same options
            continue
        tried.add(repr(merged))
        problem = _failure(kind, merged)
        own = optimizer.param_groups[min(index, len(optimizer.param_groups) - 1)]
        if problem and not _failure(kind, own):
            return f"with the options of param_groups[{index}] {problem}"
    return ""


def _failure(kind: Any, group: Mapping[str, Any]) -> str:
    """How a step of an optimizer with these options fails; empty if it does not."""
    for key, value in group.items():
        if key in WAYS and not (value is None or isinstance(value, bool)):
            return f"{key} is {describe(value)}"
    options = {key: 0.1 if isinstance(value, (Tensor, TensorClaim)) else value for key, value in group.items()}
    options = {key: value for key, value in options.items() if key not in (*_NOT_OPTIONS, *WAYS)}
    parameter = torch.nn.Parameter(torch.ones(2, 2), requires_grad=True)  # Muon takes matrices
    try:
        tried = kind([parameter])
        tried.load_state_dict({"state": {}, "param_groups": [{**options, "params": [0]}]})
        (loaded,) = tried.param_groups
        lacking = [key for key in tried.defaults if key not in loaded and key not in WAYS]
        if lacking:
            return f"{lacking[0]!r} is missing"
        known = inspect.signature(kind).parameters
        tried = kind([parameter], **{key: value for key, value in loaded.items() if key in known and key != "params"})
        parameter.grad = torch.ones_like(parameter)
        tried.step()
        tried.step()  # which takes what the first has left, as momentum is
    except Exception as error:
        return f"a step fails by {type(error).__name__}: {error!s:.200}"
    return ""


class _Member(NamedTuple):
    """A parameter and what the checkpoint holds of it."""

    group: int
    label: str
    shape: Shape
    dtype: torch.dtype
    options: Mapping[str, Any]
    state: Any


def _members(
    groups: Sequence[Sequence[Tensor]], saved: Any, names: Mapping[int, Sequence[str]], options: Sequence[Mapping[str, Any]]
) -> list[_Member]:
    members = []
    for index, (group, other) in enumerate(zip(groups, saved["param_groups"], strict=True)):
        merged = {**other, **(options[index] if index < len(options) else {})}
        for parameter, key in zip(group, other["params"], strict=True):
            label = _first(names.get(id(parameter), ())) or f"parameter {key!r:.20}"
            shape, state = tuple(parameter.shape), saved["state"].get(key, {})
            members.append(_Member(index, label, shape, parameter.dtype, merged, state))
    return members


def _why_not_torch_shape(state: Any, lengths: list[int] | None) -> str:
    """What is wrong with the outer form of a state; `lengths` are the numbers of parameters that its groups must have."""
    if not isinstance(state, Mapping):
        return f"is {describe(state)}"
    if not isinstance(state.get("state"), Mapping) or not isinstance(state.get("param_groups"), list):
        return f"has the keys {[*state]!r:.80}"
    groups = state["param_groups"]
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        return "has parameter groups without a list of parameters"
    keys = [key for group in groups for key in group["params"]]
    if not all(isinstance(key, (int, str)) for key in keys) or len(set(keys)) < len(keys):
        return "has parameter groups with a parameter twice, or one without a number"
    found = [len(group["params"]) for group in groups]
    if lengths is not None and found != lengths:
        return f"its parameter groups have {found} parameters and not {lengths}"
    return ""


def _other_class(optimizer: Optimizer, saved: Any, description: Any) -> str:
    """Whether the state is of an optimizer of another kind: by its class, or without that by its options."""
    mine = _class_name(optimizer)
    if isinstance(description, Mapping) and description["class"] != mine:
        return f"{description['class']} wrote it, and this run has {mine}"
    for group, other in zip(optimizer.param_groups, saved.get("param_groups", ()), strict=False):
        lacking, foreign = [key for key in group if key not in other], [key for key in other if key not in group]
        if lacking and set(foreign) - {"initial_lr"}:  # options may come with a new version, and a schedule adds its own
            return f"it has {foreign[0]!r} and no {lacking[0]!r}"
        decoupled = group.get("decoupled_weight_decay"), other.get("decoupled_weight_decay")
        if None not in decoupled and decoupled[0] != decoupled[1]:  # Adam and AdamW are one class but for this
            return f"its decoupled_weight_decay is {decoupled[1]!r}, and {mine} has {decoupled[0]!r}"
    return ""


def _other_parameters(groups: Sequence[Sequence[Tensor]], description: Any, names: Mapping[int, Sequence[str]]) -> str:
    """Whether the parameters have other names, shapes or dtypes, or another order."""
    if not isinstance(description, Mapping):
        return ""
    saved = zip(description["names"], description["shapes"], description["dtypes"], strict=True)
    for index, (group, found) in enumerate(zip(groups, saved, strict=True)):
        for place, (parameter, name, shape, dtype) in enumerate(zip(group, *found, strict=True)):
            mine = names.get(id(parameter), ())
            if name and mine and name not in mine:
                return f"parameter {place} of param_groups[{index}] was {name} and is {mine[0]} now"
            label = _first(mine) or f"parameter {place} of param_groups[{index}]"
            if tuple(shape) != tuple(parameter.shape):
                return f"{label} had the shape {tuple(shape)} and has {tuple(parameter.shape)} now"
            if dtype != dtype_name(parameter.dtype):
                return f"{label} was {dtype} and is {dtype_name(parameter.dtype)} now"
    return ""


def _other_state(optimizer: Optimizer, members: list[_Member]) -> Iterator[str]:
    """Errors in the state of single parameters, a sentence each. Other classes than torch's keep what they want."""
    is_torchs = type(optimizer).__module__.startswith("torch.")
    for member in members:
        if not isinstance(member.state, Mapping):
            if is_torchs:
                yield f"the state of {member.label} is {describe(member.state)}"
        elif member.state:
            expected = expected_state(type(optimizer), len(member.shape), member.dtype, member.options)
            yield from (f"the state of {member.label} has no {key}" for key in expected if member.state.get(key) is None)
            for key, other in expected.items():
                yield from _wrong_value(member, key, member.state.get(key), other)


def _wrong_value(member: _Member, key: str, value: Any, expected: Expected) -> Iterator[str]:
    """Whether one entry of the state of a parameter has a shape, or a kind of numbers, that torch never gives it."""
    what, is_tensor = f"{key} of {member.label}", isinstance(value, TensorClaim)
    if expected.is_number:
        if is_tensor and (math.prod(value.shape) != 1 or not value.dtype.is_floating_point):
            yield f"{what} has shape {value.shape} and dtype {dtype_name(value.dtype)}, and must be one number"
        elif not is_tensor and not isinstance(value, (int, float)):
            yield f"{what} is {describe(value)}, and must be one number"
    elif is_tensor:
        dtype = expected.dtype
        if value.shape != expected.shape(member.shape):
            yield f"{what} has shape {value.shape} and not {expected.shape(member.shape)}"
        elif (value.dtype.is_floating_point, value.dtype.is_complex) != (dtype.is_floating_point, dtype.is_complex):
            yield f"{what} is {dtype_name(value.dtype)}, and the parameter {dtype_name(member.dtype)}"
    else:
        yield f"{what} is {describe(value)} and must be a tensor"


def _part(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps: one that shards the state over the ranks has another inside."""
    inner = vars(optimizer).get("optim")
    return inner if isinstance(inner, Optimizer) else optimizer


def _class_name(optimizer: Optimizer) -> str:
    """Without its module, which may be renamed."""
    inner = _part(optimizer)
    own = type(optimizer).__qualname__
    return own if inner is optimizer else f"{own} of {type(inner).__qualname__}"


def _first(names: Sequence[str]) -> str:
    return names[0] if names else ""


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that can be written down and compared."""
    plain = {key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for key, value in group.items()}
    return {
        str(key): list(value) if isinstance(value, tuple) else value
        for key, value in plain.items()
        if value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, (list, tuple)) and all(isinstance(entry, (bool, int, float, str)) for entry in value))
    }
