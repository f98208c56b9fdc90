"""`interrupt` ends the run of all ranks after the same update, and the next `run` continues there exactly."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn

from bits import bit_by_bit
from ignite_train import ForwardOutput, Trainer, TrainEvents, UpdateOptions, create_trainer
from ranks import run_ranks
from tiers import only

UPDATES, EPOCHS = 4, 2


def build() -> tuple[Trainer, nn.Module, list[torch.Tensor], list[str]]:
    """A trainer, its model, this rank's data, and what is fired at the ends of epochs and runs."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    several = idist.get_world_size() > 1
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, x: ForwardOutput(model(x).square().sum(), len(x)),
        options=UpdateOptions(reduction="explicit" if several else "auto"),
    )
    fired: list[str] = []

    def note(trainer: Trainer, name: str) -> None:
        fired.append(f"{name} {trainer.state.epoch}/{trainer.state.iteration}")

    for event in (Events.EPOCH_COMPLETED, Events.INTERRUPT, Events.TERMINATE, Events.COMPLETED):
        trainer.add_event_handler(event, note, event.name)
    length = UPDATES - idist.get_rank()  # ranks of unequal length
    data = [torch.full((3, 2), 1.0 + number + idist.get_rank()) for number in range(length)]
    return trainer, model, data, fired


def interrupted(event: Any, number: int, asking: int) -> tuple[list[str], list[str], bool, Any, Any]:
    """What is fired until the interrupt, and after it; the flag; and the weights, also of a run without an interrupt."""
    whole, expected, data, _ = build()
    whole.run(data, max_epochs=EPOCHS)
    trainer, model, data, fired = build()
    if idist.get_rank() == asking:
        handle = trainer.add_event_handler(event(once=number), trainer.interrupt)
    trainer.run(data, max_epochs=EPOCHS)
    first, flag = [*fired], trainer.should_interrupt
    if idist.get_rank() == asking:
        handle.remove()  # EPOCH_STARTED is fired again for the epoch that continues
    trainer.run(data)
    return first, fired[len(first) :], flag, bit_by_bit(model.state_dict()), bit_by_bit(expected.state_dict())


END = [f"EPOCH_COMPLETED 2/{2 * UPDATES}", f"COMPLETED 2/{2 * UPDATES}"]
EPOCH = f"EPOCH_COMPLETED 1/{UPDATES}"
CASES: dict[str, tuple[Any, int, list[str], list[str]]] = {
    "in an update": (TrainEvents.MICRO_BATCH_STARTED, 2, ["INTERRUPT 1/2"], [EPOCH, *END]),
    "after an update": (Events.ITERATION_COMPLETED, 2, ["INTERRUPT 1/3"], [EPOCH, *END]),
    "after the last update of an epoch": (Events.ITERATION_COMPLETED, UPDATES, [EPOCH, f"INTERRUPT 1/{UPDATES}"], END),
    "after an epoch": (Events.EPOCH_COMPLETED, 1, [EPOCH, f"INTERRUPT 1/{UPDATES}"], END),
    "at the beginning of an epoch": (Events.EPOCH_STARTED, 2, [EPOCH, f"INTERRUPT 2/{UPDATES + 1}"], END),
    "after the last epoch": (Events.EPOCH_COMPLETED, 2, [EPOCH, END[0], f"INTERRUPT 2/{2 * UPDATES}"], END[1:]),
}


@pytest.mark.slow
@pytest.mark.parametrize("asking", only([1], [0, 1]))
@pytest.mark.parametrize("case", CASES)
def test_ranks_are_interrupted_together(case: str, asking: int) -> None:
    """Whichever rank asks, all end after the same update, fire INTERRUPT, and continue to the end of an undisturbed run."""
    event, number, first, rest = CASES[case]
    for found in run_ranks(interrupted, event, number, asking, timeout_seconds=60):
        assert found[:3] == (first, rest, False)
        assert found[3] == found[4]


@pytest.mark.parametrize("case", ["in an update", "after an epoch", "after the last epoch"])
def test_one_process_is_interrupted_at_once(case: str) -> None:
    """After the running update or epoch; the flag is down when `run` is over."""
    event, number, first, rest = CASES[case]
    found = interrupted(event, number, 0)
    assert found[:3] == (first, rest, False)
    assert found[3] == found[4]


def test_a_request_to_end_the_epoch_outlives_an_interrupt() -> None:
    """The epoch that was to end after update 2 ends there, though the run was interrupted in between."""
    trainer, _, data, fired = build()

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def stop_both() -> None:
        trainer.terminate_epoch()
        trainer.interrupt()

    trainer.run(data, max_epochs=1)
    trainer.run(data)
    assert fired == ["INTERRUPT 1/2", "EPOCH_COMPLETED 1/2", "COMPLETED 1/2"]
