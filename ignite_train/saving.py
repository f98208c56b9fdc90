"""Writing checkpoints behind the run: it is held for a copy of its state, and one thread does the rest."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ignite_train import distributed
from ignite_train.commit import CheckpointDirectory, Contents, commit
from ignite_train.disk import Disk
from ignite_train.errors import CheckpointError
from ignite_train.manifest import Manifest
from ignite_train.retention import Retention
from ignite_train.tensor_files import Snapshot

__all__ = ["Saver"]

_logger = logging.getLogger(__name__)


class Saver:
    """Saves one checkpoint at a time. All ranks call it alike.

    Args:
        path: the directory of the checkpoints.
        retention: which of them stay.
        asynchronous: whether a thread writes while the run goes on.
        warns: whether a failure is logged; or else it is raised.

    Attributes:
        disk: what they are written to.
        latest: the newest one that is committed.
    """

    def __init__(self, path: Path, retention: Retention, *, asynchronous: bool, warns: bool) -> None:
        self.path, self.retention, self.asynchronous, self.warns = path, retention, asynchronous, warns
        self.disk = Disk()
        self.latest: Path | None = None
        self._is_taken_over = False
        self._snapshot = Snapshot()
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def prepare(self) -> None:
        """Makes the process group in which the threads of the ranks agree, beside the run's own collectives. Collective."""
        if self._group is None:
            self._group = distributed.own_group()

    def go_on_from(self, path: Path) -> None:
        """Takes over a checkpoint that every rank has read whole."""
        self.latest, self._is_taken_over = path, True

    def save(self, contents: Contents, manifest: Manifest) -> None:
        """Waits for the save before, then takes a copy of the tensors and starts.

        Raises:
            CheckpointError: the save before failed; or this one, if nothing is asynchronous.
        """
        self.wait()
        if self.asynchronous:
            contents = replace(contents, pieces=self._snapshot.take(contents.pieces))
        self._thread = threading.Thread(target=self._write, args=(contents, manifest), name="Checkpoint", daemon=True)
        self._thread.start()
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is being written any more.

        Raises:
            CheckpointError: the latest save failed, on all ranks alike.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is None:
            return
        if not self.warns or not isinstance(error, CheckpointError):
            raise CheckpointError(str(error)) from error
        if distributed.is_main_rank():
            _logger.warning(f"{error}; training goes on, and the older checkpoints are as they were")

    def abandon(self, patience_seconds: float) -> None:
        """Lets a save end, if it can, when the run has broken off; its failure is only logged."""
        if self._thread is not None:
            self._thread.join(patience_seconds)
            if self._thread.is_alive() or self._error is not None:
                _logger.warning(f"the last checkpoint was not written: {self._error or 'the other ranks do not answer'}")

    def _write(self, contents: Contents, manifest: Manifest) -> None:
        exchange = partial(distributed.gather_objects, group=self._group)
        try:
            self._remove_what_is_left()
            self.latest = commit(CheckpointDirectory(self.path, self.disk), contents, manifest, self.retention, exchange)
        except BaseException as error:
            self._error = error

    def _remove_what_is_left(self) -> None:
        """Once, what the process before was killed before it could remove, lest that adds up; each save does so at its end."""
        if self._is_taken_over and distributed.is_main_rank():
            CheckpointDirectory(self.path, self.disk).prune(self.retention, newest=self.latest)
        self._is_taken_over = False
