"""A run resumes with other data than before: exactly where that is possible, and never with samples missed in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_train import (
    ForwardOutput,
    ResumableLoader,
    ShardedSampler,
    TokenBudgetSampler,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.handlers import Checkpoint
from ranks import RanksFailedError, run_ranks
from tiers import slow

SAMPLES, UPDATES = 48, 6  # an epoch; it is left after update 5


def resumable(samples: int = SAMPLES, batch_size: int = 4, **options: Any) -> Any:
    return ResumableLoader(torch.arange(samples), batch_size, **{"shuffle": True, "seed": 3, **options})


def plain(samples: int = SAMPLES, batch_size: int = 4, *, shuffle: bool = True, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(2)
    return DataLoader(torch.arange(samples), batch_size, shuffle=shuffle, generator=generator, **options)


def stateful(samples: int = SAMPLES, batch_size: int = 4, *, shuffle: bool = True) -> Any:
    generator = torch.Generator().manual_seed(2)
    return StatefulDataLoader(torch.arange(samples), batch_size, shuffle=shuffle, generator=generator)


def drawn(way: str) -> Any:
    """A loader whose order comes from a generator of its own, or from that of the process, in one of the ways to write it."""
    own, data, index = torch.Generator().manual_seed(2), torch.arange(SAMPLES), range(SAMPLES)
    return {
        "process": lambda: DataLoader(data, 4, shuffle=True),
        "loader": lambda: DataLoader(data, 4, shuffle=True, generator=own),
        "sampler of process": lambda: DataLoader(data, 4, sampler=RandomSampler(index)),
        "loader beside": lambda: DataLoader(data, 4, sampler=RandomSampler(index), generator=own),
        "sampler": lambda: DataLoader(data, 4, sampler=RandomSampler(index, generator=own)),
        "subset of process": lambda: DataLoader(data, 4, sampler=SubsetRandomSampler(index)),
        "subset": lambda: DataLoader(data, 4, sampler=SubsetRandomSampler(index, own)),
        "batches of process": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(index), 4, False)),
        "batches": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(index, generator=own), 4, False)),
    }[way]()


def sharded(seed: int, *, shuffle: bool = True) -> Any:
    return DataLoader(torch.arange(SAMPLES), 4, sampler=ShardedSampler(range(SAMPLES), shuffle=shuffle, seed=seed))


def budget(samples: int = SAMPLES, *, longest: int = 4, **options: Any) -> Any:
    lengths = [1 + index % longest for index in range(samples)]
    batches = TokenBudgetSampler(lengths, **{"max_tokens": 12, "shuffle": True, "seed": 3, **options})
    return ResumableLoader(torch.arange(samples), batches=batches)


def replacing(*, replacement: bool) -> Any:
    sampler = RandomSampler(range(SAMPLES), replacement, SAMPLES, torch.Generator().manual_seed(2))
    return DataLoader(torch.arange(SAMPLES), 4, sampler=sampler)


def train(
    directory: Path,
    loader: Any,
    accumulation_steps: int = 2,
    *,
    to: int | None = None,
    stop: int = 0,
    epoch_length: int | None = None,
    **options: Any,
) -> list[int]:
    """Trains until update `to`, or the end of the first epoch, or until a handler ends the run in update `stop`.

    Returns:
        The samples in the order in which they were used.
    """
    model = nn.Linear(1, 1)
    seen: list[int] = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        seen.extend(x.tolist())
        return model(x.float()[:, None]).square().mean() * 1e-6

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    update_options = UpdateOptions(reduction="explicit" if idist.get_world_size() > 1 else "auto")
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=accumulation_steps, options=update_options)
    Checkpoint(directory, **options).attach(trainer)
    if stop:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=stop), lambda trainer: trainer.terminate())
    trainer.run(loader, epoch_length=epoch_length, **({"max_epochs": 1} if to is None else {"max_iters": to}))
    return seen


class Sized(IterableDataset[Tensor]):
    """A stream of samples that knows how many it has."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.samples))


EXACT: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
    "resumable, batch size": (resumable, lambda: resumable(batch_size=8), 2),
    "resumable, workers": (resumable, lambda: resumable(num_workers=1), 2),
    "resumable, accumulation": (resumable, resumable, 4),
    "budget, accumulation": (budget, budget, 4),
    "plain, accumulation": (plain, plain, 4),
    "plain, smaller accumulation": (plain, plain, 1),
    "stateful, accumulation": (stateful, stateful, 4),
    "list, accumulation": (lambda: list(torch.arange(SAMPLES).split(4)), lambda: list(torch.arange(SAMPLES).split(4)), 3),
}


@pytest.mark.parametrize("case", EXACT)
def test_what_can_be_exact_is(case: str, tmp_path: Path, caplog: Any) -> None:
    """Each sample is used once in the epoch, and nothing is said about the data but a batch size."""
    before, after, accumulation_steps = EXACT[case]
    seen = train(tmp_path, before(), to=5)
    seen += train(tmp_path, after(), accumulation_steps)
    assert Counter(seen) == Counter(range(SAMPLES))
    told = [line for line in caplog.messages if "not that with which" in line]
    assert told == ["the data is not that with which this epoch began: batch_size: 4 -> 8"] * (case == "resumable, batch size")
    assert "num_workers" not in caplog.text


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "resumable, seed": (resumable, lambda: resumable(seed=4), "seed: 3 -> 4"),
    "resumable, shuffle": (resumable, lambda: resumable(shuffle=False), "shuffle: True -> False"),
    "resumable, longer": (resumable, lambda: resumable(60), "samples: 48 -> 60"),
    "resumable, shorter": (resumable, lambda: resumable(20), "samples: 48 -> 20"),
    "budget, tokens": (budget, lambda: budget(max_tokens=16), "max_tokens: 12 -> 16"),
    "budget, samples": (budget, lambda: budget(max_samples=4), "max_samples: None -> 4"),
    "budget, seed": (budget, lambda: budget(seed=4), "seed: 3 -> 4"),
    "budget, lengths": (budget, lambda: budget(longest=3), "lengths: "),
    "budget, in order, longer": (lambda: budget(shuffle=False), lambda: budget(60, shuffle=False), "lengths: "),
    "resumable to budget": (resumable, budget, "batch_sampler: None -> '_KeyBatches'"),
    "plain, batch size": (plain, lambda: plain(batch_size=8), "batch_size: 4 -> 8"),
    "plain, in order, batch size": (
        lambda: plain(shuffle=False),
        lambda: plain(shuffle=False, batch_size=8),
        "batch_size: 4 -> 8",
    ),
    "plain, shuffle": (plain, lambda: plain(shuffle=False), "sampler: 'RandomSampler' -> 'SequentialSampler'"),
    "plain, longer": (plain, lambda: plain(60), "samples: 48 -> 60"),
    "plain, sharded, seed": (lambda: sharded(3), lambda: sharded(4), "seed: 3 -> 4"),
    "plain, replacement": (
        lambda: replacing(replacement=False),
        lambda: replacing(replacement=True),
        "replacement: False -> True",
    ),
    "plain to resumable": (plain, resumable, "loader: 'DataLoader' -> 'ResumableLoader'"),
    "resumable to plain": (resumable, plain, "loader: 'ResumableLoader' -> 'DataLoader'"),
    "plain to stateful": (plain, stateful, "loader: 'DataLoader' -> 'StatefulDataLoader'"),
    "stateful, batch size": (stateful, lambda: stateful(batch_size=8), "batch_size: 4 -> 8"),
    "stateful, longer": (stateful, lambda: stateful(60), "samples: 48 -> 60"),
    "stream, longer": (
        lambda: DataLoader(Sized(SAMPLES), 4),
        lambda: DataLoader(Sized(60), 4),
        "micro_batches: 12 -> 15",
    ),
    "list, longer": (
        lambda: list(torch.arange(SAMPLES).split(4)),
        lambda: list(torch.arange(60).split(4)),
        "micro_batches: 12 -> 15",
    ),
}


@pytest.mark.parametrize("shuffle", [True, False], ids=["in order no longer", "in order now"])
def test_another_order_is_refused(shuffle: bool, tmp_path: Path) -> None:
    """Also where the order of one of both is that of the dataset, so that nothing but the order differs."""
    train(tmp_path, sharded(3, shuffle=not shuffle), to=5)
    with pytest.raises(ValueError, match=rf"got shuffle: {not shuffle} -> {shuffle} \(rank 0\)"):
        train(tmp_path, sharded(3, shuffle=shuffle))


DRAWN = [
    ("process", "loader", "process", "generator"),
    ("process", "sampler", "process", "sampler.generator"),
    ("process", "loader beside", "process", "generator, process"),
    ("sampler of process", "sampler", "process", "sampler.generator"),
    ("subset of process", "subset", "process", "sampler.generator"),
    ("loader", "sampler", "generator", "sampler.generator"),
    ("loader beside", "loader", "generator, process", "generator"),
    ("batches of process", "batches", "process", "batch_sampler.sampler.generator"),
]


@pytest.mark.parametrize("epoch_length", [None, 100], ids=["epoch", "stream"])
@pytest.mark.parametrize(("one", "other", "source", "another"), DRAWN)
def test_an_order_from_another_generator_is_refused(
    one: str, other: str, source: str, another: str, epoch_length: int | None, tmp_path: Path
) -> None:
    """To give a loader a generator, or to take it away, changes the order as another seed does."""
    for number, (before, after, line) in enumerate(
        ((one, other, f"{source} -> {another}"), (other, one, f"{another} -> {source}"))
    ):
        directory = tmp_path / str(number)
        train(directory, drawn(before), to=5, epoch_length=epoch_length)
        with pytest.raises(ValueError, match="samples would be missed or used twice") as caught:
            train(directory, drawn(after), to=6, epoch_length=epoch_length)
        assert f"got order drawn from: {line} (rank 0)" in str(caught.value)


@pytest.mark.parametrize("way", ["process", "loader", "sampler", "loader beside", "subset", "batches"])
def test_the_same_order_written_again_goes_on(way: str, tmp_path: Path) -> None:
    """Also where it is written in another way that draws the same."""
    seen = train(tmp_path, drawn(way), to=5)
    seen += train(tmp_path, drawn("sampler of process" if way == "process" else way))
    assert Counter(seen) == Counter(range(SAMPLES))


def test_samples_that_came_after_a_group_that_was_cut_short_are_read(tmp_path: Path) -> None:
    """The last update of the epoch had fewer micro-batches than others."""
    seen = train(tmp_path, resumable(13, batch_size=3, shuffle=False), 4, stop=2)
    seen += train(tmp_path, resumable(30, batch_size=3, shuffle=False), 4)
    assert seen == [*range(30)]


class Repeated(Sampler[int]):
    """The samples of an epoch several times, from any of them on."""

    def __init__(self, samples: int, times: int) -> None:
        self.entries, self.start = [*range(samples)] * times, 0

    def __len__(self) -> int:
        return len(self.entries) - self.start

    def __iter__(self) -> Iterator[int]:
        left, self.start = self.entries[self.start :], 0
        return iter(left)


class OwnSeekable(DataLoader[Tensor]):
    """A user's loader that can seek in an order longer than its dataset, which may have no length."""

    samples_per_round = 4

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, 4, sampler=Repeated(8, 3))

    def seek(self, samples: int) -> None:
        self.sampler.start = samples


class WithoutLength(Dataset[Tensor]):
    """Any index gives a sample."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


@pytest.mark.parametrize("dataset", [torch.arange(8), WithoutLength()], ids=["shorter", "no length"])
def test_a_place_may_lie_behind_the_length_of_the_dataset(dataset: Any, tmp_path: Path) -> None:
    """Where a loader of the user's own gives more samples in an epoch than its dataset has."""
    seen = train(tmp_path, OwnSeekable(dataset), 1, to=4)
    seen += train(tmp_path, OwnSeekable(dataset), 1)
    assert seen == [*range(8)] * 3


class Noisy(Dataset[Tensor]):
    """Draws from a generator of its own, or has none."""

    def __init__(self, *, draws: bool) -> None:
        self.generator = torch.Generator().manual_seed(1) if draws else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if self.generator is not None:
            torch.rand(1, generator=self.generator)
        return torch.tensor(index)


@pytest.mark.parametrize("draws", [True, False])
def test_a_dataset_that_gets_or_loses_its_generator_is_a_warning(draws: bool, tmp_path: Path, caplog: Any) -> None:
    """The samples are the same; what is drawn for them is not."""
    seen = train(tmp_path, DataLoader(Noisy(draws=draws), 4), to=5)
    caplog.clear()
    seen += train(tmp_path, DataLoader(Noisy(draws=not draws), 4))
    assert Counter(seen) == Counter(range(SAMPLES))
    line = (
        "generators of the dataset: dataset.generator -> none"
        if draws
        else "generators of the dataset: none -> dataset.generator"
    )
    assert sum(line in message for message in caplog.messages) == 1


@pytest.mark.parametrize("saves", [False, True], ids=["in this process", "from a checkpoint"])
def test_an_update_that_is_repeated_has_the_same_draws(saves: bool, tmp_path: Path) -> None:
    """A dataset draws as its samples are read: the samples of the update that an exception ended are read again."""

    class Drawing(Noisy):
        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(1, generator=self.generator)

    def run(*, fails: bool) -> list[list[float]]:
        seen: list[list[float]] = []

        def make() -> Any:
            model = nn.Linear(1, 1)

            def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
                if fails and not failed and len(seen) == 3:
                    failed.append(True)
                    raise KeyboardInterrupt
                seen.append(x.flatten().tolist())
                return ForwardOutput(model(x).square().sum() * 1e-6, len(x))

            trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward)
            checkpoint = Checkpoint(tmp_path / str(fails))
            checkpoint.attach(trainer)
            return trainer, DataLoader(Drawing(draws=True), 4, shuffle=True, generator=torch.Generator()), checkpoint

        failed: list[bool] = []
        trainer, loader, checkpoint = make()
        if fails:
            with pytest.raises(KeyboardInterrupt):
                trainer.run(loader, max_epochs=2)
            if saves:
                checkpoint.save()
                trainer, loader, _ = make()
        trainer.run(loader, max_epochs=2)
        return seen

    assert run(fails=True) == run(fails=False)


@pytest.mark.parametrize("num_workers", [0, slow(2)])
def test_a_generator_that_the_validation_draws_from_too_goes_on(num_workers: int, tmp_path: Path) -> None:
    """Torch's recipe gives all loaders one generator; what an evaluation in the middle of an epoch has drawn counts."""

    def run(directory: Path, *, to: int | None = None) -> list[int]:
        generator, samples = torch.Generator().manual_seed(0), torch.arange(24)
        loader = DataLoader(samples, 4, shuffle=True, generator=generator, num_workers=num_workers)
        held_out = DataLoader(samples, 12, generator=generator)  # each pass draws a seed for workers
        seen, model = list[int](), nn.Linear(1, 1)

        def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
            if model.training:
                seen.extend(x.tolist())
            return ForwardOutput(model(x.float()[:, None]).square().sum() * 1e-6, len(x))

        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward)
        evaluator = create_evaluator(model, forward)
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: evaluator.run(held_out))
        Checkpoint(directory).attach(trainer)
        trainer.run(loader, **({"max_epochs": 3} if to is None else {"max_iters": to}))
        return seen

    whole = run(tmp_path / "whole")
    assert run(tmp_path / "stopped", to=3) + run(tmp_path / "stopped") == whole


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_miss_samples_is_refused(case: str, tmp_path: Path) -> None:
    """Before the first batch, in one line with what it was and is, and how to continue."""
    before, after, message = REFUSED[case]
    train(tmp_path, before(), to=5)
    with pytest.raises(ValueError, match="middle of an epoch") as caught:
        train(tmp_path, after())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert all(way in str(caught.value) for way in ("resume=PATH", "on_changed_data='warn'"))


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:the loader has len")  # a place that is a number of batches of another size
@pytest.mark.parametrize("case", REFUSED)
def test_a_user_who_insists_is_warned(case: str, tmp_path: Path, caplog: Any) -> None:
    """With `on_changed_data="warn"` the same list is a warning, and the run continues."""
    before, after, message = REFUSED[case]
    train(tmp_path, before(), to=5)
    caplog.clear()
    train(tmp_path, after(), on_changed_data="warn")
    assert sum("not that with which" in line and message in line for line in caplog.messages) == 1


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", REFUSED)
def test_at_the_beginning_of_an_epoch_any_change_is_listed(case: str, tmp_path: Path, caplog: Any) -> None:
    """Nothing of the epoch is done, so that nothing can be missed: the new data is used whole."""
    before, after, message = REFUSED[case]
    train(tmp_path, before())
    caplog.clear()
    loader = after()
    seen = train(tmp_path, loader, 1, to=6 + len(loader))
    assert sum("not that with which" in line and message in line for line in caplog.messages) == 1
    assert len(seen) == sum(len(x) for x in after())


@pytest.mark.parametrize("after", [plain, stateful, resumable], ids=lambda make: make.__name__)
@pytest.mark.parametrize("lengths", [(None, 3), (3, None)], ids=["to-epoch_length", "from-epoch_length"])
def test_at_the_beginning_of_an_epoch_another_kind_of_state_is_left_alone(lengths: Any, after: Any, tmp_path: Path) -> None:
    """A loader with a state, and a run with `epoch_length`, which has one too: neither can read what the other has written."""
    train(tmp_path, stateful(), to=UPDATES, epoch_length=lengths[0])
    seen = train(tmp_path, after(), to=2 * UPDATES, epoch_length=lengths[1])
    assert Counter(seen) == Counter(range(SAMPLES))


@pytest.mark.parametrize("make", [plain, stateful], ids=lambda make: make.__name__)
def test_a_run_that_resumes_with_epoch_length_goes_on_in_the_order(make: Any, tmp_path: Path, caplog: Any) -> None:
    """After whole epochs the generators are where they were, as in one process, and nothing is said about the data."""
    loader = make()
    expected = train(tmp_path / "one", loader) + train(tmp_path / "two", loader, to=UPDATES, epoch_length=UPDATES)
    caplog.clear()
    seen = train(tmp_path / "one", make(), to=2 * UPDATES, epoch_length=UPDATES)
    assert expected == expected[:SAMPLES] + seen
    assert "not that with which" not in caplog.text


@pytest.mark.parametrize("updates", [2, 3], ids=["within-an-epoch", "end-of-an-epoch"])
def test_a_user_who_insists_is_warned_with_epoch_length_too(updates: int, tmp_path: Path, caplog: Any) -> None:
    """There an epoch ends in the middle of a pass over the data, where a change is refused too."""
    train(tmp_path, resumable(), to=updates, epoch_length=3)
    with pytest.raises(ValueError, match="middle of an epoch, or of a pass with epoch_length, got samples: 48 -> 60"):
        train(tmp_path, resumable(60), to=updates + 2, epoch_length=3)
    caplog.clear()
    seen = train(tmp_path, resumable(60), to=updates + 2, epoch_length=3, on_changed_data="warn")
    assert len(seen) == 16
    assert sum("not that with which" in line and "samples: 48 -> 60" in line for line in caplog.messages) == 1


def _with_epoch_length(directory: Path, updates: int) -> None:
    train(directory, resumable(), to=updates, epoch_length=2)


@pytest.mark.slow
@pytest.mark.parametrize("updates", [2, 3], ids=["end-of-an-epoch", "within-an-epoch"])
def test_another_number_of_ranks_cannot_continue_with_epoch_length(updates: int, tmp_path: Path, caplog: Any) -> None:
    """Which is said, because there a ResumableLoader does not help: at the end of an epoch its data begins again."""
    run_ranks(_with_epoch_length, tmp_path, updates)
    caplog.clear()
    if updates == 3:
        with pytest.raises(ValueError, match=r"epoch_length be left out, to resume in the middle .* 1 ranks after 2"):
            train(tmp_path, resumable(), to=4, epoch_length=2)
    else:
        train(tmp_path, resumable(), to=4, epoch_length=2)
        assert sum("begins at the start of its data, because 2 ranks" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    ("before", "after", "message", "uses"),
    [
        (lambda: plain(shuffle=False), lambda: plain(50, shuffle=False), "samples: 48 -> 50", 50),
        (lambda: resumable(shuffle=False), lambda: resumable(50, shuffle=False), "samples: 48 -> 50", 50),
        (lambda: plain(shuffle=False), lambda: stateful(shuffle=False), "loader: 'DataLoader' -> 'StatefulDataLoader'", 48),
        (lambda: plain(47), lambda: plain(47, drop_last=True), "drop_last: False -> True", 44),
        (lambda: resumable(shuffle=False), lambda: resumable(shuffle=False, seed=4), "seed: 3 -> 4", 48),
    ],
    ids=["longer, in order", "longer resumable, in order", "another loader, in order", "drop_last", "seed, in order"],
)
def test_a_harmless_change_is_a_warning(before: Any, after: Any, message: str, uses: int, tmp_path: Path, caplog: Any) -> None:
    """The rest of the epoch is what the new loader has left: nothing is missed, nothing used twice."""
    seen = train(tmp_path, before(), to=5)
    caplog.clear()
    seen += train(tmp_path, after())
    assert sum("not that with which" in line and message in line for line in caplog.messages) == 1
    assert len(seen) == len(set(seen)) == uses


@pytest.mark.parametrize("make", [resumable, lambda: sharded(3)], ids=["resumable", "sharded"])
def test_a_computed_order_continues(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    """That of a large dataset, which is not drawn."""
    drawn = train(tmp_path / "drawn", make())
    monkeypatch.setattr("ignite_train.data.epoch_order._MAX_DRAWN", SAMPLES - 1)
    whole = train(tmp_path / "whole", make())
    seen = train(tmp_path / "parts", make(), to=5)
    assert seen + train(tmp_path / "parts", make()) == whole
    assert sorted(whole) == sorted(drawn)
    assert whole != drawn
    assert "not that with which" not in caplog.text


@pytest.mark.slow
def test_every_rank_refuses_what_one_rank_has_changed(tmp_path: Path) -> None:
    """With the rank named, so that none waits for another."""
    run_ranks(two_ranks, str(tmp_path), [4, 4], 3)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(two_ranks, str(tmp_path), [4, 8], None)
    assert str(caught.value).count("batch_size: 4 -> 8 (rank 1): samples would be missed") == 2


def two_ranks(directory: str, batch_sizes: list[int], to: int | None) -> None:
    import ignite.distributed as idist

    model = nn.Linear(1, 1)
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        lambda model, x: model(x.float()[:, None]).mean(),
        options=UpdateOptions(reduction="explicit"),
    )
    Checkpoint(directory).attach(trainer)
    trainer.run(plain(batch_size=batch_sizes[idist.get_rank()]), **({"max_epochs": 1} if to is None else {"max_iters": to}))


def curriculum(directory: Path, kind: str, *limits: int, other: int = SAMPLES) -> list[list[int]]:
    """The epochs of runs in new processes, where EPOCH_STARTED sets another loader from epoch 3 on."""
    epochs: list[list[int]] = []
    for limit in limits:
        make = {"plain": plain, "stateful": stateful}[kind]
        first, second = make(), make(other)
        second.generator.manual_seed(5)
        model = nn.Linear(1, 1)

        def forward(model: nn.Module, x: Tensor) -> Tensor:
            epochs[-1].extend(x.tolist())
            return model(x.float()[:, None]).square().mean() * 1e-6

        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward)
        Checkpoint(directory).attach(trainer)

        def choose(trainer: Any, first: Any = first, second: Any = second) -> None:
            trainer.set_data(second if trainer.state.epoch > 2 else first)
            epochs.append([])

        trainer.add_event_handler(Events.EPOCH_STARTED, choose)
        trainer.run(first, max_epochs=limit)
    return epochs


@pytest.mark.parametrize("kind", ["plain", "stateful"])
@pytest.mark.parametrize("other", [SAMPLES, SAMPLES + 8], ids=["same size", "other size"])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_loader_that_is_set_later_is_not_given_the_generators_of_the_one_before(
    stop: int, other: int, kind: str, tmp_path: Path
) -> None:
    """A run that resumes where the data changes reads what one does that was not stopped, and so does one before or after."""
    whole = curriculum(tmp_path / "whole", kind, 4, other=other)
    assert curriculum(tmp_path / "resumed", kind, stop, 4, other=other) == whole


def shards(directory: Path, kind: str, *limits: int) -> list[int]:
    """The samples of runs in new processes, where EPOCH_STARTED sets a shard of seven in every second epoch of two."""
    seen: list[int] = []
    for limit in limits:
        model = nn.Linear(1, 1)

        def forward(model: nn.Module, x: Tensor) -> Tensor:
            seen.extend(x.int().tolist())
            return model(x.float()[:, None]).square().mean() * 1e-6

        def shard(epoch: int, kind: str = kind) -> Any:
            samples = torch.arange(7) + 100 * epoch
            return ResumableLoader(samples, 1, shuffle=True, seed=3) if kind == "shuffled" else samples.split(1)

        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-3), forward)
        Checkpoint(directory, every=1).attach(trainer)
        trainer.add_event_handler(Events.EPOCH_STARTED(every=2), lambda engine: engine.set_data(shard(engine.state.epoch)))
        trainer.run(shard(0), max_iters=limit, epoch_length=2)
    return seen


@pytest.mark.parametrize("kind", ["in order", "shuffled"])
def test_a_shard_that_an_epoch_begins_with_is_read_from_its_beginning(kind: str, tmp_path: Path) -> None:
    """A run that resumes there does so too, and ignores the place in the shard before; within the epoch it continues."""
    whole = shards(tmp_path / "whole", kind, 4)
    assert len({*whole}) == 4
    for stop in (2, 3):
        assert shards(tmp_path / str(stop), kind, stop, 4) == whole


@pytest.mark.parametrize("epoch_length", [None, 9])
def test_left_in_this_process_the_loader_of_the_epoch_is_asked_for(epoch_length: int | None) -> None:
    """No checkpoint was read, so none is spoken of; what the line says can be done."""
    seen: list[int] = []

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        seen.extend(x.tolist())
        return model(x[:, None].float()).square().mean()

    def stop() -> None:
        raise KeyboardInterrupt

    model = nn.Linear(1, 1)
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.0), forward)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), stop)
    first, other = plain(shuffle=False), plain(shuffle=False, batch_size=6)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(first, max_epochs=2, epoch_length=epoch_length)
    with pytest.raises(ValueError, match="data must be unchanged to resume in the middle of an epoch") as caught:
        trainer.run(other, max_epochs=2, epoch_length=epoch_length)
    assert str(caught.value).endswith(
        "; continue with the loader that it began with, to the end of this epoch N by run(loader, max_epochs=N), or make "
        "another trainer"
    )
    if epoch_length is None:
        trainer.run(first, max_epochs=1)
        trainer.run(other, max_epochs=2)
        assert seen == [*range(SAMPLES)] * 2
