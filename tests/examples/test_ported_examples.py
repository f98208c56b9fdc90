"""Scripts as in Ignite's examples, with the import changed: the same numbers, files and curves as with stock Ignite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import ignite.engine
import pytest
import torch
from ignite.contrib.engines import common
from ignite.engine import Engine, EventEnum, Events, create_supervised_evaluator
from ignite.handlers import (
    Checkpoint,
    CosineAnnealingScheduler,
    DiskSaver,
    EMAHandler,
    FastaiLRFinder,
    ModelCheckpoint,
    PiecewiseLinear,
    TensorboardLogger,
    create_lr_scheduler_with_warmup,
    global_step_from_engine,
)
from ignite.metrics import Accuracy, Loss, Precision, Recall, RunningAverage, TopKCategoricalAccuracy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ignite_train
from ranks import run_ranks

pytestmark = pytest.mark.usefixtures("no_gpu")

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
    files = sorted(path.name.partition("=")[0] for path in (directory / "best").iterdir())
    return {
        "lines": lines,
        "curves": points_of(directory / "points"),
        "files": files,
        "weights": weights_of(model),
        "end": (state.epoch, state.iteration),
    }


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


def points_of(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves that were written: their tags, steps and values."""
    points = EventAccumulator(str(directory)).Reload()
    return {tag: [(point.step, point.value) for point in points.Scalars(tag)] for tag in points.Tags()["scalars"]}


def weights_of(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def coloured(count: int, seed: int, **settings: Any) -> Any:
    """Small colour images with labels, in the shape of CIFAR; each rank has its share, in an order of each epoch's own."""
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = torch.randn(count, 3, 8, 8, generator=generator), torch.randint(0, 10, (count,), generator=generator)
    return idist.auto_dataloader(TensorDataset(pixels, labels), **settings)


class Cifar10:
    """A run as in Ignite's example: a warm-up, handlers in common, two evaluators, curves, checkpoints of training and best."""

    def __init__(self, create: Create, directory: Path) -> None:
        torch.manual_seed(12)
        self.directory, self.lines = directory, list[Any]()
        self.data = coloured(40, 1, batch_size=8, drop_last=True, shuffle=idist.get_world_size() > 1)
        self.held_out = coloured(32, 2, batch_size=16, shuffle=False)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        self.model = idist.auto_model(net)
        self.optimizer = idist.auto_optim(
            torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
        )
        criterion, length = nn.CrossEntropyLoss(), len(self.data)
        self.schedule = PiecewiseLinear(self.optimizer, "lr", [(0, 0.0), (length, 0.1), (4 * length, 0.0)])
        self.trainer = create(
            self.model, self.optimizer, criterion, output_transform=lambda x, y, y_pred, loss: {"batch loss": loss.item()}
        )
        self.parts = {
            "trainer": self.trainer,
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
        }
        sampler = self.data.sampler if idist.get_world_size() > 1 else None
        common.setup_common_training_handlers(
            self.trainer, train_sampler=sampler, to_save=self.parts, save_every_iters=length, save_handler=self.saver(),
            lr_scheduler=self.schedule, output_names=["batch loss"], with_pbars=False, clear_cuda_cache=False,
        )  # fmt: skip
        self.evaluators = {
            name: create_supervised_evaluator(self.model, {"Accuracy": Accuracy(), "Loss": Loss(criterion)})
            for name in ("training", "test")
        }
        self.trainer.add_event_handler(Events.EPOCH_COMPLETED(every=2) | Events.COMPLETED, self.validate)
        best = Checkpoint(
            {"model": self.model}, self.saver(), filename_prefix="best", n_saved=2, score_name="test_accuracy",
            score_function=Checkpoint.get_default_score_fn("Accuracy"),
            global_step_transform=global_step_from_engine(self.trainer),
        )  # fmt: skip
        self.evaluators["test"].add_event_handler(Events.COMPLETED(lambda *_: self.trainer.state.epoch > 1), best)

    def saver(self) -> DiskSaver:
        return DiskSaver(self.directory, require_empty=False)

    def validate(self) -> None:
        for name, data in (("training", self.data), ("test", self.held_out)):
            metrics = self.evaluators[name].run(data).metrics
            self.lines.append((self.trainer.state.epoch, name, metrics["Accuracy"], metrics["Loss"]))

    def run(self) -> None:
        logger = None
        if idist.get_rank() == 0:
            logger = common.setup_tb_logging(
                str(self.directory / "points"), self.trainer, self.optimizer, evaluators=self.evaluators, log_every_iters=2
            )
        self.trainer.run(self.data, max_epochs=4)
        if logger is not None:
            logger.close()


def cifar10(create: Create, directory: Path) -> dict[str, Any]:
    """Training is stopped in the fourth epoch; a second process resumes from what the end of the third has saved."""
    directory.mkdir(exist_ok=True)
    first = Cifar10(create, directory)
    length = len(first.data)
    is_ours = isinstance(first.trainer, ignite_train.Trainer)  # which, as the page of differences says, does the update still
    agreed, last = ({"agreed": True}, 3 * length + 1) if is_ours else ({}, 3 * length + 2)
    first.trainer.add_event_handler(Events.ITERATION_STARTED(once=last), lambda: first.trainer.terminate(**agreed))
    first.run()
    idist.barrier()
    files = sorted(path.name for path in directory.glob("*.pt"))
    second = Cifar10(create, directory)
    Checkpoint.load_objects(second.parts, torch.load(directory / f"training_checkpoint_{3 * length}.pt", weights_only=False))
    second.run()
    idist.barrier()
    return {
        "lines": first.lines + second.lines,
        "curves": points_of(directory / "points"),
        "files": files + sorted(path.name for path in directory.glob("*.pt")),
        "weights": weights_of(second.model),
        "end": (second.trainer.state.epoch, second.trainer.state.iteration),
    }


def small_network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))


def classification(create: Create, directory: Path) -> dict[str, Any]:
    """As in Ignite's references for ImageNet: accumulation, a step schedule, validation before all, the best by its score."""
    directory.mkdir(exist_ok=True)
    torch.manual_seed(12)
    model = idist.auto_model(small_network())
    data, held_out = coloured(48, 1, batch_size=8, shuffle=False), coloured(24, 2, batch_size=8, shuffle=False)
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), nn.CrossEntropyLoss()
    trainer = create(model, optimizer, criterion, gradient_accumulation_steps=len(data) // 3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: schedule.step())
    accuracy = Accuracy()
    metrics = {"Accuracy": accuracy, "Error": (1.0 - accuracy) * 100, "Top-5 Accuracy": TopKCategoricalAccuracy(5)}
    evaluator = create_supervised_evaluator(model, metrics | {"Loss": Loss(criterion)})
    lines: list[Any] = []

    @trainer.on(Events.EPOCH_COMPLETED | Events.STARTED)
    def validate(engine: Engine) -> None:
        found = evaluator.run(held_out).metrics
        lines.append((engine.state.epoch, optimizer.param_groups[0]["lr"], *(found[name] for name in [*metrics, "Loss"])))

    common.save_best_model_by_val_score(str(directory), evaluator, model, "Accuracy", n_saved=1, trainer=trainer, tag="test")
    common.add_early_stopping_by_val_score(2, evaluator, trainer, "Top-5 Accuracy")
    to_save, saver = {"model": model, "optimizer": optimizer}, DiskSaver(directory, require_empty=False)
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, Checkpoint(to_save, saver, "last", global_step_transform=global_step_from_engine(trainer))
    )
    logger = None
    if idist.get_rank() == 0:
        logger = common.setup_tb_logging(
            str(directory / "points"), trainer, evaluators={"test": evaluator}, log_every_iters=9999
        )
    trainer.run(data, max_epochs=8)
    if logger is not None:
        logger.close()
    idist.barrier()
    return {
        "lines": lines,
        "curves": points_of(directory / "points"),
        "files": sorted(path.name for path in directory.glob("*.pt")),
        "weights": weights_of(model),
        "end": trainer.state.epoch,
    }


class Phases(EventEnum):
    """Events of a user's own, which the loss function fires."""

    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"


def readme(create: Create, directory: Path) -> dict[str, Any]:
    """What Ignite's README shows: handlers of any kind with arguments, filters, stacked and custom events, composed metrics."""
    lines: list[Any] = []
    model = network()

    def loss_function(y_pred: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        trainer.fire_event(Phases.BEFORE_LOSS)
        loss = nn.functional.cross_entropy(y_pred, y)
        trainer.fire_event(Phases.AFTER_LOSS)
        return loss

    trainer = create(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_function)
    trainer.register_events(*Phases)
    precision, recall = Precision(average=False), Recall(average=False)
    composed = (precision * recall * 2 / (precision + recall + 1e-9)).mean()
    evaluator = create_supervised_evaluator(model, {"f1": composed})
    trainer.add_event_handler(Events.STARTED, lambda _: lines.append("started"))
    trainer.add_event_handler(Events.COMPLETED, lambda first, second: lines.append((first, second)), [1, 2], second="three")
    trainer.add_event_handler(Events.COMPLETED, lambda engine: lines.append(sorted(engine.state.times)))
    trainer.add_event_handler(Phases.AFTER_LOSS, lambda engine: lines.append(("after", engine.state.iteration)))

    @trainer.on(Events.ITERATION_COMPLETED(event_filter=lambda engine, event: event < 3))
    def first_losses(engine: Engine) -> None:
        lines.append((engine.state.iteration, float(engine.state.output)))

    @trainer.on(Events.COMPLETED | Events.EPOCH_COMPLETED(every=2))
    def validate() -> None:
        lines.append((trainer.state.epoch, evaluator.run(images(16, 2)).metrics["f1"]))

    @trainer.on(Events.EPOCH_STARTED(once=3) | Phases.BEFORE_LOSS)
    def now_and_then() -> None:
        lines.append((trainer.state.epoch, trainer.state.iteration))

    trainer.run(images(40, 1), max_epochs=4)
    return {"lines": lines, "weights": weights_of(model)}


def distributed(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A small model, its optimizer, and this rank's share of the data."""
    torch.manual_seed(seed)
    model = idist.auto_model(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)))
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5), coloured(48, 1, batch_size=8, shuffle=False)


def finder(create: Create, directory: Path) -> dict[str, Any]:
    """The search for a learning rate, with its defaults but for a shorter curve."""
    model, optimizer, data = distributed(3)
    trainer = create(model, optimizer, nn.CrossEntropyLoss())
    found = FastaiLRFinder()
    before = weights_of(model)
    to_save = {"model": model, "optimizer": optimizer}
    with found.attach(trainer, to_save, end_lr=3.0, num_iter=12) as searching:
        searching.run(data)
    assert weights_of(model) == before
    curve, rate = found.get_results(), optimizer.param_groups[0]["lr"]
    found.apply_suggested_lr(optimizer)
    trainer.run(data, max_epochs=1)
    return {"curve": curve, "lr": (rate, optimizer.param_groups[0]["lr"]), "weights": weights_of(model)}


def averages(create: Create, directory: Path) -> dict[str, Any]:
    """The learning rate, a running average of the loss, and an average of the weights with a warm-up, at each update."""
    model, optimizer, data = distributed(4)
    trainer = create(model, optimizer, nn.CrossEntropyLoss())
    cosine = CosineAnnealingScheduler(optimizer, "lr", 0.1, 0.0, 2 * len(data))
    trainer.add_event_handler(Events.ITERATION_STARTED, create_lr_scheduler_with_warmup(cosine, 0.01, 4))
    RunningAverage(output_transform=lambda loss: loss, alpha=0.7).attach(trainer, "average")
    ema = EMAHandler(model, momentum=0.2, momentum_warmup=0.05, warmup_iters=6)
    ema.attach(trainer, name="momentum", event=Events.ITERATION_COMPLETED)
    steps: list[Any] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        state: Any = engine.state
        steps.append((state.iteration, optimizer.param_groups[0]["lr"], float(state.metrics["average"]), state.momentum))

    trainer.run(data, max_epochs=3)
    return {"steps": steps, "weights": weights_of(model), "averaged": weights_of(ema.ema_model)}


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


Example = Callable[[Create, Path], dict[str, Any]]
EXAMPLES: dict[str, Example] = {
    "mnist": mnist,
    "save-resume": save_resume,
    "cifar10": cifar10,
    "classification": classification,
    "readme": readme,
    "finder": finder,
    "averages": averages,
}


def both(name: str, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    stock, ours = (EXAMPLES[name](create, directory / kind) for create, kind in zip(CREATE, ("stock", "ours"), strict=True))
    return stock, ours


@pytest.mark.filterwarnings("ignore:Attribute .* is not defined in the engine.state:UserWarning")  # both of Ignite's handlers
@pytest.mark.filterwarnings("ignore:Run completed without loss diverging:UserWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_ported_example_does_what_the_original_does(tmp_path: Path, name: str) -> None:
    """Losses, learning rates, validation, tags, steps, files and weights."""
    stock, ours = both(name, tmp_path)
    assert all(stock.values())
    close(stock, ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "classification", "finder", "averages"])
def test_a_ported_example_does_on_ranks_what_the_original_does(tmp_path: Path, name: str) -> None:
    """The same on two ranks, with data-parallel models, shards and averages over the ranks."""
    for stock, ours in run_ranks(both, name, tmp_path):
        assert all(stock.values())
        close(stock, ours)
