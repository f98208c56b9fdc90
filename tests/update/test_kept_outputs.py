"""What forward gives for single samples reaches the loop: of each micro-batch of the latest update, and of all ranks."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn

from ignite_train import ForwardContractError, ForwardOutput, Trainer, UpdateOptions, create_trainer, keep_outputs
from ranks import run_ranks

MicroBatch = tuple[Tensor, Tensor]


def micro_batch(*indices: int) -> MicroBatch:
    return torch.tensor(indices), torch.tensor([[float(index), 1.0] for index in indices])


def forward(model: nn.Module, batch: MicroBatch) -> ForwardOutput:
    indices, x = batch
    errors = model(x).squeeze(1)
    return ForwardOutput(errors.square().sum(), sample_size=len(x), outputs=(indices, errors))


def make(forward: Any = forward, **options: Any) -> Trainer:
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return create_trainer(model, optimizer, forward, options=UpdateOptions(reduction="explicit", **options), protect=False)


def numbers(outputs: list[Any]) -> list[tuple[list[int], list[float]]]:
    return [(indices.tolist(), errors.tolist()) for indices, errors in outputs]


def test_a_loop_reads_what_the_update_before_gave() -> None:
    """Detached, in the order of the micro-batches, until the next update; also one that was skipped."""
    trainer = make(on_nonfinite="skip")
    outputs = keep_outputs(trainer)
    assert outputs() == []
    with trainer.session():
        trainer.update([micro_batch(3, 5), micro_batch(0)])
        assert numbers(outputs()) == numbers(outputs(gathered=True)) == [([3, 5], [4.0, 6.0]), ([0], [1.0])]
        assert not any(errors.requires_grad for _, errors in outputs())
        trainer.update([])
        assert outputs() == []
        indices, x = micro_batch(7)
        record = trainer.update([(indices, x * float("inf"))])
        assert (record.applied, outputs()[0][0].tolist()) == (False, [7])


@pytest.mark.parametrize("way", ["skip", "split"])
def test_what_ran_out_of_memory_is_there_as_it_was_trained(way: str) -> None:
    """Not where it was dropped, and in halves where it was halved."""

    def crowded(model: nn.Module, batch: MicroBatch) -> ForwardOutput:
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError("too many samples")
        return forward(model, batch)

    trainer = make(crowded, on_out_of_memory=way)
    outputs = keep_outputs(trainer)
    with trainer.session():
        trainer.update([micro_batch(1), micro_batch(2, 3, 4, 5)])
    assert [indices for indices, _ in numbers(outputs())] == ([[1], [2, 3], [4, 5]] if way == "split" else [[1]])


def test_a_forward_without_outputs_is_told() -> None:
    """And another object in the place of the trainer is refused."""
    trainer = make(lambda model, batch: forward(model, batch)._replace(outputs=None))
    keep_outputs(trainer)
    with pytest.raises(ForwardContractError, match=r"keep_outputs needs what forward computed.*outputs=\(y_pred, y\)"):
        trainer.run([micro_batch(1)])
    with pytest.raises(TypeError, match="trainer must be a Trainer"):
        keep_outputs(nn.Linear(1, 1))  # type: ignore[arg-type]


def of_ranks() -> tuple[Any, Any]:
    trainer = make()
    outputs = keep_outputs(trainer)
    with trainer.session():
        trainer.update([micro_batch(3, 5), micro_batch(0)] if idist.get_rank() == 0 else [])
        uneven = numbers(outputs(gathered=True))
        trainer.update([micro_batch(idist.get_rank())])
    return uneven, [indices for indices, _ in numbers(outputs(gathered=True))]


@pytest.mark.slow
def test_all_ranks_may_read_those_of_all() -> None:
    """Rank by rank, also where one has none."""
    expected = [([3, 5], [4.0, 6.0]), ([0], [1.0])]
    assert run_ranks(of_ranks) == [(expected, [[0], [1]])] * 2
