"""Models sharded by `fully_shard` (FSDP2): gradients are reduced to shards in the last backward only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ignite_train import distributed
from ignite_train.engine import Trainer
from ignite_train.gradients import Gradients
from ignite_train.side_effects import SideEffects
from ignite_train.statistics import Statistics

__all__ = ["ShardedReduction", "spare_micro_batch"]


class ShardedReduction:
    """FSDP2: gradients stay whole and local until the last backward scatters their mean over the ranks.

    That keeps a whole gradient in memory for the price of one reduction an update. The norm needs the shards of all ranks:
    each rank's share of it travels with the statistics, whose reduction therefore starts after the last backward.

    Every forward and backward gathers parameters from all ranks, so a rank without data has to run them too. It does so on
    the latest micro-batch it has seen, or on one that it is given by another rank before the first update, with a gradient of
    zero, and puts random state and buffers back. (Should that micro-batch be one whose derivatives are infinite, 0 · inf makes
    this update non-finite, and it is treated as such.)

    Args:
        root: the module that `fully_shard` was applied to last.
    """

    tolerant = False
    replayable = False

    def __init__(self, root: nn.Module) -> None:
        self.module = root
        self.divisor = distributed.world_size()
        self._root: Any = root
        self._spare: Any = None
        self._all_have_spare = False

    def missing(self, group: list[Any], widest: int | None) -> int:
        """As many as the rank with the most micro-batches has more: all run the same number of forwards.

        Collective in the first update, to give a rank without data another's micro-batch to run on; and in every update if
        the loaders have no length.
        """
        if group:
            self._spare = group[-1]
        if not self._all_have_spare:
            self._spare = spare_micro_batch(self._spare)
            self._all_have_spare = True
        if widest is None:
            widest = int(distributed.largest(len(group))[0])
        return widest - len(group)

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

    def forward_without_data(self, loss_of: Callable[[Any], Tensor]) -> Tensor:
        """Runs the forward of a micro-batch that does not count; its backward adds zeros. Collective, as any forward."""
        side_effects = SideEffects(self.module)
        loss: Tensor = _WithoutGradient.apply(loss_of(self._spare))  # type: ignore[no-untyped-call]
        side_effects.undo()
        return loss

    def begin(self, trainer: Trainer, statistics: Statistics) -> None:
        """Nothing: the statistics wait for the norm."""

    def end(self, trainer: Trainer, statistics: Statistics, gradients: Gradients) -> None:
        """Starts the statistics, with this rank's share of the squared norm."""
        statistics.start(trainer.signals, trainer.passengers, norm_squared=gradients.shard_norm_squared())

    def scaled_norm(self, gradients: Gradients) -> float:
        """The norm, from each rank's shards. Collective."""
        return math.sqrt(distributed.total([gradients.scaled_shard_norm_squared()])[0])


def spare_micro_batch(mine: Any) -> Any:
    """This rank's own micro-batch, or another's if it has none. Collective; pickled between the ranks where one lacks one."""
    if not distributed.any_rank(mine is None):
        return mine
    spares = distributed.gather_objects(mine)
    return next((spare for spare in (mine, *spares) if spare is not None), None)


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:  # noqa: ARG004
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:  # noqa: ARG004
        return torch.zeros_like(grad_outputs[0])
