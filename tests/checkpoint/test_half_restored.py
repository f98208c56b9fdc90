"""A resume that fails while objects are given their states: no later call of `run` trains on with a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn

from bits import bit_by_bit
from ignite_train import CheckpointError, Trainer, create_trainer
from ignite_train.handlers import Checkpoint

LOADER = [torch.linspace(-1, 1, 24).reshape(8, 3) + number for number in range(3)]


class Counts:
    """A handler that cannot take its state over as long as it `fails`."""

    def __init__(self) -> None:
        self.number, self.fails = 0, False

    def __call__(self) -> None:
        self.number += 1

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if self.fails:
            raise ValueError("not now")
        self.number = state_dict["number"]


def build(directory: Path, seed: int) -> tuple[Trainer, Counts]:
    """Dropout shows the random state, which is restored after the handler; model and optimizer are restored before it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trainer, counts = create_trainer(model, optimizer, lambda model, x: model(x).square().mean()), Counts()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, counts)
    Checkpoint(directory).attach(trainer)
    return trainer, counts


def results(trainer: Trainer, counts: Counts) -> Any:
    model, optimizer = (trainer.parts[name].state_dict() for name in ("model", "optimizer"))
    return bit_by_bit([model, optimizer, counts.number, trainer.state.iteration, torch.get_rng_state()])


def half_restored(directory: Path, resume: str | Path = "auto") -> tuple[Trainer, Counts]:
    trainer, counts = build(directory, seed=5)
    counts.fails = True
    with pytest.raises(
        CheckpointError,
        match=r"resuming from \S+ failed: rank 0, CheckpointError: 'handlers/Counts' refuses .*: not now",
    ):
        trainer.run(LOADER, max_iters=7, resume=resume)
    counts.fails = False
    return trainer, counts


@pytest.mark.slow
def test_the_next_run_resumes_again(tmp_path: Path) -> None:
    """What could not be loaded can be now: the run ends with the bits of one that was not interrupted."""
    whole = build(tmp_path / "whole", seed=0)
    whole[0].run(LOADER, max_iters=7)
    expected = results(*whole)
    build(tmp_path / "parts", seed=0)[0].run(LOADER, max_iters=4)
    trainer, counts = half_restored(tmp_path / "parts")
    trainer.run(LOADER, max_iters=7)
    assert results(trainer, counts) == expected


def test_without_a_checkpoint_to_resume_from_it_is_refused(tmp_path: Path) -> None:
    """The parts came from elsewhere, and the run's own directory is empty; a path restores the run."""
    build(tmp_path / "other", seed=0)[0].run(LOADER, max_iters=4)
    trainer, counts = half_restored(tmp_path / "own", tmp_path / "other")
    for resume in ("auto", "never"):
        with pytest.raises(CheckpointError, match=r"holds parts of \S+/other/update-00000004, and others"):
            trainer.run(LOADER, max_iters=7, resume=resume)
    assert trainer.run(LOADER, max_iters=7, resume=tmp_path / "other").iteration == counts.number == 7
