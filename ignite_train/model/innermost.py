"""The module inside of the wrappers that change how it runs, and not what it is."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ignite_train.internals.of_torch import WRAPPED

__all__ = ["innermost"]


def innermost(module: nn.Module) -> nn.Module:
    """The module without its wrappers: replicas, compilation, and recomputed activations. Those of its children stay."""
    children = dict(module.named_children())
    names = ("module",) if isinstance(module, (DataParallel, DistributedDataParallel)) else WRAPPED
    return innermost(*children.values()) if [*children] in [[name] for name in names] else module
