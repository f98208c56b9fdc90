"""Training loops that do the same work: by hand and with this library; the peers' are in `peers.py`.

Each contestant is a function that trains `work.model` on `work.micro_batches` once and returns the loss and the gradient norm
of every update. `Outcome.check_against` sees to it that all of them did the same.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as dist
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR

from ignite_train import (
    ForwardOutput,
    Trainer,
    UpdateOptions,
    UpdateOutput,
    attach_defaults,
    create_supervised_trainer,
    create_trainer,
)
from ignite_train.handlers import (
    EmptyCache,
    FailureBoard,
    HangWatch,
    LearningRateSchedule,
    LossScaleLogger,
    MinLearningRate,
    ProgressLog,
    StopOnSignal,
    TimeLimit,
    TrainingMetrics,
)

LOG_EVERY = 50


class MicroBatches:
    """A sized loader over prepared micro-batches that notes the time when it is asked for certain of them.

    Every contestant asks for the first micro-batch of an update at the same point of its loop, so the time between two such
    requests is that of the updates between them, without what a peer does once at the start and at the end. Notes are taken
    after each stretch of updates, and the median stretch counts: others use the machine in bursts.

    Args:
        batches: what to give, over and over.
        steps: micro-batches to an update.
        stretch: updates between two notes.
        stretches: how many are timed.
        warm_up: updates before the first note.
        before_note: called before each note.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        *,
        steps: int,
        stretch: int,
        stretches: int,
        warm_up: int,
        before_note: Callable[[], None] | None = None,
    ) -> None:
        self._batches, self._stretch, self._before_note = batches, stretch, before_note
        self._first, self._every = warm_up * steps, stretch * steps
        self._last = self._first + stretches * self._every
        self._number = self._last + 2 * steps  # who knows the length does not ask for one more
        self._cpu: list[float] = []
        self._wall: list[float] = []

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Any]:
        self._cpu, self._wall = [], []
        due = self._first
        for index in range(self._number):
            if index == due:
                if self._before_note is not None:
                    self._before_note()
                self._cpu.append(time.process_time())
                self._wall.append(time.perf_counter())
                due = due + self._every if due < self._last else -1
            yield self._batches[index % len(self._batches)]

    @property
    def cpu_seconds(self) -> float:
        """Processor time of an update, all threads of this process."""
        return statistics.median(after - before for before, after in pairwise(self._cpu)) / self._stretch

    @property
    def wall_seconds(self) -> float:
        """Time of an update."""
        return statistics.median(after - before for before, after in pairwise(self._wall)) / self._stretch


@dataclass
class Work:
    """What all contestants of one run have to do.

    Attributes:
        model: trained in place.
        optimizer: over its parameters.
        micro_batches: a sized loader, such as `MicroBatches`; its micro-batches are tuples.
        mean_loss: `mean_loss(model, micro_batch)`: for loops that average the losses of micro-batches.
        forward: the same as a sum and its weight, which is what this library asks for.
        accumulation_steps: micro-batches to an update.
        max_grad_norm: clip to this; None: neither clip nor look at the norm.
        precision: `"bf16"` runs forward under autocast.
        reduction: how this library's gradients cross ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    micro_batches: Any
    mean_loss: Callable[[nn.Module, Any], Tensor]
    forward: Callable[[nn.Module, Any], ForwardOutput]
    accumulation_steps: int = 1
    max_grad_norm: float | None = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    reduction: Literal["auto", "explicit"] = "auto"

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward in a loop that has none of its own."""
        return torch.autocast(self.device, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    @property
    def device(self) -> str:
        """Where the model is."""
        return next(self.model.parameters()).device.type

    @property
    def mixed(self) -> str:
        """The precision as Lightning calls it."""
        return "bf16-mixed" if self.precision == "bf16" else "32-true"

    def wrapped(self) -> nn.Module:
        """The model in `DistributedDataParallel` where there are several ranks."""
        return DistributedDataParallel(self.model) if ranks() > 1 else self.model

    def means(self, losses: Sequence[Any]) -> list[float]:
        """Losses of micro-batches to losses of updates, after the clock has stopped."""
        steps = self.accumulation_steps
        whole = torch.tensor([float(loss) for loss in losses]).split(steps)
        return [float(group.mean()) for group in whole]


@dataclass
class Outcome:
    """Loss and gradient norm of every update; losses are of this rank alone where a contestant has no others."""

    losses: list[float]
    norms: list[float] = field(default_factory=list)
    parameters: Tensor = field(default_factory=lambda: torch.empty(0))

    def check_against(self, other: Outcome, start: Tensor, *, tolerance: float = 3e-2, local_losses: bool = False) -> None:
        """Raises an AssertionError unless both moved the parameters from `start` alike and saw the same numbers on the way.

        AdamW amplifies rounding. After a hundred updates the ends are a thousandth of the way apart, and up to a hundredth
        where one loop averages over ranks after each micro-batch and the other once. What is not the same work is far beyond
        that.
        """
        moved = float((other.parameters - start).norm())
        apart = float((other.parameters - self.parameters).norm())
        pairs = [(apart / moved, 0.0)] if moved else []
        if len(self.norms) == len(other.norms) and self.norms:
            pairs.append((self.norms[-1] / other.norms[-1], 1.0))
        elif self.norms or other.norms:
            raise AssertionError(f"not the same number of gradient norms: {len(self.norms)} and {len(other.norms)}")
        if len(self.losses) != len(other.losses):
            raise AssertionError(f"not the same number of updates: {len(self.losses)} and {len(other.losses)}")
        if not local_losses:
            pairs.append((self.losses[-1] / other.losses[-1], 1.0))
        if any(abs(found - expected) > tolerance for found, expected in pairs):
            raise AssertionError(f"not the same work: distance, norm and loss relative to the reference: {pairs}")


Contestant = Callable[[Work], Outcome]


def run(contestant: Contestant, work: Work) -> Outcome:
    """Trains, silently, and adds the final parameters."""
    with silence():
        outcome = contestant(work)
    outcome.losses, outcome.norms = [float(loss) for loss in outcome.losses], [float(norm) for norm in outcome.norms]
    outcome.parameters = parameters_to_vector(work.model.parameters()).detach().cpu()
    return outcome


def ranks() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def silence() -> Iterator[None]:
    """What a contestant prints is formatted and written as in any run, but not shown."""
    with ExitStack() as stack:
        nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        stack.enter_context(redirect_stdout(nowhere))
        stack.enter_context(redirect_stderr(nowhere))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


# --- by hand ----------------------------------------------------------------------------------------------------------------


def by_hand(work: Work) -> Outcome:
    """The loop that an expert writes."""
    return _by_hand(work)


def by_hand_reading(work: Work) -> Outcome:
    """The same, and the loop reads loss and norm of each update, as it must to end a run that is not finite at once."""

    def read(update: int, loss: Tensor, norm: Tensor | float) -> None:
        if not math.isfinite(loss.item() + float(norm)):
            raise FloatingPointError(f"update {update} is not finite")

    return _by_hand(work, read)


def by_hand_with_blocking_sum(work: Work) -> Outcome:
    """The same, and the statistics of each update are summed over ranks when it is over."""

    def reduce(_update: int, loss: Tensor, norm: Tensor | float) -> None:
        packed = torch.stack([loss, torch.as_tensor(norm), loss.new_tensor(work.accumulation_steps)])
        dist.all_reduce(packed)
        loss.copy_(packed[0] / ranks())

    return _by_hand(work, reduce)


def by_hand_with_logging(work: Work) -> Outcome:
    """The same with what this library's handlers are attached for: a schedule, averages, and a line now and then."""
    scheduler = LambdaLR(work.optimizer, lambda _step: 1.0)
    sums = {"loss": 0.0, "grad_norm": 0.0, "clipped": 0}
    log_started = time.perf_counter()

    def log(update: int, loss: Tensor, norm: Tensor | float) -> None:
        nonlocal log_started
        scheduler.step()
        value = float(norm)
        sums["loss"] += loss.item()
        sums["grad_norm"] += value
        sums["clipped"] += work.max_grad_norm is not None and value > work.max_grad_norm
        if update % LOG_EVERY == 0:
            now = time.perf_counter()
            line = ", ".join(f"{name} {value / LOG_EVERY:.4g}" for name, value in sums.items())
            rate = work.optimizer.param_groups[0]["lr"]
            print(f"update {update}: {line}, rate {rate:.4g}, {LOG_EVERY / (now - log_started):.4g} updates/s", flush=True)
            sums.update(dict.fromkeys(sums, 0.0))
            log_started = now

    return _by_hand(work, log)


def _by_hand(work: Work, after_update: Callable[[int, Tensor, Any], None] | None = None) -> Outcome:
    optimizer, steps, model = work.optimizer, work.accumulation_steps, work.wrapped()
    accumulate = _accumulate if ranks() == 1 and work.precision == "fp32" else _accumulate_in_contexts
    parameters = list(model.parameters())
    outcome = Outcome([])
    model.train()
    batches = iter(work.micro_batches)
    update = 0
    while group := list(islice(batches, steps)):
        update += 1
        loss = accumulate(work, model, group)
        norm: Any = 0.0
        if work.max_grad_norm is not None:
            norm = clip_grad_norm_(parameters, work.max_grad_norm)
            outcome.norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
        outcome.losses.append(loss)
        if after_update is not None:
            after_update(update, loss, norm)
    return outcome


def _accumulate(work: Work, model: nn.Module, group: list[Any]) -> Tensor:
    """Nothing but forward and backward: on a tiny network an idle context manager would already show."""
    steps, mean_loss = work.accumulation_steps, work.mean_loss
    if steps == 1:
        loss = mean_loss(model, group[0])
        loss.backward()
        return loss.detach()
    total: Any = 0.0
    for micro_batch in group:
        loss = mean_loss(model, micro_batch) / steps
        loss.backward()
        total = total + loss.detach()
    return total


def _accumulate_in_contexts(work: Work, model: nn.Module, group: list[Any]) -> Tensor:
    """The same on several ranks and under autocast."""
    steps = work.accumulation_steps
    total: Any = 0.0
    for number, micro_batch in enumerate(group, start=1):
        local = isinstance(model, DistributedDataParallel) and number < steps
        with model.no_sync() if local else nullcontext():  # type: ignore[operator]
            with work.autocast():
                loss = work.mean_loss(model, micro_batch)
            if steps > 1:
                loss = loss / steps
            loss.backward()
        total = total + loss.detach() if steps > 1 else loss.detach()
    return total


# --- this library -----------------------------------------------------------------------------------------------------------


def ignite_train(work: Work, *, fast: bool = True) -> Outcome:
    """Nothing attached but what keeps loss and norm."""
    return run_trainer(work, trainer_of(work, fast=fast))


def ignite_train_with_log(work: Work, *, fast: bool = True) -> Outcome:
    """Forward gives one log with each micro-batch."""
    plain = work.forward

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        loss, sample_size, *_ = plain(model, micro_batch)
        return ForwardOutput(loss, sample_size, {"nll": loss.detach()})

    return run_trainer(work, trainer_of(replace(work, forward=forward), fast=fast))


def ignite_train_supervised(work: Work, *, fast: bool = True) -> Outcome:
    """`create_supervised_trainer`, which multiplies the mean loss by the number of samples."""
    trainer = create_supervised_trainer(
        work.model,
        work.optimizer,
        cross_entropy,
        gradient_accumulation_steps=work.accumulation_steps,
        max_grad_norm=work.max_grad_norm,
        options=UpdateOptions(fast=fast),
    )
    return run_trainer(work, trainer)


def ignite_train_with_handlers(work: Work, *, fast: bool = True) -> Outcome:
    """Every handler that is of use in a run without validation."""
    trainer, optimizer = trainer_of(work, fast=fast), work.optimizer
    every = Events.ITERATION_COMPLETED(every=LOG_EVERY)
    LearningRateSchedule(LambdaLR(optimizer, lambda _step: 1.0)).attach(trainer)
    TrainingMetrics().attach(trainer, every)
    LossScaleLogger().attach(trainer)
    ProgressLog().attach(trainer, every)
    EmptyCache().attach(trainer)
    TimeLimit(seconds=10_000).attach(trainer)
    MinLearningRate(optimizer, minimum=0.0).attach(trainer)
    StopOnSignal().attach(trainer)
    HangWatch(timeout_seconds=600).attach(trainer)
    FailureBoard().attach(trainer)
    return run_trainer(work, trainer)


def ignite_train_with_defaults(work: Work, *, fast: bool = True) -> Outcome:
    """What `attach_defaults` attaches: metrics, lines, a log as JSON and TensorBoard, every 50 updates."""
    trainer = trainer_of(work, fast=fast)
    with TemporaryDirectory() as directory:
        attach_defaults(trainer, directory=directory, every=LOG_EVERY)
        return run_trainer(work, trainer)


def ignite_train_compiled(work: Work) -> Outcome:
    """`compile="update"`: forward, backward, norm, clipping and step as one graph, or a few."""
    trainer = trainer_of(work, compiled="update")
    outcome = run_trainer(work, trainer)
    check_compiled(trainer)
    return outcome


def check_compiled(trainer: Trainer) -> None:
    """Raises an AssertionError if updates are not compiled as a whole, which a trainer only logs."""
    gather: Any = trainer.process.gather
    if not gather._graphs or gather._obstacle is not None:
        raise AssertionError(f"updates are not compiled as a whole, since {gather._obstacle}")


def trainer_of(work: Work, *, compiled: bool | Literal["update"] | dict[str, Any] = False, fast: bool = True) -> Trainer:
    """A trainer with nothing attached; `fast=False` leaves accelerations out."""
    return create_trainer(
        work.model if work.reduction == "explicit" else work.wrapped(),
        work.optimizer,
        work.forward,
        accumulation_steps=work.accumulation_steps,
        max_grad_norm=work.max_grad_norm,
        precision=work.precision,
        compile=compiled,
        options=UpdateOptions(reduction=work.reduction, fast=fast),
    )


def run_trainer(work: Work, trainer: Trainer) -> Outcome:
    """Runs it once over the data and keeps what each update gave."""
    outputs: list[UpdateOutput] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(trainer.state.update_output))
    trainer.run(work.micro_batches, max_epochs=1)
    norms = [float(output.grad_norm) for output in outputs] if work.max_grad_norm is not None else []
    return Outcome([float(output.loss) for output in outputs], norms)


# --- as tables show them ----------------------------------------------------------------------------------------------------

REFERENCE = "by hand"
BY_HAND: dict[str, Contestant] = {REFERENCE: by_hand, f"{REFERENCE}, once more (the noise)": by_hand}
IGNITE_TRAIN: dict[str, Contestant] = {
    "ignite_train": ignite_train,
    "ignite_train, all handlers, a line every 50": ignite_train_with_handlers,
    "ignite_train, attach_defaults, logging every 50": ignite_train_with_defaults,
}
WITHOUT_FAST = "without fast/"
# For optimizers that are not fused, which is what people write by default.
BY_DEFAULT: dict[str, Contestant] = {
    "ignite_train": ignite_train,
    "ignite_train, one log a micro-batch": ignite_train_with_log,
    "create_supervised_trainer": ignite_train_supervised,
    "ignite_train, all handlers, a line every 50": ignite_train_with_handlers,
    "ignite_train, attach_defaults, logging every 50": ignite_train_with_defaults,
}
BY_DEFAULT |= {f"{name}, {WITHOUT_FAST}": partial(run, fast=False) for name, run in BY_DEFAULT.items()}
