"""A backward that is traced and compiled gives the gradients of one that is not, and is not traced again and again."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import compiling
from ignite_train import (
    ForwardOutput,
    StaticLossScaling,
    Trainer,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ranks import run_ranks
from update_options import with_options

Batch = tuple[Tensor, Tensor]

pytestmark = compiling.ALONE


class Net(nn.Module):
    """A module of a user's own; its loss is outside, and it has a buffer and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.norm(torch.tanh(self.first(x)))))


class Setup(NamedTuple):
    """A trainer and what it moves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    trainer: Trainer


def batches(*sizes: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return [(torch.randn(size, 4, **options), torch.randn(size, 1, **options)) for size in sizes]


def summed_loss(model: nn.Module, batch: Batch) -> ForwardOutput:
    x, y = batch
    return ForwardOutput((model(x) - y).square().sum(), len(y))


def make(*, backward: bool, backend: Any = "aot_eager", **arguments: Any) -> Setup:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compiling = {"compile": {"backend": backend}, "compiled_autograd": True} if backward else {}
    return Setup(model, optimizer, create_trainer(model, optimizer, summed_loss, **with_options(**arguments, **compiling)))


def captures() -> int:
    """How often torch has traced a backward."""
    return counters["compiled_autograd"]["captures"]


def compiled() -> int:
    """How many graphs torch has compiled, of forward and backward."""
    return counters["stats"]["unique_graphs"]


def gradients_while_it_trains(setup: Setup, data: list[Batch]) -> list[Tensor]:
    """The gradients after each micro-batch, and in the end the parameters."""
    seen: list[Tensor] = []

    @setup.trainer.on(TrainEvents.BACKWARD_COMPLETED)
    def _() -> None:
        seen.append(torch.cat([parameter.grad.flatten() for parameter in setup.model.parameters()]).clone())

    setup.trainer.run(data, max_epochs=2)
    return [*seen, torch.cat([parameter.detach().flatten() for parameter in setup.model.parameters()])]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_the_gradients_are_the_same(steps):
    """After each micro-batch, alone, added to what is there, and in a last group that is smaller; traced once for each way."""
    plain, traced = (
        gradients_while_it_trains(make(backward=backward, accumulation_steps=steps, max_grad_norm=0.1), batches(*[4] * 7))
        for backward in (False, True)
    )

    assert len(plain) == 15
    for expected, got in zip(plain, traced, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    assert captures() == (1 if steps == 1 else 2)


@pytest.mark.nightly
def test_the_gradients_are_the_same_in_compiled_code():
    """As torch compiles by default, to what the order of additions leaves open."""
    plain, traced = (
        gradients_while_it_trains(make(backward=backward, backend="inductor", accumulation_steps=2), batches(4, 4, 4))
        for backward in (False, True)
    )

    for expected, got in zip(plain, traced, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    assert captures() == 2


@pytest.mark.slow
def test_nothing_is_traced_again():
    """Further updates, a smaller last group, evaluations and another learning rate: two traces, of the first update."""
    model, optimizer, trainer = make(backward=True, accumulation_steps=3)
    evaluator = create_evaluator(model, summed_loss)
    counts: list[tuple[int, int]] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: counts.append((captures(), compiled())))

    @trainer.on(Events.EPOCH_COMPLETED)
    def _() -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        evaluator.run(batches(4, 4))

    trainer.run(batches(*[4] * 7), max_epochs=3)
    evaluation = 1
    assert counts == [(2, 3)] * 3 + [(2, 3 + evaluation)] * 6


@pytest.mark.slow
def test_sizes_that_vary_are_traced_a_few_times():
    """When torch has seen that a size varies, one trace serves for all."""
    trainer = make(backward=True, accumulation_steps=2).trainer
    trainer.run(batches(*range(4, 16)))
    so_far = captures(), compiled()
    trainer.run(batches(*range(16, 46)), max_epochs=2)

    assert (captures(), compiled()) == so_far


@pytest.mark.slow
def test_another_loss_scale_is_not_traced_again():
    """The loss scale is no part of the trace."""
    scaling = StaticLossScaling(2.0**16)
    trainer = make(backward=True, loss_scaling=scaling).trainer

    @trainer.on(Events.ITERATION_COMPLETED)
    def _() -> None:
        scaling.scale /= 2

    trainer.run(batches(4, 4, 4, 4))

    assert captures() == 1
    assert trainer.state.output.loss_scale == 2.0**13


@pytest.mark.slow
def test_a_graph_that_is_kept_is_whole():
    """With retain_graph a handler can run backward once more."""
    model, _, trainer = make(backward=True, retain_graph=True)
    ratios: list[float] = []

    @trainer.on(TrainEvents.BACKWARD_COMPLETED)
    def _() -> None:
        weight = model.last.weight
        (again,) = torch.autograd.grad(trainer.state.forward_output.loss, weight)
        ratios.append(float((weight.grad / again).sub(1).abs().max()))

    trainer.run(batches(4, 4))
    assert max(ratios) < 1e-12


@pytest.mark.slow
def test_only_its_own_backward_is_compiled():
    """What a handler differentiates is none of the trainer's business; nor is any backward after the run."""
    model, _, trainer = make(backward=True)
    trainer.run(batches(4, 4))
    so_far = captures()
    summed_loss(model, batches(4)[0]).loss.backward()

    assert so_far == 1
    assert captures() == so_far


@pytest.mark.slow
def test_nothing_is_traced_unless_asked(monkeypatch):
    """By default backward is torch's own."""
    monkeypatch.setattr(torch._dynamo.compiled_autograd, "_enable", lambda *_, **__: pytest.fail("traced"))
    make(backward=False, compile={"backend": "eager"}).trainer.run(batches(4, 4))


class Failing:
    """Runs graphs as they are, and lacks memory when a backward is run for the `number`th time."""

    def __init__(self, number: int) -> None:
        self._left = number

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        if not torch._dynamo.compiled_autograd.in_compiled_autograd_region:
            return graph.forward

        def run(*inputs: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise torch.OutOfMemoryError
            return graph.forward(*inputs)

        return run


@pytest.mark.slow
def test_a_backward_that_lacks_memory_is_taken_back():
    """The update is the one in which that micro-batch had no weight."""
    data = batches(*[4] * 6)
    failed = make(backward=True, backend=Failing(5), accumulation_steps=3, on_out_of_memory="skip")
    failed.trainer.run(data)
    without = make(backward=False, accumulation_steps=lambda update: 3 if update == 1 else 2)
    without.trainer.run([batch for index, batch in enumerate(data) if index != 4])

    assert failed.trainer.state.output.num_out_of_memory == 1
    for expected, got in zip(without.model.state_dict().values(), failed.model.state_dict().values(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


# --- several ranks ---


def train_replicas(backward: bool) -> tuple[list[float], int]:
    """Ranks with three micro-batches and two, in updates of two."""
    model, _, trainer = make(backward=backward, accumulation_steps=2, reduction="explicit", max_grad_norm=0.1)
    rank = torch.distributed.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.run(batches(4, 4, 4) if rank == 0 else batches(4, 4, 4, 4)[2:])
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist(), captures()


@pytest.mark.slow
def test_on_plain_replicas():
    """The ranks end alike, and where they end without it; also the one that has no data in the last update."""
    plain, traced = (run_ranks(train_replicas, backward) for backward in (False, True))

    assert traced[0][0] == traced[1][0]
    assert traced[0][0] == pytest.approx(plain[0][0], rel=1e-12)
    assert [count for _, count in traced] == [2, 2]


def refusal_in_ddp() -> str:
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="compiled_autograd") as raised:
        create_trainer(model, optimizer, summed_loss, compile=True, options=UpdateOptions(compiled_autograd=True))
    return str(raised.value)


def test_what_cannot_be_traced_is_refused():
    """Before the first batch, with what to do instead."""
    with pytest.raises(ValueError, match="compiled_autograd must be False without compile; pass compile=True"):
        create_trainer(
            model := Net(), torch.optim.SGD(model.parameters()), summed_loss, options=UpdateOptions(compiled_autograd=True)
        )
    with pytest.raises(ValueError, match="create_graph must be False with compile"):
        make(backward=True, create_graph=True)
    assert run_ranks(refusal_in_ddp, world_size=1) == [
        "compiled_autograd must be False in DistributedDataParallel, whose reduction torch does not trace; pass the module "
        "inside, with options=UpdateOptions(reduction='explicit')"
    ]
