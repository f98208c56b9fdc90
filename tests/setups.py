"""What the fixtures `build` and `micro_batches` give, for files of tests that name these types."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bits import bit_by_bit
from ignite_train import ForwardOutput, Trainer

__all__ = ["Batch", "Setup", "summed_loss"]

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
