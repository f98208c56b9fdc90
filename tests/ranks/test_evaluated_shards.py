"""A sharded model is trained as if it had not been evaluated in between: no evaluation leaves whole parameters behind."""

from __future__ import annotations

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cuts
from ignite_train import ForwardOutput, TrainEvents, create_evaluator, create_trainer
from ignite_train.handlers import OptimizerModes, Validation
from ranks import run_ranks
from schedule_free import ScheduleFreeSGD

SIZES = [[4, 3, 5, 2], [4, 2], []]  # of each rank's micro-batches
EVALUATED = [[3, 4], [2], [5]]


class TwoLayers(nn.Module):
    """The root has parameters of its own besides those of its layers; these are whole after a forward without backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) * self.scale.mean()
        return out


def forward(model: nn.Module, micro_batch: cuts.Sample) -> ForwardOutput:
    x, y, _ = micro_batch
    return ForwardOutput((model(x).squeeze(1) - y).square().sum(), len(x))


def train(optimizer_name: str, *, validates: bool, reshards: bool | None) -> list[float]:
    """The weights after two epochs, as the optimizer has them, with or without evaluations before and after each step."""
    torch.manual_seed(0)
    model = TwoLayers().double()
    fully_shard(model.layers[0], reshard_after_forward=reshards)
    fully_shard(model, reshard_after_forward=reshards)
    kind = ScheduleFreeSGD if optimizer_name == "with modes" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.05)
    trainer, evaluator = create_trainer(model, optimizer, forward), create_evaluator(model, forward)
    if isinstance(optimizer, ScheduleFreeSGD):
        OptimizerModes(optimizer).attach(trainer, evaluator=evaluator)
    if validates:
        Validation(evaluator, cuts.shard(EVALUATED), sanity=0).attach(
            trainer, TrainEvents.GRADIENTS_READY | Events.ITERATION_COMPLETED
        )
    trainer.run(cuts.shard(SIZES), max_epochs=2)
    whole = [one.full_tensor() for one in optimizer.param_groups[0]["params"] if isinstance(one, DTensor)]
    assert len(whole) == 5
    assert all(isinstance(one, DTensor) for one in model.parameters())
    return torch.cat([one.detach().flatten() for one in whole]).tolist()


def train_twice(optimizer_name: str, reshards: bool | None) -> tuple[list[float], list[float]]:
    plain, validated = (train(optimizer_name, validates=one, reshards=reshards) for one in (False, True))
    assert idist.get_world_size() > 1
    return plain, validated


@pytest.mark.slow
@pytest.mark.parametrize("reshards", [None, False])
@pytest.mark.parametrize("optimizer_name", ["plain", "with modes"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_evaluations_leave_no_trace_in_a_sharded_run(world_size: int, optimizer_name: str, reshards: bool | None) -> None:
    """A rank with fewer micro-batches, or none, trains on placeholders after an evaluation too; the bits are the same."""
    for plain, validated in run_ranks(train_twice, optimizer_name, reshards, world_size=world_size, timeout_seconds=60.0):
        assert plain == validated
