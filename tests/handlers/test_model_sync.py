"""All ranks evaluate one model, with the running statistics of the samples of all ranks."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_train import ForwardOutput, Trainer, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import ModelEMA, ModelSync, StochasticWeightAveraging, Validation
from mistakes import Mistake, assert_one_line
from ranks import run_ranks

DATA = [torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + seed for seed in range(6)]


class Net(nn.Module):
    """A BatchNorm, and a buffer that counts the forwards of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3, momentum=1.0, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1 + idist.get_rank()
        return self.last(self.norm(x))


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net()


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 2.0).square().sum(), len(x))


def make(model: nn.Module, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return create_trainer(model, optimizer, forward, options=UpdateOptions(**options))


def _evaluate_on_this_rank(kind: str, with_it: bool, stock: bool, average_first: bool) -> Any:
    """With momentum 1 the statistics of a rank are those of its latest micro-batch."""
    model = net()
    explicit = kind == "explicit"
    wrapped = model if explicit else DistributedDataParallel(model, broadcast_buffers=False)
    trainer = make(wrapped, **({"reduction": "explicit"} if explicit else {"uneven": "error"}))
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append([model.norm.running_mean.tolist(), model.norm.running_var.tolist(), float(model.forwards)])

    evaluator: Any = Engine(look) if stock else create_evaluator(wrapped, forward)
    ema = ModelEMA(0.5)
    if not stock:
        evaluator.add_event_handler(Events.STARTED, look)
    if average_first:
        ema.attach(trainer)
    if with_it:
        ModelSync().attach(trainer, evaluator=evaluator)
    trainer.add_event_handler(Events.COMPLETED, lambda: evaluator.run([DATA[0]]))
    trainer.run(DATA[idist.get_rank() :: 2], max_epochs=1)
    return seen[0]


def of_all_samples() -> tuple[list[float], list[float]]:
    """Mean and unbiased variance as BatchNorm takes them of each rank's micro-batch, put together by hand."""
    first, second = DATA[4], DATA[5]
    mean = (first.mean(0) + second.mean(0)) / 2
    spread = ((first.mean(0) - mean).square() + (second.mean(0) - mean).square()) / 2
    return mean.tolist(), ((first.var(0) + second.var(0)) / 2 + spread).tolist()


CASES = [
    ("explicit", True, False, False),
    ("explicit", True, True, False),
    ("ddp", True, False, True),
    ("ddp", False, False, False),
    ("explicit", False, True, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "with_it", "stock", "average_first"), CASES, ids=str)
def test_two_ranks_evaluate_one_model(kind: str, with_it: bool, stock: bool, average_first: bool) -> None:
    """Those of all ranks; without it an evaluator takes those of rank 0, and a stock engine its own."""
    first, second = run_ranks(_evaluate_on_this_rank, kind, with_it, stock, average_first)
    if not with_it and stock:
        assert first != second
        return
    assert first == second
    assert first[2] == 3.0  # that of rank 0
    mean, var = of_all_samples() if with_it else (DATA[4].mean(0).tolist(), DATA[4].var(0).tolist())
    assert first[0] == pytest.approx(mean, rel=1e-12)
    assert first[1] == pytest.approx(var, rel=1e-12)


def test_alone_it_does_nothing() -> None:
    """In a single process the training and the score are those without it, beside averages too."""
    scores = []
    for with_it in (True, False):
        model = net()
        trainer, evaluator = make(model), create_evaluator(model, forward)
        swa = StochasticWeightAveraging()
        swa.use_in(evaluator)
        if with_it:
            ModelSync().attach(trainer, evaluator=evaluator)
        swa.attach(trainer)
        validation = Validation(evaluator, DATA)
        validation.attach(trainer)
        trainer.run(DATA, max_epochs=2)
        scores.append(validation.best)
    assert scores[0] == scores[1]


MISTAKES: dict[str, Mistake] = {
    "evaluator": (TypeError, "evaluator must be what", lambda: ModelSync().attach(make(net()), evaluator=make(net()))),
    "none": (TypeError, "evaluator must be what", lambda: ModelSync().attach(make(net()), evaluator=None)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
