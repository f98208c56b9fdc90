"""Two ranks decide alike, talk little and never wait for one another in vain."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import cuts
from ignite_train import (
    ForwardOutput,
    NonFiniteError,
    ShardedSampler,
    StaticLossScaling,
    TorchLossScaling,
    Trainer,
    TrainEvents,
    UpdateOptions,
    create_evaluator,
    create_trainer,
)
from ignite_train.handlers import (
    FailureBoard,
    GradNormConsistency,
    StateConsistency,
    StopOnSignal,
    TimeLimit,
    TrainingMetrics,
    Validation,
)
from ignite_train.ranks.replicas import buckets
from ranks import RanksFailedError, run_ranks
from update_options import with_options


def make(
    forward: Callable[..., Any] = cuts.forward, model: nn.Module | None = None, **options: Any
) -> tuple[Trainer, nn.Module]:
    """A trainer with SGD and momentum around a model in DDP, whose hooks reduce, and the model inside."""
    model = cuts.linear() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE, momentum=0.9)
    return create_trainer(DistributedDataParallel(model), optimizer, forward, **with_options(reduction="ddp", **options)), model


def flat(model: nn.Module) -> list[float]:
    """All parameters as numbers."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


# --- what crosses the ranks ---


def count_collectives(way: str, accumulation_steps: int) -> dict[str, Any]:
    """The collectives of some updates in the middle of an epoch, with all that talks over ranks attached."""
    model = cuts.linear(torch.float32)
    if way == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    wrapped = DistributedDataParallel(model) if way in ("ddp", "auto") else model
    optimizer = torch.optim.SGD(model.parameters(), lr=cuts.LEARNING_RATE, momentum=0.9)
    trainer = create_trainer(
        wrapped,
        optimizer,
        cuts.forward,
        accumulation_steps=accumulation_steps,
        max_grad_norm=1.0,
        options=UpdateOptions(reduction=way),  # type: ignore[arg-type]
    )
    TrainingMetrics().attach(trainer, Events.ITERATION_COMPLETED)
    TimeLimit(seconds=1000).attach(trainer)
    FailureBoard().attach(trainer)
    StopOnSignal().attach(trainer)
    GradNormConsistency().attach(trainer)
    if way != "fsdp":
        StateConsistency(model, optimizer).attach(trainer, Events.ITERATION_COMPLETED)
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=4), profiler.__enter__)  # names and buckets are settled by then
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda: profiler.__exit__(None, None, None))
    sizes_of_ranks = [[1] * 32, [1] * 32] if way == "fsdp" else [[2] * 28, [2] * 4]  # a sharded model lends micro-batches
    trainer.run(cuts.shard(sizes_of_ranks), max_iters=6)
    sizes: dict[str, list[int]] = {}
    for event in profiler.events():
        if event.name.startswith("gloo:"):
            shape = next((shape for shape in event.input_shapes if shape), [0])
            sizes.setdefault(event.name, []).append(math.prod(shape))
    return {name: sorted(counted) for name, counted in sizes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize("way", ["ddp", "auto", "explicit", "fsdp"])
def test_an_update_is_its_gradients_and_one_small_collective(way: str, accumulation_steps: int) -> None:
    """Three updates, whatever the accumulation and whatever is attached: the gradients, and at most one small vector each."""
    for collectives in run_ranks(count_collectives, way, accumulation_steps):
        reductions = collectives.pop("gloo:all_reduce", [])  # gloo scatters FSDP's gradients by an all-reduce
        gathers = collectives.pop("gloo:all_gather", [])
        assert max(gathers) <= 64
        if way == "fsdp":  # which gathers parameters too, that a root keeps for backward, and pads the bias
            assert (len(gathers), reductions) == (3 + 3 * accumulation_steps, [8] * 3)
        else:  # the statistics, with the gradients but for a DDP that insists on its own reduction of three weights and a bias
            assert (len(gathers), reductions) == (3, [4] * 3 if way == "ddp" else [])
        assert collectives == {}


def trace() -> tuple[float, float]:
    """When, in microseconds, an update of a deep network sends its statistics, and when its last backward begins."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)), nn.Linear(256, 1))
    trainer = create_trainer(
        DistributedDataParallel(model),
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda model, x: ForwardOutput(model(x).square().sum(), len(x)),
        accumulation_steps=2,
    )
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), profiler.__enter__)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: profiler.__exit__(None, None, None))
    trainer.run([torch.randn(64, 256) for _ in range(6)], max_epochs=1)
    products = sorted(event.time_range.start for event in profiler.events() if event.name == "AddmmBackward0")
    (statistics,) = (event.time_range.start for event in profiler.events() if event.name == "c10d::allgather_")
    assert sum(event.name == "c10d::allreduce_" for event in profiler.events()) > 1  # of several buckets
    return statistics, products[len(products) // 2]


@pytest.mark.slow
def test_the_statistics_overlap_backward() -> None:
    """In DDP their collective is given to the backend before the last backward begins, in a trace of torch's profiler."""
    for statistics, backward in run_ranks(trace):
        assert statistics < backward


def test_what_crosses_at_once_has_one_dtype_and_at_most_25_mib() -> None:
    """In their order; a tensor that is larger crosses by itself. The dtype may be that of what belongs to a tensor."""
    mib = {name: torch.empty(size * 2**18, device="meta") for name, size in {"a": 10, "b": 15, "c": 1, "d": 30, "e": 1}.items()}
    mib["half"] = torch.empty(1, dtype=torch.float16, device="meta")
    names = {id(tensor): name for name, tensor in mib.items()}

    def named(found: list[list[torch.Tensor]]) -> list[str]:
        return [" ".join(names[id(tensor)] for tensor in bucket) for bucket in found]

    assert named(buckets(mib.values())) == ["a b", "c", "d", "e", "half"]
    assert named(buckets(mib.values(), lambda _: torch.float64)) == ["a", "b", "c", "d", "e half"]


def chosen(kind: str) -> str:
    """The way that is chosen for a DDP of this kind by itself, after two updates."""
    model = cuts.linear()
    if kind == "large":
        model.register_parameter("more", nn.Parameter(torch.zeros(2**14, dtype=torch.float64)))
    if "buffers" in kind:
        model.register_buffer("count", torch.zeros(()))
    if kind == "with ignored parameters":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    ddp = DistributedDataParallel(model, find_unused_parameters=kind == "large", static_graph=kind == "with a static graph")
    if kind == "with a hook of buffers":
        ddp._register_buffer_comm_hook(None, lambda _state, _buffers: None)
    if kind == "with a hook":
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    steps = 1 if kind == "with a static graph" else 2
    trainer = create_trainer(ddp, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward, accumulation_steps=steps)
    trainer.run(cuts.shard([[8] * 4, [8] * 4]), max_epochs=1)
    return type(trainer.process.gather.crossing).__name__  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "large",
        "with a hook of buffers",
        "with ignored parameters",
        "with a hook",
        "with a static graph",
        "small",
        "small with buffers",
    ],
)
def test_hooks_are_left_out_for_small_models_only(kind: str) -> None:
    """Where DDP does more than to average a handful of gradients, it does that."""
    assert run_ranks(chosen, kind) == ["SmallReplicasCrossing" if "small" in kind else "DDPCrossing"] * 2


def accumulate_in_a_static_graph() -> None:
    model = cuts.linear()
    ddp = DistributedDataParallel(model, static_graph=True)
    with pytest.raises(ValueError, match="without static_graph=True for accumulation_steps other than 1"):
        create_trainer(ddp, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward, accumulation_steps=[1, 2])


def test_a_static_graph_cannot_accumulate() -> None:
    """Torch would fail an assertion in the first backward; here it is said before, in one line."""
    run_ranks(accumulate_in_a_static_graph)


def hook_after_all() -> None:
    for register, hook, remedy in (
        ("register_comm_hook", default_hooks.allreduce_hook, "call register_comm_hook"),
        ("_register_buffer_comm_hook", lambda _state, _buffers: None, "register the hook of its buffers"),
    ):
        model = cuts.linear()
        ddp = DistributedDataParallel(model)
        trainer = create_trainer(ddp, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward)
        trainer.run(cuts.shard([[8] * 2, [8] * 2]), max_epochs=1)
        getattr(ddp, register)(None, hook)
        with pytest.raises(ValueError, match=f"{remedy} earlier, or pass reduction='ddp'"):
            trainer.run(cuts.shard([[8] * 2, [8] * 2]), max_epochs=2)


@pytest.mark.slow
def test_a_hook_that_would_be_left_out_is_an_error() -> None:
    """Nobody's compression is silently without effect."""
    run_ranks(hook_after_all)


def different_names() -> list[dict[str, float]]:
    rank = idist.get_rank()

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output = cuts.forward(model, micro_batch)
        names = [{"both": 1.0}, {"both": 2.0, "late": 5.0}] if rank else [{"zero": 3.0}, {"both": 4.0}]
        return output._replace(logs=names[min(trainer.state.iteration, 2) - 1])

    trainer, _ = make(forward)
    logs: list[dict[str, float]] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: logs.append(dict(trainer.state.output.logs)))
    trainer.run(cuts.shard([[8] * 3, [8] * 3]), max_epochs=1)
    return logs


@pytest.mark.slow
def test_ranks_may_log_different_names() -> None:
    """A name that only some ranks log, or only from some update on, is summed over those that do; nobody hangs."""
    first, second = run_ranks(different_names)
    assert first == second
    assert first[0] == {"both": 1.0, "zero": 3.0}
    assert first[1] == first[2] == {"both": 6.0, "late": 5.0}  # as on one rank, a name that no rank has logged is missing


# --- deciding alike ---


def nan_on_rank_one(site: str, on_nonfinite: str, scaling: bool) -> dict[str, Any]:
    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        output = cuts.forward(model, micro_batch)
        if idist.get_rank() == 1 and trainer.state.iteration == 2:
            if site == "loss":
                output = output._replace(loss=output.loss + float("nan"))
            else:
                output.loss.register_hook(lambda gradient: gradient * float("inf"))
        return output

    policy = TorchLossScaling(8.0, growth_interval=100) if scaling else None
    trainer, model = make(forward, on_nonfinite=on_nonfinite, loss_scaling=policy)
    seen: list[Any] = []
    after: dict[int, list[float]] = {}
    trainer.add_event_handler(TrainEvents.STEP_SKIPPED, lambda: seen.append(trainer.state.output.skipped_reason))

    @trainer.on(Events.ITERATION_STARTED | Events.ITERATION_COMPLETED)
    def remember(engine: Trainer) -> None:
        after[engine.state.iteration] = flat(model)

    try:
        trainer.run(cuts.shard([[8] * 3, [8] * 3]), max_epochs=1)
    except NonFiniteError as error:
        seen.append((error.update, trainer.state.iteration, trainer.state.num_steps))
    return {"seen": seen, "after": after, "final": flat(model), "scale": policy.scale if policy else None}


@pytest.mark.slow
@pytest.mark.parametrize("site", ["loss", "gradient"])
@pytest.mark.parametrize("policy", ["raise", "skip", "scaling"])
def test_a_nan_on_one_rank_is_judged_alike_on_both(site: str, policy: str) -> None:
    """A non-finite value on rank 1 ends in the same decision on both ranks, and moves no parameter on either."""
    on_nonfinite = "raise" if policy == "scaling" else policy
    first, second = run_ranks(nan_on_rank_one, site, on_nonfinite, policy == "scaling")
    assert first == second
    assert first["after"][2] == first["after"][1]  # bitwise: the update before is where they stayed
    if policy == "raise":
        assert first["seen"] == [(2, 1, 1)]
    else:
        assert first["seen"] == ["nonfinite" if policy == "skip" else "overflow"]
        assert first["after"][3] != first["after"][2]
    assert first["scale"] == (4.0 if policy == "scaling" else None)


def no_samples_anywhere() -> tuple[Any, ...]:
    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        return cuts.forward(model, micro_batch)._replace(sample_size=0 if trainer.state.iteration == 2 else 4)

    trainer, model = make(forward)
    parameters: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: parameters.append(flat(model)))
    trainer.run(cuts.shard([[8] * 3, [8] * 3]), max_epochs=1)
    return parameters, trainer.state.num_steps, trainer.state.num_skipped


@pytest.mark.slow
def test_an_update_without_samples_moves_nothing_on_any_rank() -> None:
    """Σ sample_size = 0 over all ranks is a skip, not a division by zero and not a step of momentum alone."""
    first, second = run_ranks(no_samples_anywhere)
    assert first == second
    parameters, num_steps, num_skipped = first
    assert parameters[1] == parameters[0] != parameters[2]
    assert (num_steps, num_skipped) == (2, 1)


# --- ending together ---


def stop_on_rank(stopper: int, event: str, method: str, sized: bool) -> tuple[Any, ...]:
    trainer, _ = make()
    completed: list[str] = []
    for name in ("EPOCH_COMPLETED", "TERMINATE", "COMPLETED"):
        trainer.add_event_handler(Events[name], partial(completed.append, name))
    if idist.get_rank() == stopper:
        when = Events.EPOCH_COMPLETED(once=1) if event == "epoch" else Events.ITERATION_COMPLETED(once=2)
        trainer.add_event_handler(when, lambda: getattr(trainer, method)())
    loader = cuts.shard([[4] * 5, [4] * 5])
    trainer.run(loader if sized else cuts.Unsized(loader), max_epochs=2)
    return trainer.state.iteration, trainer.state.epoch, completed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("stopper", [0, 1])
@pytest.mark.parametrize(
    ("event", "method", "expected"),
    [
        ("update", "terminate", (3, 1, ["TERMINATE", "COMPLETED"])),
        ("epoch", "terminate", (5, 1, ["EPOCH_COMPLETED", "TERMINATE", "COMPLETED"])),
        ("update", "terminate_epoch", (8, 2, ["EPOCH_COMPLETED", "EPOCH_COMPLETED", "COMPLETED"])),
    ],
)
def test_one_rank_ends_the_run_on_both(stopper: int, sized: bool, event: str, method: str, expected: Any) -> None:
    """A request of one rank, after update 2 or after epoch 1, ends both ranks after the same update, with the same events."""
    assert run_ranks(stop_on_rank, stopper, event, method, sized) == [expected, expected]


def time_limit_on_rank_one() -> int:
    trainer, _ = make()
    if idist.get_rank() == 1:
        TimeLimit(seconds=1e-9).attach(trainer)
    return trainer.run(cuts.shard([[4] * 5, [4] * 5]), max_epochs=2).iteration


def test_a_clock_that_ran_out_on_one_rank_ends_both_before_the_first_update() -> None:
    """Clocks differ; the ranks agree all the same."""
    assert run_ranks(time_limit_on_rank_one) == [0, 0]


def without_data_anywhere(sized: bool) -> str:
    trainer, _ = make()
    with pytest.raises(ValueError, match="data must give at least one micro-batch on some rank") as caught:
        trainer.run([] if sized else cuts.Unsized([]), max_iters=5)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
def test_no_data_on_any_rank_is_an_error_on_both(sized: bool) -> None:
    """An epoch without an update would be repeated for ever."""
    first, second = run_ranks(without_data_anywhere, sized)
    assert first == second
    assert "\n" not in first


def lying_loader() -> int:
    class Lying(list[Any]):
        def __len__(self) -> int:
            return 5

    trainer, _ = make()
    with pytest.warns(UserWarning, match=r"len\(\) 5 and gave 3"):
        trainer.run(Lying(cuts.shard([[4] * 3, [4] * 3])), max_epochs=1)
    return trainer.state.num_steps


@pytest.mark.slow
def test_a_loader_shorter_than_its_length_hangs_nobody() -> None:
    """Ranks that agreed on five updates and find data for three skip the rest and say why."""
    assert run_ranks(lying_loader) == [3, 3]


# --- what DDP does on the side ---


class Normalised(nn.Module):
    """BatchNorm, whose buffers DDP broadcasts in forward, and a parameter that is never used."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(cuts.FEATURES).double(), nn.Linear(cuts.FEATURES, 1).double()
        if unused:
            self.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))


def uneven_with_buffers(unused: bool, sized: bool) -> dict[str, Any]:
    model = Normalised(unused)
    ddp = DistributedDataParallel(model, find_unused_parameters=unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    trainer = create_trainer(ddp, optimizer, cuts.forward, accumulation_steps=3)
    loader = cuts.shard([[8] * 4, [8]])
    trainer.run(loader if sized else cuts.Unsized(loader), max_epochs=3)
    evaluator = create_evaluator(ddp, cuts.forward)
    metrics = evaluator.run(cuts.shard([[3, 5, 8], []])).metrics
    return {"parameters": flat(model), "idle": model.idle.tolist() if unused else None, "metrics": metrics}


@pytest.mark.slow
@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("unused", [False, True], ids=["all used", "unused parameter"])
def test_buffers_and_unused_parameters_with_uneven_ranks(unused: bool, sized: bool) -> None:
    """Uneven ranks keep DDP's buffer broadcasts in step; a parameter that no rank uses gets no gradient and no decay."""
    first, second = run_ranks(uneven_with_buffers, unused, sized)
    assert first == second
    assert first["idle"] == ([1.0, 1.0] if unused else None)


# --- evaluation ---


def evaluate(sizes: list[list[int]]) -> dict[str, float]:
    model = DistributedDataParallel(cuts.linear())
    return dict(create_evaluator(model, cuts.forward).run(cuts.shard(sizes)).metrics)


@pytest.mark.parametrize("sizes", [[[16, 16], [32]], [[10, 3], [1, 7, 43]], [[64], []], [[], [20, 44]]])
def test_evaluation_is_the_mean_over_all_samples(sizes: list[list[int]]) -> None:
    """Whatever the shares, every sample counts once, by its weight."""
    data = cuts.samples()
    expected = cuts.reference([data])
    for metrics in run_ranks(evaluate, sizes):
        assert metrics["loss"] == pytest.approx(expected["losses"][0], rel=1e-14)
        assert metrics["samples"] == pytest.approx(64 / expected["sizes"][0], rel=1e-14)


def validate_while_training() -> tuple[Any, ...]:
    trainer, model = make()
    evaluator = create_evaluator(model, cuts.forward)
    validation = Validation(evaluator, cuts.shard([[7], [3, 4]]))
    validation.attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.run(cuts.shard([[8, 8, 8], [8, 8]]), max_epochs=3)
    return validation.best, validation.best_update, flat(model)


def test_validation_is_the_same_on_both_ranks() -> None:
    """Validation during training has one result, and one best."""
    first, second = run_ranks(validate_while_training)
    assert first == second


def padded() -> str:
    dataset = TensorDataset(torch.arange(5.0))
    loader = DataLoader(dataset, sampler=DistributedSampler(dataset))
    with pytest.raises(ValueError, match="repeats 1") as caught:
        create_evaluator(DistributedDataParallel(cuts.linear()), cuts.forward).run(loader)
    return str(caught.value)


def test_a_sampler_that_pads_is_refused() -> None:
    """DistributedSampler repeats samples to even out the ranks; they would count twice."""
    first, second = run_ranks(padded)
    assert first == second
    assert "ShardedSampler" in first


def deal(shuffle: bool) -> list[list[int]]:
    sampler = ShardedSampler(range(11), shuffle=shuffle, seed=3)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert len(sampler) == len(list(sampler))
        orders.append(list(sampler))
    return orders


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_sharded_sampler_deals_every_sample_once(shuffle: bool) -> None:
    """Two ranks see each sample once an epoch; round by round what one process would see; shuffled anew each epoch."""
    first, second = run_ranks(deal, shuffle)
    alone = deal(shuffle)
    for epoch in range(2):
        dealt = [index for pair in zip(first[epoch], [*second[epoch], None], strict=True) for index in pair][:-1]
        assert dealt == alone[epoch]
        assert sorted(dealt) == list(range(11))
    assert (first[0] != first[1]) == shuffle


# --- wrong set-ups ---


def bare_model() -> str:
    model = cuts.linear()
    with pytest.raises(ValueError, match="model must be wrapped") as caught:
        create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward)
    return str(caught.value)


def test_a_bare_model_on_two_ranks_is_refused() -> None:
    """Its replicas would drift apart without a word."""
    for message in run_ranks(bare_model):
        assert "auto_model" in message


def half_wrapped() -> str:
    model = nn.ModuleDict({"in": DistributedDataParallel(cuts.linear()), "out": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"out\.weight"):
        create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), cuts.forward)
    with pytest.raises(ValueError, match="create_graph must be False"):
        make(create_graph=True)
    return "refused"


def test_parameters_outside_of_ddp_are_refused() -> None:
    """They would not be synchronised."""
    assert run_ranks(half_wrapped) == ["refused"] * 2


def scaled() -> list[float]:
    trainer, model = make(loss_scaling=StaticLossScaling(1024.0), max_grad_norm=0.1)
    trainer.run(cuts.shard([[8, 8], [4]]), max_epochs=1)
    return flat(model)


def unscaled() -> list[float]:
    trainer, model = make(max_grad_norm=0.1)
    trainer.run(cuts.shard([[8, 8], [4]]), max_epochs=1)
    return flat(model)


@pytest.mark.slow
def test_loss_scaling_cancels_over_ranks() -> None:
    """A power-of-two scale changes nothing but the exponents on the way, with ranks and clipping."""
    for with_scale, without in zip(run_ranks(scaled), run_ranks(unscaled), strict=True):
        assert with_scale == pytest.approx(without, rel=1e-14)


def hang() -> None:
    if idist.get_rank() == 1:
        torch.distributed.barrier()


def fail() -> None:
    raise RuntimeError(f"boom on {idist.get_rank()}")


@pytest.mark.slow
def test_the_harness_itself_notices_hangs_and_failures() -> None:
    """A rank that waits for ever is reported at the deadline, one that raises with its traceback."""
    with pytest.raises(RanksFailedError, match="rank 1: "):
        run_ranks(hang, timeout_seconds=5)
    with pytest.raises(RanksFailedError, match=r"(?s)boom on 0.*boom on 1"):
        run_ranks(fail)
