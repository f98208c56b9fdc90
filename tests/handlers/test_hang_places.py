"""A rank that hangs is named by all ranks, wherever it hangs and however its model crosses the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import cuts
from ignite_train import ForwardOutput, Trainer, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, HangWatch, Validation
from test_failures import TIMEOUT, Board, Clock, Group, Loader, loop_for_ever, see_a_hang, until
from tiers import nightly, slow
from update_options import with_options

WAYS = ("buffers", "static graph", "fsdp", "dtensor", "handle", "replicas")
PLACES = ("loader", "handler", "forward", "backward", "evaluator", "save", "last save")
IN_THE_GATE = {("buffers", "loader"), ("replicas", "save")}
COVERING = {
    *(("buffers", place) for place in ("handler", "forward", "evaluator", "save")),
    *(("static graph", "loader"), ("static graph", "backward"), ("fsdp", "handler"), ("fsdp", "last save")),
    *(("dtensor", "loader"), ("dtensor", "evaluator"), ("handle", "loader"), ("replicas", "forward"), ("replicas", "backward")),
}


def make(way: str, forward: Callable[..., Any]) -> tuple[Trainer, nn.Module]:
    """A trainer of a model with running statistics that crosses the ranks in this way, and the model."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(cuts.FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    if way in ("buffers", "static graph"):
        model = DistributedDataParallel(model, static_graph=way == "static graph")
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"reduction": "explicit"} if way in ("dtensor", "handle", "replicas") else {}
    return create_trainer(model, optimizer, forward, **with_options(protect=False, **options)), model


def hang(board: Board, way: str, place: str) -> None:
    """Rank 1 hangs at this place in update 3, or after it."""
    rank = idist.get_rank()

    def here(name: str, *, when: bool = True) -> None:
        if rank == 1 and name == place and when:
            board.write("hangs", rank)
            loop_for_ever()

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        third = trainer.state.iteration == 3
        here("forward" if model.training else "evaluator", when=third)
        if way == "dtensor":
            spread(micro_batch[0])
        if way == "handle":
            handle = torch.distributed.all_reduce(torch.zeros(3), async_op=True)
            handle.wait()
        output = cuts.forward(model, micro_batch)
        if model.training and third:
            output.loss.register_hook(lambda _gradient: here("backward"))
        return output

    def spread(tensor: Tensor) -> Tensor:
        """Functional collectives, as a layer has whose weights are divided over the ranks."""
        return DTensor.from_local(tensor, init_device_mesh("cpu", (2,)), [Shard(0)]).full_tensor()

    trainer, model = make(way, forward)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), here, "handler")
    samples = cuts.cut(cuts.samples(), [8] * 5)
    evaluator = create_evaluator(model, forward)
    Validation(evaluator, samples[:2]).attach(trainer, Events.ITERATION_COMPLETED(once=3))
    if "save" in place:
        checkpoint = Checkpoint(board.directory / "checkpoints", every=1 if place == "save" else 100)
        hang_on_the_disk(checkpoint, lambda: here(place, when=trainer.state.iteration >= 3))
        checkpoint.attach(trainer)
    watch = HangWatch(timeout_seconds=TIMEOUT, first_timeout_seconds=20.0)
    clock = Clock(board, [0, 1], watch)
    assert clock.watch is watch
    watch.attach(trainer, evaluator=evaluator)
    trainer.run(Loader(samples, lambda index: here("loader", when=index == 2)), max_epochs=1)


def hang_on_the_disk(checkpoint: Checkpoint, reach: Callable[[], None]) -> None:
    """The thread that writes the files of a checkpoint gets there."""
    disk = checkpoint.saver.directory.disk
    write = disk.write

    def hold(*arguments: Any) -> None:
        if threading.current_thread().name == "Checkpoint":
            reach()
        write(*arguments)

    disk.write = hold  # type: ignore[method-assign]


def cells() -> list[Any]:
    """Each way with each place: two in the gate, a dozen more that have each of both at least once, and the others."""
    tiers = {cell: slow if cell in COVERING else nightly for cell in product(WAYS, PLACES) if cell not in IN_THE_GATE}
    return [tiers[cell](*cell) if cell in tiers else cell for cell in product(WAYS, PLACES)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "place"), cells())
def test_a_rank_that_hangs_is_named_by_all(tmp_path: Path, way: str, place: str) -> None:
    """Both ranks say within the timeout that rank 1 is behind, and end; not before."""
    with Group(tmp_path, hang, way, place) as group:
        group.board.wait_for("hangs")
        until(lambda: "loop_for_ever" not in group.board.wait_for("place.0"), "rank 0 is seen")
        see_a_hang(group, [0, 1], [0, 1])
        assert [group.status(rank, 60.0) for rank in (0, 1)] == [1, 1]
        for rank in (0, 1):
            assert "training hangs: no rank has moved for more than 0.4 s; rank 1 is behind; " in group.stderr(rank)
            assert "in loop_for_ever (test_failures.py:" in group.stderr(rank)


def sum_alone(board: Board) -> None:
    """Rank 0 alone sums one number after the first epoch; rank 1 comes to a sum of this library meanwhile."""
    trainer, _ = make("replicas", cuts.forward)
    if idist.get_rank() == 0:
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: idist.all_reduce(torch.ones(1, dtype=torch.float64)))
    watch = HangWatch(timeout_seconds=TIMEOUT, first_timeout_seconds=20.0)
    Clock(board, [0, 1], watch)
    watch.attach(trainer)
    trainer.run(cuts.cut(cuts.samples(), [8] * 5), max_epochs=2)


@pytest.mark.slow
def test_ranks_that_wait_for_other_collectives_in_one_function_of_torch_hang(tmp_path: Path) -> None:
    """Each rank is at a place of its own, which names who asked, so that the watch does not take them for one collective."""
    with Group(tmp_path, sum_alone) as group:
        for rank, asked in enumerate(("asked by <lambda> (test_hang_places.py:", "asked by _take_up_stops (trainer.py:")):
            until(lambda rank=rank, asked=asked: asked in group.board.wait_for(f"place.{rank}"), f"rank {rank} waits")
        see_a_hang(group, [0, 1], [0, 1])
        assert [group.status(rank, 60.0) for rank in (0, 1)] == [1, 1]
        for rank in (0, 1):
            assert "training hangs: no rank has moved for more than 0.4 s; no rank is ahead of the others; " in group.stderr(
                rank
            )
            assert "asked by <lambda> (test_hang_places.py:" in group.stderr(rank)
