"""However the samples are cut, over micro-batches and ranks, an update is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ignite.engine import Events
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cuts
from ignite_train import Trainer, UpdateOptions, create_trainer
from ranks import run_ranks
from tiers import one_in

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}


WAYS = ["ddp", "auto", "explicit", "fsdp"]  # auto: a DDP that is small enough for the explicit way


def train(loader: Any, accumulation_steps: Any, *, dtype: torch.dtype, epochs: int, way: str = "ddp") -> dict[str, Any]:
    """Runs `epochs` over `loader` on this rank; what came of it, in plain numbers."""
    model = cuts.linear(dtype)
    several = idist.get_world_size() > 1
    wrapped: Any = DistributedDataParallel(model) if several and way in ("ddp", "auto") else model
    if several and way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    trainer = create_trainer(
        wrapped,
        optimizer,
        cuts.forward,
        accumulation_steps=accumulation_steps,
        options=UpdateOptions(reduction=way if several else "auto"),
    )
    outputs = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def record(engine: Trainer) -> None:
        outputs.append(engine.state.output)

    trainer.run(loader, max_epochs=epochs)
    weight, bias = (p.full_tensor() if isinstance(p, DTensor) else p for p in (model.weight.detach(), model.bias.detach()))
    return {
        "weight": weight.double().squeeze(0),
        "bias": bias.item(),
        "losses": [output.loss for output in outputs],
        "sizes": [output.sample_size for output in outputs],
        "norms": [output.grad_norm for output in outputs],
        "samples": [output.logs["samples"] for output in outputs],
        "steps": trainer.state.num_steps,
    }


def train_rank(shards: Sequence[Any], sized: bool, accumulation_steps: Any, options: dict[str, Any]) -> dict[str, Any]:
    """`train` on this rank's shard."""
    shard = shards[idist.get_rank()]
    return train(shard if sized else cuts.Unsized(shard), accumulation_steps, **options)


def train_in_each_dtype(shards: Sequence[Any], sized: bool, accumulation_steps: Any, way: str) -> list[dict[str, Any]]:
    """`train_rank` in each dtype, one after the other in the same processes."""
    return [train_rank(shards, sized, accumulation_steps, {"dtype": dtype, "epochs": 5, "way": way}) for dtype in TOLERANCES]


def assert_matches(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Parameters, losses, norms within the relative tolerance; sample sizes exactly."""
    torch.testing.assert_close(result["weight"], expected["weight"], rtol=tolerance, atol=tolerance)
    assert result["bias"] == pytest.approx(expected["bias"], rel=tolerance, abs=tolerance)
    assert result["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert result["norms"] == pytest.approx(expected["norms"], rel=tolerance, abs=tolerance)
    assert result["sizes"] == expected["sizes"]


def assert_same_on_both(results: list[dict[str, Any]]) -> None:
    """Bitwise, down to the reported numbers."""
    first, second = results
    assert torch.equal(first.pop("weight"), second.pop("weight"))
    assert first == second


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("sizes", "accumulation_steps"),
    [
        pytest.param([64], 1, id="1x64"),
        pytest.param([16] * 4, 4, id="4x16"),
        pytest.param([5, 11, 1, 47], 4, id="ragged"),
        pytest.param([30, 0, 34], 3, id="one empty"),
        pytest.param([0, 64], 2, id="first empty"),
        pytest.param([20, 20, 24], 100, id="fewer than accumulation_steps"),
    ],
)
def test_one_process(sizes: list[int], accumulation_steps: int, dtype: torch.dtype) -> None:
    """Five updates on the same 64 samples end at the closed form's parameters, however the 64 are cut."""
    data = cuts.samples()
    result = train(cuts.cut(data, sizes), accumulation_steps, dtype=dtype, epochs=5)
    assert_matches(result, cuts.reference([data] * 5), TOLERANCES[dtype])
    assert result["samples"] == [64.0] * 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sized", one_in(2, [True, False]), ids=["sized", "unsized"])
@pytest.mark.parametrize(
    ("sizes", "accumulation_steps"),
    [
        pytest.param([[16, 16], [16, 16]], 2, id="2x2x16"),
        pytest.param([[10, 3, 19], [1, 7, 9, 5, 10]], 5, id="3 and 5 micro-batches"),
        pytest.param([[], [20, 20, 24]], 3, id="rank 0 without data"),
        pytest.param([[64], []], 1, id="rank 1 without data"),
        pytest.param([[0, 30], [34]], 2, id="an empty micro-batch"),
    ],
)
def test_two_ranks(sizes: list[list[int]], accumulation_steps: int, sized: bool, way: str) -> None:
    """Two ranks make the updates of one process, with its norms, whatever each has and the way of the reduction; both alike."""
    data = cuts.samples()
    shards = [cuts.cut(data, sizes[0]), cuts.cut(data, sizes[1], start=sum(sizes[0]))]
    for tolerance, *results in zip(
        TOLERANCES.values(), *run_ranks(train_in_each_dtype, shards, sized, accumulation_steps, way), strict=True
    ):
        for result in results:
            assert_matches(result, cuts.reference([data] * 5), tolerance)
            assert result["samples"] == [64.0] * 5
        assert_same_on_both(results)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_two_ranks_of_unequal_length(sized: bool, way: str) -> None:
    """Rank 0 has 3 micro-batches, rank 1 has 5, two to an update: three updates an epoch, each the mean of what was there."""
    data = cuts.samples()
    shards = [cuts.cut(data, [7, 9, 4]), cuts.cut(data, [10, 6, 8, 12, 8], start=20)]
    groups = [shards[0][0:2] + shards[1][0:2], shards[0][2:3] + shards[1][2:4], shards[1][4:5]]
    merged = [tuple(torch.cat(parts) for parts in zip(*group, strict=True)) for group in groups]
    results = run_ranks(train_rank, shards, sized, 2, {"dtype": torch.float64, "epochs": 2, "way": way})
    for result in results:
        assert_matches(result, cuts.reference(merged * 2), 1e-12)
        assert result["steps"] == 6
    assert_same_on_both(results)


@pytest.mark.slow
def test_mean_of_micro_batch_means() -> None:
    """A bare scalar loss makes the update the mean of the micro-batch means, over ranks too."""
    data = cuts.samples()
    shards = [cuts.cut(data, [4, 20]), cuts.cut(data, [10, 30], start=24)]
    results = run_ranks(train_rank_means, shards)
    model = cuts.linear()
    for _ in range(3):
        loss = torch.stack([cuts.mean_forward(model, micro_batch) for shard in shards for micro_batch in shard]).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= cuts.LEARNING_RATE * gradient
    for weight, losses, size in results:
        torch.testing.assert_close(weight, model.weight.detach(), rtol=1e-12, atol=1e-12)
        assert losses[-1] == pytest.approx(loss.item(), rel=1e-12)
        assert size == 4


def train_rank_means(shards: Sequence[Any]) -> tuple[torch.Tensor, list[float], float]:
    """Three updates on bare mean losses."""
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    trainer = create_trainer(DistributedDataParallel(model), optimizer, cuts.mean_forward, accumulation_steps=2)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output.loss))
    trainer.run(shards[idist.get_rank()], max_epochs=3)
    return model.weight.detach(), losses, trainer.state.output.sample_size


partition = st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(lambda sizes: sum(sizes) > 0)
accumulations = st.one_of(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3))


def groups_of(micro_batches: Sequence[Any], accumulation_steps: Any, epoch: int) -> list[list[Any]]:
    """The groups of one epoch, by slicing."""
    if isinstance(accumulation_steps, list):
        accumulation_steps = accumulation_steps[min(epoch, len(accumulation_steps) - 1)]
    return [list(micro_batches[i : i + accumulation_steps]) for i in range(0, len(micro_batches), accumulation_steps)]


def expected_updates(shards: Sequence[Sequence[Any]], accumulation_steps: Any, epochs: int) -> list[Any]:
    """All samples of each update, over the ranks; updates in which nobody has a sample are left out."""
    updates = []
    for epoch in range(epochs):
        grouped = [groups_of(shard, accumulation_steps, epoch) for shard in shards]
        for index in range(max(map(len, grouped))):
            members = [micro_batch for groups in grouped for micro_batch in (groups[index] if index < len(groups) else [])]
            merged = tuple(torch.cat(parts) for parts in zip(*members, strict=True))
            if len(merged[0]):
                updates.append(merged)
    return updates


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(sizes=partition, accumulation_steps=accumulations, seed=st.integers(0, 1000))
def test_any_cut_in_one_process(sizes: list[int], accumulation_steps: Any, seed: int) -> None:
    """For any cut, weights and accumulation, two epochs end where the closed form ends."""
    micro_batches = cuts.cut(cuts.samples(sum(sizes), seed), sizes)
    result = train(micro_batches, accumulation_steps, dtype=torch.float64, epochs=2)
    expected = cuts.reference(expected_updates([micro_batches], accumulation_steps, 2))
    kept = [index for index, size in enumerate(result["sizes"]) if size > 0]
    result |= {key: [result[key][index] for index in kept] for key in ("losses", "norms", "sizes")}
    assert_matches(result, expected, 1e-12)
    assert result["steps"] == len(expected["sizes"])


def train_many(cases: Sequence[tuple[Any, bool, Any]], way: str) -> list[dict[str, Any]]:
    """Several trainings in the same processes."""
    return [
        train_rank(shards, sized, steps, {"dtype": torch.float64, "epochs": 2, "way": way}) for shards, sized, steps in cases
    ]


drawn_cases = given(
    drawn=st.lists(
        st.tuples(partition, st.data(), st.booleans(), accumulations, st.integers(0, 1000)).filter(lambda case: True),
        min_size=6,
        max_size=6,
    ),
    world_size=st.integers(2, 3),
    way=st.sampled_from(WAYS),
)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@drawn_cases
def test_any_cut_on_several_ranks(drawn: Any, world_size: int, way: str) -> None:
    """For any cut, weights, accumulation, number of ranks and division among them, so do several ranks, in each way."""
    check_on_several_ranks(drawn, world_size, way)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=150, deadline=None)
@drawn_cases
def test_any_cut_on_several_ranks_at_length(drawn: Any, world_size: int, way: str) -> None:
    """The same law, looked at for longer."""
    check_on_several_ranks(drawn, world_size, way)


def check_on_several_ranks(drawn: Any, world_size: int, way: str) -> None:
    """Trains all drawn cases in the same processes and compares each with its closed form."""
    cases, expectations = [], []
    for sizes, choose, sized, accumulation_steps, seed in drawn:
        micro_batches = cuts.cut(cuts.samples(sum(sizes), seed), sizes)
        owners = choose.draw(st.lists(st.integers(0, world_size - 1), min_size=len(sizes), max_size=len(sizes)))
        shards = [[m for m, o in zip(micro_batches, owners, strict=True) if o == rank] for rank in range(world_size)]
        cases.append((shards, sized, accumulation_steps))
        expectations.append(cuts.reference(expected_updates(shards, accumulation_steps, 2)))
    for results in run_ranks(train_many, cases, way, world_size=world_size):
        for result, expected in zip(results, expectations, strict=True):
            kept = [index for index, size in enumerate(result["sizes"]) if size > 0]
            result |= {key: [result[key][index] for index in kept] for key in ("losses", "norms", "sizes")}
            assert_matches(result, expected, 1e-12)
