"""safetensors: weights out and in, also of a model with tied ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from libraries.harness import Case, dealt
from libraries.points import batches, forward, network


def tied() -> nn.Module:
    made: Any = network()
    made[3].weight = nn.Parameter(torch.eye(12) + 0.1)
    return nn.Sequential(*made[:4], nn.GELU(), made[3], nn.GELU(), made[5])


def saved(model: nn.Module, folder: Path) -> Path:
    save_model(model, str(folder / "weights.safetensors"))
    return folder / "weights.safetensors"


def read_by(make: Any, file: Path) -> nn.Module:
    trained = make()
    trained.load_state_dict(torch.load(file))
    save_model(trained, str(file.with_suffix(".safetensors")))
    fresh: nn.Module = make()
    load_model(fresh, str(file.with_suffix(".safetensors")))
    return fresh


CASES = [
    Case(name, make, dealt(batches), forward, writes=saved, reads=partial(read_by, make))
    for name, make in {"save_model and load_model": network, "of tied weights": tied}.items()
]
