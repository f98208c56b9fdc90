"""Several optimizers over one model, which are stepped together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ignite_train.arguments import describe
from ignite_train.internals.of_torch import COUNTS_STEPS, give_hooks

__all__ = [
    "OneOrSeveralOptimizers",
    "Optimizers",
    "as_optimizers",
    "check_optimizers",
    "each_optimizer",
    "inner_optimizers",
    "is_torchs",
    "is_wrapped_by_scheduler",
    "labelled_optimizers",
    "optimizers_as_parts",
    "parts_as_optimizers",
    "stepped_parameters",
]

OneOrSeveralOptimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
"""The optimizers as `create_trainer` takes them: one optimizer, a list of them, or a mapping that names them."""

_CONTAINERS = (list, tuple, dict)
_NOT_INSIDE = ("state", "param_groups", "defaults")  # attributes of an optimizer that hold none
_FOLDER = "optimizers/"  # what the name of one of several begins with, in a checkpoint


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

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # as torch's
        """Clears the gradients of all of them."""
        for optimizer in self.named.values():
            optimizer.zero_grad(set_to_none)


def inner_optimizers(optimizer: Optimizer, *, with_own_state: bool = True, in_containers: bool = True) -> dict[str, Optimizer]:
    """The optimizers in the attributes of another one, also in lists, tuples and dictionaries there.

    Args:
        optimizer: the one outside.
        with_own_state: leave out those that share its state.
        in_containers: look into lists, tuples and dictionaries.

    Returns:
        Them by the names of the attributes, each followed by "-0", "-1" and so on, the places in a list or a dictionary.
    """
    found, seen = dict[str, Optimizer](), {id(optimizer)}
    waiting = [(name, value) for name, value in vars(optimizer).items() if name not in _NOT_INSIDE]
    for name, one in waiting:  # grows
        if id(one) not in seen and isinstance(one, (Optimizer, *_CONTAINERS) if in_containers else Optimizer):
            seen.add(id(one))
            if not isinstance(one, Optimizer):
                entries = one.values() if isinstance(one, dict) else one
                waiting += [(f"{name}-{place}", entry) for place, entry in enumerate(entries)]
            elif not (with_own_state and one.state is optimizer.state):
                found[name] = one
    return found


def each_optimizer(optimizer: Optimizer | Optimizers, *, with_own_state: bool = True) -> list[Optimizer]:
    """The optimizer, or each of several, and those inside them, each before those inside it.

    Args:
        optimizer: one or several.
        with_own_state: leave out those that share the state of the one around them.
    """
    found, seen = list[Optimizer](), set[int]()
    waiting = [*labelled_optimizers(optimizer).values()]
    while waiting:
        one = waiting.pop(0)
        if id(one) not in seen:
            seen.add(id(one))
            found.append(one)
            waiting[:0] = inner_optimizers(one, with_own_state=with_own_state).values()
    return found


def labelled_optimizers(optimizer: Optimizer | Optimizers) -> dict[str, Optimizer]:
    """The optimizer, or each of several, by what messages call it."""
    if isinstance(optimizer, Optimizer):
        return {"optimizer": optimizer}
    return {optimizer.labels[name]: one for name, one in optimizer.named.items()}


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


def optimizers_as_parts(optimizer: Optimizer | Optimizers) -> dict[str, Optimizer]:
    """The optimizers by their names in a checkpoint."""
    if isinstance(optimizer, Optimizers):
        return {f"{_FOLDER}{name}": one for name, one in optimizer.named.items()}
    return {"optimizer": optimizer}


def parts_as_optimizers(parts: Mapping[str, Any]) -> dict[str, Optimizer]:
    """The optimizers among the parts of a run, by the names that they were given, or the only one as `"optimizer"`."""
    return {name.removeprefix(_FOLDER): part for name, part in parts.items() if isinstance(part, Optimizer)}


def stepped_parameters(
    optimizers: Mapping[str, Optimizer], within: nn.Module | Iterable[nn.Parameter] | None = None
) -> list[nn.Parameter]:
    """The parameters of the optimizers of a run, of one optimizer or of several.

    Args:
        optimizers: `trainer.optimizers`.
        within: a module, or parameters, of which alone they are given; None: all.
    """
    every = optimizers.values()
    stepped = [parameter for optimizer in every for group in optimizer.param_groups for parameter in group["params"]]
    if within is None:
        return stepped
    chosen = {id(parameter) for parameter in (within.parameters() if isinstance(within, nn.Module) else within)}
    return [parameter for parameter in stepped if id(parameter) in chosen]


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
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, str] = {}
    for label, one in labelled_optimizers(optimizer).items():
        if isinstance(one, LBFGS) and not closure:
            raise TypeError(
                f"{label} must not be LBFGS without a closure, which it evaluates several times a step; pass "
                "options=UpdateOptions(closure=True)"
            )
        give_hooks(one)
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
            "add them, or freeze them with requires_grad_(False); if another trainer trains them, pass as model the part that "
            "this one trains, and call the whole in forward"
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
                f"{label} must have a learning rate in each group, got none in param_groups[{index}]; set "
                f"optimizer.param_groups[{index}]['lr'], to 1.0 if the optimizer computes its rates itself"
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
