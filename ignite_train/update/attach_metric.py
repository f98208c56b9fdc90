"""Metrics of Ignite over the predictions of training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ignite.engine import Engine, Events
from ignite.metrics import Metric

from ignite_train.arguments import MAPPING, SEQUENCE, check_fields, describe
from ignite_train.engine.attachable import owner_of
from ignite_train.engine.dispatch import attached, stateful_handlers
from ignite_train.evaluation.load_metric import load_metric
from ignite_train.evaluation.uneven_metrics import MetricHolder, metrics_without_state, uneven_metrics, waiting_metrics_at
from ignite_train.events import TrainEvents
from ignite_train.metrics import is_taken
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer
from ignite_train.update.kept_outputs import KeptOutputs, keep_outputs

__all__ = ["attach_metric"]

_SEEN = "num_seen"


def attach_metric(trainer: Trainer, metric: Metric, name: str) -> None:
    """Publishes a metric of Ignite over the predictions of each epoch of training, as `trainer.state.metrics[name]`.

    The metric sees the `outputs` of each micro-batch that had its effect: a micro-batch that ran out of memory and was dropped
    or halved, an update that was skipped, and an update that broke off and is repeated leave no trace. It is reset when an
    epoch begins, computed when it ends, and in every checkpoint; a run that resumes on another number of ranks starts it from
    the beginning, and logs a warning. A metric whose class names no attributes to save, as `CohenKappa` and many of a script's
    own, counts only what follows where a run resumes within an epoch, and the log names it. After an epoch whose updates were
    all skipped it is left out, and a warning says so. Collective at the end of an epoch: attach it on all ranks. The
    predictions are those before the step, in training mode. They are kept without their graphs until the end of the update,
    which costs their memory. With `reduction="local"` the predictions of a rank that skipped the update are counted too where
    another rank stepped.

    A metric that is part of others, as `matrix` is of `mIoU(matrix)`, may be attached too, and counts once. Give an evaluator,
    and each `RunningAverage`, a metric of its own: each evaluation resets it, and so does a running average after each update.

    Args:
        trainer: whose `forward` returns `ForwardOutput(..., outputs=...)`.
        metric: its `output_transform` is given `outputs`; by default they are `(y_pred, y)`.
        name: of the metric, and of no log of `forward`: `TrainingMetrics` publishes logs under their names.

    Raises:
        TypeError: `trainer` is not a trainer, or `metric` is not a metric of Ignite.
        ValueError: `name` is the name of a metric of a handler; or replicas come and go.

    Example:
        >>> import torch
        >>> from ignite.metrics import Accuracy
        >>> from ignite_train import ForwardOutput, attach_metric, create_trainer
        >>> def forward(model, micro_batch):
        ...     x, y = micro_batch
        ...     logits = model(x)
        ...     loss = torch.nn.functional.cross_entropy(logits, y, reduction="sum")
        ...     return ForwardOutput(loss, sample_size=len(y), outputs=(logits, y))
        >>> model = torch.nn.Linear(2, 3)
        >>> trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
        >>> attach_metric(trainer, Accuracy(), "accuracy")
        >>> state = trainer.run([(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))], max_epochs=1)
        >>> 0.0 <= state.metrics["accuracy"] <= 1.0
        True
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"trainer must be a Trainer, got {describe(trainer)}; on an evaluator call metric.attach(evaluator, name)"
        )
    if trainer.replicas.are_elastic:
        raise ValueError(
            f"attach_metric(..., {name!r}) must be left out with reduction='elastic': it would count the predictions of one "
            "replica; return sums in ForwardOutput(logs=...), which cross the replicas"
        )
    if not isinstance(metric, Metric):
        raise TypeError(f"metric must be a metric of Ignite, got {describe(metric)}")
    if not isinstance(name, str) or is_taken(name):
        raise ValueError(f"name must be a string that handlers do not publish a metric under, got {name!r}; choose another")
    held = _MetricOfTraining(metric, name)
    feed = _feed_of(trainer, name)
    metric.attach(feed.engine, name)
    feed.metrics.append(held)
    trainer.prepend_event_handler(Events.EPOCH_COMPLETED, held.completed)


def _feed_of(trainer: Trainer, name: str) -> _Feed:
    """The object that shows updates to the metrics of `trainer`; `name`, of the first metric, is in errors of forward."""
    for _, handler, _ in attached(trainer):
        if isinstance(owner := owner_of(handler), _Feed):
            return owner
    feed = _Feed(keep_outputs(trainer, asked_by=f"attach_metric(..., {name!r})"))
    trainer.prepend_event_handler(Events.EPOCH_STARTED, feed.begin_epoch)
    trainer.prepend_event_handler(TrainEvents.STEP_COMPLETED, feed.count)
    return feed


class _Feed:
    """Shows updates to metrics, by one engine of Ignite's own, so that a metric that is part of others too counts once.

    Attributes:
        engine: to which each metric is attached in its own way.
        metrics: each has an engine of its own too, which saves it.
    """

    def __init__(self, outputs: KeptOutputs) -> None:
        self.engine = Engine(lambda _engine, batch: batch)
        self.metrics: list[_MetricOfTraining] = []
        self._outputs = outputs

    def begin_epoch(self) -> None:
        """Resets the metrics."""
        for metric in self.metrics:
            metric.num_seen = 0
        self.engine.fire_event(Events.EPOCH_STARTED)

    def count(self, trainer: Trainer) -> None:
        """Shows the metrics what the update has held; it made a step."""
        held = self._outputs()
        self._outputs.clear()
        self._refuse_uneven_reductions(len(held))
        for metric in self.metrics:
            metric.num_seen += len(held)
        for outputs in held:
            self.engine.state.output = outputs
            self.engine.fire_event(Events.ITERATION_COMPLETED)
        self.engine.state.output = None
        trainer.state.metrics.update(self.engine.state.metrics)  # of those that publish a running value

    def _refuse_uneven_reductions(self, micro_batches: int) -> None:
        """Says on all ranks that they cannot reduce a metric after each micro-batch, where they have different numbers of them.

        Raises:
            ValueError: a metric is one that is, and they have.
        """
        if collectives.world_size() == 1 or not (waiting := waiting_metrics_at(self.engine, Events.ITERATION_COMPLETED)):
            return
        numbers = [int(number) for number in collectives.everyones(micro_batches)]
        if len(set(numbers)) > 1:
            raise ValueError(
                f"metric {next(iter(waiting))!r} is reduced over ranks after each micro-batch and would hang where they have "
                f"different numbers, got {numbers} in this update; attach one that is reduced once an epoch, or give all ranks "
                "as many"
            )


class _MetricOfTraining(MetricHolder):
    """Publishes a metric and saves it: its engine has the metric and its parts alone, and computes when an epoch ends.

    Attributes:
        num_seen: the micro-batches of this epoch that this rank has shown it.
    """

    def __init__(self, metric: Metric, name: str) -> None:
        super().__init__(name, metric)
        self._engine = Engine(lambda _engine, batch: batch)
        metric.attach(self._engine, name)
        self.num_seen = 0
        self._has_warned = False

    def completed(self, trainer: Trainer) -> None:
        """Publishes the metric, or takes that of the epoch before away where no update had an effect."""
        with uneven_metrics(self._engine, has_data=self.num_seen > 0) as is_computable:
            if is_computable:
                self._engine.fire_event(Events.EPOCH_COMPLETED)
                trainer.state.metrics.update(self._engine.state.metrics)
                return
        for name in self._engine.state.metrics:
            trainer.state.metrics.pop(name, None)
        warned = f"nothing seen by {self.name}"
        if collectives.is_main_rank() and warned not in trainer.progress.warned:
            trainer.progress.warned.add(warned)
            trainer.logger.warning(
                f"metric {self.name!r} is left out of state.metrics after epoch {trainer.state.epoch}, as after each in which "
                "every update was skipped: it has seen no micro-batch"
            )

    def state_dict(self) -> dict[str, Any]:
        """The states of the metric and of its parts, and the micro-batches that each rank has shown it. Collective.

        Raises:
            TypeError: Ignite cannot save it.
        """
        try:
            parts = {key: dict(entry.state_dict()) for key, entry in stateful_handlers(self._engine).items()}
        except TypeError as error:
            raise TypeError(f"metric {self.name!r} cannot be saved by Ignite: {error}") from error
        return parts | {_SEEN: collectives.everyones(self.num_seen)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes it over, if as many ranks have counted it."""
        parts = stateful_handlers(self._engine)
        check_fields(f"attach_metric(..., {self.name!r})", state_dict, {**dict.fromkeys(parts, MAPPING), _SEEN: SEQUENCE})
        seen = state_dict[_SEEN]
        is_of_these_ranks = len(seen) == collectives.world_size()
        has_seen = is_of_these_ranks and not metrics_without_state(self._engine)
        self.num_seen = round(seen[collectives.rank()]) if has_seen else 0
        if not is_of_these_ranks:
            self._warn_of_other_ranks(len(seen))
        for key, entry in parts.items():
            if not isinstance(entry, Metric):
                entry.load_state_dict(state_dict[key])
                continue
            entry.reset()  # lists that have grown are empty again, so that those of the checkpoint may have other lengths
            if is_of_these_ranks:
                load_metric(entry, state_dict[key])

    def _warn_of_other_ranks(self, number: int) -> None:
        """Says that another number of ranks cannot divide what the ranks of the checkpoint have counted."""
        if not self._has_warned:  # a checkpoint may be put back a second time
            self._has_warned = True
            logging.getLogger("ignite_train").warning(
                f"metric {self.name!r} starts from the beginning, because the checkpoint has what {number} ranks have "
                f"counted, and there are {collectives.world_size()}"
            )
