"""Several optimizers over one model: stepped together or not at all, each saved under its name."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import cuts
from bits import bit_by_bit
from ignite_train import (
    CheckpointError,
    LearningRateError,
    StaticLossScaling,
    TorchLossScaling,
    Trainer,
    TrainEvents,
    count_traffic,
    create_evaluator,
    create_supervised_trainer,
    create_trainer,
)
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.device import to_host
from ignite_train.fast.folded_step import FoldedStep
from ignite_train.handlers import (
    Checkpoint,
    LearningRateSchedule,
    OptimizerModes,
    StateConsistency,
    StateMismatchError,
    TrainingMetrics,
    Validation,
)
from ranks import run_ranks
from tiers import accelerated
from update_options import with_options

SIZES = [[[2, 3], [4]], [[1], []], [[3], [2, 5]]]  # by update and rank
LIMITS: dict[str, Any] = {"none": None, "one": 0.15, "each": {"first": 0.1, "second": 0.05}, "some": {"second": 0.05}}


class Job(NamedTuple):
    """A trainer and what it moves."""

    trainer: Trainer
    model: nn.Module
    optimizers: dict[str, Optimizer]

    def state(self) -> Any:
        """Parameters, moments and options, bit by bit."""
        return bit_by_bit([self.model.state_dict(), [one.state_dict() for one in self.optimizers.values()]])


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and all else."""
    parameters = list(model.parameters())
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() != 2]


def pair(model: nn.Module, **options: Any) -> dict[str, Optimizer]:
    """SGD with momentum for the matrices and AdamW for the rest."""
    matrices, others = split(model)
    return {"first": SGD(matrices, lr=0.1, momentum=0.9, **options), "second": AdamW(others, lr=0.02, **options)}


def make(model: nn.Module | None = None, optimizers: Any = None, **arguments: Any) -> Job:
    model = network() if model is None else model
    optimizers = pair(model) if optimizers is None else optimizers
    named = optimizers if isinstance(optimizers, Mapping) else dict(enumerate(optimizers))
    return Job(create_trainer(model, optimizers, cuts.forward, **with_options(**arguments)), model, dict(named))


def by_hand(limit: Any) -> tuple[list[float], list[tuple[float, ...]]]:
    """Parameters and norms of the loop on all samples of each update at once."""
    model, start, norms = network(), 0, []
    optimizers = pair(model)
    for sizes in SIZES:
        count = sum(map(sum, sizes))
        loss, weight, *_ = cuts.forward(model, cuts.cut(cuts.samples(), [count], start)[0])
        start += count
        (loss / weight).backward()
        parts = dict(zip(optimizers, split(model), strict=True))
        each = {name: float(torch.nn.utils.get_total_norm([p.grad for p in part])) for name, part in parts.items()}
        norms.append((math.hypot(*each.values()), *each.values()))
        if isinstance(limit, Mapping):
            for name, most in limit.items():
                torch.nn.utils.clip_grad_norm_(parts[name], most)
        elif limit is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), norms


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_rank(way: str, limit: Any) -> tuple[list[float], list[tuple[float, ...]], list[str]]:
    """The same on this rank's samples; and the collectives of the last update."""
    model = network()
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    arguments = with_options(max_grad_norm=limit, reduction=way)
    trainer = create_trainer(wrapped, pair(model), cuts.forward, **arguments)
    start, norms = 0, []
    with trainer.session():
        for sizes in SIZES:
            rank, ranks = idist.get_rank(), idist.get_world_size()
            mine = [size for own in (sizes if ranks == 1 else sizes[rank : rank + 1]) for size in own]
            before = 0 if ranks == 1 else sum(map(sum, sizes[:rank]))
            with count_traffic() as traffic:
                record = trainer.update(cuts.cut(cuts.samples(), mine, start + before))
            norms.append((record.grad_norm, *record.grad_norms.values()))
            start += sum(map(sum, sizes))
    parameters = torch.cat([whole(p.detach()).flatten() for p in model.parameters()]).tolist()
    return parameters, norms, [one.name for one in traffic.collectives]


def check_outcome(limit: Any, parameters: list[float], norms: list[tuple[float, ...]]) -> None:
    expected, expected_norms = by_hand(limit)
    assert parameters == pytest.approx(expected, rel=1e-9)
    for one, other in zip(norms, expected_norms, strict=True):
        assert one == pytest.approx(other[: len(one)], rel=1e-9)
        assert len(one) == (3 if isinstance(limit, Mapping) else 1)


@pytest.mark.parametrize("name", list(LIMITS))
def test_one_process_is_the_loop_by_hand(name: str) -> None:
    """With no limit for the norm, one over all, and one for each or some of them."""
    parameters, norms, collectives = on_rank("auto", LIMITS[name])
    check_outcome(LIMITS[name], parameters, norms)
    assert collectives == []


def all_on_ranks(way: str) -> list[Any]:
    return [on_rank(way, limit) for limit in LIMITS.values()]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit", "fsdp"])
def test_ranks_are_the_loop_by_hand(way: str) -> None:
    """On ragged and empty groups; limits of their own cost sharded models one small all-reduce for each optimizer."""
    for outcomes in run_ranks(all_on_ranks, way):
        without = outcomes[0][2]
        for limit, (parameters, norms, collectives) in zip(LIMITS.values(), outcomes, strict=True):
            check_outcome(limit, parameters, norms)
            more = ["allreduce_"] * 2 if way == "fsdp" and isinstance(limit, Mapping) else []
            assert collectives == [*without, *more]


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_two_of_one_kind_are_one_optimizer_over_all(kind: str, scale: float | None) -> None:
    """Bit by bit: parameters, and the norm that both are clipped by, with and without a loss scale."""
    outcomes = []
    for several in (True, False):
        model = network(torch.float32)
        groups = split(model)
        flags: dict[str, Any] = {"lr": 0.02, kind: True}
        optimizer = [AdamW(part, **flags) for part in groups] if several else AdamW([*groups[0], *groups[1]], **flags)
        scaling = None if scale is None else StaticLossScaling(scale)
        trainer = create_trainer(model, optimizer, cuts.forward, max_grad_norm=0.1, accumulation_steps=2, loss_scaling=scaling)
        norms: list[float] = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda t, norms=norms: norms.append(t.state.output.grad_norm))
        trainer.run(cuts.cut(cuts.samples(), [2, 3, 1, 4, 2]), max_epochs=2)
        outcomes.append((bit_by_bit(model.state_dict()), norms))
    assert outcomes[0] == outcomes[1]


@accelerated
def test_each_folds_where_it_can(caplog: pytest.LogCaptureFixture) -> None:
    """A fused kernel takes the factor of its own optimizer; the other one's gradients are multiplied."""
    model = network(torch.float32)
    matrices, others = split(model)
    divisors: list[bool] = []
    with caplog.at_level(logging.INFO, logger="ignite_train"):
        job = make(model, {"fused": AdamW(matrices, lr=0.02, fused=True), "plain": SGD(others, lr=0.1)}, max_grad_norm=0.1)
        job.optimizers["fused"].register_step_post_hook(lambda one, *_: divisors.append("grad_scale" in vars(one)))
        job.trainer.run(cuts.cut(cuts.samples(), [2, 3]), max_epochs=1)
    assert divisors == [True, True]
    assert "gradients for AdamW are unscaled, normalised and clipped inside its fused kernel" in caplog.text
    assert "gradients for SGD are unscaled, normalised and clipped in a pass over memory of their own" in caplog.text


def test_muon_and_adamw_are_the_loop_by_hand() -> None:
    """Bitwise, where each update has as many samples as a power of two."""

    def optimizers(model: nn.Module) -> list[Optimizer]:
        matrices, others = split(model)
        return [Muon(matrices, lr=0.02), AdamW(others, lr=0.02)]

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        x, y, _ = micro_batch
        return (model(x.float()).squeeze(1) - y.float()).square().sum(), len(x)

    model, theirs = network(torch.float32), network(torch.float32)
    trainer, ours = create_trainer(model, optimizers(model), forward, max_grad_norm=0.5), optimizers(theirs)
    batches = cuts.cut(cuts.samples(), [4, 4, 4])
    trainer.run(batches, max_epochs=1)
    for batch in batches:
        loss, count = forward(theirs, batch)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for optimizer in ours:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in (model, theirs))
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(found, torch.cat([p.detach().flatten() for p in network(torch.float32).parameters()]))


@pytest.mark.parametrize("scaled", [True, False], ids=["overflow", "nonfinite"])
@pytest.mark.parametrize("limit", ["one", "each"])
def test_a_skip_leaves_no_trace_in_any(limit: str, scaled: bool) -> None:
    """An update that is not finite moves no parameter, no moment and no number of steps, and both go on from there."""
    scaling = TorchLossScaling(init_scale=4.0) if scaled else None
    job = make(max_grad_norm=LIMITS[limit], loss_scaling=scaling, on_nonfinite="skip")
    good, (x, y, weight) = cuts.cut(cuts.samples(), [3, 2]), cuts.cut(cuts.samples(), [2])[0]
    with job.trainer.session():
        job.trainer.update(good[:1])
        before = job.state()
        record = job.trainer.update([(x * math.nan, y, weight)])
        assert (record.applied, record.grad_norms, record.clip_coefficient) == (False, {}, 1.0)
        assert job.state() == before
        job.trainer.update(good[1:])
        assert job.state() != before


@accelerated
def test_the_device_queues_the_steps_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each has its moments, and unless each has a limit of its own; the bits are those of the host's way."""
    outcomes: list[Any] = []
    queued: list[bool] = []
    step_if = FoldedStep.step_if
    monkeypatch.setattr(FoldedStep, "step_if", lambda self, *args: (queued.append(True), step_if(self, *args))[1])
    for host, limit in (("cpu", 0.1), ("nowhere", 0.1), ("nowhere", {"first": 0.1})):
        monkeypatch.setattr(to_host, "_HOST", host)  # the CPU counts as an accelerator
        queued.clear()
        model = network(torch.float32)
        job = make(model, pair(model, fused=True), max_grad_norm=limit)
        job.trainer.run(cuts.cut(cuts.samples(), [2, 3, 4]), max_epochs=1)
        outcomes.append((job.state(), len(queued)))
    assert outcomes[1] == (outcomes[0][0], 4)
    assert (outcomes[0][1], outcomes[2][1]) == (0, 0)


def test_an_optimizer_without_gradients_is_stepped_too() -> None:
    """As in a loop by hand, where each `step` is called; its parameters do not move."""
    model = network()
    model.add_module("unused", nn.Linear(2, 2).double())
    used = [p for name, p in model.named_parameters() if not name.startswith("unused")]
    unused = AdamW(model.unused.parameters(), lr=1.0, fused=True)  # type: ignore[union-attr]
    calls: list[Any] = []
    unused.register_step_post_hook(lambda *_: calls.append(1))

    def forward(model: Any, micro_batch: Any) -> Any:
        return cuts.forward(model[:3], micro_batch)

    trainer = create_trainer(
        model, {"used": SGD(used, lr=0.1), "unused": unused}, forward, max_grad_norm={"used": 0.1, "unused": 0.1}
    )
    before = bit_by_bit(dict(model.unused.state_dict()))  # type: ignore[union-attr]
    record = trainer.run(cuts.cut(cuts.samples(), [2, 3])).update_output
    assert record is not None
    assert (len(calls), bit_by_bit(dict(model.unused.state_dict()))) == (2, before)  # type: ignore[union-attr]
    assert record.grad_norms["unused"] == 0.0


def test_rates_of_all_are_in_the_record() -> None:
    """Those of the first optimizer first, a schedule for each; and logged by the index of the group."""
    job = make()
    for scheduler in (StepLR(job.optimizers["first"], 1, 0.5), ExponentialLR(job.optimizers["second"], 0.1)):
        LearningRateSchedule(scheduler).attach(job.trainer)
    TrainingMetrics().attach(job.trainer, Events.ITERATION_COMPLETED)
    rates = []
    job.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda t: rates.append(t.state.output.learning_rates))
    state = job.trainer.run(cuts.cut(cuts.samples(), [2, 3, 1]))
    assert rates == [pytest.approx((0.1 * 0.5**i, 0.02 * 0.1**i)) for i in range(3)]
    assert state.metrics["learning_rate/1"] == pytest.approx(0.02 * 0.1**2)


@pytest.mark.parametrize("group", [0, 1])
def test_a_rate_that_is_not_finite_names_its_optimizer(group: int) -> None:
    """None of the optimizers has stepped; the error can be sent to another process."""
    job = make()
    job.optimizers["second"].add_param_group({"params": [], "lr": 0.1})
    before = job.state()

    @job.trainer.on(TrainEvents.GRADIENTS_READY)
    def spoil() -> None:
        job.optimizers["second"].param_groups[group]["lr"] = math.nan

    rate = job.optimizers["second"].param_groups[group]["lr"]
    place = rf"optimizer\['second'\] must have .* in param_groups\[{group}\]"
    with pytest.raises(LearningRateError, match=place) as caught:
        job.trainer.run(cuts.cut(cuts.samples(), [2]))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    job.optimizers["second"].param_groups[group]["lr"] = rate
    assert job.state() == before


def test_gradients_dropped_for_one_leave_the_other_stepping() -> None:
    """As DINO freezes its last layer."""
    job = make(max_grad_norm=LIMITS["each"])

    @job.trainer.on(TrainEvents.GRADIENTS_READY)
    def freeze() -> None:
        for parameter in split(job.model)[1]:
            parameter.grad = None

    before = [p.detach().clone() for p in job.model.parameters()]
    job.trainer.run(cuts.cut(cuts.samples(), [2]))
    moved = [not torch.equal(p, q) for p, q in zip(job.model.parameters(), before, strict=True)]
    assert moved == [True, False, True, False]


def test_a_supervised_trainer_takes_them_too() -> None:
    """Its update is that of `create_trainer`."""
    jobs = []
    for create in (create_supervised_trainer, create_trainer):
        model = network()
        loss: Any = nn.MSELoss()
        if create is create_trainer:
            loss = lambda model, pair: (nn.functional.mse_loss(model(pair[0]), pair[1], reduction="sum"), len(pair[0]))  # noqa: E731
        trainer = create(model, pair(model), loss, max_grad_norm=LIMITS["each"])
        x, y, _ = cuts.samples()
        trainer.run([(x[i : i + 4], y[i : i + 4, None]) for i in range(0, 16, 4)])
        jobs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*jobs, rtol=1e-12)


# --- checkpoints -------------------------------------------------------------------------------------------------------------


def saved_run(directory: Path, updates: int, *, names: tuple[str, str] = ("first", "second"), stray: bool = False) -> Job:
    """A run with schedules, clipping and a group that joined in the middle; from the newest checkpoint, if there is one."""
    model = network()
    optimizers = dict(zip(names, pair(model).values(), strict=True))
    job = make(model, optimizers, max_grad_norm={names[0]: 0.1, names[1]: 0.05})
    for scheduler in (StepLR(optimizers[names[0]], 2, 0.5), ExponentialLR(optimizers[names[1]], 0.9)):
        LearningRateSchedule(scheduler).attach(job.trainer)
    if stray:
        with torch.no_grad():
            next(model.parameters()).zero_()
    Checkpoint(directory, every=2).attach(job.trainer)
    job.trainer.run(cuts.cut(cuts.samples(), [2, 3, 1, 4, 2, 5]), max_iters=updates)
    return job


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Parameters, moments and rates of each optimizer; the checkpoint has each under its name."""
    saved_run(tmp_path / "a", 4)
    resumed, unbroken = saved_run(tmp_path / "a", 9, stray=True), saved_run(tmp_path / "b", 9)
    assert resumed.state() == unbroken.state()
    assert resumed.trainer.state.update_output == unbroken.trainer.state.update_output
    with CheckpointReader(max((tmp_path / "a").glob("update-*"))) as reader:
        assert {"optimizers/first", "optimizers/second"} <= {*reader.names(0)}


def test_the_states_of_two_are_not_exchanged(tmp_path: Path) -> None:
    """Names, and the parameters that each steps, are compared before anything is loaded."""
    saved_run(tmp_path, 2)
    swapped = network()
    first, second = pair(swapped).values()
    job = make(swapped, {"second": first, "first": second})
    Checkpoint(tmp_path).attach(job.trainer)
    with pytest.raises(CheckpointError, match=r"is of another optimizers/second: AdamW wrote it, and this run has SGD"):
        job.trainer.run(cuts.cut(cuts.samples(), [2, 3]), max_iters=3)
    with pytest.raises(CheckpointError, match="holds no state of 'optimizers/muon'"):
        saved_run(tmp_path, 4, names=("muon", "second"))


def test_a_checkpoint_of_one_is_not_that_of_several(tmp_path: Path) -> None:
    """And it is said which state is missing."""
    model = network()
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.1), cuts.forward)
    Checkpoint(tmp_path, every=1).attach(trainer)
    trainer.run(cuts.cut(cuts.samples(), [2]), max_iters=1)
    with pytest.raises(CheckpointError, match="holds no state of 'optimizers/first'"):
        saved_run(tmp_path, 4)


@pytest.mark.slow
def test_a_list_has_numbers_for_names(tmp_path: Path) -> None:
    """And so it resumes; a list of one is a list."""
    states = []
    for number in (2, 4):
        model = network()
        job = make(model, [*pair(model).values()])
        Checkpoint(tmp_path, every=1).attach(job.trainer)
        job.trainer.run(cuts.cut(cuts.samples(), [2, 3]), max_iters=number)
        states.append(job)
    model = network()
    unbroken = make(model, [*pair(model).values()])
    unbroken.trainer.run(cuts.cut(cuts.samples(), [2, 3]), max_iters=4)
    assert states[1].state() == unbroken.state()
    alone = network()
    assert "optimizers/0" in create_trainer(alone, [SGD(alone.parameters())], cuts.forward).parts


def on_rank_resumed(directory: Path, way: str) -> tuple[Any, Any]:
    """A run of four updates in one piece and in two."""
    ends = []
    for folder, limits in (("one", (4,)), ("two", (2, 4))):
        for limit in limits:
            model = network()
            if way == "fsdp":
                fully_shard(model, mesh=init_device_mesh("cpu", (idist.get_world_size(),)))
            wrapped = DistributedDataParallel(model) if way == "ddp" else model
            trainer = create_trainer(
                wrapped, pair(model), cuts.forward, max_grad_norm={"first": 0.1}, **with_options(reduction=way)
            )
            Checkpoint(directory / folder, every=2).attach(trainer)
            trainer.run(cuts.shard([[2, 3, 1], [4, 2, 5]]), max_iters=limit)
        ends.append(bit_by_bit([whole(p.detach()) for p in model.parameters()]))
    return ends[0], ends[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit", "fsdp"])
def test_two_ranks_resume_bitwise(tmp_path: Path, way: str) -> None:
    """In each way of crossing them."""
    outcomes = run_ranks(on_rank_resumed, tmp_path, way)
    assert all(one == other for one, other in outcomes)
    assert outcomes[0] == outcomes[1]


# --- ranks that differ --------------------------------------------------------------------------------------------------------


def on_rank_that_differs() -> str:
    """Rank 1 has another rate in the second optimizer; the check that is attached by default notices."""
    model = network()
    optimizers = pair(model)
    trainer = create_trainer(DistributedDataParallel(model), optimizers, cuts.forward)
    if idist.get_rank() == 1:
        optimizers["second"].param_groups[0]["eps"] = 1e-7
    with pytest.raises(StateMismatchError) as caught:
        trainer.run(cuts.shard([[2, 3, 1], [4, 2, 5]]), max_epochs=1)
    return caught.value.names[0]


@pytest.mark.slow
def test_a_rank_whose_second_optimizer_differs_is_found() -> None:
    """The message names the group and the optimizer."""
    found = run_ranks(on_rank_that_differs)
    assert found[0] == found[1]
    assert "eps of group 0 of second" in found[0] or "bias" in found[0]


def test_the_digest_is_of_each_optimizer() -> None:
    """Moments, and options by the name of the optimizer."""
    job = make()
    job.trainer.run(cuts.cut(cuts.samples(), [2]))
    names = StateConsistency(job.model, job.optimizers)._check(job.trainer).digests
    assert {"optimizer momentum_buffer of 0.weight", "optimizer exp_avg of 0.bias"} <= names.keys()
    assert {"learning rate of group 0 of first", "learning rate of group 0 of second"} <= names.keys()


class Moded(SGD):
    """Notes in which mode it is, as schedule-free optimizers have modes."""

    mode = "none"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


def test_each_has_modes_of_its_own() -> None:
    """One handler for each optimizer that has modes: both are in theirs wherever forward runs."""
    model = network()
    matrices, others = split(model)
    optimizers = {"first": Moded(matrices, lr=0.1), "second": Moded(others, lr=0.1)}
    seen: list[tuple[str, str]] = []

    def forward(model: nn.Module, micro_batch: Any) -> Any:
        seen.append((optimizers["first"].mode, optimizers["second"].mode))
        return cuts.forward(model, micro_batch)

    trainer, evaluator = create_trainer(model, optimizers, forward), create_evaluator(model, forward)
    for optimizer in optimizers.values():
        OptimizerModes(optimizer).attach(trainer, evaluator=evaluator)
    data = cuts.cut(cuts.samples(), [8])
    Validation(evaluator, data, sanity=0).attach(trainer)
    trainer.run(data, max_epochs=2)
    assert seen == [("train", "train"), ("eval", "eval")] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "second"])
def test_a_group_added_to_any_is_trained_and_resumed(name: str, tmp_path: Path) -> None:
    """The last layer joins one of them; its steps are those of a plain optimizer, and a checkpoint brings its moments back."""
    ends = []
    for stops in ((4,), (2, 4)):
        directory = tmp_path / str(len(stops))
        for updates in stops:
            model = network()
            makers = {"first": partial(SGD, lr=0.1, momentum=0.9), "second": partial(AdamW, lr=0.02)}
            parts = [model[0].weight], [model[0].bias]
            order = ("first", "second") if name == "first" else ("second", "first")
            optimizers = {key: makers[key](part) for key, part in zip(order, parts, strict=True)}
            optimizers[name].add_param_group({"params": list(model[2].parameters()), "lr": 0.05})
            job = make(model, optimizers)
            Checkpoint(directory).attach(job.trainer)
            job.trainer.run(cuts.cut(cuts.samples(), [8] * 4), max_iters=updates)
        ends.append(job.state())
        rates = job.trainer.state.update_output.learning_rates
        assert sorted(rates) == sorted([group["lr"] for one in optimizers.values() for group in one.param_groups])
        assert not torch.equal(model[2].weight, network()[2].weight)
    assert ends[0] == ends[1]


def test_another_optimizer_cannot_be_put_into_the_mapping() -> None:
    """It is made anew whenever it is asked for, so that the other one would step nothing."""
    model = nn.Linear(3, 1)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), {"all": torch.optim.SGD(model.parameters(), lr=0.1)}):
        optimizers: Any = create_trainer(model, optimizer, lambda model, x: model(x).sum()).optimizers
        with pytest.raises(TypeError, match="does not support item assignment"):
            optimizers["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.2)
