"""Why the next step of an optimizer or a schedule of this run could not use a saved state.

torch's own `load_state_dict` looks at much less: an optimizer takes the moments of another parameter, a fused kernel that is
given a moment of another shape reads and writes beyond its memory, a schedule sets any attributes. No table says what the next
step of an optimizer or a schedule needs: the step of a stand-in shows it.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.arguments import describe
from ignite_train.checkpoint.differences import Difference, Word, differences
from ignite_train.checkpoint.run_objects import (
    NOT_OPTIONS,
    SavedOptimizer,
    has_own_form,
    schedule_class,
    schedule_options,
)
from ignite_train.checkpoint.tree import DTYPES, TensorForm, dtype_name, form_of
from ignite_train.internals.of_torch import LATEST_RATES, PARTS, parts_of_schedule, pytree
from ignite_train.model.load_schedule import load_schedule
from ignite_train.model.warm_up_schedule import WarmUpSchedule

__all__ = ["optimizer_problems", "schedule_problems", "why_no_multiples"]

_SIZES = (2, 3, 4, 5, 6, 7)  # of a parameter on which a step is tried: all differ, and none is 1
_WAYS = {"fused", "foreach", "capturable", "differentiable", "maximize"}  # of computing the same state
_OF_PLATEAU = {"_latest_update", "_score"}  # what `ReduceOnPlateau` keeps beside the state of its scheduler
_PROPORTIONAL = (
    schedulers.ChainedScheduler,
    schedulers.ConstantLR,
    schedulers.CosineAnnealingLR,
    schedulers.CosineAnnealingWarmRestarts,
    schedulers.ExponentialLR,
    schedulers.LambdaLR,
    schedulers.LinearLR,
    schedulers.MultiplicativeLR,
    schedulers.MultiStepLR,
    schedulers.PolynomialLR,
    schedulers.SequentialLR,
    schedulers.StepLR,
    WarmUpSchedule,
)
"""Schedules whose rate is a multiple of the base rate, if their `eta_min` is 0."""


# --- optimizers ---


def optimizer_problems(
    entry: SavedOptimizer,
    groups: Sequence[Sequence[Tensor]],
    saved: Any,
    there: Mapping[str, Any],
    here: Mapping[str, Any],
    names: Mapping[int, Sequence[str]],
    decided: Sequence[Mapping[str, Any]],
) -> Iterator[Difference | str]:
    """Why a saved state is not of this optimizer.

    Args:
        entry: the one of this run.
        groups: its groups of parameters, and the groups that it lacks and gets from the checkpoint.
        saved: the state.
        there: what `RunObjects.describe` said of the one in the checkpoint.
        here: what it says of this one.
        names: of the parameters, by their ids.
        decided: options that the script decides.
    """
    lengths = [len(group) for group in groups]
    aliases = {alias: found[0] for found in names.values() for alias in found}
    current = {} if entry.gathers else entry.optimizer.state_dict()
    if there["class"] != here["class"]:
        yield f"{there['class']!s:.100} wrote it, and this run has {here['class']}"
    elif (found := [len(group) for group in there["names"]]) != lengths:
        yield f"its parameter groups have {found} parameters and not {lengths}"
    elif other := [
        *differences(_parameters_of(there, aliases, len(here["names"])), _parameters_of(here, aliases), _same_parameter)
    ]:
        yield from other
    elif not isinstance(saved, Mapping):
        yield f"is {describe(saved)}"
    elif current and has_own_form(current):  # its own `load_state_dict` reads it
        if saved.keys() != current.keys():
            yield f"has the keys {[*saved]!r:.80} and not {[*current]!r:.80}"
    elif problem := _why_no_state(saved, lengths):
        yield problem
    else:
        yield from _state_problems(entry.stepping, groups, saved, names, decided)


def _why_no_state(state: Mapping[str, Any], lengths: list[int]) -> str:
    """Why a state has not the form that torch's optimizers give it for groups of these lengths; empty if it has."""
    groups = state.get("param_groups")
    if not isinstance(state.get("state"), Mapping) or not isinstance(groups, list):
        return f"has the keys {[*state]!r:.80}"
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        return "has parameter groups without a list of parameters"
    keys = [key for group in groups for key in group["params"]]
    if not all(isinstance(key, (int, str)) for key in keys) or len(set(keys)) < len(keys):
        return "has parameter groups with a parameter twice, or one without a number"
    found = [len(group["params"]) for group in groups]
    return "" if found == lengths else f"its parameter groups have {found} parameters and not {lengths}"


def _parameters_of(
    described: Mapping[str, Any], aliases: Mapping[str, str], num_groups: int | None = None
) -> dict[str, dict[str, TensorForm]]:
    """The tree of the parameters of an optimizer in its first groups, by their places, each under the first of its names."""
    groups = islice(zip(described["names"], described["shapes"], described["dtypes"], strict=True), num_groups)
    return {
        f"param_groups[{index}]": {
            f"parameter {place}": TensorForm(tuple(shape), DTYPES[dtype], aliases.get(name, name))
            for place, (name, shape, dtype) in enumerate(zip(*group, strict=True))
        }
        for index, group in enumerate(groups)
    }


def _same_parameter(saved: Any, here: Any) -> bool:
    """Whether the forms are equal; a parameter of no module has no name, which is not compared."""
    if not isinstance(saved, TensorForm) or not isinstance(here, TensorForm):
        return False
    return replace(saved, name="") == replace(here, name="") and (saved.name == here.name or "" in (saved.name, here.name))


def _state_problems(
    optimizer: Optimizer,
    groups: Sequence[Sequence[Tensor]],
    saved: Mapping[str, Any],
    names: Mapping[int, Sequence[str]],
    decided: Sequence[Mapping[str, Any]],
) -> Iterator[Difference | str]:
    """Why the next step could not use a state. Other classes than those of torch, and their subclasses, keep what they want."""
    found = (one for one in type(optimizer).__mro__ if one is not Optimizer and f"{one.__module__}.".startswith("torch.optim."))
    kind, known = next(found, None), {}
    for index, (group, other) in enumerate(zip(groups, saved["param_groups"], strict=True)) if kind else ():
        options = {**other, **(decided[index] if index < len(decided) else {}), "params": []}
        kinds = {(parameter.dim(), parameter.dtype): parameter for parameter in group if parameter.dim() <= len(_SIZES)}
        key = f"{options!r} {kinds.keys()}"  # many groups have the same options
        if key not in known:
            known[key] = kept, problem = _tried(kind, options, [*kinds])
            mine = optimizer.param_groups[min(index, len(optimizer.param_groups) - 1)]
            if problem and not _tried(kind, mine, [*kinds])[1]:
                yield f"with the options of param_groups[{index}] {problem}"
        kept, _ = known[key]
        for parameter, number in zip(group, other["params"], strict=True):
            label = next(iter(names.get(id(parameter), ())), f"parameter {number!r:.20}")
            state = saved["state"].get(number, {})
            if not isinstance(state, Mapping):
                yield f"the state of {label} is {describe(state)}"
            elif state:  # one that has not stepped yet has none
                needed = {
                    name: _needed(value, parameter) for name, value in kept.get((parameter.dim(), parameter.dtype), {}).items()
                }
                there = {name: Word.NOTHING if (value := state.get(name)) is None else form_of(value) for name in needed}
                yield from differences(there, needed, _can_serve, (label,))


def _tried(
    kind: Any, options: Mapping[str, Any], kinds: Sequence[tuple[int, torch.dtype]]
) -> tuple[dict[tuple[int, torch.dtype], dict[str, Any]], str]:
    """Makes two steps of an optimizer with these options, for parameters of several dimensions and dtypes.

    Returns:
        The states after them, by dimensions and dtype, and how the steps fail; empty if they do not. They fail too where torch
        has no such step, as with a class that needs a closure, and dtypes without arithmetic.
    """
    for key, value in options.items():
        if key in _WAYS and not (value is None or isinstance(value, bool)):
            return {}, f"{key} is {describe(value)}"
    plain = {key: value for key, value in _for_a_stand_in(options).items() if key not in _WAYS}
    problem = ""
    for is_sparse in (False, True):  # SparseAdam takes sparse gradients only
        try:
            parameters = [torch.ones(_SIZES[:size], dtype=dtype, device="cpu") for size, dtype in kinds or [(2, torch.float32)]]
            parameters = [nn.Parameter(parameter, requires_grad=True) for parameter in parameters]
            tried = kind(parameters)
            tried.load_state_dict({"state": {}, "param_groups": [{**plain, "params": [*range(len(parameters))]}]})
            (loaded,) = tried.param_groups
            lacking = [key for key in tried.defaults if key not in loaded and key not in _WAYS]
            if lacking:
                return {}, f"{lacking[0]!r} is missing"
            known = inspect.signature(kind).parameters.keys() - {"params"}
            for key, value in options.items():
                if key in known and (larger := _larger_tensors(value)):
                    return {}, f"{key} has {larger[0]!r}"
            tried = kind(parameters, **{key: value for key, value in loaded.items() if key in known})
            for parameter in parameters:
                gradient = torch.ones_like(parameter)
                parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
            tried.step()
            tried.step()  # which takes what the first has left, as momentum is
        except Exception as error:
            problem = problem or f"a step fails by {type(error).__name__}: {error!s:.200}"
        else:
            return {one: tried.state[parameter] for one, parameter in zip(kinds, parameters, strict=False)}, ""
    return {}, problem


def _larger_tensors(value: Any) -> list[Any]:
    """The forms of the tensors in it that are not one number."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (Tensor, TensorForm))]
    return [form_of(tensor) for tensor in tensors if math.prod(tensor.shape) != 1]


def _for_a_stand_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group or the state of a schedule, with a number for each tensor, which is not read or on a device."""
    kept = {key: value for key, value in state.items() if key not in NOT_OPTIONS}
    numbers: dict[str, Any] = pytree.tree_map(lambda leaf: 0.1 if isinstance(leaf, (Tensor, TensorForm)) else leaf, kept)
    return numbers


def _needed(value: Any, parameter: Tensor) -> TensorForm | Word:
    """The tensor or number that a state must hold for a parameter, if the state of a stand-in holds `value`.

    The sizes of the stand-in become those of the parameter. A size of its own, as factors of Adafactor have, stays.
    """
    if not isinstance(value, Tensor) or (value.numel() == 1 and parameter.dim() > 0):
        return Word.ONE_NUMBER
    small = _SIZES[: parameter.dim()]
    return TensorForm(tuple(parameter.shape[small.index(s)] if s in small else s for s in value.shape), value.dtype)


def _can_serve(saved: Any, needed: Any) -> bool:
    """Whether a step can use a value of a state; the width of its numbers may be another one.

    All that torch's optimizers keep as one number, such as the count of steps, is at least 0, and a step may divide by it.
    """
    if needed is Word.ONE_NUMBER:
        is_number = isinstance(saved, TensorForm) and math.prod(saved.shape) == 1 and _numbers(saved) == "float"
        return is_number or (isinstance(saved, (int, float)) and 0 <= saved < 2**64)
    return isinstance(saved, TensorForm) and saved.shape == needed.shape and _numbers(saved) == _numbers(needed)


def _numbers(form: TensorForm) -> str:
    return next((kind for kind in ("float", "complex") if kind in dtype_name(form.dtype)), "int")


# --- schedules ---


def schedule_problems(
    schedule: LRScheduler, saved: Any, described: Any, groups: Sequence[Mapping[str, Any]]
) -> Iterator[Difference | str]:
    """Why a saved state is not of this schedule, over these parameter groups; those that were added have no base rate."""
    mine, current = schedule_class(schedule), schedule.state_dict()
    if described not in (None, mine):
        yield f"{described!s:.200} wrote it, and this run has {mine}"
    elif not isinstance(saved, Mapping):
        yield f"it is {describe(saved)}"
    else:
        found: list[Difference | str] = [*differences(schedule_options(saved), schedule_options(current), _same_kind)]
        for key in ("base_lrs", LATEST_RATES):
            if key in current and not (isinstance(saved.get(key), list) and 0 < len(saved[key]) <= len(groups)):
                found.append(f"it has {saved.get(key)!r:.60} for the {len(groups)} parameter groups")
        yield from found
        # Only those of torch and of this library are tried: a step of another class may need more, or do more.
        if not found and f"{type(schedule).__module__}.".startswith(("torch.", "ignite_train.")):
            if _has_ended(schedule, saved):
                return
            problem = _failure(schedule, saved, groups)
            yield from [problem] if problem and not _failure(schedule, current, schedule.optimizer.param_groups) else []


def _has_ended(schedule: LRScheduler, saved: Any) -> bool:
    """Whether a `OneCycleLR` in it is at its end, where torch raises at one more step."""
    if not isinstance(saved, Mapping):
        return False
    if isinstance(schedule, schedulers.OneCycleLR):
        return bool(saved.get("last_epoch") == saved.get("total_steps"))
    return any(map(_has_ended, parts_of_schedule(schedule), saved.get(PARTS, ())))


def _failure(schedule: LRScheduler, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """How a step of a copy of the schedule fails on an optimizer without a model; empty if it does not."""
    if larger := _larger_tensors(dict(state)):
        return f"it has {larger[0]!r} in the place of a number"
    stand_in = SGD([{"params": [torch.zeros(1)]} for _ in groups], lr=0.1)
    for group, options in zip(stand_in.param_groups, groups, strict=True):
        group |= copy.deepcopy(_for_a_stand_in(options))
    try:
        tried: Any = copy.deepcopy(schedule, {id(schedule.optimizer): stand_in})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the order of steps, which is not that of a training
            own = {key: value for key, value in state.items() if key not in _OF_PLATEAU}
            load_schedule(tried, copy.deepcopy(_for_a_stand_in(own)))
            tried.step(*([1.0] if isinstance(tried, schedulers.ReduceLROnPlateau) else []))
        rates = [float(group["lr"]) for group in stand_in.param_groups]
    except Exception as error:
        return f"its next step fails by {type(error).__name__}: {error!s:.200}"
    return "" if all(map(math.isfinite, rates)) else f"its next step sets the learning rates {rates!r:.100}"


def _same_kind(saved: Any, here: Any) -> bool:
    """Whether a value of an option may stand in the place of another: a number for a number, a string for a string."""
    if Word.NOTHING in (saved, here):
        return False
    kinds = ((bool,), (int, float), (str,))
    return next((type(saved) in kind for kind in kinds if type(here) in kind), True)


def why_no_multiples(schedule: Any) -> str:
    """Why the rates of a schedule cannot follow the optimizer's `lr` of the script; empty if they can."""
    if not isinstance(schedule, _PROPORTIONAL):
        return f"{type(schedule).__name__} does not compute its rates as multiples of lr"
    values = schedule.state_dict()
    if values.get("eta_min"):
        return f"{type(schedule).__name__} has eta_min={values['eta_min']!r}, which is not a multiple of lr"
    return next((reason for part in parts_of_schedule(schedule) if (reason := why_no_multiples(part))), "")
