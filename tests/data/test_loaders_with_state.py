"""A run that is broken off in the middle of a pass of a loader with a state sees each sample as a loop by hand does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from ignite_train import ForwardOutput, Trainer, create_trainer
from ignite_train.data.how_exact import how_exact
from ignite_train.handlers import Checkpoint
from ranks import run_ranks

SAMPLES, EPOCHS, UPDATES = 6, 3, 9  # three batches of two in an epoch


class Augmented(Dataset[Tensor]):
    """The numbers from 0, each with a random fraction."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(())


class Numbers(IterableDataset[Tensor]):
    """A stream with a state."""

    at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < SAMPLES:
            self.at += 1
            yield torch.tensor(float(self.at - 1))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class Restarting:
    """A loader with a state and no length, which begins the next pass when its state is that of the end of one."""

    at = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.at %= SAMPLES
        while self.at < SAMPLES:
            self.at += 2
            yield torch.tensor([self.at - 2.0, self.at - 1.0])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class Beginning(Restarting):
    """A loader that has a state only once it is read."""

    def __iter__(self) -> Iterator[Tensor]:
        self.begun = True
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self, "begun"):
            raise RuntimeError("not begun")
        return super().state_dict()


class Eager:
    """A loader that begins where it is opened, and draws from a generator of its own, which is in its state."""

    def __init__(self) -> None:
        self.generator, self.order, self.is_loaded = seeded(), list[int](), False

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[Tensor]:
        if not self.is_loaded:
            self.order = torch.randperm(SAMPLES, generator=self.generator).tolist()
        self.is_loaded = False
        return self._rest()

    def _rest(self) -> Iterator[Tensor]:
        while self.order:
            batch, self.order = self.order[:2], self.order[2:]
            yield torch.tensor([float(index) for index in batch])

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order, self.is_loaded = state["order"], True
        self.generator.set_state(state["generator"])


class Shuffled:
    """Draws from a generator of its own, a number at a time, and has no state."""

    def __init__(self) -> None:
        self.generator = seeded()

    def __iter__(self) -> Iterator[int]:
        order = list(INDEX)
        while order:
            yield order.pop(int(torch.randint(len(order), (), generator=self.generator)))


class Drawing:
    """A source of a pipeline with a state, in which its generator is not."""

    def __init__(self) -> None:
        self.at, self.generator = 0, seeded()

    def __iter__(self) -> Iterator[float]:
        while self.at < SAMPLES:
            self.at += 1
            yield self.at - 1 + float(torch.rand((), generator=self.generator))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class AtOnce(Sampler[int]):
    """A sampler of a user's, which draws its order where it is opened, and not when it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


def loader_of(**options: Any) -> StatefulDataLoader[Tensor]:
    return StatefulDataLoader(Augmented(), **options)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def pipeline(sampler: Any) -> Any:
    """Of nodes of torchdata."""
    batches = nodes.Batcher(nodes.SamplerWrapper(sampler), 2)
    return nodes.Loader(nodes.Mapper(batches, lambda batch: torch.tensor(batch) + torch.rand(2)))


def in_a_thread(source: Any, ahead: int = 2, workers: int = 1) -> Any:
    """A pipeline whose samples are read before they are asked for."""
    mapped = nodes.ParallelMapper(nodes.Batcher(source, 2), torch.Tensor, num_workers=workers, method="thread")
    return nodes.Loader(nodes.Prefetcher(mapped, ahead) if ahead else mapped)


INDEX = range(SAMPLES)
LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: loader_of(batch_size=2, shuffle=True, generator=seeded()),
    "subset": lambda: loader_of(batch_size=2, sampler=SubsetRandomSampler(INDEX)),
    "subset, loader with a generator": lambda: loader_of(batch_size=2, sampler=SubsetRandomSampler(INDEX), generator=seeded()),
    "weighted": lambda: loader_of(batch_size=2, sampler=WeightedRandomSampler(torch.arange(1.0, 7.0), SAMPLES)),
    "two workers": lambda: StatefulDataLoader(torch.arange(6.0), 2, sampler=SubsetRandomSampler(INDEX), num_workers=2),
    "random": lambda: loader_of(batch_size=2, sampler=RandomSampler(INDEX)),
    "without batches": lambda: StatefulDataLoader(Augmented(SAMPLES // 2), batch_size=None, shuffle=True, generator=seeded()),
    "nodes": lambda: pipeline(SequentialSampler(INDEX)),
    "nodes, drawn from the process": lambda: pipeline(RandomSampler(INDEX)),
    "nodes, drawn from a generator": lambda: pipeline(RandomSampler(INDEX, generator=seeded())),
    "nodes, a source that draws": lambda: nodes.Loader(
        nodes.Mapper(nodes.Batcher(nodes.IterableWrapper(Drawing()), 2), torch.tensor)
    ),
    "stream": lambda: StatefulDataLoader(Numbers(), 2),
    "of a user's": Eager,
}
IN_THREADS: dict[str, Callable[[], Any]] = {
    "read in a thread": lambda: in_a_thread(nodes.SamplerWrapper(RandomSampler(INDEX, generator=seeded()))),
    "mapped in threads": lambda: in_a_thread(nodes.SamplerWrapper(RandomSampler(INDEX, generator=seeded())), 0, 2),
    "a source without a state": lambda: in_a_thread(nodes.IterableWrapper(Shuffled())),
}
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * ("workers" in kind)) for kind in LOADERS]
)


def make(fails_in: int | None = None) -> tuple[Trainer, list[list[float]]]:
    """A trainer, and the micro-batches of the updates that it has made."""
    model, seen, fails = idist.auto_model(nn.Linear(1, 1)), list[list[float]](), [fails_in]

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        if len(seen) + 1 == fails[0]:
            fails.clear()
            fails.append(None)
            raise ConnectionError("once")
        seen.append(x.flatten().tolist())
        return ForwardOutput(model(x.reshape(-1, 1)).square().sum(), x.numel())

    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4), forward), seen


def by_hand(kind: str) -> list[list[float]]:
    torch.manual_seed(1)
    loader = LOADERS[kind]()
    return [batch.flatten().tolist() for _ in range(EPOCHS) for batch in loader]


@kinds
@pytest.mark.sampled(8)
@pytest.mark.parametrize("epoch_length", [None, 2])
@pytest.mark.parametrize("again", ["in the process", "in another one"])
def test_a_run_that_was_stopped_goes_on(kind: str, epoch_length: int | None, again: str, tmp_path: Path) -> None:
    """After any update, also the last one of a pass, whose end was not read then."""
    expected = by_hand(kind)
    for stop in (2, 3, 5) if "workers" in kind else range(1, UPDATES):
        trainer, seen = make()
        Checkpoint(tmp_path / str(stop)).attach(trainer)
        torch.manual_seed(1)
        loader = LOADERS[kind]()
        trainer.run(loader, max_iters=stop, epoch_length=epoch_length)
        if again == "in another one":
            done, (trainer, seen) = seen, make()
            Checkpoint(tmp_path / str(stop)).attach(trainer)
            torch.manual_seed(2)
            trainer.run(LOADERS[kind](), max_iters=UPDATES, epoch_length=epoch_length)
            seen = done + seen
        else:
            trainer.run(loader, max_iters=UPDATES, epoch_length=epoch_length)
        assert seen == expected, stop


@pytest.mark.sampled(2)
@pytest.mark.parametrize("epoch_length", [None, 2])
@pytest.mark.parametrize("kind", IN_THREADS)
def test_a_pipeline_that_reads_in_threads_goes_on(kind: str, epoch_length: int | None, tmp_path: Path) -> None:
    """In another process: whether a thread has drawn an order before or after the generators are put back."""
    loader = IN_THREADS[kind]()
    expected = [batch.tolist() for _ in range(EPOCHS) for batch in loader]
    for stop in range(1, UPDATES):
        found = list[list[float]]()
        for limit in (stop, UPDATES):
            trainer, seen = make()
            Checkpoint(tmp_path / str(stop)).attach(trainer)
            trainer.run(IN_THREADS[kind](), max_iters=limit, epoch_length=epoch_length)
            found += seen
        assert found == expected, stop


@kinds
@pytest.mark.parametrize("epoch_length", [None, 3])
@pytest.mark.parametrize("update", [1, 4])
def test_the_first_update_of_an_epoch_that_failed_gets_the_same_samples_again(
    kind: str, epoch_length: int | None, update: int
) -> None:
    """Before it nothing was given, after which the place could be noted."""
    trainer, seen = make(fails_in=update)
    torch.manual_seed(1)
    loader = LOADERS[kind]()
    with pytest.raises(ConnectionError, match="once"):
        trainer.run(loader, max_iters=UPDATES, epoch_length=epoch_length)
    trainer.run(loader, max_iters=UPDATES, epoch_length=epoch_length)
    in_order = [[int(one) for one in batch] for batch in seen]
    assert in_order == [[int(one) for one in batch] for batch in by_hand(kind)]


@pytest.mark.parametrize("epoch_length", [None, 2])
@pytest.mark.parametrize("fails_in", [None, 1, 2])
def test_a_loader_of_a_users_class_may_have_no_state_before_it_is_read(epoch_length: int | None, fails_in: int | None) -> None:
    trainer, seen = make(fails_in)
    loader = Beginning()
    if fails_in is not None:
        with pytest.raises(ConnectionError, match="once"):
            trainer.run(loader, max_iters=6, epoch_length=epoch_length)
    trainer.run(loader, max_iters=6, epoch_length=epoch_length)
    assert trainer.state.iteration == 6
    if fails_in != 1:  # of such a loader the place before its first group is not known
        assert seen == [[0, 1], [2, 3], [4, 5]] * 2


MAY_DIFFER: dict[str, Callable[[], Any]] = {
    "drawn at once": lambda: loader_of(batch_size=2, sampler=AtOnce()),
    "batches": lambda: loader_of(batch_sampler=BatchSampler(AtOnce(), 2, drop_last=False)),
    "batches of torch": lambda: loader_of(batch_sampler=BatchSampler(RandomSampler(INDEX, generator=seeded()), 2, False)),
    "without batches": lambda: loader_of(batch_size=None, sampler=SubsetRandomSampler(INDEX)),
}


@pytest.mark.parametrize("kind", [*LOADERS, *MAY_DIFFER])
def test_a_sampler_that_torchdata_opens_several_times_is_named(kind: str) -> None:
    doubts, _ = how_exact((LOADERS | MAY_DIFFER)[kind]())
    assert [doubt for doubt in doubts if "several times" in doubt] == doubts[len(doubts) - (kind in MAY_DIFFER) :]


def stopped_at_the_end_of_an_epoch(directory: Path, kind: str) -> list[list[float]]:
    found = []
    for updates in (3, 5):
        trainer, seen = make()
        Checkpoint(directory).attach(trainer)
        loader = Restarting() if kind == "restarting" else pipeline(SequentialSampler(INDEX))
        trainer.run(loader, max_iters=updates)
        found += [[int(one) for one in batch] for batch in seen]
        found.append([trainer.state.epoch])
    return found


@pytest.mark.parametrize("kind", ["nodes", "restarting"])
def test_on_two_ranks_an_epoch_that_was_done_is_not_repeated(kind: str, tmp_path: Path) -> None:
    """Each rank reads one micro-batch ahead there, so it knows the end of a pass by then."""
    each = [[0, 1], [2, 3], [4, 5], [1], [0, 1], [2, 3], [2]]
    assert run_ranks(stopped_at_the_end_of_an_epoch, tmp_path, kind) == [each, each]
