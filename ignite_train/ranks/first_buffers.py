"""The buffers of rank 0 of a `DistributedDataParallel`, such as running statistics, go to all ranks once an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ignite_train.internals.of_distributed import sync_buffers
from ignite_train.model.in_full import in_full

__all__ = ["FirstBuffers", "has_buffer_hook"]


class FirstBuffers:
    """Gives the buffers of rank 0 to all ranks before the first forward of an update, in place of the wrapper.

    The wrapper itself would do so in each call of it that follows one without `no_sync`: twice where forward calls it twice,
    but once on a rank without data, where the ranks would wait for each other forever.

    Args:
        ddp: the wrapper.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._is_first = True  # the next context is the first one of an update, or of another evaluation of its loss

    @property
    def cross(self) -> bool:
        """Whether there are any that this gives to all, so that each rank must enter a context in each update."""
        return self._ddp.broadcast_buffers and bool(self._ddp.modules_buffers) and not has_buffer_hook(self._ddp)

    def begin(self) -> None:
        """An update begins, also after one that was broken off."""
        self._is_first = True

    def context(self, within: AbstractContextManager[Any], *, last: bool) -> AbstractContextManager[Any]:
        """The context `within` of a forward and its backward, in which the wrapper leaves buffers alone. Collective."""
        return self._given(within, last=last) if self.cross else within

    @contextmanager
    def _given(self, within: AbstractContextManager[Any], *, last: bool) -> Iterator[None]:
        ddp = self._ddp
        if self._is_first:
            sync_buffers(ddp)
        self._is_first = last

        def put_back() -> None:
            ddp.broadcast_buffers = True
            if last:
                # as after a backward that reduces: the next forward of the script, in an evaluation say, gives them to all
                ddp.require_forward_param_sync = True

        try:
            ddp.broadcast_buffers = False
            with within:
                yield
        finally:
            in_full(put_back)


def has_buffer_hook(ddp: DistributedDataParallel) -> bool:
    """Whether the user has registered a hook in place of the broadcast of buffers."""
    return "buffer_hook" in vars(ddp)
