"""The step of an optimizer that evaluates the loss again: LBFGS, SAM and their like."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_train.model.averaged_tensors import can_move
from ignite_train.model.forward_state import ForwardMark, ForwardState
from ignite_train.model.gradients import Gradients, times
from ignite_train.model.in_full import in_full
from ignite_train.model.micro_batch_rollback import writing_error, written_into
from ignite_train.model.optimizers import each_optimizer
from ignite_train.ranks.messages import Outgoing, RankRequests
from ignite_train.ranks.statistics import Totals
from ignite_train.state import SkippedReason
from ignite_train.trainer import Trainer
from ignite_train.update.decision import Decision
from ignite_train.update.gather import Gather
from ignite_train.update.handler_guard import HandlerGuard
from ignite_train.update.stepper import OneStepper

__all__ = ["ClosureStep"]


@dataclass(kw_only=True)
class ClosureStep:
    """Has the optimizer step with a closure, as torch has it.

    It clears the gradients, evaluates the loss of the group at the present parameters, leaves its gradients and returns it.

    Each evaluation is the update up to its step: forward and backward over the same micro-batches, the same reduction, mean and
    clipping, so that an optimizer does the same on every rank. Events of micro-batches do not fire again and counters do not
    count again; GRADIENTS_REDUCED fires each time, as its handlers make the gradients what they are. What forward carries
    starts from the beginning of the update each time.

    The first call is answered with what the update has computed already, if neither parameters nor gradients were touched.

    Parameters and the state of the optimizer are copied before the step. If an evaluation, or a parameter after the step, is
    not finite, or if the step raises an exception, they are put back.

    Attributes:
        stepper: steps the optimizer.
        gather: evaluates the loss of a group again.
    """

    stepper: OneStepper
    gather: Gather
    _beginning: ForwardMark | None = None

    def __post_init__(self) -> None:
        passes = self.gather.passes
        self._gradients, self._seeding, self._options = self.gather.gradients, passes.seeding, passes.options
        self._forward_state = ForwardState(passes.module, passes.carried, passes.user_forward)
        self._replays = self._options.closure == "replay"
        self._if_not_finite: SkippedReason = "overflow" if passes.loss_scaling.enabled else "nonfinite"

    def mark(self) -> None:
        """Remembers what forward may change before the first evaluation, if it is to be replayed."""
        if self._replays:
            self._beginning = self._forward_state.mark()

    def __call__(
        self,
        trainer: Trainer,
        micro_batches: Sequence[Any],
        decision: Decision,
        sample_size: float,
        decide: Callable[[Trainer, Totals], Decision],
    ) -> tuple[Decision, int]:
        """Steps, or changes nothing. Collective.

        Args:
            trainer: whose update it is.
            micro_batches: the group.
            decision: about the gradients as they are: to step.
            sample_size: Σsample_size.
            decide: makes a decision of the sums over the ranks, and of the changes by handlers.

        Returns:
            The decision; that about the evaluation which was not finite, if there was one. And the number of evaluations.
        """
        before, number = _Before(self.stepper.optimizer), 1
        self._make_mean(decision)
        known: _Evaluated | None = _Evaluated(self._gradients, self.gather.passes.guard)

        def closure() -> Tensor:
            nonlocal number, known
            last = decision
            if known is None or self._options.create_graph or not (before.is_unchanged() and known.is_unchanged()):
                number += 1
                last = self._evaluate(trainer, micro_batches, number - 1, decide)
            known = None
            objective = last.loss * (1.0 if self._options.normalize else sample_size)
            return torch.tensor(objective, dtype=torch.float64, device=self.gather.statistics.device)

        try:
            self.stepper.step_with_closure(closure)
            if not before.is_finite():
                raise _NotFiniteError(decision._replace(grad_norm=math.nan, skipped_reason=self._if_not_finite))
        except BaseException as error:
            try:
                in_full(before.put_back)
            finally:
                self.stepper.watch.begin()
            if not isinstance(error, _NotFiniteError):
                raise
            return error.decision, number
        return decision, number

    def _evaluate(
        self,
        trainer: Trainer,
        micro_batches: Sequence[Any],
        evaluation: int,
        decide: Callable[[Trainer, Totals], Decision],
    ) -> Decision:
        """Leaves the clipped mean gradients at the present parameters, in evaluation 1, 2, ... of the update. Collective.

        Raises:
            _NotFiniteError: they are not finite, on any rank, so on all.
            ValueError: forward has written into a micro-batch.
        """
        # other requests, and checks, travel with the first evaluation
        outgoing = Outgoing(RankRequests(changes_gradients=trainer.requests.changes_gradients), ())
        self._gradients.clear()
        is_written = written_into([*micro_batches])
        # Optimizers switch gradients off around their step.
        with torch.enable_grad(), self.gather.passes.run_again(), self._as_the_first():
            self.gather.again(outgoing, micro_batches, 0 if self._replays else evaluation)
        if is_written():
            raise writing_error("closure=True runs forward on each micro-batch several times")
        if self._seeding is not None:
            self._seeding.step(evaluation)
        with torch.no_grad():  # gradients may have graphs
            totals = self.gather.cross_again(trainer, outgoing)
        decision = decide(trainer, totals)
        if decision.skipped_reason is not None:
            raise _NotFiniteError(decision)
        self._make_mean(decision)
        return decision

    @contextmanager
    def _as_the_first(self) -> Iterator[None]:
        """Within it forward starts from what the first evaluation started from, as far as the user asks for that."""
        if self._beginning is None:
            self.gather.passes.carried.rewind()
            yield
            return
        now = self._forward_state.mark()
        # LBFGS moves parameters without a gradient too, along its history.
        self._forward_state.put_back(self._beginning, stepped=self._gradients.parameters())
        try:
            yield
        finally:
            self._forward_state.put_back(now)

    def _make_mean(self, decision: Decision) -> None:
        """Multiplies the gradients to be the clipped mean; out of place, where they have graphs."""
        factor = decision.mean_factor * decision.clip_coefficient
        if not self._options.create_graph:
            self._gradients.multiply(factor)
            return
        with torch.enable_grad():
            for parameter in self._gradients.parameters():
                if parameter.grad is not None:
                    parameter.grad = times(parameter.grad, factor)


class _NotFiniteError(Exception):
    """Ends a step whose loss, gradients or parameters are not finite; it does not leave this file."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision


class _Evaluated:
    """The gradients of an evaluation, to see whether they are still those."""

    def __init__(self, gradients: Gradients, guard: HandlerGuard) -> None:
        self._gradients, self._guard = gradients, guard
        self._seen, self._norm = guard.look(), float(gradients.norm())  # sync

    def is_unchanged(self) -> bool:
        """Whether they are. The norm is looked at because a change of `.grad.data` is not counted as a version."""
        return self._guard.changed(self._seen, may_drop=False) is None and float(self._gradients.norm()) == self._norm  # sync


class _Before:
    """Copies of what the step of an optimizer changes: parameters, the state of it and of optimizers inside it, options."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._copies = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._optimizers = [(one, _state_of(one), _options_of(one)) for one in each_optimizer(optimizer)]

    def is_unchanged(self) -> bool:
        """Whether the parameters are where they were."""
        return all(torch.equal(parameter, value) for parameter, value in self._copies)  # sync

    def is_finite(self) -> bool:
        """Whether the parameters are finite now; one that was not finite before is left out."""
        copies = [(parameter, value) for parameter, value in self._copies if can_move(parameter)]
        found = [parameter for parameter, _ in copies if not bool(torch.isfinite(parameter).all())]  # sync
        known = {id(parameter) for parameter, value in copies if not bool(torch.isfinite(value).all())} if found else ()
        return all(id(parameter) in known for parameter in found)

    def put_back(self) -> None:
        """Undoes the step."""
        with torch.no_grad():
            for parameter, value in self._copies:
                parameter.copy_(value)
        for optimizer, state, options in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, options, strict=True):
                group.update(before)


def _state_of(optimizer: Optimizer) -> dict[Any, Any]:
    """A copy of the state, by parameter."""
    return {key: copy.deepcopy(entries) for key, entries in optimizer.state.items()}


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return copy.deepcopy(kept)
