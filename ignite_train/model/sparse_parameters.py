"""Parameters whose gradients are sparse: those of embeddings with `sparse=True`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from ignite_train.internals.of_torch import sparse_coo_tensor_unsafe
from ignite_train.model.optimizers import Optimizers, labelled_optimizers

__all__ = ["check_sparse_parameters", "no_rows", "sparse_gradient_values", "sparse_parameters", "tensor_of_rows"]

_CAPABLE = (Adagrad, SGD, SparseAdam)  # torch's optimizers that step along a sparse gradient


def sparse_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """The weights of the embeddings with `sparse=True`, and their names.

    What calls `torch.nn.functional.embedding(..., sparse=True)` itself is not known here.
    """
    found: dict[nn.Parameter, str] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and isinstance(module.weight, nn.Parameter):
            found[module.weight] = f"{prefix}.weight" if prefix else "weight"
    return found


def sparse_gradient_values(gradient: Tensor) -> Tensor:
    """The rows of a sparse gradient, or all elements of a dense one: numbers of the same norm.

    They share the memory of one that is dense or coalesced.
    """
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def tensor_of_rows(indices: Tensor, values: Tensor, shape: Sequence[int], *, is_coalesced: bool | None = None) -> Tensor:
    """A sparse tensor with these rows, which are right."""
    return sparse_coo_tensor_unsafe(indices[None], values, shape, is_coalesced=is_coalesced)


def no_rows(parameter: Tensor) -> Tensor:
    """A sparse gradient of `parameter` that has no row."""
    indices = torch.empty(0, dtype=torch.int64, device=parameter.device)
    values = parameter.detach().new_empty(0, *parameter.shape[1:])
    return tensor_of_rows(indices, values, parameter.shape)


def check_sparse_parameters(model: nn.Module, optimizer: Optimizer | Optimizers) -> None:
    """Sees to it that each optimizer can step the parameters that it has, before any of them has moved.

    Raises:
        ValueError: it cannot, or the model is sharded.
    """
    sparse = sparse_parameters(model)
    if sparse and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"model must have dense gradients in fully_shard, got {next(iter(sparse.values()))!r} of an embedding with "
            "sparse=True; build it with sparse=False"
        )
    for label, one in labelled_optimizers(optimizer).items():
        for group in one.param_groups:
            for parameter in group["params"]:
                _check_parameter(label, one, group, sparse.get(parameter))


def _check_parameter(label: str, optimizer: Optimizer, group: dict[str, object], sparse: str | None) -> None:
    """Looks at one parameter; `sparse` is its name if its gradient is."""
    if sparse is not None and (why := _why_not_stepped(optimizer, group)):
        raise ValueError(
            f"{label} must step the sparse gradient of {sparse!r}, got {type(optimizer).__name__}{why}; step it with "
            "SparseAdam, SGD or Adagrad in an optimizer of its own: optimizer=[adamw, SparseAdam(...)]"
        )
    if sparse is None and isinstance(optimizer, SparseAdam):
        raise ValueError(
            f"{label} must be over embeddings with sparse=True alone, got a SparseAdam over a parameter with dense gradients; "
            "step that in an optimizer of its own: optimizer=[adamw, SparseAdam(...)]"
        )


def _why_not_stepped(optimizer: Optimizer, group: dict[str, object]) -> str:
    """The obstacle to a step of torch's optimizer along a sparse gradient, if there is one; other optimizers are not known."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ""
    if not isinstance(optimizer, _CAPABLE):
        return ", which takes dense ones"
    if group.get("fused"):
        return " with fused=True, which takes dense ones"
    return " with weight_decay, which makes it dense" if group.get("weight_decay") else ""
