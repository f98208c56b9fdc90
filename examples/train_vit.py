"""Trains a vision transformer of timm with timm's recipe: Mixup and CutMix, layer decay, a cosine with warm-up, an average.

    pip install timm
    python examples/train_vit.py                                       # one process
    python examples/train_vit.py --nproc 2                             # two

The images are the handwritten digits of scikit-learn, which need no download, and the model is a tiny ViT with random weights.
Every part of the recipe is timm's own: `Mixup` in the loader, `create_optimizer_v2` with a rate for each layer,
`CosineLRScheduler` counted in updates, `ModelEmaV3`. What is evaluated and scored is the average.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads sleep, before torch starts them

from pathlib import Path
from typing import Annotated, Any

import ignite.distributed as idist
import timm
import torch
import typer
from ignite.engine import Events
from ignite.utils import manual_seed
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, default_collate
from typer import Option

from ignite_train import ForwardOutput, ResumableLoader, TrainEvents, attach_defaults, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, Validation
from launching import launch, number_of_processes

CLASSES, MICRO_BATCH, ACCUMULATION_STEPS = 10, 32, 2
LEARNING_RATE, WEIGHT_DECAY, LAYER_DECAY, AVERAGE_DECAY = 1e-2, 0.05, 0.75, 0.98


def loaders() -> tuple[ResumableLoader, DataLoader[Any]]:
    """Of four fifths of the images, mixed in pairs, in another order in each epoch; and of the others, unchanged."""
    pixels, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    data = TensorDataset(pixels.to(torch.get_default_dtype()).view(-1, 1, 8, 8) / 8 - 1, labels)
    rank, ranks = idist.get_rank(), idist.get_world_size()
    mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, prob=0.5, label_smoothing=0.1, num_classes=CLASSES)

    def mixed(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        images, classes = default_collate(samples)
        return mixup(images, classes)

    learned = [data[index] for index in range(len(data)) if index % 5]
    held_out = [data[index] for index in range(0, len(data), 5)]
    return (
        ResumableLoader(
            learned, MICRO_BATCH // ranks, shuffle=True, seed=0, drop_last=True, seed_samples=False, collate_fn=mixed
        ),
        DataLoader(held_out[rank::ranks], batch_size=128),
    )


def build() -> nn.Module:
    """A ViT for images of 8 by 8 pixels, cut into 16 patches."""
    sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 48, "depth": 4, "num_heads": 4}
    manual_seed(0)  # of NumPy too, from which Mixup draws
    model: nn.Module = timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=CLASSES, drop_path_rate=0.1, **sizes
    )
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, whose rate falls from the head to the patches; biases and norms do not decay."""
    optimizer: torch.optim.Optimizer = create_optimizer_v2(
        model, opt="adamw", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, layer_decay=LAYER_DECAY
    )
    return optimizer


def schedule_of(optimizer: torch.optim.Optimizer, total: int) -> CosineLRScheduler:
    """A tenth of the updates warms up, the others follow a cosine; the rate is a function of the number of steps."""
    return CosineLRScheduler(
        optimizer,
        t_initial=total,
        lr_min=1e-5,
        warmup_t=total // 10,
        warmup_lr_init=1e-5,
        warmup_prefix=True,
        t_in_epochs=False,
    )


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    """The loss summed over the images; the target of a mixed image is a probability of each class."""
    images, targets = batch
    logits = model(images)
    loss = cross_entropy(logits, targets, reduction="sum")
    classes = targets if targets.ndim == 1 else targets.argmax(-1)
    return ForwardOutput(loss, sample_size=len(images), logs={"accuracy": (logits.argmax(-1) == classes).sum()})


def train(_local_rank: int, epochs: int, directory: Path) -> tuple[nn.Module, list[float], dict[str, Any]]:
    """The run; returns the averaged model, the loss of each update, and what the last validation has found."""
    torch.set_num_threads(1)
    model = build().to(idist.device())
    optimizer, average = optimizer_of(model), ModelEmaV3(model, decay=AVERAGE_DECAY)
    wrapped = idist.auto_model(model) if idist.get_world_size() > 1 else model
    trainer = create_trainer(wrapped, optimizer, forward, accumulation_steps=ACCUMULATION_STEPS, max_grad_norm=1.0)
    loader, held_out = loaders()
    schedule = schedule_of(optimizer, trainer.total_updates(loader, max_epochs=epochs))

    @trainer.on(TrainEvents.STEP_COMPLETED)
    def after_step() -> None:
        average.update(model)
        schedule.step_update(trainer.state.num_steps)

    evaluator = create_evaluator(average.module, forward)
    Validation(evaluator, held_out, score="accuracy").attach(trainer)
    Checkpoint(directory, score="accuracy", keep=1, to_save={"average": average}).attach(trainer, evaluator=evaluator)
    attach_defaults(trainer, evaluator=evaluator, directory=directory)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.update_output.loss))
    trainer.run(loader, max_epochs=epochs)
    return average.module, losses, dict(evaluator.state.metrics)


def main(
    nproc: Annotated[int, Option(min=1, help="Processes to start; leave at 1 under torchrun.")] = 1,
    epochs: Annotated[int, Option(min=1, help="Passes over the images.")] = 15,
    directory: Annotated[Path, Option(help="Where metrics and checkpoints lie.")] = Path("runs/vit"),
) -> None:
    """Train a vision transformer with timm's recipe."""
    launch(train, number_of_processes(nproc), epochs, directory)


if __name__ == "__main__":
    typer.run(main)
