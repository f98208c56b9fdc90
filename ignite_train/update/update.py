"""One optimizer update: forward and backward over the micro-batches of a group, then one step, or a skip."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_train.arguments import describe
from ignite_train.carried import Carried
from ignite_train.data.arriving_group import ArrivingGroup
from ignite_train.device.to_device import ToDevice
from ignite_train.errors import (
    ForwardContractError,
    LossScaleFloorError,
    NonFiniteError,
    SparseGradientError,
    TrainingError,
)
from ignite_train.events import TrainEvents
from ignite_train.forward import BoundForward, ForwardOutput, as_forward_output
from ignite_train.model.buffer_rollback import BufferRollback
from ignite_train.model.first_forward import FirstForward, without_first_look
from ignite_train.model.forward_state import ForwardState
from ignite_train.model.gradients import Gradients
from ignite_train.model.learning_rates import LearningRates
from ignite_train.model.loss_declaration import check_forward
from ignite_train.model.nonfinite import spoilt_buffer
from ignite_train.model.optimizers import Optimizers
from ignite_train.model.precision import Precision
from ignite_train.model.seeding import Seeding
from ignite_train.model.stepping import Stepping, SteppingTogether
from ignite_train.ranks.reduction import Reduction
from ignite_train.ranks.statistics import Statistics, Totals
from ignite_train.state import TrainState, UpdateOutput
from ignite_train.trainer import Trainer
from ignite_train.update.closure_step import ClosureStep
from ignite_train.update.compilation import Backward
from ignite_train.update.decision import Decision, decide, may_trust_norm
from ignite_train.update.failures_in_a_row import FailuresInARow
from ignite_train.update.gradient_changes import GradientChanges
from ignite_train.update.handler_guard import HandlerGuard
from ignite_train.update.loss_scaling import LossScaling
from ignite_train.update.nonfinite_search import NonFiniteSearch
from ignite_train.update.norm_limits import NormLimits
from ignite_train.update.options import UpdateOptions
from ignite_train.update.out_of_memory import Recovery
from ignite_train.update.queued_step import QueuedStep
from ignite_train.update.weak_method import WeakMethod

__all__ = ["Update"]

# Firing an event without handlers takes about as long as finding it in its class.
_MICRO_BATCH_STARTED, _FORWARD_COMPLETED = TrainEvents.MICRO_BATCH_STARTED, TrainEvents.FORWARD_COMPLETED
_BACKWARD_COMPLETED, _GRADIENTS_READY = TrainEvents.BACKWARD_COMPLETED, TrainEvents.GRADIENTS_READY
_NOTHING = nullcontext()


@dataclass(kw_only=True)
class Update:
    """What a trainer does with one group of micro-batches: a step along Σ∇loss / Σsample_size, over all ranks too."""

    model: nn.Module
    optimizer: Optimizer | Optimizers
    state: TrainState
    forward: BoundForward
    backward: Backward
    transfer: ToDevice
    precision: Precision
    loss_scaling: LossScaling
    reduction: Reduction
    statistics: Statistics
    gradients: Gradients
    learning_rates: LearningRates
    stepping: Stepping | SteppingTogether
    queued_step: QueuedStep
    recovery: Recovery
    carried: Carried
    max_grad_norm: float | None
    norm_limits: NormLimits | None
    options: UpdateOptions
    seeding: Seeding | None
    _buffers: BufferRollback = field(init=False)
    _guard: HandlerGuard = field(init=False)
    _gradient_changes: GradientChanges = field(init=False)
    _failures: FailuresInARow = field(init=False)
    _search: NonFiniteSearch = field(init=False)
    _closure_step: ClosureStep | None = None
    _num_placeholders: int = 0
    _has_stepped: bool = False  # the running update has moved the parameters
    _is_told: bool = False  # the loss scaling knows of that step

    def __post_init__(self) -> None:
        # What it gives its parts to call must not keep it, its model and its optimizer alive.
        may_skip = self.loss_scaling.enabled or self.options.on_nonfinite == "skip"
        self._buffers = BufferRollback(self.reduction.module, is_needed=may_skip)
        self._failures = FailuresInARow(self.options.give_up_after)
        self._guard = HandlerGuard(self.gradients, self.optimizer, keeps_graph=self.options.create_graph)
        first = FirstForward(self.forward, self._guard.forward, WeakMethod(self._check_forward), WeakMethod(self._set_forward))
        self.forward = first
        self._gradient_changes = GradientChanges(
            gradients=self.gradients,
            reduction=self.reduction,
            guard=self._guard,
            scales_loss=self.loss_scaling.enabled,
            max_grad_norm=self.max_grad_norm,
        )
        self._search = NonFiniteSearch(
            reduction=self.reduction,
            gradients=self.gradients,
            carried=self.carried,
            forward=first.forward,
            loss_of=WeakMethod(self._loss_without_wrapper),
            raises=self.options.on_nonfinite == "raise",
            loss_scaling=self.loss_scaling,
        )
        if self.options.closure and isinstance(self.optimizer, Optimizer):
            self._closure_step = ClosureStep(
                optimizer=self.optimizer,
                gradients=self.gradients,
                reduction=self.reduction,
                statistics=self.statistics,
                carried=self.carried,
                state=self.state,
                forward=WeakMethod(self._forward),
                backward=WeakMethod(self._run_backward),
                decide=WeakMethod(self._decide),
                normalize=self.options.normalize,
                keeps_graph=self.options.create_graph,
                if_not_finite="overflow" if self.loss_scaling.enabled else "nonfinite",
                replays=self.options.closure == "replay",
                forward_state=ForwardState(self.reduction.module, self.carried, first.forward),
                seeding=self.seeding,
            )

    def __call__(self, trainer: Trainer, micro_batches: Sequence[Any]) -> Any:
        """Runs one update. Collective.

        Args:
            trainer: whose update it is.
            micro_batches: the group; empty on a rank whose data has run out while others have some.

        Returns:
            What the trainer's output transform has made of the update's record.
        """
        micro_batches_before, begin_section = trainer.state.num_micro_batches, trainer._begin_section
        begin_section("forward")
        self._has_stepped = self._is_told = False
        try:
            self._begin(trainer, micro_batches)
            self._accumulate(trainer, micro_batches)
            totals, has_stepped = self._reduce(trainer)
            self._has_stepped = has_stepped
            decision = self._decide(trainer, totals)
            if self.norm_limits is not None:
                decision = self.norm_limits(decision)
            output = self._show_gradients(trainer, totals, decision, has_stepped=has_stepped)
            begin_section("optimizer")
            if self._closure_step is not None and decision.skipped_reason is None:
                decision, output = self._step_with_closure(trainer, micro_batches, decision, output)
                self._has_stepped = has_stepped = output.applied
            self._step_or_skip(trainer.state.iteration, decision, output, micro_batches, has_stepped=has_stepped)
            self._finish(output)
        except BaseException as error:
            if isinstance(error, FloatingPointError) and not isinstance(error, TrainingError):
                self._search.explain(error, micro_batches, self.loss_scaling.scale)
            if not self._settle_step(trainer):
                trainer.state.num_micro_batches = micro_batches_before
            trainer.state.forward_output = trainer.state.micro_batch_in_group = None
            self._discard(error)
            raise
        finally:
            if self.seeding is not None:
                self.seeding.end()
        trainer._finish_update(totals.requests, applied=output.applied)
        return trainer.state.output

    def named_gradients(self) -> dict[str, Tensor]:
        """See `Trainer.gradients`."""
        return self.gradients.named()

    def mean_factor(self) -> float:
        """See `Process`."""
        return self.gradients.mean_factor()

    def state_dict(self) -> dict[str, Any]:
        """What an update remembers of those before it: the loss scaling, and how many in a row failed."""
        return {"loss_scaling": self.loss_scaling.state_dict(), "in_a_row": self._failures.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes it over.

        Raises:
            ValueError: it is not the state of an update, or the loss scaling's is not of this policy.
        """
        if not isinstance(state_dict, Mapping) or "loss_scaling" not in state_dict:
            raise ValueError(f"state_dict['update'] must be a mapping with the key loss_scaling, got {describe(state_dict)}")
        counts = state_dict.get("in_a_row", {})  # a checkpoint of an earlier version has none
        FailuresInARow(None).load_state_dict(counts)  # an error leaves both as they are
        self.loss_scaling.load_state_dict(state_dict["loss_scaling"])
        self._failures.load_state_dict(counts)

    def _begin(self, trainer: Trainer, micro_batches: Sequence[Any]) -> None:
        if self.seeding is not None:
            self.seeding.begin(trainer.state.iteration)
            if isinstance(micro_batches, ArrivingGroup):
                micro_batches.drawing = self.seeding.outside
        if self.options.train_mode and not self.reduction.module.training:
            self.model.train()
        self.gradients.clear_stale()
        self._search.mark(self.loss_scaling.scale)
        self.carried.begin_update()
        self._buffers.mark()
        if self._closure_step is not None:
            self._closure_step.mark()
        self._num_placeholders = self.reduction.num_placeholders(micro_batches, trainer._max_micro_batches)

    def _accumulate(self, trainer: Trainer, micro_batches: Sequence[Any], done: int = 0) -> None:
        """Adds up gradients of micro-batches that are not `done`. They cross the ranks in the last backward, or after it."""
        state, fire, begin_section = trainer.state, self._guard.firing(trainer), trainer._begin_section
        for number, micro_batch in enumerate(islice(micro_batches, done, None), start=done + 1):
            last = number == len(micro_batches) + self._num_placeholders  # whose number is right by now, see ArrivingGroup
            self._begin_micro_batch(trainer, number - 1)
            with self.reduction.context(last=last):
                for part in self.recovery.parts(micro_batch):  # one, unless it had to be cut to fit into memory
                    with self.recovery.attempt(part):
                        state.forward_output = self._forward(part)
                        self.statistics.add(state.forward_output)
                        fire(_FORWARD_COMPLETED)
                        if number < len(micro_batches):
                            self.transfer.ahead(micro_batches[number])  # copied while backward runs
                        begin_section("backward")
                        if last:
                            self.reduction.begin(
                                trainer._outgoing(), self.statistics, self.gradients, state.forward_output.loss
                            )
                        self.backward(
                            self._scaled(state.forward_output.loss),
                            retain_graph=self.options.retain_graph or self.options.create_graph,
                            create_graph=self.options.create_graph,
                        )
                        self.gradients.separate()
                        for callback in trainer._on_backward:
                            callback(state.forward_output)
            fire(_BACKWARD_COMPLETED)
            if self.options.create_graph:
                self.gradients.detach()
            state.forward_output = None  # and its graph
        state.micro_batch_in_group = None
        for number in range(self._num_placeholders, 0, -1):
            self._run_placeholder(trainer, last=number == 1)

    def _begin_micro_batch(self, trainer: Trainer, index: int) -> None:
        """Counts the micro-batch of this index in the group, seeds what it draws, and tells handlers."""
        state = trainer.state
        state.num_micro_batches, state.micro_batch_in_group = state.num_micro_batches + 1, index
        trainer._begin_section("forward")
        if self.seeding is not None:
            self.seeding.micro_batch(index)
        trainer.fire_event(_MICRO_BATCH_STARTED)

    def _reduce(self, trainer: Trainer) -> tuple[Totals, bool]:
        """The update's numbers over all ranks, and whether the device has made the step already.

        A norm that float32 cannot have added up, since the squares are too large or too small for it, is taken again. All ranks
        do so alike where the norm is a reduced one.
        """
        trainer._begin_section("reduction")
        if self.seeding is not None:
            self.seeding.step()
        for callback in trainer._before_norm:
            callback(trainer)
        norm = self.reduction.end(trainer._outgoing(), self.statistics, self.gradients)
        totals, has_stepped = self.queued_step(trainer, norm, self.loss_scaling.scale)
        if not (has_stepped or may_trust_norm(totals)):
            totals = totals._replace(norm=self.reduction.scaled_norm(self.gradients))
        return totals, has_stepped

    def _decide(self, trainer: Trainer, totals: Totals) -> Decision:
        """Decides from reduced numbers only, so that all ranks decide alike; and again if handlers change the gradients."""
        if totals.sample_size > 0:
            self.gradients.check()
        decision = decide(
            totals,
            divisor=self.reduction.divisor,
            loss_scale=self.loss_scaling.scale,
            scales_loss=self.loss_scaling.enabled,
            max_grad_norm=self.max_grad_norm,
            normalize=self.options.normalize,
        )
        return self._gradient_changes(trainer, decision, are_changed=totals.requests.changes_gradients)

    def _show_gradients(self, trainer: Trainer, totals: Totals, decision: Decision, *, has_stepped: bool) -> UpdateOutput:
        """Publishes the record of the update and lets handlers read the gradients.

        They may set the learning rates too, and so may the output transform: those that the step finds are in the record.
        """
        output = self._record(totals, decision)
        trainer._publish(output)
        if totals.num_out_of_memory:
            trainer.fire_event(TrainEvents.OUT_OF_MEMORY)
        has_handlers = trainer._has_handlers(_GRADIENTS_READY)
        with self._guard.readable(decision.mean_factor) if has_handlers else _NOTHING:
            trainer.fire_event(_GRADIENTS_READY)
        if not has_stepped and (rates := self.learning_rates()) != output.learning_rates:
            output = trainer._amend(replace(output, learning_rates=rates))
        return output

    def _record(self, totals: Totals, decision: Decision) -> UpdateOutput:
        return UpdateOutput.from_update(
            loss=decision.loss,
            sample_size=totals.sample_size,
            grad_norm=decision.grad_norm,
            clip_coefficient=decision.clip_coefficient,
            learning_rates=self.learning_rates(),
            loss_scale=self.loss_scaling.scale,
            num_micro_batches=totals.num_micro_batches,
            num_out_of_memory=totals.num_out_of_memory,
            logs=totals.logs,
            log_weights=totals.log_weights,
            grad_norms=decision.grad_norms,
            clip_coefficients=decision.clip_coefficients,
            skipped_reason=decision.skipped_reason,
        )

    def _step_or_skip(
        self, update: int, decision: Decision, output: UpdateOutput, micro_batches: Sequence[Any], *, has_stepped: bool
    ) -> None:
        """Unscales, normalises, clips and steps; or changes nothing. The device may have made the step already."""
        reason = decision.skipped_reason
        assert reason is None or not has_stepped  # noqa: S101  # host and device decide from the same numbers
        if reason == "nonfinite" and self.options.on_nonfinite == "raise":
            raise self._nonfinite_error(update, micro_batches, output)
        scale_fell = reason == "overflow" and self._lower_scale(micro_batches, output)
        self._failures.count(update, output, scale_fell=scale_fell)
        if reason is None and not has_stepped:
            self.learning_rates.check(output.learning_rates)
            self.gradients.refuse_dropped()
            own = decision.clip_coefficients  # of each optimizer, where each has a limit of its own
            self.stepping(decision.mean_factor, *(own.values() if own else (decision.clip_coefficient,)))
            self._has_stepped = True
        if reason not in ("no_samples", "overflow"):
            self._is_told = True
            self.loss_scaling.update(overflow=False)
        if reason is not None or not self.options.keep_gradients:
            self.gradients.clear()

    def _step_with_closure(
        self, trainer: Trainer, micro_batches: Sequence[Any], decision: Decision, output: UpdateOutput
    ) -> tuple[Decision, UpdateOutput]:
        """Lets the optimizer step and evaluate the loss again. An evaluation that is not finite makes it a skip."""
        assert self._closure_step is not None  # noqa: S101  # asked before
        self.learning_rates.check(output.learning_rates)
        self.gradients.refuse_dropped()
        after, number = self._closure_step(trainer, micro_batches, self._num_placeholders, decision, output.sample_size)
        if after.skipped_reason is not None:
            output = replace(output, loss=after.loss, grad_norm=after.grad_norm, skipped_reason=after.skipped_reason)
        return after, trainer._amend(replace(output, num_evaluations=number))

    def _finish(self, output: UpdateOutput) -> None:
        """Keeps buffers and what forward has carried on, unless the update was not finite, and tells how the update ended."""
        if output.applied or output.skipped_reason == "no_samples":
            self.carried.end_update()
        else:
            self.carried.roll_back()
            self._buffers.roll_back()
        self.reduction.finish(applied=output.applied)

    def _settle_step(self, trainer: Trainer) -> bool:
        """Counts the step of an update that is broken off after it, so that none repeats it; says whether there was one."""
        if not (self.queued_step.made_unread() or self._has_stepped):
            return False
        self.carried.end_update()
        if not self._is_told:
            self._is_told = True
            self.loss_scaling.update(overflow=False)
        trainer._settled = True
        trainer.state.num_steps += 1
        return True

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

    # --- forward, and what to do about values that are not finite ----------------------------------------------------------

    def _check_forward(self, micro_batch: Any) -> list[str]:
        forward, module = without_first_look(self.forward), self.reduction.module
        return check_forward(module, forward, micro_batch, carried=self.carried, precision=self.precision)

    def _set_forward(self, forward: BoundForward) -> None:
        self.forward = forward

    def _forward(self, micro_batch: Any) -> ForwardOutput:
        with self.precision.autocast():
            return as_forward_output(self.forward(self.model, self.transfer(micro_batch)))

    def _run_backward(self, output: ForwardOutput) -> None:
        create_graph = self.options.create_graph
        self.backward(
            self._scaled(output.loss), retain_graph=self.options.retain_graph or create_graph, create_graph=create_graph
        )

    def _run_placeholder(self, trainer: Trainer, *, last: bool) -> None:
        """In place of a micro-batch that this rank does not have: joins the collectives of the other ranks, in their order."""
        trainer._begin_section("reduction")
        with self.reduction.context(last=last):
            zero = self.reduction.run_placeholder(lambda micro_batch: self._forward(micro_batch).loss)
            if last:
                self.reduction.begin(trainer._outgoing(), self.statistics, self.gradients, zero)
            torch.autograd.backward(zero)

    def _scaled(self, loss: Tensor) -> Tensor:
        if not loss.requires_grad:
            raise ForwardContractError("the loss that forward returned has no graph; return it without .detach() or no_grad()")
        return loss if self.loss_scaling.scale == 1.0 else loss * self.loss_scaling.scale

    def _lower_scale(self, micro_batches: Sequence[Any], output: UpdateOutput) -> bool:
        """Tells the loss scaling of an overflow, and says whether the scale fell. At its floor all ranks look for the cause."""
        before = self.loss_scaling.scale
        try:
            self.loss_scaling.update(overflow=True)
        except LossScaleFloorError as error:
            if not self._search.has_mark(before):
                raise
            found, absent = self._find_nonfinite(micro_batches, output)
            found += tuple(f"rank {rank} saw no overflow" for rank in absent)
            raise LossScaleFloorError(error.loss_scale, error.floor, found) from None
        return self.loss_scaling.scale < before

    def _nonfinite_error(self, update: int, micro_batches: Sequence[Any], output: UpdateOutput) -> NonFiniteError:
        """The error that ends the run. Forward may have left a NaN where it stays, such as in running statistics."""
        error = NonFiniteError(update, output.loss, output.grad_norm, *self._find_nonfinite(micro_batches, output))
        if (name := spoilt_buffer(self.reduction.module)) is not None:
            error.add_note(
                f"the buffer {name!r} has a NaN by now, which may stay there: continue from a checkpoint, or "
                "pass options=UpdateOptions(on_nonfinite='skip'), which puts buffers back"
            )
        return error

    def _find_nonfinite(self, micro_batches: Sequence[Any], output: UpdateOutput) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self._search(micro_batches, self._num_placeholders, loss_is_finite=math.isfinite(output.loss))

    def _loss_without_wrapper(self, micro_batch: Any, index: int | None = None) -> Tensor:
        """The loss of a micro-batch that is run again, times the loss scale; `index` in the group, None for a placeholder."""
        self.state.micro_batch_in_group = index
        if self.seeding is not None and index is not None:
            self.seeding.micro_batch(index)
        with self.precision.autocast():
            loss = as_forward_output(self.forward(self.reduction.module, self.transfer(micro_batch))).loss
        return loss * self.loss_scaling.scale if self.loss_scaling.enabled else loss
