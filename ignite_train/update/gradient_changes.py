"""Letting handlers change the mean gradient before its norm is taken."""

from __future__ import annotations

import logging

from ignite_train.events import TrainEvents
from ignite_train.trainer import Trainer
from ignite_train.update.decision import Decision, Rules, decide_again
from ignite_train.update.gather import Gather

__all__ = ["decide_on_gradient_changes"]

_GRADIENTS_REDUCED = TrainEvents.GRADIENTS_REDUCED  # looked up once: asked for in each update


def decide_on_gradient_changes(trainer: Trainer, gather: Gather, rules: Rules, decision: Decision) -> Decision:
    """Fires GRADIENTS_REDUCED, and decides again about what handlers have made of the gradients.

    Called where some rank has a handler, on all of them. Collective, where the norm is.

    The gradients are multiplied to be those of the mean loss first, which is one pass over memory, and their norm is taken a
    second time, for which sharded models reduce one number over the ranks. Gradients that are not finite are shown too, so that
    handlers can repair them: what they leave decides, also where the loss is not finite. Not so with loss scaling, where an
    overflow is one before handlers, as with torch's GradScaler, or else the scale would never fall.

    Args:
        trainer: fires the event.
        gather: has the gradients, and the crossing.
        rules: of the trainer.
        decision: about the gradients before the event.

    Raises:
        NoGradientError: handlers have dropped all gradients.
    """
    if decision.skipped_reason not in (None, "nonfinite"):
        return decision
    if "pass over gradients" not in trainer.progress.warned:
        trainer.progress.warned.add("pass over gradients")
        logging.getLogger("ignite_train").info(
            "gradients are unscaled and normalised in a pass over memory of their own, and no step is queued, since "
            "GRADIENTS_REDUCED has a handler"
        )
    gradients = gather.gradients
    if decision.mean_factor != 1.0:
        gradients.multiply(decision.mean_factor)
    with gather.passes.guard.no_step("a handler of GRADIENTS_REDUCED"):
        trainer.fire_event(_GRADIENTS_REDUCED)
    gradients.refuse_dropped("GRADIENTS_REDUCED")
    return decide_again(decision, gather.crossing.norm(gradients), rules)
