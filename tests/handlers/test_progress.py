"""What a user sees of a run, on a terminal of 80 and 130 columns and in a log file."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ignite.engine import Engine, Events
from tqdm import tqdm

import cuts
from clock import Clock
from ignite_train import Evaluator, ForwardOutput, Trainer, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, EarlyStopping, JsonLines, ProgressLog, StopOnSignal, TrainingMetrics, Validation
from ignite_train.handlers.progress import _length, _thousands
from ignite_train.kinds_of_handlers import Handler
from ignite_train.ranks.collectives import is_main_rank
from processes import DEADLINE_SECONDS
from ranks import run_ranks
from setups import InfiniteIn
from update_options import with_options

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches
EVERY = Events.ITERATION_COMPLETED


def make(forward: Callable[..., Any] = cuts.forward, **options: Any) -> tuple[Trainer, Evaluator, torch.optim.Optimizer]:
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, forward, **with_options(**options))
    return trainer, create_evaluator(model, cuts.forward), optimizer


class Screen:
    """A terminal: what stands in its rows after some output. It has no more columns than it has."""

    def __init__(self, columns: int) -> None:
        self.columns, self.rows, self.row, self.column = columns, [""], 0, 0
        self.history: list[list[str]] = []  # after each move of the cursor

    def show(self, text: str) -> None:
        for piece in re.findall(r"\x1b\[A|\x1b\[K|[\r\n]|[^\r\n\x1b]+", text):
            if piece == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif piece == "\r":
                self.column = 0
            elif piece == "\x1b[A":
                self.row -= 1
            else:
                self._write(piece)
            self.history.append([*self.rows])

    def _write(self, piece: str) -> None:
        assert self.column + len(piece) <= self.columns, f"wraps after {self.columns} columns: {piece!r}"
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + piece + row[self.column + len(piece) :]
        self.column += len(piece)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Iterator[list[str]]:
    """Standard output and error are a pseudo-terminal; the list has what was written to it once the block is left."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                block = os.read(leader, 65536)
            except OSError:  # the other end was closed
                return
            if not block:
                return
            written.append(block)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    text: list[str] = []
    with os.fdopen(follower, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        yield text
        stream.flush()
    reader.join(DEADLINE_SECONDS)
    os.close(leader)
    text.append(b"".join(written).decode().replace("\r\n", "\r\n"))


@pytest.mark.parametrize("columns", [80, 130])
@pytest.mark.parametrize("with_metrics", [True, False], ids=["with-metrics", "alone"])
def test_a_terminal_has_bars(monkeypatch: pytest.MonkeyPatch, columns: int, with_metrics: bool) -> None:
    """One with loss, rate, speed and time to go, one for validation; no row wraps, no interval leaves a line behind."""
    monkeypatch.setattr("ignite_train.handlers.progress._REFRESH_SECONDS", 0.0)
    trainer, evaluator, _ = make()
    Validation(evaluator, DATA).attach(trainer)
    ProgressLog().attach(trainer, EVERY(every=2), evaluator=evaluator)
    if with_metrics:
        TrainingMetrics().attach(trainer, EVERY(every=2))
    # 33.3 updates/s: with a speed of fewer digits the narrow bar has room for the learning rate too.
    trainer.add_event_handler(Events.ITERATION_STARTED, Clock(monkeypatch).take, 0.03)
    with terminal(monkeypatch, columns) as text:
        trainer.run(DATA, max_epochs=2)
    screen = Screen(columns)
    screen.show(text[0])
    rows = [row.rstrip() for rows in screen.history for row in rows]
    bars = {row for row in rows if row.startswith("epoch ")}
    rate, unit = "" if columns == 80 else "lr 0.05, ", "samples" if with_metrics else "updates"
    middle = rf"epoch 1/2  33%\|.+\| 4/12 \[\d\d:\d\d, loss \S+, {rate}\S+ {unit}/s, \d:\d\d:\d\d left\]"
    assert any(re.fullmatch(middle, row) for row in bars), bars
    assert any(row.startswith("epoch 2/2 100%|") for row in bars)
    assert any(re.match(r"validation: +\d+%\|", row) for row in rows)
    beneath = {(upper[:6], lower[:11]) for rows in screen.history for upper, lower in pairwise(rows)}
    assert ("epoch ", "validation:") in beneath
    end = [row.rstrip() for row in screen.rows if row.strip()]
    assert end[:2] == ["Linear, 4 parameters, on cpu in float64, SGD", "12 updates in 2 epochs: 1 micro-batch each"]
    assert [row.partition(" after ")[0].split(",")[0] for row in end[2:5]] == ["validation", "validation", "finished"]
    training = r" \(training \S+\)" if with_metrics else ""
    assert re.match(rf"validation after update 6:  loss \S+ *{training}( +samples .*)?  \*$", end[2])
    assert [name for row in end[5:] if (name := row[:10].strip())] == (["time", "best", "memory"] if with_metrics else ["best"])


def test_a_narrow_terminal_leaves_out_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bar of a long run the learning rate first, so that no number is cut off; of an evaluation the last metrics."""
    monkeypatch.setattr("ignite_train.handlers.progress._REFRESH_SECONDS", 0.0)

    def forward(model: torch.nn.Module, micro_batch: Any) -> ForwardOutput:
        loss = cuts.forward(model, micro_batch).loss
        return ForwardOutput(loss, 4, logs={"bits_per_byte": loss.detach(), "accuracy": loss.detach()})

    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1.23e-5), forward)
    evaluator = create_evaluator(model, forward)
    trainer.add_event_handler(EVERY(once=2), lambda: evaluator.run(DATA))
    trainer.add_event_handler(EVERY(once=3), trainer.terminate)
    ProgressLog().attach(trainer, evaluator=evaluator)
    trainer.add_event_handler(Events.ITERATION_STARTED, Clock(monkeypatch).take, 0.01)  # or else days to go may need more room
    with terminal(monkeypatch, 72) as text:
        trainer.run(DATA * 2000, max_epochs=10)
    screen = Screen(72)
    screen.show(text[0])
    rows = {row.rstrip() for rows in screen.history for row in rows}
    assert any(re.match(r"validation after update 2:  loss \S+  bits_per_byte \S+", row) for row in rows), rows
    # After one update no speed is known.
    bars = [row for row in rows if "/120000" in row and " 1/120000" not in row and "loss" in row]
    assert bars
    assert [row for row in bars if not re.fullmatch(r"epoch  1/10 +0%\|.+\| \d/120000 \[.+ left\]", row) or " lr " in row] == []


def test_a_very_narrow_terminal_shows_where_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers whole, on two rows if need be."""
    trainer, _, _ = make()
    ProgressLog(style="simple").attach(trainer, EVERY(every=6))
    with terminal(monkeypatch, 20) as text:
        trainer.run(DATA * 20, max_epochs=1)
    assert "epoch 1/1  update 120/120\r\n" in text[0]


class Tee:
    """What scripts put in the place of standard output, to have a file of it too."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


class OfNotebook(Tee):
    """As that of a notebook: the descriptor is that of the terminal in which the notebook was started."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._descriptor


def test_a_standard_output_that_is_no_terminal_is_as_wide_as_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can only be written to, and one that names the descriptor of a terminal and is none."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
    for output in (Tee(), OfNotebook(follower)):
        trainer, evaluator, _ = make()
        ProgressLog(style="simple").attach(trainer, EVERY(every=6), evaluator=evaluator)
        Validation(evaluator, DATA).attach(trainer)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            trainer.run(DATA, max_epochs=1)
        assert re.search(r"^epoch 1/1  update 6/6  loss \S+", output.text, re.MULTILINE)
        assert re.search(r"^validation after update 6:  loss \S+", output.text, re.MULTILINE)
    os.close(leader)
    os.close(follower)


def test_without_training_metrics_the_bar_counts_for_itself() -> None:
    """Speed since the run began, which was after update 2, and the time that the rest takes at that speed."""
    trainer, _, _ = make()
    progress = ProgressLog()
    progress._timed_from = 2, 100.0
    shown: list[str] = []
    trainer.add_event_handler(EVERY(once=6), lambda: shown.append(progress._postfix(trainer, now=108.0, room=80)))
    trainer.run(DATA, max_epochs=2)
    assert shown[0].endswith(", lr 0.05, 0.5 updates/s, 0:00:12 left")


def test_the_time_that_is_left_is_that_of_this_update() -> None:
    """It counts down from what `TrainingMetrics` has published: 100 seconds for ten updates, of which six are left."""
    trainer, _, _ = make()
    progress, shown = ProgressLog(), list[str]()
    progress._timed_from = 0, 100.0
    trainer.add_event_handler(EVERY(once=2), lambda: trainer.state.metrics.update(time_to_go=100.0))
    for update in (2, 6):
        trainer.add_event_handler(EVERY(once=update), lambda: shown.append(progress._postfix(trainer, now=108.0, room=80)))
    trainer.run(DATA, max_epochs=2)
    assert [text.rpartition(", ")[2] for text in shown] == ["0:01:40 left", "0:01:00 left"]


def test_what_was_left_of_fewer_updates_is_not_shown_of_more() -> None:
    """A run is made longer at its end; until the next interval is over, the mean of the run counts: half an update a second."""
    trainer, _, _ = make()
    progress, shown = ProgressLog(), list[str]()
    progress._timed_from = 2, 100.0
    trainer.add_event_handler(EVERY(once=6), lambda: trainer.state.metrics.update(time_to_go=0.0))
    for update in (6, 7):
        now = 100.0 + 2 * (update - 2)
        trainer.add_event_handler(
            EVERY(once=update), lambda now: shown.append(progress._postfix(trainer, now=now, room=80)), now
        )
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: setattr(trainer.state, "max_epochs", 3))
    trainer.run(DATA, max_epochs=1)
    assert [text.rpartition(", ")[2] for text in shown] == ["0:00:00 left", "0:00:22 left"]


def test_a_slow_first_update_is_not_taken_for_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start in it, and graphs are compiled: it takes a hundred seconds, and each other one."""
    monkeypatch.setattr("ignite_train.handlers.progress._REFRESH_SECONDS", 0.0)
    trainer, _, _ = make()
    ProgressLog().attach(trainer)
    clock = Clock(monkeypatch)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=1), clock.take, 99.0)
    trainer.add_event_handler(Events.ITERATION_STARTED, clock.take, 1.0)
    with terminal(monkeypatch, 100) as text:
        trainer.run(DATA, max_epochs=2)
    left = dict(re.findall(r"\b(\d+)/12 \[[^\]]*, (\S+) left\]", text[0]))
    assert {number: left.get(number) for number in ("1", "2", "9")} == {"1": None, "2": "0:00:10", "9": "0:00:03"}


@pytest.mark.parametrize("resumes", [True, False], ids=["resumed", "second-run"])
def test_what_an_earlier_run_has_measured_is_not_shown_as_of_this_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, resumes: bool
) -> None:
    """Neither its speed, in bar and line, nor its slowest rank, until this run has measured them. A log has them, by update."""

    def job() -> Trainer:
        trainer, _, _ = make()
        TrainingMetrics().attach(trainer, EVERY(every=5))
        JsonLines(tmp_path / "log.jsonl").attach(trainer, EVERY(once=7))
        Checkpoint(tmp_path / "checkpoints", every=5).attach(trainer)
        return trainer

    first, shown = job(), list[str]()
    first.add_event_handler(EVERY(once=5), lambda: first.state.metrics.update(slowest_rank=1.0, slowest_to_median=9.0))
    first.run(DATA, max_iters=6)
    second, progress = job() if resumes else first, ProgressLog("simple")
    progress.attach(second, EVERY(every=1))
    for update in (7, 11):
        second.add_event_handler(EVERY(once=update), lambda: shown.append(progress._postfix(second, now=math.inf, room=80)))
    second.run(DATA, max_iters=12)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    assert ["samples/s" in text for text in (*shown, lines[0], lines[4])] == [False, True, False, True]
    assert ["left" in line for line in (lines[0], lines[-1])] == [False, True]
    assert not any("is slow" in line for line in lines)
    assert "speed/slowest_rank" in json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])


def test_the_bar_leaves_out_what_does_not_fit() -> None:
    """The learning rate first, then the speed and the time to go; the loss is the last."""
    trainer, _, _ = make()
    progress = ProgressLog()
    progress._timed_from = 2, 100.0
    shown: list[str] = []
    trainer.add_event_handler(
        EVERY(once=6), lambda: shown.extend(progress._postfix(trainer, now=108.0, room=room) for room in range(50, 0, -1))
    )
    trainer.run(DATA, max_epochs=2)
    texts = list(dict.fromkeys(shown))
    loss = texts[0].partition(",")[0]
    assert loss.startswith("loss ")
    speed, left = "0.5 updates/s", "0:00:12 left"
    assert texts == [f"{loss}, lr 0.05, {speed}, {left}", f"{loss}, {speed}, {left}", f"{loss}, {left}", loss, ""]
    assert all(len(text) < 50 - index for index, text in enumerate(shown))


def test_the_bar_of_an_evaluation_knows_its_length() -> None:
    """The loader's, or fewer micro-batches where that is asked for; none is known of an iterator."""
    _, evaluator, _ = make()
    lengths: list[Any] = []
    evaluator.add_event_handler(Events.STARTED, lambda: lengths.append(_length(evaluator)))
    evaluator.run(DATA)
    evaluator.run(DATA, epoch_length=4)
    evaluator.run(iter(DATA))
    assert lengths == [6, 4, None]


def test_a_message_does_not_break_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is logged while a bar is shown stands on a row of its own."""
    monkeypatch.setattr("ignite_train.handlers.progress._REFRESH_SECONDS", 0.0)
    trainer, _, _ = make()
    ProgressLog().attach(trainer)
    trainer.add_event_handler(EVERY(once=3), lambda: logging.getLogger("mine").warning("look here"))
    handlers = [*logging.getLogger().handlers]
    with terminal(monkeypatch, 80) as text:
        trainer.run(DATA, max_epochs=1)
    screen = Screen(80)
    screen.show(text[0])
    rows = [row.rstrip() for row in screen.rows]
    assert [row.split()[0] for row in rows[2:6]] == ["epoch", "epoch", "look", "epoch"]
    assert rows[4] == "look here"
    assert logging.getLogger().handlers == handlers


def lines_of(capsys: pytest.CaptureFixture[str], style: Any = "auto", **options: Any) -> list[str]:
    """Two epochs with a line every third update, a schedule, a constant of the user's own, a skip and validation."""
    infinite = InfiniteIn(5)
    trainer, evaluator, optimizer = make(infinite, on_nonfinite="skip", **options)
    infinite.trainer = trainer
    trainer.state.metrics["baseline"] = 2.5
    Validation(evaluator, DATA).attach(trainer)
    ProgressLog(style).attach(trainer, EVERY(every=3), evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(every=3))
    trainer.add_event_handler(EVERY(once=7), lambda: optimizer.param_groups[0].update(lr=0.01))
    trainer.run(DATA, max_epochs=2)
    return capsys.readouterr().out.splitlines()


def test_a_log_file_has_short_aligned_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss first, constants never, at most 100 columns, one column under the other."""
    monkeypatch.setattr("ignite_train.handlers.progress._LONG_WAIT", 2.0)  # what depends on the clock is not shown
    lines = lines_of(capsys)
    training = [line for line in lines if line.startswith("epoch")]
    assert [line[:23] for line in training] == [
        "epoch 1/2  update  3/12",
        "epoch 1/2  update  6/12",
        "epoch 2/2  update  9/12",
        "epoch 2/2  update 12/12",
    ]
    assert all(len(line) <= 100 for line in lines)
    assert len({line.index("  loss ") for line in training}) == 1
    assert len({line.index("  samples ") for line in training}) == 1
    assert len({line.index(" samples/s  ") for line in training}) == 1
    assert not any("norm" in line for line in training), "there is no room for it beside the learning rate"
    assert not any("baseline" in line or "sample_size" in line or "clipped" in line for line in training)
    assert ["skipped 1" in line for line in training] == [False, True, False, False]
    assert ["lr 0.01" in line for line in training] == [False, False, True, True]
    assert all(re.search(r"\S samples/s  \d:\d\d:\d\d left", line) for line in training)
    assert [line.partition("  loss")[0] for line in lines if line.startswith("validation")] == [
        "validation after update 6:",
        "validation after update 12:",
    ]


ALL_PARTS = {
    "loss": 0.5,
    "perplexity": 1.25,
    "accuracy": 0.75,
    "recall": 0.25,
    "grad_norm": 2.0,
    "samples_per_second": 1234.0,
    "time_to_go": 3725.0,
    "data_wait": 0.1,
    "slowest_to_median": 1.5,
    "slowest_rank": 3.0,
}


def test_what_a_line_leaves_out_when_there_is_no_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part after part, as the width goes down from 199 columns to 20, each of them as soon as it does not fit."""
    trainer, _, _ = make()
    ProgressLog("simple").attach(trainer, EVERY(every=1))

    @trainer.on(Events.ITERATION_STARTED)
    def publish() -> None:
        update = trainer.state.iteration
        monkeypatch.setattr("ignite_train.handlers.progress._MAX_COLUMNS", 200 - update)
        trainer.state.metrics |= ALL_PARTS | {"skipped": 100.0 + update, "learning_rate": 0.1 if update == 1 else 0.2}

    trainer.run(DATA * 30, max_epochs=1)
    lines = capsys.readouterr().out.splitlines()[2:182]
    middle = "loss 0.5      perplexity 1.25     accuracy 0.75     recall 0.25     norm 2        1.23k samples/s  1:02:05 left"
    alarms = "skipped {}  waiting 10%  rank 3 is slow"
    assert lines[0] == f"epoch 1/1  update   1/180  {middle}  {alarms.format(101)}", "its rate is that of the beginning"
    assert lines[1] == f"epoch 1/1  update   2/180  {middle}  lr 0.2      {alarms.format(102)}"
    parts = ["slow", "waiting", "norm", "recall", "perplexity", " lr ", "samples/s", "left", "accuracy", "loss", "skipped"]
    left_out = [next(index for index, line in enumerate(lines) if index and part not in line) for part in parts]
    widths = [199 - index for index in left_out]
    assert widths == sorted({*widths}, reverse=True)
    assert widths[0] == len(lines[1]) - 1
    assert all(len(line) <= max(199 - index, len("epoch 1/1  update 180/180")) for index, line in enumerate(lines))
    assert lines[-1] == "epoch 1/1  update 180/180"


@pytest.mark.parametrize("kind", ["EarlyStopping", "Checkpoint", None])
def test_a_score_stays_in_a_narrow_line(
    kind: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of the logs of the user the one that a handler follows stays longest; or else the first."""
    monkeypatch.setattr("ignite_train.handlers.progress._MAX_COLUMNS", 60)
    trainer, evaluator, _ = make()
    ProgressLog("simple").attach(trainer, EVERY(every=1), evaluator=evaluator)
    if kind == "EarlyStopping":
        EarlyStopping(evaluator, "recall", patience=99).attach(trainer)
    elif kind == "Checkpoint":
        Checkpoint(tmp_path, score="recall").attach(trainer, evaluator=evaluator)

    @trainer.on(Events.ITERATION_STARTED)
    def publish() -> None:
        rate = 0.1 * trainer.state.iteration
        trainer.state.metrics |= {"loss": 0.5, "accuracy": 0.75, "recall": 0.25, "learning_rate": rate}

    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(recall=0.5))
    Validation(evaluator, DATA).attach(trainer)
    trainer.run(DATA, max_epochs=1)
    line = next(line for line in capsys.readouterr().out.splitlines() if "update 3/6" in line)
    stays, leaves = ("accuracy", "recall") if kind is None else ("recall", "accuracy")
    assert stays in line
    assert leaves not in line
    assert " lr " not in line


def test_a_line_warns_of_what_is_urgent_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Of more skips, of the loader from 10 % on, of a rank from 1.5 times the median on; a constant once it changes."""
    trainer, _, _ = make()
    trainer.state.metrics |= {"baseline": 2.5, "skipped": 1.0}
    ProgressLog("simple").attach(trainer, EVERY(every=1))
    rows: list[dict[str, float]] = [
        {"skipped": 1.0, "data_wait": 0.09, "slowest_to_median": 1.4, "slowest_rank": 3.0, "baseline": 2.5},
        {"skipped": 2.0, "baseline": 3.5},
        {"skipped": 2.0, "data_wait": 0.1, "baseline": 2.5},
        {"skipped": 2.0, "data_wait": 0.0, "slowest_to_median": 1.5},
        {"slowest_to_median": 0.0, "learning_rate/0": 0.05, "learning_rate/1": 0.5},
        {"learning_rate/0": 0.05, "learning_rate/1": 0.7},
    ]
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: trainer.state.metrics.update(rows.pop(0)))
    trainer.run(DATA, max_epochs=1)
    shown = [" ".join(line.split()[6:]) for line in capsys.readouterr().out.splitlines()[2:8]]
    assert shown == [
        "",
        "baseline 3.5 skipped 2",
        "baseline 2.5 waiting 10%",
        "baseline 2.5 rank 3 is slow",
        *["baseline 2.5"] * 2,
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5.0, "0:00:00"), (0.4, "0:00:00"), (59.6, "0:01:00"), (3725.0, "1:02:05"), (math.inf, "11574 days, 1:46:40")],
    ids=["none", "a moment", "a minute", "an hour", "for ever"],
)
def test_a_time_is_in_hours_and_minutes(capsys: pytest.CaptureFixture[str], seconds: float, text: str) -> None:
    """In whole seconds, and never negative."""
    trainer, _, _ = make()
    ProgressLog("simple").attach(trainer, EVERY(every=1))
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: trainer.state.metrics.update(time_to_go=seconds))
    trainer.run(DATA[:1])
    assert f"  {text} left\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00001234567, "1.2e-05"),
        (123456789.0, "1.2e+08"),
        (0.0001234, "0.00012"),
        (-0.12346, "-0.1235"),
        (1234.5, "1234"),
    ],
    ids=["small", "large", "long", "negative", "whole"],
)
def test_a_number_has_seven_columns(capsys: pytest.CaptureFixture[str], value: float, text: str) -> None:
    """So that lines stay aligned."""
    trainer, _, _ = make()
    ProgressLog("simple").attach(trainer, EVERY(every=1))
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: trainer.state.metrics.update(loss=value, mine=1.0))
    trainer.run(DATA[:1])
    assert f"loss {text:<7}  mine 1" in capsys.readouterr().out


def test_one_line_for_all_trainers_of_a_loop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses and logs of those beside it, in lines, in JSON, and in the bar."""

    def logged(model: Any, batch: Any) -> ForwardOutput:
        return cuts.forward(model, batch)._replace(logs={"made": 8.0})

    def train(style: Any) -> tuple[Trainer, Trainer]:
        (g, *_), (d, *_) = make(), make(logged)
        TrainingMetrics().attach(d, EVERY(every=1))
        ProgressLog(style).attach(g, EVERY(every=2), beside={"d": d})
        with d.session(), g.session(max_iters=4):
            for first in range(4):
                d.update(DATA[first : first + 2])
                g.update(DATA[first : first + 1])
        return d, g

    d, g = train("simple")
    lines = [line for line in capsys.readouterr().out.splitlines() if "update" in line and "each" not in line]
    assert len(lines) == 3, "two lines of both, and the end; the first line of all says how many there will be"
    losses = [trainer.state.update_output.loss for trainer in (g, d)]  # type: ignore[union-attr]
    assert f"loss {losses[0]:.4g}" in lines[1]
    assert f"d/loss {losses[1]:.4g}" in lines[1]
    assert "d/made" in lines[1]
    train("json")
    written = [json.loads(line) for line in capsys.readouterr().out.splitlines()][1]
    assert (written["train/loss"], written["d/loss"]) == pytest.approx(losses)
    monkeypatch.setattr("ignite_train.handlers.progress._REFRESH_SECONDS", 0.0)
    with terminal(monkeypatch, 100) as text:
        train("bar")
    assert re.search(r"loss [0-9.e+-]+, d/loss [0-9.e+-]+", "".join(text))
    with pytest.raises(TypeError, match="beside must hold trainers by name"):
        ProgressLog().attach(g, beside={"d": 3})  # type: ignore[dict-item]


def test_a_table_ends_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the time went, the best score and its update, skips, memory, and where the files are."""
    monkeypatch.setattr("ignite_train.handlers.training_metrics._SMALLEST_SHARE", 0.0)  # times differ from machine to machine
    trainer, evaluator, _ = make()
    validation = Validation(evaluator, DATA)
    validation.attach(trainer)
    ProgressLog("simple").attach(trainer, EVERY(every=4), evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(every=4), evaluator=evaluator)
    checkpoint = Checkpoint(tmp_path, every=4, asynchronous=False)
    checkpoint.attach(trainer)
    JsonLines(tmp_path / "log.jsonl").attach(trainer, EVERY(every=4))
    trainer.run(DATA, max_epochs=2)
    lines = capsys.readouterr().out.splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("finished"))
    assert lines[begin].startswith("finished after 12 updates (12 steps, 0 skipped) in 2 epochs, ")
    table: dict[str, str] = {}
    for line in lines[begin + 1 :]:  # those without a name continue the row above
        name = line[:10].strip() or [*table][-1]
        table[name] = table.get(name, "") + line[10:]
    assert [*table] == ["time", "best", "memory", "files"]
    for section in ("forward", "backward", "evaluation", "checkpoint"):
        assert re.search(rf"{section} \d+\.\d s \(\d+%\)", table["time"])
    assert max(len(line) for line in lines[begin:] if str(tmp_path) not in line) <= 80
    assert f"loss {validation.best:.6g} at update 12" in table["best"]
    assert table["files"] == f"{tmp_path} (Checkpoint){tmp_path}/log.jsonl (JsonLines)"
    assert re.fullmatch(r"host \d+\.\d\d GiB", table["memory"])


def test_the_table_leaves_out_what_takes_next_to_no_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that moves only while data is loaded."""
    clock = Clock(monkeypatch)
    trainer, _, _ = make()
    ProgressLog("simple").attach(trainer)
    TrainingMetrics(memory=False).attach(trainer)
    trainer.run(clock.loader(DATA, 3.0))
    assert "time    data 18.0 s (100%)\n" in capsys.readouterr().out


def test_the_table_is_of_this_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither of the run before in this process, nor of an earlier process; what is counted in all says so."""
    clock, model = Clock(monkeypatch), cuts.linear()
    for limits in ((6, 12), (18,)):
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
        ProgressLog("simple").attach(trainer)
        TrainingMetrics(memory=False).attach(trainer)
        Checkpoint(tmp_path).attach(trainer)
        trainer.add_event_handler(EVERY, lambda trainer: clock.take(float(trainer.state.max_iters)))
        for limit in limits:
            trainer.run(DATA, max_iters=limit)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("finished", "  time"))]
    assert [line.partition(", 0 skipped) in ")[2] for line in lines[::2]] == [
        "1 epoch, 36.0 s",
        "2 epochs, 6 updates in this run, 72.0 s",
        "3 epochs, 6 updates in this run, 108.0 s",
    ]
    assert lines[1::2] == [f"  time    handler {seconds}.0 s (100%)" for seconds in (36, 72, 108)]


def test_a_run_without_a_step_has_not_finished(capsys: pytest.CaptureFixture[str]) -> None:
    """Although it came to its end."""
    trainer, _, _ = make(lambda model, batch: ForwardOutput(cuts.forward(model, batch).loss, sample_size=0))
    ProgressLog("simple").attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert "ended WITHOUT A STEP after 6 updates (0 steps, 6 skipped) in 1 epoch, " in capsys.readouterr().out


class Times(Handler):
    """Ten sections with a tenth of the time each, by the rows that they need."""

    rows = (("a" * 8, "b" * 8, "c" * 9), ("d" * 9, "e" * 9), ("f" * 9, "g" * 20), ("h" * 20, "i" * 20), ("j",))

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(EVERY, self)

    def __call__(self) -> None:
        pass

    def rows_at_end(self) -> Any:
        return [("time", f"{name} 10.0 s (10%)") for row in self.rows for name in row]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        pass


def test_the_table_has_as_many_rows_as_it_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of at most 68 columns beside the names of the rows, which two of these have; and the time is that of the run."""
    clock = Clock(monkeypatch)
    trainer, _, _ = make()
    ProgressLog("simple").attach(trainer)
    Times().attach(trainer)
    trainer.add_event_handler(EVERY, clock.take, 2.0)
    trainer.run(DATA)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-6] == "finished after 6 updates (6 steps, 0 skipped) in 1 epoch, 12.0 s"
    rows = [", ".join(f"{name} 10.0 s (10%)" for name in row) for row in Times.rows]
    assert "\n".join(lines[-5:]) == "  time    " + ",\n          ".join(rows)


class Buffered(Tee):
    """A file whose text is there for others once it is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = ""

    def write(self, text: str) -> int:
        self.waiting += text
        return len(text)

    def flush(self) -> None:
        self.text, self.waiting = self.text + self.waiting, ""


def test_a_line_can_be_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where standard output is a file, which is buffered: a user who follows it sees how far the run is."""
    trainer, _, _ = make()
    ProgressLog("simple").attach(trainer, EVERY(every=1))
    output, seen = Buffered(), list[int]()
    trainer.append_event_handler(EVERY, lambda: seen.append(output.text.count("epoch ")))
    monkeypatch.setattr(sys, "stdout", output)
    trainer.run(DATA)
    assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_lines_leave_the_start_method_of_processes_to_the_script() -> None:
    """A script may choose it after a run: tqdm's lock, which fixes it, is not made where no bar is open."""
    script = """
import multiprocessing
import torch
from ignite.engine import Events
from ignite_train import create_trainer
from ignite_train.handlers import ProgressLog
model = torch.nn.Linear(2, 1)
trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).mean())
ProgressLog().attach(trainer, Events.ITERATION_COMPLETED(every=1))
trainer.run([torch.ones(2, 2)])
multiprocessing.set_start_method("spawn")
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "update 1/1" in ended.stdout


def test_a_bar_of_the_script_stays_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line has a row of its own, also where the bar is not ours."""
    trainer, _, _ = make()
    ProgressLog("simple").attach(trainer, EVERY(every=3))
    with terminal(monkeypatch, 80) as text, tqdm(total=2, desc="mine", file=sys.stderr) as bar:
        trainer.run(DATA, max_epochs=1)
        bar.update(2)
    screen = Screen(80)
    screen.show(text[0])
    rows = [row.split()[0].rstrip(":") for row in screen.rows if row.strip()]
    assert rows == ["Linear,", "6", "epoch", "epoch", "finished", "mine"]


@pytest.mark.parametrize(
    ("data", "stop_after", "expected"),
    [
        (DATA, 4, "stopped after 4 of 12 updates (4 steps"),
        (cuts.Unsized(DATA), 4, "stopped after 4 updates (4 steps"),
        (DATA, 12, "finished after 12 updates (12 steps"),
    ],
    ids=["within", "no-length", "at-the-end"],
)
def test_a_run_that_is_stopped_has_not_finished(
    capsys: pytest.CaptureFixture[str], data: Any, stop_after: int, expected: str
) -> None:
    """It says how far it was; one that is asked to stop in its last update has finished."""
    trainer, _, _ = make()
    ProgressLog().attach(trainer)
    trainer.add_event_handler(EVERY(once=stop_after), lambda: trainer.terminate())
    trainer.run(data, max_epochs=2)
    assert expected in capsys.readouterr().out


def test_without_training_metrics_it_shows_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """That of the latest update."""
    trainer, _, _ = make()
    losses: list[float] = []
    trainer.add_event_handler(EVERY(every=3), lambda: losses.append(trainer.state.update_output.loss))
    ProgressLog().attach(trainer, EVERY(every=3))
    trainer.run(DATA, max_epochs=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  loss ")[1] for line in lines[2:4]] == [f"{loss:.4g}" for loss in losses]


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Every line is an object with all metrics; what is not finite is a string, for JSON knows no NaN."""
    lines = [json.loads(line, parse_constant=pytest.fail) for line in lines_of(capsys, "json")]
    assert [line.get("update") for line in lines] == [3, 6, 6, 9, 12, 12, None]
    assert lines[0]["total"] == 12
    assert lines[1]["optimizer/skipped"] == 1
    assert {"train/loss", "train/samples", "optimizer/learning_rate", "speed/data_wait"} <= {*lines[0]}
    assert {*lines[2]} == {"epoch", "update", "validation/loss", "validation/samples"}
    assert (lines[-1]["finished"], lines[-1]["skipped"]) == (12, 1)
    trainer, _, _ = make(lambda model, batch: model(batch[0]).sum() * math.nan, on_nonfinite="skip")
    ProgressLog("json").attach(trainer, EVERY(every=6))
    trainer.run(DATA, max_epochs=1)
    assert json.loads(capsys.readouterr().out.splitlines()[0])["train/loss"] == "nan"


def test_none_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """Not a word."""
    assert lines_of(capsys, "none") == []


def test_a_resumed_run_says_where(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In the block with which it begins; a second run in the same process says that it continues."""
    for limit in (4, 6):
        trainer, _, _ = make()
        ProgressLog().attach(trainer, EVERY(every=50))
        Checkpoint(tmp_path).attach(trainer)
        trainer.run(DATA, max_iters=limit)
    trainer.run(DATA, max_iters=9)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("resumed", "continues"))] == [
        f"resumed after update 4 from {tmp_path / 'update-00000004'}",
        "continues after update 6",
    ]
    begin = lines.index("6 updates: 1 micro-batch each")
    assert lines[begin + 1] == f"writes to {tmp_path}"


@pytest.mark.parametrize(
    ("samples", "size", "steps", "line"),
    [
        (20, 8, 8, "2 updates in 2 epochs: up to 64 samples each (8 × 8 micro-batches)"),
        (5, 32, 1, "2 updates in 2 epochs: up to 32 samples each (32 × 1 micro-batches)"),
        (20, None, 32, "2 updates in 2 epochs: up to 32 micro-batches each"),
        (1, None, 1, "2 updates in 2 epochs: 1 micro-batch each"),
    ],
    ids=["few-micro-batches", "a-small-batch", "few-of-unknown-size", "one"],
)
def test_an_update_that_is_a_whole_epoch_may_have_fewer_samples(
    capsys: pytest.CaptureFixture[str], samples: int, size: int | None, steps: int, line: str
) -> None:
    """The data may have fewer than accumulation asks for."""
    model = torch.nn.Linear(4, 1)
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean(), accumulation_steps=steps
    )
    ProgressLog("simple").attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(torch.utils.data.DataLoader(torch.randn(samples, 4), batch_size=size), max_epochs=2)
    assert capsys.readouterr().out.splitlines()[1] == line


def test_a_run_introduces_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Model, device and precision; the updates, and the samples of one; where it writes. A second run does not."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 1000), torch.nn.Linear(1000, 1))
    model[0].requires_grad_(False)
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 4))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    for steps, line in (
        (4, "8 updates in 2 epochs: 16 samples each (4 × 4 micro-batches)"),
        ([2, 8], "updates in 2 epochs: [2, 8] micro-batches each"),
    ):
        optimizer = torch.optim.AdamW(model[1].parameters())
        trainer = create_trainer(
            model, optimizer, lambda model, batch: model(batch[0]).square().mean(), accumulation_steps=steps, precision="bf16"
        )
        ProgressLog("simple", unit="rows").attach(trainer, Events.EPOCH_COMPLETED)
        TrainingMetrics().attach(trainer, Events.EPOCH_COMPLETED)
        JsonLines(tmp_path / "log.jsonl").attach(trainer)
        trainer.run(loader, max_epochs=2)
        trainer.run(loader, max_epochs=3)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "Sequential, 6k parameters, 1k of them trained, on cpu in bf16, AdamW"
        assert lines[1] == line
        assert lines[2] == f"writes to {tmp_path / 'log.jsonl'}"
        assert sum(text.startswith("Sequential") for text in lines) == 1
        assert "rows/s" in lines[3]
    with pytest.raises(TypeError, match="unit must be the name of what sample_size counts, such as 'tokens', got 3"):
        ProgressLog(unit=3)  # type: ignore[arg-type]


def test_a_terminal_keeps_the_lines_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no validation has lines, above the bar; at early updates too, so that a short run has some."""
    trainer, _, _ = make()
    ProgressLog().attach(trainer)
    with terminal(monkeypatch, 110) as text:
        trainer.run(DATA * 10, max_epochs=2)
    screen = Screen(110)
    screen.show(text[0])
    lines = [row.split()[3] for row in screen.rows if row.startswith("epoch") and "|" not in row]
    assert lines == ["1/120", "2/120", "5/120", "10/120", "20/120", "50/120", "100/120"]


def test_the_best_validation_has_a_mark(capsys: pytest.CaptureFixture[str]) -> None:
    """And the loss of the training stands beside that of the validation."""
    trainer, evaluator, _ = make()
    scores = iter([3.0, 2.0, 2.5, 1.0])
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(error=next(scores)))
    Validation(evaluator, DATA, score="error", sanity=0).attach(trainer)
    ProgressLog("simple").attach(trainer, evaluator=evaluator)
    TrainingMetrics().attach(trainer, Events.EPOCH_COMPLETED)
    trainer.run(DATA, max_epochs=4)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation")]
    assert [line.endswith("  *") for line in lines] == [True, True, False, True]
    assert all(re.match(r"validation after update \d+:  loss \S+ \(training [\d.e-]+\)  ", line) for line in lines)


def test_the_mark_and_the_table_follow_the_score_of_a_handler(capsys: pytest.CaptureFixture[str]) -> None:
    """`EarlyStopping` names the accuracy, and the best is that of the accuracy too, though the loss falls to the end."""
    trainer, evaluator, _ = make()
    found = iter([(0.4, 0.5), (0.3, 0.75), (0.2, 0.25)])

    def publish() -> None:
        loss, accuracy = next(found)
        evaluator.state.metrics.update(loss=loss, accuracy=accuracy)

    evaluator.add_event_handler(Events.EPOCH_COMPLETED, publish)
    ProgressLog("simple").attach(trainer, evaluator=evaluator)
    Validation(evaluator, DATA, sanity=0).attach(trainer)
    EarlyStopping(evaluator, "accuracy", patience=9).attach(trainer)
    trainer.run(DATA, max_epochs=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("  *") for line in lines if line.startswith("validation")] == [True, True, False]
    assert [line.split() for line in lines if line.startswith("  best")] == [["best", "accuracy", "0.75", "at", "update", "12"]]


def test_a_validation_has_the_numbers_of_the_training_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a loss and a score of the user's there is room, with a space before each bracket, and the columns stand in line."""
    trainer, evaluator, _ = make()
    found = iter([(0.09125, 0.9), (0.1234, 0.9875), (0.5, 0.09125)])

    def publish(engine: Any, loss: float, accuracy: float) -> None:
        engine.state.metrics.clear()
        engine.state.metrics.update(loss=loss, accuracy=accuracy)

    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: publish(evaluator, *next(found)))
    Validation(evaluator, DATA, sanity=0).attach(trainer)
    ProgressLog("simple").attach(trainer, evaluator=evaluator)
    numbers = iter([(0.2345, 0.9123), (0.3345, 0.8123), (0.4345, 0.7123)])
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: publish(trainer, *next(numbers)))
    trainer.run(DATA, max_epochs=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation")]
    assert [line.partition("  ")[2].rstrip(" *") for line in lines] == [
        "loss 0.09125 (training 0.2345)  accuracy 0.9 (training 0.9123)",
        "loss 0.1234 (training 0.3345)  accuracy 0.9875 (training 0.8123)",
        "loss 0.5 (training 0.4345)     accuracy 0.09125 (training 0.7123)",
    ]


def test_numbers_of_an_epoch_before_are_not_beside_a_validation(capsys: pytest.CaptureFixture[str]) -> None:
    """Published in the first and the third epoch of four; what is published as an epoch ends is of that epoch."""
    trainer, evaluator, _ = make()
    Validation(evaluator, DATA, sanity=0).attach(trainer)
    ProgressLog("simple").attach(trainer, evaluator=evaluator)
    TrainingMetrics().attach(trainer, EVERY(event_filter=lambda _, update: update in (4, 18)))
    trainer.run(DATA, max_epochs=4)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation")]
    assert ["(training" in line for line in lines] == [True, False, True, False]


@pytest.mark.parametrize("measures", [False, True])
def test_a_number_that_is_published_again_and_is_the_same_is_beside_a_validation(
    measures: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a handler of the user's, with `TrainingMetrics` and without."""
    trainer, evaluator, _ = make()

    def publish() -> None:
        evaluator.state.metrics.clear()
        evaluator.state.metrics.update(loss=0.5, accuracy=0.75)

    evaluator.add_event_handler(Events.EPOCH_COMPLETED, publish)
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda: trainer.state.metrics.update(accuracy=1.0))
    Validation(evaluator, DATA, sanity=0).attach(trainer)
    ProgressLog("simple").attach(trainer, evaluator=evaluator)
    if measures:
        TrainingMetrics().attach(trainer, EVERY(every=3))
    trainer.run(DATA, max_epochs=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation")]
    assert ["accuracy 0.75 (training 1)" in line for line in lines] == [True, True, True]


def test_a_second_attach_adds_an_evaluator(capsys: pytest.CaptureFixture[str]) -> None:
    """No line of the training is printed twice."""
    trainer, first, _ = make()
    second = create_evaluator(first.model, cuts.forward)
    progress = ProgressLog()
    progress.attach(trainer, EVERY(every=3), evaluator=first)
    progress.attach(trainer, EVERY(every=3), evaluator=second, tag="averaged")
    for evaluator in (first, second):
        Validation(evaluator, DATA).attach(trainer)
    trainer.run(DATA, max_epochs=1)
    heads = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[2:6]]
    assert heads == ["epoch 1/1", "epoch 1/1", "validation after update 6:", "averaged after update 6:"]


def test_a_metric_that_is_not_one_number_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of the trainer and of the evaluator; a warning says once what is left out."""
    trainer, evaluator, _ = make()
    Validation(evaluator, DATA).attach(trainer)
    ProgressLog().attach(trainer, EVERY(every=2), evaluator=evaluator)
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(confusion=torch.eye(9)))
    trainer.add_event_handler(EVERY, lambda: trainer.state.metrics.update(note="hello"))
    trainer.run(DATA, max_epochs=2)
    assert [record.args or record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [
        "the metric 'note' is not made of numbers (str); it is left out of the logs",
        "the metric 'confusion' has 81 numbers, and 32 may be shown (Tensor); it is left out of the logs",
    ]
    assert "validation after update 12:  loss" in capsys.readouterr().out


@pytest.mark.parametrize("style", ["simple", "bar"])
def test_only_a_bar_is_moved_in_each_update(monkeypatch: pytest.MonkeyPatch, style: Any) -> None:
    """Without a bar nothing is attached for it, and when it is closed its handler is gone."""
    monkeypatch.setattr("ignite_train.handlers.progress.tqdm", ShownBar)
    trainer, _, _ = make()
    ProgressLog(style).attach(trainer, Events.EPOCH_COMPLETED)
    seen: list[bool] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: seen.append(trainer.has_handlers(EVERY)))
    for epochs in (1, 2):
        trainer.run(DATA, max_epochs=epochs)
        seen.append(trainer.has_handlers(EVERY))
    assert seen == [style == "bar", False] * 2


class ShownBar(tqdm):  # type: ignore[type-arg]
    """A bar that remembers whether it was closed."""

    shown: ClassVar[list[ShownBar]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**(options | {"disable": False, "file": io.StringIO()}))
        self.is_closed, self.n_at_start = False, self.n
        self.shown.append(self)

    def close(self) -> None:
        self.is_closed = True
        super().close()


def show_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has bars be noted in `ShownBar.shown`, and moved without a pause."""
    monkeypatch.setattr("ignite_train.handlers.progress.tqdm", ShownBar)
    monkeypatch.setattr("ignite_train.handlers.progress._REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(ShownBar, "shown", [])


def test_the_bar_is_closed_when_the_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception ends the bar too; running again opens a new one that starts where the run stands."""
    show_each_update(monkeypatch)
    trainer, _, _ = make()
    ProgressLog("bar").attach(trainer)
    failures = [RuntimeError("once")]

    @trainer.on(EVERY(once=4))
    def fail() -> None:
        if failures:
            raise failures.pop()

    with pytest.raises(RuntimeError, match="once"):
        trainer.run(DATA, max_epochs=1)
    trainer.run(DATA, max_epochs=1)
    assert [(bar.n_at_start, bar.n, bar.total, bar.is_closed) for bar in ShownBar.shown] == [(0, 4, 6, True), (4, 6, 6, True)]


class Refreshed(ShownBar):
    """A bar that remembers when it was drawn, and which lengths it was told by `reset`."""

    drawn: ClassVar[list[int]] = []
    lengths: ClassVar[list[Any]] = []

    def refresh(self, *args: Any, **options: Any) -> Any:
        self.drawn.append(self.n)
        return super().refresh(*args, **options)

    def reset(self, total: Any = None) -> None:
        self.lengths.append(total)
        super().reset(total)


def test_a_bar_is_drawn_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """With updates of 0.04 s, which is each third one; and the first one of a run in any case. Its length is told once."""
    monkeypatch.setattr("ignite_train.handlers.progress.tqdm", Refreshed)
    monkeypatch.setattr(Refreshed, "drawn", [])
    monkeypatch.setattr(Refreshed, "lengths", [])
    clock = Clock(monkeypatch)
    trainer, _, _ = make()
    ProgressLog("bar").attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, clock.take, 0.04)
    for limit in (11, 14):
        trainer.run(DATA, max_iters=limit)
    assert [number for number in Refreshed.drawn if number] == [1, 4, 7, 10, 12]
    assert Refreshed.lengths == [11, 14]


class OfNotebookBar(ShownBar):
    """What `tqdm.auto` takes in a notebook."""

    __module__ = "tqdm.notebook"


@pytest.mark.parametrize("kind", [OfNotebookBar, ShownBar], ids=["notebook", "file"])
def test_a_notebook_has_bars(monkeypatch: pytest.MonkeyPatch, kind: type[ShownBar]) -> None:
    """Although its standard error is not a terminal; each bar counts what it shows."""
    monkeypatch.setattr("ignite_train.handlers.progress.tqdm", kind)
    monkeypatch.setattr(ShownBar, "shown", [])
    trainer, evaluator, _ = make()
    ProgressLog().attach(trainer, evaluator=evaluator)
    Validation(evaluator, DATA[:4], sanity=0).attach(trainer)
    trainer.run(DATA, max_epochs=1)
    bars = [(bar.unit, bar.n, bar.total, bar.is_closed) for bar in ShownBar.shown]
    assert bars == ([("update", 6, 6, True), ("batch", 4, 4, True)] if kind is OfNotebookBar else [])


def test_the_bar_of_a_rehearsal_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluator's COMPLETED does not fire in it; during the first epoch the bar of the run stands alone."""
    monkeypatch.setattr("ignite_train.handlers.progress.tqdm", ShownBar)
    monkeypatch.setattr(ShownBar, "shown", [])
    trainer, evaluator, _ = make()
    ProgressLog("bar").attach(trainer, evaluator=evaluator)
    Validation(evaluator, DATA, sanity=2).attach(trainer)
    closed: list[bool] = []
    trainer.add_event_handler(EVERY(once=1), lambda: closed.extend(bar.is_closed for bar in ShownBar.shown))
    trainer.run(DATA)
    assert closed == [False, True]


@pytest.mark.parametrize("stock", [True, False], ids=["stock-engine", "evaluator"])
def test_both_bars_are_closed_when_an_evaluation_fails(monkeypatch: pytest.MonkeyPatch, stock: bool) -> None:
    """Also that of an engine of Ignite's, which does not say that it has failed."""
    monkeypatch.setattr("ignite_train.handlers.progress.tqdm", ShownBar)
    monkeypatch.setattr(ShownBar, "shown", [])
    trainer, evaluator, _ = make()
    engine = Engine(lambda _engine, micro_batch: 1 // 0) if stock else evaluator
    if not stock:
        evaluator.add_event_handler(EVERY, lambda: 1 // 0)
    ProgressLog("bar").attach(trainer, evaluator=engine)
    trainer.add_event_handler(EVERY(once=2), lambda: engine.run(DATA))
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA, max_epochs=1)
    assert [(bar.unit, bar.total, bar.is_closed) for bar in ShownBar.shown] == [("update", 6, True), ("batch", 6, True)]


def test_the_bar_of_a_stock_engine_is_closed_when_it_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the next update finds the bar of the run alone."""
    show_each_update(monkeypatch)
    trainer, _, _ = make()
    engine, closed = Engine(lambda _engine, micro_batch: None), list[bool]()
    ProgressLog("bar").attach(trainer, evaluator=engine)
    trainer.add_event_handler(EVERY(once=2), lambda: engine.run(DATA))
    trainer.add_event_handler(EVERY(once=3), lambda: closed.extend(bar.is_closed for bar in ShownBar.shown))
    trainer.run(DATA)
    assert closed == [False, True]


def test_the_bar_of_a_run_that_is_interrupted_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the run that continues it has one that starts there."""
    show_each_update(monkeypatch)
    trainer, _, _ = make()
    ProgressLog("bar").attach(trainer)
    trainer.add_event_handler(EVERY(once=4), lambda: trainer.interrupt())
    trainer.run(DATA, max_epochs=1)
    assert [(bar.n, bar.is_closed) for bar in ShownBar.shown] == [(4, True)]
    trainer.run(DATA, max_epochs=1)
    assert [(bar.n_at_start, bar.n, bar.is_closed) for bar in ShownBar.shown[1:]] == [(4, 6, True)]


def test_an_evaluation_that_fails_closes_its_own_bar_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that continues after that has the bar of the run."""
    monkeypatch.setattr("ignite_train.handlers.progress.tqdm", ShownBar)
    monkeypatch.setattr(ShownBar, "shown", [])
    trainer, evaluator, _ = make()
    ProgressLog("bar").attach(trainer, evaluator=evaluator)

    def evaluate() -> None:
        with suppress(TypeError):
            evaluator.run([None])

    trainer.add_evaluation_handler(EVERY(once=3), evaluate)
    assert trainer.run(DATA, max_epochs=1).iteration == 6
    assert [(bar.n, bar.is_closed) for bar in ShownBar.shown] == [(6, True), (0, True)]


def interrupted() -> tuple[list[str], int]:
    """What a rank writes to standard error, by Python's handler of last resort, when Ctrl-C reaches it."""
    trainer, _, _ = make(protect=False, reduction="explicit")
    stop = StopOnSignal([signal.SIGINT])
    stop.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: signal.raise_signal(signal.SIGINT))
    heard = Heard()
    logging.getLogger("ignite_train.handlers.stop_on_signal").addHandler(heard)

    @trainer.on(EVERY(once=3))
    def wait_until_heard() -> None:  # the line is written by a thread
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (stop._watch._first is None or (is_main_rank() and not heard.lines)) and time.monotonic() < deadline:
            time.sleep(0.01)

    trainer.run(DATA, max_epochs=3)
    return heard.lines, trainer.state.iteration


class Heard(logging.Handler):
    """Keeps the messages that Python prints where logging was not set up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.slow
def test_ctrl_c_prints_its_line_once() -> None:
    """A terminal sends it to all ranks; rank 0 says so."""
    (first, update), (second, other) = run_ranks(interrupted)
    assert len(first) == 1
    assert first[0].startswith("SIGINT: the run ends")
    assert second == []
    assert update == other < 18


def test_a_style_must_be_one_of_them() -> None:
    """The message names the nearest."""
    with pytest.raises(ValueError, match=r"style must be one of 'auto', 'bar', .* did you mean 'simple'"):
        ProgressLog("simpel")  # type: ignore[arg-type]


class WriteOnly:
    """A script's own output."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class Broken(io.StringIO):
    """A pipe whose reader has gone, or a full disk."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def trained_into(stdout: Any, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    model = torch.nn.Linear(3, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, x: model(x).square().mean())
    ProgressLog("auto").attach(trainer, Events.ITERATION_COMPLETED(every=1))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        patch.setattr(sys, "stderr", None)
        trainer.run([torch.ones(2, 3)] * 3)
    return trainer


@pytest.mark.parametrize("kind", ["closed", "none", "broken"])
def test_a_run_does_not_end_where_its_output_does(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with `| head`, and a terminal that was closed: one warning, as of any log. With `>&-` it is None."""
    stdout: Any = {"closed": io.StringIO(), "none": None, "broken": Broken()}[kind]
    if kind == "closed":
        stdout.close()
    assert trained_into(stdout, monkeypatch).state.iteration == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    told = "a line of ProgressLog could not be written to the standard output ("
    assert [warning.startswith(told) for warning in warnings] == [True] * (kind != "none")


def test_a_script_may_have_an_output_that_takes_ascii_or_can_only_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters that are not ASCII are written by their numbers."""
    ascii_only, own = io.TextIOWrapper(io.BytesIO(), encoding="ascii"), WriteOnly()
    for stdout in (ascii_only, own):
        trained_into(stdout, monkeypatch)
    printed = ascii_only.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    for text in (printed, own.text):
        assert text.count("epoch 1/1  update ") == 3
    monkeypatch.setattr(sys, "stdout", ascii_only)
    ProgressLog("simple")._print("2 \u00d7 3")
    assert ascii_only.buffer.getvalue().decode("ascii").endswith("2 \\xd7 3\n")  # type: ignore[attr-defined]


def test_a_line_is_written_under_the_lock_of_bars_that_a_script_has_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that another thread opens meanwhile would disturb it. Each line is one piece, as those of several threads are."""
    calls = list[tuple[str, dict[str, Any]]]()
    monkeypatch.setattr("ignite_train.handlers.progress.tqdm.write", lambda text, **given: calls.append((text, given)))
    with tqdm(total=1, file=io.StringIO()):
        ProgressLog("simple")._print("a line")
    assert calls == [("a line\n", {"end": "", "nolock": False})]


@pytest.mark.parametrize(
    ("speed", "shown"),
    [
        (0.0, "0"),
        (0.0033, "0.0033"),
        (0.25, "0.25"),
        (4570.0, "4.57k"),
    ],
)
def test_speeds(speed: float, shown: str) -> None:
    """A low speed is not shown as 0."""
    assert _thousands(speed) == shown
