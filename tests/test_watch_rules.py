"""What the watching threads of HangWatch, FailureBoard and StopOnSignal decide, without processes and without waiting."""

from __future__ import annotations

import logging
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from ignite_train.handlers import failure_board, hang_watch, stop_on_signal

LIMIT = 10.0
WAITS, ELSEWHERE, AT_WORK = ("wait (gloo.py:1)", True), ("wait (other.py:2)", True), ("forward (model.py:3)", False)


def report(place: tuple[str, bool], *, update: int = 5, over: bool = False, has_told: bool = False) -> Any:
    where, waits = place
    return hang_watch._Report(1, update, 9, 0, 20, waits, where, over, has_told)


def watch_of(reports: list[Any], waited: float) -> Any:
    """The judging part of a watch: all ranks have stood where they are for so many seconds."""
    watch: Any = object.__new__(hang_watch._Watch)
    watch._reports, watch._clock, watch._arrived = reports, 100.0, [100.0 - waited] * len(reports)
    return watch


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([WAITS, WAITS, WAITS], False),  # a reduction that takes long
        ([AT_WORK, AT_WORK, AT_WORK], False),  # a long validation
        ([WAITS, WAITS, AT_WORK], True),
        ([WAITS, WAITS, ELSEWHERE], True),
        ([WAITS, ELSEWHERE], True),
    ],
    ids=["all wait together", "all at work", "one at work", "one waits elsewhere", "two wait apart"],
)
def test_a_rank_waits_in_vain_where_another_is_not_there(places: list[Any], expected: bool) -> None:
    """Only if it has waited for longer than the limit."""
    reports = [report(place) for place in places]
    ranks = list(range(len(reports)))
    assert watch_of(reports, LIMIT + 1)._waits_in_vain(ranks, LIMIT) is expected
    assert watch_of(reports, LIMIT)._waits_in_vain(ranks, LIMIT) is False


@pytest.mark.parametrize(
    ("updates", "place", "expected"),
    [((5, 6), AT_WORK, False), ((5, 6), WAITS, True)],
    ids=["at work", "waiting"],
)
def test_different_updates_are_a_hang_only_if_one_waits(updates: Any, place: Any, expected: bool) -> None:
    """Ranks that do not wait for each other may be in different updates for long."""
    reports = [report(place, update=update) for update in updates]
    assert watch_of(reports, LIMIT + 1)._waits_in_vain([0, 1], LIMIT) is expected


@pytest.mark.parametrize(("place", "expected"), [(WAITS, True), (AT_WORK, False)], ids=["waiting", "at work"])
def test_a_rank_waits_in_vain_for_one_that_has_left(place: Any, expected: bool) -> None:
    """All that are still there stand at one place."""
    reports = [report(place), report(place), report(place, over=True)]
    assert watch_of(reports, LIMIT + 1)._waits_in_vain([0, 1], LIMIT) is expected


@pytest.mark.parametrize(
    ("reports", "store", "expected"),
    [
        ([report(AT_WORK, has_told=True), report(WAITS)], True, True),
        ([report(AT_WORK, has_told=True), report(WAITS, has_told=True)], True, False),
        ([report(AT_WORK, has_told=True), report(WAITS, over=True)], True, False),
        ([report(AT_WORK, has_told=True), None], True, False),
        ([report(AT_WORK), report(WAITS, has_told=True)], True, True),
        ([report(AT_WORK, has_told=True), report(WAITS)], False, False),
    ],
    ids=["one does not", "all do", "it has left", "it has not begun", "it has not heard that we have", "no store"],
)
def test_a_rank_ends_when_the_others_have_said_why(reports: list[Any], store: bool, expected: bool) -> None:
    """Its end breaks their connections; one that has not told the finding would report those."""
    watch = watch_of(reports, 0.0)
    watch._messages = object() if store else None
    assert watch._some_have_not_told() is expected


def frame(file: str, **names: Any) -> Any:
    return SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name="stand"), f_globals=names, f_lineno=12)


@pytest.mark.parametrize(
    ("found", "where", "waits"),
    [
        (frame("/lib/torch/distributed/c10d.py"), "stand (c10d.py:12)", True),
        (frame("/anywhere/statistics.py", _WAITS_FOR_RANKS=True), "stand (statistics.py:12)", True),
        (frame("/home/me/model.py"), "stand (model.py:12)", False),
        (None, "nowhere", False),
    ],
    ids=["in a collective", "in a file that waits", "at work", "no such thread"],
)
def test_a_report_says_where_the_main_thread_is(monkeypatch: pytest.MonkeyPatch, found: Any, where: str, waits: bool) -> None:
    """And how far the run and its evaluation are."""
    monkeypatch.setattr(hang_watch, "_frame_of", {123: found}.get)
    watch = watch_of([None], 0.0)
    watch._main, watch._evaluator = 123, SimpleNamespace(state=SimpleNamespace(iteration=4))
    watch._trainer = SimpleNamespace(state=SimpleNamespace(iteration=7, num_micro_batches=9))
    begun = hang_watch.collectives.collectives_begun()
    watch._has_told = False
    assert watch._look(3, over=True) == hang_watch._Report(3, 7, 9, 4, begun, waits, where, over=True, has_told=False)
    watch._has_told = True
    assert watch._look(3, over=True).has_told
    watch._evaluator = None
    assert watch._look(3, over=True).evaluated == 0


class MainThread:
    """Stands for the event that the run is over, by a clock: the main thread ends the run after so many waits for it.

    Each wait takes as long as was asked for. In the first one the process stands still, for a minute more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends_after: float) -> None:
        self.now, self.awaited, self._ends_after = 100.0, 0.0, ends_after
        monkeypatch.setattr(failure_board, "time", SimpleNamespace(monotonic=lambda: self.now))

    def wait(self, seconds: float) -> bool:
        stands_still = self.awaited == 0.0
        self.now += seconds + 60.0 * stands_still
        self.awaited += seconds
        return not stands_still and self.awaited > self._ends_after


@pytest.mark.parametrize(("ends_after", "ended"), [(0.5, []), (float("inf"), [1])], ids=["it comes out", "it waits forever"])
def test_a_process_that_stood_still_may_still_end_the_run_itself(
    monkeypatch: pytest.MonkeyPatch, ends_after: float, ended: list[int]
) -> None:
    """The patience with its main thread is a second in which it runs."""
    found: list[int] = []
    monkeypatch.setattr(failure_board.collectives, "end_process", found.append)
    watch: Any = object.__new__(failure_board._Watch)
    watch._over = main_thread = MainThread(monkeypatch, ends_after)
    watch._trainer = SimpleNamespace(add_event_handler=lambda *_: None)
    watch._rank, watch._call_roll = 0, lambda: None
    watch._insist()
    assert found == ended
    assert main_thread.awaited == pytest.approx(1.0 if ended else 0.6)


def signal_watch(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> tuple[Any, Any, list[int]]:
    """The deciding part of a watch; its clock; and the exit statuses."""
    clock, ended = SimpleNamespace(now=50.0), []
    monkeypatch.setattr(stop_on_signal, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(stop_on_signal.collectives, "end_process", ended.append)
    monkeypatch.setattr(stop_on_signal.collectives, "rank", lambda: rank)
    monkeypatch.setattr(stop_on_signal.collectives, "is_main_rank", lambda: rank == 0)
    watch: Any = object.__new__(stop_on_signal._Watch)
    watch._trainer = SimpleNamespace(state=SimpleNamespace(iteration=7))
    watch._grace_seconds, watch._first = 30.0, None
    return watch, clock, ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_again_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    """With the status of a shell; but not at once, since a launcher and a scheduler may both pass one request on."""
    watch, clock, ended = signal_watch(monkeypatch)
    watch._hear(number)
    clock.now += stop_on_signal._SAME_REQUEST_SECONDS - 0.001
    watch._hear(number)
    assert ended == []
    clock.now += 0.001
    watch._hear(number)
    assert ended == [128 + number]
    assert f"{number.name} again: rank 0, at update 7, ends at once" in caplog.text


def test_a_process_whose_grace_is_over_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the stacks of all threads and the status of a shell."""
    watch, _, ended = signal_watch(monkeypatch, rank=1)
    watch._hear(signal.SIGTERM)
    watch._give_up()
    assert ended == [143]
    assert "SIGTERM: the run has not ended within grace_seconds=30; rank 1, at update 7, ends; its stacks follow" in caplog.text
    assert "test_a_process_whose_grace_is_over_ends" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "rank", "level"),
    [
        (signal.SIGINT, 0, logging.WARNING),
        (signal.SIGINT, 1, logging.INFO),  # Ctrl-C reaches all ranks
        (signal.SIGTERM, 1, logging.WARNING),
    ],
    ids=["ctrl-c on rank 0", "ctrl-c on rank 1", "sigterm on rank 1"],
)
def test_a_request_from_the_terminal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: signal.Signals, rank: int, level: int
) -> None:
    """And not one for each rank."""
    watch, _, _ = signal_watch(monkeypatch, rank)
    with caplog.at_level(logging.INFO):
        watch._hear(number)
    (record,) = caplog.records
    assert record.levelno == level
    assert "this may take 30 s" in record.getMessage()
