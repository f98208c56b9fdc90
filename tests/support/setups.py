"""What several files of tests build their trainers of."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import cuts
from bits import bit_by_bit
from ignite_train import ForwardOutput, Trainer

__all__ = ["Batch", "InfiniteIn", "Setup", "summed_loss"]

Batch = tuple[Tensor, Tensor]


class Setup(NamedTuple):
    """A trainer and what it moves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    trainer: Trainer

    def contents(self) -> Any:
        """Parameters, moments and the trainer's own state, bit by bit."""
        return bit_by_bit([self.model.state_dict(), self.optimizer.state_dict(), self.trainer.state_dict()])


def summed_loss(model: nn.Module, batch: Batch) -> ForwardOutput:
    """The summed squared error, weighed by its samples."""
    x, y = batch
    return ForwardOutput(mse_loss(model(x), y, reduction="sum"), len(y), {"samples": len(y)})


class InfiniteIn:
    """A forward whose loss is infinite in some updates of its trainer."""

    def __init__(self, *updates: int) -> None:
        self.updates = updates
        self.trainer: Trainer | None = None

    def __call__(self, model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output = cuts.forward(model, micro_batch)
        assert self.trainer is not None
        return output._replace(loss=output.loss * math.inf) if self.trainer.state.iteration in self.updates else output
