"""Cross: gradients and sums of an update over the ranks, after its last backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from ignite_train.model.gradients import SMALLEST_NORM, Gradients, may_trust_norm
from ignite_train.model.learning_rates import LearningRates
from ignite_train.model.seeding import Seeding
from ignite_train.model.step_watch import StepWatch
from ignite_train.ranks.crossing import Crossing
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.statistics import Statistics, Totals
from ignite_train.trainer import Trainer
from ignite_train.update.gather import Gather

__all__ = ["Cross"]


@dataclass(kw_only=True)
class Cross:
    """Reduces what is left to reduce, and reads the totals.

    Attributes:
        gather: has added up the gradients and the sums of this rank.
        learning_rates: those that lie on the device are read in the same transfer.
        watch: whether parameters have moved.
    """

    gather: Gather
    learning_rates: LearningRates
    watch: StepWatch
    crossing: Crossing = field(init=False)
    statistics: Statistics = field(init=False)
    gradients: Gradients = field(init=False)
    seeding: Seeding | None = field(init=False)

    def __post_init__(self) -> None:
        gather = self.gather
        self.crossing, self.statistics, self.gradients = gather.crossing, gather.statistics, gather.gradients
        self.seeding = gather.passes.seeding

    def __call__(self, trainer: Trainer) -> Totals:
        """Gives the numbers of the update over all ranks. Collective; waits for the device.

        A norm that float32 cannot have added up, since the squares are too large or too small for it, is taken again. All ranks
        do so alike where the norm is a reduced one.
        """
        trainer.begin_section("reduction")
        if self.seeding is not None:
            self.seeding.step()
        for callback in trainer.moments.before_norm:
            callback(trainer)
        outgoing = Outgoing(trainer.requests, trainer.piggybacks)
        norm = self.crossing.finish(outgoing, self.statistics, self.gradients)
        totals = self.statistics.finish(norm) if self.statistics.on_host else self.read(trainer, norm)
        is_known = SMALLEST_NORM <= totals.norm < math.inf or self.watch.entered
        return totals if is_known else self._with_norm(totals)

    def read(self, trainer: Trainer, norm: float | Tensor | None) -> Totals:  # noqa: ARG002  # an acceleration asks it
        """Reads the numbers, whose `norm` the reduction has given, from the device in one transfer."""
        self.statistics.send(norm, self.learning_rates.unknown())
        totals = self.statistics.finish(norm)
        self.learning_rates.learn(totals.more)
        return totals

    def again(self, outgoing: Outgoing) -> Totals:
        """Gives the numbers of another evaluation of the loss. Collective; waits for the device."""
        totals = self.statistics.finish(self.crossing.finish(outgoing, self.statistics, self.gradients))
        return self._with_norm(totals)

    def _with_norm(self, totals: Totals) -> Totals:
        if may_trust_norm(totals.norm) or totals.sample_size == 0:
            return totals
        return totals._replace(norm=self.crossing.norm(self.gradients))
