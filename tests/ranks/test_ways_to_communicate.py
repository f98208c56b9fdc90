"""Ways to communicate that torch offers: each makes the update of one process, or of the same loop by hand, or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import meshes
from ignite_train import ForwardOutput, UpdateOptions, create_trainer
from meshes import Layout, on_cpu
from ranks import Ranks
from tiers import nightly, slow

STEPS, UPDATES = 3, 4
RATE = 0.05
SCATTER = "reduce_scatter_single" if "reduce_scatter_single" in vars(dist) else "reduce_scatter_tensor"  # before torch 2.13

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


# --- fully_shard --------------------------------------------------------------------------------------------------------------


def _cut(**options: Any) -> Callable[[Any, DeviceMesh], None]:
    def cut(model: meshes.Net, mesh: DeviceMesh) -> None:
        fully_shard(model.up, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)

    return cut


def _layout(ranks: int, **options: Any) -> Layout:
    shape, names = ((2, 2), ("copy", "shard")) if options.pop("copies", False) else ((ranks,), ("dp",))
    return Layout(meshes.Net, _cut(**options), shape, names, None, names)


def _sharded(ranks: int, cut: str, each: bool, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[int]]:
    """The parameters after three updates, and how many reductions to shards each made."""
    layout = _layout(ranks, **options)
    model, mesh = meshes.on_mesh(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = meshes.trainer_of(
        layout,
        model,
        optimizer,
        accumulation_steps=STEPS,
        max_grad_norm=meshes.LIMIT,
        options={"reduce_each_micro_batch": each},
    )
    scatter, counts = getattr(dist, SCATTER), list[int]()

    def counted(*args: Any, **settings: Any) -> Any:
        counts[-1] += 1
        return scatter(*args, **settings)

    setattr(dist, SCATTER, counted)
    try:
        with trainer.session(max_iters=3):
            for group in meshes.groups_of(layout, STEPS, cut):
                counts.append(0)
                trainer.update(group[meshes.place(layout, mesh)])
    finally:
        setattr(dist, SCATTER, scatter)
    return meshes.whole(model), counts


def _expected(layout: Layout, cut: str) -> dict[str, Tensor]:
    model = meshes.new_model(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for group in meshes.groups_of(layout, STEPS, cut):
        outputs = [meshes.forward(model, micro_batch) for own in group for micro_batch in own]
        (sum(output.loss for output in outputs) / sum(output.sample_size for output in outputs)).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), meshes.LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return meshes.whole(model)


WIDE = MixedPrecisionPolicy(reduce_dtype=torch.float64)


@pytest.mark.parametrize("cut", ["missing", slow("ragged")])
@pytest.mark.parametrize(
    ("ranks", "each", "options"),
    [
        (2, True, {}),
        slow(2, True, {"reshard_after_forward": False}),
        slow(2, False, {"reshard_after_forward": True}),
        nightly(2, False, {"reshard_after_forward": False}),
        nightly(2, True, {"mp_policy": WIDE}),
        slow(4, False, {"reshard_after_forward": 2}),
        nightly(4, True, {"reshard_after_forward": 2}),
        slow(4, True, {"copies": True}),
    ],
)
def test_sharded_ways_make_the_update_of_one_process(
    two: Ranks, four: Ranks, ranks: int, each: bool, options: dict[str, Any], cut: str
) -> None:
    """To 1e-12, also where a rank has fewer micro-batches or none; the two parts of the model are reduced once or each time."""
    found = (two if ranks == 2 else four).run(_sharded, ranks, cut, each, options)
    expected = _expected(_layout(ranks, **options), cut)
    for weights, counts in found:
        assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) < 1e-12
        assert counts == [2 * (STEPS if each else 1)] * 3


def _in_bfloat16() -> Any:
    """What `bf16_compress_hook` does; torch looks at the name of that one and demands NCCL for it."""
    return lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)


def _sums(way: str, number: int, reduce_dtype: torch.dtype | None) -> list[float]:
    """Of a weight of which each rank has the gradients 256, 1 and 1, after one step of rate 1."""
    model: nn.Module = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)  # type: ignore[arg-type]
    if way == "ddp":
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, _in_bfloat16())
    else:
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype), mesh=on_cpu())
    options = UpdateOptions(reduce_each_micro_batch=way == "each")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = create_trainer(
        model, optimizer, lambda net, x: ForwardOutput(net(x).sum(), 1.0), accumulation_steps=number, options=options
    )
    trainer.run([torch.full((1, 4), value) for value in (256.0, 1.0, 1.0)])
    (weight,) = model.parameters()
    found: list[float] = (weight.full_tensor() if isinstance(weight, DTensor) else weight).flatten().tolist()
    return found


@pytest.mark.parametrize(
    ("way", "reduce_dtype", "expected"),
    [
        ("each", torch.bfloat16, 86.0),
        slow("last", torch.bfloat16, 256 / 3),  # in bfloat16 256 + 1 is 256
        slow("last", torch.float32, 86.0),
        slow("ddp", None, 86.0),
    ],
)
def test_reduction_in_bfloat16_with_accumulation_in_float32(
    two: Ranks, way: str, reduce_dtype: torch.dtype | None, expected: float
) -> None:
    """FSDP2 accumulates whole gradients in the dtype of their reduction, and shards in that of the parameter."""
    for found in two.run(_sums, way, STEPS, reduce_dtype):
        assert found == pytest.approx([-expected] * 4, rel=1e-6)


def _refused(what: str) -> str:
    layout = _layout(2, copies=False)
    model, options = meshes.new_model(layout), {"reduce_each_micro_batch": True}
    if what in ("gradient sync", "all reduce"):
        fully_shard(model, mesh=on_cpu())
        name = "set_requires_gradient_sync" if what == "gradient sync" else "set_requires_all_reduce"
        getattr(model, name)(False)
    elif what == "ddp":
        model = DistributedDataParallel(model)
    else:
        options["reduction"] = "explicit"  # type: ignore[assignment]
    try:
        meshes.trainer_of(layout, model, torch.optim.SGD(model.parameters(), lr=0.1), options=options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "gradient sync",
            "model must leave it to the trainer .* got set_requires_gradient_sync\\(False\\); leave that call out",
        ),
        ("all reduce", "model must leave it to the trainer .* got set_requires_all_reduce\\(False\\); leave that call out"),
        ("ddp", "model must have fully_shard applied to it for reduce_each_micro_batch=True, got DistributedDataParallel"),
        ("replicas", "model must have fully_shard applied to it for reduce_each_micro_batch=True, got Net"),
    ],
)
def test_what_would_not_reduce_or_would_save_nothing_is_refused(two: Ranks, what: str, words: str) -> None:
    for message in two.run(_refused, what):
        assert re.match(words, message), message


# --- DistributedDataParallel --------------------------------------------------------------------------------------------------


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


def _wrapped(way: str) -> tuple[nn.Module, DistributedDataParallel]:
    """`way`: the name of a communication hook, or `"static_graph"`."""
    model = _net()
    # One bucket for PowerSGD: with more, torch's collectives come to gloo in another order on each rank, by hand too.
    ddp = DistributedDataParallel(model, static_graph=way == "static_graph", bucket_cap_mb=25 if way == "powerSGD" else 0.002)
    if way == "powerSGD":
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
        ddp.register_comm_hook(state, powerSGD_hook)
    elif way != "static_graph":
        ddp.register_comm_hook(None, _in_bfloat16() if way == "bf16_compress" else getattr(default_hooks, f"{way}_hook"))
    return model, ddp


def _data(steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    """For each update the micro-batches of this rank."""
    generator = torch.Generator().manual_seed(7 + idist.get_rank())
    return [[(torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(steps)]] * UPDATES


def _loss(model: nn.Module, micro_batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    x, y = micro_batch
    return ForwardOutput((model(x) - y).square().sum(), len(x))


def _steps_of(way: str) -> int:
    return 1 if way == "static_graph" else STEPS


def _trained(way: str) -> list[list[float]]:
    model, ddp = _wrapped(way)
    steps = _steps_of(way)
    trainer = create_trainer(ddp, torch.optim.SGD(model.parameters(), lr=RATE), _loss, accumulation_steps=steps)
    with trainer.session(max_iters=UPDATES):
        for group in _data(steps):
            trainer.update(group)
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def _by_hand(way: str) -> list[list[float]]:
    """The loop of torch's manual: the mean of the ranks' sums, over the mean number of samples."""
    model, ddp = _wrapped(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for group in _data(_steps_of(way)):
        for number, micro_batch in enumerate(group, start=1):
            with nullcontext() if number == len(group) else ddp.no_sync():
                _loss(ddp, micro_batch).loss.backward()  # type: ignore[union-attr]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= 2 / (2 * 4 * len(group))  # ranks, and samples of all ranks
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    ["powerSGD", "allreduce", "fp16_compress", "bf16_compress", "static_graph"],
)
def test_ways_of_ddp_make_the_update_of_the_loop_by_hand(two: Ranks, way: str) -> None:
    """Bit by bit, with the errors of a compression, which PowerSGD carries from update to update."""
    found, expected = two.run(_trained, way), two.run(_by_hand, way)
    assert found == expected
    assert found[0] == found[1]
    if way not in ("allreduce", "static_graph"):  # the hook did something
        assert found != two.run(_by_hand, "allreduce")


def _without_data(way: str) -> tuple[list[list[float]], float]:
    """Rank 1 has no micro-batch in the second update."""
    model, ddp = _wrapped(way)
    trainer = create_trainer(ddp, torch.optim.SGD(model.parameters(), lr=RATE), _loss, accumulation_steps=2)
    with trainer.session(max_iters=3):
        for number, group in enumerate(_data(2)[:3]):
            output = trainer.update([] if number == 1 and idist.get_rank() == 1 else group)
            if number == 1:
                size = output.sample_size
    return [parameter.flatten().tolist() for parameter in model.parameters()], size


@pytest.mark.slow
@pytest.mark.parametrize("way", ["powerSGD", "fp16_compress"])
def test_a_rank_without_data_takes_part_in_a_hook(two: Ranks, way: str) -> None:
    """Replicas stay equal, and the samples are those of the other rank."""
    (first, size), (second, _) = two.run(_without_data, way)
    assert first == second
    assert size == 8
