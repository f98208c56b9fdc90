"""Logs as JSON lines and comma-separated values: every line once, whatever happens to the process or the disk."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cuts
from ignite_train import Trainer, TrainEvents, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import (
    Checkpoint,
    Csv,
    JsonLines,
    LogFile,
    ProgressLog,
    TensorBoard,
    TrainingMetrics,
    Validation,
    progress,
)
from ignite_train.handlers import log_file as module
from ignite_train.metrics import TIMED_METRICS
from ranks import run_ranks

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches
EVERY = Events.ITERATION_COMPLETED
KINDS: dict[str, type[LogFile]] = {"json": JsonLines, "csv": Csv}
kinds = pytest.mark.parametrize("kind", KINDS)


def olds(path: Path) -> list[Path]:
    """The logs of earlier runs, the oldest first."""
    return sorted(path.parent.glob(f"{path.name}.old*"))


class Killed(BaseException):
    """Stands for the end of a process."""


def read(path: Path) -> list[dict[str, Any]]:
    """The lines without what depends on the clock and without blanks, values as text in full precision."""
    with path.open(newline="") as file:
        if path.suffix == ".jsonl":
            rows = [{name: str(value) for name, value in json.loads(line, parse_constant=pytest.fail).items()} for line in file]
        else:
            rows = [dict(row) for row in csv.DictReader(file, strict=True)]
    assert all(None not in row for row in rows), "a line is longer than the header"
    return [
        {name: value for name, value in row.items() if value not in ("", None) and name.rpartition("/")[2] not in TIMED_METRICS}
        for row in rows
    ]


def make(directory: Path, kind: str, *, every: int = 1, save: int | None = None, **options: Any) -> tuple[Trainer, LogFile]:
    """Logs every `every` updates, validates at the end of each epoch of six updates, saves every `save` updates."""
    model, reduction = cuts.linear(), "explicit" if idist.get_world_size() > 1 else "auto"
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward, options=UpdateOptions(reduction=reduction)
    )
    evaluator = create_evaluator(model, cuts.forward)
    Validation(evaluator, DATA).attach(trainer)
    log = KINDS[kind](directory / ("log.jsonl" if kind == "json" else "log.csv"), **options)
    log.attach(trainer, EVERY(every=every), evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(every=every))
    if save is not None:
        Checkpoint(directory / "checkpoints", every=save, asynchronous=False).attach(trainer)
    return trainer, log


@pytest.mark.parametrize("kind", [JsonLines, Csv, TensorBoard])
def test_a_log_without_metrics_says_that_it_has_written_nothing(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler that publishes numbers is another one. Once it is there, or an evaluation is written, no line."""
    for with_metrics, with_evaluator, expected in ((False, False, 1), (True, False, 0), (False, True, 0)):
        caplog.clear()
        model = cuts.linear()
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
        evaluator = create_evaluator(model, cuts.forward)
        kind(tmp_path / f"{with_metrics}{with_evaluator}").attach(trainer, evaluator=evaluator if with_evaluator else None)
        Validation(evaluator, DATA).attach(trainer)
        if with_metrics:
            TrainingMetrics().attach(trainer)
        trainer.run(DATA)
        lines = [line for line in caplog.messages if f"{kind.__name__} has written nothing: no metrics were published" in line]
        assert len(lines) == expected


@kinds
def test_a_line_has_the_metrics(tmp_path: Path, kind: str) -> None:
    """Under their grouped names, bit by bit; validation is a line of its own; the end of the run is there."""
    trainer, log = make(tmp_path, kind, every=4)
    expected: list[tuple[str, str]] = []
    for event in (EVERY(every=4), Events.COMPLETED):
        trainer.add_event_handler(
            event, lambda: expected.append((str(trainer.state.iteration), repr(trainer.state.metrics["loss"])))
        )
    trainer.run(DATA, max_iters=10)
    rows = read(log.path)
    assert [(row["update"], row["train/loss"]) for row in rows if "train/loss" in row] == expected
    assert [row["update"] for row in rows] == ["4", "6", "8", "10"]
    assert {*rows[1]} == {"update", "epoch", "validation/loss", "validation/samples"}
    assert {"optimizer/learning_rate", "train/samples"} <= {*rows[0]}
    assert (rows[-1]["epoch"], log.rows_at_end()) == ("2", [("files", f"{log.path} ({type(log).__name__})")])


@pytest.mark.slow
@kinds
@pytest.mark.parametrize(
    ("save", "killed_at"),
    [
        (2, Events.ITERATION_STARTED(once=2)),
        (2, Events.ITERATION_STARTED(once=4)),
        (3, Events.EPOCH_COMPLETED(once=1)),
        (4, Events.ITERATION_STARTED(once=8)),
        (6, Events.ITERATION_STARTED(once=7)),
        (6, Events.COMPLETED),
    ],
    ids=["before-a-checkpoint", "after-one", "between-a-checkpoint-and-validation", "second-epoch", "at-one", "at-the-end"],
)
def test_each_line_is_there_once_when_a_run_resumes(tmp_path: Path, kind: str, save: int, killed_at: Any) -> None:
    """Without gap or double, as in the log of a run that was not killed; also where the last line was torn."""
    trainer, log = make(tmp_path / "whole", kind, save=save)
    trainer.run(DATA, max_epochs=2)
    expected = read(log.path)
    assert [row["update"] for row in expected] == [*"123456", "6", *"789", "10", "11", "12", "12"]

    trainer, log = make(tmp_path / "killed", kind, save=save)

    @trainer.on(killed_at)
    def die() -> None:
        raise Killed

    with pytest.raises(Killed):
        trainer.run(DATA, max_epochs=2)
    with log.path.open("ab") as file:
        file.write(b'{"update": 1' if kind == "json" else b"12,2,0.")
    trainer, log = make(tmp_path / "killed", kind, save=save)
    trainer.run(DATA, max_epochs=2)
    assert read(log.path) == expected


@kinds
def test_what_is_written_is_there_at_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operating system in each update, since SIGKILL does not wait for a flush; on the disk before a checkpoint."""
    trainer, log = make(tmp_path / "of/two/names", kind)
    lines: list[int] = []
    trainer.append_event_handler(EVERY, lambda: lines.append(len(read(log.path))))
    synced: list[bool] = []

    @trainer.on(EVERY(once=6))
    def save() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "fsync", lambda descriptor: synced.append(os.path.sameopenfile(descriptor, number)))
            with log.path.open("rb") as file:
                number = file.fileno()
                log.state_dict()

    trainer.run(DATA, max_epochs=1)
    assert lines == [1, 2, 3, 4, 5, 6]
    assert synced == [True]


@kinds
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_lines_that_a_checkpoint_cannot_have_on_the_disk_are_warned_of(
    tmp_path: Path, kind: str, on_error: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The state is saved all the same: without it a resumed run could not tell which lines are its own."""
    trainer, log = make(tmp_path, kind, on_error=on_error)
    trainer.run(DATA, max_iters=2)
    states = [log.state_dict()]

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    @trainer.on(EVERY(once=4))
    def save() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module.os, "fsync", fail)
            states.append(log.state_dict())

    trainer.run(DATA, max_iters=5)
    assert [{name: state[name] for name in ("latest", "lines")} for state in states] == [
        {"latest": 2, "lines": 1},
        {"latest": 4, "lines": 1},
    ]
    assert [line for line in caplog.messages if str(log.path) in line] == [
        f"lines in {log.path} may not be on the disk ([Errno 5] Input/output error); failures so far: 1"
    ]


@kinds
def test_a_run_from_the_beginning_does_not_destroy_an_earlier_log(tmp_path: Path, kind: str) -> None:
    """The file of the earlier run has another name then; a finished run that is started again changes nothing."""
    trainer, log = make(tmp_path, kind, save=3)
    trainer.run(DATA, max_epochs=1)
    before = log.path.read_bytes()
    trainer, _ = make(tmp_path, kind, save=3)
    trainer.run(DATA, max_epochs=1)
    assert log.path.read_bytes() == before
    trainer, _ = make(tmp_path, kind)
    trainer.run(DATA, max_iters=2)
    assert log.path.with_name(f"{log.path.name}.old.1").read_bytes() == before
    assert [row["update"] for row in read(log.path)] == ["1", "2"]
    for _ in range(2):  # false starts
        trainer, _ = make(tmp_path, kind)
        trainer.run(DATA, max_iters=1)
    assert log.path.with_name(f"{log.path.name}.old.1").read_bytes() == before
    assert [path.name.rpartition(".")[2] for path in olds(log.path)] == ["1", "2", "3"]


@kinds
def test_an_empty_file_is_not_kept_as_that_of_an_earlier_run(tmp_path: Path, kind: str) -> None:
    """It would take the place of the file that an earlier run has left; an evaluation before the run is in the log too."""
    trainer, log = make(tmp_path, kind)
    old = log.path.with_name(f"{log.path.name}.old.1")
    old.write_text("an earlier log")
    log.path.touch()
    evaluator_of(trainer).run(DATA)
    assert [row["update"] for row in read(log.path)] == ["0"]
    trainer.run(DATA, max_iters=2)
    assert [row["update"] for row in read(log.path)] == ["0", "1", "2"]
    assert [path.read_text() for path in olds(log.path)] == ["an earlier log"]


@kinds
def test_a_line_that_lacks_only_its_end_is_written_again(tmp_path: Path, kind: str) -> None:
    """The disk was full, or the process was killed, one byte before its end: the next line does not follow it there."""
    trainer, log = make(tmp_path, kind)
    trainer.run(DATA, max_iters=2)
    state = log.state_dict()
    os.truncate(log.path, log.path.stat().st_size - 1)
    trainer, log = make(tmp_path, kind)
    log.load_state_dict(state)
    trainer.run(DATA, max_iters=2)
    assert [row["update"] for row in read(log.path)] == ["1", "1", "2"]


@kinds
def test_an_evaluation_before_a_run_that_resumes_leaves_its_log(tmp_path: Path, kind: str) -> None:
    """As in a script that evaluates first, or only evaluates: the log has all lines, and the evaluation once."""

    def start() -> tuple[Trainer, LogFile]:
        trainer, log = make(tmp_path, kind, save=2)
        next(entry for entry in trainer._stateful.values() if isinstance(entry, Validation)).evaluator.run(DATA)
        return trainer, log

    for limit in (2, 4):
        trainer, log = start()
        trainer.run(DATA, max_iters=limit)
        assert [row["update"] for row in read(log.path)] == ["0", "1", "2", "3", "4"][: limit + 1]
    before = log.path.read_bytes()
    start()
    assert log.path.read_bytes() == before
    assert olds(log.path) == []


@kinds
def test_an_evaluation_before_a_run_from_the_beginning_is_in_its_log(tmp_path: Path, kind: str) -> None:
    """The file of the earlier run has another name, as without the evaluation."""
    trainer, log = make(tmp_path, kind)
    trainer.run(DATA, max_iters=3)
    before = log.path.read_bytes()
    trainer, log = make(tmp_path, kind)
    next(entry for entry in trainer._stateful.values() if isinstance(entry, Validation)).evaluator.run(DATA)
    trainer.run(DATA, max_iters=2)
    assert [row["update"] for row in read(log.path)] == ["0", "1", "2"]
    assert [path.read_bytes() for path in olds(log.path)] == [before]


@kinds
@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_log_that_cannot_be_looked_for_is_an_error_of_writing(
    tmp_path: Path, kind: str, on_error: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In an evaluation before the run; `on_error` decides."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(log.path))

    trainer, log = make(tmp_path, kind, on_error=on_error)
    log.path.write_text("an earlier log\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fail)
        if on_error == "raise":
            with pytest.raises(OSError, match="Input/output error"):
                evaluator_of(trainer).run(DATA)
            return
        evaluator_of(trainer).run(DATA)
    assert [line for line in caplog.messages if str(log.path) in line] == [
        f"a line of update 0 could not be written ([Errno 5] Input/output error: '{log.path}'); failures so far: 1"
    ]
    trainer.run(DATA, max_iters=2)
    assert [row["update"] for row in read(log.path)] == ["1", "2"]
    assert [path.read_text() for path in olds(log.path)] == ["an earlier log\n"]


def evaluator_of(trainer: Trainer) -> Any:
    """The one that the validation runs."""
    return next(entry for entry in trainer._stateful.values() if isinstance(entry, Validation)).evaluator


@kinds
def test_an_evaluation_without_a_run_is_in_its_log(tmp_path: Path, kind: str) -> None:
    """Where nothing was logged yet, also if no run follows."""
    trainer, log = make(tmp_path, kind)
    for number in (1, 2):
        evaluator_of(trainer).run(DATA)
        assert [row["update"] for row in read(log.path)] == ["0"] * number
    log.finish()


@kinds
def test_of_several_lines_of_an_update_those_before_the_checkpoint_stay(tmp_path: Path, kind: str) -> None:
    """Here two of three, and the next one follows them."""
    trainer, log = make(tmp_path, kind)
    states: list[dict[str, Any]] = []

    @trainer.on(EVERY(once=3))
    def evaluate_twice() -> None:
        for _ in range(2):
            evaluator_of(trainer).run(DATA)
            states.append(log.state_dict())

    trainer.run(DATA, max_iters=3)
    assert [row["update"] for row in read(log.path)] == ["1", "2", "3", "3", "3"]
    evaluator_of(trainer).run(DATA)
    for state in (states[0], None):  # while the file is open
        log.load_state_dict(state or log.state_dict())
        evaluator_of(trainer).run(DATA)
    log.finish()
    assert [row["update"] for row in read(log.path)] == ["1", "2", "3", "3", "3", "3"]
    trainer, log = make(tmp_path, kind)
    log.load_state_dict(states[0])
    evaluator_of(trainer).run(DATA)
    log.finish()
    assert [row["update"] for row in read(log.path)] == ["1", "2", "3", "3", "0"]


@kinds
def test_a_run_that_resumes_without_the_state_of_its_log_continues_the_file(tmp_path: Path, kind: str) -> None:
    """All lines up to the checkpoint's update stay, those after it are written again, and the file keeps its name."""
    for limit in (5, 7):
        trainer, log = make(tmp_path, kind)
        Checkpoint(tmp_path / "checkpoints", every=3, asynchronous=False, leave_out=[type(log).__name__]).attach(trainer)
        if limit == 5:
            trainer.add_event_handler(EVERY(once=3), lambda trainer: evaluator_of(trainer).run(DATA))
            trainer.add_event_handler(Events.ITERATION_STARTED(once=5), lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                trainer.run(DATA, max_epochs=2)
        else:
            trainer.run(DATA, max_iters=limit)
    assert [row["update"] for row in read(log.path)] == [*"123", *"3456", "6", "7"]
    assert olds(log.path) == []


@kinds
def test_a_second_run_of_the_same_trainer_continues(tmp_path: Path, kind: str) -> None:
    """Also after an exception, with what was written before it."""
    trainer, log = make(tmp_path, kind)
    failures = [RuntimeError("once")]

    @trainer.on(Events.ITERATION_STARTED(once=4))
    def fail() -> None:
        if failures:
            raise failures.pop()

    with pytest.raises(RuntimeError, match="once"):
        trainer.run(DATA, max_iters=5)
    trainer.run(DATA, max_iters=5)
    trainer.run(DATA, max_iters=8)
    assert [row["update"] for row in read(log.path)] == [*"123456", "6", "7", "8"]


def test_a_table_gets_columns_when_metrics_come(tmp_path: Path) -> None:
    """One header; earlier lines stay, with blanks; names and values may hold commas."""
    trainer, log = make(tmp_path, "csv")
    trainer.add_event_handler(EVERY(once=3), lambda: trainer.state.metrics.update({"a, b": math.nan}))
    trainer.run(DATA, max_iters=4)
    with log.path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[:3] == ["update", "epoch", "train/loss"]
    assert header[-1] == "train/a, b"
    assert {len(row) for row in rows} == {len(header)}
    assert [row[-1] for row in rows] == ["", "", "", "nan"]
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_a_table_has_a_line_for_each_row_whatever_metrics_are_called(tmp_path: Path) -> None:
    """Ends of lines in a name, which would cut the table off when a run resumes, are blanks there."""
    for limit in (2, 4):
        trainer, log = make(tmp_path, "csv", save=1)
        trainer.prepend_event_handler(EVERY, lambda trainer: trainer.state.metrics.update({'the "first",\nor\rlast': 1.0}))
        trainer.run(DATA, max_iters=limit)
    rows = read(log.path)
    assert [row["update"] for row in rows] == ["1", "2", "3", "4"]
    assert [row['train/the "first", or last'] for row in rows] == ["1.0"] * 4


NAMES = [7, None, "\ud800sur", "n" * 5000, "two\nlines", "\x1b[31mred", ("a", 1)]


@kinds
def test_a_run_ends_well_whatever_its_metrics_are_called(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files and console show each name in one line of limited length that can be encoded, and the last state is saved."""
    trainer, log = make(tmp_path, kind, save=99, on_error="raise")
    TensorBoard(tmp_path / "events", on_error="raise").attach(trainer, EVERY(every=1))
    ProgressLog("simple").attach(trainer, EVERY(every=1))
    trainer.add_event_handler(EVERY, lambda: trainer.state.metrics.update(dict.fromkeys(NAMES, 1.5), late=[{NAMES[3]: "text"}]))
    trainer.run(DATA, max_iters=2)
    shown = [name for name in read(log.path)[-1] if name.startswith("train/")]
    assert {"train/7", "train/None", "train/\\ud800sur", "train/" + "n" * 200 + "...", "train/two lines"} <= {*shown}
    assert all(len(name) < 250 and name.isprintable() for name in shown)
    assert max(map(len, [*capsys.readouterr().out.splitlines(), *caplog.messages])) < 400
    assert [path.name for path in (tmp_path / "checkpoints").glob("update-*")] == ["update-00000002"]


def test_a_table_that_fails_comes_after_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown at the end of a run is not worth its last state."""

    def fail(_: Any) -> None:
        raise TypeError("of the table")

    monkeypatch.setattr(progress, "_table", fail)
    trainer, _ = make(tmp_path, "json", save=99)
    ProgressLog("simple").attach(trainer, EVERY(every=1))
    with pytest.raises(TypeError, match="of the table"):
        trainer.run(DATA, max_iters=2)
    assert [path.name for path in (tmp_path / "checkpoints").glob("update-*")] == ["update-00000002"]


@kinds
def test_what_a_format_cannot_say_costs_a_line_and_no_more(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`on_error` is for any error of a line, and not for those of the disk alone."""
    add = KINDS[kind]._add

    def fail(log: Any, file: Any, place: Any, numbers: Any) -> Any:
        if place["update"] == 3:
            raise UnicodeEncodeError("utf-8", "x", 0, 1, "of a name")
        return add(log, file, place, numbers)

    monkeypatch.setattr(KINDS[kind], "_add", fail)
    trainer, log = make(tmp_path, kind)
    trainer.run(DATA, max_epochs=1)
    assert [row["update"] for row in read(log.path)] == [*"12456", "6"]
    assert "a line of update 3 could not be written (UnicodeEncodeError: 'utf-8' codec can't encode" in caplog.text


def test_json_knows_no_nan(tmp_path: Path) -> None:
    """What is not finite is a string that `float` reads; so every JSON reader reads the line."""
    trainer, log = make(tmp_path, "json")
    trainer.add_event_handler(
        Events.ITERATION_STARTED(once=2), lambda: trainer.state.metrics.update(low=-math.inf, none=math.nan)
    )
    trainer.run(DATA, max_iters=2)
    row = json.loads(log.path.read_text().splitlines()[1], parse_constant=pytest.fail)
    assert (row["train/low"], row["train/none"]) == ("-inf", "nan")
    assert float(row["train/low"]) == -math.inf


@kinds
def test_a_second_attach_adds_an_evaluator(tmp_path: Path, kind: str) -> None:
    """No line of the training is there twice."""
    trainer, log = make(tmp_path, kind)
    evaluator = create_evaluator(trainer.model, cuts.forward)  # type: ignore[arg-type]
    Validation(evaluator, DATA).attach(trainer)
    log.attach(trainer, EVERY, evaluator=evaluator, tag="averaged")
    trainer.run(DATA, max_epochs=1)
    rows = read(log.path)
    assert [row["update"] for row in rows] == [*"123456", "6", "6"]
    assert rows[-1]["averaged/loss"] == rows[-2]["validation/loss"]


@kinds
def test_two_evaluators_have_two_tags(tmp_path: Path, kind: str) -> None:
    """With one their numbers could not be told apart."""
    trainer, log = make(tmp_path, kind)
    second = create_evaluator(trainer.model, cuts.forward)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tag must be another one for each evaluator, got 'validation' twice; pass tag='test'"):
        log.attach(trainer, EVERY, evaluator=second)
    for tag in ("train", "optimizer", "layers", "speed"):
        with pytest.raises(ValueError, match=f"tag must not be '{tag}', .* group of the trainer's own metrics; pass tag="):
            log.attach(trainer, EVERY, evaluator=second, tag=tag)
    log.attach(trainer, EVERY, evaluator=second, tag="test")


def test_a_log_that_was_given_a_wrong_event_is_attached_at_another(tmp_path: Path) -> None:
    """The evaluator and its tag were not taken by the first try."""
    trainer, _ = make(tmp_path, "json")
    evaluator, log = create_evaluator(trainer.model, cuts.forward), KINDS["json"](tmp_path / "other.jsonl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="event"):
        log.attach(trainer, "nothing", evaluator=evaluator)
    log.attach(trainer, EVERY, evaluator=evaluator)


class FullDisk:
    """Has room for a half of the line that is written in one update, and later for all."""

    def __init__(self, update: bytes) -> None:
        self.update, self.write = update, module._write_whole
        self.is_full = True

    def __call__(self, file: BinaryIO, data: bytes) -> None:
        if self.is_full and data.startswith((self.update + b",", b'{"update": ' + self.update + b",")):
            self.is_full = False
            self.write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write(file, data)


@kinds
def test_a_full_disk_costs_a_line_and_no_more(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run continues, a warning says so, and half a line does not stay."""
    monkeypatch.setattr(module, "_write_whole", FullDisk(b"3"))
    trainer, log = make(tmp_path, kind)
    trainer.run(DATA, max_epochs=1)
    assert [row["update"] for row in read(log.path)] == [*"12456", "6"]
    assert [line for line in caplog.messages if "could not be written" in line] == [
        f"a line of update 3 could not be written ([Errno 28] No space left on device: '{log.path}'); failures so far: 1"
    ]


def test_a_disk_that_stays_full_is_said_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first, second, fourth, eighth time, ..."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_write_whole", fail)
    trainer, _ = make(tmp_path, "json")
    trainer.run(DATA * 3, max_epochs=1)  # 18 updates, and a validation
    lines = [line for line in caplog.messages if "could not be written" in line]
    assert [line.rpartition(" ")[2] for line in lines] == ["1", "2", "4", "8", "16"]
    assert [line.split()[4] for line in lines] == ["1", "2", "4", "8", "16"]


@kinds
def test_a_full_disk_ends_the_run_if_asked_to(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the system's own, and names the file."""
    monkeypatch.setattr(module, "_write_whole", FullDisk(b"3"))
    trainer, log = make(tmp_path, kind, on_error="raise")
    with pytest.raises(OSError, match="No space left") as found:
        trainer.run(DATA, max_epochs=1)
    assert (found.value.errno, found.value.filename) == (errno.ENOSPC, str(log.path))
    assert trainer.state.iteration == 3


def of_a_rank(directory: Path, full: bool) -> tuple[int, str]:
    if full:
        module._write_whole = FullDisk(b"3")
    trainer, _ = make(directory, "json", on_error="raise")
    try:
        trainer.run(DATA, max_epochs=1)
    except (OSError, RuntimeError) as error:  # PeerFailureError is one, and so is what gloo says when the peer is gone
        return trainer.state.iteration, " ".join(
            [str(error), *error.__notes__] if hasattr(error, "__notes__") else [str(error)]
        )
    return trainer.state.iteration, ""


@pytest.mark.slow
def test_rank_0_writes_and_its_failure_ends_all(tmp_path: Path) -> None:
    """Two ranks write each line once; if rank 0 cannot and must, no rank hangs."""
    assert run_ranks(of_a_rank, tmp_path / "good", False) == [(6, ""), (6, "")]
    assert [row["update"] for row in read(tmp_path / "good/log.jsonl")] == [*"123456", "6"]
    (_, first), (_, second) = run_ranks(of_a_rank, tmp_path / "full", True)
    assert first.startswith("[Errno 28] No space left on device")
    assert "rank 0 failed at update 3: OSError: [Errno 28] No space left on device" in second


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1, 2], "state_dict must be what JsonLines.state_dict.. gave"),
        ({"latest": 1}, "got one without lines"),
        ({"latest": -1, "points": {}, "lines": 1}, "state_dict.'latest'. must be an integer of at least 0, got -1"),
        ({"latest": 1, "lines": 0.5}, "state_dict.'lines'. must be an integer of at least 0, got 0.5"),
    ],
    ids=["list", "key", "latest", "lines"],
)
def test_a_wrong_state_is_refused(tmp_path: Path, state: Any, message: str) -> None:
    """One line says what is wrong with it."""
    with pytest.raises((TypeError, ValueError), match=message):
        JsonLines(tmp_path / "log.jsonl").load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": None}, "path must be"),
        ({"path": Path(__file__).parent}, "path must be a file, got the directory"),
        ({"path": "log", "on_error": "ignore"}, "on_error must be one of"),
    ],
    ids=["path", "directory", "on_error"],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    """One line says which."""
    with pytest.raises((TypeError, ValueError), match=message):
        JsonLines(**options)


def test_the_base_of_the_formats_is_refused(tmp_path: Path) -> None:
    """It would write nothing; one that has a format is a `LogFile` all the same."""
    with pytest.raises(TypeError, match=r"abstract class LogFile with.*abstract methods '?_add'?, '?_update_of'?$"):
        LogFile(tmp_path / "log")  # type: ignore[abstract]
    assert isinstance(Csv(tmp_path / "log"), LogFile)


WITHIN = {
    "GRADIENTS_READY": TrainEvents.GRADIENTS_READY(every=3),
    "ITERATION_STARTED": EVERY(every=3) | Events.ITERATION_STARTED(every=3),
}


@pytest.mark.parametrize("event", WITHIN)
@pytest.mark.parametrize("stop", [2, 3, 5])
def test_an_evaluation_within_an_update_is_of_the_weights_before_it(
    event: str, stop: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line has the number of the update whose weights it is of, once, also where the run resumes in between."""
    losses: dict[int, float] = {}
    for directory, stops in ((tmp_path / "whole", ()), (tmp_path / "resumed", (stop,))):
        for stopped in (*stops, None):
            model = cuts.linear()
            trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
            evaluator, other = create_evaluator(model, cuts.forward), create_evaluator(model, cuts.forward)
            JsonLines(directory / "log.jsonl").attach(trainer, EVERY(every=2), evaluator=evaluator)
            TensorBoard(directory, histograms=3).attach(trainer, EVERY(every=2), evaluator=evaluator)
            ProgressLog(style="json").attach(trainer, EVERY(every=100), evaluator=evaluator)
            Validation(evaluator, DATA, sanity=0).attach(trainer, WITHIN[event])
            Checkpoint(directory, every=1).attach(trainer)
            trainer.add_event_handler(
                EVERY, lambda trainer, other=other: losses.update({trainer.state.iteration: other.run(DATA).metrics["loss"]})
            )
            if stopped is not None:
                trainer.add_event_handler(EVERY(once=stopped), lambda trainer: trainer.terminate())
            trainer.run(DATA, max_epochs=1)
        rows = [row for row in read(directory / "log.jsonl") if "validation/loss" in row]
        found = [(int(row["update"]), float(row["validation/loss"])) for row in rows]
        numbers = [2, 5] if event == "GRADIENTS_READY" else [2, 3, 5, 6]
        assert found == [(number, pytest.approx(losses[number])) for number in numbers]
        points = EventAccumulator(str(directory))
        points.Reload()
        assert [point.step for point in points.Scalars("validation/loss")] == numbers
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines() if "validation/loss" in line]
    assert [row["update"] for row in shown][: len(numbers)] == numbers
