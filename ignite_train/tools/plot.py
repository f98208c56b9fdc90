"""Draws the metrics of runs: `python -m ignite_train.plot RUN_DIR [RUN_DIR ...]`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ignite_train.arguments import path_of, path_on_command_line

__all__ = ["main", "plot_runs", "read_curves"]

Curve = tuple[list[int], list[float]]
"""Updates, and the value at each; NaN where it is not finite, which is drawn as a gap."""


class _Panel(NamedTuple):
    """A plot: its title, the names of its metrics, and whether its axis is logarithmic."""

    title: str
    names: tuple[str, ...]
    is_logarithmic: bool = False


_PANELS = (
    _Panel("loss", ("/loss",)),
    _Panel("learning rate", ("optimizer/learning_rate",)),
    _Panel("gradient norm", ("optimizer/grad_norm", "optimizer/grad_norm_max"), is_logarithmic=True),
    _Panel("samples per second", ("speed/samples_per_second",)),
)


def read_curves(run: str | Path) -> dict[str, Curve]:
    """Reads the log that `JsonLines` has written.

    Args:
        run: the file, or the directory of the run, with one `*.jsonl` in it.

    Returns:
        A curve for each metric, by its grouped name. Lines that `JsonLines` has not written, such as notes of yours, are
        left out, and so is a last line that is not whole, because it is being written.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the directory has several, or no line is one of `JsonLines`.
    """
    path = _log_of(path_of("run", run))
    curves: dict[str, Curve] = {}
    unread = ""
    whole_lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    for number, line in enumerate(whole_lines, start=1):
        try:
            entries = json.loads(line)
            update = int(entries.pop("update"))
            values = {name: _number(value) for name, value in entries.items() if name != "epoch"}
        except (ValueError, TypeError, KeyError, AttributeError):
            unread = unread or f"line {number} of {path} must be one that JsonLines writes, got {line.strip():.60}"
            continue
        for name, value in values.items():
            if value is None:
                continue
            updates, points = curves.setdefault(name, ([], []))
            updates.append(update)
            points.append(value if math.isfinite(value) else math.nan)
    if unread and not curves:
        raise ValueError(unread)
    return curves


def _number(value: Any) -> float | None:
    """The value as a number; None for a note in a line of numbers."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def plot_runs(runs: Mapping[str, Mapping[str, Curve]], output: str | Path, metrics: Sequence[str] | None = None) -> list[str]:
    """Draws loss, learning rate, gradient norm and throughput of runs over the update, each run in its own colour.

    Args:
        runs: the curves of each run by its label; see `read_curves`.
        output: the picture; its ending, such as `.png` or `.svg`, says its format.
        metrics: grouped names of metrics, or groups such as `"validation"`, that are drawn instead, each in a panel.

    Returns:
        The titles of the panels, which are those for which there is a curve.

    Raises:
        ValueError: no run has a curve to draw, or the format is unknown.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wanted = _PANELS if metrics is None else [_Panel(name, (name,), is_logarithmic="norm" in name) for name in metrics]
    panels = [panel for panel in wanted if any(True for curves in runs.values() for _ in _drawn(panel, curves))]
    if not panels:
        known = ", ".join(name for panel in wanted for name in panel.names)
        there = ", ".join({name: None for curves in runs.values() for name in curves}) or "nothing"
        raise ValueError(
            f"the logs must have one of the metrics {known}, and have {there:.500}; attach TrainingMetrics to the run"
        )
    columns = min(2, len(panels))
    figure = Figure(figsize=(6.4 * columns, 3.6 * math.ceil(len(panels) / columns)), layout="constrained")
    FigureCanvasAgg(figure)
    for index, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(math.ceil(len(panels) / columns), columns, index)
        for colour, (label, curves) in enumerate(runs.items()):
            _draw(axes, panel, curves, f"C{colour}", label if len(runs) > 1 else "")
        axes.set(title=panel.title, xlabel="update", yscale="log" if panel.is_logarithmic else "linear")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path_of("output", output), dpi=120)
    return [panel.title for panel in panels]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the status with which it ends: 0, or 1 after one line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m ignite_train.plot", description=(__doc__ or "").partition("\n")[0])
    path = path_on_command_line
    parser.add_argument("run", nargs="+", type=path, help="directory of a run with the file that JsonLines wrote, or that file")
    parser.add_argument("--output", type=path, help="the picture, .png or .svg; without it curves.png beside the first log")
    parser.add_argument(
        "--metric",
        action="append",
        help="a metric or a group, such as speed/data_wait or validation, drawn instead of the usual ones; may be given again",
    )
    given = parser.parse_args(arguments)
    try:
        output = given.output or _log_of(given.run[0]).parent / "curves.png"
        runs = {str(run): read_curves(run) for run in given.run}
        titles = plot_runs(runs, output, given.metric)
    except ImportError:
        print("drawing needs matplotlib; pip install matplotlib", file=sys.stderr)  # noqa: T201
        return 1
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(f"{output}  {', '.join(titles)}")  # noqa: T201
    return 0


def _log_of(run: Path) -> Path:
    if not run.is_dir():
        if run.exists():
            return run
        raise FileNotFoundError(f"there is no {run}; pass the directory of a run, or the file that JsonLines wrote")
    found = sorted(run.glob("*.jsonl"))
    if not found:
        raise FileNotFoundError(f"{run} has no *.jsonl file; attach JsonLines, or attach_defaults, to the run")
    if len(found) > 1:
        raise ValueError(f"{run} has {len(found)} *.jsonl files; pass one of them: {', '.join(path.name for path in found)}")
    return found[0]


def _drawn(panel: _Panel, curves: Mapping[str, Curve]) -> Iterator[str]:
    """The metrics of a run that a panel shows."""
    for name in curves:
        for wanted in panel.names:
            if name == wanted or name.startswith(f"{wanted}/") or (wanted.startswith("/") and name.endswith(wanted)):
                yield name
                break


def _draw(axes: Any, panel: _Panel, curves: Mapping[str, Curve], colour: str, run: str) -> None:
    """Draws one run: its first metric with a full line, the others with dashes and dots."""
    for style, name in zip(("-", "--", ":", "-.") * len(curves), _drawn(panel, curves), strict=False):
        updates, points = curves[name]
        label = f"{run}: {name}" if run else name
        axes.plot(updates, points, style, color=colour, label=label, marker="." if len(updates) < 20 else "")
