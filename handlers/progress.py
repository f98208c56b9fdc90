"""A progress bar on a terminal, and short lines in a log file."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO, runtime_checkable

from ignite.engine import Engine, Events, RemovableEventHandle
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ignite_train.arguments import one_of
from ignite_train.engine.dispatch import stateful_handlers
from ignite_train.engine.loop import Loop
from ignite_train.events import Event, every
from ignite_train.kinds_of_handlers import Handler
from ignite_train.metrics import PUBLISHED_METRICS, grouped_metrics, is_published_metric, single_metrics
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["ProgressLog"]

_STYLES = ("auto", "bar", "simple", "json", "none")
_MAX_COLUMNS = 100
_REFRESH_SECONDS = 0.1
_NUMBER_COLUMNS = 7
_SMALLEST_SHARE = 0.005  # of the time, for a section to be in the table
_TABLE_COLUMNS = 68  # beside the names of the rows, on a terminal of 80
_TOO_MUCH = 1e24  # for the prefixes of SI
_LONG_WAIT = 0.1  # a fraction of the time in which the loader is waited for that a line mentions
_MUCH_SLOWER = 1.5  # times the time of the median rank, for a line to name the slowest
_BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
_BAR_WITHOUT_TOTAL = "{desc} {n_fmt} [{elapsed}{postfix}]"


@runtime_checkable
class _KnowsTheTime(Protocol):
    """What can say how the time was spent; `TrainingMetrics` does."""

    @property
    def seconds_by_section(self) -> dict[str, float]: ...


@runtime_checkable
class _KnowsTheBest(Protocol):
    """What can say where the best score is; `Validation` does."""

    score: str
    best: float | None
    best_update: int | None


@runtime_checkable
class _HasFiles(Protocol):
    """What can say which files it writes."""

    @property
    def files(self) -> list[Path]: ...


@runtime_checkable
class _HasCheckpoints(Protocol):
    """What can say where the checkpoints are; `Checkpoint` does."""

    directory: Path


class ProgressLog(Handler):
    """Progress bar on a terminal; otherwise one line per interval. On rank 0 only.

    Both show the loss, the learning rate, the speed and the time to go; with `TrainingMetrics`, attached before or after, the
    loss is the mean of the interval, and a line has the user's logs and the gradient norm too. Lines go to standard output and
    have at most 100 columns, or those of the terminal; their parts stand under one another. What is the same in each line is
    left out: a learning rate is shown once it has changed, skipped updates when there are new ones, the share of the time in
    which the loader is waited for from 10% on, and, with `StepTimer`, the slowest rank from 1.5 times the median on. A bar has
    the learning rate and the speed if there is room for them. An evaluation has a bar of its own, and a line with its metrics.
    A short table ends the run: time by section, best score, skipped updates, memory, files.

    Args:
        style: `"bar"`, or `"simple"` for lines, `"json"` for one JSON object a line with all metrics, `"none"` for nothing;
            `"auto"` is a bar on a terminal and in a notebook, and lines elsewhere.

    Raises:
        ValueError: `style` is not one of these.

    Example:
        >>> import torch
        >>> from ignite.engine import Events
        >>> from ignite_train import create_trainer
        >>> from ignite_train.handlers import ProgressLog
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
        >>> handle = ProgressLog().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> state = trainer.run([torch.ones(2, 3)] * 4, max_epochs=1)  # doctest: +ELLIPSIS
        epoch 1/1  update 2/4  loss ...
        epoch 1/1  update 4/4  loss ...
        finished after 4 updates (4 steps, 0 skipped) in 1 epoch, ... s
    """

    def __init__(self, style: Literal["auto", "bar", "simple", "json", "none"] = "auto") -> None:
        self.style = one_of("style", style, _STYLES)
        self._trainer: weakref.ref[Trainer] | None = None  # so that the trainer's memory is free once nothing else holds it
        self._shown = _Shown()
        self._bar: Any = None
        self._advances: RemovableEventHandle | None = None  # the handler that moves the bar, where there is one
        self._evaluation_bar: Any = None
        self._redirected = ExitStack()
        self._begin, self._has_ended = 0, False
        self._started = self._refreshed = 0.0
        self._left_out: set[str] = set()

    def attach(
        self,
        trainer: Trainer,
        event: Event = every(50, Events.ITERATION_COMPLETED),
        *,
        evaluator: Engine | None = None,
        tag: str = "validation",
    ) -> RemovableEventHandle | None:
        """Prints at `event`, and shows `evaluator` when it runs.

        Args:
            trainer: the trainer. A second call with the same trainer adds the evaluator only.
            event: when a line is printed; the bar moves by itself.
            evaluator: whose bar and metrics are shown.
            tag: its name.
        """
        if not collectives.is_main_rank() or self.style == "none":
            return None
        if evaluator is not None:
            evaluator.add_event_handler(Events.STARTED, self._open_evaluation, tag)
            evaluator.add_event_handler(Events.ITERATION_COMPLETED, self._advance_evaluation)
            evaluator.add_event_handler(Events.COMPLETED, self._print_evaluation, trainer, tag)
            if isinstance(evaluator, Loop):  # on a stock engine a handler of EXCEPTION_RAISED would suppress the exception
                evaluator.add_event_handler(Events.EXCEPTION_RAISED, self._close_at_exception)
                evaluator.on_exit.append(self._close_evaluation)  # also where COMPLETED is skipped, as in a rehearsal
        if self._trainer is not None and self._trainer() is trainer:
            return None
        self._trainer = weakref.ref(trainer)
        trainer.on_enter.append(self._open)
        trainer.add_event_handler(Events.COMPLETED, self._note_end)
        trainer.on_exit.append(self._conclude)
        trainer.add_event_handler(Events.TERMINATE | Events.INTERRUPT, self._close)
        trainer.add_event_handler(Events.EXCEPTION_RAISED, self._close_at_exception)
        return trainer.add_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Prints a line. On a terminal the bar shows it already."""
        state, total = trainer.state, _total(trainer)
        metrics = _with_loss(trainer, self._left_out)
        if self.style == "json":
            place = {"epoch": state.epoch, "update": state.iteration, "total": total}
            _print(_json(place | grouped_metrics(metrics, self._left_out)))
        elif self._bar is None:
            _print(_line(_head(trainer, total), self._shown.parts(metrics)))

    # --- bars -------------------------------------------------------------------------------------------------------------

    def _open(self, trainer: Trainer) -> None:
        state, self._started = trainer.state, time.perf_counter()
        self._begin = state.iteration
        self._shown.start(single_metrics(state.metrics, self._left_out))
        if state.iteration and self.style != "json":
            _print(f"resumed after update {state.iteration}")
        if self.style == "bar" or (self.style == "auto" and _has_bars()):
            self._redirected.enter_context(logging_redirect_tqdm())
            self._bar = _make_bar(initial=state.iteration, unit="update", delay=_REFRESH_SECONDS)
            # Behind what publishes metrics, and before handlers that may end the run.
            self._advances = trainer.add_evaluation_handler(Events.ITERATION_COMPLETED, self._advance)

    def _advance(self, trainer: Trainer) -> None:
        bar = self._bar
        if bar is None:  # a handler before this one has closed it
            return
        bar.n += 1
        now = time.perf_counter()
        if now - self._refreshed >= _REFRESH_SECONDS or bar.n - 1 == self._begin:
            self._refreshed = now
            bar.set_description_str(f"epoch {_of(trainer.state.epoch, trainer.state.max_epochs)}", refresh=False)
            _set_total(bar, _total(trainer))
            elapsed, done = tqdm.format_interval(now - self._started), _of(trainer.state.iteration, _total(trainer))
            room = _columns(sys.stderr, math.inf) - len(f"{bar.desc} 100%|#| {done} [{elapsed}]")
            bar.set_postfix_str(self._postfix(trainer, now, room), refresh=False)
            bar.refresh()

    def _postfix(self, trainer: Trainer, now: float, room: float) -> str:
        """What stands behind the bar, as far as there is room for it, in columns."""
        state, metrics = trainer.state, _with_loss(trainer, self._left_out)
        speed = metrics.get("updates_per_second", (state.iteration - self._begin) / max(now - self._started, 1e-9))
        to_go = metrics.get("time_to_go", ((_total(trainer) or 0) - state.iteration) / max(speed, 1e-9))
        parts = {"loss": (0, f"loss {metrics['loss']:.4g}")} if "loss" in metrics else {}
        if state.update_output is not None and state.update_output.learning_rates:
            parts["learning_rate"] = (3, f"lr {state.update_output.learning_rates[0]:.3g}")
        parts["speed"] = (2, f"{speed:.3g}/s")
        if _total(trainer):
            parts["time_to_go"] = (1, f"{_clock(to_go)} left")
        return ", ".join(_fitting(parts, room))

    def _open_evaluation(self, evaluator: Engine, tag: str) -> None:
        if self._bar is not None:
            self._evaluation_bar = _make_bar(desc=tag, total=_length(evaluator), unit="batch", position=1)

    def _advance_evaluation(self) -> None:
        if self._evaluation_bar is not None:
            self._evaluation_bar.update(1)

    def _close(self) -> None:
        self._close_evaluation()
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._advances is not None:
            self._advances.remove()
            self._advances = None
        self._redirected.close()

    def _close_evaluation(self) -> None:
        if self._evaluation_bar is not None:
            self._evaluation_bar.close()
            self._evaluation_bar = None

    def _close_at_exception(self, _error: BaseException) -> None:
        self._close()

    # --- lines ------------------------------------------------------------------------------------------------------------

    def _print_evaluation(self, evaluator: Engine, trainer: Trainer, tag: str) -> None:
        self._close_evaluation()
        state, metrics = trainer.state, evaluator.state.metrics
        if self.style == "json":
            place = {"epoch": state.epoch, "update": state.iteration}
            _print(_json(place | grouped_metrics(metrics, self._left_out, tag)))
            return
        head = f"{tag} after update {state.iteration}:"
        texts = [f"{name} {_short(value)}" for name, value in single_metrics(metrics, self._left_out).items()]
        if len("  ".join([head, *texts])) > _columns(sys.stdout, _MAX_COLUMNS):
            texts = [text.rstrip() for text in texts]
        _print(_line(head, {text: (index, text) for index, text in enumerate(texts)}))

    def _note_end(self) -> None:
        self._close()
        self._has_ended = True

    def _conclude(self) -> None:
        """Shows the end of a run once all of it is over: no fault of a table comes before the last checkpoint."""
        trainer = None if self._trainer is None else self._trainer()
        has_ended, self._has_ended = self._has_ended, False
        if trainer is not None and has_ended:
            self._show_end(trainer)

    def _show_end(self, trainer: Trainer) -> None:
        state, seconds = trainer.state, time.perf_counter() - self._started
        if self.style == "json":
            counts = {"finished": state.iteration, "steps": state.num_steps, "skipped": state.num_skipped}
            _print(_json({"epoch": state.epoch, **counts, "seconds": seconds}))
            return
        epochs = f"{state.epoch} epoch" + "s" * (state.epoch != 1)
        total, ending, number = _total(trainer), "finished", str(state.iteration)
        if trainer.should_terminate and state.iteration != total:
            ending, number = "stopped", number if total is None else f"{number} of {total}"
        updates = f"{number} updates ({state.num_steps} steps, {state.num_skipped} skipped)"
        _print(f"{ending} after {updates} in {epochs}, {seconds:.1f} s")
        for name, text in _table(trainer):
            _print(f"  {name:<8}{text}")


class _Shown:
    """Which metrics a line shows: those that change."""

    def __init__(self) -> None:
        self._constants: dict[str, float] = {}  # of the user, there since the start, and not changed so far
        self._first_rate: float | None = None
        self._skipped = 0.0

    def start(self, metrics: Mapping[str, float]) -> None:
        self._constants = {name: value for name, value in metrics.items() if not is_published_metric(name)}
        self._skipped = metrics.get("skipped", 0.0)

    def parts(self, metrics: Mapping[str, float]) -> dict[str, tuple[int, str]]:
        """By name, in the order in which they are shown: how soon each is left out if there is no room, and its text."""
        own = {name: value for name, value in metrics.items() if not is_published_metric(name) and self._changes(name, value)}
        parts = {name: (1, f"{name} {_short(metrics[name])}") for name in ("loss",) if name in metrics}
        for name in ("loss_base2", "perplexity", *own):
            if name in metrics:
                parts[name] = (4 + (name != next(iter(own), None)), f"{name} {_short(metrics[name])}")
        if "grad_norm" in metrics:
            parts["grad_norm"] = (5, f"norm {_short(metrics['grad_norm'])}")
        if "samples_per_second" in metrics:
            parts["speed"] = (3, f"{_thousands(metrics['samples_per_second']):>5} samples/s")
        if "time_to_go" in metrics:
            parts["time_to_go"] = (2, f"{_clock(metrics['time_to_go'])} left")
        rate = metrics.get("learning_rate", metrics.get("learning_rate/0"))
        if rate is not None:  # as blanks too, so that nothing else is left out once it is shown
            text = f"lr {_short(rate)}"
            parts["learning_rate"] = (2, text if rate != self._set_first_rate(rate) else " " * len(text))
        alarms = self._alarms(metrics)
        if alarms and parts.get("learning_rate", (2, "lr"))[1].isspace():
            del parts["learning_rate"]
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

    def _set_first_rate(self, rate: float) -> float | None:
        if self._first_rate is None:
            self._first_rate = rate
        elif rate != self._first_rate:
            self._first_rate = float("nan")  # it is shown from now on
        return self._first_rate

    def _changes(self, name: str, value: float) -> bool:
        if self._constants.get(name) == value:
            return False
        self._constants.pop(name, None)
        return True


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
    return str(tqdm.format_sizeof(number)) if number < _TOO_MUCH else f"{number:.2g}"


def _clock(seconds: float) -> str:
    """`"0:12:34"`."""
    return str(timedelta(seconds=round(min(max(seconds, 0.0), 1e9))))


def _json(entries: Mapping[str, Any]) -> str:
    """One line of JSON, which knows no NaN: what is not finite is written as a string."""
    return json.dumps({k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in entries.items()})


def _print(line: str) -> None:
    tqdm.write(line)
    sys.stdout.flush()  # a log file, too, is read while the run continues


def _table(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """What the handlers of the run know at its end."""
    handlers, saver = [*stateful_handlers(trainer).values()], trainer.checkpoint
    for timer in (handler for handler in handlers if isinstance(handler, _KnowsTheTime)):
        seconds = timer.seconds_by_section
        shares = {name: value / (sum(seconds.values()) or 1.0) for name, value in seconds.items()}
        parts = [f"{name} {seconds[name]:.1f} s ({share:.0%})" for name, share in shares.items() if share >= _SMALLEST_SHARE]
        for index, text in enumerate(_wrapped(parts)):
            yield "time" if index == 0 else "", text
    for validation in (handler for handler in handlers if isinstance(handler, _KnowsTheBest)):
        if validation.best is not None:
            yield "best", f"{validation.score} {validation.best:.6g} at update {validation.best_update}"
    metrics = trainer.state.metrics
    memory = {name: metrics[name] for name in PUBLISHED_METRICS if "memory" in name and name in metrics}
    if memory:
        kinds = {name.replace("memory", "").strip("_"): value for name, value in memory.items()}
        yield "memory", ", ".join(f"{kind} {value:.2f} GiB" for kind, value in kinds.items())
    files: list[tuple[Path, object]] = [(saver.directory, saver)] if isinstance(saver, _HasCheckpoints) else []
    files += [(path, handler) for handler in handlers if isinstance(handler, _HasFiles) for path in handler.files]
    for index, (path, writer) in enumerate(files):
        yield "files" if index == 0 else "", f"{path} ({type(writer).__name__})"


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
    return sys.stderr.isatty() or any(kind.__module__ == "tqdm.notebook" for kind in tqdm.__mro__)


def _length(evaluator: Engine) -> int | None:
    """Micro-batches of an evaluation, if its loader knows."""
    try:
        return evaluator.state.epoch_length or len(evaluator.state.dataloader)  # type: ignore[arg-type]
    except TypeError:
        return None


def _total(trainer: Trainer) -> int | None:
    """Updates that the whole run will have, as far as can be told."""
    state = trainer.state
    if state.max_iters is not None or state.max_epochs is None or state.epoch_length is None:
        return state.max_iters
    return state.epoch_length * state.max_epochs
