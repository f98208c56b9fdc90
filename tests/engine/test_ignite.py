"""What Ignite's users rely on, beside stock Ignite: events, counters, batches, streams, stopping and continuing."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, EventEnum, Events, State
from ignite.handlers import Checkpoint as IgniteCheckpoint
from ignite.handlers import DiskSaver, global_step_from_engine
from ignite.handlers.base_logger import BaseLogger
from ignite.metrics import Average
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from ignite_train import Trainer, TrainEvents, UpdateOptions, create_evaluator, create_trainer
from ignite_train.events import every
from ignite_train.handlers import Checkpoint
from ranks import run_ranks

EVENTS_OF_DATA = (Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.DATALOADER_STOP_ITERATION)

WITHIN = (TrainEvents.MICRO_BATCH_STARTED, TrainEvents.FORWARD_COMPLETED, TrainEvents.BACKWARD_COMPLETED)


class Weight(nn.Module):
    """One weight, whose gradient is the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, number: float) -> torch.Tensor:
        return self.weight * number


def along(model: nn.Module, number: float) -> torch.Tensor:
    loss: torch.Tensor = model(number)
    return loss


def make(**arguments: Any) -> tuple[Trainer, list[list[float]]]:
    """A trainer of one weight, and the list of the groups that it updated with."""
    model = idist.auto_model(Weight())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), along, **arguments)
    groups: list[list[float]] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: groups.append([*map(float, engine.state.batch)]))
    return trainer, groups


def make_stock() -> tuple[Engine, list[float]]:
    """An engine of stock Ignite, and the list of the batches that it processed."""
    batches: list[float] = []
    return Engine(lambda engine, batch: batches.append(batch)), batches


def flat(entries: list[Any]) -> list[float]:
    """The micro-batches of groups, or the batches of stock Ignite, one after the other."""
    return [value for entry in entries for value in (entry if isinstance(entry, list) else [entry])]


def note(engine: Engine, *events: Any) -> list[tuple[str, int, int]]:
    """Writes down the events as they fire, with epoch and iteration."""
    fired: list[tuple[str, int, int]] = []

    def write(engine: Engine, event: Any, *_: Any) -> None:
        fired.append((event.name, engine.state.epoch, engine.state.iteration))

    for event in events:
        engine.add_event_handler(event, write, event)
    return fired


def weight(trainer: Trainer) -> float:
    return trainer.model.weight.item()


# --- batches ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED], ids=["fetched", "started"])
def test_a_replaced_batch_is_trained_on(event):
    """What a handler puts into `state.batch` is what the update sees, in place of what the loader gave."""
    trainer, groups = make(accumulation_steps=2)

    @trainer.on(event)
    def double(engine: Trainer) -> None:
        engine.state.batch = [2 * number for number in engine.state.batch]

    trainer.run([1.0, 2.0, 3.0])
    assert groups == [[2.0, 4.0], [6.0]]
    assert weight(trainer) == -(2 + 4) / 2 - 6  # by hand: the mean of each group, doubled


@pytest.mark.parametrize(
    ("replacement", "got"),
    [((1.0, 2.0), "tuple"), ([1.0], "1 of them"), (torch.ones(2), "Tensor")],
    ids=["pair", "too-few", "tensor"],
)
def test_a_batch_that_is_no_group_is_refused(replacement, got):
    """A replacement is a list of as many micro-batches, also at accumulation 1, where Ignite's users have a pair."""
    trainer, groups = make(accumulation_steps=2)

    @trainer.on(Events.ITERATION_STARTED)
    def replace(engine: Trainer) -> None:
        engine.state.batch = replacement

    with pytest.raises(TypeError, match=r"state\.batch must be a list of the update's 2 micro-batches") as raised:
        trainer.run([1.0, 2.0])
    assert got in str(raised.value)
    assert "\n" not in str(raised.value)
    assert (groups, trainer.state.iteration) == ([], 0)


@pytest.mark.parametrize("replacement", [[5.0, 5.0], "nonsense"], ids=["a group", "text"])
@pytest.mark.parametrize("event", WITHIN, ids=str)
def test_a_batch_that_is_replaced_too_late_is_refused(event, replacement):
    """The update has read its group by then. It makes no step, and the run continues with it once the handler is gone."""
    trainer, groups = make(accumulation_steps=2)

    def replace(engine: Trainer) -> None:
        engine.state.batch = replacement

    handle = trainer.add_event_handler(event(once=4), replace)
    with pytest.raises(TypeError, match="GET_BATCH_COMPLETED or ITERATION_STARTED") as raised:
        trainer.run([1.0, 2.0, 3.0, 4.0])
    assert "\n" not in str(raised.value)
    assert (trainer.state.iteration, weight(trainer)) == (1, -(1 + 2) / 2)
    del groups[:]
    handle.remove()
    trainer.run([1.0, 2.0, 3.0, 4.0])
    assert (groups[-1], weight(trainer)) == ([3.0, 4.0], -(1 + 2) / 2 - (3 + 4) / 2)


def test_the_last_batch_is_there_at_the_end_of_the_epoch():
    """As in Ignite, handlers of EPOCH_COMPLETED see the epoch's last batch; nothing is held while the next one is fetched."""
    trainer, _ = make()
    seen: list[Any] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: seen.append(engine.state.batch))
    trainer.add_event_handler(Events.GET_BATCH_STARTED, lambda engine: seen.append(engine.state.batch))
    trainer.run([1.0, 2.0])
    assert seen == [None, None, [2.0]]
    assert trainer.state.batch is None


# --- events ----------------------------------------------------------------------------------------------------------------


class Seen(BaseLogger):
    """A logger of Ignite's kind that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def _create_output_handler(self, engine: Engine, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class Own(EventEnum):
    """An event of a user's."""

    SHOWN = "shown"


@pytest.mark.parametrize(
    ("event", "steps"),
    [(TrainEvents.STEP_COMPLETED, [1, 2, 3, 4]), (TrainEvents.BACKWARD_COMPLETED, [1, 2, 3, 4, 5, 6, 7]), (Own.SHOWN, [1, 2])],
    ids=["step", "backward", "own"],
)
def test_loggers_know_our_events(event, steps):
    """A logger of Ignite's attaches to our events and to registered ones, and counts what the event is about."""
    trainer, _ = make(accumulation_steps=2)
    trainer.register_events(*Own, event_to_attr={Own.SHOWN: "epoch"})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: trainer.fire_event(Own.SHOWN))
    logger, step_of = Seen(), global_step_from_engine(trainer)

    def write(engine: Trainer, logger: Seen, event_name: Any) -> None:
        logger.steps.append(step_of(engine, event_name))

    logger.attach(trainer, write, event)
    trainer.run([1.0] * 7, max_epochs=1 if len(steps) > 2 else 2)
    assert logger.steps == steps


def test_checkpoints_of_ignites_are_numbered_by_the_step(tmp_path):
    """`global_step_from_engine` on STEP_COMPLETED gives the step; the epoch, which it gave before, overwrote files."""
    trainer, _ = make()
    saver = IgniteCheckpoint(
        {"model": trainer.model},
        DiskSaver(str(tmp_path), require_empty=False),
        n_saved=None,
        global_step_transform=global_step_from_engine(trainer),
    )
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, saver)
    trainer.run([1.0, 2.0], max_epochs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"model_{number}.pt" for number in (1, 2, 3, 4)]


def test_stock_engines_grow_our_counters_and_keep_their_own():
    """Our events are in Ignite's map of the process. A stock engine's state then has our counters, which stay 0."""
    make()
    assert State.event_to_attr[TrainEvents.STEP_COMPLETED] == "num_steps"
    engine, _ = make_stock()
    state = engine.run([1.0, 2.0])
    assert (state.iteration, state.epoch, state.num_steps) == (2, 1, 0)


@pytest.mark.parametrize("unheard", [False, True], ids=["heard", "unheard"])
def test_the_last_event_is_the_last_one_fired(unheard):
    """`last_event_name` is that of the event fired last, whether anybody listens or not, as in Ignite."""
    trainer, _ = make()
    trainer.add_event_handler(Events.STARTED if unheard else Events.COMPLETED, lambda: None)
    trainer.run([1.0])
    assert trainer.last_event_name == Events.COMPLETED


# --- the length of an epoch ------------------------------------------------------------------------------------------------


def test_the_length_is_known_when_the_run_starts():
    """`state.epoch_length` is there at STARTED and at each EPOCH_STARTED, in updates, also where epochs differ."""
    trainer, _ = make(accumulation_steps=[1, 2, 4])
    lengths: list[Any] = []
    for event in (Events.STARTED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED):
        trainer.add_event_handler(event, lambda engine: lengths.append(engine.state.epoch_length))
    trainer.run([1.0] * 5, max_epochs=3)
    assert lengths == [5, 5, 5, 3, 3, 2, 2]


def test_the_length_follows_a_function_of_the_update():
    """Of 9 micro-batches in groups of 1, 2, 3, ...: four updates in the first epoch and two in the second."""
    trainer, _ = make(accumulation_steps=lambda update: update)
    lengths: list[Any] = []
    for event in (Events.STARTED, Events.DATALOADER_STOP_ITERATION, Events.EPOCH_STARTED):
        trainer.add_event_handler(event, lambda engine: lengths.append(engine.state.epoch_length))
    trainer.run([1.0] * 9, max_epochs=2)
    assert lengths == [4, 4, 2, 2]


def lengths_of_ranks() -> list[Any]:
    lengths: list[Any] = []
    for shortest in (3, 0):
        trainer, _ = make(accumulation_steps=2, protect=False)
        for event in (Events.STARTED, Events.ITERATION_STARTED(once=1)):
            trainer.add_event_handler(event, lambda engine: lengths.append(engine.state.epoch_length))
        trainer.run([1.0] * (7 if idist.get_rank() else shortest), max_epochs=1)
    return lengths


@pytest.mark.slow
def test_the_length_at_the_start_is_that_of_the_longest_rank():
    """With 3 and 7 micro-batches and groups of 2, every rank starts with 4 updates in sight; also with none and 7."""
    assert run_ranks(lengths_of_ranks) == [[4] * 4] * 2


def test_an_evaluator_knows_its_length():
    """The evaluator says at STARTED how many micro-batches it has, up to its limit."""
    model, lengths = Weight(), []
    evaluator = create_evaluator(model, along)
    evaluator.add_event_handler(Events.STARTED, lambda engine: lengths.append(engine.state.epoch_length))
    evaluator.run([1.0] * 5)
    evaluator.run([1.0] * 5, max_iters=3)
    evaluator.run(iter([1.0] * 5))
    assert lengths == [5, 3, None]


# --- streams ---------------------------------------------------------------------------------------------------------------


class Endless(IterableDataset[float]):
    """1, 2, 3, ... without an end."""

    def __iter__(self) -> Iterator[float]:
        return iter(map(float, itertools.count(1)))


STREAMS = {
    "iterator": lambda: iter(map(float, itertools.count(1))),
    "endless-loader": lambda: DataLoader(Endless(), batch_size=None),
    "long-list": lambda: [float(number) for number in range(1, 100)],
}


@pytest.mark.parametrize("kind", sorted(STREAMS))
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_epochs_of_a_stream(kind, accumulation_steps):
    """With `epoch_length` an epoch is that many updates of anything iterable, and the next one continues behind it."""
    trainer, groups = make(accumulation_steps=accumulation_steps)
    ends: list[Any] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: ends.append((engine.state.epoch, engine.state.iteration)))
    trainer.run(STREAMS[kind](), max_epochs=3, epoch_length=4)
    assert ends == [(1, 4), (2, 8), (3, 12)]
    assert trainer.state.epoch_length == 4
    assert flat(groups) == [float(number) for number in range(1, 12 * accumulation_steps + 1)]


@pytest.mark.parametrize("length", [2, 3, 5, 7])
def test_passes_follow_each_other_as_in_ignite(length):
    """Over a short list, epochs of any length see the batches that stock Ignite's see, and the same events at their edges."""
    stock, batches = make_stock()
    ours, groups = make()
    fired = [note(engine, Events.DATALOADER_STOP_ITERATION, Events.EPOCH_COMPLETED) for engine in (stock, ours)]
    for engine in (stock, ours):
        engine.run([1.0, 2.0, 3.0], max_epochs=3, epoch_length=length)
    assert flat(groups) == batches
    assert fired[0] == fired[1]


def test_data_can_be_renewed_where_a_pass_ends():
    """`set_data` in DATALOADER_STOP_ITERATION: the epoch continues with the new data, as in Ignite; also an ended iterator."""
    results = []
    for make_engine in (make_stock, make):
        engine, seen = make_engine()
        shards = iter([[4.0, 5.0], [6.0, 7.0, 8.0, 9.0]])
        engine.add_event_handler(
            Events.DATALOADER_STOP_ITERATION, lambda engine, shards=shards: engine.set_data(iter(next(shards)))
        )
        engine.run(iter([1.0, 2.0, 3.0]), max_epochs=2, epoch_length=4)
        results.append(flat(seen))
    assert results[0] == results[1] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_run_without_data(accumulation_steps, tmp_path):
    """`run(None, epoch_length=n)`: forward gets None, no batch is requested, a second run knows the length; it resumes."""
    fired: list[list[Any]] = []
    calls: list[Any] = []

    def forward(model: nn.Module, micro_batch: Any) -> torch.Tensor:
        calls.append(micro_batch)
        return along(model, 1.0)

    def start(directory: str, **limits: Any) -> Trainer:
        model = Weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options = UpdateOptions(none_is_empty=accumulation_steps == 2)  # of those that a loader gives
        trainer = create_trainer(model, optimizer, forward, accumulation_steps=accumulation_steps, options=options)
        Checkpoint(tmp_path / directory, every=1).attach(trainer)
        fired.append(note(trainer, *EVENTS_OF_DATA, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED))
        trainer.run(epoch_length=3, **limits)
        return trainer

    trainer = start("whole", max_epochs=2)
    assert calls[: 6 * accumulation_steps] == [None] * 6 * accumulation_steps
    assert trainer.state.dataloader is None
    trainer.run(max_epochs=3)
    assert (trainer.state.iteration, trainer.state.epoch, weight(trainer)) == (9, 3, -9.0)
    assert [name for name, *_ in fired[0]] == ["EPOCH_STARTED", "EPOCH_COMPLETED"] * 3

    start("stopped", max_iters=4)
    assert weight(start("stopped", max_iters=9)) == -9.0


def test_a_run_without_data_needs_a_length():
    """As in Ignite, a ValueError."""
    with pytest.raises(ValueError, match=r"data must be a loader of micro-batches, got None; .*epoch_length"):
        make()[0].run(max_epochs=2)


def test_an_iterator_may_be_renewed_where_a_pass_ends():
    """As in Ignite's FAQ, by a handler of DATALOADER_STOP_ITERATION; without `epoch_length` a pass is an epoch."""
    results = []
    for make_engine in (make_stock, make):
        engine, seen = make_engine()

        @engine.on(Events.DATALOADER_STOP_ITERATION)
        def renew(engine: Engine) -> None:
            engine.state.dataloader = iter([4.0, 5.0])

        engine.run(iter([1.0, 2.0]), max_epochs=3)
        results.append((flat(seen), engine.state.epoch))
    assert results[0] == results[1] == ([1.0, 2.0, 4.0, 5.0, 4.0, 5.0], 3)


def test_an_iterator_that_is_not_renewed_has_ended():
    """A handler of that event which does something else: the next epoch has no data, and the error says so."""
    trainer, groups = make()
    trainer.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: None)
    with pytest.raises(ValueError, match="data ended after 2 updates of max_epochs=3"):
        trainer.run(iter([1.0, 2.0]), max_epochs=3)
    assert groups == [[1.0], [2.0]]


def test_a_session_between_two_runs_leaves_the_pass_as_it_is():
    """With `epoch_length` the second run reads on where the first one ended, whatever else was trained meanwhile."""
    trainer, groups = make()
    data = [1.0, 2.0, 3.0]
    trainer.run(data, max_epochs=1, epoch_length=2)
    with trainer.session():
        trainer.update([9.0])
    trainer.run(data, max_epochs=2)
    assert groups == [[1.0], [2.0], [9.0], [3.0], [1.0]]


def test_data_can_be_renewed_between_epochs():
    """Without `epoch_length` each epoch is one pass, and `set_data` between two chooses the loader of the next."""
    trainer, groups = make()
    trainer.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda: trainer.set_data([7.0, 8.0, 9.0]))
    trainer.run([1.0, 2.0], max_epochs=2)
    assert groups == [[1.0], [2.0], [7.0], [8.0], [9.0]]


def test_data_within_an_epoch_is_not_replaced():
    """Within an epoch that is one pass over its loader, `set_data` is an error, and says where it may be called."""
    trainer, _ = make()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.set_data([7.0]))
    with pytest.raises(RuntimeError, match=r"within an epoch.*DATALOADER_STOP_ITERATION.*epoch_length"):
        trainer.run([1.0, 2.0])


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_iters": 20}], ids=["epochs", "updates"])
def test_an_iterator_that_ends_early_says_so(limit):
    """All that it gave is trained on, a last smaller group too; then, in the same epoch, the error has both numbers."""
    trainer, groups = make(accumulation_steps=2)
    completed: list[int] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: completed.append(engine.state.epoch))
    with pytest.raises(ValueError, match=f"data ended after 6 updates of {'='.join(map(str, *limit.items()))}; pass a loader"):
        trainer.run(iter([1.0] * 11), epoch_length=10, **limit)
    assert [len(group) for group in groups] == [2, 2, 2, 2, 2, 1]
    assert (trainer.state.epoch, completed) == (1, [])


LOADERS = {
    "list": lambda: [1.0, 2.0, 3.0, 4.0, 5.0],
    "shuffled": lambda: DataLoader([1.0, 2.0, 3.0, 4.0, 5.0], shuffle=True, batch_size=None),
    "own generator": lambda: DataLoader(
        [1.0, 2.0, 3.0, 4.0, 5.0], shuffle=True, batch_size=None, generator=torch.Generator().manual_seed(3)
    ),
    "iterable": lambda: DataLoader(Endless(), batch_size=None),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(LOADERS))
@pytest.mark.parametrize("stop", [2, 4, 6, 9])
def test_a_stream_resumes_where_it_was(tmp_path, kind, stop):
    """From a checkpoint after any update, a new process goes through the same groups, within a pass and at its end."""

    def train(directory: Path, **limits: Any) -> tuple[list[Any], float]:
        torch.manual_seed(1)
        trainer, groups = make(accumulation_steps=2)
        Checkpoint(directory, every=1).attach(trainer)
        trainer.run(LOADERS[kind](), epoch_length=4, **limits)
        return groups, weight(trainer)

    whole, expected = train(tmp_path / "whole", max_iters=11)
    first, _ = train(tmp_path / "cut", max_iters=stop)
    rest, reached = train(tmp_path / "cut", max_iters=11)
    assert first + rest == whole
    assert reached == expected


def stream_of_ranks() -> Any:
    trainer, groups = make(accumulation_steps=2, protect=False)
    ends: list[int] = []
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: ends.append(engine.state.iteration))
    passes: list[int] = []
    trainer.add_event_handler(Events.DATALOADER_STOP_ITERATION, lambda engine: passes.append(engine.state.iteration))
    rank = idist.get_rank()
    trainer.run([10.0 * rank + number for number in range(3 + 2 * rank)], max_epochs=2, epoch_length=3)
    return groups, ends, passes, weight(trainer)


@pytest.mark.slow
def test_streams_of_ranks_have_epochs_of_one_length():
    """Ranks whose passes differ in length make the same updates: each begins its own next pass."""
    first, second = run_ranks(stream_of_ranks)
    assert first[0] == [[0.0, 1.0], [2.0, 0.0], [1.0, 2.0], [0.0, 1.0], [2.0, 0.0], [1.0, 2.0]]
    assert second[0] == [[10.0, 11.0], [12.0, 13.0], [14.0, 10.0], [11.0, 12.0], [13.0, 14.0], [10.0, 11.0]]
    assert first[1] == second[1] == [3, 6]
    assert (first[2], second[2]) == ([1, 3, 4], [2, 5])
    means = [sum(one + other) / 4 for one, other in zip(first[0], second[0], strict=True)]
    assert first[3] == second[3] == pytest.approx(-sum(means), rel=1e-6)


# --- stopping and continuing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["terminate", "interrupt"])
@pytest.mark.parametrize("at", [1, 3, 4, 6])
def test_metrics_of_an_epoch_survive_a_stop(call, at):
    """A metric over an epoch that is stopped and continued has the value of an epoch that was not."""
    values = []
    for stops in (False, True):
        trainer, _ = make()
        Average(output_transform=lambda output: output.loss).attach(trainer, "average")
        seen: list[float] = []
        trainer.add_event_handler(
            Events.EPOCH_COMPLETED, lambda engine, seen=seen: seen.append(engine.state.metrics["average"])
        )
        if stops:
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=at), lambda engine: getattr(engine, call)())
        data = [1.0, 5.0, 2.0, 7.0]
        trainer.run(data, max_epochs=2)
        assert trainer.should_interrupt is False
        if stops:
            trainer.run(data, max_epochs=2)
        values.append(seen)
    assert values[0] == values[1]


def test_an_interrupted_run_continues_without_starting_again():
    """After `interrupt` neither STARTED nor EPOCH_STARTED fires again; after `terminate` STARTED does, as in Ignite."""
    fired = []
    for call in ("interrupt", "terminate"):
        trainer, _ = make()
        events = note(trainer, Events.STARTED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED, Events.COMPLETED)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda engine, call=call: getattr(engine, call)())
        trainer.run([1.0, 2.0, 3.0])
        trainer.run([1.0, 2.0, 3.0], max_epochs=1)
        fired.append([name for name, _, _ in events])
    assert fired[0] == ["STARTED", "EPOCH_STARTED", "EPOCH_COMPLETED", "COMPLETED"]
    assert fired[1] == ["STARTED", "EPOCH_STARTED", "COMPLETED", "STARTED", "EPOCH_COMPLETED", "COMPLETED"]


def test_an_interrupt_between_epochs_hides_no_event():
    """Interrupted at the end of an epoch and continued, a run fires the events of one that was not, and INTERRUPT."""
    fired = []
    for interrupts in (False, True):
        trainer, _ = make()
        events = note(trainer, *Events)
        if interrupts:
            trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda engine: engine.interrupt())
            trainer.run([1.0, 2.0], max_epochs=2)
        trainer.run([1.0, 2.0], max_epochs=2)
        fired.append(events)
    assert ("DATALOADER_STOP_ITERATION", 2, 2) in fired[0]
    assert fired[0] == [event for event in fired[1] if event[0] != "INTERRUPT"]


# --- the rest --------------------------------------------------------------------------------------------------------------


def test_a_logger_of_the_users_gets_ignites_messages(caplog):
    """With a logger of its own, as from `setup_logger`, the engine says what Ignite's says; without one it is silent."""
    trainer, _ = make()
    with caplog.at_level(logging.INFO):
        trainer.run([1.0])
    assert not any("Engine" in message for message in caplog.messages)
    caplog.clear()
    trainer.logger = logging.getLogger("mine")
    with caplog.at_level(logging.INFO):
        trainer.run([1.0], max_epochs=2)
    first, second, third = caplog.messages
    assert first.startswith("Engine run starting with max_epochs=2")
    assert second.startswith("Epoch[2] Complete. Time taken: 00:00:0")
    assert third.startswith("Engine run finished. Time taken: 00:00:0")


def test_a_long_time_is_written_as_hours_minutes_and_seconds(caplog, monkeypatch):
    """Of the epoch and of the run, as Ignite does; a handler of COMPLETED is a part of the run."""
    now = [0.0]
    monkeypatch.setattr("ignite_train.engine.loop.time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer, _ = make()
    trainer.logger = logging.getLogger("mine")
    for event, seconds in ((Events.ITERATION_COMPLETED, 3725.25), (Events.COMPLETED, 60.0)):
        trainer.add_event_handler(event, lambda engine, seconds: now.append(now.pop() + seconds), seconds)
    with caplog.at_level(logging.INFO):
        times = trainer.run([1.0]).times
    assert [line.partition("taken: ")[2] for line in caplog.messages if "taken" in line] == ["01:02:05.250", "01:03:05.250"]
    assert (times["EPOCH_COMPLETED"], times["COMPLETED"]) == (3725.25, 3785.25)


def test_times_include_the_closing_handlers():
    """`state.times` of an epoch and of the run are there for their handlers, and include them afterwards."""
    trainer, _ = make()
    seen: list[float] = []

    def look(engine: Trainer, event: Any) -> None:
        seen.append(engine.state.times[event.name])

    for event in (Events.EPOCH_COMPLETED, Events.COMPLETED):
        trainer.add_event_handler(event, look, event)
    times = trainer.run([1.0]).times
    assert 0 < seen[0] < times["EPOCH_COMPLETED"]
    assert seen[0] < seen[1] < times["COMPLETED"]


@pytest.mark.parametrize(("batches", "accumulation_steps", "updates"), [(7, 1, 7), (10, 1, 10), (9, 2, 5), (0, 1, 0)])
def test_a_state_of_stock_ignite_is_taken_over(batches, accumulation_steps, updates):
    """A run that was begun with stock Ignite continues where it stood; its counters of batches become updates."""
    data = [1.0, 2.0, 3.0, 4.0, 5.0]
    stock, seen = make_stock()
    if batches:
        stock.add_event_handler(Events.ITERATION_COMPLETED(once=batches), stock.terminate)
        stock.run(data, max_epochs=3)
    saved = stock.state_dict() if batches else {"iteration": 0, "epoch_length": 5, "max_epochs": 3}
    trainer, groups = make(accumulation_steps=accumulation_steps)
    trainer.load_state_dict(saved)
    assert (trainer.state.iteration, trainer.state.num_steps, trainer.state.num_micro_batches) == (updates, updates, batches)
    assert trainer.state.num_skipped == 0
    trainer.run(data)
    assert seen + flat(groups) == data * 3
    assert trainer.state.epoch == 3


@pytest.mark.parametrize(("max_iters", "batches"), [(5, 5), (12, 12), (13, 14), (15, 15)])
def test_a_limit_of_stock_ignite_is_of_batches(max_iters, batches):
    """Groups of 2 do not span epochs of 5: as many updates as have these batches, of which the last has all of its group."""
    data = [1.0, 2.0, 3.0, 4.0, 5.0]
    trainer, groups = make(accumulation_steps=2)
    trainer.load_state_dict({"iteration": 5, "epoch_length": 5, "max_iters": max_iters})
    trainer.run(data)
    assert flat(groups) == (data * 3)[5:batches]
    assert (trainer.state.iteration, trainer.state.num_micro_batches) == (trainer.state.max_iters, batches)


def test_a_state_of_stock_ignite_within_a_group_is_refused():
    """Six batches are no whole number of updates of 4: the message has the numbers."""
    trainer, _ = make(accumulation_steps=4)
    with pytest.raises(ValueError, match="must be at the end of an update of 4 micro-batches, got 7, 2 batches into"):
        trainer.load_state_dict({"iteration": 7, "epoch_length": 5, "max_epochs": 3})


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"epoch_length": None, "epoch": 1, "max_epochs": 3}, r"\['epoch_length'\] must be a number of batches, got None"),
        ({"epoch_length": 5, "max_epochs": 3}, "one of the keys 'iteration' and 'epoch'"),
        ({"epoch_length": 5, "iteration": 5, "epoch": 1, "max_epochs": 3}, "one of the keys 'iteration' and 'epoch'"),
        ({"epoch_length": 5, "iteration": 5, "max_epochs": 3, "max_iters": 15}, "one of max_epochs and max_iters, got 3"),
        ({"epoch_length": 5, "epoch": 4, "max_epochs": 3}, "must not be below the 4 that are done, got 3"),
        ({"epoch_length": 5, "iteration": 9, "max_iters": 8}, "must not be below the 9 that are done, got 8"),
        ({"epoch_length": 5, "iteration": 5.0, "max_epochs": 3}, r"\['iteration'\] must be a number of batches, .* got 5\.0"),
        ({"epoch_length": 5, "iteration": True, "max_epochs": 3}, r"\['iteration'\] must be a number of batches, .* got True"),
        ({"epoch_length": 5, "epoch": -1, "max_epochs": 3}, r"must be a number of batches, at least 0, got -5"),
    ],
    ids=["no-length", "no-place", "two-places", "two-limits", "epochs-below", "updates-below", "float", "bool", "negative"],
)
def test_a_state_of_stock_ignite_that_contradicts_itself_is_refused(saved, message):
    """What stock Ignite refuses is refused, and nothing of the trainer has changed."""
    trainer, _ = make()
    before = trainer.state_dict()
    with pytest.raises(ValueError, match=message):
        trainer.load_state_dict(saved)
    assert trainer.state_dict() == before


def names_where_handlers_change(engine: Engine) -> list[str]:
    """The handlers of STARTED in the order of their calls, where the first adds one and replaces the second."""
    names: list[str] = []

    def first() -> None:
        names.append("first")
        engine.add_event_handler(Events.STARTED, lambda: names.append("added"))
        engine._event_handlers[Events.STARTED][-2] = (lambda: names.append("replaced"), (), {})  # as HandlersTimeProfiler does

    engine.add_event_handler(Events.STARTED, first)
    engine.add_event_handler(Events.STARTED, lambda: names.append("second"))
    engine.run([1.0])
    return names


def names_where_a_handler_replaces_all(engine: Engine) -> list[str]:
    """The handlers of STARTED in the order of their calls, where the second replaces all three, also itself."""
    names: list[str] = []

    def replace() -> None:
        names.append("replace")
        entries = engine._event_handlers[Events.STARTED]
        entries[:] = [(partial(names.append, f"new {number}"), (), {}) for number in range(len(entries))]

    engine.add_event_handler(Events.STARTED, lambda: names.append("first"))
    engine.add_event_handler(Events.STARTED, replace)
    engine.add_event_handler(Events.STARTED, lambda: names.append("third"))
    engine.run([1.0])
    return names


def test_a_handler_may_replace_those_that_were_called():
    """They are not called again while the event fires, as in Ignite."""
    assert names_where_a_handler_replaces_all(make_stock()[0]) == ["first", "replace", "new 2"]
    assert names_where_a_handler_replaces_all(make()[0]) == ["first", "replace", "new 2"]


def test_a_handler_may_add_and_replace_others_of_the_event_that_fires():
    """One that is added while its event fires is called in that firing, once, as in Ignite; also among those that come last."""
    stock, ours = (names_where_handlers_change(engine) for engine in (make_stock()[0], make()[0]))
    assert stock == ours == ["first", "replaced", "added"]
    names: list[str] = []
    trainer, _ = make()

    def last(engine: Trainer) -> None:
        names.append("last")
        if names == ["last"]:
            engine.add_event_handler(Events.STARTED, lambda: names.append("added"))  # it stands before this one
            engine.prepend_event_handler(Events.STARTED, lambda: names.append("prepended"))

    trainer.append_event_handler(Events.STARTED, last)
    trainer.run([1.0])
    assert names == ["last", "prepended", "added"]


@pytest.mark.parametrize(
    ("number", "fires"),
    [
        (49, [49, 98]),
        (50, [1, 2, 5, 10, 20, 50, 100]),
        (150, [1, 2, 5, 10, 20, 50, 100, 150, 300, 450]),
        (700, [1, 2, 5, 10, 20, 50, 100, 200, 500, 700]),
    ],
)
def test_early_points_lie_below_the_interval(number, fires):
    """Until the first full interval a short run has some; behind it none stands between two intervals."""
    seen: list[int] = []
    trainer, _ = make()
    trainer.add_event_handler(
        every(number, Events.ITERATION_COMPLETED, early=True), lambda engine: seen.append(engine.state.iteration)
    )
    trainer.run([1.0] * (fires[-1] + 1))
    assert seen == fires


def test_a_run_needs_no_repr_of_an_event(monkeypatch):
    """Python 3.11.2, which Debian 12 has, raises where it makes one of an event of Ignite: nothing could be attached there."""

    def cannot(_event: Any) -> str:
        raise AttributeError("'str' object has no attribute 'name'")

    for kind in (Events, TrainEvents):
        monkeypatch.setattr(kind, "__repr__", cannot)
    ends: list[int] = []
    trainer, groups = make()
    trainer.add_event_handler(every(2, Events.ITERATION_COMPLETED), lambda engine: ends.append(engine.state.iteration))
    with pytest.raises(ValueError, match="got 'NOWHERE'"):
        trainer.add_event_handler("NOWHERE", print)
    trainer.run([1.0] * 5)
    assert ends == [2, 4]
    assert len(groups) == 5
    assert repr(every(2, TrainEvents.STEP_COMPLETED)) == "TrainEvents.STEP_COMPLETED(every=2)"
