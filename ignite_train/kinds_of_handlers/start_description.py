"""A description of a trainer when its run starts, as far as it must be the same on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any

from torch import nn

from ignite_train.engine.dispatch import Attachable, attached
from ignite_train.ranks.unlike_ranks import described_parameters
from ignite_train.ranks.wrapping import own_parameters
from ignite_train.trainer import Trainer

__all__ = ["start_description"]

_OF_UPDATE = ("options", "loss_scaling")
_OF_EACH_RANK = {"seed"}  # which may differ


def start_description(trainer: Trainer) -> dict[str, str]:
    """Settings, collective handlers and the model's parameters by name; see `Attachable.is_collective`."""
    description: dict[str, str] = {}
    update = vars(trainer.process)  # of an `Update`, whose folder this one does not import
    settings = {**trainer.config, **{name: update[name] for name in _OF_UPDATE if name in update}}
    for name, value in settings.items():
        if name not in _OF_EACH_RANK:
            description |= _plain(name, value)
    for name, count in sorted(Counter(_collective_handlers(trainer)).items()):
        description[f"the handler {name}"] = str(count)
    model = trainer.parts.get("model")
    if isinstance(model, nn.Module):
        description |= described_parameters(model, own_parameters(update.get("model", model)))
    return description


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


def _collective_handlers(trainer: Trainer) -> Iterator[str]:
    """The class of each handler that all ranks must attach, once."""
    functions = [*(handler for _, handler, _ in attached(trainer)), *trainer.on_enter]
    owners = {id(owner): owner for function in functions for owner in (function, _owner(function))}
    for owner in owners.values():
        if isinstance(owner, Attachable) and owner.is_collective:
            yield type(owner).__name__


def _owner(function: Any) -> Any:
    return function.__self__ if isinstance(function, MethodType) else None
