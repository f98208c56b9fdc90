"""Runs of a small network in which one thing is wrong, to see what it looks like; docs/watching-a-run.md explains them.

    python examples/sick_runs.py healthy
    python examples/sick_runs.py starved           # or diverging, overflow, straggler, exploding
    python examples/sick_runs.py all --pictures docs/pictures

Each run writes to runs/sick/NAME what `attach_defaults` writes, and a picture.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import ignite.distributed as idist
import torch
import typer
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from typer import Option

from ignite_train import ForwardOutput, NonFiniteError, Trainer, TrainEvents, attach_defaults, create_evaluator, create_trainer
from ignite_train.handlers import StepTimer, Validation

# What is wrong, and which metrics show it.
RUNS = {
    "healthy": ("train/loss", "validation/loss", "optimizer/grad_norm", "speed/data_wait"),
    "diverging": ("train/loss", "validation/loss", "optimizer/grad_norm", "optimizer/clipped"),
    "overflow": ("train/loss", "optimizer/loss_scale", "optimizer/skipped", "optimizer/grad_norm"),
    "starved": ("train/loss", "speed/data_wait", "speed/samples_per_second", "speed/data_seconds"),
    "straggler": ("speed/slowest_rank", "speed/slowest_to_median", "speed/reduction_seconds", "speed/forward_seconds"),
    "exploding": ("train/loss", "optimizer/grad_norm", "grad_norm_of"),
}
TROUBLE_AFTER = 0.5  # of the run


class Batches:
    """Samples of a function to learn; slow to come in the second half of a starved run."""

    def __init__(self, updates: int, *, slow: bool = False, outliers: bool = False) -> None:
        self._updates, self._slow, self._outliers = updates, slow, outliers

    def __len__(self) -> int:
        return self._updates

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        for number in range(self._updates):
            late = number >= TROUBLE_AFTER * self._updates
            if late and self._slow:
                time.sleep(0.01)  # as if it were read from a slow disk
            x = torch.randn(64, 8, generator=generator)
            y = torch.sin(2 * x).sum(dim=1, keepdim=True)
            yield x, y * 100 if late and self._outliers and number % 4 == 0 else y


def train(_local_rank: int, name: str, directory: Path, updates: int) -> None:
    """One run, as each of its processes does it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timer = StepTimer()

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        if name == "straggler" and idist.get_rank() == 1 and trainer.state.iteration > TROUBLE_AFTER * updates:
            time.sleep(0.01)  # as if this machine were slower
        x, y = batch
        return ForwardOutput(mse_loss(model(x).float(), y, reduction="sum"), sample_size=len(y))

    model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model = idist.auto_model(model) if idist.get_world_size() > 1 else model
    rate = {"diverging": 0.35}.get(name, 0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    precision = "fp16" if name == "overflow" else "fp32"
    trainer = create_trainer(model, optimizer, forward, max_grad_norm=50.0, precision=precision)
    evaluator = create_evaluator(model, forward)
    validation = Batches(4)
    every = max(1, updates // 40)
    attach_defaults(trainer, directory=directory, evaluator=evaluator, every=every, config={"run": name, "lr": rate})
    Validation(evaluator, validation).attach(trainer, Events.ITERATION_COMPLETED(every=max(1, updates // 10)))
    timer.attach(trainer, Events.ITERATION_COMPLETED(every=every))
    if name == "exploding":
        explode(trainer, model, every, updates)
    try:
        trainer.run(Batches(updates, slow=name == "starved", outliers=name == "overflow"), max_epochs=1)
    except NonFiniteError as error:
        print(f"the run ended: {error}")
    if idist.get_rank() == 0:
        print(timer.table())


def explode(trainer: Trainer, model: nn.Module, every: int, updates: int) -> None:
    """Has one layer grow in the second half, and publishes the gradient norm of each weight."""

    @trainer.on(TrainEvents.GRADIENTS_READY(every=every))
    def measure(trainer: Trainer) -> None:
        norms = {f"grad_norm_of/{name}": float(g.norm()) for name, g in trainer.gradients().items() if g.dim() > 1}
        trainer.state.metrics.update(norms)

    @trainer.on(TrainEvents.STEP_COMPLETED)
    def grow(trainer: Trainer) -> None:
        if trainer.state.iteration > TROUBLE_AFTER * updates:
            with torch.no_grad():
                model[4].weight.mul_(1.05)  # type: ignore[index, operator]  # as if its rate were far too high


def main(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(RUNS)}, or all.")],
    directory: Annotated[Path, Option(help="Where the runs write.")] = Path("runs/sick"),
    pictures: Annotated[Path | None, Option(help="A folder for the pictures; without it they are beside the logs.")] = None,
    updates: Annotated[int, Option(min=8, help="Of each run.")] = 400,
) -> None:
    """Train, and draw what tells a healthy run from a sick one."""
    if name not in (*RUNS, "all"):
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(RUNS)}, all")
    for run in RUNS if name == "all" else (name,):
        spawn: dict[str, Any] = {"nproc_per_node": 2} if run == "straggler" else {}
        with idist.Parallel(backend="gloo" if spawn else None, **spawn) as parallel:
            parallel.run(train, run, directory / run, updates)
        picture = (directory / run if pictures is None else pictures) / f"{run}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        metrics = [word for metric in RUNS[run] for word in ("--metric", metric)]
        command = [sys.executable, "-m", "ignite_train.plot", str(directory / run), "--output", str(picture), *metrics]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        print(f"{run}: {picture}")


if __name__ == "__main__":
    typer.run(main)
