"""Handlers that attach themselves, and objects with a state to save, which engines list beside functions."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Container, Iterable
from typing import Any, ClassVar, Protocol, runtime_checkable

from ignite.engine import Engine
from ignite.metrics import Metric, MetricsLambda

from ignite_train.arguments import settings_of
from ignite_train.internals.of_ignite import names_in_state

__all__ = [
    "Attachable",
    "Stateful",
    "lacks_state",
    "list_stateful",
    "numbered_name",
    "owner_of",
    "scores_of",
]


@runtime_checkable
class Stateful(Protocol):
    """An object with a state to save."""

    def state_dict(self) -> Any:
        """The state, in plain types and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes it over."""


class Attachable:
    """A handler that only its own `attach` may put on events; see `Handler`.

    Attributes:
        unattached: the classes of all handlers that were made and not attached, by the number of the handler.
        is_attaching: whether its `attach` is running.
        is_collective: whether it waits for other ranks, so that all of them must attach one; compared when a run starts.
        same_on_all_ranks: whether its state is the same on all ranks, or sharded over them, so that a checkpoint holds it once.
        attached_evaluators: the evaluators at whose events it has methods, weakly, since they have it.
        saved_as: the name of its state in checkpoints, where that is not the name of its class. A class that is renamed keeps
            its earlier name here, so that checkpoints written before can be resumed from. Of several handlers of one class the
            second is saved as `Name-2` and so on, in the order in which they are attached; set it on each of them, before they
            are attached, if that order may change.
    """

    unattached: ClassVar[dict[int, str]] = {}
    is_attaching = False
    is_collective = False
    same_on_all_ranks = False
    attached_evaluators: tuple[weakref.ref[Engine], ...] = ()
    saved_as: str | None = None

    def taken_off(self) -> None:
        """Called when the trainer has removed it, for what `attach` has left beside events, `on_enter` and `piggybacks`."""

    def settings(self) -> dict[str, Any]:
        """The arguments that it was made with, in plain types: a resumed run says which differ from those in the checkpoint."""
        return settings_of(self)

    def paths_that_may_differ(self) -> Iterable[tuple[str, ...]]:
        """Keys in the state of what may differ between ranks although a checkpoint holds it once, from rank 0."""
        return ()

    def scores(self) -> Iterable[tuple[Engine, str | None, str | None]]:
        """The evaluators at which it looks, each with the metric that it needs there and its mode, if it needs one."""
        return ()

    def runs(self) -> Iterable[Engine]:
        """The evaluators that it runs."""
        return ()

    def improves(self, evaluator: Engine) -> bool:  # noqa: ARG002  # for subclasses
        """Whether what `evaluator` has just found is better than all before."""
        return False

    def rows_at_end(self) -> Iterable[tuple[str, str]]:
        """Rows of the table at the end of a run: the name of each, `"time"`, `"best"`, `"files"` or `"hint"`, and its text."""
        return ()


def scores_of(handlers: Iterable[object]) -> list[tuple[Engine, str | None, str | None]]:
    """The `Attachable.scores` of those handlers that have some."""
    return [score for one in handlers if isinstance(one, Attachable) for score in one.scores()]


def list_stateful(listed: dict[str, Stateful], handler: Any) -> None:
    """Adds `handler`, or the object whose method it is, if it has a state and is not in the list yet."""
    owner = owner_of(handler)
    if not isinstance(owner, Stateful) or isinstance(owner, (Engine, type)) or lacks_state(owner):
        return
    if any(owner is other for other in listed.values()):
        return
    listed[numbered_name(owner, listed)] = owner


def lacks_state(owner: object) -> bool:
    """Whether it is a metric of Ignite without a state of its own, which would wait for all ranks to give none.

    `GpuInfo` is one, and a function of other metrics, as `mIoU` is: these are attached beside it, and have the counts.
    """
    if not isinstance(owner, Metric) or type(owner).state_dict is not Metric.state_dict:
        return False
    names = names_in_state(owner)
    return not names or (isinstance(owner, MetricsLambda) and names == names_in_state(MetricsLambda))


def numbered_name(owner: object, taken: Container[str]) -> str:
    """The name of a handler in a checkpoint: its class or `saved_as`, with a number where that name is taken."""
    name, number = (isinstance(owner, Attachable) and owner.saved_as) or type(owner).__name__, 1
    while (key := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return key


def owner_of(handler: Any) -> Any:
    """The handler, or the object whose method it is, also where some of its arguments are given by `functools.partial`."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return handler.__self__ if isinstance(handler, types.MethodType) else handler
