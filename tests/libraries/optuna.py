"""Optuna: a search whose trials are pruned by the handler for Ignite of its own, on our evaluator."""

from __future__ import annotations

from typing import Any

import optuna
import torch
from ignite.engine import Events
from optuna_integration import PyTorchIgnitePruningHandler

from ignite_train import Evaluator, Trainer, create_evaluator, create_trainer
from ignite_train.handlers import Validation
from libraries.harness import Attached, Case, dealt
from libraries.points import batches, forward, network


def searched() -> Any:
    """Eight trials, of which the pruner ends those that are worse than the first ones."""

    def objective(trial: Any) -> float:
        torch.manual_seed(0)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1, log=True))
        trainer, evaluator = create_trainer(model, optimizer, forward), create_evaluator(model, forward)
        validation = Validation(evaluator, batches())
        evaluator.add_event_handler(Events.COMPLETED, PyTorchIgnitePruningHandler(trial, "accuracy", trainer))
        validation.attach(trainer)
        trainer.run(batches(), max_epochs=3)
        return float(evaluator.state.metrics["accuracy"])

    pruner = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=0)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=1), pruner=pruner)
    study.optimize(objective, n_trials=8)
    return study


def attach(trainer: Trainer, evaluator: Evaluator) -> Attached:
    trial = optuna.create_study(direction="maximize").ask()
    evaluator.add_event_handler(Events.COMPLETED, PyTorchIgnitePruningHandler(trial, "accuracy", trainer))

    def look() -> None:
        states = [one.state for one in searched().trials]
        assert states.count(optuna.trial.TrialState.PRUNED) >= 1, states
        assert states.count(optuna.trial.TrialState.COMPLETE) >= 2, states
        assert len(states) == 8

    return Attached(look)


CASES = [Case("PyTorchIgnitePruningHandler on our evaluator", network, dealt(batches), forward, attach=attach)]
