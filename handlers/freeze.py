"""Freezing a part of the model for the beginning of a run, or for all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ignite_train.arguments import describe, positive_int
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.optimizers import stepped_parameters
from ignite_train.state import TrainState
from ignite_train.trainer import Trainer

__all__ = ["Freeze"]


class Freeze(Handler):
    """Keeps the parameters of a module unchanged until a number of steps has been made.

    The gradients of frozen parameters are dropped after the last backward of each update, and of each evaluation of an
    optimizer with a closure, before the norm is taken. So they are neither in the norm nor in the step, and a value that is not
    finite among them skips no update. `requires_grad` stays True, because `DistributedDataParallel` decides when it is built
    which gradients it reduces. Backward still computes these gradients, and they cross the ranks; freeze with
    `requires_grad_(False)`, before the model is wrapped, what never trains.

    Parameters begin to train with fresh moments. Buffers are not frozen: call `module.eval()` before the run. It has no state:
    a resumed run follows from the counters. All ranks must attach it. Several of them can thaw a model block by block.

    Args:
        module: a module of the model, or some of its parameters.
        until: the parameters move from step `until + 1` on, where skipped updates do not count (`state.num_steps`); or a
            function of `trainer.state` that is True as soon as they are to move, the same on all ranks; None: never.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `until` is below 1.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        >>> trainer = create_trainer(
        ...     model, torch.optim.SGD(model.parameters(), lr=0.1), forward
        ... )
        >>> Freeze(model[0], until=4).attach(trainer)
        >>> before = model[0].weight.clone()
        >>> state = trainer.run(data, max_epochs=1)
        >>> bool((model[0].weight == before).all())
        True
    """

    of_one_trainer = True

    def __init__(
        self, module: nn.Module | Iterable[nn.Parameter], *, until: int | Callable[[TrainState], bool] | None = None
    ) -> None:
        self.until = until if until is None or callable(until) else positive_int("until", until)
        if isinstance(module, (nn.Parameter, str)) or not isinstance(module, (nn.Module, Iterable)):
            raise TypeError(f"module must be a torch.nn.Module or a list of parameters, got {describe(module)}")
        self._module: Any = module if isinstance(module, nn.Module) else list(module)
        self._num_parameters = 0
        self._frozen: list[nn.Parameter] = []  # in the latest update

    def attach(self, trainer: Trainer) -> None:
        """Freezes them in the updates of `trainer`.

        Raises:
            ValueError: none of them is trained, or no other parameter is.
        """
        trained = [parameter for parameter in stepped_parameters(trainer.optimizers) if parameter.requires_grad]
        self._num_parameters = sum(one.requires_grad for one in stepped_parameters(trainer.optimizers, self._module))
        if not self._num_parameters:
            raise ValueError(
                f"module must have parameters that the optimizer trains, got {describe(self._module)}; pass a module of the "
                "model in its final form, as it is after fully_shard"
            )
        if self._num_parameters == len(trained):
            raise ValueError(
                "module must leave something that trains, got all parameters of the optimizer; pass a part of the model"
            )
        trainer.moments.before_norm.append(self._drop)
        trainer.moments.frozen.append(lambda: self._frozen)

    def settings(self) -> dict[str, Any]:
        """Also how many parameters it freezes, since a resumed run may have another module frozen."""
        return {**super().settings(), "num_parameters": self._num_parameters}

    def is_frozen(self, state: TrainState) -> bool:
        """Whether the parameters stay in the next step."""
        if callable(self.until):
            return not self.until(state)
        return self.until is None or state.num_steps < self.until

    def _drop(self, trainer: Trainer) -> None:
        # Asked in each update, since some may join the optimizer in the run. Others may belong to another trainer.
        is_frozen = self.is_frozen(trainer.state)
        self._frozen = stepped_parameters(trainer.optimizers, self._module) if is_frozen else []
        for parameter in self._frozen:
            parameter.grad = None
