"""Ending a run when a scheduler or a launcher sends a signal."""

from __future__ import annotations

import faulthandler
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from ignite_train.arguments import describe, real_number
from ignite_train.engine.attachable import owner_of
from ignite_train.internals.of_torch import end_with_parent
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.in_full import in_full
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["StopOnSignal"]

_logger = logging.getLogger(__name__)
_STDERR = 2
_SAME_REQUEST_SECONDS = 2.0  # the scheduler and the launcher may both send it, and the machine may be slow
_PATIENCE_SECONDS = 2.0  # for the thread to end
_OVER = 0  # no signal has this number
_TOLD = 0x80  # more than the number of any signal
_MAIN_THREAD = threading.main_thread()  # in a fork, the thread that forked is called so
_LOADERS = "torch.utils.data.dataloader", "torchdata."
_SIGNALS = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGUSR1"))


class StopOnSignal(Handler):
    """Ends the run on all ranks after the same update when any of them gets a signal, so that handlers of COMPLETED can save.

    For torchrun, SLURM and others that send SIGTERM some time before SIGKILL, to one rank or to all. The request travels with
    the statistics of the running update or the next, as that of `Trainer.terminate` does. `run` then returns as usual, and
    `received` is the signal on the ranks that got one, for a script that ends with status `128 + received`.

    Python runs no signal handler while the main thread is inside a collective, so a thread listens too. If the run has not
    ended `grace_seconds` later, it logs that, writes the stacks of all threads to standard error and ends the process with
    status `128 + signal`. A second signal, two seconds or more after the first, ends the process at once.

    Signal handlers are installed when a run begins, before STARTED. The earlier ones are put back when the run is over,
    also after an exception, and in processes that are forked meanwhile. A handler that something else installs in between
    stays, and has the signal for itself, unless it calls the one that was there. If several trainers are running, as for a GAN,
    a signal asks each trainer with a StopOnSignal of its own to stop.

    On Linux workers of loaders that the main thread forks during a run ignore `signals`, and leave the process group unless
    standard input is a terminal, so that the run can end its update when a signal is sent to all processes. They end with the
    run's process, and by a SIGTERM that is sent to them.

    Ranks that a script has started itself, as `idist.Parallel(nproc_per_node=...)` does, get SIGINT when a signal ends it:
    name it among `signals` there.

    Python handles signals in the main thread only. Where `run` is called in another one, as Ray Train does, this handler warns
    once that it listens to nothing, and the run continues. Such an engine ends its processes itself; a `Checkpoint` resumes.

    Args:
        signals: SIGTERM and SIGUSR1 by default, if the system has them.
        grace_seconds: how long the end of the run may take, with what is saved; a little less than the scheduler allows.

    Attributes:
        received: the signal that ended the latest run, or None.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `signals` has SIGKILL or SIGSTOP, which no process can handle, or `grace_seconds` is not greater than 0.

    Example:
        >>> stop = StopOnSignal()
        >>> stop.attach(trainer)
        >>> handle = trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: signal.raise_signal(signal.SIGTERM))
        >>> trainer.run(data, max_epochs=1).iteration
        2
        >>> stop.received.name
        'SIGTERM'
    """

    def __init__(self, signals: Iterable[signal.Signals] = _SIGNALS, *, grace_seconds: float = 25.0) -> None:
        listed = [*signals] if isinstance(signals, Iterable) else None
        if listed is None or any(isinstance(one, str) for one in listed):
            raise TypeError(f"signals must be a sequence of signals, got {describe(signals)}; pass (signal.SIGTERM,), say")
        self._requests = tuple(signal.Signals(number) for number in listed)
        for number in self._requests:
            if number.name in ("SIGKILL", "SIGSTOP"):
                raise ValueError(f"signals must be signals that a process can handle, got {number.name}; leave it out")
        self.grace_seconds = real_number("grace_seconds", grace_seconds, above=0)
        self.received: signal.Signals | None = None
        self._has_warned = False
        self._previous: dict[signal.Signals, Any] = {}
        self._watch: _Watch | None = None

    def attach(self, trainer: Trainer) -> None:
        """Listens during each run of `trainer`, from before STARTED until after the last handler of COMPLETED.

        Raises:
            ValueError: the trainer has one already.
        """
        if any(isinstance(owner_of(one), StopOnSignal) for one in trainer.on_enter):
            raise ValueError("a trainer must have one StopOnSignal at most, got a second; give the first more signals")
        trainer.on_exit.append(self._finish)
        trainer.enter_with(self._start)

    def _start(self, trainer: Trainer) -> None:
        if self._watch is not None:
            raise RuntimeError("StopOnSignal must listen for one trainer at a time, got a second; give each one of its own")
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            self._warn()
            return
        self._watch = _Watch(trainer, self._requests, self.grace_seconds)
        self._watch.listen()
        _listening.append(self)
        for number in self._requests:
            previous = signal.getsignal(number)
            if previous is None:
                _logger.warning(
                    f"{number.name} has a handler that Python did not install, and keeps it: it will not end the run"
                )
            else:
                self._previous[number] = previous
                signal.signal(number, _receive)

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "StopOnSignal listens to nothing in this run: it is not in the main thread, where Python handles signals. "
                "An engine that calls it in a thread, such as Ray, stops a run by ending its processes; with a Checkpoint "
                "attached the next start resumes"
            )

    def _finish(self) -> None:
        watch = self._watch
        if watch is not None:
            try:
                in_full(self._restore)
            finally:
                watch.end()

    def _restore(self) -> None:
        """Puts the earlier handlers back, in this process or in a fork of it. What listens since then does so in its place."""
        since = _listening[_listening.index(self) + 1 :] if self in _listening else []
        for number, previous in self._previous.items():
            if (other := next((one for one in since if number in one._previous), None)) is not None:
                if other._previous[number] is _receive:  # else the script has installed another meanwhile, which stays
                    other._previous[number] = previous
            elif signal.getsignal(number) is _receive:  # else something has taken it over during the run
                signal.signal(number, previous)
        if since and self._watch is not None and since[0]._watch is not None:
            since[0]._watch.previous_fd = self._watch.previous_fd
        elif self._watch is not None:
            signal.set_wakeup_fd(self._watch.previous_fd)
        if self in _listening:
            _listening.remove(self)
        self._previous, self._watch = {}, None


class _Watch(threading.Thread):
    """Reads signals from the file descriptor to which Python writes their numbers, also while the main thread is blocked."""

    def __init__(self, trainer: Trainer, signals: tuple[signal.Signals, ...], grace_seconds: float) -> None:
        super().__init__(name="StopOnSignal", daemon=True)
        self.trainer, self._signals, self._grace_seconds = trainer, signals, grace_seconds
        self._first: tuple[float, signal.Signals] | None = None  # when a signal came, and which
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self.previous_fd = -1

    def listen(self) -> None:
        """Begins. The object is known to its owner by now, which ends it also where Ctrl-C comes in between."""
        self.previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.start()

    def tell(self, number: int) -> None:
        """A signal has come to `_receive`, maybe by way of a handler that something else has installed since."""
        with suppress(OSError):  # the thread has ended
            self._writer.send(bytes([number | _TOLD]))

    def end(self) -> None:
        """Ends the thread, if it has begun. The file descriptor is no longer written to."""
        self._writer.send(bytes([_OVER]))
        if self.ident is not None:
            self.join(_PATIENCE_SECONDS)
        self._writer.close()

    def run(self) -> None:
        """Waits for signals, and then for the end of the run."""
        with self._reader:
            while (number := self._next()) != _OVER:
                if number & _TOLD:
                    if self._first is None:
                        self._hear(signal.Signals(number ^ _TOLD))
                elif number in self._signals and signal.getsignal(number) is _receive:
                    self._hear(signal.Signals(number))
                elif self.previous_fd != -1:
                    with suppress(OSError):
                        os.write(self.previous_fd, bytes([number]))

    def _next(self) -> int:
        if self._first is not None:
            since, _ = self._first
            self._reader.settimeout(max(0.001, since + self._grace_seconds - time.monotonic()))
        try:
            return self._reader.recv(1)[0]
        except TimeoutError:
            self._give_up()

    def _hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = now, number
            grace = f"this may take {self._grace_seconds:g} s"
            message = f"{number.name}: the run ends after this update or the next, on all ranks; {grace}"
            from_terminal = number == signal.SIGINT and not collectives.is_main_rank()  # Ctrl-C reaches all ranks: one line
            _logger.log(logging.INFO if from_terminal else logging.WARNING, message)
        elif now - self._first[0] >= _SAME_REQUEST_SECONDS:
            _logger.error(f"{number.name} again: {self._place()} ends at once")
            collectives.end_process(128 + number)

    def _give_up(self) -> NoReturn:
        assert self._first is not None  # noqa: S101  # the timeout is set only after a signal
        _, number = self._first
        late = f"the run has not ended within grace_seconds={self._grace_seconds:g}"
        _logger.error(f"{number.name}: {late}; {self._place()} ends; its stacks follow")
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        collectives.end_process(128 + number)

    def _place(self) -> str:
        return f"rank {collectives.rank()}, at update {self.trainer.state.iteration},"


_listening: list[StopOnSignal] = []


def _receive(number: int, _frame: FrameType | None) -> None:
    """Asks each trainer that listens to stop: several may have a session. Takes no lock and does not log.

    `terminate` would log in a single process.
    """
    for handler in _listening:
        if number in handler._requests and handler._watch is not None:
            handler.received = handler.received or signal.Signals(number)
            handler._watch.trainer.requests.stop = True
            handler._watch.tell(number)


def _forget_in_child() -> None:
    """Without this a forked process would pass its signals on to this one, through the file descriptor that both have.

    The run needs the worker of a loader until its last update, so the worker is spared what is sent to all processes: torchrun
    sends it to the process group, and so do terminals. torch handles SIGTERM in workers, which is how it ends them.
    """
    requests = {number for handler in _listening for number in handler._requests}
    for handler in _listening[::-1]:
        handler._restore()
    in_main_thread = threading.current_thread() is _MAIN_THREAD
    if requests and in_main_thread and sys.platform == "linux" and _is_started_by_a_loader():
        for number in requests - {signal.SIGTERM}:
            signal.signal(number, signal.SIG_IGN)
        if not os.isatty(0):  # a terminal stops a process that reads it from another group, such as a debugger
            _leave_group()


def _leave_group() -> None:
    """Moves this process to another process group, of which it is not the leader: a leader cannot call `os.setsid()`.

    What kills the earlier group no longer reaches this process, so the kernel ends it with the thread that forked it.
    """
    end_with_parent()
    reader, writer = os.pipe()
    leader = os.fork()
    if leader == 0:
        os.close(writer)
        os.read(reader, 1)  # until this process has joined its group
        os._exit(0)
    os.setpgid(leader, leader)
    os.setpgid(0, leader)
    os.close(writer)
    os.close(reader)
    os.waitpid(leader, 0)


def _is_started_by_a_loader() -> bool:
    """Whether this process was forked by multiprocessing, and that was called by a loader of torch or torchdata."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith((__name__, "multiprocessing.")):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_LOADERS)


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_child)
