"""Progress of a run: its open parts, and the share of the whole that is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ignite_train.state import TrainState

__all__ = ["Progress", "RunProgress"]


class RunProgress(NamedTuple):
    """Where the running iteration, or the latest, stands in the whole run.

    Attributes:
        before: the fraction that was done before it; in [0, 1).
        after: the fraction that is done with it; in [0, 1].
    """

    before: float
    after: float


@dataclass(slots=True)
class Progress:
    """Where the loop of an engine stands. Handlers read it; the loop writes it.

    Attributes:
        running: a run or a session is under way, from its beginning to its end.
        session_open: a session is open, from after its STARTED to before its closing events.
        iterating: an iteration is under way.
        updating: an iteration that was asked for by `update` is under way, up to the last handler of its last event.
        settled: the running iteration has had its effect, and must not be repeated.
        epoch_open: EPOCH_STARTED has been reached, and EPOCH_COMPLETED has not.
        epoch_started: the handlers of the open epoch's EPOCH_STARTED have run in this process.
        epoch_iteration: iterations of the open epoch that are done.
        epoch_ends: a request to end the epoch has taken effect: it has no other batch.
        ranks_have_more: some rank has another batch in this epoch, as far as the ranks have agreed.
        stops: a request to stop the run has taken effect: it has no other batch.
        reading: a pass over the data is open.
        data_ended: the pass of the epoch before has ended in this run, or before its interrupt, by itself.
        interrupted: the latest run was ended by `interrupt`, and the next one continues it.
        ended: the latest run has come to its closing events.
        micro_batches_before: `state.num_micro_batches` before the running update.
        warned: what was warned about and is not said again.
    """

    running: bool = False
    session_open: bool = False
    iterating: bool = False
    updating: bool = False
    settled: bool = True
    epoch_open: bool = False
    epoch_started: bool = False
    epoch_iteration: int = 0
    epoch_ends: bool = False
    ranks_have_more: bool = True
    stops: bool = False
    reading: bool = False
    data_ended: bool = False
    interrupted: bool = False
    ended: bool = False
    micro_batches_before: int = 0
    warned: set[str] = field(default_factory=set)

    @property
    def iterations_in_epoch(self) -> int:
        """Iterations of the open epoch that have had their effect, with the running one if it has."""
        return self.epoch_iteration + (self.iterating and self.settled)

    def refuse_nested_run(self) -> None:
        """Raises where no run and no session can begin.

        Raises:
            RuntimeError: one is under way, or an update.
        """
        if self.session_open or self.updating:
            raise RuntimeError("run or session was called inside a session or an update of the same trainer; leave it first")
        if self.running:
            raise RuntimeError("run was called inside a handler of the same run; call terminate() there, or use another engine")

    def of_run(self, state: TrainState) -> RunProgress | None:
        """Tells how much of the run is done, counted in iterations, also of earlier processes.

        With `max_epochs` each epoch has the same share, whatever number of iterations it has.

        Args:
            state: the counters and limits of a run that has begun.

        Returns:
            The fractions, or None where they cannot be known: without a limit, or if the length of an epoch is unknown.
        """
        if state.max_iters is not None:
            done, total = float(state.iteration), state.max_iters
            each = 1.0
        elif state.max_epochs is not None and state.epoch_length:
            in_epoch = self.epoch_iteration + self.iterating
            begun = in_epoch > 0 or self.epoch_open  # a run that resumes between two epochs has none that is begun
            each = 1.0 / state.epoch_length
            done, total = max(0, state.epoch - begun) + in_epoch * each, state.max_epochs
        else:
            return None
        done = min(done, float(total))
        return RunProgress(max(0.0, (done - each) / total), done / total)
