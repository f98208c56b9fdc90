"""The page on watching a run: its code runs, its commands draw what it shows; and Ignite's trackers get the metrics."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import TensorboardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cuts
from ignite_train import create_evaluator, create_trainer
from ignite_train.handlers import TrainingMetrics, Validation
from ignite_train.plot import read_curves
from ignite_train.tools.plot import Curve
from processes import DEADLINE_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/watching-a-run.md"
DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches

of_a_checkout = pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, and this is none")


def make() -> tuple[Any, Any]:
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    evaluator = create_evaluator(model, cuts.forward)
    Validation(evaluator, DATA).attach(trainer)
    return trainer, evaluator


def run(example: str, *arguments: str, timeout_seconds: float = DEADLINE_SECONDS) -> str:
    """What the example prints."""
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@of_a_checkout
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it on one trainer, as it is printed."""
    monkeypatch.chdir(tmp_path)
    trainer, evaluator = make()
    names: dict[str, Any] = {"trainer": trainer, "evaluator": evaluator}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)  # noqa: S102
    trainer.run(DATA, max_epochs=2)
    assert {path.name for path in (tmp_path / "runs/first").iterdir()} == {"metrics.jsonl", "tensorboard", "traces"}
    assert "forward" in names["timer"].table()


@of_a_checkout
def test_each_picture_has_a_command() -> None:
    """And each run of the script is on the page."""
    text = PAGE.read_text(encoding="utf-8")
    commands = re.findall(r"python examples/sick_runs\.py (\w+)", text)
    assert commands == ["healthy", "diverging", "overflow", "starved", "straggler", "exploding"]
    assert [
        name for name in commands if not (ROOT / f"docs/pictures/{name}.png").is_file() or f"pictures/{name}.png" not in text
    ] == []


@of_a_checkout
@pytest.mark.nightly
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_overflow_looks_like_it(tmp_path: Path) -> None:
    """The scale falls and updates are skipped; all runs are looked at in the nightly test."""
    printed = run("sick_runs.py", "overflow", "--updates", "40", "--directory", str(tmp_path))
    scales = read_curves(tmp_path / "overflow")["optimizer/loss_scale"][1]
    assert scales[0] > scales[-1]
    assert re.search(r"skipped \d+", printed)
    assert (tmp_path / "overflow/overflow.png").stat().st_size > 0


def slowest_ranks(curves: Mapping[str, Curve]) -> list[tuple[float, float]]:
    """Of each interval its slowest rank, which is published after the next one, and the seconds of rank 0's own work in it."""
    own_work = [curves[f"speed/{section}_seconds"] for section in ("data", "forward", "optimizer", "handler")]
    seconds = {update: sum(values) for update, *values in zip(own_work[0][0], *(curve[1] for curve in own_work), strict=True)}
    ranks = dict(zip(*curves["speed/slowest_rank"], strict=True))
    return [(ranks[after], seconds[update]) for update, after in pairwise(seconds) if after in ranks]


@of_a_checkout
@pytest.mark.nightly
@pytest.mark.timeout(4 * DEADLINE_SECONDS + 20)
def test_sick_runs_look_sick(tmp_path: Path) -> None:
    """Each in the numbers that the page names; short runs."""
    pictures = tmp_path / "pictures"
    shown = ("--updates", "80", "--directory", str(tmp_path), "--pictures", str(pictures))
    run("sick_runs.py", "all", *shown, timeout_seconds=4 * DEADLINE_SECONDS)  # eight processes
    curves = {
        name: read_curves(tmp_path / name) for name in ("healthy", "diverging", "overflow", "starved", "straggler", "exploding")
    }
    assert {path.stem for path in pictures.iterdir()} == {*curves}

    def last(run: str, name: str) -> float:
        return curves[run][name][1][-1]

    assert last("healthy", "train/loss") < curves["healthy"]["train/loss"][1][0]
    assert last("healthy", "validation/loss") < curves["healthy"]["validation/loss"][1][0]
    assert last("diverging", "train/loss") > 10 * last("healthy", "train/loss")
    assert last("diverging", "optimizer/clipped") == 1.0
    assert curves["overflow"]["optimizer/loss_scale"][1][0] > last("overflow", "optimizer/loss_scale")
    assert last("overflow", "optimizer/skipped") > 0
    assert curves["starved"]["train/loss"] == curves["healthy"]["train/loss"], "bit by bit"
    assert min(curves["starved"]["speed/data_seconds"][1][-10:]) >= 0.02, "two batches of 10 ms at least"
    late = slowest_ranks(curves["straggler"])[80 // 2 // 2 :]
    assert [(rank, seconds) for rank, seconds in late if rank != 1.0 and seconds < 0.02] == [], "rank 1 sleeps twice for 10 ms"
    assert [rank for rank, _ in late].count(1.0) > len(late) / 2, "a busy machine stops rank 0 for as long, but not each time"
    assert last("exploding", "grad_norm_of/0.weight") > 3 * curves["exploding"]["grad_norm_of/0.weight"][1][0]


# --- trackers ---


def attach(tracker: Any, trainer: Any, evaluator: Any) -> None:
    """As the page says."""
    every = Events.ITERATION_COMPLETED(every=2)
    TrainingMetrics().attach(trainer, every)
    tracker.attach_output_handler(trainer, every, tag="train", metric_names="all")
    tracker.attach_output_handler(
        evaluator,
        Events.COMPLETED,
        tag="validation",
        metric_names="all",
        global_step_transform=lambda *_: trainer.state.iteration,
    )


def test_a_tracker_of_ignite_gets_the_metrics(tmp_path: Path) -> None:
    """In one line for each engine; here the one that needs no other package."""
    trainer, evaluator = make()
    tracker, seen = TensorboardLogger(log_dir=str(tmp_path)), []
    attach(tracker, trainer, evaluator)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: seen.append(trainer.state.metrics["loss"]))
    trainer.run(DATA, max_epochs=1)
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [
        (update, pytest.approx(loss, rel=1e-6)) for update, loss in zip((2, 4, 6), seen, strict=True)
    ]
    assert [point.step for point in events.Scalars("validation/loss")] == [6]


def records(path: Path) -> Iterator[bytes]:
    """The records of a file that W&B has written offline: blocks of 32 KiB, of LevelDB's log format, after 7 bytes."""
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the only part, or the last
            yield whole
            whole = b""


@of_a_checkout
@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_the_tracker_of_the_example_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What W&B has put on the disk has the loss of training and of validation at their updates."""
    pytest.importorskip("wandb", reason="needs the package wandb, which is none of ours")
    from wandb.proto.wandb_internal_pb2 import Record

    for name, value in {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    run("tracker.py", "--directory", str(tmp_path / "tracked"))
    (path,) = (tmp_path / "tracked").glob("wandb/offline-run-*/*.wandb")
    points: dict[str, list[tuple[int, float]]] = {}
    for data in records(path):
        record = Record.FromString(data)
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name in {"train/loss", "validation/loss"} & {*items}:
            points.setdefault(name, []).append((items.get("_step", record.history.step.num), items[name]))
    assert [update for update, _ in points["train/loss"]] == [8, 16, 24, 32, 40, 48, 56, 64]
    assert [update for update, _ in points["validation/loss"]] == [32, 64]
    assert points["train/loss"][0][1] > points["train/loss"][-1][1]
