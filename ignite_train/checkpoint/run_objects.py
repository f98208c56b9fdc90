"""The objects of a run whose state is saved: which there are, and the name of each in a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from ignite.engine import Engine
from ignite.metrics import Metric
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.arguments import describe
from ignite_train.engine.dispatch import Attachable, Stateful, stateful_handlers
from ignite_train.internals.of_torch import buffers_of
from ignite_train.model.memory_layout import own_memory
from ignite_train.model.optimizers import GathersState, InnerState, has_own_form
from ignite_train.trainer import Trainer

__all__ = ["HANDLERS", "PublishedMetrics", "RunObjects", "SavedModule", "SavedRun", "checked_objects"]

HANDLERS = "handlers/"
"""What the name of a handler that is attached to the trainer begins with, in a checkpoint."""


@runtime_checkable
class _KnowsAnEvaluator(Protocol):
    """A handler that runs an evaluator; `Validation` does."""

    evaluator: Engine


@runtime_checkable
class _HasSchedule(Protocol):
    """A handler that steps one of torch's schedules, such as `LearningRateSchedule`."""

    scheduler: Any


class SavedRun:
    """The run that a `Checkpoint` saves.

    Args:
        trainer: its trainer.
        to_save: the user's additional objects, by name.
        evaluator: the evaluator whose handlers are saved too, besides those that handlers of the trainer run.

    Attributes:
        trainers: the other trainers among the user's objects, by their names in a checkpoint.
    """

    def __init__(
        self, trainer: Trainer, to_save: Mapping[str, Stateful] | None = None, evaluator: Engine | None = None
    ) -> None:
        self.trainer, self.to_save, self.evaluator = trainer, to_save or {}, evaluator
        others = ((name, entry) for name, entry in self.to_save.items() if isinstance(entry, Trainer) and entry is not trainer)
        self.trainers = {f"to_save/{name}": entry for name, entry in others}

    @property
    def is_between_updates(self) -> bool:
        """Whether a session of the trainer waits for its next update, and no other trainer is in one: the state is whole."""
        return self.trainer.in_session and not any(entry.is_iterating for entry in (self.trainer, *self.trainers.values()))

    @property
    def evaluators(self) -> list[Engine]:
        """The evaluators that are known: the one that the user named, and those of attached handlers. Each is listed once."""
        found = [] if self.evaluator is None else [self.evaluator]
        for trainer in (self.trainer, *self.trainers.values()):
            for handler in stateful_handlers(trainer).values():
                if isinstance(handler, _KnowsAnEvaluator) and isinstance(handler.evaluator, Engine):
                    found += [] if handler.evaluator in found else [handler.evaluator]
        return found

    @property
    def engines(self) -> list[Engine]:
        """The trainers and the evaluators."""
        return [self.trainer, *self.trainers.values(), *self.evaluators]

    def objects(self) -> RunObjects:
        """All that has a state, besides the trainer itself, as attached by now. An object is listed once."""
        shared: dict[str, Stateful] = dict(self.trainer.parts)
        own: dict[str, Stateful] = {}
        shared |= {f"to_save/{name}": entry for name, entry in self.to_save.items() if not isinstance(entry, Trainer)}
        listed = {id(entry) for entry in shared.values()}

        def add(found: dict[str, Stateful], prefix: str, entries: Mapping[str, Stateful]) -> None:
            for name, entry in entries.items():
                if id(entry) not in listed:
                    listed.add(id(entry))
                    found[prefix + name] = entry

        for prefix, trainer in self.trainers.items():
            add(shared, f"{prefix}/", trainer.parts)
        add(own, HANDLERS, stateful_handlers(self.trainer))
        for prefix, trainer in self.trainers.items():
            add(own, f"{prefix}/{HANDLERS}", stateful_handlers(trainer))
        for number, evaluator in enumerate(self.evaluators, start=1):
            folder = "evaluator" if number == 1 else f"evaluator-{number}"
            handlers = stateful_handlers(evaluator).items()
            # Each evaluation resets its metrics. Not all of Ignite's can be loaded, and only on as many ranks. What they have
            # published is saved.
            add(own, f"{folder}/", {name: entry for name, entry in handlers if not isinstance(entry, Metric)})
            own[f"{folder}/state.metrics"] = PublishedMetrics(evaluator)
        for name, entry in [*own.items()]:
            if isinstance(entry, Attachable) and entry.same_on_all_ranks:
                shared[name] = own.pop(name)
        shared = {name: SavedModule(entry) if isinstance(entry, nn.Module) else entry for name, entry in shared.items()}
        # Replicas that train on their own, and that no handler makes equal, are as many models as there are ranks.
        trained = {"model": self.trainer} | {f"{name}/model": trainer for name, trainer in self.trainers.items()}
        apart = frozenset(n for n, one in trained.items() if not one.replicas.are_equal and not one.moments.after_update)
        return RunObjects(shared, own, self.trainers, apart)

    def refuse_odd_optimizers(self) -> None:
        """Looks at the optimizers before the first batch: what cannot be loaded must not be saved.

        Raises:
            TypeError: an optimizer cannot load the state that it gives.
        """
        for name, entry in self.objects().optimizers.items():
            _check_loads(name, entry)


class PublishedMetrics:
    """What an evaluator has published in `state.metrics`: numbers, tensors, strings, and collections of them."""

    def __init__(self, evaluator: Engine) -> None:
        self._evaluator = evaluator

    def state_dict(self) -> dict[str, Any]:
        """Those that a checkpoint can hold."""
        metrics = self._evaluator.state.metrics
        return {name: value for name, value in metrics.items() if isinstance(name, str) and _is_plain(value)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Publishes them again, as if the evaluator had just run."""
        self._evaluator.state.metrics = dict(state_dict)


class SavedModule:
    """A module, whose state has the same names whether it, or a part of it, is compiled or not."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """The module's."""
        return {_plain(name): value for name, value in self.module.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hands it to the module."""
        with _writable_buffers(self.module):
            self.module.load_state_dict({name: state_dict[_plain(name)] for name in self.module.state_dict()})

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers in the state."""
        saved = self.module.state_dict()
        return ((_plain(name), buffer) for name, buffer in self.module.named_buffers() if name in saved)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters; one that has several names is given once for each of them."""
        return ((_plain(name), value) for name, value in self.module.named_parameters(remove_duplicate=False))


@dataclass(frozen=True, slots=True)
class RunObjects:
    """The objects with a state, by their names in a checkpoint. Those that the user names have a prefix.

    Attributes:
        shared: the same on all ranks, or sharded over them: rank 0 writes what is whole and each rank its shard.
        own: of each rank, and written by each.
        trainers: the other trainers, whose state is of each rank too.
        apart: the trained models that are another one on each rank.
    """

    shared: dict[str, Stateful]
    own: dict[str, Stateful]
    trainers: dict[str, Trainer] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()

    def without(self, names: Collection[str]) -> RunObjects:
        """All but these."""
        shared = {name: entry for name, entry in self.shared.items() if name not in names}
        own = {name: entry for name, entry in self.own.items() if name not in names}
        return RunObjects(shared, own, self.trainers, self.apart)

    def with_whole_states(self) -> dict[str, Stateful]:
        """The shared objects that give their state without asking other ranks, by name."""
        return {name: entry for name, entry in self.shared.items() if not isinstance(entry, GathersState)}

    def compared(self) -> list[str]:
        """The names of the shared objects that should have the same bits on all ranks, or else each rank writes its own.

        An optimizer that gathers its parts on rank 0 is none of them, nor are the trained models, unless they are apart.
        """
        models = {"model", *(f"{name}/model" for name in self.trainers)} - self.apart
        return [name for name, entry in self.shared.items() if name not in models and not isinstance(entry, GathersState)]

    def paths_that_may_differ(self, name: str) -> Iterable[tuple[str, ...]]:
        """Keys in the state of a shared object that are not compared: buffers, which may differ between replicas."""
        entry = self.shared[name]
        if isinstance(entry, SavedModule):
            return [(buffer,) for buffer, _ in entry.buffers()]
        return entry.paths_that_may_differ() if isinstance(entry, Attachable) else ()

    def handlers(self) -> list[str]:
        """The names of the handlers among them."""
        prefixes = (HANDLERS, *(f"{name}/{HANDLERS}" for name in self.trainers))
        return [*self.own, *(name for name in self.shared if name.startswith(prefixes))]

    def buffers(self) -> dict[str, dict[str, torch.Tensor]]:
        """The buffers of the modules, by their names. Those of replicas may differ from rank to rank."""
        return {name: dict(entry.buffers()) for name, entry in self.shared.items() if isinstance(entry, SavedModule)}

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers among them."""
        return {name: entry for name, entry in self.shared.items() if isinstance(entry, Optimizer)}

    @property
    def each_optimizer(self) -> dict[str, Optimizer]:
        """The optimizers, and those inside them that have a state of their own."""
        entries = {name: entry.inner if isinstance(entry, InnerState) else entry for name, entry in self.shared.items()}
        return {name: entry for name, entry in entries.items() if isinstance(entry, Optimizer)}

    @property
    def schedules(self) -> dict[str, LRScheduler]:
        """The learning-rate schedules among them."""
        entries = {**self.shared, **self.own}
        found = {name: entry.scheduler if isinstance(entry, _HasSchedule) else entry for name, entry in entries.items()}
        return {name: schedule for name, schedule in found.items() if isinstance(schedule, LRScheduler)}

    @property
    def model(self) -> SavedModule:
        """The model that is trained."""
        model = self.shared["model"]
        assert isinstance(model, SavedModule)  # noqa: S101  # create_trainer passes a module
        return model

    def frozen_parameters(self) -> list[str]:
        """The names of the parameters of the trained model that have no gradients now."""
        return [name for name, parameter in self.model.parameters() if not parameter.requires_grad]

    def missing_groups(self, name: str, description: Mapping[str, Any]) -> list[list[nn.Parameter]]:
        """The last parameter groups of an optimizer in a checkpoint that it lacks now, as a handler may have added them.

        Args:
            name: of the optimizer.
            description: of it in the checkpoint.

        Returns:
            The parameters of each, which the trained model has and no optimizer steps; nothing unless all can be added.
        """
        if isinstance(self.optimizers[name], GathersState):
            return []
        groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        met, known = {id(parameter) for group in groups for parameter in group["params"]}, dict(self.model.parameters())
        missing: list[list[nn.Parameter]] = []
        for names in description["names"][len(self.optimizers[name].param_groups) :]:
            missing.append([])
            for parameter in (known.get(name) for name in names):
                if parameter is None or id(parameter) in met:
                    return []
                met.add(id(parameter))
                missing[-1].append(parameter)
        return missing

    def parameter_names(self) -> dict[int, list[str]]:
        """All names of each parameter of the modules, by its `id`; those of the trained model come first."""
        names: dict[int, list[str]] = {}
        for name, entry in self.shared.items():
            if isinstance(entry, SavedModule):
                prefix = "" if name == "model" else f"{name}."
                for key, parameter in entry.parameters():
                    names.setdefault(id(parameter), []).append(prefix + key)
        return names


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor, np.ndarray, np.number))


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


def _plain(name: str) -> str:
    """The name of a parameter without what `torch.compile` and activation checkpointing add to it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


@contextmanager
def _writable_buffers(module: nn.Module) -> Iterator[None]:
    """Within it, expanded buffers are copies with memory of their own, since torch loads into no others.

    Afterwards each is the expanded one again with what was loaded, or stays a copy if that differs along what was expanded.
    """
    owners = [held for part in module.modules() if isinstance(held := buffers_of(part), dict)]  # a scripted module has another
    expanded = [
        (owner, name, buffer, buffer.contiguous())
        for owner in owners
        for name, buffer in owner.items()
        if buffer is not None and own_memory(buffer) is not buffer
    ]
    for owner, name, _, copy in expanded:
        owner[name] = copy
    try:
        yield
    finally:
        for owner, name, buffer, copy in expanded:
            own = own_memory(buffer)
            own.copy_(copy[tuple(slice(size) for size in own.shape)])
            if torch.equal(buffer, copy):
                owner[name] = buffer
