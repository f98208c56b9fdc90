"""Metrics of Ignite that come back with a checkpoint: each tensor on the device where its metric adds up, and no value lost.

A checkpoint gives tensors on the CPU. Here the other device is `meta`, which every machine has and which holds no values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, ConfusionMatrix, EpochMetric, Loss, Metric, MetricGroup, Precision, Recall, RunningAverage
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from ignite_train import CheckpointError, Trainer, attach_metric, create_supervised_trainer
from ignite_train.evaluation.load_metric import load_metric
from ignite_train.handlers import Checkpoint

Make = Callable[[str], Metric]


class StopError(Exception):
    """Ends a run before the metric sees another micro-batch."""


class Apart(Metric):
    """Keeps its tensors where it wants, whatever the device that it was given."""

    _state_dict_all_req_keys = ("total",)

    def __init__(self, place: str, device: str) -> None:
        self.place = place
        super().__init__(device=device)

    def reset(self) -> None:
        self.total = torch.zeros(3, device=self.place)

    def update(self, output: Any) -> None:
        self.total += output[0].detach().sum(0).to(self.place)

    def compute(self) -> Any:
        return self.total.clone()


class WithoutDevice(Apart):
    """Does not call the constructor of Ignite's class, and so has no device."""

    def __init__(self, place: str) -> None:
        self.place, self._skip_unrolling, self._metrics_result_mode = place, False, "both"
        self._output_transform = lambda output: output
        self.reset()


def lists(device: str) -> Metric:
    """Keeps all predictions and targets in lists, which are empty before the first."""
    return EpochMetric(lambda x, y: float(x.sum() + y.sum()), check_compute_fn=False, device=device)


def f1(device: str) -> Metric:
    """A function of two metrics, which is a metric too."""
    precision, recall = Precision(average=False, device=device), Recall(average=False, device=device)
    return (precision * recall * 2 / (precision + recall + 1e-20)).mean()


# Some hold tensors before they have seen a sample; others hold zeros, None or empty lists.
METRICS: dict[str, Make] = {
    "accuracy": lambda device: Accuracy(device=device),
    "loss": lambda device: Loss(cross_entropy, device=device),
    "confusion": lambda device: ConfusionMatrix(3, device=device),
    "precision": lambda device: Precision(average=False, device=device),
    "lists": lists,
    "running": lambda device: RunningAverage(output_transform=lambda output: output[0].sum(), device=device),
    "running-metric": lambda device: RunningAverage(Accuracy(device=device)),
    "function": f1,
    "group": lambda device: MetricGroup({"accuracy": Accuracy(device=device), "lists": lists(device)}),
    "apart": lambda device: Apart(device, "cpu"),
    "without-device": WithoutDevice,
}


def make(directory: Path, metric: Metric, way: str, every: int | None = None) -> Trainer:
    """A trainer whose checkpoints have the metric: attached with ours, with Ignite's, or named in `to_save` too."""
    torch.manual_seed(5)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pair = {"output_transform": lambda x, y, y_pred, loss: (y_pred, y)}
    trainer = create_supervised_trainer(model, optimizer, cross_entropy, **pair)
    if way == "attach_metric":
        attach_metric(trainer, metric, "kept")
    else:
        metric.attach(trainer, "kept")
    Checkpoint(directory, every=every, to_save={"kept": metric} if way == "to_save" else {}).attach(trainer)
    return trainer


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)) for _ in range(4)]


def devices_after_resume(directory: Path, make_metric: Make, way: str, device: str) -> set[str]:
    """Where the tensors of a metric on `device` lie when a run resumes that has counted on the CPU."""
    make(directory, make_metric("cpu"), way).run(batches(), max_iters=2)
    metric = make_metric(device)
    trainer = make(directory, metric, way)

    @trainer.on(Events.ITERATION_STARTED)
    def stop() -> None:
        assert trainer.state.iteration == 3
        raise StopError("seen enough")

    # The next save is tried before the first update, and tensors on `meta` cannot be stored, which says that they are there.
    with pytest.raises((StopError, CheckpointError), match=r"seen enough|a tensor that is sparse, quantized or without data"):
        trainer.run(batches(), max_iters=4)
    return {leaf.device.type for leaf in pytree.tree_leaves(dict(metric.state_dict())) if isinstance(leaf, Tensor)}


ALL = [*((name, "attach_metric") for name in METRICS), *product(("accuracy", "group", "without-device"), ("attach", "to_save"))]
HARD = [*product(("running-metric", "lists", "function", "group"), ("attach_metric", "attach", "to_save"))]


@pytest.mark.parametrize(("name", "way"), ALL)
def test_tensors_come_back_where_the_metric_adds_up(tmp_path: Path, name: str, way: str) -> None:
    """A metric on an accelerator adds there, so a sum that came back on the CPU would end the run with an error of torch."""
    assert devices_after_resume(tmp_path, METRICS[name], way, "meta") == {"meta"}


def test_tensors_that_a_metric_keeps_elsewhere_stay_there(tmp_path: Path) -> None:
    """Where the metric holds a tensor now, its own place counts, and not the device that it was given."""
    assert devices_after_resume(tmp_path, lambda device: Apart("cpu", device), "attach_metric", "meta") == {"cpu"}


@pytest.mark.parametrize(("name", "way"), HARD)
def test_a_metric_is_that_of_a_run_that_was_not_cut(tmp_path: Path, name: str, way: str) -> None:
    """Cut within an epoch and resumed, it has the same value: also a function of metrics, and lists inside of a group."""
    values = []
    for directory, limits in (("cut", [2, 4]), ("whole", [4])):
        for limit in limits:
            trainer = make(tmp_path / directory, METRICS[name]("cpu"), way)
            trainer.run(batches(), max_iters=limit)
        values.append(torch.as_tensor(trainer.state.metrics["accuracy" if name == "group" else "kept"]))
    torch.testing.assert_close(*values, rtol=0, atol=0)


class Unnamed(Metric):
    """Names no state for Ignite, as `CohenKappa` and many a metric of a script."""

    def reset(self) -> None:
        self.number = 0

    def update(self, output: Any) -> None:
        self.number += len(output[1])

    def compute(self) -> float:
        return 20 / self.number  # an error, if it has seen nothing


WITHOUT_STATE: dict[str, Callable[[], Metric]] = {
    "itself": Unnamed,
    "function": lambda: Unnamed() * 2 + Accuracy(),
    "group": lambda: MetricGroup({"accuracy": Accuracy(), "other": Unnamed()}),
}


@pytest.mark.parametrize("name", WITHOUT_STATE)
@pytest.mark.parametrize("way", ["attach_metric", "attach"])
def test_a_metric_without_a_state_is_named_at_a_resume_within_an_epoch(
    tmp_path: Path, name: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has lost what it had counted; at an epoch's end there is nothing to lose, and one with a state has it."""
    for limit in (2, 4, 8):
        caplog.clear()
        trainer = make(tmp_path, WITHOUT_STATE[name](), way)
        attach_metric(trainer, Accuracy(), "accuracy")
        trainer.run(batches(), max_iters=limit)
        lines = [line for line in caplog.messages if "resuming from" in line and "counts only what follows" in line]
        assert [line.partition("counts only what follows")[2] for line in lines] == (
            [" in this epoch, because its class names no attributes to save in _state_dict_all_req_keys: metric 'kept'"]
            if limit == 4
            else []
        )


def test_a_metric_without_a_state_is_left_out_where_nothing_follows(tmp_path: Path) -> None:
    """A run that was killed between the last update of an epoch and its end resumes there: with nothing that it has seen."""
    killed, resumed = (make(tmp_path, Unnamed(), "attach_metric", every=4) for _ in range(2))
    for trainer in (killed, resumed):
        attach_metric(trainer, Accuracy(), "accuracy")

    def stop() -> None:
        raise StopError("killed")

    killed.append_event_handler(Events.ITERATION_COMPLETED(once=4), stop)
    with pytest.raises(StopError):
        killed.run(batches(), max_epochs=1)
    assert [*resumed.run(batches(), max_epochs=1).metrics] == ["accuracy"]


class OfContainers(Metric):
    """Keeps a number for each class, and a tensor in a dict, of which another attribute has the same dict."""

    _state_dict_all_req_keys = ("numbers", "sums")

    def __init__(self, classes: int, device: str = "cpu") -> None:
        self.classes, self.sums, self.itself = classes, dict[str, Tensor](), self
        self.view = self.sums
        super().__init__(device=device)

    def reset(self) -> None:
        self.numbers = [0.0] * self.classes
        self.sums["total"] = torch.zeros(())

    def update(self, output: Any) -> None:
        self.numbers[0] += len(output)
        self.view["total"] += len(output)

    def compute(self) -> float:
        return float(self.sums["total"])


def test_containers_stay_the_same_objects() -> None:
    """Another reference to a dict of the state sees the loaded values; a metric may refer to itself; tensors stay apart."""
    saved, metric = OfContainers(3), OfContainers(3, device="meta")
    saved.update([0, 0])
    view, state = metric.view, saved.state_dict()

    for _ in range(2):  # a checkpoint may be put back a second time
        load_metric(metric, copy.deepcopy(state))

    assert metric.sums is view
    assert metric.sums["total"].device.type == "cpu"  # where the one was that it replaces, and not where the metric was made
    assert (metric.compute(), metric.numbers) == (2.0, [2.0, 0.0, 0.0])
    metric.update([0])
    assert metric.compute() == 3.0
    assert saved.compute() == 2.0


def test_a_list_of_another_length_is_refused() -> None:
    """A number for each class, of a metric of more classes: it is not taken as a list that has grown."""
    metric = OfContainers(3)

    with pytest.raises(ValueError, match="does not match the size"):
        load_metric(metric, OfContainers(5).state_dict())

    assert metric.numbers == [0.0] * 3


class OfOwnForm(Metric):
    """Gives a tensor as its state."""

    def reset(self) -> None:
        self.number = 0

    def update(self, output: Any) -> None:
        self.number += len(output)

    def compute(self) -> int:
        return self.number

    def state_dict(self) -> Any:
        return torch.tensor([self.number])

    def load_state_dict(self, state_dict: Any) -> None:
        self.number = int(state_dict)


def test_a_state_of_a_form_of_its_own() -> None:
    """The metric knows what to do with it."""
    metric = OfOwnForm()
    load_metric(metric, torch.tensor([4]))
    assert metric.compute() == 4
