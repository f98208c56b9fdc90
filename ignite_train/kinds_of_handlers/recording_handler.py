"""Handlers that write metrics somewhere, on rank 0."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from ignite.engine import Engine, Events, RemovableEventHandle

from ignite_train.arguments import COUNT, NUMBERS, check_fields, one_of
from ignite_train.events import Event, every
from ignite_train.kinds_of_handlers.handler import Handler
from ignite_train.metrics import PUBLISHED_METRICS, changed_numbers, grouped_metric, grouped_metrics, single_metrics
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["EVERY_50", "RecordingHandler", "numbered_path"]


_logger = logging.getLogger("ignite_train")
EVERY_50 = every(50, Events.ITERATION_COMPLETED, early=True)


class RecordingHandler(Handler):
    """A handler that writes the metrics of a trainer and of its evaluators as single numbers, on rank 0 only.

    Names have their group, as in `"train/loss"`; see `grouped_metric`. A derived class defines `record`, `recover`, `finish`,
    `open_file` and `may_be_continued`, extends `attach` where it needs more events, calls `check_file` in `state_dict`, and
    saves `state_of_written()` there, which `load_written` reads.

    Of an update that was written, only changed numbers are written again: those of an epoch are published after the line of its
    last update.

    An evaluation before the run begins, in a process that finds a log, is written when the run begins at its beginning, and
    left out when it resumes: only then is it known whether the log is continued.

    Args:
        place: the file or the directory that it writes, as an absolute path.
        on_error: what happens when something cannot be written, because the disk is full, say: `"warn"` and train without it,
            or `"raise"`, which ends the run on all ranks.

    Attributes:
        place: the same.
        what_is_written: for the warning.
        tags: of the evaluators.
        latest: the update with which something was written last; 0 if nothing ever was.
        points: the numbers that were written with it, of the trainer and of evaluators, by the name in the log.
        begin: the update after which this process took over; None before a run.

    Raises:
        ValueError: `on_error` is neither of the two.
    """

    of_one_trainer = True

    what_is_written = "metrics"

    def __init__(self, place: Path, on_error: Literal["warn", "raise"]) -> None:
        self.place = place
        self.on_error = one_of("on_error", on_error, ("warn", "raise"))
        self.tags: list[str] = []
        self.latest = 0
        self.points: dict[str, float] = {}
        self.begin: int | None = None
        self._failures = 0
        self.left_out: set[str] = set()
        self._is_complete = False  # the run has come to its end, and all of it is written
        self._held: dict[str, dict[str, float]] = {}  # of evaluations before the run, by tag

    def rows_at_end(self) -> list[tuple[str, str]]:
        """The file or the directory, from the current directory on if it is in there."""
        place = self.place
        with suppress(ValueError, OSError):  # it lies elsewhere, or the current directory was removed
            place = place.relative_to(Path.cwd())
        return [("files", f"{place} ({type(self).__name__})")]

    def attach(
        self,
        trainer: Trainer,
        event: Event = EVERY_50,
        *,
        evaluator: Engine | None = None,
        tag: str = "validation",
    ) -> RemovableEventHandle | None:
        """Writes at `event`, at the end of the run, and, as `tag/...`, what `evaluator` finds when it has run.

        A second call with the same trainer adds the evaluator only.

        Raises:
            ValueError: an evaluator, or a group of the trainer's own metrics, has that tag already.
        """
        if evaluator is not None and tag in self.tags:
            raise ValueError(f"tag must be another one for each evaluator, got {tag!r} twice; pass tag='test', say")
        if evaluator is not None and tag in PUBLISHED_METRICS.values():
            raise ValueError(f"tag must not be {tag!r}, which is a group of the trainer's own metrics; pass tag='train_set'")
        handle = None
        if collectives.is_main_rank() and not trainer.has_event_handler(self._write_rest, Events.COMPLETED):
            handle = trainer.add_event_handler(event, self)  # first, since it may refuse the event
            trainer.prepend_event_handler(Events.STARTED, self._note_begin)
            trainer.add_event_handler(Events.COMPLETED, self._write_rest)
            trainer.on_exit.append(self._end_run)
            if trainer.progress.running:  # after STARTED
                self._note_begin(trainer)
        if evaluator is not None:
            self.tags.append(tag)
            if collectives.is_main_rank():
                evaluator.add_event_handler(Events.COMPLETED, self._write_evaluation, trainer, tag)
        return handle

    def taken_off(self) -> None:
        """Its evaluators may be given again."""
        self.tags.clear()

    def __call__(self, trainer: Trainer) -> None:
        """Writes the metrics that are published now; those that were written with this update already, only if they changed.

        Raises:
            Exception: they cannot be written, and `on_error` is `"raise"`. An OSError where the disk is the reason.
        """
        update, metrics = trainer.updates_done, single_metrics(trainer.state.metrics, self.left_out)
        numbers = {self.written_name(name): number for name, number in metrics.items()}
        with self.writing(trainer):
            self._write(trainer, changed_numbers(numbers, self.points) if update == self.latest else numbers)

    def state_of_written(self) -> dict[str, Any]:
        """The update that was written last, and its numbers, for `state_dict`."""
        return {"latest": self.latest, "points": dict(self.points)}

    def load_written(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what `state_of_written` gave.

        Raises:
            TypeError: `state_dict` is not a mapping.
            ValueError: a key is missing, or a value is of another kind.
        """
        check_fields(type(self).__name__, state_dict, {"latest": COUNT, "points": NUMBERS})
        self.latest, self.points = state_dict["latest"], dict(state_dict["points"])

    def written_name(self, name: str) -> str:
        """The name under which a metric of the trainer is written."""
        return grouped_metric(name)

    @contextmanager
    def writing(self, trainer: Trainer) -> Iterator[None]:
        """A `with` that writes: an error in it is raised, or warned of."""
        try:
            yield
        except Exception as error:  # also what a format cannot say
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(self.place)  # a call on an open file does not know its name
            self.recover()
            if self.on_error == "raise":
                raise
            kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
            update = trainer.state.iteration
            self.warn(f"{self.what_is_written} of update {update} could not be written ({kind}{error})")

    def warn(self, failure: str) -> None:
        """Warns of a failure if it is the 1st, 2nd, 4th, 8th, ... one."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            _logger.warning(f"{failure}; failures so far: {self._failures}")

    def check_file(self) -> None:
        """Warns if the open file is not at its path any more, and then lets the next numbers go into one that is."""
        if self._is_complete or (found := self.open_file()) is None:  # the script may move it once its last line is there
            return
        path, descriptor = found
        try:
            there, opened = path.stat(), os.fstat(descriptor)
            # Some network file systems give one file several numbers; then only its size tells.
            if opened.st_nlink and (os.path.samestat(there, opened) or there.st_size == opened.st_size):
                return
            reason = "another file is there"
        except OSError as error:
            reason = str(error.strerror)
        self.recover()
        self.warn(
            f"{path} was removed, renamed or replaced while this run wrote to it ({reason}): what it wrote since then is not "
            "there, and what comes next goes into a file at the old place; leave the logs of a run there until it ends"
        )

    def open_file(self) -> tuple[Path, int] | None:
        """The path and the descriptor of the file that this process writes; None while none is open."""
        raise NotImplementedError

    def may_be_continued(self) -> bool:
        """Whether there is a log of an earlier process that this one neither continues nor replaces yet."""
        raise NotImplementedError

    def record(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """Writes numbers with the latest update that has had its effect, `trainer.updates_done`, which has made the weights.

        Args:
            trainer: the trainer.
            numbers: at least one, by the names under which they are written.

        Raises:
            OSError: they cannot be written.
        """
        raise NotImplementedError

    def recover(self) -> None:
        """Called when something could not be written, or the file is gone, so that what comes next is written."""

    def finish(self) -> None:
        """Called when a run is over, in whatever way it ended."""

    def note_written(self, update: int, numbers: Mapping[str, float]) -> None:
        """Called when something was written with an update."""
        if update != self.latest:
            self.latest, self.points = update, {}
        self.points |= numbers

    def _write(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """Writes numbers, if there are some; see `record`."""
        if numbers:
            self.record(trainer, numbers)
            self.note_written(trainer.updates_done, numbers)

    def _note_begin(self, trainer: Trainer) -> None:
        if self.open_file() is None:
            self.begin = trainer.state.iteration
        if self.latest > trainer.state.iteration:
            self.points = {}  # by a run whose updates are made again
        held, self._held = self._held, {}
        for numbers in held.values() if trainer.state.iteration == 0 else ():
            with self.writing(trainer):
                self._write(trainer, numbers)

    def _write_evaluation(self, evaluator: Engine, trainer: Trainer, tag: str) -> None:
        numbers = grouped_metrics(evaluator.state.metrics, self.left_out, tag)
        with self.writing(trainer):
            if self.begin is None and trainer.state.iteration == 0 and self.may_be_continued():
                self._held[tag] = numbers
            else:
                self._write(trainer, numbers)

    def _write_rest(self, trainer: Trainer) -> None:
        """Writes at the end of the run what there is of its last update, as far as it was not written."""
        self.check_file()
        self(trainer)
        if trainer.state.iteration > (self.begin or 0) and not (self.latest or self.points or self._failures):
            _logger.warning(
                f"{type(self).__name__} has written nothing: no metrics were published in this run; attach "
                "TrainingMetrics().attach(trainer), which publishes those of the training"
            )
        self._is_complete = True

    def _end_run(self) -> None:
        self.check_file()
        self._is_complete = False
        self.finish()


def numbered_path(path: Path) -> Path:
    """The path with the next number behind it, `metrics.jsonl.old.3` say: no file of an earlier run is written over."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    ends = [name.removeprefix(f"{path.name}.") for name in names if name.startswith(f"{path.name}.")]
    number = 1 + max((int(end) for end in ends if end.isdecimal()), default=0)
    return path.with_name(f"{path.name}.{number}")
