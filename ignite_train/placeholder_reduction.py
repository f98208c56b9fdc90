"""Ranks in step: each runs forward and backward equally often in an update, because forward has collectives of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ignite_train import distributed
from ignite_train.engine import Trainer
from ignite_train.gradients import Gradients
from ignite_train.placeholders import Placeholders
from ignite_train.reduction import Reduction
from ignite_train.statistics import Statistics

__all__ = ["PlaceholderReduction"]


class PlaceholderReduction:
    """Has a rank with fewer micro-batches run placeholders, so that collectives inside the user's forward meet their like.

    A placeholder has no sample size, no logs, and no gradient of its own loss. The update is the gradient of the losses that
    count, and these have seen the placeholder in their collectives: as a negative example, say, or in a mean over the batch.

    Args:
        reduction: how gradients cross the ranks.
        placeholders: what a rank runs on that has fewer micro-batches than others.
    """

    tolerant = False
    replayable = False

    def __init__(self, reduction: Reduction, placeholders: Placeholders) -> None:
        self.divisor, self.module = reduction.divisor, reduction.module
        self._reduction, self._placeholders = reduction, placeholders
        self._has_placeholder = False

    def context(self, *, last: bool) -> AbstractContextManager[Any]:
        """As without placeholders: gradients cross in the last backward, which may be that of a placeholder."""
        return self._reduction.context(last=last)

    def missing(self, group: list[Any], widest: int | None) -> int:
        """As many as the rank with the most micro-batches has more.

        Collective where the choice of placeholders is, and in every update if the loaders have no length.
        """
        self._has_placeholder = self._placeholders.choose(group)
        if not self._has_placeholder:
            return self._reduction.missing(group, widest)
        if widest is None:
            widest = int(distributed.largest(len(group))[0])
        return widest - len(group)

    def forward_without_data(self, loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Runs the forward of a placeholder. Collective, as the user's forward is."""
        if not self._has_placeholder:
            return self._reduction.forward_without_data(loss_of)
        return self._placeholders.loss(loss_of)

    def begin(self, trainer: Trainer, statistics: Statistics) -> None:
        """As without placeholders."""
        self._reduction.begin(trainer, statistics)

    def end(self, trainer: Trainer, statistics: Statistics, gradients: Gradients) -> float | Tensor | None:
        """As without placeholders."""
        return self._reduction.end(trainer, statistics, gradients)

    def scaled_norm(self, gradients: Gradients) -> float:
        """As without placeholders."""
        return self._reduction.scaled_norm(gradients)

    def finish(self, *, applied: bool) -> None:
        """Tells the placeholders."""
        self._placeholders.finish(applied=applied)
