"""The learning rates of an optimizer, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.device.to_host import is_on_host
from ignite_train.errors import LearningRateError
from ignite_train.internals.of_torch import version_of
from ignite_train.model.optimizers import Optimizers, labelled_optimizers

__all__ = ["LearningRates", "refuse_other_optimizer"]


def refuse_other_optimizer(optimizers: Mapping[str, Optimizer], given: Optimizer | LRScheduler) -> None:
    """Refuses an optimizer, or a scheduler of one, whose rates are not rates of a run with these `optimizers`.

    It may be one of the optimizers of the run, or share a group with one.

    Raises:
        ValueError: it is of another run.
    """
    optimizer = given if isinstance(given, Optimizer) else given.optimizer
    of_the_run = optimizers.values()
    groups = {id(group) for one in of_the_run for group in one.param_groups}
    if any(one is optimizer for one in of_the_run) or any(id(group) in groups for group in optimizer.param_groups):
        return
    kind = type(optimizer).__name__
    what = f"optimizer must be the trainer's, got another {kind}; pass the one"
    if given is not optimizer:
        kind = f"got a {type(given).__name__} of another {kind}"
        what = f"scheduler must be of the trainer's optimizer, {kind}; build it with the optimizer"
    raise ValueError(f"{what} that create_trainer was given")


class LearningRates:
    """The learning rates of `optimizer`'s groups, where those that lie on an accelerator are read with the update's numbers.

    A rate that is a tensor there and has not changed since it was last read is not read again.

    Args:
        optimizer: whose rates these are; one, or several whose groups follow each other.
    """

    def __init__(self, optimizer: Optimizer | Optimizers) -> None:
        self._optimizer = optimizer
        self._known: dict[int, tuple[Tensor, int, float]] = {}  # by group: the tensor, its version then, its value
        self._asked: list[tuple[int, Tensor, int]] = []

    def __call__(self) -> tuple[float, ...]:
        """The rates as they are now. Waits for the device only for one that was set there since they were learned."""
        rates = []
        for index, group in enumerate(self._optimizer.param_groups):
            rate = group["lr"]
            rates.append(rate if type(rate) is float else self._number(index, rate))
        return tuple(rates)

    def error(self, rates: Sequence[float]) -> LearningRateError:
        """Why there can be no step with `rates`, which are those of the groups: one of them is not finite."""
        several = labelled_optimizers(self._optimizer).items()
        places = [(group, label) for label, one in several for group in range(len(one.param_groups))]
        (group, label), rate = next((place, rate) for place, rate in zip(places, rates, strict=True) if not math.isfinite(rate))
        return LearningRateError(group, rate, label)

    def may_be_finite(self) -> bool:
        """Whether all rates are finite that the host knows. It does not wait for the device."""
        rates = [
            g["lr"] if not isinstance(g["lr"], Tensor) or is_on_host(g["lr"].device) else self._known.get(i, (None, 0, 0.0))[2]
            for i, g in enumerate(self._optimizer.param_groups)
        ]
        return all(map(math.isfinite, rates))

    def unknown(self) -> list[Tensor]:
        """The rates whose numbers only the device knows; `learn` is told them."""
        rates = [(index, group["lr"]) for index, group in enumerate(self._optimizer.param_groups)]
        tensors = [(index, rate) for index, rate in rates if isinstance(rate, Tensor) and not is_on_host(rate.device)]
        self._asked = [(index, rate, version_of(rate)) for index, rate in tensors if not self._is_known(index, rate)]
        return [rate for _, rate, _ in self._asked]

    def learn(self, numbers: Sequence[float]) -> None:
        """Takes over what was read of `unknown`."""
        for (index, rate, version), number in zip(self._asked, numbers, strict=True):
            self._known[index] = rate, version, number

    def _number(self, index: int, rate: float | Tensor) -> float:
        if isinstance(rate, Tensor) and self._is_known(index, rate):
            return self._known[index][2]
        return float(rate)  # sync, on an accelerator

    def _is_known(self, index: int, rate: Tensor) -> bool:
        tensor, version, _ = self._known.get(index, (None, 0, 0.0))
        return tensor is rate and version == version_of(rate)
