"""A None from the loader is a micro-batch without samples, on request: it keeps its place and has no weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import cuts
from bits import bit_by_bit
from ignite_train import ForwardOutput, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint
from ranks import run_ranks
from update_options import with_options

PLACES = (  # which micro-batches each rank has, by their number; None where it has an empty one
    (0, None, None, None, 1, 2),
    (None, 3, None, None, None, 4, None, 5),
)


def batches(places: Any) -> list[Any]:
    """Micro-batches of 2, 3, 1, 4, 2 and 3 samples."""
    made = cuts.cut(cuts.samples(), [2, 3, 1, 4, 2, 3])
    return [None if place is None else made[place] for place in places]


def make(model: nn.Module, **arguments: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    defaults: dict[str, Any] = {"accumulation_steps": 2, "none_is_empty": True}
    return create_trainer(model, optimizer, cuts.forward, **with_options(**(defaults | arguments)))


def flat(model: nn.Module) -> list[float]:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def by_hand(groups: list[list[int]]) -> list[float]:
    """The loop over what the groups of all ranks hold; a group of nothing is left out."""
    model = cuts.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for group in groups:
        if group:
            parts = [cuts.forward(model, one) for one in batches(group)]
            optimizer.zero_grad()
            (sum(part.loss for part in parts) / sum(part.sample_size for part in parts)).backward()
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_it_keeps_its_place(sized: bool) -> None:
    """A group has as many places as before; one of nothing but None is an update that is skipped for want of samples."""
    model = cuts.linear()
    trainer = make(model)
    loader: Any = batches(PLACES[0])
    state = trainer.run(loader if sized else cuts.Unsized(loader))
    assert (state.iteration, state.num_steps, state.num_skipped, state.num_micro_batches) == (3, 2, 1, 3)
    assert flat(model) == pytest.approx(by_hand([[0], [], [1, 2]]), rel=1e-12)


def test_a_group_of_none_at_the_end_is_an_update_too() -> None:
    """The number of updates does not depend on what is empty."""
    trainer = make(cuts.linear())
    state = trainer.run(batches((0, None, None)))
    assert (state.iteration, state.num_skipped) == (2, 1)


def test_a_stream_does_not_end_there() -> None:
    """With `epoch_length`, and a group of nothing but None."""
    trainer = make(cuts.linear())
    state = trainer.run(cuts.Unsized(batches((0, None, None, None))), epoch_length=3, max_epochs=2)
    assert (state.iteration, state.num_steps, state.num_skipped) == (6, 3, 3)


def test_an_update_on_demand_takes_it() -> None:
    """As a loader's."""
    trainer = make(cuts.linear())
    record = trainer.update(batches((0, None)))
    assert (record.applied, record.num_micro_batches) == (True, 1)
    assert trainer.update([None]).skipped_reason == "no_samples"


def test_without_the_request_it_is_an_error() -> None:
    """Since it is mostly a mistake of a `collate_fn`; the error names the request."""
    with pytest.raises(TypeError, match="none_is_empty=True"):
        make(cuts.linear(), none_is_empty=False).run(batches(PLACES[0]))


@pytest.mark.parametrize("updates", [1, 2])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, updates: int) -> None:
    """Stopped before or after the group of nothing."""

    def run(directory: Path, *limits: int) -> Any:
        for limit in limits:
            model = cuts.linear()
            trainer = make(model)
            Checkpoint(directory, every=1).attach(trainer)
            trainer.run(batches(PLACES[0]), max_iters=limit)
        return bit_by_bit(model.state_dict()), trainer.state.num_micro_batches

    assert run(tmp_path / "a", updates, 5) == run(tmp_path / "b", 5)


def test_in_a_single_process_a_synchronised_norm_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """So it is taken, and nothing is said of a loader without a length."""
    model = nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2).eval(), nn.Linear(2, 1)).double()
    make(model).run(cuts.Unsized(batches(PLACES[0])))
    assert not any("SyncBatchNorm" in line for line in caplog.messages)


def on_rank(way: str, uneven: str, sized: bool) -> Any:
    model = cuts.linear()
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = UpdateOptions(none_is_empty=True, reduction=way, uneven=uneven)  # type: ignore[arg-type]
    trainer = create_trainer(wrapped, optimizer, cuts.forward, accumulation_steps=2, options=options)
    loader: Any = batches(PLACES[idist.get_rank()])
    state = trainer.run(loader if sized else cuts.Unsized(loader))
    return flat(model), (state.iteration, state.num_steps, state.num_skipped)


def all_on_rank(way: str) -> Any:
    return [on_rank(way, uneven, sized) for uneven in ("all", "shortest", "replay") for sized in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit", "fsdp"])
def test_ranks_stay_in_step(way: str) -> None:
    """One of them may have nothing where the other has something, or all of them; also where a rank has more places."""
    whole, shortest = [[0, 3], [], [1, 2, 4], [5]], [[0, 3], [], [1, 2, 4]]
    expected = [by_hand(groups) for groups in (whole, shortest, whole)]
    for outcomes in run_ranks(all_on_rank, way):
        for index, (parameters, counters) in enumerate(outcomes):
            assert parameters == pytest.approx(expected[index // 2], rel=1e-12), index
            assert counters == ((3, 2, 1) if index // 2 == 1 else (4, 3, 1))


def ends_with_nothing(way: str, uneven: str) -> tuple[int, int, int]:
    """The last update of each epoch has nothing on any rank, and only the ranks together know that it is the last."""
    model = cuts.linear()
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    options = UpdateOptions(none_is_empty=True, reduction=way, uneven=uneven)  # type: ignore[arg-type]
    trainer = create_trainer(wrapped, torch.optim.SGD(model.parameters(), lr=0.05), cuts.forward, options=options)
    state = trainer.run(cuts.Unsized(batches((idist.get_rank(), None))), max_epochs=2)
    return state.iteration, state.num_steps, state.num_skipped


def all_that_end_with_nothing() -> list[tuple[int, int, int]]:
    return [ends_with_nothing(way, uneven) for way in ("ddp", "explicit") for uneven in ("all", "replay")]


@pytest.mark.slow
def test_an_update_of_nothing_on_all_ranks_ends_the_epoch() -> None:
    """That no rank has more data, or that one asks for a stop, travels with it as with any other update."""
    assert run_ranks(all_that_end_with_nothing, timeout_seconds=120.0) == [[(4, 2, 2)] * 4] * 2


def refused() -> str:
    model = nn.Sequential(nn.Linear(3, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match="SyncBatchNorm") as caught:
        make(model, reduction="explicit")
    return str(caught.value)


@pytest.mark.slow
def test_a_forward_that_waits_for_all_ranks_is_refused() -> None:
    """It would hang where one rank has nothing; the message names what keeps ranks in step."""
    assert all("uneven='replay'" in message for message in run_ranks(refused))


def scored(uneven: str) -> int:
    """How many micro-batches the forward of an evaluation has seen, with a None among them."""
    model, seen = cuts.linear(), list[Any]()

    def forward(model: Any, batch: Any) -> ForwardOutput:
        seen.append(batch)
        return cuts.forward(model, batch) if batch is not None else ForwardOutput(model.weight.sum() * 0.0, 0)

    shortest = min(map(len, PLACES))
    create_evaluator(model, forward, uneven=uneven).run(batches(PLACES[idist.get_rank()])[:shortest])  # type: ignore[arg-type]
    return len(seen)


def all_scored() -> list[int]:
    return [scored(uneven) for uneven in ("all", "replay", "shortest", "error")]


@pytest.mark.slow
def test_an_evaluator_does_not_take_it_for_the_end() -> None:
    """In whatever way ranks stay in step; here they have as many micro-batches."""
    assert run_ranks(all_scored) == [[min(map(len, PLACES))] * 4] * 2
