"""How many updates a run will have is one number for all who tell it: exact where each epoch to come is like the latest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn

from ignite_train import Trainer, create_trainer
from ignite_train.handlers import ProgressLog, TrainingMetrics

DATA = [torch.randn(4, 3) for _ in range(12)]


def make(accumulation_steps: Any = 1) -> Trainer:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return create_trainer(model, optimizer, lambda model, x: model(x).square().mean(), accumulation_steps=accumulation_steps)


def told(trainer: Trainer, **limit: int) -> set[int | None]:
    """What was expected at all moments of a run, from its first event to its last."""
    found = set[int | None]()
    for event in (*[one for one in Events if one.name.endswith(("STARTED", "COMPLETED"))], Events.TERMINATE):
        if event is not Events.EXCEPTION_RAISED:
            trainer.add_event_handler(event, lambda: found.add(trainer.expected_updates))
    trainer.run(DATA, **limit)
    return found


@pytest.mark.parametrize(
    ("steps", "limit", "total"),
    [
        (1, {"max_epochs": 3}, 36),
        (5, {"max_epochs": 3}, 9),
        (5, {"max_iters": 7}, 7),
        ([1, 3], {"max_iters": 20}, 20),
        ([1, 3], {"max_epochs": 3, "epoch_length": 8}, 24),
    ],
)
def test_it_is_the_number_with_which_the_run_ends(steps: Any, limit: dict[str, int], total: int) -> None:
    """At each moment; an epoch of a given length has it with any accumulation."""
    trainer = make(steps)
    assert told(trainer, **limit) == {total}
    assert trainer.state.iteration == total


@pytest.mark.parametrize("steps", [[1, 3], lambda update: 1 + update % 3])
def test_it_is_unknown_where_epochs_have_different_lengths(steps: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """No line tells a total, and there is no time to go, which would be wrong."""
    trainer = make(steps)
    TrainingMetrics(memory=False).attach(trainer, Events.EPOCH_COMPLETED)
    ProgressLog("simple").attach(trainer, Events.EPOCH_COMPLETED)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=14), trainer.terminate)
    assert told(trainer, max_epochs=5) == {None}
    assert "time_to_go" not in trainer.state.metrics
    assert "stopped after 14 updates (14 steps, 0 skipped)" in capsys.readouterr().out


def test_a_run_that_continues_with_other_accumulation_counts_what_is_done_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    """Two epochs of 12 updates, and two of 3."""
    first, second = make(1), make(4)
    first.run(DATA, max_epochs=2)
    second.load_state_dict(first.state_dict())
    published = []
    TrainingMetrics(memory=False).attach(second, Events.ITERATION_COMPLETED(every=1))
    second.add_event_handler(Events.ITERATION_COMPLETED, lambda: published.append(second.state.metrics["time_to_go"] > 0))
    ProgressLog("simple").attach(second, Events.ITERATION_COMPLETED)
    assert told(second, max_epochs=4) == {30}
    assert published == [True] * 5 + [False]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("30 updates in 4 epochs: ")
    assert lines[3].startswith("epoch 3/4  update 25/30 ")


def test_an_epoch_that_was_cut_short_counts_as_it_was() -> None:
    """After 5 of its 12 updates, two whole ones follow."""
    trainer = make()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), trainer.terminate_epoch)
    assert told(trainer, max_epochs=3) == {36, 29}
    assert trainer.state.iteration == 29


def test_without_a_limit_it_is_unknown() -> None:
    """Before the first run, and in a session."""
    trainer = make()
    assert trainer.expected_updates is None
    with trainer.session():
        trainer.update(DATA[:1])
        assert trainer.expected_updates is None
