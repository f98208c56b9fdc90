"""Runs functions on several gloo processes, with a hard deadline, and gives back what each rank returned."""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from processes import DEADLINE_SECONDS, forked

_DEAD, _LATE = "died without a word", "was not done at the deadline"
_END_SECONDS = 60.0  # for a process whose pipe is closed to end


class RanksFailedError(AssertionError):
    """Some rank raised, died or did not end in time; the message says what happened on each."""


def run_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout_seconds: float = DEADLINE_SECONDS
) -> list[Any]:
    """Calls `function(*args)` on each rank of a fresh gloo group and returns the results in rank order.

    Raises:
        RanksFailedError: any rank failed, or is not done at the deadline; no process is left over.
    """
    with Ranks(world_size) as ranks:
        return ranks._call(function, args, timeout_seconds, is_last=True)


class Ranks:
    """A gloo group whose processes call one function after another, for tests with many short cases.

    The processes start at the first call. After a call that fails they are ended, and the next call starts others. None is left
    over at the end of the `with`.
    """

    def __init__(self, world_size: int = 2) -> None:
        self._world_size = world_size
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._directory = Path()  # where they meet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = DEADLINE_SECONDS) -> list[Any]:
        """Calls `function(*args)` on each rank and returns the results in rank order.

        Raises:
            RanksFailedError: any rank failed, or is not done at the deadline.
        """
        return self._call(function, args, timeout_seconds, is_last=False)

    def _call(self, function: Callable[..., Any], args: Any, timeout_seconds: float, *, is_last: bool) -> list[Any]:
        """After the last call a rank leaves the group, so that another one which waits for it fails."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it is dead, as `_collect` finds
                pipe.send_bytes(pickle.dumps((function, args, timeout_seconds, is_last)))
        outcomes = _collect(self._pipes, time.monotonic() + timeout_seconds)
        if all(ok for ok, _ in outcomes):
            return [value for _, value in outcomes]
        ends = ["returned" if ok else self._last_words(rank, value) for rank, (ok, value) in enumerate(outcomes)]
        self._end()
        raise RanksFailedError("\n".join(f"rank {rank}: {end}" for rank, end in enumerate(ends)))

    def _last_words(self, rank: int, error: str) -> str:
        """Why a rank returned nothing: its error, or how its process ended and where its threads were then."""
        process = self._processes[rank]
        if error == _DEAD:
            process.join(_END_SECONDS)
            error = f"{error}, with exit code {process.exitcode}"
        elif error != _LATE:
            return error
        return f"{error}\n{(self._directory / _stacks(rank)).read_text()}".rstrip()

    def _start(self) -> None:
        # No `env` in its name: Ignite takes `file:///tmp/tmp2envq/store` for the method `env://`.
        self._directory = Path(tempfile.gettempdir()) / f"ranks-{os.urandom(8).hex()}"
        self._directory.mkdir()
        for rank in range(self._world_size):
            ours, theirs = forked.Pipe()
            job = (theirs, rank, self._world_size, self._directory)
            process = forked.Process(target=_serve, args=job, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _end(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        if self._processes:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._processes, self._pipes = [], []


def _collect(pipes: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    """Whether each rank returned, with its value or its error."""
    outcomes: dict[Connection, tuple[bool, Any]] = {}
    while (open_pipes := [pipe for pipe in pipes if pipe not in outcomes]) and time.monotonic() < deadline:
        for pipe in wait(open_pipes, timeout=max(0.0, deadline - time.monotonic())):
            try:
                outcomes[pipe] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):  # the latter if it had not read what it was asked
                outcomes[pipe] = (False, _DEAD)
    return [outcomes.get(pipe, (False, _LATE)) for pipe in pipes]


def _stacks(rank: int) -> str:
    """The file where the stacks of all threads of a rank are written when it crashes, or shortly before the deadline."""
    return f"stacks-of-rank-{rank}"


def _serve(pipe: Connection, rank: int, world_size: int, directory: Path) -> None:
    """What a process of `Ranks` does: one call after another, until one is the last or fails, or it is killed."""
    import ignite.distributed as idist
    import torch

    from ignite_train.handlers import failure_board

    # A rank that raises as the others do may be seconds behind them. One that waits for a rank which is gone raises by itself.
    failure_board._PATIENCE_SECONDS = failure_board._ROLL_CALL_SECONDS = 60.0
    torch.set_num_threads(1)
    stacks = (directory / _stacks(rank)).open("w")
    faulthandler.enable(stacks)
    is_last = False
    while not is_last:
        try:
            function, args, timeout_seconds, is_last = pickle.loads(pipe.recv_bytes())
            faulthandler.dump_traceback_later(0.9 * timeout_seconds, file=stacks)  # where a rank that hangs is
            if idist.backend() is None:
                idist.initialize("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
            result = function(*args)
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(pickle.dumps((True, result)))  # by value: shared memory would end with this process
        except BaseException:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            return
    idist.finalize()
