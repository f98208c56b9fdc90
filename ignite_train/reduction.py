"""When and how gradients cross ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ignite_train import distributed

__all__ = ["HookedReduction", "NoReduction", "Reduction", "reduction_for", "unwrap"]


class Reduction(Protocol):
    """What the update asks of the way in which gradients cross ranks.

    Attributes:
        divisor: what the reduced gradient is the sum over ranks divided by.
        module: the model without a wrapper around it, whose parameters have the names the user gave them.
    """

    divisor: int
    module: nn.Module

    def local(self) -> AbstractContextManager[Any]:
        """The context of a forward and backward whose gradients stay on this rank."""

    def forward_without_data(self) -> Tensor:
        """On a rank without a micro-batch: a loss whose backward adds zero to what the others reduce in theirs. Collective."""


class NoReduction:
    """One process: there is nobody to reduce with.

    Args:
        model: the model.
    """

    divisor = 1

    def __init__(self, model: nn.Module) -> None:
        self.module = model

    def local(self) -> AbstractContextManager[Any]:
        """Nothing to hold back."""
        return nullcontext()

    def forward_without_data(self) -> Tensor:
        """Never called: in one process there is no update without data."""
        raise NotImplementedError


class HookedReduction:
    """`DistributedDataParallel`: its hooks average gradients in the last backward, overlapping it.

    Args:
        model: `ddp`, or what holds it.
        ddp: the wrapped model.
    """

    def __init__(self, model: nn.Module, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.module = ddp.module if model is ddp else model
        self.divisor = torch.distributed.get_world_size(ddp.process_group)

    def local(self) -> AbstractContextManager[Any]:
        """DDP's `no_sync`, which must cover forward and backward."""
        context: AbstractContextManager[Any] = self._ddp.no_sync()
        return context

    def forward_without_data(self) -> Tensor:
        """Goes through DDP's forward, with its collectives, to a graph that reaches each parameter without a gradient.

        DDP takes what is missing for zero, or, where it looks for unused parameters, for unused on this rank. The module inside
        is never called, so no data is needed, no hook of the user's runs and no buffer changes. Nothing is multiplied by zero
        either: 0 · inf would be NaN.
        """
        ddp, module = self._ddp, self._ddp.module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        ddp.module = _NoData(module, parameters)
        try:
            loss: Tensor = ddp()
        finally:
            ddp.module = module
        return loss


class _NoData(nn.Module):
    """A module with the parameters and buffers of another, because DDP looks them up, and with a forward of its own."""

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._borrowed = tuple(parameters)
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules

    def forward(self) -> Tensor:
        zero: Tensor = _NoGradients.apply(*self._borrowed)  # type: ignore[no-untyped-call]
        return zero


class _NoGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_grad_outputs: Any) -> tuple[None, ...]:
        return (None,) * int(ctx.count)


def reduction_for(model: nn.Module) -> Reduction:
    """Recognises how the gradients of `model` cross ranks.

    Raises:
        TypeError: the model is wrapped in a way that cannot be right.
        ValueError: there are several ranks and parameters that nobody would synchronise.
    """
    if isinstance(model, DataParallel):
        raise TypeError("model must not be a DataParallel, whose replicas are threads; run one process for each device instead")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise TypeError(
            "model must not be sharded by fully_shard: that is not supported yet; wrap it in DistributedDataParallel"
        )
    ddp = _find_ddp(model)
    if ddp is None:
        if distributed.world_size() > 1:
            raise ValueError(
                f"model must be wrapped to train on {distributed.world_size()} ranks, got a bare {type(model).__name__}; pass "
                "idist.auto_model(model) or DistributedDataParallel(model)"
            )
        return NoReduction(model)
    covered = {id(parameter) for parameter in ddp.parameters()}
    stray = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if stray:
        raise ValueError(f"model must have all trainable parameters inside DistributedDataParallel, got {stray[0]!r} outside")
    reduction = HookedReduction(model, ddp)
    if reduction.divisor != distributed.world_size():
        raise ValueError(
            f"model must be reduced over all {distributed.world_size()} ranks, got a process_group of {reduction.divisor}"
        )
    return reduction


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside a `DistributedDataParallel`: to run forward without a collective in it."""
    ddp = _find_ddp(model)
    if ddp is None:
        return model
    inside = {id(parameter) for parameter in ddp.parameters()}
    if any(id(parameter) not in inside for parameter in model.parameters()):
        raise TypeError("model must be a DistributedDataParallel or contain none; pass the modules without their wrappers")
    module: nn.Module = ddp.module
    return module


def _find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(wrapped) > 1:
        raise TypeError(f"model must hold one DistributedDataParallel at most, got {len(wrapped)}; wrap the whole model once")
    return wrapped[0] if wrapped else None
