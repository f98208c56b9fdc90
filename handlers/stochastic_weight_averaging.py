"""Stochastic weight averaging: the plain mean of the weights at the end of the last epochs."""

from __future__ import annotations

import torch
from ignite.engine import Events, RemovableEventHandle

from ignite_train.arguments import describe
from ignite_train.events import Event
from ignite_train.kinds_of_handlers import AveragingHandler
from ignite_train.trainer import Trainer

__all__ = ["StochasticWeightAveraging"]


class StochasticWeightAveraging(AveragingHandler):
    """Keeps the mean of the weights, each with the same share, from some step on (P. Izmailov et al., arXiv:1803.05407).

    By default it takes the weights at the end of each epoch, once `start` steps were made. The schedule of the learning rate is
    yours: torch's `SWALR` in a `LearningRateSchedule`, say. The running statistics of normalisation layers are averaged too,
    which takes the place of the paper's pass over the data for them. What is averaged, how it is evaluated, saved and exported
    is as for `ModelEMA`. Until the first averaging the average is the present weights.

    Args:
        start: how many steps come before the first weights that count; 0: all weights count.
        device: where the average is; None: where the weights are.

    Attributes:
        num_updates: how often it has averaged.

    Raises:
        TypeError: `start` is not an integer.
        ValueError: `start` is below 0.

    Example:
        >>> swa = StochasticWeightAveraging(start=8)
        >>> handle = swa.attach(trainer)
        >>> averaged = create_evaluator(model, forward)
        >>> swa.use_in(averaged)  # each of its runs evaluates the average
        >>> state = trainer.run(data, max_epochs=4)  # averages after the epochs 2, 3 and 4
        >>> swa.num_updates
        3
    """

    follows_until_first = True

    def __init__(self, start: int = 0, *, device: str | torch.device | None = None) -> None:
        super().__init__(device)
        if isinstance(start, bool) or not isinstance(start, int):
            raise TypeError(f"start must be a number of steps, got {describe(start)}")
        if start < 0:
            raise ValueError(f"start must be at least 0, got {start}")
        self.start = start

    def attach(self, trainer: Trainer, event: Event = Events.EPOCH_COMPLETED) -> RemovableEventHandle:
        """Takes the weights of `trainer` at `event`, before other handlers there.

        Raises:
            ValueError: `device` is given and the model is sharded.
        """
        self._state = trainer.state  # not the trainer, which has this handler
        return super().attach(trainer, event)

    def __call__(self) -> None:
        """Takes the weights of now, if enough steps were made."""
        if self._state.num_steps >= max(self.start, 1):
            super().__call__()

    def decay_in(self, number: int) -> float:
        """1 - 1/n: each of n weights has the share 1/n."""
        return 1.0 - 1.0 / number
