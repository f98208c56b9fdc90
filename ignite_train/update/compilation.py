"""Compiling a model in place, as `torch.nn.Module.compile` does, and its backward with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ignite_train.arguments import describe
from ignite_train.model.direct_backward import direct_backward
from ignite_train.ranks.wrapping import unwrap

__all__ = ["Backward", "Compile", "compile_in_place"]

Backward = Callable[..., None]
"""Runs backward from a loss; takes the arguments of `torch.autograd.backward`."""

Compile = bool | Mapping[str, Any]
"""Whether to compile; options of `torch.compile`, such as `{"mode": "reduce-overhead"}`, mean yes."""


def compile_in_place(model: nn.Module, options: Compile, *, backward: bool = False) -> Backward:
    """Has `model` compiled when it is first called; its class and the names of its parameters stay.

    Inside DistributedDataParallel it is the module, not the wrapper, which changes with each micro-batch; torch still cuts
    the graph where the wrapper's buckets end, so that their reduction overlaps backward.

    Args:
        model: which one.
        options: see `Compile`; nothing is done for False.
        backward: whether backward is traced and compiled too, with the same options (compiled autograd).

    Returns:
        What runs backward.

    Raises:
        TypeError: the options are neither a bool nor a mapping.
        ValueError: the model is sharded, which puts calls between its blocks that no graph can span; or it is a bare module of
            torch, whose code torch leaves as it is without a message. Backward is to be compiled without the model, or in
            DistributedDataParallel.
    """
    if not isinstance(options, (bool, Mapping)):
        raise TypeError(f"compile must be a bool or a mapping of torch.compile's options, got {describe(options)}")
    if options is False:
        if backward:
            raise ValueError("compiled_autograd must be False without compile; pass compile=True, or torch.compile's options")
        return direct_backward
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
    if backward and module is not model:
        raise ValueError(
            "compiled_autograd must be False in DistributedDataParallel, whose reduction torch does not trace; pass the module "
            "inside, with options=UpdateOptions(reduction='explicit')"
        )
    settings = {} if options is True else dict(options)
    module.compile(**settings)
    return _compiled_backward(settings) if backward else direct_backward


def _compiled_backward(settings: dict[str, Any]) -> Backward:
    """Traces the whole of backward when it is first run: also of the loss, which no graph of forward holds, and `.grad +=`.

    Torch looks a trace up by the structure of the autograd graph and by whether a gradient is there already; so there is one
    for the first micro-batch of a group and one for all others, and more where sizes vary.
    """
    compiler = torch.compile(**settings)
    dynamic = settings.get("dynamic") is True  # torch's own rule: a size is fixed until it is seen to vary

    def backward(loss: Tensor, **arguments: Any) -> None:
        with torch._dynamo.compiled_autograd._enable(compiler, dynamic=dynamic):
            torch.autograd.backward(loss, **arguments)

    return backward
