"""Lowering the learning rate when the score of the validation no longer improves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from ignite.engine import Engine
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ignite_train.arguments import COUNT, TEXT, check_fields, describe, optional
from ignite_train.kinds_of_handlers import ScoreHandler
from ignite_train.metrics import refuse_other_mode
from ignite_train.model.learning_rates import refuse_other_optimizer
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["ReduceOnPlateau"]

_logger = logging.getLogger(__name__)


class ReduceOnPlateau(ScoreHandler):
    """Steps torch's `ReduceLROnPlateau` with a score after each evaluation, so that it lowers the learning rate.

    It reacts when the evaluation is complete: the next update uses the new rate, and so does a run that is resumed from a
    checkpoint of this update. An evaluation before the first update does not count, and of several after the same update the
    first does. torch's scheduler lowers the rate after more than `patience` evaluations in a row without an improvement:
    `ReduceLROnPlateau(optimizer, factor=0.25, patience=0, threshold=0)` divides it by 4 after each evaluation that is not the
    best so far. Use it without a `LearningRateSchedule` of the same optimizer, which may set the rate back.

    Args:
        evaluator: what evaluates; `Validation` runs it.
        scheduler: torch's, of the trainer's optimizer; it says whether the `"min"` or the `"max"` is best.
        score: one of the evaluator's metrics.
        mode: None, or the scheduler's own mode again, which says that it is meant where the score's name says otherwise.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the scheduler's mode is not `mode`, or not the one that follows from the score's name.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> trainer, evaluator = create_trainer(model, optimizer, forward), create_evaluator(model, forward)
        >>> scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0, threshold=0)
        >>> ReduceOnPlateau(evaluator, scheduler).attach(trainer)
        >>> handle = Validation(evaluator, [torch.ones(8, 3)]).attach(trainer)
        >>> state = trainer.run([torch.ones(8, 3)], max_epochs=2)  # the rate is too high: the loss grows in the second epoch
        >>> optimizer.param_groups[0]["lr"]
        0.25
    """

    def __init__(
        self,
        evaluator: Engine,
        scheduler: ReduceLROnPlateau,
        *,
        score: str = "loss",
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if not isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                "scheduler must be a torch.optim.lr_scheduler.ReduceLROnPlateau, which is stepped with a score, got "
                f"{describe(scheduler)}; other schedulers need LearningRateSchedule"
            )
        super().__init__(evaluator, score, mode)
        # torch's default is "min", whatever the score is.
        if scheduler.mode != self.mode:
            raise ValueError(
                f"scheduler must have mode={self.mode!r} for the score {score!r}, got {scheduler.mode!r}; write "
                f"ReduceLROnPlateau(optimizer, mode={self.mode!r}), or pass ReduceOnPlateau(..., mode={scheduler.mode!r})"
            )
        self.scheduler = scheduler

    def attach(self, trainer: Trainer) -> None:
        """Lowers the rate during the runs of `trainer`.

        Raises:
            ValueError: the scheduler is of another optimizer than the trainer's.
        """
        refuse_other_optimizer(trainer.optimizers, self.scheduler)
        super().attach(trainer)

    def on_score(self, trainer: Trainer, score: float) -> None:
        """Steps the scheduler."""
        before = self._rates()
        self.scheduler.step(score)
        if (after := self._rates()) != before and collectives.is_main_rank():
            best = f"{self.score} {score:g} does not improve on {self.scheduler.best:g}"
            rates = f"{', '.join(map('{:g}'.format, before))} -> {', '.join(map('{:g}'.format, after))}"
            _logger.info(f"update {trainer.state.iteration}: learning rate {rates}: {best}")

    def state_dict(self) -> dict[str, Any]:
        """The state of the scheduler, and the score and the latest update to which it has reacted."""
        return self.scheduler.state_dict() | {"_latest_update": self._latest_update, "_score": self.score}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores them. With another score than before the scheduler starts fresh.

        Raises:
            ValueError: the scheduler was made for the other direction, or something in it is not what `state_dict()` gives.
        """
        of_scheduler = {"_score": self.score, **state_dict}  # an older version did not write the score
        check_fields("ReduceOnPlateau", of_scheduler, {"mode": TEXT, "_latest_update": optional(COUNT), "_score": TEXT})
        self._latest_update, score = of_scheduler.pop("_latest_update"), of_scheduler.pop("_score")
        refuse_other_mode(self.score, self.mode, score, state_dict["mode"])
        if score == self.score:
            self.scheduler.load_state_dict(of_scheduler)

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]  # sync, on an accelerator
