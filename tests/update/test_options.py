"""The rare settings of an update: the sum in place of the mean, and gradients that loggers can read after the update."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW

import cuts
from bits import bit_by_bit
from ignite_train import StaticLossScaling, TrainEvents, UpdateOptions, create_trainer
from ignite_train.device import to_host
from ranks import run_ranks
from tiers import accelerated

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adam": lambda p: Adam(p, lr=0.01, fused=True),
    "momentum": lambda p: SGD(p, lr=0.01, momentum=0.9, fused=True),
    "sgd": lambda p: SGD(p, lr=0.01, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=0.01, fused=True),
    "unfused": lambda p: AdamW(p, lr=0.01),
}


def test_options_are_a_value():
    """They cannot be changed, they are equal if their settings are, and they travel to other processes."""
    options = UpdateOptions(uneven="error", give_up_after=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.uneven = "all"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == options == UpdateOptions(uneven="error", give_up_after=None)
    assert options != UpdateOptions()


# --- the sum in place of the mean ---


def by_hand(sizes: list[int], max_norm: float | None) -> tuple[Tensor, list[float], list[float]]:
    """Weights after one SGD step an update along the gradient of the sum; its norms, and the losses per unit of weight."""
    parameters = torch.tensor([0.3, -0.2, 0.1, 0.05], dtype=torch.float64)
    norms, losses = [], []
    for x, y, w in cuts.cut(cuts.samples(), sizes):
        inputs = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
        residual = inputs @ parameters - y
        gradient = 2 * (w * residual) @ inputs
        norms.append(float(gradient.norm()))
        losses.append(float((w * residual**2).sum() / w.sum()))
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norms[-1] + 1e-6))
        parameters = parameters - 1e-3 * clip * gradient
    return parameters, norms, losses


def along_the_sum(shards: list[list[int]], steps: int, way: str, max_norm: float | None, scale: float) -> list[Any]:
    model = cuts.linear()
    trainer = create_trainer(
        DistributedDataParallel(model) if way == "ddp" else model,
        SGD(model.parameters(), lr=1e-3),
        cuts.forward,
        accumulation_steps=steps,
        max_grad_norm=max_norm,
        loss_scaling=StaticLossScaling(scale),
        options=UpdateOptions(normalize=False, reduction=way),  # type: ignore[arg-type]
    )
    records: list[Any] = []
    seen: list[float] = []
    trainer.add_event_handler(
        TrainEvents.GRADIENTS_READY,
        lambda: seen.append(float(torch.cat([g.flatten() for g in trainer.gradients().values()]).norm())),
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: records.append(trainer.state.update_output))
    trainer.run(cuts.shard(shards))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return [weights, [r.grad_norm for r in records], [r.loss for r in records], seen]


def check_sum(outcome: list[Any], sizes: list[int], max_norm: float | None) -> None:
    weights, norms, losses = by_hand(sizes, max_norm)
    torch.testing.assert_close(torch.tensor(outcome[0], dtype=torch.float64), weights, rtol=1e-12, atol=1e-12)
    assert outcome[1] == pytest.approx(norms, rel=1e-12)
    assert outcome[2] == pytest.approx(losses, rel=1e-12)
    assert outcome[3] == pytest.approx(norms, rel=1e-12)


@pytest.mark.parametrize("max_norm", [None, 20.0])
def test_the_sum_of_the_gradients(max_norm):
    """`normalize=False` steps along the gradient of the sum, clips that, and reports the loss per sample: as by hand."""
    check_sum(along_the_sum([[5, 3, 4, 4]], 2, "auto", max_norm, 8.0), [8, 8], max_norm)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit"])
def test_the_sum_over_ranks(way):
    """On two ranks, whose hooks may average, it is still the sum over both."""
    for outcome in run_ranks(along_the_sum, [[5], [3]], 1, way, 20.0, 8.0):
        check_sum(outcome, [8], 20.0)


@accelerated
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_the_device_steps_along_the_sum_too(monkeypatch, build, micro_batches, max_norm):
    """A step that is queued on a device, here the CPU, has the bits of the one that the host decides."""
    arguments = {"optimizer": OPTIMIZERS["adagrad"], "normalize": False, "max_grad_norm": max_norm}
    here = build(**arguments)
    here.trainer.run(micro_batches)
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    _, _, trainer = there = build(**arguments)
    queued: list[Any] = []
    step_if = type(trainer.process.gather.stepper).step_if
    monkeypatch.setattr(type(trainer.process.gather.stepper), "step_if", lambda *a: (queued.append(1), step_if(*a)))
    trainer.run(micro_batches)
    assert len(queued) == len(micro_batches)
    assert bit_by_bit([here.model.state_dict(), here.optimizer.state_dict()]) == bit_by_bit(
        [there.model.state_dict(), there.optimizer.state_dict()]
    )


# --- gradients that stay ---


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kept_gradients_are_the_clipped_mean(monkeypatch, build, micro_batches, name, where):
    """After each step `.grad` is what was stepped along, also where the factor was folded, and the run has the same bits."""
    if where == "device":
        monkeypatch.setattr(to_host, "_HOST", "nowhere")
    kept = build(optimizer=OPTIMIZERS[name], accumulation_steps=2, max_grad_norm=0.1, keep_gradients=True)
    usual = build(optimizer=OPTIMIZERS[name], accumulation_steps=2, max_grad_norm=0.1)
    seen: list[tuple[float, list[Tensor]]] = []

    @kept.trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        output = kept.trainer.state.update_output
        assert output is not None
        gradients = [parameter.grad for parameter in kept.model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        seen.append((output.clip_coefficient, [gradient.clone() for gradient in gradients if gradient is not None]))

    means: list[list[Tensor]] = []
    usual.trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: means.append([*usual.trainer.gradients().values()]))
    for setup in (kept, usual):
        setup.trainer.run(micro_batches, max_epochs=2)
    assert len(seen) == len(means) == 6
    for (clip, gradients), mean in zip(seen, means, strict=True):
        assert clip < 1.0
        torch.testing.assert_close(gradients, [clip * gradient for gradient in mean], rtol=3e-7, atol=0.0)
    assert kept.contents() == usual.contents()
    assert all(parameter.grad is None for parameter in usual.model.parameters())


def test_nothing_is_kept_of_a_skip_or_an_error(build, micro_batches):
    """After a skip, and after an update that broke off, `.grad` is None; and the next update does not add to what was kept."""
    broken: list[int] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        loss = (model(x) - y).square().sum()
        return loss * (float("nan") if setup.trainer.state.iteration == 2 else 1.0), len(y)

    setup = build(forward, keep_gradients=True, on_nonfinite="skip")
    trainer = setup.trainer
    present: list[bool] = []

    def look() -> None:
        present.append(any(parameter.grad is not None for parameter in setup.model.parameters()))

    @trainer.on(TrainEvents.GRADIENTS_READY(once=4))
    def fail() -> None:
        broken.append(1)
        raise RuntimeError("on purpose")

    trainer.add_event_handler(Events.ITERATION_COMPLETED, look)
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.run(micro_batches)
    look()
    assert (present, broken) == ([True, False, True, False], [1])
