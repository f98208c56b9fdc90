"""Whether accumulation starves a loader with worker processes: a sample and a forward take 10 ms each, and both may overlap.

    python benchmarks/loaders.py

Both only wait, so that the processor is not what is measured. The loop by hand takes each micro-batch when it is needed and
makes a step after so many of them. With workers a micro-batch should take what the slower of both takes, without them the sum.
"""

import time
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typer import Option

from ignite_train import ForwardOutput, create_trainer
from interleaving import interleave, table

BY_HAND, OURS = "by hand", "ignite_train"
SETTINGS = ((0, None), (1, 2), (2, 2), (1, 16))  # workers, and the micro-batches that each prepares ahead


class Slow(Dataset[Tensor]):
    """Samples that take `seconds` each."""

    def __init__(self, samples: int, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.ones(4)


def forward(model: nn.Module, x: Tensor, seconds: float) -> ForwardOutput:
    """Takes `seconds` and a little."""
    time.sleep(seconds)
    return ForwardOutput(model(x).square().sum(), len(x))


def by_hand(loader: DataLoader[Tensor], accumulation_steps: int, seconds: float) -> float:
    """Seconds of an epoch."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = time.perf_counter()
    for number, x in enumerate(loader, start=1):
        (forward(model, x, seconds).loss / accumulation_steps).backward()
        if number % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return time.perf_counter() - start


def ours(loader: DataLoader[Tensor], accumulation_steps: int, seconds: float) -> float:
    """Seconds of an epoch."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_trainer(model, optimizer, partial(forward, seconds=seconds), accumulation_steps=accumulation_steps)
    start = time.perf_counter()
    trainer.run(loader, max_epochs=1)
    return time.perf_counter() - start


def main(
    accumulation: Annotated[list[int], Option(help="Micro-batches to an update; may be given several times.")] = [1, 4, 16],  # noqa: B006
    repetitions: Annotated[int, Option(min=1, help="Rounds; both loops run in each of them.")] = 5,
    micro_batches: Annotated[int, Option(min=1, help="Of an epoch.")] = 160,
    milliseconds: Annotated[float, Option(min=0.1, help="Of a sample, and of a forward.")] = 10.0,
) -> None:
    """Measure what a micro-batch takes with a loader as slow as the model."""
    torch.set_num_threads(1)
    seconds, rows = milliseconds / 1000, []
    for workers, ahead in SETTINGS:
        for steps in accumulation:
            loader = DataLoader(Slow(micro_batches, seconds), num_workers=workers, prefetch_factor=ahead)
            loops = {BY_HAND: partial(by_hand, loader, steps, seconds), OURS: partial(ours, loader, steps, seconds)}
            rounds = interleave(loops, repetitions=repetitions, warm_up=False)
            typical = [f"{rounds.typical(name) / micro_batches * 1000:.1f}" for name in loops]
            rows.append([str(workers), str(ahead or ""), str(steps), *typical, rounds.ratios(OURS).show()])
    print(f"\nMilliseconds of a micro-batch, in which a sample and a forward wait for {milliseconds:g} ms each.\n")
    print(table(["workers", "ahead", "accumulation", BY_HAND, OURS, "ratio (quartiles)"], rows))


if __name__ == "__main__":
    typer.run(main)
