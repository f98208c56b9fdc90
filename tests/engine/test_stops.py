"""The law of stops: an update whose batch was asked for is made and counted, and only then a run or an epoch ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_train import ForwardOutput, Trainer, TrainEvents, UpdateOptions, create_evaluator, create_trainer
from ranks import run_ranks

STOPS = ("terminate", "terminate_epoch", "interrupt")
IN_UPDATE = {  # the events of an update of 2 micro-batches, and the update in which each fires for the count n
    Events.GET_BATCH_STARTED: lambda n: n + 1,
    Events.GET_BATCH_COMPLETED: lambda n: n + 1,
    Events.ITERATION_STARTED: lambda n: n,
    TrainEvents.MICRO_BATCH_STARTED: lambda n: (n + 1) // 2,
    TrainEvents.FORWARD_COMPLETED: lambda n: (n + 1) // 2,
    TrainEvents.BACKWARD_COMPLETED: lambda n: (n + 1) // 2,
    TrainEvents.GRADIENTS_REDUCED: lambda n: n,
    TrainEvents.GRADIENTS_READY: lambda n: n,
    TrainEvents.STEP_COMPLETED: lambda n: n,
    Events.ITERATION_COMPLETED: lambda n: n,
}
AFTER_REDUCTION = list(IN_UPDATE)[-4:]  # what one rank asks alone in these travels with the next update
PER_EPOCH, EPOCHS = 3, 3  # updates, epochs
LAST = PER_EPOCH * EPOCHS


class Unsized:
    """A loader without a length."""

    def __init__(self, data: list[Tensor]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.data)


def micro_batches(number: int = 2 * PER_EPOCH) -> list[Tensor]:
    return [torch.full((1, 1), float(value)) for value in range(number)]


def make(steps: Any = 2) -> tuple[Trainer, list[float], Counter[tuple[str, int]]]:
    """A trainer, what it has trained on, and how often each event has fired at each count of its filter."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    seen: list[float] = []

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        seen.append(float(x))
        return ForwardOutput(model(x).sum() * 1e-3, 1)

    options = UpdateOptions(reduction="explicit") if idist.get_world_size() > 1 else UpdateOptions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=steps, protect=False, options=options)
    trainer.interrupt_resume_enabled = True
    fired: Counter[tuple[str, int]] = Counter()
    for event in (*IN_UPDATE, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED):
        trainer.add_event_handler(event, partial(_count, trainer, event, fired))
    return trainer, seen, fired


def _count(trainer: Trainer, event: Any, fired: Counter[tuple[str, int]]) -> None:
    fired[event.name, trainer.state.get_event_attrib_value(event)] += 1


def run_to_the_end(trainer: Trainer, data: Iterable[Any]) -> list[int]:
    """Calls `run` until the last epoch is complete. Gives the updates that were done at the end of each call."""
    ends: list[int] = []
    complete: list[int] = []
    trainer.add_event_handler(Events.COMPLETED, lambda: complete.append(trainer.state.iteration))
    while not complete or trainer.should_terminate:
        trainer.run(data, max_epochs=EPOCHS)
        ends.append(trainer.state.iteration)
        assert len(ends) < 3 * LAST, "the runs do not get on"
    return ends


def asks(event: Any, stop: str, **how: Any) -> tuple[list[int], list[float], Counter[tuple[str, int]], list[int]]:
    """What becomes of runs in which `stop` is asked for at `event`: the ends of the runs, data, events, ends of epochs."""
    trainer, seen, fired = make()
    epochs: list[int] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: epochs.append(trainer.state.iteration))
    trainer.add_event_handler(event, lambda: getattr(trainer, stop)(**how))
    return run_to_the_end(trainer, micro_batches()), seen, fired, epochs


def check(event: Any, stop: str, update: int, result: Any) -> None:
    """The law, for a stop that comes after `update`."""
    ends, seen, fired, epochs = result
    whole = list(range(PER_EPOCH, LAST + 1, PER_EPOCH))
    if stop == "terminate_epoch":
        cut = update % PER_EPOCH
        first = [end for end in whole if end < update] + [update]
        whole = first + [update + PER_EPOCH * later for later in range(1, EPOCHS + 1 - len(first))]
        assert ends == [whole[-1]]
        assert len(seen) == 2 * (LAST - (PER_EPOCH - cut if cut else 0)), (event, stop)
    else:
        assert ends == [update, LAST], (event, stop)
        assert seen == EPOCHS * [float(number) for number in range(2 * PER_EPOCH)]
    assert epochs == whole, (event, stop)
    assert set(fired.values()) == {1}, (event, stop, fired)


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("event", IN_UPDATE, ids=lambda event: event.name)
def test_the_update_in_which_a_stop_is_asked_for_is_made_and_counted(event: Any, stop: str) -> None:
    """And each event fires once for each count, over all calls of run; no filter meets the same count again."""
    per_update = 2 if IN_UPDATE[event](4) == 2 else 1
    for number in range(1, per_update * (LAST - 1) + 1):
        update = IN_UPDATE[event](number)
        if update < LAST:
            check(event, stop, update, asks(event(once=number), stop))


@pytest.mark.parametrize("stop", STOPS)
def test_asked_for_before_the_first_update_a_stop_comes_after_it(stop: str) -> None:
    """In EPOCH_STARTED and STARTED there is no update that could have been meant, and no epoch ends without one."""
    for epoch in range(1, EPOCHS + 1):
        check(Events.EPOCH_STARTED, stop, (epoch - 1) * PER_EPOCH + 1, asks(Events.EPOCH_STARTED(once=epoch), stop))
    check(Events.STARTED, stop, 1, asks(Events.STARTED(event_filter=_first()), stop))


def _first() -> Any:
    """A filter that lets an event through once, whatever its count."""
    left = [True]
    return lambda engine, count: bool(left and left.pop())


@pytest.mark.slow
def test_asked_for_in_every_event_a_stop_still_lets_each_run_get_on() -> None:
    """Each call does one update, or ends the epoch whose last update the call before has done."""
    for event in (*IN_UPDATE, Events.EPOCH_STARTED, Events.STARTED):
        trainer, seen, fired = make()
        trainer.add_event_handler(event, trainer.terminate)
        data, ends = micro_batches(), []
        while trainer.state.epoch < EPOCHS or trainer.progress.epoch_open:
            trainer.run(data, max_epochs=EPOCHS)
            ends.append(trainer.state.iteration)
            assert len(ends) < 3 * LAST, f"runs that are stopped in {event} do not get on"
        assert seen == EPOCHS * [float(number) for number in range(2 * PER_EPOCH)]
        assert set(fired.values()) == {1}, (event, fired)


@pytest.mark.parametrize("event", list(IN_UPDATE), ids=lambda event: event.name)
def test_no_epoch_ends_without_an_update(event: Any) -> None:
    """`terminate_epoch` in each update, and at one number of it that is compared by hand, as Ignite's own tests do."""
    trainer, _, fired = make()
    trainer.add_event_handler(event, trainer.terminate_epoch)
    trainer.run(micro_batches(), max_epochs=EPOCHS)
    assert trainer.state.iteration == EPOCHS
    assert set(fired.values()) == {1}

    trainer, _, _ = make()
    trainer.add_event_handler(event, lambda: trainer.state.iteration == 2 and trainer.terminate_epoch())
    trainer.run(micro_batches(), max_epochs=EPOCHS)
    assert trainer.state.iteration in (2 + 2 * PER_EPOCH, 3 + 2 * PER_EPOCH)  # GET_BATCH_* are of the update after


def test_an_epoch_without_data_is_an_error_whatever_was_asked_for() -> None:
    """Not an epoch that a stop has ended."""
    trainer, _, _ = make()
    trainer.add_event_handler(Events.GET_BATCH_STARTED, trainer.terminate_epoch)
    with pytest.raises(ValueError, match="must give at least one micro-batch"):
        trainer.run(Unsized([]), max_epochs=1)


@pytest.mark.parametrize("stop", ["terminate", "interrupt"])
def test_a_stop_during_a_fetch_that_finds_the_end_of_the_data_comes_after_the_epoch(stop: str) -> None:
    """No update follows in that epoch, so it is complete, and the next run begins the next one."""
    trainer, seen, _ = make()
    completed: list[int] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: completed.append(trainer.state.iteration))
    in_last_fetch = Events.GET_BATCH_STARTED(event_filter=_first_at(PER_EPOCH))
    trainer.add_event_handler(in_last_fetch, lambda: getattr(trainer, stop)())
    data = Unsized(micro_batches())
    trainer.run(data, max_epochs=EPOCHS)
    assert (trainer.state.iteration, completed) == (PER_EPOCH, [PER_EPOCH])
    trainer.run(data, max_epochs=EPOCHS)
    assert completed == [PER_EPOCH, 2 * PER_EPOCH, LAST]
    assert seen == EPOCHS * [float(number) for number in range(2 * PER_EPOCH)]


def _first_at(number: int) -> Any:
    left = [True]
    return lambda engine, count: count == number and bool(left and left.pop())


@pytest.mark.parametrize("event", [Events.EPOCH_STARTED, Events.ITERATION_STARTED], ids=["epoch-started", "in-the-update"])
def test_an_update_that_failed_is_repeated_before_the_epoch_ends(event: Any) -> None:
    """What EPOCH_STARTED has asked for is not forgotten, since it does not fire again; and no epoch ends without an update."""
    trainer, _, _ = make()
    trainer.add_event_handler(event(event_filter=_first()), trainer.terminate_epoch)
    fails = [True]

    @trainer.on(TrainEvents.GRADIENTS_READY(once=1))
    def fail() -> None:
        if fails and fails.pop():
            raise OSError("on purpose")

    with pytest.raises(OSError, match="on purpose"):
        trainer.run(micro_batches(), max_epochs=1)
    trainer.run(micro_batches(), max_epochs=1)
    assert trainer.state.iteration == 1


def _on_ranks() -> None:
    """All stops in all events, as in one process, though one rank alone asks."""
    alone = idist.get_rank() == 1
    for stop in STOPS:
        for event, update_of in IN_UPDATE.items():
            number = 3
            if event not in AFTER_REDUCTION:
                result = asks(event(once=number if alone else 1000), stop)
            else:
                result = asks(event(once=number), stop, agreed=True)
            check(event, stop, update_of(number), result)
        started = Events.EPOCH_STARTED(once=2 if alone else 1000)
        check(Events.EPOCH_STARTED, stop, PER_EPOCH + 1, asks(started, stop))
        never = Events.STARTED(event_filter=_first() if alone else lambda engine, count: False)
        check(Events.STARTED, stop, 1, asks(never, stop))


@pytest.mark.slow
def test_the_law_is_the_same_on_two_ranks() -> None:
    """Where one rank asks before the update's numbers have crossed, and where both ask after that."""
    run_ranks(_on_ranks)


def test_an_evaluation_ends_after_the_micro_batch_in_which_that_was_asked_for() -> None:
    """The same law holds for it."""
    for event in (Events.GET_BATCH_STARTED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED):
        evaluator = create_evaluator(nn.Linear(1, 1), lambda model, x: ForwardOutput(model(x).sum(), 1))
        evaluator.add_event_handler(event, evaluator.terminate)
        assert evaluator.run(micro_batches()).iteration == 1
