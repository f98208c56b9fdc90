"""Removing old checkpoints beside the run and beside its next save: freeing gigabytes takes as long as writing them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

__all__ = ["Removal"]


class Removal:
    """Removes directories in a thread of its own, one batch at a time.

    Attributes:
        names: what the thread is removing; the next save must leave it alone.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self._thread: threading.Thread | None = None

    def begin(self, names: Collection[str], remove: Callable[[str], None]) -> None:
        """Starts to remove; waits for the batch before, so that the disk never holds two of them.

        Args:
            names: of the directories.
            remove: removes one of them, and raises nothing.
        """
        self.wait()
        self.names = frozenset(names)
        thread = threading.Thread(target=self._remove, args=(tuple(names), remove), name="CheckpointRemoval", daemon=True)
        thread.start()
        self._thread = thread  # not before: one that has not started cannot be joined

    def wait(self, patience_seconds: float | None = None) -> bool:
        """Returns when nothing is being removed, or when that took too long.

        Returns:
            Whether nothing is.
        """
        thread = self._thread
        if thread is not None:
            thread.join(patience_seconds)
        return thread is None or not thread.is_alive()

    def _remove(self, names: tuple[str, ...], remove: Callable[[str], None]) -> None:
        try:
            for name in names:
                remove(name)
        finally:
            self.names = frozenset()
