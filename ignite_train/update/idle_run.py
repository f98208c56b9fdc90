"""Looks at the start and the end of a run for what is in vain: updates, handlers, evaluators."""

from __future__ import annotations

import os

from ignite.engine import Events

from ignite_train.engine.attachable import Attachable
from ignite_train.engine.dispatch import attachables, attached, is_of_library
from ignite_train.ranks import collectives
from ignite_train.trainer import Trainer

__all__ = ["warn_of_idle_run"]

_WHY = {
    "no_samples": "the sample sizes that forward returned add up to 0; return the number of samples or tokens as sample_size",
    "overflow": "the gradients overflowed at each loss scale; start with a lower one",
    "nonfinite": "the loss or the gradients were not finite; look at the data and the learning rate",
}


def warn_of_idle_run(trainer: Trainer) -> Trainer:
    """Has `trainer` say what is in vain.

    When the first epoch starts, that is a process which torchrun has started beside others and which trains alone, and a
    handler that looks at an evaluator which no handler runs. When a run ends, it is a run whose updates were all skipped, and a
    handler that was made and not attached, which is named once.
    """

    def look(trainer: Trainer) -> None:
        state = trainer.state
        if state.num_steps == 0 and state.num_skipped > 0 and state.update_output is not None:
            reason = state.update_output.skipped_reason
            trainer.logger.warning(
                f"the weights have never moved: all {state.num_skipped} updates were skipped, the latest ({reason}) because "
                f"{_WHY[reason or 'no_samples']}"
            )

        idle = sorted({*Attachable.unattached.values()})
        Attachable.unattached.clear()
        if idle and collectives.is_main_rank():
            trainer.logger.warning(
                f"{', '.join(idle)}: made and not attached to a trainer, without which a handler does nothing; call "
                f"{idle[0]}(...).attach(trainer)"
            )

    trainer.add_event_handler(Events.EPOCH_STARTED(once=1), _look_at_start)
    trainer.add_event_handler(Events.COMPLETED, look)
    return trainer


def _look_at_start(trainer: Trainer) -> None:
    _look_for_other_processes(trainer)
    _look_for_idle_evaluators(trainer)


def _look_for_other_processes(trainer: Trainer) -> None:
    number = os.environ.get("WORLD_SIZE", "1")
    is_of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and number != "1"
    if is_of_torchrun and collectives.world_size() == 1 and not trainer.replicas.are_elastic:
        trainer.logger.warning(
            f"torchrun has started {number} processes, and this one trains a model of its own, without a process group; "
            "call idist.initialize('gloo'), or 'nccl' on GPUs, at the top of the script to train one together"
        )


def _look_for_idle_evaluators(trainer: Trainer) -> None:
    if not all(is_of_library(handler) for _, handler, _ in attached(trainer)) or not collectives.is_main_rank():
        return  # a handler of the script's may run the evaluator
    ours = attachables(trainer)
    running = [evaluator for handler in ours for evaluator in handler.runs()]
    idle = [handler for handler in ours if any(evaluator not in running for evaluator, *_ in handler.scores())]
    if idle:
        names = ", ".join(sorted({type(handler).__name__ for handler in idle}))
        trainer.logger.warning(
            f"{names}: given an evaluator that no handler runs; attach Validation(evaluator, loader), unless the script "
            "runs it between two runs"
        )
