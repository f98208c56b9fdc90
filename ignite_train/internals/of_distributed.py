"""Private names of `torch.distributed` that the crossings use: of DDP, FSDP2, meshes and process groups.

As in `of_torch.py`: each has a name of ours, and `tests/internals/test_distributed_internals.py` compares it with what torch
documents.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch.distributed._composable.replicate import DDP as _ReplicatedByHooks  # noqa: N811
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "DDP_FORWARD",
    "ReplicatedByHooks",
    "TCPStore",
    "check_reducer_finished",
    "comm_hooks_of",
    "default_store",
    "disarm_reducer",
    "forget_iteration",
    "grouped_parameters",
    "has_cut_buckets",
    "missing_in_reduction",
    "parameter_groups",
    "process_groups",
    "push_in_order_of_registration",
    "rebuild_buckets",
    "reduced_late",
    "reduced_parameters",
    "root_mesh_of",
    "sequence_number_of",
    "set_has_cut_buckets",
    "sync_buffers",
    "whole_parameters",
]

# --- process groups and meshes ---

# The same class as the public `torch.distributed.TCPStore`, whose types no checker knows.
TCPStore = _distributed_c10d.TCPStore

# The store over which `init_process_group` has met; the public one of a mesh or a launcher need not be the same.
default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store
# The mesh from which one was sliced, or itself. A slice tells its own ranks only.
root_mesh_of: Callable[[DeviceMesh], DeviceMesh] = methodcaller("_get_root_mesh")


def process_groups() -> tuple[Any, ...]:
    """All groups of this process; publicly only the code that has made a group knows it. An error while one is made."""
    return tuple(dist.distributed_c10d._world.pg_map)


# How many collectives a group has begun, or a RuntimeError where the backend does not count; public is a log, after an error.
sequence_number_of: Callable[[Any], int] = methodcaller("_get_sequence_number_for_group")


# --- DistributedDataParallel ---

# The function of DDP that calls the module inside, as it is called in a traceback.
DDP_FORWARD = "_run_ddp_forward"
# What the older `replicate` of torch makes of the class of a module, which keeps its wrapper to itself.
ReplicatedByHooks: type[Any] = _ReplicatedByHooks
# Gives the buffers of rank 0 to all. Publicly a forward does so, each time that it is called.
sync_buffers: Callable[[DistributedDataParallel], None] = methodcaller("_sync_buffers")
# The communication hooks that were registered, with their states; the public method registers and does not tell.
comm_hooks_of: Callable[[DistributedDataParallel], Sequence[tuple[Any, Any]]] = attrgetter("_comm_hooks")
# The parameters in the order of DDP's own numbers, and the ignored parameters that it reduces all the same, later.
reduced_parameters: Callable[[DistributedDataParallel], Sequence[nn.Parameter]] = attrgetter("_module_parameters")
reduced_late: Callable[[DistributedDataParallel], Sequence[nn.Parameter]] = attrgetter("_delay_all_reduce_params")
# Of a reducer, which nothing public reaches: cuts the buckets if their order is known, and says whether it has; takes the order
# of registration for it; raises torch's error if a backward waits for gradients; forgets what a forward has armed.
rebuild_buckets: Callable[[Any], bool] = methodcaller("_rebuild_buckets")
push_in_order_of_registration: Callable[[Any], None] = methodcaller("_push_all_rebuilt_params")
check_reducer_finished: Callable[[Any], None] = methodcaller("_check_reducer_finalized")
disarm_reducer: Callable[[Any], None] = methodcaller("_reset_state")
# Whether the final buckets are cut, as the next forward of DDP believes.
has_cut_buckets: Callable[[DistributedDataParallel], bool] = attrgetter("_has_rebuilt_buckets")


def missing_in_reduction(ddp: DistributedDataParallel, error: RuntimeError) -> list[nn.Parameter]:
    """The parameters whose gradients the reducer waits for, which nothing but the error of `check_reducer_finished` tells."""
    told = re.search(r"indices which did not receive grad for rank \d+:([ \d]*)", str(error))
    return [reduced_parameters(ddp)[int(number)] for number in told[1].split()] if told else []


def set_has_cut_buckets(ddp: DistributedDataParallel) -> None:
    """Has the next forward leave the buckets as they are."""
    ddp._has_rebuilt_buckets = True


# --- FSDP2 ---


def parameter_groups(root: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that it gathers together; in torch 2.11 a module has one group or none."""
    found: list[Any] = []
    for state in _states(root):
        groups = vars(state).get("_fsdp_param_groups")
        found += [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def grouped_parameters(root: nn.Module) -> list[nn.Parameter]:
    """The parameters of all groups as their modules have them now; a tied one once for each module."""
    found: list[nn.Parameter] = []
    for group in parameter_groups(root):
        for parameter in group.fsdp_params:
            info = parameter._module_info
            places = zip([info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True)
            found += [getattr(module, name) for module, name in places]
    return found


def whole_parameters(groups: Sequence[Any]) -> list[nn.Parameter]:
    """The parameters of these groups as forward and backward have them, without those that were never gathered."""
    found = [vars(parameter).get("_unsharded_param") for group in groups for parameter in group.fsdp_params]
    return [whole for whole in found if whole is not None]


def forget_iteration(root: nn.Module) -> None:
    """Has FSDP2 forget a forward or backward that was broken off, and the gradients that wait for their reduction.

    The public `reset_iter_state` of torch 2.13 leaves those gradients, which the next backward would add to.
    """
    if "reset_iter_state" in vars(FSDPModule):
        root.reset_iter_state()  # type: ignore[operator]
    else:
        _reset_iteration(root)
    for group in parameter_groups(root):
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # from torch 2.15 on it is the gradient below
                parameter.unsharded_accumulated_grad = None
    for whole in whole_parameters(parameter_groups(root)):
        whole.grad = None


def _states(root: nn.Module) -> list[Any]:
    """FSDP2's state of each module that it was applied to; the root comes first."""
    return [module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule)]


def _reset_iteration(root: nn.Module) -> None:
    """Does what `FSDPModule.reset_iter_state` of torch 2.13 does, with torch 2.11 and 2.12, which do not have it."""
    states = _states(root)
    context, shared = states[0]._state_ctx, states[0]._comm_ctx
    idle = type(states[0]._training_state).IDLE
    pending, shared.all_gather_state = [shared.all_gather_state], None
    if "reduce_scatter_state" in vars(shared):  # in torch 2.11 there is one at a time
        pending.append(shared.reduce_scatter_state)
        shared.reduce_scatter_state = None
    else:
        pending += shared.reduce_scatter_states
        shared.reduce_scatter_states.clear()
    shared.post_forward_order.clear()
    for one in pending:
        if one is not None and one.event is not None:
            states[0]._device_handle.current_stream().wait_event(one.event)
    for state in states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
    for group in parameter_groups(root):
        group.finalize_backward()  # waits for what has been started
        group._partial_reduce_output = None
        group._training_state = idle
        group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
