"""Ending a run when the learning rate has fallen to a minimum."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ignite.engine import Events, RemovableEventHandle
from torch.optim import Optimizer

from ignite_train.arguments import FLAG, check_fields, describe, real_number
from ignite_train.events import Event
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.learning_rates import refuse_other_optimizer
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["MinLearningRate"]

_logger = logging.getLogger(__name__)


class MinLearningRate(Handler):
    """Ends the run before the first update whose learning rate would be at most `minimum` in all parameter groups.

    A warm-up that starts lower does not end the run: the rate must have been above `minimum` once. Rates change with applied
    updates, which are the same on all ranks, so that all ranks stop together. A run that is resumed after its end adds no
    update. fairseq has the same as `stop_min_lr`.

    Args:
        optimizer: the trainer's optimizer, whose rates are checked.
        minimum: the rate at which the run ends; at least 0.

    Raises:
        TypeError: `optimizer` is not an optimizer, or `minimum` is not a number.
        ValueError: `minimum` is negative or not finite.

    Example:
        >>> handle = LearningRateSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)).attach(trainer)
        >>> handle = MinLearningRate(optimizer, minimum=2e-3).attach(trainer)
        >>> trainer.run(data, max_epochs=1).iteration  # with learning rates 0.1 and 0.01
        2
    """

    def __init__(self, optimizer: Optimizer, *, minimum: float) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {describe(optimizer)}")
        self.optimizer = optimizer
        self.minimum = real_number("minimum", minimum, at_least=0)
        self._was_above = False

    def attach(self, trainer: Trainer, event: Event = Events.ITERATION_COMPLETED) -> RemovableEventHandle:
        """Checks the rates at `event`, and before the first update.

        Raises:
            ValueError: `optimizer` is not the trainer's.
        """
        refuse_other_optimizer(trainer.optimizers, self.optimizer)
        trainer.on_enter.append(self)
        return trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Checks the rates that the next update would use."""
        above = any(float(group["lr"]) > self.minimum for group in self.optimizer.param_groups)
        if self._was_above and not above:
            if collectives.is_main_rank():
                _logger.warning(
                    f"update {trainer.state.iteration}: MinLearningRate ends the run: no rate is above "
                    f"minimum={self.minimum:g}; to continue, give it a lower one"
                )
            trainer.terminate(agreed=not trainer.replicas.are_elastic)  # each replica has rates of its own
        self._was_above = self._was_above or above

    def state_dict(self) -> dict[str, Any]:
        """Whether the rate has been above the minimum."""
        return {"was_above": self._was_above}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores it.

        Raises:
            ValueError: something in it is not what `state_dict()` gives.
        """
        check_fields("MinLearningRate", state_dict, {"was_above": FLAG})
        self._was_above = state_dict["was_above"]
