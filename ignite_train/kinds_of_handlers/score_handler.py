"""Handlers that react to the score of an evaluation."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ignite.engine import Engine, Events

from ignite_train.arguments import COUNT, TEXT, check_fields, optional
from ignite_train.engine.dispatch import append_handler
from ignite_train.kinds_of_handlers.handler import Handler, check_evaluator
from ignite_train.metrics import refuse_other_mode, score_mode
from ignite_train.ranks import collectives
from ignite_train.ranks.agreed_score import agreed_score
from ignite_train.state import TrainState
from ignite_train.trainer import Trainer

__all__ = ["ScoreHandler"]


_logger = logging.getLogger("ignite_train")


class ScoreHandler(Handler):
    """A handler that reacts to a score of an evaluator, whenever that has evaluated. All ranks must attach it.

    It reacts as soon as the evaluation is complete, so before a checkpoint is saved, in whatever order they are attached. An
    evaluation before the first update does not count, and of several after the same update the first does. All ranks react to
    the score of rank 0, which costs a small blocking collective for each evaluation.

    A derived class defines `on_score(trainer, score)`, and extends `state_dict` and `load_state_dict` by its own state.

    Args:
        evaluator: what evaluates; `Validation` runs it.
        score: one of its metrics.
        mode: `"min"` if lower scores are better, `"max"` if higher; None: the words of the score's name decide, such as loss,
            error and perplexity, or accuracy, bleu, f1 and auc, and the log says how.

    Raises:
        TypeError: `evaluator` is not an evaluator, or `score` is not a string.
        ValueError: `mode` is none of the three, or it is None and the score's name does not decide.
    """

    is_collective = True
    of_one_trainer = True

    _state: TrainState
    _evaluator: Callable[[], Engine | None]

    def __init__(self, evaluator: Engine, score: str, mode: Literal["min", "max"] | None = None) -> None:
        check_evaluator(evaluator)
        self.evaluator, self.score = evaluator, score
        self.mode = score_mode(score, mode, of=type(self).__name__)
        self._latest_update: int | None = None

    def attach(self, trainer: Trainer) -> None:
        """Reacts to each evaluation during the runs of `trainer`."""
        # The evaluator has this handler, so the trainer keeps the evaluator, and this handler keeps neither of them.
        self._state, evaluator = trainer.state, self.evaluator
        trainer.add_event_handler(Events.COMPLETED, self._warn_if_unused, evaluator)
        append_handler(evaluator, Events.COMPLETED, self._after_evaluation)
        self._evaluator = weakref.ref(evaluator)

    @property
    def evaluator(self) -> Engine:
        """The evaluator whose scores it follows; None once the trainer is gone and nothing else holds it."""
        return self._evaluator()  # type: ignore[return-value]

    @evaluator.setter
    def evaluator(self, evaluator: Engine) -> None:
        self._evaluator = lambda: evaluator  # a weak reference, once it is attached

    def scores(self) -> list[tuple[Engine, str | None, str | None]]:
        """Its own."""
        return [(self.evaluator, self.score, self.mode)]

    def on_score(self, trainer: Trainer, score: float) -> None:
        """Reacts to the score of the parameters after update `trainer.updates_done`. The same on all ranks."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The latest update to whose score it has reacted, and which scores are better."""
        return {"latest_update": self._latest_update, "score": self.score, "mode": self.mode}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores it.

        Raises:
            ValueError: something in it is not what `state_dict()` gives; or the same score was ranked in the other direction.
        """
        check_fields(type(self).__name__, state_dict, {"latest_update": optional(COUNT), "score": TEXT, "mode": TEXT})
        refuse_other_mode(self.score, self.mode, state_dict["score"], state_dict["mode"])
        self._latest_update = state_dict["latest_update"]

    def _after_evaluation(self, evaluator: Engine) -> None:
        trainer = self.attached_trainer
        update = self._state.iteration if trainer is None else trainer.updates_done
        if update in (0, self._latest_update):
            return
        score = agreed_score(evaluator.state.metrics, self.score)
        self._latest_update = update
        if trainer is not None:  # or else it is gone, on this rank maybe alone
            self.on_score(trainer, score)

    def _warn_if_unused(self, _trainer: Trainer, _evaluator: Engine) -> None:
        if self._latest_update is None and collectives.is_main_rank():
            name = type(self).__name__
            _logger.warning(
                f"{name} has done nothing: its evaluator did not run during training; attach "
                f"Validation(evaluator, loader) with the evaluator that {name} was given"
            )
