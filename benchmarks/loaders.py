"""Whether a loader and a model that are slow overlap: with worker processes, and with a thread that fetches.

    python benchmarks/loaders.py

First with workers. A sample and a forward take 10 ms each and only wait, so that the processor is not what is measured. The
loop by hand takes each micro-batch when it is needed and makes a step after so many of them. With workers a micro-batch should
take what the slower of both takes, without them the sum.

Then `fetch_in_thread=True`, in one process. The loader alone and the model alone are measured in the same rounds, and what a
run takes is compared with the slower of them and with their sum. A sample waits, or is decompressed by code in C that releases
Python's lock, or is computed in Python; the model waits, as the host does for an accelerator, or computes on the CPU.
"""

import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typer import Option

from ignite_train import ForwardOutput, ResumableLoader, create_trainer
from interleaving import Spread, interleave, table

BY_HAND, OURS = "by hand", "ignite_train"
LOADER, MODEL, PLAIN, THREAD = "loader alone", "model alone", "without the thread", "with the thread"
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


def wait(seconds: float) -> Callable[[], object]:
    """A wait."""
    return partial(time.sleep, seconds)


def repeated(work: Callable[[], object], seconds: float) -> Callable[[], object]:
    """As many calls of `work` as take so long."""
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < max(seconds, 0.2):
        work()
        calls += 1
    number = max(1, round(calls * seconds / (time.perf_counter() - started)))

    def several() -> None:
        for _ in range(number):
            work()

    return several


def decompress(seconds: float) -> Callable[[], object]:
    """Work in C that releases Python's lock."""
    return repeated(partial(zlib.decompress, zlib.compress(bytes(range(256)) * 1000)), seconds)


def count(seconds: float) -> Callable[[], object]:
    """Work in Python."""
    return repeated(lambda: sum(range(200)), seconds)


def multiply(seconds: float) -> Callable[[], object]:
    """Small products of matrices, as a model on the CPU computes them."""
    matrix = torch.randn(96, 96)
    return repeated(lambda: matrix @ matrix, seconds)


class Made(Dataset[Tensor]):
    """Samples that are made by `work`."""

    def __init__(self, samples: int, work: Callable[[], object]) -> None:
        self.samples, self.work = samples, work

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        self.work()
        return torch.ones(4)


def threads(
    steps: int, micro_batches: int, repetitions: int, sample: Callable[[], object], model: Callable[[], object]
) -> list[str]:
    """The cells of one row: milliseconds of a micro-batch, and the ratios."""

    def computed(module: nn.Module, x: Tensor) -> ForwardOutput:
        model()
        return ForwardOutput(module(x).square().sum(), len(x))

    def loader(*, in_thread: bool, work: Callable[[], object] = sample) -> ResumableLoader:
        return ResumableLoader(Made(micro_batches, work), 1, shuffle=False, fetch_in_thread=in_thread)

    def train(data: ResumableLoader) -> float:
        module = nn.Linear(4, 1)
        trainer = create_trainer(module, torch.optim.SGD(module.parameters(), lr=0.01), computed, accumulation_steps=steps)
        start = time.perf_counter()
        trainer.run(data, max_epochs=1)
        return time.perf_counter() - start

    def read() -> float:
        start = time.perf_counter()
        for _ in loader(in_thread=False):
            pass
        return time.perf_counter() - start

    contestants = {
        LOADER: read,
        MODEL: lambda: train(loader(in_thread=False, work=lambda: None)),
        PLAIN: lambda: train(loader(in_thread=False)),
        THREAD: lambda: train(loader(in_thread=True)),
    }
    rounds = interleave(contestants, repetitions=repetitions, bracket=False, warm_up=False, quiet=True)
    alone = [[mine for mine, _ in rounds.pairs[name]] for name in (LOADER, MODEL)]
    with_thread = [mine for mine, _ in rounds.pairs[THREAD]]
    slower = Spread.of([mine / max(pair) for mine, *pair in zip(with_thread, *alone, strict=True)])
    both = Spread.of([mine / sum(pair) for mine, *pair in zip(with_thread, *alone, strict=True)])
    return [*(f"{rounds.typical(name) / micro_batches * 1000:.1f}" for name in contestants), slower.show(), both.show()]


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
    ways = [("waits", "waits", wait, wait), ("in C", "on the CPU", decompress, multiply), ("in Python", "waits", count, wait)]
    ways.append(("in Python", "on the CPU", count, multiply))
    rows = []
    for sample, model, make_sample, make_model in ways:
        for steps in accumulation if sample == "waits" else accumulation[-1:]:
            cells = threads(steps, micro_batches, repetitions, make_sample(seconds), make_model(seconds))
            rows.append([sample, model, str(steps), *cells])
    print(
        f"\nMilliseconds of a micro-batch with `fetch_in_thread`, in which a sample and a forward take {milliseconds:g} ms.\n"
    )
    head = [
        "sample",
        "model",
        "accumulation",
        LOADER,
        MODEL,
        PLAIN,
        THREAD,
        "to the slower (quartiles)",
        "to the sum (quartiles)",
    ]
    print(table(head, rows))


if __name__ == "__main__":
    typer.run(main)
