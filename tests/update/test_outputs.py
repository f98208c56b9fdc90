"""What forward gives beside the loss for Ignite's metrics: seen in each micro-batch, neither reduced nor kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, ConfusionMatrix
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput, TrainEvents, create_evaluator, create_trainer
from ranks import run_ranks

Batch = tuple[Tensor, Tensor]


def classifier() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3))


def forward(model: nn.Module, micro_batch: Batch) -> ForwardOutput:
    x, y = micro_batch
    logits = model(x)
    correct = (logits.argmax(1) == y).sum()
    return ForwardOutput(cross_entropy(logits, y, reduction="sum"), len(y), {"correct": correct}, outputs=(logits, y))


def batches(*sizes: int, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)) for size in sizes]


def test_ignites_metrics_attach_to_an_evaluator() -> None:
    """Its accuracy is the one that the logs give, and the matrix has all samples, in evaluations that follow each other."""
    model = classifier()
    evaluator = create_evaluator(model, forward)
    Accuracy().attach(evaluator, "accuracy")
    ConfusionMatrix(num_classes=3).attach(evaluator, "matrix")
    for seed in (1, 2):
        data = batches(5, 1, 7, seed=seed)
        metrics = evaluator.run(data).metrics
        x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
        assert metrics["accuracy"] == pytest.approx(float((model(x).argmax(1) == y).double().mean()), rel=1e-12)
        assert metrics["accuracy"] == pytest.approx(metrics["correct"], rel=1e-12)
        assert int(metrics["matrix"].sum()) == 13


def test_without_outputs_it_is_the_forward_output() -> None:
    """`state.forward_output` has it in both cases."""
    seen: list[Any] = []
    for chosen in (forward, lambda model, micro_batch: forward(model, micro_batch)._replace(outputs=None)):
        evaluator = create_evaluator(classifier(), chosen)
        evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.output))
        state = evaluator.run(batches(5))
        assert state.forward_output is not None
        assert state.forward_output.sample_size == 5
    assert [type(output) for output in seen] == [tuple, ForwardOutput]


@pytest.mark.slow
def test_they_are_seen_in_an_update_and_not_kept() -> None:
    """Each micro-batch shows its own in FORWARD_COMPLETED; after the update no one holds a tensor of them."""
    model, sizes, held = classifier(), [], []
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=2)

    @trainer.on(TrainEvents.FORWARD_COMPLETED)
    def look() -> None:
        logits, y = trainer.state.forward_output.outputs  # type: ignore[union-attr]
        sizes.append(len(y))
        held.append(weakref.ref(logits))

    @trainer.on(Events.ITERATION_COMPLETED)
    def none_is_held() -> None:
        gc.collect()
        assert [logits() for logits in held] == [None] * len(held)

    trainer.run(batches(5, 1, 7), max_epochs=1)
    assert sizes == [5, 1, 7]


def test_a_handler_sees_input_target_output_and_loss() -> None:
    """What VISSL's hooks read from `task.last_batch`: here of the running micro-batch, in both events that have its loss."""
    model, data, seen = classifier(), batches(5, 1, 7), []
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=2)

    @trainer.on(TrainEvents.FORWARD_COMPLETED | TrainEvents.BACKWARD_COMPLETED)
    def last_batch() -> None:
        state = trainer.state
        x, target = state.batch[state.micro_batch_in_group]
        loss, sample_size, _, (logits, _) = state.forward_output  # type: ignore[misc]
        assert torch.equal(logits, model(x))
        assert loss.item() / sample_size == pytest.approx(cross_entropy(model(x), target).item(), rel=1e-6)
        seen.append((x, target))

    trainer.run(data, max_epochs=1)
    expected = [micro_batch for micro_batch in data for _ in range(2)]
    assert [x is y for pair, other in zip(seen, expected, strict=True) for x, y in zip(pair, other, strict=True)] == [True] * 12


@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
def test_a_loss_may_have_one_element_in_any_shape(shape: tuple[int, ...]) -> None:
    """Handlers see it without dimensions."""
    model = nn.Linear(2, 1)
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: (model(x).square().sum().reshape(shape), len(x))
    )
    seen: list[Any] = []
    trainer.on(TrainEvents.FORWARD_COMPLETED)(lambda: seen.append(trainer.state.forward_output.loss.detach()))  # type: ignore[union-attr]
    state = trainer.run([torch.ones(4, 2)])
    assert [loss.shape for loss in seen] == [()]
    assert state.update_output is not None
    assert state.update_output.loss == pytest.approx(float(seen[0]) / 4)


def test_a_plain_tuple_may_have_the_loss_alone() -> None:
    """It is taken as a mean of weight 1, as the bare loss is."""
    records = []
    for as_tuple in (True, False):
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)

        def forward(model: nn.Module, x: Tensor, as_tuple: bool = as_tuple) -> Any:
            loss = model(x).square().mean()
            return (loss,) if as_tuple else loss

        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
        records.append(trainer.run([torch.ones(3, 2)]).update_output)
    assert records[0] == records[1]
    assert (records[0].loss, records[0].sample_size) == (1.0, 1.0)


def test_a_plain_tuple_may_have_four_fields() -> None:
    """And its fourth is the same."""
    evaluator = create_evaluator(classifier(), lambda model, micro_batch: tuple(forward(model, micro_batch)))
    assert len(evaluator.run(batches(5)).output[1]) == 5


def evaluate_unevenly(way: str, sizes: list[list[int]]) -> tuple[float, float, int, int]:
    """Accuracy by Ignite and by the logs, iterations of this rank, and how often it has run forward."""
    model, calls = classifier(), 0
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    def counting(model: nn.Module, micro_batch: Batch) -> ForwardOutput:
        nonlocal calls
        calls += 1
        return forward(model, micro_batch)

    evaluator = create_evaluator(model, counting, uneven="all" if way == "fsdp" else way)  # type: ignore[arg-type]
    Accuracy().attach(evaluator, "accuracy")
    iterations: list[int] = []
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: iterations.append(len(engine.state.output[1])))
    metrics = evaluator.run(batches(*sizes[idist.get_rank()], seed=idist.get_rank())).metrics
    assert iterations == sizes[idist.get_rank()]
    return metrics["accuracy"], metrics["correct"], len(iterations), calls


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[[5, 2, 3], [4]], [[], [4, 2]]], ids=["fewer", "without data"])
@pytest.mark.parametrize("way", ["all", "replay", "fsdp"])
def test_placeholders_of_uneven_ranks_are_left_out(way: str, sizes: list[list[int]]) -> None:
    """Ignite's accuracy is over the samples of both ranks, each once, though a rank runs forward on placeholders."""
    model = classifier()
    data = [batch for rank, own in enumerate(sizes) for batch in batches(*own, seed=rank)]
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    expected = float((model(x).argmax(1) == y).double().mean())
    outcomes = run_ranks(evaluate_unevenly, way, sizes)

    assert [outcome[:2] for outcome in outcomes] == [(pytest.approx(expected, rel=1e-12),) * 2] * 2
    assert [outcome[2] for outcome in outcomes] == [len(own) for own in sizes]
    most = max(map(len, sizes))
    assert [outcome[3] for outcome in outcomes] == [len(own) if way == "all" else most for own in sizes]
