"""Logs that are removed, renamed or replaced while a run writes to them: a warning, and the lines after it are there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cuts
from ignite_train import Trainer, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, Csv, JsonLines, LogFile, TensorBoard, TrainingMetrics
from ignite_train.kinds_of_handlers import RecordingHandler

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches
EVERY = Events.ITERATION_COMPLETED
KINDS: dict[str, Callable[..., RecordingHandler]] = {
    "json": lambda directory, **options: JsonLines(directory / "log.jsonl", **options),
    "csv": lambda directory, **options: Csv(directory / "log.csv", **options),
    "tensorboard": TensorBoard,
}
kinds = pytest.mark.parametrize("kind", KINDS)
files = pytest.mark.parametrize("kind", ["json", "csv"])


def make(directory: Path, kind: str, *, every: int = 1, save: int | None = 2, **options: Any) -> tuple[Trainer, Any]:
    """Logs every `every` updates into `directory/logs`, and saves every `save` updates elsewhere."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    log = KINDS[kind](directory / "logs", **options)
    log.attach(trainer, EVERY(every=every))
    TrainingMetrics().attach(trainer, EVERY(every=every))
    if save is not None:
        Checkpoint(directory / "checkpoints", every=save, asynchronous=False).attach(trainer)
    return trainer, log


def updates(path: Path) -> list[int]:
    """Of all lines or points of the loss in a file of ours, or in the directory of TensorBoard."""
    if not path.exists():
        return []
    if path.is_dir():
        events = EventAccumulator(str(path), {"scalars": 0})
        events.Reload()
        return [point.step for point in events.Scalars("train/loss")] if "train/loss" in events.Tags()["scalars"] else []
    lines = path.read_text().splitlines()
    return [int(line.removeprefix('{"update": ').split(",")[0]) for line in lines if not line.startswith("update,")]


def written(log: Any) -> Path:
    """The one file that the handler writes now."""
    if isinstance(log, LogFile):
        return log.path
    return max(path for path in log.log_dir.iterdir() if path.is_file())


LOSSES: dict[str, Callable[[Any, Path], object]] = {
    "the file is removed": lambda log, _: written(log).unlink(),
    "the file is renamed": lambda log, away: written(log).rename(away),
    "the directory is removed": lambda log, _: shutil.rmtree(written(log).parent),
    "the directory is renamed": lambda log, away: written(log).parent.rename(away),
}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "while this run wrote to it" in line]


@kinds
@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("loss", LOSSES)
def test_lines_after_the_next_save_are_kept(
    tmp_path: Path, kind: str, on_error: Any, loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At the old path, which the one warning names; the run goes on, also if errors are to end it."""
    trainer, log = make(tmp_path, kind, on_error=on_error)
    lost: list[Path] = []

    @trainer.on(Events.ITERATION_STARTED(once=4))
    def lose() -> None:
        lost.append(written(log))
        LOSSES[loss](log, tmp_path / "away")

    assert trainer.run(DATA, max_epochs=1).iteration == 6
    assert updates(log.place) == [5, 6]
    (line,) = warnings_in(caplog)
    assert line.startswith(f"{lost[0]} was removed, renamed or replaced while this run wrote to it (No such file or directory)")


@kinds
def test_a_loss_that_no_save_has_found_is_told_at_the_end(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Before the last lines, which are kept; a second run finds nothing more."""
    trainer, log = make(tmp_path, kind, every=4, save=None)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=6), lambda: shutil.rmtree(written(log).parent))
    trainer.run(DATA, max_epochs=1)
    assert len(warnings_in(caplog)) == 1
    assert updates(log.place) == [6]
    trainer.run(DATA, max_epochs=2)
    assert len(warnings_in(caplog)) == 1
    assert updates(log.place) == [6, 8, 12]


@kinds
def test_a_loss_is_told_when_an_exception_ends_the_run(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The next run writes to the old path."""
    trainer, log = make(tmp_path, kind, save=None)
    failures = [RuntimeError("once")]

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def fail() -> None:
        if failures:
            shutil.rmtree(written(log).parent)
            raise failures.pop()

    with pytest.raises(RuntimeError, match="once"):
        trainer.run(DATA, max_epochs=1)
    assert len(warnings_in(caplog)) == 1
    trainer.run(DATA, max_epochs=1)
    # TensorBoard's file begins with the points of the update after which the run begins.
    assert updates(log.place) == [*range(2 if kind == "tensorboard" else 3, 7)]


@kinds
def test_a_run_that_resumes_after_a_loss_has_each_line_once(tmp_path: Path, kind: str) -> None:
    """Of those that were written after it."""
    trainer, log = make(tmp_path, kind)

    @trainer.on(Events.ITERATION_STARTED)
    def lose() -> None:
        if trainer.state.iteration == 3:
            shutil.rmtree(written(log).parent)
        if trainer.state.iteration == 8:
            raise RuntimeError("the end of a process")

    with pytest.raises(RuntimeError, match="the end"):
        trainer.run(DATA, max_epochs=2)
    trainer, log = make(tmp_path, kind)
    trainer.run(DATA, max_epochs=2)
    assert updates(log.place) == [*range(5, 13)]


@files
def test_a_file_that_takes_the_place_keeps_all_its_lines(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """That of another run, with later updates, or one that an editor has saved: lines are added to it."""
    trainer, log = make(tmp_path, kind)

    @trainer.on(Events.ITERATION_STARTED(once=4))
    def replace() -> None:
        content = log.path.read_text()
        log.path.unlink()
        log.path.write_text(f"{content}# a note\n" + content.splitlines()[-1].replace("3", "900", 1) + "\n")

    trainer.run(DATA, max_epochs=1)
    lines = [line for line in log.path.read_text().splitlines() if line != "# a note"]
    log.path.write_text("\n".join(lines))
    assert updates(log.path) == [1, 2, 3, 900, 5, 6]
    (line,) = warnings_in(caplog)
    assert line.startswith(f"{log.path} was removed, renamed or replaced while this run wrote to it (another file is there)")


def test_a_table_that_was_replaced_gets_a_column_without_losing_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file at the path is the one that is widened, and not the one that was open."""
    trainer, log = make(tmp_path, "csv", save=None)

    @trainer.on(Events.ITERATION_STARTED(once=4))
    def replace() -> None:
        header, *lines = log.path.read_text().splitlines()
        log.path.unlink()
        log.path.write_text("\n".join([f"{header},mine", "# a note", *(f"{line},0.5" for line in lines), ""]))
        trainer.state.metrics["late"] = 1.0

    trainer.prepend_event_handler(EVERY(once=4), lambda: trainer.state.metrics.update(late=1.0))
    trainer.run(DATA, max_iters=4)
    header, note, *lines = log.path.read_text().splitlines()
    assert header.endswith(",mine,train/late")
    assert note == "# a note"
    assert [line.split(",")[0] for line in lines] == ["1", "2", "3", "4"]
    assert [line.split(",")[-2:] for line in lines] == [["0.5", ""]] * 3 + [["", "1.0"]]
    assert len(warnings_in(caplog)) == 1


def test_what_tensorboard_needs_once_is_there_after_a_loss(tmp_path: Path) -> None:
    """The description of the run, and the charts of training and validation."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    evaluator, log = create_evaluator(model, cuts.forward), TensorBoard(tmp_path / "logs")
    log.attach(trainer, EVERY(every=1), evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(every=1))
    trainer.add_event_handler(EVERY(every=1), lambda: evaluator.run(DATA))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: shutil.rmtree(log.log_dir))
    trainer.append_event_handler(EVERY(once=3), lambda: log.state_dict())
    trainer.run(DATA, max_iters=4)
    events = EventAccumulator(str(log.log_dir), {"tensors": 0})
    events.Reload()
    assert {"config/text_summary", "environment/text_summary", "custom_scalars__config__"} <= {*events.Tags()["tensors"]}


@kinds
def test_a_log_that_stays_is_not_warned_of(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Through saves, runs, and an own table that takes the place of the one before; also behind a link."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "disk")
    trainer, log = make(tmp_path, kind)
    trainer.prepend_event_handler(EVERY(once=3), lambda: trainer.state.metrics.update(late=1.0))
    trainer.run(DATA, max_epochs=1)
    trainer.run(DATA, max_epochs=2)
    assert warnings_in(caplog) == []
    assert updates(log.place) == [*range(1, 13)]


@files
def test_a_script_may_move_its_logs_when_the_run_is_over(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing comes after the last line, which is in the file that was moved."""
    trainer, log = make(tmp_path, kind)
    trainer.add_event_handler(Events.COMPLETED, lambda: log.path.rename(tmp_path / "moved"))
    trainer.run(DATA, max_epochs=1)
    assert warnings_in(caplog) == []
    assert updates(tmp_path / "moved") == [*range(1, 7)]


@kinds
def test_a_file_system_may_give_one_file_several_numbers(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As some that are mounted over a network: the size tells that it is the same file."""
    monkeypatch.setattr("os.path.samestat", lambda one, other: False)
    trainer, log = make(tmp_path, kind)
    trainer.run(DATA, max_epochs=2)
    assert warnings_in(caplog) == []
    assert updates(log.path if isinstance(log, LogFile) else log.log_dir) == [*range(1, 13)]


@kinds
def test_a_log_that_is_attached_inside_a_session_continues_after_a_resume(tmp_path: Path, kind: str) -> None:
    """The file has the lines of the earlier process, and then the lines of this process."""
    for last in (3, 6):
        model = cuts.linear()
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
        TrainingMetrics().attach(trainer, EVERY(every=1))
        Checkpoint(tmp_path / "checkpoints", every=1).attach(trainer)
        with trainer.session(max_iters=last):
            log = KINDS[kind](tmp_path / "logs")
            log.attach(trainer, EVERY(every=1))
            while trainer.state.iteration < last:
                trainer.update([DATA[0]])
    assert sorted({*updates(tmp_path / "logs" if kind == "tensorboard" else written(log))}) == [1, 2, 3, 4, 5, 6]
