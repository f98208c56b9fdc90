"""What this library uses of Ignite without it being public: all in one file, and as the installed release has it."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite
import ignite.distributed
import pytest
import torch
from ignite.engine import CallableEventWithFilter, Engine, Events, State
from ignite.metrics import Accuracy, Metric

from ignite_train.internals.of_ignite import (
    EVERY_NTH,
    PARENT,
    OpenEngine,
    SerialModel,
    add_event_attributes,
    computation_model,
    computation_model_now,
    device_of_metric,
    handlers_by_event,
    names_in_state,
    prepare_as_ignite,
    registered_events,
)

ROOT = Path(__file__).parents[2]


def make() -> tuple[Engine, list[Any]]:
    seen: list[Any] = []
    return Engine(lambda engine, batch: batch), seen


def event_handlers() -> bool:
    """`Engine._event_handlers`: of each event a list of handler, positional and named arguments, the engine as a weakref."""
    engine, _ = make()
    takes, plain = (lambda engine, extra: None), (lambda: None)
    engine.add_event_handler(Events.STARTED, takes, 1)
    engine.add_event_handler(Events.STARTED, plain)
    first, second = handlers_by_event(engine)[Events.STARTED]
    handler, arguments, named = first
    is_engine = isinstance(arguments[0], weakref.ref) and arguments[0]() is engine
    return handler is takes and is_engine and arguments[1:] == (1,) and named == {} and second == (plain, (), {})


def one_dict_of_handlers() -> bool:
    """`Engine._event_handlers` is one dict for the life of an engine, whatever is attached, removed, registered or run."""
    engine, _ = make()
    before = handlers_by_event(engine)
    engine.add_event_handler(Events.STARTED, handler := lambda: None)
    engine.remove_event_handler(handler, Events.STARTED)
    engine.register_events("own")
    engine.run([1])
    return handlers_by_event(engine) is before


def new_list_where_one_is_removed() -> bool:
    """`remove_event_handler` makes a new list, so that one that is gone through stays as it is."""
    engine, _ = make()
    engine.add_event_handler(Events.STARTED, handler := lambda: None)
    before = handlers_by_event(engine)[Events.STARTED]
    engine.remove_event_handler(handler, Events.STARTED)
    return len(before) == 1 and handlers_by_event(engine)[Events.STARTED] == []


def allowed_events() -> bool:
    """`Engine._allowed_events` lists what can be fired: Ignite's own events and those that were registered."""
    engine, _ = make()
    before = {*registered_events(engine)}
    engine.register_events("own")
    return {*Events} <= before and {*registered_events(engine)} - before == {"own"}


def handler_wrapper() -> bool:
    """`Engine._handler_wrapper(handler, event_name, event_filter)` wraps a handler of an event with a filter."""
    names = list(inspect.signature(Engine._handler_wrapper).parameters)
    engine, seen = make()
    engine._handler_wrapper = lambda *arguments: seen.append(arguments) or arguments[0]  # type: ignore[method-assign]
    engine.add_event_handler(Events.STARTED(once=1), len, ())
    return names == ["self", "handler", "event_name", "event_filter"] and seen[0][:2] == (len, Events.STARTED)


def every_event_filter() -> bool:
    """`CallableEventWithFilter.every_event_filter(number)` makes a function whose one nonlocal is `every`, the number."""
    first, second = CallableEventWithFilter.every_event_filter(2), Events.STARTED(every=3).filter
    numbers = [inspect.getclosurevars(made).nonlocals for made in (first, second)]
    return first.__code__ is second.__code__ is EVERY_NTH and numbers == [{"every": 2}, {"every": 3}]  # type: ignore[attr-defined]


def parent() -> bool:
    """A wrapper has its handler as a weakref `_parent`, by which it is found and removed."""
    engine, _ = make()
    engine.add_event_handler(Events.STARTED(once=1), handler := lambda: None)
    parent = vars(handlers_by_event(engine)[Events.STARTED][0][0])[PARENT]
    return isinstance(parent, weakref.ref) and parent() is handler


def assert_allowed_event() -> bool:
    """`Engine._assert_allowed_event(event)` is asked when a handler is attached."""
    engine, seen = make()
    engine._assert_allowed_event = lambda event: seen.append(event)  # type: ignore[method-assign]
    engine.add_event_handler(Events.STARTED, lambda: None)
    return seen == [Events.STARTED]


def update_attrs() -> bool:
    """`State._update_attrs()` gives the state an attribute for each counter in its `event_to_attr`."""
    state = State()
    state.event_to_attr = {**State.event_to_attr, "own": "own_counter"}
    add_event_attributes(state)
    return state.own_counter == 0  # type: ignore[no-any-return, attr-defined]


def prepare_batch() -> bool:
    """`ignite.engine._prepare_batch(batch, device, non_blocking)` is the default of the supervised functions."""
    x, y = prepare_as_ignite((torch.ones(1), torch.zeros(1)), device="cpu", non_blocking=False)
    return bool(x == 1) and bool(y == 0)


def answering_model() -> bool:
    """`ignite.distributed.utils._model` answers for the ranks, and is not looked up again where `_need_to_sync` is False."""

    class Two(SerialModel):
        def get_world_size(self) -> int:
            return 2

    before = computation_model_now()
    with computation_model(two := Two()):
        answered = ignite.distributed.get_world_size() == 2 and computation_model_now() is two
    return answered and computation_model_now() is before


def open_engine() -> bool:
    """The two private methods are where an engine goes when it registers and filters, as `OpenEngine` expects."""
    calls: list[str] = []

    moments = {
        "_check_registered": lambda *_: calls.append("check"),
        "_filtered": lambda engine, handler, *_: calls.append("filter") or handler,
    }
    engine = type("Noted", (OpenEngine,), moments)(lambda engine, batch: None)
    engine.add_event_handler(Events.STARTED(once=1), lambda: None)
    return [*dict.fromkeys(calls)] == ["filter", "check"]


def metric_device() -> bool:
    """`Metric._device` is the device that a metric was made with, and on which it adds up."""
    metric = Accuracy(device="meta")
    return device_of_metric(metric) == vars(metric)["_num_correct"].device == torch.device("meta")


class Stateless(Metric):
    """It has no state, as `GpuInfo` has none."""

    def reset(self) -> None: ...
    def update(self, output: Any) -> None: ...
    def compute(self) -> None: ...


def metric_state() -> bool:
    """`Metric._state_dict_all_req_keys` names the attributes that are its state; a plain `Metric` names no attribute."""
    names = names_in_state(Accuracy())
    return vars(Accuracy()).keys() >= {*names} != set() and [*names_in_state(Stateless())] == []


# Each private name, and what must be true of it.
PARTS: dict[str, tuple[Callable[[], bool], ...]] = {
    "_event_handlers": (event_handlers, one_dict_of_handlers, new_list_where_one_is_removed),
    "_allowed_events": (allowed_events,),
    "_handler_wrapper": (handler_wrapper, open_engine),
    "every_event_filter": (every_event_filter,),
    "_parent": (parent,),
    "_assert_allowed_event": (assert_allowed_event,),
    "_update_attrs": (update_attrs,),
    "_SerialModel": (answering_model,),
    "_need_to_sync": (answering_model,),
    "_prepare_batch": (prepare_batch,),
    "_device": (metric_device,),
    "_state_dict_all_req_keys": (metric_state,),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_private_part_is_as_it_was(name: str) -> None:
    """If this fails, the release of Ignite that is named has changed something that the library stands on."""
    for holds in PARTS[name]:
        try:
            as_it_was, why = holds(), "it behaves differently"
        except Exception as error:
            as_it_was, why = False, repr(error)
        assert as_it_was, f"Ignite {ignite.__version__} has changed {name} ({holds.__doc__}): {why}"


@pytest.mark.skipif(not (ROOT / "ignite_train").is_dir(), reason="looks at a checkout, and this is none")
@pytest.mark.parametrize("name", PARTS)
def test_a_private_part_is_used_in_one_file(name: str) -> None:
    """A change of Ignite's is answered in one place; a method that a subclass has in the place of a private one counts too."""
    library = ROOT / "ignite_train"
    files = [path for path in [*library.rglob("*.py"), *(ROOT / "handlers").glob("*.py")] if "tests" not in path.parts]
    found = {path.relative_to(ROOT).as_posix() for path in files if re.search(rf"\b{name}\b", path.read_text(encoding="utf-8"))}
    assert found == {"ignite_train/internals/of_ignite.py"}
