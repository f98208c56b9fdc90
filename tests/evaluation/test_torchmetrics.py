"""Metrics of torchmetrics on an evaluator and on a trainer: by handlers, as its users write them, exact over uneven ranks."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput, TrainEvents, create_evaluator, create_trainer
from ignite_train.checkpoint.run_objects import SavedModule
from ranks import run_ranks
from tiers import nightly

Batch = tuple[Tensor, Tensor]


def batches(sizes: list[int], seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 3, generator=generator), torch.randint(0, 3, (size,), generator=generator)) for size in sizes]


def forward(model: nn.Module, batch: Batch) -> ForwardOutput:
    x, y = batch
    logits = model(x)
    return ForwardOutput(cross_entropy(logits, y, reduction="sum"), len(y), outputs=(logits, y))


def attach(metrics: Any, engine: Engine, on_trainer: bool) -> list[dict[str, Any]]:
    """Attaches a collection as the page of differences says, and gives the list of what it has found."""
    found: list[dict[str, Any]] = []

    def update() -> None:
        metrics.update(*(engine.state.forward_output.outputs if on_trainer else engine.state.output))  # type: ignore[attr-defined]

    def compute() -> None:
        found.append({name: value.tolist() for name, value in metrics.compute().items()})
        metrics.reset()

    engine.add_event_handler(TrainEvents.FORWARD_COMPLETED if on_trainer else Events.ITERATION_COMPLETED, update)
    engine.add_event_handler(Events.EPOCH_COMPLETED, compute)
    return found


def collection() -> Any:
    """One that adds up, one that adds up by class, and one that gathers all predictions."""
    of_all = {"num_classes": 3}
    torchmetrics = pytest.importorskip("torchmetrics")  # slow to import, so not where tests are collected
    return torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.classification.MulticlassAccuracy(average="micro", **of_all),
            "f1": torchmetrics.classification.MulticlassF1Score(average="macro", **of_all),
            "auroc": torchmetrics.classification.MulticlassAUROC(thresholds=None, **of_all),
        }
    )


def evaluated(data: list[Batch], on_trainer: bool) -> list[dict[str, Any]]:
    """What is found in two epochs of a trainer that stands still, or in two evaluations."""
    torch.manual_seed(5)
    model = idist.auto_model(nn.Linear(3, 3))
    if on_trainer:
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), forward, protect=False)
        found = attach(collection(), trainer, on_trainer)
        trainer.run(data, max_epochs=2)
        return found
    evaluator = create_evaluator(model, forward)
    found = attach(collection(), evaluator, on_trainer)
    for _ in range(2):
        evaluator.run(data)
    return found


SIZES = [[6, 4, 5], [7]]


def evaluated_by_ranks(sizes: list[list[int]], on_trainer: bool) -> list[dict[str, Any]]:
    rank = idist.get_rank()
    return evaluated(batches(sizes[rank], rank), on_trainer)


@pytest.mark.parametrize("on_trainer", [False, nightly(True)], ids=["evaluator", "trainer"])
@pytest.mark.slow
def test_torchmetrics_are_exact_over_uneven_ranks(on_trainer: bool) -> None:
    """Both ranks find what one process finds with all samples."""
    data = [batch for rank, own in enumerate(SIZES) for batch in batches(own, rank)]
    expected = evaluated(data, on_trainer)
    assert expected[0] == expected[1]
    for found in run_ranks(evaluated_by_ranks, SIZES, on_trainer):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.slow  # because of the import
def test_torchmetrics_are_those_of_the_predictions() -> None:
    """The accuracy and F1 in one process are those that are counted by hand."""
    data = batches([6, 4], 3)
    for on_trainer in (False, True):
        found = evaluated(data, on_trainer)[0]
        torch.manual_seed(5)
        model = nn.Linear(3, 3)
        guessed = torch.cat([model(x).argmax(1) for x, _ in data])
        y = torch.cat([y for _, y in data])
        hits = [((guessed == k) & (y == k)).sum() for k in range(3)]
        f1 = [2 * hit / ((guessed == k).sum() + (y == k).sum()) for k, hit in enumerate(hits)]
        assert found["accuracy"] == pytest.approx(float(sum(hits)) / 10)
        assert found["f1"] == pytest.approx(float(sum(f1)) / 3)


def test_persistent_states_come_back_where_the_metric_adds_up() -> None:
    """A checkpoint gives them on the CPU, and torchmetrics leaves them there; here the metric is on another device."""
    torchmetrics = pytest.importorskip("torchmetrics")
    here, there = (torchmetrics.classification.MulticlassAccuracy(num_classes=3).to(place) for place in ("cpu", "meta"))
    for metric in (here, there):
        metric.persistent(True)
    SavedModule(there).load_state_dict(SavedModule(here).state_dict())
    assert [value.device.type for value in there.state_dict().values()] == ["meta"] * 4
