"""MONAI: segmentation with its network, losses and metrics, and its handlers on our trainer and evaluator."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from monai.handlers import (
    CheckpointSaver,
    EarlyStopHandler,
    LrScheduleHandler,
    MeanDice,
    MetricLogger,
    StatsHandler,
    SurfaceDistance,
)
from monai.losses import DiceCELoss, DiceLoss
from monai.networks.nets import UNet
from monai.networks.utils import one_hot
from torch import nn

from ignite_train import Evaluator, ForwardOutput, Trainer
from libraries.harness import Attached, Case, dealt

CLASSES = 2


def unet() -> nn.Module:
    return UNet(spatial_dims=2, in_channels=1, out_channels=CLASSES, channels=(4, 8), strides=(2,), norm="INSTANCE")


def slices() -> list[Any]:
    generator, batches = torch.Generator().manual_seed(0), []
    for count in (2, 1, 3, 2, 2, 1, 2, 3):
        image = torch.rand(count, 1, 16, 16, generator=generator)
        batches.append({"image": image, "label": (image > 0.6).to(image)})
    return batches


def forward_with(loss: nn.Module) -> Any:
    def forward(model: nn.Module, batch: Any) -> ForwardOutput:
        found, wanted = model(batch["image"]), batch["label"]
        classes = one_hot(found.argmax(1, keepdim=True), CLASSES), one_hot(wanted, CLASSES)
        count = len(wanted)
        return ForwardOutput(loss(found, wanted) * count, count, outputs={"pred": classes[0], "label": classes[1]})

    return forward


def attach(trainer: Trainer, evaluator: Evaluator) -> Attached:
    folder = tempfile.mkdtemp()
    by_names = lambda output: (list(output["pred"]), list(output["label"]))  # noqa: E731
    MeanDice(include_background=False, output_transform=by_names).attach(evaluator, "mean_dice")
    SurfaceDistance(output_transform=by_names).attach(evaluator, "surface_distance")
    logger = MetricLogger(loss_transform=lambda output: output.loss, evaluator=evaluator)
    logger.attach(trainer)
    StatsHandler(output_transform=lambda output: output.loss).attach(trainer)
    StatsHandler(output_transform=lambda output: None).attach(evaluator)
    EarlyStopHandler(patience=5, score_function=lambda engine: engine.state.metrics["mean_dice"], trainer=trainer).attach(
        evaluator
    )
    CheckpointSaver(folder, {"net": trainer.model}, save_key_metric=True, key_metric_name="mean_dice").attach(evaluator)
    (optimizer,) = trainer.optimizers.values()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    LrScheduleHandler(schedule, print_lr=False).attach(trainer)

    def look() -> None:
        assert 0 <= evaluator.state.metrics["mean_dice"] <= 1
        assert evaluator.state.metric_details["mean_dice"].shape == (3, CLASSES - 1)
        assert logger.loss
        assert list(Path(folder).glob("*.pt"))

    return Attached(look, {"schedule": schedule})


CASES = [
    Case(
        "UNet, DiceCELoss, handlers on both engines",
        unet,
        dealt(slices),
        forward_with(DiceCELoss(to_onehot_y=True, softmax=True)),
        attach=attach,
    ),
    Case(
        "UNet, DiceLoss over the batch", unet, dealt(slices), forward_with(DiceLoss(to_onehot_y=True, softmax=True, batch=True))
    ),
]
