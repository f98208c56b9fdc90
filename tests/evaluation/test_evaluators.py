"""Any engine of Ignite is an evaluator, and what is attached to an evaluator comes back when the run resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint as IgniteCheckpoint
from ignite.handlers import DiskSaver, EarlyStopping, global_step_from_engine
from ignite.metrics import Loss, MeanSquaredError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cuts
from ignite_train import Trainer, create_evaluator, create_trainer
from ignite_train.checkpoint import find
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.handlers import Checkpoint, JsonLines, ProgressLog, TensorBoard, Validation
from ranks import run_ranks

DATA = cuts.cut(cuts.samples(), [16, 16])
SCORES = [5.0, 3.0, 4.0, 2.0, 2.5, 2.6, 2.7, 2.8, 1.0, 1.0]  # of epochs 1, 2, ...; with patience 3 the run stops after 7


def pair(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, y, _ = batch
    return x, y.unsqueeze(1)


def make_ours(model: nn.Module) -> Engine:
    return create_evaluator(model, cuts.forward)


def make_stock(model: nn.Module) -> Engine:
    """Ignite's evaluator, of the same data."""

    def step(engine: Engine, batch: Any) -> Any:
        with torch.no_grad():
            x, y = pair(batch)
            return model(x), y

    return Engine(step)


EVALUATORS: dict[str, Callable[[nn.Module], Engine]] = {"ours": make_ours, "stock": make_stock}


def make_trainer() -> tuple[Trainer, nn.Module]:
    model = cuts.linear()
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), cuts.forward), model


def scored(evaluator: Engine, trainer: Trainer) -> None:
    """Has the evaluator publish the scores of the list, in place of what it finds."""

    def publish(engine: Engine) -> None:
        engine.state.metrics["score"] = SCORES[trainer.state.epoch - 1]

    evaluator.add_event_handler(Events.EPOCH_COMPLETED, publish)


def test_a_stock_evaluator_is_validated_logged_and_the_best_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metrics of Ignite's evaluator are in the validation, the log file, TensorBoard and on the lines; the best is kept."""
    trainer, model = make_trainer()
    evaluator = create_supervised_evaluator(
        model,
        {"mse": MeanSquaredError(), "half": Loss(lambda y_pred, y: nn.functional.mse_loss(y_pred, y) / 2)},
        prepare_batch=lambda batch, **_: pair(batch),
    )
    for handler in (ProgressLog("json"), JsonLines(tmp_path / "log.jsonl"), TensorBoard(tmp_path / "points")):
        handler.attach(trainer, Events.ITERATION_COMPLETED(every=2), evaluator=evaluator)
    validation = Validation(evaluator, DATA, score="mse")
    validation.attach(trainer)
    checkpoint = Checkpoint(tmp_path / "run", score="mse", every=100)
    checkpoint.attach(trainer, evaluator=evaluator)
    means: list[float] = []

    @trainer.on(Events.EPOCH_COMPLETED)
    def expect() -> None:
        with torch.no_grad():
            errors = [(model(x) - y).square() for x, y in map(pair, DATA)]
        means.append(float(torch.cat(errors).mean()))

    modes: list[bool] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: modes.append(model.training))
    trainer.run(DATA, max_epochs=3)

    assert validation.best == pytest.approx(min(means), rel=1e-6)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["validation/mse"] for line in lines if "validation/mse" in line] == pytest.approx(means, rel=1e-6)
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["validation/half"] for line in logged if "validation/half" in line] == pytest.approx(
        [mean / 2 for mean in means], rel=1e-6
    )
    points = EventAccumulator(str(tmp_path / "points")).Reload()
    assert [point.value for point in points.Scalars("validation/mse")] == pytest.approx(means, rel=1e-6)
    assert min(scores(tmp_path / "run").values()) == pytest.approx(min(means), rel=1e-6)
    assert modes == [True] * 6  # although Ignite's evaluator leaves the model in eval mode


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", sorted(EVALUATORS))
def test_the_best_is_seen_wherever_the_metric_is_published(tmp_path: Path, kind: str, when: str) -> None:
    """A handler of COMPLETED that publishes the score may be attached before or after `Checkpoint`."""
    trainer, model = make_trainer()
    evaluator = EVALUATORS[kind](model)
    checkpoint = Checkpoint(tmp_path, score="late", mode="min", every=100, keep_best=99)

    def publish(engine: Engine) -> None:
        engine.state.metrics["late"] = SCORES[trainer.state.epoch - 1]

    if when == "after":
        checkpoint.attach(trainer, evaluator=evaluator)
    evaluator.add_event_handler(Events.COMPLETED, publish)
    if when == "before":
        checkpoint.attach(trainer, evaluator=evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(DATA))
    trainer.run(DATA, max_epochs=3)
    trainer.run(DATA, max_epochs=4)
    assert {2: 5.0, 4: 3.0, 8: 2.0}.items() <= scores(tmp_path).items()


def scores(directory: Path) -> dict[int, float]:
    """The scores in the manifests, by update."""
    manifests = [entry.manifest for entry in find(directory) if entry.manifest]
    return {manifest.update: manifest.score for manifest in manifests if manifest.score is not None}


class Run:
    """A run with early stopping and Ignite's checkpoint of the best model on the evaluator, which only `Validation` knows."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.trainer, self.model = make_trainer()
        self.evaluator = EVALUATORS[kind](self.model)
        scored(self.evaluator, self.trainer)
        negative = IgniteCheckpoint.get_default_score_fn("score", -1.0)
        self.stopping = EarlyStopping(patience=3, score_function=negative, trainer=self.trainer)
        self.evaluator.add_event_handler(Events.COMPLETED, self.stopping)
        self.best_model = IgniteCheckpoint(
            {"model": self.model},
            DiskSaver(directory / "best", create_dir=True, require_empty=False),
            n_saved=1,
            score_function=negative,
            score_name="score",
            global_step_transform=global_step_from_engine(self.trainer),
        )
        self.evaluator.add_event_handler(Events.COMPLETED, self.best_model)
        Validation(self.evaluator, DATA, score="score", mode="min").attach(self.trainer)
        Checkpoint(directory / "run").attach(self.trainer)

    def names(self) -> Iterator[str]:
        """The files of the best models."""
        return (path.name for path in Path(self.best_model.save_handler.dirname).iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("cut", [3, 5, 6])
@pytest.mark.parametrize("kind", sorted(EVALUATORS))
def test_what_is_on_the_evaluator_comes_back(tmp_path: Path, kind: str, cut: int) -> None:
    """Cut after any epoch and started again, the run stops at the epoch of one that was not cut, with the same best model."""
    whole = Run(tmp_path / "whole", kind)
    whole.trainer.run(DATA, max_epochs=10)
    assert whole.trainer.state.epoch == 7

    first = Run(tmp_path / "cut", kind)
    first.trainer.run(DATA, max_epochs=cut)
    second = Run(tmp_path / "cut", kind)
    second.trainer.run(DATA, max_epochs=10)
    assert second.trainer.state.epoch == 7
    assert second.stopping.counter == whole.stopping.counter == 3
    assert sorted(second.names()) == sorted(whole.names()) == ["model_4_score=-2.0000.pt"]


class Unstorable:
    """Of no type that a checkpoint can hold."""


@pytest.mark.parametrize("known_to", ["validation", "checkpoint"])
@pytest.mark.parametrize("kind", sorted(EVALUATORS))
def test_published_metrics_come_back_where_there_is_nothing_to_do(tmp_path: Path, kind: str, known_to: str) -> None:
    """The evaluator has its values again: numbers, matrices and words; what cannot be stored is left out."""
    matrix, published = torch.eye(2), {"score": 0.5, "loss": math.nan, "name": "best", "by class": {"a": [1, 2.5]}}
    unstorable = {"figure": Unstorable(), "figures": {"a": Unstorable()}, "by figure": {Unstorable(): 1.0}}

    def start(value: float) -> Engine:
        trainer, model = make_trainer()
        evaluator = EVALUATORS[kind](model)
        more = {**published, "score": value, "matrix": matrix * value, **unstorable}
        evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(more))
        if known_to == "validation":
            Validation(evaluator, DATA, score="score", mode="min").attach(trainer)
            Checkpoint(tmp_path).attach(trainer)
        else:
            trainer.add_evaluation_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(DATA))
            Checkpoint(tmp_path).attach(trainer, evaluator=evaluator)
        trainer.run(DATA, max_epochs=2)
        return evaluator

    saved, again = start(0.5).state.metrics, start(7.0).state.metrics
    assert set(saved) - set(again) == unstorable.keys()
    assert torch.equal(again["matrix"], matrix * 0.5)
    assert {name: again[name] for name in ("score", "name", "by class")} == {k: v for k, v in published.items() if k != "loss"}
    assert math.isnan(again["loss"])


def test_evaluators_have_names_of_their_own(tmp_path: Path) -> None:
    """Two evaluators with handlers of the same class: each state comes back to its own."""
    counters = []
    for epochs in (2, 3):
        trainer, model = make_trainer()
        stops = []
        for patience, evaluator in ((10, make_ours(model)), (20, make_stock(model))):
            scored(evaluator, trainer)
            flat = EarlyStopping(patience, lambda engine, patience=patience: -patience, trainer)
            evaluator.add_event_handler(Events.COMPLETED, flat)
            Validation(evaluator, DATA, score="score", mode="min").attach(trainer)
            stops.append(flat)
        stops[1].counter = 4 if epochs == 2 else 0
        Checkpoint(tmp_path).attach(trainer)
        trainer.run(DATA, max_epochs=epochs)
        counters.append([stop.counter for stop in stops])
    assert counters == [[1, 5], [2, 6]]
    with CheckpointReader(find(tmp_path)[-1].path) as stored:  # names that older checkpoints have too
        assert {"evaluator/EarlyStopping", "evaluator-2/EarlyStopping"} <= {*stored.names()}


@pytest.mark.parametrize("kind", EVALUATORS)
def test_what_others_put_on_the_state_stays(kind: str) -> None:
    """As MONAI's handlers do when they are attached. Counters, metrics and what forward carries begin anew in each run."""
    evaluator, seen = EVALUATORS[kind](cuts.linear()), list[int]()
    state = evaluator.state
    state.metric_details = {"dice": []}
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: engine.state.metric_details["dice"].append(1))
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.iteration))
    metrics = []
    for run in range(2):
        if kind == "ours":
            state.carried["hidden"] = torch.ones(1)
        metrics.append(evaluator.run(DATA).metrics)
        assert evaluator.state is state
        assert len(state.metric_details["dice"]) == run + 1
    assert seen == [1, 2, 1, 2]
    if kind == "ours":
        assert len(state.carried) == 0
        assert metrics[0] == metrics[1]
        assert metrics[0] is not metrics[1], "those of an earlier run stay what they were"


def test_an_error_of_a_stock_evaluator_is_raised() -> None:
    """Its exception ends the run although a progress log is attached, and the next run validates again."""
    trainer, _ = make_trainer()
    fails = [True]

    def step(engine: Engine, batch: Any) -> Any:
        if fails[0]:
            raise RuntimeError("no such file")

    evaluator = Engine(step)
    scored(evaluator, trainer)
    ProgressLog("simple").attach(trainer, evaluator=evaluator)
    validation = Validation(evaluator, DATA, score="score", mode="min")
    validation.attach(trainer)
    with pytest.raises(RuntimeError, match="no such file"):
        trainer.run(DATA, max_epochs=1)
    assert validation.best is None
    fails[0] = False
    trainer.run(DATA, max_epochs=2)
    assert validation.best == SCORES[1]


def test_a_score_is_one_number() -> None:
    """A tensor of one element is a score; a metric that is a matrix is refused in one line."""
    trainer, model = make_trainer()
    evaluator, value = make_stock(model), [torch.tensor(2.5)]
    evaluator.add_event_handler(Events.COMPLETED, lambda engine: engine.state.metrics.update(score=value[0]))
    validation = Validation(evaluator, DATA, score="score", mode="min")
    validation.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert validation.best == 2.5
    value[0] = torch.ones(2, 2)
    with pytest.raises(TypeError, match="score must name a metric that is one number, got 'score', which is"):
        trainer.run(DATA, max_epochs=2)


# --- what an evaluator of ours refuses or warns of ---


def with_outputs(model: nn.Module, batch: Any) -> Any:
    x, y = pair(batch)
    return cuts.forward(model, batch)._replace(outputs=(model(x), y))


@pytest.mark.parametrize(("name", "warns"), [("loss", True), ("samples", True), ("error", False)])
def test_a_metric_with_a_name_of_the_evaluator_is_warned_of(name: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Once; its value is there, as in Ignite."""
    model = cuts.linear()
    evaluator = create_evaluator(model, with_outputs)
    MeanSquaredError().attach(evaluator, name)
    for _ in range(2):
        found = evaluator.run(DATA).metrics[name]
    x, y, _ = cuts.cut(cuts.samples(), [32])[0]
    assert found == pytest.approx(float((model(x).squeeze(1) - y).detach().square().mean()))
    said = f"metric '{name}' (MeanSquaredError) replaces the '{name}' that the evaluator publishes itself"
    assert [message.partition(";")[0] for message in caplog.messages] == [said] * warns


def test_an_evaluation_is_one_pass() -> None:
    """Where Ignite makes two, one would be taken for them."""
    evaluator = create_evaluator(cuts.linear(), cuts.forward)
    with pytest.raises(ValueError, match="max_epochs must be 1, since an evaluation is one pass over data, got 2"):
        evaluator.run(DATA, max_epochs=2)
    assert evaluator.run(DATA, max_epochs=1).iteration == evaluator.run(DATA, None).iteration == 2


class EndsEarly(torch.utils.data.Dataset[float]):
    """100 numbers, of which a `next` without a default finds 70 only."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> float:
        return float(next(iter(range(index, min(index + 1, 70)))))


def test_a_loader_that_ends_before_its_length_is_named() -> None:
    """By a warning, as in training; not where the pass was ended or limited on purpose."""
    evaluator = create_evaluator(nn.Identity(), lambda model, x: (model(x).sum(), len(x)))
    loader = torch.utils.data.DataLoader(EndsEarly(), batch_size=10)

    with pytest.warns(UserWarning, match=r"the loader of the evaluation has len\(\) 10 and gave 7 micro-batches"):
        assert evaluator.run(loader).metrics["loss"] == pytest.approx(34.5)
    evaluator.run(loader, max_iters=7)
    evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: evaluator.terminate_epoch())
    assert evaluator.run(loader).iteration == 5
    evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: evaluator.terminate())
    assert evaluator.run(loader).iteration == 4


def two_evaluations_of_a_sharded_model() -> list[float]:
    torch.manual_seed(0)
    model, mesh = nn.Linear(4, 1), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    fully_shard(model, mesh=mesh)
    evaluator = create_evaluator(model, lambda model, x: (model(x).square().sum(), len(x)), data_dims=("dp",))
    return [evaluator.run([torch.ones(2, 4)]).metrics["loss"] for _ in range(2)]


@pytest.mark.slow
def test_a_sharded_model_is_evaluated_several_times_in_a_row() -> None:
    """The first forward leaves the parameters of the root whole, where they are no DTensors."""
    (first, second), others = run_ranks(two_evaluations_of_a_sharded_model)
    assert first == second > 0
    assert others == [first, second]
