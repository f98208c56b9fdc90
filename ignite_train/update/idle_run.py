"""A look at the end of a run: whether any of its updates has moved the weights."""

from __future__ import annotations

from ignite.engine import Events

from ignite_train.trainer import Trainer

__all__ = ["warn_of_idle_run"]

_WHY = {
    "no_samples": "the sample sizes that forward returned add up to 0; return the number of samples or tokens as sample_size",
    "overflow": "the gradients overflowed at each loss scale; start with a lower one",
    "nonfinite": "the loss or the gradients were not finite; look at the data and the learning rate",
}


def warn_of_idle_run(trainer: Trainer) -> Trainer:
    """Has `trainer` say at the end of a run that the weights have never moved, if all of its updates were skipped."""

    def look(trainer: Trainer) -> None:
        state = trainer.state
        if state.num_steps == 0 and state.num_skipped > 0 and state.update_output is not None:
            reason = state.update_output.skipped_reason
            trainer.logger.warning(
                f"the weights have never moved: all {state.num_skipped} updates were skipped, the latest ({reason}) because "
                f"{_WHY[reason or 'no_samples']}"
            )

    trainer.add_event_handler(Events.COMPLETED, look)
    return trainer
