"""Mistakes of forward and of handlers that training would carry on with: each is noticed in the first update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from ignite_train import (
    ForwardContractError,
    ForwardOutput,
    GradientAccessError,
    Trainer,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
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
    nn.utils.clip_grad_norm_(trainer._update.model.parameters(), 0.1)  # type: ignore[attr-defined]


def add_noise(trainer: Trainer) -> None:
    for parameter in trainer._update.model.parameters():  # type: ignore[attr-defined]
        parameter.grad = parameter.grad + 0.1


EVENTS = {
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


def test_nothing_is_left_of_the_first_look() -> None:
    """From the second forward on it is the user's that is called."""
    _, _, trainer = make(summed)
    trainer.run(DATA[:1])
    assert trainer._update.forward is summed  # type: ignore[attr-defined]


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
