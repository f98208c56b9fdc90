"""Tests of what only a GPU of CUDA can show. Skipped elsewhere; docs/accelerators.md says where it was run.

What holds on every device is in test_accelerator.py.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import compiling
from bits import bit_by_bit
from ignite_train import ForwardOutput, NonFiniteError, TorchLossScaling, Trainer, create_trainer
from ignite_train.handlers import (
    Checkpoint,
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


def make(
    device: str = "cuda", *, name: str = "AdamW", dropout: float = 0.0, steps: int = STEPS, **options: Any
) -> tuple[Trainer, nn.Module, torch.optim.Optimizer]:
    """A trainer with accumulation, clipping and a fused optimizer."""
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(WIDTH, 10)
    model = nn.Sequential(*layers).to(device)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, fused=True)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=steps, max_grad_norm=1.0, **with_options(**options))
    return trainer, model, optimizer


def numbers_of(trainer: Trainer) -> list[Any]:
    """Grows by what each update gave."""
    seen: list[Any] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        output = trainer.state.update_output
        seen.append((output.loss, output.grad_norm, output.skipped_reason, output.loss_scale))

    return seen


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


def test_copies_run_on_a_stream_of_their_own(tmp_path: Path) -> None:
    """By the profiler: no micro-batch is copied on the stream that computes."""
    trainer, _, _ = make()
    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), profiler.start)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), profiler.stop)
    trainer.run(data(), max_iters=6)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    streams: dict[str, set[int]] = {"gpu_memcpy": set(), "kernel": set()}
    for event in events:
        is_large = event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"] and event["args"]["bytes"] >= 64 * WIDTH * 4
        if is_large or event.get("cat") == "kernel":
            streams[event["cat"]].add(event["args"]["stream"])
    assert streams["gpu_memcpy"]
    assert streams["kernel"]
    assert not streams["gpu_memcpy"] & streams["kernel"]


# --- the same updates on every way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])  # torch has no fused Adagrad for CUDA
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_that_are_queued_are_those_that_the_host_asks_for(name: str, precision: Any) -> None:
    """A skipped update among them. Without fast/ the host reads before it steps; rounding apart, nothing differs."""
    near = 1e-4 if precision == "fp32" else 1e-2  # half precision rounds what differs in the last bits of float32
    ends = []
    for fast in (True, False):
        scaling = {"loss_scaling": TorchLossScaling(2.0**7)} if precision == "fp16" else {"on_nonfinite": "skip"}
        trainer, model, optimizer = make(name=name, precision=precision, fast=fast, **scaling)
        batches = data()[: 12 * STEPS]
        batches[4 * STEPS + 1] = (torch.full_like(batches[0][0], torch.inf), batches[0][1])
        numbers = numbers_of(trainer)
        trainer.run(batches, max_epochs=1)
        assert [index for index, one in enumerate(numbers) if one[2] is not None] == [4]
        states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
        ends.append((numbers[:4] + numbers[5:], [value.detach().cpu() for value in [*model.parameters(), *states]]))
    (numbers, tensors), (plain_numbers, plain_tensors) = ends
    for ours, plain in zip(numbers, plain_numbers, strict=True):
        assert ours[2:] == plain[2:]
        assert ours[:2] == pytest.approx(plain[:2], rel=near)
    for mine, other in zip(tensors, plain_tensors, strict=True):
        torch.testing.assert_close(mine, other, rtol=near, atol=near / 10)


def test_an_update_that_is_not_finite_is_not_made() -> None:
    """When the error is raised, parameters, moments and numbers of steps have every bit that they had before the update."""
    trainer, model, optimizer = make()
    batches = data()[: 6 * STEPS]
    batches[4 * STEPS + 2] = (torch.full_like(batches[0][0], torch.nan), batches[0][1])
    before: list[Any] = []

    @trainer.on(Events.ITERATION_STARTED)
    def note() -> None:
        before[:] = [bit_by_bit([model.state_dict(), optimizer.state_dict()])]

    with pytest.raises(NonFiniteError, match="micro-batch 3 of 3"):
        trainer.run(batches, max_epochs=1)
    assert [bit_by_bit([model.state_dict(), optimizer.state_dict()])] == before


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_graphs")
@compiling.lets_torch_read_grad
@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("compiled", ["update", {"update": True, "mode": "default"}], ids=["graphs", "no_graphs"])
def test_a_compiled_update_runs_as_cuda_graphs(compiled: Any, steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """A graph is launched once for each micro-batch; the numbers and the parameters are those without compiling."""
    ends = []
    for compile_ in (False, compiled):
        trainer, model, _ = make(steps=steps, compile=compile_)
        numbers, profiler = numbers_of(trainer), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        if compile_:
            trainer.add_event_handler(Events.ITERATION_STARTED(once=9), profiler.start)
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=12), profiler.stop)
        with caplog.at_level(logging.WARNING, "ignite_train"):
            trainer.run(data()[: 12 * steps], max_epochs=1)
        ends.append((numbers, [parameter.detach().cpu() for parameter in model.parameters()]))
    assert [record.getMessage() for record in caplog.records if record.name == "ignite_train"] == []
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    launches = sum(event.name() == "cudaGraphLaunch" for event in events)
    assert launches == (4 * steps if compiled == "update" else 0)
    (plain, plain_ends), (graphs, graph_ends) = ends
    for one, other in zip(graphs, plain, strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=1e-4)
    for mine, other in zip(graph_ends, plain_ends, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


class Classifier(nn.Sequential):
    """Torch does not compile a bare `Sequential`."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = super().forward(x)
        return logits


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_is_recorded(precision: Any) -> None:
    """With `compile={"mode": "reduce-overhead"}`, a skipped update among them: the updates are those without compiling."""
    near = 1e-4 if precision == "fp32" else 2e-2
    ends = []
    for compile_ in (False, {"mode": "reduce-overhead"}):
        torch.manual_seed(0)
        model = Classifier(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10)).to("cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        trainer = create_trainer(
            model,
            optimizer,
            forward,
            max_grad_norm=1.0,
            precision=precision,
            compile=compile_,
            **with_options(on_nonfinite="skip"),
        )
        numbers, profiler = numbers_of(trainer), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        trainer.add_event_handler(Events.ITERATION_STARTED(once=9), profiler.start)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=12), profiler.stop)
        batches = data()[:16]
        batches[6] = (torch.full_like(batches[0][0], torch.nan), batches[0][1])
        trainer.run(batches, max_epochs=1)
        events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        launches = sum(event.name() == "cudaGraphLaunch" for event in events)
        ends.append((launches, numbers, [parameter.detach().cpu() for parameter in model.parameters()]))
    (launched, plain, plain_ends), (recorded, graphs, graph_ends) = ends
    assert (launched, recorded) == (0, 8)  # forward and backward of four updates
    assert [one[2] is None for one in graphs] == [index != 6 for index in range(16)]
    for one, other in zip(graphs[:6] + graphs[7:], plain[:6] + plain[7:], strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=near)
    for mine, other in zip(graph_ends, plain_ends, strict=True):
        torch.testing.assert_close(mine, other, rtol=near, atol=near / 10)


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_graphs")
@compiling.lets_torch_read_grad
@pytest.mark.parametrize("steps", [1, STEPS])
def test_a_compiled_run_is_resumed_bitwise(steps: int, tmp_path: Path) -> None:
    """With dropout inside of CUDA graphs, whose generators continue from the saved state; stopped in the middle of an epoch."""

    def run(place: Path, *, seed: int, **until: int) -> Any:
        trainer, model, optimizer = make(steps=steps, dropout=0.5, compile="update")
        Checkpoint(place, every=2).attach(trainer)
        torch.manual_seed(seed)
        numbers = numbers_of(trainer)
        trainer.run(data()[: 10 * steps], **until)
        assert not trainer.process.gather._said  # type: ignore[attr-defined]
        return bit_by_bit([model.state_dict(), optimizer.state_dict(), numbers[-4:], torch.cuda.get_rng_state()])

    whole = run(tmp_path / "whole", seed=3, max_epochs=2)
    run(tmp_path / "broken", seed=3, max_iters=13)
    assert run(tmp_path / "broken", seed=4, max_epochs=2) == whole


@pytest.mark.nightly
def test_one_rank_by_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that compares and reduces over ranks: the numbers of a process alone, in a run that is continued too."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    ends = []
    for number, way in enumerate(("alone", "ddp", "explicit")):
        if way != "alone":
            idist.initialize("nccl", init_method=f"file://{tmp_path}/store{number}", rank=0, world_size=1)
        try:
            for until in ({"max_iters": 7}, {"max_epochs": 1}):  # the second run continues the first
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10)).to("cuda")
                wrapped = DistributedDataParallel(model, device_ids=[0]) if way == "ddp" else model
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
                options = with_options(reduction=way) if way != "alone" else {}
                trainer = create_trainer(
                    wrapped, optimizer, forward, accumulation_steps=STEPS, max_grad_norm=1.0, precision="bf16", **options
                )
                GradNormConsistency().attach(trainer)
                StateConsistency(model, optimizer).attach(trainer, Events.ITERATION_COMPLETED(every=5))
                TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED)
                Checkpoint(tmp_path / way, every=4).attach(trainer)
                numbers = numbers_of(trainer)
                trainer.run(data()[: 12 * STEPS], **until)
        finally:
            if way != "alone":
                idist.finalize()
        ends.append((numbers, [parameter.detach().cpu() for parameter in model.parameters()]))
    for numbers, parameters in ends[1:]:
        assert len(numbers) == 5
        for one, other in zip(numbers, ends[0][0], strict=True):
            assert one[:2] == pytest.approx(other[:2], rel=1e-4)
        for mine, other in zip(parameters, ends[0][1], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


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
