"""Ending a run when the score of its validation no longer improves, or is good enough."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from ignite.engine import Engine

from ignite_train.arguments import COUNT, NUMBER, check_fields, optional, positive_int, real_number
from ignite_train.kinds_of_handlers import ScoreHandler
from ignite_train.metrics import is_better
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["EarlyStopping"]

_logger = logging.getLogger(__name__)


class EarlyStopping(ScoreHandler):
    """Ends the run, on all ranks after the same update, when a validation score has not improved for some time.

    It reacts when the evaluation is complete. An evaluation before the first update does not count, and of several after the
    same update the first does. Its state is saved, so that a resumed run ends where an uninterrupted one would. A run that it
    has ended and that is started again ends at once, unless `patience` or `target` are set so that it may continue.

    Args:
        evaluator: what evaluates; `Validation` runs it.
        score: one of its metrics.
        patience: end after this many evaluations in a row without an improvement; None: only `target` ends the run.
        min_delta: a score that is better than the best by at most this much does not count as an improvement; at least 0. The
            best stays as it is then, so that many small steps together count as one improvement.
        mode: `"min"` if lower scores are better, `"max"` if higher; None: the words of the score's name decide, and the log
            says how. NaN is never an improvement.
        target: end as soon as a score is this good.

    Attributes:
        best: the best score so far, or None.
        best_update: the update in which it was reached, or None.
        num_bad: evaluations since then.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value, or neither `patience` nor `target` is given.

    Example:
        >>> trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), forward)
        >>> EarlyStopping(evaluator, patience=2).attach(trainer)
        >>> handle = Validation(evaluator, [torch.ones(8, 3)]).attach(trainer)
        >>> trainer.run(data, max_epochs=9).epoch  # the learning rate is too high: the loss only grows
        3
    """

    def __init__(
        self,
        evaluator: Engine,
        score: str = "loss",
        *,
        patience: int | None = None,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
        target: float | None = None,
    ) -> None:
        super().__init__(evaluator, score, mode)
        if patience is None and target is None:
            raise ValueError("patience or target must be given, got neither; pass patience=3, say")
        self.patience = None if patience is None else positive_int("patience", patience)
        self.min_delta = real_number("min_delta", min_delta, at_least=0)
        self.target = None if target is None else real_number("target", target)
        self.best: float | None = None
        self.best_update: int | None = None
        self.num_bad = 0
        self._latest: float | None = None

    def attach(self, trainer: Trainer) -> None:
        """Ends the runs of `trainer`."""
        super().attach(trainer)
        trainer.on_enter.append(
            partial(self._end_if_due, what_to_do="; to continue, give it a larger patience, or another target")
        )

    def on_score(self, trainer: Trainer, score: float) -> None:
        """Counts the evaluation."""
        self._latest = score
        if is_better(score, self.best, self.mode, by=self.min_delta):
            self.best, self.best_update, self.num_bad = score, trainer.updates_done, 0
        else:
            self.num_bad += 1
        self._end_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The best score, its update, the latest score and the number of evaluations without an improvement."""
        own = {"best": self.best, "best_update": self.best_update, "num_bad": self.num_bad, "latest": self._latest}
        return super().state_dict() | own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores them.

        Raises:
            ValueError: something in it is not what `state_dict()` gives; or the same score was ranked in the other direction.
        """
        number, count = optional(NUMBER), optional(COUNT)
        fields = {"best": number, "best_update": count, "num_bad": COUNT, "latest": number}
        check_fields(type(self).__name__, state_dict, fields)
        super().load_state_dict(state_dict)
        if state_dict["score"] == self.score:  # it starts fresh with another one
            self.best, self.best_update = state_dict["best"], state_dict["best_update"]
            self.num_bad, self._latest = state_dict["num_bad"], state_dict["latest"]

    def _end_if_due(self, trainer: Trainer, what_to_do: str = "") -> None:
        reason = self._reason()
        if not reason:
            return
        if collectives.is_main_rank():
            _logger.warning(f"update {trainer.state.iteration}: EarlyStopping ends the run: {reason}{what_to_do}")
        trainer.terminate(agreed=not trainer.replicas.are_elastic)  # each replica has a score of its own

    def _reason(self) -> str:
        """Why the run ends; empty if it does not."""
        latest, target = self._latest, self.target
        if latest is not None and target is not None and (latest == target or is_better(latest, target, self.mode)):
            return f"{self.score} is {latest:g}, and target={target:g}"
        if self.patience is not None and self.num_bad >= self.patience:
            best = "has never been a number" if self.best is None else f"was best in update {self.best_update} ({self.best:g})"
            ago = f"{self.num_bad} evaluation{'s' * (self.num_bad != 1)} ago"
            return f"{self.score} {best}, {ago}, and patience={self.patience}"
        return ""
