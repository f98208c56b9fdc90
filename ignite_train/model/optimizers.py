"""Several optimizers over one model, which are stepped together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.arguments import describe
from ignite_train.internals.of_torch import COUNTS_STEPS

__all__ = [
    "GathersState",
    "InnerState",
    "OneOrSeveralOptimizers",
    "Optimizers",
    "as_optimizers",
    "check_optimizers",
    "each_optimizer",
    "has_own_form",
    "inner_optimizers",
    "is_torchs",
    "is_wrapped_by_scheduler",
    "load_optimizer_state",
    "optimizer_state",
    "optimizers_as_parts",
    "parts_as_optimizers",
    "stepped_parameters",
]

OneOrSeveralOptimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
"""The optimizers as `create_trainer` takes them: one optimizer, a list of them, or a mapping that names them."""

_PARAMETER = "parameter"  # what stands before the number of one that was a key
_FOLDER = "optimizers/"  # what the name of one of several begins with, in a checkpoint


@runtime_checkable
class GathersState(Protocol):
    """An optimizer whose ranks hold a part each, such as `ZeroRedundancyOptimizer`: rank 0 gathers all parts to save them."""

    def consolidate_state_dict(self, to: int) -> None:
        """Gathers the parts on rank `to`. Collective."""


class Optimizers:
    """Optimizers that step parameters of their own of one model, in the place where one optimizer over all of them could stand.

    Args:
        named: the optimizers by name, at least one.
        labels: what messages call them, by name.

    Attributes:
        named: the same.
        labels: the same.
    """

    def __init__(self, named: Mapping[str, Optimizer], labels: Mapping[str, str]) -> None:
        self.named, self.labels = dict(named), dict(labels)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all of them, as they are now, those of the first optimizer first."""
        return [group for optimizer in self.named.values() for group in optimizer.param_groups]

    @property
    def labelled(self) -> dict[str, Optimizer]:
        """The optimizers by what messages call them."""
        return {self.labels[name]: optimizer for name, optimizer in self.named.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # as torch's
        """Clears the gradients of all of them."""
        for optimizer in self.named.values():
            optimizer.zero_grad(set_to_none)

    def place(self, group: int) -> tuple[str, int]:
        """Where an index into `param_groups` leads: what a message calls that optimizer, and the index of the group there."""
        for name, optimizer in self.named.items():
            if group < len(optimizer.param_groups):
                return self.labels[name], group
            group -= len(optimizer.param_groups)
        raise IndexError(group)


class InnerState:
    """The state of an optimizer inside another one, as SAM has its base optimizer, for checkpoints.

    `Optimizer.state_dict` of the outer one does not have it. Where both share their groups they do so after loading too.

    Args:
        outer: the one that the run steps.
        inner: the one inside.

    Attributes:
        shares_groups: whether they have the same list of groups, so that one that is added to either is in both.
    """

    def __init__(self, outer: Optimizer, inner: Optimizer) -> None:
        self.inner, self._outer = inner, outer
        self.shares_groups = inner.param_groups is outer.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The state of the inner one."""
        return optimizer_state(self.inner)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """To be called after the outer one has loaded its own."""
        load_optimizer_state(self.inner, state_dict)
        if self.shares_groups:
            self.inner.param_groups = self._outer.param_groups


def has_own_form(state_dict: Mapping[str, Any]) -> bool:
    """Whether the state of an optimizer has other keys than those of torch, as that of some wrappers has."""
    return not {"state", "param_groups"} <= state_dict.keys()


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The `state_dict` of an optimizer, as a checkpoint can hold it.

    Where it has a form of its own, and parameters for the keys of a mapping, their numbers are the keys.
    """
    state = optimizer.state_dict()
    if has_own_form(state):
        numbers = {parameter: (_PARAMETER, number) for number, parameter in enumerate(_parameters_of(optimizer))}
        state = _with_other_keys(state, numbers)
    return state


def load_optimizer_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads what `optimizer_state` gave, each value as it was saved; tensors where torch puts them.

    torch's `load_state_dict` gives each tensor of the state the dtype of its parameter, which loses bits of moments in float32
    over weights in bfloat16, and makes other values of strings. An optimizer that overrides `load_state_dict` decides itself;
    what only has been rounded, since it calls torch's, is put back. What an optimizer shares with one inside it, the state or
    the parameter groups, it shares afterwards too.
    """
    inside = [one for one in vars(optimizer).values() if isinstance(one, Optimizer) and one is not optimizer]
    shared = [
        (inner, name, vars(inner)[name])
        for inner in inside
        for name in ("state", "param_groups")
        if vars(inner).get(name) is vars(optimizer).get(name)
    ]
    _load_optimizer_state(optimizer, state_dict)
    for inner, name, before in shared:
        loaded, other = (optimizer, inner) if vars(optimizer)[name] is not before else (inner, optimizer)
        vars(other)[name] = vars(loaded)[name]


def _load_optimizer_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    if has_own_form(state_dict):
        by_key = {(_PARAMETER, number): parameter for number, parameter in enumerate(_parameters_of(optimizer))}
        optimizer.load_state_dict(_with_other_keys(state_dict, by_key))
        return
    optimizer.load_state_dict(dict(state_dict))
    by_torch = type(optimizer).load_state_dict is Optimizer.load_state_dict
    restored = _as_saved if by_torch else _unrounded
    parameters = _parameters_of(optimizer)
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if not by_torch and len(keys) != len(parameters):
        return
    for parameter, key in zip(parameters, keys, strict=True):
        saved, loaded = state_dict["state"].get(key), optimizer.state.get(parameter)
        if isinstance(saved, Mapping) and isinstance(loaded, dict):
            for name in saved.keys() & loaded.keys() - {"step"}:  # whose dtype and device depend on the kernel
                loaded[name] = restored(saved[name], loaded[name], parameter.dtype)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _with_other_keys(value: Any, keys: Mapping[Any, Any]) -> Any:
    """A copy of nested mappings and lists, in which `keys` says what some keys are replaced by."""
    if isinstance(value, Mapping):
        return {keys.get(key, key): _with_other_keys(entry, keys) for key, entry in value.items()}
    return [_with_other_keys(entry, keys) for entry in value] if type(value) is list else value


def _as_saved(saved: Any, loaded: Any, dtype: torch.dtype) -> Any:
    """`saved`, with its tensors on the devices of those in `loaded`."""
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(saved, Mapping) and isinstance(loaded, Mapping):
        return {key: _as_saved(value, loaded[key], dtype) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return type(saved)(_as_saved(one, other, dtype) for one, other in zip(saved, loaded, strict=True))
    return saved


def _unrounded(saved: Any, loaded: Any, dtype: torch.dtype) -> Any:
    """`loaded`, with the saved tensors in place of those that are nothing but rounded to the dtype of the parameter."""
    if type(saved) is Tensor and type(loaded) is Tensor:
        there = saved.to(loaded.device)
        is_rounded = saved.dtype != loaded.dtype == dtype and saved.shape == loaded.shape
        return there if is_rounded and torch.allclose(there.to(dtype), loaded, rtol=0, atol=0, equal_nan=True) else loaded
    if isinstance(saved, dict) and type(saved) is type(loaded) and saved.keys() == loaded.keys():
        return type(saved)((key, _unrounded(value, loaded[key], dtype)) for key, value in saved.items())
    if type(saved) in (list, tuple) and type(saved) is type(loaded) and len(saved) == len(loaded):
        return type(saved)(_unrounded(one, other, dtype) for one, other in zip(saved, loaded, strict=True))
    return loaded


def inner_optimizers(optimizer: Optimizer, *, with_own_state: bool = True) -> dict[str, Optimizer]:
    """The optimizers that are attributes of another one, by the names of the attributes.

    Args:
        optimizer: the one outside.
        with_own_state: leave out those that share its state.
    """
    found = {name: one for name, one in vars(optimizer).items() if isinstance(one, Optimizer) and one is not optimizer}
    return {name: one for name, one in found.items() if not (with_own_state and one.state is optimizer.state)}


def each_optimizer(optimizer: Optimizer | Optimizers) -> Iterator[Optimizer]:
    """The optimizer, or each of several, and those inside them."""
    for one in [optimizer] if isinstance(optimizer, Optimizer) else optimizer.named.values():
        yield one
        for inner in inner_optimizers(one).values():
            yield from each_optimizer(inner)


def as_optimizers(optimizer: Any) -> Optimizer | Optimizers:
    """One optimizer as it is; a list or a mapping as `Optimizers`, where those in a list are called "0", "1" and so on.

    Raises:
        TypeError: it is neither an optimizer, nor a list or a mapping of optimizers.
        ValueError: it is empty, holds one optimizer twice, or has a name that no checkpoint can hold.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, Mapping):
        named = dict(optimizer)
        labels = {name: f"optimizer[{name!r}]" for name in named}
    elif isinstance(optimizer, (list, tuple)):
        named = {str(index): one for index, one in enumerate(optimizer)}
        labels = {name: f"optimizer[{name}]" for name in named}
    else:
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, or a list or a mapping of them, got {describe(optimizer)}"
            f"{_instead_of(optimizer)}"
        )
    if not named:
        raise ValueError("optimizer must hold at least one torch.optim.Optimizer, got none")
    for name, one in named.items():
        if not isinstance(name, str) or not name or any(sign in name for sign in "[/"):
            raise ValueError(
                f"optimizer must have names that are strings without '[' and '/', got {name!r}; checkpoints have them in their "
                "own names"
            )
        if not isinstance(one, Optimizer):
            raise TypeError(f"{labels[name]} must be a torch.optim.Optimizer, got {describe(one)}{_instead_of(one)}")
    if len({id(one) for one in named.values()}) < len(named):
        raise ValueError("optimizer must hold each torch.optim.Optimizer once, got one of them twice")
    return Optimizers(named, labels)


def _instead_of(value: Any) -> str:
    """The advice for an object that is often passed in place of an optimizer."""
    if isinstance(value, LRScheduler):
        return "; attach it: LearningRateSchedule(scheduler).attach(trainer)"
    if isinstance(value, type) and issubclass(value, Optimizer):
        return f"; write {value.__name__}(model.parameters(), lr=...)"
    return ""


def optimizers_as_parts(optimizer: Optimizer | Optimizers) -> dict[str, Optimizer | InnerState]:
    """The optimizers by their names in a checkpoint, and those inside them, each once."""
    if isinstance(optimizer, Optimizers):
        outer = {f"{_FOLDER}{name}": one for name, one in optimizer.named.items()}
    else:
        outer = {"optimizer": optimizer}
    met, parts = {id(one) for one in outer.values()}, dict[str, Optimizer | InnerState]()
    for name, one in outer.items():
        parts[name] = one
        if not isinstance(one, GathersState):
            _add_inner(parts, met, name, one)
    return parts


def _add_inner(parts: dict[str, Optimizer | InnerState], met: set[int], prefix: str, owner: Optimizer) -> None:
    for name, one in inner_optimizers(owner).items():
        if id(one) not in met:
            met.add(id(one))
            parts[f"{prefix}.{name}"] = InnerState(owner, one)
            _add_inner(parts, met, f"{prefix}.{name}", one)


def parts_as_optimizers(parts: Mapping[str, Any]) -> Optimizer | dict[str, Optimizer]:
    """The optimizers among the parts of a run, as `create_trainer` takes them."""
    found = {name.removeprefix(_FOLDER): part for name, part in parts.items() if isinstance(part, Optimizer)}
    return found["optimizer"] if "optimizer" in parts else found


def stepped_parameters(parts: Mapping[str, Any]) -> list[nn.Parameter]:
    """The parameters of the optimizers among the parts of a run, of one optimizer or of several."""
    optimizers = [part for part in parts.values() if isinstance(part, Optimizer)]
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


def check_optimizers(model: nn.Module, optimizer: Optimizer | Optimizers, *, closure: bool = False) -> None:
    """Sees to it that each trainable parameter of `model` is stepped once, at a finite rate, and nothing else is stepped.

    Args:
        model: the model.
        optimizer: its optimizer, or several.
        closure: whether its step is given a closure.

    Raises:
        TypeError: it is LBFGS, which needs one.
        ValueError: model and optimizers do not belong together, or a learning rate is missing or not finite.
    """
    named = {"optimizer": optimizer} if isinstance(optimizer, Optimizer) else optimizer.labelled
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, str] = {}
    for label, one in named.items():
        if isinstance(one, LBFGS) and not closure:
            raise TypeError(
                f"{label} must not be LBFGS without a closure, which it evaluates several times a step; pass "
                "options=UpdateOptions(closure=True)"
            )
        _check_optimizer(label, one, names)
        for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
            if (owner := owners.get(id(parameter))) is not None:  # torch itself only warns of one that is twice in a group
                where = f"twice in {label}" if owner == label else f"in {owner} and in {label}"
                raise ValueError(
                    f"optimizer must step each parameter once, got {names[id(parameter)]!r} {where}; leave it out of one place"
                )
            owners[id(parameter)] = label
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in owners]
    if missing:
        raise ValueError(
            f"optimizer must be over all trainable parameters, got one without {missing[0]!r} and {len(missing) - 1} more; "
            "add them, or freeze them with requires_grad_(False)"
        )


def _check_optimizer(label: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
    for index, group in enumerate(optimizer.param_groups):
        way = next((way for way in ("fused", "foreach") if group.get(way)), None)
        if way is not None and len({isinstance(parameter, DTensor) for parameter in group["params"]}) > 1:
            raise ValueError(
                f"{label} must not have DTensors beside plain parameters in one group with {way}=True, which torch cannot step "
                f"together, got both in param_groups[{index}]; make two groups, or leave out {way}"
            )
        if group.get("lr") is None:
            raise ValueError(
                f"{label} must have a learning rate in each group, got none in param_groups[{index}]; set its 'lr', to 1.0 if "
                "the optimizer computes its rates itself"
            )
        rate = float(group["lr"])  # sync, once, if it lies on an accelerator
        if not math.isfinite(rate):
            raise ValueError(f"{label} must have finite learning rates, got {rate!r} in param_groups[{index}]; set its 'lr'")
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"{label} must be over the parameters of model, got a foreign one of shape {tuple(parameter.shape)} in "
                    f"param_groups[{index}]; build the optimizer from model.parameters() after the model has its final device, "
                    "dtype and layers, or put a criterion that owns it into one model with the net, nn.ModuleDict({...})"
                )


def is_torchs(step: Any) -> bool:
    """Whether a step, and all that it wraps, are functions of torch's optimizers; a decorator can copy any name but this."""
    while isinstance(step, FunctionType) and step.__globals__["__name__"].startswith("torch.optim."):
        if "__wrapped__" not in vars(step):
            return True
        step = vars(step)["__wrapped__"]
    return False


def is_wrapped_by_scheduler(step: Any, kind: type[Optimizer]) -> bool:
    """Whether `step` is what torch's schedulers put in its place, to count its calls, and nothing else."""
    marks = vars(step) if isinstance(step, FunctionType) else {}
    return COUNTS_STEPS in marks and marks["__wrapped__"] is kind.step
