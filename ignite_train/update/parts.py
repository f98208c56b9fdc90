"""The parts of the journal: what an update changes besides the parameters."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from ignite_train.forward import BoundForward
from ignite_train.internals.of_torch import version_of
from ignite_train.model.buffer_rollback import BufferRollback
from ignite_train.model.gradients import Gradients
from ignite_train.ranks.statistics import Statistics
from ignite_train.update.forward_backward import ForwardBackward
from ignite_train.update.journal import COUNTED, FINITE, Counters, End, Ending, Part
from ignite_train.update.loss_scaling import LossScaling, NoLossScaling
from ignite_train.update.nonfinite_search import NonFiniteSearch

__all__ = ["Buffers", "Parts", "Scale"]

_ENDED_ITSELF = frozenset({End.STEPPED, End.SKIPPED, End.NO_SAMPLES})


class Parts:
    """The parts of the journal: all that an update changes besides the parameters.

    A part that has nothing to do in this set-up is left out of the list.

    Args:
        passes: forward and backward.
        gradients: of the trainer's optimizers.
        statistics: the sums of the update.
        search: remembers the random state.
        ending: of the running update.

    Attributes:
        counters, scale, buffers, search: parts of the list.
        statistics: a list of those that an update adds to; an acceleration may add others.
    """

    def __init__(
        self, passes: ForwardBackward, gradients: Gradients, statistics: Statistics, search: NonFiniteSearch, ending: Ending
    ) -> None:
        self._passes, self._gradients, self.search, self.statistics = passes, gradients, search, [statistics]
        self.counters, self.scale = Counters(passes.state, ending), Scale(passes.loss_scaling, ending)
        skips = passes.loss_scaling.enabled or passes.options.on_nonfinite == "skip"
        self.buffers = Buffers(passes.module, passes.user_forward, are_marked=skips)

    def mark_everything(self) -> list[Part]:
        """The parts by which each update to come remembers what one that is broken off has to put back."""
        self.buffers.are_marked = self.search.marks_always = True
        return self.choose()

    def choose(self) -> list[Part]:
        """The parts, in the order in which they end."""
        passes, search, gradients = self._passes, self.search, self._gradients
        carried, counters, scale = passes.carried, self.counters, self.scale
        cleared_at = frozenset(End) - ({End.STEPPED} if passes.options.keep_gradients else set())
        parts = [
            Part(kept_at=COUNTED, keep=counters.keep, put_back=counters.put_back, may_repeat=True),
            Part(mark=scale.mark, keep=scale.keep),
            Part(
                kept_at=FINITE,
                mark=carried.begin_update,
                keep=carried.end_update,
                put_back=carried.roll_back,
                may_repeat=True,
            ),
            self.buffers.part(),
            # What something else than an update has left in `.grad` is dropped at the mark.
            Part(kept_at=cleared_at, mark=gradients.clear_stale, keep=gradients.clear),
            Part(kept_at=_ENDED_ITSELF, put_back=self._drop_leftovers, may_repeat=True),
        ]
        if type(passes.loss_scaling) is NoLossScaling:
            del parts[1]
        if passes.seeding is not None:
            parts.append(Part(keep=passes.seeding.end, may_repeat=True))
        elif search.may_mark:
            mark = search.draws.mark if search.marks_each else search.mark
            parts.append(Part(kept_at=COUNTED, mark=mark, put_back=search.draws.put_back, may_repeat=True))
        return parts

    def _drop_leftovers(self) -> None:
        """Drops what an update needs only while it runs, and has dropped itself unless it was broken off."""
        passes = self._passes
        passes.state.forward_output = passes.state.micro_batch_in_group = None
        for statistics in self.statistics:
            statistics.reset()
        if passes.transfer is not None:
            passes.transfer.forget()


class Buffers:
    """The buffers that forward may move: the buffers of the model, and running statistics of a teacher that it refers to.

    A forward that was not finite has spoilt running statistics; one that is repeated moves them again.

    Args:
        module: the model.
        forward: the user's.
        are_marked: whether they are copied in each update.

    Attributes:
        are_marked: the same; a `Checkpoint` sets it.
        are_spoilt: whether an update was broken off without a mark, after those of the model had changed since the trainer was
            made.
    """

    def __init__(self, module: nn.Module, forward: BoundForward, *, are_marked: bool) -> None:
        self._module, self.are_marked, self.are_spoilt = module, are_marked, False
        self._rollback, self._at_first = BufferRollback(module, forward), self._now()

    def part(self) -> Part:
        """The part for each update; another one where `are_marked` has changed."""
        mark = self._rollback.mark if self.are_marked else None
        return Part(kept_at=FINITE, mark=mark, put_back=self._put_back, may_repeat=True)

    def _put_back(self) -> None:
        """Puts them back, or notes that they cannot be, if they have changed since there is a trainer."""
        if not self._rollback.roll_back():
            before, now = self._at_first, self._now()
            pairs = zip(before, now, strict=False)
            moved = len(before) != len(now) or any(one is not other or old != new for (one, old), (other, new) in pairs)
            self.are_spoilt |= moved

    def _now(self) -> list[tuple[weakref.ref[Tensor], int]]:
        """Which they are, each with one reference as long as it lives, and how often each has changed."""
        buffers = self._module.buffers()
        return [(weakref.ref(one), -1 if one.is_inference() else version_of(one)) for one in buffers]


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
