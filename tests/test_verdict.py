"""The verdict on the device: the step it queues is the one the host would have made, in every bit, and it leaves no trace.

No accelerator is needed: told that the CPU is none of the host's, the trainer takes the way of an accelerator on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW

from ignite_train import ForwardOutput, GaveUpError, NonFiniteError, TorchLossScaling, Trainer, TrainEvents, create_trainer, reading
from ignite_train.handlers import GradNormConsistency, StateConsistency
from ignite_train.statistics import Reduced
from ignite_train.stepping import Stepping
from ignite_train.verdict import _plain_and_divisor
from ranks import run_ranks

LR = 0.01
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=LR, weight_decay=0.1, fused=True),
    "adam": lambda p: Adam(p, lr=LR, amsgrad=True, fused=True),
    "momentum": lambda p: SGD(p, lr=LR, momentum=0.9, nesterov=True, fused=True),
    "sgd": lambda p: SGD(p, lr=LR, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=LR, fused=True),
}
EVENTS = (
    *(TrainEvents.MICRO_BATCH_STARTED, TrainEvents.BACKWARD_COMPLETED, TrainEvents.OUT_OF_MEMORY, TrainEvents.STEP_COMPLETED),
    *(TrainEvents.STEP_SKIPPED, Events.ITERATION_COMPLETED, Events.COMPLETED),
)
HUGE = 3e38  # times itself no float32


@pytest.fixture
def elsewhere(monkeypatch) -> None:
    """The CPU counts as an accelerator."""
    monkeypatch.setattr(reading, "_HOST", "nowhere")


@pytest.fixture
def queued(monkeypatch) -> list[bool]:
    """Of each step that was queued ahead, whether the device was to make it."""
    return _watch(monkeypatch.setattr)


def _watch(setattr_: Callable[..., None]) -> list[bool]:
    queued: list[bool] = []
    unless = Stepping.unless

    def note(self: Stepping, withheld: Tensor, divisor: Tensor) -> None:
        queued.append(withheld.item() == 0.0)
        unless(self, withheld, divisor)

    setattr_(Stepping, "unless", note)
    return queued


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    x, y = batch
    return ForwardOutput(mse_loss(model(x), y, reduction="sum"), len(y), {"samples": len(y), "first": x.sum()})


def data(*, spoilt: bool) -> list[tuple[Tensor, Tensor]]:
    """Twelve micro-batches; one in the middle overflows, and two have no sample."""
    generator = torch.Generator().manual_seed(1)
    sizes = (3, 1, 4, 2, 3, 5, 0, 0, 2, 6, 1, 1)
    batches = [(torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)) for size in sizes]
    if spoilt:
        batches[4] = (batches[4][0] * HUGE, batches[4][1])
    return batches


def train(
    name: str, batches: list[Any], *, wrap: Callable[[nn.Module], nn.Module] = lambda model: model, **arguments: Any
) -> dict[str, Any]:
    """What can be seen of a run: state of everything, outputs, events, and how it ended."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = FUSED[name](model.parameters())
    trainer = create_trainer(wrap(model), optimizer, forward, accumulation_steps=2, **arguments)
    outputs, events, error = [], [], ""
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(repr(trainer.state.output)))
    for event in EVENTS:
        trainer.add_event_handler(event, lambda event=event: events.append(event.name))
    try:
        trainer.run(batches)
    except (NonFiniteError, GaveUpError) as raised:
        error = str(raised)
    gradients = [parameter.grad for parameter in model.parameters()]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "trainer": trainer.state_dict()}
    return {"state": state, "outputs": outputs, "events": events, "error": error, "gradients": gradients}


CASES = [
    (name, {"max_grad_norm": clip, "on_nonfinite": policy, "loss_scaling": scaling and TorchLossScaling(2.0**10)})
    for name in FUSED
    for clip in (None, 0.05)
    for policy, scaling in (("raise", False), ("skip", False), ("raise", True))
]


@pytest.mark.parametrize("spoilt", [False, True], ids=["clean", "spoilt"])
@pytest.mark.parametrize(("name", "arguments"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_device_decides_as_the_host_does(monkeypatch, bits, name, arguments, spoilt):
    """Parameters, moments, counters, outputs, events, errors: in every bit those of the host's own verdict."""
    arguments = {key: value or None for key, value in arguments.items()}
    fresh = lambda: {**arguments, **({"loss_scaling": TorchLossScaling(2.0**10)} if arguments["loss_scaling"] else {})}  # noqa: E731
    monkeypatch.setattr(reading, "_HOST", "nowhere")
    onlooker = Trainer.onlooker
    monkeypatch.setattr(Trainer, "onlooker", lambda self: "the test")
    there = train(name, data(spoilt=spoilt), **fresh())
    monkeypatch.setattr(Trainer, "onlooker", onlooker)
    queued = _watch(monkeypatch.setattr)
    ahead = train(name, data(spoilt=spoilt), **fresh())

    assert bits(ahead) == bits(there)
    assert ahead["gradients"] == [None] * 4
    fails = spoilt and arguments["on_nonfinite"] == "raise" and not arguments["loss_scaling"]
    assert bool(ahead["error"]) == fails
    first = [] if name in ("sgd", "adagrad") else [1]
    assert queued == [True, True, not spoilt, False, True, True][len(first) : 3 if fails else None]
