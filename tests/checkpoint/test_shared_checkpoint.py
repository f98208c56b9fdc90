"""One checkpoint for several trainers: of each all that it has, on each rank what belongs to that rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn

import cuts
from bits import bit_by_bit
from ignite_train import CheckpointError, ForwardOutput, Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint, LearningRateSchedule, ModelEMA, StateMismatchError
from ranks import run_ranks

UPDATES, SIZES = 6, [[2] * 6, [3] * 6]  # one micro-batch an update, other samples on each rank


class StoppedError(Exception):
    """Ends a loop."""


class Net(nn.Module):
    """A linear layer and a BatchNorm, whose buffers differ from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(cuts.FEATURES).double(), cuts.linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))  # type: ignore[no-any-return]


def forward(model: nn.Module, micro_batch: cuts.Sample, state: Any) -> ForwardOutput:
    """Adds what the update before has left on this rank."""
    x, y, w = micro_batch
    out = model(x).squeeze(1) + state.carried.get("mean", 0.0)
    state.carried["mean"] = out.mean()
    return ForwardOutput((w * (out - y).square()).sum(), float(w.sum()))


class Part:
    """A model, and a trainer with a schedule and an average."""

    def __init__(self, *, protect: Any = False) -> None:
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        options = UpdateOptions(reduction="auto" if idist.get_world_size() == 1 else "explicit")
        self.trainer = create_trainer(self.model, self.optimizer, forward, protect=protect, options=options)
        self.average = ModelEMA(decay=0.5)
        self.average.attach(self.trainer)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        LearningRateSchedule(self.schedule).attach(self.trainer)

    def contents(self) -> Any:
        average = [self.average] if idist.get_rank() == 0 else []  # saved once for all ranks, with the buffers of rank 0
        parts = [self.model, self.optimizer, *average, self.schedule, self.trainer]
        return bit_by_bit([part.state_dict() for part in parts])  # type: ignore[attr-defined]


def train(directory: Path, *, stop_at: int = 0, leave_out: tuple[str, ...] = ()) -> Any:
    """Two trainers take turns, and the second saves both; the loop may fail after a number of rounds."""
    first, second = Part(), Part()
    Checkpoint(directory, every=2, to_save={"first": first.trainer}, leave_out=leave_out).attach(second.trainer)
    with first.trainer.session(), second.trainer.session() as state:
        for number, micro_batch in list(enumerate(cuts.shard(SIZES)))[state.iteration :]:
            if stop_at and number == stop_at:
                raise StoppedError
            for part in (first, second):
                part.trainer.update([micro_batch])
    return repr([first.contents(), second.contents()])


def in_one_piece_and_in_two(directory: Path) -> tuple[Any, Any]:
    whole = train(directory / "whole")
    with pytest.raises(StoppedError):
        train(directory / "stopped", stop_at=3)
    return whole, train(directory / "stopped")


@pytest.mark.slow
def test_both_trainers_resume_bitwise(tmp_path: Path) -> None:
    """Models, moments, schedules, averages, counters and what is carried."""
    whole, resumed = in_one_piece_and_in_two(tmp_path)
    assert resumed == whole


@pytest.mark.slow
def test_both_trainers_resume_bitwise_on_each_of_two_ranks(tmp_path: Path) -> None:
    """Also what differs from rank to rank: buffers, counters of micro-batches, and what is carried."""
    outcomes = run_ranks(in_one_piece_and_in_two, tmp_path)
    assert all(whole == resumed for whole, resumed in outcomes)
    assert outcomes[0] != outcomes[1]


def carried_message(directory: Path) -> str:
    with pytest.raises(StoppedError):
        train(directory, stop_at=3)
    return ""


@pytest.mark.slow
def test_what_another_trainer_carried_is_not_taken_by_other_ranks(tmp_path: Path) -> None:
    """As with the trainer that saves; it can be dropped, and the log says so."""
    run_ranks(carried_message, tmp_path)
    with pytest.raises(CheckpointError, match=r"holds what forward carried on each of 2 ranks \('mean' in state.carried\)"):
        train(tmp_path)
    assert train(tmp_path, leave_out=("carried",))


def test_names_that_could_meet_are_refused(tmp_path: Path) -> None:
    """The parts of a trainer have names that begin with its own."""
    first, second = Part(), Part()
    with pytest.raises(ValueError, match=r"to_save must not have 'first/model' beside the trainer 'first'.*rename it"):
        Checkpoint(tmp_path, to_save={"first": first.trainer, "first/model": second.model})


def test_a_handler_of_the_other_trainer_can_be_left_out(tmp_path: Path) -> None:
    """By its name and that of its trainer."""
    train(tmp_path / "a", leave_out=("first/handlers/ModelEMA",))
    with pytest.raises(ValueError, match=r"leave_out must name .*'first/handlers/ModelEMA'"):
        train(tmp_path / "b", leave_out=("second/handlers/ModelEMA",))


def what_is_listed_twice(directory: Path) -> list[str]:
    first, second = Part(), Part()
    to_save = {"net": first.model, "optimizer": first.optimizer, "first": first.trainer}
    saver = Checkpoint(directory, every=2, to_save=to_save)
    saver.attach(second.trainer)
    run = saver._run
    return sorted(name for name in run.objects().shared if name.startswith("to_save"))


def test_what_is_named_too_is_saved_once(tmp_path: Path) -> None:
    """Under the name that the user gave."""
    assert what_is_listed_twice(tmp_path) == ["to_save/first/handlers/ModelEMA", "to_save/net", "to_save/optimizer"]


def save_where_ranks_differ(directory: Path) -> list[str]:
    """A parameter of the first trainer's model changes on rank 1, after its last update before a save."""
    first, second = Part(protect={"failure_board": False, "hang_watch": False}), Part()
    saver = Checkpoint(directory, every=2, to_save={"first": first.trainer})
    saver.attach(second.trainer)

    @first.trainer.on(TrainEvents.STEP_COMPLETED(once=2))
    def change(trainer: Trainer) -> None:
        if idist.get_rank() == 1:
            with torch.no_grad():
                first.model.linear.bias.add_(1.0)

    def loop() -> None:
        with first.trainer.session(), second.trainer.session():
            for micro_batch in cuts.shard(SIZES):
                for part in (first, second):
                    part.trainer.update([micro_batch])

    with pytest.raises(StateMismatchError):
        loop()
    return sorted(path.name for path in directory.glob("[!.]*"))


@pytest.mark.slow
def test_nothing_is_saved_where_the_ranks_of_either_trainer_differ(tmp_path: Path) -> None:
    """Its checks compare what they still have to send before the checkpoint is written."""
    assert run_ranks(save_where_ranks_differ, tmp_path) == [[], []]
