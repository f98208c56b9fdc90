"""Mistakes of the first hour: some would train wrongly and are noticed in the first update, others are foreign words."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from ignite.handlers import TerminateOnNan
from ignite.metrics import Average, Loss, MeanSquaredError, RunningAverage
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ignite_train
from ignite_train import (
    ForwardContractError,
    ForwardOutput,
    GradientAccessError,
    NoGradientError,
    ResumableLoader,
    Trainer,
    TrainEvents,
    UpdateOptions,
    UpdateOutput,
    attach_defaults,
    create_evaluator,
    create_supervised_trainer,
    create_trainer,
    handlers,
)
from ignite_train.handlers import (
    Checkpoint,
    EarlyStopping,
    JsonLines,
    ModelEMA,
    ProgressLog,
    StopOnSignal,
    TensorBoard,
    TimeLimit,
    TrainingMetrics,
    Validation,
)
from ignite_train.other_words import OTHER_WORDS
from mistakes import assert_one_line
from ranks import run_ranks

Batch = tuple[Tensor, Tensor]
DATA = [(torch.linspace(-1, 1, 24).view(8, 3), torch.arange(8) % 2), (torch.linspace(0, 2, 24).view(8, 3), torch.arange(8) % 2)]


def make(forward: Any, options: UpdateOptions | None = None, **settings: Any) -> tuple[nn.Module, Any, Trainer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = settings.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    return model, optimizer, create_trainer(model, optimizer, forward, options=options, **settings)


def summed(model: nn.Module, batch: Batch) -> ForwardOutput:
    return ForwardOutput(cross_entropy(model(batch[0]), batch[1], reduction="sum"), sample_size=len(batch[1]))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


# --- what forward returns ---------------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[Callable[[nn.Module, Batch], Any], str]] = {
    "an accuracy": (lambda m, b: (loss_of(m, b), accuracy(m, b)), r"taken for sample_size .* not a number of samples"),
    "a number": (lambda m, b: (loss_of(m, b), accuracy(m, b).item()), r"taken for sample_size .* not a number of samples"),
    "a list's mean": (lambda m, b: (loss_of(m, b), 10.25), r"\(loss, 10.25\)"),
    "another loss": (lambda m, b: (loss_of(m, b), m(b[0]).square().mean()), r"requires grad; a second loss is added"),
    "another loss by name": (
        lambda m, b: ForwardOutput(loss_of(m, b), sample_size=m(b[0]).square().mean()),
        r"requires grad; a second loss is added",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_that_is_no_loss_and_size(name: str) -> None:
    """The weights have not moved."""
    forward, says = PAIRS[name]
    model, _, trainer = make(forward)
    before = model.weight.detach().clone()
    assert_one_line((ForwardContractError, says, lambda: trainer.run(DATA)))
    assert torch.equal(model.weight, before)


def test_an_accuracy_that_is_zero_at_first() -> None:
    """It skips updates until it is a fraction, which is noticed then."""
    accuracies = iter([0.0, 0.0, 0.5])
    _, _, trainer = make(lambda m, b: (loss_of(m, b), torch.tensor(next(accuracies))))
    assert_one_line((ForwardContractError, "not a number of samples", lambda: trainer.run(DATA * 2)))
    assert trainer.state.num_skipped == 2


RIGHT: dict[str, Callable[[nn.Module, Batch], Any]] = {
    "weights by name": lambda m, b: ForwardOutput(loss_of(m, b), sample_size=0.25),
    "a tensor by name": lambda m, b: ForwardOutput(loss_of(m, b), sample_size=torch.tensor(0.5)),
    "weights with logs": lambda m, b: (loss_of(m, b), 0.25, {"a": 1.0}),
    "a size": lambda m, b: (loss_of(m, b) * 8, 8),
    "a float": lambda m, b: (loss_of(m, b) * 8, 8.0),
    "a mask's sum": lambda m, b: (loss_of(m, b) * 8, torch.ones(8).sum()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_weight_that_is_meant(name: str) -> None:
    """Weights that are real numbers are given by name."""
    make(RIGHT[name])[2].run(DATA)


def test_an_evaluator_refuses_a_pair_too() -> None:
    """As training does."""
    forward = PAIRS["a number"][0]
    assert_one_line(
        (ForwardContractError, "not a number of samples", lambda: create_evaluator(nn.Linear(3, 2), forward).run(DATA))
    )


# --- backward and steps inside an update ------------------------------------------------------------------------------------


def attack(model: nn.Module, batch: Batch) -> Batch:
    """One step of FGSM, as most programs write it (Goodfellow et al., Explaining and harnessing adversarial examples, 2015)."""
    x = batch[0].clone().requires_grad_()
    cross_entropy(model(x), batch[1]).backward()
    assert x.grad is not None
    return (batch[0] + 0.1 * x.grad.sign(), batch[1])


def attack_without_a_trace(model: nn.Module, batch: Batch) -> Batch:
    x = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(model(x), batch[1]), x)
    return (batch[0] + 0.1 * gradient.sign(), batch[1])


def attack_and_clear(model: nn.Module, batch: Batch) -> Batch:
    attacked = attack(model, batch)
    model.zero_grad()
    return attacked


def test_backward_in_forward() -> None:
    """Its gradient would be stepped along. An attack that leaves none behind is right."""
    model, _, trainer = make(lambda m, b: summed(m, attack(m, b)))
    before = model.weight.detach().clone()
    says = r"'weight' has one: it called backward\(\).*torch.autograd.grad\(loss, inputs\)"
    assert_one_line((ForwardContractError, says, lambda: trainer.run(DATA)))
    assert torch.equal(model.weight, before)
    weights = []
    for right in (attack_without_a_trace, attack_and_clear):
        model, _, trainer = make(lambda m, b, right=right: summed(m, right(m, b)))
        trainer.run(DATA)
        weights.append(model.weight)
    assert torch.equal(*weights)


def again(trainer: Trainer) -> None:
    assert trainer.state.forward_output is not None
    trainer.state.forward_output.loss.backward(retain_graph=True)


def clip(trainer: Trainer) -> None:
    nn.utils.clip_grad_norm_(trainer.process.model.parameters(), 0.1)  # type: ignore[attr-defined]


def add_noise(trainer: Trainer) -> None:
    for parameter in trainer.process.model.parameters():  # type: ignore[attr-defined]
        parameter.grad = parameter.grad + 0.1


def clamp_data(trainer: Trainer) -> None:
    """As older programs write it: `.data` is a tensor of its own, whose changes torch does not count."""
    for parameter in trainer.process.model.parameters():  # type: ignore[attr-defined]
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def flip_data(trainer: Trainer) -> None:
    for parameter in trainer.process.model.parameters():  # type: ignore[attr-defined]
        parameter.grad.data.neg_()


def penalty(trainer: Trainer) -> None:
    sum(parameter.square().sum() for parameter in trainer.process.model.parameters()).backward()  # type: ignore[attr-defined]


EVENTS = {
    "MICRO_BATCH_STARTED": TrainEvents.MICRO_BATCH_STARTED,
    "FORWARD_COMPLETED": TrainEvents.FORWARD_COMPLETED,
    "BACKWARD_COMPLETED": TrainEvents.BACKWARD_COMPLETED,
    "GRADIENTS_READY": TrainEvents.GRADIENTS_READY,
}
CHANGES = {
    "again": (again, "FORWARD_COMPLETED"),
    "clip after backward": (clip, "BACKWARD_COMPLETED"),
    "clip before the step": (clip, "GRADIENTS_READY"),
    "noise after backward": (add_noise, "BACKWARD_COMPLETED"),
    "noise before the step": (add_noise, "GRADIENTS_READY"),
    "data clamped after backward": (clamp_data, "BACKWARD_COMPLETED"),
    "data clamped before the step": (clamp_data, "GRADIENTS_READY"),
    "data of the other sign": (flip_data, "GRADIENTS_READY"),
    "a penalty before forward": (penalty, "MICRO_BATCH_STARTED"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_gradient_that_is_changed_too_early(name: str) -> None:
    """Also by a handler that is not called in the first update."""
    change, event = CHANGES[name]
    model, _, trainer = make(summed)
    trainer.add_event_handler(EVENTS[event](every=2), change)
    says = rf"a handler of {event} must not change gradients.*'weight'.*TrainEvents.GRADIENTS_REDUCED"
    assert_one_line((GradientAccessError, says, lambda: trainer.run(DATA)))
    assert trainer.state.num_steps == 1
    assert model.weight.grad is None


@pytest.mark.parametrize("event", ["BACKWARD_COMPLETED", "GRADIENTS_READY"])
def test_a_handler_that_is_attached_within_the_update_is_watched_too(event: str) -> None:
    _, _, trainer = make(summed)

    @trainer.on(TrainEvents.MICRO_BATCH_STARTED(once=2))
    def attach(trainer: Trainer) -> None:
        trainer.add_event_handler(EVENTS[event], clip)

    with pytest.raises(GradientAccessError, match=f"a handler of {event} must not change gradients"):
        trainer.run(DATA)


@pytest.mark.parametrize("event", [*EVENTS.values(), TrainEvents.GRADIENTS_REDUCED], ids=lambda event: event.name)
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_in_a_handler(event: Any, fused: bool) -> None:
    """No parameter has moved by it, and the trainer's own step stays what it was."""

    def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, fused=fused)

    model, optimizer, trainer = make(summed, optimizer=adamw)
    before = model.weight.detach().clone()
    handle = trainer.add_event_handler(event, lambda: optimizer.step())
    says = rf"a handler of {event.name} must not call step\(\) of the trainer's optimizer"
    assert_one_line((GradientAccessError, says, lambda: trainer.run(DATA)))
    assert torch.equal(model.weight, before)
    assert not optimizer._optimizer_step_pre_hooks
    handle.remove()
    trainer.run(DATA)
    assert trainer.state.num_steps == 2


def test_a_step_in_forward() -> None:
    """As in a loop that was copied whole."""
    _, optimizer, trainer = make(lambda m, b: (optimizer.step(), summed(m, b))[1])
    assert_one_line((ForwardContractError, r"forward must not call step\(\)", lambda: trainer.run(DATA)))
    assert not optimizer._optimizer_step_pre_hooks


def test_what_handlers_may_do() -> None:
    """Drop a gradient, read all of them, differentiate, step another optimizer, and change the mean where it is one."""
    model, _, trainer = make(summed, UpdateOptions(retain_graph=True))
    other = nn.Linear(3, 2)
    critic = torch.optim.SGD(other.parameters(), lr=0.1)

    def allowed(trainer: Trainer) -> None:
        output = trainer.state.forward_output
        if output is not None:
            torch.autograd.grad(output.loss, model.weight, retain_graph=True)
        model.bias.grad = None
        other(DATA[0][0]).sum().backward()
        critic.step()

    for event in EVENTS.values():
        trainer.add_event_handler(event, allowed)
    trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, clip)
    bias = model.bias.detach().clone()
    record = trainer.run(DATA).update_output
    assert record is not None
    assert record.grad_norm < 0.1001
    assert torch.equal(model.bias, bias)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_second_backward_through_gradients() -> None:
    """With `create_graph` handlers of BACKWARD_COMPLETED may add the gradient of a penalty on the gradient."""
    model, _, trainer = make(summed, UpdateOptions(create_graph=True))
    trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, lambda: model.weight.grad.square().sum().backward())
    trainer.run(DATA)
    assert trainer.state.num_steps == 2


def set_to_zero(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


CLEARINGS: dict[str, Callable[[nn.Module, Any], None]] = {
    "of the optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "of the model": lambda model, _: model.zero_grad(),
    "to zero": lambda _, optimizer: set_to_zero(optimizer),
    "of one layer": lambda model, _: setattr(model.bias, "grad", None),
}


@pytest.mark.parametrize("name", CLEARINGS)
def test_zero_grad_in_forward(name: str) -> None:
    """The gradients of the earlier micro-batches of the update would be lost. One micro-batch alone has no earlier ones."""

    def clearing(model: nn.Module, batch: Batch) -> ForwardOutput:
        CLEARINGS[name](model, optimizer)
        return summed(model, batch)

    model, optimizer, trainer = make(clearing, accumulation_steps=4)
    before = model.weight.detach().clone()
    says = (
        r"forward must not change gradients, and the one of '(weight|bias)' is (gone|another one) now: it called zero_grad\(\)"
    )
    assert_one_line((ForwardContractError, says, lambda: trainer.run(DATA * 2)))
    assert trainer.state.num_micro_batches == 0
    assert torch.equal(model.weight, before)
    weights = []
    for forward in (clearing, summed):
        model, optimizer, trainer = make(forward)
        trainer.run(DATA)
        weights.append(model.weight)
    assert torch.equal(*weights)


def test_clipping_in_forward() -> None:
    """It clips the sum over the earlier micro-batches, and the line names it."""

    def clipping(model: nn.Module, batch: Batch) -> ForwardOutput:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return summed(model, batch)

    says = r"it called .* or clip_grad_norm_\(\), .*; leave this to the trainer, which clips by max_grad_norm="
    assert_one_line((ForwardContractError, says, lambda: make(clipping, accumulation_steps=4)[2].run(DATA * 2)))


def test_a_model_that_is_frozen_after_the_trainer_is_made() -> None:
    """The loss has no graph, which is not the fault of forward."""
    model, _, trainer = make(summed)
    model.requires_grad_(requires_grad=False)
    says = "has no graph; no parameter of the model requires a gradient any more; thaw"
    assert_one_line((ForwardContractError, says, lambda: trainer.run(DATA)))


def test_an_optimizer_in_the_place_of_the_loss() -> None:
    """Ignite's function has the same order; an optimizer prints itself in several lines."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    says = "loss_fn must be callable as loss_fn"
    assert_one_line((TypeError, says, lambda: create_supervised_trainer(model, cross_entropy, optimizer)))  # type: ignore[arg-type]


@pytest.mark.parametrize("keeps_graph", [False, True])
@pytest.mark.parametrize("calls", [None, 1, 4], ids=["each", "first", "last"])
@pytest.mark.parametrize("event", ["MICRO_BATCH_STARTED", "FORWARD_COMPLETED", "BACKWARD_COMPLETED"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_zero_grad_in_a_handler(event: str, calls: int | None, keeps_graph: bool) -> None:
    """Also after the backward of one micro-batch alone. Before the first gradient it does nothing."""
    model, optimizer, trainer = make(summed, UpdateOptions(create_graph=keeps_graph), accumulation_steps=4)
    before = model.weight.detach().clone()
    chosen = EVENTS[event] if calls is None else EVENTS[event](event_filter=lambda _, number: (number - calls) % 4 == 0)
    trainer.add_event_handler(chosen, lambda: optimizer.zero_grad())
    if calls == 1 and event != "BACKWARD_COMPLETED":
        trainer.run(DATA * 2)
        mine, optimizer, trainer = make(summed, accumulation_steps=4)
        trainer.run(DATA * 2)
        assert torch.equal(model.weight, mine.weight)
        return
    says = rf"a handler of {event} has dropped all gradients before the step; leave out its zero_grad\(\)"
    assert_one_line((NoGradientError, says, lambda: trainer.run(DATA * 2)))
    assert torch.equal(model.weight, before)


def test_zero_grad_before_the_last_of_many_micro_batches() -> None:
    """A handler of MICRO_BATCH_STARTED is watched in whole updates, however many micro-batches they have."""
    _, optimizer, trainer = make(summed, accumulation_steps=8)
    trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED(every=8), lambda: optimizer.zero_grad())
    with pytest.raises(NoGradientError, match="a handler of MICRO_BATCH_STARTED has dropped all gradients"):
        trainer.run(DATA * 4)


def test_data_that_is_changed_after_the_last_of_many_micro_batches() -> None:
    """The contents of gradients are compared in whole updates too."""
    _, _, trainer = make(summed, accumulation_steps=8)
    trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED(every=8), clamp_data)
    with pytest.raises(GradientAccessError, match="a handler of BACKWARD_COMPLETED must not change gradients"):
        trainer.run(DATA * 4)
    assert trainer.state.num_steps == 0


@pytest.mark.parametrize("event", ["MICRO_BATCH_STARTED", "BACKWARD_COMPLETED"])
def test_a_mistake_of_a_handler_that_is_attached_later(event: str) -> None:
    """It is looked at in the first update that it is there for, whatever the number of that is."""
    _, _, trainer = make(summed)

    @trainer.on(Events.ITERATION_COMPLETED(once=5))
    def attach(trainer: Trainer) -> None:
        trainer.add_event_handler(EVENTS[event], clamp_data if event == "BACKWARD_COMPLETED" else penalty)

    with pytest.raises(GradientAccessError, match=f"a handler of {event} must not change gradients"):
        trainer.run(DATA * 4)
    assert trainer.state.iteration == 5


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("every", [2, 4, 8])
@pytest.mark.parametrize("mistake", ["step", "backward"])
def test_a_mistake_in_a_later_forward(mistake: str, every: int, accumulation_steps: int) -> None:
    """A loop that accumulated by itself did so in each second, fourth or eighth call."""
    calls = 0

    def forward(model: nn.Module, batch: Batch) -> ForwardOutput:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            optimizer.step() if mistake == "step" else summed(model, batch).loss.backward()
        return summed(model, batch)

    model, optimizer, trainer = make(forward, accumulation_steps=accumulation_steps)
    says = rf"forward must not (call step\(\)|(leave|change) gradients.*{mistake}\(\))"
    assert_one_line((ForwardContractError, says, lambda: trainer.run(DATA * 8)))
    assert calls == every
    assert trainer.state.num_steps == (every - 1) // accumulation_steps
    mine, by_hand, _ = make(summed)
    for number, batch in enumerate((DATA * 8)[: trainer.state.num_steps * accumulation_steps], start=1):
        (summed(mine, batch).loss / (accumulation_steps * len(batch[1]))).backward()
        if number % accumulation_steps == 0:
            by_hand.step()
            by_hand.zero_grad()
    torch.testing.assert_close(model.weight, mine.weight)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_mistake_in_the_forward_of_one_update() -> None:
    """Another forward, which an update of its own is given, is watched like that of the trainer."""
    _, optimizer, trainer = make(summed)
    trainer.run(DATA[:1])
    with pytest.raises(ForwardContractError, match=r"forward must not call step\(\)"):
        trainer.update(DATA[:1], forward=lambda m, b: (optimizer.step(), summed(m, b))[1])


def test_a_mistake_in_a_later_evaluation_of_a_closure() -> None:
    """Each evaluation of the loss runs a forward that is watched."""
    calls = 0

    def forward(model: nn.Module, batch: Batch) -> ForwardOutput:
        nonlocal calls
        calls += 1
        if calls == 4:
            model.zero_grad()
        return summed(model, batch)

    _, _, trainer = make(forward, UpdateOptions(closure=True), optimizer=torch.optim.LBFGS, accumulation_steps=2)
    with pytest.raises(ForwardContractError, match="forward must not change gradients, and the one of 'weight' is gone"):
        trainer.run(DATA)
    assert calls == 4


@pytest.mark.parametrize("accumulation_steps", [1, 4])
def test_a_forward_that_differentiates_rightly(accumulation_steps: int) -> None:
    """Without `.grad`, or with gradients that it puts back, or of a network that the trainer does not step: as without it."""
    other = nn.Linear(3, 2)
    critic = torch.optim.SGD(other.parameters(), lr=0.1)

    def right(model: nn.Module, batch: Batch) -> ForwardOutput:
        attack_without_a_trace(model, batch)
        kept = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        summed(model, batch).loss.backward()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
        summed(other, batch).loss.backward()
        critic.step()
        critic.zero_grad()
        return summed(model, batch)

    weights = []
    for forward in (right, summed):
        model, _, trainer = make(forward, accumulation_steps=accumulation_steps)
        trainer.run(DATA * 4)
        weights.append(model.weight)
    assert torch.equal(*weights)


def on_ranks() -> list[Any]:
    """In DistributedDataParallel: an attack that calls backward, and modules that were put into eval mode inside it."""
    found: list[Any] = []
    module = with_norm()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = UpdateOptions(reduction="ddp")
    trainer = create_trainer(model, optimizer, lambda m, b: summed(m, attack(m, b)), options=options, protect=False)
    try:
        trainer.run(DATA)
    except ForwardContractError as error:
        found.append("called backward()" in str(error))
    module.eval()
    create_trainer(model, optimizer, summed, options=options, protect=False).run(DATA)
    return [*found, all(one.training for one in module.modules())]


@pytest.mark.slow
def test_ranks_are_told_alike() -> None:
    """The gradients of an attack were reduced by the hooks of the wrapper, and are refused; modes are those of the module."""
    assert run_ranks(on_ranks) == [[True, True]] * 2


# --- modes, and weights that never move -------------------------------------------------------------------------------------


def with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def probed_by_hand(model: nn.Sequential) -> nn.Sequential:
    """As the linear probes of MoCo do: the statistics of the frozen layers must not move."""
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DATA:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return model


def test_a_model_in_eval_mode(caplog: pytest.LogCaptureFixture) -> None:
    """It is trained in training mode with one warning, or as it is, where the script says so: as by hand, bit by bit."""
    model = with_norm().eval()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of)
    trainer.run(DATA, max_epochs=1)
    trainer.run(DATA, max_epochs=2)
    assert all(module.training for module in model.modules())
    assert sum("UpdateOptions(train_mode=False)" in record.message for record in caplog.records) == 1
    caplog.clear()
    model = with_norm().eval()
    options = UpdateOptions(train_mode=False)
    create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, options=options).run(DATA)
    assert not any(module.training for module in model.modules())
    for mine, right in zip(model.state_dict().values(), probed_by_hand(with_norm()).state_dict().values(), strict=True):
        assert torch.equal(mine, right)
    assert not caplog.records


@pytest.mark.parametrize("prepare", [lambda m: m.train(), lambda m: m[1].eval(), lambda m: [c.eval() for c in m]])
def test_modes_that_say_nothing(prepare: Callable[[nn.Sequential], Any], caplog: pytest.LogCaptureFixture) -> None:
    """The mode of the root module decides, and modules that were put into eval mode stay there."""
    model = with_norm()
    prepare(model)
    modes = [module.training for module in model.modules()]
    create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of).run(DATA)
    assert [module.training for module in model.modules()] == modes
    assert not caplog.records


def test_a_module_outside_of_the_model_keeps_its_mode() -> None:
    """A teacher that the script has put into eval mode stays there, in training and in evaluation."""
    teacher = with_norm().eval()
    seen = []

    def distil(model: nn.Module, batch: Batch) -> ForwardOutput:
        seen.append(teacher.training)
        return ForwardOutput(mse_loss(model(batch[0]), teacher(batch[0]).detach(), reduction="sum"), sample_size=len(batch[0]))

    model, _, trainer = make(distil)
    trainer.run(DATA)
    create_evaluator(model, distil).run(DATA)
    assert seen
    assert not any(seen)


def test_a_run_that_never_moves_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    """As with a sample size of 0 in each update: the end of the run says so, and what to do."""
    _, _, trainer = make(lambda m, b: ForwardOutput(loss_of(m, b), sample_size=0))
    trainer.run(DATA)
    said = [record.message for record in caplog.records]
    assert "update 1 was skipped (no_samples): the sample sizes of all ranks add up to 0; skipped so far: 1" in said[0]
    assert "the weights have never moved: all 2 updates were skipped, the latest (no_samples)" in said[-1]
    caplog.clear()
    make(summed)[2].run(DATA)
    assert not caplog.records


# --- the words of other libraries -------------------------------------------------------------------------------------------


def supervised(loss_fn: Any = nn.CrossEntropyLoss, **settings: Any) -> Any:
    model = nn.Linear(3, 2)
    return create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **settings)


def evaluator() -> Any:
    return create_evaluator(nn.Linear(3, 2), summed)


def with_checkpoint(directory: Any = "runs") -> Trainer:
    trainer = make(summed)[2]
    Checkpoint(directory).attach(trainer)
    return trainer


def imports(statement: str) -> Callable[[], None]:
    return lambda: exec(statement, {})  # noqa: S102


SAVE = "write Checkpoint('runs/first').attach(trainer) of ignite_train.handlers, which saves the run and resumes it"
SCORE = "write score='accuracy', the name of one of the evaluator's metrics"
CALLS = "forward must be callable as forward(model, micro_batch) or forward(model, micro_batch, state)"
RESUME = "; leave it out, and a run with a Checkpoint continues where it was"
WORDS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: make(summed)[2].run(DATA, epochs=3),
        TypeError,
        "Trainer.run has no argument 'epochs'; write trainer.run(loader, max_epochs=3)",
    ),
    (
        lambda: make(summed)[2].run(DATA, max_steps=3),
        TypeError,
        "Trainer.run has no argument 'max_steps'; write trainer.run(loader, max_iters=1000), which counts updates",
    ),
    (
        lambda: make(summed)[2].run(DATA, max_epoch=3, resumes="must"),
        TypeError,
        "Trainer.run has no argument 'max_epoch'; write trainer.run(loader, max_epochs=3)",
    ),
    (
        lambda: make(summed)[2].run(DATA, resum="must"),
        TypeError,
        "Trainer.run has no argument 'resum'; did you mean 'resume'?",
    ),
    (
        lambda: make(summed, amp=True),
        TypeError,
        "create_trainer has no argument 'amp'; write precision='bf16' or precision='fp16'",
    ),
    (
        lambda: make(summed, grad_clip=1.0),
        TypeError,
        "create_trainer has no argument 'grad_clip'; write max_grad_norm=1.0",
    ),
    (
        lambda: make(summed, on_nonfinite="skip"),
        TypeError,
        "create_trainer has no argument 'on_nonfinite'; write options=UpdateOptions(on_nonfinite=...)",
    ),
    (
        lambda: make(summed, bananas=3),
        TypeError,
        "create_trainer has no argument 'bananas'; help(create_trainer) lists them",
    ),
    (
        lambda: make(summed, scheduler=None),
        TypeError,
        "create_trainer has no argument 'scheduler'; write LearningRateSchedule(scheduler).attach(trainer), with a scheduler "
        "of torch, whose steps are updates",
    ),
    (
        lambda: supervised(loss=None),
        TypeError,
        "create_supervised_trainer has no argument 'loss'; write loss_fn=torch.nn.CrossEntropyLoss()",
    ),
    (supervised, TypeError, "loss_fn must be a loss and not its class, got CrossEntropyLoss; write CrossEntropyLoss()"),
    (
        lambda: UpdateOptions(accumulation_steps=4),
        TypeError,
        "UpdateOptions has no argument 'accumulation_steps'; write accumulation_steps=4 of create_trainer, "
        "gradient_accumulation_steps=4 of create_supervised_trainer",
    ),
    (lambda: Checkpoint("runs", monitor="loss"), TypeError, f"Checkpoint has no argument 'monitor'; {SCORE}"),
    (lambda: Checkpoint("runs", best="loss"), TypeError, f"Checkpoint has no argument 'best'; {SCORE}"),
    (
        lambda: Checkpoint("runs", save_top_k=3),
        TypeError,
        "Checkpoint has no argument 'save_top_k'; write keep=3, or keep_best=3 for the best by a score",
    ),
    (
        lambda: Checkpoint({}, "runs"),
        TypeError,
        "Checkpoint takes (directory) without names, got 2 values; write Checkpoint('runs/first').attach(trainer): it saves "
        "model, optimizer and handlers by itself",
    ),
    (
        lambda: Checkpoint("runs", score=3),
        TypeError,
        "score must be the name of one of the evaluator's metrics, got 3 of type int in Checkpoint",
    ),
    (
        lambda: Checkpoint("runs", config=argparse.Namespace(a=1)),
        TypeError,
        "config must be a mapping, got Namespace(a=1) of type Namespace; vars(config) makes one of a Namespace",
    ),
    (lambda: Validation(evaluator(), DATA, metric="loss"), TypeError, f"Validation has no argument 'metric'; {SCORE}"),
    (lambda: EarlyStopping(evaluator(), monitor="loss"), TypeError, f"EarlyStopping has no argument 'monitor'; {SCORE}"),
    (
        lambda: EarlyStopping(3, lambda engine: 1.0, None),
        TypeError,
        "EarlyStopping takes (evaluator, score) without names, got 3 values; write EarlyStopping(evaluator, 'accuracy', "
        "patience=3).attach(trainer)",
    ),
    (
        lambda: ProgressLog().attach(make(summed)[2], every=10),
        TypeError,
        "ProgressLog.attach has no argument 'every'; write an event in attach: attach(trainer, "
        "Events.ITERATION_COMPLETED(every=50))",
    ),
    (
        lambda: make(summed)[2].fit(DATA),
        AttributeError,
        "'Trainer' object has no attribute 'fit'; write trainer.run(loader, max_epochs=3)",
    ),
    (
        lambda: make(summed)[2].train(),
        AttributeError,
        "'Trainer' object has no attribute 'train'; write trainer.run(loader, max_epochs=3)",
    ),
    (lambda: make(summed)[2].save_checkpoint(), AttributeError, f"'Trainer' object has no attribute 'save_checkpoint'; {SAVE}"),
    (lambda: make(summed)[2].bananas, AttributeError, "'Trainer' object has no attribute 'bananas'"),
    (
        lambda: make(summed)[2].state.loss,
        AttributeError,
        "'TrainState' object has no attribute 'loss'; write state.update_output.loss",
    ),
    (
        lambda: make(summed)[2].state.accuracy,
        AttributeError,
        "'TrainState' object has no attribute 'accuracy'; write state.metrics[...] with TrainingMetrics; the sums of the "
        "latest update are state.update_output.logs",
    ),
    (
        lambda: make(summed)[2].run(DATA).output["loss"],
        TypeError,
        "UpdateOutput has attributes and no keys, got ['loss']; write state.update_output.loss",
    ),
    (
        lambda: make(lambda batch, model: summed(model, batch)),
        TypeError,
        f"{CALLS}, got the parameters (batch, model); put the model first",
    ),
    (
        lambda: with_checkpoint().run(DATA, resume=True),
        TypeError,
        f"resume must be 'auto', 'must', 'never' or a path, got True of type bool{RESUME}",
    ),
    (
        lambda: make(summed)[2].run(DATA, resume=True),
        TypeError,
        f"resume must be 'auto', 'must', 'never' or a path, got True of type bool{RESUME}",
    ),
    (
        lambda: with_checkpoint().run(DATA, resume="m.pt"),
        ValueError,
        "resume must be 'auto', 'must', 'never' or a directory that exists, got 'm.pt'; for the weights of a file alone write "
        "load_weights(model, path) of ignite_train.checkpoint",
    ),
    (
        lambda: ResumableLoader(DATA, 8),
        TypeError,
        "shuffle must be given, as True or False, got None of type NoneType; or pass batches=TokenBudgetSampler(...)",
    ),
    (
        imports("from ignite_train import Checkpoint"),
        ImportError,
        "ignite_train has no 'Checkpoint'; write from ignite_train.handlers import Checkpoint",
    ),
    (
        imports("from ignite_train.handlers import ModelCheckpoint"),
        ImportError,
        f"ignite_train.handlers has no 'ModelCheckpoint'; {SAVE}",
    ),
    (
        imports("from ignite_train.handlers import TerminateOnNan"),
        ImportError,
        "ignite_train.handlers has no 'TerminateOnNan'; write nothing: a loss or gradient that is not finite raises "
        "NonFiniteError by itself",
    ),
    (
        imports("from ignite_train import Events"),
        ImportError,
        "ignite_train has no 'Events'; write from ignite.engine import Events",
    ),
]


VALIDATE = "write Validation(evaluator, loader).attach(trainer), with evaluator = create_evaluator(model, forward)"
RECORD = "return ForwardOutput(loss, sample_size=..., logs={...}), (loss, sample_size) or a scalar mean loss"
ATTRIBUTES = {
    "validate": VALIDATE,
    "predict": "write predict(evaluator, loader) of ignite_train.handlers",
    "log": "write logs={...} in ForwardOutput, and trainer.state.metrics with TrainingMetrics",
    "backward": "write forward that returns the loss: the update calls backward, clips, steps and clears",
    "step": "write trainer.update([micro_batch])",
    "global_step": "write trainer.state.iteration, the number of updates",
    "prepare": "write create_trainer(model, optimizer, forward), and trainer.run(loader), which take them as they are",
    "attach": "write Checkpoint('runs/first').attach(trainer): a handler attaches itself",
    "is_global_zero": "write idist.get_rank() == 0, with import ignite.distributed as idist",
}
ARGUMENTS = {
    "accumulate_grad_batches": "write accumulation_steps=4 of create_trainer, gradient_accumulation_steps=4 of "
    "create_supervised_trainer",
    "mixed_precision": "write precision='bf16' or precision='fp16'",
    "device": "write model.to(device) before the optimizer is made; data follow the model",
    "callbacks": "write MyHandler(...).attach(trainer) for each of them, or @trainer.on(Events.EPOCH_COMPLETED) for a function",
    "logger": "write attach_defaults(trainer, directory='runs/first'), which logs",
    "max_epochs": "write trainer.run(loader, max_epochs=3)",
    "max_iters": "write trainer.run(loader, max_iters=1000), which counts updates",
    "metrics": "write logs={'correct': number} in ForwardOutput, or Ignite's Accuracy().attach(evaluator, 'accuracy')",
    "loss_fn": "write forward(model, micro_batch), which returns the loss, or use "
    "create_supervised_trainer(model, optimizer, loss_fn)",
}
RUN_ARGUMENTS = {
    "val_loader": VALIDATE,
    "ckpt_path": "write trainer.run(loader, resume='must'), or with a path, or 'auto', which is the default",
    "num_epochs": "write trainer.run(loader, max_epochs=3)",
}
IMPORTS = {
    "ignite_train EarlyStopping": "write from ignite_train.handlers import EarlyStopping",
    "ignite_train.handlers WarmUpSchedule": "write from ignite_train import WarmUpSchedule",
    "ignite_train.handlers ProgressBar": "write from ignite_train.handlers import ProgressLog",
    "ignite_train LightningModule": "write create_trainer(model, optimizer, forward)",
    "ignite_train seed_everything": "write deterministic(seed) of ignite_train, or create_trainer(..., seed=0)",
    "ignite_train create_supervised_evaluator": "write create_evaluator(model, forward), the forward of the trainer",
    "ignite_train Engine": "write from ignite.engine import Engine",
    "ignite_train Accuracy": "write from ignite.metrics import Accuracy, whose metrics are attached to an evaluator",
    "ignite_train TrainerCallback": "write a function and @trainer.on(Events.EPOCH_COMPLETED), or a class with attach(trainer)",
}
RETURNED: dict[str, tuple[Callable[[nn.Module, Batch], Any], str]] = {
    "a dict": (lambda m, b: {"loss": 1}, f"forward returned {{'loss': 1}} of type dict; {RECORD}"),
    "nothing": (lambda m, b: None, f"forward returned None (is a return statement missing?); {RECORD}"),
    "a float": (lambda m, b: 3.0, f"forward returned 3.0 of type float; {RECORD}"),
    "a loss without a graph": (
        lambda m, b: loss_of(m, b).detach(),
        "the loss that forward returned has no graph; return it without .detach() or no_grad()",
    ),
    "logits": (
        lambda m, b: m(b[0]),
        "the loss that forward returned has shape (8, 2); reduce it to one number, say with .sum() beside "
        "sample_size=number of targets, or .mean() alone",
    ),
    "logits as a size": (
        lambda m, b: (loss_of(m, b), m(b[0])),
        "sample_size must be one number, forward returned a tensor of shape (8, 2)",
    ),
    "a complex log": (
        lambda m, b: ForwardOutput(loss_of(m, b), 1, {"phase": torch.ones((), dtype=torch.complex64)}),
        "logs['phase'] must be a real number, forward returned one of torch.complex64; pass its .abs() or its .real",
    ),
    "logs as a size": (
        lambda m, b: (loss_of(m, b), {"accuracy": 1}),
        "sample_size must be a number or a scalar tensor, forward returned {'accuracy': 1} of type dict",
    ),
}
WORDS += [
    (lambda n=n: getattr(make(summed)[2], n), AttributeError, f"'Trainer' object has no attribute '{n}'; {says}")
    for n, says in ATTRIBUTES.items()
]
WORDS += [
    (lambda n=n: make(summed, **{n: 1}), TypeError, f"create_trainer has no argument '{n}'; {says}")
    for n, says in ARGUMENTS.items()
]
WORDS += [
    (lambda n=n: make(summed)[2].run(DATA, **{n: 1}), TypeError, f"Trainer.run has no argument '{n}'; {says}")
    for n, says in RUN_ARGUMENTS.items()
]
WORDS += [
    (imports("from {} import {}".format(*n.split())), ImportError, "{} has no '{}'; ".format(*n.split()) + says)
    for n, says in IMPORTS.items()
]
WORDS += [(lambda f=f: make(f)[2].run(DATA), ForwardContractError, says) for f, says in RETURNED.values()]
WORDS += [
    (lambda: TimeLimit(hours=1), TypeError, "TimeLimit has no argument 'hours'; write TimeLimit(3600), in seconds"),
    (
        lambda: ModelEMA(momentum=0.1),
        TypeError,
        "ModelEMA has no argument 'momentum'; write decay=0.999, the part of the average that stays",
    ),
    (
        lambda: Validation(nn.Linear(3, 2), DATA),
        TypeError,
        "evaluator must be what create_evaluator returned, got Linear(in_features=3, out_features=2, bias=True) of type "
        "Linear; write Validation(evaluator, loader)",
    ),
    (
        lambda: make(summed, precision="bfloat16"),
        ValueError,
        "precision must be one of 'fp32', 'bf16', 'fp16', got 'bfloat16'; did you mean 'bf16'?",
    ),
    (
        lambda: make(summed)[2].run(DATA, max_epochs=1, max_iters=3),
        ValueError,
        "max_epochs and max_iters exclude each other, got 1 and 3; pass one",
    ),
    (lambda: make(summed)[2].run([]), ValueError, "data must give at least one micro-batch on some rank, got none in epoch 1"),
    (lambda: make(summed, accumulation_steps=0), ValueError, "accumulation_steps must be at least 1, got 0"),
    (
        lambda: Checkpoint("runs", score="loss").attach(make(summed)[2]),
        ValueError,
        "score='loss' needs an evaluator; pass attach(trainer, evaluator=...)",
    ),
]

PARTS = (nn.Linear(3, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), loss_of)
LOADER = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4)
LINEAR = "Linear(in_features=3, out_features=2, bias=True) of type Linear"
CREATE = "write create_trainer(model, optimizer, forward)"
EMA = "write ModelEMA(decay=0.999).attach(trainer), which averages the trainer's model"
OF_LOSS = "of a loss; write create_supervised_trainer(model, optimizer, loss_fn), or a forward that calls it"
MODEL_FIRST = "; write one whose first argument is the model and whose second is the micro-batch"
LOAD = (
    "write trainer.run(loader), which continues a run that has a Checkpoint, or load_weights(model, directory) of "
    "ignite_train.checkpoint for the weights alone"
)
ALONE = "must not be called by itself"
OPTIMIZER = "optimizer must be a torch.optim.Optimizer, or a list or a mapping of them"
SCHEDULE = "attach it: LearningRateSchedule(scheduler).attach(trainer)"
STEPS = "accumulation_steps must be a positive integer, a list of one for each epoch, or a function of the number of the update"
TO_SAVE = "to_save must be a mapping of names to objects with a state_dict"
DEFAULTS = "attach_defaults(trainer, directory='runs/first')"
PRECISIONS = {
    "16-mixed": "'fp16'",
    "fp16-mixed": "'fp16'",
    "bf16-mixed": "'bf16'",
    16: "'fp16'",
    torch.float16: "'fp16'",
    torch.bfloat16: "'bf16'",
    torch.float32: "'fp32'",
    "no": "'fp32'",
    None: "'fp32'",
    "fp8": "'bf16', since fp8 is not supported",
    "bf16-true": "'fp32' and model.to(torch.bfloat16), since 'fp32' computes in the dtypes of the model",
}
FROM_CHECKPOINT = {
    "Checkpoint": "write from ignite_train.handlers import Checkpoint",
    "ResumableLoader": "write from ignite_train import ResumableLoader",
    "save_checkpoint": SAVE,
    "load_checkpoint": LOAD,
    "ModelCheckpoint": SAVE,
}
WORDS += [
    (
        lambda p=p: make(summed, precision=p),
        ValueError,
        f"precision must be one of 'fp32', 'bf16', 'fp16', got {p!r}; write precision={says}",
    )
    for p, says in PRECISIONS.items()
]
WORDS += [
    (imports(f"from ignite_train.checkpoint import {n}"), ImportError, f"ignite_train.checkpoint has no '{n}'; {says}")
    for n, says in FROM_CHECKPOINT.items()
]


class Focal(nn.Module):
    """A loss of a user, as they are written for other libraries."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets)


class TakesAnything(nn.Module):
    """As the models of Hugging Face: all arguments have defaults."""

    def forward(self, input_ids: Any = None, labels: Any = None) -> Tensor:
        raise NotImplementedError


# What somebody passes who comes from Ignite, Lightning, Accelerate or Hugging Face.
WORDS += [
    (lambda: Trainer(*PARTS), TypeError, f"Trainer {ALONE} (missing a required argument: 'settings'); {CREATE}"),
    (
        lambda: Trainer(max_epochs=3),
        TypeError,
        f"Trainer {ALONE} (missing a required argument: 'update'); {CREATE}",
    ),
    (
        lambda: ignite_train.Evaluator(PARTS[0], loss_of),
        TypeError,
        f"Evaluator {ALONE} (missing a required argument: 'precision'); write create_evaluator(model, forward)",
    ),
    (lambda: ModelEMA(PARTS[0]), TypeError, f"decay must be a number in [0, 1), or a function, got {LINEAR}; {EMA}"),
    (lambda: ModelEMA(PARTS[0], 0.9), TypeError, f"ModelEMA takes (decay) without names, got 2 values; {EMA}"),
    (
        lambda: make(nn.CrossEntropyLoss()),
        TypeError,
        f"{CALLS}, got the parameters (input: torch.Tensor, target: torch.Tensor) -> torch.Tensor {OF_LOSS}",
    ),
    (
        lambda: make(Focal()),
        TypeError,
        f"{CALLS}, got the parameters (logits: 'Tensor', targets: 'Tensor') -> 'Tensor' {OF_LOSS}",
    ),
    (
        lambda: make(nn.CrossEntropyLoss),
        TypeError,
        f"{CALLS}, got <class 'torch.nn.modules.loss.CrossEntropyLoss'> of type type",
    ),
    (
        lambda: make(PARTS[0]),
        TypeError,
        f"{CALLS}, got one with the parameters (input: torch.Tensor) -> torch.Tensor",
    ),
    (
        lambda: make(TakesAnything()),
        TypeError,
        f"{CALLS}, got the parameters (input_ids: 'Any' = None, labels: 'Any' = None) -> 'Tensor' of a module; write a "
        "function that calls the model and returns the loss",
    ),
    (lambda: make(lambda batch, batch_idx: 0), TypeError, f"{CALLS}, got the parameters (batch, batch_idx){MODEL_FIRST}"),
    (lambda: make(lambda engine, batch: 0), TypeError, f"{CALLS}, got the parameters (engine, batch){MODEL_FIRST}"),
    (
        lambda: ResumableLoader(LOADER, batch_size=4, shuffle=True),
        TypeError,
        "dataset must be a dataset, got a DataLoader; write ResumableLoader(loader.dataset, batch_size, shuffle=True)",
    ),
    (
        lambda: ResumableLoader({"text": ["a", "b"], "label": [0, 1]}, batch_size=4, shuffle=True),
        TypeError,
        "dataset must have its samples at 0, 1, ..., got a dict with the keys ['text', 'label']; for columns write "
        "datasets.Dataset.from_dict(columns), or a list with a dict for each sample",
    ),
    (
        lambda: make(summed)[2].run((LOADER, LOADER)),
        TypeError,
        "data must be one loader of micro-batches, got a tuple of 2 loaders; for training pass one of them, for evaluation "
        "attach a Validation for each",
    ),
    (
        lambda: Validation(evaluator(), [LOADER, LOADER]),
        TypeError,
        "data must be one loader of micro-batches, got a list of 2 loaders; for training pass one of them, for evaluation "
        "attach a Validation for each",
    ),
    (
        lambda: Validation(evaluator(), None),
        TypeError,
        "data must be a loader of micro-batches, got None of type NoneType",
    ),
    (
        lambda: make(summed, optimizer=lambda *_, **__: torch.optim.SGD),
        TypeError,
        f"{OPTIMIZER}, got <class 'torch.optim.sgd.SGD'> of type type; write SGD(model.parameters(), lr=...)",
    ),
    (lambda: make(summed, accumulation_steps="4"), TypeError, f"{STEPS}, got '4' of type str"),
    (lambda: make(summed, accumulation_steps={0: 4, 5: 2}), TypeError, f"{STEPS}, got {{0: 4, 5: 2}} of type dict"),
    (
        lambda: make(summed, compile="reduce-overhead"),
        TypeError,
        "compile must be a bool or a mapping of torch.compile's options, or 'update', got 'reduce-overhead' of type str; write "
        "compile={'mode': 'reduce-overhead'}",
    ),
    (
        lambda: supervised(loss_of),
        TypeError,
        f"loss_fn must be callable as loss_fn(y_pred, y), got {loss_of!r:.60} of type function, whose first parameter is a "
        "model; write create_trainer(model, optimizer, forward)",
    ),
    (
        lambda: supervised(cross_entropy, model_transform="logits"),
        TypeError,
        "model_transform must be a function, got 'logits' of type str",
    ),
    (
        lambda: supervised(cross_entropy, device="gpu"),
        ValueError,
        "device must be a device of torch, such as 'cuda', got 'gpu' of type str; leave it out, and data follow the model",
    ),
    (
        lambda: Checkpoint("runs", to_save=PARTS[0]),
        TypeError,
        f"{TO_SAVE}, got {LINEAR}; the model, its optimizer and handlers are saved without it",
    ),
    (
        lambda: Checkpoint("runs", keep_best=3),
        ValueError,
        "keep_best must be left out without a score, got 3; write score='loss', say, beside it",
    ),
    (
        lambda: Checkpoint("runs", mode="min"),
        ValueError,
        "mode must be left out without a score, got 'min'; write score='loss', say, beside it",
    ),
    (
        lambda: attach_defaults("runs", directory="runs"),
        TypeError,
        f"trainer must be what create_trainer returned, got 'runs' of type str; write {DEFAULTS}",
    ),
    (
        lambda: attach_defaults(make(summed)[2], "runs"),
        TypeError,
        f"attach_defaults takes (trainer) without names, got 2 values; write {DEFAULTS}",
    ),
    (
        lambda: attach_defaults(make(summed)[2], directory="runs", leave_out=None),
        TypeError,
        "leave_out must be a sequence of names, got None",
    ),
    (
        lambda: ProgressLog.attach(make(summed)[2]),
        TypeError,
        "attach must be called on a handler, got the class ProgressLog; write ProgressLog(...).attach(trainer)",
    ),
]


class Unlabelled:
    """A dataset of a class of its own."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(3)


def batches() -> Any:
    yield from DATA


def ended(loader: Any, **limits: int) -> Callable[[], Any]:
    return lambda: make(summed)[2].run(loader, **limits)


DATASET, UNLABELLED = TensorDataset(torch.ones(8, 3)), Unlabelled()
LOOSE = DataLoader(DATASET, batch_size=16, drop_last=True)
ITS_BATCH = "; drop_last=True leaves out a batch that is not full: pass drop_last=False, or a batch_size below 16"
LOADER_NEEDED = "data must be a loader of micro-batches, got"
ITS_ROWS = "; write DataLoader(data, batch_size=32), list(data) if its rows are micro-batches, or [data] if it is one"
CALLED = "; call it, and pass what it returns"
AN_EVENT = "event must be one registered on this Trainer, got"
EVENT_WORDS = {
    "on_epoch_end": "Events.EPOCH_COMPLETED",
    "on_train_epoch_start": "Events.EPOCH_STARTED",
    "on_train_batch_end": "Events.ITERATION_COMPLETED",
    "on_step_begin": "Events.ITERATION_STARTED",
    "on_train_start": "Events.STARTED",
    "on_fit_end": "Events.COMPLETED",
    "on_exception": "Events.EXCEPTION_RAISED",
    "on_before_optimizer_step": "TrainEvents.GRADIENTS_REDUCED",
    "on_after_backward": "TrainEvents.BACKWARD_COMPLETED",
}
# What is passed as data, or as an event.
WORDS += [
    (
        lambda: make(summed)[2].run(DATASET),
        TypeError,
        f"{LOADER_NEEDED} {DATASET!r:.60} of type TensorDataset; write DataLoader(dataset, batch_size=32)",
    ),
    (
        lambda: Validation(evaluator(), UNLABELLED),
        TypeError,
        f"{LOADER_NEEDED} {UNLABELLED!r:.60} of type Unlabelled; write DataLoader(dataset, batch_size=32)",
    ),
    (lambda: make(summed)[2].run(torch.ones(2)), TypeError, f"{LOADER_NEEDED} tensor([1., 1.]) of type Tensor{ITS_ROWS}"),
    (lambda: evaluator().run(np.ones(2)), TypeError, f"{LOADER_NEEDED} array([1., 1.]) of type ndarray{ITS_ROWS}"),
    (lambda: make(summed)[2].run(batches), TypeError, f"{LOADER_NEEDED} {batches!r:.60} of type function{CALLED}"),
    (lambda: make(summed)[2].run(DataLoader), TypeError, f"{LOADER_NEEDED} {DataLoader!r:.60} of type type{CALLED}"),
    (lambda: make(summed)[2].run(PARTS[0]), TypeError, f"{LOADER_NEEDED} {LINEAR}"),
    (
        lambda: make(summed)[2].run(LOADER, LOADER),
        TypeError,
        f"max_epochs must be a positive integer, got {LOADER!r:.60} of type DataLoader; for validation data attach "
        "Validation(evaluator, loader)",
    ),
    (
        ended(LOOSE, max_epochs=1),
        ValueError,
        f"data must give at least one micro-batch on some rank, got none in epoch 1{ITS_BATCH}",
    ),
    (
        ended(LOOSE, max_epochs=1, epoch_length=2),
        ValueError,
        "data ended after 0 updates of max_epochs=1; pass a loader that gives micro-batches on each rank; without epoch_length "
        f"a rank may have none, got one that gives nothing (DataLoader){ITS_BATCH}",
    ),
    (
        lambda: evaluator().run(LOOSE),
        ValueError,
        f"data must hold at least one sample on some rank, got none: Σsample_size is 0{ITS_BATCH}",
    ),
]
WORDS += [
    (lambda n=n: make(summed)[2].add_event_handler(n, print), ValueError, f"{AN_EVENT} {n!r}; write {says}")
    for n, says in EVENT_WORDS.items()
]
WORDS += [
    (
        lambda: TrainEvents.ITERATION_COMPLETED,  # type: ignore[attr-defined]
        AttributeError,
        "TrainEvents has no event 'ITERATION_COMPLETED'; write Events.ITERATION_COMPLETED of ignite.engine",
    ),
    (
        lambda: TrainEvents.GRADIENT_REDUCED,  # type: ignore[attr-defined]
        AttributeError,
        "TrainEvents has no event 'GRADIENT_REDUCED'; did you mean 'GRADIENTS_REDUCED'?",
    ),
    (
        lambda: make(summed)[2].add_event_handler(Events.STARTED, EarlyStopping(evaluator(), patience=1)),
        TypeError,
        "handler must not be of the class EarlyStopping, which attaches itself to the events that it needs; use "
        "EarlyStopping(...).attach(trainer)",
    ),
]

WORDS += [
    (
        lambda: make(summed)[2].total_updates(DATA, epochs=3),  # type: ignore[call-arg]
        TypeError,
        "Trainer.total_updates has no argument 'epochs'; write trainer.total_updates(loader, max_epochs=3)",
    ),
    (
        lambda: ResumableLoader(DATA, 8, True),  # type: ignore[misc]
        TypeError,
        "ResumableLoader takes (dataset, batch_size) without names, got 3 values; write "
        "ResumableLoader(dataset, batch_size=8, shuffle=True)",
    ),
    (
        lambda: UpdateOutput(1.0, 1, 1.0).item(),  # type: ignore[attr-defined]
        AttributeError,
        "'UpdateOutput' object has no attribute 'item'; write state.update_output.loss, a plain number",
    ),
    (
        lambda: UpdateOutput(1.0, 1, 1.0).outputs,  # type: ignore[attr-defined]
        AttributeError,
        "'UpdateOutput' object has no attribute 'outputs'; write attach_metric(trainer, metric, name) for a metric of "
        "predictions, or read state.forward_output.outputs in TrainEvents.FORWARD_COMPLETED",
    ),
    (
        lambda: StopOnSignal("SIGTERM"),  # type: ignore[arg-type]
        TypeError,
        "signals must be a sequence of signals, got 'SIGTERM' of type str; pass (signal.SIGTERM,), say",
    ),
    (
        lambda: StopOnSignal(["SIGTERM"]),  # type: ignore[list-item]
        TypeError,
        "signals must be a sequence of signals, got ['SIGTERM'] of type list; pass (signal.SIGTERM,), say",
    ),
]


def test_a_scheduler_is_no_optimizer() -> None:
    """Lightning's `configure_optimizers` returns both."""
    scheduler = torch.optim.lr_scheduler.StepLR(PARTS[1], 1)
    for given, name in ((scheduler, OPTIMIZER), ((PARTS[1], scheduler), r"optimizer\[1\] must be a torch.optim.Optimizer")):
        says = rf"^{name}, got .* of type StepLR; {re.escape(SCHEDULE)}$"
        assert_one_line((TypeError, says, lambda given=given: create_trainer(PARTS[0], given, loss_of)))


class Objective(nn.Module):
    """A loss with weights of its own, and with the model as an argument."""

    def forward(self, model: nn.Module, batch: Batch, state: Any) -> Tensor:
        assert state.iteration >= 0
        return loss_of(model, batch)


def test_a_module_may_be_the_forward() -> None:
    """If it takes the model and a micro-batch; a third parameter is the state, as in a function."""
    assert make(Objective())[2].run(DATA).num_steps == 2


@pytest.mark.parametrize(("mistake", "error", "line"), WORDS, ids=[line[:60] for _, _, line in WORDS])
def test_a_word_of_another_library(
    mistake: Callable[[], Any], error: type[Exception], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that is printed says what to write here."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        mistake()
    assert str(raised.value) == line


def test_the_table_of_words_is_sound() -> None:
    """In one place each word has one answer, and none is an argument or an attribute that exists."""
    for place, rows in OTHER_WORDS.items():
        words = [word for text in rows.values() for word in text.split()]
        assert len(words) == len({*words}), place
    attributes = {name for text in OTHER_WORDS["Trainer"].values() for name in text.split()}
    assert attributes.isdisjoint(dir(make(summed)[2]))
    for module in (ignite_train, handlers):
        assert {name for text in OTHER_WORDS["import"].values() for name in text.split()}.isdisjoint(module.__all__)


def test_a_gradient_that_is_read_after_the_update() -> None:
    """The error of Python says nothing of when gradients are there; a note does."""
    model, _, trainer = make(summed)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: model.weight.grad.norm())
    with pytest.raises(AttributeError, match="'NoneType'") as raised:
        trainer.run(DATA)
    (note,) = raised.value.__notes__
    assert "gradients are cleared at the end of an update; read trainer.gradients() in TrainEvents.GRADIENTS_READY" in note
    _, _, trainer = make(summed)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: None.norm())  # type: ignore[attr-defined]
    with pytest.raises(AttributeError) as raised:
        trainer.run(DATA)
    assert not hasattr(raised.value, "__notes__")


def test_a_metric_that_nothing_has_published() -> None:
    """The error of Python has its name alone; a note says which handler publishes it."""
    trainer = make(summed)[2]
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda one: one.state.metrics["loss"])
    with pytest.raises(KeyError, match="loss") as raised:
        trainer.run(DATA)
    (note,) = raised.value.__notes__
    assert "TrainingMetrics" in note
    assert "state.update_output.loss" in note
    trainer = make(summed)[2]
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: {}["loss"])
    with pytest.raises(KeyError) as raised:
        trainer.run(DATA)
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("engine", ["trainer", "evaluator"])
@pytest.mark.parametrize("event", [Events.STARTED, Events.STARTED(every=2), Events.STARTED | Events.COMPLETED], ids=type)
def test_a_handler_of_another_signature(engine: str, event: Any) -> None:
    """Ignite's error speaks of a call without arguments, which it tries last; a note names both ways."""
    given = make(summed)[2] if engine == "trainer" else evaluator()
    with pytest.raises(ValueError, match="will be called with") as raised:
        given.add_event_handler(event, lambda trainer, batch: None)
    (note,) = raised.value.__notes__
    assert note.startswith("a handler is called as handler(engine), or as handler() where it takes nothing")


READERS: dict[str, Callable[[Any], Any]] = {
    "TerminateOnNan": lambda engine: engine.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan()),
    "RunningAverage": lambda engine: RunningAverage(output_transform=lambda x: x).attach(engine, "average"),
    "Average": lambda engine: Average().attach(engine, "average"),
    "Loss": lambda engine: Loss(cross_entropy).attach(engine, "loss of Ignite"),
    "MeanSquaredError": lambda engine: MeanSquaredError().attach(engine, "error"),
    "own": lambda engine: engine.add_event_handler(Events.ITERATION_COMPLETED, lambda one: one.state.output + 1),
}


@pytest.mark.parametrize("name", READERS)
def test_what_reads_a_number_from_the_record(name: str) -> None:
    """A note says how a number of it is read."""
    trainer = make(summed)[2]
    READERS[name](trainer)
    with pytest.raises(TypeError) as raised:
        trainer.run(DATA)
    (note,) = raised.value.__notes__
    assert note.startswith("state.output is the record of the update here")
    assert "output_transform=lambda output: output.loss" in note
    assert "attach_metric" in note
    assert ("in place of TerminateOnNan write nothing: a loss or" in note) == (name == "TerminateOnNan")


# --- handlers that do nothing, or everything twice --------------------------------------------------------------------------


def test_a_handler_that_was_never_attached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is named when a run ends, once, also where nothing holds it any more; one that is attached is not."""
    Checkpoint(tmp_path / "never")
    lost = Validation(evaluator(), DATA)
    trainer = make(summed)[2]
    TrainingMetrics().attach(trainer)
    with pytest.raises(TypeError):
        Checkpoint("runs", bananas=3)
    trainer.run(DATA)
    assert [record.message for record in caplog.records] == [
        "Checkpoint, Validation: made and not attached to a trainer, without which a handler does nothing; call "
        "Checkpoint(...).attach(trainer)"
    ]
    caplog.clear()
    make(summed)[2].run(DATA)
    assert not caplog.records
    assert lost.best is None


def test_defaults_are_attached_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second time would print each line twice, and divide the interval between two `TrainingMetrics`."""
    trainer = make(summed)[2]
    attach_defaults(trainer, directory=tmp_path)
    says = r"trainer must have TrainingMetrics once, got those of attach_defaults.*leave_out=\('training_metrics', 'progress'\)"
    assert_one_line((ValueError, says, lambda: attach_defaults(trainer, directory=tmp_path)))
    trainer, says = make(summed)[2], says.replace(" 'progress'", "")
    TrainingMetrics(perplexity=True).attach(trainer)
    assert_one_line((ValueError, says, lambda: attach_defaults(trainer, directory=tmp_path)))
    attach_defaults(trainer, directory=tmp_path, leave_out=("training_metrics", "progress"))
    trainer.run(DATA)
    assert not caplog.records


@pytest.mark.parametrize(("number", "expected"), [("2", 1), ("1", 0), (None, 0)])
def test_processes_of_torchrun_that_train_alone_are_told(
    number: str | None, expected: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a process group each trained a model of its own, and with a Checkpoint one did nothing."""
    if number is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("WORLD_SIZE", number)
    make(summed)[2].run(DATA)
    assert caplog.text.count("and this one trains a model of its own, without a process group") == expected


# --- what was found late ----------------------------------------------------------------------------------------------------


def scored(attach: Callable[[Trainer, Any], Any], data: Any = DATA) -> tuple[Trainer, Any]:
    """A trainer with a validation, and what `attach` adds; its forward must not be reached."""
    trainer = make(lambda m, b: pytest.fail("the first batch was reached"))[2]
    one = evaluator()
    attach(trainer, one)
    Validation(one, data).attach(trainer)
    return trainer, one


MISSPELT: dict[str, Callable[[Trainer, Any], Any]] = {
    "EarlyStopping": lambda trainer, one: EarlyStopping(one, "los", patience=2, mode="min").attach(trainer),
    "Checkpoint": lambda trainer, one: Checkpoint("runs", score="los", mode="min").attach(trainer, evaluator=one),
    "Validation": lambda trainer, _: Validation(evaluator(), DATA, score="los", mode="min").attach(trainer),
}


@pytest.mark.parametrize("kind", MISSPELT)
def test_a_misspelt_score(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rehearsal with one micro-batch, before the first batch; the note says how to leave it out."""
    monkeypatch.chdir(tmp_path)
    trainer, _ = scored(MISSPELT[kind])
    with pytest.raises(ValueError, match="score must be one of the evaluator's metrics") as raised:
        trainer.run(DATA)
    assert str(raised.value) == "score must be one of the evaluator's metrics ['loss'], got 'los'; did you mean 'loss'?"
    assert raised.value.__notes__ == [
        "this was a rehearsal with 1 micro-batches before the first update; Validation(sanity=0) leaves it out"
    ]


def test_a_broken_evaluation() -> None:
    """Of a held-out set with other columns, say."""
    trainer, _ = scored(lambda trainer, one: None, [(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))])
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        trainer.run(DATA)


def rehearsed(sanity: int) -> tuple[Tensor, list[Any]]:
    torch.manual_seed(3)
    model, _, trainer = make(summed)
    loader = DataLoader(TensorDataset(torch.randn(32, 3), torch.arange(32) % 2), batch_size=8, shuffle=True)
    one, seen = evaluator(), []
    one.add_event_handler(Events.COMPLETED, lambda engine: engine.state.metrics.update(late=seen.append(engine) or 1.0))
    Validation(one, loader, score="late", mode="min", sanity=sanity).attach(trainer)
    trainer.run(loader, max_epochs=2)
    return model.weight.detach(), [torch.rand(2), len(seen)]


def test_a_rehearsal_leaves_no_trace() -> None:
    """Weights, the order of shuffled data and random numbers are those of a run without one, and the score may come later."""
    (with_one, left), (without, left_without) = rehearsed(1), rehearsed(0)
    assert torch.equal(with_one, without)
    assert torch.equal(left[0], left_without[0])
    assert left[1] == left_without[1] == 2
    model, _, trainer = make(summed)
    validation = Validation(create_evaluator(model, summed), iter(DATA))
    validation.attach(trainer)
    trainer.run(DATA)
    assert validation.evaluator.state.iteration == 2, "an iterator is not begun by a rehearsal"


def test_an_evaluator_that_nothing_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said before the first batch, unless a function of the script's may run it."""
    says = (
        "Checkpoint, EarlyStopping, ProgressLog: given an evaluator that no handler runs; attach Validation(evaluator, loader)"
        ", unless the script runs it between two runs"
    )
    for number, own in enumerate((None, lambda: None)):
        _, _, trainer = make(summed)
        one = evaluator()
        attach_defaults(trainer, directory=tmp_path / "log", evaluator=one)
        Checkpoint(tmp_path / str(number), score="loss").attach(trainer, evaluator=one)
        EarlyStopping(one, patience=3).attach(trainer)
        if own is not None:
            trainer.add_event_handler(Events.EPOCH_COMPLETED, own)
        caplog.clear()
        trainer.run(DATA)
        assert [record.message for record in caplog.records if "given an evaluator that no" in record.message] == (
            [says] if own is None else []
        )


def test_a_directory_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known when a handler is made, and not when the first numbers are due."""
    file = tmp_path / "file"
    file.touch()
    for name, mistake in (
        ("directory", lambda path: attach_defaults(make(summed)[2], directory=path)),
        ("directory", Checkpoint),
        ("log_dir", TensorBoard),
        ("the directory of path", lambda path: JsonLines(path / "metrics.jsonl")),
    ):
        says = rf"^{name} must be a directory, or not exist yet, got the file '.*file'$"
        assert_one_line((ValueError, says, lambda mistake=mistake: mistake(file)))
        says = rf"^{name} must be a directory, or not exist yet, got '.*file/below.*', where '.*file' is a file$"
        assert_one_line((ValueError, says, lambda mistake=mistake: mistake(file / "below")))
        with monkeypatch.context() as patch:
            patch.setattr("os.access", lambda path, _: path != tmp_path)
            says = rf"^{name} must be .*, got '.*new', where '{tmp_path}' may not be written to$"
            assert_one_line((ValueError, says, lambda mistake=mistake: mistake(tmp_path / "new")))


@pytest.mark.parametrize("name", [name for name in inspect.signature(create_trainer).parameters if name != "model"])
def test_what_a_trainer_was_made_with_cannot_be_set(name: str) -> None:
    """An assignment did nothing; reading is answered as any attribute that there is not, and neither is offered."""
    trainer = make(summed)[2]
    read = f"'Trainer' object has no attribute '{name}'"
    for attempt in (lambda: getattr(trainer, name), lambda: setattr(trainer, name, 1)):
        with pytest.raises(AttributeError, match=read) as raised:
            attempt()
        assert "\n" not in str(raised.value)
    assert str(raised.value).endswith("; a trainer keeps what it was made with: make another by create_trainer to change that")
    assert name not in dir(trainer)
    trainer.note_of_mine = 1  # what the script keeps there by itself
    assert trainer.note_of_mine == 1
