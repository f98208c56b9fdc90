"""A look at the modes of the model before its first update: whether the script has put all of it into eval mode."""

from __future__ import annotations

import logging

from ignite.engine import Events
from torch import nn

from ignite_train.trainer import Trainer

__all__ = ["warn_of_eval_mode"]


def warn_of_eval_mode(trainer: Trainer, module: nn.Module) -> Trainer:
    """Has `trainer` say once that it puts `module` into training mode, if all of it is in eval mode before the first update."""

    def look() -> None:
        handle.remove()
        if not any(part.training for part in module.modules()):
            logging.getLogger("ignite_train").warning(
                "all of the model was in eval mode and is put into training mode, so that statistics of BatchNorm move and "
                "dropout draws; call model.train() before the run, or pass options=UpdateOptions(train_mode=False) to "
                "train it in eval mode"
            )

    handle = trainer.append_event_handler(Events.ITERATION_STARTED, look)
    return trainer
