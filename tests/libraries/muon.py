"""Muon, the package: matrices by Muon and the rest by Adam, on one device and spread over ranks."""

from __future__ import annotations

from typing import Any

import muon
from torch import nn

from libraries.harness import Case, dealt
from libraries.points import batches, forward, network


def groups(model: nn.Module) -> Any:
    matrices = [one for one in model.parameters() if one.ndim == 2]
    rest = [one for one in model.parameters() if one.ndim != 2]
    return [{"params": matrices, "use_muon": True, "lr": 0.01}, {"params": rest, "use_muon": False, "lr": 1e-3}]


CASES = [
    Case(
        "SingleDeviceMuonWithAuxAdam",
        network,
        dealt(batches),
        forward,
        lambda model: muon.SingleDeviceMuonWithAuxAdam(groups(model)),
    ),
]
