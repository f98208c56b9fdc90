"""What is published after the line of an update, at the end of an epoch above all, is in the logs and in the terminal too."""

from __future__ import annotations

import csv
import errno
import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cuts
from ignite_train import Trainer, TrainEvents, create_trainer
from ignite_train.handlers import Checkpoint, Csv, JsonLines, ProgressLog, TensorBoard, TrainingMetrics
from ignite_train.kinds_of_handlers import RecordingHandler
from ignite_train.metrics import TIMED_METRICS

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches
EVERY = Events.ITERATION_COMPLETED
Points = list[tuple[int, str, float]]
KINDS = ("json", "csv", "tensorboard")
kinds = pytest.mark.parametrize("kind", KINDS)


class Killed(BaseException):
    """Stands for the end of a process."""


def make(directory: Path, kind: str, **save: Any) -> tuple[Trainer, RecordingHandler]:
    """A trainer with `TrainingMetrics` and a log, which are still to be attached, and one number of the script's an epoch."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.state.metrics.update(epochs=trainer.state.epoch))
    if save:
        Checkpoint(directory / "checkpoints", asynchronous=False, **save).attach(trainer)
    log: Mapping[str, Any] = {"json": JsonLines, "csv": Csv, "tensorboard": TensorBoard}
    return trainer, log[kind](directory / f"log.{kind}")


def attach(trainer: Trainer, log: RecordingHandler, event: Any) -> None:
    TrainingMetrics().attach(trainer, event)
    log.attach(trainer, event)


def points(log: RecordingHandler) -> Points:
    """What the log has: update, name and number, in its order, without what depends on the clock."""
    found: Points
    if isinstance(log, TensorBoard):
        shown = EventAccumulator(str(log.place))
        shown.Reload()
        found = [(one.step, tag, one.value) for tag in shown.Tags()["scalars"] for one in shown.Scalars(tag)]
    else:
        with log.place.open(newline="") as file:
            rows: list[dict[str, Any]] = [*csv.DictReader(file)] if isinstance(log, Csv) else [*map(json.loads, file)]
        assert all(int(row["update"]) for row in rows)
        found = [(int(row["update"]), name, float(value)) for row in rows for name, value in row.items() if value != ""]
    return [point for point in found if point[1].rpartition("/")[2] not in {*TIMED_METRICS, "update", "epoch"}]


def of(log: RecordingHandler, name: str) -> list[tuple[int, float]]:
    return [(update, value) for update, one, value in points(log) if one == name]


@kinds
def test_what_an_epoch_publishes_at_its_end_is_in_the_log_for_the_last_epoch_too(tmp_path: Path, kind: str) -> None:
    """By a handler of the script's; all else of that update is there once."""
    trainer, log = make(tmp_path, kind)
    attach(trainer, log, EVERY(every=6))
    trainer.run(DATA, max_epochs=3)
    assert of(log, "train/epochs") == [(12, 1.0), (18, 2.0), (18, 3.0)]
    assert [update for update, _ in of(log, "train/loss")] == [6, 12, 18]


@kinds
def test_the_loss_of_the_last_epoch_is_in_the_log(tmp_path: Path, kind: str) -> None:
    """Where `TrainingMetrics` publishes at the end of an epoch, which comes after the line of its last update."""
    trainer, log = make(tmp_path, kind)
    log.attach(trainer, EVERY(every=6))
    TrainingMetrics().attach(trainer, Events.EPOCH_COMPLETED)
    expected: list[float] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: expected.append(trainer.state.metrics["loss"]))
    trainer.run(DATA, max_epochs=3)
    found = of(log, "train/loss")
    assert [update for update, _ in found] == [12, 18, 18]
    assert [loss for _, loss in found] == pytest.approx(expected)


@kinds
@pytest.mark.parametrize("event", [EVERY(every=6), EVERY], ids=["every-six", "each"])
def test_a_log_has_no_second_line_where_nothing_differs(tmp_path: Path, kind: str, event: Any) -> None:
    """Also where a number is none, which is unequal to itself."""
    trainer, log = make(tmp_path, kind)
    trainer.add_event_handler(EVERY, lambda: trainer.state.metrics.update(epochs=1, none=torch.tensor(math.nan)))
    attach(trainer, log, event)
    trainer.run(DATA, max_epochs=1)
    found = [(update, name) for update, name, _ in points(log)]
    assert len(found) == len({*found}) > 6


@kinds
def test_events_that_fall_on_one_update_give_it_one_line(tmp_path: Path, kind: str) -> None:
    """Joined as docs/handlers.md says; what came in between is there, and nothing else of the update twice."""
    trainer, log = make(tmp_path, kind)
    attach(trainer, log, EVERY(every=3) | Events.EPOCH_COMPLETED)
    trainer.run(DATA, max_epochs=2)
    assert [update for update, _ in of(log, "train/loss")] == [3, 6, 9, 12]
    assert of(log, "train/epochs") == [(6, 1.0), (9, 1.0), (12, 1.0), (12, 2.0)]


@kinds
def test_what_could_not_be_written_is_written_at_the_next_event(tmp_path: Path, kind: str) -> None:
    """The disk is full at the last update, and has room again at the end of the epoch: all of it is new, and not the change."""
    trainer, log = make(tmp_path, kind)
    attach(trainer, log, EVERY(every=3) | Events.EPOCH_COMPLETED)
    write, failures = log.record, [OSError(errno.ENOSPC, "no space")]

    def record(trainer: Trainer, *arguments: Any, **settings: Any) -> None:
        if trainer.state.iteration == 6 and failures:
            raise failures.pop()
        write(trainer, *arguments, **settings)

    log.record = record  # type: ignore[method-assign]
    trainer.run(DATA, max_epochs=1)
    assert [update for update, _ in of(log, "train/loss")] == [3, 6]


@kinds
@pytest.mark.parametrize("event", [TrainEvents.GRADIENTS_READY(every=3), Events.ITERATION_STARTED(every=3)])
def test_a_line_within_the_last_update_is_not_taken_for_its_own(tmp_path: Path, kind: str, event: Any) -> None:
    """It is of the update before."""
    trainer, log = make(tmp_path, kind)
    attach(trainer, log, event)
    trainer.run(DATA, max_epochs=1)
    assert of(log, "train/loss")[-1] == pytest.approx((6, trainer.state.metrics["loss"]))


@kinds
@pytest.mark.parametrize("killed_at", [Events.EPOCH_COMPLETED(once=2), Events.COMPLETED], ids=["epoch", "end"])
@pytest.mark.parametrize("save", [1, 5])
def test_a_run_that_resumes_has_the_same_points(tmp_path: Path, kind: str, killed_at: Any, save: int) -> None:
    """As one that was not killed, also where it resumes after the first line of its last update."""
    trainer, log = make(tmp_path / "whole", kind)
    attach(trainer, log, EVERY(every=6))
    trainer.run(DATA, max_epochs=2)
    expected = points(log)
    for is_killed in (True, False):
        trainer, log = make(tmp_path / "killed", kind, every=save)
        attach(trainer, log, EVERY(every=6))

        def die() -> None:
            raise Killed

        if is_killed:
            trainer.add_event_handler(killed_at, die)
        with pytest.raises(Killed) if is_killed else nullcontext():
            trainer.run(DATA, max_epochs=2)
    assert points(log) == expected


@kinds
def test_a_run_that_begins_again_writes_what_the_one_before_wrote(tmp_path: Path, kind: str) -> None:
    """Its updates have the same numbers, and its lines lack nothing that is as before, such as the learning rate."""
    trainer, log = make(tmp_path, kind)
    attach(trainer, log, EVERY(every=6))
    beginning = trainer.state_dict()
    trainer.run(DATA, max_epochs=1)
    trainer.load_state_dict(beginning)
    trainer.run(DATA, max_epochs=1)
    assert [update for update, _ in of(log, "optimizer/learning_rate") or of(log, "train/optimizer/learning_rate")] == [6, 6]


@kinds
def test_a_run_that_goes_on_and_a_session_have_their_last_metrics(tmp_path: Path, kind: str) -> None:
    """Each run ends with a line of what came last."""
    trainer, log = make(tmp_path, kind)
    attach(trainer, log, EVERY(every=6))
    trainer.run(DATA, max_epochs=1)
    trainer.run(DATA, max_epochs=2)
    with trainer.session():
        for batch in DATA:
            trainer.update([batch])
        trainer.state.metrics["epochs"] = 7
    assert of(log, "train/epochs") == [(6, 1.0), (12, 1.0), (12, 2.0), (18, 2.0), (18, 7.0)]


@kinds
def test_a_log_refuses_a_state_with_other_numbers(tmp_path: Path, kind: str) -> None:
    trainer, log = make(tmp_path, kind)
    attach(trainer, log, EVERY(every=6))
    trainer.run(DATA, max_epochs=1)
    with pytest.raises(ValueError, match="points"):
        log.load_state_dict({**log.state_dict(), "points": {"loss": "low"}})


@pytest.mark.parametrize("number", [6, 7])
def test_the_terminal_has_what_the_last_epoch_publishes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, number: int
) -> None:
    """In a line of the last update, if there is something new of the script's."""
    trainer, _ = make(tmp_path, "json")
    ProgressLog("simple").attach(trainer, EVERY(every=number))
    trainer.run(DATA, max_epochs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert "update 12/12" in lines[-1]
    assert "epochs 2" in lines[-1]


def test_the_terminal_has_no_line_where_a_run_makes_no_update(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As one that resumes where it has ended."""
    for _ in range(2):
        trainer, _ = make(tmp_path, "json", every=6)
        ProgressLog("simple").attach(trainer, EVERY(every=6))
        trainer.run(DATA, max_epochs=1)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert trainer.state.metrics["epochs"] == 1
    assert lines == []


@pytest.mark.parametrize("style", ["simple", "json"])
def test_the_terminal_shows_nothing_twice(capsys: pytest.CaptureFixture[str], tmp_path: Path, style: Any) -> None:
    """Where two events fall on one update, and at the end."""
    trainer, _ = make(tmp_path, "json")
    trainer.add_event_handler(EVERY, lambda: trainer.state.metrics.update(epochs=1))
    event = EVERY(every=3) | Events.EPOCH_COMPLETED
    TrainingMetrics().attach(trainer, event)
    ProgressLog(style).attach(trainer, event)
    trainer.run(DATA, max_epochs=1)
    assert capsys.readouterr().out.count("loss") == 2
