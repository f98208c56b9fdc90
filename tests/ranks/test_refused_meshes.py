"""Layouts on a mesh whose updates or checkpoints would be wrong are refused when the trainer is made, on all ranks alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshes
from ignite_train import UpdateOptions, create_evaluator, create_trainer
from ranks import Ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def _mesh() -> DeviceMesh:
    return meshes.mesh_of((2, 2), ("dp", "tp"))


def _outcome(model: nn.Module, **options: Any) -> str:
    """The error with which a trainer of the model is refused; or nothing, if an update gives all weights a finite value."""
    try:
        trainer = create_trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.1), meshes.forward, options=UpdateOptions(**options)
        )
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    micro_batch = torch.ones(1, 3, meshes.FEATURES, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.int64)
    assert trainer.update([micro_batch]).applied
    return ""


def _net() -> meshes.Net:
    torch.manual_seed(3)
    return meshes.Net().double()


def ignored_layers() -> str:
    model, mesh = _net(), _mesh()
    meshes.tensor_parallel(model, mesh)
    fully_shard(model, mesh=mesh["dp"], ignored_params={*model.up.parameters(), *model.down.parameters()})
    return _outcome(model, data_dims=("dp",))


def ignored_experts() -> str:
    model, mesh = meshes.Experts().double(), meshes.mesh_of((2, 2), ("dp", "ep"))
    meshes.expert_parallel(model, mesh)
    fully_shard(model, mesh=mesh, ignored_params={model.experts.weights})
    return _outcome(model, data_dims=("dp", "ep"))


def ignored_and_frozen() -> str:
    model = _net()
    model.norm.requires_grad_(False)
    fully_shard(model, mesh=meshes.on_cpu(), ignored_params={*model.norm.parameters()})
    return _outcome(model)


def replaced_after_sharding() -> str:
    """What `load_state_dict(assign=True)` puts into the modules is sharded as before."""
    model = _net()
    fully_shard(model, mesh=meshes.on_cpu())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return _outcome(model)


def averaged_over_all(*dims: str) -> str:
    model = _net()
    fully_shard(model, mesh=_mesh())
    return _outcome(model, data_dims=dims)


def averaged_over_another() -> str:
    model = _net()
    fully_shard(model, mesh=_mesh()["tp"])
    return _outcome(model, data_dims=("dp",))


def averaged_over_a_flat_dimension(*dims: str) -> str:
    model = _net()
    fully_shard(model, mesh=meshes.mesh_of((2, 2), ("one", "two"))._flatten("both"))
    return _outcome(model, data_dims=dims)


def sharded_flat(reduction: Any, *, use_orig_params: bool) -> str:
    model = FullyShardedDataParallel(_net(), use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    return _outcome(model, reduction=reduction)


def kept_whole() -> str:
    model = _net()
    fully_shard(model, mesh=meshes.on_cpu())
    model.set_reshard_after_backward(False)  # type: ignore[attr-defined]
    return _outcome(model)


def replicated_by_hooks(reduction: Any) -> str:
    model = _net()
    replicate(model)
    return _outcome(model, reduction=reduction)


IGNORED = (
    "ValueError: model must have all trainable parameters sharded by fully_shard, got '{}' ignored, .* mesh=mesh\\['dp'\\]"
)
LACKING = "ValueError: data_dims must name each dimension over which fully_shard averages, got {} without {}; .*{}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (ignored_layers, (), IGNORED.format("up.weight")),
        (ignored_experts, (), IGNORED.format("experts.weights")),
        (ignored_and_frozen, (), "$"),
        (replaced_after_sharding, (), "$"),
        (averaged_over_all, ("dp",), LACKING.format(r"\('dp',\)", "'tp'", r"mesh=mesh\['dp'\]")),
        (averaged_over_all, ("tp",), LACKING.format(r"\('tp',\)", "'dp'", r"mesh=mesh\['tp'\]")),
        (averaged_over_all, (), LACKING.format(r"\(\)", "'tp'", "leave fully_shard out")),
        (averaged_over_all, ("dp", "tp"), "$"),
        (averaged_over_another, (), LACKING.format(r"\('dp',\)", "'tp'", r"mesh=mesh\['dp'\]")),
        (averaged_over_a_flat_dimension, ("two",), LACKING.format(r"\('two',\)", "'one'", r"mesh=mesh\['two'\]")),
        (averaged_over_a_flat_dimension, ("one", "two"), "$"),
        (replicated_by_hooks, ("auto",), "TypeError: model must not have the older replicate"),
        (replicated_by_hooks, ("explicit",), "TypeError: model must not have the older replicate"),
        (
            partial(sharded_flat, use_orig_params=True),
            ("explicit",),
            "TypeError: model must not be sharded by FullyShardedData",
        ),
        (
            partial(sharded_flat, use_orig_params=False),
            ("explicit",),
            "TypeError: model must not be sharded by FullyShardedData",
        ),
        (partial(sharded_flat, use_orig_params=False), ("auto",), "TypeError: model must not be sharded by FullyShardedData"),
        (kept_whole, (), r"ValueError: model must be sharded again .* got set_reshard_after_backward\(False\); leave"),
    ],
)
def test_gradients_that_would_count_several_times_are_refused(
    four: Ranks, make: Callable[..., str], arguments: tuple[str, ...], words: str
) -> None:
    for message in four.run(make, *arguments):
        assert re.match(words, message), message


def _on_mesh_of(table: Any, way: str) -> str:
    names = ("a", "b", "c")[: torch.tensor(table).dim()]
    model, mesh = _net(), DeviceMesh("cpu", torch.tensor(table), mesh_dim_names=names)
    if way == "fully_shard":
        fully_shard(model, mesh=mesh)
    elif way == "tensor parallel":
        meshes.tensor_parallel(model, mesh)
    else:
        placements = [Replicate()] * mesh.ndim
        if way == "split":
            placements[-1] = Shard(0)  # type: ignore[call-overload]
        model.up.bias = nn.Parameter(distribute_tensor(model.up.bias.detach(), mesh, placements))
    if way in ("copies", "split"):  # beside plain parameters, with which torch does not compute
        model.up.forward = lambda x: nn.functional.linear(x, model.up.weight, _whole(model.up.bias))  # type: ignore[method-assign]
    return _outcome(model, data_dims=names if way == "fully_shard" else names[:-1])


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "way", "refused"),
    [
        ([3, 2, 1, 0], "fully_shard", True),
        ([0, 2, 1, 3], "fully_shard", True),  # on two ranks of four
        ([[0, 2], [1, 3]], "fully_shard", False),
        ([[3, 1], [2, 0]], "fully_shard", True),
        ([[0, 1], [3, 2]], "tensor parallel", True),
        ([[2, 3], [0, 1]], "tensor parallel", False),  # each row of which is sorted, and nothing is split over the rows
        ([[0, 2], [1, 3]], "tensor parallel", False),
        ([[1, 0], [3, 2]], "split", True),
        ([[1, 0], [3, 2]], "copies", False),
    ],
)
def test_a_model_that_is_split_over_unsorted_ranks_is_refused(four: Ranks, table: Any, way: str, refused: bool) -> None:
    """Torch sends the parts in the order of the ranks in a group, and a checkpoint takes them to lie as the mesh says."""
    for message in four.run(_on_mesh_of, table, way):
        assert message.startswith("ValueError: model must be split over a mesh whose ranks increase along") == refused, message
        assert refused or message == ""


def _without_data_dims() -> tuple[str, str]:
    layout = meshes.LAYOUTS["TP2 x DP2"]
    model, _ = meshes.on_mesh(layout)
    with pytest.raises(ValueError, match="data_dims must name") as raised:
        create_evaluator(model, layout.forward)
    return str(raised.value), _outcome(model)


@pytest.mark.slow
def test_the_advice_about_data_dims_is_for_what_is_made(four: Ranks) -> None:
    for of_evaluator, of_trainer in four.run(_without_data_dims):
        assert "; pass data_dims=('dp',), say" in of_evaluator
        assert "; pass options=UpdateOptions(data_dims=('dp',)), say" in of_trainer
