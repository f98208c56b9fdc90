"""How a run resumes: from the newest checkpoint that is whole, the same one on every rank.

`Resumption` chooses the checkpoint, reads it on every rank before anything of the run is changed, puts its state back, and logs
what is different now.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ignite_train.arguments import did_you_mean, path_of
from ignite_train.checkpoint.capture import run_config, versions
from ignite_train.checkpoint.directory import CheckpointDirectory, on_main, refuse_unreadable, together
from ignite_train.checkpoint.fits import config_changes
from ignite_train.checkpoint.manifest import MANIFEST, Manifest, one_line, printable
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.run_state import RunState
from ignite_train.checkpoint.saved_run import SavedRun
from ignite_train.checkpoint.writer import CheckpointWriter
from ignite_train.data.how_exact import how_exact
from ignite_train.errors import CheckpointError, DamagedCheckpointError, UnreadableCheckpointError
from ignite_train.evaluation.uneven_metrics import metrics_without_state
from ignite_train.internals.of_ignite import NAMES_IN_STATE
from ignite_train.metrics import refuse_other_mode
from ignite_train.ranks import collectives

__all__ = ["Resumption", "checkpoint_to_resume", "log_how_exact", "read_agreed", "refuse_unlike_resume"]

_logger = logging.getLogger(__name__)
_MAX_LENGTH = 900  # of what is told of a checkpoint
_WORDS = ("auto", "must", "never")
T = TypeVar("T")


class Resumption:
    """Brings a run back to the state in a checkpoint.

    Args:
        run: the run.
        writer: of the run's own checkpoints.
    """

    def __init__(self, run: SavedRun, writer: CheckpointWriter) -> None:
        self._run, self._writer = run, writer
        self._state: RunState | None = None  # until its objects are put back for the second time
        self._half_restored: Path | None = None  # the checkpoint of which some object has raised when it was given its state

    def restore(self, resume: str | Path) -> Manifest | None:
        """Does what `resume` asks for; see `Trainer.run`. Collective.

        Returns:
            The manifest of the checkpoint that the run resumes from; None if it does not resume.

        Raises:
            ValueError: `resume` has an unknown value, or it is `"never"` and the directory has checkpoints.
            CheckpointError: no checkpoint was found where one must be, or none is whole, or it is of another run; or the
                trainer has trained, and the directory has checkpoints that it has neither written nor read.
        """
        trainer = self._run.trainer
        begins = not self._has_trained() or self._half_restored is not None
        if resume in ("auto", "never") and not begins:
            self._writer.refuse_unread(trainer.state.iteration)
            return None
        root, names = checkpoint_to_resume(self._writer.directory, resume, begins=begins)
        if not names:
            self._refuse_half_restored()
            return None
        own = self._writer.directory if root == self._writer.directory.path else None
        if own is None and not begins:
            self._writer.refuse_unread(trainer.state.iteration)
        state, manifest, path = read_agreed(root, names, own, lambda reader: RunState(reader, self._run))
        retention = self._writer.retention
        if retention.metric is not None and manifest.scored_by is not None:
            refuse_other_mode(retention.metric, retention.mode, *manifest.scored_by)
        self._half_restored, script = path, run_config(self._run)
        together(collectives.gather_objects, f"resuming from {path}", state.restore)
        self._half_restored, self._state = None, state
        self._writer.resume_from(path)
        if collectives.is_main_rank():
            changed = config_changes(manifest.config, script, run_config(self._run))
            lost = metrics_without_state(trainer) if trainer.progress.epoch_open else []
            _log_resumption(path, manifest, [*state.changed, *changed], state, lost)
        return manifest

    def _has_trained(self) -> bool:
        state = self._run.trainer.state
        return bool(state.iteration or state.epoch)

    def _refuse_half_restored(self) -> None:
        """Raises CheckpointError if training would continue with a mixture of two states."""
        if self._half_restored is not None:
            raise CheckpointError(
                f"training must not continue: the run holds parts of {self._half_restored}, and others could not be restored; "
                "resume from a checkpoint, or build model, optimizer and trainer again"
            )

    def put_back_objects(self) -> None:
        """Undoes what the handlers of STARTED and EPOCH_STARTED have done to a restored state. Does so once.

        Handlers such as metrics reset themselves there. To be called after all of them.
        """
        if self._state is not None:
            self._state.restore_objects()
            self._state = None

    def forget(self) -> None:
        """The objects are not put back any more."""
        self._state = None


def refuse_unlike_resume(resume: str | Path) -> None:
    """Raises ValueError if some of the ranks were told another word than others, or a word and others a path. Collective."""
    of_ranks = collectives.gather_objects(str(resume))
    words = [resume if resume in _WORDS else "a path" for resume in of_ranks]
    other = next((rank for rank, word in enumerate(words) if word != words[0]), 0)
    if other:
        raise ValueError(
            f"resume must be the same on all ranks, got {of_ranks[0]!r} on rank 0 and {of_ranks[other]!r} on rank {other}"
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """What rank 0 sees in a directory.

    Attributes:
        root: where the checkpoints are.
        names: of the checkpoints, the newest first.
        set_aside: names of those that an earlier start found damaged and renamed.
    """

    root: Path
    names: list[str]
    set_aside: list[str]


def checkpoint_to_resume(own: CheckpointDirectory, resume: str | Path, *, begins: bool = True) -> tuple[Path, list[str]]:
    """Finds the checkpoints that `resume` asks for, on rank 0, and tidies the run's own directory. Collective.

    Args:
        own: the directory of the run.
        resume: see `Trainer.run`.
        begins: the trainer has not trained in this process, which may be a later start of a run that began from a path.

    Returns:
        The directory, and the names of the checkpoints in it, the newest first; none if the run starts from the beginning.

    Raises:
        ValueError: `resume` is neither a known word nor a directory that exists; or it is `"never"`, and there are checkpoints.
        CheckpointError: there must be one, and none was found; or all are damaged; or the directory cannot be read; or one of
            them has a format that is not read.
    """
    directory, own_first = own, False
    if not (isinstance(resume, str) and resume in _WORDS):
        named = path_of("resume", resume)
        directory = CheckpointDirectory(named.resolve(), own.disk)
        # One of the run's own checkpoints is chosen where it is named, also where it is a link.
        own_first = begins and own.path.resolve() not in (directory.path, directory.path.parent, named.parent.resolve())
        if not any(together(collectives.gather_objects, "looking for checkpoints", partial(_is_there, directory))):
            hint = did_you_mean(resume, _WORDS)
            if directory.path.is_file() or directory.path.suffix:
                hint = "; for the weights of a file alone write load_weights(model, path) of ignite_train.checkpoint"
            raise ValueError(f"resume must be 'auto', 'must', 'never' or a directory that exists, got {str(resume)!r}{hint}")

    def look() -> _Found:
        found = _look(own, tidies=True) if own_first else None
        if found is None or not (found.names or found.set_aside):
            return _look(directory, tidies=directory is own)
        _logger.warning(
            f"resume={str(resume)!r} is where this run began, and is not read again, since {own.path} has checkpoints of it; "
            "to begin there again, choose another directory for Checkpoint"
        )
        return found

    found = on_main(collectives.gather_objects, "looking for checkpoints", look)
    if resume == "never" and found.names:
        raise ValueError(
            f"resume must not be 'never' where checkpoints are, got {len(found.names)} in {found.root}; continue "
            "with resume='auto', or choose another directory"
        )
    if not found.names and resume != "never":
        _refuse_new_start(found, resume)
    return found.root, found.names


def _refuse_new_start(found: _Found, resume: str | Path) -> None:
    """Raises CheckpointError if `resume` needs a checkpoint, or if a start without one would hide that there were some."""
    if found.set_aside:
        raise CheckpointError(
            f"{found.root} has no whole checkpoint and {len(found.set_aside)} that an earlier start found damaged, such as "
            f"{found.set_aside[-1]}: training does not start from the beginning without being told to; repair or replace them, "
            "or pass resume='never' once, or move them to another directory"
        )
    if resume != "auto":
        raise CheckpointError(f"{found.root} has no checkpoint, and resume={str(resume)!r} needs one")


def read_agreed(
    root: Path, names: list[str], own: CheckpointDirectory | None, read: Callable[[CheckpointReader], T]
) -> tuple[T, Manifest, Path]:
    """Reads the first of `names` that is whole for every rank. Collective.

    If one is damaged, a warning says what is wrong with it, and the next older one is tried. An error of the disk, and a
    format that is not read, are not damage: they are raised, and nothing is renamed.

    Args:
        root: their directory.
        names: of the checkpoints, the newest first.
        own: the directory at `root`, if the run saves to it; it renames a damaged checkpoint, which later starts then skip.
        read: what each rank does with one; it must not change the run.

    Raises:
        CheckpointError: none is whole, or one that is whole does not fit the run, or one cannot be read.
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
        if collectives.is_main_rank():
            is_renamed = own is not None and own.set_aside(name)
            _logger.warning(f"{reason}; {'it is renamed, and ' if is_renamed else ''}an older one is tried")
    raise CheckpointError(f"no checkpoint in {root} is whole: {'; '.join(reasons)}")


def _refuse_if_whole(path: Path, rank: int, reason: str) -> None:
    """Raises CheckpointError if rank 0 finds whole what another rank has found damaged. Collective."""

    def verify() -> bool:
        try:
            with CheckpointReader(path) as reader:
                reader.verify()
        except DamagedCheckpointError:
            return False
        return True

    if on_main(collectives.gather_objects, "reading a checkpoint again", verify):
        raise CheckpointError(
            f"{reason}; that is what rank {rank} reads, and rank 0 finds it whole, so nothing was renamed: look at the disk of "
            f"rank {rank}, and start again"
        )


def log_how_exact(loader: Any) -> None:
    """Logs, before the first batch, what of the data may differ in a resumed run, so that another loader can be chosen."""
    doubts, note = how_exact(loader)
    for doubt in doubts:
        _logger.warning(doubt)
    if note:
        _logger.info(note)


def _log_resumption(path: Path, manifest: Manifest, changed: list[str], state: RunState, lost: list[str]) -> None:
    """Says where a run resumes, and what is different now.

    Args:
        path: the checkpoint.
        manifest: of it.
        changed: what the script sets to other values than the script that wrote it, a line each.
        state: what was read from it.
        lost: the metrics of this epoch that are not in it.
    """
    before, now = manifest.versions, versions()
    changed += [f"{name}: {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]]
    if manifest.world_size != collectives.world_size():
        changed.append(f"ranks: {manifest.world_size} -> {collectives.world_size()}")
    notes = [f"resuming from {path}: epoch {manifest.epoch}, update {manifest.update}"]
    for note, names in (
        ("changed since", changed),
        ("starts from the beginning, because the checkpoint has no state for it", state.fresh),
        (
            f"counts only what follows in this epoch, because its class names no attributes to save in {NAMES_IN_STATE}",
            [f"metric {name!r}" for name in lost],
        ),
        ("in the checkpoint and not used, because it is not attached or is left out", state.unused),
    ):
        if names:
            notes.append(f"{note}: {', '.join(printable(name) for name in names)}")
    _logger.log(logging.WARNING if len(notes) > 1 else logging.INFO, "; ".join(notes))


def _is_there(directory: CheckpointDirectory) -> bool:
    try:
        return directory.exists()
    except OSError as error:
        raise UnreadableCheckpointError(str(directory.path), one_line(error)) from error


def _look(directory: CheckpointDirectory, *, tidies: bool) -> _Found:
    """Rank 0 looks into a directory: newest first, and damaged ones, whose age is unknown, before the others."""
    root = directory.path
    if not _is_there(directory):
        return _Found(root, [], [])
    try:
        if root.stat().st_mode & stat.S_IWOTH:
            _logger.warning(f"every user of this machine can write to {root}, and so replace what is loaded; chmod o-w it")
        if tidies:
            _tidy(directory)
        if MANIFEST in directory.disk.names(root):
            if tidies:
                raise ValueError(
                    f"directory of Checkpoint must be that of a run, got the checkpoint {root}; write "
                    f"Checkpoint('{root.parent}'), or begin in another directory by trainer.run(loader, resume='{root}')"
                )
            return _Found(root.parent, [root.name], [])
        found, failed = directory.scan(afresh=True)
        set_aside = directory.set_aside_before()
    except OSError as error:
        raise UnreadableCheckpointError(str(root), one_line(error)) from error
    refuse_unreadable(failed)
    names = [Path(failure.path).name for failure in reversed(failed)] + [name for name, _ in reversed(found)]
    return _Found(root, names, set_aside)


def _tidy(directory: CheckpointDirectory) -> None:
    """Removes what a killed process has left. Saving does so too, but a finished run saves no more."""
    try:
        directory.tidy()
    except OSError as error:
        _logger.warning(f"what an earlier process has left in {directory.path} could not be removed: {error}")


def _attempt(path: Path, read: Callable[[CheckpointReader], T]) -> tuple[tuple[T, Manifest] | None, str, str]:
    try:
        if not (path.exists() or path.is_symlink()):  # a link is damage, which the reader reports
            raise CheckpointError(f"{path} does not exist on rank {collectives.rank()}: all ranks must see the same files")
        with CheckpointReader(path) as reader:
            return (read(reader), reader.manifest), "", ""
    except DamagedCheckpointError as error:
        return None, "", printable(str(error), _MAX_LENGTH)
    except CheckpointError as error:
        return None, printable(str(error), _MAX_LENGTH), ""
    except OSError as error:
        return None, str(UnreadableCheckpointError(str(path), one_line(error))), ""
    except Exception as error:  # whole, but of another kind; the other ranks wait for this one's answer
        return None, f"{path} does not fit this run: {type(error).__name__}: {one_line(error)}", ""
