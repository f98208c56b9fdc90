"""The state of a run as it was read from a checkpoint, and how it is put back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from ignite.metrics import Metric
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.checkpoint.directory import Contents
from ignite_train.checkpoint.fits import EVERY_RANK, Fit, check_module, check_tied
from ignite_train.checkpoint.reader import CheckpointReader, composed_form
from ignite_train.checkpoint.run_objects import (
    PUBLISHED,
    PublishedMetrics,
    RunObjects,
    SavedModule,
    SavedOptimizer,
)
from ignite_train.checkpoint.saved_run import SavedRun
from ignite_train.checkpoint.tree import KeyPath, TensorForm, class_name, decode, tensors_in
from ignite_train.engine.attachable import Stateful
from ignite_train.errors import CheckpointError
from ignite_train.evaluation.load_metric import load_metric
from ignite_train.internals.of_torch import LATEST_RATES, parts_of_schedule, pytree
from ignite_train.model.composed_tensor import ComposedTensor, is_composed
from ignite_train.model.load_schedule import load_schedule
from ignite_train.model.memory_layout import own_memory
from ignite_train.model.optimizers import each_optimizer
from ignite_train.model.random_state import check_generators, restore_random_state, seed_new_rank
from ignite_train.ranks import collectives
from ignite_train.state import Carried, UpdateOutput

__all__ = ["RunState", "check_contents", "names_in", "restore_model"]


class RunState:
    """A state that was read from a checkpoint and checked as a whole, for this rank.

    Reading changes nothing of the run. If another number of ranks wrote it, a rank that did not exist then takes the state of
    rank 0, and other random numbers.

    Args:
        reader: the checkpoint.
        run: the run that resumes.

    Attributes:
        fresh: names of objects that start from the beginning, because the checkpoint has no state that they can take over.
        unused: names of states in the checkpoint that nothing in the run takes.
        changed: what the script sets to other values than the script that wrote the checkpoint, a line each.

    Raises:
        DamagedCheckpointError: the files are not those that were written.
        CheckpointError: it is of another model, optimizer or set of objects; or another number of ranks wrote it, and forward
            carried something on one of them.
    """

    def __init__(self, reader: CheckpointReader, run: SavedRun) -> None:
        self._trainer, self._run = run.trainer, run
        everything, of_all = run.objects(), reader.names(0)
        added = [name for name in everything.handlers() if name in everything.shared and name not in of_all]
        # Older checkpoints lack optimizers in a list of another one.
        added += [name for name, entry in everything.each_optimizer.items() if entry.outer and name not in of_all]
        self._objects = everything.without(added)
        rank, world_size = collectives.rank(), reader.manifest.world_size
        self._is_new = rank >= world_size
        source = 0 if self._is_new else rank
        names = reader.names(source)
        self._are_apart = world_size > 1 and "model" in reader.names(1)
        self._check_differing(reader)
        sources = self._sources(reader, source)
        published = [name for name, entry in self._objects.own.items() if isinstance(entry, PublishedMetrics)]
        self.fresh = [*added, *(name for name in self._objects.own if name not in sources and name not in published)]
        run.begin_schedules(self.fresh)
        self._fit = Fit(
            str(reader.path), run, self._objects, {name: reader.outline(name, rank=rank) for name, rank in sources.items()}
        )
        self._fit.check()
        here = _TensorsHere(self._objects.shared)
        self._states = {
            name: reader.read(name, rank=rank, like=here.like, classes=here.classes)
            for name, rank in sources.items()
            if name != "description"
        }
        for name, module in self._objects.modules.items():
            check_tied(str(reader.path), name, module.state_dict(), self._states[name])
        check_generators(self._states["generators"])
        if "numpy" in self._states["data"].get("opening", {}):  # a loader with a state of its own needs none of them
            check_generators(self._states["data"]["opening"])
        prefixes = ("handlers/", "evaluator/", "to_save/")
        known = {*everything.own, *everything.shared, *everything.trainers, *run.left_out}
        unused = [name for name in names if name.startswith(prefixes) and name not in known]
        self.unused = [name for name in unused if not name.endswith(f"/{PUBLISHED}")]  # what is shown, and not a state
        self._compare_loss_scaling()
        self.changed = self._fit.changes()
        if run.drops_carried:
            self._drop_carried()
        else:
            self._check_carried(reader)

    def restore(self) -> None:
        """Puts everything back: counters, place in the data, and all that `restore_objects` does."""
        with _naming("trainer"):
            self._trainer.load_state_dict(self._states["trainer"])
        if self._are_apart:
            self._trainer.replicas.are_equal = False
        self._trainer.data.load_position(self._states["data"], on_changed_data=self._run.on_changed_data)
        # A handler of STARTED or EPOCH_STARTED may add the groups that an optimizer lacks, so it has its state after them.
        outer = [name for name in self._objects.optimizers if self._fit.missing_groups(name)]
        lacking = [name for name in self._objects.shared if any(name == one or name.startswith(f"{one}.") for one in outer)]
        self._restore_objects(self._objects.without(lacking))

    def restore_objects(self) -> None:
        """Puts back what handlers of STARTED and EPOCH_STARTED may have changed.

        An optimizer gets the parameter groups that a handler has added in the run that was saved, if none has added them here.

        Raises:
            CheckpointError: a handler has added others.
        """
        for name, optimizer in self._objects.optimizers.items():
            groups = self._fit.missing_groups(name)
            saved = self._states[name]["param_groups"][-len(groups) :] if groups else []
            for group, options in zip(groups, copy.deepcopy(saved), strict=True):
                self._thaw(group)
                optimizer.add_param_group({**options, "params": group})
        self._run.note(self._objects)
        self._fit.check_optimizers(self._objects.optimizers)
        self._restore_objects(self._objects)

    def _thaw(self, group: Sequence[nn.Parameter]) -> None:
        """Lets parameters have gradients if they had when the checkpoint was written."""
        frozen, added = self._fit.description["frozen"], {id(parameter) for parameter in group}
        for name, parameter in self._objects.modules["model"].parameters():
            if id(parameter) in added:
                parameter.requires_grad_(name not in frozen)

    def _restore_objects(self, objects: RunObjects) -> None:
        """The generators come last: loading may draw."""
        state, results = self._trainer.state, self._states["results"]
        state.carried.load_state_dict(self._states["trainer"]["carried"])
        for key in self._trainer.state_dict_user_keys:
            setattr(state, key, copy.deepcopy(self._states["trainer"][key]))
        if results["output"]:
            self._trainer.publish(UpdateOutput(**results["output"]))
        for name, entry in {**objects.shared, **objects.own}.items():
            if name in self._states:
                with _naming(name):
                    _load(entry, self._states[name])
        for name, trainer in objects.trainers.items():
            with _naming(name):
                trainer.load_state_dict(copy.deepcopy(self._states[name]))
        self._restore_buffers()
        for name, optimizer in objects.optimizers.items():
            self._let_script_win(name, optimizer)
        restore_random_state(self._states["generators"])
        if self._is_new:
            seed_new_rank(collectives.rank())

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        """Puts back those that this rank has saved."""
        for module, buffers in self._objects.buffers().items() if not self._is_new else ():
            saved = self._states["buffers"].get(module, {})
            for name in (name for name in buffers if name in saved):
                own = own_memory(buffers[name])
                own.copy_(saved[name][tuple(slice(size) for size in own.shape)])

    def _sources(self, reader: CheckpointReader, source: int) -> dict[str, int]:
        """Which rank wrote each state that this one takes: `source`, or rank 0 what is the same on all ranks."""
        objects, names = self._objects, reader.names(source)
        missing = [name for name in (*objects.shared, *objects.trainers) if name not in reader.names(0)]
        if missing:
            raise CheckpointError(
                f"{reader.path} holds no state of {missing[0]!r}; attach the objects that were saved, or start in another "
                "directory"
            )
        # Only as many ranks can read Ignite's metrics: each holds what every rank has counted.
        is_other_number = reader.manifest.world_size != collectives.world_size()
        own = [
            name for name, entry in objects.own.items() if name in names and not (is_other_number and isinstance(entry, Metric))
        ]
        shared = {name: source if name in names else 0 for name in objects.shared}
        return {"description": 0} | shared | dict.fromkeys((*EVERY_RANK, *own, *objects.trainers), source)

    def _let_script_win(self, name: str, optimizer: Optimizer) -> None:
        """Sets the options that the script decides. A restored schedule keeps its shape, over the script's `lr`."""
        decided = self._run.decided(name)
        everyones = self._objects.schedules if "lr" in self._run.script_wins else {}
        schedules = [one for key, one in everyones.items() if one.optimizer is optimizer and key not in self.fresh]
        bases = []
        for group, wins in zip(optimizer.param_groups, copy.deepcopy(decided), strict=True):
            before, rate = group.get("initial_lr", group["lr"]), group["lr"]
            group.update(wins)
            if schedules:
                bases.append(group.get("initial_lr", group["lr"]))
                group["lr"] = rate * (bases[-1] / before) if before else rate  # 0 then and now, or it had been refused
        for schedule in schedules:
            _rescale(schedule, optimizer, bases)
        self._run.continue_with(name, self._fit.description["optimizers"][name])

    def _drop_carried(self) -> None:
        """The run starts without what forward has carried."""
        for name in ("trainer", *self._objects.trainers):
            if _carried(self._states[name]):
                self.unused.append("state.carried" if name == "trainer" else f"state.carried of {name}")
            self._states[name]["carried"] = Carried().state_dict()

    def _compare_loss_scaling(self) -> None:
        """Notes where the loss scaling starts fresh, or is not used; without a state of it, its policy keeps its own."""
        for name, trainer in (("trainer", self._trainer), *self._objects.trainers.items()):
            update, now = self._states[name].get("update"), "loss_scaling" in trainer.config
            if not isinstance(update, dict):
                continue  # which is refused when it is restored
            was = update.get("loss_scaling", {}) != {}
            if self._run.drops_loss_scaling:
                update["loss_scaling"] = {}
            label = "loss_scaling" if name == "trainer" else f"loss_scaling of {name}"
            if was and (not now or self._run.drops_loss_scaling):
                self.unused.append(label)
            elif now and not was:
                self.fresh.append(label)

    def _check_differing(self, reader: CheckpointReader) -> None:
        """State of a shared object that differs between the ranks, so that each has written its own, needs as many ranks.

        Of an average rank 0's is taken, as of the buffers of the model. So are the optimizers inside an outer one, which sees
        itself to it that the replicas are equal.
        """
        world_size = reader.manifest.world_size
        if world_size in (1, collectives.world_size()):
            return
        replicas = {*self._objects.optimizers} if self._trainer.moments.after_update else set()
        free = {*self._objects.handlers(), *replicas}
        # Each rank has written its model where replicas train on their own.
        compared = ["model", *self._objects.compared()]
        differing = [name for name in compared if name in reader.names(1) and name not in free]
        if differing:
            raise CheckpointError(
                f"{reader.path} holds a state of {differing[0]!r} that differs between its {world_size} ranks, and this run "
                f"has {collectives.world_size()}; use {world_size} ranks, or start from its weights with load_weights"
            )

    def _check_carried(self, reader: CheckpointReader) -> None:
        """What forward carried on a rank belongs to the data of that rank, so another number of ranks cannot take it over."""
        world_size = reader.manifest.world_size
        for name in ("trainer", *self._objects.trainers):
            if world_size == collectives.world_size():
                _carried(self._states[name])  # raises if it cannot be restored
                continue
            ranks = [rank for rank in range(world_size) if name in reader.names(rank)]
            keys = [key for rank in ranks for key in _carried(reader.read(name, rank=rank))]
            if keys:
                raise CheckpointError(
                    f"{reader.path} holds what forward carried on each of {world_size} ranks ({keys[0]!r} in state.carried), "
                    f"and this run has {collectives.world_size()}; use {world_size} ranks, or drop it with "
                    'Checkpoint(..., leave_out=("carried",))'
                )


def check_contents(contents: Contents, run: SavedRun) -> None:
    """Reads in memory what this rank would write, by the checks of a resume: what is written must pass what reads it.

    Raises:
        CheckpointError: some state cannot be stored, or would be refused.
    """
    if contents.failure is not None:
        raise contents.failure
    pieces, trees = contents.all_pieces, contents.trees
    if any(key not in pieces for tree in trees.values() for key in tensors_in(tree)) or not collectives.is_main_rank():
        return  # other ranks hold all of some tensor, or write the rest

    def form(key: str, _path: KeyPath) -> TensorForm:
        return TensorForm(pieces[key].whole, pieces[key].data.dtype)

    states = {name: decode(tree, (name,), form, composed_form) for name, tree in trees.items()}
    Fit("what would be written", run, run.objects(), states).check()


def names_in(path: Path) -> set[str]:
    """The names of the objects in a checkpoint."""
    with CheckpointReader(path) as reader:
        return {*reader.names()}


def restore_model(path: Path, model: SavedModule, others: Mapping[str, Stateful]) -> None:
    """Loads the model of a checkpoint, and the objects that it is evaluated with, into those of a run.

    Args:
        path: the checkpoint. Each rank reads its shards.
        model: the model of the run.
        others: these objects, by their names in the checkpoint; often none.

    Raises:
        DamagedCheckpointError: the files are not those that were written; nothing is changed.
        CheckpointError: it is of another model; nothing is changed.
    """
    with CheckpointReader(path) as reader:
        check_module(str(path), "model", model.state_dict(), reader.outline("model"))
        here = _TensorsHere({"model": model, **others})
        saved = {name: reader.read(name, like=here.like, classes=here.classes) for name in ("model", *others)}
    check_tied(str(path), "model", model.state_dict(), saved["model"])
    for name, entry in others.items():
        with _naming(name):
            _load(entry, saved[name])
    model.load_state_dict(saved["model"])


def _carried(trainer_state: Any) -> Carried:
    """What forward has carried in the state of a trainer."""
    result = Carried()
    result.load_state_dict(trainer_state["carried"])
    return result


def _rescale(schedule: LRScheduler, optimizer: Optimizer, bases: Sequence[float]) -> None:
    """Gives a schedule other base rates at its current place; the rates of `optimizer` are multiples of them already."""
    if "base_lrs" in vars(schedule):  # a sequence of schedules has none of its own
        schedule.base_lrs = [*bases[: len(schedule.base_lrs)]]
    vars(schedule)[LATEST_RATES] = [float(group["lr"]) for group in optimizer.param_groups]
    for part in parts_of_schedule(schedule):
        _rescale(part, optimizer, bases)


def _load(entry: Stateful, saved: Any) -> None:
    """Gives it a copy: it may keep it and change it, and the same state may be put back a second time."""
    if isinstance(entry, SavedModule):  # copies the tensors itself
        saved = {key: value if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in saved.items()}
        entry.load_state_dict(saved)
    elif isinstance(entry, SavedOptimizer):
        entry.load_state_dict(_copied(saved))
    elif isinstance(entry, Metric):
        load_metric(entry, copy.deepcopy(saved))
    elif isinstance(entry, LRScheduler):
        load_schedule(entry, copy.deepcopy(saved))
    else:
        entry.load_state_dict(copy.deepcopy(saved))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """In it, an error is a refusal that names the part of the run whose state was to be restored."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{name!r} refuses its state: {type(error).__name__}: {error}") from error


class _TensorsHere:
    """The tensors of this run, found in one walk over the states of objects: a checkpoint's tensors take their form.

    Attributes:
        classes: the classes of tensors made of others that a checkpoint may name: those in the states, by name, and those that
            the package of an optimizer has defined, since its state may not exist before the first step.
    """

    def __init__(self, objects: Mapping[str, Stateful]) -> None:
        self.classes: dict[str, type[ComposedTensor]] = {}
        self._sharded: dict[KeyPath, DTensor] = {}
        packages: set[str] = set()
        for name, entry in objects.items():
            if isinstance(entry, SavedOptimizer):
                optimizer = entry.optimizer
                packages |= {type(one).__module__.partition(".")[0] for one in each_optimizer(optimizer)} - {"torch"}
                parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                # One that has not stepped yet has no moments; they are sharded as their parameters are.
                self._sharded |= {(name, "state", i): p for i, p in enumerate(parameters) if isinstance(p, DTensor)}
            if not (isinstance(entry, SavedOptimizer) and entry.gathers):
                self._collect(entry.state_dict(), (name,))
        for kind in _subclasses(Tensor):
            if kind.__module__.partition(".")[0] in packages and issubclass(kind, ComposedTensor):
                self.classes[class_name(kind)] = kind

    def like(self, path: KeyPath, shape: tuple[int, ...]) -> DTensor | None:
        """See `Like`."""
        found = self._sharded.get(path, self._sharded.get(path[:3]))
        return found if found is not None and tuple(found.shape) == shape else None

    def _collect(self, value: Any, path: KeyPath) -> None:
        entries: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, DTensor):
            self._sharded[path] = value
        elif is_composed(value):
            self.classes[class_name(type(value))] = type(value)
            entries = [(name, getattr(value, name)) for name in value.__tensor_flatten__()[0]]
        elif isinstance(value, Mapping):
            entries = value.items()
        elif isinstance(value, (list, tuple)):
            entries = enumerate(value)
        for key, entry in entries:
            if isinstance(entry, (Tensor, Mapping, list, tuple)):
                self._collect(entry, (*path, key))


def _copied(state: Any) -> Any:
    """A deep copy. Of such tensors their parts are copied, since not every class of them can be cloned."""
    composed = [leaf for leaf in pytree.tree_leaves(state) if is_composed(leaf)]
    return copy.deepcopy(state, {id(leaf): _made_of_copies(leaf) for leaf in composed})


def _made_of_copies(composed: Any) -> Tensor:
    names, context = composed.__tensor_flatten__()
    parts = {name: _copied(getattr(composed, name)) for name in names}
    made: Tensor = type(composed).__tensor_unflatten__(parts, context, composed.shape, composed.stride())
    return made


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    for one in subclasses:
        yield one
        yield from _subclasses(one)
