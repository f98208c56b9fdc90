"""bitsandbytes: optimizers whose states have 8 bits, and a layer of 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes import optim
from torch import nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput
from libraries.harness import Case, dealt

CLASSES = 4


def model() -> nn.Module:
    """Large enough for states of 8 bits, which begin at 4096 numbers."""
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, CLASSES))


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = (8, 6, 8, 4, 8, 8, 2, 8)
    return [(torch.randn(n, 64, generator=generator), torch.randint(CLASSES, (n,), generator=generator)) for n in sizes]


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    x, y = batch
    return ForwardOutput(cross_entropy(model(x), y, reduction="sum"), len(y))


def made_by(kind: Any, **settings: Any) -> Any:
    return lambda model: kind(model.parameters(), lr=1e-3, **settings)


KINDS = {
    "AdamW8bit": made_by(optim.AdamW8bit),
    "AdamW 32 bit": made_by(optim.AdamW32bit),
    "Lion8bit": made_by(optim.Lion8bit),
    "SGD8bit": made_by(optim.SGD8bit, momentum=0.9),
    "AdEMAMix8bit": made_by(optim.AdEMAMix8bit),
}
CASES = [Case(name, model, dealt(batches), forward, make, dtype=torch.float32) for name, make in KINDS.items()]
