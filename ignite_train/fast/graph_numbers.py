"""Whether a compiled update computes what the same code computes without compiling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["GraphNumbers", "tolerance_of"]

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3}
_TOLERANCE_OF_HALF = 5e-2
_SMALLEST_NORM, _SMALLEST_LOSS = 1e-3, 1e-2  # of one sample; what is smaller may be a difference of large numbers


def tolerance_of(dtypes: Sequence[torch.dtype]) -> float:
    """How far compiled code that computes in these dtypes may be off, relative to the value."""
    return max(_TOLERANCES.get(dtype, _TOLERANCE_OF_HALF) for dtype in dtypes)


class GraphNumbers(NamedTuple):
    """The norm, the loss and the sample size of the micro-batches of a group that were run so far.

    Attributes:
        norm: L2 norm of the sum of gradients, with a loss scale of 1.
        loss: sum over samples.
        sample_size: sum.
    """

    norm: float
    loss: float
    sample_size: float

    def difference(self, expected: GraphNumbers, dtypes: Sequence[torch.dtype]) -> str | None:
        """The first number that differs by more than rounding, in words; None if none does.

        Compiled code rounds otherwise, and networks enlarge that; so the norm and the loss may differ by 2e-3 of their values,
        by 1e-6 if all is float64, and by 5e-2 where a dtype of 16 bits takes part. What is not finite, or of no sample, is not
        compared.

        Args:
            expected: of the same code, not compiled.
            dtypes: in which it computes.
        """
        if not all(math.isfinite(number) for number in expected) or expected.sample_size <= 0:
            return None
        if self.sample_size != expected.sample_size:
            return f"a sample size of {self.sample_size:g} in place of {expected.sample_size:g}"
        tolerance, size = tolerance_of(dtypes), expected.sample_size
        for what, found, right, smallest in (
            ("gradient norm", self.norm, expected.norm, _SMALLEST_NORM * size),
            ("loss", self.loss, expected.loss, _SMALLEST_LOSS * size),
        ):
            if not abs(found - right) <= tolerance * max(abs(right), smallest):
                return f"a {what} of {found / size:.6g} per sample in place of {right / size:.6g}"
        return None
