"""Models sharded by `fully_shard` (FSDP2): gradients are reduced to shards in the last backward only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from ignite_train.model.gradients import Gradients
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.placeholders import Placeholders
from ignite_train.ranks.statistics import Statistics

__all__ = ["FSDPReduction"]


class FSDPReduction:
    """FSDP2: gradients stay whole and local until the last backward scatters their mean over the ranks.

    That keeps a whole gradient in memory for the price of one reduction an update. The norm needs the shards of all ranks:
    each rank's share of it travels with the statistics, whose reduction therefore starts after the last backward.

    Every forward and backward gathers parameters from all ranks, so a rank without data has to run them too, on a placeholder.

    Args:
        root: the module that `fully_shard` was applied to last.
        placeholders: what a rank without data runs on.
    """

    may_drop_micro_batches = False
    forward_is_local = False

    def __init__(self, root: nn.Module, placeholders: Placeholders) -> None:
        self.module = root
        self.divisor = collectives.world_size()
        self._root: Any = root
        self._placeholders = placeholders

    def num_placeholders(self, group: Sequence[Any], max_micro_batches: int | None) -> int:
        """As many as the rank with the most micro-batches has more: all run the same number of forwards.

        Collective where the choice of placeholders is, and in every update if the loaders have no length.
        """
        if not self._placeholders.choose(group):
            return 0
        if max_micro_batches is None:
            max_micro_batches = int(collectives.largest(len(group))[0])
        return max_micro_batches - len(group)

    def context(self, *, last: bool) -> AbstractContextManager[Any]:
        """Backward leaves whole gradients on this rank, unless it is the last."""
        return nullcontext() if last else self._unsynchronised()

    @contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def run_placeholder(self, loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Runs the forward of a micro-batch that does not count; its backward adds zeros. Collective, as any forward."""
        return self._placeholders.loss(loss_of)

    def begin(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients, loss: Tensor) -> None:
        """Nothing: the statistics wait for the norm."""

    def end(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> None:
        """Starts the statistics, with this rank's share of the squared norm."""
        statistics.start(*outgoing, norm_squared=gradients.shard_norm_squared())

    def norm(self, gradients: Gradients) -> float:
        """The norm, from each rank's shards. Collective."""
        return math.sqrt(collectives.total([float(gradients.shard_norm_squared())])[0])

    def scaled_norm(self, gradients: Gradients) -> float:
        """The norm, from each rank's shards. Collective."""
        return math.sqrt(collectives.total([gradients.scaled_shard_norm_squared()])[0])

    def finish(self, *, applied: bool) -> None:
        """Tells the placeholders."""
        self._placeholders.finish(applied=applied)
