"""A picture of traces: what each stream of the device did over two updates, and when the host launched it and waited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from trace_analysis import Span, Trace, is_step

COLOURS = {
    "forward, and the rest of the main thread": "#4477aa",
    "backward": "#66ccee",
    "the optimizer's step": "#ee6677",
    "copy": "#228833",
    "launched by the host": "#888888",
    "the host waits": "#ccbb44",
}
FORWARD, BACKWARD, STEP, COPY, LAUNCH, WAIT = COLOURS
ZOOM = 0.06  # of an update, around the beginning of the second one
WIDTH, HEIGHT_OF_ROW, DOTS = 15.0, 0.55, 110


def draw(traces: dict[str, Trace], path: Path) -> None:
    """Draws two updates of each trace, and beside them what is around the border between the two, as a PNG."""
    rows = {name: lanes(trace) for name, trace in traces.items()}
    heights = [1 + len(found) for found in rows.values()]
    figure = Figure(figsize=(WIDTH, 1 + HEIGHT_OF_ROW * sum(heights)), layout="constrained")
    axes = figure.subplots(len(rows), 2, squeeze=False, width_ratios=[2, 1], height_ratios=heights)
    for (name, found), (whole, near) in zip(rows.items(), axes, strict=True):
        marks = traces[name].marks[:3]
        for ax in (whole, near):
            _fill(ax, found, marks)
        length = marks[1] - marks[0]
        whole.set_xlim(-0.01 * length / 1000, (marks[-1] - marks[0] + 0.01 * length) / 1000)
        near.set_xlim((1 - ZOOM / 2) * length / 1000, (1 + ZOOM / 2) * length / 1000)
        whole.set_title(name, loc="left")
        near.set_title("around the beginning of the second update", loc="left")
        near.set_yticklabels([])
    for ax in axes[-1]:
        ax.set_xlabel("ms")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()], loc="outside lower center", ncols=6
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS)


def lanes(trace: Trace) -> dict[str, list[tuple[str, Span]]]:
    """The rows of the first two updates from bottom to top, and in each what there is, with the name of its colour."""
    trace = trace.between(trace.marks[0], trace.marks[: 2 + 1][-1])
    main = next((one.thread for one in trace.device if is_step(one)), None)
    found: dict[str, list[tuple[str, Span]]] = {f"stream {one}": [] for one in sorted({one.stream for one in trace.device})}
    for one in trace.device:
        name = BACKWARD if main is not None and one.thread not in (main, None) else FORWARD
        if one.category != "kernel":
            name = COPY
        elif is_step(one):
            name = STEP
        found[f"stream {one.stream}"].append((name, one.span))
    waits = [(WAIT, span) for span in trace.waits]
    return found | {"host waits": waits, "host launches": [(LAUNCH, span) for span in trace.launches]}


def _fill(ax: Any, rows: dict[str, list[tuple[str, Span]]], marks: list[float]) -> None:
    """Draws the rows, in milliseconds since the first mark."""
    for y, row in enumerate(rows.values()):
        for name, colour in COLOURS.items():
            spans = [((span.begin - marks[0]) / 1000, (span.end - span.begin) / 1000) for kind, span in row if kind == name]
            ax.broken_barh(spans, (y + 0.1, 0.8), facecolors=colour)
    for mark in marks:
        ax.axvline((mark - marks[0]) / 1000, color="black", linewidth=0.8)
    ax.set_yticks([y + 0.5 for y in range(len(rows))], list(rows))
