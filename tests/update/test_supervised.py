"""`create_supervised_trainer`: what each argument does, against the same training written out in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ignite.engine
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

from ignite_train import (
    ForwardOutput,
    NonFiniteError,
    StaticLossScaling,
    TorchLossScaling,
    create_supervised_trainer,
    create_trainer,
)
from update_options import with_options

RATE = 0.125
Pair = tuple[Tensor, Tensor]


def linear(dtype: torch.dtype = torch.float64) -> nn.Linear:
    """Three inputs, two outputs, no bias; the same each time."""
    model = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.25, 0.75], [1.0, 0.125, -0.5]]))
    return model.to(dtype)


def pairs(sizes: Sequence[int] = (4, 1, 3, 2), dtype: torch.dtype = torch.float64) -> list[Pair]:
    """Micro-batches of unequal size."""
    generator = torch.Generator().manual_seed(3)

    def draw(size: int, width: int) -> Tensor:
        return torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)

    return [(draw(size, 3), draw(size, 2)) for size in sizes]


def by_hand(
    batches: list[Pair], group: int = 1, *, gradient: Callable[[Tensor, Tensor, Tensor], Tensor], clip: float | None = None
) -> Tensor:
    """Gradient descent on the weight along the mean over the samples of each group; `gradient` gives that of the sum."""
    weight = linear().weight.detach().clone()
    for start in range(0, len(batches), group):
        micro_batches = batches[start : start + group]
        mean = sum(gradient(weight, x, y) for x, y in micro_batches) / sum(len(x) for x, _ in micro_batches)
        assert isinstance(mean, Tensor)
        if clip is not None:
            mean = mean * min(1.0, clip / (float(mean.square().sum().sqrt()) + 1e-6))
        weight = weight - RATE * mean
    return weight


def of_squares(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of Σ over samples of the mean over both outputs of the squared error."""
    return (x @ weight.T - y).T @ x


def of_absolutes(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The same for the absolute error."""
    return (x @ weight.T - y).sign().T @ x / 2


def trained(loss_fn: Any = mse_loss, batches: Any = None, *, model: nn.Module | None = None, **arguments: Any) -> Tensor:
    """The weight after one epoch of a supervised trainer."""
    model = linear() if model is None else model
    trainer = create_supervised_trainer(
        model, torch.optim.SGD(model.parameters(), lr=RATE), loss_fn, **with_options(**arguments)
    )
    trainer.run(pairs() if batches is None else batches, max_epochs=1)
    return next(model.parameters()).detach()


def close(left: Tensor, right: Tensor) -> None:
    """Up to rounding in float64: the orders of summation differ."""
    torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("loss_fn", "gradient"),
    [(mse_loss, of_squares), (nn.MSELoss(), of_squares), (l1_loss, of_absolutes), (nn.L1Loss(), of_absolutes)],
    ids=["function", "module", "absolute", "absolute-module"],
)
def test_each_sample_weighs_the_same(steps: int, loss_fn: Any, gradient: Any) -> None:
    """The mean of a micro-batch is weighed by its samples, in groups of any number of micro-batches."""
    close(trained(loss_fn, gradient_accumulation_steps=steps), by_hand(pairs(), steps, gradient=gradient))


@pytest.mark.parametrize("steps", [1, 4])
def test_a_module_that_sums_is_taken_as_a_sum(steps: int) -> None:
    """It is not multiplied by the number of samples again."""
    expected = by_hand(pairs(), steps, gradient=lambda *given: 2 * of_squares(*given))
    close(trained(nn.MSELoss(reduction="sum"), gradient_accumulation_steps=steps), expected)


def test_the_reported_loss_is_the_mean_over_the_samples() -> None:
    """Of all micro-batches of the update, by the weights before it."""
    model = linear()
    trainer = create_supervised_trainer(
        model, torch.optim.SGD(model.parameters(), lr=RATE), mse_loss, gradient_accumulation_steps=4
    )
    output = trainer.run(pairs(), max_epochs=1).update_output
    x, y = (torch.cat(parts) for parts in zip(*pairs(), strict=True))
    assert output is not None
    assert output.loss == pytest.approx(float((x @ linear().weight.detach().T - y).square().mean()), rel=1e-13)
    assert (output.sample_size, output.num_micro_batches) == (10, 4)


WEIGHT = torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64)
UNEVEN: dict[str, tuple[nn.Module, Callable[[nn.Module, Any], ForwardOutput]]] = {
    "ignored": (
        nn.CrossEntropyLoss(),
        lambda model, b: ForwardOutput(cross_entropy(model(b[0]), b[1], reduction="sum"), sample_size=(b[1] != -100).sum()),
    ),
    "weighted": (
        nn.CrossEntropyLoss(weight=WEIGHT),
        lambda model, b: ForwardOutput(
            cross_entropy(model(b[0]), b[1], WEIGHT, reduction="sum"), sample_size=WEIGHT[b[1]].sum()
        ),
    ),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_a_loss_that_weighs_targets_is_a_mean_of_means(name: str) -> None:
    """As the docstring says, with the forward that makes the update of one large batch."""
    loss_fn, forward = UNEVEN[name]
    ignored = -100 if name == "ignored" else 1
    targets = [torch.tensor([0, 1, 2, *[ignored] * 5]), torch.tensor([0, 1, 2, 1, 1, 0, 0, 1])]
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 4, generator=generator, dtype=torch.float64), y) for y in targets]

    def classifier() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(4, 3, dtype=torch.float64)

    def step(model: nn.Linear, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, model.weight)
        return model.weight.detach() - 0.1 * gradient

    def after(make: Any, loss: Any, **settings: int) -> Tensor:
        model = classifier()
        make(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, **settings).run(batches)
        return model.weight.detach()

    one, several = classifier(), classifier()
    large = step(one, loss_fn(one(torch.cat([x for x, _ in batches])), torch.cat(targets)))
    means = step(several, sum(loss_fn(several(x), y) for x, y in batches) / 2)
    close(after(create_supervised_trainer, loss_fn, gradient_accumulation_steps=2), means)
    close(after(create_trainer, forward, accumulation_steps=2), large)
    assert (means - large).abs().max() > 1e-3


@pytest.mark.parametrize("size", [1, 8, 64, 3, 10, 24])
def test_the_bits_are_those_of_ignite(size: int) -> None:
    """With sizes that are powers of two, and with any size where forward returns the mean; else the last bits differ."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)) for _ in range(20)]

    def weights(make: Any, loss_fn: Any = cross_entropy) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        make(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn).run(batches, max_epochs=2)
        return [parameter.detach() for parameter in model.parameters()]

    right = weights(ignite.engine.create_supervised_trainer)
    mean = weights(create_trainer, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))
    mine = weights(create_supervised_trainer)
    assert all(map(torch.equal, mean, right))
    assert all(map(torch.equal, mine, right)) == (size in (1, 8, 64))
    for left, one in zip(mine, right, strict=True):
        torch.testing.assert_close(left, one, rtol=0, atol=1e-5)


def test_prepare_batch() -> None:
    """It makes the pair, and is told the device and whether to wait."""
    told: list[Any] = []

    def prepare(batch: dict[str, Tensor], **named: Any) -> Pair:
        told.append(named)
        return 2 * batch["in"], batch["out"]

    batches = [{"in": x, "out": y} for x, y in pairs()]
    weight = trained(batches=batches, prepare_batch=prepare, device="cpu", non_blocking=True)
    close(weight, by_hand(pairs(), gradient=lambda w, x, y: of_squares(w, 2 * x, y)))
    assert told == [{"device": "cpu", "non_blocking": True}] * 4
    trained(batches=batches, prepare_batch=prepare)
    assert told[4:] == [{"device": None, "non_blocking": False}] * 4


NOT_ONE_TARGET: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "two": (lambda x, y: (x, [y, y]), "a list of 2"),
    "two, in a tuple": (lambda x, y: (x, (y, y)), "a tuple of 2"),
    "two, beside inputs by name": (lambda x, y: ({"x": x, "scale": torch.ones(())}, [y, y]), "a list of 2"),
    "by name": (lambda x, y: (x, {"a": y, "b": y}), r"one with the keys \['a', 'b'\]"),
    "none": (lambda x, y: (x, None), "None of type NoneType"),
    "a number": (lambda x, y: (x, 1), "1 of type int"),
    "a tensor of one number": (lambda x, y: (x, y.mean()), r"a tensor of shape \(\)"),
    "by name, beside inputs by name": (lambda x, y: ({"x": x}, {"a": y, "b": y}), r"one with the keys \['a', 'b'\]"),
}


@pytest.mark.parametrize("sizes", [(3, 1), (2, 1)], ids=["at once", "later"])
@pytest.mark.parametrize("prepared", [False, True], ids=["as they are", "prepared"])
@pytest.mark.parametrize("kind", NOT_ONE_TARGET)
def test_targets_of_another_number_than_the_samples_are_refused(kind: str, prepared: bool, sizes: tuple[int, int]) -> None:
    """A micro-batch would be weighed by their number; that may be right by chance, and not in a later micro-batch."""
    change, named = NOT_ONE_TARGET[kind]
    batches = [change(x, y) for x, y in pairs(sizes)]
    arguments: dict[str, Any] = {"prepare_batch": lambda batch, **_: batch} if prepared else {}
    arguments["model_fn"] = lambda model, x: model(x["x"] if isinstance(x, dict) else x)
    with pytest.raises(TypeError, match=f"y must be a tensor, .*, got {named}; .* create_trainer"):
        trained(lambda y_pred, y: y_pred.mean(), batches, gradient_accumulation_steps=2, **arguments)


@pytest.mark.parametrize("inputs", [list, tuple, torch.stack, lambda rows: {"x": torch.stack(rows), "scale": torch.ones(())}])
def test_a_list_with_a_target_for_each_sample(inputs: Any) -> None:
    """Its length is the number of samples, however the inputs are given; detection has such targets."""

    def model_fn(model: nn.Module, x: Any) -> Tensor:
        x = x["x"] if isinstance(x, dict) else x
        return model(x if isinstance(x, Tensor) else torch.stack([*x]))

    batches = [(inputs([*x]), [*y]) for x, y in pairs()]
    found = trained(lambda a, b: mse_loss(a, torch.stack(b)), batches, gradient_accumulation_steps=4, model_fn=model_fn)
    close(found, by_hand(pairs(), 4, gradient=of_squares))


def test_device_and_non_blocking_reach_ignites_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a `prepare_batch` both halves of the pair are moved where `device` says, as `non_blocking` says."""
    seen: list[Any] = []

    def model_fn(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(x.device.type)
        return model(torch.ones(4, 3, dtype=torch.float64))

    def loss_fn(prediction: Tensor, y: Tensor) -> Tensor:
        seen.append(y.device.type)
        return prediction.square().mean()

    trained(loss_fn, pairs((4,)), device="meta", model_fn=model_fn)
    assert seen == ["meta", "meta"]
    moves: list[Any] = []
    move = Tensor.to

    def to(tensor: Tensor, *given: Any, **named: Any) -> Tensor:
        with torch._C.DisableTorchFunction():  # a mode would call this function again
            moves.append(named)
            return move(tensor, *given, **named)

    monkeypatch.setattr(Tensor, "to", to)
    trained(batches=pairs((4,)), device="cpu", non_blocking=True, model=linear())
    moves = [named for named in moves if "non_blocking" in named]
    assert moves == [{"device": "cpu", "non_blocking": True}] * 6  # of both halves, and of those of the two trials before


def test_model_transform() -> None:
    """It is applied to what the model returns, before the loss."""
    weight = trained(model_transform=lambda output: 3 * output)
    close(weight, by_hand(pairs(), gradient=lambda w, x, y: 3 * of_squares(3 * w, x, y)))


def test_model_fn() -> None:
    """It calls the model in its own way, and what it returns goes through `model_transform`."""
    weight = trained(model_fn=lambda model, x: (model(x * x), "more"), model_transform=lambda output: output[0])
    close(weight, by_hand(pairs(), gradient=lambda w, x, y: of_squares(w, x * x, y)))


@pytest.mark.parametrize("steps", [1, 4])
def test_max_grad_norm(steps: int) -> None:
    """The mean gradient is clipped, once an update."""
    expected = by_hand(pairs(), steps, gradient=of_squares, clip=0.25)
    close(trained(gradient_accumulation_steps=steps, max_grad_norm=0.25), expected)
    assert not torch.allclose(expected, by_hand(pairs(), steps, gradient=of_squares))


def test_on_nonfinite() -> None:
    """By default a NaN is an error; with "skip" the others are trained on as if that micro-batch had not been there."""
    spoilt = pairs()
    spoilt[1][1][0, 0] = float("nan")
    with pytest.raises(NonFiniteError):
        trained(batches=spoilt)
    close(trained(batches=spoilt, on_nonfinite="skip"), by_hand([pairs()[i] for i in (0, 2, 3)], gradient=of_squares))


@pytest.mark.parametrize(
    ("arguments", "scale", "dtype"),
    [
        ({}, 1.0, torch.float32),
        ({"precision": "fp32"}, 1.0, torch.float32),
        ({"scaler": True}, 2.0**14, torch.float32),  # 2^16 / 4, for the sum over four samples
        ({"loss_scaling": StaticLossScaling(8.0)}, 8.0, torch.float32),
        ({"scaler": True, "loss_scaling": StaticLossScaling(8.0)}, 8.0, torch.float32),
        ({"precision": "bf16"}, 1.0, torch.bfloat16),
        ({"precision": "fp16"}, 2.0**14, torch.float16),
        ({"amp_mode": "amp"}, 1.0, torch.float16),
        ({"amp_mode": "amp", "precision": "fp16"}, 1.0, torch.float16),
        ({"amp_mode": "amp", "scaler": True}, 2.0**14, torch.float16),
        ({"amp_mode": "amp", "loss_scaling": TorchLossScaling(4.0)}, 4.0, torch.float16),
    ],
    ids=lambda value: ",".join(value) or "default" if isinstance(value, dict) else None,
)
def test_precision_and_loss_scaling(arguments: dict[str, Any], scale: float, dtype: torch.dtype) -> None:
    """The model computes in this dtype, backward is scaled by this, and the update is that of float64 but for rounding."""
    computed: list[torch.dtype] = []
    scaled: list[float] = []
    model = linear(torch.float32)

    def transform(output: Tensor) -> Tensor:
        computed.append(output.dtype)
        return output.float()

    model.weight.register_hook(lambda gradient: scaled.append(float(gradient.norm())))
    small = [(x, y / 64) for x, y in pairs(dtype=torch.float32)]  # so that float16 holds the scaled gradients
    trainer = create_supervised_trainer(
        model, torch.optim.SGD(model.parameters(), lr=RATE), mse_loss, model_transform=transform, **with_options(**arguments)
    )
    with torch.no_grad():
        model.weight.mul_(1 / 64)
    trainer.run(small[:1], max_epochs=1)
    output = trainer.state.update_output
    assert output is not None
    assert (computed, output.loss_scale, output.applied) == ([dtype], scale, True)
    x, y = (part.double() for part in small[0])
    expected = of_squares(linear().weight.detach() / 64, x, y)
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]  # a few roundings of its digits
    assert scaled == [pytest.approx(scale * float(expected.norm()), rel=tolerance)]
    torch.testing.assert_close(
        model.weight.detach().double(),
        linear().weight.detach() / 64 - RATE * expected / len(x),
        rtol=tolerance,
        atol=tolerance / 64,
    )
    exact = torch.equal(model.weight.detach(), _in_float32(small[0]))
    assert exact == (dtype is torch.float32)


def _in_float32(batch: Pair) -> Tensor:
    """The weight after one update in float32 without scaling."""
    model = linear(torch.float32)
    with torch.no_grad():
        model.weight.mul_(1 / 64)
    create_supervised_trainer(model, torch.optim.SGD(model.parameters(), lr=RATE), mse_loss).run([batch], max_epochs=1)
    return model.weight.detach()
