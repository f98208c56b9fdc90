"""What an update on demand costs, beside the same update inside `run`.

    python benchmarks/on_demand.py

The same model and micro-batches in the same groups, on one process, in interleaved rounds. Processor time of the updates alone:
how a run or a session begins and ends is left out, by taking the time of a short one from that of a long one.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Annotated

import torch
import typer
from torch import nn
from torch.nn.functional import mse_loss
from typer import Option

from ignite_train import ForwardOutput, Trainer, create_trainer
from interleaving import MIN_REPETITIONS, interleave, table

SIZES = {"tiny": (16, 2), "small": (128, 4)}  # width and layers

Group = list[tuple[torch.Tensor, torch.Tensor]]


def forward(model: nn.Module, micro_batch: tuple[torch.Tensor, torch.Tensor]) -> ForwardOutput:
    """The summed squared error."""
    x, y = micro_batch
    return ForwardOutput(mse_loss(model(x), y, reduction="sum"), sample_size=len(y))


def make(size: str, accumulation_steps: int) -> Trainer:
    """A trainer that clips, with a fused optimizer."""
    width, layers = SIZES[size]
    model = nn.Sequential(*chain.from_iterable((nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return create_trainer(model, optimizer, forward, accumulation_steps=accumulation_steps, max_grad_norm=1.0)


def in_run(trainer: Trainer, groups: list[Group]) -> None:
    """All micro-batches, from a list."""
    trainer.run([micro_batch for group in groups for micro_batch in group], max_epochs=1)


def on_demand(trainer: Trainer, groups: list[Group]) -> None:
    """All groups, one by one."""
    with trainer.session():
        for group in groups:
            trainer.update(group)


def contestants(size: str, accumulation_steps: int, updates: int) -> dict[str, Callable[[], float]]:
    """Seconds of this many updates, in each way."""
    width, _ = SIZES[size]
    group = [(torch.randn(8, width), torch.randn(8, width)) for _ in range(accumulation_steps)]

    def seconds(train: Callable[[Trainer, list[Group]], None]) -> float:
        taken = []
        for number in (5, 5 + updates):
            trainer = make(size, accumulation_steps)
            started = time.process_time()
            train(trainer, [group] * number)
            taken.append(time.process_time() - started)
        return taken[1] - taken[0]

    run = partial(seconds, in_run)
    return {"run": run, "update": partial(seconds, on_demand), "once more (the noise)": run}


def main(
    repetitions: Annotated[int, Option(min=1, help="Rounds of each setting.")] = 3 * MIN_REPETITIONS,
    updates: Annotated[int, Option(min=1, help="Updates that are timed in each round.")] = 300,
) -> None:
    """Measure updates on demand, and print a table."""
    torch.set_num_threads(1)
    rows = []
    for size in SIZES:
        for accumulation_steps in (1, 4):
            found = interleave(contestants(size, accumulation_steps, updates), repetitions=repetitions, quiet=True)
            microseconds = found.typical("update") / updates * 1e6
            ratios = [found.ratios(name).show() for name in ("update", "once more (the noise)")]
            rows.append((size, str(accumulation_steps), f"{microseconds:.0f} µs", *ratios))
    print(table(("model", "micro-batches", "update on demand", "to one inside run", "once more (the noise)"), rows))


if __name__ == "__main__":
    typer.run(main)
