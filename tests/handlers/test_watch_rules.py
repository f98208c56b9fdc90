"""What the watching threads of HangWatch, FailureBoard and StopOnSignal decide, without processes and without waiting."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch.distributed import HashStore

from ignite_train import create_evaluator, create_trainer
from ignite_train.handlers import HangWatch, failure_board, hang_watch, stop_on_signal
from ignite_train.ranks import whereabouts
from ignite_train.ranks.sealed_messages import SealedMessages
from test_failures import until

LIMIT = 10.0
WAITS, ELSEWHERE, AT_WORK = ("wait (gloo.py:1)", True), ("wait (other.py:2)", True), ("forward (model.py:3)", False)


def report(
    place: tuple[str, bool],
    *,
    update: int = 5,
    micro_batch: int = 9,
    left: bool = False,
    over: bool = False,
    has_told: bool = False,
) -> Any:
    where, waits = place
    return hang_watch._Report(1, update, micro_batch, 0, 20, waits, where, left, over, has_told)


def watch_of(reports: list[Any], waited: float) -> Any:
    """The judging part of a watch: all ranks have stood where they are for so many seconds."""
    watch: Any = object.__new__(hang_watch._Watch)
    watch._reports, watch._clock, watch._arrived = reports, 100.0, [100.0 - waited] * len(reports)
    watch._heartbeat, watch._apart = hang_watch._Heartbeat(None), ([], [], 0)
    watch._trainer = SimpleNamespace(replicas=SimpleNamespace(are_elastic=False))
    return watch


def _asked(function: str, line: int) -> tuple[str, bool]:
    return f"all_reduce (c10d.py:12), asked by {function} (script.py:{line})", True


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([WAITS, WAITS, WAITS], False),  # a reduction that takes long
        ([_asked("rollout", 18), _asked("rollout", 20)], False),  # by the two branches of an `if`
        ([_asked("rollout", 18), _asked("validate", 18)], True),
        ([AT_WORK, AT_WORK, AT_WORK], False),  # a long validation
        ([WAITS, WAITS, AT_WORK], True),
        ([WAITS, WAITS, ELSEWHERE], True),
        ([WAITS, ELSEWHERE], True),
    ],
    ids=[
        "all wait together",
        "asked at two lines",
        "asked by two functions",
        "all at work",
        "one at work",
        "one waits elsewhere",
        "two wait apart",
    ],
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


@pytest.mark.parametrize(
    ("is_elastic", "where", "expected"),
    [
        (True, "answer (members.py:440)", ""),
        (True, "broadcast (c10d.py:12), asked by confirm (members.py:243)", "no rank has moved for more than"),
        (True, "forward (train.py:9)", "no rank has moved for more than"),
        (False, "answer (members.py:440)", "no rank has moved for more than"),
    ],
)
def test_a_replica_that_waits_for_others_does_not_hang(is_elastic: bool, where: str, expected: str) -> None:
    """How long it does has a limit of its own."""
    watch = watch_of([report((where, True))], 0.0)
    watch._rank, watch._timeout, watch._first_timeout, watch._first_update = 0, LIMIT, LIMIT, 2
    watch._interval, watch._standstill, watch._messages = 1.0, LIMIT, None
    watch._heard, watch._moved, watch._answered = [100.0], 100.0 - LIMIT - 1, 100.0
    watch._trainer.replicas.are_elastic = is_elastic

    assert watch._find_hang()[: len("no rank has moved for more than")] == expected


@pytest.mark.parametrize(("place", "expected"), [(WAITS, True), (AT_WORK, False)], ids=["waiting", "at work"])
def test_a_rank_waits_in_vain_for_one_that_has_left(place: Any, expected: bool) -> None:
    """All that are still there stand at one place."""
    reports = [report(place), report(place), report(place, over=True)]
    assert watch_of(reports, LIMIT + 1)._waits_in_vain([0, 1], LIMIT) is expected


def verdict_of(
    reports: list[Any], *, standstill: float | None = None, store: bool = True, limit: float = LIMIT, **since: Any
) -> str:
    """What rank 0 finds, in a run that began with update 2.

    Args:
        reports: of the ranks.
        standstill: see `HangWatch`.
        store: whether the ranks still have one.
        limit: the timeout.
        since: for how many seconds each rank has been `silent`, no rank has `moved`, the store has not `answered`.
    """
    watch = watch_of(reports, since.get("moved", 0.0))
    watch._rank, watch._timeout, watch._first_timeout, watch._first_update = 0, limit, 3 * limit, 2
    watch._interval = since.get("interval", 1.0)
    watch._standstill, watch._messages = standstill, SimpleNamespace(host="rank 0") if store else None
    watch._heard = [100.0 - silent for silent in since.get("silent", [0.0] * len(reports))]
    watch._moved, watch._answered = 100.0 - since.get("moved", 0.0), 100.0 - since.get("answered", 0.0)
    return watch._find_hang()  # type: ignore[no-any-return]


BOTH, APART, BUSY = [report(WAITS)] * 2, [report(WAITS), report(AT_WORK)], [report(AT_WORK)] * 2
FIRST, SECOND = ([report(WAITS, update=update), report(AT_WORK, update=update)] for update in (2, 3))

LONG = 61.0
WAITS_FOR_LONG, BUSY_FOR_LONG = ([report(place), report(WAITS)] for place in (WAITS, AT_WORK))
FIRST_FOR_LONG = [report(WAITS, update=2)] * 2


HANGS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "silent for the limit": (BOTH, {"silent": [0.0, LIMIT]}, ""),
    "one silent": (BOTH, {"silent": [0.0, LIMIT + 1]}, "rank 1 is silent for more than 10 s; rank 0 at update 5 in wait (gl"),
    "both silent": (BOTH, {"silent": [LIMIT + 1] * 2}, "ranks 0, 1 are silent for more than 10 s; "),
    "one never came": ([report(WAITS), None], {"silent": [0.0, LIMIT + 1]}, "rank 1 is silent for more than 10 s; "),
    "one has left": ([report(WAITS), report(WAITS, over=True)], {"silent": [0.0, LIMIT + 1]}, ""),
    "no store": (BOTH, {"silent": [0.0, LIMIT + 1], "store": False}, ""),
    "no store and silent itself": (BOTH, {"silent": [LIMIT + 1, 0.0], "store": False}, "rank 0 is silent for more than 10 s; "),
    "first update": (FIRST, {"silent": [0.0, 3 * LIMIT]}, ""),
    "first update for too long": (FIRST, {"silent": [0.0, 3 * LIMIT + 1]}, "rank 1 is silent for more than 30 s; "),
    "second update": (SECOND, {"silent": [0.0, LIMIT + 1]}, "rank 1 is silent for more than 10 s; "),
    "before the first look": ([None, None], {"silent": [0.0, 3 * LIMIT]}, ""),
    "silent for long, and none waits": (BUSY_FOR_LONG, {"silent": [0.0, LONG], "moved": LONG}, ""),
    "silent for another": (WAITS_FOR_LONG, {"silent": [0.0, LONG], "moved": LONG}, "rank 1 is silent for more than 60 s; "),
    "silent for another in the first update": (FIRST_FOR_LONG, {"silent": [0.0, LONG], "moved": 3 * LONG}, ""),
    "silent for another for three times as long": (
        FIRST_FOR_LONG,
        {"silent": [0.0, 3 * LONG], "moved": 3 * LONG},
        "rank 1 is silent for more than 180 s; ",
    ),
    "silent for another among many": (WAITS_FOR_LONG, {"silent": [0.0, LONG], "moved": 3 * LONG, "interval": 8.0}, ""),
    "silent for another, late": (WAITS_FOR_LONG, {"silent": [0.0, 60.0], "moved": LONG}, ""),
    "silent for another that has just come": (WAITS_FOR_LONG, {"silent": [0.0, LONG], "moved": 60.0}, ""),
    "store silent for another": (
        WAITS_FOR_LONG,
        {"answered": LONG, "moved": LONG},
        "the store at which the ranks met has not answered for ",
    ),
    "left where all are": ([report(WAITS, left=True, over=True), report(WAITS)], {}, ""),
    "left behind": ([report(WAITS), report(WAITS, update=4)], {}, ""),
    "store late": (BOTH, {"answered": LIMIT}, ""),
    "store too late": (BOTH, {"answered": LIMIT + 1}, "the store at which the ranks met has not answered for 11.0 s: its ho"),
    "apart for the limit": (APART, {"moved": LIMIT}, ""),
    "apart": (APART, {"moved": LIMIT + 1}, "no rank has moved for more than 10 s; rank 1 is behind; rank 0 at update 5 in wa"),
    "apart with a standstill": (APART, {"moved": LIMIT + 1, "standstill": 20.0}, "no rank has moved for more than 10 s; "),
    "apart in the first update": (FIRST, {"moved": LIMIT + 1}, ""),
    "busy": (BUSY, {"moved": 1e9}, ""),
    "busy for the standstill": (BUSY, {"moved": 20.0, "standstill": 20.0}, ""),
    "standstill": (BUSY, {"moved": 21.0, "standstill": 20.0}, "no rank has moved for more than 20 s; no rank is ahead of the "),
    "standstill in the first update": (FIRST[1:] * 2, {"moved": 21.0, "standstill": 20.0}, ""),
}


@pytest.mark.parametrize("case", HANGS)
def test_what_is_found_to_hang(case: str) -> None:
    """A rank that is silent, a store that does not answer, ranks that stand apart; each after more than the limit."""
    reports, since, expected = HANGS[case]
    limit = 10 * LIMIT if "another" in case or "for long" in case else LIMIT
    found = verdict_of(reports, limit=limit, **since)
    assert found.startswith(expected) if expected else found == ""


LEFT, GONE, AHEAD = report(AT_WORK, left=True), report(AT_WORK, left=True, over=True), report(WAITS, update=6)
UNEVEN: dict[str, tuple[list[Any], list[tuple[int, ...]], str]] = {
    "one": ([AHEAD, LEFT, AHEAD], [(1, 1, 1), (3, 3, 3), (4, 3, 4), (4, 4, 4)], "rank 1 has left the session"),
    "two": ([LEFT, GONE, AHEAD], [(1, 1, 1), (4, 1, 4)], "ranks 0, 1 have left the session"),
    "no one": ([report(WAITS), AHEAD, AHEAD], [(1, 1, 1), (9, 9, 9)], ""),
    "all": ([LEFT, AHEAD._replace(left=True)], [(1, 1), (9, 9)], ""),
    "and another is at work": ([LEFT, report(AT_WORK, update=6)], [(1, 1), (9, 9)], ""),
    "and another is silent": ([LEFT, AHEAD], [(1, 1), (9, 1), (19, 3)], ""),
    "long ago": ([LEFT, AHEAD], [(1, 1), (1, 9), (3, 19)], ""),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_who_has_left_a_session_too_early(case: str) -> None:
    """It counts once the leaver and the waiting ranks have said so three times more; a rank that is gone need not repeat it."""
    reports, beats, expected = UNEVEN[case]
    watch = watch_of(reports, 0.0)
    found = []
    for of_ranks in beats:
        watch._reports = [one._replace(beat=beat) for one, beat in zip(reports, of_ranks, strict=True)]
        found.append(watch._uneven())
    assert found[:-1] == [""] * (len(beats) - 1)
    where = "before update 6, and all ranks must call update equally often; rank 0 at update "
    assert found[-1].startswith(f"{expected} {where}") if expected else found[-1] == ""


def test_a_rank_whose_counter_was_put_back_before_it_left_is_not_early() -> None:
    """The others' reports may be older than that; what they say next counts from the beginning."""
    watch = watch_of([AHEAD, LEFT], 0.0)
    found = []
    for beat, late in enumerate([AHEAD, AHEAD, report(WAITS), AHEAD, AHEAD, AHEAD, AHEAD]):
        watch._reports = [one._replace(beat=beat) for one in (late, LEFT)]
        found.append(bool(watch._uneven()))
    assert found == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report(WAITS, update=6), report(WAITS), report(WAITS, update=6)], "rank 1 is behind"),
        ([report(AT_WORK, micro_batch=10), report(WAITS), report(AT_WORK)], "rank 2 is behind"),
        ([report(WAITS), report(AT_WORK), report(AT_WORK)], "ranks 1, 2 are behind"),
        ([report(WAITS, update=6), None, report(WAITS)], "rank 2 is behind"),
        ([report(AT_WORK)] * 3, "no rank is ahead of the others"),
    ],
    ids=["update", "micro-batch", "at work", "not begun", "together"],
)
def test_which_ranks_are_behind(reports: list[Any], expected: str) -> None:
    """By update, then by micro-batch; of those at the same place the ones for which others wait."""
    assert watch_of(reports, 0.0)._behind([0, 1, 2]) == expected


def test_where_each_rank_is() -> None:
    """Also one that has not begun, or has left."""
    reports = [report(AT_WORK), None, report(WAITS, update=7, over=True)]
    assert watch_of(reports, 0.0)._places() == (
        "rank 0 at update 5 in forward (model.py:3); rank 1 has not begun the run; rank 2 has left the run at update 7"
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (False, False, False)),
        ({"beat": 2}, (True, False, False)),
        ({"micro_batch": 10}, (False, True, False)),
        ({"evaluated": 1}, (False, True, False)),
        ({"collectives": 21}, (False, True, False)),
        ({"over": True}, (False, True, False)),
        ({"update": 6}, (False, True, True)),
        ({"where": "wait (other.py:2)"}, (False, False, True)),
        ({"waits": False}, (False, False, True)),
        (None, (True, True, True)),
    ],
    ids=lambda value: "-".join(value) or "nothing" if isinstance(value, dict) else "the-first" if value is None else None,
)
def test_what_a_report_shows(change: dict[str, Any] | None, expected: tuple[bool, ...]) -> None:
    """That the rank is alive, that it makes progress, that it stands elsewhere."""
    before = report(WAITS)
    watch = watch_of([before if change is not None else None], 1.0)
    watch._heard, watch._moved = [99.0], 99.0
    watch._hear(0, before._replace(**(change or {})))
    assert (watch._heard[0] == 100.0, watch._moved == 100.0, watch._arrived[0] == 100.0) == expected


def test_ranks_tell_one_another_where_they_are_and_what_they_found() -> None:
    """The first finding is that of all, also if another rank finds something else meanwhile."""
    store, watches = HashStore(), []
    for rank, place in enumerate((WAITS, AT_WORK, AT_WORK)):
        watch = watch_of([None] * 3, 0.0)
        watch._rank, watch._messages = rank, SealedMessages(store, bytes(24))
        watch._heard, watch._moved, watch._answered, watch._verdict = [0.0] * 3, 0.0, 0.0, ""
        watch._hear(rank, report(place, update=rank))
        watches.append(watch)
    for watch in watches * 2:
        watch._exchange()
    own = [report(place, update=rank) for rank, place in enumerate((WAITS, AT_WORK, AT_WORK))]
    assert [watch._reports for watch in watches] == [own] * 3
    assert [(watch._answered, watch._verdict) for watch in watches] == [(100.0, "")] * 3
    first, second, third = watches
    second._verdict = "rank 0 is silent"
    second._exchange()
    first._verdict = "found later"
    for watch in (first, third):
        watch._exchange()
    assert third._verdict == "rank 0 is silent"


def test_a_store_that_is_gone_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With its host, and not as a warning, since that may have ended well; the rank continues to look at itself."""
    caplog.set_level(logging.INFO)

    def write(*_: Any) -> None:
        raise RuntimeError("connection reset")

    watch = watch_of([None, None], 0.0)
    watch._rank, watch._interval, watch._heard, watch._moved, watch._has_told = 1, 0.25, [0.0] * 2, 0.0, False
    watch._messages = SimpleNamespace(host="rank 0", write=write)
    is_over, looks, waits = threading.Event(), [], []
    watch._over = SimpleNamespace(is_set=is_over.is_set, wait=waits.append)

    def look(beat: int, *, over: bool) -> Any:
        looks.append(over)
        if beat == 2:
            is_over.set()
        return report(AT_WORK, over=over)._replace(beat=beat)

    watch._look = look
    watch._talk()
    said = "rank 0, which hosts the store, has ended; rank 1 watches only itself from now on: connection reset"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("INFO", said)]
    assert (looks, waits) == ([False, False, False, True], [0.25] * 3)
    assert watch._reports[1].beat == 3


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


def test_the_clock_of_a_watch_stands_still_while_the_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look each half interval counts what has passed since the last one, and at most an interval."""
    watch, times, looks = watch_of([], 0.0), Times(), []
    monkeypatch.setattr(hang_watch, "time", times)
    passing = iter([2.0, 3.0, 3600.0, 4.0])

    def wait(seconds: float) -> bool:
        looks.append(seconds)
        times.sleep(next(passing, 0.0))
        return len(looks) == 5

    found, concluded, clocks = iter(["", "", "rank 1 is silent"]), [], []
    watch._over, watch._interval, watch._clock, watch._verdict = SimpleNamespace(wait=wait), 4.0, 0.0, ""
    watch._find_hang = lambda: clocks.append(watch._clock) or next(found)  # type: ignore[func-returns-value]
    watch._conclude = lambda: concluded.append((watch._clock, watch._verdict))
    watch._judge()
    assert (looks, clocks) == ([2.0] * 5, [2.0, 5.0, 9.0])
    assert concluded == [(9.0, "rank 1 is silent"), (13.0, "rank 1 is silent")]


@pytest.mark.parametrize(("tells_after", "waited"), [(0.0, 0.0), (1.0, 1.0), (60.0, 2.0)], ids=["at once", "later", "never"])
def test_a_hang_ends_the_process_with_its_stacks(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tells_after: float,
    waited: float,
) -> None:
    """As soon as the others have told the finding, at most two seconds later; they have time to see that it has done so."""
    watch, times, ended = watch_of([report(WAITS, has_told=True)], 0.0), Times(), []
    monkeypatch.setattr(hang_watch, "time", times)
    monkeypatch.setattr(hang_watch.collectives, "end_process", lambda status: ended.append((status, times.now - 50.0)))
    watch._rank, watch._interval, watch._verdict, watch._has_told = 0, 0.4, "rank 1 is silent", False
    watch._some_have_not_told = lambda: not watch._has_told or times.now < 50.0 + tells_after
    watch._conclude()
    assert ended == [(1, pytest.approx(waited + 3 * 0.4, abs=0.11))]
    assert caplog.messages == ["training hangs: rank 1 is silent. The stacks of rank 0 follow; then it ends."]
    assert "test_a_hang_ends_the_process_with_its_stacks" in capfd.readouterr().err


def frames(*modules: str, function: str = "stand", **names: Any) -> Any:
    """A stack: the module of the frame at its top comes first; `names` are in the last one."""
    found: Any = None
    for module in reversed(modules):
        code = SimpleNamespace(co_filename=f"/lib/{module.replace('.', '/')}.py", co_name=function)
        names = {"__name__": module, **(names if found is None else {})}
        found = SimpleNamespace(f_code=code, f_globals=names, f_lineno=12, f_back=found)
    return found


STANDS: dict[str, tuple[Any, tuple[str, bool]]] = {
    "in a collective": (frames("torch.distributed.c10d", "model"), ("stand (c10d.py:12), asked by stand (model.py:12)", True)),
    "in a collective that Ignite was asked for": (
        frames("torch.distributed.c10d", "ignite.distributed.comp_models.native", "ignite.distributed.utils", "ignite.metrics"),
        ("stand (c10d.py:12), asked by stand (metrics.py:12)", True),
    ),
    "in a collective that we were asked for": (
        frames("torch.distributed.c10d", "ignite_train.ranks.collectives", "ignite_train.trainer", _WAITS_FOR_RANKS=True),
        ("stand (c10d.py:12), asked by stand (trainer.py:12)", True),
    ),
    "in a functional collective": (
        frames("torch._ops", "torch.distributed._functional_collectives", "torch.nn.modules.module", "model"),
        ("stand (_functional_collectives.py:12), asked by stand (model.py:12)", True),
    ),
    "in a lock for a collective": (
        frames("threading", "torch.futures", "model"),
        ("stand (__init__.py:12), asked by stand (model.py:12)", True),
    ),
    "in the buffers of DDP": (
        frames("torch.nn.parallel.distributed", "torch.nn.modules.module", "model"),
        ("stand (distributed.py:12), asked by stand (model.py:12)", True),
    ),
    "in a layer in DDP": (
        frames("torch.nn.modules.linear", "torch.nn.parallel.distributed", "model", function="forward"),
        ("forward (linear.py:12)", False),
    ),
    "in a file that waits": (frames("ours", _WAITS_FOR_RANKS=True), ("stand (ours.py:12)", True)),
    "in what such a file calls": (frames("torch._tensor", "ours", _WAITS_FOR_RANKS=True), ("stand (ours.py:12)", True)),
    "in a model": (frames("model", "torch.distributed.c10d"), ("stand (model.py:12)", False)),
    "in a loader": (frames("selectors", "queue", "torch.utils.data.dataloader", "ours"), ("stand (selectors.py:12)", False)),
    "no such thread": (None, ("nowhere", False)),
}


@pytest.mark.parametrize("stack", STANDS)
def test_where_a_rank_waits_is_seen_through_the_frames_of_torch(monkeypatch: pytest.MonkeyPatch, stack: str) -> None:
    """From the top down to the first frame of code that does more than to ask torch, which is named too where it waits."""
    found, expected = STANDS[stack]
    if stack == "in a lock for a collective":
        found.f_back.f_code.co_filename = "/lib/torch/futures/__init__.py"
    monkeypatch.setattr(whereabouts, "_frame_of", {123: found}.get)
    assert whereabouts.find_whereabouts(123) == expected


@pytest.mark.parametrize(
    ("line", "modules", "expected"),
    [
        ("    handle.wait()", ["model"], ("stand (model.py:12)", True)),
        ("    event.wait()", ["threading", "model"], ("stand (threading.py:12)", False)),
        ("    waits = queue.get()", ["model"], ("stand (model.py:12)", False)),
    ],
    ids=["a handle of torch", "an event of Python", "neither"],
)
def test_a_script_that_waits_for_a_handle_waits_for_ranks(
    monkeypatch: pytest.MonkeyPatch, line: str, modules: list[str], expected: Any
) -> None:
    """That method has no frame; what else is called so has one."""
    monkeypatch.setattr(whereabouts.linecache, "getline", lambda _file, _number: line)
    monkeypatch.setattr(whereabouts, "_frame_of", {123: frames(*modules)}.get)
    assert whereabouts.find_whereabouts(123) == expected


@pytest.mark.parametrize(
    ("writing", "expected"),
    [
        (frames("torch.distributed.c10d", "disk"), ("stand (c10d.py:12), asked by stand (disk.py:12)", True)),
        (frames("disk", "writer"), ("stand (disk.py:12)", False)),
    ],
    ids=["for the other ranks", "for the disk"],
)
def test_one_that_waits_for_a_thread_stands_where_that_one_does(
    monkeypatch: pytest.MonkeyPatch, writing: Any, expected: Any
) -> None:
    """For the latest thread of that name that does not wait for an earlier one itself."""
    waiting = frames("threading", "writer", _WAITS_FOR_THREADS="Checkpoint")
    stacks = {1: waiting, 2: frames("disk"), 3: writing, 4: waiting, 5: frames("other")}
    names = ["MainThread", *["Checkpoint"] * 3, "Other"]
    threads = [SimpleNamespace(ident=number, name=name) for number, name in enumerate(names, 1)]
    monkeypatch.setattr(whereabouts, "_frame_of", stacks.get)
    monkeypatch.setattr(whereabouts, "threading", SimpleNamespace(enumerate=lambda: threads))
    assert whereabouts.find_whereabouts(1) == expected


def test_a_report_says_where_the_main_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And how far the run and its evaluation are."""
    monkeypatch.setattr(hang_watch, "find_whereabouts", {123: whereabouts.Whereabouts("stand (model.py:12)", waits=True)}.get)
    where, waits = "stand (model.py:12)", True
    watch = watch_of([None], 0.0)
    watch._main, watch._evaluator = 123, SimpleNamespace(state=SimpleNamespace(iteration=4))
    watch._trainer = SimpleNamespace(
        state=SimpleNamespace(iteration=7, num_micro_batches=9), progress=SimpleNamespace(session_left=True)
    )
    begun = hang_watch.collectives.collectives_begun()
    watch._has_told = False
    expected = hang_watch._Report(3, 7, 9, 4, begun, waits, where, left=True, over=True, has_told=False)
    assert watch._look(3, over=True) == expected
    watch._has_told = True
    assert watch._look(3, over=True).has_told
    watch._evaluator = None
    assert watch._look(3, over=True).evaluated == 0


@pytest.mark.parametrize("collects", [True, False])
def test_a_look_at_a_thread_leaves_the_garbage_collector_as_it_is(collects: bool) -> None:
    """Switched on or off."""
    was_enabled = gc.isenabled()
    try:
        gc.enable() if collects else gc.disable()
        found = whereabouts._top_of(threading.get_ident())
        assert gc.isenabled() is collects
    finally:
        gc.enable() if was_enabled else gc.disable()
    assert found[0].f_code.co_name == "_frame_of"


@pytest.mark.parametrize(("timeout", "interval"), [(2.0, 0.25), (8.0, 1.0), (600.0, 1.0)])
def test_a_watch_begins_with_patience(monkeypatch: pytest.MonkeyPatch, timeout: float, interval: float) -> None:
    """The first update has its own limit; a report comes about once a second, and eight times within the timeout."""
    monkeypatch.setattr(hang_watch.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    trainer: Any = SimpleNamespace(state=SimpleNamespace(iteration=3), replicas=SimpleNamespace(are_elastic=False))
    watch: Any = hang_watch._Watch(trainer, None, timeout, 3 * timeout)
    found, waits = [], []
    for update in (4, 5):
        watch._clock = 0.0
        watch._hear(0, report(AT_WORK, update=update)._replace(beat=update))
        watch._clock = 2 * timeout
        found.append(watch._find_hang())
    assert found[0] == ""
    assert found[1].startswith(f"rank 0 is silent for more than {timeout:g} s")
    watch._over = SimpleNamespace(is_set=lambda: bool(waits), wait=waits.append)
    watch._look = lambda beat, *, over: report(AT_WORK, over=over)
    watch._talk()
    assert waits == [interval]


LOOKS = {
    "the run begins": ((5, 1), (5, 1), True),
    "no rank moves": ((5, 1), (5, 1), False),
    "this rank moves": ((5, 2), (5, 1), True),
    "nor now": ((5, 2), (5, 1), False),
    "the other rank moves": ((5, 2), (6, 1), True),
    "nor at last": ((5, 2), (6, 1), False),
}


def test_a_heartbeat_is_renewed_where_a_rank_has_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By progress of any rank and by nothing else, also if this process looks again; after the run there is no file."""
    monkeypatch.setattr(hang_watch.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(hang_watch.collectives, "world_size", lambda: 2)
    trainer: Any = SimpleNamespace(state=SimpleNamespace(iteration=3))
    file, renewed = tmp_path / "heartbeat", []
    watch: Any = hang_watch._Watch(trainer, None, 600.0, 600.0, heartbeat=file)
    looks = list(LOOKS.values())

    def wait(_: float) -> None:
        renewed.append(file.stat().st_mtime != 1.0)
        os.utime(file, (1.0, 1.0))

    def look(beat: int, *, over: bool) -> Any:
        update, micro_batch = looks[min(beat, len(looks) - 1)][0]
        return report(AT_WORK, update=update, micro_batch=micro_batch, over=over)._replace(beat=beat)

    def exchange() -> None:
        update, micro_batch = looks[min(watch._reports[0].beat, len(looks) - 1)][1]
        watch._hear(1, report(AT_WORK, update=update, micro_batch=micro_batch)._replace(beat=watch._reports[0].beat))

    watch._over = SimpleNamespace(is_set=lambda: len(renewed) == len(looks), wait=wait)
    watch._look, watch._exchange = look, exchange
    watch._talk()
    assert dict(zip(LOOKS, renewed, strict=True)) == {name: expected for name, (_, _, expected) in LOOKS.items()}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("progress", [Events.ITERATION_STARTED, "of an evaluator"])
def test_a_heartbeat_of_a_run(tmp_path: Path, progress: Any) -> None:
    """The thread itself: what was set back at one update or micro-batch of an evaluator is renewed at the next one."""
    file, model, renewed = tmp_path / "heartbeat", torch.nn.Linear(1, 1), list[int]()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum())
    evaluator = create_evaluator(model, lambda model, x: model(x).sum())
    HangWatch(heartbeat=str(file)).attach(trainer, evaluator=evaluator)
    data = [torch.ones(1, 1)] * 3

    def watch_it(engine: Any) -> None:
        until(file.exists, "the file is there")
        if engine.state.iteration > 1:
            until(lambda: file.stat().st_mtime != 1.0, "it is renewed")
            renewed.append(engine.state.iteration)
        os.utime(file, (1.0, 1.0))

    if progress == Events.ITERATION_STARTED:
        trainer.add_event_handler(progress, watch_it)
    else:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=1), lambda: evaluator.run(data))
        evaluator.add_event_handler(Events.ITERATION_STARTED, watch_it)
    trainer.run(data, max_epochs=1)
    assert renewed == [2, 3]
    until(lambda: not file.exists(), "the file is gone")


def test_a_heartbeat_that_cannot_be_written_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning says why. What is no path is refused when the handler is made."""
    heartbeat = hang_watch._Heartbeat(tmp_path / "nowhere" / "heartbeat")
    heartbeat.renew()
    heartbeat.renew()
    heartbeat.end()
    (message,) = caplog.messages
    assert message.startswith("the heartbeat of HangWatch cannot be written: [Errno 2]")
    assert message.endswith("; training continues without it")
    with pytest.raises(TypeError, match="heartbeat must be a path, got 5"):
        HangWatch(heartbeat=5)  # type: ignore[arg-type]


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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends_after: float, ended: list[int]
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
    assert caplog.messages == ["rank 0 ends now: most likely it waits for the rank that failed"] * len(ended)
    assert main_thread.awaited == pytest.approx(1.0 if ended else 0.6)


class Times:
    """Time that passes only where it is slept."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def board_of(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int, host_rank: int | None) -> tuple[Any, Times]:
    """The watch of a rank with a store of its own, at update 7, and its clock. A process is dead if it has written so."""
    times = Times()
    monkeypatch.setattr(failure_board, "time", times)
    monkeypatch.setattr(failure_board, "has_ended", lambda process: process == ["dead"])
    watch: Any = object.__new__(failure_board._Watch)
    watch._messages = SealedMessages(HashStore(), bytes(24))
    watch._messages.host_rank, watch._messages.host = host_rank, f"rank {host_rank}"
    watch._rank, watch._others = rank, [other for other in range(world_size) if other != rank]
    watch._trainer = SimpleNamespace(state=SimpleNamespace(iteration=7))
    watch._cause, watch._host_ended, watch.gone, watch._error, watch._over = None, False, "", None, threading.Event()
    watch._running, watch._processes, watch._main = watch._others, {}, threading.get_ident()
    return watch, times


DEAD, SILENT = ("process of {}", ["dead"]), ("process of {}", ["running"])
HEARD, ENDED = ("first heard by {}", True), ("ended by {}", True)


@pytest.mark.parametrize(
    ("others", "gone", "waited"),
    [
        ([HEARD, HEARD], "", 0.0),
        ([HEARD, ENDED], "", 0.0),
        ([DEAD, HEARD], "rank 1 is gone: no longer running", 0.0),
        ([DEAD, DEAD], "ranks 1, 2 are gone: no longer running", 0.0),
        ([HEARD, SILENT], "rank 2 is gone or standing still: no answer came within 2 s", 2.0),
        (
            [SILENT, DEAD, HEARD, SILENT],
            "rank 2 is gone: no longer running; ranks 1, 4 are gone or standing still: no answer came within 2 s",
            2.0,
        ),
    ],
    ids=["all hear", "one has ended", "one is dead", "both are dead", "one is silent", "each"],
)
def test_a_roll_call_names_who_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, others: list[Any], gone: str, waited: float
) -> None:
    """At once where the process is dead; a rank that does not answer is waited for."""
    watch, times = board_of(monkeypatch, 0, len(others) + 1, host_rank=None)
    for rank, (name, value) in enumerate(others, start=1):
        watch._messages.write(name.format(rank), value)
    watch._call_roll()
    assert (watch.gone, caplog.messages) == (gone, [gone] if gone else [])
    assert times.now - 50.0 == pytest.approx(waited, abs=0.05)
    assert watch._messages.read("roll called by 0") is True


@pytest.mark.parametrize(
    ("rank", "has_called", "waited"),
    [(0, True, 0.0), (0, False, 2.0), (1, False, 0.0)],
    ids=["the other has called", "the other has not", "not the host"],
)
def test_the_host_of_the_store_waits_for_the_roll_calls_of_the_others(
    monkeypatch: pytest.MonkeyPatch, rank: int, has_called: bool, waited: float
) -> None:
    """Its end may be that of the store; it does not wait for one that is dead."""
    watch, times = board_of(monkeypatch, rank, 3, host_rank=0)
    watch._messages.write("process of 2", ["dead"])
    watch._messages.write(f"first heard by {1 - rank}", value=True)
    if has_called:
        watch._messages.write("roll called by 1", value=True)
    watch._call_roll()
    assert times.now - 50.0 == pytest.approx(waited, abs=0.05)


def test_the_news_are_a_failure_or_that_the_host_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is answered, so that no other rank waits for this one; only the failure ends the run."""
    watch, _ = board_of(monkeypatch, 1, 3, host_rank=0)
    assert watch._read() is False
    assert (watch._host_ended, watch._cause) == (False, None)
    watch._messages.write("ended by 2", value=True)
    assert watch._read() is False
    assert watch._messages.read("end heard by 1") is None
    watch._messages.write("ended by 0", value=True)
    assert watch._read() is False
    assert (watch._host_ended, watch._messages.read("end heard by 1"), caplog.messages) == (True, True, [])
    watch._messages.write_once("first", [2, 5, "ValueError: no"])
    assert watch._read() is True
    assert caplog.messages == ["rank 2 failed at update 5: ValueError: no (rank 1 was at update 7)"]
    assert watch._messages.read("first heard by 1") is True
    assert (watch._cause.rank, watch._cause.update, watch._cause.error) == (2, 5, "ValueError: no")


@pytest.mark.parametrize(("first", "cause"), [(None, None), ([2, 5, "ValueError: no"], 2)], ids=["the first", "the second"])
def test_of_several_failures_one_is_the_first(monkeypatch: pytest.MonkeyPatch, first: Any, cause: int | None) -> None:
    """A later one learns of it, and is not written."""
    watch, _ = board_of(monkeypatch, 1, 3, host_rank=None)
    for rank in (0, 2):
        watch._messages.write(f"first heard by {rank}", value=True)
    if first is not None:
        watch._messages.write_once("first", first)
    watch._write_failure("KeyError: 3")
    assert watch._messages.read("first") == (first or [1, 7, "KeyError: 3"])
    assert (watch._cause and watch._cause.rank) == cause
    assert watch._messages.read("first heard by 1") is True
    assert watch._messages.read("news") is True
    assert watch._messages.read("roll called by 1") is True


@pytest.mark.parametrize(
    ("rank", "how", "level", "gone"),
    [
        (1, "killed", "ERROR", "rank 0, which hosts the store, is gone"),
        (1, "told", "ERROR", "rank 0, which hosts the store, is gone"),
        (1, "ended", "INFO", ""),
        (1, "over", "INFO", ""),
        (0, "closed", "WARNING", ""),
    ],
    ids=["of another", "after it has told a failure", "of one that has ended", "at the end of a good run", "its own"],
)
def test_a_store_that_is_lost_is_the_end_of_its_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, how: str, level: str, gone: str
) -> None:
    """Unless the host has ended in good order; this rank ends too if the process of the host is gone."""
    watch, _ = board_of(monkeypatch, rank, 2, host_rank=0)
    watch._host_ended, ended = how == "ended", []
    if how == "over":
        watch._over.set()
    watch._cause = failure_board.PeerFailureError(0, 5, "KeyError: 3") if how == "told" else None
    watch._processes = {"process of 0": ["dead"] if how != "told" else []}
    watch._ends_by_itself, watch._insist = lambda: False, lambda: ended.append(1)
    caplog.set_level(logging.INFO)
    watch._lose_store(RuntimeError("connection reset"))
    (record,) = caplog.records
    assert (record.levelname, watch.gone, ended) == (level, gone, [1] * (how in ("killed", "told")))
    text = gone or "the store at which the ranks met has ended"
    assert record.getMessage() == f"{text}; rank {rank} no longer notices failures of other ranks: connection reset"


@pytest.mark.parametrize(
    ("places", "lost_after"),
    [
        ([(WAITS, 1)] * 300, 241),
        ([(AT_WORK, 1)] * 300, None),
        ([(WAITS, number) for number in range(300)], None),
        ([*[(WAITS, 1)] * 200, (AT_WORK, 1), *[(WAITS, 1)] * 250], 442),
    ],
    ids=["in one collective", "at work", "in one collective after another", "in two"],
)
def test_a_host_on_another_machine_is_lost_where_a_collective_does_not_end(
    monkeypatch: pytest.MonkeyPatch, places: list[Any], lost_after: int | None
) -> None:
    """Its connection alone may have broken: a minute in which the main thread stands in one collective, at 4 looks a second."""
    watch, _ = board_of(monkeypatch, 1, 2, host_rank=0)
    watch._trainer = SimpleNamespace(state=SimpleNamespace(num_micro_batches=9))
    looks: list[Any] = []
    watch._over = SimpleNamespace(wait=lambda _: looks.append(1) or len(looks) > len(places))
    monkeypatch.setattr(failure_board, "find_whereabouts", lambda _: whereabouts.Whereabouts(*places[len(looks) - 1][0]))
    monkeypatch.setattr(failure_board.collectives, "collectives_begun", lambda: places[len(looks) - 1][1])
    assert watch._host_is_lost(0) is (lost_after is not None)
    assert len(looks) == (lost_after or len(places) + 1)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("runs", None),
        ("ended", None),
        ("wakes up", None),
        ("killed", "rank 2 failed at update 7: its process is no longer running"),
        ("raised", "rank 2 failed at update 5: KeyError: 3"),
    ],
)
def test_a_rank_that_was_killed_is_found_without_a_word_of_anybody(
    monkeypatch: pytest.MonkeyPatch, how: str, cause: str | None
) -> None:
    """If its run had not ended, and only after the main thread had time to come out of its collective."""
    watch, _ = board_of(monkeypatch, 1, 3, host_rank=0)
    watch._messages.write("process of 0", ["running"])
    watch._messages.write("process of 2", ["running" if how == "runs" else "dead"])
    watch._ends_by_itself = lambda: how == "wakes up"
    if how == "ended":
        watch._messages.write("ended by 2", value=True)
    if how == "raised":
        watch._messages.write_once("first", [2, 5, "KeyError: 3"])
    assert watch._find_death() is (cause is not None)
    assert watch._messages.read("news") is (True if cause else None)
    assert (watch._cause and str(watch._cause)) == cause
    assert watch._running == ([0] if how == "ended" else [0, 2])


def signal_watch(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> tuple[Any, Any, list[int]]:
    """The deciding part of a watch; its clock; and the exit statuses."""
    clock, ended = SimpleNamespace(now=50.0), []
    monkeypatch.setattr(stop_on_signal, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(stop_on_signal.collectives, "end_process", ended.append)
    monkeypatch.setattr(stop_on_signal.collectives, "rank", lambda: rank)
    monkeypatch.setattr(stop_on_signal.collectives, "is_main_rank", lambda: rank == 0)
    watch: Any = object.__new__(stop_on_signal._Watch)
    watch.trainer = SimpleNamespace(state=SimpleNamespace(iteration=7))
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


def test_only_a_session_that_is_left_without_an_exception_counts_as_left() -> None:
    """Its rank is still in the closing events then; a later run or session forgets it."""
    model = torch.nn.Linear(1, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).sum())
    seen: list[bool] = []
    trainer.add_event_handler(Events.STARTED, lambda: seen.append(trainer.progress.session_left))
    trainer.add_event_handler(Events.COMPLETED, lambda: seen.append(trainer.progress.session_left))
    with trainer.session():
        seen.append(trainer.progress.session_left)
    with pytest.raises(KeyError), trainer.session():
        raise KeyError
    assert seen == [False, False, True, False]
    assert not trainer.progress.session_left
