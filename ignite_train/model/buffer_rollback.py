"""Copies of buffers, to undo what a skipped update, or a forward that is run again, has done to them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ignite_train.internals.of_torch import RunningNorm, buffers_of, foreach_copy_
from ignite_train.model.memory_layout import own_memory
from ignite_train.model.objects_used import objects_used

__all__ = ["BufferRollback"]


class BufferRollback:
    """Remembers the buffers of a module, and running statistics of others that forward refers to, and puts them back.

    In an update that is skipped, a micro-batch that is not finite may have made running means NaN, for good: gradients of later
    updates would be finite, and what is evaluated would not. A buffer that forward assigns, as in
    `self.mean = 0.9 * self.mean + ...`, is the tensor again that it was.

    Args:
        module: whose buffers.
        forward: the user's. The modules that it refers to, such as a teacher, are looked for in the marks 1, 2, 4, 8, ...; of
            them the running statistics of normalisation layers in training mode are remembered. Other buffers, which may be
            large tables, would be copied in vain.
    """

    def __init__(self, module: nn.Module, forward: Any = None) -> None:
        self._module, self._forward = module, forward
        self._used: list[nn.Module] = []  # normalisation layers that forward uses, besides those in `module`
        self._num_marks = 0
        self._owners: list[tuple[Any, Mapping[str, Tensor | None]]] = []
        self._copied: list[Tensor] = []
        self._copies: list[Tensor] = []  # of each buffer; written again where the buffers are the same ones

    @torch.no_grad()
    def mark(self) -> None:
        """Remembers them as they are now."""
        self._num_marks += 1
        if self._forward is not None and not self._num_marks & (self._num_marks - 1):
            self._find_used()
        modules = chain(self._module.modules(), self._used)
        self._owners = [(owner, {**owner}) for module in modules if (owner := buffers_of(module))]
        buffers = [*{id(one): one for _, own in self._owners for one in own.values() if one is not None}.values()]
        if not buffers:
            return
        if self._has_copies_for(buffers):
            foreach_copy_(self._copies, buffers)
        else:
            with torch.inference_mode(mode=False):  # or else a later run outside of it could not write to them
                self._copied, self._copies = buffers, [own_memory(buffer).clone() for buffer in buffers]

    def _find_used(self) -> None:
        used = [one for one in objects_used([self._forward, self._module]) if isinstance(one, nn.Module)]
        known = {*self._module.modules()}
        modules = dict.fromkeys(one for owner in used for one in owner.modules())
        self._used = [one for one in modules if isinstance(one, RunningNorm) and one.training and one not in known]

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
                own = own_memory(buffer)
                if (
                    not own.is_nested and own.shape != before.shape
                ):  # its first forward may size a buffer, as observers of quantisation do
                    own.resize_(before.shape)
                own.copy_(before)
        for owner, buffers in self._owners:
            if isinstance(owner, dict):  # a scripted module has another mapping, whose tensors stay the same
                owner.update(buffers)
        return bool(self._owners)
