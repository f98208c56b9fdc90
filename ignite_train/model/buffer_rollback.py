"""Copies of buffers, to undo what a skipped update, or a forward that is run again, has done to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_train.internals.of_torch import buffers_of, foreach_copy_
from ignite_train.model.memory_layout import own_memory

__all__ = ["BufferRollback"]


class BufferRollback:
    """Remembers the buffers of a module, and puts them back.

    In an update that is skipped, a micro-batch that is not finite may have made running means NaN, for good: gradients of later
    updates would be finite, and what is evaluated would not. A buffer that forward assigns, as in
    `self.mean = 0.9 * self.mean + ...`, is the tensor again that it was.

    Args:
        module: whose buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._owners: list[tuple[Any, Mapping[str, Tensor | None]]] = []
        self._copied: list[Tensor] = []
        self._copies: list[Tensor] = []  # of each buffer; written again where the buffers are the same ones

    @torch.no_grad()
    def mark(self) -> None:
        """Remembers them as they are now."""
        self._owners = [(owner, {**owner}) for module in self._module.modules() if (owner := buffers_of(module))]
        buffers = [*{id(one): one for _, own in self._owners for one in own.values() if one is not None}.values()]
        if not buffers:
            return
        if self._has_copies_for(buffers):
            foreach_copy_(self._copies, buffers)
        else:
            self._copied, self._copies = buffers, [own_memory(buffer).clone() for buffer in buffers]

    def _has_copies_for(self, buffers: list[Tensor]) -> bool:
        return len(buffers) == len(self._copied) and all(
            one is known and not one.is_nested and one.shape == copy.shape and one.dtype is copy.dtype
            for one, known, copy in zip(buffers, self._copied, self._copies, strict=True)
        )

    @torch.no_grad()
    def roll_back(self) -> bool:
        """Puts them back, and says whether there was a mark of any buffer."""
        for buffer, before in zip(self._copied, self._copies, strict=True):
            if not buffer.is_inference():  # to which torch lets nothing write
                own_memory(buffer).copy_(before)
        for owner, buffers in self._owners:
            if isinstance(owner, dict):  # a scripted module has another mapping, whose tensors stay the same
                owner.update(buffers)
        return bool(self._owners)
