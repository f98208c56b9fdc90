"""A step that raises half way has moved parameters: it counts, it is not made again, and the error says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from ignite_train import ForwardOutput, Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.fast import direct_step
from tiers import accelerated

UPDATES, BROKEN = 4, 3

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.05),
    "foreach": lambda p: Adam(p, lr=0.05, foreach=True),
    "fused": lambda p: AdamW(p, lr=0.05, fused=True),
    "sgd": lambda p: SGD(p, lr=0.05),
    "fused sgd": lambda p: SGD(p, lr=0.05, fused=True),
    "fused momentum": lambda p: SGD(p, lr=0.05, momentum=0.5, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.05),
}


class StopError(Exception):
    """Raised once."""


class Once:
    """Raises at its call of this number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *_: Any) -> None:
        self.number -= 1
        if self.number == 0:
            raise StopError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def run(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(1)
    trainer.run([torch.randn(4, 3, generator=generator) for _ in range(2 * UPDATES)], max_epochs=1)


def weights(model: nn.Module) -> list[list[float]]:
    return [parameter.tolist() for parameter in model.parameters()]


def undisturbed(make: Callable[[nn.Module], Any], **arguments: Any) -> list[list[float]]:
    model = network()
    run(create_trainer(model, make(model), forward, accumulation_steps=2, **arguments))
    return weights(model)


def broken(model: nn.Module, optimizer: Any, **arguments: Any) -> tuple[Trainer, BaseException]:
    """A run that is broken off, and run again to its end."""
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, **arguments)
    with pytest.raises((StopError, torch.OutOfMemoryError)) as caught:
        run(trainer)
    counters = trainer.state.iteration, trainer.state.num_steps, trainer.state.num_micro_batches
    assert counters[0] == counters[1]
    assert counters[2] == 2 * counters[0]
    run(trainer)
    assert (trainer.state.iteration, trainer.state.num_steps, trainer.state.num_micro_batches) == (UPDATES, UPDATES, 8)
    return trainer, caught.value


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


@pytest.mark.parametrize("update", [1, BROKEN])
@pytest.mark.parametrize("where", ["pre", "post"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_that_raises(kind: str, where: str, update: int) -> None:
    """Before the step nothing has moved, and it is made; after it all has, and it is not made again. The bits are the same."""
    model = network()
    optimizer = KINDS[kind](model.parameters())
    if where == "pre":
        optimizer.register_step_pre_hook(Once(update))
    else:
        optimizer.register_step_post_hook(Once(update))
    _, error = broken(model, optimizer)
    # A pre-hook has the factor multiplied in before the step, which rounds otherwise than inside of a fused kernel.
    reference = network()
    other = KINDS[kind](reference.parameters())
    if where == "pre":
        other.register_step_pre_hook(lambda *_: None)
    run(create_trainer(reference, other, forward, accumulation_steps=2))
    assert weights(model) == weights(reference)
    assert ("optimizer raised when it had moved parameters" in notes(error)) == (where == "post")


class Raising(SGD):
    """A step of the user's own, which fails when it is done."""

    once = Once(BROKEN)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.once()


class IntoData(Optimizer):
    """Writes where no version counts, the last parameter first, and fails half way."""

    def __init__(self, parameters: Any, once: Once) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.once = once

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for index, parameter in enumerate(reversed(self.param_groups[0]["params"])):
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad, alpha=0.05)
            if index == 1:
                self.once()


def test_a_step_of_ones_own() -> None:
    """It has moved all parameters."""
    model = network()
    optimizer = Raising(model.parameters(), lr=0.05)
    optimizer.once = Once(BROKEN)
    broken(model, optimizer)
    assert weights(model) == undisturbed(lambda model: SGD(model.parameters(), lr=0.05))


@pytest.mark.parametrize("update", [1, 2, 3])
def test_a_step_that_shows_in_no_version(update: int) -> None:
    """Its first steps are watched by value, and later ones count once they were entered."""
    model = network()
    trainer = create_trainer(model, IntoData(model.parameters(), Once(update)), forward, accumulation_steps=2)
    with pytest.raises(StopError) as caught:
        run(trainer)
    assert (trainer.state.iteration, trainer.state.num_steps) == (update, update)
    assert "a part of this update's step was made" in notes(caught.value)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("where", ["pre", "post"])
def test_the_second_of_two_optimizers(where: str, fused: bool) -> None:
    """The first one has stepped, so the update is not made again; the error says which have stepped and which have not."""
    model = network()
    first, second = AdamW(model[0].parameters(), fused=fused), SGD(model[2].parameters(), lr=0.1, fused=fused)  # type: ignore[index]
    before = weights(model)
    if where == "pre":
        second.register_step_pre_hook(Once(1))
    else:
        second.register_step_post_hook(Once(1))
    trainer = create_trainer(model, {"first": first, "second": second}, forward, accumulation_steps=2)
    with pytest.raises(StopError) as caught:
        run(trainer)
    assert trainer.state.num_steps == 1
    moved = [one != other for one, other in zip(before, weights(model), strict=True)]
    assert moved == [True, True, where == "post", where == "post"]
    second_did = "raised when it had moved parameters" if where == "post" else "made no step"
    assert f"optimizer['first'] made its step, optimizer['second'] {second_did}; the update counts" in notes(caught.value)


@accelerated
def test_an_interrupt_right_behind_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is called directly counts from its call on: an interrupt comes as soon as it has returned."""
    undisturbed(lambda model: KINDS["fused sgd"](model.parameters()))  # makes the trial, whose calls are not to be counted
    model = network()
    trainer = create_trainer(model, KINDS["fused sgd"](model.parameters()), forward, accumulation_steps=2)
    make, interrupt = direct_step._make, Once(BROKEN)

    def call(*arguments: Any) -> None:
        make(*arguments)
        if trainer.state.iteration > 0:
            interrupt()

    monkeypatch.setattr(direct_step, "_make", call)
    with pytest.raises(StopError) as caught:
        run(trainer)
    assert trainer.state.iteration == trainer.state.num_steps > 0
    assert "optimizer raised when it had moved parameters" in notes(caught.value)
    run(trainer)
    assert weights(model) == undisturbed(lambda model: KINDS["fused sgd"](model.parameters()))


def test_a_first_step_that_runs_out_of_memory() -> None:
    """Its half of the moments is dropped, so that the step can be made again; and a note says what to do."""

    class Large(AdamW):
        once = Once(1)

        def _init_group(self, group: Any, *lists: Any) -> Any:
            result = super()._init_group(group, *lists)
            self.once.number -= 1
            if self.once.number == 0:
                del self.state[group["params"][-1]]["exp_avg"]
                raise torch.OutOfMemoryError("CUDA out of memory")
            return result

    model = network()
    _, error = broken(model, Large(model.parameters(), lr=0.05))
    assert "ran out of memory in its step" in notes(error)
    assert "half" not in notes(error)
    assert weights(model) == undisturbed(lambda model: AdamW(model.parameters(), lr=0.05))


def test_a_closure_is_put_back_as_a_whole() -> None:
    """Its parameters and moments are copies before the step, so there is no half of it: the step is made again."""
    options = UpdateOptions(closure=True)
    model = network()
    optimizer = KINDS["adamw"](model.parameters())
    optimizer.register_step_post_hook(Once(BROKEN))
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, options=options)
    with pytest.raises(StopError) as caught:
        run(trainer)
    assert (trainer.state.num_steps, notes(caught.value)) == (BROKEN - 1, "")
    run(trainer)
    assert weights(model) == undisturbed(lambda model: KINDS["adamw"](model.parameters()), options=options)


def test_statistics_of_an_update_that_is_made_again_move_once() -> None:
    """Those of BatchNorm are copied where an update may be skipped, and put back with it."""
    ends = []
    for number in (BROKEN, 0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        options = UpdateOptions(on_nonfinite="skip")
        trainer = create_trainer(model, SGD(model.parameters(), lr=0.05), forward, accumulation_steps=2, options=options)
        trainer.add_event_handler(TrainEvents.GRADIENTS_READY, Once(number))
        if number:
            with pytest.raises(StopError):
                run(trainer)
        run(trainer)
        ends.append({name: value.tolist() for name, value in model.state_dict().items()})
    assert ends[0] == ends[1]
    assert ends[0]["1.num_batches_tracked"] == 2 * UPDATES


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [1e-30, 1e-40, 1e36])
def test_a_factor_that_float32_cannot_hold(size: float, fused: bool) -> None:
    """The mean is that of losses and sample sizes that are not so small or so large."""

    def scaled(factor: float) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double() if not fused else nn.Linear(3, 1)
        optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
        # Gradients are of the size of one: only what they are divided by is extreme.
        trainer = create_trainer(
            model, optimizer, lambda m, x: ForwardOutput(m(x).square().sum() * factor, len(x) * factor), max_grad_norm=1.0
        )
        x = torch.ones(4, 3)
        trainer.run([x.double() if not fused else x], max_epochs=1)
        return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]

    assert scaled(size) == pytest.approx(scaled(1.0), rel=1e-2)
