"""Making a trainer: the arguments, the checks that need no batch, and the parts put together."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from ignite.engine import Events
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from ignite_train.arguments import describe, did_you_mean, real_number, settings_of, whole_number
from ignite_train.data.dealing import ElasticDealing
from ignite_train.data.grouping import AccumulationSteps, MicroBatchGrouping
from ignite_train.device.to_device import transfer_to
from ignite_train.fast.choose import choose
from ignite_train.forward import Forward, bind_forward
from ignite_train.internals.of_torch import donates_buffers
from ignite_train.model.gradients import Gradients
from ignite_train.model.learning_rates import LearningRates
from ignite_train.model.optimizers import (
    OneOrSeveralOptimizers,
    Optimizers,
    as_optimizers,
    check_optimizers,
    optimizers_as_parts,
)
from ignite_train.model.precision import Precision, PrecisionName
from ignite_train.model.seeding import Seeding
from ignite_train.model.sparse_parameters import check_sparse_parameters, sparse_parameters
from ignite_train.model.step_watch import StepWatch
from ignite_train.other_words import answers_other_words
from ignite_train.protection import Protect, protect_ranks
from ignite_train.ranks import collectives
from ignite_train.ranks.crossing import Crossing
from ignite_train.ranks.mesh import MeshCrossing
from ignite_train.ranks.placeholders import PlaceholderCrossing
from ignite_train.ranks.replicas import LocalCrossing
from ignite_train.ranks.statistics import Statistics
from ignite_train.ranks.wrapping import crossing_for
from ignite_train.state import TrainState
from ignite_train.trainer import OutputTransform, Trainer
from ignite_train.update.compilation import Compile, compile_in_place, compiles_updates, of_model
from ignite_train.update.decision import Rules
from ignite_train.update.elastic_update import ElasticUpdate
from ignite_train.update.forward_backward import ForwardBackward
from ignite_train.update.gather import Gather
from ignite_train.update.handler_guard import HandlerGuard
from ignite_train.update.idle_run import warn_of_idle_run
from ignite_train.update.ignite_handlers import warn_of_ignite_handlers
from ignite_train.update.local_update import LocalUpdate
from ignite_train.update.loss_scaling import LossScaling, NoLossScaling, TorchLossScaling
from ignite_train.update.norm_limits import NormLimits
from ignite_train.update.options import RARE_SETTINGS, UpdateOptions
from ignite_train.update.out_of_memory import RecoverFromOutOfMemory
from ignite_train.update.sparse_gradients import refuse_sparse_gradients
from ignite_train.update.stepper import OneStepper, SeveralSteppers, Stepper
from ignite_train.update.update import Update

__all__ = ["check_transform", "create_trainer"]


@partial(answers_other_words, elsewhere=RARE_SETTINGS)
def create_trainer(
    model: nn.Module,
    optimizer: OneOrSeveralOptimizers,
    forward: Forward,
    *,
    accumulation_steps: AccumulationSteps = 1,
    max_grad_norm: float | Mapping[str, float] | None = None,
    precision: PrecisionName = "fp32",
    loss_scaling: LossScaling | None = None,
    compile: Compile = False,  # noqa: A002  # torch's name for it
    protect: Protect = True,
    seed: int | None = None,
    output_transform: OutputTransform | None = None,
    options: UpdateOptions | None = None,
) -> Trainer:
    """Makes a trainer: an Ignite engine whose one iteration is one optimizer update over a group of micro-batches.

    The gradient of an update is Σ∇loss / Σsample_size over all micro-batches and ranks (fairseq's rule), however the batch
    is split. Micro-batches are moved to the device of the model.

    Args:
        model: on the device where it trains. A plain module in a single process; on several ranks wrapped by `idist.auto_model`
            or `DistributedDataParallel`, sharded by `fully_shard`, with DTensors on a mesh (`UpdateOptions(data_dims=...)`), or
            plain with `UpdateOptions(reduction="explicit")`.
        optimizer: over all parameters of the model that require gradients. Several optimizers with parameters of their own are
            a list or a mapping, `{"muon": muon, "adamw": adamw}`: they step together or not at all.
        forward: `forward(model, micro_batch)` returns `ForwardOutput(loss, sample_size, logs)` with the loss *summed*, a tuple
            of these, or a bare scalar: a mean, which makes the update the mean of the micro-batch means. If it has a third
            positional parameter without a default, it is given `trainer.state` too.
        accumulation_steps: micro-batches to an update: a number, one for each epoch (the last repeats), or a function of
            the number of the update, which counts from 1.
        max_grad_norm: clip the L2 norm of the mean gradient, over all parameters and after the reduction over ranks, to this;
            None does not clip. With a mapping of optimizers, a mapping of limits by their names clips the gradients of each by
            their own norm.
        precision: `"fp32"` computes in the model's own dtypes; `"bf16"` and `"fp16"` run `forward` under autocast.
        loss_scaling: the policy; None means `TorchLossScaling()` for `"fp16"` and no scaling otherwise.
        compile: compile the model in place: True, or a mapping of `torch.compile`'s options. `"update"` compiles forward,
            backward and step of an update as one graph, or a few, in a single process; so does `{"update": True}` beside such
            options. While something needs a result from inside the graph, as a handler of FORWARD_COMPLETED does, updates are
            compiled as with True, and the log says why. Not with `create_graph`.
        protect: with several ranks, whether `FailureBoard`, `HangWatch`, `GradNormConsistency` (in each update) and
            `StateConsistency` (parameters, learning rates, loss scale and counters, after the first 3 updates, then ever fewer,
            every 1000, before each save and at the end) are attached: True, False, or a mapping of their settings by name in
            snake_case, such as
            `{"hang_watch": {"timeout_seconds": 120}, "state_consistency": {"every": 500}, "failure_board": False}`. One that
            you attach yourself replaces the default. All ranks pass the same.
        seed: make random numbers inside an update a function of (seed, update, micro-batch, rank): dropout and whatever else
            draws from the generators of torch, NumPy or Python; what the step draws is the same on all ranks. Outside of
            updates the generators are as if the update had drawn nothing. All ranks pass the same. None leaves the generators
            alone.
        output_transform: makes `state.output`, which Ignite's handlers read, of the `UpdateOutput` of each update; with None it
            is the `UpdateOutput` itself. Called once an update, before GRADIENTS_READY. `state.update_output` is always the
            `UpdateOutput`.
        options: the rare settings, such as `UpdateOptions(reduction="explicit", on_nonfinite="skip")`; None means the defaults.

    Returns:
        The trainer; start it with `trainer.run(loader, max_epochs=...)`.

    Raises:
        TypeError: an argument is of the wrong type, or the model is wrapped in a way that cannot be right.
        ValueError: a value is out of range, or model and optimizer do not belong together.

    Example:
        >>> import torch
        >>> from ignite_train import ForwardOutput, create_trainer
        >>> def forward(model, micro_batch):
        ...     x, y = micro_batch
        ...     error = (model(x) - y).square().sum()  # a sum over the samples, and how many they are
        ...     return ForwardOutput(error, sample_size=len(y))
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, max_grad_norm=1.0)
        >>> micro_batches = [(torch.ones(4, 3), torch.ones(4, 1))] * 6
        >>> state = trainer.run(micro_batches, max_epochs=1)
        >>> state.iteration, state.update_output.sample_size  # three updates of two micro-batches
        (3, 8.0)
    """
    options, seed = _checked_options(options, compile), None if seed is None else whole_number("seed", seed)
    _check_model(model)
    optimizers, state = _checked_optimizers(model, optimizer, options), TrainState()
    scaling, device = _loss_scaling(loss_scaling, precision), next(model.parameters()).device
    check_transform(output_transform, 1)
    limit, limits = _norm_limits(max_grad_norm, optimizers)
    options = _checked_combinations(options, limits, seed, model, scaling, compiled=compile is not False)
    bound = bind_forward(forward, lambda: state)
    crossing = crossing_for(
        model,
        options.reduction,
        accumulates=accumulation_steps != 1,
        in_step=options.uneven == "replay",
        carried=state.carried,
        data_dims=options.data_dims,
        in_each=options.reduce_each_micro_batch,
        forward=bound,
    )
    gradients, stepper = _gradients_and_stepper(crossing.module, optimizers)
    passes = ForwardBackward(
        model=model,
        module=crossing.module,
        user_forward=bound,
        run_backward=compile_in_place(model, of_model(compile, model), backward=options.compiled_autograd),
        transfer=transfer_to(device),
        precision=Precision(precision, device),
        loss_scaling=scaling,
        seeding=None if seed is None else Seeding(seed, device, crossing.data_ranks.rank),
        guard=HandlerGuard(gradients, optimizers, keeps_graph=options.create_graph),
        state=state,
        options=options,
        counts=crossing.data_ranks.counts,
    )
    update = _new_update(passes, crossing, gradients, stepper, LearningRates(optimizers), limit, limits)
    choose(update, optimizers, compile, takes_state=bound is not forward)
    parts = {"model": update.gather.crossing.module, **optimizers_as_parts(optimizers)}
    description = _description(accumulation_steps, max_grad_norm, precision, options, seed, update.loss_scaling)
    trainer = Trainer(update, _grouping(accumulation_steps, options, crossing), parts, description, state, output_transform)
    _complete(trainer, update, model, options)
    return protect_ranks(trainer, protect, model)


def _new_update(
    passes: ForwardBackward,
    crossing: Crossing,
    gradients: Gradients,
    stepper: Stepper,
    rates: LearningRates,
    limit: float | None,
    limits: Mapping[str, float],
) -> Update:
    """Puts the phases of an update together, without accelerations."""
    statistics = Statistics(next(passes.model.parameters()).device, counts=passes.counts)
    recovery = _recovery(passes, crossing, gradients, statistics)
    gather = Gather(
        passes=passes,
        crossing=crossing,
        statistics=statistics,
        gradients=gradients,
        learning_rates=rates,
        recovery=recovery,
    )
    kind = ElasticUpdate if crossing.members is not None else LocalUpdate if isinstance(crossing, LocalCrossing) else Update
    return kind(
        gather=gather,
        rules=Rules(crossing.averaged_over, passes.loss_scaling.enabled, limit, passes.options.normalize),
        norm_limits=_norm_limits_of(limits, stepper, crossing),
        stepper=stepper,
    )


def _complete(trainer: Trainer, update: Update, model: nn.Module, options: UpdateOptions) -> None:
    """Attaches what belongs to the update, and what looks for mistakes that are known only in the run."""
    trainer.replicas.num_data_ranks = len(update.gather.crossing.data_ranks.groups)
    if isinstance(update, LocalUpdate):
        update.join(trainer)
    elif isinstance(update, ElasticUpdate):
        from ignite_train.checkpoint.handover import Handover

        handover = Handover(trainer)
        update.join(trainer, handover.capture, handover.restore)
    accumulates = trainer.config["accumulation_steps"] != 1
    warn_of_ignite_handlers(trainer, keeps_gradients=options.keep_gradients, accumulates=accumulates)
    refuse_sparse_gradients(trainer, model)
    if options.train_mode:
        _warn_of_eval_mode(trainer, update.gather.crossing.module)
    warn_of_idle_run(trainer)


def _warn_of_eval_mode(trainer: Trainer, module: nn.Module) -> None:
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


def check_transform(transform: Any, arguments: int) -> None:
    """Raises a TypeError unless `output_transform` is None or a function that can be called with so many arguments."""
    if transform is None:
        return
    if not callable(transform):
        raise TypeError(f"output_transform must be a function, or None, got {describe(transform)}")
    try:
        signature = inspect.signature(transform, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions that are not written in Python have none
        return
    try:
        signature.bind(*(None,) * arguments)
    except TypeError:
        call = "output_transform(update_output)" if arguments == 1 else "output_transform(x, y, y_pred, loss)"
        raise TypeError(f"output_transform must be callable as {call}, got one with the parameters {signature!s:.80}") from None


def _checked_options(options: Any, compiled: Compile) -> UpdateOptions:
    options = UpdateOptions() if options is None else options
    if not isinstance(options, UpdateOptions):
        raise TypeError(f"options must be UpdateOptions(...), got {describe(options)}")
    if not options.fast and compiles_updates(compiled):
        raise ValueError(
            f"compile must not be {compiled!r:.60} with UpdateOptions(fast=False), which leaves graphs of whole updates out; "
            "pass compile=True, or leave fast out"
        )
    return replace(options, fast=False) if os.environ.get("IGNITE_TRAIN_FAST") == "0" else options


def _norm_limits(max_grad_norm: Any, optimizers: Optimizer | Optimizers) -> tuple[float | None, dict[str, float]]:
    """The limit for the norm over all parameters, and those for the norm of single optimizers by name."""
    if max_grad_norm is None:
        return None, {}
    if not isinstance(max_grad_norm, Mapping):
        real_number("max_grad_norm", max_grad_norm, above=0)
        return max_grad_norm, {}
    names = [] if isinstance(optimizers, Optimizer) else [*optimizers.named]
    if not max_grad_norm or not names:
        raise ValueError(
            f"max_grad_norm must be a number, or a mapping with a name of an optimizer, got {describe(max_grad_norm)}; pass "
            'optimizer={"muon": muon, "adamw": adamw} and max_grad_norm={"muon": 1.0}, say'
        )
    for name, limit in max_grad_norm.items():
        if name not in names:
            raise ValueError(f"max_grad_norm must have keys among {names}, got {name!r}{did_you_mean(name, names)}")
        real_number(f"max_grad_norm[{name!r}]", limit, above=0)
    return None, dict(max_grad_norm)


def _gradients_and_stepper(module: nn.Module, optimizers: Optimizer | Optimizers) -> tuple[Gradients, Stepper]:
    watch = StepWatch(optimizers)
    if isinstance(optimizers, Optimizer):
        gradients = Gradients(module, optimizers)
        return gradients, OneStepper(optimizers, gradients, watch)
    parts = {name: Gradients(module, one) for name, one in optimizers.named.items()}
    steps = {name: (OneStepper(one, parts[name], watch), parts[name]) for name, one in optimizers.named.items()}
    return Gradients(module, optimizers), SeveralSteppers(steps, watch)


def _norm_limits_of(limits: Mapping[str, float], stepper: Stepper, crossing: Crossing) -> NormLimits | None:
    if not limits or not isinstance(stepper, SeveralSteppers):
        return None
    return NormLimits(limits=limits, parts={name: part for name, (_, part) in stepper.parts.items()}, crossing=crossing)


def _description(
    accumulation_steps: AccumulationSteps,
    max_grad_norm: float | Mapping[str, float] | None,
    precision: str,
    options: UpdateOptions,
    seed: int | None,
    scaling: LossScaling,
) -> dict[str, Any]:
    """How a trainer was made, in plain types; of the rare settings those that are not the default."""
    steps = "a function" if callable(accumulation_steps) else accumulation_steps
    max_grad_norm = dict(max_grad_norm) if isinstance(max_grad_norm, Mapping) else max_grad_norm
    described = {"accumulation_steps": steps, "max_grad_norm": max_grad_norm, "precision": precision}
    described["reduction"] = options.reduction
    rare = {
        one.name: "a function" if callable(value) else value
        for one in fields(options)
        if (value := getattr(options, one.name)) != one.default and one.name not in ("reduction", "fast")  # no other result
    }
    seeded = {} if seed is None else {"seed": seed}
    scaled = {"loss_scaling": {"class": type(scaling).__name__, **settings_of(scaling)}} if scaling.enabled else {}
    return described | seeded | scaled | ({"options": rare} if rare else {})


def _recovery(
    passes: ForwardBackward, crossing: Crossing, gradients: Gradients, statistics: Statistics
) -> RecoverFromOutOfMemory | None:
    on_out_of_memory = passes.options.on_out_of_memory
    if on_out_of_memory == "raise":
        return None
    if isinstance(crossing, PlaceholderCrossing):
        raise ValueError(
            f"on_out_of_memory must be 'raise' with uneven='replay', got {on_out_of_memory!r}: a rank that drops or splits a "
            "micro-batch no longer runs forward as often as the others, which wait for it in theirs"
        )
    if not crossing.may_drop_micro_batches:
        raise ValueError(
            f"on_out_of_memory must be 'raise' in DistributedDataParallel and fully_shard, got {on_out_of_memory!r}: "
            "a rank that leaves its backward leaves the others waiting in theirs; "
            "pass a plain model and options=UpdateOptions(reduction='explicit')"
        )
    return RecoverFromOutOfMemory(passes, gradients, statistics)


def _grouping(accumulation_steps: AccumulationSteps, options: UpdateOptions, crossing: Crossing) -> MicroBatchGrouping:
    return MicroBatchGrouping(
        accumulation_steps,
        options.uneven,
        synchronised_norm=_synchronised_norm(crossing.module),
        drops_last_group=options.drop_last_group,
        is_sharded=isinstance(crossing, MeshCrossing),
        none_is_empty=options.none_is_empty,
        dealing=ElasticDealing(crossing.members) if crossing.members is not None else None,
    )


def _synchronised_norm(model: nn.Module) -> str | None:
    """The name of a SyncBatchNorm, whose forward and backward are collective; None if the model has no such module."""
    return next((name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)), None)


def _loss_scaling(loss_scaling: Any, precision: PrecisionName) -> LossScaling:
    """The policy that was given, or else the one that belongs to the precision: float16 has 5 bits of exponent."""
    if loss_scaling is None:
        return TorchLossScaling() if precision == "fp16" else NoLossScaling()
    if isinstance(loss_scaling, torch.amp.GradScaler):
        raise TypeError(
            "loss_scaling must be a policy such as TorchLossScaling(), which has GradScaler's rule; got a GradScaler"
        )
    if isinstance(loss_scaling, type) or not isinstance(loss_scaling, LossScaling):
        raise TypeError(f"loss_scaling must be a policy such as TorchLossScaling(), got {describe(loss_scaling)}")
    return loss_scaling


def _checked_combinations(
    options: UpdateOptions,
    limits: Mapping[str, float],
    seed: int | None,
    model: nn.Module,
    scaling: LossScaling,
    *,
    compiled: bool,
) -> UpdateOptions:
    retains = options.retain_graph and not options.compiled_autograd
    if compiled and retains and donates_buffers():
        raise ValueError(
            "retain_graph must be False with compile: backward of compiled code writes into what it has read; leave it out, or "
            "set torch._functorch.config.donated_buffer = False before"
        )
    _check_second_order(options, compiled=compiled)
    _check_local(options, limits)
    return _checked_elastic(options, seed, model, scaling, compiled=compiled)


def _check_second_order(options: UpdateOptions, *, compiled: bool) -> None:
    if not options.create_graph:
        return
    if collectives.world_size() > 1:
        raise ValueError(
            "create_graph must be False on several ranks: DistributedDataParallel's gradients have no graph; take second "
            "derivatives inside forward with torch.autograd.grad(..., create_graph=True)"
        )
    if compiled:
        raise ValueError("create_graph must be False with compile: torch.compile has no second derivatives")


def _check_local(options: UpdateOptions, limits: Mapping[str, float]) -> None:
    if options.reduction != "local":
        return
    if options.closure or options.uneven == "replay":
        name, value = ("closure", options.closure) if options.closure else ("uneven", options.uneven)
        raise ValueError(f"{name} must be left out with reduction='local', got {value!r}: no gradient crosses the ranks")
    if limits:
        raise ValueError(
            f"max_grad_norm must be one number with reduction='local', got {limits}; clip the norm over all optimizers"
        )


def _checked_elastic(
    options: UpdateOptions, seed: int | None, model: nn.Module, scaling: LossScaling, *, compiled: bool
) -> UpdateOptions:
    """The options, without accelerations where other replicas may have the update made again."""
    if options.reduction != "elastic":
        return options
    allowed = UpdateOptions(reduction="elastic")
    names = ("closure", "create_graph", "drop_last_group", "none_is_empty", "on_out_of_memory", "sample_sizes", "uneven")
    for name in names:
        value, default = getattr(options, name), getattr(allowed, name)
        if value != default:
            raise ValueError(f"{name} must be left out with reduction='elastic', where it is not supported, got {value!r}")
    if compiled:
        raise ValueError("compile must be False with reduction='elastic', where it is not supported")
    if seed is None:
        raise ValueError(
            "seed must be given with reduction='elastic', so that an update that is made again draws the same random numbers; "
            "pass seed=0, say, the same on all replicas"
        )
    if isinstance(scaling, TorchLossScaling) and scaling.awaits_size:
        raise ValueError(
            "loss_scaling must have its first scale with reduction='elastic', where each replica would take another from its "
            "samples; pass loss_scaling=TorchLossScaling(init_scale=65536.0), say, the same on all replicas"
        )
    if sparse_parameters(model):
        raise ValueError("model must have no sparse gradients for reduction='elastic', got an embedding with sparse=True")
    return replace(options, fast=False)


def _checked_optimizers(model: nn.Module, optimizer: Any, options: UpdateOptions) -> Optimizer | Optimizers:
    optimizers = as_optimizers(optimizer)
    check_optimizers(model, optimizers, closure=bool(options.closure))
    check_sparse_parameters(model, optimizers)
    if options.closure:
        _check_closure(options, model, optimizers)
    return optimizers


def _check_closure(options: UpdateOptions, model: nn.Module, optimizers: Optimizer | Optimizers) -> None:
    if isinstance(optimizers, Optimizers):
        raise ValueError(
            f"closure must be False with {len(optimizers.named)} optimizers, got {options.closure!r}: each would evaluate the "
            "loss while the others have moved; pass one optimizer over all parameters"
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"closure must be False for a model with DTensors, as fully_shard makes them, got {options.closure!r}: LBFGS, SAM "
            "and their like add up over the shards of one rank; use DistributedDataParallel"
        )


def _check_model(model: Any) -> None:
    if type(model).__module__.startswith("torch.distributed.pipelining"):
        raise TypeError(
            f"model must be a whole model on each rank, or on a mesh, got a {type(model).__name__} of a pipeline, whose stages "
            "have no update of their own; use tensor parallel and fully_shard, with options=UpdateOptions(data_dims=...)"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model must have parameters that require gradients, got none; call requires_grad_(True) on some")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"model must be initialised, got the lazy parameter {name!r}; run one batch through the model first"
            )
        is_expanded = any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True))
        if parameter.requires_grad and is_expanded:
            raise ValueError(
                f"model must hold each weight once, got {name!r} of shape {tuple(parameter.shape)} expanded from fewer; "
                "build the parameter from a .clone() of them"
            )
        if parameter.is_meta:
            raise ValueError(f"model must hold its weights, got {name!r} on the meta device; call to_empty() and initialise")
        if parameter.requires_grad and parameter.dtype is torch.float16:
            raise ValueError(
                f"model must not be trained in float16 weights, got {name!r}; keep float32 and pass precision='fp16'"
            )
