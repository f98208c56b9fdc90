"""What each acceleration of `ignite_train/fast/` saves, at updates of about 0.5, 8 and 140 ms, on one thread.

    python benchmarks/fast.py

Every contestant does the same updates with fused AdamW and clipping, as in `overhead.py`; an acceleration that gains nothing
at any of these sizes is to be taken out. What is faster on an accelerator alone (the queued step) is not measured here.
"""

from functools import partial
from typing import Annotated, Any

import torch
import typer
from typer import Option

import contestants
from contestants import REFERENCE, Outcome, Work
from interleaving import MIN_REPETITIONS, interleave, table
from overhead import tiny_work

NETWORKS = {"0.5 ms": (64, 16, 6), "8 ms": (768, 96, 3), "140 ms": (2048, 512, 1)}  # width, samples, stretches of 50 updates


def folded(work: Work) -> Outcome:
    """The kernel divides the gradients, and is called by `Optimizer.step`."""
    trainer = contestants.trainer_of(work)
    stepper: Any = vars(trainer.process)["stepper"]
    stepper._direct = lambda *_, **__: "it is measured without"
    return contestants.run_trainer(work, trainer)


CONTESTANTS: dict[str, contestants.Contestant] = {
    **contestants.BY_HAND,
    "fast=False": partial(contestants.ignite_train, fast=False),
    "folded_step": folded,
    "folded_step, direct_step": contestants.ignite_train,
    'compile="update"': contestants.ignite_train_compiled,
}


def main(
    repetitions: Annotated[int, Option(min=1, help="Rounds; all contestants run in each of them.")] = MIN_REPETITIONS,
    size: Annotated[list[str], Option(help="Of an update; may be given several times.")] = [*NETWORKS],  # noqa: B006
) -> None:
    """Measure what each acceleration saves."""
    torch.set_num_threads(1)
    for name in size:
        width, samples, stretches = NETWORKS[name]

        def seconds(run: contestants.Contestant, width: int, samples: int, stretches: int) -> float:
            work = tiny_work(1, stretches, width=width, samples=samples)
            contestants.run(run, work)
            return work.micro_batches.cpu_seconds

        clocks = {name: partial(seconds, run, width, samples, stretches) for name, run in CONTESTANTS.items()}
        rounds = interleave(clocks, repetitions=repetitions)
        print(f"\nAn update by hand takes {rounds.typical(REFERENCE) * 1e3:.2f} ms.\n")
        rows = [[name, rounds.ratios(name).show(), rounds.difference(name).show(0)] for name in clocks if name != REFERENCE]
        print(table(["loop", "ratio to the loop by hand (quartiles)", "µs an update more (quartiles)"], rows))


if __name__ == "__main__":
    typer.run(main)
