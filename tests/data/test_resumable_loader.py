"""The loader that finds its place: order, randomness and place are functions of what is written in a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import ignite.distributed as idist
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ignite_train import ResumableLoader, ShardedSampler, TokenBudgetSampler
from ignite_train.data.how_exact import how_exact
from ranks import run_ranks


class Noisy(Dataset[Any]):
    """Samples that draw from each of the three generators."""

    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: S311

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def as_lists(loader: Any) -> list[Any]:
    return [torch.stack(micro_batch, dim=1).tolist() for micro_batch in loader]


def epoch_of(loader: ResumableLoader, epoch: int) -> list[Any]:
    loader.dataset.set_epoch(epoch)
    loader.set_epoch(epoch)
    return as_lists(loader)


def test_the_order_is_that_of_the_sampler():
    sampler = ShardedSampler(range(10), shuffle=True, seed=5)
    loader = ResumableLoader(torch.arange(10), 3, shuffle=True, seed=5)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        loader.set_epoch(epoch)
        assert torch.cat([*loader]).tolist() == [*sampler]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_samples_are_the_same_in_any_number_of_workers(workers):
    alone, several = (ResumableLoader(Noisy(), 3, shuffle=True, seed=5, num_workers=n) for n in (0, workers))
    assert [epoch_of(several, epoch) for epoch in (0, 1)] == [epoch_of(alone, epoch) for epoch in (0, 1)]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_workers_that_stay_know_the_epoch(batch_size):
    alone = ResumableLoader(Noisy(), batch_size, shuffle=True, seed=5)
    staying = ResumableLoader(Noisy(), batch_size, shuffle=True, seed=5, num_workers=1, persistent_workers=True)
    assert [epoch_of(staying, epoch) for epoch in (0, 1, 0)] == [epoch_of(alone, epoch) for epoch in (0, 1, 0)]


def test_a_sample_is_a_function_of_seed_epoch_and_index():
    """Not of what was drawn before it, nor of its micro-batch; and all three generators differ with each of the three."""

    def samples(batch_size: int, seed: int, epoch: int) -> dict[float, list[float]]:
        loader = ResumableLoader(Noisy(), batch_size, shuffle=True, seed=seed)
        return {sample[0]: sample[1:] for micro_batch in epoch_of(loader, epoch) for sample in micro_batch}

    first = samples(3, 5, 0)
    assert samples(4, 5, 0) == first
    for other in (samples(3, 6, 0), samples(3, 5, 1)):
        assert all(a != b for index in first for a, b in zip(first[index], other[index], strict=True))
    assert len({value for sample in first.values() for value in sample}) == 30


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_drawn_from_the_generators_of_the_model(workers):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    as_lists(ResumableLoader(Noisy(), 3, shuffle=True, num_workers=workers))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_a_sample_that_raises_leaves_the_generators_as_they_were():
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise OSError("gone")

    before = torch.get_rng_state().tolist()
    with pytest.raises(OSError, match="gone"):
        as_lists(ResumableLoader(Broken(), 3, shuffle=True))
    assert torch.get_rng_state().tolist() == before


def test_without_seeding_a_dataset_draws_on():
    """What `seed_samples=False` saves: the samples then depend on the generators as they are."""
    loader = ResumableLoader(Noisy(), 3, shuffle=False, seed_samples=False)
    assert as_lists(loader) != as_lists(loader)


@pytest.mark.slow
def test_what_workers_draw_by_themselves_is_a_function_of_the_seed():
    """In each pass, so also in a process that resumes; a random `collate_fn` draws so, or a dataset that is not seeded."""
    one, other = (ResumableLoader(Noisy(), 3, shuffle=False, seed=seed, seed_samples=False, num_workers=1) for seed in (5, 6))
    first = as_lists(one)
    assert as_lists(one) == first
    assert as_lists(other) != first


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("samples", [0, 3, 6, 9, 10, 99])
def test_it_starts_anywhere(samples, workers):
    loader = ResumableLoader(Noisy(), 3, shuffle=True, seed=5, num_workers=workers)
    whole = [sample for micro_batch in epoch_of(loader, 1) for sample in micro_batch]
    loader.seek(samples)
    assert len(loader) == -(-max(0, 10 - samples) // 3)
    assert [sample for micro_batch in epoch_of(loader, 1) for sample in micro_batch] == whole[samples:]
    assert len(loader) == 4
    assert [sample for micro_batch in epoch_of(loader, 1) for sample in micro_batch] == whole


def test_an_incomplete_micro_batch_can_be_left_out():
    assert [len(micro_batch) for micro_batch in ResumableLoader(torch.arange(10), 4, shuffle=True, drop_last=True)] == [4, 4]


@pytest.mark.parametrize("option", ["sampler", "batch_sampler", "generator", "worker_init_fn"])
def test_order_and_seeds_are_not_for_others_to_choose(option):
    with pytest.raises(ValueError, match=f"{option} must be left out of a ResumableLoader"):
        ResumableLoader(torch.arange(10), 4, shuffle=True, **{option: None})


def test_a_dataset_is_told_the_epoch():
    dataset = Noisy()
    loader = ResumableLoader(dataset, 3, shuffle=True)
    loader.dataset.set_epoch(4)
    assert dataset.epochs == [4]


def with_lengths(dataset: Any) -> ResumableLoader:
    return ResumableLoader(dataset, batches=TokenBudgetSampler([1] * len(dataset), max_tokens=3, shuffle=True))


@pytest.mark.parametrize("length", [9, 14])
@pytest.mark.parametrize(
    "make",
    [
        lambda dataset: ResumableLoader(dataset, 3, shuffle=True),
        lambda dataset: ResumableLoader(dataset, 3, shuffle=True, seed_samples=False, num_workers=1, persistent_workers=True),
        with_lengths,
        lambda dataset: DataLoader(dataset, 3, sampler=ShardedSampler(dataset, shuffle=True)),
    ],
    ids=["plain", "workers", "lengths", "sampler"],
)
def test_a_dataset_that_has_another_length_by_now_is_refused(make: Any, length: int) -> None:
    """The order is of the samples that it had: those that have come would be left out."""
    dataset = Noisy()
    loader = make(dataset)
    assert len(as_lists(loader)) == 4
    dataset.length = length
    with pytest.raises(ValueError, match=f"dataset must keep its length, got {length} samples after 10: .*set_data"):
        as_lists(loader)


class OwnNoise(Noisy):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(7)

    def __getitem__(self, index: int) -> list[float]:
        return [float(index), float(self.rng.random())]


class SeededNoise(OwnNoise):
    """And has it seeded for each sample."""

    def seed_sample(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)


@pytest.mark.parametrize(
    ("dataset", "options", "is_named"),
    [
        (OwnNoise, {"num_workers": 2}, True),
        (OwnNoise, {}, False),  # its state is in the checkpoint
        (SeededNoise, {"num_workers": 2}, False),
        (SeededNoise, {"num_workers": 2, "seed_samples": False}, True),
        (Noisy, {"num_workers": 2}, False),
    ],
)
def test_a_generator_of_which_workers_have_copies_is_named(dataset: Any, options: dict[str, Any], is_named: bool) -> None:
    """The workers of a resumed run begin with other states of it; a sample of which it is seeded is the same."""
    doubts, _ = how_exact(ResumableLoader(dataset(), 3, shuffle=True, **options))
    assert len(doubts) == is_named
    assert all("the generator 'rng'" in doubt and "seed_sample(seed)" in doubt for doubt in doubts)


def _left(samples: int) -> list[int]:
    loader = ResumableLoader(torch.arange(23), 2, shuffle=True, seed=5)
    assert loader.samples_per_round == 2 * idist.get_world_size()
    loader.seek(samples)
    return [int(sample) for micro_batch in loader for sample in micro_batch]


@pytest.mark.slow
def test_what_is_left_is_dealt_out_to_any_number_of_ranks():
    """Each sample after the place is on one rank, and none before it."""
    order = [*ShardedSampler(range(23), shuffle=True, seed=5)]
    for world_size in (1, 2, 3):
        shares = run_ranks(_left, 8, world_size=world_size)
        assert sorted(sample for share in shares for sample in share) == sorted(order[8:])
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
