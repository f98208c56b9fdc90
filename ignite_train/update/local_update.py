"""An update in which each rank steps along its own gradients, and all ranks know what the others did."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Piggyback
from ignite_train.ranks.statistics import Statistics, Totals
from ignite_train.state import SkippedReason, UpdateOutput
from ignite_train.trainer import Trainer
from ignite_train.update.decision import Decision
from ignite_train.update.journal import End
from ignite_train.update.update import Update

__all__ = ["LocalUpdate"]


class _OwnDecision(Piggyback):
    """Decides about the step of this rank alone, just before the statistics leave it, and sends the outcome with them.

    A rank whose gradients are not finite takes its loss and its logs out of the statistics, which are those of the others.

    Args:
        statistics: has the sums of this rank.
        decide: makes a decision of the sums of this rank.

    Attributes:
        decision: what this rank does.
        num_stepping: how many ranks step.
        num_not_finite: how many ranks have gradients or a loss that are not finite.
        grad_norm: the root of the mean square of the norms of the ranks that step; inf or NaN if none does.
        clip_coefficient: the mean of theirs.
    """

    payload_size = 4

    def __init__(self, statistics: Statistics, decide: Callable[[Totals], Decision]) -> None:
        self._statistics, self._decide = statistics, decide
        self.decision = Decision(math.nan, math.nan, math.nan, 1.0, "no_samples")
        self.num_stepping = self.num_not_finite = 0
        self.grad_norm, self.clip_coefficient = math.nan, 1.0

    def payload(self) -> Sequence[float]:
        """Whether this rank steps, whether it is not finite, and of a rank that steps norm² and clip coefficient."""
        self.decision = own = self._decide(self._statistics.own_totals())
        if own.skipped_reason is None:
            squared = own.grad_norm * own.grad_norm  # a power raises an OverflowError where a product is infinite
            return [1.0, 0.0, squared, own.clip_coefficient]
        self._statistics.leave_out()
        return [0.0, float(own.skipped_reason != "no_samples"), 0.0, 0.0]

    def on_reduced(self, sums: list[float]) -> None:
        """Takes over the outcome of all ranks, before any of them steps."""
        stepping, not_finite, squares, coefficients = sums
        self.num_stepping, self.num_not_finite = round(stepping), round(not_finite)
        self.grad_norm = math.sqrt(squares / stepping) if stepping else math.inf if not_finite else math.nan
        self.clip_coefficient = coefficients / stepping if stepping else 1.0


@dataclass(kw_only=True)
class LocalUpdate(Update):
    """An update of `reduction="local"`: each rank steps or skips by its own numbers, and what is counted is agreed.

    An update is applied if some rank has stepped, so counters, schedules and `STEP_COMPLETED` are the same on all ranks. The
    loss scale too: it falls on all ranks if the gradients of one of them have overflowed. Without loss scaling and with
    `on_nonfinite="raise"` one rank that is not finite ends the run on all of them, before any steps.
    """

    _own: _OwnDecision = field(init=False)
    _trainer: Trainer = field(init=False)
    _num_updates_apart: int = field(init=False, default=0)  # in which a rank that was not finite skipped alone

    def join(self, trainer: Trainer) -> None:
        """Sends the decision of this rank with the statistics of `trainer`'s updates. To be called once, before the first."""
        self._trainer = weakref.proxy(trainer)
        this = weakref.proxy(self)  # or else the update would keep itself alive
        self._own = _OwnDecision(self.gather.statistics, lambda totals: this._decide_alone(totals))
        trainer.piggybacks.append(self._own)

    def _decide_alone(self, totals: Totals) -> Decision:
        """Decides about the step of this rank, from its sums."""
        norm = self.gather.crossing.norm(self.gather.gradients) if totals.sample_size > 0 else 0.0
        return super().decide(self._trainer, totals._replace(norm=norm))

    def decide(self, trainer: Trainer, totals: Totals) -> Decision:  # noqa: ARG002
        """The decision for the record: the same on all ranks, but for the factor by which handlers read the gradients."""
        mine = self._own
        return Decision(
            loss=totals.loss / totals.sample_size if totals.sample_size else math.nan,
            grad_norm=mine.grad_norm,
            mean_factor=mine.decision.mean_factor,
            clip_coefficient=mine.clip_coefficient,
            skipped_reason=self._agreed_reason(),
        )

    def _agreed_reason(self) -> SkippedReason | None:
        if self._own.num_not_finite:
            if not self.loss_scaling.enabled and self.options.on_nonfinite == "raise":
                return "nonfinite"
            if not self._own.num_stepping:
                return "overflow" if self.loss_scaling.enabled else "nonfinite"
        return None if self._own.num_stepping else "no_samples"

    def make_record(self, totals: Totals, decision: Decision) -> UpdateOutput:
        """The record of an update, with the number of ranks that made no step."""
        skipping = 0 if decision.skipped_reason is not None else collectives.world_size() - self._own.num_stepping
        return replace(super().make_record(totals, decision), num_ranks_skipped=skipping)

    def step(
        self,
        trainer: Trainer,
        micro_batches: Sequence[Any],
        decision: Decision,  # noqa: ARG002  # that of all ranks
        output: UpdateOutput,
    ) -> tuple[End, bool]:
        """Steps along the gradients of this rank, or changes nothing on it. No step is ever queued."""
        own, update, applied = self._own.decision, trainer.state.iteration, output.applied
        if self.loss_scaling.enabled and self._own.num_not_finite > 0:
            scale_fell = self.policy.lower_scale(micro_batches, self.gather.num_placeholders, output)
            self.policy.count(update, output, scale_fell=scale_fell)
        else:
            # A norm of other ranks does not say what is wrong on this one.
            told = output if applied else replace(output, grad_norm=math.nan)
            self.policy(update, micro_batches, self.gather.num_placeholders, told)
        if applied and self._own.num_not_finite:
            self._warn_of_skipping_ranks(update)
        if own.skipped_reason is None:
            self.take_step(own, output)
        self._note_that_replicas_differ(trainer, applied=applied)
        end = End.STEPPED if own.skipped_reason is None else End.SKIPPED
        return End.NO_SAMPLES if own.skipped_reason == "no_samples" else end, applied

    def _note_that_replicas_differ(self, trainer: Trainer, *, applied: bool) -> None:
        if applied:
            trainer.replicas.are_equal = False
        if not trainer.moments.after_update and "replicas differ" not in trainer.progress.warned:
            trainer.progress.warned.add("replicas differ")
            logging.getLogger("ignite_train").warning(
                "with reduction='local' nothing makes the replicas equal again; attach an OuterOptimizer, or use one process"
            )

    def _warn_of_skipping_ranks(self, update: int) -> None:
        """Warns the 1st, 2nd, 4th, 8th, ... time."""
        self._num_updates_apart = number = self._num_updates_apart + 1
        if number & (number - 1) == 0:
            logging.getLogger("ignite_train").warning(
                f"update {update} was skipped on {self._own.num_not_finite} of {collectives.world_size()} ranks, whose "
                f"gradients are not finite, while others stepped; such updates so far: {number}"
            )
