"""The gradient norm where float32 cannot hold its squares, and what an update must not be asked to step with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import embedding
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from ignite_train import (
    LearningRateError,
    NonFiniteError,
    SparseGradientError,
    TrainEvents,
    UpdateOptions,
    create_trainer,
)
from ignite_train.model.gradients import Gradients
from ignite_train.ranks import collectives
from ranks import run_ranks

# The losses are sums that are taken as they are, because it is the gradients that are of interest.
pytestmark = pytest.mark.filterwarnings("ignore::ignite_train.LossDeclarationWarning")


class Scaled(nn.Module):
    """A weight whose gradient is what it is called with."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def gradient(size: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return (size * torch.linspace(0.5, 1.0, 24, dtype=torch.float64).view(6, 4)).to(dtype)


@pytest.mark.parametrize("host", ["cpu", "nowhere"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1e20, torch.float32), (3e36, torch.float32), (1e-30, torch.float32), (1e20, torch.bfloat16), (1e200, torch.float64)],
    ids=str,
)
def test_the_norm_of_finite_gradients_is_finite(monkeypatch, size, dtype, fused, host):
    """Whatever their size, it is that of float64 arithmetic, and the clipped step is made."""
    monkeypatch.setattr("ignite_train.device.to_host._HOST", host)
    model, x = Scaled(dtype), gradient(size, dtype)
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.5, fused=fused), lambda m, x: m(x), max_grad_norm=1.0)
    trainer.run([x])
    peak = x.double().abs().max().item()
    right = peak * (x.double() / peak).norm().item()
    assert trainer.state.output.grad_norm == pytest.approx(right, rel=1e-6)
    assert trainer.state.num_steps == 1
    step = x.double() / peak * (0.5 * min(peak, peak / right))
    tolerance = 2**-7 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(model.weight.double().detach(), 1.0 - step, rtol=tolerance, atol=0.0)


class Twice(SGD):
    """Evaluates the loss twice in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        closure()
        super().step()


@pytest.mark.parametrize("size", [1e20, 1e-30], ids=str)
def test_the_norm_of_each_evaluation_of_a_closure_is_finite(size):
    """Each evaluation is clipped by the norm of float64 arithmetic."""
    model, x = Scaled(), gradient(size)
    options = UpdateOptions(closure=True)
    trainer = create_trainer(model, Twice(model.parameters(), lr=0.5), lambda m, x: m(x), max_grad_norm=1.0, options=options)
    trainer.run([x])
    assert trainer.state.update_output.num_evaluations == 2
    assert trainer.state.num_steps == 1
    step = 0.5 * x.double() * min(1.0, 1.0 / (x.double().norm().item() + 1e-6))
    torch.testing.assert_close(model.weight.double().detach(), 1.0 - step, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("host", ["cpu", "nowhere"])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_the_norm_of_complex_gradients(monkeypatch, size, host):
    """Beside those of a wider dtype; also where float32 cannot hold their squares."""
    monkeypatch.setattr("ignite_train.device.to_host._HOST", host)
    model = nn.ParameterDict({"a": torch.ones(3, dtype=torch.complex64), "b": torch.ones(2, dtype=torch.float64)})
    turned = size * torch.tensor([3 + 4j, 1j, -2.0], dtype=torch.complex64)

    def forward(model: Any, _: Any) -> Tensor:
        return (model["a"] * turned).real.sum().double() + size * model["b"].sum()

    trainer = create_trainer(model, SGD(model.parameters(), lr=0.0), forward)
    trainer.run([0])
    assert trainer.state.update_output.grad_norm == pytest.approx(size * math.sqrt(25 + 1 + 4 + 2), rel=1e-6)


@pytest.mark.parametrize("host", ["float32", "float64"])
def test_the_norm_of_gradients_on_host_and_device(monkeypatch, host):
    """Those of one dtype are said to be on the host, and the others on an accelerator: all of them count."""
    model = nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float64)})
    gradients = Gradients(model, SGD(model.parameters(), lr=0.1))
    model["a"].grad, model["b"].grad = torch.tensor([2.0, 3.0, 6.0]), torch.tensor([10.0, 20.0]).double()
    on_host = iter([host == "float32", host == "float64"])
    monkeypatch.setattr("ignite_train.model.gradients.is_on_host", lambda device: next(on_host))
    assert float(gradients.norm()) == pytest.approx(math.sqrt(4 + 9 + 36 + 100 + 400), rel=1e-6)


def test_the_norm_of_a_large_gradient_with_gaps():
    """As a handler may leave one behind: it is read where its elements are, and not what lies between them."""
    model = nn.ParameterDict({"a": torch.zeros(2**18), "b": torch.zeros(2)})
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.0), lambda m, x: m["a"].sum() + m["b"].sum())

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def replace() -> None:
        model["a"].grad = torch.tensor([3.0, 100.0]).repeat(2**18, 1)[:, 0]

    trainer.run([0])
    assert trainer.state.update_output.grad_norm == pytest.approx(math.sqrt(9 * 2**18 + 2), rel=1e-6)


@pytest.mark.parametrize("host", ["cpu", "nowhere"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_element_that_is_not_finite_is_still_found(monkeypatch, bad, host):
    """Taking the norm again does not make a gradient finite that is not."""
    monkeypatch.setattr("ignite_train.device.to_host._HOST", host)
    model, x = Scaled(), gradient(1e20)
    model.weight.register_hook(lambda grad: torch.where(torch.arange(24).view(6, 4) == 7, bad, grad))
    with pytest.raises(NonFiniteError):
        create_trainer(model, SGD(model.parameters(), lr=0.5, fused=True), lambda m, x: m(x)).run([x])
    assert model.weight.tolist() == [[1.0] * 4] * 6


def norms_on_ranks() -> dict[str, list[Any]]:
    """Norms and numbers of steps of three updates, in each way; the last one's gradients are infinite."""
    seen: dict[str, list[Any]] = {}
    for way in ("ddp", "auto", "explicit", "fsdp"):
        model: Any = Scaled()
        if way == "fsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        wrapped = DistributedDataParallel(model) if way in ("ddp", "auto") else model
        optimizer = AdamW(model.parameters(), lr=0.0, fused=True)
        trainer = create_trainer(
            wrapped,
            optimizer,
            lambda m, x: (m(x), 1),
            options=UpdateOptions(reduction=way, on_nonfinite="skip"),
            max_grad_norm=1.0,
        )
        found = seen[way] = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda t, f=found: f.append(t.state.output.grad_norm))
        trainer.run([gradient(1e20), gradient(1e-30), gradient(math.inf)])
        found.append(trainer.state.num_steps)
    return seen


@pytest.mark.slow
def test_the_norm_is_finite_in_each_way_of_crossing_ranks():
    """On both ranks alike."""
    first, second = run_ranks(norms_on_ranks)
    assert repr(first) == repr(second)
    right = gradient(1.0).double().norm().item()
    for large, small, infinite, num_steps in first.values():
        assert large == pytest.approx(1e20 * right, rel=1e-6)
        assert small == pytest.approx(1e-30 * right, rel=1e-6)
        assert not math.isfinite(infinite)
        assert num_steps == 2


# --- learning rates ---


@pytest.mark.parametrize("host", ["cpu", "nowhere"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_learning_rate_that_is_not_finite_is_refused(monkeypatch, bits, bad, as_tensor, host):
    """Before the step: parameters and moments are those of the update before, on an accelerator too."""
    monkeypatch.setattr("ignite_train.device.to_host._HOST", host)
    model = Scaled()
    rate: Any = torch.tensor(0.1) if as_tensor else 0.1
    groups = [{"params": []}, {"params": model.parameters(), "lr": rate}]
    optimizer = SGD(groups, lr=0.1, fused=True)
    trainer = create_trainer(model, optimizer, lambda m, x: m(x))
    contents: list[Any] = []

    def spoil() -> None:
        contents.append(bits([model.state_dict(), list(optimizer.state.values())]))
        if as_tensor:
            rate.fill_(bad)
        else:
            optimizer.param_groups[1]["lr"] = bad

    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), spoil)
    with pytest.raises(LearningRateError, match=r"finite learning rates, got (nan|inf) in param_groups\[1\]"):
        trainer.run([gradient(1.0)] * 5)
    assert trainer.state.num_steps == 3
    assert contents == [bits([model.state_dict(), list(optimizer.state.values())])]


def test_a_learning_rate_that_a_handler_spoils_is_refused():
    """Also in the last moment before the step."""
    model = Scaled()
    optimizer = SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, lambda m, x: m(x))
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: optimizer.param_groups[0].update(lr=math.nan))
    with pytest.raises(LearningRateError):
        trainer.run([gradient(1.0)])
    assert model.weight.tolist() == [[1.0] * 4] * 6


def test_a_learning_rate_is_looked_at_before_the_first_batch():
    """A NaN that is there from the beginning is an argument that is wrong."""
    model = Scaled()
    with pytest.raises(ValueError, match=r"optimizer must have finite learning rates, got nan in param_groups\[0\]"):
        create_trainer(model, SGD(model.parameters(), lr=math.nan), lambda m, x: m(x))


# --- what has no norm, or no real one ---


class Table(nn.Module):
    """An embedding by the functional call, which torch gives a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(10, 4))

    def forward(self, index: Tensor) -> Tensor:
        return embedding(index, self.table, sparse=True).sum()


def sparse_message(way: Any) -> str:
    model: nn.Module = Table() if way != "fsdp" else fully_shard(Table(), mesh=init_device_mesh("cpu", (2,)))
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    trainer = create_trainer(
        wrapped, SGD(model.parameters(), lr=0.1), lambda m, x: m(x), options=UpdateOptions(reduction=way), accumulation_steps=2
    )
    with pytest.raises(SparseGradientError) as caught:
        trainer.run([torch.tensor([1, 2])] * 2)
    assert model.table.grad is None
    return str(caught.value)


@pytest.mark.slow
def test_a_sparse_gradient_is_refused_in_one_line():
    """Wherever torch fails over it, with the name of the parameter; and before it fails where the model is sharded."""
    right = (
        "the gradient of 'table' is sparse; that is possible for the weight of an nn.Embedding or nn.EmbeddingBag with "
        "sparse=True, where fully_shard is not used; use such a module, or call the embedding with sparse=False"
    )
    assert sparse_message("auto") == right
    for way in ("ddp", "explicit", "fsdp"):
        assert run_ranks(sparse_message, way) == [right] * 2


class Complex(nn.Module):
    """A model whose first parameter is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.second = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.first * x).abs().square().sum() + (self.second * x).sum()


def train_complex(way: Any) -> list[Any]:
    """Two updates, for the second of which rank 1 has no data."""
    model = Complex()
    wrapped = model if way == "explicit" else DistributedDataParallel(model)
    trainer = create_trainer(
        wrapped, SGD(model.parameters(), lr=0.1), lambda m, x: (m(x), 1), options=UpdateOptions(reduction=way)
    )
    trainer.run([torch.full((3,), 1.0 + number) for number in range(2 - collectives.rank())])
    return [model.first.tolist(), model.second.tolist()]


@pytest.mark.slow
def test_a_rank_without_data_may_have_a_complex_parameter_first():
    """The update is that of the other rank's samples, in each way of crossing ranks."""
    # x = 1 on both ranks, then x = 2 on one: d|w|²x²/dw is 2wx² in torch's convention, and the mean of x is the other's.
    first, second = 1.0 - 0.1 * 2.0, 1.0 - 0.1 * 1.0
    first, second = first - 0.1 * 2.0 * first * 4.0, second - 0.1 * 2.0
    for way in ("ddp", "auto", "explicit"):
        for found in run_ranks(train_complex, way):
            assert found[0] == pytest.approx([complex(first)] * 3, rel=1e-6)
            assert found[1] == pytest.approx([second] * 3, rel=1e-6)


@pytest.mark.parametrize("factor", [1 / 3, 0.7, 3e-38, 3e38])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_multiplied_gradients_are_bitwise_those_times_a_number(dtype, factor):
    """On the host float32 ones are multiplied by a tensor, which is quicker: it rounds the factor no further than a number."""
    torch.manual_seed(0)
    model = nn.ParameterDict({"a": torch.zeros(301, dtype=dtype), "b": torch.zeros(2, 3, dtype=dtype)})
    gradients = Gradients(model, SGD(model.parameters(), lr=0.1))
    for parameter in model.values():
        parameter.grad = torch.randn_like(parameter) * (1e-30 if factor > 1 else 1.0)
    expected = [parameter.grad.clone() for parameter in model.values()]
    torch._foreach_mul_(expected, factor)
    gradients.norm()
    gradients.multiply(factor)
    assert all(torch.equal(parameter.grad, right) for parameter, right in zip(model.values(), expected, strict=True))
