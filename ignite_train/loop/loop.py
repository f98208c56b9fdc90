"""Ignite's Engine with a loop that survives exceptions, resumption, epochs of any length and a second `run`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from ignite.engine import Events, State

from ignite_train.arguments import describe
from ignite_train.loop.dispatch import Dispatcher, call

__all__ = ["Batches", "Loop"]

_END = object()
# Of each iteration: firing one without handlers takes about as long as finding it in its class.
_GET_BATCH_STARTED, _GET_BATCH_COMPLETED = Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED
_ITERATION_STARTED, _ITERATION_COMPLETED = Events.ITERATION_STARTED, Events.ITERATION_COMPLETED


class Batches(Protocol):
    """One pass over the data: an iterator.

    Attributes:
        length: how many batches it will give; None if unknown.
    """

    length: int | None

    def __next__(self) -> Any: ...

    def close(self, *, whole: bool) -> None:
        """Called once, when the pass ends: with `whole` unless an exception ended it."""


class Loop(Dispatcher):
    """An Ignite engine with its own loop, exceptions and bookkeeping of epochs.

    Events and the state are Ignite's. What differs:

    - An epoch is counted, never derived from `iteration // epoch_length`: it may have any number of iterations.
    - An exception always ends the run. Handlers of EXCEPTION_RAISED are observers: each is called once and cannot suppress
      it. The next `run` continues where this one ended: an iteration that did not finish is repeated.
    - Only the data can end an epoch: a StopIteration raised by a handler is an error like any other.
    - A stop takes effect after an iteration, after an epoch and where a run is entered, and nowhere else. So an iteration that
      has requested its batch is done and counted, and what STARTED or EPOCH_STARTED asks for comes after the next one.
    - EPOCH_STARTED fires once for each epoch. Where `run` continues an epoch that an earlier call began, what handlers have
      added up in it stays. After `interrupt` STARTED does not fire again either, as in Ignite.

    Args:
        process: called with the engine and `state.batch`; what it returns becomes `state.output`.

    Attributes:
        on_enter: functions that are called with the engine when a call of `run` begins, before STARTED: for the threads, files
            and signals that a handler needs during each call. One that asks to stop ends the run before its first iteration.
        on_exit: functions that are called without arguments when a run is over, after its last handler: at a limit, after a
            request to stop, and after an exception.
    """

    def __init__(self, process: Callable[[Any, Any], Any]) -> None:
        super().__init__(process)
        self.on_enter: list[Callable[[Any], object]] = []
        self.on_exit: list[Callable[[], object]] = []
        # When the latest batch was requested, before GET_BATCH_STARTED, and when it was there: `time.perf_counter`, in seconds.
        self._settled = True  # whether the running iteration has had its effect and must not be repeated
        self._running = False
        self._iterating = False
        self._interrupted = False  # the latest run ended by `interrupt`, and this one continues it
        self._epoch_open = False  # EPOCH_STARTED has been reached and EPOCH_COMPLETED has not
        self._epoch_started = False  # the handlers of the open epoch's EPOCH_STARTED have run in this process
        self._epoch_iteration = 0  # iterations of the open epoch that are done
        self._stops = self._epoch_ends = False  # what was asked for has taken effect: no other batch of the run, of the epoch
        self._reading = False  # a pass over the data is open
        self._data_ended = False  # the pass of the epoch before has ended in this run, or before its interrupt, by itself
        self._ended = False  # the latest run has come to its closing events

    def _expected_length(self, data: Iterable[Any]) -> int | None:  # noqa: ARG002  # for subclasses
        """Iterations of the epoch that begins next, if that can be known before its pass over the data."""
        return None

    def _open(self, data: Iterable[Any]) -> Batches:
        """Starts the pass of the open epoch over the data, after the `_epoch_iteration` batches that are done."""
        raise NotImplementedError

    def _run(self, data: Iterable[Any]) -> None:
        """Runs epochs until a limit of the state is reached or the run is stopped."""
        state = self.state
        try:
            with self._between_events(data):
                over = self._stops or (not self._epoch_open and self._is_done(state))  # of an open one the end may be left
                while not over:
                    self._run_epoch()
                    self._take_up_stops(between_updates=True)
                    over = self._stops or self._is_done(state)
        except StopIteration as error:
            raise RuntimeError("a handler or the update raised StopIteration; only the data may end an epoch") from error

    @contextmanager
    def _between_events(self, data: Iterable[Any] | None) -> Iterator[None]:
        """What a run is from STARTED to its closing events, or to EXCEPTION_RAISED. `data` is None without epochs."""
        self._refuse_nested_run()
        state, started = self.state, time.perf_counter()
        self.should_terminate = self.should_interrupt = False
        self.should_terminate_single_epoch = self._epoch_open and self.should_terminate_single_epoch  # not done yet
        state.dataloader, continues = data, self._interrupted
        self._running, self._ended, self._interrupted, self._data_ended = True, False, False, self._data_ended and continues
        self._log(f"Engine run starting with max_epochs={state.max_epochs}, max_iters={state.max_iters}.")
        try:
            for callback in self.on_enter:
                callback(self)
            if data is not None:
                self._take_up_stops(between_updates=True)
            if not self._epoch_open:
                state.epoch_length = None if data is None else self._expected_length(data) or state.epoch_length
            if not continues:
                self.fire_event(Events.STARTED)
            yield
            self._interrupted = bool(self.should_interrupt and not self.should_terminate)
            self._ended = not self._interrupted  # an interrupted run has yet to fire COMPLETED
            state.times[Events.COMPLETED.name] = time.perf_counter() - started
            self._fire_closing_events()
            state.times[Events.COMPLETED.name] = time.perf_counter() - started
            self._log(f"Engine run finished. Time taken: {_clock(time.perf_counter() - started)}")
        except BaseException as error:
            self._observe(error)
            self._take_back()
            raise
        finally:
            self._running = self._iterating = self.should_interrupt = False
            state.batch = None
            with ExitStack() as at_exit:  # an error of one leaves none out
                for function in reversed(self.on_exit):
                    at_exit.callback(function)

    def _refuse_nested_run(self) -> None:
        if self._running:
            raise RuntimeError("run was called inside a handler of the same run; call terminate() there, or use another engine")

    def _as_loader(self, data: Any) -> Iterable[Any]:
        if not isinstance(data, Iterable) or isinstance(data, (str, bytes, Mapping)):
            raise TypeError(f"data must be a loader of micro-batches, got {describe(data)}")
        return data

    def _begin_epoch(self) -> None:
        """Begins an epoch, or continues the one that a call of `run` has left open. Handlers may replace the data."""
        state = self.state
        if not self._epoch_open:
            self._epoch_open, self._epoch_started, self._epoch_iteration = True, False, 0
            state.epoch += 1
            if self._data_ended:
                data: Any = state.dataloader
                state.epoch_length = self._expected_length(data) or state.epoch_length
                self.fire_event(Events.DATALOADER_STOP_ITERATION)
        if not self._epoch_started:
            self.fire_event(Events.EPOCH_STARTED)
            self._epoch_started = True

    def _run_epoch(self) -> None:
        state, started = self.state, time.perf_counter()
        self._begin_epoch()
        data: Any = state.dataloader
        self._begin_section("data")
        batches, whole = self._open(data), False
        self._reading, self._data_ended = True, False
        state.epoch_length = batches.length or state.epoch_length
        try:
            over = self._epoch_is_over(batches)
            while not (over or self._stops or self._reached_max_iters()):
                state.batch = None  # not held while the next one is fetched
                self._begin_section("data")
                self.fire_event(_GET_BATCH_STARTED)
                state.batch = self._fetch(batches)
                if state.batch is _END:
                    state.batch, over = None, True
                    break
                self._iterate()
                over = not self._stops and self._epoch_is_over(batches)
            if over:
                self._close_epoch(started)
            whole = True
        finally:
            self._reading = False
            if not (whole and self._keeps_open(batches)):
                batches.close(whole=whole)

    def _keeps_open(self, batches: Batches) -> bool:  # noqa: ARG002  # for subclasses
        """Whether the pass, which ends here unless an exception ended it, is what the next `run` continues."""
        return False

    def _fetch(self, batches: Batches) -> Any:
        return next(batches, _END)

    def _iterate(self) -> None:
        """Runs one iteration on `state.batch`, which handlers before it may replace."""
        state = self.state
        self.fire_event(_GET_BATCH_COMPLETED)
        state.iteration += 1
        self._iterating, self._settled = True, False
        self.fire_event(_ITERATION_STARTED)
        state.output = self._process(self, self._batch())
        self._iterating = False
        self._epoch_iteration += 1
        try:
            self.fire_event(_ITERATION_COMPLETED)
        finally:
            self._take_up_stops()

    def _take_up_stops(self, *, between_updates: bool = False) -> None:  # noqa: ARG002  # for subclasses
        """Has what was asked for take effect. Called after each iteration and each epoch, and where a run is entered."""
        self._stops = self._stopping()
        self._epoch_ends = self._epoch_iteration > 0 and bool(self.should_terminate_single_epoch)

    @property
    def _process(self) -> Callable[[Any, Any], Any]:
        """The process function of the engine."""
        return self._process_function

    def _batch(self) -> Any:
        """What the running iteration works on: `state.batch`, as handlers may have replaced it."""
        return self.state.batch

    def _close_epoch(self, started: float) -> None:
        if self.should_terminate_single_epoch:
            self._fire_event(Events.TERMINATE_SINGLE_EPOCH, iter_counter=self._epoch_iteration)
        else:
            self._data_ended, self.state.epoch_length = True, self._epoch_iteration
        fires = self.should_terminate_single_epoch != "skip_epoch_completed"
        self.should_terminate_single_epoch = False
        self._epoch_open = self._reading = False
        times = self.state.times
        times[Events.EPOCH_COMPLETED.name] = time.perf_counter() - started
        if fires:
            self.fire_event(Events.EPOCH_COMPLETED)
            times[Events.EPOCH_COMPLETED.name] = time.perf_counter() - started
        self._log(f"Epoch[{self.state.epoch}] Complete. Time taken: {_clock(time.perf_counter() - started)}")
        self.should_terminate_single_epoch = False  # its handlers can only ask for what is done already

    def _fire_closing_events(self) -> None:
        if self.should_terminate:
            self.fire_event(Events.TERMINATE)
        elif self.should_interrupt:
            self.fire_event(Events.INTERRUPT)
            return
        if self.should_terminate != "skip_completed":
            self.fire_event(Events.COMPLETED)

    def _log(self, message: str) -> None:
        """For those who gave the engine a logger, as Ignite's users do with `setup_logger`; else it is for debugging."""
        level = logging.DEBUG if self.logger is logging.getLogger("ignite_train") else logging.INFO
        self.logger.log(level, message)

    def _stopping(self) -> bool:
        return bool(self.should_terminate or self.should_interrupt)

    def _epoch_is_over(self, batches: Batches) -> bool:
        over = batches.length is not None and self._epoch_iteration >= batches.length
        return over or self._epoch_ends

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
        for entry in self._entries(Events.EXCEPTION_RAISED):
            try:
                call(entry, (error,), {})
            except BaseException as raised:
                if raised is not error:
                    self.logger.exception("a handler of EXCEPTION_RAISED failed too; the first error is raised")

    def _take_back(self) -> None:
        """Takes back the counters of an iteration that did not finish, and a request that it has not answered."""
        if self._iterating and self._settled:
            self._epoch_iteration += self._epoch_open
            return
        self.state.iteration -= self._iterating
        if self._epoch_iteration > 0 and not self._epoch_ends:  # EPOCH_STARTED does not ask again, the others do
            self.should_terminate_single_epoch = False


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds, as Ignite writes them."""
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes) // 60:02d}:{int(minutes) % 60:02d}:{rest:06.3f}"
