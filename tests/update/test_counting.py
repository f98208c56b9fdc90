"""Counting host reads and collectives: what is one; and how few of them an update makes, whatever is attached to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from ignite_train import ForwardOutput, TorchLossScaling, Trainer, TrainEvents, count_traffic, create_trainer
from ignite_train.device import to_host
from ignite_train.handlers import (
    GradNormConsistency,
    LearningRateSchedule,
    LossScaleLogger,
    MinLearningRate,
    ProgressLog,
    StateConsistency,
    TrainingMetrics,
)
from ignite_train.traffic import _num_bytes
from ranks import run_ranks
from update_options import with_options

HERE = Path(__file__).name
UPDATES = 6


# --- what is counted ---


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda one, row: one.item(), "item"),
        (lambda one, row: float(one), "__float__"),
        (lambda one, row: int(one), "__int__"),
        (lambda one, row: bool(one), "__bool__"),
        (lambda one, row: 1 if one > 0 else 0, "__bool__"),
        (lambda one, row: [0, 1, 2][one.long()], "__index__"),
        (lambda one, row: row.tolist(), "tolist"),
        (lambda one, row: row.numpy(), "numpy"),
        (lambda one, row: np.asarray(row), "__array__"),
        (lambda one, row: f"{one:.1f}", "__format__"),
        (lambda one, row: repr(row), "__repr__"),
        (lambda one, row: 1.0 in row, "__contains__"),
        (lambda one, row: torch.full((2,), one), "full"),
        (lambda one, row: [float(each) for each in row][:0] or float(one), "__float__"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_read_is_counted_once(read, name):
    """Each way of getting a number out of a tensor, with the name of what was called and the line that did it."""
    one, row = torch.ones(()), torch.ones(0 if name == "__float__" else 3)
    with count_traffic("cpu") as traffic:
        read(one, row)
    assert [counted.name for counted in traffic.host_reads] == [name]
    assert traffic.collectives == []
    assert Path(traffic.host_reads[0].where.rpartition(":")[0]).name == HERE


def test_what_is_no_read():
    """Arithmetic, comparison, views, copies on the device, shapes; and nothing outside of the context."""
    row = torch.ones(3)
    with count_traffic("cpu") as traffic:
        (row * 2 > 1).sum().clone().reshape(1).to(torch.float64)
        assert (row.shape, row.dtype, len(row), row.numel()) == ((3,), torch.float32, 3, 3)
    row.tolist()
    assert traffic.host_reads == []


def test_reads_of_another_device_are_not_counted():
    """Where the accelerator is watched, what lies on the host already may be looked at; copies of it are reads."""
    with count_traffic("meta") as traffic:
        torch.ones(3).tolist()
        torch.ones(()).item()
    assert traffic.host_reads == []


def test_copies_to_the_host_are_reads():
    """However they are asked for, also without waiting; and a copy that stays where it is is none."""
    with FakeTensorMode(), count_traffic("cuda") as traffic:
        there = torch.ones(3, device="cuda")
        there.cpu()
        there.to("cpu", non_blocking=True)
        there.to(device="cpu", dtype=torch.float64)
        torch.empty(3).copy_(there, non_blocking=True)
        torch.ones(3).to(torch.float64)
        with suppress(RuntimeError):  # it has no numbers; but first it is copied
            Tensor.tolist(there)
    assert [read.name for read in traffic.host_reads] == ["cpu", "to", "to", "copy_", "tolist"]


def every_collective() -> list[str]:
    with count_traffic("cpu") as traffic:
        torch.distributed.all_reduce(torch.ones(1), async_op=True).wait()
        torch.distributed.broadcast(torch.ones(1), src=0)
        torch.distributed.barrier()
        model = DistributedDataParallel(nn.Linear(1, 1))
        before = len(traffic.collectives)
        model(torch.ones(1, 1)).sum().backward()
    return [counted.name for counted in traffic.collectives[:3]] + [counted.name for counted in traffic.collectives[before:]]


def test_collectives_are_counted():
    """Called by name, or by DistributedDataParallel in its backward."""
    for names in run_ranks(every_collective):
        assert names == ["allreduce_", "broadcast_", "barrier", "allreduce_"]


def both_kinds() -> list[list[int]]:
    """The bytes of c10d's collectives, and of the functional ones by which DTensors do the same."""
    own, rows, mesh = torch.ones(3, 2), torch.ones(4, 2), init_device_mesh("cpu", (2,))
    with count_traffic("cpu") as plain:
        torch.distributed.all_reduce(own.clone())
        torch.distributed.all_gather_into_tensor(torch.ones(6, 2), own)
        torch.distributed.reduce_scatter_tensor(torch.ones(2, 2), rows)
    with count_traffic("cpu") as functional:
        for local, before, after in ((own, Partial(), Replicate()), (own, Shard(0), Replicate()), (rows, Partial(), Shard(0))):
            DTensor.from_local(local, mesh, [before]).redistribute(placements=[after]).to_local().add(0)
    return [[counted.num_bytes for counted in traffic.collectives] for traffic in (plain, functional)]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_functional_collective_is_counted_once_with_the_bytes_of_the_plain_one() -> None:
    """What it waits with is none. Bytes are those given and filled: 6 numbers reduced in place, 6 + 12 gathered, 8 + 4 left."""
    assert run_ranks(both_kinds) == [[[24, 72, 48], [24, 72, 48]]] * 2


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")  # torch 2.11, even here
def test_bytes_of_a_sparse_tensor_are_those_that_travel() -> None:
    """An index of 8 bytes for each dimension that is sparse, and the values."""
    rows = torch.sparse_coo_tensor(torch.tensor([[1, 4, 5]]), torch.ones(3, 2), (6, 2), check_invariants=True)
    assert _num_bytes(rows) == 3 * 8 + 3 * 2 * 4
    assert _num_bytes(torch.ones(3, 2)) == 3 * 2 * 4


# --- an update ---


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    x, y = batch
    loss = mse_loss(model(x), y, reduction="sum")
    return ForwardOutput(loss, torch.tensor(float(len(y))), {"samples": len(y), "loss_too": loss.detach(), "x": x.sum()})


def trainer_with(wrap: Callable[[nn.Module], nn.Module], handlers: str, rate: float | Tensor, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    fused = arguments.pop("fused", True)
    optimizer = AdamW(model.parameters(), lr=rate, fused=True) if fused else SGD(model.parameters(), lr=rate, momentum=0.9)
    trainer = create_trainer(
        wrap(model), optimizer, forward, accumulation_steps=2, max_grad_norm=0.1, **with_options(**arguments)
    )
    if handlers != "none":
        TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED)
        ProgressLog().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        LossScaleLogger().attach(trainer)
        LearningRateSchedule(torch.optim.lr_scheduler.StepLR(optimizer, 2)).attach(trainer)
    if handlers == "all":
        GradNormConsistency().attach(trainer)
        if isinstance(rate, float):
            MinLearningRate(optimizer, minimum=1e-12).attach(trainer)
    return trainer


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(3, 4, generator=generator), torch.randn(3, 1, generator=generator)) for _ in range(2 * UPDATES)]


def traffic_of(trainer: Trainer) -> tuple[list[int], list[int], str]:
    """Host reads and collectives of each update, and all of them by place."""
    reads, collectives = [0], [0]
    with count_traffic("cpu") as traffic:
        trainer.add_event_handler(Events.ITERATION_STARTED, lambda: (reads.append(len(traffic.host_reads)), None)[1])
        trainer.add_event_handler(Events.ITERATION_STARTED, lambda: (collectives.append(len(traffic.collectives)), None)[1])
        trainer.append_event_handler(Events.ITERATION_COMPLETED, lambda: (reads.append(len(traffic.host_reads)), None)[1])
        trainer.append_event_handler(
            Events.ITERATION_COMPLETED, lambda: (collectives.append(len(traffic.collectives)), None)[1]
        )
        trainer.run(batches())
    pairs = [[end - start for start, end in zip(counts[1::2], counts[2::2], strict=True)] for counts in (reads, collectives)]
    return pairs[0], pairs[1], "\n".join(map(str, [*traffic.host_reads, *traffic.collectives]))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("fused", "rate"), [(True, 0.01), (True, "tensor"), (False, 0.01)], ids=["fused", "fused, tensor rate", "unfused"]
)
@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "scaled"])
@pytest.mark.parametrize("handlers", ["none", "some", "all"])
def test_an_update_reads_once(monkeypatch, handlers, scaled, fused, rate):
    """On an accelerator one update is one read, whatever is logged and attached; the first reads once more for its trial.

    (Not where torch's own code reads a rate that is a tensor, as its SGD does without fused=True.)
    """
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    scaling = TorchLossScaling(2.0**4) if scaled else None
    rate = torch.tensor(0.01) if rate == "tensor" else rate
    trainer = trainer_with(lambda model: model, handlers, rate, loss_scaling=scaling, fused=fused)
    reads, collectives, places = traffic_of(trainer)
    assert reads == [2, *[1] * (UPDATES - 1)], places
    assert collectives == [0] * UPDATES, places
    assert trainer.state.num_steps == UPDATES


def of_a_rank(reduction: str, handlers: str, accelerator: bool) -> tuple[list[int], list[int], str]:
    with pytest.MonkeyPatch.context() as patch:
        if accelerator:
            patch.setattr(to_host, "_HOST", "nowhere")
        wrap: Any = DistributedDataParallel if reduction in ("ddp", "auto") else lambda model: model
        trainer = trainer_with(wrap, handlers, 0.01, reduction=reduction)
        if handlers == "all":
            StateConsistency(trainer.model, trainer.optimizers["optimizer"]).attach(
                trainer, Events.ITERATION_COMPLETED(every=100)
            )
        return traffic_of(trainer)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accelerator", [True, False], ids=["accelerator", "host"])
@pytest.mark.parametrize("handlers", ["none", "all"])
@pytest.mark.parametrize(("reduction", "count"), [("ddp", 2), ("auto", 1), ("explicit", 1)])
def test_an_update_on_two_ranks(reduction, count, handlers, accelerator):
    """The gradients' bucket and one small reduction; or one for both. And one read, once the names of the logs are known."""
    for reads, collectives, places in run_ranks(of_a_rank, reduction, handlers, accelerator):
        assert collectives[2:] == [count] * (UPDATES - 2), places
        if accelerator:
            assert reads[2:] == [1] * (UPDATES - 2), places


def test_a_rate_that_a_handler_sets(monkeypatch):
    """A rate on the device that was changed since it was read is read again: the output says what was used."""
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    rate = torch.tensor(0.5)
    model = nn.Linear(4, 1)
    trainer = create_trainer(model, SGD([{"params": model.parameters(), "lr": rate}], fused=True), forward)
    rates = []
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY(every=2), lambda: rate.fill_(trainer.state.iteration / 16) and None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: rates.append(trainer.state.output.learning_rates[0]))
    trainer.run(batches()[:5])
    assert rates == [0.5, 0.125, 0.125, 0.25, 0.25]
