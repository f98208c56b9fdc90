"""A step that is queued on the device before the host knows whether it may be made."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ignite_train.events import TrainEvents
from ignite_train.fast.folded_step import LARGEST_DIVISOR, SMALLEST_DIVISOR, FoldedStep, FoldedSteps
from ignite_train.model.gradients import SMALLEST_NORM
from ignite_train.ranks.statistics import Reduced, Totals
from ignite_train.trainer import Trainer
from ignite_train.update.decision import EPSILON, Rules
from ignite_train.update.gather import Gather

__all__ = ["QueuedStep", "decide_on_device"]


@dataclass(kw_only=True)
class QueuedStep(Gather):
    """A gather that, on an accelerator, has the device decide about the step, so that it need not wait for the host to do so.

    The sums and the norm lie on the device. Whether the update is plain (samples, finite, nothing only the host can decide)
    and what to divide the gradients by is computed there; those numbers set out for the host, an event behind them; then the
    optimizer's fused step is queued, with `grad_scale` and `found_inf`; and only then the host waits, for the event. If the
    update is not plain, the kernel skips the step, which leaves no trace, and the host decides about it as it does elsewhere.

    The order of reading and stepping is the other one (the host reads, then steps) wherever the difference could show:

    - GRADIENTS_REDUCED or GRADIENTS_READY has a handler, also one whose filter is not due;
    - the factor cannot be folded into the step, or a step that is skipped would leave a trace; see `FoldedStep`;
    - gradients and sums are not all on one device, or it has no float64.

    Attributes:
        stepper: makes the step.
        rules: of the trainer.
    """

    stepper: FoldedStep | FoldedSteps
    rules: Rules
    _logged: bool = False

    def read(self, trainer: Trainer, norm: float | Tensor | None) -> Totals:
        """Reads the update's numbers; the device may have made the step that belongs to them."""
        statistics, watch = self.statistics, self.stepper.watch
        reduced = statistics.reduced(norm)
        if reduced is None or self._why_not_queued(trainer) is not None:
            return super().read(trainer, norm)
        rates = self.learning_rates.unknown()
        may_step, divisor = decide_on_device(reduced, self.rules, self.passes.loss_scaling.scale)
        for rate in rates:
            may_step = may_step * torch.isfinite(rate).reshape(()).to(may_step.device)
        statistics.send(norm, [may_step, *rates])
        trainer.begin_section("optimizer")
        # Told before the kernels are queued, so that after an interrupt the device is asked whether they have stepped.
        watch.leave_to_device(lambda: bool(may_step.item() == 1.0))  # sync
        self.stepper.step_if(may_step, divisor)
        trainer.begin_section("reduction")
        totals = statistics.finish(norm)
        watch.decided(moved=totals.more[0] == 1.0)
        self.learning_rates.learn(totals.more[1:])
        return totals

    def _why_not_queued(self, trainer: Trainer) -> str | None:
        """Why the host must know the numbers before the step; asked in each update, as handlers and hooks come and go."""
        obstacle = self._obstacle(trainer)
        if not self._logged:
            self._say_whether(obstacle)
        return obstacle

    def _obstacle(self, trainer: Trainer) -> str | None:
        for event in (TrainEvents.GRADIENTS_REDUCED, TrainEvents.GRADIENTS_READY):
            if trainer.has_handlers(event):
                return f"{event.name} has a handler"
        if {device for device, _ in self.gradients.kinds} != {self.statistics.device}:
            return "gradients are not on the device of the loss"
        if not self.learning_rates.may_be_finite():
            return "a learning rate is not finite"
        return self.stepper.why_not_fused() or self.stepper.why_not_queued()

    def _say_whether(self, obstacle: str | None) -> None:
        now = "it is" if obstacle is None else f"at first not, since {obstacle}"
        logging.getLogger("ignite_train").info(
            "a step is queued before the host has read the update's numbers, if it is folded into a fused kernel that has its "
            f"moments, and no handler of GRADIENTS_REDUCED or GRADIENTS_READY stands in between: {now}"
        )
        self._logged = True


def decide_on_device(reduced: Reduced, rules: Rules, loss_scale: float) -> tuple[Tensor, Tensor]:
    """Whether to step without asking the host (1 or 0, float64), and what to divide the gradients by (float32), not read.

    These are the operations of `decide`, one by one, in float64 and in its order, each rounded once as the host's are. A
    quotient of which the host knows the divisor is never left to the device, since CUDA multiplies by the reciprocal. What the
    host has to look at before the step, such as a norm that float32 may not have added up, gives 0.

    Each operation is a kernel, which takes the host longer to launch than the device to run. So numbers that must be within
    bounds are compared all at once, and what the host knows is computed by the host.
    """
    size, loss, norm, obstacles = reduced
    weight = size if rules.normalize else 1.0
    scaled = weight * loss_scale
    if isinstance(scaled, Tensor):
        factor: float | Tensor = _over(rules.averaged_over, scaled)
    else:
        factor = rules.averaged_over / scaled if 0.0 < scaled < math.inf else math.nan  # which the device refuses
    mean_norm = norm * factor
    if rules.max_grad_norm is not None:
        factor = factor * torch.clamp(_over(rules.max_grad_norm, mean_norm + EPSILON), max=1.0)
    quotient = _over(1.0, factor) if isinstance(factor, Tensor) else torch.full_like(norm, 1.0 / factor if factor else math.nan)
    is_whole = not isinstance(size, Tensor) and size >= 1.0  # then the mean loss is finite if the sum is
    mean_loss = loss if is_whole else _quotient(loss, size)
    bounds = [(norm, SMALLEST_NORM, _LARGEST), (torch.add(mean_norm, mean_loss, alpha=0), 0.0, _LARGEST)]
    bounds.append((quotient, SMALLEST_DIVISOR, LARGEST_DIVISOR))
    if isinstance(size, Tensor):
        bounds.append((size, _SMALLEST, math.inf))
    if obstacles is not None:
        bounds.append((obstacles, 0.0, 0.0))
    numbers, lowest, highest = zip(*bounds, strict=True)
    values = torch.stack(numbers)
    inside = torch.clamp(values, _constant(lowest, values.device), _constant(highest, values.device))
    return torch.eq(inside, values, out=torch.empty_like(values)).amin(), quotient.float()


_LARGEST, _SMALLEST = torch.finfo(torch.float64).max, 5e-324


def _over(number: float, divisor: Tensor) -> Tensor:
    """Their quotient, rounded once: `number / divisor` would be a product with the reciprocal."""
    return torch.div(torch.tensor(number, dtype=torch.float64), divisor)


def _quotient(number: Tensor, divisor: float | Tensor) -> Tensor:
    return number / (divisor if isinstance(divisor, Tensor) else torch.full_like(number, divisor))


@functools.cache
def _constant(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)
