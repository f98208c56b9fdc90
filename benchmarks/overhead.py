"""What a loop costs on top of the model: a tiny network, one thread, processor time of an update over the loop by hand.

    python benchmarks/overhead.py

Every contestant does the same updates: clipping, fused AdamW, loss and norm of each update kept. The final parameters must be
the same, or the script ends with an error. Further tables have what people write by default: optimizers that are not fused,
logs, `create_supervised_trainer` and handlers, with accelerations and without. A last one says what `attach_defaults` adds to
the same loop with nothing attached, on the tiny network and on one whose update takes some milliseconds.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from typer import Option

import contestants
import peers
from contestants import LOG_EVERY, REFERENCE, MicroBatches, Outcome, Work
from ignite_train import ForwardOutput
from interleaving import MIN_REPETITIONS, interleave, table

WITH_LOGGING = {"by hand, with schedule, averages and a line every 50": contestants.by_hand_with_logging}
COMPILED = {'ignite_train, compile="update"': contestants.ignite_train_compiled}
CONTESTANTS = contestants.BY_HAND | WITH_LOGGING | contestants.IGNITE_TRAIN | COMPILED
PEERS = peers.WITHOUT_LOGGING | {
    "Lightning Trainer, logging every 50": peers.lightning_with_logging,
    "Transformers Trainer, logging every 50": peers.transformers,
}
DEFAULT_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
}
FUSED = partial(torch.optim.AdamW, lr=1e-3, fused=True)


def mean_loss(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
    """What a loop by hand computes."""
    x, y = micro_batch
    return cross_entropy(model(x), y)


def forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    """The same for this library: a sum and its weight."""
    x, y = micro_batch
    return ForwardOutput(cross_entropy(model(x), y, reduction="sum"), len(y))


def tiny_work(
    accumulation_steps: int,
    stretches: int,
    *,
    width: int = 64,
    samples: int = 16,
    stretch: int = LOG_EVERY,
    optimizer: Callable[..., torch.optim.Optimizer] = FUSED,
) -> Work:
    """A network whose update takes a fraction of a millisecond unless it is made wider, and data for it, always the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    batches = [(torch.randn(samples, 32), torch.randint(8, (samples,))) for _ in range(64)]
    return Work(
        model=model,
        optimizer=optimizer(model.parameters()),
        micro_batches=MicroBatches(batches, steps=accumulation_steps, stretch=stretch, stretches=stretches, warm_up=10),
        mean_loss=mean_loss,
        forward=forward,
        accumulation_steps=accumulation_steps,
    )


def print_cost_of_watching(repetitions: int, stretches: int) -> None:
    """What `attach_defaults` adds to a bare trainer: processor time of all threads."""
    rows = []
    for network, width, samples in (("tiny", 64, 16), ("wider", 640, 96)):

        def seconds(run: contestants.Contestant, width: int, samples: int) -> float:
            work = tiny_work(1, stretches, width=width, samples=samples)
            contestants.run(run, work)
            return work.micro_batches.cpu_seconds

        runs = {"bare": contestants.ignite_train, "watched": contestants.ignite_train_with_defaults}
        clocks = {name: partial(seconds, run, width, samples) for name, run in runs.items()}
        rounds = interleave(clocks, repetitions=repetitions)
        bare = f"{rounds.typical('bare') * 1e3:.2f} ms"
        rows.append([network, bare, rounds.ratios("watched").show(3), rounds.difference("watched").show(0)])
    print("\nWhat `attach_defaults` adds, logging every 50 updates.\n")
    print(table(["network", "an update without it", "ratio (quartiles)", "µs an update more (quartiles)"], rows))


def print_ratios(
    head: str, everyone: dict[str, contestants.Contestant], only: str, repetitions: int, make_work: Callable[[], Work]
) -> None:
    """Processor time of those with `only` in their name to that of the loop by hand."""
    chosen = {name: run for name, run in everyone.items() if only in name or name == REFERENCE}
    expected: list[Outcome] = []  # the first run's

    def seconds(run: contestants.Contestant) -> float:
        work = make_work()
        start = parameters_to_vector(work.model.parameters()).detach().clone()
        outcome = contestants.run(run, work)
        expected.append(outcome)
        outcome.check_against(expected[0], start)
        return work.micro_batches.cpu_seconds

    rounds = interleave({name: partial(seconds, run) for name, run in chosen.items()}, repetitions=repetitions)
    print(f"\n{head}: an update by hand takes {rounds.typical(REFERENCE) * 1e6:.0f} µs.\n")
    rows = [[name, rounds.ratios(name).show(), rounds.difference(name).show(0)] for name in chosen if name != REFERENCE]
    print(table(["loop", "ratio to the loop by hand (quartiles)", "µs an update more (quartiles)"], rows))


def main(
    accumulation: Annotated[list[int], Option(help="Micro-batches to an update; may be given several times.")] = [1, 4, 16],  # noqa: B006
    repetitions: Annotated[int, Option(min=1, help="Rounds; all contestants run in each of them.")] = MIN_REPETITIONS + 4,
    stretches: Annotated[int, Option(min=1, help="Of 50 updates, the median of which counts; fewer with accumulation.")] = 10,
    only: Annotated[str, Option(help="Contestants with this in their name; the reference is always there.")] = "",
) -> None:
    """Measure the cost of each loop over the loop by hand."""
    torch.set_num_threads(1)
    everyone = CONTESTANTS | peers.installed(PEERS)
    for steps in accumulation:
        head = f"Accumulation {steps}"
        print_ratios(head, everyone, only, repetitions, partial(tiny_work, steps, max(3, stretches // steps)))
    by_default = contestants.BY_HAND | contestants.BY_DEFAULT
    for name, optimizer in DEFAULT_OPTIMIZERS.items():
        for steps in accumulation:
            work = partial(tiny_work, steps, max(3, stretches // steps), optimizer=optimizer)
            print_ratios(f"{name} as torch makes it, accumulation {steps}", by_default, only, repetitions, work)
    print_cost_of_watching(repetitions, max(3, stretches // 2))


if __name__ == "__main__":
    typer.run(main)
