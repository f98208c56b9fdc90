"""Evaluation: the same sample-weighted mean as in training, over all ranks, whatever their shares of the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from ignite.engine import State
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from ignite_train import distributed
from ignite_train.arguments import positive_int, shown
from ignite_train.data_position import open_loader
from ignite_train.forward_output import Forward, ForwardOutput, as_forward_output, check_forward
from ignite_train.loop import Loop
from ignite_train.precision import Precision, PrecisionName
from ignite_train.sharded_reduction import spare_micro_batch
from ignite_train.signals import Signals
from ignite_train.statistics import Statistics
from ignite_train.transfer import Transfer
from ignite_train.wrapping import unwrap

__all__ = ["Evaluator", "create_evaluator"]


class Evaluator(Loop):
    """An Ignite engine that runs `forward` without gradients over a loader; `create_evaluator` makes it.

    After `run`, `state.metrics` has `"loss"` = Σloss / Σsample_size and, for each log, Σlog / Σsample_size: a count of correct
    answers becomes the accuracy. All sums are over all ranks, reduced once at the end. `state.output` is the
    `ForwardOutput` of the latest micro-batch.
    """

    def __init__(self, model: nn.Module, forward: Forward, precision: PrecisionName) -> None:
        super().__init__(_evaluate)
        self.model = unwrap(model)
        self.forward = forward
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.transfer, self.precision = Transfer(device), Precision(precision, device)
        self.statistics = Statistics(device)
        self._limit: int | None = None
        self._in_step = isinstance(model, FSDPModule)

    def run(
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,  # noqa: ARG002  # Ignite's signature
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> State:
        """Evaluates once over `data`. Collective: all ranks call it, also those without data.

        Args:
            data: a loader of micro-batches; ranks may have different numbers, or none.
            max_epochs: not used: an evaluation is one pass.
            max_iters: stop after this many micro-batches of each rank.
            epoch_length: the same as `max_iters`.

        Returns:
            A fresh state, with the metrics.

        Raises:
            TypeError: `data` cannot be iterated.
            ValueError: its sampler repeats samples, which would count twice; or no rank has a sample.
        """
        self._refuse_nested_run()
        loader = self._as_loader(data)
        _refuse_padding(loader)
        name, limit = ("epoch_length", epoch_length) if max_iters is None else ("max_iters", max_iters)
        self._limit = None if limit is None else positive_int(name, limit)
        self.state = State()
        self.state.max_epochs = 1
        self._epoch_open = False
        self.statistics.reset()
        distributed.broadcast_buffers(self.model)
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            self._run(loader)
        finally:
            for module in training:
                module.training = True
        return self.state

    def _open(self, data: Iterable[Any]) -> _Whole:
        micro_batches = islice(open_loader(data), self._limit)
        return _Whole(_in_step(micro_batches) if self._in_step else micro_batches)

    def _close_epoch(self, started: float) -> None:
        self._publish()
        super()._close_epoch(started)

    def _publish(self) -> None:
        self.statistics.start(Signals())
        totals = self.statistics.finish(norm=0.0)
        if totals.sample_size == 0:
            raise ValueError("data must hold at least one sample on some rank, got none: Σsample_size is 0")
        self.state.metrics["loss"] = totals.loss / totals.sample_size
        for name, value in totals.logs.items():
            self.state.metrics[name] = value / totals.sample_size


class _Whole:
    """One pass over micro-batches, as they come."""

    length: int | None = None

    def __init__(self, micro_batches: Iterator[Any]) -> None:
        self._micro_batches = micro_batches

    def __next__(self) -> Any:
        return next(self._micro_batches)

    def close(self, *, whole: bool) -> None:
        """Nothing to do."""


class _Borrowed(NamedTuple):
    """A micro-batch that does not count, for a forward in which only the others' matter."""

    micro_batch: Any


def _in_step(micro_batches: Iterator[Any]) -> Iterator[Any]:
    """As many on every rank as the longest has: a sharded model's forward gathers its parameters from all ranks. Collective."""
    spare, first = None, True
    while True:
        micro_batch = next(micro_batches, None)
        if not distributed.any_rank(micro_batch is not None):
            return
        if micro_batch is not None:
            spare = micro_batch
        if first:
            spare, first = spare_micro_batch(spare), False
        yield _Borrowed(spare) if micro_batch is None else micro_batch


def _evaluate(engine: Evaluator, micro_batch: Any) -> ForwardOutput | None:
    counts = not isinstance(micro_batch, _Borrowed)
    micro_batch = micro_batch if counts else micro_batch.micro_batch
    with torch.no_grad(), engine.precision.autocast():
        output = as_forward_output(engine.forward(engine.model, engine.transfer(micro_batch)))
    if counts:
        engine.statistics.add(output)
    return output if counts else None


def _refuse_padding(data: Iterable[Any]) -> None:
    if isinstance(data, DataLoader) and isinstance(data.sampler, DistributedSampler):
        sampler = data.sampler
        surplus = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
        if surplus > 0:
            raise ValueError(
                f"data must hold each sample once, got a DistributedSampler that repeats {surplus} to even out the ranks; "
                "use ShardedSampler(dataset, shuffle=False), whose shards may differ by one"
            )


def create_evaluator(model: nn.Module, forward: Forward, *, precision: PrecisionName = "fp32") -> Evaluator:
    """Makes an engine that evaluates `model`.

    The model is put into eval mode for the run and each of its modules back into the mode it had. A model wrapped in
    DistributedDataParallel is run without its wrapper, after the buffers of rank 0 were given to all.

    Args:
        model: the model; it may be the one that is being trained.
        forward: as for `create_trainer`; the same function can serve both.
        precision: as for `create_trainer`.

    Returns:
        An engine whose `run(loader)` fills `state.metrics`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")
    check_forward(forward)
    return Evaluator(model, forward, precision)
