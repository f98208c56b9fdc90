"""The moments inside one update that a handler can attach to."""

from __future__ import annotations

from enum import EnumMeta
from typing import TYPE_CHECKING, Any

from ignite.engine import CallableEventWithFilter, EventEnum, Events, EventsList

from ignite_train.arguments import describe, did_you_mean

__all__ = ["EVENT_COUNTERS", "Event", "EveryNth", "TrainEvents", "every", "only"]

_LONG = 50  # updates between two lines, so that a short run has too few of them

Event = CallableEventWithFilter | EventsList
"""An event, an event with a filter (`X(every=10)`), or several (`X | Y`)."""


class _Named(EnumMeta):
    """Answers an event that is another enum's, or is misspelt."""

    if not TYPE_CHECKING:  # or else each name would be known

        def __getattr__(cls, name: str) -> Any:
            hint = "" if name.startswith("_") else did_you_mean(name, cls.__members__)
            if name in Events.__members__:
                hint = f"; write Events.{name} of ignite.engine"
            raise AttributeError(f"{cls.__name__} has no event {name!r}{hint}", name=name, obj=cls)


class TrainEvents(EventEnum, metaclass=_Named):
    """The moments inside one update, in the order in which they happen.

    =======================  =====================  ========================================================================
    event                    filters count          what holds when it fires
    =======================  =====================  ========================================================================
    ``MICRO_BATCH_STARTED``  ``num_micro_batches``  gradients are accumulating; this micro-batch has not run
    ``FORWARD_COMPLETED``    ``num_micro_batches``  ``state.forward_output`` is known, no backward yet
    ``BACKWARD_COMPLETED``   ``num_micro_batches``  this micro-batch's gradients are added, times the loss scale, on this rank;
                                                    after the last one the hooks of DDP and FSDP2 have reduced them. Not fired
                                                    for a micro-batch that ``on_out_of_memory="skip"`` has dropped
    ``GRADIENTS_REDUCED``    ``iteration``          ``.grad`` of each parameter is the mean gradient, over ranks too, and may be
                                                    changed in place; its norm is taken after this event, and the update
                                                    skipped if that is not finite. Not fired without samples, and if the loss
                                                    scale has overflowed. Costs a pass over memory if it has a handler
    ``OUT_OF_MEMORY``        ``iteration``          a micro-batch was dropped or split on some rank; not fired otherwise
    ``GRADIENTS_READY``      ``iteration``          reduced over ranks, norm known in ``state.update_output``, not yet clipped;
                                                    read them with ``trainer.gradients()``
    ``STEP_COMPLETED``       ``num_steps``          the parameters moved; gradients are cleared
    ``STEP_SKIPPED``         ``num_skipped``        overflow, non-finite or no samples: nothing moved; gradients are cleared
    =======================  =====================  ========================================================================

    Exactly one of ``STEP_COMPLETED`` and ``STEP_SKIPPED`` fires in an update that no exception ends. Ignite's own events keep
    their meaning: ``ITERATION_COMPLETED`` is after the update. Ignite compares events by *name*: an event of yours that shares
    a name with one of these is the same event.
    """

    MICRO_BATCH_STARTED = "micro_batch_started"
    FORWARD_COMPLETED = "forward_completed"
    BACKWARD_COMPLETED = "backward_completed"
    GRADIENTS_REDUCED = "gradients_reduced"
    GRADIENTS_READY = "gradients_ready"
    STEP_COMPLETED = "step_completed"
    STEP_SKIPPED = "step_skipped"
    OUT_OF_MEMORY = "out_of_memory"

    def __repr__(self) -> str:
        return str(self)


class EveryNth:
    """A filter as of `event(every=number)`, whose number can be read: so the trainer need not call it.

    Args:
        number: n.
        early: counts at which the event fires too.
    """

    def __init__(self, number: int, early: frozenset[int] = frozenset()) -> None:
        self.number, self.early = number, early

    def __call__(self, engine: Any, count: int) -> bool:  # noqa: ARG002  # as Ignite calls it
        """Whether the event fires."""
        return count % self.number == 0 or count in self.early


class _EveryNthEvent(CallableEventWithFilter):
    """An event whose filter can be read in a signature."""

    def __init__(self, number: int, event: CallableEventWithFilter, early: frozenset[int]) -> None:
        event(every=number)  # raises an error unless it is a number
        super().__init__(event.value, EveryNth(number, early), event.name)
        self._shown = f"{event}(every={number})"

    def __repr__(self) -> str:
        return self._shown


def every(number: int, event: CallableEventWithFilter, *, early: bool = False) -> CallableEventWithFilter:
    """Returns `event(every=number)`, printed as such: for defaults, which `help()` shows.

    Args:
        number: n.
        event: without a filter.
        early: from a number of 50 on, it also fires at 1, 2, 5, 10, 20, 50, ... below it, so that a short run has curves.
    """
    series = (digit * 10**power for power in range(len(str(number))) for digit in (1, 2, 5))
    below = (count for count in series if count < number)
    return _EveryNthEvent(number, event, frozenset(below if early and number >= _LONG else ()))


def only(name: str | None, event: CallableEventWithFilter = TrainEvents.STEP_COMPLETED) -> CallableEventWithFilter:
    """Returns `event` for the updates of one name alone, which `trainer.update(..., name=...)` gives; None: those without one.

    Attach to it a handler that must follow the ordinary updates only, and not updates with another forward:
    `ModelEMA().attach(trainer, only(None))`.

    Args:
        name: of the updates.
        event: at which the record is there: GRADIENTS_REDUCED or a later one.

    Raises:
        TypeError: `name` is not a string, or `event` not an event.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, or None, got {describe(name)}")
    if not isinstance(event, CallableEventWithFilter):
        raise TypeError(f"event must be an event, such as TrainEvents.STEP_COMPLETED, got {describe(event)}")

    def is_named(engine: Any, _: int) -> bool:
        record = engine.state.update_output
        return record is not None and record.name == name

    return event(event_filter=is_named)


EVENT_COUNTERS: dict[str | CallableEventWithFilter, str] = {
    Events.GET_BATCH_STARTED: "iteration",
    Events.GET_BATCH_COMPLETED: "iteration",
    Events.ITERATION_STARTED: "iteration",
    Events.ITERATION_COMPLETED: "iteration",
    Events.EPOCH_STARTED: "epoch",
    Events.EPOCH_COMPLETED: "epoch",
    Events.STARTED: "epoch",
    Events.COMPLETED: "epoch",
    TrainEvents.MICRO_BATCH_STARTED: "num_micro_batches",
    TrainEvents.FORWARD_COMPLETED: "num_micro_batches",
    TrainEvents.BACKWARD_COMPLETED: "num_micro_batches",
    TrainEvents.GRADIENTS_REDUCED: "iteration",
    TrainEvents.GRADIENTS_READY: "iteration",
    TrainEvents.STEP_COMPLETED: "num_steps",
    TrainEvents.STEP_SKIPPED: "num_skipped",
    TrainEvents.OUT_OF_MEMORY: "iteration",
}
"""The attribute of the state whose value an event's filter (`every=`, `once=`, ...) looks at."""
