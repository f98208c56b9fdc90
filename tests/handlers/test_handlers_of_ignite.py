"""What docs/handlers.md says of Ignite's own handlers: which are saved and resumed, and with what arguments they work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import (
    BasicTimeProfiler,
    ConcatScheduler,
    CosineAnnealingScheduler,
    EpochOutputStore,
    LinearCyclicalScheduler,
    ModelCheckpoint,
    ParamGroupScheduler,
    PiecewiseLinear,
    PiecewiseLinearStateScheduler,
    Timer,
)

import cuts
from bits import bit_by_bit
from ignite_train import Trainer, TrainEvents, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint

DATA = cuts.cut(cuts.samples(), [8] * 8)
Optimizer = torch.optim.Optimizer


def concatenated(optimizer: Optimizer) -> Any:
    first = LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.01, 6)
    return ConcatScheduler([first, CosineAnnealingScheduler(optimizer, "lr", 0.1, 0.01, 6)], durations=[5])


def grouped(optimizer: Optimizer) -> Any:
    parts = [
        LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.01, 8, param_group_index=0),
        CosineAnnealingScheduler(optimizer, "lr", 0.1, 0.01, 12, param_group_index=1),
    ]
    return ParamGroupScheduler(parts, names=["weight", "bias"])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "PiecewiseLinear": lambda optimizer: PiecewiseLinear(optimizer, "lr", [(0, 0.0), (6, 0.1), (16, 0.0)]),
    "CosineAnnealingScheduler": lambda optimizer: CosineAnnealingScheduler(optimizer, "lr", 0.1, 0.01, 10),
    "LinearCyclicalScheduler": lambda optimizer: LinearCyclicalScheduler(optimizer, "lr", 0.1, 0.01, 10),
    "ConcatScheduler": concatenated,
    "ParamGroupScheduler": grouped,
    "momentum": lambda optimizer: CosineAnnealingScheduler(optimizer, "momentum", 0.5, 0.9, 10),
}


def job(directory: Path | None, make: Callable[[Optimizer], Any]) -> tuple[Trainer, Any, list[Any], Any]:
    model = cuts.linear()
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.05, momentum=0.5)
    trainer, used, scheduler = create_trainer(model, optimizer, cuts.forward), [], make(optimizer)
    if directory is not None:
        Checkpoint(directory, every=1, asynchronous=False).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    trainer.add_event_handler(
        TrainEvents.STEP_COMPLETED, lambda: used.append([(g["lr"], g["momentum"]) for g in optimizer.param_groups])
    )
    return trainer, model, used, scheduler


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_schedulers_are_saved_and_resumed(name: str, tmp_path: Path) -> None:
    """At ITERATION_STARTED, broken off in update 5: the same settings in each update, and the same weights."""
    whole, expected, settings, _ = job(None, SCHEDULERS[name])
    whole.run(DATA, max_epochs=2)
    trainer, _, before, _ = job(tmp_path, SCHEDULERS[name])
    trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED(once=5), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA, max_epochs=2)
    trainer, model, after, _ = job(tmp_path, SCHEDULERS[name])
    trainer.run(DATA, max_epochs=2, resume="must")
    assert [*before, *after] == settings
    assert len({str(setting) for setting in settings}) > 3
    assert bit_by_bit(model.state_dict()) == bit_by_bit(expected.state_dict())


@pytest.mark.slow
def test_a_scheduler_of_a_number_in_the_state(tmp_path: Path) -> None:
    """`state.NAME` follows its milestones, after a resume too."""

    def start(directory: Path) -> tuple[Trainer, list[float]]:
        model, seen = cuts.linear(), []
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), cuts.forward)
        Checkpoint(directory, every=1, asynchronous=False).attach(trainer)
        scheduler = PiecewiseLinearStateScheduler([(0, 1.0), (8, 0.0)], param_name="temperature", create_new=True)
        scheduler.attach(trainer, Events.ITERATION_COMPLETED)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(trainer.state.temperature))  # type: ignore[attr-defined]
        return trainer, seen

    whole, expected = start(tmp_path / "whole")
    whole.run(DATA)
    trainer, before = start(tmp_path / "broken")
    trainer.run(DATA, max_iters=3)
    trainer, after = start(tmp_path / "broken")
    trainer.run(DATA, max_iters=8)
    assert [*before, *after] == expected


@pytest.mark.parametrize("steps", [1, 2])
def test_a_profiler_that_counts_micro_batches_is_warned_about(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """BasicTimeProfiler takes the length of the loader for the updates of an epoch; the line names what does not."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), cuts.forward, accumulation_steps=steps)
    BasicTimeProfiler().attach(trainer)
    trainer.run(DATA, max_epochs=2)
    assert sum("BasicTimeProfiler" in line and "StepTimer" in line for line in caplog.messages) == (steps > 1)


def test_what_measures_and_what_stores(tmp_path: Path) -> None:
    """Timer, EpochOutputStore, BasicTimeProfiler with max_epochs, and ModelCheckpoint for a file of the model."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), cuts.forward)
    evaluator = create_evaluator(model, cuts.forward)
    timer, store, profiler = Timer(average=True), EpochOutputStore(lambda output: output.sample_size), BasicTimeProfiler()
    timer.attach(trainer, start=Events.EPOCH_STARTED, step=Events.ITERATION_COMPLETED)
    store.attach(evaluator, "sizes")
    profiler.attach(trainer)
    files = ModelCheckpoint(tmp_path, "net", require_empty=False, n_saved=None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, files, {"model": model})
    trainer.run(DATA, max_epochs=2)
    evaluator.run(DATA)
    assert timer.step_count == 8
    assert evaluator.state.sizes == [float(w.sum()) for _, _, w in DATA]  # type: ignore[attr-defined]
    assert profiler.get_results()["event_handlers_stats"]
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["net_model_16.pt", "net_model_8.pt"]
    assert bit_by_bit(torch.load(tmp_path / "net_model_16.pt")) == bit_by_bit(dict(model.state_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TypeError):  # it reads max_epochs
            trainer.run(DATA, max_iters=20)
