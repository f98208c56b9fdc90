"""A loader that gives each micro-batch in the memory of an earlier one is noticed before a group of them is trained on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ignite_train.model.micro_batch_rollback import arrays_in, content_of, same_content

__all__ = ["ReusedMemory"]


class ReusedMemory:
    """Looks at the first micro-batches of a pass, and refuses those of a loader that writes each over an earlier one.

    That is right in a loop that reads one micro-batch, computes, and reads the next. Here all micro-batches of an update are
    read before its first forward, and a `FetchThread` reads ahead too: forward would find the last one in place of each. So the
    first one is copied, and compared with its copy where a later one has the same address. The same micro-batch may be given
    again, if it was not changed.

    Attributes:
        num_seen: how many micro-batches it has looked at.
    """

    def __init__(self) -> None:
        self.num_seen = 0
        self._first: dict[int, tuple[Any, Any]] = {}  # of the arrays in the first one: address, array, content

    def see(self, micro_batch: Any) -> None:
        """Looks at one that was read after those before.

        Raises:
            ValueError: it was written over the first one.
        """
        self.num_seen += 1
        arrays = _by_address(micro_batch)
        if self.num_seen == 1:
            self._first = {address: (array, _copied(content_of(array))) for address, array in arrays.items()}
        elif any(_has_changed(*self._first[address]) for address in arrays if address in self._first):
            raise ValueError(
                "data must give each micro-batch in memory of its own, got one that was written over an earlier one: "
                "micro-batches are read ahead, so that forward would find the last one in each of them; give a copy of each "
                "micro-batch, such as micro_batch.clone()"
            )


def _by_address(micro_batch: Any) -> dict[int, Any]:
    return {one.data_ptr() if isinstance(one, Tensor) else one.ctypes.data: one for one in arrays_in(micro_batch)}


def _copied(content: Any) -> Any:
    return content.clone() if isinstance(content, Tensor) else content


def _has_changed(array: Any, before: Any) -> bool:
    return not same_content(content_of(array), before)
