"""Compiling a model in place, as `torch.nn.Module.compile` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ignite_train.arguments import shown
from ignite_train.wrapping import unwrap

__all__ = ["Compile", "compile_in_place"]

Compile = bool | Mapping[str, Any]
"""Whether to compile; options of `torch.compile`, such as `{"mode": "reduce-overhead"}`, mean yes."""


def compile_in_place(model: nn.Module, options: Compile) -> None:
    """Has `model` compiled when it is first called; its class and the names of its parameters stay.

    Inside DistributedDataParallel it is the module, not the wrapper, which changes with each micro-batch; torch still cuts
    the graph where the wrapper's buckets end, so that their reduction overlaps backward.

    Args:
        model: which one.
        options: see `Compile`; nothing is done for False.

    Raises:
        TypeError: the options are neither a bool nor a mapping.
        ValueError: the model is sharded, which puts calls between its blocks that no graph can span; or it is a bare module of
            torch, whose code torch leaves as it is without a word.
    """
    if not isinstance(options, (bool, Mapping)):
        raise TypeError(f"compile must be a bool or a mapping of torch.compile's options, got {shown(options)}")
    if options is False:
        return
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            "compile must be False for a model that fully_shard was applied to; compile its blocks before sharding"
        )
    module = unwrap(model)
    if type(module).__module__.startswith("torch.nn."):
        raise ValueError(
            f"compile must be False for a bare {type(module).__name__}, which torch leaves as it is; make it a part of a "
            "module with a forward of your own"
        )
    module.compile(**({} if options is True else options))
