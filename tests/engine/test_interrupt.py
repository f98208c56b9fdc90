"""`interrupt` ends the run of all ranks after the same update, and the next `run` continues there exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn

from bits import bit_by_bit
from ignite_train import ForwardOutput, Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint
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
@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_ranks_are_interrupted_together(case: str, asking: int) -> None:
    """Whichever rank asks, all end after the same update, fire INTERRUPT, and continue to the end of an undisturbed run."""
    event, number, first, rest = CASES[case]
    for found in run_ranks(interrupted, event, number, asking):
        assert found[:3] == (first, rest, False)
        assert found[3] == found[4]


@pytest.mark.parametrize("case", ["in an update", "after an epoch", "after the last epoch"])
def test_one_process_is_interrupted_at_once(case: str) -> None:
    """After the running update or epoch; the flag is down when `run` is over."""
    event, number, first, rest = CASES[case]
    found = interrupted(event, number, 0)
    assert found[:3] == (first, rest, False)
    assert found[3] == found[4]


# --- data that can be read once ---------------------------------------------------------------------------------------------

EVENTS = [Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, Events.ITERATION_COMPLETED]


def read_once(accumulation_steps: Any, seen: list[Any], uneven: Any = "all") -> tuple[Trainer, nn.Module]:
    """A trainer that writes down what it is trained on, which a handler has doubled."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)

    def forward(model: nn.Module, x: torch.Tensor) -> ForwardOutput:
        seen.append((trainer.state.iteration, float(x)))
        return ForwardOutput(model(x).square().sum(), len(x))

    options = UpdateOptions(reduction="explicit" if idist.get_world_size() > 1 else "auto", uneven=uneven)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=accumulation_steps, options=options)

    @trainer.on(Events.GET_BATCH_COMPLETED)
    def double() -> None:
        batch: Any = trainer.state.batch
        batch[:] = [2 * x for x in batch]

    return trainer, model


def numbers(length: int) -> Iterator[torch.Tensor]:
    return (torch.full((1, 1), float(number)) for number in range(length))


def stopped(
    call: str, event: Any, at: int, accumulation_steps: Any, epoch_length: int | None, uneven: str = "all"
) -> tuple[list[Any], Any]:
    """What a run on an iterator is trained on, stopped in an update and continued, and the weights."""
    seen: list[Any] = []
    trainer, model = read_once(accumulation_steps, seen, uneven)
    data = numbers(9 - idist.get_rank() * (1 if uneven == "all" else 2))
    if call != "never":
        handle = trainer.add_event_handler(event(once=at), lambda: getattr(trainer, call)(agreed=True))
    limits = {"max_epochs": 1} if epoch_length is None else {"max_epochs": 2, "epoch_length": epoch_length}
    trainer.run(data, **limits)
    if call != "never":
        assert trainer.state.iteration == at + event.name.startswith("GET_BATCH")
        handle.remove()
        trainer.run(data, max_epochs=limits["max_epochs"])
    return seen, bit_by_bit(model.state_dict())


@pytest.mark.parametrize("epoch_length", [None, 2], ids=["one-pass", "stream"])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("at", only([2], [1, 2, 3]))
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
@pytest.mark.parametrize("call", only(["interrupt"], ["interrupt", "terminate"]))
def test_an_iterator_is_continued(call: str, event: Any, at: int, accumulation_steps: int, epoch_length: int | None) -> None:
    """Nothing that it gave is lost or trained on twice, wherever in the update the stop was asked for."""
    whole = stopped("never", event, at, accumulation_steps, epoch_length)
    assert len(whole[0]) == (9 if epoch_length is None else 4 * accumulation_steps)
    assert stopped(call, event, at, accumulation_steps, epoch_length) == whole


@pytest.mark.slow
@pytest.mark.parametrize("epoch_length", [None, 2], ids=["one-pass", "stream"])
@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED], ids=lambda event: event.name)
def test_iterators_of_ranks_are_continued(event: Any, epoch_length: int | None) -> None:
    """The same on ranks whose iterators differ in length and are read one micro-batch ahead."""
    for accumulation_steps, at in ((1, 1), (2, 2), (2, 3)):
        whole = run_ranks(stopped, "never", event, at, accumulation_steps, epoch_length)
        assert whole[0][1] == whole[1][1]
        assert run_ranks(stopped, "interrupt", event, at, accumulation_steps, epoch_length) == whole


def stopped_before_the_last_group() -> list[Any]:
    return [stopped(call, Events.ITERATION_STARTED, 3, 2, None, "shortest") for call in ("never", "interrupt", "terminate")]


@pytest.mark.slow
def test_what_other_ranks_lack_is_left_out_after_a_stop() -> None:
    """Of the fourth group of 2 one rank has a single micro-batch, so the other leaves one out, also in a run that continues."""
    for whole, *continued in run_ranks(stopped_before_the_last_group):
        assert len(whole[0]) == 7
        assert continued == [whole, whole]


def other_data_on_one_rank() -> str:
    """The error where one rank continues its iterator and the other passes something new."""
    trainer, _ = read_once(1, [])
    data = numbers(5)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: trainer.interrupt(agreed=True))
    trainer.run(data)
    with pytest.raises(ValueError, match="data must be what it was before the stop") as caught:
        trainer.run(data if idist.get_rank() == 0 else numbers(5))
    return str(caught.value)


@pytest.mark.slow
def test_ranks_continue_their_data_together() -> None:
    """One rank alone with new data is refused on both."""
    first, second = run_ranks(other_data_on_one_rank)
    assert first == second


@pytest.mark.sampled(4)
@pytest.mark.parametrize("epoch_length", [None, 2], ids=["one-pass", "stream"])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_another_process_reads_an_iterator_up_to_it(tmp_path: Path, event: Any, at: int, epoch_length: int | None) -> None:
    """A checkpoint of the stopped run has the place behind the micro-batches that were trained on."""
    limits: dict[str, Any] = {"max_epochs": 1} if epoch_length is None else {"max_epochs": 2, "epoch_length": epoch_length}
    whole: list[Any] = []
    read_once(1, whole)[0].run(numbers(7), **limits)
    seen: list[Any] = []
    for stops in (True, False):
        trainer, _ = read_once(1, seen)
        Checkpoint(tmp_path).attach(trainer)
        if stops:
            trainer.add_event_handler(event(once=at), lambda engine: engine.terminate())
        trainer.run(numbers(7), **limits)
    assert seen == whole


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
