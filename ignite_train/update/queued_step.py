"""The verdict on the device: a step that is queued before the host knows whether it may be made."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from ignite_train.events import TrainEvents
from ignite_train.model.gradients import SMALLEST_NORM, Gradients
from ignite_train.model.learning_rates import LearningRates
from ignite_train.model.stepping import LARGEST_DIVISOR, SMALLEST_DIVISOR, Stepping
from ignite_train.ranks.statistics import Reduced, Statistics, Totals
from ignite_train.trainer import Trainer

__all__ = ["QueuedStep"]


class QueuedStep:
    """On an accelerator, has the device decide about the step, so that it need not wait for the host to do so.

    The sums and the norm lie on the device. Whether the update is plain (samples, finite, nothing for the host to settle) and
    what to divide the gradients by is computed there; those numbers set out for the host, an event behind them; then the
    optimizer's fused step is queued, with `grad_scale` and `found_inf`; and only then the host waits, for the event. An update
    that is not plain is withheld by the kernel, which leaves no trace, and the host decides about it as it does elsewhere.

    The order of reading and stepping is the other one (the host reads, then steps) wherever the difference could show:

    - somebody looks in between: GRADIENTS_READY has a handler, also one whose filter is not due;
    - the factor cannot be folded into the step, or a step that is withheld would leave a trace; see `Stepping`;
    - gradients and sums are not all on one device, or it has no float64.

    Args:
        gradients: those that are stepped along.
        statistics: has the sums.
        stepping: makes the step.
        learning_rates: those that lie on the device travel with the numbers.
        divisor: what the reduced gradient is the sum over ranks divided by.
        max_grad_norm: what the norm is clipped to.
    """

    def __init__(
        self,
        gradients: Gradients,
        statistics: Statistics,
        stepping: Stepping,
        learning_rates: LearningRates,
        divisor: int,
        max_grad_norm: float | None,
    ) -> None:
        self._gradients, self._statistics, self._stepping = gradients, statistics, stepping
        self._learning_rates, self._divisor, self._max_grad_norm = learning_rates, divisor, max_grad_norm
        self._logged = False

    def __call__(self, trainer: Trainer, norm: float | Tensor | None, scale: float) -> tuple[Totals, bool]:
        """Reads the update's numbers, and says whether the device has made the step that belongs to them.

        Args:
            trainer: whose handlers may stand between reduction and step.
            norm: as for `Statistics.finish`.
            scale: the loss scale.
        """
        statistics = self._statistics
        if statistics.on_host:
            return statistics.finish(norm), False
        reduced, obstacle = statistics.reduced(norm), self._obstacle(trainer)
        if not self._logged:
            self._log(obstacle)
        rates = self._learning_rates.unknown()
        if reduced is None or obstacle is not None:
            statistics.send(norm, rates)
            totals = statistics.finish(norm)
            self._learning_rates.learn(totals.more)
            return totals, False
        plain, divisor = _plain_and_divisor(reduced, self._divisor, scale, self._max_grad_norm)
        for rate in rates:
            plain = plain * torch.isfinite(rate).reshape(()).to(plain.device)
        statistics.send(norm, [plain, *rates])
        self._stepping.step_if(1.0 - plain, divisor)
        totals = statistics.finish(norm)
        self._learning_rates.learn(totals.more[1:])
        return totals, totals.more[0] == 1.0

    def _obstacle(self, trainer: Trainer) -> str | None:
        """Why the host must know the numbers before the step; asked in each update, as handlers and hooks come and go."""
        if trainer.has_handlers(TrainEvents.GRADIENTS_READY):
            return "GRADIENTS_READY has a handler"
        if {device for device, _ in self._gradients.kinds} != {self._statistics.device}:
            return "gradients are not on the device of the loss"
        if not self._learning_rates.may_be_finite():
            return "a learning rate is not finite"
        return self._stepping.why_not_fused() or self._stepping.why_not_queued()

    def _log(self, obstacle: str | None) -> None:
        now = "it is" if obstacle is None else f"at first not, since {obstacle}"
        logging.getLogger("ignite_train").info(
            "a step is queued before the host has read the update's numbers, if it is folded into a fused kernel that has its "
            f"moments, and no handler of GRADIENTS_READY stands in between: {now}"
        )
        self._logged = True


def _plain_and_divisor(reduced: Reduced, divisor: int, scale: float, max_grad_norm: float | None) -> tuple[Tensor, Tensor]:
    """Whether to step (1 or 0), and what to divide the gradients by, both in float32.

    These are the operations of `Update` and `Stepping`, one by one, in float64 and in their order, each rounded once as the
    host's are: so no quotient has a number of the host for its divisor, for which CUDA multiplies by the reciprocal.
    """
    one = torch.ones_like(reduced.sample_size)
    mean = torch.full_like(one, divisor) / (reduced.sample_size * scale)
    loss, norm = reduced.loss / reduced.sample_size, reduced.norm * mean  # a norm of another size is taken again by the host
    factor = mean
    if max_grad_norm is not None:
        factor = mean * torch.minimum(one, torch.full_like(one, max_grad_norm) / (norm + 1e-6))
    quotient = one / factor
    is_plain = (
        (reduced.sample_size > 0)
        & torch.isfinite(loss)
        & (reduced.norm >= SMALLEST_NORM)
        & (norm < math.inf)
        & (reduced.obstacles == 0)
        & (quotient >= SMALLEST_DIVISOR)
        & (quotient <= LARGEST_DIVISOR)
    )
    return is_plain.float(), quotient.float()
