"""Data without epochs of its own: passes over an iterable follow each other, and an epoch is a number of updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any

from ignite_train.data.description import length_of
from ignite_train.data.fetch_thread import FetchThread
from ignite_train.data.position import DataPosition
from ignite_train.data.samplers import set_epoch
from ignite_train.internals.of_torch import has_lost_workers

__all__ = ["NoData", "Stream", "is_of_stream"]


class NoData:
    """The data of a run without data: a None for each micro-batch, without end. It can begin anywhere, as `Seekable`."""

    samples_per_round = 1

    def __iter__(self) -> Iterator[None]:
        return repeat(None)

    def seek(self, samples: int) -> None:
        """There is no place to go to."""


class Stream:
    """Reads an iterable again and again, across the epochs of a run, and can say where it is.

    Samplers and datasets with `set_epoch` are told the number of the pass, from 0. An iterator is read once; when it ends, so
    does the stream, unless `replace` has given it something else.

    Args:
        data: what the user passed to `run`.
        updates_per_epoch: how many updates make an epoch.
        on_pass_ended: called when a pass has ended, before the next begins; it may call `replace`.

    Attributes:
        on_changed_data: what happens in the middle of a pass if the data is another one; see `RunData.load_position`.
    """

    def __init__(self, data: Iterable[Any], updates_per_epoch: int, on_pass_ended: Callable[[], None]) -> None:
        self.data, self.updates_per_epoch = data, updates_per_epoch
        self._on_pass_ended = on_pass_ended
        self.on_changed_data = "raise"
        self._passes = 0  # that have ended
        self._given = 0  # micro-batches of this pass, in this process and before
        self._since_found = 0  # of them, in this process
        self._micro_batches: Iterator[Any] | None = None  # None: the pass has not been begun, or has ended
        self._place: DataPosition | None = None
        self._ended = False
        self._start: Mapping[str, Any] = {}  # the place at which the next pass begins
        self._begun: dict[int, Mapping[str, Any]] = {}  # of a loader with a state, the place where its first pass began
        self._is_broken = False  # reading has raised an error, so that the iterator may be past what it did not give

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while not self._ended:
            if self._micro_batches is None:
                self._begin_pass(self._start)
            micro_batch = self._read()
            if micro_batch is not self:
                self._given += 1
                self._since_found += 1
                return micro_batch
            self._end_pass()
        raise StopIteration

    def _read(self) -> Any:
        """The next micro-batch of the pass, or this object at its end."""
        if self._place is not None and self._place.is_pass_broken():
            if self._given == length_of(self.data):
                return self
            raise self._place.broken_pass_error()
        self._is_broken = True
        micro_batch = next(self._micro_batches, self)  # type: ignore[arg-type]  # begun by the caller
        self._is_broken = False
        return micro_batch

    def begin_at(self, place: Mapping[str, Any]) -> None:
        """Has the first pass follow the epochs of a run without `epoch_length`, at whose end `place` was saved."""
        self._start = place

    def replace(self, data: Iterable[Any]) -> None:
        """Continues with another iterable, from its beginning."""
        self.pause()
        self.data, self._ended = data, False
        self._micro_batches = self._place = None
        self._given, self._since_found, self._start, self._begun = 0, 0, {}, {}

    def pause(self) -> None:
        """Ends the thread that reads the loader, if there is one; reading on starts another."""
        if isinstance(self._micro_batches, FetchThread):
            self._micro_batches.pause()

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, in plain types."""
        state: dict[str, Any] = {"passes": self._passes, "given": self._given, "place": {}}
        if self._given == 0:
            state["place"] = dict(self._start) or DataPosition(self.data).saved(0, 0, latest=True)
        elif self._place is not None:
            length = length_of(self.data)
            self._place.note(exhausted=length is not None and self._given >= length)
            state["place"] = self._place.saved(self._since_found, self._given, latest=True)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to the place where `state_dict` was taken. Collective.

        Raises:
            TypeError: the stream is an iterator that has been read further.
            ValueError: other ranks wrote it, or the data has changed; see `DataPosition`.
        """
        passes, given = state_dict["passes"], state_dict["given"]
        is_there = (passes, given) == (self._passes, self._given)
        is_broken = self._is_broken or has_lost_workers(self._micro_batches)
        if is_there and (isinstance(self.data, Iterator) or (given and not is_broken)):
            return
        if isinstance(self.data, Iterator) and self._given:
            raise TypeError(
                f"data must be iterable again to repeat an update that was broken off, got an iterator "
                f"({type(self.data).__name__}) that has been read past it; pass a DataLoader"
            )
        self.pause()
        self._passes, self._given, self._ended, self._is_broken = passes, given, False, True
        self._micro_batches = self._place = None
        self._start = {} if given else self._begun.get(passes, state_dict["place"])
        if given:  # which may read, and fail
            self._begin_pass({**state_dict["place"], "on_changed_data": self.on_changed_data})
        self._is_broken = False

    def _begin_pass(self, saved: Mapping[str, Any]) -> None:
        set_epoch(self.data, self._passes)
        self._place, self._since_found = DataPosition(self.data), 0
        with self._place.opening():
            self._place.find(saved, self._given)
            self._start = {}
            self._micro_batches = self._place.open()
            if self._place.reads_past:
                for _ in range(self._given):
                    next(self._micro_batches, None)
            self._place.found()
        if self._place.is_stateful and not self._given and not self._begun:
            self._begun[self._passes] = self._place.saved(0, 0, latest=True)

    def _end_pass(self) -> None:
        """Begins another pass if there can be one: the pass gave something and can be repeated, or the data was replaced."""
        data, was_empty = self.data, self._given == 0
        self._passes += 1
        self._given, self._micro_batches = 0, None
        self._ended = was_empty or isinstance(data, Iterator)
        self._on_pass_ended()  # which may call `replace`


def is_of_stream(position: Mapping[str, Any]) -> bool:
    """Whether a position that was saved is one of a run with `epoch_length`."""
    return bool(position["description"]["loader"] == Stream.__name__)
