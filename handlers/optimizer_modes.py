"""Optimizers with other weights for evaluation than for training, as schedule-free ones have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ignite_train.arguments import describe
from ignite_train.evaluation.evaluator import Evaluator
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.learning_rates import refuse_other_optimizer
from ignite_train.trainer import Trainer

__all__ = ["OptimizerModes"]


class OptimizerModes(Handler):
    """Calls `optimizer.eval()` before each run of an evaluator and `optimizer.train()` after it, and before training.

    Schedule-free optimizers (Defazio et al., The Road Less Scheduled) train at one point and are evaluated at another. Without
    these calls the score is of the wrong weights, without an error. Going to the other point and back changes the last
    bits of the weights; the handler puts those of training back, so that an evaluation leaves no trace. That needs memory for
    a copy of them during the evaluation.

    After training the optimizer is in its training mode, which checkpoints hold; call `optimizer.eval()` before you use the
    model or save it yourself.

    Args:
        optimizer: the trainer's.

    Raises:
        TypeError: it has no `train()` and `eval()`.

    Example:
        >>> class WithModes(torch.optim.SGD):  # in the place of schedulefree.AdamWScheduleFree, say
        ...     def train(self):
        ...         self.mode = "train"
        ...     def eval(self):
        ...         self.mode = "eval"
        >>> modes = []
        >>> def forward(model, x):
        ...     modes.append(optimizer.mode)
        ...     return model(x).square().mean()
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = WithModes(model.parameters(), lr=0.1)
        >>> trainer, evaluator = create_trainer(model, optimizer, forward), create_evaluator(model, forward)
        >>> OptimizerModes(optimizer).attach(trainer, evaluator=evaluator)
        >>> handle = Validation(evaluator, [torch.ones(8, 3)], sanity=0).attach(trainer)
        >>> state = trainer.run([torch.ones(8, 3)] * 2, max_epochs=2)
        >>> modes
        ['train', 'train', 'eval', 'train', 'train', 'eval']
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer) or not {"train", "eval"} <= {*dir(optimizer)}:
            raise TypeError(f"optimizer must have train() and eval(), as schedule-free ones do, got {describe(optimizer)}")
        self.optimizer: Any = optimizer
        self._kept: list[Tensor] | None = None

    def attach(self, trainer: Trainer, *, evaluator: Evaluator | None = None) -> None:
        """Changes the mode for each run of `trainer` and of `evaluator`, if there is one. Attach it once for each evaluator.

        Raises:
            TypeError: `evaluator` is another object.
            ValueError: the optimizer is not the trainer's.
        """
        refuse_other_optimizer(trainer.optimizers, self.optimizer)
        if evaluator is not None and not isinstance(evaluator, Evaluator):
            raise TypeError(f"evaluator must be what create_evaluator returned, got {describe(evaluator)}")
        trainer.on_enter.append(lambda _: self.optimizer.train())
        if evaluator is not None:
            evaluator.on_enter.append(self._begin)
            evaluator.on_exit.append(self._end)

    def _begin(self, _evaluator: Evaluator) -> None:
        with torch.no_grad():
            self._kept = [weight.clone() for weight in self._weights()]
        self.optimizer.eval()

    def _end(self) -> None:
        """Back to training, with the bits that the weights had. Nothing if the evaluation did not begin."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        self.optimizer.train()
        with torch.no_grad():
            torch._foreach_copy_(self._weights(), kept)

    def _weights(self) -> list[Tensor]:
        """Those of the optimizer, or the shards of this rank, which share their memory. To be called under `no_grad`."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        return [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
