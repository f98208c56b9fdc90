"""What the examples in docstrings are run with: a linear model on 16 samples, in four micro-batches."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ignite_train import Evaluator, ForwardOutput, Trainer, create_evaluator, create_trainer

# One thread for this process and all that tests start: as many tests run at a time as there are cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _forward(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    x, y = micro_batch
    return ForwardOutput(mse_loss(model(x), y, reduction="sum"), sample_size=len(y))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def loader() -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(
        TensorDataset(torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator)), batch_size=4
    )


@pytest.fixture
def trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainer:
    return create_trainer(model, optimizer, _forward)


@pytest.fixture
def evaluator(model: nn.Module) -> Evaluator:
    return create_evaluator(model, _forward)
