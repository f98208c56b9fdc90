"""Buffers that get their shape in the first forward, as the observers of quantisation have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bits import bit_by_bit
from ignite_train import CheckpointError, create_trainer
from ignite_train.handlers import Checkpoint


class Observed(nn.Linear):
    """Notes the largest output of each channel."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("largest", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        now = out.detach().amax(0)
        self.largest = torch.maximum(self.largest, now) if self.largest.numel() else now
        return out - self.largest


def start(directory: Path, max_epochs: int, *, runs_forward: bool) -> nn.Module:
    """One start of the script."""
    torch.manual_seed(0)
    model, data = Observed(), [torch.randn(4, 3, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    if runs_forward:
        model(data[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
    Checkpoint(directory).attach(trainer)
    trainer.run(data, max_epochs=max_epochs)
    return model


def test_a_resume_says_that_forward_must_run_once(tmp_path: Path) -> None:
    start(tmp_path, 1, runs_forward=False)
    with pytest.raises(CheckpointError, match=r"largest .* of shape .* and run its forward once before create_trainer"):
        start(tmp_path, 2, runs_forward=False)


def test_a_script_that_runs_forward_once_resumes(tmp_path: Path) -> None:
    """What that forward leaves in the buffer does not matter."""
    start(tmp_path / "resumed", 1, runs_forward=True)
    resumed = start(tmp_path / "resumed", 2, runs_forward=True)
    whole = start(tmp_path / "whole", 2, runs_forward=True)
    assert bit_by_bit(resumed.state_dict()) == bit_by_bit(whole.state_dict())
