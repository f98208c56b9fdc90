"""The objects of a run whose state is saved, by their names, and how a module and an optimizer give their state and take it."""

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
from ignite_train.engine.attachable import Attachable, Stateful
from ignite_train.internals.of_torch import MILESTONES, PARTS, buffers_of, parts_of_schedule, versions_of, with_versions
from ignite_train.model.averaged_tensors import plain_name
from ignite_train.model.in_full import in_full
from ignite_train.model.memory_layout import own_memory
from ignite_train.model.optimizers import each_optimizer
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = [
    "HANDLERS",
    "NOT_OPTIONS",
    "PROGRESS",
    "PUBLISHED",
    "GathersState",
    "PublishedMetrics",
    "RunObjects",
    "SavedModule",
    "SavedOptimizer",
    "has_own_form",
    "plain_options",
    "same_option",
    "schedule_class",
    "schedule_options",
]

HANDLERS = "handlers/"
"""What the name of a handler that is attached to the trainer begins with, in a checkpoint."""
PUBLISHED = "state.metrics"
"""The end of the name of an engine's published metrics, in a checkpoint."""
NOT_OPTIONS = ("params", "param_names")
"""The entries of a parameter group besides its options."""
PROGRESS = {"last_epoch", "base_lrs", "verbose", "T_cur", "T_i", "best", "cooldown_counter", "num_bad_epochs"}
"""Attributes of schedules that a script does not set."""
_PARAMETER = "parameter"  # what stands before the number of one that was a key
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
        return {plain_name(name): value for name, value in self.module.state_dict().items()}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, strict: bool = True, versions: Mapping[str, int] | None = None
    ) -> None:
        """Hands it to the module, which copies parameters and buffers to where its own are.

        Other tensors, such as the states of a metric of torchmetrics, are not copied but replaced, so they are moved before.
        With strict=False a part of the state will do, and the module is handed no more.

        Args:
            state_dict: the state, under plain names.
            strict: whether it must be whole.
            versions: the version of each module's state, by the prefix of its names, so that the module changes an older one as
                with torch's own `load_state_dict`. Without one the state is of the version that the module has now.
        """
        module = self.module
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        copied = {plain_name(name) for name, _ in tensors}
        own, state, known = module.state_dict(), dict[str, Any](), versions or {}
        told = {name: known.get(plain_name(f"{name}.").lstrip("."), version) for name, version in versions_of(own).items()}
        for name, there in own.items():
            plain = plain_name(name)
            if not strict and plain not in state_dict:
                continue
            saved = state_dict[plain]
            is_moved = plain not in copied and isinstance(there, Tensor) and isinstance(saved, Tensor)
            state[name] = saved.to(there.device, copy=True) if is_moved else saved  # the state may be put back once more
        with _writable_buffers(module):
            module.load_state_dict(with_versions(state, told) if told else state, strict=strict)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers in the state."""
        saved = self.module.state_dict()
        return ((plain_name(name), buffer) for name, buffer in self.module.named_buffers() if name in saved)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters; one that has several names is given once for each of them."""
        for name, value in self.module.named_parameters(remove_duplicate=False):
            yield plain_name(name), value


@runtime_checkable
class GathersState(Protocol):
    """An optimizer whose ranks hold a part each, such as `ZeroRedundancyOptimizer`: rank 0 gathers all parts to save them."""

    def consolidate_state_dict(self, to: int) -> None:
        """Gathers the parts on rank `to`. Collective."""


class SavedOptimizer:
    """An optimizer, whose state a checkpoint can hold, and which takes each value back as it was saved.

    The `state_dict` of one that has another inside, as SAM has its base optimizer, lacks the state of that one, which is saved
    by itself.

    Args:
        optimizer: the same.
        outer: the optimizer around it, which loads its own state before; None for an optimizer that the run steps.

    Attributes:
        optimizer: the same.
        outer: the same.
        shares_groups: whether it has the list of groups of `outer`, so that one that is added to either is in both.
        gathers: whether each rank holds a part of its state.
        stepping: the optimizer that steps: one that shards the state over the ranks has another inside.
    """

    def __init__(self, optimizer: Optimizer, outer: Optimizer | None = None) -> None:
        inner = vars(optimizer).get("optim")
        self.optimizer, self.outer, self.gathers = optimizer, outer, isinstance(optimizer, GathersState)
        self.stepping = inner if isinstance(inner, Optimizer) else optimizer
        self.shares_groups = outer is not None and optimizer.param_groups is outer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer. Collective where the ranks divide it among them.

        Where it has a form of its own, and parameters for the keys of a mapping, their numbers are the keys.
        """
        if self.gathers:
            self.optimizer.consolidate_state_dict(0)  # type: ignore[attr-defined]  # see `GathersState`
            return self.optimizer.state_dict() if collectives.is_main_rank() else {}
        state = self.optimizer.state_dict()
        if has_own_form(state):
            numbers = {parameter: (_PARAMETER, number) for number, parameter in enumerate(self._in_groups())}
            state = _with_other_keys(state, numbers)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads such a state, each value as it was saved; tensors where torch puts them.

        torch's `load_state_dict` gives each tensor of the state the dtype of its parameter, which loses bits of moments in
        float32 over weights in bfloat16, and makes other values of strings. An optimizer that overrides `load_state_dict`
        decides itself; what only has been rounded, since it calls torch's, is put back. torch's also makes other objects of
        the state and the groups. Here they stay the same, since an optimizer inside, or a handler, may hold them too.
        """
        each = reversed(each_optimizer(self.optimizer, with_own_state=False))  # the one outside has the last word
        before = [(vars(one), name, vars(one)[name]) for one in each for name in ("state", "param_groups") if name in vars(one)]
        self._load(state_dict)
        for attributes, name, there in before:
            attributes[name] = _refilled(there, attributes[name])

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        optimizer = self.optimizer
        if has_own_form(state_dict):
            by_key = {(_PARAMETER, number): parameter for number, parameter in enumerate(self._in_groups())}
            optimizer.load_state_dict(_with_other_keys(state_dict, by_key))
            return
        optimizer.load_state_dict(dict(state_dict))
        by_torch = type(optimizer).load_state_dict is Optimizer.load_state_dict
        restored = _as_saved if by_torch else _unrounded
        parameters = self._in_groups()
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        if not by_torch and len(keys) != len(parameters):
            return
        for parameter, key in zip(parameters, keys, strict=True):
            saved, loaded = state_dict["state"].get(key), optimizer.state.get(parameter)
            if isinstance(saved, Mapping) and isinstance(loaded, dict):
                for name in saved.keys() & loaded.keys() - {"step"}:  # whose dtype and device depend on the kernel
                    loaded[name] = restored(saved[name], loaded[name], parameter.dtype)

    def _in_groups(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


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
        gathered = {name for name, entry in self.each_optimizer.items() if entry.gathers}
        return [name for name in self.shared if name not in equal | gathered]

    def paths_that_may_differ(self, name: str) -> Iterable[tuple[str, ...]]:
        """Keys in the state of a shared object that are not compared: buffers, which may differ between replicas."""
        entry = self.shared[name]
        if isinstance(entry, SavedModule):
            return [(buffer,) for buffer, _ in entry.buffers()]
        return entry.paths_that_may_differ() if isinstance(entry, Attachable) else ()

    def of(self, one: Any) -> dict[str, Stateful]:
        """The states of a shared object, and of the optimizers inside of it, by their names; none if it has none here."""
        named = {name: entry.optimizer if isinstance(entry, SavedOptimizer) else entry for name, entry in self.shared.items()}
        own = next((name for name, entry in named.items() if entry is one), None)
        return {name: entry for name, entry in self.shared.items() if name == own or name.startswith(f"{own}.")}

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
    def each_optimizer(self) -> dict[str, SavedOptimizer]:
        """The optimizers among them, and those inside them that have a state of their own."""
        return {name: entry for name, entry in self.shared.items() if isinstance(entry, SavedOptimizer)}

    @cached_property
    def optimizers(self) -> dict[str, Optimizer]:
        """The optimizers that the run steps, which are inside of no other optimizer."""
        return {name: entry.optimizer for name, entry in self.each_optimizer.items() if entry.outer is None}

    @property
    def schedules(self) -> dict[str, LRScheduler]:
        """The learning-rate schedules among them."""
        entries = {**self.shared, **self.own}
        found = {name: entry.scheduler if isinstance(entry, _HasSchedule) else entry for name, entry in entries.items()}
        return {name: schedule for name, schedule in found.items() if isinstance(schedule, LRScheduler)}

    def describe(self, options: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> dict[str, Any]:
        """A description that is stored in a checkpoint and compared with it, besides the states.

        Of each optimizer it has the class, without the module, which may be renamed, the parameters, and the options; of each
        schedule the class and those of its parts; and the names of the parameters of the trained model that have no gradients
        now.

        Args:
            options: of the groups of an optimizer, by its name, where others are in effect than it has now.
        """
        names, optimizers = self.parameter_names(), {}
        for name, entry in self.each_optimizer.items():
            optimizer, own = entry.optimizer, type(entry.optimizer).__qualname__
            groups = [group["params"] for group in optimizer.param_groups]
            optimizers[name] = {
                "class": own if entry.stepping is optimizer else f"{own} of {type(entry.stepping).__qualname__}",
                "names": [[names.get(id(parameter), [""])[0] for parameter in group] for group in groups],
                "shapes": [[list(parameter.shape) for parameter in group] for group in groups],
                "dtypes": [[dtype_name(parameter.dtype) for parameter in group] for group in groups],
                "options": (options or {}).get(name) or [*map(plain_options, optimizer.param_groups)],
            }
        schedules = {name: schedule_class(schedule) for name, schedule in self.schedules.items()}
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

    def put_back() -> None:
        for owner, name, buffer, copy in expanded:
            own = own_memory(buffer)
            own.copy_(copy[tuple(slice(size) for size in own.shape)])
            if torch.equal(buffer, copy):
                owner[name] = buffer

    try:
        for owner, name, _, copy in expanded:
            owner[name] = copy
        yield
    finally:
        in_full(put_back)


def _refilled(there: Any, loaded: Any) -> Any:
    """The dictionary, or the list of dictionaries, `there`, with what is in `loaded`."""
    if loaded is there or not isinstance(there, (dict, list)):
        return loaded
    if isinstance(there, list):
        there[:] = [*map(_refilled, there, loaded), *loaded[len(there) :]]
    else:
        entries = dict(loaded)
        there.clear()
        there.update(entries)
    return there


def has_own_form(state_dict: Mapping[str, Any]) -> bool:
    """Whether the state of an optimizer lacks torch's keys, as the state of some wrappers does."""
    return not {"state", "param_groups"} <= state_dict.keys()


def _with_other_keys(value: Any, keys: Mapping[Any, Any]) -> Any:
    """A copy of nested mappings and lists, in which `keys` says what some keys are replaced by."""
    if isinstance(value, Mapping):
        return {keys.get(key, key): _with_other_keys(entry, keys) for key, entry in value.items()}
    return [_with_other_keys(entry, keys) for entry in value] if type(value) is list else value


def _as_saved(saved: Any, loaded: Any, dtype: torch.dtype) -> Any:
    """`saved`, with its tensors on the devices of those in `loaded`."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, Mapping) and isinstance(loaded, Mapping):
        return {key: _as_saved(value, loaded[key], dtype) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return type(saved)(_as_saved(one, other, dtype) for one, other in zip(saved, loaded, strict=True))
    return saved


def _unrounded(saved: Any, loaded: Any, dtype: torch.dtype) -> Any:
    """`loaded`, with the saved tensors in place of those that are nothing but rounded to the dtype of the parameter."""
    if type(saved) is Tensor and type(loaded) is Tensor:
        there = saved.to(loaded.device)
        is_rounded = saved.dtype != loaded.dtype == dtype and saved.shape == loaded.shape
        return there if is_rounded and torch.allclose(there.to(dtype), loaded, rtol=0, atol=0, equal_nan=True) else loaded
    if isinstance(saved, dict) and type(saved) is type(loaded) and saved.keys() == loaded.keys():
        return type(saved)((key, _unrounded(value, loaded[key], dtype)) for key, value in saved.items())
    if type(saved) in (list, tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(saved)(_unrounded(one, other, dtype) for one, other in zip(saved, loaded, strict=True))
    return loaded


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that can be written down and compared."""
    options = {}
    for key, value in group.items():
        plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        plain = list(plain) if isinstance(plain, tuple) else plain
        if key not in NOT_OPTIONS and _is_comparable(plain):
            options[str(key)] = plain
    return options


def schedule_class(schedule: LRScheduler) -> str:
    """Its class, with those of its parts, such as `ChainedScheduler[ExponentialLR, StepLR]`."""
    parts = ", ".join(map(schedule_class, parts_of_schedule(schedule)))
    return type(schedule).__qualname__ + (f"[{parts}]" if parts else "")


def schedule_options(state: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the state of a schedule that a script sets, and those of its parts as `schedulers[0]` and so on.

    The milestones of a `MultiStepLR`, which are the keys of a mapping, become a list.
    """
    options = {
        key: [*value] if isinstance(value, Mapping) else value
        for key, value in state.items()
        if not str(key).startswith("_") and key not in PROGRESS
    }
    milestones, parts = (value if isinstance(value := state.get(key), (list, tuple)) else () for key in (MILESTONES, PARTS))
    options |= {f"milestones[{index}]": value for index, value in enumerate(milestones)}
    for index, part in enumerate(parts):
        options[f"schedulers[{index}]"] = schedule_options(part) if isinstance(part, Mapping) else part
    return options


def same_option(saved: Any, here: Any) -> bool:
    """Whether two values of an option are equal, or cannot be compared: only numbers, strings and lists of these can."""
    return not (_is_comparable(saved) and _is_comparable(here)) or saved == here


def _is_comparable(value: Any) -> bool:
    return all(isinstance(one, _PLAIN) for one in (value if isinstance(value, list) else [value]))
