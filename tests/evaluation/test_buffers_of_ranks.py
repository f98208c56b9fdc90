"""Buffers that differ from rank to rank, such as queues: an evaluation has rank 0's, and training continues with its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bits import bit_by_bit
from ignite_train import Evaluator, ForwardOutput, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, ModelSync, Validation
from ignite_train.model.micro_batch_rollback import content_of
from ignite_train.ranks.begin_alike import buffers_of_first_rank
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


KINDS: dict[str, Callable[[int], list[Tensor]]] = {
    "a view before its base": lambda rank: _views(rank)[::-1],
    "a view behind its base": lambda rank: _views(rank),
    "NaN": lambda _: [torch.full((4,), math.nan)],
    "ComplexHalf": lambda _: [torch.ones(4, dtype=torch.complex32)],
    "Float4": lambda _: [torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)],
    "transposed": lambda rank: [torch.arange(6.0).add(rank).view(2, 3).t()],
    "meta": lambda _: [torch.ones(4, device="meta")],
}


def _views(rank: int) -> list[Tensor]:
    base = torch.full((4,), 1.0 + rank)
    return [base, base[:2]]


def _evaluate_with(kind: str) -> tuple[list[Any], list[Any], int]:
    """The buffers before an evaluation and after it, of which forward writes into the first where they are equal and NaN."""
    buffers = KINDS[kind](idist.get_rank())
    module = nn.Module()
    for number, buffer in enumerate(buffers):
        module.register_buffer(str(number), buffer)

    def bits() -> list[Any]:
        return [[] if one.is_meta else content_of(one).tolist() for one in buffers]

    before, copies, clone = bits(), list[Tensor](), Tensor.clone
    with patch.object(Tensor, "clone", lambda one: copies.append(one) or clone(one)), buffers_of_first_rank(module):
        within, num_copies = bits(), len(copies)
        if kind == "NaN":
            buffers[0][0] = 7.0
    assert within == _of_first_rank(kind)
    after = bits()
    if kind == "NaN":
        assert buffers[0][0] == 7.0, "a buffer that was the same keeps what is written into it"
        after = before
    return before, after, num_copies


def _of_first_rank(kind: str) -> list[Any]:
    return [[] if one.is_meta else content_of(one).tolist() for one in KINDS[kind](0)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_of_any_kind_are_as_before(kind: str) -> None:
    """Also those that share memory, and those whose values torch cannot compare; rank 0 copies none."""
    for rank, (before, after, num_copies) in enumerate(run_ranks(_evaluate_with, kind)):
        assert after == before
        assert rank > 0 or num_copies == 0
