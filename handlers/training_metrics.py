"""Numbers about the training, over the updates since they were last published."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ignite.engine import Events, RemovableEventHandle

from ignite_train.arguments import check_state_dict
from ignite_train.events import Event, TrainEvents
from ignite_train.handler import Handler
from ignite_train.trainer import Trainer

__all__ = ["TrainingMetrics"]


class TrainingMetrics(Handler):
    """Publishes means over the applied updates since the last time, and over all ranks, into `trainer.state.metrics`.

    - `"loss"`: Σloss / Σsample_size, and each log of `forward` by its name, likewise per sample;
    - `"grad_norm"`: mean norm before clipping; `"clipped"`: the fraction of updates that were clipped;
    - `"learning_rate"`: the one the latest update used (`"learning_rate/0"`, `"learning_rate/1"`, ... with several groups);
    - `"sample_size"`: mean per update; `"samples_per_second"`: the same (tokens, if those are what it counts) per second of
      fetching and training, without validation, checkpoints and other handlers;
    - `"data_wait"`: the fraction of that time in which this rank waited for its loader, skipped updates included; if it is not
      next to nothing, the loader needs more workers;
    - `"skipped"`: updates skipped since training began.

    All of it comes from the statistics that the update reduces anyway, and the two times from this rank's clock: no collective
    of its own.

    Example:
        >>> from ignite.engine import Events
        >>> from ignite_train.handlers import TrainingMetrics
        >>> trainer = getfixture("trainer")
        >>> handle = TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> sorted(trainer.run(getfixture("loader"), max_epochs=1).metrics)  # doctest: +NORMALIZE_WHITESPACE
        ['clipped', 'data_wait', 'grad_norm', 'learning_rate', 'loss', 'sample_size', 'samples_per_second', 'skipped']
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._logs: dict[str, float] = {}
        self._clear()

    def attach(self, trainer: Trainer, event: Event = Events.ITERATION_COMPLETED(every=50)) -> RemovableEventHandle:
        """Publishes at `event`, before whatever reads the metrics there.

        What is left at the end of the run is published before other handlers of COMPLETED.
        """
        trainer.prepend_event_handler(TrainEvents.STEP_COMPLETED | TrainEvents.STEP_SKIPPED, self._add)
        trainer.prepend_event_handler(Events.COMPLETED, self)
        return trainer.prepend_event_handler(event, self)

    def __call__(self, trainer: Trainer) -> None:
        """Publishes and begins anew."""
        metrics, output, steps = trainer.state.metrics, trainer.state.update_output, self._sums["steps"]
        if output is None or self._sums["updates"] == 0:
            return
        if steps:
            samples = self._sums["sample_size"]
            metrics["loss"] = self._sums["loss"] / samples
            metrics["grad_norm"] = self._sums["grad_norm"] / steps
            metrics["clipped"] = self._sums["clipped"] / steps
            metrics["sample_size"] = samples / steps
            metrics["samples_per_second"] = samples / self._sums["seconds"]
            metrics |= {name: value / samples for name, value in self._logs.items()}
        metrics["data_wait"] = self._sums["waited"] / self._sums["seconds"]
        if len(output.learning_rates) == 1:
            metrics["learning_rate"] = output.learning_rates[0]
        else:
            metrics |= {f"learning_rate/{group}": rate for group, rate in enumerate(output.learning_rates)}
        metrics["skipped"] = float(trainer.state.num_skipped)
        self._clear()

    def state_dict(self) -> dict[str, Any]:
        """What was added up since the metrics were last published."""
        return {"sums": dict(self._sums), "logs": dict(self._logs)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on adding to it."""
        check_state_dict("TrainingMetrics", state_dict, ("sums", "logs"), ())
        check_state_dict("TrainingMetrics", state_dict["sums"], self._sums, ())
        self._sums, self._logs = dict(state_dict["sums"]), dict(state_dict["logs"])

    def _clear(self) -> None:
        names = ("updates", "steps", "seconds", "waited", "loss", "sample_size", "grad_norm", "clipped")
        self._sums = dict.fromkeys(names, 0.0)
        self._logs = {}

    def _add(self, trainer: Trainer) -> None:
        output, sums = trainer.state.update_output, self._sums
        assert output is not None  # noqa: S101  # set before these events
        sums["updates"] += 1
        sums["seconds"] += time.perf_counter() - trainer.fetch_started
        sums["waited"] += trainer.fetch_ended - trainer.fetch_started
        if output.applied:
            sums["steps"] += 1
            sums["loss"] += output.loss * output.sample_size
            sums["sample_size"] += output.sample_size
            sums["grad_norm"] += output.grad_norm
            sums["clipped"] += output.clip_coefficient < 1.0
            for name, value in output.logs.items():
                self._logs[name] = self._logs.get(name, 0.0) + value
