"""Metrics for TensorBoard."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ignite.engine import Events, RemovableEventHandle
from ignite.handlers import TensorboardLogger

from ignite_train.arguments import describe
from ignite_train.evaluator import Evaluator
from ignite_train.events import Event
from ignite_train.handler import Handler
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["TensorBoard"]

_logger = logging.getLogger(__name__)
_PATIENCE_SECONDS = 2.0  # for a second to pass


class TensorBoard(Handler):
    """Writes `trainer.state.metrics` as scalars over the number of the update, by Ignite's logger. On rank 0 only.

    A run that goes on, from a checkpoint or from its beginning, shows each point once: those that an earlier process wrote
    after the place where this one takes over are hidden. All that was written before a checkpoint is with the operating
    system when the checkpoint is.

    Args:
        log_dir: a directory, of one run; `tensorboard --logdir` opens it.

    Example:
        >>> from ignite_train.handlers import TensorBoard, TrainingMetrics
        >>> trainer, directory = getfixture("trainer"), getfixture("tmp_path")
        >>> handle = TensorBoard(directory).attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> handle = TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> state = trainer.run(getfixture("loader"), max_epochs=1)
        >>> len(list(directory.glob("events.out.tfevents.*")))
        1
    """

    def __init__(self, log_dir: str | Path) -> None:
        if not isinstance(log_dir, (str, Path)):
            raise TypeError(f"log_dir must be a path of a directory, got {describe(log_dir)}")
        self.log_dir = Path(log_dir)
        self._logger: Any = None  # made when there is something to write
        self._begin: int | None = None  # the update after which this process took over
        self._loaded = False
        self._written: int | None = None
        self._latest: int | None = None  # the update of the latest points, which are
        self._points: dict[str, float] = {}

    def attach(
        self,
        trainer: Trainer,
        event: Event = Events.ITERATION_COMPLETED(every=50),
        *,
        evaluator: Evaluator | None = None,
        tag: str = "validation",
    ) -> RemovableEventHandle | None:
        """Writes at `event` and, as `tag/...`, what `evaluator` finds when it has run."""
        if not collectives.is_main_rank():
            return None
        if evaluator is not None:
            evaluator.add_event_handler(Events.COMPLETED, self._write_evaluation, trainer, tag)
        trainer.prepend_event_handler(Events.STARTED, self._note_begin)
        trainer.add_event_handler(Events.COMPLETED, self._write_rest)
        trainer.add_event_handler(Events.TERMINATE, self._flush)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, self._flush_at_exception)
        return trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Writes the metrics as they are."""
        self._written = trainer.state.iteration
        for name, value in trainer.state.metrics.items():
            self._write(trainer, name, float(value))

    def state_dict(self) -> dict[str, Any]:
        """The latest points and their update. What was written so far leaves this process first."""
        self._flush()
        return {"written": self._written, "latest": self._latest, "points": dict(self._points)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes them over: points of the same update that were written after the state was taken are hidden too."""
        self._written, self._latest = state_dict["written"], state_dict["latest"]
        self._points, self._loaded = dict(state_dict["points"]), True
        if self._logger is not None:
            self._logger.close()
        self._logger = None

    def _write(self, trainer: Trainer, name: str, value: float) -> None:
        update = trainer.state.iteration
        if self._logger is None:
            self._open(update)
        if update != self._latest:
            self._latest, self._points = update, {}
        self._points[name] = value
        self._logger.writer.add_scalar(name, value, update)

    def _open(self, update: int) -> None:
        """Hides what was written after the beginning, and writes once more what was written there before the checkpoint."""
        begin = update if self._begin is None else self._begin
        hidden_from = begin if self._loaded or begin == 0 else begin + 1
        self._wait_for_a_later_name()
        self._logger = TensorboardLogger(log_dir=str(self.log_dir), purge_step=hidden_from)
        if self._loaded and self._latest == begin:
            for name, value in self._points.items():
                self._logger.writer.add_scalar(name, value, begin)

    def _wait_for_a_later_name(self) -> None:
        """TensorBoard reads files in the order of their names, which begin with the second in which they were made."""
        names = [path.name.removeprefix("events.out.tfevents.") for path in self.log_dir.glob("events.out.tfevents.*")]
        newest = max((int(name[:10]) for name in names if name[:10].isdigit()), default=0)
        if newest > time.time() + _PATIENCE_SECONDS:
            _logger.warning(f"the newest file in {self.log_dir} is of a time to come: TensorBoard will hide wrong points")
            return
        while (rest := newest + 1 - time.time()) > 0:
            time.sleep(rest)

    def _note_begin(self, trainer: Trainer) -> None:
        if self._logger is None:
            self._begin = trainer.state.iteration

    def _write_evaluation(self, evaluator: Evaluator, trainer: Trainer, tag: str) -> None:
        for name, value in evaluator.state.metrics.items():
            self._write(trainer, f"{tag}/{name}", float(value))

    def _write_rest(self, trainer: Trainer) -> None:
        """What was published after the last time, at the end of the run."""
        if trainer.state.iteration != self._written:
            self(trainer)
        self._flush()

    def _flush(self) -> None:
        if self._logger is not None:
            self._logger.writer.flush()

    def _flush_at_exception(self, _error: BaseException) -> None:
        self._flush()
