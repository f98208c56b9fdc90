"""Which checkpoints stay: the newest, the best, and those whose update is a multiple of a number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ignite_train.checkpoint.manifest import Manifest

__all__ = ["Retention"]


@dataclass(frozen=True, slots=True)
class Retention:
    """A rule for what may be removed.

    Of an update that was saved again the latest copy stays. Two copies with different scores are two states, as after a rewind,
    and each of them may be among the best.

    Attributes:
        last: how many of the newest stay; at least 1.
        best: how many of those with the best scores stay.
        mode: `"min"` or `"max"`: whether a lower or a higher score is better.
        every: those whose update is a multiple of this stay too.
        metric: the name of the score. The best by another one, which an earlier script has named, stay too.
    """

    last: int
    best: int
    mode: str
    every: int | None
    metric: str | None = None

    def is_among_best(self, score: float, best: Sequence[tuple[int, float]]) -> bool:
        """Whether a state with `score` would stay beside `best`, which `best_of` gave. One that is not finite never does."""
        return math.isfinite(score) and (len(best) < self.best or self._rank(score) < self._rank(best[-1][1]))

    def best_of(self, scored: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
        """The best of these updates with their scores, as many as stay, the best first; of equal scores the first."""
        return sorted(dict.fromkeys(scored), key=lambda entry: self._rank(entry[1]))[: self.best]

    def is_own(self, manifest: Manifest) -> bool:
        """Whether the score of a checkpoint is of this metric, or does not say of which."""
        return self._kind_of_score(manifest)[0] == self.metric

    def scored(self, manifests: Iterable[Manifest]) -> list[tuple[int, float]]:
        """The updates that have a score of this metric, each with it."""
        return [(one.update, one.score) for one in manifests if one.score is not None and self.is_own(one)]

    def surplus(self, manifests: Sequence[Manifest]) -> list[int]:
        """The indices of those that may be removed."""
        by_age = sorted(range(len(manifests)), key=lambda index: manifests[index].serial)
        by_update = {manifests[index].update: index for index in by_age}  # in the order of their first saves, the last of each
        newest = sorted(by_update.values(), key=lambda index: -manifests[index].serial)
        stays = {*newest[: self.last], *self._best(by_age, manifests)}
        if self.every is not None:
            stays |= {index for index in newest if manifests[index].update % self.every == 0}
        return [index for index in by_age if index not in stays]

    def _best(self, by_age: Sequence[int], manifests: Sequence[Manifest]) -> list[int]:
        """The indices of the best by each metric; of equal ones the first, and of equal ones of an update its latest copy."""
        copies: dict[tuple[str | None, str], dict[tuple[int, float], int]] = {}
        for index in by_age:
            one = manifests[index]
            if one.score is not None:
                copies.setdefault(self._kind_of_score(one), {})[one.update, one.score] = index
        return [found[key] for (_, mode), found in copies.items() for key in replace(self, mode=mode).best_of(found)]

    def _kind_of_score(self, manifest: Manifest) -> tuple[str | None, str]:
        """The metric of a score, and its mode: of another metric as its run has said."""
        found = manifest.scored_by
        return (self.metric, self.mode) if found is None or found[0] == self.metric else found

    def _rank(self, score: float) -> float:
        return score if self.mode == "min" else -score
