"""How costs grow: of an update with tensors, parameters, micro-batches, logs, handlers and ranks; of epochs, starts and saves.

    python benchmarks/scaling.py

Each quantity is varied alone. Beside the measured costs stands the straight line through them, which is the formula for what
was not measured. Processor time on one thread; for ranks, samples and saves, time, for ranks on processes of this machine that
talk by gloo.
"""

import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import typer
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import RandomSampler
from typer import Option

import contestants
import distributed
from contestants import MicroBatches, Outcome, Work
from ignite_train import ForwardOutput, ShardedSampler, Trainer
from ignite_train.handlers import Checkpoint
from interleaving import MIN_REPETITIONS, Rounds, interleave, table
from overhead import tiny_work

BY_HAND, OURS = "by hand", "ignite_train"
BOTH: dict[str, contestants.Contestant] = {BY_HAND: contestants.by_hand, OURS: contestants.ignite_train}
SMALL = 64  # numbers in the reduction of the statistics, at most
GATHERED_BYTES = 2**18  # of all ranks together: up to so many the library gathers numbers over gloo and adds them up itself
SAVE = "a save by all, ms until durable"
FEW_RANKS = 8  # up to so many are measured as often as everything else
UPDATES_TO_AN_EPOCH = 8
LARGEST_DRAWN = 10**7  # samples of which torch's sampler draws an order; of more it would take minutes and much memory
SAVES = 7
Make = Callable[[int], Work]
RANKS = """{measured}

With more processes than the {cores} cores here each waits for the others to be scheduled, so the formula rests on the counts
that have a core each: a hop of the sum of {small} numbers takes h = {hop:.0f} µs. Over gloo they are gathered in a ring, which
has ranks - 1 hops; what is more than {gathered} kB of all ranks is reduced in one, which has 2 · (ranks - 1). A tree, as that
of NCCL, has 2 · log2(ranks). Modelled for ranks with a core each on a network as fast as this loopback:

{modelled}

An update of `ignite_train` with the hooks of DistributedDataParallel costs max(0, this - the last backward) more than one by
hand, since the two overlap. With explicit reduction, and for a network as small as this one in either, it has no collective of
its own: the statistics travel in the gradients' last bucket. What each rank sends for gradients of B bytes is
2 · (ranks - 1) / ranks · B where they are reduced, and (ranks - 1) · B where they are gathered.
"""


class Pieces(nn.Module):
    """Parameters in so many tensors of one size, and a forward that does little with them."""

    def __init__(self, tensors: int, size: int) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.randn(size) for _ in range(tensors))

    def forward(self, scale: Tensor) -> Tensor:
        """A scalar that depends on each of them."""
        return torch.stack([piece[0] for piece in self.pieces]).sum() * scale


def pieces_work(tensors: int, size: int) -> Work:
    """Training of `Pieces`."""
    torch.manual_seed(0)
    model = Pieces(tensors, size)

    def mean_loss(model: nn.Module, micro_batch: tuple[Tensor]) -> Tensor:
        loss: Tensor = model(micro_batch[0])
        return loss

    def forward(model: nn.Module, micro_batch: tuple[Tensor]) -> ForwardOutput:
        return ForwardOutput(mean_loss(model, micro_batch), 1)

    stretch = 5 if tensors * size < 1_000_000 and tensors < 10_000 else 1
    return Work(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        micro_batches=MicroBatches([(torch.ones(()),)], steps=1, stretch=stretch, stretches=5, warm_up=3),
        mean_loss=mean_loss,
        forward=forward,
    )


def logging_work(logs: int) -> Work:
    """The tiny network with so many logs from each micro-batch."""
    work = tiny_work(1, 8)

    def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        output = work.forward(model, micro_batch)
        value = output.loss.detach()
        return ForwardOutput(output.loss, output.sample_size, {f"log {number}": value for number in range(logs)})

    return replace(work, forward=forward)


def with_handlers(work: Work, *, number: int, every: int | None) -> Outcome:
    """Nothing attached but so many handlers that do nothing."""
    trainer = contestants.trainer_of(work)
    event = Events.ITERATION_COMPLETED if every is None else Events.ITERATION_COMPLETED(every=every)
    for _ in range(number):
        trainer.add_event_handler(event, lambda: None)
    return contestants.run_trainer(work, trainer)


def cpu_seconds(run: contestants.Contestant, make: Callable[[], Work]) -> float:
    """Processor time of an update."""
    work = make()
    contestants.run(run, work)
    return float(work.micro_batches.cpu_seconds)


def line(amounts: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of the straight line with the least relative error: the largest cost is not to decide alone."""
    weights = [1 / cost**2 for cost in costs]
    x, y = (sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights) for values in (amounts, costs))
    pairs = [(w, amount - x, cost - y) for w, amount, cost in zip(weights, amounts, costs, strict=True)]
    slope = sum(w * dx * dy for w, dx, dy in pairs) / sum(w * dx * dx for w, dx, _ in pairs)
    return slope, y - slope * x


def against_hand(title: str, amounts: list[int], make: Make, repetitions: int) -> str:
    """Both loops at each amount, and the two lines."""
    rows, costs = [], {BY_HAND: [], OURS: []}  # type: ignore[var-annotated]
    for amount in amounts:
        clocks = {name: partial(cpu_seconds, run, partial(make, amount)) for name, run in BOTH.items()}
        rounds = interleave(clocks, repetitions=repetitions, quiet=True)
        for name in BOTH:
            costs[name].append(rounds.typical(name) * 1e6)
        rows.append([f"{amount:,}", *(f"{costs[name][-1]:.0f}" for name in BOTH), rounds.difference(OURS).show(0)])
    head = [title, "by hand, µs an update", "ignite_train, µs an update", "more, µs (quartiles)"]
    lines = {name: line(amounts, costs[name]) for name in BOTH}
    formula = "; ".join(f"{name} {intercept:.0f} + {slope:.3g} · n µs" for name, (slope, intercept) in lines.items())
    return f"{table(head, rows)}\n\nLines, n {title}: {formula}.\n"


def against_none(title: str, amounts: list[int], clock: Callable[[int], float], repetitions: int) -> str:
    """This library at each amount over itself with none, and the line."""
    rounds = interleave({str(amount): partial(clock, amount) for amount in amounts}, repetitions=repetitions, quiet=True)
    more = {amount: rounds.difference(str(amount)) for amount in amounts[1:]}
    slope = statistics.linear_regression(amounts, [0.0, *(spread.median for spread in more.values())], proportional=True).slope
    rows = [[str(amount), spread.show(1)] for amount, spread in more.items()]
    return f"{table([title, 'more than with none, µs an update (quartiles)'], rows)}\n\nLine: {slope:.2g} µs for each.\n"


def epoch_seconds(number: int) -> float:
    """Processor time of an epoch in a run of this many, after its first ones."""
    work = tiny_work(1, 3)
    trainer, loader = contestants.trainer_of(work), [*islice(work.micro_batches, UPDATES_TO_AN_EPOCH)]
    with contestants.silence():
        trainer.run(loader, max_epochs=3)
        started = time.process_time()
        trainer.run(loader, max_epochs=3 + number)
    return (time.process_time() - started) / number


def epochs_table(amounts: list[int], repetitions: int) -> str:
    """An epoch of a run of so many, to one of a run of few."""
    rounds = interleave({str(n): partial(epoch_seconds, n) for n in amounts}, repetitions=repetitions, quiet=True)
    rows = [
        [f"{n:,}", f"{rounds.typical(str(n)) * 1e6:.0f}", "1" if n == amounts[0] else rounds.ratios(str(n)).show()]
        for n in amounts
    ]
    return table(["epochs", "µs an epoch", f"to one of {amounts[0]} (quartiles)"], rows)


def seconds_to_first(sampler: Any) -> float:
    """Until the first index of a pass is there."""
    started = time.perf_counter()
    next(iter(sampler))
    return time.perf_counter() - started


def samples_row(samples: int, repetitions: int) -> list[str]:
    """How long a pass over so many samples takes to begin, at its beginning and in its middle, and each index after that."""
    ours, torchs = ShardedSampler(range(samples), shuffle=True), RandomSampler(range(samples))
    begins, resumes, each, drawn = [], [], [], []
    for epoch in range(repetitions):
        ours.set_epoch(epoch)
        begins.append(seconds_to_first(ours) * 1e3)
        ours.seek(samples // 2)
        resumes.append(seconds_to_first(ours) * 1e3)
        ours.seek(0)
        started = time.perf_counter()
        number = sum(1 for _ in islice(ours, 100_000))
        each.append((time.perf_counter() - started) / number * 1e6)
        if samples <= LARGEST_DRAWN:
            drawn.append(seconds_to_first(torchs) * 1e3)
    numbers = [f"{statistics.median(found):.2f}" if found else "" for found in (begins, resumes, each, drawn)]
    return [f"{samples:,}", *numbers]


def saves(trainer: Trainer, checkpoint: Checkpoint, micro_batches: list[Any], number: int) -> list[tuple[float, float]]:
    """Milliseconds for which some saves held the run, and until each was durable, in a session."""
    found = []
    for _ in range(number):
        started = time.perf_counter()
        checkpoint.save()
        checkpoint.saver.wait()
        found.append((checkpoint.held_seconds * 1e3, (time.perf_counter() - started) * 1e3))
        trainer.update(micro_batches)
    return found


def saves_row(amount: int, make: Make, keep: int = 1) -> list[str]:
    """A save into a directory that holds `keep` checkpoints, and how long a new run takes to resume from it."""
    with TemporaryDirectory(dir="runs") as directory:

        def start() -> tuple[Trainer, Checkpoint, list[Any]]:
            work = make(amount)
            trainer, checkpoint = contestants.trainer_of(work), Checkpoint(directory, every=10**9, keep=keep)
            checkpoint.attach(trainer)
            return trainer, checkpoint, [next(iter(work.micro_batches))]

        trainer, checkpoint, micro_batches = start()
        with trainer.session():
            trainer.update(micro_batches)
            found = saves(trainer, checkpoint, micro_batches, keep + SAVES)[keep:]
        trainer, checkpoint, micro_batches = start()
        started = time.perf_counter()
        with trainer.session():
            resumed = (time.perf_counter() - started) * 1e3
    held, durable = (statistics.median(values) for values in zip(*found, strict=True))
    return [f"{amount:,}", f"{held:.1f}", f"{durable:.1f}", f"{resumed:.1f}"]


def measure_ranks(rank: int, plan: distributed.Plan, results: Any) -> None:
    """On each process: one small sum alone, the tiny network in three ways, and a save."""
    distributed.join(rank, plan)
    is_few = plan.ranks <= FEW_RANKS
    vector, times = torch.zeros(SMALL, dtype=torch.float64), []
    for _ in range(300 if is_few else 20):
        started = time.perf_counter()
        add_up(vector, plan.ranks)
        times.append(time.perf_counter() - started)
    expected: dict[str, Outcome] = {}

    def clock(name: str) -> float:
        stretches, stretch = (8, None) if is_few else (2, 2)
        return distributed.train(rank, name, "tiny", 1, expected, stretches, stretch).wall_seconds

    repetitions = plan.repetitions if is_few else 2
    clocks = {name: partial(clock, name) for name in plan.names}
    rounds = interleave(clocks, repetitions=repetitions, warm_up=is_few, quiet=True)
    durable = statistics.median(seconds for _, seconds in saves_of_rank(rank, plan))
    results.put((statistics.median(times), rounds, durable) if rank == 0 else None)
    distributed.leave()


def add_up(vector: Tensor, ranks: int) -> None:
    """Sums a few numbers over the ranks, in place, as this library does up to `GATHERED_BYTES`."""
    each = list(vector.new_empty(ranks, vector.numel()).unbind())
    dist.all_gather(each, vector)
    vector.copy_(sum(each[1:], each[0]))


def saves_of_rank(rank: int, plan: distributed.Plan) -> list[tuple[float, float]]:
    """Saves of the tiny network by all ranks, into one directory."""
    directory = Path("runs") / f"ranks-{plan.port}"
    work = distributed.work_of(rank, "tiny", 1, stretch=2, stretches=1, profiled=False)
    trainer, checkpoint = contestants.trainer_of(work), Checkpoint(directory, every=10**9, keep=1)
    checkpoint.attach(trainer)
    micro_batches = [next(iter(work.micro_batches))]
    with contestants.silence(), trainer.session():
        trainer.update(micro_batches)
        found = saves(trainer, checkpoint, micro_batches, SAVES if plan.ranks <= FEW_RANKS else 2)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(directory)
    return found


def ranks_table(counts: list[int], repetitions: int) -> str:
    """Measured on as many processes as asked for, and what the formula says beyond."""
    names = [distributed.REFERENCE, "ignite_train, ddp", "ignite_train, explicit"]
    cores = os.cpu_count() or 1
    rows, small = [], []
    for ranks in counts:
        found = distributed.spawn(measure_ranks, distributed.Plan(ranks, [], names, repetitions))
        alone, rounds, durable = next(one for one in found if one is not None)
        assert isinstance(rounds, Rounds)  # noqa: S101
        small.append(alone * 1e6)
        ratios = [rounds.ratios(name).show() for name in names[1:]]
        rows.append([str(ranks), f"{rounds.typical(names[0]) * 1e3:.2f}", *ratios, f"{alone * 1e6:.0f}", f"{durable:.0f}"])
    free = [alone / hops(ranks) for ranks, alone in zip(counts, small, strict=True) if ranks <= cores]
    hop = statistics.median(free) if free else small[0] / hops(counts[0])
    beyond = [[f"{n:,}", f"{hops(n) * hop:,.0f}", f"{2 * math.log2(n) * hop:,.0f}"] for n in (8, 16, 64, 256, 1024)]
    head = ["ranks", "by hand, ms an update", "ddp, by hand = 1", "explicit, by hand = 1", f"{SMALL} numbers alone, µs", SAVE]
    return RANKS.format(
        measured=table(head, rows),
        small=SMALL,
        cores=cores,
        hop=hop,
        gathered=GATHERED_BYTES // 1000,
        modelled=table(["ranks", "ring, µs", "tree, µs"], beyond),
    )


def hops(ranks: int) -> int:
    """Of the sum of `SMALL` numbers in float64 over gloo."""
    return ranks - 1 if ranks * SMALL * 8 <= GATHERED_BYTES else 2 * (ranks - 1)


def main(
    ranks: Annotated[list[int], Option(help="Processes; may be given several times.")] = [2, 4, 8, 16, 64],  # noqa: B006
    repetitions: Annotated[int, Option(min=1, help="Rounds of each comparison.")] = MIN_REPETITIONS,
) -> None:
    """Measure how the cost grows and print tables and formulas."""
    torch.set_num_threads(1)
    handlers = partial(partial, with_handlers)
    print("## Tensors\n\nParameters of 64 elements each.\n")
    print(against_hand("tensors", [10, 100, 1000, 10_000], lambda amount: pieces_work(amount, 64), repetitions))
    print("## Parameters\n\nIn 64 tensors.\n")
    sizes = [65_536, 1_048_576, 4_194_304, 16_777_216]
    print(against_hand("parameters", sizes, lambda amount: pieces_work(64, amount // 64), repetitions))
    print("## Accumulation\n\nThe tiny network of `overhead.py`.\n")
    print(against_hand("micro-batches", [1, 2, 4, 8, 16], lambda amount: tiny_work(amount, 3), repetitions))
    print("## Logs\n\nScalars that `forward` returns from each micro-batch.\n")
    print(
        against_none(
            "logs", [0, 1, 4, 16], lambda n: cpu_seconds(contestants.ignite_train, lambda: logging_work(n)), repetitions
        )
    )
    for what, every in (("at each update", None), ("with `every=100`", 100)):
        print(f"## Handlers\n\nOf `ITERATION_COMPLETED`, {what}, that do nothing.\n")

        def clock(number: int, every: int | None = every) -> float:
            return cpu_seconds(handlers(number=number, every=every), lambda: tiny_work(1, 8))

        print(against_none("handlers", [0, 8, 32, 128], clock, repetitions))
    Path("runs").mkdir(exist_ok=True)  # on the disk of the checkout, and not followed by git
    print(f"## Epochs\n\nOf {UPDATES_TO_AN_EPOCH} updates of the tiny network.\n")
    print(f"{epochs_table([10, 100, 1000], repetitions)}\n")
    print("## Samples\n\nA shuffled pass of `ShardedSampler`, which holds no list of its samples; torch's draws one.\n")
    head = ["samples", "ms to the first", "ms to the first in the middle", "µs an index", "RandomSampler: ms to the first"]
    print(f"{table(head, [samples_row(10**power, repetitions) for power in (3, 5, 7, 10)])}\n")
    of_save = ["the run is held, ms", "until durable, ms", "a start that resumes from it, ms"]
    print("## Tensors of a checkpoint\n\nOf 64 elements each: parameters and two moments.\n")
    print(
        f"{table(['tensors', *of_save], [saves_row(n, lambda n: pieces_work(n // 3, 64)) for n in (30, 300, 3000, 30_000)])}\n"
    )
    print("## Checkpoints in a directory\n\nOf the tiny network.\n")
    print(
        f"{table(['checkpoints', *of_save], [saves_row(n, lambda _: tiny_work(1, 3), keep=n) for n in (1, 10, 100, 1000)])}\n"
    )
    print("## Ranks\n\nThe tiny network of `distributed.py`, accumulation 1; each rank writes a file of a checkpoint.\n")
    print(ranks_table(ranks, repetitions))


if __name__ == "__main__":
    typer.run(main)
