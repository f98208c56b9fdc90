"""Buffers that differ from rank to rank, such as queues: an evaluation has rank 0's, and training continues with its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bits import bit_by_bit
from ignite_train import Evaluator, ForwardOutput, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, ModelSync, Validation
from ranks import run_ranks


class Queued(nn.Module):
    """Its loss in training depends on a queue of what this rank has seen; it counts its forwards in eval mode."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("queue", torch.full((4, 3), 1.0 + idist.get_rank()))
        if way == "explicit":  # DistributedDataParallel refuses one that is expanded
            self.register_buffer("expanded", torch.full((3,), 1.0 + idist.get_rank()).expand(2, 3))
        self.register_buffer("evaluated", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        if not self.training:
            self.evaluated += 1
            return (y - self.queue.mean()).square().sum()
        loss = (y @ self.queue.clone().T).square().sum() + (y - 1).square().sum()
        self.queue.copy_(torch.cat([self.queue[1:], y.detach()[:1]]))
        return loss


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x), sample_size=len(x))


def _train_on_this_rank(way: str, what: str, directory: Path | None = None, epochs: tuple[int, ...] = (3,)) -> Any:
    """The bits of the model and of its buffers after the last epoch, the evaluations that the rank counts, and its score."""
    data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * idist.get_rank() + one)) for one in range(5)]
    for max_epochs in epochs:
        model = Queued(way)
        wrapped = model if way == "explicit" else DistributedDataParallel(model, broadcast_buffers=way == "ddp")
        options = UpdateOptions(reduction="explicit") if way == "explicit" else None
        trainer = create_trainer(wrapped, torch.optim.SGD(model.parameters(), lr=0.01), forward, options=options)
        evaluator = create_evaluator(wrapped, forward)
        if what == "fails":
            evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: 1 // 0)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _, one=evaluator: _failing(one, data))
        elif what != "none":
            Validation(evaluator, data[:1]).attach(trainer)
        if what == "synced":
            ModelSync().attach(trainer, evaluator=evaluator)
        if directory is not None:
            Checkpoint(directory).attach(trainer)
        trainer.run(data, max_epochs=max_epochs)
    trained = {**model.state_dict()}
    evaluations = int(trained.pop("evaluated"))
    if what == "synced":  # which has statistics of its own
        trained = {name: one for name, one in trained.items() if "running" not in name}
    return bit_by_bit(trained), evaluations, evaluator.state.metrics.get("loss")


def _failing(evaluator: Evaluator, data: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        evaluator.run(data)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["validated", "synced", "fails"])
@pytest.mark.parametrize("way", ["explicit", "ddp without buffers", "ddp"])
def test_an_evaluation_changes_nothing_in_the_training(way: str, what: str) -> None:
    """The bits of each rank are those without it. What forward writes into a buffer in eval mode stays."""
    ranks, without = run_ranks(_train_on_this_rank, way, what), run_ranks(_train_on_this_rank, way, "none")
    for (trained, evaluations, score), (expected, _, _) in zip(ranks, without, strict=True):
        assert {name for name, bits in trained.items() if bits != expected[name]} == set()
        assert evaluations == (3 if what == "fails" else 4)  # one in the rehearsal
        assert score == ranks[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["explicit", "ddp without buffers", "ddp"])
def test_a_resumed_training_has_the_bits_of_an_uninterrupted_one(way: str, tmp_path: Path) -> None:
    whole = run_ranks(_train_on_this_rank, way, "validated", tmp_path / "whole", (3,))
    parts = run_ranks(_train_on_this_rank, way, "validated", tmp_path / "parts", (2, 3))
    assert [rank[0] for rank in parts] == [rank[0] for rank in whole]
