"""One optimizer update: gather, cross, decide, show, step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ignite_train.arguments import COUNTS, check_fields, describe
from ignite_train.events import TrainEvents
from ignite_train.forward import Forward
from ignite_train.model.gradients import no_gradient_error
from ignite_train.model.seeding import Seeding
from ignite_train.ranks.statistics import Totals
from ignite_train.state import TrainState, UpdateOutput
from ignite_train.trainer import Trainer
from ignite_train.update.closure_step import ClosureStep
from ignite_train.update.decision import Decision, Rules, decide
from ignite_train.update.gather import Gather
from ignite_train.update.gradient_changes import decide_on_gradient_changes
from ignite_train.update.journal import End, Journal
from ignite_train.update.loss_scaling import LossScaling
from ignite_train.update.nonfinite_search import NonFiniteSearch
from ignite_train.update.norm_limits import NormLimits
from ignite_train.update.options import UpdateOptions
from ignite_train.update.parts import Parts
from ignite_train.update.skip_policy import SkipPolicy
from ignite_train.update.stepper import OneStepper, Stepper

__all__ = ["Update"]

_GRADIENTS_READY = TrainEvents.GRADIENTS_READY  # looked up once: asked for in each update


@dataclass(kw_only=True)
class Update:
    """The work of a trainer on one group of micro-batches: a step along Σ∇loss / Σsample_size, over all ranks too.

    Attributes:
        gather: adds up gradients and sums on this rank, and then over the ranks.
        rules: what the decision follows.
        norm_limits: limits of single optimizers.
        stepper: moves the parameters.
        state: of the trainer.
        options: the rare settings.
        loss_scaling: the policy of the loss scale.
        journal: what is kept or put back at each end of an update.
        parts: those of the journal.
        policy: what follows where no step is made.
    """

    gather: Gather
    rules: Rules
    norm_limits: NormLimits | None
    stepper: Stepper
    state: TrainState = field(init=False)
    options: UpdateOptions = field(init=False)
    loss_scaling: LossScaling = field(init=False)
    journal: Journal = field(init=False)
    policy: SkipPolicy = field(init=False)
    parts: Parts = field(init=False)
    _seeding: Seeding | None = field(init=False)
    _closure_step: ClosureStep | None = field(init=False, default=None)
    _is_shown: bool = field(init=False, default=False)  # whether GRADIENTS_READY has handlers
    _sets_rates: bool = field(init=False, default=False)  # whether the user's code runs between the record and the step

    def __call__(self, trainer: Trainer, micro_batches: Sequence[Any]) -> Any:
        """Runs one update. Collective.

        Args:
            trainer: whose update it is.
            micro_batches: the group; empty on a rank whose data has run out while others have some.

        Returns:
            What the trainer's output transform has made of the update's record.
        """
        trainer.begin_section("forward")
        with self.journal as journal:
            try:
                # From here on the journal gives the generators back, however the update ends.
                if self._seeding is not None:
                    self._seeding.begin(self.state.iteration)
                    self.parts.search.mark()
                # Further evaluations of the loss begin where the first one began.
                if self._closure_step is not None:
                    self._closure_step.mark()
                self.gather(trainer, micro_batches)
                totals = self.gather.cross(trainer)
                decision = self.decide(trainer, totals)
                output = self._show(trainer, totals, decision)
                trainer.begin_section("optimizer")
                end, applied = self.step(trainer, micro_batches, decision, output)
            except BaseException as error:
                # Before the journal drops what explains the error, such as which micro-batch was running.
                is_forward = self.state.micro_batch_in_group is not None
                may_advise = is_forward and self.gather.recovery is None
                self.policy.explain(error, micro_batches, may_advise=may_advise)
                raise
            journal.close(end, applied=applied)
        # The update has ended: an error in a handler below cannot undo it, and no retry makes it twice.
        trainer.finish_update(totals.requests, applied=applied)
        return self.state.output

    def decide(self, trainer: Trainer, totals: Totals) -> Decision:
        """Decides from reduced numbers only, so that all ranks decide alike; and again if handlers change the gradients."""
        # Backward has divided each term by what `sample_sizes` counted, so forward must have returned as many.
        if totals.log_weights and self.gather.passes.terms is not None:
            self.gather.passes.terms.check(totals)
        if not self.gather.gradients.kinds and totals.sample_size > 0:
            raise no_gradient_error()
        decision = decide(totals, self.rules, self.loss_scaling.scale)
        # Whether some rank has a handler of GRADIENTS_REDUCED, so that all of them do the same arithmetic.
        if totals.requests.changes_gradients:
            # They read loss and sample sizes of this update; what they leave of the gradients makes another record.
            trainer.state.update_output = Update.make_record(self, totals, decision)
            decision = decide_on_gradient_changes(trainer, self.gather, self.rules, decision)
        return decision if self.norm_limits is None else self.norm_limits(decision)

    def _show(self, trainer: Trainer, totals: Totals, decision: Decision) -> UpdateOutput:
        """Publishes the record of the update and lets handlers read the gradients.

        They may set the learning rates too, and so may the output transform: those that the step finds are in the record.
        """
        output = self.make_record(totals, decision)
        trainer.publish(output)
        if totals.num_out_of_memory:
            trainer.fire_event(TrainEvents.OUT_OF_MEMORY)
        if self._is_shown:
            with self.gather.passes.guard.readable(decision.mean_factor):
                trainer.fire_event(_GRADIENTS_READY)
        # Where the device has made the step by now, it was with the rates that are in the record.
        if self._sets_rates and not self.stepper.watch.entered:
            rates = self.gather.learning_rates()
            if rates != output.learning_rates:
                output = trainer.amend(replace(output, learning_rates=rates))
        return output

    def make_record(self, totals: Totals, decision: Decision) -> UpdateOutput:
        """The record of an update whose sums and decision are known."""
        return UpdateOutput.from_update(
            loss=decision.loss,
            sample_size=totals.sample_size,
            grad_norm=decision.grad_norm,
            clip_coefficient=decision.clip_coefficient,
            learning_rates=self.gather.learning_rates(),
            loss_scale=self.loss_scaling.scale,
            num_micro_batches=totals.num_micro_batches,
            num_out_of_memory=totals.num_out_of_memory,
            logs=totals.logs,
            log_weights=totals.log_weights,
            grad_norms=decision.grad_norms,
            clip_coefficients=decision.clip_coefficients,
            skipped_reason=decision.skipped_reason,
            name=self.gather.passes.name,
        )

    def step(
        self, trainer: Trainer, micro_batches: Sequence[Any], decision: Decision, output: UpdateOutput
    ) -> tuple[End, bool]:
        """Unscales, normalises, clips and steps; or changes nothing.

        Returns:
            How the update ends on this rank, and whether it was applied.
        """
        if self._closure_step is not None and decision.skipped_reason is None:
            output = self._step_with_closure(self._closure_step, trainer, micro_batches, decision, output)
        applied = output.skipped_reason is None
        if not applied or output.num_out_of_memory or self.policy.in_a_row:
            self.policy(trainer.state.iteration, micro_batches, self.gather.num_placeholders, output)
        # A closure has made its step by now, and so may a device.
        if applied and not self.stepper.watch.entered:
            self.take_step(decision, output)
        if self.gather.crossing.learns_outcome:
            self.gather.crossing.close(applied=applied)
        if applied:
            return End.STEPPED, True
        return End.NO_SAMPLES if output.skipped_reason == "no_samples" else End.SKIPPED, False

    def take_step(self, decision: Decision, output: UpdateOutput) -> None:
        """Moves the parameters along the gradients of this rank."""
        self._check_step(output)
        own = decision.clip_coefficients  # of each optimizer, where each has a limit of its own
        self.stepper(decision.mean_factor, *(own.values() if own else (decision.clip_coefficient,)))

    def _check_step(self, output: UpdateOutput) -> None:
        """Looks at what handlers may have left that no step can be made with."""
        if not all(map(math.isfinite, output.learning_rates)):
            raise self.gather.learning_rates.error(output.learning_rates)
        if self._is_shown:
            self.gather.gradients.refuse_dropped()

    def _step_with_closure(
        self,
        closure_step: ClosureStep,
        trainer: Trainer,
        micro_batches: Sequence[Any],
        decision: Decision,
        output: UpdateOutput,
    ) -> UpdateOutput:
        """Lets the optimizer step and evaluate the loss again. An evaluation that is not finite makes it a skip."""
        self._check_step(output)
        after, number = closure_step(trainer, micro_batches, decision, output.sample_size, self.decide)
        if after.skipped_reason is not None:
            output = replace(output, loss=after.loss, grad_norm=after.grad_norm, skipped_reason=after.skipped_reason)
        return trainer.amend(replace(output, num_evaluations=number))

    def choose(self, trainer: Trainer) -> None:
        """See `Process`."""
        self.parts.counters.progress = self.gather.passes.progress = trainer.progress
        self.gather.choose(trainer)
        self._is_shown = trainer.has_handlers(_GRADIENTS_READY)
        shows = self._is_shown or trainer.has_handlers(TrainEvents.OUT_OF_MEMORY)
        self._sets_rates = shows or trainer.moments.output_transform is not None

    # --- the parts --------------------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        # What it gives its parts to call must not keep it, its model and its optimizer alive.
        gather, passes = self.gather, self.gather.passes
        self.state, self.options = passes.state, passes.options
        self.loss_scaling, self._seeding = passes.loss_scaling, passes.seeding
        search = NonFiniteSearch(passes, gather.crossing, gather.gradients)
        self.journal = Journal(self.stepper.watch)
        self.parts = Parts(passes, gather.gradients, gather.statistics, search, self.journal.ending)
        self.journal.choose(self.parts.choose())
        self.policy = SkipPolicy(module=passes.module, scale=self.parts.scale, search=search, options=self.options)
        if self.options.closure and isinstance(self.stepper, OneStepper):
            self._closure_step = ClosureStep(stepper=self.stepper, gather=gather)

    # --- what its trainer asks; see `Process` -----------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model, with its wrapper."""
        return self.gather.passes.model

    def instead(self, forward: Forward | None, name: str | None) -> AbstractContextManager[None]:
        """See `Process`."""
        return self.gather.passes.instead(forward, name)

    def named_gradients(self) -> dict[str, Tensor]:
        """See `Trainer.gradients`."""
        return self.gather.gradients.named()

    def mean_factor(self) -> float:
        """See `Process`."""
        return self.gather.gradients.mean_factor()

    def mark_everything(self) -> None:
        """See `Process`."""
        self.journal.choose(self.parts.mark_everything())

    @property
    def is_spoilt(self) -> bool:
        """See `Process`."""
        return self.parts.buffers.are_spoilt

    def state_dict(self) -> dict[str, Any]:
        """The state that lasts from update to update: the loss scaling and its class, and how many in a row failed."""
        scaling, counts = self.loss_scaling, dict(self.policy.in_a_row)
        if not scaling.enabled:
            return {"loss_scaling": {}, "in_a_row": counts}
        return {"loss_scaling": scaling.state_dict(), "scaled_by": type(scaling).__name__, "in_a_row": counts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes it over. The scale starts fresh where the state has none.

        Raises:
            ValueError: it is not the state of an update, or another class of loss scaling wrote it.
        """
        if not isinstance(state_dict, Mapping) or not {"loss_scaling", "in_a_row"} <= state_dict.keys():
            raise ValueError(f"state_dict['update'] must have the keys loss_scaling and in_a_row, got {describe(state_dict)}")
        check_fields("Trainer", state_dict, {"in_a_row": COUNTS})
        counts = state_dict["in_a_row"]
        scaling, mine = self.loss_scaling, type(self.loss_scaling).__name__
        # There is nothing where the run that wrote it had no loss scaling.
        if scaling.enabled and (saved := state_dict["loss_scaling"]) != {}:
            if (wrote := state_dict.get("scaled_by", mine)) != mine:
                raise ValueError(
                    f"{wrote!s:.60} wrote the scale of the loss, and this run has {mine}; pass the loss_scaling that it had, "
                    "or start with a fresh scale by Checkpoint(..., leave_out=('loss_scaling',))"
                )
            scaling.load_state_dict(saved)
        self.parts.buffers.are_spoilt = False
        self.policy.in_a_row = dict(counts)
