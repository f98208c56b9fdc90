"""Reading a loader for a trial or a search, so that the run after it reads what it would have read without."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.utils.data import DataLoader

from ignite_train.engine.attachable import Stateful
from ignite_train.internals.of_torch import ITERATOR, end_workers

__all__ = ["unmoved"]


@contextmanager
def unmoved(loader: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """A loader that gives what `loader` gives; what it reads in this `with` leaves the place of `loader` alone.

    Of a DataLoader it is a copy with workers of its own: persistent workers of `loader` have random generators that a pass
    moves. A loader with a state is put back at the end, also after an exception. Generators that it holds are not, see
    `kept_random_state`; nor is what its dataset or sampler keeps by itself, nor a state that cannot be had before a pass.
    """
    own = loader
    if isinstance(loader, DataLoader):
        own = copy.copy(loader)
        vars(own)[ITERATOR] = None
    state = None
    if isinstance(own, Stateful):
        with suppress(Exception):  # a loader may have a state only once it has begun, and raise anything before
            state = own.state_dict()
        state = copy.deepcopy(state)
    try:
        yield own
    finally:
        if isinstance(own, DataLoader):
            end_workers(own)
        if isinstance(own, Stateful) and state is not None:
            own.load_state_dict(state)
