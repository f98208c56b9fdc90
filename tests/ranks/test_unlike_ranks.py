"""Ranks that were started with other settings, handlers or models are told so on all ranks, and do not wait for one another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cuts
from ignite_train import Trainer, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import GradientMonitor, JsonLines, ProgressLog, Validation
from ranks import run_ranks

FEATURES = cuts.FEATURES
EXPLICIT = UpdateOptions(reduction="explicit")


def make(model: nn.Module | None = None, **settings: Any) -> Trainer:
    model = DistributedDataParallel(cuts.linear()) if model is None else model
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), cuts.forward, **settings)


def validate(trainer: Trainer) -> None:
    Validation(create_evaluator(cuts.linear(), cuts.forward), cuts.shard([[2], [2]])).attach(trainer)


def other_settings(rank: int) -> Trainer:
    return make(accumulation_steps=2 + rank, max_grad_norm=1.0)


def other_options(rank: int) -> Trainer:
    return make(options=UpdateOptions(on_nonfinite="raise" if rank else "skip"))


def other_handlers(rank: int) -> Trainer:
    trainer = make()
    if rank:
        validate(trainer)
        GradientMonitor().attach(trainer)
    return trainer


def frozen(rank: int) -> Trainer:
    model = cuts.linear()
    wrapped = DistributedDataParallel(model)
    model.bias.requires_grad_(rank == 0)
    return make(wrapped)


def other_shapes(rank: int) -> Trainer:
    return make(nn.Sequential(nn.Linear(FEATURES, 5 + rank).double(), nn.Linear(5 + rank, 1).double()), options=EXPLICIT)


def other_shards(rank: int) -> Trainer:
    model = nn.Sequential(nn.Linear(FEATURES, 5 + rank).double(), nn.Linear(5 + rank, 1).double())
    return make(fully_shard(model, mesh=init_device_mesh("cpu", (2,))))


def train(begin: Callable[[int], Trainer]) -> str:
    """The error of making a trainer, or of its run; empty if there is none."""
    try:
        begin(idist.get_rank()).run(cuts.shard([[2] * 6, [2] * 6]), max_iters=2)
    except ValueError as error:
        return str(error)
    return ""


SAID = {
    other_settings: "got accumulation_steps: 2 on rank 0 and 3 on rank 1; give",
    other_options: "got options.on_nonfinite: 'skip' on rank 0 and 'raise' on rank 1; give",
    other_handlers: "got the handler GradientMonitor: none on rank 0 and 1 on rank 1; the handler Validation: none",
    frozen: "got the parameter bias: [1] of torch.float64, trained on rank 0 and [1] of torch.float64, frozen on rank 1; give",
    other_shapes: "got the parameter 0.weight: [5, 3] of torch.float64, trained on rank 0 and [6, 3] of",
    other_shards: "got the parameter 0.weight: [5, 3] of torch.float64, trained on rank 0 and [6, 3] of",
}


@pytest.mark.parametrize("begin", SAID, ids=lambda begin: begin.__name__.replace("_", " "))
def test_what_differs_is_named_on_all_ranks(begin: Callable[[int], Trainer]) -> None:
    """Which setting, and its value on each rank; nobody waits."""
    first, second = run_ranks(train, begin)
    assert first == second
    assert SAID[begin] in first, first


def own_handlers(rank: int, directory: Path) -> Trainer:
    trainer = make(seed=5 + rank)
    if rank == 0:
        ProgressLog().attach(trainer)
        JsonLines(directory / "log.jsonl").attach(trainer)
    return trainer


def test_what_only_writes_may_be_on_one_rank(tmp_path: Path) -> None:
    """Nor need the seeds be the same."""
    assert run_ranks(train, partial(own_handlers, directory=tmp_path)) == ["", ""]
