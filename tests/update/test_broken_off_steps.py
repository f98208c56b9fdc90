"""An update that an exception breaks off: it counts if it has moved the parameters, and is done again if it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ignite_train import TorchLossScaling, Trainer, TrainState, create_trainer
from ignite_train.device import to_host
from ignite_train.fast.queued_step import QueuedStep
from tiers import accelerated

UPDATES, BROKEN = 5, 3


class StopError(Exception):
    """Raised once."""


class Scaling(TorchLossScaling):
    """Raises once, after it has taken note of the third update."""

    def __init__(self, scale: float, *, raises: bool) -> None:
        super().__init__(scale)
        self.has_raised = not raises

    def update(self, *, overflow: bool) -> None:
        super().update(overflow=overflow)
        if self.good_updates == BROKEN and not self.has_raised:
            self.has_raised = True
            raise StopError


class Refusing:
    """Raises once about the sums of the third update, which it does not veto on the device."""

    payload_size = 1
    updates = 0

    def payload(self) -> list[float]:
        return [0.0]

    def on_reduced(self, sums: list[float]) -> None:  # noqa: ARG002
        self.updates += 1
        if self.updates == BROKEN:
            raise StopError

    def vetoes(self, sums: Tensor) -> Tensor:
        return sums.new_zeros((), dtype=torch.bool)

    def settle(self) -> None:
        """Nothing is left."""


def forward(model: nn.Module, x: Tensor, state: TrainState) -> Tensor:
    """Depends on what it has carried, and on how often."""
    state.carried["count"] = state.carried.get("count", torch.zeros(())) + 1
    return (model(x) + 0.1 * state.carried["count"]).square().mean()


def make(site: str | None) -> tuple[Trainer, nn.Module]:
    """A trainer whose third update is broken off at `site`."""
    torch.manual_seed(0)
    model, seen = nn.Linear(3, 1), list[Any]()

    def transform(output: Any) -> Any:
        seen.append(output)
        if site == "transform" and len(seen) == BROKEN:
            raise StopError
        return output

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    scaling = Scaling(8.0, raises=site == "scaling")
    trainer = create_trainer(
        model, optimizer, forward, accumulation_steps=2, output_transform=transform, loss_scaling=scaling, max_grad_norm=0.5
    )
    if site == "sums":
        trainer.piggybacks.append(Refusing())
    return trainer, model


def train(trainer: Trainer) -> None:
    generator = torch.Generator().manual_seed(1)
    trainer.run([torch.randn(4, 3, generator=generator) for _ in range(2 * UPDATES)], max_epochs=1)


def outcome(trainer: Trainer, model: nn.Module) -> list[Any]:
    state = trainer.state
    counters = [state.iteration, state.num_steps, state.num_skipped, state.num_micro_batches, state.carried["count"].item()]
    update = {**trainer.process.state_dict(), "scaled_by": ""}  # the policy that raises has a name of its own
    return [counters, update, *(parameter.tolist() for parameter in model.parameters())]


@accelerated
@pytest.mark.parametrize(
    ("device", "site", "steps"),
    [
        ("accelerator", "transform", 3),
        ("accelerator", "sums", 3),
        ("accelerator", "scaling", 3),
        ("host", "transform", 2),
        ("host", "sums", 2),
        ("host", "scaling", 3),
    ],
)
def test_a_run_that_continues_makes_each_step_once(device: str, site: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator the step is made before most that can fail, and on the host after it. The bits are the same."""
    if device == "accelerator":
        monkeypatch.setattr(to_host, "_HOST", "nowhere")
    queued = counted(monkeypatch)
    trainer, model = make(site)
    with pytest.raises(StopError):
        train(trainer)
    counters = trainer.state.iteration, trainer.state.num_steps, trainer.state.num_micro_batches
    assert counters == (steps, steps, 2 * steps)
    number = BROKEN - 1 if site == "sums" else BROKEN
    assert queued == [True] * (number if device == "accelerator" else 0)
    train(trainer)
    undisturbed = make(None)
    train(undisturbed[0])
    assert outcome(trainer, model) == outcome(*undisturbed)


def test_a_step_that_a_failed_device_cannot_tell_of_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that broke the update off is the one that is raised, and not that of the device."""
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    trainer, _ = make("sums")

    def fail(_tensor: Tensor) -> float:
        raise RuntimeError("the device has failed")

    with monkeypatch.context() as failed:
        failed.setattr(Tensor, "item", fail)
        with pytest.raises(StopError):
            train(trainer)
    assert (trainer.state.num_steps, trainer.state.num_micro_batches) == (2, 4)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each update whose numbers are read from a device, whether its step was queued."""
    found: list[bool] = []
    ordinary: Callable[..., Any] = QueuedStep.read

    def call(*arguments: Any) -> Any:
        result = ordinary(*arguments)
        found.append(arguments[0].stepper.watch.moved)
        return result

    monkeypatch.setattr(QueuedStep, "read", call)
    return found


def test_a_step_that_the_device_withheld_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are lost, but not whether it was made."""
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    trainer, model = make("sums")
    before = [parameter.tolist() for parameter in model.parameters()]
    data = torch.full((4, 3), torch.inf)
    monkeypatch.setattr(Refusing, "updates", BROKEN - 1)
    with pytest.raises(StopError):
        trainer.run([data] * 2, max_epochs=1)
    assert (trainer.state.num_steps, trainer.state.num_micro_batches) == (0, 0)
    assert [parameter.tolist() for parameter in model.parameters()] == before
