"""The forward of a small DistributedDataParallel, whose gradients cross the ranks with the statistics."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ignite_train import TrainEvents, count_traffic, create_trainer
from ignite_train.ranks import collectives
from ignite_train.ranks.bare_forward import BareForward
from ignite_train.ranks.replicas import SmallReplicas
from ranks import run_ranks

X = torch.arange(6.0).view(2, 3)


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """A process group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Noting(DistributedDataParallel):
    """Notes each call of torch's own preparation for a forward."""

    calls: int = 0

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        vars(self)["calls"] = self.calls + 1
        return super()._pre_forward(*inputs, **kwargs)


class Doubled(DistributedDataParallel):
    """A derived class with a forward of its own."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*inputs, **kwargs)


def make(kind: type[DistributedDataParallel], **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    ddp = kind(nn.Linear(3, 1), **options)
    with ddp.no_sync():
        ddp(X)  # the first forward sets up what is left to set up
    return ddp


def train(ddp: DistributedDataParallel, context: Any) -> tuple[Tensor, list[Tensor | None]]:
    with context:
        output: Tensor = ddp(input=X)
        output.sum().backward()  # type: ignore[no-untyped-call]
    return output.detach(), [parameter.grad for parameter in ddp.module.parameters()]


@pytest.mark.usefixtures("alone")
def test_it_is_the_forward_of_the_module_with_the_hooks_of_the_wrapper() -> None:
    """Nothing of the wrapper's own runs, but for hooks; afterwards all of it does."""
    ddp, other = make(Noting), make(Noting)
    seen: list[nn.Module] = []
    ddp.register_forward_hook(lambda module, _inputs, _output: seen.append(module))  # type: ignore[no-untyped-call]
    before, bare = ddp.calls, BareForward(ddp)
    found, expected = train(ddp, bare), train(other, other.no_sync())
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))  # type: ignore[arg-type]
    assert (ddp.calls, seen) == (before, [ddp])
    ddp(X)
    assert ddp.calls == before + 1


@pytest.mark.usefixtures("alone")
def test_a_forward_that_fails_leaves_the_wrapper_as_it_was() -> None:
    ddp = make(Noting)
    bare = BareForward(ddp)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), bare:
        ddp(torch.ones(2, 2))
    assert "forward" not in vars(ddp)
    with bare, bare:  # within another one it is `no_sync`
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync
    assert "forward" not in vars(ddp)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", ["derived", "set", "compiled", "not begun"])
def test_what_the_user_has_changed_is_called(kind: str) -> None:
    """A forward of a derived class, one set on the object, a compiled one, and the first one, are under `no_sync`."""
    if kind == "not begun":
        ddp: DistributedDataParallel = DistributedDataParallel(nn.Linear(3, 1))
    else:
        ddp = make(Doubled if kind == "derived" else DistributedDataParallel)
    expected = ddp.module(X) * (2 if kind == "derived" else 3 if kind in ("set", "compiled") else 1)
    if kind == "set":
        vars(ddp)["forward"] = lambda x: 3 * ddp.module(x)
    if kind == "compiled":
        vars(ddp)["_compiled_call_impl"] = lambda x: 3 * ddp.module(x)
    with BareForward(ddp):
        assert not ddp.require_backward_grad_sync
        assert torch.equal(ddp(X), expected)
    assert ddp.require_backward_grad_sync
    assert ("forward" in vars(ddp)) == (kind == "set")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", ["copy", "pickle"])
def test_a_copy_that_is_made_meanwhile_reduces(way: str) -> None:
    """It has torch's forward, as if it had been made before."""
    ddp = make(Noting)
    with BareForward(ddp):
        other: Any = copy.deepcopy(ddp) if way == "copy" else pickle.loads(pickle.dumps(ddp))
    before = other.calls
    other(X)
    assert other.calls == before + 1
    assert other.require_backward_grad_sync


@pytest.mark.usefixtures("alone")
def test_inputs_are_moved_where_the_wrapper_moves_them() -> None:
    """Torch accepts `device_ids` on an accelerator only, so they are set behind its back here."""
    ddp = make(Noting)
    ddp.device_ids = [0]  # type: ignore[assignment]
    bare, before = BareForward(ddp), ddp.calls
    ddp.device_ids = None  # type: ignore[assignment]  # the forward of this test has nowhere to move them to
    with bare:
        ddp(X)
    assert ddp.calls == before + 1


@pytest.mark.usefixtures("alone")
def test_ranks_that_have_joined_are_told_of_each_forward() -> None:
    """In torch's `Join` the ranks that have run out wait for what a forward of the others sends."""
    ddp = make(Noting)
    bare, before = BareForward(ddp), ddp.calls
    with Join([ddp]), bare:
        ddp(X)
    assert ddp.calls == before + 1


@pytest.mark.usefixtures("alone")
def test_hooks_of_compiled_autograd_are_told_not_to_reduce() -> None:
    """They look in each backward whether the wrapper is under `no_sync`. Torch makes them by a setting of its compiler."""
    ddp = make(DistributedDataParallel)
    ddp._use_python_reducer = True
    with BareForward(ddp):
        assert not ddp.require_backward_grad_sync


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [DistributedDataParallel, Doubled], ids=["bare", "under no_sync"])
def test_a_forward_without_its_backward_reduces_nothing_later(kind: type[DistributedDataParallel]) -> None:
    """Torch's hooks wait for a backward from then on, and would take that of an update for it; afterwards they reduce."""
    ddp = make(kind)
    ddp(X)
    with count_traffic("cpu") as traffic:
        train(ddp, BareForward(ddp))
    assert traffic.collectives == []
    with count_traffic("cpu") as traffic:
        ddp(X).sum().backward()
    assert [one.name for one in traffic.collectives] == ["allreduce_"]


@pytest.mark.usefixtures("alone")
def test_a_backward_of_the_user_that_misses_parameters_is_told_as_torch_tells_it() -> None:
    """An update does not hide it."""
    ddp = make(DistributedDataParallel)
    ddp(X)
    ddp.module.bias.sum().backward()  # type: ignore[operator, union-attr]
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"), BareForward(ddp):
        ddp(X)
    assert "forward" not in vars(ddp)


@pytest.mark.usefixtures("alone")
def test_a_rank_without_data_does_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks agree whether the buckets are to be laid out again in a backward of the user."""
    monkeypatch.setattr(collectives, "world_size", lambda: 1)
    ddp = make(DistributedDataParallel)
    ddp(X)
    assert SmallReplicas(ddp, ddp).num_placeholders([], 1) == 0
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
