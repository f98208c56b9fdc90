"""What the host and the GPU do in an update of each loop: waits, the order of step and reading, copies, idle time; a picture.

    python benchmarks/gpu_trace.py --picture trace.png
    python benchmarks/gpu_trace.py --dry-run      # on the CPU at a tiny size: shows that it runs, measures nothing

First GPT-2's shapes in bf16, not compiled. Each token comes with features of the width of the model in the host's pinned
memory, so that a micro-batch has 25 MB to copy. The loop by hand, Ignite's and those of Accelerate and Transformers move it
where they use it, without waiting. Then the contestants of `gpu_tiny.py` on one network.

- GPU busy: how long at least one kernel or copy runs in an update. The profiler does not change it, so what an update takes
  without the profiler, in `gpu_speed.py` and `gpu_tiny.py`, less this is how long the GPU is idle there.
- Launches: calls of the host that launch a kernel or a CUDA graph; how many of them a graph.
- Waits, debug mode: what `torch.cuda.set_sync_debug_mode("warn")` warns of in an update. It does not see waits for an event.
- Waits, trace: calls of CUDA in which the host waits, from torch's profiler; and the part of the time in which it does.
- Step before reading: updates in which all of the optimizer's step was queued before the host began its last wait.
- Copied beside kernels: the part of the time of copies to the device in which a kernel ran on another stream.
- Idle: the part of the time in which the GPU does nothing: between the kernels of two updates, to the time of an update; in
  the optimizer phase, from the end of backward to the end of the step; and in all. While torch's profiler runs the host takes
  longer, so that times beside each other mean something, and others do not.
"""

import gzip
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.profiler import record_function
from typer import Option

import contestants
import peers
from card import WaitWarnings, card, profiler, settle, stop_profiler
from contestants import REFERENCE, Work
from gpt2 import BATCHES, VOCABULARY, Training, loss_of
from gpu_tiny import ENTRIES, TinyTraining
from interleaving import table
from own_process import one_after_the_other
from trace_analysis import MARK, Findings, Trace, findings
from trace_picture import draw
from turns import Entry, Task

OURS = "ignite_train"
LARGE = {
    REFERENCE: Entry(contestants.by_hand),
    OURS: Entry(contestants.ignite_train),
    "ignite_train, attach_defaults, logging every 50": Entry(contestants.ignite_train_with_defaults),
    **{name: Entry(peer) for name, peer in peers.PEERS.items()},
}
SMALL = {name: entry for name, entry in ENTRIES.items() if "noise" not in name}
DRAWN = (REFERENCE, OURS)
LINK = "../docs/pictures/gpu_trace.png"  # from the file of the figures
WARM_UP, WATCHED, PROFILED = 6, 3, 3  # updates
SECONDS = 150.0  # to wait for a contestant, which may have to compile
HEAD = [
    "loop",
    "ms an update",
    "GPU busy, ms",
    "launches (graphs)",
    "waits an update, debug mode",
    "waits an update, trace",
    "of the time",
    "step before reading",
    "copied beside kernels",
    "idle between updates",
    "idle in the optimizer phase",
    "idle in all",
]


# --- in the process of a contestant -----------------------------------------------------------------------------------------


class WatchedMicroBatches:
    """A sized loader that counts waits over some updates, and profiles others.

    Args:
        batches: what to give, over and over.
        steps: micro-batches to an update.
        device: where they are trained on.
        file: for the trace.
    """

    def __init__(self, batches: list[Any], *, steps: int, device: str, file: Path) -> None:
        self._batches, self._steps, self._device, self._file = batches, steps, device, file
        self._warnings, self._profiler = WaitWarnings(device), profiler(device)
        self.waits = math.nan

    def __len__(self) -> int:
        return (WARM_UP + WATCHED + 1 + PROFILED + 2) * self._steps

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            if index % self._steps == 0:
                self._between_updates(index // self._steps - WARM_UP)
            yield self._batches[index % len(self._batches)]

    def _between_updates(self, update: int) -> None:
        if update == 0:
            self._warnings.start()
        if update == WATCHED:
            self.waits = self._warnings.stop() / WATCHED
            self._profiler.start()  # an update for nothing: the first time takes long
        if update == WATCHED + 1:
            stop_profiler(self._profiler, self._device)
            self._profiler = profiler(self._device)
            self._profiler.start()
        if WATCHED + 1 <= update <= WATCHED + 1 + PROFILED:
            with record_function(MARK):
                pass
        if update == WATCHED + 1 + PROFILED:
            stop_profiler(self._profiler, self._device)
            self._profiler.export_chrome_trace(str(self._file))


def moved_loss(model: nn.Module, micro_batch: tuple[Tensor, ...], *, device: str) -> Tensor:
    """For loops that leave it to their user to move micro-batches."""
    return loss_of(model, tuple(tensor.to(device, non_blocking=True) for tensor in micro_batch), "mean")


@dataclass(frozen=True)
class HostTraining(Training):
    """With micro-batches in the host's memory: tokens, and features of each of them."""

    def work(self, compiled: Mapping[str, Any] | None) -> Work:
        """The same as on the device otherwise."""
        work = super().work(compiled)
        size = (self.samples, self.context, self.width)
        batches = [(self.tokens(), torch.randn(size)) for _ in range(BATCHES)]
        if self.device == "cuda":
            batches = [(tokens.pin_memory(), features.pin_memory()) for tokens, features in batches]
        work.micro_batches, work.mean_loss = batches, partial(moved_loss, device=self.device)
        return work


@dataclass(frozen=True)
class Seen:
    """What was seen of a contestant."""

    waits: float
    findings: Findings
    trace: Trace


def watch(connection: Connection, entry: Entry, task: Task, keep: Path | None) -> None:
    """Waits for a message, trains, and answers with what was seen."""
    settle(task.device)
    connection.recv()
    work = task.work(entry.compiled)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "trace.json"
        watched = WatchedMicroBatches(work.micro_batches, steps=task.steps, device=task.device, file=file)
        work.micro_batches = watched
        contestants.run(entry.run, work)
        text = file.read_text(encoding="utf-8")
    if keep is not None:
        with gzip.open(keep, "wt", encoding="utf-8") as kept:
            kept.write(text)
    events = json.loads(text)["traceEvents"]
    trace = Trace.of(as_if_on_device(events) if task.device == "cpu" else events)
    connection.send(Seen(watched.waits, findings(trace), trace))


def as_if_on_device(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The operators of a CPU as if a device had run them a little later: a dry run is to go through all that reads a trace."""
    made: list[dict[str, Any]] = []
    for number, event in enumerate(event for event in events if event.get("cat") == "cpu_op"):
        arguments = {"correlation": number, "stream": 7, "bytes": 2**21}
        name = "cudaStreamSynchronize" if "local_scalar" in event["name"] else "cudaLaunchKernel"
        made.append({**event, "cat": "cuda_runtime", "name": name, "dur": 1, "args": arguments})
        if name == "cudaLaunchKernel":
            is_copy = event["name"] == "aten::copy_"
            named = {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)"} if is_copy else {"cat": "kernel"}
            made.append({**event, **named, "ts": float(event["ts"]) + 50, "args": {**arguments, "stream": 7 + 6 * is_copy}})
    return [*events, *made]


# --- in the process that shows ----------------------------------------------------------------------------------------------


def compare(entries: dict[str, Entry], task: Task, until: float, keep: Path | None) -> tuple[str, dict[str, Trace]]:
    """The table of all contestants, and the traces of those that are drawn, which are also kept in a folder if one is given."""
    rows, traces = list[list[str]](), dict[str, Trace]()
    arguments = dict[str, tuple[Any, ...]]()
    for name, entry in entries.items():
        kept = keep / f"trace_{name.replace(' ', '_')}.json.gz" if keep is not None and name in DRAWN else None
        arguments[name] = (entry, task, kept)
    for name, seen in one_after_the_other(watch, arguments, until=until, timeout=SECONDS):
        if isinstance(seen, str):
            rows.append([name, seen, *[""] * (len(HEAD) - 2)])
            continue
        rows.append(row(name, seen))
        if name in DRAWN:
            traces[name] = seen.trace
    return table(HEAD, rows), traces


def row(name: str, seen: Seen) -> list[str]:
    """A line of the table."""
    found = seen.findings
    waits = ", ".join(f"{times:g} {name}" for name, times in sorted(found.waits.items())) or "0"
    order = f"{found.queued} of {found.stepped}" if found.stepped else "-"
    parts = [found.copied_beside, found.idle_between, found.idle_in_step, found.idle]
    shown = ["-" if math.isnan(part) else f"{part:.1%}" for part in parts]
    launches = f"{found.launches:.0f} ({found.graphs:g})"
    times = [f"{time:.3g}" for time in (found.milliseconds, found.busy_milliseconds)]
    return [name, *times, launches, f"{seen.waits:g}", waits, f"{found.waited:.1%}", order, *shown]


def main(
    samples: Annotated[int, Option(min=1, help="In a micro-batch.")] = 8,
    steps: Annotated[int, Option(min=1, help="Micro-batches to an update.")] = 4,
    network: Annotated[str, Option(help="A name in compiled.py.")] = "MLP of width 64",
    minutes: Annotated[float, Option(help="When they are over no further contestant begins.")] = 4.0,
    only: Annotated[str, Option(help="Contestants with this in their name; the reference is always there.")] = "",
    picture: Annotated[Path | None, Option(help="A PNG of the traces by hand and of this library.")] = None,
    keep: Annotated[Path | None, Option(help="Folder for the traces of these two, compressed.")] = None,
    *,
    dry_run: Annotated[bool, Option("--dry-run", help="On the CPU, tiny: the figures mean nothing.")] = False,
) -> None:
    """Profile updates on one GPU."""
    started = time.perf_counter()
    size = (2, 64, 16, 2, 128, "cpu") if dry_run else (12, 768, 1024, samples, VOCABULARY, "cuda")
    tasks: list[tuple[Task, dict[str, Entry], Path | None]] = [
        (HostTraining(*size, steps), LARGE, keep),
        (TinyTraining(network, size[-1], 1), SMALL, None),
    ]
    print(f"{card()}.")
    for number, (task, everyone, folder) in enumerate(tasks, start=1):
        until = started + 60 * minutes * number / len(tasks)
        entries = {name: entry for name, entry in everyone.items() if only in name or name == REFERENCE}
        shown, traces = compare(entries, task, until, folder)
        print(f"\n{task}:\n\n{shown}", flush=True)
        if picture is not None and task is tasks[0][0] and traces:
            draw(traces, picture)
            print(f"\n![Two updates, by stream]({LINK})", flush=True)


if __name__ == "__main__":
    typer.run(main)
