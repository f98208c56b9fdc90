"""pytorch_optimizer: more than twenty of its optimizers, among them wrappers, second-order ones and such as find their rate."""

from __future__ import annotations

from typing import Any

import pytorch_optimizer
import torch
from pytorch_optimizer import load_optimizer
from torch import nn

from libraries.harness import Case, dealt
from libraries.points import batches, forward, network

NAMES = (
    *("AdaBelief", "AdaBound", "Adai", "AdamP", "Adan", "AdEMAMix", "ADOPT", "Amos", "CAME", "DAdaptAdam", "Kron", "Lamb"),
    *("LaProp", "Lion", "MARS", "NovoGrad", "Prodigy", "QHAdam", "Ranger", "SCION", "Shampoo", "SOAP", "StableAdamW", "Tiger"),
    *("Yogi",),
)
OBJECTS = "its state holds Python objects; a run with a Checkpoint ends after the first step with a line that says so"


def made_by(name: str) -> Any:
    def make(model: nn.Module) -> Any:
        return load_optimizer(name)(model.parameters(), lr=1e-3)

    return make


def lookahead(model: nn.Module) -> Any:
    return pytorch_optimizer.Lookahead(load_optimizer("AdamW")(model.parameters(), lr=1e-3), k=3)


CASES = [
    *(Case(name, network, dealt(batches), forward, made_by(name)) for name in NAMES),
    Case(
        "AdamMini",
        network,
        dealt(batches),
        forward,
        lambda model: load_optimizer("AdamMini")(model, lr=1e-3),
        dtype=torch.float32,  # it loads its state as float32, whatever it was
    ),
    Case(
        "ScalableShampoo",
        network,
        dealt(batches),
        forward,
        made_by("ScalableShampoo"),
        known={"killed": OBJECTS, "weights": OBJECTS},
    ),
    Case("Lookahead around AdamW", network, dealt(batches), forward, lookahead),
]
