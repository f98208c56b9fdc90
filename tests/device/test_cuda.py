"""What only a GPU of CUDA can show. Skipped elsewhere: it has never been run.

What holds on every device is in test_accelerator.py.
"""

from __future__ import annotations

from collections.abc import Iterator
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


# --- memory -----------------------------------------------------------------------------------------------------------------

GIB = 2**30
ROWS = 2**20  # of a micro-batch: 1 GiB in float32, and each activation of the model as much


@pytest.fixture
def two_gib_free() -> Iterator[None]:
    """Torch may use two GiB more than it does."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2 * GIB) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def wide_forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    """Several activations of the size of the micro-batch."""
    return ForwardOutput(model(x.to("cuda")).square().sum(), len(x))


def train_wide(rows: list[int], **options: Any) -> tuple[list[Tensor], Any]:
    """Parameters after one update, and its output."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).to(
        "cuda"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    trainer = create_trainer(model, optimizer, wide_forward, accumulation_steps=len(rows), **with_options(**options))
    samples = torch.rand(sum(rows), WIDTH, generator=torch.Generator().manual_seed(2))  # the same, however they are cut
    trainer.run(list(samples.split(rows)), max_epochs=1)
    return [parameter.detach().cpu() for parameter in model.parameters()], trainer.state.update_output


@pytest.mark.usefixtures("two_gib_free")
@pytest.mark.parametrize("policy", ["skip", "split"])
def test_memory_that_is_really_out(policy: str) -> None:
    """A micro-batch that does not fit is left out, or halved until it fits: samples and parameters are those of the rest."""
    parameters, output = train_wide([1000, ROWS], on_out_of_memory=policy)
    assert output.sample_size == 1000 + (ROWS if policy == "split" else 0)
    rest = [1000, *([ROWS // 16] * 16 if policy == "split" else [])]
    expected, _ = train_wide(rest)
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("two_gib_free")
def test_an_error_of_memory_has_the_summary_of_the_allocator() -> None:
    """And the advice."""
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train_wide([ROWS])
    notes = "\n".join(raised.value.__notes__)
    assert "accumulation_steps" in notes
    assert "PyTorch CUDA memory summary" in notes


def test_unused_memory_is_given_back() -> None:
    """By `EmptyCache(fragmentation=...)`, in the update after which most of the reserved memory is not in use."""
    trainer, _, _ = make()
    EmptyCache(fragmentation=0.5).attach(trainer, Events.ITERATION_COMPLETED)
    reserved: list[int] = []

    @trainer.on(Events.ITERATION_STARTED(once=3))
    def use_much() -> None:
        torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")

    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: reserved.append(torch.cuda.memory_reserved()))
    trainer.run(data(), max_iters=5)
    assert reserved[2] >= 4 * GIB
    assert reserved[3] < 4 * GIB
