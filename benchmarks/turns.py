"""Contestants that train in turns, each in a process of its own, with a model that is compiled once for all rounds.

A contestant is a loop that asks a loader for micro-batches. The loader lets it run for its turn, a few updates, and then makes
it wait until its next one, so that the rounds of `interleaving.py` can be had from loops that are called once. One that raises,
or whose process dies, has its reason in its row, and the others continue.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.nn.utils import parameters_to_vector

import contestants
from card import forget_peak, free_cached, now, peak_gib, settle, wait_for
from contestants import Contestant, MicroBatches, Outcome, Work
from interleaving import Rounds, interleave
from own_process import Failure, OwnProcess, ProcessFailedError

WARM_UP_UPDATES = 3  # before the first turn: a second trainer may compile again, and CUDA graphs are recorded
UNTIMED_UPDATES = 2  # at the beginning of a turn: torch gets its memory again
MAX_UPDATES = 2000
SAMPLED = 1024  # elements of each parameter
NUMBER = 10**5  # of updates that a loader says it has
TO_PREPARE, TO_TRAIN = 240.0, 90.0  # seconds to wait for an answer


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Attributes:
        run: the loop.
        compiled: with which arguments its model is compiled; None: it is not.
    """

    run: Contestant
    compiled: Mapping[str, Any] | None = None


class Task(Protocol):
    """What is trained. It is sent to the processes."""

    @property
    def device(self) -> str:
        """Where."""

    @property
    def steps(self) -> int:
        """Micro-batches to an update."""

    def work(self, compiled: Mapping[str, Any] | None) -> Work:
        """The same for all, with a list of micro-batches on the device, which is repeated."""


SomeTask = TypeVar("SomeTask", bound=Task)


@dataclass
class Result:
    """What came out for one task.

    Attributes:
        rounds: seconds of an update; of those that did not fail.
        apart: how far parameters are from those of the reference after a few updates, relative to how far these have moved.
        other_work: why the work was not the same; of those of which this must be said.
        failed: the error of each contestant that failed.
        peaks: of memory, in GiB.
        updates: in a turn.
    """

    rounds: Rounds = field(default_factory=lambda: Rounds({}))
    apart: dict[str, float] = field(default_factory=dict)
    other_work: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    updates: int = 0

    @property
    def turns(self) -> str:
        """How many rounds there were, and of how many updates."""
        return f"rounds: {max(map(len, self.rounds.pairs.values()), default=0)} of {self.updates} updates"

    def row(self, name: str, figures: Callable[[], Sequence[str]], width: int) -> list[str]:
        """A row of a table of so many columns: the name, the figures, and how far the parameters are apart."""
        if name in self.failed:
            return [name, f"failed: {self.failed[name]}", *[""] * (width - 2)]
        other = f"; not the same work: {self.other_work[name]}" if name in self.other_work else ""
        return [name, *figures(), f"{self.apart[name]:.2g}{other}"]


# --- in the process of a contestant -----------------------------------------------------------------------------------------


class OverError(Exception):
    """No more turns."""


class Turns:
    """A sized loader that lets its loop run in turns.

    Args:
        batches: what to give, over and over.
        steps: micro-batches to an update.
        device: where they are trained on.
        connection: says how many updates the next turn has, None after the last, and is told the seconds of each.
        ready: what it is told when the loop is warm.
    """

    def __init__(self, batches: Sequence[Any], *, steps: int, device: str, connection: Connection, ready: Any) -> None:
        self._batches, self._steps, self._device, self._connection = batches, steps, device, connection
        self._ready = ready
        self._begin = self._end = -1
        self._started = math.nan
        self.is_over = False

    def __len__(self) -> int:
        return NUMBER * self._steps

    def __iter__(self) -> Iterator[Any]:
        for index in count():
            if index % self._steps == 0:
                self._between_updates(index // self._steps)
            yield self._batches[index % len(self._batches)]

    def _between_updates(self, update: int) -> None:
        if update == WARM_UP_UPDATES:
            wait_for(self._device)
            self._connection.send(self._ready)
            self._await_turn(update)
        elif update == self._begin:
            self._started = now(self._device)
        elif update == self._end:
            self._connection.send((now(self._device) - self._started) / (self._end - self._begin))
            self._await_turn(update)

    def _await_turn(self, update: int) -> None:
        free_cached(self._device)
        updates = self._connection.recv()
        if updates is None:
            self.is_over = True
            raise OverError
        self._begin = update + UNTIMED_UPDATES
        self._end = self._begin + updates


def train_in_turns(connection: Connection, entry: Entry, tasks: Sequence[Task]) -> None:
    """For each task: waits for a message, answers with what three updates gave, takes turns, answers with its peak memory."""
    settle(tasks[0].device)
    for task in tasks:
        connection.recv()
        gc.collect()
        free_cached(task.device)
        try:
            _train(connection, entry, task)
        except EOFError:
            raise
        except Exception as error:
            connection.send(Failure.of(error))


def _train(connection: Connection, entry: Entry, task: Task) -> None:
    checked = _checked(entry, task)
    gc.collect()
    work = task.work(entry.compiled)
    turns = Turns(work.micro_batches, steps=task.steps, device=task.device, connection=connection, ready=checked)
    work.micro_batches = turns
    try:
        contestants.run(entry.run, work)
    except Exception:
        if not turns.is_over:
            raise
    connection.send(peak_gib(task.device))


def _checked(entry: Entry, task: Task) -> tuple[Any, Outcome]:
    """A part of the parameters before, and what a few updates have made of them."""
    work = task.work(entry.compiled)
    forget_peak(task.device)
    start = _sample(work)
    work.micro_batches = MicroBatches(work.micro_batches, steps=task.steps, stretch=1, stretches=1, warm_up=0)  # 3 updates
    outcome = contestants.run(entry.run, work)
    outcome.parameters = _sample(work)
    return start.numpy(), Outcome(outcome.losses, outcome.norms, outcome.parameters.numpy())  # type: ignore[arg-type]  # small


def _sample(work: Work) -> torch.Tensor:
    return parameters_to_vector(parameter.detach().flatten()[:SAMPLED] for parameter in work.model.parameters()).float().cpu()


# --- in the process that measures -------------------------------------------------------------------------------------------


class Contest(Generic[SomeTask]):
    """The processes of all contestants, from the first task to the last.

    Args:
        entries: by name; the first is the reference.
        tasks: those that `results` goes through.
        at_once: how many may train at the same time where nothing is measured: each needs memory for that.
        tolerance: of `Outcome.check_against`.
    """

    def __init__(self, entries: dict[str, Entry], tasks: Sequence[SomeTask], *, at_once: int, tolerance: float) -> None:
        self._entries, self._tasks, self._at_once, self._tolerance = entries, tasks, at_once, tolerance
        self._processes: dict[str, OwnProcess] = {}
        self._result = Result()

    def results(self, *, turn_seconds: float, repetitions: int, until: float) -> Iterator[tuple[SomeTask, Result]]:
        """What came out for each task, as soon as it is known.

        Args:
            turn_seconds: about how long the turn of the reference is.
            repetitions: rounds at most, for each task.
            until: when to end, by `time.perf_counter`; no task begins later, and each has its share of the time.
        """
        with ExitStack() as stack:
            for name, entry in self._entries.items():
                self._processes[name] = stack.enter_context(OwnProcess(train_in_turns, entry, self._tasks))
            for number, task in enumerate(self._tasks):
                if time.perf_counter() > until:
                    return
                self._result = Result()
                try:
                    self._prepare()
                    share = (until - time.perf_counter()) / (len(self._tasks) - number)
                    self._measure(turn_seconds, repetitions, time.perf_counter() + share)
                except ProcessFailedError:
                    self._end_turns()
                    self._result.failed = dict.fromkeys(self._entries, "no loop to compare with") | self._result.failed
                else:
                    self._end_turns()
                yield task, self._result

    def _prepare(self) -> None:
        """Has all of them make the first updates, which compiles their models, and compares what came out."""
        reference, *others = self._entries
        found: dict[str, tuple[torch.Tensor, Outcome]] = {}
        # The reference is first and alone: where models are compiled the others find its kernels in torch's cache.
        chunks = (others[begin : begin + self._at_once] for begin in range(0, len(others), self._at_once))
        for chunk in ([reference], *chunks):
            for name in chunk:
                self._attempt(name, partial(self._processes[name].send, "begin"))
            for name in chunk:
                answer = self._ask(name, timeout=TO_PREPARE)
                if answer is not None:
                    start, outcome = answer
                    found[name] = (
                        torch.from_numpy(start),
                        Outcome(outcome.losses, outcome.norms, torch.from_numpy(outcome.parameters)),
                    )
        if reference not in found:
            raise ProcessFailedError(f"{reference}: {self._result.failed[reference]}")
        for name, (start, outcome) in found.items():
            self._compare(name, outcome, found[reference][1], start)

    def _compare(self, name: str, outcome: Outcome, expected: Outcome, start: torch.Tensor) -> None:
        moved = float((expected.parameters - start).norm())
        self._result.apart[name] = float((expected.parameters - outcome.parameters).norm()) / moved if moved else 0.0
        try:
            outcome.check_against(expected, start, tolerance=self._tolerance)
        except AssertionError as error:
            self._result.other_work[name] = str(error)

    def _measure(self, turn_seconds: float, repetitions: int, until: float) -> None:
        reference, *others = self._entries
        result = self._result
        seconds = self._turn(reference, 2)
        result.updates = min(MAX_UPDATES, max(2, round(turn_seconds / seconds))) if seconds > 0 else 2
        names = [reference, *(name for name in others if name not in result.failed)]
        everyone: dict[str, Callable[[], float]] = {name: partial(self._turn, name, result.updates) for name in names}
        result.rounds = interleave(everyone, repetitions=repetitions, bracket=False, warm_up=False, until=until, quiet=True)
        if reference in result.failed:
            raise ProcessFailedError(f"{reference}: {result.failed[reference]}")

    def _end_turns(self) -> None:
        """Tells all loops that there are no more turns, and asks for their peaks of memory."""
        for name in self._entries:
            if name not in self._result.failed:
                self._attempt(name, partial(self._processes[name].send, None))
                self._result.peaks[name] = float(self._ask(name, timeout=TO_TRAIN) or math.nan)

    def _turn(self, name: str, updates: int) -> float:
        """Seconds of an update; NaN for one that has failed, now or before."""
        self._attempt(name, partial(self._processes[name].send, updates))
        seconds = self._ask(name, timeout=TO_TRAIN)
        return math.nan if seconds is None else float(seconds)

    def _ask(self, name: str, *, timeout: float) -> Any:
        return self._attempt(name, partial(self._processes[name].receive, timeout))

    def _attempt(self, name: str, action: Callable[[], Any]) -> Any:
        """Notes if it fails; None for one that has failed before."""
        if name in self._result.failed:
            return None
        try:
            return action()
        except ProcessFailedError as error:
            self._result.failed[name] = str(error)
            return None
