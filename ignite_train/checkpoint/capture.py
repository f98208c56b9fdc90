"""Taking the state of a run apart for a checkpoint.

Some of it is the same on all ranks, or sharded over them: model, optimizer and the user's additional objects. Rank 0 writes
it, but where the ranks hold different bits, as those of a distributed optimizer do, each writes its own. The rest belongs to
each rank: counters, its place in the data, its random generators, its handlers and the buffers of its modules. `HeldState`
looks for what no checkpoint keeps: tensors of handlers that training changes, such as an average of the weights, and schedules
that they step.
"""

from __future__ import annotations

import gc
import inspect
import logging
import platform
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
from typing import Any

import ignite
import numpy as np
import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.checkpoint.directory import Contents
from ignite_train.checkpoint.manifest import compact_json, frozen_name
from ignite_train.checkpoint.run_objects import PublishedMetrics, RunObjects
from ignite_train.checkpoint.saved_run import SavedRun
from ignite_train.checkpoint.tensor_files import Piece, local_box
from ignite_train.checkpoint.tree import TreeEncoder, path_name, tensors_in
from ignite_train.engine.attachable import Attachable, Stateful, numbered_name, owner_of
from ignite_train.engine.dispatch import attachables, attached
from ignite_train.errors import CheckpointError
from ignite_train.internals.of_torch import parts_of_schedule, version_of
from ignite_train.model.composed_tensor import is_composed
from ignite_train.model.memory_layout import local_part
from ignite_train.model.objects_used import variables_around
from ignite_train.model.random_state import capture_random_state, restore_random_state
from ignite_train.model.tensor_digests import content_digest, tensor_digests
from ignite_train.ranks import collectives
from ignite_train.ranks.root_mesh import is_first_holder
from ignite_train.ranks.whereabouts import COLLECTOR, PAUSED
from ignite_train.trainer import Trainer

__all__ = ["HeldState", "capture", "own_piece", "paused_collection", "plain_config", "run_config", "versions"]

_logger = logging.getLogger(__name__)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of an object: another one in each process
_EMPTY: dict[str, list[Any]] = {"dict": []}  # the tree of an empty state_dict
_MOST_SCHEDULES = 100  # entries of a list or dict that are looked at
_NO_STATE = ("ignite_train.", "ignite.handlers.time_profilers")
"""Modules of classes whose tensors need not be stored: our own handlers, and what measures this process."""


def capture(run: SavedRun, held: HeldState | None = None) -> Contents:
    """The state of a run at the end of an update or an epoch, as this rank writes it. Tensors are not copied.

    Collective: the ranks compare what they share. State that cannot be stored is a failure in the
    result, so that all ranks learn of it; its message says where it is. A handler that cannot be stored is left out, with a
    warning. A `state_dict` that draws random numbers, as that of torchdata's loader does between two passes, leaves no trace.

    Args:
        run: the run.
        held: warns of state that no checkpoint holds.
    """
    generators = capture_random_state()
    try:
        contents = _capture(run, generators)
    finally:
        try:
            restore_random_state(generators)
        except BaseException:  # by Ctrl-C
            restore_random_state(generators)
            raise
    if held is not None and run.trainer.replicas.rank == 0 and contents.failure is None:
        held.warn(run, contents)
    return contents


def _capture(run: SavedRun, generators: dict[str, Any]) -> Contents:
    objects, encoder, main = run.objects(), TreeEncoder(), run.trainer.replicas.rank == 0
    shared = {name: entry.state_dict() for name, entry in objects.shared.items()}  # before an error: it may be collective
    trees, failure = {}, None
    try:
        trees = {name: encoder.encode(value, (name,)) for name, value in shared.items()}
    except CheckpointError as error:
        failure = error
    differing = set() if run.trainer.replicas.num_ranks == 1 else _differing(objects, trees, encoder.tensors)
    try:
        run.note(objects)
        trees["description"] = encoder.encode(objects.describe(run.in_effect), ("description",))
        written = trees if main else {name: trees[name] for name in trees if name in differing}
        whole = encoder.tensors.keys() if main else {key for tree in written.values() for key in tensors_in(tree)}
        tensors = {key: own_piece(tensor, everything=key in whole) for key, tensor in encoder.tensors.items()}
        encoder = TreeEncoder()
        own_state = _own_state(run.trainer, objects, main=main) | {"generators": generators}
        own = {name: encoder.encode(value, (name,)) for name, value in own_state.items()}
    except CheckpointError as error:
        failure = failure or error
    entries = _what_can_be_stored(run, objects, encoder.tensors)  # before an error: the state of a metric is collective
    if failure is not None:
        return Contents({}, {}, failure)
    own |= entries
    tensors |= {name: own_piece(tensor, everything=True) for name, tensor in encoder.tensors.items()}
    pieces = {name: piece for name, piece in tensors.items() if piece is not None}
    keys = _frozen_tensors(objects, trees) & pieces.keys() if run.frozen_once else set()
    frozen = {key: pieces.pop(key) for key in sorted(keys)}  # equal weights make equal files
    return Contents(own | written, pieces, frozen=frozen, frozen_name=_name_of_frozen(frozen) if frozen else "")


@contextmanager
def paused_collection() -> Iterator[None]:
    """A `with` in which Python collects no garbage on its own, in this process and not in those that are forked meanwhile.

    It is for what makes many objects that all live on. A state of a thousand tensors takes so many that Python would look
    through all of its memory, in every second save.
    """
    collects = False
    try:
        with COLLECTOR:
            collects = gc.isenabled()
            if collects:
                PAUSED.set()
                gc.disable()
        yield
    finally:
        if collects:
            try:
                with COLLECTOR:
                    PAUSED.clear()
                    gc.enable()
            except BaseException:  # by Ctrl-C: without it the process would collect no garbage any more
                with COLLECTOR:
                    PAUSED.clear()
                    gc.enable()
                raise


def own_piece(tensor: Tensor, *, everything: bool) -> Piece | None:
    """The part of `tensor` that this rank writes; None if other ranks write all of it.

    Of a sharded tensor each part is written once; any other one is written whole where `everything` is true.
    """
    whole = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Piece(tensor, (0,) * len(whole), whole) if everything else None
    if not is_first_holder(tensor):
        return None
    local = tensor.to_local()
    return Piece(local, local_box(tensor).start, whole) if local.numel() else None


def _differing(objects: RunObjects, trees: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> set[str]:
    """The shared objects that have other bits on some rank, so that each rank writes its own. Collective.

    A distributed optimizer may hold the moments of its share of the parameters on each rank. The trained models are compared by
    `StateConsistency`; those of replicas that train on their own are compared here. Each rank writes its buffers anyway.
    """
    plain = {key: tensor for key, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    digests = {}
    for name in objects.compared():
        own = {path_name((name, *path)) for path in objects.paths_that_may_differ(name)}
        keys = tensors_in(trees.get(name)) - own
        parts = tensor_digests({key: plain[key] for key in keys if key in plain})
        digests[name] = content_digest(name, compact_json([trees.get(name), sorted(parts.items())]))
    everyones = collectives.gather_objects(digests)
    return {name for name in digests if any(other.get(name) != digests[name] for other in everyones)}


def _frozen_tensors(objects: RunObjects, trees: Mapping[str, Any]) -> set[str]:
    """The tensors of parameters that do not require grad."""
    keys = set()
    for name, module in objects.modules.items():
        frozen = {key for key, parameter in module.parameters() if not parameter.requires_grad}
        keys |= {tensor for key, tree in trees[name]["dict"] if key in frozen for tensor in tensors_in(tree)}
    return keys


def _name_of_frozen(frozen: Mapping[str, Piece]) -> str:
    """The name of the file of frozen weights of this rank, which another file has only if it is equal."""
    digests = tensor_digests({key: piece.data for key, piece in frozen.items()})
    content = [[key, digests[key], one.start, one.data.shape, one.whole, one.data.stride()] for key, one in frozen.items()]
    return frozen_name(content_digest(f"rank {collectives.rank()}", compact_json(content)))


def _own_state(trainer: Trainer, objects: RunObjects, *, main: bool) -> dict[str, Any]:
    """What belongs to this rank, besides its handlers and its generators."""
    output = trainer.state.update_output
    own = {
        "trainer": trainer.state_dict(),
        "data": trainer.data.position(),
        "results": {"output": output and {one.name: getattr(output, one.name) for one in fields(output)}},
        "buffers": {} if main else objects.buffers(),
    }
    for name, other in objects.trainers.items():
        own[name] = other.state_dict()
    return own


def _what_can_be_stored(run: SavedRun, objects: RunObjects, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The trees of handlers and of published metrics. A state that cannot be stored is left out, and the run continues.

    Args:
        run: which warns of it.
        objects: of the run.
        tensors: those in the trees are added.
    """
    trees = {}
    for name, entry in objects.own.items():
        encoder = TreeEncoder()  # of its own, since of a state that cannot be stored nothing is kept
        try:
            state = entry.state_dict()
        except Exception as error:  # a handler may raise anything
            if not _raises_again(entry):
                raise
            run.warn_left_out(name, error)
            continue
        try:
            trees[name] = encoder.encode(state, (name,))
        except Exception as error:  # so may what is in the state
            if not isinstance(entry, PublishedMetrics):
                run.warn_left_out(name, error)
                continue
            encoder = TreeEncoder()
            trees[name] = encoder.encode(_storable(run, name, entry), (name,))
        tensors |= encoder.tensors
    return trees


def _raises_again(entry: Stateful) -> bool:
    """Whether an error in its `state_dict` is its own. Torch raises the end of a worker process wherever this thread is."""
    try:
        entry.state_dict()
    except Exception:  # a handler may raise anything
        return True
    return False


def _storable(run: SavedRun, name: str, published: PublishedMetrics) -> dict[Any, Any]:
    """The published values that a checkpoint can hold, without a table for a logger, say."""
    kept = {}
    for key, value in published.state_dict().items():
        try:
            TreeEncoder().encode({key: value}, ("state.metrics",))
        except CheckpointError as error:
            label = f"{name.removeprefix('trainer/')}[{key!r}]"
            run.warn_left_out(label, error, remedy="publish a number, a string or a tensor")
        else:
            kept[key] = value
    return kept


def run_config(run: SavedRun) -> Any:
    """The tree of `plain_config` of a run, with the user's configuration.

    What removes gradients, as `Freeze` does, changes the update, so that it is described with the trainer.
    """
    removing = [owner_of(one) for trainer in run.each_trainer for one in trainer.moments.before_norm]
    changes = _handler_settings([owner for owner in removing if isinstance(owner, Attachable)])
    description = {**run.trainer.config, "before_norm": changes} if changes else run.trainer.config
    return plain_config(run.config, description, _handler_settings(attachables(*run.engines)))


def plain_config(config: Any, description: Any, handlers: Mapping[str, Any] | None = None) -> Any:
    """The user's configuration, the arguments of the trainer and the settings of handlers, as a tree for the manifest.

    Values that are neither plain nor containers are stored as text, which is the same in each process that makes them.

    Args:
        config: from the user.
        description: of the trainer.
        handlers: what `_handler_settings` gave.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(entry) for entry in value]
        if isinstance(value, (set, frozenset)):  # their order is another one in each process
            return sorted(map(plain, value), key=repr)
        return value if value is None or isinstance(value, (bool, int, float, str)) else _ADDRESS.sub("", str(value))

    settings = {"config": plain(config), "trainer": plain(description), "handlers": plain(handlers or {})}
    return TreeEncoder().encode(settings, ("config",))


def _handler_settings(handlers: Iterable[Attachable]) -> dict[str, dict[str, Any]]:
    """The settings of handlers, by their class or `saved_as`; a second one of a name gets a number."""
    settings: dict[str, dict[str, Any]] = {}
    for owner in handlers:
        settings[numbered_name(owner, settings)] = owner.settings()
    return settings


def versions() -> dict[str, str]:
    """The versions of the packages that a run's numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pytorch-ignite": ignite.__version__,
        "numpy": np.__version__,
    }


class HeldState:
    """Warns once of each handler with tensors that are changed in place and that no checkpoint keeps; and of empty states.

    It warns too of a schedule of the run's learning rates that a handler refers to and no checkpoint keeps. A handler is
    looked at if it, or the object whose method it is, has no `state_dict`. Of a plain function only the modules and schedules
    count that it refers to or is called with. A tensor that does not change, such as a teacher's, or that is replaced by
    another one, such as the latest batch, does not count.
    """

    def __init__(self) -> None:
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._warned: set[str] = set()

    def note(self, run: SavedRun) -> None:
        """Remembers the tensors that handlers hold, and their versions. To be called when a run starts."""
        for _, _, tensors in _held(run):
            for tensor in tensors:
                self._is_changed(tensor)
        if run.trainer.replicas.rank == 0:
            self._warn_of_schedules(run)

    def _warn_of_schedules(self, run: SavedRun) -> None:
        objects = run.objects()
        optimizers, saved = {id(entry.optimizer) for entry in objects.each_optimizer.values()}, set[int]()
        for entry in (*objects.shared.values(), *objects.own.values()):
            with suppress(TypeError):  # an object with slots, or one of C, has no such attributes
                saved |= {id(one) for value in (entry, *vars(entry).values()) for one in _schedules(value)}
        for name, key, schedules in _held_schedules(run):
            lost = [one for one in schedules if id(one.optimizer) in optimizers and id(one) not in saved]
            if lost and f"{name}.{key}" not in self._warned and name not in run.leave_out:
                self._warned.add(f"{name}.{key}")
                _logger.warning(
                    f"the handler {name} holds a {type(lost[0]).__name__} in {key!r}, whose state no checkpoint keeps: a "
                    "resumed run starts it from the beginning; use LearningRateSchedule(...).attach(trainer), or pass "
                    f"Checkpoint(..., to_save={{'schedule': ...}}), or leave_out=({name!r},) to leave it out without this "
                    "warning"
                )

    def warn(self, run: SavedRun, contents: Contents) -> None:
        """To be called when a checkpoint is taken. Handlers that the user leaves out are not warned about.

        Args:
            run: whose handlers are looked at.
            contents: what is in the checkpoint.
        """
        if run.to_save:
            self._warn_of_empty(run, contents)
        known: set[int] | None = None  # looked up when it is needed, which is seldom
        for name, attribute, tensors in _held(run):
            changed = [tensor for tensor in tensors if self._is_changed(tensor)]
            if changed and known is None:
                known = {_storage(piece.data) for piece in contents.all_pieces.values()}
                modules = [entry.module for entry in run.objects().modules.values()]
                # Buffers of saved modules do not count either where they are not in the state.
                known |= {_storage(tensor) for module in modules for tensor in _tensors(module)}
            changed = [tensor for tensor in changed if _storage(tensor) not in (known or ())]
            if changed and name not in self._warned and name not in run.leave_out:
                self._warned.add(name)
                _logger.warning(
                    f"the handler {name} holds {len(changed)} tensors in {attribute!r} that change in training, and has no "
                    "state_dict: no checkpoint keeps them, so a resumed run starts without them; pass "
                    f"Checkpoint(..., to_save={{{attribute!r}: ...}}), or leave_out=({name!r},) to leave them out without "
                    "this warning"
                )

    def _warn_of_empty(self, run: SavedRun, contents: Contents) -> None:
        """Warns once of each object of the user's that gives nothing to save: metrics of torchmetrics do not by default."""
        has_begun = run.trainer.state.iteration > 0
        for name, entry in run.to_save.items():
            saved_as = f"to_save/{name}"
            is_empty = contents.trees.get(saved_as) == _EMPTY
            if is_empty and saved_as not in self._warned and (has_begun or isinstance(entry, nn.Module)):
                self._warned.add(saved_as)
                _logger.warning(
                    f"to_save[{name!r}] gives an empty state_dict, so a resumed run starts without its state; for a metric of "
                    "torchmetrics, call metric.persistent(True) before the run"
                )

    def names(self, run: SavedRun) -> set[str]:
        """The handlers that hold any tensors or schedules, by the names that a warning gives them."""
        return {name for name, _, _ in (*_held(run), *_held_schedules(run))}

    def _is_changed(self, tensor: Tensor) -> bool:
        """Whether it was changed in place since it was first asked about."""
        if tensor.is_inference():  # which has no version
            return False
        now = weakref.ref(tensor), version_of(tensor)
        before, version = self._versions.setdefault(id(tensor), now)
        if before() is not tensor:  # that one is freed, and this one has its place
            self._versions[id(tensor)] = now
        return before() is tensor and version != version_of(tensor)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        entries = value.values() if isinstance(value, dict) else value
        for entry in entries:
            if isinstance(entry, (Tensor, nn.Module)):
                yield from _tensors(entry)


def _held(
    run: SavedRun, within: Callable[[Any], Iterator[Any]] = _tensors, of_functions: Any = nn.Module
) -> Iterator[tuple[str, str, list[Any]]]:
    """Name of the handler, attribute, and the tensors in it, or what `within` finds there.

    Args:
        run: whose handlers are looked at.
        within: gives what is in a value.
        of_functions: the types of values that are looked at where a handler is a plain function, or an argument.
    """
    for engine in run.engines:
        for _, handler, arguments in attached(engine):
            if isinstance(handler, partial):
                arguments, handler = (*handler.args, *handler.keywords.values(), *arguments), handler.func
            owner: Any = handler.__self__ if isinstance(handler, MethodType) else handler
            name, things, is_function = type(owner).__name__, dict[str, Any](), isinstance(owner, FunctionType)
            if is_function:
                try:
                    around, everywhere, *_ = inspect.getclosurevars(owner)
                except ValueError:  # one has no value yet, which is seldom
                    around, everywhere = variables_around(owner)
                name, things = owner.__name__, {**around, **everywhere}
            elif not (type(owner).__module__.startswith(_NO_STATE) or isinstance(owner, (Engine, type, Stateful))):
                with suppress(TypeError):  # an object with slots, or one of C, has no such attributes
                    things = dict(vars(owner))
            for place, value in enumerate((*arguments, *((owner.__defaults__ or ()) if is_function else ()))):
                if isinstance(value, of_functions):
                    things[f"argument {place}"] = value
            for key, value in things.items():
                if (isinstance(value, of_functions) or not is_function) and (found := [*within(value)]):
                    yield name, key, found


def _held_schedules(run: SavedRun) -> Iterator[tuple[str, str, list[LRScheduler]]]:
    """Name of the handler, attribute, and the schedules in it."""
    return _held(run, _schedules, (LRScheduler, MethodType, list, tuple))


def _schedules(value: Any) -> Iterator[LRScheduler]:
    """Finds the schedules in a value: itself and its parts, the owner of a bound method, or the first entries of a list."""
    value = value.__self__ if isinstance(value, MethodType) else value
    if isinstance(value, LRScheduler):
        yield value
    for entry in parts_of_schedule(value) if isinstance(value, LRScheduler) else ():
        yield from _schedules(entry)
    if isinstance(value, (list, tuple, dict)):
        entries = value.values() if isinstance(value, dict) else value
        yield from (entry for entry in islice(entries, _MOST_SCHEDULES) if isinstance(entry, LRScheduler))


def _storage(tensor: Tensor) -> int:
    if is_composed(tensor):
        return id(tensor)
    return local_part(tensor).untyped_storage().data_ptr()
