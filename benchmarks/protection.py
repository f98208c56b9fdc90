"""What the handlers that protect several ranks by default cost: updates with `protect=True` and with `protect=False`.

    python benchmarks/protection.py

Trains two models on two CPU processes: a tiny network, where an update is little more than its fixed costs, and one whose
update takes about 5 ms on an idle core. A protected and an unprotected trainer run in turn, one block of updates each, so that
a machine whose speed drifts slows both. Prints the medians over the blocks, with their quartiles, of the time of an update and
of the processor time that rank 0 spent on it in all of its threads, which says more on a machine that others use too; how long
a comparison of the state takes, which happens after 7 of the first 300 updates, once in 1000, at each save and at the end; and
how long a run of one update takes, in which the watching threads are started and ended.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import ignite.distributed as idist
import torch
import typer
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typer import Option

from ignite_train import ForwardOutput, Trainer, create_trainer
from ignite_train.handlers import StateConsistency

MODELS = {"tiny MLP": (16, 32, 1, 32), "5 ms": (256, 512, 2, 96)}  # features, width, hidden layers, samples of a micro-batch


def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    """A squared error."""
    x, y = micro_batch
    return ForwardOutput((model(x) - y).square().sum(), sample_size=len(x))


def make(features: int, width: int, layers: int, protect: Any) -> Trainer:
    """A trainer of a network that is the same each time."""
    torch.manual_seed(0)
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(nn.Linear(features, width), nn.GELU(), *hidden, nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return create_trainer(DistributedDataParallel(model), optimizer, forward, protect=protect)


def quartiles(values: Sequence[float], unit: float, name: str) -> str:
    """The median and, in brackets, the first and the third quartile."""
    low, middle, high = (unit * value for value in statistics.quantiles(values, n=4))
    return f"{middle:.4g} {name} ({low:.4g} to {high:.4g})"


def time_updates(trainer: Trainer, loader: list[Any], updates: int) -> tuple[float, float]:
    """Seconds of one update, over a run of so many, and processor time."""
    moments: list[tuple[float, float]] = []

    def note() -> None:
        moments.append((time.perf_counter(), time.process_time()))

    first, last = trainer.state.iteration + 1, trainer.state.iteration + updates
    handles = [
        trainer.add_event_handler(Events.ITERATION_STARTED(once=first), note),
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=last), note),
    ]
    trainer.run(loader, max_iters=last)
    for handle in handles:
        handle.remove()
    (begin, begin_busy), (end, end_busy) = moments
    return (end - begin) / updates, (end_busy - begin_busy) / updates


def measure(_local_rank: int, blocks: int, updates: int) -> None:
    """Trains on this rank and prints on rank 0."""
    torch.set_num_threads(1)
    for name, (features, width, layers, samples) in MODELS.items():
        loader = [(torch.randn(samples, features), torch.randn(samples, 1)) for _ in range(updates)]
        trainers = {protect: make(features, width, layers, protect) for protect in (False, True)}
        times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for block in range(blocks + 1):
            for protect in (False, True) if block % 2 else (True, False):
                one = time_updates(trainers[protect], loader, updates)
                if block > 0:  # the first one warms up, and compares the state after each of its first updates
                    times[protect].append(one)
        digests, runs = time_digests(trainers[True], 20), time_runs(trainers, loader, 20)
        if idist.get_rank() == 0:
            print(f"{name}: 2 processes, {blocks} blocks of {updates} updates each")
            for index, what in enumerate(("time", "processor time")):
                plain, protected = ([one[index] for one in times[protect]] for protect in (False, True))
                ratios = [more / less for less, more in zip(plain, protected, strict=True)]
                print(f"  {what}: {quartiles(plain, 1e6, 'us')} unprotected, {quartiles(protected, 1e6, 'us')} protected")
                print(f"  {what}: ratio {quartiles(ratios, 1, '')}")
            print(f"  a comparison of the state: {quartiles(digests, 1e6, 'us')}")
            print(f"  a run: {quartiles(runs[False], 1e3, 'ms')} unprotected, {quartiles(runs[True], 1e3, 'ms')} protected")


def time_digests(trainer: Trainer, count: int) -> list[float]:
    """Seconds that a digest takes, as it is by default: without buffers and without the optimizer's state."""
    check: Any = StateConsistency(trainer.parts["model"], trainer.parts["optimizer"], optimizer_state=False)  # type: ignore[arg-type]
    times = []
    for _ in range(count):
        before = time.perf_counter()
        check(trainer)
        times.append(time.perf_counter() - before)
    return times


def time_runs(trainers: dict[bool, Trainer], loader: list[Any], count: int) -> dict[bool, list[float]]:
    """Seconds of a call of `run` that makes one update."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(count):
        for protect, trainer in trainers.items():
            before = time.perf_counter()
            trainer.run(loader, max_iters=trainer.state.iteration + 1)
            times[protect].append(time.perf_counter() - before)
    return times


def main(
    blocks: Annotated[int, Option(help="Timed blocks of each trainer.")] = 15,
    updates: Annotated[int, Option(help="Updates of a block.")] = 200,
) -> None:
    """Runs the measurement on two processes."""
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(measure, blocks, updates)


if __name__ == "__main__":
    typer.run(main)
