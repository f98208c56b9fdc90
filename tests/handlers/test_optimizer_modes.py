"""A schedule-free optimizer is evaluated at its average, and training does not notice the evaluation."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn

import cuts
from bits import bit_by_bit
from ignite_train import Trainer, TrainEvents, create_evaluator, create_trainer
from ignite_train.checkpoint import load_weights
from ignite_train.handlers import Checkpoint, ModelEMA, OptimizerModes, Validation
from mistakes import Mistake, assert_one_line
from schedule_free import BETA, ScheduleFreeSGD

DATA = cuts.cut(cuts.samples(), [8] * 4)


def by_hand() -> list[float]:
    """The loss of x over all data after each update, in a plain loop."""
    model = cuts.linear()
    names = list(dict(model.named_parameters()))
    z = {name: value.detach().clone() for name, value in model.named_parameters()}
    x, losses = {name: z[name].clone() for name in names}, []
    for number, (a, b, w) in enumerate(DATA, start=1):
        y = {name: ((1 - BETA) * z[name] + BETA * x[name]).requires_grad_() for name in names}
        loss = (w * (torch.func.functional_call(model, y, (a,)).squeeze(1) - b) ** 2).sum() / w.sum()
        gradients = torch.autograd.grad(loss, list(y.values()))
        z = {name: z[name] - 0.05 * gradient for name, gradient in zip(names, gradients, strict=True)}
        x = {name: (1 - 1 / number) * x[name] + z[name] / number for name in names}
        outputs = [(w * (torch.func.functional_call(model, x, (a,)).squeeze(1) - b) ** 2).sum() for a, b, w in DATA]
        losses.append(float(sum(outputs) / sum(w.sum() for _, _, w in DATA)))
    return losses


def job(directory: Path | None = None, *, validates: bool = True) -> Any:
    model = cuts.linear()
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.05)
    trainer, evaluator = create_trainer(model, optimizer, cuts.forward), create_evaluator(model, cuts.forward)
    losses: list[float] = []
    if directory is not None:
        Checkpoint(directory, every=1, asynchronous=False).attach(trainer)
    if validates:
        Validation(evaluator, DATA).attach(trainer, Events.ITERATION_COMPLETED)
    OptimizerModes(optimizer).attach(trainer, evaluator=evaluator)
    evaluator.add_event_handler(Events.COMPLETED, lambda: losses.append(evaluator.state.metrics["loss"]))
    return trainer, model, optimizer, evaluator, losses


@pytest.mark.parametrize("modes_first", [True, False])
def test_an_average_is_scored_also_where_the_optimizer_has_modes(modes_first: bool, tmp_path: Path) -> None:
    """In both orders the score is that of the average as it is, nothing is left of the evaluation, and the best is loaded."""
    trainer, model, optimizer, _, _ = job(validates=False)
    ema, evaluator = ModelEMA(0.5, warm_up=False), create_evaluator(model, cuts.forward)
    ema.attach(trainer)
    averages = [value.detach().clone() for value in model.parameters()]

    @trainer.on(TrainEvents.STEP_COMPLETED)
    def average_by_hand() -> None:
        for average, weight in zip(averages, model.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.5)

    steps = [lambda: OptimizerModes(optimizer).attach(trainer, evaluator=evaluator), lambda: ema.use_in(evaluator)]
    for step in steps if modes_first else reversed(steps):
        step()
    Validation(evaluator, DATA).attach(trainer)
    checkpoint = Checkpoint(tmp_path, every_epochs=1, score="loss", asynchronous=False)
    checkpoint.attach(trainer, evaluator=evaluator)
    trainer.run(DATA, max_epochs=1)
    before = bit_by_bit(model.state_dict())
    score = evaluator.run(DATA).metrics["loss"]
    assert bit_by_bit(model.state_dict()) == before

    by_hand = cuts.linear()
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(averages), by_hand.parameters())
    assert score == pytest.approx(create_evaluator(by_hand, cuts.forward).run(DATA).metrics["loss"], rel=1e-12)
    assert checkpoint.load_best().score == score
    torch.testing.assert_close(model.state_dict(), by_hand.state_dict(), rtol=1e-12, atol=0.0)


def test_the_score_is_that_of_the_average() -> None:
    """Against a plain loop in float64; and with the evaluations training ends with the bits that it has without them."""
    trainer, model, optimizer, _, losses = job()
    trainer.run(DATA, max_epochs=1)
    assert losses == pytest.approx(by_hand(), rel=1e-10)
    other, other_model, other_optimizer, _, _ = job(validates=False)
    other.run(DATA, max_epochs=1)
    assert bit_by_bit(model.state_dict()) == bit_by_bit(other_model.state_dict())
    assert bit_by_bit(optimizer.state_dict()) == bit_by_bit(other_optimizer.state_dict())


def test_a_run_without_an_evaluator() -> None:
    """The optimizer trains, and the weights are those of a run with an evaluator that never runs."""
    model = cuts.linear()
    optimizer = ScheduleFreeSGD(model.parameters(), lr=0.05)
    trainer = create_trainer(model, optimizer, cuts.forward)
    OptimizerModes(optimizer).attach(trainer)
    trainer.run(DATA, max_epochs=1)
    other, other_model, _, _, _ = job(validates=False)
    other.run(DATA, max_epochs=1)
    assert bit_by_bit(model.state_dict()) == bit_by_bit(other_model.state_dict())


def test_resumed_in_the_middle(tmp_path: Path) -> None:
    """The same bits as a run that did not break off, with evaluations before and after."""
    whole, expected, _, _, losses = job()
    whole.run(DATA, max_epochs=1)
    trainer, _, _, _, _ = job(tmp_path)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA, max_epochs=1)
    trainer, model, _, _, rest = job(tmp_path)
    trainer.run(DATA, max_epochs=1, resume="must")
    assert bit_by_bit(model.state_dict()) == bit_by_bit(expected.state_dict())
    assert rest == losses[2:]


@pytest.mark.parametrize("num_updates", [4, 6], ids=["between epochs", "in an epoch"])
@pytest.mark.parametrize("modes_first", [True, False])
def test_a_run_resumes_from_a_state_in_eval_mode(modes_first: bool, num_updates: int, tmp_path: Path) -> None:
    """As `save()` writes it after `load_best()`. The best state is the latest, so training goes on as if nothing had been."""

    def make() -> tuple[Trainer, nn.Module, Checkpoint, ScheduleFreeSGD]:
        model = cuts.linear()
        optimizer, checkpoint = (
            ScheduleFreeSGD(model.parameters(), lr=0.05),
            Checkpoint(tmp_path, every=1, score="updates", mode="min"),
        )
        trainer, evaluator = create_trainer(model, optimizer, cuts.forward), create_evaluator(model, cuts.forward)
        evaluator.add_event_handler(
            Events.EPOCH_COMPLETED, lambda: evaluator.state.metrics.update(updates=-trainer.updates_done)
        )
        steps: list[Callable[[], object]] = [
            lambda: OptimizerModes(optimizer).attach(trainer, evaluator=evaluator),
            lambda: checkpoint.attach(trainer, evaluator=evaluator),
        ]
        for step in steps if modes_first else reversed(steps):
            step()
        Validation(evaluator, DATA, score="updates", mode="min").attach(trainer, Events.ITERATION_COMPLETED)
        return trainer, model, checkpoint, optimizer

    trainer, _, checkpoint, optimizer = make()
    trainer.run(DATA, max_iters=num_updates)
    checkpoint.load_best()
    checkpoint.save()
    assert not optimizer.param_groups[0]["train_mode"]
    trainer, model, _, optimizer = make()
    trainer.run(DATA, max_iters=8, resume="must")
    assert optimizer.param_groups[0]["train_mode"]
    whole, expected, _, _, _ = job()
    whole.run(DATA, max_epochs=2)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-10, atol=0.0)


def test_no_checkpoint_has_the_weights_of_an_evaluation(tmp_path: Path) -> None:
    """A save inside of it is refused, and the next save has the weights that are trained."""
    trainer, model, _, evaluator, _ = job(tmp_path, validates=False)
    checkpoint: Any = trainer.checkpoint
    handle = evaluator.add_event_handler(Events.COMPLETED, checkpoint.save)
    with trainer.session():
        trainer.update(DATA[:1])
        trained = bit_by_bit(model.state_dict())
        with pytest.raises(RuntimeError, match=r"save\(\) was called in an evaluation.*; save after it"):
            evaluator.run(DATA)
        handle.remove()
        evaluator.run(DATA)
        checkpoint.save()
    loaded = cuts.linear()
    load_weights(loaded, checkpoint.latest)
    assert bit_by_bit(loaded.state_dict()) == trained


def test_the_evaluator_outlives_its_trainer() -> None:
    """A function may train, and return the evaluator for the test data."""
    trainer, _, optimizer, evaluator, losses = job()
    trainer.run(DATA, max_epochs=1)
    del trainer
    gc.collect()
    evaluator.run(DATA)
    assert losses[-1] == pytest.approx(by_hand()[-1])
    assert optimizer.param_groups[0]["train_mode"]


class HiddenMode(torch.optim.SGD):
    """Nothing that it shows tells its modes apart."""

    calls: tuple[str, ...] = ()

    def train(self) -> None:
        self.calls = (*self.calls, "train")

    def eval(self) -> None:
        self.calls = (*self.calls, "eval")


class OwnMode(ScheduleFreeSGD):
    """Its mode is an attribute and no entry of its groups."""

    mode = ""

    def train(self) -> None:
        super().train()
        self.mode = "train"

    def eval(self) -> None:
        super().eval()
        self.mode = "eval"


@pytest.mark.parametrize("kind", [ScheduleFreeSGD, OwnMode])
def test_an_optimizer_in_its_eval_mode_stays_there(kind: type[ScheduleFreeSGD]) -> None:
    """As after training, where the script has called `eval()`: the second score is the first, and training can continue."""
    model = cuts.linear()
    optimizer = kind(model.parameters(), lr=0.05)
    trainer, evaluator = create_trainer(model, optimizer, cuts.forward), create_evaluator(model, cuts.forward)
    OptimizerModes(optimizer).attach(trainer, evaluator=evaluator)
    trainer.run(DATA, max_epochs=1)
    optimizer.eval()
    before = bit_by_bit([model.state_dict(), optimizer.state_dict()])
    scores = [evaluator.run(DATA).metrics["loss"] for _ in range(2)]
    assert scores == pytest.approx(by_hand()[-1:] * 2)
    assert bit_by_bit([model.state_dict(), optimizer.state_dict()]) == before
    optimizer.train()
    assert evaluator.run(DATA).metrics["loss"] == pytest.approx(scores[0])
    assert optimizer.param_groups[0]["train_mode"]


def test_an_optimizer_that_does_not_show_its_mode_trains_afterwards() -> None:
    """Nothing has told that it was in its eval mode."""
    model = cuts.linear()
    optimizer = HiddenMode(model.parameters(), lr=0.05)
    trainer, evaluator = create_trainer(model, optimizer, cuts.forward), create_evaluator(model, cuts.forward)
    OptimizerModes(optimizer).attach(trainer, evaluator=evaluator)
    evaluator.run(DATA)
    assert optimizer.calls[-2:] == ("eval", "train")


def test_an_evaluation_that_fails_leaves_the_weights_of_training() -> None:
    """The optimizer is back in training mode, with the same bits."""
    trainer, model, optimizer, evaluator, _ = job(validates=False)
    trainer.run(DATA, max_epochs=1)
    before = bit_by_bit(model.state_dict())
    with pytest.raises(TypeError):
        evaluator.run([None])
    assert bit_by_bit(model.state_dict()) == before
    assert optimizer.param_groups[0]["train_mode"]


def attach_to(optimizer: torch.optim.Optimizer, evaluator: Any = None) -> None:
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward)
    OptimizerModes(optimizer).attach(trainer, evaluator=evaluator or create_evaluator(model, cuts.forward))


def of_another_model() -> ScheduleFreeSGD:
    return ScheduleFreeSGD(cuts.linear().parameters(), lr=0.1)


MISTAKES: dict[str, Mistake] = {
    "plain": (TypeError, r"must have train\(\) and eval\(\)", lambda: attach_to(torch.optim.SGD(cuts.linear().parameters()))),
    "module": (TypeError, r"must have train\(\) and eval\(\)", lambda: OptimizerModes(nn.Linear(1, 1))),  # type: ignore[arg-type]
    "other": (
        ValueError,
        "optimizer must be the trainer's",
        lambda: attach_to(of_another_model()),
    ),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
