"""A checkpoint of another format is refused and left untouched; handlers keep the names under which they are saved."""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from ignite_train import (
    CheckpointError,
    CheckpointFormatError,
    ForwardOutput,
    ResumableLoader,
    Trainer,
    create_trainer,
    handlers,
)
from ignite_train import checkpoint as checkpoints
from ignite_train.checkpoint import manifest as manifest_module
from ignite_train.checkpoint.manifest import Manifest
from ignite_train.handlers import Checkpoint, LearningRateSchedule, TrainingMetrics, outer_optimizer
from ignite_train.kinds_of_handlers import Handler
from ignite_train.tools.checkpoint_command import checkpoint_command as main
from ranks import run_ranks

UPDATE = 4  # of three to an epoch: in the middle of the second


class Job(NamedTuple):
    """A run."""

    trainer: Trainer
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    metrics: TrainingMetrics
    loader: Any


def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    (x,) = micro_batch
    noisy = x + 0.1 * torch.randn_like(x)
    return ForwardOutput((model(noisy) - x[:, :3]).square().sum(), len(x), {"error": x.abs().sum()})


def make(directory: Path | None, seed: int) -> Job:
    """The run that was saved; its weights are those of `seed`."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    schedule = CosineAnnealingLR(optimizer, 9)
    wrapped = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    trainer = create_trainer(wrapped, optimizer, forward)
    LearningRateSchedule(schedule).attach(trainer)
    metrics = TrainingMetrics()
    metrics.attach(trainer, Events.ITERATION_COMPLETED(every=3))
    if directory is not None:
        Checkpoint(directory, every=2, config={"depth": 1}).attach(trainer)
    samples = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4).cos())
    return Job(trainer, model, optimizer, schedule, metrics, ResumableLoader(samples, 4, shuffle=True, seed=1))


# --- a newer format -------------------------------------------------------------------------------------------------------

OLD, NEW = "update-00000004", "update-00000008"


def store(directory: Path, name: str, format_: int | None = None) -> Path:
    """A checkpoint; with a `format_`, as a newer version might write it: other fields, right checksum."""
    path = directory / name
    with tempfile.TemporaryDirectory() as scratch:
        job = make(Path(scratch), seed=1)
        job.trainer.run(job.loader, max_iters=UPDATE)
        shutil.copytree(min(Path(scratch).glob(f"{OLD}*")), path)
    if format_ is not None:
        (path / "manifest.json").write_bytes(newer(json.loads((path / "manifest.json").read_bytes())["manifest"], format_))
    return path


def newer(manifest: dict[str, Any], format_: int) -> bytes:
    """The manifest file of a newer format."""
    body = json.dumps({**manifest, "format": format_, "order": "unknown today"}, separators=(",", ":")).encode()
    return b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def refusal(directory: Path, resume: str | Path = "auto") -> str:
    """The error of a run there, which must not have trained."""
    job = make(directory, seed=9)
    weights = job.model.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        job.trainer.run(job.loader, max_epochs=3, resume=resume)
    assert torch.equal(job.model.weight, weights) or job.trainer.state.iteration == UPDATE
    return str(caught.value)


@pytest.mark.parametrize("resume", ["auto", "must", "never", "directory", "checkpoint"])
@pytest.mark.parametrize("which", [OLD, NEW])
def test_a_newer_format_is_refused_and_left_untouched(which: str, resume: str, tmp_path: Path) -> None:
    """Neither renamed nor passed over for a readable one, whether it is the older or the newer; one line says what to do."""
    for name in (OLD, NEW):
        store(tmp_path, name, 2 if name == which else None)
    stored = (tmp_path / which / "manifest.json").read_bytes()
    message = refusal(tmp_path, {"directory": tmp_path, "checkpoint": tmp_path / which}.get(resume, resume))

    assert (
        f"{which} cannot be used: it has format 2, and this version of ignite_train reads formats up to 1; nothing was "
        "renamed: use the version that wrote it or a newer one, or move it to another directory"
    ) in message
    assert "\n" not in message
    assert names(tmp_path) == [OLD, NEW]
    assert (tmp_path / which / "manifest.json").read_bytes() == stored


@pytest.mark.slow
def test_a_run_does_not_save_beside_a_newer_format(tmp_path: Path) -> None:
    """A run that resumes from an older one by name is refused before its first update; moved away, the older one is used."""
    store(tmp_path / "run", OLD)
    store(tmp_path / "run", NEW, 2)
    assert "it has format 2" in refusal(tmp_path / "run", tmp_path / "run" / OLD)
    assert names(tmp_path / "run") == [OLD, NEW]

    (tmp_path / "run" / NEW).rename(tmp_path / NEW)
    job = make(tmp_path / "run", seed=9)
    job.trainer.run(job.loader, max_epochs=3)
    assert job.trainer.state.iteration == 9


def refusal_of_a_rank(directory: Path) -> str:
    job = make(directory, seed=9)
    try:
        job.trainer.run(job.loader, max_epochs=3)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_newer_format_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """With the same line."""
    store(tmp_path, NEW, 2)
    first, second = run_ranks(refusal_of_a_rank, tmp_path)
    assert first == second
    assert f"{NEW} cannot be used: it has format 2" in first
    assert names(tmp_path) == [NEW]


def test_the_commands_do_not_take_a_newer_format_for_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`latest` does not answer with an older one, `verify` raises, and `list` says that it cannot be read."""
    store(tmp_path, OLD)
    path = store(tmp_path, NEW, 7)
    for ask in (lambda: checkpoints.latest(tmp_path), lambda: checkpoints.verify(path)):
        with pytest.raises(CheckpointFormatError, match="it has format 7") as caught:
            ask()
        assert (caught.value.path, caught.value.found, caught.value.newest) == (str(path), 7, 1)
    found = checkpoints.find(tmp_path)
    assert [(entry.path.name, entry.damage, bool(entry.unreadable)) for entry in found] == [(NEW, "", True), (OLD, "", False)]

    for command in ("list", "verify"):
        assert main([command, str(tmp_path)]) == 1
        output = capsys.readouterr().out
        assert f"{NEW}  cannot be read: it has format 7" in output
        assert "damaged" not in output


# --- an older format ------------------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another manifest, with the right checksum."""
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"]
    change(manifest)
    body = json.dumps(manifest, separators=(",", ":")).encode()
    (path / "manifest.json").write_bytes(b'{"crc32":"%08x","manifest":%b}\n' % (zlib.crc32(body), body))


def in_the_layout_of_before(manifest: dict[str, Any]) -> None:
    """As it was written until 24 November 2026, under the number 1."""
    del manifest["files"]["rank-00000.safetensors"]
    manifest["files"]["rank-00000.bin"] = {"size": 12796, "crc32": None}


@pytest.mark.parametrize("resume", ["auto", "must", "never", "checkpoint"])
def test_the_layout_before_the_first_version_is_refused_and_left_untouched(resume: str, tmp_path: Path) -> None:
    """It is not called damaged, and no other checkpoint is used in its place; one line says what to do."""
    path = store(tmp_path, OLD)
    rewritten(path, in_the_layout_of_before)
    stored = (path / "manifest.json").read_bytes()
    message = refusal(tmp_path, path if resume == "checkpoint" else resume)

    assert (
        f"{OLD} cannot be used: it was written by an earlier version of ignite_train, before 0.1.0, in another format; nothing "
        "was renamed: finish with that version, or start in another directory"
    ) in message
    assert "\n" not in message
    assert names(tmp_path) == [OLD]
    assert (path / "manifest.json").read_bytes() == stored
    with pytest.raises(CheckpointFormatError) as caught:
        checkpoints.verify(path)
    assert (caught.value.path, caught.value.newest) == (str(path), 1)
    assert main(["list", str(tmp_path)]) == 1


def test_each_format_from_the_first_to_the_newest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path, OLD)
    monkeypatch.setattr(manifest_module, "FORMAT", 3)
    for found in (1, 2, 3):
        rewritten(path, lambda manifest, found=found: manifest.update(format=found))
        checkpoints.verify(path)


@dataclass(frozen=True, slots=True)
class LaterManifest(Manifest):
    """One that has a field more."""

    order: str = "none"


def test_a_field_of_the_manifest_that_an_older_format_lacks_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store(tmp_path, OLD)
    monkeypatch.setattr(manifest_module, "Manifest", LaterManifest)
    monkeypatch.setattr(manifest_module, "FORMAT", 2)
    manifest = manifest_module.read_manifest(path)
    assert (manifest.update, manifest.order) == (UPDATE, "none")
    rewritten(path, lambda manifest: manifest.pop("update"))
    with pytest.raises(CheckpointError, match="unexpected or missing fields"):
        manifest_module.read_manifest(path)


SAVED_NAMES = {
    "Csv",
    "EarlyStopping",
    "JsonLines",
    "LearningRateSchedule",
    "LogFile",
    "MinLearningRate",
    "ModelEMA",
    "MomentumTeacher",
    "OuterOptimizer",
    "ReduceOnPlateau",
    "StochasticWeightAveraging",
    "TensorBoard",
    "TimeLimit",
    "TrainingMetrics",
    "Validation",
    "_Replica",
}


def test_the_handlers_of_the_library_keep_their_names_in_checkpoints() -> None:
    """A class that is renamed keeps its former name as `saved_as`, or checkpoints that were written before lose its state."""
    classes = [value for name in handlers.__all__ if isinstance(value := getattr(handlers, name), type)]
    classes.append(outer_optimizer._Replica)  # `OuterOptimizer` attaches it for what is each rank's own
    names = {getattr(kind, "saved_as", None) or kind.__name__ for kind in classes if hasattr(kind, "load_state_dict")}
    assert names == SAVED_NAMES


class Count(Handler):
    """Counts updates."""

    def __init__(self) -> None:
        self.count = 0

    def attach(self, trainer: Trainer) -> None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._add)

    def _add(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]


class Tally(Count):
    """The same, renamed."""

    saved_as = "Count"


def test_a_handler_whose_class_was_renamed_gets_its_state(tmp_path: Path) -> None:
    for kind, max_iters in ((Count, 3), (Tally, 5)):
        job, handler = make(None, 0), kind()
        handler.attach(job.trainer)
        Checkpoint(tmp_path).attach(job.trainer)
        job.trainer.run(job.loader, max_iters=max_iters)
    assert handler.count == 5


def test_named_handlers_of_one_class_are_told_apart_in_any_order(tmp_path: Path) -> None:
    """One counts from 10 and one from 20; the second process attaches them the other way round."""
    for order, max_iters in (((10, 20), 3), ((20, 10), 5)):
        job, counts = make(None, 0), {first: Count() for first in order}
        for first, handler in counts.items():
            handler.count, handler.saved_as = first, f"from-{first}"
            handler.attach(job.trainer)
        Checkpoint(tmp_path).attach(job.trainer)
        job.trainer.run(job.loader, max_iters=max_iters)
    assert {first: handler.count for first, handler in counts.items()} == {10: 15, 20: 25}
