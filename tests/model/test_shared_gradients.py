"""Parameters whose gradients backward leaves in the same memory are stepped as if each had its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from ignite_train.model.gradients import share_memory, sharing_memory
from ranks import Ranks, run_ranks
from tiers import slow

X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 10
RATE = 0.125


class Terms(nn.Module):
    """c + d + x: the gradients of c and d are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = (nn.Parameter(torch.full((3,), value, dtype=torch.float64)) for value in (0.5, -0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.c[None] + self.d[None] + x


class Three(Terms):
    """c + d + e + x: three parameters have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Parameter(torch.full((3,), 0.75, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.e[None]


class Parts(nn.Module):
    """cat(a, b) + c + x: the gradients of a and b are parts of that of c."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"a": 1, "b": 2, "c": 3}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.full((size,), 0.5, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat([self.a, self.b]) + self.c)[None] + x


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def expected(model: nn.Module, limit: float | None) -> dict[str, Tensor]:
    """The parameters after one update; the gradient of each by the formula: the column sums of 2 * output, divided by 4."""
    with torch.no_grad():
        whole = 2 * model(X).sum(0) / len(X)
    gradients = {"a": whole[:1], "b": whole[1:], **dict.fromkeys("cde", whole)}
    norm = sum(float(gradients[name].square().sum()) for name, _ in model.named_parameters()) ** 0.5
    factor = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
    return {name: parameter.detach() - RATE * factor * gradients[name] for name, parameter in model.named_parameters()}


class Twice(torch.optim.SGD):
    """Evaluates the loss twice in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        closure()
        super().step()


class BesideSparse(Terms):
    """The same, with rows of an embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 3, sparse=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0 * self.rows(torch.arange(len(x)))


def test_a_sparse_gradient_beside_them_changes_nothing() -> None:
    """Three micro-batches: what the second adds to one of them must not come to the other."""
    model = BesideSparse()
    terms = Terms()
    after = expected(terms, None)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=RATE), forward, accumulation_steps=4)
    trainer.run(list(X.split(1)), max_epochs=1)
    for name, value in after.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value, rtol=1e-12, atol=0)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("size", [4, 2, 1])
@pytest.mark.parametrize("form", ["fused", "foreach", "closure", "closure twice", slow("graph")])
@pytest.mark.parametrize("kind", [Terms, Three, Parts])
def test_each_is_counted_and_scaled_once(kind: Callable[[], nn.Module], form: str, size: int, limit: float | None) -> None:
    """However the samples are cut, with and without clipping."""
    model = kind()
    after = expected(model, limit)
    implementation: dict[str, Any] = {"fused": True} if form == "fused" else {"foreach": True}
    trainer = create_trainer(
        model,
        (Twice if form == "closure twice" else torch.optim.SGD)(model.parameters(), lr=RATE, **implementation),
        forward,
        accumulation_steps=len(X) // size,
        max_grad_norm=limit,
        compile={"update": True, "backend": "eager"} if form == "graph" else False,
        options=UpdateOptions(closure=form.startswith("closure")),
    )
    trainer.run(list(X.split(size)), max_epochs=1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), after[name], rtol=1e-12, atol=0)


class Unequal(Terms):
    """c + d + x on rank 0, whose gradients of c and d are views of one tensor; on rank 1 c counts twice, or not at all."""

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        if factor == 1.0:
            return self.c[None] + self.d[None] + x
        return self.d[None] + x if factor == 0.0 else (factor * self.c)[None] + self.d[None] + x


def _differently(way: str, steps: int, factor: float) -> dict[str, list[float]]:
    """One update in which rank 1 uses c otherwise than rank 0 does; the parameters after it."""
    torch.manual_seed(0)
    rank = idist.get_rank()
    model: Any = Unequal()
    if way in ("ddp", "small ddp"):
        model = DistributedDataParallel(model, find_unused_parameters=factor == 0.0)
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        lambda model, x: ForwardOutput(model(x, factor if rank else 1.0).square().sum(), len(x)),
        accumulation_steps=steps,
        options=UpdateOptions(reduction=way if way in ("ddp", "explicit") else "auto"),
    )
    trainer.run(list((X + rank).split(len(X) // steps)), max_epochs=1)
    return {name: parameter.tolist() for name, parameter in trainer.process.gather.crossing.module.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2.0, 0.0], ids=["used twice", "not used"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("way", ["ddp", "small ddp", "explicit"])
def test_ranks_may_use_the_terms_of_a_sum_differently(way: str, steps: int, factor: float) -> None:
    """The mean over the ranks of the gradient of c is then not that of d, and both ranks have both means."""
    with torch.no_grad():
        c, d = (parameter.detach() for parameter in Terms().parameters())
        column_sums = [2 * (times * c + d + X + rank).sum(0) / (2 * len(X)) for rank, times in enumerate((1.0, factor))]
        after = {"c": c - RATE * (column_sums[0] + factor * column_sums[1]), "d": d - RATE * sum(column_sums)}
    first, second = run_ranks(_differently, way, steps, factor)
    assert first == second
    for name, value in after.items():
        torch.testing.assert_close(torch.tensor(first[name], dtype=torch.float64), value, rtol=1e-12, atol=0)


class LocalTerms(Terms):
    """The same, where c and d may be DTensors, which torch does not add to a plain x."""

    def forward(self, x: Tensor) -> Tensor:
        terms = self.c[None] + self.d[None]
        return (terms.to_local() if isinstance(terms, DTensor) else terms) + x


def _on_a_mesh(kinds: str, shape: tuple[int, int], steps: int, each: bool) -> dict[str, list[float]]:
    """Two updates of whole parameters, of shards, or of shards of DTensors; the parameters after them."""
    model, mesh = LocalTerms(), init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if "replicated" in kinds:
        for name in "cd":
            whole = distribute_tensor(model.get_parameter(name).detach(), mesh["tp"], [Replicate()])
            model.register_parameter(name, nn.Parameter(whole))
    if "sharded" in kinds:
        fully_shard(model, mesh=mesh["dp"])
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        forward,
        accumulation_steps=steps,
        options=UpdateOptions(data_dims=("dp",), reduce_each_micro_batch=each),
    )
    trainer.run(list((X + mesh.get_local_rank("dp")).split(len(X) // steps)), max_epochs=2)
    return {name: one.full_tensor().tolist() for name, one in model.named_parameters() if isinstance(one, DTensor)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "shape", "each"),
    [
        ("replicated", (1, 2), False),
        ("replicated", (2, 1), False),
        ("sharded", (2, 1), False),
        ("sharded", (2, 1), True),
        ("replicated and sharded", (2, 1), False),
    ],
)
def test_each_is_counted_once_on_a_mesh(kinds: str, shape: tuple[int, int], each: bool) -> None:
    """FSDP2 accumulates whole gradients inside, and what makes the mean scales the parts of DTensors in place."""
    with Ranks() as ranks:
        for steps in (1, 2, 4):
            with torch.no_grad():
                c, d = (parameter.detach() for parameter in Terms().parameters())
                for _ in range(2):
                    sums = [2 * (c + d + X + rank).sum(0) for rank in range(shape[0])]
                    gradient = sum(sums) / (len(X) * len(sums))
                    c, d = c - RATE * gradient, d - RATE * gradient
            for found in ranks.run(_on_a_mesh, kinds, shape, steps, each):
                for name, value in {"c": c, "d": d}.items():
                    torch.testing.assert_close(torch.tensor(found[name], dtype=torch.float64), value, rtol=1e-12, atol=0)


def test_which_of_them_share_memory() -> None:
    """Neighbours in memory and empty tensors do not; a part of another tensor does."""
    memory = torch.zeros(10)
    tensors = [memory[:4], memory[4:6], torch.zeros(0), memory[6:], memory[5:7], torch.ones(3), memory[:4]]
    found = sharing_memory(tensors)
    assert found == [6, 4]
    assert share_memory(tensors)
    kept = [tensor.clone() if index in found else tensor for index, tensor in enumerate(tensors)]
    assert sharing_memory(kept) == []
    assert not share_memory(kept)
