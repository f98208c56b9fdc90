"""Parameter groups for an optimizer: which parameters have weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ignite_train.arguments import describe, did_you_mean, real_number
from ignite_train.internals.of_torch import RunningNorm

__all__ = ["parameter_groups"]

_NORMS = (RunningNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def parameter_groups(model: nn.Module, *, weight_decay: float, no_decay: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Divides the trainable parameters into those with weight decay and those without.

    Without decay are: parameters with at most one dimension, those of normalisation layers, those whose own name begins with
    `bias`, and those that you name. A parameter that the model has twice is in one group, once: without decay if one of its
    names is.

    Args:
        model: the model; it may be sharded or wrapped already.
        weight_decay: of the first group; at least 0.
        no_decay: full names of more parameters without it, such as `("embedding.weight",)`.

    Returns:
        The groups, with decay first, each in the order of the model; a group without parameters is left out.

    Raises:
        TypeError: `model` is not a module, `weight_decay` is not a number, or `no_decay` is a string.
        ValueError: `weight_decay` is negative, a name in `no_decay` is unknown, or no parameter is trainable.

    Example:
        >>> import torch
        >>> from ignite_train import parameter_groups
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-3)
        >>> [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
        [(0.1, 1), (0.0, 3)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    decay = real_number("weight_decay", weight_decay, at_least=0)
    if isinstance(no_decay, str):
        raise TypeError(f"no_decay must be a sequence of names, got {no_decay!r}; pass ({no_decay!r},)")
    trainable, exempt, excluded = {}, set(), set(no_decay)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in excluded - set(names):
        raise ValueError(f"no_decay must have names of parameters of the model, got {name!r}{did_you_mean(name, names)}")
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own_name, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{own_name}" if prefix else own_name
            trainable[id(parameter)] = parameter
            if parameter.ndim <= 1 or isinstance(module, _NORMS) or own_name.startswith("bias") or name in excluded:
                exempt.add(id(parameter))
    found = [(key in exempt, parameter) for key, parameter in trainable.items() if parameter.requires_grad]
    if not found:
        raise ValueError(f"model must have trainable parameters, got a {type(model).__name__} without one")
    groups = [
        {"params": [parameter for is_exempt, parameter in found if not is_exempt], "weight_decay": decay},
        {"params": [parameter for is_exempt, parameter in found if is_exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
