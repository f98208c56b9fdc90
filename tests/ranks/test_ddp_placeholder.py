"""What a rank without data runs where DistributedDataParallel's hooks reduce: no hook of a module, and none on None."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from ignite_train import UpdateOptions, create_trainer
from ignite_train.ranks.ddp import DDPCrossing
from ranks import run_ranks


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[None]:
    """A process group of one process."""
    idist.initialize("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    idist.finalize()


def run_placeholder(ddp: DistributedDataParallel) -> None:
    """Forward and backward of a rank without data."""
    DDPCrossing(ddp.module, ddp).take_part(lambda _: torch.ones(()), torch.autograd.backward)


@pytest.mark.usefixtures("alone")
def test_no_hook_of_a_module_runs() -> None:
    """Neither one of the wrapper or the module inside, nor one that torch has for all modules."""
    ddp, seen = DistributedDataParallel(nn.Linear(3, 1)), list[str]()
    for place, module in (("wrapper", ddp), ("inside", ddp.module)):
        module.register_forward_pre_hook(lambda *_: seen.append(f"{place}: before"))  # noqa: B023
        module.register_forward_hook(lambda *_: seen.append(f"{place}: after"))  # type: ignore[no-untyped-call]  # noqa: B023
        module.register_full_backward_hook(lambda *_: seen.append(f"{place}: backward"))  # type: ignore[no-untyped-call]  # noqa: B023
    handles = [
        register_module_forward_pre_hook(lambda *_: seen.append("any: before")),
        register_module_forward_hook(lambda *_: seen.append("any: after")),
    ]
    try:
        run_placeholder(ddp)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == []
    assert [p.grad.tolist() for p in ddp.module.parameters() if p.grad is not None] == [[[0.0] * 3], [0.0]]  # it has reduced


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "kinds",
    [("hook",), ("post_accumulate_grad_hook",), ("hook", "post_accumulate_grad_hook")],
    ids=["before", "after", "before and after"],
)
@pytest.mark.parametrize("hooked", ["weight", "both"])
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "looks for unused"])
def test_a_hook_of_a_parameter_is_never_given_none(unused: bool, hooked: str, kinds: tuple[str, ...]) -> None:
    """Zeros; or it is not called where DDP looks for unused parameters, unless all have hooks."""
    ddp, seen = DistributedDataParallel(nn.Linear(3, 1), find_unused_parameters=unused), list[Any]()
    hooks = {
        "hook": lambda gradient: seen.append(gradient.tolist()),
        "post_accumulate_grad_hook": lambda parameter: seen.append(parameter.grad.tolist()),
    }
    for name, parameter in ddp.module.named_parameters():
        for kind in kinds if hooked in (name, "both") else ():
            getattr(parameter, f"register_{kind}")(hooks[kind])
    run_placeholder(ddp)
    values = [[[0.0] * 3]] * len(kinds) + ([[0.0]] * len(kinds) if hooked == "both" else [])
    assert sorted(seen, key=str) == ([] if unused and hooked == "weight" else sorted(values, key=str))


def _with_hooks() -> list[list[float]]:
    """Weights after updates in some of which rank 1 has no data, of a small model whose hooks reduce, and do not."""
    found = []
    for reduction, unused in (("auto", False), ("ddp", False), ("ddp", True)):
        model = nn.Linear(3, 1, dtype=torch.float64)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        ddp = DistributedDataParallel(model, find_unused_parameters=unused)
        ddp.register_forward_pre_hook(lambda _module, inputs: (inputs[0].double(),))
        ddp.register_forward_hook(lambda _module, _inputs, output: output.flatten(1))  # type: ignore[no-untyped-call]
        model.weight.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))  # type: ignore[no-untyped-call]
        model.bias.register_post_accumulate_grad_hook(_halve)
        options = UpdateOptions(reduction=reduction)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        trainer = create_trainer(ddp, optimizer, _sum, protect=False, options=options)
        rank = idist.get_rank()
        trainer.run([torch.full((2, 3), float(1 + rank + number)) for number in range((3, 1)[rank])], max_epochs=1)
        found.append([*model.weight.flatten().tolist(), *model.bias.tolist()])
    return found


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _sum(model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    return model(x).sum(), float(len(x))


@pytest.mark.slow
def test_uneven_ranks_with_hooks_train_alike() -> None:
    """By hand: Σ of the clamped gradients, 1/2 in each weight, and of 1 in the bias, over the 4 or 2 samples of an update."""
    weight, bias = 0.5 - 0.25 * (1.0 / 4 + 0.5 / 2 + 0.5 / 2), -0.25 * (2.0 / 4 + 1.0 / 2 + 1.0 / 2)
    assert run_ranks(_with_hooks) == [[[weight] * 3 + [bias]] * 3] * 2


# --- a forward that calls the wrapper twice ---

TWICE = [((2, 4), 2), ((0, 4), 2), ((3, 4), 2), ((2, 1), 1)]  # micro-batches of each rank, and of an update


def _normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def _of_both_views(model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    return (model(x) - model(2 * x.abs())).square().sum(), float(len(x))


def _samples(rank: int, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(number)]


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def _call_twice() -> list[list[float]]:
    found, rank = [], idist.get_rank()
    for numbers, steps in TWICE:
        ddp = DistributedDataParallel(_normalised())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        trainer = create_trainer(ddp, optimizer, _of_both_views, accumulation_steps=steps)
        trainer.run(_samples(rank, numbers[rank]), max_epochs=1)
        assert ddp.broadcast_buffers
        found.append(_flat(ddp))
    return found


def _called_twice(numbers: tuple[int, int], steps: int) -> list[float]:
    """By hand."""
    model = _normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [_samples(rank, numbers[rank]) for rank in range(2)]
    for start in range(0, max(numbers), steps):
        outputs = [_of_both_views(model, x) for own in data for x in own[start : start + steps]]
        (sum(loss for loss, _ in outputs) / sum(size for _, size in outputs)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return _flat(model)


@pytest.mark.slow
def test_a_rank_without_data_does_not_wait_for_buffers_of_a_second_forward() -> None:
    """The wrapper gives buffers to all ranks in each of its forwards, of which a rank without data has one."""
    expected = [pytest.approx(_called_twice(*case)) for case in TWICE]
    assert run_ranks(_call_twice) == [expected] * 2
