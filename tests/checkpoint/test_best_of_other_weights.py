"""The best checkpoint where its score is of an average, or of the evaluation weights of an optimizer: these are loaded."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import cuts
from bits import bit_by_bit
from ignite_train import create_evaluator, create_trainer
from ignite_train.checkpoint import consolidate, load_weights
from ignite_train.handlers import Checkpoint, ModelEMA, OptimizerModes, Validation
from ranks import run_ranks
from schedule_free import BETA, ScheduleFreeSGD

DATA, HELD_OUT = cuts.cut(cuts.samples(), [8] * 8), cuts.cut(cuts.samples(), [4])


def job(directory: Path, *, ema: bool, modes: bool, leave_out: Any = (), sharded: bool = False) -> Any:
    """A run that gets worse after its fourth update, whose rate is negative then."""
    model: nn.Module = cuts.linear()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    optimizer: Any = (ScheduleFreeSGD if modes else torch.optim.SGD)(model.parameters(), lr=0.05)
    trainer, evaluator = create_trainer(model, optimizer, cuts.forward), create_evaluator(model, cuts.forward)
    if modes:
        OptimizerModes(optimizer).attach(trainer, evaluator=evaluator)
    if ema:
        average = ModelEMA(0.5)
        average.attach(trainer)
        average.use_in(evaluator)
    Validation(evaluator, HELD_OUT).attach(trainer, Events.ITERATION_COMPLETED)
    checkpoint = Checkpoint(directory, score="loss", keep=1, every=10**6, leave_out=leave_out)
    checkpoint.attach(trainer, evaluator=evaluator)

    @trainer.on(Events.ITERATION_COMPLETED(once=4))
    def turn() -> None:
        optimizer.param_groups[0]["lr"] = -0.5

    return trainer, evaluator, checkpoint, model, optimizer


def by_hand(model: nn.Module) -> float:
    """The loss of the weights that the model has."""
    x, y, weight = HELD_OUT[0]
    values: list[Tensor] = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    state = dict(zip(dict(model.named_parameters()), values, strict=True))
    found = torch.func.functional_call(cuts.linear(), state, (x,)).squeeze(-1)
    return ((weight * (found - y).square()).sum() / weight.sum()).item()


@pytest.mark.parametrize("has_been_in_eval", [False, True])
@pytest.mark.parametrize(("ema", "modes"), [(True, False), (False, True), (True, True)])
def test_the_weights_that_were_scored_are_loaded(tmp_path: Path, ema: bool, modes: bool, has_been_in_eval: bool) -> None:
    """The model has the score that is returned, and so has the next evaluation, and the one after it."""
    trainer, evaluator, checkpoint, model, optimizer = job(tmp_path, ema=ema, modes=modes)
    trainer.run(DATA, max_epochs=1)
    if modes and has_been_in_eval:
        optimizer.eval()
    path, score = checkpoint.load_best()
    assert path.name < "update-00000008"
    assert by_hand(model) == pytest.approx(score, rel=1e-9)
    assert [evaluator.run(HELD_OUT).metrics["loss"] for _ in range(2)] == [score] * 2
    assert by_hand(model) == pytest.approx(score, rel=1e-9)


def test_they_are_those_that_consolidate_and_load_weights_give(tmp_path: Path) -> None:
    """Each by its own code."""
    trainer, _, checkpoint, model, optimizer = job(tmp_path / "modes", ema=False, modes=True)
    optimizer.param_groups[0]["betas"] = (BETA, 0.9)  # where schedulefree has it
    trainer.run(DATA, max_epochs=1)
    checkpoint.load_best()
    consolidate(tmp_path / "modes", tmp_path / "best.pt", best=True, evaluated=True)
    assert bit_by_bit(torch.load(tmp_path / "best.pt")) == bit_by_bit(dict(model.state_dict()))
    trainer, _, checkpoint, model, _ = job(tmp_path / "ema", ema=True, modes=False)
    trainer.run(DATA, max_epochs=1)
    checkpoint.load_best()
    other = cuts.linear()
    load_weights(other, tmp_path / "ema", best=True, entry="ModelEMA")
    assert bit_by_bit(other.state_dict()) == bit_by_bit(model.state_dict())


def test_a_checkpoint_without_the_average_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weights that were trained are loaded, and a line says that the score is of others."""
    trainer, evaluator, checkpoint, model, _ = job(tmp_path, ema=True, modes=False, leave_out=("ModelEMA",))
    trainer.run(DATA, max_epochs=1)
    with caplog.at_level(logging.WARNING):
        path = checkpoint.load_best().path
    (line,) = [one.getMessage() for one in caplog.records if "ModelEMA" in one.getMessage()]
    assert "has no state of ModelEMA" in line
    assert "\n" not in line
    trained = cuts.linear()
    load_weights(trained, path)
    assert bit_by_bit(trained.state_dict()) == bit_by_bit(model.state_dict())
    assert evaluator.model is model


def _on_this_rank(directory: str, modes: bool) -> Any:
    trainer, evaluator, checkpoint, model, _ = job(Path(directory), ema=not modes, modes=modes, sharded=True)
    trainer.run(cuts.shard([[4] * 8, [4] * 8]), max_epochs=1)
    path, score = checkpoint.load_best()
    return path.name, score, by_hand(model), evaluator.run(HELD_OUT).metrics["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("modes", [False, True])
def test_two_ranks_load_their_shards_of_them(tmp_path: Path, modes: bool) -> None:
    """Both evaluate the same samples."""
    first, second = run_ranks(_on_this_rank, str(tmp_path), modes)
    assert first == second
    name, score, loss, again = first
    assert name < "update-00000008"
    assert loss == pytest.approx(score, rel=1e-9)
    assert again == score
