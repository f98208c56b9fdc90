"""Learning-rate schedules that follow the steps that moved the parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from ignite.engine import Events, RemovableEventHandle
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from ignite_train.arguments import describe
from ignite_train.data.description import length_of
from ignite_train.engine.dispatch import attached
from ignite_train.events import Event, TrainEvents
from ignite_train.internals.of_torch import HAS_STEPPED, MILESTONES, parts_of_schedule
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.learning_rates import refuse_other_optimizer
from ignite_train.model.load_schedule import load_schedule
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
_REMEDY = (
    "to begin a schedule from here, give its handler another name, as in handler.saved_as = 'second'; to keep the present "
    "learning rate, attach none"
)
_BY_EPOCH = Events.EPOCH_STARTED, Events.EPOCH_COMPLETED
_ALMOST_NOTHING = 1e-6  # of the first rate


class LearningRateSchedule(Handler):
    """Steps one of torch's schedulers after each applied update; a skipped update does not change the learning rate.

    It calls the scheduler's own `step()`: Ignite's wrapper computes the rates of many schedulers wrongly with current torch.
    A warning tells what the schedule will do if it is made for at most half of the run's updates, as one whose length was
    counted in epochs is; if it is made for its micro-batches, where an update has several; if its rate falls to almost nothing
    by steps of an epoch; if the limit of a finished run is raised beyond it; and if something else steps it as well.

    Args:
        scheduler: any scheduler of `torch.optim.lr_scheduler` whose `step` needs no argument, counted in steps.

    Raises:
        TypeError: `scheduler` is not one of these, or needs a score.

    Example:
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        >>> handle = LearningRateSchedule(schedule).attach(trainer)
        >>> state = trainer.run(data, max_epochs=1)
        >>> schedule.get_last_lr()
        [0.025]
    """

    of_one_trainer = True

    def __init__(self, scheduler: LRScheduler) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "scheduler must not be ReduceLROnPlateau, which needs a score; attach "
                "ReduceOnPlateau(evaluator, scheduler), which steps it after each evaluation"
            )
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(f"scheduler must be a scheduler of torch.optim.lr_scheduler, got {describe(scheduler)}")
        self.scheduler = scheduler
        self._event: Event = TrainEvents.STEP_COMPLETED
        self._is_restored = False
        self._last_step: int | None = None  # as this handler has left it; None where it is not known, or others step it too

    def attach(self, trainer: Trainer, event: Event = TrainEvents.STEP_COMPLETED) -> RemovableEventHandle:
        """Steps the schedule at `event`.

        Raises:
            ValueError: the schedule is of another optimizer than that of `trainer`, or would be stepped twice in each update,
                or another schedule of its kind changes the rates of the same optimizer. When the run starts or resumes: it is a
                `OneCycleLR`, which cannot be stepped as often as the run will do it.
        """
        self._refuse_a_second(trainer)
        refuse_other_optimizer(trainer.optimizers, self.scheduler)
        self._event = event
        trainer.add_event_handler(Events.STARTED, self._look_at_length)
        return trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer | None = None) -> None:
        """Steps the schedule, once in an epoch whose EPOCH_STARTED fires again where a run resumes within it.

        Raises:
            ValueError: the optimizer has a parameter group that the schedule cannot step, because it was added later.
        """
        if trainer is not None and self._event is Events.EPOCH_STARTED and trainer.progress.epoch_iteration > 0:
            return
        if self._last_step is not None and vars(self.scheduler)["last_epoch"] != self._last_step:
            self._warn_of_other_steps()
        try:
            self.scheduler.step()
        except (KeyError, ValueError) as error:
            if all("initial_lr" in group for group in self.scheduler.optimizer.param_groups):  # written when one is made
                raise
            raise ValueError(
                f"the optimizer has a parameter group that its {type(self.scheduler).__name__} was not made for, since it was "
                "added later; give the optimizer all groups before the schedule is made: their parameters may be frozen until "
                "they train"
            ) from error
        if self._last_step is not None:
            self._last_step = vars(self.scheduler)["last_epoch"]

    def state_dict(self) -> dict[str, Any]:
        """The state of the scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads it into the scheduler."""
        load_schedule(self.scheduler, state_dict)
        self._is_restored = True
        if self._last_step is not None:  # a state is put back once more after handlers that may have stepped it
            self._last_step = vars(self.scheduler)["last_epoch"]
        # An earlier process has made the steps, which torch would miss where it resumes at the end of the first epoch.
        vars(self.scheduler.optimizer)[HAS_STEPPED] = True

    def _refuse_a_second(self, trainer: Trainer) -> None:
        """Refuses the same scheduler, and one of its kind: a cell of a notebook was run again. Warns of another kind."""
        kind = type(self.scheduler)
        for _, other, _ in attached(trainer):
            if not isinstance(other, LearningRateSchedule):
                continue
            if other.scheduler is self.scheduler:
                raise ValueError(
                    f"scheduler must be attached once, got a {kind.__name__} that is attached already and would be "
                    "stepped twice; remove the first handler, or make a new trainer and a new scheduler"
                )
            if other.scheduler.optimizer is not self.scheduler.optimizer:
                continue
            if type(other.scheduler) is kind:
                raise ValueError(
                    f"scheduler must be the only {kind.__name__} of its optimizer, got a second, and both would change the "
                    "learning rate; make the trainer again before you attach another, or combine both by ChainedScheduler"
                )
            if collectives.is_main_rank():
                _logger.warning(
                    f"the schedules {type(other.scheduler).__name__} and {kind.__name__} both change the learning rate of one "
                    "optimizer; combine them by ChainedScheduler, or one after the other by SequentialLR, or leave one out"
                )

    def _look_at_length(self, trainer: Trainer) -> None:
        """Compares the schedule with the run when it starts, and notes where the schedule stands."""
        self._last_step = vars(self.scheduler).get("last_epoch")
        # At other events a skipped update does not hold the schedule back.
        num_skipped = trainer.state.num_skipped if self._event is TrainEvents.STEP_COMPLETED else 0
        for scheduler, last_step in _parts(self.scheduler, self._steps_to_come(trainer)):
            if trainer.state.iteration == 0 or (self._last_step == 0 and not self._is_restored):
                _compare_length(scheduler, last_step, trainer, by_epoch=self._event in _BY_EPOCH)
                continue
            if isinstance(scheduler, OneCycleLR) and last_step is not None:
                _refuse_more_steps(scheduler, last_step)
            _warn_of_the_end(scheduler, num_skipped, last_step)

    def _steps_to_come(self, trainer: Trainer) -> int | None:
        """How often the rest of the run steps the schedule, if no update is skipped; None where that cannot be known."""
        state, progress = trainer.state, trainer.progress
        epochs = state.max_epochs and state.max_epochs - state.epoch + progress.epoch_open  # with the open one
        if self._event is Events.EPOCH_STARTED:
            return epochs and epochs - (progress.epoch_started or progress.epoch_iteration > 0)
        if self._event is Events.EPOCH_COMPLETED:
            return epochs
        if self._event is not TrainEvents.STEP_COMPLETED and self._event is not Events.ITERATION_COMPLETED:
            return None
        return None if trainer.expected_updates is None else trainer.expected_updates - state.iteration

    def _warn_of_other_steps(self) -> None:
        if collectives.is_main_rank():
            name = type(self.scheduler).__name__
            _logger.warning(
                f"the schedule {name} is at step {vars(self.scheduler)['last_epoch']} and LearningRateSchedule has left it at "
                f"{self._last_step}: something else steps it too, so the learning rate changes faster than the schedule says; "
                "leave scheduler.step() to the handler"
            )
        self._last_step = None


def _refuse_more_steps(scheduler: OneCycleLR, last_step: int) -> None:
    """Raises ValueError if the rest of a run would step a schedule beyond its length, which a checkpoint may have restored."""
    if scheduler.total_steps < last_step:
        place = f"step {scheduler.last_epoch} of total_steps={scheduler.total_steps}"
        raise ValueError(
            f"OneCycleLR is at {place} and will be at step {last_step} at the end of this run: it will raise an error, and a "
            f"checkpoint restores its length; end the run earlier; {_REMEDY}"
        )


def _warn_of_the_end(scheduler: LRScheduler, num_skipped: int, last_step: int | None) -> None:
    """Warns what a schedule does after its last step, if a run continues there, or will be beyond for half of its updates."""
    name, consequence = _LENGTHS.get(type(scheduler), ("", ""))
    length, step = vars(scheduler).get(name), scheduler.last_epoch
    if length is None or step > length or last_step == step or not collectives.is_main_rank():  # no step is left
        return
    where = f"({type(scheduler).__name__}: step {step} of {name}={length}, which a checkpoint restores)"
    if length - num_skipped <= step:
        _logger.warning(f"the schedule is at its end {where} and the run continues: {consequence}; {_REMEDY}")
    elif last_step is not None and 2 * length <= last_step:
        _logger.warning(f"the schedule ends early {where}, and the run at step {last_step}: then {consequence}; {_REMEDY}")


def _compare_length(scheduler: LRScheduler, steps: int | None, trainer: Trainer, *, by_epoch: bool) -> None:
    """Warns of a schedule that ends in the first half of a run, or not at all, as one that counts something else does.

    Raises:
        ValueError: the schedule cannot be stepped as often as the run will do it.
    """
    name, length, consequence = _length(scheduler, steps or 0, trainer.state.max_epochs)
    if length is None or steps is None:
        return
    kind, remedy = type(scheduler).__name__, ", or step it once an epoch, by attach(trainer, Events.EPOCH_COMPLETED)"
    if length > steps and type(scheduler) in _LENGTHS:
        what = _what_it_counts(length, trainer, by_epoch=by_epoch)
        if what is None:
            return
        consequence = f"that is the number of its {what}"
        remedy = ", and leave the event out of attach(trainer), which then steps it once an update" if by_epoch else ""
    elif length >= steps or (2 * length > steps and not isinstance(scheduler, OneCycleLR)):
        return
    total = "max_iters= of trainer.run" if trainer.replicas.are_elastic else "trainer.total_updates(loader, max_epochs=...)"
    told = (
        f"{kind} has {name}={length} and will be stepped {steps} times in this run: {consequence}; count in updates, by {total}"
    )
    if isinstance(scheduler, OneCycleLR) and length < steps:
        raise ValueError(told + remedy)
    if collectives.is_main_rank():
        _logger.warning(told + remedy)


def _what_it_counts(length: int, trainer: Trainer, *, by_epoch: bool) -> str | None:
    """Says whether the steps of a schedule, which is stepped less often, are the updates or the micro-batches of the run."""
    if by_epoch and length == trainer.expected_updates:
        return "updates"
    micro_batches, epochs = length_of(trainer.state.dataloader), trainer.state.max_epochs
    is_theirs = micro_batches is not None and epochs is not None and length == micro_batches * epochs
    is_alone = trainer.config.get("accumulation_steps", 1) == 1
    return "micro-batches, of which an update takes several" if is_theirs and not is_alone else None


def _length(scheduler: LRScheduler, steps: int, max_epochs: int | None) -> tuple[str, Any, str]:
    """The option with the length of a schedule, the length, and what happens after it; None as length of what is usual."""
    if isinstance(scheduler, MultiStepLR):
        # Milestones early in a run are usual; those that all lie within the number of epochs are most likely epochs.
        last = max(scheduler.milestones, default=None)
        is_usual = max_epochs is None or last is None or last > max_epochs
        return "milestones", None if is_usual else last, "its last milestone will be passed early"
    if type(scheduler) in (StepLR, ExponentialLR):
        name, size = ("step_size", scheduler.step_size) if isinstance(scheduler, StepLR) else ("gamma", 1)
        gamma = vars(scheduler)["gamma"]
        part = gamma ** (steps // size) if 0 < gamma < 1 and steps > 0 else 1.0  # a rise may overflow
        is_usual = part >= _ALMOST_NOTHING or steps <= (max_epochs or 0)
        return name, None if is_usual else vars(scheduler)[name], f"its learning rate will fall to {part:.0e} of the first one"
    if type(scheduler) is LinearLR:  # most often a warm-up, which ends early
        falls_to_0 = scheduler.end_factor == 0
        return "total_iters", scheduler.total_iters if falls_to_0 else None, "its learning rate will stay at 0"
    name, consequence = _LENGTHS.get(type(scheduler), ("", ""))
    return name, vars(scheduler).get(name), consequence


def _parts(scheduler: LRScheduler, steps: int | None) -> Iterator[tuple[LRScheduler, int | None]]:
    """The schedules that determine the rate from now on, each with the step where `steps` more will leave it."""
    parts = parts_of_schedule(scheduler)
    if isinstance(scheduler, SequentialLR):
        waits = max(0, vars(scheduler)[MILESTONES][-1] - scheduler.last_epoch) if len(parts) > 1 else 0
        yield from _parts(parts[-1], steps if steps is None else steps - waits)
    elif isinstance(scheduler, ChainedScheduler):
        for part in parts:
            yield from _parts(part, steps)
    else:
        # The parts of a sequence stand at -1 before their turn.
        yield scheduler, steps if steps is None else steps + max(0, scheduler.last_epoch)
