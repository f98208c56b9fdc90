"""Opens the samplers of a loader once where the loader, to find its place again, opens them several times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import tee
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ignite_train.engine.dispatch import Stateful

__all__ = ["samplers_opened_once"]


@contextmanager
def samplers_opened_once(loader: Iterable[Any]) -> Iterator[None]:
    """Call `iter(loader)` in it: each sampler without a state is opened once, and has drawn its first index at the end.

    torchdata's StatefulDataLoader opens a sampler up to three times and reads the last one up to the place, some only when the
    first samples are asked for. An order that is drawn would be that of another draw.
    """
    stand_ins = []
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        owners = [(loader, "batch_sampler"), (loader, "sampler"), (loader.batch_sampler, "sampler")]
        found = [(_attributes(owner), name) for owner, name in owners]
        twice = loader.num_workers > 0 and not loader.persistent_workers  # a new pass then uses the second opening
        stand_ins = [
            (attributes, name, _OpenedOnce(attributes[name], passed_on=int(twice)))
            for attributes, name in found
            if attributes.get(name) is not None and not isinstance(attributes[name], Stateful)
        ]
    for attributes, name, stand_in in stand_ins:  # past `DataLoader.__setattr__`, which refuses another sampler
        attributes[name] = stand_in
    try:
        yield
    finally:
        for attributes, name, stand_in in stand_ins:
            attributes[name] = stand_in.sampler
        for _, _, stand_in in stand_ins:
            stand_in.end()


def _attributes(owner: Any) -> dict[str, Any]:
    try:
        attributes: dict[str, Any] = vars(owner)
    except TypeError:  # a list of batches, say
        return {}
    return attributes


class _OpenedOnce:
    """Stands for a sampler: all its iterators give what one iterator of the sampler gives, until `end` is called.

    Args:
        sampler: the sampler.
        passed_on: how many openings before are those of the sampler itself, and not read.
    """

    def __init__(self, sampler: Any, *, passed_on: int) -> None:
        self.sampler, self._passed_on = sampler, passed_on
        self._opened: Iterator[Any] | None = None
        self._has_ended = False

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._opened is None:
            opened: Iterator[Any] = iter(self.sampler)
            self._passed_on -= 1
            if self._has_ended or self._passed_on >= 0 or isinstance(opened, Stateful):  # persistent workers keep this object
                return opened
            self._opened = opened
        self._opened, given = tee(self._opened)
        return given

    def end(self) -> None:
        """Reads the first index, for which a sampler that is a generator draws its order."""
        next(self._opened or iter(()), None)
        self._opened, self._has_ended = None, True
