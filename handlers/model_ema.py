"""An exponential moving average of the weights, to evaluate and to export in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ignite_train.arguments import describe, real_number
from ignite_train.kinds_of_handlers import AveragingHandler

__all__ = ["ModelEMA"]


class ModelEMA(AveragingHandler):
    """Keeps an exponential moving average of the weights: average ← decay · average + (1 - decay) · weights.

    What it averages, and when, stands in `AveragingHandler`.

    A `Checkpoint` saves it once for all ranks, with the buffers of rank 0, and
    `python -m ignite_train.checkpoint consolidate DIR --entry ModelEMA` writes the averaged model as a file.

    Args:
        decay: the weight of the average, in [0, 1), or a function that gives it for the number of the averaging, 1 for the
            first: a schedule, such as a momentum teacher has.
        warm_up: begin with a smaller decay, min(decay, (1 + n) / (10 + n)) in averaging n, so that the first weights do not
            stay in the average for long. TensorFlow's ExponentialMovingAverage has the same formula. Without effect if
            `decay` is a function.
        device: where the averages are; None: where the weights are. With `"cpu"`, a model on an accelerator is copied to the
            host in each averaging, which waits for the device; `attach(trainer, STEP_COMPLETED(every=10))` averages less often.

    Attributes:
        num_updates: how often it has averaged.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `decay` is not in [0, 1).

    Example:
        >>> ema = ModelEMA(decay=0.99)
        >>> handle = ema.attach(trainer)
        >>> averaged = create_evaluator(model, forward)
        >>> ema.use_in(averaged)  # each of its runs evaluates the average
        >>> handle = Validation(averaged, [torch.ones(8, 3)]).attach(trainer)
        >>> state = trainer.run(data, max_epochs=2)
        >>> with ema.swapped_in():
        ...     output = model(torch.ones(1, 3))
        >>> ema.num_updates
        8
    """

    def __init__(
        self,
        decay: float | Callable[[int], float] = 0.999,
        *,
        warm_up: bool = True,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(device)
        if isinstance(decay, torch.nn.Module):
            raise TypeError(
                f"decay must be a number in [0, 1), or a function, got {describe(decay)}; write ModelEMA(decay=0.999)"
                ".attach(trainer), which averages the trainer's model"
            )
        self.decay = decay if callable(decay) else _checked_decay(decay)
        if not isinstance(warm_up, bool):
            raise TypeError(f"warm_up must be True or False, got {describe(warm_up)}")
        self.warm_up = warm_up

    def decay_in(self, number: int) -> float:
        """The decay, smaller during the warm-up.

        Raises:
            ValueError: it is a function and gave a number outside of [0, 1).
        """
        if callable(self.decay):
            return _checked_decay(self.decay(number))
        return min(self.decay, (1 + number) / (10 + number)) if self.warm_up else self.decay


def _checked_decay(decay: Any) -> float:
    number = real_number("decay", decay, at_least=0)
    if number >= 1:
        raise ValueError(f"decay must be less than 1, got {decay!r}; the average would never change")
    return number
