"""What is printed for an object, a signature and the version says what it is, without addresses in memory."""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

import ignite_train
from ignite_train import ResumableLoader, ShardedSampler, TrainEvents, create_evaluator, create_trainer, handlers

ROOT = Path(__file__).parents[2]
ADDRESS = re.compile(r"0x[0-9a-f]+|<lambda>|<locals>")
# Still with the address of a function; a signature that is corrected must be removed from here.
WITH_ADDRESS = {
    "create_supervised_trainer",
}


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_a_trainer_and_its_state_say_what_they_are() -> None:
    """Model, optimizer, the settings that matter most, and how far it has come."""
    model = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = create_trainer(model, optimizer, mean_square, accumulation_steps=4, precision="bf16")

    assert repr(trainer) == "Trainer(Sequential, AdamW, accumulation_steps=4, bf16, epoch 0, update 0)"
    trainer.run([torch.ones(2, 3)] * 10, max_epochs=2)
    assert repr(trainer) == "Trainer(Sequential, AdamW, accumulation_steps=4, bf16, epoch 2, update 6)"
    assert repr(trainer.state) == "TrainState(epoch 2, update 6, 6 steps, 0 skipped, 20 micro-batches)"


def test_a_notebook_shows_a_trainer() -> None:
    """With what its updates are and its metrics, whatever letters these have; before the first run too."""
    model = nn.Linear(3, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_square, accumulation_steps=2)
    assert trainer._repr_html_() == (
        "<b>Trainer(Linear, SGD, accumulation_steps=2, fp32, epoch 0, update 0)</b><br>Linear, 4 parameters, on cpu in fp32, "
        "SGD<br>updates: 2 micro-batches each<br>epoch 0, update 0: 0 steps, 0 skipped"
    )
    trainer.state.metrics["a<b"] = 0.5
    trainer.run([torch.ones(2, 3)] * 4, max_epochs=1)
    assert trainer._repr_html_().endswith(
        "<br>2 updates in 1 epoch: 2 micro-batches each<br>epoch 1, update 2: 2 steps, 0 skipped<br>a&lt;b 0.5"
    )


def test_an_evaluator_and_its_state_say_what_they_are() -> None:
    """The model without its wrapper, the precision; the metrics."""
    evaluator = create_evaluator(nn.Linear(3, 1), lambda model, x: ignite_train.ForwardOutput(x.sum(), sample_size=4))

    assert repr(evaluator) == "Evaluator(Linear, fp32)"
    assert repr(evaluator.run([torch.ones(4, 3)])) == "EvaluatorState(loss=3.0)"


def test_data_says_what_it_is() -> None:
    """How much, in which order."""
    loader = ResumableLoader(torch.arange(10), batch_size=4, shuffle=True, seed=7)

    assert repr(loader) == "ResumableLoader(10 samples, batch_size=4, shuffle=True, seed=7)"
    assert repr(ShardedSampler(range(10), shuffle=False)) == "ShardedSampler(10 samples, shuffle=False, seed=0, rank 0 of 1)"


def test_a_handler_says_how_it_was_made(tmp_path: Path) -> None:
    """Plain arguments by value, others by the name of their class."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    assert repr(handlers.EmptyCache()) == "EmptyCache(fragmentation=None)"
    assert repr(handlers.TimeLimit(seconds=60)) == "TimeLimit(seconds=60.0)"
    assert repr(handlers.MinLearningRate(optimizer, minimum=1e-6)) == "MinLearningRate(optimizer=SGD, minimum=1e-06)"
    for handler in (handlers.Checkpoint(tmp_path), handlers.StateConsistency(model, optimizer), handlers.StopOnSignal()):
        assert repr(handler).startswith(f"{type(handler).__name__}(")
        assert ADDRESS.search(repr(handler)) is None


def _public() -> Iterator[tuple[str, Any]]:
    """The public functions, classes and methods with their names."""
    for module in (ignite_train, handlers):
        for name in module.__all__:
            public = getattr(module, name)
            if inspect.isfunction(public):
                yield name, public
            elif inspect.isclass(public):
                methods = {key: value for key, value in vars(public).items() if inspect.isfunction(value) and key[0] != "_"}
                yield from ((f"{name}.{key}", method) for key, method in {"__init__": public.__init__, **methods}.items())


def test_signatures_show_no_addresses() -> None:
    """`help()` shows `every=50`, and not where a lambda lies in memory."""
    shown = {name: str(inspect.signature(public)) for name, public in _public()}

    assert {name for name, signature in shown.items() if ADDRESS.search(signature)} == WITH_ADDRESS
    assert "event: 'Event' = Events.ITERATION_COMPLETED(every=1000)" in shown["EmptyCache.attach"]


def _stated(default: Any) -> str:
    """A default as the file has it. Signals are without their numbers and their order, which depend on the system."""
    if default and isinstance(default, tuple) and all(isinstance(one, signal.Signals) for one in default):
        return f"{{{', '.join(sorted(one.name for one in default))}}}"
    return repr(default)


def test_defaults_change_on_purpose_only() -> None:
    """What a script leaves out means what it meant before. A change that is meant goes into the file and CHANGELOG.md too."""
    found = {
        f"{name}({parameter.name}={_stated(parameter.default)})"
        for name, public in _public()
        if inspect.isfunction(public) and public.__module__.startswith("ignite_train")  # the others are of Ignite or torch
        for parameter in inspect.signature(public).parameters.values()
        if parameter.default is not parameter.empty and ADDRESS.search(repr(parameter.default)) is None
    }

    assert found ^ {*(ROOT / "tests/project/defaults.txt").read_text(encoding="utf-8").splitlines()} == set()


@pytest.mark.parametrize("number", [1, 3])
def test_a_default_event_is_what_ignite_makes(number: int) -> None:
    """`every(n, event)` fires in the same updates as `event(every=n)`, and prints as it."""
    from ignite_train.events import every

    trainer = create_trainer(model := nn.Linear(3, 1), torch.optim.SGD(model.parameters(), lr=0.1), mean_square)
    fired: dict[str, list[int]] = {"ours": [], "ignite's": []}
    event = every(number, TrainEvents.STEP_COMPLETED)
    trainer.add_event_handler(event, lambda: fired["ours"].append(trainer.state.iteration))
    ignites = TrainEvents.STEP_COMPLETED(every=number)
    trainer.add_event_handler(ignites, lambda: fired["ignite's"].append(trainer.state.iteration))
    trainer.run([torch.ones(2, 3)] * 7)

    assert fired["ours"] == fired["ignite's"] == list(range(number, 8, number))
    assert repr(event) == f"TrainEvents.STEP_COMPLETED(every={number})"
    assert repr(every(2, Events.EPOCH_COMPLETED)) == "Events.EPOCH_COMPLETED(every=2)"

    stock, seen = Engine(lambda engine, batch: None), []
    stock.add_event_handler(every(number, Events.ITERATION_COMPLETED), lambda: seen.append(stock.state.iteration))
    stock.run([0.0] * 7)
    assert seen == list(range(number, 8, number))


@pytest.mark.skipif(not (ROOT / "CITATION.cff").is_file(), reason="looks at a checkout, and here is none")
def test_the_version_stands_in_one_place() -> None:
    """The package says its version, and the citation gives the same."""
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)

    assert cited is not None
    assert cited.group(1) == ignite_train.__version__
    assert 'attr = "ignite_train.__version__"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
