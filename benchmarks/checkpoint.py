"""How long a save holds the run, and how long until it is durable, beside one copy of the state and other ways to save.

    python benchmarks/checkpoint.py [--megabytes 100 1000] [--repetitions 7]

Each repetition runs all contestants one after another, in an order that changes, on a state of AdamW: parameters and two
moments. Ratios are to one copy of the state into memory that is there already, in the same repetition; the median and the
spread over the repetitions are printed. A contestant that is durable at once holds the run until then.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ignite_train import ForwardOutput, Trainer, create_trainer
from ignite_train.handlers import Checkpoint

Timing = tuple[float, float]  # seconds: held, until durable
MATRIX = 1024


def trained(megabytes: float) -> tuple[nn.Module, torch.optim.Optimizer, Trainer]:
    """A trainer whose model and moments take so many megabytes, and have been moved once."""
    count = max(1, round(megabytes * 1e6 / (3 * 4 * MATRIX * MATRIX)))
    model = nn.ParameterList([nn.Parameter(torch.randn(MATRIX, MATRIX)) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def forward(model: nn.Module, _micro_batch: Any) -> ForwardOutput:
        return ForwardOutput(sum(parameter.sum() for parameter in model.parameters()), 1)

    return model, optimizer, create_trainer(model, optimizer, forward)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All tensors of the state."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.parameters(), *moments]


def measure(megabytes: float, repetitions: int, directory: Path) -> dict[str, list[Timing]]:
    """The timings of each contestant, one for each repetition, as ratios to one copy."""
    model, optimizer, trainer = trained(megabytes)
    checkpoint = Checkpoint(directory / "ours", every=10**9, keep=1)
    checkpoint.attach(trainer)
    trainer.run([0], max_iters=1)
    tensors = [tensor.detach() for tensor in tensors_of(model, optimizer)]
    buffers = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> Timing:
        held = []
        for _ in range(5):  # the unit of the others: one alone would be at the mercy of what else goes on
            started = time.perf_counter()
            torch._foreach_copy_(buffers, tensors)
            held.append(time.perf_counter() - started)
        return statistics.median(held), statistics.median(held)

    def ours() -> Timing:
        started = time.perf_counter()
        checkpoint.save()
        held = time.perf_counter() - started
        checkpoint.saver.wait()
        return held, time.perf_counter() - started

    def torch_save() -> Timing:
        started = time.perf_counter()
        with (directory / "torch.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        return (held := time.perf_counter() - started), held

    def dcp_async() -> Timing:
        started = time.perf_counter()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        future = dcp.async_save(state, checkpoint_id=str(directory / "dcp"), no_dist=True)
        held = time.perf_counter() - started
        future.result()
        return held, time.perf_counter() - started

    contestants: dict[str, Callable[[], Timing]] = {
        "one copy in memory": copy,
        "Checkpoint": ours,
        "torch.save + fsync": torch_save,
        "DCP async_save": dcp_async,
    }
    ratios: dict[str, list[Timing]] = {name: [] for name in contestants}
    for repetition in range(repetitions + 1):
        order = random.sample([*contestants], len(contestants))
        timings = {name: contestants[name]() for name in order}
        if repetition:  # the first one warms up: memory, files, imports
            unit = timings["one copy in memory"][0]
            for name, (held, durable) in timings.items():
                ratios[name].append((held / unit, durable / unit))
    return ratios


def spread(values: list[float]) -> str:
    """Median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Measures and prints a table for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[100.0, 1000.0])
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    for megabytes in options.megabytes:
        directory = Path(tempfile.mkdtemp(dir="."))
        try:
            ratios = measure(megabytes, options.repetitions, directory)
        finally:
            shutil.rmtree(directory)
        print(f"\nA state of {megabytes:g} MB, {options.repetitions} repetitions, in copies of the state:\n")
        print("| | the run is held | until durable |\n|---|---|---|")
        for name, timings in ratios.items():
            held, durable = zip(*timings, strict=True)
            print(f"| {name} | {spread(list(held))} | {spread(list(durable))} |")


if __name__ == "__main__":
    main()
