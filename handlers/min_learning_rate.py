"""Ending a run when the learning rate has fallen to a minimum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignite.engine import Events, RemovableEventHandle
from torch.optim import Optimizer

from ignite_train.arguments import FLAG, check_fields, describe, real_number
from ignite_train.events import Event
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.learning_rates import are_of
from ignite_train.trainer import Trainer

__all__ = ["MinLearningRate"]


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
        >>> import torch
        >>> from ignite_train import create_trainer
        >>> from ignite_train.handlers import LearningRateSchedule, MinLearningRate
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
        >>> handle = LearningRateSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)).attach(trainer)
        >>> handle = MinLearningRate(optimizer, minimum=2e-3).attach(trainer)
        >>> trainer.run([torch.ones(8, 3)] * 4, max_epochs=1).iteration  # with learning rates 0.1 and 0.01
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
            ValueError: `optimizer` is not that of `trainer`.
        """
        if not are_of(trainer.optimizers, self.optimizer):
            raise ValueError(
                f"optimizer must be the trainer's, got another {type(self.optimizer).__name__}; pass the one that "
                "create_trainer was given"
            )
        trainer.on_enter.append(self)
        return trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Checks the rates that the next update would use."""
        above = any(float(group["lr"]) > self.minimum for group in self.optimizer.param_groups)
        if self._was_above and not above:
            trainer.terminate(agreed=True)
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
