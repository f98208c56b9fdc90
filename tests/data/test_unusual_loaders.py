"""Loaders and samplers that a loop by hand takes as they are: trained on in the same way, or refused with the reason."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from ignite.engine.deterministic import ReproducibleBatchSampler
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from bits import bit_by_bit
from ignite_train import (
    ForwardOutput,
    ResumableLoader,
    ShardedSampler,
    TokenBudgetSampler,
    Trainer,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.data.held import Held
from ignite_train.data.how_exact import how_exact
from ignite_train.handlers import Checkpoint, predict
from ranks import run_ranks


def make(accumulation_steps: Any = 1, **arguments: Any) -> tuple[Trainer, list[list[float]]]:
    """A trainer, and the micro-batches that it has trained on."""
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    seen: list[list[float]] = []

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        seen.append(x.flatten().tolist())
        return ForwardOutput((model(x.reshape(-1, 1).float()) * 1e-3).square().sum(), len(x))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return create_trainer(model, optimizer, forward, accumulation_steps=accumulation_steps, **arguments), seen


# --- lengths ---------------------------------------------------------------------------------------------------------------


class Endless:
    """A loader without an end that says a length, as one over a sampler with 10¹⁵ samples does."""

    def __len__(self) -> int:
        return 10**15

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(number)]) for number in count())


@pytest.mark.parametrize(("steps", "length"), [(1, 10**15), (7, -(-(10**15) // 7)), ([2, 3], 10**15 // 2)], ids=str)
def test_a_length_beyond_counting_is_known_at_once(steps: Any, length: int) -> None:
    trainer, seen = make(steps)
    assert trainer.total_updates(Endless()) == length
    trainer.run(Endless(), max_iters=2)
    assert trainer.state.epoch_length == length
    assert seen == [[float(number)] for number in range(len(seen))]


class WithoutLength:
    """What says that it has a length and then does not tell it, as some samplers and datasets do."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(torch.arange(3.0)[:, None], 1, sampler=WithoutLength()),
        lambda: DataLoader(WithoutLength(), 1, sampler=range(3)),
        lambda: DataLoader(torch.arange(3.0)[:, None], 1, sampler=np.arange(3)),  # type: ignore[arg-type]
    ],
    ids=["sampler", "dataset", "array"],
)
def test_a_length_that_is_not_told_is_none(loader: Callable[[], Any]) -> None:
    trainer, seen = make(2)
    trainer.run(loader(), max_epochs=1)
    assert seen == [[0.0], [1.0], [2.0]]


# --- epochs ----------------------------------------------------------------------------------------------------------------


def test_a_sampler_inside_a_batch_sampler_is_told_the_epoch() -> None:
    sampler = DistributedSampler(range(8), num_replicas=2, rank=1, seed=3)
    trainer, seen = make()
    trainer.run(DataLoader(torch.arange(8), batch_sampler=BatchSampler(sampler, 2, drop_last=False)), max_epochs=3)
    by_hand = DistributedSampler(range(8), num_replicas=2, rank=1, seed=3)
    expected = []
    for epoch in range(3):
        by_hand.set_epoch(epoch)
        order = [*by_hand]
        expected += [order[:2], order[2:]]
    assert seen == expected


class Balanced(BatchSampler):
    """Makes batches of its own, as in metric learning, and does not call torch's `__init__`."""

    def __init__(self) -> None:
        self.batches = [[0, 4, 1], [2, 5, 3]]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return 2


class Weighted(DistributedSampler):  # type: ignore[type-arg]
    """Makes indices of its own, and does not call torch's `__init__`."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter([3, 0, 2, 1, 5, 4])

    def __len__(self) -> int:
        return 6


class Drawn(RandomSampler):
    """The same."""

    def __init__(self) -> None:
        """Torch's is not called."""

    __iter__, __len__ = Weighted.__iter__, Weighted.__len__


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"batch_sampler": Balanced()},
        lambda: {"batch_sampler": ReproducibleBatchSampler(BatchSampler(range(6), 2, drop_last=False))},
        lambda: {"sampler": Weighted(), "batch_size": 2},
        lambda: {"sampler": Drawn(), "batch_size": 2},
    ],
    ids=["batches", "ignite", "distributed", "random"],
)
def test_a_sampler_may_leave_out_the_attributes_of_its_class(options: Callable[[], Any], tmp_path: Path) -> None:
    """Of training, a resumed run, an evaluation and `predict`."""
    by_hand = [one.flatten().tolist() for one in DataLoader(torch.arange(6.0), **options())]
    for updates in (len(by_hand) - 1, len(by_hand)):
        trainer, seen = make()
        Checkpoint(tmp_path, every=1, asynchronous=False).attach(trainer)
        trainer.run(DataLoader(torch.arange(6.0), **options()), max_iters=updates)
    assert seen == by_hand[-1:]
    evaluator = create_evaluator(nn.Linear(1, 1), lambda _, x: ForwardOutput(x.sum(), len(x), outputs=x))
    assert evaluator.run(DataLoader(torch.arange(6.0), **options())).metrics["loss"] == pytest.approx(2.5)
    assert predict(evaluator, DataLoader(torch.arange(6.0), **options())).tolist() == [*range(6)]


def test_an_evaluation_refuses_samples_that_a_sampler_inside_a_batch_sampler_repeats() -> None:
    evaluator = create_evaluator(nn.Linear(1, 1), lambda model, x: ForwardOutput(model(x[:, None]).sum(), len(x)))
    sampler = DistributedSampler(range(5), num_replicas=2, rank=0)
    loader = DataLoader(torch.arange(5.0), batch_sampler=BatchSampler(sampler, 2, drop_last=False))
    with pytest.raises(ValueError, match="each sample once, got a DistributedSampler that repeats 1"):
        evaluator.run(loader)


class Epochal(Dataset[float]):
    """Each sample is the epoch."""

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> float:
        return float(self.epoch)


@pytest.mark.slow
def test_a_dataset_in_a_worker_that_is_kept_is_told_the_epoch(tmp_path: Path) -> None:
    """Without it the dataset stays in the first epoch; and in a resumed run in that in which this run has started workers."""

    def train(**limit: int) -> list[list[float]]:
        trainer, seen = make()
        Checkpoint(tmp_path).attach(trainer)
        trainer.run(ResumableLoader(Epochal(), 2, shuffle=True, num_workers=1, persistent_workers=True), **limit)
        return seen

    assert train(max_epochs=3) + train(max_epochs=5) == [[float(epoch)] * 2 for epoch in range(5)]


class Counting:
    """A sampler whose order depends on the number of passes, which it counts itself."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(index + self.passes) % 4 for index in range(4)])


class Shuffling(Counting):
    """The same, by a list that it changes."""

    def __init__(self) -> None:
        self.passes = [0, 1, 2, 3]  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        self.passes.append(self.passes.pop(0))  # type: ignore[attr-defined]
        return iter([*self.passes])  # type: ignore[misc]


class CountingInTensor(Counting):
    """The same, by a tensor without dimensions."""

    def __init__(self) -> None:
        self.passes = torch.tensor(0)  # type: ignore[assignment]


class Told(Counting):
    """The same, by the epoch that it is told; a pass leaves something behind."""

    def set_epoch(self, epoch: int) -> None:
        self.passes = epoch


class Drawing(Counting):
    """One whose order is drawn; what it remembers changes nothing, and is not a number."""

    def __init__(self) -> None:
        self.passes = "none"  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        self.passes = "some"  # type: ignore[assignment]
        return iter(torch.randperm(4).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("again", ["in-the-process", "in-another-process"])
@pytest.mark.parametrize("updates", [2, 4, 6], ids=lambda updates: f"after-{updates}")
@pytest.mark.parametrize("kind", [Counting, Shuffling, CountingInTensor, Told, Drawing])
def test_a_sampler_that_remembers_passes_is_warned_about(
    kind: type[Counting], updates: int, again: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever the samples differ from those of a run that was not stopped."""

    def loader() -> Any:
        sampler: Any = kind()
        return DataLoader(torch.arange(4), 1, sampler=sampler)

    def run(trainer: Trainer, data: Any, updates: int) -> None:
        trainer.run(data, max_iters=updates)

    whole, expected = make()
    run(whole, loader(), 12)
    trainer, seen = make()
    Checkpoint(tmp_path).attach(trainer)
    data = loader()
    run(trainer, data, updates)
    caplog.clear()
    if again == "in-another-process":
        done, data = seen, loader()
        trainer, seen = make()
        Checkpoint(tmp_path).attach(trainer)
        run(trainer, data, 12)
        seen = done + seen
    else:
        run(trainer, data, 12)
    warned = any("the sampler is not as it was" in line and f"{kind.__name__}.passes: " in line for line in caplog.messages)
    assert warned == (seen != expected)
    assert warned is False or kind in (Counting, Shuffling, CountingInTensor)


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(np.array(2.0), id="array without dimensions"),
        pytest.param(torch.eye(2).to_sparse(), id="sparse"),
        pytest.param(torch.ones(3, device="meta"), id="meta"),
        pytest.param(torch.ones(2**9, 2**9), id="large"),
    ],
)
def test_a_sampler_may_hold_any_array(held: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is trained on, and nothing is said about what has not changed, when a run resumes."""
    for updates in (2, 4):
        sampler = Told()
        sampler.held = held  # type: ignore[attr-defined]
        sampler.objects = [object()]  # type: ignore[attr-defined]
        trainer, seen = make()
        Checkpoint(tmp_path).attach(trainer)
        trainer.run(DataLoader(torch.arange(4), 1, sampler=sampler), max_iters=updates)
    assert seen == [[3], [0]]
    assert "the sampler is not as it was" not in caplog.text


class Random(Epochal):
    """Each sample is drawn."""

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["of the process", "of the loader"])
@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
def test_workers_draw_what_they_draw_in_a_loop_by_hand(kept: bool, own: bool) -> None:
    """Their seed is drawn from the generator of the loader, and so is another one where that has another seed."""

    def loader(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed) if own else None
        torch.manual_seed(0 if own else seed)
        return DataLoader(Random(), 2, num_workers=1, persistent_workers=kept, generator=generator)

    def trained(seed: int) -> list[list[float]]:
        trainer, seen = make()
        trainer.run(loader(seed), max_epochs=1)
        return seen

    assert trained(3) == [x.tolist() for x in loader(3)]
    assert trained(4) == [x.tolist() for x in loader(4)] != trained(3)


@pytest.mark.parametrize("event", [Events.ITERATION_COMPLETED(once=2), Events.EPOCH_COMPLETED], ids=["within", "at-the-end"])
def test_workers_that_are_kept_make_one_pass_at_a_time(event: Any) -> None:
    """An evaluation on the loader that is trained on would end the epoch; when the pass is over it may begin."""
    trainer, seen = make()
    evaluator = create_evaluator(nn.Linear(1, 1), lambda model, x: ForwardOutput(model(x[:, None]).sum(), len(x)))
    loader = DataLoader(torch.arange(6.0), 1, num_workers=1, persistent_workers=True)
    trainer.add_event_handler(event, lambda: evaluator.run(loader))
    if event is Events.EPOCH_COMPLETED:
        trainer.run(loader, max_epochs=2)
        assert len(seen) == 12
        return
    with pytest.raises(ValueError, match="data must not be read elsewhere in the middle of a pass"):
        trainer.run(loader, max_epochs=2)
    trainer.run(loader, max_epochs=2)  # the handler was due once
    assert [x for (x,) in seen] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] * 2


PASSES = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] * 2


@pytest.mark.parametrize("between", ["updates", "runs"])
@pytest.mark.parametrize("epoch_length", [4, 6])
def test_workers_that_are_kept_make_one_pass_at_a_time_across_epochs(epoch_length: int, between: str) -> None:
    """With `epoch_length` too: a pass elsewhere would end this one. Where nothing is left of it, that does no harm."""
    trainer, seen = make()
    evaluator = create_evaluator(nn.Linear(1, 1), lambda model, x: ForwardOutput(model(x[:, None]).sum(), len(x)))
    loader, evaluated = DataLoader(torch.arange(6.0), 1, num_workers=1, persistent_workers=True), list[int]()

    def train() -> None:
        if between == "updates":
            trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), lambda: evaluator.run(loader))
            trainer.run(loader, max_iters=12, epoch_length=epoch_length)
        else:
            trainer.run(loader, max_epochs=1, epoch_length=epoch_length)
            evaluator.run(loader)
            evaluated.append(evaluator.state.iteration)
            trainer.run(loader, max_iters=12)

    if epoch_length == 6:
        train()
        assert [x for (x,) in seen] == PASSES
        return
    with pytest.raises(ValueError, match="in the middle of a pass"):
        train()
    assert [x for (x,) in seen] == PASSES[:4]
    assert evaluated == ([6] if between == "runs" else [])


def test_a_pass_that_is_continued_is_alone_again() -> None:
    """The end of a run has let others read the loader; the next run reads on."""
    trainer, seen = make()
    evaluator = create_evaluator(nn.Linear(1, 1), lambda model, x: ForwardOutput(model(x[:, None]).sum(), len(x)))
    loader = DataLoader(torch.arange(6.0), 1, num_workers=1, persistent_workers=True)
    trainer.run(loader, max_epochs=1, epoch_length=3)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=4), lambda: evaluator.run(loader))
    with pytest.raises(ValueError, match="data must not be read elsewhere in the middle of a pass"):
        trainer.run(loader, max_epochs=2)
    assert [x for (x,) in seen] == PASSES[:4]


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_epochs": 3, "epoch_length": 4}], ids=["epochs", "epoch-length"])
@pytest.mark.parametrize("number", [1, 6])
def test_a_pass_of_the_users_own_over_kept_workers_is_noticed(number: int, limit: dict[str, int]) -> None:
    """As `next(iter(loader))` in a handler, to show a micro-batch: the run would train on with what that pass has left."""
    trainer, seen = make()
    loader = DataLoader(torch.arange(6.0), 1, num_workers=1, persistent_workers=True)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=number), lambda: next(iter(loader)))
    if number == 6:  # nothing is left of the first pass
        trainer.run(loader, **limit)
        assert [x for (x,) in seen] == PASSES
        return
    with pytest.raises(ValueError, match="data must not be read elsewhere in the middle of a pass"):
        trainer.run(loader, **limit)
    assert [x for (x,) in seen] == PASSES[:1]


@pytest.mark.slow
def test_workers_that_are_kept_train_on_in_the_next_run() -> None:
    """With `epoch_length`, from where the run before has ended; and another trainer may begin a pass of its own."""
    trainer, seen = make()
    loader = DataLoader(torch.arange(6.0), 1, num_workers=1, persistent_workers=True)
    for updates in (4, 8, 12):
        trainer.run(loader, max_iters=updates, epoch_length=3)
    assert [x for (x,) in seen] == PASSES
    trainer.run(loader, max_iters=14)
    other, seen = make()
    other.run(loader, max_iters=12, epoch_length=3)
    assert [x for (x,) in seen] == PASSES


@pytest.mark.parametrize("fetch", [{}, {"fetch_in_thread": True}], ids=["plain", "in-thread"])
@pytest.mark.parametrize("stop", [None, 3, 4, 5, 8], ids=str)
def test_with_epoch_length_a_pass_has_the_order_of_its_number(stop: int | None, fetch: Any, tmp_path: Path) -> None:
    """From 0, across epochs of another length, and also where the run was stopped between two passes or within one."""
    sampler, expected = ShardedSampler(range(4), shuffle=True, seed=5), list[list[float]]()
    for number in range(3):
        sampler.set_epoch(number)
        expected += [[index] for index in sampler]
    found: list[list[float]] = []
    for updates in (12,) if stop is None else (stop, 12):
        trainer, seen = make()
        Checkpoint(tmp_path).attach(trainer)
        loader = ResumableLoader(torch.arange(4), 1, shuffle=True, seed=5, **fetch)
        trainer.run(loader, max_iters=updates, epoch_length=3)
        found += seen
    assert found == expected


def test_with_epoch_length_a_pass_may_have_one_micro_batch() -> None:
    """It is repeated; a pass without any ends the run, since it would be repeated forever."""
    trainer, seen = make()
    trainer.run([torch.ones(1)], max_epochs=2, epoch_length=3)
    assert seen == [[1.0]] * 6
    trainer, seen = make()
    with pytest.raises(ValueError, match="data"):
        trainer.run([], max_epochs=2, epoch_length=3)
    assert seen == []


class Remembering:
    """Has a state, knows its length, and reads on from where it is; where nothing is left, from the beginning."""

    def __init__(self) -> None:
        self.at, self.passes = 0, 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Tensor]:
        self.passes, self.at = self.passes + (self.at == 4), self.at % 4
        while self.at < 4:
            self.at += 1
            yield torch.tensor([10.0 * self.passes + self.at])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at, self.passes = state_dict["at"], state_dict["passes"]


class Permuting:
    """Has a state, and a permutation that it makes when a pass begins and drops when the pass has come to its end."""

    def __init__(self) -> None:
        self.generator, self.at, self.order = random.Random(3), 0, list[int]()  # noqa: S311

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Tensor]:
        if not self.order:
            self.at, self.order = 0, self.generator.sample(range(4), 4)
        while self.at < 4:
            self.at += 1
            yield torch.tensor([self.order[self.at - 1]])
        self.order = []

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": list(self.order), "generator": self.generator.getstate()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at, self.order = state_dict["at"], list(state_dict["order"])
        version, numbers, gauss = state_dict["generator"]
        self.generator.setstate((version, tuple(numbers), gauss))


class PermutingAnew(Permuting):
    """The same; a pass starts from its beginning unless a state was loaded before it."""

    is_loaded = False

    def __iter__(self) -> Iterator[Tensor]:
        self.order, self.is_loaded = self.order if self.is_loaded else [], False
        yield from super().__iter__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.is_loaded = True


class PermutingAtOnce(Permuting):
    """The same with an iterator that makes its permutation where it is opened."""

    def __iter__(self) -> Iterator[Tensor]:
        if not self.order:
            self.at, self.order = 0, self.generator.sample(range(4), 4)
        return super().__iter__()


class Continuing:
    """Begins each pass from its start; after loading it continues once where it was, in a generator."""

    def __init__(self) -> None:
        self.given = self.resumes_at = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.resumes_at = self.resumes_at, 0
        for self.given in range(begin + 1, 5):
            yield torch.tensor([float(self.given)])

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = self.resumes_at = state_dict["given"]


class CountingPasses(Continuing):
    """Is at the beginning of the next pass once its generator ends, in whatever way."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.resumes_at = self.resumes_at, 0
        try:
            for self.given in range(begin + 1, 5):
                yield torch.tensor([float(self.given + 10 * self.passes)])
        finally:
            self.given, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "passes": self.passes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.passes = state_dict["passes"]


STREAMS: dict[str, Callable[[], Any]] = {
    "drawn": lambda: DataLoader(torch.arange(4), 1, shuffle=True),
    "drawn, own generator": lambda: DataLoader(torch.arange(4), 1, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "resumable": lambda: ResumableLoader(torch.arange(4), 1, shuffle=True, seed=3),
    "stateful": lambda: StatefulDataLoader(torch.arange(4), 1, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "with a state": Remembering,
    "with a state, continuing once": Continuing,
    "with a state, counting passes": CountingPasses,
    "with an order in its state": Permuting,
    "with an order in its state, anew": PermutingAnew,
    "with an order in its state, at once": PermutingAtOnce,
}


def harmful_cuts(make_loader: Callable[[], Any], directory: Path, *, every: int | None = None, **options: Any) -> list[int]:
    """The updates after which a run of 11 cannot be broken off and resumed without ending with other bits."""

    def train(*stops: int) -> list[Any]:
        seen: list[Any] = []

        def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
            seen.append((float(x), float(torch.rand(()))))
            return ForwardOutput(model(x.reshape(-1, 1).float()).square().sum() * 1e-3, len(x))

        for updates in (*stops, 11):
            torch.manual_seed(1)
            model = nn.Linear(1, 1)
            trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), forward)
            Checkpoint(directory / str(stops), every=every).attach(trainer)
            trainer.run(make_loader(), max_iters=updates, **options)
        return [*seen, *model.weight.flatten().tolist()]

    whole = train()
    return [stop for stop in range(1, 11) if train(stop) != whole]


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_with_epoch_length_a_run_resumes_bitwise(kind: str, tmp_path: Path) -> None:
    """After any update: the same samples, and the same numbers that forward draws; also at the end of a pass."""
    assert harmful_cuts(STREAMS[kind], tmp_path, epoch_length=3) == []


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize(
    "kind",
    ["with a state", "with a state, continuing once", "with a state, counting passes", "with an order in its state, anew"],
)
def test_a_generator_with_a_state_resumes_bitwise(kind: str, every: int | None, tmp_path: Path) -> None:
    """Also after the last micro-batch of an epoch, where a generator ends the earlier pass only when it is read."""
    assert harmful_cuts(STREAMS[kind], tmp_path, every=every) == []


class Stumbling:
    """An iterator whose third `next` fails once."""

    def __init__(self) -> None:
        self.given, self.fails = 0, True

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self.given == 2 and self.fails:
            self.fails = False
            raise OSError("the connection is lost")
        self.given += 1
        return torch.tensor([float(self.given)])


def test_an_iterator_that_has_failed_once_is_read_on() -> None:
    """With `epoch_length`: nothing that it gave is lost, or asked for again."""
    trainer, seen = make()
    data = Stumbling()
    with pytest.raises(OSError, match="connection is lost"):
        trainer.run(data, max_iters=5, epoch_length=5)
    trainer.run(data, max_iters=5)
    assert seen == [[1.0], [2.0], [3.0], [4.0], [5.0]]


# --- seeds and order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [2**45, 2**53 + 1, 2**64 - 1, 2**64 + 3], ids=["45-bits", "54-bits", "64-bits", "65-bits"])
def test_seeds_of_many_bits_are_taken(seed: int) -> None:
    """As `torch.seed()` gives them, and larger ones than a generator takes. Another seed is another order."""
    orders = [[*ShardedSampler(range(64), shuffle=True, seed=one)] for one in (seed, seed - 1)]
    assert orders[0] != orders[1]
    assert all(sorted(order) == [*range(64)] for order in orders)
    loader = ResumableLoader(torch.arange(64), 64, shuffle=True, seed=seed)
    assert [int(one) for one in next(iter(loader))] == orders[0]


class OnlyIndexed:
    """A sampler by its items alone, which `iter` takes."""

    def __getitem__(self, index: int) -> int:
        return [2, 0, 1, 3][index]


class Late(OnlyIndexed):
    """A sampler that may draw when it is asked for the next sample."""

    def __iter__(self) -> Iterator[int]:
        return self._samples()

    def _samples(self) -> Iterator[int]:
        yield from range(4)


@pytest.mark.parametrize(("sampler", "may_draw"), [(OnlyIndexed(), True), (Late(), True), (np.arange(4), False), (None, False)])
def test_a_note_names_samplers_that_may_draw_while_they_are_read(sampler: Any, may_draw: bool) -> None:
    """A sampler of the user's own without a generator is named, since it cannot be seen when it draws."""
    _, note = how_exact(DataLoader(torch.arange(4), 2, sampler=sampler))
    assert ("draws its order while it is read" in note) == may_draw


def test_workers_that_give_what_is_ready_first_have_no_place_to_resume_at() -> None:
    with pytest.raises(ValueError, match="in_order must be left out of a ResumableLoader"):
        ResumableLoader(torch.arange(8), 2, shuffle=True, num_workers=2, in_order=False)
    ResumableLoader(torch.arange(8), 2, shuffle=True, num_workers=2, in_order=True)
    doubts, _ = how_exact(DataLoader(torch.arange(8), 2, num_workers=2, in_order=False))
    assert [doubt for doubt in doubts if "in_order=False" in doubt]


def test_a_loader_that_is_made_before_the_process_group_deals_samples_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks are those of the pass. Of one rank, as when it was made, each would train on all samples."""
    batches = TokenBudgetSampler([1] * 8, max_tokens=2, shuffle=False)
    loaders: list[Any] = [
        ResumableLoader(torch.arange(8), 2, shuffle=False),
        DataLoader(torch.arange(8), 2, sampler=ShardedSampler(range(8), shuffle=False)),
        ResumableLoader(torch.arange(8), batches=batches),
    ]
    monkeypatch.setattr("ignite_train.ranks.collectives.rank", lambda: 1)
    monkeypatch.setattr("ignite_train.ranks.collectives.world_size", lambda: 2)
    one_by_one = [[1, 3], [5, 7]]
    assert [[x.tolist() for x in loader] for loader in loaders] == [one_by_one, one_by_one, [[2, 3], [6, 7]]]
    assert [len(loader) for loader in loaders] == [2, 2, 2]


# --- memory ----------------------------------------------------------------------------------------------------------------


class Reusing:
    """Writes each micro-batch into one of a few buffers; where `gives` makes another object of it, in the same memory."""

    def __init__(self, buffers: int, gives: Callable[[Any], Any]) -> None:
        self.buffers, self.gives = [np.zeros(2, np.float32) for _ in range(buffers)], gives

    def __iter__(self) -> Iterator[Any]:
        for number in range(6):
            buffer = self.buffers[number % len(self.buffers)]
            buffer[:] = number
            yield self.gives(buffer)


GIVES: dict[str, Callable[[Any], Any]] = {
    "tensor": torch.from_numpy,
    "part of a tensor": lambda buffer: torch.from_numpy(buffer)[None],
    "array in a dict": lambda buffer: {"x": buffer},
}


@pytest.mark.parametrize("gives", GIVES)
@pytest.mark.parametrize(("buffers", "steps"), [(1, 2), (2, 3)])
def test_a_loader_that_writes_over_what_it_gave_is_refused(gives: str, buffers: int, steps: int) -> None:
    """An update would train on its last micro-batch as often as it has micro-batches."""
    trainer, seen = make(steps)
    with pytest.raises(ValueError, match=r"in a container and memory of its own.*such as tensor.clone"):
        trainer.run(Reusing(buffers, GIVES[gives]), max_epochs=1)
    assert seen == []


def test_memory_may_be_used_again_in_the_next_update() -> None:
    """And the same micro-batch may be given again, with NaN in it too."""
    expected = [[float(number)] * 2 for number in range(6)]
    for buffers, steps in ((1, 1), (2, 2)):
        trainer, seen = make(steps)
        trainer.run(Reusing(buffers, torch.from_numpy), max_epochs=1)
        assert seen == expected
    trainer, seen = make(3, protect=False)
    trainer.run([{"x": torch.tensor([1.0]), "never read": torch.tensor(float("nan"))}["x"]] * 3, max_epochs=1)
    assert seen == [[1.0]] * 3


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.ones(3, dtype=torch.complex64).conj(), id="conjugate"),
        pytest.param(torch.ones(3, dtype=torch.complex64).conj().imag, id="negative"),
        pytest.param(torch.ones(3, device="meta"), id="meta"),
        pytest.param(torch.tensor(True), id="0-d"),
        pytest.param(torch.ones(2, 3, dtype=torch.bfloat16).t(), id="transposed"),
        pytest.param(torch.ones(2, 2).to_sparse(), id="sparse"),
        pytest.param(torch.ones(9)[::3][:1], id="one element with a stride"),
    ],
)
def test_the_same_micro_batch_may_come_again(tensor: Tensor) -> None:
    """Of any kind of tensor: nothing was written over it."""
    held = Held([{"x": tensor}])
    held.check_against({"x": tensor})
    held.add({"x": tensor})
    held.check()


def _look_ahead() -> str:
    trainer, _ = make(protect=False, options=UpdateOptions(reduction="explicit"))
    try:
        trainer.run(Reusing(1, torch.from_numpy), max_epochs=1)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_memory_that_is_used_again_while_a_rank_reads_ahead_is_refused() -> None:
    """Ranks whose loaders have no length read one micro-batch ahead, so that one is enough."""
    assert all("in a container and memory of its own" in message for message in run_ranks(_look_ahead))


# --- stops from elsewhere --------------------------------------------------------------------------------------------------


class Interrupting(Dataset[Tensor]):
    """Draws each sample; before that of number `at` the process gets a signal."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return torch.randn(1)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("stop", [Trainer.terminate, Trainer.interrupt], ids=["terminate", "interrupt"])
def test_a_signal_during_a_fetch_changes_no_bit(stop: Callable[[Trainer], None], steps: int) -> None:
    """The update for which the group is read is done, so that nothing is drawn twice for it."""

    def train(at: int) -> tuple[list[list[float]], Any]:
        trainer, seen = make(steps)
        trainer.interrupt_resume_enabled = True
        before = signal.signal(signal.SIGUSR1, lambda *_: stop(trainer))
        loader = DataLoader(Interrupting(at), 1, shuffle=True)
        try:
            trainer.run(loader, max_epochs=2)
            trainer.run(loader, max_epochs=2)
        finally:
            signal.signal(signal.SIGUSR1, before)
        return seen, bit_by_bit(trainer.model.state_dict())

    whole = train(0)
    assert [at for at in range(1, 13) if train(at) != whole] == []


# --- a state that lacks something --------------------------------------------------------------------------------------------


class Buffered:
    """Gives 0 to 11 through a buffer of three, as a stream does that shuffles; its state is the place in the source alone."""

    def __init__(self) -> None:
        self.source = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[Tensor]:
        buffer: list[int] = []
        while self.source < 12:
            buffer.append(self.source)
            self.source += 1
            if len(buffer) > 3:
                yield torch.tensor([buffer.pop(0)])
        self.source = 0
        yield from (torch.tensor([one]) for one in buffer)

    def state_dict(self) -> dict[str, Any]:
        return {"source": self.source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.source = state["source"]


def test_micro_batches_that_a_state_lacks_are_counted(tmp_path: Path) -> None:
    """The run says how many its resumed epoch had too few, and that the state of the loader is why; the next epoch is whole."""
    for max_iters in (4, 24):
        trainer, seen = make()
        Checkpoint(tmp_path, asynchronous=False).attach(trainer)
        if max_iters == 4:
            trainer.run(Buffered(), max_iters=4)
            continue
        with pytest.warns(UserWarning, match=r"Buffered has len\(\) 12 and gave 9 .* run resumed: 3 are missing") as caught:
            trainer.run(Buffered(), max_epochs=2)
        assert len([one for one in caught if "len()" in str(one.message)]) == 1
    assert [one[0] for one in seen] == [*range(7, 12), *range(12)]
