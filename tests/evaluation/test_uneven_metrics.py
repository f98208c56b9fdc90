"""Each metric of Ignite, over ranks that have different numbers of samples or none, is that of one process with all samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import ignite.metrics
import ignite.metrics.clustering
import ignite.metrics.fairness
import ignite.metrics.regression
import pytest
import torch
from ignite.engine import Events
from ignite.exceptions import NotComputableError
from ignite.metrics import Accuracy, BatchWise, EpochMetric, EpochWise, Metric, MetricUsage, Precision, RunningAverage
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from ignite_train import Evaluator, ForwardOutput, UpdateOptions, attach_metric, create_evaluator, create_trainer
from ignite_train.evaluation.uneven_metrics import metrics_published_at
from ignite_train.handlers import Checkpoint
from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs/differences-from-ignite.md"
Batch = tuple[Tensor, Tensor]
Pair = tuple[Any, Any]


def batches(sizes: list[int], seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    data = [(torch.randn(size, 3, generator=generator), torch.randint(0, 3, (size,), generator=generator)) for size in sizes]
    return [(x, torch.cat([torch.arange(min(3, len(y))), y[3:]])) for x, y in data]  # a batch of three or more has each class


def forward(model: nn.Module, batch: Batch) -> ForwardOutput:
    x, y = batch
    return ForwardOutput(cross_entropy(x + 0 * model(x), y, reduction="sum"), len(y), outputs=(x, y))


def make_evaluator() -> Evaluator:
    return create_evaluator(nn.Linear(3, 3), forward)


# --- what each metric is shown: functions of the scores (n, 3) and the labels (n,) -------------------------------------------


def binary(pair: Pair) -> Pair:
    return pair[0][:, 0].sigmoid(), (pair[1] == 0).long()


def numbers(pair: Pair) -> Pair:
    return pair[0][:, 0] + 2.5, pair[1] + 0.5 + pair[0][:, 1].abs()


def labels(pair: Pair) -> Pair:
    return (pair[0] > 0).long(), one_hot(pair[1], 3)


def vectors(pair: Pair) -> Pair:
    return pair[0], one_hot(pair[1], 3).float() + 0.1


def pictures(pair: Pair) -> Pair:
    grid = torch.linspace(0, 1, 16 * 16).view(1, 1, 16, 16)
    return tuple(vector[:, :, None, None].sigmoid() * grid for vector in vectors(pair))  # type: ignore[return-value]


def sentences(pair: Pair) -> Pair:
    said = [["a", "b", "c", "d", "e"][: 2 + int(row.argmax())] for row in pair[0]]
    return said, [[["a", "b", "c", "d"][: 2 + int(label)]] for label in pair[1]]


def strings(pair: Pair) -> Pair:
    said, meant = sentences(pair)
    return ["".join(words) for words in said], ["".join(words[0]) for words in meant]


def classes(pair: Pair) -> Pair:
    return pair[0].argmax(1), pair[1]


def grouped(pair: Pair) -> Any:
    return pair[0], pair[1], (pair[0][:, 0] > 0).long()


def spread(predictions: Tensor, targets: Tensor) -> float:
    return float((predictions[:, 0] - targets).double().square().sum())


OF_IGNITE: dict[str, Callable[[], Metric]] = {
    "Accuracy": lambda: Accuracy(),
    "Average": lambda: ignite.metrics.Average(lambda pair: pair[0]),
    "GeometricAverage": lambda: ignite.metrics.GeometricAverage(lambda pair: pair[0].exp()),
    "VariableAccumulation": lambda: ignite.metrics.VariableAccumulation(lambda a, x: a + x, lambda pair: pair[0].sum(0)),
    "AveragePrecision": lambda: ignite.metrics.AveragePrecision(binary),
    "ClassificationReport": lambda: ignite.metrics.ClassificationReport(output_dict=True),
    "CohenKappa": lambda: ignite.metrics.CohenKappa(classes),
    "ConfusionMatrix": lambda: ignite.metrics.ConfusionMatrix(3),
    "DiceCoefficient": lambda: ignite.metrics.DiceCoefficient(ignite.metrics.ConfusionMatrix(3)),
    "IoU": lambda: ignite.metrics.IoU(ignite.metrics.ConfusionMatrix(3)),
    "JaccardIndex": lambda: ignite.metrics.JaccardIndex(ignite.metrics.ConfusionMatrix(3)),
    "mIoU": lambda: ignite.metrics.mIoU(ignite.metrics.ConfusionMatrix(3)),
    "CosineSimilarity": lambda: ignite.metrics.CosineSimilarity(output_transform=vectors),
    "Entropy": lambda: ignite.metrics.Entropy(),
    "EpochMetric": lambda: EpochMetric(spread, check_compute_fn=False),
    "Fbeta": lambda: ignite.metrics.Fbeta(1.0, average=False),
    "HSIC": lambda: ignite.metrics.HSIC(
        output_transform=lambda pair: vectors(pair) if len(pair[0]) > 3 else (torch.eye(4), torch.eye(4))
    ),
    "JSDivergence": lambda: ignite.metrics.JSDivergence(vectors),
    "KLDivergence": lambda: ignite.metrics.KLDivergence(vectors),
    "Loss": lambda: ignite.metrics.Loss(cross_entropy),
    "MaximumMeanDiscrepancy": lambda: ignite.metrics.MaximumMeanDiscrepancy(output_transform=vectors),
    "MeanAbsoluteError": lambda: ignite.metrics.MeanAbsoluteError(vectors),
    "MeanAveragePrecision": lambda: ignite.metrics.MeanAveragePrecision(),
    "MeanPairwiseDistance": lambda: ignite.metrics.MeanPairwiseDistance(output_transform=vectors),
    "MeanSquaredError": lambda: ignite.metrics.MeanSquaredError(vectors),
    "MatthewsCorrCoef": lambda: ignite.metrics.MatthewsCorrCoef(classes),
    "MetricGroup": lambda: ignite.metrics.MetricGroup(
        {"precision": Precision(average=False), "spread": EpochMetric(spread, check_compute_fn=False)}
    ),
    "MetricsLambda": lambda: ignite.metrics.MetricsLambda(
        lambda a, b: a + b, Accuracy(), EpochMetric(spread, check_compute_fn=False)
    ),
    "MultiLabelConfusionMatrix": lambda: ignite.metrics.MultiLabelConfusionMatrix(3, labels),
    "MutualInformation": lambda: ignite.metrics.MutualInformation(),
    "Bleu": lambda: ignite.metrics.Bleu(ngram=2, output_transform=sentences, smooth="smooth1"),
    "CharacterErrorRate": lambda: ignite.metrics.CharacterErrorRate(strings),
    "Rouge": lambda: ignite.metrics.Rouge(["L", 2], output_transform=sentences),
    "RougeL": lambda: ignite.metrics.RougeL(output_transform=sentences),
    "RougeN": lambda: ignite.metrics.RougeN(ngram=1, output_transform=sentences),
    "Perplexity": lambda: ignite.metrics.Perplexity(),
    "Precision": lambda: Precision(average=False),
    "PrecisionRecallCurve": lambda: ignite.metrics.PrecisionRecallCurve(binary),
    "PSNR": lambda: ignite.metrics.PSNR(1.0, pictures),
    "Recall": lambda: ignite.metrics.Recall(average="weighted"),
    "HitRate": lambda: ignite.metrics.HitRate([1, 2], output_transform=labels),
    "NDCG": lambda: ignite.metrics.NDCG([1, 2], output_transform=vectors),
    "ROC_AUC": lambda: ignite.metrics.ROC_AUC(binary),
    "RocCurve": lambda: ignite.metrics.RocCurve(binary),
    "RootMeanSquaredError": lambda: ignite.metrics.RootMeanSquaredError(vectors),
    "SSIM": lambda: ignite.metrics.SSIM(1.0, output_transform=pictures),
    "TopKCategoricalAccuracy": lambda: ignite.metrics.TopKCategoricalAccuracy(2),
    "FID": lambda: ignite.metrics.FID(3, nn.Identity(), output_transform=vectors),
    "InceptionScore": lambda: ignite.metrics.InceptionScore(3, nn.Identity(), lambda pair: pair[0].softmax(1)),
    "SubgroupAccuracyDifference": lambda: ignite.metrics.fairness.SubgroupAccuracyDifference([0, 1], output_transform=grouped),
    "DemographicParityDifference": lambda: ignite.metrics.fairness.DemographicParityDifference(
        [0, 1], output_transform=grouped
    ),
    "SelectionRate": lambda: ignite.metrics.fairness.SelectionRate(),
    **{
        name: lambda name=name: getattr(ignite.metrics.clustering, name)(lambda pair: pair)
        for name in ("CalinskiHarabaszScore", "DaviesBouldinScore", "SilhouetteScore")
    },
}
REGRESSION = sorted(name for name in vars(ignite.metrics.regression) if name[0].isupper())
OF_IGNITE |= {name: lambda name=name: getattr(ignite.metrics.regression, name)(output_transform=numbers) for name in REGRESSION}


BASES = {"Metric", "MetricUsage", "EpochWise", "BatchWise", "BatchFiltered"}  # no metrics
NOT_LOOKED_AT = BASES | {
    "RunningAverage", "Frequency", "GpuInfo",  # of each rank, of time, of a device
    "ObjectDetectionAvgPrecisionRecall", "CommonObjectDetectionMetrics", "coco_tensor_list_to_dict_list",  # need torchvision
}  # fmt: skip


def plain(value: Any) -> Any:
    """The numbers of a metric, in lists and dictionaries."""
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value.tolist() if isinstance(value, Tensor) else value


TWICE = ("Precision", "SSIM", "ROC_AUC", "MetricsLambda", "MeanAveragePrecision", "Average")  # one of each kind of state


def evaluated(sizes: list[list[int]]) -> dict[str, Any]:
    """What each metric finds over the ranks; some after an earlier evaluation, which must leave no trace."""
    found, rank = {}, idist.get_rank()
    for name, make in OF_IGNITE.items():
        evaluator = make_evaluator()
        metric = make()
        metric.attach(evaluator, name)
        if name in TWICE:
            evaluator.run(batches([12] * (1 - rank), 9))
        own = batches(sizes[rank], rank)
        gather = idist.all_gather
        found[name] = plain(evaluator.run(own).metrics[name])
        assert idist.all_gather is gather
        assert "compute" not in vars(metric)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ignite's own, and those of the functions that it calls
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([[], [12]], id="first-without-data"),
        pytest.param([[6, 4, 5], [7]], id="uneven", marks=pytest.mark.nightly),
        pytest.param([[6, 4], []], id="second-without-data", marks=pytest.mark.nightly),
    ],
)
def test_each_metric_is_that_of_all_samples(sizes: list[list[int]]) -> None:
    """All of Ignite's, with predictions of many kinds, on both ranks."""
    pytest.importorskip("sklearn")
    outcomes = run_ranks(evaluated, sizes)
    data = [batch for rank, own in enumerate(sizes) for batch in batches(own, rank)]
    for name, make in OF_IGNITE.items():
        evaluator = make_evaluator()
        make().attach(evaluator, name)
        expected = plain(evaluator.run(data).metrics[name])
        assert str(expected) not in ("nan", "0")
        for outcome in outcomes:  # single precision: in it Ignite sends the number that rank 0 has computed
            torch.testing.assert_close(outcome[name], expected, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def test_no_metric_is_forgotten() -> None:
    """The table has all that Ignite exports, but those that are listed with a reason."""
    exported = {
        name
        for module in (ignite.metrics, ignite.metrics.regression, ignite.metrics.clustering, ignite.metrics.fairness)
        for name, entry in vars(module).items()
        if isinstance(entry, type) and name not in ("SubgroupDifference", "SubgroupMetric")  # bases
    }
    assert exported - set(OF_IGNITE) - NOT_LOOKED_AT == {"EpochMetricWarning"} & exported


@pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, and here is none")
def test_the_page_names_what_was_not_looked_at() -> None:
    """docs/differences-from-ignite.md says that all metrics are exact but these."""
    sentences = PAGE.read_text(encoding="utf-8").partition("all metrics of Ignite but these: ")[2].partition(".\n")[0]
    named = set(re.findall(r"`(\w+)`", sentences.partition(". ")[0]))
    assert named == {name for name in NOT_LOOKED_AT if isinstance(getattr(ignite.metrics, name), type)} - BASES


# --- what cannot be right is refused on all ranks ---------------------------------------------------------------------------


class Kept(Metric):
    """Keeps tensors in a list, and says nothing of how it gathers them."""

    def reset(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, output: Pair) -> None:
        self.kept.append(output[0])

    def compute(self) -> int:
        return len(idist.all_gather(torch.cat(self.kept)))


class Shaped(Metric):
    """Keeps tensors of shapes that differ in a list, and adds up their elements on its own."""

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        self.form = form
        super().__init__()

    def reset(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, output: Pair) -> None:
        self.kept.append(self.form(output[0]))

    def compute(self) -> float:
        own = sum(tensor.numel() for tensor in self.kept)
        return sum(idist.all_gather(float(own)))


class Curve(EpochMetric):
    """Has rank 0 compute two numbers, which it sends to the others, as `RocCurve` and `PrecisionRecallCurve` do."""

    def compute(self) -> Any:
        predictions, targets = (idist.all_gather(torch.cat(kept)) for kept in (self._predictions, self._targets))
        numbers = self.compute_fn(predictions, targets) if idist.get_rank() == 0 else (0.0, 0.0)
        return [idist.broadcast(number, src=0) for number in numbers]  # type: ignore[attr-defined]


class Raising(Accuracy):
    """Raises an error on some ranks before it gathers."""

    def __init__(self, error: Exception, *ranks: int) -> None:
        self.error, self.ranks = error, ranks
        super().__init__()

    def compute(self) -> Any:
        if idist.get_rank() in self.ranks:
            raise self.error
        return idist.all_gather(torch.ones(1))


def failing(predictions: Tensor, targets: Tensor) -> float:
    raise ArithmeticError("no such curve")


def different(pair: Pair) -> Pair:
    return pair[0][:, : 2 + idist.get_rank()], pair[1].clamp(max=1)


def ragged_on_rank_0(pair: Pair) -> Pair:
    return (pair[0][:, :2], pair[1]) if idist.get_rank() == 0 and len(pair[1]) == 2 else pair


def attach_running(evaluator: Any) -> None:
    RunningAverage(Accuracy()).attach(evaluator, "running")


AT_THE_END = MetricUsage(Events.STARTED, Events.COMPLETED, Events.ITERATION_COMPLETED)
Attach = Callable[[Any], None]
REFUSED: dict[str, tuple[list[list[int]], Attach, str]] = {
    "shapes": (
        [[3], [3]],
        lambda evaluator: Precision(different, average=False).attach(evaluator, "precision"),
        "metric 'precision' (Precision) must have a state of one shape on all ranks, got shapes [(2,), (3,)]",
    ),
    "unlike": (
        [[3], [3]],
        lambda evaluator: Accuracy().attach(evaluator, f"of rank {idist.get_rank()}"),
        "metrics must be attached alike on all ranks, since they reduce together, got rank 0: ['of rank 0'], rank 1:",
    ),
    "error-on-one": (
        [[3], [3]],
        lambda evaluator: EpochMetric(failing, check_compute_fn=False).attach(evaluator, "curve"),
        "metric 'curve' could not be computed on rank 0: ArithmeticError: no such curve",
    ),
    "error-in-a-part": (
        [[3], [3]],
        lambda evaluator: (Accuracy() + EpochMetric(failing, check_compute_fn=False)).attach(evaluator, "sum"),
        "metric 'sum' could not be computed on rank 0: ArithmeticError: no such curve",
    ),
    "error-where-rank-0-sends": (
        [[3], [3]],
        lambda evaluator: Curve(failing, check_compute_fn=False).attach(evaluator, "curve"),
        "metric 'curve' could not be computed on rank 0: ArithmeticError: no such curve",
    ),
    "error-before-gathering": (
        [[3], [3]],
        lambda evaluator: Raising(OSError("no such file"), 1).attach(evaluator, "first"),
        "metric 'first' could not be computed on rank 1: OSError: no such file",
    ),
    "error-on-all": (
        [[3], [3]],
        lambda evaluator: Raising(OSError(f"no file of rank {idist.get_rank()}"), 0, 1).attach(evaluator, "first"),
        "no file of rank ",
    ),
    "nothing-seen-before-gathering": (
        [[3], [3]],
        lambda evaluator: Raising(NotComputableError("no sample"), 1).attach(evaluator, "first"),
        "metric 'first' could not be computed on rank 1: NotComputableError: no sample",
    ),
    "ragged": (
        [[3, 2], [3, 2]],
        lambda evaluator: EpochMetric(spread, ragged_on_rank_0, check_compute_fn=False).attach(evaluator, "spread"),
        "metric 'spread' could not be computed on rank 0: RuntimeError: Sizes of tensors must match",
    ),
    "running": (
        [[3, 2], [3]],
        attach_running,
        "metric 'running' (RunningAverage) is reduced over ranks after each micro-batch and would hang where they have "
        "different numbers, got [2, 1]; attach it with usage=EpochWise(), or pass uneven='shortest' to create_evaluator",
    ),
    "running-without-a-length": (
        [[3], [3]],
        attach_running,
        "metric 'running' (RunningAverage) is reduced over ranks after each micro-batch and would hang where they have "
        "different numbers, got ['unknown', 'unknown']; attach it with usage=EpochWise()",
    ),
    "at-the-end-of-the-run": (
        [[3, 2], [3]],
        lambda evaluator: EpochMetric(spread).attach(evaluator, "last", usage=AT_THE_END),
        "metric 'last' (EpochMetric) is reduced over ranks at Events.COMPLETED, and would hang where they have different "
        "numbers of samples; attach it with usage=EpochWise()",
    ),
}


def refused(names: list[str]) -> dict[str, str]:
    """The error of each case, and that the evaluator is usable afterwards."""
    found = {}
    for name in names:
        sizes, attach, _ = REFUSED[name]
        evaluator = make_evaluator()
        attach(evaluator)
        gather, broadcast = idist.all_gather, idist.broadcast
        data = batches(sizes[idist.get_rank()], 1)
        try:
            evaluator.run(iter(data) if name == "running-without-a-length" else data)
        except Exception as error:
            found[name] = str(error)
        assert (idist.all_gather, idist.broadcast) == (gather, broadcast)
        published = metrics_published_at(evaluator, Events.EPOCH_COMPLETED).values()
        assert [metric for metric in published if "compute" in vars(metric)] == []
    return found


@pytest.mark.slow
def test_what_has_no_right_number_is_refused_on_all_ranks() -> None:
    """In one line that names the metric; no rank waits for another."""
    for outcome in run_ranks(refused, list(REFUSED)):
        for name, (_, _, message) in REFUSED.items():
            assert outcome[name].startswith(message)
            assert "\n" not in outcome[name]


def lists() -> list[float]:
    """Lists with data on all ranks, of uneven length or of shapes that differ; and one with data on rank 0 alone."""
    rank, found = idist.get_rank(), []
    ragged = lambda scores: scores[:, : len(scores) - rank]  # noqa: E731  # 3 x 3 and 2 x 2 on rank 0, 3 x 2 and 3 x 2 on rank 1
    for metric in (Kept(), Shaped(ragged), Shaped(lambda scores: scores.sum() if rank else scores)):
        evaluator = make_evaluator()
        metric.attach(evaluator, "of a list")
        found.append(evaluator.run(batches([3, 2 + rank], 1)).metrics["of a list"])
    evaluator = make_evaluator()
    Kept().attach(evaluator, "of rank 0")
    found.append(evaluator.run(batches([3, 2] * (1 - rank), 1)).metrics["of rank 0"])
    return found


@pytest.mark.slow
def test_lists_are_gathered_by_the_metric_that_keeps_them() -> None:
    """The lists of a user's metric may differ in length and shape, and one without data is not asked."""
    assert run_ranks(lists) == [[3 + 2 + 3 + 3, 9 + 4 + 6 + 6, 9 + 6 + 1 + 1, 3 + 2]] * 2


def test_a_single_process_may_have_running_metrics_of_data_without_a_length() -> None:
    """A single rank has nothing to compare its number of micro-batches with."""
    evaluator = make_evaluator()
    attach_running(evaluator)
    ((x, y),) = batches([4], 1)
    assert evaluator.run(iter([(x, y)])).metrics["running"] == pytest.approx(float((x.argmax(1) == y).float().mean()))


def running() -> bool:
    """Running metrics of ranks in step."""
    evaluator = make_evaluator()
    attach_running(evaluator)
    Accuracy().attach(evaluator, "whole", EpochWise())
    return 0.0 <= evaluator.run(batches([3, 2 + idist.get_rank()], 1)).metrics["running"] <= 1.0


def running_metric_of_training() -> str:
    """The error where a metric is reduced after each micro-batch of training, and the ranks have different numbers of them."""
    model = idist.auto_model(nn.Linear(3, 3))
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, accumulation_steps=2, protect=False)
    attach_metric(trainer, RunningAverage(Accuracy()), "running")
    with pytest.raises(ValueError, match="metric 'running'") as caught:
        trainer.run(batches([3, 2, 4][: 3 - idist.get_rank()], 1))
    return str(caught.value)


@pytest.mark.slow
def test_running_metrics_need_ranks_in_step() -> None:
    """A trainer compares the numbers of micro-batches."""
    assert run_ranks(running) == [True] * 2
    for message in run_ranks(running_metric_of_training):
        assert message.startswith(
            "metric 'running' is reduced over ranks after each micro-batch and would hang where they have"
        )
        assert "got [1, 0] in this update" in message


def nested(sizes: list[list[int]]) -> list[dict[str, Any]]:
    """Metrics that are published and part of others, as an evaluator and a trainer find them."""
    rank, found = idist.get_rank(), []
    own = sizes if idist.get_world_size() == 1 else [sizes[rank]]
    for kind in ("evaluator", "trainer"):
        matrix, accuracy, precision = ignite.metrics.ConfusionMatrix(3), Accuracy(), Precision(average=False)
        metrics = {"iou": ignite.metrics.mIoU(matrix), "matrix": matrix, "accuracy": accuracy, "error": 1 - accuracy}
        metrics |= {"precision": precision, "mean": precision.mean(), "twice": (precision.mean() + accuracy) * 2}
        model = idist.auto_model(nn.Linear(3, 3))
        if kind == "evaluator":
            engine: Any = create_evaluator(model, forward)
            for name, metric in metrics.items():
                metric.attach(engine, name)
        else:
            engine = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, protect=False)
            for name, metric in metrics.items():
                attach_metric(engine, metric, name)
        published = engine.run([batch for some in own for batch in batches(some, len(some))]).metrics
        found.append({name: torch.as_tensor(published[name]).tolist() for name in metrics})
        assert idist.all_gather(rank) == [*range(idist.get_world_size())]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[[4, 3], []], [[], [4, 3]], [[4, 3], [], [1, 2]]], ids=["first", "second", "outer"])
def test_a_metric_may_be_published_and_part_of_others(sizes: list[list[int]]) -> None:
    """On a rank without data too; all ranks do as many collectives, also after an evaluation."""
    expected, same = nested(sizes)
    torch.testing.assert_close(same, expected)
    for outcome in run_ranks(nested, sizes, world_size=len(sizes)):
        for found in outcome:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Counted(Metric):
    """A metric of a script's own that reduces nothing and has no state to save, as `GpuInfo`."""

    def reset(self) -> None:
        self.number = 0

    def update(self, output: Any) -> None:  # noqa: ARG002  # Ignite's
        self.number += 1

    def compute(self) -> int:
        return self.number


class Percent(EpochMetric):
    """It calls the `compute` of Ignite, which is where the ranks meet."""

    def __init__(self) -> None:
        super().__init__(lambda scores, targets: float((scores.argmax(1) == targets).float().mean()))

    def compute(self) -> float:
        return 100 * super().compute()


def percent() -> float:
    evaluator = make_evaluator()
    Percent().attach(evaluator, "percent")
    return float(evaluator.run(batches([8, 4][idist.get_rank() :], 1)).metrics["percent"])


@pytest.mark.slow
def test_a_metric_that_calls_the_one_of_ignite_waits_for_ranks() -> None:
    """So the ranks may have different numbers of samples."""
    first, second = run_ranks(percent)
    assert first == second


def counted_on_rank_0(with_others: bool) -> dict[str, float]:
    """Evaluations of one and of two micro-batches with such a metric on rank 0, once an epoch and after each micro-batch."""
    evaluator, rank = make_evaluator(), idist.get_rank()
    if with_others:
        Accuracy().attach(evaluator, "accuracy")
    if rank == 0:
        Counted().attach(evaluator, "once")
        Counted().attach(evaluator, "each", BatchWise())
    return dict(evaluator.run(batches([3, 2][: 1 + rank], 1)).metrics)


def counted_on_trainer(directory: Path) -> int:
    """The updates of a trainer with such a metric on rank 0, which a checkpoint asks nothing of."""
    model = nn.Linear(3, 3)
    options = UpdateOptions(reduction="explicit")
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, options=options)
    if idist.get_rank() == 0:
        Counted().attach(trainer, "updates")
    Checkpoint(directory, every=1).attach(trainer)
    state = trainer.run(batches([3, 2], 1), max_epochs=1)
    return int(state.metrics.get("updates", 0))


def test_a_metric_that_waits_for_nobody_may_be_on_one_rank_alone(tmp_path: Path) -> None:
    """Nor need the ranks have as many micro-batches for it."""
    for with_others in (False, True):
        first, second = run_ranks(counted_on_rank_0, with_others)
        assert (first["once"], first["each"]) == (1, 1)
        assert {"once", "each"}.isdisjoint(second)
        assert first.keys() - {"once", "each"} == second.keys()
    assert run_ranks(counted_on_trainer, tmp_path) == [2, 0]
