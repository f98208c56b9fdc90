"""Placeholders: what a rank without data runs forward and backward on, so that it takes part in the others' collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ignite_train.model.forward_state import ForwardState
from ignite_train.model.gradients import Gradients
from ignite_train.model.sparse_parameters import sparse_gradient_values
from ignite_train.ranks import collectives
from ignite_train.ranks.crossing import Crossing
from ignite_train.ranks.ddp import DDPCrossing
from ignite_train.ranks.messages import Outgoing
from ignite_train.ranks.statistics import Statistics
from ignite_train.state import Carried

__all__ = ["PlaceholderCrossing", "Placeholders", "borrowed_micro_batch"]


class Placeholders:
    """Chooses the micro-batch that a rank without data runs on, and runs it so that it leaves no trace on this rank.

    The gradient of its loss is zero, but zero times infinity is NaN. So the micro-batch must be one whose derivatives are
    finite: it is the last one that this rank ran in an update that was applied. Before the first applied update, and after
    an update that was skipped, a rank without data takes a micro-batch that another rank trains on in the same update. If
    that one is not finite, the update is skipped anyway. So a bad micro-batch spoils no other update than its own.

    Args:
        module: the model; all that running it changes is put back.
        carried: what forward carries, which is put back too.
        forward: the user's; changes that it makes in a teacher, or in another module to which it refers, are put back too.
    """

    def __init__(self, module: nn.Module, carried: Carried, forward: Any) -> None:
        self._forward_state = ForwardState(module, carried, forward)
        self._chosen: Any = None  # for the running update
        self._borrowed: Iterator[Any] = iter(())  # in its place, one after the other
        self._applied: Any = None  # of the latest update that was applied
        self._latest_was_applied = False  # the same on all ranks, because the decisions are

    def choose(self, group: Sequence[Any]) -> bool:
        """Chooses one for this update. Collective, unless the latest update was applied.

        Args:
            group: this rank's micro-batches.

        Returns:
            Whether a micro-batch was found: the same answer on all ranks. False means that no rank has had data so far.
        """
        own, self._borrowed = group[-1] if group else None, iter(())
        if self._latest_was_applied:
            self._chosen = self._applied if own is None else own
        else:
            self._chosen = borrowed_micro_batch(own, self._applied)
        return self._chosen is not None

    def borrow(self, group: Sequence[Any], lengths: Sequence[int]) -> None:
        """Chooses, for each micro-batch that this rank lacks, the one at that place of the rank with the most. Collective.

        So a rank that calls a module in a forward does so where another one does. Micro-batches are pickled between the ranks.

        Args:
            group: this rank's micro-batches.
            lengths: how many each rank has; they differ.
        """
        lender, fewest = lengths.index(max(lengths)), min(lengths)
        lent = [group[fewest:] if collectives.rank() == lender else None]
        dist.broadcast_object_list(lent, src=lender)
        micro_batches = (lent[0] or [])[len(group) - fewest :]
        self._borrowed = cycle(micro_batches)  # where a NaN is looked for they are run once more
        self._chosen = group[-1] if group else micro_batches[-1]

    def close(self, *, applied: bool) -> None:
        """To be called after each update with its outcome, which is the same on all ranks."""
        self._latest_was_applied = applied
        if applied:
            self._applied = self._chosen

    def run(self, loss_of: Callable[[Any], Tensor], backward: Callable[[Tensor], object], *, gives_zeros: bool = True) -> None:
        """Runs forward and backward on the chosen micro-batch, whose loss has a gradient of zero.

        What others' losses make of it, through collectives in forward, reaches this rank's parameters all the same. Things are
        put back after backward, which refuses to read what has been written to since forward, such as a running mean.

        Args:
            loss_of: runs forward and gives the loss.
            backward: runs backward from it.
            gives_zeros: backward goes through forward with zeros; or else with no gradients, which torch's operators pass on as
                such, functions that have a collective in backward take for zeros, and hooks are given as None.
        """
        before = self._forward_state.mark()
        backward(_WithoutGradient.apply(loss_of(next(self._borrowed, self._chosen)), gives_zeros))  # type: ignore[no-untyped-call]
        self._forward_state.put_back(before)


def borrowed_micro_batch(own: Any, earlier: Any = None) -> Any:
    """This rank's own micro-batch, or another's if it has none. Collective; pickled between the ranks where one lacks one.

    Args:
        own: the one that this rank runs on now; None if it has none.
        earlier: the one to fall back to if no rank has one now.
    """
    if not collectives.any_rank(own is None):
        return own
    offers = collectives.gather_objects((own, earlier))
    candidates = (own, *(now for now, _ in offers), earlier, *(before for _, before in offers))
    return next((candidate for candidate in candidates if candidate is not None), None)


class PlaceholderCrossing(Crossing):
    """Has a rank with fewer micro-batches run placeholders, so that collectives inside the user's forward meet their like.

    A placeholder has no sample size, no logs, and no gradient of its own loss. The update is the gradient of the losses that
    count, and these have seen the placeholder in their collectives: as a negative example, say, or in a mean over the batch.

    A parameter that only placeholders have used keeps no gradient, so that neither moments nor weight decay move it. Where DDP
    reduces in backward, and looks for unused parameters, backward goes through a placeholder without gradients for that; not
    where parameters have hooks, which would be called with None. Elsewhere zeros are taken away again before the reduction.

    Args:
        crossing: how gradients cross the ranks.
        placeholders: stand in on a rank that has fewer micro-batches than others.
    """

    may_drop_micro_batches = False
    forward_is_local = False
    learns_outcome = True

    def __init__(self, crossing: Crossing, placeholders: Placeholders) -> None:
        super().__init__(crossing.module)
        self.averaged_over = crossing.averaged_over
        self._crossing, self._placeholders = crossing, placeholders
        self._has_placeholder = False
        self._without_gradient: list[nn.Parameter] | None = None  # before the first placeholder of the update

    def context(self, *, last: bool) -> AbstractContextManager[Any]:
        """See `Crossing`: gradients cross in the last backward, which may belong to a placeholder."""
        return self._crossing.context(last=last)

    def num_placeholders(self, group: Sequence[Any], max_micro_batches: int | None) -> int:
        """As many as the rank with the most micro-batches has more.

        Collective where the choice of placeholders is, and in every update if the loaders have no length.
        """
        self._has_placeholder, self._without_gradient = self._placeholders.choose(group), None
        without_placeholders = self._crossing.num_placeholders(group, max_micro_batches)  # which also begins the update
        if not self._has_placeholder:
            return without_placeholders
        if max_micro_batches is None:
            max_micro_batches = int(collectives.largest(len(group))[0])
        # where no rank has any, DDP still needs a backward, in which it reduces and before which the statistics leave
        return max(max_micro_batches - len(group), without_placeholders)

    def take_part(self, loss_of: Callable[[Any], Tensor], backward: Callable[[Tensor], object]) -> None:
        """Runs forward and backward of a placeholder. Collective, as the user's forward is."""
        if not self._has_placeholder:
            self._crossing.take_part(loss_of, backward)
        elif isinstance(self._crossing, DDPCrossing):
            self._placeholders.run(loss_of, backward, gives_zeros=not self._crossing.tells_unused)
        else:
            if self._without_gradient is None:
                self._without_gradient = [parameter for parameter in self.module.parameters() if parameter.grad is None]
            self._placeholders.run(loss_of, backward)

    def start(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients, loss: Tensor) -> None:
        """See `Crossing`."""
        self._crossing.start(outgoing, statistics, gradients, loss)

    def finish(self, outgoing: Outgoing, statistics: Statistics, gradients: Gradients) -> float | Tensor | None:
        """As without placeholders, whose zeros are taken away before. Waits for the device if there was a placeholder."""
        before, self._without_gradient = self._without_gradient or (), None
        touched = [parameter for parameter in before if parameter.grad is not None]
        for parameter, is_zero in zip(touched, _are_zero([parameter.grad for parameter in touched]), strict=True):
            if is_zero:
                parameter.grad = None
        return self._crossing.finish(outgoing, statistics, gradients)

    def close(self, *, applied: bool) -> None:
        """Tells the placeholders."""
        self._placeholders.close(applied=applied)


def _are_zero(gradients: Sequence[Any]) -> list[bool]:
    """For each gradient whether all of its elements are zero. One wait for the device."""
    if not gradients:
        return []
    values = [*map(sparse_gradient_values, gradients)]
    return torch.stack([value.any().to(values[0].device) for value in values]).logical_not().tolist()  # sync


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gives_zeros: object) -> Tensor:
        ctx.gives_zeros = gives_zeros
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, None]:
        return torch.zeros_like(grad_outputs[0]) if ctx.gives_zeros else None, None
