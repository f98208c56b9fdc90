"""A rank that fails takes nobody hostage."""

from __future__ import annotations

import json
import logging
import threading
import time

from ignite.engine import Events
from torch.distributed.distributed_c10d import Store

from ignite_train import distributed
from ignite_train.engine import Trainer
from ignite_train.errors import TrainingError
from ignite_train.events import TrainEvents
from ignite_train.handler import Handler

__all__ = ["FailureBoard", "PeerFailureError"]

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.25  # between two looks at the board
_PATIENCE_SECONDS = 1.0  # for the main thread to come out by itself, and for the others to read
_LONGEST_MESSAGE = 2000  # characters of an exception's message
_SAFE_POINTS = (
    Events.EPOCH_STARTED
    | Events.GET_BATCH_STARTED
    | Events.GET_BATCH_COMPLETED
    | TrainEvents.MICRO_BATCH_STARTED
    | Events.ITERATION_COMPLETED
    | Events.EPOCH_COMPLETED
    | Events.COMPLETED
)


class PeerFailureError(TrainingError, RuntimeError):
    """Another rank failed, so that the run cannot go on here either.

    Attributes:
        rank: the rank that failed first.
        update: the update it was in, or had done last (`state.iteration`).
        error: its exception, as `"type: message"`.
    """

    def __init__(self, rank: int, update: int, error: str) -> None:
        self.rank, self.update, self.error = rank, update, error
        super().__init__(f"rank {rank} failed at update {update}: {error}")

    def __reduce__(self) -> tuple[type[PeerFailureError], tuple[int, int, str]]:
        return type(self), (self.rank, self.update, self.error)


class FailureBoard(Handler):
    """Ends all ranks within about two seconds, with a line that names the cause, when one of them raises in `trainer.run`.

    Without it the others wait in their next collective until its timeout, 10 or 30 minutes, or until the failed process is
    gone and a connection breaks. All ranks attach it alike: STARTED is collective. In a single process it does nothing.

    The rank that raises, wherever in the run that is, first writes its rank, update and exception to the store at which the
    ranks met; then its exception goes on unchanged, at most a second later. Only the first failure of a run is kept: what
    breaks because of it is no news. On every rank a thread looks at the store four times a second, through a connection of its
    own. When it finds the failure of another rank it logs `rank 1 failed at update 5: RuntimeError: ...` as an error, and then

    - a main thread that is still running raises `PeerFailureError` at the next event of the trainer. The handler for that is
      attached only now: an update costs nothing before. (An exception thrown into the main thread from outside would reach
      more code, a long validation say, but it could strike inside any `finally` or `with`.)
    - a main thread that comes out with an exception of its own, because the connection broke or because all ranks raise
      alike, keeps that. A note about the first failure is added to it, unless it says the same.
    - a main thread that does neither for a second waits in a collective, or is busy elsewhere. Nothing wakes gloo from
      there, so the process ends with status 1: logs are flushed, but no `finally` and no `atexit` runs.

    A rank whose run has ended is left alone. A process that is killed writes nothing: the connection, the launcher and
    `HangWatch` notice that. An error raised before STARTED, such as a wrong argument on one rank alone, is not seen. Tried
    with gloo over a file, over TCP and under torchrun; not with NCCL.

    Example:
        >>> from ignite_train.handlers import FailureBoard
        >>> trainer = getfixture("trainer")
        >>> FailureBoard().attach(trainer)
        >>> trainer.run(getfixture("loader"), max_epochs=1).iteration
        4
    """

    def __init__(self) -> None:
        self._watch: _Watch | None = None

    def attach(self, trainer: Trainer) -> None:
        """Watches each run of `trainer`, from STARTED until the last handler of COMPLETED.

        A failure is written before handlers of EXCEPTION_RAISED that were attached earlier.
        """
        trainer.replace_default(self)
        trainer.prepend_event_handler(Events.STARTED, self._start)
        trainer.when_over.append(self._finish)
        trainer.prepend_event_handler(Events.EXCEPTION_RAISED, self._fail)

    def detach(self, trainer: Trainer) -> None:
        """Watches no later run of `trainer`; one that is running is watched until it is over."""
        trainer.remove_event_handler(self._start, Events.STARTED)

    def _start(self, trainer: Trainer) -> None:
        store = distributed.own_store()
        if store is not None:
            self._watch = _Watch(trainer, store)
            self._watch.start()

    def _finish(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _fail(self, error: BaseException) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if isinstance(error, PeerFailureError):
            watch.end()
            return
        text = f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
        cause = watch.end(text)
        if cause is not None and cause.error != text:
            error.add_note(f"{cause}. That came first and is most likely the cause.")


class _Watch(threading.Thread):
    """Looks at the board as long as one run lasts. Only this thread uses the store, so that the main thread cannot get stuck.

    Args:
        trainer: whose run it is.
        store: for this thread and this run.
    """

    def __init__(self, trainer: Trainer, store: Store) -> None:
        super().__init__(name="FailureBoard", daemon=True)
        self._trainer, self._store = trainer, store
        self._rank, self._world_size = distributed.rank(), distributed.world_size()
        self._over = threading.Event()
        self._error: str | None = None  # of this rank
        self._cause: PeerFailureError | None = None

    def end(self, error: str | None = None) -> PeerFailureError | None:
        """Called by the main thread when the run is over. Waits for the thread, but not for a store that does not answer.

        Args:
            error: the exception that ended the run.

        Returns:
            The failure of another rank that came first.
        """
        self._error = error
        self._over.set()
        self.join(2 * _PATIENCE_SECONDS)
        for event in _SAFE_POINTS:
            if self._trainer.has_event_handler(self._raise, event):
                self._trainer.remove_event_handler(self._raise, event)
        return self._cause

    def run(self) -> None:
        """Watches, and writes this rank's own failure."""
        try:
            while not self._over.wait(_POLL_SECONDS):
                if self._store.check(["first"]):
                    self._learn(self._store.get("first"))
                    self._insist()
                    return
            if self._error is None:
                self._store.add("informed", 1)
            else:
                self._write(self._error)
        except RuntimeError as error:  # the store is gone, and with it most likely the process that held it
            _logger.warning(f"rank {self._rank} looks for failures of other ranks no longer: {error}")

    def _write(self, error: str) -> None:
        record = json.dumps([self._rank, self._trainer.state.iteration, error])
        first = self._store.compare_set("first", "", record)
        if first != record.encode():
            self._learn(first)
            return
        self._store.add("informed", 1)
        deadline = time.monotonic() + _PATIENCE_SECONDS  # the store may be in this process, and end with it
        while int(self._store.get("informed")) < self._world_size and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)

    def _learn(self, first: bytes) -> None:
        self._cause = PeerFailureError(*json.loads(first))
        _logger.error(f"{self._cause} (rank {self._rank} was at update {self._trainer.state.iteration})")
        self._store.add("informed", 1)

    def _insist(self) -> None:
        """Gives the main thread a moment to come out, and ends the process if it does not."""
        self._trainer.add_event_handler(_SAFE_POINTS, self._raise)
        if not self._over.wait(_PATIENCE_SECONDS):
            _logger.error(f"rank {self._rank} ends here: it would wait for ever for the rank that failed")
            distributed.end_process(1)

    def _raise(self) -> None:
        if self._cause is not None:
            raise self._cause
