"""Ranks with different numbers of micro-batches, where forward has collectives of its own or runs on placeholders."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cuts
from ignite_train import (
    ForwardOutput,
    NonFiniteError,
    UpdateOptions,
    count_traffic,
    create_evaluator,
    create_trainer,
)
from ignite_train.ranks.placeholders import borrowed_micro_batch
from log_messages import messages_from_here
from ranks import run_ranks
from tiers import only
from update_options import with_options

SIZE = 4  # samples of a micro-batch: all_gather wants the same everywhere
LEARNING_RATE = 0.05
WAYS = ["ddp", "explicit"]
LOADERS = pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])


class Gather(torch.autograd.Function):
    """Features of all ranks, as CLIP takes them: its backward is a collective too."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.size = len(features)
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        whole = gradients[0].clone()
        dist.all_reduce(whole)
        return whole[dist.get_rank() * ctx.size :][: ctx.size]


class Tower(nn.Module):
    """Features of samples. What the module is called on is known, so that a buffer shows every forward."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(cuts.FEATURES, 3).double()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.hidden(x))


def contrast(features: Tensor, everyones: Tensor, y: Tensor) -> Tensor:
    """A sum over the samples, each compared with those of all ranks."""
    return (torch.logsumexp(features @ everyones.T, dim=1) - y * features.sum(dim=1)).sum()


def clip(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
    x, y, _ = micro_batch
    features = model(x)
    return ForwardOutput(contrast(features, Gather.apply(features), y), len(x), {"samples": len(x)})


def wrap(model: nn.Module, way: str) -> Any:
    if way == "ddp":
        return DistributedDataParallel(model)
    return model if way == "explicit" else fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def numbers(model: nn.Module) -> list[float]:
    """All parameters, end to end."""
    tensors = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).tolist()


def data(counts: Sequence[int]) -> list[list[cuts.Sample]]:
    """As many micro-batches for each rank."""
    starts = [SIZE * sum(counts[:rank]) for rank in range(len(counts))]
    return [cuts.cut(cuts.samples(), [SIZE] * count, start) for count, start in zip(counts, starts, strict=True)]


Round = list[tuple[cuts.Sample, bool]]
"""What each rank runs at once, and whether it counts."""


def by_hand(updates: list[list[Round]]) -> dict[str, Any]:
    """One process, in which forward sees the micro-batches of both ranks: the gradient of the mean of the losses that count."""
    model = Tower()
    losses = []
    for rounds in updates:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for entries in rounds:
            features = [model(micro_batch[0]) for micro_batch, _ in entries]
            for mine, (micro_batch, counts) in zip(features, entries, strict=True):
                if counts:
                    total, count = total + contrast(mine, torch.cat(features), micro_batch[1]), count + len(mine)
        gradients = torch.autograd.grad(total / count, tuple(model.parameters()))
        losses.append(float(total.detach()) / count)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LEARNING_RATE * gradient
    return {"parameters": numbers(model), "losses": losses}


def train(counts: Sequence[int], way: str, sized: bool, **arguments: Any) -> dict[str, Any]:
    """Two epochs, or as many as asked for, and all that a placeholder must leave alone."""
    model, loader = Tower(), data(counts)[idist.get_rank()]
    reduction = "ddp" if way == "ddp" else "auto" if way == "fsdp" else way

    def forward(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
        draws.append(float(torch.rand(())))
        trainer.state.carried["forwards"] = trainer.state.carried.get("forwards", 0) + 1
        return clip(model, micro_batch)

    draws: list[float] = []
    wrapped = wrap(model, way)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LEARNING_RATE)
    trainer = create_trainer(wrapped, optimizer, forward, **with_options(reduction=reduction, **arguments))
    outputs: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(trainer.state.output))
    torch.manual_seed(1)
    trainer.run(loader if sized else cuts.Unsized(loader), max_epochs=1)
    return {
        "parameters": numbers(model),
        "losses": [output.loss for output in outputs],
        "samples": [(output.sample_size, output.logs["samples"], output.num_micro_batches) for output in outputs],
        "forwards": len(draws),
        "calls": int(model.calls),
        "carried": trainer.state.carried["forwards"],
        "next draw": float(torch.rand(())),
    }


def pairs(left: list[cuts.Sample], right: list[cuts.Sample]) -> list[Round]:
    return [[(a, True), (b, True)] for a, b in zip(left, right, strict=False)]


def draw_after(forwards: int) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return float(torch.rand(forwards + 1)[-1])


@pytest.mark.slow
@LOADERS
@pytest.mark.parametrize("way", [*WAYS, "fsdp"])
@pytest.mark.parametrize("accumulation_steps", [1, 2, 3])
def test_a_placeholder_keeps_ranks_in_step(accumulation_steps: int, way: str, sized: bool) -> None:
    """3 and 2 micro-batches: the update is the gradient of the losses that count, which have seen a placeholder, by hand.

    The placeholder is the rank's latest micro-batch, or that of the other rank where the model is sharded. It leaves random
    state, buffers, sums and carried values alone.
    """
    results = run_ranks(train_in_step, accumulation_steps, way, sized)
    zero, one = data((3, 2))
    rounds = [*pairs(zero, one), [(zero[2], True), (zero[2] if way == "fsdp" else one[1], False)]]
    updates = [rounds[start : start + accumulation_steps] for start in range(0, 3, accumulation_steps)]
    expected = by_hand(updates)
    sizes = [sum(counts for entries in rounds for _, counts in entries) for rounds in updates]
    for rank, result in enumerate(results):
        assert result["parameters"] == pytest.approx(expected["parameters"], rel=1e-12, abs=1e-14)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-13)
        assert result["samples"] == [(SIZE * number, SIZE * number, number) for number in sizes]
        assert result["forwards"] == 3
        assert (result["calls"], result["carried"]) == (3 - rank, 3 - rank)
        assert result["next draw"] == draw_after(3 - rank)


def normed(way: str) -> tuple[bool, bool, int]:
    """Three micro-batches and two: whether the model and a teacher have running statistics of their own, and of how many."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(cuts.FEATURES, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    alone, teacher, mine = copy.deepcopy(model), copy.deepcopy(model), data((3, 2))[idist.get_rank()]

    def forward(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
        with torch.no_grad():
            teacher(micro_batch[0])
        return cuts.forward(model, micro_batch)

    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if way == "ddp" else model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    options = UpdateOptions(reduction="ddp" if way == "ddp" else "explicit", uneven="replay")
    create_trainer(wrapped, optimizer, forward, options=options).run(mine, max_epochs=1)
    for x, *_ in mine:
        alone(x)
    own, of_teacher = (all(map(torch.equal, one.buffers(), alone.buffers())) for one in (model, teacher))
    batches: Any = model[1].num_batches_tracked
    return own, of_teacher, int(batches)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_placeholder_goes_through_a_batch_normalisation(way: str) -> None:
    """Its backward reads the running statistics, which are put back after it, bit by bit; also those of a teacher."""
    assert run_ranks(normed, way) == [(True, True, 3), (True, True, 2)]


def train_in_step(accumulation_steps: int, way: str, sized: bool) -> dict[str, Any]:
    return train((3, 2), way, sized, accumulation_steps=accumulation_steps, uneven="replay")


@pytest.mark.slow
@LOADERS
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("counts", "accumulation_steps"), [((3, 2), 1), ((4, 3), 2), ((2, 5), 3)])
def test_the_shortest_is_exact(counts: tuple[int, int], accumulation_steps: int, way: str, sized: bool) -> None:
    """Both ranks run forward as often as the shorter one can, also in the last group: the sum over those, by hand."""
    results = run_ranks(train_shortest, counts, accumulation_steps, way, sized)
    rounds = pairs(*data(counts))
    updates = [rounds[start : start + accumulation_steps] for start in range(0, len(rounds), accumulation_steps)]
    expected = by_hand(updates)
    for result in results:
        assert result["parameters"] == pytest.approx(expected["parameters"], rel=1e-12, abs=1e-14)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-13)
        assert result["forwards"] == min(counts)


def shortest_of_three(counts: tuple[int, ...]) -> int:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    options = UpdateOptions(reduction="explicit", uneven="shortest")
    trainer = create_trainer(model, optimizer, clip, options=options)
    return trainer.run(cuts.Unsized(data(counts)[idist.get_rank()]), max_epochs=1).num_micro_batches


@pytest.mark.slow
def test_one_of_many_ranks_ends_the_epoch() -> None:
    """Without lengths too: two ranks that have more do not outvote the third."""
    assert run_ranks(shortest_of_three, (3, 1, 3), world_size=3) == [1, 1, 1]


def train_shortest(counts: tuple[int, int], accumulation_steps: int, way: str, sized: bool) -> dict[str, Any]:
    return train(counts, way, sized, accumulation_steps=accumulation_steps, uneven="shortest")


def nothing_anywhere(way: str, sized: bool) -> tuple[int, int]:
    class Lying(list[Any]):
        def __len__(self) -> int:
            return 2

    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trainer = create_trainer(wrap(model, way), optimizer, clip, options=UpdateOptions(reduction=way, uneven="replay"))
    loader = Lying(data((1, 0))[idist.get_rank()])
    with pytest.warns(UserWarning, match=r"len\(\) 2"):
        trainer.run(loader, max_epochs=2)
    return trainer.state.num_steps, trainer.state.num_skipped


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_loaders_that_give_less_than_they_said_stay_in_step(way: str) -> None:
    """One micro-batch on one rank where each had announced two: the others run on it, and an update without any is skipped."""
    assert run_ranks(nothing_anywhere, way, True) == [(2, 2)] * 2


def first_update_without_any(way: str) -> tuple[int, int]:
    class Lying(list[Any]):
        def __len__(self) -> int:
            return 2

    model = wrap(Tower(), way)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trainer = create_trainer(model, optimizer, clip, options=UpdateOptions(reduction=way, uneven="replay"))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"len\(\) 2"):
        trainer.run(Lying(), max_epochs=1)
    return trainer.state.num_steps, trainer.state.num_skipped


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, "fsdp"])
def test_no_micro_batch_anywhere_hangs_no_rank(way: str) -> None:
    """Updates are skipped as long as no rank has had a micro-batch that could be a placeholder."""
    assert run_ranks(first_update_without_any, way) == [(0, 2)] * 2


def length_of_epoch(counts: tuple[int, int]) -> list[int | None]:
    model, lengths = Tower(), list[int | None]()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trainer = create_trainer(model, optimizer, clip, options=UpdateOptions(reduction="explicit", uneven="replay"))
    for event in (Events.STARTED, Events.EPOCH_STARTED, Events.ITERATION_STARTED):
        trainer.add_event_handler(event, lambda: lengths.append(trainer.state.epoch_length))
    trainer.run(data(counts)[idist.get_rank()], max_epochs=1)
    return lengths


@pytest.mark.slow
def test_a_rank_without_data_knows_how_long_the_epoch_is() -> None:
    """Before the first update, as the others do: no micro-batches are a length too."""
    assert run_ranks(length_of_epoch, (3, 0)) == [[3] * 5] * 2


def test_what_a_rank_borrows_if_no_rank_has_a_micro_batch_now() -> None:
    """The one that it ran on before; its own is never given up for it."""
    assert borrowed_micro_batch(None, "before") == "before"
    assert borrowed_micro_batch("now", "before") == "now"
    assert borrowed_micro_batch(None) is None


# --- parameters that no real micro-batch uses ---


class Branches(nn.Module):
    """Features by one layer, and what another one makes of them, if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(cuts.FEATURES, 3).double(), nn.Linear(3, 3).double()

    def forward(self, x: Tensor, *, deep: bool) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.always(x))
        return features, self.sometimes(features) if deep else features


def unused_beside_a_placeholder(way: str) -> list[list[float]]:
    """The weights of the second layer after each update: from the second on only rank 1 has data, which does not use it."""
    model = Branches()
    wrapped = model if way == "explicit" else DistributedDataParallel(model, find_unused_parameters=True)

    def forward(model: nn.Module, micro_batch: tuple[cuts.Sample, bool]) -> ForwardOutput:
        (x, y, _), deep = micro_batch
        features, behind = model(x, deep=deep)
        return ForwardOutput(contrast(features, Gather.apply(features), y) + behind.square().sum(), len(x))

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    options = {"reduction": way, "uneven": "replay", "protect": False}
    trainer = create_trainer(wrapped, optimizer, forward, **with_options(**options))
    weights: list[list[float]] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: weights.append(numbers(model.sometimes)))
    group = data((1, 3))[idist.get_rank()]
    trainer.run([(micro_batch, index == 0) for index, micro_batch in enumerate(group)], max_epochs=1)
    return [*weights, numbers(model.always)]


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, "auto"])
def test_a_placeholder_gives_no_gradient_to_what_no_micro_batch_used(way: str) -> None:
    """A gradient of zeros would let moments and weight decay move the parameters; None does not, as in one process."""
    first, second = run_ranks(unused_beside_a_placeholder, way)
    assert first == second
    assert first[0] == first[1] == first[2]


def sometimes_deep(kind: str, uneven: Literal["all", "replay"]) -> list[float]:
    """The weights after an epoch in which each micro-batch of rank 1 has a twin on rank 0 at first, and none later.

    And the loss of an evaluation on the same data.
    """
    model = Branches()
    if kind == "each":
        fully_shard(model.sometimes, mesh=init_device_mesh("cpu", (2,)))
    if kind != "explicit":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    def forward(model: nn.Module, micro_batch: tuple[cuts.Sample, bool]) -> ForwardOutput:
        (x, y, _), deep = micro_batch
        features, behind = model(x, deep=deep)
        return ForwardOutput((features.sum(dim=1) - y).square().sum() + behind.square().sum(), len(x))

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    options = {"reduction": "explicit" if kind == "explicit" else "fsdp", "protect": False, "uneven": uneven}
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, **with_options(**options))
    group = [(micro_batch, index in (0, 2, 5)) for index, micro_batch in enumerate(data((3, 8))[idist.get_rank()])]
    trainer.run(group, max_epochs=1)
    return [*numbers(model), create_evaluator(model, forward, uneven=uneven).run(group).metrics["loss"]]


@pytest.mark.slow
@pytest.mark.parametrize("uneven", ["all", "replay"])
def test_a_placeholder_of_a_sharded_model_uses_what_the_others_use(uneven: Literal["all", "replay"]) -> None:
    """A rank that has run out runs the very micro-batches of another rank, so that all call the same sharded modules."""
    expected = run_ranks(sometimes_deep, "explicit", "all")[0]
    for kind in ("root", "each"):
        assert run_ranks(sometimes_deep, kind, uneven)[0] == pytest.approx(expected, rel=1e-9)


# --- a bad micro-batch as a placeholder ---


def one_bad(way: str, counts: tuple[int, int], bad: tuple[int, int], scaled: bool) -> dict[str, Any]:
    """Micro-batch `bad` (of a rank, a number) is NaN; forward has no collective, so all ways can be compared."""
    from ignite_train import TorchLossScaling

    loader = data(counts)[idist.get_rank()]
    if idist.get_rank() == bad[0]:
        loader[bad[1]][0][1, 2] = float("nan")
    replays = way.endswith("-replay")
    name = way.removesuffix("-replay")
    model = wrap(Tower(), name)
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        lambda model, micro_batch: ForwardOutput(model(micro_batch[0]).square().sum(), SIZE),
        options=UpdateOptions(reduction=name, uneven="replay" if replays else "all", on_nonfinite="skip"),
        loss_scaling=TorchLossScaling(init_scale=2.0**10) if scaled else None,
    )
    trainer.run(loader, max_epochs=1)
    return {"steps": trainer.state.num_steps, "skips": trainer.state.num_skipped, "parameters": numbers(model)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scaled", only([True], [False, True]), ids=["unscaled", "scaled"])
@pytest.mark.parametrize("way", ["ddp", "explicit", "ddp-replay", "explicit-replay", "fsdp"])
@pytest.mark.parametrize(
    ("counts", "bad"),
    [((12, 3), (1, 2)), ((12, 1), (1, 0)), ((12, 0), (0, 0)), ((12, 2), (0, 5)), ((12, 2), (0, 2))],
    ids=["its last", "its only one", "borrowed", "while on a placeholder", "first on a placeholder"],
)
def test_a_bad_micro_batch_costs_its_own_update(counts: tuple[int, int], bad: tuple[int, int], way: str, scaled: bool) -> None:
    """Of 12 updates 11 step and 1 is skipped, however the ranks cross and whichever micro-batch holds a NaN."""
    first, second = run_ranks(one_bad, way, counts, bad, scaled)
    expected = one_bad_by_hand(counts, bad)
    assert (first["steps"], first["skips"]) == (second["steps"], second["skips"]) == (11, 1)
    assert first["parameters"] == second["parameters"] == pytest.approx(expected, rel=1e-12, abs=1e-14)


def one_bad_by_hand(counts: tuple[int, int], bad: tuple[int, int]) -> list[float]:
    model, both = Tower(), data(counts)
    for number in range(max(counts)):
        group = [loader[number] for loader in both if number < len(loader)]
        if number == bad[1]:
            continue
        loss = torch.stack([model(x).square().sum() for x, _, _ in group]).sum() / (SIZE * len(group))
        gradients = torch.autograd.grad(loss, tuple(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LEARNING_RATE * gradient
    return numbers(model)


def found_in_step(way: str, policy: str) -> tuple[str, list[int]]:
    model, forwards = Tower(), [0]
    counts = (5, 3) if policy == "replay" else (4, 4)
    loader = data(counts)[idist.get_rank()]
    if idist.get_rank() == 0:
        loader[2][1][0] = float("inf")  # a target: features stay finite, and so do the other rank's losses

    def forward(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
        forwards[0] += 1
        return clip(model, micro_batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    trainer = create_trainer(
        wrap(model, way),
        optimizer,
        forward,
        options=UpdateOptions(reduction=way, uneven=policy),
        accumulation_steps=len(data((4, 4))[0]),
    )
    with pytest.raises(NonFiniteError) as caught:
        trainer.run(loader, max_epochs=1)
    return str(caught.value), [forwards[0], int(model.calls)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["replay", "shortest"])
def test_a_value_that_is_not_finite_is_found_in_step(policy: str, way: str) -> None:
    """The search runs forward equally often on all ranks, so its collectives meet; it ends with the same error on each."""
    first, second = run_ranks(found_in_step, way, policy)
    assert first[0] == second[0]
    assert "(rank 0, micro-batch 3 of 4: inf in the micro-batch itself" in first[0]
    assert first[1][0] == second[1][0] == 8


# --- what is refused ---


class OnHost(nn.SyncBatchNorm):
    """Torch's own takes no tensors of the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def synchronised(policy: str, counts: tuple[int, int], sized: bool) -> Any:
    lines = messages_from_here()
    model = nn.Sequential(OnHost(cuts.FEATURES), nn.Linear(cuts.FEATURES, 1)).double()
    fetched: list[int] = []

    def micro_batches() -> Any:
        for micro_batch in data(counts)[idist.get_rank()]:
            fetched.append(1)
            yield micro_batch

    class Sized(cuts.Unsized):
        def __init__(self) -> None:
            super().__init__([])

        def __iter__(self) -> Any:
            return micro_batches()

        def __len__(self) -> int:
            return counts[idist.get_rank()]

    class Stream(cuts.Unsized):
        def __iter__(self) -> Any:
            return micro_batches()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, cuts.forward, options=UpdateOptions(reduction="explicit", uneven=policy))
    try:
        trainer.run(Sized() if sized else Stream([]), max_epochs=2)
    except ValueError as error:
        return str(error), len(fetched)
    return trainer.state.num_steps, lines


@pytest.mark.parametrize("fewest", [2, 0])
def test_synchronised_norms_with_unequal_lengths_are_refused(fewest: int) -> None:
    """Before the first batch, in one line that names both numbers and what to do."""
    first, second = run_ranks(synchronised, "all", (3, fewest), True)
    assert first == second
    message, fetched = first
    assert fetched == 0
    assert f"rank 0: 3, rank 1: {fewest}" in message
    assert "SyncBatchNorm" in message
    assert "uneven='replay'" in message
    assert "\n" not in message


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "steps"), [("replay", 6), ("shortest", 4)])
def test_synchronised_norms_with_a_policy_are_taken(policy: str, steps: int) -> None:
    """Ranks that stay in step are refused nothing."""
    assert [result[0] for result in run_ranks(synchronised, policy, (3, 2), True)] == [steps] * 2


@pytest.mark.slow
def test_synchronised_norms_with_equal_lengths_are_taken() -> None:
    """By default, too."""
    assert [result[0] for result in run_ranks(synchronised, "all", (3, 3), True)] == [6] * 2


@pytest.mark.slow
def test_synchronised_norms_without_lengths_are_warned_about() -> None:
    """Once in a run, on rank 0."""
    first, second = run_ranks(synchronised, "all", (3, 3), False)
    assert first[0] == second[0] == 6
    assert second[1] == []
    assert len([line for line in first[1] if "SyncBatchNorm" in line and "uneven='replay'" in line]) == 1


def refused_with_recovery() -> str:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="on_out_of_memory must be 'raise' with uneven='replay'") as caught:
        create_trainer(
            model, optimizer, clip, options=UpdateOptions(reduction="explicit", uneven="replay", on_out_of_memory="skip")
        )
    return str(caught.value)


def test_dropping_a_micro_batch_is_refused_for_ranks_in_step() -> None:
    """A rank that drops one is a forward behind the others."""
    for message in run_ranks(refused_with_recovery):
        assert "\n" not in message


# --- what it costs ---


def collectives(policy: str, sized: bool, accumulation_steps: int) -> list[int]:
    model = Tower()
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        lambda model, micro_batch: ForwardOutput(model(micro_batch[0]).sum(), SIZE),
        options=UpdateOptions(reduction="explicit", uneven=policy),
        accumulation_steps=accumulation_steps,
    )
    counts: list[int] = []
    with count_traffic() as traffic:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: counts.append(len(traffic.collectives)))
        loader = data((6, 6))[idist.get_rank()]
        trainer.run(loader if sized else cuts.Unsized(loader), max_epochs=1)
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "sized", "accumulation_steps", "expected"),
    [
        ("all", True, 1, 1),
        ("all", False, 2, 1),
        ("replay", True, 2, 1),
        ("replay", False, 1, 2),
        ("shortest", True, 2, 1),
        ("shortest", False, 1, 1),
        ("shortest", False, 2, 2),
    ],
)
def test_ranks_in_step_cost_a_collective_only_without_lengths(
    policy: str, sized: bool, accumulation_steps: int, expected: int
) -> None:
    """After the first applied update an update has its one collective; one more says who has how many micro-batches."""
    for counts in run_ranks(collectives, policy, sized, accumulation_steps):
        assert counts == [expected] * (6 // accumulation_steps - 1)


# --- evaluation ---


def evaluate(policy: str, way: str) -> Any:
    model = Tower()
    loader = data((3, 2))[idist.get_rank()]

    def forward(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
        torch.rand(())
        evaluator.state.carried["forwards"] = evaluator.state.carried.get("forwards", 0) + 1
        return clip(model, micro_batch)

    evaluator = create_evaluator(wrap(model, way), forward, uneven=policy)
    torch.manual_seed(1)
    try:
        metrics = dict(evaluator.run(loader).metrics)
    except ValueError as error:
        return str(error)
    return metrics, evaluator.state.carried["forwards"], float(torch.rand(())), int(model.calls)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["replay", "shortest"])
def test_evaluation_in_step(policy: str, way: str) -> None:
    """3 and 2 micro-batches whose forward gathers features: what counts is summed, and a placeholder leaves no trace."""
    zero, one = data((3, 2))
    rounds = [*pairs(zero, one), *([[(zero[2], True), (one[1], False)]] if policy == "replay" else [])]
    expected = by_hand([rounds])["losses"][0]
    for rank, (metrics, carried, draw, calls) in enumerate(run_ranks(evaluate, policy, way)):
        own = 2 if policy == "shortest" else 3 - rank
        assert metrics["loss"] == pytest.approx(expected, rel=1e-13)
        assert metrics["samples"] == 1.0
        assert (carried, calls, draw) == (own, own, draw_after(own))


def test_evaluation_of_unequal_shards_can_be_an_error() -> None:
    """On all ranks, instead of a hang."""
    first, second = run_ranks(evaluate, "error", "explicit")
    assert first == second
    assert "uneven='error', got micro-batch 3 on some ranks only" in first
    assert "\n" not in first


def epoch_ended_early(epoch_length: int | None) -> list[float]:
    """Numbers of the micro-batches that were trained on, of a loader that continues where it was in the second epoch."""

    class Stream:
        def __init__(self) -> None:
            self.numbers = map(float, range(10**6))

        def __iter__(self) -> Any:
            return (torch.full((1, 2), number) for number in self.numbers)

    seen: list[float] = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(x[0, 0].item())
        return model(x).sum()

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(reduction="explicit"))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.terminate_epoch)
    trainer.run(Stream(), max_iters=6, epoch_length=epoch_length)
    return seen


@pytest.mark.slow
def test_what_an_epoch_that_ends_early_reads_ahead() -> None:
    """Nothing with an `epoch_length`; without one each rank has read the micro-batch by which it tells that it has more."""
    numbers = [float(number) for number in range(7)]
    assert run_ranks(epoch_ended_early, 100) == [numbers[:6]] * 2
    without, other = run_ranks(epoch_ended_early, None)
    assert without == other
    assert len(set(numbers) - set(without)) == 1
