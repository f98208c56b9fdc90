"""Backward by one call of torch's engine, whose wrapper takes longer than the graph of a small network."""

from __future__ import annotations

import logging
from functools import partial

import torch

from ignite_train.update.forward_backward import Engine

__all__ = ["direct_engine"]


def direct_engine() -> Engine | None:
    """Torch's engine, called as `torch.autograd.backward` calls it for a loss alone; for graphs on the CPU.

    On an accelerator the engine has threads of its own, to which torch hands the context of the caller. None where torch logs
    the graph, or does not have the functions that are known here.
    """
    engine = vars(torch.autograd.Variable).get("_execution_engine")
    is_transformed = vars(torch._C).get("_are_functorch_transforms_active")  # by functorch, which backward refuses
    if engine is None or is_transformed is None or torch.autograd.graph.log.isEnabledFor(logging.DEBUG):
        return None
    run = partial(
        engine.run_backward, keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True
    )
    return Engine(run, is_transformed)
