"""`handle.remove()` takes off all that a handler has put on its trainer, which may be attached again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_train import ForwardOutput, Trainer, create_evaluator, create_trainer
from ignite_train.engine.attachable import owner_of
from ignite_train.engine.dispatch import attachables, attached
from ignite_train.handlers import (
    Csv,
    CurvatureMonitor,
    EmptyCache,
    GarbageCollection,
    GradNormConsistency,
    JsonLines,
    LearningRateSchedule,
    LossScaleLogger,
    MinLearningRate,
    ModelEMA,
    MomentumTeacher,
    Profiler,
    ProgressLog,
    StateConsistency,
    StepTimer,
    StochasticWeightAveraging,
    TensorBoard,
    TimeLimit,
    TrainingMetrics,
    Validation,
)

DATA = [torch.ones(2, 3)] * 2


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def make() -> Trainer:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)


def optimizer_of(trainer: Trainer) -> torch.optim.Optimizer:
    return trainer.optimizers["optimizer"]


KINDS: dict[str, Callable[[Trainer, Path], Any]] = {
    "Csv": lambda _, place: Csv(place / "a.csv"),
    "CurvatureMonitor": lambda *_: CurvatureMonitor(forward),
    "EmptyCache": lambda *_: EmptyCache(),
    "GarbageCollection": lambda *_: GarbageCollection(),
    "GradNormConsistency": lambda *_: GradNormConsistency(),
    "JsonLines": lambda _, place: JsonLines(place / "a.jsonl"),
    "LearningRateSchedule": lambda trainer, _: LearningRateSchedule(
        torch.optim.lr_scheduler.StepLR(optimizer_of(trainer), step_size=1)
    ),
    "LossScaleLogger": lambda *_: LossScaleLogger(),
    "MinLearningRate": lambda trainer, _: MinLearningRate(optimizer_of(trainer), minimum=0.0),
    "ModelEMA": lambda *_: ModelEMA(),
    "MomentumTeacher": lambda trainer, _: MomentumTeacher(copy.deepcopy(trainer.model), trainer.model),
    "Profiler": lambda _, place: Profiler(place, updates=range(100, 101)),
    "ProgressLog": lambda *_: ProgressLog("simple"),
    "StateConsistency": lambda trainer, _: StateConsistency(trainer.model, optimizer_of(trainer)),
    "StepTimer": lambda *_: StepTimer(),
    "StochasticWeightAveraging": lambda *_: StochasticWeightAveraging(),
    "TensorBoard": lambda _, place: TensorBoard(place, histograms=3),
    "TimeLimit": lambda *_: TimeLimit(99.0),
    "TrainingMetrics": lambda *_: TrainingMetrics(),
    "Validation": lambda trainer, _: Validation(create_evaluator(trainer.model, forward), DATA),
}


def put_on(trainer: Trainer) -> list[Any]:
    """The classes of what is on a trainer."""
    functions = [*trainer.on_enter, *trainer.moments.on_record, *(one for _, one, _ in attached(trainer)), *trainer.piggybacks]
    return sorted(type(owner_of(one)).__name__ for one in functions)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_and_it_may_be_attached_again(kind: str, tmp_path: Path) -> None:
    trainer = make()
    trainer.sections  # noqa: B018  # some handlers ask for them, and they stay
    trainer.run(DATA, max_epochs=1)
    before = put_on(trainer)
    handler = KINDS[kind](trainer, tmp_path)
    handle = handler.attach(trainer)
    present = put_on(trainer)
    assert present != before
    trainer.run(DATA, max_epochs=2)
    handle.remove()
    assert put_on(trainer) == before
    trainer.run(DATA, max_epochs=3)
    handler.attach(trainer)
    assert put_on(trainer) == present
    assert trainer.run(DATA, max_epochs=4).iteration == 8


def test_one_of_two_events_may_be_given_up() -> None:
    """The other event keeps all that the handler needs."""
    trainer, limit = make(), TimeLimit(1e-9)
    first, second = (limit.attach(trainer, event) for event in (Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED))
    first.remove()
    assert trainer.run(DATA, max_epochs=9).iteration == 0  # it ends as it is entered
    second.remove()
    assert trainer.run(DATA, max_epochs=9).iteration == 18


def test_a_rate_that_is_no_longer_watched_ends_no_run() -> None:
    trainer = make()
    handle = MinLearningRate(optimizer_of(trainer), minimum=0.05).attach(trainer)

    def fall() -> None:
        optimizer_of(trainer).param_groups[0]["lr"] = 0.01

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), fall)
    assert trainer.run(DATA, max_epochs=3).iteration == 2
    handle.remove()
    assert trainer.run(DATA, max_epochs=3).iteration == 6


def test_a_schedule_that_was_removed_says_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer_of(trainer), T_max=2)
    handle = LearningRateSchedule(schedule).attach(trainer)
    trainer.run(DATA, max_epochs=1)
    handle.remove()
    caplog.clear()
    trainer.run(DATA, max_epochs=2)
    assert caplog.messages == []


def test_a_log_is_silent_while_it_is_removed(tmp_path: Path) -> None:
    """Its evaluator too, which may be given again under the same name."""
    trainer, log = make(), JsonLines(tmp_path / "a.jsonl")
    evaluator = create_evaluator(trainer.model, forward)
    TrainingMetrics(memory=False).attach(trainer, Events.ITERATION_COMPLETED)
    Validation(evaluator, DATA, sanity=0).attach(trainer)

    def written() -> tuple[list[int], int]:
        lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
        training = [line["update"] for line in lines if "train/loss" in line]
        return training, sum("validation/loss" in line for line in lines)

    handle = log.attach(trainer, Events.ITERATION_COMPLETED, evaluator=evaluator)
    trainer.run(DATA, max_epochs=1)
    assert handle is not None
    handle.remove()
    trainer.run(DATA, max_epochs=2)
    assert written() == ([1, 2], 1)
    log.attach(trainer, Events.ITERATION_COMPLETED, evaluator=evaluator)
    trainer.run(DATA, max_epochs=3)
    assert written() == ([1, 2, 5, 6], 2)


def test_a_shown_evaluation_ends_with_its_handler(capfd: pytest.CaptureFixture[str]) -> None:
    trainer, log = make(), ProgressLog("simple")
    evaluator = create_evaluator(trainer.model, forward)
    handle = log.attach(trainer, evaluator=evaluator)
    trainer.run(DATA, max_epochs=1)
    assert handle is not None
    handle.remove()
    capfd.readouterr()
    trainer.run(DATA, max_epochs=2)
    evaluator.run(DATA)
    assert capfd.readouterr().err == capfd.readouterr().out == ""


def test_a_handler_that_is_twice_at_an_event_is_taken_off() -> None:
    """Ignite removes all that are equal in one call."""
    trainer = make()
    validation = Validation(create_evaluator(trainer.model, forward), DATA, sanity=1)
    handles = [validation.attach(trainer, event) for event in (Events.EPOCH_COMPLETED, Events.ITERATION_COMPLETED(every=2))]
    for handle in handles:
        handle.remove()
    assert validation not in attachables(trainer)
