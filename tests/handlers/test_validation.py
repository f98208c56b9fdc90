"""The data of a validation: loaders that can be read once, loaders that draw, and evaluations that fail."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Engine, Events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import cuts
from ignite_train import Trainer, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, EarlyStopping, JsonLines, TensorBoard, Validation

DATA, HELD_OUT = cuts.cut(cuts.samples(), [8, 8, 8]), cuts.cut(cuts.samples(seed=1), [8, 4])
ONCE = (Events.EPOCH_COMPLETED, Events.COMPLETED, Events.ITERATION_COMPLETED(once=9))


def make(model: nn.Module | None = None) -> Trainer:
    model = cuts.linear() if model is None else model
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE), cuts.forward)


def generator() -> Iterator[cuts.Sample]:
    yield from HELD_OUT


# --- a loader that can be read once -----------------------------------------------------------------------------------------


def test_an_iterator_that_more_than_one_epoch_needs_is_refused_before_the_first_update() -> None:
    """As `run` refuses one."""
    trainer = make()
    Validation(create_evaluator(trainer.model, cuts.forward), generator()).attach(trainer)
    with pytest.raises(TypeError, match=r"^Validation's loader must be a loader, got an iterator \(generator\), .* 3 times"):
        trainer.run(DATA, max_epochs=3)
    assert trainer.state.iteration == 0


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "Ignite's"])
def test_an_iterator_is_refused_at_the_second_validation(stock: bool) -> None:
    """Where it cannot be foreseen; before that it is validated as a list is."""
    trainer = make()
    validation = Validation(own_or_stock(trainer, stock=stock), generator(), sanity=0)
    validation.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    with pytest.raises(TypeError, match=r"^Validation's loader must be a loader, got an iterator .* 2 times"):
        trainer.run(DATA, max_iters=9)
    assert (trainer.state.iteration, validation.best_update) == (4, 2)
    assert validation.best == pytest.approx(by_hand(DATA[:2]))


def own_or_stock(trainer: Trainer, *, stock: bool) -> Engine:
    """An engine whose metric is the loss over all samples."""
    if not stock:
        return create_evaluator(trainer.model, cuts.forward)
    engine = Engine(
        lambda _, batch: [float(torch.as_tensor(number).detach()) for number in cuts.forward(trainer.model, batch)[:2]]
    )
    sums: list[list[float]] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: sums.append(engine.state.output))  # type: ignore[arg-type]
    engine.add_event_handler(Events.EPOCH_COMPLETED, lambda: engine.state.metrics.update(loss=divide(sums)))
    return engine


def divide(sums: list[list[float]]) -> float:
    losses, weights = zip(*sums, strict=True)
    return sum(losses) / sum(weights)


def by_hand(updates: list[cuts.Sample]) -> float:
    """The loss over the held-out samples after these updates, in closed form."""
    reached = cuts.reference(updates)
    x, y, w = cuts.cut(cuts.samples(seed=1), [12])[0]
    return float((w * (x @ reached["weight"] + reached["bias"] - y).square()).sum() / w.sum())


@pytest.mark.parametrize("event", ONCE, ids=["epoch", "end", "update 9"])
def test_an_iterator_that_is_read_once_is_fine(event: Any) -> None:
    """Also in a run of several epochs of which one is left."""
    trainer = make()
    trainer.run(DATA, max_epochs=2)
    validation = Validation(create_evaluator(trainer.model, cuts.forward), generator())
    validation.attach(trainer, event)
    trainer.run(DATA, max_epochs=3)
    assert validation.best == pytest.approx(by_hand(DATA * 3))


class Rewinding:
    """A loader that is its own iterator, and begins again where it is iterated."""

    def __iter__(self) -> Rewinding:
        self._left = iter(HELD_OUT)
        return self

    def __next__(self) -> cuts.Sample:
        return next(self._left)


def test_an_iterator_that_begins_again_is_a_loader() -> None:
    trainer, scores = make(), list[float]()
    evaluator = create_evaluator(trainer.model, cuts.forward)
    Validation(evaluator, Rewinding()).attach(trainer)
    evaluator.add_event_handler(Events.COMPLETED, lambda: scores.append(evaluator.state.metrics["loss"]))
    trainer.run(DATA, max_epochs=3)
    assert scores == pytest.approx([by_hand(DATA), by_hand(DATA * 2), by_hand(DATA * 3)])


def test_an_error_in_an_evaluation_says_where_it_is() -> None:
    """Once; in a rehearsal the note is that of the rehearsal."""
    trainer = make()
    evaluator = create_evaluator(trainer.model, cuts.forward)
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.iteration and 1 // 0)
    Validation(evaluator, HELD_OUT).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.run(DATA)
    assert caught.value.__notes__ == ["in Validation, after update 2"]


# --- a loader that draws ------------------------------------------------------------------------------------------------------


class Noisy(Dataset[cuts.Sample]):
    """Samples, with noise of a generator of its own if it is given one."""

    def __init__(self, generator: random.Random | np.random.Generator | None = None) -> None:
        self._generator, (self._x, self._y, self._weight) = generator, cuts.samples(seed=1)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> cuts.Sample:
        noise = 0.0 if self._generator is None else self._generator.random()
        return self._x[index] + noise, self._y[index], self._weight[index]


def loader_that_draws(kind: str) -> DataLoader[Any]:
    if kind == "torch":  # another third of the samples in each validation
        return DataLoader(Noisy(), sampler=RandomSampler(Noisy(), num_samples=4, generator=torch.Generator()))
    return DataLoader(Noisy(random.Random(0) if kind == "python" else np.random.default_rng(0)), batch_size=4)  # noqa: S311


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_a_loader_that_draws_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    """A resumed run has the scores of one that was not interrupted: its loader's own generators are saved."""

    def run(directory: Path, max_epochs: int) -> list[float]:
        trainer, scores = make(), list[float]()
        evaluator = create_evaluator(trainer.model, cuts.forward)
        Validation(evaluator, loader_that_draws(kind)).attach(trainer)
        evaluator.add_event_handler(Events.COMPLETED, lambda: scores.append(evaluator.state.metrics["loss"]))
        Checkpoint(directory).attach(trainer)
        trainer.run(DATA, max_epochs=max_epochs)
        return scores

    whole = run(tmp_path / "whole", 4)
    assert len({*whole}) == 4
    assert run(tmp_path / "parts", 2) + run(tmp_path / "parts", 4) == whole


def test_generators_that_are_none_are_refused() -> None:
    validation = Validation(create_evaluator(cuts.linear(), cuts.forward), loader_that_draws("python"))
    state = validation.state_dict()
    with pytest.raises(ValueError, match=r"state_dict\['generators'\] must be a mapping, got 3"):
        validation.load_state_dict({**state, "generators": 3})


# --- several loaders --------------------------------------------------------------------------------------------------------


def test_two_validations_of_one_evaluator_are_refused() -> None:
    """Their results would have the same names. One may be at two events, or follow one that was removed."""
    trainer = make()
    evaluator = create_evaluator(trainer.model, cuts.forward)
    first, second = Validation(evaluator, HELD_OUT), Validation(evaluator, DATA)
    first.attach(trainer, Events.EPOCH_COMPLETED(every=2))
    first.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    for one in (second, Validation(evaluator, HELD_OUT)):
        says = r"^evaluator must belong to one Validation, .*; make a second evaluator .*, or .* handle\.remove\(\)"
        with pytest.raises(ValueError, match=says):
            one.attach(trainer)
    other = make()
    evaluator = create_evaluator(other.model, cuts.forward)
    handle = Validation(evaluator, HELD_OUT).attach(other)
    handle.remove()
    Validation(evaluator, DATA).attach(other)
    Validation(evaluator, HELD_OUT).attach(make())  # of another stage, say


def test_each_loader_has_its_own_evaluator_and_names(tmp_path: Path) -> None:
    """In the log, in TensorBoard, and for what stops early and keeps the best."""
    trainer, logged = make(), list[tuple[float, float]]()
    near, far = (create_evaluator(trainer.model, cuts.forward) for _ in range(2))
    log, points = JsonLines(tmp_path / "log"), TensorBoard(tmp_path / "points")
    for evaluator, loader, name in ((near, HELD_OUT, "near"), (far, DATA, "far")):
        Validation(evaluator, loader).attach(trainer)
        log.attach(trainer, Events.EPOCH_COMPLETED, evaluator=evaluator, tag=name)
        points.attach(trainer, Events.EPOCH_COMPLETED, evaluator=evaluator, tag=name)
    stopping, checkpoint = EarlyStopping(far, patience=9), Checkpoint(tmp_path / "run", score="loss")
    stopping.attach(trainer)
    checkpoint.attach(trainer, evaluator=far)
    trainer.add_event_handler(
        Events.EPOCH_COMPLETED, lambda: logged.append((near.state.metrics["loss"], far.state.metrics["loss"]))
    )
    trainer.run(DATA, max_epochs=2)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    read = EventAccumulator(str(tmp_path / "points")).Reload()
    for number, name in enumerate(("near", "far")):
        expected = [pair[number] for pair in logged]
        assert [line[f"{name}/loss"] for line in lines if f"{name}/loss" in line] == expected
        assert [point.value for point in read.Scalars(f"{name}/loss")] == pytest.approx(expected, rel=1e-6)
    assert logged[-1][0] == pytest.approx(by_hand(DATA * 2))
    assert stopping.best == checkpoint.best.score == min(one for _, one in logged)  # type: ignore[union-attr]
