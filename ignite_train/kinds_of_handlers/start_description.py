"""A description of a trainer when its run starts, as far as it must be the same on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import nn

from ignite_train.data.description import dealt_order
from ignite_train.engine.attachable import Attachable, owner_of
from ignite_train.engine.dispatch import attachables, attached, is_of_library, occasions
from ignite_train.evaluation.uneven_metrics import MetricHolder, published_metric, waits_for_ranks
from ignite_train.ranks.unlike_ranks import Description, described_model
from ignite_train.ranks.wrapping import own_buffers, own_parameters
from ignite_train.trainer import Trainer

__all__ = ["start_description"]

_OF_UPDATE = ("options", "loss_scaling")
_OF_EACH_RANK = {"seed"}  # which may differ
_BY_WHICH_RANKS_MEET = {"every", "every_epochs", "every_seconds"}
"""Settings of handlers that are compared. Others, such as time limits and paths, may differ between ranks."""


def start_description(trainer: Trainer) -> Description:
    """Settings, limits, what waits for other ranks, parameters by name, and what ranks match by its place.

    That is the order of samples that are dealt out, of parameters and buffers, of collective handlers and metrics of Ignite at
    an event of the trainer or of an evaluator that a handler runs, and of what travels with an update. See
    `Attachable.is_collective` about handlers.
    """
    description: dict[str, str] = {}
    update = vars(trainer.process)  # of an `Update`, whose folder this one does not import
    settings = {**trainer.config, **{name: update[name] for name in _OF_UPDATE}}
    for name, value in settings.items():
        if name not in _OF_EACH_RANK:
            description |= _plain(name, value)
    description |= _limits(trainer) | _described_handlers(trainer)
    wrapped = update["gather"].passes.model
    of_model = described_model(trainer.model, {*own_parameters(wrapped), *own_buffers(wrapped)})
    of_trainer = Description(
        {**description, **of_model.of_all}, in_order={**_orders(trainer), **of_model.in_order}, buffers=of_model.buffers
    )
    dealt = dealt_order(trainer.state.dataloader)
    if dealt is None:
        return of_trainer
    of_data = {f"data.{name}": repr(value) for name, value in dealt.settings.items()}
    return replace(of_trainer, sharing=dealt.ranks, of_data=of_data)


def _plain(name: str, value: Any) -> dict[str, str]:
    """A setting in words, field by field where it is a dataclass; of other objects the class."""
    if is_dataclass(value):
        return {key: text for one in fields(value) for key, text in _plain(f"{name}.{one.name}", vars(value)[one.name]).items()}
    if isinstance(value, nn.Module):
        return {}
    return {name: repr(value) if _is_plain(value) else f"a {type(value).__name__}"}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or isinstance(value, (bool, int, float, str))


def _limits(trainer: Trainer) -> dict[str, str]:
    """The limits that `run` or `session` was given. The length of an epoch that comes from that of a loader may differ."""
    state, stream = trainer.state, trainer.data.stream
    limits = {"max_epochs": state.max_epochs, "max_iters": state.max_iters}
    limits["epoch_length"] = None if stream is None else stream.updates_per_epoch
    return {name: str(limit) for name, limit in limits.items() if limit is not None}


def _described_handlers(trainer: Trainer) -> dict[str, str]:
    """How many handlers of each class all ranks must attach, when these are called, and how often our own ones meet."""
    owners: dict[int, Any] = {}
    found: dict[str, list[str]] = {}
    for function, event, event_filter in [*occasions(trainer), *((function, "", "") for function in trainer.on_enter)]:
        owner = owner_of(function)
        if isinstance(owner, Attachable) and owner.is_collective:
            owners[id(owner)] = owner
            if event:
                found.setdefault(f"the handler {type(owner).__name__} at {event}", []).append(event_filter)
    for owner in owners.values():
        settings = owner.settings() if is_of_library(owner) else {}
        for name in sorted(settings.keys() & _BY_WHICH_RANKS_MEET):
            found.setdefault(f"the handler {type(owner).__name__}.{name}", []).append(repr(settings[name]))
    counts = Counter(f"the handler {type(owner).__name__}" for owner in owners.values())
    described = {name: str(count) for name, count in sorted(counts.items())}
    return described | {name: ", ".join(sorted(values)) for name, values in found.items()}


def _orders(trainer: Trainer) -> dict[str, list[str]]:
    """All that waits for other ranks at an event, or travels with each update; ranks match it by its place.

    Also at the events of the evaluators that attached handlers run.
    """
    found: dict[str, list[str]] = {"what travels with each update": [type(one).__name__ for one in trainer.piggybacks]}
    evaluators = [(evaluator, " of an evaluator") for owner in attachables(trainer) for evaluator in owner.runs()]
    for engine, whose in ((trainer, ""), *evaluators):
        for (_, function, args), (_, event, _) in zip(attached(engine), occasions(engine), strict=True):
            place = f"what waits for other ranks at {event}{whose}"
            owner = owner_of(function)
            published = published_metric(function, args)
            if isinstance(owner, Attachable) and owner.is_collective:
                found.setdefault(place, []).append(type(owner).__name__)
            elif published is not None and (isinstance(owner, MetricHolder) or waits_for_ranks(published[1])):
                found.setdefault(place, []).append(f"{type(published[1]).__name__} {published[0]!r}")
    return found
