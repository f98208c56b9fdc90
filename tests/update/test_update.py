"""The update: what happens in which order, and that the numbers are those of the textbook."""

from __future__ import annotations

import copy
import gc
import logging
import math
import random
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.nn.functional import mse_loss

from ignite_train import (
    DeepSpeedLossScaling,
    FairseqLossScaling,
    ForwardOutput,
    GradientAccessError,
    LossScaleFloorError,
    NonFiniteError,
    StaticLossScaling,
    TorchLossScaling,
    TrainEvents,
    UpdateOptions,
    create_trainer,
)
from ignite_train.model.gradients import Gradients
from ignite_train.model.random_state import Draws


class Weights(nn.Module):
    """Nothing but a vector of weights: a test decides what to make of them."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values))


def quarter(model: Weights, factor: float) -> torch.Tensor:
    """A mean loss with gradient 0.25 · factor on every weight."""
    return (model.weight * (0.25 * factor)).sum()


def record_weights(trainer: Any, model: Weights) -> list[torch.Tensor]:
    """The weights before the run and after each update, into a list that fills while it runs."""
    weights = [model.weight.detach().clone()]
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: weights.append(model.weight.detach().clone()))
    return weights


def deltas(weights: list[torch.Tensor]) -> list[list[float]]:
    return [(after - before).tolist() for before, after in pairwise(weights)]


def mean_gradients(model: nn.Module, batches: list[Any]) -> list[torch.Tensor]:
    """The gradient of the mean squared error over all samples, by one backward over one batch."""
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return list(torch.autograd.grad(mse_loss(model(x), y), list(model.parameters())))


@pytest.mark.parametrize("size", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("fused", [True, False])
def test_a_sample_size_may_be_a_fraction(size, fused):
    """The step is along the gradient divided by it, also where that makes it larger."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    create_trainer(model, optimizer, lambda model, x: ForwardOutput(model(x).sum(), size)).run([torch.ones(1, 1)])
    assert model.weight.item() == -0.5 / size


def test_an_ordinary_norm_is_taken_once(monkeypatch):
    """Only one that float32 cannot add up is taken again, in a way that takes more time."""
    monkeypatch.setattr(Gradients, "scaled_norm", None)
    model = Weights(1.0, 2.0)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), quarter)
    trainer.run([4.0, 8.0])
    assert trainer.state.update_output.grad_norm == pytest.approx(2.0 * math.sqrt(2.0))


# --- order ---


def test_a_zero_grad_that_was_replaced_is_called():
    """Of the object, as something that counts or times its calls replaces it."""
    model, calls = nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    zero_grad = optimizer.zero_grad
    optimizer.zero_grad = lambda set_to_none=True: calls.append(set_to_none) or zero_grad(set_to_none)
    create_trainer(model, optimizer, lambda model, x: model(x).sum()).run([torch.ones(1, 1)] * 2)
    assert len(calls) >= 2
    assert {*calls} == {True}


def test_order_of_calls():
    """Forward and backward over the group, the norm, one step on finished gradients, then the scale, then clearing."""
    model, calls = Weights(1.0), []

    class Scaling(TorchLossScaling):
        def update(self, *, overflow: bool) -> None:
            calls.append(("scale", overflow, model.weight.item()))
            super().update(overflow=overflow)

    class Optimizer(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            calls.append(("step", model.weight.grad.item(), scaling.scale))
            super().step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT002  # torch's signature
            calls.append(("clear", set_to_none, scaling.scale))
            super().zero_grad(set_to_none)

    def forward(model: Weights, factor: float) -> ForwardOutput:
        calls.append(("forward", model.weight.grad is None))
        return ForwardOutput(quarter(model, factor), sample_size=1)

    scaling = Scaling(256.0, growth_interval=1)
    trainer = create_trainer(
        model, Optimizer(model.parameters(), lr=1.0), forward, accumulation_steps=2, max_grad_norm=0.125, loss_scaling=scaling
    )
    model.weight.register_post_accumulate_grad_hook(lambda weight: calls.append(("backward", weight.grad.item())))
    trainer.add_event_handler(
        TrainEvents.GRADIENTS_READY, lambda: calls.append(("ready", trainer.state.output.grad_norm, model.weight.item()))
    )
    trainer.run([1.0, 1.0])

    clipped = pytest.approx(0.125, rel=1e-5)
    assert calls == [
        ("forward", True),
        ("backward", 64.0),  # 256 · 0.25: scaled
        ("forward", False),
        ("backward", 128.0),  # accumulated
        ("ready", 0.25, 1.0),  # unscaled, normalised, not yet clipped; nothing has moved
        ("step", clipped, 256.0),  # the scale of this update's backward
        ("scale", False, pytest.approx(0.875, rel=1e-5)),  # after the step
        ("clear", True, 512.0),
    ]


COUNTERS: dict[Any, str] = {
    Events.STARTED: "epoch",
    Events.EPOCH_STARTED: "epoch",
    Events.GET_BATCH_STARTED: "iteration",
    Events.GET_BATCH_COMPLETED: "iteration",
    Events.ITERATION_STARTED: "iteration",
    TrainEvents.MICRO_BATCH_STARTED: "num_micro_batches",
    TrainEvents.FORWARD_COMPLETED: "num_micro_batches",
    TrainEvents.BACKWARD_COMPLETED: "num_micro_batches",
    TrainEvents.GRADIENTS_READY: "iteration",
    TrainEvents.STEP_COMPLETED: "num_steps",
    TrainEvents.STEP_SKIPPED: "num_skipped",
    TrainEvents.OUT_OF_MEMORY: "iteration",
    Events.ITERATION_COMPLETED: "iteration",
    Events.EPOCH_COMPLETED: "epoch",
    Events.COMPLETED: "epoch",
}
ORDER = [
    "STARTED 0",
    "EPOCH_STARTED 1",
    "GET_BATCH_STARTED 0",
    "GET_BATCH_COMPLETED 0",
    "ITERATION_STARTED 1",
    "MICRO_BATCH_STARTED 1",
    "FORWARD_COMPLETED 1",
    "BACKWARD_COMPLETED 1",
    "MICRO_BATCH_STARTED 2",
    "FORWARD_COMPLETED 2",
    "BACKWARD_COMPLETED 2",
    "GRADIENTS_READY 1",
    "STEP_COMPLETED 1",
    "ITERATION_COMPLETED 1",
    "GET_BATCH_STARTED 1",
    "GET_BATCH_COMPLETED 1",
    "ITERATION_STARTED 2",
    "MICRO_BATCH_STARTED 3",
    "FORWARD_COMPLETED 3",
    "BACKWARD_COMPLETED 3",
    "MICRO_BATCH_STARTED 4",
    "FORWARD_COMPLETED 4",
    "BACKWARD_COMPLETED 4",
    "GRADIENTS_READY 2",
    "STEP_SKIPPED 1",
    "ITERATION_COMPLETED 2",
    "GET_BATCH_STARTED 2",
    "GET_BATCH_COMPLETED 2",
    "ITERATION_STARTED 3",
    "MICRO_BATCH_STARTED 5",
    "FORWARD_COMPLETED 5",
    "BACKWARD_COMPLETED 5",
    "MICRO_BATCH_STARTED 6",
    "FORWARD_COMPLETED 6",
    "BACKWARD_COMPLETED 6",
    "GRADIENTS_READY 3",
    "STEP_COMPLETED 2",
    "ITERATION_COMPLETED 3",
    "EPOCH_COMPLETED 1",
    "COMPLETED 1",
]


def test_order_of_events():
    """Each event fires at its place with its counter counted on, over two steps and the skip between them."""
    model = Weights(0.0)
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        quarter,
        accumulation_steps=2,
        loss_scaling=TorchLossScaling(256.0),
    )
    fired = []

    def note(engine: Any, event: Any, counter: str) -> None:
        fired.append(f"{event.name} {getattr(engine.state, counter)}")

    for event, counter in COUNTERS.items():
        trainer.add_event_handler(event, note, event, counter)
    trainer.run([1.0, 1.0, 1.0, math.inf, 1.0, 1.0])

    assert fired == ORDER


def test_gradients_are_cleared_before_the_step_events(build, micro_batches):
    """When STEP_COMPLETED, STEP_SKIPPED or ITERATION_COMPLETED fires, no parameter has a gradient any more."""
    model, _, trainer = build(on_nonfinite="skip")
    x, y = micro_batches[1]
    left = []
    for event in (TrainEvents.STEP_COMPLETED, TrainEvents.STEP_SKIPPED, Events.ITERATION_COMPLETED):
        trainer.add_event_handler(event, lambda: left.extend(p.grad is None for p in model.parameters()))
    trainer.run([micro_batches[0], (x * math.nan, y)])
    assert left == [True] * (4 * len(list(model.parameters())))


# --- scale ---


@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize(
    ("scaling", "scales"),
    [
        (TorchLossScaling(256.0, growth_interval=2), [256, 256, 512, 512, 1024, 1024]),
        (FairseqLossScaling(256.0, scale_window=2), [256, 256, 512, 512, 1024, 1024]),
        (DeepSpeedLossScaling(256.0, scale_window=2), [256, 256, 256, 512, 512, 1024]),
    ],
    ids=["torch", "fairseq", "deepspeed"],
)
def test_a_growing_scale_does_not_change_the_step(scaling, scales, accumulation_steps):
    """Gradients are unscaled by the scale that their backward used: where it grows, the step is no smaller."""
    model = Weights(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    trainer = create_trainer(
        model, optimizer, quarter, accumulation_steps=accumulation_steps, loss_scaling=copy.deepcopy(scaling)
    )
    weights, used = record_weights(trainer, model), []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: used.append(trainer.state.output.loss_scale))
    trainer.run([1.0] * (6 * accumulation_steps))
    assert deltas(weights) == [[-0.03125]] * 6
    assert used == scales


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize("scale", [2.0**-8, 1.0, 2.0, 2.0**8, 2.0**16])
def test_scaling_cancels(scale, accumulation_steps, max_grad_norm, precision):
    """Whatever the scale, norm and clipping are those of the true gradient, and so is the step."""
    model = Weights(0.0, 0.0, 0.0, 0.0)
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        quarter,
        accumulation_steps=accumulation_steps,
        max_grad_norm=max_grad_norm,
        precision=precision,
        loss_scaling=StaticLossScaling(scale),
    )
    trainer.run([1.0] * accumulation_steps)
    assert model.weight.tolist() == [-0.25] * 4
    assert trainer.state.output.grad_norm == 0.5
    assert trainer.state.output.clip_coefficient == 1.0


def test_clipping_follows_accumulation():
    """Twelve samples in updates of 3 · 2, clipped to 0.1 at a learning rate of 1, take a weight from 5 to 4.9 to 4.8."""
    model = Weights(5.0)

    def forward(model: Weights, x: torch.Tensor) -> ForwardOutput:
        return ForwardOutput((model.weight * x).sum(), len(x))

    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=1.0), forward, accumulation_steps=3, max_grad_norm=0.1
    )
    weights = record_weights(trainer, model)
    trainer.run(list(torch.arange(1.0, 13.0).reshape(6, 2)))
    assert [weight.item() for weight in weights] == pytest.approx([5.0, 4.9, 4.8], abs=1e-6)


@pytest.mark.parametrize("max_grad_norm", [1e-3, 0.1, 1.0, 1e3])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_clipping_is_that_of_torch(build, micro_batches, max_grad_norm, scale):
    """What the optimizer steps on equals what `clip_grad_norm_` makes of the mean's gradient, to rounding."""
    model, optimizer, trainer = build(accumulation_steps=5, max_grad_norm=max_grad_norm, loss_scaling=StaticLossScaling(scale))
    reference = copy.deepcopy(model)
    for parameter, gradient in zip(reference.parameters(), mean_gradients(reference, micro_batches), strict=True):
        parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm)
    stepped_on = []
    optimizer.register_step_pre_hook(lambda *_: stepped_on.extend(p.grad.clone() for p in model.parameters()))
    trainer.run(micro_batches)
    for gradient, parameter in zip(stepped_on, reference.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=2e-6, atol=1e-7)  # the sums are in another order
    assert trainer.state.output.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    assert trainer.state.output.clip_coefficient == pytest.approx(min(1.0, max_grad_norm / (norm.item() + 1e-6)), rel=1e-6)


def test_nothing_is_clipped_unless_asked():
    """A gradient of norm 100 passes untouched by default."""
    model = Weights(0.0)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), quarter)
    trainer.run([400.0])
    assert model.weight.item() == -100.0


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_zero_gradient_is_legal(max_grad_norm):
    """A gradient of exactly zero makes a step, with norm 0 and no division by it."""
    model = Weights(1.0, 2.0)
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        quarter,
        max_grad_norm=max_grad_norm,
        loss_scaling=TorchLossScaling(),
    )
    trainer.run([0.0])
    assert (trainer.state.num_steps, trainer.state.output.grad_norm) == (1, 0.0)
    assert model.weight.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_norm(build, micro_batches, dtype, factor):
    """The norm is that of all gradients as one vector in float64, also where a square would leave the gradients' own dtype."""

    def forward(model: nn.Module, batch: Any) -> ForwardOutput:
        x, y = batch
        return ForwardOutput(mse_loss(model(x.to(dtype)), y.to(dtype), reduction="sum") * factor, 4)

    model, _, trainer = build(forward, dtype=dtype)
    loss = forward(model, micro_batches[2]).loss
    flat = torch.cat([gradient.double().flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])
    trainer.run(micro_batches[2:3])
    assert trainer.state.output.grad_norm == pytest.approx(torch.linalg.norm(flat / 4).item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_finite_gradients_are_no_overflow(dtype):
    """A million gradients of 60000 are finite, though neither their sum nor their squares fit into float16."""
    model = nn.Linear(1_000_000, 1, bias=False).to(dtype)
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-9),
        lambda model, _: (model.weight.float() * 60_000.0).sum() * 0.0 + (model.weight * 60_000.0).mean() * 1e6,
        loss_scaling=StaticLossScaling(1.0),
    )
    trainer.run([0])
    assert trainer.state.num_steps == 1
    assert trainer.state.output.grad_norm == pytest.approx(6e4 * 1e3, rel=1e-2)  # 60000 is not a bfloat16


# --- which mean ---


def test_unequal_micro_batches_weigh_their_samples(build, micro_batches):
    """In float64 five micro-batches of unequal size make the update of one batch of all their samples, to 1e-12."""
    batches = [(x.double(), y.double()) for x, y in micro_batches]
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    cut, one = build(accumulation_steps=5, dtype=torch.float64), build(dtype=torch.float64)
    cut.trainer.run(batches)
    one.trainer.run([whole])
    for left, right in zip(cut.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    assert cut.trainer.state.output.loss == pytest.approx(one.trainer.state.output.loss, rel=1e-12)


def test_a_bare_loss_is_a_mean_of_weight_one(build, micro_batches):
    """With a bare mean loss the update is the mean of the micro-batch means, however many samples each has."""
    model, optimizer, trainer = build(lambda model, batch: mse_loss(model(batch[0]), batch[1]), accumulation_steps=5)
    reference = copy.deepcopy(model)
    means = [mean_gradients(reference, [batch]) for batch in micro_batches]
    losses = [mse_loss(reference(x), y).item() for x, y in micro_batches]
    stepped_on = []
    optimizer.register_step_pre_hook(lambda *_: stepped_on.extend(p.grad.clone() for p in model.parameters()))
    trainer.run(micro_batches)
    for gradient, *parts in zip(stepped_on, *means, strict=True):
        torch.testing.assert_close(gradient, sum(parts) / 5, rtol=1e-6, atol=1e-7)
    assert trainer.state.output.sample_size == 5
    assert trainer.state.output.loss == pytest.approx(sum(losses) / 5, rel=1e-12)


def test_the_last_group_of_an_epoch_may_be_smaller(build, micro_batches):
    """Five micro-batches in pairs make three updates, and the last is divided by its own samples only."""
    paired, (model, _, by_hand) = build(accumulation_steps=2), build()
    sizes = []
    paired.trainer.add_event_handler(Events.ITERATION_STARTED, lambda engine: sizes.append(len(engine.state.batch)))
    paired.trainer.run(micro_batches)
    by_hand.run(
        [tuple(torch.cat(parts) for parts in zip(*micro_batches[a:b], strict=True)) for a, b in [(0, 2), (2, 4), (4, 5)]]
    )
    assert sizes == [2, 2, 1]
    assert paired.trainer.state.output.sample_size == 3
    for left, right in zip(paired.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("accumulation_steps", "sizes"),
    [
        (1, [1] * 5 + [1] * 5 + [1] * 5),
        (3, [3, 2] * 3),
        (9, [5] * 3),
        ([2, 1, 3], [2, 2, 1] + [1] * 5 + [3, 2]),
        ((4, 1), [4, 1] + [1] * 5 + [1] * 5),  # the last entry repeats
        (lambda update: update, [1, 2, 2, 4, 1, 5]),
        (lambda update: 1 + update % 2, [2, 1, 2, 1, 2, 1, 1, 1, 2, 1, 1]),
    ],
    ids=["one", "three", "more-than-an-epoch", "by-epoch", "last-repeats", "growing", "alternating"],
)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_accumulation_steps(build, micro_batches, accumulation_steps, sizes, sized):
    """The group's size is a number, one for each epoch, or a function of the update's number; no group spans two epochs."""

    class Unsized:
        def __iter__(self) -> Any:
            return iter(micro_batches)

    trainer, seen, numbers = build(accumulation_steps=accumulation_steps).trainer, [], []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: numbers.append(engine.state.output.num_micro_batches))
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda engine: seen.append(len(engine.state.batch)))
    trainer.run(micro_batches if sized else Unsized(), max_epochs=3)
    assert seen == numbers == sizes
    assert trainer.state.num_micro_batches == 15


def as_tuple(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x).sum() * 0.25, model(x)


def as_dict(model: nn.Module, x: torch.Tensor) -> Any:
    logits = model(x)
    return {"loss": logits.sum() * 0.25, "hidden": {"logits": logits, "list": [logits, None]}}


def as_logits(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x)


@pytest.mark.parametrize(
    ("call", "loss_of"),
    [
        (as_tuple, lambda output: output[0]),
        (as_dict, lambda output: output["loss"]),
        (as_logits, lambda output: output.sum() * 0.25),
    ],
    ids=["tuple", "nested-dict", "loss-outside"],
)
def test_what_else_the_model_returns_does_not_matter(call, loss_of):
    """Only the scalar loss is scaled and divided: a model that returns its loss beside others gets the same step of -0.25."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(self.linear.weight)

        def forward(self, x: torch.Tensor) -> Any:
            return call(self.linear, x)

    model = Model()
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        lambda model, x: loss_of(model(x)),
        accumulation_steps=4,
        loss_scaling=StaticLossScaling(2.0**8),
    )
    trainer.run([torch.ones(1, 1)] * 4)
    assert model.linear.weight.item() == -0.25


# --- what is reported ---


@pytest.mark.parametrize("as_tensors", [False, True], ids=["numbers", "tensors"])
def test_reported_sums_are_exact(as_tensors):
    """Loss is Σloss / Σsample_size; logs are sums, whichever micro-batches have them; scaling shows in neither."""
    model = Weights(0.0)

    def forward(model: Weights, number: int) -> ForwardOutput:
        logs = {"correct": 3 * number, f"only_{number}": 0.5}
        size: Any = 2 * number
        if as_tensors:
            logs, size = {name: torch.tensor(value) for name, value in logs.items()}, torch.tensor([size])
        return ForwardOutput((model.weight + 2.0**-20 + number).sum(), size, logs)

    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        forward,
        accumulation_steps=4,
        loss_scaling=StaticLossScaling(2.0**9),
    )
    trainer.run([1, 2, 3, 4])
    output = trainer.state.output
    assert output.loss == (10 + 4 * 2.0**-20) / 20
    assert (output.sample_size, output.num_micro_batches, output.loss_scale) == (20, 4, 2.0**9)
    assert output.logs == {"correct": 30, "only_1": 0.5, "only_2": 0.5, "only_3": 0.5, "only_4": 0.5}
    assert output.applied
    assert output.skipped_reason is None


@pytest.mark.parametrize(
    "event", [TrainEvents.STEP_COMPLETED, Events.ITERATION_STARTED, TrainEvents.GRADIENTS_READY], ids=lambda event: event.name
)
def test_reported_learning_rates_are_those_used(event):
    """Wherever a schedule hangs, `learning_rates` holds the rate of each group that this update stepped with."""
    model = nn.ModuleList([Weights(0.0), Weights(0.0)])
    groups = [{"params": model[0].parameters(), "lr": 1.0}, {"params": model[1].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups)
    trainer = create_trainer(model, optimizer, lambda model, factor: quarter(model[0], factor) + quarter(model[1], factor))
    reported, moved = [], []

    def halve() -> None:
        for group in optimizer.param_groups:
            group["lr"] /= 2

    @trainer.on(Events.ITERATION_COMPLETED)
    def compare() -> None:
        reported.append([-0.25 * rate for rate in trainer.state.output.learning_rates])
        moved.append([weights.weight.item() for weights in model])
        for weights in model:
            weights.weight.data.zero_()

    trainer.add_event_handler(event, halve)
    trainer.run([1.0] * 3)
    assert reported == moved
    assert moved[0] != moved[1] != moved[2]


def test_gradients_are_readable_where_they_are_whole(build, micro_batches):
    """In GRADIENTS_READY `gradients()` gives copies of the mean's gradient by name, whatever the scale and the clipping."""
    model, _, trainer = build(accumulation_steps=5, loss_scaling=StaticLossScaling(2.0**10), max_grad_norm=1e-3)
    names = [name for name, _ in model.named_parameters()]
    expected = dict(zip(names, mean_gradients(copy.deepcopy(model), micro_batches), strict=True))
    seen: dict[str, torch.Tensor] = {}

    @trainer.on(TrainEvents.GRADIENTS_READY)
    def read() -> None:
        seen.update({name: gradient.clone() for name, gradient in trainer.gradients().items()})
        for gradient in trainer.gradients().values():
            gradient.zero_()  # a copy

    trainer.run(micro_batches)
    assert seen.keys() == expected.keys()
    for name, gradient in seen.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
    assert trainer.state.output.grad_norm > 0
    assert not torch.equal(next(model.parameters()), next(build().model.parameters()))


@pytest.mark.parametrize(
    "event",
    [
        Events.STARTED,
        Events.EPOCH_STARTED,
        Events.GET_BATCH_COMPLETED,
        Events.ITERATION_STARTED,
        TrainEvents.OUT_OF_MEMORY,
        TrainEvents.MICRO_BATCH_STARTED,
        TrainEvents.FORWARD_COMPLETED,
        TrainEvents.BACKWARD_COMPLETED,
        TrainEvents.STEP_COMPLETED,
        TrainEvents.STEP_SKIPPED,
        Events.ITERATION_COMPLETED,
        Events.COMPLETED,
    ],
    ids=lambda event: event.name,
)
def test_gradients_are_readable_nowhere_else(event):
    """Outside of GRADIENTS_READY `gradients()` raises an error that names the event to use."""
    model = Weights(0.0)

    def forward(model: nn.Module, micro_batch: float) -> Any:
        if micro_batch == 2.0:
            raise torch.OutOfMemoryError("no room")
        return quarter(model, micro_batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = create_trainer(
        model, optimizer, forward, accumulation_steps=2, options=UpdateOptions(on_nonfinite="skip", on_out_of_memory="skip")
    )
    trainer.add_event_handler(event, lambda: trainer.gradients())
    with pytest.raises(GradientAccessError, match="GRADIENTS_READY"):
        trainer.run([math.inf, 1.0, 2.0, 1.0])
    with pytest.raises(GradientAccessError, match="GRADIENTS_READY"):
        trainer.gradients()


# --- updates that move nothing ---


def scheduled(setup: Any) -> Any:
    """Attaches a learning-rate schedule to the steps."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, gamma=0.5)
    setup.trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: schedule.step())
    return schedule


def with_flag(model: nn.Module, batch: Any) -> ForwardOutput:
    """The summed loss of a micro-batch that says itself what is wrong with it."""
    (x, y), flaw = batch
    loss = mse_loss(model(x), y, reduction="sum")
    if flaw == "no_samples":
        return ForwardOutput(loss * 0.0, 0)
    if flaw == "nan_loss":
        loss = loss + math.nan  # its gradient stays finite
    if flaw in ("inf", "nan"):
        loss = loss + (next(model.parameters()) * float(flaw)).sum()
    return ForwardOutput(loss, len(y))


@pytest.mark.parametrize(
    ("flaw", "arguments", "reason"),
    [
        ("no_samples", {}, "no_samples"),
        ("no_samples", {"loss_scaling": TorchLossScaling(256.0, growth_interval=2)}, "no_samples"),
        ("inf", {"loss_scaling": TorchLossScaling(256.0)}, "overflow"),
        ("nan", {"loss_scaling": StaticLossScaling(256.0)}, "overflow"),
        ("nan_loss", {"loss_scaling": FairseqLossScaling(256.0)}, "overflow"),
        ("inf", {"on_nonfinite": "skip"}, "nonfinite"),
        ("nan", {"on_nonfinite": "skip", "max_grad_norm": 1.0}, "nonfinite"),
        ("nan_loss", {"on_nonfinite": "skip"}, "nonfinite"),
    ],
)
@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), lambda p: torch.optim.AdamW(p, weight_decay=0.1)],
    ids=["sgd", "adamw"],
)
def test_a_skipped_update_moves_nothing(build, bits, micro_batches, optimizer, flaw, arguments, reason):
    """Overflow, non-finite, no samples: parameters, moments, schedule and steps are bitwise as before, the skip is counted."""
    arguments = copy.deepcopy(arguments)
    setup = build(with_flag, accumulation_steps=2, optimizer=optimizer, **arguments)
    schedule, trainer = scheduled(setup), setup.trainer
    seen: list[Any] = []

    def look() -> None:
        state = [setup.model.state_dict(), setup.optimizer.state_dict(), schedule.state_dict(), trainer.state.num_steps]
        seen.append(bits(state))

    trainer.add_event_handler(Events.ITERATION_STARTED(once=2) | Events.ITERATION_COMPLETED(once=2), look)
    outputs: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(trainer.state.output))
    good, other = (micro_batches[0], ""), (micro_batches[1], "no_samples" if flaw == "no_samples" else "")
    trainer.run([good, good, other, (micro_batches[2], flaw), good, good])

    assert seen[0] == seen[1]
    assert [output.skipped_reason for output in outputs] == [None, reason, None]
    assert not outputs[1].applied
    assert outputs[1].clip_coefficient == 1.0
    assert (trainer.state.num_steps, trainer.state.num_skipped) == (2, 1)
    if flaw == "no_samples":
        assert (outputs[1].sample_size, outputs[1].num_micro_batches) == (0, 2)


def test_a_skipped_update_leaves_no_trace_in_the_rest(build, micro_batches):
    """A run with updates without samples ends bitwise where the run without them ends, its loss scaling too."""

    def run(flaws: list[str]) -> Any:
        setup = build(with_flag, accumulation_steps=2, loss_scaling=TorchLossScaling(256.0, growth_interval=2))
        setup.trainer.run([(batch, flaw) for flaw in flaws for batch in micro_batches[:2]])
        model, optimizer, trainer = setup.contents()
        return model, optimizer, trainer["update"]

    assert run(["", "no_samples", "", "", "no_samples"]) == run(["", "", ""])


def test_no_samples_in_one_micro_batch_only(build, micro_batches):
    """A micro-batch of weight 0 in a group that has samples takes part and changes nothing."""
    with_empty, without = build(with_flag, accumulation_steps=3), build(with_flag, accumulation_steps=2)
    good = [(micro_batches[0], ""), (micro_batches[1], "")]
    with_empty.trainer.run([good[0], (micro_batches[2], "no_samples"), good[1]])
    without.trainer.run(good)
    for left, right in zip(with_empty.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_gradients_of_an_update_without_samples():
    """A handler that reads gradients does not end the run when an update has no samples."""
    model = Weights(1.0)
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=1.0), lambda model, size: ForwardOutput(quarter(model, size), size)
    )
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: trainer.gradients())
    trainer.run([1, 0, 1])
    assert (trainer.state.num_steps, trainer.state.num_skipped) == (2, 1)


@pytest.mark.parametrize("flaw", ["inf", "nan", "nan_loss"])
def test_non_finite_raises_by_default(build, micro_batches, flaw):
    """Without loss scaling a non-finite gradient or loss is an error with update and values; nothing moved, no count either."""
    setup = build(with_flag, accumulation_steps=2)
    good = (micro_batches[0], "")
    setup.trainer.run([good, good])
    before = setup.contents()
    with pytest.raises(NonFiniteError, match="update 2") as raised:
        setup.trainer.run([good, (micro_batches[2], flaw)], max_epochs=2)
    error = raised.value
    assert error.update == 2
    assert not (math.isfinite(error.loss) and math.isfinite(error.grad_norm))
    assert math.isfinite(error.grad_norm) == (flaw == "nan_loss")
    model, optimizer, trainer = setup.contents()
    assert [model, optimizer] == before[:2]
    counters = ("iteration", "num_steps", "num_skipped", "num_micro_batches")
    assert [trainer[name] for name in counters] == [before[2][name] for name in counters]
    assert all(parameter.grad is None for parameter in setup.model.parameters())


@pytest.mark.sampled(12)
@pytest.mark.parametrize("failing", [1, 2, 6])
@pytest.mark.parametrize("uses", ["torch", "python", "both"])
@pytest.mark.parametrize(
    ("scaling", "error"),
    [
        (lambda: None, NonFiniteError),
        (lambda: TorchLossScaling(4.0, min_scale=4.0), LossScaleFloorError),
        (lambda: FairseqLossScaling(4.0, min_scale=2.0), LossScaleFloorError),
        (lambda: DeepSpeedLossScaling(4.0, min_scale=4.0, hysteresis=1), LossScaleFloorError),
    ],
    ids=["raise", "torch-floor", "fairseq-floor", "deepspeed-floor"],
)
def test_a_non_finite_update_is_run_again_with_its_own_draws(build, micro_batches, uses, failing, scaling, error):
    """The replay that finds the value draws the very numbers of the update, of torch's and of Python's generator."""
    draws: list[tuple[float, ...]] = []

    def forward(model: nn.Module, batch: Any) -> Any:
        from_torch = torch.rand(()).item() if uses != "python" else 0.0
        from_python = random.random() if uses != "torch" else 0.0  # noqa: S311
        draws.append((from_torch, from_python))
        loss = mse_loss(model(batch[0]), batch[1])
        return loss * (math.nan if len(draws) >= 2 * failing - 1 else 1.0)

    _, _, trainer = build(forward, accumulation_steps=2, loss_scaling=scaling())
    with pytest.raises(error, match="micro-batch 1 of 2") as raised:
        trainer.run(micro_batches[:2] * 10)
    assert raised.value.where == ("rank 0, micro-batch 1 of 2: NaN in the loss, shape ()",)
    assert len(draws) == 2 * failing + 1
    assert draws[-1] == draws[2 * failing - 2]
    assert len(set(draws)) == 2 * failing


def test_an_overflow_that_only_the_scale_makes_is_found(build, micro_batches):
    """The search runs the update again at its own loss scale: without it all values are finite."""
    policy = TorchLossScaling(2.0**126, min_scale=2.0**126, max_scale=2.0**126)
    _, _, trainer = build(lambda model, batch: 1e4 * mse_loss(model(batch[0]), batch[1]), loss_scaling=policy)
    with pytest.raises(LossScaleFloorError) as raised:
        trainer.run(micro_batches)
    assert raised.value.where == ("rank 0, micro-batch 1 of 1: inf in the loss, shape ()",)


def test_far_from_its_floor_a_scaled_update_remembers_nothing(build, micro_batches, monkeypatch):
    """The random state is read in updates at the floor, and at twice the floor, and in no other; nor where all are skipped."""
    marked: list[float] = []
    policy = TorchLossScaling(2.0**4, min_scale=1.0, growth_interval=1000)
    _, _, trainer = build(lambda model, batch: mse_loss(model(batch[0]), batch[1]) * math.inf, loss_scaling=policy)
    monkeypatch.setattr(Draws, "mark", lambda self: marked.append(policy.scale))
    trainer.run(micro_batches, max_iters=4)
    assert marked == [2.0]
    holding = TorchLossScaling(1.0, min_scale=1.0, on_floor="hold")
    for quiet in ({"loss_scaling": holding}, {"loss_scaling": StaticLossScaling(1.0)}, {"on_nonfinite": "skip"}):
        _, _, trainer = build(**quiet)
        trainer.run(micro_batches, max_epochs=1)
    assert marked == [2.0]


def test_pythons_generator_is_read_rarely(build, micro_batches, monkeypatch):
    """A forward that does not use it does not pay for it: over 100 updates its state is read 7 times and not 100."""
    reads, getstate = [], random.Random.getstate
    monkeypatch.setattr(random.Random, "getstate", lambda self: reads.append(1) or getstate(self))
    _, _, trainer = build()
    trainer.run(micro_batches * 20)
    # In updates 1, 2, 4, ... 64, to remember and to compare with the one before; and for the trial of the first micro-batch.
    assert len(reads) == 7 + 1


def test_skips_are_logged_rarely_but_always(caplog):
    """Of many skips the 1st, 2nd, 4th and 8th are logged, each with update, reason, norm and scale; and that all were skips."""
    model = Weights(0.0)
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=1.0), quarter, loss_scaling=TorchLossScaling(2.0**10)
    )
    with caplog.at_level(logging.WARNING):
        trainer.run([math.inf] * 9)
    *lines, last = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert "the weights have never moved: all 9 updates were skipped" in last
    for line, number, scale in zip(lines, (1, 2, 4, 8), (1024, 512, 128, 8), strict=True):
        for part in (f"update {number} ", "overflow", "inf", f"loss scale {scale};", f"skipped so far: {number}"):
            assert part in line


# --- graphs and parameters ---


def test_gradient_penalty_in_forward(build, micro_batches):
    """A penalty on the gradient's norm, taken inside forward, gives the second derivatives that autograd gives."""

    def penalised(model: nn.Module, batch: Any) -> ForwardOutput:
        x, y = batch
        x = x.clone().requires_grad_()
        loss = mse_loss(model(x), y, reduction="sum")
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return ForwardOutput(loss + slope.pow(2).sum(), len(y))

    model, optimizer, trainer = build(penalised, accumulation_steps=5, loss_scaling=StaticLossScaling(2.0**8))
    reference = copy.deepcopy(model)
    total = sum(penalised(reference, batch).loss for batch in micro_batches) / 13
    expected = torch.autograd.grad(total, list(reference.parameters()))
    stepped_on = []
    optimizer.register_step_pre_hook(lambda *_: stepped_on.extend(p.grad.clone() for p in model.parameters()))
    trainer.run(micro_batches)
    for gradient, wanted in zip(stepped_on, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_retain_graph(build, micro_batches):
    """With `retain_graph` a handler of BACKWARD_COMPLETED can go through the graph again; without, torch refuses."""

    def again(engine: Any) -> None:
        torch.autograd.grad(engine.state.forward_output.loss, list(setup.model.parameters()))

    for retain_graph in (True, False):
        setup = build(retain_graph=retain_graph)
        setup.trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, again)
        if retain_graph:
            setup.trainer.run(micro_batches)
        else:
            with pytest.raises(RuntimeError, match="retain_graph=True"):
                setup.trainer.run(micro_batches)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # torch's; the trainer breaks that cycle
def test_create_graph(build, micro_batches):
    """With `create_graph` handlers of BACKWARD_COMPLETED can differentiate the gradients: here to a Hessian-vector product."""
    model, _, trainer = build(create_graph=True, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    products = []

    @trainer.on(TrainEvents.BACKWARD_COMPLETED(once=1))
    def hessian_vector() -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        products.extend(torch.autograd.grad(sum(gradient.sum() for gradient in gradients), list(model.parameters())))

    trainer.run(micro_batches)
    x, y = micro_batches[0]
    loss = mse_loss(model(x), y, reduction="sum")
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    expected = torch.autograd.grad(sum(gradient.sum() for gradient in gradients), list(model.parameters()))
    assert len(products) == len(expected)
    for product, wanted in zip(products, expected, strict=True):
        torch.testing.assert_close(product, wanted)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(
    "flags", [{}, {"retain_graph": True}, {"create_graph": True}], ids=lambda flags: "-".join(flags) or "plain"
)
def test_no_graph_outlives_its_micro_batch(build, micro_batches, flags):
    """Before the next micro-batch starts, the graph of the last one is freed, without the garbage collector."""
    graphs: list[weakref.ref[Any]] = []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark = Weights(0.0)  # lives as long as this node of the graph
            graphs.append(weakref.ref(ctx.mark))
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 1.0

    def forward(model: nn.Module, batch: Any) -> ForwardOutput:
        assert not any(graph() for graph in graphs)
        return ForwardOutput(mse_loss(Marked.apply(model(batch[0])), batch[1], reduction="sum"), len(batch[1]))

    trainer = build(forward, accumulation_steps=2, **flags).trainer
    gc.disable()
    try:
        trainer.run(micro_batches)
        assert [graph() for graph in graphs] == [None] * 5
    finally:
        gc.enable()


def test_no_micro_batch_outlives_its_update(build, micro_batches):
    """When the next group is fetched, nothing holds the micro-batches of the last, nor what the model made of them."""
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def fresh(batch: Any) -> Any:
        copied = tuple(tensor.clone() for tensor in batch)
        held.extend(map(weakref.ref, copied))
        return copied

    def forward(model: nn.Module, batch: Any) -> ForwardOutput:
        predicted = model(batch[0])
        held.append(weakref.ref(predicted))
        return ForwardOutput(mse_loss(predicted, batch[1], reduction="sum"), len(predicted), {"sum": predicted.sum()})

    trainer = build(forward, accumulation_steps=2).trainer
    trainer.add_event_handler(Events.GET_BATCH_STARTED, lambda: alive.append(sum(entry() is not None for entry in held)))
    gc.disable()
    try:
        trainer.run(map(fresh, micro_batches * 2))
    finally:
        gc.enable()
    assert len(held) == 30
    assert alive == [0] * 6


def test_unused_parameters_stay_untouched(bits):
    """A parameter that no loss of the update reached gets no weight decay, no moments and no momentum."""
    model = nn.ModuleList([Weights(1.0, 2.0), Weights(3.0, 4.0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    trainer = create_trainer(model, optimizer, lambda model, index: quarter(model[index], 1.0), accumulation_steps=2)
    trainer.run([0, 0, 0, 0])
    assert model[1].weight.tolist() == [3.0, 4.0]
    assert model[0].weight.tolist() != [1.0, 2.0]
    assert model[1].weight not in optimizer.state
    both, alone = [model[1].weight], optimizer.state
    trainer.run([0, 1, 0, 0], max_epochs=2)  # reached by one micro-batch of the group: it takes part
    assert both[0].tolist() != [3.0, 4.0]
    assert alone[both[0]]["step"].item() == 1


@pytest.mark.parametrize(
    "event",
    [
        None,
        Events.STARTED,
        Events.EPOCH_STARTED,
        Events.GET_BATCH_STARTED,
        Events.GET_BATCH_COMPLETED,
        Events.ITERATION_STARTED,
        TrainEvents.STEP_COMPLETED,
        Events.ITERATION_COMPLETED,
        Events.EPOCH_COMPLETED,
    ],
    ids=lambda event: "before" if event is None else event.name,
)
def test_stale_gradients_do_not_leak(build, micro_batches, event):
    """What a backward of the user's own leaves between updates is no part of the next one."""
    clean, dirty = build(accumulation_steps=2), build(accumulation_steps=2)

    def backward() -> None:
        dirty.model(torch.full((1, 4), 100.0)).sum().backward()

    if event is None:
        backward()
    else:
        dirty.trainer.add_event_handler(event, backward)
    clean.trainer.run(micro_batches, max_epochs=2)
    dirty.trainer.run(micro_batches, max_epochs=2)
    assert clean.contents() == dirty.contents()


def test_training_mode(build, micro_batches):
    """A model left in eval mode trains in training mode; one in training mode keeps modules put into eval."""
    model, _, trainer = build()
    model.eval()
    trainer.run(micro_batches)
    assert all(module.training for module in model.modules())
    model[1].eval()
    trainer.run(micro_batches, max_epochs=2)
    assert not model[1].training


# --- failures ---


class InjectedError(Exception):
    """Raised by a test on purpose."""


class Fault:
    """Raises at its n-th call, and at no other."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.number, self.error, self.calls = number, error, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.number:
            raise self.error


def place(fault: Fault, setup: Any, site: Any) -> None:
    """Puts the fault where it belongs."""
    if site == "forward":
        setup.model.register_forward_pre_hook(lambda *_: fault())
    elif site == "backward":
        next(setup.model.parameters()).register_hook(lambda _: fault())
    elif site == "step":
        setup.optimizer.register_step_pre_hook(lambda *_: fault())
    else:
        setup.trainer.add_event_handler(site, fault)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("error", [InjectedError("on purpose"), KeyboardInterrupt()], ids=["exception", "interrupt"])
@pytest.mark.parametrize(
    ("site", "number"),
    [
        ("forward", 1),
        ("forward", 4),
        ("backward", 2),
        ("step", 2),
        (Events.STARTED, 1),
        (Events.EPOCH_STARTED, 2),
        (Events.GET_BATCH_STARTED, 2),
        (Events.GET_BATCH_COMPLETED, 2),
        (Events.ITERATION_STARTED, 2),
        (TrainEvents.MICRO_BATCH_STARTED, 4),
        (TrainEvents.FORWARD_COMPLETED, 4),
        (TrainEvents.BACKWARD_COMPLETED, 4),
        (TrainEvents.GRADIENTS_READY, 2),
        (TrainEvents.STEP_COMPLETED, 2),
        (TrainEvents.STEP_SKIPPED, 1),
        (Events.ITERATION_COMPLETED, 3),
        (Events.EPOCH_COMPLETED, 1),
        (Events.COMPLETED, 1),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_failure_leaves_nothing_behind(build, micro_batches, site, number, error):
    """Wherever an exception strikes, no gradient, count or context is left, and the run goes on to the same bits."""
    data = [(batch, "inf" if index == 3 else "") for index, batch in enumerate(micro_batches)]  # the second update is skipped
    unharmed, setup = (build(with_flag, accumulation_steps=2, on_nonfinite="skip", precision="bf16") for _ in range(2))
    unharmed.trainer.run(data, max_epochs=2)
    place(Fault(number, error), setup, site)
    state = setup.trainer.state

    with pytest.raises(type(error)) as raised:
        setup.trainer.run(data, max_epochs=2)
    assert raised.value is error
    assert all(parameter.grad is None for parameter in setup.model.parameters())
    assert state.iteration == state.num_steps + state.num_skipped
    assert state.num_micro_batches == [0, 2, 4, 5, 7, 9, 10][state.iteration]
    assert state.forward_output is None
    assert state.batch is None
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    with pytest.raises(GradientAccessError):
        setup.trainer.gradients()

    setup.trainer.run(data, max_epochs=2)
    assert setup.contents() == unharmed.contents()
    assert (state.iteration, state.epoch, state.num_steps, state.num_skipped, state.num_micro_batches) == (6, 2, 4, 2, 10)


# --- precision ---


@pytest.mark.parametrize(
    ("precision", "dtype", "computes_in"),
    [
        ("fp32", torch.float32, torch.float32),
        ("fp32", torch.bfloat16, torch.bfloat16),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
    ],
    ids=["fp32", "pure-bf16", "bf16-autocast", "fp16-autocast"],
)
def test_precisions_train(build, precision, dtype, computes_in):
    """In every precision the forward computes in its dtype, weights keep theirs, and the loss falls to less than half."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 4, generator=generator)
    data = list(zip(x.to(dtype).split(8), x.sum(dim=1, keepdim=True).to(dtype).split(8), strict=True))
    dtypes, losses = set(), []

    def forward(model: nn.Module, batch: Any) -> ForwardOutput:
        predicted = model(batch[0])
        dtypes.add(predicted.dtype)
        return ForwardOutput((predicted.float() - batch[1].float()).pow(2).sum(), len(batch[1]))

    model, _, trainer = build(
        forward, precision=precision, dtype=dtype, accumulation_steps=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.05)
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: losses.append(trainer.state.output.loss))
    trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, lambda: dtypes.add(torch.is_autocast_enabled("cpu")))
    trainer.run(data, max_epochs=15)
    assert dtypes == {computes_in, False}  # handlers and backward run outside of autocast
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert sum(losses[-2:]) < 0.5 * sum(losses[:2])
    assert trainer.state.num_steps > 20


@pytest.mark.parametrize("call", ["run", "session"])
def test_a_run_inside_of_autocast_is_refused(build, micro_batches, call):
    """Its cache would keep the weights of the first update; without the cache it runs."""
    _, _, trainer = build()
    start = trainer.run if call == "run" else lambda _: trainer.session().__enter__()
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=r"inside torch\.autocast"):
        start(micro_batches)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        start(micro_batches)


def test_weights_may_be_swapped_between_steps(micro_batches):
    """As conversions with `torch.utils.swap_tensors` do."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trainer = create_trainer(model, optimizer, lambda model, batch: mse_loss(model(batch[0]), batch[1]))
    trainer.run(micro_batches, max_epochs=1)
    other = torch.nn.Linear(4, 1)
    torch.utils.swap_tensors(model.weight, other.weight)
    before = model.weight.detach().clone()
    trainer.run(micro_batches, max_epochs=2)
    assert not torch.equal(model.weight, before)
