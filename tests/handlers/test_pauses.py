"""Garbage is collected, and the allocator's cache emptied, after chosen updates, the same ones on all ranks."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch.utils.data import DataLoader, Dataset

import cuts
from ignite_train import Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.checkpoint.capture import paused_collection
from ignite_train.handlers import EmptyCache, GarbageCollection
from ignite_train.ranks.whereabouts import COLLECTOR
from mistakes import Mistake, assert_one_line
from processes import DEADLINE_SECONDS
from ranks import run_ranks

DATA = cuts.cut(cuts.samples(), [8] * 6)


def make(**options: Any) -> Trainer:
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return create_trainer(model, optimizer, cuts.forward, options=UpdateOptions(**options))


class Circle:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


# --- GarbageCollection ---


@pytest.fixture
def collecting() -> Iterator[None]:
    """Puts back what a test leaves behind if it fails."""
    enabled = gc.isenabled()
    yield
    gc.enable() if enabled else gc.disable()


def test_one_for_two_trainers_puts_the_setting_back_after_both(collecting: None) -> None:
    """One trainer may run in the session of another, with the same handler."""
    outer, inner, collection = make(), make(), GarbageCollection()
    for trainer in (outer, inner):
        collection.attach(trainer)
    gc.enable()
    with outer.session():
        inner.run(DATA)
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("enabled", [True, False], ids=["on-before", "off-before"])
@pytest.mark.parametrize("fails", [True, False], ids=["exception", "to-the-end"])
def test_it_collects_at_the_chosen_updates_only(enabled: bool, fails: bool, collecting: None) -> None:
    """Garbage of each update stays until update 3 or 6; after the run, or an exception, Python's setting is as it was."""
    trainer, alive, during = make(), [], []
    GarbageCollection().attach(trainer, Events.ITERATION_COMPLETED(every=3))
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: alive.append(weakref.ref(Circle())))
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: during.append((gc.isenabled(), sum(ref() is not None for ref in alive)))
    )
    if fails:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: 1 // 0)
    gc.enable() if enabled else gc.disable()
    try:
        trainer.run(DATA)
    except ZeroDivisionError:
        assert fails
    assert gc.isenabled() == enabled
    assert during == [(False, count) for count in (1, 2, 0, 1, 2, 0)]


class Collecting(Dataset[torch.Tensor]):
    """Samples of 1 where the process that loads them collects its garbage, and of 0 where it does not."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(gc.isenabled()))


def test_workers_that_are_forked_in_a_run_collect_on_their_own(collecting: None) -> None:
    """No handler does it there, and what they hold would grow."""
    model, seen = torch.nn.Linear(3, 1), list[float]()

    def forward(model: torch.nn.Module, micro_batch: torch.Tensor) -> torch.Tensor:
        seen.append(float(micro_batch.mean()))
        return torch.as_tensor(model(micro_batch).square().mean())

    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), forward)
    GarbageCollection().attach(trainer)
    gc.enable()
    trainer.run(DataLoader(Collecting(), batch_size=2, num_workers=1, multiprocessing_context="fork"))
    assert seen == [1.0, 1.0]


# --- pauses of Python's collector ---


def test_it_is_not_switched_on_while_frames_are_read(collecting: None) -> None:
    """Not by the end of a pause in another thread, either: with the collector on, reading frames can end the process."""
    gc.enable()
    pause = paused_collection()
    pause.__enter__()
    with COLLECTOR:  # as `find_whereabouts` holds it
        ending = threading.Thread(target=pause.__exit__, args=(None, None, None))
        ending.start()
        ending.join(0.05)
        assert not gc.isenabled()
    ending.join(DEADLINE_SECONDS)
    assert gc.isenabled()


def test_where_it_is_off_a_pause_leaves_it_off(collecting: None) -> None:
    """A script may have switched it off itself; after an exception too."""
    gc.disable()
    with pytest.raises(KeyError), paused_collection():
        raise KeyError
    assert not gc.isenabled()


# --- EmptyCache at a share of fragmentation ---


class Memory:
    """Stands in for the statistics of an accelerator."""

    def __init__(self, trainer: Trainer, share_unused: Callable[[int], float]) -> None:
        self.trainer, self.share_unused, self.emptied = trainer, share_unused, []

    def put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: 1000)
        monkeypatch.setattr(torch.accelerator, "memory_allocated", self.allocated)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: self.emptied.append(self.trainer.state.iteration))

    def allocated(self) -> int:
        return round(1000 * (1 - self.share_unused(self.trainer.state.iteration)))


def test_it_empties_where_memory_is_fragmented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the share is reached, and only when it looks."""
    trainer = make()
    memory = Memory(trainer, lambda update: {1: 0.9, 2: 0.3, 4: 0.29, 6: 0.5}.get(update, 0.0))
    memory.put_in_place(monkeypatch)
    EmptyCache(fragmentation=0.3).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(DATA)
    assert memory.emptied == [2, 6]


def test_it_may_wait_until_nothing_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a share of 1."""
    trainer = make()
    memory = Memory(trainer, lambda update: 1.0 if update == 3 else 0.999)
    memory.put_in_place(monkeypatch)
    EmptyCache(fragmentation=1.0).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(DATA)
    assert memory.emptied == [3]


def test_without_reserved_memory_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first allocation nothing is fragmented."""
    trainer = make()
    memory = Memory(trainer, lambda update: 0.0)
    memory.put_in_place(monkeypatch)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: 0)
    EmptyCache(fragmentation=0.3).attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(DATA)
    assert memory.emptied == []


def _pause_on_this_rank() -> Any:
    """Rank 1 alone is fragmented after update 2, rank 0 after update 4; rank 1 has no data after update 3."""
    trainer, rank, collected = make(reduction="explicit"), idist.get_rank(), []
    memory = Memory(trainer, lambda update: 0.5 if update == (4 if rank == 0 else 2) else 0.1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        memory.put_in_place(monkeypatch)
        EmptyCache(fragmentation=0.5).attach(trainer, Events.ITERATION_COMPLETED)
        GarbageCollection().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        gc.disable()  # or an automatic collection might be seen before the run begins
        gc.callbacks.append(lambda phase, info: collected.append(trainer.state.iteration) if phase == "start" else None)
        trainer.run(DATA if rank == 0 else DATA[:3], max_epochs=1)
        gc.callbacks.pop()
    return memory.emptied, collected


@pytest.mark.slow
def test_all_ranks_pause_together() -> None:
    """What one rank finds after an update, all do after the next."""
    first, second = run_ranks(_pause_on_this_rank)
    assert first == second == ([3, 5], [0, 2, 4, 6])


def _empty_while_one_rank_is_fragmented() -> list[int]:
    """Rank 1 is fragmented until it empties, and looks after each step, which is before the ranks empty."""
    trainer = make(reduction="explicit")
    memory = Memory(trainer, lambda update: 0.5 if idist.get_rank() == 1 and not memory.emptied else 0.1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        memory.put_in_place(monkeypatch)
        EmptyCache(fragmentation=0.5).attach(trainer, TrainEvents.STEP_COMPLETED)
        trainer.run(DATA, max_epochs=1)
    return memory.emptied


@pytest.mark.slow
def test_a_rank_that_finds_more_in_the_update_in_which_all_empty_joins_them() -> None:
    """Its memory is still fragmented there, because it has not emptied yet."""
    assert run_ranks(_empty_while_one_rank_is_fragmented) == [[2], [2]]


MISTAKES: dict[str, Mistake] = {
    "zero": (ValueError, "fragmentation must be greater than 0", lambda: EmptyCache(fragmentation=0.0)),
    "percent": (ValueError, "fragmentation must be at most 1, got 30", lambda: EmptyCache(fragmentation=30)),
    "above one": (ValueError, "fragmentation must be at most 1, got 1.5", lambda: EmptyCache(fragmentation=1.5)),
    "text": (TypeError, "fragmentation must be a number", lambda: EmptyCache(fragmentation="0.3")),  # type: ignore[arg-type]
    "event": (TypeError, "event must be an event", lambda: GarbageCollection().attach(make(), 500)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
