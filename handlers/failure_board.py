"""When one rank raises or is killed, all ranks stop within seconds, naming the cause."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

from ignite.engine import Events

from ignite_train.arguments import describe_error, named_ranks
from ignite_train.errors import TrainingError
from ignite_train.events import TrainEvents
from ignite_train.kinds_of_handlers import Handler
from ignite_train.kinds_of_handlers.start_description import start_description
from ignite_train.ranks import collectives
from ignite_train.ranks.process import has_ended, own_process
from ignite_train.ranks.sealed_messages import SealedMessages
from ignite_train.ranks.whereabouts import find_whereabouts
from ignite_train.trainer import Trainer

__all__ = ["FailureBoard", "PeerFailureError"]

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.25  # between two looks at the board
_PATIENCE_SECONDS = 1.0  # for the main thread to end the run by itself
_PARTS = 10  # of that second
_LONG_WAIT_SECONDS = 60.0  # in one collective, after which one that lost the store is taken for lost too
_DEATH = "its process is no longer running"
_ROLL_CALL_SECONDS = 2.0  # for the other ranks to answer
_LONGEST_LINE = 300  # characters of an exception that other ranks quote; its own rank has all of it
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
    """Another rank failed, so that the run cannot continue on this one.

    Attributes:
        rank: the rank that failed first.
        update: the update that was running there, or had run last (`state.iteration`).
        error: its exception, as `"type: message"`, of which it is the first line and at most 300 characters.
    """

    def __init__(self, rank: int, update: int, error: str) -> None:
        self.rank, self.update, self.error = rank, update, error
        super().__init__(f"rank {rank} failed at update {update}: {error}")


class FailureBoard(Handler):
    """Ends all ranks within seconds, with a line that names the cause, when a rank raises in `trainer.run` or is killed.

    Without it the other ranks wait in their next collective until its timeout (10 or 30 minutes), or until a connection breaks.
    All ranks must attach it: the beginning of a run is collective. In a single process it does nothing.

    A rank that raises first writes its rank, update and exception to the store at which the ranks met. Its exception is raised
    unchanged as soon as all others have read that, at most four seconds later. Only the first failure of a run is kept. On
    every rank a thread reads the store four times a second, through a connection of its own. When it finds the failure of
    another rank it logs `rank 1 failed at update 5: RuntimeError: ...` as an error, and then

    - a main thread that is still running raises `PeerFailureError` at the next event of the trainer;
    - a main thread that ends with an exception of its own keeps it, with a note about the first failure, unless it is the same;
    - where the main thread does neither within a second, it most likely waits in a collective of gloo, which cannot be
      interrupted. The process ends with status 1: logs are flushed, but no `finally` and no `atexit` runs.

    A process that is killed writes nothing, and gloo does not wake a thread that sends to it. So each rank also looks up the
    processes on its own machine, and says `rank 1 failed at update 5: its process is no longer running`. Each rank that fails
    or learns of a failure waits for the answers of the others, and names those without one: `rank 1 is gone: no longer running`
    where the process can be looked up, else `rank 1 is gone or standing still: no answer came within 2 s`. If the process that
    holds the store was killed, which is rank 0's unless the ranks met in a file or torchrun started them, the line is `rank 0,
    which hosts the store, is gone`, and the others end: on another machine once the main thread has stood in one collective for
    a minute. A launcher that sends SIGTERM to the other ranks at once, as `idist.Parallel` and torchrun do, leaves no time for
    that and names the rank itself; with `StopOnSignal` attached both happen.

    The messages carry a code that only these ranks can make, see `ignite_train.ranks.sealed_messages`. An error before a run,
    such as a wrong argument on one rank alone, is not noticed. Tried with gloo, not with NCCL.

    Example:
        >>> FailureBoard().attach(trainer)
        >>> trainer.run(data, max_epochs=1).iteration
        4
    """

    is_collective = True
    attached_once = True

    def __init__(self) -> None:
        self._watch: _Watch | None = None

    def attach(self, trainer: Trainer) -> None:
        """Watches each run of `trainer`, from before STARTED until after the last handler of COMPLETED.

        A failure is written before handlers of EXCEPTION_RAISED that were attached earlier.
        """
        trainer.replace_default(self)
        trainer.on_enter.append(self._start)
        trainer.on_exit.append(self._finish)
        trainer.prepend_event_handler(Events.EXCEPTION_RAISED, self._fail)

    def _start(self, trainer: Trainer) -> None:
        messages = SealedMessages.start(partial(start_description, trainer))
        if messages is not None:
            self._watch = _Watch(trainer, messages)
            self._watch.start()

    def _finish(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _fail(self, error: BaseException) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        text = _in_one_line(error)
        from_peer = isinstance(error, PeerFailureError)
        cause = watch.end(None if from_peer else text)
        if watch.gone:
            error.add_note(f"{watch.gone}. If a connection broke, that is most likely why.")
        elif cause is not None and not from_peer and cause.error != text:
            error.add_note(f"{cause}. That came first and is most likely the cause.")


def _in_one_line(error: BaseException) -> str:
    """Its class and the first line of its message, shortened."""
    line = describe_error(error).partition("\n")[0]
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 4]} ..."


class _Watch(threading.Thread):
    """Reads the store during one run. Only this thread uses the store, so that the main thread cannot get stuck in it.

    The keys in the store are

    - `process of <rank>`: with it ranks on the same machine can check whether the process is running;
    - `first`: the first failure;
    - `ended by <rank>`: the run of this rank has ended normally;
    - `first heard by <rank>`, `end heard by <rank>`: this rank knows of the first failure, or that the store ends;
    - `roll called by <rank>`: this rank knows which ranks have heard of the first failure;
    - `news`: there is something to read. Only this key is polled.

    Args:
        trainer: whose run it is.
        messages: for this thread and this run.

    Attributes:
        gone: which ranks are gone, as a sentence without its full stop; empty if none.
    """

    def __init__(self, trainer: Trainer, messages: SealedMessages) -> None:
        super().__init__(name="FailureBoard", daemon=True)
        self._trainer, self._messages = trainer, messages
        self._rank = collectives.rank()
        self._others = [rank for rank in range(collectives.world_size()) if rank != self._rank]
        self._over = threading.Event()
        self._error: str | None = None  # of this rank
        self._cause: PeerFailureError | None = None
        self._host_ended = False
        self._main = threading.get_ident()
        self._running = self._others  # the ranks of which it is not known that their run has ended
        self._processes: dict[str, list[str]] = {}  # what was read of them so far, by its name in the store
        self.gone = ""

    def end(self, error: str | None = None) -> PeerFailureError | None:
        """Called by the main thread when the run is over. Waits for the thread, but not for a store that does not answer.

        Args:
            error: the exception that ended the run.

        Returns:
            The failure of another rank that came first.
        """
        self._error = error
        self._over.set()
        self.join(2 * _ROLL_CALL_SECONDS)
        for event in _SAFE_POINTS:
            if self._trainer.has_event_handler(self._raise, event):
                self._trainer.remove_event_handler(self._raise, event)
        return self._cause

    def run(self) -> None:
        """Reads the failures of other ranks, and writes this rank's own."""
        try:
            self._messages.write(f"process of {self._rank}", own_process())
            while not self._over.wait(_POLL_SECONDS):
                is_news = self._messages.has("first" if self._host_ended else "news")
                if (is_news and self._read()) or self._find_death():
                    self._insist()
                    return
            if self._error is None:
                self._write_end()
            else:
                self._write_failure(self._error)
        except RuntimeError as error:  # the store is gone, and with it most likely the process that held it
            self._lose_store(error)

    def _write_end(self) -> None:
        """Writes that the run of this rank has ended normally. The host of the store waits until the other ranks know it."""
        self._messages.write(f"ended by {self._rank}", value=True)
        if self._rank == self._messages.host_rank:
            self._messages.write("news", value=True)
            self._missing("end heard", self._others)

    def _write_failure(self, error: str) -> None:
        own = [self._rank, self._trainer.state.iteration, error]
        first = self._messages.write_once("first", own)
        self._messages.write("news", value=True)
        if first == own:
            self._answer("first heard")
        else:
            self._learn(first)
        self._call_roll()

    def _read(self) -> bool:
        """Whether another rank has failed."""
        host = self._messages.host_rank
        if host is not None and not self._host_ended and self._messages.read(f"ended by {host}"):
            self._host_ended = True
            self._answer("end heard")
        first = self._messages.read("first")
        if first is not None:
            self._learn(first)
        return first is not None

    def _find_death(self) -> bool:
        """Whether another rank was killed in its run, and this rank's main thread has not ended its own by itself.

        Gloo does not wake a thread that only sends when the process to which it sends is gone.
        """
        dead = self._dead(self._running)  # before the ends are read: what a rank wrote before it died counts
        ended = {rank for rank in dead if self._messages.read(f"ended by {rank}")}
        self._running = [rank for rank in self._running if rank not in ended]
        if dead == ended or self._ends_by_itself():
            return False
        first = self._messages.write_once("first", [min(dead - ended), self._trainer.state.iteration, _DEATH])
        self._messages.write("news", value=True)
        self._learn(first)
        return True

    def _learn(self, first: tuple[int, int, str]) -> None:
        self._cause = PeerFailureError(*first)
        _logger.error(f"{self._cause} (rank {self._rank} was at update {self._trainer.state.iteration})")
        self._answer("first heard")

    def _insist(self) -> None:
        """Gives the main thread a second to end the run, and then ends the process."""
        self._trainer.add_event_handler(_SAFE_POINTS, self._raise)
        self._call_roll()
        if not self._ends_by_itself():
            _logger.error(f"rank {self._rank} ends now: most likely it waits for the rank that failed")
            collectives.end_process(1)

    def _ends_by_itself(self) -> bool:
        """Whether the main thread ends the run within a second.

        The second consists of parts: a process that stands still in a part, as on a busy machine, has the others.
        """
        return any(self._over.wait(_PATIENCE_SECONDS / _PARTS) for _ in range(_PARTS))

    # --- which ranks are still running ---

    def _answer(self, subject: str) -> None:
        self._messages.write(f"{subject} by {self._rank}", value=True)

    def _missing(self, subject: str, ranks: list[int]) -> list[int]:
        """Waits until each of these has answered, has ended normally or is dead; returns those that did not answer."""
        missing, deadline = ranks, time.monotonic() + _ROLL_CALL_SECONDS
        while True:
            dead = self._dead(missing)  # before the answers are read: what a rank wrote before it died counts
            answers = {rank: [f"{subject} by {rank}", f"ended by {rank}"] for rank in missing}
            found = self._messages.read_all(name for names in answers.values() for name in names)
            missing = [rank for rank, names in answers.items() if not found.keys() & {*names}]
            if {*missing} <= dead or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_SECONDS / 10)

    def _dead(self, ranks: list[int]) -> set[int]:
        """The ranks, among `ranks`, whose processes are known to have ended."""
        names = {rank: f"process of {rank}" for rank in ranks}
        if not self._processes.keys() >= {*names.values()}:
            self._processes |= self._messages.read_all(name for name in names.values() if name not in self._processes)
        return {rank for rank, name in names.items() if has_ended(self._processes.get(name, []))}

    def _call_roll(self) -> None:
        """Waits for the answers of all ranks to the first failure, and says which are gone."""
        try:
            missing = self._missing("first heard", self._others)
            dead = self._dead(missing)
            self._answer("roll called")
        except RuntimeError:  # the store has ended: it is not known which ranks would have answered
            return
        silent = [rank for rank in missing if rank not in dead]
        findings = [
            *([f"{named_ranks(sorted(dead), 'is', 'are')} gone: no longer running"] if dead else []),
            *(
                [f"{named_ranks(silent, 'is', 'are')} gone or standing still: no answer came within {_ROLL_CALL_SECONDS:g} s"]
                if silent
                else []
            ),
        ]
        self.gone = "; ".join(findings)
        if self.gone:
            _logger.error(self.gone)
        if self._rank == self._messages.host_rank:  # the store may end with this process: wait until the others have read it
            self._missing("roll called", [rank for rank in self._others if rank not in missing])

    def _lose_store(self, error: RuntimeError) -> None:
        """Says so, and ends the run if the process that held the store was killed: no other rank can report that."""
        consequence = f"rank {self._rank} no longer notices failures of other ranks: {error}"
        has_ended_well = self._over.is_set() and self._error is None
        if self._host_ended or has_ended_well or self._rank == self._messages.host_rank:
            level = logging.WARNING if self._rank == self._messages.host_rank else logging.INFO
            _logger.log(level, f"the store at which the ranks met has ended; {consequence}")
            return
        self.gone = f"{self._messages.host}, which hosts the store, is gone"
        _logger.error(f"{self.gone}; {consequence}")
        host = self._messages.host_rank
        if self._cause is None and host is not None and self._host_is_lost(host):
            self._cause = PeerFailureError(host, self._trainer.state.iteration, _DEATH)
        if self._cause is not None:
            self._insist()

    def _host_is_lost(self, host: int) -> bool:
        """Waits for the end of this rank's run; True if it cannot end by itself.

        A process on the same machine can be looked up. One on another may live though its connection broke: it is taken for
        lost where the main thread does not come out of a collective either.
        """
        process, place, waited = self._processes.get(f"process of {host}", []), None, 0.0
        while not (ended := has_ended(process)) and waited < _LONG_WAIT_SECONDS:
            if self._over.wait(_POLL_SECONDS):
                return False
            stands, before = find_whereabouts(self._main), place
            place = (stands, self._trainer.state.num_micro_batches, collectives.collectives_begun())
            waited = waited + _POLL_SECONDS if stands.waits and place == before else 0.0
        return not (ended and self._ends_by_itself())

    def _raise(self) -> None:
        if self._cause is not None:
            raise self._cause
