"""A clock that a test moves, in place of that of the process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest


class Clock:
    """Time that moves only when somebody takes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def take(self, seconds: float) -> None:
        """Lets so much time pass."""
        self.now += seconds

    def loader(self, data: Iterable[Any], seconds: float) -> Iterator[Any]:
        """The data, each micro-batch of which takes so long to load."""
        for batch in data:
            self.take(seconds)
            yield batch
