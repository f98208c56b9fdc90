"""A look at checkpoints without a run: which a directory has, which is the best, and what one says before the model is made."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ignite_train.arguments import path_of
from ignite_train.checkpoint.directory import CheckpointDirectory
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.manifest import MANIFEST, Manifest, UnusableCheckpoint, read_manifest
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.retention import Retention
from ignite_train.checkpoint.tree import TensorForm, decode
from ignite_train.errors import CheckpointError, CheckpointFormatError, DamagedCheckpointError, UnreadableCheckpointError

__all__ = [
    "MOST_LOOKS",
    "CheckpointInfo",
    "Found",
    "GroupInfo",
    "best",
    "best_of",
    "find",
    "is_removed",
    "pass_over",
    "read_checkpoint",
    "readable",
    "use_chosen",
]

_logger = logging.getLogger(__name__)
T = TypeVar("T")
MOST_LOOKS = 10
"""How often a checkpoint is chosen, if the run that saves there has removed the one before."""


@dataclass(frozen=True, slots=True)
class Found:
    """A directory that is, or should be, a checkpoint.

    Attributes:
        path: of it.
        manifest: what it says of itself; None if that cannot be read.
        error: why it cannot be read; None if it can.
    """

    path: Path
    manifest: Manifest | None
    error: UnusableCheckpoint | None = None

    @classmethod
    def failed(cls, error: UnusableCheckpoint) -> Found:
        """One whose manifest cannot be used."""
        return cls(Path(error.path), None, error)

    @property
    def damage(self) -> str:
        """What is wrong with it; empty if it is not known to be damaged."""
        return self.error.reason if isinstance(self.error, DamagedCheckpointError) else ""

    @property
    def unreadable(self) -> str:
        """Why it cannot be read although it may be whole: an error of the disk, or its format; empty if it can be read."""
        return "" if self.error is None or self.damage else self.error.reason


def find(directory: str | Path) -> list[Found]:
    """The checkpoints in `directory`, or the one that it is; the newest last, those without a whole manifest first.

    Reads manifests only; see `verify`.

    Raises:
        CheckpointError: it is not a directory.
    """
    root = path_of("directory", directory)
    if root.is_file():
        raise CheckpointError(f"{root} is a file; pass the directory of a run, or a checkpoint in it")
    if not root.is_dir():
        raise CheckpointError(f"the directory {root} does not exist")
    if (root / MANIFEST).exists():
        try:
            return [Found(root, read_manifest(root))]
        except (DamagedCheckpointError, UnreadableCheckpointError, CheckpointFormatError) as error:
            return [Found.failed(error)]
    for _ in range(MOST_LOOKS):
        found, failed = CheckpointDirectory(root, Disk()).scan()
        if not any(is_removed(error.path) for error in failed):
            break
    failed = [error for error in failed if not is_removed(error.path)]
    return [*map(Found.failed, failed), *(Found(root / name, manifest) for name, manifest in found)]


def readable(directory: str | Path) -> list[Found]:
    """The checkpoints of which one is to be chosen: as `find`, without damaged ones. A warning names each of those.

    Raises:
        UnreadableCheckpointError, CheckpointFormatError: one cannot be read, and it may be the one to choose.
        CheckpointError: it is not a directory.
    """
    for found in (everything := find(directory)):
        if isinstance(found.error, DamagedCheckpointError):
            pass_over(found.error)
        elif found.error is not None:
            raise found.error
    return [found for found in everything if found.error is None]


def pass_over(error: DamagedCheckpointError) -> None:
    """Warns that a checkpoint is not used, unless its run has removed it meanwhile."""
    if not is_removed(error.path):
        _logger.warning(f"{error}; it is passed over")


def is_removed(path: str | Path) -> bool:
    """Whether nothing has this name any more: a run removes old checkpoints while others look at them."""
    return not os.path.lexists(path)


def use_chosen(choose: Callable[[], Path], use: Callable[[Path], T]) -> T:
    """Calls `use` with the checkpoint that is chosen, again with another choice if the run removes it meanwhile.

    Raises:
        CheckpointError: they raise it, and it was not removed; or each of them was.
    """
    for _ in range(MOST_LOOKS):
        path = choose()
        try:
            return use(path)
        except CheckpointError:
            if not is_removed(path):
                raise
    raise CheckpointError(f"{path} was removed while it was read, as those before it; train with Checkpoint(keep=...) of more")


def best(directory: str | Path) -> Found | None:
    """The checkpoint in `directory` with the best score; None if none has one. Of equal ones the first.

    Of an update that was saved again with the same score it is the latest copy.

    Of which metric, and whether a lower score is better, is what the newest with a score says; those with a score of another
    metric, which an earlier script has named, do not count. Reads manifests only; see `verify`.

    Raises:
        UnreadableCheckpointError, CheckpointFormatError: one cannot be read, and it may be the best.
        CheckpointError: the directory does not exist, or the newest with a score does not say it.
    """
    return best_of(readable(directory))


def best_of(checkpoints: Iterable[Found]) -> Found | None:
    """The one with the best score among checkpoints whose newest is the last; see `best`."""
    scored = [(found, found.manifest) for found in checkpoints if found.manifest and found.manifest.score is not None]
    if not scored:
        return None
    newest, manifest = scored[-1]
    if manifest.scored_by is None:
        raise CheckpointError(f"{newest.path} does not say whether a lower score is better; name the best checkpoint itself")
    metric, mode = manifest.scored_by
    rule = Retention(last=1, best=1, mode=mode, every=None, metric=metric)
    (chosen,) = rule.best_of(rule.scored(one for _, one in scored))
    return [found for found, one in scored if rule.is_own(one) and (one.update, one.score) == chosen][-1]


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """A parameter group of an optimizer.

    Attributes:
        shapes: the shape of each parameter, by its name in the model.
        options: its options, such as `lr`, if they are numbers, strings or lists of them.
    """

    shapes: dict[str, tuple[int, ...]]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Facts about a run that its checkpoint holds.

    Attributes:
        path: of the checkpoint.
        update: `state.iteration`, the updates that were made.
        epoch: `state.epoch`, the epoch that was running or had just ended.
        num_steps: the updates that moved the parameters.
        num_skipped: updates that did not.
        num_micro_batches: the micro-batches of rank 0.
        world_size: how many ranks wrote it.
        score: of the model, if it was evaluated.
        config: `Checkpoint(..., config=)` of the script.
        shapes: the shape of each parameter and buffer of the model, by name.
        param_groups: the parameter groups of each optimizer, by its name in the checkpoint: "optimizer", or "optimizers/muon".
            That of one inside another has its attribute behind a point, "optimizer.base"; in a list "optimizer.parts-0".
    """

    path: Path
    update: int
    epoch: int
    num_steps: int
    num_skipped: int
    num_micro_batches: int
    world_size: int
    score: float | None
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    param_groups: dict[str, list[GroupInfo]]


def read_checkpoint(path: str | Path) -> CheckpointInfo:
    """Looks into a checkpoint before the model is made, so that a script can build what was saved. Reads no tensor.

    Args:
        path: a checkpoint, or a directory of them, whose newest counts. If one of its tensors turns out to be damaged, a run
            resumes from the one before.

    Raises:
        CheckpointError: the path has no checkpoint, or one of them cannot be read and may be the newest.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from ignite_train import create_trainer
        >>> from ignite_train.checkpoint import read_checkpoint
        >>> from ignite_train.handlers import Checkpoint
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
        >>> directory = tempfile.mkdtemp()
        >>> Checkpoint(directory).attach(trainer)
        >>> state = trainer.run([torch.ones(2, 4)] * 3, max_epochs=1)
        >>> info = read_checkpoint(directory)
        >>> info.update, info.shapes["weight"], info.param_groups["optimizer"][0].options["lr"]
        (3, (1, 4), 0.1)
    """
    return use_chosen(lambda: _newest(path), _read_into)


def _newest(path: str | Path) -> Path:
    if not (found := readable(path)):
        raise CheckpointError(f"{path} has no checkpoint whose manifest can be read")
    return found[-1].path


def _read_into(path: Path) -> CheckpointInfo:
    with CheckpointReader(path) as stored:
        try:
            return _read(stored)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(str(stored.path), f"its description is invalid: {error!r}") from error


def _read(stored: CheckpointReader) -> CheckpointInfo:
    manifest, counters, description = stored.manifest, stored.outline("trainer"), stored.outline("description")
    return CheckpointInfo(
        path=stored.path,
        update=manifest.update,
        epoch=manifest.epoch,
        num_steps=counters["num_steps"],
        num_skipped=counters["num_skipped"],
        num_micro_batches=counters["num_micro_batches"],
        world_size=manifest.world_size,
        score=manifest.score,
        config=decode(manifest.config, ("config",))["config"],
        shapes={name: form.shape for name, form in stored.outline("model").items() if isinstance(form, TensorForm)},
        param_groups={name: _groups(entry) for name, entry in description["optimizers"].items()},
    )


def _groups(described: Mapping[str, Any]) -> list[GroupInfo]:
    groups = zip(described["names"], described["shapes"], described["options"], strict=True)
    return [GroupInfo(dict(zip(names, map(tuple, shapes), strict=True)), dict(options)) for names, shapes, options in groups]
