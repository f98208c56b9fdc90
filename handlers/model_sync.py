"""The same model on all ranks before it is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.evaluation.evaluator import Evaluator
from ignite_train.internals.of_torch import RunningNorm
from ignite_train.kinds_of_handlers import Handler
from ignite_train.kinds_of_handlers.handler import check_evaluator
from ignite_train.ranks import collectives
from ignite_train.ranks.begin_alike import common_buffers
from ignite_train.ranks.replicas import mean_over_ranks
from ignite_train.trainer import Trainer

__all__ = ["ModelSync"]


class ModelSync(Handler):
    """Gives all ranks the same buffers before an evaluation, computed from the buffers of all ranks.

    Each rank's normalisation layers see the samples of that rank only, so their running statistics differ, with
    `reduction="explicit"` and with `DistributedDataParallel(broadcast_buffers=False)`. An evaluator of `create_evaluator` takes
    those of rank 0; any other engine evaluates another model on each rank. This handler puts the statistics of all ranks in
    their place: the mean of the means, and the variance of the samples of all ranks together, as if each rank had seen equally
    many. Other buffers are the ones of rank 0 in the evaluation; after an evaluator of `create_evaluator` each rank has its own
    again.

    Training does not depend on running statistics. They continue from what they are set to, the same on all ranks. Parameters
    are equal on all ranks by the way in which they are trained, which `StateConsistency` checks. In a single process it does
    nothing.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        >>> trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
        >>> evaluator = create_evaluator(model, forward)
        >>> ModelSync().attach(trainer, evaluator=evaluator)
        >>> handle = Validation(evaluator, [torch.randn(8, 3)]).attach(trainer)
        >>> state = trainer.run([torch.randn(8, 3)] * 4, max_epochs=2)
    """

    not_elastic = "it averages buffers over the ranks of a process group, and replicas that come and go are in none"

    is_collective = True

    def __init__(self) -> None:
        self._model: nn.Module | None = None

    def attach(self, trainer: Trainer, *, evaluator: Engine) -> None:
        """Acts when `evaluator` begins, before an average of the weights is put into the model. All ranks must attach it.

        Raises:
            TypeError: `evaluator` is not an engine that evaluates.
        """
        check_evaluator(evaluator)
        self._model = trainer.model
        if isinstance(evaluator, Evaluator):
            evaluator.run_within(self._averaged, first=True)
        else:
            evaluator.add_event_handler(Events.STARTED, lambda: self())

    def __call__(self) -> None:
        """Makes them equal now. Collective: one all-reduce, a small exchange, and a broadcast for each other buffer."""
        averaged = self._average()
        if self._model is not None and collectives.world_size() > 1:
            for buffer in common_buffers(self._model):
                if id(buffer) not in averaged and not isinstance(buffer, DTensor):
                    collectives.broadcast(buffer)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Statistics stay; the evaluator itself gives all ranks the other buffers of rank 0, and then each rank its own."""
        self._average()
        yield

    def _average(self) -> set[int]:
        """Averages the statistics of the model, and returns the numbers of these buffers."""
        if self._model is None or collectives.world_size() == 1:
            return set()
        modules = self._model.modules()
        norms = [module for module in modules if isinstance(module, RunningNorm) and module.running_mean is not None]
        statistics = [(norm.get_buffer("running_mean"), norm.get_buffer("running_var")) for norm in norms]
        if statistics:
            _average(statistics)
        return {id(buffer) for pair in statistics for buffer in pair}


def _average(statistics: list[tuple[Tensor, Tensor]]) -> None:
    """Puts means and variances over all ranks in the place of each rank's: var = E[var + mean²] - E[mean]²."""
    with torch.no_grad():
        moments = [(mean.double(), var.double() + mean.double().square()) for mean, var in statistics]
        mean_over_ranks([moment for pair in moments for moment in pair])
        for (mean, var), (mean_of_all, second_moment) in zip(statistics, moments, strict=True):
            mean.copy_(mean_of_all)
            var.copy_((second_moment - mean_of_all.square()).clamp_min(0))
