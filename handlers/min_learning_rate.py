"""Stopping when the schedule has run out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignite.engine import Events, RemovableEventHandle
from torch.optim import Optimizer

from ignite_train.arguments import describe, real_number
from ignite_train.events import Event
from ignite_train.handler import Handler
from ignite_train.model.learning_rates import are_of
from ignite_train.trainer import Trainer

__all__ = ["MinLearningRate"]


class MinLearningRate(Handler):
    """Ends the run before the first update whose learning rate would be at most `minimum` in all parameter groups.

    A warm-up that starts lower does not count: the rate must have been above `minimum` once. Rates follow applied updates,
    which all ranks decide alike, so that all of them stop here together. A run that is resumed past its end adds no update.

    Args:
        optimizer: whose rates are watched.
        minimum: the rate to stop at.

    Example:
        >>> from ignite_train.handlers import MinLearningRate
        >>> trainer, optimizer = getfixture("trainer"), getfixture("optimizer")
        >>> handle = MinLearningRate(optimizer, minimum=1e-6).attach(trainer)
    """

    def __init__(self, optimizer: Optimizer, *, minimum: float) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {describe(optimizer)}")
        self.optimizer = optimizer
        self.minimum = real_number("minimum", minimum, at_least=0)
        self._was_above = False

    def attach(self, trainer: Trainer, event: Event = Events.ITERATION_COMPLETED) -> RemovableEventHandle:
        """Looks at the rates at `event`, and before the first update.

        Raises:
            ValueError: it watches another optimizer than that of `trainer`.
        """
        if not are_of(trainer._stateful_parts, self.optimizer):
            raise ValueError(
                f"optimizer must be the trainer's, got another {type(self.optimizer).__name__}; pass the one that "
                "create_trainer was given"
            )
        trainer.add_event_handler(Events.STARTED, self)
        return trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Looks at the rates that the next update would use."""
        above = any(float(group["lr"]) > self.minimum for group in self.optimizer.param_groups)
        if self._was_above and not above:
            trainer.terminate(agreed=True)
        self._was_above = self._was_above or above

    def state_dict(self) -> dict[str, Any]:
        """Whether the rate has been above the minimum."""
        return {"was_above": self._was_above}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes it over."""
        self._was_above = state_dict["was_above"]
