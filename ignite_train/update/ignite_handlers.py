"""Ignite's handlers that read something else on a trainer than on its engine: a look at what is attached, and a warning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import MethodType
from typing import Any

from ignite.engine import CallableEventWithFilter, Events
from ignite.handlers import BasicTimeProfiler
from ignite.metrics import Metric, RunningAverage
from ignite.metrics.accumulation import VariableAccumulation

from ignite_train.engine.attachable import owner_of
from ignite_train.engine.dispatch import attached
from ignite_train.events import TrainEvents
from ignite_train.trainer import Trainer

__all__ = ["warn_of_ignite_handlers"]

_LOGGERS = ("GradsHistHandler", "GradsScalarHandler")  # of TensorBoard, ClearML, Neptune, Visdom: each has one of these names
_WITHIN = (
    TrainEvents.MICRO_BATCH_STARTED,
    TrainEvents.FORWARD_COMPLETED,
    TrainEvents.BACKWARD_COMPLETED,
    TrainEvents.GRADIENTS_READY,
)
_OF_NUMBERS = (RunningAverage, VariableAccumulation)  # of a loss, say, which is the whole update's

_logger = logging.getLogger(__name__)


def warn_of_ignite_handlers(trainer: Trainer, *, keeps_gradients: bool, accumulates: bool) -> Trainer:
    """Has `trainer` say once, in its first update, which of Ignite's handlers would show something wrong.

    A logger of gradients may find none, or a sum. With several micro-batches to an update a metric of predictions counts one
    of them, and BasicTimeProfiler takes the micro-batches of the loader for updates.
    """

    def look(trainer: Trainer) -> None:
        at_start.remove()
        problems = [*_of_loggers(trainer, keeps_gradients=keeps_gradients), *(_of_profilers(trainer) if accumulates else ())]
        for problem in dict.fromkeys(problems):
            _logger.warning(problem)

    def look_at_output(trainer: Trainer) -> None:
        at_end.remove()
        output = trainer.state.output
        if isinstance(output, (tuple, list, dict)):
            for problem in dict.fromkeys(_of_metrics(trainer)):
                _logger.warning(problem)

    at_start = trainer.add_event_handler(Events.ITERATION_STARTED, look)
    if accumulates:
        at_end = trainer.add_event_handler(Events.ITERATION_COMPLETED, look_at_output)
    return trainer


def _of_loggers(trainer: Trainer, *, keeps_gradients: bool) -> Iterator[str]:
    """The mistake in the first logger of gradients; the remedy is the same for all of them."""
    for event, handler, _ in attached(trainer):
        name, problem = type(handler).__name__, _problem(event, keeps_gradients=keeps_gradients)
        if name in _LOGGERS and problem:
            yield (
                f"{name} is attached to {event}, where .grad {problem}; pass UpdateOptions(keep_gradients=True) and "
                "attach it to Events.ITERATION_COMPLETED"
            )
            return


def _problem(event: Any, *, keeps_gradients: bool) -> str | None:
    """The mistake in reading `.grad` at `event`; None if there is none."""
    if isinstance(event, CallableEventWithFilter) and event in _WITHIN:
        return "is a sum, also over what is not reduced yet, and neither the mean nor unscaled"
    if isinstance(event, CallableEventWithFilter) and event == TrainEvents.GRADIENTS_REDUCED:
        return None
    return None if keeps_gradients else "is None, so that it writes nothing"


def _of_metrics(trainer: Trainer) -> Iterator[str]:
    """The mistake in metrics of predictions that were attached in Ignite's way."""
    for _, handler, given in attached(trainer):
        metric = handler.__self__ if isinstance(handler, MethodType) else None
        if isinstance(metric, Metric) and not isinstance(metric, _OF_NUMBERS) and handler.__name__ == "completed":
            kind, name = type(metric).__name__, given[0] if given else "name"
            yield (
                f"{kind} is attached to the trainer as {name!r} and reads state.output, which is of the last micro-batch of "
                f"each update, so that the others are not counted; call attach_metric(trainer, {kind}(...), {name!r}) in place "
                "of attach"
            )


def _of_profilers(trainer: Trainer) -> Iterator[str]:
    for _, handler, _ in attached(trainer):
        if isinstance(owner_of(handler), BasicTimeProfiler):
            yield (
                "BasicTimeProfiler takes the length of the loader, in micro-batches, for the updates of an epoch, so that "
                "its table has rows of zeros and wrong epochs; StepTimer and TrainingMetrics measure updates"
            )
