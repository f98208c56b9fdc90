"""Methods that are called without keeping their object alive."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ignite_train import ForwardOutput, NonFiniteError, Trainer, create_trainer
from ignite_train.update.weak_method import WeakMethod
from update_options import with_options

X = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 0.5]])


class Owner:
    """Has a part that calls it."""

    def __init__(self, number: int) -> None:
        self.number, self.part = number, WeakMethod(self.plus)

    def plus(self, one: int, *, other: int = 0) -> int:
        return self.number + one + other


def test_the_object_is_freed_at_once() -> None:
    """Without the garbage collector."""
    gc.disable()
    try:
        owner = Owner(3)
        alive = weakref.ref(owner)
        assert owner.part(4, other=5) == 12
        del owner
        assert alive() is None
    finally:
        gc.enable()


def test_a_deep_copy_calls_the_copy() -> None:
    """Also when the original is gone."""
    original = Owner(3)
    copied = copy.deepcopy(original)
    copied.number = 30
    assert (original.part(1), copied.part(1)) == (4, 31)
    del original
    assert copied.part(1) == 31


class Twice(torch.optim.SGD):
    """Steps, evaluates the loss there, and steps once more."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        torch.enable_grad()(closure)()  # type: ignore[no-untyped-call]
        super().step()


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def make(**settings: Any) -> tuple[Trainer, nn.Linear]:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    return create_trainer(model, Twice(model.parameters(), lr=0.01), forward, **with_options(**settings)), model


@pytest.mark.parametrize("closure", [True, "replay"], ids=str)
def test_a_copy_of_a_trainer_evaluates_its_own_model(closure: Any) -> None:
    """Each time that the optimizer asks; and leaves the model of the original alone."""
    expected, model = make(closure=closure)
    expected.run([X] * 3)
    trainer, original = make(closure=closure)
    copied = copy.deepcopy(trainer)
    copied.run([X] * 3)
    own: Any = copied.model
    assert torch.equal(own.weight, model.weight)
    assert not torch.equal(own.weight, original.weight)
    assert original.weight.grad is None


def test_a_copy_of_a_trainer_searches_its_own_model() -> None:
    """For what is not finite: the error names it."""
    trainer, _ = make(closure=True)
    copied = copy.deepcopy(trainer)
    own: Any = copied.model
    own.bias.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="micro-batch 1 of 1: NaN in the output of the model"):
        copied.run([X])
