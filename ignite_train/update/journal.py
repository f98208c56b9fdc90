"""The journal of an update: each change besides the parameters is kept or put back, by how the update ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ignite_train.engine.loop import Progress
from ignite_train.model.step_watch import StepWatch
from ignite_train.state import TrainState

__all__ = ["COUNTED", "FINITE", "Counters", "End", "Ending", "Journal", "Part"]


class End(StrEnum):
    """The ways in which an update ends on this rank. Texts, whose hash is not computed in Python."""

    STEPPED = "the parameters have moved"
    SKIPPED = "gradients or loss were not finite"
    NO_SAMPLES = "there was nothing to step along"
    BROKEN_BEFORE = "an exception came before the parameters moved"
    BROKEN_AFTER = "an exception came when they had moved"


MOVED = frozenset({End.STEPPED, End.BROKEN_AFTER})
FINITE = MOVED | {End.NO_SAMPLES}
COUNTED = FINITE | {End.SKIPPED}


@dataclass(slots=True)
class Ending:
    """How the running update has ended.

    Attributes:
        end: on this rank; None while it runs.
        applied: on all ranks. With `reduction="local"` an update is applied although this rank has skipped it alone, and the
            counters and the loss scale follow that.
    """

    end: End | None = None
    applied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A thing that an update changes: three functions, each of which may be missing. What it was is remembered by the part.

    Attributes:
        kept_at: the ends at which the change is kept; at the others it is put back.
        mark: remembers what there is. Also the place to begin from a clean state.
        keep: lets the change stand, and does what follows from the end.
        put_back: leaves what was there at the mark.
        may_repeat: whether `keep` and `put_back` may be called twice, the first time up to any place in them.
    """

    kept_at: frozenset[End] = frozenset(End)
    mark: Callable[[], object] | None = None
    keep: Callable[[], object] | None = None
    put_back: Callable[[], object] | None = None
    may_repeat: bool = False


class Journal:
    """The context of an update. An update that `close` has not ended has been broken off by an exception.

    If a part raises as it is ended, or an interrupt comes, the others are ended all the same, in the way that the first of them
    were. Where `close` is interrupted, those that may be ended twice are ended again: how far that one has come is unknown.

    Args:
        steps: whether the parameters of this rank have moved.

    Attributes:
        ending: of the running update.
    """

    def __init__(self, steps: StepWatch) -> None:
        self._steps, self.ending = steps, Ending()
        self._left: Iterator[Callable[[], object]] = iter(())
        self.choose(())

    def choose(self, parts: Sequence[Part]) -> None:
        """Takes what is marked at the beginning of each update. They end in this order: those that count come first."""
        self._marks = [part.mark for part in parts if part.mark is not None]
        self._ends = {end: _functions(parts, end) for end in End}
        self._repeated = {end: _functions([part for part in parts if part.may_repeat], end) for end in End}

    def __enter__(self) -> Journal:
        self.ending.end, self._left = None, iter(())
        self._steps.begin()
        for mark in self._marks:
            mark()
        return self

    def close(self, end: End, *, applied: bool) -> None:
        """Ends the update. A step that the device has made follows the same numbers as `end`."""
        assert not self._steps.entered or end in MOVED  # noqa: S101
        self.ending.end, self.ending.applied, self._left = end, applied, iter(self._ends[end])
        for function in self._left:  # where one raises, `__exit__` ends the others
            function()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        if self.ending.end is None:
            moved = self._steps.moved
            end = End.BROKEN_AFTER if moved else End.BROKEN_BEFORE
            self.ending.end, self.ending.applied, self._left = end, moved, iter(self._ends[end])
            if (note := self._steps.half_made()) is not None:
                error.add_note(note)
        else:
            self._left = iter([*self._repeated[self.ending.end], *self._left])
        self._end_parts()

    def _end_parts(self) -> None:
        """Ends those that are left."""
        try:
            for function in self._left:
                function()
        except BaseException:
            self._end_parts()
            raise


def _functions(parts: Sequence[Part], end: End) -> list[Callable[[], object]]:
    chosen = [part.keep if end in part.kept_at else part.put_back for part in parts]
    return [function for function in chosen if function is not None]


class Counters:
    """The counters and the record in the trainer's state, and whether its iteration has had its effect.

    Nothing else counts steps.

    Attributes:
        progress: of the trainer, whose loop has marked the number of micro-batches and the record before the update.
    """

    def __init__(self, state: TrainState, ending: Ending) -> None:
        self._state, self._ending, self.progress = state, ending, Progress()

    def keep(self) -> None:
        """Counts the update, once."""
        if self.progress.settled:
            return
        self.progress.settled, self.progress.record_before = True, (None, None)
        if self._ending.applied:
            self._state.num_steps += 1
        else:
            self._state.num_skipped += 1

    def put_back(self) -> None:
        """Forgets the micro-batches of an update that is repeated, and its record."""
        state, progress = self._state, self.progress
        state.num_micro_batches = progress.micro_batches_before
        state.update_output, state.output = progress.record_before
