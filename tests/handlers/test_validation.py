"""What is validated, and on what: loaders that can be read once, evaluations that fail, and a model that is not trained."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, RandomSampler

import cuts
from ignite_train import Trainer, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, LearningRateSchedule, ModelEMA, MomentumTeacher, Validation
from ignite_train.model.unchanged_copy import UnchangedCopy
from log_messages import messages_from_here
from ranks import run_ranks

DATA, HELD_OUT = cuts.cut(cuts.samples(), [8, 8, 8]), cuts.cut(cuts.samples(seed=1), [8, 4])
ONCE = (Events.EPOCH_COMPLETED, Events.COMPLETED, Events.ITERATION_COMPLETED(once=9))
COPIED = "its evaluator runs another model object than the trained one"


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


def test_an_error_in_an_evaluation_says_where_it_is() -> None:
    """Once; in a rehearsal the note is that of the rehearsal."""
    trainer = make()
    evaluator = create_evaluator(trainer.model, cuts.forward)
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: trainer.state.iteration and 1 // 0)
    Validation(evaluator, HELD_OUT).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.run(DATA)
    assert caught.value.__notes__ == ["in Validation, after update 2"]


# --- another model than the trained one -------------------------------------------------------------------------------------


def validate(model: nn.Module, trainer: Trainer, **options: Any) -> Validation:
    validation = Validation(create_evaluator(model, cuts.forward), HELD_OUT, **options)
    validation.attach(trainer)
    return validation


def copied(trainer: Trainer) -> nn.Module:
    return copy.deepcopy(trainer.model)


def averaged(trainer: Trainer) -> nn.Module:
    """By torch's class, which begins late."""
    average = AveragedModel(trainer.model)
    trainer.add_event_handler(Events.EPOCH_STARTED(once=3), lambda: average.update_parameters(trainer.model))
    return average


def teacher(trainer: Trainer) -> nn.Module:
    one = copied(trainer)
    MomentumTeacher(one, trainer.model, 0.9).attach(trainer)
    return one


def loaded(trainer: Trainer) -> nn.Module:
    """A script's own way: the weights are put there before each validation."""
    one = copied(trainer)
    trainer.prepend_event_handler(Events.EPOCH_COMPLETED, lambda: one.load_state_dict(trainer.model.state_dict()))
    return one


def compiled(trainer: Trainer) -> nn.Module:
    return torch.compile(trainer.model, backend="eager")  # type: ignore[return-value]


def other_form(_: Trainer) -> nn.Module:
    return nn.Sequential(cuts.linear())


def shared(trainer: Trainer) -> nn.Module:
    """A copy of the modules, with the same weights."""
    one = copied(trainer)
    one.weight, one.bias = trainer.model.weight, trainer.model.bias
    return one


def memory(trainer: Trainer) -> nn.Module:
    """Other parameters in the same memory, as an actor has them that runs a learner's weights."""
    one = copied(trainer)
    for mine, theirs in zip(one.parameters(), trainer.model.parameters(), strict=True):
        mine.data = theirs.data
    return one


FINE = (averaged, teacher, loaded, compiled, other_form, shared, memory)


@pytest.mark.parametrize("sanity", [0, 1])
def test_a_copy_that_nothing_changes_is_warned_of(sanity: int, caplog: pytest.LogCaptureFixture) -> None:
    """Once, in the first validation that can know it: the score is that of the weights with which it was made."""
    trainer = make()
    validation = validate(copied(trainer), trainer, sanity=sanity)
    trainer.run(DATA, max_epochs=2 - sanity)
    assert [message for message in caplog.messages if COPIED in message] == [
        f"Validation: {COPIED}, whose weights have not changed in 3 steps; pass the trained model, "
        "create_evaluator(model, forward), or copy its weights before each validation"
    ]
    trainer.run(DATA, max_epochs=4)
    assert sum(COPIED in message for message in caplog.messages) == 1
    assert validation.best == pytest.approx(by_hand([]))


@pytest.mark.parametrize("make_model", FINE, ids=lambda make_model: make_model.__name__)
def test_models_that_follow_the_trained_one_are_fine(
    make_model: Callable[[Trainer], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """However they do so."""
    trainer = make()
    validate(make_model(trainer), trainer)
    trainer.run(DATA, max_epochs=3)
    assert not any(COPIED in message for message in caplog.messages)


def test_the_trained_model_is_looked_at_once() -> None:
    """So that its contents are never read."""
    model, watch = cuts.linear(), UnchangedCopy()
    assert (watch.look(model, model, 0), watch.is_settled) == (0, True)


def test_averages_of_the_library_and_rates_of_zero_are_fine(caplog: pytest.LogCaptureFixture) -> None:
    """An average is swapped into the trained model. A step with a rate of 0 moves neither the model nor what follows it."""
    trainer = make()
    ema = ModelEMA(0.9)
    ema.attach(trainer)
    evaluator = create_evaluator(trainer.model, cuts.forward)
    ema.use_in(evaluator)
    Validation(evaluator, HELD_OUT).attach(trainer)
    trainer.run(DATA, max_epochs=2)

    trainer = make()
    (optimizer,) = trainer.optimizers.values()
    LearningRateSchedule(LambdaLR(optimizer, lambda step: float(step >= 4))).attach(trainer)
    validate(teacher(trainer), trainer)
    trainer.run(DATA, max_epochs=2)
    assert not any(COPIED in message for message in caplog.messages)


def warnings_of(kind: str) -> list[int]:
    """The number of warnings where the trained model is evaluated, and where a copy is."""
    found = []
    for is_copy in (False, True):
        model, other = cuts.linear(), cuts.linear()
        if kind == "fully_shard":
            fully_shard(model)
            fully_shard(other)
        trained = DistributedDataParallel(model) if kind == "ddp" else model
        trainer, said = make(trained), messages_from_here()
        validate(other if is_copy else trained, trainer)
        trainer.run(DATA, max_epochs=3)
        found.append(sum(COPIED in message for message in said))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "of_copy"), [("ddp", 1), ("fully_shard", 0)])
def test_a_copy_on_ranks(kind: str, of_copy: int) -> None:
    """The trained model is known as such in its wrapper, and the first rank alone warns of a copy, unless it is sharded."""
    assert run_ranks(warnings_of, kind) == [[0, of_copy], [0, 0]]


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
