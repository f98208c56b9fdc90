"""A learning-rate schedule with a warm-up and one of the usual shapes after it."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.arguments import describe, one_of, positive_int, real_number

__all__ = ["WarmUpSchedule"]

_SHAPES = ("cosine", "linear", "inverse_square_root", "constant")


class WarmUpSchedule(LRScheduler):
    """A scheduler of torch: the rate rises linearly for `warm_up` updates and then follows `shape`.

    The rate of each group is its `lr` times a factor. After n updates, in update n + 1:

    - in the warm-up, n < `warm_up`: (n + 1) / (`warm_up` + 1);
    - `"cosine"`: `final` + (1 - `final`) · (1 + cos(π p)) / 2 with p = (n - `warm_up`) / (`total` - `warm_up`)
      (Loshchilov and Hutter, SGDR, without restarts);
    - `"linear"`: 1 - (1 - `final`) · p;
    - `"inverse_square_root"`: √((`warm_up` + 1) / (n + 1)) (Vaswani et al., Attention Is All You Need);
    - `"constant"`: 1.

    After `total` updates the factor of `"cosine"` and `"linear"` stays `final`. The handler `LearningRateSchedule` steps it
    after each update that moved the parameters. A checkpoint restores `warm_up`, `total` and `final`; where the script has
    other values, the log says so.

    Args:
        optimizer: whose rates it sets.
        shape: one of the four.
        warm_up: updates of the warm-up; 0: without one.
        total: updates in all, such as `trainer.total_updates(loader, max_epochs=3)`; only for `"cosine"` and `"linear"`.
        final: the factor at the end, in [0, 1]; only for these two.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value, or does not belong to the shape.

    Example:
        >>> import torch
        >>> from ignite_train import WarmUpSchedule, create_trainer
        >>> from ignite_train.handlers import LearningRateSchedule
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean())
        >>> loader = [torch.ones(8, 3)] * 4
        >>> total = trainer.total_updates(loader, max_epochs=2)
        >>> schedule = WarmUpSchedule(optimizer, "linear", warm_up=3, total=total)
        >>> handle = LearningRateSchedule(schedule).attach(trainer)
        >>> rates = []
        >>> handle = trainer.on("STEP_COMPLETED")(lambda: rates.extend(trainer.state.update_output.learning_rates))
        >>> state = trainer.run(loader, max_epochs=2)
        >>> rates
        [0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.19999999999999996]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shape: Literal["cosine", "linear", "inverse_square_root", "constant"],
        *,
        warm_up: int = 0,
        total: int | None = None,
        final: float = 0.0,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {describe(optimizer)}")
        self.shape = one_of("shape", shape, _SHAPES)
        self.warm_up = 0 if warm_up == 0 else positive_int("warm_up", warm_up)
        self.final = real_number("final", final, at_least=0)
        self.total = self._checked_total(total)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """The rates of the next update, by group."""
        factor = self.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def factor(self, num_updates: int) -> float:
        """The factor of the update after this many."""
        if num_updates < self.warm_up:
            return (num_updates + 1) / (self.warm_up + 1)
        if self.total is not None:
            part = min(1.0, (num_updates - self.warm_up) / (self.total - self.warm_up))
            height = (1.0 + math.cos(math.pi * part)) / 2.0 if self.shape == "cosine" else 1.0 - part
            return self.final + (1.0 - self.final) * height
        return math.sqrt((self.warm_up + 1) / (num_updates + 1)) if self.shape == "inverse_square_root" else 1.0

    def _checked_total(self, total: Any) -> int | None:
        if self.shape in ("cosine", "linear"):
            if total is None:
                raise ValueError(f"total must be given for {self.shape!r}; pass trainer.total_updates(loader, max_epochs=...)")
            if positive_int("total", total) <= self.warm_up:
                raise ValueError(f"total must be greater than warm_up={self.warm_up}, got {total!r}")
            if self.final > 1:
                raise ValueError(f"final must be at most 1, got {self.final!r}: it is a factor of lr and not a rate")
            return int(total)
        if total is not None or self.final != 0:
            raise ValueError(f"total and final must be left out for {self.shape!r}, got total={total!r}, final={self.final!r}")
        return None
