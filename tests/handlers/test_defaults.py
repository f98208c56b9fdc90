"""A run in one line, and the pictures of its log."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import cuts
from ignite_train import UpdateOptions, attach_defaults, count_traffic, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, Validation
from ignite_train.plot import main, plot_runs, read_curves
from ranks import run_ranks

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches


def train(directory: Path, *, max_epochs: int = 1, saves: bool = False, **options: Any) -> Any:
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    evaluator = create_evaluator(model, cuts.forward)
    Validation(evaluator, DATA).attach(trainer)
    attached = attach_defaults(trainer, evaluator=evaluator, directory=directory, every=2, **options)
    if saves:
        Checkpoint(directory, asynchronous=False).attach(trainer)
    trainer.run(DATA, max_epochs=max_epochs)
    return attached


def test_one_line_gives_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, a log, TensorBoard and the table with their places; validation in each of them, and its time apart."""
    attached = train(tmp_path / "first", config={"width": 8})
    assert None not in attached
    printed = capsys.readouterr().out
    for text in (
        "epoch 1/1  update 4/6  loss ",
        "validation after update 6:  loss ",
        "finished after 6 updates",
        "  best    loss",
    ):
        assert text in printed
    assert str(tmp_path / "first/metrics.jsonl") in printed
    assert str(tmp_path / "first/tensorboard") in printed
    rows = [json.loads(line) for line in (tmp_path / "first/metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [2, 4, 6, 6]
    events = EventAccumulator(str(tmp_path / "first/tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("train/loss")] == [2, 4, 6]
    assert [point.step for point in events.Scalars("validation/loss")] == [6]
    assert attached.training_metrics.seconds_by_section["evaluation"] > 0


@pytest.mark.slow
def test_checkpoints_may_be_in_the_same_directory(tmp_path: Path) -> None:
    """And a run that resumes from them has each line once."""
    train(tmp_path, saves=True)
    train(tmp_path, saves=True, max_epochs=2)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [2, 4, 6, 6, 8, 10, 12, 12]


def test_parts_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the names under which they are given back; a misspelt one is answered with the nearest."""
    attached = train(tmp_path, leave_out=("tensorboard", "progress"))
    assert [name for name, handler in attached._asdict().items() if handler is None] == ["progress", "tensorboard"]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="did you mean 'tensorboard'"):
        train(tmp_path, leave_out=("tensorbord",))
    with pytest.raises(TypeError, match="pass \\('progress',\\)"):
        train(tmp_path, leave_out="progress")
    with pytest.raises(TypeError, match="directory must be a path"):
        train(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "options", "heard"),
    [
        (0, {}, ["warning", "error"]),
        (0, {"log_level": "INFO"}, ["info", "warning", "error"]),
        (0, {"log_level": "ERROR"}, ["error"]),
        (1, {"log_level": "INFO"}, ["error"]),
        (1, {"log_level": "INFO", "log_on_all_ranks": True}, ["info", "warning", "error"]),
    ],
    ids=["as-it-is", "info", "error", "another-rank", "all-ranks"],
)
def test_what_is_logged_is_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, options: dict[str, Any], heard: list[str]
) -> None:
    """The level, and whether other ranks than the first say more than errors."""
    logger, records = logging.getLogger("ignite_train"), []
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr("ignite_train.ranks.collectives.is_main_rank", lambda: rank == 0)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(logging.getLogger("ignite_train.handlers.mine"), "handle", lambda record: records.append(record.msg))
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    attach_defaults(trainer, directory=tmp_path, leave_out=("progress", "tensorboard"), **options)
    for level in ("info", "warning", "error"):
        getattr(logging.getLogger("ignite_train.handlers.mine"), level)(level)
    logger.setLevel(logging.NOTSET)
    assert records == heard


def test_what_is_logged_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, where the program has not set up Python's logging."""
    logger = logging.getLogger("ignite_train")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward)
    attach_defaults(trainer, directory=tmp_path, leave_out=("progress", "tensorboard"), log_level="INFO")
    logger.info("the third update")
    logger.setLevel(logging.NOTSET)
    assert capsys.readouterr().err == "INFO the third update\n"


def test_the_directory_has_a_name() -> None:
    """As it is shown in the first line that a user reads."""
    parameters = inspect.signature(attach_defaults).parameters
    assert [*parameters][:3] == ["trainer", "directory", "evaluator"]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in [*parameters.values()][1:])


def of_a_rank(directory: Path, attaches: bool) -> tuple[list[int], list[str]]:
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, cuts.forward, options=UpdateOptions(reduction="explicit"), protect=False)
    if attaches:
        attach_defaults(trainer, directory=directory, every=2)
    counts: list[int] = []
    with count_traffic("cpu") as traffic:
        for event in (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED):
            trainer.append_event_handler(event, lambda: counts.append(len(traffic.collectives)))
        trainer.run(DATA, max_epochs=1)
    files = sorted(path.name for path in directory.glob("*")) if directory.exists() else []
    return [end - begin for begin, end in zip(counts[0::2], counts[1::2], strict=True)], files


@pytest.mark.slow
def test_on_two_ranks_nothing_is_exchanged_for_it(tmp_path: Path) -> None:
    """One collective an update, as without; rank 0 writes."""
    (first, files), (second, _) = run_ranks(of_a_rank, tmp_path / "shown", True)
    assert first[1:] == second[1:] == [1] * 5
    assert [counts for counts, _ in run_ranks(of_a_rank, tmp_path / "bare", False)] == [first, second]
    assert files == ["metrics.jsonl", "tensorboard"]


def calls_of_an_update(directory: Path | None) -> float:
    """Calls of functions of Python's in an update between two lines, of which the 20 that count have none."""
    model, calls = nn.Linear(3, 1), 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def loader() -> Iterator[Tensor]:
        for index in range(30):
            if index in (5, 25):
                gc.disable() if index == 5 else gc.enable()  # which may call what was left over by other tests
                sys.setprofile(count if index == 5 else None)
            yield torch.ones(2, 3)

    nn.init.ones_(model.weight)  # and no norm is so small that it is taken again
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4), lambda model, x: model(x).square().mean())
    if directory is not None:
        evaluator = create_evaluator(model, lambda model, x: model(x).mean())
        attach_defaults(trainer, directory=directory, evaluator=evaluator, every=49)  # without early points
    trainer.run(loader(), max_iters=30)
    return calls / 20


def test_an_update_between_two_lines_costs_few_calls(tmp_path: Path) -> None:
    """Six marks, one record that is kept, and one look at which handlers are due."""
    assert round(calls_of_an_update(tmp_path) - calls_of_an_update(None), 1) <= 8


# --- python -m ignite_train.plot ---


def test_curves_are_those_of_the_log(tmp_path: Path) -> None:
    """Updates and values; what is not finite is a gap; a line that is being written is left out."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 2, "epoch": 1, "train/loss": 0.5}\n{"update": 4, "train/loss": "nan"}\n{"update": 6, "tra')
    assert {*read_curves(tmp_path)} == {*read_curves(path)} == {"train/loss"}
    updates, losses = read_curves(tmp_path)["train/loss"]
    assert updates == [2, 4]
    assert losses[0] == 0.5
    assert losses[1] != losses[1]


@pytest.mark.parametrize(
    "note", ["# lowered", "", "3", '{"note": "lowered"}', '{"update": 5, "note": "lowered"}', "a\u2028b", "ü"]
)
def test_a_note_in_the_log_is_skipped(tmp_path: Path, note: str) -> None:
    """A resumed run keeps it too."""
    text = f'{note}\n{{"update": 2, "train/loss": 0.5}}\n{note}\n{{"update": 6, "train/loss": 0.3}}\n'
    (tmp_path / "metrics.jsonl").write_text(text, encoding="latin-1" if note == "ü" else "utf-8")
    assert read_curves(tmp_path) == {"train/loss": ([2, 6], [0.5, 0.3])}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_of_two_runs(tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Loss, learning rate, gradient norm and throughput, each run by its name."""
    for name in ("first", "second"):
        train(tmp_path / name, leave_out=("tensorboard", "progress"))
    output = tmp_path / f"curves.{ending}"
    assert main([str(tmp_path / "first"), str(tmp_path / "second"), "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}  loss, learning rate, gradient norm, samples per second\n"
    content = output.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(content) > 10_000
    assert main([str(tmp_path / "first")]) == 0
    assert (tmp_path / "first/curves.png").exists()


@pytest.mark.slow
def test_other_metrics_are_drawn_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By name or by group; one that the log does not have is named."""
    train(tmp_path, leave_out=("progress", "tensorboard"))
    assert main([str(tmp_path), "--metric", "speed/data_wait", "--metric", "validation", "--metric", "none"]) == 0
    assert capsys.readouterr().out.split()[1:] == ["speed/data_wait,", "validation"]
    assert main([str(tmp_path), "--metric", "none"]) == 1
    assert "must have one of the metrics none" in capsys.readouterr().err


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the status is 1."""
    (tmp_path / "metrics.jsonl").write_text('{"update": 2, "train/loss": 0.5}\n')
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install" in line


def test_what_is_drawn(tmp_path: Path) -> None:
    """Only the panels for which there is something; losses of training and validation in one."""
    curves = {"train/loss": ([1, 2], [2.0, 1.0]), "validation/loss": ([2], [1.5]), "train/accuracy": ([1], [0.5])}
    assert plot_runs({"run": curves}, tmp_path / "one.png") == ["loss"]
    with pytest.raises(ValueError, match="and have train/accuracy; attach TrainingMetrics"):
        plot_runs({"run": {"train/accuracy": ([1], [0.5])}}, tmp_path / "none.png")


class Drawn:
    """What stands in the figures that are saved, in place of their files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.figure: Any = None
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: setattr(self, "figure", figure))

    def panels(self) -> dict[str, Any]:
        """By title: place in the grid, scale, and of each line its label, colour, style, marker and points."""
        return {
            axes.get_title(): (
                axes.get_subplotspec().get_geometry()[:3],
                axes.get_yscale(),
                [
                    (line.get_label(), line.get_color(), line.get_linestyle(), line.get_marker(), [*line.get_xydata().tolist()])
                    for line in axes.get_lines()
                ],
            )
            for axes in self.figure.axes
        }


def test_what_stands_in_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel for each quantity, two beside one another; the norm on a logarithmic axis; a run has one colour."""
    drawn = Drawn(monkeypatch)
    first = {
        "train/loss": ([1, 2], [2.0, 1.0]),
        "validation/loss": ([2], [1.5]),
        "optimizer/grad_norm": ([1, 2], [3.0, 30.0]),
        "optimizer/learning_rate/0": ([1, 2], [0.1, 0.2]),
        "other/grad_norms": ([1], [1.0]),
    }
    second = {"train/loss": ([*range(20)], [1.0] * 20)}
    assert plot_runs({"a": first, "b": second}, tmp_path / "p.png") == ["loss", "learning rate", "gradient norm"]
    assert drawn.panels() == {
        "loss": (
            (2, 2, 0),
            "linear",
            [
                ("a: train/loss", "C0", "-", ".", [[1, 2], [2, 1]]),
                ("a: validation/loss", "C0", "--", ".", [[2, 1.5]]),
                ("b: train/loss", "C1", "-", "", [[update, 1] for update in range(20)]),
            ],
        ),
        "learning rate": (
            (2, 2, 1),
            "linear",
            [("a: optimizer/learning_rate/0", "C0", "-", ".", [[1, 0.1], [2, 0.2]])],
        ),
        "gradient norm": ((2, 2, 2), "log", [("a: optimizer/grad_norm", "C0", "-", ".", [[1, 3], [2, 30]])]),
    }
    assert drawn.figure.get_size_inches().tolist() == [12.8, 7.2]
    assert {axes.get_xlabel() for axes in drawn.figure.axes} == {"update"}
    assert all(axes.get_legend() is not None for axes in drawn.figure.axes)


def test_metrics_that_are_asked_for_have_their_own_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of norms with a logarithmic axis, a group with all of its metrics; a single run needs no name."""
    drawn = Drawn(monkeypatch)
    curves = {name: ([1], [1.0]) for name in ("layers/layer_grad_norm/0", "validation/loss", "validation/top", "validations")}
    titles = ["layers/layer_grad_norm", "validation"]
    assert plot_runs({"run": curves}, tmp_path / "p.png", titles) == titles
    found = {title: (place, scale, [line[:3] for line in lines]) for title, (place, scale, lines) in drawn.panels().items()}
    assert found == {
        "layers/layer_grad_norm": ((1, 2, 0), "log", [("layers/layer_grad_norm/0", "C0", "-")]),
        "validation": ((1, 2, 1), "linear", [("validation/loss", "C0", "-"), ("validation/top", "C0", "--")]),
    }


def test_the_picture_is_beside_the_first_log_or_where_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints where, and what is shown."""
    saved: list[Path] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, output, **__: saved.append(output))
    runs = [tmp_path / name for name in ("first", "second")]
    for run in runs:
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"update": 2, "train/loss": 0.5}\n')
    wanted = tmp_path / "both.svg"
    assert main([*map(str, runs), "--output", str(wanted)]) == main([*map(str, runs)]) == 0
    assert saved == [wanted, runs[0] / "curves.png"]
    assert capsys.readouterr().out.splitlines() == [f"{path}  loss" for path in saved]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "there is no"),
        ({}, "has no *.jsonl file; attach JsonLines"),
        ({"a.jsonl": "", "b.jsonl": ""}, "pass one of them: a.jsonl, b.jsonl"),
        ({"a.jsonl": "hello\n"}, "line 1 of"),
        ({"a.jsonl": '{"loss": 1}\n'}, "must be one that JsonLines writes"),
    ],
    ids=["nothing", "empty", "several", "text", "other"],
)
def test_what_cannot_be_drawn_is_said_in_one_line(
    tmp_path: Path, files: dict[str, str] | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the status is 1."""
    directory = tmp_path / "run"
    if files is not None:
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
    assert main([str(directory)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
