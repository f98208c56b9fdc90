"""All handlers at once: the order of attaching makes no difference, and a killed run ends with the same bits."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from bits import bit_by_bit
from ignite_train import ForwardOutput, ResumableLoader, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import (
    Checkpoint,
    EarlyStopping,
    EmptyCache,
    Freeze,
    GarbageCollection,
    GradientMonitor,
    JsonLines,
    LossScaleLogger,
    MinLearningRate,
    ModelEMA,
    ModelSync,
    MomentumTeacher,
    OuterOptimizer,
    PeerFailureError,
    ReduceOnPlateau,
    StochasticWeightAveraging,
    TimeLimit,
    TrainingMetrics,
    Validation,
    predict,
)
from ignite_train.metrics import TIMED_METRICS
from processes import DEADLINE_SECONDS, forked
from ranks import run_ranks
from tiers import nightly

ROWS = torch.randn(28, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
HELD_OUT = list(torch.randn(8, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).split(4))
EPOCHS, UPDATES = 4, 28  # of one process


class Job:
    """A training with all handlers, attached in an order of its own.

    Args:
        directory: of the checkpoints and the log.
        order: seeds the order of attaching; the same on all ranks.
    """

    def __init__(self, directory: Path, order: int) -> None:
        torch.manual_seed(11)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2)).double()
        self.teacher = copy.deepcopy(self.model).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.trainer = (
            create_trainer(
                self.model, self.optimizer, self.forward, max_grad_norm=1.0, options=UpdateOptions(reduction="explicit")
            )
            if idist.get_world_size() > 1
            else create_trainer(self.model, self.optimizer, self.forward, max_grad_norm=1.0)
        )
        self.evaluator, self.averaged = (create_evaluator(self.model, self.forward) for _ in range(2))
        self.ema, self.swa = ModelEMA(0.9), StochasticWeightAveraging(start=10)
        self.outer = OuterOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5), every=4)
        self.log = directory / "log.jsonl"
        steps = self.steps(directory)
        random.Random(order).shuffle(steps)  # noqa: S311
        for step in steps:
            step()

    def forward(self, model: nn.Module, x: Tensor) -> ForwardOutput:
        with torch.no_grad():
            target = self.teacher(x)
        y = model(x)
        return ForwardOutput((y - target).square().sum() + (y - 1).square().sum(), len(x), outputs=y)

    def steps(self, directory: Path) -> list[Callable[[], Any]]:
        """What attaches each handler. The two validations stay in their order: a checkpoint knows them by their numbers."""
        trainer, evaluator, metrics = self.trainer, self.evaluator, TrainingMetrics()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0, threshold=0)
        every_third, every_second = Events.ITERATION_COMPLETED(every=3), Events.ITERATION_COMPLETED(every=2)

        def validate() -> None:
            Validation(evaluator, HELD_OUT, sanity=1).attach(trainer, every_third)
            Validation(self.averaged, HELD_OUT).attach(trainer, every_third)

        # On several ranks gradients are reduced here, which it refuses.
        lookahead = [] if idist.get_world_size() > 1 else [lambda: self.outer.attach(trainer)]
        return [
            *lookahead,
            validate,
            lambda: self.ema.attach(trainer),
            lambda: self.ema.use_in(self.averaged),
            lambda: self.swa.attach(trainer),
            lambda: MomentumTeacher(self.teacher, self.model, lambda state: 0.9 + 0.1 * state.progress).attach(trainer),
            lambda: Freeze(self.model[0], until=5).attach(trainer),
            lambda: GradientMonitor(4, with_histograms=True).attach(trainer),
            lambda: ReduceOnPlateau(evaluator, plateau).attach(trainer),
            lambda: EarlyStopping(evaluator, patience=100).attach(trainer),
            lambda: ModelSync().attach(trainer, evaluator=evaluator),
            lambda: GarbageCollection().attach(trainer, every_third),
            lambda: EmptyCache(fragmentation=0.5).attach(trainer, every_third),
            lambda: metrics.attach(trainer, every_second),
            lambda: JsonLines(self.log).attach(trainer, every_second),
            lambda: LossScaleLogger().attach(trainer),
            lambda: MinLearningRate(self.optimizer, minimum=1e-12).attach(trainer),
            lambda: TimeLimit(1e6).attach(trainer),
            lambda: Checkpoint(directory / "checkpoints", every=1, asynchronous=False).attach(trainer, evaluator=evaluator),
        ]

    def run(self) -> Any:
        """Trains to the end, and gives all that it has made."""
        self.trainer.run(ResumableLoader(ROWS, 4, shuffle=True), max_epochs=EPOCHS)
        lines = self.log.read_text().splitlines() if idist.get_rank() == 0 else []
        logged = [
            {name: value for name, value in json.loads(line).items() if name.rpartition("/")[2] not in TIMED_METRICS}
            for line in lines
        ]
        states = [m.state_dict() for m in (self.model, self.optimizer, self.teacher, self.ema, self.swa, self.outer)]
        predictions = predict(self.averaged, ResumableLoader(ROWS, 4, shuffle=False))
        scores = [engine.state.metrics for engine in (self.evaluator, self.averaged)]
        return bit_by_bit([*states, predictions, scores, sorted(self.trainer._stateful)]), logged


def killed_job(directory: str, order: int, update: int) -> None:
    """In a process of its own, which a signal ends in the middle of an update."""
    torch.set_num_threads(1)
    job = Job(Path(directory), order)
    job.trainer.add_event_handler(Events.ITERATION_STARTED(once=update), lambda: os.kill(os.getpid(), signal.SIGKILL))
    job.run()


@pytest.mark.slow
@pytest.mark.parametrize("order", range(1, 3))
def test_the_order_of_attaching_makes_no_difference(order: int, tmp_path: Path) -> None:
    """Weights, averages, teacher, scores, predictions and lines of the log: the same bits in each order."""
    assert Job(tmp_path / "a", order).run() == Job(tmp_path / "b", 0).run()


@pytest.mark.slow
@pytest.mark.parametrize("update", [nightly(6), nightly(15), 27])
def test_killed_and_resumed_in_another_order(update: int, tmp_path: Path) -> None:
    """At the thaw, at the beginning of an epoch and near the end."""
    process = forked.Process(target=killed_job, args=(str(tmp_path / "killed"), update, update))
    process.start()
    process.join(DEADLINE_SECONDS)
    process.kill()
    assert process.exitcode == -signal.SIGKILL
    assert Job(tmp_path / "killed", update + 1).run() == Job(tmp_path / "whole", 0).run()


def _resumed_on_this_rank(directory: str) -> Any:
    first = Job(Path(directory) / "broken", 1)
    first.trainer.add_event_handler(Events.ITERATION_STARTED(once=6), lambda: 1 // 0)
    with pytest.raises((ZeroDivisionError, PeerFailureError)):  # of this rank, or of the other if that is ahead
        first.run()
    return Job(Path(directory) / "broken", 2).run(), Job(Path(directory) / "whole", 3).run()


@pytest.mark.slow
def test_resumed_on_two_ranks(tmp_path: Path) -> None:
    """The same bits as without a break, in another order; weights and scores are those of both ranks."""
    (resumed, whole), (other_resumed, other_whole) = run_ranks(_resumed_on_this_rank, str(tmp_path))
    assert resumed == whole
    assert other_resumed == other_whole
    assert whole[0][0]["0.weight"] == other_whole[0][0]["0.weight"]
    assert whole[0][6:8] == other_whole[0][6:8]
