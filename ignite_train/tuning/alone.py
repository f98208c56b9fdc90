"""Measuring on several ranks without a collective in what is measured, so that a rank that fails leaves none waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ignite.distributed as idist
from ignite.distributed.comp_models.base import _SerialModel

from ignite_train.ranks import collectives

__all__ = ["TrialError", "alone", "slowest"]

_WORDS = 300  # of an error, in a table


class TrialError(RuntimeError):
    """Settings could not be measured on some rank; the message is the reason, and the same on all ranks."""


@contextmanager
def alone() -> Iterator[None]:
    """In this `with` the process is the only one for `ignite.distributed`, and so for this library."""
    module = idist.utils
    before = module._model, module._need_to_sync
    module._model, module._need_to_sync = _SerialModel(), False
    try:
        yield
    finally:
        module._model, module._need_to_sync = before


def slowest(measure: Callable[[], float]) -> float:
    """Calls `measure` on each rank alone, and returns the largest of what it returned. Collective: one small all-reduce.

    Raises:
        TrialError: it raised on some rank. Two more small collectives carry the reason.
    """
    seconds, reason, cause = 0.0, "", None
    try:
        with alone():
            seconds = measure()
    except Exception as error:  # whatever the user's code raises is the reason that is reported
        reason, cause = _reason(error), error
    seconds, failed = collectives.largest(seconds, bool(reason))
    if not failed:
        return seconds
    reasons = collectives.gather_objects(reason)
    rank = next(number for number, one in enumerate(reasons) if one)
    raise TrialError(reasons[rank] + (f" (rank {rank})" if len(reasons) > 1 else "")) from cause


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:_WORDS] if words else type(error).__name__
