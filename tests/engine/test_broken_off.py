"""A run that is broken off anywhere and called again trains on the same groups as one that is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bits import bit_by_bit
from ignite_train import ForwardOutput, ResumableLoader, Trainer, TrainEvents, create_trainer
from tiers import nightly, slow

SAMPLES, EPOCHS = 7, 2


class Numbers(Dataset[Tensor]):
    """Sample i is i; before each sample it calls `before`."""

    def __init__(self, before: Callable[[], object]) -> None:
        self.before = before

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        self.before()
        return torch.tensor([float(index)])


class Iterable:
    """Opened again for each pass; a pass in which an error was raised has ended."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Tensor]:
        return (self.numbers[index][None] for index in range(SAMPLES))


def from_own(numbers: Numbers) -> DataLoader[Tensor]:
    return DataLoader(numbers, shuffle=True, generator=torch.Generator().manual_seed(7))


def from_process(numbers: Numbers) -> DataLoader[Tensor]:
    return DataLoader(numbers, shuffle=True)


def resumable(numbers: Numbers) -> ResumableLoader:
    return ResumableLoader(numbers, 1, shuffle=True, seed=7)


def in_thread(numbers: Numbers) -> ResumableLoader:
    return ResumableLoader(numbers, 1, shuffle=True, seed=7, fetch_in_thread=True)


class OneState:
    """A loader whose state is one object that it changes, and not a copy of it."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers, self.state, self.loaded = numbers, {"next": 0}, {"next": 0}

    def __iter__(self) -> Iterator[Tensor]:
        self.state, self.loaded = self.loaded, {"next": 0}
        return self.rest()

    def rest(self) -> Iterator[Tensor]:
        while self.state["next"] < SAMPLES:
            sample = self.numbers[self.state["next"]][None]
            self.state["next"] += 1
            yield sample

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


LOADERS = {make.__name__: make for make in (Iterable, from_own, from_process, resumable, in_thread)}


def fail(_trainer: Trainer) -> None:
    raise RuntimeError("stopped")


def press_control_c(_trainer: Trainer) -> None:
    raise KeyboardInterrupt


STOPS = {"error": fail, "ctrl-c": press_control_c, "terminate": Trainer.terminate, "interrupt": Trainer.interrupt}
EVENTS = {
    event.name: event
    for event in (
        Events.EPOCH_STARTED,
        Events.GET_BATCH_STARTED,
        Events.GET_BATCH_COMPLETED,
        Events.ITERATION_STARTED,
        TrainEvents.GRADIENTS_READY,
        Events.ITERATION_COMPLETED,
        Events.EPOCH_COMPLETED,
    )
}


def train(loader: str, length: int | None, steps: int, stop: str = "", place: str = "", number: int = 0) -> Any:
    """The micro-batches of each update and the weights, where `stop` happens in the `number`-th `place`, if any."""
    left, breaks = [number], [bool(place)]
    used: dict[int, list[float]] = {}

    def count(trainer: Any = None) -> None:
        left[0] -= 1
        if left[0] == 0 and breaks:
            breaks.clear()
            STOPS[stop](trainer)

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        used.setdefault(trainer.state.iteration, []).append(float(x))
        return ForwardOutput((model(x) / SAMPLES).square().sum(), len(x))

    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(2)
    model = nn.Linear(1, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), forward, accumulation_steps=steps)
    trainer.interrupt_resume_enabled = True
    trainer.add_event_handler(Events.GET_BATCH_COMPLETED, lambda: used.pop(trainer.state.iteration + 1, None))
    if place in EVENTS:
        trainer.add_event_handler(EVENTS[place], count, trainer)
    data = LOADERS[loader](Numbers(count if place == "data" else lambda: None))
    try:
        trainer.run(data, max_epochs=EPOCHS, epoch_length=length)
    except (RuntimeError, KeyboardInterrupt):
        assert stop in ("error", "ctrl-c")
    assert not place or not breaks
    if place:
        trainer.run(data, max_epochs=EPOCHS, epoch_length=length)
    samples = list(chain.from_iterable(used[update] for update in sorted(used)))
    passes = [sorted(samples[begin : begin + SAMPLES]) for begin in range(0, len(samples) // SAMPLES * SAMPLES, SAMPLES)]
    assert all(each == list(range(SAMPLES)) for each in passes)
    return used, bit_by_bit(model.state_dict())


@cache
def undisturbed(loader: str, length: int | None, steps: int) -> Any:
    return train(loader, length, steps)


def places(length: int | None, steps: int) -> list[tuple[str, str, int]]:
    """Where a run can be broken off: how, in which event or in the dataset, and in which of them."""
    updates = length or -(-SAMPLES // steps)
    cases = [(stop, name, number) for stop in STOPS for name in EVENTS if "EPOCH" in name for number in (1, 2)]
    in_epochs = [1, 2, updates, updates + 1, updates + 2, 2 * updates]
    cases += [(stop, name, number) for stop in STOPS for name in EVENTS if "EPOCH" not in name for number in in_epochs]
    samples = {1, 2, SAMPLES, SAMPLES + 1, SAMPLES + 2, steps * updates, steps * updates + 1}
    read = EPOCHS * (SAMPLES if length is None else steps * length)
    return cases + [(stop, "data", number) for stop in ("error", "ctrl-c") for number in sorted(samples) if number <= read]


@pytest.mark.parametrize("part", [slow(0), nightly(1)])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("length", [None, 3, nightly(7)])
@pytest.mark.parametrize("loader", LOADERS)
def test_no_micro_batch_is_lost_or_repeated(loader, length, steps, part):
    """A third of the places, in two parts."""
    expected, different = undisturbed(loader, length, steps), []
    cases = places(length, steps)
    for place in random.Random(steps).sample(cases, len(cases) // 3)[part::2]:  # noqa: S311
        found = train(loader, length, steps, *place)
        if found != expected and (length is None or loader != "from_process"):  # which shuffles a later pass differently
            different.append(place)
    assert different == []


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("stop", ["error", "terminate"])
def test_a_loader_that_changes_the_state_that_it_gave(stop, steps, monkeypatch):
    """Its micro-batches are repeated too: the state before them was copied."""
    monkeypatch.setitem(LOADERS, "OneState", OneState)
    for number in range(1, 2 * -(-SAMPLES // steps)):
        assert train("OneState", None, steps, stop, "GRADIENTS_READY", number) == undisturbed("OneState", None, steps)


@pytest.mark.parametrize(
    ("stop", "place", "number"),
    [
        ("ctrl-c", "GET_BATCH_COMPLETED", 4),
        ("ctrl-c", "data", 2 * SAMPLES),
        ("terminate", "GET_BATCH_COMPLETED", 1),
        ("error", "EPOCH_COMPLETED", 1),
    ],
)
def test_some_places_of_an_epoch_of_given_length(stop, place, number):
    """The first group of a later epoch; a group that was read in part; the first pass, whose generator has shuffled it."""
    assert train("from_own", 3, 3, stop, place, number) == undisturbed("from_own", 3, 3)


class Shards:
    """A run with `epoch_length` over shards of numbers, 0 to 4, 10 to 14, ...; it fails in the `number`-th `place`, once."""

    def __init__(self, place: Any = None, number: int = 0) -> None:
        self.left, self.groups = number, []
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        self.trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().sum(), accumulation_steps=2)
        self.trainer.add_event_handler(TrainEvents.STEP_COMPLETED, self.note)
        self.shards = iter([[torch.full((1, 1), 10.0 * number + index) for index in range(5)] for number in range(9)])
        self.first = next(self.shards)
        if place is not None:
            self.trainer.add_event_handler(place, self.count)

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("stopped")

    def note(self) -> None:
        self.groups.append([float(x) for x in self.trainer.state.batch])

    def renew(self) -> None:
        self.trainer.set_data(next(self.shards))

    def run(self, max_iters: int, *, error: str = "") -> list[list[float]]:
        """A first run on the first shard, or another on what is there."""
        data = self.trainer.state.dataloader or self.first
        with pytest.raises(RuntimeError, match=error) if error else nullcontext():
            self.trainer.run(data, max_iters=max_iters, epoch_length=4)
        return self.groups


def test_a_group_of_two_shards_that_is_broken_off():
    """The rest of the shard before cannot be read again, so the next run is refused; it would train without it."""
    shards = Shards(TrainEvents.GRADIENTS_READY, 3)
    shards.trainer.add_event_handler(Events.DATALOADER_STOP_ITERATION, shards.renew)
    shards.run(7, error="stopped")
    assert shards.run(7, error="cannot be repeated, because set_data has replaced the data") == [[0.0, 1.0], [2.0, 3.0]]
    shards = Shards()
    shards.trainer.add_event_handler(Events.DATALOADER_STOP_ITERATION, shards.renew)
    assert shards.run(4)[2:] == [[4.0, 10.0], [11.0, 12.0]]


def test_other_data_in_a_group_that_is_broken_off():
    """So it is where a handler sets other data while the group is used, also in the first group of all."""
    shards = Shards(TrainEvents.GRADIENTS_READY, 1)
    shards.trainer.add_event_handler(Events.ITERATION_STARTED(once=1), shards.renew)
    shards.run(7, error="stopped")
    assert shards.run(7, error="cannot be repeated") == []


@pytest.mark.parametrize("place", [None, TrainEvents.GRADIENTS_READY], ids=["limit", "error"])
def test_other_data_between_two_runs(place):
    """The next group comes from the beginning of the new data, and not from where the run was in the old one."""
    shards = Shards(place, 2)
    shards.run(1 if place is None else 7, error="stopped" if place else "")
    shards.renew()
    assert shards.run(3) == [[0.0, 1.0], [10.0, 11.0], [12.0, 13.0]]


def test_other_data_after_an_update():
    """A run that ends there, and is called again, begins the new data at its beginning."""
    shards = Shards()
    shards.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), shards.renew)
    shards.run(2)
    assert shards.run(3) == [[0.0, 1.0], [2.0, 3.0], [10.0, 11.0]]


def test_the_same_data_where_a_run_starts():
    """A handler of STARTED that gives the loader in use again does not begin it again in the middle of an epoch."""
    shards = Shards(TrainEvents.GRADIENTS_READY, 2)
    shards.trainer.add_event_handler(Events.STARTED, lambda: shards.trainer.set_data(shards.first))
    shards.run(7, error="stopped")
    assert shards.run(2) == [[0.0, 1.0], [2.0, 3.0]]
