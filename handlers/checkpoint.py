"""Checkpoints from which a killed run resumes bitwise."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ignite.engine import Engine, Events

from ignite_train.arguments import directory_of, mapping_of, one_of, positive_int, settings_of
from ignite_train.checkpoint.cadence import Cadence
from ignite_train.checkpoint.capture import HeldState, capture, paused_collection, run_config, versions
from ignite_train.checkpoint.directory import on_main, together, try_out
from ignite_train.checkpoint.disk import refuse_other_systems
from ignite_train.checkpoint.manifest import Manifest, seal
from ignite_train.checkpoint.mirror import Mirror
from ignite_train.checkpoint.read_checkpoint import best
from ignite_train.checkpoint.resume import Resumption, log_how_exact, refuse_unlike_resume
from ignite_train.checkpoint.retention import Retention
from ignite_train.checkpoint.run_state import check_contents, names_in, restore_model
from ignite_train.checkpoint.saved_run import SavedRun, checked_names, checked_objects
from ignite_train.checkpoint.writer import GIVE_UP_AFTER, CheckpointWriter
from ignite_train.engine.attachable import Stateful
from ignite_train.engine.dispatch import append_handler
from ignite_train.errors import CheckpointError
from ignite_train.evaluation.evaluator import Evaluator
from ignite_train.kinds_of_handlers import Handler
from ignite_train.metrics import score_in, score_mode
from ignite_train.ranks import collectives
from ignite_train.ranks.agreed_score import agreed_score
from ignite_train.trainer import Trainer

__all__ = ["BestCheckpoint", "Checkpoint"]


class BestCheckpoint(NamedTuple):
    """The checkpoint with the best score."""

    path: Path
    score: float


_logger = logging.getLogger(__name__)


class Checkpoint(Handler):
    """Saves the whole run during training, and lets `trainer.run` resume it: killed at any moment, it ends with the same bits.

    It saves model, optimizer, loss scaling, counters, the position in the data, metrics, every handler attached to the trainer
    or the evaluator that has a `state_dict`, the random generators of every rank (Python, NumPy, torch on the CPU and on
    accelerators) and of the loader, and `to_save`. Attach it on all ranks; saving and `trainer.run` are collective.

    A checkpoint is a directory, `update-00000012`, that is renamed into place once each byte of it is on the disk, so it is
    whole or not there. Its checksums are compared when it is read; if it is damaged, the one before is used. It is taken after
    everything else that happens at the end of an update, an epoch or the run. The run waits only for a copy of the state into
    memory of the host, which stays reserved; a thread does the rest, one save at a time. An error of a save is raised at the
    next save or at the end of the run, on all ranks.

    Any number of ranks can read what another number wrote, unless an optimizer or an object of `to_save` differs between the
    ranks, as a distributed Muon does: then each rank has its own back, on as many ranks. A rank that did not exist takes over
    the state of rank 0, with other random numbers. In the middle of an epoch that needs a `ResumableLoader`, and each sample
    is still used once. What a loader may not repeat exactly is logged when the run starts. Models sharded by `fully_shard` are
    written in shards and can be read with any other sharding, or unsharded.

    Nothing in a checkpoint is executed when it is read: it holds numbers, strings and tensors, and no pickle. A run holds its
    directory: a second run there is refused while the first is alive. All machines of a run must see the same files in it.

    When a run starts, a save without the tensors is tried, so that a state that cannot be stored, or a directory that cannot be
    written to, is found before the first batch. After the first step, when the optimizer has a state, the state is tried once
    more, and looked at as a resumed run would.

    Args:
        directory: where the checkpoints of this run are written. A URL, such as `"s3://bucket/run"`, stands for
            `~/.cache/ignite_train/s3/bucket/run` (`XDG_CACHE_HOME` in place of `~/.cache` if that is set) with that `mirror`.
        every: save every N updates.
        every_seconds: save when this many seconds have passed since the last save (rank 0's clock).
        every_epochs: save every N epochs; 1 if neither this nor `every` nor `every_seconds` is given. The end of a run is
            always saved.
        keep: how many of the newest checkpoints stay.
        keep_every: checkpoints whose update is a multiple of this are never removed.
        score: name of a metric of the evaluator. Whenever it is among the `keep_best` best, that state is saved too. Of several
            evaluations after the same update the first counts. Evaluate at the end of an update, an epoch or the run;
            in a session, and between two runs, call `save()` after it. A state that the next update has changed before it was
            saved, as after an evaluation at EPOCH_STARTED or within an update, is not kept, and a warning says so.
        mode: whether the best is the `"min"` or the `"max"`; None: the words of its name decide, such as loss, error and
            perplexity, or accuracy, bleu, f1 and auc, and the log says how.
        keep_best: how many of the best checkpoints in the directory stay. Checkpoints count too that a run wrote before it was
            resumed from an earlier one.
        to_save: more objects with `state_dict` and `load_state_dict`, by name. Rank 0 writes what is equal on all ranks, and
            where the ranks differ each writes its own. Of another trainer its model, its optimizers and its handlers are saved
            too, and what belongs to each rank is written by each.
        config: plain values of the script. When the run resumes, the log lists which of them have changed.
        asynchronous: False writes each checkpoint before training continues. True: a thread writes beside training, which goes
            first. Where it keeps all processors busy, as on a CPU, a checkpoint takes longer until it is on the disk.
        on_error: what happens when a save fails: `"raise"`, or `"warn"` and train on. The older checkpoints stay in both cases.
            A failure to write the last state, at the end of the run, is always raised.
        leave_out: names of attached handlers whose state is neither saved nor restored, such as `("LambdaStateScheduler",)`. A
            handler whose state cannot be stored is left out too, with a warning. `"carried"` starts a run without the
            values of `state.carried`, which another number of ranks cannot take over, and `"loss_scaling"` one with a fresh
            scale, as another class of loss scaling needs.
        script_wins: options of the optimizer, such as `("lr", "weight_decay")`, that keep the script's value when the run
            resumes. All others are taken from the checkpoint, and the log lists those that differ. With `"lr"`, a restored
            schedule keeps its position and its shape, over the script's rate. A schedule of which the checkpoint has no state
            begins over the script's rate and momentum, also without it.
        give_up_after: with `on_error="warn"`, this many failures in a row are raised.
        on_changed_data: what happens if a run resumes in the middle of an epoch with another loader (another seed, length or
            batch size, for example), so that samples would be missed or used twice: `"raise"`, or `"warn"` and continue.
        frozen: where parameters lie that do not require grad: in `"each"` checkpoint, or `"once"` in a file beside the
            checkpoints that refer to it, as for adapters on a large model. It is named by what is in it, written again when
            that changes, and removed when no checkpoint refers to it. A checkpoint that is copied needs that file beside it;
            `consolidate` makes one file of both.
        mirror: where in an object store each checkpoint is copied to once it is on the disk: a URL that fsspec opens, such as
            `"s3://bucket/run"` (`pip install 'ignite_train[s3]'`). A save ends with its copy, and fails if that fails. A start
            fetches the newest whole checkpoint and the best from there, where `directory` lacks them.

    Attributes:
        held_seconds: how long the run waited for the latest save, in seconds.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value, or `directory` is a file.
        NotImplementedError: the system lacks calls that checkpoints need, as Windows does.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_trainer(model, optimizer, forward)
        >>> checkpoint = Checkpoint(directory, every=3)
        >>> checkpoint.attach(trainer)
        >>> state = trainer.run([torch.ones(2, 4)] * 4, max_epochs=1)  # started again, the same command would resume
        >>> checkpoint.latest.name
        'update-00000004'
    """

    is_collective = True
    _run: SavedRun  # as the next, since `attach`
    _resumption: Resumption

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int | None = None,
        every_seconds: float | None = None,
        every_epochs: int | None = None,
        keep: int = 2,
        keep_every: int | None = None,
        score: str | None = None,
        mode: Literal["min", "max"] | None = None,
        keep_best: int = 1,
        to_save: Mapping[str, Stateful] | None = None,
        config: Mapping[str, Any] | None = None,
        asynchronous: bool = True,
        on_error: Literal["raise", "warn"] = "raise",
        leave_out: Iterable[str] = (),
        script_wins: Iterable[str] = (),
        give_up_after: int = GIVE_UP_AFTER,
        on_changed_data: Literal["raise", "warn"] = "raise",
        frozen: Literal["each", "once"] = "each",
        mirror: str | None = None,
    ) -> None:
        refuse_other_systems()
        self.directory, copies = _on_disk(directory, mirror)
        if score is None and (mode is not None or keep_best != 1):
            name, value = ("mode", mode) if mode is not None else ("keep_best", keep_best)
            raise ValueError(f"{name} must be left out without a score, got {value!r}; write score='loss', say, beside it")
        retention = Retention(
            last=positive_int("keep", keep),
            best=positive_int("keep_best", keep_best),
            mode="min" if score is None else score_mode(score, mode, of="Checkpoint"),
            every=None if keep_every is None else positive_int("keep_every", keep_every),
            metric=score,
        )
        self.cadence = Cadence(
            every=every, every_seconds=every_seconds, every_epochs=every_epochs, score=score, retention=retention
        )
        self.saver = CheckpointWriter(
            self.directory,
            retention,
            asynchronous=asynchronous,
            warns=one_of("on_error", on_error, ("raise", "warn")) == "warn",
            give_up_after=positive_int("give_up_after", give_up_after),
            mirror=copies,
        )
        self.to_save = checked_objects({} if to_save is None else to_save)
        self.on_changed_data = one_of("on_changed_data", on_changed_data, ("raise", "warn"))
        self._saved_run = partial(
            SavedRun,
            to_save=self.to_save,
            leave_out=checked_names("leave_out", leave_out),
            script_wins=checked_names("script_wins", script_wins),
            frozen_once=one_of("frozen", frozen, ("each", "once")) == "once",
            config=mapping_of("config", config),
            on_changed_data=self.on_changed_data,
        )
        self.held_seconds, self._held = 0.0, HeldState()
        self._is_attached = self._is_running = self._has_warned = False
        self._untried_until = math.inf  # the number of steps after which the state is tried once more
        self._ending: tuple[Any, Any] = None, None  # the latest state of a run that ends: its moment and contents
        self._facts: dict[str, Any] | None = None  # what each manifest of the running run says of its settings

    def __repr__(self) -> str:
        latest = "" if self.latest is None else f", latest={self.latest.name!r}"
        mirror = "" if self.saver.mirror is None else f", mirror={self.saver.mirror.url!r}"
        return f"Checkpoint({str(self.directory)!r}, {self.cadence!r}, keep={self.saver.retention.last}{mirror}{latest})"

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint that this process has committed or resumed from; None before the first."""
        return self.saver.latest

    @property
    def best(self) -> BestCheckpoint | None:
        """The checkpoint in the directory with the best score, read from there; None without one."""
        found = best(self.directory) if self.directory.is_dir() else None
        if found is None or found.manifest is None or found.manifest.score is None:
            return None
        return BestCheckpoint(found.path, found.manifest.score)

    def load_best(self) -> BestCheckpoint:
        """Loads the model of the best checkpoint into the model of the run, at the end of a script. Collective.

        The model has the weights that were scored. Where the evaluator scores an average (`ModelEMA.use_in`), or the evaluation
        weights of an optimizer (`OptimizerModes`), these are put into the model, and the handler's average, or the optimizer's
        state, comes from the best checkpoint too, so that the next evaluation scores the same weights; the optimizer is left in
        its eval mode. If the checkpoint lacks them, a warning says so, and the model has the weights that were trained. Where
        an evaluator has both, it scores the average, and that is what the model has.

        Nothing else is loaded: counters and other handlers stay as training has left them. To train on from the best
        checkpoint, pass its path to `trainer.run(resume=...)` in a new script.

        Returns:
            Its path and its score.

        Raises:
            CheckpointError: no checkpoint has a score, or it cannot be read.
            RuntimeError: `attach` was not called, or the run has not ended; or the trainer is gone, and not all is known that
                was attached to it.
        """
        self._refuse_unattached()
        if self._is_running:
            raise RuntimeError(
                "load_best() was called during the run, which would save the best weights as the latest; call it after"
            )
        self.saver.wait()
        found = together(collectives.gather_objects, "looking for the best checkpoint", lambda: self.best)[0]
        if found is None:
            raise CheckpointError(f"{self.directory} has no checkpoint with a score; {self._why_no_score()}")
        self._load_scored(found)
        self.cadence.note_loaded(self._run.updates_done)
        return found

    def _load_scored(self, found: BestCheckpoint) -> None:
        """Loads the model, and the weights that were scored in its place."""
        objects, evaluator = self._run.objects(), self._run.evaluator
        handlers = [*evaluator.scored_weights] if isinstance(evaluator, Evaluator) else []
        states = [objects.of(one.has_weights) for one in handlers]
        known = together(collectives.gather_objects, f"reading {found.path}", lambda: self._names_in(found, states))[0]
        lacking = [one for one, state in zip(handlers, states, strict=True) if not state or not state.keys() <= known]
        if lacking:
            handlers, states = [], []
            if collectives.is_main_rank():
                _logger.warning(
                    f"{found.path} has no state of {type(lacking[0]).__name__}, and its score is of weights from there: "
                    "load_best() has loaded the trained weights, whose score may differ; keep it attached, and out of "
                    "leave_out"
                )
        others = {name: entry for state in states for name, entry in state.items()}
        restore = partial(restore_model, found.path, objects.modules["model"], others)
        with ExitStack() as stack:
            for one in reversed(handlers):  # left in the other order, which is that of an evaluation
                stack.enter_context(one.left_in())
            together(collectives.gather_objects, f"loading {found.path}", restore)

    def _names_in(self, found: BestCheckpoint, scored: Sequence[Mapping[str, Any]]) -> set[str]:
        if not all(scored) and not self._run.leave_out:  # what was attached last is not known
            self._refuse_without_trainer("load_best")
        return names_in(found.path)

    def _refuse_without_trainer(self, method: str) -> None:
        if self._run.reference() is None:
            raise RuntimeError(f"{method}() was called when the trainer was gone; keep the trainer until then")

    def _why_no_score(self) -> str:
        """The cause and the remedy, for a message."""
        if self.cadence.score is None:
            return "pass Checkpoint(..., score='loss')"
        if self.cadence.awaited is not None:
            return "the state that was evaluated after the run is not saved; call checkpoint.save() after the evaluation"
        return (
            f"no evaluation has found a finite {self.cadence.score!r} yet; attach Validation(evaluator, loader) and run first"
        )

    def settings(self) -> dict[str, Any]:
        """The arguments, with the intervals at which it saves."""
        return super().settings() | settings_of(self.cadence)

    def scores(self) -> list[tuple[Engine, str | None, str | None]]:
        """The one by which a state is the best, if one was named."""
        evaluator, score = self._run.evaluator if self._is_attached else None, self.cadence.score
        return [] if evaluator is None or score is None else [(evaluator, score, self.saver.retention.mode)]

    def rows_at_end(self) -> list[tuple[str, str]]:
        """The directory."""
        mirror = "" if self.saver.mirror is None else f", copied to {self.saver.mirror.url}"
        return [("files", f"{self.directory}{mirror} (Checkpoint)")]

    def attach(self, trainer: Trainer, *, evaluator: Engine | None = None) -> None:
        """Saves during each run of `trainer`, and lets `trainer.run` resume.

        Args:
            trainer: the trainer, with its model and optimizer complete.
            evaluator: its metric decides what is `best`, and its handlers are saved too, as those of the evaluators are that
                an attached `Validation` runs. Any engine of Ignite.

        Raises:
            ValueError: the trainer has a `Checkpoint` already, or this one has a trainer, or `score` is given without an
                evaluator.
            TypeError: the `state_dict` of an optimizer does not have the form of torch's.
        """
        if trainer.checkpoint is not None:
            raise ValueError("a trainer must have one Checkpoint at most, got a second; give the first more cadences")
        if self._is_attached:
            raise ValueError(
                "Checkpoint must be attached to one trainer, got a second; make another in a directory of its own, or pass the "
                "second trainer to the first in to_save"
            )
        if self.cadence.score is not None and evaluator is None:
            raise ValueError(f"score={self.cadence.score!r} needs an evaluator; pass attach(trainer, evaluator=...)")
        if self.cadence.score is not None:  # so that the score in a manifest can be read without the script
            trainer.config["best"] = {"metric": self.cadence.score, "mode": self.saver.retention.mode}
        run = self._saved_run(trainer, evaluator=evaluator)
        run.refuse_odd_optimizers()
        self._run, self._is_attached = run, True
        self._resumption = Resumption(run, self.saver)
        self._follow_evaluations()
        for one in run.each_trainer:
            one.mark_everything()
        trainer.checkpoint = self
        if self.cadence.every_seconds is not None:
            trainer.piggybacks.append(self.cadence)
        trainer.on_enter.append(self._start)
        trainer.append_event_handler(Events.STARTED, self._put_back)
        trainer.append_event_handler(Events.STARTED, self._try_out)
        trainer.append_event_handler(Events.EPOCH_STARTED, self._resumption.put_back_objects)
        trainer.append_event_handler(Events.ITERATION_COMPLETED, self._after_update)
        trainer.append_event_handler(Events.EPOCH_COMPLETED, self._after_epoch)
        for event in (Events.TERMINATE, Events.INTERRUPT, Events.COMPLETED):
            trainer.append_event_handler(event, self._at_end)
        trainer.on_exit.append(self._stop)

    # --- how the run resumes ----------------------------------------------------------------------------------------------

    @contextmanager
    def resuming(self, resume: str | Path) -> Iterator[None]:
        """`trainer.run` trains in this `with`: no other run writes to the directory, and the state is restored. Collective."""
        with self.saver.holding():
            refuse_unlike_resume(resume)
            self.restore(resume)
            self.saver.catch_up()
            yield
            self._resumption.put_back_objects()  # where there was nothing to do, no event has done so

    def restore(self, resume: str | Path) -> None:
        """Puts the run back to the state that `resume` names. `trainer.run` calls it; see there. Collective.

        Args:
            resume: `"auto"`, `"must"`, `"never"`, or a path.

        Raises:
            ValueError: `resume` has an unknown value, or it is `"never"` and the directory has checkpoints.
            CheckpointError: no checkpoint was found where one must be, or none is whole, or it is of another run.
            RuntimeError: `attach` was not called, or the trainer is gone.
        """
        self._refuse_unattached()
        self._refuse_without_trainer("restore")
        self.saver.wait()
        self._run.begin(self._held.names(self._run))
        with paused_collection():
            manifest = self._resumption.restore(resume)
        if manifest is not None:
            self.cadence.note_resumed(manifest)

    def forget_resumed(self) -> None:
        """The run has got another state since it resumed: that of the checkpoint is not put back any more."""
        self._resumption.forget()

    def _start(self, trainer: Trainer) -> None:
        """When `run` begins: prepares saving, and says what may not be exact."""
        self._is_running = True
        self._warn_of_traces()
        self._follow_evaluations()
        self.saver.prepare()
        if collectives.is_main_rank() and not self._has_warned and trainer.state.dataloader is not None:
            log_how_exact(trainer.state.dataloader)
            self._has_warned = True
        self.cadence.start([] if self.cadence.score is None else self._best_on_disk())

    def _follow_evaluations(self) -> None:
        """Looks at the score after all other handlers of the evaluation: behind those that were attached meanwhile."""
        evaluator, event = self._run.evaluator, Events.COMPLETED
        if evaluator is None or self.cadence.score is None:
            return
        if evaluator.has_event_handler(self._after_evaluation, event):
            evaluator.remove_event_handler(self._after_evaluation, event)
        append_handler(evaluator, event, self._after_evaluation)

    def _best_on_disk(self) -> list[tuple[int, float]]:
        """The updates and scores of the best checkpoints in the directory, as rank 0 sees it. Collective."""

        def look() -> list[tuple[int, float]]:
            retention = self.saver.retention
            return retention.best_of(retention.scored(manifest for _, manifest in self.saver.directory.scan()[0]))

        return on_main(collectives.gather_objects, "looking for the best checkpoint", look)

    def _put_back(self, trainer: Trainer) -> None:
        """After all other handlers of STARTED. In the middle of an epoch EPOCH_STARTED follows, where metrics reset."""
        self._held.note(self._run)
        if trainer.state_dict()["epoch_iteration"] == 0:
            self._resumption.put_back_objects()

    def _try_out(self, trainer: Trainer) -> None:
        """After all other handlers of STARTED: an error that each save would meet is found before the first batch."""
        self._facts = self._settings()
        seal(self._manifest())
        contents = capture(self._run, self._held)
        self.saver.attempt(lambda: try_out(self.saver.directory, contents, collectives.gather_objects))
        self._untried_until = trainer.state.num_steps  # an optimizer has no state before its first step

    # --- when the run is saved --------------------------------------------------------------------------------------------

    def _after_evaluation(self, evaluator: Engine) -> None:
        if self.saver.warns:
            self.saver.wait()  # the best may be in a save that fails
        if self.saver.has_lost_one:
            self.cadence.best, self.saver.has_lost_one = self._best_on_disk(), False
        self._give_up_missed()
        update, name = self._run.updates_done, self.cadence.score
        assert name is not None  # noqa: S101  # an evaluation is followed for its score
        # Of several evaluations after one update the first counts, as for handlers that react to a score: a later one may be of
        # other data. An evaluation of ours is made by all ranks; with an engine of Ignite one rank may evaluate alone.
        if self.cadence.score_of(update) is None:
            find = agreed_score if isinstance(evaluator, Evaluator) else score_in
            self.cadence.note_score(update, find(evaluator.state.metrics, name))

    def _give_up_missed(self) -> None:
        """A state that was to be saved for its score is not, once the next update has had its effect."""
        trainer, missed = self._run.trainer, self.cadence.awaited
        if missed is None or missed == self._run.updates_done:
            return
        self.cadence.awaited = None
        if "missed best" not in trainer.progress.warned and collectives.is_main_rank():
            trainer.progress.warned.add("missed best")
            _logger.warning(
                f"update {missed} has one of the best scores and is not kept: the next update came before it could be saved; "
                "evaluate at ITERATION_COMPLETED or EPOCH_COMPLETED, or call checkpoint.save() after an evaluation between two "
                "runs, or two updates of a session"
            )

    def _after_update(self, trainer: Trainer) -> None:
        if self.cadence.awaited is not None:
            self._give_up_missed()
        if trainer.state.num_steps > self._untried_until:
            self._untried_until = math.inf
            contents = capture(self._run, self._held)
            check = partial(check_contents, contents, self._run)
            what = "trying to save the state after the first step"
            self.saver.attempt(lambda: together(collectives.gather_objects, what, check))
        is_last = trainer.should_terminate  # then the handlers of the end come next, and they save
        if not is_last and self.cadence.is_due_after_update(trainer.state.iteration):
            self._save()

    def _after_epoch(self, trainer: Trainer) -> None:
        if self.cadence.is_due_after_epoch(trainer.state.epoch):
            self._save()

    def _at_end(self) -> None:
        """Saves the last state if it is not saved yet, and waits until it is on the disk."""
        self._resumption.put_back_objects()  # where the run was stopped before its epoch was continued
        if self.cadence.is_due_at_end(self._moment(is_last=True)):
            self._save(is_last=True)
        with self._run.trainer.section("checkpoint"):
            self.saver.wait(is_last=True)

    def _stop(self) -> None:
        self._is_running, self._facts, self._ending = False, None, (None, None)

    def save(self) -> None:
        """Saves the run: from a handler, at the end of the running update or epoch, after all else there; otherwise at once.

        Between the updates of a `trainer.session` the state is that of this moment, with all that the loop has done after the
        latest update, and it is written while the loop continues. Between runs it is on the disk when this returns. Collective.

        Raises:
            CheckpointError: the save before failed, or some state cannot be stored; or, between runs, this save failed, or
                another trainer has saved to the directory meanwhile.
            RuntimeError: `attach` was not called, or an evaluation is under way for which the model has other weights, or the
                trainer is gone.
        """
        self._refuse_unattached()
        self._refuse_without_trainer("save")
        if self._is_running and not self._run.is_between_updates:
            self.cadence.request()
            return
        if not self._is_running:  # meanwhile another trainer may have saved
            self.saver.refuse_unread(self._run.trainer.state.iteration)
        self._warn_of_traces()
        # When the functions of `on_exit` are called the run is over too, and nothing waits for a thread any more.
        self._save(is_last=not self._is_running)

    # --- saving -----------------------------------------------------------------------------------------------------------

    def _save(self, *, is_last: bool = False) -> None:
        started, run, moment = time.monotonic(), self._run, self._moment(is_last=is_last)
        with run.trainer.section("checkpoint"), paused_collection():
            for trainer in run.each_trainer:
                if not trainer.replicas.have_own_weights:
                    raise RuntimeError(
                        "save() was called in an evaluation or inside swapped_in(), for which OptimizerModes or an average has "
                        "put other weights into the model; save after it"
                    )
                trainer.verify_ranks()  # a state on which the ranks do not agree must not be saved
            manifest = self._manifest()
            # A score that is found after TERMINATE does not bring in what handlers of COMPLETED have changed.
            has_score = self._ending[0] == moment and not self.cadence.is_requested
            contents = self._ending[1] if has_score else capture(run, self._held)
            self.saver.save(contents, manifest, is_last=is_last)
        self._ending = (moment, contents) if is_last and self._is_running else (None, None)
        self.cadence.note_save(moment, manifest.score, started)
        self.held_seconds = time.monotonic() - started

    def _warn_of_traces(self) -> None:
        """Warns of what an update has left that broke off before this was attached: since then each remembers everything."""
        for trainer in self._run.each_trainer:
            trainer.warn_if_spoilt()

    def _manifest(self) -> Manifest:
        """What is known of the checkpoint so far; the files and the serial number are added when it is committed."""
        state = self._run.trainer.state
        score = self.cadence.score_of(state.iteration)
        return Manifest(
            update=state.iteration,
            epoch=state.epoch,
            serial=0,
            world_size=self._run.trainer.replicas.num_ranks,
            score=None if score is None or not math.isfinite(score) else score,
            files={},
            **(self._facts or self._settings()),
        )

    def _settings(self) -> dict[str, Any]:
        return {"config": run_config(self._run), "versions": versions()}

    def _moment(self, *, is_last: bool) -> tuple[Any, ...]:
        """Where the run is: a state is saved once for each moment. TERMINATE and COMPLETED are one."""
        trainer = self._run.trainer
        epochs_completed = trainer.state.epoch - trainer.progress.epoch_open
        return trainer.state.iteration, epochs_completed, is_last and not trainer.progress.interrupted

    def _refuse_unattached(self) -> None:
        if not self._is_attached:
            raise RuntimeError("attach(trainer) must be called first")


def _on_disk(directory: str | Path, mirror: str | None) -> tuple[Path, Mirror | None]:
    """The directory on the disk, and the store that its checkpoints are copied to."""
    protocol, found, rest = str(directory).partition(":/")
    if not found or len(protocol) < 2 or "/" in protocol:
        return directory_of("directory", directory), None if mirror is None else Mirror(mirror)
    if mirror is not None:
        raise ValueError(
            f"directory must be a path on a disk where mirror={mirror!r} is given, got {directory!r}; leave out mirror=, "
            "or name a directory"
        )
    if not rest.startswith("/"):  # as Path makes it
        raise ValueError(f"directory must be a string where it is a URL, got {directory!r}; write '{protocol}://{rest}'")
    copies = Mirror(str(directory))
    return directory_of("directory", copies.cache), copies
