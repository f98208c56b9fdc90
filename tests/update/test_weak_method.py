"""Methods that are called without keeping their object alive."""

from __future__ import annotations

import gc
import weakref

import torch

from ignite_train.update.weak_method import WeakMethod

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
