"""Each parameter is counted once, in its block, whatever wraps the model."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ignite_train import model_summary
from mistakes import Mistake, assert_one_line
from ranks import run_ranks


class Net(nn.Module):
    """Blocks inside blocks, a tied weight, a parameter of its own and a block that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.encoder = nn.Sequential(nn.Embedding(10, 4), nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)))
        self.frozen = nn.Linear(6, 4).requires_grad_(False)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.encoder[0].weight


EXPECTED = [("encoder", 40 + 30 + 12, 82), ("frozen", 28, 0), ("head", 0, 0), ("", 7, 7)]


def rows(model: nn.Module, **options: Any) -> list[tuple[str, int, int]]:
    return [(block.name, block.parameters, block.trainable) for block in model_summary(model, **options).blocks]


def test_blocks() -> None:
    """Children of the model, and what belongs to none; the total is that of a plain sum."""
    model = Net()
    assert rows(model) == EXPECTED
    total = model_summary(model).total
    assert total.parameters == sum(p.numel() for p in model.parameters())
    assert total.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert total.kind == "Net"


def test_deeper() -> None:
    """Grandchildren, and children without children; what stands between is not lost."""
    found = rows(Net(), depth=2)
    assert found == [("encoder.0", 40, 40), ("encoder.1", 42, 42), *EXPECTED[1:]]
    for depth in (3, 9):
        assert [name for name, _, _ in rows(Net(), depth=depth)][:3] == ["encoder.0", "encoder.1.0", "encoder.1.1"]


def test_the_table() -> None:
    """As wide as its longest entries."""
    lines = str(model_summary(Net())).splitlines()
    assert lines[0].split() == ["block", "kind", "parameters", "trainable"]
    assert lines[1].split() == ["encoder", "Sequential", "82", "82"]
    assert lines[-2].split() == ["-", "-", "7", "7"]
    assert lines[-1].split() == ["total", "Net", "117", "89"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_a_wrapper_is_no_block(wrap: Any) -> None:
    """Neither around the model nor around a block."""
    assert rows(wrap(Net())) == EXPECTED
    assert model_summary(wrap(Net())) == model_summary(Net())
    model = Net()
    model.encoder = wrap(model.encoder)
    assert model_summary(model) == model_summary(Net())
    assert model_summary(model, depth=2) == model_summary(Net(), depth=2)


def test_a_child_with_the_name_of_a_wrapped_model_beside_others_is_a_block() -> None:
    """Nothing around it is left out of the total."""
    model = nn.Module()
    model.register_module("_orig_mod", nn.Linear(2, 2))
    model.register_module("adapter", nn.Linear(2, 2, bias=False))
    assert model_summary(model).total.parameters == 10
    assert model_summary(nn.Sequential(model), depth=2).total.parameters == 10


def _sharded_on_this_rank() -> Any:
    model = Net()
    for block in (model.encoder[1], model.frozen):
        fully_shard(block, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    return rows(model)


@pytest.mark.slow
def test_shards_count_as_the_whole() -> None:
    """On each rank."""
    assert run_ranks(_sharded_on_this_rank) == [EXPECTED, EXPECTED]


MISTAKES: dict[str, Mistake] = {
    "model": (TypeError, "model must be a torch.nn.Module", lambda: model_summary([nn.Linear(1, 1)])),  # type: ignore[arg-type]
    "depth": (ValueError, "depth must be at least 1", lambda: model_summary(Net(), depth=0)),
    "lazy": (ValueError, "got the lazy parameter '0.weight'", lambda: model_summary(nn.Sequential(nn.LazyLinear(3)))),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
