"""What the user decides about the saved state: which handlers are left out, and which options of the script win."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ignite_train.arguments import describe, did_you_mean
from ignite_train.checkpoint.optimizer_state import describe_optimizer, option_changes, script_options
from ignite_train.checkpoint.run_objects import RunObjects, SavedRun
from ignite_train.checkpoint.schedule_state import describe_schedule, schedule_changes
from ignite_train.errors import CheckpointError

__all__ = ["StateRules"]

_logger = logging.getLogger(__name__)
_CARRIED = "carried"  # in `leave_out`: what forward has carried on each rank, in `state.carried`
_LOSS_SCALING = "loss_scaling"  # in `leave_out`: the scale of the loss and the counters of its policy


class StateRules:
    """What a `Checkpoint` was told about the state that it saves and reads, and which options the script has set.

    Args:
        leave_out: names of attached handlers whose state is neither saved nor read. "carried" drops what forward has carried,
            and "loss_scaling" starts with a fresh scale.
        script_wins: options of the optimizer that keep the script's value when a run is resumed.

    Raises:
        TypeError: one of the two is not a sequence of strings.
    """

    def __init__(self, leave_out: Iterable[str] = (), script_wins: Iterable[str] = ()) -> None:
        self.leave_out, self.script_wins = _names("leave_out", leave_out), _names("script_wins", script_wins)
        self._script: dict[str, list[dict[str, Any]]] = {}  # options of each optimizer, as the script has set them
        self._in_effect: dict[str, list[dict[str, Any]]] = {}  # the same, except for those that an older checkpoint decided
        self._warned: set[str] = set()

    def begin(self, run: SavedRun, holders: Iterable[str] = ()) -> None:
        """Notes the options of the script, once, and refuses unknown names. To be called before anything is read or trained.

        Args:
            run: the run.
            holders: names of handlers without a `state_dict` that a warning may name.

        Raises:
            ValueError: `leave_out` or `script_wins` has a name that nothing in the run has.
        """
        objects = run.objects()
        self.note(objects)
        handlers = sorted({name.partition("/")[2] for name in objects.handlers()} | {*holders, _CARRIED, _LOSS_SCALING})
        options = sorted({key for groups in self._script.values() for group in groups for key in group})
        for argument, given, known, what in (
            ("leave_out", self.leave_out, handlers, f"{_CARRIED!r}, {_LOSS_SCALING!r} or attached handlers that have a state"),
            ("script_wins", self.script_wins, options, "options of the optimizer"),
        ):
            for name in given:
                if name not in known:
                    raise ValueError(f"{argument} must name {what}, any of {known}, got {name!r}{did_you_mean(name, known)}")

    @property
    def drops_carried(self) -> bool:
        """Whether a resumed run starts without what forward has carried."""
        return _CARRIED in self.leave_out

    @property
    def drops_loss_scaling(self) -> bool:
        """Whether a resumed run starts with a fresh scale of the loss."""
        return _LOSS_SCALING in self.leave_out

    def keep(self, objects: RunObjects) -> RunObjects:
        """All objects except those that the user leaves out."""
        return objects.without({name for name in objects.handlers() if name.partition("/")[2] in self.leave_out})

    def describe(self, objects: RunObjects) -> dict[str, Any]:
        """What a checkpoint stores beside the state, so that the next run can compare."""
        self.note(objects)
        names = objects.parameter_names()
        optimizers = {
            name: describe_optimizer(optimizer, names, self._in_effect[name]) for name, optimizer in objects.optimizers.items()
        }
        schedules = {name: describe_schedule(schedule) for name, schedule in objects.schedules.items()}
        return {"optimizers": optimizers, "schedules": schedules, "frozen": objects.frozen_parameters()}

    def decided(self, name: str) -> list[dict[str, Any]]:
        """The options of each group of an optimizer that the script decides."""
        wins = {*self.script_wins, *(["initial_lr"] if "lr" in self.script_wins else [])}
        return [{key: value for key, value in group.items() if key in wins} for group in self._script[name]]

    def changes(self, objects: RunObjects, description: Mapping[str, Any]) -> list[str]:
        """What the script sets to other values than the script that wrote a checkpoint, a line each.

        Args:
            objects: of this run.
            description: what `describe` gave for the checkpoint; older checkpoints have none, and the mapping is empty.
        """
        optimizers, schedules = (description.get(kind, {}) for kind in ("optimizers", "schedules"))
        lines = []
        for name in objects.optimizers:
            lines += option_changes(name, optimizers.get(name), self._script[name], self.script_wins)
        for name, schedule in objects.schedules.items():
            lines += schedule_changes(name, schedule, schedules.get(name))
        added = {name: objects.missing_groups(name, optimizers.get(name)) for name in objects.optimizers}
        lines += [_added(name, group, objects) for name, groups in added.items() for group in groups]
        thawed = {id(parameter) for groups in added.values() for group in groups for parameter in group}
        names = {name for name, parameter in objects.model.parameters() if id(parameter) in thawed}
        before, now = description.get("frozen"), [name for name in objects.frozen_parameters() if name not in names]
        if isinstance(before, list):
            before = [name for name in before if name not in names]
            lines += _frozen_changes([name for name in before if name not in now], "False -> True")
            lines += _frozen_changes([name for name in now if name not in before], "True -> False")
        return lines

    def continue_with(self, name: str, description: Any) -> None:
        """Notes that the options of a checkpoint are in effect, except for those that the script decides.

        Args:
            name: of the optimizer.
            description: what `describe` gave for that optimizer; None if it is not known.
        """
        if isinstance(description, Mapping):
            decided = self.decided(name)
            pairs = zip(self._script[name], description["options"], decided, strict=True)
            self._in_effect[name] = [{**script, **saved, **wins} for script, saved, wins in pairs]

    def warn_left_out(self, name: str, error: Exception, *, remedy: str = "") -> None:
        """Warns once that the checkpoints do not hold something, and says what to do.

        Args:
            name: of a handler, or of what has the `remedy`.
            error: why it cannot be stored.
            remedy: what to do; by default how to leave a handler out without this warning.
        """
        if name not in self._warned:
            self._warned.add(name)
            reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            handler = name.partition("/")[2]
            _logger.warning(
                f"{name} is left out of the checkpoints, so a resumed run starts without {'it' if remedy else 'its state'}: "
                f"{' '.join(reason.split()):.300}; "
                f"{remedy or f'Checkpoint(..., leave_out=({handler!r},)) leaves it out without this warning'}"
            )

    def note(self, objects: RunObjects) -> None:
        """Notes the options of parameter groups that are new, as a handler may add some in the run."""
        for name, optimizer in objects.optimizers.items():
            script, in_effect = self._script.setdefault(name, []), self._in_effect.setdefault(name, [])
            added = script_options(optimizer)[len(script) :]
            script += added
            in_effect += added


def _added(name: str, group: Sequence[nn.Parameter], objects: RunObjects) -> str:
    """A line for a parameter group that the script adds in the run, and the checkpoint has already."""
    names = objects.parameter_names()
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return f"{name}: a parameter group with {names[id(group[0])][0]}{more} is added, as it was in the run"


def _frozen_changes(names: list[str], change: str) -> list[str]:
    """A line for parameters that the script has frozen, or trains, other than the run did when it was saved."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"requires_grad of {names[0]}{more}: {change} (the script's is used)"] if names else []


def _names(argument: str, names: Any) -> tuple[str, ...]:
    found = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (None,)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"{argument} must be a sequence of names such as ('lr',), got {describe(names)}")
    return found
