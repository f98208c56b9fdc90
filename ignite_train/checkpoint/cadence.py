"""When a run is saved."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from ignite_train.arguments import positive_int, real_number
from ignite_train.checkpoint.manifest import Manifest
from ignite_train.checkpoint.retention import Retention
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Piggyback

__all__ = ["Cadence"]


class Cadence(Piggyback):
    """When a run is saved: every N updates, seconds or epochs, after one of the best evaluations, on request, and at its end.

    All ranks decide alike: updates and epochs are counted by all of them, and whether the seconds have passed is decided by the
    clock of rank 0 and travels with the statistics of an update.

    Args:
        every: save after each update whose number is a multiple of this.
        every_seconds: save when this many seconds have passed since the last save began.
        every_epochs: save after each epoch whose number is a multiple of this; 1 if none of the three is given.
        score: name of the metric of the evaluator that decides which state is the best.
        retention: says which scores are among the best.

    Attributes:
        best: the best of the states that were saved: the update of each, and its score.
        awaited: the update whose state waits to be saved for its score, or None.

    Raises:
        TypeError, ValueError: an interval is not a positive number.
    """

    def __init__(
        self,
        *,
        every: int | None,
        every_seconds: float | None,
        every_epochs: int | None,
        score: str | None,
        retention: Retention,
    ) -> None:
        self.every = None if every is None else positive_int("every", every)
        self.every_seconds = None if every_seconds is None else real_number("every_seconds", every_seconds, above=0)
        self.every_epochs = None if every_epochs is None else positive_int("every_epochs", every_epochs)
        if every is None and every_seconds is None and every_epochs is None:
            self.every_epochs = 1
        self.score, self._retention = score, retention
        self.best: list[tuple[int, float]] = []
        self.awaited: int | None = None
        self._score: tuple[int, float | None] = (-1, None)  # the update of the latest evaluation, and what it found
        self.is_requested = False
        self._last_save = time.monotonic()
        self._saved_moment: Any = None

    def __repr__(self) -> str:
        intervals = {name: getattr(self, name) for name in ("every", "every_seconds", "every_epochs", "score")}
        return ", ".join(f"{name}={value!r}" for name, value in intervals.items() if value is not None)

    # --- what is due ------------------------------------------------------------------------------------------------------

    def is_due_after_update(self, update: int) -> bool:
        """Whether to save now that this update is done."""
        return self.is_requested or self.awaited is not None or (self.every is not None and update % self.every == 0)

    def is_due_after_epoch(self, epoch: int) -> bool:
        """Whether to save now that this epoch is done."""
        return (
            self.is_requested or self.awaited is not None or (self.every_epochs is not None and epoch % self.every_epochs == 0)
        )

    def is_due_at_end(self, moment: Any) -> bool:
        """Whether the last state of a run is not saved yet; `moment` is what `note_save` would be given."""
        return self.is_requested or self.awaited is not None or self._saved_moment != moment

    # --- what decides it --------------------------------------------------------------------------------------------------

    def start(self, best: list[tuple[int, float]]) -> None:
        """A run starts: its seconds are counted from now.

        Args:
            best: of the checkpoints in the directory, also of those that a run has written before a rewind.
        """
        self._last_save, self.is_requested, self.best = time.monotonic(), False, best
        self._saved_moment = None  # the run before may have come as far with another state

    def request(self) -> None:
        """Save at the end of the running update or epoch."""
        self.is_requested = True

    def note_save(self, moment: Any, score: float | None, started: float) -> None:
        """The run is saved: nothing is due until the next interval is over.

        Args:
            moment: the counters of the run, which tell whether its last state is saved.
            score: of the parameters that are saved; None if they were not evaluated.
            started: when the save began, by `time.monotonic`.
        """
        self._saved_moment, self.is_requested, self._last_save = moment, False, started
        self.awaited = None
        if score is not None:  # not before: the parameters may have moved between an evaluation and the save
            self.best = self._retention.best_of([*self.best, (self._score[0], score)])

    def note_score(self, update: int, score: float) -> None:
        """The parameters after this update were evaluated. If the score is among the best, they are to be saved.

        Those before the first update do not count.
        """
        self._score = update, score
        self.awaited = update if update > 0 and self._retention.is_among_best(score, self.best) else None

    def note_resumed(self, manifest: Manifest) -> None:
        """The run resumes from a checkpoint, whose parameters may have a score."""
        self._score, self.awaited = (manifest.update, manifest.score if self._retention.is_own(manifest) else None), None

    def note_loaded(self, update: int) -> None:
        """The run has other parameters than those after this update: they get no score, also by an evaluation."""
        self._score = update, math.nan

    def score_of(self, update: int) -> float | None:
        """The score of the parameters after this update; None if they were not evaluated."""
        return self._score[1] if self._score[0] == update else None

    def payload(self) -> Sequence[float]:
        """See `Piggyback`: 1 if the seconds have passed by the clock of rank 0."""
        is_time = self.every_seconds is not None and time.monotonic() - self._last_save >= self.every_seconds
        return [float(is_time and collectives.is_main_rank())]

    def on_reduced(self, sums: list[float]) -> None:
        """See `Piggyback`."""
        self.is_requested = self.is_requested or sums[0] > 0
