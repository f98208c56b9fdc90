"""A progress bar and a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

from ignite.engine import Events, RemovableEventHandle
from tqdm.auto import tqdm

from ignite_train.evaluator import Evaluator
from ignite_train.events import Event
from ignite_train.handler import Handler
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["ProgressLog"]


class ProgressLog(Handler):
    """Shows a bar over all updates, prints the metrics now and then and where a run goes on and ends. On rank 0 only.

    The bar is shown on a terminal; the lines go to standard output. What they say is in `trainer.state.metrics`, so attach
    `TrainingMetrics`, before or after, for loss and norm.

    Example:
        >>> from ignite.engine import Events
        >>> from ignite_train.handlers import ProgressLog
        >>> trainer = getfixture("trainer")
        >>> handle = ProgressLog().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> state = trainer.run(getfixture("loader"), max_epochs=1)  # doctest: +ELLIPSIS
        epoch 1, update 2
        epoch 1, update 4
        finished after 4 updates (4 steps, 0 skipped) in 1 epoch, ... s
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._started = 0.0

    def attach(
        self, trainer: Trainer, event: Event = Events.ITERATION_COMPLETED(every=50), *, evaluator: Evaluator | None = None
    ) -> RemovableEventHandle | None:
        """Prints at `event`, and the metrics of `evaluator` when it has run."""
        if not collectives.is_main_rank():
            return None
        trainer.add_event_handler(Events.STARTED, self._open)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._advance)
        trainer.add_event_handler(Events.COMPLETED, self._conclude)
        trainer.add_event_handler(Events.TERMINATE | Events.INTERRUPT, self._close)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, self._close_at_exception)
        if evaluator is not None:
            evaluator.add_event_handler(Events.COMPLETED, self._print_validation, trainer)
        return trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Prints the metrics."""
        state = trainer.state
        self._print(f"epoch {state.epoch}, update {state.iteration}", state.metrics)

    def _open(self, trainer: Trainer) -> None:
        self._started = time.perf_counter()
        if trainer.state.iteration:
            tqdm.write(f"going on after update {trainer.state.iteration}")
        self._bar = tqdm(initial=trainer.state.iteration, unit="update", disable=None, dynamic_ncols=True, leave=False)

    def _advance(self, trainer: Trainer) -> None:
        self._bar.total = _total(trainer)
        self._bar.update(1)

    def _print_validation(self, evaluator: Evaluator, trainer: Trainer) -> None:
        self._print(f"validation after update {trainer.state.iteration}", evaluator.state.metrics)

    def _print(self, head: str, metrics: dict[str, Any]) -> None:
        body = ", ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
        tqdm.write(f"{head}: {body}" if body else head)
        sys.stdout.flush()  # a log file, too, is to be read while the run goes on

    def _conclude(self, trainer: Trainer) -> None:
        self._close()
        state = trainer.state
        epochs = f"{state.epoch} epoch" + "s" * (state.epoch != 1)
        updates = f"{state.iteration} updates ({state.num_steps} steps, {state.num_skipped} skipped)"
        tqdm.write(f"finished after {updates} in {epochs}, {time.perf_counter() - self._started:.1f} s")

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _close_at_exception(self, _error: BaseException) -> None:
        self._close()


def _total(trainer: Trainer) -> int | None:
    """Updates that the whole run will have, as far as can be told."""
    state = trainer.state
    if state.max_iters is not None or state.max_epochs is None or state.epoch_length is None:
        return state.max_iters
    return state.epoch_length * state.max_epochs
