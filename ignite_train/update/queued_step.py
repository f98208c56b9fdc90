"""A step that is queued on the device before the host knows whether it may be made."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ignite_train.events import TrainEvents
from ignite_train.model.gradients import Gradients
from ignite_train.model.learning_rates import LearningRates
from ignite_train.model.stepping import Stepping, SteppingTogether
from ignite_train.ranks.statistics import Statistics, Totals
from ignite_train.trainer import Trainer
from ignite_train.update.decision import decide_on_device

__all__ = ["QueuedStep"]


class QueuedStep:
    """On an accelerator, has the device decide about the step, so that it need not wait for the host to do so.

    The sums and the norm lie on the device. Whether the update is plain (samples, finite, nothing only the host can decide)
    and what to divide the gradients by is computed there; those numbers set out for the host, an event behind them; then the
    optimizer's fused step is queued, with `grad_scale` and `found_inf`; and only then the host waits, for the event. If the
    update is not plain, the kernel skips the step, which leaves no trace, and the host decides about it as it does elsewhere.

    The order of reading and stepping is the other one (the host reads, then steps) wherever the difference could show:

    - GRADIENTS_REDUCED or GRADIENTS_READY has a handler, also one whose filter is not due;
    - the factor cannot be folded into the step, or a step that is skipped would leave a trace; see `Stepping`;
    - gradients and sums are not all on one device, or it has no float64.

    Args:
        gradients: those that are stepped along.
        statistics: has the sums.
        stepping: makes the step.
        learning_rates: those that lie on the device travel with the numbers.
        divisor: what the reduced gradient is the sum over ranks divided by.
        max_grad_norm: what the norm is clipped to.
        normalize: whether gradients are divided by Σsample_size.
    """

    def __init__(
        self,
        gradients: Gradients,
        statistics: Statistics,
        stepping: Stepping | SteppingTogether,
        learning_rates: LearningRates,
        divisor: int,
        max_grad_norm: float | None,
        *,
        normalize: bool = True,
    ) -> None:
        self._gradients, self._statistics, self._stepping = gradients, statistics, stepping
        self._learning_rates, self._divisor, self._max_grad_norm = learning_rates, divisor, max_grad_norm
        self._normalize = normalize
        self._logged = False
        self._unread: Tensor | None = None  # whether the step was made that was queued last, until its numbers are read

    def __call__(self, trainer: Trainer, norm: float | Tensor | None, scale: float) -> Totals:
        """Reads the update's numbers; the device may have made the step that belongs to them.

        Args:
            trainer: whose handlers may stand between reduction and step.
            norm: as for `Statistics.finish`.
            scale: the loss scale.
        """
        statistics = self._statistics
        if statistics.on_host:
            return statistics.finish(norm)
        reduced, obstacle = statistics.reduced(norm), self._why_not_queued(trainer)
        if not self._logged:
            self._say_whether(obstacle)
        rates = self._learning_rates.unknown()
        if reduced is None or obstacle is not None:
            statistics.send(norm, rates)
            totals = statistics.finish(norm)
            self._learning_rates.learn(totals.more)
            return totals
        may_step, divisor = decide_on_device(
            reduced,
            divisor=self._divisor,
            loss_scale=scale,
            max_grad_norm=self._max_grad_norm,
            normalize=self._normalize,
        )
        for rate in rates:
            may_step = may_step * torch.isfinite(rate).reshape(()).to(may_step.device)
        statistics.send(norm, [may_step, *rates])
        trainer.begin_section("optimizer")
        # Told before the kernels are queued, so that after an interrupt the device is asked whether they have stepped.
        self._stepping.watch.leave_to_device(lambda: bool(may_step.item() == 1.0))  # sync
        self._stepping.step_if(may_step, divisor)
        trainer.begin_section("reduction")
        totals = statistics.finish(norm)
        self._stepping.watch.decided(moved=totals.more[0] == 1.0)
        self._learning_rates.learn(totals.more[1:])
        return totals

    def _why_not_queued(self, trainer: Trainer) -> str | None:
        """Why the host must know the numbers before the step; asked in each update, as handlers and hooks come and go."""
        for event in (TrainEvents.GRADIENTS_REDUCED, TrainEvents.GRADIENTS_READY):
            if trainer.has_handlers(event):
                return f"{event.name} has a handler"
        if {device for device, _ in self._gradients.kinds} != {self._statistics.device}:
            return "gradients are not on the device of the loss"
        if not self._learning_rates.may_be_finite():
            return "a learning rate is not finite"
        return self._stepping.why_not_fused() or self._stepping.why_not_queued()

    def _say_whether(self, obstacle: str | None) -> None:
        now = "it is" if obstacle is None else f"at first not, since {obstacle}"
        logging.getLogger("ignite_train").info(
            "a step is queued before the host has read the update's numbers, if it is folded into a fused kernel that has its "
            f"moments, and no handler of GRADIENTS_REDUCED or GRADIENTS_READY stands in between: {now}"
        )
        self._logged = True
