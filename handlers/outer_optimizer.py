"""Replicas that train on their own, and an optimizer over them that makes them equal every H updates."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ignite_train.arguments import COUNT, MAPPING, check_fields, check_same_model, describe, one_of, positive_int
from ignite_train.checkpoint.run_objects import SavedOptimizer
from ignite_train.errors import NonFiniteError
from ignite_train.kinds_of_handlers import Handler
from ignite_train.model.averaged_tensors import can_move
from ignite_train.ranks import collectives
from ignite_train.ranks.replicas import mean_over_ranks
from ignite_train.trainer import Trainer

__all__ = ["OuterOptimizer"]

_logger = logging.getLogger("ignite_train")


class OuterOptimizer(Handler):
    """Makes the replicas of `reduction="local"` equal every H updates, by a step of an outer optimizer.

    Between two outer steps each rank trains on its own, so that 1/H as many gradients cross the ranks. The outer gradient is
    Δ = x - mean(x_r), where x are the weights after the last outer step and x_r those of rank r now. The outer optimizer steps
    from x along Δ, and each replica continues from there. The inner optimizers keep their state. Known methods are settings:

    - DiLoCo (arXiv:2311.08105): `SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)`, AdamW inside, `every=500`.
    - Local SGD (arXiv:1805.09767): `SGD(parameters, lr=1.0)`, which is the mean of the replicas.
    - SlowMo (arXiv:1910.00643): `SGD(parameters, lr=α, momentum=β)` with `by_inner_rate=True`.
    - BMUF (ICASSP 2016, doi:10.1109/ICASSP.2016.7472805): `SGD(parameters, lr=ζ, momentum=η)`, for its Nesterov block momentum
      with `nesterov=True`; `count="steps"` as in fairseq.
    - Lookahead (arXiv:1907.08610), in a single process: `SGD(parameters, lr=α)`.

    The outer step is made at the end of an update, before its `STEP_COMPLETED`: handlers of that update see equal weights.
    Validate, average (`ModelEMA`) and save there: at `Events.ITERATION_COMPLETED(every=H)` or a multiple. A checkpoint between
    two outer steps has the weights of each rank, and resumes bitwise on the same number of ranks. If an outer step raises, the
    replicas keep their weights, and the next one is made H updates later. Buffers stay each rank's own: see `ModelSync`. The
    outer step moves no parameter that a `Freeze` has held since the one before, by momentum or weight decay either, and no
    frozen weights of integers, bool, floats of one byte or quantised ones.

    It costs memory for a copy of the weights, the state of the outer optimizer, and at an outer step the differences twice
    more; and an all-reduce of the weights every H updates, for which the device is waited for. All ranks must attach it.

    Args:
        optimizer: the outer one, over the parameters that are trained, all of them. What is trained later, and held until then
            by `Freeze(..., until=...)`, is among them: what comes into the inner optimizers after `attach` is refused.
        every: H.
        count: what every H counts: `"updates"`, the skipped ones too, as SlowMo does; or `"steps"`, the updates in which some
            rank has stepped, as fairseq's BMUF does.
        by_inner_rate: divide the outer gradient by the learning rate inside and multiply the outer step by it, as SlowMo does,
            so that its momentum is in units of gradients when the rate changes. The rate must be above 0 there.

    Attributes:
        num_outer_steps: how many outer steps were made.
        grad_norm: L2 norm of the latest outer gradient; NaN before the first.

    Raises:
        TypeError: `optimizer` is not an optimizer, or `every` is not an integer.
        ValueError: `every` is below 1, or `count` is not known.

    Example:
        >>> inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> options = UpdateOptions(reduction="local")
        >>> trainer = create_trainer(model, inner, forward, options=options)
        >>> outer = OuterOptimizer(torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True), every=4)
        >>> outer.attach(trainer)
        >>> state = trainer.run([torch.ones(8, 3)] * 12, max_epochs=1)
        >>> outer.num_outer_steps
        3
    """

    not_elastic = "its replicas train on their own between two outer steps; that is reduction='local'"

    is_collective = True
    of_one_trainer = True

    same_on_all_ranks = True

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        every: int,
        count: Literal["updates", "steps"] = "updates",
        by_inner_rate: bool = False,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {describe(optimizer)}")
        if not isinstance(by_inner_rate, bool):
            raise TypeError(f"by_inner_rate must be True or False, got {describe(by_inner_rate)}")
        self.optimizer, self.every = optimizer, positive_int("every", every)
        self.count, self.by_inner_rate = one_of("count", count, ("updates", "steps")), by_inner_rate
        self.num_outer_steps, self.grad_norm = 0, math.nan
        self._num_updates = 0  # since the last outer step
        self._named: dict[str, nn.Parameter] = {}
        self._weights: dict[str, Tensor] = {}  # after the last outer step
        self._inside: list[Optimizer] = []

    def attach(self, trainer: Trainer) -> None:
        """Steps at the end of every H-th update of `trainer`.

        Raises:
            ValueError: there are several ranks and their gradients are reduced in each update; or the outer optimizer does not
                have the parameters that are trained, or is the trainer's own; or `trainer` has an outer optimizer already.
        """
        if collectives.world_size() > 1 and trainer.config["reduction"] != "local":
            raise ValueError(
                "OuterOptimizer needs replicas that train on their own, got a trainer that reduces gradients in each update; "
                "pass the plain model and options=UpdateOptions(reduction='local') to create_trainer"
            )
        if self.optimizer in trainer.optimizers.values():
            raise ValueError(
                "optimizer must be another optimizer than the trainer's own, got the same; pass "
                "torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True), say"
            )
        if trainer.moments.after_update:
            raise ValueError("trainer must have one OuterOptimizer at most, got a second one; attach it once")
        self._inside = [*trainer.optimizers.values()]
        self._take_parameters(trainer.model)
        self._keep_weights()
        trainer.moments.after_update.append(self._count)
        trainer.add_event_handler(Events.COMPLETED, self._warn_of_rest)
        trainer.prepend_event_handler(Events.STARTED, self)
        trainer.prepend_event_handler(Events.STARTED, _Replica(self, trainer))

    def __call__(self, trainer: Trainer) -> None:
        """A run begins: with no update since an outer step the weights are those that the model has now.

        Raises:
            ValueError: the trainer's optimizers have parameters that they did not have in `attach`.
        """
        self._check_nothing_came(trainer.model)
        if self._num_updates == 0:
            self._keep_weights()

    def state_dict(self) -> dict[str, Any]:
        """The outer optimizer's state and the weights after the latest outer step, which are the same on all ranks."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "weights": dict(self._weights),
            "num_outer_steps": self.num_outer_steps,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes it over, with the options of the outer optimizer, and warns of those that the script sets to other values.

        Raises:
            ValueError: it is of another model, or something in it is not what `state_dict()` gives.
        """
        check_fields("OuterOptimizer", state_dict, {"optimizer": MAPPING, "weights": MAPPING, "num_outer_steps": COUNT})
        saved = state_dict["weights"]
        check_same_model(saved, self._weights)
        self._warn_of_options(state_dict["optimizer"])
        SavedOptimizer(self.optimizer).load_state_dict(state_dict["optimizer"])
        self.num_outer_steps = state_dict["num_outer_steps"]
        for name, value in self._weights.items():
            value.copy_(saved[name])

    def _warn_of_options(self, saved: Mapping[str, Any]) -> None:
        """Says which options of the script a loaded state replaces."""
        pairs = zip(self.optimizer.param_groups, saved["param_groups"], strict=False)
        changes = {
            f"{key}: {other[key]!r} -> {group[key]!r}"
            for group, other in pairs
            for key in group.keys() & other.keys() - {"params", "param_names"}
            if other[key] != group[key]
        }
        if changes and collectives.is_main_rank():
            _logger.warning(
                f"OuterOptimizer: the script has changed {', '.join(sorted(changes))}, and the checkpoint's values are used; "
                "set them in optimizer.param_groups in a handler of ITERATION_STARTED to use the script's"
            )

    def _take_parameters(self, model: nn.Module) -> None:
        """Finds the parameters of the optimizers inside, which the outer one must have too, by their names."""
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise ValueError(
                "model must not be sharded with OuterOptimizer, got parameters that are DTensors; use plain replicas"
            )
        outer = {id(p) for group in self.optimizer.param_groups for p in group["params"] if can_move(p)}
        named = self._named_inside(model)
        missing = [name for name, parameter in named.items() if id(parameter) not in outer]
        if missing or len(outer) > len(named):
            what = f"got one without {missing[0]!r}" if missing else f"got {len(outer) - len(named)} that are not trained"
            raise ValueError(f"optimizer must be over the parameters that are trained, {what}; pass model.parameters()")
        self._named = named

    def _check_nothing_came(self, model: nn.Module) -> None:
        """Raises ValueError if the optimizers inside have a parameter that the outer step would leave out."""
        known = {id(parameter) for parameter in self._named.values()}
        came = next((name for name, parameter in self._named_inside(model).items() if id(parameter) not in known), None)
        if came is not None:
            raise ValueError(
                f"OuterOptimizer must know all parameters that are trained, got {came!r}, which came after attach; give both "
                "optimizers all of them from the start, with Freeze(..., until=...) on the trainer, or add them before attach"
            )

    def _named_inside(self, model: nn.Module) -> dict[str, nn.Parameter]:
        inside = self._rates_inside()
        return {name: p for name, p in model.named_parameters() if id(p) in inside and can_move(p)}

    def _rates_inside(self) -> dict[int, Any]:
        """The learning rate of each parameter by its id, in the groups as they are now: a loaded state brings other groups."""
        groups = [group for optimizer in self._inside for group in optimizer.param_groups]
        return {id(parameter): group["lr"] for group in groups for parameter in group["params"]}

    def _rates(self) -> list[Any]:
        """The divisor of the outer gradient of each parameter; empty without `by_inner_rate`.

        Raises:
            ValueError: a rate is 0.
        """
        if not self.by_inner_rate:
            return []
        known = self._rates_inside()
        rates = {name: known[id(parameter)] for name, parameter in self._named.items()}
        zero = next((name for name, rate in rates.items() if rate == 0), None)
        if zero is not None:
            raise ValueError(
                f"by_inner_rate needs learning rates above 0 in the update of an outer step, got 0 for {zero!r}; let the "
                "schedule begin and end above 0, or leave by_inner_rate out"
            )
        return [*rates.values()]

    def _keep_weights(self) -> None:
        self._weights = {name: parameter.detach().clone() for name, parameter in self._named.items()}

    def _warn_of_rest(self, trainer: Trainer) -> None:
        """Warns at the end of a run that the replicas are not equal: the model of each rank is another one."""
        if self._num_updates and collectives.world_size() > 1 and not trainer.replicas.are_equal:
            _logger.warning(
                f"the run has ended {_updates(self._num_updates)} after an outer step: each rank has weights of its own; end "
                "at an outer step before the model is used"
            )

    def _count(self, trainer: Trainer) -> None:
        """An update was counted. Collective, if a step is due."""
        state, output = trainer.state, trainer.state.update_output
        self._num_updates += 1
        if self.count == "updates":
            is_due = state.iteration % self.every == 0
        else:
            is_due = output is not None and output.applied and state.num_steps % self.every == 0
        if is_due:
            self._step(trainer)

    @torch.no_grad()
    def _step(self, trainer: Trainer) -> None:
        """The outer step. Collective; reads one number. If it raises, each replica has the weights that it had before."""
        self._check_nothing_came(trainer.model)
        parameters, weights, rates = [*self._named.values()], [*self._weights.values()], self._rates()
        differences = [weight - parameter for weight, parameter in zip(weights, parameters, strict=True)]
        mean_over_ranks(differences)
        norms = [torch.linalg.vector_norm(one, dtype=torch.promote_types(one.dtype, torch.float64)) for one in differences]
        on_host = torch.stack([norm.cpu() for norm in norms])  # sync
        self.grad_norm = float(on_host.norm())
        if not math.isfinite(self.grad_norm):
            raise NonFiniteError(trainer.state.iteration, math.nan, self.grad_norm, ("in the outer gradient",))
        # What was thawed for a part of the interval has moved, and replicas differ in it.
        frozen = {id(parameter) for function in trainer.moments.frozen for parameter in function()}
        stays = [id(one) in frozen and norm == 0.0 for one, norm in zip(parameters, on_host.tolist(), strict=True)]
        kept = [(parameter.grad, parameter.clone()) for parameter in parameters]
        try:
            self._step_along(differences, parameters, weights, rates, stays)
        except BaseException:
            for parameter, (_, own) in zip(parameters, kept, strict=True):
                parameter.copy_(own)
            raise
        finally:
            for parameter, (gradient, _) in zip(parameters, kept, strict=True):
                parameter.grad = gradient
        for parameter, weight in zip(parameters, weights, strict=True):
            weight.copy_(parameter)
        self._num_updates, trainer.replicas.are_equal = 0, True
        self.num_outer_steps += 1

    def _step_along(
        self,
        differences: list[Tensor],
        parameters: list[nn.Parameter],
        weights: list[Tensor],
        rates: list[Any],
        stays: list[bool],
    ) -> None:
        """Moves the parameters from the weights of the latest outer step along their mean differences, which it changes."""
        for parameter, weight, difference, stay in zip(parameters, weights, differences, stays, strict=True):
            parameter.copy_(weight)
            # Momentum and weight decay would move a frozen one.
            parameter.grad = None if stay or not parameter.requires_grad else difference
        for difference, rate in zip(differences, rates, strict=False):
            difference.div_(rate)
        self.optimizer.step()
        for parameter, weight, rate in zip(parameters, weights, rates, strict=False):
            parameter.copy_(weight + (parameter - weight) * rate)


class _Replica:
    """Has in the checkpoints the weights of this rank between outer steps; those of rank 0 are the model of the run.

    The optimizers inside, whose state differs between the ranks, are written by each rank as any such state is.
    """

    def __init__(self, outer: OuterOptimizer, trainer: Trainer) -> None:
        self._outer, self._trainer = outer, weakref.proxy(trainer)

    def __call__(self) -> None:
        """Does nothing: it is attached so that its state is saved."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"num_updates": self._outer._num_updates, "num_ranks": collectives.world_size()}
        if collectives.is_main_rank():
            return state
        if self._outer._num_updates:
            state["weights"] = {name: value.detach() for name, value in self._outer._named.items()}
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        check_fields("OuterOptimizer", state_dict, {"num_updates": COUNT, "num_ranks": COUNT})
        num_updates, num_ranks = state_dict["num_updates"], state_dict["num_ranks"]
        if num_updates and num_ranks != collectives.world_size():
            raise ValueError(
                f"the checkpoint was written {_updates(num_updates)} after an outer step, with world size {num_ranks}, and "
                f"this run has {collectives.world_size()}; use world size {num_ranks}, or a checkpoint of an outer step"
            )
        self._outer._num_updates, self._trainer.replicas.are_equal = num_updates, num_updates == 0
        with torch.no_grad():
            for name, value in state_dict.get("weights", {}).items():
                self._outer._named[name].copy_(value)


def _updates(number: int) -> str:
    return "1 update" if number == 1 else f"{number} updates"
