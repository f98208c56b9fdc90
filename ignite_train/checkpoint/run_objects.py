"""The objects of a run whose state is saved: which there are, and the name of each in a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.checkpoint.tree import dtype_name
from ignite_train.engine.dispatch import Attachable, Stateful
from ignite_train.internals.of_torch import buffers_of
from ignite_train.model.memory_layout import own_memory
from ignite_train.model.optimizers import GathersState, InnerState
from ignite_train.trainer import Trainer

__all__ = [
    "HANDLERS",
    "NOT_OPTIONS",
    "PROGRESS",
    "PUBLISHED",
    "PublishedMetrics",
    "RunObjects",
    "SavedModule",
    "plain_options",
    "schedule_options",
    "stepping_part",
]

HANDLERS = "handlers/"
"""What the name of a handler that is attached to the trainer begins with, in a checkpoint."""
PUBLISHED = "state.metrics"
"""The end of the name of an engine's published metrics, in a checkpoint."""
NOT_OPTIONS = ("params", "param_names")
"""The entries of a parameter group besides its options."""
PROGRESS = {"last_epoch", "base_lrs", "verbose", "T_cur", "T_i", "best", "cooldown_counter", "num_bad_epochs"}
"""Attributes of schedules that a script does not set."""
_PLAIN = (type(None), bool, int, float, str)


@runtime_checkable
class _HasSchedule(Protocol):
    """A handler that steps one of torch's schedules, such as `LearningRateSchedule`."""

    scheduler: Any


class PublishedMetrics:
    """The values that handlers have published in the `state.metrics` of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[Any, Any]:
        """All of them. A checkpoint leaves out what it cannot hold."""
        return self._engine.state.metrics

    def load_state_dict(self, state_dict: Mapping[Any, Any]) -> None:
        """Publishes them again, as if the engine had just run."""
        self._engine.state.metrics = dict(state_dict)


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

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers in the state."""
        saved = self.module.state_dict()
        return ((_plain(name), buffer) for name, buffer in self.module.named_buffers() if name in saved)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters; one that has several names is given once for each of them."""
        for name, value in self.module.named_parameters(remove_duplicate=False):
            yield _plain(name), value


@dataclass(frozen=True)
class RunObjects:
    """The objects with a state, by their names in a checkpoint. Those that the user names have a prefix.

    Attributes:
        shared: the same on all ranks, or sharded over them: rank 0 writes what is whole and each rank its shard.
        own: of each rank, and written by each.
        trainer: the trainer of the run.
        trainers: the other trainers, whose state is of each rank too.
    """

    shared: dict[str, Stateful]
    own: dict[str, Stateful]
    trainer: Trainer
    trainers: dict[str, Trainer]

    def without(self, names: Collection[str]) -> RunObjects:
        """All but these."""
        shared = {name: entry for name, entry in self.shared.items() if name not in names}
        own = {name: entry for name, entry in self.own.items() if name not in names}
        return RunObjects(shared, own, self.trainer, self.trainers)

    def compared(self) -> list[str]:
        """The names of the shared objects that should have the same bits on all ranks, or else each rank writes its own.

        An optimizer that gathers its parts on rank 0 is none of them, nor are the trained models, unless the replicas train on
        their own and no handler makes them equal: then they are as many models as there are ranks.
        """
        trained = {"model": self.trainer} | {f"{name}/model": trainer for name, trainer in self.trainers.items()}
        equal = {name for name, one in trained.items() if one.replicas.are_equal or one.moments.after_update}
        return [name for name, entry in self.shared.items() if name not in equal and not isinstance(entry, GathersState)]

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

    @cached_property
    def modules(self) -> dict[str, SavedModule]:
        """The modules among them; that of the trained model is always there."""
        return {name: entry for name, entry in self.shared.items() if isinstance(entry, SavedModule)}

    def buffers(self) -> dict[str, dict[str, Tensor]]:
        """The buffers of the modules, by their names. Those of replicas may differ from rank to rank."""
        return {name: dict(module.buffers()) for name, module in self.modules.items()}

    @cached_property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers among them."""
        return {name: entry for name, entry in self.shared.items() if isinstance(entry, Optimizer)}

    @cached_property
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

    def describe(self, options: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> dict[str, Any]:
        """A description that is stored in a checkpoint and compared with it, besides the states.

        Of each optimizer it has the class, without the module, which may be renamed, the parameters, and the options; of each
        schedule the class and the options; and the names of the parameters of the trained model that have no gradients now.

        Args:
            options: of the groups of an optimizer, by its name, where others are in effect than it has now.
        """
        names, optimizers = self.parameter_names(), {}
        for name, optimizer in self.each_optimizer.items():
            inner, own = stepping_part(optimizer), type(optimizer).__qualname__
            groups = [group["params"] for group in optimizer.param_groups]
            optimizers[name] = {
                "class": own if inner is optimizer else f"{own} of {type(inner).__qualname__}",
                "names": [[names.get(id(parameter), [""])[0] for parameter in group] for group in groups],
                "shapes": [[list(parameter.shape) for parameter in group] for group in groups],
                "dtypes": [[dtype_name(parameter.dtype) for parameter in group] for group in groups],
                "options": (options or {}).get(name) or [*map(plain_options, optimizer.param_groups)],
            }
        schedules = {
            name: {"class": type(schedule).__qualname__, "options": schedule_options(schedule.state_dict())}
            for name, schedule in self.schedules.items()
        }
        frozen = [name for name, parameter in self.modules["model"].parameters() if not parameter.requires_grad]
        return {"optimizers": optimizers, "schedules": schedules, "frozen": frozen}

    def parameter_names(self) -> dict[int, list[str]]:
        """All names of each parameter of the modules, by its `id`; those of the trained model come first."""
        names: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            prefix = "" if name == "model" else f"{name}."
            for key, parameter in module.parameters():
                names.setdefault(id(parameter), []).append(prefix + key)
        return names


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
        if key not in NOT_OPTIONS and (isinstance(plain, _PLAIN) or (isinstance(plain, list) and all(map(_is_plain, plain)))):
            options[str(key)] = plain
    return options


def schedule_options(state: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the state of a schedule that a script sets, if they are plain values."""
    return {key: value for key, value in state.items() if not key.startswith("_") and key not in PROGRESS and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)
