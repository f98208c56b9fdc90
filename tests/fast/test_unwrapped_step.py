"""A step without torch's wrappers is torch's step, and is left to torch where a wrapper would do anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profile

from bits import bit_by_bit
from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from ignite_train.update.stepper import OneStepper, Stepper
from tiers import accelerated

pytestmark = accelerated

WRAPPED_ALIKE = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "ASGD", "Adadelta", "Rprop"]
DATA = [(torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)), torch.zeros(5, 1)) for seed in range(6)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    return ForwardOutput(mse_loss(model(batch[0]), batch[1], reduction="sum"), 5)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The optimizers that the plain stepper has stepped."""
    found: list[str] = []
    call = OneStepper.__call__
    monkeypatch.setattr(
        OneStepper,
        "__call__",
        lambda self, *factors: (found.append(type(self.optimizer).__name__), call(self, *factors))[1],
    )
    return found


def stepper_of(optimizer: Optimizer) -> Stepper:
    """Makes a trainer, and gives its stepper. `stepper(1.0, 1.0)` steps along unchanged gradients."""
    model = nn.ParameterList(optimizer.param_groups[0]["params"])
    stepper: Stepper = create_trainer(model, optimizer, forward).process.stepper  # type: ignore[attr-defined]
    return stepper


def with_gradients(kind: Callable[..., Optimizer] = SGD, **options: Any) -> Optimizer:
    """Makes an optimizer over one parameter, with a gradient."""
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    parameter.grad = torch.tensor([0.5, -0.5])
    return kind([parameter], **({"lr": 1.0} | options))


def parameter_of(optimizer: Optimizer) -> list[float]:
    found: list[float] = optimizer.param_groups[0]["params"][0].tolist()
    return found


@pytest.mark.parametrize("name", WRAPPED_ALIKE)
def test_it_is_the_step_of_torch(name: str, plain: list[str]) -> None:
    """Bit by bit, parameters and state, of each class of torch's with these two wrappers."""
    ends = []
    for fast in (True, False):
        net = model()
        optimizer = getattr(torch.optim, name)(net.parameters())
        create_trainer(net, optimizer, forward, options=UpdateOptions(fast=fast)).run(DATA)
        ends.append((bit_by_bit(net.state_dict()), bit_by_bit(optimizer.state_dict()["state"])))

    assert ends[0] == ends[1]
    assert plain == [name] * len(DATA), "without accelerations only"


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"maximize": True, "nesterov": True, "momentum": 0.9}])
def test_updates_are_those_without_accelerations(options: dict[str, Any]) -> None:
    """The trainer's, with clipping, and with several optimizers."""
    ends = []
    for fast in (True, False):
        net = model()
        halves = {"one": SGD(net[0].parameters(), lr=0.1, **options), "other": AdamW(net[2].parameters(), lr=0.1)}  # type: ignore[index]
        trainer = create_trainer(net, halves, forward, max_grad_norm=0.3, options=UpdateOptions(fast=fast))
        trainer.run(DATA, max_epochs=2)
        ends.append(bit_by_bit(net.state_dict()))

    assert ends[0] == ends[1]


def test_a_step_of_a_trainer_does_not_enter_the_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost more than the kernels of a small model; without accelerations they are entered."""
    ranges: list[str] = []
    enter = torch.autograd.profiler.record_function.__enter__
    monkeypatch.setattr(
        torch.autograd.profiler.record_function, "__enter__", lambda self: (ranges.append(self.name), enter(self))[1]
    )
    for fast, expected in ((True, []), (False, ["Optimizer.step#SGD.step"] * 3)):
        ranges.clear()
        net = model()
        create_trainer(net, SGD(net.parameters(), lr=0.1), forward, options=UpdateOptions(fast=fast)).run(DATA[:3])
        assert ranges == expected


class Doubles(SGD):
    """A step of a user's own."""

    def step(self, closure: Any = None) -> Any:
        """Steps twice."""
        super().step(closure)
        return super().step(closure)


@contextmanager
def hook_of_the_step(register: Callable[..., Any], optimizer: Optimizer) -> Iterator[None]:
    handle = register(optimizer, lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def own_step(optimizer: Optimizer) -> Iterator[None]:
    optimizer.step = lambda *_: None  # type: ignore[assignment]
    yield


@contextmanager
def step_of_the_class(optimizer: Optimizer) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(optimizer), "step", lambda *_: None)
        yield


@contextmanager
def code_of_the_step(optimizer: Optimizer) -> Iterator[None]:
    optimizer._optimizer_step_code = lambda: None  # type: ignore[method-assign]
    yield


@contextmanager
def fused_now(optimizer: Optimizer) -> Iterator[None]:
    optimizer.param_groups[0]["fused"] = True
    yield


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda one: hook_of_the_step(Optimizer.register_step_pre_hook, one),
        lambda one: hook_of_the_step(Optimizer.register_step_post_hook, one),
        lambda one: hook_of_the_step(lambda _, hook: register_optimizer_step_pre_hook(hook), one),
        lambda one: hook_of_the_step(lambda _, hook: register_optimizer_step_post_hook(hook), one),
        lambda _: profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        own_step,
        step_of_the_class,
        code_of_the_step,
        fused_now,
    ],
)
def test_where_a_wrapper_would_do_something_the_plain_stepper_steps(
    wrapped: Callable[[Optimizer], Any], plain: list[str]
) -> None:
    """A hook of one optimizer or of all, a profiler, a step or a code of the user's own, a fused kernel, which may be wrong."""
    optimizer = with_gradients()
    step = stepper_of(optimizer)
    step(1.0, 1.0)
    assert (plain, parameter_of(optimizer)) == ([], [0.5, 2.5])
    with wrapped(optimizer):
        step(1.0, 1.0)
    assert plain == ["SGD"]


@pytest.mark.parametrize("kind", [Doubles, torch.optim.Adafactor])
def test_other_steps_are_left_alone(kind: Callable[..., Optimizer], plain: list[str]) -> None:
    """Left to torch are a step of a user's own, and a step of torch's with other wrappers."""
    stepper_of(with_gradients(kind))(1.0, 1.0)

    assert plain == [kind.__name__]  # type: ignore[attr-defined]


def test_a_wrapper_of_torchs_that_is_not_known_is_called(plain: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version of torch might have such a wrapper."""
    other = FunctionType((lambda *_: None).__code__, SGD.step.__globals__)
    vars(other)["__wrapped__"] = inspect.unwrap(SGD.step)
    monkeypatch.setattr(SGD, "step", other)
    stepper_of(with_gradients())(1.0, 1.0)

    assert plain == ["SGD"]


def test_a_profile_shows_the_step() -> None:
    """Of a trainer that has stepped without the wrappers before."""
    net = model()
    trainer = create_trainer(net, SGD(net.parameters(), lr=0.1), forward)
    trainer.run(DATA[:2])
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.run(DATA[:2], max_epochs=2)

    assert "Optimizer.step#SGD.step" in [event.key for event in profiler.key_averages()]


def test_a_schedule_counts_the_steps(plain: list[str]) -> None:
    """Otherwise it warns that it was stepped before its optimizer, which is an error in these tests."""
    optimizer = with_gradients()
    schedule = StepLR(optimizer, 1)
    stepper_of(optimizer)(1.0, 1.0)
    schedule.step()

    assert (plain, parameter_of(optimizer)) == ([], [0.5, 2.5])


class Recorded(Tensor):
    """Notes whether gradients are on in what is done to it, and raises if it is asked to."""

    seen: ClassVar[list[bool]] = []
    raises: ClassVar[bool] = False

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(torch.is_grad_enabled())
        if cls.raises and function is Tensor.add_:
            raise RuntimeError("in the middle of the step")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_off_within_a_step_and_as_before_after_it(
    enabled: bool, raises: bool, plain: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it raises."""
    optimizer = with_gradients(foreach=False)
    step = stepper_of(optimizer)
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = parameter.grad.as_subclass(Recorded)
    monkeypatch.setattr(Recorded, "raises", raises)
    Recorded.seen.clear()
    with torch.set_grad_enabled(enabled):
        with pytest.raises(RuntimeError, match="in the middle") if raises else nullcontext():
            step(1.0, 1.0)
        assert torch.is_grad_enabled() == enabled

    assert plain == []
    assert Recorded.seen[-1] is False
