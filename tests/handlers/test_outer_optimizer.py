"""Replicas that train on their own, and the outer optimizer that makes them equal: against closed forms in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_train import (
    CheckpointError,
    ForwardOutput,
    NonFiniteError,
    StaticLossScaling,
    TorchLossScaling,
    Trainer,
    TrainEvents,
    TrainingError,
    TrainState,
    UpdateOptions,
    count_traffic,
    create_trainer,
)
from ignite_train.handlers import (
    Checkpoint,
    Freeze,
    LearningRateSchedule,
    OuterOptimizer,
    StateConsistency,
    StateMismatchError,
)
from log_messages import messages_from_here
from mistakes import Mistake, assert_one_line
from ranks import RanksFailedError, run_ranks
from tiers import slow

H = 3
RATE = 0.05
DATA = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(24)]
MANY = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(36)]
GOAL = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def share() -> list[Tensor]:
    """The micro-batches of this rank."""
    return DATA[idist.get_rank() :: idist.get_world_size()]


def linear() -> nn.Linear:
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.3, 0.1, -0.2]]))
    return model


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x)[:, 0] - x @ GOAL).square().sum(), len(x), {"seen": len(x)})


def gradient(weight: Tensor, x: Tensor) -> Tensor:
    """Of the mean loss, by hand: 2/n Σ (w - goal)·x x."""
    return 2 / len(x) * x.T @ (x @ (weight - GOAL))


# What the outer optimizer is, and its step by the formula of its paper from the weights before, the mean of the replicas, the
# momentum and the rate inside; it gives the new weights and momentum.
Formula = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _diloco(x: Tensor, mean: Tensor, m: Tensor, _rate: float) -> tuple[Tensor, Tensor]:
    """Douillard et al., 2023: Nesterov's momentum as in Sutskever et al."""
    m = 0.9 * m + (x - mean)
    return x - 0.7 * ((x - mean) + 0.9 * m), m


def _slowmo(x: Tensor, mean: Tensor, u: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Wang et al., 2019, equations 2 and 3, with α = 0.8 and β = 0.6."""
    u = 0.6 * u + (x - mean) / rate
    return x - 0.8 * rate * u, u


def _bmuf(x: Tensor, mean: Tensor, d: Tensor, _rate: float) -> tuple[Tensor, Tensor]:
    """Chen & Huo, 2016, with block momentum η = 0.5 and block rate ζ = 0.9."""
    d = 0.5 * d + 0.9 * (mean - x)
    return x + d, d


def _bmuf_nesterov(x: Tensor, mean: Tensor, d: Tensor, _rate: float) -> tuple[Tensor, Tensor]:
    """The same with Nesterov's block momentum: x is W + ηΔ of before, from which the replicas started."""
    w = x - 0.5 * d
    d = 0.5 * d + 0.9 * (mean - x)
    return (w + d) + 0.5 * d, d


METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], Formula]] = {
    "diloco": ({"lr": 0.7, "momentum": 0.9, "nesterov": True}, {}, _diloco),
    "local": ({"lr": 1.0}, {}, lambda x, mean, m, rate: (mean, m)),
    "slowmo": ({"lr": 0.8, "momentum": 0.6}, {"by_inner_rate": True}, _slowmo),
    "bmuf": ({"lr": 0.9, "momentum": 0.5}, {"count": "steps"}, _bmuf),
    "bmuf-nesterov": ({"lr": 0.9, "momentum": 0.5, "nesterov": True}, {}, _bmuf_nesterov),
    "lookahead": ({"lr": 0.5}, {}, lambda x, mean, m, rate: (x + 0.5 * (mean - x), m)),
}


def make(
    method: str = "diloco", every: int = H, model: nn.Module | None = None, inner: Any = None, **arguments: Any
) -> tuple[Trainer, OuterOptimizer]:
    model = linear() if model is None else model
    options = UpdateOptions(**{"reduction": "local", **arguments.pop("options", {})})
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE) if inner is None else inner(model.parameters())
    trainer = create_trainer(model, optimizer, arguments.pop("forward", forward), options=options, **arguments)
    settings, more, _ = METHODS[method]
    outer = OuterOptimizer(torch.optim.SGD(model.parameters(), **settings), every=every, **more)
    outer.attach(trainer)
    return trainer, outer


def weight_of(trainer: Trainer) -> list[float]:
    model: Any = trainer.model
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def by_hand(method: str, updates: int, ranks: int, rates: Sequence[float]) -> list[list[float]]:
    """The weights of each rank after this number of updates, with plain SGD inside: by the formulas."""
    x = linear().weight.detach()[0]
    momentum, replicas = torch.zeros_like(x), [x.clone() for _ in range(ranks)]
    for update in range(1, updates + 1):
        rate = rates[update - 1]
        for rank in range(ranks):
            replicas[rank] = replicas[rank] - rate * gradient(replicas[rank], DATA[rank::ranks][update - 1])
        if update % H == 0:
            x, momentum = METHODS[method][2](x, torch.stack(replicas).mean(0), momentum, rate)
            replicas = [x.clone() for _ in range(ranks)]
    return [replica.tolist() for replica in replicas]


def _train(method: str, updates: int, schedule: bool) -> dict[str, Any]:
    trainer, outer = make(method)
    logged = messages_from_here()
    if schedule:
        optimizer: Any = trainer.optimizers["optimizer"]
        LearningRateSchedule(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)).attach(trainer, TrainEvents.STEP_COMPLETED)
    records: list[tuple[float, float, dict[str, float]]] = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(trainer: Trainer) -> None:
        output = trainer.state.update_output
        assert output is not None
        records.append((output.loss, output.grad_norm, dict(output.logs)))

    trainer.run(share(), max_iters=updates)
    return {"weights": weight_of(trainer), "records": records, "outer": outer.num_outer_steps, "logged": logged}


@pytest.mark.parametrize("method", list(METHODS))
def test_one_process_is_the_formula(method: str) -> None:
    """Over one replica each method is a kind of lookahead; after and between outer steps."""
    for updates in (2 * H, 3 * H + 1):
        found = _train(method, updates, schedule=False)
        assert found["weights"] == pytest.approx(by_hand(method, updates, 1, [RATE] * updates)[0], rel=1e-12, abs=1e-14)
        assert found["outer"] == updates // H
        assert found["logged"] == [], "there is no other replica from which it could differ"


def test_the_first_outer_step_is_from_the_weights_with_which_training_began() -> None:
    """Not from those at the time of attaching, as of a model into which weights are loaded later; nor from a later run's."""
    ends = []
    for loaded_late, stops in ((False, [2 * H]), (True, [2 * H]), (False, [1, H + 1, 2 * H])):
        model = linear()
        if loaded_late:
            trainer, _ = make("lookahead", model=model)
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[5.0, -4.0, 3.0]]))
        if not loaded_late:
            trainer, _ = make("lookahead", model=model)
        for stop in stops:
            trainer.run(DATA, max_iters=stop)
        ends.append(weight_of(trainer))
    assert ends[0] == ends[1] == ends[2]


def test_weights_that_are_loaded_between_two_runs_are_not_pulled_back() -> None:
    """The next outer step is from them, as of a trainer that begins with them."""
    ends, loaded = [], torch.tensor([[5.0, -4.0, 3.0]])
    for runs_before in (True, False):
        model = linear()
        trainer, _ = make("lookahead", model=model)
        if runs_before:
            trainer.run(DATA[:H], max_epochs=1)
        with torch.no_grad():
            model.weight.copy_(loaded)
        trainer.run(DATA[H : 2 * H], max_epochs=1 + runs_before)
        ends.append(weight_of(trainer))
    assert ends[0] == ends[1]


def _clamped(directory: Path | None, stops: list[int]) -> list[float]:
    """The weights after the last stop, where a handler moves them after each update, with an outer step or without."""
    for max_epochs in stops:
        trainer, _ = make()
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda trainer: trainer.model.weight.data.clamp_(-0.25, 0.25))
        if directory is not None:
            Checkpoint(directory).attach(trainer)
        trainer.run(DATA[:H], max_epochs=max_epochs)
    return weight_of(trainer)


def test_resumed_the_outer_step_is_from_the_weights_of_the_one_before(tmp_path: Path) -> None:
    """Also where a handler has moved those of the model since."""
    assert _clamped(tmp_path, [1, 2]) == _clamped(None, [2])


def two_layers() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def is_thawed(update: int) -> bool:
    """False for an interval, True from the middle of the next one and for another, in which data moves nothing; then once."""
    return update > H + 1 and (update <= 3 * H or update == 4 * H + 1)


def frozen_by_hand(ranks: int, updates: int, settings: dict[str, Any]) -> tuple[list[float], list[list[float]]]:
    """Two plain loops, one inside the other: frozen gradients are None inside, and outside after an interval of such ones."""
    center = two_layers()
    replicas = [two_layers() for _ in range(ranks)]
    outer, firsts = torch.optim.SGD(center.parameters(), **settings), []
    for update in range(1, updates + 1):
        for rank, replica in enumerate(replicas):
            if 2 * H < update <= 3 * H:
                continue  # where the data is not finite
            x = MANY[rank::ranks][update - 1]
            optimizer = torch.optim.SGD(replica.parameters(), lr=RATE, weight_decay=0.1)
            (forward(replica, x).loss / len(x)).backward()  # type: ignore[no-untyped-call]
            if not is_thawed(update):
                replica[0].zero_grad()
            optimizer.step()
            replica.zero_grad()
        if update % H == 0:
            others = [[*replica.parameters()] for replica in replicas]
            for one, *of_ranks in zip(center.parameters(), *others, strict=True):
                one.grad = one.detach() - torch.stack([other.detach() for other in of_ranks]).mean(0)
            if not any(map(is_thawed, range(update - H + 1, update + 1))):
                center[0].zero_grad()
            outer.step()
            for replica in replicas:
                replica.load_state_dict(center.state_dict())
            firsts.append(center[0].weight.detach().flatten().tolist())
    return [value for parameter in replicas[0].parameters() for value in parameter.detach().flatten().tolist()], firsts


OUTER_SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    {"lr": 0.7, "weight_decay": 0.1},
    {"lr": 0.7, "momentum": 0.5, "weight_decay": 0.1},
]
FROZEN_UPDATES = 6 * H


def frozen_inside(settings: dict[str, Any]) -> tuple[list[float], list[list[float]]]:
    model = two_layers()
    inner = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=0.1)
    trainer = create_trainer(model, inner, forward, options=UpdateOptions(reduction="local", on_nonfinite="skip"))
    Freeze(model[0], until=lambda state: is_thawed(state.iteration)).attach(trainer)
    OuterOptimizer(torch.optim.SGD(model.parameters(), **settings), every=H).attach(trainer)
    firsts: list[list[float]] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=H), lambda: firsts.append(model[0].weight.flatten().tolist()))
    data = [one * math.nan if 2 * H <= index < 3 * H else one for index, one in enumerate(share_of_many())]
    trainer.run(data, max_iters=FROZEN_UPDATES)
    return weight_of(trainer), firsts


def share_of_many() -> list[Tensor]:
    return MANY[idist.get_rank() :: idist.get_world_size()]


@pytest.mark.parametrize("settings", OUTER_SETTINGS, ids=["momentum", "decay", "both"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_frozen_for_an_interval_is_not_moved_by_the_outer_step(ranks: int, settings: dict[str, Any]) -> None:
    """By two loops by hand. What is thawed and moved by nothing coasts on, as does all that no `Freeze` holds."""
    expected, expected_firsts = frozen_by_hand(ranks, FROZEN_UPDATES, settings)
    found = [frozen_inside(settings)] if ranks == 1 else run_ranks(frozen_inside, settings)
    for weights, firsts in found:
        assert weights == pytest.approx(expected, rel=1e-10, abs=1e-13)
        for one, by_loop in zip(firsts, expected_firsts, strict=True):
            assert one == pytest.approx(by_loop, rel=1e-10, abs=1e-13)
        assert firsts[0] == two_layers()[0].weight.flatten().tolist()
        assert firsts[1] != firsts[2], "it coasts while all updates are skipped, or decays"
        assert firsts[3] == firsts[2]
        assert firsts[5] == firsts[4]


def test_complex_weights() -> None:
    """Lookahead by its formula; a gradient of |w|² is 2w, so that each inner step multiplies w by 1 - 2 · rate."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([1.0 + 2.0j, -0.5j], dtype=torch.complex64))})
    trainer, outer = make("lookahead", every=2, model=model, forward=lambda model, _: model["w"].abs().square().sum())
    trainer.run([torch.zeros(1)] * 4, max_epochs=1)
    factor = 1 + 0.5 * ((1 - 2 * RATE) ** 2 - 1)
    assert torch.view_as_real(model["w"]).flatten().tolist() == pytest.approx(
        [factor**2 * value for value in (1.0, 2.0, 0.0, -0.5)], rel=1e-6
    )
    assert outer.grad_norm == pytest.approx(factor * (1 - (1 - 2 * RATE) ** 2) * 5.25**0.5, rel=1e-6)


NO_MEAN = [torch.int8, torch.bool, torch.float8_e4m3fn]


def with_frozen(dtypes: Sequence[torch.dtype], outer_has_them: bool) -> tuple[list[float], list[Any]]:
    """The trained weights after two outer steps, and the frozen ones, which are in the inner optimizer."""
    model = linear()
    settings = {"params": [model.weight], "lr": 0.7, "momentum": 0.9, "nesterov": True}
    for number, dtype in enumerate(dtypes):
        model.register_parameter(f"frozen{number}", nn.Parameter(torch.tensor([1.0, 0.0]).to(dtype), requires_grad=False))
    if outer_has_them:
        settings["params"] = model.parameters()
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    trainer = create_trainer(model, inner, forward, options=UpdateOptions(reduction="local"))
    outer = OuterOptimizer(torch.optim.SGD(**settings), every=H)  # type: ignore[arg-type]
    outer.attach(trainer)
    trainer.run(share(), max_iters=2 * H)
    assert [*outer.state_dict()["weights"]] == ["weight"]
    weights, *frozen = model.parameters()
    return weights.detach().flatten().tolist(), [(one.dtype, one.double().tolist()) for one in frozen]


@pytest.mark.parametrize("outer_has_them", [True, False])
@pytest.mark.parametrize("dtype", NO_MEAN, ids=str)
def test_frozen_weights_that_have_no_mean_stay_as_they_are(dtype: torch.dtype, outer_has_them: bool) -> None:
    """Torch has no difference or no norm of them; the others move as without them."""
    weights, frozen = with_frozen([dtype], outer_has_them)
    assert weights == pytest.approx(by_hand("diloco", 2 * H, 1, [RATE] * 2 * H)[0], rel=1e-12)
    assert frozen == [(dtype, [1.0, 0.0])]


@pytest.mark.slow
def test_frozen_weights_that_have_no_mean_on_two_ranks() -> None:
    """Two replicas come to the weights of the loop by hand, as one process does."""
    expected = pytest.approx(by_hand("diloco", 2 * H, 2, [RATE] * 2 * H)[0], rel=1e-12)
    for weights, frozen in run_ranks(with_frozen, NO_MEAN, True):
        assert weights == expected
        assert frozen == [(dtype, [1.0, 0.0]) for dtype in NO_MEAN]


def _begin() -> list[Any]:
    """What is in the model of each rank before the first update; each rank has made another one."""
    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.fill_(10 * idist.get_rank() + number)
    make(model=model, forward=lambda model, x: model(x).sum())
    return [tensor.tolist() for tensor in model.state_dict().values()]


@pytest.mark.slow
def test_all_ranks_begin_with_the_model_of_rank_0() -> None:
    """Its weights and its buffers; or else the first outer step would average models that have nothing in common."""
    assert run_ranks(_begin) == [[[0.0] * 3, [1.0] * 3, [2.0] * 3, [3.0] * 3, 4]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("updates", [3 * H, 3 * H + 2], ids=["equal", "between"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "lookahead"])
def test_two_ranks_are_the_formula(method: str, updates: int) -> None:
    """With a rate that falls; replicas are equal bit by bit after an outer step, and differ between two. Records are agreed."""
    both = run_ranks(_train, method, updates, True)
    rates = [RATE * 0.9**update for update in range(updates)]
    expected = by_hand(method, updates, 2, rates)

    for rank in range(2):
        assert both[rank]["weights"] == pytest.approx(expected[rank], rel=1e-11, abs=1e-13)
    assert (both[0]["weights"] == both[1]["weights"]) == (updates % H == 0)
    assert both[0]["records"] == both[1]["records"]
    rests = ["2 updates after an outer step: each rank has weights of its own" in line for line in both[0]["logged"]]
    assert rests == [True] * (updates % H != 0)
    first = linear().weight.detach()[0]
    halves = [DATA[0], DATA[1]]
    losses = [float((half @ (first - GOAL)).square().sum()) for half in halves]
    norms = [float(gradient(first, half).norm()) for half in halves]
    loss, norm, logs = both[0]["records"][0]
    assert loss == pytest.approx(sum(losses) / 8, rel=1e-12)
    assert norm == pytest.approx((sum(one**2 for one in norms) / 2) ** 0.5, rel=1e-12)
    assert logs == {"seen": 8.0}


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1)).double()


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def _resumed(directory: str, stops: list[int]) -> list[float]:
    """The weights of this rank after the last stop."""
    for max_iters in stops:
        torch.manual_seed(100 + idist.get_rank())
        trainer, _ = make(model=net(), inner=_adam, accumulation_steps=2, seed=1)
        if len(stops) > 1:
            Checkpoint(directory).attach(trainer)
        trainer.run(share() * 2, max_iters=max_iters)
    return weight_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3, 5], ids=str)
def test_resumed_in_one_process_it_ends_with_the_same_bits(stop: int, tmp_path: Path, caplog: Any) -> None:
    """Between two outer steps, and after one, with AdamW inside; no other replica is spoken of."""
    assert _resumed(str(tmp_path / "run"), [stop, 8]) == _resumed("", [8])
    _resumed(str(tmp_path / "short"), [1, 2])
    assert "each rank has weights of its own" not in caplog.text


def test_resumed_it_divides_by_the_rate_of_the_schedule(tmp_path: Path) -> None:
    """A loaded optimizer has other groups, and the rate in those is the one that falls."""
    rates = [RATE * 0.9**update for update in range(3 * H)]
    for updates in (H + 1, 3 * H):
        trainer, _ = make("slowmo")
        schedule = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizers["optimizer"], 0.9)  # type: ignore[arg-type]
        LearningRateSchedule(schedule).attach(trainer, TrainEvents.STEP_COMPLETED)
        Checkpoint(tmp_path).attach(trainer)
        trainer.run(DATA, max_iters=updates)
    assert weight_of(trainer) == pytest.approx(by_hand("slowmo", 3 * H, 1, rates)[0], rel=1e-11, abs=1e-13)


def test_what_the_script_sets_in_another_way_is_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run takes the options of the outer optimizer from the checkpoint, and says so once; else it says nothing."""
    found = []
    for rate, updates in ((0.7, 4), (0.7, 5), (0.1, 6)):
        model = linear()
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        trainer = create_trainer(model, inner, forward, options=UpdateOptions(reduction="local"))
        outer = OuterOptimizer(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), every=2)
        outer.attach(trainer)
        Checkpoint(tmp_path).attach(trainer)
        caplog.clear()
        trainer.run(DATA, max_iters=updates)
        found.append([line for line in caplog.messages if "OuterOptimizer" in line])
    assert found[:2] == [[], []]
    (line,) = found[2]
    assert "the script has changed lr: 0.7 -> 0.1, and the checkpoint's values are used" in line
    assert outer.optimizer.param_groups[0]["lr"] == 0.7


def test_a_rate_of_zero_has_no_outer_gradient() -> None:
    """It would become infinite; the weights are still those of before the outer step."""
    trainer, outer = make("slowmo", every=2)
    optimizer: Any = trainer.optimizers["optimizer"]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    LearningRateSchedule(schedule).attach(trainer, TrainEvents.STEP_COMPLETED)
    with pytest.raises(ValueError, match=r"needs learning rates above 0 .* got 0 for 'weight'"):
        trainer.run(DATA, max_iters=4)
    expected = linear().weight.detach()[0]
    assert weight_of(trainer) == pytest.approx((expected - RATE * gradient(expected, DATA[0])).tolist(), rel=1e-12)
    assert outer.num_outer_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4, 5], ids=str)
def test_resumed_on_two_ranks_it_ends_with_the_same_bits(stop: int, tmp_path: Path) -> None:
    """Each rank has its own weights and moments again, whichever update it stopped after."""
    whole = run_ranks(_resumed, "", [8])
    parts = run_ranks(_resumed, str(tmp_path / "run"), [stop, 8])

    assert parts == whole
    assert whole[0] != whole[1]  # the eighth update is between two outer steps


def _save(directory: str, updates: int) -> list[float]:
    trainer, _ = make(model=net(), inner=_adam)
    Checkpoint(directory).attach(trainer)
    trainer.run(share()[:updates], max_epochs=1)
    return weight_of(trainer)


@pytest.mark.slow
def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    """A checkpoint of an outer step is taken by one rank; one between two is refused, and nothing is trained."""
    both = run_ranks(_save, str(tmp_path / "equal"), 2 * H)
    assert both[0] == both[1]
    trainer, _ = make(model=net(), inner=_adam)
    Checkpoint(tmp_path / "equal").attach(trainer)
    taken: list[list[float]] = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: taken.append(weight_of(trainer)))
    trainer.run(DATA[:1], max_epochs=2)
    assert taken == [both[0]]

    run_ranks(_save, str(tmp_path / "between"), 2 * H + 1)
    trainer, _ = make(model=net(), inner=_adam)
    Checkpoint(tmp_path / "between").attach(trainer)
    with pytest.raises(CheckpointError, match="written 1 update after an outer step, with world size 2, and this"):
        trainer.run(DATA[:1], max_epochs=2)


# --- updates that are skipped ---

BAD = float("inf")


def _spoiled(scaling: Any, bad: list[int], fails: str, count: str, on_nonfinite: str) -> dict[str, Any]:
    """On rank 0 the gradient is not finite in the updates `bad`; `fails` says on which ranks."""

    def spoil(model: nn.Module, x: Tensor) -> ForwardOutput:
        output = forward(model, x)
        hits = trainer.state.iteration in bad and (fails == "all" or idist.get_rank() == 0)
        return output._replace(loss=output.loss * BAD) if hits else output

    model = linear()
    options = UpdateOptions(reduction="local", on_nonfinite=on_nonfinite)  # type: ignore[arg-type]
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    trainer = create_trainer(model, inner, spoil, options=options, loss_scaling=scaling)
    outer = OuterOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), every=H, count=count)  # type: ignore[arg-type]
    outer.attach(trainer)
    seen: list[Any] = []
    means: list[tuple[float, float, dict[str, float]]] = []
    clips: list[float] = []
    logged = messages_from_here()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(trainer: Trainer) -> None:
        output, state = trainer.state.update_output, trainer.state
        assert output is not None
        means.append((output.loss, output.sample_size, dict(output.logs)))
        seen.append((output.applied, output.num_ranks_skipped, output.loss_scale, state.num_steps, outer.num_outer_steps))
        clips.append(output.clip_coefficient)

    trainer.run(share(), max_iters=2 * H)
    return {"weights": weight_of(trainer), "seen": seen, "means": means, "clips": clips, "logged": logged}


def _skipping_by_hand(skips: dict[int, tuple[int, ...]]) -> list[float]:
    """The weights after two outer steps that count updates, where the ranks in `skips[update]` do not step."""
    x = linear().weight.detach()[0]
    replicas = [x.clone(), x.clone()]
    for update in range(1, 2 * H + 1):
        for rank in range(2):
            if rank not in skips.get(update, ()):
                replicas[rank] = replicas[rank] - RATE * gradient(replicas[rank], DATA[rank::2][update - 1])
        if update % H == 0:
            replicas = [torch.stack(replicas).mean(0)] * 2
    return replicas[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
def test_a_rank_whose_gradients_are_not_finite_skips_alone(scaled: bool) -> None:
    """It is counted on all ranks; the loss scale falls on all; the outer steps come when they are due."""
    scaling = TorchLossScaling(init_scale=16.0) if scaled else None
    both = run_ranks(_spoiled, scaling, [2], "one", "updates", "skip")

    assert both[0] == both[1]
    assert both[0]["weights"] == pytest.approx(_skipping_by_hand({2: (0,)}), rel=1e-12)
    sizes = [8.0, 4.0, 8.0, 8.0, 8.0, 8.0]  # those of the ranks that stepped
    assert [(size, logs) for _, size, logs in both[0]["means"]] == [(size, {"seen": size}) for size in sizes]
    assert all(math.isfinite(loss) for loss, _, _ in both[0]["means"])
    scales = [16.0, 16.0, 8.0, 8.0, 8.0, 8.0] if scaled else [1.0] * 6
    skipped = [0, 1, 0, 0, 0, 0]
    assert ["update 2 was skipped on 1 of 2 ranks" in line for line in both[0]["logged"]] == [True]
    assert both[0]["seen"] == [(True, skipped[i], scales[i], i + 1, (i + 1) // H) for i in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize(("count", "outer"), [("updates", [0, 0, 1, 1, 1, 2]), ("steps", [0, 0, 0, 1, 1, 1])])
def test_an_update_that_all_ranks_skip_counts_as_in_the_original(count: str, outer: list[int]) -> None:
    """SlowMo's count advances on an overflow, that of fairseq's BMUF does not."""
    both = run_ranks(_spoiled, StaticLossScaling(4.0), [2], "all", count, "raise")

    assert both[0]["seen"] == both[1]["seen"]
    assert [seen[4] for seen in both[0]["seen"]] == outer
    assert [seen[0] for seen in both[0]["seen"]] == [True, False, True, True, True, True]
    assert [seen[1] for seen in both[0]["seen"]] == [0] * 6  # it is the whole update that was skipped
    assert both[0]["clips"] == [1.0] * 6
    assert [seen[3] for seen in both[0]["seen"]] == [1, 1, 2, 3, 4, 5]
    assert (both[0]["weights"] == both[1]["weights"]) == (count == "updates")  # or else the sixth update has no outer step
    if count == "updates":
        assert both[0]["weights"] == pytest.approx(_skipping_by_hand({2: (0, 1)}), rel=1e-12)


def _stopped() -> str:
    try:
        _spoiled(None, [2], "one", "updates", "raise")
    except NonFiniteError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_without_loss_scaling_one_rank_ends_all() -> None:
    """The message on both ranks names the rank on which the loss was not finite."""
    first, second = run_ranks(_stopped)
    assert first == second
    assert first.startswith("update 2: gradient norm nan, loss ")  # and not that of rank 1, which is finite
    assert "rank 0, micro-batch 1 of 1: inf in the loss" in first
    assert "rank 1," not in first


LIMIT = 1.0


def _apart() -> dict[str, Any]:
    """Rank 0 skips the updates 1 to 5 alone, gradients are clipped and kept, and no outer optimizer is attached."""

    def spoil(model: nn.Module, x: Tensor) -> ForwardOutput:
        output = forward(model, x)
        return output._replace(loss=output.loss * BAD) if idist.get_rank() == 0 and trainer.state.iteration < 6 else output

    model = linear()
    options = UpdateOptions(reduction="local", on_nonfinite="skip", keep_gradients=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    trainer = create_trainer(model, optimizer, spoil, max_grad_norm=LIMIT, options=options)
    logged, records, kept = messages_from_here(), list[tuple[float, float]](), list[Any]()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(trainer: Trainer) -> None:
        output = trainer.state.update_output
        assert output is not None
        records.append((output.grad_norm, output.clip_coefficient))
        kept.append(None if model.weight.grad is None else model.weight.grad[0].tolist())

    trainer.run(share()[:6], max_epochs=1)
    return {"records": records, "kept": kept, "logged": logged}


@pytest.mark.slow
def test_the_record_is_of_the_ranks_that_step() -> None:
    """Their mean clip coefficient, and the root of their mean squared norm; the log tells of the 1st, 2nd, 4th, ... skip."""
    both = run_ranks(_apart)
    weights, records, kept = [linear().weight.detach()[0] for _ in range(2)], [], [list[Any](), list[Any]()]
    for update in range(6):
        stepping = (0, 1) if update == 5 else (1,)
        gradients = {rank: gradient(weights[rank], DATA[rank::2][update]) for rank in stepping}
        norms = {rank: float(one.norm()) for rank, one in gradients.items()}
        clips = {rank: min(1.0, LIMIT / (norm + 1e-6)) for rank, norm in norms.items()}
        for rank, one in gradients.items():
            weights[rank] = weights[rank] - RATE * clips[rank] * one
        number = len(stepping)
        records.append((math.sqrt(sum(norm**2 for norm in norms.values()) / number), sum(clips.values()) / number))
        for rank in range(2):
            kept[rank].append(pytest.approx((clips[rank] * gradients[rank]).tolist()) if rank in gradients else None)
    assert any(clip < 1.0 for _, clip in records)
    for rank in range(2):
        assert both[rank]["records"] == [pytest.approx(one, rel=1e-9) for one in records]
        assert both[rank]["kept"] == kept[rank]
        lines = [line for line in both[rank]["logged"] if "was skipped on 1 of 2 ranks" in line]
        assert [line.split(" was")[0] for line in lines] == ["update 1", "update 2", "update 4"]
        assert [line.rpartition("so far: ")[2] for line in lines] == ["1", "2", "4"]
        assert sum("nothing makes the replicas equal again" in line for line in both[rank]["logged"]) == 1


def _step_far() -> list[Any]:
    """Two updates; the gradient of the second is huge on rank 1."""
    model = linear()
    factor = [1.0, (1.0, 1e170)[idist.get_rank()]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(
        model,
        optimizer,
        lambda model, x: ForwardOutput(model(x).sum() * factor[trainer.state.iteration - 1], len(x)),
        max_grad_norm=1.0,
        options=UpdateOptions(reduction="local"),
    )
    trainer.run(share()[:2], max_epochs=1)
    assert trainer.state.update_output is not None
    return [trainer.state.num_steps, trainer.state.update_output.applied, trainer.state.update_output.grad_norm]


@pytest.mark.slow
def test_a_norm_whose_square_is_infinite_is_clipped() -> None:
    """It is finite in float64, and its square, which crosses the ranks, is not."""
    assert run_ranks(_step_far) == [[2, True, math.inf]] * 2


def _bare() -> tuple[float, float, list[float]]:
    """One update along bare losses, whose sample size is 1."""
    trainer, _ = make(forward=lambda model, x: forward(model, x).loss / len(x), max_grad_norm=LIMIT)
    trainer.run(share()[:1], max_epochs=1)
    assert trainer.state.update_output is not None
    return trainer.state.update_output.grad_norm, trainer.state.update_output.clip_coefficient, weight_of(trainer)


@pytest.mark.slow
def test_a_bare_loss_is_clipped_by_its_norm() -> None:
    """One sample is enough for a rank to take the norm of its gradients."""
    weight = linear().weight.detach()[0]
    gradients = [gradient(weight, DATA[rank]) for rank in range(2)]
    norms = [float(one.norm()) for one in gradients]
    clips = [min(1.0, LIMIT / (norm + 1e-6)) for norm in norms]
    assert max(norms) > LIMIT
    for rank, (norm, clip, found) in enumerate(run_ranks(_bare)):
        assert norm == pytest.approx((sum(one**2 for one in norms) / 2) ** 0.5, rel=1e-9)
        assert clip == pytest.approx(sum(clips) / 2, rel=1e-9)
        assert found == pytest.approx((weight - RATE * clips[rank] * gradients[rank]).tolist(), rel=1e-9)


def _growing() -> list[float]:
    """The loss scale of each update. The gradient of the third is not finite on rank 0, and the sixth has no samples."""

    def uneven(model: nn.Module, x: Tensor) -> ForwardOutput:
        output, update = forward(model, x), trainer.state.iteration
        if update == 6:
            return ForwardOutput(0 * output.loss, 0)
        return output._replace(loss=output.loss * BAD) if update == 3 and idist.get_rank() == 0 else output

    trainer, _ = make(forward=uneven, loss_scaling=TorchLossScaling(16.0, growth_interval=2))
    scales: list[float] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: scales.append(trainer.state.update_output.loss_scale),  # type: ignore[union-attr]
    )
    trainer.run(share()[:9], max_epochs=1)
    return scales


@pytest.mark.slow
def test_the_loss_scale_grows_after_updates_without_an_overflow() -> None:
    """After two in a row on all ranks; an update without samples neither counts nor begins a new count."""
    assert run_ranks(_growing) == [[16.0, 16.0, 32.0, 16.0, 16.0, 32.0, 32.0, 32.0, 64.0]] * 2


def _ended(name: str) -> tuple[str, int]:
    """What ends the run, and after how many steps."""

    def spoil(model: nn.Module, x: Tensor) -> ForwardOutput:
        output = forward(model, x)
        return output._replace(loss=output.loss * BAD) if name == "failures" and trainer.state.iteration > 1 else output

    trainer, _ = make(forward=spoil, options={"on_nonfinite": "skip", "give_up_after": 3})

    @trainer.on(TrainEvents.GRADIENTS_READY(once=2))
    def disturb(trainer: Trainer) -> None:
        optimizer: Any = trainer.optimizers["optimizer"]
        if name == "rate":
            optimizer.param_groups[0]["lr"] = math.nan
        if name == "dropped":
            optimizer.zero_grad()

    try:
        trainer.run(share(), max_epochs=1)
    except TrainingError as error:
        return str(error), trainer.state.num_steps
    return "no error", trainer.state.num_steps


ENDED = {
    "rate": "optimizer must have finite learning rates, got nan in param_groups[0]",
    "dropped": "a handler of GRADIENTS_READY has dropped all gradients before the step",
    "failures": "update 4 is number 3 in a row that was skipped",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ENDED))
def test_what_ends_other_updates_ends_those_of_replicas(name: str) -> None:
    """On both ranks, before the step."""
    for message, num_steps in run_ranks(_ended, name):
        assert message.startswith(ENDED[name])
        assert num_steps == 1


class _Counting(nn.Module):
    """Keeps the sum of what it has seen in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum()  # type: ignore[operator]
        return self.linear(x)


def _with_memory() -> list[float]:
    """What a buffer has added up and what forward has carried, where rank 0 skips the second of three updates alone."""

    def counting(model: nn.Module, x: Tensor, state: TrainState) -> ForwardOutput:
        state.carried["total"] = state.carried.get("total", torch.zeros((), dtype=torch.float64)) + x.sum()
        output = forward(model, x)
        return output._replace(loss=output.loss * BAD) if state.iteration == 2 and idist.get_rank() == 0 else output

    model = _Counting()
    trainer, _ = make(model=model, forward=counting, options={"on_nonfinite": "skip"})
    trainer.run(share()[:3], max_epochs=1)
    return [float(model.total), float(trainer.state.carried["total"])]


@pytest.mark.slow
def test_a_rank_that_skips_alone_forgets_what_forward_has_kept() -> None:
    """Its buffers and what forward carries are those before the update; those of the rank that steps are kept."""
    own = [[float(x.sum()) for x in DATA[rank::2][:3]] for rank in range(2)]
    expected = [own[0][0] + own[0][2], sum(own[1])]
    assert run_ranks(_with_memory) == [[pytest.approx(one, rel=1e-12)] * 2 for one in expected]


class _StoppingScaling(TorchLossScaling):
    """Raises once, after it has taken note of the second update."""

    has_raised = False

    def update(self, *, overflow: bool) -> None:
        super().update(overflow=overflow)
        if self.good_updates == 2 and not self.has_raised:
            self.has_raised = True
            raise OSError("the second update is broken off")


def _broken_off() -> tuple[list[float], list[int]]:
    scaling = _StoppingScaling(4.0)
    trainer, _ = make(loss_scaling=scaling)
    with pytest.raises(OSError, match="broken off"):
        trainer.run(share()[: 2 * H], max_epochs=1)
    trainer.run(share()[: 2 * H], max_epochs=1)
    return weight_of(trainer), [trainer.state.num_steps, trainer.state.num_micro_batches, scaling.good_updates]


@pytest.mark.slow
def test_an_update_that_is_broken_off_after_the_step_is_not_repeated() -> None:
    """It counts on both ranks, once, also for the loss scale."""
    expected = by_hand("diloco", 2 * H, 2, [RATE] * 2 * H)
    for rank, (weights, counts) in enumerate(run_ranks(_broken_off)):
        assert weights == pytest.approx(expected[rank], rel=1e-11, abs=1e-13)
        assert counts == [2 * H] * 3


def _uneven() -> dict[str, Any]:
    trainer, outer = make("local", every=2)
    records = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: records.append((trainer.state.update_output.sample_size, trainer.state.update_output.num_ranks_skipped)),  # type: ignore[union-attr]
    )
    trainer.run(DATA[:2] if idist.get_rank() else DATA[2:6], max_epochs=1)
    return {"weights": weight_of(trainer), "records": records, "outer": outer.num_outer_steps}


@pytest.mark.slow
def test_a_rank_without_data_keeps_its_weights() -> None:
    """It takes part in the outer steps."""
    both = run_ranks(_uneven)
    x = linear().weight.detach()[0]
    for block in range(2):
        replicas = [x.clone(), x.clone()]
        for update in (2 * block, 2 * block + 1):
            replicas[0] = replicas[0] - RATE * gradient(replicas[0], DATA[2 + update])
            if update < 2:
                replicas[1] = replicas[1] - RATE * gradient(replicas[1], DATA[update])
        x = torch.stack(replicas).mean(0)

    assert both[0] == both[1]
    assert both[0]["weights"] == pytest.approx(x.tolist(), rel=1e-12)
    assert both[0]["records"] == [(8.0, 0), (8.0, 0), (4.0, 1), (4.0, 1)]


# --- what crosses the ranks, and what is compared ---


def _traffic(every: int) -> dict[str, int]:
    """The bytes that cross in eight updates of a model of 40,000 weights."""
    model = nn.Linear(200, 200, bias=False)
    if every:
        trainer, _ = make(every=every, model=model, forward=lambda model, x: model(x).square().mean(), protect=False)
    else:
        options = UpdateOptions(reduction="explicit")
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        trainer = create_trainer(model, optimizer, lambda model, x: model(x).square().mean(), options=options, protect=False)
    with count_traffic("cpu") as traffic:
        trainer.run([torch.ones(2, 200)] * 8, max_epochs=1)
    sizes = [one.num_bytes for one in traffic.collectives]
    return {
        "gradients": sum(size for size in sizes if size >= 160_000),
        "calls": sum(size >= 160_000 for size in sizes),
        "all": sum(sizes),
    }


@pytest.mark.slow
def test_gradients_cross_every_h_updates() -> None:
    """As bytes: a half, a fourth, an eighth of those of reducing them in each update; the statistics are small beside them."""
    reduced, *local = (run_ranks(_traffic, every)[0] for every in (0, 1, 2, 4, 8))

    assert reduced["gradients"] == 8 * 160_000
    assert [one["gradients"] for one in local] == [8 * 160_000 // every for every in (1, 2, 4, 8)]
    assert [one["calls"] for one in local] == [8, 4, 2, 1]
    assert all(one["all"] - one["gradients"] < 8_000 for one in local)


def _differing(when: int) -> str:
    trainer, _ = make("local")

    @trainer.on(Events.ITERATION_COMPLETED(once=when))
    def spoil(trainer: Trainer) -> None:
        model: Any = trainer.model
        with torch.no_grad():
            model.weight.add_(idist.get_rank() * 1e-9)

    def late(trainer: Trainer) -> None:
        check(trainer)

    model: Any = trainer.model
    check = StateConsistency(model, trainer.optimizers["optimizer"], optimizer_state=False)  # type: ignore[arg-type]
    check.attach(trainer)
    trainer.append_event_handler(Events.ITERATION_COMPLETED(once=when), late)
    try:
        trainer.run(share(), max_iters=2 * H)
    except StateMismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_states_are_compared_after_outer_steps_only() -> None:
    """Replicas that differ between two outer steps are not an error; what differs after one is."""
    assert run_ranks(_differing, H - 1) == ["no error"] * 2
    first, second = run_ranks(_differing, H)
    assert first == second
    assert first.startswith(f"update {H}: the ranks differ in parameter weight")


def _changed_on_one_rank() -> None:
    trainer, outer = make("local")

    @trainer.on(Events.ITERATION_COMPLETED(once=1))
    def spoil(trainer: Trainer) -> None:
        if idist.get_rank():
            outer.optimizer.param_groups[0]["lr"] = 0.9

    trainer.run(share(), max_iters=2 * H)


@pytest.mark.slow
def test_by_default_an_outer_step_that_differs_is_an_error() -> None:
    """On both ranks: here the outer rate differs, and so the weights after the outer step."""
    with pytest.raises(RanksFailedError, match=rf"(?s)rank 0: .*StateMismatchError: update {H}.*rank 1: .*StateMismatchError"):
        run_ranks(_changed_on_one_rank)


class Counting(torch.optim.SGD):
    """Counts its steps in its group, as the optimizers of schedulefree do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["k"] = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["k"] += 1
        return super().step(closure)


def _counted_with_a_skip(changed: str) -> tuple[int, str]:
    """Rank 1 skips the second update alone; `changed` is a setting that it then has otherwise."""
    model = linear()
    inner = Counting(model.parameters(), lr=RATE)
    trainer = create_trainer(model, inner, forward, options=UpdateOptions(reduction="local", on_nonfinite="skip"))
    OuterOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), every=H).attach(trainer)
    data = share()
    if idist.get_rank():
        data[1] = data[1] * BAD
        inner.param_groups[0].update({changed: 0.125} if changed else {})
    try:
        trainer.run(data, max_iters=2 * H)
    except StateMismatchError as error:
        return inner.param_groups[0]["k"], str(error)
    return inner.param_groups[0]["k"], ""


@pytest.mark.slow
def test_steps_that_an_optimizer_counts_in_its_group_may_differ() -> None:
    """A rank that skips alone has made fewer. A learning rate that differs is an error all the same."""
    assert run_ranks(_counted_with_a_skip, "") == [(2 * H, ""), (2 * H - 1, "")]
    assert {message.partition(";")[0] for _, message in run_ranks(_counted_with_a_skip, "lr")} == {
        f"update {H}: the ranks differ in learning rate of group 0"
    }


def _skipped_by_a_handler() -> list[Any]:
    """A handler changes the gradients of one rank so that they are not finite."""
    trainer, _ = make("local", options={"on_nonfinite": "skip"})

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def spoil(trainer: Trainer) -> None:
        model: Any = trainer.model
        if idist.get_rank() and trainer.state.iteration == 2:
            model.weight.grad.fill_(float("nan"))

    seen: list[Any] = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda: seen.append(trainer.state.update_output.num_ranks_skipped),  # type: ignore[union-attr]
    )
    trainer.run(share(), max_iters=2 * H)
    return [seen, weight_of(trainer)]


@pytest.mark.slow
def test_what_handlers_make_of_the_gradients_decides() -> None:
    """GRADIENTS_REDUCED comes before the decision of the rank."""
    both = run_ranks(_skipped_by_a_handler)
    assert both[0] == both[1]
    assert both[0][0] == [0, 1, 0, 0, 0, 0]
    assert both[0][1] == pytest.approx(_skipping_by_hand({2: (1,)}), rel=1e-12)


# --- an outer step that fails ---


class _Failing(torch.optim.SGD):
    """Raises in its first step, once it has moved a parameter."""

    failures = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.failures:
            super().step(closure)
            return
        self.failures = 1
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(5.0)
        raise OSError("the outer step has failed")


def _after_a_failed_step() -> dict[str, Any]:
    """A run that continues after its first outer step has raised; `before` is what the replica had when it raised."""
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    trainer = create_trainer(model, inner, forward, options=UpdateOptions(reduction="local"), protect=False)
    outer = OuterOptimizer(_Failing(model.parameters(), lr=1.0), every=H)
    outer.attach(trainer)
    loader = share()[: 2 * H]
    with trainer.session():
        for number, x in enumerate(loader, start=1):
            try:
                trainer.update([x])
            except OSError:
                failed = {"update": number, "weights": weight_of(trainer), "gradient": model.weight.grad}
    return {"failed": failed, "weights": weight_of(trainer), "outer": outer.num_outer_steps, "steps": trainer.state.num_steps}


def _by_hand_after_a_failed_step(ranks: int) -> tuple[list[list[float]], list[float]]:
    """What each replica has when the outer step fails, and all of them after the second one, which is a mean."""
    replicas = [linear().weight.detach()[0].clone() for _ in range(ranks)]
    found: list[list[float]] = []
    for update in range(2 * H):
        for rank in range(ranks):
            replicas[rank] = replicas[rank] - RATE * gradient(replicas[rank], DATA[rank::ranks][update])
        if update == H - 1:
            found = [replica.tolist() for replica in replicas]
    return found, torch.stack(replicas).mean(0).tolist()


@pytest.mark.parametrize("ranks", [1, slow(2)], ids=str)
def test_an_outer_step_that_raises_loses_no_update(ranks: int) -> None:
    """Each replica keeps its weights of that moment, without the outer gradient; the next outer step has all updates in it."""
    both = [_after_a_failed_step()] if ranks == 1 else run_ranks(_after_a_failed_step)
    before, after = _by_hand_after_a_failed_step(ranks)
    for rank, found in enumerate(both):
        assert found["failed"]["update"] == H
        assert found["failed"]["weights"] == pytest.approx(before[rank], rel=1e-12)
        assert found["failed"]["gradient"] is None
        assert found["weights"] == pytest.approx(after, rel=1e-12)
        assert (found["outer"], found["steps"]) == (1, 2 * H)


# --- what is refused ---


@pytest.mark.parametrize("when", ["before the run", "at its start", "in an update", "when it is resumed"])
def test_what_comes_into_the_optimizers_later_is_refused(when: str, tmp_path: Path) -> None:
    """The outer step would leave it out, so that it differed between the replicas; what came is named."""

    def start(comes: str) -> Trainer:
        model = two_layers()
        model[0].requires_grad_(False)
        inner, outer = (torch.optim.SGD(model[2].parameters(), lr=RATE) for _ in range(2))
        trainer = create_trainer(model, inner, forward, options=UpdateOptions(reduction="local"))
        OuterOptimizer(outer, every=H).attach(trainer)

        def thaw() -> None:
            model[0].requires_grad_(True)
            for one in (inner, outer) if comes == "in an update" else (inner,):
                one.add_param_group({"params": [*model[0].parameters()], "lr": RATE})

        if comes == "before the run":
            thaw()
        elif comes == "at its start":
            trainer.add_event_handler(Events.STARTED, thaw)
        elif comes == "in an update":
            trainer.add_event_handler(Events.ITERATION_STARTED(once=2), thaw)
        return trainer

    if when == "when it is resumed":
        first, trainer = start("at its start"), start("")
        for one in (first, trainer):
            Checkpoint(tmp_path / "run").attach(one)
        first.run(share(), max_iters=1)
    else:
        trainer = start(when)
    with pytest.raises(ValueError, match=r"got '0\.weight', which came after attach; .*Freeze") as raised:
        trainer.run(share(), max_iters=H)
    assert "\n" not in str(raised.value)
    assert trainer.state.iteration == (0 if when == "before the run" else H)


def _other_model() -> None:
    _, outer = make()
    outer.load_state_dict({**outer.state_dict(), "weights": {"weight": torch.zeros(2, 3)}})


def _half_a_state() -> None:
    _, outer = make()
    outer.load_state_dict({"num_outer_steps": 2})


def _mistake(name: str) -> str:
    model, ddp = linear(), None
    try:
        if name == "reduced":
            trainer = create_trainer(
                model, torch.optim.SGD(model.parameters(), lr=RATE), forward, options=UpdateOptions(reduction="explicit")
            )
            OuterOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), every=2).attach(trainer)
        elif name == "ddp":
            ddp = DistributedDataParallel(model)
            create_trainer(ddp, torch.optim.SGD(ddp.parameters(), lr=RATE), forward, options=UpdateOptions(reduction="local"))
    except ValueError as error:
        return str(error)
    return "no error"


REFUSED_ON_TWO = {
    "reduced": "OuterOptimizer needs replicas that train on their own, got a trainer that reduces gradients in each update",
    "ddp": "model must be without DistributedDataParallel for reduction='local'",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REFUSED_ON_TWO))
def test_what_two_ranks_refuse(name: str) -> None:
    """On both of them, in one line."""
    for says in run_ranks(_mistake, name):
        assert says.startswith(REFUSED_ON_TWO[name])
        assert "\n" not in says


def _attach_twice() -> None:
    trainer, outer = make()
    outer.attach(trainer)


def _other_parameters() -> None:
    trainer, _ = make()
    trainer.moments.after_update.clear()
    OuterOptimizer(torch.optim.SGD(linear().parameters(), lr=1.0), every=2).attach(trainer)


def _too_many_parameters() -> None:
    model = linear()
    trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=RATE), forward)
    OuterOptimizer(torch.optim.SGD([*model.parameters(), *linear().parameters()], lr=1.0), every=2).attach(trainer)


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(linear().parameters(), lr=1.0)


def _closure() -> None:
    make(options={"closure": True})


def _replay() -> None:
    make(options={"uneven": "replay"})


def _limits() -> None:
    make(inner=lambda parameters: {"all": torch.optim.SGD(parameters, lr=RATE)}, max_grad_norm={"all": 1.0})


def _attach_the_inner_one() -> None:
    """It would step along the gradients and the moves of the weights, with one state for both."""
    model = linear()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    OuterOptimizer(inner, every=2).attach(create_trainer(model, inner, forward))


MISTAKES: dict[str, Mistake] = {
    "optimizer": (TypeError, "optimizer must be a torch.optim.Optimizer", lambda: OuterOptimizer(linear(), every=2)),  # type: ignore[arg-type]
    "every": (ValueError, "every must be at least 1", lambda: OuterOptimizer(_sgd(), every=0)),
    "count": (ValueError, "count must be one of", lambda: OuterOptimizer(_sgd(), every=2, count="epochs")),  # type: ignore[arg-type]
    "rate": (TypeError, "by_inner_rate must be True or False", lambda: OuterOptimizer(_sgd(), every=2, by_inner_rate=1)),  # type: ignore[arg-type]
    "inner": (
        ValueError,
        "optimizer must be another optimizer than the trainer's own, got the same; pass",
        _attach_the_inner_one,
    ),
    "twice": (ValueError, "trainer must have one OuterOptimizer at most", _attach_twice),
    "others": (
        ValueError,
        "optimizer must be over the parameters that are trained, got one without 'weight'",
        _other_parameters,
    ),
    "more": (ValueError, "got 1 that are not trained", _too_many_parameters),
    "half": (ValueError, r"must have the keys of OuterOptimizer\.state_dict\(\), got one without optimizer", _half_a_state),
    "state": (ValueError, "state_dict must be of the same model, got one without a fitting 'weight'", _other_model),
    "closure": (ValueError, "closure must be left out with reduction='local'", _closure),
    "replay": (ValueError, "uneven must be left out with reduction='local'", _replay),
    "limits": (ValueError, "max_grad_norm must be one number with reduction='local'", _limits),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
