"""What each acceleration of `ignite_train/fast/` saves, at updates of about 0.5, 8 and 140 ms, on one thread.

    python benchmarks/fast.py

Every contestant does the same updates with AdamW and clipping, as in `overhead.py`; one acceleration at a time is left out.
Take an acceleration out of the library if it gains nothing at any of these sizes. What is faster on an accelerator alone (the
queued step) is not measured here.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import torch
import typer
from typer import Option

import contestants
from contestants import LOG_EVERY, Outcome, Work
from ignite_train import Trainer
from interleaving import MIN_REPETITIONS
from overhead import DEFAULT_OPTIMIZERS, FUSED, print_ratios, tiny_work


class Size(NamedTuple):
    """A network, and how long it is measured: `stretches` times `stretch` updates."""

    width: int
    samples: int
    stretch: int
    stretches: int


SIZES = {"0.5 ms": Size(64, 16, LOG_EVERY, 6), "8 ms": Size(768, 96, LOG_EVERY, 3), "140 ms": Size(2048, 512, 10, 1)}


def without(leave_out: Callable[[Any], None], work: Work) -> Outcome:
    """`leave_out` takes an acceleration out of the trainer's update."""
    trainer: Trainer = contestants.trainer_of(work)
    leave_out(trainer.process)
    return contestants.run_trainer(work, trainer)


def no_direct_engine(update: Any) -> None:
    """Backward is `torch.autograd.backward`."""
    update.gather.passes.engine = None


def no_direct_step(update: Any) -> None:
    """The kernel that divides the gradients is called by `Optimizer.step`."""
    update.stepper._direct = lambda *_, **__: "it is measured without"


def plain_step(update: Any) -> None:
    """The gradients are multiplied before `Optimizer.step` is called."""
    update.stepper = update.stepper._plain


ALL, NONE = "ignite_train", "ignite_train, without fast/"
ENGINE = {"without direct_engine": partial(without, no_direct_engine)}
EVERY_CONTESTANT: dict[str, dict[str, contestants.Contestant]] = {
    "AdamW with `fused=True`": {
        **contestants.BY_HAND,
        ALL: contestants.ignite_train,
        **ENGINE,
        "without direct_step": partial(without, no_direct_step),
        "without folded_step and direct_step": partial(without, plain_step),
        NONE: partial(contestants.ignite_train, fast=False),
        'ignite_train, compile="update"': contestants.ignite_train_compiled,
    },
    "AdamW as torch makes it": {
        **contestants.BY_HAND,
        ALL: contestants.ignite_train,
        **ENGINE,
        "without unwrapped_step": partial(without, plain_step),
        NONE: partial(contestants.ignite_train, fast=False),
    },
}


def main(
    repetitions: Annotated[int, Option(min=1, help="Rounds; all contestants run in each of them.")] = MIN_REPETITIONS,
    size: Annotated[list[str], Option(help="Of an update; may be given several times.")] = [*SIZES],  # noqa: B006
) -> None:
    """Measure what each acceleration saves."""
    torch.set_num_threads(1)
    # At a larger rate the wider networks end elsewhere on some processors, by the rounding of gradients that are nearly zero.
    made = (partial(one, lr=1e-5) for one in (FUSED, DEFAULT_OPTIMIZERS["AdamW"]))
    optimizers = dict(zip(EVERY_CONTESTANT, made, strict=True))
    for name in size:
        width, samples, stretch, stretches = SIZES[name]
        for kind, everyone in EVERY_CONTESTANT.items():
            work = partial(tiny_work, 1, stretches, width=width, samples=samples, stretch=stretch, optimizer=optimizers[kind])
            print_ratios(f"{kind}, an update of about {name}", everyone, "", repetitions, work)


if __name__ == "__main__":
    typer.run(main)
