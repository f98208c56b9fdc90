"""MLflow: Ignite's logger on our trainer and evaluator, and a model that is logged and loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import mlflow
import torch
from ignite.engine import Events
from ignite.handlers.mlflow_logger import MLflowLogger, global_step_from_engine
from torch import nn

from ignite_train import Evaluator, Trainer
from libraries.harness import Attached, Case, dealt
from libraries.points import batches, forward, network


def attach(trainer: Trainer, evaluator: Evaluator) -> Attached:
    logger = MLflowLogger(tracking_uri=f"sqlite:///{tempfile.mkdtemp()}/runs.db")
    logger.log_params({"accumulation_steps": trainer.config["accumulation_steps"]})
    every = Events.ITERATION_COMPLETED(every=2)
    logger.attach_output_handler(trainer, every, "training", output_transform=lambda output: {"loss": output.loss})
    logger.attach_output_handler(
        evaluator, Events.COMPLETED, "validation", ["loss", "accuracy"], global_step_transform=global_step_from_engine(trainer)
    )

    def look() -> None:
        found = mlflow.get_run(mlflow.active_run().info.run_id).data.metrics
        assert found["training loss"] > 0
        assert 0 <= found["validation accuracy"] <= 1
        logger.close()

    return Attached(look)


def read(file: Path) -> nn.Module:
    model = network()
    model.load_state_dict(torch.load(file))
    folder = file.parent / "mlflow"
    mlflow.pytorch.save_model(model, folder, serialization_format="pickle")
    found: Any = mlflow.pytorch.load_model(str(folder))
    return found  # type: ignore[no-any-return]


CASES = [
    Case(
        "Ignite's MLflowLogger on both engines, save_model and load_model",
        network,
        dealt(batches),
        forward,
        attach=attach,
        reads=read,
    )
]
