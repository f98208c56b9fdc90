"""Kernels that are called directly: bitwise `optimizer.step`, which is called in each case where it might do more."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ignite_train.fast import direct_step
from ignite_train.fast.direct_step import DirectStep, is_direct_right
from ignite_train.handlers import LearningRateSchedule
from ignite_train.model.fused_kernels import is_kernel_right
from ignite_train.model.gradients import Gradients
from ignite_train.model.group_tensors import GroupTensors, gather
from ignite_train.model.step_watch import StepWatch
from ranks import run_ranks
from tiers import accelerated, slow

pytestmark = accelerated

CPU = torch.device("cpu")
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, fused=True),
    "sgd, maximize, decay": lambda p: SGD(p, lr=0.1, maximize=True, weight_decay=0.1, fused=True),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "adam": lambda p: Adam(p, lr=0.01, fused=True),
    "adam, l2": lambda p: Adam(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), fused=True),
    "amsgrad, maximize": lambda p: Adam(p, lr=0.01, amsgrad=True, maximize=True, eps=1e-3, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw, amsgrad": lambda p: AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "adam, decoupled": lambda p: Adam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1, fused=True),
    "adagrad, all": lambda p: Adagrad(
        p, lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-3, maximize=True, fused=True
    ),
}
NONE_YET = "a parameter has no moments yet"


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What each direct step gives, from now on: None if it was made, or why not."""
    found: list[str | None] = []
    original = DirectStep.__call__

    def noted(self: DirectStep, groups: Any, **given: Tensor) -> str | None:
        found.append(original(self, groups, **given))
        return found[-1]

    monkeypatch.setattr(DirectStep, "__call__", noted)
    return found


def in_groups(make: Callable[[Any], Optimizer]) -> Callable[[Any], Optimizer]:
    """The same optimizer with an empty group, and two that differ in their options."""

    def made(parameters: Any) -> Optimizer:
        first, *others = parameters
        return make([{"params": []}, {"params": [first], "lr": 0.003, "weight_decay": 0.3}, {"params": others}])

    return made


def by_way_of_step(optimizer: Optimizer) -> None:
    """Makes all steps of it ordinary ones."""
    optimizer.register_step_post_hook(lambda *_: None)


# --- the very same numbers ---


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "groups"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("name", KINDS)
def test_a_direct_step_is_optimizer_step(build, micro_batches, bits, reasons, name, max_grad_norm, grouped, dtype):
    """Parameters, state, groups and records, with a rate that changes in each update, and a parameter thawed late."""
    make = in_groups(KINDS[name]) if grouped else KINDS[name]
    batches = [tuple(part.to(dtype) for part in batch) for batch in micro_batches]
    outcomes = []
    for direct in (True, False):
        model, optimizer, trainer = build(optimizer=make, max_grad_norm=max_grad_norm, dtype=dtype)
        if not direct:
            by_way_of_step(optimizer)
        LearningRateSchedule(LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step))).attach(trainer)
        records: list[Any] = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: records.append(trainer.state.output))  # noqa: B023
        model[2].bias.requires_grad_(False)
        trainer.run(batches)
        model[2].bias.requires_grad_(True)
        trainer.run(batches, max_epochs=2)
        outcomes.append((bits(model.state_dict()), bits(optimizer.state_dict()), [repr(record) for record in records]))

    assert outcomes[0] == outcomes[1]
    wrong = dtype is torch.bfloat16 and name in ("sgd", "sgd, maximize, decay", "momentum", "nesterov")
    first = [] if name.startswith(("sgd", "adagrad")) else [NONE_YET]  # Adagrad makes its moments when it is made
    if not wrong:  # the kernel of SGD is, for bfloat16 on the CPU, so that the step is not a fused one
        late = [reason for reason in reasons if reason not in (None, "its step has a hook")]
        assert late in (first, [*first, NONE_YET])
        assert reasons.count(None) >= 8


@pytest.mark.parametrize("name", KINDS)
def test_two_groups_are_stepped_directly(build, micro_batches, bits, reasons, name):
    """As a program has them that decays some of its parameters only."""
    outcomes = []
    for direct in (True, False):
        model, optimizer, trainer = build(
            optimizer=lambda parameters: KINDS[name](
                [{"params": (listed := [*parameters])[:1], "weight_decay": 0.3}, {"params": listed[1:]}]
            )
        )
        if not direct:
            by_way_of_step(optimizer)
        trainer.run(micro_batches)
        outcomes.append((bits(model.state_dict()), bits(optimizer.state_dict())))
    assert outcomes[0] == outcomes[1]
    assert {*reasons[1 : len(micro_batches)]} == {None}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_scheduler_hears_of_the_step(build, micro_batches, reasons, name, recwarn):
    """It warns if it is stepped before the optimizer; the first step of SGD is a direct one."""
    _, optimizer, trainer = build(optimizer=KINDS[name])
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    LearningRateSchedule(scheduler).attach(trainer)
    trainer.run(micro_batches[:3])

    assert [warning for warning in recwarn if "lr_scheduler" in str(warning.message)] == []
    assert reasons[1:] == [None, None]
    assert (reasons[0] is None) == (name == "sgd")


@pytest.mark.parametrize("name", ["adamw", "momentum", "adagrad"])
def test_a_loaded_state_is_the_one_that_is_stepped(build, micro_batches, bits, reasons, name):
    """Also a moment or a rate that somebody replaces between two updates."""
    outcomes = []
    for direct in (True, False):
        model, optimizer, trainer = build(optimizer=KINDS[name])
        if not direct:
            by_way_of_step(optimizer)
        trainer.run(micro_batches[:2])
        before = deepcopy(optimizer.state_dict())
        trainer.run(micro_batches[:2], max_epochs=2)
        optimizer.load_state_dict(before)
        trainer.run(micro_batches[:2], max_epochs=3)
        state = next(iter(optimizer.state.values()))
        key = next(key for key, value in state.items() if value.ndim)
        state[key] = state[key] * 2
        optimizer.param_groups[0]["lr"] *= 3
        trainer.run(micro_batches[:2], max_epochs=4)
        outcomes.append((bits(model.state_dict()), bits(optimizer.state_dict())))

    assert outcomes[0] == outcomes[1]
    assert reasons[1 - (name == "adagrad") : 8] == [None] * (7 + (name == "adagrad"))


@pytest.mark.parametrize("count", [0.0, 5.0, 2.0**24 - 2, 2.0**24], ids=["0", "5", "2^24 - 2", "2^24"])
def test_steps_are_counted_as_by_torch(count):
    """Up to where float32 cannot count on, and where the memory of a count has moved since the latest step."""
    counts = []
    for direct in (True, False):
        it = made()
        for state in it.optimizer.state.values():
            state["step"].fill_(count)
        for _ in range(4):
            if direct:
                assert it.direct() is None
            else:
                it.optimizer.step()
            for state in it.optimizer.state.values():
                state["step"].set_(state["step"].clone())
        counts.append([float(state["step"]) for state in it.optimizer.state.values()])

    assert counts[0] == counts[1]
    assert counts[0][0] in (count + 4, 2.0**24)


COUNTS_16 = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 refuses to step with a count in 16 bits")


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=COUNTS_16)], ids=["float64", "bfloat16"])
def test_steps_that_have_become_another_dtype_are_counted(dtype):
    """`.data` gives a tensor that has been looked at other memory, and it stays the same object."""
    counts = []
    for direct in (True, False):
        it = made()
        for number in range(4):
            if direct:
                assert it.direct() is None
            else:
                it.optimizer.step()
            if number == 1:
                for state in it.optimizer.state.values():
                    state["step"].data = state["step"].data.to(dtype)
        counts.append([(float(state["step"]), state["step"].dtype) for state in it.optimizer.state.values()])

    assert counts[0] == counts[1] == [(5.0, dtype)] * len(counts[0])


def test_a_count_is_a_change_that_autograd_sees():
    """As after `optimizer.step`: what was saved for a backward is not used with another value."""
    it = made()
    step = it.optimizer.state[it.model.bias]["step"]
    version = step._version
    assert it.direct() is None
    assert step._version == version + 1


def test_nothing_is_kept_alive():
    """Neither gradients nor moments that were replaced."""
    it = made()
    assert it.direct() is None
    states = [it.optimizer.state[parameter] for parameter in it.model.parameters()]
    gone = [weakref.ref(parameter.grad) for parameter in it.model.parameters()]
    gone += [weakref.ref(state["exp_avg"]) for state in states]
    it.optimizer.zero_grad()
    for state in states:
        state["exp_avg"] = state["exp_avg"].clone()

    assert [tensor() for tensor in gone] == [None] * 4


# --- what takes the ordinary way ---


class Mine(AdamW):
    """Somebody's own."""


def made(make: Callable[[Any], Optimizer] = KINDS["adamw"], *, stepped: bool = True) -> SimpleNamespace:
    """A model of two parameters with gradients, an optimizer that has stepped once, and a direct step of it."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3))
        model.bias.copy_(torch.arange(2.0))
    optimizer = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = Gradients(model, optimizer)
    gradients.note_kinds()
    if stepped:
        optimizer.step()
    return SimpleNamespace(model=model, optimizer=optimizer, gradients=gradients, direct=direct_step_of(optimizer, gradients))


def direct_step_of(optimizer: Optimizer, gradients: Gradients) -> Callable[[], str | None]:
    """A direct step of it, as `FoldedStep` makes it."""
    tensors = GroupTensors(gradients)
    direct = DirectStep(optimizer, gradients, tensors, StepWatch(optimizer))

    def step() -> str | None:
        groups = gather(optimizer)
        if not tensors.are_known(groups):
            tensors.note(groups)
        return direct(groups)

    return step


def of_group(**options: Any) -> Callable[[SimpleNamespace, pytest.MonkeyPatch], None]:
    return lambda it, _: it.optimizer.param_groups[0].update(options)


def step_of_a_user(it: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    original = AdamW.step
    monkeypatch.setattr(AdamW, "step", lambda self: original(self))


def attribute(name: str) -> Callable[[SimpleNamespace, pytest.MonkeyPatch], None]:
    return lambda it, _: setattr(it.optimizer, name, torch.ones(()))


def hook(how: str) -> Callable[[SimpleNamespace, pytest.MonkeyPatch], None]:
    return lambda it, _: getattr(it.optimizer, how)(lambda *_: None)


def moment(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[SimpleNamespace, pytest.MonkeyPatch], None]:
    def changed(it: SimpleNamespace, _: pytest.MonkeyPatch) -> None:
        state = it.optimizer.state[it.model.weight]
        state[key] = change(state[key])

    return changed


def capture(it: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    it.gradients.kinds = {(torch.device("cuda", 0), torch.float32)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def devices(it: SimpleNamespace, _: pytest.MonkeyPatch) -> None:
    it.gradients.kinds = {(CPU, torch.float32), (torch.device("meta"), torch.float32)}


def another_dtype(it: SimpleNamespace, _: pytest.MonkeyPatch) -> None:
    _convert(it.model.bias, torch.bfloat16)
    it.gradients.note_kinds()


def wide(it: SimpleNamespace, _: pytest.MonkeyPatch) -> None:
    for parameter in it.model.parameters():
        _convert(parameter, torch.float64)
    it.gradients.note_kinds()


def _convert(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    parameter.grad = None
    parameter.data = parameter.data.to(dtype)
    parameter.grad = torch.ones_like(parameter)


def of_a_class(it: SimpleNamespace, _: pytest.MonkeyPatch) -> None:
    it.model.weight.grad = it.model.weight.grad.as_subclass(type("Special", (Tensor,), {}))


def sparse(it: SimpleNamespace, _: pytest.MonkeyPatch) -> None:
    it.model.weight.grad = it.model.weight.grad.to_sparse()


def differs(it: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_step, "is_direct_right", lambda *_, **__: False)


UNPAIRED = "a gradient or a moment lies in memory otherwise than its parameter"
REASONS: dict[str, tuple[Callable[[SimpleNamespace, pytest.MonkeyPatch], None], str]] = {
    "step of the class": (step_of_a_user, "the step of its class has been replaced"),
    "grad_scale": (attribute("grad_scale"), "an attribute of it changes what its step does"),
    "found_inf": (attribute("found_inf"), "an attribute of it changes what its step does"),
    "_init_group": (attribute("_init_group"), "an attribute of it changes what its step does"),
    "pre-hook": (hook("register_step_pre_hook"), "its step has a hook"),
    "post-hook": (hook("register_step_post_hook"), "its step has a hook"),
    "foreach": (of_group(foreach=True), "a group is foreach, differentiable or capturable"),
    "differentiable": (of_group(differentiable=True), "a group is foreach, differentiable or capturable"),
    "capturable": (of_group(capturable=True), "a group is foreach, differentiable or capturable"),
    "rate": (of_group(lr=torch.tensor(0.1)), "a learning rate is a tensor"),
    "beta": (of_group(betas=(0.9, torch.tensor(0.9))), "a beta is a tensor"),
    "amsgrad switched on": (of_group(amsgrad=True), NONE_YET),
    "capture": (capture, "a CUDA graph is being captured"),
    "devices": (devices, "its gradients are on several devices, each of which needs the numbers"),
    "two dtypes": (another_dtype, "a group has tensors of several dtypes or devices"),
    "dtype": (wide, "a group has torch.float64 on cpu"),
    "class of a gradient": (of_a_class, "a parameter, its gradient or a moment is not a plain tensor"),
    "sparse gradient": (sparse, "a gradient is sparse"),
    "shape of a moment": (
        moment("exp_avg", lambda m: m[:1]),
        UNPAIRED,
    ),
    "strides of a moment": (
        moment("exp_avg", lambda m: m.t().contiguous().t()),
        UNPAIRED,
    ),
    "dtype of a moment": (moment("exp_avg_sq", Tensor.double), "a group has tensors of several dtypes or devices"),
    "number of steps": (moment("step", Tensor.double), "a number of steps is not a tensor that the kernel takes"),
    "two numbers of steps": (moment("step", lambda m: m.repeat(2)), "a number of steps is not a tensor that the kernel takes"),
    "trial": (differs, "a trial step has shown that torch does something else"),
}


@pytest.mark.parametrize("seen", [False, True], ids=["from the first step", "later"])
@pytest.mark.parametrize("name", REASONS)
def test_what_might_be_another_step_is_left_to_the_optimizer(bits, monkeypatch, name, seen):
    """Each reason, before any direct step and after one; neither parameters nor state have changed."""
    it = made()
    if seen and name not in ("trial", "class of a gradient"):  # a class of gradients is looked at with their parameters
        assert it.direct() is None
    change, reason = REASONS[name]
    change(it, monkeypatch)
    before = bits([*it.model.parameters()])

    assert it.direct() == reason
    assert bits([*it.model.parameters()]) == before


def test_a_second_group_that_hinders_leaves_the_first_alone(bits):
    it = made(lambda parameters: AdamW([{"params": [p]} for p in parameters], fused=True))
    before = bits([*it.model.parameters()])
    it.optimizer.param_groups[1]["lr"] = torch.tensor(0.1)

    assert it.direct() == "a learning rate is a tensor"
    assert bits([*it.model.parameters()]) == before


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook], ids=["pre", "post"])
def test_a_hook_of_all_optimizers_is_called(register):
    it, handle = made(), register(lambda *_: None)
    try:
        assert it.direct() == "its step has a hook"
    finally:
        handle.remove()
    assert it.direct() is None


def test_a_profiler_sees_the_step(build, micro_batches, reasons):
    _, _, trainer = build(optimizer=KINDS["adamw"])
    trainer.run(micro_batches[:2])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trainer.run(micro_batches[:2], max_epochs=2)
    trainer.run(micro_batches[:1], max_epochs=3)

    assert reasons[1:] == [None, *["a profiler is running, which shows its step"] * 2, None]
    assert sum(event.key == "Optimizer.step#AdamW.step" and event.count for event in profile.key_averages()) == 2


def test_a_class_that_torch_does_not_have():
    assert made(lambda p: Mine(p, fused=True)).direct() == "torch has no fused kernel for its class that is known here"


def test_a_step_that_was_decorated_before(monkeypatch):
    """With all names of torch's own."""
    step_of_a_user(SimpleNamespace(), monkeypatch)
    AdamW.step.__wrapped__ = None
    AdamW.step.__module__, AdamW.step.__qualname__ = "torch.optim.adam", "Adam.step"

    assert made().direct() == "the step of its class is not torch's"


def test_an_option_of_a_later_torch():
    def make(parameters: Any) -> Optimizer:
        optimizer = AdamW(parameters, fused=True)
        optimizer.defaults["cautious"] = True
        return optimizer

    assert made(make).direct() == "the optimizer has the option 'cautious', which is not known here"


def test_a_torch_without_a_kernel(monkeypatch):
    monkeypatch.delattr(torch, "_fused_adagrad_")

    assert made().direct() == "this torch does not have the functions that are known here"


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_no_moments_yet(name):
    it = made(KINDS[name], stepped=False)

    assert it.direct() == NONE_YET
    assert it.optimizer.state == {}


def test_momentum_that_is_switched_on_later():
    it = made(KINDS["sgd"])
    assert it.direct() is None
    it.optimizer.param_groups[0]["momentum"] = 0.9

    assert it.direct() == NONE_YET


def test_a_state_of_an_old_torch_has_none_for_momentum():
    it = made(KINDS["momentum"])
    for state in it.optimizer.state.values():
        state["momentum_buffer"] = None

    assert it.direct() == NONE_YET


def test_an_option_that_is_switched_on_has_a_trial_of_its_own(monkeypatch):
    it, tried = made(), []
    monkeypatch.setattr(direct_step, "is_direct_right", lambda _, switched, *__, **___: tried.append(switched) or True)
    for options in ({}, {"lr": 0.5}, {"maximize": True}, {"weight_decay": 0.0}):
        it.optimizer.param_groups[0].update(options)
        assert it.direct() is None

    assert tried == [{"weight_decay"}, {"weight_decay", "maximize"}, {"maximize"}]


@pytest.mark.parametrize(
    ("name", "switched", "decoupled"),
    [
        ("momentum", {"momentum", "dampening"}, False),
        ("adam, l2", {"weight_decay"}, False),
        ("adam, decoupled", {"weight_decay"}, True),
        ("adamw", {"weight_decay"}, True),
    ],
)
def test_a_trial_is_of_the_step_that_is_made(monkeypatch, name, switched, decoupled):
    """Of the same class, with the options that are switched on, and with the weight decay of that kernel."""
    tried: list[Any] = []
    monkeypatch.setattr(direct_step, "is_direct_right", lambda *given, **others: tried.append((*given, others)) or True)
    it = made(KINDS[name])
    assert it.direct() is None
    assert tried == [(type(it.optimizer), frozenset(switched), torch.float32, CPU, {"decoupled": decoupled})]


def _sharded() -> str | None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Replicate()]))
    optimizer = AdamW(model.parameters(), fused=True)
    model.weight.grad = torch.ones_like(model.weight)
    gradients = Gradients(model, optimizer)
    gradients.note_kinds()
    optimizer.step()
    return direct_step_of(optimizer, gradients)()


@pytest.mark.slow
def test_parameters_in_shards():
    assert run_ranks(_sharded, world_size=1) == ["a parameter, its gradient or a moment is not a plain tensor"]


# --- trial steps ---

OFF: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "numbers": ("_fused_adamw_", lambda kernel: lambda *a, lr, **o: kernel(*a, lr=lr * (1 + 1e-6), **o)),
    "scale": ("_fused_adamw_", lambda kernel: lambda *a, grad_scale, **o: kernel(*a, grad_scale=None, **o)),
    "skipped": ("_fused_adamw_", lambda kernel: lambda *a, found_inf, **o: kernel(*a, found_inf=None, **o)),
    "skipped for any number": (
        "_fused_adamw_",
        lambda kernel: lambda *a, found_inf, **o: kernel(*a, found_inf=None if found_inf is None else found_inf * 0 + 1, **o),
    ),
    "arguments": ("_fused_adamw_", lambda kernel: lambda *a, more, **o: None),
    "error": ("_fused_sgd_", lambda kernel: lambda *a, **o: torch.ones(2) @ torch.ones(3)),
}


@pytest.mark.parametrize("name", OFF)
def test_a_trial_finds_what_differs(monkeypatch, caplog, name):
    """Where the kernel is called as it is here, but not where torch calls it, it comes to something else."""
    is_direct_right.cache_clear()
    attribute, spoil = OFF[name]
    kind: type[Optimizer] = {"_fused_adamw_": AdamW, "_fused_sgd_": SGD}[attribute]
    kernel = getattr(torch, attribute)
    spoilt = spoil(kernel)
    original = direct_step._make

    def make(*arguments: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct_step, "_make", original)
            call, *others = arguments
            original([one._replace(kernel=spoilt) for one in call], *others)

    monkeypatch.setattr(direct_step, "_make", make)
    with caplog.at_level(logging.WARNING, "ignite_train"):
        found = [
            is_direct_right(kind, frozenset(), torch.float32, CPU, decoupled=kind is AdamW)  # type: ignore[arg-type]
            for _ in range(2)
        ]
    is_direct_right.cache_clear()

    assert found == [False, False]
    assert ["called directly, differs from optimizer.step" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Adagrad])
def test_a_trial_has_the_options_of_the_step(monkeypatch, kind):
    """Those, and no others: a kernel may differ with one of them only."""
    original, on = direct_step._make, []

    def noting(calls: Any, *arguments: Any) -> None:
        on.extend({name for name in direct_step._SWITCHES if call.options.get(name)} for call in calls)
        original(calls, *arguments)

    monkeypatch.setattr(direct_step, "_make", noting)
    for option in sorted(direct_step._KNOWN[kind] & direct_step._SWITCHES):
        on.clear()
        assert is_direct_right.__wrapped__(kind, frozenset([option]), torch.float32, CPU, decoupled=kind is AdamW)
        assert on
        assert all(one == {option} for one in on)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16), slow(torch.float16)], ids=str)
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Adagrad])
def test_a_trial_is_right_here(caplog, kind, dtype):
    """With each option and without, and it draws no random numbers."""
    if kind is SGD and dtype is not torch.float32 and not is_kernel_right(kind, frozenset(), dtype, CPU):
        pytest.skip("the kernel leaves memory as it was before it was allocated; no step is made by it, see fused_kernels.py")
    before = torch.get_rng_state()
    options = sorted(direct_step._KNOWN[kind] & direct_step._SWITCHES)
    for switched in (frozenset(), *(frozenset([option]) for option in options), frozenset(options)):
        assert is_direct_right(kind, switched, dtype, CPU, decoupled=kind is AdamW)

    assert torch.equal(torch.get_rng_state(), before)
    assert caplog.records == []
