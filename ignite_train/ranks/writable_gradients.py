"""Gradients as parts of a message: which can be written where they are, and giving parameters what came back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ignite_train.model.memory_layout import empty_gradient_of, gradient_dtype, sharing_memory

__all__ = ["give_gradients", "writable_gradients"]


def writable_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The gradients, if each parameter has one, in the order of its indices and in memory of its own; or else None.

    It is asked in each update, so no line of Python runs for each of them where the answer is yes.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    ordered = all(map(Tensor.is_contiguous, present)) and all(map(Tensor.is_contiguous, parameters))
    return present if len(present) == len(parameters) and ordered and not sharing_memory(present) else None


def give_gradients(parameters: Sequence[nn.Parameter], values: Sequence[Tensor], exists: Sequence[bool]) -> None:
    """Gives each parameter its values for a gradient, with the strides of the parameter.

    A gradient that is there already, in the order of its indices and in memory of its own, is written over. Of several that
    share memory one stays there.

    Args:
        parameters: whose gradients these are.
        values: for each parameter a tensor of its shape.
        exists: for each parameter whether it has a gradient at all; or else it keeps none.
    """
    present = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shared = {id(present[index]) for index in sharing_memory(present)}
    gradients, parts = [], []
    for parameter, part, has_one in zip(parameters, values, exists, strict=True):
        if has_one:
            gradient = parameter.grad
            ordered = gradient is not None and gradient.is_contiguous() and parameter.is_contiguous()
            if gradient is None or not ordered or id(gradient) in shared:
                dtype = gradient_dtype(parameter) if gradient is None else gradient.dtype
                parameter.grad = gradient = empty_gradient_of(parameter, dtype)
            gradients.append(gradient)
            parts.append(part)
    if gradients:
        torch._foreach_copy_(gradients, parts)
