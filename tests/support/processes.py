"""Processes, one a rank, that a test starts, watches and ends, and what they write to standard error."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

# For anything that ends by itself within seconds. Only what hangs takes so long, so it allows for a machine that others slow
# down to a tenth of its speed. The limit of pytest for a whole test is longer, see pyproject.toml.
DEADLINE_SECONDS = 600.0

# Processes that are started from here say where their threads were when they crashed.
os.environ["PYTHONFAULTHANDLER"] = "1"

# Has imported what most tests import, so that every process of it is there in milliseconds. A session has one such server, and
# what it has imported is settled when it starts: so the list stands in one place.
forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(
    [
        *(
            "torch",
            "torch._dynamo",
            "torch.optim",
            "torch.nn.parallel",
            "torch.utils.tensorboard",
            "torchdata.stateful_dataloader",
        ),
        *("hypothesis", "hypothesis.strategies", "pytest", "ignite.distributed", "ignite_train.handlers"),
    ]
)


class Processes:
    """Run from the beginning of a `with` to its end, at which none is left over; an error in it has what they wrote as a note.

    Args:
        processes: in rank order, not started yet.
        written: the files to which each sends its standard error.
    """

    def __init__(self, processes: list[BaseProcess], written: list[Path]) -> None:
        self.processes, self._written = processes, written

    def __enter__(self) -> Self:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        if error is not None:
            error.add_note(self.stderr())

    def stderr(self, *ranks: int) -> str:
        """What these have written, or all of them."""
        paths = [self._written[rank] for rank in ranks or range(len(self._written))]
        return "\n".join(f"--- {path.name} ---\n{path.read_text()}" for path in paths if path.exists())

    def send(self, number: signal.Signals, *to: int) -> None:
        for rank in to:
            os.kill(self.processes[rank].pid or 0, number)
