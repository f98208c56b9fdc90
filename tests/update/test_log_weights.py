"""Logs with a denominator of their own: over micro-batches, ranks, windows of metrics and evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cuts
from ignite_train import (
    ForwardContractError,
    ForwardOutput,
    Mean,
    TrainEvents,
    UpdateOptions,
    count_traffic,
    create_evaluator,
    create_trainer,
)
from ignite_train.handlers import Checkpoint, TrainingMetrics
from ignite_train.ranks.statistics import Statistics
from ranks import run_ranks
from setups import Setup

Build = Callable[..., Setup]
Sentences = tuple[Tensor, Tensor]


def sentences(*lengths: int) -> Sentences:
    """A micro-batch of one input for each token, and the length of each sentence."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return torch.randn(sum(lengths), 4, generator=generator), torch.tensor(lengths)


def per_sentence(model: nn.Module, micro_batch: Sentences) -> ForwardOutput:
    """As fairseq's `--sentence-avg`: the loss is a mean over sentences, and the log one over tokens."""
    x, lengths = micro_batch
    nll = model(x).square().sum()
    return ForwardOutput(nll, len(lengths), {"nll": (nll, lengths.sum()), "longest": lengths.max()})


DATA = [sentences(3, 5), sentences(1), sentences(2, 2, 7), sentences(4)]


def expected(model: nn.Module, data: list[Sentences]) -> dict[str, float]:
    """The means by hand, in the dtype of the model."""
    total = sum(float(model(x).square().sum().detach()) for x, _ in data)
    sizes, tokens = sum(len(lengths) for _, lengths in data), sum(int(lengths.sum()) for _, lengths in data)
    longest = sum(int(lengths.max()) for _, lengths in data)
    return {"loss": total / sizes, "nll": total / tokens, "longest": longest / sizes}


def test_an_evaluation_divides_each_log_by_its_own(build: Build) -> None:
    """The loss is per sentence, the likelihood per token, and a plain log per sentence."""
    model = build().model
    metrics = create_evaluator(model, per_sentence).run(DATA).metrics
    assert metrics == pytest.approx(expected(model, DATA), rel=1e-6)


def test_the_record_of_an_update_has_both_sums(build: Build) -> None:
    """Over the micro-batches of the group; the gradient does not depend on the logs."""
    paired, plain = (
        build(per_sentence, accumulation_steps=2),
        build(lambda *args: per_sentence(*args)[:2], accumulation_steps=2),
    )
    by_hand = expected(paired.model, DATA[:2])
    for setup in (paired, plain):
        setup.trainer.run(DATA[:2], max_epochs=1)
    output = paired.trainer.state.update_output
    assert output is not None
    assert output.log_weights == {"nll": 9.0}
    assert output.logs["longest"] == 6.0
    assert output.logs["nll"] / output.log_weights["nll"] == pytest.approx(by_hand["nll"], rel=1e-6)
    assert all(torch.equal(p, q) for p, q in zip(paired.model.parameters(), plain.model.parameters(), strict=True))


def test_windows_of_metrics_add_up_both(build: Build) -> None:
    """A window of two updates is the mean over its tokens; a window that was saved in the middle continues."""
    published: list[float] = []
    setup = build(per_sentence, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    by_hand = [expected(setup.model, DATA[:2])["nll"], expected(setup.model, DATA[2:])["nll"]]
    metrics = TrainingMetrics()
    metrics.attach(setup.trainer, Events.ITERATION_COMPLETED(every=2))
    setup.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=2), lambda trainer: published.append(trainer.state.metrics["nll"])
    )

    @setup.trainer.on(TrainEvents.STEP_COMPLETED)
    def save_and_load() -> None:
        metrics.load_state_dict(metrics.state_dict())

    setup.trainer.run(DATA, max_epochs=1)
    assert published == pytest.approx(by_hand, rel=1e-6)


def test_a_denominator_of_zero_gives_no_number(build: Build) -> None:
    """An interval without a token of some kind has no mean of it, in an evaluation it is NaN, and neither fails."""

    def forward(model: nn.Module, micro_batch: Sentences) -> ForwardOutput:
        return per_sentence(model, micro_batch)._replace(logs={"rare": (0.0, 0)})

    setup = build(forward)
    TrainingMetrics().attach(setup.trainer)
    assert "rare" not in setup.trainer.run(DATA, max_epochs=1).metrics
    assert math.isnan(create_evaluator(setup.model, forward).run(DATA).metrics["rare"])


def test_a_dropped_micro_batch_drops_both(build: Build) -> None:
    """What does not fit into memory counts neither above nor below."""

    def forward(model: nn.Module, micro_batch: Sentences) -> ForwardOutput:
        output = per_sentence(model, micro_batch)
        return output._replace(loss=output.loss + 0 * _Fails.apply(output.loss, len(micro_batch[1]) == 3))

    setup = build(forward, accumulation_steps=4, on_out_of_memory="skip")
    setup.trainer.run(DATA, max_epochs=1)
    output = setup.trainer.state.update_output
    assert output is not None
    assert (output.num_out_of_memory, output.log_weights) == (1, {"nll": 13.0})


class _Fails(torch.autograd.Function):
    """Runs out of memory in backward, if it is told to."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            raise torch.OutOfMemoryError
        return gradient, None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1.0,), "must be a number or a pair"),
        ((1.0, 2.0, 3.0), "must be a number or a pair"),
        ((1.0, "2"), "the denominator of logs"),
        ((torch.ones(2), 2.0), "the sum of logs"),
    ],
    ids=["one", "three", "a string", "a vector"],
)
def test_what_is_no_pair_is_refused(build: Build, value: Any, message: str) -> None:
    """With the name of the log."""
    trainer = build(lambda model, batch: per_sentence(model, batch)._replace(logs={"nll": value})).trainer
    with pytest.raises(ForwardContractError, match=message) as raised:
        trainer.run(DATA)
    assert "'nll'" in str(raised.value)


def test_a_log_is_a_pair_always_or_never(build: Build) -> None:
    """One micro-batch of a group gives a pair and the other a number."""
    both = iter([(1.0, 2.0), 1.0])
    trainer = build(
        lambda model, batch: per_sentence(model, batch)._replace(logs={"nll": next(both)}), accumulation_steps=2
    ).trainer
    with pytest.raises(ForwardContractError, match=r"logs\['nll'\] must be a pair .* in all micro-batches or in none"):
        trainer.run(DATA)


# --- ranks ---


def weighted(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
    """The weights as a log over the number of samples, only where there are at least two."""
    output = cuts.forward(model, micro_batch)
    many = {"weight": (micro_batch[2].sum(), len(micro_batch[2]))} if len(micro_batch[2]) > 1 else {}
    return output._replace(logs=many)


def log_on_ranks(way: str) -> tuple[list[tuple[float, float]], float, list[int]]:
    """Sums and denominators of each update, the mean of an evaluation, and the collectives of each update."""
    wrapped = DistributedDataParallel(cuts.linear()) if way == "ddp" else cuts.linear()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=cuts.LEARNING_RATE)
    trainer = create_trainer(wrapped, optimizer, weighted, options=UpdateOptions(reduction=way))  # type: ignore[arg-type]
    data, kept, counted = cuts.shard([[2, 1, 4, 3], [1, 5]]), [], []
    with trainer.session():
        for number in range(4):
            with count_traffic() as traffic:
                record = trainer.update(data[number : number + 1])
            kept.append((record.logs.get("weight", 0.0), record.log_weights.get("weight", 0.0)))
            counted.append(len(traffic.collectives))
    return kept, create_evaluator(wrapped, weighted).run(data).metrics["weight"], counted


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit"])
def test_ranks_add_up_both(way: str) -> None:
    """A rank that has no such log, or no data, adds nothing. Once its name is known a log costs no collective of its own."""
    weights = cuts.samples()[2]
    first, second = weights[:10], weights[10:16]
    parts = [[first[:2]], [second[1:6]], [first[3:7]], [first[7:10]]]
    sums = [(float(torch.cat(part).sum()), float(len(torch.cat(part)))) for part in parts]
    for kept, mean, counted in run_ranks(log_on_ranks, way):
        assert kept == sums
        assert mean == pytest.approx(sum(s for s, _ in sums) / sum(n for _, n in sums), rel=1e-12)
        assert counted[2:] == [2 if way == "ddp" else 1] * 2  # DDP settles its buckets in the second update


def evaluate_twice() -> list[dict[str, float]]:
    """Other logs in the second evaluation, as of data of another kind."""
    kinds = iter([{"first": 1.0, "pair": (1.0, 2.0)}, {"second": 2.0}])
    logs: dict[str, Any] = {}
    evaluator = create_evaluator(cuts.linear(), lambda model, batch: cuts.forward(model, batch)._replace(logs=logs))
    found = []
    for logs in kinds:  # noqa: B007  # forward reads it
        found.append(dict(evaluator.run(cuts.shard([[4], [2]])).metrics))
    return found


@pytest.mark.slow
def test_an_evaluation_publishes_the_logs_of_its_own() -> None:
    """On several ranks as on one: no 0 and no NaN for a name of an earlier evaluation."""
    for found in (evaluate_twice(), *run_ranks(evaluate_twice)):
        assert [{*metrics} for metrics in found] == [{"loss", "first", "pair"}, {"loss", "second"}]


def mixed_on_ranks() -> str:
    """Rank 0 gives a pair and rank 1 a number."""
    value = (1.0, 2.0) if idist.get_rank() == 0 else 1.0
    model = DistributedDataParallel(cuts.linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, lambda model, batch: cuts.forward(model, batch)._replace(logs={"nll": value}))
    with pytest.raises(ForwardContractError, match=r"logs\['nll'\] must be a pair") as raised:
        trainer.run(cuts.shard([[2], [2]]))
    return str(raised.value)


@pytest.mark.slow
def test_ranks_that_disagree_are_told_alike() -> None:
    """Each of them raises the same error."""
    zero, one = run_ranks(mixed_on_ranks)
    assert zero == one


def with_means(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    """The same number as a sum, as a mean, and as a mean of a tensor."""
    output = cuts.forward(model, micro_batch)
    size = len(micro_batch[0])
    share = (micro_batch[0] > 0).any(1).float()
    logs = {"sum": share.sum(), "mean": Mean(share.mean()), "number": Mean(float(share.mean()))}
    return ForwardOutput(output.loss, size, logs)


def test_a_mean_is_a_mean() -> None:
    """In training and in evaluation, over micro-batches of unequal size: as the sum, and nothing warns of it."""
    data, model = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16]), cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), with_means, accumulation_steps=2)
    TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=2))
    for metrics in (trainer.run(data, max_epochs=1).metrics, create_evaluator(model, with_means).run(data).metrics):
        assert metrics["mean"] == pytest.approx(metrics["sum"], rel=1e-6)
        assert metrics["number"] == pytest.approx(metrics["sum"], rel=1e-6)
        assert 0 < metrics["sum"] <= 1
    record = trainer.state.update_output
    assert record is not None
    assert record.logs["mean"] == pytest.approx(record.logs["sum"], rel=1e-6)


@pytest.mark.slow
def test_a_mean_is_a_mean_in_a_graph() -> None:
    """Where an update is compiled as a whole."""

    def sums_and_means(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        x, y, weight = micro_batch
        share = (x > 0).any(1).double()
        loss = (weight * (model(x).squeeze(-1) - y).square()).sum()
        return ForwardOutput(loss, len(x), {"sum": share.sum(), "mean": Mean(share.mean())})

    data, model = cuts.cut(cuts.samples(), [8] * 8), cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, sums_and_means, compile={"update": True, "backend": "eager"})
    trainer.run(data, max_epochs=1)
    record = trainer.state.update_output
    assert record is not None
    assert record.logs["mean"] == pytest.approx(record.logs["sum"], rel=1e-6)
    assert record.log_weights == {"mean": 8.0}


NARROW = {"f16": Tensor([90.0]).half(), "bf16": Tensor([0.30078125]).bfloat16(), "u8": Tensor([200]).byte()}


@pytest.mark.parametrize("size", [1000, torch.tensor(200.0).half()], ids=["a number", "a tensor"])
def test_a_mean_is_weighted_in_wide_numbers(size: Any) -> None:
    """The products would be infinite, or wrap, or be rounded in the dtype of the mean, as autocast gives it."""
    means = {name: Mean(value) for name, value in NARROW.items()}

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        return ForwardOutput(cuts.forward(model, micro_batch).loss, size, means)

    model, data = cuts.linear(), cuts.cut(cuts.samples(), [4, 12])
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), forward)
    TrainingMetrics().attach(trainer)
    for metrics in (trainer.run(data).metrics, create_evaluator(model, forward).run(data).metrics):
        assert {name: metrics[name] for name in NARROW} == {"f16": 90.0, "bf16": 0.30078125, "u8": 200.0}


@pytest.mark.slow
def test_a_graph_weights_a_mean_in_wide_numbers() -> None:
    """A mean is the same as without a graph."""
    means = {name: Mean(value) for name, value in NARROW.items()}

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        return ForwardOutput(cuts.forward(model, micro_batch).loss, 1000, means)

    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, forward, compile={"update": True, "backend": "eager"})
    trainer.run(cuts.cut(cuts.samples(), [8] * 2), max_epochs=1)
    record = trainer.state.update_output
    assert record is not None
    assert record.logs == {"f16": 90_000.0, "bf16": 300.78125, "u8": 200_000.0}


def sometimes(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    """A mean that only micro-batches of more than 8 samples have."""
    output, x = cuts.forward(model, micro_batch), micro_batch[0]
    return ForwardOutput(output.loss, len(x), {"first": Mean(x[:, 0].mean())} if len(x) > 8 else {})


def test_a_mean_of_some_micro_batches_is_over_their_samples() -> None:
    """The others count neither above nor below, in an update, an interval of several, and an evaluation."""
    data, model = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16]), cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), sometimes, accumulation_steps=2)
    TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=3))
    expected = float(torch.cat([x[:, 0] for x, _, _ in data if len(x) > 8]).mean())
    for metrics in (trainer.run(data, max_epochs=1).metrics, create_evaluator(model, sometimes).run(data).metrics):
        assert metrics["first"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("means", [(0, 2), (1,), (2,)], ids=["mean, sum, mean", "sum, mean, sum", "sums, mean"])
def test_a_mean_of_some_updates_goes_with_the_sums_of_others(means: tuple[int, ...]) -> None:
    """A `Mean` and a sum of the same name are both over the samples of their update."""

    def forward(model: nn.Module, batch: tuple[int, Tensor]) -> ForwardOutput:
        update, x = batch
        mean = model(x).mean()
        return ForwardOutput(mean * len(x), len(x), {"mean": Mean(mean) if update in means else mean * len(x)})

    model = nn.Linear(4, 1).double()
    data = [(update, torch.randn(size, 4, dtype=torch.float64)) for update, size in enumerate((1, 2, 3))]
    expected = float(model(torch.cat([x for _, x in data])).mean().detach())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), forward)
    TrainingMetrics(memory=False).attach(trainer, Events.EPOCH_COMPLETED)
    assert trainer.run(data, max_epochs=1).metrics["mean"] == pytest.approx(expected, rel=1e-12)


def test_a_sum_from_an_older_checkpoint_goes_on_as_a_mean() -> None:
    """Releases before wrote the sum of a `Mean` without its weight, which was that of all samples of the interval."""
    model, data = nn.Linear(4, 1), [torch.randn(size, 4) for size in (5, 2, 3)]
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.0), lambda model, x: (model(x).sum(), len(x), {"half": Mean(0.5)})
    )
    metrics = TrainingMetrics(memory=False)
    metrics.attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(data[:1], max_iters=1)
    state = metrics.state_dict()
    sums = {**state["sums"], "updates": 1, "steps": 1, "sample_size": 5.0}
    metrics.load_state_dict({**state, "sums": sums, "logs": {"half": 2.5}, "log_weights": {}})
    assert trainer.run(data[1:], max_epochs=2).metrics["half"] == 0.5


def mean_on_one_rank() -> tuple[float, float]:
    """The mean of an evaluation, and of an update, in which rank 0 alone has as many samples."""
    model = DistributedDataParallel(cuts.linear())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), sometimes)
    TrainingMetrics().attach(trainer)
    data = cuts.shard([[9], [4]])
    return create_evaluator(model, sometimes).run(data).metrics["first"], trainer.run(data, max_epochs=1).metrics["first"]


@pytest.mark.slow
def test_a_mean_of_one_rank_is_over_its_samples() -> None:
    """The samples of a rank that does not return it do not count."""
    expected = float(cuts.samples()[0][:9, 0].mean())
    for found in run_ranks(mean_on_one_rank):
        assert found == pytest.approx((expected, expected), rel=1e-9)


Records = list[tuple[dict[str, float], dict[str, float]]]


def rarely_in_two_runs(directory: str) -> tuple[Records, Records]:
    """Logs and denominators of updates 4 to 6, of a whole run and of a resumed one; others are of update 2 alone."""

    def rarely(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
        size = len(micro_batch[0])
        logs = {"first": Mean(2.0), "count": 1.0, "nothing": (0.0, 0)} if size > 8 else {}
        return ForwardOutput(cuts.forward(model, micro_batch).loss, size, {**logs, "pair": (1.0, size)})

    def run(name: str, updates: int) -> Records:
        model, records = cuts.linear(), Records()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trainer = create_trainer(model, optimizer, rarely, options=UpdateOptions(reduction="explicit"))
        Checkpoint(Path(directory) / name, every=1, asynchronous=False).attach(trainer)

        @trainer.on(Events.ITERATION_COMPLETED)
        def keep() -> None:
            record = trainer.state.update_output
            assert record is not None
            records.append((dict(record.logs), dict(record.log_weights)))

        trainer.run(cuts.shard([[2, 9, 2, 2, 2, 2]] * idist.get_world_size()), max_iters=updates)
        return records

    run("parts", 3)
    return run("whole", 6)[3:], run("parts", 6)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_has_no_log_that_nobody_returned(tmp_path: Path, world_size: int) -> None:
    """Whether or not the process has seen its name: a resumed run has the records of the whole one, on several ranks too."""
    expected = [({"pair": float(world_size)}, {"pair": 2.0 * world_size})] * 3
    ranks = run_ranks(rarely_in_two_runs, str(tmp_path), world_size=world_size)
    assert ranks == [(expected, expected)] * world_size


def test_sums_on_a_device_are_rewound() -> None:
    """Also of sample sizes that are tensors, which must not be added in place."""
    statistics = Statistics(torch.device("cpu"))
    statistics.on_host = False
    output = ForwardOutput(torch.tensor(2.0), torch.tensor(3), {"mean": Mean(torch.tensor(5.0))})
    statistics.add(output)
    mark = statistics.mark()
    statistics.add(output)
    statistics.rewind(mark)
    totals = statistics.finish(norm=0.0)
    assert (totals.loss, totals.sample_size) == (2.0, 3.0)
    assert (totals.logs, totals.log_weights) == ({"mean": 15.0}, {"mean": 3.0})


def test_a_mean_is_one_number() -> None:
    """What is none is refused by its name."""
    model = cuts.linear()
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        lambda model, batch: ForwardOutput(cuts.forward(model, batch).loss, 4, logs={"share": Mean(torch.ones(2))}),
    )
    with pytest.raises(ForwardContractError, match=r"logs\['share'\] must be one number, .* shape \(2,\)"):
        trainer.run(cuts.cut(cuts.samples(), [4, 12]))
