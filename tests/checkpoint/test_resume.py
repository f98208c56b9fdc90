"""A run that breaks off anywhere resumes bitwise: with any loader, precision, optimizer, schedule and set of handlers.

Each cell trains once without a break and without checkpoints, and once with a break, after which everything is built anew
under other seeds. Both must end with the same weights, moments, generators and journal: a handler that writes down each
update and each end of an epoch, and is itself part of the checkpoint, so that nothing in it may be lost or stand twice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average, RunningAverage
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_train import (
    ForwardOutput,
    ResumableLoader,
    TorchLossScaling,
    Trainer,
    TrainEvents,
    create_evaluator,
    create_trainer,
)
from ignite_train.handlers import Checkpoint, LearningRateSchedule, TimeLimit, TrainingMetrics, Validation
from ignite_train.metrics import TIMED_METRICS
from tiers import nightly, one_in, slow

SAMPLES, BATCH, EPOCHS = 17, 3, 3  # six micro-batches to an epoch, the last one of two samples


class InjectedError(Exception):
    """Raised by a test on purpose."""


# --- data -------------------------------------------------------------------------------------------------------------------


def draw(kind: str) -> float:
    """A random number out of one of the default generators."""
    if kind == "torch":
        return float(torch.randn(()))
    return {"numpy": np.random.normal, "python": random.random, "none": lambda: 0.0}[kind]()


class Samples(Dataset[Any]):
    """Noisy samples; number `failing` cannot be read after it was read `reads` times."""

    def __init__(self, augmentation: str) -> None:
        self.augmentation = augmentation
        self.allowed_reads = -1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if self.allowed_reads == 0:
            raise InjectedError("in the loader")
        self.allowed_reads -= 1
        x = torch.arange(4).cos() * (index + 1) / SAMPLES + 0.1 * draw(self.augmentation)
        return x, (x * torch.tensor([1.0, -2.0, 0.5, 1.0])).sum()[None], index


def collate(samples: list[Any]) -> tuple[Tensor, Tensor, list[int]]:
    """A micro-batch, and which samples are in it."""
    x, y, index = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y), list(index)


class Stream(IterableDataset[Any]):
    """The samples one after another, without a length; each worker gives its own share."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.samples[index] for index in range(first, SAMPLES, step))


class Unsized:
    """Micro-batches of a stream, in this process."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for begin in range(0, SAMPLES, BATCH):
            yield collate([self.samples[index] for index in range(begin, min(begin + BATCH, SAMPLES))])


class Remembering:
    """A loader with a state and a generator of its own that only it knows; each pass shuffles what the last one left."""

    def __init__(self, samples: Samples) -> None:
        self.samples, self.order, self.position = samples, list(range(SAMPLES)), -1
        self.generator = random.Random(5)  # noqa: S311

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __iter__(self) -> Iterator[Any]:
        if self.position < 0:  # otherwise it continues
            self.generator.shuffle(self.order)
            self.position = 0
        while self.position < SAMPLES:
            chosen = self.order[self.position : self.position + BATCH]
            self.position += len(chosen)
            yield collate([self.samples[index] for index in chosen])
        self.position = -1

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "position": self.position, "generator": self.generator.getstate()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order, self.position = list(state["order"]), state["position"]
        self.generator.setstate(state["generator"])


def make_loader(kind: str, augmentation: str, workers: int) -> tuple[Any, Samples]:
    """One of the loaders, and what it reads from."""
    samples = Samples(augmentation)
    options: dict[str, Any] = {"batch_size": BATCH, "collate_fn": collate, "num_workers": workers}
    loaders: dict[str, Callable[[], Any]] = {
        "resumable": lambda: ResumableLoader(samples, shuffle=True, seed=3, **options),
        "plain": lambda: DataLoader(samples, shuffle=True, **options),
        "own generator": lambda: DataLoader(samples, shuffle=True, generator=torch.Generator().manual_seed(4), **options),
        "list": lambda: list(Unsized(samples)),
        "unsized": lambda: Unsized(samples),
        "stream": lambda: DataLoader(Stream(samples), **options),
        "torchdata": lambda: StatefulDataLoader(samples, shuffle=True, **options),
        "torchdata stream": lambda: StatefulDataLoader(Stream(samples), **options),
        "remembering": lambda: Remembering(samples),
    }
    return loaders[kind](), samples


# --- one run ----------------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """What is trained how, and where it breaks off."""

    loader: str = "resumable"
    workers: tuple[int, int] = (0, 0)  # before and after the break
    augmentation: str = "torch"
    accumulation: str = "1"
    precision: str = "fp32"
    optimizer: str = "adamw"
    schedule: str = "cosine"
    handlers: str = "all"
    every: int = 1
    stop: str = "raise at the end of update 5"

    def __str__(self) -> str:
        return "-".join(str(part) for part in self).replace(" ", "_")


class Journal:
    """Writes down what happened, in the checkpoint too."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.EPOCH_STARTED, self.note_epoch)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self.note_update)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, self.note_epoch_end)

    def note_epoch(self, trainer: Trainer) -> None:
        self.lines.append(["epoch", trainer.state.epoch])

    def note_update(self, trainer: Trainer) -> None:
        output = trainer.state.output
        samples = [[indices, x.double().sum().item()] for x, _, indices in trainer.state.batch]
        numbers = [output.loss, output.grad_norm, output.loss_scale, *output.learning_rates, trainer.state.num_skipped]
        self.lines.append([trainer.state.iteration, trainer.state.epoch, samples, *map(repr, numbers), self._metrics(trainer)])

    def note_epoch_end(self, trainer: Trainer) -> None:
        self.lines.append(["end of epoch", trainer.state.epoch, trainer.state.iteration, self._metrics(trainer)])

    def _metrics(self, trainer: Trainer) -> Any:
        return [[name, repr(value)] for name, value in trainer.state.metrics.items() if name not in TIMED_METRICS]

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self.lines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lines = state["lines"]  # kept, not copied, as many objects do


class Job(NamedTuple):
    """A run, and what is compared of it."""

    trainer: Trainer
    loader: Any
    samples: Samples
    journal: Journal
    watched: dict[str, Any]

    def result(self) -> dict[str, Any]:
        states = {name: entry.state_dict() for name, entry in self.watched.items()}
        counters = self.trainer.state_dict()
        generators = (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2], torch.get_rng_state())
        return {**states, "trainer": counters, "metrics": self.journal._metrics(self.trainer), "generators": generators}


def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    x, y, _ = micro_batch
    prediction = model(x).float()
    return ForwardOutput(((prediction - y) ** 2).sum(), len(x), {"error": (prediction - y).abs().sum().item()})


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, fused=True),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 12),
    "onecycle": lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=40),
    "multistep": lambda optimizer: MultiStepLR(optimizer, [2, 5, 5, 9], gamma=0.5),
}
ACCUMULATION: dict[str, Any] = {"1": 1, "3": 3, "4": 4, "list": [1, 3], "function": lambda update: 1 + update % 3}


def make_job(cell: Cell, directory: Path | None, *, seed: int, workers: int) -> Job:
    """Everything new; its weights are those of `seed`, and so is what the generators give next."""
    seed_all(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = OPTIMIZERS[cell.optimizer](model)
    loader, samples = make_loader(cell.loader, cell.augmentation, workers)
    scaling = TorchLossScaling(2.0**15, growth_interval=2) if cell.precision == "fp16" else None
    settings = {"precision": cell.precision, "loss_scaling": scaling, "max_grad_norm": 2.0}
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=ACCUMULATION[cell.accumulation], **settings)
    journal = Journal()
    watched: dict[str, Any] = {"model": model, "optimizer": optimizer, "journal": journal}
    to_save: dict[str, Any] = {}
    evaluator = create_evaluator(model, forward)
    if cell.schedule in SCHEDULES:
        schedule = SCHEDULES[cell.schedule](optimizer)
        LearningRateSchedule(schedule).attach(trainer)
        watched["schedule"] = schedule
    if cell.schedule == "plateau":
        plateau = watched["schedule"] = to_save["plateau"] = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        evaluator.add_event_handler(Events.COMPLETED, lambda engine: plateau.step(engine.state.metrics["loss"]))
    if cell.handlers in ("metrics", "all"):
        TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        Average(output_transform=lambda output: output.loss).attach(trainer, "average")
        RunningAverage(output_transform=lambda output: output.loss).attach(trainer, "running")
        RunningAverage(Average(output_transform=lambda output: output.grad_norm)).attach(trainer, "running norm")
        TimeLimit(seconds=1e6).attach(trainer)
    if cell.handlers in ("validation", "all") or cell.schedule == "plateau":
        held_out = [collate([Samples("none")[index] for index in range(begin, begin + 4)]) for begin in (0, 4)]
        watched["validation"] = Validation(evaluator, held_out)
        watched["validation"].attach(trainer, Events.ITERATION_COMPLETED(every=4) | Events.EPOCH_COMPLETED)
    if cell.handlers in ("ema", "all"):
        ema = watched["ema"] = to_save["ema"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)
        trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: ema.update_parameters(model))
    if directory is not None:
        score = "loss" if "validation" in watched else None
        checkpoint = Checkpoint(directory, every=cell.every, every_epochs=1, score=score, to_save=to_save)
        checkpoint.attach(trainer, evaluator=evaluator)
    journal.attach(trainer)
    seed_all(seed + 1)
    return Job(trainer, loader, samples, journal, watched)


STOPS: dict[str, tuple[str, Any]] = {
    "raise at the start": ("raise", Events.STARTED),
    "raise in the first update": ("raise", TrainEvents.FORWARD_COMPLETED(once=1)),
    "raise at the end of update 1": ("raise", Events.ITERATION_COMPLETED(once=1)),
    "raise at the fetch after update 1": ("raise", Events.GET_BATCH_STARTED(once=1)),
    "raise at the end of update 5": ("raise", Events.ITERATION_COMPLETED(once=5)),
    "raise in the middle of a group": ("raise", TrainEvents.BACKWARD_COMPLETED(once=8)),
    "raise before the step": ("raise", TrainEvents.GRADIENTS_READY(once=4)),
    "raise in an end of epoch": ("raise", Events.EPOCH_COMPLETED(once=2)),
    "raise between epochs": ("raise", Events.EPOCH_STARTED(once=3)),
    "raise at the end": ("raise", Events.COMPLETED),
    "loader": ("loader", None),
    "terminate": ("terminate", Events.ITERATION_COMPLETED(once=4)),
    "terminate in a fetch": ("terminate", Events.GET_BATCH_STARTED(once=7)),
    "terminate in an end of epoch": ("terminate", Events.EPOCH_COMPLETED(once=1)),
    "fewer epochs": ("limit", {"max_epochs": 2}),
    "fewer updates": ("limit", {"max_iters": 5}),
}


def break_off(job: Job, stop: str) -> None:
    """Runs `job` as far as it gets."""
    kind, where = STOPS[stop]
    if kind == "limit":
        job.trainer.run(job.loader, **where)
        return

    def act() -> None:
        if kind == "raise":
            raise InjectedError(stop)
        job.trainer.terminate()

    if kind == "loader":
        job.samples.allowed_reads = 22
    else:
        job.trainer.add_event_handler(where, act)
    try:
        job.trainer.run(job.loader, max_epochs=EPOCHS)
    except (InjectedError, RuntimeError) as error:  # torchdata reports what is raised in a worker as a RuntimeError
        assert "Injected" in repr(error) or stop in str(error) or "in the loader" in str(error)  # noqa: PT017
    assert kind != "raise" or job.trainer.state.times["COMPLETED"] is None or where is Events.COMPLETED


@cache
def uninterrupted(cell: Cell) -> dict[str, Any]:
    """What the run ends with if nothing happens; without checkpoints at all."""
    job = make_job(cell, None, seed=0, workers=cell.workers[0])
    job.trainer.run(job.loader, max_epochs=EPOCHS)
    return job.result()


def check(cell: Cell, directory: Path, bits: Callable[[Any], Any]) -> None:
    """Breaks off, resumes with new objects, and compares."""
    expected = uninterrupted(cell._replace(stop="", every=0, workers=(cell.workers[0],) * 2))
    job = make_job(cell, directory, seed=0, workers=cell.workers[0])
    break_off(job, cell.stop)
    saved = directory.exists() and any(directory.glob("update-*"))
    job = make_job(cell, directory, seed=77 if saved else 0, workers=cell.workers[1])
    job.trainer.run(job.loader, max_epochs=EPOCHS)
    result = job.result()
    assert result["journal"]["lines"] == expected["journal"]["lines"]
    for name, value in expected.items():
        assert bits(result[name]) == bits(value), name


# --- the matrix -------------------------------------------------------------------------------------------------------------

AXES: dict[str, tuple[Any, ...]] = {
    "loader": ("resumable", "plain", "own generator", "list", "unsized", "stream", "torchdata", "remembering"),
    "workers": ((0, 0), (2, 2), (0, 2), (2, 1)),
    "augmentation": ("none", "torch", "numpy", "python"),
    "accumulation": tuple(ACCUMULATION),
    "precision": ("fp32", "bf16", "fp16"),
    "optimizer": tuple(OPTIMIZERS),
    "schedule": ("none", *SCHEDULES, "plateau"),
    "handlers": ("none", "metrics", "validation", "ema", "all"),
    "every": (1, 2),
    "stop": tuple(STOPS),
}


def possible(cell: Cell) -> bool:
    """Whether the cell is promised to be exact."""
    before, after = cell.workers
    if cell.loader in ("list", "unsized", "remembering") and (before, after) != (0, 0):
        return False
    if cell.loader == "list" and cell.augmentation != "none":
        return False
    if cell.loader == "torchdata" and (before != after or (before and cell.augmentation != "none")):
        return False
    if cell.stop == "loader" and (before or cell.loader == "list"):
        return False  # the count of reads is this process's
    if STOPS[cell.stop][0] == "limit" and cell.handlers in ("metrics", "all"):
        return False  # TrainingMetrics publishes at the end of a run what it has
    if cell.loader == "stream" and before != after:
        return False
    return cell.loader == "resumable" or before == after or cell.augmentation == "none"


LEFT_OUT = {("loader", "stop"), ("workers", "stop")}  # in the gate: they alone would make it as long again


def covering(seed: int, left_out: set[tuple[str, str]]) -> list[Cell]:
    """Cells in which any two values of two axes meet, if they can; greedily chosen, with few workers, which cost the most."""
    chance, names = random.Random(seed), list(AXES)  # noqa: S311
    pairs = {
        (a, left, b, right)
        for a, b in itertools.combinations(names, 2)
        for left in AXES[a]
        for right in AXES[b]
        if (a, b) not in left_out
    }
    cells: list[Cell] = []
    while pairs:
        a, left, b, right = min(pairs, key=str)
        best: tuple[float, Cell | None] = (-1.0, None)
        for _ in range(60):
            values = {name: chance.choice(AXES[name]) for name in names} | {a: left, b: right}
            cell = Cell(**values)
            if possible(cell):
                met = sum((x, values[x], y, values[y]) in pairs for x, y in itertools.combinations(names, 2))
                best = max(best, (met / (1 + sum(cell.workers)), cell), key=lambda entry: entry[0])
        pairs.discard((a, left, b, right))  # if no cell was found, there is none
        if best[1] is not None:
            cells.append(best[1])
            values = best[1]._asdict()
            pairs -= {(x, values[x], y, values[y]) for x, y in itertools.combinations(names, 2)}
    return cells


@pytest.mark.sampled(1, slow=40)
@pytest.mark.parametrize("cell", one_in(5, covering(0, LEFT_OUT)), ids=str)
def test_goes_on_as_if_nothing_had_happened(cell: Cell, tmp_path: Path, bits: Any) -> None:
    """Any two of the values of the axes meet in some cell, but for those left out."""
    check(cell, tmp_path / "run", bits)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_goes_on_wherever_any_loader_broke_off(seed: int, tmp_path: Path, bits: Any) -> None:
    """Other cells, and any two values without exception."""
    for number, cell in enumerate(covering(seed, set())):
        check(cell, tmp_path / str(number), bits)


STATEFUL = [
    Cell(loader, (workers, workers), "none", steps, stop=stop)
    for loader, workers in (("torchdata", 0), ("torchdata", 2), ("torchdata stream", 0), ("remembering", 0))
    for steps in ("1", "4")
    for stop in ("raise in an end of epoch", "raise between epochs", "terminate in an end of epoch")
    if workers == 0 or steps == "4"
]


@pytest.mark.parametrize("cell", [nightly(cell) if number % 2 else slow(cell) for number, cell in enumerate(STATEFUL)], ids=str)
def test_loaders_with_a_state_end_their_pass_and_begin_another(cell: Cell, tmp_path: Path, bits: Any) -> None:
    """Broken off between the last update of an epoch and the first of the next, they continue to shuffle as they would have."""
    check(cell, tmp_path / "run", bits)


PER_EVENT = {
    f"raise in {event.name} number {number}": ("raise", event(once=number))
    for event in (
        *(Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, TrainEvents.MICRO_BATCH_STARTED),
        *(TrainEvents.FORWARD_COMPLETED, TrainEvents.BACKWARD_COMPLETED, TrainEvents.GRADIENTS_READY),
        *(TrainEvents.STEP_COMPLETED, Events.ITERATION_COMPLETED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED),
    )
    for number in (1, 2, 3)
}
STOPS |= PER_EVENT


@pytest.mark.sampled(1, slow=16)
@pytest.mark.parametrize("stop", one_in(4, PER_EVENT))
def test_an_exception_in_a_handler_of_any_event(stop: str, tmp_path: Path, bits: Any) -> None:
    """The first, the second and the third time that it fires: done again where it was not saved, and only there."""
    loader, accumulation = ("plain", "4") if stop.endswith("2") else ("resumable", "function")
    check(Cell(loader, accumulation=accumulation, stop=stop), tmp_path / "run", bits)
