"""Iterations that are asked for one by one, in a session that begins and ends as a run does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ignite.engine import Events

from ignite_train.loop.limits import checked_limits
from ignite_train.loop.loop import Loop
from ignite_train.state import TrainState

__all__ = ["SessionLoop"]


class SessionLoop(Loop):
    """A loop that also does single iterations on request: in a session, which has no epochs and reads no data, or without."""

    state: TrainState

    def __init__(self, process: Callable[[Any, Any], Any]) -> None:
        super().__init__(process)
        self._session_is_open = False  # from STARTED to the closing events of a session
        self._updating = False  # an iteration that was asked for is under way
        self._has_warned_of_session = False

    @property
    def in_session(self) -> bool:
        """Whether a session is open: from after its STARTED to before its closing events."""
        return self._session_is_open

    @property
    def is_iterating(self) -> bool:
        """Whether an iteration is under way, of a run or on request: handlers of its events find the state half changed."""
        return self._iterating or self._updating

    def _limit_session(self, max_iters: int | None) -> None:
        """Sets the limits of a session that begins: None is the limit that was given before, if any.

        Raises:
            RuntimeError: `run` has left an epoch open.
            ValueError: `max_iters` is below 1 or below what was done already.
        """
        state = self.state
        if self._epoch_open:
            raise RuntimeError(
                f"session was opened in the middle of epoch {state.epoch}, which run has left after update "
                f"{state.iteration}; end the epoch with run first"
            )
        state.max_epochs = None
        state.max_iters = state.max_iters if max_iters is None else checked_limits(state, None, max_iters)[1]

    @contextmanager
    def _in_session(self) -> Iterator[None]:
        """What a run is from STARTED to its closing events, with iterations on request between them."""
        with self._between_events(None):
            self._session_is_open = True
            try:
                yield
            finally:
                self._session_is_open = False

    def _iterate_on(self, batch: Any) -> None:
        """Does one iteration on `batch`. After an exception the counters are those before it, unless it has had its effect."""
        self.state.batch = batch
        self._updating = self._iterating = True
        self._settled = False
        self.state.iteration += 1
        try:
            self.fire_event(Events.ITERATION_STARTED)
            self._process(self, self._batch())
            self._iterating = False
            self.fire_event(Events.ITERATION_COMPLETED)
        finally:
            self._take_back()
            self._updating = self._iterating = False
            self.state.batch = None
            self._begin_section("handler")

    def _refuse_nested_run(self) -> None:
        if self._session_is_open or self._updating:
            raise RuntimeError("run or session was called inside a session or an update of the same trainer; leave it first")
        super()._refuse_nested_run()

    def _refuse_update(self) -> None:
        """Raises where no iteration can be asked for.

        Raises:
            RuntimeError: a stop was asked for, or the limit is reached; or it is asked for inside a handler of its own run or
                iteration, or while `run` has left an epoch open.
        """
        state = self.state
        if self._session_is_open and not self._updating:
            if self._stopping():
                raise RuntimeError(
                    "update was called after a request to stop; leave the loop where trainer.should_terminate is set"
                )
            if self._reached_max_iters():
                raise RuntimeError(f"update was called after max_iters={state.max_iters} updates; raise session's max_iters")
            return
        if self._running or self._updating:
            raise RuntimeError("update was called inside a handler of its own run or update; call it from another trainer's")
        if self._epoch_open:
            raise RuntimeError(
                f"update was called in the middle of epoch {state.epoch}, which run has left after update "
                f"{state.iteration}; end the epoch with run first"
            )

    def _warn_of_no_session(self) -> None:
        """Says once what takes no part, where something would."""
        if (
            not self._session_is_open
            and not self._has_warned_of_session
            and (self.on_enter or self._has_handlers(Events.STARTED))
        ):
            self._has_warned_of_session = True
            self.logger.warning(
                "update was called without a session, in which STARTED, COMPLETED, FailureBoard, HangWatch and whatever else "
                "begins and ends with a run have no part; write: with trainer.session(): ..."
            )
