"""A relative path of a handler is the one that it was where the handler was made, wherever the script goes then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ignite.engine import Events

import cuts
from ignite_train import Trainer, attach_defaults, create_trainer
from ignite_train.handlers import Checkpoint, Csv, HangWatch, JsonLines, Profiler, ProgressLog, TensorBoard, TrainingMetrics

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches
EVERY = Events.ITERATION_COMPLETED(every=1)
MAKERS: dict[str, Callable[[Trainer], object]] = {
    "json": lambda trainer: JsonLines("logs/log.jsonl").attach(trainer, EVERY),
    "csv": lambda trainer: Csv("logs/log.csv").attach(trainer, EVERY),
    "tensorboard": lambda trainer: TensorBoard("logs").attach(trainer, EVERY),
    "profiler": lambda trainer: Profiler("logs", updates=range(4, 5)).attach(trainer),
    "checkpoint": lambda trainer: Checkpoint("logs", every=2, asynchronous=False).attach(trainer),
    "defaults": lambda trainer: attach_defaults(trainer, directory="logs", leave_out=("training_metrics",)),
}


def make() -> Trainer:
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    TrainingMetrics().attach(trainer, EVERY)
    return trainer


def go(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Into a new directory."""
    directory.mkdir()
    monkeypatch.chdir(directory)


def files(directory: Path) -> list[str]:
    """All files below, without the numbers in their names, which have the time and the process."""
    paths = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(str(path).partition(".tfevents.")[0] for path in paths)


@pytest.mark.parametrize("maker", MAKERS)
def test_files_are_where_the_handler_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    """In two runs of a script that goes elsewhere before the first update, the same files as in one that stays."""
    found = []
    for moves in (False, True):
        go(monkeypatch, start := tmp_path / f"start-{moves}")
        trainer = make()
        MAKERS[maker](trainer)
        if moves:
            go(monkeypatch, tmp_path / "elsewhere")
        trainer.run(DATA, max_iters=3)
        trainer.run(DATA, max_iters=6)
        found.append(files(start))
    assert found[0] == found[1] != []
    assert files(tmp_path / "elsewhere") == []


def test_a_heartbeat_is_removed_where_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe from outside would take one that stays for a run that hangs."""
    go(monkeypatch, tmp_path / "start")
    trainer, watch = make(), HangWatch(heartbeat="heartbeat")
    watch.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=2), go, monkeypatch, tmp_path / "elsewhere")
    trainer.run(DATA, max_iters=3)
    assert watch.heartbeat == tmp_path / "start/heartbeat"
    assert files(tmp_path) == []


def test_the_end_of_a_run_shows_paths_from_the_current_directory_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they were given, where they lie in it; whole ones where they do not, or where the directory is gone."""
    go(monkeypatch, start := tmp_path / "start")
    trainer, logs = make(), (JsonLines("runs/log.jsonl"), TensorBoard("runs/points"), Csv(tmp_path / "other/log.csv"))
    for log in logs:
        log.attach(trainer, EVERY)
    ProgressLog("simple").attach(trainer, EVERY)
    trainer.run(DATA, max_iters=2)
    lines = [line.removeprefix("  files").strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[-3:] == ["runs/log.jsonl (JsonLines)", "runs/points (TensorBoard)", f"{tmp_path / 'other/log.csv'} (Csv)"]
    go(monkeypatch, tmp_path / "elsewhere")
    assert logs[0].rows_at_end() == [("files", f"{start / 'runs/log.jsonl'} (JsonLines)")]
    (tmp_path / "elsewhere").rmdir()
    assert logs[1].rows_at_end() == [("files", f"{start / 'runs/points'} (TensorBoard)")]
