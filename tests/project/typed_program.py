"""A program of a user with types, which `mypy` checks with the library and nothing runs.

The lines of `train` must have no error. Each line with `type: ignore` has a mistake that must be reported: mypy names a comment
that has nothing to ignore.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import ignite_train
from ignite_train import (
    ForwardOutput,
    LossScaling,
    TrainState,
    check_forward,
    create_evaluator,
    create_supervised_trainer,
    create_trainer,
)
from ignite_train.checkpoint import latest
from ignite_train.handlers import CurvatureMonitor, LogFile, SeveralGradients

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """A model with a method of its own, so that `forward` must name its class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def logits(self, x: Tensor) -> Tensor:
        """The method."""
        return torch.as_tensor(self.layer(x))


class OwnScaling:
    """A policy of loss scaling whose state is a dict."""

    scale = 1.0
    enabled = True

    def update(self, *, overflow: bool) -> None:
        """See `LossScaling`."""

    def state_dict(self) -> dict[str, Any]:
        """See `LossScaling`."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `LossScaling`."""


def forward(model: Net, batch: Batch) -> ForwardOutput:
    """The loss summed over the batch."""
    return ForwardOutput(cross_entropy(model.logits(batch[0]), batch[1], reduction="sum"), sample_size=len(batch[1]))


def forward_with_state(model: Net, batch: Batch, state: TrainState) -> tuple[Tensor, int]:
    """A pair, for a model in the state of the run."""
    return cross_entropy(model.logits(batch[0]), batch[1]) * state.iteration, len(batch[1])


def of_any_model(model: nn.Module, batch: Batch) -> Tensor:
    """A mean."""
    return cross_entropy(model(batch[0]), batch[1])


def first_of(gradients: dict[str, Tensor]) -> Tensor:
    """What `SeveralGradients` is to step along."""
    return gradients["first"]


def last_of(gradients: Mapping[str, Tensor]) -> Tensor | None:
    """The same, for any mapping."""
    return gradients.get("last")


def logits_of(model: Net, x: Tensor) -> Tensor:
    """How the model of a supervised trainer is called."""
    return model.logits(x)


def train(data: list[Batch]) -> float:
    """What has no error."""
    model, scaling = Net(), OwnScaling()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy: LossScaling = scaling
    trainer = create_trainer(model, optimizer, forward, loss_scaling=policy)
    create_trainer(model, optimizer, forward_with_state, loss_scaling=scaling)
    create_trainer(model, optimizer, of_any_model)
    create_trainer(model, optimizer, lambda model, batch: mse_loss(model(batch[0]), batch[1]))
    create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), model_fn=logits_of)
    create_evaluator(model, forward).run(data)
    check_forward(model, forward, data)
    CurvatureMonitor(forward).attach(trainer)
    SeveralGradients(first_of).attach(trainer)
    SeveralGradients(last_of).attach(trainer)
    if (newest := latest("run")) is not None:
        trainer.run(data, resume=newest)
    trainer.run(data, resume=Path("run"))
    record = trainer.update(data, forward=forward)
    assert trainer.state.update_output is not None
    return record.loss + trainer.state.update_output.grad_norm


def misspell(trainer: ignite_train.Trainer) -> list[object]:
    """Names that are not there, of modules and of objects."""
    from ignite_train import create_trianer  # type: ignore[attr-defined]
    from ignite_train.checkpoint import lod_weights  # type: ignore[attr-defined]
    from ignite_train.handlers import EarlyStoping  # type: ignore[attr-defined]

    return [
        create_trianer,
        lod_weights,
        EarlyStoping,
        ignite_train.no_such_thing,  # type: ignore[attr-defined]
        trainer.no_such_thing,  # type: ignore[attr-defined]
        trainer.state.no_such_thing,  # type: ignore[attr-defined]
        ignite_train.TrainEvents.NO_SUCH_THING,  # type: ignore[attr-defined]
    ]


def mistake(trainer: ignite_train.Trainer, model: Net, optimizer: torch.optim.Optimizer) -> float:
    """What the library refuses when it runs, and a record that there may not be."""
    create_trainer(model, optimizer)  # type: ignore[call-arg]
    create_trainer(model, optimizer, 3)  # type: ignore[arg-type]
    create_trainer(model, optimizer, forward, precision="fp8")  # type: ignore[arg-type]
    create_trainer(model, optimizer, forward, acumulation_steps=2)  # type: ignore[call-arg]
    LogFile("run.log").attach(trainer)  # type: ignore[abstract]
    trainer.run([], resume=latest("run"))  # type: ignore[arg-type]
    return trainer.state.update_output.loss  # type: ignore[union-attr]
