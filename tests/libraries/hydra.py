"""hydra and OmegaConf: model and optimizer made of a configuration, which goes into the checkpoints."""

from __future__ import annotations

from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from ignite_train import UpdateOptions
from libraries.harness import Case, dealt
from libraries.points import batches, forward

CONFIG = OmegaConf.create(
    {
        "width": 12,
        "model": {
            "_target_": "torch.nn.Sequential",
            "_args_": [
                {"_target_": "torch.nn.Linear", "in_features": 6, "out_features": "${width}"},
                {"_target_": "torch.nn.GELU"},
                {"_target_": "torch.nn.Linear", "in_features": "${width}", "out_features": 3},
            ],
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3, "betas": [0.8, 0.9]},
        "options": {"_target_": "ignite_train.UpdateOptions", "keep_gradients": True},
    }
)


def model() -> nn.Module:
    made: nn.Module = instantiate(CONFIG.model)
    return made


def optimizer(model: nn.Module) -> Any:
    return instantiate(CONFIG.optimizer, params=model.parameters())


def options() -> UpdateOptions:
    made: UpdateOptions = instantiate(CONFIG.options)
    return made


CASES = [Case("model, optimizer and options by instantiate", model, dealt(batches), forward, optimizer, options=options())]
