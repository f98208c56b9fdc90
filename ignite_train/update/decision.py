"""What is decided about one update from its reduced numbers: step along which multiple of the gradients, or skip, and why.

All ranks hold the same numbers, so all decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ignite_train.ranks.statistics import Totals
from ignite_train.state import SkippedReason

__all__ = ["EPSILON", "Decision", "Rules", "clip_coefficient", "decide", "decide_again"]

EPSILON = 1e-6  # as in torch's clip_grad_norm_


class Rules(NamedTuple):
    """The rules of a trainer, which are the same for all its updates.

    Attributes:
        averaged_over: what the ranks' sum of gradients was divided by when it was reduced.
        scales_loss: whether there is a loss scale that an overflow can lower, so that a non-finite gradient is an overflow.
        max_grad_norm: what to clip the norm to; None leaves the gradient alone.
        normalize: whether gradients are divided by Σsample_size.
    """

    averaged_over: int = 1
    scales_loss: bool = False
    max_grad_norm: float | None = None
    normalize: bool = True


class Decision(NamedTuple):
    """The decision about the accumulated gradients of one update.

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


def decide(totals: Totals, rules: Rules, loss_scale: float) -> Decision:
    """Decides.

    The mean gradient is g · averaged_over / (loss_scale · Σsample_size), and clipping multiplies it by
    min(1, max_grad_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        totals: the sums over all ranks, and the norm of the accumulated gradients.
        rules: of the trainer.
        loss_scale: what each loss was multiplied by before its backward.
    """
    size = totals.sample_size
    if size == 0:
        return Decision(math.nan, math.nan, math.nan, 1.0, "no_samples")
    mean_factor = rules.averaged_over / (loss_scale * (size if rules.normalize else 1.0))
    loss, norm = totals.loss / size, totals.norm * mean_factor
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return Decision(loss, norm, mean_factor, 1.0, "overflow" if rules.scales_loss else "nonfinite")
    return Decision(loss, norm, mean_factor, clip_coefficient(norm, rules.max_grad_norm), None)


def decide_again(before: Decision, norm: float, rules: Rules) -> Decision:
    """Decides about a mean gradient that handlers may have changed: it is stepped along if it is finite now.

    Args:
        before: the decision about the gradients before the change.
        norm: of the gradients, which are those of the mean loss by now.
        rules: of the trainer.
    """
    if not math.isfinite(norm):
        return before._replace(grad_norm=norm, mean_factor=1.0, skipped_reason="overflow" if rules.scales_loss else "nonfinite")
    coefficient = clip_coefficient(norm, rules.max_grad_norm)
    return before._replace(grad_norm=norm, mean_factor=1.0, clip_coefficient=coefficient, skipped_reason=None)


def clip_coefficient(norm: float, max_grad_norm: float | None) -> float:
    """The factor that clips a gradient of this norm, as `torch.nn.utils.clip_grad_norm_` does."""
    return 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + EPSILON))
