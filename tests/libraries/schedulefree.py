"""schedulefree: optimizers with a mode for training and one for evaluation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import schedulefree
import torch
from torch import nn

from ignite_train import Evaluator, Trainer
from ignite_train.checkpoint import consolidate
from ignite_train.handlers import OptimizerModes
from libraries.harness import Attached, Case, dealt, first_difference
from libraries.points import batches, forward, network


def made_by(kind: Any) -> Any:
    def make(model: nn.Module) -> Any:
        optimizer = kind(model.parameters(), lr=0.01)
        optimizer.train()
        return optimizer

    return make


def modes(trainer: Trainer, evaluator: Evaluator) -> Attached:
    OptimizerModes(next(iter(trainer.optimizers.values()))).attach(trainer, evaluator=evaluator)
    return Attached()


def read_as_evaluated(kind: Any, file: Path) -> nn.Module:
    """The trained weights; beside them those that `eval()` gives are what `evaluated=True` writes, bit by bit."""
    directory, point, state = file.with_name("alone"), file.with_name("point.pt"), file.with_name("optimizer.pt")
    consolidate(directory, point, evaluated=True)
    consolidate(directory, state, entry="optimizer")
    trained, evaluated = network(), network()
    trained.load_state_dict(torch.load(file))
    evaluated.load_state_dict(torch.load(file))
    optimizer = made_by(kind)(evaluated)
    optimizer.load_state_dict(torch.load(state))
    optimizer.eval()
    assert first_difference(evaluated.state_dict(), trained.state_dict()) is not None
    assert first_difference(torch.load(point), evaluated.state_dict()) is None
    return trained


KINDS = (schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree, schedulefree.RAdamScheduleFree)
CASES = [
    Case(
        kind.__name__,
        network,
        dealt(batches),
        forward,
        made_by(kind),
        attach=modes,
        reads=partial(read_as_evaluated, kind),
    )
    for kind in KINDS
]
