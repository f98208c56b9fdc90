"""A trainer and an evaluator that are made for one number of ranks and run with another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_train import ForwardOutput, ResumableLoader, Trainer, UpdateOptions, create_evaluator, create_trainer
from ignite_train.checkpoint import read_checkpoint
from ignite_train.handlers import Checkpoint
from ranks import run_ranks

DATA = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(8)]


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 1).square().sum(), sample_size=len(x))


def make(reduction: Any = "auto", model: nn.Module | None = None) -> Trainer:
    model = linear() if model is None else model
    return create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), forward, options=UpdateOptions(reduction=reduction)
    )


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


def share() -> list[Tensor]:
    return DATA[idist.get_rank() :: idist.get_world_size()]


def begin(trainer: Trainer, how: str) -> None:
    """Begins to train, in one of the three ways."""
    if how == "run":
        trainer.run(share(), max_epochs=1)
    elif how == "update":
        trainer.update(share())
    else:
        with trainer.session():
            trainer.update(share())


def meet(store: str, rank: int) -> None:
    """Makes a process group again."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def _made_before(store: str, reduction: str, how: str) -> tuple[str, int]:
    rank = idist.get_rank()
    idist.finalize()
    trainer = make(reduction)
    meet(store, rank)
    with pytest.raises(RuntimeError) as caught:
        begin(trainer, how)
    return str(caught.value), trainer.state.iteration


@pytest.mark.parametrize(
    ("reduction", "how"), [("auto", "run"), ("explicit", "session"), ("local", "update"), ("auto", "update")]
)
def test_a_trainer_that_was_made_before_the_process_group_is_refused(tmp_path: Path, reduction: str, how: str) -> None:
    """Each rank would train on its own, and say nothing."""
    message = (
        "trainer was made for 1 rank, and this run has 2; call init_process_group (or enter idist.Parallel) before "
        "create_trainer"
    )
    assert run_ranks(_made_before, str(tmp_path / "store"), reduction, how) == [(message, 0)] * 2


def _used_after() -> str:
    trainer = make("explicit")
    trainer.run(share(), max_epochs=1)
    idist.barrier()
    idist.finalize()
    with pytest.raises(RuntimeError) as caught:
        trainer.run(share(), max_epochs=2)
    return str(caught.value)


def test_a_trainer_that_is_used_after_the_process_group_is_refused() -> None:
    message = (
        "trainer was made for 2 ranks, and this run has 1; run it before idist.finalize() (or inside idist.Parallel), or make "
        "another by create_trainer"
    )
    assert run_ranks(_used_after) == [message] * 2


def _met_again(store: str, directory: str | None) -> list[float]:
    rank = idist.get_rank()
    trainer = make(model=DistributedDataParallel(linear()))
    if directory is not None:
        Checkpoint(directory, every=2).attach(trainer)
    trainer.run(share(), max_epochs=1)
    if store:
        idist.barrier()
        idist.finalize()
        meet(store, rank)
    trainer.run(share(), max_epochs=2)
    return next(trainer.model.parameters()).flatten().tolist()


@pytest.mark.parametrize("saves", [False, True], ids=["alone", "with checkpoints"])
def test_a_process_group_of_as_many_ranks_may_take_the_place_of_another(tmp_path: Path, saves: bool) -> None:
    directories = [str(tmp_path / name) if saves else None for name in ("first", "second")]
    again = run_ranks(_met_again, str(tmp_path / "store"), directories[0])
    assert again == run_ranks(_met_again, "", directories[1])


def _evaluated_before_and_after(store: str) -> list[float]:
    """The losses of evaluators that were made on one rank and run on two, and the other way round."""
    rank, after = idist.get_rank(), create_evaluator(linear(), forward)
    idist.barrier()
    idist.finalize()
    losses = [after.run(DATA).metrics["loss"]]
    before = create_evaluator(linear(), forward)
    meet(store, rank)
    return [*losses, before.run(share()).metrics["loss"]]


def test_an_evaluator_counts_the_ranks_where_it_runs(tmp_path: Path) -> None:
    """It keeps nothing that depends on them, so it may be made before or after the process group."""
    with torch.no_grad():
        mean = float((linear()(torch.cat(DATA)) - 1).square().mean())
    assert run_ranks(_evaluated_before_and_after, str(tmp_path / "store")) == [pytest.approx([mean] * 2, rel=1e-12)] * 2


def _compiled(directory: str, order: str) -> list[str]:
    """Trains compiled replicas, and gives the names of their checkpoint's weights."""
    ways = [torch.compile, DistributedDataParallel]
    model: Any = nn.Sequential(linear(), nn.Linear(1, 1, dtype=torch.float64))
    for way in ways if order == "inside" else reversed(ways):
        model = way(model, backend="eager") if way is torch.compile else way(model)
    trainer = make(model=model)
    Checkpoint(directory).attach(trainer)
    trainer.run(ResumableLoader(torch.cat(DATA), batch_size=4, shuffle=False), max_epochs=1)
    return [*read_checkpoint(directory).shapes]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["inside", "outside"])
def test_compiled_replicas_resume_as_one_bare_model(tmp_path: Path, order: str) -> None:
    """Whether the model was compiled before it was wrapped or after: the names are those of the model itself."""
    model = nn.Sequential(linear(), nn.Linear(1, 1, dtype=torch.float64))
    assert run_ranks(_compiled, str(tmp_path), order) == [[*model.state_dict()]] * 2
    trainer = make(model=model)
    Checkpoint(tmp_path).attach(trainer)
    assert trainer.run(ResumableLoader(torch.cat(DATA), batch_size=4, shuffle=False), max_epochs=2).epoch == 2
