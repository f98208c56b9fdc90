"""Metrics for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ignite.engine import Events, RemovableEventHandle
from ignite.handlers import TensorboardLogger

from ignite_train import distributed
from ignite_train.engine import Trainer
from ignite_train.evaluator import Evaluator
from ignite_train.events import Event

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes `trainer.state.metrics` as scalars over the number of the update, by Ignite's logger. On rank 0 only.

    Args:
        log_dir: a directory; `tensorboard --logdir` opens it.

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
        self.log_dir = Path(log_dir)
        self._logger: Any = None
        self._written: int | None = None

    def attach(
        self,
        trainer: Trainer,
        event: Event = Events.ITERATION_COMPLETED(every=50),
        *,
        evaluator: Evaluator | None = None,
        tag: str = "validation",
    ) -> RemovableEventHandle | None:
        """Writes at `event` and, as `tag/...`, what `evaluator` finds when it has run."""
        if not distributed.is_main_rank():
            return None
        self._logger = self._logger or TensorboardLogger(log_dir=str(self.log_dir))
        if evaluator is not None:
            evaluator.add_event_handler(Events.COMPLETED, self._write_evaluation, trainer, tag)
        trainer.add_event_handler(Events.COMPLETED, self._write_rest)
        trainer.add_event_handler(Events.TERMINATE, self._flush)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, self._flush_at_exception)
        return trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Writes the metrics as they are."""
        self._written = trainer.state.iteration
        for name, value in trainer.state.metrics.items():
            self._logger.writer.add_scalar(name, float(value), trainer.state.iteration)

    def _write_evaluation(self, evaluator: Evaluator, trainer: Trainer, tag: str) -> None:
        for name, value in evaluator.state.metrics.items():
            self._logger.writer.add_scalar(f"{tag}/{name}", float(value), trainer.state.iteration)

    def _write_rest(self, trainer: Trainer) -> None:
        """What was published after the last time, at the end of the run."""
        if trainer.state.iteration != self._written:
            self(trainer)
        self._flush()

    def _flush(self) -> None:
        self._logger.writer.flush()

    def _flush_at_exception(self, _error: BaseException) -> None:
        self._flush()
