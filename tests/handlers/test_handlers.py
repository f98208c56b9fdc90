"""Each handler does what its first line says, at the update it says, and leaves the training as it was."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn

import cuts
from clock import Clock
from ignite_train import (
    FairseqLossScaling,
    ForwardContractError,
    ForwardOutput,
    TorchLossScaling,
    Trainer,
    TrainEvents,
    WarmUpSchedule,
    create_evaluator,
    create_trainer,
)
from ignite_train.forward import as_forward_output
from ignite_train.handlers import (
    Checkpoint,
    EmptyCache,
    FailureBoard,
    Freeze,
    GarbageCollection,
    GradientMonitor,
    HangWatch,
    LearningRateSchedule,
    LossScaleLogger,
    MinLearningRate,
    ModelEMA,
    Profiler,
    StepTimer,
    StopOnSignal,
    TimeLimit,
    TrainingMetrics,
    Validation,
)
from ignite_train.kinds_of_handlers import Handler
from ignite_train.metrics import PUBLISHED_METRICS
from ignite_train.ranks import collectives
from ranks import run_ranks
from update_options import with_options

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches


def make(
    forward: Callable[..., Any] = cuts.forward, groups: int = 1, **options: Any
) -> tuple[Trainer, nn.Linear, torch.optim.Optimizer]:
    model = cuts.linear()
    optimizer = torch.optim.SGD(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.01}] if groups == 2 else model.parameters(), lr=0.05
    )
    return create_trainer(model, optimizer, forward, **with_options(**options)), model, optimizer


def overflow_at(*updates: int) -> Callable[[Trainer], Callable[..., ForwardOutput]]:
    """A forward whose loss is infinite in these updates."""

    def bind(holder: list[Trainer]) -> Callable[..., ForwardOutput]:
        def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
            output = cuts.forward(model, micro_batch)
            return output._replace(loss=output.loss * math.inf) if holder[0].state.iteration in updates else output

        return forward

    return bind


# --- attached twice ---

ONCE: dict[str, Callable[[], Any]] = {
    "TrainingMetrics": TrainingMetrics,
    "StepTimer": StepTimer,
    "ModelEMA": ModelEMA,
    "HangWatch": HangWatch,
    "FailureBoard": FailureBoard,
    "Profiler": lambda: Profiler("traces"),
}


@pytest.mark.parametrize("name", ONCE)
def test_a_handler_that_would_count_or_start_twice_is_attached_once(name: str) -> None:
    """To one trainer; another of its class may be attached, and the same one again after it was taken off."""
    trainer, _, _ = make()
    handler = ONCE[name]()
    handle = handler.attach(trainer)
    with pytest.raises(ValueError, match=f"^{name} must be attached once to a trainer, got the same one again; make another"):
        handler.attach(trainer)
    ONCE[name]().attach(trainer)
    if handle is not None:
        handle.remove()
        handler.attach(trainer)


@pytest.mark.parametrize("name", [*ONCE, "Validation", "GradientMonitor"])
def test_a_handler_has_one_trainer(name: str) -> None:
    """An average would be of the other model. The second is refused also where the first was deleted."""
    trainer, model, _ = make()
    more = {"Validation": lambda: Validation(create_evaluator(model, cuts.forward), DATA), "GradientMonitor": GradientMonitor}
    handler = {**ONCE, **more}[name]()
    handler.attach(trainer)
    del trainer
    gc.collect()
    with pytest.raises(ValueError, match=f"^{name} must be attached to one trainer, got a second; make another {name} for it$"):
        handler.attach(make()[0])


def test_a_handler_that_one_trainer_refused_may_be_attached_to_another() -> None:
    """It has nothing of the first."""
    trainer, model, _ = make()
    freeze = Freeze(list(model.parameters())[:1])
    with pytest.raises(ValueError, match="module must have parameters that the optimizer trains"):
        freeze.attach(make()[0])
    freeze.attach(trainer)


class OverFolds(Handler):
    """Of a user: counts the updates of several trainers."""

    def __init__(self) -> None:
        self.num_updates = 0

    def attach(self, trainer: Any) -> None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self)

    def __call__(self) -> None:
        self.num_updates += 1


def test_a_handler_of_the_user_serves_the_trainers_that_it_is_given_to() -> None:
    """It may sum over folds, and be copied and pickled; only what keeps something of one trainer has to say so."""
    handler = OverFolds()
    for _ in range(2):
        trainer, _, _ = make()
        handler.attach(trainer)
        trainer.run(DATA, max_iters=2)
    assert pickle.loads(pickle.dumps(handler)).num_updates == copy.deepcopy(handler).num_updates == 4


@pytest.mark.parametrize("kind", [EmptyCache, GarbageCollection])
def test_some_serve_several_trainers(kind: type) -> None:
    """They keep nothing of a trainer; see also the test of TimeLimit."""
    handler = kind()
    for _ in range(2):
        handler.attach(make()[0])


def test_what_begins_with_a_run_begins_at_once_inside_of_one() -> None:
    """Attached by a handler of update 2: the clock runs, the signal is heard, the collector pauses until the run is over."""
    collects: list[bool] = []

    def attached(build: Callable[[Trainer], object]) -> Trainer:
        trainer, _, _ = make()
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: build(trainer))
        return trainer

    assert attached(lambda trainer: TimeLimit(1e-9).attach(trainer)).run(DATA, max_epochs=1).iteration == 2
    listening = attached(lambda trainer: StopOnSignal().attach(trainer))
    listening.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: signal.raise_signal(signal.SIGTERM))
    assert listening.run(DATA, max_epochs=1).iteration == 3
    pausing = attached(lambda trainer: GarbageCollection().attach(trainer))
    pausing.add_event_handler(Events.ITERATION_COMPLETED, lambda: collects.append(gc.isenabled()))
    pausing.run(DATA, max_epochs=1)
    assert (collects[0], collects[-1], gc.isenabled()) == (True, False, True)


def test_a_method_at_an_event_is_no_attach() -> None:
    """A handler of a class of the user's own may have one, before it is attached and after."""

    class Noted(ModelEMA):
        def note(self) -> None: ...

    trainer, _, _ = make()
    average = Noted()
    trainer.add_event_handler(Events.EPOCH_COMPLETED, average.note)
    average.attach(trainer)
    trainer.run(DATA, max_epochs=1)


def test_others_are_attached_for_each_of_their_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do their work at both, and what travels with an update travels once."""
    trainer, model, _ = make()
    evaluator = create_evaluator(model, cuts.forward)
    validation, cache = Validation(evaluator, DATA), EmptyCache(fragmentation=0.5)
    seen: list[int] = []
    evaluator.add_event_handler(Events.COMPLETED, lambda: seen.append(trainer.state.iteration))
    for event in (Events.ITERATION_COMPLETED(once=2), Events.EPOCH_COMPLETED):
        validation.attach(trainer, event)
    trainer.run(DATA, max_epochs=1)
    assert seen[-2:] == [2, 6]

    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    for event in (Events.ITERATION_COMPLETED(once=2), Events.EPOCH_COMPLETED):
        cache.attach(trainer, event)
    assert trainer.piggybacks == [cache]


# --- EmptyCache ---


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Events.ITERATION_COMPLETED(every=2), [2, 4, 6]),
        (Events.ITERATION_COMPLETED(once=1) | Events.ITERATION_COMPLETED(every=3), [1, 3, 6]),
    ],
)
def test_empty_cache_at_updates(monkeypatch: pytest.MonkeyPatch, event: Any, expected: list[int]) -> None:
    """It empties after updates N, 2N, ...; with `once=1` also after the first; evaluation does not count."""
    trainer, model, _ = make()
    emptied: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append(trainer.state.iteration))
    EmptyCache().attach(trainer, event)
    evaluator = create_evaluator(model, cuts.forward)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: evaluator.run(DATA))
    trainer.run(DATA, max_epochs=1)
    assert emptied == expected


def test_empty_cache_after_each_micro_batch_of_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fairseq does until the first step: here a skipped update and the next one, of two micro-batches each."""
    holder: list[Trainer] = []
    trainer, _, _ = make(overflow_at(1)(holder), on_nonfinite="skip", accumulation_steps=2)
    holder.append(trainer)
    emptied: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    state = trainer.state
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: emptied.append((state.iteration, state.num_micro_batches)))
    first = TrainEvents.BACKWARD_COMPLETED(event_filter=lambda trainer, _: trainer.state.num_steps == 0)
    EmptyCache().attach(trainer, first)
    trainer.run(DATA, max_epochs=2)
    assert emptied == [(1, 1), (1, 2), (2, 3), (2, 4)]


def test_empty_cache_without_an_accelerator() -> None:
    """On a machine without an accelerator it does nothing and raises nothing."""
    trainer, _, _ = make()
    EmptyCache().attach(trainer, Events.ITERATION_COMPLETED)
    assert trainer.run(DATA, max_epochs=1).num_steps == 6


# --- LossScaleLogger ---


def test_loss_scale_logger(caplog: pytest.LogCaptureFixture) -> None:
    """The metric is the scale each update used, skipped or not, whatever the order of attaching; changes are logged."""
    holder: list[Trainer] = []
    trainer, _, _ = make(overflow_at(3)(holder), loss_scaling=FairseqLossScaling(8.0, scale_window=4))
    holder.append(trainer)
    seen: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.append(trainer.state.metrics["loss_scale"]))
    LossScaleLogger().attach(trainer)
    with caplog.at_level(logging.INFO):
        trainer.run(DATA, max_epochs=2)
    assert seen == [8, 8, 8, 4, 4, 4, 4, 8, 8, 8, 8, 16]
    changes = [record.message for record in caplog.records if "loss scale" in record.message and "->" in record.message]
    assert changes == [
        "update 4: loss scale 8 -> 4",
        "update 8: loss scale 4 -> 8",
        "update 12: loss scale 8 -> 16",
    ]


# --- LearningRateSchedule ---


def test_schedule_follows_applied_updates() -> None:
    """Skipped updates leave the rate as it is; the curve over applied ones is that of torch's scheduler alone."""
    holder: list[Trainer] = []
    trainer, _, optimizer = make(overflow_at(2, 3, 7)(holder), loss_scaling=FairseqLossScaling(8.0))
    holder.append(trainer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    LearningRateSchedule(scheduler).attach(trainer)
    used: list[float] = []
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: used.append(trainer.state.output.learning_rates[0]))
    trainer.run(DATA, max_epochs=2)

    parameter = nn.Parameter(torch.zeros(1))
    alone = torch.optim.SGD([parameter], lr=0.05)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(alone, T_max=12)
    expected = []
    for _ in range(9):
        expected.append(alone.param_groups[0]["lr"])
        alone.step()
        reference.step()
    assert used == expected
    assert scheduler.last_epoch == 9


def test_schedule_needs_no_score() -> None:
    """ReduceLROnPlateau is refused with the remedy; so is what is no scheduler."""
    _, _, optimizer = make()
    with pytest.raises(TypeError, match="scheduler must not be ReduceLROnPlateau"):
        LearningRateSchedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(TypeError, match="scheduler must be a scheduler of"):
        LearningRateSchedule(0.1)  # type: ignore[arg-type]


def test_a_schedule_is_not_stepped_twice() -> None:
    """As by a cell of a notebook that is run again; what was removed may be attached again."""
    trainer, _, optimizer = make()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    LearningRateSchedule(schedule).attach(trainer).remove()
    LearningRateSchedule(schedule).attach(trainer)
    with pytest.raises(ValueError, match="ExponentialLR that is attached already and would be stepped twice"):
        LearningRateSchedule(schedule).attach(trainer)
    LearningRateSchedule(torch.optim.lr_scheduler.StepLR(optimizer, 100)).attach(trainer)
    trainer.run(DATA[:1])
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_a_schedules_own_type_error_is_not_hidden() -> None:
    """Errors inside a schedule reach the user."""
    trainer, _, optimizer = make()

    def shape(step: int) -> float:
        return 1.0 if step < 2 else step + "broken"  # type: ignore[operator]

    LearningRateSchedule(torch.optim.lr_scheduler.LambdaLR(optimizer, shape)).attach(trainer)
    with pytest.raises(TypeError, match="unsupported operand"):
        trainer.run(DATA, max_epochs=1)


# --- Validation ---


def scores(monkeypatch: pytest.MonkeyPatch, values: list[float], mode: Any) -> list[tuple[Any, ...]]:
    """What Validation thinks after each of these scores."""
    trainer, model, _ = make()
    evaluator = create_evaluator(model, cuts.forward)
    remaining = iter(values)

    @evaluator.on(Events.COMPLETED)
    def replace() -> None:
        evaluator.state.metrics["loss"] = next(remaining)

    validation = Validation(evaluator, DATA, mode=mode)
    validation.attach(trainer, Events.ITERATION_COMPLETED)
    history: list[tuple[Any, ...]] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: history.append((validation.best, validation.best_update, validation.is_best))
    )
    trainer.run(DATA, max_iters=len(values))
    return history


def test_validation_keeps_the_best(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Only a strictly better score is a new best; NaN does not count and does not erase the best, and a warning says so."""
    assert scores(monkeypatch, [3.0, math.nan, 3.0, 2.0, 5.0], "min") == [
        (3.0, 1, True),
        (3.0, 1, False),
        (3.0, 1, False),
        (2.0, 4, True),
        (2.0, 4, False),
    ]
    assert caplog.messages == ["update 2: the validation's loss is NaN; the best so far stays 3.0"]
    assert scores(monkeypatch, [math.nan, -3.0, -1.0], "max") == [(None, None, False), (-3.0, 2, True), (-1.0, 3, True)]


def test_validation_once_an_update() -> None:
    """Where the end of an epoch and every N updates meet, it validates once."""
    trainer, model, _ = make()
    evaluator = create_evaluator(model, cuts.forward)
    at: list[int] = []
    evaluator.add_event_handler(Events.STARTED, lambda: at.append(trainer.state.iteration))
    Validation(evaluator, DATA).attach(trainer, Events.ITERATION_COMPLETED(every=3) | Events.EPOCH_COMPLETED)
    trainer.run(DATA, max_epochs=2)
    assert at == [3, 6, 9, 12]


def test_whether_the_latest_validation_was_the_best_is_known_after_a_resume(tmp_path: Path) -> None:
    """A run that breaks off between the validation and the end of the epoch tells those who ask there."""
    seen: list[bool] = []

    def start() -> Trainer:
        trainer, model, _ = make()
        validation = Validation(create_evaluator(model, cuts.forward), DATA)
        validation.attach(trainer, Events.ITERATION_COMPLETED(every=6) | Events.EPOCH_COMPLETED)
        Checkpoint(tmp_path, every=6, asynchronous=False).attach(trainer)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(validation.is_best))
        return trainer

    broken = start()
    broken.prepend_event_handler(Events.EPOCH_COMPLETED, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        broken.run(DATA)
    assert seen == []
    start().run(DATA)
    assert seen == [True]


def test_before_the_first_validation_none_was_the_best() -> None:
    """Neither in a new run nor in one that resumes from there; nor after a first score that is NaN."""
    _, model, _ = make()
    validation = Validation(create_evaluator(model, cuts.forward), DATA)
    assert validation.is_best is False
    for state in (validation.state_dict(), validation.state_dict() | {"latest_update": 3}):
        validation.load_state_dict(state)
        assert validation.is_best is False


def test_validation_leaves_the_training_as_it_was() -> None:
    """With validation after each update the parameters end bitwise where they end without it, and modes are put back."""
    results = []
    for validates in (False, True):
        trainer, model, _ = make()
        model.eval()  # a mode the user chose: the trainer sets it to train, once
        if validates:
            Validation(create_evaluator(model, cuts.forward), DATA).attach(trainer, Events.ITERATION_COMPLETED)
        trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED, lambda model=model: None)
        trainer.run(DATA, max_epochs=1)
        assert model.training
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)


def test_validation_names_an_unknown_score() -> None:
    """A misspelt score is answered with the nearest metric."""
    trainer, model, _ = make()
    Validation(create_evaluator(model, cuts.forward), DATA, score="sampels", mode="min").attach(trainer)
    with pytest.raises(ValueError, match="did you mean 'samples'"):
        trainer.run(DATA, max_epochs=1)


# --- stopping ---


def test_min_learning_rate(caplog: pytest.LogCaptureFixture) -> None:
    """The run ends before the first update at or below the minimum, with a line; a warm-up from below does not count."""
    trainer, _, optimizer = make()
    rates = [0.0, 0.5, 1.0, 0.5, 0.1, 0.01, 0.001]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, 6)])
    LearningRateSchedule(scheduler).attach(trainer)
    stop = MinLearningRate(optimizer, minimum=0.0005)
    stop.attach(trainer)
    used: list[float] = []
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: used.append(trainer.state.output.learning_rates[0]))
    trainer.run(DATA, max_epochs=10)
    assert used == [0.05 * rate for rate in rates[:5]]
    trainer.run(DATA, max_epochs=10)
    assert len(used) == 5  # running a finished job adds nothing
    lines = [record.message for record in caplog.records if "MinLearningRate ends the run" in record.message]
    assert [line.partition(":")[0] for line in lines] == ["update 5"] * 2


def rates_that_are_used() -> list[float]:
    trainer, _, optimizer = make(reduction="explicit" if idist.get_world_size() > 1 else "auto")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    LearningRateSchedule(scheduler).attach(trainer)
    MinLearningRate(optimizer, minimum=0.001).attach(trainer)
    used: list[float] = []
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: used.append(trainer.state.output.learning_rates[0]))
    trainer.run(DATA, max_epochs=10)
    return used


@pytest.mark.slow
def test_min_learning_rate_ends_two_ranks_where_it_ends_one() -> None:
    """They have the same rates, so they need not ask each other, and no update more is made."""
    assert rates_that_are_used() == pytest.approx([0.05, 0.005])
    assert run_ranks(rates_that_are_used) == [pytest.approx([0.05, 0.005])] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("broken_off_after", [1, 3, 4, 5], ids=["in the warm-up", "above", "before the last", "at the end"])
def test_min_learning_rate_over_a_resume(tmp_path: Path, broken_off_after: int) -> None:
    """Whether the rate has been above the minimum is resumed: the run ends where it would have, also if it has ended before."""
    rates = [0.0, 0.0, 1.0, 0.5, 0.1, *[1e-3] * 20]  # five updates, of which two are the warm-up

    def used(stop_after: int) -> list[float]:
        trainer, _, optimizer = make()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step])
        LearningRateSchedule(scheduler).attach(trainer)
        MinLearningRate(optimizer, minimum=0.0005).attach(trainer)
        Checkpoint(tmp_path, every=1, asynchronous=False).attach(trainer)
        seen: list[float] = []
        trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: seen.append(trainer.state.output.learning_rates[0]))
        trainer.run(DATA, max_iters=stop_after)
        return seen

    assert used(broken_off_after) == [0.05 * rate for rate in rates[:broken_off_after]]
    assert used(12) == [0.05 * rate for rate in rates[broken_off_after:5]]


def test_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    """No update begins after the limit; the time of earlier runs counts; a job that is out of time adds nothing."""
    trainer, _, _ = make()
    limit = TimeLimit(seconds=1000)
    assert limit.elapsed_seconds == 0.0
    limit.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert 0 < limit.elapsed_seconds < 1000

    late, _, _ = make()
    limit = TimeLimit(seconds=1000)
    limit.load_state_dict({"elapsed_seconds": 999.9999999})
    limit.attach(late)
    late.run(DATA, max_epochs=1)
    assert late.state.num_steps <= 1

    over, _, _ = make()
    limit = TimeLimit(seconds=1000)
    limit.load_state_dict({"elapsed_seconds": 1000.0})
    limit.attach(over)
    completed: list[int] = []
    over.add_event_handler(Events.COMPLETED, lambda: completed.append(over.state.iteration))
    over.run(DATA, max_epochs=1)
    assert completed == [0]
    assert "update 0: TimeLimit ends the run: it has taken 1000 s, earlier starts included, of seconds=1000" in caplog.text


def test_time_between_two_runs_is_not_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook that rests between two runs has as much time left as before."""
    clock = Clock(monkeypatch)
    trainer, _, _ = make()
    limit = TimeLimit(seconds=1000)
    limit.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, clock.take, 10.0)
    trainer.run(DATA, max_epochs=1)
    clock.take(3600.0)
    assert limit.elapsed_seconds == 60.0
    assert trainer.run(DATA, max_epochs=2).num_steps == 12
    assert limit.elapsed_seconds == 120.0


def test_a_time_that_is_loaded_within_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what was loaded; what passes between loading and the next run does not count."""
    clock = Clock(monkeypatch)
    trainer, _, _ = make()
    limit = TimeLimit(seconds=1000)
    limit.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, clock.take, 10.0)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: limit.load_state_dict({"elapsed_seconds": 500.0}))
    trainer.run(DATA)
    assert limit.elapsed_seconds == 520.0
    limit.load_state_dict({"elapsed_seconds": 700.0})
    clock.take(3600.0)
    assert limit.elapsed_seconds == 700.0


def test_a_time_limit_of_two_trainers_counts_until_both_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trainer may run in the session of another, with the same handler."""
    clock = Clock(monkeypatch)
    (outer, _, _), (inner, _, _), limit = make(), make(), TimeLimit(seconds=1000)
    for trainer in (outer, inner):
        limit.attach(trainer)
    with outer.session():
        inner.run(DATA)
        clock.take(10.0)
    clock.take(100.0)
    assert limit.elapsed_seconds == 10.0


@pytest.mark.parametrize("seconds", [0, -1, math.nan, "1", True])
def test_time_limit_refuses(seconds: Any) -> None:
    """A limit is a positive number of seconds."""
    with pytest.raises((TypeError, ValueError), match="seconds must be"):
        TimeLimit(seconds=seconds)


# --- showing ---


@pytest.mark.parametrize("groups", [1, 2])
def test_whatever_is_published_beside_the_logs_is_reserved(groups: int) -> None:
    """No name of a log can meet a metric of the trainer's handlers or of the evaluator, now or when one is added."""

    def without_logs(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        return cuts.forward(model, micro_batch)._replace(logs={})

    trainer, model, _ = make(without_logs, groups, loss_scaling=TorchLossScaling())
    TrainingMetrics().attach(trainer)
    LossScaleLogger().attach(trainer)
    trainer.run(DATA, max_epochs=1)
    published = {*trainer.state.metrics, *create_evaluator(model, without_logs).run(DATA).metrics}
    assert {name for name in published if not name.startswith("learning_rate/")} <= PUBLISHED_METRICS.keys()
    published |= {"tokens_per_second", *PUBLISHED_METRICS}
    for name in published:
        with pytest.raises(ForwardContractError, match=f"'{name}'"):
            as_forward_output((torch.ones(()), 1, {name: 1.0}))


@pytest.mark.parametrize(("length", "is_warned"), [(6, True), (7, False)], ids=["as long as the run", "longer"])
def test_a_schedule_that_ends_behind_skipped_updates_is_warned_about(length: int, is_warned: bool, caplog: Any) -> None:
    """It has made fewer steps than it is long."""
    holder: list[Trainer] = []
    trainer, _, optimizer = make(overflow_at(2)(holder), loss_scaling=FairseqLossScaling(8.0))
    holder.append(trainer)
    LearningRateSchedule(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)).attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert (trainer.state.num_steps, trainer.state.num_skipped) == (5, 1)
    trainer.run(DATA, max_epochs=2)
    assert ("the schedule is at its end" in caplog.text) is is_warned


@pytest.mark.parametrize(
    ("event", "length", "is_warned"),
    [
        (Events.EPOCH_COMPLETED, 2, False),
        (Events.EPOCH_COMPLETED, 1, True),
        (Events.ITERATION_COMPLETED, 7, False),
        (Events.ITERATION_COMPLETED, 6, True),
    ],
)
def test_skipped_updates_do_not_count_where_the_schedule_is_stepped_in_them_too(
    event: Any, length: int, is_warned: bool, caplog: Any
) -> None:
    """It is at its end once it has made all of its steps: in each epoch, or in each update, whether one was skipped or not."""
    holder: list[Trainer] = []
    trainer, _, optimizer = make(overflow_at(2)(holder), loss_scaling=FairseqLossScaling(8.0))
    holder.append(trainer)
    LearningRateSchedule(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)).attach(trainer, event)
    trainer.run(DATA, max_epochs=1)
    assert (trainer.state.num_steps, trainer.state.num_skipped) == (5, 1)
    trainer.run(DATA, max_epochs=2)
    assert ("the schedule is at its end" in caplog.text) is is_warned


SCHEDULES_TO_EXTEND: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cosine": (lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4), "step 4 of T_max=4"),
    "one cycle": (lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4), "of total_steps=4"),
    "polynomial": (lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, 4), "step 4 of total_iters=4"),
    "warm-up and cosine": (
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3),
            ],
            [1],
        ),
        "step 3 of T_max=3",
    ),
    "cosine for a longer run": (lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8), ""),
    "cosine with periods": (lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2), ""),
    "warm-up": (lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4), ""),
    "steps": (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), ""),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", SCHEDULES_TO_EXTEND)
@pytest.mark.parametrize("resumed", [True, False])
def test_a_run_beyond_its_schedule_is_warned_about(case: str, resumed: bool, build: Any, tmp_path: Any, caplog: Any) -> None:
    """Once, when the limit of a finished run was raised, in the same process or another; never before that.

    A `OneCycleLR` raises an error at one more step, so the run is refused before its first update.
    """
    schedule, message = SCHEDULES_TO_EXTEND[case]
    data = [(torch.ones(1, 4), torch.ones(1, 1))] * 2

    def prepare() -> Any:
        setup = build()
        LearningRateSchedule(schedule(setup.optimizer)).attach(setup.trainer)
        if resumed:
            Checkpoint(tmp_path).attach(setup.trainer)
        return setup.trainer

    trainer = prepare()
    trainer.run(data, max_epochs=2)
    trainer = prepare() if resumed else trainer
    trainer.run(data, max_epochs=2)
    assert "the schedule is at its end" not in caplog.text
    refused = pytest.raises(ValueError, match="will be at step 6 at the end of this run") if case == "one cycle" else None
    with refused or contextlib.nullcontext() as error:
        trainer.run(data, max_epochs=3)
    lines = [line for line in caplog.messages if "the schedule is at its end" in line]
    lines += [str(error.value)] if refused else []
    assert [message in line for line in lines] == [True] * bool(message)
    assert trainer.state.iteration == (4 if refused else 6)


@pytest.mark.parametrize(("length", "is_warned"), [(5, False), (4, True)], ids=["beyond half", "half"])
def test_a_run_whose_limit_is_raised_early_is_warned_about(
    length: int, is_warned: bool, build: Any, tmp_path: Any, caplog: Any
) -> None:
    """The checkpoint restores the length of the schedule, which then ends in the first half of the run."""
    data = [(torch.ones(1, 4), torch.ones(1, 1))] * 2

    def run(length: int, max_epochs: int, updates: int) -> None:
        setup = build()
        LearningRateSchedule(WarmUpSchedule(setup.optimizer, "cosine", warm_up=1, total=length)).attach(setup.trainer)
        Checkpoint(tmp_path, every=1).attach(setup.trainer)
        setup.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=updates), setup.trainer.terminate)
        setup.trainer.run(data, max_epochs=max_epochs)

    run(length, 2, 1)
    assert "the schedule ends early" not in caplog.text
    for step, updates in ((1, 2), (2, 8)):  # and each start that comes before the end says so
        caplog.clear()
        run(8, 4, updates)
        told = f"(WarmUpSchedule: step {step} of total={length}, which a checkpoint restores)"
        assert (f"the schedule ends early {told}, and the run at step 8" in caplog.text) is is_warned


@pytest.mark.parametrize("case", ["cosine", "one cycle"])
def test_a_schedule_that_begins_in_a_resumed_run_is_compared_with_the_rest(
    case: str, build: Any, tmp_path: Any, caplog: Any
) -> None:
    """Its length is the script's, so the remedy is another length, and no other name."""
    data = [(torch.ones(1, 4), torch.ones(1, 1))] * 2

    def prepare(*, scheduled: bool) -> Any:
        setup = build()
        if scheduled:
            LearningRateSchedule(SCHEDULES_TO_EXTEND[case][0](setup.optimizer)).attach(setup.trainer)
        Checkpoint(tmp_path).attach(setup.trainer)
        return setup.trainer

    prepare(scheduled=False).run(data, max_epochs=2)
    with pytest.raises(ValueError, match="count in updates") if case == "one cycle" else contextlib.nullcontext() as error:
        prepare(scheduled=True).run(data, max_epochs=6)
    told = str(error.value) if error is not None else caplog.text
    assert "=4 and will be stepped 8 times in this run" in told
    assert "which a checkpoint restores" not in told
