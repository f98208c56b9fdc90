"""The tensors of a model that an average of its weights is made of, and moving an average towards them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["averaged_statistics", "averaged_tensors", "local_tensors", "move_towards", "names_of_tensors"]


def averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is averaged, by name: parameters, as shards where they are sharded, and statistics of normalisation layers."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation may have left whole parameters in their place
    parameters = {name.replace("_orig_mod.", ""): value for name, value in model.named_parameters()}
    averaged = {name: value for name, value in parameters.items() if value.is_floating_point() or value.is_complex()}
    return averaged | averaged_statistics(model)


def averaged_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running means and variances of the normalisation layers that have them."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            for name in ("running_mean", "running_var"):
                found[f"{prefix}.{name}".lstrip(".").replace("_orig_mod.", "")] = module.get_buffer(name)
    return found


def names_of_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under each of their names."""
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, value in named:
            yield name.replace("_orig_mod.", ""), value


def local_tensors(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors, or the shards of this rank, which share their memory. To be called under `no_grad`."""
    return [value.to_local() if isinstance(value, DTensor) else value for value in tensors.values()]


def move_towards(averages: Mapping[str, Tensor], weights: Mapping[str, Tensor], share: float) -> None:
    """Moves each average: average ← average + share · (weight - average), in one `_foreach_lerp_`.

    Args:
        averages: by name; changed in place.
        weights: by the same names; on another device or in another dtype they are copied first.
        share: in [0, 1].
    """
    with torch.no_grad():
        moved, targets = local_tensors(averages), local_tensors(weights)
        targets = [target.to(average.device, average.dtype) for target, average in zip(targets, moved, strict=True)]
        torch._foreach_lerp_(moved, targets, share)
