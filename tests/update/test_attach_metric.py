"""Metrics of Ignite on a trainer count each micro-batch that had its effect once, and no other, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import (
    Accuracy,
    ConfusionMatrix,
    EpochMetric,
    Fbeta,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
    Metric,
    MetricGroup,
    Precision,
    Recall,
    RootMeanSquaredError,
    RunningAverage,
    TopKCategoricalAccuracy,
    VariableAccumulation,
    mIoU,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ignite_train import (
    CheckpointError,
    ForwardContractError,
    ForwardOutput,
    Trainer,
    TrainEvents,
    UpdateOptions,
    attach_metric,
    create_evaluator,
    create_supervised_trainer,
    create_trainer,
)
from ignite_train.handlers import Checkpoint
from log_messages import messages_from_here
from ranks import run_ranks

Batch = tuple[Tensor, Tensor]


def batches(*sizes: int, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)) for size in sizes]


def forward(model: nn.Module, micro_batch: Batch) -> ForwardOutput:
    x, y = micro_batch
    logits = model(x)
    correct = (logits.argmax(1) == y).sum()
    return ForwardOutput(cross_entropy(logits, y, reduction="sum"), len(y), {"correct": correct}, (logits, y))


class Seen(Metric):
    """Lists the targets that it was shown."""

    _state_dict_all_req_keys = ("targets",)

    def reset(self) -> None:
        self.targets: list[int] = []

    def update(self, output: Any) -> None:
        self.targets += output[1].tolist()
        assert not output[0].requires_grad

    def compute(self) -> list[int]:
        return list(self.targets)


def make(forward: Any = forward, accumulation_steps: int = 2, **options: Any) -> tuple[Trainer, list[list[int]]]:
    """A trainer with `Seen` attached, and what it has published after each epoch."""
    torch.manual_seed(5)
    model = idist.auto_model(nn.Linear(4, 3))
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        forward,
        accumulation_steps=accumulation_steps,
        options=UpdateOptions(**options),
        protect=False,
    )
    attach_metric(trainer, Seen(), "seen")
    published: list[list[int]] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: published.append(engine.state.metrics["seen"]))
    return trainer, published


def targets(*data: Batch) -> list[int]:
    return [target for _, y in data for target in y.tolist()]


def test_each_micro_batch_of_an_epoch_is_counted() -> None:
    """The metric of an epoch is that of its micro-batches, in their order, and is published before other handlers run."""
    trainer, published = make()
    attach_metric(trainer, Accuracy(), "accuracy")
    data = batches(3, 5, 2)
    sums: list[float] = []
    seen: list[float] = []

    @trainer.on(TrainEvents.FORWARD_COMPLETED)
    def add() -> None:
        output = trainer.state.forward_output
        assert output is not None
        sums.append(float(output.logs["correct"]))

    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: seen.append(engine.state.metrics["accuracy"]))
    trainer.run(data, max_epochs=2)
    assert published == [targets(*data)] * 2
    assert seen == pytest.approx([sum(sums[:3]) / 10, sum(sums[3:]) / 10])


def supervised(**arguments: Any) -> Trainer:
    torch.manual_seed(5)
    model = nn.Linear(4, 3)
    return create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy, **arguments)


def test_a_supervised_trainer_has_predictions_for_metrics() -> None:
    """Those of each micro-batch, though its user writes no forward; also with a transform of the output."""
    data, seen = batches(3, 5, 2), []
    for transform in (None, lambda x, y, y_pred, loss: loss):
        trainer = supervised(gradient_accumulation_steps=2, output_transform=transform)
        attach_metric(trainer, Seen(), "seen")
        attach_metric(trainer, Accuracy(), "accuracy")
        seen.append(trainer.run(data).metrics)
    assert seen[0] == seen[1]
    assert seen[0]["seen"] == targets(*data)


@pytest.mark.parametrize(
    ("steps", "metric", "warns"),
    [
        (2, Accuracy(), True),
        (lambda update: 2, Accuracy(), True),
        (1, Accuracy(), False),
        (2, RunningAverage(output_transform=lambda output: float(len(output[1]))), False),
    ],
    ids=["accumulates", "by-a-function", "one-micro-batch", "of-numbers"],
)
def test_a_metric_that_would_miss_micro_batches_is_warned_about(steps: Any, metric: Metric, warns: bool, caplog: Any) -> None:
    """Attached in Ignite's way it reads the output, which is of the last micro-batch of an update. The remedy counts all."""
    trainer = supervised(gradient_accumulation_steps=steps, output_transform=lambda x, y, y_pred, loss: (y_pred, y))
    metric.attach(trainer, "accuracy")
    trainer.run(batches(3, 5, 2), max_epochs=2)
    lines = [line for line in caplog.messages if "is attached to the trainer" in line]
    assert len(lines) == warns
    assert all("call attach_metric(trainer, Accuracy(...), 'accuracy')" in line for line in lines)


@pytest.mark.parametrize("where", ["trainer", "evaluator"])
def test_a_metric_without_a_pair_to_read_says_what_to_do(where: str) -> None:
    """Python says only that a value cannot be unpacked."""
    model = nn.Linear(4, 3)

    def without_outputs(model: nn.Module, micro_batch: Batch) -> ForwardOutput:
        return forward(model, micro_batch)._replace(outputs=None)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine: Any = create_trainer(model, optimizer, without_outputs)
    if where == "evaluator":
        engine = create_evaluator(model, without_outputs)
    Accuracy().attach(engine, "accuracy")
    with pytest.raises((TypeError, ValueError), match=r"unpack|not iterable") as caught:
        engine.run(batches(4))
    (note,) = caught.value.__notes__
    assert note.startswith("Accuracy reads state.output")
    assert "outputs=(y_pred, y)" in note
    assert "attach_metric" in note


def test_a_composed_metric_is_attached_in_its_own_way() -> None:
    """The F1 of Ignite, a function of two metrics, equals the one by hand."""
    trainer, _ = make(accumulation_steps=1)
    precision, recall = Precision(average=False), Recall(average=False)
    attach_metric(trainer, (precision * recall * 2 / (precision + recall + 1e-20)).mean(), "f1")
    pairs: list[tuple[int, int]] = []

    @trainer.on(TrainEvents.FORWARD_COMPLETED)
    def note() -> None:
        output = trainer.state.forward_output
        assert output is not None
        logits, y = output.outputs
        pairs.extend(zip(logits.argmax(1).tolist(), y.tolist(), strict=True))

    trainer.run(batches(6, 7, 8))
    f1 = []
    for name in range(3):
        true = sum(one == name == other for one, other in pairs)
        guessed, there = sum(one == name for one, _ in pairs), sum(other == name for _, other in pairs)
        f1.append(2 * true / (guessed + there))
    assert trainer.state.metrics["f1"] == pytest.approx(sum(f1) / 3, rel=1e-6)


def test_one_object_under_several_names_counts_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ignite's guides attach a matrix and metrics of that matrix. All have seen each pair once, also in a resumed run."""

    def run(directory: Path, limit: int) -> list[Any]:
        trainer, _ = make(accumulation_steps=1)
        matrix, total = ConfusionMatrix(3), VariableAccumulation(lambda a, x: a + x, lambda pair: float(len(pair[1])))
        shared = {"matrix": matrix, "iou": mIoU(matrix), "right": matrix.diag(), "again": matrix}
        for name, metric in (shared | {"total": total, "doubled": total[0] * 2}).items():
            attach_metric(trainer, metric, name)
        Checkpoint(directory).attach(trainer)
        found = trainer.run(batches(6, 7, 8), max_iters=limit).metrics
        return [] if limit < 3 else [found[name] for name in ("matrix", "again", "iou", "right", "total", "doubled")]

    matrix, again, iou, right, total, doubled = whole = run(tmp_path / "whole", 3)
    assert int(matrix.sum()) == 6 + 7 + 8
    assert torch.equal(matrix, again)
    assert right.tolist() == matrix.diag().tolist()
    assert iou == pytest.approx(float((right / (matrix.sum(0) + matrix.sum(1) - right)).mean()))
    assert (float(total[0]), total[1], float(doubled)) == (21.0, 3, 42.0)
    run(tmp_path / "cut", 2)
    assert str(run(tmp_path / "cut", 3)) == str(whole)
    assert [line for line in caplog.messages if "left out" in line] == []


@pytest.mark.parametrize("way", ["attach_metric", "Ignite's"])
def test_a_function_of_metrics_continues_where_the_run_resumes(way: str, tmp_path: Path, caplog: Any) -> None:
    """Its parts hold the counts. Ignite cannot save `mIoU` itself, since it has the type of a tensor among its arguments."""

    def run(directory: Path, limit: int) -> float:
        trainer, _ = make(accumulation_steps=1)
        if way == "attach_metric":
            attach_metric(trainer, mIoU(ConfusionMatrix(3)), "overlap")
        else:
            pair = lambda output: (torch.eye(3)[[round(1000 * output.loss) % 3, 1, 2]], torch.arange(3))  # noqa: E731
            mIoU(ConfusionMatrix(3, output_transform=pair)).attach(trainer, "overlap")
        Checkpoint(directory).attach(trainer)
        return trainer.run(batches(6, 7, 8), max_iters=limit).metrics.get("overlap", 0.0)

    whole = run(tmp_path / "whole", 3)
    run(tmp_path / "cut", 2)
    assert run(tmp_path / "cut", 3) == whole
    assert [line for line in caplog.messages if "left out" in line] == []


def test_a_running_metric_is_published_after_each_update() -> None:
    """Handlers of the update see its value, which has gone on by each of its micro-batches."""
    trainer, _ = make(accumulation_steps=2)
    attach_metric(trainer, RunningAverage(output_transform=lambda output: float(len(output[1])), alpha=0.5), "samples")
    seen: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.metrics["samples"]))
    trainer.run(batches(8, 4, 2, 1))
    assert seen == [6.0, 2.5]  # (8 + 4) / 2, and then (4 + 1) / 2 with (6 + 2) / 2 in between


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", ["skip", "split"])
def test_what_ran_out_of_memory_is_counted_as_it_was_trained(way: str, where: str) -> None:
    """A dropped micro-batch is not counted, one that was halved is counted once, wherever the memory had run out."""

    def crowded(model: nn.Module, micro_batch: Batch) -> ForwardOutput:
        if where == "forward" and len(micro_batch[1]) > 4:
            raise torch.OutOfMemoryError("too many samples")
        return forward(model, micro_batch)

    trainer, published = make(crowded, on_out_of_memory=way)

    @trainer.on(TrainEvents.FORWARD_COMPLETED)
    def run_out() -> None:
        output = trainer.state.forward_output
        assert output is not None
        if where == "backward" and output.sample_size > 4:
            raise torch.OutOfMemoryError("too many samples")

    data = batches(3, 6, 2, 4)
    trainer.run(data)
    assert published == [targets(*data) if way == "split" else targets(data[0], data[2], data[3])]


def test_an_update_without_effect_is_not_counted() -> None:
    """Neither the micro-batches of a skipped update count, nor those of one that broke off; its repetition does."""
    fails = [True]

    def broken(model: nn.Module, micro_batch: Batch) -> ForwardOutput:
        output = forward(model, micro_batch)
        return output._replace(loss=output.loss * (float("nan") if len(micro_batch[1]) == 5 else 1.0))

    trainer, published = make(broken, on_nonfinite="skip")

    @trainer.on(TrainEvents.GRADIENTS_READY(once=2))
    def fail() -> None:
        if fails.pop():
            fails.append(False)
            raise RuntimeError("on purpose")

    data = batches(3, 4, 2, 1, 5, 3)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.run(data)
    trainer.run(data)
    assert published == [targets(*data[:4])]


def empty_epoch() -> tuple[list[list[str]], list[str]]:
    """The metrics after each of four epochs, of which two have no update with an effect; and what was said about them."""
    logged, published = messages_from_here(), list[list[str]]()

    def broken(model: nn.Module, micro_batch: Batch) -> ForwardOutput:
        output = forward(model, micro_batch)
        return output._replace(loss=output.loss * (1.0 if trainer.state.epoch % 2 else float("nan")))

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = UpdateOptions(reduction="explicit", on_nonfinite="skip")
    trainer = create_trainer(model, optimizer, broken, options=options)
    attach_metric(trainer, Accuracy(), "accuracy")
    attach_metric(trainer, Loss(cross_entropy), "nll")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: published.append(sorted(engine.state.metrics)))
    trainer.run(batches(3, 4, seed=idist.get_rank()), max_epochs=4)
    return published, sorted(line for line in logged if "left out" in line)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_without_effect_has_no_metric(world_size: int) -> None:
    """Overflows of fp16 may fill a short first epoch. It neither ends the run, nor has the metric of the epoch before."""
    for rank, (published, logged) in enumerate(run_ranks(empty_epoch, world_size=world_size)):
        assert published == [["accuracy", "nll"], []] * 2
        assert [line.partition(" is left out of state.metrics after epoch 2")[0] for line in logged] == (
            ["metric 'accuracy'", "metric 'nll'"] if rank == 0 else []
        )


@pytest.mark.parametrize("cut", [1, 2, 4])
def test_it_comes_back_when_the_run_resumes(tmp_path: Path, cut: int) -> None:
    """Cut within an epoch and resumed, the epoch's metric is that of all of its micro-batches."""
    data = batches(3, 5, 2, 4, 1, 6)
    first, _ = make()
    Checkpoint(tmp_path).attach(first)
    first.run(data, max_iters=cut)
    second, published = make()
    attach_metric(second, Accuracy(), "accuracy")
    Checkpoint(tmp_path).attach(second)
    second.run(data, max_epochs=2)
    assert published == [targets(*data)] * (2 if cut < 3 else 1)


def test_numbers_come_back_when_the_run_resumes(tmp_path: Path) -> None:
    """A metric that adds up continues from its sums, to the value of a run that was never cut."""

    def train(limits: list[int], directory: str) -> float:
        for limit in limits:
            trainer, _ = make(accumulation_steps=1)
            attach_metric(trainer, Loss(cross_entropy), "mean loss")
            Checkpoint(tmp_path / directory).attach(trainer)
            trainer.run(batches(3, 5, 2, 4), max_iters=limit)
        return trainer.state.metrics["mean loss"]

    assert train([3, 4], "cut") == train([4], "whole")


def test_the_state_of_another_metric_is_refused(tmp_path: Path) -> None:
    """A checkpoint with an accuracy under this name has no state for a function of two metrics; one line says so."""
    for chosen in (Accuracy(), Precision(average=False) + Recall(average=False)):
        trainer, _ = make()
        attach_metric(trainer, chosen, "chosen")
        Checkpoint(tmp_path).attach(trainer)
        if isinstance(chosen, Accuracy):
            trainer.run(batches(3, 5, 2, 4), max_iters=1)
            continue
        with pytest.raises(CheckpointError, match=r"must have the keys of attach_metric\(\.\.\., 'chosen'\)\.state_dict\(\)"):
            trainer.run(batches(3, 5, 2, 4), max_iters=2)


def test_wrong_arguments_are_said() -> None:
    """An object that is not a metric, a name that is taken, and a forward without predictions."""
    trainer, _ = make(lambda model, batch: forward(model, batch)._replace(outputs=None))
    with pytest.raises(TypeError, match=r"trainer must be a Trainer, got .*on an evaluator call metric\.attach"):
        attach_metric(create_evaluator(nn.Linear(1, 1), forward), Accuracy(), "accuracy")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="metric must be a metric of Ignite"):
        attach_metric(trainer, torch.ones(1), "accuracy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name must be a string that handlers do not publish a metric under, got 'loss'"):
        attach_metric(trainer, Accuracy(), "loss")
    with pytest.raises(ValueError, match="name must be a string that handlers do not publish a metric under, got 'train/loss'"):
        attach_metric(trainer, Accuracy(), "train/loss")
    with pytest.raises(ForwardContractError, match=r"return ForwardOutput\(\.\.\., outputs=\(y_pred, y\)\)"):
        trainer.run(batches(2))


# --- several ranks ---------------------------------------------------------------------------------------------------------


def onehot(output: Any) -> Any:
    return output[0].float(), nn.functional.one_hot(output[1], 3).float()


def metrics() -> dict[str, Metric]:
    """Some of each kind; tests/evaluation/test_uneven_metrics.py has all that Ignite has."""
    return {
        "Accuracy": Accuracy(),
        "TopKCategoricalAccuracy": TopKCategoricalAccuracy(2),
        "Loss": Loss(cross_entropy),
        "MeanSquaredError": MeanSquaredError(onehot),
        "MeanAbsoluteError": MeanAbsoluteError(onehot),
        "RootMeanSquaredError": RootMeanSquaredError(onehot),
        "ConfusionMatrix": ConfusionMatrix(3),
        "Precision": Precision(average=False),
        "Recall": Recall(average=False),
        "Fbeta": Fbeta(1.0, average=False),
        "EpochMetric": EpochMetric(lambda y_pred, y: float((y_pred[:, 0] - y).square().sum()), check_compute_fn=False),
    }


def uneven(kind: str, sizes: list[list[int]]) -> dict[str, Any]:
    """What each metric of Ignite finds on a trainer that stands still, or on an evaluator."""
    chosen = metrics()
    torch.manual_seed(5)
    model = idist.auto_model(nn.Linear(4, 3))
    rank = idist.get_rank()
    data = batches(*sizes[rank], seed=rank)
    if kind == "evaluator":
        evaluator = create_evaluator(model, forward)
        for name, metric in chosen.items():
            metric.attach(evaluator, name)
        found = evaluator.run(data).metrics
    else:
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), forward, protect=False)
        for name, metric in chosen.items():
            attach_metric(trainer, metric, name)
        found = trainer.run(data).metrics
    return {name: torch.as_tensor(found[name]).tolist() for name in chosen}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["evaluator", "trainer"])
@pytest.mark.parametrize("sizes", [[[3, 2, 4], [5]], [[4, 3], []]], ids=["uneven", "one-without-data"])
def test_metrics_over_uneven_ranks_are_those_of_all_samples(kind: str, sizes: list[list[int]]) -> None:
    """They equal those of one process with all samples, on both ranks."""
    data = [batch for rank, own in enumerate(sizes) for batch in batches(*own, seed=rank)]
    torch.manual_seed(5)
    evaluator = create_evaluator(nn.Linear(4, 3), forward)
    for name, metric in metrics().items():
        metric.attach(evaluator, name)
    expected = {name: torch.as_tensor(value) for name, value in evaluator.run(data).metrics.items() if name in metrics()}
    for outcome in run_ranks(uneven, kind, sizes):
        assert set(outcome) == set(metrics())
        for name, value in ((name, expected[name]) for name in outcome):
            torch.testing.assert_close(torch.tensor(outcome[name]), value.to(torch.tensor(outcome[name]).dtype), msg=name)


def resumed(directory: str, until: int) -> list[Any]:
    """What the epochs of a run that resumes have published, and what it has logged of the metric."""
    logged = messages_from_here()
    trainer, published = make(accumulation_steps=1)
    Checkpoint(directory, every=1).attach(trainer)
    trainer.run(batches(3, 2, 4, 2), max_iters=until)
    return [published, [line for line in logged if line.startswith("metric")]]


@pytest.mark.slow
def test_on_another_number_of_ranks_it_starts_from_the_beginning(tmp_path: Path) -> None:
    """Ignite's metrics hold what each rank has counted. The run resumes at the end of an epoch, and logs it once."""
    epoch = targets(*batches(3, 2, 4, 2))
    because = "metric 'seen' starts from the beginning, because the checkpoint has what {} ranks have counted, and there are {}"
    assert resumed(str(tmp_path), 4) == [[epoch], []]
    assert run_ranks(resumed, str(tmp_path), 8) == [[[epoch], [because.format(1, 2)]]] * 2
    assert resumed(str(tmp_path), 12) == [[epoch], [because.format(2, 1)]]


def test_a_metric_that_cannot_be_saved_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run has several, and all have the same handler's name."""
    model = nn.Linear(4, 3)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
    attach_metric(trainer, Accuracy(), "right")
    attach_metric(trainer, MetricGroup({"iou": mIoU(ConfusionMatrix(3))}), "overlap")
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(batches(4, 4), max_epochs=1)
    (line,) = [message for message in caplog.messages if "is left out of the checkpoints" in message]
    assert "metric 'overlap' cannot be saved" in line
