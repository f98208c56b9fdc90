"""Ignite's Engine with a loop that survives exceptions, resumption, epochs of any length and a second `run`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Never

from ignite.engine import Events

from ignite_train.arguments import describe_error
from ignite_train.engine.dispatch import Dispatcher, call, entries
from ignite_train.internals.of_torch import note_error_in_pass
from ignite_train.ranks import collectives
from ignite_train.state import TrainState, UpdateOutput

__all__ = ["Batches", "Loop", "Progress", "iterate_on_request"]

_END: Any = object()
# Of each iteration: firing one without handlers takes about as long as finding it in its class.
_GET_BATCH_STARTED, _GET_BATCH_COMPLETED = Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED
_ITERATION_STARTED, _ITERATION_COMPLETED = Events.ITERATION_STARTED, Events.ITERATION_COMPLETED


@dataclass(slots=True)
class Progress:
    """Where the loop of an engine stands. Handlers read it; the loop writes it.

    Attributes:
        running: a run or a session is under way, from its beginning to its end.
        session_open: a session is open, from after its STARTED to before its closing events.
        session_left: the latest run is a session whose `with` has been left without an exception.
        iterating: an iteration is under way.
        updating: an iteration that was asked for by `update` is under way, up to the last handler of its last event.
        settled: the running iteration has had its effect, and must not be repeated.
        epoch_open: EPOCH_STARTED has been reached, and EPOCH_COMPLETED has not.
        epoch_started: the handlers of the open epoch's EPOCH_STARTED have run in this process.
        epoch_iteration: iterations of the open epoch that are done.
        epoch_ends: a request to end the epoch has taken effect: it has no other batch.
        ranks_have_more: some rank has another batch in this epoch, as far as the ranks have agreed.
        stops: a request to stop the run has taken effect: it has no other batch.
        reading: a pass over the data is open.
        data_ended: the pass of the epoch before has ended in this run, or before its interrupt, by itself.
        interrupted: the latest run was ended by `interrupt`, and the next one continues it.
        ended: the latest run has come to the last of its closing events. One that is told to stop has yet to fire COMPLETED at
            TERMINATE, and after INTERRUPT.
        micro_batches_before: `state.num_micro_batches` before the running update.
        record_before: `state.update_output` and `state.output` before the running update; not held once it has had its effect.
        warned: what was said in the log, warnings mostly, and is not said again.
    """

    running: bool = False
    session_open: bool = False
    session_left: bool = False
    iterating: bool = False
    updating: bool = False
    settled: bool = True
    epoch_open: bool = False
    epoch_started: bool = False
    epoch_iteration: int = 0
    epoch_ends: bool = False
    ranks_have_more: bool = True
    stops: bool = False
    reading: bool = False
    data_ended: bool = False
    interrupted: bool = False
    ended: bool = False
    micro_batches_before: int = 0
    record_before: tuple[UpdateOutput | None, Any] = (None, None)
    warned: set[str] = field(default_factory=set)

    @property
    def iterations_in_epoch(self) -> int:
        """Iterations of the open epoch that have had their effect, with the running one if it has."""
        return self.epoch_iteration + (self.iterating and self.settled)

    def refuse_nested_run(self) -> None:
        """Raises where no run and no session can begin.

        Raises:
            RuntimeError: one is under way, or an update.
        """
        if self.session_open or self.updating:
            raise RuntimeError("run or session was called inside a session or an update of the same trainer; leave it first")
        if self.running:
            raise RuntimeError(
                "run was called while a run of the same engine is under way, in one of its handlers or in another thread; call "
                "terminate() in the handler, or use another engine"
            )

    def done_before(self, state: TrainState) -> float | None:
        """The fraction of the run that was done before the running iteration, or the latest; in [0, 1).

        It counts iterations, also those of earlier processes.

        With `max_epochs` each epoch has the same share, whatever number of iterations it has.

        Args:
            state: the counters and limits of a run that has begun.

        Returns:
            The fraction, or None where it cannot be known: without a limit, or if the length of an epoch is unknown.
        """
        if state.max_iters is not None:
            done, total = float(state.iteration), state.max_iters
            each = 1.0
        elif state.max_epochs is not None and state.epoch_length:
            in_epoch = self.epoch_iteration + self.iterating
            begun = in_epoch > 0 or self.epoch_open  # a run that resumes between two epochs has none that is begun
            each = 1.0 / state.epoch_length
            done, total = max(0, state.epoch - begun) + in_epoch * each, state.max_epochs
        else:
            return None
        return max(0.0, (min(done, float(total)) - each) / total)


class Batches:
    """An iterator over the data: one pass.

    Attributes:
        length: how many batches it will give; None if unknown.
    """

    length: int | None = None

    def __next__(self) -> Any:
        """The next batch."""
        raise NotImplementedError

    def batch(self, given: Any) -> Any:
        """The batch of the iteration that begins, where `given` is what handlers before it have made of `state.batch`."""
        return given

    def keep_open(self) -> bool:
        """Called where a request to stop has ended the pass within its epoch: whether the next `run` continues it."""
        return False

    def close(self) -> None:
        """Called once, when the pass ends."""


class Loop(Dispatcher):
    """An Ignite engine with its own loop, exceptions and bookkeeping of epochs.

    Events and the state are Ignite's. What differs:

    - An epoch is counted, never derived from `iteration // epoch_length`: it may have any number of iterations.
    - An exception always ends the run. Handlers of EXCEPTION_RAISED are observers: each is called once and cannot suppress
      it. The next `run` continues where this one ended: an iteration that did not finish is repeated.
    - Only the data can end an epoch: a StopIteration raised by a handler is an error like any other.
    - A stop takes effect after an iteration, after an epoch, where a run is entered and where a session is left, and nowhere
      else. So an iteration that has requested its batch is done and counted, and what STARTED or EPOCH_STARTED asks for comes
      after the next one.
    - EPOCH_STARTED fires once for each epoch. Where `run` continues an epoch that an earlier call began, what handlers have
      added up in it stays. After `interrupt` STARTED does not fire again either, as in Ignite.

    Args:
        process: called with the engine and `state.batch`; what it returns becomes `state.output`.

    Attributes:
        on_enter: functions that are called with the engine when a call of `run` begins, before STARTED: for the threads, files
            and signals that a handler needs during each call. One that asks to stop ends the run before its first iteration.
        on_exit: functions that are called without arguments when a run is over, after its last handler: at a limit, after a
            request to stop, and after an exception.
        on_idle: functions that are called without arguments in place of a run that has nothing to do.
    """

    def __init__(self, process: Callable[[Any, Any], Any]) -> None:
        super().__init__(process)
        self.on_enter: list[Callable[[Any], object]] = []
        self.on_exit: list[Callable[[], object]] = []
        self.on_idle: list[Callable[[], object]] = []
        self._has_entered = False  # whether a run is under way in which they were called
        self.progress = Progress()

    def enter_with(self, function: Callable[[Any], object]) -> None:
        """Has it called in `on_enter`, and at once too where a run is under way: a handler may be attached in the middle."""
        self.on_enter.append(function)
        if self._has_entered:
            function(self)

    def __reduce_ex__(self, protocol: Any) -> Never:
        """Refuses a copy or a pickle: the parts refer to each other, to one model and to the generators of the process.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} must not be copied or pickled, since its parts belong to one model; copy the model, and "
            "make another"
        )

    def _expected_length(self, data: Any) -> int | None:  # noqa: ARG002  # for subclasses
        """Iterations of the epoch that begins next, if that can be known before its pass over the data."""
        return None

    def _open(self, data: Any) -> Batches:
        """Starts the pass of the open epoch over the data, after the `_epoch_iteration` batches that are done."""
        raise NotImplementedError

    def run(self, data: Iterable[Any] | None) -> Any:  # type: ignore[override]  # subclasses take what Ignite's takes
        """Runs epochs until a limit of the state is reached or the run is stopped.

        Args:
            data: what `_open` opens. With None, GET_BATCH_STARTED and GET_BATCH_COMPLETED do not fire.

        Returns:
            The state.
        """
        state, progress = self.state, self.progress
        if progress.ended and self._has_nothing_to_do():
            if collectives.is_main_rank():
                self.logger.warning(
                    f"nothing to do: epoch {state.epoch} and update {state.iteration} are done and the limit is "
                    f"max_epochs={state.max_epochs}, max_iters={state.max_iters}; raise it to continue"
                )
            for function in self.on_idle:
                function()
            return state
        try:
            with self._between_events(data):
                # Of an epoch that is open the end may be left.
                over = progress.stops or (not progress.epoch_open and self._limit_is_reached())
                while not over:
                    self._run_epoch()
                    self._take_up_stops(between_updates=True)
                    over = progress.stops or self._limit_is_reached()
        except StopIteration as error:
            raise RuntimeError("a handler or the update raised StopIteration; only the data may end an epoch") from error
        return state

    @contextmanager
    def _between_events(self, data: Iterable[Any] | None, *, has_epochs: bool = True) -> Iterator[None]:
        """A run from STARTED to its closing events, or to EXCEPTION_RAISED."""
        self.progress.refuse_nested_run()
        state, progress, started = self.state, self.progress, time.perf_counter()
        self.should_terminate = self.should_interrupt = False
        self.should_terminate_single_epoch = progress.epoch_open and self.should_terminate_single_epoch  # not done yet
        state.dataloader, continues = data, progress.interrupted
        progress.running, progress.ended, progress.interrupted, progress.session_left = True, False, False, False
        progress.data_ended = progress.data_ended and continues
        try:
            self._log(f"Engine run starting with max_epochs={state.max_epochs}, max_iters={state.max_iters}.")
            called: list[object] = []
            while waiting := [one for one in self.on_enter if not any(one is other for other in called)]:  # they may add others
                called.append(waiting[0])
                waiting[0](self)
            self._has_entered = True
            if has_epochs:
                self._take_up_stops(between_updates=True)
            if not self.progress.epoch_open:
                state.epoch_length = (self._expected_length(data) or state.epoch_length) if has_epochs else None
            if not continues:
                self.fire_event(Events.STARTED)
            yield
            self.progress.interrupted = bool(self.should_interrupt and not self.should_terminate)
            state.times[Events.COMPLETED.name] = time.perf_counter() - started
            self._fire_closing_events()
            state.times[Events.COMPLETED.name] = time.perf_counter() - started
            self._log(f"Engine run finished. Time taken: {_clock(time.perf_counter() - started)}")
        except BaseException as error:
            try:
                self._observe(error)
            finally:  # after a second Ctrl-C too
                self._take_back()
            raise
        finally:
            self.progress.running = self.progress.iterating = self.should_interrupt = self._has_entered = False
            state.batch = None
            with ExitStack() as at_exit:  # an error of one leaves none out
                for function in reversed(self.on_exit):
                    at_exit.callback(function)

    @contextmanager
    def session(self) -> Iterator[Any]:
        """A run without epochs, in which iterations are done on request."""
        with self._between_events(None, has_epochs=False):
            self.progress.session_open = True
            self.begin_section("between_updates")
            try:
                yield self.state
                self.progress.session_left = True
                self._take_up_stops(between_updates=True)
            finally:
                self.progress.session_open = False
                self.begin_section("handler")

    def _begin_epoch(self) -> None:
        """Begins an epoch, or continues the one that a call of `run` has left open. Handlers may replace the data."""
        state = self.state
        if not self.progress.epoch_open:
            self.progress.epoch_open, self.progress.epoch_started, self.progress.epoch_iteration = True, False, 0
            state.epoch += 1
            if self.progress.data_ended:
                data: Any = state.dataloader
                state.epoch_length = self._expected_length(data) or state.epoch_length
                self.fire_event(Events.DATALOADER_STOP_ITERATION)
        if not self.progress.epoch_started:
            self.fire_event(Events.EPOCH_STARTED)
            self.progress.epoch_started = True

    def _run_epoch(self) -> None:
        state, progress, started = self.state, self.progress, time.perf_counter()
        self._begin_epoch()
        data: Any = state.dataloader
        self.begin_section("data")
        batches, kept = self._open(data), False
        progress.reading, progress.data_ended = True, False
        state.epoch_length = batches.length or state.epoch_length
        try:
            over = self._epoch_is_over(batches)
            while not (over or progress.stops or self._reached_max_iters()):
                state.batch = None  # not held while the next one is fetched
                self.begin_section("data")
                if state.dataloader is not None:
                    self.fire_event(_GET_BATCH_STARTED)
                # In no local variable: it would keep these micro-batches alive while the next are fetched.
                state.batch = next(batches, _END)
                if state.batch is _END:
                    state.batch, over = None, True
                    break
                if state.dataloader is not None:
                    self.fire_event(_GET_BATCH_COMPLETED)
                self._iterate(batches)
                over = not progress.stops and self._epoch_is_over(batches)
            if over:
                self._close_epoch(started)
            stopped = progress.epoch_open and bool(self.should_terminate or self.should_interrupt)
            kept = stopped and batches.keep_open()
        finally:
            progress.reading = False
            if not kept:
                batches.close()

    def _iterate(self, batches: Batches) -> None:
        """Runs one iteration on `state.batch`, which handlers before it may replace."""
        state, progress = self.state, self.progress
        state.iteration += 1
        progress.iterating, progress.settled = True, False
        self.fire_event(_ITERATION_STARTED)
        state.output = self.process(self, batches.batch(state.batch))
        progress.iterating = False
        progress.epoch_iteration += progress.epoch_open
        try:
            self.fire_event(_ITERATION_COMPLETED)
        finally:
            self._take_up_stops()

    def _take_up_stops(self, *, between_updates: bool = False) -> None:  # noqa: ARG002  # for subclasses
        """Has what was asked for take effect. Called after each iteration and epoch, where a run begins or a session ends."""
        progress = self.progress
        progress.stops = bool(self.should_terminate or self.should_interrupt)
        progress.epoch_ends = progress.epoch_iteration > 0 and bool(self.should_terminate_single_epoch)

    def _close_epoch(self, started: float) -> None:
        if self.should_terminate_single_epoch:
            self.fire_event(Events.TERMINATE_SINGLE_EPOCH, iter_counter=self.progress.epoch_iteration)
        else:
            self.progress.data_ended, self.state.epoch_length = True, self.progress.epoch_iteration
        fires = self.should_terminate_single_epoch != "skip_epoch_completed"
        self.should_terminate_single_epoch = False
        self.progress.epoch_open = self.progress.reading = False
        times = self.state.times
        times[Events.EPOCH_COMPLETED.name] = time.perf_counter() - started
        if fires:
            self.fire_event(Events.EPOCH_COMPLETED)
            times[Events.EPOCH_COMPLETED.name] = time.perf_counter() - started
        self._log(f"Epoch[{self.state.epoch}] Complete. Time taken: {_clock(time.perf_counter() - started)}")
        self.should_terminate_single_epoch = False  # its handlers can only ask for what is done already

    def _fire_closing_events(self) -> None:
        completes = self.should_terminate != "skip_completed"
        if self.should_terminate:
            self.progress.ended = not completes
            self.fire_event(Events.TERMINATE)
        elif self.should_interrupt:
            self.fire_event(Events.INTERRUPT)
            return
        if completes:
            self.progress.ended = True
            self.fire_event(Events.COMPLETED)

    def _log(self, message: str) -> None:
        """For those who gave the engine a logger, as Ignite's users do with `setup_logger`; else it is for debugging."""
        level = logging.DEBUG if self.logger is logging.getLogger("ignite_train") else logging.INFO
        self.logger.log(level, message)

    def _epoch_is_over(self, batches: Batches) -> bool:
        progress = self.progress
        over = batches.length is not None and progress.epoch_iteration >= batches.length
        return over or progress.epoch_ends or not progress.ranks_have_more

    def _reached_max_iters(self) -> bool:
        limit = self.state.max_iters
        return limit is not None and self.state.iteration >= limit

    def _limit_is_reached(self) -> bool:
        state = self.state
        if state.max_iters is not None:
            return state.iteration >= state.max_iters
        return state.max_epochs is not None and state.epoch - self.progress.epoch_open >= state.max_epochs

    def _has_nothing_to_do(self) -> bool:
        """Whether the limits are reached before the run begins; asked where an earlier run has ended."""
        return self._limit_is_reached()

    def _observe(self, error: BaseException) -> None:
        """Shows `error` to every handler of EXCEPTION_RAISED, once."""
        note_error_in_pass(error)
        where = f"epoch {self.state.epoch}, iteration {self.state.iteration}"
        self.logger.error(f"the run ended at {where} by {describe_error(error)}")
        self.last_event_name = Events.EXCEPTION_RAISED
        for entry in entries(self, Events.EXCEPTION_RAISED):
            try:
                call(entry, (error,), {})
            except BaseException as raised:
                if raised is not error:
                    self.logger.exception("a handler of EXCEPTION_RAISED failed too; the first error is raised")

    def _take_back(self) -> None:
        """Takes back the counters of an iteration that did not finish, and a request that it has not answered."""
        if self.progress.iterating and self.progress.settled:
            self.progress.epoch_iteration += self.progress.epoch_open
            return
        self.state.iteration -= self.progress.iterating
        # EPOCH_STARTED does not ask again, the other events do.
        if self.progress.epoch_iteration > 0 and not self.progress.epoch_ends:
            self.should_terminate_single_epoch = False


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds, as Ignite writes them."""
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes) // 60:02d}:{int(minutes) % 60:02d}:{rest:06.3f}"


def iterate_on_request(loop: Loop, batches: Batches) -> None:
    """Runs one iteration on `loop.state.batch`, outside of the epochs of a run; see `Trainer.update`."""
    loop.begin_section("handler")
    loop.progress.updating = True
    try:
        loop._iterate(batches)
    except BaseException:
        loop._take_back()
        raise
    finally:
        loop.progress.updating = loop.progress.iterating = False
        loop.state.batch = None
        loop.begin_section("between_updates")
