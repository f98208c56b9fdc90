"""What a run is made of: taken apart for a checkpoint, and put together again so that it goes on as if nothing had happened.

Some of it is the same on all ranks, or sharded over them: model, optimizer and what the user adds. The rest is each rank's own:
counters, its place in the data, its random generators, its handlers and the buffers of its model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from ignite.metrics import Metric
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ignite_train.arguments import describe, did_you_mean
from ignite_train.carried import Carried
from ignite_train.checkpoint.directory import Contents
from ignite_train.checkpoint.optimizer_state import (
    Consolidates,
    check_optimizer_state,
    check_torch_shape,
    describe_optimizer,
    option_changes,
    script_options,
)
from ignite_train.checkpoint.reader import CheckpointReader, TensorClaim
from ignite_train.checkpoint.schedule_state import (
    check_schedule,
    describe_schedule,
    rescale_schedule,
    schedule_changes,
    schedules_of,
    why_not_rescaled,
)
from ignite_train.checkpoint.shards import own_piece
from ignite_train.checkpoint.tree import Path, TreeEncoder
from ignite_train.errors import CheckpointError
from ignite_train.loop.dispatch import Stateful
from ignite_train.model.random_state import capture_random_state, check_generators, restore_random_state
from ignite_train.ranks import collectives
from ignite_train.state import UpdateOutput
from ignite_train.trainer import Trainer

__all__ = ["RunState", "StateRules", "capture", "checked_objects", "refuse_odd_optimizers"]

_logger = logging.getLogger(__name__)
_FREE_BYTES = 2**28  # what tensors of shapes that only the file knows may take in any case
_MOST_PER_BYTE = 16  # and for each byte that is on the disk: file systems compress, and copies leave out zeros


class _Module:
    """A module, whose state has the same names whether it, or a part of it, is compiled or not."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        """The module's."""
        return {_plain(name): value for name, value in self.module.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hands it to the module."""
        self.module.load_state_dict({name: state_dict[_plain(name)] for name in self.module.state_dict()})

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are part of the state. Those of replicas may differ, if nobody broadcasts them."""
        saved = self.module.state_dict()
        return ((_plain(name), buffer) for name, buffer in self.module.named_buffers() if name in saved)


_FIXED = ("trainer", "data", "results", "buffers", "generators")


@dataclass(frozen=True, slots=True)
class _Objects:
    """All that has a state, besides the trainer itself.

    Attributes:
        shared: by name; of each, rank 0 writes what is whole and each rank its shard.
        own: by name; written by each rank.
    """

    shared: dict[str, Stateful]
    own: dict[str, Stateful]

    @classmethod
    def of(cls, trainer: Trainer, to_save: Mapping[str, Stateful], evaluator: Mapping[str, Stateful]) -> _Objects:
        """Names cannot meet: those of the user have a prefix."""
        shared = {**trainer._stateful_parts, **{f"to_save/{name}": entry for name, entry in to_save.items()}}
        own = {f"handlers/{name}": entry for name, entry in trainer.stateful.items()}
        known = {id(entry) for entry in (*shared.values(), *own.values())}
        own |= {f"evaluator/{name}": entry for name, entry in evaluator.items() if id(entry) not in known}
        listed = {id(entry) for entry in shared.values()}
        own = {name: entry for name, entry in own.items() if id(entry) not in listed}
        shared = {name: _Module(entry) if isinstance(entry, nn.Module) else entry for name, entry in shared.items()}
        return cls(shared, own)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """Those that are saved, by name."""
        return {name: entry for name, entry in self.shared.items() if isinstance(entry, Optimizer)}

    def parameter_names(self) -> dict[int, list[str]]:
        """All names of each parameter of the modules that are saved, by its `id`; those of the trained model come first."""
        names: dict[int, list[str]] = {}
        for name, entry in self.shared.items():
            if isinstance(entry, _Module):
                prefix = "" if name == "model" else f"{name}."
                for key, parameter in entry.module.named_parameters(remove_duplicate=False):
                    names.setdefault(id(parameter), []).append(prefix + _plain(key))
        return names

    @property
    def model(self) -> _Module:
        """The one that is trained."""
        model = self.shared["model"]
        assert isinstance(model, _Module)  # noqa: S101  # create_trainer sees to it
        return model


def checked_objects(to_save: Mapping[str, Any]) -> dict[str, Stateful]:
    """What the user adds to a checkpoint, by name.

    Raises:
        ValueError: a name is none.
        TypeError: something has no state.
    """
    for name, entry in to_save.items():
        if not isinstance(name, str) or "[" in name:
            raise ValueError(
                f"to_save must have strings without '[' for names, got {name!r}; they become parts of longer names"
            )
        if not isinstance(entry, Stateful):
            raise TypeError(f"to_save[{name!r}] must have state_dict and load_state_dict, got {describe(entry)}")
    return dict(to_save)


def refuse_odd_optimizers(trainer: Trainer, to_save: Mapping[str, Stateful]) -> None:
    """Looks at what the optimizers would save, before the first batch: what cannot be checked later must not be written.

    Raises:
        TypeError: the state of one is not of torch's shape.
    """
    for name, entry in _Objects.of(trainer, to_save, {}).optimizers.items():
        check_torch_shape(name, entry)


_CARRIED = "carried"  # in `leave_out`: what forward has carried on each rank, in `state.carried`


class StateRules:
    """What a `Checkpoint` was told about the state that it saves and reads, and what it knows of the script.

    Args:
        leave_out: names of attached handlers whose state is neither saved nor read. "carried" drops what forward has carried.
        script_wins: options of the optimizer that keep the script's value when a run is resumed.

    Raises:
        TypeError: one of them is not a sequence of strings.
    """

    def __init__(self, leave_out: Iterable[str] = (), script_wins: Iterable[str] = ()) -> None:
        self.leave_out, self.script_wins = _names("leave_out", leave_out), _names("script_wins", script_wins)
        self._script: dict[str, list[dict[str, Any]]] = {}  # options of each optimizer, as the script has set them
        self._in_effect: dict[str, list[dict[str, Any]]] = {}  # the same, but for what an older checkpoint decided
        self._warned: set[str] = set()

    def begin(
        self,
        trainer: Trainer,
        to_save: Mapping[str, Stateful],
        evaluator: Mapping[str, Stateful],
        holders: Iterable[str] = (),
    ) -> None:
        """Notes what the script has set, once, and refuses names that nothing has. Before anything is read or trained.

        Args:
            trainer: of the run.
            to_save: the user's objects.
            evaluator: handlers of the evaluator.
            holders: names of handlers without a `state_dict` that a warning may name.

        Raises:
            ValueError: `leave_out` or `script_wins` name what is not there.
        """
        objects = _Objects.of(trainer, to_save, evaluator)
        self._note(objects)
        handlers = sorted({name.partition("/")[2] for name in objects.own} | {*holders, _CARRIED})
        options = sorted({key for groups in self._script.values() for group in groups for key in group})
        for argument, given, known, what in (
            ("leave_out", self.leave_out, handlers, f"{_CARRIED!r} or attached handlers that have a state"),
            ("script_wins", self.script_wins, options, "options of the optimizer"),
        ):
            for name in given:
                if name not in known:
                    raise ValueError(f"{argument} must name {what}, any of {known}, got {name!r}{did_you_mean(name, known)}")

    def keep(self, objects: _Objects) -> _Objects:
        """All objects without those that the user leaves out."""
        own = {name: entry for name, entry in objects.own.items() if name.partition("/")[2] not in self.leave_out}
        return _Objects(objects.shared, own)

    def describe(self, objects: _Objects) -> dict[str, Any]:
        """What a checkpoint keeps beside the state, so that the next run can compare."""
        self._note(objects)
        names = objects.parameter_names()
        optimizers = {
            name: describe_optimizer(optimizer, names, self._in_effect[name]) for name, optimizer in objects.optimizers.items()
        }
        schedules = schedules_of({**objects.shared, **objects.own})
        return {
            "optimizers": optimizers,
            "schedules": {name: describe_schedule(schedule) for name, schedule in schedules.items()},
        }

    def decided(self, name: str) -> list[dict[str, Any]]:
        """The options of each group of an optimizer that the script decides."""
        wins = {*self.script_wins, *(["initial_lr"] if "lr" in self.script_wins else [])}
        return [{key: value for key, value in group.items() if key in wins} for group in self._script[name]]

    def changes(self, name: str, description: Any) -> list[str]:
        """What the script sets in another way than the one that wrote a checkpoint."""
        return option_changes(name, description, self._script[name], self.script_wins)

    def go_on_with(self, name: str, description: Any) -> None:
        """Notes that the options of the checkpoint are in effect, but for those that the script decides."""
        if isinstance(description, Mapping):
            decided = self.decided(name)
            pairs = zip(self._script[name], description["options"], decided, strict=True)
            self._in_effect[name] = [{**script, **saved, **wins} for script, saved, wins in pairs]

    def warn_left_out(self, name: str, error: Exception) -> None:
        """Says once what no checkpoint will hold, and how to be silent about it."""
        if name not in self._warned:
            self._warned.add(name)
            reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            _logger.warning(
                f"{name} is left out of the checkpoints, so a resumed run starts without its state: "
                f"{' '.join(reason.split()):.300}; "
                f"Checkpoint(..., leave_out=({name.partition('/')[2]!r},)) leaves it out without this warning"
            )

    def _note(self, objects: _Objects) -> None:
        for name, optimizer in objects.optimizers.items():
            if name not in self._script:
                self._script[name] = self._in_effect[name] = script_options(optimizer)


def _names(argument: str, names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable) or not all(isinstance(name, str) for name in (*names,)):
        raise TypeError(f"{argument} must be a sequence of names such as ('lr',), got {describe(names)}")
    return tuple(names)


def capture(
    trainer: Trainer,
    to_save: Mapping[str, Stateful],
    evaluator: Mapping[str, Stateful],
    rules: StateRules | None = None,
) -> Contents:
    """The state of a run at the end of an update or an epoch, as this rank writes it. Tensors are not copied.

    Collective where a `state_dict` is, as those of Ignite's metrics are. State that is no plain value is a failure in what is
    returned, so that all ranks learn of it; its message says where. Only a handler that cannot be stored is left out, with a
    warning.
    """
    rules = rules or StateRules()
    objects, encoder, main = rules.keep(_Objects.of(trainer, to_save, evaluator)), TreeEncoder(), collectives.is_main_rank()
    shared = {name: _state_of(entry, main=main) for name, entry in objects.shared.items()}
    try:
        trees = {name: encoder.encode(value, (name,)) for name, value in shared.items()}
        trees["description"] = encoder.encode(rules.describe(objects), ("description",))
        tensors = {name: own_piece(tensor, everything=main) for name, tensor in encoder.tensors.items()}
        encoder = TreeEncoder()
        own = {name: encoder.encode(value, (name,)) for name, value in _own_state(trainer, objects, main=main).items()}
    except CheckpointError as error:
        return Contents({}, {}, error)
    own |= _handlers(objects, encoder, rules)
    tensors |= {name: own_piece(tensor, everything=True) for name, tensor in encoder.tensors.items()}
    pieces = {name: piece for name, piece in tensors.items() if piece is not None}
    return Contents(own | trees if main else own, pieces)


def _state_of(entry: Stateful, *, main: bool) -> Any:
    """The state of an object that all ranks have alike. Collective for an optimizer that shards it over the ranks."""
    if isinstance(entry, Optimizer) and isinstance(entry, Consolidates):
        entry.consolidate_state_dict(0)
        return entry.state_dict() if main else {}
    return entry.state_dict()


def _own_state(trainer: Trainer, objects: _Objects, *, main: bool) -> dict[str, Any]:
    """What each rank has of its own, besides its handlers."""
    state = trainer.state
    return {
        "trainer": trainer.state_dict(),
        "data": trainer.data_position(),
        "results": {"output": state.update_output and asdict(state.update_output), "metrics": state.metrics},
        "buffers": {} if main else dict(objects.model.buffers()),
        "generators": capture_random_state(),
    }


def _handlers(objects: _Objects, encoder: TreeEncoder, rules: StateRules) -> dict[str, Any]:
    """The trees of the handlers, without those that cannot be stored."""
    trees = {}
    for name, entry in objects.own.items():
        try:
            trees[name] = encoder.encode_whole(entry.state_dict(), (name,))
        except Exception as error:  # whatever a handler raises: what it holds is not worth the run
            rules.warn_left_out(name, error)
    return trees


class RunState:
    """A state that was read from a checkpoint, whole and checked, for this rank.

    Reading changes nothing of the run. With another number of ranks than wrote it, a rank that was not there then takes what
    rank 0 had of its own, and other random numbers.

    Args:
        stored: the checkpoint.
        trainer: the run it is for.
        to_save: the user's objects.
        evaluator: handlers of the evaluator.

    Raises:
        DamagedCheckpointError: it is not what was written.
        CheckpointError: it is of another model, optimizer or set of objects; or of another number of ranks, and forward carried
            something on one of them.
    """

    def __init__(
        self,
        stored: CheckpointReader,
        trainer: Trainer,
        to_save: Mapping[str, Stateful],
        evaluator: Mapping[str, Stateful],
        rules: StateRules | None = None,
    ) -> None:
        self._trainer, self._rules = trainer, rules or StateRules()
        everything = _Objects.of(trainer, to_save, evaluator)
        self._objects = self._rules.keep(everything)
        rank, world_size = collectives.rank(), stored.manifest.world_size
        self._is_new = rank >= world_size
        source = 0 if self._is_new else rank
        names = stored.names(source)
        missing = [name for name in self._objects.shared if name not in stored.names(0)]
        if missing:
            raise CheckpointError(
                f"{stored.path} holds no state of {missing[0]!r}; attach what it was written with, or begin anew"
            )
        gathered = [] if world_size == collectives.world_size() else self._of_all_ranks()
        own = [*_FIXED, *(name for name in self._objects.own if name in names and name not in gathered)]
        shared_claims = {name: stored.outline(name) for name in self._objects.shared}
        own_claims = {name: stored.outline(name, rank=source) for name in own}
        self._description = stored.outline("description") if "description" in stored.names(0) else {}
        self._check(str(stored.path), shared_claims, own_claims)
        self._check_size(stored, {**shared_claims, **own_claims})
        sharded = _Sharded(self._objects.shared)
        self._shared = {name: stored.read(name, like=sharded.like) for name in self._objects.shared}
        self._own = {name: stored.read(name, rank=source, like=sharded.like) for name in own}
        check_generators(self._own["generators"])
        if "numpy" in self._own["data"].get("opening", {}):  # a loader with a state of its own needs none of them
            check_generators(self._own["data"]["opening"])
        prefixes = ("handlers/", "evaluator/", "to_save/")
        known = {*everything.own, *self._objects.shared}
        self.unused = [name for name in names if name.startswith(prefixes) and name not in known]
        self.fresh = [name for name in self._objects.own if name not in own]
        self._check_carried(stored, drop=_CARRIED in self._rules.leave_out)

    def restore(self) -> None:
        """Puts everything back: counters, place in the data, and all of `restore_objects`."""
        self._trainer.load_state_dict(self._own["trainer"])
        self._trainer.load_data_position(self._own["data"])
        self.restore_objects()

    def restore_objects(self) -> None:
        """Puts back what handlers of STARTED and EPOCH_STARTED may have touched. The generators come last: loading may draw."""
        state, results = self._trainer.state, self._own["results"]
        state.carried.load_state_dict(self._own["trainer"].get("carried", Carried().state_dict()))
        for key in self._trainer.state_dict_user_keys:
            setattr(state, key, copy.deepcopy(self._own["trainer"][key]))
        if results["output"]:
            self._trainer._publish(UpdateOutput(**results["output"]))
        state.metrics = copy.deepcopy(results["metrics"])
        for name, entry in self._objects.shared.items():
            _load(entry, self._shared[name])
        for name, entry in self._objects.own.items():
            if name in self._own:
                _load(entry, self._own[name])
        with torch.no_grad():
            for name, buffer in self._objects.model.buffers():
                if name in self._own["buffers"] and not self._is_new:
                    buffer.copy_(self._own["buffers"][name])
        for name, optimizer in self._objects.optimizers.items():
            self._let_script_win(name, optimizer)
        restore_random_state(self._own["generators"])
        if self._is_new:  # as a function of what is saved and of the rank, so that it is the same each time
            torch.manual_seed(torch.initial_seed() + int(torch.randint(2**40, ())) + collectives.rank())

    def _check(self, path: str, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Sees to it that the state is of this run, before memory is asked for and before anything is changed.

        Args:
            path: of the checkpoint.
            shared: what it says of the shared objects, with a `TensorClaim` for each tensor.
            own: and of those of this rank.
        """
        for name in _FIXED:
            if not isinstance(own[name], dict):
                raise CheckpointError(f"{path} holds no state of {name!r}, but {describe(own[name])}")
        names = self._objects.parameter_names()
        for name, entry in self._objects.shared.items():
            if isinstance(entry, _Module):
                _check_model(path, name, entry.state_dict(), shared[name])
            elif isinstance(entry, Optimizer):
                described, options = self._described("optimizers", name), self._rules.decided(name)
                check_optimizer_state(path, name, entry, shared[name], described, names, options)
        for name, schedule in schedules_of({**self._objects.shared, **self._objects.own}).items():
            saved = {**shared, **own}.get(name)
            if saved is not None:
                check_schedule(path, name, schedule, saved, self._described("schedules", name))
            if "lr" in self._rules.script_wins and saved is not None and (reason := why_not_rescaled(schedule)):
                raise CheckpointError(
                    f"script_wins must not name 'lr' where {name!r} is restored: {reason}; restart it with "
                    f"leave_out=({name.partition('/')[2]!r},), or let the checkpoint win"
                )
        _check_own(path, own, dict(self._objects.model.buffers()))

    def _check_size(self, stored: CheckpointReader, claims: Mapping[str, Any]) -> None:
        """Limits what is allocated for tensors whose shape only the checkpoint knows: not much more than is on the disk."""
        known = {
            tuple(parameter.shape)
            for optimizer in self._objects.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        unknown: dict[tuple[str, str], int] = {}
        for name, value in claims.items():
            entry = self._objects.shared.get(name)
            if not isinstance(entry, _Module):
                for claim in _claims(value):
                    if not isinstance(entry, Optimizer) or claim.shape not in known:
                        unknown[name, claim.key] = claim.num_bytes
        total, on_disk = sum(unknown.values()), stored.bytes_on_disk
        if total > max(_FREE_BYTES, _MOST_PER_BYTE * on_disk):
            name, _ = max(unknown, key=unknown.__getitem__)
            raise CheckpointError(
                f"{stored.path} claims {total} bytes of tensors that the model does not need, most of them for {name!r}, and "
                f"takes {on_disk} bytes on the disk; copy it without holes, or leave that out"
            )

    def _let_script_win(self, name: str, optimizer: Optimizer) -> None:
        """Sets the options that the script decides. A restored schedule keeps its shape, over the script's `lr`."""
        decided = self._rules.decided(name)
        schedules = [schedule for schedule in self._schedules(optimizer).values() if "lr" in self._rules.script_wins]
        bases = []
        for group, wins in zip(optimizer.param_groups, copy.deepcopy(decided), strict=True):
            before, rate = group.get("initial_lr", group["lr"]), group["lr"]
            group.update({key: value for key, value in wins.items() if key in group})
            if schedules:
                bases.append(group.get("initial_lr", group["lr"]))
                group["lr"] = rate * (bases[-1] / before)
        for schedule in schedules:
            rescale_schedule(schedule, optimizer, bases)
        self._rules.go_on_with(name, self._described("optimizers", name))

    def _schedules(self, optimizer: Optimizer) -> dict[str, Any]:
        """The schedules of an optimizer whose state comes out of the checkpoint, by name."""
        entries = {name: entry for name, entry in self._objects.own.items() if name not in self.fresh}
        found = schedules_of({**self._objects.shared, **entries})
        return {name: schedule for name, schedule in found.items() if schedule.optimizer is optimizer}

    def _described(self, kind: str, name: str) -> Any:
        return self._description.get(kind, {}).get(name)

    @property
    def changed(self) -> list[str]:
        """What the script sets in another way than the one that wrote the checkpoint, a line each."""
        lines = [
            line for name in self._objects.optimizers for line in self._rules.changes(name, self._described("optimizers", name))
        ]
        for name, schedule in schedules_of({**self._objects.shared, **self._objects.own}).items():
            lines += schedule_changes(name, schedule, self._described("schedules", name))
        return lines

    def _check_carried(self, stored: CheckpointReader, *, drop: bool) -> None:
        """What forward carried on a rank belongs to the data of that rank, so another number of ranks cannot take it over."""

        def carried(trainer_state: Any) -> Carried:
            result = Carried()
            if "carried" in trainer_state:  # earlier versions had none
                result.load_state_dict(trainer_state["carried"])
            return result

        world_size = stored.manifest.world_size
        if drop:
            if carried(self._own["trainer"]):
                self.unused.append("state.carried")
            self._own["trainer"].pop("carried", None)
        elif world_size != collectives.world_size():
            keys = [key for rank in range(world_size) for key in carried(stored.read("trainer", rank=rank))]
            if keys:
                raise CheckpointError(
                    f"{stored.path} holds what forward carried on each of {world_size} ranks ({keys[0]!r} in state.carried), "
                    f"and this run has {collectives.world_size()}; use {world_size} ranks, or drop it with "
                    'Checkpoint(..., leave_out=("carried",))'
                )
        else:
            carried(self._own["trainer"])

    def _of_all_ranks(self) -> list[str]:
        """What only as many ranks as wrote it can read: each of Ignite's metrics holds what every rank has counted."""
        return [name for name, entry in self._objects.own.items() if isinstance(entry, Metric)]


def _plain(name: str) -> str:
    """The name of a parameter without what `torch.compile` puts in it."""
    return name.replace("_orig_mod.", "")


def _load(entry: Stateful, saved: Any) -> None:
    """Gives most a copy: they may keep what they are given, and change it before it is given once more."""
    entry.load_state_dict(saved if isinstance(entry, _Module) else copy.deepcopy(saved))


class _Sharded:
    """The sharded tensors of this rank, by where their values stand in a checkpoint."""

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        self._tensors: dict[Path, DTensor] = {}
        self._parameters: dict[Path, DTensor] = {}
        for name, entry in objects.items():
            if not isinstance(entry, Consolidates):
                self._collect(entry.state_dict(), (name,))
            if isinstance(entry, Optimizer):
                parameters = [parameter for group in entry.param_groups for parameter in group["params"]]
                sharded = {(name, "state", i): p for i, p in enumerate(parameters) if isinstance(p, DTensor)}
                self._parameters |= sharded

    def like(self, path: Path, shape: tuple[int, ...]) -> DTensor | None:
        """See `Like`. An optimizer that has not stepped yet has no moments; they are sharded as their parameters are."""
        found = self._tensors.get(path, self._parameters.get(path[:3]))
        return found if found is not None and tuple(found.shape) == shape else None

    def _collect(self, value: Any, path: Path) -> None:
        if isinstance(value, DTensor):
            self._tensors[path] = value
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                self._collect(entry, (*path, key))


def _check_model(path: str, name: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    def shape(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, (torch.Tensor, TensorClaim)) else None

    wrong = [f"{key!r} is missing" for key in current if key not in saved]
    wrong += [f"{key!r} is not in the {name}" for key in saved if key not in current]
    both = [key for key in current if key in saved]
    wrong += [
        f"{key!r} has the shape {shape(saved[key])} and not {shape(current[key])}"
        for key in both
        if shape(saved[key]) != shape(current[key])
    ]
    wrong += [
        f"{key!r} is {saved[key].dtype} and not {current[key].dtype}"
        for key in both
        if shape(saved[key]) == shape(current[key]) is not None and saved[key].dtype != current[key].dtype
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{path} is of another {name}: {', '.join(wrong[:3])}{more}; build the {name} that was saved")


def _check_own(path: str, own: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> None:
    """Looks at what a rank has of its own, as far as it would be taken over without a look."""
    saved = {name: own["buffers"][name] for name in buffers if name in own["buffers"]}
    _check_model(path, "model", {name: buffers[name] for name in saved}, saved)
    output, metrics = own["results"].get("output"), own["results"].get("metrics")
    known = {field.name for field in fields(UpdateOutput)}
    if not isinstance(metrics, dict) or not (output is None or (isinstance(output, dict) and set(output) == known)):
        raise CheckpointError(f"{path} holds no results of an update, but {describe(own['results'])}")


def _claims(value: Any) -> Iterator[TensorClaim]:
    """The tensors in a nested state."""
    if isinstance(value, TensorClaim):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _claims(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _claims(entry)
