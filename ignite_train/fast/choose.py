"""The choice of accelerations for an update: the one thing that is asked of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ignite_train.fast.compiled_gather import CompiledGather, say_why_not_compiled
from ignite_train.fast.compiled_step import CompiledStep
from ignite_train.fast.direct_engine import direct_engine
from ignite_train.fast.folded_step import FoldedStep, FoldedSteps, why_never_folded
from ignite_train.fast.queued_step import QueuedStep
from ignite_train.fast.unwrapped_step import UnwrappedStep
from ignite_train.model.optimizers import Optimizers
from ignite_train.ranks.crossing import AloneCrossing
from ignite_train.ranks.statistics import Statistics
from ignite_train.update.compilation import WHOLE, Compile, compiles_updates
from ignite_train.update.local_update import LocalUpdate
from ignite_train.update.options import UpdateOptions
from ignite_train.update.stepper import OneStepper, SeveralSteppers
from ignite_train.update.update import Update

__all__ = ["choose", "settings_of_graphs"]

_ON_CPU = {
    "cpp_wrapper": True,
    # Convolutions keep the memory format of what they are given. To bring weights to another one, and gradients back, in each
    # update makes a graph twice as slow.
    "layout_optimization": False,
}


def choose(update: Update, optimizers: Optimizer | Optimizers, compile: Compile, *, takes_state: bool) -> None:  # noqa: A002
    """Puts what is faster, and does the same, in the place of an update's plain stepper, cross and gather.

    Without `UpdateOptions(fast=True)`, which is the default, nothing is changed.

    Args:
        update: which.
        optimizers: that it steps.
        compile: as for `create_trainer`.
        takes_state: whether forward has the state for its third parameter.
    """
    settings = settings_of_graphs(compile, next(update.model.parameters()).device)
    if settings is not None:
        reason = _why_no_graph(update, optimizers, takes_state=takes_state)
        if reason is not None:
            say_why_not_compiled(reason)
            settings = None
    if not update.options.fast or update.options.closure:
        return
    _fold(update)
    _run_engine(update)
    if settings is not None and isinstance(optimizers, Optimizer):
        _compile(update, optimizers, settings)


def _run_engine(update: Update) -> None:
    """Backward is one call of torch's engine.

    Not where ranks wait for each other in it: `HangWatch` knows by the frames of torch that they do.
    """
    gather = update.gather
    is_plain = gather.passes.run_backward is torch.autograd.backward and gather.statistics.on_host
    if is_plain and isinstance(gather.crossing, AloneCrossing):
        gather.passes.engine = direct_engine()


def _fold(update: Update) -> None:
    """The step divides the gradients as it reads them, and on an accelerator it is queued before the host has read anything."""
    stepper, gather = update.stepper, update.gather
    if isinstance(stepper, OneStepper):
        if why_never_folded(stepper.optimizer) is not None:
            update.stepper = UnwrappedStep(stepper)
            return
        folded: FoldedStep | FoldedSteps = FoldedStep(stepper)
    elif isinstance(stepper, SeveralSteppers):
        folded = FoldedSteps(stepper, limits_each=update.norm_limits is not None)
    else:
        return
    update.stepper = folded
    if not gather.statistics.on_host and not isinstance(update, LocalUpdate):
        update.gather = QueuedStep(
            passes=gather.passes,
            crossing=gather.crossing,
            statistics=gather.statistics,
            gradients=gather.gradients,
            learning_rates=gather.learning_rates,
            recovery=gather.recovery,
            stepper=folded,
            rules=update.rules,
        )


def _compile(update: Update, optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Graphs do what the update does up to and with its step."""
    plain = update.gather
    statistics = plain.statistics
    if not statistics.on_host:
        statistics = Statistics(torch.device("cpu"))
        update.parts.statistics.append(statistics)
    update.gather = CompiledGather(
        passes=plain.passes,
        crossing=plain.crossing,
        statistics=plain.statistics,
        gradients=plain.gradients,
        learning_rates=plain.learning_rates,
        optimizer=optimizer,
        rules=update.rules,
        watch=update.stepper.watch,
        search=update.parts.search,
        settings=settings,
        host_statistics=statistics,
    )


def settings_of_graphs(options: Compile, device: torch.device) -> dict[str, Any] | None:
    """The arguments of `torch.compile` for whole updates; None where these are not to be compiled.

    Where none are given, Python's part of a call is left out too: on the CPU by inductor's wrapper in C++, on CUDA by CUDA
    graphs.
    """
    if not compiles_updates(options):
        return None
    given = {name: value for name, value in options.items() if name != WHOLE} if isinstance(options, Mapping) else {}
    if given:
        return given
    return {"mode": "reduce-overhead"} if device.type == "cuda" else {"options": {**_ON_CPU}}


def _why_no_graph(update: Update, optimizers: Optimizer | Optimizers, *, takes_state: bool) -> str | None:
    """Why no update of a trainer can be a graph: what it has to do in between cannot be seen from outside of one."""
    options, model = update.options, update.model
    if not options.fast:
        return "fast is False"
    if not isinstance(update.gather.crossing, AloneCrossing):
        return "gradients cross ranks"
    if not _is_on_one_device(model):
        return "the model is not on the CPU or one CUDA device alone"
    if takes_state:
        return "forward has a third parameter, and its numbers change with each update"
    if not isinstance(optimizers, Optimizer):
        return "there are several optimizers"
    if options.on_out_of_memory != "raise":
        return f"on_out_of_memory is {options.on_out_of_memory!r}"
    return _changed(options) or CompiledStep(optimizers, model).why_never()


def _is_on_one_device(model: nn.Module) -> bool:
    device = next(model.parameters()).device
    return device.type in ("cpu", "cuda") and all(parameter.device == device for parameter in model.parameters())


def _changed(options: UpdateOptions) -> str | None:
    """The option by which an update does something that no graph does."""
    if options.sample_sizes is not None:
        return "sample_sizes counts micro-batches before the first forward"
    names = ("closure", "compiled_autograd", "create_graph", "keep_gradients", "retain_graph")
    return next((f"{name} is {vars(options)[name]!r}" for name in names if vars(options)[name]), None)
