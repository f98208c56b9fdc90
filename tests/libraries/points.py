"""A small network and points for it, for libraries that are about something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput
from libraries.harness import Case, dealt

CLASSES = 3
SIZES = (4, 3, 4, 2, 4, 4, 1, 4)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, CLASSES))


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 6, generator=generator), torch.randint(CLASSES, (n,), generator=generator)) for n in SIZES]


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    x, y = batch
    logits = model(x)
    return ForwardOutput(
        cross_entropy(logits, y, reduction="sum"), len(y), {"accuracy": (logits.argmax(1) == y).sum()}, (logits, y)
    )


CASES = [Case("plain torch", network, dealt(batches), forward)]
