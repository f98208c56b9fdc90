"""Checkpoints that survive anything, and going on from them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from ignite.engine import Events
from torch import nn

from ignite_train.arguments import did_you_mean, one_of, positive_int, real_number
from ignite_train.checkpoint.directory import Contents, together
from ignite_train.checkpoint.held_state import HeldState
from ignite_train.checkpoint.manifest import Manifest
from ignite_train.checkpoint.resume import (
    checkpoint_to_resume,
    log_how_exact,
    log_resumption,
    plain_config,
    read_agreed,
    versions,
)
from ignite_train.checkpoint.retention import Retention
from ignite_train.checkpoint.run_state import RunState, StateRules, capture, checked_objects, refuse_odd_optimizers
from ignite_train.checkpoint.writer import GIVE_UP_AFTER, CheckpointWriter
from ignite_train.evaluator import Evaluator
from ignite_train.handler import Handler
from ignite_train.loop.dispatch import Dispatcher, Stateful
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Piggyback
from ignite_train.trainer import Trainer

__all__ = ["Checkpoint"]

_PATIENCE_SECONDS = 30.0  # for a save in flight, when the run breaks off


class Checkpoint(Handler, Piggyback):
    """Saves all that a run is made of, and brings it back: killed anywhere, a run goes on bitwise as if nothing had happened.

    Saved are model, optimizer, loss scaling, counters, the place in the data, metrics, every handler attached to the trainer
    or the evaluator that has a `state_dict`, the random generators of every rank (Python, NumPy, torch on the CPU and on
    accelerators) and of the loader, and `to_save`. All ranks attach it alike; saving is collective, and so is `trainer.run`.

    A checkpoint is a directory, `update-00000012`, that is renamed into place once each byte of it is on the disk, so it is
    whole or not there; it is checked by its checksums when it is read, and an older one takes the place of one that is
    damaged. It is taken after everything else that happens at the end of an update, an epoch or the run. The run waits only
    for a copy of the state in the host's memory, which stays reserved; the rest is done by a thread, one save at a time. What
    goes wrong is raised, on all ranks, at the next save or at the end.

    Written by any number of ranks, it can be read by any other. Then a rank that was not there takes over what rank 0 had of
    its own, with other random numbers. In the middle of an epoch that needs a `ResumableLoader`, and each sample is used once
    all the same. What a loader may not give again as it was is logged when the run starts. Models sharded by `fully_shard`
    are written in shards and come back with any sharding, or none.

    Nothing in a checkpoint is run when it is read: numbers, strings and tensors, no pickle. A run holds its directory: another
    one there is refused while the first is alive. All machines of a run must see the same files in it.

    When a run starts, everything that a save does is tried but for the tensors, so that a state that cannot be stored, or a
    directory that cannot be written to, is found before the first batch.

    Args:
        directory: of the checkpoints of this run.
        every: save every so many updates.
        every_seconds: save when the last one is so long ago, by the clock of rank 0.
        every_epochs: save after every so many epochs; 1 if nothing else is given. The end of a run is always saved.
        keep: how many of the newest stay.
        keep_every: those whose update is a multiple of this stay for ever.
        best: name of a metric of the evaluator. Whenever it is the best so far, that state is saved too.
        mode: whether the best is the `"min"` or the `"max"`.
        keep_best: how many of the best stay.
        to_save: more objects with `state_dict` and `load_state_dict`, by name; the same on all ranks, so rank 0 writes them.
        config: plain values; on resuming, what has changed is listed in the log.
        asynchronous: False saves before the run goes on.
        on_error: what happens when a save fails: `"raise"`, or `"warn"` and train on. The old ones stay either way. A failure
            at the end of the run, whose last state then is not on the disk, is always raised.
        give_up_after: with `on_error="warn"`, that many failures in a row are raised all the same.
        leave_out: names of attached handlers whose state is neither saved nor read, such as `("LambdaStateScheduler",)`. A
            handler whose state cannot be stored is left out anyway, with a warning. `"carried"` has a run begin without what
            `state.carried` held, which another number of ranks cannot take over.
        script_wins: options of the optimizer, such as `("lr", "weight_decay")`, that keep the script's value on resuming. All
            others are those of the checkpoint, and the log lists what the script sets in another way. With `"lr"`, a schedule
            whose state is restored keeps its place and its shape, over the script's rate.
        on_changed_data: what happens if a run resumes in the middle of an epoch with another loader, so that samples would be
            missed or used twice (another seed, length or batch size, say): `"raise"`, or `"warn"` and continue all the same.

    Attributes:
        held_seconds: how long the latest save held the run.
        total_held_seconds: how long all saves of this process have held it.

    Example:
        >>> from ignite_train.handlers import Checkpoint
        >>> trainer, directory = getfixture("trainer"), getfixture("tmp_path")
        >>> checkpoint = Checkpoint(directory, every=3)
        >>> checkpoint.attach(trainer)
        >>> state = trainer.run(getfixture("loader"), max_epochs=1)
        >>> checkpoint.latest.name
        'update-00000004'
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        every_epochs: int | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        best: str | None = None,
        mode: Literal["min", "max"] = "min",
        keep_best: int = 1,
        to_save: Mapping[str, Stateful] | None = None,
        config: Mapping[str, Any] | None = None,
        asynchronous: bool = True,
        on_error: Literal["raise", "warn"] = "raise",
        leave_out: Iterable[str] = (),
        script_wins: Iterable[str] = (),
        give_up_after: int = GIVE_UP_AFTER,
        on_changed_data: Literal["raise", "warn"] = "raise",
    ) -> None:
        self.directory = Path(directory).absolute()
        _check_directory(self.directory)
        self.every = None if every is None else positive_int("every", every)
        self.every_seconds = None if every_seconds is None else real_number("every_seconds", every_seconds, above=0)
        self.every_epochs = None if every_epochs is None else positive_int("every_epochs", every_epochs)
        if every is None and every_seconds is None and every_epochs is None:
            self.every_epochs = 1
        self.best = best
        self.to_save = checked_objects(to_save or {})
        self.config = dict(config or {})
        self._rules, self._held = StateRules(leave_out, script_wins), HeldState()
        retention = Retention(
            last=positive_int("keep", keep),
            best=positive_int("keep_best", keep_best),
            lower_is_better=one_of("mode", mode, ("min", "max")) == "min",
            every=None if keep_every is None else positive_int("keep_every", keep_every),
        )
        self.on_changed_data = one_of("on_changed_data", on_changed_data, ("raise", "warn"))
        warns = one_of("on_error", on_error, ("raise", "warn")) == "warn"
        patience = positive_int("give_up_after", give_up_after)
        self.saver = CheckpointWriter(self.directory, retention, asynchronous=asynchronous, warns=warns, give_up_after=patience)
        self.held_seconds = self.total_held_seconds = 0.0
        self._trainer: Trainer | None = None
        self._evaluator: Evaluator | None = None
        self._pending: RunState | None = None
        self._score: tuple[int, float] | None = None  # the latest, and the update it is of
        self._best: float | None = None
        self._due = self._running = self._has_warned = False
        self._clock = time.monotonic()
        self._saved: Any = None  # the moment that was saved last

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint that this process has committed or gone on from; None before."""
        return self.saver.latest

    def attach(self, trainer: Trainer, *, evaluator: Evaluator | None = None) -> None:
        """Saves during each run of `trainer`, and lets `trainer.run` resume.

        Args:
            trainer: the trainer, with model and optimizer as they will be.
            evaluator: whose metric decides what is `best`, and whose handlers are saved too.
        """
        if trainer._resume_with is not None:
            raise ValueError("a trainer must have one Checkpoint at most, got a second; give the first more cadences")
        if self.best is not None and evaluator is None:
            raise ValueError(f"best={self.best!r} needs an evaluator; pass attach(trainer, evaluator=...)")
        refuse_odd_optimizers(trainer, self.to_save)
        trainer._resume_with, self._trainer, self._evaluator = self, trainer, evaluator
        if self.every_seconds is not None:
            trainer.piggybacks.append(self)
        if evaluator is not None and self.best is not None:
            evaluator.append_event_handler(Events.COMPLETED, self._note_score)
        trainer.prepend_event_handler(Events.STARTED, self._start)
        trainer.append_event_handler(Events.STARTED, self._put_back)
        trainer.append_event_handler(Events.STARTED, self._try_out)
        trainer.append_event_handler(Events.EPOCH_STARTED, self._put_back_in_epoch)
        trainer.append_event_handler(Events.ITERATION_COMPLETED, self._after_update)
        trainer.append_event_handler(Events.EPOCH_COMPLETED, self._after_epoch)
        for event in (Events.TERMINATE, Events.INTERRUPT, Events.COMPLETED):
            trainer.append_event_handler(event, self._at_end)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, self._abandon)
        trainer.on_exit.append(self._stop)

    def holding(self) -> AbstractContextManager[None]:
        """See `Restorer`: during a run no other one may write to the directory. Collective."""
        return self.saver.holding()

    # --- resuming ---------------------------------------------------------------------------------------------------------

    def restore(self, resume: str | Path) -> None:
        """Goes back to what `resume` says; see `Trainer.run`, which calls it. Collective.

        Raises:
            ValueError: `resume` is nothing that is known, or must not be `"never"`.
            CheckpointError: there is no checkpoint, none is whole, or it is of another model.
        """
        trainer = self._attached()
        self.saver.wait()
        self._rules.begin(trainer, self.to_save, self._evaluator_handlers(), self._held.names(self._engines()))
        if resume in ("auto", "never") and (trainer.state.iteration or trainer.state.epoch):
            return
        root, names = checkpoint_to_resume(self.saver.directory, resume)
        if not names:
            return
        disk = self.saver.disk if root == self.directory else None
        state, manifest, path = read_agreed(
            root, names, disk, lambda stored: RunState(stored, trainer, self.to_save, self._evaluator_handlers(), self._rules)
        )
        changed = state.changed
        together(collectives.gather_objects, f"going on from {path}", state.restore)
        trainer.load_data_position(trainer.data_position(), on_changed_data=self.on_changed_data)
        self._pending, self._score = state, None if manifest.score is None else (manifest.update, manifest.score)
        self.saver.go_on_from(path)
        if collectives.is_main_rank():
            config = plain_config(self.config, trainer._description)
            log_resumption(path, manifest, config, changed=changed, fresh=state.fresh, unused=state.unused)

    def _start(self, trainer: Trainer) -> None:
        """Before all other handlers of STARTED: what needs all ranks, what is known of the scores, what will not be exact."""
        self._running = True
        self.saver.prepare()
        if collectives.is_main_rank() and not self._has_warned:
            log_how_exact(trainer.state.dataloader)
        self._has_warned = True
        self._clock, self._due = time.monotonic(), False
        if self.best is not None:
            self._best = together(collectives.gather_objects, "looking for the best checkpoint", self._best_on_disk)[0]

    def _best_on_disk(self) -> float | None:
        found = self.saver.directory.scan()[0] if collectives.is_main_rank() else []
        return self.saver.retention.best_of([manifest for _, manifest in found])

    def _put_back(self, trainer: Trainer) -> None:
        """After all other handlers of STARTED; if an epoch goes on, after those of its EPOCH_STARTED, where metrics reset."""
        self._held.note(self._engines())
        if self._pending is not None and trainer.state_dict()["epoch_iteration"] == 0:
            self._put_back_in_epoch()

    def _try_out(self) -> None:
        """After all other handlers of STARTED: what would make each save fail is found before the first batch."""
        self.saver.try_out(self._capture())

    def _put_back_in_epoch(self) -> None:
        if self._pending is not None:
            self._pending.restore_objects()
            self._pending = None

    # --- saving -----------------------------------------------------------------------------------------------------------

    def payload(self) -> Sequence[float]:
        """See `Piggyback`: whether it is time, by the clock of rank 0."""
        late = self.every_seconds is not None and time.monotonic() - self._clock >= self.every_seconds
        return [float(late and collectives.is_main_rank())]

    def on_reduced(self, sums: list[float]) -> None:
        """See `Piggyback`."""
        self._due = self._due or sums[0] > 0

    def _note_score(self, evaluator: Evaluator) -> None:
        metrics = evaluator.state.metrics
        if self.best not in metrics:
            hint = did_you_mean(self.best, metrics)
            raise ValueError(f"best must be one of the evaluator's metrics {sorted(metrics)}, got {self.best!r}{hint}")
        score = float(metrics[self.best])
        self._score = (self._attached().state.iteration, score)
        if self.saver.retention.is_better(score, self._best):
            self._best, self._due = score, True

    def _after_update(self, trainer: Trainer) -> None:
        if trainer.should_terminate:  # the next handlers are those of the end, which save
            return
        if self._due or (self.every is not None and trainer.state.iteration % self.every == 0):
            self._save()

    def _after_epoch(self, trainer: Trainer) -> None:
        if self._due or (self.every_epochs is not None and trainer.state.epoch % self.every_epochs == 0):
            self._save()

    def _at_end(self) -> None:
        """Saves what was not saved yet, and waits until it is on the disk."""
        if self._due or self._saved != self._moment():
            self._save(is_last=True)
        self.saver.wait(is_last=True)

    def _stop(self) -> None:
        self._running = False

    def _abandon(self, _error: BaseException) -> None:
        self.saver.abandon(_PATIENCE_SECONDS)

    def save(self) -> None:
        """Saves the run: in a handler, at the end of the running update or epoch, after all else there; between runs at once.

        Collective.

        Raises:
            CheckpointError: the save before failed, or some state is no plain value.
        """
        if self._running:
            self._due = True
        else:
            self._save()

    def _save(self, *, is_last: bool = False) -> None:
        started, trainer = time.monotonic(), self._attached()
        trainer.verify_ranks()  # what the ranks do not agree on must not be saved
        state = trainer.state
        score = None if self._score is None or self._score[0] != state.iteration else self._score[1]
        contents = self._capture()
        self.saver.save(
            contents,
            Manifest(
                update=state.iteration,
                epoch=state.epoch,
                serial=0,
                world_size=collectives.world_size(),
                score=None if score is None or not math.isfinite(score) else score,
                config=plain_config(self.config, trainer._description),
                versions=versions(),
                files={},
            ),
            is_last=is_last,
        )
        self._saved, self._due, self._clock = self._moment(), False, started
        self.held_seconds = time.monotonic() - started
        self.total_held_seconds += self.held_seconds

    def _capture(self) -> Contents:
        """What this rank writes; warns of what no checkpoint will hold."""
        trainer = self._attached()
        contents = capture(trainer, self.to_save, self._evaluator_handlers(), self._rules)
        if collectives.is_main_rank() and contents.failure is None:
            modules = [
                entry for entry in (*trainer._stateful_parts.values(), *self.to_save.values()) if isinstance(entry, nn.Module)
            ]
            saved = [piece.data for piece in contents.pieces.values()]
            self._held.warn(self._engines(), saved, modules, self._rules.leave_out)
        return contents

    def _engines(self) -> list[Dispatcher]:
        return [engine for engine in (self._attached(), self._evaluator) if engine is not None]

    def _moment(self) -> tuple[Any, ...]:
        state = self._attached().state_dict()
        return state["iteration"], state["epochs_completed"], state["ended"]

    def _attached(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("attach(trainer) must be called first")
        return self._trainer

    def _evaluator_handlers(self) -> Mapping[str, Stateful]:
        return {} if self._evaluator is None else self._evaluator.stateful


def _check_directory(directory: Path) -> None:
    """Raises ValueError if checkpoints can never be written there."""
    if directory.exists():
        if not directory.is_dir():
            raise ValueError(f"directory must be a directory, or not be there yet, got the file {str(directory)!r}")
        return
    for path in (directory, *directory.parents):
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f"directory must be a directory, or not be there yet, got {str(directory)!r}, where {str(path)!r} is a link to "
                "what is not there; make its target, or remove the link"
            )
