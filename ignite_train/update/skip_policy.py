"""The policy where an update makes no step: a pass, a lower loss scale, or an error that says where the cause is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ignite_train.errors import GaveUpError, LossScaleFloorError, NonFiniteError, SparseGradientError, TrainingError
from ignite_train.model.nonfinite import spoilt_buffer
from ignite_train.state import UpdateOutput
from ignite_train.update.nonfinite_search import NonFiniteSearch
from ignite_train.update.options import UpdateOptions
from ignite_train.update.out_of_memory import advise
from ignite_train.update.parts import Scale

__all__ = ["SkipPolicy"]


@dataclass(kw_only=True)
class SkipPolicy:
    """Looks at each update before its step: what is not finite is raised, or lowers the loss scale, and is counted.

    Attributes:
        module: the model without a wrapper.
        scale: tells the loss scaling of an overflow.
        search: looks for the first value that is not finite.
        options: `on_nonfinite` and `give_up_after` are what it follows.
        in_a_row: how many there were, by what happened.
    """

    module: nn.Module
    scale: Scale
    search: NonFiniteSearch
    options: UpdateOptions
    in_a_row: dict[str, int] = field(default_factory=dict)

    def __call__(self, update: int, micro_batches: Sequence[Any], num_placeholders: int, output: UpdateOutput) -> None:
        """Looks at an update that is skipped, or has run out of memory, or follows such a one. Collective, if it is not finite.

        Args:
            update: its number.
            micro_batches: of this rank.
            num_placeholders: how many it ran after them.
            output: its record.

        Raises:
            NonFiniteError: it is not finite, and the run is to end.
            LossScaleFloorError: an overflow would lower the loss scale below its floor.
            GaveUpError: there were too many failures in a row.
        """
        reason = output.skipped_reason
        if reason == "nonfinite" and self.options.on_nonfinite == "raise":
            raise self._nonfinite_error(update, micro_batches, num_placeholders, output)
        scale_fell = reason == "overflow" and self.lower_scale(micro_batches, num_placeholders, output)
        self.count(update, output, scale_fell=scale_fell)

    def count(self, update: int, output: UpdateOutput, *, scale_fell: bool) -> None:
        """Counts an update. An overflow that lowered the loss scale (`scale_fell`) may end by itself, so it does not count.

        Raises:
            GaveUpError: it is one too many.
        """
        reason = output.skipped_reason
        if reason is None or scale_fell:
            self.in_a_row.pop("was skipped", None)
        elif reason in ("nonfinite", "overflow"):  # one without samples does not show that the next is finite
            self._count(update, "was skipped")
        if output.num_out_of_memory == 0:
            self.in_a_row.pop("ran out of memory", None)
        else:
            self._count(update, "ran out of memory")

    def _count(self, update: int, what: str) -> None:
        count, limit = self.in_a_row.get(what, 0) + 1, self.options.give_up_after
        if limit is not None and count >= limit:
            raise GaveUpError(update, count, what)
        self.in_a_row[what] = count

    def lower_scale(self, micro_batches: Sequence[Any], num_placeholders: int, output: UpdateOutput) -> bool:
        """Tells the loss scaling of an overflow, and says whether the scale fell. At its floor all ranks look for the cause."""
        before = self.scale.now
        try:
            return self.scale.overflow()
        except LossScaleFloorError as error:
            if not self.search.has_mark(before):
                raise
            found, absent = self._find(micro_batches, num_placeholders, output)
            found += tuple(f"rank {rank} saw no overflow" for rank in absent)
            raise LossScaleFloorError(error.loss_scale, error.floor, found) from None

    def _nonfinite_error(
        self, update: int, micro_batches: Sequence[Any], num_placeholders: int, output: UpdateOutput
    ) -> NonFiniteError:
        """The error that ends the run. Forward may have left a NaN where it stays, such as in running statistics."""
        found = self._find(micro_batches, num_placeholders, output)
        error = NonFiniteError(update, output.loss, output.grad_norm, *found)
        if output.num_evaluations > 1:
            error.add_note(
                f"the optimizer's step had made {output.num_evaluations} evaluations: the latest, at parameters that it has "
                "tried, or what it left was not finite; a smaller learning rate tries nearer ones"
            )
        if (name := spoilt_buffer(self.module)) is not None:
            error.add_note(
                f"the buffer {name!r} has a NaN by now, which may stay there: continue from a checkpoint, or "
                "pass options=UpdateOptions(on_nonfinite='skip'), which puts buffers back"
            )
        return error

    def _find(
        self, micro_batches: Sequence[Any], num_placeholders: int, output: UpdateOutput
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.search(micro_batches, num_placeholders, loss_is_finite=math.isfinite(output.loss))

    def explain(self, error: BaseException, micro_batches: Sequence[Any], *, may_advise: bool) -> None:
        """Adds notes to an error, or raises a clearer one, before the update that it has broken off is put back.

        Args:
            error: what was raised in the update.
            micro_batches: of this rank.
            may_advise: whether it came in a forward or backward after whose lack of memory nothing is recovered.

        Raises:
            SparseGradientError: there is a sparse gradient, over which torch has failed somewhere in backward or after it.
        """
        if isinstance(error, TrainingError):
            return
        if isinstance(error, torch.OutOfMemoryError) and may_advise:
            advise(error)
        if isinstance(error, FloatingPointError):
            self.search.explain(error, micro_batches, self.scale.now)
        if isinstance(error, RuntimeError) and (sparse := self.search.gradients.first_sparse()) is not None:
            raise SparseGradientError(sparse) from None
