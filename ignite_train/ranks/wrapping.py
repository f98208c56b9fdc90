"""Recognising how a model is wrapped, and so how its gradients cross ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ignite_train.arguments import one_of
from ignite_train.internals.of_distributed import ReplicatedByHooks, reduced_late
from ignite_train.model.innermost import innermost
from ignite_train.model.memory_layout import gradient_dtype
from ignite_train.model.reshard import is_sharded
from ignite_train.ranks import collectives
from ignite_train.ranks.crossing import AloneCrossing, Crossing
from ignite_train.ranks.data_ranks import DataRanks, data_ranks_of
from ignite_train.ranks.ddp import DDPCrossing
from ignite_train.ranks.elastic import ElasticCrossing, ElasticShardsCrossing
from ignite_train.ranks.fsdp import FSDPCrossing, check_sharding, spans_all_ranks
from ignite_train.ranks.members import Members, check_elastic
from ignite_train.ranks.mesh import MeshCrossing
from ignite_train.ranks.placeholders import PlaceholderCrossing, Placeholders
from ignite_train.ranks.replicas import LocalCrossing, ReplicasCrossing, SmallReplicasCrossing
from ignite_train.state import Carried

__all__ = ["ReductionName", "crossing_for", "data_ranks_of_any", "own_buffers", "own_parameters", "unwrap"]

ReductionName = Literal["auto", "ddp", "elastic", "explicit", "fsdp", "local"]


def crossing_for(
    model: nn.Module,
    name: ReductionName,
    *,
    accumulates: bool,
    in_step: bool,
    carried: Carried,
    data_dims: Sequence[str] | None,
    in_each: bool,
    forward: Any,
) -> Crossing:
    """Chooses how the gradients of `model` cross ranks. Collective.

    Args:
        model: a plain module, one in DistributedDataParallel, one that `fully_shard` was applied to, or one with DTensors.
        name: `"auto"` is what the model is wrapped for; the others insist on one way.
        accumulates: whether an update may have several micro-batches.
        in_step: whether all ranks are to run forward equally often, those with less data on placeholders.
        carried: what forward carries from micro-batch to micro-batch.
        data_dims: the names of the mesh dimensions over which samples differ; None where they can be found.
        in_each: whether `fully_shard` reduces in each backward.
        forward: the user's, which placeholders run.

    Raises:
        TypeError: the model is wrapped in a way that cannot be right.
        ValueError: there are several ranks and parameters that no reduction would synchronise; or torch cannot accumulate in
            the way in which the model is wrapped.
    """
    one_of("reduction", name, get_args(ReductionName))
    if name == "elastic":
        return _elastic(model, Placeholders(model, carried, forward), in_each=in_each)
    if isinstance(model, DataParallel):
        raise TypeError("model must not be a DataParallel, whose replicas are threads; run one process for each device instead")
    if collectives.world_size() > 1 and any(isinstance(module, ReplicatedByHooks) for module in model.modules()):
        raise TypeError(
            "model must not have the older replicate of torch.distributed._composable applied to it, whose hooks reduce "
            "gradients in every backward; leave that call out and wrap the model in DistributedDataParallel"
        )
    if collectives.world_size() > 1 and any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(
            "model must not be sharded by FullyShardedDataParallel, whose flat parameters have nothing in common on the ranks; "
            "shard it by torch.distributed.fsdp.fully_shard instead"
        )
    data_ranks = data_ranks_of_any(model, data_dims)
    if is_sharded(model):
        return _sharded(model, name, Placeholders(model, carried, forward), data_ranks, in_each=in_each)
    if in_each and collectives.world_size() > 1:
        raise ValueError(
            f"model must have fully_shard applied to it for reduce_each_micro_batch=True, got {type(model).__name__} without; "
            "leave the option out: other gradients are whole on each rank anyway, so that it would only send more"
        )
    if data_ranks.mesh is not None:
        return _on_mesh(model, name, Placeholders(model, carried, forward), data_ranks)
    crossing = _replicated(model, name, accumulates=accumulates)
    if not in_step or collectives.world_size() == 1:
        return crossing
    return PlaceholderCrossing(crossing, Placeholders(crossing.module, carried, forward))


def _elastic(model: nn.Module, placeholders: Placeholders, *, in_each: bool) -> ElasticCrossing | ElasticShardsCrossing:
    lighthouse, sharded = check_elastic(), is_sharded(model)
    wrapped = next((one for one in model.modules() if isinstance(one, (DataParallel, DistributedDataParallel))), None)
    if wrapped is not None or (collectives.world_size() > 1 and not sharded):
        got = f"{collectives.world_size()} ranks" if wrapped is None else f"a {type(wrapped).__name__} in it"
        raise ValueError(
            f"model must be a plain module in a process of its own for reduction='elastic', got {got}; pass the module without "
            "its wrapper, and start each replica without a process group, as python -m ignite_train.elastic does, or apply "
            "fully_shard to it"
        )
    moving = next((name for name, _ in model.named_buffers() if name.endswith("running_mean")), None)
    if moving is not None:
        raise ValueError(
            f"model must have no running statistics for reduction='elastic', got {moving!r}, which each replica would "
            "take of its own samples; use GroupNorm or LayerNorm, or track_running_stats=False"
        )
    if not sharded:
        return ElasticCrossing(model, Members(lighthouse))
    _check_sharded(model, DataRanks.all_ranks())
    is_hybrid = any(parameter.device_mesh.ndim > 1 for parameter in model.parameters() if isinstance(parameter, DTensor))
    if is_hybrid or not spans_all_ranks(model):
        raise ValueError(
            "model must be sharded by fully_shard alone, over all ranks of its replica, for reduction='elastic', got a mesh of "
            "several dimensions or DTensors of another kind; give fully_shard a mesh of one dimension, or none"
        )
    return ElasticShardsCrossing(model, placeholders, Members(lighthouse), in_each=in_each)


def data_ranks_of_any(
    model: nn.Module, data_dims: Sequence[str] | None, *, option: str = "options=UpdateOptions(data_dims={})"
) -> DataRanks:
    """Finds the data ranks of a model, however it is wrapped; see `data_ranks_of`."""
    return data_ranks_of(model, data_dims, all_differ=spans_all_ranks(model), option=option)


def _replicated(model: nn.Module, name: ReductionName, *, accumulates: bool) -> Crossing:
    if name == "fsdp":
        raise ValueError("model must be sharded for reduction='fsdp'; apply torch.distributed.fsdp.fully_shard to it")
    ddp = _find_ddp(model)
    if name in ("explicit", "local") and ddp is not None:
        raise ValueError(f"model must be without DistributedDataParallel for reduction={name!r}; pass the module inside")
    if name == "ddp" and ddp is None:
        raise ValueError("model must be in DistributedDataParallel for reduction='ddp'; wrap it, say with idist.auto_model")
    if ddp is not None:
        if accumulates and ddp.static_graph:  # an assertion inside torch fails in the first backward under no_sync
            raise ValueError(
                "model must be in a DistributedDataParallel without static_graph=True for accumulation_steps other than 1; "
                "leave it out, or pass the module inside with options=UpdateOptions(reduction='explicit')"
            )
        return _hooked(model, ddp, name)
    if collectives.world_size() == 1:
        return AloneCrossing(model)
    if name == "explicit":
        return ReplicasCrossing(model)
    if name == "local":
        return LocalCrossing(model)
    raise ValueError(
        f"model must be wrapped to train on {collectives.world_size()} ranks, got a bare {type(model).__name__}; pass "
        "idist.auto_model(model) or DistributedDataParallel(model), or options=UpdateOptions(reduction='explicit')"
    )


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside a `DistributedDataParallel`: to run forward without a collective in it."""
    ddp = _find_ddp(model)
    if ddp is None:
        return model
    inside = {id(parameter) for parameter in ddp.parameters()}
    if any(id(parameter) not in inside for parameter in model.parameters()):
        raise TypeError("model must be a DistributedDataParallel or contain none; pass the modules without their wrappers")
    module: nn.Module = ddp.module
    return module


def own_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that `DistributedDataParallel` was told to ignore, so that each rank has its own."""
    ddp = _find_ddp(model)
    if ddp is None or not ddp.parameters_to_ignore:
        return []
    delayed = {id(parameter) for parameter in reduced_late(ddp)}  # which it ignores at first, and reduces later
    named = ddp.module.named_parameters()
    return [name for name, p in named if name in ddp.parameters_to_ignore and id(p) not in delayed]


def own_buffers(model: nn.Module) -> list[str]:
    """Names of the buffers that `DistributedDataParallel` was told to ignore."""
    ddp = _find_ddp(model)
    return [] if ddp is None else [name for name, _ in ddp.module.named_buffers() if name in ddp.parameters_to_ignore]


def _on_mesh(model: nn.Module, name: ReductionName, placeholders: Placeholders, data_ranks: DataRanks) -> MeshCrossing:
    if _find_ddp(model) is not None:
        raise ValueError(
            "model must be without DistributedDataParallel if some of its parameters are DTensors, which it does not reduce; "
            "pass the module inside, with options=UpdateOptions(data_dims=...), or apply fully_shard to it"
        )
    if name not in ("auto", "explicit"):
        raise ValueError(
            f"reduction must be 'auto' or 'explicit' for a model with DTensors and without fully_shard, got {name!r}"
        )
    return MeshCrossing(model, placeholders, data_ranks)


def _sharded(
    model: nn.Module, name: ReductionName, placeholders: Placeholders, data_ranks: DataRanks, *, in_each: bool
) -> FSDPCrossing:
    if name not in ("auto", "fsdp"):
        raise ValueError(f"reduction must be 'auto' or 'fsdp' for a model that fully_shard was applied to, got {name!r}")
    _check_sharded(model, data_ranks)
    return FSDPCrossing(model, placeholders, data_ranks, in_each=in_each)


def _check_sharded(model: nn.Module, data_ranks: DataRanks) -> None:
    """Sees to it that FSDP2 reduces all gradients of `model`."""
    if isinstance(model, (nn.ModuleDict, nn.ModuleList)):
        raise TypeError(
            f"model must have a forward of its own to be sharded as a whole, got a {type(model).__name__}; make it a module "
            "whose forward calls its parts and apply fully_shard to that, or pass it without fully_shard and with "
            "options=UpdateOptions(reduction='explicit')"
        )
    _refuse_wide_gradients(
        model, "leave grad_dtype out and pass fully_shard mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"
    )
    whole = [key for key, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if whole or not isinstance(model, FSDPModule):
        raise ValueError(
            f"model must have fully_shard applied to the root module, last, got one where {(whole or ['the root'])[0]!r} is "
            "not sharded; its gradient would not cross the ranks"
        )
    check_sharding(model, data_ranks)


def _hooked(model: nn.Module, ddp: DistributedDataParallel, name: ReductionName) -> Crossing:
    remedy = "pass all of it without the wrapper and with options=UpdateOptions(reduction='explicit')"
    if isinstance(ddp.module, (nn.ModuleDict, nn.ModuleList)):
        raise TypeError(
            f"model must have a forward of its own in DistributedDataParallel, which reduces in the backward of that, got a "
            f"{type(ddp.module).__name__}; {remedy}"
        )
    covered = {id(parameter) for parameter in ddp.parameters()}
    stray = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
    if stray:
        raise ValueError(
            f"model must have all trainable parameters inside DistributedDataParallel, got {stray[0]!r} outside; {remedy}"
        )
    only_wraps = innermost(model) is innermost(ddp.module)  # `ddp` itself, or compiled
    module = ddp.module if only_wraps else model
    crossing = DDPCrossing(module, ddp)
    if crossing.averaged_over != collectives.world_size():
        raise ValueError(
            f"model must be reduced over all {collectives.world_size()} ranks, got a process_group of {crossing.averaged_over}"
        )
    if name == "auto" and crossing.averaged_over > 1 and SmallReplicasCrossing.fits(ddp):
        return SmallReplicasCrossing(module, ddp)
    _refuse_wide_gradients(ddp, "pass the module inside with options=UpdateOptions(reduction='explicit')")
    return crossing


def _refuse_wide_gradients(model: nn.Module, remedy: str) -> None:
    """Torch's wrappers fail in the first backward where a gradient has another dtype than its parameter."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and gradient_dtype(parameter) != parameter.dtype:
            raise ValueError(
                f"model must have gradients of the dtype of its parameters in its wrapper, got {gradient_dtype(parameter)} as "
                f"grad_dtype of {name}, which is {parameter.dtype}; {remedy}"
            )


def _find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    if len(wrapped) > 1:
        raise TypeError(f"model must hold one DistributedDataParallel at most, got {len(wrapped)}; wrap the whole model once")
    return wrapped[0] if wrapped else None
