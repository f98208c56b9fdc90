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
        metric: the name of the score. The best by another one, which an earlier script has named, stay too.
    """

    last: int
    best: int
    lower_is_better: bool
    every: int | None
    metric: str | None = None

    def is_better(self, score: float, best: float | None) -> bool:
        """Whether `score` is better than the best so far; one that is not finite never is, and no checkpoint has it."""
        return math.isfinite(score) and (best is None or self._rank(score) < self._rank(best))

    def is_own(self, manifest: Manifest) -> bool:
        """Whether the score of a checkpoint is of this metric, or does not say of which."""
        return self._kind_of_score(manifest)[0] == self.metric

    def best_of(self, manifests: Sequence[Manifest]) -> float | None:
        """The best score of this metric; None if none of them has one."""
        scores = (manifest.score for manifest in manifests if manifest.score is not None and self.is_own(manifest))
        return min(scores, key=self._rank, default=None)

    def surplus(self, manifests: Sequence[Manifest]) -> list[int]:
        """The indices of those that may be removed."""
        by_age = sorted(range(len(manifests)), key=lambda index: manifests[index].serial)
        by_update = {manifests[index].update: index for index in by_age}  # in the order of their first saves, the last of each
        newest = sorted(by_update.values(), key=lambda index: -manifests[index].serial)
        stays = {*newest[: self.last], *self._best([*by_update.values()], manifests)}
        if self.every is not None:
            stays |= {index for index in newest if manifests[index].update % self.every == 0}
        return [index for index in by_age if index not in stays]

    def _best(self, candidates: Sequence[int], manifests: Sequence[Manifest]) -> list[int]:
        """The indices of the best by each metric; of equal ones the first."""
        by_kind: dict[tuple[str | None, bool], list[tuple[float, int]]] = {}
        for index in candidates:
            score, kind = manifests[index].score, self._kind_of_score(manifests[index])
            if score is not None:
                by_kind.setdefault(kind, []).append((score if kind[1] else -score, index))
        ranked = (sorted(scored, key=lambda entry: entry[0]) for scored in by_kind.values())
        return [index for scored in ranked for _, index in scored[: self.best]]

    def _kind_of_score(self, manifest: Manifest) -> tuple[str | None, bool]:
        """The metric of a score, and whether a lower one is better: of another metric as its run has said."""
        found = manifest.scored_by
        if found is None or found[0] == self.metric:
            return self.metric, self.lower_is_better
        return found[0], found[1] == "min"

    def _rank(self, score: float | None) -> float:
        assert score is not None  # noqa: S101  # the callers pass those with a score only
        return score if self.lower_is_better else -score
