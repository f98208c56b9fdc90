"""Losses with denominators of their own: how many samples of each term an update has, over its micro-batches and the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ignite_train.arguments import describe
from ignite_train.errors import ForwardContractError
from ignite_train.forward import TERM
from ignite_train.ranks import collectives
from ignite_train.ranks.statistics import Totals

__all__ = ["LossTerms", "SampleSizes"]

SampleSizes = Callable[[Any], Mapping[str, float]]
"""`sample_sizes(micro_batch)` counts the samples of each term of a loss, by the names that forward gives them."""


class LossTerms:
    """Knows the denominators of an update before its first backward, which divides each term by them.

    Args:
        sample_sizes: the user's function; without one a loss with several terms needs an update of one micro-batch on one rank.
        counts: whether this rank's samples count; see `Statistics`.
    """

    def __init__(self, sample_sizes: SampleSizes, *, counts: bool = True) -> None:
        self._count, self._counts = sample_sizes, counts
        self._names: tuple[str, ...] | None = None  # agreed over the ranks
        self._totals: dict[str, float] = {}  # of the running update

    def begin(self, group: Sequence[Any]) -> Mapping[str, float]:
        """Counts the micro-batches of a group before any of them is computed. Collective.

        Returns:
            The denominators over the whole update, by name.

        Raises:
            ForwardContractError: the function has returned something else than numbers by name, or other names than before.
        """
        counted: dict[str, float] = {}
        for micro_batch in group:
            for name, number in _checked(self._count(micro_batch)).items():
                counted[name] = counted.get(name, 0.0) + number
        if not self._names:  # the groups before were empty on all ranks
            everyones = collectives.gather_objects(sorted(counted))
            self._names = tuple(sorted({name for names in everyones for name in names}))
        unknown = [name for name in counted if name not in self._names]
        own = [counted.get(name, 0.0) if self._counts else 0.0 for name in self._names]
        *numbers, num_unknown = collectives.total([*own, float(len(unknown))])
        if num_unknown:
            got = f", got {unknown[0]!r} too" if unknown else ", and some rank has got another"
            raise ForwardContractError(f"sample_sizes must return the same names in each update, {_listed(self._names)}{got}")
        self._totals = dict(zip(self._names, numbers, strict=True))
        return self._totals

    def check(self, totals: Totals) -> None:
        """Compares the counts with the results of forward, over all ranks.

        Raises:
            ForwardContractError: they differ. Raised on all ranks alike.
        """
        for name, counted in self._totals.items():
            returned = totals.log_weights.get(TERM + name, 0.0)
            if not math.isclose(counted, returned, rel_tol=1e-6):  # float32 numbers of a device may have been added up
                raise ForwardContractError(
                    f"sample_sizes has counted {counted:g} samples of {name!r} in this update, and forward has returned "
                    f"{returned:g}; both must count the same"
                )


def _checked(counted: Any) -> dict[str, float]:
    if not isinstance(counted, Mapping) or not counted:
        raise ForwardContractError(f"sample_sizes must return numbers by name, such as {{'mlm': 12}}, got {describe(counted)}")
    numbers = {str(name): float(number) for name, number in counted.items()}
    for name, number in numbers.items():
        if not 0 <= number < math.inf:
            raise ForwardContractError(f"sample_sizes must return finite numbers of at least 0, got {number} for {name!r}")
    return numbers


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
