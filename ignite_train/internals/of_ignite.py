"""Private names of Ignite that the library uses, in this file alone.

Each has a name of ours. `tests/internals/test_ignite_internals.py` compares each with what Ignite documents, so that a release
that changes one fails there, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any

import ignite.distributed as idist
import torch
from ignite.distributed.comp_models.base import ComputationModel, _SerialModel
from ignite.engine import CallableEventWithFilter, Engine, State, _prepare_batch
from ignite.metrics import Metric

__all__ = [
    "EVERY_NTH",
    "NAMES_IN_STATE",
    "PARENT",
    "Entry",
    "OpenEngine",
    "SerialModel",
    "add_event_attributes",
    "computation_model",
    "computation_model_now",
    "device_of_metric",
    "handlers_by_event",
    "names_in_state",
    "prepare_as_ignite",
    "registered_events",
]

# A handler as an engine stores it: itself, its positional and its named arguments. The first of them is a weak reference to the
# engine, if the signature of the handler takes one.
Entry = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
# The handlers of an engine, in the order in which they are called. The engine keeps the dict, and changes it in place.
handlers_by_event: Callable[[Engine], dict[Any, list[Entry]]] = attrgetter("_event_handlers")
# The events that were registered on an engine; publicly one is asked for by a call that raises.
registered_events: Callable[[Engine], Sequence[Any]] = attrgetter("_allowed_events")
# Gives a state an attribute for each counter of its `event_to_attr`, as an engine does when it is made.
add_event_attributes: Callable[[State], None] = methodcaller("_update_attrs")
# The attributes of a metric that are its state, which it gathers from all ranks when it is asked for it.
NAMES_IN_STATE = "_state_dict_all_req_keys"
names_in_state: Callable[[Metric | type[Metric]], Sequence[str]] = attrgetter(NAMES_IN_STATE)
# The attribute of a handler with a filter that is a weak reference to the handler without: by it Ignite finds what to remove.
PARENT = "_parent"
# The code of a filter `every=n`, whose one nonlocal is `every`: what tells it from a filter of the user's.
EVERY_NTH = CallableEventWithFilter.every_event_filter(1).__code__


# What prepares a batch of two parts where the user gives no function.
prepare_as_ignite: Any = _prepare_batch
# Answers for a single process, whatever group there is.
SerialModel = _SerialModel


class OpenEngine(Engine):
    """Ignite's engine, where a subclass says how handlers are checked and wrapped, which Ignite does in private methods."""

    def _check_registered(self, event: Any) -> None:
        """Raises an error if `event` is not registered."""
        raise NotImplementedError

    def _filtered(self, handler: Callable[..., Any], event: Any, event_filter: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls `handler` if the filter of `event` is true."""
        raise NotImplementedError

    def _assert_allowed_event(self, event_name: Any) -> None:
        self._check_registered(event_name)

    def _handler_wrapper(self, handler: Callable[..., Any], event_name: Any, event_filter: Any) -> Callable[..., Any]:
        return self._filtered(handler, event_name, event_filter)


def device_of_metric(metric: Metric) -> torch.device | None:
    """The device on which a metric adds up; None for one that has not called the constructor of Ignite's class."""
    return vars(metric).get("_device")  # a metric has an answer to `getattr` for each name: a function of itself


def computation_model_now() -> ComputationModel:
    """The object that answers for the ranks of `ignite.distributed`."""
    model: ComputationModel = idist.utils._model
    return model


@contextmanager
def computation_model(model: ComputationModel | None = None) -> Iterator[None]:
    """In this `with`, `model` answers for the ranks of `ignite.distributed`, and so of this library; None: a single process."""
    module: Any = idist.utils
    before = module._model, module._need_to_sync
    module._model, module._need_to_sync = model or SerialModel(), False
    try:
        yield
    finally:
        module._model, module._need_to_sync = before
