"""Handlers that attach themselves, and handlers whose numbers travel with the statistics of an update."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

from ignite.engine import CallableEventWithFilter, Engine, Events, EventsList, RemovableEventHandle

from ignite_train.arguments import describe
from ignite_train.engine.attachable import Attachable, owner_of
from ignite_train.engine.dispatch import attached
from ignite_train.events import Event
from ignite_train.other_words import answers_other_words
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Piggyback
from ignite_train.trainer import Trainer

__all__ = ["Handler", "PiggybackHandler", "check_evaluator", "handle_in_every_nth_update"]

_logger = logging.getLogger("ignite_train")
_NUMBERS = itertools.count(1)


class Handler(Attachable):
    """A handler that is attached by `attach(trainer, ...)` and refuses to be put on an event by itself.

    Most handlers need more than one event. On a single event they would do nothing, or only a part, without a warning. A
    derived class defines `attach`, whose arguments are checked before it is called.

    Attributes:
        not_elastic: why the handler would be wrong where replicas come and go, so that `attach` refuses it; empty if it is
            right there.
        of_one_trainer: whether no second trainer may have the same handler, since it keeps something of the first.
        attached_once: whether, besides that, its trainer must not have it twice, since it would count or start twice.
    """

    not_elastic = ""
    of_one_trainer = False
    attached_once = False
    _trainer_of: weakref.ref[Trainer] | None = None  # the trainer to which it was attached first
    _number = 0  # in the order in which handlers are made

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "attach" in vars(cls):
            cls.attach = _checked(answers_other_words(vars(cls)["attach"]))  # type: ignore[attr-defined]
        if "__init__" in vars(cls):
            cls.__init__ = _counted(answers_other_words(vars(cls)["__init__"]))  # type: ignore[method-assign]

    @property
    def attached_trainer(self) -> Trainer | None:
        """The trainer to which a handler of one trainer was attached, if something else still holds it."""
        return None if self._trainer_of is None else self._trainer_of()

    def leave_unattached(self) -> None:
        """Has no run warn that the handler was made and not attached."""
        self.unattached.pop(self._number, None)

    def __repr__(self) -> str:
        """The class with those arguments of its construction that are attributes too."""
        kept = [name for name in inspect.signature(type(self)).parameters if name in vars(self)]
        return f"{type(self).__name__}({', '.join(f'{name}={_brief(vars(self)[name])}' for name in kept)})"


def _counted(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def counted(self: Handler, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        if self._number == 0:
            self._number = next(_NUMBERS)
            self.unattached[self._number] = type(self).__name__

    return counted


def _checked(attach: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attach)
    def checked(self: Any, trainer: Any = None, *arguments: Any, **named: Any) -> Any:
        if not isinstance(self, Handler):
            kind = attach.__qualname__.removesuffix(".attach")
            raise TypeError(f"attach must be called on a handler, got the class {kind}; write {kind}(...).attach(trainer)")
        name = type(self).__name__
        self.unattached.pop(self._number, None)
        _check_trainer(name, trainer)
        if trainer.replicas.are_elastic and self.not_elastic:
            raise ValueError(f"{name} must be left out with reduction='elastic': {self.not_elastic}")
        if self.attached_once and not self.is_attaching and _is_attached(self, trainer):
            raise ValueError(
                f"{name} must be attached once to a trainer, got the same one again; make another {name}, or join events by |"
            )
        of_one = self.of_one_trainer or self.attached_once
        if of_one and self._trainer_of is not None and self._trainer_of() is not trainer:
            raise ValueError(f"{name} must be attached to one trainer, got a second; make another {name} for it")
        if arguments or "event" in named:
            _check_event(name, arguments[0] if arguments else named["event"])
        if named.get("evaluator") is not None:
            check_evaluator(named["evaluator"], f" in {name}.attach")
        outer, self.is_attaching = self.is_attaching, True
        try:
            handle = attach(self, trainer, *arguments, **named)
        finally:
            self.is_attaching = outer
        if of_one:
            self._trainer_of = weakref.ref(trainer)
        if named.get("evaluator") is not None:
            self.attached_evaluators = (*self.attached_evaluators, weakref.ref(named["evaluator"]))
        return handle

    return checked


def _is_attached(handler: Handler, trainer: Trainer) -> bool:
    # A method of it at an event may be there by the script's own hand.
    return any(one is handler for one in (*map(owner_of, trainer.on_enter), *(called for _, called, _ in attached(trainer))))


def _check_trainer(name: str, trainer: Any) -> None:
    if isinstance(trainer, Trainer):
        return
    remedy = f"call {name}(...).attach(trainer), with what create_trainer returned"
    if isinstance(trainer, Engine):
        remedy = f"attach {name} to the trainer; those that show an evaluation take attach(trainer, evaluator=...)"
    elif _is_event(trainer):
        remedy = f"the trainer comes first: {name}(...).attach(trainer, event)"
    raise TypeError(f"trainer must be a Trainer, got {describe(trainer)}; {remedy}")


def _check_event(name: str, event: Any) -> None:
    if _is_event(event) or isinstance(event, str):
        return
    remedy = ""
    if isinstance(event, Engine):
        remedy = f"; pass an evaluator by its name: {name}(...).attach(trainer, evaluator=...)"
    raise TypeError(f"event must be an event such as Events.ITERATION_COMPLETED(every=50), got {describe(event)}{remedy}")


def check_evaluator(evaluator: Any, hint: str = "") -> None:
    """Raises TypeError, with the hint at its end, unless `evaluator` is an engine and not a trainer."""
    if not isinstance(evaluator, Engine) or isinstance(evaluator, Trainer):
        raise TypeError(f"evaluator must be what create_evaluator returned, got {describe(evaluator)}{hint}")


def _brief(value: Any) -> str:
    """A value as in a call if it is short and plain, or else the name of its class."""
    plain = value is None or isinstance(value, (bool, int, float, str, Path))
    return repr(value) if plain else type(value).__name__


def _is_event(value: Any) -> bool:
    return isinstance(value, (CallableEventWithFilter, EventsList))


def handle_in_every_nth_update(
    owner: Handler, trainer: Trainer, number: int, handlers: Mapping[Any, Callable[..., Any]]
) -> None:
    """Attaches handlers when an update begins whose number is a multiple of `number`, and takes them off when it is over.

    Some events cost something in each update as soon as they have a handler with any filter: with one of GRADIENTS_READY an
    update waits for the host before its step.

    Args:
        owner: the handler that needs them, which counts as attached in all updates.
        trainer: the trainer.
        number: n.
        handlers: by event.
    """
    handles: list[RemovableEventHandle] = []

    def begin(owner: Handler, trainer: Trainer) -> None:
        end(owner)
        handles.extend(trainer.prepend_event_handler(event, handler) for event, handler in handlers.items())

    def end(_owner: Handler) -> None:
        while handles:
            handles[-1].remove()
            handles.pop()  # now: `on_exit` removes what Ctrl-C has left

    # Methods of the owner: by them the settings of attached handlers are found, those that all ranks must have, and what goes
    # with a handler that is removed.
    trainer.add_event_handler(Events.ITERATION_STARTED(every=number), MethodType(begin, owner))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=number), MethodType(end, owner))
    trainer.on_exit.append(MethodType(end, owner))


class PiggybackHandler(Handler, Piggyback):
    """A handler whose numbers travel with the statistics of each update. All ranks must attach it.

    A derived class defines `__call__(trainer)`, which is called at the event that `attach` takes, and the methods of
    `Piggyback`. What has not travelled at the end of the run is compared by `settle`.
    """

    is_collective = True

    _trainer: weakref.ref[Trainer]

    @property
    def trainer(self) -> Trainer:
        """The trainer to which it was attached last, which may not be gone yet."""
        return self._trainer()  # type: ignore[return-value]

    @trainer.setter
    def trainer(self, trainer: Trainer) -> None:
        self._trainer = weakref.ref(trainer)  # which has this handler

    def attach(self, trainer: Trainer, event: Event = Events.ITERATION_COMPLETED) -> RemovableEventHandle:
        """Calls the handler at `event`, before other handlers there. It must fire in the same updates on all ranks."""
        trainer.replace_default(self)
        self.trainer = trainer
        if collectives.world_size() > 1 and self not in trainer.piggybacks:
            trainer.piggybacks.append(self)
            # In the order of attaching, as `verify_ranks` and the updates do: the first finding is the closest to the cause.
            trainer.add_evaluation_handler(Events.COMPLETED, self.settle)
        return trainer.prepend_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Notes what is to travel."""
        raise NotImplementedError
