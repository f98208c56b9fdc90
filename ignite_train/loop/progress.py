"""How far a run is on the way to its limit."""

from __future__ import annotations

from typing import NamedTuple

from ignite_train.loop.loop import Loop

__all__ = ["RunProgress", "run_progress"]


class RunProgress(NamedTuple):
    """Where the running iteration, or the latest, stands in the whole run.

    Attributes:
        before: the fraction that was done before it; in [0, 1).
        after: the fraction that is done with it; in [0, 1].
    """

    before: float
    after: float


def run_progress(loop: Loop) -> RunProgress | None:
    """Tells how much of the run is done, counted in iterations, also of earlier processes.

    With `max_epochs` each epoch has the same share, whatever number of iterations it has.

    Args:
        loop: an engine whose run has begun.

    Returns:
        The fractions, or None where they cannot be known: without a limit, or if the length of an epoch is unknown.
    """
    state = loop.state
    if state.max_iters is not None:
        done, total = float(state.iteration), state.max_iters
        each = 1.0
    elif state.max_epochs is not None and state.epoch_length:
        in_epoch = loop._epoch_iteration + loop._iterating
        begun = in_epoch > 0 or loop._epoch_open  # a run that resumes between two epochs has none that is begun
        each = 1.0 / state.epoch_length
        done, total = max(0, state.epoch - begun) + in_epoch * each, state.max_epochs
    else:
        return None
    done = min(done, float(total))
    return RunProgress(max(0.0, (done - each) / total), done / total)
