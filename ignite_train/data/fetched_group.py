"""The group that was fetched for an update, until that begins: handlers may replace it, and a stop may undo the fetch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ignite_train.arguments import describe
from ignite_train.data.arriving_group import ArrivingGroup
from ignite_train.data.grouping import MicroBatchPass

__all__ = ["FetchedGroup"]


class FetchedGroup:
    """A group between its fetch and its update.

    Args:
        group: the micro-batches of this rank; None where none were fetched, or the pass has ended.
        random_state: of the generators before the fetch, as `MicroBatchPass.capture_random_state` gave it; None where no
            handler can stop the run before the update, so that the fetch will not be undone.

    Attributes:
        can_be_undone: whether the next fetch can be made to give and draw the same.
    """

    def __init__(self, group: Sequence[Any] | None = None, random_state: dict[str, Any] | None = None) -> None:
        self._group: Sequence[Any] = () if group is None else group
        self._random_state, self.can_be_undone = random_state, random_state is not None
        self._as_fetched: Sequence[Any] | None = None  # what can be given back
        if random_state is not None and group is not None:  # handlers may change a list
            self._as_fetched = list(group) if isinstance(group, list) else group

    def replaced_by(self, group: Any) -> Sequence[Any]:
        """What the update runs on: `group`, in which handlers may have replaced micro-batches, but not changed their number.

        Raises:
            TypeError: it is not a list, or has another number of micro-batches.
        """
        fetched = self._group
        if group is not fetched and isinstance(fetched, ArrivingGroup):
            fetched = fetched.whole()  # the place in the data is that after it
        if not isinstance(group, (list, ArrivingGroup)) or len(group) != len(fetched):
            got = f"{len(group)} of them" if isinstance(group, list) else describe(group)
            raise TypeError(
                f"state.batch must be a list of the update's {len(fetched)} micro-batches, got {got}; a handler that "
                "changes data puts state.batch = [change(micro_batch) for micro_batch in state.batch]"
            )
        return group

    def give_back(self, groups: MicroBatchPass) -> None:
        """Gives the group back to the pass that gave it, if one was fetched: the next fetch gives it again."""
        if self._as_fetched is not None:
            groups.give_back(list(self._as_fetched))

    def restore_random_state(self, groups: MicroBatchPass) -> None:
        """Puts the generators back to what they were before the fetch, so that the next one draws the same."""
        if self._random_state is not None:
            groups.restore_random_state(self._random_state)
