"""Seconds from the command to the end of a run of one update, each loop in a fresh process: the wait after each edit.

    python benchmarks/start.py

What an update needs is imported, the model is built, and one update is made; then the same with a checkpoint on the disk, and
with `torch.compile`. Each process says when it is done; the process which started it reads the clock. Graphs of inductor
are on the disk from the first round on, as for who runs a script for the second time.
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from interleaving import MIN_REPETITIONS, interleave, table
from start_loops import LOOPS, REFERENCE, TASKS

SCRIPT = Path(__file__).parent / "start_loops.py"


def seconds(name: str, task: str) -> float:
    """From the command to the end of the update, in a fresh process."""
    started = time.perf_counter()
    command = [sys.executable, str(SCRIPT), name, task]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101  # it is a pipe
        ended = next((time.perf_counter() for line in process.stdout if line.startswith("updated")), None)
        _, errors = process.communicate(timeout=120)
    if ended is None:
        raise RuntimeError(f"{name}, {task}: {errors[-2000:]}")
    return ended - started


def main(
    repetitions: Annotated[int, Option(min=1, help="Rounds; all loops run in each of them.")] = MIN_REPETITIONS,
    only: Annotated[str, Option(help="Tasks with this in their name.")] = "",
) -> None:
    """Measure how long each loop takes to start."""
    for number, task in enumerate(task for task in TASKS if only in task):
        rounds = interleave({name: partial(seconds, name, task) for name in LOOPS}, repetitions=repetitions, bracket=False)
        rows = [[name, f"{rounds.typical(name):.2f}", rounds.ratios(name).show()] for name in LOOPS if name != REFERENCE]
        print(f"{chr(10) * bool(number)}{task.capitalize()}: by hand it takes {rounds.typical(REFERENCE):.2f} s.\n")
        print(table(["loop", "seconds", "ratio to the loop by hand (quartiles)"], rows), flush=True)


if __name__ == "__main__":
    typer.run(main)
