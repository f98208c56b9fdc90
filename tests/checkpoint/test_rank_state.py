"""State that differs between ranks although it looks shared: each rank's own is saved, and comes back to that rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.optim import Optimizer

from bits import bit_by_bit
from ignite_train import CheckpointError, ForwardOutput, UpdateOptions, create_trainer
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.handlers import Checkpoint
from ignite_train.kinds_of_handlers import Handler
from ranks import run_ranks

X = torch.linspace(-1, 1, 96).reshape(12, 8).cos()


class SharedMuon(Optimizer):
    """Each rank holds the momentum of its share of the matrices, and all gather what each has made of it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        rank, world_size = idist.get_rank(), idist.get_world_size()
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            update = torch.zeros_like(parameter)
            if place % world_size == rank:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                update += momentum.sign()
            if world_size > 1:
                dist.all_reduce(update)
            parameter.sub_(update, alpha=self.param_groups[0]["lr"])


class Environment:
    """What a rank simulates on its own."""

    def __init__(self) -> None:
        self.place = torch.full((3,), float(idist.get_rank()))

    def state_dict(self) -> dict[str, Tensor]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.place = state["place"]


class Average(Handler):
    """A handler that says that it is the same everywhere."""

    same_on_all_ranks = True

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def attach(self, trainer: Any) -> None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self.add)

    def add(self) -> None:
        self.total += 1 + idist.get_rank()

    def state_dict(self) -> dict[str, Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.total = state["total"]


def train(directory: str, updates: int, optimizer: Any = SharedMuon) -> Any:
    """All that this rank ends with; or why it could not resume."""
    own = optimizer is SharedMuon
    torch.manual_seed(updates)  # a resumed run begins elsewhere
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    environment, average = Environment(), Average()
    stepped = optimizer(model.parameters())
    if not (Path(directory).exists() and list(Path(directory).glob("update-*"))):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.eye(8) / 2)

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        environment.place += x.mean() if own else 0
        return ForwardOutput((model(x) - 1).square().sum(), len(x))

    trainer = create_trainer(model, stepped, forward, options=UpdateOptions(reduction="explicit"))
    if own:
        average.attach(trainer)
    Checkpoint(directory, every=1, keep=9, to_save={"environment": environment} if own else {}).attach(trainer)
    data = [X[i : i + 2] for i in range(idist.get_rank() % 2, 10, 2)]
    try:
        trainer.run(data, max_iters=updates)
    except CheckpointError as error:
        return str(error)
    return bit_by_bit([model.state_dict(), stepped.state_dict(), environment.place, average.total])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_rank_resumes_with_its_own(world_size: int, tmp_path: Path) -> None:
    """Momentum, an object of `to_save` and a handler, bitwise; another number of ranks is refused in one line."""
    whole = run_ranks(train, str(tmp_path / "whole"), 5, world_size=world_size)
    run_ranks(train, str(tmp_path / "parts"), 3, world_size=world_size)
    assert run_ranks(train, str(tmp_path / "parts"), 5, world_size=world_size) == whole
    assert len({repr(rank) for rank in whole}) == world_size

    message = train(str(tmp_path / "parts"), 7)
    assert isinstance(message, str)
    assert "\n" not in message
    assert f"holds a state of 'optimizer' that differs between its {world_size} ranks, and this run has 1" in message


@pytest.mark.slow
def test_what_is_equal_is_written_once(tmp_path: Path) -> None:
    """AdamW of replicas, whose checkpoint one process can read."""
    run_ranks(train, str(tmp_path), 5, torch.optim.AdamW)
    with CheckpointReader(max(tmp_path.glob("update-*"))) as stored:
        assert "optimizer" in stored.names(0)
        assert "optimizer" not in stored.names(1)
    assert not isinstance(train(str(tmp_path), 7, torch.optim.AdamW), str)


def train_apart(directory: str, updates: int) -> Any:
    """Replicas that train on their own, and that nothing makes equal."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        return ForwardOutput((model(x) - 1).square().sum(), len(x))

    trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(reduction="local"))
    Checkpoint(directory).attach(trainer)
    mine = X[idist.get_rank() :: 2]
    trainer.run([mine[i : i + 1] for i in range(6)], max_iters=updates)
    return bit_by_bit([model.state_dict(), optimizer.state_dict()])


def apart_and_resumed(directory: str) -> list[Any]:
    whole = train_apart(f"{directory}/whole", 4)
    stopped = train_apart(f"{directory}/parts", 2)
    return [whole, stopped, train_apart(f"{directory}/parts", 2), train_apart(f"{directory}/parts", 4)]


@pytest.mark.slow
def test_replicas_that_train_on_their_own_have_their_own_model_back(tmp_path: Path) -> None:
    """Also where a start has made no update; and another number of ranks is refused, for there is no one model."""
    found = run_ranks(apart_and_resumed, str(tmp_path))
    for whole, stopped, idle, resumed in found:
        assert (idle, resumed) == (stopped, whole)
    assert found[0][0] != found[1][0]
    with pytest.raises(CheckpointError, match="'model' that differs between its 2 ranks, and this run has 1; use 2 ranks"):
        train_apart(str(tmp_path / "parts"), 5)
