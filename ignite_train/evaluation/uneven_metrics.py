"""Metrics of Ignite over ranks that have seen different numbers of samples, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from types import MethodType
from typing import Any, NamedTuple

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.exceptions import NotComputableError
from ignite.metrics import Metric
from torch import Tensor

from ignite_train.engine.dispatch import attached
from ignite_train.ranks import collectives

_LEARNT = ("_type", "_num_classes")
"""What Ignite's metrics of classification learn from the first batch: None on a rank without data."""

_PREDICTIONS = ("_predictions", "_targets")
"""What `EpochMetric`, and those that do as it does, concatenate along the first dimension and gather."""

__all__ = ["metrics_published_at", "uneven_metrics"]


def metrics_published_at(engine: Engine, event: Any) -> dict[str, Metric]:
    """The metrics that `engine` publishes at `event`, by the name that each was attached under."""
    found: dict[str, Metric] = {}
    for attached_to, handler, args in attached(engine):
        owner = handler.__self__ if isinstance(handler, MethodType) else None
        if attached_to == event and isinstance(owner, Metric) and handler.__name__ == "completed" and args:
            found[str(args[0])] = owner
    return found


@contextmanager
def uneven_metrics(engine: Engine) -> Iterator[None]:
    """Within it, the metrics that `engine` publishes at EPOCH_COMPLETED are those of the samples of all ranks. Collective.

    Ignite's metrics reduce themselves when they compute, by collectives that need the same shape on each rank; a rank without
    data has no shape, or raises an error while the others wait. Here such a rank gets zeros and empty tensors of the others'
    shapes, and predictions are gathered from ranks that differ in length. What was changed in a metric is put back. An error on
    one rank is raised on all. It costs one gathering of small objects for all metrics together, one for each, and one for each
    tensor that a metric gathers or sends; nothing in a single process or without metrics.

    Raises:
        ValueError: the ranks attached different metrics, or the state of one has different shapes that cannot be added; the
            same on all ranks.
    """
    metrics = metrics_published_at(engine, Events.EPOCH_COMPLETED)
    if collectives.world_size() == 1 or not metrics:
        yield
        return
    by_id = {id(part): (name, part) for name, metric in metrics.items() for part in _parts(metric)}  # each is once
    with ExitStack() as at_end:
        _complete([*by_id.values()], at_end)
        for name, metric in metrics.items():
            _set(metric, "compute", _agreed(name, metric.compute), at_end)
        for function in (idist.all_gather, idist.broadcast):
            at_end.callback(setattr, idist, function.__name__, function)
        idist.all_gather, idist.broadcast = _tolerant(idist.all_gather), _after_meeting(idist.broadcast)
        yield


def _set(metric: Metric, name: str, value: Any, at_end: ExitStack) -> None:
    """Sets an attribute of the instance, until the end."""
    if name in vars(metric):
        at_end.callback(setattr, metric, name, vars(metric)[name])
    else:
        at_end.callback(delattr, metric, name)
    setattr(metric, name, value)


def _parts(metric: Metric) -> Iterator[Metric]:
    """The metric, and those that it is made of: arguments of a function of metrics, members of a group."""
    yield metric
    for value in vars(metric).values():
        members = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
        for member in members:
            if isinstance(member, Metric):
                yield from _parts(member)


def _forms(metric: Metric) -> dict[str, tuple[Any, ...]]:
    """The forms of a metric's attributes."""
    learnt = {key: ("learnt", vars(metric)[key]) for key in _LEARNT if vars(metric).get(key) is not None}
    return {key: form for key, value in vars(metric).items() if (form := _form(value)) is not None} | learnt


def _form(value: Any) -> tuple[Any, ...] | None:
    """What kind of state an attribute is: its kind, and the shape and dtype of tensors. None if it is not a state.

    Of a single number on the device it says whether it is 0, as it is after a reset. sync
    """
    if isinstance(value, bool):
        return "flag", value
    if value is None or isinstance(value, (int, float)):
        return "number", isinstance(value, float)
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype, value.ndim == 0 and bool(value == 0)
    if isinstance(value, list) and all(isinstance(entry, Tensor) for entry in value):
        forms = {(tuple(entry.shape[1:]), entry.dtype) if entry.ndim else None for entry in value}
        if len(forms) > 1 or None in forms:
            return ("ragged",)
        return "list", *(forms.pop() if forms else ())  # type: ignore[misc]
    return None


def _complete(parts: Sequence[tuple[str, Metric]], at_end: ExitStack) -> None:
    """Gives the state of each metric the same form on all ranks."""
    mine = [(name, type(part).__name__, _forms(part)) for name, part in parts]
    everyones = collectives.gather_objects(mine)
    attached_by = [[entry[:2] for entry in theirs] for theirs in everyones]
    if any(theirs != attached_by[0] for theirs in attached_by):
        table = ", ".join(f"rank {rank}: {[name for name, _ in theirs]}" for rank, theirs in enumerate(attached_by))
        raise ValueError(f"metrics must be attached alike on all ranks, since they reduce together, got {table}")
    for (name, part), by_rank in zip(parts, zip(*everyones, strict=True), strict=True):
        for key in sorted({key for _, _, forms in by_rank for key in forms}):
            forms = [forms.get(key, ()) for _, _, forms in by_rank]
            if any(form != forms[0] for form in forms):
                _complete_attribute(part, name, key, forms, at_end)


def _complete_attribute(metric: Metric, name: str, key: str, forms: Sequence[tuple[Any, ...]], at_end: ExitStack) -> None:
    """Gives one attribute the same form on all ranks; `forms` are those of the ranks, which differ.

    Raises:
        ValueError: two ranks have tensors of different shapes, or a rank has none of the tensors that others keep in a list.
    """
    value: Any = vars(metric).get(key)
    known = [form for form in forms if form and form[0] != "number"]
    kinds = {form[0] for form in known}
    if not known and isinstance(value, int):  # a number, which is an integer here and not elsewhere
        _set(metric, key, float(value), at_end)
    elif kinds == {"learnt"}:
        _set(metric, key, known[0][1] if value is None else value, at_end)
    elif kinds == {"flag"}:
        _set(metric, key, any(form[1] for form in known), at_end)
    elif kinds <= {"list", "ragged"} and key not in _PREDICTIONS:
        _check_list(metric, name, key, forms)
    elif kinds <= {"list", "ragged"} or kinds == {"tensor"}:
        shaped = [form for form in known if len(form) > 1]
        shapes = {form[1] for form in shaped if form[-1] is not True} or {form[1] for form in shaped}  # a 0 adds nothing
        if len(shapes) > 1 or "ragged" in kinds:
            got = "more than one shape on one rank" if "ragged" in kinds else f"shapes {sorted(shapes)}"
            raise ValueError(
                f"metric {name!r} ({type(metric).__name__}) must have a state of one shape on all ranks, got {key} of {got}; "
                "have all ranks give predictions and targets of the same shape and classes"
            )
        if shaped:
            dtype = reduce(torch.promote_types, (form[2] for form in shaped))
            _set(metric, key, _completed(value, shapes.pop(), dtype, metric._device), at_end)


def _check_list(metric: Metric, name: str, key: str, forms: Sequence[tuple[Any, ...]]) -> None:
    """Ignite's own metrics gather other lists than predictions by their shapes. How a metric of a user does is not known."""
    empty = [rank for rank, form in enumerate(forms) if form == ("list",)]
    if empty and not type(metric).__module__.startswith("ignite."):
        raise ValueError(
            f"metric {name!r} ({type(metric).__name__}) must have seen data on all ranks, since it keeps tensors in a list, "
            f"got an empty {key} on rank {empty[0]}; derive it from ignite.metrics.EpochMetric, or give each rank a micro-batch"
        )


def _completed(value: Any, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
    """The state with the dtype of all ranks: without predictions an empty tensor; of numbers a tensor of the others' shape."""
    if isinstance(value, list):
        return [entry.to(dtype) for entry in value] or [torch.empty((0, *shape), dtype=dtype, device=device)]
    if isinstance(value, Tensor):
        return value.to(dtype).expand(shape).clone()
    return torch.full(shape, value or 0, dtype=dtype, device=device)


def _tolerant(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Ignite's `all_gather` for tensors that differ in their first dimension: they are concatenated, in rank order."""

    def all_gather(tensor: Any, group: Any = None) -> Any:
        if not isinstance(tensor, Tensor) or tensor.ndim == 0 or group is not None:
            return gather(tensor, group=group)
        forms = _meet((tuple(tensor.shape), tensor.dtype))
        if len(set(forms)) == 1:
            return gather(tensor)
        shapes = [shape for shape, _ in forms]
        if len({shape[1:] for shape in shapes}) > 1:
            raise ValueError(f"tensors that a metric gathers may differ in their first dimension only, got shapes {shapes}")
        lengths = [shape[0] for shape in shapes]
        dtype = reduce(torch.promote_types, (dtype for _, dtype in forms))
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]), dtype=dtype)
        padded[: len(tensor)] = tensor
        gathered = gather(padded).split(max(lengths))
        return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])

    return all_gather


def _after_meeting(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Ignite's `broadcast`, before which the ranks look whether one of them has an error."""

    def meet_and_broadcast(*args: Any, **kwargs: Any) -> Any:
        _meet(None)
        return broadcast(*args, **kwargs)

    return meet_and_broadcast


class _Failure(NamedTuple):
    """The error of a rank in the `compute` of a metric."""

    nothing_seen: bool
    message: str


class _OtherRankFailedError(Exception):
    """Ends `compute` on a rank that met one with an error. Its argument is what the ranks have sent."""


def _meet(mine: Any) -> list[Any]:
    """Gathers `mine` inside the `compute` of a metric, where a rank that has an error sends that. Collective.

    Raises:
        _OtherRankFailedError: some rank has one.
    """
    met = collectives.gather_objects(mine)
    if any(isinstance(entry, _Failure) for entry in met):
        raise _OtherRankFailedError(met)
    return met


def _agreed(name: str, compute: Callable[[], Any]) -> Callable[[], Any]:
    """`compute` of the metric `name`, in which all ranks reduce alike. Its error on one rank is raised on all.

    A rank without data for which Ignite's metric says that there is nothing to compute gets the result of the others.
    """

    def compute_agreed() -> Any:
        mine: Exception | None = None
        result: tuple[Any, ...] = ()
        met: list[Any] = []
        try:
            result = (compute(),)
        except _OtherRankFailedError as other:
            (met,) = other.args
        except Exception as error:
            mine = error
        if not met:
            failure = _Failure(isinstance(mine, NotComputableError), f"{type(mine).__name__}: {mine}")
            met = collectives.gather_objects(None if mine is None else failure)
        failed = {rank: entry for rank, entry in enumerate(met) if isinstance(entry, _Failure)}
        if not failed:
            return result[0]
        if mine is not None and len(failed) == collectives.world_size():
            raise mine
        if all(failure.nothing_seen for failure in failed.values()):
            for found in collectives.gather_objects(result):
                if found:
                    return found[0]
        rank, failure = next(iter(failed.items()))
        raise ValueError(f"metric {name!r} could not be computed on rank {rank}: {failure.message}") from mine

    return compute_agreed
