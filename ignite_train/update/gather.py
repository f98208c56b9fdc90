"""Gather and cross: gradients and sums of a group add up on this rank, micro-batch by micro-batch, and then over the ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ignite_train.data.arriving_group import ArrivingGroup
from ignite_train.events import TrainEvents
from ignite_train.model.gradients import SMALLEST_NORM, Gradients, may_trust_norm
from ignite_train.model.learning_rates import LearningRates
from ignite_train.model.seeding import Seeding
from ignite_train.ranks.crossing import Crossing
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.statistics import Statistics, Totals
from ignite_train.state import TrainState
from ignite_train.trainer import Trainer
from ignite_train.update.forward_backward import ForwardBackward
from ignite_train.update.handler_guard import HandlerGuard
from ignite_train.update.out_of_memory import RecoverFromOutOfMemory

__all__ = ["Gather"]

# Firing an event without handlers takes about as long as finding it in its class.
_MICRO_BATCH_STARTED, _FORWARD_COMPLETED = TrainEvents.MICRO_BATCH_STARTED, TrainEvents.FORWARD_COMPLETED
_BACKWARD_COMPLETED = TrainEvents.BACKWARD_COMPLETED


@dataclass(kw_only=True)
class Gather:
    """Adds up the gradients and the sums of a group, and reduces them over the ranks.

    What overlaps the last backward begins to cross the ranks before it.

    Attributes:
        passes: forward and backward of a micro-batch.
        crossing: how gradients cross ranks.
        statistics: adds up what forward returns.
        gradients: of the trainer's optimizers.
        learning_rates: those that lie on the device are read in the same transfer as the sums.
        recovery: takes back what has run out of memory.
        num_placeholders: how often this rank takes part in the running update without a micro-batch.
    """

    passes: ForwardBackward
    crossing: Crossing
    statistics: Statistics
    gradients: Gradients
    learning_rates: LearningRates
    recovery: RecoverFromOutOfMemory | None = None
    num_placeholders: int = 0
    _seeding: Seeding | None = field(init=False)
    _guard: HandlerGuard = field(init=False)
    _state: TrainState = field(init=False)
    _is_started_heard: bool = False  # whether MICRO_BATCH_STARTED has handlers
    _is_guarded: bool = False  # whether an event has handlers that must not change gradients, so that these are compared

    def __post_init__(self) -> None:
        self._seeding, self._guard, self._state = self.passes.seeding, self.passes.guard, self.passes.state

    def __call__(self, trainer: Trainer, group: Sequence[Any]) -> None:
        """Gathers. Collective where the last backward is.

        Args:
            trainer: fires the events.
            group: the micro-batches of this rank; empty where its data has run out while others have some.
        """
        passes, recovery, crossing, gradients = self.passes, self.recovery, self.crossing, self.gradients
        state, done = self._state, self.begin(trainer, group)
        for number, micro_batch in enumerate(islice(group, done, None), start=done + 1):
            last = number == len(group) + self.num_placeholders  # whose number is right by now, see ArrivingGroup
            self.begin_micro_batch(trainer, number - 1)
            # One part, unless the micro-batch had to be cut to fit into memory.
            for part in (micro_batch,) if recovery is None else recovery.parts(micro_batch):
                # DDP asks in forward already whether this backward will reduce, so the context covers both. A crossing that
                # has one does not let a micro-batch be dropped, so no recovery stands beside it.
                with crossing.context(last=last) if recovery is None else recovery.attempt(part):
                    # Held in the state alone, so that its graph is freed before the next forward needs the memory.
                    state.forward_output = passes.forward(part)
                    # Before backward, since the sums of the last micro-batch are sent before it.
                    self.statistics.add(state.forward_output)
                    if self._is_guarded:
                        self._guard.fire(trainer, _FORWARD_COMPLETED)
                    if passes.transfer is not None and number < len(group):
                        # Asked for now, so that it is copied while backward runs.
                        passes.transfer.ahead(group[number])
                    trainer.begin_section("backward")
                    if last and not crossing.may_drop_micro_batches:
                        # All sums are known before backward. Sent now, they arrive while it runs, ahead of its gradients.
                        outgoing = Outgoing(trainer.requests, trainer.piggybacks)
                        crossing.start(outgoing, self.statistics, gradients, state.forward_output.loss)
                    passes.backward_from(state.forward_output.loss)()
                    # The next backward adds to these gradients in place, which must not reach those of another parameter.
                    gradients.separate()
                    for callback in trainer.moments.on_backward:
                        callback(state.forward_output)
            # The output of a micro-batch that was dropped, since it ran out of memory, is gone.
            if self._is_guarded and state.forward_output is not None:
                self._guard.fire(trainer, _BACKWARD_COMPLETED)
            if passes.options.create_graph:
                # Handlers of BACKWARD_COMPLETED may read the graph of a gradient; the next backward must not extend it.
                gradients.detach()
            state.forward_output = None
        # None says that no micro-batch is running, where an error comes from here on.
        state.micro_batch_in_group = None
        if self._guard.is_watching:
            self._guard.warn_of_unstepped()
        if state.batch is not group and state.batch is not None:  # which frees its memory
            raise _replaced_too_late(state.batch)
        if self.num_placeholders or passes.awaits_size:
            self._take_part(trainer)

    def begin(self, trainer: Trainer, group: Sequence[Any]) -> int:
        """Before the first micro-batch. Gives how many are done already: none, but for what an acceleration has done."""
        if self._seeding is not None and isinstance(group, ArrivingGroup):
            group.drawing = self._seeding.outside
        self.passes.begin(group)
        self.num_placeholders = self.crossing.num_placeholders(group, trainer.data.max_micro_batches)
        return 0

    def begin_micro_batch(self, trainer: Trainer, index: int) -> None:
        """Counts the micro-batch of this index in the group, seeds what it draws, and tells handlers."""
        state = self._state
        state.num_micro_batches, state.micro_batch_in_group = state.num_micro_batches + 1, index
        trainer.begin_section("forward")
        if self._seeding is not None:
            self._seeding.micro_batch(index)
        if not self._is_started_heard:
            return
        # Looked at in few updates only: FailureBoard has a handler of this event in each.
        if self._guard.is_watching:
            self._guard.fire(trainer, _MICRO_BATCH_STARTED)
        else:
            trainer.fire_event(_MICRO_BATCH_STARTED)

    def cross(self, trainer: Trainer) -> Totals:
        """After the last backward: reduces what is left, and gives the numbers of the update over all ranks. Collective."""
        trainer.begin_section("reduction")
        if self._seeding is not None:
            self._seeding.step()
        # What these change in the gradients is in the norm, and so in clipping and decision.
        for callback in trainer.moments.before_norm:
            callback(trainer)
        norm = self.crossing.finish(Outgoing(trainer.requests, trainer.piggybacks), self.statistics, self.gradients)
        totals = self.statistics.finish(norm) if self.statistics.on_host else self.read(trainer, norm)
        is_right = SMALLEST_NORM <= totals.norm < math.inf or totals.sample_size == 0
        return totals if is_right else self._with_norm(totals)

    def read(self, trainer: Trainer, norm: float | Tensor | None) -> Totals:  # noqa: ARG002  # an acceleration asks it
        """Reads the numbers, whose `norm` the reduction has given, from the device in one transfer."""
        self.statistics.send(norm, self.learning_rates.unknown())
        totals = self.statistics.finish(norm)
        self.learning_rates.learn(totals.more)
        return totals

    def _with_norm(self, totals: Totals) -> Totals:
        """Takes a norm again that float32 cannot have added up, since the squares are too large or too small for it.

        All ranks do so alike where the norm is a reduced one.
        """
        return totals._replace(norm=self.crossing.norm(self.gradients))

    def cross_again(self, trainer: Trainer, outgoing: Outgoing) -> Totals:
        """Gives the numbers of another evaluation of the loss, after `again`. Collective; waits for the device."""
        for callback in trainer.moments.before_norm:
            callback(trainer)
        totals = self.statistics.finish(self.crossing.finish(outgoing, self.statistics, self.gradients))
        return totals if may_trust_norm(totals.norm) or totals.sample_size == 0 else self._with_norm(totals)

    def again(self, outgoing: Outgoing, group: Sequence[Any], evaluation: int) -> None:
        """Adds up the group once more, in evaluation 1, 2, ... of its loss, without events and counters. Collective.

        Args:
            outgoing: travels with the sums.
            group: the micro-batches of this rank.
            evaluation: random numbers that are a function of a seed are those of this number.
        """
        state, passes = self.passes.state, self.passes
        for number, micro_batch in enumerate(group, start=1):
            state.micro_batch_in_group = number - 1
            if self._seeding is not None:
                self._seeding.micro_batch(number - 1, evaluation)
            last = number == len(group) + self.num_placeholders
            with self.crossing.context(last=last):
                output = passes.forward(micro_batch)
                self.statistics.add(output)
                if last:
                    self.crossing.start(outgoing, self.statistics, self.gradients, output.loss)
                passes.backward_from(output.loss)()
                self.gradients.separate()
        state.micro_batch_in_group = None
        for number in range(self.num_placeholders, 0, -1):
            self._run_placeholder(outgoing, last=number == 1)

    def choose(self, trainer: Trainer) -> None:
        """Chooses the work that the attached handlers need. Called whenever one is attached or removed."""
        self._is_guarded = trainer.has_handlers(_FORWARD_COMPLETED) or trainer.has_handlers(_BACKWARD_COMPLETED)
        self._is_started_heard = trainer.has_handlers(_MICRO_BATCH_STARTED)
        self._guard.has_other_handlers = True

    def _take_part(self, trainer: Trainer) -> None:
        """In place of the micro-batches that this rank lacks."""
        for number in range(self.num_placeholders, 0, -1):
            trainer.begin_section("reduction")
            self._run_placeholder(Outgoing(trainer.requests, trainer.piggybacks), last=number == 1)
        if self.passes.awaits_size:
            self.passes.agree_on_scale(0.0)

    def _run_placeholder(self, outgoing: Outgoing, *, last: bool) -> None:
        """In place of a micro-batch that this rank does not have: joins the collectives of the other ranks, in their order."""

        def backward(zero: Tensor) -> None:
            if self.passes.awaits_size:
                self.passes.agree_on_scale(0.0)
            if last:
                self.crossing.start(outgoing, self.statistics, self.gradients, zero)
            torch.autograd.backward(zero)

        with self.crossing.context(last=last):
            self.crossing.take_part(lambda micro_batch: self.passes.forward(micro_batch).loss, backward)


def _replaced_too_late(batch: Any) -> TypeError:
    return TypeError(
        f"state.batch must be replaced before the update reads it, got another one, a {type(batch).__name__}, in an event of a "
        "micro-batch; attach the handler to GET_BATCH_COMPLETED or ITERATION_STARTED"
    )
