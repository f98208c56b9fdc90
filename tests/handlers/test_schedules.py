"""A schedule that cannot be meant is answered in one line: of the wrong length, or stepped by two."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

import cuts
from ignite_train import Trainer, WarmUpSchedule, create_trainer
from ignite_train.handlers import Checkpoint, LearningRateSchedule

DATA = cuts.cut(cuts.samples(), [2] * 8)
EPOCHS = 10


def make() -> tuple[Trainer, Optimizer]:
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return create_trainer(model, optimizer, cuts.forward), optimizer


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


Make = Callable[[Optimizer], LRScheduler]
IN_EPOCHS: dict[str, tuple[Make, str]] = {
    "cosine": (lambda o: CosineAnnealingLR(o, T_max=EPOCHS), "CosineAnnealingLR has T_max=10 and will be stepped 80 times"),
    "milestones": (lambda o: MultiStepLR(o, [3, 6]), "MultiStepLR has milestones=6 and will be stepped 80 times"),
    "polynomial": (lambda o: PolynomialLR(o, total_iters=EPOCHS), "PolynomialLR has total_iters=10 and"),
    "linear to 0": (lambda o: LinearLR(o, 1.0, 0.0, total_iters=EPOCHS), "LinearLR has total_iters=10 and"),
    "warm-up": (lambda o: WarmUpSchedule(o, "cosine", total=EPOCHS), "WarmUpSchedule has total=10 and"),
    "last of a sequence": (
        lambda o: SequentialLR(o, [LinearLR(o, total_iters=2), CosineAnnealingLR(o, T_max=EPOCHS)], [2]),
        "CosineAnnealingLR has T_max=10 and",
    ),
    "steps": (
        lambda o: StepLR(o, 3),
        "StepLR has step_size=3 and will be stepped 80 times in this run: its learning rate will fall",
    ),
    "exponential": (lambda o: ExponentialLR(o, 0.8), "ExponentialLR has gamma=0.8 and will be stepped 80 times"),
    "one of a chain": (
        lambda o: ChainedScheduler([StepLR(o, 3, 0.9), CosineAnnealingLR(o, T_max=EPOCHS)]),
        "CosineAnnealingLR has",
    ),
}


@pytest.mark.parametrize(
    ("name", "limit"),
    # Milestones early in a run are usual, where there are no epochs to compare them with.
    [(name, limit) for name in IN_EPOCHS for limit in ("epochs", "updates") if (name, limit) != ("milestones", "updates")],
)
def test_a_length_in_epochs_is_noticed(name: str, limit: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line at the start, where updates are counted; none where the schedule is stepped once an epoch."""
    build, says = IN_EPOCHS[name]
    for event, expected in ((None, 1), (Events.EPOCH_COMPLETED, 0)):
        caplog.clear()
        trainer, optimizer = make()
        handler = LearningRateSchedule(build(optimizer))
        _ = handler.attach(trainer) if event is None else handler.attach(trainer, event)
        trainer.add_event_handler(Events.ITERATION_STARTED(once=2), trainer.terminate)
        trainer.run(DATA, **({"max_epochs": EPOCHS} if limit == "epochs" else {"max_iters": EPOCHS * len(DATA)}))
        found = [line for line in lines(caplog) if "will be stepped" in line]
        assert len(found) == expected
        assert all(says in line and "trainer.total_updates(loader, max_epochs=...)" in line for line in found)


RIGHT: dict[str, Make] = {
    "cosine": lambda o: CosineAnnealingLR(o, T_max=80),
    "nearly": lambda o: CosineAnnealingLR(o, T_max=75),
    "longer": lambda o: CosineAnnealingLR(o, T_max=1000),
    "milestones": lambda o: MultiStepLR(o, [20, 60]),
    "early milestones": lambda o: MultiStepLR(o, [5, 60]),
    "steps": lambda o: StepLR(o, 20),
    "small steps": lambda o: StepLR(o, 5, 0.5),
    "exponential": lambda o: ExponentialLR(o, 0.95),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=80),
    "one cycle after a warm-up": lambda o: SequentialLR(
        o, [LinearLR(o, total_iters=5), OneCycleLR(o, 0.1, total_steps=75)], [5]
    ),
    "warm-up": lambda o: WarmUpSchedule(o, "linear", warm_up=4, total=80),
    "short warm-up": lambda o: SequentialLR(o, [LinearLR(o, total_iters=5), CosineAnnealingLR(o, T_max=75)], [5]),
}


@pytest.mark.parametrize("name", list(RIGHT))
def test_a_length_in_updates_is_right(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """No line."""
    trainer, optimizer = make()
    LearningRateSchedule(RIGHT[name](optimizer)).attach(trainer)
    trainer.run(DATA, max_epochs=EPOCHS)
    assert lines(caplog) == []


MICRO_BATCHES = 8 * EPOCHS


@pytest.mark.parametrize("accumulation_steps", [2, 3, 8])
@pytest.mark.parametrize(
    "build",
    [lambda o, n: OneCycleLR(o, 0.1, total_steps=n), CosineAnnealingLR, lambda o, n: WarmUpSchedule(o, "cosine", total=n)],
)
def test_a_length_in_micro_batches_is_noticed(
    build: Callable[[Optimizer, int], LRScheduler], accumulation_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The rate was far from its end when the run was over; another length beyond the run may be meant."""
    for length, expected in ((MICRO_BATCHES, 1), (MICRO_BATCHES + 5, 0), (-(-8 // accumulation_steps) * EPOCHS, 0)):
        caplog.clear()
        model = cuts.linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = create_trainer(model, optimizer, cuts.forward, accumulation_steps=accumulation_steps)
        LearningRateSchedule(build(optimizer, length)).attach(trainer)
        trainer.run(DATA, max_epochs=EPOCHS)
        found = [line for line in lines(caplog) if "the number of its micro-batches, of which an update takes several" in line]
        assert len(found) == expected
        assert all("trainer.total_updates(loader, max_epochs=...)" in line for line in found)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_length_in_updates_beside_steps_once_an_epoch_is_noticed(
    accumulation_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a schedule ended in its warm-up. A longer one may be meant."""
    updates = -(-8 // accumulation_steps) * EPOCHS
    for length, what in ((updates, "updates"), (MICRO_BATCHES, "micro-batches"), (MICRO_BATCHES + 5, None), (EPOCHS, None)):
        caplog.clear()
        model = cuts.linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = create_trainer(model, optimizer, cuts.forward, accumulation_steps=accumulation_steps)
        LearningRateSchedule(OneCycleLR(optimizer, 0.1, total_steps=length)).attach(trainer, Events.EPOCH_COMPLETED)
        trainer.run(DATA, max_epochs=EPOCHS)
        found = [line for line in lines(caplog) if "the number of its" in line]
        assert len(found) == (what is not None)
        if what is not None and accumulation_steps > 1:
            assert f"that is the number of its {what}" in found[0]
        assert all("leave the event out of attach(trainer)" in line for line in found)


@pytest.mark.parametrize(
    "build",
    [
        lambda o: ExponentialLR(o, 1e5),  # a test of rates
        lambda o: SequentialLR(o, [ConstantLR(o, 1.0, 20_000), ExponentialLR(o, 0.9)], [20_000]),
        lambda o: SequentialLR(o, [ConstantLR(o, 1.0, 20_000), StepLR(o, 1, 0.0)], [20_000]),
    ],
    ids=["rises", "begins after the run", "is zero after the run"],
)
def test_a_decay_that_has_no_end_in_the_run_is_left_alone(
    build: Callable[[Optimizer], LRScheduler], caplog: pytest.LogCaptureFixture
) -> None:
    trainer, optimizer = make()
    optimizer.param_groups[0]["lr"] = 0.0  # a rate of 1e5**70 would overflow
    LearningRateSchedule(build(optimizer)).attach(trainer)
    trainer.run(DATA, max_iters=70)
    assert lines(caplog) == []


def test_an_epoch_of_micro_batches_is_no_length_of_a_schedule_by_epoch(caplog: pytest.LogCaptureFixture) -> None:
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_trainer(model, optimizer, cuts.forward, accumulation_steps=2)
    LearningRateSchedule(CosineAnnealingLR(optimizer, T_max=2 * EPOCHS)).attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(DATA, max_epochs=EPOCHS)
    assert lines(caplog) == []


def test_elastic_replicas_are_told_of_no_total_that_is_refused_there(caplog: pytest.LogCaptureFixture) -> None:
    trainer, optimizer = make()
    handler = LearningRateSchedule(CosineAnnealingLR(optimizer, T_max=EPOCHS))
    state = SimpleNamespace(iteration=0, num_skipped=0, max_epochs=None)
    elastic: Any = SimpleNamespace(state=state, replicas=SimpleNamespace(are_elastic=True), config={}, expected_updates=80)
    elastic.progress = trainer.progress
    handler._look_at_length(elastic)
    (line,) = lines(caplog)
    assert "count in updates, by max_iters= of trainer.run" in line
    assert "total_updates" not in line


def test_one_cycle_that_is_too_short_is_refused_at_the_start() -> None:
    """The error of torch itself comes in the middle of the run, when the steps are used up."""
    trainer, optimizer = make()
    LearningRateSchedule(OneCycleLR(optimizer, 0.1, total_steps=79)).attach(trainer)
    with pytest.raises(ValueError, match="OneCycleLR has total_steps=79 and will be stepped 80 times in this run") as raised:
        trainer.run(DATA, max_epochs=EPOCHS)
    assert "\n" not in str(raised.value)
    assert trainer.state.iteration == 0


def test_epochs_of_different_lengths_tell_no_length_of_the_run() -> None:
    """A list of accumulation steps by epoch makes 4 updates and then 1: the schedule for 5 is right."""
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, cuts.forward, accumulation_steps=[1, 4])
    schedule = OneCycleLR(optimizer, 0.1, total_steps=5)
    LearningRateSchedule(schedule).attach(trainer)
    trainer.run(cuts.cut(cuts.samples(), [4] * 4), max_epochs=2)
    assert schedule.last_epoch == 5


@pytest.mark.parametrize("event", [None, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED], ids=str)
@pytest.mark.parametrize("stop", [3, 8, 11, 16])
def test_one_cycle_that_a_checkpoint_restores_is_refused_where_it_would_end_before_the_run(
    stop: int, event: Any, tmp_path: Path
) -> None:
    """Two epochs of eight updates have the right length. For a third one the script has another length, which is not used."""
    unit = 1 if event is Events.EPOCH_COMPLETED else len(DATA)

    def resumed(epochs: int, until: int) -> Trainer:
        trainer, optimizer = make()
        handler = LearningRateSchedule(OneCycleLR(optimizer, 0.1, total_steps=epochs * unit))
        _ = handler.attach(trainer) if event is None else handler.attach(trainer, event)
        Checkpoint(tmp_path, every=1).attach(trainer)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=until), trainer.interrupt)
        trainer.run(DATA, max_epochs=epochs)
        return trainer

    resumed(2, stop)
    with pytest.raises(ValueError, match=f"of total_steps={2 * unit} and will be at step {3 * unit} at the end") as raised:
        resumed(3, 17)
    assert "\n" not in str(raised.value)
    assert resumed(2, 17).state.iteration == 16


def test_one_cycle_that_starts_in_the_middle_of_a_run_has_the_length_of_the_rest(tmp_path: Path) -> None:
    """It was left out of the resumed state, and begins where the earlier schedule was given up."""
    runs: list[tuple[Make, int, tuple[str, ...]]] = [
        (lambda o: OneCycleLR(o, 0.1, total_steps=16), 5, ()),
        (lambda o: OneCycleLR(o, 0.1, total_steps=11), 17, ("LearningRateSchedule",)),
    ]
    for make_schedule, stop, leave_out in runs:
        trainer, optimizer = make()
        LearningRateSchedule(make_schedule(optimizer)).attach(trainer)
        Checkpoint(tmp_path, every=1, leave_out=leave_out).attach(trainer)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), trainer.interrupt)
        trainer.run(DATA, max_epochs=2)
    assert trainer.state.iteration == 16


@pytest.mark.parametrize("place", ["handler", "forward"])
def test_a_schedule_that_something_else_steps_is_noticed(place: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line, after the first update; and none for a schedule that is put back by a resume or stepped before the run."""
    schedule: list[LRScheduler] = []

    def forward(model: Any, batch: Any) -> Any:
        if place == "forward" and schedule:
            schedule[0].step()
        return cuts.forward(model, batch)

    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_trainer(model, optimizer, forward)
    scheduler = StepLR(optimizer, 100)
    LearningRateSchedule(scheduler).attach(trainer)
    trainer.run(DATA, max_epochs=1)
    optimizer.step()
    scheduler.step()
    trainer.run(DATA, max_epochs=2)
    assert lines(caplog) == []
    schedule.append(scheduler)
    if place == "handler":
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
    trainer.run(DATA, max_epochs=3)
    assert len(lines(caplog)) == 1
    assert "something else steps it too" in lines(caplog)[0]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("updates", [12, 76])
@pytest.mark.parametrize("name", ["OneCycleLR", "CosineAnnealingLR", "StepLR"])
def test_a_schedule_of_epochs_resumes_in_the_middle_of_one(
    name: str, updates: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`EPOCH_STARTED` fires once more, which seemed a step of something else, and one too many for OneCycleLR."""
    kinds: dict[str, Make] = {
        "OneCycleLR": lambda o: OneCycleLR(o, 0.1, total_steps=EPOCHS),
        "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, EPOCHS),
        "StepLR": lambda o: StepLR(o, 3),
    }

    def rates(directory: Path, stop: int) -> list[Any]:
        trainer, optimizer = make()
        LearningRateSchedule(kinds[name](optimizer)).attach(trainer, Events.EPOCH_STARTED)
        Checkpoint(directory, every=100).attach(trainer)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda: trainer.terminate())
        found = list[Any]()
        record = trainer.state
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: found.append(record.update_output.learning_rates))  # type: ignore[union-attr]
        trainer.run(DATA, max_epochs=EPOCHS)
        return found

    whole = rates(tmp_path / "whole", 1000)
    begun = rates(tmp_path / "parts", updates)
    caplog.clear()
    assert begun + rates(tmp_path / "parts", 1000) == whole
    assert [line for line in lines(caplog) if "schedule" in line] == []


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_that_something_else_steps_is_told_after_a_resume_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first run makes no such step, so that all that is told comes after the resume."""

    def step(_: Trainer, schedule: LRScheduler) -> None:
        schedule.step()

    for stop in (12, 1000):
        caplog.clear()
        trainer, optimizer = make()
        schedule = StepLR(optimizer, 30)
        LearningRateSchedule(schedule).attach(trainer, Events.EPOCH_STARTED)
        Checkpoint(tmp_path, every=100).attach(trainer)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda t: t.terminate())
        trainer.add_event_handler(Events.EPOCH_COMPLETED(event_filter=lambda _, epoch: epoch > 1), step, schedule)
        trainer.run(DATA, max_epochs=4)
    assert ["something else steps it too" in line for line in lines(caplog)] == [True]


def test_a_second_schedule_of_the_same_kind_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A cell of a notebook that is run again makes a new scheduler for the same optimizer; another kind is told in one line."""
    trainer, optimizer = make()
    LearningRateSchedule(CosineAnnealingLR(optimizer, 80)).attach(trainer)
    with pytest.raises(ValueError, match="scheduler must be the only CosineAnnealingLR of its optimizer, got a second"):
        LearningRateSchedule(CosineAnnealingLR(optimizer, 80)).attach(trainer)
    assert lines(caplog) == []
    LearningRateSchedule(MultiStepLR(optimizer, [50])).attach(trainer)
    expected = "the schedules CosineAnnealingLR and MultiStepLR both change the learning rate of one optimizer; combine them"
    assert [line.startswith(expected) for line in lines(caplog)] == [True]


GROWING: dict[str, Make] = {
    "warm-up": lambda o: WarmUpSchedule(o, "cosine", total=20),
    "one cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
    "last of a sequence": lambda o: SequentialLR(o, [LinearLR(o, total_iters=3), LambdaLR(o, lambda _: 0.5)], [3]),
}


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("from_the_beginning", [True, False])
def test_a_group_that_the_schedule_does_not_know_is_named(name: str, from_the_beginning: bool) -> None:
    """It was added after the schedule was made. One whose parameters are frozen at first may be there from the beginning."""
    model = cuts.linear()
    model.bias.requires_grad_(False)
    late = {"params": [model.bias], "lr": 0.001}
    optimizer = torch.optim.SGD([{"params": [model.weight]}, *[late] * from_the_beginning], lr=0.01, momentum=0.9)
    trainer = create_trainer(model, optimizer, cuts.forward)
    LearningRateSchedule(GROWING[name](optimizer)).attach(trainer)

    @trainer.on(Events.ITERATION_STARTED(once=2))
    def thaw() -> None:
        model.bias.requires_grad_(True)
        if not from_the_beginning:
            optimizer.add_param_group(late)

    if from_the_beginning:
        before = model.bias.detach().clone()
        assert trainer.run(DATA, max_epochs=1).num_steps == len(DATA)
        assert not torch.equal(model.bias, before)
        return
    with pytest.raises(ValueError, match="not made for, since it was added later; give the optimizer all groups before"):
        trainer.run(DATA, max_epochs=1)


def test_a_group_that_a_schedule_can_do_without_knowing_is_stepped() -> None:
    """Some compute a rate from the one before, so that a group may be added at any time."""
    trainer, optimizer = make()
    schedule = StepLR(optimizer, 2)
    LearningRateSchedule(schedule).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), lambda: optimizer.add_param_group({"params": [], "lr": 0.1}))
    assert trainer.run(DATA, max_epochs=1).num_steps == len(DATA)
    assert optimizer.param_groups[1]["lr"] == pytest.approx(1e-5)


def test_a_resume_at_the_end_of_the_first_epoch_is_no_step_too_early(tmp_path: Path) -> None:
    """Torch warns of a schedule that is stepped before its optimizer: an earlier process has stepped that."""
    for max_epochs in (1, 2):
        trainer, optimizer = make()
        LearningRateSchedule(StepLR(optimizer, 1, 0.5)).attach(trainer, Events.EPOCH_COMPLETED)
        Checkpoint(tmp_path, every=1).attach(trainer)
        if max_epochs == 1:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=len(DATA)), trainer.interrupt)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.run(DATA, max_epochs=2)
    assert optimizer.param_groups[0]["lr"] == 0.01 / 4
