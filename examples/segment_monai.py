"""Segments circles in noise with MONAI: its network, loss, transforms and metric, on our trainer and evaluator.

    pip install monai
    python examples/segment_monai.py                                   # one process
    python examples/segment_monai.py --nproc 2                         # two: the same images in the same updates

The images are MONAI's `create_test_image_2d`, so nothing is downloaded. The random transforms draw from a number of the sample,
which the loader gives: an image is changed in the same way on any number of processes, and in a run that resumes.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads sleep, before torch starts them

from pathlib import Path
from typing import Annotated, Any

import ignite.distributed as idist
import numpy as np
import torch
import typer
from ignite.engine import Events
from monai.data import Dataset, create_test_image_2d
from monai.handlers import MeanDice
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from monai.networks.utils import one_hot
from monai.transforms import Compose, EnsureChannelFirstd, EnsureTyped, RandFlipd, RandGaussianNoised, RandRotate90d
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader
from typer import Option

from ignite_train import ForwardOutput, ResumableLoader, attach_defaults, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, LearningRateSchedule, Validation
from launching import launch, number_of_processes

CLASSES, SIZE, IMAGES, MICRO_BATCH, ACCUMULATION_STEPS = 2, 48, 96, 4, 2
KEYS = ["image", "label"]


class Images(Dataset):
    """Noisy images of circles, and the masks of the circles."""

    def __init__(self, seeds: range, changes: tuple[Any, ...] = ()) -> None:
        def one(seed: int) -> dict[str, np.ndarray]:
            drawn = np.random.RandomState(seed)
            pixels, mask = create_test_image_2d(SIZE, SIZE, 4, 10, 4, noise_max=1.0, num_seg_classes=1, random_state=drawn)
            return {"image": pixels, "label": mask}

        dtype = torch.get_default_dtype()
        to_tensors = EnsureTyped(KEYS, dtype=dtype, track_meta=False)
        super().__init__(
            [one(seed) for seed in seeds], Compose([EnsureChannelFirstd(KEYS, channel_dim="no_channel"), *changes, to_tensors])
        )

    def seed_sample(self, seed: int) -> None:
        """The loader calls it before each sample: MONAI's transforms have generators of their own."""
        self.transform.set_random_state(seed % 2**32)


def loaders() -> tuple[ResumableLoader, DataLoader[Any]]:
    """Of images that are changed at random, in another order in each epoch; and of others that are not."""
    changes = (RandFlipd(KEYS, prob=0.5), RandRotate90d(KEYS, prob=0.5), RandGaussianNoised(["image"], prob=0.5, std=0.2))
    rank, ranks = idist.get_rank(), idist.get_world_size()
    held_out = Images(range(IMAGES + rank, IMAGES + 32, ranks))
    return (
        ResumableLoader(Images(range(IMAGES), changes), MICRO_BATCH // ranks, shuffle=True, seed=0),
        DataLoader(held_out, batch_size=16),
    )


def build() -> nn.Module:
    """A small UNet with random weights."""
    torch.manual_seed(0)
    net: nn.Module = UNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=CLASSES,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=1,
        norm="INSTANCE",
    )
    return net


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of all parameters."""
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def schedule_of(optimizer: torch.optim.Optimizer, epochs: int) -> LRScheduler:
    """A cosine, stepped after each epoch."""
    return CosineAnnealingLR(optimizer, T_max=epochs)


loss_of = DiceCELoss(to_onehot_y=True, softmax=True)  # a mean over the images of a micro-batch


def forward(model: nn.Module, batch: dict[str, Tensor]) -> ForwardOutput:
    """The loss summed over the images, and what MONAI's metrics look at: one channel for each class."""
    found, wanted = model(batch["image"]), batch["label"]
    count = len(wanted)
    outputs = one_hot(found.detach().argmax(1, keepdim=True), CLASSES), one_hot(wanted, CLASSES)
    return ForwardOutput(loss_of(found, wanted) * count, sample_size=count, outputs=outputs)


def train(_local_rank: int, epochs: int, directory: Path) -> tuple[nn.Module, list[float], dict[str, Any]]:
    """The run; returns the model, the loss of each update, and what the last validation has found."""
    torch.set_num_threads(1)
    model = build().to(idist.device())
    optimizer = optimizer_of(model)
    wrapped = idist.auto_model(model) if idist.get_world_size() > 1 else model
    trainer = create_trainer(wrapped, optimizer, forward, accumulation_steps=ACCUMULATION_STEPS)
    evaluator = create_evaluator(model, forward)
    MeanDice(include_background=False).attach(evaluator, "dice")
    loader, held_out = loaders()
    LearningRateSchedule(schedule_of(optimizer, epochs)).attach(trainer, Events.EPOCH_COMPLETED)
    Validation(evaluator, held_out, score="dice", mode="max").attach(trainer)
    Checkpoint(directory, score="dice", mode="max", keep=1).attach(trainer, evaluator=evaluator)
    attach_defaults(trainer, evaluator=evaluator, directory=directory)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.update_output.loss))
    trainer.run(loader, max_epochs=epochs)
    return model, losses, dict(evaluator.state.metrics)


def main(
    nproc: Annotated[int, Option(min=1, help="Processes to start; leave at 1 under torchrun.")] = 1,
    epochs: Annotated[int, Option(min=1, help="Passes over the images.")] = 8,
    directory: Annotated[Path, Option(help="Where metrics and checkpoints lie.")] = Path("runs/segmentation"),
) -> None:
    """Segment circles with MONAI."""
    launch(train, number_of_processes(nproc), epochs, directory)


if __name__ == "__main__":
    typer.run(main)
