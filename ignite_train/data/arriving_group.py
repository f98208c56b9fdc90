"""A group of micro-batches that worker processes, or a thread, still prepare while its first ones are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ignite_train.data.held import Held

__all__ = ["ArrivingGroup"]


class ArrivingGroup(MutableSequence[Any]):
    """The micro-batches of one update, as a list of which the later elements are read from the loader when they are needed.

    An iteration reads one element ahead of the one that it gives. So the last one is known as such before it is used, also
    where the loader ends early, and neither the loader nor the model waits for a whole group. What has arrived stays, so that a
    failed update can be repeated. Whatever else is asked of the list reads it to its end first.

    Args:
        read: gives the next micro-batch of the loader, or raises StopIteration.
        size: how many micro-batches the group has, unless the loader ends before.
        is_sized: whether the loader has said so.
        on_complete: called with the group when its last micro-batch has arrived.
        looks: whether those that are read and wait are looked at; see `is_looked_at`.

    Attributes:
        waiting: makes the `with` in which the loader is waited for; the trainer sets it where that time is measured.
        drawing: makes the `with` in which a sampler may draw random numbers; an update that seeds the generators sets it.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        size: int,
        *,
        is_sized: bool,
        on_complete: Callable[[ArrivingGroup], None],
        looks: bool = True,
    ) -> None:
        self._arrived: list[Any] = []
        self._num_given = 0  # of them: the others are held while more is read
        self._looks = looks
        self._read, self._size, self._is_sized, self._on_complete = read, size, is_sized, on_complete
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.drawing: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._read_up_to(2)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._arrived)} of {self._size} micro-batches have arrived)"

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        index = 0
        while index < self._size:
            self._read_up_to(index + 2)
            self._num_given = max(self._num_given, index + 1)
            yield self._arrived[index]
            index += 1

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int) or index < 0:
            return self.whole()[index]
        self._read_up_to(index + 1)
        self._num_given = max(self._num_given, index + 1)
        return self._arrived[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.whole()[index] = value

    def __delitem__(self, index: Any) -> None:
        del self.whole()[index]
        self._size = len(self._arrived)

    def insert(self, index: int, value: Any) -> None:
        """Inserts a value, as a list does."""
        self.whole().insert(index, value)
        self._size = len(self._arrived)

    @property
    def known_size(self) -> int | None:
        """How many micro-batches the group has; None where the loader has not said when it ends.

        The same in the whole update, also when all of them are there: a forward that is run again finds what it found before.
        """
        return self._size if self._is_sized else None

    def whole(self) -> list[Any]:
        """All micro-batches; reads those that are left."""
        self._read_up_to(self._size)
        return self._arrived

    def _read_up_to(self, number: int) -> None:
        """Reads until so many micro-batches have arrived, or all of the group."""
        if len(self._arrived) >= min(number, self._size):
            return
        held = Held(self._arrived[self._num_given :]) if self._looks else None
        with self.waiting(), self.drawing():
            while len(self._arrived) < min(number, self._size):
                try:
                    self._arrived.append(self._read())
                    if held is not None and len(self._arrived) < min(number, self._size):
                        held.add(self._arrived[-1])
                except StopIteration:
                    self._size = len(self._arrived)
            if held is not None:
                held.check()
            if len(self._arrived) >= self._size:
                self._on_complete(self)
