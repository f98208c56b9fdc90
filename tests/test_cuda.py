"""What only a GPU can show. Skipped where there is none: it has never been run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from ignite_train import ForwardOutput, Trainer, create_trainer
from ignite_train.handlers import (
    EmptyCache,
    GradNormConsistency,
    LearningRateSchedule,
    LossScaleLogger,
    MinLearningRate,
    ProgressLog,
    StateConsistency,
    TrainingMetrics,
)
from update_options import with_options

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

UPDATES, STEPS, WIDTH = 100, 3, 256


def data(*, pinned: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches in the host's memory."""
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(64, WIDTH, generator=generator), torch.randint(10, (64,), generator=generator))
        for _ in range(UPDATES * STEPS)
    ]
    return [(x.pin_memory(), y.pin_memory()) for x, y in batches] if pinned else batches


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    """A sum and its weight."""
    logits = model(batch[0])
    loss = cross_entropy(logits.float(), batch[1], reduction="sum")
    return ForwardOutput(loss, len(batch[1]), {"correct": (logits.argmax(-1) == batch[1]).sum()})


def make(device: str = "cuda", **options: Any) -> tuple[Trainer, nn.Module, torch.optim.Optimizer]:
    """A trainer with accumulation, clipping and a fused optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=STEPS, max_grad_norm=1.0, **with_options(**options))
    return trainer, model, optimizer


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_synchronises(precision: Any, pinned: bool) -> None:
    """A hundred updates with a schedule, consistency checks, metrics every update and a line every 50, by CUDA's own watch."""
    trainer, model, optimizer = make(precision=precision)
    LearningRateSchedule(torch.optim.lr_scheduler.StepLR(optimizer, 10)).attach(trainer)
    TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED)
    LossScaleLogger().attach(trainer)
    ProgressLog().attach(trainer, Events.ITERATION_COMPLETED(every=50))
    EmptyCache().attach(trainer)
    MinLearningRate(optimizer, minimum=1e-12).attach(trainer)
    GradNormConsistency().attach(trainer)
    StateConsistency(model, optimizer).attach(trainer, Events.ITERATION_COMPLETED(every=25))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: torch.cuda.set_sync_debug_mode("error"))
    try:
        trainer.run(data(pinned=pinned), max_epochs=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.state.num_steps == UPDATES


def test_the_same_as_on_the_cpu() -> None:
    """Losses and norms of the first updates, up to rounding."""
    seen = []
    for device in ("cpu", "cuda"):
        trainer, _, _ = make(device)
        outputs: list[Any] = []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda trainer, outputs: outputs.append(trainer.state.output), outputs
        )
        trainer.run(data(), max_iters=5)
        seen.append([number for output in outputs for number in (output.loss, output.grad_norm)])
    assert seen[1] == pytest.approx(seen[0], rel=1e-3)


def test_an_overflow_is_skipped_and_leaves_no_trace() -> None:
    """In fp16 the device skips the step, and the host learns of it in the same update."""
    trainer, model, _ = make(precision="fp16")
    trainer.run(data(), max_iters=3)
    before = [parameter.clone() for parameter in model.parameters()]
    skipped = trainer.state.num_skipped
    batches = data()
    batches[9] = (torch.full_like(batches[9][0], 1e30), batches[9][1])
    trainer.run(batches, max_iters=4)  # the fourth group of the same epoch
    assert trainer.state.num_skipped == skipped + 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_copies_run_on_a_stream_of_their_own() -> None:
    """By the profiler: no micro-batch is copied on the stream that computes."""
    trainer, _, _ = make()
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), profiler.__enter__)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda: profiler.__exit__(None, None, None))
    trainer.run(data(), max_iters=6)
    large = 64 * WIDTH * 4
    events = [event for event in profiler.profiler.kineto_results.events() if "CUDA" in str(event.device_type())]
    copies = {event.device_resource_id() for event in events if "HtoD" in event.name() and event.nbytes() >= large}
    kernels = {event.device_resource_id() for event in events if "gemm" in event.name().lower()}
    assert copies
    assert kernels
    assert not copies & kernels
