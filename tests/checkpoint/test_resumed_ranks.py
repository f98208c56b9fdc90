"""Several ranks that stop and resume end with the same bits, also where a sum depends on the order of what is added."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ignite_train import ForwardOutput, ResumableLoader, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint
from ignite_train.ranks.ddp import settle_bucket_order
from ranks import run_ranks
from tiers import nightly, slow

WAYS = ("ddp", "static", "hooked", "explicit", "fsdp")


class Net(nn.Module):
    """A model whose gradients arrive neither in the order of its parameters nor in the reverse of it."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(24, 3), nn.Linear(6, 24)
        self.norm, self.middle = nn.BatchNorm1d(24), nn.Linear(24, 24)
        self.spare = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.spare(self.middle(self.norm(self.first(x)).tanh()).sin()).cos())


class Samples(Dataset[Any]):
    """Samples that are a function of their index."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(6).add(7 * index).sin()
        return x, x[:3].cumsum(0).exp()


def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    x, y = micro_batch
    return ForwardOutput(((model(x) - y) ** 2).sum(), len(x))


def wrap(model: nn.Module, way: str) -> nn.Module:
    if way == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    if way == "explicit":
        return model
    wrapped = DistributedDataParallel(model, static_graph=way == "static", bucket_cap_mb=0.004)
    if way == "hooked":
        wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def train(way: str, directory: Path, max_iters: int) -> list[list[float]]:
    """Trains up to this update, from the newest checkpoint if there is one; the parameters, buffers and losses."""
    torch.manual_seed(3)
    model = Net()
    wrapped = wrap(model, way)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    options = UpdateOptions(reduction="explicit" if way == "explicit" else "auto")
    trainer = create_trainer(
        wrapped, optimizer, forward, accumulation_steps=1 if way == "static" else 2, options=options, protect=False
    )
    Checkpoint(directory, every=1, keep=1, asynchronous=False).attach(trainer)
    trainer.run(ResumableLoader(Samples(), 2, shuffle=True, seed=1), max_iters=max_iters)
    values = [p.full_tensor() if isinstance(p, DTensor) else p for p in (*model.parameters(), *model.buffers())]
    return [value.detach().double().flatten().tolist() for value in values] + [[trainer.state.output.loss]]


def compare(directory: Path) -> dict[str, bool]:
    """For each way of crossing the ranks whether a run that stopped and resumed twice has ended as one that did not."""
    equal = {}
    for way in WAYS:
        whole = train(way, directory / f"{way}-whole", 7)
        for update in (2, 5, 7):
            parts = train(way, directory / f"{way}-parts", update)
        equal[way] = whole == parts
    return equal


@pytest.mark.parametrize("world_size", [slow(3), nightly(4)])
def test_resumed_run_ends_with_the_same_bits_on_three_or_more_ranks(tmp_path: Path, world_size: int) -> None:
    """DDP adds up in the order of its buckets, which would be another one at each start of a process."""
    for equal in run_ranks(compare, tmp_path, world_size=world_size):
        assert equal == dict.fromkeys(WAYS, True)


def resume_unlike(directory: Path) -> list[str]:
    """The errors of starts in which rank 1 is told otherwise; then all are told the same."""
    errors = []
    for on_rank_1 in ("auto", "never", "must", directory):
        model = wrap(Net(), "ddp")
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
        Checkpoint(directory).attach(trainer)
        with pytest.raises(ValueError, match="resume must be the same on all ranks") if errors else nullcontext() as refused:
            trainer.run(DataLoader(Samples(), 48), max_epochs=1, resume=on_rank_1 if idist.get_rank() == 1 else "auto")
        errors.append(str(refused.value) if refused else "")
    return errors


def test_ranks_that_are_told_to_resume_in_unlike_ways_are_refused(tmp_path: Path) -> None:
    """On all ranks, which would otherwise wait for the one that raises alone."""
    first, second = run_ranks(resume_unlike, tmp_path)
    begin = "resume must be the same on all ranks, got 'auto' on rank 0 and"
    assert first == second == ["", *(f"{begin} {word!r} on rank 1" for word in ("never", "must", str(tmp_path)))]


def traces(kind: str, **settings: bool) -> list[str]:
    """What the making of the order changes where a model has a sparse gradient, hooks, and a gradient already."""
    called: list[str] = []
    model = nn.ModuleDict({"sparse": nn.Embedding(4, 2, sparse=True), "dense": nn.Linear(2, 2), "norm": nn.BatchNorm1d(2)})
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.register_hook(lambda _, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    ddp = DistributedDataParallel(model, **settings)
    if kind == "stateful":
        ddp.register_comm_hook([], lambda _, bucket: called.append(str(bucket)))
    gradient = parameters["dense.bias"].grad = torch.ones(2)
    settle_bucket_order(ddp)
    settle_bucket_order(ddp)  # there is nothing left to do
    called += [name for name, one in parameters.items() if name != "dense.bias" and one.grad is not None]
    called += [kind] * (parameters["dense.bias"].grad is not gradient or gradient.tolist() != [1, 1])
    parameters["dense.bias"].grad = None
    return called + [kind] * ddp.reducer._rebuild_buckets()


def all_traces() -> list[str]:
    return [
        *traces("plain"),
        *traces("views", gradient_as_bucket_view=True),
        *traces("static", static_graph=True),
        *traces("unused", find_unused_parameters=True),
        *traces("stateful"),
    ]


@pytest.mark.slow
def test_making_the_order_leaves_no_trace() -> None:
    """Gradients stay as they are, no hook of a parameter is called, nor a communication hook with a state; once is enough."""
    for found in run_ranks(all_traces):
        assert found == []
