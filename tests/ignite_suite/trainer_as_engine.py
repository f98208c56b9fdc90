"""A plugin of pytest for Ignite's own tests: `ignite.engine.Engine` is our trainer, around a process function.

It is loaded with `-p trainer_as_engine` by `run.py`, and changes nothing when it is imported. The adaptor does what
docs/differences-from-ignite.md tells a reader to do, so that the tests get past it: a group of one micro-batch is shown as the
batch that it is; a run that is finished starts from the state that the trainer was made with; the texts of errors are not
compared. Two private attributes that Ignite's tests look at are there. All else is `Trainer`'s.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ignite.engine
import ignite.handlers
import ignite.metrics
import pytest
from ignite.engine.utils import _check_signature

from ignite_train import Trainer
from ignite_train.data.grouping import MicroBatchGrouping
from ignite_train.data.run_data import RunData
from ignite_train.state import TrainState

OUTCOMES = "IGNITE_SUITE_OUTCOMES"  # the file that they are written to
STOCK = "IGNITE_SUITE_STOCK"  # set: Ignite's own Engine runs the tests
_SOMETHING = object()
_raises = pytest.raises


class Processing:
    """An update that does nothing but call a process function with the engine and a batch."""

    def __init__(self, process_function: Callable[[Any, Any], Any]) -> None:
        self.process_function = process_function

    def __call__(self, trainer: Trainer, micro_batches: list[Any]) -> Any:
        output = self.process_function(trainer, micro_batches[0])
        trainer.progress.settled = True
        trainer.state.num_steps += 1
        trainer.state.num_micro_batches += 1
        return output

    def choose(self, trainer: Trainer) -> None:
        """There is nothing to choose."""

    def named_gradients(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """There is nothing."""


class Ungrouped(RunData):
    """The data of runs whose `state.batch` is the one micro-batch of a group."""

    def __next__(self) -> Any:
        return super().__next__()[0]

    def batch(self, given: Any) -> list[Any]:
        return [given]


class TrainerAsEngine(Trainer):
    """A `Trainer` that is made as Ignite's `Engine` is, with one micro-batch to an update.

    Args:
        process_function: called with the engine and a batch.
    """

    def __init__(self, process_function: Callable[[Any, Any], Any]) -> None:
        settings = {"accumulation_steps": 1, "precision": "fp32"}
        super().__init__(Processing(process_function), MicroBatchGrouping(1), {}, settings, TrainState(), None)
        if process_function is None:
            raise ValueError("Engine must be given a processing function in order to run.")
        _check_signature(process_function, "process_function", self, None)
        self.data.__class__ = Ungrouped
        self._as_made = self.state_dict()

    def run(  # type: ignore[override]
        self,
        data: Iterable[Any] | None = None,
        max_epochs: int | None = None,
        max_iters: int | None = None,
        epoch_length: int | None = None,
    ) -> TrainState:
        """As the trainer's, and again where a run is finished."""
        if self._starts_again(max_epochs, max_iters):
            self.load_state_dict(self._as_made | {key: getattr(self.state, key) for key in self.state_dict_user_keys})
        return super().run(data, max_epochs, max_iters, epoch_length)

    def _starts_again(self, max_epochs: int | None, max_iters: int | None) -> bool:
        """Whether Ignite would: the limit is reached and not raised, or was set to None by hand."""
        state = self.state
        if state.max_epochs is None and state.max_iters is None:
            return bool(state.epoch)
        if max_epochs is None and max_iters is None:
            return self.progress.ended and self._limit_is_reached()
        return (
            self.progress.ended and not self.progress.epoch_open and (max_epochs == state.epoch or max_iters == state.iteration)
        )

    def fire_event(self, event_name: Any, **event_kwargs: Any) -> None:
        """By way of `_fire_event`, which Ignite's tests override to write down what fires."""
        self._assert_allowed_event(event_name)
        self._fire_event(event_name, **event_kwargs)

    def _fire_event(self, event_name: Any, *_: Any, **event_kwargs: Any) -> None:
        super().fire_event(event_name, **event_kwargs)

    @property
    def _internal_run_generator(self) -> Any:  # type: ignore[override]
        """Something while a run is interrupted, and None otherwise. Ignite's tests look at it."""
        return _SOMETHING if self.progress.interrupted else None

    @_internal_run_generator.setter
    def _internal_run_generator(self, value: Any) -> None:
        """Ignite sets it when an engine is made."""

    _dataloader_iter = _internal_run_generator  # type: ignore[assignment]


def pytest_configure(config: pytest.Config) -> None:
    """Puts the trainer in the place of the engine: for the tests, and for Ignite's functions that make engines."""
    for package in (ignite.handlers, ignite.metrics):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)  # they know engines by Ignite's class, from which ours derives
    if STOCK not in os.environ:
        pytest.raises = _raises_without_match  # type: ignore[assignment]  # messages are our own
        ignite.engine.Engine = TrainerAsEngine  # type: ignore[misc]
        ignite.engine.engine.Engine = TrainerAsEngine  # type: ignore[misc]


def _raises_without_match(*args: Any, match: Any = None, **kwargs: Any) -> Any:
    return _raises(*args, **kwargs)


class Recorder:
    """Writes down what became of each test: `passed`, `failed` or `skipped`, and the last line of an error."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def note(self, name: str, report: Any) -> None:
        if report.failed or (report.skipped and name not in self.outcomes) or (report.passed and report.when == "call"):
            text = str(report.longrepr).strip().rpartition("\n")[2] if report.longrepr else ""
            crash = getattr(report.longrepr, "reprcrash", None)
            self.outcomes[name] = report.outcome, crash.message.split("\n")[0] if crash else text


_recorder = Recorder()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called for each phase of each test."""
    _recorder.note(report.nodeid, report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Called for each file: one that cannot be imported is a failure of that file."""
    if report.failed:
        _recorder.outcomes[report.nodeid] = "failed", str(report.longrepr).strip().rpartition("\n")[2]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands the outcomes to `run.py`; with several workers, the main process has them all."""
    if OUTCOMES in os.environ and not hasattr(session.config, "workerinput"):
        Path(os.environ[OUTCOMES]).write_text(json.dumps(_recorder.outcomes), encoding="utf-8")
