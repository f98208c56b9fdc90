"""A look at the graph of the first loss of a sharded model: whether its backward would make sparse gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ignite_train.errors import SparseGradientError
from ignite_train.events import TrainEvents
from ignite_train.internals.of_torch import gives_sparse_gradients
from ignite_train.trainer import Trainer

__all__ = ["refuse_sparse_gradients"]

_EMBEDDINGS = ("EmbeddingBackward0", "EmbeddingBagBackward0")
_LEAF = "torch::autograd::AccumulateGrad"


def refuse_sparse_gradients(trainer: Trainer, model: nn.Module) -> Trainer:
    """Has `trainer` raise a `SparseGradientError` before its first backward, if `fully_shard` was applied to `model`.

    FSDP2 fails inside backward over a sparse gradient and then has it no more, so that the parameter could not be named. In all
    other models the gradient is found on its parameter once torch has failed; they are not looked at here.
    """
    if not isinstance(model, FSDPModule):
        return trainer

    def look(trainer: Trainer) -> None:
        handle.remove()
        output = trainer.state.forward_output
        leaf = None if output is None else next(_sparse_leaves(output.loss), None)
        if leaf is not None:
            raise SparseGradientError(" or ".join(_names(model, leaf)))

    handle = trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, look)
    return trainer


def _sparse_leaves(loss: Tensor) -> Iterator[Tensor]:
    """The leaves for which an embedding in the graph of `loss` makes sparse gradients."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        below = [] if node is None else [child for child, _ in node.next_functions if child is not None]
        if node is not None and node.name() in _EMBEDDINGS and gives_sparse_gradients(node) and below[0].name() == _LEAF:
            yield below[0].variable
        nodes += [child for child in below if child not in seen]
        seen.update(below)


def _names(model: nn.Module, leaf: Tensor) -> list[str]:
    """Which parameters it may be: it holds a whole one, gathered from its shards, so only the shape is the same."""
    return [name for name, parameter in model.named_parameters() if parameter.shape == leaf.shape]
