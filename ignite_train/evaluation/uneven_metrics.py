"""Metrics of Ignite over ranks that have seen different numbers of samples, or none."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from ignite.engine import Engine, Events
from ignite.metrics import GpuInfo, Metric, MetricGroup, MetricsLambda, RunningAverage

from ignite_train.engine.attachable import lacks_state
from ignite_train.engine.dispatch import attached
from ignite_train.model.in_full import in_full
from ignite_train.ranks import collectives
from ignite_train.ranks.compute_on import compute_on, is_computing

__all__ = [
    "MetricHolder",
    "metrics_published_at",
    "metrics_without_state",
    "published_metric",
    "uneven_metrics",
    "waiting_metrics_at",
    "waits_for_ranks",
]


class MetricHolder:
    """Shows a metric something else than the output of the engine to which it is attached; its `completed` publishes it.

    Args:
        name: under which.
        metric: the metric.
    """

    def __init__(self, name: str, metric: Metric) -> None:
        self.name, self.metric = name, metric


def published_metric(handler: Any, args: tuple[Any, ...]) -> tuple[str, Metric] | None:
    """The metric that a handler publishes, under the name that it was attached under; None for other handlers.

    Args:
        handler: without a filter.
        args: its own, apart from the engine.
    """
    owner = handler.__self__ if isinstance(handler, MethodType) and handler.__name__ == "completed" else None
    if isinstance(owner, MetricHolder):
        return owner.name, owner.metric
    return (str(args[0]), owner) if isinstance(owner, Metric) and args else None


def waits_for_ranks(metric: Metric) -> bool:
    """Whether a metric is reduced over the ranks when it computes, as Ignite's are; one of a script's own need not be.

    A function of other metrics is, if any of these is. A class of a script's own is, if its `compute`, or the `compute` of a
    class from which it derives, is decorated by Ignite's `sync_all_reduce`, or is Ignite's.
    """
    if isinstance(metric, MetricsLambda):
        return any(waits_for_ranks(one) for one in (*metric.args, *metric.kwargs.values()) if isinstance(one, Metric))
    if isinstance(metric, RunningAverage) and isinstance(metric.src, Metric):
        return waits_for_ranks(metric.src)
    kinds = type(metric).__mro__[: type(metric).__mro__.index(Metric)]
    return any(_waits(vars(kind)["compute"]) for kind in kinds if "compute" in vars(kind) and kind is not GpuInfo)


def _waits(compute: Any) -> bool:
    return inspect.unwrap(compute) is not compute or compute.__module__.startswith("ignite.")


def metrics_published_at(engine: Engine, event: Any) -> dict[str, Metric]:
    """The metrics that `engine` publishes at `event`, by the name that each was attached under."""
    published = (published_metric(handler, args) for attached_to, handler, args in attached(engine) if attached_to == event)
    return dict(one for one in published if one is not None)


def metrics_without_state(engine: Engine) -> list[str]:
    """The names of the metrics of an epoch of `engine` that a checkpoint does not hold, or not with all of their parts."""
    return [name for name, metric in metrics_published_at(engine, Events.EPOCH_COMPLETED).items() if _lacks_state(metric)]


def _lacks_state(metric: Any) -> bool:
    if isinstance(metric, MetricsLambda):
        return any(map(_lacks_state, (*metric.args, *metric.kwargs.values())))
    if isinstance(metric, MetricGroup):
        return any(map(_lacks_state, metric.metrics.values()))
    return lacks_state(metric)


def waiting_metrics_at(engine: Engine, event: Any) -> dict[str, Metric]:
    """The metrics published at `event` that wait for other ranks. Another metric may be attached on one rank alone."""
    return {name: metric for name, metric in metrics_published_at(engine, event).items() if waits_for_ranks(metric)}


@contextmanager
def uneven_metrics(engine: Engine, *, has_data: bool) -> Iterator[bool]:
    """Within it, the metrics that `engine` publishes at EPOCH_COMPLETED are those of the samples of all ranks. Collective.

    Ignite's metrics reduce themselves when they compute, by collectives that need the same shape on each rank; a rank without
    data has no shape, or raises an error while the others wait. Here the ranks with data compute among themselves,
    tensors that they gather may differ in length, and a rank without data takes over what they have found. An error on one rank
    is raised on all. It costs one gathering of small objects for all metrics together, one for each, and one for each
    collective of a metric; nothing in a single process. A metric that does not wait for other ranks, such as `GpuInfo`, may be
    attached on some of them only, and is computed there.

    Args:
        engine: whose metrics they are.
        has_data: whether the metrics have seen a micro-batch on this rank.

    Yields:
        Whether metrics can be computed: some rank has shown them a micro-batch, or `engine` publishes no metric.

    Raises:
        ValueError: the ranks attached different metrics, or a metric could not be computed on one; the same on all ranks.
    """
    metrics = metrics_published_at(engine, Events.EPOCH_COMPLETED)
    if collectives.world_size() == 1:
        yield has_data or not metrics
        return
    mine = [(name, type(metric).__name__, waits_for_ranks(metric)) for name, metric in metrics.items()]
    everyones = collectives.gather_objects((has_data, mine))
    waiting = [[one for one in theirs if one[-1]] for _, theirs in everyones]
    if any(theirs != waiting[0] for theirs in waiting):
        table = ", ".join(f"rank {rank}: {[name for name, *_ in theirs]}" for rank, theirs in enumerate(waiting))
        raise ValueError(f"metrics must be attached alike on all ranks, since they reduce together, got {table}")
    of_all = [name for name, *rest in mine if all((name, *rest) in theirs for _, theirs in everyones)]
    with_data = [rank for rank, (has, _) in enumerate(everyones) if has]
    ranks = with_data or [*range(len(everyones))]

    def put_back() -> None:
        for metric in metrics.values():
            vars(metric).pop("compute", None)

    try:
        for name in of_all:
            vars(metrics[name])["compute"] = _Together(name, metrics[name], ranks)
        yield bool(with_data) or not metrics
    finally:
        in_full(put_back)


class _Together:
    """Stands in for a metric's `compute`: the ranks with data compute, and an error on one rank is raised on all."""

    def __init__(self, name: str, metric: Metric, ranks: list[int]) -> None:
        self._name, self._metric, self._compute, self._ranks = name, metric, metric.compute, ranks

    def __call__(self) -> Any:
        if is_computing():  # as a part of another metric
            return self._compute()
        of = f"metric {self._name!r} ({type(self._metric).__name__})"
        result, error, everyones = compute_on(self._ranks, self._compute, of=of)
        failures = {rank: one.failure for rank, one in enumerate(everyones) if one.failure}
        if not failures:
            return result if collectives.rank() in self._ranks else everyones[self._ranks[0]].result
        if error is not None and len(failures) == len(everyones):
            raise error
        rank, failure = next(iter(failures.items()))
        raise ValueError(f"metric {self._name!r} could not be computed on rank {rank}: {failure}") from error
