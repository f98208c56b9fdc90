"""The run that a `Checkpoint` saves, and what the user decides about its state."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import is_not
from typing import Any, Protocol, runtime_checkable

from ignite.engine import Engine
from ignite.metrics import Metric
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ignite_train.arguments import describe, did_you_mean
from ignite_train.checkpoint.run_objects import (
    HANDLERS,
    NOT_OPTIONS,
    PUBLISHED,
    GathersState,
    PublishedMetrics,
    RunObjects,
    SavedModule,
    SavedOptimizer,
    has_own_form,
    plain_options,
)
from ignite_train.engine.attachable import Attachable, Stateful
from ignite_train.engine.dispatch import stateful_handlers
from ignite_train.errors import CheckpointError
from ignite_train.model.optimizers import inner_optimizers
from ignite_train.trainer import Trainer

__all__ = ["SavedRun", "checked_names", "checked_objects"]

_CARRIED = "carried"  # in `leave_out`: what forward has carried on each rank, in `state.carried`
# The options that schedules set; some cycle the momentum too.
_OF_SCHEDULES = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum", "momentum", "betas"}
_LOSS_SCALING = "loss_scaling"  # in `leave_out`: the scale of the loss and the counters of its policy
_logger = logging.getLogger(__name__)


@runtime_checkable
class _KnowsAnEvaluator(Protocol):
    """A handler that runs an evaluator; `Validation` does."""

    evaluator: Engine


class SavedRun:
    """A run as a `Checkpoint` sees it: the objects of it that have a state, and what the user decides about them.

    Args:
        trainer: its trainer.
        to_save: the user's additional objects, by name.
        evaluator: the evaluator whose handlers are saved too, besides those that handlers of the trainer run.
        leave_out: names of attached handlers whose state is neither saved nor read. "carried" drops what forward has carried,
            and "loss_scaling" starts with a fresh scale.
        script_wins: options of the optimizer that keep the script's value when the run is resumed.
        frozen_once: whether parameters that do not require grad are written to a file that checkpoints share.
        config: the user's configuration; what has changed in it is logged when the run is resumed.
        on_changed_data: what happens if it resumes in the middle of an epoch with another loader: `"raise"` or `"warn"`.

    Attributes:
        trainer: the same, by a proxy.
        reference: gives the trainer; None once it is gone, and the run cannot be saved any more.
        trainers: the other trainers among the user's objects, by their names in a checkpoint.
        each_trainer: the trainer and these.
        left_out: the names in a checkpoint that the handlers which are left out would have.
        in_effect: the options of each optimizer that the script has set, or the checkpoint in their place, in plain values.
    """

    def __init__(
        self,
        trainer: Trainer,
        to_save: Mapping[str, Stateful] | None = None,
        evaluator: Engine | None = None,
        *,
        leave_out: Sequence[str] = (),
        script_wins: Sequence[str] = (),
        frozen_once: bool = False,
        config: Mapping[str, Any] | None = None,
        on_changed_data: str = "raise",
    ) -> None:
        # Weakly, since the trainer has the Checkpoint, which has this: it is freed with its last reference.
        self.trainer, self.reference, self._state = weakref.proxy(trainer), weakref.ref(trainer), trainer.state
        self.to_save, self.evaluator = to_save or {}, evaluator
        self.leave_out, self.script_wins, self.frozen_once = leave_out, script_wins, frozen_once
        self.config, self.on_changed_data = config or {}, on_changed_data
        others = ((name, entry) for name, entry in self.to_save.items() if isinstance(entry, Trainer) and entry is not trainer)
        self.trainers = {f"to_save/{name}": entry for name, entry in others}
        self.each_trainer: tuple[Trainer, ...] = (self.trainer, *self.trainers.values())
        self._attached: list[Any] = []  # the engines and their handlers when `_objects` were listed
        self._objects, self.left_out = RunObjects({}, {}, self.trainer, {}), set[str]()
        self._schedules: dict[str, LRScheduler] = {}  # those that are left out too
        self._begun: set[str] = set()  # the optimizers whose rates schedules set from their beginning in a resumed run
        self._script: dict[str, list[dict[str, Any]]] = {}  # options of each optimizer, as the script has set them
        self.in_effect: dict[str, list[dict[str, Any]]] = {}
        self._warned: set[str] = set()

    @property
    def updates_done(self) -> int:
        """`Trainer.updates_done`, also where the trainer is gone."""
        return self._state.iteration if self.reference() is None else self.trainer.updates_done

    @property
    def is_between_updates(self) -> bool:
        """Whether a session of the trainer waits for its next update, and no other trainer is in one: the state is whole."""
        return self.trainer.in_session and not any(entry.is_iterating for entry in self.each_trainer)

    @property
    def evaluators(self) -> list[Engine]:
        """The evaluator that the user named, and the evaluators of attached handlers. Each is listed once."""
        found = [] if self.evaluator is None else [self.evaluator]
        for trainer in self.each_trainer:
            for handler in stateful_handlers(trainer).values():
                if isinstance(handler, _KnowsAnEvaluator) and isinstance(handler.evaluator, Engine):
                    found += [] if handler.evaluator in found else [handler.evaluator]
        return found

    @property
    def engines(self) -> list[Engine]:
        """The trainers and the evaluators."""
        return [*self.each_trainer, *self.evaluators]

    def objects(self) -> RunObjects:
        """All that has a state and is not left out, besides the trainer, as attached by now.

        The list is made again where a handler has come or gone, and stays as it was when the trainer is gone.
        """
        if self.reference() is None:
            return self._objects
        attached = [one for engine in self.engines for one in (engine, *stateful_handlers(engine).values())]
        if len(attached) != len(self._attached) or any(map(is_not, attached, self._attached)):
            self._attached, self._objects = attached, self._list()
        return self._objects

    def _list(self) -> RunObjects:
        """The user's objects under the names that the user gave, and all others once, under the first of their names."""
        users = {f"to_save/{name}": entry for name, entry in self.to_save.items() if not isinstance(entry, Trainer)}
        shared: dict[str, Any] = {**self.trainer.parts, **users}
        more = {f"{prefix}/{name}": part for prefix, trainer in self.trainers.items() for name, part in trainer.parts.items()}
        of_all_ranks = {*more}
        for prefix, trainer in {"": self.trainer, **{f"{name}/": trainer for name, trainer in self.trainers.items()}}.items():
            more |= {f"{prefix}{HANDLERS}{name}": entry for name, entry in stateful_handlers(trainer).items()}
        for number, evaluator in enumerate(self.evaluators, start=1):
            folder = "evaluator" if number == 1 else f"evaluator-{number}"
            handlers = stateful_handlers(evaluator).items()
            # Each evaluation resets its metrics. Not all of Ignite's can be loaded, and only on as many ranks. What they have
            # published is saved.
            more |= {f"{folder}/{name}": entry for name, entry in handlers if not isinstance(entry, Metric)}
            more[f"{folder}/{PUBLISHED}"] = PublishedMetrics(evaluator)
        own: dict[str, Stateful] = {f"trainer/{PUBLISHED}": PublishedMetrics(self.trainer)}
        listed = {id(entry) for entry in shared.values()}
        for name, entry in more.items():
            if id(entry) not in listed:
                listed.add(id(entry))
                is_shared = name in of_all_ranks or (isinstance(entry, Attachable) and entry.same_on_all_ranks)
                (shared if is_shared else own)[name] = entry
        shared = {name: _saved(entry) for name, entry in _with_inner(shared, listed).items()}
        objects = RunObjects(shared, own, self.trainer, self.trainers)
        self._schedules = objects.schedules
        self.left_out = {name for name in objects.handlers() if name.partition("/")[2] in self.leave_out}
        return objects.without(self.left_out)

    def refuse_odd_optimizers(self) -> None:
        """Looks at the optimizers before the first batch: what cannot be loaded must not be saved.

        Raises:
            TypeError: an optimizer cannot load the state that it gives.
        """
        for name, entry in self.objects().optimizers.items():
            _check_loads(name, entry)

    # --- what the user decides ---

    def begin(self, holders: Iterable[str] = ()) -> None:
        """Notes the options of the script, once, and refuses unknown names. To be called before anything is read or trained.

        Args:
            holders: names of handlers without a `state_dict` that a warning may name.

        Raises:
            ValueError: `leave_out` or `script_wins` has a name that nothing in the run has.
        """
        objects = self.objects()
        self.note(objects)
        attached = {*objects.handlers()} | self.left_out
        handlers = sorted({name.partition("/")[2] for name in attached} | {*holders, _CARRIED, _LOSS_SCALING})
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

    def script(self, name: str) -> list[dict[str, Any]]:
        """The options of each group of an optimizer, as the script has set them."""
        return self._script[name]

    def begin_schedules(self, fresh: Collection[str]) -> None:
        """Notes which optimizers have the script's rates in a resumed run, since no schedule over them is restored.

        A schedule that begins has set the rates when the script made it, and computes later rates from these. One that waits
        for a score begins over the rates that it finds.

        Args:
            fresh: names of objects that start from the beginning.
        """
        begins, restored = set[str](), set[str]()
        for name, schedule in self._schedules.items():
            if name not in {*fresh, *self.left_out}:
                restored |= self._optimizers_of(schedule)
            elif not isinstance(schedule, ReduceLROnPlateau):
                begins |= self._optimizers_of(schedule)
        self._begun = begins - restored

    def _optimizers_of(self, schedule: LRScheduler) -> set[str]:
        """The names of the optimizers whose rates a schedule computes."""
        groups = [*map(id, schedule.optimizer.param_groups)]
        optimizers = self.objects().optimizers
        return {name for name, one in optimizers.items() if any(id(group) in groups for group in one.param_groups)}

    def decided(self, name: str) -> list[dict[str, Any]]:
        """The options of each group of an optimizer that the script decides."""
        over_lr = _OF_SCHEDULES if name in self._begun else {"initial_lr"} if "lr" in self.script_wins else set[str]()
        wins = {*self.script_wins, *over_lr}
        return [{key: value for key, value in group.items() if key in wins} for group in self._script.get(name, ())]

    def continue_with(self, name: str, description: Mapping[str, Any]) -> None:
        """Notes that the options of a checkpoint are in effect, except for those that the script decides.

        Args:
            name: of the optimizer.
            description: what `RunObjects.describe` gave for that optimizer.
        """
        groups = zip(self._script[name], description["options"], self.decided(name), strict=True)
        self.in_effect[name] = [{**plain_options(script), **saved, **plain_options(wins)} for script, saved, wins in groups]

    def note(self, objects: RunObjects) -> None:
        """Notes the options of parameter groups that are new, as a handler may add some in the run."""
        for name, optimizer in objects.optimizers.items():
            script, in_effect = self._script.setdefault(name, []), self.in_effect.setdefault(name, [])
            for group in optimizer.param_groups[len(script) :]:
                script.append(_copied_options(group))
                in_effect.append(plain_options(script[-1]))

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


def _with_inner(objects: Mapping[str, Any], met: set[int]) -> dict[str, Any]:
    """These objects, and after each optimizer those inside it that are not `met` elsewhere, each once."""
    found = dict[str, Any]()
    for name, entry in objects.items():
        found[name] = entry
        if isinstance(entry, Optimizer) and not isinstance(entry, GathersState):
            _add_inner(found, met, name, entry)
    return found


def _add_inner(parts: dict[str, Any], met: set[int], prefix: str, owner: Optimizer) -> None:
    # One that gives a state of its own form gives that of those in its lists too, of which torch's knows nothing.
    is_torchs = type(owner).state_dict is Optimizer.state_dict
    for name, one in inner_optimizers(owner, in_containers=is_torchs).items():
        if id(one) not in met:
            met.add(id(one))
            parts[f"{prefix}.{name}"] = SavedOptimizer(one, outer=owner)
            if not isinstance(one, GathersState):
                _add_inner(parts, met, f"{prefix}.{name}", one)


def _saved(entry: Any) -> Stateful:
    """The object, or a wrapper of it that gives a state which a checkpoint can hold."""
    if isinstance(entry, nn.Module):
        return SavedModule(entry)
    return SavedOptimizer(entry) if isinstance(entry, Optimizer) else entry


def checked_objects(to_save: Mapping[str, Any]) -> dict[str, Stateful]:
    """The additional objects that the user saves, by name.

    Raises:
        ValueError: a name is not a string, or contains `[`, or is one that an object of a trainer among them will have.
        TypeError: `to_save` is not a mapping, or an object has no `state_dict` or no `load_state_dict`.
    """
    if not isinstance(to_save, Mapping):
        raise TypeError(
            f"to_save must be a mapping of names to objects with a state_dict, got {describe(to_save)}; the model, its "
            "optimizer and handlers are saved without it"
        )
    for name, entry in to_save.items():
        if not isinstance(name, str) or "[" in name:
            raise ValueError(
                f"to_save must have strings without '[' for names, got {name!r}; they become parts of longer names"
            )
        if not isinstance(entry, Stateful):
            raise TypeError(f"to_save[{name!r}] must have state_dict and load_state_dict, got {describe(entry)}")
        owner = name.partition("/")[0]
        if owner != name and isinstance(to_save.get(owner), Trainer):
            raise ValueError(
                f"to_save must not have {name!r} beside the trainer {owner!r}, whose objects are named so; rename it"
            )
    return dict(to_save)


def checked_names(argument: str, names: Any) -> tuple[str, ...]:
    """The names in an argument.

    Raises:
        TypeError: it is not a sequence of strings.
    """
    found = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (None,)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"{argument} must be a sequence of names such as ('lr',), got {describe(names)}")
    return found


def _check_loads(name: str, optimizer: Optimizer) -> None:
    """Raises TypeError if an optimizer gives a state of a form of its own, which torch's `load_state_dict` does not load."""
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


def _copied_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the script has set; tensors are copied, since a schedule may write into them."""
    options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
    return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in options.items()}
