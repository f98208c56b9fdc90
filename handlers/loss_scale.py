"""Publishing the loss scale and logging its changes."""

from __future__ import annotations

import logging

from ignite.engine import Events, RemovableEventHandle

from ignite_train.events import Event
from ignite_train.kinds_of_handlers import Handler
from ignite_train.trainer import Trainer

__all__ = ["LossScaleLogger"]

_logger = logging.getLogger(__name__)


class LossScaleLogger(Handler):
    """Publishes the scale that each update used as `state.metrics["loss_scale"]`, and logs a line whenever it has changed.

    Skipped updates count too: the scale falls in them. The line goes to the logger `ignite_train.handlers.loss_scale`
    at level INFO.

    Example:
        >>> handle = LossScaleLogger().attach(trainer)
        >>> trainer.run(data, max_epochs=1).metrics["loss_scale"]
        1.0
    """

    def __init__(self) -> None:
        self._latest: float | None = None

    def attach(self, trainer: Trainer, event: Event = Events.ITERATION_COMPLETED) -> RemovableEventHandle:
        """Publishes at `event`, before handlers that read the metrics there."""
        return trainer.prepend_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Publishes the scale of the latest update."""
        output = trainer.state.update_output
        if output is None:
            return
        if self._latest is not None and output.loss_scale != self._latest:
            _logger.info(f"update {trainer.state.iteration}: loss scale {self._latest:g} -> {output.loss_scale:g}")
        self._latest = trainer.state.metrics["loss_scale"] = output.loss_scale
