"""A pass over the data of all ranks, cut into groups of micro-batches, one for each update."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from operator import is_
from typing import Any, Literal

from torch.utils.data import DataLoader, default_collate

from ignite_train.data.arriving_group import ArrivingGroup
from ignite_train.data.dealing import Dealing
from ignite_train.data.description import length_of
from ignite_train.data.fetch_thread import FetchThread
from ignite_train.data.held import Held, is_looked_at
from ignite_train.data.position import DataPosition
from ignite_train.data.resumable_loader import ResumableLoader
from ignite_train.data.stream import NoData, Stream
from ignite_train.engine.limits import without_full_batch
from ignite_train.ranks import collectives

__all__ = ["GroupSizes", "MicroBatchPass", "PassRules", "Uneven"]

Uneven = Literal["all", "shortest", "replay", "error"]
"""The rules for ranks with different numbers of micro-batches.

`"all"`: every micro-batch is used; a rank that ran out takes part with weight zero. `"shortest"`: the epoch ends on all ranks
when the first rank runs out. `"replay"`: as `"all"`, and a rank that ran out runs forward and backward on a placeholder with
weight zero. `"error"`: unequal numbers are an error at the start of the epoch."""

GroupSizes = int | Callable[[int], int]
"""How many micro-batches a group of an epoch has: a number, or a function of the number of groups before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRules:
    """The facts that hold for all passes of a trainer.

    Attributes:
        dealing: who gets samples.
        uneven: see `Uneven`.
        drops_last_group: the last group of an epoch is left out if no rank has a whole one.
        lends: a rank with fewer micro-batches than others is lent theirs.
        none_is_empty: a None keeps its place in the group and is left out of what the group gives; else it is an error.
    """

    dealing: Dealing
    uneven: Uneven = "all"
    drops_last_group: bool = False
    lends: bool = False
    none_is_empty: bool = False

    @property
    def counts_in_step(self) -> bool:
        """Whether the ranks must run forward equally often in each update."""
        return self.lends or self.uneven == "replay"

    def count_updates(self, lengths: Sequence[int], sizes: GroupSizes, done: int = 0) -> int | None:
        """Updates of an epoch after which no rank has a group, or with `"shortest"` some rank; None if a length is unknown.

        Groups of one size are not counted one by one, because a sampler without an end may say that it has 10¹² samples.

        Args:
            lengths: the micro-batches that each rank has left; -1 where unknown.
            sizes: of the groups of the epoch.
            done: updates of the epoch that are done.
        """
        if min(lengths) < 0:
            return None
        micro_batches = min(lengths) if self.uneven == "shortest" else max(lengths)
        if isinstance(sizes, int):
            whole, rest = divmod(micro_batches, sizes)
            return done + whole + (rest > 0 and not self.drops_last_group)
        while micro_batches >= (sizes(done) if self.drops_last_group else 1):
            micro_batches -= sizes(done)
            done += 1
        return done


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The facts that are known of a pass when it begins, the same for each of its groups.

    Attributes:
        own_length: micro-batches that are left on this rank, as its loader says; None if unknown.
        done_before: micro-batches of this epoch that are done, if `len()` of the loader counts them too.
        usable: how many micro-batches of each rank are used.
        longest: the largest of them.
        rank: of this process among those that get samples.
        fills_up: there are other ranks, so that groups are empty where only those have more.
        looks_ahead: there are other ranks, and no lengths: whether there is another group travels with each update.
        arrives: groups are given while their later micro-batches are still prepared.
        may_be_rewritten: reading a micro-batch may change one that was read before.
        drops_last_group: see `PassRules`; never in a stream, which continues in the next epoch.
    """

    own_length: int | None
    done_before: int
    usable: list[int]
    longest: int
    rank: int
    fills_up: bool
    looks_ahead: bool
    arrives: bool
    may_be_rewritten: bool
    drops_last_group: bool


class MicroBatchPass:
    """A pass over the data of all ranks: an iterator of groups, empty where only other ranks have micro-batches.

    Args:
        rules: which groups there are.
        loader: this rank's micro-batches.
        sizes: of the groups of this epoch.
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

    length: int | None
    max_micro_batches: int | None

    def __init__(
        self, rules: PassRules, loader: Iterable[Any], sizes: GroupSizes, skip: int, position: Mapping[str, Any]
    ) -> None:
        self._rules, self.loader, self._sizes = rules, loader, sizes
        self.begin(skip, position)

    def begin(self, skip: int, position: Mapping[str, Any]) -> None:
        """Begins the pass, or begins it again where samples are dealt to others in the middle of it.

        Args:
            skip: groups of this epoch that are done already.
            position: the position after them.
        """
        self._place, self._num_done = DataPosition(self.loader, copies=not isinstance(self.loader, Stream)), skip
        with self._place.opening():
            self._place.find(position, skip)
            self._plan = self._make_plan(skip, position)
            self.max_micro_batches, self.more = None, 1
            self._rounds = 0  # what the groups since the position was found add up to, if none is cut short
            self._largest = self._num_as_large = 0  # the size of the largest group so far, and how many came since it did
            self._read = self.num_read = 0  # micro-batches since the position was found, and in the latest group
            self._waiting: list[Any] = []  # read for later groups
            self._is_noted = True  # the place after the latest group; not while it arrives, nor where reading it has failed
            self._is_lost = False  # the latest group was broken off, and its data replaced
            self._has_ended = False  # the loader has no other group
            self._surplus: bool | None = None  # whether the loader gave more than its length; None: not looked at yet
            self._micro_batches = self._opened()
            if self._place.reads_past:
                self._read_past(was_exhausted=position.get("exhausted", False))
            self._place.found()
            if self._plan.looks_ahead:
                self._look_ahead(Held(self._waiting))

    def _make_plan(self, skip: int, position: Mapping[str, Any]) -> _Plan:
        """Looks at the lengths of all ranks. Collective, unless samples can be dealt again."""
        rules, loader, own = self._rules, self.loader, length_of(self.loader)
        done = 0
        if skip and not self._place.jumps:
            done = position.get("micro_batches", sum(map(self._size_of, range(skip))))
            done = done if own is None else min(done, own)
        self.lengths = rules.dealing.lengths(lambda: None if (n := length_of(loader)) is None else n - min(done, n))
        usable = self.lengths
        if isinstance(loader, Stream):
            self.length, usable = loader.updates_per_epoch, [sys.maxsize] * len(usable)
        else:
            self._refuse_uneven(done)
            self.length = rules.count_updates(self.lengths, self._sizes, skip)
            if rules.uneven == "shortest":
                usable = [min(usable)] * len(usable)
        fills_up = rules.dealing.size > 1
        needs_whole = rules.counts_in_step or rules.drops_last_group or rules.none_is_empty
        looks_ahead = fills_up and self.length is None
        return _Plan(
            own_length=None if own is None else own - done,
            done_before=done,
            usable=usable,
            longest=max(usable),
            rank=rules.dealing.rank,
            fills_up=fills_up,
            looks_ahead=looks_ahead,
            arrives=_reads_ahead(loader) and not (needs_whole or looks_ahead),
            may_be_rewritten=not _gives_each_once(loader),
            drops_last_group=rules.drops_last_group and not isinstance(loader, Stream),
        )

    def _refuse_uneven(self, done: int) -> None:
        """With `"error"`, raises ValueError unless all ranks have equally many micro-batches behind the `done` first."""
        lengths = self.lengths
        if self._rules.uneven == "error" and (min(lengths) < 0 or len(set(lengths)) > 1):
            table = ", ".join(f"rank {rank}: {'unknown' if n < 0 else done + n}" for rank, n in enumerate(lengths))
            raise ValueError(
                f"data must be equally long on all ranks for uneven='error', got micro-batches on {table}; make the shards "
                "equally long, or pass options=UpdateOptions(uneven='all') or uneven='shortest' there"
            )

    def __iter__(self) -> Iterator[MutableSequence[Any]]:
        return self

    def __next__(self) -> MutableSequence[Any]:
        plan, begin = self._plan, self._rounds
        if self._place.may_break and self._place.is_pass_broken() and self._read != plan.own_length:
            raise self._place.broken_pass_error()  # something is left of the pass
        size = self._sizes if isinstance(self._sizes, int) else self._sizes(self._num_done)
        # Counted again from a larger group on: more is held then than a ring of the loader may have.
        self._num_as_large = self._num_as_large + 1 if size <= self._largest else 0
        self._largest = max(size, self._largest)
        held = Held(self._waiting) if plan.may_be_rewritten and is_looked_at(self._num_as_large) else None
        expected = self._expected(size) if plan.arrives and not self._waiting else 0
        self._num_done += 1
        self._rounds += size
        self.num_read, self._is_noted, self._is_lost = 0, False, False
        group = self._arriving(expected, size) if expected else self._whole(size, held)
        if self.length is not None:
            reached = min(plan.longest, self._rounds)
            self.max_micro_batches = reached - begin
            if self._rules.lends and (self._rules.none_is_empty or min(plan.usable) < reached):
                self.max_micro_batches = None  # the ranks agree on it when they know what each of them has
        if plan.fills_up:
            if isinstance(group, list):
                self._leave_out(group, begin)
        elif not group:
            self._has_ended = True
            raise StopIteration
        if plan.looks_ahead:
            self._look_ahead(held)
        if held is not None:
            held.check()
        if not self._rules.none_is_empty or self._reads_no_data():
            return group
        return [micro_batch for micro_batch in group if micro_batch is not None]

    # --- what is read -----------------------------------------------------------------------------------------------------

    def _whole(self, size: int, held: Held | None) -> list[Any]:
        """The next group, all of whose micro-batches are there; shorter at the end of the loader."""
        group, self._waiting = self._waiting[:size], self._waiting[size:]
        if held is None:
            group += islice(self._micro_batches, size - len(group))
        else:
            group += self._read_held(size - len(group), held, more_follow=self._plan.looks_ahead)
        if any(map(is_, group, repeat(None))):
            self._refuse_none()
        self._read += len(group)
        self.num_read, self._place.exhausted = len(group), len(group) < size
        if self._place.is_stateful:
            self._place.note(exhausted=self._place.exhausted)
        self._is_noted = True
        is_left_out = self._plan.drops_last_group and not self._plan.fills_up and len(group) < size
        return [] if is_left_out else group

    def _read_held(self, number: int, held: Held, *, more_follow: bool) -> list[Any]:
        """The next micro-batches of the loader, fewer at its end.

        Args:
            number: how many.
            held: those that wait while more is read, to which these are added.
            more_follow: others are read after these, before these are computed.
        """
        read: list[Any] = []
        for micro_batch in islice(self._micro_batches, number):
            read.append(micro_batch)
            if more_follow or len(read) < number:
                held.add(micro_batch)
        return read

    def _expected(self, size: int) -> int:
        """How many micro-batches the next group will have on this rank, if its loader gives what its length has said."""
        plan = self._plan
        if plan.own_length is None:
            return size
        return max(0, min(size, min(plan.own_length, plan.usable[plan.rank]) - self._read))

    def _arriving(self, expected: int, size: int) -> ArrivingGroup:
        """The next group, whose later micro-batches are still prepared."""

        def read() -> Any:
            micro_batch = next(self._micro_batches)
            if micro_batch is None:
                self._refuse_none()
            self._read += 1
            self.num_read += 1
            return micro_batch

        def end(group: ArrivingGroup) -> None:
            """As where a group is read at once: the loader is exhausted if it had less than a whole one."""
            is_exhausted = len(group) < expected or (expected < size and not self._has_surplus())
            self._place.note(exhausted=is_exhausted)
            self._is_noted = True

        is_sized, looks = self._plan.own_length is not None, is_looked_at(self._num_as_large)
        return ArrivingGroup(read, expected, is_sized=is_sized, on_complete=end, looks=looks)

    def _refuse_none(self) -> None:
        if not (self._rules.none_is_empty or self._reads_no_data()):
            raise TypeError(
                "the loader gave None instead of a micro-batch; leave it out, fix the dataset or collate_fn, or pass "
                "options=UpdateOptions(none_is_empty=True), with which it has no weight"
            )

    def _reads_no_data(self) -> bool:
        """Whether each micro-batch is a None that forward is called with; `set_data` may change that."""
        return isinstance(self.loader, Stream) and isinstance(self.loader.data, NoData)

    def _leave_out(self, group: list[Any], begin: int) -> None:
        """Drops micro-batches beyond the loader's length and, with `"shortest"`, beyond those of the rank with the fewest.

        So with `"shortest"` all ranks have equally many micro-batches in the last group too. Without lengths, and with
        several micro-batches to an update, this takes a collective.

        Args:
            group: what was read.
            begin: `_rounds` before it.
        """
        plan = self._plan
        if self.length is not None:
            used = max(0, min(plan.usable[plan.rank], self._rounds) - begin)
            if len(group) > used:
                self._surplus = True
        elif self._rules.uneven == "shortest" and self._rounds - begin > 1:
            used = -int(collectives.largest(-len(group))[0])
        else:
            return
        del group[used:]

    def _look_ahead(self, held: Held | None) -> None:
        """Reads the first micro-batch of the next group, or all of it where the last is dropped, to vote on whether it is."""
        wanted = self._size_of(self._num_done) if self._plan.drops_last_group else 1
        number = max(0, wanted - len(self._waiting))
        if held is None:
            self._waiting += islice(self._micro_batches, number)
        else:
            self._waiting += self._read_held(number, held, more_follow=False)
        self._has_ended = len(self._waiting) < wanted
        self._place.exhausted = self._place.exhausted or not self._waiting
        veto = -collectives.world_size() if self._rules.uneven == "shortest" else 0
        self.more = veto if self._has_ended else 1

    def _size_of(self, done: int) -> int:
        return self._sizes if isinstance(self._sizes, int) else self._sizes(done)

    # --- the place in the data --------------------------------------------------------------------------------------------

    def position(self, done: int | None = None) -> dict[str, Any]:
        """The position of this rank after the first `done` groups of the epoch: all that were given, or all but the last."""
        latest = done is None or done >= self._num_done
        rounds = self._rounds if latest or done is None else self._rounds - self._size_of(done)
        given = self._plan.done_before + self._read - (0 if latest else self.num_read)
        # Where the latest group has not arrived, the latest note is of the one before.
        at_rest = latest and self._is_noted and not self._plan.looks_ahead
        return self._place.saved(rounds, given, latest=latest or not self._is_noted, at_rest=at_rest)

    def note_other_data(self, done: int | None = None) -> None:
        """Call it where the stream of this pass was given other data: between two runs, or after `done` groups of the epoch."""
        self._is_lost = done is not None and done < self._num_done
        if self._is_noted or not self._is_lost:
            self._place.note_other_data(in_group=self._is_lost)

    def refuse_lost_group(self, done: int) -> None:
        """Refuses to read the latest group, behind `done` others, again if its data was replaced meanwhile. Collective.

        Raises:
            RuntimeError: it is so on some rank.
        """
        if collectives.any_rank(self._is_lost and done < self._num_done):
            raise RuntimeError(
                "an update that was broken off cannot be repeated, because set_data has replaced the data while its group was "
                "read or used; resume from a checkpoint in a new process"
            )

    def take_back_opening(self) -> None:
        """Call it where an exception ends the run before the epoch's first update: the next one opens the pass again."""
        self._place.take_back_opening()

    def finish(self) -> str | None:
        """Ends the epoch. Call it before the position at the end of the epoch is read.

        The loader is exhausted here, since samplers may draw from their generators after the last index, as torch's do.

        Returns:
            The warning that is due, if the loader gave more or fewer micro-batches than its `len()`.
        """
        plan = self._plan
        if isinstance(self.loader, Stream):  # it continues in the next epoch
            return None
        is_sized = self.length is not None and self._rules.uneven != "shortest"
        all_done = is_sized and self._num_done >= (self.length or 0)
        if all_done and plan.drops_last_group and plan.own_length is not None:
            self._read += sum(1 for _ in islice(self._micro_batches, max(0, plan.own_length - self._read)))
        if self._has_ended or (all_done and not self._has_surplus()):
            self._place.note(exhausted=True)
        announced, is_read = plan.own_length, all_done or (is_sized and self._has_ended)
        if is_read and announced is not None and (self._surplus or self._read != announced):
            return self._wrong_length(announced)
        return None

    def no_group_error(self, epoch: int) -> ValueError:
        """Why epoch `epoch` has no group, on any rank, which is a mistake. Collective."""
        plan, takes_shortest = self._plan, self._rules.uneven == "shortest"
        own = max(plan.own_length or 0, self._read + len(self._waiting))
        numbers = [int(number) for number in collectives.everyones(own)]
        number = min(numbers) if takes_shortest else max(numbers)
        if number > 0 and plan.drops_last_group:
            return ValueError(
                f"data must have a whole group in each epoch for drop_last_group=True, got {number} micro-batches, and "
                f"accumulation_steps asks for {self._size_of(0)}; pass drop_last_group=False, or more data"
            )
        where = "every rank for uneven='shortest'" if takes_shortest and any(numbers) else "some rank"
        hint = without_full_batch(self.loader)
        return ValueError(f"data must give at least one micro-batch on {where}, got none in epoch {epoch}{hint}")

    def close(self) -> None:
        """Ends the pass and releases the loader."""
        self.pause()
        self._micro_batches = iter(())

    def _wrong_length(self, announced: int) -> str:
        """Why a pass had another length; where the run resumed in it, the loader's state is the likely cause."""
        length, given = self._plan.done_before + announced, self._plan.done_before + self._read
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
        remedy = "the epoch was longer; correct its __len__"
        if given < length:
            remedy = "the epoch was shorter; correct its __len__, or its dataset if a next() in it raises StopIteration"
        return f"the loader has len() {length} and gave {given} micro-batches: {remedy}"

    def pause(self) -> None:
        """Ends the thread that reads the loader, if there is one; reading on starts another."""
        if isinstance(self._micro_batches, FetchThread):
            self._micro_batches.pause()

    def _opened(self) -> Iterator[Any]:
        """Begins the pass. A thread that reads it is told how many micro-batches are held here."""
        opened = self._place.open()
        if isinstance(opened, FetchThread):
            most = self._size_of(self._num_done) + self._plan.looks_ahead
            opened.expect_held(min(most, 2) if self._plan.arrives else most)
        return opened

    def _read_past(self, *, was_exhausted: bool) -> None:
        """Reads what is done of the epoch, and as far beyond it as the interrupted run did."""
        done = self._plan.done_before
        self._read = sum(1 for _ in islice(self._micro_batches, done)) - done
        if was_exhausted:  # then its sampler has drawn after the last index already
            self._waiting += islice(self._micro_batches, 1)

    def _has_surplus(self) -> bool:
        if self._surplus is None:
            self._surplus = not self._place.is_pass_broken() and next(self._micro_batches, self) is not self
        return self._surplus


def _reads_ahead(loader: Iterable[Any]) -> bool:
    """Whether worker processes or a thread prepare micro-batches while earlier ones are computed."""
    if isinstance(loader, ResumableLoader) and loader.fetches_in_thread:
        return True
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def _gives_each_once(loader: Iterable[Any]) -> bool:
    """Whether reading another micro-batch cannot change one that was read: torch's own collation makes new tensors."""
    collates = type(loader) is DataLoader and loader.batch_sampler is not None and loader.collate_fn is default_collate
    return collates or type(loader) in (list, tuple)
