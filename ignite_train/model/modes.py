"""Training mode and eval mode of each module, where some are in one and some in the other."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["modes_of", "set_modes"]

Modes = list[tuple[nn.Module, bool]]


def modes_of(model: nn.Module, training: Iterable[nn.Module] | None = None) -> Modes:
    """Each module of a model, parents before their children, and whether it is in training mode.

    Args:
        model: the model.
        training: the modules that are to be in training mode, and no others; None: those in it now.
    """
    if training is None:
        return [(module, module.training) for module in model.modules()]
    chosen = {id(module) for module in training}
    return [(module, id(module) in chosen) for module in model.modules()]


def set_modes(modes: Modes, *, since: Modes) -> None:
    """Puts each module into a mode of its own, those with a `train()` or `eval()` of their own by a call of it, as by hand.

    An adapter takes its weights out of those of the layer there, and a cache is emptied. The attribute alone would leave them.
    Where the mode stays, nothing is called: a frozen module may refuse `train()`. Call it again where Ctrl-C has broken it off.

    Args:
        modes: the modes to set.
        since: the modes before, of the same modules in the same order.
    """
    for (module, before), (_, mode) in zip(since, modes, strict=True):
        if before != mode:
            module.training = before  # so that the `train()` in which Ctrl-C came is called again
    for module, mode in modes:
        if module.training != mode:
            _put(module, mode)
    for module, mode in modes:
        module.training = mode  # a second parent may have changed it, and a `train()` of the user's may keep another


def _put(module: nn.Module, mode: bool) -> None:  # noqa: FBT001  # as torch has it
    """Sets the mode of a module: by its own `train()` or `eval()`, of its class or of itself, which may reach all children."""
    if _is_of_torch(module.train, nn.Module.train) and _is_of_torch(module.eval, nn.Module.eval):
        module.training = mode
        return
    with suppress(NotImplementedError):  # of a module that torch.export has made
        if inspect.signature(module.train).parameters:
            module.train(mode)
        else:
            _ = module.train() if mode else module.eval()


def _is_of_torch(method: Any, function: Any) -> bool:
    return isinstance(method, MethodType) and method.__func__ is function
