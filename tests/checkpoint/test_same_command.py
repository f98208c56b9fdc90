"""A script that is killed and started again by the same command: one that forks a run, and one that calls `run` several times.

Each ends with the bits of a loop that is written by hand and never killed.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bits import bit_by_bit
from ignite_train import CheckpointError, Trainer, UpdateOptions, create_trainer
from ignite_train.checkpoint import latest
from ignite_train.handlers import Checkpoint
from log_messages import messages_from_here
from processes import forked
from ranks import run_ranks

A = [torch.linspace(-1, 1, 12).reshape(4, 3) * number for number in range(1, 5)]
B = [torch.linspace(-2, 1, 9).reshape(3, 3) + number for number in range(3)]
SHUFFLED = torch.linspace(0, 1, 30).reshape(10, 3)
RATE = 0.05


class Killed(BaseException):
    """Stands for a kill, where the process of the test must go on."""


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


# --- several calls of run ---


def two_stages(directory: Path, killed_in: int | None, data: tuple[Any, Any] = (A, B), **options: Any) -> Any:
    trainer, made = build(directory, killed_in, **options)
    trainer.run(data[0], max_epochs=2)
    trainer.optimizers["optimizer"].param_groups[0]["lr"] *= 0.5
    torch.rand(7)
    trainer.run(data[1], max_epochs=4)
    return trainer, made


def stages_by_hand(data: tuple[Any, Any] = (A, B)) -> Any:
    def drawn() -> Iterator[Any]:
        torch.rand(7)
        yield from data[1]

    return by_hand([(data[0], 2, 1.0), (drawn(), 1, 0.5), (data[1], 1, 1.0)])


@pytest.mark.parametrize("kills", [(3, 6), (9, 10, 13), (12,)], ids=str)
def test_two_stages_with_data_and_a_rate_of_their_own(kills: tuple[int, ...], tmp_path: Path, caplog: Any) -> None:
    """The rate is lowered once, though each start of the script lowers it, and the second stage goes on in its own data."""
    trainer, made = restarted(partial(two_stages, tmp_path), *kills)
    assert result(trainer) == stages_by_hand()
    assert made == [*range(kills[-1], 15)]
    told = [line for line in caplog.messages if "of a later call of run" in line]
    assert len(told) == sum(update > 9 for update in kills)  # the checkpoint is the one before that update


def test_the_second_stage_shuffles_what_it_shuffled(tmp_path: Path) -> None:
    """Its order and its dropout are drawn from generators that the script has moved before."""
    loaders = (A, DataLoader(SHUFFLED, batch_size=3, shuffle=True))  # type: ignore[arg-type]
    trainer, made = restarted(partial(two_stages, tmp_path, data=loaders), 11, 14)
    assert result(trainer) == stages_by_hand(loaders)
    assert made == [14, 15, 16]


@pytest.mark.parametrize("kills", [(7,), (10, 12, 15)], ids=str)
@pytest.mark.parametrize("limit", ["max_epochs", "max_iters"])
def test_a_call_for_each_epoch(limit: str, kills: tuple[int, ...], tmp_path: Path) -> None:
    """Written as a loop, whichever limit counts."""

    def script(killed_in: int | None) -> tuple[Trainer, list[int]]:
        trainer, made = build(tmp_path, killed_in)
        for epoch in range(1, 5):
            limits: dict[str, int] = {limit: epoch * (len(A) if limit == "max_iters" else 1)}
            trainer.run(A, **limits)
        return trainer, made

    trainer, made = restarted(script, *kills)
    assert result(trainer) == by_hand([(A, 4, 1.0)])
    assert made == [*range(kills[-1], 17)]


def test_stages_of_a_stream(tmp_path: Path) -> None:
    """With `epoch_length` the place is in passes that do not end with an epoch."""

    def script(killed_in: int | None) -> tuple[Trainer, list[int]]:
        trainer, made = build(tmp_path, killed_in)
        trainer.run(A, max_epochs=2, epoch_length=3)
        trainer.run(B, max_epochs=5, epoch_length=2)
        return trainer, made

    trainer, _ = restarted(script, 9, 11)
    assert result(trainer) == by_hand([(A + A[:2], 1, 1.0), (B, 2, 1.0)])


def test_a_checkpoint_by_hand_between_the_stages(tmp_path: Path) -> None:
    """It takes the place of the one of the second stage, and holds the same state."""

    def script(killed_in: int | None) -> tuple[Trainer, list[int]]:
        trainer, made = build(tmp_path, killed_in, keep=1)
        trainer.run(A, max_epochs=2)
        checkpoint: Any = trainer.checkpoint
        checkpoint.save()
        trainer.run(B, max_epochs=4)
        return trainer, made

    trainer, made = restarted(script, 11, 13)
    assert result(trainer) == by_hand([(A, 2, 1.0), (B, 2, 1.0)])
    assert made == [13, 14]


def test_a_lower_limit_in_the_same_process_is_an_error(tmp_path: Path) -> None:
    """Also after a resume, once a run has begun."""
    restarted(partial(two_stages, tmp_path), 12)
    trainer, _ = build(tmp_path)
    assert trainer.run(A, max_epochs=2).iteration == 14
    assert trainer.run(A, max_iters=2).iteration == 14
    trainer.run(A, max_epochs=5)
    with pytest.raises(ValueError, match="max_epochs must not be below the 5 epochs already begun, got 2"):
        trainer.run(A, max_epochs=2)
    with pytest.raises(ValueError, match="max_iters must not be below the 18 updates already done, got 17"):
        trainer.run(A, max_iters=17)


def test_a_session_whose_updates_are_done_is_refused(tmp_path: Path) -> None:
    """Its body cannot be left out; the message says what to do."""
    build(tmp_path)[0].run(A, max_epochs=2)
    trainer, _ = build(tmp_path)
    with (
        pytest.raises(ValueError, match=r"below the 8 updates already done, got 3; where .* several sessions, skip those"),
        trainer.session(max_iters=3),
    ):
        pass


# --- a fork ---


def fork(first: Path, directory: Path, killed_in: int | None, how: Callable[[], None] = kill) -> tuple[Trainer, list[int]]:
    """As the cookbook writes it."""
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


def test_a_fork_of_stages_that_begins_in_the_second(tmp_path: Path) -> None:
    """Its first call finds the limit passed by a checkpoint of another run, and the second one begins there once more."""
    whole, _ = two_stages(tmp_path / "first", None, keep=99)

    def script(killed_in: int | None) -> tuple[Trainer, list[int]]:
        trainer, made = build(tmp_path / "fork", killed_in)
        trainer.run(A, max_epochs=2, resume=tmp_path / "first/update-00000010")
        trainer.optimizers["optimizer"].param_groups[0]["lr"] *= 0.5
        trainer.run(B, max_epochs=4)
        return trainer, made

    trainer, made = restarted(script, 13)
    assert made == [13, 14]
    assert result(trainer) == stages_by_hand()
    assert whole.state.iteration == 14


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


# --- several ranks ---


def _on_ranks(directory: str) -> tuple[list[int], list[str], Any]:
    """Forks a run of two stages in the second one, is told to stop there, and is started again."""
    root, lines, made = Path(directory), messages_from_here(), list[int]()

    def script(name: str, resume: str, stopped_after: int) -> Trainer:
        trainer, updates = build(root / name, keep=99, options=UpdateOptions(reduction="explicit"))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stopped_after), trainer.terminate)
        for data, epochs in ((A, 2), (B, 4)):
            trainer.run(data, max_epochs=epochs, resume=resume if epochs == 2 else "auto")
        made.extend(updates)
        return trainer

    script("first", "auto", 99)
    fork = str(root / "first/update-00000010")
    script("fork", fork, 12)
    trainer = script("fork", fork, 99)
    return made, [line for line in lines if "run began" in line or "a later call" in line], result(trainer)


@pytest.mark.slow
def test_all_ranks_continue_alike(tmp_path: Path) -> None:
    """Both draw the same, so that their mean gradient is that of one."""
    (made, lines, end), (_, others, _) = both = run_ranks(_on_ranks, str(tmp_path))
    assert [rank[0] for rank in both] == [[*range(1, 15), 11, 12, 13, 14]] * 2 == [made] * 2
    assert [rank[2] for rank in both] == [by_hand([(A, 2, 1.0), (B, 2, 1.0)])] * 2 == [end] * 2
    assert [sum(part in line for line in lines) for part in ("run began", "a later call")] == [1, 2]
    assert [sum(part in line for line in others) for part in ("run began", "a later call")] == [0, 2]
