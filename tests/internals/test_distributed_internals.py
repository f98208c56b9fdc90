"""Private names of `torch.distributed` that the library uses: each as what its documentation says shows, on two processes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ignite_train.internals import of_distributed
from meshes import on_cpu
from ranks import Ranks


def wrapped(**settings: Any) -> DistributedDataParallel:
    """Two layers and a buffer, which differ over the ranks until they are wrapped."""
    torch.manual_seed(dist.get_rank())
    return DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), **settings)


def backward(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """A forward and a backward on other data on each rank; the gradients."""
    ddp(torch.arange(6.0).view(2, 3) * (1 + dist.get_rank())).square().sum().backward()
    return [parameter.grad.clone() for parameter in ddp.parameters()]


def store_of_the_group() -> bool:
    """What one rank writes into the store, the other reads."""
    store = of_distributed.default_store().clone()
    store.set(f"written by {dist.get_rank()}", "yes")
    return bool(store.get(f"written by {1 - dist.get_rank()}") == b"yes")


def class_of_the_store() -> bool:
    """It is the public one."""
    return of_distributed.TCPStore is dist.TCPStore


def root_of_a_mesh() -> bool:
    """A slice of a mesh knows the mesh that it was sliced from, and that one itself."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    return of_distributed.root_mesh_of(mesh["data"]) is mesh and of_distributed.root_mesh_of(mesh) is mesh


def begun_collectives() -> bool:
    """Each collective of a group counts one in that group, and all groups are there."""
    group = dist.new_group([0, 1])
    before = [of_distributed.sequence_number_of(one) for one in of_distributed.process_groups()]
    dist.all_reduce(torch.ones(1), group=group)
    after = [of_distributed.sequence_number_of(one) for one in of_distributed.process_groups()]
    is_there = any(one is group for one in of_distributed.process_groups())
    dist.destroy_process_group(group)
    return is_there and sum(after) == sum(before) + 1


def forward_of_ddp() -> bool:
    """In a traceback the function of this name stands between the wrapper and the module inside."""
    ddp, names = wrapped(), []
    ddp.module.register_forward_pre_hook(lambda *_: names.extend(frame.name for frame in traceback.extract_stack()))
    ddp(torch.ones(2, 3))
    return of_distributed.DDP_FORWARD in names


def synchronised_buffers() -> bool:
    """The ranks have the buffers of rank 0 afterwards, without a forward."""
    ddp = wrapped()
    mean = ddp.module[1].running_mean.fill_(1.0 + dist.get_rank())
    of_distributed.sync_buffers(ddp)
    return mean.tolist() == [1.0, 1.0]


def registered_hooks() -> bool:
    """The hook of `register_comm_hook` is listed with its state."""
    ddp = wrapped()
    before = [*of_distributed.comm_hooks_of(ddp)]
    ddp.register_comm_hook(state := object(), allreduce_hook)
    ((hook, known),) = of_distributed.comm_hooks_of(ddp)
    return before == [] and hook is allreduce_hook and known is state


def parameters_that_are_reduced() -> bool:
    """Those of the module in their order; and those that were ignored and are reduced late."""
    ddp = wrapped()
    late = nn.Parameter(torch.ones(1))
    module = nn.Linear(1, 1)
    module.late = late
    delayed = DistributedDataParallel(
        module, delay_all_reduce_named_params=[("late", late)], param_to_hook_all_reduce=module.weight
    )
    same = [*map(id, of_distributed.reduced_parameters(ddp))] == [*map(id, ddp.module.parameters())]
    return same and [*map(id, of_distributed.reduced_late(delayed))] == [id(late)]


def cut_buckets() -> bool:
    """Buckets that were cut in the order of registration are not cut again, and the gradients are what they would be."""
    expected, ddp = backward(wrapped()), wrapped()
    before = of_distributed.has_cut_buckets(ddp), of_distributed.rebuild_buckets(ddp.reducer)
    of_distributed.push_in_order_of_registration(ddp.reducer)
    cut = of_distributed.rebuild_buckets(ddp.reducer)
    of_distributed.set_has_cut_buckets(ddp)
    found = [backward(ddp) for _ in range(2)]
    is_twice = all(torch.allclose(two, one + one) for one, two in zip(*found, strict=True))
    return before == (False, False) and cut and is_twice and all(map(torch.equal, found[0], expected))


def cut_by_ddp() -> bool:
    """DDP itself cuts its buckets in the forward after the first backward, and its attribute says so."""
    ddp, said = wrapped(), []
    for _ in range(2):
        backward(ddp)
        said.append(bool(of_distributed.has_cut_buckets(ddp)))
    return said == [False, True]


def disarmed_reducer() -> bool:
    """After a forward the next backward reduces; once disarmed, it leaves the gradients of this rank, as under `no_sync`."""
    found = []
    for disarms in (False, True):
        ddp = wrapped()
        with torch.enable_grad():
            loss = ddp(torch.arange(6.0).view(2, 3) * (1 + dist.get_rank())).square().sum()
        of_distributed.check_reducer_finished(ddp.reducer)
        if disarms:
            of_distributed.disarm_reducer(ddp.reducer)
        loss.backward()
        found.append([torch.equal(*both(parameter.grad)) for parameter in ddp.parameters()])
    return all(found[0]) and not all(found[1])


def both(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Those of both ranks."""
    tensors = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(tensors, tensor)
    return tensors


def unfinished_reducer() -> bool:
    """A reducer that waits for gradients that backward does not make raises the error of the next forward, and names them."""
    ddp = DistributedDataParallel(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]))
    ddp.module.forward = lambda x: ddp.module[0](x)  # type: ignore[method-assign, assignment]
    ddp(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="finished reduction") as raised:
        of_distributed.check_reducer_finished(ddp.reducer)
    missing = of_distributed.missing_in_reduction(ddp, raised.value)
    return [*map(id, missing)] == [*map(id, ddp.module[1].parameters())]


def groups_of_fsdp() -> bool:
    """Each module that `fully_shard` was applied to has one group, with its parameters; no other module has one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=on_cpu())
    fully_shard(model, mesh=on_cpu())
    groups = of_distributed.parameter_groups(model)
    return (
        sorted(len(group.fsdp_params) for group in groups) == [2, 2] and of_distributed.parameter_groups(nn.Linear(1, 1)) == []
    )


def grouped_parameters_of_fsdp() -> bool:
    """They are those of the modules, a tied one and one that was replaced too, without one that was ignored."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=on_cpu(), ignored_params={model[2].weight})
    model[1].bias = nn.Parameter(model[1].bias.detach().clone())
    found = of_distributed.grouped_parameters(model)
    return {*map(id, found)} == {*map(id, [*model[0].parameters(), *model[1].parameters()])}


def replicated_by_hooks() -> bool:
    """The older `replicate` of torch, which keeps a wrapper of its own, changes the class; the newer one does not."""
    older, newer = nn.Linear(2, 2), nn.Linear(2, 2)
    replicate(older)  # type: ignore[no-untyped-call]
    replicate_with_fsdp.replicate(newer, mesh=on_cpu())
    return isinstance(older, of_distributed.ReplicatedByHooks) and not isinstance(newer, of_distributed.ReplicatedByHooks)


def whole_parameters_of_fsdp() -> bool:
    """Once gathered they have the whole shape, and after a backward that reduces nothing the gradient of this rank."""
    layer = nn.Linear(4, 2)
    fully_shard(layer, mesh=on_cpu())
    groups = of_distributed.parameter_groups(layer)
    before = of_distributed.whole_parameters(groups)
    layer.set_requires_gradient_sync(False)
    layer(torch.ones(3, 4)).sum().backward()
    weight, bias = of_distributed.whole_parameters(groups)
    return before == [] and weight.shape == (2, 4) and bias.grad is not None and bias.grad.tolist() == [3.0, 3.0]


def forgotten_iteration() -> bool:
    """After a backward that left whole gradients on this rank, and a forward without one, the next update is as the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model[0], mesh=on_cpu())
    fully_shard(model, mesh=on_cpu())
    x = torch.arange(8.0).view(2, 4) * (1 + dist.get_rank())

    def gradients() -> list[torch.Tensor]:
        model(x).square().sum().backward()
        found = [parameter.grad.to_local().clone() for parameter in model.parameters()]
        model.zero_grad()
        return found

    expected = gradients()
    model.set_requires_gradient_sync(False)
    model(x).square().sum().backward()
    model.set_requires_gradient_sync(True)
    model(x)
    of_distributed.forget_iteration(model)
    model.zero_grad()
    return all(map(torch.equal, gradients(), expected))


# The names of `of_distributed.py`, each with what must be true of it.
PARTS: dict[Callable[[], bool], tuple[str, ...]] = {
    store_of_the_group: ("default_store",),
    class_of_the_store: ("TCPStore",),
    root_of_a_mesh: ("root_mesh_of",),
    begun_collectives: ("process_groups", "sequence_number_of"),
    forward_of_ddp: ("DDP_FORWARD",),
    synchronised_buffers: ("sync_buffers",),
    registered_hooks: ("comm_hooks_of",),
    parameters_that_are_reduced: ("reduced_late", "reduced_parameters"),
    cut_buckets: ("push_in_order_of_registration", "rebuild_buckets", "set_has_cut_buckets"),
    cut_by_ddp: ("has_cut_buckets",),
    disarmed_reducer: ("disarm_reducer",),
    unfinished_reducer: ("check_reducer_finished", "missing_in_reduction"),
    groups_of_fsdp: ("parameter_groups",),
    grouped_parameters_of_fsdp: ("grouped_parameters",),
    replicated_by_hooks: ("ReplicatedByHooks",),
    whole_parameters_of_fsdp: ("whole_parameters",),
    forgotten_iteration: ("forget_iteration",),
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Two processes for all of them."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("holds", PARTS, ids=lambda holds: holds.__name__)
def test_a_private_name_is_as_it_was(two: Ranks, holds: Callable[[], bool]) -> None:
    """If this fails, the release of torch that is named has changed something that the library stands on."""
    try:
        as_it_was, why = all(two.run(holds)), "it behaves differently"
    except AssertionError as error:
        as_it_was, why = False, str(error)
    assert as_it_was, f"torch {torch.__version__} has changed {', '.join(PARTS[holds])} ({holds.__doc__}): {why}"


def test_each_name_has_a_test() -> None:
    """So has each that is added to `of_distributed.py` later."""
    assert sorted(name for names in PARTS.values() for name in names) == sorted(of_distributed.__all__)
