"""The data of a trainer's runs: the loader, the pass over it that is open, and the place in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ignite_train.arguments import describe, positive_int
from ignite_train.data.arriving_group import ArrivingGroup
from ignite_train.data.grouping import MicroBatchGrouping
from ignite_train.data.micro_batch_pass import MicroBatchPass
from ignite_train.data.stream import NoData, Stream, is_of_stream
from ignite_train.engine.limits import refuse_ended_iterator, refuse_used_iterator
from ignite_train.engine.loop import Batches, Progress
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import RankRequests
from ignite_train.state import TrainState

__all__ = ["RunData", "known_size"]


class RunData(Batches):
    """The data that a trainer reads, group by group.

    A pass is one reading of the loader from its beginning to its end. With `epoch_length` an epoch is a number of updates, and
    passes follow each other inside of a `Stream`; otherwise an epoch is a pass.

    Args:
        grouping: makes groups of micro-batches.
        state: the counters of the trainer, and its loader.
        progress: where its loop stands.
        requests: told of this rank's vote on another group.
        on_pass_ended: called with `epoch_length`, when a pass has ended and before the next one begins.

    Attributes:
        grouping: the same.
        stream: with `epoch_length`, the data of the run; otherwise None.
        length: updates of the open epoch; None if unknown.
        max_micro_batches: of the rank that has the most in this update; None if unknown.
        waiting: makes the `with` in which a group that arrives waits for the loader, where that time is measured.
    """

    def __init__(
        self,
        grouping: MicroBatchGrouping,
        state: TrainState,
        progress: Progress,
        requests: RankRequests,
        on_pass_ended: Callable[[], None],
    ) -> None:
        self.grouping = grouping
        self.stream: Stream | None = None
        self.length: int | None = None
        self.max_micro_batches: int | None = None
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._state, self._progress, self._requests, self._on_pass_ended = state, progress, requests, on_pass_ended
        self._groups: MicroBatchPass | None = None  # the pass that is running or ran last
        self._pass_is_opened = False  # the pass of the open epoch
        self._begins = False  # a run has begun, and reads nothing yet
        self._of_run: Iterable[Any] | None = None  # what `run` was called with, and not what `set_data` put in its place
        self._place: Mapping[str, Any] = {}  # where no pass has been made since it was loaded
        self._on_changed_data = ""  # nothing was loaded from a checkpoint
        self._fetched: Sequence[Any] = ()  # the group of the update that begins next, as it came
        self._is_kept = False  # the latest run left its pass open, and the next one may continue it

    # --- the data of a run

    def begin_run(self, data: Iterable[Any] | None, epoch_length: int | None) -> None:
        """Takes the data of a run that begins. The stream of the run before continues if it reads the same data.

        Raises:
            ValueError: there is no data, and no length of an epoch, now or from the run before.
        """
        length = None if epoch_length is None else positive_int("epoch_length", epoch_length)
        self._begins, self._of_run = True, data
        if self.stream is not None and self._groups is not None and self._reads(self.stream, data):
            self.stream.updates_per_epoch = length or self.stream.updates_per_epoch
        elif data is None and length is None:
            raise ValueError(
                "data must be a loader of micro-batches, got None; for a forward that needs no data pass epoch_length=..., the "
                "number of updates in an epoch"
            )
        else:
            self.stream = None if length is None else Stream(NoData() if data is None else data, length, self._on_pass_ended)

    @staticmethod
    def _reads(stream: Stream, data: Iterable[Any] | None) -> bool:
        return stream.data is data or (data is None and isinstance(stream.data, NoData))

    def refuse_used_iterator(self, data: Iterable[Any] | None, max_epochs: int | None) -> None:
        """Refuses an iterator that the run would have to read more than once.

        Raises:
            TypeError: it is one, and more than one pass is needed.
        """
        if self.stream is None and data is not None:
            half_read = self._progress.epoch_open and data is self._state.dataloader and not self._is_kept
            refuse_used_iterator(data, max_epochs, half_read=half_read)

    def replace(self, data: Iterable[Any]) -> None:
        """Has the run continue with another loader.

        Raises:
            RuntimeError: a pass is open, which is an epoch.
        """
        if self.stream is not None:
            self._replace_in(self.stream, data)
        elif self._progress.reading:
            raise RuntimeError(
                "set_data was called within an epoch, which is one pass over its loader; call it in DATALOADER_STOP_ITERATION, "
                "EPOCH_STARTED or EPOCH_COMPLETED, or pass epoch_length=... to run"
            )
        self._state.dataloader = data

    def _replace_in(self, stream: Stream, data: Iterable[Any]) -> None:
        progress = self._progress
        stream.replace(data)
        epoch_begins = progress.epoch_open and not progress.epoch_started and not progress.epoch_iteration
        # Before the first pass of a run, which continues where the one before was, as a run of a new process does.
        if progress.running and self._begins and not epoch_begins:
            return
        if self._groups is not None and self._groups.loader is stream:
            self._groups.note_other_data(progress.iterations_in_epoch if progress.reading else None)
        elif "description" in self._place and is_of_stream(self._place):
            start = {**self._place["loader"], "given": 0, "place": {}}
            self._place = {**self._place, "loader": start, "exhausted": False}

    def pause(self) -> None:
        """Ends the thread of a loader of which the next run reads on; a pass that is over has ended its own."""
        if self.stream is not None:
            self.stream.pause()
        if self._is_kept and self._groups is not None:
            self._groups.pause()

    def expected_length(self, data: Any) -> int | None:
        """Updates of the epoch that begins next, if that can be known before its pass."""
        source = data if self.stream is None else self.stream
        epoch = self._state.epoch + (not self._progress.epoch_open)
        return self.grouping.updates(source, epoch=epoch, first_update=self._state.iteration + 1)

    # --- the place in the data

    def position(self) -> Mapping[str, Any]:
        """Where this rank stands in its data, and how to find that place again: for `load_position`, in plain types.

        Without it a resumed run reads past what was done, in the order in which the loader then gives it.
        """
        if self._groups is None:
            return self._place
        if self._progress.epoch_open and not self._pass_is_opened:  # the latest pass is that of the epoch before
            position = self._groups.position()
        else:
            position = self._groups.position(self._progress.iterations_in_epoch)
        return position | {"of_run": self._groups.loader is self._of_run}

    def load_position(self, position: Mapping[str, Any], *, on_changed_data: str = "raise") -> None:
        """Has the next run start there. To be called after the trainer's `load_state_dict`.

        Args:
            position: see `position`.
            on_changed_data: what happens in the middle of an epoch if the loader is another one: `"raise"` or `"warn"`.
        """
        self._groups, self._place, self._on_changed_data = None, position, on_changed_data

    def forget_position(self) -> None:
        """Has the next run find its place again, since the counters have changed."""
        self._groups, self._place, self._is_kept = None, {}, False
        if self.stream is not None:
            self.begin_run(self.stream.data, self.stream.updates_per_epoch)

    # --- a pass

    def open(self, data: Any) -> None:
        """Opens the pass of the epoch, after the updates of it that are done, or continues the one that was kept."""
        source = data if self.stream is None else self.stream
        is_kept, self._is_kept, self._begins, groups = self._is_kept, False, False, self._groups
        if self.stream is not None:
            self.stream.on_changed_data = self._on_changed_data
        if is_kept and groups is not None and _all_continue(is_same=source is groups.loader):
            groups.length = groups.length if self.stream is None else self.stream.updates_per_epoch
            self._opened(groups)
            return
        skip, epoch = self._progress.epoch_iteration, self._state.epoch
        first_update = self._state.iteration + 1 - skip
        broken_off = self._pass_is_opened and groups is not None and groups.loader is source
        position = self.position() if skip or groups is None or broken_off else {}
        if not skip and self.stream is None and position.get("of_run") and source is not self._of_run:
            position = {}  # the generators and the state of the loader before, in place of which `set_data` has put this one
        if not skip and self.stream is not None and "description" in position and not is_of_stream(position):
            self.stream.begin_at(position)  # whose first pass follows that of an epoch without `epoch_length`
            position = {}
        position = {**position, "on_changed_data": self._on_changed_data} if position else {}
        if broken_off and self.stream is not None and groups is not None:
            groups.refuse_lost_group(skip)
        self._opened(self.grouping(source, epoch=epoch, first_update=first_update, skip=skip, position=position))

    def _opened(self, groups: MicroBatchPass) -> None:
        self._groups, self._pass_is_opened, self._fetched, self.length = groups, True, (), groups.length
        self._progress.ranks_have_more = groups.length is not None or sum(collectives.everyones(groups.more)) > 0

    def keep_open(self) -> bool:
        """Whether the next run continues this pass: on some rank the data is an iterator, read only once. Collective."""
        data = self._state.dataloader if self.stream is None else self.stream.data
        self._is_kept = collectives.any_rank(isinstance(data, Iterator))
        return self._is_kept

    def close(self) -> None:
        """Ends the pass."""
        assert self._groups is not None  # noqa: S101  # a pass was made
        self._groups.close()

    def take_back(self) -> None:
        """After an error before the first update of an epoch: what was drawn for its group is drawn again, the same."""
        first = self._progress.epoch_open and self._progress.epoch_iteration == 0
        if first and self._pass_is_opened and self._groups is not None:
            self._groups.take_back_opening()

    def finish(self) -> str | None:
        """Ends a pass from which no group is needed any more.

        Returns:
            The warning that is due; see `MicroBatchPass.finish`.

        Raises:
            ValueError: it had no group at all.
        """
        groups, state = self._groups, self._state
        assert groups is not None  # noqa: S101  # a pass was made
        if self._progress.epoch_iteration == 0:
            if isinstance(state.dataloader, Iterator) and state.iteration > 0:
                refuse_ended_iterator(state, state.dataloader)
            raise groups.no_group_error(state.epoch)
        return groups.finish()

    def epoch_closed(self) -> None:
        """Notes that the pass is no longer one of an open epoch, unless closing the epoch has failed."""
        self._pass_is_opened = self._progress.epoch_open

    # --- a group

    def __next__(self) -> MutableSequence[Any]:
        """The group of the next update.

        Raises:
            ValueError: the data ended before the limit of the run.
        """
        groups = self._groups
        assert groups is not None  # noqa: S101  # a pass was made
        group = next(groups, None)
        if self.stream is not None and not group and not groups.num_read:
            refuse_ended_iterator(self._state, self.stream.data)
        if group is None:
            raise StopIteration
        if type(group) is ArrivingGroup:  # an abstract class is asked slowly
            group.waiting = self.waiting
        self._fetched, self.max_micro_batches = group, groups.max_micro_batches
        self._requests.more_data, state, progress = groups.more, self._state, self._progress
        progress.micro_batches_before, progress.record_before = state.num_micro_batches, (state.update_output, state.output)
        return group

    def deal_again(self, position: Mapping[str, Any]) -> Sequence[Any]:
        """Deals what is left of the epoch to the members that take part now, and gives the group of the running update.

        Args:
            position: of this process after the updates that are done, for the members of before.
        """
        groups, state = self._groups, self._state
        assert groups is not None  # noqa: S101  # an update runs
        groups.pause()
        groups.begin(self._progress.epoch_iteration, {**position, "on_changed_data": self._on_changed_data})
        state.epoch_length, self.length = groups.length or state.epoch_length, groups.length
        state.batch = next(self)
        return self.batch(state.batch)

    def given(self, group: list[Any]) -> list[Any]:
        """A group that `update` was given, without entries that are None."""
        rules = self.grouping.rules
        self.max_micro_batches = None if rules.counts_in_step else len(group)  # then the ranks agree on it
        if rules.none_is_empty:
            group = [micro_batch for micro_batch in group if micro_batch is not None]
        self._fetched, state, progress = group, self._state, self._progress
        progress.micro_batches_before, progress.record_before = state.num_micro_batches, (state.update_output, state.output)
        return group

    def batch(self, given: Any) -> Sequence[Any]:
        """The group of the update that begins: handlers may have replaced micro-batches, but not changed their number.

        Raises:
            TypeError: it is not a list, or has another number of micro-batches.
        """
        group, fetched, self._fetched = given, self._fetched, ()
        if group is not fetched and isinstance(fetched, ArrivingGroup):
            fetched = fetched.whole()  # the place in the data is that after it
        if not isinstance(group, (list, ArrivingGroup)) or len(group) != len(fetched):
            got = f"{len(group)} of them" if isinstance(group, list) else describe(group)
            raise TypeError(
                f"state.batch must be a list of the update's {len(fetched)} micro-batches, got {got}; a handler that "
                "changes data puts state.batch = [change(micro_batch) for micro_batch in state.batch]"
            )
        return group


def known_size(group: Any) -> int | None:
    """How many micro-batches a group has; None where that is not known yet."""
    if isinstance(group, list):
        return len(group)
    return group.known_size if isinstance(group, ArrivingGroup) else None


def _all_continue(*, is_same: bool) -> bool:
    """Whether all ranks run on what they ran on before. Collective.

    Raises:
        ValueError: some do and some do not, so that an iterator cannot be continued.
    """
    others, same = collectives.largest(not is_same, is_same)
    if others and same:
        raise ValueError(
            "data must be what it was before the stop on all ranks, since an iterator on one of them is half read, got "
            "other data on some; pass the same objects to run, or other data on all ranks"
        )
    return not others
