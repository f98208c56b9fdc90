"""A limit of its own for the norm of each optimizer's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ignite_train.model.gradients import Gradients
from ignite_train.ranks.crossing import Crossing
from ignite_train.update.decision import Decision, clip_coefficient

__all__ = ["NormLimits"]


@dataclass(kw_only=True)
class NormLimits:
    """Clips the gradients of each optimizer by their own norm.

    That is a second pass over the gradients, which only reads; on sharded models it is one small all-reduce for each optimizer.
    No step is queued on an accelerator.

    Attributes:
        limits: by the name of an optimizer; the gradients of one that is not in it are left alone.
        parts: the gradients of each, by its name.
        crossing: how gradients cross the ranks.
    """

    limits: Mapping[str, float]
    parts: Mapping[str, Gradients]
    crossing: Crossing

    def __call__(self, decision: Decision) -> Decision:
        """Adds the norms and the coefficients to a decision, unless the update is skipped. Collective, where the norm is."""
        if decision.skipped_reason is not None:
            return decision
        norms = {name: self.crossing.norm(part) * decision.mean_factor for name, part in self.parts.items()}
        coefficients = {name: clip_coefficient(norm, self.limits.get(name)) for name, norm in norms.items()}
        return decision._replace(grad_norms=norms, clip_coefficients=coefficients, clip_coefficient=min(coefficients.values()))
