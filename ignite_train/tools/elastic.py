"""Starts replicas that come and go, on one machine: `python -m ignite_train.elastic --replicas N script.py ...`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ignite_train.arguments import positive_int, real_number, whole_number
from ignite_train.ranks.members import LIGHTHOUSE, require_torchft

__all__ = ["ElasticLauncher", "main"]

_logger = logging.getLogger("ignite_train")
_POLL_SECONDS = 0.05
_AT_ONCE_SECONDS = 20.0  # a replica that ends sooner has not trained
_MAX_AT_ONCE = 3  # so often in a row
_GRACE_SECONDS = 60.0  # for the others, when the run and one replica have ended
_FIRST_SIGNAL_SECONDS = 30.0  # between a signal that is passed on and SIGKILL


@dataclass
class _Replica:
    """The processes of a replica, one for each rank, and how those before them have ended.

    Attributes:
        processes: those that run, or have ended last.
        begun: when they were started, in seconds of the monotonic clock.
        at_once: how many in a row have ended soon after they were started.
        stopped: since when a process has been stopped, as by SIGSTOP, on the same clock; None while all run.
    """

    processes: list[subprocess.Popen[bytes]]
    begun: float
    at_once: int = 0
    stopped: float | None = None

    def code(self) -> int | None:
        """The status with which it has ended, None while it runs. Where one rank has failed, the others are killed first."""
        codes = [process.poll() for process in self.processes]
        failed = min(filter(None, codes), default=None)  # a signal comes before the errors that follow from it
        if failed is not None:
            self.kill()
        return failed if failed is not None or None in codes else 0

    def kill(self) -> None:
        """Kills what runs, and waits until it has ended."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


class ElasticLauncher:
    """A lighthouse on this machine, which listens on loopback only, and replicas of one script.

    A replica is one process, or several ranks, which find one another by the environment variables that torchrun sets too. A
    replica that ends before the last update, in whatever way, is started again and joins the others. One that was stopped, as
    by SIGSTOP, for `hang_seconds` is killed (where Python can see it: not on macOS before Python 3.13). What happens to a rank
    counts for its replica, whose other ranks are killed. When the last update is made, no replica is started again, unless the
    script begins another run; when one has ended without an error then, the others have a minute to end. SIGINT and SIGTERM are
    passed on to all of them, and no replica is started again. All of them get SIGTERM too when one has ended three times in a
    row within 20 s of its start, or once more than `max_restarts` allows, other than by SIGKILL.

    That the last update is made is known from a file, which a trainer with `reduction="elastic"` makes when its run has ended:
    at a limit, after a request to stop, or since nothing was left to do. A script without such a trainer has to make it, under
    the name in the environment variable `IGNITE_TRAIN_ENDED`.

    Args:
        command: what each replica runs, such as `[sys.executable, "train.py"]`.
        num_replicas: how many.
        num_ranks: how many processes each of them has.
        min_replicas: with fewer the run waits.
        heartbeat_ms: a replica that was not heard of for so long is lost.
        join_ms: how long replicas that ask for an update wait for a live replica that does not ask, before they continue
            without it. Longer than any replica alone may take between two updates.
        hang_seconds: how long a replica may keep the others waiting in an update before it is taken for lost.
        max_restarts: how often replicas that SIGKILL has not ended are started again, all of them counted together.

    Attributes:
        replicas: by their numbers.
        num_restarts: how often one was started again.

    Raises:
        ValueError: torchft is not installed, or a number is out of range.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_replicas: int,
        *,
        num_ranks: int = 1,
        min_replicas: int = 1,
        heartbeat_ms: int = 1000,
        join_ms: int = 60_000,
        hang_seconds: float = 60.0,
        max_restarts: int = 100,
    ) -> None:
        require_torchft()
        os.environ.setdefault("RUST_LOG", "warn")  # torchft writes a line for each question otherwise
        from torchft.coordination import LighthouseServer

        self._command, self._num = list(command), positive_int("replicas", num_replicas)
        self._num_ranks = positive_int("ranks", num_ranks)
        self._hang_seconds = real_number("hang_seconds", hang_seconds, above=0)
        self._max_restarts = whole_number("max_restarts", max_restarts)
        if positive_int("min_replicas", min_replicas) > num_replicas:
            raise ValueError(f"min_replicas must be at most replicas={num_replicas}, got {min_replicas}: the run would wait")
        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=min_replicas,
            join_timeout_ms=positive_int("join_ms", join_ms),
            quorum_tick_ms=20,
            heartbeat_timeout_ms=positive_int("heartbeat_ms", heartbeat_ms),
        )
        self._directory = tempfile.TemporaryDirectory(prefix="ignite_train_elastic_")
        self._ended = Path(self._directory.name) / "ended"
        port = self._lighthouse.address().rpartition(":")[2]
        self._environment = {
            **os.environ,
            LIGHTHOUSE: f"http://127.0.0.1:{port}",
            "IGNITE_TRAIN_ENDED": str(self._ended),
            "IGNITE_TRAIN_HANG_SECONDS": str(hang_seconds),
        }
        self.replicas: dict[int, _Replica] = {}
        self.num_restarts = self._num_failures = 0
        self._stops_at: float | None = None  # when what runs then is killed

    def __enter__(self) -> Self:
        for number in range(self._num):
            self.replicas[number] = self._start(number)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for replica in self.replicas.values():
            replica.kill()
        self._lighthouse.shutdown()
        self._directory.cleanup()

    def run(self) -> int:
        """Waits until all replicas have ended, and starts again what ends too early.

        Returns:
            The status to end with: 0 if the run has ended, and a replica without an error.
        """
        while not self.look():
            time.sleep(_POLL_SECONDS)
        codes = [replica.code() or 0 for replica in self.replicas.values()]
        if 0 in codes and self._ended.exists():
            return 0
        return next((128 - code if code < 0 else code for code in codes if code), 1)

    def look(self) -> bool:
        """Looks at each replica once, and starts again what has ended too early. Gives whether all have ended for good."""
        codes = {number: replica.code() for number, replica in self.replicas.items()}
        is_over = self._ended.exists()  # the run, and perhaps not yet what the script does after it
        if self._stops_at is None and is_over and 0 in codes.values():
            self._stops_at = time.monotonic() + _GRACE_SECONDS
        for number, code in codes.items():
            if code is None:
                self._look_whether_stopped(number)
            elif self._stops_at is None and not is_over:
                self._start_again(number, code)
        if self._stops_at is not None and time.monotonic() > self._stops_at:
            self.send(signal.SIGKILL)
        # Those that have ended since `codes` was made, as by the lines above, are seen to in the next look.
        return None not in codes.values() and all(replica.code() is not None for replica in self.replicas.values())

    def send(self, number: int) -> None:
        """Sends a signal to each process that runs."""
        for process in (process for replica in self.replicas.values() for process in replica.processes):
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def pass_on(self, number: int, _frame: FrameType | None = None) -> None:
        """Sends a signal to each replica, after which none is started again."""
        self._stops_at = self._stops_at or time.monotonic() + _FIRST_SIGNAL_SECONDS
        self.send(number)

    def _start(self, number: int) -> _Replica:
        environment = {**self._environment, "IGNITE_TRAIN_REPLICA": str(number)}
        ranks = _environments(self._num_ranks) if self._num_ranks > 1 else [{}]
        processes = [subprocess.Popen(self._command, env=environment | rank) for rank in ranks]  # noqa: S603  # the user's command
        return _Replica(processes, time.monotonic())

    def _look_whether_stopped(self, number: int) -> None:
        replica, now = self.replicas[number], time.monotonic()
        if not any(map(_is_stopped, replica.processes)):
            replica.stopped = None
        elif replica.stopped is None:
            replica.stopped = now
        elif now - replica.stopped > self._hang_seconds:
            _logger.warning(f"replica {number} has been stopped for {self._hang_seconds:g} s and is killed")
            replica.kill()

    def _start_again(self, number: int, code: int) -> None:
        before, what = self.replicas[number], f"replica {number} has ended with status {code}"
        what += "" if code else " before the last update"
        # SIGKILL comes from outside, as where a machine is taken away.
        has_failed, soon = code != -signal.SIGKILL, time.monotonic() - before.begun < _AT_ONCE_SECONDS
        at_once = before.at_once + 1 if has_failed and soon else 0
        self._num_failures += has_failed
        if at_once >= _MAX_AT_ONCE or self._num_failures > self._max_restarts:
            why = f"{at_once} times in a row soon after it was started"
            if at_once < _MAX_AT_ONCE:
                used_up = f"and max_restarts={self._max_restarts} is used up"
                why = f"{used_up}; correct why replicas end, or pass a larger --max-restarts"
            _logger.error(f"{what} {why}")
            self.pass_on(signal.SIGTERM)
            return
        told = "; a script whose trainer is not elastic must make the file in $IGNITE_TRAIN_ENDED when it is done"
        _logger.warning(f"{what} and is started again{'' if code else told}")
        self.num_restarts += 1
        self.replicas[number] = self._start(number)
        self.replicas[number].at_once = at_once


def _environments(num_ranks: int) -> list[dict[str, str]]:
    """The variables by which the ranks of a replica that is started now find one another, named as torchrun names them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    size = str(num_ranks)
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [of_all | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether a signal has suspended the process. Does not take its exit status from `Popen`."""
    if "waitid" not in vars(os):
        return False
    try:
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m ignite_train.elastic", description=__doc__)
    parser.add_argument("--replicas", type=int, required=True, help="how many processes train together")
    parser.add_argument("--ranks", type=int, default=1, help="how many processes each replica has, for a model in fully_shard")
    parser.add_argument("--min-replicas", type=int, default=1, help="with fewer the run waits")
    parser.add_argument("--heartbeat-ms", type=int, default=1000, help="a replica not heard of for so long is lost")
    parser.add_argument(
        "--join-ms", type=int, default=60_000, help="how long the others wait for one that lives and does not ask"
    )
    parser.add_argument("--hang-seconds", type=float, default=60.0, help="how long a replica may keep the others waiting")
    parser.add_argument("--max-restarts", type=int, default=100, help="how often replicas are started again, together")
    parser.add_argument("script", help="what each replica runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    given: Any = parser.parse_args(arguments)
    try:
        if not Path(given.script).is_file():
            raise ValueError(f"script must be a file, got {given.script!r}; name the script that trains, behind the options")
        launcher = ElasticLauncher(
            [sys.executable, given.script, *given.arguments],
            given.replicas,
            num_ranks=given.ranks,
            min_replicas=given.min_replicas,
            heartbeat_ms=given.heartbeat_ms,
            join_ms=given.join_ms,
            hang_seconds=given.hang_seconds,
            max_restarts=given.max_restarts,
        )
    except ValueError as error:
        parser.error(str(error))
    with launcher:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, launcher.pass_on)
        return launcher.run()
