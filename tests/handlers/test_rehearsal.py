"""The evaluation of a few micro-batches before the first update: it reaches no handler that may keep what it is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Average, Metric, MetricsLambda
from torch import nn

import cuts
from ignite_train import ForwardOutput, Trainer, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import JsonLines, Validation
from ranks import Ranks, run_ranks

DATA = cuts.cut(cuts.samples(), [8, 8, 8])
EVENTS = (
    Events.ITERATION_COMPLETED,
    Events.ITERATION_COMPLETED(every=1),
    Events.GET_BATCH_COMPLETED,
    Events.STARTED,
    Events.EPOCH_STARTED,
    Events.EPOCH_COMPLETED,
    Events.COMPLETED,
)


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    output = cuts.forward(model, batch)
    return output._replace(outputs=output.loss)


def make(kind: str, seen: list[int] | None = None) -> tuple[Trainer, Engine]:
    """A trainer, and an evaluator that notes the update after which forward was run."""
    model = cuts.linear()
    options = UpdateOptions(reduction="explicit")  # it serves on one rank too
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), cuts.forward, options=options)

    def noting(model: nn.Module, batch: Any) -> ForwardOutput:
        if seen is not None:
            seen.append(trainer.state.iteration)
        return forward(model, batch)

    if kind == "ours":
        return trainer, create_evaluator(model, noting)
    return trainer, Engine(lambda _, batch: noting(model, batch).loss.item())


@pytest.mark.parametrize("event", EVENTS, ids=str)
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_it_reaches_no_handler_of_the_script(kind: str, event: Any) -> None:
    """At whatever event, with a filter or without. They are called in the order of attaching afterwards."""
    forwards, calls = list[int](), list[Any]()
    trainer, evaluator = make(kind, forwards)
    evaluator.add_event_handler(event, lambda: calls.append(("first", trainer.state.iteration)))
    Average().attach(evaluator, "loss" if kind == "stock" else "average")
    evaluator.add_event_handler(event, lambda: calls.append(("second", trainer.state.iteration)))
    Validation(evaluator, DATA[:1]).attach(trainer)
    trainer.run(DATA, max_epochs=2)
    assert calls == [(name, update) for update in (3, 6) for name in ("first", "second")]
    comes_before = event in EVENTS[2:5]
    assert forwards == [3, 6] if comes_before else [0, 3, 6], "forward may need what comes before it"


def test_it_computes_metrics_of_ignite_and_calls_the_handlers_of_the_library(tmp_path: Path) -> None:
    """One that fails, or that a score misspells, is found; a metric restarts in the first validation."""
    trainer, evaluator = make("ours")
    average = Average()
    MetricsLambda(lambda value: value + 1.0, average).attach(evaluator, "one_more")
    JsonLines(tmp_path / "log").attach(trainer, Events.EPOCH_COMPLETED, evaluator=evaluator)
    Validation(evaluator, DATA, score="one_moer", mode="min").attach(trainer)
    with pytest.raises(ValueError, match="got 'one_moer'; did you mean 'one_more'"):
        trainer.run(DATA)
    assert trainer.state.iteration == 0

    trainer, evaluator = make("ours")
    Average(lambda output: output[0][0][0]).attach(evaluator, "broken")
    evaluator.add_event_handler(Events.EXCEPTION_RAISED, lambda _error: None)  # which no metric can need
    Validation(evaluator, DATA).attach(trainer)
    with pytest.raises(IndexError) as caught:
        trainer.run(DATA)
    assert "this was a rehearsal" in caught.value.__notes__[-1]
    assert trainer.state.iteration == 0


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_score_that_a_handler_of_the_script_publishes_may_be_missing_in_it(kind: str) -> None:
    trainer, evaluator = make(kind)
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(late=1.0))
    validation = Validation(evaluator, DATA, score="late", mode="min")
    validation.attach(trainer)
    trainer.run(DATA)
    assert validation.best == 1.0


class OfAnotherNumber(Metric):
    """Computes from what a handler of the script has published."""

    def __init__(self, evaluator: Engine) -> None:
        self.evaluator = evaluator
        super().__init__()

    def reset(self) -> None:
        """Nothing is added up."""

    def update(self, output: Any) -> None:
        """Nothing is added up."""

    def compute(self) -> float:
        """Twice the number."""
        return 2 * float(self.evaluator.state.metrics["number"])


def converted(evaluator: Engine) -> None:
    """A handler of the script makes of the output what the metric needs."""

    @evaluator.on(Events.ITERATION_COMPLETED)
    def convert() -> None:
        evaluator.state.output = {"number": 1.0}

    Average(lambda output: output["number"]).attach(evaluator, "metric")


def beside_the_output(evaluator: Engine) -> None:
    """The metric reads what a handler of the script keeps."""
    kept = dict[str, float]()
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: kept.update(number=1.0))
    Average(lambda _: kept["number"]).attach(evaluator, "metric")


def from_another_number(evaluator: Engine) -> None:
    """The metric computes from a number that a handler of the script publishes."""
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(number=0.5))
    OfAnotherNumber(evaluator).attach(evaluator, "metric")


@pytest.mark.parametrize("need", [converted, beside_the_output, from_another_number])
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_metric_may_need_a_handler_of_the_script(kind: str, need: Callable[[Engine], None]) -> None:
    """Only forward is rehearsed then."""
    forwards = list[int]()
    trainer, evaluator = make(kind, forwards)
    need(evaluator)
    validation = Validation(evaluator, DATA[:1], score="metric", mode="min")
    validation.attach(trainer)
    trainer.run(DATA)
    assert validation.best == 1.0
    assert forwards == [0, 3]


def test_the_best_checkpoint_of_ignite_is_of_trained_weights(tmp_path: Path) -> None:
    """On one micro-batch the untrained weights may be better than any later ones are on all of them."""
    trainer, evaluator = make("ours")
    scores = {0: 9.0, 3: 1.0, 6: 2.0}  # by update
    keeps = ModelCheckpoint(
        str(tmp_path), score_function=lambda _: scores[trainer.state.iteration], score_name="score", n_saved=1
    )
    evaluator.add_event_handler(Events.EPOCH_COMPLETED, keeps, {"model": trainer.model})
    Validation(evaluator, DATA).attach(trainer)
    trainer.run(DATA, max_epochs=2)
    assert [path.name for path in tmp_path.iterdir()] == ["model_score=2.0000.pt"]


class OfTheScript(Validation):
    """A class of the script's, whose rehearsal ends as that of the library's does."""


@pytest.mark.parametrize("kind", [Validation, OfTheScript])
def test_handlers_of_the_end_are_not_called(kind: Callable[..., Validation], tmp_path: Path) -> None:
    """Nothing of it is logged."""
    trainer, evaluator = make("ours")
    JsonLines(tmp_path / "log").attach(trainer, Events.EPOCH_COMPLETED, evaluator=evaluator)
    kind(evaluator, DATA).attach(trainer)
    trainer.run(DATA)
    assert (tmp_path / "log").read_text().count("validation/loss") == 1


def _with_an_iterator_on_rank_1() -> tuple[list[int], float | None]:
    forwards = list[int]()
    trainer, evaluator = make("stock", forwards)
    Average().attach(evaluator, "loss")
    loader: Any = DATA[:1] if idist.get_rank() == 0 else iter(DATA[:1])
    validation = Validation(evaluator, loader, score="loss", mode="min")
    validation.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    return forwards, validation.best


def test_an_iterator_on_one_rank_leaves_it_out_on_all() -> None:
    """It would be used up; the other ranks would wait in a metric for the rank that has it."""
    first, second = run_ranks(_with_an_iterator_on_rank_1)
    assert first == second
    assert first[0] == [3]


def _with_a_handler_of_rank_0(kind: str, event: Any) -> tuple[list[int], list[int], float]:
    forwards, calls = list[int](), list[int]()
    trainer, evaluator = make(kind, forwards)
    Average().attach(evaluator, "loss" if kind == "stock" else "average")
    if idist.get_rank() == 0:
        evaluator.add_event_handler(event, lambda: calls.append(trainer.state.iteration))
    validation = Validation(evaluator, DATA[:1], score="loss", mode="min")
    validation.attach(trainer)
    trainer.run(DATA, max_epochs=1)
    assert validation.best is not None
    return forwards, calls, validation.best


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_handler_that_one_rank_has_counts_on_all(kind: str) -> None:
    """A bar or a logger is often attached on rank 0 alone. Otherwise a rank waits in a metric that the other leaves out."""
    with Ranks() as ranks:
        for event in EVENTS:
            first, second = ranks.run(_with_a_handler_of_rank_0, kind, event)
            assert first[::2] == second[::2], "both ranks run forward equally often, and find the same score"
            assert (first[1], second[1]) == ([3], [])
