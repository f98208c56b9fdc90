"""Whether a model is sharded; and its shards in their place again, where forward without backward has left whole parameters."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["is_sharded", "reshard"]


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the model, or to modules in it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Gives the modules of `fully_shard` their shards as parameters, and frees what was gathered. Does nothing in others.

    The optimizer has the shards. A forward with whole parameters would not see the numbers that a step, or a handler, has
    written into the shards since. No collective, but the next forward gathers them again: call it on all ranks, or on none.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
