"""The statistics of a rank and the gradients of its smallest parameters as one vector, to cross the ranks in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ignite_train.device.streams import copy_on
from ignite_train.model.memory_layout import empty_gradient_of, gradient_dtype, sharing_memory

__all__ = ["JointMessage"]


class JointMessage:
    """One vector for what the ranks sum at the end of an update, and a view of it for each thing that it carries.

    The vector and its views are made once and filled in each update, because to make them costs more than to fill them. On all
    ranks a gradient lies in it in the order of its indices, whatever its strides are there.

    Args:
        like: a vector of statistics, of the length, dtype and device that those of all updates have.
        num_flags: for how many parameters it says whether this rank has a gradient.
        num_announced: how many numbers about sparse gradients there are.
        parameters: whose gradients it carries. They are of a dtype that that of the statistics can hold.

    Attributes:
        vector: what the ranks sum.
        statistics: the part of it with the statistics.
        flags: the part with a number for each parameter, 1 where this rank has a gradient.
        announced: the part with the numbers about sparse gradients.
    """

    def __init__(self, like: Tensor, num_flags: int, num_announced: int, parameters: Sequence[nn.Parameter]) -> None:
        lengths = [len(like), num_flags, num_announced, *(parameter.numel() for parameter in parameters)]
        self.vector = like.new_zeros(sum(lengths))
        self.statistics, self.flags, self.announced, *parts = torch.split(self.vector, lengths)
        self._parameters = tuple(parameters)
        self._parts = [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]

    def pack(
        self, statistics: Tensor, flags: Sequence[bool], announced: Tensor | None, gradients: Sequence[Tensor | None]
    ) -> None:
        """Fills the vector. A gradient that is missing counts as zero."""
        self.statistics.copy_(statistics)
        if all(flags):
            self.flags.fill_(1.0)
        else:
            self.flags.copy_(copy_on(self.flags.device, torch.tensor(flags, dtype=self.flags.dtype)))
        if announced is not None:
            self.announced.copy_(announced)
        present = [gradient for gradient in gradients if gradient is not None]
        parts = self._parts
        if len(present) < len(parts):
            torch._foreach_zero_(parts)
            parts = [part for part, gradient in zip(parts, gradients, strict=True) if gradient is not None]
        if present:
            torch._foreach_copy_(parts, present)

    def cross(self) -> None:
        """Sums it over the ranks. Collective."""
        dist.all_reduce(self.vector)

    def unpack(self, gradients: Sequence[Tensor | None], exists: Sequence[bool]) -> None:
        """Gives each parameter its part of the vector for a gradient, with the strides of the parameter.

        A gradient that this rank has, and that lies in memory of its own in the order of its indices, is written over.

        Args:
            gradients: those of this rank, as they were packed.
            exists: for each parameter whether some rank has a gradient; or else it keeps none.
        """
        own = _writable_gradients(self._parameters, gradients)
        if own is None:
            _give_gradients(self._parameters, self._parts, exists)
        elif own:  # torch takes no empty list
            torch._foreach_copy_(own, self._parts)


def _writable_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The gradients, if each parameter has one, in the order of its indices and in memory of its own; or else None.

    It is asked in each update, so no line of Python runs for each of them where the answer is yes.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    ordered = all(map(Tensor.is_contiguous, present)) and all(map(Tensor.is_contiguous, parameters))
    return present if len(present) == len(parameters) and ordered and not sharing_memory(present) else None


def _give_gradients(parameters: Sequence[nn.Parameter], values: Sequence[Tensor], exists: Sequence[bool]) -> None:
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
