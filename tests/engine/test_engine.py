"""The engine: limits, stopping, exceptions, position in the data, events, and Ignite's own handlers on it."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import math
import pickle
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ignite.engine import Engine, EventEnum, Events, State
from ignite.handlers import (
    Checkpoint,
    DiskSaver,
    EarlyStopping,
    HandlersTimeProfiler,
    ProgressBar,
    Timer,
)
from torch import nn
from torch.utils.data import DataLoader

from ignite_train import TrainEvents, TrainState, UpdateOptions, create_evaluator, create_trainer
from ignite_train.arguments import describe_error
from ignite_train.engine.dispatch import stateful_handlers
from update_options import with_options


class Weight(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))


class Unsized:
    """A loader without a length."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[float]:
        return iter(self.numbers)


class Lying:
    """A loader that says it has `announced` micro-batches and gives `given`."""

    def __init__(self, announced: int, given: int) -> None:
        self.announced, self.given = announced, given

    def __len__(self) -> int:
        return self.announced

    def __iter__(self) -> Iterator[float]:
        return iter(float(number) for number in range(self.given))


SAMPLERS: dict[str, dict[str, Any]] = {
    "a list": {"sampler": [2, 0, 1, 3]},
    "a range": {"sampler": range(3, -1, -1)},
    "a list of batches": {"batch_sampler": [[2], [0], [1], [3]]},
}


class InjectedError(Exception):
    """Raised by a test on purpose."""


def along(model: Weight, number: float) -> torch.Tensor:
    """A loss that moves the weight by minus the micro-batch at a learning rate of 1: micro-batches are told apart by it."""
    return model.weight * number


def make(**arguments: Any) -> Any:
    """A trainer of one weight, and the list of the groups that it updated with."""
    model = Weight()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), along, **with_options(**arguments))
    groups: list[list[float]] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: groups.append(list(engine.state.batch)))
    return trainer, groups


def note(trainer: Any, *events: Any) -> list[str]:
    """Writes down the events as they fire, with epoch and iteration."""
    fired: list[str] = []

    def write(engine: Any, event: Any) -> None:
        fired.append(f"{event.name} {engine.state.epoch}/{engine.state.iteration}")

    for event in events:
        if event is Events.TERMINATE_SINGLE_EPOCH:
            trainer.add_event_handler(event, lambda engine, iter_counter: write(engine, Events.TERMINATE_SINGLE_EPOCH))
        else:
            trainer.add_event_handler(event, write, event)
    return fired


ENDS = (
    Events.EPOCH_STARTED,
    Events.TERMINATE_SINGLE_EPOCH,
    Events.EPOCH_COMPLETED,
    Events.TERMINATE,
    Events.INTERRUPT,
    Events.COMPLETED,
)


def counters(trainer: Any) -> tuple[int, ...]:
    state = trainer.state
    return state.epoch, state.iteration, state.num_steps, state.num_skipped, state.num_micro_batches


# --- limits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{}, {"max_epochs": 2}, {"max_iters": 3}], ids=["default", "epochs", "updates"])
def test_a_finished_run_does_nothing_and_says_so(caplog, limit):
    """Run again with the same limit, a trainer fires nothing, moves nothing, and logs which limit it is at."""
    trainer, groups = make()
    trainer.run([1.0, 2.0], **limit)
    done, fired = (counters(trainer), list(groups)), note(trainer, *Events)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        state = trainer.run([1.0, 2.0], **limit)
    assert (counters(trainer), groups, fired) == (*done, [])
    assert state is trainer.state
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("nothing to do")
    assert f"max_epochs={trainer.state.max_epochs}, max_iters={trainer.state.max_iters}" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("first", "then", "updates"),
    [
        ({}, {"max_epochs": 3}, 9),
        ({"max_epochs": 1}, {"max_iters": 5}, 5),
        ({"max_iters": 2}, {"max_iters": 7}, 7),
        ({"max_iters": 4}, {"max_epochs": 3}, 9),
        ({"max_iters": 3}, {"max_epochs": 2}, 6),
    ],
)
def test_raising_the_limit_goes_on(first, then, updates):
    """A larger limit of either kind goes on where the run ended: the groups are those of one run that never stopped."""
    whole, all_groups = make()
    whole.run([1.0, 2.0, 3.0], **then)
    trainer, groups = make()
    trainer.run([1.0, 2.0, 3.0], **first)
    trainer.run([1.0, 2.0, 3.0], **then)
    assert groups == all_groups
    assert counters(trainer) == counters(whole)
    assert trainer.state.iteration == updates


@pytest.mark.parametrize(
    ("first", "then", "numbers"),
    [
        ({"max_epochs": 3}, {"max_epochs": 2}, "32"),
        ({"max_iters": 4}, {"max_iters": 3}, "43"),
        ({"max_iters": 4}, {"max_epochs": 1}, "21"),
    ],
)
def test_lowering_the_limit_is_an_error(first, then, numbers):
    """A limit below what was done is refused with both numbers, and the run before it stays as it was."""
    trainer, _ = make()
    trainer.run([1.0, 2.0, 3.0], **first)
    before = trainer.state_dict()
    with pytest.raises(ValueError, match=next(iter(then))) as raised:
        trainer.run([1.0, 2.0, 3.0], **then)
    assert all(number in str(raised.value) for number in numbers)
    assert trainer.state_dict() == before


@pytest.mark.parametrize(
    ("max_iters", "ends"),
    [
        (2, ["EPOCH_STARTED 1/0", "COMPLETED 1/2"]),
        (3, ["EPOCH_STARTED 1/0", "EPOCH_COMPLETED 1/3", "COMPLETED 1/3"]),
        (4, ["EPOCH_STARTED 1/0", "EPOCH_COMPLETED 1/3", "EPOCH_STARTED 2/3", "COMPLETED 2/4"]),
        (6, ["EPOCH_STARTED 1/0", "EPOCH_COMPLETED 1/3", "EPOCH_STARTED 2/3", "EPOCH_COMPLETED 2/6", "COMPLETED 2/6"]),
    ],
)
def test_max_iters(max_iters, ends):
    """The limit in updates ends a run inside an epoch without EPOCH_COMPLETED, and at its edge with it."""
    trainer, groups = make(accumulation_steps=2)
    fired = note(trainer, *ENDS)
    trainer.run([1.0, 2.0, 3.0, 4.0, 5.0], max_iters=max_iters)
    assert fired == ends
    assert groups == ([[1.0, 2.0], [3.0, 4.0], [5.0]] * 2)[:max_iters]


def test_an_epoch_cut_short_is_completed_by_the_next_run():
    """A run that ended inside an epoch goes on inside it: EPOCH_COMPLETED fires once for each epoch."""
    for data in ([1.0, 2.0, 3.0], Unsized(1.0, 2.0, 3.0)):
        for cut in range(1, 6):
            trainer, groups = make()
            fired = note(trainer, Events.EPOCH_COMPLETED)
            trainer.run(data, max_iters=cut)
            trainer.run(data, max_epochs=2)
            assert fired == ["EPOCH_COMPLETED 1/3", "EPOCH_COMPLETED 2/6"]
            assert groups == [[1.0], [2.0], [3.0]] * 2


# --- stopping --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "call", "ends"),
    [
        (Events.STARTED, "terminate", ["EPOCH_STARTED 1/0", "TERMINATE 1/1", "COMPLETED 1/1"]),
        (Events.EPOCH_STARTED, "terminate", ["EPOCH_STARTED 1/0", "TERMINATE 1/1", "COMPLETED 1/1"]),
        (TrainEvents.FORWARD_COMPLETED(once=4), "terminate", ["EPOCH_STARTED 1/0", "TERMINATE 1/2", "COMPLETED 1/2"]),
        (Events.ITERATION_COMPLETED(once=2), "terminate", ["EPOCH_STARTED 1/0", "TERMINATE 1/2", "COMPLETED 1/2"]),
        (Events.ITERATION_COMPLETED(once=3), "terminate", ["EPOCH_STARTED 1/0", "TERMINATE 1/3", "COMPLETED 1/3"]),
        (Events.EPOCH_COMPLETED, "terminate", ["EPOCH_STARTED 1/0", "EPOCH_COMPLETED 1/3", "TERMINATE 1/3", "COMPLETED 1/3"]),
        (Events.ITERATION_COMPLETED(once=2), "terminate_quietly", ["EPOCH_STARTED 1/0", "TERMINATE 1/2"]),
        (TrainEvents.STEP_COMPLETED(once=2), "interrupt", ["EPOCH_STARTED 1/0", "INTERRUPT 1/2"]),
        (
            Events.ITERATION_COMPLETED(once=2),
            "terminate_epoch",
            [
                "EPOCH_STARTED 1/0",
                "TERMINATE_SINGLE_EPOCH 1/2",
                "EPOCH_COMPLETED 1/2",
                "EPOCH_STARTED 2/2",
                "EPOCH_COMPLETED 2/5",
                "COMPLETED 2/5",
            ],
        ),
        (
            TrainEvents.BACKWARD_COMPLETED(once=1),
            "terminate_epoch_quietly",
            ["EPOCH_STARTED 1/0", "TERMINATE_SINGLE_EPOCH 1/1", "EPOCH_STARTED 2/1", "EPOCH_COMPLETED 2/4", "COMPLETED 2/4"],
        ),
        (
            Events.EPOCH_COMPLETED(once=1),
            "terminate_epoch",  # it is over already
            ["EPOCH_STARTED 1/0", "EPOCH_COMPLETED 1/3", "EPOCH_STARTED 2/3", "EPOCH_COMPLETED 2/6", "COMPLETED 2/6"],
        ),
    ],
    ids=lambda value: getattr(value, "name", value if isinstance(value, str) else ""),
)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_stopping(event, call, ends, sized):
    """A request to stop is met after the running update, with the events that belong to it; the group is never cut."""
    trainer, groups = make(accumulation_steps=2)
    fired = note(trainer, *ENDS)
    calls = {
        "terminate": trainer.terminate,
        "terminate_quietly": lambda: trainer.terminate(skip_completed=True),
        "terminate_epoch": trainer.terminate_epoch,
        "terminate_epoch_quietly": lambda: trainer.terminate_epoch(skip_epoch_completed=True),
        "interrupt": trainer.interrupt,
    }
    trainer.add_event_handler(event, calls[call])  # which is called with the trainer, where it takes an argument
    numbers = (1.0, 2.0, 3.0, 4.0, 5.0)
    trainer.run(list(numbers) if sized else Unsized(*numbers), max_epochs=2)
    assert fired == ends
    assert all(group in ([1.0, 2.0], [3.0, 4.0], [5.0]) for group in groups)


@pytest.mark.parametrize("call", ["terminate", "interrupt"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_stopped_run_goes_on(call, number):
    """After `terminate` or `interrupt` the next run goes on with the next group and ends where an unstopped run ends."""
    data = [1.0, 2.0, 3.0]
    whole, all_groups = make()
    whole.run(data, max_epochs=2)
    trainer, groups = make()
    fired = note(trainer, Events.EPOCH_COMPLETED)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=number), lambda: getattr(trainer, call)())
    trainer.run(data, max_epochs=2)
    assert len(groups) == number
    trainer.run(data)
    assert groups == all_groups
    assert trainer.state_dict() == whole.state_dict()
    assert fired == ["EPOCH_COMPLETED 1/3", "EPOCH_COMPLETED 2/6"]


@pytest.mark.parametrize("inner", [{}, {"max_epochs": 9}], ids=["same", "other-limit"])
def test_run_inside_run_is_refused(inner):
    """A handler that calls `run` of its own trainer gets an error, and the run around it keeps its limits and data."""
    trainer, groups = make()
    errors: list[str] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def again() -> None:
        try:
            trainer.run([7.0], **inner)
        except RuntimeError as error:
            errors.append(str(error))

    trainer.run([1.0, 2.0], max_epochs=2)
    assert len(errors) == 4
    assert "\n" not in errors[0]
    assert groups == [[1.0], [2.0]] * 2
    assert trainer.state.max_epochs == 2


def test_another_engine_runs_inside():
    """A handler may run another engine, and a trainer another trainer."""
    outer, _ = make()
    inner, groups = make()
    outer.add_event_handler(Events.ITERATION_COMPLETED, lambda: inner.run([7.0], max_epochs=outer.state.iteration))
    outer.run([1.0, 2.0])
    assert groups == [[7.0], [7.0]]


# --- exceptions ------------------------------------------------------------------------------------------------------------


class WithoutTextError(Exception):
    """Its text cannot be made, as where a `__str__` looks for a key that a server has left out."""

    def __str__(self) -> str:
        return {}["message"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError(" of two\nlines "), "ValueError: of two\nlines"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (WithoutTextError(), "WithoutTextError: (its text could not be made: KeyError)"),
    ],
)
def test_an_error_is_described_whatever_its_text(error: BaseException, expected: str) -> None:
    """By its class alone where it has no text."""
    assert describe_error(error) == expected


@pytest.mark.parametrize(
    "error",
    [InjectedError("on purpose"), WithoutTextError(), KeyboardInterrupt(), SystemExit(3)],
    ids=lambda e: type(e).__name__,
)
def test_observers_of_an_exception(error, caplog):
    """Each handler of EXCEPTION_RAISED sees the exception once; none can swallow, replace or hide it from those after it.

    Where one fails too, the log has its error.
    """
    trainer, _ = make()
    seen: list[str] = []

    def swallow(_engine: Any, raised: BaseException) -> None:
        seen.append(f"swallow {type(raised).__name__}")

    def reraise(_engine: Any, raised: BaseException) -> None:
        seen.append("reraise")
        raise raised

    def fail(_engine: Any, raised: BaseException) -> None:
        seen.append("fail")
        raise ValueError("an observer's own")

    def last(_engine: Any, raised: BaseException) -> None:
        seen.append(f"last {raised is error}")

    for observer in (swallow, reraise, fail, last):
        trainer.add_event_handler(Events.EXCEPTION_RAISED, observer)

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def strike() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        trainer.run([1.0, 2.0, 3.0], max_epochs=2)
    assert raised.value is error
    assert seen == [f"swallow {type(error).__name__}", "reraise", "fail", "last True"]
    logged = [
        str(record.exc_info[1]) for record in caplog.records if "handler of EXCEPTION_RAISED failed too" in record.message
    ]
    assert logged == ["an observer's own"]
    (line,) = [record.message for record in caplog.records if record.message.startswith("the run ended at")]
    assert line.endswith(f"epoch 1, iteration 2 by {describe_error(error)}")
    trainer.run([1.0, 2.0, 3.0], max_epochs=2)
    assert counters(trainer) == (2, 6, 6, 0, 6)


@pytest.mark.parametrize("attach", ["removed-observer", "profiler", "looked-up"])
def test_nothing_hides_an_exception(attach):
    """Neither a removed observer, nor Ignite's profiler, nor a look-up of the handlers makes a run swallow exceptions."""
    trainer, _ = make()
    if attach == "profiler":
        HandlersTimeProfiler().attach(trainer)
    elif attach == "looked-up":
        assert trainer._event_handlers[Events.EXCEPTION_RAISED] == []
    else:
        trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: None).remove()
    trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run([1.0, 2.0, 3.0])
    assert counters(trainer) == (1, 1, 1, 0, 1)


SITES = [
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.ITERATION_STARTED,
    *(event for event in TrainEvents if event not in (TrainEvents.STEP_SKIPPED, TrainEvents.OUT_OF_MEMORY)),
    Events.ITERATION_COMPLETED,
    Events.EPOCH_COMPLETED,
    Events.COMPLETED,
]


@pytest.mark.parametrize("event", SITES, ids=lambda event: event.name)
def test_stop_iteration_of_a_handler_ends_no_epoch(event):
    """A StopIteration out of any handler is a RuntimeError of the run; only the data ends an epoch."""
    trainer, _ = make()

    def exhausted() -> None:
        next(iter(()))

    trainer.add_event_handler(event, exhausted)
    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        trainer.run(Unsized(1.0, 2.0))
    assert isinstance(raised.value.__cause__, StopIteration)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_stop_iteration_of_the_users_functions_ends_no_epoch(sized):
    """A StopIteration out of `forward` or `accumulation_steps` is an error too, never a short epoch."""
    data = [1.0] * 5 if sized else Unsized(*[1.0] * 5)
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses, steps = iter([model.weight * 1.0]), iter([1, 1])
    for trainer in (
        create_trainer(model, optimizer, lambda model, number: next(losses)),
        create_trainer(model, optimizer, along, accumulation_steps=lambda update: next(steps)),
    ):
        with pytest.raises(RuntimeError, match="StopIteration"):
            trainer.run(data)


def test_an_exception_lets_go_of_the_data():
    """When a run fails, the pass over the loader is closed, also while somebody looks at the traceback: no worker lives on."""
    closed = []

    class Loader:
        def __iter__(self) -> Iterator[float]:
            try:
                yield from (1.0, 2.0, 3.0)
            finally:
                closed.append(True)

    trainer, _ = make()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        trainer.run(Loader())
    assert closed == [True]
    assert raised.tb is not None  # holds every frame of the run


# --- data ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
def test_unsized_loaders(accumulation_steps):
    """A loader without a length gives the groups of one with a length; the state learns the length from the first epoch."""
    sized, expected = make(accumulation_steps=accumulation_steps)
    unsized, groups = make(accumulation_steps=accumulation_steps)
    sized.run([1.0, 2.0, 3.0, 4.0, 5.0], max_epochs=2)
    lengths: list[Any] = []
    unsized.add_event_handler(Events.EPOCH_STARTED, lambda engine: lengths.append(engine.state.epoch_length))
    unsized.run(Unsized(1.0, 2.0, 3.0, 4.0, 5.0), max_epochs=2)
    assert groups == expected
    assert counters(unsized) == counters(sized)
    assert sized.state.epoch_length == math.ceil(5 / accumulation_steps)
    assert lengths == [None, sized.state.epoch_length]


@pytest.mark.parametrize("fresh", [False, True], ids=["same trainer", "fresh trainer"])
def test_a_run_that_failed_at_its_end_is_ended_by_the_next(fresh):
    """All updates are done, and the closing events have not fired: the next run fires them, and the one after does nothing."""
    trainer, groups = make()
    saved: list[Any] = []

    @trainer.on(Events.EPOCH_COMPLETED(once=2))
    def fail() -> None:
        saved.append(json.dumps(trainer.state_dict()))
        raise InjectedError

    with pytest.raises(InjectedError):
        trainer.run(NUMBERS, max_epochs=2)
    if fresh:
        trainer, groups = make()
        trainer.load_state_dict(json.loads(saved[0]))
    groups.clear()
    fired = note(trainer, Events.COMPLETED)
    for _ in range(2):
        trainer.run(NUMBERS, max_epochs=2)
    assert fired == [f"COMPLETED 2/{2 * len(NUMBERS)}"]
    assert groups == []


def test_a_generator_is_good_for_one_epoch():
    """An iterator trains one epoch; for several it is refused before its first element is taken."""
    trainer, groups = make(accumulation_steps=2)
    trainer.run(iter([1.0, 2.0, 3.0]))
    assert groups == [[1.0, 2.0], [3.0]]

    other, _ = make()
    untouched = iter([1.0, 2.0])
    with pytest.raises(TypeError, match="3 times"):
        other.run(untouched, max_epochs=3)
    assert list(untouched) == [1.0, 2.0]


@pytest.mark.parametrize("number", [1, 2])
def test_a_generator_that_ends_before_max_iters(number):
    """An iterator too short for `max_iters` is an error once it is empty, not an endless loop of empty epochs."""
    trainer, groups = make()
    with pytest.raises(ValueError, match=rf"^data ended after {number} updates of max_iters=5; pass a loader that can"):
        trainer.run(iter([1.0, 2.0][:number]), max_iters=5)
    assert groups == [[1.0], [2.0]][:number]


def test_a_half_read_generator_is_refused():
    """A second run inside an epoch on the iterator that the first left half read is refused, not skipped ahead."""
    trainer, groups = make()
    numbers = iter([1.0, 2.0, 3.0, 4.0])
    trainer.run(numbers, max_iters=2)
    with pytest.raises(TypeError, match="half read"):
        trainer.run(numbers, max_iters=4)
    assert list(numbers) == [3.0, 4.0]
    trainer.run(iter([1.0, 2.0, 3.0, 4.0]), max_iters=4)  # one that starts anew is read up to where the run was
    assert groups == [[1.0], [2.0], [3.0], [4.0]]


def test_epochs_of_changing_length():
    """A loader may be longer or shorter in each epoch; its length is asked for anew."""
    trainer, groups = make(accumulation_steps=2)
    data = [1.0, 2.0, 3.0]
    lengths: list[Any] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: data.extend([4.0, 5.0]))
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=2), lambda: data.__delitem__(slice(1, None)))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: lengths.append(engine.state.epoch_length))
    trainer.run(data, max_epochs=3)
    assert groups == [[1.0, 2.0], [3.0], [1.0, 2.0], [3.0, 4.0], [5.0], [1.0]]
    assert lengths == [2, 3, 1]


@pytest.mark.parametrize("stops", [False, True], ids=["at once", "stopped and resumed"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize(("announced", "given"), [(5, 4), (5, 3), (5, 1), (3, 4), (3, 8)])
def test_a_loader_that_lies_about_its_length(announced, given, accumulation_steps, stops):
    """A loader that gives fewer or more micro-batches than its `len()` is trained on as far as both go, with a warning."""
    trainer, groups = make(accumulation_steps=accumulation_steps)
    if stops:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), trainer.interrupt)
        trainer.run(Lying(announced, given))
    with pytest.warns(UserWarning, match="correct its __len__") as caught:
        trainer.run(Lying(announced, given))
    trained = sum(map(len, groups))
    number, outcome = given, f"epoch was {'shorter' if given < announced else 'longer'}"
    if trained < given:
        number, outcome = "more", "surplus is left out of the epoch"
    says = f"the loader has len() {announced} and gave {number} micro-batches: the {outcome}; correct its __len__"
    if "shorter" in outcome:
        says += ", or its dataset if a next() in it raises StopIteration"
    assert [str(warning.message) for warning in caught] == [says]
    assert 0 <= trained - min(announced, given) < accumulation_steps
    assert trainer.state.epoch == 1


def test_an_epoch_is_over_where_the_warning_of_its_length_is_an_error():
    trainer, _ = make()
    for epoch in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="correct its __len__"):
                trainer.run(Lying(5, 4), max_epochs=3)
        assert (trainer.state.epoch, trainer.state.iteration) == (epoch, 4 * epoch)


def test_an_honest_loader_is_not_warned_of():
    """Neither the end of an epoch, nor a run that ends inside one, nor a resumed one is taken for a wrong length."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for accumulation_steps in (1, 2, 3):
            trainer, _ = make(accumulation_steps=accumulation_steps)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), trainer.interrupt)
            trainer.run(Lying(5, 5))
            trainer.run(Lying(5, 5), max_epochs=2)
            trainer.run(Lying(5, 5), max_iters=trainer.state.iteration + 1)
            trainer.run(Lying(5, 5), max_epochs=4)


# --- position --------------------------------------------------------------------------------------------------------------

NUMBERS = [1.0, 2.0, 4.0, 8.0, 16.0]
BY_EPOCH = [2, 1, 3]


def alternating(update: int) -> int:
    return 1 + update % 2


@pytest.mark.sampled(14)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize(
    ("accumulation_steps", "update"),
    [(BY_EPOCH, update) for update in range(1, 11)] + [(alternating, update) for update in range(1, 12)],
    ids=lambda value: "alternating" if callable(value) else str(value),
)
def test_a_fresh_trainer_goes_on(accumulation_steps, update, sized):
    """Saved after any update and loaded, through JSON, into a fresh trainer: the groups go on as if unbroken."""
    whole, expected = make(accumulation_steps=accumulation_steps)
    edges: dict[int, int] = {}
    whole.add_event_handler(Events.EPOCH_COMPLETED, lambda: edges.update({whole.state.iteration: whole.state.epoch}))
    whole.run(NUMBERS, max_epochs=3)
    data = NUMBERS if sized else Unsized(*NUMBERS)
    first, head = make(accumulation_steps=accumulation_steps)
    saved: list[str] = []
    first.add_event_handler(Events.ITERATION_COMPLETED(once=update), lambda: saved.append(json.dumps(first.state_dict())))
    first.add_event_handler(Events.ITERATION_COMPLETED(once=update), first.terminate)
    first.run(data, max_epochs=3)

    second, tail = make(accumulation_steps=accumulation_steps)
    ends = note(second, Events.EPOCH_COMPLETED)
    second.load_state_dict(json.loads(saved[0]))
    assert counters(second) == counters(first)
    second.run(data)
    assert head + tail == expected
    assert counters(second) == counters(whole)
    assert ends == [f"EPOCH_COMPLETED {epoch}/{at}" for at, epoch in edges.items() if update <= at]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("event", [*SITES, TrainEvents.STEP_SKIPPED], ids=lambda event: event.name)
def test_state_saved_by_any_handler_is_whole(event):
    """Whichever event a checkpoint hangs on, what it saves resumes exactly: no update is done twice or left out."""

    def train(saved: Any) -> Any:
        model = Weight()
        trainer = create_trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            along,
            accumulation_steps=BY_EPOCH,
            options=UpdateOptions(on_nonfinite="skip"),
        )
        if saved is not None:
            trainer.load_state_dict(saved["trainer"])
            model.load_state_dict(saved["model"])
        return model, trainer

    data = [1.0, 2.0, math.inf, 8.0, 16.0]
    model, trainer = train(None)
    checkpoints: list[Any] = []

    def save() -> None:
        parameters = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        checkpoints.append({"trainer": trainer.state_dict(), "model": parameters})

    trainer.add_event_handler(event, save)
    trainer.run(data, max_epochs=3)
    assert checkpoints
    for saved in checkpoints:
        resumed, other = train(saved)
        other.run(data, max_epochs=3)
        assert resumed.weight.item() == model.weight.item()
        assert other.state_dict() == trainer.state_dict()


@pytest.mark.parametrize("event", SITES[4:-2], ids=lambda event: event.name)
def test_state_saved_while_failing_is_whole(event):
    """What an observer of EXCEPTION_RAISED saves is what is done: resumed, the update that failed is done again."""
    whole, trainer, resumed = (make(accumulation_steps=2)[0] for _ in range(3))
    whole.run(NUMBERS)
    saved: list[Any] = []
    trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda engine, error: saved.append(engine.state_dict()))
    trainer.add_event_handler(event(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(NUMBERS)
    (state,) = saved
    assert state == trainer.state_dict()
    resumed.load_state_dict(state)
    resumed.run(NUMBERS)
    assert resumed.state_dict() == whole.state_dict()


def test_user_keys_are_saved():
    """Keys that a user adds to `state_dict_user_keys` travel with the state, as in Ignite."""
    first, second = make()[0], make()[0]
    for trainer in (first, second):
        trainer.state_dict_user_keys.append("tokens")
        trainer.state.tokens = 0
    first.state.tokens = 17
    second.load_state_dict(first.state_dict())
    assert second.state.tokens == 17
    assert make()[0].state_dict().keys() == first.state_dict().keys() - {"tokens"}


# --- events ----------------------------------------------------------------------------------------------------------------


def counts(trainer: Any, event: Any, counter: str, data: list[float], max_epochs: int = 1) -> list[int]:
    """The counter's values at which the event reached its handler."""
    at: list[int] = []
    trainer.add_event_handler(event, lambda: at.append(getattr(trainer.state, counter)))
    trainer.run(data, max_epochs=max_epochs)
    return at


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("event", "counter", "total"),
    [
        (TrainEvents.MICRO_BATCH_STARTED, "num_micro_batches", 16),
        (TrainEvents.FORWARD_COMPLETED, "num_micro_batches", 16),
        (TrainEvents.BACKWARD_COMPLETED, "num_micro_batches", 16),
        (TrainEvents.GRADIENTS_READY, "iteration", 8),
        (TrainEvents.STEP_COMPLETED, "num_steps", 6),
        (TrainEvents.STEP_SKIPPED, "num_skipped", 2),
        (Events.ITERATION_COMPLETED, "iteration", 8),
        (Events.EPOCH_COMPLETED, "epoch", 2),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize(
    ("filters", "fires"),
    [
        ({"every": 2}, lambda n: n % 2 == 0),
        ({"every": 3}, lambda n: n % 3 == 0),
        ({"once": 2}, lambda n: n == 2),
        ({"once": [1, 5]}, lambda n: n in (1, 5)),
        ({"before": 3}, lambda n: n < 3),
        ({"after": 1}, lambda n: n > 1),
        ({"before": 7, "after": 2}, lambda n: 2 < n < 7),
        ({"every": 3, "after": 2}, lambda n: n > 2 and n % 3 == 0),
        ({"event_filter": lambda engine, n: n in (2, 6)}, lambda n: n in (2, 6)),
    ],
    ids=["every 2", "every 3", "once", "once twice", "before", "after", "between", "every after", "function"],
)
def test_filters(event, counter, total, filters, fires):
    """Ignite's filters work on every event, and count what the event is about: micro-batches, updates, steps or skips."""
    trainer, _ = make(accumulation_steps=2, on_nonfinite="skip")
    data = [1.0, 1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0]
    assert counts(trainer, event(**filters), counter, data, max_epochs=2) == [n for n in range(1, total + 1) if fires(n)]


def test_the_same_event_of_another_engine_changes_nothing_here():
    """Events are compared by name: another enum's STEP_COMPLETED, counted by another attribute elsewhere, re-points nothing."""

    class Foreign(EventEnum):
        STEP_COMPLETED = "foreign_step_completed"

    known = dict(State.event_to_attr)
    before, _ = make()
    foreign = Engine(lambda engine, batch: None)
    try:
        foreign.register_events(*Foreign, event_to_attr={Foreign.STEP_COMPLETED: "foreign_count"})
        after, _ = make()
        for trainer in (before, after):
            assert counts(trainer, TrainEvents.STEP_COMPLETED(every=2), "num_steps", [1.0] * 5) == [2, 4]
            assert "foreign_count" not in vars(trainer.state)
    finally:
        State.event_to_attr.clear()
        State.event_to_attr.update(known)


def test_events_of_the_users_own():
    """A user's event with its counter can be registered, filtered and fired; its name as a string means the same event."""

    class Own(EventEnum):
        TENTH_OF_A_METRE = "tenth_of_a_metre"

    trainer, _ = make()
    trainer.register_events(*Own, event_to_attr={Own.TENTH_OF_A_METRE: "decimetres"})
    assert trainer.state.decimetres == 0
    at: list[int] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def walk() -> None:
        trainer.state.decimetres += 1
        trainer.fire_event(Own.TENTH_OF_A_METRE)

    trainer.add_event_handler(Own.TENTH_OF_A_METRE(every=2), lambda: at.append(trainer.state.decimetres))
    trainer.add_event_handler("TENTH_OF_A_METRE", lambda: at.append(0))
    trainer.run([1.0] * 4)
    assert at == [0, 2, 0, 0, 4, 0]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_may_be_plain_sequences(sampler: str) -> None:
    """Torch takes anything that gives indices; a run stops and goes on in the middle of them."""
    loader = DataLoader([1.0, 2.0, 4.0, 8.0], collate_fn=sum, **SAMPLERS[sampler])  # type: ignore[arg-type]
    trainer, groups = make()
    trainer.run(loader, max_iters=2)
    trainer.run(loader, max_epochs=2)
    assert groups == [[batch] for batch in (*loader, *loader)]


def test_filter_needs_a_counter():
    """A filter on an event that nothing counts is refused when it is attached, not when the event is first fired."""

    class Own(EventEnum):
        UNCOUNTED = "uncounted"

    trainer, _ = make()
    trainer.register_events(*Own)
    with pytest.raises(RuntimeError, match=r"UNCOUNTED has no counter: attach"):
        trainer.add_event_handler(Own.UNCOUNTED(every=2), lambda: None)
    with pytest.raises(ValueError, match="must be one registered"):
        make()[0].add_event_handler(Own.UNCOUNTED(every=2), lambda: None)


def test_strings_name_events():
    """An event may be attached to, prepended to and fired by its name."""
    trainer, _ = make()
    calls: list[str] = []
    trainer.register_events("own_event")
    trainer.add_event_handler("own_event", lambda: calls.append("added"))
    trainer.prepend_event_handler("own_event", lambda: calls.append("prepended"))
    trainer.add_event_handler("STEP_COMPLETED", lambda: trainer.fire_event("own_event"))
    trainer.run([1.0])
    assert calls == ["prepended", "added"]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Events.ITERATION_COMPLETED, ["added", "first", "added", "last"] * 2),
        (Events.ITERATION_COMPLETED(every=2), ["added", "added", "last", "added", "first", "added", "last"]),
        (TrainEvents.STEP_COMPLETED | Events.ITERATION_COMPLETED, ["first", "added", "first", "added", "last"] * 2),
    ],
    ids=["plain", "filtered", "several"],
)
def test_prepended_handlers_run_first(event, expected):
    """A prepended handler runs before those that were attached earlier, on each of several events, until it is removed."""
    trainer, _ = make()
    calls: list[str] = []
    for single in (TrainEvents.STEP_COMPLETED, Events.ITERATION_COMPLETED):
        trainer.add_event_handler(single, lambda: calls.append("added"))
    handle = trainer.prepend_event_handler(event, lambda: calls.append("first"))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: calls.append("last"))
    trainer.run([1.0, 1.0])
    assert calls == expected
    handle.remove()
    trainer.run([1.0, 1.0], max_epochs=2)
    assert calls[len(expected) :] == ["added", "added", "last"] * 2


def test_an_event_without_handlers_costs_one_look_up():
    """In the table of handlers, without the hash of the event, and nothing is called; on the trainer and on the evaluator."""
    looked: list[Any] = []

    class Table(dict):
        def get(self, key, *default):
            looked.append(key)
            return super().get(key, *default)

    model = nn.Linear(1, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum())
    for engine in (trainer, create_evaluator(model, lambda model, x: model(x).sum())):
        engine._by_identity = Table(engine._by_identity)
        engine.fire_event(Events.ITERATION_COMPLETED)
        assert looked == [id(Events.ITERATION_COMPLETED)]
        looked.clear()


def test_an_event_is_found_by_its_name_too():
    """Ignite takes an event, its name, and an equal with a filter for the same; so do firing, attaching and `has_handlers`."""
    model, calls = nn.Linear(1, 1), list[str]()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum())
    assert not trainer.has_handlers("ITERATION_COMPLETED")
    handle = trainer.add_event_handler("ITERATION_COMPLETED", lambda: calls.append("by name"))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: calls.append("by event"))
    for event in (Events.ITERATION_COMPLETED, "ITERATION_COMPLETED", Events.ITERATION_COMPLETED(lambda _engine, _count: False)):
        assert trainer.has_handlers(event)
        trainer.fire_event(event)
        assert calls == ["by name", "by event"]
        calls.clear()
    handle.remove()
    trainer.fire_event(Events.ITERATION_COMPLETED)
    assert calls == ["by event"]


@pytest.mark.parametrize(
    "event", [TrainEvents.STEP_COMPLETED, TrainEvents.STEP_COMPLETED(every=2), TrainEvents.STEP_COMPLETED | Events.COMPLETED]
)
def test_removed_handlers_are_silent(event):
    """A removed handler is not called any more, also if it removes itself while its event fires; the others still are."""
    trainer, _ = make()
    calls: list[str] = []

    def once_only() -> None:
        calls.append("removed")
        handle.remove()

    handle = trainer.add_event_handler(event, once_only)
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: calls.append("stays"))
    with trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: calls.append("never")):
        pass
    trainer.run([1.0] * 4)
    assert sorted(calls) == ["removed"] + ["stays"] * 4


class Counted:
    """An object with a state and two methods to attach."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1

    def at_end(self) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.calls = state_dict["calls"]


@pytest.mark.parametrize(
    "event",
    [Events.ITERATION_COMPLETED, Events.ITERATION_COMPLETED(every=2), Events.ITERATION_COMPLETED | Events.EPOCH_COMPLETED],
    ids=["plain", "filtered", "several"],
)
def test_what_is_removed_is_not_saved(event):
    """An object's state is saved while one of its methods is attached, and again once it is attached again."""
    trainer, _ = make()
    first, second = Counted(), Counted()
    handle = trainer.add_event_handler(event, first)
    trainer.add_event_handler(Events.COMPLETED, first.at_end)
    trainer.add_event_handler(event, second)
    both = {"Counted": first, "Counted-2": second}
    assert stateful_handlers(trainer) == both
    handle.remove()
    assert stateful_handlers(trainer) == both  # at_end is still attached
    trainer.remove_event_handler(first.at_end, Events.COMPLETED)
    assert stateful_handlers(trainer) == {"Counted-2": second}
    trainer.add_event_handler(event, first)
    assert stateful_handlers(trainer) == both


def test_a_handler_attached_while_its_event_fires_runs_at_once():
    """Attaching to the event that is firing calls the new handler in the same round, as in Ignite."""
    trainer, _ = make()
    calls: list[int] = []

    @trainer.on(Events.ITERATION_COMPLETED(once=1))
    def attach() -> None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: calls.append(trainer.state.iteration))

    trainer.run([1.0] * 3)
    assert calls == [1, 2, 3]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED, TrainEvents.STEP_COMPLETED(every=2)], ids=["plain", "filtered"])
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_a_trainer_is_freed_with_its_last_reference(event, fails):
    """A trainer that ran, or failed, goes with its model and optimizer when it is let go: no cycle waits for the collector."""
    gc.collect()
    gc.disable()
    try:
        trainer, _ = make()
        trainer.add_event_handler(event, lambda engine: engine.state.iteration)
        if fails:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2) if event.filter else event, lambda engine: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            trainer.run([1.0] * 3)
        reference = weakref.ref(trainer)
        del trainer
        assert reference() is None
    finally:
        gc.enable()


def test_the_state_is_declared():
    """A run puts no attribute on the state that `TrainState` does not have from the start."""
    trainer, _ = make()
    declared = set(dir(TrainState()))
    trainer.run([1.0, 2.0])
    assert set(dir(trainer.state)) == declared


# --- Ignite's own handlers -------------------------------------------------------------------------------------------------


def test_timer():
    """Ignite's Timer counts the updates that it is told to."""
    trainer, _ = make()
    timer = Timer(average=True)
    timer.attach(
        trainer,
        start=Events.EPOCH_STARTED,
        resume=Events.ITERATION_STARTED,
        pause=Events.ITERATION_COMPLETED,
        step=TrainEvents.STEP_COMPLETED,
    )
    trainer.run([1.0] * 5)
    assert timer.step_count == 5
    assert timer.value() > 0


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_progress_bar(capsys, sized):
    """Ignite's ProgressBar counts updates, to the agreed number of them where it is known, and shows the loss."""
    trainer, _ = make(accumulation_steps=2)
    bar = ProgressBar(persist=True, ncols=80)
    bar.attach(trainer, output_transform=lambda output: {"loss": output.loss})
    trainer.run([1.0] * 5 if sized else Unsized(*[1.0] * 5))
    shown = capsys.readouterr().err
    assert "loss=" in shown
    assert not sized or "3/3" in shown


def test_what_is_put_into_on_enter_as_a_run_begins_is_called_once():
    """By a function of `on_enter` or a handler of STARTED; in the next run with the others."""
    trainer, called = make()[0], []
    begins = [True]

    def add(trainer):
        if begins:
            trainer.on_enter.append(lambda _: called.append("appended"))
            trainer.enter_with(lambda _: called.append("entered"))

    def start(trainer):
        if begins:
            begins.clear()
            trainer.enter_with(lambda _: called.append("started"))

    trainer.on_enter.append(add)
    trainer.add_event_handler(Events.STARTED, start)
    trainer.run([1.0], max_epochs=1)
    assert called == ["appended", "entered", "started"]
    trainer.run([1.0], max_epochs=2)
    assert called == ["appended", "entered", "started"] * 2


def test_what_changes_on_enter_as_a_run_begins_leaves_no_other_out():
    """A function that removes itself, and a handler that takes the place of another."""
    trainer, called = make()[0], []

    def once(trainer):
        trainer.on_enter.remove(once)
        trainer.on_enter = [*trainer.on_enter, lambda _: called.append("new")]

    trainer.on_enter += [once, lambda _: called.append("other")]
    trainer.run([1.0], max_epochs=1)
    assert called == ["other", "new"]


def test_early_stopping():
    """Ignite's EarlyStopping on the evaluator ends the trainer's run when the metric stops getting better."""
    model = Weight()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), along)
    scores = iter([1.0, 2.0, 1.5, 1.0, 3.0])
    evaluator = create_evaluator(model, along)
    evaluator.add_event_handler(Events.COMPLETED, EarlyStopping(2, lambda engine: next(scores), trainer))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([1.0]))
    trainer.run([1.0, 2.0], max_epochs=9)
    assert trainer.state.epoch == 4


@pytest.mark.parametrize(
    "event", [Events.ITERATION_COMPLETED(once=4), TrainEvents.STEP_COMPLETED(once=4)], ids=lambda e: e.name
)
def test_checkpoint(tmp_path, event):
    """Ignite's Checkpoint saves the trainer beside model and optimizer, and what it loads goes on to the same end."""

    def objects() -> dict[str, Any]:
        model = Weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        return {"trainer": create_trainer(model, optimizer, along), "model": model, "optimizer": optimizer}

    first, second = objects(), objects()
    first["trainer"].add_event_handler(event, Checkpoint(first, DiskSaver(tmp_path, create_dir=True)))
    first["trainer"].run(NUMBERS, max_epochs=2)
    (saved,) = tmp_path.glob("*.pt")
    Checkpoint.load_objects(second, torch.load(saved, weights_only=True))
    assert second["trainer"].state.iteration == 4
    second["trainer"].run(NUMBERS, max_epochs=2)
    assert second["model"].weight.item() == first["model"].weight.item()
    assert second["trainer"].state_dict() == first["trainer"].state_dict()


def test_profiler():
    """Ignite's HandlersTimeProfiler runs on a trainer and lists its handlers."""
    trainer, _ = make()
    profiler = HandlersTimeProfiler()
    profiler.attach(trainer)

    def watched(engine: Any) -> None:
        pass

    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, watched)
    trainer.run([1.0, 2.0])
    assert any("watched" in str(row) for row in profiler.get_results())


@pytest.mark.parametrize("kind", ["Trainer", "Evaluator"])
def test_an_engine_is_not_copied(kind: str) -> None:
    """Nor is what holds it: its parts refer to each other, and the copies of some would refer to the original."""
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, lambda model, x: model.weight * x)
    engine = trainer if kind == "Trainer" else create_evaluator(model, lambda model, x: model.weight * x)
    for value in (engine, {"engine": engine}, engine.run):
        for attempt in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"{kind} must not be copied or pickled"):
                attempt(value)


def test_a_state_is_pickled():
    """Before a run and after it, as Ignite's state: with its counters, its record and what others have put there."""
    model = Weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, lambda model, x: model.weight * x)
    for updates in (0, 2):
        if updates:
            trainer.run([1.0, 2.0])
        trainer.state.own = [updates]
        for read in (pickle.loads(pickle.dumps(trainer.state)), copy.deepcopy(trainer.state)):
            assert repr(read) == repr(trainer.state)
            assert (read.iteration, read.own, read.update_output) == (updates, [updates], trainer.state.update_output)
            assert (read.progress, read.group_size) == (None, None), "they are the trainer's to tell"
    assert trainer.state.progress == 0.5
