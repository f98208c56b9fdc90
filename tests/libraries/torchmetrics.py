"""torchmetrics: metrics of the training and of the evaluation."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from ignite.engine import Events
from torch import nn
from torch.nn.functional import cross_entropy

from ignite_train import Evaluator, ForwardOutput, Trainer, TrainEvents
from libraries.harness import Attached, Case, dealt

CLASSES = 3


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, CLASSES))


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 3, 5, 2, 4, 4, 1, 4)
    return [(torch.randn(n, 6, generator=generator), torch.randint(CLASSES, (n,), generator=generator)) for n in sizes]


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    x, y = batch
    logits = model(x)
    return ForwardOutput(cross_entropy(logits, y, reduction="sum"), len(y), outputs=(logits, y))


def metrics() -> Any:
    return torchmetrics.MetricCollection(
        [
            torchmetrics.classification.MulticlassAccuracy(CLASSES),
            torchmetrics.classification.MulticlassF1Score(CLASSES),
            torchmetrics.classification.MulticlassAUROC(CLASSES, thresholds=None),
        ]
    )


def attach(trainer: Trainer, evaluator: Evaluator) -> Attached:
    of_training, of_evaluation = metrics(), metrics()
    of_training.persistent(True)  # without this torchmetrics leaves its numbers out of state_dict
    trainer.add_event_handler(TrainEvents.FORWARD_COMPLETED, lambda: of_training.update(*trainer.state.forward_output.outputs))
    trainer.add_event_handler(Events.EPOCH_STARTED, of_training.reset)
    evaluator.add_event_handler(Events.EPOCH_STARTED, of_evaluation.reset)
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: of_evaluation.update(*evaluator.state.output))

    def look() -> None:
        inputs, targets = (torch.cat(parts) for parts in zip(*batches()[:2], strict=True))
        evaluated = metrics()
        with torch.no_grad():
            evaluated.update(trainer.model(inputs), targets)
        expected, found = evaluated.compute(), of_evaluation.compute()
        assert all(torch.allclose(found[name], value) for name, value in expected.items())

    return Attached(look, {"metrics": of_training})


CASES = [
    Case(
        "a collection on the trainer, in its checkpoints, and one on the evaluator",
        model,
        dealt(batches),
        forward,
        attach=attach,
    )
]
