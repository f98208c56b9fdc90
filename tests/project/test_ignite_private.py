"""What this library uses of Ignite without it being public: each part in one file, and as the installed release has it."""

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
from ignite.distributed.comp_models.base import _SerialModel
from ignite.engine import CallableEventWithFilter, Engine, Events, State, _prepare_batch
from ignite.metrics import EpochMetric, Precision

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
    first, second = engine._event_handlers[Events.STARTED]
    handler, arguments, named = first
    is_engine = isinstance(arguments[0], weakref.ref) and arguments[0]() is engine
    return handler is takes and is_engine and arguments[1:] == (1,) and named == {} and second == (plain, (), {})


def new_list_where_one_is_removed() -> bool:
    """`remove_event_handler` makes a new list, so that one that is gone through stays as it is."""
    engine, _ = make()
    handler = lambda: None  # noqa: E731
    engine.add_event_handler(Events.STARTED, handler)
    before = engine._event_handlers[Events.STARTED]
    engine.remove_event_handler(handler, Events.STARTED)
    return len(before) == 1 and engine._event_handlers[Events.STARTED] == []


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
    return first.__code__ is second.__code__ and numbers == [{"every": 2}, {"every": 3}]  # type: ignore[attr-defined]


def parent() -> bool:
    """A wrapper has its handler as a weakref `_parent`, by which it is found and removed."""
    engine, _ = make()
    handler = lambda: None  # noqa: E731
    engine.add_event_handler(Events.STARTED(once=1), handler)
    wrapper = engine._event_handlers[Events.STARTED][0][0]
    return isinstance(wrapper._parent, weakref.ref) and wrapper._parent() is handler


def fire_event() -> bool:
    """`Engine._fire_event(event, *args, **kwargs)` calls the handlers, and `fire_event` goes through it."""
    engine, seen = make()
    engine._fire_event = lambda event, *_, **__: seen.append(event)  # type: ignore[method-assign]
    engine.fire_event(Events.STARTED)
    return seen == [Events.STARTED]


def assert_allowed_event() -> bool:
    """`Engine._assert_allowed_event(event)` is asked when a handler is attached."""
    engine, seen = make()
    engine._assert_allowed_event = lambda event: seen.append(event)  # type: ignore[method-assign]
    engine.add_event_handler(Events.STARTED, lambda: None)
    return seen == [Events.STARTED]


def process_function() -> bool:
    """`Engine._process_function` is the function that the engine was made with."""
    function = lambda engine, batch: None  # noqa: E731
    return Engine(function)._process_function is function


def update_attrs() -> bool:
    """`State._update_attrs()` gives the state an attribute for each counter in its `event_to_attr`."""
    state = State()
    state.event_to_attr = {**State.event_to_attr, "own": "own_counter"}
    state._update_attrs()
    return state.own_counter == 0  # type: ignore[no-any-return, attr-defined]


def prepare_batch() -> bool:
    """`ignite.engine._prepare_batch(batch, device, non_blocking)` is the default of the supervised functions."""
    x, y = _prepare_batch((torch.ones(1), torch.zeros(1)), device="cpu", non_blocking=False)
    return bool(x == 1) and bool(y == 0)


def predictions() -> bool:
    """`EpochMetric` keeps lists `_predictions` and `_targets`, and looks `idist.all_gather` up when it computes."""
    metric = EpochMetric(lambda predictions, targets: 0.0, check_compute_fn=False)
    metric.update((torch.ones(2), torch.zeros(2)))
    kept = [part.tolist() for part in (*metric._predictions, *metric._targets)]
    looks_up = "idist.all_gather" in inspect.getsource(EpochMetric.compute)
    return kept == [[1.0, 1.0], [0.0, 0.0]] and looks_up


def learnt_by_classification() -> bool:
    """`_type` and `_num_classes` of a metric of classification are None before the first batch."""
    metric = Precision()
    before = (metric._type, metric._num_classes)
    metric.update((torch.eye(3), torch.arange(3)))
    return before == (None, None) and (metric._type, metric._num_classes) == ("multiclass", 3)


def device_of_a_metric() -> bool:
    """`Metric._device` is where a metric adds up."""
    return Precision(device="cpu")._device == torch.device("cpu")


def computation_model() -> bool:
    """`ignite.distributed.utils._model` answers for the ranks, and is not looked up again where `_need_to_sync` is False."""

    class Two(_SerialModel):
        def get_world_size(self) -> int:
            return 2

    module = ignite.distributed.utils
    before = module._model, module._need_to_sync
    module._model, module._need_to_sync = Two(), False
    try:
        return bool(ignite.distributed.get_world_size() == 2)
    finally:
        module._model, module._need_to_sync = before


# Each part: what is looked for in the library, the one file that may have it, and what must be true of Ignite.
PARTS: dict[str, tuple[str, str, Callable[[], bool]]] = {
    "_event_handlers": (r"\._event_handlers\b", "engine/dispatch.py", event_handlers),
    "remove_event_handler": (r"super\(\)\.remove_event_handler", "engine/dispatch.py", new_list_where_one_is_removed),
    "_handler_wrapper": (r"\b_handler_wrapper\b", "engine/dispatch.py", handler_wrapper),
    "every_event_filter": (r"\bevery_event_filter\b", "engine/dispatch.py", every_event_filter),
    "_parent": (r"\._parent\b", "engine/dispatch.py", parent),
    "_fire_event": (r"def _fire_event\b", "engine/dispatch.py", fire_event),
    "_assert_allowed_event": (r"\b_assert_allowed_event\b", "engine/dispatch.py", assert_allowed_event),
    "_process_function": (r"\._process_function\b", "engine/dispatch.py", process_function),
    "_update_attrs": (r"\._update_attrs\b", "engine/dispatch.py", update_attrs),
    "_predictions": (r'"_predictions"', "evaluation/uneven_metrics.py", predictions),
    "_num_classes": (r'"_num_classes"', "evaluation/uneven_metrics.py", learnt_by_classification),
    "_device": (r"metric\._device\b", "evaluation/uneven_metrics.py", device_of_a_metric),
    "_model": (r"\b_SerialModel\b|\b_need_to_sync\b", "tools/trial.py", computation_model),
    "_prepare_batch": (r"import .*\b_prepare_batch\b", "create.py", prepare_batch),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_private_part_is_as_it_was(name: str) -> None:
    """If this fails, the release of Ignite that is named has changed something that the file that is named stands on."""
    _, file, holds = PARTS[name]
    try:
        as_it_was, why = holds(), "it behaves differently"
    except Exception as error:
        as_it_was, why = False, repr(error)
    assert as_it_was, f"Ignite {ignite.__version__} has changed {name} ({holds.__doc__}): {why}; see ignite_train/{file}"


@pytest.mark.skipif(not (ROOT / "ignite_train").is_dir(), reason="looks at a checkout, and this is none")
@pytest.mark.parametrize("name", PARTS)
def test_a_private_part_is_used_in_one_file(name: str) -> None:
    """A change of Ignite's is answered in one place."""
    pattern, file, _ = PARTS[name]
    library = ROOT / "ignite_train"
    files = [path for path in [*library.rglob("*.py"), *(ROOT / "handlers").glob("*.py")] if "tests" not in path.parts]
    found = {path.relative_to(ROOT).as_posix() for path in files if re.search(pattern, path.read_text(encoding="utf-8"))}
    assert found <= {f"ignite_train/{file}"}
