"""A rank that hangs is noticed, on all ranks, with the stacks of all threads."""

from __future__ import annotations

import faulthandler
import logging
import math
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from ignite.engine import Engine

from ignite_train.arguments import named_ranks, path_of, real_number
from ignite_train.kinds_of_handlers import Handler
from ignite_train.kinds_of_handlers.start_description import start_description
from ignite_train.ranks import collectives
from ignite_train.ranks.sealed_messages import SealedMessages
from ignite_train.ranks.whereabouts import ASKED_BY, find_whereabouts
from ignite_train.trainer import Trainer

__all__ = ["HangWatch"]

_logger = logging.getLogger(__name__)
_STDERR = 2
_PATIENCE_SECONDS = 2.0  # to wait for a store that does not answer, or for ranks that have not told the finding
_SILENCE_SECONDS = 60.0  # of a rank for which another waits in a collective
_REPORTS = 3  # that a rank makes before it counts that another has left; it looked for the second one after it was heard


class HangWatch(Handler):
    """Ends all ranks, each with its stacks on standard error, when one of them keeps the others waiting for `timeout_seconds`.

    All ranks must attach it: the beginning of a run is collective. It costs an update nothing. On every rank a thread writes
    the trainer's counters to the store at which the ranks met, about once a second. With several ranks it acts in three cases
    only:

    - A rank has left its `session`, and another waits in a later update, which can never end.
    - A rank has been silent for `timeout_seconds`, or for 60 seconds while another waits for it in a collective (180 by default
      in the first update, more with over 480 ranks): its machine is gone, its process is stopped, or it runs code that does not
      release Python's lock.
    - No rank has begun an update, a micro-batch or a collective for `timeout_seconds`, a rank has waited at one place in a
      collective or in backward for as long, and the ranks stand at different places: another rank does not wait, waits
      elsewhere, is in another update, or has left the run.

    So a validation, a save or a rollout that all ranks do at the same time may take any time; if a single rank does it while
    the others wait, it must end within `timeout_seconds`. A rank that waits for the thread that writes a checkpoint stands
    where that thread does, so that a disk that hangs is named. Micro-batches of an evaluator that is attached count as
    progress. The clock stands still while the process is suspended.

    When it acts, every rank that is still running logs which ranks are behind and where each one is, writes the stacks of all
    its threads to standard error, and ends its process with status 1. A single process watches itself, and acts when it has
    made no progress for `timeout_seconds`. Tried with gloo, not with NCCL, whose own watchdog may be faster.

    With `heartbeat` the thread also renews the modification time of a file, for a program that looks at the process from the
    outside, such as the liveness probe of Kubernetes. It does so when the run starts, and whenever it finds that some rank has
    begun an update, a micro-batch or a collective since it last looked; it removes the file when the run is over. So the age of
    the file, in seconds, is the time for which no rank has made progress, or for which this process has stood still. If the
    file cannot be written, one warning says so and the run continues.

    Args:
        timeout_seconds: how long a rank may be silent or keep other ranks waiting.
        first_timeout_seconds: the same for the first update of a run, in which workers start and code is compiled; None means
            three times `timeout_seconds`.
        standstill_seconds: how long several ranks may make no progress together; None means without limit.
        heartbeat: the file, in a directory that exists, on a disk of this machine; the processes of a machine may share it.
            None means none.

    Raises:
        TypeError: a time is not a number, or `heartbeat` is not a path.
        ValueError: `timeout_seconds` is not greater than 0, or one of the others is less than `timeout_seconds`.

    Example:
        >>> HangWatch(timeout_seconds=120).attach(trainer)
        >>> trainer.run(data, max_epochs=1).iteration
        4
    """

    is_collective = True
    attached_once = True

    def __init__(
        self,
        timeout_seconds: float = 600.0,
        *,
        first_timeout_seconds: float | None = None,
        standstill_seconds: float | None = None,
        heartbeat: str | Path | None = None,
    ) -> None:
        self.timeout_seconds = real_number("timeout_seconds", timeout_seconds, above=0)
        first = 3 * self.timeout_seconds if first_timeout_seconds is None else first_timeout_seconds
        self.first_timeout_seconds = real_number("first_timeout_seconds", first, at_least=self.timeout_seconds)
        self.standstill_seconds = (
            None
            if standstill_seconds is None
            else real_number("standstill_seconds", standstill_seconds, at_least=self.timeout_seconds)
        )
        self.heartbeat = None if heartbeat is None else path_of("heartbeat", heartbeat).absolute()
        self._evaluator: Engine | None = None
        self._watch: _Watch | None = None

    def attach(self, trainer: Trainer, *, evaluator: Engine | None = None) -> None:
        """Watches each run of `trainer` from its beginning to its end; micro-batches of `evaluator` count as progress."""
        self._evaluator = evaluator
        trainer.replace_default(self)
        trainer.on_enter.append(self._start)
        trainer.on_exit.append(self._finish)

    def _start(self, trainer: Trainer) -> None:
        alone = collectives.world_size() == 1
        standstill = self.timeout_seconds if alone else self.standstill_seconds
        timeouts = self.timeout_seconds, self.first_timeout_seconds, standstill
        self._watch = _Watch(trainer, self._evaluator, *timeouts, self.heartbeat)

    def _finish(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._watch = None


class _Report(NamedTuple):
    """The report that a rank writes for the others.

    Attributes:
        beat: counts up as long as the process is running.
        update: number of the running update.
        micro_batch: number of the running micro-batch.
        evaluated: micro-batches of the running evaluation.
        collectives: collectives begun so far, in all process groups.
        waits: whether its main thread is at a place where it waits for other ranks.
        where: function, file and line of its main thread, or of the thread for which that one waits.
        left: whether it has made the last update of its session.
        over: whether its run has ended.
        has_told: whether it knows that the training hangs, and has written its stacks.
    """

    beat: int
    update: int
    micro_batch: int
    evaluated: int
    collectives: int
    waits: bool
    where: str
    left: bool
    over: bool
    has_told: bool

    @property
    def progress(self) -> tuple[int, ...]:
        """The numbers that change when the rank makes progress."""
        return self.update, self.micro_batch, self.evaluated, self.collectives

    @property
    def place(self) -> tuple[int, str]:
        """Where the rank stands. All ranks that do not wait for others count as at work, wherever they are.

        Of the code that has asked for a collective the function counts, and not the line: `if rank == 0: broadcast(weights)
        else: broadcast(received)` is one collective.
        """
        if not self.waits:
            return self.update, "at work"
        return self.update, self.where.rpartition(":")[0] if ASKED_BY in self.where else self.where


class _Heartbeat:
    """The file that says when a rank last made progress. It is written by one thread, and not by the one that decides."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._has_warned = False

    def renew(self) -> None:
        """Sets the modification time to the time of the file system."""
        try:
            if self._path is not None:
                self._path.touch()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(f"the heartbeat of HangWatch cannot be written: {error}; training continues without it")

    def end(self) -> None:
        """Removes the file, so that what the process does after the run is not taken for a hang."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


class _Watch:
    """Two threads for one run: one exchanges reports through the store, and may get stuck in it; the other decides.

    Their clock stands still while the process is suspended: otherwise it would find all others silent when it wakes up.
    """

    def __init__(
        self,
        trainer: Trainer,
        evaluator: Engine | None,
        timeout: float,
        first_timeout: float,
        standstill: float | None = None,
        heartbeat: Path | None = None,
    ) -> None:
        self._trainer, self._evaluator, self._standstill = trainer, evaluator, standstill
        self._heartbeat, self._has_progress = _Heartbeat(heartbeat), False
        self._timeout, self._first_timeout = timeout, first_timeout
        self._main, self._first_update = threading.get_ident(), trainer.state.iteration + 1
        self._rank, world_size = collectives.rank(), collectives.world_size()
        self._interval = min(self._timeout / 8, max(1.0, world_size / 64))  # every rank reads what every other wrote
        self._over = threading.Event()
        self._clock = self._answered = self._moved = 0.0
        self._heard = [0.0] * world_size
        self._arrived = [0.0] * world_size  # where each rank stands
        self._reports: list[_Report | None] = [None] * world_size
        self._verdict, self._has_told = "", False
        self._apart: tuple[list[int], list[int], int] = [], [], 0  # who has left, who waits in a later update, and in which
        self._beats: dict[int, int] = {}  # when that was found first
        self._messages = SealedMessages.start(partial(start_description, trainer))
        self._threads = [threading.Thread(target=work, name="HangWatch", daemon=True) for work in (self._talk, self._judge)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Called by the main thread when the run is over. Waits for the threads, but not for a store that does not answer."""
        self._over.set()
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)

    # --- the reports of all ranks ---

    def _talk(self) -> None:
        """Writes this rank's report, reads those of the others and renews the heartbeat, once an interval.

        When the run is over it does the first two a last time.
        """
        for beat in count():
            over = self._over.is_set()
            self._hear(self._rank, self._look(beat, over=over))
            try:
                self._exchange()
            except RuntimeError as error:  # the store is gone, most likely with the process that hosted it
                if not over and self._messages is not None:  # whether it was killed is for FailureBoard to say
                    host = f"{self._messages.host}, which hosts the store, has ended"
                    _logger.info(f"{host}; rank {self._rank} watches only itself from now on: {error}")
                self._messages = None
            if over:
                self._heartbeat.end()
                return
            if self._has_progress:
                self._has_progress = False
                self._heartbeat.renew()
            self._over.wait(self._interval)

    def _look(self, beat: int, *, over: bool) -> _Report:
        state, evaluator = self._trainer.state, self._evaluator
        where, waits = find_whereabouts(self._main)
        evaluated = 0 if evaluator is None else evaluator.state.iteration
        begun = collectives.collectives_begun()
        counters = state.iteration, state.num_micro_batches, evaluated, begun
        return _Report(beat, *counters, waits, where, self._trainer.progress.session_left, over, self._has_told)

    def _exchange(self) -> None:
        messages = self._messages
        if messages is None:
            return
        messages.write(str(self._rank), self._reports[self._rank])
        for rank, report in messages.read_all(str(rank) for rank in range(len(self._reports)) if rank != self._rank).items():
            self._hear(int(rank), _Report(*report))
        if self._verdict:
            messages.write_once("verdict", self._verdict)
        elif messages.has("verdict"):
            self._verdict = messages.read("verdict") or ""
        self._answered = self._clock

    def _hear(self, rank: int, report: _Report) -> None:
        before = self._reports[rank]
        self._reports[rank] = report
        if before is None or report.beat != before.beat:
            self._heard[rank] = self._clock
        if before is None or report.progress != before.progress or report.over != before.over:
            self._moved, self._has_progress = self._clock, True
        if before is None or report.place != before.place:
            self._arrived[rank] = self._clock

    # --- whether the run hangs ---

    def _judge(self) -> None:
        latest = time.monotonic()
        while not self._over.wait(self._interval / 2):
            now = time.monotonic()
            self._clock += min(now - latest, self._interval)
            latest = now
            verdict = self._verdict or self._find_hang()
            if verdict:
                self._verdict = verdict
                self._conclude()

    def _find_hang(self) -> str:
        own = self._reports[self._rank]
        limit = self._first_timeout if own is None or own.update <= self._first_update else self._timeout
        patience = self._patience_with_silence(own, limit)
        if self._trainer.replicas.are_elastic and own is not None and "(members.py:" in own.where.partition(ASKED_BY)[0]:
            return ""  # it waits for other replicas, and how long it does has a limit of its own
        messages = self._messages
        if messages is None:
            known = [self._rank]
        elif self._clock - self._answered > patience:
            return (
                f"the store at which the ranks met has not answered for {self._clock - self._answered:.1f} s: its host, "
                f"{messages.host}, is stopped or cannot be reached"
            )
        else:
            known = [rank for rank, report in enumerate(self._reports) if report is None or not report.over]
        if uneven := self._uneven():
            return uneven
        silent = [rank for rank in known if self._clock - self._heard[rank] > patience]
        if silent:
            return f"{named_ranks(silent, 'is', 'are')} silent for more than {patience:g} s; {self._places()}"
        if not self._waits_in_vain(known, limit):
            limit = math.inf if self._standstill is None else max(limit, self._standstill)
        if self._clock - self._moved > limit:
            return f"no rank has moved for more than {limit:g} s; {self._behind(known)}; {self._places()}"
        return ""

    def _uneven(self) -> str:
        """Which ranks have left their session although others wait in a later update, with the places of all.

        Reports are of different moments, and a script may put the counters back: all these ranks must say so again and again.
        """
        reports = {rank: report for rank, report in enumerate(self._reports) if report is not None}
        latest = max((report.update for report in reports.values() if report.waits and not report.left), default=0)
        left = [rank for rank, report in reports.items() if report.left and report.update < latest]
        ahead = [rank for rank, report in reports.items() if report.waits and not report.left and report.update == latest]
        if (left, ahead, latest) != self._apart:
            self._apart, self._beats = (left, ahead, latest), {rank: report.beat for rank, report in reports.items()}
        renewed = [reports[rank].beat - self._beats[rank] for rank in (*left, *ahead) if not reports[rank].over]
        if not left or min(renewed) < _REPORTS:
            return ""
        who = named_ranks(left, "has left the session", "have left the session")
        return f"{who} before update {latest}, and all ranks must call update equally often; {self._places()}"

    def _patience_with_silence(self, own: _Report | None, limit: float) -> float:
        """For how long another rank may be silent: a shorter time once this rank has waited for it as long in a collective."""
        waited = self._clock - self._arrived[self._rank] if own is not None and own.waits else 0.0
        shorter = max(_SILENCE_SECONDS, 8 * self._interval) * limit / self._timeout
        return min(limit, shorter) if waited > shorter else limit

    def _waits_in_vain(self, known: list[int], limit: float) -> bool:
        """Whether a rank has waited at one place for longer than `limit`, and another is not there."""
        reports = [(rank, report) for rank in known if (report := self._reports[rank]) is not None]
        one_waits = any(report.waits and self._clock - self._arrived[rank] > limit for rank, report in reports)
        some_have_left = len(known) < len(self._reports)
        return one_waits and (some_have_left or len({report.place for _, report in reports}) > 1)

    def _behind(self, ranks: list[int]) -> str:
        """Which ranks are behind: in an earlier update or micro-batch, or at work while others wait."""
        positions = {
            rank: (report.update, report.micro_batch, report.waits)
            for rank in ranks
            if (report := self._reports[rank]) is not None
        }
        last = [rank for rank, position in positions.items() if position == min(positions.values())]
        return f"{named_ranks(last, 'is', 'are')} behind" if len(last) < len(positions) else "no rank is ahead of the others"

    def _places(self) -> str:
        return "; ".join(
            f"rank {rank} has not begun the run"
            if report is None
            else f"rank {rank} has left the run at update {report.update}"
            if report.over
            else f"rank {rank} at update {report.update} in {report.where}"
            for rank, report in enumerate(self._reports)
        )

    def _conclude(self) -> None:
        """Logs the finding and the stacks, waits until the others have done so too, and ends the process.

        A rank that ends breaks the connections of the others. One that has not got so far by then would report that instead.
        """
        _logger.error(f"training hangs: {self._verdict}. The stacks of rank {self._rank} follow; then it ends.")
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        self._has_told = True
        latest = time.monotonic() + _PATIENCE_SECONDS
        while self._some_have_not_told() and time.monotonic() < latest:
            time.sleep(self._interval / 4)
        time.sleep(3 * self._interval)  # for the others to learn that this rank has done so
        collectives.end_process(1)

    def _some_have_not_told(self) -> bool:
        """Whether a rank that is still in the run has not said that it has told the finding, or this one has not said so."""
        return self._messages is not None and any(
            report is not None and not (report.over or report.has_told) for report in self._reports
        )
