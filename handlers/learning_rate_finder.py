"""LearningRateFinder: Ignite's search for a learning rate, on a trainer that is made for it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from ignite.engine import Events
from ignite.handlers import FastaiLRFinder
from torch import Tensor
from torch.optim import Optimizer

from ignite_train.arguments import describe, one_of, path_of, positive_int, real_number
from ignite_train.data.unmoved import unmoved
from ignite_train.errors import GaveUpError, LossScaleFloorError, NonFiniteError
from ignite_train.model.random_state import kept_random_state
from ignite_train.trainer import Trainer
from ignite_train.update.new_trainer import new_trainer

__all__ = ["LearningRateFinder"]


class LearningRateFinder(FastaiLRFinder):
    """Ignite's `FastaiLRFinder` for a `Trainer`: raises the learning rate from update to update until the loss diverges.

    The search trains, so it takes a function that makes model, optimizer and trainer, and your own are not touched.
    `get_results`, `lr_suggestion` and `plot` are Ignite's. What differs:

    - `"lr"` of the results is the rate with which the update was made, and the rates begin with `start_lr` and end with
      `end_lr`. The loss beside it is the mean over all micro-batches and ranks, before that update.
    - A loss that is not finite ends the search, and is not in the results; nor is an update that was skipped.
    - `apply_suggested_lr` takes several optimizers too, and leaves rates that are tensors the tensors that they are.
    - `save_plot` writes the curve as a picture, which takes no screen.

    Random numbers, the generators that the loader holds, and a state that the loader itself gives are put back at the end, so
    that the run after it has the bits of one without it. A dataset or a sampler that keeps its own place, as a stream may,
    stays where the search has left it: make another loader after it. All ranks must use it. The method is that of L. Smith
    (arXiv:1506.01186).

    Args:
        make_trainer: makes a new trainer each time, by `create_trainer` or `create_supervised_trainer`. Attach no schedule in
            it, which would set the rates too, and no `Checkpoint`.

    Raises:
        TypeError: `make_trainer` is not a function.

    Example:
        >>> def make_trainer():
        ...     model = torch.nn.Linear(3, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        ...     return create_trainer(model, optimizer, lambda model, x: (model(x) - 1).square().mean())
        >>> finder, loader = LearningRateFinder(make_trainer), [torch.randn(8, 3) for _ in range(10)]
        >>> finder.run(loader, num_iter=60)
        >>> finder.save_plot(directory / "rates.png")
        >>> trainer = make_trainer()
        >>> finder.apply_suggested_lr(trainer.optimizers["optimizer"])
        >>> 1e-4 < trainer.optimizers["optimizer"].param_groups[0]["lr"] < 10
        True
    """

    def __init__(self, make_trainer: Callable[[], Trainer]) -> None:
        super().__init__()
        if isinstance(make_trainer, Trainer):
            raise TypeError(
                "make_trainer must be a function that makes a new trainer, got a Trainer, which the search would train; write "
                "def make_trainer(): ... return create_trainer(...)"
            )
        if not callable(make_trainer):
            raise TypeError(f"make_trainer must be a function that makes a new trainer, got {describe(make_trainer)}")
        self._make_trainer = make_trainer
        self._is_exponential = True

    def attach(self, *_: Any, **__: Any) -> Any:
        """Refuses Ignite's way, which trains the model itself.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "LearningRateFinder is not attached; write finder = LearningRateFinder(make_trainer); finder.run(loader)"
        )

    def run(
        self,
        loader: Iterable[Any],
        *,
        num_iter: int = 100,
        start_lr: float | list[float] | None = None,
        end_lr: float | list[float] = 10.0,
        step_mode: Literal["exp", "linear"] = "exp",
        smooth_f: float = 0.05,
        diverge_th: float = 5.0,
    ) -> None:
        """Searches. Collective.

        Args:
            loader: of the training; it is read as often as the search needs.
            num_iter: updates of the search.
            start_lr: the first rate, or one for each parameter group; None: those of the optimizer. The groups of several
                optimizers follow each other.
            end_lr: the last rate, or one for each parameter group.
            step_mode: whether the rates grow by a factor, `"exp"`, or a summand, `"linear"`.
            smooth_f: the share of a loss in the smoothed one, whose rest is the smoothed one before; in [0, 1), 0 does not
                smooth.
            diverge_th: end when the smoothed loss is this many times the least one; at least 1. That is a rise by
                `diverge_th` - 1 times the distance from 0 to the least one. Where the least one is 0 or below, the distance is
                that from the least one up to 0 or to the first one, whichever is longer. (Ignite's search multiplies there too,
                and ends as soon as a loss is below 0.)

        Raises:
            TypeError: an argument has the wrong type, or `make_trainer` makes no trainer.
            ValueError: an argument has an invalid value, or `make_trainer` returns a trainer of a model that was there before,
                or with a `Checkpoint`, or whose replicas come and go.
        """
        self._smoothing = real_number("smooth_f", smooth_f, at_least=0)
        if self._smoothing >= 1:
            raise ValueError(f"smooth_f must be less than 1, got {smooth_f!r}")
        self._threshold = real_number("diverge_th", diverge_th, at_least=1)
        self._is_exponential = one_of("step_mode", step_mode, ("exp", "linear")) == "exp"
        number = positive_int("num_iter", num_iter)
        with kept_random_state(loader), unmoved(loader) as own:
            trainer = new_trainer(self._make_trainer)
            self._groups = _groups_of(trainer.optimizers.values())
            self._ends = _rates("end_lr", end_lr, len(self._groups))
            present = [float(group["lr"]) for group in self._groups]
            self._starts = _rates("start_lr", present if start_lr is None else start_lr, len(self._groups))
            for start, end in zip(self._starts, self._ends, strict=True):
                if start >= end:
                    raise ValueError(f"start_lr must be less than end_lr, got {start:g} and {end:g}")
            self._search(trainer, own, number)

    def _search(self, trainer: Trainer, loader: Iterable[Any], number: int) -> None:
        self._history: dict[str, list[Any]] = {"lr": [], "loss": []}
        self._diverge_flag, self._least = False, math.inf
        trainer.add_event_handler(Events.ITERATION_STARTED, self._set_rates, number)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, self._note)
        try:
            trainer.run(loader, max_iters=number)
        except (NonFiniteError, LossScaleFloorError, GaveUpError):
            # The loss has diverged as far as it can, on all ranks alike.
            self._diverge_flag = True
        if not self._diverge_flag:
            warnings.warn("the loss did not diverge: increase end_lr, decrease diverge_th, or look at the curve", stacklevel=3)

    def apply_suggested_lr(self, optimizer: Optimizer | Mapping[str, Optimizer]) -> None:
        """Sets the suggested rates.

        Args:
            optimizer: of the same kind as in the search. If there were several, all by name, as `trainer.optimizers` has them.

        Raises:
            RuntimeError: the search has not run or its curve has no suggestion, or these have other parameter groups.
        """
        suggestion = self.lr_suggestion()
        rates = suggestion if isinstance(suggestion, list) else [suggestion]
        groups = _groups_of(optimizer.values() if isinstance(optimizer, Mapping) else [optimizer])
        if len(rates) != len(groups):
            raise RuntimeError(
                f"apply_suggested_lr must be given the {len(rates)} parameter groups of the search, got {len(groups)}; with "
                "several optimizers pass trainer.optimizers"
            )
        _put_rates(groups, rates)

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
            raise ModuleNotFoundError("save_plot needs matplotlib; pip install matplotlib") from error
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
        axes.set(xlabel="learning rate", ylabel="smoothed loss", xscale="log" if self._is_exponential else "linear")
        axes.grid(alpha=0.3)
        figure.savefig(path_of("path", path), dpi=120)

    def _set_rates(self, trainer: Trainer, number: int) -> None:
        share = (trainer.state.iteration - 1) / max(number - 1, 1)
        pairs = zip(self._starts, self._ends, strict=True)
        self._rates = [a * (b / a) ** share if self._is_exponential else a + (b - a) * share for a, b in pairs]
        _put_rates(self._groups, self._rates)

    def _note(self, trainer: Trainer) -> None:
        """Adds a point, and ends the search where the loss has diverged: the same on all ranks."""
        output = trainer.state.update_output
        if output is None or (math.isfinite(output.loss) and not output.applied):
            return  # an overflow, whose loss says nothing of the rate
        loss, losses = output.loss, self._history["loss"]
        if math.isfinite(loss):
            if losses and self._smoothing > 0:
                loss = self._smoothing * loss + (1 - self._smoothing) * losses[-1]
            self._history["lr"].append(self._rates[0] if len(self._rates) == 1 else self._rates)
            losses.append(loss)
            self._least = min(self._least, loss)
        least, limit = self._least, self._threshold * self._least
        if least <= 0:
            limit = least + (self._threshold - 1) * (max(losses[0], 0.0) - least)
        self._diverge_flag = not math.isfinite(loss) or loss > limit
        if self._diverge_flag:
            trainer.terminate(agreed=True)


def _groups_of(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def _put_rates(groups: Iterable[dict[str, Any]], rates: Iterable[float]) -> None:
    """Sets the rate of each group; one that is a tensor stays that tensor, which compiled code may hold."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _rates(name: str, given: Any, count: int) -> list[float]:
    """A rate for each parameter group."""
    rates = list(given) if isinstance(given, (list, tuple)) else [given] * count
    if len(rates) != count:
        raise ValueError(f"{name} must have one rate for each of the optimizer's {count} parameter groups, got {len(rates)}")
    return [real_number(name, float(rate) if isinstance(rate, Tensor) else rate, above=0) for rate in rates]
