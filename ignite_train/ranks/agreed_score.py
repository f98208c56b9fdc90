"""The score by which all ranks decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ignite_train.metrics import score_in
from ignite_train.ranks import collectives

__all__ = ["agreed_score"]


def agreed_score(metrics: Mapping[str, Any], score: str) -> float:
    """The score among the metrics of rank 0, on all ranks: a metric that is not reduced differs. Blocking, collective.

    Raises:
        ValueError: rank 0 has no metric of this name.
        TypeError: it is not one number there.
    """
    found: float | Exception = 0.0
    if collectives.is_main_rank():
        try:
            found = score_in(metrics, score)
        except (TypeError, ValueError) as error:
            found = error
    found = collectives.from_main_rank(found)
    if isinstance(found, Exception):
        raise found
    return found
