"""Optimizers and models that grow in a run: parameter groups that a handler adds, and layers; both scripts can resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from bits import bit_by_bit
from ignite_train import CheckpointError, ForwardOutput, Trainer, create_trainer
from ignite_train.checkpoint import read_checkpoint
from ignite_train.handlers import Checkpoint, LearningRateSchedule
from small_checkpoints import taken_apart

X = torch.linspace(-1, 1, 96).reshape(12, 8).cos()
LOADER = [X[i : i + 3] for i in range(0, 12, 3)]  # four updates to an epoch


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 1).square().sum(), len(x))


def script(directory: Path, limit: int, *, adds_first: bool = False, seed: int = 0, event: Any = None, **options: Any) -> Any:
    """A frozen layer is trained from the second epoch on. Returns the trainer and all bits of the run."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    frozen = [*model[0].parameters()]
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.01)

    def unfreeze() -> None:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": frozen, "lr": 0.003, "weight_decay": 0.1})

    if adds_first:
        unfreeze()
    else:
        model[0].requires_grad_(False)
    schedule = ExponentialLR(optimizer, 0.9)
    trainer = create_trainer(model, optimizer, forward)
    LearningRateSchedule(schedule).attach(trainer)
    if not adds_first:
        trainer.add_event_handler(event or Events.EPOCH_STARTED(once=2), unfreeze)
    Checkpoint(directory, every=1, keep=20, **options).attach(trainer)
    trainer.run(LOADER, max_iters=limit)
    return trainer, bit_by_bit([model.state_dict(), optimizer.state_dict()])


@pytest.mark.slow
@pytest.mark.parametrize("adds_first", [False, True], ids=["same script", "adds it first"])
@pytest.mark.parametrize("update", [3, 4, 6, 8, 10])
def test_a_group_that_was_added_in_the_run_comes_back(update: int, adds_first: bool, tmp_path: Path) -> None:
    """Before the event, in the middle of its epoch and after it, the run ends with the bits of one without interruption."""
    _, whole = script(tmp_path / "whole", 12)
    script(tmp_path / "parts", update)
    if adds_first and update < 5:
        with pytest.raises(CheckpointError, match=r"its parameter groups have \[2\] parameters and not \[2, 2\]"):
            script(tmp_path / "parts", 12, adds_first=True)
        return
    script(tmp_path / "parts", update + 1, adds_first=adds_first, seed=5)  # twice, since the second describes what it resumed
    trainer, ended = script(tmp_path / "parts", 12, adds_first=adds_first, seed=6)
    assert ended == whole
    assert trainer.state.iteration == 12


def test_a_finished_run_has_its_groups_where_there_is_nothing_to_do(tmp_path: Path) -> None:
    """No event comes in it: groups and moments are there afterwards, and a further run in the same script trains on bitwise."""
    trainer, _ = script(tmp_path / "whole", 12)
    trainer.run(LOADER, max_iters=15)
    _, finished = script(tmp_path / "parts", 12)
    resumed, again = script(tmp_path / "parts", 12, seed=5)
    assert again == finished
    resumed.run(LOADER, max_iters=15)
    assert bit_by_bit(resumed.model.state_dict()) == bit_by_bit(trainer.model.state_dict())


class Outer(torch.optim.Optimizer):
    """An optimizer around another one, with which it has its groups in common, as many implementations of SAM."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([parameter for group in inner.param_groups for parameter in group["params"]], {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


@pytest.mark.slow
@pytest.mark.parametrize("update", [4, 6])
def test_a_group_that_was_added_to_an_optimizer_inside_comes_back(update: int, tmp_path: Path) -> None:
    """It is a group of both optimizers, and both states fit when it is there again."""

    def run(directory: Path, limit: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        optimizer = Outer(torch.optim.AdamW(model[1].parameters(), lr=0.01))
        model[0].requires_grad_(False)

        def unfreeze() -> None:
            model[0].requires_grad_(True)
            optimizer.inner.add_param_group({"params": [*model[0].parameters()], "lr": 0.003})

        trainer = create_trainer(model, optimizer, forward)
        trainer.add_event_handler(Events.ITERATION_STARTED(once=3), unfreeze)
        Checkpoint(directory, every=1).attach(trainer)
        trainer.run(LOADER, max_iters=limit)
        return bit_by_bit([model.state_dict(), optimizer.inner.state_dict()])

    whole = run(tmp_path / "whole", 8)
    run(tmp_path / "parts", update)
    assert run(tmp_path / "parts", 8) == whole


def test_the_log_says_which_group_was_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script(tmp_path, 10)
    script(tmp_path, 12)
    (line,) = [record.getMessage() for record in caplog.records if "resuming from" in record.getMessage()]
    assert "optimizer: a parameter group with 0.weight and 1 more is added, as it was in the run" in line
    assert "requires_grad" not in line


def test_a_group_of_unknown_parameters_is_not_added(tmp_path: Path) -> None:
    """Where the optimizer had parameters that another group has here, it is another one."""

    def run(limit: int, *groups: slice) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        optimizer = torch.optim.AdamW([{"params": [*model[group].parameters()]} for group in groups], lr=0.01)
        trainer = create_trainer(model, optimizer, forward)
        Checkpoint(tmp_path).attach(trainer)
        trainer.run(LOADER, max_iters=limit)

    run(2, slice(0, 1), slice(1, 3))
    with pytest.raises(CheckpointError, match=r"its parameter groups have \[2, 4\] parameters and not \[6\]"):
        run(3, slice(0, 3))


def growing(directory: Path, limit: int, seed: int) -> tuple[Trainer, Any]:
    """A script whose model gets a layer after update 5; a resumed one looks into the checkpoint to know."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def grow() -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model.append(nn.Linear(8, 8))
        optimizer.add_param_group({"params": [*model[-1].parameters()]})

    try:
        done = read_checkpoint(directory).update
    except CheckpointError:
        done = 0
    if done > 5:
        grow()
    trainer = create_trainer(model, optimizer, forward)
    if done <= 5:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=6), grow)
    Checkpoint(directory, every=1, keep=20, config={"width": 8}).attach(trainer)
    trainer.run(LOADER, max_iters=limit)
    return trainer, bit_by_bit([model.state_dict(), optimizer.state_dict()])


@pytest.mark.slow
def test_a_model_that_grows_resumes_by_the_same_script(tmp_path: Path) -> None:
    """`read_checkpoint` says where the run was, before the model is made, and reads no tensor."""
    _, whole = growing(tmp_path / "whole", 9, 0)
    for limit in (3, 7, 9):
        _, ended = growing(tmp_path / "parts", limit, limit % 3)
    assert ended == whole

    for path in (tmp_path / "parts").glob("update-*/*.safetensors"):
        file = path.read_bytes()
        size = len(taken_apart(file)[1])
        path.write_bytes(file[:-size] + bytes(size))  # no tensor is right any more
    newest = max((tmp_path / "parts").glob("update-*"))
    info = read_checkpoint(tmp_path / "parts")
    assert info == read_checkpoint(newest)
    assert (info.path, info.update, info.epoch, info.num_steps, info.num_skipped) == (newest, 9, 3, 9, 0)
    assert (info.num_micro_batches, info.world_size, info.config) == (9, 1, {"width": 8})
    assert info.shapes["1.weight"] == (8, 8)
    names = [[*group.shapes] for group in info.param_groups["optimizer"]]
    assert names == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert info.param_groups["optimizer"][1].options["lr"] == 0.01
    assert info.param_groups["optimizer"][1].shapes["1.bias"] == (8,)


def test_where_no_checkpoint_is_an_error_says_so(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError):
            read_checkpoint(path)
