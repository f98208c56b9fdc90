"""An exponential moving average of the weights, to evaluate and to export in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from ignite.engine import RemovableEventHandle
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from ignite_train.arguments import describe, real_number
from ignite_train.checkpoint.run_objects import SavedModule
from ignite_train.evaluator import Evaluator
from ignite_train.events import Event, TrainEvents
from ignite_train.handler import Handler
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["ModelEMA"]


class ModelEMA(Handler):
    """Keeps an exponential moving average of the weights: average ← decay · average + (1 - decay) · weights.

    It follows the updates that moved the parameters; a skipped update does not count. All parameters are averaged, and so are
    the running statistics of normalisation layers; other buffers are the model's. Averages of bfloat16 and float16 are kept in
    float32, because 1 - decay of a weight is lost there. With sharded models each rank averages its shards.

    A `Checkpoint` saves it once for all ranks, and `python -m ignite_train.checkpoint consolidate DIR --entry ModelEMA` writes
    the averaged model as a file.

    Args:
        decay: the weight of the average, in [0, 1), or a function that gives it for the number of the averaging, 1 for the
            first: a schedule, such as that of a momentum teacher.
        warm_up: begin with a smaller decay, min(decay, (1 + n) / (10 + n)) in averaging n, so that the first weights do not
            stay in the average for long. The formula is that of TensorFlow's ExponentialMovingAverage. Without effect if
            `decay` is a function.
        device: where the averages are; None: where the weights are. With `"cpu"`, a model on an accelerator is copied to the
            host in each averaging, which waits for the device; `attach(trainer, STEP_COMPLETED(every=10))` averages less often.

    Attributes:
        num_updates: how often it has averaged.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `decay` is not in [0, 1).

    Example:
        >>> import torch
        >>> from ignite_train import create_evaluator, create_trainer
        >>> from ignite_train.handlers import ModelEMA, Validation
        >>> def forward(model, x):
        ...     return model(x).square().mean()
        >>> model = torch.nn.Linear(3, 1)
        >>> trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
        >>> ema = ModelEMA(decay=0.99)
        >>> handle = ema.attach(trainer)
        >>> averaged = create_evaluator(model, forward)
        >>> ema.use_in(averaged)  # each of its runs evaluates the average
        >>> handle = Validation(averaged, [torch.ones(8, 3)]).attach(trainer)
        >>> state = trainer.run([torch.ones(8, 3)] * 4, max_epochs=2)
        >>> with ema.swapped_in():
        ...     output = model(torch.ones(1, 3))
        >>> ema.num_updates
        8
    """

    same_on_all_ranks = True

    def __init__(
        self,
        decay: float | Callable[[int], float] = 0.999,
        *,
        warm_up: bool = True,
        device: str | torch.device | None = None,
    ) -> None:
        self.decay = decay if callable(decay) else _checked_decay(decay)
        if not isinstance(warm_up, bool):
            raise TypeError(f"warm_up must be True or False, got {describe(warm_up)}")
        self.warm_up, self.device = warm_up, None if device is None else torch.device(device)
        self.num_updates = 0
        self._model: nn.Module | None = None
        self._averages: dict[str, Tensor] = {}
        self._is_swapped_in = False
        self._swaps: list[Any] = []  # of evaluations that are running

    def attach(self, trainer: Trainer, event: Event = TrainEvents.STEP_COMPLETED) -> RemovableEventHandle:
        """Averages the weights of `trainer` at `event`, before other handlers there.

        Raises:
            ValueError: `device` is given and the model is sharded.
        """
        model = trainer._stateful_parts["model"]
        assert isinstance(model, nn.Module)  # noqa: S101  # create_trainer passes a module
        if self.device is not None and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ValueError(
                f"device must be left out for a sharded model, got {str(self.device)!r}: each rank keeps its shards"
            )
        self._model = model
        self._averages = {name: self._average(value) for name, value in _averaged(model).items()}
        trainer.on_enter.append(self._begin)
        return trainer.prepend_event_handler(event, self)

    def use_in(self, evaluator: Evaluator) -> None:
        """Has each run of `evaluator`, whose model is the one that is trained, evaluate the average.

        Raises:
            TypeError: `evaluator` is not an evaluator.
        """
        if not isinstance(evaluator, Evaluator):
            raise TypeError(f"evaluator must be what create_evaluator returned, got {describe(evaluator)}")
        evaluator.on_enter.append(self._enter)
        evaluator.on_exit.append(self._leave)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """In this `with` the model has the averaged weights; afterwards, bit by bit, its own. Needs memory for a copy of them.

        The statistics of normalisation layers are those of rank 0 on all ranks, so it is collective where a model has them.

        Raises:
            RuntimeError: `attach` was not called, or the averages are swapped in already.
        """
        model = self._attached()
        if self._is_swapped_in:
            raise RuntimeError("swapped_in() was called inside swapped_in(); leave the first `with` before the second")
        with torch.no_grad():
            self._take_over_statistics()
            weights, averages = _local(_averaged(model)), _local(self._averages)
            kept = [weight.to(average.device, copy=True) for weight, average in zip(weights, averages, strict=True)]
            torch._foreach_copy_(weights, averages)
        self._is_swapped_in = True
        try:
            yield
        finally:
            self._is_swapped_in = False
            with torch.no_grad():
                torch._foreach_copy_(_local(_averaged(model)), kept)

    def __call__(self) -> None:
        """Averages once.

        Raises:
            RuntimeError: the averages are swapped in, so that the update has moved them and not the weights.
            ValueError: `decay` is a function and gave a number outside of [0, 1).
        """
        if self._is_swapped_in:
            raise RuntimeError("an update was made inside swapped_in(), where the model has the averages; make it outside")
        number = self.num_updates + 1
        decay = self._decay_in(number)
        with torch.no_grad():
            averages = _local(self._averages)
            weights = _local(_averaged(self._attached()))
            weights = [weight.to(average.device, average.dtype) for weight, average in zip(weights, averages, strict=True)]
            torch._foreach_lerp_(averages, weights, 1.0 - decay)
        self.num_updates = number

    def state_dict(self) -> dict[str, Any]:
        """`"num_updates"`, and under `"model"` the state of the model with the averages in the place of the weights."""
        model = SavedModule(self._attached())
        names = {id(value): name for name, value in _averaged(model.module).items()}
        averages = {name: self._averages[names[id(value)]] for name, value in _all_names(model.module) if id(value) in names}
        return {"num_updates": self.num_updates, "model": {**model.state_dict(), **averages}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the averages and their number.

        Raises:
            ValueError: it is of another model; nothing is changed.
        """
        self._attached()
        saved = state_dict["model"]
        wrong = [name for name, value in self._averages.items() if name not in saved or saved[name].shape != value.shape]
        if wrong:
            raise ValueError(f"state_dict must be of the same model, got one without a fitting {wrong[0]!r}")
        self.num_updates = state_dict["num_updates"]
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(saved[name])

    def _begin(self, _trainer: Trainer) -> None:
        """A run begins: before the first averaging, the average is that of the weights now."""
        if self.num_updates == 0:
            with torch.no_grad():
                torch._foreach_copy_(_local(self._averages), _local(_averaged(self._attached())))

    def _average(self, value: Tensor) -> Tensor:
        dtype = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype
        return value.detach().to(device=self.device, dtype=dtype, copy=True)

    def _decay_in(self, number: int) -> float:
        if callable(self.decay):
            return _checked_decay(self.decay(number))
        return min(self.decay, (1 + number) / (10 + number)) if self.warm_up else self.decay

    def _take_over_statistics(self) -> None:
        """Gives each rank the averaged statistics of rank 0: each has seen other samples. Nothing in a single process."""
        if collectives.world_size() > 1:
            for name in _statistics(self._attached()):
                collectives.broadcast(self._averages[name])

    def _enter(self, evaluator: Evaluator) -> None:
        mine = {id(parameter) for parameter in self._attached().parameters()}
        if not any(id(parameter) in mine for parameter in evaluator.model.parameters()):
            raise ValueError(
                "evaluator must evaluate the model that is trained, got one of another model; ModelEMA swaps weights in it"
            )
        swap = self.swapped_in()
        swap.__enter__()
        self._swaps.append(swap)

    def _leave(self) -> None:
        while self._swaps:
            self._swaps.pop().__exit__(None, None, None)

    def _attached(self) -> nn.Module:
        if self._model is None:
            raise RuntimeError("attach(trainer) must be called first")
        return self._model


def _checked_decay(decay: Any) -> float:
    number = real_number("decay", decay, at_least=0)
    if number >= 1:
        raise ValueError(f"decay must be less than 1, got {decay!r}; the average would never change")
    return number


def _averaged(model: nn.Module) -> dict[str, Tensor]:
    """What is averaged, by name: parameters, as shards where they are sharded, and statistics of normalisation layers."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation may have left whole parameters in their place
    parameters = {name.replace("_orig_mod.", ""): value for name, value in model.named_parameters()}
    return {name: value for name, value in parameters.items() if value.is_floating_point()} | _statistics(model)


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running means and variances of the normalisation layers that have them."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            for name in ("running_mean", "running_var"):
                found[f"{prefix}.{name}".lstrip(".").replace("_orig_mod.", "")] = module.get_buffer(name)
    return found


def _all_names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under each of their names."""
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, value in named:
            yield name.replace("_orig_mod.", ""), value


def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors, or the shards of this rank, which share their memory. To be called under `no_grad`."""
    return [value.to_local() if isinstance(value, DTensor) else value for value in tensors.values()]
