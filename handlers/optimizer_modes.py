"""Optimizers with other weights for evaluation than for training, as schedule-free ones have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from ignite.engine import Events
from torch import Tensor
from torch.optim import Optimizer

from ignite_train.arguments import describe
from ignite_train.evaluation.evaluator import Evaluator
from ignite_train.internals.of_torch import foreach_copy_
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.averaged_tensors import local_tensors
from ignite_train.model.in_full import in_full
from ignite_train.model.learning_rates import refuse_other_optimizer
from ignite_train.trainer import Replicas, Trainer

__all__ = ["OptimizerModes"]


class OptimizerModes(Handler):
    """Calls `optimizer.eval()` before each run of an evaluator and `optimizer.train()` after it, and before training.

    Schedule-free optimizers (Defazio et al., The Road Less Scheduled) train at one point and are evaluated at another. Without
    these calls the score is that of the wrong weights, without an error. Going to the other point and back changes the last
    bits of the weights; the handler puts the bits of training back, so that an evaluation leaves no trace. That needs memory
    for a copy of the weights during the evaluation.

    After training the optimizer is in its training mode, which checkpoints hold; call `optimizer.eval()` before you use the
    model or save it yourself. An optimizer that is in its eval mode when an evaluation begins stays there. That is known from
    the weights, or from an int, a bool or a string among its attributes or in its groups, such as `group["train_mode"]`.

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

    def attach(self, trainer: Trainer, *, evaluator: Evaluator | None = None) -> None:
        """Changes the mode for each run of `trainer` and of `evaluator`, if there is one. Attach it once for each evaluator.

        Raises:
            TypeError: `evaluator` is another object.
            ValueError: the optimizer is not that of `trainer`.
        """
        refuse_other_optimizer(trainer.optimizers, self.optimizer)
        if evaluator is not None and not isinstance(evaluator, Evaluator):
            raise TypeError(f"evaluator must be what create_evaluator returned, got {describe(evaluator)}")
        trainer.enter_with(self._begin)
        if evaluator is not None:
            # Outside of an average: the optimizer computes its other weights from those that are trained.
            evaluator.run_within(partial(self._evaluating, trainer.replicas), first=True)
            evaluator.scored_weights.insert(0, self)

    @property
    def has_weights(self) -> Optimizer:
        """See `ScoredWeights`: its state has them."""
        return self.optimizer  # type: ignore[no-any-return]

    @contextmanager
    def left_in(self) -> Iterator[None]:
        """See `ScoredWeights`. The optimizer is left in its eval mode."""
        self.optimizer.train()  # in which it was saved
        yield
        self.optimizer.eval()

    def _begin(self, trainer: Trainer) -> None:
        """Goes into training mode now, and again in the first update of the run.

        The state of a checkpoint is put back for the second time after STARTED or EPOCH_STARTED, and may be in eval mode.
        """
        self.optimizer.train()

        def train() -> None:
            handle.remove()
            self.optimizer.train()

        handle = trainer.append_event_handler(Events.ITERATION_STARTED, train)

    @contextmanager
    def _evaluating(self, replicas: Replicas) -> Iterator[None]:
        """In this `with` the optimizer is in its eval mode; afterwards its mode and the bits of the weights are as before."""
        with torch.no_grad():
            kept = [weight.clone() for weight in self._weights()]
        settings, may_stay, had_own = self._settings(), False, replicas.have_own_weights

        def is_as_before() -> bool:
            return self._settings() == settings and all(map(torch.equal, self._weights(), kept))

        def put_back() -> None:
            self.optimizer.train()
            if may_stay and not is_as_before():  # `train` has changed something and `eval` had not
                self.optimizer.eval()
            replicas.have_own_weights = had_own
            with torch.no_grad():
                foreach_copy_(self._weights(), kept)

        try:
            self.optimizer.eval()
            may_stay = is_as_before()
            replicas.have_own_weights = False
            yield
        finally:
            in_full(put_back)

    def _settings(self) -> list[dict[str, Any]]:
        """Plain attributes, and plain entries of the groups: the mode may be among them."""
        found = vars(self.optimizer), *self.optimizer.param_groups
        return [{name: value for name, value in one.items() if isinstance(value, (int, str))} for one in found]

    def _weights(self) -> list[Tensor]:
        return local_tensors(weight for group in self.optimizer.param_groups for weight in group["params"])
