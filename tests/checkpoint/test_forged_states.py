"""A state that somebody has forged, with right checksums: the start refuses it in one line, or the run goes on and trains."""

from __future__ import annotations

import copy
import json
import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ignite_train import (
    CheckpointError,
    ForwardOutput,
    ResumableLoader,
    TorchLossScaling,
    Trainer,
    TrainingError,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint.manifest import compact_json
from ignite_train.events import every
from ignite_train.handlers import (
    Checkpoint,
    EarlyStopping,
    JsonLines,
    LearningRateSchedule,
    MinLearningRate,
    ModelEMA,
    ProgressLog,
    ReduceOnPlateau,
    TimeLimit,
    TrainingMetrics,
    Validation,
)
from small_checkpoints import QuickDisk
from tiers import nightly, slow

LOADS = 25  # forgeries of one test
LONGEST = 1_000  # characters of a message
DATA = torch.linspace(0, 1, 36).reshape(12, 3)
SCHEDULES: list[Any] = [
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
    lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        ],
        milestones=[3],
    ),
]


def _forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x), {"seen": len(x)})


def start(directory: Path, number: int) -> tuple[Trainer, Any]:
    """A run with most of what has a state, and its loader; `number` chooses a schedule and the kind of loader."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if number % 2:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    trainer = create_trainer(model, optimizer, _forward, loss_scaling=TorchLossScaling(8.0) if number % 2 else None)
    evaluator = create_evaluator(model, _forward)
    LearningRateSchedule(SCHEDULES[number % len(SCHEDULES)](optimizer)).attach(trainer)
    ModelEMA(0.9).attach(trainer)
    TrainingMetrics(per_second=("seen",)).attach(trainer, every(1, Events.ITERATION_COMPLETED))
    Validation(evaluator, [DATA], score="loss").attach(trainer, every(1, Events.ITERATION_COMPLETED))
    EarlyStopping(evaluator, score="loss", patience=100).attach(trainer)
    ReduceOnPlateau(evaluator, ReduceLROnPlateau(optimizer, patience=1)).attach(trainer)
    MinLearningRate(optimizer, minimum=1e-9).attach(trainer)
    TimeLimit(seconds=1e6).attach(trainer)
    JsonLines(directory / "log.jsonl").attach(trainer, every(1, Events.ITERATION_COMPLETED), evaluator=evaluator)
    ProgressLog("simple").attach(trainer, every(1, Events.ITERATION_COMPLETED))
    saver = Checkpoint(directory, asynchronous=False)
    saver.saver.directory.disk = QuickDisk()
    saver.attach(trainer)
    loader: Any = ResumableLoader(DATA, batch_size=2, shuffle=True)
    if number % 2:
        generator = torch.Generator().manual_seed(3)
        loader = torch.utils.data.DataLoader(DATA, batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    return trainer, loader


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint in the middle of an epoch of each kind of run."""
    made = []
    for number in range(6):
        directory = tmp_path_factory.mktemp("honest")
        trainer, loader = start(directory, number)
        trainer.run(loader, max_iters=4)
        made.append(max(path for path in directory.iterdir() if path.name.startswith("update-")))
    return made


def _pairs(tree: Any) -> Iterator[tuple[list[Any], int]]:
    """Each value in the tree of an index, as the list that holds it and its place there."""
    entries = tree.get("dict", tree.get("tuple", ())) if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    for place, entry in enumerate(entries):
        if isinstance(tree, dict) and "dict" in tree:
            yield entry, 1
            yield from _pairs(entry[1])
        elif isinstance(entries, list):
            yield entries, place
            yield from _pairs(entry)


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**70, 0.5, -0.5, 1e-300, 1e308, "", "x", "min", "lr"),
    *("x" * 150_000, "two\nlines\x1b[31m", [], [1], ["x"] * 70_000, {"dict": []}, {"dict": [["x", 1]]}, {"tuple": [1, 2]}),
    *({"float": "nan"}, {"float": "inf"}, {"float": "-inf"}, {"complex": [0.5, 0.5]}, {"bytes": "eA=="}, {"dtype": "float32"}),
]


def forge(path: Path, draw: random.Random) -> str:
    """Changes one value or two of a checkpoint, or leaves one out, and makes its checksums right again. Says what it did."""
    index = json.loads((path / "rank-00000.json").read_bytes())
    objects, told = index["objects"], []
    for _ in range(draw.choice((1, 1, 2))):
        name = draw.choice(sorted(objects))
        places = list(_pairs(objects[name])) or [([None, objects[name]], 1)]
        holder, place = draw.choice(places)
        key = holder[0] if len(holder) == 2 else place
        way = draw.choice(("value", "value", "value", "key", "gone", "swapped"))
        told.append(f"{name} {key!r:.40} {way}")
        if way == "value":
            holder[place] = draw.choice(VALUES)
            told.append(f"{holder[place]!r:.40}")
        elif way == "key":
            holder[0] = draw.choice(("x" * 150_000, "x", 3, True))
        elif way == "gone":
            holder[:] = holder[:0] if place == 0 or len(holder) != 2 else ["gone", None]
        else:
            other, there = draw.choice(places)
            holder[place] = copy.deepcopy(other[there])
    data = compact_json(index)
    (path / "rank-00000.json").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    manifest["files"]["rank-00000.json"] = {"size": len(data), "crc32": zlib.crc32(data)}
    body = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))
    return "; ".join(told)


def outcome(honest: list[Path], directory: Path, number: int) -> str:
    """What a run does with forgery `number`: empty if it is as it should be."""
    source = honest[number % len(honest)]
    shutil.copytree(source, directory / source.name)
    done = forge(directory / source.name, random.Random(number))  # noqa: S311  # the same each time
    trainer, loader = start(directory, number)
    try:
        trainer.run(loader, max_iters=trainer.state.iteration + 7)
    except (CheckpointError, ValueError, TrainingError) as error:
        text = str(error)
        if len(text) <= LONGEST and "\n" not in text and text.isprintable():
            return ""
        return f"forgery {number} ({done}): {type(error).__name__} of {len(text)} characters: {text[:300]!r}"
    except Exception as error:
        return f"forgery {number} ({done}): {type(error).__name__}: {str(error)[:300]}"
    return ""


@pytest.mark.parametrize("first", [0, *map(slow, range(LOADS, 150, LOADS)), *map(nightly, range(150, 3000, LOADS))])
def test_it_is_refused_in_one_line_or_trains(honest: list[Path], tmp_path: Path, first: int) -> None:
    """Any value of the index, changed, exchanged or left out: no raw error, at the start or in the updates after it."""
    found = [outcome(honest, tmp_path / str(number), number) for number in range(first, first + LOADS)]
    assert [text for text in found if text] == []


@pytest.mark.parametrize(
    "number",
    [2116, 2822, 1601, 2468],
    ids=["a count below 0", "a switch that is a number", "a switch that is a tensor", "a count of steps below 0"],
)
def test_it_is_refused_where_the_next_update_would_fail(honest: list[Path], tmp_path: Path, number: int) -> None:
    """What a division, a moment that is not there, or a truth value would have said in an update after the start."""
    assert outcome(honest, tmp_path, number) == ""
