"""A checkpoint that an earlier version wrote is kept as files, and each later version must resume from it.

The folder `format-1` beside this file holds a checkpoint of the run that `make` builds, in the middle of its second epoch, as a
kill would leave it. This command wrote it, before 0.1.0 was released:

    PYTHONPATH=.:tests/support .venv/bin/python tests/checkpoint/test_kept_checkpoints.py tests/checkpoint/format-1

It is never written again. Where `FORMAT` is raised, the same command makes a folder for the new one beside it. If a change of a
state makes a test here fail, the checkpoints of all users would be refused: give what is new a default where a state lacks it.
The restored state is compared with what the files hold, as other programs read them, so that no processor's rounding matters.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Events
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from bits import bit_by_bit
from ignite_train import (
    ForwardOutput,
    ResumableLoader,
    TorchLossScaling,
    Trainer,
    UpdateOutput,
    checkpoint,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint.manifest import FORMAT
from ignite_train.handlers import (
    Checkpoint,
    EarlyStopping,
    LearningRateSchedule,
    ModelEMA,
    TrainingMetrics,
    Validation,
)

HERE = Path(__file__).parent
UPDATE, LAST = 8, 9  # of six to an epoch: two are done of the second
CHECKSUMS = {1: "e90cbc0c"}
"""By format, the checksum that the kept manifest begins with. It is over the manifest, which has those of the other files."""
each_format = pytest.mark.parametrize("number", CHECKSUMS)


class Run(NamedTuple):
    """The run that is kept.

    Attributes:
        trainer: of it.
        loader: of it.
        parts: what has a state, by its name in the files.
    """

    trainer: Trainer
    loader: ResumableLoader[Tensor]
    parts: dict[str, Any]


def _forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 1).square().sum(), len(x), {"seen": len(x)})


def make(directory: Path) -> Run:
    """The run. It must stay as it is, since the files are of it."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaling = TorchLossScaling(8.0)
    trainer = create_trainer(model, optimizer, _forward, accumulation_steps=2, max_grad_norm=1.0, loss_scaling=scaling)
    evaluator = create_evaluator(model, _forward)
    held_out = ResumableLoader(torch.ones(4, 3), batch_size=2, shuffle=False)
    parts: dict[str, Any] = {
        "handlers/LearningRateSchedule": LearningRateSchedule(CosineAnnealingLR(optimizer, 40)),
        "handlers/Validation": Validation(evaluator, held_out, score="loss"),
        "handlers/EarlyStopping": EarlyStopping(evaluator, "loss", patience=7),
        "handlers/ModelEMA": ModelEMA(0.9),
    }
    for handler in parts.values():
        handler.attach(trainer)
    parts |= {"handlers/TrainingMetrics": TrainingMetrics(), "model": model, "optimizer": optimizer, "trainer": trainer}
    parts["handlers/TrainingMetrics"].attach(trainer, Events.ITERATION_COMPLETED(every=3))
    Checkpoint(directory, every=UPDATE, keep=9, config={"depth": 2}).attach(trainer)
    loader = ResumableLoader(torch.linspace(-1, 1, 72).reshape(24, 3), batch_size=2, shuffle=True, seed=3)
    return Run(trainer, loader, parts)


def write(folder: Path) -> None:
    """Writes the checkpoint of this version into a new folder."""
    with tempfile.TemporaryDirectory() as scratch:
        run = make(Path(scratch))
        run.trainer.run(run.loader, max_iters=LAST)
        shutil.copytree(Path(scratch) / f"update-{UPDATE:08d}", folder / f"update-{UPDATE:08d}")


def kept(number: int) -> Path:
    """The kept checkpoint of a format."""
    return HERE / f"format-{number}" / f"update-{UPDATE:08d}"


def stored(path: Path) -> dict[str, Any]:
    """The states in the files of a checkpoint, by name, read without this library."""
    tensors, index = load_file(path / "rank-00000.safetensors"), json.loads((path / "rank-00000.json").read_bytes())

    def value(tree: Any) -> Any:
        if isinstance(tree, list):
            return [*map(value, tree)]
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "dict":
            return {key: value(entry) for key, entry in content}
        return tensors[content] if kind in ("tensor", "array") else tuple(map(value, content))

    return {name: value(tree) for name, tree in index["objects"].items()}


def resumed(number: int, directory: Path) -> tuple[Run, dict[str, Any]]:
    """A run that has gone on from a copy of a kept checkpoint for one update; and what it had restored before that."""
    shutil.copytree(kept(number), directory / kept(number).name)
    run, restored = make(directory), dict[str, Any]()

    def note() -> None:
        restored.update({name: bit_by_bit(part.state_dict()) for name, part in run.parts.items()})
        restored.update(output=run.trainer.state.update_output, generator=bit_by_bit(torch.get_rng_state()))

    run.trainer.add_event_handler(Events.ITERATION_STARTED, note)
    run.trainer.run(run.loader, max_iters=LAST, resume="must")
    return run, restored


def fields_in(path: Path) -> dict[str, Any]:
    """The names that a reader of a format expects, and takes for damage where they are others."""
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    index = json.loads((path / "rank-00000.json").read_bytes())
    return {
        "manifest": {*manifest},
        "files": {name: {*record} for name, record in manifest["files"].items()},
        "index": {*index},
        "of a tensor": {key for note in index["tensors"].values() for key in note},
    }


def test_a_checkpoint_of_each_format_is_kept() -> None:
    assert [*CHECKSUMS] == [*range(1, FORMAT + 1)]


@each_format
def test_a_kept_checkpoint_is_whole_and_the_one_that_was_written(number: int) -> None:
    """No byte of it was written again: its manifest has the checksum of today, and it has those of its files."""
    checkpoint.verify(kept(number))
    assert json.loads((kept(number) / "manifest.json").read_bytes())["crc32"] == CHECKSUMS[number]


@each_format
def test_a_run_resumes_from_a_kept_checkpoint_with_what_its_files_hold(number: int, tmp_path: Path) -> None:
    """Weights, statistics, moments, counters, the loss scale, the latest record, generators and the states of handlers."""
    _, restored = resumed(number, tmp_path)
    files = stored(kept(number))
    for states in (restored, files):
        del states["handlers/TrainingMetrics"]["seconds"]  # they go on
    assert restored.pop("output") == UpdateOutput(**files["results"]["output"])
    assert restored.pop("generator") == bit_by_bit(files["generators"]["torch"])
    assert restored == {name: bit_by_bit(files[name]) for name in restored}


@each_format
def test_a_run_trains_on_from_a_kept_checkpoint(number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By one update, on samples that were left of the epoch; nothing was renamed or started from the beginning."""
    run, restored = resumed(number, tmp_path)
    state, output = run.trainer.state, run.trainer.state.update_output
    assert (state.iteration, state.epoch, state.num_steps) == (LAST, 2, LAST)
    assert output is not None
    assert output.applied
    assert math.isfinite(output.loss)
    assert bit_by_bit(run.parts["model"].state_dict()) != restored["model"]
    assert not [*tmp_path.glob("damaged-*")]
    assert "starts from the beginning" not in caplog.text


def test_what_an_earlier_version_would_take_for_damage_is_not_added_within_a_format(tmp_path: Path) -> None:
    """A field of the manifest or of an index that it does not know; raise `FORMAT` instead, so that it says what to do."""
    write(tmp_path)
    assert fields_in(tmp_path / kept(FORMAT).name) == fields_in(kept(FORMAT))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
