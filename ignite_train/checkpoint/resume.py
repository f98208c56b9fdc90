"""Choosing the checkpoint to go on from: the newest that is whole, the same one on every rank."""

from __future__ import annotations

import logging
import platform
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ignite
import numpy as np
import torch

from ignite_train.arguments import did_you_mean
from ignite_train.checkpoint.directory import CheckpointDirectory, together
from ignite_train.checkpoint.disk import Disk
from ignite_train.checkpoint.manifest import MANIFEST, Manifest, one_line
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.tree import TreeEncoder, decode
from ignite_train.data.position import how_exact
from ignite_train.errors import CheckpointError, DamagedCheckpointError, UnreadableCheckpointError
from ignite_train.ranks import collectives

__all__ = [
    "checkpoint_to_resume",
    "differences",
    "log_how_exact",
    "log_resumption",
    "plain_config",
    "read_agreed",
    "versions",
]

_logger = logging.getLogger(__name__)
_WORDS = ("auto", "must", "never")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Found:
    """What rank 0 sees in a directory.

    Attributes:
        root: where the checkpoints are.
        names: of the checkpoints, the newest first.
        set_aside: of those that an earlier start found damaged and renamed.
    """

    root: Path
    names: list[str]
    set_aside: list[str]


def checkpoint_to_resume(own: CheckpointDirectory, resume: str | Path) -> tuple[Path, list[str]]:
    """Looks for what `resume` asks for, on rank 0, and tidies the run's own directory. Collective.

    Args:
        own: the directory of the run.
        resume: see `Trainer.run`.

    Returns:
        The directory to look into, and the names of the checkpoints in it, the newest first; none if the run is to begin anew.

    Raises:
        ValueError: `resume` is no word and no directory that exists; or it is `"never"`, and there are checkpoints.
        CheckpointError: none is there, and it must; or all that were there are damaged; or the directory cannot be read.
    """
    directory = own
    if not (isinstance(resume, str) and resume in _WORDS):
        directory = CheckpointDirectory(Path(resume).resolve(), own.disk)
        if not any(together(collectives.gather_objects, "looking for checkpoints", partial(_is_there, directory))):
            hint = did_you_mean(resume, _WORDS)
            raise ValueError(f"resume must be 'auto', 'must', 'never' or a directory that exists, got {str(resume)!r}{hint}")
    look: Callable[[], _Found | None] = lambda: _look(directory, tidies=directory is own) if _main() else None  # noqa: E731
    found = together(collectives.gather_objects, "looking for checkpoints", look)[0]
    assert found is not None  # noqa: S101  # rank 0 has looked
    if resume == "never" and found.names:
        raise ValueError(
            f"resume must not be 'never' where checkpoints are, got {len(found.names)} in {found.root}; go on with "
            "resume='auto', or choose another directory"
        )
    if not found.names and resume != "never":
        _refuse_to_begin_anew(found, resume)
    return found.root, found.names


def _refuse_to_begin_anew(found: _Found, resume: str | Path) -> None:
    """Raises CheckpointError if a start without a checkpoint would hide that there were some, or must not be."""
    if found.set_aside:
        raise CheckpointError(
            f"{found.root} has no whole checkpoint and {len(found.set_aside)} that an earlier start found damaged, such as "
            f"{found.set_aside[-1]}: training does not start from the beginning without being told to; repair or replace them, "
            "or pass resume='never' once, or move them to another directory"
        )
    if resume != "auto":
        raise CheckpointError(f"there is no checkpoint in {found.root}, and resume={str(resume)!r} needs one")


def read_agreed(
    root: Path, names: list[str], disk: Disk | None, read: Callable[[CheckpointReader], T]
) -> tuple[T, Manifest, Path]:
    """Reads the first of `names` that is whole for every rank. Collective.

    If one is damaged, a warning says what is wrong with it, and the next older one is tried. An error of the disk is
    not damage: it is raised, and nothing is renamed.

    Args:
        root: where they are.
        names: the newest first.
        disk: on which damaged ones are renamed, so that nobody stumbles over them again; None leaves them.
        read: what each rank does with one; it changes nothing yet.

    Raises:
        CheckpointError: none is whole, or what is whole does not fit the run, or one cannot be read at the moment.
    """
    reasons = []
    for name in names:
        value, refused, damaged = _attempt(root / name, read)
        outcomes = collectives.gather_objects((refused, damaged))
        refusal = next((refused for refused, _ in outcomes if refused), "")
        if refusal:
            raise CheckpointError(refusal)
        number, reason = next(((rank, damaged) for rank, (_, damaged) in enumerate(outcomes) if damaged), (0, ""))
        if not reason:
            assert value is not None  # noqa: S101  # it was read
            return *value, root / name
        if number > 0:
            _refuse_if_whole(root / name, number, reason)
        reasons.append(reason)
        if _main():
            is_renamed = disk is not None and CheckpointDirectory(root, disk).set_aside(name)
            _logger.warning(f"{reason}; {'it is renamed, and ' if is_renamed else ''}an older one is tried")
    raise CheckpointError(f"no checkpoint in {root} is whole: {'; '.join(reasons)}")


def _refuse_if_whole(path: Path, rank: int, reason: str) -> None:
    """Raises CheckpointError if rank 0 finds whole what another rank has found damaged. Collective."""

    def verify() -> bool:
        try:
            with CheckpointReader(path) as stored:
                stored.verify()
        except DamagedCheckpointError:
            return False
        return True

    if together(collectives.gather_objects, "reading a checkpoint again", lambda: _main() and verify())[0]:
        raise CheckpointError(
            f"{reason}; that is what rank {rank} reads, and rank 0 finds it whole, so nothing was renamed: look at the disk of "
            f"rank {rank}, and start again"
        )


def log_how_exact(loader: Any) -> None:
    """Says what of the data a resumed run may not find again as it was, before it is too late to choose another loader."""
    doubts, note = how_exact(loader)
    for doubt in doubts:
        _logger.warning(doubt)
    if note:
        _logger.info(note)


def log_resumption(
    path: Path,
    manifest: Manifest,
    config: Any,
    *,
    fresh: Sequence[str],
    unused: Sequence[str],
    changed: Sequence[str] = (),
) -> None:
    """Says where a run goes on, and what is not as it was.

    Args:
        path: the checkpoint.
        manifest: of it.
        config: what `plain_config` gives for this run.
        fresh: what the checkpoint has no state for.
        unused: what it has a state of, and the run has not.
        changed: what the script sets in another way than the one that wrote the checkpoint, a line each.
    """
    changed = [*changed, *differences(manifest.config, config)]
    before, now = manifest.versions, versions()
    changed += [f"{name}: {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]]
    if manifest.world_size != collectives.world_size():
        changed.append(f"ranks: {manifest.world_size} -> {collectives.world_size()}")
    notes = [f"going on from {path}: epoch {manifest.epoch}, update {manifest.update}"]
    for note, names in (
        ("changed since", changed),
        ("begins anew, for there is no state that it could take over", fresh),
        ("not used, for it is not attached", unused),
    ):
        if names:
            notes.append(f"{note}: {', '.join(names)}")
    _logger.log(logging.WARNING if len(notes) > 1 else logging.INFO, "; ".join(notes))


def plain_config(config: Any, settings: Any) -> Any:
    """The user's configuration and how the trainer was made, as a tree for the manifest; what is not plain, as text."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(entry) for entry in value]
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

    return TreeEncoder().encode({"config": plain(config), "trainer": plain(settings)}, ("config",))


def differences(saved: Any, current: Any) -> list[str]:
    """What differs between two trees of `plain_config`, a line each."""

    def flat(tree: Any) -> dict[str, Any]:
        lines: dict[str, Any] = {}

        def walk(value: Any, path: str) -> None:
            if isinstance(value, dict):
                for key, entry in value.items():
                    walk(entry, f"{path}.{key}" if path else str(key))
            else:
                lines[path] = value

        walk(decode(tree, ("config",)), "")
        return lines

    before, now = flat(saved), flat(current)
    keys = [key for key in {**before, **now} if repr(before.get(key)) != repr(now.get(key)) or (key in before) != (key in now)]
    return [f"{key}: {_shown(before, key)} -> {_shown(now, key)}" for key in keys]


def versions() -> dict[str, str]:
    """Of what a run's numbers depend on."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pytorch-ignite": ignite.__version__,
        "numpy": np.__version__,
    }


def _shown(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "nothing"


def _main() -> bool:
    return collectives.is_main_rank()


def _is_there(directory: CheckpointDirectory) -> bool:
    try:
        return directory.exists()
    except OSError as error:
        raise UnreadableCheckpointError(str(directory.path), one_line(error)) from error


def _look(directory: CheckpointDirectory, *, tidies: bool) -> _Found:
    """Rank 0: newest first, damaged ones (which are not known to be old) before the others."""
    root = directory.path
    if not _is_there(directory):
        return _Found(root, [], [])
    try:
        if root.stat().st_mode & stat.S_IWOTH:
            _logger.warning(f"every user of this machine can write to {root}, and so replace what is loaded; chmod o-w it")
        if tidies:
            _tidy(directory)
        if MANIFEST in directory.disk.names(root):
            return _Found(root.parent, [root.name], [])
        found, failed = directory.scan(afresh=True)
        set_aside = directory.set_aside_before()
    except OSError as error:
        raise UnreadableCheckpointError(str(root), one_line(error)) from error
    unreadable = [failure for failure in failed if isinstance(failure, UnreadableCheckpointError)]
    if unreadable:
        raise unreadable[0]
    names = [Path(failure.path).name for failure in reversed(failed)] + [name for name, _ in reversed(found)]
    return _Found(root, names, set_aside)


def _tidy(directory: CheckpointDirectory) -> None:
    """Removes what an earlier process was killed at. Saving does that too, but a run that is finished saves no more."""
    try:
        directory.tidy()
    except OSError as error:
        _logger.warning(f"what an earlier process has left in {directory.path} could not be removed: {error}")


def _attempt(path: Path, read: Callable[[CheckpointReader], T]) -> tuple[tuple[T, Manifest] | None, str, str]:
    try:
        if not path.exists():
            raise CheckpointError(f"{path} is not there on rank {collectives.rank()}: all ranks must see the same files")
        with CheckpointReader(path) as stored:
            return (read(stored), stored.manifest), "", ""
    except DamagedCheckpointError as error:
        return None, "", str(error)
    except CheckpointError as error:
        return None, str(error), ""
    except OSError as error:
        return None, str(UnreadableCheckpointError(str(path), one_line(error))), ""
    except Exception as error:  # whole, but of another kind; the other ranks wait for this one's answer
        return None, f"{path} does not fit this run: {type(error).__name__}: {one_line(error)}", ""
