"""W&B, offline: Ignite's logger on our trainer and evaluator."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ignite.engine import Events
from ignite.handlers.wandb_logger import OptimizerParamsHandler, WandBLogger

from ignite_train import Evaluator, Trainer, TrainEvents
from libraries.harness import Attached, Case, dealt
from libraries.points import batches, forward, network


def attach(trainer: Trainer, evaluator: Evaluator) -> Attached:
    folder = tempfile.mkdtemp()
    logger = WandBLogger(project="tried", mode="offline", dir=folder, config=trainer.config, reinit="finish_previous")
    every = Events.ITERATION_COMPLETED(every=2)
    logger.attach_output_handler(trainer, every, "training", output_transform=lambda output: {"loss": output.loss})
    logger.attach_output_handler(
        evaluator,
        Events.COMPLETED,
        "validation",
        ["loss", "accuracy"],
        global_step_transform=lambda *_: trainer.state.iteration,
    )
    logger.attach(trainer, OptimizerParamsHandler(next(iter(trainer.optimizers.values()))), TrainEvents.STEP_COMPLETED)

    def look() -> None:
        assert logger.run.step == trainer.state.iteration  # W&B's own count follows the step of what is logged
        logger.close()
        assert [*Path(folder).rglob("*.wandb")]

    return Attached(look)


CASES = [Case("Ignite's WandBLogger on both engines, offline", network, dealt(batches), forward, attach=attach)]
