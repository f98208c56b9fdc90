"""How long a save holds the run, and how long until it is durable, beside one copy of the state and other ways to save.

    python benchmarks/checkpoint.py

The state is that of AdamW: parameters and two moments. Ratios are to one copy of it into memory that is there already, before
and after. A contestant that is durable at once holds the run until then.
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed.checkpoint as dcp
import typer
from torch import nn
from typer import Option

from ignite_train import ForwardOutput, Trainer, create_trainer
from ignite_train.handlers import Checkpoint
from interleaving import MIN_REPETITIONS, Spread, interleave, table

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


def contestants(megabytes: float, directory: Path) -> dict[str, Callable[[], Timing]]:
    """What saves, or copies, a state of so many megabytes."""
    model, optimizer, trainer = trained(megabytes)
    checkpoint = Checkpoint(directory / "ours", every=10**9, keep=1)
    checkpoint.attach(trainer)
    trainer.run([0], max_iters=1)
    tensors = [tensor.detach() for tensor in tensors_of(model, optimizer)]
    buffers = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> Timing:
        held = []
        for _ in range(5):  # the unit of the others: one alone would depend on what else runs on the machine
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

    return {
        "one copy in memory": copy,
        "Checkpoint": ours,
        "torch.save + fsync": torch_save,
        "DCP async_save": dcp_async,
    }


def measure(megabytes: float, repetitions: int, directory: Path) -> str:
    """Times all contestants on one size and returns the table."""
    everyone = contestants(megabytes, directory)
    until_durable: dict[str, list[float]] = {name: [] for name in everyone}

    def held(name: str) -> float:
        seconds, durable = everyone[name]()
        until_durable[name].append(durable)
        return seconds

    rounds = interleave({name: partial(held, name) for name in everyone}, repetitions=repetitions)
    reference, *savers = everyone
    rows = [[reference, "1", "1"]]
    for name in savers:
        _warm_up, *seconds = until_durable[name]
        durable = Spread.of([mine / copy for mine, (_, copy) in zip(seconds, rounds.pairs[name], strict=True)])
        rows.append([name, rounds.ratios(name).show(), durable.show()])
    return table(["", "the run is held", "until durable"], rows)


def main(
    megabytes: Annotated[list[float], Option(min=1, help="Of the state; may be given several times.")] = [100, 1000],  # noqa: B006
    repetitions: Annotated[int, Option(min=1, help="Rounds; all contestants run in each of them.")] = MIN_REPETITIONS,
) -> None:
    """Measure how long each way to save holds the run, and how long until the state is durable."""
    for size in megabytes:
        directory = Path(tempfile.mkdtemp(dir="."))
        try:
            shown = measure(size, repetitions, directory)
        finally:
            shutil.rmtree(directory)
        print(f"\nA state of {size:g} MB, {repetitions} repetitions, in copies of the state:\n\n{shown}")


if __name__ == "__main__":
    typer.run(main)
