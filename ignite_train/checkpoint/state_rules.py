"""What the user decides about the saved state: which handlers are left out, and which options of the script win."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ignite_train.arguments import describe, did_you_mean
from ignite_train.checkpoint.run_objects import RunObjects, SavedRun
from ignite_train.checkpoint.tree import dtype_name
from ignite_train.errors import CheckpointError

__all__ = ["PROGRESS", "StateRules", "describe_optimizer", "plain_options", "schedule_options", "stepping_part"]

PROGRESS = {"last_epoch", "base_lrs", "verbose", "T_cur", "T_i", "best", "cooldown_counter", "num_bad_epochs"}
"""Attributes of schedules that a script does not set."""
_NOT_OPTIONS = ("params", "param_names")
_PLAIN = (type(None), bool, int, float, str)
_logger = logging.getLogger(__name__)
_CARRIED = "carried"  # in `leave_out`: what forward has carried on each rank, in `state.carried`
_LOSS_SCALING = "loss_scaling"  # in `leave_out`: the scale of the loss and the counters of its policy


class StateRules:
    """What a `Checkpoint` was told about the state that it saves and reads, and which options the script has set.

    Args:
        leave_out: names of attached handlers whose state is neither saved nor read. "carried" drops what forward has carried,
            and "loss_scaling" starts with a fresh scale.
        script_wins: options of the optimizer that keep the script's value when a run is resumed.
        frozen_once: whether parameters that do not require grad are written to a file that checkpoints share.

    Raises:
        TypeError: one of the two is not a sequence of strings.
    """

    def __init__(self, leave_out: Iterable[str] = (), script_wins: Iterable[str] = (), *, frozen_once: bool = False) -> None:
        self.frozen_once = frozen_once
        self.leave_out, self.script_wins = _names("leave_out", leave_out), _names("script_wins", script_wins)
        self._script: dict[str, list[dict[str, Any]]] = {}  # options of each optimizer, as the script has set them
        self._in_effect: dict[str, list[dict[str, Any]]] = {}  # the same, but for those that the checkpoint decided
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
        if not self.leave_out:
            return objects
        return objects.without({name for name in objects.handlers() if name.partition("/")[2] in self.leave_out})

    def describe(self, objects: RunObjects) -> dict[str, Any]:
        """What a checkpoint stores beside the state, so that the next run can compare."""
        self.note(objects)
        names, optimizers = objects.parameter_names(), {}
        for name, optimizer in objects.each_optimizer.items():
            groups = [group["params"] for group in optimizer.param_groups]
            options = self._in_effect.get(name, optimizer.param_groups)
            optimizers[name] = describe_optimizer(optimizer, groups, names) | {"options": [*map(plain_options, options)]}
        schedules = {
            name: {"class": type(schedule).__qualname__, "options": schedule_options(schedule.state_dict())}
            for name, schedule in objects.schedules.items()
        }
        return {"optimizers": optimizers, "schedules": schedules, "frozen": objects.frozen_parameters()}

    def script(self, name: str) -> list[dict[str, Any]]:
        """The options of each group of an optimizer, as the script has set them."""
        return self._script[name]

    def decided(self, name: str) -> list[dict[str, Any]]:
        """The options of each group of an optimizer that the script decides."""
        wins = {*self.script_wins, *(["initial_lr"] if "lr" in self.script_wins else [])}
        return [{key: value for key, value in group.items() if key in wins} for group in self._script.get(name, ())]

    def continue_with(self, name: str, description: Mapping[str, Any]) -> None:
        """Notes that the options of a checkpoint are in effect, except for those that the script decides.

        Args:
            name: of the optimizer.
            description: what `describe` gave for that optimizer.
        """
        groups = zip(self._script[name], description["options"], self.decided(name), strict=True)
        self._in_effect[name] = [{**script, **saved, **wins} for script, saved, wins in groups]

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
            added = [_copied_options(group) for group in optimizer.param_groups[len(script) :]]
            script += added
            in_effect += added


def describe_optimizer(
    optimizer: Optimizer, groups: Sequence[Sequence[Tensor]], names: Mapping[int, Sequence[str]]
) -> dict[str, Any]:
    """The class of an optimizer, without its module, which may be renamed, and its parameters.

    Args:
        optimizer: the optimizer.
        groups: its groups of parameters.
        names: the names of each parameter, by its `id`.
    """
    inner, own = stepping_part(optimizer), type(optimizer).__qualname__
    return {
        "class": own if inner is optimizer else f"{own} of {type(inner).__qualname__}",
        "names": [[next(iter(names.get(id(parameter), ())), "") for parameter in group] for group in groups],
        "shapes": [[list(parameter.shape) for parameter in group] for group in groups],
        "dtypes": [[dtype_name(parameter.dtype) for parameter in group] for group in groups],
    }


def stepping_part(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps: one that shards the state over the ranks has another inside."""
    inner = vars(optimizer).get("optim")
    return inner if isinstance(inner, Optimizer) else optimizer


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that can be written down and compared."""
    options = {}
    for key, value in group.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        plain = list(plain) if isinstance(plain, tuple) else plain
        if key not in _NOT_OPTIONS and (isinstance(plain, _PLAIN) or (isinstance(plain, list) and all(map(_is_plain, plain)))):
            options[str(key)] = plain
    return options


def schedule_options(state: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the state of a schedule that a script sets, if they are plain values."""
    return {key: value for key, value in state.items() if not key.startswith("_") and key not in PROGRESS and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _copied_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """As the script has set them; tensors are copied, since a schedule may write into them."""
    options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in options.items()}


def _names(argument: str, names: Any) -> tuple[str, ...]:
    found = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (None,)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"{argument} must be a sequence of names such as ('lr',), got {describe(names)}")
    return found
