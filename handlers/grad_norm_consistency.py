"""Checking that all ranks have the same gradient norm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from ignite.engine import Events, RemovableEventHandle
from torch import Tensor

from ignite_train.arguments import named_ranks, real_number
from ignite_train.errors import TrainingError
from ignite_train.events import Event, TrainEvents
from ignite_train.kinds_of_handlers import PiggybackHandler
from ignite_train.model.sparse_parameters import sparse_gradient_values
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["GradNormConsistency", "GradNormMismatchError"]

_NO_CHECK = -1.0  # no norm is negative
_NAMED = 5  # parameters in the message


class GradNormMismatchError(TrainingError, RuntimeError):
    """The ranks reduced one update to gradients of different norms. Raised on every rank in the update after it.

    Attributes:
        update: number of the update (`state.iteration`) whose norms differ.
        norms: its gradient norm on each rank.
        parameters: names of the parameters whose gradients differ in the update in which this was raised, in the order of the
            model; empty if they agree there, if no later update came, or if the norm is finite on some ranks only.
        all_differ: whether no parameter has the same gradient on all ranks.
    """

    def __init__(self, update: int, norms: tuple[float, ...], parameters: tuple[str, ...], *, all_differ: bool = False) -> None:
        self.update, self.norms, self.parameters, self.all_differ = update, norms, parameters, all_differ
        table = "\n".join(f"  rank {rank}: {norm:.9g}" for rank, norm in enumerate(norms))
        super().__init__(
            f"update {update}: the gradient norm differs between the ranks:\n{table}\n{self._finding()}; "
            f"{self._likely_cause()}, and resume from a checkpoint before update {update}: since then the parameters may "
            "differ between the ranks"
        )

    def _finding(self) -> str:
        skipped = [rank for rank, norm in enumerate(self.norms) if not math.isfinite(norm)]
        if 0 < len(skipped) < len(self.norms):
            stepped = [rank for rank in range(len(self.norms)) if rank not in skipped]
            return f"{named_ranks(skipped)} found the update not finite and {named_ranks(stepped)} made the step"
        outliers = _outliers(self.norms)
        who = f"{named_ranks(outliers, 'differs', 'differ')} from the majority; " if outliers else ""
        if not self.parameters:
            return f"{who}no parameter can be named, because no later update has gradients that differ"
        more = f" and {len(self.parameters) - _NAMED} more" if len(self.parameters) > _NAMED else ""
        return f"{who}one update later the gradients of {', '.join(self.parameters[:_NAMED])}{more} differ"

    def _likely_cause(self) -> str:
        if self.all_differ:
            return (
                "no gradient is the same on all ranks, so they were most likely never reduced: does forward call the model "
                "it is given as its argument, outside of no_sync()? A module from its closure is not the one in "
                "DistributedDataParallel. If it does, look for a communication hook that does not reduce"
            )
        return (
            "look for a forward that does not call the model it is given as its argument, a backward beside the trainer's, a "
            "communication hook, or a change of .grad that is not the same on every rank"
        )


class GradNormConsistency(PiggybackHandler):
    """Compares the gradient norms of all ranks and raises `GradNormMismatchError` on each of them when they differ.

    After the reduction all ranks must have the same gradient. Different norms mean that the reduction is broken: a parameter is
    left out, a communication hook is not exact, or a rank changed its gradients. Norms agree if all are finite and differ from
    that of rank 0 by at most `tolerance`, relatively, or if none is finite, which `on_nonfinite` handles. Parameters, moments
    or learning rates that differ while gradients are averaged do not change the norm: `StateConsistency` finds those.

    A norm travels with the statistics of the next update, so that the result is known one update later and costs no collective
    of its own; the last norm of a run takes one. The message names the parameters whose gradients differ in the update in
    which the result is known, because the gradients of the compared update are gone. All ranks must attach it. fairseq's
    trainer has the same check (`_check_grad_norms`).

    Args:
        tolerance: the largest relative difference, greater than 0.

    Raises:
        TypeError, ValueError: `tolerance` is not a number greater than 0.

    Example:
        >>> handle = GradNormConsistency().attach(trainer, Events.ITERATION_COMPLETED(every=2))
        >>> trainer.run(data, max_epochs=1).num_steps
        4
    """

    not_elastic = "it compares the ranks of a process group, and replicas that come and go are in none"
    of_one_trainer = True

    def __init__(self, *, tolerance: float = 1e-6) -> None:
        self.tolerance = real_number("tolerance", tolerance, above=0)
        self._rank = 0
        self._due: tuple[int, float] | None = None  # update and norm, not yet sent
        self._sent: tuple[int, float] | None = None  # on its way

    def attach(self, trainer: Trainer, event: Event = Events.ITERATION_COMPLETED) -> RemovableEventHandle:
        """Compares the norm of each update in which `event` fires, which must be the same updates on all ranks."""
        self.payload_size, self._rank = collectives.world_size(), collectives.rank()
        return super().attach(trainer, event)

    def __call__(self, trainer: Trainer) -> None:
        """Notes the norm of the latest update, which travels with the next."""
        if trainer.state.update_output is not None:
            self._due = trainer.state.iteration, trainer.state.update_output.grad_norm

    def payload(self) -> Sequence[float]:
        """A number for each rank: this rank's norm in its own place, zeros in the others."""
        if self._due is not None:
            self._sent, self._due = self._due, None
        words = [0.0] * self.payload_size
        words[self._rank] = _NO_CHECK if self._sent is None else self._sent[1]
        return words

    def vetoes(self, sums: Tensor) -> Tensor:
        """See `Piggyback`: whether the norms differ."""
        finite, first = sums.isfinite(), sums[0]
        near = (sums - first).abs().max() / (first.abs() + 1e-6) < self.tolerance
        return ~(finite.all() & near | ~finite.any())

    def on_reduced(self, sums: list[float]) -> None:
        """Compares the norms; if they differ, raises in GRADIENTS_READY, where gradients can be looked at.

        Raises:
            GradNormMismatchError: the norm is finite on some ranks only, so that not all of them have made the step.
            ValueError: some ranks have a norm to compare and others have not.
        """
        if (mismatch := self._compare(sums)) is None:
            return
        if not all(map(math.isfinite, mismatch[1])):
            raise GradNormMismatchError(*mismatch, ())
        noticed_in = self.trainer.state.iteration

        def judge(trainer: Trainer) -> None:
            handle.remove()
            if trainer.state.iteration != noticed_in:  # another error ended that update
                return
            differing, common = self._differing(trainer.gradients())
            raise GradNormMismatchError(*mismatch, differing, all_differ=bool(differing) and not common)

        # Attached only now: on an accelerator an update is faster without handlers of GRADIENTS_READY.
        handle = self.trainer.prepend_event_handler(TrainEvents.GRADIENTS_READY, judge)

    def _compare(self, sums: list[float]) -> tuple[int, tuple[float, ...]] | None:
        sent, self._sent = self._sent, None
        if 0 < sums.count(_NO_CHECK) < len(sums):
            without = [rank for rank, norm in enumerate(sums) if norm == _NO_CHECK]
            raise ValueError(
                "event must fire in the same updates on all ranks, got one in which GradNormConsistency had no norm on "
                f"ranks {without}: attach it alike on all ranks, to an event whose counter is the same on all ranks"
            )
        return None if sent is None or _agree(sums, self.tolerance) else (sent[0], tuple(sums))

    def settle(self) -> None:
        """Compares a norm that has not travelled yet: after the last update, or before a save. Collective.

        Raises:
            GradNormMismatchError: the norms differ.
            ValueError: some ranks have a norm to compare and others have not.
        """
        if (mismatch := self._compare(collectives.total(self.payload()))) is not None:
            raise GradNormMismatchError(*mismatch, ())

    def _differing(self, gradients: dict[str, Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of gradients whose norms differ, or that are missing on some rank, and the other names. Collective."""
        ranks: list[dict[str, float]] = collectives.gather_objects({name: _norm(g) for name, g in gradients.items()})
        names = dict.fromkeys(name for norms in ranks for name in norms)
        missing = {name for name in names if any(name not in norms for norms in ranks)}
        differs = {name: name in missing or not _agree([norms[name] for norms in ranks], self.tolerance) for name in names}
        return tuple(name for name in names if differs[name]), tuple(name for name in names if not differs[name])


def _norm(gradient: Tensor) -> float:
    values = sparse_gradient_values(gradient)
    return float(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)))


def _outliers(norms: Sequence[float]) -> list[int]:
    """The ranks whose norm differs from that of the majority; an empty list without a majority."""
    middle = statistics.median(norms)
    agreeing = [rank for rank, norm in enumerate(norms) if math.isclose(norm, middle, rel_tol=1e-6)]
    return [rank for rank in range(len(norms)) if rank not in agreeing] if 2 * len(agreeing) > len(norms) else []


def _agree(norms: Sequence[float], tolerance: float) -> bool:
    """Whether all norms are finite and near the first, or none is finite."""
    if not all(map(math.isfinite, norms)):
        return not any(map(math.isfinite, norms))
    first = norms[0]
    return max(max(norms) - first, first - min(norms)) / (first + 1e-6) < tolerance
