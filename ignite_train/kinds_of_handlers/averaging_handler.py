"""Handlers that keep an average of the weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from ignite.engine import RemovableEventHandle
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ignite_train.arguments import COUNT, MAPPING, check_fields, check_same_model, describe
from ignite_train.evaluation.evaluator import Evaluator
from ignite_train.events import Event, TrainEvents
from ignite_train.internals.of_torch import foreach_copy_
from ignite_train.kinds_of_handlers.handler import Handler
from ignite_train.model.averaged_tensors import (
    averaged_statistics,
    averaged_tensors,
    check_alike,
    in_order_of,
    local_tensors,
    move_towards,
    names_of_tensors,
    plain_name,
)
from ignite_train.model.in_full import in_full
from ignite_train.ranks import collectives
from ignite_train.trainer import Replicas, Trainer

__all__ = ["AveragingHandler"]


class AveragingHandler(Handler):
    """A handler that keeps an average of the weights: average ← decay · average + (1 - decay) · weights.

    It follows the updates that moved the parameters; a skipped update does not count. All parameters are averaged, and so are
    the running statistics of normalisation layers; other buffers are the model's. Averages of floats that are narrower than
    float32 are kept in float32, because 1 - decay of a weight is lost there. With sharded models each rank averages its shards.

    A derived class defines `decay_in` and passes `device`: where the averages are; None: where the weights are. It sets
    `follows_until_first` where the average, until the first averaging, must be the weights of the moment, and not the weights
    with which the first run began.

    Attributes:
        num_updates: how often it has averaged.

    Raises:
        TypeError: `device` names no device.
    """

    is_collective = True

    same_on_all_ranks = True
    attached_once = True

    follows_until_first = False

    _replicas: Replicas  # of the trainer, since `attach`

    def __init__(self, device: str | torch.device | None) -> None:
        try:
            self.device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError):
            raise TypeError(f"device must be a device of torch such as 'cpu', got {describe(device)}") from None
        self.num_updates = 0
        self._model: nn.Module | None = None
        self._averages: dict[str, Tensor] = {}
        self._is_swapped_in = False
        self._begun_at: int | None = None  # the steps made when the average began; None: it has not; -1: before a checkpoint

    def decay_in(self, number: int) -> float:
        """The weight of the average in averaging `number`, which is 1 for the first; in [0, 1)."""
        raise NotImplementedError

    def attach(self, trainer: Trainer, event: Event = TrainEvents.STEP_COMPLETED) -> RemovableEventHandle:
        """Averages the weights of `trainer` at `event`, before other handlers there.

        Raises:
            ValueError: `device` is given and the model is sharded, or it is attached already.
        """
        model = trainer.model
        if self.device is not None and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ValueError(
                f"device must be left out for a sharded model, got {str(self.device)!r}: each rank keeps its shards"
            )
        self._model, self._replicas = model, trainer.replicas
        if self.num_updates == 0:  # or else it was taken off, and continues
            self._averages = {name: self._average(value) for name, value in averaged_tensors(model).items()}
            self._begun_at = None
        trainer.on_enter.append(self._enter)
        return trainer.prepend_event_handler(event, self)

    def use_in(self, evaluator: Evaluator) -> None:
        """Has each run of `evaluator`, whose model is the one that is trained, evaluate the average.

        Raises:
            TypeError: `evaluator` is not an evaluator.
        """
        if not isinstance(evaluator, Evaluator):
            raise TypeError(f"evaluator must be what create_evaluator returned, got {describe(evaluator)}")
        this = weakref.proxy(evaluator)  # or else it would keep itself alive
        evaluator.run_within(lambda: self._swapped_for(this.model))
        evaluator.scored_weights.append(self)

    @property
    def has_weights(self) -> AveragingHandler:
        """See `ScoredWeights`."""
        return self

    @contextmanager
    def left_in(self) -> Iterator[None]:
        """See `ScoredWeights`. Collective where a model has normalisation layers."""
        yield
        self._put_in()

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """In this `with` the model has the averaged weights; afterwards, bit by bit, its own. Needs memory for a copy of them.

        All ranks take the statistics of normalisation layers from rank 0, so it is collective where a model has them.

        Raises:
            RuntimeError: `attach` was not called, or the averages are swapped in already.
        """
        self._attached()
        if self._is_swapped_in:
            raise RuntimeError("swapped_in() was called inside swapped_in(); leave the first `with` before the second")
        with torch.no_grad():
            weights, averages = self._weights(), local_tensors(self._averages.values())
            kept = [weight.to(average.device, copy=True) for weight, average in zip(weights, averages, strict=True)]
        replicas, had_own = self._replicas, self._replicas.have_own_weights

        @torch.no_grad()
        def put_back() -> None:
            foreach_copy_(self._weights(), kept)
            replicas.have_own_weights = had_own

        try:
            replicas.have_own_weights = False
            self._put_in()
            self._is_swapped_in = True
            yield
        finally:
            self._is_swapped_in = False
            in_full(put_back)

    def __call__(self) -> None:
        """Averages once.

        Raises:
            RuntimeError: the averages are swapped in, so that the update has moved them and not the weights.
            ValueError: the decay is not in [0, 1).
        """
        if self._is_swapped_in:
            raise RuntimeError("an update was made inside swapped_in(), where the model has the averages; make it outside")
        number = self.num_updates + 1
        move_towards(self._averages, averaged_tensors(self._attached()), 1.0 - self.decay_in(number))
        self.num_updates = number

    def state_dict(self) -> dict[str, Any]:
        """`"num_updates"`, and under `"model"` the state of the model with the averages in the place of the weights.

        Raises:
            RuntimeError: the averages are swapped in, so that what is stored beside it would have them for the weights that are
                trained.
        """
        model = self._attached()
        if self._is_swapped_in:
            raise RuntimeError(
                "state_dict() was called inside swapped_in() or an evaluation of the average, where the model does not have "
                "its own weights; save after it"
            )
        if self.follows_until_first:
            self._begin_average()
        names = {id(value): name for name, value in averaged_tensors(model).items()}
        averages = {name: self._averages[names[id(value)]] for name, value in names_of_tensors(model) if id(value) in names}
        state = {plain_name(name): value for name, value in model.state_dict().items()}
        return {"num_updates": self.num_updates, "model": {**state, **averages}}

    def paths_that_may_differ(self) -> list[tuple[str, ...]]:
        """Keys of averaged buffers: each rank averages its own running statistics, and rank 0's are evaluated."""
        return [("model", plain_name(name)) for name, _ in self._attached().named_buffers()]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the averages and their number.

        Raises:
            ValueError: it is of another model, or something in it is not what `state_dict()` gives; nothing is changed.
        """
        self._attached()
        check_fields(type(self).__name__, state_dict, {"num_updates": COUNT, "model": MAPPING})
        saved = state_dict["model"]
        check_same_model(saved, self._averages)
        self.num_updates, self._begun_at = state_dict["num_updates"], -1
        with torch.no_grad():
            for name, average in self._averages.items():
                average.copy_(saved[name])

    @torch.no_grad()
    def _put_in(self) -> None:
        """Gives the model the averages."""
        if self.follows_until_first:
            self._begin_average()
        self._take_over_statistics()
        foreach_copy_(self._weights(), local_tensors(self._averages.values()))

    def _enter(self, trainer: Trainer) -> None:
        """A run or session begins: what the script has put into the model since `attach` counts, as no step has been made.

        After a step the average stays, although a filter of the event may not have let anything be averaged yet.

        Raises:
            RuntimeError: the averages are swapped in, so that the run would train them.
            ValueError: the model has other parameters than when the handler was attached.
        """
        if self._is_swapped_in:
            raise RuntimeError("a run was started inside swapped_in(), where the model has the averages; start it outside")
        check_alike(self._averages, averaged_tensors(self._attached()))
        if self._begun_at in (None, trainer.state.num_steps):
            self._begin_average()
            self._begun_at = trainer.state.num_steps

    def _begin_average(self) -> None:
        """Before the first averaging, the average is that of the weights now."""
        if self.num_updates == 0:
            with torch.no_grad():
                foreach_copy_(local_tensors(self._averages.values()), self._weights())

    def _weights(self) -> list[Tensor]:
        """The weights of the model, or the shards of this rank, in the order of their averages."""
        return in_order_of(self._averages, averaged_tensors(self._attached()))

    def _average(self, value: Tensor) -> Tensor:
        is_narrow = value.is_floating_point() and value.itemsize < torch.float32.itemsize
        dtype = torch.float32 if is_narrow else value.dtype
        return value.detach().to(device=self.device, dtype=dtype, copy=True)

    def _take_over_statistics(self) -> None:
        """Gives each rank the averaged statistics of rank 0: each has seen other samples. Nothing in a single process."""
        if collectives.world_size() > 1:
            for name in averaged_statistics(self._attached()):
                collectives.broadcast(self._averages[name])

    def _swapped_for(self, evaluated: nn.Module) -> AbstractContextManager[None]:
        mine = {id(parameter) for parameter in self._attached().parameters()}
        if not any(id(parameter) in mine for parameter in evaluated.parameters()):
            raise ValueError(
                "evaluator must evaluate the model that is trained, got one of another model; "
                f"{type(self).__name__} swaps its weights"
            )
        return self.swapped_in()

    def _attached(self) -> nn.Module:
        if self._model is None:
            raise RuntimeError("attach(trainer) must be called first")
        return self._model
