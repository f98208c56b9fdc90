"""A model compiled in place trains as it would without, and is not compiled again and again."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import compiling
from ignite_train import (
    ForwardOutput,
    NonFiniteError,
    Trainer,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.fast.choose import settings_of_graphs
from ranks import run_ranks
from tiers import nightly
from update_options import with_options

Batch = tuple[Tensor, Tensor]

pytestmark = compiling.ALONE


def equal_batches(number: int, size: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)) for _ in range(number)]


class Net(nn.Module):
    """A module of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Setup(NamedTuple):
    """A trainer and what it moves."""

    model: Net
    optimizer: torch.optim.Optimizer
    trainer: Trainer


def summed_loss(model: nn.Module, batch: Batch) -> ForwardOutput:
    x, y = batch
    return ForwardOutput((model(x) - y).square().sum(), len(y))


def make(**arguments: Any) -> Setup:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Setup(model, optimizer, create_trainer(model, optimizer, summed_loss, **with_options(**arguments)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_as_a_plain_one(bits, backend):
    """Compiled by a backend that keeps each operation, parameters, moments and the names of the state are the same bits."""
    plain = make(accumulation_steps=3, max_grad_norm=0.1)
    compiled = make(accumulation_steps=3, max_grad_norm=0.1, compile={"backend": backend})
    for setup in (plain, compiled):
        setup.trainer.run(equal_batches(7), max_epochs=2)
    assert bits(compiled.model.state_dict()) == bits(plain.model.state_dict())
    assert bits(compiled.optimizer.state_dict()) == bits(plain.optimizer.state_dict())
    assert type(compiled.model) is Net


@pytest.mark.slow
def test_it_is_compiled_once_for_training_and_once_for_evaluation():
    """Accumulating, a last group that is smaller, a change of the learning rate and evaluations in between: two graphs."""
    backend = compiling.CountingBackend()
    model, optimizer, trainer = make(accumulation_steps=3, compile={"backend": backend})
    evaluator = create_evaluator(model, summed_loss)
    graphs: list[int] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: graphs.append(backend.graphs))

    @trainer.on(Events.EPOCH_COMPLETED)
    def _() -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        evaluator.run(equal_batches(2))

    trainer.run(equal_batches(7), max_epochs=3)
    assert graphs == [1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert backend.graphs == 2


@pytest.mark.slow
def test_a_smaller_last_micro_batch_is_compiled_for_once():
    """A micro-batch of another size costs one more graph, which serves for each further size."""
    backend = compiling.CountingBackend()
    _, _, trainer = make(accumulation_steps=2, compile={"backend": backend})
    trainer.run([*equal_batches(4), *equal_batches(1, size=3), *equal_batches(1, size=2)], max_epochs=3)
    assert backend.graphs == 2


def test_nothing_is_compiled_unless_asked(monkeypatch):
    """By default torch.compile is not called."""
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    make().trainer.run(equal_batches(2))


@pytest.mark.parametrize(
    ("compile", "bare", "expected"),
    [
        ("update", False, [{}]),
        ({"update": True}, False, [{}]),
        ({"update": True, "backend": "eager"}, False, [{"backend": "eager"}]),
        ({"update": True, "backend": "eager"}, True, []),
        ("update", True, []),
        ({"backend": "eager"}, False, [{"backend": "eager"}]),
    ],
    ids=["update", "no-options", "options", "bare-options", "bare", "model-alone"],
)
def test_the_model_is_compiled_beside_whole_updates(monkeypatch, compile, bare, expected):  # noqa: A002
    """For evaluation, and for updates outside a graph: with the same options, and not if torch would leave it uncompiled."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda _, **options: found.append(options))
    model = nn.Sequential(nn.Linear(4, 1)) if bare else Net()
    create_trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), summed_loss, compile=compile)
    assert found == expected


def test_whole_updates_are_compiled_for_their_device() -> None:
    """By default: as a CUDA graph there, and with calls in C++ on the CPU. Options of the user replace both."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert settings_of_graphs("update", cuda) == settings_of_graphs({"update": True}, cuda) == {"mode": "reduce-overhead"}
    assert settings_of_graphs("update", cpu) == {"options": {"cpp_wrapper": True, "layout_optimization": False}}
    assert settings_of_graphs({"update": True, "backend": "eager"}, cpu) == {"backend": "eager"}
    assert [settings_of_graphs(options, cpu) for options in (False, True, {"backend": "eager"})] == [None] * 3


@pytest.mark.parametrize("by", ["trainer", "user"])
def test_a_value_that_is_not_finite_is_found_in_a_compiled_model(by):
    """The replay runs the model as it is written, so that it sees the module where the value arises."""

    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.root = nn.Linear(1, 1), Root()

        def forward(self, x: Tensor) -> Tensor:
            return self.root(self.linear(x))

    model = Whole()
    with torch.no_grad():
        model.linear.weight.fill_(-1.0)
        model.linear.bias.zero_()
    if by == "user":
        model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(
        model,
        optimizer,
        lambda model, x: ForwardOutput(model(x).sum(), 1),
        compile={"backend": "eager"} if by == "trainer" else False,
    )
    with pytest.raises(NonFiniteError, match=r"NaN in the output of module 'root' \(Root\)"):
        trainer.run([torch.full((1, 1), 4.0)])


def train_on_two_ranks(backend: str | None) -> list[float]:
    """Two updates in DistributedDataParallel, with and without compiling."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(
        DistributedDataParallel(model),
        optimizer,
        summed_loss,
        accumulation_steps=2,
        options=UpdateOptions(reduction="ddp"),
        compile={"backend": backend} if backend is not None else False,
    )
    batches = equal_batches(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.run(batches[::2] if torch.distributed.get_rank() == 0 else batches[1::2])
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


@pytest.mark.slow
def test_a_compiled_model_in_ddp():
    """On two ranks the compiled model trains to the same bits as the plain one, alike on both."""
    plain, compiled = (run_ranks(train_on_two_ranks, backend) for backend in (None, "eager"))
    assert compiled[0] == compiled[1] == plain[0]


# --- compiled by the user, block by block ---


class Block(nn.Module):
    """One layer of many."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Deep(nn.Module):
    """Twelve equal blocks: more than torch would compile one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def train_block_by_block(wrapping: str, *, compiled: bool) -> tuple[list[float], list[int]]:
    """The losses of three epochs with an evaluation after each, and how many graphs there were after each update."""
    torch.manual_seed(0)
    model, backend = Deep(), compiling.CountingBackend()
    for block in model.blocks if compiled else ():
        block.compile(backend=backend, fullgraph=True)
    if wrapping == "fsdp":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    wrapped = DistributedDataParallel(model) if wrapping == "ddp" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reduction = "auto" if wrapping == "plain" else wrapping
    trainer = create_trainer(
        wrapped, optimizer, summed_loss, accumulation_steps=3, max_grad_norm=0.1, options=UpdateOptions(reduction=reduction)
    )
    evaluator = create_evaluator(wrapped, summed_loss)
    losses: list[float] = []
    graphs: list[int] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def _() -> None:
        losses.append(trainer.state.output.loss)
        graphs.append(backend.graphs)

    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(equal_batches(2)))
    trainer.run(equal_batches(7), max_epochs=3)
    return losses, graphs


def train_both_ways(wrapping: str) -> list[tuple[list[float], list[int]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [train_block_by_block(wrapping, compiled=compiled) for compiled in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ["plain", "ddp", nightly("fsdp")])
def test_equal_blocks_are_compiled_once(wrapping):
    """One graph for all of them in training and one in evaluation, and the same losses, bit by bit."""
    ranks = [train_both_ways("plain")] if wrapping == "plain" else run_ranks(train_both_ways, wrapping)
    for (losses, _), (compiled_losses, graphs) in ranks:
        assert compiled_losses == losses
        assert graphs == [1, 1, 1, 2, 2, 2, 2, 2, 2]


def test_what_cannot_be_compiled_is_refused():
    """A misspelt argument, second derivatives and a model that torch would leave as it is are told before the first batch."""
    with pytest.raises(TypeError, match="compile must be a bool or a mapping"):
        make(compile="inductor")
    for whole in ("update", {"update": True, "backend": "eager"}):
        with pytest.raises(ValueError, match=r"compile must not be .* with UpdateOptions\(fast=False\)"):
            make(compile=whole, fast=False)
    with pytest.raises(ValueError, match="retain_graph must be False with compile"):
        make(compile=True, retain_graph=True)
    with pytest.raises(ValueError, match="create_graph must be False with compile"):
        make(compile=True, create_graph=True)
    model = nn.Linear(4, 1)
    for compile in (True, {"backend": "eager"}):  # noqa: A001
        with pytest.raises(ValueError, match="compile must be False for a bare Linear"):
            create_trainer(model, torch.optim.SGD(model.parameters()), summed_loss, compile=compile)


def refusal_of_a_sharded_model() -> str:
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="compile") as raised:
        create_trainer(model, torch.optim.SGD(model.parameters()), summed_loss, compile=True)
    return str(raised.value)


def test_a_sharded_model_is_not_compiled_as_a_whole():
    """The message says what to do instead."""
    assert run_ranks(refusal_of_a_sharded_model, world_size=1) == [
        "compile must be False for a model that fully_shard was applied to; compile its blocks before sharding"
    ]
