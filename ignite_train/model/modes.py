"""Training mode and eval mode of each module, where some are in one and some in the other."""

from __future__ import annotations

from collections.abc import Iterable

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


def set_modes(modes: Modes) -> None:
    """Puts each module into a mode of its own, by calls of `train()`, which a module may have a definition of its own for.

    An adapter takes its weights out of those of the layer there, and a cache is emptied. The attribute alone would leave them.
    It may be called again where Ctrl-C has broken it off.
    """
    for module, mode in modes:
        module.training = not mode  # so that the `train()` of each is called, also of one in which Ctrl-C came
    for module, mode in modes:
        if module.training != mode:
            module.train(mode)
    for module, mode in modes:
        module.training = mode  # a second parent may have changed it, and a `train()` of the user's may keep another
