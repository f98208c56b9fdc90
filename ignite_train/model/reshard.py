"""Shards in their place again, where a forward without a backward has left whole parameters."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["reshard"]


def reshard(model: nn.Module) -> None:
    """Gives the modules of `fully_shard` their shards as parameters, and frees what was gathered. Does nothing in others.

    The optimizer has the shards. A forward with whole parameters would not see the numbers that a step, or a handler, has
    written into the shards since. No collective, but the next forward gathers them again: call it on all ranks, or on none.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
