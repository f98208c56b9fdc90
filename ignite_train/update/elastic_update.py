"""An update that is made again by those that are there when a replica was lost, or has come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ignite_train.errors import MembersChangedError, NoQuorumError
from ignite_train.ranks import collectives
from ignite_train.ranks.members import Members
from ignite_train.trainer import Trainer
from ignite_train.update.update import Update

__all__ = ["ElasticUpdate"]


@dataclass(kw_only=True)
class ElasticUpdate(Update):
    """An `Update` over the members that take part in it.

    While it runs the lighthouse is asked who takes part. If these are others than in the update before, or one of them is lost
    before all have the sums, the journal puts everything back, samples are dealt again, and the members that are there make
    the update. Its ITERATION_STARTED has fired and fires no more. Where too few members come, or the lighthouse has gone for
    good, the run ends with a `NoQuorumError`, and a `Checkpoint` saves the state after the updates that are counted.
    """

    members: Members = field(init=False)
    _has_no_quorum: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        members = self.gather.crossing.members
        assert members is not None  # noqa: S101  # `create` has paired them
        self.members = members
        self.mark_everything()

    def join(self, trainer: Trainer, capture: Callable[[], Tensor], restore: Callable[[Tensor], None]) -> None:
        """Has each run of `trainer` begin by becoming a member, with the state of the others, and end by leaving them.

        Args:
            trainer: whose update this is.
            capture: gives the state of the run, as bytes.
            restore: takes that of another replica over.
        """
        members = self.members
        trainer.replicas.are_elastic = True

        def enter(trainer: Trainer) -> None:
            self._has_no_quorum = False
            trainer.on_exit[:] = [*(one for one in trainer.on_exit if one is not save_last), save_last]  # after all others
            _refuse_own_groups(trainer)
            members.sends = ", ".join(type(one).__name__ for one in trainer.piggybacks)
            members.join(lambda: trainer.updates_done, capture, restore)
            self.gather.statistics.forget_names()
            self._note(trainer)
            if members.is_stopped:
                trainer.terminate(agreed=True)

        def leave() -> None:
            try:
                if this.progress.ended:
                    members.part(lambda: this.updates_done, stopped=this.should_terminate)
            finally:
                members.leave()

        def save_last() -> None:
            if self._has_no_quorum and this.checkpoint is not None:
                this.checkpoint.save()

        this = weakref.proxy(trainer)
        trainer.on_enter.append(enter)
        trainer.on_exit.append(leave)
        trainer.on_idle.append(members.note_end)

    def __call__(self, trainer: Trainer, micro_batches: Sequence[Any]) -> Any:
        """Runs one update; see `Update`.

        Raises:
            FellBehindError: the others have counted this update without this replica.
            NoQuorumError: the lighthouse gives no answer.
        """
        members = self.members
        _refuse_own_groups(trainer)
        self._note(trainer)
        members.ask(trainer.updates_done)
        while True:
            try:
                output = super().__call__(trainer, micro_batches)
            except MembersChangedError:
                place = trainer.data.position()  # after the updates that are counted; of the members of before
                members.num_changes += 1
                self._renew(trainer)
                self._note(trainer)
                micro_batches = trainer.data.deal_again(place)
                members.ask(trainer.updates_done)
            else:
                made = trainer.state.update_output
                members.commit(trainer.state.iteration, () if made is None else made.learning_rates)
                return output

    def _renew(self, trainer: Trainer) -> None:
        try:
            self.members.renew(lambda: trainer.updates_done)
            self.gather.statistics.forget_names()  # which those that have come do not know
        except NoQuorumError:
            self._has_no_quorum = True
            raise

    def _note(self, trainer: Trainer) -> None:
        """Tells the parts who this replica is among the members, and the metrics how many there are."""
        if self.gather.passes.seeding is not None:
            self.gather.passes.seeding.rank = self.members.rank * collectives.world_size() + collectives.rank()
        trainer.state.metrics["replicas"] = self.members.size
        trainer.state.metrics["updates_made_again"] = self.members.num_changes


def _refuse_own_groups(trainer: Trainer) -> None:
    """Raises ValueError where micro-batches come from no loader, so that those of a lost replica cannot be dealt again."""
    if trainer.state.dataloader is None:
        raise ValueError(
            "data must be a ResumableLoader with reduction='elastic', got None, as in a session or in update([...]); pass a "
            "ResumableLoader to run, since samples of a lost replica are dealt again"
        )
