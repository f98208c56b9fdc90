"""Loss scaling: every policy against the sequences of the system whose rule it has, and its state through a checkpoint."""

from __future__ import annotations

import copy
import inspect
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from ignite_train import (
    DeepSpeedLossScaling,
    FairseqLossScaling,
    ForwardOutput,
    GaveUpError,
    LossScaleFloorError,
    NoLossScaling,
    StaticLossScaling,
    TorchLossScaling,
    UpdateOptions,
    create_supervised_trainer,
    create_trainer,
)
from ignite_train.traffic import count_traffic
from ranks import run_ranks

GOOD = [0] * 10
EARLY = [1, 1, 0, 0, 0, 1, 0, 0, 0, 0]
MIXED = [0, 1, 0, 1, 1, 0, 0, 0, 1, 0, 1]

torch_like = lambda: TorchLossScaling(256.0, growth_interval=2)  # noqa: E731
fairseq_like = lambda: FairseqLossScaling(256.0, scale_window=2)  # noqa: E731
impatient = lambda: DeepSpeedLossScaling(256.0, scale_window=2, hysteresis=1)  # noqa: E731
patient = lambda: DeepSpeedLossScaling(256.0, scale_window=2, hysteresis=2)  # noqa: E731
forgiving = lambda: DeepSpeedLossScaling(256.0, scale_window=2, hysteresis=2, consecutive_hysteresis=True)  # noqa: E731


def scales(policy: Any, overflows: list[int]) -> list[float]:
    """The scale after each update."""
    after = []
    for overflow in overflows:
        policy.update(overflow=bool(overflow))
        after.append(policy.scale)
    return after


# What the systems themselves gave, run side by side: initial scale 256, window 2, an overflow where there is a 1.
@pytest.mark.parametrize(
    ("policy", "overflows", "expected"),
    [
        (torch_like, GOOD, [256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096, 8192]),
        (fairseq_like, GOOD, [256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096, 8192]),
        (impatient, GOOD, [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096]),
        (patient, GOOD, [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096]),
        (forgiving, GOOD, [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096]),
        (torch_like, EARLY, [128, 64, 64, 128, 128, 64, 64, 128, 128, 256]),
        (fairseq_like, EARLY, [128, 64, 64, 128, 128, 64, 64, 128, 128, 256]),
        (impatient, EARLY, [128, 64, 64, 64, 128, 64, 64, 64, 128, 128]),
        (patient, EARLY, [256, 128, 128, 128, 256, 256, 256, 256, 512, 512]),
        (forgiving, EARLY, [256, 128, 128, 128, 256, 256, 256, 256, 512, 512]),
        (torch_like, MIXED, [256, 128, 128, 64, 32, 32, 64, 64, 32, 32, 16]),
        (fairseq_like, MIXED, [256, 128, 128, 64, 32, 32, 64, 64, 32, 32, 16]),
        (impatient, MIXED, [256, 128, 128, 64, 32, 32, 32, 64, 32, 32, 16]),
        (patient, MIXED, [256, 256, 256, 128, 64, 64, 64, 128, 128, 128, 64]),
        (forgiving, MIXED, [256, 256, 256, 256, 128, 128, 128, 256, 256, 256, 256]),
        (
            lambda: DeepSpeedLossScaling(256.0, scale_window=1, hysteresis=1),
            EARLY,
            [128, 64, 64, 128, 256, 128, 128, 256, 512, 1024],
        ),
    ],
)
def test_sequences(policy, overflows, expected):
    """Each policy gives the scales that its system gives, update by update."""
    assert scales(policy(), overflows) == expected


@pytest.mark.parametrize(
    ("tolerance", "overflows_at", "expected"),
    [
        (0.0, {5}, [8, 8, 8, 16, 16, 8, 8, 8, 8, 16, 16, 16]),
        (0.5, {3, 4, 5, 6}, [8, 8, 8, 8, 8, 4, 2, 2, 2, 2, 4, 4]),
        (0.5, {0, 3}, [4, 4, 4, 4, 4, 4, 4, 8, 8, 8, 8, 16]),
        (0.75, {0, 1}, [4, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8]),
    ],
)
def test_fairseq_tolerance(tolerance, overflows_at, expected):
    """Initial scale 8, window 4; with a tolerance only frequent overflows halve. The first two are fairseq's own sequences."""
    policy = FairseqLossScaling(8.0, scale_window=4, tolerance=tolerance)
    assert scales(policy, [int(index in overflows_at) for index in range(12)]) == expected


def test_the_defaults_are_those_of_the_originals():
    """GradScaler's are read from torch; those of fairseq and DeepSpeed are from their options. Floor and ceiling are ours."""
    ours = {
        kind: {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
        for kind in (TorchLossScaling, FairseqLossScaling, DeepSpeedLossScaling)
    }
    common = {"max_scale": 2.0**24, "on_floor": "raise"}
    parameters = inspect.signature(torch.amp.GradScaler).parameters
    torchs = {name: parameters[name].default for name in ("init_scale", "growth_factor", "backoff_factor", "growth_interval")}
    # Its first scale is that of a mean, which the size of the first update makes of it.
    assert torchs["init_scale"] == TorchLossScaling().scale
    assert ours[TorchLossScaling] == torchs | common | {"min_scale": 2.0**-24, "init_scale": None}
    fairseq = {"init_scale": 128.0, "scale_window": 16384, "tolerance": 0.0, "threshold": None, "min_scale": 1e-4}
    assert ours[FairseqLossScaling] == fairseq | common
    deepspeed = {"init_scale": 65536, "scale_window": 1000, "hysteresis": 2, "consecutive_hysteresis": False, "min_scale": 1.0}
    assert ours[DeepSpeedLossScaling] == deepspeed | common


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5])
def test_torch_is_grad_scaler(seed, chance):
    """The scales are those of a real `torch.amp.GradScaler` fed the same overflows, and so are the updates it skips."""
    draw = random.Random(seed)  # noqa: S311
    interval, growth, backoff = draw.randint(1, 4), draw.choice([2.0, 4.0]), draw.choice([0.5, 0.25])  # exact in float32 too
    arguments = {"growth_interval": interval, "growth_factor": growth, "backoff_factor": backoff}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, **arguments)
    policy = TorchLossScaling(2.0**10, max_scale=2.0**120, min_scale=2.0**-120, **arguments)
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(40):
        overflow = draw.random() < chance
        scaler.scale(weight * (math.inf if overflow else 1.0)).backward()
        before = weight.item()
        scaler.step(optimizer)
        scaler.update()
        assert (weight.item() == before) == overflow
        optimizer.zero_grad()
        policy.update(overflow=overflow)
        assert policy.scale == scaler.get_scale()


@pytest.mark.parametrize(
    ("policy", "lowered"),
    [
        (lambda on_floor: DeepSpeedLossScaling(8.0, hysteresis=1, min_scale=2.0, on_floor=on_floor), [4, 2]),
        (lambda on_floor: FairseqLossScaling(8.0, min_scale=2.0, on_floor=on_floor), [4]),
        (lambda on_floor: TorchLossScaling(8.0, min_scale=2.0, on_floor=on_floor), [4, 2]),
    ],
    ids=["deepspeed", "fairseq", "torch"],
)
def test_floor(policy, lowered):
    """At the floor the policy raises, with the scale as it was and both numbers in the error, or holds it for good."""
    holding = policy("hold")
    assert scales(holding, [1] * 6) == (lowered + [lowered[-1]] * 6)[:6]
    raising = policy("raise")
    assert scales(raising, [1] * len(lowered)) == lowered
    for _ in range(2):
        with pytest.raises(LossScaleFloorError, match=rf"loss scale {lowered[-1]},.* below 2\b") as raised:
            raising.update(overflow=True)
        assert (raised.value.loss_scale, raised.value.floor) == (lowered[-1], 2.0)
        assert raising.scale == lowered[-1]


def test_fairseq_threshold_is_a_silent_floor():
    """Fairseq's `threshold` holds the scale without an error."""
    assert scales(FairseqLossScaling(8.0, threshold=3.0), [1] * 4) == [4, 3, 3, 3]


@pytest.mark.parametrize(
    "policy",
    [
        lambda: TorchLossScaling(8.0),
        lambda: FairseqLossScaling(8.0),
        lambda: FairseqLossScaling(8.0, threshold=0.001),
        lambda: DeepSpeedLossScaling(8.0, hysteresis=1, min_scale=0.001),
    ],
    ids=["torch", "fairseq", "fairseq-threshold", "deepspeed"],
)
def test_a_scale_goes_far_below_one(policy):
    """Without a floor of the user's above it the scale continues to be halved, to fractions, as GradScaler's does."""
    policy = policy()
    assert scales(policy, [1] * 8) == [4, 2, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    policy.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert policy.scale == 0.03125


def test_a_scale_may_begin_below_one_and_at_its_bounds():
    """Of every policy, also of a static one."""
    for kind in (TorchLossScaling, FairseqLossScaling, DeepSpeedLossScaling):
        policy = kind(0.5, min_scale=0.5, max_scale=0.5, on_floor="hold")
        assert scales(policy, EARLY) == [0.5] * len(EARLY)
    static = StaticLossScaling(0.5)
    static.load_state_dict(static.state_dict())
    assert static.scale == 0.5


@pytest.mark.parametrize("factor", [1.0, 1.5], ids=str)
def test_an_overflow_must_lower_the_scale(factor):
    """A backoff factor that would keep or raise it is refused."""
    with pytest.raises(ValueError, match=rf"backoff_factor must be below 1, got {factor}"):
        TorchLossScaling(backoff_factor=factor)


@pytest.mark.parametrize(
    ("policy", "ceiling"),
    [
        (TorchLossScaling(growth_interval=1), 2.0**24),
        (FairseqLossScaling(scale_window=1), 2.0**24),
        (DeepSpeedLossScaling(scale_window=1), 2.0**24),
        (TorchLossScaling(100.0, growth_interval=1, max_scale=1000.0), 1000.0),
    ],
    ids=["torch", "fairseq", "deepspeed", "own"],
)
def test_ceiling(policy, ceiling):
    """However many good windows, the scale stops at the ceiling, and comes down from there."""
    assert scales(policy, [0] * 40)[-1] == ceiling
    assert min(scales(policy, [1] * 2)) < ceiling


@pytest.mark.parametrize("policy", [torch_like, fairseq_like, impatient, patient, forgiving])
@pytest.mark.parametrize("overflows", [GOOD, EARLY, MIXED], ids=["good", "early", "mixed"])
def test_state_survives_at_every_update(policy, overflows):
    """Saved after any update, through JSON, and loaded into a fresh policy, the scales to come are the same to the last."""
    whole = scales(policy(), overflows)
    for cut in range(len(overflows) + 1):
        first, second = policy(), policy()
        scales(first, overflows[:cut])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert scales(second, overflows[cut:]) == whole[cut:]


def test_static_and_none_keep_theirs():
    """A static scale never moves, and is the script's and not that of a state; without scaling there is nothing to keep."""
    static, other, none = StaticLossScaling(512), StaticLossScaling(2.0), NoLossScaling()
    assert scales(static, MIXED) == [512.0] * len(MIXED)
    other.load_state_dict(static.state_dict())
    assert other.scale == 2.0
    assert scales(none, MIXED) == [1.0] * len(MIXED)
    assert (none.enabled, static.enabled, none.state_dict()) == (False, True, {})


POLICIES = [StaticLossScaling(2.0), TorchLossScaling(), FairseqLossScaling(), DeepSpeedLossScaling()]


@pytest.mark.parametrize(
    ("own", "foreign"),
    [(own, foreign) for own in POLICIES for foreign in [NoLossScaling(), *POLICIES] if own is not foreign],
    ids=lambda policy: type(policy).__name__,
)
def test_the_state_of_another_policy_is_refused(own, foreign):
    """A policy takes only the state of its own kind; another's is an error in one line, and nothing of it is taken over."""
    own = copy.deepcopy(own)
    before = own.state_dict()
    with pytest.raises(ValueError, match=type(own).__name__) as raised:
        own.load_state_dict(foreign.state_dict())
    assert "\n" not in str(raised.value)
    assert own.state_dict() == before


@pytest.mark.parametrize("own", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("change", [lambda state: state | {"unknown": 1}, lambda state: {}], ids=["more", "less"])
def test_a_state_with_other_keys_is_refused(own, change):
    """A state with a key too many or too few is refused by name."""
    own = copy.deepcopy(own)
    before = own.state_dict()
    with pytest.raises(ValueError, match=type(own).__name__):
        own.load_state_dict(change(before))
    assert own.state_dict() == before


@pytest.mark.parametrize("own", POLICIES, ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -2.0, "512", None], ids=str)
def test_a_damaged_scale_is_refused(own, scale):
    """A scale that is no positive finite number is refused when it is loaded, not when it has ruined the gradients."""
    own = copy.deepcopy(own)
    before = own.state_dict()
    with pytest.raises((ValueError, TypeError), match=r"scale") as raised:
        own.load_state_dict({**before, "scale": scale})
    assert "\n" not in str(raised.value)
    assert own.state_dict() == before


COUNTERS = [(own, name) for own in POLICIES[1:] for name in own.state_dict() if name not in ("scale", "awaits_size")]


@pytest.mark.parametrize(("own", "name"), COUNTERS, ids=[f"{type(own).__name__}-{name}" for own, name in COUNTERS])
def test_a_damaged_counter_is_refused(own, name):
    """It must be an integer, and -1 is allowed only for an update that has not happened yet."""
    own = copy.deepcopy(own)
    before, least = own.state_dict(), -1 if name.startswith("last_") else 0
    for value in (least - 1, 1.5, True, "3", None):
        with pytest.raises(ValueError, match=f"must have an integer from {least} as {name}"):
            own.load_state_dict({**before, name: value})
        assert own.state_dict() == before
    own.load_state_dict({**before, name: least})
    assert own.state_dict()[name] == least


def test_a_resumed_run_grows_at_the_same_update(build, micro_batches):
    """A trainer saved one good update short of growing grows its scale at the very next update of the resumed run."""

    def run(saved: Any, updates: int) -> tuple[list[float], Any]:
        setup = build(loss_scaling=TorchLossScaling(256.0, growth_interval=4))
        if saved is not None:
            setup.trainer.load_state_dict(saved)
        used: list[float] = []
        setup.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: used.append(engine.state.output.loss_scale))
        setup.trainer.run(micro_batches, max_iters=updates)
        return used, setup.trainer.state_dict()

    whole, _ = run(None, 9)
    assert whole == [256.0] * 4 + [512.0] * 4 + [1024.0]
    first, saved = run(None, 3)
    rest, _ = run(json.loads(json.dumps(saved)), 9)
    assert first + rest == whole


def test_the_floor_ends_a_run_before_anything_moved(build, micro_batches):
    """In a run the floor's error comes out of `run`, with gradients cleared, counts as before and the scale still there."""
    model, _, trainer = setup = build(
        lambda model, batch: model(batch[0]).sum() * math.inf, loss_scaling=TorchLossScaling(8.0, min_scale=4.0)
    )
    trainer.run(micro_batches, max_iters=1)
    before = setup.contents()
    with pytest.raises(LossScaleFloorError):
        trainer.run(micro_batches, max_iters=5)
    after = setup.contents()
    assert after[:2] == before[:2]
    assert (trainer.state.iteration, trainer.state.num_skipped) == (1, 1)
    assert after[2]["update"]["loss_scaling"]["scale"] == 4.0
    assert all(parameter.grad is None for parameter in model.parameters())


def never_finite(model: Any, batch: Any) -> Any:
    return mse_loss(model(batch[0]), batch[1]) * math.nan


@pytest.mark.parametrize(
    ("policy", "last"),
    [
        (lambda: StaticLossScaling(8.0), 20),
        (lambda: TorchLossScaling(8.0, min_scale=2.0, on_floor="hold"), 2 + 20),
        (lambda: FairseqLossScaling(8.0, min_scale=2.0, on_floor="hold"), 1 + 20),
        (lambda: FairseqLossScaling(8.0, threshold=2.0), 2 + 20),
        (lambda: DeepSpeedLossScaling(8.0, min_scale=2.0, hysteresis=2, on_floor="hold"), 1 + 2 + 20),
    ],
    ids=["static", "torch", "fairseq", "fairseq-threshold", "deepspeed"],
)
def test_a_run_that_is_never_finite_ends(build, micro_batches, policy, last):
    """Where the scale can fall no further, the twentieth overflow in a row ends the run, by default."""
    model, _, trainer = build(never_finite, loss_scaling=policy())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GaveUpError, match="20 in a row that was skipped") as raised:
        trainer.run(micro_batches, max_iters=2000)
    assert raised.value.update == last
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("give_up_after", [1, 3])
def test_a_high_first_scale_may_fall_as_often_as_it_must(build, micro_batches, give_up_after):
    """Forty overflows in a row, each of which lowers the scale, do not end a run."""
    policy = TorchLossScaling(2.0**24, min_scale=2.0**-24)

    def forward(model: Any, batch: Any) -> Any:
        return mse_loss(model(batch[0]), batch[1]) * (math.inf if policy.scale > 2.0**-16 else 1.0)

    _, _, trainer = build(forward, loss_scaling=policy, give_up_after=give_up_after)
    trainer.run(micro_batches, max_iters=45)
    assert (trainer.state.num_skipped, trainer.state.num_steps) == (40, 5)


def test_a_resumed_run_gives_up_at_the_same_update(build, micro_batches):
    """The number of failures in a row is saved; without it the state is refused."""

    def run(saved: Any, updates: int) -> Any:
        setup = build(never_finite, loss_scaling=StaticLossScaling(8.0), give_up_after=4)
        if saved is not None:
            setup.trainer.load_state_dict(saved)
        setup.trainer.run(micro_batches, max_iters=updates)
        return setup.trainer.state_dict()

    saved = json.loads(json.dumps(run(None, 3)))
    for _ in range(2):  # the state of a run that gave up counts no more than the one it came from
        with pytest.raises(GaveUpError) as raised:
            run(saved, 9)
        assert (raised.value.update, raised.value.in_a_row) == (4, 4)
    del saved["update"]["in_a_row"]
    with pytest.raises(ValueError, match=r"state_dict\['update'\] must have the keys loss_scaling and in_a_row"):
        run(saved, 9)


def test_a_damaged_count_of_failures_is_refused_before_the_scale_is_taken(build):
    """Nothing of an update's state is taken over if a part of it is wrong."""
    _, _, trainer = build(loss_scaling=TorchLossScaling(8.0))
    before = copy.deepcopy(trainer.state_dict())
    saved = copy.deepcopy(before)
    saved["update"]["loss_scaling"]["scale"] = 4.0
    saved["update"]["in_a_row"] = {"was skipped": -1}
    with pytest.raises(ValueError, match=r"state_dict\['in_a_row'\] must be integers of at least 0 by name, got \{'was sk.*-1"):
        trainer.load_state_dict(saved)
    assert trainer.state_dict()["update"] == before["update"]


def test_giving_up_again_counts_the_same(build, micro_batches):
    """An update that gave up was not done: run once more it is as many in a row as before."""
    _, _, trainer = build(never_finite, loss_scaling=StaticLossScaling(8.0), give_up_after=2)
    for _ in range(2):
        with pytest.raises(GaveUpError) as raised:
            trainer.run(micro_batches, max_iters=9)
        assert (raised.value.update, raised.value.in_a_row) == (2, 2)
    assert trainer.state_dict()["update"]["in_a_row"]["was skipped"] == 1


# --- the first scale ---


def wide_sum(model: nn.Module, x: Tensor) -> ForwardOutput:
    """A sum over the samples, whose mean has gradients that float16 holds at a scale of 2^16."""
    return ForwardOutput(0.125 * model(x).float().sum(), len(x))


def first_scales(sizes: Sequence[int], steps: int = 1, **arguments: Any) -> list[tuple[float, bool]]:
    """The loss scale of each update, and whether it was applied."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), wide_sum, accumulation_steps=steps, precision="fp16", **arguments
    )
    found: list[tuple[float, bool]] = []

    def note() -> None:
        assert trainer.state.update_output is not None
        found.append((trainer.state.update_output.loss_scale, trainer.state.update_output.applied))

    trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
    trainer.run([torch.randn(size, 3) for size in sizes], max_epochs=1)
    return found


@pytest.mark.parametrize(
    ("sizes", "steps", "scale"),
    [
        ([1] * 3, 1, 2.0**16),
        ([64] * 3, 1, 2.0**10),
        ([65, 64, 64], 1, 2.0**9),
        ([8192] * 3, 1, 2.0**3),
        ([16] * 12, 4, 2.0**10),
        # Samples come in the second update.
        ([0, 4, 8], 1, 2.0**14),
    ],
)
def test_the_first_scale_is_that_of_a_mean(sizes: list[int], steps: int, scale: float) -> None:
    """Sums over many samples overflow no more than their mean under GradScaler does."""
    found = first_scales(sizes, steps)
    assert [one for one in found if one[1]] == [(scale, True)] * (len(found) - (0 in sizes))


@pytest.mark.parametrize("size", [4, 64, 1024])
def test_no_update_is_lost_that_gradscaler_does_not_lose(size: int) -> None:
    """Ignite's own arguments, whose means are sums inside, against the loop by hand: of 30 updates up to eleven were lost."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(size, 8, generator=generator), 0.1 * torch.randn(size, 1, generator=generator)) for _ in range(30)]
    trainer = create_supervised_trainer(*made(), mse_loss, amp_mode="amp", scaler=True)
    trainer.run(data, max_epochs=1)

    (model, optimizer), scaler, num_skipped = made(), torch.amp.GradScaler("cpu"), 0
    for x, y in data:
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        num_skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    assert trainer.state.num_skipped == num_skipped < 2


def test_the_scale_of_the_user_is_the_first() -> None:
    """Also where it is that which GradScaler begins with."""
    assert [scale for scale, _ in first_scales([64] * 2, loss_scaling=TorchLossScaling(2.0**9))] == [2.0**9] * 2
    assert first_scales([64], loss_scaling=TorchLossScaling(2.0**16)) == [(2.0**16, False)]


def test_a_first_scale_that_is_not_known_yet_is_saved_as_such() -> None:
    """A run that is resumed before its first update finds it then; one that has begun keeps it."""
    policy, other, third = TorchLossScaling(), TorchLossScaling(), TorchLossScaling(8.0)
    other.load_state_dict(policy.state_dict())
    third.load_state_dict(policy.state_dict())
    assert (other.awaits_size, third.awaits_size) == (True, True)
    policy.begin(3.0)
    assert policy.state_dict() == {"scale": 2.0**14, "good_updates": 0}
    other.load_state_dict(policy.state_dict())
    assert (other.scale, other.awaits_size) == (2.0**14, False)
    policy = TorchLossScaling(max_scale=2.0**12, min_scale=2.0**8)
    assert policy.scale == 2.0**12
    policy.begin(2.0**20)
    assert policy.scale == 2.0**8


def first_scale_on_ranks(way: str) -> tuple[list[float], list[int]]:
    """Loss scales and collectives of three updates, of which rank 1 has no data in the first."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = nn.parallel.DistributedDataParallel(model) if way == "ddp" else model
    options = UpdateOptions(reduction="auto" if way == "fsdp" else way)  # type: ignore[arg-type]
    trainer = create_trainer(wrapped, optimizer, wide_sum, precision="fp16", options=options, protect=False)
    scales, collectives = [], []
    with trainer.session():
        for number in range(4):
            empty = number == 0 and idist.get_rank() == 1 and way != "fsdp"
            with count_traffic() as traffic:
                record = trainer.update([] if empty else [torch.randn(8 + 8 * idist.get_rank(), 3)] * 2)
            scales.append(record.loss_scale)
            collectives.append(len(traffic.collectives))
    return scales, collectives


@pytest.mark.slow
@pytest.mark.parametrize("way", ["explicit", "ddp", "fsdp", "local"])
def test_ranks_agree_on_the_first_scale(way: str) -> None:
    """By one more collective in the first update, and none later; also where a rank has no data then."""
    (scales, collectives), (others, _) = run_ranks(first_scale_on_ranks, way)
    size = 2 * (8 + 16 if way == "fsdp" else 8)
    assert scales == others == [2.0 ** (16 - math.ceil(math.log2(size)))] * 4
    assert collectives[2] == collectives[3]
    assert collectives[0] > collectives[3]
