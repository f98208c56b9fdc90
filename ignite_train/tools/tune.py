"""tune: finding the fastest settings for a user's own model and data."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ignite_train.arguments import describe, did_you_mean, positive_int, real_number
from ignite_train.internals.of_torch import BatchNorm, Dropout
from ignite_train.model.random_state import kept_random_state, restore_random_state
from ignite_train.model.reshard import is_sharded
from ignite_train.ranks import collectives
from ignite_train.tools.search import Dimension, Search
from ignite_train.tools.trial import Trial, TrialError, TrialSamples, set_threads
from ignite_train.tools.tuned import Settings, Tuned, changed_settings, label
from ignite_train.trainer import Trainer

__all__ = ["tune"]

_WINDOW = 1 / 100  # of the time in all: at most 5 rounds of two windows for each candidate, and 9 at the end
_LONGEST_WINDOW = 1.0  # seconds
_FIRST_UPDATES, _MOST_UPDATES = 3, 1000
_PATIENCE = 3.0  # windows of the present settings, after which one of another candidate ends
_SEARCH = 0.8  # of the time is for the search, the rest for the last race
_STEP = 1.5  # one size of micro-batches is at least this many times the one before
_ACCUMULATION = ("accumulation_steps", "gradient_accumulation_steps")
_FLAGS = ("fused", "channels_last", "compile")
_TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}


def tune(
    make_trainer: Callable[..., Trainer],
    loader: Iterable[Any],
    *,
    seconds: float = 60.0,
    values: Mapping[str, Iterable[Any]] | None = None,
) -> Tuned:
    """Measures which settings compute the updates of a training fastest, and says what to write to have them.

    `make_trainer` is a function of yours that makes model, optimizer and trainer. Its parameters are the settings that can
    be varied, and their defaults are the present ones. These have usual values: `accumulation_steps` (or
    `gradient_accumulation_steps`), `fused`, `channels_last` and `compile`; any other needs `values`. Beside them the threads of
    torch and, in copies of the loader, the size of micro-batches and the worker processes are varied. The samples of an update
    stay the same: it is divided into larger or smaller micro-batches, and accumulated over fewer or more of them.

    One setting is varied after another. Each candidate is measured in turn with the fastest settings so far, on the same
    samples and from the same random numbers, and is faster if it is so by more than 2 % in three quarters of the rounds. The
    winner is measured once more beside the present settings, and that is the gain that is reported. A candidate that raises,
    because there is too little memory for example, is a row of the table.

    Afterwards random numbers, torch's threads and the loader's generators are what they were, also after an exception or
    Ctrl-C. What the function shares with the program, such as a teacher with buffers, is not restored. The handlers that it
    attaches run in the measurement: leave out those that write or evaluate, and schedules of a fixed length such as
    `OneCycleLR`, of which the measurement has more updates. A `Checkpoint`, and a handler that ends an epoch or the run, as
    `EarlyStopping` does, are refused. At most two of its trainers are in memory at a time.

    On several ranks each measures for itself, as if it were the only process, and the slowest counts. All ranks must call it.

    Args:
        make_trainer: returns a new trainer, by `create_trainer` or `create_supervised_trainer`.
        loader: of the training. Micro-batches and workers can be varied if it is a DataLoader over a map-style dataset; a
            `batch_sampler` of your own fixes the micro-batches.
        seconds: how long to search, roughly: the first window of a candidate, with what it compiles, is not interrupted.
        values: what to try in place of the usual values, by name, such as `{"threads": [1, 2], "width": [64, 128]}`; an empty
            list leaves a setting alone. Names are parameters of `make_trainer`, threads, micro_batch and workers. A size of
            micro-batches must divide the samples of an update.

    Returns:
        What was measured; `print` shows a table.

    Raises:
        TypeError: an argument is of the wrong type, a parameter of `make_trainer` has no default, the loader is an iterator, or
            `accumulation_steps` is not one number.
        ValueError: a value is out of range, or the loader is empty, or the ranks have different settings.
        RuntimeError: the present settings cannot be measured, as where `make_trainer` takes a model that was there before or
            attaches a `Checkpoint` or a handler that ends an epoch, or forward or the model have collectives of their own; or
            the fastest settings so far fail in the search.

    Example:
        >>> import torch
        >>> from ignite_train import create_trainer, tune
        >>> def make_trainer(accumulation_steps=4, fused=None):
        ...     model = torch.nn.Linear(64, 1)
        ...     optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        ...     forward = lambda model, x: model(x).square().mean()
        ...     return create_trainer(model, optimizer, forward, accumulation_steps=accumulation_steps)
        >>> loader = torch.utils.data.DataLoader(torch.randn(512, 64), batch_size=8, shuffle=True)
        >>> found = tune(make_trainer, loader, seconds=0.5, values={"workers": [], "threads": []})
        >>> found.present["micro_batch"], found.fastest["micro_batch"] * found.fastest["accumulation_steps"]
        (8, 32)
    """
    arguments, started = _defaults(make_trainer), perf_counter()
    seconds = real_number("seconds", seconds, above=0)
    with ExitStack() as at_end:
        at_end.callback(set_threads, torch.get_num_threads())
        random_state = at_end.enter_context(kept_random_state(loader))
        trials = _Trials(make_trainer, arguments, loader, random_state)
        chosen, left_alone = trials.dimensions({} if values is None else values)
        search = Search(trials, trials.present, lambda: collectives.largest(perf_counter() - started)[0] > _SEARCH * seconds)
        try:
            trials.fill_windows(min(_LONGEST_WINDOW, _WINDOW * seconds))
            search(chosen)
        except TrialError as error:
            changes = changed_settings(search.fastest, trials.present)
            which = f"settings {label(changes)}" if changes else "present settings"
            raise RuntimeError(f"the {which} cannot be measured: {error}") from error
    found = search.last_race
    return Tuned(
        present=trials.present,
        fastest=search.fastest,
        gain=1.0 if found is None else median(found.ratios),
        gain_quartiles=(1.0, 1.0) if found is None else found.quartiles,
        line=_line(changed_settings(search.fastest, trials.present), type(loader).__name__),
        rows=tuple(search.rows),
        warnings=tuple(trials.warnings),
        left_alone=left_alone,
        num_unmeasured=search.num_unmeasured,
    )


class _Trials:
    """Makes trials on the same samples, from the same random numbers, and compares their first updates.

    Args:
        make_trainer: the user's function.
        arguments: its parameters, and their defaults.
        loader: the user's.
        random_state: with which each trial begins.

    Attributes:
        present: the settings of the program.
        warnings: what is not the same under other settings.
    """

    def __init__(
        self, make_trainer: Callable[..., Trainer], arguments: Mapping[str, Any], loader: Iterable[Any], random_state: Any
    ) -> None:
        self._make_trainer, self._arguments, self._loader, self._random_state = make_trainer, arguments, loader, random_state
        self._steps_name = next((name for name in _ACCUMULATION if name in arguments), None)
        self._samples = TrialSamples(loader, _FIRST_UPDATES, self._steps_name, arguments)
        self.present: Settings = {
            "micro_batch": self._samples.micro_batch,
            **arguments,
            "threads": torch.get_num_threads(),
            "workers": self._samples.workers,
        }
        self.warnings: list[str] = []
        self._patience = math.inf
        self._first: Trial | None = None  # with the present settings
        self._draws = True
        self._precision = "fp32"

    def __call__(self, settings: Settings) -> Trial:
        """Makes a trial of these settings. Collective."""
        restore_random_state(self._random_state)
        trial = Trial(self._make_trainer, settings, self._arguments, self._samples, patience=self._patience)
        if self._first is None:
            self._first = trial
        elif not self._draws:
            self._compare(trial, self._first)
        return trial

    def dimensions(self, given: Any) -> tuple[list[Dimension], dict[str, str]]:
        """The settings to vary, in the order of the search, and why the others are left alone. Collective.

        Compiling is last, since it costs most. All ranks take the dimensions of rank 0, so that they measure the same.
        """
        if not isinstance(given, Mapping):
            raise TypeError(f'values must be a mapping such as {{"threads": [1, 2]}}, got {describe(given)}')
        usual: dict[str, tuple[Any, ...]] = {"threads": _powers(), "micro_batch": self._sizes(), "workers": (0, *_powers())}
        usual |= {name: (False, True) if name in _FLAGS else () for name in self._arguments}
        for name in given:
            if name not in usual:
                raise ValueError(f"values must have keys among {', '.join(usual)}, got {name!r}{did_you_mean(name, usual)}")
        found, left_alone = [], {}
        for name in sorted(usual, key=lambda name: name == "compile"):
            values = _listed(name, given.get(name, usual[name]))
            now = self.present[name]
            others = [value for value in values if value != now and not (now is None and value is False)]
            if name in self._samples.why_fixed:
                left_alone[name] = self._samples.why_fixed[name]
            elif not others:
                left_alone[name] = "left out by values" if name in given else "there is no other usual value"
            else:
                is_ordered = name in ("micro_batch", "threads", "workers")
                every = tuple(sorted([now, *others]) if is_ordered else [now, *others])
                found.append(Dimension(name, every, is_ordered, self._changed(name)))
        left_alone.pop(self._steps_name or "", None)  # it follows the size of micro-batches
        found = self._agreed(found)
        self._check_same_samples(found)
        return found, left_alone

    def fill_windows(self, seconds: float) -> None:
        """Takes as many samples as the present settings compute in a window of this length. Collective.

        Raises:
            TrialError: the present settings cannot be measured.
            RuntimeError: forward or the model have collectives of their own.
        """
        trial = self(self.present)
        try:
            taken, begun = trial.seconds(), collectives.any_rank(trial.num_collectives)
            self._look_at(trial)
        finally:
            trial.close()
        if begun:
            raise RuntimeError(
                "tune needs a model and a forward without collectives of their own, such as SyncBatchNorm's: a candidate that "
                "fails on one rank would leave the others waiting; tune in a single process"
            )
        self._first = None  # it was trained on other samples than the trials that follow
        self._patience = _PATIENCE * max(seconds, 2 * taken)
        updates = 1 + min(_MOST_UPDATES, max(2, round(seconds / max(taken, 1e-9))))
        updates = int(collectives.largest(updates)[0])
        self._samples = TrialSamples(self._loader, updates, self._steps_name, self._arguments)

    def _look_at(self, trial: Trial) -> None:
        """Notes what of the model depends on how an update is cut into micro-batches."""
        assert trial.trainer is not None  # noqa: S101  # it is not closed
        model = trial.trainer.model
        if isinstance(model, DistributedDataParallel) or is_sharded(model):
            raise RuntimeError(
                "make_trainer must leave the model without DistributedDataParallel and fully_shard, since tune measures each "
                "rank alone; use idist.auto_model, which does, or tune a smaller model of the same kind"
            )
        self._precision = str(trial.trainer.config["precision"])
        self._draws = any(isinstance(module, Dropout) and module.p > 0 for module in model.modules())
        norms = [name for name, module in model.named_modules() if isinstance(module, BatchNorm)]
        if norms and "micro_batch" not in self._samples.why_fixed:
            named = f"{norms[0]!r} and {len(norms) - 1} more" if len(norms) > 1 else repr(norms[0])
            self.warnings.append(
                f"{named}: BatchNorm takes mean and variance from a micro-batch, so that another size trains another model"
            )
        if self._draws:
            self.warnings.append("dropout draws other numbers for another cut; so first updates are not compared")

    def _compare(self, trial: Trial, first: Trial) -> None:
        """Warns of settings with which the first update of the same samples, from the same weights, came out otherwise."""
        for what, before in first.first_update.items():
            after = trial.first_update[what]
            if abs(after - before) > _TOLERANCES[self._precision] * max(abs(before), 1e-6):
                changes = label(changed_settings(trial.settings, first.settings))
                self.warnings.append(f"{changes}: the {what} of the same update is {after:.4g} in place of {before:.4g}")
                return

    def _changed(self, name: str) -> Callable[[Settings, Any], Settings]:
        def change(settings: Settings, value: Any) -> Settings:
            changed = {**settings, name: value}
            if name == "micro_batch" and self._steps_name is not None:
                changed[self._steps_name] = settings["micro_batch"] * settings[self._steps_name] // value
            return changed

        return change

    def _sizes(self) -> tuple[int, ...]:
        """Sizes of micro-batches that divide the samples of an update, above and below the present one."""
        now = self._samples.micro_batch
        if now is None or "micro_batch" in self._samples.why_fixed:
            return ()
        total, found = now * self._samples.accumulation_steps(self.present), {now}
        divisors = [size for size in range(1, total + 1) if total % size == 0]
        for side in (divisors, divisors[::-1]):
            nearest = now
            for size in side[side.index(now) + 1 :]:
                if max(size, nearest) >= min(size, nearest) * _STEP:
                    nearest = size
                    found.add(size)
        return tuple(sorted(found))

    def _check_same_samples(self, found: list[Dimension]) -> None:
        """Raises ValueError for values with which an update would be of more or fewer samples: it is measured as a whole."""
        total = (self._samples.micro_batch or 1) * self._samples.accumulation_steps(self.present)
        for name, values, *_ in found:
            if name == self._steps_name:
                raise ValueError(
                    f"values must leave {name!r} alone, since the samples of an update stay the same, got {list(values)}; give "
                    "'micro_batch', which it follows"
                )
            wrong = next((value for value in values if name == "micro_batch" and total % value), None)
            if wrong is not None:
                raise ValueError(
                    f"values['micro_batch'] must divide the {total} samples of an update, got {wrong}; give some of "
                    f"{', '.join(map(str, self._sizes()))}"
                )

    def _agreed(self, found: list[Dimension]) -> list[Dimension]:
        """The dimensions, if the settings of all ranks are the same; of each the values of rank 0."""
        mine = (label(self.present), [(dimension.name, dimension.values) for dimension in found])
        everyones = collectives.gather_objects(mine)
        for rank, (settings, _) in enumerate(everyones):
            if settings != everyones[0][0]:
                raise ValueError(
                    f"settings must be the same on all ranks, got {everyones[0][0]} on rank 0, {settings} on rank {rank}"
                )
        by_name = {dimension.name: dimension for dimension in found}
        return [by_name[name]._replace(values=values) for name, values in everyones[0][1]]


def _defaults(make_trainer: Any) -> dict[str, Any]:
    """The parameters of the user's function and their defaults."""
    if isinstance(make_trainer, Trainer):
        raise TypeError(
            "make_trainer must be a function that makes a new trainer, got a Trainer; write "
            "def make_trainer(accumulation_steps=1, fused=None): ... return create_trainer(...)"
        )
    if not callable(make_trainer):
        raise TypeError(f"make_trainer must be a function that makes a new trainer, got {describe(make_trainer)}")
    found = {}
    for name, parameter in inspect.signature(make_trainer).parameters.items():
        if parameter.default is parameter.empty:
            raise TypeError(f"make_trainer must have a default for each parameter, got {name!r} without one; write {name}=...")
        found[name] = parameter.default
    return found


def _listed(name: str, values: Any) -> list[Any]:
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise TypeError(f"values[{name!r}] must be a list of values, got {describe(values)}")
    listed = list(values)
    if name in ("micro_batch", "threads"):
        return [positive_int(f"values[{name!r}]", value) for value in listed]
    return listed


def _line(changes: Mapping[str, Any], loader: str) -> str:
    """The code that sets these settings: for torch, in the arguments of the function, and in the loader."""
    names = {"micro_batch": "batch_size", "workers": "num_workers"}
    of_loader = {names[key]: value for key, value in changes.items() if key in names}
    of_function = {key: value for key, value in changes.items() if key not in names and key != "threads"}
    parts = [f"torch.set_num_threads({changes['threads']})"] if "threads" in changes else []
    for call, arguments in (("make_trainer(", of_function), (f"{loader}(..., ", of_loader)):
        if arguments:
            parts.append(f"{call}{', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
    return "; ".join(parts)


def _powers() -> tuple[int, ...]:
    """Powers of 2 up to the processors that this process may use, and their number."""
    number = len(os.sched_getaffinity(0)) if "sched_getaffinity" in dir(os) else os.cpu_count() or 1
    return tuple(dict.fromkeys([*(1 << exponent for exponent in range(number.bit_length())), number]))
