"""Several losses with denominators of their own: the sum of their means, however the samples are cut."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cuts
from ignite_train import (
    ForwardContractError,
    ForwardOutput,
    Trainer,
    UpdateOptions,
    count_traffic,
    create_evaluator,
    create_trainer,
    only,
)
from ignite_train.handlers import LearningRateSchedule, ModelEMA, MomentumTeacher, TrainingMetrics
from meshes import on_cpu
from ranks import run_ranks
from tiers import nightly

NUM_EPOCHS = 3
MAX_NORM = 0.5


def terms_of(model: nn.Module, sample: cuts.Sample) -> dict[str, tuple[Tensor, Tensor]]:
    """A weighted square over all samples, and an absolute error over those whose target is positive."""
    x, y, weight = sample
    error, positive = model(x).squeeze(-1) - y, y > 0
    return {
        "square": ((weight * error.square()).sum(), weight.sum()),
        "positive": ((error.abs() * positive).sum(), positive.sum()),
    }


def forward(model: nn.Module, sample: cuts.Sample) -> ForwardOutput:
    return ForwardOutput(terms_of(model, sample))


def sizes(sample: cuts.Sample) -> dict[str, float]:
    _, y, weight = sample
    return {"square": float(weight.sum()), "positive": float((y > 0).sum())}


def by_hand(*, clip: float | None) -> tuple[Tensor, dict[str, float]]:
    """Parameters and latest losses of full-batch updates along the sum of both means, with torch alone."""
    model, losses = cuts.linear(), dict[str, float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    for _ in range(NUM_EPOCHS):
        optimizer.zero_grad()
        means = {name: total / size for name, (total, size) in terms_of(model, cuts.samples()).items()}
        sum(means.values()).backward()  # type: ignore[union-attr]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses = {name: mean.item() for name, mean in means.items()}
    return nn.utils.parameters_to_vector(model.parameters()).detach(), losses


def weights_of(model: nn.Module) -> list[float]:
    parameters = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    found: list[float] = nn.utils.parameters_to_vector(parameters).tolist()
    return found


def make(clip: float | None = None, **options: Any) -> tuple[nn.Module, Trainer]:
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    options = {"sample_sizes": sizes, **options}
    steps = options.pop("accumulation_steps", 100)
    trainer = create_trainer(
        model, optimizer, forward, accumulation_steps=steps, max_grad_norm=clip, protect=False, options=UpdateOptions(**options)
    )
    return model, trainer


CUTS = ([64], [32, 32], [1, 63], [5, 0, 40, 19], [16] * 4)


@pytest.mark.parametrize("clip", [None, MAX_NORM])
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("fast", [True, False])
def test_each_cut_is_one_batch(cut: Sequence[int], clip: float | None, fast: bool) -> None:
    """To 1e-12 in float64, with the losses and the sizes by name in the record."""
    model, trainer = make(clip, fast=fast)
    trainer.run(cuts.cut(cuts.samples(), cut), max_epochs=NUM_EPOCHS)
    weights, losses = by_hand(clip=clip)
    assert weights_of(model) == pytest.approx(weights.tolist(), rel=1e-12)
    output = trainer.state.update_output
    assert output is not None
    assert output.losses == pytest.approx(losses, rel=1e-12)
    assert output.loss == pytest.approx(sum(losses.values()), rel=1e-12)
    assert output.sample_sizes == pytest.approx(sizes(cuts.samples()), rel=1e-12)
    assert output.sample_size == pytest.approx(sum(output.sample_sizes.values()), rel=1e-12)


def on_ranks(shards: Sequence[Sequence[int]], way: str) -> tuple[list[float], dict[str, float]]:
    model = cuts.linear()
    wrapped = idist.auto_model(model) if way in ("ddp", "auto") else model
    if way == "fsdp":
        fully_shard(model, mesh=on_cpu())
    trainer = create_trainer(
        wrapped,
        torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE),
        forward,
        accumulation_steps=100,
        protect=False,
        options=UpdateOptions(sample_sizes=sizes, reduction=way),  # type: ignore[arg-type]
    )
    trainer.run(cuts.shard(shards), max_epochs=NUM_EPOCHS)
    assert trainer.state.update_output is not None
    return weights_of(model), trainer.state.update_output.losses


SHARDS = ([[30, 10], [24]], [[40, 0, 24], []], [[20], [4, 4], [36]], [[0, 30], [1, 2, 3], [28]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "way"),
    [
        *[(shards, way) for shards in SHARDS[:3] for way in ("ddp", "explicit")],
        *[(shards, way) for shards in SHARDS[1:3] for way in ("auto", "fsdp")],
        *[nightly(shards, way) for shards in (SHARDS[0], SHARDS[3]) for way in ("auto", "fsdp")],
        *[nightly(SHARDS[3], way) for way in ("ddp", "explicit")],
    ],
    ids=str,
)
def test_ranks_are_one_batch(shards: list[list[int]], way: str) -> None:
    """Two and three of them, with a rank without data: one small collective tells the denominators before any forward."""
    weights, losses = by_hand(clip=None)
    for found, own in run_ranks(on_ranks, shards, way, world_size=len(shards)):
        assert found == pytest.approx(weights.tolist(), rel=1e-12)
        assert own == pytest.approx(losses, rel=1e-12)


def in_order() -> list[list[str]]:
    """What happens in the second update of two micro-batches, and its collectives; the same of an update with one loss."""
    happened: list[str] = []
    seen: list[list[str]] = []

    def counted(sample: cuts.Sample) -> dict[str, float]:
        happened.append("count")
        return sizes(sample)

    def noted(model: nn.Module, sample: cuts.Sample) -> ForwardOutput:
        happened.append("forward")
        return forward(model, sample)

    for user_forward, options in ((noted, {"sample_sizes": counted}), (cuts.forward, {})):
        model = cuts.linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
        update_options = UpdateOptions(reduction="explicit", **options)  # type: ignore[arg-type]
        trainer = create_trainer(model, optimizer, user_forward, accumulation_steps=2, protect=False, options=update_options)
        with trainer.session():
            trainer.update(cuts.shard([[20, 12], [20, 12]]))
            happened.clear()
            with count_traffic() as traffic:
                trainer.update(cuts.shard([[20, 12], [20, 12]]))
        seen += [[*happened], [one.name for one in traffic.collectives]]
    return seen


@pytest.mark.slow
def test_the_whole_group_is_counted_before_its_first_forward() -> None:
    """In one small collective more than an update with one loss has."""
    for happened, with_terms, _, without in run_ranks(in_order):
        assert happened == ["count", "count", "forward", "forward"]
        assert with_terms == ["allreduce_", *without]


def refused_on_a_rank() -> str:
    _, trainer = make(sample_sizes=None, reduction="explicit")
    with pytest.raises(ForwardContractError) as raised:
        trainer.run([cuts.samples()])
    return str(raised.value)


@pytest.mark.slow
def test_one_micro_batch_on_each_rank_needs_the_function() -> None:
    """Its denominators are those of all ranks, which no rank knows before backward."""
    for message in run_ranks(refused_on_a_rank):
        assert "pass options=UpdateOptions(sample_sizes=function)" in message


def nothing_anywhere() -> tuple[Any, bool]:
    model, trainer = make(reduction="explicit")
    before = weights_of(model)
    trainer.run(cuts.shard([[0, 0], [0]]), max_epochs=1)
    assert trainer.state.update_output is not None
    return trainer.state.update_output.skipped_reason, weights_of(model) == before


@pytest.mark.slow
def test_an_update_without_a_sample_on_any_rank_is_skipped() -> None:
    assert run_ranks(nothing_anywhere) == [("no_samples", True)] * 2


def test_a_closure_evaluates_the_same_objective() -> None:
    """LBFGS, on two micro-batches, as on one batch by hand."""

    def run(groups: list[cuts.Sample]) -> list[float]:
        model = cuts.linear()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
        options = UpdateOptions(closure=True, sample_sizes=sizes)
        create_trainer(model, optimizer, forward, accumulation_steps=9, options=options).run(groups, max_epochs=1)
        return weights_of(model)

    model, data = cuts.linear(), cuts.samples()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = sum(total / size for total, size in terms_of(model, data).values())  # type: ignore[assignment]
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    expected = weights_of(model)
    assert run(cuts.cut(data, [64])) == pytest.approx(expected, rel=1e-6)
    assert run(cuts.cut(data, [40, 24])) == pytest.approx(expected, rel=1e-6)


def test_a_term_without_samples_is_left_out() -> None:
    """Also where it is one in a single micro-batch; an update without any sample is skipped."""
    x, y, weight = cuts.samples()
    model, trainer = make()
    trainer.run([(x, -y.abs(), weight)], max_epochs=1)
    output = trainer.state.update_output
    assert output is not None
    assert (output.applied, output.sample_sizes["positive"]) == (True, 0.0)
    assert math.isnan(output.losses["positive"])
    assert output.loss == pytest.approx(output.losses["square"])
    model, trainer = make()
    before = weights_of(model)
    trainer.run([(x[:0], y[:0], weight[:0])], max_epochs=1)
    assert trainer.state.update_output is not None
    assert trainer.state.update_output.skipped_reason == "no_samples"
    assert weights_of(model) == before


@pytest.mark.parametrize("empty", [1, 2])
def test_the_first_groups_may_be_empty(empty: int) -> None:
    """An update on demand without a micro-batch, and loaders that give None: there are no names to agree on yet."""
    model, trainer = make(none_is_empty=True, accumulation_steps=1)
    trainer.run([*[None] * empty, cuts.samples()], max_epochs=1)
    output = trainer.state.update_output
    assert (trainer.state.num_steps, trainer.state.num_skipped) == (1, empty)
    assert output is not None
    assert output.sample_sizes == pytest.approx(sizes(cuts.samples()), rel=1e-12)
    expected, whole = make(accumulation_steps=1)
    whole.run([cuts.samples()], max_epochs=1)
    assert weights_of(model) == weights_of(expected)


def empty_at_first() -> list[float]:
    model = cuts.linear()
    options = UpdateOptions(sample_sizes=sizes, reduction="explicit")
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    trainer = create_trainer(model, optimizer, forward, protect=False, options=options)
    with trainer.session():
        trainer.update([])
        trainer.update([*cuts.shard([[40], []])])
    return weights_of(model)


@pytest.mark.slow
def test_the_first_group_may_be_empty_on_all_ranks() -> None:
    """The names are agreed on with the first that is not, of which one rank has all."""
    model, trainer = make()
    trainer.run(cuts.cut(cuts.samples(), [40]), max_epochs=1)
    for found in run_ranks(empty_at_first):
        assert found == pytest.approx(weights_of(model), rel=1e-12)


def test_one_micro_batch_needs_no_function() -> None:
    """Several do, and are told the remedy."""
    model, trainer = make(sample_sizes=None)
    trainer.run([cuts.samples()], max_epochs=NUM_EPOCHS)
    assert weights_of(model) == pytest.approx(by_hand(clip=None)[0].tolist(), rel=1e-12)
    _, trainer = make(sample_sizes=None)
    with pytest.raises(ForwardContractError, match=r"pass options=UpdateOptions\(sample_sizes=function\)"):
        trainer.run(cuts.cut(cuts.samples(), [32, 32]))


@pytest.mark.parametrize(
    ("counted", "message"),
    [
        (lambda sample: {**sizes(sample), "square": 1.0}, "has counted 2 samples of 'square' in this update, and forward has"),
        (lambda sample: {"square": 1.0}, "the terms that sample_sizes counts, 'square', got 'positive', 'square'"),
        (lambda sample: 3, "must return numbers by name, such as {'mlm': 12}, got 3"),
        (lambda sample: {"square": -1.0}, "must return finite numbers of at least 0, got -1.0 for 'square'"),
    ],
    ids=["another number", "other names", "no mapping", "negative"],
)
def test_a_count_that_is_wrong_is_said(counted: Any, message: str) -> None:
    """Before the step: the parameters stay."""
    model, trainer = make(sample_sizes=counted)
    before = weights_of(model)
    with pytest.raises(ForwardContractError) as raised:
        trainer.run(cuts.cut(cuts.samples(), [32, 32]))
    assert message in str(raised.value)
    assert weights_of(model) == before


def test_names_that_change_are_said() -> None:
    _, trainer = make(
        accumulation_steps=1, sample_sizes=lambda sample: sizes(sample) | ({"new": 1.0} if len(sample[0]) == 4 else {})
    )
    with pytest.raises(ForwardContractError, match="the same names in each update, 'positive', 'square', got 'new' too"):
        trainer.run(cuts.cut(cuts.samples(), [60, 4]))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (ForwardOutput({"a": (torch.ones(()), 1)}, 3), "sample_size must be left out where the loss is a mapping"),
        (ForwardOutput({}), "is a mapping without terms"),
        (ForwardOutput({"a": torch.ones(())}), r"loss\['a'\] must be a pair \(sum, number of samples\)"),
        (ForwardOutput({"a": (torch.ones(2), 1)}), r"loss\['a'\] must be one number, got a tensor of shape \(2,\)"),
    ],
    ids=["size", "empty", "no pair", "shape"],
)
def test_what_is_no_term_is_said(loss: ForwardOutput, message: str) -> None:
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda *_: loss)
    with pytest.raises(ForwardContractError, match=message):
        trainer.run([cuts.samples()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_sizes": 3}, "sample_sizes must be a function"),
        ({"sample_sizes": sizes, "normalize": False}, "normalize must be True with sample_sizes"),
        ({"sample_sizes": sizes, "reduction": "local"}, "reduction must not be 'local' with sample_sizes"),
        ({"sample_sizes": sizes, "on_out_of_memory": "skip"}, "on_out_of_memory must be 'raise' or 'split' with sample_sizes"),
    ],
    ids=["number", "normalize", "local", "skip"],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        UpdateOptions(**options)


def test_halves_of_a_micro_batch_keep_the_denominators() -> None:
    """A micro-batch that does not fit is halved, and the update stays the same."""
    failed: list[int] = []

    def narrow(model: nn.Module, sample: cuts.Sample) -> ForwardOutput:
        if len(sample[0]) > 20:
            failed.append(len(sample[0]))
            raise torch.OutOfMemoryError("no room")
        return forward(model, sample)

    model = cuts.linear()
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE),
        narrow,
        options=UpdateOptions(sample_sizes=sizes, on_out_of_memory="split"),
    )
    trainer.run([cuts.samples()], max_epochs=NUM_EPOCHS)
    assert failed
    assert weights_of(model) == pytest.approx(by_hand(clip=None)[0].tolist(), rel=1e-12)


@pytest.mark.parametrize("options", [{"on_out_of_memory": "split"}, {"normalize": False}], ids=["split", "normalize"])
def test_denominators_of_a_single_micro_batch_are_needed_before_it(options: dict[str, Any]) -> None:
    """Where it may be cut, its halves are not the update, and what is not divided by them has no use of their means."""
    model, trainer = make(accumulation_steps=1, sample_sizes=None, **options)
    before = weights_of(model)
    with pytest.raises(ForwardContractError, match="needs them before backward; pass options=UpdateOptions"):
        trainer.run([cuts.samples()])
    assert weights_of(model) == before


def test_halves_of_a_mean_are_refused() -> None:
    """They would weigh as much as a whole micro-batch each. Before the lack of memory, in the first update."""
    model = cuts.linear()

    def mean(model: nn.Module, sample: cuts.Sample) -> torch.Tensor:
        return model(sample[0]).square().mean()

    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mean, options=UpdateOptions(on_out_of_memory="split")
    )
    before = weights_of(model)
    with pytest.raises(ForwardContractError, match="on_out_of_memory='split' must know how much each half"):
        trainer.run([cuts.samples()])
    assert weights_of(model) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_denominators_have_their_whole_value_in_any_dtype(dtype: torch.dtype) -> None:
    """Each fits into bfloat16, and their sum does not; one of them is 0, and float16 has no 1e-30."""
    numbers = {"many": 256, "few": 3, "none": 0}

    def several(model: nn.Module, sample: cuts.Sample) -> ForwardOutput:
        total = model(sample[0]).square().sum()
        return ForwardOutput({name: (total * bool(n), torch.tensor(n, dtype=dtype)) for name, n in numbers.items()})

    model, by_hand, data = cuts.linear(), cuts.linear(), cuts.samples()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), several)
    trainer.run([data])
    total = by_hand(data[0]).square().sum()
    (total / 256 + total / 3).backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.1).step()
    assert weights_of(model) == pytest.approx(weights_of(by_hand), rel=1e-12)
    assert trainer.state.update_output is not None
    assert trainer.state.update_output.sample_size == 259


def test_the_loss_of_an_interval_is_the_sum_of_the_means_of_its_terms() -> None:
    """As the evaluator's over the same data, where the weights do not move; of updates with a name likewise."""
    x, y, weight = cuts.samples()
    shares = [
        (x[a:b], y[a:b], weight[a:b] * (x[a:b, 0] > edge)) for a, b, edge in ((0, 30, -9.0), (30, 50, 1.0), (50, 64, 0.0))
    ]
    evaluated = create_evaluator(cuts.linear(), forward).run(shares).metrics
    trainers = [make(accumulation_steps=1)[1] for _ in range(2)]
    for trainer, name in zip(trainers, (None, "r1"), strict=True):
        trainer.optimizers["optimizer"].param_groups[0]["lr"] = 0.0
        TrainingMetrics(memory=False, perplexity=True).attach(trainer, Events.ITERATION_COMPLETED(every=3))
        with trainer.session():
            for share in shares:
                trainer.update([share], name=name)
    plain, named = (trainer.state.metrics for trainer in trainers)
    assert plain["loss"] == pytest.approx(evaluated["loss"], rel=1e-12)
    assert plain["perplexity"] == pytest.approx(math.exp(evaluated["loss"]), rel=1e-12)
    assert {key: named[f"r1/{key}"] for key in evaluated} == pytest.approx(evaluated, rel=1e-12)


def test_an_evaluation_and_the_metrics_show_each_term() -> None:
    """The evaluation divides by the numbers of all micro-batches, whatever the cut is."""
    model, trainer = make(accumulation_steps=2)
    TrainingMetrics(memory=False).attach(trainer, Events.EPOCH_COMPLETED)
    whole = create_evaluator(model, forward).run([cuts.samples()]).metrics
    cut = create_evaluator(model, forward).run(cuts.cut(cuts.samples(), [60, 4])).metrics
    assert cut == pytest.approx(whole, rel=1e-12)
    assert whole["loss"] == pytest.approx(whole["loss/square"] + whole["loss/positive"], rel=1e-12)
    metrics = trainer.run(cuts.cut(cuts.samples(), [60, 4]), max_epochs=1).metrics
    assert {name: metrics[name] for name in whole} == pytest.approx(whole, rel=1e-12)


# --- another forward for one update ---


def test_one_update_has_another_forward() -> None:
    """It is the step along that loss by hand, counts, and has its name in the record; the next one is an ordinary update."""

    def penalty(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
        return ForwardOutput(next(model.parameters()).square().sum() * len(micro_batch[0]), sample_size=len(micro_batch[0]))

    model, trainer = make()
    by_hand, data = cuts.linear(), cuts.samples()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=cuts.LEARNING_RATE)
    records = []
    with trainer.session():
        for forward_, name in ((None, None), (penalty, "penalty"), (None, None)):
            records.append(trainer.update(cuts.cut(data, [40, 24]), forward=forward_, name=name))
            optimizer.zero_grad()
            means = [total / size for total, size in terms_of(by_hand, data).values()]
            (sum(means) if forward_ is None else next(by_hand.parameters()).square().sum()).backward()  # type: ignore[union-attr]
            optimizer.step()
    assert weights_of(model) == pytest.approx(weights_of(by_hand), rel=1e-12)
    assert [record.name for record in records] == [None, "penalty", None]
    assert (trainer.state.iteration, trainer.state.num_steps, records[1].losses) == (3, 3, {})


@pytest.mark.parametrize(
    ("arguments", "message"), [({"forward": 3}, "forward must be callable"), ({"name": 3}, "name must be a")]
)
def test_what_is_no_other_forward_is_refused(arguments: dict[str, Any], message: str) -> None:
    _, trainer = make()
    with trainer.session(), pytest.raises(TypeError, match=message):
        trainer.update([cuts.samples()], **arguments)
    assert trainer.state.iteration == 0


def test_an_event_for_the_updates_of_one_name() -> None:
    """STEP_COMPLETED, and any other at which the record is there."""
    _, trainer = make()
    seen: list[tuple[str, int]] = []
    trainer.add_event_handler(only(None), lambda: seen.append(("ordinary", trainer.state.iteration)))
    trainer.add_event_handler(only("other"), lambda: seen.append(("other", trainer.state.iteration)))
    trainer.add_event_handler(only("other", Events.ITERATION_COMPLETED), lambda: seen.append(("end", trainer.state.iteration)))
    with trainer.session():
        for name in (None, "other", None):
            trainer.update([cuts.samples()], name=name)
    assert seen == [("ordinary", 1), ("other", 2), ("end", 2), ("ordinary", 3)]
    with pytest.raises(TypeError, match="name must be a string, or None, got 3"):
        only(3)  # type: ignore[arg-type]


def test_averages_schedules_and_teachers_follow_the_updates_of_one_name() -> None:
    """Each as often as there were ordinary steps, and to the weights that these have left."""

    def penalty(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
        return ForwardOutput(next(model.parameters()).square().sum(), sample_size=1)

    model, trainer = make()
    teacher, ema = copy.deepcopy(model), ModelEMA(0.5, warm_up=False)
    schedule = torch.optim.lr_scheduler.StepLR(trainer.optimizers["optimizer"], 1, gamma=0.5)
    ema.attach(trainer, only(None))
    LearningRateSchedule(schedule).attach(trainer, only(None))
    MomentumTeacher(teacher, model, 0.5).attach(trainer, only(None))
    expected, rates = torch.tensor(weights_of(model)), []
    with trainer.session():
        for name in (None, "penalty", "penalty", None):
            arguments: dict[str, Any] = {} if name is None else {"forward": penalty, "name": name}
            rates.extend(trainer.update([cuts.samples()], **arguments).learning_rates)
            if name is None:
                expected = 0.5 * expected + 0.5 * torch.tensor(weights_of(model))
    rate = cuts.LEARNING_RATE
    assert rates == [rate, rate / 2, rate / 2, rate / 2]
    assert (ema.num_updates, schedule.last_epoch, trainer.state.num_steps) == (2, 2, 4)
    assert weights_of(teacher) == pytest.approx(expected.tolist(), rel=1e-6)
    with ema.swapped_in():
        assert weights_of(model) == pytest.approx(expected.tolist(), rel=1e-6)
