"""The handler Checkpoint and its command: when it saves, what stays, what it resumes from, and what it says."""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import os
import pickle
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ignite.distributed as idist
import numpy as np
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from ignite.utils import manual_seed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    SequentialLR,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_train import (
    CheckpointError,
    ResumableLoader,
    Trainer,
    TrainEvents,
    WarmUpSchedule,
    attach_defaults,
    attach_metric,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint import average_checkpoints, latest, load_weights, read_checkpoint
from ignite_train.checkpoint.directory import CheckpointDirectory
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.read_checkpoint import find
from ignite_train.handlers import (
    Checkpoint,
    Csv,
    HangWatch,
    JsonLines,
    LearningRateSchedule,
    Profiler,
    TensorBoard,
    TrainingMetrics,
    Validation,
)
from ignite_train.plot import read_curves
from ignite_train.tools.checkpoint_command import checkpoint_command as main
from log_messages import messages_from_here
from processes import DEADLINE_SECONDS
from ranks import run_ranks
from small_checkpoints import taken_apart
from update_options import with_options

X = torch.linspace(-1, 1, 24).reshape(12, 2)
LOADER = [(X[i : i + 2], X[i : i + 2].sum(1, keepdim=True)) for i in range(0, 12, 2)]  # six micro-batches


class InjectedError(Exception):
    """Raised by a test on purpose."""


class Remembers:
    """Any object with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state

    def __call__(self) -> None:
        """So that it can be a handler."""


def forward(model: nn.Module, micro_batch: Any) -> Tensor:
    x, y = micro_batch
    return ((model(x) - y) ** 2).mean()


def make(
    model: nn.Module | None = None, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> tuple[Trainer, nn.Module]:
    """A trainer and its model, always with the same weights."""
    if model is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Linear(2, 1)
    return create_trainer(model, optimizer(model.parameters(), lr=0.05), forward, **with_options(**options)), model


def names(directory: Path) -> list[str]:
    """The checkpoints as their updates; of those that were taken twice in one update the later one stays."""
    updates = [path.name.removeprefix("update-").lstrip("0").partition(".")[0] for path in directory.glob("update-*")]
    return sorted(updates, key=int)


def saves(directory: Path, *, epochs: int = 2, **options: Any) -> list[str]:
    """Trains six updates an epoch, and gives the checkpoints that are left."""
    trainer, _ = make()
    Checkpoint(directory, **options).attach(trainer)
    trainer.run(LOADER, max_epochs=epochs)
    return names(directory)


def logged(caplog: Any, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


# --- paths ---


def test_a_path_may_begin_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each argument that is a path expands `~`, and refuses what is no path before anything is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    trainer, model = make()
    Checkpoint("~/run").attach(trainer)
    attach_defaults(trainer, directory="~/logs", leave_out=("progress",))
    trainer.run(LOADER, max_epochs=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "run"]
    assert Profiler("~/traces", updates=range(1, 2)).directory == tmp_path / "traces"
    assert [found.path.parent for found in find("~/run")] == [tmp_path / "run"]
    load_weights(model, "~/run")
    average_checkpoints([f"~/run/{find('~/run')[0].path.name}"])
    assert read_curves("~/logs/metrics.jsonl")
    newest = f"~/run/{find('~/run')[0].path.name}"
    assert read_checkpoint(newest).path == latest("~/run") == Path(newest).expanduser()
    assert Csv("~/logs/a.csv").path == JsonLines("~/logs/a.csv").path == tmp_path / "logs" / "a.csv"
    assert TensorBoard("~/board").log_dir == tmp_path / "board"
    assert HangWatch(heartbeat="~/beat").heartbeat == tmp_path / "beat"
    again, _ = make()
    again.run(LOADER, max_epochs=1)
    Checkpoint("other").attach(again)
    number: Any = 7
    mistakes: list[Callable[[], Any]] = [
        *(lambda: Checkpoint(number), lambda: JsonLines(number), lambda: TensorBoard(number), lambda: find(number)),
        lambda: Profiler(number, updates=range(1, 2)),
        lambda: attach_defaults(again, directory=number),
        lambda: again.run(LOADER, resume=number),
    ]
    for mistake in mistakes:
        with pytest.raises(TypeError, match=r"(must be|or) a path, got"):
            mistake()
    with pytest.raises(ValueError, match="directory must not begin with an unknown '~', got '~nobody-of-this-name/x'"):
        Checkpoint("~nobody-of-this-name/x")


# --- what cannot be held ---


class OfTorchmetrics(nn.Module):
    """A metric as torchmetrics' are: a module whose states are not in its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("correct", torch.zeros(1), persistent=False)


def test_an_object_with_an_empty_state_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, before the first batch for a module; what fills later is not one of them."""
    trainer, _ = make()
    fills, empty = Remembers({}), Remembers({})
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: fills.state.update(n=1))
    Checkpoint(tmp_path, every=1, to_save={"acc": OfTorchmetrics(), "fills": fills, "empty": empty}).attach(trainer)
    said: list[int] = []
    trainer.add_event_handler(Events.ITERATION_STARTED(once=1), lambda: said.append("acc" in caplog.text))
    trainer.run(LOADER, max_epochs=1)
    lines = [line for line in logged(caplog) if "empty state_dict" in line]
    assert [line.partition(" ")[0] for line in lines] == ["to_save['acc']", "to_save['empty']"]
    assert "metric.persistent(True)" in lines[0]
    assert said == [True]


def test_a_link_to_nothing_among_the_checkpoints_does_not_stop_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is set aside, as any other damaged one, and the run resumes from the one before."""
    saves(tmp_path)
    (tmp_path / "update-00000099").symlink_to(tmp_path / "nowhere")
    trainer, _ = make()
    Checkpoint(tmp_path).attach(trainer)
    state = trainer.run(LOADER, max_epochs=3)
    assert state.iteration == 18
    assert "update-00000099 is damaged: it is a link" in caplog.text
    assert "18" in names(tmp_path)


# --- when ---


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": 99}, ["6", "12"]),
        ({"keep": 99, "every": 4}, ["4", "8", "12"]),
        ({"keep": 99, "every_epochs": 2}, ["12"]),
        ({"keep": 99, "every": 5, "every_epochs": 1}, ["5", "6", "10", "12"]),
        ({"keep": 99, "every": 100}, ["12"]),
        ({"keep": 2, "every": 1}, ["11", "12"]),
        ({"keep": 1, "every": 1, "keep_every": 5}, ["5", "10", "12"]),
        ({"keep": 1, "every": 1, "asynchronous": False}, ["12"]),
    ],
    ids=str,
)
def test_cadences(options: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    """Of two epochs of six updates; the end of the run is always saved, and the newest stay."""
    assert saves(tmp_path, **options) == expected


def test_every_seconds_by_the_clock(tmp_path: Path, monkeypatch: Any) -> None:
    """A clock that advances by 10 seconds an update: 25 seconds have passed at every third."""
    clock = [100.0]
    monkeypatch.setattr("ignite_train.checkpoint.cadence.time.monotonic", lambda: clock[0])
    trainer, _ = make()
    checkpoint = Checkpoint(tmp_path, every_seconds=25, keep=99)
    checkpoint.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: clock.__setitem__(0, clock[0] + 10))
    trainer.run(LOADER, max_epochs=2)
    assert names(tmp_path) == ["3", "6", "9", "12"]


def test_by_hand(tmp_path: Path) -> None:
    """Asked for anywhere in an update, it is taken at its end, after everything else there; between runs at once."""
    trainer, _ = make(accumulation_steps=2)
    checkpoint = Checkpoint(tmp_path, every=100, keep=99)
    checkpoint.attach(trainer)
    trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED(once=3), checkpoint.save)  # in the first half of update 2
    seen = trainer_log = Remembers([])
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.state.append(engine.state.iteration))
    trainer.add_event_handler(Events.STARTED, trainer_log)
    trainer.run(LOADER, max_iters=3)
    assert names(tmp_path) == ["2", "3"]
    checkpoint.save()
    assert [path.name for path in tmp_path.glob("*3*")] == ["update-00000003.1"]  # it took the place of the one before
    fresh, _ = make(accumulation_steps=2)
    again = Remembers([])
    Checkpoint(tmp_path / "new").attach(fresh)
    fresh.add_event_handler(Events.STARTED, again)
    fresh.run(LOADER, max_iters=4, resume=tmp_path / "update-00000002")
    assert again.state == [1, 2]  # the handler that ran after the request is in it


def test_by_hand_before_the_first_run(tmp_path: Path) -> None:
    """Another process, with other weights, then trains as the one that has saved."""
    trained = []
    for seed in (3, 4):
        torch.manual_seed(seed)
        trainer, model = make(nn.Linear(2, 1))
        checkpoint = Checkpoint(tmp_path)
        checkpoint.attach(trainer)
        if not trained:
            checkpoint.save()
        trainer.run(LOADER, max_iters=2, resume="auto" if not trained else tmp_path / "update-00000000")
        trained.append(model.weight.tolist())
    assert trained[0] == trained[1]


def test_by_hand_between_runs_it_is_on_the_disk_at_once(tmp_path: Path) -> None:
    """The process may end next, and its threads with it: none is left that has something to write."""
    trainer, model = make()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    trainer.run(LOADER, max_iters=2)
    with torch.no_grad():
        model.weight.zero_()
    checkpoint.save()
    assert not any(thread.name == "Checkpoint" for thread in threading.enumerate())
    restored = make()[1]
    load_weights(restored, tmp_path)
    assert not restored.weight.any()


def test_by_hand_when_a_run_has_broken_off_it_is_on_the_disk_at_once(tmp_path: Path) -> None:
    """In a function of `on_exit`, where the directory is still held and no thread of a save is waited for any more."""
    trainer, _ = make()
    checkpoint = Checkpoint(tmp_path, every=100)
    checkpoint.attach(trainer)

    def fail(trainer: Trainer) -> None:
        if trainer.state.iteration == 3:
            raise InjectedError

    def save() -> None:
        checkpoint.save()
        found.extend(names(tmp_path))

    found = list[str]()
    trainer.append_event_handler(Events.ITERATION_COMPLETED, fail)
    trainer.on_exit.append(save)
    with pytest.raises(InjectedError):
        trainer.run(LOADER, max_epochs=1)

    assert found == ["3"]


def test_the_end_is_saved_though_an_earlier_run_came_as_far(tmp_path: Path) -> None:
    """A trainer that goes back to an earlier checkpoint and then trains with another rate ends with other weights."""
    trainer, model = make()
    Checkpoint(tmp_path, every=100, keep=9).attach(trainer)
    trainer.run(LOADER, max_iters=2)
    trainer.run(LOADER, max_iters=4)
    optimizer: Any = trainer.optimizers["optimizer"]
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: optimizer.param_groups[0].update(lr=0.5))
    trainer.run(LOADER, max_iters=4, resume=tmp_path / "update-00000002")
    assert [path.name for path in sorted(tmp_path.glob("update-*"))] == ["update-00000002", "update-00000004.1"]
    fresh, resumed = make()
    Checkpoint(tmp_path).attach(fresh)
    fresh.run(LOADER, max_iters=4)
    assert torch.equal(resumed.weight, model.weight)  # type: ignore[arg-type]


def test_a_handler_attached_later_still_runs_before_it(tmp_path: Path) -> None:
    """Also one that wants to be first, as TrainingMetrics does: the checkpoint holds what it did in that update."""
    trainer, _ = make()
    checkpoint = Checkpoint(tmp_path, every=1)
    checkpoint.attach(trainer)
    order: list[str] = []
    commit = checkpoint.saver.save
    checkpoint.saver.save = lambda *parts, **is_last: (order.append("save"), commit(*parts, **is_last))[1]  # type: ignore[method-assign]
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: order.append("later"))
    trainer.prepend_event_handler(Events.ITERATION_COMPLETED, lambda: order.append("first"))
    metrics = TrainingMetrics()
    metrics.attach(trainer, Events.ITERATION_COMPLETED)
    trainer.run(LOADER, max_iters=2)
    assert order[:6] == ["first", "later", "save"] * 2


# --- which stay ---


def scored(directory: Path, scores: list[float], **options: Any) -> list[str]:
    """Validates after each epoch of one update, with these scores."""
    trainer, model = make()
    evaluator = create_evaluator(model, forward)
    given = iter(scores)
    evaluator.add_event_handler(Events.COMPLETED, lambda engine: engine.state.metrics.update(score=next(given)))
    Checkpoint(directory, score="score", **{"mode": "min", **options}).attach(trainer, evaluator=evaluator)
    Validation(evaluator, LOADER[:1], score="score", mode=options.get("mode", "min")).attach(trainer)
    trainer.run(LOADER[:1], max_epochs=len(scores))
    return names(directory)


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        ({"keep": 1}, {"3", "6"}),
        ({"keep": 1, "mode": "max"}, {"4", "6"}),
        ({"keep": 1, "keep_best": 2}, {"3", "5", "6"}),
        ({"keep": 2, "keep_best": 1, "keep_every": 4}, {"3", "4", "5", "6"}),
    ],
    ids=["keep 1", "keep 1, highest", "keep 1, keep_best 2", "keep 2, keep_every 4"],
)
def test_the_best_stay(options: dict[str, Any], stays: set[str], tmp_path: Path) -> None:
    """Scores 5 4 1 9 2 nan: NaN is never best, and the best is kept beside the newest."""
    found = scored(tmp_path, [5.0, 4.0, 1.0, 9.0, 2.0, float("nan")], **options)
    assert {name.partition(".")[0] for name in found} == stays
    by_update = {entry.manifest.update: entry.manifest.score for entry in find(tmp_path) if entry.manifest}
    assert by_update[6] is None


def test_the_best_of_an_earlier_process_is_known(tmp_path: Path) -> None:
    """A resumed run saves for its score only what beats the best there is in the directory."""
    scored(tmp_path, [5.0, 1.0], every=100)
    trainer, model = make()
    evaluator = create_evaluator(model, forward)
    given = iter([3.0, 0.5])
    evaluator.add_event_handler(Events.COMPLETED, lambda engine: engine.state.metrics.update(score=next(given)))
    Checkpoint(tmp_path, score="score", mode="min", every=100, keep=99).attach(trainer, evaluator=evaluator)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(LOADER[:1]))
    trainer.run(LOADER[:1], max_epochs=4)
    assert names(tmp_path) == ["1", "2", "4"]


def test_a_metric_that_is_none(tmp_path: Path) -> None:
    """The error lists the metrics that there are, and the nearest."""
    trainer, model = make()
    evaluator = create_evaluator(model, forward)
    Checkpoint(tmp_path, score="los", mode="min").attach(trainer, evaluator=evaluator)
    with pytest.raises(ValueError, match=r"score must be one of the evaluator's metrics \['loss'\], got 'los'.*'loss'"):
        evaluator.run(LOADER)


# --- resuming ---


def test_what_resume_may_be(tmp_path: Path) -> None:
    """Auto trains from scratch or resumes, must insists, never refuses, and a path is a checkpoint or a directory of them."""
    trainer, _ = make()
    Checkpoint(tmp_path / "a", every=2, keep=99).attach(trainer)
    with pytest.raises(CheckpointError, match=r"a has no checkpoint, and resume='must' needs one"):
        trainer.run(LOADER, max_epochs=1, resume="must")
    trainer.run(LOADER, max_epochs=1, resume="never")
    for resume, update in (
        ("auto", 6),
        ("must", 6),
        (tmp_path / "a", 6),
        (tmp_path / "a" / "update-00000002", 2),
        (str(tmp_path / "a" / "update-00000004"), 4),
    ):
        fresh, _ = make()
        checkpoint = Checkpoint(tmp_path / ("a" if isinstance(resume, str) and len(resume) == 4 else "b"), keep=99)
        checkpoint.attach(fresh)

        def fail() -> None:
            raise InjectedError

        fresh.add_event_handler(Events.STARTED, fail)
        with pytest.raises(InjectedError):
            fresh.run(LOADER, max_iters=7, resume=resume)
        assert fresh.state.iteration == update
        assert checkpoint.latest is not None
        assert checkpoint.latest.parent == tmp_path / "a"
    fresh, _ = make()
    Checkpoint(tmp_path / "a").attach(fresh)
    with pytest.raises(ValueError, match=r"resume must not be 'never' where checkpoints are, got [0-9]+ in .*; continue with"):
        fresh.run(LOADER, max_epochs=1, resume="never")


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("atuo", "resume must be 'auto', 'must', 'never' or a directory that exists, got 'atuo'; did you mean 'auto'"),
        ("/no/such/place", "resume must be .* a directory that exists, got '/no/such/place'"),
    ],
)
def test_what_resume_may_not_be(resume: str, message: str, tmp_path: Path) -> None:
    """A misspelt word is answered with the nearest."""
    trainer, _ = make()
    Checkpoint(tmp_path).attach(trainer)
    with pytest.raises(ValueError, match=message):
        trainer.run(LOADER, max_epochs=1, resume=resume)


def test_without_a_checkpoint_there_is_nothing_to_resume() -> None:
    """A trainer alone says what is missing."""
    trainer, _ = make()
    with pytest.raises(ValueError, match="attach a Checkpoint first"):
        trainer.run(LOADER, max_epochs=1, resume="must")


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_trainer_that_has_trained_saves_beside_no_other_run(resume: str, tmp_path: Path) -> None:
    """It would not continue the checkpoints that are there, and remove them; the error says so, and nothing is taken back."""
    saves(tmp_path / "a", epochs=1)
    there = names(tmp_path / "a")
    trainer, _ = make()
    trainer.update(LOADER[:1])
    Checkpoint(tmp_path / "a").attach(trainer)
    message = r"got update-0*6\S* in .*a and a trainer at update 1; .*'must'.*in its first run"
    with pytest.raises(CheckpointError, match=message):
        trainer.run(LOADER, max_iters=9, resume=resume)
    assert trainer.state.iteration == 1
    assert names(tmp_path / "a") == there
    trainer.run(LOADER, max_iters=9, resume="must")
    trainer.run(LOADER, max_iters=10)
    assert names(tmp_path / "a")[-1] == "10"


def test_a_trainer_does_not_remove_what_another_one_has_saved_since(tmp_path: Path) -> None:
    """As in a notebook where a cell was run again: the first trainer still lives, and the second has trained further."""

    def start() -> tuple[Trainer, Checkpoint]:
        trainer, _ = make()
        saver = Checkpoint(tmp_path, every=1)
        saver.attach(trainer)
        return trainer, saver

    first, its_saver = start()
    first.run(LOADER, max_iters=2)
    second, _ = start()
    second.run(LOADER, max_iters=5)
    there = names(tmp_path)
    for call in (lambda: first.run(LOADER, max_iters=3), its_saver.save):
        with pytest.raises(CheckpointError, match=r"got update-0*5\S* in .* and a trainer at update 2; pass resume='must'"):
            call()
    assert names(tmp_path) == there
    first.run(LOADER, max_iters=6, resume="must")
    its_saver.save()
    first.run(LOADER, max_iters=7)
    assert first.state.iteration == 7


@pytest.mark.parametrize("error", [OSError(errno.EIO, "an error"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_save_that_fails_when_its_checkpoint_is_there_is_still_of_this_run(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the disk cannot tell that the new name is written down: no other trainer has made it."""
    trainer, _ = make()
    saver = Checkpoint(tmp_path, every=9)
    saver.attach(trainer)
    trainer.run(LOADER, max_iters=2)
    put_in_place = CheckpointDirectory._put_in_place

    def fail(*arguments: Any) -> None:
        put_in_place(*arguments)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointDirectory, "_put_in_place", fail)
        with pytest.raises((CheckpointError, KeyboardInterrupt)):
            saver.save()
    saver.save()
    trainer.run(LOADER, max_iters=5)
    assert trainer.state.iteration == 5


def test_a_checkpoint_is_of_this_run_before_older_ones_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow removal may be interrupted, and the next run must not take it for another trainer's."""
    trainer, _ = make()
    saver = Checkpoint(tmp_path, every=1, keep=1)
    saver.attach(trainer)
    known = list[bool]()

    def note(directory: CheckpointDirectory, *_: Any, **__: Any) -> None:
        known.append(directory.known_serial == directory.scan()[0][-1][1].serial)

    monkeypatch.setattr(CheckpointDirectory, "prune", note)
    trainer.run(LOADER, max_iters=3)
    assert known == [True] * len(known) != []


@pytest.mark.parametrize("name", ["link", "real/../real"])
def test_a_run_that_resumes_by_another_name_of_its_directory_continues(name: str, tmp_path: Path) -> None:
    """What it has read is its own, whichever way the directory is named."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for epochs in (1, 2):
        trainer, _ = make()
        saver = Checkpoint(tmp_path / name, every=1, keep=9)
        saver.attach(trainer)
        found = sorted((tmp_path / "real").glob("update-*"))
        trainer.run(LOADER, max_epochs=1, resume=found[-1] if found else "auto")
        saver.save()
        trainer.run(LOADER, max_epochs=epochs)
        assert trainer.state.epoch == epochs


def test_a_directory_that_cannot_be_looked_into_is_told_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that has saved there continues, if errors are warned of."""
    trainer, _ = make()
    Checkpoint(tmp_path, every=1, keep=9, on_error="warn").attach(trainer)
    trainer.run(LOADER, max_iters=2)
    names_of, stale = Disk.names, [True]

    def look(disk: Disk, path: Any) -> list[str]:
        if stale and path == tmp_path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return names_of(disk, path)

    monkeypatch.setattr(Disk, "names", look)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), stale.clear)
    trainer.run(LOADER, max_iters=5)
    assert "training continues" in caplog.text
    assert names(tmp_path)[-1].startswith("5")


def test_a_trainer_that_goes_back_continues_from_there(tmp_path: Path) -> None:
    """The later checkpoints are its own, also in the next run, though nothing was saved in between."""
    trainer, _ = make()
    Checkpoint(tmp_path, every=2, keep=9).attach(trainer)
    trainer.run(LOADER, max_iters=4)
    trainer.run(LOADER, max_iters=2, resume=tmp_path / "update-00000002")
    assert trainer.state.iteration == 2
    trainer.run(LOADER, max_iters=5)
    assert trainer.state.iteration == 5


def test_a_trainer_that_has_trained_saves_in_a_new_directory(tmp_path: Path) -> None:
    """Updates before the first run are not taken back, and further runs find the checkpoints to be their own."""
    trainer, _ = make()
    trainer.update(LOADER[:1])
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(LOADER, max_iters=3)
    trainer.run(LOADER, max_iters=5)
    assert trainer.state.iteration == 5


@pytest.mark.parametrize("is_late", [False, True])
def test_a_run_that_was_told_to_begin_anew_is_called_again(is_late: bool, tmp_path: Path) -> None:
    """Where damaged checkpoints are, `"never"` is the way to begin, also after an update; a call after an error continues."""
    (tmp_path / "damaged-update-00000009").mkdir()
    trainer, _ = make()
    if is_late:
        trainer.update(LOADER[:1])
    Checkpoint(tmp_path, every=9).attach(trainer)

    def fail() -> None:
        raise InjectedError

    with trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), fail), pytest.raises(InjectedError):
        trainer.run(LOADER, max_iters=3, resume="never")
    trainer.run(LOADER, max_iters=3)
    assert names(tmp_path) == ["3"]


def refusal(directory: Path, trainer: Trainer, **options: Any) -> str:
    """Why a fresh trainer cannot resume there; its weights have not changed."""
    model = trainer.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    Checkpoint(directory, **options).attach(trainer)
    with pytest.raises(CheckpointError) as error:
        trainer.run(LOADER, max_epochs=9)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert trainer.state.iteration == 0
    return str(error.value)


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    """The first keys or shapes that differ are named, and nothing is changed."""
    saves(tmp_path, epochs=1)
    message = refusal(tmp_path, make(nn.Linear(3, 1))[0])
    assert "model: weight is float32 of shape (1, 2), and this run has float32 of shape (1, 3); build the model that" in message
    message = refusal(tmp_path, make(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))))[0])
    assert "0.weight is missing; 0.bias is missing; 1.weight is missing; and 5 more; build" in message
    message = refusal(tmp_path, make(nn.Sequential(nn.Linear(2, 1)))[0])
    assert "0.weight is missing; 0.bias is missing; weight is not in this run; and 1 more; build" in message
    message = refusal(tmp_path, make(nn.Sequential(nn.Linear(2, 1, bias=False)))[0])
    assert "0.weight is missing; weight is not in this run; bias is not in this run; build" in message
    assert "is of another optimizer: AdamW wrote it, and this run has SGD" in refusal(
        tmp_path, make(optimizer=torch.optim.SGD)[0]
    )

    def grouped(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [parameter]} for parameter in parameters], lr=lr)

    assert "its parameter groups have [2] parameters and not [1, 1]" in refusal(tmp_path, make(optimizer=grouped)[0])
    assert "holds no state of 'to_save/ema'" in refusal(tmp_path, make()[0], to_save={"ema": nn.Linear(1, 1)})


def test_what_changed_is_listed(tmp_path: Path, caplog: Any) -> None:
    """Of the configuration, of how the trainer was made, and of the handlers: one line, as a warning."""
    trainer, _ = make()
    trainer.add_event_handler(Events.STARTED, Remembers(1))
    Checkpoint(tmp_path, config={"lr": 0.1, "data": {"name": "a", "path": Path("x")}, "seed": 1}).attach(trainer)
    trainer.run(LOADER, max_epochs=1)
    trainer, _ = make(max_grad_norm=1.0)
    TrainingMetrics().attach(trainer)
    Checkpoint(tmp_path, config={"lr": 0.2, "data": {"name": "a", "path": Path("x")}, "steps": 3}).attach(trainer)
    caplog.clear()
    trainer.run(LOADER, max_epochs=2)
    (line,) = [line for line in logged(caplog) if "resuming from" in line]
    for part in ("update 6", "config.lr: 0.1 -> 0.2", "config.seed: 1 -> nothing", "config.steps: nothing -> 3"):
        assert part in line
    assert "trainer.max_grad_norm: None -> 1.0" in line
    assert "starts from the beginning, because the checkpoint has no state for it: handlers/TrainingMetrics" in line
    assert "in the checkpoint and not used, because it is not attached or is left out: handlers/Remembers" in line
    assert "data" not in line


class Numbered:
    """An object whose text holds where it is in memory, as that of functions does; in a set, its place there."""

    def __init__(self, number: int, place: int) -> None:
        self.number, self.place = number, place

    def __hash__(self) -> int:
        return self.place

    def __repr__(self) -> str:
        return f"<Numbered {self.number} at 0x7f{id(self):x}>"


def test_the_same_configuration_has_not_changed(tmp_path: Path, caplog: Any) -> None:
    """Sets have another order in each process, and objects other addresses; what they are is compared."""

    def run(epochs: int, places: list[int]) -> list[str]:
        trainer, _ = make()
        found = {Numbered(number, place) for number, place in enumerate(places)}
        config = {"tags": found, "parts": [frozenset(found)], "loss": Numbered(7, 0)}
        Checkpoint(tmp_path, config=config).attach(trainer)
        caplog.clear()
        trainer.run(LOADER, max_epochs=epochs)
        return [line for line in logged(caplog) if "resuming from" in line]

    assert run(1, [1, 2, 3]) == run(2, [3, 2, 1]) == []
    (line,) = run(3, [1, 2])
    assert line.count("->") == 2
    assert "config.tags: ['<Numbered 0>', '<Numbered 1>', '<Numbered 2>'] -> ['<Numbered 0>', '<Numbered 1>']" in line


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        ({"seed": 3}, {"seed": 4}, "trainer.seed: 3 -> 4"),
        ({}, {"seed": 4}, "trainer.seed: nothing -> 4"),
        ({"accumulation_steps": 2}, {"accumulation_steps": [1, 2]}, "trainer.accumulation_steps: 2 -> [1, 2]"),
        ({"precision": "bf16"}, {}, "trainer.precision: 'bf16' -> 'fp32'"),
        ({"max_grad_norm": 1.0}, {"max_grad_norm": 0.5}, "trainer.max_grad_norm: 1.0 -> 0.5"),
    ],
    ids=["seed", "seed that is new", "accumulation", "precision", "clipping"],
)
def test_what_changed_of_the_trainer_is_listed(before: Any, now: Any, change: str, tmp_path: Path, caplog: Any) -> None:
    """What it was made with, and nothing else of it."""
    for epochs, arguments in enumerate((before, now), start=1):
        trainer, _ = make(**arguments)
        Checkpoint(tmp_path).attach(trainer)
        trainer.run(LOADER, max_epochs=epochs)
    (line,) = [line for line in logged(caplog) if "resuming from" in line]
    assert line.count("trainer.") == 1
    assert change in line


def test_nothing_changed_is_no_warning(tmp_path: Path, caplog: Any) -> None:
    """That a run resumes is logged, at info."""
    saves(tmp_path, epochs=1)
    with caplog.at_level(logging.INFO):
        saves(tmp_path, epochs=2)
    assert not any("resuming" in line for line in logged(caplog))
    assert any("resuming from" in line and "update 6" in line for line in logged(caplog, logging.INFO))


def test_a_finished_run_does_nothing_until_the_limit_is_raised(tmp_path: Path, caplog: Any) -> None:
    """A lower limit is an error with both numbers."""
    saves(tmp_path, epochs=2)
    trainer, _ = make()
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(LOADER, max_epochs=2)
    assert any("nothing to do: epoch 2 and update 12 are done" in line for line in logged(caplog))
    with pytest.raises(ValueError, match="max_epochs must not be below the 2 epochs already begun, got 1"):
        trainer.run(LOADER, max_epochs=1)
    trainer.run(LOADER, max_epochs=3)
    assert trainer.state.iteration == 18


def test_what_the_script_changes_after_a_finished_run_is_kept(tmp_path: Path) -> None:
    """Also where the run was finished by an earlier process, so that this one has restored it and done nothing."""
    ended = []
    for name, process in (("first", 1), ("second", 1), ("second", 2)):
        trainer, model = make()
        Checkpoint(tmp_path / name).attach(trainer)
        trainer.run(LOADER, max_epochs=1)
        if (name, process) == ("second", 1):
            continue
        with torch.no_grad():
            model.weight.zero_()  # type: ignore[operator, union-attr]
        trainer.run(LOADER, max_epochs=2)
        ended.append(model.weight.tolist())  # type: ignore[operator, union-attr]
    assert ended[0] == ended[1]


def test_stopped_before_its_epoch_is_continued_a_run_saves_what_it_restored(tmp_path: Path) -> None:
    """What handlers of STARTED draw in a run that another one of them ends at once is not in its checkpoint."""

    def run(directory: Path, limits: list[int]) -> Any:
        for number, limit in enumerate(limits):
            torch.manual_seed(number)
            trainer, model = make(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1)))
            torch.nn.init.ones_(model[1].weight)
            torch.nn.init.ones_(model[1].bias)
            Checkpoint(directory).attach(trainer)
            trainer.add_event_handler(Events.STARTED, lambda: torch.rand(3))
            if limit == 0:
                trainer.add_event_handler(Events.STARTED, trainer.terminate)
            trainer.run(LOADER, max_iters=limit or 5)
        return {**model.state_dict(), "generator": torch.get_rng_state()}

    whole = run(tmp_path / "whole", [5])
    parts = run(tmp_path / "parts", [2, 0, 5])
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


@pytest.mark.slow
def test_saved_and_loaded_again_and_again(tmp_path: Path, bits: Any) -> None:
    """In one process: going back to the same checkpoint gives the same run each time, and saves continue to work."""
    trainer, model = make()
    Checkpoint(tmp_path, every=1, keep=99).attach(trainer)
    trainer.run(LOADER, max_epochs=2)
    expected = bits(model.state_dict())
    middle = tmp_path / "update-00000004"
    for _ in range(3):
        trainer.run(LOADER, max_epochs=2, resume=middle)
        assert trainer.state.iteration == 12
        assert bits(model.state_dict()) == expected
    fresh, other = make(nn.Linear(2, 1))
    Checkpoint(tmp_path).attach(fresh)
    fresh.run(LOADER, max_epochs=2)
    assert bits(other.state_dict()) == expected


def test_a_directory_that_all_can_write_to(tmp_path: Path, caplog: Any) -> None:
    """Is warned about: what is loaded could be replaced by anybody."""
    directory = tmp_path / "open"
    saves(directory, epochs=1)
    caplog.clear()
    saves(directory, epochs=2)
    assert not any("chmod" in line for line in logged(caplog))
    directory.chmod(0o777)
    saves(directory, epochs=3)
    assert any(
        f"every user of this machine can write to {directory}" in line and "chmod o-w" in line for line in logged(caplog)
    )


def test_a_directory_that_all_can_write_to_is_warned_about_before_anything_is_removed(tmp_path: Path, caplog: Any) -> None:
    """What is removed there may have been put there by a stranger."""
    directory = tmp_path / "open"
    saves(directory, epochs=1)
    (directory / ".unfinished-left").mkdir()
    directory.chmod(0o777)
    warned: list[bool] = []
    trainer, _ = make()
    checkpoint = Checkpoint(directory)
    checkpoint.attach(trainer)
    remove = checkpoint.saver.directory.disk.remove_tree

    def noted(path: Path) -> None:
        warned.append("chmod o-w" in caplog.text)
        remove(path)

    checkpoint.saver.directory.disk.remove_tree = noted  # type: ignore[method-assign]
    trainer.run(LOADER, max_epochs=2)
    assert warned
    assert all(warned)


# --- what is in it ---


def test_what_cannot_be_stored_names_its_place(tmp_path: Path) -> None:
    """Found before the first update, with the path that leads to it; no half checkpoint is left."""
    trainer, _ = make()
    Checkpoint(tmp_path, to_save={"own": Remembers({"a": [1, {"lock": threading.Lock()}]})}).attach(trainer)
    with pytest.raises(CheckpointError, match=r"to_save/own\['a'\]\[1\]\['lock'\] cannot be stored: .*lock"):
        trainer.run(LOADER, max_epochs=1)
    assert trainer.state.iteration == 0
    assert [*tmp_path.iterdir()] == []


def test_a_config_that_cannot_be_stored_is_found_before_the_first_update(tmp_path: Path) -> None:
    """It stands in the manifest, which is written last."""
    deep: dict[str, Any] = {}
    for _ in range(99):
        deep = {"inner": deep}
    trainer, _ = make()
    Checkpoint(tmp_path, config=deep).attach(trainer)
    with pytest.raises(CheckpointError, match=r"config.* cannot be stored: it is nested deeper than 64"):
        trainer.run(LOADER, max_epochs=1)
    assert trainer.state.iteration == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: SequentialLR(o, [ConstantLR(o, 0.5, 3), ExponentialLR(o, 0.9)], milestones=[4]),
        lambda o: ChainedScheduler([ConstantLR(o, 0.5, 3), ExponentialLR(o, 0.9)], o),
        lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: SequentialLR(o, [ConstantLR(o, 0.5, 3), MultiStepLR(o, [2, 4], 0.1)], milestones=[3]),
        lambda o: ChainedScheduler([SequentialLR(o, [ConstantLR(o, 0.5, 3), MultiStepLR(o, [1, 1, 2])], [6])], o),
    ],
    ids=["sequential", "chained", "lambda", "milestones", "milestones within both"],
)
@pytest.mark.parametrize("owner", ["handler", "to_save"])
def test_schedules_with_nested_state(owner: str, schedule: Any, tmp_path: Path) -> None:
    """The learning rates continue as in a run that was not interrupted, whether a handler steps them or the script does."""

    def run(directory: Path | None, limits: list[int]) -> list[Any]:
        rates: list[Any] = []
        for limit in limits:
            trainer, _ = make()
            made = schedule(trainer.optimizers["optimizer"])
            if owner == "handler":
                LearningRateSchedule(made).attach(trainer)
            else:
                trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda _, made=made: made.step())
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED, lambda engine: rates.append(engine.state.output.learning_rates)
            )
            if directory is not None:
                Checkpoint(directory, to_save={} if owner == "handler" else {"schedule": made}).attach(trainer)
            trainer.run(LOADER, max_iters=limit)
        return rates

    assert run(tmp_path, [2, 5, 9]) == run(None, [9])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: CosineAnnealingLR(o, 9),
        lambda o: CosineAnnealingWarmRestarts(o, 4),
        lambda o: SequentialLR(o, [LinearLR(o, 0.5, 1.0, 3), CosineAnnealingLR(o, 9)], milestones=[3]),
        lambda o: WarmUpSchedule(o, "cosine", warm_up=2, total=9),
    ],
    ids=["lambda", "cosine", "restarts", "sequence", "warm-up"],
)
def test_a_schedule_of_a_rate_that_is_a_tensor_continues(schedule: Any, tmp_path: Path) -> None:
    """Tensors stand in lists of the state too: base rates, and the betas of the optimizer. The end of the schedule is saved."""

    def adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
        betas = (torch.tensor(0.9), torch.tensor(0.99))
        return torch.optim.Adam(parameters, lr=torch.tensor(lr), betas=betas, foreach=False)

    def run(directory: Path, limits: list[int]) -> list[Any]:
        rates: list[Any] = []
        for limit in limits:
            trainer, _ = make(optimizer=adam)
            LearningRateSchedule(schedule(trainer.optimizers["optimizer"])).attach(trainer)
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED, lambda engine: rates.append(engine.state.output.learning_rates)
            )
            Checkpoint(directory, every=1).attach(trainer)
            trainer.run(LOADER, max_iters=limit)
        return rates

    assert run(tmp_path / "resumed", [2, 5, 9, 9]) == run(tmp_path / "whole", [9])


@pytest.mark.parametrize("stop", [2, 4], ids=["within an epoch", "at its end"])
def test_the_extra_state_of_a_module_is_put_back_whole(stop: int, tmp_path: Path) -> None:
    """An evaluation in STARTED appends to the list that the module was given; a resumed run has as many entries."""

    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(len(self.seen))
            return super().forward(x)

        def get_extra_state(self) -> Any:
            return {"seen": list(self.seen)}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    def run(directory: Path, limits: list[int]) -> list[int]:
        for limit in limits:
            trainer, model = make(Counting())
            evaluator = create_evaluator(model, forward)
            Checkpoint(directory).attach(trainer)
            if len(limits) == 1 or limit > limits[0]:
                trainer.add_event_handler(Events.STARTED, lambda: evaluator.run(LOADER[:1]))  # noqa: B023
            trainer.run(LOADER[:4], max_iters=limit)
        return model.seen

    once = run(tmp_path / "whole", [6])
    assert len(once) == 7
    assert run(tmp_path / "parts", [stop, 6]) == once[:6]  # restored after STARTED, as the random generators are


def test_own_objects_and_user_keys(tmp_path: Path) -> None:
    """Whatever handlers of STARTED and EPOCH_STARTED do to them on resuming, they are as they were saved."""
    state: dict[str, Any] = {"counts": Counter(a=2), "nested": [(1, 2.5), {3, 4}, None], "tensor": torch.arange(3), 7: b"x"}

    def build(values: Any) -> tuple[Trainer, Remembers]:
        trainer, _ = make()
        trainer.state_dict_user_keys.append("alpha")
        entry = Remembers(values)
        Checkpoint(tmp_path, every=2, to_save={"mine": entry}).attach(trainer)

        def reset(engine: Trainer) -> None:
            engine.state.alpha = 0
            engine.state.metrics["kept"] = 0
            if isinstance(entry.state, dict) and "nested" in entry.state:
                entry.state["nested"].append("spoilt")

        trainer.add_event_handler(Events.STARTED | Events.EPOCH_STARTED, reset)
        return trainer, entry

    def count(engine: Trainer) -> None:
        engine.state.alpha += 1
        engine.state.metrics["kept"] += 1

    trainer, entry = build(state)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, count)
    trainer.run(LOADER, max_iters=4)
    expected = [*state["nested"]]
    trainer, entry = build({})
    trainer.add_event_handler(Events.ITERATION_COMPLETED, count)
    trainer.run(LOADER, max_iters=5)
    assert trainer.state.alpha == 5
    assert trainer.state.metrics["kept"] == 5
    assert entry.state["nested"] == expected
    assert entry.state["counts"] == {"a": 2}
    assert torch.equal(entry.state["tensor"], torch.arange(3))
    assert entry.state[7] == b"x"


@pytest.mark.parametrize("key", ["iteration", "update", "ended"])
def test_a_user_key_must_not_hide_another(key: str) -> None:
    """Or else the trainer's own would be lost."""
    trainer, _ = make()
    trainer.state_dict_user_keys.append(key)
    with pytest.raises(ValueError, match=f"state_dict_user_keys must not have names of the trainer's own, got '{key}'"):
        trainer.state_dict()


@pytest.mark.parametrize(("name", "error"), [("a['x']", ValueError), (1, ValueError)])
def test_names_that_could_meet(name: Any, error: type[Exception], tmp_path: Path) -> None:
    """A name is part of the names of tensors."""
    with pytest.raises(error, match="to_save must have strings without"):
        Checkpoint(tmp_path, to_save={name: Remembers()})


def test_what_has_no_state_cannot_be_saved(tmp_path: Path) -> None:
    """The error names it."""
    with pytest.raises(TypeError, match=r"to_save\['x'\] must have state_dict and load_state_dict"):
        Checkpoint(tmp_path, to_save={"x": 3})


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    """Two names of one parameter: its numbers are in the file once, and the resumed model is as the other was."""

    def slow(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr / 100)

    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 256), nn.Linear(256, 256), nn.Linear(256, 256), nn.Linear(256, 1))
        model[2].weight = model[1].weight
        with torch.no_grad():  # so small that no draw of them diverges
            for parameter in model.parameters():
                parameter.mul_(0.1)
        return model

    trainer, model = make(tied(), optimizer=slow)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    trainer.run(LOADER, max_epochs=1)
    assert checkpoint.latest is not None
    assert (checkpoint.latest / "rank-00000.safetensors").stat().st_size < 1.5 * 4 * 256 * 256
    fresh, other = make(tied(), optimizer=slow)
    Checkpoint(tmp_path).attach(fresh)
    fresh.run(LOADER, max_epochs=1)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    assert other[2].weight is other[1].weight


def test_weights_that_were_not_tied_are_not_loaded_into_tied_ones(tmp_path: Path) -> None:
    """Frozen, so that no optimizer tells the difference; the last of the two names would win. The other way nothing is lost."""

    def build(*, tied: bool) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        if tied:
            model[1].weight = model[0].weight
        model[:2].requires_grad_(False)
        return model

    def run(directory: Path, updates: int, *, tied: bool) -> Any:
        model = build(tied=tied)
        trainer = create_trainer(model, torch.optim.SGD(model[2].parameters(), lr=0.01), forward)
        Checkpoint(directory).attach(trainer)
        trainer.run(LOADER, max_iters=updates)
        return model

    run(tmp_path / "untied", 2, tied=False)
    with pytest.raises(CheckpointError, match=r"'0.weight' and '1.weight' are one tensor in this run, and differ there"):
        run(tmp_path / "untied", 4, tied=True)
    model: Any = build(tied=True)
    before = model[0].weight.clone()
    with pytest.raises(CheckpointError, match="are one tensor in this run"):
        load_weights(model, tmp_path / "untied")
    assert torch.equal(model[0].weight, before)
    expected = run(tmp_path / "tied", 2, tied=True)[0].weight
    assert torch.equal(run(tmp_path / "tied", 4, tied=False)[1].weight, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("whole", "none"), ("part", "none"), ("none", "whole"), ("whole", "part")])
def test_compiled_or_not(first: str, second: str, tmp_path: Path) -> None:
    """A model is the same whether it, or a layer of it, is compiled: no name has a trace of that."""

    def built(way: str) -> tuple[nn.Module, nn.Module]:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        if way == "part":
            model[0] = torch.compile(model[0], backend="eager")
        return (torch.compile(model, backend="eager") if way == "whole" else model), model

    used, model = built(first)
    trainer, _ = make(used)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(trainer)
    trainer.run(LOADER, max_epochs=1)
    assert checkpoint.latest is not None
    assert "_orig_mod" not in (checkpoint.latest / "rank-00000.json").read_text()
    used, other = built(second)
    fresh, _ = make(used)
    Checkpoint(tmp_path).attach(fresh)
    fresh.run(LOADER, max_epochs=1)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(model[1].running_mean, other[1].running_mean)


# --- attaching, and failing ---


def test_one_checkpoint_to_a_trainer(tmp_path: Path) -> None:
    """And the best needs somebody to say what is good."""
    trainer, _ = make()
    with pytest.raises(ValueError, match=r"score='loss' needs an evaluator; pass attach\(trainer, evaluator=...\)"):
        Checkpoint(tmp_path, score="loss").attach(trainer)
    Checkpoint(tmp_path).attach(trainer)
    with pytest.raises(ValueError, match="one Checkpoint at most, got a second"):
        Checkpoint(tmp_path / "b").attach(trainer)


def test_one_trainer_to_a_checkpoint(tmp_path: Path) -> None:
    """It would save the state of the second whenever the first has trained."""
    checkpoint = Checkpoint(tmp_path)
    checkpoint.attach(make()[0])
    with pytest.raises(ValueError, match=r"attached to one trainer, got a second; .* in to_save"):
        checkpoint.attach(make()[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw", [lambda: float(torch.rand(())), random.random, np.random.rand], ids=["torch", "python", "numpy"]
)
def test_a_state_that_draws_random_numbers_leaves_no_trace(draw: Callable[[], float], tmp_path: Path) -> None:
    """The run is the same with and without saves, and so is one that was resumed."""

    class Draws(Remembers):
        def state_dict(self) -> Any:
            return draw()

    def run(directory: Path, limits: list[int], **options: Any) -> Any:
        for limit in limits:
            manual_seed(4)
            trainer, model = make(nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1)))
            Checkpoint(directory, to_save={"draws": Draws()}, **options).attach(trainer)
            trainer.run(LOADER, max_iters=limit)
        return [model[1].weight.tolist(), torch.get_rng_state().tolist(), random.getstate(), np.random.rand()]

    whole = run(tmp_path / "whole", [7], every=100)
    assert run(tmp_path / "often", [7], every=1) == whole
    assert run(tmp_path / "parts", [3, 7], every=2) == whole


@pytest.mark.parametrize("stop", [2, 4], ids=["within an epoch", "at its end"])
def test_the_run_itself_among_the_additional_objects(stop: int, tmp_path: Path) -> None:
    """As Ignite's Checkpoint wants them: all are in the checkpoint anyway, and the run resumes at its place in the data."""

    def run(directory: Path, limits: list[int]) -> Any:
        for limit in limits:
            trainer, model = make()
            seen.append([])
            trainer.add_event_handler(
                TrainEvents.MICRO_BATCH_STARTED,
                lambda: seen[-1].append(trainer.state.num_micro_batches),  # noqa: B023
            )
            to_save = {"trainer": trainer, "model": model, "optimizer": trainer.optimizers["optimizer"]}
            Checkpoint(directory, to_save=to_save).attach(trainer)
            trainer.run(LOADER[:4], max_iters=limit)
        return model.weight.tolist()

    seen: list[list[int]] = []
    assert run(tmp_path / "whole", [7]) == run(tmp_path / "parts", [stop, 7])
    assert seen[0] == [*seen[1], *seen[2]]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_save_that_fails(on_error: str, asynchronous: bool, tmp_path: Path, caplog: Any) -> None:
    """The second one, on a full disk: raised at the next save or the end, or said, and the next is tried. The first stays."""
    trainer, _ = make()
    checkpoint = Checkpoint(tmp_path, every=1, keep=99, on_error=on_error, asynchronous=asynchronous)
    checkpoint.attach(trainer)
    write, calls = checkpoint.saver.directory.disk.write_file, []

    def full(path: Path, parts: Iterator[memoryview], size: int) -> None:
        calls.append(path.name)
        if len(calls) == 5:  # a page on trial and the three files of the first save come before
            raise OSError(28, "No space left on device")
        write(path, parts, size)

    checkpoint.saver.directory.disk.write_file = full  # type: ignore[method-assign]
    if on_error == "raise":
        with pytest.raises(CheckpointError, match=r"writing a checkpoint failed: rank 0, OSError: .* No space left on device"):
            trainer.run(LOADER, max_iters=4)
        assert names(tmp_path) == ["1"]
        assert trainer.state.iteration == (3 if asynchronous else 2)
    else:
        trainer.run(LOADER, max_iters=4)
        assert names(tmp_path) == ["1", "3", "4"]
        assert sum("No space left" in line and "training continues" in line for line in logged(caplog)) == 1
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("update-")] == []


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """Said before anything is trained."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="directory must be a directory, or not exist yet, got the file"):
        Checkpoint(tmp_path / "file")


def test_a_link_to_nothing_is_no_directory(tmp_path: Path) -> None:
    """Nor is a directory below one. Said when the handler is made, with the link."""
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for directory in (tmp_path / "link", tmp_path / "link/deep/run"):
        with pytest.raises(
            ValueError, match=r"directory must be .*link' is a link to a path that does not exist; create its target, or"
        ):
            Checkpoint(directory)
    (tmp_path / "gone").mkdir()
    Checkpoint(tmp_path / "link")


# --- what will not be exact ---


class Stream(IterableDataset[Any]):
    """Without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(X)


def looped(loader: Any, caplog: Any, tmp_path: Path) -> tuple[list[str], list[str]]:
    """The warnings, and what else was said, when a run starts; twice, and said once."""
    trainer, _ = make()
    Checkpoint(tmp_path).attach(trainer)
    with caplog.at_level(logging.INFO):
        trainer.run(loader, max_epochs=1)
        if not isinstance(loader, Iterator):
            trainer.run(loader, max_epochs=2)
    lines = [r for r in caplog.records if r.name.startswith("ignite_train.checkpoint.resume")]
    return [r.getMessage() for r in lines if r.levelno == 30], [r.getMessage() for r in lines if r.levelno == 20]


class Fixed(TensorDataset):
    """Pairs."""


PAIRS = Fixed(X, X.sum(1, keepdim=True))


def unsized() -> Iterator[Any]:
    return iter(LOADER)


class Unsized:
    """Can be gone through again, and has no length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(LOADER)


def pairs(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.stack(rows), torch.stack(rows).sum(1, keepdim=True)


PERSISTENT = {"num_workers": 1, "persistent_workers": True}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("loader", "warnings", "notes"),
    [
        (lambda: LOADER, [], []),
        (lambda: ResumableLoader(PAIRS, 2, shuffle=True), [], []),
        (lambda: DataLoader(PAIRS, 2, shuffle=True), [], ["resuming reads the DataLoader again up to its position"]),
        (unsized, ["list_iterator cannot save its position: .* exact only if the stream gives the same data again"], []),
        (lambda: (entry for entry in LOADER), ["generator cannot save its position"], []),
        (Unsized, ["Unsized cannot save its position"], []),
        (lambda: DataLoader(Stream(), 2, collate_fn=pairs), ["DataLoader cannot save its position"], []),
        (lambda: StatefulDataLoader(PAIRS, 2), [], ["resuming is as exact as the state that the StatefulDataLoader gives"]),
        (
            lambda: StatefulDataLoader(PAIRS, 2, num_workers=1),
            ["StatefulDataLoader does not include the random generators"],
            ["as exact as the state"],
        ),
        (lambda: DataLoader(PAIRS, 2, **PERSISTENT), ["workers of the DataLoader are persistent"], ["up to its position"]),
    ],
)
def test_what_may_not_be_exact_is_said_at_the_start(
    loader: Any, warnings: list[str], notes: list[str], caplog: Any, tmp_path: Path
) -> None:
    """Once, when the run starts, as a warning; reading past a plain DataLoader is exact, and only mentioned."""
    found = looped(loader(), caplog, tmp_path)
    assert len(found[0]) == len(warnings)
    assert all(re.search(pattern, line) for pattern, line in zip(warnings, found[0], strict=True))
    found_notes = [line for line in found[1] if "resuming from" not in line]
    assert len(found_notes) == len(notes)
    assert all(re.search(pattern, line) for pattern, line in zip(notes, found_notes, strict=True))


def test_how_long_the_latest_save_held_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each save moves on."""
    clock, trainer, held = SimpleNamespace(now=100.0), make()[0], []
    checkpoint = Checkpoint(tmp_path, every=2, asynchronous=False)
    checkpoint.attach(trainer)
    assert checkpoint.held_seconds == 0.0
    save = checkpoint.saver.save

    def save_for_long(*args: Any, **options: Any) -> None:
        clock.now += trainer.state.iteration
        save(*args, **options)

    monkeypatch.setattr(checkpoint.saver, "save", save_for_long)
    monkeypatch.setattr("ignite_train.handlers.checkpoint.time", SimpleNamespace(monotonic=lambda: clock.now))
    trainer.append_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: held.append(checkpoint.held_seconds))
    trainer.run(LOADER, max_iters=4)
    held.append(checkpoint.held_seconds)
    assert (held[0], held[-1]) == (2.0, 4.0)  # of update 2, and of the end of the run after update 4


def test_what_may_not_be_exact_is_said_after_updates_on_demand(caplog: Any, tmp_path: Path) -> None:
    """They have no loader, so the first run that has one says it."""
    trainer, _ = make()
    Checkpoint(tmp_path).attach(trainer)
    with trainer.session():
        trainer.update(LOADER[:1])
    for limit in (1, 2):
        trainer.run(Unsized(), max_epochs=limit)
    assert sum("Unsized cannot save its position" in line for line in logged(caplog)) == 1


def test_another_number_of_workers_in_the_middle_of_an_epoch(caplog: Any, tmp_path: Path) -> None:
    """What a dataset draws will differ, and that is said; other changes are looked at in test_changed_data.py."""
    message = "num_workers: 1 -> 0: what a dataset draws differs until the end of the epoch"
    for options, limit in (({"num_workers": 1}, 2), ({}, 4)):
        trainer, _ = make()
        Checkpoint(tmp_path).attach(trainer)
        assert not any(message in line for line in logged(caplog))
        trainer.run(DataLoader(PAIRS, 2, **options), max_iters=limit)
    assert sum(message in line for line in logged(caplog)) == 1


def look_ahead(directory: str) -> list[str]:
    lines = messages_from_here(logging.NOTSET)
    trainer, _ = make(reduction="explicit")
    Checkpoint(directory).attach(trainer)
    trainer.run(Unsized(), max_epochs=1)
    return lines


@pytest.mark.slow
def test_looking_ahead_is_not_exact_and_said(tmp_path: Path) -> None:
    """Ranks with loaders of unknown length read one micro-batch ahead, whose random numbers are drawn too early to resume."""
    first, second = run_ranks(look_ahead, str(tmp_path))
    assert sum("has no length, so 2 ranks read it one micro-batch ahead" in line for line in first) == 1
    assert not any("ahead" in line for line in second)


def test_a_terminated_epoch_does_not_move_the_next(tmp_path: Path) -> None:
    """A loader that has jumped and was not read to its end begins the next epoch at its first sample."""
    trainer, _ = make()
    Checkpoint(tmp_path, every=1).attach(trainer)
    trainer.run(ResumableLoader(PAIRS, 2, shuffle=False), max_iters=4)
    fresh, _ = make()
    Checkpoint(tmp_path, every=1).attach(fresh)
    in_epoch_1 = Events.GET_BATCH_STARTED(event_filter=lambda engine, _: engine.state.epoch == 1)
    fresh.add_event_handler(in_epoch_1, lambda engine: engine.terminate_epoch())
    fresh.run(ResumableLoader(PAIRS, 2, shuffle=False), max_epochs=2)
    assert fresh.state.iteration == 4 + 1 + 6


@pytest.mark.parametrize("uneven", ["all", "shortest"])
def test_broken_off_in_an_end_of_epoch(uneven: Any, tmp_path: Path) -> None:
    """However uneven ranks are dealt with, the next epoch is a whole one."""
    trainer, _ = make(uneven=uneven)
    Checkpoint(tmp_path, every=1).attach(trainer)

    def fail() -> None:
        raise InjectedError

    trainer.add_event_handler(Events.EPOCH_COMPLETED, fail)
    with pytest.raises(InjectedError):
        trainer.run(ResumableLoader(PAIRS, 2, shuffle=False), max_epochs=2)
    fresh, _ = make(uneven=uneven)
    Checkpoint(tmp_path, every=1).attach(fresh)
    fresh.run(ResumableLoader(PAIRS, 2, shuffle=False), max_epochs=2)
    assert fresh.state.iteration == 12


def test_the_end_of_an_epoch_is_due_though_the_last_update_is_done(tmp_path: Path) -> None:
    """Broken off in it, with no update left to do by `max_iters`: a resumed run still fires it, once, and does no update."""
    fired: list[str] = []

    def fail() -> None:
        raise InjectedError

    for action in (fail, lambda: fired.append("end of epoch")):
        trainer, _ = make()
        Checkpoint(tmp_path, every=1).attach(trainer)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, action)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: fired.append(str(engine.state.iteration)))
        with contextlib.suppress(InjectedError):
            trainer.run(LOADER, max_iters=6)
    assert fired == ["1", "2", "3", "4", "5", "6", "end of epoch"]


# --- several ranks ---


def replicas(directory: str, seed: int, limit: int) -> dict[str, Any]:
    """Trains a model with BatchNorm in DDP that does not broadcast buffers: each replica has its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    wrapped = DistributedDataParallel(model)
    wrapped.broadcast_buffers = False
    trainer = create_trainer(wrapped, torch.optim.AdamW(model.parameters(), lr=0.01), forward)
    Average(output_transform=lambda output: output.loss).attach(trainer, "average")
    Checkpoint(directory, every=1, keep=99).attach(trainer)
    seen: list[int] = []
    trainer.add_event_handler(Events.STARTED, lambda engine: seen.append(engine.state.iteration))
    share = LOADER[idist.get_rank() :: idist.get_world_size()]
    trainer.run(share, max_iters=limit)
    return {"mean": model[1].running_mean.tolist(), "weight": model[0].weight.tolist(), "started": seen}


@pytest.mark.slow
def test_replicas_write_the_model_once_and_keep_their_buffers(tmp_path: Path) -> None:
    """Rank 1's file is small; broken off and resumed, each replica has its own running means again, as without a break."""
    expected = run_ranks(replicas, str(tmp_path / "a"), 0, 5)
    first = run_ranks(replicas, str(tmp_path / "b"), 0, 2)
    (newest,) = (tmp_path / "b").glob("update-00000002*")
    sizes = [(newest / f"rank-0000{rank}.safetensors").stat().st_size for rank in range(2)]
    parameters = 300 * 2 + 300 + 2 * 300 + 300 + 1
    assert sizes[0] > 3 * 4 * parameters
    assert sizes[1] < sizes[0] - 3 * 4 * parameters + 4000  # its generators and the buffers
    assert first[0]["mean"] != first[1]["mean"]
    resumed = run_ranks(replicas, str(tmp_path / "b"), 9, 5)
    assert [state["started"] for state in resumed] == [[2], [2]]
    for rank in range(2):
        assert resumed[rank]["mean"] == expected[rank]["mean"]
        assert resumed[rank]["weight"] == expected[rank]["weight"]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_metrics_of_other_ranks_begin_anew(before: int, after: int, tmp_path: Path) -> None:
    """Ignite's metrics hold what each rank has counted: another number of ranks leaves them untouched."""
    updates = 3 if before == 2 else 6  # an epoch, for the data cannot be found again in the middle
    run_ranks(replicas, str(tmp_path), 0, updates, world_size=before)
    states = run_ranks(replicas, str(tmp_path), 0, updates + 1, world_size=after)
    assert [state["started"] for state in states] == [[updates]] * after


def locked(directory: str, with_metric: bool) -> tuple[str, int]:
    """The error of a run in which only rank 1 has something that cannot be stored, and the updates that it did."""
    trainer, _ = make(reduction="explicit")
    if with_metric:  # whose state is gathered
        attach_metric(trainer, Average(), "mean")
    own = Remembers({"lock": threading.Lock() if idist.get_rank() else None})
    Checkpoint(directory, every=2, to_save={"own": own}).attach(trainer)
    with pytest.raises(CheckpointError) as error:
        trainer.run(LOADER, max_epochs=1)
    return str(error.value), trainer.state.iteration


@pytest.mark.slow
@pytest.mark.parametrize("with_metric", [False, True])
def test_what_one_rank_cannot_store_fails_on_all(tmp_path: Path, with_metric: bool) -> None:
    """With the same message, before the first update, and no rank is left waiting for it."""
    first, second = run_ranks(locked, str(tmp_path), with_metric)
    assert first == second
    assert "trying to write a checkpoint failed: rank 1, CheckpointError: to_save/own['lock'] cannot be stored" in first[0]
    assert first[1] == 0


# --- the command ---


def command(*arguments: Any) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "ignite_train.checkpoint", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_command_in_a_process(tmp_path: Path) -> None:
    """Its exit status and output, and nothing on stderr, no RuntimeWarning of runpy either."""
    saves(tmp_path, every=4)
    status, out, error = command("list", tmp_path)
    assert (status, error) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == [path.name for path in sorted(tmp_path.glob("update-*"))]


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    """list, verify and consolidate, of whole checkpoints and of damaged ones."""
    saves(tmp_path, every=4, keep=99)
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("update-00000004  epoch 1, update 4, ")
    assert "ranks: 1" in lines[0]
    assert [line.endswith("latest") for line in lines] == [False] * (len(lines) - 1) + [True]
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("whole") == len(lines)
    newest = tmp_path / lines[-1].split()[0]
    file = newest / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    header, numbers = taken_apart(data)
    of_model = min(entry["data_offsets"][0] for name, entry in header.items() if name.startswith("model["))
    data[len(data) - len(numbers) + of_model] ^= 1
    file.write_bytes(data)
    assert main(["list", str(tmp_path)]) == 0  # reads manifests only
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == 1
    damaged = capsys.readouterr().out.splitlines()[-1]
    assert damaged.startswith(newest.name)
    assert "damaged: " in damaged
    assert "has the checksum" in damaged
    assert not damaged.endswith("latest")
    output = tmp_path / "model.pt"
    assert main(["consolidate", str(tmp_path), "--output", str(output)]) == 0
    assert "weights_only=True" in capsys.readouterr().out
    assert set(torch.load(output, weights_only=True)) == {"weight", "bias"}
    for directory in ("", str(tmp_path)):
        assert main(["consolidate", str(tmp_path), "--output", directory]) == 1
        assert "output must be the path of a file" in capsys.readouterr().err
    other = ["consolidate", str(tmp_path), "--entry", "generators", "--output", str(tmp_path / "generators.pt")]
    assert main(other) == 0
    assert "weights_only=False" in capsys.readouterr().out
    assert main(["consolidate", str(newest), "--output", str(output)]) == 1
    assert "is damaged: model['weight']" in capsys.readouterr().err
    assert main(["list", str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["list", str(tmp_path / "empty")]) == 0
    assert "no checkpoint in" in capsys.readouterr().out


def test_one_checkpoint_is_not_called_the_latest(tmp_path: Path, capsys: Any) -> None:
    """Others may lie beside it."""
    saves(tmp_path, every=4, keep=99)
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    for line in lines:
        assert main(["list", str(tmp_path / line.split()[0])]) == 0
        assert capsys.readouterr().out.strip() == line.removesuffix(", latest")


@pytest.mark.parametrize("arguments", [[], ["list"], ["consolidate"]], ids=["nothing", "list", "consolidate"])
def test_an_incomplete_command(arguments: list[str], capsys: Any) -> None:
    """It is answered with what is missing."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "the following arguments are required" in capsys.readouterr().err


@pytest.mark.parametrize(
    "state",
    [torch.ones(2), {1: {2, 3}}, b"x", np.ones(2), b"", {"a": [frozenset([1])]}, {(1, frozenset()): 2}],
    ids=["tensor", "set", "bytes", "array", "no bytes", "frozen set", "frozen set in a key"],
)
def test_the_command_says_how_its_file_is_read(state: Any, tmp_path: Path, capsys: Any) -> None:
    """As `torch.load` is called for what is in it, with the protection from pickles if that reads it."""
    trainer, _ = make()
    Checkpoint(tmp_path / "run", to_save={"mine": Remembers(state)}).attach(trainer)
    trainer.run(LOADER, max_iters=1)
    file = tmp_path / "mine.pt"
    assert main(["consolidate", str(tmp_path / "run"), "--entry", "mine", "--output", str(file)]) == 0
    out = capsys.readouterr().out
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        assert f"torch.load({str(file)!r}, weights_only=False) reads it" in out
    else:
        assert f"torch.load({str(file)!r}, weights_only=True) reads it" in out
    assert repr(torch.load(file, weights_only=False)) == repr(state)


def test_the_command_names_a_checkpoint_that_it_is_called_in(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """As it is called in the directory around it."""
    saves(tmp_path, every=4, keep=1)
    (path,) = tmp_path.glob("update-*")
    monkeypatch.chdir(path)
    assert main(["verify", "."]) == 0
    assert capsys.readouterr().out.startswith(f"{path.name}  epoch 2, update 12, ")


def test_the_command_says_what_was_set_aside(tmp_path: Path, capsys: Any) -> None:
    """A directory in which all were found damaged is not like an empty one, and neither is verified."""
    damaged = tmp_path / "damaged-update-00000004-12ab"
    damaged.mkdir()
    assert main(["list", str(tmp_path)]) == 0
    assert f"{damaged.name}  damaged, and renamed by an earlier start\n" in capsys.readouterr().out
    assert main(["verify", str(tmp_path)]) == 1
    damaged.rmdir()
    assert main(["verify", str(tmp_path)]) == 1


def test_the_run_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """While a write is blocked, updates continue until the next save, and what is written then is the state at the save."""
    trainer, model = make()
    checkpoint = Checkpoint(tmp_path, every=2, keep=99)
    checkpoint.attach(trainer)
    write, gate, at_save = checkpoint.saver.directory.disk.write_file, threading.Event(), []

    def slow(path: Path, parts: Iterator[memoryview], size: int) -> None:
        assert trainer.state.iteration == 0 or gate.wait(DEADLINE_SECONDS)  # before the first update a page is written on trial
        write(path, parts, size)

    checkpoint.saver.directory.disk.write_file = slow  # type: ignore[method-assign]
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: at_save.append(model.weight.detach().clone()))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), gate.set)  # an update later, which the run has got to
    trainer.run(LOADER, max_iters=3)
    assert main(["consolidate", str(tmp_path / "update-00000002"), "--output", str(tmp_path / "model.pt")]) == 0
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=True)["weight"], at_save[0])


# --- how it shows itself ----------------------------------------------------------------------------------------------------


def test_its_repr_says_when_it_saves(tmp_path: Path) -> None:
    """Directory, cadence, how many stay, and the newest one."""
    assert repr(Checkpoint(tmp_path)) == f"Checkpoint({str(tmp_path)!r}, every_epochs=1, keep=2)"
    text = repr(Checkpoint(tmp_path, every=5, every_seconds=0.5, score="loss", keep=3))
    assert text == f"Checkpoint({str(tmp_path)!r}, every=5, every_seconds=0.5, score='loss', keep=3)"

    trainer, _ = make()
    checkpoint = Checkpoint(tmp_path, every=2)
    checkpoint.attach(trainer)
    trainer.run(LOADER, max_iters=2)
    assert checkpoint.latest is not None
    assert repr(checkpoint) == f"Checkpoint({str(tmp_path)!r}, every=2, keep=2, latest={checkpoint.latest.name!r})"


def test_signatures_show_values() -> None:
    """What `help` shows of a default is what a user would write, not the address of an object."""
    shown = [inspect.signature(function) for function in (Checkpoint, Checkpoint.attach, Checkpoint.restore, Checkpoint.save)]
    assert [str(signature) for signature in shown if " at 0x" in str(signature) or " object" in str(signature)] == []
    assert "give_up_after: 'int' = 5" in str(shown[0])
