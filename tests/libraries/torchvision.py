"""torchvision: transforms v2 with MixUp and CutMix, and a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18
from torchvision.transforms import v2

from ignite_train import ForwardOutput
from libraries.harness import Case, dealt

CLASSES = 5


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2), nn.GroupNorm(2, 6), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, CLASSES)
    )


class Augmented(TensorDataset):
    """Samples that the transforms change at random."""

    transform = v2.Compose(
        [v2.RandomHorizontalFlip(), v2.RandomResizedCrop(16, (0.6, 1.0)), v2.ColorJitter(0.2, 0.2), v2.RandomErasing(0.3)]
    )

    def __getitem__(self, index: int) -> Any:
        pixels, label = super().__getitem__(index)
        return self.transform(pixels), label


def mixed() -> Any:
    mix = v2.RandomChoice([v2.MixUp(num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)])
    generator = torch.Generator().manual_seed(0)
    pixels, labels = torch.rand(31, 3, 16, 16, generator=generator), torch.randint(CLASSES, (31,), generator=generator)
    collate = torch.utils.data.default_collate
    return DataLoader(Augmented(pixels, labels), 4, shuffle=True, collate_fn=lambda samples: mix(*collate(samples)))


def plain() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(4, 3, 16, 16, generator=generator), torch.randint(CLASSES, (4,), generator=generator)) for _ in range(8)
    ]


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    pixels, classes = batch
    return ForwardOutput(cross_entropy(model(pixels), classes, reduction="sum"), len(pixels))


RANDOM = {"ranks": "the ranks draw other numbers for their samples than one process does"}
CASES = [
    Case("transforms v2 with MixUp and CutMix, DataLoader", small, lambda rank, world_size: mixed(), forward, not_tried=RANDOM),
    Case(
        "ResNet-18 with BatchNorm",
        lambda: resnet18(num_classes=CLASSES),
        dealt(plain),
        forward,
        not_tried={"ranks": "BatchNorm's statistics are those of a rank"},
    ),
]
