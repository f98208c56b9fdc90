"""Groups whose micro-batches arrive while earlier ones are computed: with worker processes, and nothing else differs."""

from __future__ import annotations

import copy
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from bits import bit_by_bit
from ignite_train import ForwardOutput, ResumableLoader, Trainer, TrainEvents, UpdateOptions, create_trainer
from ignite_train.data.arriving_group import ArrivingGroup
from ignite_train.data.samplers import set_epoch
from processes import DEADLINE_SECONDS
from ranks import run_ranks
from update_options import with_options


def group_of(number: int, size: int, *, is_sized: bool = True) -> tuple[ArrivingGroup, list[int], list[int]]:
    """A group over the numbers below `number`; which of them were read, and its length each time that it was complete."""
    read, complete, source = list[int](), list[int](), iter(range(number))

    def next_one() -> int:
        read.append(next(source))
        return read[-1]

    group = ArrivingGroup(next_one, size, is_sized=is_sized, on_complete=lambda group: complete.append(len(group)))
    return group, read, complete


def test_one_is_read_ahead() -> None:
    """So it is known which one is the last before it is given."""
    group, read, complete = group_of(5, 4)
    assert (read, complete, len(group)) == ([0, 1], [], 4)
    seen = [(number, len(read), len(group)) for number in group]
    assert seen == [(0, 2, 4), (1, 3, 4), (2, 4, 4), (3, 4, 4)]
    assert (complete, list(group), read) == ([4], [0, 1, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize("number", range(4))
def test_a_loader_that_ends_early_makes_it_shorter(number: int) -> None:
    """The length is right when the last one is given."""
    group, _, complete = group_of(number, 4, is_sized=False)
    assert [len(group) for _ in group] == [number if index >= number - 1 else 4 for index in range(number)]
    assert (len(group), complete, bool(group)) == (number, [number], number > 0)


def test_its_size_is_not_known_where_the_loader_has_no_length() -> None:
    """Also when all of it is there, so that it is the same for each forward of an update, and where one is run again."""
    group, _, _ = group_of(9, 3, is_sized=False)
    assert group.known_size is None
    assert (group.whole(), group.known_size) == ([0, 1, 2], None)
    assert group_of(9, 3)[0].known_size == 3


def test_it_is_used_as_a_list() -> None:
    """What is not a step of an iteration reads what it needs."""
    group, read, _ = group_of(9, 5)
    assert (group[0], len(read)) == (0, 2)
    assert (group[2], len(read)) == (2, 3)
    assert (group[-1], len(read)) == (4, 5)
    group[1] = 7
    assert (group[:2], list(group), 7 in group) == ([0, 7], [0, 7, 2, 3, 4], True)
    del group[0]
    group.append(8)
    assert (len(group), group.whole()) == (5, [7, 2, 3, 4, 8])


class Numbers(Dataset[Tensor]):
    """Sample i is i, and some noise that is drawn in the worker."""

    def __init__(self, noise: float = 0.01) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index)) + self.noise * torch.rand(4)


class Stream(IterableDataset[Tensor]):
    """The same, without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        numbers = Numbers()
        return (numbers[index] for index in range(len(numbers)))


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    noisy = x + 0.1 * torch.randn_like(x)
    return ForwardOutput((model(noisy) / 11).square().sum(), len(x), {"sum": x.sum()})


LOADERS: dict[str, Callable[[int], Any]] = {
    "plain": lambda workers: DataLoader(Numbers(), 2, shuffle=True, num_workers=workers),
    "own-generator": lambda workers: DataLoader(
        Numbers(), 2, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(3)
    ),
    "resumable": lambda workers: ResumableLoader(Numbers(), batch_size=2, shuffle=True, num_workers=workers),
    "stateful": lambda workers: StatefulDataLoader(Numbers(noise=0.0), 2, shuffle=True, num_workers=workers),
    "unsized": lambda workers: DataLoader(Stream(), 2, num_workers=workers),
}


def make(**arguments: Any) -> tuple[nn.Module, Trainer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    forward_ = arguments.pop("forward", forward)
    return model, create_trainer(model, optimizer, forward_, **with_options(accumulation_steps=4, **arguments))


def train_by_hand(model: nn.Module, loader: Any, epochs: int) -> None:
    """Groups of four, the last one smaller, along the mean over their samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        set_epoch(loader, epoch)
        micro_batches = list(loader)
        for start in range(0, len(micro_batches), 4):
            group = micro_batches[start : start + 4]
            outputs = [forward(model, micro_batch) for micro_batch in group]
            sum(output.loss for output in outputs).backward()
            for parameter in model.parameters():
                parameter.grad /= sum(output.sample_size for output in outputs)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.slow
def test_it_trains_as_the_loop_by_hand(kind: str) -> None:
    """The same micro-batches in the same groups, and the same draws of forward."""
    model, trainer = make()
    by_hand = copy.deepcopy(model)
    sizes: list[int | None] = []
    trainer.add_event_handler(TrainEvents.STEP_COMPLETED, lambda: sizes.append(trainer.state.group_size))
    torch.manual_seed(2)
    trainer.run(LOADERS[kind](1), max_epochs=2)
    torch.manual_seed(2)
    train_by_hand(by_hand, LOADERS[kind](1), 2)

    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert (trainer.state.iteration, sizes) == (4, [None] * 4 if kind == "unsized" else [4, 2, 4, 2])


class Waits(Dataset[Tensor]):
    """A sample that can only be had when the micro-batch two before it was computed."""

    def __init__(self, computed: Any) -> None:
        self.computed = computed

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.computed.value < index - 1:
            if time.monotonic() > deadline:
                raise RuntimeError(f"sample {index} is asked for, and {self.computed.value} were computed")
            time.sleep(0.001)
        return torch.full((4,), float(index))


def test_no_forward_waits_for_the_whole_group() -> None:
    """A group that is fetched whole would wait for ever."""
    computed = multiprocessing.get_context("fork").Value("i", 0)

    def counting(model: nn.Module, x: Tensor) -> ForwardOutput:
        output = forward(model, x)
        computed.value += 1
        return output

    _, trainer = make(forward=counting)
    trainer.run(DataLoader(Waits(computed), 1, num_workers=1, multiprocessing_context="fork"), max_epochs=1)
    assert (computed.value, trainer.state.iteration) == (8, 2)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.slow
def test_a_group_that_breaks_off_is_repeated_bitwise(kind: str) -> None:
    """An error in the second forward of a group, when not all of it has arrived; the next `run` does it again."""
    if kind == "unsized":
        pytest.skip("resuming reads past what was done, in another pass of the stream's workers")
    ends = []
    for fails in (False, True):
        calls = 0

        def failing(model: nn.Module, x: Tensor) -> ForwardOutput:
            nonlocal calls
            calls += 1
            if fails and calls == 6:  # noqa: B023
                raise RuntimeError("forward fails")
            return forward(model, x)

        model, trainer = make(forward=failing)
        loader = LOADERS[kind](1)
        before: list[Tensor] = []
        trainer.add_event_handler(Events.ITERATION_STARTED, lambda: before.append(torch.get_rng_state()))  # noqa: B023
        torch.manual_seed(2)
        if fails:
            with pytest.raises(RuntimeError, match="forward fails"):
                trainer.run(loader, max_epochs=2)
            torch.set_rng_state(before[-1])
        trainer.run(loader, max_epochs=2)
        ends.append(bit_by_bit([model.state_dict(), trainer.state.num_micro_batches, trainer.state.iteration]))
    assert ends[0] == ends[1]


def test_a_handler_that_replaces_the_group_gets_all_of_it() -> None:
    """What it puts there is trained on, also if it has read nothing of the group; the next group follows in the data."""
    seen: list[float] = []

    def look(model: nn.Module, x: Tensor) -> ForwardOutput:
        seen.append(float(x[0, 0].round()))
        return forward(model, x)

    _, trainer = make(forward=look)

    @trainer.on(Events.GET_BATCH_COMPLETED)
    def replace() -> None:
        if trainer.state.iteration == 0:
            trainer.state.batch = [torch.full((2, 4), 90.0 + index) for index in range(4)]
        else:
            trainer.state.batch = [micro_batch + 50 for micro_batch in trainer.state.batch]

    trainer.run(DataLoader(Numbers(), 2, num_workers=1), max_epochs=1)
    assert seen == [90, 91, 92, 93, 58, 60]


def test_waiting_within_an_update_is_time_of_the_data() -> None:
    """And then the forward begins again."""
    _, trainer = make()
    changes: list[tuple[str | None, str | None]] = []
    trainer.sections.listeners.append(lambda before, after: changes.append((before, after)))
    trainer.run(DataLoader(Numbers(), 2, num_workers=1), max_epochs=1)
    assert ("backward", "data") in changes or ("forward", "data") in changes


def train_on_ranks(workers: int, wrapped: bool) -> Any:
    """Rank 0 has six micro-batches and rank 1 has five."""
    multiprocessing.current_process()._config["daemon"] = False  # those of `run_ranks` are, and could not start workers
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    module = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = UpdateOptions(reduction="auto" if wrapped else "explicit")
    trainer = create_trainer(module, optimizer, forward, accumulation_steps=4, options=options)
    data = [torch.full((4,), float(index)) for index in range(11)][: 11 - 2 * idist.get_rank()]
    torch.manual_seed(5 + idist.get_rank())
    context = "fork" if workers else None  # by default as this process was started: a new interpreter, which imports torch
    trainer.run(
        DataLoader(data, 2, num_workers=workers, generator=torch.Generator(), multiprocessing_context=context), max_epochs=2
    )
    return bit_by_bit(model.state_dict()), trainer.state.num_micro_batches, trainer.state.iteration


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "ddp"])
def test_ranks_of_unequal_length_train_as_without_workers(wrapped: bool) -> None:
    """Bitwise."""
    with_workers, without = (run_ranks(train_on_ranks, workers, wrapped) for workers in (1, 0))
    assert with_workers == without
    assert [count for _, count, _ in without] == [12, 10]
