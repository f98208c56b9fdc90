"""What an update changes besides the parameters, and whether it is kept or put back when the update ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor, nn

from ignite_train.engine.progress import Progress
from ignite_train.model.buffer_rollback import BufferRollback
from ignite_train.model.step_watch import StepWatch
from ignite_train.state import TrainState
from ignite_train.update.loss_scaling import LossScaling

__all__ = ["COUNTED", "FINITE", "Buffers", "Counters", "End", "Ending", "Journal", "Part", "Scale"]


class End(Enum):
    """The ways in which an update ends on this rank."""

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
    """One thing that an update changes: three functions, each of which may be missing. What it was is remembered by the part.

    Attributes:
        kept_at: the ends at which the change is kept; at the others it is put back.
        mark: remembers what there is. Also the place to begin from a clean state.
        keep: lets the change stand, and does what follows from the end.
        put_back: leaves what was there at the mark.
    """

    kept_at: frozenset[End] = frozenset(End)
    mark: Callable[[], object] | None = None
    keep: Callable[[], object] | None = None
    put_back: Callable[[], object] | None = None


class Journal:
    """The context of an update. An update that `close` has not ended has been broken off by an exception.

    Each part is ended once. If one of them raises, or an interrupt comes in between, the others are ended all the same, in the
    way that the first of them were.

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
        chosen = {end: [part.keep if end in part.kept_at else part.put_back for part in parts] for end in End}
        self._ends = {end: [function for function in functions if function is not None] for end, functions in chosen.items()}

    def __enter__(self) -> Journal:
        self.ending.end, self._left = None, iter(())
        self._steps.begin()
        for mark in self._marks:
            mark()
        return self

    def close(self, end: End, *, applied: bool) -> None:
        """Ends the update."""
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
        self._end_parts()

    def _end_parts(self) -> None:
        """Ends those that are left."""
        try:
            for function in self._left:
                function()
        except BaseException:
            self._end_parts()
            raise


# --- parts that belong to no object of their own ------------------------------------------------------------------------------


class Counters:
    """The counters of the trainer's state, and whether its iteration has had its effect. Nothing else counts steps.

    Attributes:
        progress: of the trainer, whose loop has marked the number of micro-batches before the update.
    """

    def __init__(self, state: TrainState, ending: Ending) -> None:
        self._state, self._ending, self.progress = state, ending, Progress()

    def keep(self) -> None:
        """Counts the update."""
        self.progress.settled = True
        if self._ending.applied:
            self._state.num_steps += 1
        else:
            self._state.num_skipped += 1

    def put_back(self) -> None:
        """Forgets the micro-batches of an update that is repeated."""
        self._state.num_micro_batches = self.progress.micro_batches_before


class Buffers:
    """The model's buffers. A forward that was not finite has spoilt running statistics; one that is repeated moves them again.

    Args:
        module: whose buffers.
        are_marked: whether they are copied in each update.

    Attributes:
        are_marked: the same; a `Checkpoint` sets it.
        are_spoilt: whether an update was broken off that has changed them without a mark.
    """

    def __init__(self, module: nn.Module, *, are_marked: bool) -> None:
        self._module, self.are_marked, self.are_spoilt = module, are_marked, False
        self._rollback = BufferRollback(module)
        self._versions: list[tuple[Tensor, int]] | None = None
        self._move: bool | None = None  # whether the first update has moved buffers

    @property
    def is_looking(self) -> bool:
        """Whether the next update finds out what forward does to them."""
        return self._move is None and not self.are_marked

    def part(self) -> Part:
        """What is to be done in each update. Asked again while `is_looking`, and when `are_marked` has changed."""
        if self.are_marked:
            return Part(kept_at=FINITE, mark=self._rollback.mark, put_back=self._rollback.roll_back)
        if self._move is None:
            return Part(kept_at=FINITE, mark=self._look, keep=self._learn, put_back=self._note_if_moved)
        return Part(kept_at=FINITE, put_back=self._note)

    def _look(self) -> None:
        self._versions = self._now()

    def _learn(self) -> None:
        self._move = self._have_moved()

    def _note_if_moved(self) -> None:
        self.are_spoilt |= self._have_moved()

    def _note(self) -> None:
        """Notes that they cannot be put back."""
        self.are_spoilt |= bool(self._move)

    def _now(self) -> list[tuple[Tensor, int]]:
        return [(buffer, -1 if buffer.is_inference() else buffer._version) for buffer in self._module.buffers()]

    def _have_moved(self) -> bool:
        before, now = self._versions or [], self._now()
        self._versions = None
        pairs = zip(before, now, strict=False)
        return len(before) != len(now) or any(one is not other or old != new for (one, old), (other, new) in pairs)


class Scale:
    """The loss scale. It changes when the update has ended, since backward and step must use the same one."""

    def __init__(self, loss_scaling: LossScaling, ending: Ending) -> None:
        self._loss_scaling, self._ending, self._was_overflow = loss_scaling, ending, False

    def mark(self) -> None:
        """There was no overflow so far."""
        self._was_overflow = False

    @property
    def now(self) -> float:
        """The scale of the running update."""
        return self._loss_scaling.scale

    def overflow(self) -> bool:
        """Tells it of an overflow; gives whether the scale fell. It may raise a `LossScaleFloorError`."""
        self._was_overflow, before = True, self._loss_scaling.scale
        self._loss_scaling.update(overflow=True)
        return self._loss_scaling.scale < before

    def keep(self) -> None:
        """Tells it that there was none."""
        if not self._was_overflow and (self._ending.applied or self._ending.end is End.SKIPPED):
            self._loss_scaling.update(overflow=False)
