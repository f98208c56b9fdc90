"""torchao: optimizers whose states have 8 and 4 bits, and training that is aware of the quantisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.quantization.qat import QATConfig

from ignite_train import ForwardOutput
from libraries.harness import Case, dealt

CLASSES = 4


def model() -> nn.Module:
    """Large enough for states of few bits, which begin at 4096 numbers."""
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, CLASSES))


def prepared() -> nn.Module:
    made = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, CLASSES))
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(made, QATConfig(config, step="prepare"))
    return made


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = (8, 6, 8, 4, 8, 8, 2, 8)
    return [(torch.randn(n, 64, generator=generator), torch.randint(CLASSES, (n,), generator=generator)) for n in sizes]


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    x, y = batch
    return ForwardOutput(cross_entropy(model(x), y, reduction="sum"), len(y))


CASES = [
    *(
        Case(
            kind.__name__,
            model,
            dealt(batches),
            forward,
            lambda model, kind=kind: kind(model.parameters(), lr=1e-3),
            dtype=torch.float32,
        )
        for kind in (AdamW8bit, AdamW4bit, AdamWFp8)
    ),
    Case(
        "quantisation-aware training, 8-bit activations, 4-bit weights", prepared, dealt(batches), forward, dtype=torch.float32
    ),
]
