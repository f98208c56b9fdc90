"""Checkpoints of models on a mesh: written in one placement and read in any other, bit by bit, also after a SIGKILL."""

from __future__ import annotations

import os
import signal
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import meshes
from ignite_train import ResumableLoader, Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.checkpoint import consolidate, verify
from ignite_train.handlers import Checkpoint
from killing import HaltingDisk
from meshes import Layout
from processes import DEADLINE_SECONDS, Processes, forked
from ranks import run_ranks
from tiers import nightly, slow

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


class Kill(NamedTuple):
    """When a rank kills itself: in the micro-batch or the update of a number, or before an operation on files."""

    rank: int
    place: str
    number: int


class _Victim:
    """Stands for `killing.Halt`: counts what comes, and ends the process before that of a number."""

    def __init__(self, kill: Kill) -> None:
        self._kill, self._counts = kill, Counter[str]()

    def before(self, place: str) -> None:
        self._counts[place] += 1
        if (place, self._counts[place]) == (self._kill.place, self._kill.number):
            os.kill(os.getpid(), signal.SIGKILL)


def _await_death(trainer: Trainer, checkpoint: Checkpoint, kill: Kill) -> None:
    victim: Any = _Victim(kill)
    # from the second update on: after a kill in the first save there is nothing to go on from
    trainer.add_event_handler(
        Events.ITERATION_STARTED(once=2), lambda: setattr(checkpoint.saver.directory, "disk", HaltingDisk(victim))
    )
    trainer.add_event_handler(Events.ITERATION_STARTED, victim.before, "update")
    trainer.add_event_handler(TrainEvents.BACKWARD_COMPLETED, victim.before, "backward")


def _built(name: str, directory: Path, kill: Kill | None) -> tuple[Trainer, nn.Module, torch.optim.Optimizer, ResumableLoader]:
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
    checkpoint = Checkpoint(directory, every=1, asynchronous=False)
    checkpoint.attach(trainer)
    if kill is not None:
        _await_death(trainer, checkpoint, kill)
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


def train(
    name: str, directory: Path, stop: int | None, kill: Kill | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains to update `stop` or to the end; the state that it began its first update with, and that it ended with."""
    trainer, model, optimizer, loader = _built(name, directory, kill)
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
        slow(("TP2 x FSDP2", "one process")),
        nightly(("TP2 x FSDP2", "FSDP2", "one process", "TP2 x FSDP2")),
        nightly(("TP2 x DP2", "HSDP 2 x 2", "TP2 x FSDP2", "FSDP2")),
        nightly(("one process", "TP2 x DP2", "one process")),
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
@pytest.mark.parametrize("name", [nightly("TP2 x DP2"), "TP2 x FSDP2"])
def test_the_same_placement_resumes_bit_by_bit(name: str, tmp_path: Path) -> None:
    """In the middle of an epoch."""
    expected = run_ranks(train, name, tmp_path / "whole", None, world_size=4)
    run_ranks(train, name, tmp_path / "broken", 4, world_size=4)
    resumed = run_ranks(train, name, tmp_path / "broken", None, world_size=4)
    for (_, theirs), (_, ours) in zip(expected, resumed, strict=True):
        assert all(torch.equal(ours[key], value) for key, value in theirs.items())


# --- killed ---


def _live(name: str, directory: Path, rank: int, kill: Kill) -> None:
    """A rank of a job that is to be killed; the others are ended when it is dead, as a launcher does."""
    torch.set_num_threads(1)
    with (directory / f"stderr.{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)
    idist.initialize("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=4)
    train(name, directory / "broken", None, kill if rank == kill.rank else None)


def _killed(name: str, directory: Path, kill: Kill) -> None:
    """Trains until the rank is dead."""
    ranks = [forked.Process(target=_live, args=(name, directory, rank, kill)) for rank in range(4)]
    with Processes(ranks, [directory / f"stderr.{rank}" for rank in range(4)]):
        ranks[kill.rank].join(DEADLINE_SECONDS)
        assert ranks[kill.rank].exitcode == -signal.SIGKILL


MESHES = ("TP2 x DP2", "TP2 x FSDP2", "HSDP 2 x 2")
KILLS = (  # in the second update of an epoch, or from the save after it on
    *(Kill(3, "update", 2), Kill(0, "update", 5), Kill(2, "backward", 5), Kill(1, "backward", 2)),
    *(Kill(0, "save", 9), Kill(2, "save", 3), Kill(0, "rename", 1), Kill(0, "prune", 2)),
)


@pytest.mark.timeout(6 * DEADLINE_SECONDS)
@pytest.mark.parametrize(
    ("name", "kill", "after"),
    [
        slow("TP2 x FSDP2", Kill(2, "backward", 5), "TP2 x FSDP2"),
        *(
            nightly(name, kill, name)
            for name in MESHES
            for kill in KILLS
            if (name, kill) != ("TP2 x FSDP2", Kill(2, "backward", 5))
        ),
        *(
            nightly(name, KILLS[(number + 3 * other) % len(KILLS)], after)
            for number, name in enumerate(MESHES)
            for other, after in enumerate(("one process", "FSDP2", *MESHES))
            if after != name
        ),
    ],
)
def test_a_rank_that_is_killed_costs_nothing(name: str, kill: Kill, after: str, tmp_path: Path) -> None:
    """The end is that of a run that was left alone: bit by bit in the same placement, to 1e-12 in another."""
    expected = run_ranks(train, name, tmp_path / "whole", None, world_size=4)
    _killed(name, tmp_path, kill)
    initial = expected[0][0]
    for (began, ended), (_, whole) in zip(
        run_ranks(train, after, tmp_path / "broken", None, world_size=_ranks_of(after)), expected, strict=False
    ):
        assert began.keys() != initial.keys()  # moments are there: it went on, and did not begin anew
        if after == name:
            assert all(torch.equal(ended[key], value) for key, value in whole.items())
        assert max(float((ended[key] - value).abs().max()) for key, value in whole.items()) < 1e-12
