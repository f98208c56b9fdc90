"""Searching all ranks for the first value of an update that is not finite, by running the update again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ignite_train.model.forward_state import ForwardState
from ignite_train.model.gradients import Gradients
from ignite_train.model.nonfinite import find_nonfinite
from ignite_train.model.random_state import Draws
from ignite_train.ranks import collectives
from ignite_train.ranks.crossing import Crossing
from ignite_train.ranks.rank_vote import RankVote
from ignite_train.update.forward_backward import ForwardBackward
from ignite_train.update.loss_scaling import scale_near_floor

__all__ = ["NonFiniteSearch"]


class NonFiniteSearch:
    """Runs the micro-batches of an update again, from the state before it, to find the first value that is not finite.

    The loss is reduced, and so is the norm of a sharded model: if one of them is not finite, all ranks search. Replicas take
    the norm of their own copy of the gradients, and if a copy was spoiled after the reduction its rank is alone here. So the
    ranks vote, and search only if all of them do: forward may have collectives, and what was spoiled after the reduction would
    not be found.

    Args:
        passes: runs forward of a micro-batch again. Without loss scaling an update is searched if it ends the run; with it, if
            it overflows near the floor of the scale.
        crossing: runs placeholders.
        gradients: dropped by a search.

    Attributes:
        gradients: the same.
        draws: the random state before the update.
        marks_always: whether the random state is remembered also where no search is possible, for an update that is repeated.
    """

    def __init__(self, passes: ForwardBackward, crossing: Crossing, gradients: Gradients) -> None:
        self._passes, self._crossing, self.gradients = passes, crossing, gradients
        self._forward_state, self._vote = ForwardState(passes.module, passes.carried, passes.user_forward), RankVote()
        self.draws = Draws(self._forward_state.find_generators)
        self._loss_scaling, self.marks_always = passes.loss_scaling, False
        if self._loss_scaling.enabled:
            self._largest_scale = scale_near_floor(self._loss_scaling)
        else:
            self._largest_scale = math.inf if passes.options.on_nonfinite == "raise" else 0.0

    @property
    def may_mark(self) -> bool:
        """Whether some update has to remember the random state."""
        return self.marks_always or self._largest_scale > 0.0

    @property
    def marks_each(self) -> bool:
        """Whether all updates have to, whatever the loss scale is."""
        return self.marks_always or (self.may_mark and not self._loss_scaling.enabled)

    def mark(self) -> None:
        """Remembers the random state before an update, if a search in it is possible. Forgets the one before."""
        if self.marks_always or self._loss_scaling.scale <= self._largest_scale:
            self.draws.mark()
        else:
            self.draws.state = None

    def has_mark(self, loss_scale: float) -> bool:
        """Whether the state before an update at this loss scale was remembered, as far as forward draws numbers."""
        return loss_scale <= self._largest_scale and (self.draws.state is not None or not self.draws.may_happen)

    def __call__(
        self, micro_batches: Sequence[Any], num_placeholders: int, *, loss_is_finite: bool
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Searches. Collective, but for the ranks that did not find the update not finite.

        Returns:
            What the ranks have found; and the ranks that found the update finite.
        """
        if loss_is_finite:
            self._vote.cast()
            if absent := self._vote.absent():
                return (), absent
        reports = collectives.gather_objects(self._replay(micro_batches, num_placeholders))
        return tuple(f"rank {rank}, {report}" for rank, report in enumerate(reports) if report is not None), ()

    def explain(self, error: FloatingPointError, micro_batches: Sequence[Any], loss_scale: float) -> None:
        """Adds what a search finds to an error of the user's own, raised in forward or by a handler before the step.

        In a single process only: of several ranks one may be alone with its error, and forward may have collectives.
        """
        if collectives.world_size() == 1 and self.has_mark(loss_scale):
            found = self._replay(micro_batches, 0)
            error.add_note(f"run again: {found}" if found else "run again, this update was finite")

    def _replay(self, micro_batches: Sequence[Any], num_placeholders: int) -> str | None:
        """The finding of this rank. All that forward changes is put back."""
        passes, now = self._passes, self._forward_state.mark()
        self.draws.put_back()
        passes.carried.rewind()
        self.gradients.clear()
        # On several ranks each goes through its whole group: forward may have collectives that this library cannot see.
        in_step = collectives.world_size() > 1
        with passes.run_again():
            found = find_nonfinite(passes.module, micro_batches, passes.loss_without_wrapper, all_of_them=in_step)
            for _ in range(0 if self._crossing.forward_is_local else num_placeholders):
                self._crossing.take_part(passes.loss_without_wrapper, torch.autograd.backward)
        self._forward_state.put_back(now)
        return found
