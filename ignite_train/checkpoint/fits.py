"""Whether a checkpoint fits this run: what it says that it holds is compared with what the run would save now.

Both are trees. Where they differ a resume is refused, before memory is allocated for a tensor and before anything of the run is
changed; settings may differ, and are told. torch's own `load_state_dict` looks at much less: an optimizer takes the moments of
another parameter, a fused kernel that is given a moment of another shape reads and writes beyond its memory, a schedule sets
any attributes. No table says what the next step of an optimizer or a schedule needs: the step of a stand-in shows it.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.arguments import describe, field_names
from ignite_train.checkpoint.run_objects import (
    NOT_OPTIONS,
    PublishedMetrics,
    RunObjects,
    SavedOptimizer,
    has_own_form,
    plain_options,
    same_option,
    schedule_class,
    schedule_options,
)
from ignite_train.checkpoint.saved_run import SavedRun
from ignite_train.checkpoint.tree import DTYPES, TensorForm, decode, dtype_name, form_of
from ignite_train.errors import CheckpointError
from ignite_train.internals.of_torch import LATEST_RATES, PARTS, parts_of_schedule, pytree, storage_number
from ignite_train.model.load_schedule import load_schedule
from ignite_train.model.memory_layout import as_bytes, local_part
from ignite_train.model.warm_up_schedule import WarmUpSchedule
from ignite_train.state import UpdateOutput

__all__ = [
    "EVERY_RANK",
    "Difference",
    "Fit",
    "check_module",
    "check_tied",
    "config_changes",
    "differences",
    "tied_names",
    "untied",
]

EVERY_RANK = ("trainer", "data", "results", "buffers", "generators")
"""The states that each rank writes, besides its handlers."""
_SIZES = (2, 3, 4, 5, 6, 7)  # of a parameter on which a step is tried: all differ, and none is 1
_WAYS = {"fused", "foreach", "capturable", "differentiable", "maximize"}  # of computing the same state
_SETTINGS = (("handlers",), ("trainer", "loss_scaling"))
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


# --- the comparison of trees ---


class _Word(Enum):
    """What is compared where a tree has no value, and where its value need not be compared."""

    NOTHING = "nothing"
    NO_TENSOR = "no tensor"
    ONE_NUMBER = "one number of at least 0"

    def __repr__(self) -> str:
        return self.value


class Difference(NamedTuple):
    """A place where two trees differ."""

    path: tuple[str, ...]
    saved: Any
    here: Any

    def __str__(self) -> str:
        where = f"{' of '.join(reversed(self.path)):.200}"
        if self.is_on_one_side:
            return f"{where} is {'missing' if self.saved is _Word.NOTHING else 'not in this run'}"
        return f"{where} is {_shown(self.saved)}, and this run has {_shown(self.here)}"

    @property
    def is_on_one_side(self) -> bool:
        """Whether one of the trees has no such entry."""
        return self.saved is _Word.NOTHING or self.here is _Word.NOTHING

    @property
    def change(self) -> str:
        """The same as a change of a setting, for the log."""
        return f"{'.'.join(self.path)}: {self.saved!r:.200} -> {self.here!r:.200}"


def differences(
    saved: Any, here: Any, same: Callable[[Any, Any], bool] = operator.eq, path: tuple[str, ...] = ()
) -> Iterator[Difference]:
    """The places where two nested mappings differ. Where one lacks a mapping, each entry of it is a difference.

    Args:
        saved: of the checkpoint.
        here: of this run.
        same: whether two values that are no mappings are not told apart.
        path: of both, in larger ones.
    """
    one, other = ({} if tree is _Word.NOTHING else tree for tree in (saved, here))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in {**other, **one}:
            values = one.get(key, _Word.NOTHING), other.get(key, _Word.NOTHING)
            yield from differences(*values, same, (*path, str(key)))
    elif not same(saved, here):
        yield Difference(path, saved, here)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (TensorForm, _Word)) else describe(value)


def _refuse(path: str, what: str, problems: Iterable[Difference | str], remedy: str) -> None:
    """Raises CheckpointError if there are problems, and names the first of them."""
    found = [str(problem) for problem in problems]
    if found:
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise CheckpointError(f"{path} is of another {what}: {'; '.join(found[:3])}{more}; {remedy}")


# --- a whole checkpoint ---


@dataclass(frozen=True, slots=True)
class Fit:
    """A checkpoint, and the run that is to resume from it.

    Attributes:
        path: of the checkpoint.
        run: the run.
        objects: the objects of the run whose states are compared.
        states: of this rank in the checkpoint, by name, with a `TensorForm` in the place of each tensor. One of them is the
            description that `RunObjects.describe` gave when it was written.
    """

    path: str
    run: SavedRun
    objects: RunObjects
    states: dict[str, Any]

    @property
    def description(self) -> Mapping[str, Any]:
        """The classes and options of optimizers and schedules, and the names of their parameters."""
        found: Mapping[str, Any] = self.states["description"]
        return found

    def check(self) -> None:
        """Compares the state with the objects of this run.

        Raises:
            CheckpointError: it is of another model, optimizer or schedule, or a part of it has an invalid form.
        """
        objects = self.objects
        published = [name for name, entry in objects.own.items() if isinstance(entry, PublishedMetrics)]
        for name in (*EVERY_RANK, *objects.trainers, *published):
            if not isinstance(self.states.get(name, {}), dict):
                raise CheckpointError(f"{self.path} has an invalid state of {name!r}: {describe(self.states[name])}")
        for name, module in objects.modules.items():
            check_module(self.path, name, module.state_dict(), self.states[name])
        self.check_optimizers(objects.each_optimizer)
        for name, schedule in objects.schedules.items():
            if name in self.states:
                self._check_schedule(name, schedule)
        self._check_this_rank()

    def check_optimizers(self, which: Iterable[str]) -> None:
        """Compares the states of some optimizers, by their names, with the optimizers of the run; see `check`."""
        there, here = (description["optimizers"] for description in (self.description, self.objects.describe()))
        names = self.objects.parameter_names()
        for name in which:
            entry, saved, decided = self.objects.each_optimizer[name], self.states[name], self.run.decided(name)
            groups = [*(group["params"] for group in entry.optimizer.param_groups), *self.missing_groups(name)]
            problems = _optimizer_problems(entry, groups, saved, there[name], here[name], names, decided)
            _refuse(self.path, name, problems, "build the one that was saved, or start in another directory")

    def missing_groups(self, name: str) -> list[list[nn.Parameter]]:
        """The last parameter groups of an optimizer in the checkpoint that it lacks now, as a handler may have added them.

        Returns:
            The parameters of each, which the trained model has and no optimizer steps; nothing unless all can be added. They
            need a state of torch's form.
        """
        entry, saved = self.objects.each_optimizer[name], self.states[name]
        if entry.outer is not None:
            return self.missing_groups(name.rpartition(".")[0]) if entry.shares_groups else []
        if entry.gathers or not isinstance(saved, Mapping) or has_own_form(saved):
            return []
        optimizers = self.objects.optimizers
        lacking = self.description["optimizers"][name]["names"][len(optimizers[name].param_groups) :]
        if not lacking:  # as of nearly all optimizers, and there may be one for each parameter
            return []
        known = dict(self.objects.modules["model"].parameters())
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        met = {id(parameter) for group in groups for parameter in group["params"]}
        missing: list[list[nn.Parameter]] = []
        for names in lacking:
            missing.append([])
            for parameter in (known.get(name) for name in names):
                if parameter is None or id(parameter) in met:
                    return []
                met.add(id(parameter))
                missing[-1].append(parameter)
        return missing

    def changes(self) -> list[str]:
        """What the script sets to other values than the script that wrote the checkpoint, a line each."""
        lines, objects, run = list[str](), self.objects, self.run
        there, here = self.description, objects.describe()
        for name in objects.optimizers:
            lines += _option_changes(name, there["optimizers"][name]["options"], run.script(name), run.script_wins)
        schedules = {name: schedule.state_dict() for name, schedule in objects.schedules.items() if name in self.states}
        before, now = ({name: schedule_options(each[name]) for name in schedules} for each in (self.states, schedules))
        for one in differences(before, now, same_option):
            if not one.is_on_one_side:
                lines.append(f"{one.change} (the checkpoint's is used)")
        thawed: set[int] = set()
        for name in objects.optimizers:
            for group in self.missing_groups(name):
                text = _first_of([objects.parameter_names()[id(parameter)][0] for parameter in group])
                lines.append(f"{name}: a parameter group with {text} is added, as it was in the run")
                thawed |= {id(parameter) for parameter in group}
        parameters = [*objects.modules["model"].parameters()]
        names = {name for name, parameter in parameters if id(parameter) not in thawed}
        frozen, freezes = ({*each["frozen"]} & names for each in (there, here))
        for changed, change in ((frozen - freezes, "False -> True"), (freezes - frozen, "True -> False")):
            if changed:
                text = _first_of([name for name, _ in parameters if name in changed])
                lines.append(f"requires_grad of {text}: {change} (the script's is used)")
        return lines

    def _check_schedule(self, name: str, schedule: LRScheduler) -> None:
        handler, run = name.partition("/")[2], self.run
        optimizers = [key for key, optimizer in self.objects.optimizers.items() if optimizer is schedule.optimizer]
        groups: list[Any] = [self.states[key].get("param_groups", ()) for key in optimizers]
        groups = max(*groups, schedule.optimizer.param_groups, key=len) if groups else schedule.optimizer.param_groups
        described, saved = self.description["schedules"].get(name), self.states[name]
        remedy = f"build the one that was saved, or restart it with Checkpoint(..., leave_out=({handler!r},))"
        _refuse(self.path, f"schedule at {name!r}", _schedule_problems(schedule, saved, described, groups), remedy)
        if "lr" not in run.script_wins:
            return
        reasons = [reason for reason in [_why_no_multiples(schedule)] if reason]
        for key in optimizers:
            pairs = zip(self.states[key].get("param_groups", ()), run.decided(key), strict=False)
            rates = [[group.get("initial_lr", group["lr"]) for group in pair] for pair in pairs]
            reasons += [
                f"param_groups[{index}] of {key} had lr=0, which cannot be scaled to the script's {now!r:.20}"
                for index, (before, now) in enumerate(rates)
                if before == 0 != now
            ]
        if reasons:
            raise CheckpointError(
                f"script_wins must not name 'lr' where {name!r} is restored: {reasons[0]}; restart it with "
                f"leave_out=({handler!r},), or let the checkpoint win"
            )

    def _check_this_rank(self) -> None:
        """Looks at what would otherwise be taken over unchecked: the buffers of this rank and its latest results."""
        for module, claimed in self.states["buffers"].items():
            buffers = self.objects.buffers().get(module, {})
            saved = {name: claimed[name] for name in buffers if name in claimed}
            check_module(self.path, module, {name: buffers[name] for name in saved}, saved)
        results = self.states["results"]
        problem = _why_no_record(results, {"output"}, {"output"})
        if not problem and results["output"] is not None:
            problem = _why_no_record(results["output"], *field_names(UpdateOutput))
        if problem:
            raise CheckpointError(f"{self.path} has invalid results of an update: {problem}")


# --- records ---


def _why_no_record(saved: Any, needed: Set[str], known: Set[str]) -> str:
    """Why a record cannot be read; empty if it can. An older version did not write what it did not know yet.

    Args:
        saved: the record.
        needed: the names that it must have; what a later version adds has a default and is none of them.
        known: all names that it may have.
    """
    if not isinstance(saved, dict) or not needed <= saved.keys():
        return describe(saved)
    unknown = [f"{name!r:.40}" for name in saved if name not in known]
    if not unknown:
        return ""
    return (
        f"this version of ignite_train does not know {unknown[0]}, which most likely a newer version wrote; resume with the "
        "version that wrote it, or start in another directory"
    )


# --- modules ---


def check_module(path: str, name: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compares the names, shapes, dtypes and classes of the tensors of a saved module with those of this run.

    Raises:
        CheckpointError: they differ.
    """
    there, here = (
        {key: form if isinstance(form := form_of(value), TensorForm) else _Word.NO_TENSOR for key, value in state.items()}
        for state in (saved, current)
    )
    found, remedy = [*differences(there, here)], f"build the {name} that was saved"
    if any(isinstance(one.here, TensorForm) and isinstance(one.saved, TensorForm) and 0 in one.here.shape for one in found):
        remedy += ", and run its forward once before create_trainer, since buffers that are empty here get their shape there"
    _refuse(path, name, found, remedy)


def check_tied(path: str, name: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Checks that names of one tensor of this run have the same numbers in a saved module; or else the last would win.

    Raises:
        CheckpointError: they do not, because the weights were not tied then.
    """
    for first, key in untied(current, saved):
        problem = f"{first!r} and {key!r} are one tensor in this run, and differ there"
        _refuse(path, name, [problem], f"build the {name} that was saved")


def untied(current: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Two names each of one tensor of `current` under which `saved` has other numbers than under the other."""
    for first, *others in tied_names(current):
        for key in others:
            one, other = saved.get(first), saved.get(key)
            if one is not other and isinstance(one, Tensor) and isinstance(other, Tensor) and not _same_bits(one, other):
                yield first, key


def tied_names(state: Mapping[str, Any]) -> list[list[str]]:
    """The names of each tensor that a state of a module has under several; all ranks of a sharded one find the same."""
    names: dict[Any, list[str]] = {}
    for key, value in state.items():
        here = local_part(value)
        if type(here) is Tensor:
            place = storage_number(here.untyped_storage()), here.storage_offset(), here.stride()
            names.setdefault((*place, value.dtype, tuple(value.shape)), []).append(key)
    return [same for same in names.values() if len(same) > 1]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Of two tensors of one shape, or the parts of them that this rank has."""
    here, there = local_part(one), local_part(other)
    return one.dtype == other.dtype and torch.equal(as_bytes(here.contiguous()), as_bytes(there.contiguous()))


# --- optimizers ---


def _optimizer_problems(
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
                there = {name: _Word.NOTHING if (value := state.get(name)) is None else form_of(value) for name in needed}
                yield from differences(there, needed, _can_serve, (label,))


def _tried(
    kind: Any, options: Mapping[str, Any], kinds: Sequence[tuple[int, torch.dtype]]
) -> tuple[dict[tuple[int, torch.dtype], dict[str, Any]], str]:
    """What an optimizer with these options keeps for parameters after two steps, by their dimensions and dtype.

    Returns:
        The states, and how the steps fail; empty if they do not. They fail too where torch has no such step, as with a class
        that needs a closure, and dtypes without arithmetic.
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


def _needed(value: Any, parameter: Tensor) -> TensorForm | _Word:
    """What a state must hold for a parameter where that of a stand-in holds `value`.

    The sizes of the stand-in become those of the parameter. A size of its own, as factors of Adafactor have, stays.
    """
    if not isinstance(value, Tensor) or (value.numel() == 1 and parameter.dim() > 0):
        return _Word.ONE_NUMBER
    small = _SIZES[: parameter.dim()]
    return TensorForm(tuple(parameter.shape[small.index(s)] if s in small else s for s in value.shape), value.dtype)


def _can_serve(saved: Any, needed: Any) -> bool:
    """Whether a step can use a value of a state; the width of its numbers may be another one.

    All that torch's optimizers keep as one number, such as the count of steps, is at least 0, and a step may divide by it.
    """
    if needed is _Word.ONE_NUMBER:
        is_number = isinstance(saved, TensorForm) and math.prod(saved.shape) == 1 and _numbers(saved) == "float"
        return is_number or (isinstance(saved, (int, float)) and 0 <= saved < 2**64)
    return isinstance(saved, TensorForm) and saved.shape == needed.shape and _numbers(saved) == _numbers(needed)


def _numbers(form: TensorForm) -> str:
    return next((kind for kind in ("float", "complex") if kind in dtype_name(form.dtype)), "int")


def _option_changes(name: str, saved: Any, script: Sequence[Mapping[str, Any]], script_wins: Sequence[str]) -> list[str]:
    """The options that the script sets in another way, and which of the two is used."""
    changes: dict[str, list[int]] = {}
    pairs = [*zip(saved, map(plain_options, script), strict=False)]  # groups that are added later are equal
    for index, (before, now) in enumerate(pairs):
        for one in differences(before, now):
            (key,) = one.path
            if not one.is_on_one_side and (key != "initial_lr" or now.get("lr") == before.get("lr")):
                used = "the script's is used" if key in script_wins else "the checkpoint's is used; "
                used += "" if key in script_wins else f"script_wins=({key!r},) takes the script's"
                changes.setdefault(f"{one.change} ({used})", []).append(index)
    everywhere = [*range(len(pairs))]
    return [f"{name}.{'' if found == everywhere else f'param_groups{found}.'}{text}" for text, found in changes.items()]


# --- schedules ---


def _schedule_problems(
    schedule: LRScheduler, saved: Any, described: Any, groups: Sequence[Mapping[str, Any]]
) -> Iterator[Difference | str]:
    """Why a saved state is not of this schedule, over these parameter groups; those that were added have no base rate."""
    mine, current = schedule_class(schedule), schedule.state_dict()
    # An older version did not write the classes of the parts, which have other options.
    if described not in (None, mine, type(schedule).__qualname__):
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
            load_schedule(tried, copy.deepcopy(_for_a_stand_in({k: v for k, v in state.items() if k != "_latest_update"})))
            tried.step(*([1.0] if isinstance(tried, schedulers.ReduceLROnPlateau) else []))
        rates = [float(group["lr"]) for group in stand_in.param_groups]
    except Exception as error:
        return f"its next step fails by {type(error).__name__}: {error!s:.200}"
    return "" if all(map(math.isfinite, rates)) else f"its next step sets the learning rates {rates!r:.100}"


def _same_kind(saved: Any, here: Any) -> bool:
    """Whether a value of an option may stand in the place of another: a number for a number, a string for a string."""
    if _Word.NOTHING in (saved, here):
        return False
    kinds = ((bool,), (int, float), (str,))
    return next((type(saved) in kind for kind in kinds if type(here) in kind), True)


def _why_no_multiples(schedule: Any) -> str:
    """Why the rates of a schedule cannot follow the optimizer's `lr` of the script; empty if they can."""
    if not isinstance(schedule, _PROPORTIONAL):
        return f"{type(schedule).__name__} does not compute its rates as multiples of lr"
    values = schedule.state_dict()
    if values.get("eta_min"):
        return f"{type(schedule).__name__} has eta_min={values['eta_min']!r}, which is not a multiple of lr"
    return next((reason for part in parts_of_schedule(schedule) if (reason := _why_no_multiples(part))), "")


# --- settings ---


def config_changes(saved: Any, script: Any, in_effect: Any) -> list[str]:
    """The differences between two trees of `plain_config`, a line each. Of a setting it says which of the two is used.

    Args:
        saved: of the checkpoint.
        script: of the script that resumes, before a state was restored.
        in_effect: the same afterwards.
    """
    before, now, used = (decode(tree, ("config",)) for tree in (saved, script, in_effect))
    kept = {one.path for one in differences(before, used, _same_text)}
    lines = []
    for one in differences(before, now, _same_text):
        if not any(one.path[: len(place)] == place for place in _SETTINGS):
            lines.append(one.change)
        elif not one.is_on_one_side:  # what is attached on one side only has no setting on the other
            lines.append(f"{one.change} (the {'script' if one.path in kept else 'checkpoint'}'s is used)")
    return lines


def _same_text(saved: Any, here: Any) -> bool:
    return repr(saved) == repr(here) and (saved is _Word.NOTHING) == (here is _Word.NOTHING)


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
