"""Parameters that are thawed and frozen during a run: all ranks make the update of those that are trainable by then."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn

from ignite_train import TrainEvents, UpdateOptions, create_trainer
from ignite_train.ranks import replicas
from ranks import run_ranks

RATE, MOMENTUM = 0.01, 0.9
POWERS = {"a": 1, "b": 2, "c": 3}  # each parameter is multiplied by this power of the input
Plan = dict[int, str]  # after which update which parameters are trainable

PLANS: dict[str, Plan] = {
    "one thawed and one frozen": {0: "ac", 2: "bc"},
    "one thawed": {0: "a", 2: "ab"},
    "one frozen": {0: "abc", 2: "ac"},
    "and back": {0: "ab", 2: "bc", 3: "ab"},
    "all others": {0: "ab", 2: "c"},
}


def data(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Six micro-batches of a rank, of unequal sizes: two to an update on each."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [3 + rank, 2, 1, 4 - rank, 2, 5, 3, 1, 2, 2]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return [(draw(size, 5), draw(size)) for size in sizes]


def weights() -> nn.ParameterDict:
    return nn.ParameterDict({key: torch.linspace(-1, 1, 5, dtype=torch.float64) * power for key, power in POWERS.items()})


def residual(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return sum(x**power @ model[key] for key, power in POWERS.items()) - y


def by_hand(plan: Plan) -> dict[str, list[float]]:
    """The mean over the samples of both ranks, and momentum, written out."""
    model = {key: value.detach().clone() for key, value in weights().items()}
    moments: dict[str, Tensor] = {}
    trainable = plan[0]
    for update in range(5):
        trainable = plan.get(update, trainable)
        group = [pair for rank in range(2) for pair in data(rank)[2 * update : 2 * update + 2]]
        count = sum(len(x) for x, _ in group)
        gradients = {
            key: sum(2 * (residual(model, x, y) @ x**power) for x, y in group) / count for key, power in POWERS.items()
        }
        for key in trainable:
            moments[key] = gradients[key] + (MOMENTUM * moments[key] if key in moments else 0.0)
            model[key] = model[key] - RATE * moments[key]
    return {key: value.tolist() for key, value in model.items()}


def train(plan: Plan, bucketed: bool) -> dict[str, list[float]]:
    if bucketed:
        replicas._TAIL_ELEMENTS = 6  # one parameter travels with the statistics, and the others in a bucket
    model = weights()
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM),
        lambda model, pair: (residual(model, *pair).square().sum(), len(pair[0])),
        accumulation_steps=2,
        options=UpdateOptions(reduction="explicit"),
    )

    @trainer.on(Events.ITERATION_STARTED)
    def change() -> None:
        if (trainable := plan.get(trainer.state.iteration - 1)) is not None:
            for key, parameter in model.items():
                parameter.requires_grad_(key in trainable)

    trainer.run(data(idist.get_rank()), max_epochs=1)
    return {key: parameter.tolist() for key, parameter in model.items()}


@pytest.mark.slow
@pytest.mark.parametrize("bucketed", [False, True], ids=["beside the statistics", "in buckets"])
@pytest.mark.parametrize("name", PLANS)
def test_what_is_trainable_may_change_in_a_run(name: str, bucketed: bool) -> None:
    """Frozen or thawed, explicitly reduced replicas stay equal bit by bit, and come to what float64 arithmetic does."""
    first, second = run_ranks(train, PLANS[name], bucketed)
    assert first == second
    for key, expected in by_hand(PLANS[name]).items():
        assert first[key] == pytest.approx(expected, rel=1e-12, abs=1e-13)


def freeze_within(bucketed: bool) -> dict[str, list[list[float]]]:
    """The weights before and after an update within which a parameter is frozen, and after the next."""
    if bucketed:
        replicas._TAIL_ELEMENTS = 6
    model = weights()
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        lambda model, pair: (residual(model, *pair).square().sum(), len(pair[0])),
        accumulation_steps=2,
        options=UpdateOptions(reduction="explicit"),
    )
    trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED(once=4), lambda: model["b"].requires_grad_(False))
    seen: dict[str, list[list[float]]] = {key: [] for key in model}

    @trainer.on(Events.ITERATION_COMPLETED)
    def look() -> None:
        for key, parameter in model.items():
            seen[key].append(parameter.tolist())

    trainer.run(data(idist.get_rank())[:6], max_epochs=1)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("bucketed", [False, True], ids=["beside the statistics", "in buckets"])
def test_a_parameter_that_is_frozen_within_an_update_stays_where_it_is(bucketed: bool) -> None:
    """The gradients of the micro-batches before do not cross the ranks, which would each step along their own."""
    first, second = run_ranks(freeze_within, bucketed)
    assert first == second
    (before, *after), (other, *others) = first["b"], first["a"]
    assert after == [before, before]
    assert other != others[0] != others[1]
