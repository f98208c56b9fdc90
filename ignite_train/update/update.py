"""One optimizer update: forward and backward over the micro-batches of a group, then one step, or a skip."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ignite_train.arguments import check_state_dict, describe
from ignite_train.carried import Carried
from ignite_train.device.to_device import ToDevice
from ignite_train.errors import (
    ForwardContractError,
    GaveUpError,
    LossScaleFloorError,
    NonFiniteError,
    SparseGradientError,
    TrainingError,
)
from ignite_train.events import TrainEvents
from ignite_train.forward import Forward, ForwardOutput, as_forward_output
from ignite_train.model.gradients import SMALLEST_NORM, Gradients, clip_coefficient
from ignite_train.model.learning_rates import LearningRates
from ignite_train.model.nonfinite import find_nonfinite
from ignite_train.model.precision import Precision
from ignite_train.model.replay import ReplayPoint, SideEffects
from ignite_train.model.stepping import Stepping
from ignite_train.ranks import collectives
from ignite_train.ranks.rank_vote import RankVote
from ignite_train.ranks.reduction import Reduction
from ignite_train.ranks.statistics import Statistics, Totals
from ignite_train.state import SkippedReason, UpdateOutput
from ignite_train.trainer import Trainer
from ignite_train.update.compilation import Backward
from ignite_train.update.loss_scaling import LossScaling, scale_near_floor
from ignite_train.update.options import UpdateOptions
from ignite_train.update.out_of_memory import Recovery
from ignite_train.update.queued_step import QueuedStep

__all__ = ["Update"]


@dataclass(kw_only=True)
class Update:
    """What a trainer does with one group of micro-batches: a step along Σ∇loss / Σsample_size, over all ranks too."""

    model: nn.Module
    forward: Forward
    backward: Backward
    transfer: ToDevice
    precision: Precision
    loss_scaling: LossScaling
    reduction: Reduction
    statistics: Statistics
    gradients: Gradients
    learning_rates: LearningRates
    stepping: Stepping
    queued_step: QueuedStep
    recovery: Recovery
    carried: Carried
    max_grad_norm: float | None
    options: UpdateOptions
    _in_a_row: dict[str, int] = field(default_factory=dict)
    _replay_point: ReplayPoint = field(init=False)
    _vote: RankVote = field(init=False)
    _replay_up_to: float = field(init=False)  # the loss scale up to which an update may have to be run again
    _num_placeholders: int = 0

    def __post_init__(self) -> None:
        self._replay_point = ReplayPoint(next(self.model.parameters()).device)
        self._vote = RankVote()
        if self.loss_scaling.enabled:
            self._replay_up_to = scale_near_floor(self.loss_scaling)
        else:
            self._replay_up_to = math.inf if self.options.on_nonfinite == "raise" else 0.0

    def __call__(self, trainer: Trainer, micro_batches: list[Any]) -> UpdateOutput:
        """Runs one update. `micro_batches` is empty on a rank whose data has run out while others have some. Collective."""
        state, micro_batches_before = trainer.state, trainer.state.num_micro_batches
        try:
            self._begin(trainer, micro_batches)
            self._accumulate(trainer, micro_batches)
            norm = self.reduction.end(trainer._outgoing(), self.statistics, self.gradients)
            totals, stepped = self._totals(trainer, norm)
            state.update_output = state.output = decided = self._decide(totals)
            self._announce(trainer, decided)
            if (rates := self.learning_rates()) != decided.learning_rates:  # a handler has set them
                state.update_output = state.output = decided = replace(decided, learning_rates=rates)
            self._step(state.iteration, decided, micro_batches, stepped=stepped)
            self._finish(decided)
        except BaseException as error:
            state.num_micro_batches, state.forward_output = micro_batches_before, None
            self._discard(error)
            raise
        trainer._finish_update(totals.signals, applied=decided.applied)
        return decided

    def _accumulate(self, trainer: Trainer, micro_batches: list[Any]) -> None:
        """Adds up the gradients of all micro-batches. They cross the ranks in the last backward, or after it."""
        state, fire = trainer.state, trainer.fire_event
        num_backwards = len(micro_batches) + self._num_placeholders
        for number, micro_batch in enumerate(micro_batches, start=1):
            last = number == num_backwards
            state.num_micro_batches += 1
            fire(TrainEvents.MICRO_BATCH_STARTED)
            with self.reduction.context(last=last):
                for part in self.recovery.parts(micro_batch):  # one, unless it had to be cut to fit into memory
                    with self.recovery.attempt(part):
                        state.forward_output = self._forward(part)
                        self.statistics.add(state.forward_output)
                        fire(TrainEvents.FORWARD_COMPLETED)
                        if number < len(micro_batches):
                            self.transfer.ahead(micro_batches[number])  # copied while backward runs
                        if last:
                            self.reduction.begin(trainer._outgoing(), self.statistics)
                        self.backward(
                            self._scaled(state.forward_output.loss),
                            retain_graph=self.options.retain_graph or self.options.create_graph,
                            create_graph=self.options.create_graph,
                        )
            fire(TrainEvents.BACKWARD_COMPLETED)
            if self.options.create_graph:
                self.gradients.detach()
            state.forward_output = None  # and its graph
        for number in range(len(micro_batches) + 1, num_backwards + 1):
            self._run_placeholder(trainer, last=number == num_backwards)

    def named_gradients(self) -> dict[str, Tensor]:
        """See `Trainer.gradients`."""
        return self.gradients.named()

    def state_dict(self) -> dict[str, Any]:
        """What an update remembers of those before it: the loss scaling, and how many in a row failed."""
        return {"loss_scaling": self.loss_scaling.state_dict(), "in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes it over.

        Raises:
            ValueError: it is no state of an update, or the loss scaling's is not of this policy.
        """
        if not isinstance(state_dict, Mapping) or "loss_scaling" not in state_dict:
            raise ValueError(f"state_dict['update'] must be a mapping with the key loss_scaling, got {describe(state_dict)}")
        in_a_row = state_dict.get("in_a_row", {})  # a checkpoint of an earlier version has none
        check_state_dict("Trainer", in_a_row, (), in_a_row)
        self.loss_scaling.load_state_dict(state_dict["loss_scaling"])
        self._in_a_row = dict(in_a_row)

    def _begin(self, trainer: Trainer, micro_batches: list[Any]) -> None:
        if not self.model.training:
            self.model.train()
        self.gradients.clear_stale()
        if self.loss_scaling.scale <= self._replay_up_to:
            self._replay_point.mark()
        self.carried.begin_update()
        self._num_placeholders = self.reduction.num_placeholders(micro_batches, trainer.max_micro_batches)

    def _forward(self, micro_batch: Any) -> ForwardOutput:
        with self.precision.autocast():
            return as_forward_output(self.forward(self.model, self.transfer(micro_batch)))

    def _run_placeholder(self, trainer: Trainer, *, last: bool) -> None:
        """In place of a micro-batch that this rank does not have: joins the collectives of the other ranks, in their order."""
        with self.reduction.context(last=last):
            zero = self.reduction.run_placeholder(lambda micro_batch: self._forward(micro_batch).loss)
            if last:
                self.reduction.begin(trainer._outgoing(), self.statistics)
            torch.autograd.backward(zero)

    def _scaled(self, loss: Tensor) -> Tensor:
        if not loss.requires_grad:
            raise ForwardContractError("the loss that forward returned has no graph; return it without .detach() or no_grad()")
        return loss if self.loss_scaling.scale == 1.0 else loss * self.loss_scaling.scale

    def _totals(self, trainer: Trainer, norm: float | Tensor | None) -> tuple[Totals, bool]:
        """The update's numbers, and whether the device has made the step already.

        A norm that float32 cannot have added up, since the squares are too large or too small for it, is taken again. All ranks
        do so alike where the norm is a reduced one.
        """
        totals, stepped = self.queued_step(trainer, norm, self.loss_scaling.scale)
        if not (SMALLEST_NORM <= totals.norm < math.inf or stepped or totals.sample_size == 0):
            totals = totals._replace(norm=self.reduction.scaled_norm(self.gradients))
        return totals, stepped

    def _mean(self, size: float) -> float:
        """The factor that makes the reduced gradients those of the mean loss; NaN if no rank had a sample."""
        return self.reduction.divisor / (self.loss_scaling.scale * size) if size > 0 else math.nan

    def _decide(self, totals: Totals) -> UpdateOutput:
        """Judges the update by reduced numbers only, so that every rank comes to the same verdict."""
        scale, size = self.loss_scaling.scale, totals.sample_size
        loss, norm = math.nan, math.nan
        if size > 0:
            self.gradients.check()
            loss, norm = totals.loss / size, totals.norm * self._mean(size)
        reason = self._reason_to_skip(size, loss, norm)
        return UpdateOutput(
            loss=loss,
            sample_size=size,
            grad_norm=norm,
            clip_coefficient=clip_coefficient(norm, self.max_grad_norm) if reason is None else 1.0,
            learning_rates=self.learning_rates(),
            loss_scale=scale,
            num_micro_batches=totals.num_micro_batches,
            num_out_of_memory=totals.num_out_of_memory,
            logs=totals.logs,
            skipped_reason=reason,
        )

    def _announce(self, trainer: Trainer, output: UpdateOutput) -> None:
        """Fires what comes before the step. The gradients can be read in handlers of GRADIENTS_READY only."""
        if output.num_out_of_memory:
            trainer.fire_event(TrainEvents.OUT_OF_MEMORY)
        self.gradients.ready(self._mean(output.sample_size))
        trainer.fire_event(TrainEvents.GRADIENTS_READY)

    def _reason_to_skip(self, size: float, loss: float, norm: float) -> SkippedReason | None:
        if size == 0:
            return "no_samples"
        if math.isfinite(loss) and math.isfinite(norm):
            return None
        return "overflow" if self.loss_scaling.enabled else "nonfinite"

    def _step(self, update: int, output: UpdateOutput, micro_batches: list[Any], *, stepped: bool) -> None:
        """Unscales, normalises, clips and steps; or leaves everything as it is. The device may have `stepped` already."""
        reason = output.skipped_reason
        assert reason is None or not stepped  # noqa: S101  # both verdicts are of the same numbers
        if reason == "nonfinite" and self.options.on_nonfinite == "raise":
            raise NonFiniteError(update, output.loss, output.grad_norm, *self._find_nonfinite(micro_batches, output))
        fell = reason == "overflow" and self._lower_scale(micro_batches, output)
        self._count_in_a_row(update, output, fell=fell)
        if reason is None and not stepped:
            self.learning_rates.check(output.learning_rates)
            self.gradients.refuse_dropped()
            self.stepping(output.clip_coefficient)
        if reason not in ("no_samples", "overflow"):
            self.loss_scaling.update(overflow=False)
        self.gradients.clear()

    def _lower_scale(self, micro_batches: list[Any], output: UpdateOutput) -> bool:
        """Tells the loss scaling of an overflow, and says whether the scale fell. At its floor all ranks look for the cause."""
        before = self.loss_scaling.scale
        try:
            self.loss_scaling.update(overflow=True)
        except LossScaleFloorError as error:
            if before > self._replay_up_to:
                raise
            found, absent = self._find_nonfinite(micro_batches, output)
            found += tuple(f"rank {rank} saw no overflow" for rank in absent)
            raise LossScaleFloorError(error.loss_scale, error.floor, found) from None
        return self.loss_scaling.scale < before

    def _find_nonfinite(self, micro_batches: list[Any], output: UpdateOutput) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Runs the micro-batches again, from the state before the update, to find the first value that is not finite.

        The loss is reduced, and so is the norm of a sharded model: then all ranks search. Replicas take the norm of their own
        copy of the gradients, and if a copy was spoiled after the reduction its rank is alone here. So the ranks vote, and
        search only if all of them do: forward may have collectives, and what was spoiled later would not be found.

        Returns:
            What the ranks have found; and the ranks that did not judge the update so.
        """
        module = self.reduction.module
        if math.isfinite(output.loss):
            self._vote.cast()
            if absent := self._vote.absent():
                return (), absent
        side_effects = SideEffects(module, self.carried)
        self._replay_point.restore()
        self.carried.rewind()
        self.gradients.clear()

        def loss_of(micro_batch: Any) -> Tensor:
            with self.precision.autocast():
                loss = as_forward_output(self.forward(module, self.transfer(micro_batch))).loss
            return loss * self.loss_scaling.scale if self.loss_scaling.enabled else loss

        # On several ranks each goes through its whole group: forward may have collectives that this library cannot see.
        found = find_nonfinite(module, micro_batches, loss_of, all_of_them=collectives.world_size() > 1)
        for _ in range(0 if self.reduction.forward_is_local else self._num_placeholders):
            torch.autograd.backward(self.reduction.run_placeholder(loss_of))
        side_effects.undo()
        reports = collectives.gather_objects(found)
        return tuple(f"rank {rank}, {report}" for rank, report in enumerate(reports) if report is not None), ()

    def _count_in_a_row(self, update: int, output: UpdateOutput, *, fell: bool) -> None:
        """Counts what does not get better by itself; an overflow that lowered the scale is on its way there."""
        if output.applied and output.num_out_of_memory == 0:
            self._in_a_row.clear()
            return
        for what, happened in (
            ("was skipped", output.skipped_reason in ("nonfinite", "overflow") and not fell),
            ("ran out of memory", output.num_out_of_memory > 0),
        ):
            if not happened:
                self._in_a_row.pop(what, None)
                continue
            in_a_row = self._in_a_row.get(what, 0) + 1
            if self.options.give_up_after is not None and in_a_row >= self.options.give_up_after:
                raise GaveUpError(update, in_a_row, what)
            self._in_a_row[what] = in_a_row

    def _finish(self, output: UpdateOutput) -> None:
        """Keeps what forward has carried on, unless the update was not finite, and tells how the update ended."""
        if output.applied or output.skipped_reason == "no_samples":
            self.carried.end_update()
        else:
            self.carried.roll_back()
        self.reduction.finish(applied=output.applied)

    def _discard(self, error: BaseException) -> None:
        """Leaves nothing of an update behind that `error` has broken off.

        Raises:
            SparseGradientError: there is a sparse gradient, over which torch has failed somewhere in backward or after it.
        """
        self.carried.roll_back()
        is_torchs = isinstance(error, RuntimeError) and not isinstance(error, TrainingError)
        sparse = self.gradients.first_sparse() if is_torchs else None
        self.gradients.clear()
        self.statistics.reset()
        self.transfer.forget()
        if sparse is not None:
            raise SparseGradientError(sparse) from None
