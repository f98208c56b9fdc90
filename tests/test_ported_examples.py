"""Scripts as in Ignite's examples, with the import changed: the same numbers, files and curves as with stock Ignite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.engine
import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator
from ignite.handlers import Checkpoint, DiskSaver, ModelCheckpoint, PiecewiseLinear, TensorboardLogger, global_step_from_engine
from ignite.metrics import Accuracy, Loss, RunningAverage
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ignite_train

Create = Callable[..., Engine]
CREATE: tuple[Create, Create] = (ignite.engine.create_supervised_trainer, ignite_train.create_supervised_trainer)


def images(count: int, seed: int) -> DataLoader[Any]:
    """Small grey images with labels, in the shape of MNIST."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = torch.randn(count, 1, 8, 8, generator=generator), torch.randint(0, 10, (count,), generator=generator)
    return DataLoader(TensorDataset(pixels, labels), batch_size=8)


def network() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def mnist(create: Create, directory: Path) -> dict[str, Any]:
    """Training with a schedule, a running average, validation, curves and the best model."""
    model, train, held_out = network(), images(40, 1), images(16, 2)
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.8), nn.CrossEntropyLoss()
    trainer = create(model, optimizer, criterion, device="cpu")
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "nll": Loss(criterion)}, device="cpu")
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "average")
    trainer.add_event_handler(Events.ITERATION_STARTED, PiecewiseLinear(optimizer, "lr", [(0, 0.01), (10, 0.1), (15, 0.0)]))
    lines: list[Any] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=2), lambda engine: lines.append((engine.state.iteration, float(engine.state.output)))
    )

    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine: Engine) -> None:
        evaluator.run(held_out)
        lines.append((engine.state.epoch, evaluator.state.metrics["nll"], evaluator.state.metrics["accuracy"]))

    best = ModelCheckpoint(
        directory / "best", "net", n_saved=1, score_function=lambda engine: -engine.state.metrics["nll"], score_name="nll",
        global_step_transform=global_step_from_engine(trainer), require_empty=False,
    )  # fmt: skip
    evaluator.add_event_handler(Events.COMPLETED, best, {"model": model})
    with TensorboardLogger(log_dir=str(directory / "points")) as logger:
        logger.attach_output_handler(
            trainer,
            Events.ITERATION_COMPLETED,
            tag="training",
            output_transform=lambda loss: {"loss": loss},
            metric_names="all",
        )
        logger.attach_output_handler(
            evaluator, Events.COMPLETED, "validation", ["nll"], global_step_transform=global_step_from_engine(trainer)
        )
        logger.attach_opt_params_handler(trainer, Events.ITERATION_STARTED, optimizer)
        state = trainer.run(train, max_epochs=3)
    points = EventAccumulator(str(directory / "points")).Reload()
    curves = {tag: [(point.step, point.value) for point in points.Scalars(tag)] for tag in points.Tags()["scalars"]}
    files = sorted(path.name.partition("=")[0] for path in (directory / "best").iterdir())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return {"lines": lines, "curves": curves, "files": files, "weights": weights, "end": (state.epoch, state.iteration)}


def save_resume(create: Create, directory: Path) -> dict[str, Any]:
    """Ignite's own checkpoints of trainer, model and optimizer; the second process resumes from the newest."""

    def start() -> tuple[Engine, dict[str, Any], list[float]]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.8)
        trainer = create(model, optimizer, nn.CrossEntropyLoss())
        parts = {"trainer": trainer, "model": model, "optimizer": optimizer}
        saver = DiskSaver(directory / "run", create_dir=True, require_empty=False)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(parts, saver, n_saved=2))
        losses: list[float] = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(float(engine.state.output)))
        return trainer, parts, losses

    trainer, _, before = start()
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=2), trainer.terminate)
    trainer.run(images(40, 1), max_epochs=4)
    trainer, parts, after = start()
    saved = max((directory / "run").iterdir(), key=lambda path: int(path.stem.rpartition("_")[2]))
    Checkpoint.load_objects(parts, torch.load(saved))
    state = trainer.run(images(40, 1), max_epochs=4)
    files = sorted(path.name for path in (directory / "run").iterdir())
    return {"losses": before + after, "files": files, "end": (state.epoch, state.iteration)}


def close(first: Any, second: Any) -> None:
    """The same structure, and numbers that are equal up to the rounding of float32."""
    assert type(first) is type(second)
    if isinstance(first, dict):
        assert list(first) == list(second)
        for key, value in first.items():
            close(value, second[key])
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            close(one, other)
    else:
        assert second == (pytest.approx(first, rel=1e-4, abs=1e-5) if isinstance(first, float) else first)


@pytest.mark.parametrize("example", [mnist, save_resume], ids=["mnist", "save-resume"])
def test_a_ported_example_does_what_the_original_does(
    tmp_path: Path, example: Callable[[Create, Path], dict[str, Any]]
) -> None:
    """Losses, learning rates, validation, tags, steps, files and weights."""
    stock, ours = (example(create, tmp_path / name) for create, name in zip(CREATE, ("stock", "ours"), strict=True))
    assert len(stock["files"]) >= 1
    close(stock, ours)
