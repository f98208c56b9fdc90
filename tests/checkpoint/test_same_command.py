"""Scripts that fork a run, or train in several stages, and are killed and started again by the same command.

Each ends with the bits of a loop that is written by hand and never killed.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from bits import bit_by_bit
from ignite_train import CheckpointError, Trainer, UpdateOptions, create_trainer
from ignite_train.checkpoint import latest
from ignite_train.handlers import Checkpoint, TrainingMetrics
from log_messages import messages_from_here
from processes import forked
from ranks import run_ranks

A = [torch.linspace(-1, 1, 12).reshape(4, 3) * number for number in range(1, 5)]
B = [torch.linspace(-2, 1, 9).reshape(3, 3) + number for number in range(3)]
RATE = 0.05


class Killed(BaseException):
    """Stands for a kill, where the process of the test must continue."""


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def kill() -> None:
    raise Killed


def build(
    directory: Path, killed_in: int | None = None, *, options: UpdateOptions | None = None, keep: int = 2
) -> tuple[Trainer, list[int]]:
    """A trainer that is killed in an update, and the updates that it makes."""
    model = net()
    trainer, made = create_trainer(model, sgd(model), loss, options=options), list[int]()
    Checkpoint(directory, every=1, keep=keep, asynchronous=False).attach(trainer)
    if killed_in is not None:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=killed_in), kill)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: made.append(trainer.state.iteration))
    return trainer, made


def result(trainer: Trainer) -> Any:
    return bit_by_bit([trainer.model.state_dict(), trainer.optimizers["optimizer"].state_dict(), torch.get_rng_state()])


def by_hand(stages: list[tuple[Any, int, float]]) -> Any:
    """For each stage: its data, its epochs, and the factor of the rate before it."""
    model = net()
    optimizer = sgd(model)
    for data, epochs, factor in stages:
        optimizer.param_groups[0]["lr"] *= factor
        for _ in range(epochs):
            for x in data:
                optimizer.zero_grad()
                loss(model, x).backward()
                optimizer.step()
    return bit_by_bit([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()])


def restarted(script: Callable[[int | None], tuple[Trainer, list[int]]], *kills: int) -> tuple[Trainer, list[int]]:
    """Kills a script in each of these updates, and starts it again; the last start is not killed."""
    for killed_in in kills:
        with pytest.raises(Killed):
            script(killed_in)
    return script(None)


# --- several stages ---


def two_stages(root: Path, killed_in: int | None) -> tuple[Trainer, list[int]]:
    """The recipe of the cookbook: a trainer and a directory for each stage, over one model."""
    model, made = net(), list[int]()
    optimizer = sgd(model)
    for name, data, epochs, rate in (("one", A, 2, RATE), ("two", B, 4, RATE / 2)):
        optimizer.param_groups[0]["lr"] = rate
        trainer = create_trainer(model, optimizer, loss)
        Checkpoint(root / name, every=1, asynchronous=False, script_wins=("lr",)).attach(trainer)
        if killed_in is not None:
            trainer.add_event_handler(Events.ITERATION_STARTED(once=killed_in), kill)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda trainer: made.append(trainer.state.iteration))
        trainer.run(data, max_epochs=epochs, resume="auto" if name == "one" else latest(root / "one") or "")
    return trainer, made


@pytest.mark.parametrize("kills", [(3, 6), (9, 10, 13), (12,)], ids=str)
def test_two_stages_with_data_and_a_rate_of_their_own(kills: tuple[int, ...], tmp_path: Path) -> None:
    """Also where the kill comes before the first checkpoint of the second stage."""
    trainer, made = restarted(partial(two_stages, tmp_path), *kills)
    assert result(trainer) == by_hand([(A, 2, 1.0), (B, 2, 0.5)])
    assert made == [*range(kills[-1], 15)]


@pytest.mark.parametrize("limit", ["max_epochs", "max_iters"])
def test_a_call_that_a_later_one_has_passed_is_refused(limit: str, tmp_path: Path) -> None:
    """The state of a later call must not be trained by an earlier one. The message says what to do, also of a session."""
    build(tmp_path)[0].run(A, max_epochs=2)
    trainer, _ = build(tmp_path)
    limits: dict[str, int] = {limit: 1}
    with pytest.raises(ValueError, match=f"{limit} must not be below .* give each call a trainer and a Checkpoint of its own"):
        trainer.run(A, **limits)
    trainer, _ = build(tmp_path)
    with pytest.raises(ValueError, match="updates already done, got 3; if a later call"), trainer.session(max_iters=3):
        pass


# --- a fork ---


def fork(first: Path, directory: Path, killed_in: int | None, how: Callable[[], None] = kill) -> tuple[Trainer, list[int]]:
    """The recipe of the cookbook."""
    trainer, made = build(directory)
    if killed_in is not None:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=killed_in), how)
    trainer.run(A, max_epochs=4, resume=latest(first) or "")
    return trainer, made


def test_a_fork_continues_from_its_own_checkpoints(tmp_path: Path, caplog: Any) -> None:
    """The path is where it begins: once it has checkpoints of its own, those are read, and a warning says so."""
    build(tmp_path / "first")[0].run(A, max_epochs=1)
    trainer, made = restarted(partial(fork, tmp_path / "first", tmp_path / "fork"), 7, 12)
    assert made == [12, 13, 14, 15, 16]
    assert result(trainer) == by_hand([(A, 4, 1.0)])
    told = [line for line in caplog.messages if "is where this run began, and is not read again" in line]
    assert len(told) == 2


@pytest.mark.parametrize("own", ["fork", "first/fork", "."])
@pytest.mark.parametrize("named", ["first", "fork/../first"])
def test_a_path_outside_of_the_own_directory_is_where_a_run_begins(own: str, named: str, tmp_path: Path) -> None:
    """However it is written, and whichever of the two lies in the other: only a checkpoint of its own is inside."""
    build(tmp_path / "first", keep=99)[0].run(A, max_epochs=1)
    (tmp_path / "fork").mkdir()

    def script(killed_in: int | None) -> tuple[Trainer, list[int]]:
        trainer, made = build(tmp_path / own, killed_in)
        trainer.run(A, max_epochs=4, resume=tmp_path / named / "update-00000003")
        return trainer, made

    trainer, made = restarted(script, 7, 12)
    assert made == [12, 13, 14, 15, 16]
    assert result(trainer) == by_hand([(A, 4, 1.0)])


def test_a_path_inside_of_the_own_directory_goes_back_there(tmp_path: Path) -> None:
    """Also by a link to it, and in a trainer that has not trained: it names a state of this run."""
    build(tmp_path / "run", keep=99)[0].run(A, max_epochs=2)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for path, update in (("run/update-00000003", 3), ("link/update-00000002", 2), ("run", 8)):
        trainer, made = build(tmp_path / "run", keep=99)
        trainer.run(A, max_epochs=2, resume=tmp_path / path)
        assert made == [*range(update + 1, 9)]


def test_a_trainer_that_has_trained_goes_to_any_path(tmp_path: Path) -> None:
    """In the same process it is asked for now, and not by a command that was started again."""
    build(tmp_path / "other", keep=99)[0].run(A, max_epochs=2)
    trainer, made = build(tmp_path / "run")
    trainer.run(A, max_epochs=1)
    trainer.run(A, max_epochs=2, resume=tmp_path / "other/update-00000006")
    assert made == [1, 2, 3, 4, 7, 8]


def test_a_fork_whose_own_checkpoints_are_all_damaged_does_not_begin_again(tmp_path: Path) -> None:
    """Its work is not thrown away without being told to."""
    build(tmp_path / "first")[0].run(A, max_epochs=1)
    fork(tmp_path / "first", tmp_path / "fork", None)
    for path in (tmp_path / "fork").glob("update-*"):
        (path / "rank-00000.json").write_text("{}")
    for message in ("is whole", "has no whole checkpoint and 2 that an earlier start found damaged"):
        with pytest.raises(CheckpointError, match=message):
            fork(tmp_path / "first", tmp_path / "fork", None)
    for path in (tmp_path / "fork").glob("damaged-*"):
        shutil.rmtree(path)
    assert fork(tmp_path / "first", tmp_path / "fork", None)[1] == [*range(5, 17)]


def kill_for_good() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_fork_whose_process_is_killed(tmp_path: Path) -> None:
    """By SIGKILL, while a thread may write: no update that is in a committed checkpoint is made again."""
    build(tmp_path / "first")[0].run(A, max_epochs=1)
    for killed_in in (8, 13):
        process = forked.Process(target=fork, args=(tmp_path / "first", tmp_path / "fork", killed_in, kill_for_good))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    trainer, made = fork(tmp_path / "first", tmp_path / "fork", None)
    assert made == [13, 14, 15, 16]
    assert result(trainer) == by_hand([(A, 4, 1.0)])


# --- a stop in the last update ---


LAST_UPDATES = [
    (Events.ITERATION_COMPLETED, {"max_epochs": 3}),
    (Events.EPOCH_COMPLETED, {"max_epochs": 3}),
    (Events.ITERATION_COMPLETED, {"max_iters": 12}),
    (Events.EPOCH_COMPLETED, {"max_iters": 12}),
    (Events.ITERATION_COMPLETED, {"max_iters": 10}),
]


@pytest.mark.parametrize(("event", "limits"), LAST_UPDATES, ids=str)
def test_a_run_that_is_told_to_stop_in_its_last_update_is_ended_by_the_same_command(
    event: Any, limits: dict[str, int], tmp_path: Path
) -> None:
    """It makes no update, closes the epoch that was left open, and calls the handlers of the end again. Then all is done."""

    def script(name: str, stopped_at: int | None = None) -> tuple[Any, list[str]]:
        trainer, _ = build(tmp_path / name)
        TrainingMetrics(memory=False).attach(trainer, Events.ITERATION_COMPLETED(every=7))
        ends: list[str] = []
        for end in ("EPOCH_COMPLETED", "COMPLETED"):
            trainer.add_event_handler(Events[end], partial(ends.append, end))
        if stopped_at is not None:
            trainer.add_event_handler(event(once=stopped_at), trainer.terminate)
        trainer.run(A, **limits)
        metrics = [trainer.state.metrics[key] for key in ("loss", "grad_norm", "progress")]
        return (metrics, trainer.state.epoch, result(trainer)), ends

    whole, all_ends = script("whole")
    _, ends = script("stopped", 3 if event is Events.EPOCH_COMPLETED else limits.get("max_iters", 12))
    again, other_ends = script("stopped")
    assert again == whole
    assert ends[-1] == other_ends[-1] == "COMPLETED"
    assert ends[:-1] + other_ends[:-1] == all_ends[:-1]
    assert script("stopped") == (whole, [])


# --- several ranks ---


def _on_ranks(directory: str) -> tuple[list[int], list[str], Any]:
    """Forks a run, is told to stop, and is started again."""
    root, lines, made = Path(directory), messages_from_here(), list[int]()

    def script(name: str, resume: str, stopped_after: int) -> Trainer:
        trainer, updates = build(root / name, keep=99, options=UpdateOptions(reduction="explicit"))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stopped_after), trainer.terminate)
        trainer.run(A, max_epochs=3, resume=resume)
        made.extend(updates)
        return trainer

    script("first", "auto", 99)
    fork = str(root / "first/update-00000006")
    script("fork", fork, 8)
    trainer = script("fork", fork, 99)
    return made, [line for line in lines if "run began" in line], result(trainer)


@pytest.mark.slow
def test_all_ranks_continue_alike(tmp_path: Path) -> None:
    """Both draw the same, so that their mean gradient is the gradient of one."""
    both = run_ranks(_on_ranks, str(tmp_path))
    assert [made for made, _, _ in both] == [[*range(1, 13), 7, 8, 9, 10, 11, 12]] * 2
    assert [end for _, _, end in both] == [by_hand([(A, 3, 1.0)])] * 2
    assert [len(lines) for _, lines, _ in both] == [1, 0]


def test_a_checkpoint_is_no_directory_of_a_run(tmp_path: Path) -> None:
    """The run saved inside of it, began there again at each start, and removed it with all that lay in it."""
    trainer, _ = build(tmp_path / "run", keep=99)
    trainer.run(A, max_epochs=1)
    inside = latest(tmp_path / "run")
    before = sorted(inside.iterdir())
    with pytest.raises(CheckpointError, match=r"must be that of a run, got the checkpoint .*/update-.*; write Checkpoint"):
        build(inside)[0].run(A, max_epochs=2)
    assert sorted(inside.iterdir()) == before
    trainer, updates = build(tmp_path / "other")
    trainer.run(A, max_epochs=2, resume=inside)  # which the line says
    assert updates == [5, 6, 7, 8]
