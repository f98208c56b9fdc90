"""Ignite's loggers of gradients, which read `.grad`: whether it is there, and what it holds, where they are called."""

from __future__ import annotations

import logging
from typing import Any

from ignite.engine import CallableEventWithFilter, Events

from ignite_train.engine.dispatch import attached
from ignite_train.events import TrainEvents
from ignite_train.trainer import Trainer

__all__ = ["warn_of_gradient_loggers"]

_LOGGERS = ("GradsHistHandler", "GradsScalarHandler")  # of TensorBoard, ClearML, Neptune, Visdom: each has one of these names
_WITHIN = (
    TrainEvents.MICRO_BATCH_STARTED,
    TrainEvents.FORWARD_COMPLETED,
    TrainEvents.BACKWARD_COMPLETED,
    TrainEvents.GRADIENTS_READY,
)

_logger = logging.getLogger(__name__)


def warn_of_gradient_loggers(trainer: Trainer, *, keeps_gradients: bool) -> Trainer:
    """Has `trainer` say once, before its first update, if a logger of gradients would write none, or a sum."""

    def look(trainer: Trainer) -> None:
        handle.remove()
        for event, handler, _ in attached(trainer):
            name, problem = type(handler).__name__, _problem(event, keeps_gradients=keeps_gradients)
            if name in _LOGGERS and problem and not warned:
                warned.append(name)
                _logger.warning(
                    f"{name} is attached to {event!r}, where .grad {problem}; pass UpdateOptions(keep_gradients=True) and "
                    "attach it to Events.ITERATION_COMPLETED"
                )

    warned: list[str] = []
    handle = trainer.add_event_handler(Events.ITERATION_STARTED, look)
    return trainer


def _problem(event: Any, *, keeps_gradients: bool) -> str | None:
    """What is wrong with reading `.grad` at `event`; None if nothing is."""
    if isinstance(event, CallableEventWithFilter) and event in _WITHIN:
        return "is a sum, also over what is not reduced yet, and neither the mean nor unscaled"
    if isinstance(event, CallableEventWithFilter) and event == TrainEvents.GRADIENTS_REDUCED:
        return None
    return None if keeps_gradients else "is None, so that it writes nothing"
