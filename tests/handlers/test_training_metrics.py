"""TrainingMetrics publishes exact means over its interval, and the time, the memory and the place of the run."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

import cuts
from clock import Clock
from ignite_train import (
    ForwardOutput,
    NoLossScaling,
    StaticLossScaling,
    Trainer,
    TrainEvents,
    UpdateOutput,
    count_traffic,
    create_evaluator,
    create_trainer,
)
from ignite_train.engine.sections import SECTIONS
from ignite_train.handlers import Checkpoint, TrainingMetrics, Validation, training_metrics
from ignite_train.metrics import PUBLISHED_METRICS, TIMED_METRICS, grouped_metric, single_metrics
from ranks import run_ranks
from setups import InfiniteIn
from update_options import with_options

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches
EVERY = Events.ITERATION_COMPLETED


def make(forward: Callable[..., Any] = cuts.forward, groups: int = 1, **options: Any) -> Trainer:
    model = cuts.linear()
    parameters = [{"params": [model.weight]}, {"params": [model.bias], "lr": 3e-7}] if groups == 2 else model.parameters()
    return create_trainer(model, torch.optim.SGD(parameters, lr=0.05), forward, **with_options(**options))


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name not in TIMED_METRICS}


# --- means ---


@pytest.mark.parametrize("logger_first", [True, False])
def test_the_means_are_those_of_the_records(logger_first: bool) -> None:
    """Σloss/Σsize over the applied updates of an interval; a reader on the same event sees it, whenever attached."""
    forward = InfiniteIn(4)
    trainer = forward.trainer = make(forward, on_nonfinite="skip", max_grad_norm=1.0)
    outputs: list[Any] = []
    published: list[dict[str, float]] = []

    def read() -> None:
        published.append(dict(trainer.state.metrics))

    event = EVERY(every=4)
    trainer.add_event_handler(EVERY, lambda: outputs.append(trainer.state.update_output))
    for attaches in (logger_first, not logger_first):
        if attaches:
            trainer.add_event_handler(event, read)
            trainer.add_event_handler(Events.COMPLETED, read)
        else:
            TrainingMetrics(base2=True, perplexity=True).attach(trainer, event)
    trainer.run(DATA, max_epochs=1)

    for metrics, interval in zip(published, [outputs[:3], outputs[4:]], strict=True):
        total = sum(output.sample_size for output in interval)
        loss = sum(o.loss * o.sample_size for o in interval) / total
        norms = [output.grad_norm for output in interval]
        assert metrics["loss"] == pytest.approx(loss, rel=1e-14)
        assert metrics["loss_base2"] == pytest.approx(math.log2(math.e) * loss, rel=1e-14)
        assert metrics["perplexity"] == pytest.approx(math.e**loss, rel=1e-13)
        assert metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-14)
        assert metrics["grad_norm_max"] == max(norms)
        assert metrics["clipped"] == sum(norm > 1.0 for norm in norms) / len(norms)
        assert metrics["sample_size"] == total / len(interval)
        assert metrics["samples"] == pytest.approx(sum(o.logs["samples"] for o in interval) / total, rel=1e-14)
        assert metrics["learning_rate"] == 0.05
        assert metrics["skipped"] == 1
        assert "loss_scale" not in metrics


def test_the_loss_is_that_of_float64_by_hand() -> None:
    """With a learning rate too small to matter, it is the mean over all samples of the interval, each by its weight."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-300), cuts.forward, accumulation_steps=2)
    TrainingMetrics().attach(trainer, EVERY(every=3))
    metrics = trainer.run(DATA, max_epochs=1).metrics
    x, y, w = cuts.samples()
    by_hand = (w * (x @ torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64) + 0.05 - y) ** 2).sum() / w.sum()
    assert metrics["loss"] == pytest.approx(float(by_hand), rel=1e-13)
    assert metrics["samples"] == pytest.approx(64 / float(w.sum()), rel=1e-14)


def of_a_rank(attaches: bool) -> tuple[dict[str, float], list[int]]:
    trainer = make(max_grad_norm=1.0, protect=False, reduction="explicit")
    if attaches:
        TrainingMetrics(flops_per_sample=10.0, peak_flops=1e3).attach(trainer, EVERY(every=2))
    with count_traffic("cpu") as traffic:
        counts: list[int] = []
        for event in (Events.ITERATION_STARTED, EVERY):
            trainer.append_event_handler(event, lambda: counts.append(len(traffic.collectives)))
        metrics = trainer.run(cuts.shard([[4, 12, 7, 9], [16, 0, 5, 11]]), max_iters=4).metrics
    return metrics, [end - begin for begin, end in zip(counts[0::2], counts[1::2], strict=True)]


@pytest.mark.slow
def test_two_ranks_publish_the_same_without_a_collective_of_their_own() -> None:
    """The means are over the samples of both, and each update has the one collective that it has without handlers."""
    (first, collectives), (second, others) = run_ranks(of_a_rank, True)
    assert untimed(first) == untimed(second)
    for metrics in (first, second):  # by its own clock, per device
        assert metrics["model_flop_utilisation"] == pytest.approx(metrics["samples_per_second"] * 10.0 / (1e3 * 2), rel=1e-12)
    assert collectives[1:] == others[1:] == [1, 1, 1]  # in the first update the ranks agree on names
    assert [counts for _, counts in run_ranks(of_a_rank, False)] == [collectives, others]
    model, outputs = cuts.linear(), []
    shares = [cuts.cut(cuts.samples(), [4, 12, 7, 9]), cuts.cut(cuts.samples(), [16, 0, 5, 11], start=32)]
    alone = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward, accumulation_steps=2, max_grad_norm=1.0
    )
    alone.add_event_handler(EVERY, lambda: outputs.append(alone.state.update_output))
    alone.run([share[number] for number in range(4) for share in shares], max_epochs=1)
    total = sum(output.sample_size for output in outputs[2:])
    assert first["loss"] == pytest.approx(sum(o.loss * o.sample_size for o in outputs[2:]) / total, rel=1e-12)
    assert first["samples"] == pytest.approx(sum(o.logs["samples"] for o in outputs[2:]) / total, rel=1e-12)
    assert first["grad_norm_max"] == pytest.approx(max(o.grad_norm for o in outputs[2:]), rel=1e-12)


def test_an_interval_without_a_step_has_no_means() -> None:
    """The loss of the interval before is taken away, so that no logger writes it as if it were of this one."""
    forward = InfiniteIn(3, 4)
    trainer = forward.trainer = make(forward, on_nonfinite="skip")
    TrainingMetrics().attach(trainer, EVERY(every=2))
    seen: list[set[str]] = []
    trainer.add_event_handler(EVERY(every=2), lambda: seen.append({"loss", "samples"} & {*trainer.state.metrics}))
    trainer.run(DATA, max_epochs=1)
    assert seen == [{"loss", "samples"}, set(), {"loss", "samples"}]


def test_updates_with_a_name_are_published_apart() -> None:
    """Their loss is another one, so it is in no mean of the others; where an interval has nothing else it stands alone."""

    def penalty(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        size = len(micro_batch[0])
        total = sum(parameter.square().sum() for parameter in model.parameters())
        return ForwardOutput(total * size, size, {"rows": size, "half": (1.0, 2.0)})  # type: ignore[arg-type]

    trainer, records, published = make(), [], []
    TrainingMetrics(memory=False).attach(trainer, EVERY(every=3))
    trainer.add_event_handler(EVERY(every=3), lambda: published.append(dict(trainer.state.metrics)))
    data = cuts.cut(cuts.samples(), [16] * 4)
    with trainer.session():
        for number in range(6):
            is_other = number in (1, 3, 4, 5)
            arguments: Any = {"forward": penalty, "name": "penalty"} if is_other else {}
            records.append(trainer.update([data[number % 4]], **arguments))
    ordinary = [record for record in records[:3] if record.name is None]
    size = sum(record.sample_size for record in ordinary)
    first, second = published
    assert first["loss"] == pytest.approx(sum(record.loss * record.sample_size for record in ordinary) / size, rel=1e-12)
    assert first["grad_norm_max"] == max(record.grad_norm for record in ordinary)
    assert (first["penalty/loss"], first["penalty/rows"]) == pytest.approx((records[1].loss, 1.0), rel=1e-12)
    assert second["penalty/loss"] == pytest.approx(sum(record.loss for record in records[3:]) / 3, rel=1e-12)
    assert second["penalty/half"] == 0.5
    assert not {"loss", "grad_norm", "sample_size"} & second.keys()


def test_a_log_that_is_missing_in_an_interval_is_taken_away(tmp_path: Path) -> None:
    """Also one that an earlier process has published."""

    def start() -> Trainer:
        trainer = make(forward)
        TrainingMetrics().attach(trainer, EVERY(every=2))
        Checkpoint(tmp_path, every=2, asynchronous=False).attach(trainer)
        return trainer

    def forward(model: nn.Module, micro_batch: Any, state: Any) -> ForwardOutput:
        output = cuts.forward(model, micro_batch)
        return output._replace(logs={"rare": 1.0}) if state.iteration <= 2 else output

    assert "rare" in start().run(DATA, max_iters=2).metrics
    assert "rare" not in start().run(DATA, max_iters=4).metrics


def test_a_group_that_is_added_takes_the_name_of_a_single_one_away() -> None:
    """The rate of the only group would stay as it was for ever."""
    trainer = make()
    TrainingMetrics().attach(trainer, EVERY(every=3))
    optimizer: Any = trainer.optimizers["optimizer"]
    trainer.add_event_handler(EVERY(once=3), lambda: optimizer.add_param_group({"params": [], "lr": 0.01}))
    assert trainer.run(DATA, max_iters=3).metrics["learning_rate"] == 0.05
    metrics = trainer.run(DATA, max_iters=6).metrics
    rates = {name: value for name, value in metrics.items() if "rate" in name}
    assert rates == {"learning_rate/0": 0.05, "learning_rate/1": 0.01}


def test_each_group_has_its_learning_rate_in_full_precision() -> None:
    """Two groups, two metrics."""
    trainer = make(groups=2)
    TrainingMetrics().attach(trainer)
    metrics = trainer.run(DATA, max_epochs=1).metrics
    assert (metrics["learning_rate/0"], metrics["learning_rate/1"]) == (0.05, 3e-7)


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_the_loss_scale_is_published_where_there_is_one(scale: float) -> None:
    """It is that of the latest update; without loss scaling there is none."""
    trainer = make(loss_scaling=StaticLossScaling(scale) if scale != 1.0 else NoLossScaling())
    TrainingMetrics().attach(trainer)
    assert trainer.run(DATA, max_epochs=1).metrics.get("loss_scale", 1.0) == scale


def test_a_perplexity_beyond_floats_is_infinite() -> None:
    """It does not end the run."""
    trainer = make(lambda model, batch: model(batch[0]).sum() * 0 + 1e4)
    TrainingMetrics(perplexity=True).attach(trainer)
    assert trainer.run(DATA, max_epochs=1).metrics["perplexity"] == math.inf


def test_a_long_interval_does_not_keep_all_its_records() -> None:
    """They are added up in each update, so that an interval of any length needs a bounded memory."""
    trainer, counted = make(), list[int]()
    TrainingMetrics().attach(trainer, Events.COMPLETED)

    def count() -> None:
        gc.collect()  # what other tests have left is freed whenever the collector comes by
        counted.append(sum(isinstance(thing, UpdateOutput) for thing in gc.get_objects()))

    for update in (1, 18):
        trainer.append_event_handler(EVERY(once=update), count)
    trainer.run(DATA, max_iters=18)
    assert counted[1] < counted[0] + 8


# --- resumption ---


def test_an_interval_is_continued_where_it_was_saved() -> None:
    """An interval that is saved and loaded ends as if nothing had happened."""
    trainer, whole = make(), TrainingMetrics()
    whole.attach(trainer, EVERY(every=6))
    saved: dict[str, Any] = {}
    trainer.add_event_handler(EVERY(once=2), lambda: saved.update(whole.state_dict()))
    expected = trainer.run(DATA, max_epochs=1).metrics

    other, half = make(), TrainingMetrics()
    half.attach(other, EVERY(every=6))
    other.run(DATA, max_iters=2)
    half.load_state_dict(saved)
    assert untimed(other.run(DATA, max_iters=6).metrics) == untimed({**expected, "progress": 5 / 6})


def test_a_loaded_interval_takes_the_place_of_the_one_that_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the updates nor the time of the one that was broken off are added to it."""
    clock = SlowForward(monkeypatch)
    saved: dict[str, Any] = {}
    for broken_off_after in (2, 3):
        trainer, metrics = make(clock.forward), TrainingMetrics()
        metrics.attach(trainer, EVERY(every=6))
        trainer.add_event_handler(EVERY(once=broken_off_after), lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            trainer.run(DATA)
        saved = saved or metrics.state_dict()
    metrics.load_state_dict(saved)
    assert metrics.state_dict() == saved
    assert saved["seconds"]["interval"]["forward"] == saved["sums"]["updates"] == 2.0


def train(directory: Path, published: list[tuple[int, dict[str, Any]]], *, stop_after: int | None = None) -> TrainingMetrics:
    """Two epochs, metrics every 5 updates, checkpoints every 3; breaks off after update `stop_after`."""
    trainer, metrics = make(), TrainingMetrics()
    metrics.attach(trainer, EVERY(every=5))
    trainer.add_event_handler(EVERY(every=5), lambda: published.append((trainer.state.iteration, dict(trainer.state.metrics))))
    Checkpoint(directory, every=3, asynchronous=False).attach(trainer)
    if stop_after is not None:

        @trainer.on(EVERY(once=stop_after))
        def fail() -> None:
            raise ConnectionError

        with pytest.raises(ConnectionError):
            trainer.run(DATA, max_epochs=2)
    else:
        trainer.run(DATA, max_epochs=2)
    return metrics


@pytest.mark.parametrize("stop_after", [4, 7, 11])
def test_intervals_survive_an_interruption_bit_by_bit(tmp_path: Path, stop_after: int) -> None:
    """A run that broke off within an interval publishes the same numbers as one that did not."""
    whole: list[Any] = []
    train(tmp_path / "whole", whole)
    before: list[Any] = []
    after: list[Any] = []
    train(tmp_path / "broken", before, stop_after=stop_after)
    resumed = train(tmp_path / "broken", after)
    assert [update for update, _ in whole] == [5, 10]
    assert {update: untimed(metrics) for update, metrics in before + after} == {u: untimed(metrics) for u, metrics in whole}
    assert sum(resumed.seconds_by_section.values()) > 0


# --- time ---


def test_a_handler_that_changes_the_logs_of_a_record_changes_no_means() -> None:
    """They are counted as they were when the update was."""
    trainer = make(lambda model, x: (cuts.forward(model, x).loss, len(x[0]), {"samples": len(x[0])}))
    TrainingMetrics().attach(trainer, EVERY(every=3))
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: trainer.state.update_output.logs.clear())
    assert trainer.run(DATA, max_iters=3).metrics["samples"] == 1.0


class SlowForward(Clock):
    """A clock by which forward takes a second."""

    def forward(self, model: nn.Module, micro_batch: Any) -> ForwardOutput:
        self.take(1.0)
        return cuts.forward(model, micro_batch)


@pytest.mark.parametrize("evaluates_first", [True, False], ids=["evaluation-first", "metrics-first"])
def test_time_is_put_into_sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, evaluates_first: bool) -> None:
    """By a clock that loader (3 s), forward (1 s), a handler (50 s), evaluation (6 s) and saving (20 s) move."""
    clock = SlowForward(monkeypatch)
    trainer, metrics = make(clock.forward), TrainingMetrics(flops_per_sample=10.0, peak_flops=1e3)
    evaluator = create_evaluator(trainer.model, clock.forward)  # type: ignore[arg-type]
    validation = Validation(evaluator, DATA, sanity=0)
    if evaluates_first:
        validation.attach(trainer, EVERY(every=2))
    trainer.add_event_handler(EVERY, clock.take, 50.0)
    metrics.attach(trainer, EVERY(every=2), evaluator=evaluator)
    if not evaluates_first:
        validation.attach(trainer, EVERY(every=2))
    checkpoint = Checkpoint(tmp_path, every=4, asynchronous=False)
    save = checkpoint.saver.save
    monkeypatch.setattr(checkpoint.saver, "save", lambda *args, **options: (clock.take(20.0), save(*args, **options))[1])
    checkpoint.attach(trainer)
    published: list[dict[str, float]] = []
    trainer.add_event_handler(EVERY(every=2), lambda: published.append(dict(trainer.state.metrics)))
    begin = clock.now
    trainer.run(clock.loader(DATA, 3.0))

    names = [f"{name}_seconds" for name in ("data", "update", "evaluation", "checkpoint", "handler")]
    # What comes in an update after the metrics are published is of the next interval. They are published first in any case.
    assert [[each[name] for name in names] for each in published] == [
        [6.0, 2.0, 0.0, 0.0, 50.0],
        [6.0, 2.0, 6.0, 0.0, 100.0],
        [6.0, 2.0, 6.0, 20.0, 100.0],
    ]
    for each in published:
        assert each["data_wait"] == 0.75
        assert each["updates_per_second"] == 0.25
        assert each["samples_per_second"] == each["sample_size"] / 4.0
        assert each["samples_per_second"] * 0.01 == pytest.approx(each["model_flop_utilisation"], rel=1e-14)
    assert published[-1]["train_wall"] == 24.0
    assert published[-1]["wall"] == sum(sum(each[name] for name in names) for each in published)
    assert sum(metrics.seconds_by_section.values()) <= clock.now - begin


def test_no_time_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that advances whenever it is read: what passes while the metrics are published is of the next interval."""
    readings = itertools.count(0.0, 1.0)
    trainer, published, metrics = make(), [], TrainingMetrics()
    metrics.attach(trainer, EVERY(every=2))
    trainer.add_event_handler(EVERY(every=2), lambda: published.append(dict(trainer.state.metrics)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    begin: list[float] = []
    sections = trainer.sections
    trainer.on_enter.append(lambda _: begin.append(sections._since))
    trainer.run(DATA, max_epochs=1)
    walls = [sum(each.get(f"{name}_seconds", 0.0) for name in SECTIONS) for each in published]
    assert [each["wall"] for each in published] == [*itertools.accumulate(walls)]
    assert sum(metrics.seconds_by_section.values()) == sections._since - begin[0]


class SlowBackward(torch.autograd.Function):
    """The identity; its backward takes time of a clock."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, take: Any) -> torch.Tensor:
        ctx.take = take
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.take(2.0)
        return gradients[0], None


def test_the_update_has_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward (1 s), backward (2 s), norm (8 s), step (4 s), the loader (3 s); handlers inside the update (16 s) are apart."""
    clock = SlowForward(monkeypatch)

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output = clock.forward(model, micro_batch)
        return output._replace(loss=SlowBackward.apply(output.loss, clock.take))

    trainer = make(forward, accumulation_steps=3)
    gradients, optimizer = trainer.process.gather.gradients, trainer.optimizers["optimizer"]  # type: ignore[attr-defined]
    norm = gradients.norm
    monkeypatch.setattr(gradients, "norm", lambda: (clock.take(8.0), norm())[1])
    optimizer.register_step_pre_hook(lambda *_: clock.take(4.0))  # type: ignore[attr-defined]
    for event in ("MICRO_BATCH_STARTED", "FORWARD_COMPLETED", "BACKWARD_COMPLETED", "GRADIENTS_READY"):
        trainer.add_event_handler(TrainEvents[event], clock.take, 16.0)
    TrainingMetrics().attach(trainer, EVERY(every=2))
    metrics = trainer.run(clock.loader(DATA, 3.0), max_epochs=1).metrics
    names = ("data", "forward", "backward", "reduction", "optimizer", "update", "handler", "evaluation", "checkpoint")
    assert [metrics[f"{name}_seconds"] for name in names] == [18.0, 6.0, 12.0, 16.0, 8.0, 42.0, 20 * 16.0, 0.0, 0.0]
    assert metrics["train_wall"] == 60.0


def test_the_time_of_a_session_outside_of_updates_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a name of its own, and is no time of handlers; an update that fails leaves nothing running."""
    clock = SlowForward(monkeypatch)

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output = clock.forward(model, DATA[0])
        if micro_batch == "broken":
            raise RuntimeError(micro_batch)
        return output

    trainer, metrics = make(forward), TrainingMetrics()
    metrics.attach(trainer, EVERY(every=100))
    with trainer.session():
        clock.take(5.0)
        trainer.update(DATA[:2])
        clock.take(7.0)
        with pytest.raises(RuntimeError, match="broken"):
            trainer.update(["broken"])
        clock.take(9.0)
    clock.take(100.0)
    assert ("time", "between updates 21.0 s (88%)") in metrics.rows_at_end()
    seconds = {name: value for name, value in metrics.seconds_by_section.items() if value}
    assert seconds == {"between_updates": 21.0, "forward": 3.0}


@pytest.mark.parametrize("stock", [True, False], ids=["stock-engine", "evaluator"])
def test_an_evaluation_by_a_handler_of_ones_own_is_put_apart(monkeypatch: pytest.MonkeyPatch, stock: bool) -> None:
    """If the metrics are told of its evaluator; what the handler does beside it (5 s and 7 s) is time of handlers."""
    clock = SlowForward(monkeypatch)
    trainer, metrics = make(clock.forward), TrainingMetrics()
    model: Any = trainer.model
    evaluator = (
        Engine(lambda _, micro_batch: clock.forward(model, micro_batch)) if stock else create_evaluator(model, clock.forward)
    )
    metrics.attach(trainer, EVERY(every=3), evaluator=evaluator)

    @trainer.on(EVERY(every=2))
    def evaluate() -> None:
        clock.take(5.0)
        evaluator.run(DATA[:4])
        clock.take(7.0)

    trainer.run(DATA)
    seconds = {name: value for name, value in metrics.seconds_by_section.items() if value}
    assert seconds == {"forward": 6.0, "evaluation": 3 * 4.0, "handler": 3 * 12.0}


def test_an_evaluation_elsewhere_leaves_the_section_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within forward its time is that of forward, and after the run nothing is counted."""
    clock = SlowForward(monkeypatch)

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        evaluator.run(DATA[:2])
        clock.take(30.0)
        return clock.forward(model, micro_batch)

    trainer, metrics = make(forward), TrainingMetrics()
    evaluator = create_evaluator(trainer.model, clock.forward)  # type: ignore[arg-type]
    metrics.attach(trainer, EVERY(every=100), evaluator=evaluator)
    trainer.run(DATA[:1])
    evaluator.run(DATA)
    clock.take(100.0)
    assert {name: value for name, value in metrics.seconds_by_section.items() if value} == {"forward": 33.0}


def test_rates_of_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that counts something is published per second of data and update."""
    clock = SlowForward(monkeypatch)

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output = clock.forward(model, micro_batch)
        return output._replace(logs={**output.logs, "tokens": 100 * len(micro_batch[0])})

    trainer = make(forward)
    TrainingMetrics(per_second=("samples", "tokens")).attach(trainer, EVERY(every=2))
    trainer.add_event_handler(EVERY, clock.take, 50.0)
    metrics = trainer.run(DATA, max_epochs=1).metrics
    assert metrics["samples_per_second"] == 32 / 2.0
    assert metrics["tokens_per_second"] == 3200 / 2.0


def test_a_rate_of_a_log_that_there_is_not_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the name that was meant."""
    trainer = make()
    TrainingMetrics(per_second=("sample",)).attach(trainer, EVERY(every=2))
    trainer.run(DATA, max_epochs=1)
    assert [record.getMessage() for record in caplog.records] == [
        "per_second has 'sample', and forward has logged ['samples']: sample_per_second is 0 until it logs that; did you mean "
        "'samples'?"
    ]
    assert trainer.state.metrics["sample_per_second"] == 0.0


def test_the_time_to_go_counts_evaluation_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates take 1 s, then 3 s; an evaluation of 6 s comes every 2 of them."""
    clock = SlowForward(monkeypatch)

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        clock.take(3.0 if trainer.state.iteration > 2 else 1.0)
        return cuts.forward(model, micro_batch)

    trainer = make(forward)
    evaluator = create_evaluator(trainer.model, clock.forward)  # type: ignore[arg-type]
    TrainingMetrics().attach(trainer, EVERY(every=2), evaluator=evaluator)
    Validation(evaluator, DATA, sanity=0).attach(trainer, EVERY(every=2))
    published: list[tuple[float, float]] = []
    trainer.add_event_handler(
        EVERY(every=2), lambda: published.append((trainer.state.metrics["time_to_go"], trainer.state.metrics["progress"]))
    )
    trainer.run(DATA, max_epochs=2)
    to_go, progress = zip(*published, strict=True)
    assert to_go == pytest.approx([10 * 1, 8 * (3 + 6 / 4), 6 * (3 + 12 / 6), 4 * (3 + 18 / 8), 2 * (3 + 24 / 10), 0])
    assert progress == pytest.approx([n / 12 for n in (1, 3, 5, 7, 9, 11)])


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_iters": 9}, {}])
def test_progress_is_below_one_and_rises(limit: dict[str, int]) -> None:
    """From update to update, also with epochs of different lengths."""
    trainer, seen = make(accumulation_steps=[1, 2, 3] if "max_epochs" in limit else 2), []
    for event in (Events.STARTED, Events.ITERATION_STARTED, EVERY, Events.COMPLETED):
        trainer.add_event_handler(event, lambda: seen.append(trainer.progress.done_before(trainer.state)))
    trainer.run(DATA, **limit)
    known = [progress for progress in seen if progress is not None]
    assert known == sorted(known)
    if limit:
        assert known[0] == 0.0 < known[-1] < 1.0
        assert known[-1] == pytest.approx(8 / 9 if "max_iters" in limit else 2 / 3 + 1 / 6)


def test_progress_of_a_run_that_continues_between_epochs_is_what_it_was() -> None:
    """It begins where the epoch before has ended, with no update of the next one done."""
    whole, ended = make(), []
    whole.add_event_handler(
        Events.EPOCH_COMPLETED(once=2), lambda: ended.append((whole.progress.done_before(whole.state), whole.state_dict()))
    )
    whole.run(DATA, max_epochs=4)
    ((expected, state),) = ended
    resumed, begun = make(), []
    resumed.load_state_dict(state)
    resumed.add_event_handler(Events.STARTED, lambda: begun.append(resumed.progress.done_before(resumed.state)))
    resumed.run(DATA)
    assert begun == [expected] == [pytest.approx((2 - 1 / len(DATA)) / 4)]


def test_progress_is_unknown_without_a_length() -> None:
    """A loader without a length: nothing is published before its first pass has ended."""
    trainer, known = make(), set[int]()
    TrainingMetrics().attach(trainer, EVERY(every=1))

    @trainer.on(EVERY)
    def look() -> None:
        if {"progress", "time_to_go"} & {*trainer.state.metrics}:
            known.add(trainer.state.epoch)

    trainer.run(cuts.Unsized(DATA), max_epochs=2)
    assert known == {2}


def test_memory_is_published_on_request() -> None:
    """What this process has resident, in GiB: at least what torch takes by itself."""
    for memory in (True, False):
        trainer = make()
        TrainingMetrics(memory=memory).attach(trainer)
        metrics = trainer.run(DATA, max_epochs=1).metrics
        assert ("host_memory" in metrics) is memory
        assert not memory or 0.05 < metrics["host_memory"] < 64
        assert "memory_peak" not in metrics


def test_memory_of_an_accelerator_is_what_its_allocator_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """In GiB, with the peak counted from here again. A stand-in for the allocator, since the tests run without one."""
    calls: list[torch.device] = []
    for gibibytes, name in ((1, "memory_allocated"), (3, "memory_reserved"), (2, "max_memory_allocated")):
        monkeypatch.setattr(torch.accelerator, name, lambda device, value=gibibytes * 2**30: value)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", calls.append)
    metrics = training_metrics._memory(torch.device("cuda", 0))
    assert {name: value for name, value in metrics.items() if name != "host_memory"} == {
        "memory_allocated": 1.0,
        "memory_reserved": 3.0,
        "memory_peak": 2.0,
    }
    assert calls == [torch.device("cuda", 0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_second": "tokens"}, "pass \\('tokens',\\)"),
        ({"per_second": None}, "per_second must be a sequence of names of logs, got None; pass \\('tokens',\\)"),
        ({"flops_per_sample": 6e9}, "go together"),
        ({"flops_per_sample": 6e9, "peak_flops": 0}, "peak_flops must be greater than 0"),
    ],
    ids=["string", "none", "half", "zero"],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    """One line says which."""
    with pytest.raises((TypeError, ValueError), match=message):
        TrainingMetrics(**options)


def _damaged(*path: str, value: Any = None) -> dict[str, Any]:
    """The state of a fresh handler with another value at a path; without a value that is left out."""
    state = here = TrainingMetrics().state_dict()
    for key in path[:-1]:
        here = here[key]
    del here[path[-1]]
    here |= {} if value is None else {path[-1]: value}
    return state


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (None, TypeError, "must be what TrainingMetrics.state_dict\\(\\) gave"),
        (_damaged("logs"), ValueError, "got one without logs"),
        (_damaged("sums", "grad_norm_max"), ValueError, "got one without grad_norm_max"),
        (_damaged("sums", "loss", value="x"), ValueError, r"state_dict\['sums'\] must be numbers by name, got \{'updates'"),
        (_damaged("seconds", "totals", "data", value=[]), ValueError, r"state_dict\['totals'\] must be numbers by name, got"),
        (_damaged("published", value=[1]), ValueError, r"state_dict\['published'\] must be a list of strings, got \[1\]"),
    ],
    ids=["none", "no logs", "no maximum", "text", "list", "no name"],
)
def test_a_state_that_is_not_one_is_refused(state: Any, error: type[Exception], message: str) -> None:
    """One line says what is missing, or is not what it must be."""
    with pytest.raises(error, match=message):
        TrainingMetrics().load_state_dict(state)


# --- names and numbers ---


def test_whatever_is_published_has_a_group() -> None:
    """No metric of ours falls into the group of the user's own."""
    trainer = make(groups=2, loss_scaling=StaticLossScaling(8.0))
    TrainingMetrics(base2=True, perplexity=True, per_second=("samples",), flops_per_sample=1.0, peak_flops=1.0).attach(trainer)
    names = {*trainer.run(DATA, max_epochs=1).metrics} - {"samples"}
    assert {name for name in names if name.partition("/")[0] not in PUBLISHED_METRICS} == {"samples_per_second"} - names
    groups = {grouped_metric(name).partition("/")[0] for name in names}
    assert groups == {"train", "optimizer", "speed"}
    assert grouped_metric("tokens_per_second") == "speed/tokens_per_second"
    assert set(TIMED_METRICS) <= set(PUBLISHED_METRICS)


def test_metrics_that_are_not_one_number(caplog: pytest.LogCaptureFixture) -> None:
    """Mappings, lists and small tensors become several numbers; the others are left out with one warning each."""
    metrics = {
        "loss": torch.tensor(0.5),
        "recall": torch.tensor([0.25, 0.75]),
        "by_class": {"cat": 1, "dog": {"big": 2.0}},
        "confusion": torch.eye(2, dtype=torch.int64),
        "flag": True,
        "text": "hello",
        "nothing": None,
        "wide": torch.zeros(40),
        "complex": torch.tensor(1j),
        "one": torch.ones(1, 1),
    }
    left_out: set[str] = set()
    for _ in range(2):
        assert single_metrics(metrics, left_out) == {
            "loss": 0.5,
            "recall/0": 0.25,
            "recall/1": 0.75,
            "by_class/cat": 1.0,
            "by_class/dog/big": 2.0,
            "confusion/0/0": 1.0,
            "confusion/0/1": 0.0,
            "confusion/1/0": 0.0,
            "confusion/1/1": 1.0,
            "flag": 1.0,
            "one": 1.0,
        }
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 4
    assert "'text' is not made of numbers (str)" in warned[0]
    assert "'wide' has 40 numbers, and 32 may be shown" in warned[2]


def test_a_metric_of_up_to_32_numbers_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """As a tensor and as a list; one number more, and a warning says that it is left out."""
    left_out: set[str] = set()
    numbers = [float(index) for index in range(33)]
    metrics = {"tensor": torch.tensor(numbers[:32]), "list": numbers[:32], "one more": torch.tensor(numbers), "longer": numbers}
    shown = single_metrics(metrics, left_out)
    assert shown == {f"{name}/{index}": float(index) for name in ("tensor", "list") for index in range(32)}
    assert left_out == {"one more", "longer"}
    assert ["has 33 numbers, and 32 may be shown" in record.getMessage() for record in caplog.records] == [True, True]


def test_the_name_of_a_metric_is_shown_as_text() -> None:
    """Also where all metrics are plain numbers, as those by class are."""
    assert single_metrics({0: 0.5, 1: 0.25}, set()) == {"0": 0.5, "1": 0.25}  # type: ignore[dict-item]
