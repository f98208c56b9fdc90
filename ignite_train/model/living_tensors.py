"""Whether a function that is to make a model has made one, or returns one that the program trains."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from ignite_train.model.optimizers import stepped_parameters

__all__ = ["LivingTensors", "living_tensors", "refuse_living"]

LivingTensors: TypeAlias = dict[int, weakref.ref[Tensor]]


def living_tensors() -> LivingTensors:
    """The tensors of this process, by their `id`, without tensors that `gc.freeze` has hidden. None is kept alive."""
    return {id(one): weakref.ref(one) for one in gc.get_objects() if issubclass(type(one), Tensor)}


def refuse_living(optimizers: Mapping[str, Optimizer], living: LivingTensors) -> None:
    """Raises ValueError if a trained parameter was there already: it would be trained in the model of the program.

    Args:
        optimizers: of the trainer that was made.
        living: from before it was made.
    """
    for parameter in stepped_parameters(optimizers):
        known = living.get(id(parameter))
        if known is not None and known() is parameter and parameter.requires_grad:
            raise ValueError(
                "make_trainer must make a new model each time, got a trainer of parameters that were there before it was "
                "called, and would be changed; make model and optimizer inside of make_trainer, by copy.deepcopy(model) say"
            )
