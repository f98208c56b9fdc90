"""Handlers on models whose parameters are DTensors on a mesh: each gives what it gives on one process, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshes
from ignite_train import ForwardOutput, ShardedSampler, Trainer, create_evaluator
from ignite_train.handlers import (
    Freeze,
    GradientMonitor,
    GradNormConsistency,
    LearningRateFinder,
    ModelEMA,
    StateConsistency,
    StateMismatchError,
    Validation,
    predict,
)
from meshes import LAYOUTS, Layout
from ranks import Ranks, run_ranks
from tiers import slow

ALONE = Layout(meshes.Net, lambda _model, _mesh: None, (1,), ("dp",), None, ("dp",))
WAYS = ["TP2 x DP2", slow("SP2 x DP2"), "TP2 x FSDP2", slow("HSDP 2 x 2")]
UPDATES = 3


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


class Run:
    """A trainer on this rank, and its micro-batches: of all ranks together the same in each layout."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.layout = ALONE if name == "one process" else LAYOUTS[name]
        self.model, self.mesh = meshes.on_mesh(self.layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.trainer: Trainer = meshes.trainer_of(self.layout, self.model, self.optimizer, accumulation_steps=4)

    def micro_batches(self, number: int = 4 * UPDATES) -> list[tuple[Tensor, Tensor]]:
        """Those of this rank."""
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(number, 4, meshes.TOKENS, meshes.FEATURES, generator=generator, dtype=torch.float64)
        y = torch.randint(0, meshes.CLASSES, (number, 4, meshes.TOKENS), generator=generator)
        share, place = self.mesh[self.layout.feeds].size(), meshes.place(self.layout, self.mesh)
        return [(a.chunk(share)[place], b.chunk(share)[place]) for a, b in zip(x, y, strict=True)]

    def train(self) -> None:
        self.trainer.run(self.micro_batches(), max_epochs=1)


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in values.items()}


def gradient_monitor(run: Run) -> dict[str, Any]:
    GradientMonitor(every=2).attach(run.trainer)
    run.train()
    return {name: value for name, value in run.trainer.state.metrics.items() if isinstance(value, (int, float))}


def model_ema(run: Run) -> dict[str, Any]:
    ema = ModelEMA(decay=0.5)
    ema.attach(run.trainer)
    run.train()
    return _numbers(ema.state_dict()["model"])


def freeze(run: Run) -> dict[str, Any]:
    Freeze(run.model.get_submodule("up"), until=2).attach(run.trainer)
    run.train()
    return meshes.whole(run.model)


def learning_rate_finder(run: Run) -> dict[str, Any]:
    finder = LearningRateFinder(lambda: Run(run.name).trainer)
    finder.run(run.micro_batches(24), num_iter=5, end_lr=1.0)
    results = finder.get_results()
    return {name: torch.tensor(results[name]) for name in ("lr", "loss")}


def validation(run: Run) -> dict[str, Any]:
    evaluator = create_evaluator(run.model, run.layout.forward, data_dims=run.layout.data_dims)
    Validation(evaluator, run.micro_batches(3)).attach(run.trainer, Events.EPOCH_COMPLETED)
    run.train()
    return {"loss": evaluator.state.metrics["loss"], "tokens": evaluator.state.metrics["tokens"]}


def predictions(run: Run) -> dict[str, Any]:
    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        out = model(x)
        return ForwardOutput(out.sum() * 0, len(x), outputs=out)

    x = torch.randn(11, meshes.TOKENS, meshes.FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sampler = ShardedSampler(x, shuffle=False, mesh=run.mesh[run.layout.feeds])  # type: ignore[arg-type]
    loader = torch.utils.data.DataLoader(x, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    return {"outputs": predict(create_evaluator(run.model, forward, data_dims=run.layout.data_dims), loader)}


def checks(run: Run) -> dict[str, Any]:
    GradNormConsistency().attach(run.trainer)
    StateConsistency(run.model, run.optimizer).attach(run.trainer, Events.ITERATION_COMPLETED)
    run.train()
    return {"steps": run.trainer.state.num_steps}


def introduction(run: Run) -> dict[str, Any]:
    size = len(run.micro_batches(1)[0][0])
    run.trainer.state.dataloader = torch.utils.data.DataLoader(range(8), batch_size=size)  # type: ignore[arg-type]
    return {"samples of an update": int(run.trainer.introduce()[1].partition(" samples each")[0].rpartition(" ")[2])}


def _call(function: Callable[[Run], dict[str, Any]], name: str) -> dict[str, Any]:
    return function(Run(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(
    "function", [gradient_monitor, model_ema, freeze, learning_rate_finder, validation, predictions, checks, introduction]
)
def test_a_handler_gives_what_it_gives_on_one_process(four: Ranks, function: Any, name: str) -> None:
    (expected,) = run_ranks(_call, function, "one process", world_size=1)
    for found in four.run(_call, function, name):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(torch.as_tensor(found[key]), torch.as_tensor(value), rtol=1e-9, atol=1e-12)


def _flip(name: str, parameter: str, rank: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    run = Run(name)
    StateConsistency(run.model, run.optimizer, optimizer_state=False).attach(run.trainer, Events.ITERATION_COMPLETED)

    def flip(trainer: Trainer) -> None:
        if run.mesh.get_rank() == rank:
            value = dict(run.model.named_parameters())[parameter].detach()
            (value.to_local() if isinstance(value, DTensor) else value).view(-1)[0] += 1e-9

    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=1), flip)
    try:
        run.train()
    except StateMismatchError as error:
        return error.names, error.ranks
    return (), ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("TP2 x DP2", "up.weight"),
        ("TP2 x DP2", "norm.weight"),
        ("TP2 x FSDP2", "norm.weight"),
        ("SP2 x DP2", "norm.bias"),
    ],
)
def test_a_copy_that_differs_is_named(four: Ranks, name: str, parameter: str) -> None:
    for names, _ in four.run(_flip, name, parameter, 2):
        assert f"parameter {parameter}" in names
