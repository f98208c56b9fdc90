"""An update needs no more memory than a careful loop by hand, counted by every byte that torch's allocator gives out."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import Average
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.profiler import ProfilerActivity, profile, record_function

from ignite_train import ForwardOutput, Trainer, attach_metric, create_evaluator, create_trainer, handlers
from ignite_train.evaluation.evaluator import Evaluator
from ignite_train.handlers import (
    Checkpoint,
    Csv,
    CurvatureMonitor,
    EarlyStopping,
    EmptyCache,
    FailureBoard,
    Freeze,
    GarbageCollection,
    GradientMonitor,
    GradNormConsistency,
    HangWatch,
    JsonLines,
    LearningRateSchedule,
    LossScaleLogger,
    MinLearningRate,
    ModelEMA,
    ModelSync,
    MomentumTeacher,
    OptimizerModes,
    OuterOptimizer,
    Profiler,
    ProgressLog,
    ReduceOnPlateau,
    SeveralGradients,
    StateConsistency,
    StepTimer,
    StochasticWeightAveraging,
    StopOnSignal,
    TensorBoard,
    TimeLimit,
    TrainingMetrics,
    Validation,
)
from ignite_train.kinds_of_handlers import Handler
from tiers import nightly
from update_options import with_options

UPDATES, FIRST_UPDATES = 6, 2  # the moments come into being in the first
SCALARS = 256  # loss, sample size, logs and norm of an update, and what adding them up takes
RANDOM_STATES = 2 * torch.get_rng_state().nbytes  # as the epoch and the update began, to be able to go back


# --- the meter ---


class Peaks(NamedTuple):
    """Bytes alive at most, of what was allocated while measuring."""

    of_all: int
    of_fetching: int


def peaks(train: Callable[[], Any], *, after: int = 0) -> Peaks:
    """Runs `train` and adds up what torch's allocator gives out and takes back, kernels' own scratch space too.

    The garbage collector sleeps meanwhile: what only it would find counts as alive.

    Args:
        train: wraps its fetching in `record_function("fetch")`.
        after: leave out what is before so many fetches.
    """
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train()
    finally:
        gc.enable()
    events = profiler.profiler.kineto_results.events()
    fetches = sorted((event.start_ns(), event.end_ns()) for event in events if event.name() == "fetch")
    begin = fetches[after][0] if after else 0
    alive, of_all, of_fetching = 0, 0, 0
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    for moment, change in sorted(changes, key=lambda pair: pair[0]):
        alive += change
        if moment >= begin:
            of_all = max(of_all, alive)
            if any(start <= moment <= end for start, end in fetches):
                of_fetching = max(of_fetching, alive)
    return Peaks(of_all, of_fetching)


@pytest.mark.slow
def test_the_meter_counts_bytes():
    """Against numbers that are derived by hand, for a product of 1000 float32 numbers and its backward."""
    size = 4 * 1000

    def train() -> None:
        weight = torch.ones(1000, requires_grad=True)  # 1 x size
        with record_function("fetch"):
            x = torch.ones(1000)  # 2
        product = weight * x  # 3, of which the graph keeps x
        loss = product.sum()  # 4 bytes
        del product  # 2
        loss.backward()  # the gradient of the product is one number, expanded; the weight's, 3; and a 1 for the loss
        weight.grad = None  # 2
        del x  # the graph is gone: 1
        with record_function("fetch"):
            _ = torch.ones(1000)  # 2, and the loss is still there

    assert peaks(train) == (3 * size + 8, 2 * size + 4)


# --- the loops ---


class Shape(NamedTuple):
    """Of a network and its micro-batches."""

    samples: int
    inputs: int
    width: int


SHAPES = {
    "activations": Shape(samples=2048, inputs=8, width=64),
    "parameters": Shape(samples=4, inputs=8, width=512),
    "micro-batches": Shape(samples=64, inputs=8192, width=8),
}


class Net(nn.Module):
    """Three layers; returns the last activations beside the prediction."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(shape.inputs, shape.width), nn.Linear(shape.width, shape.width)
        self.third, self.last = nn.Linear(shape.width, shape.width), nn.Linear(shape.width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return self.last(hidden), hidden


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    """The second log has a graph that no backward runs through: who keeps the log keeps the activations."""
    prediction, hidden = model(x)
    loss = (prediction - 1).square().sum()
    return ForwardOutput(loss, len(x), {"positive": (prediction > 0).sum(), "size": hidden.square().sum()})


class Batches:
    """Makes each micro-batch when it is asked for, and keeps none."""

    def __init__(self, shape: Shape, number: int) -> None:
        self._shape, self._number = shape, number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self._number):
            yield self._make()

    def _make(self) -> Tensor:
        with record_function("fetch"):
            return torch.ones(self._shape.samples, self._shape.inputs)


def make(shape: Shape) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(shape)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def by_hand(shape: Shape, steps: int) -> None:
    """As an expert writes it, who divides by the number of samples in the group and lets go of everything as soon as he can."""
    model, optimizer = make(shape)
    parameters = list(model.parameters())
    batches = iter(Batches(shape, UPDATES * steps))
    while group := list(islice(batches, steps)):
        samples = sum(len(x) for x in group)
        loss, positive, size = 0.0, 0.0, 0.0
        for x in group:
            output = forward(model, x)
            (output.loss / samples).backward()
            loss, positive = loss + output.loss.item(), positive + output.logs["positive"].item()
            size += output.logs["size"].item()
            del output
        clip_grad_norm_(parameters, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        del group, x


def by_trainer(shape: Shape, steps: int, attach: Callable[[Trainer, Any], None] = lambda trainer, optimizer: None) -> None:
    model, optimizer = make(shape)
    trainer = create_trainer(model, optimizer, forward, accumulation_steps=steps, max_grad_norm=0.1)
    attach(trainer, optimizer)
    trainer.run(Batches(shape, UPDATES * steps))


def attach_all(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
    """Every handler that is of use in a run without validation, publishing in each second update."""
    every = Events.ITERATION_COMPLETED(every=2)
    LearningRateSchedule(LambdaLR(optimizer, lambda _step: 1.0)).attach(trainer)
    TrainingMetrics().attach(trainer, every)
    LossScaleLogger().attach(trainer)
    ProgressLog().attach(trainer, every)
    EmptyCache().attach(trainer)
    TimeLimit(seconds=10_000).attach(trainer)
    MinLearningRate(optimizer, minimum=0.0).attach(trainer)
    StopOnSignal().attach(trainer)
    HangWatch(timeout_seconds=600).attach(trainer)
    FailureBoard().attach(trainer)


@pytest.mark.sampled(0, slow=3)
@pytest.mark.parametrize("steps", [4, nightly(1)])
@pytest.mark.parametrize("dominant", SHAPES)
@pytest.mark.parametrize("attach", [lambda trainer, optimizer: None, attach_all], ids=["bare", "handlers"])
def test_an_update_needs_no_more_than_by_hand(attach, dominant, steps):
    """While it computes, and while it waits for the next group, of which nothing is there but what has been fetched."""
    shape = SHAPES[dominant]
    expected = peaks(lambda: by_hand(shape, steps), after=FIRST_UPDATES * steps)
    got = peaks(lambda: by_trainer(shape, steps, attach), after=FIRST_UPDATES * steps)

    assert got.of_all <= expected.of_all + RANDOM_STATES + SCALARS
    assert got.of_fetching <= expected.of_fetching + RANDOM_STATES + SCALARS


# --- after a run ---

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped": {"accumulation_steps": 2, "max_grad_norm": 0.1},
    "scaled": {"precision": "fp16"},
    "seeded": {"seed": 1},
    "several evaluations": {"closure": True},
    "local": {"reduction": "local"},
    "split": {"on_out_of_memory": "split"},
}


LOGS: dict[str, Callable[[Path], Any]] = {
    "lines": lambda path: JsonLines(path / "metrics.jsonl"),
    "points": TensorBoard,
    "progress": lambda _: ProgressLog(),
    "metrics": lambda _: TrainingMetrics(),
}


@pytest.mark.parametrize("log", LOGS)
def test_a_log_does_not_keep_the_trainer(log: str, tmp_path: Path) -> None:
    """Nor its model, when the run is over."""
    shape = Shape(samples=2, inputs=8, width=4)
    make(shape)
    gc.disable()
    try:
        model, optimizer = make(shape)
        trainer = create_trainer(model, optimizer, forward)
        handler = LOGS[log](tmp_path)
        handler.attach(trainer)
        trainer.run(Batches(shape, 4))
        alive = [weakref.ref(one) for one in (model, optimizer, trainer)]
        del model, optimizer, trainer
        assert [one() for one in alive] == [None] * 3
    finally:
        gc.enable()


class Run(NamedTuple):
    """The objects that a handler is made for."""

    trainer: Trainer
    model: nn.Module
    optimizer: Any
    evaluator: Evaluator
    path: Path

    def attach(self, handler: Any, *arguments: Any, **named: Any) -> Any:
        """Attaches it and returns it."""
        handler.attach(self.trainer, *arguments, **named)
        return handler


def _validated(run: Run) -> Any:
    return run.attach(Validation(run.evaluator, [torch.ones(2, 8)]), Events.ITERATION_COMPLETED)


def _averaged(run: Run, average: Any) -> Any:
    average.use_in(run.evaluator)
    return run.attach(average, Events.ITERATION_COMPLETED), _validated(run)


EVERY_UPDATE = Events.ITERATION_COMPLETED
ATTACHED: dict[str, Callable[[Run], Any]] = {
    "Checkpoint": lambda run: run.attach(Checkpoint(run.path, every=1)),
    "Csv": lambda run: run.attach(Csv(run.path / "metrics.csv"), EVERY_UPDATE),
    "CurvatureMonitor": lambda run: run.attach(CurvatureMonitor(forward, every=2, max_iterations=2)),
    "EarlyStopping": lambda run: (run.attach(EarlyStopping(run.evaluator, patience=9)), _validated(run)),
    "EmptyCache": lambda run: run.attach(EmptyCache(), EVERY_UPDATE),
    "FailureBoard": lambda run: run.attach(FailureBoard()),
    "Freeze": lambda run: run.attach(Freeze(run.model.first, until=2)),
    "GarbageCollection": lambda run: run.attach(GarbageCollection(), Events.ITERATION_COMPLETED(once=99)),
    "GradNormConsistency": lambda run: run.attach(GradNormConsistency(), EVERY_UPDATE),
    "GradientMonitor": lambda run: run.attach(GradientMonitor(2, with_histograms=True)),
    "HangWatch": lambda run: run.attach(HangWatch(), evaluator=run.evaluator),
    "JsonLines": lambda run: run.attach(JsonLines(run.path / "metrics.jsonl"), EVERY_UPDATE),
    "LearningRateSchedule": lambda run: run.attach(LearningRateSchedule(LambdaLR(run.optimizer, lambda _step: 1.0))),
    "LossScaleLogger": lambda run: run.attach(LossScaleLogger()),
    "MinLearningRate": lambda run: run.attach(MinLearningRate(run.optimizer, minimum=0.0)),
    "ModelEMA": lambda run: _averaged(run, ModelEMA(0.9)),
    "ModelSync": lambda run: (run.attach(ModelSync(), evaluator=run.evaluator), _validated(run)),
    "MomentumTeacher": lambda run: run.attach(MomentumTeacher(copy.deepcopy(run.model), run.model)),
    "OptimizerModes": lambda run: (run.attach(OptimizerModes(run.optimizer), evaluator=run.evaluator), _validated(run)),
    "OuterOptimizer": lambda run: run.attach(OuterOptimizer(torch.optim.SGD(run.model.parameters(), lr=0.5), every=2)),
    "Profiler": lambda run: run.attach(Profiler(run.path, updates=range(2, 4))),
    "ProgressLog": lambda run: run.attach(ProgressLog(), EVERY_UPDATE),
    "ReduceOnPlateau": lambda run: (
        run.attach(ReduceOnPlateau(run.evaluator, ReduceLROnPlateau(run.optimizer, patience=9))),
        _validated(run),
    ),
    "SeveralGradients": lambda run: run.attach(SeveralGradients(lambda gradients: next(iter(gradients.values())))),
    "StateConsistency": lambda run: run.attach(StateConsistency(run.model, run.optimizer), EVERY_UPDATE),
    "StepTimer": lambda run: run.attach(StepTimer(), EVERY_UPDATE),
    "StochasticWeightAveraging": lambda run: _averaged(run, StochasticWeightAveraging()),
    "StopOnSignal": lambda run: run.attach(StopOnSignal()),
    "TensorBoard": lambda run: run.attach(TensorBoard(run.path), EVERY_UPDATE),
    "TimeLimit": lambda run: run.attach(TimeLimit(seconds=10_000)),
    "TrainingMetrics": lambda run: (run.attach(TrainingMetrics(), EVERY_UPDATE, evaluator=run.evaluator), _validated(run)),
    "Validation": _validated,
    "attach_metric": lambda run: attach_metric(run.trainer, Average(output_transform=float), "mean"),
}
"""Not here: an evaluator that a log shows, or by which a `Checkpoint` finds the best, needs these when it runs, and keeps them.
With a `Validation`, through which the trainer keeps the evaluator, that is a cycle; see "Notebooks" in the cookbook.
"""


class WithModes(torch.optim.AdamW):
    """An optimizer that has a training mode and another one."""

    def train(self) -> None:
        """Changes nothing."""

    eval = train


def one_loss(model: nn.Module, x: Tensor) -> ForwardOutput:
    """A loss by its name, and a number for a metric."""
    loss = (model(x)[0] - 1).square().sum()
    return ForwardOutput({"loss": (loss, len(x))}, outputs=loss.detach())


def test_each_handler_is_known() -> None:
    """Each that is attached; `LogFile` is the base of two."""
    kinds = {name: kind for name in handlers.__all__ if isinstance(kind := getattr(handlers, name), type)}
    known = {name for name, kind in kinds.items() if issubclass(kind, Handler)}
    assert known - {"LogFile"} == ATTACHED.keys() - {"attach_metric"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ATTACHED)
@pytest.mark.parametrize("ends", ["ends", "raises"])
def test_a_handler_does_not_keep_the_trainer(name: str, ends: str, tmp_path: Path) -> None:
    """A script that holds the handler alone has let the trainer go, and with the handler go model, optimizer and evaluator."""
    shape = Shape(samples=2, inputs=8, width=4)
    make(shape)
    gc.collect()
    gc.disable()
    try:
        model = Net(shape)
        optimizer = WithModes(model.parameters(), lr=1e-3)
        function = one_loss if name in ("SeveralGradients", "attach_metric") else forward
        run = Run(create_trainer(model, optimizer, function), model, optimizer, create_evaluator(model, function), tmp_path)
        handler = ATTACHED[name](run)
        if ends == "raises":
            run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: 1 / 0)
        with suppress(ZeroDivisionError):
            run.trainer.run(Batches(shape, 4))
        assert run.trainer.state.iteration >= 3
        trainer, others = weakref.ref(run.trainer), [weakref.ref(one) for one in (model, optimizer, run.evaluator)]
        del run, model, optimizer
        assert trainer() is None
        del handler
        assert [one() for one in others] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("ends", ["ends", "raises"])
def test_model_and_optimizer_are_freed_with_their_trainer(settings: str, ends: str) -> None:
    """At once: no cycle of references makes their memory wait for the garbage collector."""
    shape = Shape(samples=2, inputs=8, width=4)
    make(shape)  # at the first optimizer torch imports its compiler, which leaves behind what holds all frames above it
    gc.disable()
    try:
        model, optimizer = make(shape)
        trainer = create_trainer(model, optimizer, forward, **with_options(**SETTINGS[settings]))
        if ends == "raises":
            trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), lambda: 1 / 0)
        with suppress(ZeroDivisionError):
            trainer.run(Batches(shape, 4))
        number, alive = trainer.state.iteration, [weakref.ref(one) for one in (model, optimizer, trainer)]
        del model, optimizer, trainer
        assert [one() for one in alive] == [None] * 3
        assert number > 1
    finally:
        gc.enable()
