"""Sends the metrics of a run to a tracker of Ignite's, here W&B, which writes to runs/tracked and needs no account offline.

pip install wandb
python examples/tracker.py
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from ignite.engine import Events
from ignite.handlers.wandb_logger import WandBLogger
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from typer import Option

from ignite_train import ForwardOutput, create_evaluator, create_trainer
from ignite_train.handlers import TrainingMetrics, Validation


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    """A sum of squares and its weight."""
    x, y = batch
    return ForwardOutput(mse_loss(model(x), y, reduction="sum"), sample_size=len(y))


def main(directory: Annotated[Path, Option(help="Where the tracker writes.")] = Path("runs/tracked")) -> None:
    """Train a linear model, and track it."""
    torch.manual_seed(0)
    x = torch.randn(512, 4)
    data = list(zip(x.split(16), x.sum(dim=1, keepdim=True).split(16), strict=True))
    model = nn.Linear(4, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), forward)
    evaluator = create_evaluator(model, forward)
    every = Events.ITERATION_COMPLETED(every=8)
    TrainingMetrics().attach(trainer, every)

    directory.mkdir(parents=True, exist_ok=True)
    tracker = WandBLogger(mode="offline", project="ignite_train", dir=str(directory))
    tracker.attach_output_handler(trainer, every, tag="train", metric_names="all")
    tracker.attach_output_handler(
        evaluator,
        Events.COMPLETED,
        tag="validation",
        metric_names="all",
        global_step_transform=lambda *_: trainer.state.iteration,
    )

    Validation(evaluator, data).attach(trainer)
    trainer.run(data, max_epochs=2)
    tracker.close()
    print(f"tracked in {directory}")


if __name__ == "__main__":
    typer.run(main)
