"""Handlers that hold tensors which training changes and no checkpoint keeps, such as an average of the weights."""

from __future__ import annotations

import functools
import inspect
import logging
import types
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ignite.engine import Engine
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.checkpoint.directory import Contents
from ignite_train.checkpoint.saved_run import SavedRun
from ignite_train.checkpoint.tree import is_composed
from ignite_train.engine.dispatch import Stateful, attached
from ignite_train.internals.of_torch import version_of

__all__ = ["HeldState"]

_logger = logging.getLogger(__name__)
_NO_STATE = ("ignite_train.", "ignite.handlers.time_profilers")
"""Modules of classes whose tensors need not be stored: our own handlers, and what measures this process."""


class HeldState:
    """Notices tensors of handlers that are changed in place and are in no checkpoint, and warns once of each handler.

    A handler is looked at if it, or the object whose method it is, has no `state_dict`. Of a plain function only the modules
    count that it refers to or is called with. A tensor that does not change, such as a teacher's, or that is replaced by
    another one, such as the latest batch, does not count.
    """

    def __init__(self) -> None:
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._warned: set[str] = set()

    def note(self, run: SavedRun) -> None:
        """To be called when a run starts: what is held, and in which version."""
        for _, _, tensors in _held(run):
            for tensor in tensors:
                self._is_changed(tensor)

    def warn(self, run: SavedRun, contents: Contents) -> None:
        """To be called when a checkpoint is taken. Handlers that the user leaves out are not warned about.

        Args:
            run: whose handlers are looked at.
            contents: what is in the checkpoint.
        """
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

    def names(self, run: SavedRun) -> set[str]:
        """The handlers that hold any tensors, by the names that a warning gives them."""
        return {name for name, _, _ in _held(run)}

    def _is_changed(self, tensor: Tensor) -> bool:
        """Whether it was changed in place since it was first asked about."""
        if tensor.is_inference():  # which has no version
            return False
        now = weakref.ref(tensor), version_of(tensor)
        before, version = self._versions.setdefault(id(tensor), now)
        if before() is not tensor:  # that one is freed, and this one has its place
            self._versions[id(tensor)] = now
        return before() is tensor and version != version_of(tensor)


def _held(run: SavedRun) -> Iterator[tuple[str, str, list[Tensor]]]:
    """Name of the handler, attribute, and the tensors in it."""
    for engine in run.engines:
        for _, handler, arguments in attached(engine):
            owner = handler.__self__ if isinstance(handler, types.MethodType) else handler
            if isinstance(owner, functools.partial):
                arguments, owner = (*owner.args, *owner.keywords.values(), *arguments), owner.func
            name, things = type(owner).__name__, dict[str, Any]()
            if isinstance(owner, types.FunctionType):
                closure = inspect.getclosurevars(owner)
                name, found = owner.__name__, {**closure.nonlocals, **closure.globals}
                things = {key: value for key, value in found.items() if isinstance(value, nn.Module)}
            elif not (type(owner).__module__.startswith(_NO_STATE) or isinstance(owner, (Engine, type, Stateful))):
                with suppress(TypeError):  # an object with slots, or one of C, has no such attributes
                    things = dict(vars(owner))
            for place, value in enumerate(arguments):
                if isinstance(value, nn.Module):
                    things[f"argument {place}"] = value
            for key, value in things.items():
                tensors = list(_tensors(value))
                if tensors:
                    yield name, key, tensors


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


def _storage(tensor: Tensor) -> int:
    if is_composed(tensor):
        return id(tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
