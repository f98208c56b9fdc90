"""What a joint message carries, between two processes over gloo: gradients in their own dtype, which each process adds up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ignite_train.model.memory_layout import as_bytes, gradient_dtype
from ignite_train.ranks import collectives
from ignite_train.ranks.small_sum import SmallSum
from ignite_train.ranks.writable_gradients import give_gradients, writable_gradients

__all__ = ["PairMessage"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # whose sums of two have the bits that float64 gives
_ALIGNMENT = 8  # bytes; of float64, in which the numbers are


class PairMessage:
    """A message like `JointMessage`, with the same outcome, bit by bit, for half of the bytes and half of the copies.

    As each rank has the gradients of both, nothing needs to be in one dtype, and what comes from the other rank is added to the
    gradient where it lies. The sum of two numbers, rounded once, is what float64 gives when it is rounded to their dtype, since
    float64 has more than twice the digits of float32 (S. A. Figueroa, "When is double rounding innocuous?", 1995), and
    float32, in which torch adds up, those of half precision.

    Args:
        like: see `JointMessage`.
        num_flags: see `JointMessage`.
        num_announced: see `JointMessage`.
        parameters: whose gradients it carries; see `suits`.
        total: sums over the ranks.

    Attributes:
        statistics: the sum of the statistics.
        flags: for each parameter on how many ranks there is a gradient.
        announced: the sum of the numbers about sparse gradients.
    """

    def __init__(
        self, like: Tensor, num_flags: int, num_announced: int, parameters: Sequence[nn.Parameter], total: SmallSum
    ) -> None:
        lengths = [len(like), num_flags, num_announced]
        self._parameters, self._sum = tuple(parameters), total
        num_bytes = [_ALIGNMENT * sum(lengths), *(p.numel() * gradient_dtype(p).itemsize for p in parameters)]
        self._own = like.new_zeros(sum(-(-one // _ALIGNMENT) for one in num_bytes))
        self._both = [torch.zeros_like(self._own) for _ in range(2)]
        self._numbers, self._parts = self._cut(self._own, num_bytes)
        (self._first, first), (self._second, second) = (self._cut(one, num_bytes) for one in self._both)
        self._of_both, self._of_other = (first, second), (second, first)[collectives.rank()]
        self._sums = torch.zeros_like(self._numbers)
        self._own_statistics, self._own_flags, self._own_announced = torch.split(self._numbers, lengths)
        self.statistics, self.flags, self.announced = torch.split(self._sums, lengths)
        self._flags: list[bool] = []  # that were packed last, and still lie in the memory that is sent

    @staticmethod
    def suits(like: Tensor, parameters: Sequence[nn.Parameter], total: SmallSum) -> bool:
        """Whether two ranks can send it: all is on the CPU, and gradients have one dtype each, which is one of these."""
        return total.gathers and like.is_cpu and all(parameter.grad_dtype in _DTYPES for parameter in parameters)

    def pack(
        self, statistics: Tensor, flags: Sequence[bool], announced: Tensor | None, gradients: Sequence[Tensor | None]
    ) -> None:
        """Fills what this rank sends. A gradient that is missing counts as zero."""
        self._own_statistics.copy_(statistics)
        if flags != self._flags:
            self._flags = [*flags]
            self._own_flags.copy_(torch.tensor(flags, dtype=self._own_flags.dtype))
        if announced is not None:
            self._own_announced.copy_(announced)
        parts, present = self._parts, [gradient for gradient in gradients if gradient is not None]
        if len(present) < len(parts):
            torch._foreach_zero_(parts)
            parts = [part for part, gradient in zip(parts, gradients, strict=True) if gradient is not None]
        if present:
            torch._foreach_copy_(parts, present)

    def cross(self) -> None:
        """Sends it and waits for that of the other rank. Collective."""
        self._sum.gather(self._own, self._both)
        torch.add(self._first, self._second, out=self._sums)

    def unpack(self, gradients: Sequence[Tensor | None], exists: Sequence[bool]) -> None:
        """Gives each parameter the sum of both ranks' gradients for a gradient; see `JointMessage.unpack`."""
        own = writable_gradients(self._parameters, gradients)
        if own is None:
            give_gradients(self._parameters, torch._foreach_add(*self._of_both), exists)
        elif own:  # torch takes no empty list
            torch._foreach_add_(own, self._of_other)

    def _cut(self, memory: Tensor, num_bytes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """The numbers at the beginning of a message, and a view of it for the gradient of each parameter."""
        starts = [0]
        for one in num_bytes:
            starts.append(starts[-1] + -(-one // _ALIGNMENT) * _ALIGNMENT)
        content = as_bytes(memory)
        parts = [
            content[start : start + length].view(gradient_dtype(parameter)).view(parameter.shape)
            for parameter, start, length in zip(self._parameters, starts[1:], num_bytes[1:], strict=False)
        ]
        return memory[: num_bytes[0] // _ALIGNMENT], parts
