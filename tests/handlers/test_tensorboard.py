"""What TensorBoard shows of a run: groups, charts and texts; every point once, whatever happens to the process."""

from __future__ import annotations

import errno
import io
import math
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEvents
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import text

import cuts
from ignite_train import Evaluator, ForwardOutput, Trainer, TrainEvents, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, TensorBoard, TrainingMetrics, Validation
from ignite_train.kinds_of_handlers.event_file import EventFile, is_finished
from ignite_train.metrics import TIMED_METRICS
from ranks import run_ranks

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches
EVERY = Events.ITERATION_COMPLETED


def make() -> tuple[Trainer, Evaluator]:
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    evaluator = create_evaluator(model, cuts.forward)
    Validation(evaluator, DATA).attach(trainer)
    return trainer, evaluator


def load(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory), {"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def steps(events: EventAccumulator, tag: str) -> list[int]:
    return [point.step for point in events.Scalars(tag)]


def test_points_have_groups(tmp_path: Path) -> None:
    """Every scalar is written once, at the number of its update; what is the user's own is beside the loss."""
    trainer, evaluator = make()
    expected: list[float] = []
    TensorBoard(tmp_path).attach(trainer, EVERY(every=2), evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(every=2))
    trainer.add_event_handler(EVERY(every=2), lambda: expected.append(trainer.state.metrics["loss"]))
    trainer.run(DATA, max_epochs=2)
    events = load(tmp_path)
    assert steps(events, "train/loss") == [2, 4, 6, 8, 10, 12]
    assert [point.value for point in events.Scalars("train/loss")] == pytest.approx(expected, rel=1e-6)
    assert steps(events, "validation/loss") == [6, 12]
    tags = {*events.Tags()["scalars"]}
    assert {tag.partition("/")[0] for tag in tags} == {"train", "validation"}
    assert {"train/samples", "train/optimizer/learning_rate", "train/speed/data_wait", "validation/samples"} <= tags
    assert not {tag.split("/")[1] for tag in tags if tag.count("/") > 1} - {"optimizer", "speed"}


def test_the_loss_comes_first(tmp_path: Path) -> None:
    """TensorBoard sorts sections and cards by name, and opens the first two sections: the training's and the validation's."""
    trainer, evaluator = make()
    TensorBoard(tmp_path, histograms=2).attach(trainer, EVERY(every=2), evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(every=2))
    trainer.run(DATA, max_epochs=1)
    tags = load(tmp_path).Tags()
    names = sorted([*tags["scalars"], *tags["histograms"]])
    assert names[0] == "train/loss"
    sections = list(dict.fromkeys(name.partition("/")[0] for name in names))
    assert sections[:2] == ["train", "validation"]
    assert {*sections[2:]} == {"weights", "weights.gradients", "weights.updates"}


def events_of(directory: Path) -> list[Event]:
    """All events in the one file of a directory, of which TensorBoard checks the checksums."""
    (path,) = directory.glob("events.out.tfevents.*")
    return [Event.FromString(record) for record in RawEventFileLoader(str(path)).Load()]


def event_in(record: bytes) -> Event:
    """What stands between the length and the checksum."""
    return Event.FromString(bytes(record[12:-4]))


def test_points_of_one_update_are_one_event(tmp_path: Path) -> None:
    """Those of the training; an evaluation adds one of its own."""
    trainer, evaluator = make()
    TensorBoard(tmp_path).attach(trainer, EVERY(every=3), evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(every=3))
    trainer.run(DATA, max_epochs=1)
    written = [
        (event.step, len(event.summary.value))
        for event in events_of(tmp_path)
        if event.summary.value and event.summary.value[0].WhichOneof("value") == "simple_value"
    ]
    assert [update for update, _ in written] == [3, 6, 6]
    assert written[0][1] > 15
    assert written[2][1] == 2


@pytest.mark.parametrize("number", [1, 24, 300], ids=["one", "24", "300"])
def test_records_of_many_numbers(tmp_path: Path, number: int) -> None:
    """Updates of any number of digits, and tags that come and go."""
    file, expected = EventFile(tmp_path, 0), []
    for index, update in enumerate([0, 1, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21, 2**40]):
        for tags in range(number, number + 4):
            numbers = {f"train/{tag}": (-1.5) ** (tag % 60) + index for tag in range(tags)}
            file.add_numbers(numbers, update)
            expected.append((update, {tag: float(np.float32(value)) for tag, value in numbers.items()}))
    file.close()
    _, _, *events = events_of(tmp_path)
    assert [(event.step, {value.tag: value.simple_value for value in event.summary.value}) for event in events] == expected


def test_an_event_file_is_what_torch_writes(tmp_path: Path) -> None:
    """Event by event, but for the time and the name of the writer: numbers of any kind, other tags, summaries."""
    rows = [{"train/loss": 0.1, "b": float("nan")}, {"train/loss": 1e300, "b": -0.0}, {"b": 7.0}, {"train/loss": 2.0, "b": 3.0}]
    ours, torchs = EventFile(tmp_path / "ours", 3), SummaryWriter(str(tmp_path / "torch"), purge_step=3)
    for update, row in enumerate(rows, start=2**20):
        ours.add_numbers(row, update)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in row.items()]
        torchs.file_writer.add_summary(Summary(value=values), update)  # type: ignore[union-attr]
    ours.add(text("note", "hello" * 2000), 5)  # type: ignore[no-untyped-call]
    torchs.add_text("note", "hello" * 2000, 5)
    torchs.close()
    found, expected = (events_of(tmp_path / name) for name in ("ours", "torch"))
    assert found[0].file_version == expected[0].file_version
    assert [str(event.session_log) for event in found if event.HasField("session_log")] == ["status: START\n"]
    assert [event.step for event in found if event.HasField("session_log")] == [3]
    shown = [
        [(event.step, event.summary.SerializeToString()) for event in events if event.summary.value]
        for events in (found, expected)
    ]
    assert shown[0] == shown[1]
    assert len(shown[0]) == 5
    assert all(abs(event.wall_time - time.time()) < 600 for event in found)


def test_training_and_validation_are_in_one_chart(tmp_path: Path) -> None:
    """The layout of the tab "custom scalars" is written once, with every evaluator."""
    trainer, evaluator = make()
    second = create_evaluator(evaluator.model, cuts.forward)
    tensorboard = TensorBoard(tmp_path)
    tensorboard.attach(trainer, EVERY(every=2), evaluator=evaluator)
    tensorboard.attach(trainer, EVERY(every=2), evaluator=second, tag="averaged")
    Validation(second, DATA).attach(trainer)
    TrainingMetrics().attach(trainer, EVERY(every=2))
    trainer.run(DATA, max_epochs=2)
    events = load(tmp_path)
    (found,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(make_ndarray(found.tensor_proto).item())
    charts = {chart.title: [*chart.multiline.tag] for category in layout.category for chart in category.chart}
    assert charts["loss"] == ["^train/loss$", "^validation/loss$", "^averaged/loss$"]
    assert steps(events, "train/loss") == [2, 4, 6, 8, 10, 12], "a second attach adds the evaluator only"
    assert steps(events, "averaged/loss") == [6, 12]


def test_the_run_is_described(tmp_path: Path) -> None:
    """Hyper-parameters, how the trainer was made, versions: as text, and in the tab "hparams"."""
    trainer, evaluator = make()
    config = {"width": 8, "optimizer": {"name": "sgd", "betas": (0.9, 0.95)}, "note": None}
    TensorBoard(tmp_path, config=config).attach(trainer, EVERY(every=2), evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(every=2))
    trainer.run(DATA, max_epochs=1)
    events = load(tmp_path)
    (text,) = events.Tensors("config/text_summary")
    shown = make_ndarray(text.tensor_proto).item().decode()
    for line in ("| width | `8` |", "| optimizer.name | `sgd` |", "| optimizer.betas | `(0.9, 0.95)` |", "trainer.precision"):
        assert line in shown
    (text,) = events.Tensors("environment/text_summary")
    assert f"| torch | `{torch.__version__}` |" in make_ndarray(text.tensor_proto).item().decode()
    metadata = events.summary_metadata["_hparams_/session_start_info"].plugin_data
    assert metadata.plugin_name == "hparams"
    for name in (b"optimizer.name", b"trainer.precision", b"environment.torch"):
        assert name in metadata.content


def test_the_end_of_the_run_is_there(tmp_path: Path) -> None:
    """What is left of the last interval is written when the run is over, and nothing is written twice."""
    trainer, _ = make()
    TensorBoard(tmp_path).attach(trainer, EVERY(every=2))
    TrainingMetrics().attach(trainer, EVERY(every=2))
    trainer.run(DATA, max_iters=5)
    assert steps(load(tmp_path), "train/loss") == [2, 4, 5]


# --- histograms and samples ---


def test_histograms_are_those_of_the_update(tmp_path: Path) -> None:
    """Weights after the update, the mean gradient before clipping, and the change between them; in the updates asked for."""
    trainer, _ = make()
    model: Any = trainer.model
    expected: list[dict[str, torch.Tensor]] = []

    @trainer.on(TrainEvents.GRADIENTS_READY(every=3))
    def before(trainer: Trainer) -> None:
        expected.append({"weights.gradients": trainer.gradients()["weight"], "before": model.weight.detach().clone()})

    @trainer.on(EVERY(every=3))
    def after() -> None:
        expected[-1]["weights"] = model.weight.detach().clone()
        expected[-1]["weights.updates"] = expected[-1]["weights"] - expected[-1].pop("before")

    TensorBoard(tmp_path, histograms=3).attach(trainer, EVERY(every=2))
    trainer.run(DATA, max_epochs=1)
    events = EventAccumulator(str(tmp_path), {"histograms": 0})
    events.Reload()
    for group in ("weights", "weights.gradients", "weights.updates"):
        found = events.Histograms(f"{group}/weight")
        assert [point.step for point in found] == [3, 6]
        for point, tensors in zip(found, expected, strict=True):
            shown, values = point.histogram_value, tensors[group].double()
            numbers = (values.numel(), values.min().item(), values.max().item(), values.sum().item())
            assert (shown.num, shown.min, shown.max, shown.sum) == pytest.approx(numbers, rel=1e-5, abs=1e-7)
            assert sum(shown.bucket) == values.numel()
    assert {tag.partition("/")[2] for tag in events.Tags()["histograms"]} == {"weight", "bias"}


def test_histograms_of_sparse_gradients_are_those_of_dense_ones(tmp_path: Path) -> None:
    """Rows that no micro-batch looks up are zeros."""
    shown = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Embedding(6, 2, sparse=sparse)
        trainer = create_trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda model, rows: ForwardOutput(model(rows).square().sum(), len(rows)),
            accumulation_steps=2,
        )
        TensorBoard(tmp_path / str(sparse), histograms=1).attach(trainer)
        trainer.run([torch.tensor([0, 2, 2]), torch.tensor([2, 5])])
        events = EventAccumulator(str(tmp_path / str(sparse)), {"histograms": 0})
        events.Reload()
        (point,) = events.Histograms("weights.gradients/weight")
        shown.append(point.histogram_value)
    assert shown[0] == shown[1]
    assert shown[0].num == 12


def test_histograms_of_a_mean_loss_and_of_an_update_without_samples(tmp_path: Path) -> None:
    """A bare loss counts as one sample; without a sample nothing moves."""

    def forward(model: torch.nn.Module, micro_batch: cuts.Sample, state: Any) -> Any:
        output = cuts.forward(model, micro_batch)
        return ForwardOutput(output.loss * 0.0, 0) if state.iteration == 2 else output.loss / output.sample_size

    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward)
    TensorBoard(tmp_path, histograms=1).attach(trainer)
    trainer.run(DATA[:4], max_epochs=1)
    found = others(tmp_path)
    assert found["weights/weight"] == [1, 2, 3, 4]
    assert found["weights.gradients/weight"] == found["weights.updates/weight"] == [1, 3, 4]


@pytest.mark.parametrize(("histograms", "expected"), [(None, []), (3, [3, 6])])
def test_without_histograms_nothing_stands_before_the_step(tmp_path: Path, histograms: Any, expected: list[int]) -> None:
    """A handler of GRADIENTS_READY would keep an accelerator from queueing it."""
    trainer, found = make()[0], []
    TensorBoard(tmp_path, histograms=histograms).attach(trainer)
    listens = lambda: trainer.has_handlers(TrainEvents.GRADIENTS_READY)  # noqa: E731
    trainer.add_event_handler(
        TrainEvents.BACKWARD_COMPLETED, lambda: found.extend([trainer.state.iteration] if listens() else [])
    )
    trainer.run(DATA, max_epochs=1)
    assert sorted(set(found)) == expected
    assert not listens()


def test_a_histogram_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    """And the run continues."""
    trainer, _ = make()
    model: Any = trainer.model

    @trainer.on(EVERY(once=6))  # before the histogram is made
    def spoil() -> None:
        with torch.no_grad():
            model.weight[0, 0] = math.nan
            model.bias.fill_(math.inf)

    TensorBoard(tmp_path, histograms=6).attach(trainer)
    trainer.run(DATA, max_epochs=1)
    events = EventAccumulator(str(tmp_path), {"histograms": 0})
    events.Reload()
    assert events.Histograms("weights/weight")[0].histogram_value.num == model.weight.numel() - 1
    assert "weights/bias" not in events.Tags()["histograms"]


def test_samples_are_shown(tmp_path: Path) -> None:
    """Texts and images, at the update of their event."""
    trainer, _ = make()
    tensorboard = TensorBoard(tmp_path)
    tensorboard.attach(trainer, EVERY(every=2))
    picture, colours = torch.arange(64.0).view(1, 8, 8) / 64, torch.arange(192.0).view(3, 8, 8) / 192
    samples = {"samples/text": "once upon a time", "samples/digit": picture, "samples/colours": colours}
    tensorboard.show(trainer, lambda: samples, EVERY(every=4) | Events.COMPLETED)
    trainer.run(DATA, max_epochs=2)
    events = EventAccumulator(str(tmp_path), {"tensors": 0, "images": 0})
    events.Reload()
    texts = events.Tensors("samples/text/text_summary")
    assert [text.step for text in texts] == [4, 8, 12]
    assert make_ndarray(texts[0].tensor_proto).item() == b"once upon a time"
    for name, sample, mode in (("digit", picture[0], "L"), ("colours", colours.movedim(0, 2), "RGB")):
        (image, *_) = events.Images(f"samples/{name}")
        assert (image.step, image.width, image.height) == (4, 8, 8)
        pixels = torch.from_numpy(np.asarray(Image.open(io.BytesIO(image.encoded_image_string)).convert(mode)).copy())
        assert torch.equal(pixels, (sample * 255).to(torch.uint8))


@pytest.mark.parametrize("sample", [3, torch.zeros(8, 8), torch.zeros(2, 8, 8)], ids=["number", "matrix", "channels"])
def test_a_sample_is_a_text_or_an_image(tmp_path: Path, sample: Any) -> None:
    """One line says what it is instead."""
    trainer, _ = make()
    TensorBoard(tmp_path).show(trainer, lambda: {"mine": sample}, EVERY)
    with pytest.raises(TypeError, match=r"samples must give texts, or images .*'mine'"):
        trainer.run(DATA, max_epochs=1)


def of_a_rank(directory: Path) -> list[int]:
    """A sample needs a collective of all ranks."""
    model, called = cuts.linear(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, cuts.forward, options=UpdateOptions(reduction="explicit"))

    def sample() -> dict[str, str]:
        called.append(trainer.state.iteration)
        total = torch.ones(())
        torch.distributed.all_reduce(total)
        return {"ranks": f"{total:.0f}"}

    tensorboard = TensorBoard(directory)
    tensorboard.attach(trainer)
    tensorboard.show(trainer, sample, EVERY(every=3))
    trainer.run(DATA, max_epochs=1)
    return called


@pytest.mark.slow
def test_samples_are_made_on_all_ranks(tmp_path: Path) -> None:
    """And written by the first alone."""
    assert run_ranks(of_a_rank, tmp_path) == [[3, 6], [3, 6]]
    (text, _) = load(tmp_path).Tensors("ranks/text_summary")
    assert make_ndarray(text.tensor_proto).item() == b"2"
    assert len([*tmp_path.iterdir()]) == 1


# --- resumption ---


class Killed(BaseException):
    """Stands for the end of a process."""


def shown(directory: Path) -> dict[str, Any]:
    """All that TensorBoard shows, but for values that depend on the clock."""
    events = load(directory)
    tags = [tag for tag in events.Tags()["scalars"] if tag.rpartition("/")[2] not in TIMED_METRICS]
    points: dict[str, Any] = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}
    return points | others(directory)


def others(directory: Path) -> dict[str, Any]:
    """The updates of texts, images, histograms and charts, as TensorBoard itself reads them."""
    events = PluginEvents(str(directory), {"tensors": 0})
    events.Reload()
    scalars = {*load(directory).Tags()["scalars"]}
    found = {tag: [tensor.step for tensor in events.Tensors(tag)] for tag in {*events.Tags()["tensors"]} - scalars}
    found["custom_scalars__config__"] = found.get("custom_scalars__config__", [])[:1]  # TensorBoard looks at the first
    return found


def train(directory: Path, *, every: int, killed_at: Any = None) -> None:
    """Two epochs of six updates with points at every update and after each epoch; flushes what it wrote when it is killed."""
    trainer, evaluator = make()
    tensorboard = TensorBoard(directory / "points", histograms=2)
    tensorboard.attach(trainer, EVERY(every=1), evaluator=evaluator)
    tensorboard.show(trainer, lambda: {"guess": "cat", "digit": torch.rand(1, 8, 8)}, EVERY(every=3))
    TrainingMetrics().attach(trainer, EVERY(every=1))
    Checkpoint(directory / "checkpoints", every=every, asynchronous=False).attach(trainer)
    if killed_at is not None:

        @trainer.on(killed_at)
        def die() -> None:
            raise Killed

        with pytest.raises(Killed):
            trainer.run(DATA, max_epochs=2)
    else:
        trainer.run(DATA, max_epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "killed_at"),
    [
        (2, Events.ITERATION_STARTED(once=2)),  # no checkpoint yet
        (2, Events.ITERATION_STARTED(once=4)),  # one point after the checkpoint
        (3, Events.EPOCH_COMPLETED(once=1)),  # the checkpoint of update 6 has no validation, the points do
        (4, Events.ITERATION_STARTED(once=8)),
        (6, Events.ITERATION_STARTED(once=7)),
        (6, Events.COMPLETED),
    ],
    ids=["before-a-checkpoint", "after-one", "between-a-checkpoint-and-validation", "second-epoch", "at-one", "at-the-end"],
)
def test_each_point_is_shown_once_when_a_run_resumes(tmp_path: Path, every: int, killed_at: Any) -> None:
    """What was written after the checkpoint and is written again is hidden; what was written before it is there."""
    train(tmp_path / "whole", every=every)
    expected = shown(tmp_path / "whole/points")
    assert [step for step, _ in expected["train/loss"]] == [*range(1, 13)]
    assert [step for step, _ in expected["validation/loss"]] == [6, 12]
    assert expected["digit"] == expected["guess/text_summary"] == [3, 6, 9, 12]
    for tag in ("weights.gradients/weight", "weights/bias", "weights.updates/bias"):
        assert expected[tag] == [2, 4, 6, 8, 10, 12]
    train(tmp_path / "killed", every=every, killed_at=killed_at)
    train(tmp_path / "killed", every=every)
    assert shown(tmp_path / "killed/points") == expected


@pytest.mark.slow
def test_an_evaluation_before_a_run_that_resumes_hides_nothing(tmp_path: Path) -> None:
    """As in a script that evaluates first, or only evaluates: all points are shown, and the evaluation once."""
    for limit in (2, 4, None):
        trainer, evaluator = make()
        TensorBoard(tmp_path / "points").attach(trainer, EVERY(every=1), evaluator=evaluator)
        TrainingMetrics().attach(trainer, EVERY(every=1))
        Checkpoint(tmp_path / "checkpoints", every=2, asynchronous=False).attach(trainer)
        evaluator.run(DATA)
        if limit is not None:
            trainer.run(DATA, max_iters=limit)
        points = shown(tmp_path / "points")
        assert [step for step, _ in points["train/loss"]] == [1, 2, 3, 4][:limit]
        assert [step for step, _ in points["validation/loss"]] == [0]


class _Clock:
    """Stands still."""

    def __init__(self, now: float) -> None:
        self.now = now

    def time(self) -> float:
        return self.now


def own_clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """So that all files are made in the same second."""
    clock = _Clock(1000.25)
    monkeypatch.setattr("ignite_train.kinds_of_handlers.event_file.time", clock)
    return clock


@pytest.mark.parametrize(
    ("newest", "second"),
    [(998, 1000), (999, 1000), (1000, 1001), (4600, 4601)],
    ids=["two seconds ago", "a second ago", "this second", "a clock that was set back by an hour"],
)
def test_a_file_has_a_later_name_than_those_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, newest: int, second: int
) -> None:
    """TensorBoard reads in the order of names, which have whole seconds."""
    own_clock(monkeypatch)
    earlier = [tmp_path / f"events.out.tfevents.{second:010d}.host" for second in (newest, 7)]
    for path in (*earlier, tmp_path / "events.out.tfevents.of-another-form"):
        path.touch()
    trainer, _ = make()
    TensorBoard(tmp_path).attach(trainer, EVERY(every=1))
    TrainingMetrics().attach(trainer, EVERY(every=1))
    trainer.run(DATA, max_iters=1)
    (path,) = (path for path in tmp_path.iterdir() if path.stat().st_size > 0)
    assert path.name.split(".")[3] == f"{second:010d}"
    assert path > max(earlier)


def test_a_clock_that_is_set_back_hides_no_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run of three processes, each of which makes an update of the one before again, on clocks that go back by an hour."""
    clock = own_clock(monkeypatch)
    for number, updates in enumerate((3, 5, 6)):
        trainer, _ = numbered(tmp_path / "elsewhere", number / 4)
        if number:
            trainer.run(DATA, max_iters=2 * number)
        clock.now -= 3600
        TensorBoard(tmp_path / "run").attach(trainer, EVERY(every=1))
        trainer.run(DATA, max_iters=updates)
    assert points(tmp_path / "run") == [(1, 1.0), (2, 2.0), (3, 3.25), (4, 4.25), (5, 5.5), (6, 6.5)]


def numbered(directory: Path, offset: float) -> tuple[Trainer, TensorBoard]:
    """The metric of an update is its number, more by `offset`."""
    trainer, evaluator = make()
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: trainer.state.metrics.update(mine=trainer.state.iteration + offset)
    )
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(mine=offset))
    tensorboard = TensorBoard(directory)
    tensorboard.attach(trainer, EVERY(every=1), evaluator=evaluator)
    evaluator.run(DATA)
    return trainer, tensorboard


def points(directory: Path, tag: str = "train/mine") -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in load(directory).Scalars(tag)]


@pytest.mark.parametrize("updates", [0, 1, 3])
def test_a_handler_that_comes_later_hides_what_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, updates: int
) -> None:
    """The points of an earlier process up to the update after which this one writes stay; those after it are shown once."""
    own_clock(monkeypatch)
    trainer, _ = numbered(tmp_path / "run", 0.0)
    trainer.run(DATA, max_iters=5)
    trainer, _ = numbered(tmp_path / "elsewhere", 0.5)
    if updates:
        trainer.run(DATA, max_iters=updates)
    TensorBoard(tmp_path / "run").attach(trainer, EVERY(every=1))
    trainer.run(DATA, max_iters=6)
    assert points(tmp_path / "run") == [(update, update + 0.5 * (update > updates)) for update in range(1, 7)]
    evaluated = tmp_path / "run" if updates else tmp_path / "run/old.1"
    assert points(evaluated, "validation/mine") == [(0, 0.0)]
    shown = others(tmp_path / "run")
    assert shown["config/text_summary"] == shown["environment/text_summary"] == [0], "once, by either of them"


def test_a_run_from_the_beginning_moves_those_before_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each earlier run stays whole in a directory of its own; what another writer of this process writes stays where it is."""
    own_clock(monkeypatch)
    other = SummaryWriter(str(tmp_path))
    other.add_scalar("other", 1.0)
    other.close()
    (foreign,) = tmp_path.iterdir()
    for start, updates in enumerate([4, 1, 2]):
        trainer, _ = numbered(tmp_path, start / 4)
        trainer.run(DATA, max_iters=updates)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["old.1", "old.2"]
    assert points(tmp_path / "old.1") == [(update, update) for update in range(1, 5)]
    assert points(tmp_path / "old.2") == [(1, 1.25)]
    assert points(tmp_path) == [(1, 1.5), (2, 2.5)]
    assert foreign.exists()


def test_a_file_of_another_writer_may_have_the_name_of_one_elsewhere(tmp_path: Path) -> None:
    """Both count their files, so in one second two directories may have files of one name; it is not moved."""
    ours = EventFile(tmp_path / "ours", hidden_from=1)
    (name,) = [path.name for path in (tmp_path / "ours").iterdir()]
    ours.add_numbers({"loss": 1.0}, 1)
    foreign = tmp_path / "other" / name
    foreign.parent.mkdir()
    foreign.write_bytes((tmp_path / "ours" / name).read_bytes())
    assert is_finished(tmp_path / "ours" / name)
    assert not is_finished(foreign)


def test_a_state_that_is_loaded_after_a_run_hides_what_came_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where a loss spike is answered by going back: the points of each update are those of its second time."""
    own_clock(monkeypatch)
    trainer, _ = make()
    tensorboard, offset, saved = TensorBoard(tmp_path), [0.0], list[Any]()
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: trainer.state.metrics.update(mine=trainer.state.iteration + offset[0])
    )
    tensorboard.attach(trainer, EVERY(every=1))
    trainer.add_event_handler(EVERY(once=4), lambda: saved.extend([trainer.state_dict(), tensorboard.state_dict()]))
    trainer.run(DATA)
    trainer.load_state_dict(saved[0])
    tensorboard.load_state_dict(saved[1])
    offset[0] = 0.5
    trainer.run(DATA, max_epochs=2)
    assert points(tmp_path) == [(update, update + 0.5 * (update > 4)) for update in range(1, 13)]


def test_a_disk_that_was_full_hides_no_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file after a record that was written in part; also those of the update in which that happened."""
    own_clock(monkeypatch)
    trainer, tensorboard = numbered(tmp_path, 0.0)
    trainer.add_event_handler(EVERY(once=3), lambda: full.append(FullDiskError()))
    trainer.add_event_handler(EVERY(once=3), lambda: trainer.state.metrics.update(other=1.0))
    trainer.add_event_handler(EVERY(once=3), lambda: tensorboard(trainer))
    write, full = EventFile._write, list[OSError]()

    def fail(self: Any, record: bytes) -> None:
        if full:
            self._file.write(b"part")  # of a record
            raise full.pop()
        write(self, record)

    monkeypatch.setattr(EventFile, "_write", fail)
    trainer.run(DATA, max_epochs=1)
    assert points(tmp_path) == [(update, float(update)) for update in range(1, 7)]


def test_a_disk_that_is_full_before_the_run_hides_no_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two evaluations before the first update the second one cannot be written."""
    own_clock(monkeypatch)
    trainer, evaluator = make()
    second = create_evaluator(evaluator.model, cuts.forward)
    tensorboard = TensorBoard(tmp_path)
    tensorboard.attach(trainer, EVERY(every=1), evaluator=evaluator)
    tensorboard.attach(trainer, evaluator=second, tag="second")
    TrainingMetrics().attach(trainer, EVERY(every=1))
    evaluator.run(DATA)
    with monkeypatch.context() as patch:
        patch.setattr(EventFile, "_write", FullDiskError.of)
        second.run(DATA)
    trainer.run(DATA, max_epochs=1)
    events = load(tmp_path)
    assert steps(events, "validation/loss") == [0, 6]
    assert steps(events, "train/loss") == [*range(1, 7)]


def test_files_that_cannot_be_looked_for_cost_an_evaluation_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is warned of, and the run is written."""

    def fail(path: Path) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(path))

    trainer, evaluator = make()
    TensorBoard(tmp_path).attach(trainer, EVERY(every=1), evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(every=1))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", fail)
        evaluator.run(DATA)
    trainer.run(DATA, max_iters=2)
    assert len([line for line in caplog.messages if line.startswith("points of update 0 could not be written")]) == 1
    assert steps(load(tmp_path), "train/loss") == [1, 2]


def test_what_is_written_is_there_at_once(tmp_path: Path) -> None:
    """Whatever happens then, since SIGKILL does not wait for a flush; so what was written before a checkpoint is there too."""
    trainer, _ = make()
    TensorBoard(tmp_path).attach(trainer, EVERY(every=1))
    TrainingMetrics().attach(trainer, EVERY(every=1))
    seen: list[list[int]] = []
    trainer.append_event_handler(EVERY, lambda: seen.append(steps(load(tmp_path), "train/loss")))
    trainer.run(DATA, max_epochs=1)
    assert seen == [[*range(1, last + 1)] for last in range(1, 7)]


def test_a_run_that_does_nothing_leaves_no_file(tmp_path: Path) -> None:
    """A finished run that is started again leaves no trace."""
    for _ in range(2):
        train(tmp_path, every=4)
    assert len(list((tmp_path / "points").iterdir())) == 1


def test_another_writer_that_is_installed_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignite's logger prefers tensorboardX where it is there; this handler writes its files itself."""
    monkeypatch.setitem(sys.modules, "tensorboardX", types.ModuleType("tensorboardX"))  # which has no writer
    train(tmp_path, every=4)
    assert "train/loss" in load(tmp_path / "points").Tags()["scalars"]


# --- what goes wrong ---


def test_a_metric_that_is_not_one_number_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It becomes several points, or is left out with one warning; in training and in validation."""
    trainer, evaluator = make()
    TensorBoard(tmp_path).attach(trainer, EVERY(every=2), evaluator=evaluator)
    evaluator.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(recall=torch.tensor([0.5, 0.25]), text="hello")
    )
    trainer.add_event_handler(EVERY, lambda: trainer.state.metrics.update(by_class={"cat": 1.0}, none=None))
    trainer.run(DATA, max_epochs=2)
    events = load(tmp_path)
    assert [point.value for point in events.Scalars("validation/recall/1")] == [0.25, 0.25]
    assert steps(events, "by_class/cat") == [2, 4, 6, 8, 10, 12]
    assert len([line for line in caplog.messages if "left out of the logs" in line]) == 2


def test_two_metrics_of_one_name_are_one_point(tmp_path: Path) -> None:
    """A user's `train/loss` is written where the loss would be: the later of the two, each time."""
    trainer, _ = make()
    TensorBoard(tmp_path).attach(trainer, EVERY(every=2))
    trainer.state.metrics |= {"loss": 1.0, "train/loss": 2.0}
    trainer.run(DATA, max_epochs=1)
    events = load(tmp_path)
    assert steps(events, "train/loss") == [2, 4, 6]
    assert [point.value for point in events.Scalars("train/loss")] == [2.0] * 3


def test_metrics_of_one_name_may_give_place_to_none(tmp_path: Path) -> None:
    """Two of one name, then none that is a number, then others."""
    trainer, _ = make()
    TensorBoard(tmp_path).attach(trainer, EVERY(every=2))
    rows: list[dict[str, Any]] = [{"loss": 1.0, "train/loss": 2.0}, {"note": "text"}, {"loss": 3.0}]

    @trainer.on(Events.ITERATION_STARTED(every=2))
    def publish() -> None:
        trainer.state.metrics.clear()
        trainer.state.metrics |= rows.pop(0)

    trainer.run(DATA, max_epochs=1)
    assert shown(tmp_path)["train/loss"] == [(2, 2.0), (6, 3.0)]


def test_evaluations_without_updates_are_not_collected(tmp_path: Path) -> None:
    """A process that only evaluates, after a run, needs no more memory with each evaluation; the latest is saved."""
    trainer, evaluator = make()
    handler = TensorBoard(tmp_path)
    handler.attach(trainer, EVERY(every=2), evaluator=evaluator)
    for _ in range(5):
        evaluator.run(DATA)
    assert handler.points.keys() == {"validation/loss", "validation/samples"}
    assert handler.state_dict()["points"]["validation/loss"] == evaluator.state.metrics["loss"]


class FullDiskError(OSError):
    """No space left."""

    def __init__(self) -> None:
        super().__init__(errno.ENOSPC, "No space left on device")

    @classmethod
    def of(cls, *_: Any) -> None:
        raise cls


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_error: Any) -> None:
    """Costs the points of one time and says so, or ends the run if asked to."""
    trainer, _ = make()
    TensorBoard(tmp_path, on_error=on_error).attach(trainer, EVERY(every=2))
    TrainingMetrics().attach(trainer, EVERY(every=2))
    write, full = EventFile._write, [FullDiskError()]

    def fail(self: Any, record: bytes) -> None:
        if event_in(record).step == 4 and full:
            self._file.write(b"part")  # of a record
            raise full.pop()
        write(self, record)

    monkeypatch.setattr(EventFile, "_write", fail)
    if on_error == "raise":
        with pytest.raises(FullDiskError) as found:
            trainer.run(DATA, max_epochs=1)
        assert found.value.filename == str(tmp_path)
        return
    trainer.run(DATA, max_epochs=1)
    assert steps(load(tmp_path), "train/loss") == [2, 6]
    assert len([line for line in caplog.messages if "could not be written" in line]) == 1


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("weights.gradients/weight", {"weights.gradients/weight": [4, 6, 8, 10, 12]}),
        ("custom_scalars__config__", {"custom_scalars__config__": [12]}),
        ("environment/text_summary", {"environment/text_summary": [0], "config/text_summary": [0]}),
    ],
    ids=["histograms", "charts", "description"],
)
def test_a_disk_that_is_full_once_costs_what_was_written_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tag: str, expected: dict[str, list[int]]
) -> None:
    """A warning says so; what comes later is shown, and no file is left behind in which there is nothing."""
    own_clock(monkeypatch)
    trainer, evaluator = make()
    TensorBoard(tmp_path, histograms=2).attach(trainer, EVERY(every=1), evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(every=1))
    write, full = EventFile._write, [FullDiskError()]

    def fail(self: Any, record: bytes) -> None:
        if full and any(value.tag == tag for value in event_in(record).summary.value):
            self._file.write(b"part")  # of a record
            raise full.pop()
        write(self, record)

    monkeypatch.setattr(EventFile, "_write", fail)
    trainer.run(DATA, max_epochs=2)
    is_lost = tag == "environment/text_summary"  # with the points that came with it
    assert steps(load(tmp_path), "train/loss") == [*range(1 + is_lost, 13)]
    assert expected.items() <= others(tmp_path).items()
    assert len(list(tmp_path.iterdir())) == 2 - is_lost
    assert len([line for line in caplog.messages if "could not be written" in line]) == 1


def test_a_file_that_cannot_be_begun_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each try would leave one."""
    monkeypatch.setattr(EventFile, "_write", FullDiskError.of)
    with pytest.raises(FullDiskError):
        EventFile(tmp_path, 0)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_disk_that_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It collects no files, for whose names later ones would have to wait; and the next file hides what the first one would."""
    write, full = EventFile._write, range(1, 5)

    def fail(self: Any, record: bytes) -> None:
        if trainer.state.iteration in full:
            raise FullDiskError
        write(self, record)

    for _ in range(2):
        trainer, _ = make()
        TensorBoard(tmp_path).attach(trainer, EVERY(every=1))
        TrainingMetrics().attach(trainer, EVERY(every=1))
        trainer.run(DATA, max_epochs=1)
        monkeypatch.setattr(EventFile, "_write", fail)
    assert steps(load(tmp_path), "train/loss") == [5, 6]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_a_disk_on_which_a_new_file_has_room_and_its_points_have_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such files are not collected either."""
    trainer, _ = make()
    TensorBoard(tmp_path).attach(trainer, EVERY(every=1))
    TrainingMetrics().attach(trainer, EVERY(every=1))
    write = EventFile._write

    def fail(self: Any, record: bytes) -> None:
        if 2 <= trainer.state.iteration < 6 and event_in(record).HasField("summary"):
            raise FullDiskError
        write(self, record)

    monkeypatch.setattr(EventFile, "_write", fail)
    trainer.run(DATA, max_epochs=1)
    assert steps(load(tmp_path), "train/loss") == [1, 6]
    assert len(list(tmp_path.iterdir())) == 2
