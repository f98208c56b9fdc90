"""How long a save holds the run, and how long until it is durable, beside one copy of the state and other ways to save.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --device cuda --megabytes 1000 --megabytes 10000 --minutes 5

The state is that of AdamW: parameters and two moments. What holds the run is compared with one copy of the state into memory
that is there already, before and after. What passes until the state is durable is compared with the disk's own limit: a plain
write of the same bytes and an fsync, in the same round. A contestant that is durable at once holds the run until then. Files
are removed outside of what is measured; `Checkpoint` removes its own, and saves once more meanwhile. On a GPU the copy is one
into pinned memory of the host, and the host waits for the GPU before each reading of the clock.

The copy is made several times, so a small state and the memory that it is copied to are in the processor's cache by then. A
save does not find that memory in the cache, since an update came before: a row of its own has one copy right after an update.

Then updates of a small model are timed alone and beside a save of a state of that size, in turns.
"""

import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed.checkpoint as dcp
import typer
from ignite.engine import Events
from torch import nn
from typer import Option

from card import now, wait_for
from ignite_train import ForwardOutput, Trainer, create_trainer
from ignite_train.handlers import Checkpoint
from interleaving import MIN_REPETITIONS, Spread, interleave, table

Timing = tuple[float, float]  # seconds: held, and until durable, NaN for what is never
MATRIX = 1024
COPY, AFTER_UPDATE = "one copy in memory", "one copy right after an update, to memory in no cache"
PLAIN, OURS = "plain write + fsync", "Checkpoint"
CHUNK_BYTES, PROBE_BYTES, CACHES_BYTES = 16 * 2**20, 2**28, 2**28
LEAST_WRITES = 20  # of the state, with all that is around them: two rounds, and three saves beside updates


def trained(megabytes: float, device: str) -> tuple[nn.Module, torch.optim.Optimizer, Trainer]:
    """A trainer whose model and moments take so many megabytes, and have been moved once."""
    count = max(1, round(megabytes * 1e6 / (3 * 4 * MATRIX * MATRIX)))
    model = nn.ParameterList([nn.Parameter(torch.randn(MATRIX, MATRIX, device=device)) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def forward(model: nn.Module, _micro_batch: Any) -> ForwardOutput:
        return ForwardOutput(sum(parameter.sum() for parameter in model.parameters()), 1)

    return model, optimizer, create_trainer(model, optimizer, forward)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of the state."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.parameters(), *moments]


def save_in_run(checkpoint: Checkpoint, trainer: Trainer) -> Timing:
    """Saves at the end of an update."""
    checkpoint.save()
    trainer.update([0])
    updated = time.perf_counter()
    checkpoint.saver.wait()
    return checkpoint.held_seconds, checkpoint.held_seconds + time.perf_counter() - updated


@contextmanager
def contestants(megabytes: float, directory: Path, device: str) -> Iterator[dict[str, Callable[[], Timing]]]:
    """What saves, or copies, a state of so many megabytes."""
    model, optimizer, trainer = trained(megabytes, device)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: wait_for(device))  # what holds the run is the save alone
    checkpoint = Checkpoint(directory / "ours", every=10**9, keep=1)
    checkpoint.attach(trainer)
    with trainer.session():
        trainer.update([0])
        yield _contestants(model, optimizer, trainer, checkpoint, directory)


def _contestants(
    model: nn.Module, optimizer: torch.optim.Optimizer, trainer: Trainer, checkpoint: Checkpoint, directory: Path
) -> dict[str, Callable[[], Timing]]:
    tensors = [tensor.detach() for tensor in tensors_of(model, optimizer)]
    device = tensors[0].device.type
    buffers = [torch.empty_like(tensor, device="cpu", pin_memory=device == "cuda") for tensor in tensors]

    def seconds_of_copy() -> float:
        started = now(device)
        torch._foreach_copy_(buffers, tensors, non_blocking=True)
        return now(device) - started

    def copy() -> Timing:
        # the unit of the others: one alone would depend on what else runs on the machine
        return statistics.median(seconds_of_copy() for _ in range(5)), math.nan

    def copy_after_update() -> Timing:
        torch.ones(CACHES_BYTES, dtype=torch.uint8)  # takes the place of all else in the caches; the update reads the state
        trainer.update([0])
        return seconds_of_copy(), math.nan

    def plain() -> Timing:
        started = time.perf_counter()
        with (directory / "plain").open("wb", buffering=0) as file:
            for buffer in buffers:
                data = memoryview(buffer.view(-1).numpy()).cast("B")
                for begin in range(0, len(data), CHUNK_BYTES):
                    file.write(data[begin : begin + CHUNK_BYTES])
            os.fsync(file.fileno())
        held = time.perf_counter() - started
        (directory / "plain").unlink()
        return held, held

    def ours() -> Timing:
        return save_in_run(checkpoint, trainer)

    def torch_save() -> Timing:
        started = now(device)
        with (directory / "torch.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        held = time.perf_counter() - started
        (directory / "torch.pt").unlink()
        return held, held

    def dcp_async() -> Timing:
        started = now(device)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        future = dcp.async_save(state, checkpoint_id=str(directory / "dcp"), no_dist=True)
        held = time.perf_counter() - started
        future.result()
        durable = time.perf_counter() - started
        shutil.rmtree(directory / "dcp")
        return held, durable

    return {
        COPY: copy,
        AFTER_UPDATE: copy_after_update,
        PLAIN: plain,
        OURS: ours,
        "torch.save + fsync": torch_save,
        "DCP async_save": dcp_async,
    }


def measure(megabytes: float, repetitions: int, directory: Path, device: str, until: float) -> str:
    """Times all contestants on one size and returns the table."""
    with contestants(megabytes, directory, device) as everyone:
        until_durable: dict[str, list[float]] = {name: [] for name in everyone}

        def held(name: str) -> float:
            seconds, durable = everyone[name]()
            until_durable[name].append(durable)
            return seconds

        rounds = interleave({name: partial(held, name) for name in everyone}, repetitions=repetitions, until=until)
    rows = [[COPY, "1", "", f"{rounds.typical(COPY) * 1000:.1f} ms", ""]]
    _warm_up, *plain = until_durable[PLAIN]
    for name in list(rounds.pairs)[1:]:
        _warm_up, *seconds = until_durable[name]
        row = [name, rounds.ratios(name).show(), "", f"{rounds.typical(name) * 1000:.1f} ms", ""]
        if not math.isnan(seconds[0]):
            row[2] = Spread.of([mine / limit for mine, limit in zip(seconds, plain, strict=True)]).show()
            row[4] = f"{statistics.median(seconds) * 1000:.1f} ms"
        rows.append(row)
    head = ["", "the run is held, in copies", "until durable, in plain writes", "held", "until durable"]
    return f"{len(rounds.pairs[COPY])} repetitions:\n\n{table(head, rows)}"


def measure_updates(megabytes: float, repetitions: int, directory: Path, device: str, until: float) -> str:
    """Times updates of a small model alone and beside a save, in turns, and returns the table."""
    frozen = max(1, round(megabytes * 1e6 / (4 * MATRIX * MATRIX)))
    small = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(device)
    weights = (torch.randn(MATRIX, MATRIX, device=device) for _ in range(frozen))
    state = nn.ParameterList([nn.Parameter(weight, requires_grad=False) for weight in weights])
    model, micro_batch = nn.ModuleList([small, state]), torch.randn(64, 256, device=device)
    optimizer = torch.optim.SGD(small.parameters(), lr=1e-6)
    trainer = create_trainer(model, optimizer, lambda _, x: ForwardOutput(small(x).square().sum(), len(x)))
    checkpoint = Checkpoint(directory / "beside", every=10**9, keep=1)
    checkpoint.attach(trainer)
    alone, beside, longest, durable = list[float](), list[float](), list[float](), list[float]()

    def update() -> float:
        started = now(device)
        trainer.update([micro_batch])
        return now(device) - started

    with trainer.session():
        for number in range(repetitions + 2):  # two that do not count: the first has nothing to remove
            if number > 2 and time.perf_counter() > until:
                break
            checkpoint.save()
            update()
            started, times = time.perf_counter(), list[float]()
            durably, removed = checkpoint.saver._durable, threading.Event()  # or it has failed
            checkpoint.saver._work.put(removed.set)
            while not removed.is_set():
                times.append(update())
                if durably.is_set() and len(durable) < number + 1:
                    durable.append(time.perf_counter() - started)
            durable += [time.perf_counter() - started] * (len(durable) < number + 1)
            quiet = [update() for _ in range(max(50, len(times)))]
            if number >= 2:
                alone.append(statistics.mean(quiet))
                beside.append(statistics.mean(times))
                longest.append(max(times) / alone[-1])
    ratio = Spread.of([one / other for one, other in zip(beside, alone, strict=True)])
    row = [f"{statistics.median(alone) * 1000:.2f} ms", ratio.show(), Spread.of(longest).show(1)]
    head = ["update alone (mean)", "beside a save and a removal", "the longest one beside", "until durable"]
    return table(head, [[*row, f"{statistics.median(durable[2:]) * 1000:.0f} ms"]])


def write_seconds(megabytes: float, directory: Path) -> float:
    """About how long a plain write of so many megabytes takes here."""
    data, file = os.urandom(PROBE_BYTES), directory / "probe"
    started = time.perf_counter()
    with file.open("wb", buffering=0) as probe:
        probe.write(data)
        os.fsync(probe.fileno())
    seconds = time.perf_counter() - started
    file.unlink()
    return seconds * megabytes * 1e6 / PROBE_BYTES


def main(
    megabytes: Annotated[list[float], Option(min=1, help="Of the state; may be given several times.")] = [8, 100, 1000],  # noqa: B006
    repetitions: Annotated[int, Option(min=1, help="Rounds; all contestants run in each of them.")] = MIN_REPETITIONS,
    device: Annotated[str, Option(help="cpu or cuda.")] = "cpu",
    minutes: Annotated[
        float, Option(help="When they are over no round begins, and before it no size that does not fit.")
    ] = math.inf,
) -> None:
    """Measure how long each way to save holds the run, and how long until the state is durable."""
    ends = time.perf_counter() + 60 * minutes
    for number, size in enumerate(megabytes):
        Path("runs").mkdir(exist_ok=True)  # on the disk of the checkout, and not followed by git
        directory = Path(tempfile.mkdtemp(dir="runs"))
        try:
            needed = LEAST_WRITES * write_seconds(size, directory) if math.isfinite(ends) else 0.0
            left = ends - time.perf_counter()
            if number and needed > left:
                print(f"\nA state of {size:g} MB is left out: it would have taken about {needed:.0f} s of the {left:.0f} left.")
                continue
            shown = measure(size, repetitions, directory, device, time.perf_counter() + left / 4)
            print(f"\nA state of {size:g} MB, {shown}\n\nUpdates:\n", flush=True)
            print(measure_updates(size, repetitions, directory, device, time.perf_counter() + left / 8), flush=True)
        finally:
            shutil.rmtree(directory)


if __name__ == "__main__":
    typer.run(main)
