"""What the ready-made handlers share: their own `attach` puts them on their events, and its arguments are checked."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from ignite.engine import CallableEventWithFilter, Engine, Events, EventsList, RemovableEventHandle
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.arguments import describe, did_you_mean, one_of
from ignite_train.evaluator import Evaluator
from ignite_train.events import Event, TrainEvents, every
from ignite_train.loop.dispatch import Attachable, Dispatcher
from ignite_train.metrics import grouped_metrics
from ignite_train.model.averaged_tensors import (
    averaged_statistics,
    averaged_tensors,
    local_tensors,
    move_towards,
    names_of_tensors,
)
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Piggyback
from ignite_train.trainer import Trainer

__all__ = ["EVERY_50", "AveragingHandler", "Handler", "PiggybackHandler", "RecordingHandler", "ScoreHandler"]

_logger = logging.getLogger("ignite_train")
EVERY_50 = every(50, Events.ITERATION_COMPLETED)


class Handler(Attachable):
    """A handler that is attached by `attach(trainer, ...)` and refuses to be put on an event by itself.

    Most handlers need more than one event. On one of them alone they would do nothing, or only a part, without a warning. A
    derived class defines `attach`, whose arguments are checked before it is called.
    """

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "attach" in vars(cls):
            cls.attach = _checked(vars(cls)["attach"])  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        """The class with those arguments of its construction that are attributes too."""
        kept = [name for name in inspect.signature(type(self)).parameters if name in vars(self)]
        return f"{type(self).__name__}({', '.join(f'{name}={_brief(vars(self)[name])}' for name in kept)})"


def _checked(attach: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attach)
    def checked(self: Handler, trainer: Any, *arguments: Any, **named: Any) -> Any:
        name = type(self).__name__
        _check_trainer(name, trainer)
        if arguments or "event" in named:
            _check_event(name, arguments[0] if arguments else named["event"])
        _check_evaluator(name, named.get("evaluator"))
        outer, self.is_attaching = self.is_attaching, True
        try:
            return attach(self, trainer, *arguments, **named)
        finally:
            self.is_attaching = outer

    return checked


def _check_trainer(name: str, trainer: Any) -> None:
    if isinstance(trainer, Trainer):
        return
    remedy = f"call {name}(...).attach(trainer), with what create_trainer returned"
    if isinstance(trainer, Engine):
        remedy = f"attach {name} to the trainer; those that show an evaluation take attach(trainer, evaluator=...)"
    elif _is_event(trainer):
        remedy = f"the trainer comes first: {name}(...).attach(trainer, event)"
    raise TypeError(f"trainer must be a Trainer, got {describe(trainer)}; {remedy}")


def _check_event(name: str, event: Any) -> None:
    if _is_event(event) or isinstance(event, str):
        return
    remedy = ""
    if isinstance(event, Engine):
        remedy = f"; pass an evaluator by its name: {name}(...).attach(trainer, evaluator=...)"
    raise TypeError(f"event must be an event such as Events.ITERATION_COMPLETED(every=50), got {describe(event)}{remedy}")


def _check_evaluator(name: str, evaluator: Any) -> None:
    if evaluator is None or (isinstance(evaluator, Engine) and not isinstance(evaluator, Trainer)):
        return
    raise TypeError(f"evaluator must be what create_evaluator returned, got {describe(evaluator)} in {name}.attach")


def _brief(value: Any) -> str:
    """A value as in a call if it is short and plain, or else the name of its class."""
    plain = value is None or isinstance(value, (bool, int, float, str, Path))
    return repr(value) if plain else type(value).__name__


def _is_event(value: Any) -> bool:
    return isinstance(value, (CallableEventWithFilter, EventsList))


class PiggybackHandler(Handler, Piggyback):
    """A handler whose numbers travel with the statistics of each update. All ranks attach it alike.

    A derived class defines `__call__(trainer)`, which is called at the event that `attach` takes, and the methods of
    `Piggyback`. What has not travelled at the end of the run is compared by `settle`.
    """

    _trainer: Trainer
    _handle: RemovableEventHandle

    def attach(self, trainer: Trainer, event: Event = Events.ITERATION_COMPLETED) -> RemovableEventHandle:
        """Calls the handler at `event`, before other handlers there. It must fire in the same updates on all ranks."""
        trainer._replace_default(self)
        self._trainer = trainer
        if collectives.world_size() > 1 and self not in trainer.piggybacks:
            trainer.piggybacks.append(self)
            trainer.prepend_event_handler(Events.COMPLETED, self.settle)
        self._handle = trainer.prepend_event_handler(event, self)
        return self._handle

    def detach(self, trainer: Trainer) -> None:
        """Does nothing in later updates. All ranks call it alike."""
        self._handle.remove()
        if self in trainer.piggybacks:
            # A new list: an update that is under way still needs the one whose numbers it has sent.
            trainer.piggybacks = [piggyback for piggyback in trainer.piggybacks if piggyback is not self]
            trainer.remove_event_handler(self.settle, Events.COMPLETED)

    def __call__(self, trainer: Trainer) -> None:
        """Notes what is to travel."""
        raise NotImplementedError


class ScoreHandler(Handler):
    """A handler that reacts to a score of an evaluator, whenever that has evaluated. All ranks attach it alike.

    It reacts as soon as the evaluation is complete, so before a checkpoint is saved, in whatever order they are attached. An
    evaluation before the first update does not count, and of several after the same update the first does. All ranks react to
    the score of rank 0, which costs a small blocking collective for each evaluation.

    A derived class defines `on_score(trainer, score)`, and extends `state_dict` and `load_state_dict` by its own state.

    Args:
        evaluator: what evaluates; `Validation` runs it.
        score: one of its metrics.
        mode: `"min"` if lower scores are better, `"max"` if higher.

    Raises:
        TypeError: `evaluator` is not an evaluator, or `score` is not a string.
        ValueError: `mode` is neither of the two.
    """

    _trainer: Trainer

    def __init__(self, evaluator: Engine, score: str, mode: Literal["min", "max"]) -> None:
        if not isinstance(evaluator, Engine) or isinstance(evaluator, Trainer):
            raise TypeError(f"evaluator must be what create_evaluator returned, got {describe(evaluator)}")
        if not isinstance(score, str):
            raise TypeError(f"score must be the name of one of the evaluator's metrics, got {describe(score)}")
        self.evaluator, self.score = evaluator, score
        self.mode = one_of("mode", mode, ("min", "max"))
        self._latest_update: int | None = None

    def attach(self, trainer: Trainer) -> None:
        """Reacts to each evaluation during the runs of `trainer`."""
        self._trainer = trainer
        trainer.add_event_handler(Events.COMPLETED, self._warn_if_unused)
        if isinstance(self.evaluator, Dispatcher):
            self.evaluator.append_event_handler(Events.COMPLETED, self._after_evaluation)
        else:
            self.evaluator.add_event_handler(Events.COMPLETED, self._after_evaluation)

    def on_score(self, trainer: Trainer, score: float) -> None:
        """Reacts to the score of the parameters after update `trainer.state.iteration`. The same on all ranks."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The latest update to whose score it has reacted."""
        return {"latest_update": self._latest_update}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores it."""
        self._latest_update = state_dict["latest_update"]

    def is_better(self, score: float, other: float | None, *, by: float = 0.0) -> bool:
        """Whether `score` is better than `other` by more than `by`. NaN is never better."""
        if other is None:
            return not math.isnan(score)
        return score < other - by if self.mode == "min" else score > other + by

    def _after_evaluation(self, evaluator: Engine) -> None:
        metrics, update = evaluator.state.metrics, self._trainer.state.iteration
        if update in (0, self._latest_update):
            return
        if self.score not in metrics:
            hint = did_you_mean(self.score, metrics)
            raise ValueError(f"score must be one of the evaluator's metrics {sorted(metrics)}, got {self.score!r}{hint}")
        score = collectives.gather_objects(float(metrics[self.score]))[0]
        self._latest_update = update
        self.on_score(self._trainer, score)

    def _warn_if_unused(self) -> None:
        if self._latest_update is None and collectives.is_main_rank():
            name = type(self).__name__
            _logger.warning(
                f"{name} has done nothing: its evaluator did not run during training; attach "
                f"Validation(evaluator, loader) with the evaluator that {name} was given"
            )


class RecordingHandler(Handler):
    """A handler that writes the metrics of a trainer and of its evaluators as single numbers, on rank 0 only.

    Names have their group, as in `"train/loss"`; see `grouped_metric`. A derived class defines `record`, `recover`, `finish`
    and `is_open`, and extends `attach` where it needs more events.

    Args:
        on_error: what happens when something cannot be written, because the disk is full, say: `"warn"` and train without it,
            or `"raise"`, which ends the run on all ranks.

    Attributes:
        what_is_written: for the warning.
        tags: of the evaluators.
        written: the update in which the trainer's metrics were written last; None if they never were.
        begin: the update after which this process took over; None before a run.

    Raises:
        ValueError: `on_error` is another one.
    """

    what_is_written = "metrics"

    def __init__(self, on_error: Literal["warn", "raise"]) -> None:
        self.on_error = one_of("on_error", on_error, ("warn", "raise"))
        self.tags: list[str] = []
        self.written: int | None = None
        self.begin: int | None = None
        self._trainer: Trainer | None = None
        self._failures = 0
        self._left_out: set[str] = set()

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
        """
        if not collectives.is_main_rank():
            return None
        if evaluator is not None:
            self.tags.append(tag)
            evaluator.add_event_handler(Events.COMPLETED, self._write_evaluation, trainer, tag)
        if self._trainer is trainer:
            return None
        self._trainer = trainer
        trainer.prepend_event_handler(Events.STARTED, self._note_begin)
        trainer.add_event_handler(Events.COMPLETED, self._write_rest)
        trainer.on_exit.append(self.finish)
        return trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Writes the metrics that are published now.

        Raises:
            OSError: they cannot be written, and `on_error` is `"raise"`.
        """
        self.written = trainer.state.iteration
        self.write(trainer, grouped_metrics(trainer.state.metrics, self._left_out))

    def write(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """Writes numbers under the names that they have, with the running update.

        Raises:
            OSError: they cannot be written, and `on_error` is `"raise"`.
        """
        if not numbers:
            return
        try:
            self.record(trainer, numbers)
        except OSError as error:
            self.fail(trainer.state.iteration, error)

    def fail(self, update: int, error: OSError) -> None:
        """Raises `error`, or warns of it the 1st, 2nd, 4th, 8th, ... time."""
        self.recover()
        if self.on_error == "raise":
            raise error
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            what = f"{self.what_is_written} of update {update} could not be written"
            _logger.warning(f"{what} ({error}); failures so far: {self._failures}")

    def is_open(self) -> bool:
        """Whether this process writes already."""
        raise NotImplementedError

    def record(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """Writes `numbers`, which are not empty, with the running update.

        Raises:
            OSError: they cannot be written.
        """
        raise NotImplementedError

    def recover(self) -> None:
        """Called when something could not be written, so that what comes next can."""

    def finish(self) -> None:
        """Called when a run is over, in whatever way it ended."""

    def _note_begin(self, trainer: Trainer) -> None:
        if not self.is_open():
            self.begin = trainer.state.iteration

    def _write_evaluation(self, evaluator: Engine, trainer: Trainer, tag: str) -> None:
        self.write(trainer, grouped_metrics(evaluator.state.metrics, self._left_out, tag))

    def _write_rest(self, trainer: Trainer) -> None:
        """What was published after the last time, at the end of the run."""
        if trainer.state.iteration != self.written:
            self(trainer)


class AveragingHandler(Handler):
    """A handler that keeps an average of the weights: average ← decay · average + (1 - decay) · weights.

    It follows the updates that moved the parameters; a skipped update does not count. All parameters are averaged, and so are
    the running statistics of normalisation layers; other buffers are the model's. Averages of bfloat16 and float16 are kept in
    float32, because 1 - decay of a weight is lost there. With sharded models each rank averages its shards.

    A derived class defines `decay_in` and passes `device`: where the averages are; None: where the weights are.

    Attributes:
        num_updates: how often it has averaged.
    """

    same_on_all_ranks = True

    def __init__(self, device: str | torch.device | None) -> None:
        self.device = None if device is None else torch.device(device)
        self.num_updates = 0
        self._model: nn.Module | None = None
        self._averages: dict[str, Tensor] = {}
        self._is_swapped_in = False
        self._swaps: list[Any] = []  # of evaluations that are running

    def decay_in(self, number: int) -> float:
        """The weight of the average in averaging `number`, which is 1 for the first; in [0, 1)."""
        raise NotImplementedError

    def attach(self, trainer: Trainer, event: Event = TrainEvents.STEP_COMPLETED) -> RemovableEventHandle:
        """Averages the weights of `trainer` at `event`, before other handlers there.

        Raises:
            ValueError: `device` is given and the model is sharded.
        """
        model = trainer._stateful_parts["model"]
        assert isinstance(model, nn.Module)  # noqa: S101  # create_trainer passes a module
        if self.device is not None and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ValueError(
                f"device must be left out for a sharded model, got {str(self.device)!r}: each rank keeps its shards"
            )
        self._model = model
        self._averages = {name: self._average(value) for name, value in averaged_tensors(model).items()}
        trainer.on_enter.append(self._begin)
        return trainer.prepend_event_handler(event, self)

    def use_in(self, evaluator: Evaluator) -> None:
        """Has each run of `evaluator`, whose model is the one that is trained, evaluate the average.

        Raises:
            TypeError: `evaluator` is not an evaluator.
        """
        if not isinstance(evaluator, Evaluator):
            raise TypeError(f"evaluator must be what create_evaluator returned, got {describe(evaluator)}")
        evaluator.on_enter.append(self._enter)
        evaluator.on_exit.append(self._leave)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """In this `with` the model has the averaged weights; afterwards, bit by bit, its own. Needs memory for a copy of them.

        The statistics of normalisation layers are those of rank 0 on all ranks, so it is collective where a model has them.

        Raises:
            RuntimeError: `attach` was not called, or the averages are swapped in already.
        """
        model = self._attached()
        if self._is_swapped_in:
            raise RuntimeError("swapped_in() was called inside swapped_in(); leave the first `with` before the second")
        with torch.no_grad():
            self._take_over_statistics()
            weights, averages = local_tensors(averaged_tensors(model)), local_tensors(self._averages)
            kept = [weight.to(average.device, copy=True) for weight, average in zip(weights, averages, strict=True)]
            torch._foreach_copy_(weights, averages)
        self._is_swapped_in = True
        try:
            yield
        finally:
            self._is_swapped_in = False
            with torch.no_grad():
                torch._foreach_copy_(local_tensors(averaged_tensors(model)), kept)

    def __call__(self) -> None:
        """Averages once.

        Raises:
            RuntimeError: the averages are swapped in, so that the update has moved them and not the weights.
            ValueError: the decay is not in [0, 1).
        """
        if self._is_swapped_in:
            raise RuntimeError("an update was made inside swapped_in(), where the model has the averages; make it outside")
        number = self.num_updates + 1
        move_towards(self._averages, averaged_tensors(self._attached()), 1.0 - self.decay_in(number))
        self.num_updates = number

    def state_dict(self) -> dict[str, Any]:
        """`"num_updates"`, and under `"model"` the state of the model with the averages in the place of the weights."""
        model = self._attached()
        names = {id(value): name for name, value in averaged_tensors(model).items()}
        averages = {name: self._averages[names[id(value)]] for name, value in names_of_tensors(model) if id(value) in names}
        state = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}
        return {"num_updates": self.num_updates, "model": {**state, **averages}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the averages and their number.

        Raises:
            ValueError: it is of another model; nothing is changed.
        """
        self._attached()
        saved = state_dict["model"]
        wrong = [name for name, value in self._averages.items() if name not in saved or saved[name].shape != value.shape]
        if wrong:
            raise ValueError(f"state_dict must be of the same model, got one without a fitting {wrong[0]!r}")
        self.num_updates = state_dict["num_updates"]
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(saved[name])

    def _begin(self, _trainer: Trainer) -> None:
        """A run begins."""
        self._begin_average()

    def _begin_average(self) -> None:
        """Before the first averaging, the average is that of the weights now."""
        if self.num_updates == 0:
            with torch.no_grad():
                torch._foreach_copy_(local_tensors(self._averages), local_tensors(averaged_tensors(self._attached())))

    def _average(self, value: Tensor) -> Tensor:
        dtype = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
        return value.detach().to(device=self.device, dtype=dtype, copy=True)

    def _take_over_statistics(self) -> None:
        """Gives each rank the averaged statistics of rank 0: each has seen other samples. Nothing in a single process."""
        if collectives.world_size() > 1:
            for name in averaged_statistics(self._attached()):
                collectives.broadcast(self._averages[name])

    def _enter(self, evaluator: Evaluator) -> None:
        mine = {id(parameter) for parameter in self._attached().parameters()}
        if not any(id(parameter) in mine for parameter in evaluator.model.parameters()):
            raise ValueError(
                "evaluator must evaluate the model that is trained, got one of another model; "
                f"{type(self).__name__} swaps its weights"
            )
        swap = self.swapped_in()
        swap.__enter__()
        self._swaps.append(swap)

    def _leave(self) -> None:
        while self._swaps:
            self._swaps.pop().__exit__(None, None, None)

    def _attached(self) -> nn.Module:
        if self._model is None:
            raise RuntimeError("attach(trainer) must be called first")
        return self._model
