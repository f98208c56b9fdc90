"""Letting handlers change the mean gradient before its norm is taken."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from ignite_train.events import TrainEvents
from ignite_train.model.gradients import Gradients
from ignite_train.ranks.crossing import Crossing
from ignite_train.trainer import Trainer
from ignite_train.update.decision import Decision, Rules, decide_again
from ignite_train.update.handler_guard import HandlerGuard

__all__ = ["GradientChanges"]

_GRADIENTS_REDUCED = TrainEvents.GRADIENTS_REDUCED  # looked up once: asked for in each update


@dataclass(kw_only=True)
class GradientChanges:
    """Fires GRADIENTS_REDUCED if some rank has a handler, and decides again about what handlers have made of the gradients.

    The gradients are multiplied to be those of the mean loss first, which is one pass over memory, and their norm is taken a
    second time, for which sharded models reduce one number over the ranks. Gradients that are not finite are shown too, so that
    handlers can repair them: what they leave decides, also where the loss is not finite. Not so with loss scaling, where an
    overflow is one before handlers, as with torch's GradScaler, or else the scale would never fall.
    """

    gradients: Gradients
    crossing: Crossing
    guard: HandlerGuard
    rules: Rules
    _has_logged: bool = False

    def __call__(self, trainer: Trainer, decision: Decision) -> Decision:
        """Gives the decision about the gradients as they are after the event. Collective, where the norm is.

        Called where some rank has a handler, on all of them.

        Args:
            trainer: fires the event.
            decision: about the gradients before the event.

        Raises:
            NoGradientError: handlers have dropped all gradients.
        """
        if decision.skipped_reason not in (None, "nonfinite"):
            return decision
        if not self._has_logged:
            self._has_logged = True
            logging.getLogger("ignite_train").info(
                "gradients are unscaled and normalised in a pass over memory of their own, and no step is queued, since "
                "GRADIENTS_REDUCED has a handler"
            )
        if decision.mean_factor != 1.0:
            self.gradients.multiply(decision.mean_factor)
        with self.guard.no_step("a handler of GRADIENTS_REDUCED"):
            trainer.fire_event(_GRADIENTS_REDUCED)
        self.gradients.refuse_dropped("GRADIENTS_REDUCED")
        norm = self.crossing.norm(self.gradients)
        return decide_again(decision, norm, self.rules)
