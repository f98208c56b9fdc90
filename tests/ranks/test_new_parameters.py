"""Parameters that come into the optimizer during a run, and buffers of rare dtypes, on plain replicas."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from ranks import run_ranks

RATE = 0.1
WAYS = ("explicit", "auto")
DTYPES = (torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.float64)


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def samples(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(4)]


def layer(seed: int, number: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(3, number).double()


def grow(way: str, alike: bool) -> tuple[str, list[list[float]]]:
    """Two updates, one more layer, and two updates: the error, if any, and the weights of each layer."""
    model = nn.Sequential(layer(0, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    wrapped = DistributedDataParallel(model) if way == "auto" else model
    trainer = create_trainer(wrapped, optimizer, forward, options=UpdateOptions(reduction=way))  # type: ignore[arg-type]
    rank, error = idist.get_rank(), ""
    data = samples(rank)
    for x in data[:2]:
        trainer.update([x])
    model.append(layer(1 if alike else 1 + rank, 1))
    optimizer.add_param_group({"params": [*model[1].parameters()]})
    try:
        for x in data[2:]:
            trainer.update([x])
    except ValueError as raised:
        error = str(raised).partition(", which came")[0]
    return error, [parameter.flatten().tolist() for parameter in model.parameters()]


def late(kind: str) -> tuple[list[str], list[list[float]]]:
    """What is said of a layer that comes, or is made anew, after wrapping for torch's hooks; and the weights of before."""
    model = nn.Sequential(layer(0, 3), layer(1, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    wrapped, options = DistributedDataParallel(model, find_unused_parameters=True), UpdateOptions(reduction="ddp")
    trainer, errors = create_trainer(wrapped, optimizer, forward, options=options), list[str]()
    data = samples(idist.get_rank())
    trainer.update([data[0]])
    if kind == "added":
        model.append(layer(2, 1))
        optimizer.add_param_group({"params": [*model[2].parameters()]})
    elif kind == "parametrised":
        nn.utils.parametrizations.weight_norm(model[1])
        optimizer.add_param_group({"params": [*model[1].parametrizations.parameters()]})  # type: ignore[union-attr, operator]
    else:
        model[1] = layer(2, 3)
        optimizer.param_groups[0]["params"][2:] = [*model[1].parameters()]
    before = [parameter.flatten().tolist() for parameter in model.parameters()]
    for x in data[1:3]:
        try:
            trainer.update([x])
        except ValueError as raised:
            errors.append(str(raised).partition(", which came")[0])
    assert before == [parameter.flatten().tolist() for parameter in model.parameters()]
    return errors, before


NAMES = {"added": "'2.weight'", "parametrised": "'1.parametrizations.weight.original0'", "replaced": "'1.weight'"}


@pytest.mark.slow
def test_parameters_that_torch_does_not_reduce_are_refused_by_name() -> None:
    """In each update, on all ranks, before the step: each rank would step along its own gradient."""
    for outcomes in run_ranks(late_in_all_ways):
        for name, (errors, _) in zip(NAMES.values(), outcomes, strict=True):
            says = f"when it has all of its parameters, got {name} in the optimizer"
            assert errors == [f"model must be wrapped in DistributedDataParallel {says}"] * 2


def late_in_all_ways() -> list[tuple[list[str], list[list[float]]]]:
    return [late(kind) for kind in NAMES]


def by_hand(num_updates: int) -> list[list[float]]:
    model = nn.Sequential(layer(0, 3))
    for update in range(num_updates):
        if update == 2:
            model.append(layer(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        (sum(forward(model, samples(rank)[update]).loss for rank in range(2)) / 8).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def grow_in_all_ways() -> list[tuple[str, list[list[float]]]]:
    return [grow(way, alike) for way in WAYS for alike in (True, False)]


@pytest.mark.slow
def test_parameters_that_come_later_must_be_equal_on_all_ranks() -> None:
    """They are trained if they are, and refused on all ranks before the step if not: their gradients are equal all the same."""
    for outcomes in run_ranks(grow_in_all_ways):
        for (error, weights), (refusal, others) in zip(outcomes[::2], outcomes[1::2], strict=True):
            assert error == ""
            assert [*map(pytest.approx, by_hand(4))] == weights
            assert refusal == "model must be the same on all ranks, got other values of '1.weight' than on rank 0"
            assert [*map(pytest.approx, by_hand(2))] == others[:2]


def share_buffers() -> list[list[Any]]:
    """What is in the buffers of a model, of one dtype each, of which rank 1 has begun with others."""
    model = nn.Linear(3, 1)
    for number, dtype in enumerate(DTYPES):
        model.register_buffer(f"one_{number}", (torch.arange(4) + 10 * idist.get_rank()).to(dtype))
    options = UpdateOptions(reduction="explicit")
    create_trainer(model, torch.optim.SGD(model.parameters(), lr=RATE), forward, options=options)
    return [buffer.to(torch.complex128).real.tolist() for buffer in model.buffers()]


@pytest.mark.slow
def test_buffers_of_all_dtypes_are_those_of_rank_0() -> None:
    """Also of those that gloo does not know."""
    expected = [torch.arange(4).to(dtype).to(torch.complex128).real.tolist() for dtype in DTYPES]
    assert run_ranks(share_buffers) == [expected] * 2
