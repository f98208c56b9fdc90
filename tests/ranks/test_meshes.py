"""Models whose parameters are DTensors on a mesh of several dimensions: the update of one process, to 1e-12, in every cut."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import meshes
from ignite_train import ResumableLoader, ShardedSampler, TokenBudgetSampler, UnlikeMicroBatchesError
from meshes import LAYOUTS, LIMIT
from ranks import Ranks
from tiers import nightly

TOLERANCE = 1e-12
CASES = [*product(LAYOUTS, meshes.OPTIMIZERS, (1, 3), ("ragged", "missing"), (LIMIT, None))]
FAST = {  # a few in which most is different
    ("TP2 x DP2", "AdamW", 3, "missing", LIMIT),
    ("SP2 x DP2", "SGD", 1, "ragged", None),
    ("SP2 x FSDP2", "AdamW", 3, "missing", LIMIT),
    ("EP2 x DP2", "SGD", 3, "missing", LIMIT),
}


def _tier(case: tuple[str, str, int, str, float | None]) -> Any:
    """A quarter of the cases are slow, and each two settings meet in some layout; the others are nightly."""
    name, optimizer, steps, cut, limit = case
    is_even = [*LAYOUTS].index(name) % 2 == 0
    is_slow = (steps == 1) ^ (limit is None) == is_even and (optimizer == "SGD") ^ (cut == "ragged") != is_even
    return () if case in FAST else pytest.mark.slow if is_slow else pytest.mark.nightly


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer", "steps", "cut", "limit"),
    [pytest.param(*case, marks=_tier(case)) for case in CASES],
)
def test_cuts(four: Ranks, name: str, optimizer: str, steps: int, cut: str, limit: float | None) -> None:
    found = four.run(meshes.train, name, optimizer, steps, cut, limit)
    expected = meshes.by_hand(name, optimizer, steps, cut, limit)
    assert max(meshes.differences(found, expected, meshes.copies_of(name))) < TOLERANCE
    if limit is not None:
        assert all(record.grad_norm > limit for record in expected[1])


# --- what is refused, and what is noticed -------------------------------------------------------------------------------------


def _made(options: dict[str, Any]) -> str:
    layout = LAYOUTS["TP2 x DP2"]
    model, _ = meshes.on_mesh(layout)
    try:
        meshes.trainer_of(layout, model, torch.optim.SGD(model.parameters(), lr=0.1), options=options)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_dims": None}, "ValueError: data_dims must name the dimensions of the mesh .* 'dp', 'tp', got None"),
        ({"data_dims": ("dq",)}, "ValueError: data_dims must have names among 'dp', 'tp', got 'dq'"),
        ({"data_dims": "dp"}, "TypeError: data_dims must be a tuple of names"),
        ({"reduction": "local"}, "ValueError: reduction must be 'auto' or 'explicit'"),
        ({"on_out_of_memory": "skip"}, "ValueError: on_out_of_memory must be 'raise'"),
    ],
)
def test_wrong_options_are_refused(four: Ranks, options: dict[str, Any], words: str) -> None:
    for message in four.run(_made, options):
        assert re.match(words, message), message


def _named_alike(name: str) -> str:
    """A model on a mesh of two dimensions, after another on a mesh whose only dimension has this name and the same ranks."""
    first = LAYOUTS["TP4"]._replace(names=("inner",))
    second = LAYOUTS["TP2 x DP2"]._replace(shape=(1, 4), names=("outer", name), data_dims=("outer",), feeds=("outer",))
    meshes.on_mesh(first)
    model, mesh = meshes.on_mesh(second)
    known = {one.device_mesh for one in model.parameters() if isinstance(one, DTensor)}
    assert known == {mesh[name]}
    try:
        meshes.trainer_of(second, model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ValueError as error:
        return str(error)
    return ""


def test_a_mesh_that_torch_takes_for_an_earlier_one_is_told(four: Ranks) -> None:
    """Equal parts of two meshes are one for the caches of DTensor, so that a parameter has the mesh that was made first."""
    for message in four.run(_named_alike, "inner"):
        assert message == (
            "data_dims must have names among 'inner', got 'outer'; if the model's mesh has 'outer', an earlier mesh of this "
            "process has a part with the same ranks and names, and torch takes that part: give the dimensions of the two "
            "meshes different names"
        )
    assert four.run(_named_alike, "other") == [""] * 4


def _unlike(odd_rank: int) -> tuple[int, ...]:
    layout = LAYOUTS["TP2 x DP2"]
    model, mesh = meshes.on_mesh(layout)
    before = meshes.whole(model)
    trainer = meshes.trainer_of(layout, model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = mesh.get_rank()
    (group,) = meshes.groups_of(layout, 1, "ragged", updates=1)
    micro_batches = group[meshes.place(layout, mesh)]
    if rank == odd_rank:
        micro_batches = [(x + 1e-9, y) for x, y in micro_batches]
    try:
        with trainer.session(max_iters=1):
            trainer.update(micro_batches)
    except UnlikeMicroBatchesError as error:
        after = meshes.whole(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        return error.ranks
    return ()


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "group"), [(3, (2, 3)), (0, (0, 1))])
def test_different_micro_batches_within_a_group_are_named(four: Ranks, rank: int, group: tuple[int, ...]) -> None:
    assert four.run(_unlike, rank) == [group] * 4


def _with_nan(name: str, rank: int) -> list[tuple[bool, str | None]]:
    """Whether each of three updates was applied, where a NaN is in the second micro-batch of one data rank."""
    layout = LAYOUTS[name]
    model, mesh = meshes.on_mesh(layout)
    trainer = meshes.trainer_of(
        layout, model, torch.optim.SGD(model.parameters(), lr=0.1), options={"on_nonfinite": "skip"}, protect=False
    )
    found = []
    with trainer.session(max_iters=3):
        for update, group in enumerate(meshes.groups_of(layout, 1, "ragged")):
            ((x, y),) = group[meshes.place(layout, mesh)]
            bad = update == 1 and meshes.place(layout, mesh) == rank
            output = trainer.update([(x * float("nan") if bad else x, y)])
            found.append((output.applied, output.skipped_reason))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), [("TP2 x DP2", 1), ("TP2 x FSDP2", 0), nightly("EP2 x DP2", 2)])
def test_what_is_not_finite_is_skipped_on_all_ranks(four: Ranks, name: str, rank: int) -> None:
    assert four.run(_with_nan, name, rank) == [[(True, None), (False, "nonfinite"), (True, None)]] * 4


def _loss_parallel() -> tuple[dict[str, Tensor], float]:
    layout = LAYOUTS["TP2 x DP2"]
    model, mesh = meshes.new_model(layout), meshes.mesh_of(layout.shape, layout.names)
    meshes.tensor_parallel(model, mesh)
    plan = {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(model, mesh["tp"], plan)
    trainer = meshes.trainer_of(layout, model, torch.optim.SGD(model.parameters(), lr=0.5), accumulation_steps=3)
    with loss_parallel(), trainer.session(max_iters=3):
        for group in meshes.groups_of(layout, 3, "missing"):
            output = trainer.update(group[meshes.place(layout, mesh)])
    return meshes.whole(model), output.loss


@pytest.mark.slow
def test_loss_parallel(four: Ranks) -> None:
    """The loss is a DTensor, computed from logits that no rank has as a whole."""
    weights, records = meshes.by_hand("TP2 x DP2", "SGD", 3, "missing", None)
    for found, loss in four.run(_loss_parallel):
        assert loss == pytest.approx(records[-1].loss, abs=TOLERANCE)
        assert max(float((found[name] - value).abs().max()) for name, value in weights.items()) < TOLERANCE


def _shares(kind: str) -> list[Any]:
    mesh = meshes.mesh_of((2, 2), ("dp", "tp"))["dp"]
    if kind == "batches":
        return list(TokenBudgetSampler([1] * 8, max_tokens=2, shuffle=True, seed=1, mesh=mesh))
    if kind == "sampler":
        return list(ShardedSampler(range(8), shuffle=True, seed=1, mesh=mesh))
    return [batch.tolist() for batch in ResumableLoader(torch.arange(8), 2, shuffle=True, seed=1, mesh=mesh)]


@pytest.mark.parametrize("kind", ["sampler", "batches", "loader"])
def test_a_group_is_dealt_the_same_samples(four: Ranks, kind: str) -> None:
    first, second, third, fourth = four.run(_shares, kind)
    assert first == second != third == fourth
    assert sorted(torch.tensor([*first, *third]).flatten().tolist()) == list(range(8))


def _refused(what: str) -> str:
    layout = LAYOUTS["SP2 x DP2"]
    model, mesh = meshes.on_mesh(layout)
    given: Any = model
    if what == "ddp":
        given = DistributedDataParallel(model, process_group=mesh.get_group("dp"), init_sync=False)
    if what == "pipeline":
        given = ScheduleGPipe(
            PipelineStage(model, mesh.get_local_rank("tp"), 2, torch.device("cpu"), group=mesh.get_group("tp")), 2
        )
    if what == "stages":  # each rank of "tp" has layers of its own
        model = nn.ModuleDict({f"stage {mesh.get_local_rank('tp')}": model})
        given = model
    try:
        meshes.trainer_of(layout, given, torch.optim.SGD(model.parameters(), lr=0.1))
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ddp", "model must be without DistributedDataParallel if some of its parameters are DTensors"),
        ("pipeline", "model must be a whole model on each rank, or on a mesh, got a ScheduleGPipe of a pipeline"),
        ("stages", "trainer must be made alike on all ranks, got the parameter stage 0"),
    ],
)
def test_what_cannot_be_right_is_refused(four: Ranks, what: str, words: str) -> None:
    for message in four.run(_refused, what):
        assert message.startswith(words)


PARTS, CASES_OF_PART = 20, 15


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_cases(four: Ranks, part: int) -> None:
    """A layout, a mesh, a cut, a group size, an optimizer and a limit are drawn: 300 cases, each a function of its seed."""
    found = {seed: _difference(four, seed) for seed in range(part * CASES_OF_PART, (part + 1) * CASES_OF_PART)}
    assert {seed: value for seed, value in found.items() if not value < TOLERANCE} == {}


def _difference(four: Ranks, seed: int) -> float:
    """The largest difference from one process in the case of this seed."""
    chance = random.Random(seed)  # noqa: S311
    name = chance.choice([*LAYOUTS, *meshes.UNUSUAL])
    case = (
        name,
        chance.choice([*meshes.OPTIMIZERS]),
        chance.randint(1, 5),
        chance.choice(["ragged", "missing"]),
        chance.choice([None, 0.01, LIMIT, 10.0]),
        chance.randrange(2**31),
    )
    found, expected = four.run(meshes.train, *case), meshes.by_hand(*case)
    return max(meshes.differences(found, expected, meshes.copies_of(name)))
