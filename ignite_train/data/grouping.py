"""Grouping micro-batches: how many make an update, how many updates make an epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ignite_train.arguments import describe, one_of, positive_int
from ignite_train.data.dealing import Dealing
from ignite_train.data.description import length_of
from ignite_train.data.micro_batch_pass import GroupSizes, MicroBatchPass, PassRules, Uneven
from ignite_train.data.resumable_loader import ResumableLoader
from ignite_train.data.samplers import set_epoch
from ignite_train.data.stream import Stream
from ignite_train.ranks import collectives

__all__ = ["POLICIES", "AccumulationSteps", "MicroBatchGrouping"]

AccumulationSteps = int | Sequence[int] | Callable[[int], int]
"""Micro-batches to an update: a number, one for each epoch (the last one repeats), or a function of the number of the update,
which counts from 1, as `state.iteration` does."""

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
        rules: of each pass.
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
        one_of("uneven", uneven, POLICIES)
        self.rules = PassRules(
            dealing=Dealing() if dealing is None else dealing,
            uneven=uneven,
            drops_last_group=drops_last_group,
            lends=is_sharded,
            none_is_empty=none_is_empty,
        )
        if none_is_empty and synchronised_norm is not None and uneven != "replay" and collectives.world_size() > 1:
            raise ValueError(
                f"none_is_empty must be False where {synchronised_norm!r} in the model is a SyncBatchNorm, whose forward waits "
                "for all ranks; pass options=UpdateOptions(none_is_empty=True, uneven='replay')"
            )
        self._steps = accumulation_steps
        self._synchronised_norm = synchronised_norm if uneven == "all" else None
        if isinstance(accumulation_steps, (str, bytes, Mapping)):
            raise TypeError(
                "accumulation_steps must be a positive integer, a list of one for each epoch, or a function of the number of "
                f"the update, got {describe(accumulation_steps)}"
            )
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
        if self.rules.dealing.again:
            _deal_again_by(loader, self.rules.dealing)
        set_epoch(loader, epoch - 1)
        groups = MicroBatchPass(self.rules, loader, self._sizes(epoch, first_update), skip, position)
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
        if self.rules.dealing.again:
            _deal_again_by(loader, self.rules.dealing)
        lengths = self.rules.dealing.lengths(lambda: length_of(loader))
        return self.rules.count_updates(lengths, self._sizes(epoch, first_update))

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

    def _sizes(self, epoch: int, first_update: int) -> GroupSizes:
        """How many micro-batches the groups of an epoch have."""
        steps = self._steps
        if isinstance(steps, Sequence):
            return int(steps[min(epoch, len(steps)) - 1])
        if not callable(steps):
            return int(steps)

        def size(done: int) -> int:
            update = first_update + done
            try:
                return positive_int(f"accumulation_steps({update})", steps(update))
            except StopIteration as error:  # would look like the end of the data
                raise RuntimeError(f"accumulation_steps({update}) raised StopIteration; only the data ends an epoch") from error

        return size


def _deal_again_by(loader: Iterable[Any], dealing: Dealing) -> None:
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
