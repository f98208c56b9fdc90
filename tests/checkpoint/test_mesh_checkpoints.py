"""Checkpoints of models on a mesh: written in one placement and read in any other, bit by bit."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import meshes
from ignite_train import ResumableLoader, Trainer, UpdateOptions, create_trainer
from ignite_train.checkpoint import consolidate, verify
from ignite_train.handlers import Checkpoint
from meshes import Layout
from ranks import run_ranks
from tiers import slow

SAMPLES, BATCH, EPOCHS = 24, 8, 2  # of all data ranks together: three updates to an epoch
ODD = partial(meshes.Net, 7)  # which no number of ranks divides


def _one_dimension(model: nn.Module, _mesh: Any) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


LAYOUTS = {
    **{name: layout._replace(model=ODD) for name, layout in meshes.LAYOUTS.items() if name in ("TP2 x DP2", "HSDP 2 x 2")},
    "TP2 x FSDP2": meshes.LAYOUTS["odd TP2 x FSDP2"],
    "FSDP2": Layout(ODD, _one_dimension, (2,), ("dp",), None, ("dp",)),
}


class InjectedError(Exception):
    """Raised by a test on purpose."""


class Samples(torch.utils.data.Dataset[Any]):
    """Sequences of tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(SAMPLES, meshes.TOKENS, meshes.FEATURES, generator=generator, dtype=torch.float64)
        self._y = torch.randint(0, meshes.CLASSES, (SAMPLES, meshes.TOKENS), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]


def _built(name: str, directory: Path) -> tuple[Trainer, nn.Module, torch.optim.Optimizer, ResumableLoader]:
    if name == "one process":
        model, mesh, shares, data_dims = meshes.new_model(LAYOUTS["TP2 x DP2"]), None, 1, None
    else:
        layout = LAYOUTS[name]
        model, root = meshes.on_mesh(layout)
        mesh = root[layout.feeds]
        shares, data_dims = mesh.size(), layout.data_dims
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    trainer = create_trainer(
        model,
        optimizer,
        meshes.forward,
        max_grad_norm=0.05,
        protect={"failure_board": False},  # all ranks are broken off, each by an error of its own
        options=UpdateOptions(data_dims=data_dims),
    )
    Checkpoint(directory, every=1, asynchronous=False).attach(trainer)
    loader = ResumableLoader(Samples(), BATCH // shares, shuffle=True, seed=1, mesh=mesh)
    return trainer, model, optimizer, loader


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and moments, gathered."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        found |= {f"{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: value.detach().clone() for name, value in whole.items()}


def train(name: str, directory: Path, stop: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains to update `stop` or to the end; the state that it began its first update with, and that it ended with."""
    trainer, model, optimizer, loader = _built(name, directory)
    began: list[dict[str, Tensor]] = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: began or began.append(_state(model, optimizer)))

    def fail() -> None:
        raise InjectedError

    if stop is not None:
        trainer.add_event_handler(Events.ITERATION_STARTED(once=stop + 1), fail)
    with suppress(InjectedError):
        trainer.run(loader, max_epochs=EPOCHS)
    return began[0], _state(model, optimizer)


def _ranks_of(name: str) -> int:
    return {"one process": 1, "FSDP2": 2}.get(name, 4)


@pytest.mark.parametrize(
    "route",
    [
        ("TP2 x FSDP2", "one process"),
        slow(("TP2 x FSDP2", "FSDP2", "one process", "TP2 x FSDP2")),
        slow(("TP2 x DP2", "HSDP 2 x 2", "TP2 x FSDP2", "FSDP2")),
        slow(("one process", "TP2 x DP2", "one process")),
    ],
    ids=" -> ".join,
)
def test_any_placement_reads_what_any_other_wrote(route: tuple[str, ...], tmp_path: Path) -> None:
    """Broken off once in each placement; each begins with the bits of the one before, and the end is that of one process."""
    (_, expected), *_ = run_ranks(train, "one process", tmp_path / "whole", None, world_size=1)
    before: dict[str, Tensor] | None = None
    for number, name in enumerate(route, start=1):
        stop = None if number == len(route) else number + 1
        for began, ended in run_ranks(train, name, tmp_path / "broken", stop, world_size=_ranks_of(name)):
            assert before is None or (began.keys() == before.keys() and all(torch.equal(began[n], before[n]) for n in began))
            last = ended
        before = last
    assert max(float((last[name] - value).abs().max()) for name, value in expected.items()) < 1e-12
    verify(max((tmp_path / "broken").glob("update-*")))
    consolidate(tmp_path / "broken", tmp_path / "model.pt")
    assert all(torch.equal(value, last[name]) for name, value in torch.load(tmp_path / "model.pt").items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TP2 x DP2", "TP2 x FSDP2"])
def test_the_same_placement_resumes_bit_by_bit(name: str, tmp_path: Path) -> None:
    """In the middle of an epoch."""
    expected = run_ranks(train, name, tmp_path / "whole", None, world_size=4)
    run_ranks(train, name, tmp_path / "broken", 4, world_size=4)
    resumed = run_ranks(train, name, tmp_path / "broken", None, world_size=4)
    for (_, theirs), (_, ours) in zip(expected, resumed, strict=True):
        assert all(torch.equal(ours[key], value) for key, value in theirs.items())
