"""What several ranks hold begins on all of them as on the first of these ranks, however the model is wrapped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

import meshes
from ignite_train import ForwardOutput, Trainer, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import ModelSync, MomentumTeacher
from ranks import Ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


class Noisy(nn.Module):
    """A frozen layer, a trained one, and a buffer, all of them random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen, self.trained = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        self.register_buffer("noise", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        noise = self.noise.to_local() if isinstance(self.noise, DTensor) else self.noise
        out: Tensor = self.trained(self.frozen(x + noise))
        return out


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def _trainer(model: nn.Module, way: str, mesh: DeviceMesh) -> Trainer:
    frozen = {*model.get_submodule("frozen").parameters()}
    options: dict[str, Any] = {}
    if way == "fully_shard":
        fully_shard(model, mesh=mesh["shards"])
    elif way == "frozen ignored":
        fully_shard(model, mesh=mesh["shards"], ignored_params=frozen)
    elif way == "copies":
        fully_shard(model, mesh=mesh)
    elif way == "copies with data_dims":
        fully_shard(model, mesh=mesh)
        options["data_dims"] = ("copies", "shards")
    elif way == "replicate":
        replicate(model, mesh=mesh["copies"])
    elif way == "buffer on the mesh":
        model.noise = DTensor.from_local(model.noise, mesh["copies"], [Replicate()], run_check=False)
        fully_shard(model, mesh=mesh)
    else:
        options["reduction"] = way
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, options=UpdateOptions(**options))


def _part(tensor: Tensor) -> list[Any]:
    values: list[Any] = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().tolist()
    return values


def _begun(way: str) -> dict[str, Any]:
    """What this rank holds of each tensor, and what it should: of a copy the numbers of rank 0, of a shard its own."""
    is_split = way in ("fully_shard", "frozen ignored")
    mesh = meshes.mesh_of((1, 2) if is_split else (2, 1), ("copies", "shards"))
    model, first, own = Noisy(idist.get_rank()), Noisy(0), Noisy(idist.get_rank())
    _trainer(model, way, mesh)
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        expected = {**dict(first.named_parameters()), **dict(first.named_buffers())}[name].detach()
        if is_split and isinstance(tensor, DTensor):
            expected = own.get_parameter(name).detach().chunk(2)[idist.get_rank()]
        found[name] = _part(tensor), expected.tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "explicit",
        "local",
        "fully_shard",
        "frozen ignored",
        "copies",
        "copies with data_dims",
        "replicate",
        "buffer on the mesh",
    ],
)
def test_ranks_begin_with_the_values_of_the_first_holder(two: Ranks, way: str) -> None:
    for held in two.run(_begun, way):
        assert {name for name, (found, expected) in held.items() if found != expected} == set()


OWN: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "names": lambda rank: {f"queue_{rank}": torch.full((2,), 1.0 + rank)},
    "numbers": lambda rank: {f"queue_{one}": torch.full((2,), 1.0 + rank) for one in range(1, 1 + rank)},
    "shapes": lambda rank: {"queue": torch.full((2 + rank,), 1.0 + rank)},
    "dtypes": lambda rank: {"queue": torch.full((2,), 1 + rank, dtype=(torch.int32, torch.int16)[rank])},
    "sparse ones": lambda rank: {"graph": (torch.eye(2) * (1.0 + rank)).to_sparse()},
}


def _with_own(way: str, kind: str) -> bool:
    """Whether buffers that this rank has otherwise than the other one are as they were after an update."""
    model, own = Noisy(0), OWN[kind](idist.get_rank())
    for name, buffer in own.items():
        model.register_buffer(name, buffer)
    before = {name: buffer.clone() for name, buffer in own.items()}
    trainer = _trainer(model, way, meshes.mesh_of((1, 2) if way == "fully_shard" else (2, 1), ("copies", "shards")))
    assert trainer.update([torch.ones(2, 4)]).applied
    after = dict(model.named_buffers())
    return all(torch.equal(after[name].to_dense(), buffer.to_dense()) for name, buffer in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN)
def test_a_rank_keeps_the_buffers_that_the_others_do_not_have(two: Ranks, kind: str) -> None:
    for way in ("explicit", "fully_shard", "copies"):
        assert all(two.run(partial(_with_own, way), kind)), way


def _used_with_own(kind: str) -> list[tuple[list[float], bool]]:
    """For an evaluation, `ModelSync` and a teacher: the common buffer then, and whether the rank's own ones stayed."""
    rank = idist.get_rank()
    model, own = Noisy(0), OWN[kind](rank)
    for name, buffer in own.items():
        model.register_buffer(name, buffer)
    own = {name: buffer.clone() for name, buffer in own.items()}
    trainer = _trainer(model, "explicit", meshes.mesh_of((2, 1), ("copies", "shards")))
    found: list[tuple[list[float], bool]] = []

    def note(module: nn.Module) -> None:
        held = dict(module.named_buffers())
        found.append((held["noise"].tolist(), all(torch.equal(held[name].to_dense(), own[name].to_dense()) for name in own)))

    def seen(model: nn.Module, x: Tensor) -> ForwardOutput:
        note(model)
        return forward(model, x)

    model.get_buffer("noise").fill_(1.0 + rank)
    create_evaluator(model, seen).run([torch.ones(2, 4)])
    teacher = copy.deepcopy(model)
    MomentumTeacher(teacher, model).attach(trainer)
    note(teacher)
    sync = ModelSync()
    sync.attach(trainer, evaluator=create_evaluator(model, forward))
    sync()
    note(model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN)
def test_they_stay_in_an_evaluation_and_where_a_handler_makes_ranks_alike(two: Ranks, kind: str) -> None:
    for found in two.run(_used_with_own, kind):
        assert found == [([1.0] * 4, True)] * len(found)
