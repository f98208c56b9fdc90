"""Models whose parameters are DTensors on a mesh of several dimensions: the update of one process, to 1e-12, in every cut."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

import meshes
from ignite_train import UnlikeMicroBatchesError
from meshes import LAYOUTS, LIMIT
from ranks import Ranks

TOLERANCE = 1e-12
CASES = [*product(LAYOUTS, meshes.OPTIMIZERS, (1, 3), ("ragged", "missing"), (LIMIT, None))]
FAST = {  # a few in which most is different
    ("TP2 x DP2", "AdamW", 3, "missing", LIMIT),
    ("SP2 x DP2", "SGD", 1, "ragged", None),
    ("SP2 x FSDP2", "AdamW", 3, "missing", LIMIT),
    ("EP2 x DP2", "SGD", 3, "missing", LIMIT),
}


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("name", "optimizer", "steps", "cut", "limit"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_cuts(four: Ranks, name: str, optimizer: str, steps: int, cut: str, limit: float | None) -> None:
    found = four.run(meshes.train, name, optimizer, steps, cut, limit)
    expected = meshes.by_hand(name, optimizer, steps, cut, limit)
    copies = 2 if name.startswith("CP") else 1  # both ranks of a context-parallel group run each micro-batch, on their tokens
    assert max(meshes.differences(found, expected, copies)) < TOLERANCE
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


def _unlike(device_feeds: int) -> tuple[int, ...]:
    layout = LAYOUTS["TP2 x DP2"]
    model, mesh = meshes.on_mesh(layout)
    before = meshes.whole(model)
    trainer = meshes.trainer_of(layout, model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank = mesh.get_rank()
    (group,) = meshes.groups_of(layout, 1, "ragged", updates=1)
    micro_batches = group[meshes.place(layout, mesh)]
    if rank == device_feeds:
        micro_batches = [(x + 1e-9, y) for x, y in micro_batches]
    try:
        with trainer.session(max_iters=1):
            trainer.update(micro_batches)
    except UnlikeMicroBatchesError as error:
        after = meshes.whole(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        return error.ranks
    return ()


@pytest.mark.parametrize(("rank", "group"), [(3, (2, 3)), (0, (0, 1))])
def test_different_micro_batches_within_a_group_are_named(four: Ranks, rank: int, group: tuple[int, ...]) -> None:
    assert four.run(_unlike, rank) == [group] * 4
