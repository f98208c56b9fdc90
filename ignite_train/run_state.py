"""What a run is made of: taken apart for a checkpoint, and put together again so that it goes on as if nothing had happened.

Some of it is the same on all ranks, or sharded over them: model, optimizer and what the user adds. The rest is each rank's own:
counters, its place in the data, its random generators, its handlers and the buffers of its model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from ignite.metrics import Metric
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ignite_train import distributed
from ignite_train.arguments import shown
from ignite_train.carried import Carried
from ignite_train.commit import Contents
from ignite_train.dispatch import Stateful
from ignite_train.encoding import Encoder, Path
from ignite_train.engine import Trainer
from ignite_train.errors import CheckpointError
from ignite_train.generators import generator_states, restore_generators
from ignite_train.shards import own_piece
from ignite_train.state import UpdateOutput
from ignite_train.stored import StoredCheckpoint

__all__ = ["RunState", "capture", "checked_objects"]


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
        shared = {**trainer.parts, **{f"to_save/{name}": entry for name, entry in to_save.items()}}
        own = {f"handlers/{name}": entry for name, entry in trainer.stateful.items()}
        known = {id(entry) for entry in (*shared.values(), *own.values())}
        own |= {f"evaluator/{name}": entry for name, entry in evaluator.items() if id(entry) not in known}
        listed = {id(entry) for entry in shared.values()}
        own = {name: entry for name, entry in own.items() if id(entry) not in listed}
        shared = {name: _Module(entry) if isinstance(entry, nn.Module) else entry for name, entry in shared.items()}
        return cls(shared, own)

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
            raise TypeError(f"to_save[{name!r}] must have state_dict and load_state_dict, got {shown(entry)}")
    return dict(to_save)


def capture(trainer: Trainer, to_save: Mapping[str, Stateful], evaluator: Mapping[str, Stateful]) -> Contents:
    """The state of a run at the end of an update or an epoch, as this rank writes it. Tensors are not copied.

    Collective where a `state_dict` is, as those of Ignite's metrics are. State that is no plain value is a failure in what is
    returned, so that all ranks learn of it; its message says where.
    """
    objects, state, encoder = _Objects.of(trainer, to_save, evaluator), trainer.state, Encoder()
    shared = {name: entry.state_dict() for name, entry in objects.shared.items()}
    trees = {name: encoder.encode(value, (name,)) for name, value in shared.items()}
    main = distributed.is_main_rank()
    tensors = {name: own_piece(tensor, everything=main) for name, tensor in encoder.tensors.items()}
    own: dict[str, Any] = {name: entry.state_dict() for name, entry in objects.own.items()}
    own["trainer"], own["data"] = trainer.state_dict(), trainer.data_position()
    own["results"] = {"output": state.output and asdict(state.output), "metrics": state.metrics}
    own["buffers"] = {} if main else dict(objects.model.buffers())
    own["generators"] = generator_states()
    encoder = Encoder()
    try:
        rest = {name: encoder.encode(value, (name,)) for name, value in own.items()}
    except CheckpointError as error:
        return Contents({}, {}, error)
    tensors |= {name: own_piece(tensor, everything=True) for name, tensor in encoder.tensors.items()}
    pieces = {name: piece for name, piece in tensors.items() if piece is not None}
    return Contents(rest | trees if main else rest, pieces)


class RunState:
    """A state that was read from a checkpoint, whole and checked, for this rank.

    Reading changes nothing of the run. With another number of ranks than wrote it, a rank that was not there then takes what
    rank 0 had of its own, and other random numbers.

    Args:
        stored: the checkpoint.
        trainer: the run it is for.
        to_save: the user's objects.
        evaluator: handlers of the evaluator.
        drop_carried: leave out what forward carried from micro-batch to micro-batch; it is empty then.

    Raises:
        DamagedCheckpointError: it is not what was written.
        CheckpointError: it is of another model, optimizer or set of objects; or of another number of ranks, and forward carried
            something on one of them.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        trainer: Trainer,
        to_save: Mapping[str, Stateful],
        evaluator: Mapping[str, Stateful],
        *,
        drop_carried: bool = False,
    ) -> None:
        self._trainer = trainer
        self._objects = _Objects.of(trainer, to_save, evaluator)
        rank, world_size = distributed.rank(), stored.manifest.world_size
        self._is_new = rank >= world_size
        source = 0 if self._is_new else rank
        sharded = _Sharded(self._objects.shared)
        names = stored.names(source)
        missing = [name for name in self._objects.shared if name not in stored.names(0)]
        if missing:
            raise CheckpointError(
                f"{stored.path} holds no state of {missing[0]!r}; attach what it was written with, or begin anew"
            )
        self._shared = {name: stored.read(name, like=sharded.like) for name in self._objects.shared}
        gathered = [] if world_size == distributed.world_size() else self._of_all_ranks()
        own = [*_FIXED, *(name for name in self._objects.own if name in names and name not in gathered)]
        self._own = {name: stored.read(name, rank=source, like=sharded.like) for name in own}
        prefixes = ("handlers/", "evaluator/", "to_save/")
        known = {*self._objects.own, *self._objects.shared}
        self.unused = [name for name in names if name.startswith(prefixes) and name not in known]
        self.fresh = [name for name in self._objects.own if name not in own]
        self._check(str(stored.path))
        self._check_carried(stored, drop=drop_carried)

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
        state.output = results["output"] and UpdateOutput(**results["output"])
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
        restore_generators(self._own["generators"])
        if self._is_new:  # as a function of what is saved and of the rank, so that it is the same each time
            torch.manual_seed(torch.initial_seed() + int(torch.randint(2**40, ())) + distributed.rank())

    def _check(self, path: str) -> None:
        """Sees to it that the model and the optimizers are those that were saved, before any of them is changed."""
        for name in _FIXED:
            if not isinstance(self._own[name], dict):
                raise CheckpointError(f"{path} holds no state of {name!r}, but {shown(self._own[name])}")
        for name, entry in self._objects.shared.items():
            if isinstance(entry, _Module):
                _check_model(path, name, entry.state_dict(), self._shared[name])
            elif isinstance(entry, Optimizer):
                _check_optimizer(path, name, entry, self._shared[name])

    def _check_carried(self, stored: StoredCheckpoint, *, drop: bool) -> None:
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
        elif world_size != distributed.world_size():
            keys = [key for rank in range(world_size) for key in carried(stored.read("trainer", rank=rank))]
            if keys:
                raise CheckpointError(
                    f"{stored.path} holds what forward carried on each of {world_size} ranks ({keys[0]!r} in state.carried), "
                    f"and this run has {distributed.world_size()}; use {world_size} ranks, or drop it with "
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
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

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


def _check_optimizer(path: str, name: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    current = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in saved["param_groups"]]
    if current != found:
        raise CheckpointError(
            f"{path} is of another {name}: its parameter groups have {found} parameters "
            f"and not {current}; build the one that was saved"
        )
    for group, other in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        lacking, foreign = [key for key in group if key not in other], [key for key in other if key not in group]
        if lacking and set(foreign) - {"initial_lr"}:  # options may come with a new version, and a schedule adds its own
            raise CheckpointError(
                f"{path} is of another {name}: it has {foreign[0]!r} and no {lacking[0]!r}; build the one "
                "that was saved, or begin anew"
            )
