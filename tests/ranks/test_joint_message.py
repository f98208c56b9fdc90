"""What crosses the ranks with the statistics: one vector, whatever the layout of gradients, and its sum over the ranks."""

from __future__ import annotations

import math
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from ignite_train.device import to_host
from ignite_train.model.gradients import Gradients
from ignite_train.ranks import collectives, replicas
from ignite_train.ranks.messages import Outgoing, RankRequests
from ignite_train.ranks.replicas import ReplicasCrossing
from ignite_train.ranks.statistics import Statistics, Totals
from ignite_train.traffic import count_traffic
from ranks import RanksFailedError, run_ranks


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What crosses, in a process that takes itself for one of two ranks; the other one sends the same numbers."""
    seen: list[Tensor] = []

    def double(vector: Tensor) -> None:
        seen.append(vector.clone())
        vector.mul_(2)

    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "sum_over_ranks", double)
    return seen


def crossing(owners: list[nn.Parameter]) -> Totals:
    """Sums gradients and statistics over the ranks, as an update does after its last backward."""
    model, statistics = nn.ParameterList(owners), Statistics(torch.device("cpu"))
    crossing = ReplicasCrossing(model, synchronise=False)
    norm = crossing.finish(Outgoing(RankRequests(), []), statistics, Gradients(model, torch.optim.SGD(owners)))
    return statistics.finish(norm)


def parameters() -> list[nn.Parameter]:
    """A contiguous one, a transposed one, one with gaps, one without dimensions, and one in bfloat16."""
    transposed, gaps = torch.ones(3, 2).t(), torch.ones(4, 2)[:, 0]
    return [nn.Parameter(value) for value in (torch.ones(2, 2), transposed, gaps, torch.ones(()), torch.ones(3).bfloat16())]


def backward(owners: list[nn.Parameter]) -> list[Tensor]:
    """Leaves gradients that count upwards in the order of the indices, and returns copies of them."""
    for owner in owners:
        values = torch.arange(1.0, owner.numel() + 1).view(owner.shape).to(owner.dtype)
        (owner * values).sum().backward()  # type: ignore[no-untyped-call]
    return [owner.grad.clone() for owner in owners if owner.grad is not None]


@pytest.mark.parametrize("beside", [2**14, 0], ids=["with the statistics", "in buckets"])
def test_a_gradient_travels_in_the_order_of_its_indices(sent: list[Tensor], beside: int, monkeypatch: Any) -> None:
    """In one vector in float64 if all are small; what comes back has the dtype and the strides that backward gave it."""
    monkeypatch.setattr(replicas, "_TAIL_ELEMENTS", beside)
    monkeypatch.setattr(collectives, "start_sum", _LateSum)
    owners = parameters()
    values = backward(owners)
    strides = [value.stride() for value in values]
    assert crossing(owners).norm == pytest.approx(2 * math.sqrt(sum(value.square().sum().item() for value in values)), rel=1e-3)
    (vector,) = sent
    assert vector.dtype is torch.float64
    if beside:
        in_order = [float(number) for one in sorted(owners, key=Tensor.numel) for number in range(1, one.numel() + 1)]
        assert vector[-len(in_order) :].tolist() == in_order
    for owner, stride, value in zip(owners, strides, values, strict=True):
        assert owner.grad is not None
        assert (owner.grad.stride(), owner.grad.dtype) == (stride, value.dtype)
        assert torch.equal(owner.grad, 2 * value)


def test_what_is_missing_is_zero_and_may_come_back(sent: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another rank has a gradient; one that no rank has stays missing."""
    owners = parameters()
    backward(owners[:1])

    def add_those_of_another_rank(vector: Tensor) -> None:
        vector.mul_(2)
        vector[-18:] += 5
        vector[-23:-18] = torch.tensor([0.0, 1.0, 1.0, 2.0, 1.0])  # by their sizes: 1, 3, 4, 4 and 6

    monkeypatch.setattr(collectives, "sum_over_ranks", add_those_of_another_rank)
    crossing(owners)
    found = [None if owner.grad is None else owner.grad.flatten().tolist() for owner in owners]
    assert found == [[7.0, 9.0, 11.0, 13.0], [5.0] * 6, [5.0] * 4, None, [5.0] * 3]
    assert owners[1].grad is not None
    assert owners[1].grad.stride() == (1, 2)


@pytest.mark.usefixtures("sent")
@pytest.mark.parametrize("joined", [False, True], ids=["a sum", "a sum with a part"])
def test_gradients_that_share_memory_are_told_apart(joined: bool) -> None:
    """Backward hands one tensor on to both terms of a sum; another rank may have used one of them only."""
    owners = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3 - joined))]
    second = torch.cat([torch.zeros(1), owners[1]])[None] if joined else owners[1][None]
    (owners[0][None] + second + torch.ones(4, 3)).square().sum().backward()  # type: ignore[no-untyped-call]
    crossing(owners)
    first, other = [owner.grad for owner in owners]
    assert first is not None
    assert other is not None
    first.add_(1.0)
    assert (first.tolist(), other.tolist()) == ([17.0] * 3, [16.0] * (3 - joined))


@pytest.mark.parametrize("beside", [-1, 0, 1], ids=str)
def test_ranks_that_send_more_than_others_are_an_error(beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is made of the sums: a backend may accept a shorter vector of another rank."""
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    mine, theirs = Statistics(torch.device("cpu")), Statistics(torch.device("cpu"))
    vector, other = mine.pack(RankRequests(), beside=4), theirs.pack(RankRequests(), beside=4 + beside)
    assert vector is not None
    assert other is not None
    vector.add_(other)
    if beside == 0:
        assert mine.finish(1.0).num_micro_batches == 0
        return
    said = r"alike on all ranks, got 16 numbers of an update on this rank, and on average 1[56]\S*; .*call evaluators, saves"
    with pytest.raises(ValueError, match=said):  # which would send something else when the others send this
        mine.finish(1.0)


@pytest.mark.parametrize("beside", [-1, 0, 1], ids=str)
def test_no_step_is_queued_on_sums_of_ranks_that_send_more_than_others(beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator decides before the host has looked at the lengths."""
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    mine, theirs = Statistics(torch.device("cpu")), Statistics(torch.device("cpu"))
    vector, other = mine.pack(RankRequests(), beside=4), theirs.pack(RankRequests(), beside=4 + beside)
    assert vector is not None
    assert other is not None
    vector.add_(other)
    reduced = mine.reduced(torch.ones(()))
    assert reduced is not None
    assert float(reduced.obstacles) == (beside != 0)


def test_a_norm_that_the_host_has_is_decided_on_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator is given nothing to decide from."""
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    statistics = Statistics(torch.device("cpu"))
    statistics.add(ForwardOutput(torch.ones(()), 1))
    statistics.pack(RankRequests())
    assert statistics.reduced(1.0) is None
    assert statistics.reduced(torch.ones(())) is not None


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("with_new_name", [False, True])
@pytest.mark.parametrize("num_out_of_memory", [0, 1])
def test_no_step_is_queued_where_the_host_has_to_look_first(
    num_out_of_memory: int, with_new_name: bool, changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a lack of memory, where a log has a name that other ranks may not know, and where a handler may change gradients.

    None of these hides another.
    """
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    mine, theirs = Statistics(torch.device("cpu")), Statistics(torch.device("cpu"))
    mine.num_out_of_memory = num_out_of_memory
    theirs.add(ForwardOutput(torch.ones(()), 1, {"accuracy": torch.ones(())} if with_new_name else {}))
    vector, other = mine.pack(RankRequests()), theirs.pack(RankRequests(changes_gradients=changes))
    assert vector is not None
    assert other is not None
    vector.add_(other)
    reduced = mine.reduced(torch.ones(()))
    assert reduced is not None
    assert (float(reduced.obstacles) > 0) == bool(num_out_of_memory or with_new_name or changes)


class _LateSum:
    """A reduction with a rank that has the same numbers; the sums are there once it has been waited for."""

    def __init__(self, vector: Tensor) -> None:
        self._vector = vector

    def wait(self) -> None:
        self._vector.mul_(2)


@pytest.mark.parametrize("host", ["cpu", "nowhere"])
def test_nothing_is_read_before_the_sums_are_there(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the host, nor by an accelerator that decides about the step before it."""
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "start_sum", _LateSum)
    monkeypatch.setattr(to_host, "_HOST", host)
    statistics, norm = Statistics(torch.device("cpu")), torch.ones(())
    statistics.add(ForwardOutput(torch.tensor(6.0), 3))
    statistics.start(RankRequests())
    if host == "nowhere":
        reduced = statistics.reduced(norm)
        assert reduced is not None
        assert (float(reduced.sample_size), float(reduced.loss), float(reduced.obstacles)) == (6.0, 12.0, 0.0)
    totals = statistics.finish(norm)
    assert (totals.sample_size, totals.loss, totals.num_micro_batches, totals.norm) == (6.0, 12.0, 2, 1.0)


def _frozen_on_one_rank(victim: int) -> None:
    """An update in which one rank has a parameter less to send: no step is made."""
    model = nn.Linear(3, 1)
    options = UpdateOptions(reduction="explicit")
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: m(x).square().mean(), options=options
    )
    if idist.get_rank() == victim:  # after the ranks have compared their models
        trainer.add_event_handler(Events.EPOCH_STARTED, lambda: model.bias.requires_grad_(False))
    with pytest.raises((ValueError, RuntimeError), match=r"alike on all ranks|[Cc]onnection"):
        trainer.run([torch.ones(2, 3)] * 4, max_epochs=1)
    assert trainer.state.num_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=str)
def test_no_rank_waits_for_one_that_sends_less(victim: int) -> None:
    """Gloo ends the process of a rank that is sent more than it expects, maybe of both; the other one raises before a step."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_frozen_on_one_rank, victim)
    told = [line for line in str(caught.value).splitlines() if line.startswith("rank ")]
    ends = {f"rank {rank}: {end}" for rank in (0, 1) for end in ("died without a word, with exit code -6", "returned")}
    assert len(told) == 2
    assert ends >= {*told}


def _frozen_later() -> tuple[list[float], list[float]]:
    """Updates with the second parameter, without it, and with it again, and with a log that is new in the second."""
    model = nn.ParameterDict({"a": nn.Parameter(torch.zeros(3)), "b": nn.Parameter(torch.zeros(2))})
    rank = idist.get_rank()

    def forward(model: Any, x: Tensor) -> tuple[Tensor, float, dict[str, float]]:
        loss = (model["a"] * x).sum() + (model["b"] * 2).sum() * (rank if trainer.state.iteration != 2 else 0)
        return loss, 1.0, {"late": 1.0} if trainer.state.iteration > 1 else {}

    options = UpdateOptions(reduction="explicit")
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), forward, options=options)
    with trainer.session():
        for update in (1, 2, 3):
            model["b"].requires_grad_(update != 2)
            trainer.update([torch.full((3,), float(update + rank))])
    return model["a"].tolist(), model["b"].tolist()


@pytest.mark.slow
def test_the_message_follows_what_is_trained_and_logged() -> None:
    """Mean over two ranks of x = update + rank, so a = -Σ(update + 1/2); b moves in the updates 1 and 3, by rank 1's 2 / 2."""
    assert run_ranks(_frozen_later) == [([-7.5] * 3, [-2.0] * 2)] * 2


def _sums(*shapes: tuple[int, ...]) -> list[tuple[list[float], list[str]]]:
    """Sums a vector of each shape and returns the results and their collectives; each rank has one number in all elements."""
    found = []
    for shape in shapes:
        vector = torch.full(shape, [2.0**53, 1.0, 1.0][idist.get_rank()], dtype=torch.float64, requires_grad=True) * 1.0
        with count_traffic("cpu") as traffic:
            collectives.sum_over_ranks(vector)
        found.append((sorted({*vector.flatten().tolist()}), [one.name for one in traffic.collectives]))
    return found


@pytest.mark.slow
def test_few_numbers_are_added_in_the_order_of_the_ranks() -> None:
    """In float64 2⁵³ + 1 is 2⁵³ again, and 1 + 1 + 2⁵³ is not. Many numbers go round the ring, as they take longest to send."""
    limit = collectives._GATHERED_BYTES // 3 // 8
    for few, shaped, most, more in run_ranks(_sums, (1,), (2, 3), (limit,), (limit + 1,), world_size=3):
        assert few == shaped == most == ([2.0**53], ["allgather_"])
        assert more[1] == ["allreduce_"]


def test_a_single_process_has_nothing_to_add() -> None:
    """Nor to wait for."""
    vector = torch.ones(3)
    collectives.sum_over_ranks(vector)
    assert vector.tolist() == [1.0] * 3
