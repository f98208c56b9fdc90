"""Measures on one GPU and writes results-gpu.md beside this file, part by part. Nothing else writes it.

    python benchmarks/gpu.py --minutes 29                                     # all parts
    python benchmarks/gpu.py --part speed --part trace --minutes 9 --into OUT # some; the other sections stay as they are
    python benchmarks/gpu.py --take OUT                                       # puts what was written elsewhere into its place
    python benchmarks/gpu.py --dry-run --into OUT                             # everything on the CPU, tiny: shows that it runs

Each part is a script with processes of its own. What it prints is in the file as soon as it is printed, so that a machine that
is taken away leaves what was measured until then. The time is divided among the parts that are asked for; what one leaves of
its share the next ones have.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from typer import Option

from card import DRY_RUN, card
from write_results import HERE, circumstances, sections_of

FILE, PICTURE = "results-gpu.md", "gpu_trace.png"
PICTURES = HERE.parent / "docs/pictures"
CUT_OFF = "\nThis part was cut off here.\n"
SLACK = 45.0  # seconds that a part may take longer than it was given
READING = (
    "Ratios are to the loop by hand in the same run, in interleaved rounds; median (first to third quartile). Look at the line "
    '"once more (the noise)" before reading anything into a difference. A loop that failed says so in its row.'
)


@dataclass(frozen=True)
class Part:
    """A script, its heading, its options on a GPU and in a dry run, and its share of the time."""

    script: str
    heading: str
    options: tuple[str, ...]
    dry: tuple[str, ...]
    share: float


SIZES = ("--parameters", "10", "--parameters", "100", "--parameters", "1000")
PARTS = {
    "update": Part("gpu_update.py", "One loop at a time", (), ("--dry-run",), 2),
    "speed": Part(
        "gpu_speed.py",
        "Training at GPT-2's size",
        ("--compiled", "without"),
        ("--dry-run", "--compiled", "without", "--accumulation", "1", "--accumulation", "4"),
        7,
    ),
    "compiled": Part(
        "gpu_speed.py",
        "Training at GPT-2's size, compiled",
        ("--compiled", "with"),
        ("--dry-run", "--compiled", "with", "--accumulation", "1"),
        8,
    ),
    "tiny": Part("gpu_tiny.py", "Tiny models", (), ("--dry-run", "--network", "MLP of width 64"), 4.5),
    "optimizer": Part(
        "optimizer_phase.py",
        "Optimizer phase",
        ("--device", "cuda", *SIZES, "--tensors", "192"),
        ("--parameters", "1", "--tensors", "16", "--repetitions", "1"),
        1.5,
    ),
    "saving": Part(
        "checkpoint.py",
        "Saving",
        ("--device", "cuda", "--megabytes", "1000", "--megabytes", "10000", "--megabytes", "4000"),
        ("--megabytes", "8", "--megabytes", "12", "--repetitions", "1"),
        5,
    ),
    "trace": Part("gpu_trace.py", "What host and device do", (), ("--dry-run",), 4),
}


def run(part: Part, into: Path, minutes: float, *, dry_run: bool) -> bool:
    """Runs the script of a part for so many minutes and keeps its section up to date; whether it ran to the end."""
    options = [*(part.dry if dry_run else part.options), "--minutes", f"{minutes:.2f}"]
    if part.script == "gpu_trace.py":
        options += (
            ["--picture", str(PICTURES / PICTURE)] if into == HERE else ["--picture", str(into / PICTURE), "--keep", str(into)]
        )
    text = f"## {part.heading}\n\n`benchmarks/{part.script}`. Written by `make bench-gpu` {circumstances()}; {card()}.\n\n"
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(HERE / part.script), *options]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True) as process:
        timer = threading.Timer(60 * minutes + SLACK, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        assert process.stdout is not None  # noqa: S101  # it is a pipe
        for line in process.stdout:
            text += line
            write(into, {part.heading: text + CUT_OFF})  # replaced when the part has ended
        status = process.wait()
        timer.cancel()
    took = f"{time.perf_counter() - started:.0f} s"
    print(f"{part.script}: {took}, status {status}", file=sys.stderr, flush=True)
    if status:
        text = f"{text.rstrip()}\n\n`{part.script}` ended with status {status} after {took}: what is above is all.\n"
    write(into, {part.heading: text})
    return status == 0


def write(into: Path, sections: dict[str, str]) -> None:
    """Replaces these sections. Those that a folder does not have are taken from the file of figures that is there already."""
    into.mkdir(parents=True, exist_ok=True)
    known = sections_of(HERE / FILE) | sections_of(into / FILE) | sections
    ordered = [known[part.heading].rstrip() + "\n" for part in PARTS.values() if part.heading in known]
    new = into / f"{FILE}.new"
    new.write_text("\n".join([f"# Benchmarks on a GPU\n\n{READING}\n", *ordered]), encoding="utf-8")
    new.replace(into / FILE)


def take(folder: Path) -> None:
    """Puts the sections and the picture of a folder into their places.

    Raises:
        typer.BadParameter: they are those of a dry run, or there is nothing.
    """
    sections = sections_of(folder / FILE)
    if not sections or any(DRY_RUN in text for text in sections.values()):
        raise typer.BadParameter(f"--take must name a folder with figures of a GPU, got {str(folder)!r}")
    write(HERE, sections)
    if (folder / PICTURE).exists():
        PICTURES.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / PICTURE, PICTURES / PICTURE)


def main(
    part: Annotated[list[str], Option(help=f"Some of {', '.join(PARTS)}; may be given several times.")] = list(PARTS),  # noqa: B006
    into: Annotated[Path, Option(help="Folder for the file, the picture and two traces.")] = HERE,
    minutes: Annotated[float, Option(help="For all of these parts together; each ends in its share.")] = 29.0,
    taken: Annotated[Path | None, Option("--take", help="A folder that this command has written into elsewhere.")] = None,
    *,
    dry_run: Annotated[bool, Option("--dry-run", help="On the CPU, tiny: the figures mean nothing.")] = False,
) -> None:
    """Measure on one GPU and write the figures."""
    unknown = {*part} - {*PARTS}
    if unknown:
        raise typer.BadParameter(f"--part must be one of {', '.join(PARTS)}, got {sorted(unknown)[0]!r}")
    if taken is not None:
        take(taken)
        return
    if dry_run and into.resolve() == HERE.resolve():
        raise typer.BadParameter("--dry-run needs --into: its figures are not to be published")
    if not torch.cuda.is_available() and not dry_run:
        print("No CUDA device here: nothing is measured.")
        return
    ends = time.perf_counter() + 60 * minutes
    succeeded, left = True, [PARTS[name] for name in PARTS if name in part]
    while left:
        given = (ends - time.perf_counter()) / 60 * left[0].share / sum(one.share for one in left)
        succeeded = run(left.pop(0), into.resolve(), max(0.1, given), dry_run=dry_run) and succeeded
    if not succeeded:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
