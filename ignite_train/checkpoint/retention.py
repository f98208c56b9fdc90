"""Which checkpoints stay: the newest, the best, and those whose update is a multiple of a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ignite_train.checkpoint.manifest import Manifest

__all__ = ["Retention"]


@dataclass(frozen=True, slots=True)
class Retention:
    """A rule for what may be removed.

    Attributes:
        last: how many of the newest stay; at least 1.
        best: how many of those with the best scores stay.
        lower_is_better: whether a lower score is better.
        every: those whose update is a multiple of this stay too.
    """

    last: int
    best: int
    lower_is_better: bool
    every: int | None

    def is_better(self, score: float, best: float | None) -> bool:
        """Whether `score` is better than the best so far; NaN never is."""
        return not math.isnan(score) and (best is None or self._rank(score) < self._rank(best))

    def best_of(self, manifests: Sequence[Manifest]) -> float | None:
        """The best score; None if none of them has a score."""
        return min((manifest.score for manifest in manifests if manifest.score is not None), key=self._rank, default=None)

    def surplus(self, manifests: Sequence[Manifest]) -> list[int]:
        """The indices of those that may be removed."""
        by_age = sorted(range(len(manifests)), key=lambda index: manifests[index].serial)
        by_update = {manifests[index].update: index for index in by_age}  # of an update that was saved again, the last
        newest = sorted(by_update.values(), key=lambda index: -manifests[index].serial)
        scored = [index for index in newest if manifests[index].score is not None]
        best = sorted(scored, key=lambda index: self._rank(manifests[index].score))
        stays = {*newest[: self.last], *best[: self.best]}
        if self.every is not None:
            stays |= {index for index in newest if manifests[index].update % self.every == 0}
        return [index for index in by_age if index not in stays]

    def _rank(self, score: float | None) -> float:
        assert score is not None  # noqa: S101  # the callers pass those with a score only
        return score if self.lower_is_better else -score
