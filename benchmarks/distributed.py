"""What crosses the ranks in an update and how long an update takes, on processes of this machine that talk by gloo.

    python benchmarks/distributed.py

The reference is the loop by hand around DistributedDataParallel with `no_sync`, which knows no number of another rank. The same
with one blocking all-reduce of loss and norm after each update shows what statistics over ranks cost when nothing hides them.
Fabric, Accelerate and the loop by hand have none; Ignite has no `no_sync`. Collectives and their bytes are those that torch's
profiler sees on rank 0, the time is rank 0's too. All contestants must come to the same parameters on all ranks.

The peers take part on two ranks and networks without buffers. Elsewhere are this library and the loop by hand alone. On more
ranks than cores they wait for each other to be scheduled, which makes the spread large. A network "with buffers" has batch
norms, whose running statistics DistributedDataParallel sends from rank 0 to all in each update, and which this library can put
back after a skipped one.
"""

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import typer
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.profiler import ProfilerActivity, profile
from typer import Option

import contestants
import peers
from contestants import Contestant, MicroBatches, Outcome, Work
from interleaving import MIN_REPETITIONS, interleave, table
from overhead import forward, mean_loss

REFERENCE = "by hand, `no_sync`"
BUFFERS = " with buffers"
# width of the network, samples in a micro-batch, micro-batches in a stretch
SIZES = {"tiny": (64, 16, 16), f"tiny{BUFFERS}": (64, 16, 16), "mid-sized": (512, 64, 16), f"large{BUFFERS}": (1024, 192, 2)}
ACCUMULATION = {"tiny": [1, 4, 16], "mid-sized": [4], f"large{BUFFERS}": [1]}  # unless others are asked for
USUAL_ACCUMULATION = [1, 4]
ALL_SIZES_ON = 2  # ranks; on more the tiny network with buffers alone, unless sizes are asked for
BYTES = {"float": 4, "double": 8, "long int": 8, "int": 4, "unsigned char": 1, "bool": 1, "c10::BFloat16": 2}
PROFILED_UPDATES = 4
STRETCHES = 12  # that are timed, the median of which counts: processes that wait for each other make a time of luck


def explicitly(contestant: Contestant, work: Work) -> Outcome:
    """With this library's reduction after the last backward, and no DistributedDataParallel."""
    return contestant(replace(work, reduction="explicit"))


CONTESTANTS: dict[str, Contestant] = {
    REFERENCE: contestants.by_hand,
    "by hand, `no_sync`, once more (the noise)": contestants.by_hand,
    "by hand, `no_sync`, blocking statistics": contestants.by_hand_with_blocking_sum,
    "ignite_train, ddp": contestants.ignite_train,
    "ignite_train, explicit": partial(explicitly, contestants.ignite_train),
    "ignite_train, ddp, all handlers": contestants.ignite_train_with_handlers,
}
WITHOUT_PEERS = (REFERENCE, "by hand, `no_sync`, once more (the noise)", "ignite_train, ddp", "ignite_train, explicit")


class ProfiledMicroBatches(MicroBatches):
    """Profiles some updates in the middle and keeps the bytes of each of their collectives."""

    def __init__(self, *args: Any, steps: int, **options: Any) -> None:
        super().__init__(*args, steps=steps, **options)
        self._steps = steps
        self.collectives: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        begin = 4 * self._steps  # buckets and names are settled by then
        for index, batch in enumerate(super().__iter__()):
            if index == begin:
                profiler.__enter__()
            if index == begin + PROFILED_UPDATES * self._steps:
                profiler.__exit__(None, None, None)
                self.collectives = [
                    sum(BYTES[kind] * prod(shape) for kind, shape in zip(event.input_dtypes, event.input_shapes, strict=True))
                    for event in profiler.events() or []
                    if event.name.startswith("gloo:")
                ]
            yield batch


def work_of(rank: int, size: str, steps: int, *, stretches: int, profiled: bool, stretch: int | None = None) -> Work:
    """The same model on all ranks, and data of its own on each. `stretch`: micro-batches in one, where not as in `SIZES`."""
    width, samples, usual = SIZES[size]
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(width)] if size.endswith(BUFFERS) else []
    model = nn.Sequential(nn.Linear(32, width), *norms, nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    torch.manual_seed(1 + rank)
    batches = [(torch.randn(samples, 32), torch.randint(8, (samples,))) for _ in range(64)]
    kind = ProfiledMicroBatches if profiled else MicroBatches
    return Work(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        micro_batches=kind(batches, steps=steps, stretch=max(2, (stretch or usual) // steps), stretches=stretches, warm_up=5),
        mean_loss=mean_loss,
        forward=forward,
        accumulation_steps=steps,
    )


def train(
    rank: int, name: str, size: str, steps: int, expected: dict[str, Outcome], stretches: int, stretch: int | None = None
) -> MicroBatches:
    """One run of a contestant, checked against the first run of the reference."""
    profiled = stretches == 1
    work = work_of(rank, size, steps, stretches=stretches, profiled=profiled, stretch=stretch)
    start = parameters_to_vector(work.model.parameters()).detach().clone()
    dist.barrier()
    outcome = contestants.run((CONTESTANTS | peers.PEERS)[name], work)
    outcome.check_against(expected.setdefault(f"{size} {steps} {stretches}", outcome), start, local_losses=True)
    return work.micro_batches


def collectives(micro_batches: MicroBatches) -> list[int]:
    """The bytes of each collective of the profiled updates."""
    return micro_batches.collectives if isinstance(micro_batches, ProfiledMicroBatches) else []


@dataclass(frozen=True)
class Plan:
    """What the processes are to do."""

    ranks: int
    cases: list[tuple[str, int]]  # size and accumulation
    names: list[str]
    repetitions: int
    port: int = 0


def spawn(function: Callable[[int, Plan, Any], None], plan: Plan) -> list[Any]:
    """Runs `function(rank, plan, results)` on each process and returns what they have put into `results`."""
    with socket.socket() as probe:  # a free port
        probe.bind(("127.0.0.1", 0))
        plan = replace(plan, port=probe.getsockname()[1])
    results: Any = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(function, (plan, results), nprocs=plan.ranks)
    found = []
    while not results.empty():
        found.append(results.get())
    return found


def join(rank: int, plan: Plan) -> None:
    """Makes this process one of the ranks, in the way that all peers understand: as a launcher would."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(plan.port), "WORLD_SIZE": str(plan.ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "LOCAL_WORLD_SIZE": str(plan.ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def leave() -> None:
    """Ends this process's part, once all are there."""
    dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, plan: Plan, results: Any) -> None:
    """What each process does; rank 0 gives tables."""
    join(rank, plan)
    for size, steps in plan.cases:
        results.put(compare(rank, plan, size, steps))
    leave()


def compare(rank: int, plan: Plan, size: str, steps: int) -> str | None:
    """Counts and times all contestants on one size of network; rank 0 returns a table."""
    expected: dict[str, Outcome] = {}

    def clock(name: str) -> float:
        return train(rank, name, size, steps, expected, STRETCHES).wall_seconds

    counted = {name: collectives(train(rank, name, size, steps, expected, 1)) for name in plan.names}
    rounds = interleave({name: partial(clock, name) for name in plan.names}, repetitions=plan.repetitions, quiet=rank > 0)
    if rank > 0:
        return None
    rows = []
    for name in plan.names:
        number, kilobytes = len(counted[name]) / PROFILED_UPDATES, sum(counted[name]) / PROFILED_UPDATES / 1e3
        ratio = "1" if name == REFERENCE else rounds.ratios(name).show()
        rows.append([name, f"{number:g}", f"{kilobytes:.1f}", ratio])
    took = f"an update by hand takes {rounds.typical(REFERENCE) * 1e3:.2f} ms"
    head = ["loop", "collectives an update", "kB an update", "time, by hand = 1 (quartiles)"]
    return f"\n{size.capitalize()} network, {plan.ranks} processes, accumulation {steps}; {took}.\n\n{table(head, rows)}"


def main(
    ranks: Annotated[list[int], Option(min=2, help="Processes; may be given several times.")] = [2, 3, 4],  # noqa: B006
    size: Annotated[list[str], Option(help="A network of SIZES; may be given several times.")] = [],  # noqa: B006
    accumulation: Annotated[list[int], Option(help="Micro-batches to an update; may be given several times.")] = [],  # noqa: B006
    repetitions: Annotated[int, Option(min=1, help="Rounds; all contestants run in each of them.")] = MIN_REPETITIONS,
    only: Annotated[str, Option(help="Contestants with this in their name; the reference is always there.")] = "",
) -> None:
    """Count the collectives of each loop and time its updates on several processes."""
    for number in ranks:
        sizes = size or (SIZES if number == ALL_SIZES_ON else [f"tiny{BUFFERS}"])
        for has_buffers in (False, True):
            alone = has_buffers or number != ALL_SIZES_ON
            everyone = (
                {name: CONTESTANTS[name] for name in WITHOUT_PEERS} if alone else CONTESTANTS | peers.installed(peers.PEERS)
            )
            names = [name for name in everyone if only in name or name == REFERENCE]
            chosen = [one for one in sizes if one.endswith(BUFFERS) == has_buffers]
            cases = [(one, steps) for one in chosen for steps in accumulation or ACCUMULATION.get(one, USUAL_ACCUMULATION)]
            for shown in spawn(measure, Plan(number, cases, names, repetitions)) if cases else ():
                if shown is not None:
                    print(shown, flush=True)


if __name__ == "__main__":
    typer.run(main)
