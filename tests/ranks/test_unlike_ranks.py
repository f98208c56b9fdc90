"""Ranks that were started with other settings, handlers or models are told so on all ranks, and do not wait for one another."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events
from ignite.metrics import Average, GpuInfo, Metric, RunningAverage
from ignite.metrics.metric import sync_all_reduce
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

import cuts
from ignite_train import (
    Evaluator,
    ForwardOutput,
    ResumableLoader,
    ShardedSampler,
    TokenBudgetSampler,
    Trainer,
    UpdateOptions,
    attach_metric,
    create_evaluator,
    create_trainer,
)
from ignite_train.events import every
from ignite_train.handlers import (
    Checkpoint,
    EmptyCache,
    GradientMonitor,
    GradNormConsistency,
    JsonLines,
    ProgressLog,
    StateConsistency,
    StepTimer,
    Validation,
)
from ranks import run_ranks

FEATURES = cuts.FEATURES
EXPLICIT = UpdateOptions(reduction="explicit")


def make(model: nn.Module | None = None, **settings: Any) -> Trainer:
    model = DistributedDataParallel(cuts.linear()) if model is None else model
    return create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), cuts.forward, **settings)


def validate(trainer: Trainer, event: Any = Events.EPOCH_COMPLETED) -> Evaluator:
    evaluator = create_evaluator(cuts.linear(), cuts.forward)
    Validation(evaluator, cuts.shard([[2], [2]])).attach(trainer, event)
    return evaluator


def other_settings(rank: int) -> Trainer:
    return make(accumulation_steps=2 + rank, max_grad_norm=1.0)


def other_options(rank: int) -> Trainer:
    return make(options=UpdateOptions(on_nonfinite="raise" if rank else "skip"))


def other_handlers(rank: int) -> Trainer:
    trainer = make()
    if rank:
        validate(trainer)
        GradientMonitor().attach(trainer)
    return trainer


def frozen(rank: int) -> Trainer:
    model = cuts.linear()
    wrapped = DistributedDataParallel(model)
    model.bias.requires_grad_(rank == 0)
    return make(wrapped)


def other_shapes(rank: int) -> Trainer:
    return make(nn.Sequential(nn.Linear(FEATURES, 5 + rank).double(), nn.Linear(5 + rank, 1).double()), options=EXPLICIT)


def other_shards(rank: int) -> Trainer:
    model = nn.Sequential(nn.Linear(FEATURES, 5 + rank).double(), nn.Linear(5 + rank, 1).double())
    return make(fully_shard(model, mesh=init_device_mesh("cpu", (2,))))


class Heads(nn.Module):
    """Parts of one shape, registered in the order of the names; forward takes them in another, the same on all ranks."""

    def __init__(self, names: str, *, norms: bool = False) -> None:
        super().__init__()
        kind = (lambda: nn.BatchNorm1d(FEATURES, affine=False).double()) if norms else (lambda: nn.Linear(3, FEATURES).double())
        self.heads, self.last = nn.ModuleDict({name: kind() for name in names}), nn.Linear(FEATURES, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in sorted(self.heads):
            x = torch.tanh(self.heads[name](x))
        return self.last(x)  # type: ignore[no-any-return]


def other_order(rank: int) -> Trainer:
    return make(DistributedDataParallel(Heads("ba" if rank else "ab")))


def other_order_of_shards(rank: int) -> Trainer:
    return make(fully_shard(Heads("ba" if rank else "ab"), mesh=init_device_mesh("cpu", (2,))))


def other_order_of_replicas(rank: int) -> Trainer:
    return make(Heads("abc" if rank else "acb"), options=EXPLICIT)


def other_order_of_buffers(rank: int) -> Trainer:
    return make(DistributedDataParallel(Heads("ba" if rank else "ab", norms=True)))


def average(value: float = 1.0) -> Metric:
    return Average(output_transform=lambda _: value)


def with_averages(names: tuple[str, ...]) -> Trainer:
    trainer = make()
    for name in names:
        average(len(name)).attach(trainer, name)
    return trainer


def other_order_of_metrics(rank: int) -> Trainer:
    return with_averages(("two", "one") if rank else ("one", "two"))


def metric_on_one(rank: int) -> Trainer:
    return with_averages(() if rank else ("average",))


class Largest(Metric):
    """Waits for no other rank."""

    def reset(self) -> None:
        self._largest = -1.0

    def update(self, output: Any) -> None:
        self._largest = max(self._largest, float(output.loss))

    def compute(self) -> float:
        return self._largest


class Reduced(Largest):
    """Waits for the other ranks when it computes."""

    @sync_all_reduce("_largest:MAX")
    def compute(self) -> float:
        return self._largest


def metric_of_ones_own_on_one(rank: int) -> Trainer:
    trainer = make()
    if rank == 0:
        (Reduced() * 2.0).attach(trainer, "twice the largest")
    return trainer


def metrics_in_part_the_same(rank: int) -> Trainer:
    return with_averages(("ten", "hundred") if rank else ("one", "ten"))


def metric_of_predictions_on_one(rank: int) -> Trainer:
    trainer = make()
    if rank == 0:
        attach_metric(trainer, average(), "average")
    return trainer


def other_order_of_handlers(rank: int) -> Trainer:
    trainer = make()
    for kind in (StepTimer, GradNormConsistency)[:: -1 if rank else 1]:
        kind().attach(trainer)
    return trainer


def other_piggybacks(rank: int) -> Trainer:
    trainer = make()
    if rank == 0:
        EmptyCache(fragmentation=0.5).attach(trainer)
    return trainer


def train(begin: Callable[[int], Trainer]) -> str:
    """The error of making a trainer, or of its run; empty if there is none."""
    try:
        begin(idist.get_rank()).run(cuts.shard([[2] * 6, [2] * 6]), max_iters=2)
    except ValueError as error:
        return str(error)
    return ""


def checkpoint_on_one(rank: int) -> Trainer:
    trainer = make()
    if rank:
        Checkpoint(tempfile.mkdtemp()).attach(trainer)
    return trainer


def metric_of_evaluator_on_one(rank: int) -> Trainer:
    trainer = make()
    evaluator = validate(trainer)
    evaluator.add_event_handler(Events.EPOCH_COMPLETED(every=1 + rank), lambda: None)  # the script's own may differ
    if rank == 0:
        evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: None)
        average().attach(evaluator, "average")
    return trainer


def running_metric_of_evaluator_on_one(rank: int) -> Trainer:
    """The evaluator is an engine of Ignite's, with a filter on another handler of that event, which no process has alike."""
    trainer, evaluator = make(), Engine(lambda _, batch: len(batch))
    evaluator.add_event_handler(Events.ITERATION_COMPLETED(every=2), lambda: None)
    Validation(evaluator, [[1]], score="number", mode="max").attach(trainer)
    if rank == 0:
        RunningAverage(output_transform=float).attach(evaluator, "running")
    return trainer


SET = "(a set has another order in each process)"
SAID = {
    other_settings: "got accumulation_steps: 2 on rank 0 and 3 on rank 1; give",
    other_options: "got options.on_nonfinite: 'skip' on rank 0 and 'raise' on rank 1; give",
    other_handlers: "got the handler GradientMonitor: none on rank 0 and 1 on rank 1; the handler Validation: none",
    frozen: "got the parameter bias: [1] of torch.float64, trained on rank 0 and [1] of torch.float64, frozen on rank 1; give",
    other_shapes: "got the parameter 0.weight: [5, 3] of torch.float64, trained on rank 0 and [6, 3] of",
    other_shards: "got the parameter 0.weight: [5, 3] of torch.float64, trained on rank 0 and [6, 3] of",
    other_order: f"got place 1 of the parameters: heads.a.weight on rank 0 and heads.b.weight on rank 1 {SET}; give",
    other_order_of_shards: f"got place 1 of the parameters: heads.a.weight on rank 0 and heads.b.weight on rank 1 {SET}; give",
    other_order_of_replicas: f"got place 3 of the parameters: heads.c.weight on rank 0 and heads.b.weight on rank 1 {SET}",
    other_order_of_buffers: "got place 1 of the buffers: heads.a.running_mean on rank 0 and heads.b.running_mean on rank 1 (a",
    other_order_of_metrics: f"ranks at EPOCH_COMPLETED: Average 'one' on rank 0 and Average 'two' on rank 1 {SET}; give",
    metric_on_one: "place 1 of what waits for other ranks at EPOCH_COMPLETED: Average 'average' on rank 0 and none on rank 1;",
    metric_of_evaluator_on_one: "for other ranks at EPOCH_COMPLETED of an evaluator: Average 'average' on rank 0 and none",
    running_metric_of_evaluator_on_one: "ITERATION_COMPLETED of an evaluator: RunningAverage 'running' on rank 0 and none on",
    metric_of_predictions_on_one: "other ranks at EPOCH_COMPLETED: Average 'average' on rank 0 and none on rank 1; give",
    metric_of_ones_own_on_one: "EPOCH_COMPLETED: MetricsLambda 'twice the largest' on rank 0 and none on rank 1; give",
    metrics_in_part_the_same: "ranks at EPOCH_COMPLETED: Average 'one' on rank 0 and Average 'ten' on rank 1; give",
    other_order_of_handlers: f"what travels with each update: StepTimer on rank 0 and GradNormConsistency on rank 1 {SET}",
    other_piggybacks: "got place 3 of what travels with each update: EmptyCache on rank 0 and none on rank 1; give",
    checkpoint_on_one: "got the exchange between the ranks: of settings on rank 0 and of Checkpoint on rank 1; give",
}


@pytest.mark.parametrize("begin", SAID, ids=lambda begin: begin.__name__.replace("_", " "))
def test_what_differs_is_named_on_all_ranks(begin: Callable[[int], Trainer]) -> None:
    """Which setting, and its value on each rank; nobody waits."""
    first, second = run_ranks(train, begin)
    assert first == second
    assert SAID[begin] in first, first


LENGTHS = (5, 4)  # of the ranks' shards, from which scripts compute numbers


def run_on_shard(trainer: Trainer | None = None, **limits: Any) -> None:
    (make() if trainer is None else trainer).run(cuts.shard([[2] * length for length in LENGTHS]), **limits)


def in_session(rank: int) -> None:
    trainer, micro_batches = make(), cuts.shard([[2] * length for length in LENGTHS])
    with trainer.session(max_iters=LENGTHS[rank]):
        for micro_batch in micro_batches:
            trainer.update([micro_batch])


def validated(event: Any) -> None:
    trainer = make()
    validate(trainer, event)
    run_on_shard(trainer, max_epochs=2)


def saved(rank: int, directory: Path) -> None:
    trainer = make()
    Checkpoint(directory, every=2 + rank).attach(trainer)
    run_on_shard(trainer, max_epochs=2)


def compared(rank: int) -> None:
    trainer = make()
    StateConsistency(trainer.model, [*trainer.optimizers.values()]).attach(
        trainer, every(10 + rank, Events.ITERATION_COMPLETED)
    )
    run_on_shard(trainer, max_epochs=2)


NUMBERS: dict[str, tuple[Callable[[int, Path], None], str]] = {
    "max_iters": (
        lambda rank, _: run_on_shard(max_iters=3 * LENGTHS[rank]),
        "got max_iters: 15 on rank 0 and 12 on rank 1; give",
    ),
    "max_epochs": (lambda rank, _: run_on_shard(max_epochs=2 + rank), "got max_epochs: 2 on rank 0 and 3 on rank 1; give"),
    "epoch_length": (
        lambda rank, _: run_on_shard(max_epochs=2, epoch_length=LENGTHS[rank]),
        "got epoch_length: 5 on rank 0 and 4 on rank 1; give",
    ),
    "one epoch_length": (
        lambda rank, _: run_on_shard(max_epochs=2, epoch_length=5 if rank else None),
        "got epoch_length: none on rank 0 and 5 on rank 1; give",
    ),
    "session": (lambda rank, _: in_session(rank), "got max_iters: 5 on rank 0 and 4 on rank 1; give"),
    "every of an event": (
        lambda rank, _: validated(Events.ITERATION_COMPLETED(every=LENGTHS[rank])),
        "got the handler Validation at ITERATION_COMPLETED: every=5 on rank 0 and every=4 on rank 1; give",
    ),
    "once": (
        lambda rank, _: validated(Events.ITERATION_COMPLETED(once=LENGTHS[rank])),
        "got the handler Validation at ITERATION_COMPLETED: once=[5] on rank 0 and once=[4] on rank 1; give",
    ),
    "after": (
        lambda rank, _: validated(Events.ITERATION_COMPLETED(every=2, after=rank)),
        "got the handler Validation at ITERATION_COMPLETED: after=0, before=inf, every=2 on rank 0 and after=1,",
    ),
    "each and some": (
        lambda rank, _: validated(Events.EPOCH_COMPLETED(every=1 + rank)),
        "got the handler Validation at EPOCH_COMPLETED: always on rank 0 and every=2 on rank 1; give",
    ),
    "a function and a number": (
        lambda rank, _: validated(Events.EPOCH_COMPLETED(**({"every": 2} if rank else {"event_filter": is_second}))),
        "got the handler Validation at EPOCH_COMPLETED: a function on rank 0 and every=2 on rank 1; give",
    ),
    "another event": (
        lambda rank, _: validated(Events.ITERATION_COMPLETED if rank else Events.EPOCH_COMPLETED),
        "the handler Validation at ITERATION_COMPLETED: none on rank 0 and always on rank 1; give",
    ),
    "our own every": (
        lambda rank, _: compared(rank),
        "got the handler StateConsistency at ITERATION_COMPLETED: every=10 on rank",
    ),
    "a cadence": (saved, "got the handler Checkpoint.every: 2 on rank 0 and 3 on rank 1; give"),
}


NUMBER = 24  # of samples


def batch_forward(model: nn.Module, x: torch.Tensor) -> ForwardOutput:
    return ForwardOutput(model(x).square().sum(), len(x))


def resumable(number: int = NUMBER, size: int = 3, **settings: Any) -> ResumableLoader:
    return ResumableLoader(torch.ones(number, FEATURES).double(), size, **{"shuffle": True, "seed": 7} | settings)


def sharded(number: int = NUMBER, seed: int = 7) -> DataLoader[Any]:
    data = torch.ones(number, FEATURES).double()
    return DataLoader(data, 3, sampler=ShardedSampler(data, shuffle=True, seed=seed))  # type: ignore[arg-type]


def budget(longest: int = 3, seed: int = 7, *, alone: bool = False) -> DataLoader[Any]:
    data = torch.ones(NUMBER, FEATURES).double()
    batches = TokenBudgetSampler([2] * (NUMBER - 1) + [longest], max_tokens=6, shuffle=True, seed=seed)
    return DataLoader(data, batch_sampler=batches) if alone else ResumableLoader(data, batches=batches)  # type: ignore[arg-type]


def split(rank: int, *, alone: bool = False, nested: bool = False) -> DataLoader[Any]:
    """Half of the samples, chosen by each rank for itself."""
    order = torch.randperm(NUMBER, generator=torch.Generator().manual_seed(rank)).tolist()
    data: Any = Subset(torch.ones(NUMBER, FEATURES).double(), order[: NUMBER // 2])  # type: ignore[arg-type]
    data = Subset(data, range(6)) if nested else data
    if alone:
        return DataLoader(data, 3, sampler=ShardedSampler(data, shuffle=False))
    return ResumableLoader(data, 3, shuffle=False)


ORDERS: dict[str, tuple[Callable[[int], Any], str]] = {
    "split": (split, "got data.indices of Subset: "),
    "split in a DataLoader": (lambda rank: split(rank, alone=True), "got data.indices of Subset: "),
    "part of a split": (lambda rank: split(rank, nested=True), "got data.indices of Subset: "),
    "seed": (lambda rank: resumable(seed=rank), "got data.seed: 0 on rank 0 and 1 on rank 1; give"),
    "shuffle": (lambda rank: resumable(shuffle=rank == 0), "got data.shuffle: True on rank 0 and False on rank 1; give"),
    "length": (lambda rank: resumable(NUMBER + rank), "got data.samples: 24 on rank 0 and 25 on rank 1; give"),
    "drop_last": (lambda rank: resumable(drop_last=rank == 0), "got data.drop_last: True on rank 0 and False on rank 1; give"),
    "seed of a sampler": (lambda rank: sharded(seed=rank), "got data.seed: 0 on rank 0 and 1 on rank 1; give"),
    "length of a sampler": (lambda rank: sharded(NUMBER + rank), "got data.samples: 24 on rank 0 and 25 on rank 1; give"),
    "seed of batches": (lambda rank: budget(seed=rank), "got data.seed: 0 on rank 0 and 1 on rank 1; give"),
    "lengths of batches": (lambda rank: budget(longest=3 + rank), "got data.lengths: "),
    "batches of a DataLoader": (lambda rank: budget(seed=rank, alone=True), "got data.seed: 0 on rank 0 and 1 on rank 1; give"),
}
OWN_ORDERS: dict[str, Callable[[int], Any]] = {
    "the same": lambda _: resumable(),
    "the same split": lambda _: split(0, nested=True),
    "batch sizes": lambda rank: resumable(size=3 + rank),
    "an own DataLoader": lambda rank: DataLoader(torch.ones(NUMBER - rank, FEATURES).double(), 3, shuffle=rank == 0),
    "one list": lambda rank: [torch.ones(2, FEATURES).double()] if rank else resumable(),
}


def error_of_reading(data: Any) -> str:
    """The error of a run over the loader of this rank; empty if there is none."""
    model = cuts.linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), batch_forward, options=EXPLICIT)
    try:
        trainer.run(data)
    except ValueError as error:
        return str(error)
    return ""


def read(name: str) -> str:
    return error_of_reading((ORDERS[name][0] if name in ORDERS else OWN_ORDERS[name])(idist.get_rank()))


@pytest.mark.parametrize("name", ORDERS)
def test_samples_that_are_dealt_out_must_be_in_one_order(name: str) -> None:
    """Otherwise some are lost, and others are used twice."""
    first, second = run_ranks(read, name, timeout_seconds=120)
    assert first == second
    assert ORDERS[name][1] in first, first


@pytest.mark.parametrize("name", OWN_ORDERS)
def test_data_of_a_ranks_own_is_not_compared(name: str) -> None:
    """Nor the size of its micro-batches."""
    assert run_ranks(read, name, timeout_seconds=120) == ["", ""]


def read_in_groups(odd_rank: int | None) -> str:
    """The ranks of a group deal out the files of the group, which are other ones in the other group."""
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("files", "dp")), idist.get_rank()
    seed = 5 if rank == odd_rank else rank // 2
    return error_of_reading(resumable(NUMBER + rank // 2, seed=seed, mesh=mesh["dp"]))


@pytest.mark.slow
def test_ranks_that_deal_among_themselves_are_compared_with_each_other() -> None:
    """Those along `mesh=`, and no others; all ranks are told."""
    assert run_ranks(read_in_groups, None, world_size=4, timeout_seconds=120) == [""] * 4
    errors = run_ranks(read_in_groups, 3, world_size=4, timeout_seconds=120)
    assert len({*errors}) == 1
    assert "got data.seed: 1 on rank 2 and 5 on rank 3; give" in errors[0]


def is_second(_: Any, count: int) -> bool:
    return count == 2


def error_of(name: str, directory: Path) -> str:
    try:
        NUMBERS[name][0](idist.get_rank(), directory)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_by_which_ranks_meet_are_compared(name: str, tmp_path: Path) -> None:
    """Limits of the run, and when a handler is called or saves: with numbers of its own shard a rank would wait in vain."""
    first, second = run_ranks(error_of, name, tmp_path, timeout_seconds=120)
    assert first == second
    assert NUMBERS[name][1] in first, first


def legal_numbers(directory: Path) -> list[int]:
    """Shards of unequal lengths, the numbers of plain functions, and settings that are the script's."""
    rank, done = idist.get_rank(), []
    trainer = make()
    validate(trainer, Events.ITERATION_COMPLETED(event_filter=lambda _, count: count % 2 == 0))
    Checkpoint(directory, every_epochs=1, config={"rank": rank}).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=LENGTHS[rank]), lambda: done.append(trainer.state.iteration))
    run_on_shard(trainer, max_epochs=2)
    return done


def test_what_ranks_may_have_of_their_own_is_not_compared(tmp_path: Path) -> None:
    """The lengths of the loaders, from which an epoch takes its own, and the numbers of plain functions."""
    assert run_ranks(legal_numbers, tmp_path) == [[5, 10], [4, 8]]


class QuietGpuInfo(GpuInfo):
    """Of a machine without GPUs, which need not have the library that asks for them."""

    def __init__(self) -> None:
        super(GpuInfo, self).__init__()

    def compute(self) -> list[Any]:
        return []


def own_handlers(rank: int, directory: Path) -> Trainer:
    trainer = make(seed=5 + rank)
    if rank == 0:
        QuietGpuInfo().attach(trainer)
        Largest().attach(trainer, "largest")
        RunningAverage(Largest()).attach(trainer, "average of the largest")
        (Largest() + 1.0).attach(trainer, "one more than the largest")
        ProgressLog().attach(trainer)
        JsonLines(directory / "log.jsonl").attach(trainer)
    return trainer


def test_what_only_writes_may_be_on_one_rank(tmp_path: Path) -> None:
    """Nor need the seeds be the same."""
    assert run_ranks(train, partial(own_handlers, directory=tmp_path)) == ["", ""]


def with_tensors_of_its_own(rank: int) -> Trainer:
    model, own = nn.Sequential(cuts.linear()), f"of_rank_{rank}"
    model[0].register_buffer(own, torch.zeros(2 + rank))
    model[0].register_parameter(f"also_{own}", nn.Parameter(torch.zeros(2 + rank)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [f"0.{own}", f"0.also_{own}"])
    return make(DistributedDataParallel(model))


def test_what_the_wrapper_ignores_may_differ() -> None:
    """It crosses no ranks, and stands at no place that others must know."""
    assert run_ranks(train, with_tensors_of_its_own) == ["", ""]


def with_queues_of_its_own(rank: int, *, shards: bool) -> Trainer:
    model = cuts.linear()
    model.register_buffer(f"queue_{rank}", torch.zeros(2))
    if shards:
        return make(fully_shard(model, mesh=init_device_mesh("cpu", (2,))))
    return make(DistributedDataParallel(model, broadcast_buffers=False))


@pytest.mark.parametrize("shards", [False, True])
def test_a_rank_may_have_buffers_under_names_of_its_own(shards: bool) -> None:
    """Where the wrapper leaves buffers to the ranks."""
    assert run_ranks(train, partial(with_queues_of_its_own, shards=shards)) == ["", ""]


def run_on_unlike() -> str:
    """A second run in which rank 1 has reached its limit, without what compares the ranks when a run starts."""
    trainer, loader = make(protect=False), cuts.shard([[2], [2]])
    trainer.run(loader, max_epochs=1)
    with pytest.raises(ValueError, match="max_epochs and max_iters must be") as refused:
        trainer.run(loader, max_epochs=1 if idist.get_rank() == 1 else 2)
    trainer.run(loader, max_epochs=2)
    assert trainer.state.epoch == 2
    return str(refused.value)


def test_a_second_run_that_one_rank_has_no_use_for_is_refused() -> None:
    """On all ranks, instead of leaving the others waiting; with a limit that is the same the run continues."""
    for rank, message in enumerate(run_ranks(run_on_unlike)):
        begin = "max_epochs and max_iters must be the same on all ranks, got limits that rank 1 has reached and others have not"
        assert message == f"{begin}; here {2 - rank} and None"
