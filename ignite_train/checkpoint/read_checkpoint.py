"""A look into a checkpoint before the model is made: where the run was, how it was set up, and what its optimizers stepped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ignite_train.checkpoint.found import find
from ignite_train.checkpoint.reader import CheckpointReader, TensorClaim
from ignite_train.checkpoint.tree import decode
from ignite_train.errors import CheckpointError, DamagedCheckpointError

__all__ = ["CheckpointInfo", "GroupInfo", "read_checkpoint"]


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
            That of one inside another has its attribute behind a point, "optimizer.base".
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
        CheckpointError: the path has no checkpoint, or it cannot be read.

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
    whole = [found for found in find(path) if found.manifest is not None]
    if not whole:
        raise CheckpointError(f"{path} has no checkpoint whose manifest can be read")
    with CheckpointReader(whole[-1].path) as stored:
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
        shapes={name: claim.shape for name, claim in stored.outline("model").items() if isinstance(claim, TensorClaim)},
        param_groups={name: _groups(entry) for name, entry in description["optimizers"].items()},
    )


def _groups(described: Mapping[str, Any]) -> list[GroupInfo]:
    groups = zip(described["names"], described["shapes"], described["options"], strict=True)
    return [GroupInfo(dict(zip(names, map(tuple, shapes), strict=True)), dict(options)) for names, shapes, options in groups]
