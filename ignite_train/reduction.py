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
    """

    divisor: int

    def local(self) -> AbstractContextManager[Any]:
        """The context of a forward and backward whose gradients stay on this rank."""

    def take_part(self) -> None:
        """Reduces gradients as the others do in their last backward, on a rank that has no micro-batch: adds zero. Collective."""


class NoReduction:
    """One process: there is nobody to reduce with."""

    divisor = 1

    def local(self) -> AbstractContextManager[Any]:
        """Nothing to hold back."""
        return nullcontext()

    def take_part(self) -> None:
        """Nobody to take part with."""


class HookedReduction:
    """`DistributedDataParallel`: its hooks average gradients in the last backward, overlapping it.

    Args:
        ddp: the wrapped model.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self.divisor = torch.distributed.get_world_size(ddp.process_group)

    def local(self) -> AbstractContextManager[Any]:
        """DDP's `no_sync`, which must cover forward and backward."""
        context: AbstractContextManager[Any] = self._ddp.no_sync()
        return context

    def take_part(self) -> None:
        """Goes through DDP's forward and backward with a graph that reaches each parameter with a gradient of zero.

        The module inside is never called, so no data is needed, no hook of the user's runs and no buffer changes. Nothing is
        multiplied by zero either: 0 · inf would be NaN.
        """
        ddp, module = self._ddp, self._ddp.module
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if ddp.find_unused_parameters:
            parameters = parameters[:1]  # those that no rank uses must stay without a gradient
        ddp.module = _NoData(parameters)
        try:
            ddp().backward()
        finally:
            ddp.module = module


class _NoData(nn.Module):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._borrowed = tuple(parameters)

    def forward(self) -> Tensor:
        zero: Tensor = _ZeroGradients.apply(*self._borrowed)  # type: ignore[no-untyped-call]
        return zero


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


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
        return NoReduction()
    covered = {id(parameter) for parameter in ddp.parameters()}
    stray = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if stray:
        raise ValueError(f"model must have all trainable parameters inside DistributedDataParallel, got {stray[0]!r} outside")
    reduction = HookedReduction(ddp)
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
