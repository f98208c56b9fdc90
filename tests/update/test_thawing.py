"""Parameters that are thawed and frozen during a run: all ranks make the update of those that are trainable by then."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from ignite_train import Trainer, TrainEvents, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import Validation
from ignite_train.ranks import replicas
from log_messages import messages_from_here
from meshes import on_cpu
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


def freeze_within(way: str) -> dict[str, list[list[float]]]:
    """The weights before and after an update within which a parameter is frozen, and after the next."""
    if way == "in buckets":
        replicas._TAIL_ELEMENTS = 6
    model = weights()
    options = UpdateOptions(reduction="explicit")
    if way == "on a mesh":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
        model["unused"] = nn.Parameter(distribute_tensor(torch.zeros(2), mesh["tensor"], [Shard(0)]))
        options = UpdateOptions(data_dims=("data",))
    trainer = create_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        lambda model, pair: (residual(model, *pair).square().sum(), len(pair[0])),
        accumulation_steps=2,
        options=options,
    )
    for count in (4, 6):  # the second of two micro-batches
        trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED(once=count), lambda: model["b"].requires_grad_(False))
    trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED(once=5), lambda: model["b"].requires_grad_(True))
    seen: dict[str, list[list[float]]] = {key: [] for key in POWERS}

    @trainer.on(Events.ITERATION_COMPLETED)
    def look() -> None:
        for key, before in seen.items():
            before.append(model[key].tolist())

    trainer.run(data(idist.get_rank())[:6], max_epochs=1)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("way", ["beside the statistics", "in buckets", "on a mesh"])
def test_a_parameter_that_is_frozen_within_an_update_stays_where_it_is(way: str) -> None:
    """The gradients of the micro-batches before do not cross the ranks, which would each step along their own."""
    first, second = run_ranks(freeze_within, way)
    assert first == second
    (before, *after), (other, *others) = first["b"], first["a"]
    assert after == [before, before]
    assert other != others[0] != others[1]


# --- what no optimizer steps ---


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def mean_square(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return model(x).square().sum(), len(x)


INPUTS = [torch.linspace(-1, 1, 3 * size, dtype=torch.float64).view(size, 3) for size in (2, 3, 1)]


def replace_head(model: nn.Sequential) -> None:
    model[2] = nn.Linear(4, 1).double()


def add_layer(model: nn.Sequential) -> None:
    model.append(nn.Linear(1, 1).double())


def thaw(model: nn.Sequential) -> None:
    model[2].requires_grad_(True)


def join(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [*model[2].parameters()], "lr": 2 * RATE})


def in_session(trainer: Trainer) -> None:
    with trainer.session():
        trainer.update(INPUTS[:1])


CHANGES = {"replaced": (replace_head, "2.weight"), "added": (add_layer, "3.weight"), "thawed": (thaw, "2.weight")}
MOMENTS = {
    "before run": None,
    "before session": None,
    "in STARTED": Events.STARTED,
    "in EPOCH_STARTED": Events.EPOCH_STARTED(once=2),
    "in EPOCH_COMPLETED": Events.EPOCH_COMPLETED(once=1),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", CHANGES)
def test_what_comes_to_the_model_later_and_to_no_optimizer_is_told(
    name: str, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, when it has a gradient: it is never trained, and its gradients add up in memory. The others are trained."""
    (change, missing), model = CHANGES[name], layers()
    model[2].requires_grad_(name != "thawed")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    trainer = create_trainer(model, optimizer, mean_square)
    if MOMENTS[moment] is None:
        change(model)
    else:
        trainer.add_event_handler(MOMENTS[moment], lambda: change(model))
    in_session(trainer) if moment == "before session" else trainer.run(INPUTS, max_epochs=3)
    told = [line for line in caplog.messages if "in no optimizer of the trainer" in line]
    assert [line.partition(" parameters")[0] for line in told] == [f"'{missing}' and 1 more"]
    assert trainer.state.num_steps == (1 if moment == "before session" else 9)


@pytest.mark.parametrize("toggles", [Events.ITERATION_STARTED, TrainEvents.MICRO_BATCH_STARTED], ids=lambda event: event.name)
def test_layers_that_are_switched_off_in_each_update_are_no_mistake(toggles: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A model of a generator and a discriminator, which two trainers step in turn, each without the gradients of the other."""
    model = nn.ModuleDict({"generator": nn.Linear(3, 3).double(), "discriminator": nn.Linear(3, 1).double()})
    parts, trainers = dict(model.items()), list[Trainer]()
    before = {name: part.weight.detach().clone() for name, part in parts.items()}

    def score(model: nn.ModuleDict, x: Tensor) -> Tensor:
        return model["discriminator"](model["generator"](x)).square().mean()

    def switch(_: object, name: str, other: str) -> None:
        parts[name].requires_grad_(True)
        parts[other].requires_grad_(False)

    for name, other in (("generator", "discriminator"), ("discriminator", "generator")):
        switch(None, name, other)
        optimizer = torch.optim.SGD(parts[name].parameters(), lr=RATE)
        trainer = create_trainer(model, optimizer, score)
        trainer.add_event_handler(toggles, switch, name, other)
        trainers.append(trainer)
    for epoch in (1, 2):
        for trainer in trainers:
            trainer.run(INPUTS, max_epochs=epoch)
    assert all(not torch.equal(part.weight, before[name]) for name, part in parts.items())
    assert "in no optimizer" not in caplog.text


@pytest.mark.parametrize("moment", ["in STARTED", "in EPOCH_STARTED", "in EPOCH_COMPLETED"])
def test_a_group_that_is_added_with_it_is_trained(moment: str) -> None:
    """In the same handler or in a later one of the event, as in the loop by hand."""
    first = 0 if moment == "in STARTED" else 1
    weights = []
    for by_hand in (True, False):
        model = layers()
        model[2].requires_grad_(False)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=RATE)
        if by_hand:
            for epoch in range(3):
                if epoch == first:
                    thaw(model)
                    join(model, optimizer)
                for x in INPUTS:
                    optimizer.zero_grad()
                    (model(x).square().sum() / len(x)).backward()
                    optimizer.step()
        else:
            trainer = create_trainer(model, optimizer, mean_square)
            trainer.add_event_handler(MOMENTS[moment], thaw, model)
            trainer.add_event_handler(MOMENTS[moment], join, model, optimizer)
            trainer.run(INPUTS, max_epochs=3)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-13)


def train_shards() -> tuple[int, list[str]]:
    """Epochs that begin after an evaluation, which leaves whole parameters in the root; then a layer is added."""
    model, lines = layers(), messages_from_here()
    fully_shard(model[0], mesh=on_cpu())
    fully_shard(model, mesh=on_cpu())
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=RATE), mean_square)
    Validation(create_evaluator(model, mean_square), INPUTS).attach(trainer)
    trainer.run(INPUTS, max_epochs=2)
    assert [line for line in lines if "in no optimizer" in line] == []
    add_layer(model)
    trainer.run(INPUTS, max_epochs=3)
    return trainer.state.num_steps, [line.partition(" and ")[0] for line in lines if "in no optimizer" in line]


@pytest.mark.slow
def test_shards_are_those_of_the_optimizer() -> None:
    """Rank 0 tells of what was added, and of nothing else."""
    assert run_ranks(train_shards) == [(9, ["'3.weight'"]), (9, [])]
