"""Whether all ranks have used the same parameters in an update, as FSDP2 takes for granted."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from torch import Tensor

from ignite_train.errors import UnlikeParametersError
from ignite_train.model.gradients import Gradients
from ignite_train.ranks import collectives
from ignite_train.ranks.messages import Piggyback

__all__ = ["SameParameters"]


class SameParameters(Piggyback):
    """Compares over the ranks which parameters have a gradient, before the step.

    FSDP2 reduces those gradients of a group of parameters that there are on each rank, end to end. Where a rank has used other
    parameters than the rest, of the same shapes, it adds up gradients of different parameters without an error.

    What travels are the two halves of a checksum and their squares: over W ranks, (Σw)² = W·Σw² holds if and only if all w are
    equal.
    """

    payload_size = 4

    def __init__(self) -> None:
        self._present: list[bool] = []
        self._words = [0.0] * self.payload_size
        self._gradients: Gradients | None = None

    def look(self, gradients: Gradients) -> None:
        """Looks which parameters have one, after the last backward."""
        self._gradients = gradients
        present = [parameter.grad is not None for parameter in gradients.parameters()]
        if present != self._present:
            checksum = zlib.crc32(bytes(present))
            words = checksum >> 16, checksum & 0xFFFF
            self._present, self._words = present, [float(word) for word in (*words, *(word * word for word in words))]

    def payload(self) -> Sequence[float]:
        """The halves of the checksum of this rank, and their squares."""
        return self._words

    def vetoes(self, sums: Tensor) -> Tensor:
        """See `Piggyback`: whether the ranks differ."""
        return (sums[:2].square() != collectives.world_size() * sums[2:]).any()

    def on_reduced(self, sums: list[float]) -> None:
        """Compares.

        Raises:
            UnlikeParametersError: some ranks have gradients of other parameters than the rest.
        """
        words, squares = map(int, sums[:2]), map(int, sums[2:])
        num_ranks = collectives.world_size()
        if all(word * word == num_ranks * square for word, square in zip(words, squares, strict=True)):
            return
        of_ranks = collectives.gather_objects(self._present)
        parameters = [] if self._gradients is None else self._gradients.parameters()
        for parameter, on_rank in zip(parameters, zip(*of_ranks, strict=True), strict=True):
            if len({*on_rank}) > 1 and self._gradients is not None:
                have = tuple(rank for rank, has_one in enumerate(on_rank) if has_one)
                raise UnlikeParametersError(self._gradients.name(parameter), have)

    def settle(self) -> None:
        """Nothing is left to compare after an update."""
