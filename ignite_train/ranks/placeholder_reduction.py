"""Ranks in step: each runs forward and backward equally often in an update, because forward has collectives of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ignite_train.model.gradients import Gradients
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.placeholders import Placeholders
from ignite_train.ranks.reduction import DDPReduction, Reduction
from ignite_train.ranks.statistics import Statistics

__all__ = ["PlaceholderReduction"]


class PlaceholderReduction:
    """Has a rank with fewer micro-batches run placeholders, so that collectives inside the user's forward meet their like.

    A placeholder has no sample size, no logs, and no gradient of its own loss. The update is the gradient of the losses that
    count, and these have seen the placeholder in their collectives: as a negative example, say, or in a mean over the batch.

    A parameter that only placeholders have used keeps no gradient, so that neither moments nor weight decay move it. Where DDP
    reduces in backward, and looks for unused parameters, backward goes through a placeholder without gradients for that; not
    where parameters have hooks, which would be called with None. Elsewhere zeros are taken away again before the reduction.

    Args:
        reduction: how gradients cross the ranks.
        placeholders: what a rank runs on that has fewer micro-batches than others.
    """

    may_drop_micro_batches = False
    forward_is_local = False

    def __init__(self, reduction: Reduction, placeholders: Placeholders) -> None:
        self.divisor, self.module = reduction.divisor, reduction.module
        self._reduction, self._placeholders = reduction, placeholders
        self._has_placeholder = False
        self._without_gradient: list[nn.Parameter] | None = None  # before the first placeholder of the update

    def context(self, *, last: bool) -> AbstractContextManager[Any]:
        """As without placeholders: gradients cross in the last backward, which may be that of a placeholder."""
        return self._reduction.context(last=last)

    def num_placeholders(self, group: Sequence[Any], max_micro_batches: int | None) -> int:
        """As many as the rank with the most micro-batches has more.

        Collective where the choice of placeholders is, and in every update if the loaders have no length.
        """
        self._has_placeholder, self._without_gradient = self._placeholders.choose(group), None
        without_placeholders = self._reduction.num_placeholders(group, max_micro_batches)  # which also begins the update
        if not self._has_placeholder:
            return without_placeholders
        if max_micro_batches is None:
            max_micro_batches = int(collectives.largest(len(group))[0])
        # where no rank has any, DDP still needs a backward, in which it reduces and before which the statistics leave
        return max(max_micro_batches - len(group), without_placeholders)

    def run_placeholder(self, loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Runs the forward of a placeholder. Collective, as the user's forward is."""
        if not self._has_placeholder:
            return self._reduction.run_placeholder(loss_of)
        if isinstance(self._reduction, DDPReduction):
            return self._placeholders.loss(loss_of, gives_zeros=not self._reduction.tells_unused)
        if self._without_gradient is None:
            self._without_gradient = [parameter for parameter in self.module.parameters() if parameter.grad is None]
        return self._placeholders.loss(loss_of)

    def begin(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients, loss: Tensor) -> None:
        """As without placeholders."""
        self._reduction.begin(outgoing, statistics, gradients, loss)

    def end(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor | None:
        """As without placeholders, whose zeros are taken away before. Waits for the device if there was a placeholder."""
        before, self._without_gradient = self._without_gradient or (), None
        touched = [parameter for parameter in before if parameter.grad is not None]
        for parameter, is_zero in zip(touched, _are_zero([parameter.grad for parameter in touched]), strict=True):
            if is_zero:
                parameter.grad = None
        return self._reduction.end(outgoing, statistics, gradients)

    def norm(self, gradients: Gradients) -> float | Tensor:
        """As without placeholders."""
        return self._reduction.norm(gradients)

    def scaled_norm(self, gradients: Gradients) -> float:
        """As without placeholders."""
        return self._reduction.scaled_norm(gradients)

    def finish(self, *, applied: bool) -> None:
        """Tells the placeholders."""
        self._placeholders.finish(applied=applied)


def _are_zero(gradients: Sequence[Any]) -> list[bool]:
    """For each gradient whether all of its elements are zero. One wait for the device."""
    if not gradients:
        return []
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return torch.stack([value.any().to(values[0].device) for value in values]).logical_not().tolist()  # sync
