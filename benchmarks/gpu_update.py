"""Loops alone on one GPU, one after the other: time of an update, kernels, launches, and waits of the host.

    python benchmarks/gpu_update.py
    python benchmarks/gpu_update.py --dry-run      # on the CPU at a tiny size: shows that it runs, measures nothing

The quickest look at a card: each loop takes some seconds, in a process of its own, one after the other. An update is timed in
blocks, all of which are shown, so that what is only the beginning can be seen. Blocks of one process are closer to each other
than those of two: for a comparison take `gpu_speed.py` and `gpu_tiny.py`, in which loops take turns.
"""

import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Annotated, Any

import typer
from typer import Option

import contestants
from card import card, now, profiler, settle, stop_profiler
from contestants import REFERENCE, WITHOUT_FAST
from gpt2 import VOCABULARY, Training
from gpu_speed import DEFAULTS, UPDATE
from gpu_tiny import ENTRIES, TinyTraining
from interleaving import table
from own_process import one_after_the_other
from turns import Entry, Task

LARGE = {
    REFERENCE: Entry(contestants.by_hand),
    "ignite_train": Entry(contestants.ignite_train),
    DEFAULTS: Entry(contestants.ignite_train_with_defaults),
    f"ignite_train, {WITHOUT_FAST}": Entry(partial(contestants.ignite_train, fast=False)),
}
# At GPT-2's size an update that is compiled as a whole compiles for minutes.
SMALL = LARGE | {name: ENTRIES[name] for name in ENTRIES if "reduce-overhead" in name or name == UPDATE}
BLOCKS, PROFILED = 4, 3
SECONDS = 150.0  # to wait for a loop, which may have to compile
HEAD = ["loop", "an update, by blocks", "kernels", "launches", "CUDA graphs", "waits of the host"]
LAUNCHES, WAITS = ("cudaLaunchKernel", "cudaLaunchKernelExC"), ("cudaEventSynchronize", "cudaStreamSynchronize")


class Blocks:
    """A sized loader that times blocks of updates, and then profiles some.

    Args:
        batches: what to give, over and over.
        task: has the device, and the number of micro-batches to an update.
        updates: in a block.
    """

    def __init__(self, batches: list[Any], task: Task, updates: int) -> None:
        self._batches, self._task, self._updates = batches, task, updates
        self._first = max(6, updates // 4)
        self._profiler = profiler(task.device)
        self.seconds: list[float] = []

    def __len__(self) -> int:
        return (self._first + BLOCKS * self._updates + PROFILED + 2) * self._task.steps

    def __iter__(self) -> Iterator[Any]:
        started, end = 0.0, self._first + BLOCKS * self._updates
        for index in range(len(self)):
            update, place = divmod(index, self._task.steps)
            if place == 0 and self._first <= update <= end and (update - self._first) % self._updates == 0:
                moment = now(self._task.device)
                if update > self._first:
                    self.seconds.append((moment - started) / self._updates)
                started = moment
            if place == 0 and update == end:
                self._profiler.start()  # an update for nothing: of the first that is profiled a part is missing
            if place == 0 and update == end + 1:
                stop_profiler(self._profiler, self._task.device)
                self._profiler = profiler(self._task.device)
                self._profiler.start()
            if place == 0 and update == end + 1 + PROFILED:
                stop_profiler(self._profiler, self._task.device)
            yield self._batches[index % len(self._batches)]

    def numbers(self) -> list[float]:
        """Kernels, launches, launches of graphs, and waits of the host, for an update."""
        events = self._profiler.profiler.kineto_results.events()
        names = Counter(event.name() for event in events if event.name().startswith("cuda"))
        on_device = [event for event in events if "CUDA" in str(event.device_type()) and "#" not in event.name()]
        counts = [len(on_device), sum(names[name] for name in LAUNCHES), names["cudaGraphLaunch"]]
        return [count / PROFILED for count in (*counts, sum(names[name] for name in WAITS))]


def watch(connection: Connection, entry: Entry, task: Task, updates: int) -> None:
    """Waits for a message, trains, and answers with the seconds of each block and the numbers."""
    settle(task.device)
    connection.recv()
    work = task.work(entry.compiled)
    work.micro_batches = blocks = Blocks(work.micro_batches, task, updates)
    contestants.run(entry.run, work)
    connection.send((blocks.seconds, blocks.numbers()))


def rows(everyone: dict[str, Entry], task: Task, updates: int, until: float) -> list[list[str]]:
    """The lines of a table. All processes are there from the beginning, and work one after the other."""
    found: list[list[str]] = []
    arguments = {name: (entry, task, updates) for name, entry in everyone.items()}
    for name, answer in one_after_the_other(watch, arguments, until=until, timeout=SECONDS):
        if isinstance(answer, str):
            found.append([name, answer, *[""] * (len(HEAD) - 2)])
            continue
        seconds, numbers = answer
        blocks = ", ".join(f"{second * 1e3:.3g}" for second in seconds)
        found.append([name, f"{blocks} ms", *(f"{number:.1f}" for number in numbers)])
    return found


def main(
    accumulation: Annotated[int, Option(min=1, help="Micro-batches to an update.")] = 1,
    minutes: Annotated[float, Option(help="When they are over no further loop begins.")] = 3.0,
    *,
    dry_run: Annotated[bool, Option("--dry-run", help="On the CPU, tiny: the figures mean nothing.")] = False,
) -> None:
    """Look at loops alone on one GPU."""
    until = time.perf_counter() + 60 * minutes
    size = (2, 64, 16, 2, 128, "cpu") if dry_run else (12, 768, 1024, 8, VOCABULARY, "cuda")
    tasks: list[tuple[Task, dict[str, Entry], int]] = [
        (TinyTraining("MLP of width 64", size[-1], accumulation), SMALL, 4 if dry_run else 200),
        (Training(*size, accumulation), LARGE, 2 if dry_run else 20),
    ]
    print(f"{card()}.")
    for task, everyone, updates in tasks:
        print(f"\n{task}; blocks of {updates} updates:\n\n{table(HEAD, rows(everyone, task, updates, until))}", flush=True)


if __name__ == "__main__":
    typer.run(main)
