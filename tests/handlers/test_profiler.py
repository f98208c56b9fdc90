"""Profiler: a trace of the chosen updates on the chosen ranks, whatever ends the run."""

from __future__ import annotations

import errno
import gzip
import json
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn

import cuts
from ignite_train import Trainer, UpdateOptions, create_trainer
from ignite_train.handlers import Profiler, StepTimer
from ranks import run_ranks

DATA = cuts.cut(cuts.samples(), [4, 12, 7, 9, 16, 16])  # six micro-batches


def make(forward: Any = cuts.forward, **options: Any) -> Trainer:
    model = cuts.linear()
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), forward, **options)


def events_in(trace: Path) -> list[dict[str, Any]]:
    """What a trace shows with a beginning and a length, in the order of time."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])


def names(trace: Path) -> list[str]:
    return [event["name"] for event in events_in(trace)]


def of_updates(trace: Path) -> list[str]:
    return [name for name in names(trace) if name.startswith("update ")]


def test_a_profile_does_not_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 warns in the first profile of a process that the next one starts again."""
    monkeypatch.setattr(torch.profiler.profiler, "_WARNINGS_SHOWN", set(), raising=False)
    trainer = make()
    Profiler(tmp_path, updates=range(1, 3)).attach(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run(DATA, max_epochs=1)


def test_a_trace_has_the_sections_of_the_chosen_updates(tmp_path: Path) -> None:
    """Around the operations of torch, with those of a StepTimer, and no others."""
    timer, profiler = StepTimer(), Profiler(tmp_path / "run/traces", updates=range(3, 5))

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        with timer.section("mine"):
            return cuts.forward(model, micro_batch)

    trainer = make(forward)
    timer.attach(trainer)
    profiler.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    (trace,) = (tmp_path / "run/traces").iterdir()
    assert profiler.traces == [trace]
    assert trace.name == "updates-3-to-4.rank-0.trace.json.gz"
    found = names(trace)
    found = found[found.index("update 4") :]
    assert of_updates(trace) == ["update 3", "update 4"]
    shown = [name for name in found if name in ("data", "backward", "reduction", "optimizer", "mine", "update 4")]
    assert shown == ["update 4", "data", "mine", "backward", "reduction", "optimizer"]
    assert found.index("data") < found.index("aten::addmm") < found.index("optimizer")
    assert trainer.sections.open_range is None
    assert not [name for name in names(trace) if name.startswith("ProfilerStep")], "torch counts from 0"


def test_a_range_ends_where_the_next_one_begins(tmp_path: Path) -> None:
    """Those of the updates, and those of the sections inside each of them."""
    profiler, trainer = Profiler(tmp_path, updates=range(2, 5)), make()
    profiler.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    events = events_in(profiler.traces[0])
    for shown in (("update 2", "update 3", "update 4"), ("data", "forward", "backward", "reduction", "optimizer")):
        ranges = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] in shown]
        assert len(ranges) >= 3
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))


@pytest.mark.parametrize("warm_up", [0, 1, 2])
def test_it_warms_up_in_the_updates_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_up: int) -> None:
    """As many as asked for, and other listeners of the sections are not disturbed when it has ended."""
    trainer, begins, heard = make(), list[int](), set[int]()
    start = torch.profiler.profile.start
    monkeypatch.setattr(torch.profiler.profile, "start", lambda self: (begins.append(trainer.state.iteration + 1), start(self)))
    Profiler(tmp_path, updates=range(4, 5), warm_up=warm_up).attach(trainer)
    trainer.sections.listeners.append(lambda _before, section: heard.add(trainer.state.iteration))
    trainer.run(DATA, max_epochs=1)
    assert begins == [4 - warm_up]
    assert 6 in heard


@pytest.mark.parametrize(("fails_in", "expected"), [(2, []), (3, ["update 3"]), (4, ["update 3", "update 4"])])
def test_an_exception_closes_it(tmp_path: Path, fails_in: int, expected: list[str]) -> None:
    """What was recorded is written, once; nothing if it was still warming up; and the next run can profile."""

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        if trainer.state.iteration == fails_in:
            raise RuntimeError("broken")
        return cuts.forward(model, micro_batch)

    trainer = make(forward)
    Profiler(tmp_path / "traces", updates=range(3, 6)).attach(trainer)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.run(DATA, max_epochs=1)
    traces = [*tmp_path.glob("traces/*")]
    assert len(traces) == bool(expected)
    assert [name for trace in traces for name in of_updates(trace)] == expected
    with torch.profiler.profile():  # refused while another one runs
        pass


def test_a_run_that_begins_among_the_updates_profiles_the_rest(tmp_path: Path) -> None:
    """As a resumed one does; and a limit inside them ends the trace."""
    trainer = make()
    profiler = Profiler(tmp_path, updates=range(4, 9), warm_up=0)
    trainer.run(DATA, max_iters=4)
    profiler.attach(trainer)
    trainer.run(DATA, max_iters=6)
    trainer.run(DATA, max_iters=12)
    assert [path.name for path in profiler.traces] == [
        "updates-5-to-6.rank-0.trace.json.gz",
        "updates-7-to-8.rank-0.trace.json.gz",
    ]
    assert of_updates(profiler.traces[0]) == ["update 5", "update 6"]


def test_the_first_update_can_be_profiled(tmp_path: Path) -> None:
    """There is none before it to warm up in."""
    trainer, profiler = make(), Profiler(tmp_path, updates=range(1, 2))
    profiler.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert of_updates(profiler.traces[0]) == ["update 1"]


def test_a_full_disk_costs_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """And not the run; the part that was written is removed, so that a disk that stays full does not collect them."""

    def fail(_: Any, path: str) -> None:
        Path(path).write_bytes(b"a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fail)
    trainer, profiler = make(), Profiler(tmp_path, updates=range(2, 3))
    profiler.attach(trainer)
    assert trainer.run(DATA, max_epochs=1).iteration == 6
    assert profiler.traces == []
    assert [*tmp_path.iterdir()] == []
    assert len([line for line in caplog.messages if "could not be written" in line]) == 1


def of_a_rank(directory: Path) -> list[str]:
    trainer, profiler = make(options=UpdateOptions(reduction="explicit")), Profiler(directory, updates=range(3, 4), ranks=(1,))
    profiler.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda: None)
    trainer.run(DATA, max_epochs=1)
    return [path.name for path in profiler.traces]


@pytest.mark.slow
def test_only_the_chosen_ranks_are_profiled(tmp_path: Path) -> None:
    """Here the second of two."""
    assert run_ranks(of_a_rank, tmp_path) == [[], ["updates-3-to-3.rank-1.trace.json.gz"]]
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": range(0)}, "updates must be"),
        ({"updates": range(3)}, "updates must be"),
        ({"updates": range(1, 9, 2)}, "updates must be"),
        ({"updates": (3, 4)}, "updates must be a range"),
        ({"directory": 3}, "directory must be"),
        ({"directory": __file__}, "directory must be a directory"),
        ({"schedule": None}, "options must not have 'schedule'"),
        ({"with_stak": True}, "options must be those of torch.profiler.profile, got 'with_stak'; did you mean 'with_stack'"),
        ({"ranks": 0}, r"ranks must be a sequence of ranks, got 0 of type int; pass \(0,\)"),
        ({"warm_up": -1}, "warm_up must be at least 0, got -1"),
    ],
    ids=["empty", "zero", "gaps", "tuple", "directory", "file", "schedule", "option", "rank", "warm-up"],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    """One line says which."""
    with pytest.raises((TypeError, ValueError), match=message):
        Profiler(**{"directory": "traces", **options})
