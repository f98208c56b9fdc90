"""Fused kernels: a wrong one is found out and not used, and what one is given lies in memory as it takes it to."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adagrad, Adam, AdamW

from ignite_train import TrainEvents, create_trainer
from ignite_train.model import fused_kernels
from ignite_train.model.fused_kernels import FusedKernels, is_kernel_right
from ignite_train.model.gradients import Gradients
from ignite_train.model.group_tensors import gather
from ranks import run_ranks
from textbook import Textbook

CPU = torch.device("cpu")
OPTIONS = {
    SGD: ("dampening", "maximize", "momentum", "nesterov", "weight_decay"),
    Adam: ("amsgrad", "decoupled_weight_decay", "maximize", "weight_decay"),
    Adagrad: ("lr_decay", "maximize", "weight_decay"),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.25, momentum=0.5, weight_decay=0.1, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.25, weight_decay=0.1, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=0.25, weight_decay=0.1, fused=True),
}


def forward(model: nn.ParameterDict, batch: dict[str, Tensor]) -> Tensor:
    """The sum of each parameter named in the batch, times what the batch has for it: its gradient."""
    # A dot product of all entries: a plain sum would be warned of, as a loss that is not the mean that it is declared as.
    return sum(torch.dot(model[key].float().flatten(), value.flatten()) for key, value in batch.items())


def steps_by_hand(
    model: nn.ParameterDict, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]
) -> nn.ParameterDict:
    """A copy of the model after the textbook's steps."""
    right = copy.deepcopy(model)
    book = Textbook(optimizer, list(right.parameters()))
    for batch in batches:
        for key, value in batch.items():
            right[key].grad = value.to(right[key].dtype)
        book.step()
        book.zero_grad()
    return right


def assert_close(model: nn.ParameterDict, right: nn.ParameterDict, before: nn.ParameterDict, within: float) -> None:
    for key, parameter in right.items():
        moved = (parameter.double() - before[key].double()).norm().item()
        assert moved > 0.1
        assert (model[key].double() - parameter.double()).norm().item() <= within * moved


# --- a trial step ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_right_kernels_are_found_right(dtype):
    """Each combination of options passes in float32 and float64, whose kernels have no known defect."""
    wrong = []
    for kind, names in OPTIONS.items():
        for count, tensor_lr in itertools.product(range(len(names) + 1), (False, True)):
            for options in map(frozenset, itertools.combinations(names, count)):
                impossible = "nesterov" in options and ("momentum" not in options or "dampening" in options)
                if not impossible and not (tensor_lr and kind is Adagrad):
                    right = is_kernel_right(kind, options, dtype, CPU, tensor_lr=tensor_lr)
                    wrong += [] if right else [(kind, options, tensor_lr)]
    assert wrong == []


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_trial_has_the_options_of_the_group(monkeypatch, kind):
    """Those, and no others: a kernel may be wrong with one of them only."""
    name = {SGD: "sgd", Adam: "adam", Adagrad: "adagrad"}[kind]
    kernel, on = getattr(fused_kernels, name), []

    def noting(*args: Any, **options: Any) -> None:
        assert options["fused"]
        on.append({option for option in OPTIONS[kind] if options[option]})
        kernel(*args, **options)

    monkeypatch.setattr(fused_kernels, name, noting)
    for options in [set(), *({option, "momentum"} if option == "nesterov" else {option} for option in OPTIONS[kind])]:
        on.clear()
        assert is_kernel_right.__wrapped__(kind, frozenset(options), torch.float32, CPU)
        assert on == [options] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Adam, Adagrad])
def test_narrow_kernels_are_found_right(kind, dtype):
    """Adam's and Adagrad's pass in 16 bits too: torch's default epsilon, which is zero in float16, plays no part."""
    assert is_kernel_right(kind, frozenset({"weight_decay"}), dtype, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_trial_says_what_a_run_would_show(dtype):
    """SGD's kernel is found right in 16 bits if and only if it moves all of a parameter, as it does not in torch 2.13."""
    parameter = nn.Parameter(torch.ones(200, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    SGD([parameter], lr=0.5, fused=True).step()
    assert is_kernel_right(SGD, frozenset(), dtype, CPU) == bool((parameter == 0.5).all())


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("part", [slice(0, 64), slice(64, 128), slice(130, None)], ids=["block", "next", "tail"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_kernel_that_leaves_out_a_part_is_found_out(monkeypatch, kind, part, dtype):
    """Whichever part of a parameter it does not move."""
    name = {SGD: "sgd", Adam: "adam", Adagrad: "adagrad"}[kind]
    kernel = getattr(fused_kernels, name)

    def broken(parameters: list[Tensor], *args: Any, **options: Any) -> None:
        before = parameters[0][part].clone()
        kernel(parameters, *args, **(options | {"fused": False, "foreach": False, "grad_scale": None}))
        parameters[0][part] = before

    monkeypatch.setattr(fused_kernels, name, broken)
    assert not is_kernel_right.__wrapped__(kind, frozenset(), dtype, CPU)


def test_the_trial_is_of_the_step_that_is_made(monkeypatch):
    """For each group of its own: the class, the options that are switched on, each dtype, and whether the rate is a tensor."""
    tried: dict[Any, None] = {}

    def note(*given: Any, tensor_lr: bool) -> bool:
        tried[(*given, tensor_lr)] = None
        return True

    monkeypatch.setattr(fused_kernels, "is_kernel_right", note)
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32}
    model = nn.ParameterDict({name: torch.ones(3, dtype=dtype) for name, dtype in dtypes.items()})
    others = {"params": [model["c"]], "lr": torch.tensor(0.1), "weight_decay": 0.0, "amsgrad": True}
    optimizer = torch.optim.AdamW([{"params": [model["a"], model["b"]]}, others], fused=True)
    create_trainer(model, optimizer, forward).run([dict.fromkeys(dtypes, torch.ones(3))])
    first, second = frozenset({"decoupled_weight_decay", "weight_decay"}), frozenset({"decoupled_weight_decay", "amsgrad"})
    assert [*tried] == [
        (Adam, first, torch.bfloat16, CPU, False),
        (Adam, first, torch.float32, CPU, False),
        (Adam, second, torch.float32, CPU, True),
    ]


# --- a step without it ---


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_wrong_kernel_is_not_used(monkeypatch, caplog, name):
    """The steps are the textbook's, one line says so, the groups keep what the user has set, and others keep their kernel."""
    monkeypatch.setattr(fused_kernels, "is_kernel_right", lambda kind, options, dtype, device, **_: dtype is not torch.bfloat16)
    model = nn.ParameterDict({"a": torch.ones(150).bfloat16(), "b": torch.ones(150)})
    before = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name]([{"params": [model["a"]]}, {"params": [model["b"]]}])
    used: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: used.append([group["fused"] for group in optimizer.param_groups]))
    batches = [{"a": torch.linspace(0.5, 1.0, 150), "b": torch.linspace(0.5, 1.0, 150)}] * 3
    right = steps_by_hand(model, optimizer, batches)
    with caplog.at_level(logging.WARNING, logger="ignite_train"):
        create_trainer(model, optimizer, lambda model, batch: (forward(model, batch) * 3, 3)).run(batches)
    assert_close(model, right, before, within=0.02)
    assert used == [[None, True]] * 3
    assert [group["fused"] for group in optimizer.state_dict()["param_groups"]] == [True, True]
    assert ["torch.bfloat16 on cpu wrongly" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bfloat16_weights_train_with_the_kernels_of_this_torch(name):
    """Whatever they are: a weight in bfloat16 ends where the textbook says."""
    model = nn.ParameterDict({"a": torch.ones(150).bfloat16()})
    before, optimizer = copy.deepcopy(model), OPTIMIZERS[name](model.parameters())
    batches = [{"a": torch.linspace(0.5, 1.0, 150)}] * 3
    right = steps_by_hand(model, optimizer, batches)
    create_trainer(model, optimizer, lambda model, batch: (forward(model, batch) * 3, 3)).run(batches)
    assert_close(model, right, before, within=0.02)


def test_a_step_that_fails_leaves_the_options_as_they_were(monkeypatch):
    """Also while the unfused step is taken."""
    monkeypatch.setattr(fused_kernels, "is_kernel_right", lambda *_, **__: False)
    model = nn.ParameterDict({"a": torch.ones(3)})
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def fail(*_: Any) -> None:
        raise InterruptedError

    optimizer.register_step_post_hook(fail)
    with pytest.raises(InterruptedError):
        create_trainer(model, optimizer, forward).run([{"a": torch.ones(3)}])
    assert optimizer.param_groups[0]["fused"] is True


def test_fused_can_be_switched_off_in_a_run(monkeypatch):
    """Where the kernel is avoided, `fused=False` that the user sets later stays as it is."""
    monkeypatch.setattr(fused_kernels, "is_kernel_right", lambda *_, **__: False)
    model = nn.ParameterDict({"a": torch.ones(3)})
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    trainer = create_trainer(model, optimizer, forward)
    trainer.run([{"a": torch.ones(3)}])
    optimizer.param_groups[0]["fused"] = False
    trainer.run([{"a": torch.ones(3)}], max_epochs=2)
    assert optimizer.param_groups[0]["fused"] is False


def test_tensors_that_stay_are_looked_at_once() -> None:
    """At the first step, and at the second, which finds the moments that the first has made."""
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    gradients = Gradients(model, optimizer)
    kernels, looks = FusedKernels(optimizer, gradients, set()), []
    for _ in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        gradients.norm()
        assert kernels.why_not_fused(gather(optimizer)) is None
        with kernels:
            optimizer.step()
        looks.append(kernels.tensors.num_looks)
    assert looks == [1, 2, 2, 2, 2]


def train_shards(name: str) -> tuple[Any, ...]:
    """Three updates of a sharded model whose optimizer is made with fused=True."""
    model = fully_shard(nn.Linear(4, 3), mesh=init_device_mesh("cpu", (2,)))
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = OPTIMIZERS[name](model.parameters())
    lines: list[str] = []
    logger = logging.getLogger("ignite_train")
    logger.addFilter(lambda record: not lines.append(record.getMessage()))
    trainer = create_trainer(model, optimizer, shards_forward)
    said = list(lines)
    trainer.run([torch.full((2, 4), 1.0 + idist.get_rank())] * 3)
    fused = [group["fused"] for group in optimizer.state_dict()["param_groups"]]
    return [p.full_tensor().tolist() for p in model.parameters()], said, fused


def shards_forward(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_shards_are_stepped_without_a_kernel_that_torch_has_not_for_them(name):
    """The steps are the textbook's; one line says so before the first batch, and the groups keep what the user has set."""
    right = nn.Linear(4, 3)
    nn.init.ones_(right.weight)
    nn.init.ones_(right.bias)
    book = Textbook(OPTIMIZERS[name](right.parameters()), list(right.parameters()))
    for _ in range(3):
        loss = sum(right(torch.full((2, 4), x)).square().sum() for x in (1.0, 2.0)) / 4
        loss.backward()
        book.step()
        book.zero_grad()
    for (weight, bias), said, fused in run_ranks(train_shards, name):
        torch.testing.assert_close(torch.tensor(weight), right.weight.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(bias), right.bias.detach(), rtol=1e-5, atol=1e-6)
        assert ["cannot apply the fused kernel" in line for line in said] == ([] if name == "adamw" else [True])
        assert fused == [True]


# --- what a kernel cannot step ---


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_group_may_become_fused_in_a_run(monkeypatch, name):
    """Its kernel is tried then, and is not used if it is wrong."""
    monkeypatch.setattr(fused_kernels, "is_kernel_right", lambda *_, **__: False)
    model = nn.ParameterDict({"a": torch.ones(40)})
    optimizer, used = OPTIMIZERS[name](model.parameters()), []
    optimizer.param_groups[0]["fused"] = False
    optimizer.register_step_post_hook(lambda *_: used.append(optimizer.param_groups[0]["fused"]))
    trainer = create_trainer(model, optimizer, forward)
    trainer.run([{"a": torch.ones(40)}], max_iters=1)
    optimizer.param_groups[0]["fused"] = True
    trainer.run([{"a": torch.ones(40)}], max_iters=3)
    assert used == [False, None, None]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["host", "accelerator"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_last_parameter_may_have_a_gradient_now_and_then(monkeypatch, name, elsewhere):
    """Its state comes later than those of the others, or stays where it has none."""
    if elsewhere:
        monkeypatch.setattr("ignite_train.device.to_host._HOST", "nowhere")
    model = nn.ParameterDict({key: torch.ones(40) for key in "ab"})
    before, optimizer = copy.deepcopy(model), OPTIMIZERS[name](model.parameters())
    one, two = torch.linspace(0.5, 1.0, 40), torch.linspace(1.0, 0.25, 40)
    batches = [{"a": one}, {"a": two, "b": one}, {"a": one}, {"b": two}, {"a": two, "b": two}]
    right = steps_by_hand(model, optimizer, batches)
    create_trainer(model, optimizer, forward).run(batches)
    assert_close(model, right, before, within=1e-6)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["host", "accelerator"])
@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_first_gradient_may_come_later(monkeypatch, dampening, elsewhere):
    """With momentum too: the parameter begins with its own first gradient, and the kernel is back in the next update."""
    if elsewhere:
        monkeypatch.setattr("ignite_train.device.to_host._HOST", "nowhere")
    model = nn.ParameterDict({key: torch.ones(40) for key in "abc"})
    before = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.25, momentum=0.5, dampening=dampening, fused=True)
    used: list[Any] = []
    if not elsewhere:
        optimizer.register_step_post_hook(lambda *_: used.append(optimizer.param_groups[0]["fused"]))
    one, two = torch.linspace(0.5, 1.0, 40), torch.linspace(1.0, 0.25, 40)
    batches = [{"a": one, "b": two}, {"a": two, "c": one}, {"a": one, "c": two}, {"b": one, "c": one}, {"a": one, "b": one}]
    right = steps_by_hand(model, optimizer, batches)
    create_trainer(model, optimizer, lambda model, batch: (forward(model, batch) * 3, 3)).run(batches)
    assert_close(model, right, before, within=1e-6)
    assert used == ([] if elsewhere else [True, None, True, True, True])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gaps_in_a_parameter_are_not_written_to(caplog, name):
    """A parameter that is a part of another tensor is stepped, and the rest of that tensor is left alone."""
    table = torch.ones(6, 8)
    model = nn.ParameterDict({"a": nn.Parameter(table[:, :5])})
    before, optimizer = copy.deepcopy(model), OPTIMIZERS[name](model.parameters())
    batches = [{"a": torch.linspace(0.5, 1.0, 30).view(6, 5)}] * 3
    right = steps_by_hand(model, optimizer, batches)
    create_trainer(model, optimizer, forward).run(batches)
    assert_close(model, right, before, within=1e-6)
    assert table[:, 5:].tolist() == [[1.0] * 3] * 6
    assert [record.message for record in caplog.records if "'a' has gaps" in record.message]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_with_other_strides_is_copied(caplog, name):
    """A handler that puts a transposed tensor into `.grad` trains the right weights, and is told so once."""
    model = nn.ParameterDict({"a": torch.ones(6, 5)})
    before, optimizer = copy.deepcopy(model), OPTIMIZERS[name](model.parameters())
    batches = [{"a": torch.linspace(0.5, 1.0, 30).view(6, 5)}] * 4
    right = steps_by_hand(model, optimizer, batches)
    trainer = create_trainer(model, optimizer, forward)

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def transpose() -> None:
        model["a"].grad = model["a"].grad.t().contiguous().t()

    trainer.run(batches)
    assert_close(model, right, before, within=1e-6)
    assert len([record for record in caplog.records if "the gradient of 'a' does not have the strides" in record.message]) == 1


@pytest.mark.parametrize("again", [False, True], ids=["at the first step", "in the middle"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_with_other_strides_are_laid_out_again(caplog, name, again):
    """Moments from a run whose weights had another layout belong to the same indices, whenever they are loaded."""
    batches = [{"a": torch.linspace(0.5, 1.0, 30).view(6, 5)}, {"a": torch.linspace(1.0, -1.0, 30).view(6, 5)}]
    first = nn.ParameterDict({"a": torch.ones(6, 5)})
    before, old = copy.deepcopy(first), OPTIMIZERS[name](first.parameters())
    right = steps_by_hand(first, old, [*batches, *batches])
    create_trainer(first, old, forward).run(batches)
    model = nn.ParameterDict({"a": nn.Parameter(torch.ones(5, 6).t())})
    optimizer = OPTIMIZERS[name](model.parameters())
    trainer = create_trainer(model, optimizer, forward)
    if again:
        trainer.run(batches)
    with torch.no_grad():
        model["a"].copy_(first["a"])
    optimizer.load_state_dict(old.state_dict())
    trainer.run(batches, max_epochs=2 if again else 1)
    assert_close(model, right, before, within=1e-6)
    assert len([record for record in caplog.records if "moments of the optimizer are laid out again" in record.message]) == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_may_get_another_layout_in_the_middle(name):
    """`model.to(memory_format=...)` moves the elements of a parameter, but not those of its moments."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    before, unfused = copy.deepcopy(model), copy.deepcopy(model)
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    by_hand = OPTIMIZERS[name](unfused.parameters())
    by_hand.param_groups[0]["fused"] = False
    for batch in [*batches, *batches]:
        by_hand.zero_grad()
        (unfused(batch) ** 2).mean().backward()
        by_hand.step()
    trainer = create_trainer(model, OPTIMIZERS[name](model.parameters()), lambda model, batch: (model(batch) ** 2).mean())
    trainer.run(batches)
    model.to(memory_format=torch.channels_last)
    trainer.run(batches, max_epochs=2)
    for name, parameter in model.named_parameters():
        right, start = unfused.get_parameter(name), before.get_parameter(name)
        torch.testing.assert_close(parameter, right, rtol=0, atol=1e-5 * float((right - start).detach().abs().max()))
