"""Where a thread stands, and whether it waits there for other ranks."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ignite_train.internals.of_distributed import DDP_FORWARD

__all__ = ["ASKED_BY", "COLLECTOR", "PAUSED", "Whereabouts", "find_whereabouts"]

COLLECTOR = threading.Lock()
"""Held by what switches Python's garbage collector on: a thread that reads frames has switched it off, and needs it off."""
PAUSED = threading.Event()
"""Set, by the holder of the lock, where the collector is off for longer than the lock is held, in this process alone."""


def _after_fork() -> None:
    """In the new process, where nothing else would release the lock or, in a worker of a loader, end the pause."""
    if PAUSED.is_set():
        PAUSED.clear()
        gc.enable()
    COLLECTOR.release()


os.register_at_fork(before=COLLECTOR.acquire, after_in_parent=COLLECTOR.release, after_in_child=_after_fork)

ASKED_BY = ", asked by "
"""Stands in a place between the function of torch that waits, and the code that has asked for it."""
_MARK = "_WAITS_FOR_RANKS"  # a name that is true in each file of this library that waits for other ranks
_THREAD_MARK = "_WAITS_FOR_THREADS"  # in a file that waits for threads, what these are called
_WAITING_PLACES_OF_TORCH = ("torch.distributed", "torch.nn.parallel.distributed", "torch.autograd.graph", "torch.futures")
_PASSED_THROUGH = {"forward", DDP_FORWARD}  # functions of these modules under which a user's module computes
_NOT_A_PLACE = {"torch", *sys.stdlib_module_names}  # packages that only do what another one has asked for
_ALSO_NO_PLACE = ("ignite.distributed.", "ignite_train.ranks.collectives.")  # modules that only ask torch for collectives


class Whereabouts(NamedTuple):
    """Where a thread stands.

    Attributes:
        where: function, file and line.
        waits: whether it waits there for other ranks.
    """

    where: str
    waits: bool


def find_whereabouts(thread: int) -> Whereabouts:
    """Where the thread of this number stands. One that waits for a thread stands where that one does.

    It waits for other ranks if what is at the top of its stack does: frames of torch and of Python's own library, down to the
    first of another package, which asked for it. So it makes no difference through how many functions of torch a collective
    is begun. The place then names the code that asked too: two ranks may wait in the same function of torch for collectives
    that do not belong together.
    """
    threads = {each.ident: each.name for each in threading.enumerate()}
    top = _top_of(thread)
    if not top:
        return Whereabouts("nowhere", waits=False)
    name = top[-1].f_globals.get(_THREAD_MARK)
    for number in reversed(threads):  # the latest comes first; an earlier one may be what it waits for itself
        if name is not None and threads[number] == name and number is not None and number != thread:
            awaited = _top_of(number)
            if awaited and _THREAD_MARK not in awaited[-1].f_globals:
                return _place(awaited)
    return _place(top)


def _top_of(thread: int) -> list[FrameType]:
    """The frames at the top of a thread's stack, down to the first whose code does more than to ask torch.

    Where Python 3.11 makes a frame's object it may start a garbage collection, and a finaliser may let the other thread run on.
    The object is then made of memory that the other thread has given to another frame by now, and the process dies of it. Some
    versions of 3.11 and 3.12 also wait forever for a lock (python/cpython#106883). So the collector pauses meanwhile.
    """
    with COLLECTOR:
        collects = gc.isenabled()
        try:
            gc.disable()
            frames: list[FrameType] = []
            below = _frame_of(thread)
            while below is not None:
                frames.append(below)
                if not _only_asks(below):
                    break
                below = below.f_back
            return frames
        finally:
            if collects:
                gc.enable()


def _frame_of(thread: int) -> FrameType | None:
    """The frame in which the thread of this number is."""
    return sys._current_frames().get(thread)


def _place(top: list[FrameType]) -> Whereabouts:
    frame = top[0]
    waiting = frame if _awaits_handle(frame) else next((each for each in top if _waits(each)), None)
    where = _shown(waiting or frame)
    if waiting is not None and top[-1] is not waiting:
        where += f"{ASKED_BY}{_shown(top[-1])}"
    return Whereabouts(where, waits=waiting is not None)


def _shown(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _only_asks(frame: FrameType) -> bool:
    """Whether the code of this frame only does what another one has asked for."""
    module = _module(frame) + "."
    return module.partition(".")[0] in _NOT_A_PLACE or module.startswith(_ALSO_NO_PLACE)


def _waits(frame: FrameType) -> bool:
    """Whether code waits for other ranks in this frame, or in what it has called."""
    if _MARK in frame.f_globals:
        return True
    places = (_module(frame) + ".").startswith(tuple(place + "." for place in _WAITING_PLACES_OF_TORCH))
    return places and frame.f_code.co_name not in _PASSED_THROUGH


def _awaits_handle(frame: FrameType) -> bool:
    """Whether a script calls `wait` of a collective that it has begun. That method has no frame; those of Python have."""
    is_script = _module(frame).partition(".")[0] not in _NOT_A_PLACE
    # Between two lines the number is None, whatever its type says.
    return is_script and ".wait(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
