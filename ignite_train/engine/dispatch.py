"""Ignite's Engine with cheaper calls of handlers, and stages of an event whose order does not depend on attaching."""

from __future__ import annotations

import functools
import inspect
import logging
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from ignite.engine import CallableEventWithFilter, Engine, EventEnum, EventsList, RemovableEventHandle
from ignite.engine import State as IgniteState

from ignite_train.arguments import did_you_mean
from ignite_train.engine.attachable import Attachable, Stateful, list_stateful, owner_of
from ignite_train.engine.sections import Sections, unmeasured
from ignite_train.events import Event, EveryNth
from ignite_train.internals.of_ignite import (
    EVERY_NTH,
    PARENT,
    Entry,
    OpenEngine,
    add_event_attributes,
    handlers_by_event,
    registered_events,
)
from ignite_train.model.in_full import in_full
from ignite_train.other_words import answers

__all__ = [
    "Dispatcher",
    "Stage",
    "add_counters",
    "append_handler",
    "attachables",
    "attached",
    "call",
    "entries",
    "is_of_library",
    "occasions",
    "stateful_handlers",
    "without_handlers",
]

_FILTER = "event_filter"  # the attribute of a handler with a filter that is the filter


class Stage(IntEnum):
    """The stages of an event, in their order."""

    MEASURE = 0
    EVALUATE = 1
    REACT = 2
    SAVE = 3


class Dispatcher(OpenEngine):
    """An Ignite engine with cheaper calls of handlers, and stages of an event.

    Handlers, events and filters are Ignite's. What differs:

    - Firing an event without handlers costs one look-up.
    - An event has four stages: measure (`prepend_event_handler`), evaluate (`add_evaluation_handler`), react
      (`add_event_handler`) and save (`append_event_handler`).
    - Handlers that have a state are listed.

    Args:
        process: called with the engine and a batch; what it returns becomes `state.output`.

    Attributes:
        process: the same.
    """

    def __init__(self, process: Callable[[Any, Any], Any]) -> None:
        self.process: Any = process
        self._stateful: dict[str, Stateful] = {}  # handlers with a state to save, by the name of their class
        self._stages = _Stages()
        self._sections: Sections | None = None  # where something measures how the time divides into sections
        self.begin_section: Callable[[str], object] = unmeasured
        super().__init__(process)
        self._handlers = handlers_by_event(self)  # the same dict, of which Ignite replaces the lists
        self._note_handlers()
        self.logger = logging.getLogger("ignite_train")

    def register_events(self, *event_names: Any, event_to_attr: dict[Any, str] | None = None) -> None:
        """Adds events that can be fired; `event_to_attr` names the state attribute that their filters look at."""
        super().register_events(*event_names, event_to_attr=event_to_attr)
        for event in event_names:  # the key is what is fired, not an equal with a filter, and is found by identity
            handlers_by_event(self).setdefault(event, [])
        self._note_handlers()

    def add_event_handler(self, event_name: Any, handler: Any, *args: Any, **kwargs: Any) -> RemovableEventHandle:
        """Attaches a handler, as in Ignite. If it, or the object whose method it is, has a state, checkpoints save that."""
        _refuse_unattached(handler)
        if isinstance(event_name, EventsList):  # Ignite calls this method again for each of them
            return super().add_event_handler(event_name, handler, *args, **kwargs)
        try:
            handle = super().add_event_handler(event_name, handler, *args, **kwargs)
        except ValueError as error:
            if "will be called with" in str(error):  # Ignite names the second of the two ways alone
                error.add_note(
                    "a handler is called as handler(engine), or as handler() where it takes nothing; what add_event_handler is "
                    "given behind the handler follows, and in EXCEPTION_RAISED the exception"
                )
            raise
        self._stages.move(event_name, self._handlers[event_name])
        list_stateful(self._stateful, handler)
        self._note_handlers()
        self._handlers_changed()
        return handle

    def remove_event_handler(self, handler: Callable[..., Any], event_name: Any) -> None:
        """Removes a handler, as in Ignite. An object whose last handler is removed is no longer saved."""
        super().remove_event_handler(handler, event_name)
        self._stages.forget_removed(event_name, self._handlers[event_name])
        self._note_handlers()
        self._handlers_changed()
        owner = owner_of(handler)
        listed = {name: entry for name, entry in self._stateful.items() if entry is not owner}
        if len(listed) < len(self._stateful) and all(owner_of(other) is not owner for _, other, _ in attached(self)):
            self._stateful = listed

    def prepend_event_handler(self, event: Event, handler: Callable[..., Any]) -> RemovableEventHandle:
        """Adds a handler that runs before all others of `event`, also those attached later: for what these read."""
        return self._add(Stage.MEASURE, event, handler)

    def add_evaluation_handler(self, event: Event, handler: Callable[..., Any]) -> RemovableEventHandle:
        """Adds a handler that runs before those of `add_event_handler`: for an evaluation, to which these react."""
        return self._add(Stage.EVALUATE, event, handler)

    def append_event_handler(self, event: Event, handler: Callable[..., Any]) -> RemovableEventHandle:
        """Adds a handler that runs after all others of `event`, also those attached later: for saving their work."""
        return self._add(Stage.SAVE, event, handler)

    def _add(self, stage: Stage, event: Event, handler: Callable[..., Any]) -> RemovableEventHandle:
        self._stages.adding = stage
        try:
            return self.add_event_handler(event, handler)
        finally:
            self._stages.adding = Stage.REACT

    def _note_handlers(self) -> None:
        """Notes the handlers by the id of their event; called when handlers or events were added or removed.

        An event that fires is looked up by its id first, since its hash is computed in Python. An object that is equal to an
        event, as its name is, has another id and is looked up by its hash. `_handlers` keeps the events alive, so no other
        object can get the id of one.
        """
        self._by_identity = {id(event): entries for event, entries in handlers_by_event(self).items()}

    def _handlers_changed(self) -> None:
        """For subclasses: called whenever a handler was attached or removed."""

    def has_handlers(self, event: Any) -> bool:
        """Whether `event` has handlers, with or without a filter."""
        found = self._by_identity.get(id(event))
        return bool(self._handlers.get(event) if found is None else found)

    def fire_event(self, event_name: Any, **event_kwargs: Any) -> None:
        """Calls the handlers of `event_name`; without handlers it costs one look-up.

        Args:
            event_name: the event.
            event_kwargs: what each handler gets by name, beside its own arguments.
        """
        handlers = self._by_identity.get(id(event_name))
        if handlers is None:
            handlers = self._handlers.get(event_name)
        self.last_event_name = event_name
        if handlers:
            state = self.state
            place = _first_due(handlers, state)
            if place == len(handlers):
                return
            if self._sections is None:
                _call_all(handlers, state, event_kwargs, place)
                return
            before = self._sections.switch("handler")
            try:
                _call_all(handlers, state, event_kwargs, place)
            finally:
                self._sections.switch(before)
        elif handlers is None:
            self._check_registered(event_name)
            self._handlers[event_name] = []  # known from here on

    def _check_registered(self, event: Any) -> None:
        name = event if isinstance(event, str) else getattr(event, "name", None) or repr(event)
        known = {one.name if isinstance(one, EventEnum) else one for one in registered_events(self)}
        if name not in known:
            hint = answers("event", name) or did_you_mean(name, known)
            raise ValueError(f"event must be one registered on this {type(self).__name__}, got {name!r}{hint}")

    def _filtered(self, handler: Callable[..., Any], event: Any, event_filter: Any) -> Callable[..., Any]:
        """Wraps a handler as Ignite does, but gives filters a proxy of the engine, so that engine and handler form no cycle.

        The counter is looked up once and not at each event, because the hash of an event is computed in Python.
        """
        self._check_registered(event)
        self.state.get_event_attrib_value(event)  # raises an error if the event has no counter
        engine, attribute = weakref.proxy(self), self.state.event_to_attr[event]
        if (number := _number_of(event_filter)) is not None:
            early = event_filter.early if isinstance(event_filter, EveryNth) else frozenset()
            return _EveryNthHandler(handler, engine, attribute, number, early)

        @functools.wraps(handler)
        def if_due(*args: Any, **kwargs: Any) -> None:
            if event_filter(engine, getattr(engine.state, attribute)):
                handler(*args, **kwargs)

        vars(if_due)[PARENT] = weakref.ref(handler)
        vars(if_due)[_FILTER] = event_filter
        return if_due


class _Stages:
    """The stages of the handlers of an engine.

    Attributes:
        adding: the stage of what `add_event_handler` adds.
    """

    def __init__(self) -> None:
        self.adding = Stage.REACT
        self._known: dict[Any, list[tuple[Callable[..., Any], Stage]]] = {}  # by event, of handlers that do not react

    def move(self, event: Any, entries: list[Any]) -> None:
        """Moves the handler that was added last to its stage: to the beginning of MEASURE, to the end of the others.

        Args:
            event: to which it was added.
            entries: the handlers of that event, as Ignite stores them.
        """
        added, stage = entries.pop(), self.adding
        known = self.forget_removed(event, entries)
        stage_of = {id(handler): stage for handler, stage in known}
        others = [stage_of.get(id(handler), Stage.REACT) for handler, _, _ in entries]
        entries.insert(sum(other < stage or (other == stage != Stage.MEASURE) for other in others), added)
        if stage != Stage.REACT:
            known.append((added[0], stage))

    def forget_removed(self, event: Any, entries: list[Any]) -> list[tuple[Callable[..., Any], Stage]]:
        """Lets go of the handlers of `event` that are not among its entries any more, and returns the others."""
        known = [one for one in self._known.get(event, ()) if any(one[0] is handler for handler, _, _ in entries)]
        self._known[event] = known
        return known


class _EveryNthHandler:
    """A handler that is due in every n-th of the events. Most updates have several that are not, and need not call them.

    Args:
        handler: what is called.
        engine: a proxy, so that engine and handler do not form a cycle.
        attribute: the counter, an attribute of the engine's state.
        number: n.
        early: counts at which it is due too.
    """

    def __init__(self, handler: Callable[..., Any], engine: Any, attribute: str, number: int, early: frozenset[int]) -> None:
        functools.update_wrapper(self, handler, updated=())
        self.engine, self.attribute, self.number, self.early = engine, attribute, number, early
        vars(self)[PARENT] = weakref.ref(handler)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Calls the handler if it is due."""
        count = getattr(self.engine.state, self.attribute)
        if count % self.number == 0 or count in self.early:
            self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]  # set by `update_wrapper`


def _number_of(event_filter: Any) -> int | None:
    """The number of a filter `every=number`, of ours or Ignite's; None for other filters."""
    if isinstance(event_filter, EveryNth):
        return event_filter.number
    if isinstance(event_filter, types.FunctionType) and event_filter.__code__ is EVERY_NTH:
        return inspect.getclosurevars(event_filter).nonlocals.get("every")
    return None


def add_counters(state: IgniteState, event_to_attr: Mapping[Any, str]) -> None:
    """Gives a state with a map of its own the counters of events, which filters look at.

    The events are put into Ignite's map of the whole process too, unless they are there, since loggers look there.
    """
    state.event_to_attr.update(event_to_attr)
    add_event_attributes(state)
    for event, attribute in event_to_attr.items():
        IgniteState.event_to_attr.setdefault(event, attribute)


def entries(engine: Engine, event: Any) -> tuple[Entry, ...]:
    """The handlers of `event` as Ignite stores them, for `call`."""
    return tuple(handlers_by_event(engine).get(event, ()))


def attached(engine: Engine) -> list[tuple[Any, Any, tuple[Any, ...]]]:
    """The handlers that are attached to an engine, which may be a stock one of Ignite.

    Returns:
        Of each handler its event, itself without a filter, and its arguments apart from the engine.
    """
    found: list[tuple[Any, Any, tuple[Any, ...]]] = []
    for event, entries in handlers_by_event(engine).items():
        for handler, args, kwargs in entries:
            given = args[1:] if args and isinstance(args[0], weakref.ref) else args  # such a reference is to the engine
            found.append((event, inspect.unwrap(handler), (*given, *kwargs.values())))
    return found


def attachables(*engines: Engine) -> list[Attachable]:
    """The handlers of the class `Attachable` that are attached to engines, themselves or by a method of theirs, each once."""
    owners = (owner_of(handler) for engine in engines for _, handler, _ in attached(engine))
    return [*{id(owner): owner for owner in owners if isinstance(owner, Attachable)}.values()]


def append_handler(engine: Engine, event: Any, handler: Callable[..., Any]) -> RemovableEventHandle:
    """Adds a handler behind the others of `event`: on a stock engine of Ignite behind those that are there."""
    return (engine.append_event_handler if isinstance(engine, Dispatcher) else engine.add_event_handler)(event, handler)


def occasions(engine: Engine) -> Iterator[tuple[Any, str, str]]:
    """The handlers that are attached to an engine: each with the name of its event, and on ours with its filter in words."""
    for event, entries in handlers_by_event(engine).items():
        for handler, _, _ in entries:
            name = event.name if isinstance(event, CallableEventWithFilter) else str(event)
            yield inspect.unwrap(handler), name, _filter_in_words(handler)


def _filter_in_words(handler: Any) -> str:
    if isinstance(handler, _EveryNthHandler):
        return f"every={handler.number}{', early' if handler.early else ''}"
    event_filter = vars(handler).get(_FILTER) if isinstance(handler, types.FunctionType) else None
    if event_filter is None:
        return "always"
    if isinstance(event_filter, types.FunctionType) and event_filter.__module__ == CallableEventWithFilter.__module__:
        numbers = inspect.getclosurevars(event_filter).nonlocals  # such as `once`, and `after_` beside `before_`
        return ", ".join(f"{name.strip('_')}={number}" for name, number in numbers.items())
    return "a function"


def is_of_library(handler: Any) -> bool:
    """Whether a handler is one of ours, and no function or class of the script's or of another library."""
    return str(owner_of(handler).__module__).startswith("ignite_train.")


@contextmanager
def without_handlers(engine: Engine, left_out: Callable[[Any, Any], bool]) -> Iterator[list[Any]]:
    """In this `with` an engine calls some of its handlers only. Afterwards each is in its place again.

    Args:
        engine: ours, or a stock engine of Ignite. Nothing may be attached to it, or removed, within the `with`.
        left_out: whether a handler is not called, given its event and itself without a filter.

    Yields:
        The events of the handlers that are left out.
    """
    before = [(event, entries, [*entries]) for event, entries in handlers_by_event(engine).items()]

    def put_back() -> None:
        for _, entries, all_of_them in before:
            entries[:] = all_of_them

    try:
        for event, entries, all_of_them in before:
            entries[:] = [entry for entry in all_of_them if not left_out(event, _unfiltered(entry[0]))]
        yield [event for event, entries, all_of_them in before if len(entries) < len(all_of_them)]
    finally:
        in_full(put_back)


def _unfiltered(handler: Any) -> Any:
    """A handler without a filter; a method stays one, also where it is decorated, as those of metrics are."""
    return inspect.unwrap(handler, stop=lambda one: isinstance(one, types.MethodType))


def stateful_handlers(engine: Engine) -> dict[str, Stateful]:
    """The handlers attached to an engine that have a state to save, by the name of their class or their `saved_as`.

    Those of a stock engine of Ignite are in the order of the events that were attached to first.
    """
    if isinstance(engine, Dispatcher):
        return engine._stateful
    found: dict[str, Stateful] = {}
    for _, handler, _ in attached(engine):
        list_stateful(found, handler)
    return found


def _refuse_unattached(handler: Any) -> None:
    kind = handler if isinstance(handler, type) else type(handler)
    if issubclass(kind, Attachable) and (kind is handler or not handler.is_attaching):
        raise TypeError(
            f"handler must not be of the class {kind.__name__}, which attaches itself to the events that it needs; "
            f"use {kind.__name__}(...).attach(trainer)"
        )


def _first_due(handlers: list[Any], state: Any, place: int = 0) -> int:
    """The place of the first handler that is due, from `place` on, or the place behind the last."""
    for index in range(place, len(handlers)):
        handler = handlers[index][0]
        if type(handler) is not _EveryNthHandler:
            return index
        if (count := getattr(state, handler.attribute)) % handler.number == 0 or count in handler.early:
            return index
    return len(handlers)


def _call_all(handlers: list[Any], state: Any, event_kwargs: Any, place: int) -> None:
    """Calls `handlers` as they are when each has its turn, as in Ignite: one may add others, or replace those that follow.

    One that removes itself hides no other, because Ignite's `remove_event_handler` makes a new list.

    Args:
        handlers: as Ignite stores them.
        state: the state of their engine, which has the counters.
        event_kwargs: given to each, by name.
        place: the index of the first handler that is due.
    """
    known = tuple(handlers)
    while place < len(handlers):
        entry, length = handlers[place], len(handlers)
        call(entry, (), event_kwargs)
        if len(handlers) > length and handlers[place] is not entry:  # it has added some that stand before it
            place = next((index for index, other in enumerate(handlers) if other is entry), place)
            for added in handlers[:place]:
                if not any(added is other for other in known):
                    call(added, (), event_kwargs)
            known = tuple(handlers)
        place += 1
        if place < len(handlers) and type(handlers[place][0]) is _EveryNthHandler:
            place = _first_due(handlers, state, place)


def call(entry: Entry, event_args: tuple[Any, ...], event_kwargs: Any) -> None:
    """Calls one handler as Ignite stores it: with the engine first if its signature takes one."""
    handler, args, kwargs = entry
    first: tuple[Any, ...] = ()
    if args and isinstance(args[0], weakref.ref):
        first, args = (args[0](),), args[1:]
    try:
        handler(*first, *event_args, *args, **(kwargs | event_kwargs if event_kwargs else kwargs))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _explain(error, handler)
        raise


def _explain(error: Exception, handler: Any) -> None:
    """Adds a note where something could not read `state.output`, or a gradient or metric that is not there."""
    if isinstance(error, (AttributeError, KeyError)):
        names = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1].f_code.co_names
        if isinstance(error, KeyError) and "metrics" in names:
            error.add_note(
                "state.metrics has what was published so far: TrainingMetrics().attach(trainer) publishes metrics of a "
                "training, in which state.update_output.loss is there after each update; an evaluator has its metrics "
                "after its run"
            )
        elif isinstance(error, AttributeError) and error.obj is None and "grad" in names:
            error.add_note(
                "gradients are cleared at the end of an update; read trainer.gradients() in TrainEvents.GRADIENTS_READY, or "
                "pass UpdateOptions(keep_gradients=True)"
            )
        return
    cannot_unpack = any(words in str(error) for words in ("unpack", "not iterable"))
    if isinstance(handler, types.MethodType) and handler.__name__ == "iteration_completed" and cannot_unpack:
        error.add_note(
            f"{type(handler.__self__).__name__} reads state.output, which is not a pair (y_pred, y) here; in an evaluation let "
            "forward return ForwardOutput(..., outputs=(y_pred, y)); in training call attach_metric(trainer, metric, name)"
        )
    elif "UpdateOutput" in str(error):
        instead = answers("import", name := type(handler).__name__)
        error.add_note(
            "state.output is the record of the update here; for a number of it pass output_transform=lambda output: "
            "output.loss, say, and for a metric of predictions call attach_metric(trainer, metric, name)"
            + instead.replace(";", f"; in place of {name}", 1)
        )
