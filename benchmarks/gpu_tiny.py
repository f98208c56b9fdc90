"""Tiny models on one GPU, which waits for the host to launch kernels: updates as CUDA graphs beside the loop by hand.

    python benchmarks/gpu_tiny.py --minutes 4
    python benchmarks/gpu_tiny.py --dry-run      # on the CPU: shows that it runs, measures nothing

Networks and micro-batches are those of `compiled.py`, on the device. Each contestant has a process of its own and takes turns
with the others (`turns.py`). The time of an update is the host's, which waits for the GPU before and after each turn.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer import Option

import contestants
from card import card
from compiled import NETWORKS, forward
from contestants import BY_HAND, REFERENCE, Outcome, Work
from interleaving import MIN_REPETITIONS, Spread, table
from turns import Contest, Entry, Result

TOLERANCE = 0.05
CHOSEN = ("MLP of width 64", "transformer, 4 blocks of width 128", "MLP of width 256")
HEAD = ["loop", "µs an update", "time, by hand = 1 (quartiles)", "times as fast as by hand", "parameters apart"]


def mean_loss(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> Tensor:
    """For loops that average the losses of micro-batches."""
    x, y = micro_batch
    return cross_entropy(model(x), y)


def model_compiled(work: Work, *, how: bool | dict[str, Any] = True) -> Outcome:
    """This library with `compile=True`, or with options of `torch.compile`."""
    return contestants.run_trainer(work, contestants.trainer_of(work, compiled=how))


ENTRIES = {
    **{name: Entry(loop) for name, loop in BY_HAND.items()},
    "by hand, torch.compile": Entry(contestants.by_hand, {}),
    'by hand, torch.compile(mode="reduce-overhead")': Entry(contestants.by_hand, {"mode": "reduce-overhead"}),
    "ignite_train": Entry(contestants.ignite_train),
    "ignite_train, compile=True": Entry(model_compiled),
    'ignite_train, compile={"mode": "reduce-overhead"}': Entry(partial(model_compiled, how={"mode": "reduce-overhead"})),
    'ignite_train, compile="update"': Entry(contestants.ignite_train_compiled),
}


@dataclass(frozen=True)
class TinyTraining:
    """A network of `compiled.py`, and how many micro-batches an update has."""

    network: str
    device: str
    steps: int

    def work(self, compiled: Mapping[str, Any] | None) -> Work:
        """A fresh model, and one micro-batch on the device."""
        torch.manual_seed(0)
        model, batch = NETWORKS[self.network][0]()
        model.to(self.device)
        if compiled is not None:
            model.compile(**compiled)
        return Work(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
            micro_batches=[tuple(tensor.to(self.device) for tensor in batch)],
            mean_loss=mean_loss,
            forward=forward,
            accumulation_steps=self.steps,
        )


def shown(result: Result) -> str:
    """The table of one task."""

    def figures(name: str) -> list[str]:
        microseconds = f"{result.rounds.typical(name) * 1e6:.0f}"
        if name == REFERENCE:
            return [microseconds, "1", "1"]
        faster = Spread.of([reference / mine for mine, reference in result.rounds.pairs[name]])
        return [microseconds, result.rounds.ratios(name).show(3), faster.show()]

    return table(HEAD, [result.row(name, partial(figures, name), len(HEAD)) for name in ENTRIES])


def main(
    network: Annotated[list[str], Option(help="A name in compiled.py; may be given several times.")] = list(CHOSEN),  # noqa: B006
    accumulation: Annotated[list[int], Option(help="Micro-batches to an update; may be given several times.")] = [1, 4],  # noqa: B006
    repetitions: Annotated[int, Option(min=1, help="Rounds at most; all contestants run in each of them.")] = MIN_REPETITIONS,
    minutes: Annotated[float, Option(help="When they are over no round begins.")] = 4.0,
    *,
    dry_run: Annotated[bool, Option("--dry-run", help="On the CPU: the figures mean nothing.")] = False,
) -> None:
    """Measure small updates on one GPU."""
    until = time.perf_counter() + 60 * minutes
    device = "cpu" if dry_run else "cuda"
    tasks = [TinyTraining(name, device, steps) for steps in accumulation for name in network]
    print(f"{card()}; fused AdamW, clipping, fp32.")
    contest = Contest(ENTRIES, tasks, at_once=len(ENTRIES), tolerance=TOLERANCE)
    turn = 0.02 if dry_run else 0.3
    for task, result in contest.results(turn_seconds=turn, repetitions=1 if dry_run else repetitions, until=until):
        print(f"\n{task.network}, steps: {task.steps}; {result.turns}.\n")
        print(shown(result), flush=True)


if __name__ == "__main__":
    typer.run(main)
