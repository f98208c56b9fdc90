"""Learning-rate schedules that follow the steps that moved the parameters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ignite.engine import Events, RemovableEventHandle
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LRScheduler,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from ignite_train.arguments import describe
from ignite_train.events import Event, TrainEvents
from ignite_train.handler import Handler
from ignite_train.loop.dispatch import attached
from ignite_train.model.learning_rates import are_of
from ignite_train.model.warm_up_schedule import WarmUpSchedule
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["LearningRateSchedule"]

_logger = logging.getLogger(__name__)
_LENGTHS: dict[type[LRScheduler], tuple[str, str]] = {
    CosineAnnealingLR: ("T_max", "its learning rate will rise again"),
    OneCycleLR: ("total_steps", "it will raise an error at its next step"),
    PolynomialLR: ("total_iters", "its learning rate will stay at 0"),
    WarmUpSchedule: ("total", "its learning rate will stay at its final value"),
}
"""Schedules that are made for a number of steps: the option with that number, and what happens after them."""


class LearningRateSchedule(Handler):
    """Steps one of torch's schedulers after each applied update; a skipped update does not change the learning rate.

    It calls the scheduler's own `step()`: Ignite's wrapper computes the rates of many schedulers wrongly with current torch.
    If the limit of a finished run is raised beyond its schedule, a warning says what the schedule will do.

    Args:
        scheduler: any scheduler of `torch.optim.lr_scheduler` whose `step` needs no argument, counted in steps.

    Raises:
        TypeError: `scheduler` is not one of these, or needs a score.

    Example:
        >>> import torch
        >>> from ignite_train import create_trainer
        >>> from ignite_train.handlers import LearningRateSchedule
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        >>> handle = LearningRateSchedule(schedule).attach(trainer)
        >>> state = trainer.run([torch.ones(8, 3)] * 4, max_epochs=1)
        >>> schedule.get_last_lr()
        [0.025]
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "scheduler must not be ReduceLROnPlateau, which needs a score; attach "
                "ReduceOnPlateau(evaluator, scheduler), which steps it after each evaluation"
            )
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(f"scheduler must be a scheduler of torch.optim.lr_scheduler, got {describe(scheduler)}")
        self.scheduler = scheduler

    def attach(self, trainer: Trainer, event: Event = TrainEvents.STEP_COMPLETED) -> RemovableEventHandle:
        """Steps the schedule at `event`.

        Raises:
            ValueError: the schedule is of another optimizer than that of `trainer`, or would be stepped twice in each update.
        """
        if any(
            isinstance(other, LearningRateSchedule) and other.scheduler is self.scheduler for _, other, _ in attached(trainer)
        ):
            raise ValueError(
                f"scheduler must be attached once, got a {type(self.scheduler).__name__} that is attached already and would be "
                "stepped twice; remove the first handler, or make a new trainer and a new scheduler"
            )
        if not are_of(trainer._stateful_parts, self.scheduler.optimizer):
            raise ValueError(
                f"scheduler must be of the trainer's optimizer, got a {type(self.scheduler).__name__} of another "
                f"{type(self.scheduler.optimizer).__name__}; build it with the optimizer that create_trainer was given"
            )
        trainer.add_event_handler(Events.STARTED, self._warn_of_the_end)
        return trainer.add_event_handler(event, self)

    def __call__(self) -> None:
        """Steps the schedule."""
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The state of the scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads it into the scheduler."""
        self.scheduler.load_state_dict(dict(state_dict))

    def _warn_of_the_end(self, trainer: Trainer) -> None:
        """Warns what the schedule does after its last step, if a finished run continues there."""
        state = trainer.state
        for scheduler in _parts(self.scheduler) if state.iteration > 0 and collectives.is_main_rank() else ():
            name, consequence = _LENGTHS.get(type(scheduler), ("", ""))
            length = vars(scheduler).get(name)
            if length is not None and length - state.num_skipped <= scheduler.last_epoch <= length:
                _logger.warning(
                    f"the schedule is at its end ({type(scheduler).__name__}: step {scheduler.last_epoch} of {name}={length}, "
                    f"which a checkpoint restores) and the run continues: {consequence}; leave the schedule out to keep the "
                    "present learning rate, or train from the beginning with a schedule for the whole length"
                )


def _parts(scheduler: LRScheduler) -> list[LRScheduler]:
    """The schedules that determine the rate from now on."""
    if isinstance(scheduler, SequentialLR):
        return _parts(scheduler._schedulers[-1])
    if isinstance(scheduler, ChainedScheduler):
        return [part for each in scheduler._schedulers for part in _parts(each)]
    return [scheduler]
