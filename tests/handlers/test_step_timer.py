"""StepTimer: sections of the update and of the user, on host and device, with percentiles and the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn

import cuts
from clock import Clock
from ignite_train import Trainer, TrainEvents, UpdateOptions, count_traffic, create_evaluator, create_trainer
from ignite_train.device import event_times, to_host
from ignite_train.device.event_times import EventTimes, event_maker
from ignite_train.engine.dispatch import entries
from ignite_train.engine.sections import SECTIONS, Sections
from ignite_train.events import every
from ignite_train.handlers import Profiler, StepTimer, TrainingMetrics, Validation
from ranks import run_ranks
from tiers import accelerated

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches
EVERY = Events.ITERATION_COMPLETED


def make(forward: Any = cuts.forward, **options: Any) -> Trainer:
    model = cuts.linear()
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), forward, **options)


def test_percentiles_of_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward takes 1, 2, ..., 6 seconds; percentiles are interpolated; sections of the user are parts of forward."""
    clock, timer = Clock(monkeypatch), StepTimer()

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        number = trainer.state.iteration
        with timer.section("outer"):
            clock.take(number / 4)
            with timer.section("inner"):
                clock.take(number / 4)
            with timer.section("inner"):
                clock.take(number / 4)
        clock.take(number / 4)
        return cuts.forward(model, micro_batch)

    trainer = make(forward)
    timer.attach(trainer, EVERY(every=2))
    trainer.run(clock.loader(DATA, 3.0), max_epochs=1)
    summary = timer.summary()
    assert {*summary} == {"data", "forward", "outer", "outer/inner"}
    assert summary["forward"] == pytest.approx((6, 3.5, 3.5, 5.5, 5.95, 6.0))
    assert summary["outer"] == pytest.approx((6, *(0.75 * value for value in (3.5, 3.5, 5.5, 5.95, 6.0))))
    assert summary["outer/inner"].maximum == pytest.approx(3.0)
    assert summary["data"] == pytest.approx((6, 3, 3, 3, 3, 3))


def test_the_first_update_after_it_was_attached_is_no_longer_than_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a run, and again after it was taken off: what passed meanwhile is in no update."""
    clock, timer, metrics = Clock(monkeypatch), StepTimer(), TrainingMetrics()
    trainer = make(lambda model, micro_batch: (clock.take(1.0), cuts.forward(model, micro_batch))[1])
    handles: list[Any] = []
    rates: list[float] = []

    @trainer.on(EVERY)
    def take_turns() -> None:
        update = trainer.state.iteration
        if update in (3, 6):
            handles.extend(handler.attach(trainer, EVERY(every=2)) for handler in (timer, metrics))
        elif update == 4:
            for handle in handles:
                handle.remove()
        elif update == 8:
            rates.append(trainer.state.metrics["updates_per_second"])

    trainer.run([DATA[0]] * 8, max_epochs=1)
    assert timer.summary()["forward"].maximum == 1.0
    assert rates == [1.0]


def test_only_the_latest_updates_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as `window` says."""
    clock, timer = Clock(monkeypatch), StepTimer(window=2)
    trainer = make(lambda model, micro_batch: (clock.take(float(trainer.state.iteration)), cuts.forward(model, micro_batch))[1])
    timer.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert timer.summary()["forward"] == pytest.approx((2, 5.5, 5.5, 5.9, 5.99, 6.0))


def test_a_section_that_is_entered_late_took_no_time_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is entered in update 5 only, for 3 seconds, and has six times as every other section."""
    clock, timer = Clock(monkeypatch), StepTimer()

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        if trainer.state.iteration == 5:
            with timer.section("rare"):
                clock.take(3.0)
        return cuts.forward(model, micro_batch)

    trainer = make(forward)
    timer.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert timer.summary()["rare"] == pytest.approx((6, 0.5, 0.0, 1.5, 2.85, 3.0))


def test_an_exception_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the sections of the user and not in those of the update; the next run measures its own updates only."""
    clock, timer, failures = Clock(monkeypatch), StepTimer(), [RuntimeError("once")]

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        with timer.section("outer"), timer.section("inner"):
            clock.take(5.0)
            if failures:
                raise failures.pop()
        return cuts.forward(model, micro_batch)

    trainer = make(forward)
    timer.attach(trainer)
    with pytest.raises(RuntimeError, match="once"):
        trainer.run(DATA, max_epochs=1)
    clock.take(1000.0)
    with timer.section("outside of a run"):
        clock.take(1000.0)
    trainer.run(DATA, max_epochs=1)
    summary = timer.summary()
    assert {name: times[:2] for name, times in summary.items()} == dict.fromkeys(("forward", "outer", "outer/inner"), (6, 5.0))


def test_evaluation_is_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being told which evaluator: `Validation` marks it."""
    clock, timer = Clock(monkeypatch), StepTimer()
    trainer = make()
    evaluator = create_evaluator(
        trainer.model,  # type: ignore[arg-type]
        lambda model, micro_batch: (clock.take(1.0), cuts.forward(model, micro_batch))[1],
    )
    Validation(evaluator, DATA, sanity=0).attach(trainer, EVERY(every=3))
    timer.attach(trainer)
    trainer.run(DATA, max_epochs=2)
    assert timer.summary()["evaluation"].mean == pytest.approx(6.0 * 3 / 12), "that of update 12 is after the last update"


def test_an_empty_report_is_empty() -> None:
    """Before the first update there is no table; after it, one line for each section."""
    timer, trainer = StepTimer(), make()
    assert (timer.table(), timer.summary()) == ("", {})
    timer.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    head, *rows = timer.table().splitlines()
    assert head.split() == ["ms", "an", "update", "mean", "p50", "p90", "p99", "max"]
    assert {"data", "forward", "backward", "reduction", "optimizer"} <= {row.split()[0] for row in rows} <= {*SECTIONS}


def test_a_detached_timer_measures_nothing_more() -> None:
    """What it has measured stays."""
    timer, trainer = StepTimer(ranges="record_function"), make()
    handle = timer.attach(trainer)
    trainer.run(DATA, max_iters=4)
    handle.remove()
    trainer.run(DATA, max_iters=9)
    assert timer.summary()["forward"].updates == 4
    assert trainer.sections.open_range is None


def test_handlers_that_are_not_due_are_no_section() -> None:
    """Their event is over before time is counted as that of handlers; in an update in which one is due, all of them are."""
    trainer, seen = make(), []
    sections = trainer.sections
    sections.listeners.append(lambda _before, section: seen.append((trainer.state.iteration, section)))
    for number in (2, 3):
        trainer.add_event_handler(every(number, Events.ITERATION_COMPLETED), lambda: None)
    trainer.run(DATA, max_iters=6)
    # The last one is of COMPLETED, where a trainer looks whether its run has moved the weights.
    assert [update for update, section in seen if section == "handler" and update > 1] == [2, 3, 4, 6, 6]


def test_a_section_does_nothing_where_no_timer_listens() -> None:
    """Before it is attached, and once it is detached."""
    timer, trainer = StepTimer(), make()
    with timer.section("mine"):
        pass
    handle = timer.attach(trainer)
    handle.remove()
    trainer.run(DATA, max_epochs=1)
    with timer.section("mine"):
        pass
    assert timer.summary() == {}


def test_a_table_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward takes 1, 2, ..., 6 seconds, a batch 3; two ranks have told their times, of which rank 1 is slow in forward."""
    clock, timer = Clock(monkeypatch), StepTimer()
    trainer = make(lambda model, micro_batch: (clock.take(float(trainer.state.iteration)), cuts.forward(model, micro_batch))[1])
    timer.attach(trainer)
    trainer.run(clock.loader(DATA, 3.0), max_epochs=1)
    rows = [
        ["ms", "an", "update", "mean", "p50", "p90", "p99", "max"],
        ["data", *["3000.000"] * 5],
        ["forward", "3500.000", "3500.000", "5500.000", "5950.000", "6000.000"],
    ]
    assert [line.split() for line in timer.table().splitlines()] == rows
    timer.seconds_by_rank = {"forward": [3.5, 9.0]}
    assert [line.split() for line in timer.table().splitlines()] == [
        [*rows[0], "slowest", "rank"],
        rows[1],
        [*rows[2], "1"],
    ]


def test_nothing_is_attached_inside_the_update() -> None:
    """A handler of these events would keep an accelerator from queueing its step; nothing reads or reduces either."""
    trainer = make()
    StepTimer().attach(trainer)
    TrainingMetrics().attach(trainer)
    assert trainer._sections is not None
    bare = make()
    for event in {*TrainEvents} - {TrainEvents.STEP_COMPLETED, TrainEvents.STEP_SKIPPED}:
        assert len(entries(trainer, event)) == len(entries(bare, event))
    with count_traffic() as traffic:
        trainer.run(DATA, max_epochs=1)
    with count_traffic() as expected:
        bare.run(DATA, max_epochs=1)
    assert bare._sections is None
    assert (len(traffic.collectives), len(traffic.host_reads)) == (0, len(expected.host_reads))


# --- ranges in the profiles of others ---


class Nvtx:
    """Takes note of the ranges that are open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: dict[int, str] = {}
        self.seen: list[str] = []
        monkeypatch.setattr(torch.cuda.nvtx, "range_start", self.start)
        monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda handle: self.open.pop(handle))

    def start(self, name: str) -> int:
        self.seen.append(name)
        self.open[len(self.seen)] = name
        return len(self.seen)


def test_ranges_of_nvtx_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One section at a time, the user's inside it; all of them also when forward fails."""
    nvtx, timer, depth = Nvtx(monkeypatch), StepTimer(ranges="nvtx"), []

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        with timer.section("mine"):
            depth.append([*nvtx.open.values()])
            if trainer.state.iteration == 2:
                raise RuntimeError("broken")
        return cuts.forward(model, micro_batch)

    trainer = make(forward)
    timer.attach(trainer)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.run(DATA, max_epochs=1)
    assert depth == [["forward", "mine"]] * 2
    assert nvtx.open == {}
    assert nvtx.seen[-3:] == ["forward", "forward", "mine"], "the group, its first micro-batch"
    assert {"data", "backward", "reduction", "optimizer", "handler"} <= {*nvtx.seen}


@accelerated
def test_the_sections_of_a_step_that_an_accelerator_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is queued before the host reads the numbers of the update, and both have their sections."""
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    nvtx, timer, model = Nvtx(monkeypatch), StepTimer(ranges="nvtx"), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
    timer.attach(trainer)
    trainer.run([torch.ones(2, 3)], max_epochs=1)
    backward = nvtx.seen.index("backward")
    assert nvtx.seen[backward : backward + 4] == ["backward", "reduction", "optimizer", "reduction"]


# --- the device ---


class FakeEvent:
    """An event of a device whose clock and whose progress the test sets."""

    now: ClassVar[float] = 0.0
    reached: ClassVar[float] = 0.0
    made: ClassVar[int] = 0

    def __init__(self) -> None:
        FakeEvent.made += 1

    def record(self) -> None:
        FakeEvent.now += 1.0
        self.at = FakeEvent.now

    def query(self) -> bool:
        return self.at <= FakeEvent.reached

    def elapsed_time(self, end_event: Any) -> float:
        assert end_event.query(), "the device has not got there"
        return float(end_event.at - self.at) * 1e3


@pytest.fixture
def device() -> EventTimes:
    FakeEvent.now = FakeEvent.reached = 0.0
    FakeEvent.made = 0
    return EventTimes(FakeEvent)


def test_events_are_read_when_the_device_has_got_there(device: EventTimes) -> None:
    """In the order of the updates, and not before; events are used again."""
    device.mark("data")
    for _ in range(3):
        device.mark("forward")
        end = device.span("mine")
        device.mark("backward")
        end()
        device.mark("forward")
        device.end_update("handler")
    assert device.drain() == []
    FakeEvent.reached = 6.0  # the first update has only its end before it
    assert device.drain() == []
    FakeEvent.reached = 9.0  # the first update is over, and the second has begun
    assert device.drain() == [{"data": 1.0, "forward": 3.0, "backward": 2.0, "mine": 2.0}]
    FakeEvent.reached = FakeEvent.now
    assert device.drain() == [{"handler": 1.0, "forward": 3.0, "backward": 2.0, "mine": 2.0}] * 2
    made = FakeEvent.made
    device.mark("forward")
    device.end_update("handler")
    assert FakeEvent.made == made


def test_events_of_a_device_know_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes events that do not, unless it is asked. The CPU has none."""
    assert event_maker(torch.device("cpu")) is None
    monkeypatch.setattr(event_times, "has_streams", lambda device: True)
    monkeypatch.setattr(torch, "Event", lambda device, enable_timing=False: (device, enable_timing))
    for device in (torch.device("cuda", 1), torch.device("xpu", 0)):
        make_event = event_maker(device)
        assert make_event is not None
        assert make_event() == (device, True)


def test_what_waits_is_bounded(device: EventTimes) -> None:
    """A device that is far behind costs times and not memory."""
    for _ in range(1000):
        device.mark("forward")
        device.end_update("handler")
    assert FakeEvent.made < 64 * 4 + 10
    FakeEvent.reached = FakeEvent.now
    assert len(device.drain()) == 64


def test_the_timer_has_the_times_of_the_device(monkeypatch: pytest.MonkeyPatch, device: EventTimes) -> None:
    """Beside those of the host, once the device has got there."""
    monkeypatch.setattr("ignite_train.handlers.step_timer.event_maker", lambda _: FakeEvent)
    timer = StepTimer(window=1)

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        with timer.section("mine"):
            return cuts.forward(model, micro_batch)

    trainer = make(forward, accumulation_steps=3)
    handle = timer.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert timer.summary(device=True) == {}
    FakeEvent.reached = FakeEvent.now
    times = timer.summary(device=True)
    assert {name: (each.updates, each.mean) for name, each in times.items() if name != "handler"} == {
        "data": (1, 1.0),
        "forward": (1, 10.0),  # the beginning of the update, and three micro-batches with two events in each
        "mine": (1, 3.0),
        "backward": (1, 3.0),
        "reduction": (1, 1.0),
        "optimizer": (1, 2.0),  # before ITERATION_COMPLETED, and after that of the update before
    }
    head, *rows = timer.table().splitlines()
    assert head.endswith("on device")
    (forward,) = [row for row in rows if row.startswith("forward")]
    assert forward.split()[-1] == "10000.000"
    heard: list[str | None] = []
    sections = trainer.sections
    sections.listeners.append(lambda _before, section: heard.append(section))
    handle.remove()
    trainer.run(DATA, max_epochs=2)
    assert "forward" in heard, "another listener stays"
    assert FakeEvent.now == FakeEvent.reached, "nothing more is timed on the device"


def test_a_long_run_keeps_the_times_of_the_device(monkeypatch: pytest.MonkeyPatch, device: EventTimes) -> None:
    """They are read at the end of each interval, and not only when somebody asks for them."""
    monkeypatch.setattr("ignite_train.handlers.step_timer.event_maker", lambda _: FakeEvent)
    FakeEvent.reached = 1e9
    trainer, timer = make(), StepTimer()
    timer.attach(trainer, EVERY(every=50))
    trainer.run(DATA, max_iters=200)
    assert timer.summary(device=True)["forward"].updates == 200


# --- ranks ---


def of_a_rank() -> tuple[Any, ...]:
    """A forward takes 2 s on rank 0 and 6 s on rank 1, by a clock that nothing else moves."""
    now, timer = [100.0], StepTimer()
    time.perf_counter = lambda: now[0]  # type: ignore[assignment]  # this process ends with the test

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        now[0] += 2.0 + 4.0 * idist.get_rank()
        return cuts.forward(model, micro_batch)

    counted, by_update = [], []
    for measured in (False, True):
        trainer = make(forward, options=UpdateOptions(reduction="explicit"), protect=False)
        if measured:
            handle = timer.attach(trainer, EVERY(every=2))
            trainer.add_event_handler(EVERY, lambda: by_update.append(timer.seconds_by_rank.get("forward", [])))
        with count_traffic() as traffic:
            trainer.run(DATA, max_epochs=1)
        counted.append(len(traffic.collectives))
    metrics = trainer.state.metrics
    assert by_update == [[], [], *[[2.0, 6.0]] * 4], "those of each interval travel with the next update"
    found = timer.seconds_by_rank, metrics["slowest_rank"], metrics["slowest_to_median"], counted, timer.table()
    handle.remove()
    metrics.clear()
    trainer.run(DATA, max_epochs=2)
    return *found, {*metrics}


def test_a_derived_class_may_set_the_trainer_itself() -> None:
    """Its `__init__` may take the trainer, or it has an `attach` of its own."""

    class Mine(StepTimer):
        def __init__(self, trainer: Trainer) -> None:
            super().__init__()
            self.trainer = trainer

    trainer = make()
    timer = Mine(trainer)
    assert timer.trainer is trainer
    timer.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert timer.trainer is trainer


def test_no_run_publishes_the_slowest_rank_of_the_run_before() -> None:
    """Its last interval travels when it ends, after the last event at which it could publish it."""
    trainer, timer = make(), StepTimer()
    timer.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    trainer.run(DATA, max_epochs=1)
    timer.seconds_by_rank = {name: [1.0] for name in SECTIONS}
    trainer.run(DATA, max_epochs=2)
    assert "slowest_rank" not in trainer.state.metrics


@pytest.mark.slow
def test_the_slowest_rank_is_known() -> None:
    """On all ranks, from numbers that travel with the statistics: no collective but one at the end of the run."""
    outcomes = run_ranks(of_a_rank)
    for by_rank, slowest, ratio, (bare, measured), table, after_detach in outcomes:
        assert after_detach == set()
        assert by_rank["forward"] == [2.0, 6.0]
        assert (slowest, ratio) == (1.0, 3.0)
        assert measured == bare + 1
        (line,) = [line for line in table.splitlines() if line.startswith("forward")]
        assert line.split()[-1] == "1"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": 0}, "window must be"), ({"ranges": "both"}, "ranges must be one of")],
    ids=["window", "ranges"],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    """One line says which."""
    with pytest.raises(ValueError, match=message):
        StepTimer(**options)


def test_a_section_has_a_name_of_its_own() -> None:
    """Or its time would be added to that of the update's."""
    with pytest.raises(ValueError, match="name must not be"), StepTimer().section("forward"):
        pass


@pytest.mark.parametrize("updates", [range(2, 4), range(100, 101)], ids=["in the run", "not in the run"])
def test_a_profiler_may_be_attached_too(tmp_path: Path, updates: range) -> None:
    """The ranges of one do not end those of the other."""
    timer, trainer = StepTimer(ranges="record_function"), make()
    timer.attach(trainer)
    before = trainer.sections.open_range
    Profiler(tmp_path, updates=updates).attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert trainer.sections.open_range is before is not None


def test_a_range_that_is_open_is_closed_with_the_profile() -> None:
    """Or it would last until the end of the process in the profile."""
    sections, calls = Sections(), list[str]()

    def open_range(name: str) -> Callable[[], None]:
        calls.append(name)
        return lambda: calls.append(f"end of {name}")

    sections.set_ranges(open_range)
    sections.switch("forward")
    sections.set_ranges(None)
    sections.switch("backward")
    assert calls == ["forward", "end of forward"]
