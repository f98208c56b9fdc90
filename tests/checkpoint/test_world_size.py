"""A run of replicas resumes with another number of ranks: where that can be exact it is, and elsewhere it is refused."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import cuts
from ignite_train import ForwardOutput, ResumableLoader, ShardedSampler, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint
from ranks import RanksFailedError, run_ranks

COUNT = 100  # samples; updates of 16 leave a ragged one at the end
Leg = tuple[list[list[int]], list[float]]


class Weighted(Dataset[Any]):
    """The samples of cuts.py, each with its index."""

    def __init__(self) -> None:
        self.data = cuts.samples(COUNT)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return (*(part[index] for part in self.data), torch.tensor(index))


def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
    return cuts.forward(model, micro_batch[:3])


def train(
    directory: Path,
    batch_size: int,
    accumulation: int,
    last_update: int | None,
    reduction: str = "ddp",
    kind: str = "resumable",
    epochs: int = 2,
) -> Leg:
    """Resumes where the ranks before stopped, until `last_update`, or to the end of the epochs.

    Returns:
        The samples of each update on this rank, and the parameters.
    """
    several = idist.get_world_size() > 1
    inner = cuts.linear()
    model: nn.Module = DistributedDataParallel(inner) if several and reduction == "ddp" else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE, momentum=0.9)
    way: Any = reduction if several else "auto"
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=accumulation, options=UpdateOptions(reduction=way))
    Checkpoint(directory, every_epochs=1).attach(trainer)
    updates: list[list[int]] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        updates.append([int(index) for micro_batch in trainer.state.batch for index in micro_batch[3]])
        if trainer.state.iteration == last_update:
            trainer.terminate(agreed=True)

    loader: Any
    if kind == "resumable":
        loader = ResumableLoader(Weighted(), batch_size, shuffle=True, seed=2)
    else:
        loader = DataLoader(Weighted(), batch_size, sampler=ShardedSampler(Weighted(), shuffle=True, seed=2))
    trainer.run(loader, max_epochs=epochs)
    return updates, [*inner.weight.flatten().tolist(), *inner.bias.tolist()]


def travel(
    directory: Path, legs: list[tuple[int, int, int, int | None]], reduction: str = "ddp"
) -> tuple[list[list[int]], Any]:
    """Legs of (ranks, batch size, accumulation, last update). Gives the samples of each update over all ranks, and the end."""
    updates: list[list[int]] = []
    parameters: Any = None
    for world_size, batch_size, accumulation, last_update in legs:
        outcomes = run_ranks(train, directory, batch_size, accumulation, last_update, reduction, world_size=world_size)
        for parts in zip(*(parts for parts, _ in outcomes), strict=True):
            updates.append(sorted(index for part in parts for index in part))
        parameters = outcomes[0][1]
        assert all(other == parameters for _, other in outcomes)
    return updates, parameters


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["ddp", "explicit"])
def test_two_ranks_then_one_then_two_are_one_run(tmp_path: Path, reduction: str) -> None:
    """In the middle of both epochs, with the same samples to an update: the single process's run, up to rounding."""
    expected, parameters = travel(tmp_path / "alone", [(1, 8, 2, None)])
    legs = [(2, 4, 2, 2), (1, 4, 4, 5), (2, 4, 2, 9), (1, 16, 1, 10), (2, 8, 1, None)]
    updates, end = travel(tmp_path / "travels", legs, reduction)
    assert updates == expected
    assert end == pytest.approx(parameters, rel=0, abs=1e-12)


@pytest.mark.slow
def test_the_same_command_on_other_ranks_uses_each_sample_once(tmp_path: Path) -> None:
    """Nothing else is changed, so that updates have another size: still no sample is lost, and none used twice."""
    updates, _ = travel(tmp_path, [(2, 4, 2, 3), (1, 4, 2, 8), (2, 4, 2, None)])
    used = [index for update in updates for index in update]
    assert Counter(used[:COUNT]) == Counter(used[COUNT:]) == Counter(range(COUNT))
    assert [len(update) for update in updates[:9]] == [16] * 3 + [8] * 5 + [12]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_loader_that_cannot_seek_is_refused_within_an_epoch(tmp_path: Path, before: int, after: int) -> None:
    """On every rank, with the reason and what to do."""
    run_ranks(train, tmp_path, 4, 2, 3, "ddp", "plain", world_size=before)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(train, tmp_path, 4, 2, None, "ddp", "plain", world_size=after)
    message = (
        "ValueError: data must be a loader that can seek, such as ResumableLoader, and epoch_length be left out, to resume in "
        f"the middle of an epoch with {after} ranks after {before}, got a DataLoader; or resume from a checkpoint of the end "
        "of an epoch"
    )
    assert str(caught.value).count(message) == after


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_at_the_end_of_an_epoch_any_loader_is_taken(tmp_path: Path, before: int, after: int) -> None:
    """No place has to be found: the second epoch begins on other ranks."""
    run_ranks(train, tmp_path, 4, 2, None, "ddp", "plain", 1, world_size=before)
    outcomes = run_ranks(train, tmp_path, 4, 2, None, "ddp", "plain", world_size=after)
    used = [index for updates, _ in outcomes for update in updates for index in update]
    assert Counter(used) == Counter(range(COUNT))


def draws(directory: Path) -> tuple[float, ...]:
    """What the generators give after an epoch, which an earlier start may have trained."""
    train(directory, 4, 2, None, "explicit", "plain", 1)
    return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: S311


@pytest.mark.slow
def test_a_rank_that_is_new_draws_numbers_of_its_own(tmp_path: Path) -> None:
    """Of each generator; the first one continues with those of the rank that there was."""
    (alone,) = run_ranks(draws, tmp_path, world_size=1)
    first, second = run_ranks(draws, tmp_path)
    assert first == alone
    assert not {*first} & {*second}
