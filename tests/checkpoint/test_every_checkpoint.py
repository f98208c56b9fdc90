"""A run continues bitwise from every checkpoint that it writes: whatever asked for it, at whatever moment, with any loader.

The reference is one run without a checkpoint and without a break. Another run writes its checkpoints and keeps all of them.
From each of them everything is built anew, under other seeds, and trained to the end: the samples of each update, the weights,
the moments and the random generators of the process must be those of the reference.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ignite.distributed as idist
import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from bits import bit_by_bit
from ignite_train import (
    ForwardOutput,
    ResumableLoader,
    TokenBudgetSampler,
    Trainer,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.checkpoint.manifest import Manifest
from ignite_train.checkpoint.retention import Retention
from ignite_train.handlers import Checkpoint, StopOnSignal, Validation
from ranks import run_ranks
from tiers import one_in

SAMPLES, BATCH, EPOCHS = 8, 2, 3  # a last micro-batch that is full: the loader is not exhausted by fetching it


# --- data -------------------------------------------------------------------------------------------------------------------


class Numbers(Dataset[Any]):
    """Each sample is its own index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return int(index)


class Augmented(Numbers):
    """Draws from a generator of its own, NumPy's."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(6)

    def __getitem__(self, index: int) -> Any:
        return index + 0.01 * self.rng.random()


class Stream(IterableDataset[Any]):
    """The samples in an order that a generator of the dataset's own chooses; it draws once more at the end."""

    def __init__(self, *, sized: bool) -> None:
        self.chance, self.sized = random.Random(8), sized  # noqa: S311

    def __iter__(self) -> Iterator[int]:
        yield from self.chance.sample(range(SAMPLES), SAMPLES)
        self.chance.random()


class SizedStream(Stream):
    """One that says how long it is."""

    def __len__(self) -> int:
        return SAMPLES


class Shuffled(Sampler[int]):
    """A sampler of the user's own, which draws before the first index and after the last."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from self._order()
        self._order()

    def _order(self) -> list[int]:
        if isinstance(self.draw, torch.Generator):
            return list(torch.randperm(SAMPLES, generator=self.draw).tolist())
        if isinstance(self.draw, random.Random):
            return self.draw.sample(range(SAMPLES), SAMPLES)
        return [int(index) for index in self.draw.permutation(SAMPLES)]


class Generated:
    """A generator function in a class, without a length or with one."""

    def __init__(self) -> None:
        self.options = {"generator": torch.Generator().manual_seed(5)}

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.randperm(SAMPLES, generator=self.options["generator"]).split(BATCH)
        torch.randperm(SAMPLES, generator=self.options["generator"])


class SizedGenerated(Generated):
    """One that says how long it is."""

    def __len__(self) -> int:
        return SAMPLES // BATCH


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def _plain(dataset: Any = None, **options: Any) -> Any:
    given = {"batch_sampler"} & options.keys()
    return DataLoader(Numbers() if dataset is None else dataset, **options if given else {"batch_size": BATCH, **options})


def _stateful(**options: Any) -> Any:
    return StatefulDataLoader(Numbers(), batch_size=BATCH, **options)


def _weights() -> Tensor:
    return torch.arange(1.0, SAMPLES + 1)


def _budget() -> TokenBudgetSampler:
    return TokenBudgetSampler([1 + index % 3 for index in range(SAMPLES)], max_tokens=2 * BATCH, shuffle=True, seed=3)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: list(torch.arange(SAMPLES).split(BATCH)),
    "in order": lambda: _plain(),
    "shuffle": lambda: _plain(shuffle=True),
    "shuffle, generator": lambda: _plain(shuffle=True, generator=_seeded()),
    "shuffle, generator, odd": lambda: _plain(shuffle=True, generator=_seeded(), batch_size=3),
    "shuffle, generator, drop_last": lambda: _plain(shuffle=True, generator=_seeded(), batch_size=3, drop_last=True),
    "sampler with a generator": lambda: _plain(sampler=Shuffled(_seeded())),
    "sampler with Python's": lambda: _plain(sampler=Shuffled(random.Random(4))),  # noqa: S311
    "sampler with NumPy's": lambda: _plain(sampler=Shuffled(np.random.default_rng(4))),
    "sampler with NumPy's old one": lambda: _plain(sampler=Shuffled(np.random.RandomState(4))),
    "sampler with the process's": lambda: _plain(sampler=Shuffled(torch.default_generator)),
    "batch_sampler": lambda: _plain(batch_sampler=BatchSampler(RandomSampler(Numbers(), generator=_seeded()), BATCH, False)),
    "subset": lambda: _plain(sampler=SubsetRandomSampler(range(SAMPLES))),
    "subset, generator": lambda: _plain(sampler=SubsetRandomSampler(range(SAMPLES), generator=_seeded())),
    "weighted": lambda: _plain(sampler=WeightedRandomSampler(_weights(), SAMPLES)),
    "weighted, generator": lambda: _plain(sampler=WeightedRandomSampler(_weights(), SAMPLES, generator=_seeded())),
    "replacement": lambda: _plain(sampler=RandomSampler(Numbers(), True, SAMPLES, _seeded())),
    "longer than the dataset": lambda: _plain(sampler=RandomSampler(Numbers(), False, 2 * SAMPLES, _seeded())),
    "augmented": lambda: _plain(Augmented(), shuffle=True, generator=_seeded()),
    "stream": lambda: _plain(Stream(sized=False)),
    "sized stream": lambda: _plain(SizedStream(sized=True)),
    "generator function": lambda: Generated(),
    "sized generator function": lambda: SizedGenerated(),
    "stateful": lambda: _stateful(),
    "stateful, shuffle": lambda: _stateful(shuffle=True),
    "stateful, shuffle, generator": lambda: _stateful(shuffle=True, generator=_seeded()),
    "stateful, sampler": lambda: _stateful(sampler=Shuffled(_seeded())),
    "resumable, augmented": lambda: ResumableLoader(Augmented(), BATCH, shuffle=True),
    "resumable": lambda: ResumableLoader(Numbers(), BATCH, shuffle=True, seed=3),
    "budget of tokens": lambda: ResumableLoader(Augmented(), batches=_budget()),
    "budget of tokens, plain": lambda: _plain(batch_sampler=_budget()),
}
WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "shuffle, 2 workers": lambda: _plain(shuffle=True, num_workers=2),
    "shuffle, generator, 1 worker": lambda: _plain(shuffle=True, generator=_seeded(), num_workers=1),
    "shuffle, 2 persistent workers": lambda: _plain(shuffle=True, num_workers=2, persistent_workers=True),
    "sampler, 2 persistent workers": lambda: _plain(sampler=Shuffled(_seeded()), num_workers=2, persistent_workers=True),
    "stateful, shuffle, 1 worker": lambda: _stateful(shuffle=True, num_workers=1),
    "resumable, 2 workers": lambda: ResumableLoader(Numbers(), BATCH, shuffle=True, num_workers=2),
}
LOADERS |= WITH_WORKERS
LOADERS_OF_RANKS: dict[str, Callable[[], Any]] = {
    "shares": lambda: DataLoader(torch.arange(SAMPLES - 2 * idist.get_rank()), BATCH, shuffle=True, generator=_seeded()),
    "shares without a length": lambda: Generated(),
}


# --- one run ----------------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """Everything that a script makes, and the samples of each update."""

    trainer: Trainer
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any
    seen: dict[int, Any]

    def result(self) -> Any:
        """What must be equal, bit by bit: weights, moments, counters and what the process's generators give next."""
        counters = {key: value for key, value in self.trainer.state_dict().items() if key not in ("max_epochs", "max_iters")}
        drawn = [torch.rand(3), np.random.random(3).tolist(), random.random()]  # noqa: S311
        return bit_by_bit([self.model.state_dict(), self.optimizer.state_dict(), counters, torch.get_rng_state(), *drawn])

    def run(self, **limits: Any) -> None:
        """Runs, and ends persistent workers: if the garbage collector does, their queues go first, and torch waits for each."""
        self.trainer.run(self.loader, **limits)
        if isinstance(self.loader, DataLoader):
            self.loader._iterator = None


def forward(model: nn.Module, micro_batch: Tensor) -> ForwardOutput:
    x = micro_batch.float().unsqueeze(1) / SAMPLES
    noise = float(np.random.random()) + random.random()  # noqa: S311
    return ForwardOutput(((model(x) - x.cos() - 0.1 * noise) ** 2).sum(), len(x))


def build(kind: str, accumulation_steps: int, seed: int) -> Job:
    """Everything new, under `seed`."""
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reduction: Any = "explicit" if idist.get_world_size() > 1 else "auto"
    trainer = create_trainer(
        model, optimizer, forward, accumulation_steps=accumulation_steps, options=UpdateOptions(reduction=reduction)
    )
    seen: dict[int, Any] = {}

    @trainer.on(Events.ITERATION_COMPLETED)
    def note() -> None:
        seen[trainer.state.iteration] = [micro_batch.tolist() for micro_batch in trainer.state.batch]

    return Job(trainer, model, optimizer, (LOADERS | LOADERS_OF_RANKS)[kind](), seen)


class Way(NamedTuple):
    """How a run comes to its checkpoints.

    Attributes:
        options: of the Checkpoint.
        prepare: what is attached to the trainer in the run that writes them, with that run's Checkpoint.
        always: what is attached in each run, also in the reference.
        limits: of the run that writes.
    """

    options: dict[str, Any] = {"every_epochs": 1}  # noqa: RUF012
    prepare: Callable[[Trainer, Checkpoint], Any] = lambda trainer, checkpoint: None
    always: Callable[[Trainer], Any] = lambda trainer: None
    limits: dict[str, int] = {"max_epochs": EPOCHS}  # noqa: RUF012


class KeepAll(Retention):
    """Keeps also those of an update that was saved again, at the end of its epoch."""

    def surplus(self, manifests: Sequence[Manifest]) -> list[int]:  # noqa: ARG002
        return []


RARELY = {"every": 10**6}
MOMENTS = {
    event.name: event
    for event in (
        *(Events.GET_BATCH_STARTED, Events.GET_BATCH_COMPLETED, Events.ITERATION_STARTED, TrainEvents.MICRO_BATCH_STARTED),
        *(TrainEvents.FORWARD_COMPLETED, TrainEvents.BACKWARD_COMPLETED, TrainEvents.GRADIENTS_READY),
        *(TrainEvents.STEP_COMPLETED, Events.ITERATION_COMPLETED, Events.EPOCH_STARTED, Events.EPOCH_COMPLETED),
    )
}


def _validate(event: Any) -> Callable[[Trainer, Checkpoint], Any]:
    """Has a metric that falls at each validation, so that each is the best so far."""

    def prepare(trainer: Trainer, checkpoint: Checkpoint) -> None:
        evaluator = checkpoint._run.evaluator
        assert evaluator is not None
        evaluator.forward = lambda model, x: ForwardOutput(x.sum() - trainer.state.iteration - trainer.state.epoch, 1)
        Validation(evaluator, [torch.zeros(1)]).attach(trainer, event)

    return prepare


def _at(event: Any, ask: Callable[[Trainer, Checkpoint], Any]) -> Callable[[Trainer, Checkpoint], Any]:
    return lambda trainer, checkpoint: trainer.add_event_handler(event, lambda: ask(trainer, checkpoint))


def _send(trainer: Trainer, checkpoint: Checkpoint) -> None:
    StopOnSignal([signal.SIGTERM]).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=6), lambda: signal.raise_signal(signal.SIGTERM))


WAYS: dict[str, Way] = {
    "default": Way({}),
    "every update and epoch": Way({"every": 1, "every_epochs": 1}),
    "few": Way({"every": 6, "every_epochs": 2}),
    "every_seconds": Way({"every_seconds": 1e-9}),
    "best after an epoch": Way({**RARELY, "score": "loss"}, _validate(Events.EPOCH_COMPLETED)),
    "best after an update": Way({**RARELY, "score": "loss"}, _validate(Events.ITERATION_COMPLETED(every=3))),
    "the epoch is ended": Way(
        {"every": 1, "every_epochs": 1},
        always=lambda trainer: trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.terminate_epoch),
    ),
    "max_iters": Way(RARELY, limits={"max_iters": 2}),
    "fewer epochs": Way(RARELY, limits={"max_epochs": 1}),
    "SIGTERM": Way(RARELY, _send),
}
for _name, _event in MOMENTS.items():
    for _number in (1, 2):
        _where = _event(once=_number if "EPOCH" in _name else 3 * _number)
        WAYS |= {
            f"save in {_name} {_number}": Way(RARELY, _at(_where, lambda _, checkpoint: checkpoint.save())),
            f"terminate in {_name} {_number}": Way(RARELY, _at(_where, lambda trainer, _: trainer.terminate())),
            f"interrupt in {_name} {_number}": Way(RARELY, _at(_where, lambda trainer, _: trainer.interrupt())),
        }


def checkpoints_of(kind: str, way: Way, accumulation_steps: int, directory: Path) -> list[Path]:
    """Runs until the way ends it, and gives each checkpoint that was written."""
    job = build(kind, accumulation_steps, seed=0)
    evaluator = create_evaluator(job.model, forward)
    checkpoint = Checkpoint(directory, **way.options)
    checkpoint.saver.retention = KeepAll(last=1, best=1, mode="min", every=None)
    checkpoint.attach(job.trainer, evaluator=evaluator)
    way.always(job.trainer)
    way.prepare(job.trainer, checkpoint)
    job.run(**way.limits)
    return sorted(directory.glob("update-*"))


def check(kind: str, name: str, directory: Path, accumulation_steps: int = 1, least: int = 1) -> None:
    """Resumes from each checkpoint and compares with the reference."""
    way = WAYS[name]
    whole = build(kind, accumulation_steps, seed=0)
    way.always(whole.trainer)
    whole.run(max_epochs=EPOCHS)
    expected = whole.result()
    found = checkpoints_of(kind, way, accumulation_steps, directory / "run")
    assert len(found) >= least
    for number, path in enumerate(found):
        if path.name == "update-00000000" and kind in ("stateful, shuffle", "stateful, shuffle, 1 worker"):
            continue  # torchdata draws the order when the loader is made, and no pass has been made whose place could be kept
        job = build(kind, accumulation_steps, seed=77 + number)
        Checkpoint(directory / f"resumed-{number}", **RARELY).attach(job.trainer)
        way.always(job.trainer)
        job.run(max_epochs=EPOCHS, resume=path)
        rest = {update: samples for update, samples in whole.seen.items() if update in job.seen}
        assert job.seen == rest, path.name
        assert list(job.seen) == list(whole.seen)[len(whole.seen) - len(job.seen) :], path.name
        assert job.result() == expected, path.name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind not in WITH_WORKERS][::2])  # all of them: the last test
def test_goes_on_from_every_update_and_every_epoch(kind: str, tmp_path: Path) -> None:
    """Resumed after each update, each end of an epoch and the end of the run, with every other kind of loader."""
    check(kind, "every update and epoch", tmp_path)


@pytest.mark.parametrize("name", ["terminate in GET_BATCH_COMPLETED 1", "interrupt in ITERATION_STARTED 2"])
def test_goes_on_after_a_stop_that_was_asked_for_before_the_update(name: str, tmp_path: Path) -> None:
    """The dataset draws from a generator of its own; what it drew for that update is not drawn again."""
    check("resumable, augmented", name, tmp_path)


@pytest.mark.slow
def test_goes_on_after_a_partial_group(tmp_path: Path) -> None:
    """Reading it has exhausted the loader, whose sampler draws after its last index, before the checkpoint of that update."""
    check("sampler with the process's", "every update and epoch", tmp_path, accumulation_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*WITH_WORKERS])
def test_goes_on_with_workers(kind: str, tmp_path: Path) -> None:
    """Resumed in the middle of an epoch that is not the first, at the end of one, and of the run; random numbers too."""
    check(kind, "few", tmp_path)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", one_in(4, WAYS))
def test_goes_on_from_whatever_asked_for_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Each cadence and each request in each event, with loaders that take turns."""
    number = list(WAYS).index(name)
    kinds = ("shuffle, generator", "sampler with Python's", "stateful, shuffle, generator", "weighted", "stateful, sampler")
    check(kinds[number % len(kinds)], name, tmp_path, accumulation_steps=(1, 2, 4)[number % 3])


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOADERS_OF_RANKS)
def test_goes_on_with_two_ranks(kind: str, tmp_path: Path) -> None:
    """Each rank finds its own place and its own generators again, also where one has less data than the other."""
    run_ranks(check, kind, "every update and epoch", tmp_path, 2)


@pytest.mark.slow
def test_workers_of_a_validation_that_are_started_again_leave_no_trace(tmp_path: Path) -> None:
    """A validation loader with persistent workers draws nothing from the generators of the process when it is opened."""
    opened: list[Any] = []
    WAYS["validation"] = Way({}, always=partial(_validate_in_a_worker, opened))
    try:
        check("list", "validation", tmp_path)
    finally:
        del WAYS["validation"]
        for held_out in opened:
            if held_out._iterator is not None:  # the garbage collector would wait five seconds for its worker
                held_out._iterator._shutdown_workers()


def _validate_in_a_worker(opened: list[Any], trainer: Trainer) -> None:
    held_out = DataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True)
    opened.append(held_out)
    model = trainer.model
    assert isinstance(model, nn.Module)
    Validation(create_evaluator(model, lambda model, x: ForwardOutput(x.sum().float(), 1)), held_out).attach(trainer)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("accumulation_steps", [1, 3, 4])
@pytest.mark.parametrize("kind", LOADERS)
def test_goes_on_from_every_checkpoint_of_every_way(kind: str, accumulation_steps: int, tmp_path: Path) -> None:
    """The whole matrix."""
    for number, name in enumerate(WAYS):
        if kind not in WITH_WORKERS or name in ("every update and epoch", "SIGTERM", "the epoch is ended"):
            check(kind, name, tmp_path / str(number), accumulation_steps, least=0)
