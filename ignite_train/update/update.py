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

from ignite_train.arguments import describe, settings_of
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
from ignite_train.ranks import collectives
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
from ignite_train.update.journal import (
    Buffers,
    CarriedValues,
    Cleared,
    Counters,
    End,
    Ending,
    Journal,
    Leftovers,
    RandomNumbers,
    Scale,
    Seeds,
)
from ignite_train.update.loss_scaling import BeginsBySize, LossScaling, NoLossScaling
from ignite_train.update.nonfinite_search import NonFiniteSearch
from ignite_train.update.norm_limits import NormLimits
from ignite_train.update.options import UpdateOptions
from ignite_train.update.out_of_memory import RecoverFromOutOfMemory, advise
from ignite_train.update.queued_step import QueuedStep
from ignite_train.update.weak_method import WeakMethod

__all__ = ["Update"]

# Firing an event without handlers takes about as long as finding it in its class.
_MICRO_BATCH_STARTED, _FORWARD_COMPLETED = TrainEvents.MICRO_BATCH_STARTED, TrainEvents.FORWARD_COMPLETED
_BACKWARD_COMPLETED, _GRADIENTS_READY = TrainEvents.BACKWARD_COMPLETED, TrainEvents.GRADIENTS_READY
_NOTHING = nullcontext()
_STEPPED = Ending(End.STEPPED, applied=True)


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
    recovery: RecoverFromOutOfMemory | None
    carried: Carried
    max_grad_norm: float | None
    norm_limits: NormLimits | None
    options: UpdateOptions
    seeding: Seeding | None
    _guard: HandlerGuard = field(init=False)
    journal: Journal = field(init=False)
    buffers: Buffers = field(init=False)
    _counters: Counters = field(init=False)
    leftovers: Leftovers = field(init=False)
    _scale: Scale = field(init=False)
    _gradient_changes: GradientChanges = field(init=False)
    failures: FailuresInARow = field(init=False)
    search: NonFiniteSearch = field(init=False)
    _closure_step: ClosureStep | None = None
    _num_placeholders: int = 0
    _first_scale: BeginsBySize | None = None  # the policy, if its first scale depends on the first update
    _chosen_by: object = None  # the token of the handlers for which the flags below were chosen
    _is_guarded: bool = False  # whether an event has handlers that must not change gradients, so that these are compared
    _is_shown: bool = False  # whether GRADIENTS_READY has handlers
    _group_size: int = 0  # how many micro-batches this rank has in the running update, as far as is known when it begins
    _agrees_on_scale: bool = False  # whether the first loss scale is still to be found in the running update

    def __post_init__(self) -> None:
        # What it gives its parts to call must not keep it, its model and its optimizer alive.
        self.failures = FailuresInARow(self.options.give_up_after)
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
        self.search = NonFiniteSearch(
            reduction=self.reduction,
            gradients=self.gradients,
            carried=self.carried,
            forward=first.forward,
            loss_of=WeakMethod(self._loss_without_wrapper),
            raises=self.options.on_nonfinite == "raise",
            loss_scaling=self.loss_scaling,
        )
        self._first_scale = self.loss_scaling if isinstance(self.loss_scaling, BeginsBySize) else None
        self.journal = self._new_journal()
        if self.options.closure and isinstance(self.optimizer, Optimizer):
            self._closure_step = self._new_closure_step(self.optimizer)

    def _new_journal(self) -> Journal:
        may_skip = self.loss_scaling.enabled or self.options.on_nonfinite == "skip"
        self.buffers = Buffers(self.reduction.module, are_marked=may_skip)
        self._counters, self._scale = Counters(self.state), Scale(self.loss_scaling)
        scale = [] if type(self.loss_scaling) is NoLossScaling else [self._scale]
        self.leftovers = Leftovers(self.state, self.transfer, self.statistics)
        cleared = Cleared(self.gradients, are_kept=self.options.keep_gradients)
        # With a seed the numbers of an update are a function of it, and the generators are given back at each end.
        random = RandomNumbers(self.search, self.loss_scaling) if self.seeding is None else Seeds(self.seeding)
        parts = (self._counters, *scale, CarriedValues(self.carried), self.buffers, cleared, self.leftovers, random)
        return Journal(parts, self.stepping.watch)

    def _new_closure_step(self, optimizer: Optimizer) -> ClosureStep:
        assert isinstance(self.stepping, Stepping)  # noqa: S101  # as of one optimizer
        return ClosureStep(
            optimizer=optimizer,
            stepping=self.stepping,
            gradients=self.gradients,
            reduction=self.reduction,
            statistics=self.statistics,
            carried=self.carried,
            state=self.state,
            forward=WeakMethod(self.run_forward),
            backward=WeakMethod(self._run_backward),
            decide=WeakMethod(self._decide),
            normalize=self.options.normalize,
            keeps_graph=self.options.create_graph,
            if_not_finite="overflow" if self.loss_scaling.enabled else "nonfinite",
            replays=self.options.closure == "replay",
            forward_state=ForwardState(self.reduction.module, self.carried, without_first_look(self.forward)),
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
        begin_section = trainer.begin_section
        begin_section("forward")
        if trainer.handlers_token is not self._chosen_by:
            self.journal.choose()
            self._choose(trainer)
        self._counters.trainer = trainer
        with self.journal as journal:
            try:
                self._begin(trainer, micro_batches)
                self._accumulate(trainer, micro_batches)
                totals = self._reduce(trainer)
                decision = self._decide(trainer, totals)
                if self.norm_limits is not None:
                    decision = self.norm_limits(decision)
                output = self._show_gradients(trainer, totals, decision)
                begin_section("optimizer")
                if self._closure_step is not None and decision.skipped_reason is None:
                    decision, output = self._step_with_closure(trainer, micro_batches, decision, output)
                self._step_or_skip(trainer.state.iteration, decision, output, micro_batches)
                ending = self._finish(output)
            except BaseException as error:
                self._explain(error, micro_batches)
                raise
            journal.close(ending)
        # The update has ended: an error in a handler below cannot undo it, and no retry makes it twice.
        trainer.finish_update(totals.requests, applied=ending.applied)
        return trainer.state.output

    def named_gradients(self) -> dict[str, Tensor]:
        """See `Trainer.gradients`."""
        return self.gradients.named()

    def mean_factor(self) -> float:
        """See `Process`."""
        return self.gradients.mean_factor()

    def mark_everything(self) -> None:
        """See `Process`."""
        self.buffers.are_marked = self.search.marks_always = True
        self._chosen_by = None

    @property
    def is_spoilt(self) -> bool:
        """See `Process`."""
        return self.buffers.are_spoilt

    @property
    def config(self) -> dict[str, Any]:
        """The class and the settings of the loss scaling, where there is one, in plain types; see `Trainer.config`."""
        policy = self.loss_scaling
        return {"loss_scaling": {"class": type(policy).__name__, **settings_of(policy)}} if policy.enabled else {}

    def state_dict(self) -> dict[str, Any]:
        """What an update remembers of those before it: the loss scaling, and how many in a row failed."""
        state = {"loss_scaling": self.loss_scaling.state_dict(), "in_a_row": self.failures.state_dict()}
        return state | ({"scaled_by": type(self.loss_scaling).__name__} if self.loss_scaling.enabled else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes it over. The scale starts fresh where the state has none.

        Raises:
            ValueError: it is not the state of an update, or another class of loss scaling wrote it.
        """
        if not isinstance(state_dict, Mapping) or "loss_scaling" not in state_dict:
            raise ValueError(f"state_dict['update'] must be a mapping with the key loss_scaling, got {describe(state_dict)}")
        counts = state_dict.get("in_a_row", {})  # a checkpoint of an earlier version has none
        FailuresInARow(None).load_state_dict(counts)  # an error leaves both as they are
        mine = type(self.loss_scaling).__name__
        if self.loss_scaling.enabled and state_dict["loss_scaling"] != {}:  # as it is without a loss scaling
            if (wrote := state_dict.get("scaled_by", mine)) != mine:
                raise ValueError(
                    f"{wrote!s:.60} wrote the scale of the loss, and this run has {mine}; pass the loss_scaling that it had, "
                    "or start with a fresh scale by Checkpoint(..., leave_out=('loss_scaling',))"
                )
            self.loss_scaling.load_state_dict(state_dict["loss_scaling"])
        self.buffers.are_spoilt = False
        self.failures.load_state_dict(counts)

    def _choose(self, trainer: Trainer) -> None:
        """Chooses what the handlers that are attached need. Asked again whenever others are."""
        self._is_guarded = trainer.has_handlers(_FORWARD_COMPLETED) or trainer.has_handlers(_BACKWARD_COMPLETED)
        self._is_shown = trainer.has_handlers(_GRADIENTS_READY)
        self._chosen_by = None if self.buffers.is_looking else trainer.handlers_token

    def _begin(self, trainer: Trainer, micro_batches: Sequence[Any]) -> None:
        if self.seeding is not None:
            self.seeding.begin(trainer.state.iteration)
            self.search.mark(self.loss_scaling.scale)
            if isinstance(micro_batches, ArrivingGroup):
                micro_batches.drawing = self.seeding.outside
        if self.options.train_mode and not self.reduction.module.training:
            self.model.train()
        if self._first_scale is not None:
            self._agrees_on_scale, self._group_size = self._first_scale.awaits_size, len(micro_batches)
        if self._closure_step is not None:
            self._closure_step.mark()
        self._num_placeholders = self.reduction.num_placeholders(micro_batches, trainer.data.max_micro_batches)

    def _accumulate(self, trainer: Trainer, micro_batches: Sequence[Any], done: int = 0) -> None:
        """Adds up gradients of micro-batches that are not `done`. They cross the ranks in the last backward, or after it."""
        state, recovery, creates = trainer.state, self.recovery, self.options.create_graph
        retains = self.options.retain_graph or creates
        sends_early = not self.reduction.may_drop_micro_batches
        for number, micro_batch in enumerate(islice(micro_batches, done, None), start=done + 1):
            last = number == len(micro_batches) + self._num_placeholders  # whose number is right by now, see ArrivingGroup
            self._begin_micro_batch(trainer, number - 1)
            # DDP asks in forward already whether this backward will reduce, so the context covers both.
            with self.reduction.context(last=last):
                # One part, unless the micro-batch had to be cut to fit into memory.
                for part in (micro_batch,) if recovery is None else recovery.parts(micro_batch):
                    with _NOTHING if recovery is None else recovery.attempt(part):
                        state.forward_output = self.run_forward(part)
                        self.statistics.add(state.forward_output)
                        if self._is_guarded or trainer.handlers_token is not self._chosen_by:
                            self._fire(trainer, _FORWARD_COMPLETED)
                        if number < len(micro_batches):
                            # Asked for now, so that it is copied while backward runs.
                            self.transfer.ahead(micro_batches[number])
                        trainer.begin_section("backward")
                        if last and sends_early:
                            # All sums are known before backward. Sent now, they arrive while it runs, ahead of its gradients.
                            self.reduction.begin(trainer.outgoing(), self.statistics, self.gradients, state.forward_output.loss)
                        self.backward(self.scaled_loss(state.forward_output.loss), retain_graph=retains, create_graph=creates)
                        # The next backward adds to these gradients in place, which must not reach those of another parameter.
                        self.gradients.separate()
                        for callback in trainer.moments.on_backward:
                            callback(state.forward_output)
            if self._is_guarded or trainer.handlers_token is not self._chosen_by:
                self._fire(trainer, _BACKWARD_COMPLETED)
            if creates:
                self.gradients.detach()
            state.forward_output = None  # and its graph
        state.micro_batch_in_group = None
        for number in range(self._num_placeholders, 0, -1):
            self._run_placeholder(trainer, last=number == 1)

    def _fire(self, trainer: Trainer, event: TrainEvents) -> None:
        """Fires an event of a micro-batch, if there are handlers. They may have come since the update began."""
        if trainer.handlers_token is not self._chosen_by:
            self._choose(trainer)
        if self._is_guarded:
            self._guard.fire(trainer, event)

    def _begin_micro_batch(self, trainer: Trainer, index: int) -> None:
        """Counts the micro-batch of this index in the group, seeds what it draws, and tells handlers."""
        state = trainer.state
        state.num_micro_batches, state.micro_batch_in_group = state.num_micro_batches + 1, index
        trainer.begin_section("forward")
        if self.seeding is not None:
            self.seeding.micro_batch(index)
        trainer.fire_event(_MICRO_BATCH_STARTED)

    def _reduce(self, trainer: Trainer) -> Totals:
        """The update's numbers over all ranks. The device may have made the step already.

        A norm that float32 cannot have added up, since the squares are too large or too small for it, is taken again. All ranks
        do so alike where the norm is a reduced one.
        """
        trainer.begin_section("reduction")
        if self.seeding is not None:
            self.seeding.step()
        if self._agrees_on_scale:
            self._agree_on_scale(0.0)
        for callback in trainer.moments.before_norm:
            callback(trainer)
        norm = self.reduction.end(trainer.outgoing(), self.statistics, self.gradients)
        if self.statistics.on_host:
            totals = self.statistics.finish(norm)
        else:
            totals = self.queued_step(trainer, norm, self.loss_scaling.scale)
        if not self.stepping.watch.entered and not may_trust_norm(totals):
            totals = totals._replace(norm=self.reduction.scaled_norm(self.gradients))
        return totals

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
        # Whether some rank has a handler of GRADIENTS_REDUCED, so that all of them do the same arithmetic.
        return self._gradient_changes(trainer, decision) if totals.requests.changes_gradients else decision

    def _show_gradients(self, trainer: Trainer, totals: Totals, decision: Decision) -> UpdateOutput:
        """Publishes the record of the update and lets handlers read the gradients.

        They may set the learning rates too, and so may the output transform: those that the step finds are in the record.
        """
        output = self.make_record(totals, decision)
        trainer.publish(output)
        if totals.num_out_of_memory:
            trainer.fire_event(TrainEvents.OUT_OF_MEMORY)
        if trainer.handlers_token is not self._chosen_by:
            self._choose(trainer)
        with self._guard.readable(decision.mean_factor) if self._is_shown else _NOTHING:
            trainer.fire_event(_GRADIENTS_READY)
        if not self.stepping.watch.entered and (rates := self.learning_rates()) != output.learning_rates:
            output = trainer.amend(replace(output, learning_rates=rates))
        return output

    def make_record(self, totals: Totals, decision: Decision) -> UpdateOutput:
        """The record of an update whose sums and decision are known."""
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

    def _step_or_skip(self, update: int, decision: Decision, output: UpdateOutput, micro_batches: Sequence[Any]) -> None:
        """Unscales, normalises, clips and steps; or changes nothing. The device, or a closure, may have made the step."""
        reason, moved = decision.skipped_reason, bool(self.stepping.watch.entered)
        assert reason is None or not moved  # noqa: S101  # host and device decide from the same numbers
        if reason == "nonfinite" and self.options.on_nonfinite == "raise":
            raise self.nonfinite_error(update, micro_batches, output)
        scale_fell = reason == "overflow" and self.lower_scale(micro_batches, output)
        self.failures.count(update, output, scale_fell=scale_fell)
        if reason is None and not moved:
            self.learning_rates.check(output.learning_rates)
            self.gradients.refuse_dropped()
            own = decision.clip_coefficients  # of each optimizer, where each has a limit of its own
            self.stepping(decision.mean_factor, *(own.values() if own else (decision.clip_coefficient,)))

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
        return after, trainer.amend(replace(output, num_evaluations=number))

    def _finish(self, output: UpdateOutput) -> Ending:
        """Tells how the update ended."""
        applied = output.applied
        self.reduction.finish(applied=applied)
        if applied:
            return _STEPPED
        return Ending(End.NO_SAMPLES if output.skipped_reason == "no_samples" else End.SKIPPED, applied=False)

    def _explain(self, error: BaseException, micro_batches: Sequence[Any]) -> None:
        """Says what is known about an error, before the update that it has broken off is put back.

        Raises:
            SparseGradientError: there is a sparse gradient, over which torch has failed somewhere in backward or after it.
        """
        if isinstance(error, TrainingError):
            return
        if isinstance(error, torch.OutOfMemoryError) and self.recovery is None and self.state.micro_batch_in_group is not None:
            advise(error)
        if isinstance(error, FloatingPointError):
            self.search.explain(error, micro_batches, self.loss_scaling.scale)
        if isinstance(error, RuntimeError) and (sparse := self.gradients.first_sparse()) is not None:
            raise SparseGradientError(sparse) from None

    # --- forward, and what to do about values that are not finite ----------------------------------------------------------

    def _check_forward(self, micro_batch: Any) -> list[str]:
        forward, module = without_first_look(self.forward), self.reduction.module
        return check_forward(module, forward, micro_batch, carried=self.carried, precision=self.precision)

    def _set_forward(self, forward: BoundForward) -> None:
        self.forward = forward

    def run_forward(self, micro_batch: Any) -> ForwardOutput:
        """Runs the user's function on a micro-batch, which is copied to the device first, and checks the result."""
        with self.precision.autocast():
            output = as_forward_output(self.forward(self.model, self.transfer(micro_batch)))
        if self._agrees_on_scale:
            self._agree_on_scale(output.sample_size)
        return output

    def _agree_on_scale(self, sample_size: float | Tensor) -> None:
        """Finds the first loss scale. Collective: called once in the update, after the first forward of each rank.

        There forwards have been through their own collectives alike, and no backward has needed the scale yet. A rank without
        micro-batches calls it before it joins the backward of the others.
        """
        self._agrees_on_scale = False
        (total,) = collectives.total([float(sample_size) * self._group_size])  # sync, in the first update
        assert self._first_scale is not None  # noqa: S101  # asked before
        self._first_scale.begin(total)

    def _run_backward(self, output: ForwardOutput) -> None:
        options, loss = self.options, self.scaled_loss(output.loss)
        self.backward(loss, retain_graph=options.retain_graph or options.create_graph, create_graph=options.create_graph)

    def _run_placeholder(self, trainer: Trainer, *, last: bool) -> None:
        """In place of a micro-batch that this rank does not have: joins the collectives of the other ranks, in their order."""
        trainer.begin_section("reduction")
        with self.reduction.context(last=last):
            zero = self.reduction.run_placeholder(lambda micro_batch: self.run_forward(micro_batch).loss)
            if self._agrees_on_scale:
                self._agree_on_scale(0.0)
            if last:
                self.reduction.begin(trainer.outgoing(), self.statistics, self.gradients, zero)
            torch.autograd.backward(zero)

    def scaled_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for backward."""
        if not loss.requires_grad:
            raise ForwardContractError("the loss that forward returned has no graph; return it without .detach() or no_grad()")
        return loss if self.loss_scaling.scale == 1.0 else loss * self.loss_scaling.scale

    def lower_scale(self, micro_batches: Sequence[Any], output: UpdateOutput) -> bool:
        """Tells the loss scaling of an overflow, and says whether the scale fell. At its floor all ranks look for the cause."""
        before = self.loss_scaling.scale
        try:
            return self._scale.overflow()
        except LossScaleFloorError as error:
            if not self.search.has_mark(before):
                raise
            found, absent = self._find_nonfinite(micro_batches, output)
            found += tuple(f"rank {rank} saw no overflow" for rank in absent)
            raise LossScaleFloorError(error.loss_scale, error.floor, found) from None

    def nonfinite_error(self, update: int, micro_batches: Sequence[Any], output: UpdateOutput) -> NonFiniteError:
        """The error that ends the run. Forward may have left a NaN where it stays, such as in running statistics."""
        error = NonFiniteError(update, output.loss, output.grad_norm, *self._find_nonfinite(micro_batches, output))
        if (name := spoilt_buffer(self.reduction.module)) is not None:
            error.add_note(
                f"the buffer {name!r} has a NaN by now, which may stay there: continue from a checkpoint, or "
                "pass options=UpdateOptions(on_nonfinite='skip'), which puts buffers back"
            )
        return error

    def _find_nonfinite(self, micro_batches: Sequence[Any], output: UpdateOutput) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self.search(micro_batches, self._num_placeholders, loss_is_finite=math.isfinite(output.loss))

    def _loss_without_wrapper(self, micro_batch: Any, index: int | None = None) -> Tensor:
        """The loss of a micro-batch that is run again, times the loss scale; `index` in the group, None for a placeholder."""
        self.state.micro_batch_in_group = index
        if self.seeding is not None and index is not None:
            self.seeding.micro_batch(index)
        with self.precision.autocast():
            loss = as_forward_output(self.forward(self.reduction.module, self.transfer(micro_batch))).loss
        return loss * self.loss_scaling.scale if self.loss_scaling.enabled else loss
