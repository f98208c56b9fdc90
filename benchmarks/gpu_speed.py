"""Training at GPT-2's size on one GPU in bf16: tokens per second, use of the card and memory of each loop, compiled and not.

    python benchmarks/gpu_speed.py --minutes 9
    python benchmarks/gpu_speed.py --dry-run      # on the CPU at a tiny size: shows that it runs, measures nothing

- Each contestant has a process of its own and takes turns with the others (`turns.py`); a turn takes about a second.
- Use of the card: 6 FLOP per parameter and token, and 12 · layers · width · context per token for attention, over the
  dense bf16 peak of the card's data sheet.
- Parameters apart: the distance to those of the loop by hand after three updates, relative to how far these have moved.
"""

import time
from functools import partial
from typing import Annotated

import typer
from typer import Option

import contestants
import peers
from card import card, fitting, peak_flop_per_second, product_flop_per_second
from contestants import BY_HAND, IGNITE_TRAIN, REFERENCE
from gpt2 import VOCABULARY, Training
from interleaving import MIN_REPETITIONS, table
from turns import Contest, Entry, Result

DEFAULTS = "ignite_train, attach_defaults, logging every 50"
UPDATE = 'ignite_train, compile="update"'
READING = "by hand, reading loss and norm of each update"
LOOPS = (
    BY_HAND
    | {READING: contestants.by_hand_reading}
    | {name: IGNITE_TRAIN[name] for name in ("ignite_train", DEFAULTS)}
    | peers.PEERS
)
GIGABYTES = 14.0  # of each at GPT-2's size
TOLERANCE = 0.2  # for distance, loss and norm: in bf16 AdamW makes more of the order of additions than in fp32
HEAD = ["loop", "tokens/s", "time, by hand = 1 (quartiles)", "use of the card", "peak GiB", "parameters apart"]


def entries(*, compiled: bool, only: str) -> dict[str, Entry]:
    """The contestants. Updates that are compiled as a whole take minutes to compile, so `only` must ask for them."""
    found = {name: Entry(loop, {} if compiled else None) for name, loop in LOOPS.items()}
    if compiled and only and only in UPDATE:
        found[UPDATE] = Entry(contestants.ignite_train_compiled)
    return {name: entry for name, entry in found.items() if only in name or name == REFERENCE}


def shown(training: Training, result: Result, names: list[str]) -> str:
    """The table of one task."""

    def figures(name: str) -> list[str]:
        speed = training.num_tokens / result.rounds.typical(name)
        ratio = "1" if name == REFERENCE else result.rounds.ratios(name).show(3)
        use = f"{speed * training.flop() / peak_flop_per_second():.1%}"
        return [f"{speed:,.0f}", ratio, use, f"{result.peaks[name]:.2f}"]

    return table(HEAD, [result.row(name, partial(figures, name), len(HEAD)) for name in names])


def main(
    layers: Annotated[int, Option(min=1)] = 12,
    width: Annotated[int, Option(min=64, help="A multiple of 64, the width of a head.")] = 768,
    context: Annotated[int, Option(min=1, help="Tokens in a sample.")] = 1024,
    samples: Annotated[int, Option(min=1, help="In a micro-batch.")] = 8,
    accumulation: Annotated[list[int], Option(help="Micro-batches to an update; may be given several times.")] = [1, 4, 16],  # noqa: B006
    repetitions: Annotated[int, Option(min=1, help="Rounds at most; all contestants run in each of them.")] = MIN_REPETITIONS,
    minutes: Annotated[float, Option(help="When they are over no round begins.")] = 9.0,
    only: Annotated[str, Option(help="Contestants with this in their name; the reference is always there.")] = "",
    compiled: Annotated[str, Option(help="without, with or both.")] = "both",
    *,
    dry_run: Annotated[bool, Option("--dry-run", help="On the CPU, tiny: the figures mean nothing.")] = False,
) -> None:
    """Measure training on one GPU, with and without torch.compile."""
    started, seconds = time.perf_counter(), 60 * minutes
    size = (2, 64, 16, 2, 128, "cpu") if dry_run else (layers, width, context, samples, VOCABULARY, "cuda")
    tasks = [Training(*size, steps) for steps in accumulation]
    ways = [way for way in ("without", "with") if compiled in (way, "both")]
    print(f"{card()}; here a product of large bf16 matrices runs at {product_flop_per_second(size[-1]) / 1e12:.0f} TFLOP/s.")
    print(f"{tasks[0]}, of which only the number of steps changes.")
    for number, way in enumerate(ways, start=1):
        everyone = entries(compiled=way == "with", only=only)
        contest = Contest(everyone, tasks, at_once=fitting(GIGABYTES), tolerance=TOLERANCE)
        until = started + seconds * number / len(ways)
        turn = 0.05 if dry_run else 1.0
        for training, result in contest.results(turn_seconds=turn, repetitions=1 if dry_run else repetitions, until=until):
            print(f"\nSteps: {training.steps}, {way} torch.compile; {result.turns}.\n")
            print(shown(training, result, list(everyone)), flush=True)


if __name__ == "__main__":
    typer.run(main)
