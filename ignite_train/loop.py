"""Ignite's Engine with a loop that survives exceptions, resumption, epochs of any length and a second `run`."""

from __future__ import annotations

import logging
import time
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from ignite.engine import Engine, EventEnum, Events, EventsList, RemovableEventHandle, State

from ignite_train.arguments import nearest, shown
from ignite_train.events import Event

__all__ = ["Batches", "Loop", "Stateful"]

_END = object()


class Batches(Protocol):
    """One pass over the data: an iterator.

    Attributes:
        length: how many batches it will give; None: nobody knows yet.
    """

    length: int | None

    def __next__(self) -> Any: ...

    def close(self, *, whole: bool) -> None:
        """Called once, when the pass ends: `whole` by itself or by a request, or else by an exception."""


@runtime_checkable
class Stateful(Protocol):
    """What has a state to save."""

    def state_dict(self) -> Any:
        """The state, in plain types and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes it over."""


class Loop(Engine):
    """An Ignite engine with the loop, the exceptions and the bookkeeping of epochs done again.

    Handlers, events, filters and the state are Ignite's. What differs:

    - An epoch is counted, never derived from `iteration // epoch_length`: it may have any number of iterations.
    - An exception ends the run, always. Handlers of EXCEPTION_RAISED are observers: each is called once, none can swallow it
      or hide it. The next `run` goes on where this one broke off: an iteration that did not finish is done again.
    - The only thing that ends an epoch is the data: a StopIteration out of a handler is an error like any other.
    - Firing an event that nobody listens to costs one look-up.

    Args:
        process: called with the engine and a batch; what it returns becomes `state.output`.

    Attributes:
        stateful: the attached handlers that have a state to save, by the name of their class.
        when_over: called without arguments when a run is over, however it ended, after the last handler.
    """

    def __init__(self, process: Callable[[Any, Any], Any]) -> None:
        self._registered: set[str] = set()
        self._last: list[Callable[..., Any]] = []
        self.stateful: dict[str, Stateful] = {}
        self.when_over: list[Callable[[], None]] = []
        super().__init__(process)
        self.logger = logging.getLogger("ignite_train")
        self.settled = True  # whether the running iteration has had its effect, and must not be done again
        self._running = False
        self._iterating = False
        self._epoch_open = False  # EPOCH_STARTED has been reached and EPOCH_COMPLETED has not
        self._epoch_iteration = 0  # iterations of the open epoch that are done
        self._ended = False  # the latest run has come to its closing events

    # --- events ---------------------------------------------------------------------------------------------------------

    def register_events(self, *event_names: Any, event_to_attr: dict[Any, str] | None = None) -> None:
        """Adds events that can be fired; `event_to_attr` names the state attribute that their filters look at."""
        super().register_events(*event_names, event_to_attr=event_to_attr)
        self._registered |= {event.name if isinstance(event, EventEnum) else event for event in event_names}
        for event in event_names:  # the key is what is fired, not an equal with a filter, and is found by identity
            self._event_handlers.setdefault(event, [])

    def add_event_handler(self, event_name: Any, handler: Any, *args: Any, **kwargs: Any) -> RemovableEventHandle:
        """As in Ignite. If `handler`, or the object whose method it is, has a state, it is listed in `stateful`."""
        handle = super().add_event_handler(event_name, handler, *args, **kwargs)
        for single in event_name if isinstance(event_name, EventsList) else [event_name]:
            self._event_handlers[single].sort(key=lambda entry: entry[0] in self._last)
        self._list_stateful(handler.__self__ if isinstance(handler, types.MethodType) else handler)
        return handle

    def append_event_handler(self, event: Event, handler: Callable[..., Any]) -> RemovableEventHandle:
        """Adds a handler that runs after all others of `event`, also those attached later: for what saves their work."""
        self._last.append(handler)
        return self.add_event_handler(event, handler)

    def _list_stateful(self, owner: Any) -> None:
        if isinstance(owner, Stateful) and not isinstance(owner, (Engine, type)):
            if any(owner is listed for listed in self.stateful.values()):
                return
            name, number = type(owner).__name__, 1
            while (key := name if number == 1 else f"{name}-{number}") in self.stateful:
                number += 1
            self.stateful[key] = owner

    def prepend_event_handler(self, event: Event, handler: Callable[..., Any]) -> RemovableEventHandle:
        """Adds a handler that runs before all those already attached to `event`: for what others on it will read."""
        handle = self.add_event_handler(event, handler)
        for single in event if isinstance(event, EventsList) else [event]:
            handlers = self._event_handlers[single]
            added = max(index for index, entry in enumerate(handlers) if entry[0] not in self._last)
            handlers.insert(0, handlers.pop(added))
        return handle

    def has_handlers(self, event: Any) -> bool:
        """Whether anybody listens to `event`, with whatever filter."""
        return bool(self._event_handlers.get(event))

    def fire_event(self, event_name: Any) -> None:
        """Calls the handlers of `event_name`; without any it costs one look-up."""
        handlers = self._event_handlers.get(event_name)
        if handlers:
            self.last_event_name = event_name
            for entry in tuple(handlers):
                _call(entry, (), {})
        elif handlers is None:
            self._assert_allowed_event(event_name)
            self._event_handlers[event_name] = []  # known from here on

    def _fire_event(self, event_name: Any, *event_args: Any, **event_kwargs: Any) -> None:
        self.last_event_name = event_name
        for entry in tuple(self._event_handlers.get(event_name, ())):
            _call(entry, event_args, event_kwargs)

    def _assert_allowed_event(self, event_name: Any) -> None:
        name = event_name if isinstance(event_name, str) else getattr(event_name, "name", repr(event_name))
        if name not in self._registered:
            hint = nearest(name, self._registered)
            raise ValueError(f"event must be one registered on this {type(self).__name__}, got {name!r}{hint}")

    def _handler_wrapper(self, handler: Callable[..., Any], event_name: Any, event_filter: Any) -> Callable[..., Any]:
        """As in Ignite, but without the cycle from engine to handler to engine: filters see a proxy of the engine."""
        return Engine._handler_wrapper(weakref.proxy(self), handler, event_name, event_filter)

    # --- the loop -------------------------------------------------------------------------------------------------------

    def _open(self, data: Iterable[Any]) -> Batches:
        """Starts the open epoch's pass over the data, past the `_epoch_iteration` batches that are done."""
        raise NotImplementedError

    def _run(self, data: Iterable[Any]) -> None:
        """Runs epochs until the limits of the state are reached or somebody stops the run."""
        self._refuse_nested_run()
        state, started = self.state, time.perf_counter()
        self.should_terminate = self.should_terminate_single_epoch = self.should_interrupt = False
        state.dataloader = data
        self._running, self._ended = True, False
        try:
            self.fire_event(Events.STARTED)
            unclosed = self._epoch_open  # its last iteration may have been done, and EPOCH_COMPLETED not
            while not self._stop_between_epochs() and (unclosed or not self._is_done(state)):
                unclosed = False
                self._run_epoch(data)
            self._ended = True
            state.times[Events.COMPLETED.name] = time.perf_counter() - started
            self._fire_closing_events()
        except BaseException as error:
            self._observe(error)
            self._take_back()
            if isinstance(error, StopIteration):
                raise RuntimeError("a handler or the update raised StopIteration; only the data may end an epoch") from error
            raise
        finally:
            self._running = self._iterating = False
            state.batch = None
            for callback in self.when_over:
                callback()

    def _refuse_nested_run(self) -> None:
        if self._running:
            raise RuntimeError("run was called inside a handler of the same run; call terminate() there, or use another engine")

    def _as_loader(self, data: Any) -> Iterable[Any]:
        if not isinstance(data, Iterable) or isinstance(data, (str, bytes, Mapping)):
            raise TypeError(f"data must be a loader of micro-batches, got {shown(data)}")
        return data

    def _run_epoch(self, data: Iterable[Any]) -> None:
        state, started = self.state, time.perf_counter()
        if not self._epoch_open:
            self._epoch_open, self._epoch_iteration = True, 0
            state.epoch += 1
        self.fire_event(Events.EPOCH_STARTED)
        if self._stopping():
            return
        batches, whole = self._open(data), False
        state.epoch_length = batches.length
        try:
            while not (over := self._epoch_is_over(batches)) and not self._stopping() and not self._reached_max_iters():
                self.fire_event(Events.GET_BATCH_STARTED)
                batch = self._fetch(batches)
                if batch is _END:
                    over = True
                    break
                self._iterate(batch)
                del batch  # not to be held while the next one is fetched
            if over and not self._stopping():
                self._close_epoch(started)
            whole = True
        finally:
            batches.close(whole=whole)

    def _fetch(self, batches: Batches) -> Any:
        return next(batches, _END)

    def _iterate(self, batch: Any) -> None:
        state = self.state
        state.batch = batch
        self.fire_event(Events.GET_BATCH_COMPLETED)
        state.iteration += 1
        self._iterating, self.settled = True, False
        self.fire_event(Events.ITERATION_STARTED)
        state.output = self._process_function(self, batch)
        self._iterating = False
        self._epoch_iteration += 1
        self.fire_event(Events.ITERATION_COMPLETED)
        state.batch = None

    def _close_epoch(self, started: float) -> None:
        if self.should_terminate_single_epoch:
            self._fire_event(Events.TERMINATE_SINGLE_EPOCH, iter_counter=self._epoch_iteration)
        fires = self.should_terminate_single_epoch != "skip_epoch_completed"
        self.should_terminate_single_epoch = False
        self._epoch_open = False
        self.state.times[Events.EPOCH_COMPLETED.name] = time.perf_counter() - started
        if fires:
            self.fire_event(Events.EPOCH_COMPLETED)
        self.should_terminate_single_epoch = False  # what its handlers asked for is done already

    def _fire_closing_events(self) -> None:
        if self.should_terminate:
            self.fire_event(Events.TERMINATE)
        elif self.should_interrupt:
            self.fire_event(Events.INTERRUPT)
            return
        if self.should_terminate != "skip_completed":
            self.fire_event(Events.COMPLETED)

    def _stopping(self) -> bool:
        return bool(self.should_terminate or self.should_interrupt)

    def _stop_between_epochs(self) -> bool:
        return self._stopping()

    def _epoch_is_over(self, batches: Batches) -> bool:
        over = batches.length is not None and self._epoch_iteration >= batches.length
        return over or bool(self.should_terminate_single_epoch)

    def _reached_max_iters(self) -> bool:
        limit = self.state.max_iters
        return limit is not None and self.state.iteration >= limit

    def _is_done(self, state: State) -> bool:  # type: ignore[override]  # Ignite's is static and divides by epoch_length
        if state.max_iters is not None:
            return state.iteration >= state.max_iters
        return state.max_epochs is not None and state.epoch - self._epoch_open >= state.max_epochs

    def _observe(self, error: BaseException) -> None:
        """Shows `error` to every handler of EXCEPTION_RAISED, once."""
        where = f"epoch {self.state.epoch}, iteration {self.state.iteration}"
        self.logger.error(f"the run ended at {where} by {type(error).__name__}: {error}")
        self.last_event_name = Events.EXCEPTION_RAISED
        for entry in tuple(self._event_handlers.get(Events.EXCEPTION_RAISED, ())):
            try:
                _call(entry, (error,), {})
            except BaseException as raised:
                if raised is not error:
                    self.logger.exception("a handler of EXCEPTION_RAISED failed itself; the first error is the one raised")

    def _take_back(self) -> None:
        """Makes the counters say what was done: an iteration that broke off has not been."""
        if self._iterating and self.settled:
            self._epoch_iteration += 1
        elif self._iterating:
            self.state.iteration -= 1


def _call(entry: tuple[Any, tuple[Any, ...], dict[str, Any]], event_args: tuple[Any, ...], event_kwargs: Any) -> None:
    """Calls one handler as Ignite stores it: with the engine first if its signature takes one."""
    handler, args, kwargs = entry
    first: tuple[Any, ...] = ()
    if args and isinstance(args[0], weakref.ref):
        first, args = (args[0](),), args[1:]
    handler(*first, *event_args, *args, **(kwargs | event_kwargs if event_kwargs else kwargs))
