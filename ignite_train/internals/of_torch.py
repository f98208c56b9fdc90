"""Private names of torch that the core and the handlers use.

Each line gives a private name one of ours and says why no public name serves. `tests/internals/test_torch_internals.py`
compares each with what torch documents, so that a release of torch that changes one fails there, by name. Most are torch's own
functions, or getters in C: a call of one enters no function of Python. Only `fast/`, without which everything runs too, uses
others.
"""

from __future__ import annotations

import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from operator import attrgetter, methodcaller
from traceback import walk_tb
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.loss import _Loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks, _use_grad_for_differentiable
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

__all__ = [
    "COLLECTIVE_NAMESPACES",
    "COPY",
    "COUNTS_STEPS",
    "HAS_STEPPED",
    "ITERATOR",
    "LATEST_RATES",
    "MILESTONES",
    "NO_COLLECTIVES",
    "PARTS",
    "READ",
    "WRAPPED",
    "BatchNorm",
    "DispatchMode",
    "Dropout",
    "Loss",
    "RunningNorm",
    "backward_hooks_of",
    "buffers_of",
    "call_at_end_of_backward",
    "compiled_autograd",
    "donates_buffers",
    "end_with_parent",
    "end_workers",
    "foreach_add_",
    "foreach_copy_",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sub_",
    "forward_hooks_of",
    "forward_pre_hooks_of",
    "give_hooks",
    "gives_sparse_gradients",
    "grad_mode_wrapper",
    "has_lost_workers",
    "indices_of",
    "late_hooks_of",
    "modules_of",
    "note_error_in_pass",
    "parameters_of",
    "parts_of_schedule",
    "pass_of",
    "profiler_is_on",
    "pytree",
    "sampler_pass_of",
    "schema_of",
    "share_contents",
    "sparse_coo_tensor_unsafe",
    "step_post_hooks_of",
    "step_post_hooks_of_all",
    "step_pre_hooks_of",
    "step_pre_hooks_of_all",
    "storage_number",
    "values_of",
    "version_of",
    "versions_of",
    "with_versions",
]

# --- tensors ---

# How often torch has written into a tensor, which raises an error for one made in inference mode. Nothing public counts that.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# One call of a kernel for a list of tensors; the public functions take one tensor each, which is what the time goes into.
foreach_add_: Callable[..., None] = torch._foreach_add_
foreach_copy_: Callable[..., None] = torch._foreach_copy_
foreach_lerp_: Callable[..., None] = torch._foreach_lerp_
foreach_mul_: Callable[..., None] = torch._foreach_mul_
foreach_norm: Callable[..., tuple[Tensor, ...]] = torch._foreach_norm
foreach_sub_: Callable[..., None] = torch._foreach_sub_
# The hooks of a tensor, or None; the public methods add hooks and do not tell which are there.
backward_hooks_of: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
late_hooks_of: Callable[[Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
# Indices and values of a sparse tensor with rows that occur twice, of which the public methods give nothing.
indices_of: Callable[[Tensor], Tensor] = methodcaller("_indices")
values_of: Callable[[Tensor], Tensor] = methodcaller("_values")
# The public `sparse_coo_tensor(..., check_invariants=False)` warns before torch 2.13 that nothing is checked.
sparse_coo_tensor_unsafe: Callable[..., Tensor] = torch.ops.aten._sparse_coo_tensor_unsafe
# The number of a memory that views share; its public address is 0 for each tensor without elements.
storage_number: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")

# What takes nested containers apart and makes them again. Torch 2.13 has no public module for it.
pytree = _pytree

# --- operations and the graph of backward ---

# Sees each operation in its `with`, in forward and in backward. Torch documents it, in a module with a private name.
DispatchMode = TorchDispatchMode

# The arguments of an operation, and which of them it writes into.
schema_of: Callable[[Any], Any] = attrgetter("_schema")
# Names of operations that a dispatch mode sees: a copy to another device or dtype, the read of one number, and collectives.
COPY = "_to_copy"
READ = "_local_scalar_dense"
COLLECTIVE_NAMESPACES = {"c10d", "c10d_functional", "_c10d_functional"}
# Operations in these namespaces that send nothing: waiting for a functional collective, and wrapping its result.
NO_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd"}
# What torch calls the module inside of one that is compiled, or whose activations are computed again.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
# Whether the backward of an embedding makes a sparse gradient, by the node that its forward has left in the graph.
gives_sparse_gradients: Callable[[Any], bool] = attrgetter("_saved_sparse")
# Has a function called when all gradients of the running backward are there. A public hook is for one tensor each.
call_at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


def compiled_autograd() -> Callable[..., AbstractContextManager[Any]]:
    """A context in which a compiler is given the whole of backward; publicly there is only a switch for the process."""
    enable: Callable[..., AbstractContextManager[Any]] = torch._dynamo.compiled_autograd._enable
    return enable


def donates_buffers() -> bool:
    """Whether backward of compiled code may write into what forward has saved, by a setting that torch documents so."""
    return bool(torch._functorch.config.donated_buffer)


# --- modules ---

# All modules of a kind, and what users derive from them; the public classes are one for each number of dimensions.
BatchNorm = _BatchNorm
RunningNorm = _NormBase  # batch and instance normalisation, with running statistics or without
Dropout = _DropoutNd
Loss = _Loss

# The contents of a module itself, by name, as a dict that can be written into; the public iterators give copies of it.
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
modules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
# The hooks of a module, which the public methods add and do not tell.
forward_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")
forward_pre_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_pre_hooks")


def versions_of(state: Mapping[str, Any]) -> dict[str, int]:
    """The versions of the modules that `Module.state_dict` has noted in a state, by name; another state has none.

    `load_state_dict` tells each module which version it is given, so that it changes what an older one has saved.
    """
    noted = vars(state).get("_metadata") if isinstance(state, OrderedDict) else None
    entries = noted.items() if isinstance(noted, Mapping) else ()
    return {name: entry["version"] for name, entry in entries if isinstance(entry, Mapping) and "version" in entry}


def with_versions(values: Mapping[str, Any], versions: Mapping[str, int]) -> OrderedDict[str, Any]:
    """A state of these values for `load_state_dict`, which tells each module the version that it has here."""
    state = OrderedDict(values)
    vars(state)["_metadata"] = OrderedDict((name, {"version": version}) for name, version in versions.items())
    return state


def share_contents(module: nn.Module, other: nn.Module) -> None:
    """Gives `module` the parameters, buffers and modules of `other`, also those that are added to either later."""
    vars(module).update({name: vars(other)[name] for name in ("_parameters", "_buffers", "_modules")})


# --- optimizers and schedules ---

# The hooks of one optimizer, and of all optimizers; the public functions add hooks and do not tell which are there.
step_pre_hooks_of: Callable[[Optimizer], dict[int, Any]] = attrgetter("_optimizer_step_pre_hooks")
step_post_hooks_of: Callable[[Optimizer], dict[int, Any]] = attrgetter("_optimizer_step_post_hooks")
step_pre_hooks_of_all: dict[int, Any] = _global_optimizer_pre_hooks
step_post_hooks_of_all: dict[int, Any] = _global_optimizer_post_hooks


def give_hooks(optimizer: Optimizer) -> None:
    """Gives a wrapper that has not called torch's `__init__` the hooks that it lacks, as torch does for an old pickle."""
    try:
        step_pre_hooks_of(optimizer)
    except AttributeError:
        with suppress(AttributeError):  # of some that have defaults, since they have them from the optimizer inside
            optimizer.defaults = {}
        Optimizer.__setstate__(optimizer, {})


# What torch wraps the steps of its optimizers in, to switch gradients off.
grad_mode_wrapper: Callable[[Callable[..., Any]], Callable[..., Any]] = _use_grad_for_differentiable
# Whether a profiler of this thread is running, for which ranges are worth their time.
profiler_is_on: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
# In the attributes and the state of a schedule, the rates that it has set last, which `get_last_lr` tells and nothing sets.
LATEST_RATES = "_last_lr"
# In the attributes of the function that a schedule puts in the place of an optimizer's `step`, to see whether it is called.
COUNTS_STEPS = "_wrapped_by_lr_sched"
# In the attributes of an optimizer, what that function sets; without it the first step of a schedule warns.
HAS_STEPPED = "_opt_called"


# In the attributes and the state of a schedule that goes through others: those, or their states; and the steps at which a
# `SequentialLR` continues with the next.
PARTS = "_schedulers"
MILESTONES = "_milestones"


def parts_of_schedule(schedule: LRScheduler) -> Sequence[LRScheduler]:
    """The schedules that a `SequentialLR` or a `ChainedScheduler` goes through, which neither tells; none of another."""
    parts: Sequence[LRScheduler] = vars(schedule).get(PARTS, ())
    return parts


# --- data loaders ---

# In the attributes of a loader, the pass of its persistent workers, or None; each `iter` of the loader makes one or takes it.
ITERATOR = "_iterator"
pass_of: Callable[[DataLoader[Any]], Any] = attrgetter(ITERATOR)


def sampler_pass_of(loader: DataLoader[Any]) -> object:
    """An object that is another one in each pass of persistent workers, whose iterator is the same; None without them."""
    own = pass_of(loader)
    return None if own is None else vars(own).get("_sampler_iter")


def end_workers(loader: DataLoader[Any]) -> None:
    """Ends persistent workers at once; publicly they end only when the loader is freed, to which others may refer.

    The next pass starts others.
    """
    own = pass_of(loader)
    vars(loader)[ITERATOR] = None
    if isinstance(own, _MultiProcessingDataLoaderIter):
        own._shutdown_workers()


_broken_off = WeakSet[_BaseDataLoaderIter]()


def note_error_in_pass(error: BaseException) -> None:
    """Notes the passes over DataLoaders in which an error has come, maybe in the middle of a message from a worker.

    `has_lost_workers` tells it. Workers are not ended at once, since the error has to reach other ranks first.
    """
    owners = (frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__))
    _broken_off.update(one for one in owners if isinstance(one, _BaseDataLoaderIter))


def has_lost_workers(opened: object) -> bool:
    """Whether a pass over a DataLoader, or the next pass of persistent workers, needs worker processes that cannot be used.

    They have ended; or an error came while a micro-batch was read, and the next pass would begin in the middle of a message; or
    the pass was broken off before they got an index, and the next one would take their late answers for micro-batches.
    """
    facts = vars(opened) if isinstance(opened, _BaseDataLoaderIter) else {}
    if not facts.get("_workers"):
        return False
    needed = zip(facts["_workers"], facts["_workers_status"], strict=True)
    is_kept, is_broken = facts["_persistent_workers"], opened in _broken_off or not facts["_send_idx"]
    return is_broken or any((is_kept or is_used) and not worker.is_alive() for worker, is_used in needed)


def end_with_parent() -> None:
    """Has the kernel kill this process when the thread that forked it ends. Does nothing on other systems than Linux."""
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
