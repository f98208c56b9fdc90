"""What must hold on any device that torch trains on: on the CPU, and on the accelerator of the machine where there is one.

Without an accelerator these tests run on the CPU alone, so that they cannot rot. What only CUDA has is in test_cuda.py.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Accuracy, EpochMetric
from ignite.metrics import Loss as MeanLoss
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils import _pytree as pytree

import compiling
import cuts
from bits import bit_by_bit
from ignite_train import (
    ForwardOutput,
    NonFiniteError,
    TorchLossScaling,
    Trainer,
    UpdateOptions,
    attach_metric,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint import find
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.checkpoint.tensor_files import Piece
from ignite_train.checkpoint.writer import Snapshot
from ignite_train.device.streams import has_streams
from ignite_train.fast.folded_step import FoldedStep
from ignite_train.handlers import Checkpoint, EmptyCache, ModelEMA, StepTimer, TrainingMetrics
from ignite_train.model.random_state import RandomState
from ignite_train.model.tensor_digests import tensor_digests
from ignite_train.tools.consolidate import read_entry
from ranks import run_ranks
from update_options import with_options

Batch = tuple[Tensor, Tensor]

WIDTH, SAMPLES, STEPS, UPDATES = 64, 32, 3, 8


class Net(nn.Module):
    """Two layers, with dropout between them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.down(self.dropout(torch.tanh(self.up(x))))
        return logits


def make_model(device: torch.device, *, dropout: float = 0.0) -> nn.Module:
    """The same weights on each device."""
    torch.manual_seed(0)
    return Net(dropout).to(device)


def batches(number: int = STEPS * UPDATES, *, pinned: bool = False) -> list[Batch]:
    """Micro-batches in the host's memory."""
    generator = torch.Generator().manual_seed(1)
    made = [
        (torch.randn(SAMPLES, WIDTH, generator=generator), torch.randint(10, (SAMPLES,), generator=generator))
        for _ in range(number)
    ]
    return [(x.pin_memory(), y.pin_memory()) for x, y in made] if pinned else made


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Summed over the samples."""
    return cross_entropy(model(batch[0]).float(), batch[1], reduction="sum")


def forward(model: nn.Module, batch: Batch) -> ForwardOutput:
    """The sum and its weight."""
    return ForwardOutput(loss_of(model, batch), len(batch[1]))


def sgd_trainer(
    model: nn.Module, forward: Callable[..., Any] = forward, *, lr: float = 0.1, fused: bool = False, **options: Any
) -> Trainer:
    """A trainer with SGD, of `STEPS` micro-batches to an update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, fused=fused)
    return create_trainer(model, optimizer, forward, accumulation_steps=STEPS, **with_options(**options))


def journal_of(trainer: Trainer) -> list[Any]:
    """Grows by the output of each update."""
    journal: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda trainer: journal.append(trainer.state.output))
    return journal


def copied_to_host(state: Any) -> Any:
    """Copies of all tensors."""
    return pytree.tree_map(lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf, state)


def on_host(module: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    found: list[Tensor] = copied_to_host(list(module.parameters()))
    return found


# --- the update -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("sizes", [[64], [16] * 4, [5, 11, 1, 47], [30, 0, 34]], ids=str)
def test_the_table_of_cuts(device: torch.device, sizes: list[int], fused: bool) -> None:
    """However the samples are cut, five updates are those of the closed form in float64."""
    model = cuts.linear().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE, fused=fused)
    trainer = create_trainer(model, optimizer, cuts.forward, accumulation_steps=len(sizes))
    journal = journal_of(trainer)
    trainer.run(cuts.cut(cuts.samples(), sizes), max_epochs=5)
    expected = cuts.reference([cuts.samples()] * 5)
    torch.testing.assert_close(model.weight.detach().cpu().squeeze(0), expected["weight"], rtol=1e-12, atol=1e-12)
    assert [output.loss for output in journal] == pytest.approx(expected["losses"], rel=1e-12)
    assert [output.grad_norm for output in journal] == pytest.approx(expected["norms"], rel=1e-12)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_it_is_the_loop_by_hand(device: torch.device, name: str, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, norms and parameters, with accumulation and clipping, up to rounding; fused steps are queued ahead of it."""
    if pinned and device.type == "cpu":
        pytest.skip("memory is pinned for an accelerator")
    model = make_model(device)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, fused=name != "Adagrad" or device.type == "cpu")
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=STEPS, max_grad_norm=0.1)
    journal = journal_of(trainer)
    queued: list[bool] = []
    step_if = FoldedStep.step_if
    monkeypatch.setattr(FoldedStep, "step_if", lambda *arguments: (queued.append(True), step_if(*arguments))[1])
    trainer.run(batches(pinned=pinned), max_epochs=1)

    by_hand = make_model(device)
    stepper = getattr(torch.optim, name)(by_hand.parameters(), lr=0.01)
    losses, norms = [], []
    data = [(x.to(device), y.to(device)) for x, y in batches()]
    for start in range(0, len(data), STEPS):
        stepper.zero_grad()
        total = 0.0
        for batch in data[start : start + STEPS]:
            loss = loss_of(by_hand, batch) / (STEPS * SAMPLES)
            loss.backward()
            total += loss.item()
        norms.append(clip_grad_norm_(by_hand.parameters(), 0.1).item())
        losses.append(total)
        stepper.step()
    assert [output.loss for output in journal] == pytest.approx(losses, rel=2e-6)
    assert [output.grad_norm for output in journal] == pytest.approx(norms, rel=2e-5)
    for ours, theirs in zip(on_host(model), on_host(by_hand), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    first = 0 if name == "SGD" else 1  # in which the moments come into being
    assert len(queued) == (UPDATES - first if has_streams(device) and name != "Adagrad" else 0)


def test_loss_scaling_is_that_of_grad_scaler(device: torch.device) -> None:
    """In fp16 beside the loop by hand with torch's GradScaler: the same scales, skips and parameters, overflows among them."""
    settings = {"init_scale": 2.0**7, "growth_interval": 2}
    overflowing = {2, 5}
    data = batches()
    for update in overflowing:
        data[update * STEPS] = (torch.full_like(data[0][0], 1e30), data[0][1])

    model = make_model(device)
    trainer = sgd_trainer(model, fused=True, precision="fp16", loss_scaling=TorchLossScaling(**settings))
    journal = journal_of(trainer)
    trainer.run(data, max_epochs=1)

    by_hand = make_model(device)
    stepper = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, **settings)
    scales, skipped = [], []
    for start in range(0, len(data), STEPS):
        stepper.zero_grad()
        before = on_host(by_hand)
        for x, y in data[start : start + STEPS]:
            with torch.autocast(device.type, torch.float16):
                loss = loss_of(by_hand, (x.to(device), y.to(device)))
            scaler.scale(loss / (STEPS * SAMPLES)).backward()
        scales.append(scaler.get_scale())
        scaler.step(stepper)
        scaler.update()
        skipped.append(all(map(torch.equal, before, on_host(by_hand))))
    assert [index for index, was in enumerate(skipped) if was] == sorted(overflowing)
    assert [output.skipped_reason == "overflow" for output in journal] == skipped
    assert [output.loss_scale for output in journal] == scales
    for ours, theirs in zip(on_host(model), on_host(by_hand), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)  # ours divides by the samples after the sum in fp16


@pytest.mark.slow
def test_an_overflow_leaves_no_trace(device: torch.device) -> None:
    """Parameters, moments and numbers of steps keep every bit; the host learns of it in the same update."""
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaling = TorchLossScaling(2.0**7)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=STEPS, precision="fp16", loss_scaling=scaling)
    data = batches()
    data[3 * STEPS] = (torch.full_like(data[0][0], 1e30), data[0][1])
    seen: list[Any] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: seen.append(bit_by_bit([model.state_dict(), optimizer.state_dict()["state"]]))
    )
    trainer.run(data, max_iters=5)
    assert trainer.state.num_skipped == 1
    assert seen[3] == seen[2]
    assert seen[4] != seen[3]


def test_half_precision_is_near(device: torch.device) -> None:
    """In bf16 the losses are those of float32, but for the few bits of its mantissa."""
    losses = []
    for precision in ("fp32", "bf16"):
        trainer = sgd_trainer(make_model(device), precision=precision)
        journal = journal_of(trainer)
        trainer.run(batches(), max_epochs=1)
        losses.append([output.loss for output in journal])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1] != losses[0]


class Square(nn.Module):
    """Infinite for large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Of each."""
        return x.square()


@pytest.mark.parametrize(
    ("value", "where"), [(torch.nan, "NaN in the micro-batch itself"), (1e30, "inf in the output of module '1'")]
)
def test_a_value_that_is_not_finite_is_located(device: torch.device, value: float, where: str) -> None:
    """The error names the micro-batch and where it began, and the parameters are untouched."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Square()).to(device)
    trainer = sgd_trainer(model, lr=0.01)
    data = batches()
    data[STEPS + 1] = (data[0][0].index_fill(1, torch.tensor([5]), value), data[0][1])
    before: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: before.append(bit_by_bit(model.state_dict())))
    with pytest.raises(NonFiniteError, match=f"micro-batch 2 of 3.*{where}"):
        trainer.run(data, max_epochs=1)
    assert [bit_by_bit(model.state_dict())] == before


@pytest.mark.parametrize("policy", ["skip", "split"])
def test_out_of_memory(device: torch.device, policy: str) -> None:
    """A micro-batch that does not fit is left out, or halved; the update is that of the samples which are left."""

    def run(fits: int, data: list[Batch]) -> tuple[list[Tensor], Any]:
        def limited(model: nn.Module, batch: Batch) -> ForwardOutput:
            if len(batch[0]) > fits:
                raise torch.OutOfMemoryError("no room")
            return forward(model, batch)

        model = make_model(device)
        trainer = sgd_trainer(model, limited, fused=True, on_out_of_memory=policy)
        trainer.run(data, max_epochs=1)
        return on_host(model), trainer.state.output

    data = batches(STEPS)
    small = [(x[: SAMPLES // 2], y[: SAMPLES // 2]) for x, y in data[1:]]
    tried, output = run(SAMPLES // 2, [data[0], *small])
    expected, other = run(SAMPLES, small if policy == "skip" else [data[0], *small])
    assert output.sample_size == other.sample_size == SAMPLES * (1 if policy == "skip" else 2)
    for ours, theirs in zip(tried, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_channels_last(device: torch.device) -> None:
    """A model and micro-batches in that memory format make the updates of contiguous ones."""
    generator = torch.Generator().manual_seed(1)
    images = [(torch.randn(4, 3, 8, 8, generator=generator), torch.randn(4, 5, generator=generator)) for _ in range(6)]
    ends = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).to(device)
        model.to(memory_format=memory_format)  # type: ignore[call-overload]
        trainer = create_trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            lambda model, batch: ForwardOutput(mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[1])),
            accumulation_steps=2,
            max_grad_norm=1.0,
        )
        trainer.run([(x.contiguous(memory_format=memory_format), y) for x, y in images], max_epochs=2)
        assert model[0].weight.is_contiguous(memory_format=memory_format)
        ends.append(on_host(model))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# --- several ranks, sharding, compiling: on the CPU and on CUDA --------------------------------------------------------------

PLACES = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]


def rank_of_two(place: torch.device, way: str) -> dict[str, Any]:
    """This rank's half of the samples, unevenly cut, over gloo; both ranks may have the same GPU."""
    model = cuts.linear().to(place)
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE)
    trainer = create_trainer(wrapped, optimizer, cuts.forward, accumulation_steps=5, options=UpdateOptions(reduction=way))  # type: ignore[arg-type]
    journal = journal_of(trainer)
    trainer.run(cuts.shard([[10, 3, 19], [1, 7, 9, 5, 10]]), max_epochs=5)
    return {"weight": model.weight.detach().cpu().squeeze(0), "losses": [output.loss for output in journal]}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_two_processes_by_gloo(place: torch.device, way: str) -> None:
    """NCCL refuses two ranks on one GPU, and gloo takes them: the updates are those of the closed form, alike on both."""
    first, second = run_ranks(rank_of_two, place, way)
    expected = cuts.reference([cuts.samples()] * 5)
    assert torch.equal(first["weight"], second["weight"])
    assert first["losses"] == second["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    torch.testing.assert_close(first["weight"], expected["weight"], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_sharded_model(place: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fully_shard` on one device, in a group of one rank: losses and norms are those of the whole model."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    seen = []
    backend = "nccl" if place.type == "cuda" else "gloo"
    idist.initialize(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for sharded in (False, True):
            model = make_model(place)
            if sharded:
                fully_shard(model, mesh=init_device_mesh(place.type, (1,)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            trainer = create_trainer(model, optimizer, forward, accumulation_steps=STEPS, max_grad_norm=0.1)
            journal = journal_of(trainer)
            trainer.run(batches(), max_epochs=1)
            seen.append([number for output in journal for number in (output.loss, output.grad_norm)])
    finally:
        idist.finalize()
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh_graphs")
@compiling.lets_torch_read_grad
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_compiled_update(place: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """With `compile="update"`, on CUDA by CUDA graphs: losses and norms are those of updates that are not compiled."""
    seen = []
    for compiled in (False, "update"):
        model = make_model(place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        trainer = create_trainer(
            model, optimizer, forward, accumulation_steps=STEPS, max_grad_norm=0.1, **with_options(compile=compiled)
        )
        journal = journal_of(trainer)
        with caplog.at_level(logging.WARNING, "ignite_train"):
            trainer.run(batches(), max_epochs=3)
        seen.append([number for output in journal for number in (output.loss, output.grad_norm)])
    said = [record.getMessage() for record in caplog.records if record.name == "ignite_train"]
    assert said == []  # which would say that no graph is used
    assert seen[1] == pytest.approx(seen[0], rel=1e-4)


# --- copies to the device ---------------------------------------------------------------------------------------------------


class Reused:
    """A loader that gives tensors of many sizes and lets go of each at once, so that memory is used again and again."""

    def __init__(self, number: int, *, pinned: bool) -> None:
        self.number, self.pinned = number, pinned
        self.sums: list[float] = []

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        draw = random.Random(3)  # noqa: S311
        for index in range(self.number):
            values = torch.full((draw.choice([1, 50, 3000]), WIDTH), float(index % 7))
            values[-1] = index
            self.sums.append(values.double().sum().item())
            x = torch.ones(SAMPLES, WIDTH)
            yield {"values": values.pin_memory() if self.pinned else values, "x": x.pin_memory() if self.pinned else x}


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_micro_batches_arrive_whole(device: torch.device, pinned: bool) -> None:
    """While the device computes, the next one is copied; none of them is read too early, or written over too early."""
    if pinned and device.type == "cpu":
        pytest.skip("memory is pinned for an accelerator")
    ones, large = torch.ones(WIDTH, 1, device=device), torch.ones(256, 256, device=device)
    seen: list[Tensor] = []

    def slow_forward(model: nn.Module, batch: dict[str, Tensor]) -> ForwardOutput:
        for _ in range(10 if has_streams(device) else 1):  # so that the host and the copies are far ahead of the device
            torch.mm(large, large)
        seen.append(torch.mm(batch["values"], ones))
        return ForwardOutput(model(batch["x"]).sum(), SAMPLES)

    model = make_model(device)
    trainer = sgd_trainer(model, slow_forward, lr=1e-6)
    loader = Reused(4 * STEPS * UPDATES, pinned=pinned)
    trainer.run(loader, max_epochs=1)
    assert [rows.double().sum().item() for rows in seen] == loader.sums


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_an_evaluation_of_memory_that_is_written_over(device: torch.device, pinned: bool) -> None:
    """A loader may give all of its micro-batches in one buffer, since they are evaluated one after the other."""
    if pinned and device.type == "cpu":
        pytest.skip("memory is pinned for an accelerator")
    large = torch.ones(256, 256, device=device)

    def buffer() -> Iterator[Tensor]:
        values = torch.empty(20_000, WIDTH)
        values = values.pin_memory() if pinned else values
        for number in range(20):
            yield values.fill_(number)

    def slow_forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        for _ in range(20 if has_streams(device) else 1):
            torch.mm(large, large)
        return ForwardOutput(torch.mm(x, model.get_parameter("weight").t()).sum(), len(x))

    model = nn.Linear(WIDTH, 1, bias=False).to(device)
    nn.init.ones_(model.weight)
    state = create_evaluator(model, slow_forward).run(buffer())
    assert state.metrics["loss"] == pytest.approx(WIDTH * 9.5, rel=1e-6)


# --- durability -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(device: torch.device, tmp_path: Path) -> None:
    """Dropout on the device and a generator of the host: stopped in the middle of an epoch, built anew, and continued."""

    def run(place: Path, *, seed: int, **until: int) -> Any:
        model = make_model(device, dropout=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        trainer = create_trainer(model, optimizer, forward, accumulation_steps=STEPS)
        Checkpoint(place, every=2).attach(trainer)
        torch.manual_seed(seed)  # the accelerator too
        trainer.run(batches(), **until)
        generators = [torch.get_rng_state(), *[state for _, _, state in RandomState([device], [])._on_devices]]
        return bit_by_bit([model.state_dict(), optimizer.state_dict(), generators])

    whole = run(tmp_path / "whole", seed=3, max_epochs=2)
    run(tmp_path / "broken", seed=3, max_iters=UPDATES // 2 + 1)
    assert run(tmp_path / "broken", seed=4, max_epochs=2) == whole


def test_metrics_of_a_resumed_run(device: torch.device, tmp_path: Path) -> None:
    """Metrics of Ignite that add up on the device have the values of an uninterrupted run after a resume in the epoch."""

    def run(place: Path, **until: int) -> dict[str, Any]:
        model = make_model(device)

        def forward(model: nn.Module, batch: Batch) -> ForwardOutput:
            logits = model(batch[0])
            return ForwardOutput(cross_entropy(logits, batch[1], reduction="sum"), len(batch[1]), outputs=(logits, batch[1]))

        def share_of_ones(_predicted: Tensor, y: Tensor) -> float:
            return float((y == 1).float().mean())

        trainer = sgd_trainer(model, forward)
        attach_metric(trainer, Accuracy(device=device), "accuracy")
        attach_metric(trainer, MeanLoss(cross_entropy, device=device), "mean_loss")
        attach_metric(trainer, EpochMetric(share_of_ones, check_compute_fn=False, device=device), "share_of_ones")
        Checkpoint(place, every=1).attach(trainer)
        trainer.run(batches(), **until)
        return {name: float(value) for name, value in trainer.state.metrics.items()}

    whole = run(tmp_path / "whole", max_epochs=1)
    assert run(tmp_path / "broken", max_iters=3) == {}  # they are computed when the epoch ends
    assert run(tmp_path / "broken", max_epochs=1) == whole
    assert {*whole} == {"accuracy", "mean_loss", "share_of_ones"}


@pytest.mark.slow
def test_a_checkpoint_is_of_one_moment(device: torch.device, tmp_path: Path) -> None:
    """Each holds the state of its update bit by bit, while the device and the host continue to train."""

    def build() -> tuple[Trainer, Callable[[], list[Any]]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        trainer = create_trainer(model, optimizer, lambda model, x: ForwardOutput(model(x).square().sum(), len(x)))
        return trainer, lambda: [dict(model.state_dict()), [optimizer.state[p]["exp_avg"] for p in model.parameters()]]

    data = [torch.randn(8, 512, generator=torch.Generator().manual_seed(index)) for index in range(UPDATES)]
    trainer, state = build()
    expected: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: expected.append(copied_to_host(state())))
    trainer.run(data, max_epochs=1)

    trainer, _ = build()  # in a run of its own, in which nothing but the checkpoint waits for the device
    Checkpoint(tmp_path, every=1, keep=UPDATES).attach(trainer)
    large = torch.ones(512, 512, device=device)

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep_the_device_busy() -> None:
        for _ in range(20 if has_streams(device) else 1):
            torch.mm(large, large)

    trainer.run(data, max_epochs=1)
    found = find(tmp_path)
    assert [entry.manifest.update for entry in found if entry.manifest] == [*range(1, UPDATES + 1)]
    for entry, (weights, moments) in zip(found, expected, strict=True):
        with CheckpointReader(entry.path) as stored:
            saved = read_entry(stored, "model")
            states = read_entry(stored, "optimizer")["state"].values()
        assert all(torch.equal(saved[name], weight) for name, weight in weights.items())
        assert all(torch.equal(state["exp_avg"], moment) for state, moment in zip(states, moments, strict=True))


def test_a_copy_for_a_checkpoint_is_pinned(device: torch.device) -> None:
    """So that the run waits for the bus alone."""
    weight = make_model(device).get_parameter("up.weight").detach()
    (copied,) = Snapshot().take({"weight": Piece(weight, (0, 0), tuple(weight.shape))}).values()
    assert copied.data.is_pinned() == has_streams(device)
    assert torch.equal(copied.data, weight.cpu())


def test_digests_are_those_of_the_host(device: torch.device) -> None:
    """What `StateConsistency` compares over ranks depends on bits alone, and not on where they lie."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "matrix": torch.randn(33, 7, generator=generator),
        "half": torch.randn(129, generator=generator).bfloat16(),
        "wide": torch.randn(5, generator=generator).double(),
        "number": torch.tensor(3),
        "none": torch.empty(0),
        "flags": torch.tensor([True, False, True]),
    }
    assert tensor_digests({name: tensor.to(device) for name, tensor in tensors.items()}) == tensor_digests(tensors)


def test_a_seed_makes_updates_repeatable(device: torch.device) -> None:
    """With `seed=`, dropout on the device is a function of it and of the update, whatever was drawn before."""
    ends = []
    for drawn in (0, 7):
        model = make_model(device, dropout=0.5)
        trainer = sgd_trainer(model, seed=5)
        torch.rand(drawn, device=device)
        trainer.run(batches(), max_epochs=1)
        ends.append(bit_by_bit(model.state_dict()))
    assert ends[0] == ends[1]


# --- handlers ---------------------------------------------------------------------------------------------------------------


def test_handlers_that_look_at_the_device(device: torch.device) -> None:
    """Times of the device, its memory, its cache, averages on the host, and an evaluation; all in one run."""
    model = make_model(device)
    trainer = create_trainer(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), forward, accumulation_steps=STEPS
    )
    timer, metrics, average = StepTimer(), TrainingMetrics(memory=True), ModelEMA(0.5, warm_up=False, device="cpu")
    timer.attach(trainer)
    metrics.attach(trainer, Events.ITERATION_COMPLETED(every=4))
    average.attach(trainer)
    EmptyCache().attach(trainer, Events.ITERATION_COMPLETED(every=3))
    expected = on_host(model)

    @trainer.on(Events.ITERATION_COMPLETED)
    def average_by_hand() -> None:
        expected[:] = [(old + new) / 2 for old, new in zip(expected, on_host(model), strict=True)]

    trainer.run(batches(), max_epochs=1)
    published = trainer.state.metrics
    assert published["host_memory"] > 0
    assert ("memory_peak" in published) == (device.type in ("cuda", "xpu"))
    assert bool(timer.summary(device=True)) == has_streams(device)
    with average.swapped_in():
        for ours, by_hand in zip(on_host(model), expected, strict=True):
            torch.testing.assert_close(ours, by_hand)


def test_an_evaluation_is_that_of_the_host(device: torch.device) -> None:
    """Micro-batches are moved for it too."""
    found = []
    for place in (torch.device("cpu"), device):
        model = make_model(place)
        evaluator = create_evaluator(model, forward)
        evaluator.run(batches(4))
        found.append(evaluator.state.metrics["loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
