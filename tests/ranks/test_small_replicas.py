"""A small DistributedDataParallel, whose gradients cross the ranks with the statistics and not by its hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

from ignite_train import TrainEvents, UpdateOptions, count_traffic, create_trainer
from ignite_train.ranks import collectives
from ignite_train.ranks.replicas import SmallReplicasCrossing
from ranks import run_ranks

X = torch.arange(6.0).view(2, 3)


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """A process group of one process."""
    idist.initialize("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    idist.finalize()


def make() -> DistributedDataParallel:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 1))
    with ddp.no_sync():
        ddp(X)  # the first forward sets up what is left to set up
    return ddp


def train(ddp: DistributedDataParallel) -> None:
    with SmallReplicasCrossing(ddp.module, ddp).context(last=True):
        ddp(input=X).sum().backward()


@pytest.mark.usefixtures("alone")
def test_a_forward_without_its_backward_reduces_nothing_later() -> None:
    """Torch's hooks wait for a backward from then on, and would take that of an update for it; afterwards they reduce."""
    ddp = make()
    ddp(X)
    with count_traffic("cpu") as traffic:
        train(ddp)
    assert traffic.collectives == []
    with count_traffic("cpu") as traffic:
        ddp(X).sum().backward()
    assert [one.name for one in traffic.collectives] == ["allreduce_"]


@pytest.mark.usefixtures("alone")
def test_a_backward_of_the_user_that_misses_parameters_is_told_as_torch_tells_it() -> None:
    """An update does not hide it."""
    ddp = make()
    ddp(X)
    ddp.module.bias.sum().backward()  # type: ignore[operator, union-attr]
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        train(ddp)


@pytest.mark.usefixtures("alone")
def test_a_rank_without_data_does_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks agree whether the buckets are to be laid out again in a backward of the user."""
    monkeypatch.setattr(collectives, "world_size", lambda: 1)
    ddp = make()
    ddp(X)
    assert SmallReplicasCrossing(ddp.module, ddp).num_placeholders([], 1) == 0
    with count_traffic("cpu") as traffic:
        ddp.module(X).sum().backward()
    assert traffic.collectives == []


def _with_forwards_between(ranks: list[int], backwards: int = 0) -> list[float]:
    """Two epochs; rank 1 has less data. `ranks` run forwards of their own, and so many backwards, between updates."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    trainer = create_trainer(ddp, optimizer, lambda model, x: model(x).square().mean(), accumulation_steps=2, protect=False)

    def run_between() -> None:
        for _ in range(backwards):
            ddp(X.double()).sum().backward()
        ddp(X.double())

    if idist.get_rank() in ranks:
        trainer.add_event_handler(Events.EPOCH_STARTED, run_between)
        trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, lambda: ddp(X.double()))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, run_between)
    generator = torch.Generator().manual_seed(idist.get_rank())
    count = (5, 1)[idist.get_rank()]
    trainer.run([torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(count)], max_epochs=2)
    return [*ddp.module.weight.flatten().tolist(), *ddp.module.bias.tolist()]  # type: ignore[union-attr]


def _with_and_without() -> list[list[float]]:
    alone = [_with_forwards_between(ranks) for ranks in ([], [0], [1], [0, 1])]
    return [*alone, *[_with_forwards_between([0, 1], backwards) for backwards in (1, 2)]]


@pytest.mark.slow
def test_forwards_outside_of_updates_leave_uneven_ranks_in_step() -> None:
    """No rank waits for a reduction that the others do not make, and the weights have the same bits."""
    first, second = run_ranks(_with_and_without)
    assert first == second
    assert first == [first[0]] * 6


class Bounded(nn.Module):
    """Its forward depends on buffers, which it changes: singular vectors, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.head = spectral_norm(nn.Linear(3, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _of_bounded(reduction: str, closure: bool) -> tuple[list[list[float]], list[str]]:
    """Parameters and buffers of this rank after each update, in which the last rank has less data; and what crossed in one."""
    model, rank, seen = Bounded(), idist.get_rank(), list[list[float]]()
    model.norm.running_mean += rank  # type: ignore[operator]  # the wrapper makes them equal
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=2) if closure else torch.optim.SGD(ddp.parameters(), lr=0.1)
    options = UpdateOptions(reduction=reduction, closure=closure)  # type: ignore[arg-type]
    trainer = create_trainer(
        ddp, optimizer, lambda model, x: model(x).square().mean(), accumulation_steps=2, protect=False, options=options
    )
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: seen.append(torch.cat([one.flatten() for one in model.state_dict().values()]).tolist()),
    )
    generator = torch.Generator().manual_seed(rank)
    count = 2 if rank == idist.get_world_size() - 1 else 6
    data = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(count)]
    trainer.run(data, max_epochs=2)
    with count_traffic("cpu") as traffic:
        trainer.update(data[:1])
    with torch.no_grad():
        seen.append(ddp.eval()(data[0]).flatten().tolist())  # the wrapper gives the buffers to all once more
    return seen, [one.name for one in traffic.collectives]


@pytest.mark.slow
@pytest.mark.parametrize("closure", [False, True], ids=["SGD", "LBFGS"])
def test_buffers_are_those_of_rank_0_as_in_any_other_ddp(closure: bool) -> None:
    """The same bits on each rank, also on one without data and in further evaluations; the sums cross with the gradients."""
    for (small, ours), (hooked, theirs) in zip(
        run_ranks(_of_bounded, "auto", closure), run_ranks(_of_bounded, "ddp", closure), strict=True
    ):
        assert small == hooked
        assert ours.count("broadcast_") == theirs.count("broadcast_") > 0
        assert closure or (ours.count("allgather_"), ours.count("allreduce_")) == (1, 0)
        assert closure or (theirs.count("allgather_"), theirs.count("allreduce_")) == (1, 1)


@pytest.mark.slow
def test_buffers_of_three_small_replicas() -> None:
    """No rank waits, and all hold the parameters that hooks leave, but for the order of sums."""
    small, hooked = run_ranks(_of_bounded, "auto", False, world_size=3), run_ranks(_of_bounded, "ddp", False, world_size=3)
    for (mine, _), (theirs, _) in zip(small, hooked, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-9, abs=1e-12)
