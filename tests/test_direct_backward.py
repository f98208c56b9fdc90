"""The engine called directly leaves the gradients of `torch.autograd.backward`, which is called where they could differ."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compiling import lets_torch_read_grad
from ignite_train.model import direct_backward as module
from ignite_train.model.direct_backward import direct_backward, is_direct_right


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The losses that go to the engine directly."""
    found: list[Tensor] = []
    original = module._engine_run_backward

    def run(loss: Tensor, **given: bool) -> None:
        found.append(loss)
        original(loss, **given)

    assert is_direct_right()
    monkeypatch.setattr(module, "_engine_run_backward", run)
    return found


def model_and_loss(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
        return model, model(torch.randn(5, 3, dtype=dtype)).square().sum()


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.detach() for parameter in model.parameters()]


class Noting(TorchFunctionMode):
    """Notes which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.called.append(function)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "given", [{}, {"retain_graph": True}, {"retain_graph": True, "create_graph": True}], ids=["plain", "retain", "create"]
)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_the_gradients_of_torch(engine, bits, given, dtype):
    """Two of them are added up where the graph stays; hooks see the same; `create_graph` leaves a graph on them."""
    outcomes = []
    for run in (direct_backward, torch.autograd.backward):
        model, loss = model_and_loss(dtype)
        seen: list[Tensor] = []
        loss.register_hook(lambda gradient: seen.append(gradient) or gradient * 3)  # noqa: B023
        model[0].weight.register_hook(lambda gradient: seen.append(gradient.detach()))  # noqa: B023
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.detach()))  # noqa: B023
        for _ in range(1 + len(given)):
            run(loss, **given)
        outcomes.append(bits([gradients_of(model), seen]))
        assert all(parameter.grad.requires_grad == ("create_graph" in given) for parameter in model.parameters())
        if not given:
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                run(loss)
        for parameter in model.parameters():
            parameter.grad = None

    assert outcomes[0] == outcomes[1]
    assert len(engine) == 1 + len(given) + (not given)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0:UserWarning")
def test_anomaly_mode_finds_the_nan_of_backward(engine):
    x = torch.zeros(2, requires_grad=True)
    with (
        torch.autograd.detect_anomaly(check_nan=True),
        pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"),
    ):
        direct_backward((x.sqrt() * 0.0).sum())
    assert len(engine) == 1


@pytest.mark.slow
@lets_torch_read_grad
def test_compiled_autograd_is_asked(engine):
    """Its compiler gets the graph of backward."""
    model, loss = model_and_loss()
    expected, other = model_and_loss()
    torch.autograd.backward(other)
    traced = []
    with torch._dynamo.compiled_autograd._enable(lambda graph: traced.append(graph) or graph):
        direct_backward(loss)

    assert (len(traced), len(engine)) == (1, 1)
    torch.testing.assert_close(gradients_of(model), gradients_of(expected))


def test_a_log_of_the_graph(engine, caplog):
    """Torch logs each node that runs, at the level DEBUG: its function is called, which hooks on the log."""
    with caplog.at_level(logging.DEBUG, "torch.autograd.graph"):
        direct_backward(model_and_loss()[1])
    assert len(engine) == 0
    assert any("Executing" in record.getMessage() for record in caplog.records)


def test_torchs_function_is_called_where_it_could_be_seen(engine, monkeypatch):
    """By a mode, a class of tensors, or in its place."""
    with Noting() as mode:
        direct_backward(model_and_loss()[1])
    assert torch.autograd.backward in mode.called

    model, loss = model_and_loss()
    direct_backward(loss.as_subclass(type("Special", (Tensor,), {})))
    assert None not in gradients_of(model)

    replaced: list[Tensor] = []
    monkeypatch.setattr(torch.autograd, "backward", lambda loss, **_: replaced.append(loss))
    direct_backward(model_and_loss()[1])
    assert len(replaced) == 1
    assert engine == []


def test_torch_refuses_what_it_refuses(engine):
    """A loss of several elements, a complex one, and a transform of `torch.func`."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        direct_backward(x * 2)
    with pytest.raises(RuntimeError, match="only for real scalar outputs"):
        direct_backward((x * 1j).sum())

    def inside(y: Tensor) -> Tensor:
        direct_backward((x * 2).sum())
        return y.sum()

    with pytest.raises(RuntimeError, match="functorch transform"):
        torch.func.grad(inside)(torch.ones(2))
    assert engine == []


def test_a_trial_is_hidden_from_the_user(caplog):
    """A transform that is active at the first backward does not fail it, and hooks on saved tensors do not see it."""
    x, seen = torch.ones(2, requires_grad=True), []

    def inside(y: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="functorch transform"):
            direct_backward((x * 2).sum())
        return y.sum()

    loss = (x * 2).sum()
    is_direct_right.cache_clear()
    with caplog.at_level(logging.WARNING, "ignite_train"):
        torch.func.grad(inside)(torch.ones(2))
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
            direct_backward(loss)

    assert is_direct_right()
    assert (seen, caplog.records) == ([], [])


def test_a_torch_without_the_functions_that_are_known(engine, monkeypatch):
    monkeypatch.setattr(module, "_is_known", False)
    model, loss = model_and_loss()
    direct_backward(loss)

    assert None not in gradients_of(model)
    assert engine == []


REAL_ENGINE = module._run_engine
ENGINES = {
    "none": None,
    "idle": lambda *_, **__: None,
    "other": lambda one: one,
    "frees the graph": lambda losses, ones, _keep, *rest, **options: REAL_ENGINE(losses, ones, False, *rest, **options),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_trial_finds_an_engine_that_differs(monkeypatch, caplog, name):
    is_direct_right.cache_clear()
    monkeypatch.setattr(module, "_run_engine", ENGINES[name])
    model, loss = model_and_loss()
    with caplog.at_level(logging.WARNING, "ignite_train"):
        direct_backward(loss)
        direct_backward(model_and_loss()[1])
    is_direct_right.cache_clear()

    assert None not in gradients_of(model)
    assert ["differs from torch.autograd.backward" in record.getMessage() for record in caplog.records] == [True]


def test_threads_of_a_device_get_what_torch_gives_them(monkeypatch):
    """Torch hands the context of this thread to those of the devices, in its function around the engine."""
    for accelerator in (None, torch.device("cuda")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)  # noqa: B023
        assert (module._engine() is torch.autograd.graph._engine_run_backward) == (accelerator is not None)
