"""Times by the clock of a device, read once the device has got there and never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ignite_train.device.streams import has_streams

__all__ = ["EventTimes", "event_maker"]

_MAX_PENDING = 64  # updates that the device has not done yet
_MILLISECOND = 1e-3


class EventTimes:
    """How long the device works on each section of an update, between events on its current stream.

    `drain` looks only at updates whose last event the device has reached. Of those that wait, at most 64 are kept.

    Args:
        make_event: makes an event that knows the time.
    """

    def __init__(self, make_event: Callable[[], torch.Event]) -> None:
        self._make_event = make_event
        self._free: list[torch.Event] = []
        self._marks: list[tuple[str | None, torch.Event]] = []  # of the running update
        self._spans: list[tuple[str, torch.Event, torch.Event]] = []
        self._pending: deque[tuple[Any, Any]] = deque()

    def mark(self, section: str | None) -> None:
        """Ends the section before, if there is one, and begins `section`, if it is not None."""
        self._marks.append((section, self._recorded()))

    def span(self, name: str) -> Callable[[], None]:
        """Begins a time of its own, whatever the sections are; what it returns ends it."""
        begin = self._recorded()
        return lambda: self._spans.append((name, begin, self._recorded()))

    def end_update(self, section: str | None) -> None:
        """Ends the update in the middle of a section, which continues in the next."""
        self.mark(None)
        self._pending.append((self._marks, self._spans))
        self._marks, self._spans = [], []
        self.mark(section)
        if len(self._pending) > _MAX_PENDING:
            self._recycle(*self._pending.popleft())

    def drain(self) -> list[dict[str, float]]:
        """The seconds by section of each update that the device has done since the last call, the oldest first."""
        done = []
        while self._pending and self._pending[0][0][-1][1].query():
            marks, spans = self._pending.popleft()
            seconds: dict[str, float] = {}
            for (name, begin), (_, end) in pairwise(marks):
                if name is not None:
                    seconds[name] = seconds.get(name, 0.0) + begin.elapsed_time(end) * _MILLISECOND
            for name, begin, end in spans:
                seconds[name] = seconds.get(name, 0.0) + begin.elapsed_time(end) * _MILLISECOND
            done.append(seconds)
            self._recycle(marks, spans)
        return done

    def _recorded(self) -> torch.Event:
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def _recycle(self, marks: Any, spans: Any) -> None:
        self._free += [event for _, event in marks]
        self._free += [event for _, *events in spans for event in events]


def event_maker(device: torch.device) -> Callable[[], torch.Event] | None:
    """Makes events on `device`; None if it has none that know the time, as the CPU has not."""
    if not has_streams(device):
        return None
    return lambda: torch.Event(device, enable_timing=True)
