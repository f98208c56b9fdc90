"""How the time of a run divides into sections: forward, backward, waiting for data, ..."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["RANGES", "SECTIONS", "Sections", "unmeasured"]

SECTIONS = ("data", "forward", "backward", "reduction", "optimizer", "handler", "evaluation", "checkpoint", "between_updates")
"""The sections of a run, of which exactly one is under way at each moment:

- data: opening the loader and waiting for it, once the first update of an epoch is due;
- forward: the beginning of an update, copies to the device and the user's function;
- backward: backward, with the reductions that overlap it;
- reduction: what is left to reduce after the last backward, the sums over ranks, the norm, the decision;
- optimizer: the step or skip, and the end of the update;
- handler: handlers of any event;
- evaluation, checkpoint: of the handlers, those that evaluate and save;
- between_updates: what the script does in a session, outside of `update`.
"""

unmeasured: Callable[[str], object] = dict[str, None]().get
"""Begins no section. It is not a function of Python's, since it is called several times in each update."""


class Sections:
    """Which section of a run is under way, and how many seconds each has taken by the clock of this process.

    A trainer has none until something asks for it; its marks then call `unmeasured`. A mark says what begins, and ends what
    was before, so that nothing is counted twice and nothing left out. On an accelerator the seconds are those of the host,
    which only queues most of the work; a listener may record events of the device.

    Attributes:
        current: the section; None while the trainer is not running.
        listeners: called at each change with the section before and the one that begins.
        open_range: where set, called with the name of each section as it begins; what it returns is called as it ends. For
            ranges in the profiles of torch and of the device.
    """

    def __init__(self) -> None:
        self.current: str | None = None
        self.listeners: list[Callable[[str | None, str | None], None]] = []
        self.open_range: Callable[[str], Callable[[], None]] | None = None
        self._close_range: Callable[[], None] | None = None
        self._seconds: dict[str | None, float] = dict.fromkeys((*SECTIONS, None), 0.0)  # None: between runs, and not asked for
        self._since = 0.0

    def switch(self, section: str | None) -> str | None:
        """Begins a section, and ends the one before.

        Args:
            section: one of `SECTIONS`, or None at the end of a run.

        Returns:
            The section before, to go back to.
        """
        now, before = time.perf_counter(), self.current
        self._seconds[before] += now - self._since
        self._since, self.current = now, section
        if self.listeners or self.open_range is not None:
            self._tell(before, section)
        return before

    def set_ranges(self, open_range: Callable[[str], Callable[[], None]] | None) -> None:
        """Has the sections that begin from here on named in a profile, or, with None, no longer; ends a range that is open."""
        if self._close_range is not None:
            self._close_range()
            self._close_range = None
        self.open_range = open_range

    @contextmanager
    def within(self, section: str) -> Iterator[None]:
        """A `with` that is a section, after which the one before continues."""
        before = self.switch(section)
        try:
            yield
        finally:
            self.switch(before)

    def seconds(self) -> dict[str, float]:
        """The seconds of each section up to now."""
        now, seconds = time.perf_counter(), {section: self._seconds[section] for section in SECTIONS}
        if self.current is not None:
            seconds[self.current] += now - self._since
        return seconds

    def _tell(self, before: str | None, section: str | None) -> None:
        """Ends the range of the section before, tells the listeners, and begins the range of this one."""
        if self._close_range is not None:
            self._close_range()
            self._close_range = None
        for listener in self.listeners:
            listener(before, section)
        if self.open_range is not None and section is not None:
            self._close_range = self.open_range(section)


def _record_function(name: str) -> Callable[[], None]:
    block: Any = torch.profiler.record_function(name)
    block.__enter__()
    return lambda: block.__exit__(None, None, None)


def _nvtx(name: str) -> Callable[[], None]:
    handle = torch.cuda.nvtx.range_start(name)
    return lambda: torch.cuda.nvtx.range_end(handle)


RANGES: dict[str, Callable[[str], Callable[[], None]]] = {"record_function": _record_function, "nvtx": _nvtx}
"""A function that opens a range of a profile, by its kind, and returns a function that closes it."""
