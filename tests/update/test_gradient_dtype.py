"""Gradients of weights in bfloat16 are accumulated in float32 where torch's `grad_dtype` says so: exact, and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ignite_train import ForwardOutput, Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.ranks import replicas
from ranks import run_ranks

VALUES = [[256.0, 1.0, 1.0], [1.0, 1.0, 254.0]]  # of two ranks; in bfloat16 256 + 1 is 256


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).sum(), sample_size=1.0)


def make(optimizer: Callable[..., torch.optim.Optimizer], *, wide: bool = True, **options: Any) -> tuple[nn.Linear, Trainer]:
    model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    nn.init.zeros_(model.weight)
    if wide:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
    trainer = create_trainer(
        model, optimizer(model.parameters(), lr=1.0), forward, accumulation_steps=3, options=UpdateOptions(**options)
    )
    return model, trainer


def data(rank: int = 0) -> list[Tensor]:
    return [torch.full((1, 4), value, dtype=torch.bfloat16) for value in VALUES[rank]]


@pytest.mark.parametrize("recovery", ["raise", "skip"])
@pytest.mark.parametrize(("wide", "expected"), [(True, 86.0), (False, 85.5)], ids=["float32", "bfloat16"])
def test_small_gradients_are_not_lost(wide: bool, expected: float, recovery: str) -> None:
    """(256 + 1 + 1) / 3 is 86; accumulated in bfloat16 it is that of 256, also where gradients are set aside."""
    model, trainer = make(torch.optim.SGD, wide=wide, on_out_of_memory=recovery)
    state = trainer.run(data())
    assert model.weight.tolist() == [[-expected] * 4]
    assert state.update_output is not None
    assert state.update_output.grad_norm == pytest.approx(2 * (86.0 if wide else 256 / 3), rel=1e-7)


def in_wrapper(way: str, dtype: str, world_size: int) -> list[Any]:
    """Dtype and values of the weight after an update of three micro-batches, whose gradients are 256, 1 and 1 or reversed."""
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if dtype == "bfloat16":
        model = model.to(torch.bfloat16)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped: nn.Module = model
    if way == "small ddp":
        wrapped = DistributedDataParallel(model)
    elif way == "fsdp":
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)), mp_policy=policy)
    elif way == "mesh":
        mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], ColwiseParallel())
    if way != "fsdp":
        for parameter in wrapped.parameters():
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0, fused=True if way == "explicit, fused" else None)
    dims = ("dp",) if way == "mesh" else None
    options = UpdateOptions(reduction="explicit" if way.startswith("explicit") else "auto", data_dims=dims)
    trainer = create_trainer(wrapped, optimizer, forward, accumulation_steps=3, options=options)
    values = [256.0, 1.0, 1.0] if idist.get_rank() == 0 else [1.0, 1.0, 256.0]
    trainer.run([torch.full((1, 4), value, dtype=model.weight.dtype) for value in values])
    weight = next(wrapped.parameters())
    return [str(weight.dtype), (weight.full_tensor() if isinstance(weight, DTensor) else weight).tolist()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(
    ("way", "dtype", "world_size"),
    [
        ("explicit", "bfloat16", 3),
        ("explicit, fused", "bfloat16", 2),
        ("small ddp", "bfloat16", 2),
        ("mesh", "bfloat16", 2),
        ("fsdp", "bfloat16", 3),
        ("fsdp", "float32", 2),
        ("fsdp", "float32", 3),
    ],
)
def test_each_way_accumulates_in_float32(way: str, dtype: str, world_size: int) -> None:
    """258 on each rank, and so 86 a sample; accumulated in bfloat16 rank 0 has 256, which gives less."""
    for found in run_ranks(in_wrapper, way, dtype, world_size, world_size=world_size):
        assert found[0] == f"torch.{dtype}"
        expected = torch.full((3, 4), -86.0)
        assert (
            torch.equal(torch.tensor(found[1]), expected)
            if dtype == "bfloat16"
            else torch.allclose(torch.tensor(found[1]), expected, rtol=1e-6, atol=0)
        )


def refused(way: str) -> str:
    model = nn.Linear(128, 256).to(torch.bfloat16)
    wrapped: nn.Module = (
        DistributedDataParallel(model) if way == "ddp" else fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    )
    for parameter in wrapped.parameters():
        parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="model must have gradients of the dtype of its parameters") as raised:
        create_trainer(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1.0), forward)
    return str(raised.value)


@pytest.mark.slow
def test_wrappers_of_torch_that_cannot_are_refused() -> None:
    """Both fail in the first backward, DistributedDataParallel with `Expected BFloat16, got Float`."""
    assert all("pass the module inside" in message for message in run_ranks(refused, "ddp"))
    assert all("MixedPrecisionPolicy(reduce_dtype=torch.float32)" in message for message in run_ranks(refused, "fsdp"))


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_cannot_step_along_them_says_what_to_do(fused: bool) -> None:
    """AdamW of torch raises what names neither the optimizer nor the cause."""
    _, trainer = make(partial(torch.optim.AdamW, fused=fused))
    with pytest.raises(RuntimeError, match="BFloat16") as raised:
        trainer.run(data())
    assert any("AdamW takes no gradients of another dtype" in note for note in raised.value.__notes__)


def on_ranks(elements_beside_statistics: int) -> list[Any]:
    """A transposed weight, for which only rank 0 has a gradient, and a bias."""
    replicas._TAIL_ELEMENTS = elements_beside_statistics
    model = nn.Linear(4, 2).to(torch.bfloat16)
    model.weight = nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16).t())
    nn.init.zeros_(model.bias)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        loss = model(x).sum() if idist.get_rank() == 0 else model.bias.sum() * x[0, 0]  # type: ignore[operator, union-attr]
        return ForwardOutput(loss, sample_size=1.0)

    options = UpdateOptions(reduction="explicit")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=3, options=options)
    seen: list[Any] = []

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def look() -> None:
        for gradient in (model.weight.grad, model.bias.grad):
            assert gradient is not None
            seen.append((gradient.dtype, gradient.stride(), gradient.tolist()))

    trainer.run(data(idist.get_rank()))
    return [*seen, model.weight.tolist(), model.bias.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("elements_beside_statistics", [0, 2**14], ids=["in-buckets", "beside-the-statistics"])
def test_they_cross_the_ranks_in_float32(elements_beside_statistics: int) -> None:
    """The weight's is 258 / 6, the bias's (3 + 256) / 6, in float32 until the step, and in the weight's strides."""
    first, second = run_ranks(on_ranks, elements_beside_statistics)
    assert first == second
    of_bias = float(torch.tensor(259.0) / 6)
    assert first[:2] == [(torch.float32, (1, 2), [[43.0] * 4] * 2), (torch.float32, (1,), [of_bias] * 2)]
    assert first[2:] == [[[-43.0] * 4] * 2, [float(torch.tensor(-of_bias, dtype=torch.bfloat16))] * 2]


def test_an_optimizer_that_wants_them_in_the_weights_dtype() -> None:
    """AdamW of torch takes no float32 gradient of a bfloat16 weight: a handler rounds the mean once, before the norm."""
    model, trainer = make(torch.optim.AdamW)

    @trainer.on(Events.ITERATION_STARTED)
    def widen() -> None:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def narrow() -> None:
        for parameter in model.parameters():
            mean, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype  # type: ignore[attr-defined]
            parameter.grad = mean.to(parameter.dtype)  # type: ignore[union-attr]

    trainer.run([*data(), *data(1)])
    by_hand = nn.Parameter(torch.zeros(1, 4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([by_hand], lr=1.0)
    for values in VALUES:
        by_hand.grad = torch.full((1, 4), sum(values) / 3).to(torch.bfloat16)
        optimizer.step()
    assert torch.equal(model.weight, by_hand)
