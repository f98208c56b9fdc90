"""Batches by a budget of tokens: what is in them, in which order they come, and how a run resumes among them."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

from ignite_train import ForwardOutput, ResumableLoader, ShardedSampler, TokenBudgetSampler, UpdateOptions, create_trainer
from ignite_train.data.epoch_order import KeyedPermutation
from ignite_train.handlers import Checkpoint
from ranks import run_ranks
from tiers import slow

LENGTHS = [1 + (7 * index) % 11 for index in range(60)]


def like_sentences(number: int) -> list[int]:
    """Lengths that are distributed as those of sentences are, more or less."""
    draw = random.Random(3)  # noqa: S311
    return [min(200, 1 + int(draw.lognormvariate(3.0, 0.7))) for _ in range(number)]


def budget(lengths: Any = LENGTHS, **options: Any) -> TokenBudgetSampler:
    return TokenBudgetSampler(lengths, **{"max_tokens": 24, "shuffle": True, "seed": 5, **options})


def of_epoch(sampler: TokenBudgetSampler, epoch: int = 0) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a sampler as a rank of several would."""

    def make(rank: int, world_size: int, *arguments: Any, **options: Any) -> TokenBudgetSampler:
        monkeypatch.setattr("ignite_train.data.token_budget_sampler.collectives.rank", lambda: rank)
        monkeypatch.setattr("ignite_train.data.token_budget_sampler.collectives.world_size", lambda: world_size)
        return budget(*arguments, **options)

    return make


# --- what is in a batch ---


@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=120),
    max_tokens=st.integers(40, 200),
    max_samples=st.none() | st.integers(1, 9),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_each_sample_once_and_no_batch_above_the_budget(lengths, max_tokens, max_samples, shuffle, epoch):
    """Padded to the longest of its samples, no batch has more tokens; none is empty; their number is the same in each epoch."""
    sampler = budget(lengths, max_tokens=max_tokens, max_samples=max_samples, shuffle=shuffle)
    batches = of_epoch(sampler, epoch)

    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(batch and len(batch) * max(lengths[index] for index in batch) <= max_tokens for batch in batches)
    assert all(len(batch) <= (max_samples or len(lengths)) for batch in batches)
    assert len(batches) == len(sampler) == sampler.num_batches == len(of_epoch(sampler, epoch + 1))


def test_little_is_padding_and_batches_are_full():
    """Of sentences 9 in 10 tokens are real, and batches reach 85 % of the budget; at random half is padding."""
    lengths = like_sentences(4000)
    batches = list(budget(lengths, max_tokens=1500))
    padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    at_random = np.random.default_rng(0).permutation(lengths)[:3990].reshape(-1, 30)

    assert sum(lengths) / padded > 0.9
    assert padded / len(batches) > 0.85 * 1500
    assert at_random.sum() / (at_random.max(axis=1) * 30).sum() < 0.5


def test_long_samples_are_skipped_where_that_is_asked_for(caplog):
    """Of no epoch are they a part, and the log says how many they are."""
    sampler = budget([3, 30, 4, 25, 24], too_long="skip")
    assert sorted(index for batch in sampler for index in batch) == [0, 2, 4]
    assert (sampler.num_skipped, sampler.num_samples) == (2, 5)
    assert "2 of 5 samples are left out: they have more than 24 tokens" in caplog.text


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, torch.tensor], ids=["list", "tuple", "numpy", "torch"])
def test_lengths_of_any_kind(kind):
    assert of_epoch(budget(kind(LENGTHS))) == of_epoch(budget())


# --- the order ---


def test_the_order_is_a_function_of_seed_and_epoch():
    """Not of the passes before; another epoch or seed has other batches, in another order."""
    sampler = budget()
    first, second = of_epoch(sampler, 0), of_epoch(sampler, 1)

    assert of_epoch(sampler, 0) == first == of_epoch(budget(), 0)
    assert of_epoch(budget(), 1) == second
    for other in (second, of_epoch(budget(seed=6), 0)):
        assert [len(batch) for batch in other] != [len(batch) for batch in first]  # another order of batches
        common = {frozenset(batch) for batch in other} & {frozenset(batch) for batch in first}
        assert len(common) < len(first) / 4  # some have one sample


ORDERS = {  # the first batches of epoch 3 and the last one, where orders are drawn, and where they are computed
    "drawn": (2**16, [[48, 47, 53, 45, 43], [12, 17], [2], [6, 18]], [3]),
    "computed": (0, [[0, 18], [16, 19], [9, 7], [13, 12]], [11, 17]),
}


@pytest.mark.parametrize("way", ORDERS)
def test_the_order_never_changes(way, monkeypatch):
    """A run that was left within an epoch would miss samples in another order."""
    longest, first, last = ORDERS[way]
    monkeypatch.setattr("ignite_train.data.epoch_order._MAX_DRAWN", longest)
    lengths = [*range(6, 12), *[5] * 16, *[4] * 20, *[3] * 10, *[2] * 7]  # some lengths fill four batches exactly
    batches = of_epoch(TokenBudgetSampler(lengths, max_tokens=20, shuffle=True), 3)
    assert (len(batches), batches[:4], batches[-1]) == (20, first, last)


def test_the_order_does_not_depend_on_the_default_device():
    lengths = [*range(1, 40)]
    samplers = (TokenBudgetSampler(lengths, max_tokens=64, shuffle=True), ShardedSampler(lengths, shuffle=True))
    expected = [list(sampler) for sampler in samplers]
    with torch.device("meta"):
        assert [list(sampler) for sampler in samplers] == expected


def test_a_sample_meets_others_in_each_epoch():
    """Batches are not the same ones in another order, as they are where they are made once for the whole training."""
    sampler = budget(like_sentences(4000), max_tokens=1500)
    companions = [next(set(batch) for batch in of_epoch(sampler, epoch) if 17 in batch) for epoch in range(5)]
    common = [len(a & b) / len(a) for index, a in enumerate(companions) for b in companions[:index]]
    assert sum(common) / len(common) < 0.3


def test_without_shuffling_the_longest_come_first():
    batches = of_epoch(budget(shuffle=False), 1)
    assert [LENGTHS[index] for batch in batches for index in batch] == sorted(LENGTHS, reverse=True)
    assert batches == of_epoch(budget(shuffle=False, seed=9), 0)


# --- ranks, and a place in the epoch ---


@pytest.mark.parametrize("world_size", [2, 3])
def test_batches_are_dealt_out_to_ranks(as_rank, world_size):
    """Round by round they are those of one process, and no rank has more than one batch more than another."""
    whole = of_epoch(budget(), 2)
    shares = [of_epoch(as_rank(rank, world_size), 2) for rank in range(world_size)]
    assert [whole[rank::world_size] for rank in range(world_size)] == shares
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [len(as_rank(rank, world_size)) for rank in range(world_size)] == [len(share) for share in shares]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_pass_begins_anywhere(as_rank, world_size):
    """After any number of batches of all ranks; the pass after it is whole again."""
    whole = of_epoch(budget(), 1)
    for begin in (0, 1, 4, len(whole) - 1, len(whole), 99):
        shares = []
        for rank in range(world_size):
            sampler = as_rank(rank, world_size)
            sampler.seek(begin)
            left = len(sampler)
            shares.append(of_epoch(sampler, 1))
            assert left == len(shares[-1])
            assert of_epoch(sampler, 1) == whole[rank::world_size]
        assert sorted(batch for share in shares for batch in share) == sorted(whole[begin:])


def test_the_order_of_many_is_computed_from_the_place_on(monkeypatch):
    """To begin in the middle of an epoch computes one batch and nothing of those before it."""
    monkeypatch.setattr("ignite_train.data.epoch_order._MAX_DRAWN", 0)
    computed: list[int] = []

    class Counting(KeyedPermutation):
        def __call__(self, positions: Any) -> Any:
            computed.append(len(positions))
            return super().__call__(positions)

    monkeypatch.setattr("ignite_train.data.epoch_order.KeyedPermutation", Counting)
    sampler = budget(like_sentences(4000), max_tokens=1500)
    whole = of_epoch(sampler, 3)
    computed.clear()
    sampler.seek(60)
    batch = next(iter(sampler))

    assert batch == whole[60]
    assert computed == [1, len(batch)]
    assert sorted(index for batch in whole for index in batch) == list(range(4000))


# --- in a run ---


@pytest.mark.parametrize("workers", [0, slow(1)], ids=["none", "one"])
def test_a_loader_gives_these_batches(workers):
    """In each epoch, whole and from any place on, also where workers that stay fetch them."""
    options = {"num_workers": 1, "persistent_workers": True} if workers else {}
    loader = ResumableLoader(torch.arange(len(LENGTHS)), batches=budget(), **options)
    for epoch, begin in ((0, 0), (1, 0), (1, 5)):
        loader.set_epoch(epoch)
        loader.seek(begin)
        assert [batch.tolist() for batch in loader] == of_epoch(budget(), epoch)[begin:]


class Ragged(torch.utils.data.Dataset[Tensor]):
    """Samples of the lengths, with noise that each draws for itself; it notes which were fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Tensor:
        self.fetched.append(index)
        return torch.cat([torch.tensor([float(index)]), torch.rand(LENGTHS[index])])


def collate(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def forward(model: nn.Module, rows: Tensor) -> ForwardOutput:
    values = rows[:, 1:, None].double()
    return ForwardOutput((model(values) - values.cos()).square()[values != 0].sum(), int((values != 0).sum()))


def train(directory: Path, accumulation_steps: int, last_update: int | None = None) -> tuple[list[Any], Any, list[int]]:
    """Trains two epochs, or until this update; gives the samples of each update, the parameters, and what was fetched."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = UpdateOptions(reduction="explicit" if idist.get_world_size() > 1 else "auto")
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=accumulation_steps, options=options)
    Checkpoint(directory).attach(trainer)
    seen: list[Any] = []

    @trainer.on("ITERATION_COMPLETED")
    def note() -> None:
        seen.append([[int(index) for index in rows[:, 0]] for rows in trainer.state.batch])
        if trainer.state.iteration == last_update:
            trainer.terminate(agreed=True)

    dataset = Ragged()
    trainer.run(ResumableLoader(dataset, batches=budget(), seed=5, collate_fn=collate), max_epochs=2)
    return seen, parameters_to_vector(model.parameters()).tolist(), dataset.fetched


@pytest.mark.slow
def test_a_run_resumes_bitwise_among_ragged_batches(tmp_path):
    """In the middle of both epochs; a resumed process fetches no sample of a batch that was done."""
    seen, parameters, _ = train(tmp_path / "whole", 2)
    first, _, _ = train(tmp_path / "parts", 2, 3)
    second, _, fetched = train(tmp_path / "parts", 2, len(seen) // 2 + 2)
    third, end, _ = train(tmp_path / "parts", 2)

    assert [*chain(*seen)] == [*of_epoch(budget(), 0), *of_epoch(budget(), 1)]
    assert first + second + third == seen
    assert end == parameters
    assert fetched == [index for group in second for batch in group for index in batch]


@pytest.mark.slow
def test_two_ranks_then_one_then_two_are_one_run(tmp_path):
    """Each update has the same batches on any number of ranks, also where it changes in the middle of an epoch."""
    seen, expected, _ = train(tmp_path / "alone", 4)
    updates: list[Any] = []
    for world_size, accumulation_steps, last_update in ((2, 2, 2), (1, 4, 5), (2, 2, None)):
        outcomes = run_ranks(train, tmp_path / "travels", accumulation_steps, last_update, world_size=world_size)
        updates += [[*chain(*parts)] for parts in zip(*(outcome[0] for outcome in outcomes), strict=True)]
        assert all(outcome[1] == outcomes[0][1] for outcome in outcomes)

    assert [sorted(update) for update in updates] == [sorted(update) for update in seen]
    assert outcomes[0][1] == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_pass_begins_where_it_was_sought_whatever_the_workers(workers: int) -> None:
    """Torch asks a sampler for two iterators where it has workers; the second began at the start, in each resumed run."""
    loader = ResumableLoader(torch.arange(len(LENGTHS)), batches=budget(), num_workers=workers)
    loader.set_epoch(1)
    whole = [batch.tolist() for batch in loader]
    loader.seek(4)
    assert [batch.tolist() for batch in loader] == whole[4:]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["samples", "batches"])
def test_so_does_that_of_a_sampler_in_a_plain_loader(kind: str, workers: int) -> None:
    """Where torch's own BatchSampler does not stand between them."""
    sampler: Any = budget() if kind == "batches" else ShardedSampler(LENGTHS, shuffle=True)
    given: Any = {"batch_sampler": sampler} if kind == "batches" else {"sampler": sampler, "batch_size": None}
    loader = DataLoader(torch.arange(len(LENGTHS)), num_workers=workers, **given)  # type: ignore[arg-type]
    whole = [batch.tolist() for batch in loader]
    sampler.seek(4)
    sampler.set_epoch(0)
    assert [batch.tolist() for batch in loader] == whole[4:]
