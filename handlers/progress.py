"""A progress bar on a terminal, and short lines in a log file."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TextIO

from ignite.engine import Engine, Events, RemovableEventHandle
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ignite_train.arguments import describe, one_of
from ignite_train.engine.attachable import Attachable, scores_of
from ignite_train.engine.dispatch import stateful_handlers
from ignite_train.engine.loop import Loop
from ignite_train.events import Event
from ignite_train.kinds_of_handlers import EVERY_50, Handler
from ignite_train.metrics import (
    PUBLISHED_METRICS,
    changed_numbers,
    grouped_metrics,
    is_published_metric,
    json_line,
    single_metrics,
)
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["ProgressLog"]

_logger = logging.getLogger(__name__)

_STYLES = ("auto", "bar", "simple", "json", "none")
_MAX_COLUMNS = 100
_REFRESH_SECONDS = 0.1
_NUMBER_COLUMNS = 7
_BESIDE_COLUMNS = len(" 0.1234 (training 0.1234)")
_TABLE_COLUMNS = 68  # beside the names of the rows, on a terminal of 80
_TOO_MUCH = 1e24  # for the prefixes of SI
_LONG_WAIT = 0.1  # a fraction of the time in which the loader is waited for that a line mentions
_MUCH_SLOWER = 1.5  # times the time of the median rank, for a line to name the slowest
_MEASURED = {"data_wait", "samples_per_second", "slowest_to_median", "time_to_go"}  # shown once this run has measured them
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
_BAR_WITHOUT_TOTAL = "{desc} {n_fmt} [{elapsed}{postfix}]"


class ProgressLog(Handler):
    """Progress bar on a terminal; otherwise one line per interval. On rank 0 only.

    Both show the loss, the learning rate, the speed and the time to go; with `TrainingMetrics`, attached before or after, the
    loss is the mean of the interval, and a line has the user's logs and the gradient norm too. Lines go to standard output and
    have at most 100 columns, or those of the terminal; their parts stand under one another. What is the same in each line is
    left out: a learning rate is shown once it has changed, skipped updates when there are new ones, the share of the time in
    which the loader is waited for from 10% on, and, with `StepTimer`, the slowest rank from 1.5 times the median on. Where room
    is short, a line keeps the score that a handler follows, or the first of the user's logs, rather than the learning rate. A
    bar has the learning rate and the speed if there is room for them; its time to go counts down from the one that
    `TrainingMetrics` published last, or is at the mean speed of this run without its first update. An evaluation has a bar of
    its own, and a line with its metrics, each with the training's beside it. As long as an attached `TrainingMetrics` has
    published nothing in this epoch, only numbers of the training that have changed in it are shown there. At the end of the run
    there is one more line if the user's logs have changed since the last line, as logs of the last epoch do that are published
    when it is over. A short table ends the run: time by section, best score, skipped updates, memory, files, and up to three
    hints.

    Args:
        style: `"bar"`, or `"simple"` for lines, `"json"` for one JSON object a line with all metrics, `"none"` for nothing;
            `"auto"` is a bar on a terminal and in a notebook, and lines elsewhere.
        unit: what `sample_size` counts, such as `"tokens"`, for the speed.

    Raises:
        TypeError: `unit` is not a string.
        ValueError: `style` is not one of these.

    Example:
        >>> handle = ProgressLog().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> state = trainer.run(data, max_epochs=1)  # doctest: +ELLIPSIS
        Linear, 4 parameters, on cpu in fp32, SGD
        4 updates in 1 epoch: 1 micro-batch each
        epoch 1/1  update 2/4  loss ...
        epoch 1/1  update 4/4  loss ...
        finished after 4 updates (4 steps, 0 skipped) in 1 epoch, ... s
    """

    of_one_trainer = True

    def __init__(self, style: Literal["auto", "bar", "simple", "json", "none"] = "auto", *, unit: str = "samples") -> None:
        if not isinstance(unit, str):
            raise TypeError(f"unit must be the name of what sample_size counts, such as 'tokens', got {describe(unit)}")
        self.style, self.unit = one_of("style", style, _STYLES), unit
        self._shown = _Shown(unit)
        self._beside: dict[str, weakref.ref[Trainer]] = {}  # other trainers of the same loop, whose memory it does not hold
        self._bar: Any = None
        self._evaluation_bar: Any = None
        self._with_bar = ExitStack()
        self._begin, self._steps_before, self._has_ended, self._is_introduced = 0, 0, False, False
        self._started = self._refreshed = 0.0
        self._left_out: set[str] = set()
        self._has_warned = False  # that a line could not be written
        self._evaluators: list[Engine] = []
        self._measured: dict[str, float] = {}  # by an earlier run or process
        self._timed_from: tuple[int, float] | None = None  # the first update of this run, and when it was over
        self._told = 0.0, 0, 0.0  # the time to go that was published last, of how many updates in all, and that of each
        self._latest: tuple[int, dict[str, float]] = (0, {})  # the update and the metrics of the latest line
        self._before_epoch: dict[str, float] = {}  # the trainer's metrics as its epoch began

    def attach(
        self,
        trainer: Trainer,
        event: Event = EVERY_50,
        *,
        evaluator: Engine | None = None,
        tag: str = "validation",
        beside: Mapping[str, Trainer] | None = None,
    ) -> RemovableEventHandle | None:
        """Prints at `event`, and shows `evaluator` when it runs.

        Args:
            trainer: the trainer. A second call with the same trainer adds the evaluator only.
            event: when a line is printed; the bar moves by itself.
            evaluator: whose bar and metrics are shown.
            tag: its name.
            beside: other trainers of the same loop, by name: `{"d": d}` for a GAN whose generator is `trainer`. Their losses
                and logs are in the lines too, as `d/loss`, and the losses in the bar.

        Raises:
            TypeError: `beside` holds something else than trainers by name.
        """
        for name, other in (beside or {}).items():
            if not isinstance(name, str) or not isinstance(other, Trainer):
                raise TypeError(f"beside must hold trainers by name, got {describe(other)} under {name!r}")
        if not collectives.is_main_rank() or self.style == "none":
            return None
        if evaluator is not None:
            self._evaluators.append(evaluator)
            evaluator.add_event_handler(Events.STARTED, self._open_evaluation, tag)
            evaluator.add_event_handler(Events.ITERATION_COMPLETED, self._advance_evaluation)
            evaluator.add_event_handler(Events.COMPLETED, self._print_evaluation, trainer, tag)
            if isinstance(evaluator, Loop):  # on a stock engine a handler of EXCEPTION_RAISED would suppress the exception
                evaluator.on_exit.append(self._close_evaluation)  # also where COMPLETED is skipped, as in a rehearsal
        if trainer.has_event_handler(self._note_end, Events.COMPLETED):
            return None
        self._beside = {name: weakref.ref(other) for name, other in (beside or {}).items()}
        self._shown.losses = frozenset(f"{name}/loss" for name in self._beside)
        trainer.prepend_event_handler(Events.STARTED, self._introduce)
        trainer.prepend_event_handler(Events.EPOCH_STARTED, self._note_epoch)
        trainer.add_event_handler(Events.COMPLETED, self._note_end)
        trainer.on_exit.append(self._conclude)
        trainer.enter_with(self._open)
        return trainer.add_event_handler(event, self)

    def taken_off(self) -> None:
        """It shows no evaluators any more."""
        self._evaluators.clear()

    def scores(self) -> list[tuple[Engine, str | None, str | None]]:
        """The evaluators that it shows."""
        return [(evaluator, None, None) for evaluator in self._evaluators]

    def __call__(self, trainer: Trainer) -> None:
        """Prints a line. On a terminal the bar shows it already, and a validation has a line with what is seen in training."""
        state, total = trainer.state, trainer.expected_updates
        metrics, (update, before) = self._metrics(trainer), self._latest
        if state.iteration == update and not changed_numbers(metrics, before):  # several events may fall on one update
            return
        self._latest = state.iteration, metrics
        if self.style == "json":
            place = {"epoch": state.epoch, "update": state.iteration, "total": total}
            self._print(json_line(place | grouped_metrics(metrics, self._left_out)))
        elif self._bar is None or not self._evaluators:
            self._print(_line(_head(trainer, total), self._shown.parts(self._of_this_run(metrics))))

    def _metrics(self, trainer: Trainer) -> dict[str, float]:
        """The metrics of the trainer, and the losses and logs of those beside it under their names."""
        metrics = _with_loss(trainer, self._left_out)
        for name, held in self._beside.items():
            other = held()
            found = {} if other is None else _with_loss(other, self._left_out)
            own = {key: value for key, value in found.items() if key == "loss" or not is_published_metric(key)}
            metrics |= {f"{name}/{key}": value for key, value in own.items()}
        return metrics

    def _of_this_run(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics without the figures that an earlier run has measured, and this one not yet."""
        self._measured = {name: value for name, value in self._measured.items() if metrics.get(name) == value}
        return changed_numbers(metrics, self._measured)

    def _scores(self, trainer: Trainer) -> frozenset[str]:
        """The scores of the shown evaluators that handlers of the run follow."""
        found = scores_of(_handlers(trainer))
        return frozenset(name for evaluator, name, _ in found if name is not None and evaluator in self._evaluators)

    # --- bars -------------------------------------------------------------------------------------------------------------

    def _open(self, trainer: Trainer) -> None:
        state, self._started = trainer.state, time.perf_counter()
        self._timed_from, self._told = None, (0.0, 0, 0.0)
        self._begin, self._steps_before = state.iteration, state.num_steps
        self._shown.scores = self._scores(trainer)
        metrics = single_metrics(state.metrics, self._left_out)
        self._shown.start(metrics)
        self._measured = {name: metrics[name] for name in _MEASURED & metrics.keys()}
        self._latest = state.iteration, self._metrics(trainer)
        self._note_epoch(trainer)  # or it continues one, of which these numbers may not be
        if state.iteration and self._is_introduced and self.style != "json":
            self._print(f"continues after update {state.iteration}")
        if self.style == "bar" or (self.style == "auto" and _has_bars()):
            self._with_bar.enter_context(logging_redirect_tqdm())
            epoch = f"epoch {_of(state.epoch + (not trainer.progress.epoch_open), state.max_epochs)}"
            place = {"initial": state.iteration, "desc": epoch, "bar_format": _BAR_WITHOUT_TOTAL}
            self._bar = _make_bar(unit="update", delay=_REFRESH_SECONDS, **place)
            # Behind what publishes metrics, and before handlers that may end the run.
            self._with_bar.enter_context(trainer.add_evaluation_handler(Events.ITERATION_COMPLETED, self._advance))

    def _note_epoch(self, trainer: Trainer) -> None:
        self._before_epoch = single_metrics(trainer.state.metrics, self._left_out)

    def _introduce(self, trainer: Trainer) -> None:
        """Says in a few lines what runs, when the first run of this process starts."""
        if self._is_introduced or self.style == "json":
            return
        self._is_introduced, state = True, trainer.state
        for line in trainer.introduce():
            self._print(line)
        rows = [row for one in _handlers(trainer) for row in one.rows_at_end()]
        if paths := [text.rpartition(" (")[0] for name, text in rows if name == "files"]:
            self._print(f"writes to {paths[0]}" + f" and {len(paths) - 1} more" * (len(paths) > 1))
        if state.iteration:
            read = None if trainer.checkpoint is None else trainer.checkpoint.latest
            self._print(f"resumed after update {state.iteration}" + (f" from {read}" if read is not None else ""))

    def _advance(self, trainer: Trainer) -> None:
        bar = self._bar
        bar.n += 1
        now = time.perf_counter()
        if self._timed_from is None:
            self._timed_from = trainer.state.iteration, now
        if now - self._refreshed >= _REFRESH_SECONDS or bar.n - 1 == self._begin:
            self._refreshed = now
            bar.set_description_str(f"epoch {_of(trainer.state.epoch, trainer.state.max_epochs)}", refresh=False)
            total = trainer.expected_updates
            _set_total(bar, total)
            elapsed, done = tqdm.format_interval(now - self._started), _of(trainer.state.iteration, total)
            room = _columns(sys.stderr, math.inf) - len(f"{bar.desc} 100%|#| {done} [{elapsed}]")
            bar.set_postfix_str(self._postfix(trainer, now, room), refresh=False)
            bar.refresh()

    def _postfix(self, trainer: Trainer, now: float, room: float) -> str:
        """The text behind the bar, cut to `room` columns."""
        state, metrics = trainer.state, self._of_this_run(self._metrics(trainer))
        losses = [name for name in ("loss", *sorted(self._shown.losses)) if name in metrics]
        parts = {name: (index, f"{name} {metrics[name]:.4g}") for index, name in enumerate(losses)}
        if state.update_output is not None and state.update_output.learning_rates:
            parts["learning_rate"] = (3, f"lr {state.update_output.learning_rates[0]:.3g}")
        seconds = self._seconds_an_update(state.iteration, now)
        if (samples := metrics.get("samples_per_second")) is not None:
            parts["speed"] = (2, f"{_thousands(samples)} {self.unit}/s")
        elif seconds:
            parts["speed"] = (2, f"{1 / seconds:.3g} updates/s")
        if (total := trainer.expected_updates) is not None:
            left, told = total - state.iteration, metrics.get("time_to_go", 0.0)
            if told not in (0.0, self._told[0]):
                self._told = told, total, told / max(left, 1)
            each = self._told[2] if self._told[:2] == (told, total) else seconds
            if each or not left:
                parts["time_to_go"] = (1, f"{_clock(left * each)} left")
        return ", ".join(_fitting(parts, room))

    def _seconds_an_update(self, update: int, now: float) -> float:
        """The mean of this run, without its first update, before which workers start and graphs are compiled; or 0."""
        first, began = (update, now) if self._timed_from is None else self._timed_from
        return (now - began) / (update - first) if update > first else 0.0

    def _open_evaluation(self, evaluator: Engine, tag: str) -> None:
        if self._evaluation_bar is not None:  # a widget: one for all evaluations
            self._evaluation_bar.set_description(tag, refresh=False)
            self._evaluation_bar.reset(_length(evaluator))
        elif self._bar is not None:
            self._evaluation_bar = _make_bar(desc=tag, total=_length(evaluator), unit="batch", position=1)

    def _advance_evaluation(self) -> None:
        if self._evaluation_bar is not None:
            self._evaluation_bar.update(1)

    def _close(self) -> None:
        self._close_evaluation(widget=True)
        if self._bar is not None:
            self._bar.delay = 0  # or else it is not cleared where tqdm has not drawn it by itself
            self._bar.close()
            self._bar = None
        self._with_bar.close()

    def _close_evaluation(self, *, widget: bool = False) -> None:
        if self._evaluation_bar is not None and (widget or not _are_widgets()):
            self._evaluation_bar.close()
            self._evaluation_bar = None

    # --- lines ------------------------------------------------------------------------------------------------------------

    def _print(self, line: str) -> None:
        """Prints a line. A run does not end where its output does: a pipe or a terminal that was closed, or a full disk."""
        try:
            self._write(line)
        except (OSError, ValueError) as error:  # the latter of a file that is closed
            if not self._has_warned:
                self._has_warned = True
                _logger.warning(
                    f"a line of {type(self).__name__} could not be written to the standard output ({error}); the run "
                    "continues, and later lines may be missing too, without another warning"
                )

    def _write(self, line: str) -> None:
        # A bar of the script stays below the line. Where there was none, to make tqdm's lock would fix how multiprocessing
        # starts, as the first bar does. In one piece, since lines of several threads may come at once.
        write = partial(tqdm.write, end="", nolock=multiprocessing.get_start_method(allow_none=True) is None)
        try:
            write(f"{line}\n")
        except UnicodeEncodeError:  # the output takes fewer letters
            write(f"{line}\n".encode("ascii", "backslashreplace").decode())
        if hasattr(sys.stdout, "flush"):  # not of None, where there is no output, or an object of a script's own
            sys.stdout.flush()  # a log file, too, is read while the run continues

    def _print_evaluation(self, evaluator: Engine, trainer: Trainer, tag: str) -> None:
        self._close_evaluation()
        state, metrics = trainer.state, evaluator.state.metrics
        if self.style == "json":
            place = {"epoch": state.epoch, "update": trainer.updates_done}
            self._print(json_line(place | grouped_metrics(metrics, self._left_out, tag)))
            return
        head = f"{tag} after update {trainer.updates_done}:"
        found = single_metrics(metrics, self._left_out)
        training = single_metrics(state.metrics, self._left_out)
        if "wall" in training and training["wall"] == self._before_epoch.get("wall"):
            # `TrainingMetrics` has published nothing in this epoch: beside a validation its numbers would be taken for it.
            training = changed_numbers(training, self._before_epoch)
        for beside in (training.keys(), {"loss"} & training.keys(), set[str]()):  # as many as leave room for what was found
            texts = [
                f"{name} {_short(value).rstrip()} (training {training[name]:.4g})".ljust(len(name) + _BESIDE_COLUMNS)
                if name in beside
                else f"{name} {_short(value)}"
                for name, value in found.items()
            ]
            if len("  ".join([head, *texts, "*"])) <= _columns(sys.stdout, _MAX_COLUMNS):
                break
        else:
            texts = [text.rstrip() for text in texts]
        marks = ["*"] if any(one.improves(evaluator) for one in _handlers(trainer)) else []
        parts = {text: (index, text) for index, text in enumerate(texts, start=1)}
        self._print(_line(head, parts | {mark: (0, mark) for mark in marks}))

    def _note_end(self, trainer: Trainer) -> None:
        changed = changed_numbers(self._metrics(trainer), self._latest[1])
        if any(not is_published_metric(name) for name in changed.keys() - self._shown.losses):
            self(trainer)
        self._close()
        self._has_ended = True

    def _conclude(self) -> None:
        """Shows the end of a run once all of it is over: no fault of a table comes before the last checkpoint."""
        self._close()
        trainer, has_ended, self._has_ended = self.attached_trainer, self._has_ended, False
        if trainer is not None and has_ended:
            self._show_end(trainer)

    def _show_end(self, trainer: Trainer) -> None:
        state, seconds = trainer.state, time.perf_counter() - self._started
        if self.style == "json":
            counts = {"finished": state.iteration, "steps": state.num_steps, "skipped": state.num_skipped}
            self._print(json_line({"epoch": state.epoch, **counts, "seconds": seconds}))
            return
        epochs = f"{state.epoch} epoch" + "s" * (state.epoch != 1)
        total, ending, number = trainer.expected_updates, "finished", str(state.iteration)
        if trainer.should_terminate and state.iteration != total:
            ending, number = "stopped", number if total is None else f"{number} of {total}"
        if state.num_steps == self._steps_before and state.iteration > self._begin:
            ending = "ended WITHOUT A STEP"
        updates = f"{number} updates ({state.num_steps} steps, {state.num_skipped} skipped)"
        here = f", {state.iteration - self._begin} updates in this run" if self._begin else ""
        self._print(f"{ending} after {updates} in {epochs}{here}, {seconds:.1f} s")
        for name, text in _table(trainer):
            self._print(f"  {name:<8}{text}")


class _Shown:
    """Which metrics a line shows: those that change."""

    def __init__(self, unit: str) -> None:
        self.losses: frozenset[str] = frozenset()  # of trainers beside this one, which are shown as its own is
        self.scores: frozenset[str] = frozenset()  # of the evaluators, which handlers follow
        self._unit = unit
        # The learning rate and the user's own metrics, as they were at the start; NaN once they have changed.
        self._constants: dict[str, float] = {}
        self._skipped = 0.0

    def start(self, metrics: Mapping[str, float]) -> None:
        self._constants |= {name: value for name, value in metrics.items() if not is_published_metric(name)}
        self._skipped = metrics.get("skipped", 0.0)

    def parts(self, metrics: Mapping[str, float]) -> dict[str, tuple[int, str]]:
        """By name, in the order in which they are shown: how soon each is left out where room is short, and its text."""
        own = [name for name, value in metrics.items() if not is_published_metric(name) and self._changes(name, value)]
        losses = [name for name in own if name in self.losses]
        others = [name for name in own if name not in self.losses]
        ranks = dict.fromkeys(("loss", *losses), 1) | {"loss_base2": 5, "perplexity": 5}
        longest = next((name for name in others if name in self.scores), next(iter(others), None))
        ranks |= {name: 2 if name == longest else 5 for name in others}
        parts = {name: (rank, f"{name} {_short(metrics[name])}") for name, rank in ranks.items() if name in metrics}
        parts |= {name: (rank, text(metrics[name], self._unit)) for name, (rank, text) in _TEXTS.items() if name in metrics}
        rate, alarms = metrics.get("learning_rate", metrics.get("learning_rate/0")), self._alarms(metrics)
        if rate is not None:
            text = f"lr {_short(rate)}"
            self._constants.setdefault("learning_rate", rate)
            if self._changes("learning_rate", rate):
                parts["learning_rate"] = (4, text)
            elif not alarms:  # as blanks, so that nothing else is left out once it is shown
                parts["learning_rate"] = (4, " " * len(text))
        return parts | alarms

    def _alarms(self, metrics: Mapping[str, float]) -> dict[str, tuple[int, str]]:
        alarms: dict[str, tuple[int, str]] = {}
        if metrics.get("skipped", 0.0) > self._skipped:
            self._skipped = metrics["skipped"]
            alarms["skipped"] = (0, f"skipped {self._skipped:g}")
        if metrics.get("data_wait", 0.0) >= _LONG_WAIT:
            alarms["data_wait"] = (5, f"waiting {metrics['data_wait']:.0%}")
        if metrics.get("slowest_to_median", 0.0) >= _MUCH_SLOWER:
            alarms["slowest_rank"] = (5, f"rank {metrics['slowest_rank']:g} is slow")
        return alarms

    def _changes(self, name: str, value: float) -> bool:
        """Whether the value is another one than at the start, or has been before."""
        if self._constants.get(name) == value:
            return False
        self._constants[name] = math.nan
        return True


_TEXTS: dict[str, tuple[int, Callable[[float, str], str]]] = {
    "grad_norm": (5, lambda norm, _: f"norm {_short(norm)}"),
    "samples_per_second": (3, lambda speed, unit: f"{_thousands(speed):>5} {unit}/s"),
    "time_to_go": (2, lambda seconds, _: f"{_clock(seconds)} left"),
}
"""Of metrics that have a text of their own in a line: how soon each is left out, and the text."""


def _with_loss(trainer: Trainer, left_out: set[str]) -> dict[str, float]:
    """The metrics as single numbers; the loss of the latest update, where none is published."""
    metrics, output = single_metrics(trainer.state.metrics, left_out), trainer.state.update_output
    if "loss" not in metrics and output is not None:
        metrics["loss"] = output.loss
    return metrics


def _line(head: str, parts: Mapping[str, tuple[int, str]]) -> str:
    """All of `head`, and as many of `parts` as fit beside it into 100 columns, or into the terminal."""
    room = _columns(sys.stdout, _MAX_COLUMNS) - len(head)
    return "  ".join([head, *_fitting(parts, room)]).rstrip()


def _fitting(parts: Mapping[str, tuple[int, str]], room: float) -> list[str]:
    """The texts that fit, with two columns for each beside its own: those with low numbers first, in the order of `parts`."""
    fitting = set()
    for name in sorted(parts, key=lambda name: parts[name][0]):
        room -= len(parts[name][1]) + 2
        if room < 0:
            break
        fitting.add(name)
    return [text for name, (_, text) in parts.items() if name in fitting]


def _columns(stream: TextIO, most: float) -> float:
    """The columns of the terminal, at most `most`; `most` if the stream is not a terminal."""
    try:
        return min(most, os.get_terminal_size(stream.fileno()).columns or most) if stream.isatty() else most
    except (AttributeError, OSError, ValueError):  # a script's own object that can only be written to; a closed stream
        return most


def _head(trainer: Trainer, total: int | None) -> str:
    state = trainer.state
    return f"epoch {_of(state.epoch, state.max_epochs)}  update {_of(state.iteration, total)}"


def _of(number: int, total: int | None) -> str:
    """`"  7/120"`: as wide for each number."""
    return str(number) if total is None else f"{number:>{len(str(total))}}/{total}"


def _short(number: float) -> str:
    """Seven columns: `"1.234  "`, `"1.2e-05"`."""
    text = f"{number:.4g}"
    return f"{text if len(text) <= _NUMBER_COLUMNS else f'{number:.2g}':<{_NUMBER_COLUMNS}}"


def _thousands(number: float) -> str:
    """`"4.57k"`."""
    return str(tqdm.format_sizeof(number)) if 0.1 <= number < _TOO_MUCH else f"{number:.2g}"


def _clock(seconds: float) -> str:
    """`"0:12:34"`."""
    return str(timedelta(seconds=round(min(max(seconds, 0.0), 1e9))))


def _handlers(trainer: Trainer) -> list[Attachable]:
    """The `Checkpoint` of the run, and its other handlers that have a state."""
    found: list[object] = [trainer.checkpoint, *stateful_handlers(trainer).values()]
    return [one for one in found if isinstance(one, Attachable)]


def _table(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """The rows that the handlers of the run have at its end, and the memory; a row without a name continues the one above."""
    rows: dict[str, list[str]] = {"time": [], "best": [], "memory": [], "files": [], "hint": []}
    measured_by = dict[str, Any]()
    for handler in _handlers(trainer):
        for name, text in handler.rows_at_end():
            # The time of the run is told once, however many handlers have measured it, such as two `TrainingMetrics`.
            if name not in ("time", "hint") or measured_by.setdefault(name, handler) is handler:
                rows[name].append(text)
    metrics = trainer.state.metrics
    memory = [name for name in PUBLISHED_METRICS if "memory" in name and name in metrics]
    if memory:
        rows["memory"] = [", ".join(f"{name.replace('memory', '').strip('_')} {metrics[name]:.2f} GiB" for name in memory)]
    rows["time"] = [*_wrapped(rows["time"])]
    for row, texts in rows.items():
        for index, text in enumerate(filter(None, texts)):
            yield row if index == 0 else "", text


def _wrapped(parts: list[str]) -> Iterator[str]:
    """The parts with commas between them, on as many lines as they need."""
    line = ""
    for part in parts:
        if line and len(line) + len(part) + 2 > _TABLE_COLUMNS:
            yield f"{line},"
            line = ""
        line = f"{line}, {part}" if line else part
    yield line


def _make_bar(**options: Any) -> Any:
    return tqdm(dynamic_ncols=True, leave=False, disable=False, mininterval=_REFRESH_SECONDS, **options)


def _set_total(bar: Any, total: int | None) -> None:
    """Tells the bar its length, which is known once the run has begun. A widget learns it by `reset` only."""
    bar.bar_format = _BAR if total else _BAR_WITHOUT_TOTAL
    if total is None or total == bar.total:
        bar.total = total
        return
    number, started = bar.n, bar.start_t
    bar.reset(total)
    bar.n, bar.start_t = number, started


def _has_bars() -> bool:
    """Whether standard error is a terminal, or this is a notebook."""
    with suppress(AttributeError, ValueError):  # it is closed, or a script's own object
        if sys.stderr.isatty():
            return True
    return _are_widgets()


def _are_widgets() -> bool:
    return any(kind.__module__ == "tqdm.notebook" for kind in tqdm.__mro__)


def _length(evaluator: Engine) -> int | None:
    """Micro-batches of an evaluation, if its loader knows."""
    try:
        return evaluator.state.epoch_length or len(evaluator.state.dataloader)  # type: ignore[arg-type]
    except TypeError:
        return None
