"""Ignite's search for a learning rate, which leaves no trace on the run."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from ignite.engine import Events
from ignite.handlers import FastaiLRFinder
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_train.arguments import describe, one_of, positive_int, real_number
from ignite_train.loop.dispatch import Attachable, Stateful
from ignite_train.loop.sections import unmeasured
from ignite_train.model.modules_used import modules_used
from ignite_train.model.optimizers import Optimizers, each_optimizer, optimizer_of_parts
from ignite_train.model.random_state import (
    capture_random_state,
    generators_within,
    get_generator_state,
    restore_random_state,
    set_generator_state,
)
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer
from ignite_train.update.failures_in_a_row import FailuresInARow
from ignite_train.update.local_update import LocalUpdate

__all__ = ["LearningRateFinder"]

_SET_ASIDE: Mapping[str, Callable[[], Any]] = {
    **dict.fromkeys(("on_enter", "on_exit", "piggybacks", "_on_backward", "_on_record", "_defaults"), list),
    **dict.fromkeys(("_stateful", "_stages"), dict),
    "_after_update": lambda: [lambda _: None],  # replicas that nothing makes equal are warned about
    "_sections": lambda: None,
    "_begin_section": lambda: unmeasured,
}
"""Attributes of a trainer that belong to its handlers, and what stands in their place during the search."""


class LearningRateFinder(FastaiLRFinder, Attachable):
    """Ignite's `FastaiLRFinder` for a `Trainer`: raises the learning rate from update to update until the loss diverges.

    It is used as Ignite documents it, and `get_results`, `lr_suggestion`, `apply_suggested_lr` and `plot` are Ignite's. What
    differs:

    - Everything is put back, bit by bit, also after an exception: model, buffers, optimizer, counters, loss scaling, place in
      the data, random generators (those that the loader holds too), metrics. An iterator cannot be put back, nor the
      generators in worker processes that persist, unless the loader is a `ResumableLoader`.
    - No other handler runs during the search: no checkpoint, no schedule, no average, no logger. `Freeze` has its effect.
    - `"lr"` of the results is the rate with which the update was made, and the rates begin with `start_lr` and end with
      `end_lr`. The loss beside it is that of all micro-batches and ranks, before that update.
    - A loss that is not finite ends the search, and is not in the results.
    - `save_plot` writes the curve as a picture, which takes no screen.

    All ranks use it alike. The method is that of L. Smith (arXiv:1506.01186).

    Example:
        >>> import tempfile
        >>> import torch
        >>> from ignite_train import create_trainer
        >>> from ignite_train.handlers import LearningRateFinder
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        >>> trainer = create_trainer(model, optimizer, lambda model, x: (model(x) - 1).square().mean())
        >>> finder, loader = LearningRateFinder(), [torch.randn(8, 3) for _ in range(10)]
        >>> with finder.attach(trainer, num_iter=60) as searching:
        ...     state = searching.run(loader)
        >>> finder.apply_suggested_lr(optimizer)
        >>> finder.save_plot(tempfile.mkdtemp() + "/rates.png")
        >>> trainer.state.iteration, 1e-4 < optimizer.param_groups[0]["lr"] < 10
        (0, True)
    """

    @contextmanager
    def attach(  # type: ignore[override]  # to_save may be left out
        self,
        trainer: Trainer,
        to_save: Mapping[str, Any] | None = None,
        output_transform: Callable[[Any], float] | None = None,
        num_iter: int | None = None,
        start_lr: float | list[float] | None = None,
        end_lr: float | list[float] = 10.0,
        step_mode: Literal["exp", "linear"] = "exp",
        smooth_f: float = 0.05,
        diverge_th: float = 5.0,
    ) -> Iterator[Trainer]:
        """In this `with`, a run of `trainer` is the search; afterwards everything is as it was before.

        Args:
            trainer: from `create_trainer`, before its run or between two epochs.
            to_save: more objects to put back, by name, with `state_dict` and `load_state_dict`. The trainer's model and
                optimizer are put back without being named, and so is a module that forward uses beside the model and that is
                found: a teacher, say, or a loss with buffers. If it has `"optimizer"`, that must be the trainer's.
            output_transform: makes the loss of `state.output`; it is averaged over the ranks. None: the loss of the update.
            num_iter: updates of the search; None: those of the run, as its loader and `max_epochs` say.
            start_lr: the first rate, or one for each parameter group; None: those of the optimizer. The groups of several
                optimizers follow each other.
            end_lr: the last rate, or one for each parameter group.
            step_mode: whether the rates grow by a factor, `"exp"`, or a summand, `"linear"`.
            smooth_f: the share of a loss in the smoothed one, whose rest is that before it; in [0, 1), and 0 does not smooth.
            diverge_th: end when the smoothed loss is this many times the least one; at least 1.

        Yields:
            The trainer.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument has an invalid value.
            RuntimeError: the trainer is in the middle of an epoch.
        """
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a Trainer, got {describe(trainer)}; pass what create_trainer returned")
        if trainer._running or trainer._epoch_open:
            raise RuntimeError("the search was begun in the middle of an epoch; attach before run, or between two epochs")
        optimizer = optimizer_of_parts(trainer._stateful_parts)
        others = _checked_objects({} if to_save is None else to_save, trainer, [*each_optimizer(optimizer)])
        self._smoothing = real_number("smooth_f", smooth_f, at_least=0)
        if self._smoothing >= 1:
            raise ValueError(f"smooth_f must be less than 1, got {smooth_f!r}")
        self._threshold = real_number("diverge_th", diverge_th, at_least=1)
        starts = _rates("start_lr", [g["lr"] for g in optimizer.param_groups] if start_lr is None else start_lr, optimizer)
        ends = _rates("end_lr", end_lr, optimizer)
        for start, end in zip(starts, ends, strict=True):
            if start >= end:
                raise ValueError(f"start_lr must be less than end_lr, got {start:g} and {end:g}")
        self._search = _Search(optimizer, starts, ends, one_of("step_mode", step_mode, ("exp", "linear")), output_transform)
        self._search.length = None if num_iter is None else positive_int("num_iter", num_iter)
        self._history, self._diverge_flag = {"lr": [], "loss": []}, False
        with _put_back(trainer, others) as before:
            trainer.add_event_handler(Events.STARTED, lambda trainer: before.note_loader(trainer.state.dataloader))
            trainer.add_event_handler(Events.STARTED, self._search.begin)
            trainer.add_event_handler(Events.ITERATION_STARTED, self._search.set_rates)
            trainer.add_event_handler(Events.ITERATION_COMPLETED, self._note)
            trainer.add_event_handler(Events.COMPLETED, self._warn)
            yield trainer

    def save_plot(self, path: str | Path, skip_start: int = 0, skip_end: int = 0) -> None:
        """Draws the smoothed loss over the rate, with the suggested rate as a dot, into a file.

        Args:
            path: the picture; its ending, such as `.png` or `.svg`, says its format.
            skip_start: updates to leave out at the beginning.
            skip_end: updates to leave out at the end.

        Raises:
            RuntimeError: the search has not run, or all of its updates are skipped.
            ModuleNotFoundError: matplotlib is not installed.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("save_plot needs matplotlib; pip install 'ignite-train[plot]'") from error
        results = self.get_results() or {"lr": [], "loss": []}
        points = [(rate[0] if isinstance(rate, list) else rate, loss) for rate, loss in zip(*results.values(), strict=True)]
        points = points[skip_start : len(points) - skip_end]
        if not points:
            raise RuntimeError("there is nothing to draw; run the search first, and skip fewer updates than it had")
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(*zip(*points, strict=True), color="C0")
        try:
            rate = self.lr_suggestion()
            index = results["lr"].index(rate)
            rate = rate[0] if isinstance(rate, list) else rate
            axes.plot(rate, results["loss"][index], "o", color="C3", label=f"suggestion: {rate:.3g}")
            axes.legend()
        except RuntimeError:  # the curve has no such place
            pass
        axes.set(xlabel="learning rate", ylabel="smoothed loss", xscale="log" if self._search.is_exponential else "linear")
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)

    def _note(self, trainer: Trainer) -> None:
        """Adds a point, and ends the search where the loss has diverged: the same on all ranks."""
        loss, losses = self._search.loss(trainer), self._history["loss"]
        output = trainer.state.update_output
        if math.isfinite(loss) and output is not None and not output.applied:
            return  # an overflow, whose loss says nothing of the rate
        if math.isfinite(loss):
            if losses and self._smoothing > 0:
                loss = self._smoothing * loss + (1 - self._smoothing) * losses[-1]
            rates = self._search.rates
            self._history["lr"].append(rates[0] if len(rates) == 1 else rates)
            losses.append(loss)
            self._search.least = min(self._search.least, loss)
        self._diverge_flag = not math.isfinite(loss) or loss > self._threshold * self._search.least
        if self._diverge_flag:
            trainer.terminate(agreed=True)

    def _warn(self, _trainer: Trainer) -> None:
        if not self._diverge_flag:
            warnings.warn("the loss did not diverge: increase end_lr, decrease diverge_th, or look at the curve", stacklevel=2)


class _Search:
    """The rates of a search, and the losses that they lead to.

    Args:
        optimizer: whose rates are set.
        starts: the first rate of each parameter group.
        ends: the last ones.
        mode: `"exp"` or `"linear"`.
        output_transform: makes the loss; None: that of the update.

    Attributes:
        length: how many updates it has.
        rates: those of the running update.
        least: the least smoothed loss so far.
    """

    def __init__(
        self,
        optimizer: Optimizer | Optimizers,
        starts: list[float],
        ends: list[float],
        mode: str,
        output_transform: Callable[[Any], float] | None,
    ) -> None:
        self._optimizer, self._starts, self._ends = optimizer, starts, ends
        self.is_exponential, self._output_transform = mode == "exp", output_transform
        self.length: int | None = None
        self.rates = starts
        self.least = math.inf
        self._first = 0

    def begin(self, trainer: Trainer) -> None:
        state = trainer.state
        self._first = state.iteration + 1
        if self.length is None:
            epochs = None if state.max_epochs is None or state.epoch_length is None else state.max_epochs - state.epoch
            self.length = state.max_iters if epochs is None else epochs * (state.epoch_length or 0)
            if self.length is None:
                raise ValueError("num_iter must be given for a loader without a length")
        state.max_epochs, state.max_iters = None, state.iteration + self.length

    def set_rates(self, trainer: Trainer) -> None:
        assert self.length is not None  # noqa: S101  # `begin` comes before
        share = (trainer.state.iteration - self._first) / max(self.length - 1, 1)
        pairs = zip(self._starts, self._ends, strict=True)
        self.rates = [a * (b / a) ** share if self.is_exponential else a + (b - a) * share for a, b in pairs]
        for group, rate in zip(self._optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def loss(self, trainer: Trainer) -> float:
        """The loss of the update, the same on all ranks."""
        if self._output_transform is None:
            output = trainer.state.update_output
            return math.nan if output is None else output.loss
        return collectives.total([float(self._output_transform(trainer.state.output))])[0] / collectives.world_size()


class _Before:
    """What a trainer, its model and its optimizer were before, to be put back."""

    def __init__(self, trainer: Trainer, others: Mapping[str, Stateful]) -> None:
        model: Any = trainer._stateful_parts["model"]
        creation = {} if trainer._creation is None else trainer._creation.arguments
        beside = modules_used(creation[name] for name in creation.keys() & {"forward", "loss_fn", "model_fn"})
        modules = [model, *beside, *(entry for entry in others.values() if isinstance(entry, nn.Module))]
        self._trainer = trainer
        self._others = [(e, copy.deepcopy(e.state_dict())) for e in others.values() if not isinstance(e, nn.Module)]
        self._attributes, self._state = dict(vars(trainer)), dict(vars(trainer.state))
        self._times, self._metrics = dict(trainer.state.times), copy.deepcopy(trainer.state.metrics)
        self._update, self._carried = copy.deepcopy(trainer._update.state_dict()), trainer.state.carried.copies()
        tensors = {id(value): value for module in modules for value in (*module.parameters(), *module.buffers())}
        self._tensors = [(value, value.detach().clone()) for value in tensors.values()]
        self._modes = [(part, part.training) for module in modules for part in module.modules()]
        self._optimizers = [_OptimizerBefore(one) for one in each_optimizer(optimizer_of_parts(trainer._stateful_parts))]
        self._random_state = capture_random_state()
        self._generators: list[tuple[Any, Any]] = []

    def note_loader(self, loader: Any) -> None:
        """Remembers the generators that the loader holds, before it is read."""
        if not self._generators:
            self._generators = [(gen, get_generator_state(gen)) for gen in generators_within(loader).values()]

    def restore(self) -> None:
        trainer = self._trainer
        vars(trainer).clear()
        vars(trainer).update(self._attributes)
        vars(trainer.state).clear()
        vars(trainer.state).update(self._state)
        trainer.state.times, trainer.state.metrics = self._times, self._metrics
        trainer.state.carried.replace(self._carried)
        trainer._update.load_state_dict(self._update)
        with torch.no_grad():
            for value, before in self._tensors:
                value.copy_(before)
        for module, training in self._modes:
            module.training = training
        for optimizer in self._optimizers:
            optimizer.restore()
        for entry, state in self._others:
            entry.load_state_dict(state)
        for generator, state in self._generators:
            set_generator_state(generator, state)
        restore_random_state(self._random_state)


class _OptimizerBefore:
    """The settings and the state that an optimizer had before."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [{k: _copy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self._moments = {p: {key: _copy(value) for key, value in s.items()} for p, s in optimizer.state.items()}

    def restore(self) -> None:
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in group.keys() - settings.keys() - {"params"}:
                del group[name]
            group |= settings
        self._optimizer.state.clear()
        self._optimizer.state.update(self._moments)


@contextmanager
def _put_back(trainer: Trainer, others: Mapping[str, Stateful]) -> Iterator[_Before]:
    """In this `with` the trainer has no handlers, skips what is not finite, and everything is put back at its end."""
    before = _Before(trainer, others)
    update: Any = trainer._update
    options, failures = update.options, update._failures
    try:
        for name, make in _SET_ASIDE.items():
            setattr(trainer, name, make())
        if isinstance(update, LocalUpdate):  # by which the ranks agree which of them step
            trainer.piggybacks.append(update._own)
        trainer._set_handlers_aside()
        trainer._resume_with, trainer._ended = None, False
        trainer.state.max_epochs, trainer.state.max_iters = trainer.state.epoch + 1, None
        update.options = replace(options, on_nonfinite="skip", give_up_after=None)
        update._failures = FailuresInARow(None)
        yield before
    finally:
        update.options, update._failures = options, failures
        before.restore()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _checked_objects(to_save: Any, trainer: Trainer, optimizers: list[Optimizer]) -> dict[str, Stateful]:
    """Those that are put back beside what belongs to the trainer."""
    if not isinstance(to_save, Mapping):
        raise TypeError(f"to_save must be a mapping of names to objects, got {describe(to_save)}")
    if "optimizer" in to_save and all(to_save["optimizer"] is not one for one in optimizers):
        raise ValueError("to_save['optimizer'] must be the optimizer of the trainer, got another one")
    for name, entry in to_save.items():
        if not isinstance(entry, Stateful):
            raise TypeError(f"to_save[{name!r}] must have state_dict and load_state_dict, got {describe(entry)}")
    own = {id(entry) for entry in (trainer, trainer._stateful_parts["model"], *optimizers)}
    return {name: entry for name, entry in to_save.items() if id(entry) not in own}


def _rates(name: str, given: Any, optimizer: Any) -> list[float]:
    """One rate for each parameter group."""
    count = len(optimizer.param_groups)
    rates = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(rates) != count:
        raise ValueError(f"{name} must have one rate for each of the optimizer's {count} parameter groups, got {len(rates)}")
    return [real_number(name, float(rate) if isinstance(rate, Tensor) else rate, above=0) for rate in rates]
