"""A summary of a model: its blocks, and how many parameters each has and trains."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from torch.nn.parameter import UninitializedParameter

from ignite_train.arguments import describe, positive_int
from ignite_train.model.innermost import innermost

__all__ = ["Block", "ModelSummary", "model_summary"]


class Block(NamedTuple):
    """A row of a summary.

    Attributes:
        name: of the module in the model; empty for parameters that belong to no block.
        kind: its class.
        parameters: how many numbers its parameters have; of shards, over all ranks.
        trainable: how many of them require a gradient.
    """

    name: str
    kind: str
    parameters: int
    trainable: int


class ModelSummary(NamedTuple):
    """The blocks of a model, and the whole. `print` shows a table.

    Attributes:
        blocks: in the order of the model.
        total: the whole model.
    """

    blocks: tuple[Block, ...]
    total: Block

    def __str__(self) -> str:
        head = ("block", "kind", "parameters", "trainable")
        rows = [head, *((b.name or "-", b.kind, f"{b.parameters:,}", f"{b.trainable:,}") for b in (*self.blocks, self.total))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {parameters:>{widths[2]}}  {trainable:>{widths[3]}}"
            for name, kind, parameters, trainable in rows
        ]
        return "\n".join(lines)


def model_summary(model: nn.Module, *, depth: int = 1) -> ModelSummary:
    """Counts the parameters of a model, block by block.

    A parameter that the model has under several names is counted once, in its first block. The numbers of a model sharded by
    `fully_shard` are those of the whole model.

    Args:
        model: the model; it may be wrapped, sharded or compiled, and its blocks too.
        depth: how far the blocks are from the model: 1 for its children, 2 for theirs, and so on; a child without children of
            its own is a block too.

    Returns:
        The summary; `print` it, or read its numbers.

    Raises:
        TypeError: `model` is not a module, or `depth` is not an integer.
        ValueError: `depth` is below 1, or a parameter has no shape yet.

    Example:
        >>> import torch
        >>> from ignite_train import model_summary
        >>> model = torch.nn.Sequential(torch.nn.Linear(300, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1))
        >>> _ = model[0].requires_grad_(False)
        >>> print(model_summary(model))
        block  kind        parameters  trainable
        0      Linear          12,040          0
        1      ReLU                 0          0
        2      Linear              41         41
        total  Sequential      12,081         41
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    positive_int("depth", depth)
    model = innermost(model)  # a wrapper would be a block around all others
    found: dict[str, Block] = {}
    seen: set[int] = set()
    for name, module in _blocks(model, "", depth):
        found[name] = _counted(name, module, seen)
    rest = _counted("", model, seen)
    if rest.parameters:
        found[""] = rest._replace(kind="-")
    parts = found.values()
    total = Block("total", _kind(model), sum(b.parameters for b in parts), sum(b.trainable for b in parts))
    return ModelSummary(tuple(parts), total)


def _blocks(module: nn.Module, prefix: str, depth: int) -> list[tuple[str, nn.Module]]:
    """The modules at that depth, or above it if they have no children, in the order of the model."""
    blocks: list[tuple[str, nn.Module]] = []
    for key, wrapped in module.named_children():
        child, name = innermost(wrapped), f"{prefix}.{key}" if prefix else key
        below = _blocks(child, name, depth - 1) if depth > 1 else []
        blocks += below or [(name, child)]
    return blocks


def _counted(name: str, module: nn.Module, seen: set[int]) -> Block:
    """The parameters that are not counted yet."""
    parameters = trainable = 0
    for key, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(f"model must be initialised, got the lazy parameter {f'{name}.{key}'.lstrip('.')!r}")
        if id(parameter) not in seen:
            seen.add(id(parameter))
            parameters += parameter.numel()
            trainable += parameter.numel() * parameter.requires_grad
    return Block(name, _kind(module), parameters, trainable)


def _kind(module: nn.Module) -> str:
    return type(module).__name__
