"""A forward that reads the record of the update before: it never finds that of its own update, whatever happens to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

from ignite_train import ForwardOutput, NonFiniteError, Trainer, TrainEvents, TrainState, UpdateOptions, create_trainer


class StopError(Exception):
    """Breaks an update off."""


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1).double()


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(5)]


def weighted(model: nn.Module, x: Tensor, before: float | None) -> Tensor:
    """The loss, weighted by the loss of the update before."""
    return (1.0 if before is None else 1.0 / (1.0 + before)) * model(x).square().sum()  # type: ignore[no-any-return]


def made(model: nn.Module, optimizer: Any, **options: Any) -> tuple[Trainer, list[tuple[float | None, Any]]]:
    """A trainer, and what its forward has found: the loss of the record, and `state.output`."""
    found: list[tuple[float | None, Any]] = []

    def forward(model: nn.Module, x: Tensor, state: TrainState) -> ForwardOutput:
        before = None if state.update_output is None else state.update_output.loss
        found.append((before, state.output))
        return ForwardOutput(weighted(model, x, before), len(x))

    arguments = {"output_transform": lambda record: record.loss, "options": UpdateOptions(**options)}
    return create_trainer(model, optimizer, forward, **arguments), found


def by_hand(make: Callable[..., Any]) -> tuple[nn.Module, list[float]]:
    """The weights, and the loss of each update."""
    model, losses = network(), list[float]()
    optimizer = make(model.parameters())
    for x in samples():
        before, of_evaluations = losses[-1] if losses else None, list[float]()

        def closure(x: Tensor = x, before: float | None = before, seen: list[float] = of_evaluations) -> Tensor:
            optimizer.zero_grad()
            loss = weighted(model, x, before) / len(x)
            loss.backward()
            seen.append(float(loss.detach()))
            return loss

        optimizer.step(closure)
        losses.append(of_evaluations[0])
    return model, losses


def check_run(model: nn.Module, trainer: Trainer, make: Callable[..., Any]) -> None:
    reference, losses = by_hand(make)
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-12, atol=1e-12)
    assert trainer.state.update_output is not None
    assert trainer.state.update_output.loss == trainer.state.output == pytest.approx(losses[-1], rel=1e-12)


def steepest(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1)


def quasi_newton(parameters: Any) -> LBFGS:
    return LBFGS(parameters, lr=0.1, max_iter=3)


@pytest.mark.parametrize("event", [TrainEvents.GRADIENTS_REDUCED, TrainEvents.GRADIENTS_READY])
def test_an_update_that_is_repeated_finds_the_record_of_the_update_before(event: TrainEvents) -> None:
    """After an error the record and `state.output` are those of before the update."""
    model = network()
    trainer, found = made(model, steepest(model.parameters()))
    errors = [StopError()]

    def stop() -> None:
        if trainer.state.iteration == 3 and errors:
            raise errors.pop()

    trainer.add_event_handler(event, stop)
    with pytest.raises(StopError):
        trainer.run(samples())
    assert trainer.state.update_output is not None
    assert (trainer.state.update_output.loss, trainer.state.output) == found[2]
    trainer.run(samples())
    check_run(model, trainer, steepest)


@pytest.mark.parametrize("closure", [True, "replay"])
@pytest.mark.parametrize("reduces", [False, True], ids=["alone", "with a handler of GRADIENTS_REDUCED"])
def test_each_evaluation_finds_the_record_of_the_update_before(closure: Any, reduces: bool) -> None:
    """The record of the running update is there again after the step."""
    model = network()
    trainer, found = made(model, quasi_newton(model.parameters()), closure=closure)
    if reduces:
        trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, lambda: None)
    trainer.run(samples())
    check_run(model, trainer, quasi_newton)
    assert len(found) > len(set(found)) == 5


def test_an_update_that_is_not_finite_leaves_the_record_of_the_update_before() -> None:
    """The search for the cause runs forward on that record too, and a caught error does not spoil the updates after it."""
    model = network()
    trainer, found = made(model, steepest(model.parameters()))
    first, *others = samples()
    with trainer.session():
        trainer.update([first])
        with pytest.raises(NonFiniteError, match="micro-batch itself"):
            trainer.update([first * torch.nan])
        assert found[1] == found[2]  # the update, and the search
        for x in others:
            trainer.update([x])
    check_run(model, trainer, steepest)
