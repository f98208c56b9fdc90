"""`state.output` is what Ignite's handlers expect: stock Ignite runs beside it, in float64."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events
from ignite.engine import create_supervised_trainer as stock_trainer
from ignite.handlers import Checkpoint as IgniteCheckpoint
from ignite.handlers import DiskSaver, ProgressBar, TerminateOnNan
from ignite.metrics import RunningAverage
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from ignite_train import TrainEvents, UpdateOptions, UpdateOutput, create_supervised_trainer, create_trainer
from ignite_train.handlers import Checkpoint
from ranks import run_ranks
from tiers import nightly

Pair = tuple[Tensor, Tensor]


def pairs(number: int = 4, size: int = 3) -> list[Pair]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, 2, generator=generator).double(), torch.randn(size, 1, generator=generator).double())
        for _ in range(number)
    ]


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def ours(**arguments: Any) -> Any:
    return create_supervised_trainer(*parts(), mse_loss, **arguments)


def stock(**arguments: Any) -> Engine:
    return stock_trainer(*parts(), mse_loss, **arguments)


def outputs(trainer: Engine, batches: list[Pair]) -> list[Any]:
    seen: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.append(engine.state.output))
    trainer.run(batches, max_epochs=2)
    return seen


# --- create_trainer ---


def test_the_output_is_the_record_by_default(build, micro_batches):
    """In every event from GRADIENTS_READY on, `state.output` and `state.update_output` are one object."""
    trainer = build().trainer
    same: list[bool] = []
    for event in (TrainEvents.GRADIENTS_READY, TrainEvents.STEP_COMPLETED, Events.ITERATION_COMPLETED, Events.COMPLETED):
        trainer.add_event_handler(event, lambda: same.append(trainer.state.output is trainer.state.update_output))
    trainer.run(micro_batches)
    assert same == [True] * (3 * 5 + 1)
    assert trainer.state.output is not None


def test_a_transform_of_the_record(build, micro_batches):
    """It is called once an update, also where a handler sets a learning rate, and its result is there before the step."""
    records: list[Any] = []

    def transform(record: Any) -> dict[str, float]:
        records.append(record)
        return {"loss": record.loss}

    setup = build(output_transform=transform)
    trainer = setup.trainer
    seen: list[Any] = []

    @trainer.on(TrainEvents.GRADIENTS_READY)
    def change() -> None:
        seen.append(trainer.state.output)
        setup.optimizer.param_groups[0]["lr"] *= 0.5

    after = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: after.append((trainer.state.output, trainer.state.update_output))
    )
    trainer.run(micro_batches)
    assert len(records) == len(micro_batches)
    assert seen == [output for output, _ in after] == [{"loss": record.loss} for record in records]
    assert [record.learning_rates for _, record in after] == [(0.1 * 0.5**number,) for number in range(1, 6)]


# --- create_supervised_trainer beside Ignite's ---


def test_the_loss_is_the_default():
    """A float, that of Ignite's own trainer."""
    mine, theirs = outputs(ours(), pairs()), outputs(stock(), pairs())
    assert [type(output) for output in mine] == [float] * 8
    assert mine == pytest.approx(theirs, rel=1e-12)


def test_the_transform_of_ignite():
    """A function that Ignite's trainer takes, with `loss.item()`, gives the same; predictions come without a graph."""

    def transform(x: Tensor, y: Tensor, y_pred: Tensor, loss: Any) -> Any:
        return {"loss": loss.item(), "x": x, "y": y, "y_pred": y_pred.detach().clone()}

    mine, theirs = (outputs(make(output_transform=transform), pairs()) for make in (ours, stock))
    assert len(mine) == len(theirs) == 8
    for my, their in zip(mine, theirs, strict=True):
        assert (type(my["loss"]), my["loss"]) == (float, pytest.approx(their["loss"], rel=1e-12))
        for name in ("x", "y", "y_pred"):
            torch.testing.assert_close(my[name], their[name], rtol=1e-12, atol=1e-12)
    (graphs,) = {y_pred.requires_grad for y_pred in outputs(ours(output_transform=lambda x, y, y_pred, loss: y_pred), pairs())}
    assert not graphs


def test_an_update_of_several_micro_batches():
    """x, y and y_pred are those of the last one, the loss is the mean of all samples."""
    data = pairs(2, size=3)
    data[1] = (data[1][0][:1], data[1][1][:1])
    trainer = ours(gradient_accumulation_steps=2, output_transform=lambda *arguments: arguments)
    trainer.run(data)
    x, y, y_pred, loss = trainer.state.output
    model, _ = parts()
    whole_x, whole_y = (torch.cat(tensors) for tensors in zip(*data, strict=True))
    assert x is data[1][0]
    assert y is data[1][1]
    torch.testing.assert_close(y_pred, model(x).detach(), rtol=0, atol=0)
    assert isinstance(loss, float)
    assert loss == pytest.approx(mse_loss(model(whole_x), whole_y).item(), rel=1e-12)


def test_terminate_on_nan():
    """`TerminateOnNan()` ends the run at the update at which it ends Ignite's."""
    data = pairs()
    data[2] = (data[2][0], data[2][1] * math.nan)
    iterations = []
    for trainer in (ours(options=UpdateOptions(on_nonfinite="skip")), stock()):
        trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
        trainer.run(data, max_epochs=2)
        iterations.append(trainer.state.iteration)
    assert iterations == [3, 3]


def test_running_average():
    """`RunningAverage(output_transform=lambda x: x)` has the values of Ignite's after every update."""
    values = []
    for trainer in (ours(), stock()):
        RunningAverage(output_transform=lambda x: x).attach(trainer, "average")
        seen: list[float] = []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine, seen=seen: seen.append(engine.state.metrics["average"])
        )
        trainer.run(pairs(), max_epochs=2)
        values.append(seen)
    assert len(values[0]) == 8
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_progress_bar(capsys):
    """`ProgressBar().attach(trainer, output_transform=...)` shows what it shows on Ignite's trainer."""
    shown = []
    for trainer in (ours(), stock()):
        ProgressBar(persist=True, ncols=80).attach(trainer, output_transform=lambda loss: {"loss": loss})
        trainer.run(pairs(), max_epochs=1)
        last = capsys.readouterr().err.rpartition("4/4")[2]
        shown.append(last.partition("loss=")[2].split()[0])
    assert shown[0] == shown[1] != ""


@pytest.mark.slow
@pytest.mark.parametrize("transforms", [False, nightly(True)], ids=["default", "transform"])
def test_predictions_are_not_held(transforms):
    """Without a transform no prediction is left when the next micro-batch begins; with one, none after the update."""
    alive: list[weakref.ref[Tensor]] = []

    def watch(y_pred: Tensor) -> Tensor:
        alive.append(weakref.ref(y_pred.untyped_storage()))  # type: ignore[arg-type]
        return y_pred

    transform = {"output_transform": lambda x, y, y_pred, loss: loss} if transforms else {}
    trainer = ours(model_transform=watch, gradient_accumulation_steps=2, **transform)
    before_next: list[int] = []

    def count() -> None:
        gc.collect()
        before_next.append(sum(reference() is not None for reference in alive))

    trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED, count)
    trainer.run(pairs())
    count()
    assert len(alive) == 4
    assert before_next == ([0, 1, 0, 1, 0] if transforms else [0, 0, 0, 0, 0])


def without_data(uneven: str) -> list[Any]:
    model, optimizer = parts()
    trainer = create_supervised_trainer(
        model,
        optimizer,
        mse_loss,
        output_transform=lambda *arguments: arguments,
        gradient_accumulation_steps=2,
        options=UpdateOptions(reduction="explicit", uneven=uneven),  # type: ignore[arg-type]
    )
    seen: list[Any] = []
    data = pairs()

    def note() -> None:
        x, y, y_pred, loss = trainer.state.output
        numbers = [index for index, pair in enumerate(data) if x is pair[0] and y is pair[1]]
        seen.append((numbers, y_pred is not None, loss == trainer.state.update_output.loss))

    trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
    trainer.run(data if idist.get_rank() == 0 else data[:1])
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("uneven", ["all", "replay"])
def test_a_rank_without_data(uneven):
    """It has the loss of all ranks and no micro-batch; a placeholder is none either."""
    first, second = run_ranks(without_data, uneven)
    assert first == [([1], True, True), ([3], True, True)]
    assert second == [([0], True, True), ([], False, True)]


# --- after a resume ---


def supervised_transform(x: Any, y: Any, y_pred: Any, loss: Any) -> Any:
    return float(loss), len(y_pred)


RESUMED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "record": (lambda: create_trainer(*parts(), lambda model, pair: mse_loss(model(pair[0]), pair[1])), lambda record: record),
    "transform": (
        lambda: create_trainer(
            *parts(), lambda model, pair: mse_loss(model(pair[0]), pair[1]), output_transform=lambda record: [record.loss]
        ),
        lambda record: [record.loss],
    ),
    "supervised": (ours, lambda record: record.loss),
    "supervised-transform": (lambda: ours(output_transform=supervised_transform), lambda record: None),
}


@pytest.mark.parametrize("name", RESUMED)
def test_after_a_resume(name, tmp_path: Path):
    """It is made of the record that was saved; None where it needs a micro-batch, until one has run."""
    make, expected = RESUMED[name]
    first = make()
    Checkpoint(tmp_path, every=1).attach(first)
    first.run(pairs(), max_iters=3)
    second = make()
    Checkpoint(tmp_path, every=1).attach(second)
    seen: list[Any] = []
    second.add_event_handler(
        Events.GET_BATCH_STARTED(once=3), lambda: seen.append((second.state.update_output, second.state.output))
    )
    second.run(pairs(), max_iters=4)
    assert len(seen) == 1
    assert seen[0][0] == first.state.update_output
    assert seen[0][1] == expected(first.state.update_output)
    assert second.state.output is not None


def test_a_state_without_a_record_has_no_output(build, micro_batches):
    """`load_state_dict` alone leaves no output of another place in the training."""
    trainer = build().trainer
    saved = trainer.state_dict()
    trainer.run(micro_batches)
    trainer.load_state_dict(saved)
    assert (trainer.state.output, trainer.state.update_output) == (None, None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic(monkeypatch, deterministic):
    """With CUDA a run switches on deterministic algorithms, as Ignite's does when it starts."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *args, **options: calls.append((args, options)))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    trainer = ours(deterministic=deterministic)
    assert calls == []
    trainer.run(pairs())
    assert calls == ([((True,), {"warn_only": True})] if deterministic else [])
    assert torch.backends.cudnn.benchmark is not deterministic


def test_a_record_is_made_of_its_fields():
    """The way of an update makes what the class makes: equal, shown, replaced and pickled alike, and frozen."""
    fields: dict[str, Any] = {"loss": 0.5, "sample_size": 4.0, "grad_norm": 2.0, "learning_rates": (0.1,), "logs": {"a": 1.0}}
    fields |= {"log_weights": {}, "grad_norms": {}, "clip_coefficients": {}, "skipped_reason": "overflow"}
    record, expected = UpdateOutput.from_update(**fields), UpdateOutput(**fields)

    assert record == expected == pickle.loads(pickle.dumps(record)) == copy.deepcopy(record)
    assert (repr(record), asdict(record), record.applied) == (repr(expected), asdict(expected), False)
    assert replace(record, loss=1.0) == replace(expected, loss=1.0) != record
    with pytest.raises(FrozenInstanceError):
        record.loss = 1.0


def test_an_update_gives_each_field_of_its_record():
    """None that the class does not have, and each that has no default of the class itself."""
    model = nn.Linear(2, 1).double()
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), mse_loss)
    trainer.run(pairs())
    record = trainer.state.update_output
    assert record is not None
    assert UpdateOutput(**vars(record)) == record
    assert repr(UpdateOutput(**vars(record))) == repr(record)


def with_ignites_checkpoint(create: Any, directory: Path, *, stop_at: int | None = None, dropout: float = 0.5) -> list[float]:
    """The losses of a script that seeds torch and saves by Ignite's `Checkpoint` every second update, or resumes from that."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(dropout), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create(model, optimizer, mse_loss, deterministic=True)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(float(trainer.state.output)))
    objects = {"model": model, "optimizer": optimizer, "trainer": trainer}
    checkpoint = IgniteCheckpoint(objects, DiskSaver(directory, require_empty=False), n_saved=None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), checkpoint)
    if stop_at is not None:
        (path,) = directory.glob(f"*_{stop_at}.pt")
        IgniteCheckpoint.load_objects(objects, torch.load(path, weights_only=False))
    data = torch.arange(72, dtype=torch.float64).view(24, 3) / 72
    trainer.run(DataLoader([*zip(data, data.sum(1, keepdim=True), strict=True)], 4, shuffle=True), max_epochs=3)
    return losses


@pytest.mark.slow
def test_deterministic_resumes_from_ignites_checkpoint(tmp_path: Path) -> None:
    """At the end of an epoch, with the same batches and dropout as without a break, and as the same script with Ignite."""
    losses = {}
    for name, create in (("stock", stock_trainer), ("ours", create_supervised_trainer)):
        whole = with_ignites_checkpoint(create, tmp_path / name)
        resumed = [with_ignites_checkpoint(create, tmp_path / name, stop_at=stop) for stop in (6, 12)]
        assert resumed == [whole[6:], whole[12:]], name
        losses[name] = whole
    assert losses["ours"] == pytest.approx(losses["stock"], rel=1e-12)  # the mean is taken in another order


@pytest.mark.slow
def test_deterministic_has_the_same_batches_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """What forward draws differs there, until the next epoch."""
    for dropout in (0.0, 0.5):
        directory = tmp_path / str(dropout)
        whole = with_ignites_checkpoint(create_supervised_trainer, directory, dropout=dropout)
        resumed = with_ignites_checkpoint(create_supervised_trainer, directory, stop_at=8, dropout=dropout)
        assert (resumed == whole[8:]) == (dropout == 0.0)


@pytest.mark.slow
def test_deterministic_leaves_the_generators_alone_beside_our_checkpoint(tmp_path: Path) -> None:
    """A run that resumes in the middle of an epoch has the bits of one without a break, whatever the second start seeds."""

    def run(directory: Path, stop_after: int | None, seed: int = 7) -> list[float]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_supervised_trainer(model, optimizer, mse_loss, deterministic=True)
        Checkpoint(directory, every=2).attach(trainer)
        data = torch.arange(72, dtype=torch.float64).view(24, 3) / 72
        loader = DataLoader([*zip(data, data.sum(1, keepdim=True), strict=True)], 4, shuffle=True)
        trainer.run(loader, max_iters=stop_after or 18)
        return model[0].weight.flatten().tolist()

    run(tmp_path / "stopped", 8)
    assert run(tmp_path / "stopped", None, seed=11) == run(tmp_path / "whole", None)
