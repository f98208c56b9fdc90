"""How much of the library one update enters, in a process of its own: `python tests/support/following.py plain metrics save`.

One process on the CPU, two micro-batches to an update, the third update, when what is cached is there. `metrics` attaches
`TrainingMetrics`, `save` a `Checkpoint` that saves in each update; only the main thread is followed.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from ignite.engine import Events

import ignite_train
from ignite_train import ForwardOutput, Trainer, create_trainer
from ignite_train.handlers import Checkpoint, TrainingMetrics

LIBRARY = Path(ignite_train.__file__).resolve().parent
FOLLOWED = 3  # the update


def forward(model: torch.nn.Module, batch: Any) -> ForwardOutput:
    x, y = batch
    return ForwardOutput(torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), sample_size=len(y))


def make(mode: str) -> Trainer:
    model = torch.nn.Linear(20, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, max_grad_norm=1.0)
    if mode in ("metrics", "save"):
        TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=1))
    if mode == "save":
        Checkpoint(tempfile.mkdtemp(), every=1, asynchronous=False).attach(trainer)
    return trainer


def follow(mode: str) -> Counter[tuple[str, str]]:
    """The calls of each function of the library, by file and name."""
    calls: Counter[tuple[str, str]] = Counter()
    own = (f"{LIBRARY}{os.sep}", f"{(LIBRARY / 'handlers').resolve()}{os.sep}")
    trainer = make(mode)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and is_on:
            path = os.path.realpath(frame.f_code.co_filename)
            if path.startswith(own):
                calls[path, frame.f_code.co_qualname] += 1

    def begin(trainer: Trainer) -> None:
        is_on[:] = [True] * (trainer.state.iteration == FOLLOWED - 1)

    is_on: list[bool] = []
    trainer.add_event_handler(Events.GET_BATCH_STARTED, begin)
    sys.setprofile(note)
    try:
        trainer.run([(torch.randn(4, 20), torch.randint(5, (4,))) for _ in range(2 * FOLLOWED + 2)], max_epochs=1)
    finally:
        sys.setprofile(None)
    return calls


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    for mode in sys.argv[1:]:
        found = follow(mode)
        sys.stdout.write(f"{len({path for path, _ in found})} {len(found)} {sum(found.values())}\n")
