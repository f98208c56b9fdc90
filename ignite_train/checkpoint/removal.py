"""Removing an old checkpoint beside the run and its next save: to free gigabytes takes about as long as to write them."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Removal"]


class Removal:
    """Removes directories in a thread of its own, one at a time.

    Attributes:
        name: what the thread is removing, which a save must leave alone; None if it has nothing to do.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._thread: threading.Thread | None = None

    def begin(self, name: str, remove: Callable[[], None]) -> None:
        """Starts to remove; waits for the one before, so that the disk never holds two of them.

        Where no thread can be started it returns when that is removed.

        Args:
            name: of the directory.
            remove: removes it, and raises nothing.
        """
        self.wait()
        self.name = name
        thread = threading.Thread(target=self._run, args=(remove,), name="CheckpointRemoval", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left, or the process is ending
            self._run(remove)
            return
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

    def _run(self, remove: Callable[[], None]) -> None:
        try:
            remove()
        finally:
            self.name = None
