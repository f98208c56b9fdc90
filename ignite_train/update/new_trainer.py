"""A trainer that the user's function makes for a search, which must leave the program and its run alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ignite_train.arguments import describe
from ignite_train.model.optimizers import stepped_parameters
from ignite_train.trainer import Trainer

__all__ = ["new_trainer"]


def new_trainer(make_trainer: Callable[..., Trainer], /, **arguments: Any) -> Trainer:
    """Makes a trainer that may be trained and thrown away.

    Args:
        make_trainer: the user's function.
        arguments: it is called with these.

    Raises:
        TypeError: it returns something else than a trainer.
        ValueError: it returns a trainer of a model that was there before, or whose replicas come and go, or with a
            `Checkpoint`.
    """
    # The tensors of this process, without those that `gc.freeze` has hidden. None is kept alive.
    living = {id(one): weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), Tensor)}
    trainer = make_trainer(**arguments)
    if not isinstance(trainer, Trainer):
        raise TypeError(f"make_trainer must return a Trainer, got {describe(trainer)}")
    for parameter in stepped_parameters(trainer.optimizers):
        known = living.get(id(parameter))
        if known is not None and known() is parameter and parameter.requires_grad:
            raise ValueError(
                "make_trainer must make a new model each time, got a trainer of parameters that were there before it was "
                "called, and would be changed; make model and optimizer inside of make_trainer, by copy.deepcopy(model) say"
            )
    if trainer.replicas.are_elastic:
        raise ValueError(
            "make_trainer must make a trainer for one process, got reduction='elastic', whose replicas would end with the "
            "search; search on one process first"
        )
    if trainer.checkpoint is not None:
        raise ValueError(
            "make_trainer must attach no Checkpoint, which would save the search, or resume a run in its place; attach it to "
            "the trainer that make_trainer returns for the run"
        )
    return trainer
