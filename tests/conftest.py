"""What several test files share: one small regression, and a view of any state that is equal only bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bits import bit_by_bit
from ignite_train import create_trainer
from setups import Batch, Setup, summed_loss
from update_options import with_options


@pytest.fixture
def micro_batches() -> list[Batch]:
    """Five micro-batches of 3, 1, 4, 2 and 3 samples."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)) for size in (3, 1, 4, 2, 3)]


@pytest.fixture
def build() -> Callable[..., Setup]:
    """Makes a small regression with the same weights each time: `build(accumulation_steps=2, optimizer=..., dtype=...)`."""

    def build(
        forward: Callable[..., Any] = summed_loss,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        dtype: torch.dtype = torch.float32,
        **arguments: Any,
    ) -> Setup:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
        built = optimizer(model.parameters())
        return Setup(model, built, create_trainer(model, built, forward, **with_options(**arguments)))

    return build


@pytest.fixture
def bits() -> Callable[[Any], Any]:
    """Turns nested state into plain values that are equal only if every tensor in it is bitwise equal."""
    return bit_by_bit
