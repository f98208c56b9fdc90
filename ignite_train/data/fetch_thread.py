"""A pass over a loader that a thread reads ahead, while the caller computes."""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from ignite_train.data.held import Held
from ignite_train.model.in_full import in_full
from ignite_train.model.random_state import NUMPY, PYTHON, RandomState

__all__ = ["FetchThread"]

_PATIENCE_SECONDS = 10.0  # for a sample that is being fetched when the thread must end
_LOOK_SECONDS = 1.0  # how often a caller that waits looks whether the thread still lives
_NAMES = {id(PYTHON): "python", id(NUMPY): "numpy", id(torch.default_generator): "torch"}
_logger = logging.getLogger(__name__)


class FetchThread(Iterator[Any]):
    """Gives what another iterator gives. A thread reads the next elements while the caller works on the latest one.

    An error that reading raises is raised by the `next` that would have raised it without a thread, as the same object and
    with its traceback. Its states:

    - fresh: nothing was read. `next` reads the first element itself, and sees whether that draws random numbers;
    - reading: the thread reads, or waits because `ahead` elements were read and not taken;
    - paused: the thread has ended. `next` gives what it had read, and starts another one;
    - ended: the other iterator is exhausted, and so is this one when all that was read has been taken.

    A thread would share the generators of the process with the caller, whose numbers would then depend on which of them comes
    first. So a reader that draws from them is refused. That is seen at the first element; and later where the caller waits for
    the thread and draws nothing itself, for torch's generator of the CPU and NumPy's.

    The thread does not keep this object alive: it ends when the object is collected.

    Args:
        source: what is read.
        ahead: how many elements are read and not taken, at most.
        name: what draws if something does, for the message.
    """

    _pid = 0  # of the process in which it was made; of none until all of it is there, since Ctrl-C may come in between

    def __init__(self, source: Iterator[Any], *, ahead: int, name: str) -> None:
        self._shared, self._name = _ReadAhead(source, ahead), name
        self._thread: threading.Thread | None = None
        self._is_fresh = True
        self._pid = os.getpid()

    def __next__(self) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError("the pass was begun in another process, where the thread is that reads it; begin another one")
        if self._is_fresh:
            return self._read_first()
        shared = self._shared
        if shared.ask():
            self._start()
        # Other threads of the process are not likely to draw from NumPy's generator and from torch's.
        before = None if shared.read or shared.has_ended else RandomState([], [NUMPY])
        element, error = shared.take(self._thread)
        if before is not None:
            self._refuse_draws(before)
        try:
            if error is not None:
                raise error
            return element
        finally:
            del error  # its traceback has this frame

    def expect_held(self, number: int) -> None:
        """Says how many elements the caller has at once; one by default. None of them may be written over meanwhile."""
        self._shared.num_first = self._shared.ahead + number

    def pause(self) -> None:
        """Ends the thread. What it has read stays, and `next` continues.

        It waits for the element that is being read, ten seconds at most; then a warning says that the thread is left behind.
        It ends when that element is there.
        """
        self._dismiss()
        thread = self._thread
        if thread is None or os.getpid() != self._pid:
            return
        thread.join(_PATIENCE_SECONDS)
        if thread.is_alive():
            _logger.warning(
                f"the thread that reads {self._name} has not come back within {_PATIENCE_SECONDS:g} s and is left behind; it "
                "ends when the sample that it reads is there, or with the process"
            )

    def __del__(self) -> None:
        self._dismiss()

    def _dismiss(self) -> None:
        if os.getpid() == self._pid:  # in a process that was forked the lock may be held by a thread that is not there
            self._shared.dismiss()

    def _read_first(self) -> Any:
        before = RandomState([], [PYTHON, NUMPY])
        element = next(self._shared.source)
        try:
            self._refuse_draws(before)
        except ValueError:
            in_full(before.restore)
            raise
        self._is_fresh = False
        self._shared.first.add(element)
        if self._shared.ask():
            self._start()
        return element

    def _start(self) -> None:
        thread = threading.Thread(target=_as_here(self._shared.run), name=type(self).__name__, daemon=True)
        thread.start()
        self._thread = thread  # now: one that Ctrl-C has kept from starting cannot be waited for

    def _refuse_draws(self, before: RandomState) -> None:
        if drawn := before.moved():
            raise ValueError(
                f"fetch_in_thread=True needs samples that draw nothing from the generators of the process, got {self._name}, "
                f"which draws from that of {_NAMES[id(drawn[0])]}: forward would draw from it at the same time; draw from a "
                "generator of the dataset's own that its seed_sample(seed) seeds, or pass num_workers=1 in place of "
                "fetch_in_thread"
            )


class _ReadAhead:
    """The state that the caller and the thread share.

    Args:
        source: what is read; by the thread alone while it runs.
        ahead: see `FetchThread`.

    Attributes:
        read: what was read and not taken: each an element and None, or None and the error that reading it raised; and what is
            compared when it is taken.
        first: the first elements of the pass, some of which the caller may be computing with.
        num_first: how many of them can be with the caller or wait for it.
        has_ended: the source is exhausted; only `read` is left.
    """

    def __init__(self, source: Iterator[Any], ahead: int) -> None:
        self.source, self.ahead = source, ahead
        self.read: deque[tuple[Any, BaseException | None, Held]] = deque()
        self.first, self.num_first, self._num_read = Held(), ahead + 1, 1
        self.has_ended = False
        self._changed = threading.Condition()
        self._is_wanted = self._is_running = False  # whether the thread is to continue, and whether there is one that does

    def ask(self) -> bool:
        """Has the thread continue. Returns whether the caller must start one."""
        with self._changed:
            self._is_wanted = True
            must_start = not self._is_running and not self.has_ended
            self._is_running = self._is_running or must_start
            return must_start

    def dismiss(self) -> None:
        """Has the thread end, after the element that it is reading."""
        with self._changed:
            self._is_wanted = False
            self._changed.notify_all()

    def run(self) -> None:
        """Reads ahead until it is dismissed, or there is nothing left. The thread does this."""
        while self._may_read():
            outcome: tuple[Any, BaseException | None, Held]
            try:
                outcome = self._next()
            except BaseException as error:  # the caller raises it
                outcome = None, error, Held()
            with self._changed:
                self.read.append(outcome)
                self.has_ended = isinstance(outcome[1], StopIteration)
                self._changed.notify_all()
            del outcome  # the caller's from here on

    def _next(self) -> tuple[Any, None, Held]:
        element = next(self.source)
        if self._num_read < self.num_first:
            self.first.check_against(element)
            self.first.add(element)
        elif self._num_read == self.num_first:
            self.first = Held()
        self._num_read += 1
        return element, None, Held([element])

    def take(self, thread: threading.Thread | None) -> tuple[Any, BaseException | None]:
        """The next of what was read; waits for it.

        Raises:
            StopIteration: the source is exhausted, and all of it was taken.
            RuntimeError: the thread has died.
            ValueError: the source has changed it when it gave a later one.
        """
        with self._changed:
            while not self.read:
                if self.has_ended:
                    raise StopIteration
                if thread is None or not thread.is_alive():
                    raise RuntimeError("the thread that reads ahead has died without an error; pass fetch_in_thread=False")
                self._changed.wait(_LOOK_SECONDS)
            element, error, held = self.read.popleft()
            self._changed.notify_all()
        held.check()
        return element, error

    def _may_read(self) -> bool:
        with self._changed:
            while self._is_wanted and not self.has_ended and len(self.read) >= self.ahead:
                self._changed.wait()
            self._is_running = self._is_wanted and not self.has_ended
            return self._is_running


def _as_here(work: Callable[[], None]) -> Callable[[], None]:
    """`work`, to be done in another thread with the default device, the current GPU and the context variables of this one."""
    context, device = contextvars.copy_context(), torch.get_default_device()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def work_there() -> None:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        with nullcontext() if device == torch.device("cpu") else device:
            context.run(work)

    return work_there
