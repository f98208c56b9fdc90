"""timm: a model, its average, its optimizers and its schedulers."""

from __future__ import annotations

from typing import Any

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.functional import cross_entropy

from ignite_train import ForwardOutput
from libraries.harness import Around, Case, dealt


def vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=2, num_classes=5, pretrained=False
    )


def pictures() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 3, 4, 2, 4, 4, 1, 4)
    return [(torch.randn(n, 3, 32, 32, generator=generator), torch.randint(5, (n,), generator=generator)) for n in sizes]


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    pixels, classes = batch
    return ForwardOutput(cross_entropy(model(pixels), classes, reduction="sum"), len(classes))


class Schedule:
    """timm's scheduler counts the updates for its caller."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.updates = scheduler, 0

    def step(self) -> None:
        self.updates += 1
        self.scheduler.step_update(self.updates)

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self.updates = state["updates"]


def recipe(model: nn.Module, optimizer: Any) -> Around:
    average = ModelEmaV3(model, decay=0.9)
    schedule = Schedule(CosineLRScheduler(optimizer, t_initial=16, warmup_t=3, warmup_lr_init=1e-4, t_in_epochs=False))

    def after_step() -> None:
        schedule.step()
        average.update(model)

    return Around(after_step, {"average": average, "schedule": schedule})


def optimizer_called(name: str) -> Any:
    return lambda model: create_optimizer_v2(model, opt=name, lr=1e-3, weight_decay=0.05, momentum=0.9)


CASES = [
    Case(
        "ViT, AdamW with its groups, cosine schedule, ModelEmaV3",
        vit,
        dealt(pictures),
        forward,
        optimizer_called("adamw"),
        recipe,
    ),
    *(
        Case(f"optimizer {name}", vit, dealt(pictures), forward, optimizer_called(name))
        for name in ("lamb", "adan", "lion", "muon", "nadamw", "adafactor", "lookahead_adamw")
    ),
]
