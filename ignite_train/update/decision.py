"""What is decided about one update from its reduced numbers: step along which multiple of the gradients, or skip, and why.

All ranks hold the same numbers, so all decide alike. `decide` is what the host computes. `decide_on_device` does the same
arithmetic in tensors, for an accelerator that steps before the host has read anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_train.model.stepping import LARGEST_DIVISOR, SMALLEST_DIVISOR
from ignite_train.ranks.statistics import Reduced, Totals
from ignite_train.state import SkippedReason

__all__ = ["SMALLEST_NORM", "Decision", "clip_coefficient", "decide", "decide_again", "decide_on_device", "may_trust_norm"]

SMALLEST_NORM = 2.0**-40  # below it squares that float32 cannot hold may be more than a rounding of their sum
_EPSILON = 1e-6  # as in torch's clip_grad_norm_


class Decision(NamedTuple):
    """What to do with the accumulated gradients of one update.

    Attributes:
        loss: Σloss / Σsample_size; NaN without a sample.
        grad_norm: L2 norm of the mean gradient, before clipping; NaN without a sample.
        mean_factor: what the accumulated gradients are multiplied by to become the mean gradient; NaN without a sample.
        clip_coefficient: what the mean gradient is multiplied by to become the clipped one.
        skipped_reason: why not to step, or None.
        grad_norms: where each optimizer has a limit of its own, the norm of each by name.
        clip_coefficients: the same for the coefficients; `clip_coefficient` is the smallest of them.
    """

    loss: float
    grad_norm: float
    mean_factor: float
    clip_coefficient: float
    skipped_reason: SkippedReason | None
    grad_norms: Mapping[str, float] = {}
    clip_coefficients: Mapping[str, float] = {}


def decide(
    totals: Totals, *, divisor: int, loss_scale: float, scales_loss: bool, max_grad_norm: float | None, normalize: bool = True
) -> Decision:
    """Decides on the host.

    The mean gradient is g · divisor / (loss_scale · Σsample_size), and clipping multiplies it by
    min(1, max_grad_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        totals: the sums over all ranks, and the norm of the accumulated gradients.
        divisor: what the ranks' sum of gradients was divided by when it was reduced.
        loss_scale: what each loss was multiplied by before its backward.
        scales_loss: whether there is a loss scale that an overflow can lower, so that a non-finite gradient is an overflow.
        max_grad_norm: what to clip the norm to; None leaves the gradient alone.
        normalize: whether gradients are divided by Σsample_size.
    """
    size = totals.sample_size
    if size == 0:
        return Decision(math.nan, math.nan, math.nan, 1.0, "no_samples")
    mean_factor = divisor / (loss_scale * (size if normalize else 1.0))
    loss, norm = totals.loss / size, totals.norm * mean_factor
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return Decision(loss, norm, mean_factor, 1.0, "overflow" if scales_loss else "nonfinite")
    return Decision(loss, norm, mean_factor, clip_coefficient(norm, max_grad_norm), None)


def decide_again(before: Decision, norm: float, *, scales_loss: bool, max_grad_norm: float | None) -> Decision:
    """Decides about a mean gradient that handlers may have changed: it is stepped along if it is finite now.

    Args:
        before: what was decided about the gradients as they were.
        norm: of the gradients, which are those of the mean loss by now.
        scales_loss: as for `decide`.
        max_grad_norm: as for `decide`.
    """
    if not math.isfinite(norm):
        return before._replace(grad_norm=norm, mean_factor=1.0, skipped_reason="overflow" if scales_loss else "nonfinite")
    coefficient = clip_coefficient(norm, max_grad_norm)
    return before._replace(grad_norm=norm, mean_factor=1.0, clip_coefficient=coefficient, skipped_reason=None)


def clip_coefficient(norm: float, max_grad_norm: float | None) -> float:
    """What clips a gradient of this norm, as `torch.nn.utils.clip_grad_norm_` does."""
    return 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + _EPSILON))


def decide_on_device(
    reduced: Reduced, *, divisor: int, loss_scale: float, max_grad_norm: float | None, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    """Whether to step without asking the host (1 or 0), and what to divide the gradients by, both in float32, not read.

    These are the operations of `decide`, one by one, in float64 and in its order, each rounded once as the host's are. No
    quotient has a number of the host for its divisor, for which CUDA multiplies by the reciprocal. What the host has to look
    at before the step, such as a norm that float32 may not have added up, gives 0.
    """
    size, one = reduced.sample_size, torch.ones_like(reduced.sample_size)
    mean_factor = torch.full_like(one, divisor) / ((size if normalize else one) * loss_scale)
    loss, norm = reduced.loss / size, reduced.norm * mean_factor
    factor = mean_factor
    if max_grad_norm is not None:
        factor = mean_factor * torch.minimum(one, torch.full_like(one, max_grad_norm) / (norm + _EPSILON))
    quotient = one / factor
    may_step = (
        (size > 0)
        & torch.isfinite(loss)
        & (reduced.norm >= SMALLEST_NORM)
        & (norm < math.inf)
        & (reduced.obstacles == 0)
        & (quotient >= SMALLEST_DIVISOR)
        & (quotient <= LARGEST_DIVISOR)
    )
    return may_step.float(), quotient.float()


def may_trust_norm(totals: Totals) -> bool:
    """Whether float32 can have added up the squares of the gradients: none too large, and not all too small."""
    return SMALLEST_NORM <= totals.norm < math.inf or totals.sample_size == 0
