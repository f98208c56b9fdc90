"""The learning rates of a schedule with a warm-up, and the updates that it is made for."""

from __future__ import annotations

import contextlib
import logging
import math
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

import cuts
from ignite_train import Trainer, WarmUpSchedule, create_trainer
from ignite_train.handlers import Checkpoint, LearningRateSchedule
from mistakes import Mistake, assert_one_line
from ranks import run_ranks

DATA = cuts.cut(cuts.samples(), [8] * 5)


def sgd(rate: float = 0.5) -> torch.optim.SGD:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": rate / 10}], lr=rate)


def rates(schedule: torch.optim.lr_scheduler.LRScheduler, count: int) -> list[list[float]]:
    """Of each group, in the first `count` updates."""
    found = []
    for _ in range(count):
        found.append([group["lr"] for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_a_cosine_is_that_of_torch(final: float) -> None:
    """Without a warm-up it is torch's CosineAnnealingLR up to the end, and stays at its final value after it."""
    ours = rates(WarmUpSchedule(sgd(), "cosine", total=9, final=final), 12)
    for group, base in enumerate((0.5, 0.05)):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=base)
        torchs = rates(CosineAnnealingLR(optimizer, T_max=9, eta_min=final * base), 10)
        expected = [rate for (rate,) in torchs] + [final * base] * 2
        assert [row[group] for row in ours] == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_line_is_that_of_torch() -> None:
    """Without a warm-up it is torch's LinearLR; with one the line begins when the full rate is reached."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    expected = rates(LinearLR(optimizer, 1.0, 0.2, total_iters=6), 9)
    assert [row[0] for row in rates(WarmUpSchedule(sgd(), "linear", total=6, final=0.2), 9)] == pytest.approx(
        [rate for (rate,) in expected], rel=1e-12
    )
    with_warm_up = [row[0] for row in rates(WarmUpSchedule(sgd(), "linear", warm_up=4, total=10, final=0.2), 13)]
    assert with_warm_up == pytest.approx([0.1, 0.2, 0.3, 0.4, *(rate for (rate,) in expected)], rel=1e-12)


def test_the_other_shapes() -> None:
    """Worked out by hand: the inverse square root meets the warm-up at 1, and halves where n + 1 is four times as large."""
    found = [row[0] / 0.5 for row in rates(WarmUpSchedule(sgd(), "inverse_square_root", warm_up=3), 16)]
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0], rel=1e-12)
    assert found[8] == pytest.approx(2 / 3, rel=1e-12)
    assert found[15] == pytest.approx(0.5, rel=1e-12)
    assert [row[0] for row in rates(WarmUpSchedule(sgd(), "constant", warm_up=1), 4)] == [0.25, 0.5, 0.5, 0.5]


# --- the length of a run ---


@pytest.mark.parametrize(
    ("steps", "epochs"), [(1, 3), (2, 3), ([1, 4], 3), (lambda update: 1 + update % 3, 4)], ids=["1", "2", "list", "callable"]
)
def test_total_updates(steps: Any, epochs: int) -> None:
    """It is what the run does, wherever the groups end, also if it is asked again when the run is over."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), cuts.forward, accumulation_steps=steps)
    total = trainer.total_updates(DATA, max_epochs=epochs)
    assert trainer.run(DATA, max_epochs=epochs).iteration == total
    assert trainer.total_updates(DATA, max_epochs=epochs) == total
    assert trainer.total_updates(cuts.Unsized(DATA), max_epochs=3, epoch_length=7) == 21
    with pytest.raises(ValueError, match="data must have a length on all ranks, got Unsized; pass epoch_length"):
        trainer.total_updates(cuts.Unsized(DATA))
    with pytest.raises(ValueError, match="max_epochs must be at least 1"):
        trainer.total_updates(DATA, max_epochs=0)


def _uneven_on_this_rank() -> tuple[int, int]:
    model = nn.parallel.DistributedDataParallel(cuts.linear())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), cuts.forward, accumulation_steps=2)
    shard = cuts.shard([[4] * 3, [4] * 7])
    return trainer.total_updates(shard, max_epochs=2), trainer.run(shard, max_epochs=2).iteration + 0 * idist.get_rank()


@pytest.mark.slow
def test_total_updates_of_uneven_ranks() -> None:
    """The longest share counts, on both ranks."""
    assert run_ranks(_uneven_on_this_rank) == [(8, 8), (8, 8)]


# --- in a run ---


def job(directory: Path, epochs: int, **options: Any) -> tuple[Trainer, list[float]]:
    """A run of `epochs` with a schedule for its length; the rates that its updates use."""
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer, used = create_trainer(model, optimizer, cuts.forward), []
    schedule = WarmUpSchedule(optimizer, "cosine", warm_up=2, total=trainer.total_updates(DATA, max_epochs=epochs))
    LearningRateSchedule(schedule).attach(trainer)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: used.extend(trainer.state.update_output.learning_rates),  # type: ignore[union-attr]
    )
    Checkpoint(directory, every=1, asynchronous=False, **options).attach(trainer)
    return trainer, used


@pytest.mark.slow
def test_resumed_in_the_middle(tmp_path: Path) -> None:
    """The rates of a run that broke off in the warm-up and in the decay are bitwise those of one that did not."""
    whole, expected = job(tmp_path / "whole", 2)
    whole.run(DATA, max_epochs=2)
    joined: list[float] = []
    for fails_in in (2, 7, 99):
        trainer, used = job(tmp_path / "broken", 2)
        trainer.add_event_handler(Events.ITERATION_STARTED(once=fails_in), lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError) if fails_in < 99 else contextlib.nullcontext():
            trainer.run(DATA, max_epochs=2)
        joined += used
    assert joined == expected


@pytest.mark.slow
def test_a_finished_schedule_of_a_run_that_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the limit is raised the rate stays at its final value, and the log says so, and that the new total is not used."""
    trainer, _ = job(tmp_path, 2)
    trainer.run(DATA, max_epochs=2)
    trainer, used = job(tmp_path, 3)
    with caplog.at_level(logging.INFO):
        trainer.run(DATA, max_epochs=3)
    assert used == [0.0] * 5
    text = caplog.text
    assert "its learning rate will stay at its final value" in text
    assert ".total: 10 -> 15 (the checkpoint's is used)" in text


def test_the_script_may_win(tmp_path: Path) -> None:
    """With another `lr` and `script_wins`, the restored schedule keeps its place and shape over the new rate."""
    trainer, _ = job(tmp_path, 2)
    trainer.run(DATA, max_iters=5)
    trainer, used = job(tmp_path, 2, script_wins=("lr",))
    trainer.run(DATA, max_iters=6)
    assert used == [pytest.approx(1e-3 * (1 + math.cos(math.pi * 3 / 8)) / 2, rel=1e-12)]


# --- mistakes ---


MISTAKES: dict[str, Mistake] = {
    "optimizer": (TypeError, "optimizer must be a torch.optim.Optimizer", lambda: WarmUpSchedule(nn.Linear(1, 1), "cosine")),  # type: ignore[arg-type]
    "shape": (ValueError, "did you mean 'cosine'", lambda: WarmUpSchedule(sgd(), "cosin", total=3)),  # type: ignore[arg-type]
    "no-total": (ValueError, "total must be given for 'linear'", lambda: WarmUpSchedule(sgd(), "linear")),
    "short": (
        ValueError,
        "total must be greater than warm_up=5, got 5",
        lambda: WarmUpSchedule(sgd(), "linear", warm_up=5, total=5),
    ),
    "negative": (ValueError, "warm_up must be at least 1, got -1", lambda: WarmUpSchedule(sgd(), "constant", warm_up=-1)),
    "float": (TypeError, "warm_up must be a positive integer", lambda: WarmUpSchedule(sgd(), "constant", warm_up=0.1)),  # type: ignore[arg-type]
    "rate": (ValueError, "final must be at most 1, got 2", lambda: WarmUpSchedule(sgd(), "cosine", total=9, final=2.0)),
    "needless": (ValueError, "total and final must be left out", lambda: WarmUpSchedule(sgd(), "constant", total=9)),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line, when the schedule is made."""
    assert_one_line(MISTAKES[name])
