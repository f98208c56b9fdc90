"""Checkpoints of sharded models: by any number of ranks, into any sharding or none, and as one plain file."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ignite_train import CheckpointError, ForwardOutput, ResumableLoader, create_trainer
from ignite_train.checkpoint import consolidate, verify
from ignite_train.handlers import Checkpoint
from log_messages import messages_from_here
from ranks import run_ranks
from small_checkpoints import taken_apart
from tiers import nightly


class InjectedError(Exception):
    """Raised by a test on purpose."""


class Net(nn.Module):
    """Dimensions of 5, 3 and 1: no number of ranks divides them, and of the last layer's one row only rank 0 holds any."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
        self.middle = nn.Linear(5, 3)
        self.back = nn.Linear(3, 5)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.back(self.middle(self.norm(self.first(x)).tanh()))))


class Samples(torch.utils.data.Dataset[Any]):
    """Noisy ones."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(4).add(index).sin() + 0.1 * torch.randn(4)
        return x, x.sum()[None]


def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    x, y = micro_batch
    return ForwardOutput(((model(x) - y) ** 2).sum(), len(x))


def build(way: str, seed: int) -> Any:
    """Trainer, model and optimizer; `way` is fsdp, hsdp or how else the ranks are crossed."""
    torch.manual_seed(seed)
    model: nn.Module = Net()
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (idist.get_world_size(),))
        fully_shard(model.middle, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif way == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    torch.manual_seed(seed + 1 + idist.get_rank())
    return create_trainer(wrapped, optimizer, forward, accumulation_steps=2, max_grad_norm=1.0), model, optimizer


def whole(value: Any) -> Any:
    """Nested state with each tensor as its shape and numbers, whatever it is sharded over. Collective."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        return list(value.shape), value.detach().double().flatten().tolist()
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    return [whole(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def train(directory: str | None, way: str, seed: int, stop: int | None, epochs: int = 3) -> dict[str, Any]:
    """Trains, from a checkpoint if there is one, until `stop` or the end; gives all that must be equal."""
    trainer, model, optimizer = build(way, seed)
    losses: list[tuple[int, float]] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append((engine.state.iteration, engine.state.output.loss))
    )
    if directory is not None:
        Checkpoint(directory, every=1).attach(trainer)
    if stop is not None:

        def fail() -> None:
            raise InjectedError

        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), fail)
    with suppress(InjectedError):
        trainer.run(ResumableLoader(Samples(), 2, shuffle=True, seed=1), max_epochs=epochs)
    return {
        "model": whole(model.state_dict()),
        "optimizer": whole(optimizer.state_dict()),
        "losses": losses,
        "generator": torch.get_rng_state().tolist(),
    }


def load(directory: str, way: str) -> dict[str, Any]:
    """What a fresh trainer holds after it has gone back to the newest checkpoint."""
    trainer, model, optimizer = build(way, seed=50)
    checkpoint = Checkpoint(directory)
    checkpoint.attach(trainer)
    checkpoint.restore("must")
    return {"model": whole(model.state_dict()), "optimizer": whole(optimizer.state_dict()), "update": trainer.state.iteration}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "world_size", "stop"), [("fsdp", 2, 6), ("ddp", 2, 5), nightly("hsdp", 4, 4)])
def test_resumes_in_the_middle_of_an_epoch(way: str, world_size: int, stop: int, tmp_path: Path) -> None:
    """Broken off in an update of the second epoch, and built anew: all shards, moments, losses and generators are right."""
    expected = run_ranks(train, None, way, 0, None, world_size=world_size)
    broken = run_ranks(train, str(tmp_path), way, 0, stop, world_size=world_size)
    resumed = run_ranks(train, str(tmp_path), way, 30, None, world_size=world_size)
    for rank in range(world_size):
        assert resumed[rank]["losses"][0][0] == stop
        assert broken[rank]["losses"][: stop - 1] + resumed[rank]["losses"] == expected[rank]["losses"]
        for name in ("model", "optimizer", "generator"):
            assert resumed[rank][name] == expected[rank][name], name


@pytest.mark.slow
@pytest.mark.parametrize(("first", "ranks", "second", "others"), [
    ("fsdp", 2, "none", 1),
    nightly("none", 1, "fsdp", 2),
    ("fsdp", 2, "fsdp", 3),
    nightly("fsdp", 3, "ddp", 2),
    ("hsdp", 4, "none", 1),
    nightly("ddp", 2, "hsdp", 4),
])  # fmt: skip
def test_any_sharding_reads_any_other(first: str, ranks: int, second: str, others: int, tmp_path: Path) -> None:
    """Parameters, buffers and moments are the same numbers, and back in the first sharding they still are."""
    wrote = run_ranks(train, str(tmp_path / "a"), first, 0, None, 1, world_size=ranks)
    verify(sorted((tmp_path / "a").glob("update-*"))[-1])  # each number is there once
    for directory, way, world_size in (("a", second, others), ("a", first, ranks)):
        for rank, state in enumerate(run_ranks(load, str(tmp_path / directory), way, world_size=world_size)):
            assert state["update"] == len(wrote[0]["losses"])
            assert state["model"] == wrote[rank if rank < ranks else 0]["model"]  # with the buffers of each replica
            assert state["optimizer"]["state"] == wrote[0]["optimizer"]["state"]


def there_and_back(directory: str, way: str, epochs: int) -> tuple[list[Any], Any]:
    """Continues to the end of epoch `epochs`."""
    result = train(directory, way, 60 + epochs, None, epochs)
    return result["losses"], result["model"]


@pytest.mark.slow
def test_two_ranks_one_and_two_again(tmp_path: Path) -> None:
    """Each resumes where the others ended, an epoch each."""
    two = run_ranks(train, str(tmp_path), "fsdp", 0, None, 1)
    one = run_ranks(there_and_back, str(tmp_path), "none", 2, world_size=1)
    last = run_ranks(there_and_back, str(tmp_path), "fsdp", 3)
    updates = [[update for update, _ in losses] for losses in (two[0]["losses"], one[0][0], last[0][0])]
    assert [update for part in updates for update in part] == [*range(1, updates[-1][-1] + 1)]
    assert [len(part) for part in updates] == [
        3,
        6,
        3,
    ]  # 12 samples on each of two ranks, 24 on one; four to a rank's update
    assert all(math.isfinite(loss) for _, loss in last[0][0])
    assert last[0][0] == last[1][0]


@pytest.mark.slow
def test_consolidated_into_one_plain_file(tmp_path: Path) -> None:
    """`torch.load` without pickles gives the state_dict with whole tensors, and a plain model takes it."""
    wrote = run_ranks(train, str(tmp_path), "fsdp", 0, None, 1)[0]
    newest = sorted(tmp_path.glob("update-*"))[-1]
    verify(newest)
    consolidate(newest, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert {type(value) for value in loaded.values()} == {Tensor}
    assert whole(loaded) == wrote["model"]
    Net().load_state_dict(loaded)


@pytest.mark.slow
def test_each_rank_writes_its_shard_only(tmp_path: Path) -> None:
    """Two ranks write half of the parameters and moments each: no tensor is gathered."""
    run_ranks(train, str(tmp_path), "fsdp", 0, None, 1)
    newest = sorted(tmp_path.glob("update-*"))[-1]
    sizes = [len(taken_apart((newest / f"rank-0000{rank}.safetensors").read_bytes())[1]) for rank in range(2)]
    sharded = 3 * 4 * sum(parameter.numel() for parameter in Net().parameters())  # with two moments, in float32
    generators = 2 * torch.get_rng_state().numel() + 2500  # torch's, the loader's own, and NumPy's
    assert sizes[1] < sharded / 2 + generators + 200
    assert sum(sizes) > sharded


def refused(directory: str) -> tuple[str, bool, list[str]]:
    """The error of loading, whether anything was changed, and what was logged."""
    lines = messages_from_here(logging.NOTSET)
    trainer, model, _ = build("fsdp", seed=50)
    before = whole(model.state_dict())
    checkpoint = Checkpoint(directory)
    checkpoint.attach(trainer)
    try:
        checkpoint.restore("must")
        error = ""
    except CheckpointError as raised:
        error = str(raised)
    return error, whole(model.state_dict()) == before, lines


def flipped(path: Path) -> None:
    """Changes one bit of a parameter."""
    data = bytearray(path.read_bytes())
    header, numbers = taken_apart(data)
    first = min(entry["data_offsets"][0] for name, entry in header.items() if name.startswith("model["))
    data[len(data) - len(numbers) + first + 10] ^= 16
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_shard_of_one_rank_stops_all(rank: int, tmp_path: Path) -> None:
    """A flipped bit in the newest: all go back to the older one; in that too, and all raise the same and change nothing."""
    run_ranks(train, str(tmp_path), "fsdp", 0, None, 1)
    older, newest = sorted(path.name for path in tmp_path.glob("update-*"))[-2:]
    flipped(tmp_path / newest / f"rank-0000{rank}.safetensors")
    first = run_ranks(refused, str(tmp_path))
    assert [error for error, _, _ in first] == ["", ""]
    assert not (tmp_path / newest).exists()
    assert sum("has the checksum" in line and newest in line for line in first[0][2]) == 1
    flipped(tmp_path / older / f"rank-0000{rank}.safetensors")
    second = run_ranks(refused, str(tmp_path))
    assert second[0][0] == second[1][0] != ""
    assert "is whole" in second[0][0]
    assert [unchanged for _, unchanged, _ in second] == [True, True]


class Unsummed(torch.optim.SGD):
    """Keeps a norm that is still to be summed over the ranks."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["squares"] = parameter.grad.square().sum()


def saves_unsummed(directory: str) -> tuple[str, int]:
    torch.manual_seed(0)
    model = Net()
    fully_shard(model)
    trainer = create_trainer(model, Unsummed(model.parameters(), lr=0.01), forward)
    Checkpoint(directory, every=3).attach(trainer)
    try:
        trainer.run(ResumableLoader(Samples(), 2, shuffle=True, seed=1), max_epochs=1)
    except CheckpointError as error:
        return str(error), trainer.state.iteration
    return "", trainer.state.iteration


@pytest.mark.slow
def test_a_state_that_is_yet_to_be_summed_is_found_after_the_first_step(tmp_path: Path) -> None:
    """And not in the first save, by an error of torch's without a name."""
    for message, update in run_ranks(saves_unsummed, str(tmp_path)):
        assert update == 1
        assert "trying to save the state after the first step failed" in message
        assert "'squares'] cannot be stored: a DTensor whose shards are yet to be summed" in message
