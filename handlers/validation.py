"""Validation during training, and the best score so far."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from ignite.engine import Engine, Events, RemovableEventHandle
from ignite.metrics import Metric

from ignite_train.arguments import COUNT, MAPPING, NUMBER, TEXT, check_fields, optional, whole_number
from ignite_train.engine.attachable import owner_of, scores_of
from ignite_train.engine.dispatch import append_handler, attached, is_of_library, stateful_handlers, without_handlers
from ignite_train.engine.limits import checked_loader, is_read_once, refuse_used_iterator
from ignite_train.evaluation.evaluator import Evaluator, kept_state
from ignite_train.events import Event
from ignite_train.kinds_of_handlers import Handler
from ignite_train.kinds_of_handlers.handler import check_evaluator
from ignite_train.metrics import is_better, refuse_other_mode, score_in, score_mode
from ignite_train.model.in_full import in_full
from ignite_train.model.modes import modes_of, set_modes
from ignite_train.model.random_state import generators_within, get_generator_state, kept_random_state, set_generator_states
from ignite_train.ranks import collectives
from ignite_train.ranks.agreed_score import agreed_score
from ignite_train.trainer import Trainer

__all__ = ["Validation"]

_logger = logging.getLogger(__name__)
_LOADER = "Validation's loader"
_AFTER_METRICS = (Events.COMPLETED, Events.EXCEPTION_RAISED, Events.TERMINATE, Events.INTERRUPT)
_BEFORE_FORWARD = (
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.GET_BATCH_STARTED,
    Events.GET_BATCH_COMPLETED,
    Events.ITERATION_STARTED,
)


class Validation(Handler):
    """Runs an evaluator over a loader and keeps the best score. Collective: all ranks must attach it.

    Results are in `evaluator.state.metrics`, from which loggers read that know the evaluator. If two events fire after the
    same update, such as the end of an epoch and every N updates, it validates once. The score is that of rank 0 on all ranks.

    Args:
        evaluator: from `create_evaluator`, or any other engine of Ignite; one for each loader. What is attached to it and has a
            state, such as `EarlyStopping`, is in the checkpoints of the run.
        loader: held-out micro-batches; the ranks' shares may differ. An iterator serves for one validation.
        score: the metric that decides which parameters are best; None: the one that the other handlers of this evaluator, such
            as `EarlyStopping` and `Checkpoint`, follow where they follow one alone, and otherwise the loss.
        mode: `"min"` if lower scores are better, `"max"` if higher; None: the words of the score's name decide, such as loss,
            error and perplexity, or accuracy, bleu, f1 and auc, and the log says how. Only a strictly better score is a new
            best, NaN never.
        sanity: before the first update, evaluate this many micro-batches, so that an error in the evaluation, or a score that
            this handler, `EarlyStopping`, `ReduceOnPlateau` or `Checkpoint` misspells, is found at once; 0: do not. The result
            is dropped, and random numbers are restored. Of the evaluator's handlers those of the library and the metrics of
            Ignite are called, except at COMPLETED, and no others, so that none keeps or counts the result. Where one of the
            others runs before forward, which may need it, this evaluation is left out; where one runs at another event than
            COMPLETED, a metric or the score may need it, so only forward is run: metrics and the score are not looked at.
            One that is attached on one rank counts on all.

    Attributes:
        best: the best score so far, or None.
        best_update: the update in which it was reached, or None.

    Raises:
        TypeError: `evaluator` is not an engine that evaluates, or `sanity` is not an integer.
        ValueError: `mode` is none of the three, or is None and the name does not decide, or `sanity` is negative. In the run:
            the evaluator has no metric `score`.

    Example:
        >>> validation = Validation(create_evaluator(model, forward), [torch.ones(8, 3)])
        >>> handle = validation.attach(trainer, Events.ITERATION_COMPLETED(every=3) | Events.EPOCH_COMPLETED)
        >>> state = trainer.run(data, max_epochs=2)
        >>> sorted(validation.evaluator.state.metrics), validation.best_update is not None
        (['loss'], True)
    """

    is_collective = True
    of_one_trainer = True

    def __init__(
        self,
        evaluator: Engine,
        loader: Iterable[Any],
        *,
        score: str | None = None,
        mode: Literal["min", "max"] | None = None,
        sanity: int = 1,
    ) -> None:
        check_evaluator(evaluator, "; write Validation(evaluator, loader)")
        self.evaluator, self.loader = evaluator, loader
        checked_loader(loader)
        self.sanity = whole_number("sanity", sanity or 0)
        self.score = "loss" if score is None else score
        self.mode: str = score_mode(self.score, mode, of="Validation")
        self._default = (self.score, self.mode) if score is None and mode is None else None  # where others may decide
        self.best: float | None = None
        self.best_update: int | None = None
        self._latest_update: int | None = None
        self._read: Iterable[Any] | None = None  # the loader of the latest validation

    def attach(self, trainer: Trainer, event: Event = Events.EPOCH_COMPLETED) -> RemovableEventHandle:
        """Validates at `event`, before the handlers there that `add_event_handler` adds, whatever the order of attaching.

        Raises:
            ValueError: another `Validation` of `trainer` has the same evaluator.
        """
        others = [one for _, one, _ in attached(trainer) if isinstance(one, Validation) and one is not self]
        if any(one.evaluator is self.evaluator for one in others):
            raise ValueError(
                "evaluator must belong to one Validation, got the evaluator of another Validation, so that their results would "
                "have the same names; make a second evaluator with create_evaluator for each loader, or remove the first "
                "Validation with handle.remove(), where handle is what its attach returned"
            )
        trainer.add_event_handler(Events.STARTED, self._begin, event is Events.EPOCH_COMPLETED)
        return trainer.add_evaluation_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Validates, unless this update was validated already.

        Raises:
            ValueError: the evaluator has no metric of the score's name.
            TypeError: that metric is not one number, or the loader is an iterator, which an earlier validation has read.
        """
        update = trainer.updates_done
        if update == self._latest_update:
            return
        self._choose_score(trainer)
        if is_read_once(self.loader):
            refuse_used_iterator(self.loader, 1 + (self._read is self.loader), name=_LOADER)
        self._read = self.loader
        with trainer.section("evaluation"):
            try:
                metrics = self._evaluate(trainer)
            except Exception as error:
                error.add_note(f"in Validation, after update {update}")
                raise
            score = agreed_score(metrics, self.score)
        if math.isnan(score):
            _logger.warning(f"update {update}: the validation's {self.score} is NaN; the best so far stays {self.best}")
        if is_better(score, self.best, self.mode):
            self.best, self.best_update = score, update
        self._latest_update = update

    @property
    def is_best(self) -> bool:
        """Whether the latest validation was the best."""
        return self.best_update is not None and self.best_update == self._latest_update

    def settings(self) -> dict[str, Any]:
        """The arguments but the data, with the score that it follows, whether it was given one or others decide."""
        score, mode = self._followed(self.attached_trainer)
        given = {**super().settings(), "score": score, "mode": mode}
        return {name: value for name, value in given.items() if name != "loader"}

    def scores(self) -> list[tuple[Engine, str | None, str | None]]:
        """Its own."""
        return [(self.evaluator, self.score, self.mode)]

    def runs(self) -> list[Engine]:
        """The evaluator."""
        return [self.evaluator]

    def improves(self, evaluator: Engine) -> bool:
        """Returns whether the evaluator is this handler's, and its score is better than the best before."""
        metrics = evaluator.state.metrics
        if evaluator is not self.evaluator or self.score not in metrics:
            return False
        return is_better(score_in(metrics, self.score), self.best, self.mode)

    def rows_at_end(self) -> list[tuple[str, str]]:
        """The best score."""
        return [] if self.best is None else [("best", f"{self.score} {self.best:.6g} at update {self.best_update}")]

    def _evaluate(self, trainer: Trainer, **limit: int) -> Mapping[str, Any]:
        """Runs the evaluator. The evaluators of Ignite leave the model in eval mode, where those of this library do not."""
        modes = modes_of(trainer.model)
        try:
            # Ignite's own engine gives None once, and does nothing, if its latest run ended with an exception.
            state: Any = self.evaluator.run(self.loader, **limit) or self.evaluator.run(self.loader, **limit)
        finally:
            evaluated = [(module, module.training) for module, _ in modes]
            in_full(partial(set_modes, modes, since=evaluated))
        return dict(state.metrics)

    def _begin(self, trainer: Trainer, is_at_epochs: bool) -> None:  # noqa: FBT001  # as Ignite calls it
        """Refuses an iterator that the ends of several epochs would read, before the first of them; and rehearses."""
        state = trainer.state
        if is_at_epochs and is_read_once(self.loader) and state.max_epochs is not None:
            refuse_used_iterator(self.loader, state.max_epochs - state.epoch + trainer.progress.epoch_open, name=_LOADER)
        self._rehearse(trainer)

    def _rehearse(self, trainer: Trainer) -> None:
        """Evaluates a few micro-batches, unless the run continues, where it has worked.

        All ranks do the same, also where the loader of one rank is an iterator, which this would use up, or where one rank
        alone has a handler, such as a progress bar on rank 0.
        """
        leaves_out = not self.sanity or isinstance(self.loader, Iterator)
        if trainer.state.iteration > 0 or collectives.any_rank(leaves_out):
            return
        self._choose_score(trainer)
        evaluator = self.evaluator
        owners = (self.loader, evaluator.model if isinstance(evaluator, Evaluator) else None)
        with (
            kept_state(evaluator),
            kept_random_state(owners),
            trainer.section("evaluation"),
            append_handler(evaluator, Events.EPOCH_COMPLETED, self._skip_completed),
            without_handlers(evaluator, self._is_left_out) as left_out,
        ):
            comes_before = any(event in _BEFORE_FORWARD for event in left_out)
            prepares = any(event not in _AFTER_METRICS for event in left_out)  # what metrics and the score may need
            numbers = collectives.largest(comes_before, prepares, bool(left_out))
            comes_before, prepares, is_part = (number > 0 for number in numbers)
            if comes_before:
                return
            with without_handlers(evaluator, lambda _, handler: prepares and isinstance(owner_of(handler), Metric)):
                names = (self.score, *(name for name, _ in self._scores_of_others(trainer)))
                self._try_out(trainer, () if prepares else dict.fromkeys(names), is_whole=not is_part)

    def _try_out(self, trainer: Trainer, scores: Iterable[str], *, is_whole: bool) -> None:
        """Evaluates some micro-batches, and looks for scores. Without all handlers some may be missing, which they publish."""
        try:
            metrics = self._evaluate(trainer, epoch_length=self.sanity)
            for name in scores:
                if name in metrics or is_whole:
                    score_in(metrics, name)
        except Exception as error:
            error.add_note(
                f"this was a rehearsal with {self.sanity} micro-batches before the first update; Validation(sanity=0) leaves "
                "it out"
            )
            raise

    def _is_left_out(self, event: Any, handler: Any) -> bool:
        """Whether the rehearsal must not reach a handler, which may keep what it is shown, such as the best weights."""
        owner = owner_of(handler)
        is_metric = isinstance(owner, Metric) and event != Events.COMPLETED
        return not (owner is self or is_metric or is_of_library(handler))

    def _scores_of_others(self, trainer: Trainer | None) -> list[tuple[str, str]]:
        """The metrics that other handlers need of this evaluator, each with its mode."""
        checkpoint = None if trainer is None else trainer.checkpoint
        scores = scores_of((checkpoint, *stateful_handlers(self.evaluator).values()))
        return [(name, mode) for evaluator, name, mode in scores if evaluator is self.evaluator and name and mode]

    def _followed(self, trainer: Trainer | None) -> tuple[str, str]:
        """The score that decides, and its mode: where others may decide, that of the handlers that are attached now."""
        if self._default is None:
            return self.score, self.mode
        of_others = {*self._scores_of_others(trainer)}
        return of_others.pop() if len(of_others) == 1 else self._default

    def _choose_score(self, trainer: Trainer) -> None:
        """Takes the score of the others, which may have been attached later; the best of another score is forgotten."""
        followed = self._followed(trainer)
        if followed != (self.score, self.mode):
            (self.score, self.mode), self.best, self.best_update = followed, None, None

    def _skip_completed(self) -> None:
        self.evaluator.terminate(skip_completed=True)

    def state_dict(self) -> dict[str, Any]:
        """The best score, its update and the latest one validated, which scores are better, and the loader's generators."""
        best = {"best": self.best, "best_update": self.best_update, "score": self.score, "mode": self.mode}
        generators = {name: get_generator_state(one) for name, one in generators_within(self.loader).items()}
        return best | {"latest_update": self._latest_update} | ({"generators": generators} if generators else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores them.

        Raises:
            ValueError: something in it is not what `state_dict()` gives; or the same score was ranked in the other direction.
        """
        count = optional(COUNT)
        fields = {"best": optional(NUMBER), "best_update": count, "score": TEXT, "mode": TEXT, "latest_update": count}
        check_fields("Validation", state_dict, fields)
        generators = state_dict.get("generators", {})  # a loader need not hold one
        check_fields("Validation", {"generators": generators}, {"generators": MAPPING})
        if self._default is None:
            refuse_other_mode(self.score, self.mode, state_dict["score"], state_dict["mode"])
        else:
            self.score, self.mode = state_dict["score"], state_dict["mode"]
        if state_dict["score"] == self.score:  # a best of another score says nothing of this one
            self.best, self.best_update = state_dict["best"], state_dict["best_update"]
        self._latest_update = state_dict["latest_update"]
        set_generator_states(generators_within(self.loader), generators)
