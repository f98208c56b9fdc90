"""Private names of torch that the library uses: each as its documentation, or a public name beside it, says.

A release of torch that changes one of them fails here, by its name. `make torch-versions` runs this with the oldest and the
newest.
"""

from __future__ import annotations

import copy
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from ignite_train.internals import of_torch
from ignite_train.internals.of_torch import (
    COLLECTIVE_NAMESPACES,
    COPY,
    COUNTS_STEPS,
    HAS_STEPPED,
    ITERATOR,
    LATEST_RATES,
    READ,
    DispatchMode,
    pytree,
)
from private_names import private_names_of_others
from processes import DEADLINE_SECONDS

ROOT = Path(__file__).parents[2]


def drawn(*shape: int) -> Tensor:
    """Numbers that are always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# --- tensors ---


def versions() -> bool:
    """Each in-place change of a tensor or of a view of it counts one more; reading, and a change of another tensor, none."""
    tensor, other = torch.zeros(3), torch.zeros(3)
    found = [of_torch.version_of(tensor)]
    for change in (tensor.sum, other.zero_, tensor.zero_, lambda: tensor[1:].add_(1.0), lambda: tensor.copy_(other)):
        change()
        found.append(of_torch.version_of(tensor))
    torch.autograd.graph.increment_version([tensor])
    with torch.inference_mode():
        hidden = torch.zeros(1)
    with pytest.raises(RuntimeError, match="version"):
        of_torch.version_of(hidden)
    return found == [0, 0, 0, 1, 2, 3] and of_torch.version_of(tensor) == 4


def lists_of_tensors() -> bool:
    """A `_foreach_` function does to each of a list what the method of its name does to a tensor, and takes what we give."""
    sizes = (5, 1, 300)
    ones, others = [drawn(size) for size in sizes], [drawn(size).flip(0) for size in sizes]

    def same(function: Callable[..., None], alone: Callable[[Tensor, Tensor], Tensor], *arguments: Any) -> bool:
        changed = [one.clone() for one in ones]
        function(changed, *arguments)
        return all(torch.equal(a, alone(b, c)) for a, b, c in zip(changed, ones, others, strict=True))

    third = torch.tensor(1 / 3)
    return (
        same(of_torch.foreach_add_, lambda a, _: a + 1, 1)
        and same(of_torch.foreach_copy_, lambda _, b: b, others)
        and same(lambda *lists: of_torch.foreach_copy_(*lists, non_blocking=True), lambda _, b: b, others)
        and same(of_torch.foreach_lerp_, lambda a, b: a.lerp(b, 0.25), others, 0.25)
        and same(of_torch.foreach_mul_, lambda a, _: a * third, third)
        and same(of_torch.foreach_sub_, lambda a, b: a - b, others)
    )


def norms_of_lists() -> bool:
    """`_foreach_norm(list, order, dtype=...)` gives `torch.linalg.vector_norm` of each."""
    tensors = [drawn(7, 3), drawn(1), drawn(2000)]
    lengths = zip(of_torch.foreach_norm(tensors, 2.0, dtype=torch.float64), tensors, strict=True)
    peaks = zip(of_torch.foreach_norm(tensors, math.inf), tensors, strict=True)
    return all(torch.equal(peak, tensor.abs().max()) for peak, tensor in peaks) and all(
        length.dtype == torch.float64 and math.isclose(length, torch.linalg.vector_norm(tensor.double()), rel_tol=1e-12)
        for length, tensor in lengths
    )


def hooks_of_tensors() -> bool:
    """A hook of `register_hook` or `register_post_accumulate_grad_hook` is in its dict until it is removed."""
    found = []
    for getter, register in (
        (of_torch.backward_hooks_of, Tensor.register_hook),
        (of_torch.late_hooks_of, Tensor.register_post_accumulate_grad_hook),
    ):
        tensor = torch.zeros(1, requires_grad=True)
        before = getter(tensor)
        handle = register(tensor, hook := lambda *_: None)  # type: ignore[no-untyped-call]
        there = [*(getter(tensor) or {}).values()]
        handle.remove()
        found.append(not before and there == [hook] and not getter(tensor))
    return all(found)


def sparse_rows() -> bool:
    """`_indices` and `_values` are what a sparse tensor was made of, with rows that occur twice."""
    indices, values = torch.tensor([[2, 0, 2]]), drawn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.11 says that it checks nothing, also where it is told to check
        tensor = torch.sparse_coo_tensor(indices, values, (3, 4), check_invariants=True)
    return torch.equal(of_torch.indices_of(tensor), indices) and torch.equal(of_torch.values_of(tensor), values)


def unchecked_sparse_tensor() -> bool:
    """`_sparse_coo_tensor_unsafe` makes what `sparse_coo_tensor` makes, and is told whether it is coalesced."""
    indices, values = torch.tensor([[0, 2]]), drawn(2, 4)
    made = [of_torch.sparse_coo_tensor_unsafe(indices, values, (3, 4), is_coalesced=known) for known in (None, True)]
    expected = torch.zeros(3, 4).index_add(0, indices[0], values)
    return [one.is_coalesced() for one in made] == [False, True] and all(torch.equal(one.to_dense(), expected) for one in made)


def numbers_of_storages() -> bool:
    """Views have the number of their tensor, and tensors with memories of their own have different ones, also empty ones."""
    kept = torch.zeros(0), torch.zeros(0), drawn(4)
    numbers = [of_torch.storage_number(one.untyped_storage()) for one in kept]
    view = of_torch.storage_number(kept[2][1:].untyped_storage())
    return len({*numbers}) == 3 and view == numbers[2]


# --- operations and the graph of backward ---


class Noting(DispatchMode):
    """Notes the operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def dispatch_mode() -> bool:
    """In its `with`, a mode is called for each operation, also those of backward; a copy and a read have their names."""
    weight = torch.ones(2, requires_grad=True)
    with (mode := Noting()):
        (weight.double().sum() * 2).backward()
        weight.sum().item()
    names = [func.overloadpacket.__name__ for func in mode.seen]
    return names.count("sum") == 2 and names.count(COPY) == 2 and names.count(READ) == 1


def schemas() -> bool:
    """A schema knows the arguments, by name, and which of them are written into."""
    with (mode := Noting()):
        tensor = torch.ones(2)
        tensor.add_(tensor)
        torch.add(tensor, tensor, out=(other := torch.empty(2)))
        tensor + other
    found = []
    for func in mode.seen:
        schema = of_torch.schema_of(func)
        writes = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        found.append((func.overloadpacket.__name__, schema.is_mutable, writes))
    return [one for one in found if one[0].startswith("add")] == [
        ("add_", True, ["self"]),
        ("add", True, ["out"]),
        ("add", False, []),
    ]


def collective_namespaces() -> bool:
    """Collectives that are operations stand in these namespaces."""
    found = [torch.ops.c10d.allreduce_, torch.ops._c10d_functional.all_reduce, torch.ops.c10d_functional.all_reduce]
    return {str(packet).partition(".")[0] for packet in found} == COLLECTIVE_NAMESPACES


def no_collectives() -> bool:
    """What the dispatcher sees when a functional collective is waited for, apart from the collective."""
    given, seen = torch.ones(2, requires_grad=True), set[str]()

    class Names(DispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in COLLECTIVE_NAMESPACES:
                seen.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            with Names():  # type: ignore[no-untyped-call]
                for one in (given, given.detach()):
                    functional_collectives.all_reduce(one, "sum", dist.group.WORLD).add(0)
        finally:
            dist.destroy_process_group()
    return {"all_reduce"} < seen <= {"all_reduce", *of_torch.NO_COLLECTIVES}


def wrapped_modules() -> bool:
    """The name of the only module in each kind of wrapper."""
    wrappers = (torch.compile(nn.Linear(1, 1)), checkpoint_wrapper(nn.Linear(1, 1)))
    return tuple(name for wrapper in wrappers for name, _ in wrapper.named_children()) == of_torch.WRAPPED


def sparse_embeddings() -> bool:
    """The node of an embedding says whether its gradient is sparse."""
    nodes = [nn.Embedding(3, 2, sparse=sparse)(torch.tensor([1])).grad_fn for sparse in (False, True)]
    return [of_torch.gives_sparse_gradients(node) for node in nodes] == [False, True]


def end_of_backward() -> bool:
    """What is queued in backward is called once, when all gradients are there."""
    weight, seen = torch.ones(1, requires_grad=True), []
    loss = (weight * 3).sum()
    loss.register_hook(lambda _: of_torch.call_at_end_of_backward(lambda: seen.append(weight.grad)))  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    return len(seen) == 1 and seen[0] is weight.grad and weight.grad.item() == 3.0


def compiled_backward() -> bool:
    """In its `with` the compiler is given a graph of the whole of backward, which makes the same gradient."""
    given: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        given.append(graph)
        return graph.forward

    weight = torch.ones(2, requires_grad=True)
    loss = (weight * 3).square().sum()
    with warnings.catch_warnings(), of_torch.compiled_autograd()(torch.compile(backend=backend), dynamic=False):
        warnings.simplefilter("ignore")  # torch itself reads `.grad` of tensors that have none
        loss.backward()  # type: ignore[no-untyped-call]
    return len(given) == 1 and weight.grad is not None and weight.grad.tolist() == [18.0, 18.0]


def donated_buffers() -> bool:
    """The setting is what torch names in its own error, where backward of compiled code runs a second time."""
    config = torch._functorch.config
    with config.patch(donated_buffer=True):
        given = of_torch.donates_buffers()
    with config.patch(donated_buffer=False):
        return given and not of_torch.donates_buffers()


def trees() -> bool:
    """A pytree takes dicts, lists, tuples and named tuples apart and makes them again."""
    tree = {"a": [1, (2, 3)], "b": torch.return_types.max((4, 5))}
    leaves, structure = pytree.tree_flatten(tree)
    mapped = pytree.tree_map(lambda leaf: leaf * 2, tree, is_leaf=lambda part: part == (2, 3))
    return (
        leaves == pytree.tree_leaves(tree) == [1, 2, 3, 4, 5]
        and pytree.tree_unflatten(leaves, structure) == tree
        and mapped["a"] == [2, (2, 3, 2, 3)]
    )


# --- modules ---


def kinds_of_modules() -> bool:
    """The classes hold the public modules that the library means by them, and no others."""
    norms = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
    instance = {nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d}
    drops = {nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout}
    losses = {nn.MSELoss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.NLLLoss, nn.L1Loss, nn.CTCLoss}
    others = {nn.LayerNorm, nn.GroupNorm, nn.Linear, nn.Sequential}
    everything = norms | instance | drops | losses | others

    def are(kind: type) -> set[type]:
        return {one for one in everything if issubclass(one, kind)}

    found = [are(kind) for kind in (of_torch.BatchNorm, of_torch.RunningNorm, of_torch.Dropout, of_torch.Loss)]
    return found == [norms, norms | instance, drops, losses] and "running_mean" in dict(nn.BatchNorm1d(2).named_buffers())


def contents_of_modules() -> bool:
    """The dicts hold what the public iterators give, and what is written into them is the module's."""
    module = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2))
    norm, linear = module
    same = (
        [*of_torch.buffers_of(norm).items()] == [*norm.named_buffers()]
        and [*of_torch.parameters_of(linear).items()] == [*linear.named_parameters()]
        and [*of_torch.modules_of(module).items()] == [*module.named_children()]
    )
    of_torch.buffers_of(norm)["running_mean"] = other = torch.ones(3)
    return same and norm.running_mean is other


def shared_contents() -> bool:
    """A module that shares the contents of another has its parameters, also those that the other is given later."""
    module, other = nn.Module(), nn.Sequential(nn.BatchNorm1d(2))
    of_torch.share_contents(module, other)
    other.append(nn.Linear(1, 1))
    states = [[*map(id, one.state_dict(keep_vars=True).values())] for one in (module, other)]
    return len(states[0]) == 7 and states[0] == states[1]


def hooks_of_modules() -> bool:
    """A hook of a forward is in its dict until it is removed."""
    module, hook = nn.Linear(1, 1), lambda *_: None
    handles = module.register_forward_hook(hook), module.register_forward_pre_hook(hook)
    there = [[*of(module).values()] for of in (of_torch.forward_hooks_of, of_torch.forward_pre_hooks_of)]
    for handle in handles:
        handle.remove()
    return there == [[hook], [hook]] and not of_torch.forward_hooks_of(module) and not of_torch.forward_pre_hooks_of(module)


def versions_of_modules() -> bool:
    """A state has the version of each module, which is told it when it loads the state; a copy as a plain dict has none."""

    class Layer(nn.Linear):
        _version = 5

    module, told = nn.Sequential(Layer(1, 1)), []
    module[0].register_load_state_dict_pre_hook(lambda _, state, prefix, metadata, *__: told.append(metadata.get("version")))
    state = module.state_dict()
    module.load_state_dict(state)
    module.load_state_dict(dict(state))
    module.load_state_dict(of_torch.with_versions(state, {"": 1, "0": 4}))
    known = of_torch.versions_of(state) == {"": 1, "0": 5} and of_torch.versions_of(dict(state)) == {}
    vars(state)["_metadata"] = None  # which torch allows
    return told == [5, None, 4] and known and of_torch.versions_of(state) == {}


# --- optimizers and schedules ---


def an_optimizer(lr: float = 1.0) -> torch.optim.SGD:
    """Over one parameter with a gradient."""
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=lr)


def hooks_of_steps() -> bool:
    """A hook of a step is in the dict of its optimizer, or in that of all optimizers, until it is removed."""
    optimizer, hook, found = an_optimizer(), lambda *_: None, []
    for register, table in (
        (optimizer.register_step_pre_hook, of_torch.step_pre_hooks_of(optimizer)),
        (optimizer.register_step_post_hook, of_torch.step_post_hooks_of(optimizer)),
        (register_optimizer_step_pre_hook, of_torch.step_pre_hooks_of_all),
        (register_optimizer_step_post_hook, of_torch.step_post_hooks_of_all),
    ):
        handle = register(hook)
        there = hook in table.values()
        handle.remove()
        found.append(there and hook not in table.values())
    return all(found)


def wrappers_of_steps() -> bool:
    """A step is wrapped by torch in a range for profilers and hooks, in which is the one that switches gradients off."""
    outer = torch.optim.SGD.step
    inner = vars(outer)["__wrapped__"]
    known = torch.optim.Optimizer.profile_hook_step(print).__code__, of_torch.grad_mode_wrapper(print).__code__
    optimizer, modes = an_optimizer(), []
    of_torch.grad_mode_wrapper(lambda _: modes.append(torch.is_grad_enabled()))(optimizer)
    return (
        (outer.__code__, inner.__code__) == known and "__wrapped__" not in vars(vars(inner)["__wrapped__"]) and modes == [False]
    )


def hooks_of_wrappers() -> bool:
    """A wrapper without torch's `__init__` gets places for hooks, and those that are there stay."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.param_groups, self.state = an_optimizer().param_groups, {}

        def step(self) -> None:  # type: ignore[override]
            pass

    wrapper, called = Wrapper(), list[int]()
    of_torch.give_hooks(wrapper)
    wrapper.register_step_pre_hook(lambda *_: called.append(1))
    of_torch.give_hooks(wrapper)
    wrapper.step()
    return called == [1]


def rates_of_schedules() -> bool:
    """`get_last_lr` and the state of a schedule give what stands under the name."""
    schedule = StepLR(an_optimizer(), 1, gamma=0.5)
    before = schedule.get_last_lr() == schedule.state_dict()[LATEST_RATES] == [1.0]
    vars(schedule)[LATEST_RATES] = [7.0]
    return before and schedule.get_last_lr() == schedule.state_dict()[LATEST_RATES] == [7.0]


def schedules_of_schedules() -> bool:
    """Those that a chain or a sequence was made of; none of a plain schedule."""
    optimizer = an_optimizer()
    parts = [ConstantLR(optimizer), StepLR(optimizer, 2)]
    made = SequentialLR(optimizer, parts, milestones=[1]), ChainedScheduler(parts)
    states = [part.state_dict() for part in parts]
    return (
        [[*of_torch.parts_of_schedule(one)] for one in made] == [parts, parts]
        and [one.state_dict()[of_torch.PARTS] for one in made] == [states, states]
        and made[0].state_dict()[of_torch.MILESTONES] == [1]
        and not of_torch.parts_of_schedule(parts[0])
    )


def counted_steps() -> bool:
    """A schedule puts a function with this attribute in the place of `step`, which wraps the step of the class.

    Its first step warns unless that function was called, which is noted in the optimizer.
    """
    optimizer = an_optimizer()
    before = "step" in vars(optimizer)
    schedule = StepLR(optimizer, 1)
    marks = vars(vars(optimizer)["step"])
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()
    vars(optimizer)[HAS_STEPPED] = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StepLR(optimizer, 1).step()
    return not before and COUNTS_STEPS in marks and marks["__wrapped__"] is torch.optim.SGD.step


# --- data loaders ---


def death_of_a_parent() -> bool:
    """A process that asked for it is killed when the thread that forked it ends, on Linux."""
    if sys.platform != "linux":
        return True
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            of_torch.end_with_parent()
            os.write(writer, b"x")
            time.sleep(DEADLINE_SECONDS)
            os.write(writer, b"lives")
            os._exit(0)
        os.read(reader, 1)
        os._exit(0)
    os.waitpid(middle, 0)
    os.close(writer)
    return os.read(reader, 1) == b""  # no process is left that could write


def pass_of_a_loader() -> bool:
    """A loader with persistent workers keeps its pass, which has another iterator over the sampler each time."""
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    passes = [of_torch.pass_of(loader)]
    samplers = [of_torch.sampler_pass_of(loader)]
    for _ in range(2):
        assert [int(one) for one in loader] == [0, 1, 2, 3]
        passes.append(of_torch.pass_of(loader))
        samplers.append(of_torch.sampler_pass_of(loader))
    copied = copy.copy(loader)
    vars(copied)[ITERATOR] = None
    workers = [*torch.multiprocessing.active_children()]
    lost = [of_torch.has_lost_workers(one) for one in (None, iter(()), passes[2])]
    of_torch.end_workers(loader)
    ended = [worker for worker in workers if not worker.is_alive()]
    lost.append(of_torch.has_lost_workers(passes[2]))
    for failing in (range(1), [None]):  # the error comes in the handler of the loop, and while the pass is read
        opened = DataLoader(failing, num_workers=1, persistent_workers=True, multiprocessing_context="fork")  # type: ignore[arg-type]
        try:
            raise TypeError([*opened])
        except TypeError as error:
            of_torch.note_error_in_pass(error)
        lost.append(of_torch.has_lost_workers(of_torch.pass_of(opened)))
        of_torch.end_workers(opened)
    return (
        passes[0] is None
        and passes[1] is passes[2] is not None
        and [samplers[0] is None, samplers[1] is samplers[2]] == [True, False]
        and of_torch.pass_of(copied) is of_torch.pass_of(loader) is None
        and lost == [False, False, False, True, False, True]
        and len(ended) == 1
    )


# --- what fast/ uses beside them ---


def fused_kernels() -> bool:
    """Each fused kernel makes the step of the public optimizer with `fused=True`; `found_inf` leaves it out."""
    gradient, found = drawn(300), []
    for kind, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {}),
    ):
        weights = []
        for calls_kernel in (False, True):
            weight = nn.Parameter(torch.ones(300))
            optimizer = kind([weight], lr=0.1, fused=True, **options)
            for _ in range(3):
                weight.grad = gradient.clone()
                step_by_kernel(optimizer) if calls_kernel and optimizer.state else optimizer.step()
            weights.append(weight)
        found.append(torch.equal(*weights) and not torch.equal(weights[0], torch.ones(300)))
    return all(found)


def step_by_kernel(optimizer: torch.optim.Optimizer) -> None:
    """A step of which the kernel is called here, once without and once with the word that a gradient is not finite."""
    (group,), numbers = optimizer.param_groups, torch.zeros(1)
    (weight,) = group["params"]
    state = optimizer.state[weight]
    steps = [state["step"]] if "step" in state else None
    if isinstance(optimizer, torch.optim.SGD):
        kernel, moments = torch._fused_sgd_, [[state["momentum_buffer"]]]
        names = ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
        options = {name: group[name] for name in names} | {"is_first_step": False}
    elif isinstance(optimizer, torch.optim.Adagrad):
        kernel, moments = torch._fused_adagrad_, [[state["sum"]]]
        options = {name: group[name] for name in ("lr", "lr_decay", "weight_decay", "eps", "maximize")}
    else:
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        moments = [[state["exp_avg"]], [state["exp_avg_sq"]], []]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
    with torch.no_grad():
        for one in steps or []:
            one += 1
        lists = ([weight], [weight.grad], *moments, *([steps] if steps else []))
        for found_inf in (numbers + 1, numbers):
            kernel(*lists, **options, grad_scale=None, found_inf=found_inf)


def gradient_mode() -> bool:
    """`torch._C._set_grad_enabled` is the switch behind `torch.no_grad`."""
    torch._C._set_grad_enabled(False)
    try:
        off = torch.is_grad_enabled()
    finally:
        torch._C._set_grad_enabled(True)
    return not off and torch.is_grad_enabled()


def running_profiler() -> bool:
    """Both say whether a profiler of torch is running."""
    said = [(of_torch.profiler_is_on(), torch.autograd.profiler._is_profiler_enabled)]
    with torch.profiler.profile():
        said.append((of_torch.profiler_is_on(), torch.autograd.profiler._is_profiler_enabled))
    return said == [(False, False), (True, True)]


def any_autocast() -> bool:
    """`torch._C._is_any_autocast_enabled` is true inside `torch.autocast`."""
    before = torch._C._is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        return not before and torch._C._is_any_autocast_enabled()


def noted_steps() -> bool:
    """A schedule warns at its second step unless an attribute of the optimizer says that there was a step."""
    optimizer = an_optimizer()
    schedule = StepLR(optimizer, 1)
    optimizer._opt_called = True
    schedule.step()  # pytest makes an error of a warning that comes here
    other = StepLR(an_optimizer(), 1)
    with pytest.warns(UserWarning, match=r"optimizer\.step\(\)"):
        other.step()
    return True


def saved_tensors_hooks() -> bool:
    """The look at the hooks for saved tensors gives None where there are none."""
    look = torch._C._autograd._top_saved_tensors_default_hooks
    before = look(True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return before is None and look(True) is not None


def backend_of_inductor() -> bool:
    """`torch.compile` makes this of mode, options and `dynamic`, and the graphs that come out are `CompiledFxGraph`s."""
    from torch._inductor.output_code import CompiledFxGraph

    backend = torch._TorchCompileInductorWrapper("default", None, None)
    return callable(backend) and callable(CompiledFxGraph.__call__) and "current_callable" in CompiledFxGraph.__annotations__


def look_up_of_dynamo() -> bool:
    """`set_eval_frame` takes what decides over a frame, and gives back what did before; settings are patched for a while."""
    set_lookup = torch._C._dynamo.eval_frame.set_eval_frame
    before = set_lookup(None)
    again = set_lookup(before)
    config = torch._dynamo.config
    names = ("assume_static_by_default", "automatic_dynamic_shapes", "record_runtime_overhead", "trace_autograd_ops")
    values = {name: getattr(config, name) for name in (*names, "skip_nnmodule_hook_guards")}
    with config.patch({name: not value for name, value in values.items()}):
        inside = {name: getattr(config, name) for name in values}
    torch._dynamo.mark_static_address(torch.zeros(1), guard=False)
    return again is None and all(inside[name] != value == getattr(config, name) for name, value in values.items())


# The names of `of_torch.py`, each with what must be true of it.
OF_TORCH: dict[Callable[[], bool], tuple[str, ...]] = {
    versions: ("version_of",),
    lists_of_tensors: ("foreach_add_", "foreach_copy_", "foreach_lerp_", "foreach_mul_", "foreach_sub_"),
    norms_of_lists: ("foreach_norm",),
    hooks_of_tensors: ("backward_hooks_of", "late_hooks_of"),
    sparse_rows: ("indices_of", "values_of"),
    unchecked_sparse_tensor: ("sparse_coo_tensor_unsafe",),
    numbers_of_storages: ("storage_number",),
    dispatch_mode: ("COPY", "READ", "DispatchMode"),
    schemas: ("schema_of",),
    collective_namespaces: ("COLLECTIVE_NAMESPACES",),
    no_collectives: ("NO_COLLECTIVES",),
    wrapped_modules: ("WRAPPED",),
    sparse_embeddings: ("gives_sparse_gradients",),
    end_of_backward: ("call_at_end_of_backward",),
    compiled_backward: ("compiled_autograd",),
    donated_buffers: ("donates_buffers",),
    trees: ("pytree",),
    kinds_of_modules: ("BatchNorm", "Dropout", "Loss", "RunningNorm"),
    contents_of_modules: ("buffers_of", "modules_of", "parameters_of"),
    shared_contents: ("share_contents",),
    hooks_of_modules: ("forward_hooks_of", "forward_pre_hooks_of"),
    versions_of_modules: ("versions_of", "with_versions"),
    hooks_of_steps: ("step_post_hooks_of", "step_post_hooks_of_all", "step_pre_hooks_of", "step_pre_hooks_of_all"),
    wrappers_of_steps: ("grad_mode_wrapper",),
    hooks_of_wrappers: ("give_hooks",),
    running_profiler: ("profiler_is_on",),
    rates_of_schedules: ("LATEST_RATES",),
    schedules_of_schedules: ("MILESTONES", "PARTS", "parts_of_schedule"),
    counted_steps: ("COUNTS_STEPS", "HAS_STEPPED"),
    death_of_a_parent: ("end_with_parent",),
    pass_of_a_loader: (
        "ITERATOR",
        "end_workers",
        "has_lost_workers",
        "note_error_in_pass",
        "pass_of",
        "sampler_pass_of",
    ),
}


def engine_of_backward() -> bool:
    """Called with a loss and its gradient it adds to `.grad`, and keeps no graph; whether a transform is active is told."""
    weight, engine = torch.tensor(3.0, requires_grad=True), torch.autograd.Variable._execution_engine
    arguments = {"keep_graph": False, "create_graph": False, "inputs": (), "allow_unreachable": True, "accumulate_grad": True}
    loss = weight.square()
    engine.run_backward((loss,), (torch.ones_like(loss),), **arguments)
    with pytest.raises(RuntimeError, match="second time"):
        engine.run_backward((loss,), (torch.ones_like(loss),), **arguments)
    is_transformed, seen = torch._C._are_functorch_transforms_active, list[bool]()
    torch.func.grad(lambda x: (seen.append(is_transformed()), x.sum())[1])(torch.ones(1))
    return weight.grad is not None and weight.grad.item() == 6.0 and not is_transformed() and seen == [True]


# Those that stand in `fast/`, by their names in torch.
OF_FAST: dict[Callable[[], bool], tuple[str, ...]] = {
    fused_kernels: ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"),
    gradient_mode: ("_C", "_set_grad_enabled"),
    engine_of_backward: ("_are_functorch_transforms_active", "_execution_engine"),
    running_profiler: ("_is_profiler_enabled",),
    any_autocast: ("_is_any_autocast_enabled",),
    noted_steps: ("_opt_called",),
    saved_tensors_hooks: ("_autograd", "_top_saved_tensors_default_hooks"),
    backend_of_inductor: ("_TorchCompileInductorWrapper", "_inductor"),
    look_up_of_dynamo: ("_dynamo",),
}
# Names that `fast/` looks for where an optimizer is no plain one; where they are missing, nothing is lost.
ONLY_LOOKED_FOR = {"_init_group", "_optimizer_step_code"}


def as_it_was(holds: Callable[[], bool]) -> str:
    """Empty, or how torch has changed it."""
    try:
        return "" if holds() else "it behaves differently"
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("holds", [*OF_TORCH, *OF_FAST], ids=lambda holds: holds.__name__)
def test_a_private_name_is_as_it_was(holds: Callable[[], bool]) -> None:
    """If this fails, the release of torch that is named has changed something that the library stands on."""
    names = ", ".join((OF_TORCH | OF_FAST)[holds])
    why = as_it_was(holds)
    assert why == "", f"torch {torch.__version__} has changed {names} ({holds.__doc__}): {why}"


def test_each_name_has_a_test() -> None:
    """So has each that is added to `of_torch.py` later."""
    assert sorted(name for names in OF_TORCH.values() for name in names) == sorted(of_torch.__all__)


@pytest.mark.skipif(not (ROOT / "ignite_train").is_dir(), reason="looks at a checkout, and this is none")
def test_each_name_in_fast_has_a_test() -> None:
    """What `fast/` takes of torch directly is tried above, whether it is an attribute, imported, or named by a string."""
    found = {name for path in (ROOT / "ignite_train/fast").glob("*.py") for _, name in private_names_of_others(path)}

    assert found - ONLY_LOOKED_FOR == {name for names in OF_FAST.values() for name in names}
