"""An update that is skipped leaves no trace in the buffers that forward moves; where they stay spoilt, a message says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ignite_train import ForwardOutput, NonFiniteError, StaticLossScaling, TrainEvents, UpdateOptions, create_trainer


class Model(nn.Module):
    """With running statistics, a queue that is written in place, and a mean that forward assigns."""

    queue: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("queue", torch.zeros(2, 4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        keys = out.detach().mean(0)
        self.queue.copy_(torch.stack([self.queue[1], keys]))
        self.mean = 0.9 * self.mean + 0.1 * keys
        return out + 0.01 * self.queue[0]


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def made() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.125)


WAYS: dict[str, dict[str, Any]] = {
    "not finite": {"options": UpdateOptions(on_nonfinite="skip")},
    "overflow": {"loss_scaling": StaticLossScaling(256.0)},
}


@pytest.mark.parametrize("way", WAYS)
def test_buffers_are_those_of_a_loop_without_the_bad_micro_batch(way: str) -> None:
    """Running means that were NaN once would stay it, and a queue would make the next updates NaN too."""
    data = [torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected, optimizer = made()
    for x in data:
        (forward(expected, x).loss / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=1, **WAYS[way])
    trainer.run([*data[:2], data[0] * math.nan, *data[2:]], max_epochs=1)
    assert (trainer.state.num_steps, trainer.state.num_skipped) == (4, 1)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("way", WAYS)
def test_running_statistics_of_a_teacher_are_put_back_too(way: str) -> None:
    """Of a module that forward refers to: one that normalises by its own micro-batches, as in Mean Teacher and BYOL."""
    data = [torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    model, optimizer = made()
    teacher, expected = nn.Sequential(nn.BatchNorm1d(3)), nn.Sequential(nn.BatchNorm1d(3))
    for x in data:
        expected(x)

    def follow(model: nn.Module, x: Tensor) -> ForwardOutput:
        with torch.no_grad():
            target = teacher(x).mean()
        return ForwardOutput((model(x) - target).square().sum(), len(x))

    trainer = create_trainer(model, optimizer, follow, **WAYS[way])
    trainer.run([*data[:2], data[0] * math.nan, *data[2:]], max_epochs=1)
    assert trainer.state.num_skipped == 1
    for name, value in expected.state_dict().items():
        assert torch.equal(teacher.state_dict()[name], value), name


@pytest.mark.parametrize("spoils", [True, False], ids=["in the data", "in the loss"])
def test_an_error_names_the_buffer_that_is_spoilt(spoils: bool) -> None:
    """Without skipping no copies are made. The next run would evaluate NaN, although no parameter was moved."""
    model, optimizer = made()
    x = torch.randn(8, 3)
    if spoils:
        trainer = create_trainer(model, optimizer, forward)
    else:
        trainer = create_trainer(model, optimizer, lambda model, x: ForwardOutput(forward(model, x).loss * math.nan, len(x)))
    with pytest.raises(NonFiniteError) as caught:
        trainer.run([x * math.nan if spoils else x], max_epochs=1)
    notes = getattr(caught.value, "__notes__", [])
    assert [note.partition(" has a NaN")[0] for note in notes] == (["the buffer 'queue'"] if spoils else [])


class Observed(nn.Module):
    """With a buffer that the first forward sizes, as the observers of torch.ao.quantization do."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("largest", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.largest.resize_(4).copy_(out.detach().amax(0))
        return out


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_forward_sizes_has_its_first_size_again(way: str) -> None:
    """Also where the skipped update is the first, before which it is empty."""
    torch.manual_seed(0)
    model = Observed()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.125), forward, **WAYS[way])
    sizes: list[int] = []
    trainer.add_event_handler(TrainEvents.STEP_SKIPPED, lambda: sizes.append(len(model.largest)))
    trainer.run([torch.full((8, 3), math.nan), torch.ones(8, 3)], max_epochs=1)
    assert (sizes, trainer.state.num_steps, len(model.largest)) == ([0], 1, 4)
