"""Runs a function on several gloo processes, with a hard deadline, and gives back what each rank returned."""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from processes import forked


class RanksFailedError(AssertionError):
    """Some rank raised, died or did not end in time; the message says what happened on each."""


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2, timeout_seconds: float = 100.0) -> list[Any]:
    """Calls `function(*args)` on each rank of a fresh gloo group and returns the results in rank order.

    Raises:
        RanksFailedError: any rank failed, or is not done at the deadline; no process is left over.
    """
    with _meeting_place() as directory:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = forked.Pipe(duplex=False)
            job = (theirs, function, args, rank, world_size, f"file://{directory}/store", timeout_seconds)
            process = forked.Process(target=_run, args=job, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            outcomes = _collect(pipes, time.monotonic() + timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()
    if all(ok for ok, _ in outcomes):
        return [value for _, value in outcomes]
    raise RanksFailedError(
        "\n".join(f"rank {rank}: {'returned' if ok else value}" for rank, (ok, value) in enumerate(outcomes))
    )


@contextmanager
def _meeting_place() -> Iterator[Path]:
    """A directory for the store. No `env` in its name: Ignite takes `file:///tmp/tmp2envq/store` for the method `env://`."""
    directory = Path(tempfile.gettempdir()) / f"ranks-{os.urandom(8).hex()}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _collect(pipes: list[Connection], deadline: float) -> list[tuple[bool, Any]]:
    outcomes: dict[Connection, tuple[bool, Any]] = {}
    while (open_pipes := [pipe for pipe in pipes if pipe not in outcomes]) and time.monotonic() < deadline:
        for pipe in wait(open_pipes, timeout=max(0.0, deadline - time.monotonic())):
            try:
                outcomes[pipe] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcomes[pipe] = (False, "died without a word")
    return [outcomes.get(pipe, (False, "was not done at the deadline")) for pipe in pipes]


def _run(
    pipe: Connection, function: Callable[..., Any], args: Any, rank: int, world_size: int, store: str, timeout_seconds: float
) -> None:
    import ignite.distributed as idist
    import torch

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.9 * timeout_seconds)  # where a rank that hangs is
    try:
        idist.initialize("gloo", init_method=store, rank=rank, world_size=world_size)
        result = function(*args)
        pipe.send_bytes(pickle.dumps((True, result)))  # by value: shared memory would end with this process
        idist.finalize()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
