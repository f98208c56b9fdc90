"""What an update changes besides the parameters, and whether it is kept or put back when the update ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor, nn

from ignite_train.carried import Carried
from ignite_train.device.to_device import ToDevice
from ignite_train.model.buffer_rollback import BufferRollback
from ignite_train.model.gradients import Gradients
from ignite_train.model.seeding import Seeding
from ignite_train.model.step_watch import StepWatch
from ignite_train.ranks.statistics import Statistics
from ignite_train.state import TrainState
from ignite_train.trainer import Trainer
from ignite_train.update.loss_scaling import LossScaling
from ignite_train.update.nonfinite_search import NonFiniteSearch

__all__ = [
    "Buffers",
    "CarriedValues",
    "Cleared",
    "Counters",
    "End",
    "Ending",
    "Journal",
    "Leftovers",
    "Part",
    "RandomNumbers",
    "Scale",
    "Seeds",
]


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


class Ending(NamedTuple):
    """How an update has ended.

    Attributes:
        end: on this rank.
        applied: on all ranks. With `reduction="local"` an update is applied although this rank has skipped it alone, and the
            counters and the loss scale follow that.
    """

    end: End
    applied: bool


class Part:
    """One thing that an update changes. The journal holds its marks.

    Attributes:
        kept_at: the ends at which the change is kept; at the others it is put back.
        is_idle: whether `mark` and `keep` have nothing to do, so that only `put_back` is called. After a change of it the
            journal has to `choose` again.
    """

    kept_at: frozenset[End] = frozenset(End)
    is_idle = False

    def mark(self) -> Any:
        """Gives what `put_back` needs. Also the place to begin from a clean state."""

    def keep(self, mark: Any, ending: Ending) -> None:
        """Lets the change stand, and does what follows from the end."""

    def put_back(self, mark: Any, ending: Ending) -> None:
        """Leaves what was there at the mark."""


class Journal:
    """The context of an update. An update that `close` has not ended has been broken off by an exception.

    Each part is ended once. If one of them raises, or an interrupt comes in between, the others are ended all the same, in the
    way that the first of them were.

    Args:
        parts: what is marked at the beginning of each update. They end in this order: those that count come first.
        steps: whether the parameters of this rank have moved.
    """

    def __init__(self, parts: Sequence[Part], steps: StepWatch) -> None:
        self.parts, self.steps = tuple(parts), steps
        self.choose()
        self._marks: list[Any] = []
        self._ending: Ending | None = None
        self._left: Iterator[tuple[int, Callable[..., None]]] = iter(())

    def choose(self) -> None:
        """Sorts out what is called: a small model's update takes less time than asking each part what it does at each end."""
        parts = self.parts
        self._markers = [(index, one.mark) for index, one in enumerate(parts) if _is_own(one, "mark") and not one.is_idle]
        self._enders = {end: [*_enders(parts, end)] for end in End}

    def __enter__(self) -> Journal:
        self._ending, self._left = None, iter(())
        self._marks = marks = [None] * len(self.parts)
        self.steps.begin()
        for index, mark in self._markers:
            marks[index] = mark()
        return self

    @property
    def moved(self) -> bool:
        """Whether the update has moved parameters on this rank."""
        return self.steps.moved

    def close(self, ending: Ending) -> None:
        """Ends the update."""
        self._left, self._ending = iter(self._enders[ending.end]), ending
        marks = self._marks
        for index, end in self._left:  # where one raises, `__exit__` ends the others
            end(marks[index], ending)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            if self._ending is None:
                moved = self.steps.moved
                self._ending = Ending(End.BROKEN_AFTER if moved else End.BROKEN_BEFORE, applied=moved)
                self._left = iter(self._enders[self._ending.end])
                if (note := self.steps.half_made()) is not None:
                    error.add_note(note)
            self._end_parts(self._ending)
        self._marks = []

    def _end_parts(self, ending: Ending) -> None:
        """Ends those that are left."""
        marks = self._marks
        try:
            for index, end in self._left:
                end(marks[index], ending)
        except BaseException:
            self._end_parts(ending)
            raise


def _enders(parts: Sequence[Part], end: End) -> Iterator[tuple[int, Callable[..., None]]]:
    for index, part in enumerate(parts):
        name = "keep" if end in part.kept_at else "put_back"
        if _is_own(part, name) and not (part.is_idle and name == "keep"):
            yield index, part.keep if name == "keep" else part.put_back


def _is_own(part: Part, name: str) -> bool:
    """Whether the class of the part does anything there."""
    return name in {key for kind in type(part).__mro__ if issubclass(kind, Part) and kind is not Part for key in vars(kind)}


# --- the parts ----------------------------------------------------------------------------------------------------------------


class Counters(Part):
    """The counters of the trainer's state, and whether its iteration has had its effect. Nothing else counts steps.

    Attributes:
        trainer: whose update is about to be marked. The mark takes it, so that it is held no longer than the update runs.
    """

    kept_at = COUNTED

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self.trainer: Trainer | None = None

    def mark(self) -> tuple[Trainer, int]:
        """The trainer, and its number of micro-batches."""
        trainer, self.trainer = self.trainer, None
        assert trainer is not None  # noqa: S101  # the update has set it
        return trainer, self._state.num_micro_batches

    def keep(self, mark: tuple[Trainer, int], ending: Ending) -> None:
        """Counts the update."""
        mark[0].progress.settled = True
        self._state.num_steps += ending.applied
        self._state.num_skipped += not ending.applied

    def put_back(self, mark: tuple[Trainer, int], ending: Ending) -> None:  # noqa: ARG002
        """Forgets the micro-batches of an update that is repeated."""
        self._state.num_micro_batches = mark[1]


class CarriedValues(Part):
    """What forward carries from micro-batch to micro-batch."""

    kept_at = FINITE

    def __init__(self, carried: Carried) -> None:
        self._carried = carried

    def mark(self) -> None:
        """Has them copied."""
        self._carried.begin_update()

    def keep(self, mark: None, ending: Ending) -> None:  # noqa: ARG002
        """Keeps what the update has made of them."""
        self._carried.end_update()

    def put_back(self, mark: None, ending: Ending) -> None:  # noqa: ARG002
        """Goes back to the copies."""
        self._carried.roll_back()


class Buffers(Part):
    """The model's buffers. A forward that was not finite has spoilt running statistics; one that is repeated moves them again.

    Args:
        module: whose buffers.
        are_marked: whether they are copied in each update.

    Attributes:
        are_marked: the same; a `Checkpoint` sets it.
        are_spoilt: whether an update was broken off that has changed them without a mark.
    """

    kept_at = FINITE

    def __init__(self, module: nn.Module, *, are_marked: bool) -> None:
        self._module, self.are_marked, self.are_spoilt = module, are_marked, False
        self._rollback = BufferRollback(module)
        self._versions: list[tuple[Tensor, int]] | None = None
        self._move: bool | None = None  # whether the first update has moved buffers

    @property
    def is_looking(self) -> bool:
        """Whether the next update finds out what forward does to them."""
        return self._move is None and not self.are_marked

    @property
    def is_idle(self) -> bool:  # type: ignore[override]  # an attribute of those in which it never changes
        """Whether it is known what forward does to them, and nothing is copied."""
        return self._move is not None and not self.are_marked

    def mark(self) -> bool:
        """Copies them, if that is needed; and notes in the first update whether forward changes them at all."""
        if self.are_marked:
            self._rollback.mark()
        elif self._move is None:
            self._versions = self._look()
        return self.are_marked

    def keep(self, mark: bool, ending: Ending) -> None:  # noqa: ARG002, FBT001
        """Lets them stand."""
        if self._versions is not None:
            self._move, self._versions = self._have_moved(), None

    def put_back(self, mark: bool, ending: Ending) -> None:  # noqa: ARG002, FBT001
        """Puts them back, or notes that this cannot be done."""
        if mark:
            self._rollback.roll_back()
        elif self._move or (self._versions is not None and self._have_moved()):
            self.are_spoilt = True

    def _look(self) -> list[tuple[Tensor, int]]:
        return [(buffer, -1 if buffer.is_inference() else buffer._version) for buffer in self._module.buffers()]

    def _have_moved(self) -> bool:
        before, now = self._versions or [], self._look()
        pairs = zip(before, now, strict=False)
        return len(before) != len(now) or any(one is not other or old != new for (one, old), (other, new) in pairs)


class Cleared(Part):
    """The gradients, which no end leaves behind, but for a step that is to."""

    def __init__(self, gradients: Gradients, *, are_kept: bool) -> None:
        self._gradients, self._are_kept = gradients, are_kept

    def mark(self) -> None:
        """Drops what something else than an update has left."""
        self._gradients.clear_stale()

    def keep(self, mark: None, ending: Ending) -> None:  # noqa: ARG002
        """Clears them."""
        if not (self._are_kept and ending.end is End.STEPPED):
            self._gradients.clear()


class Leftovers(Part):
    """What an update needs only while it runs, and has dropped itself unless it was broken off.

    Args:
        state: of the trainer.
        transfer: may have copied the next micro-batch.
        statistics: the sums; others may be added.
    """

    kept_at = frozenset({End.STEPPED, End.SKIPPED, End.NO_SAMPLES})

    def __init__(self, state: TrainState, transfer: ToDevice, statistics: Statistics) -> None:
        self._state, self._transfer, self.statistics = state, transfer, [statistics]

    def put_back(self, mark: None, ending: Ending) -> None:  # noqa: ARG002
        """Drops it."""
        self._state.forward_output = self._state.micro_batch_in_group = None
        for statistics in self.statistics:
            statistics.reset()
        self._transfer.forget()


class RandomNumbers(Part):
    """The random state before forward, where it was remembered: an update that is repeated draws the same numbers."""

    kept_at = COUNTED

    def __init__(self, search: NonFiniteSearch, loss_scaling: LossScaling) -> None:
        self._search, self._loss_scaling = search, loss_scaling

    def mark(self) -> None:
        """Has it remembered, where the update may be run again."""
        self._search.mark(self._loss_scaling.scale)

    def put_back(self, mark: None, ending: Ending) -> None:  # noqa: ARG002
        """Goes back to it."""
        self._search.put_back()


class Seeds(Part):
    """The random numbers of an update that are a function of a seed. The update begins them, when it is in the journal."""

    def __init__(self, search: NonFiniteSearch, loss_scaling: LossScaling, seeding: Seeding) -> None:
        self._search, self._loss_scaling, self._seeding = search, loss_scaling, seeding

    def begin(self, update: int) -> None:
        """Seeds the generators for the update of this number."""
        self._seeding.begin(update)
        self._search.mark(self._loss_scaling.scale)

    def keep(self, mark: None, ending: Ending) -> None:  # noqa: ARG002
        """Gives the generators back."""
        self._seeding.end()


class Scale(Part):
    """The loss scale. It changes when the update has ended, since backward and step must use the same one."""

    def __init__(self, loss_scaling: LossScaling) -> None:
        self._loss_scaling, self._is_told = loss_scaling, False

    def mark(self) -> None:
        """It has not been told of this update."""
        self._is_told = False

    @property
    def now(self) -> float:
        """The scale of the running update."""
        return self._loss_scaling.scale

    def overflow(self) -> bool:
        """Tells it of an overflow; gives whether the scale fell. It may raise a `LossScaleFloorError`."""
        self._is_told, before = True, self._loss_scaling.scale
        self._loss_scaling.update(overflow=True)
        return self._loss_scaling.scale < before

    def keep(self, mark: None, ending: Ending) -> None:  # noqa: ARG002
        """Tells it that there was none."""
        if not self._is_told and (ending.applied or ending.end is End.SKIPPED):
            self._is_told = True
            self._loss_scaling.update(overflow=False)
