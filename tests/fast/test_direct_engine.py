"""Backward by one call of the engine does what `torch.autograd.backward` does, and leaves to it what it may do otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bits import bit_by_bit
from ignite_train import ForwardContractError, ForwardOutput, NonFiniteError, create_trainer
from ignite_train.fast.direct_engine import direct_engine
from tiers import accelerated

pytestmark = accelerated


@pytest.fixture
def backward() -> Callable[[Tensor], object]:
    """Backward from a loss, as an update does it."""
    net = model()
    passes = trainer_of(net).process.gather.passes
    assert passes.engine is not None
    return lambda loss: passes.backward_from(loss)()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The losses from which `torch.autograd.backward` was called."""
    found: list[Tensor] = []
    plain = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda loss, **arguments: (found.append(loss), plain(loss, **arguments))[1])
    return found


def trainer_of(net: nn.Module, **options: Any) -> Any:
    """With SGD and the summed squares of errors."""
    return create_trainer(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        lambda net, batch: ForwardOutput(mse_loss(net(batch[0]), batch[1], reduction="sum"), len(batch[1])),
        **options,
    )


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).to(dtype)


def losses(net: nn.Module, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Three, with dropout between."""
    torch.manual_seed(1)
    return [net(torch.randn(3, 4, dtype=dtype)).square().sum() for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_gradients_are_those_of_torch(
    backward: Callable[[Tensor], object], calls: list[Tensor], dtype: torch.dtype
) -> None:
    """Bit by bit, added up over three losses, with a hook on the loss and on a parameter, and the gradient of the loss kept."""
    ends: list[Any] = []
    for run in (torch.autograd.backward, backward):
        net, seen = model(dtype), list[Any]()
        net[0].weight.register_post_accumulate_grad_hook(lambda parameter, seen=seen: seen.append(bit_by_bit(parameter.grad)))
        for loss in losses(net, dtype):
            loss.register_hook(lambda gradient: gradient * 3)
            loss.retain_grad()
            run(loss)
            seen.append(bit_by_bit(loss.grad))
        ends.append((seen, bit_by_bit([parameter.grad for parameter in net.parameters()])))
    assert ends[0] == ends[1]
    assert len(calls) == 3  # those of the first run


def test_a_loss_that_is_its_own_parameter(backward: Callable[[Tensor], object]) -> None:
    """The gradient is a tensor of its own: what adds to it changes no later backward."""
    weights = [nn.Parameter(torch.tensor(2.0)) for _ in range(2)]
    for weight in weights:
        for _ in range(2):
            backward(weight + 0)
        assert weight.grad is not None
        weight.grad.mul_(5)
    backward(weights[0] * 7)
    assert [weight.grad.item() for weight in weights if weight.grad is not None] == [17.0, 10.0]


class Greedy(torch.autograd.Function):
    """Writes into the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        return gradients[0].mul_(3)


def test_a_backward_that_writes_into_its_gradient(backward: Callable[[Tensor], object]) -> None:
    """The next one begins with 1 again; also after one that failed on the way."""
    weight = nn.Parameter(torch.tensor(1.0))
    for expected in (3.0, 6.0, 9.0):
        backward(Greedy.apply(weight))
        assert weight.grad is not None
        assert weight.grad.item() == expected

    def fail(_gradient: Tensor) -> None:
        raise ValueError("a hook")

    loss = weight * 1
    loss.register_hook(fail)
    with pytest.raises(ValueError, match="a hook"):
        backward(Greedy.apply(loss))
    weight.grad = None
    backward(weight * 1)
    assert weight.grad.item() == 1.0  # type: ignore[attr-defined]


class Marked(Tensor):
    """A tensor of another class."""


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: (weight * torch.ones(1)).reshape(1),
        lambda weight: (weight * 2).as_subclass(Marked),
    ],
    ids=["one dimension", "a subclass"],
)
def test_losses_of_other_kinds(
    backward: Callable[[Tensor], object], calls: list[Tensor], make: Callable[[Tensor], Tensor]
) -> None:
    """A subclass of Tensor may have a backward of its own, so that is left to torch."""
    ends: list[Any] = []
    for run in (torch.autograd.backward, backward):
        weight = nn.Parameter(torch.tensor(2.0))
        run(make(weight))
        ends.append(bit_by_bit(weight.grad))
    assert ends[0] == ends[1]
    assert (len(calls) > 1) == (type(make(nn.Parameter(torch.tensor(2.0)))) is Marked)


def test_torch_may_log_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    """Its hooks for that are set by `torch.autograd.backward`."""
    with caplog.at_level(logging.DEBUG, "torch.autograd.graph"):
        assert direct_engine() is None


def test_inside_of_a_transform_torch_refuses(backward: Callable[[Tensor], object]) -> None:
    """Backward does not run there, and says so."""

    def transformed(x: Tensor) -> Tensor:
        loss = (x * 2).sum()
        backward(loss)
        return loss

    with pytest.raises(RuntimeError, match="functorch transform"):
        torch.func.grad(transformed)(torch.ones(2))


def test_a_loss_without_a_graph(backward: Callable[[Tensor], object]) -> None:
    """The error is ours."""
    with pytest.raises(ForwardContractError, match="has no graph"):
        backward(torch.tensor(1.0))


def test_a_torch_without_these_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is called directly."""
    monkeypatch.delattr(torch._C, "_are_functorch_transforms_active")
    assert direct_engine() is None


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 3, "max_grad_norm": 0.1}], ids=["plain", "accumulated"])
def test_a_run_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, calls: list[Tensor], options: dict[str, Any]) -> None:
    """With a value that is not finite at its end, which is located by running backward again."""
    ends, counts = [], list[int]()
    for direct in (False, True):
        calls.clear()
        with monkeypatch.context() as patch:
            if not direct:
                patch.setattr("ignite_train.fast.choose.direct_engine", lambda: None)
            net = model()
            trainer = trainer_of(net, **options)
        numbers: list[Any] = []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda trainer=trainer, into=numbers: into.append(repr(trainer.state.update_output))
        )
        torch.manual_seed(2)
        data = [(torch.randn(3, 4), torch.randn(3, 1)) for _ in range(9)]
        data[8] = (data[8][0], torch.full((3, 1), torch.inf))
        with pytest.raises(NonFiniteError) as raised:
            trainer.run(data, max_epochs=1)
        counts.append(len(calls))
        ends.append((numbers, str(raised.value), bit_by_bit(net.state_dict())))
    assert ends[0] == ends[1]
    assert counts[0] - counts[1] == len(data)  # what remains is the search for the value
