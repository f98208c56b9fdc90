"""Grouping micro-batches: how many make an update, how many updates make an epoch."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from operator import is_
from typing import Any, Literal

from torch.utils.data import DataLoader, default_collate

from ignite_train.arguments import one_of, positive_int
from ignite_train.data.arriving_group import ArrivingGroup
from ignite_train.data.dealing import Dealing
from ignite_train.data.description import length_of
from ignite_train.data.fetch_thread import FetchThread
from ignite_train.data.held import Held
from ignite_train.data.position import DataPosition, open_loader
from ignite_train.data.resumable_loader import ResumableLoader
from ignite_train.data.samplers import set_epoch
from ignite_train.data.stream import NoData, Stream
from ignite_train.ranks import collectives

__all__ = ["POLICIES", "AccumulationSteps", "MicroBatchGrouping", "MicroBatchPass", "Uneven", "deal_again_by"]

AccumulationSteps = int | Sequence[int] | Callable[[int], int]
"""Micro-batches to an update: a number, one for each epoch (the last one repeats), or a function of the number of the update,
which counts from 1, as `state.iteration` does."""

Uneven = Literal["all", "shortest", "replay", "error"]
"""What ranks with different numbers of micro-batches do.

`"all"`: every micro-batch is used; a rank that ran out takes part with weight zero. `"shortest"`: the epoch ends on all ranks
when the first rank runs out. `"replay"`: as `"all"`, and a rank that ran out runs forward and backward on a placeholder with
weight zero. `"error"`: unequal numbers are an error at the start of the epoch."""
POLICIES: tuple[Uneven, ...] = ("all", "shortest", "replay", "error")
_logger = logging.getLogger(__name__)


class MicroBatchGrouping:
    """Cuts loaders of micro-batches into groups, one for each update, in step on all ranks.

    The last group of an epoch may be smaller, and no group spans two epochs. With several ranks and loaders of known length
    the ranks agree once an epoch on the longest; a rank that runs out gives empty groups, so that it takes part with weight
    zero. Without a known length each rank reads one micro-batch ahead, and whether any rank has more travels with the
    statistics of the update.

    The group of a DataLoader with worker processes, or with a thread that reads ahead, is an `ArrivingGroup`, so that its
    first micro-batches are computed while the others are prepared; otherwise it is a list.

    Args:
        accumulation_steps: see `AccumulationSteps`.
        uneven: see `Uneven`.
        synchronised_norm: the name of a SyncBatchNorm in the model, or None: ranks that run one unequally often would hang.
        drops_last_group: leave out the last group of an epoch if no rank has a whole one.
        is_sharded: whether the ranks must run equally many forwards in each update, whatever their loaders give.
        none_is_empty: a None keeps its place in the group and is left out of what the group gives; else it is an error.
        dealing: who gets samples; by default the ranks.

    Raises:
        TypeError, ValueError: `accumulation_steps` is not one of the three, or a number is below 1, or `uneven` is unknown; or
            ranks would run a SyncBatchNorm unequally often.

    Attributes:
        none_is_empty, dealing: the same.
    """

    def __init__(
        self,
        accumulation_steps: AccumulationSteps,
        uneven: Uneven = "all",
        *,
        synchronised_norm: str | None = None,
        drops_last_group: bool = False,
        is_sharded: bool = False,
        none_is_empty: bool = False,
        dealing: Dealing | None = None,
    ) -> None:
        self.dealing = Dealing() if dealing is None else dealing
        self._drops_last_group, self.none_is_empty = drops_last_group, none_is_empty
        self._counts_in_step = is_sharded or uneven == "replay"  # the ranks must run forward equally often
        self._lends = is_sharded
        self._needs_whole_groups = self._counts_in_step or drops_last_group or none_is_empty
        if none_is_empty and synchronised_norm is not None and uneven != "replay" and collectives.world_size() > 1:
            raise ValueError(
                f"none_is_empty must be False where {synchronised_norm!r} in the model is a SyncBatchNorm, whose forward waits "
                "for all ranks; pass options=UpdateOptions(none_is_empty=True, uneven='replay')"
            )
        self._steps, self._uneven = accumulation_steps, one_of("uneven", uneven, POLICIES)
        self._synchronised_norm = synchronised_norm if uneven == "all" else None
        if isinstance(accumulation_steps, bytes):
            positive_int("accumulation_steps", accumulation_steps)
        if isinstance(accumulation_steps, Sequence):
            if not accumulation_steps:
                raise ValueError("accumulation_steps must have an entry for the first epoch, got an empty sequence")
            for index, steps in enumerate(accumulation_steps):
                positive_int(f"accumulation_steps[{index}]", steps)
        elif not callable(accumulation_steps):
            positive_int("accumulation_steps", accumulation_steps)

    def __call__(
        self, loader: Iterable[Any], *, epoch: int, first_update: int, skip: int, position: Mapping[str, Any]
    ) -> MicroBatchPass:
        """Starts epoch `epoch` (1-based) over `loader`. Collective.

        Samplers with `set_epoch` are told `epoch - 1`, so that each epoch has its own order.

        Args:
            loader: this rank's micro-batches.
            epoch: number of the epoch.
            first_update: number of the epoch's first update (1-based).
            skip: updates of this epoch that are done already.
            position: what `position` of the pass that did them returned; see `DataPosition`.
        """
        if self.dealing.again:
            deal_again_by(loader, self.dealing)
        set_epoch(loader, epoch - 1)
        groups = MicroBatchPass(self, loader, self._sizes(epoch, first_update), skip, position)
        if self._synchronised_norm is not None:
            self._check_in_step(self._synchronised_norm, groups.lengths)
        return groups

    def updates(self, loader: Iterable[Any], *, epoch: int, first_update: int) -> int | None:
        """Updates of epoch `epoch` over `loader`, as far as lengths tell before its pass begins. Collective.

        Returns:
            The number; None if a rank's loader has no length.
        """
        if isinstance(loader, Stream):
            return loader.updates_per_epoch
        if self.dealing.again:
            deal_again_by(loader, self.dealing)
        lengths = self.dealing.lengths(lambda: length_of(loader))
        if min(lengths) < 0:
            return None
        micro_batches = min(lengths) if self._uneven == "shortest" else max(lengths)
        size = self._sizes(epoch, first_update)
        return _count_updates(micro_batches, size, 0, drops_last_group=self._drops_last_group)

    def max_micro_batches_of(self, group: list[Any]) -> int | None:
        """Of a group that comes from no loader: as many as this rank has; None where ranks that differ need placeholders."""
        return None if self._counts_in_step else len(group)

    def _check_in_step(self, name: str, lengths: list[int]) -> None:
        """Raises, or warns once if the lengths are not known.

        Raises:
            ValueError: the ranks have different numbers of micro-batches.
        """
        remedy = "make the shards equally long, or pass options=UpdateOptions(uneven='shortest') or uneven='replay' there"
        if min(lengths) >= 0:
            if len(set(lengths)) > 1:
                table = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
                raise ValueError(
                    f"data must be equally long on all ranks, because {name!r} in the model is a SyncBatchNorm, whose forward "
                    f"waits for all ranks, got micro-batches on {table}; {remedy}"
                )
        elif len(lengths) > 1:
            self._synchronised_norm = None
            if collectives.is_main_rank():
                _logger.warning(
                    f"{name!r} in the model is a SyncBatchNorm, whose forward waits for all ranks, and the loader has no "
                    f"length: if a rank has fewer micro-batches than others, the run hangs at the end of the epoch; {remedy}"
                )

    def _sizes(self, epoch: int, first_update: int) -> Callable[[int], int]:
        """How many micro-batches the groups of an epoch have: a function of the number of groups before."""
        steps = self._steps
        if isinstance(steps, Sequence):
            return _AlwaysSame(int(steps[min(epoch, len(steps)) - 1]))
        if not callable(steps):
            return _AlwaysSame(int(steps))

        def size(done: int) -> int:
            update = first_update + done
            try:
                return positive_int(f"accumulation_steps({update})", steps(update))
            except StopIteration as error:  # would look like the end of the data
                raise RuntimeError(f"accumulation_steps({update}) raised StopIteration; only the data ends an epoch") from error

        return size


class MicroBatchPass:
    """One pass over the data of all ranks: an iterator of groups, empty where only other ranks have micro-batches.

    Args:
        grouping: whose rules it follows.
        loader: this rank's micro-batches.
        size: `size(done)` says how many micro-batches the next group has after `done` groups.
        skip: groups of this epoch that are done already.
        position: the position after them.

    Attributes:
        loader: the same.
        length: how many groups the epoch has, over all ranks; None if unknown.
        lengths: the micro-batches that each rank has left; -1 where unknown.
        more: this rank's vote on another group after the latest; see `RankRequests`.
        max_micro_batches: the largest number of micro-batches that any rank has in the latest group; None if unknown, or if
            micro-batches are lent and some rank has fewer. Those that are None count too.
        num_read: micro-batches of the latest group, with those that are None and those that are left out.
    """

    max_micro_batches: int | None

    def __init__(
        self,
        grouping: MicroBatchGrouping,
        loader: Iterable[Any],
        size: Callable[[int], int],
        skip: int,
        position: Mapping[str, Any],
    ) -> None:
        self._grouping, self.loader, self._size = grouping, loader, size
        self.begin(skip, position)

    def begin(self, skip: int, position: Mapping[str, Any]) -> None:
        """Begins the pass, or begins it again where samples are dealt to others in the middle of it.

        Args:
            skip: groups of this epoch that are done already.
            position: the position after them.
        """
        grouping, loader, size = self._grouping, self.loader, self._size
        self._place, self._done, self._position = DataPosition(loader), skip, 0
        self._largest = self._num_as_large = 0  # the size of the largest group so far, and how many came since it did
        self._place.find(position, skip)
        if isinstance(loader, Stream):
            self._place.note(exhausted=False)  # it may begin anywhere, and the first group may have to be read again
        self._before = 0  # micro-batches of this epoch that are done, if `len()` counts them too
        if not self._place.jumps:
            self._before = position.get("micro_batches", sum(map(size, range(skip)))) if skip else 0
        self._announced = length_of(loader)  # what is left
        self._is_stream = isinstance(loader, Stream)
        self._drops_last_group = grouping._drops_last_group and not self._is_stream
        if self._announced is not None:
            self._before = min(self._before, self._announced)
            self._announced -= self._before
        self.lengths = grouping.dealing.lengths(self._length_left)
        self._rank = grouping.dealing.rank
        self._against = -collectives.world_size() if grouping._uneven == "shortest" else 0
        self.length = loader.updates_per_epoch if isinstance(loader, Stream) else self._agree_on_length()
        self._used = [min(self.lengths)] * len(self.lengths) if self._against else self.lengths  # of each rank's micro-batches
        if self._is_stream:
            self._used = [sys.maxsize] * len(self.lengths)
        self.max_micro_batches, self.more = None, 1
        self._most_used = max(self._used)
        self._fills_up = grouping.dealing.size > 1  # with empty groups, while other ranks have more
        self._looks_ahead = self._fills_up and self.length is None
        self._groups_arrive = _reads_ahead(loader) and not (grouping._needs_whole_groups or self._looks_ahead)
        self._may_be_rewritten = not _gives_each_once(loader)
        self._ahead: list[Any] = []  # read for later groups
        self._nothing_behind = False  # the look ahead has found no other group
        self._read = self.num_read = 0  # micro-batches since the position was found, and in the latest group
        self._is_noted = True  # the place after the latest group; not while it arrives, nor where reading it has failed
        # No group is left; the loader is exhausted; the epoch is over, and not only the run.
        self._ended = self._exhausted = self._finished = False
        self._surplus: bool | None = None  # whether the loader gave more than its length; None: not looked at yet
        self._micro_batches = iter(()) if self._place.at_end else self._opened(loader)
        if self._place.reads_past:
            self._read_past(was_exhausted=position.get("exhausted", False))
        self._place.found()
        if self._looks_ahead:
            self._look_ahead(Held(self._ahead))

    def _length_left(self) -> int | None:
        """Micro-batches that are left on this rank; None if unknown."""
        length = length_of(self.loader)
        return None if length is None else length - min(self._before, length)

    def __iter__(self) -> Iterator[MutableSequence[Any]]:
        return self

    def __next__(self) -> MutableSequence[Any]:
        begin = self._position
        if self._place.is_pass_broken() and self._read != self._announced:  # something is left of the pass
            raise self._place.broken_pass_error()
        size = self._size(self._done)
        # Counted again from a larger group on: more is held then than a ring of the loader may have.
        self._num_as_large = self._num_as_large + 1 if size <= self._largest else 0
        self._largest = max(size, self._largest)
        held = Held(self._ahead, number=self._num_as_large) if self._may_be_rewritten else None
        group = self._take(size, held)
        if isinstance(group, list):
            self._note()
        if self.length is not None:
            reached = min(self._most_used, self._position)
            self.max_micro_batches = reached - begin
            if self._grouping._lends and (self._grouping.none_is_empty or min(self._used) < reached):
                self.max_micro_batches = None  # the ranks agree on it when they know what each of them has
        if self._fills_up and isinstance(group, list):
            self._leave_out(group, begin)
        if not group and not self._fills_up:
            self._ended = True
            raise StopIteration
        if self._looks_ahead:
            self._look_ahead(held)
        if held is not None:
            held.check()
        if not self._grouping.none_is_empty or self._reads_no_data():
            return group
        return [micro_batch for micro_batch in group if micro_batch is not None]

    def position(self, done: int | None = None) -> dict[str, Any]:
        """The position of this rank after the first `done` groups of the epoch: all that were given, or all but the last."""
        latest = done is None or done >= self._done
        rounds = self._position if latest or done is None else self._position - self._size(done)
        given = self._before + self._read - (0 if latest else self.num_read)
        # Where the latest group has not arrived, the latest note is of the one before.
        return self._place.saved(rounds, given, latest=latest or not self._is_noted)

    def take_back_opening(self) -> None:
        """Call it where an exception ends the run before the epoch's first update: the next one opens the pass again."""
        self._place.take_back_opening()

    def finish(self) -> None:
        """Ends the epoch. Call it before the position at the end of the epoch is read.

        The loader is exhausted here, since samplers may draw from their generators after the last index, as torch's do.
        """
        self._finished = True
        if self._is_stream:  # it continues in the next epoch
            return
        over = self._ended or (self._looks_ahead and self._nothing_behind)
        all_done = self.length is not None and self._done >= self.length and not self._against
        if all_done and self._drops_last_group and self._announced is not None:
            self._read += sum(1 for _ in islice(self._micro_batches, max(0, self._announced - self._read)))
        if over or (all_done and not self._has_surplus()):
            self._place.note(exhausted=True)

    def no_group_error(self, epoch: int) -> ValueError:
        """Why epoch `epoch` has no group, on any rank, which is a mistake. Collective."""
        numbers = [int(number) for number in collectives.everyones(max(self._announced or 0, self._read + len(self._ahead)))]
        number = min(numbers) if self._against else max(numbers)
        if number > 0 and self._drops_last_group:
            return ValueError(
                f"data must have a whole group in each epoch for drop_last_group=True, got {number} micro-batches, and "
                f"accumulation_steps asks for {self._size(0)}; pass drop_last_group=False, or more data"
            )
        where = "every rank for uneven='shortest'" if self._against and any(numbers) else "some rank"
        return ValueError(f"data must give at least one micro-batch on {where}, got none in epoch {epoch}")

    def close(self, *, whole: bool) -> None:
        """Ends the pass and releases the loader; warns if the loader gave more or fewer micro-batches than its `len()`."""
        over = self.length is not None and not self._against and (self._ended or self._done >= self.length)
        is_finished = whole and over and self._finished  # otherwise the next run finishes the epoch
        if is_finished and self._announced is not None and (self._surplus or self._read != self._announced):
            warnings.warn(self._wrong_length(self._announced), stacklevel=2)
        self.pause()
        self._micro_batches = iter(())

    def _wrong_length(self, announced: int) -> str:
        """Why a pass had another length; where the run resumed in it, the loader's state is the likely cause."""
        length, given = self._before + announced, self._before + self._read
        if self._surplus:
            return (
                f"the loader has len() {length} and gave more micro-batches: the surplus is left out of the epoch; correct its "
                "__len__"
            )
        if self._place.has_restored and given < length:
            return (
                f"the {type(self.loader).__name__} has len() {length} and gave {given} micro-batches in the epoch in which the "
                f"run resumed: {length - given} are missing, because the state that it saves does not hold them, as that of a "
                "stream that shuffles may lack its buffer; use a ResumableLoader, or a plain DataLoader, which reads past what "
                "was done"
            )
        change = "shorter" if given < length else "longer"
        return f"the loader has len() {length} and gave {given} micro-batches: the epoch was {change}; correct its __len__"

    def pause(self) -> None:
        """Ends the thread that reads the loader, if there is one; reading on starts another."""
        if isinstance(self._micro_batches, FetchThread):
            self._micro_batches.pause()

    def _opened(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Begins the pass. A thread that reads it is told how many micro-batches are held here."""
        opened = open_loader(loader)
        if isinstance(opened, FetchThread):
            most = self._size(self._done) + self._looks_ahead
            opened.expect_held(min(most, 2) if self._groups_arrive else most)
        return opened

    def _read_past(self, *, was_exhausted: bool) -> None:
        """Reads what is done of the epoch, and as far beyond it as the interrupted run did."""
        self._read = sum(1 for _ in islice(self._micro_batches, self._before)) - self._before
        if was_exhausted:  # then its sampler has drawn after the last index already
            self._ahead += islice(self._micro_batches, 1)

    def _note(self) -> None:
        self._place.note(exhausted=self._exhausted)
        self._is_noted = True

    def _has_surplus(self) -> bool:
        if self._surplus is None:
            self._surplus = not self._place.is_pass_broken() and next(self._micro_batches, self) is not self
        return self._surplus

    def _leave_out(self, group: list[Any], begin: int) -> None:
        """Drops micro-batches beyond the loader's length and, with `"shortest"`, beyond those of the rank with the fewest.

        So with `"shortest"` all ranks have equally many micro-batches in the last group too. Without lengths, and with
        several micro-batches to an update, this takes a collective.
        """
        if self.length is not None:
            used = max(0, min(self._used[self._rank], self._position) - begin)
            if len(group) > used:
                self._surplus = True
        elif self._against and self._position - begin > 1:
            used = -int(collectives.largest(-len(group))[0])
        else:
            return
        del group[used:]

    def _take(self, size: int, held: Held | None) -> MutableSequence[Any]:
        expected = self._expected(size) if self._groups_arrive and not self._ahead else 0
        self._done += 1
        self._position += size
        self.num_read, self._is_noted = 0, False
        if expected:
            return self._take_arriving(expected, size)
        group, self._ahead = self._ahead[:size], self._ahead[size:]
        group += self._read_list(size - len(group), held, more_follow=self._looks_ahead)
        self._exhausted = len(group) < size
        self._count(group)
        if self._drops_last_group and not self._fills_up and len(group) < size:
            return []
        return group

    def _read_list(self, number: int, held: Held | None, *, more_follow: bool = False) -> list[Any]:
        """The next micro-batches of the loader, fewer at its end.

        Args:
            number: how many.
            held: those that wait while more is read, to which these are added; None where none of them can change.
            more_follow: others are read after these, before these are computed.
        """
        read: list[Any] = []
        for micro_batch in islice(self._micro_batches, number):
            read.append(micro_batch)
            if held is not None and (more_follow or len(read) < number):
                held.add(micro_batch)
        return read

    def _expected(self, size: int) -> int:
        """How many micro-batches the next group will have on this rank, if its loader gives what its length has said."""
        if self._announced is None:
            return size
        left = min(self._announced, self._used[self._rank]) - self._read
        return max(0, min(size, left))

    def _take_arriving(self, expected: int, size: int) -> ArrivingGroup:
        def read() -> Any:
            micro_batch = next(self._micro_batches)
            self._count([micro_batch])
            return micro_batch

        def end(group: ArrivingGroup) -> None:
            """As where a group is read at once: the loader is exhausted if it had less than a whole one."""
            self._exhausted = len(group) < expected or (expected < size and not self._has_surplus())
            self._note()

        return ArrivingGroup(read, expected, is_sized=self._announced is not None, on_complete=end, number=self._num_as_large)

    def _count(self, micro_batches: list[Any]) -> None:
        has_none = any(map(is_, micro_batches, repeat(None)))
        if has_none and not (self._grouping.none_is_empty or self._reads_no_data()):
            raise TypeError(
                "the loader gave None instead of a micro-batch; leave it out, fix the dataset or collate_fn, or pass "
                "options=UpdateOptions(none_is_empty=True), with which it has no weight"
            )
        self._read += len(micro_batches)
        self.num_read += len(micro_batches)

    def _reads_no_data(self) -> bool:
        """Whether each micro-batch is a None that forward is called with; `set_data` may change that."""
        return isinstance(self.loader, Stream) and isinstance(self.loader.data, NoData)

    def _look_ahead(self, held: Held | None) -> None:
        wanted = self._size(self._done) if self._drops_last_group else 1
        self._ahead += self._read_list(max(0, wanted - len(self._ahead)), held)
        self._nothing_behind = len(self._ahead) < wanted
        self.more = self._against if self._nothing_behind else 1

    def _agree_on_length(self) -> int | None:
        """Updates of the longest rank, or of the shortest; None if the length of any rank is unknown."""
        if self._grouping._uneven == "error" and (min(self.lengths) < 0 or len(set(self.lengths)) > 1):
            table = ", ".join(f"rank {rank}: {'unknown' if n < 0 else self._before + n}" for rank, n in enumerate(self.lengths))
            raise ValueError(
                f"data must be equally long on all ranks for uneven='error', got micro-batches on {table}; make the shards "
                "equally long, or pass options=UpdateOptions(uneven='all') or uneven='shortest' there"
            )
        if min(self.lengths) < 0:
            return None
        micro_batches = min(self.lengths) if self._against else max(self.lengths)
        return _count_updates(micro_batches, self._size, self._done, drops_last_group=self._drops_last_group)


def deal_again_by(loader: Iterable[Any], dealing: Dealing) -> None:
    """Has a loader deal its samples by `dealing`, again within an epoch where that is needed.

    Raises:
        TypeError: the loader cannot.
    """
    if not isinstance(loader, ResumableLoader):
        kind = "a run with epoch_length" if isinstance(loader, Stream) else f"a {type(loader).__name__}"
        raise TypeError(
            f"data must be a ResumableLoader with reduction='elastic', whose samples can be dealt again, got {kind}; pass "
            "ResumableLoader(dataset, batch_size=..., shuffle=...) and max_epochs or max_iters"
        )
    loader.deal_by(dealing)


def _reads_ahead(loader: Iterable[Any]) -> bool:
    """Whether worker processes or a thread prepare micro-batches while earlier ones are computed."""
    if isinstance(loader, ResumableLoader) and loader.fetches_in_thread:
        return True
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def _gives_each_once(loader: Iterable[Any]) -> bool:
    """Whether reading another micro-batch cannot change one that was read: torch's own collation makes new tensors."""
    collates = type(loader) is DataLoader and loader.batch_sampler is not None and loader.collate_fn is default_collate
    return collates or type(loader) in (list, tuple)


@dataclass(frozen=True)
class _AlwaysSame:
    """The size of the groups of an epoch, where it is one number."""

    size: int

    def __call__(self, done: int) -> int:  # noqa: ARG002
        """The size of the group after `done` others."""
        return self.size


def _count_updates(micro_batches: int, size: Callable[[int], int], done: int, *, drops_last_group: bool) -> int:
    """Updates of an epoch that has `micro_batches` left after `done` updates; `size(done)` is that of the next group.

    Groups of one size are not counted one by one, because a sampler without an end may say that it has 10¹² samples.
    """
    if isinstance(size, _AlwaysSame):
        whole, rest = divmod(micro_batches, size.size)
        return done + whole + (rest > 0 and not drops_last_group)
    while micro_batches >= (size(done) if drops_last_group else 1):
        micro_batches -= size(done)
        done += 1
    return done
