"""What large runs combine with a mesh: activation checkpointing, compiled blocks, mixed precision, ways to communicate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import meshes
from ignite_train import ForwardOutput, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import GradientMonitor, TrainingMetrics
from meshes import LAYOUTS, Layout
from ranks import Ranks, run_ranks
from tiers import nightly

STEPS = 3


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


class Blocks(nn.Module):
    """Two blocks and a head: what is wrapped, compiled and sharded block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(meshes.FEATURES, meshes.WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(meshes.WIDTH, meshes.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.embed(x)))
        return out


class Block(nn.Module):
    """As in a transformer, without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(meshes.WIDTH)
        self.up, self.down = nn.Linear(meshes.WIDTH, 16), nn.Linear(16, meshes.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


def _tensor_parallel(model: Blocks, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        meshes.tensor_parallel(block, mesh)


def _checkpointed(model: Blocks, mesh: DeviceMesh) -> None:
    _tensor_parallel(model, mesh)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)  # type: ignore[no-untyped-call]


def _shard(model: Blocks, mesh: DeviceMesh, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], **options)
    fully_shard(model, mesh=mesh["dp"], **options)


def checkpointed(model: Blocks, mesh: DeviceMesh) -> None:
    _checkpointed(model, mesh)


def checkpointed_and_sharded(model: Blocks, mesh: DeviceMesh) -> None:
    _checkpointed(model, mesh)
    _shard(model, mesh)


def compiled(model: Blocks, mesh: DeviceMesh) -> None:
    _tensor_parallel(model, mesh)
    for block in model.blocks:
        block.compile(backend="aot_eager")


def compiled_and_sharded(model: Blocks, mesh: DeviceMesh) -> None:
    compiled(model, mesh)
    _shard(model, mesh)


def kept_after_forward(model: Blocks, mesh: DeviceMesh) -> None:
    _tensor_parallel(model, mesh)
    _shard(model, mesh, reshard_after_forward=False)


def policy_in_float64(model: Blocks, mesh: DeviceMesh) -> None:
    """Parameters in float32, and all arithmetic and reductions in float64."""
    _tensor_parallel(model, mesh)
    wide = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64, cast_forward_inputs=True)
    _shard(model, mesh, mp_policy=wide)


CUTS: dict[str, Callable[..., None]] = {
    cut.__name__: cut
    for cut in (
        checkpointed,
        checkpointed_and_sharded,
        compiled,
        compiled_and_sharded,
        kept_after_forward,
        policy_in_float64,
    )
}


def _layout(cut: Callable[..., None]) -> Layout:
    return Layout(Blocks, cut, (2, 2), ("dp", "tp"), ("dp",), ("dp",))


def _train(cut: str, **arguments: Any) -> dict[str, Tensor]:
    layout = _layout(CUTS[cut])
    model, mesh = meshes.on_mesh(layout)
    return _train_on(layout, model, mesh, torch.optim.AdamW(model.parameters(), lr=0.01), **arguments)


def _train_on(layout: Layout, model: nn.Module, mesh: DeviceMesh, optimizer: Any, **arguments: Any) -> dict[str, Tensor]:
    trainer = meshes.trainer_of(layout, model, optimizer, accumulation_steps=STEPS, max_grad_norm=meshes.LIMIT, **arguments)
    with trainer.session(max_iters=3):
        for group in meshes.groups_of(layout, STEPS, "missing"):
            trainer.update(group[meshes.place(layout, mesh)])
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in meshes.whole(model).items()}


def _expected(layout: Layout) -> dict[str, Tensor]:
    model = meshes.new_model(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for group in meshes.groups_of(layout, STEPS, "missing"):
        outputs = [meshes.forward(model, micro_batch) for own in group for micro_batch in own]
        loss: Any = sum(output.loss for output in outputs)
        (loss / sum(output.sample_size for output in outputs)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), meshes.LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return meshes.whole(model)


def _furthest(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> float:
    return max(float((one[name] - value).abs().max()) for one in found for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("cut", [nightly(cut) if cut == "compiled" else cut for cut in CUTS])
def test_the_update_is_that_of_one_process(four: Ranks, cut: str) -> None:
    assert _furthest(four.run(_train, cut), _expected(_layout(CUTS[cut]))) < 1e-12


def _fused(name: str, groups: int) -> dict[str, Tensor] | str:
    layout = LAYOUTS[name]
    model, mesh = meshes.on_mesh(layout)
    sharded, plain = [[p for p in model.parameters() if isinstance(p, DTensor) is is_sharded] for is_sharded in (True, False)]
    own: list[Any] = [{"params": part} for part in (sharded, plain) if part] if groups == 2 else [*sharded, *plain]
    try:
        return _train_on(layout, model, mesh, torch.optim.AdamW(own, lr=0.01, fused=True))
    except ValueError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TP2 x DP2", "SP2 x DP2", "TP2 x FSDP2", "HSDP 2 x 2"])
def test_a_fused_optimizer_steps_shards(four: Ranks, name: str) -> None:
    found: Any = four.run(_fused, name, 2)
    assert _furthest(found, _expected(LAYOUTS[name])) < 1e-12


@pytest.mark.slow
def test_a_fused_optimizer_over_plain_parameters_too_is_refused(four: Ranks) -> None:
    for message in four.run(_fused, "TP2 x DP2", 1):
        assert re.match(
            r"optimizer must not have DTensors beside plain .* fused=True, .* param_groups\[0\]; make two", str(message)
        )


# --- what crosses the ranks ---------------------------------------------------------------------------------------------------


OURS = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "gather_object", "barrier")


def _logging_much(model: nn.Module, micro_batch: meshes.Sample, layout: Layout) -> ForwardOutput:
    output = layout.forward(model, micro_batch)
    return output._replace(logs={f"{name} {number}": 1.0 for name in output.logs for number in range(40)})


def _collectives(name: str, steps: int, logs: bool) -> list[tuple[str, int]]:
    """What the library and `fully_shard` ask torch.distributed for in the third of four updates, and among how many ranks.

    Not what torch's DTensors ask for in forward and backward, nor what shards are gathered and reduced with.
    """
    layout = LAYOUTS[name]
    if logs:
        layout = layout._replace(forward=partial(_logging_much, layout=layout))
    model, mesh = meshes.on_mesh(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = meshes.trainer_of(layout, model, optimizer, accumulation_steps=steps, max_grad_norm=meshes.LIMIT)
    GradientMonitor(every=100).attach(trainer)
    if logs:
        TrainingMetrics().attach(trainer)
    groups = meshes.groups_of(layout, steps, "ragged", updates=4)
    found: list[tuple[str, int]] = []

    def counting(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, group: Any = None, **options: Any) -> Any:
            if trainer.state.iteration == 3:
                found.append((kind, dist.get_world_size(group)))
            return call(*args, group=group, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for kind in OURS:
            patch.setattr(dist, kind, counting(kind, getattr(dist, kind)))
        trainer.run([one for group in groups for one in group[meshes.place(layout, mesh)]], max_epochs=1)
    return found


BUCKETS = {  # beside statistics and norm, which cross in one, among all four
    "TP2 x FSDP2": [],  # torch sums the gradients
    "HSDP 2 x 2": [2],  # torch's, over the copies
    "TP2 x DP2": [2],  # over the data dimension
    "SP2 x DP2": [2],
    "SP2 x FSDP2": [],
    "CP2 x FSDP2": [2],  # over the dimension that the shards lack
    "EP2 x DP2": [2, 2, 2],  # the plain parameters over both dimensions, the experts over one
    "odd TP2 x FSDP2": [],
    "TP4": [],
    "EP2 x FSDP2": [2],  # torch's, over the copies of what is not an expert
    "replicate": [4],  # torch's
}


@pytest.mark.slow
@pytest.mark.parametrize("logs", [False, nightly(True)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_update_has_one_small_collective(four: Ranks, name: str, logs: bool) -> None:
    """Beside the buckets of gradients, however much is logged."""
    for found in four.run(_collectives, name, 2, logs):
        assert sorted(found) == [("all_gather", 4), *(("all_reduce", size) for size in BUCKETS[name])]


def _with_a_split_table(evaluates: bool) -> list[float]:
    """The weights after batches of 4 and of 1 sequence, the losses of an evaluation of 4 and of 1, or both by hand."""
    mesh = meshes.mesh_of((2,), ("tp",))

    def made() -> nn.Module:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Embedding(12, 4), nn.Linear(4, 3)).double()
        return parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})

    def forward(model: nn.Module, tokens: Tensor) -> ForwardOutput:
        return ForwardOutput(model(tokens).square().sum(), len(tokens))

    data = torch.randint(12, (5, 3), generator=torch.Generator().manual_seed(0)).split(4)
    model, hand = made(), made()
    options = UpdateOptions(data_dims=())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward, options=options)
    optimizer = torch.optim.SGD(hand.parameters(), lr=0.1)
    if evaluates:
        found = create_evaluator(model, forward, data_dims=()).run(data).metrics["loss"]
        return [found, float(sum(forward(hand, one).loss.detach() for one in data)) / 5]
    trainer.run(data, max_epochs=1)
    for one in data:
        (forward(hand, one).loss / len(one)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(one[1].weight.detach().sum()) for one in (model, hand)]


@pytest.mark.parametrize("evaluates", [False, True], ids=["trains", "evaluates"])
def test_a_table_that_is_split_by_rows_sees_batches_of_other_sizes(*, evaluates: bool) -> None:
    """Torch keeps a mask from a forward that breaks off at its reduction, and refuses the next input of that shape."""
    for found, by_hand in run_ranks(_with_a_split_table, evaluates):
        assert found == pytest.approx(by_hand, rel=1e-12)
