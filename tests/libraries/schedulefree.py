"""schedulefree: optimizers with a mode for training and one for evaluation."""

from __future__ import annotations

from typing import Any

import schedulefree
from torch import nn

from ignite_train import Evaluator, Trainer
from ignite_train.handlers import OptimizerModes
from libraries.harness import Attached, Case, dealt
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


KINDS = (schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree, schedulefree.RAdamScheduleFree)
CASES = [Case(kind.__name__, network, dealt(batches), forward, made_by(kind), attach=modes) for kind in KINDS]
