"""Whether a checkpoint fits this run: what it says that it holds is compared with what the run would save now.

Both are trees. Where they differ a resume is refused, before memory is allocated for a tensor and before anything of the run is
changed; settings may differ, and are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.arguments import describe, field_names
from ignite_train.checkpoint.differences import Word, differences, refuse
from ignite_train.checkpoint.problems import optimizer_problems, schedule_problems, why_no_multiples
from ignite_train.checkpoint.run_objects import (
    PublishedMetrics,
    RunObjects,
    has_own_form,
    plain_options,
    same_option,
    schedule_options,
)
from ignite_train.checkpoint.saved_run import SavedRun
from ignite_train.checkpoint.tree import TensorForm, decode, form_of
from ignite_train.errors import CheckpointError
from ignite_train.internals.of_torch import storage_number
from ignite_train.model.memory_layout import as_bytes, local_part
from ignite_train.state import UpdateOutput

__all__ = [
    "EVERY_RANK",
    "Fit",
    "check_module",
    "check_tied",
    "config_changes",
    "tied_names",
    "untied",
]

EVERY_RANK = ("trainer", "data", "results", "buffers", "generators")
"""The states that each rank writes, besides its handlers."""
_ANOTHER_NAME = "give the schedule's handler another name, as in handler.saved_as = 'second': it begins over the script's lr"
_SETTINGS = (("handlers",), ("trainer", "loss_scaling"))


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
            problems = optimizer_problems(entry, groups, saved, there[name], here[name], names, decided)
            refuse(self.path, name, problems, "build the one that was saved, or start in another directory")

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
            lines += _option_changes(name, there["optimizers"][name]["options"], run.script(name), run.decided(name))
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
        run = self.run
        optimizers = [key for key, optimizer in self.objects.optimizers.items() if optimizer is schedule.optimizer]
        groups: list[Any] = [self.states[key].get("param_groups", ()) for key in optimizers]
        groups = max(*groups, schedule.optimizer.param_groups, key=len) if groups else schedule.optimizer.param_groups
        described, saved = self.description["schedules"].get(name), self.states[name]
        remedy = "build the one that was saved"
        # One that is left out would begin at each start, and the next checkpoint would not have its state.
        remedy += "" if name.startswith("to_save/") else f", or {_ANOTHER_NAME}"
        refuse(self.path, f"schedule at {name!r}", schedule_problems(schedule, saved, described, groups), remedy)
        if "lr" not in run.script_wins:
            return
        reasons = [reason for reason in [why_no_multiples(schedule)] if reason]
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
                f"script_wins must not name 'lr' where {name!r} is restored: {reasons[0]}; let the checkpoint win, or "
                f"{_ANOTHER_NAME}"
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
        {key: form if isinstance(form := form_of(value), TensorForm) else Word.NO_TENSOR for key, value in state.items()}
        for state in (saved, current)
    )
    found, remedy = [*differences(there, here)], f"build the {name} that was saved"
    if any(isinstance(one.here, TensorForm) and isinstance(one.saved, TensorForm) and 0 in one.here.shape for one in found):
        remedy += ", and run its forward once before create_trainer, since buffers that are empty here get their shape there"
    refuse(path, name, found, remedy)


def check_tied(path: str, name: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Checks that names of one tensor of this run have the same numbers in a saved module; or else the last would win.

    Raises:
        CheckpointError: they do not, because the weights were not tied then.
    """
    for first, key in untied(current, saved):
        problem = f"{first!r} and {key!r} are one tensor in this run, and differ there"
        refuse(path, name, [problem], f"build the {name} that was saved")


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


def _option_changes(
    name: str, saved: Any, script: Sequence[Mapping[str, Any]], decided: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The options that the script sets in another way, and which of the two is used."""
    changes: dict[str, list[int]] = {}
    pairs = [*zip(saved, map(plain_options, script), decided, strict=False)]  # groups that are added later are equal
    for index, (before, now, wins) in enumerate(pairs):
        for one in differences(_as_written(before), _as_written(now)):
            (key,) = one.path
            if not one.is_on_one_side:
                theirs = f"the checkpoint's is used; script_wins=({key!r},) takes the script's"
                used = "the script's is used" if key in wins else theirs
                changes.setdefault(f"{one.change} ({used})", []).append(index)
    everywhere = [*range(len(pairs))]
    return [f"{name}.{'' if found == everywhere else f'param_groups{found}.'}{text}" for text, found in changes.items()]


def _as_written(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group with the rate that the script has written, and not what a schedule has made of it."""
    written = {key: value for key, value in options.items() if key != "initial_lr"}
    return written if len(written) == len(options) else {**written, "lr": options["initial_lr"]}


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
    return repr(saved) == repr(here) and (saved is Word.NOTHING) == (here is Word.NOTHING)


def _first_of(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
