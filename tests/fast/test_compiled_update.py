"""`compile="update"`: an update that is one graph, or a few, is the same update."""

from __future__ import annotations

import copy
import logging
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from ignite.engine import Events
from ignite.metrics import MeanSquaredError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import compiling
from ignite_train import (
    ForwardContractError,
    ForwardOutput,
    GaveUpError,
    LossDeclarationWarning,
    NonFiniteError,
    TorchLossScaling,
    Trainer,
    TrainEvents,
    UpdateOutput,
    attach_metric,
    create_evaluator,
    create_supervised_trainer,
    create_trainer,
)
from ignite_train.fast import update_graphs
from ignite_train.fast.compiled_gather import CompiledGather
from ignite_train.fast.update_graphs import UpdateGraphs
from ignite_train.handlers import Checkpoint, Freeze, LearningRateSchedule, TrainingMetrics
from ignite_train.ranks.messages import Piggyback
from log_messages import messages_from_here
from ranks import run_ranks
from textbook import Textbook
from tiers import accelerated, nightly, only, slow
from update_options import with_options

Batch = tuple[Tensor, Tensor]

pytestmark = [*compiling.ALONE, accelerated]


class Net(nn.Module):
    """Layers with a parameter that no loss depends on, and where asked for, a norm with buffers and random draws."""

    def __init__(self, *, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(4, 6, bias=not norm), nn.Linear(6, 1), nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))


class Tempered(Net):
    """With a parameter without dimensions, a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


def batches(*sizes: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size, 4, generator=generator).to(dtype), torch.randn(size, 1, generator=generator).to(dtype))
        for size in sizes
    ]


def summed_loss(model: nn.Module, batch: Batch) -> ForwardOutput:
    x, y = batch
    error = model(x) - y
    return ForwardOutput(error.square().sum(), len(y), {"error": error.abs().sum(), "first": (error[0].sum(), 1)})


class Setup(NamedTuple):
    """A trainer, what it moves, and what it records."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    trainer: Trainer
    records: list[UpdateOutput]


Optimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD-decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1, maximize=True),
    "SGD-momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.3),
    "SGD-nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.05, weight_decay=0.1, eps=1e-3),
    "Adam-amsgrad": partial(torch.optim.Adam, lr=0.05, amsgrad=True, maximize=True, eps=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=0.05, eps=1e-3),
    "AdamW-fused": partial(torch.optim.AdamW, lr=0.05, fused=True, eps=1e-3),
}


def make(
    compile: Any = True,  # noqa: A002, FBT002
    optimizer: Optimizer = OPTIMIZERS["AdamW"],
    *,
    forward: Callable[..., Any] = summed_loss,
    dtype: torch.dtype = torch.float64,
    net: Callable[[], nn.Module] = Net,
    **arguments: Any,
) -> Setup:
    """With `compile` True, a compiled update whose graphs are run operation by operation."""
    torch.manual_seed(0)
    model = net().to(dtype)
    made = optimizer(model.parameters())
    compile = {"update": True, "backend": "eager"} if compile is True else compile  # noqa: A001
    trainer = create_trainer(model, made, forward, compile=compile, **with_options(**arguments))
    records: list[UpdateOutput] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: records.append(trainer.state.update_output))
    return Setup(model, made, trainer, records)


def assert_alike(compiled: Setup, plain: Setup, *, tolerance: float = 1e-9) -> None:
    """The same weights, optimizer states and records, but for rounding."""
    for one, other in zip(compiled.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    states = [setup.optimizer.state_dict() for setup in (compiled, plain)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert [[*state] for state in states[0]["state"].values()] == [[*state] for state in states[1]["state"].values()]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for key, state in states[0]["state"].items():
        for name, tensor in state.items():
            assert tensor.dtype == states[1]["state"][key][name].dtype
            assert tensor.stride() == states[1]["state"][key][name].stride()
            torch.testing.assert_close(tensor, states[1]["state"][key][name], rtol=tolerance, atol=tolerance)
    exact = ("sample_size", "learning_rates", "loss_scale", "num_micro_batches", "skipped_reason", "log_weights")
    exact += ("num_out_of_memory", "num_evaluations", "num_ranks_skipped", "grad_norms", "clip_coefficients")
    for one, other in zip(compiled.records, plain.records, strict=True):
        assert [getattr(one, name) for name in exact] == [getattr(other, name) for name in exact]
        # sums of signed numbers of order 1 may be near 0, so their rounding is not relative to them
        assert one.logs == pytest.approx(dict(other.logs), rel=tolerance, abs=tolerance, nan_ok=True)
        for name in ("loss", "grad_norm", "clip_coefficient"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=tolerance, nan_ok=True)
    assert counters(compiled) == counters(plain)


def counters(setup: Setup) -> list[int]:
    state = setup.trainer.state
    return [state.iteration, state.num_steps, state.num_skipped, state.num_micro_batches]


def is_graph(setup: Setup) -> bool:
    """Whether the latest update was one."""
    return setup.trainer.process.gather._obstacle is None and bool(setup.trainer.process.gather._graphs)


# --- the same numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(0, slow=4)
@pytest.mark.parametrize("steps", [nightly(1), 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_steps_as_the_formulas_say(name, steps):
    """The weights are those of the textbook's optimizer along the clipped mean gradient over all samples, in float64."""
    sizes = (4, 4, 4, 4, 4, 4, 4, 3)
    setup = make(optimizer=OPTIMIZERS[name], accumulation_steps=steps, max_grad_norm=0.3)
    setup.trainer.run(batches(*sizes), max_epochs=2)
    assert is_graph(setup)
    torch.manual_seed(0)
    model = Net().double()
    optimizer = Textbook(OPTIMIZERS[name](model.parameters()), [*model.parameters()])
    data, norms = batches(*sizes), []
    for _ in range(2):
        for start in range(0, len(data), steps):
            x, y = (torch.cat(parts) for parts in zip(*data[start : start + steps], strict=True))
            optimizer.zero_grad()
            ((model(x) - y).square().sum() / len(y)).backward()
            norms.append(optimizer.clip(0.3))
            optimizer.step()
    for one, other in zip(setup.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert [record.grad_norm for record in setup.records] == pytest.approx(norms, rel=1e-9)


def test_sums_for_cuda_graphs_are_not_written_in_place(monkeypatch):
    """Torch makes no CUDA graph of what writes into its inputs; the updates are the same."""
    plain = make(False, accumulation_steps=4)
    monkeypatch.setattr(update_graphs, "_are_cuda_graphs", lambda settings, device: True)
    compiled = make(accumulation_steps=4)
    for setup in (compiled, plain):
        setup.trainer.run(batches(*[4] * 8), max_epochs=2)
    assert is_graph(compiled)
    assert_alike(compiled, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", [nightly(name) if number % 2 else name for number, name in enumerate(OPTIMIZERS)])
def test_it_is_the_update_without_compiling(name):
    """Weights, buffers, state and records, also in groups of several sizes, with a schedule and a step along the sum."""
    setups = []
    for way in (True, False):
        setup = make(
            way,
            OPTIMIZERS[name],
            accumulation_steps=[1, 3],
            max_grad_norm=0.1,
            net=partial(Net, norm=True),
            normalize=False,
        )
        LearningRateSchedule(LambdaLR(setup.optimizer, lambda step: 1 / (1 + step))).attach(setup.trainer)
        setup.trainer.run(batches(4, 4, 4, 4, 3), max_epochs=3)
        setups.append(setup)
    assert is_graph(setups[0])
    assert_alike(*setups)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", nightly("inductor")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_what_torch_compiles_is_equal_to_rounding(backend, dtype):
    """Inductor's graphs, whose kernels round otherwise, come to the same weights as no graphs do."""
    options = {"options": {"cpp_wrapper": False}} if backend == "inductor" else {"backend": backend}
    setups = [make(way, dtype=dtype, accumulation_steps=2, max_grad_norm=0.1) for way in ({"update": True, **options}, False)]
    for setup in setups:
        setup.trainer.run(batches(4, 4, 4, dtype=dtype), max_epochs=2)
    assert is_graph(setups[0])
    assert_alike(*setups, tolerance=1e-5 if dtype is torch.float32 else 3e-2)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD-momentum"])
@pytest.mark.parametrize("normalize", [True, False], ids=["mean", "sum"])
def test_autocast_and_a_loss_scale_are_in_the_graph(normalize, optimizer):
    """In bfloat16 with a loss scale that grows, the numbers are those of the same update without compiling."""
    setups = []
    for way in (True, False):
        scaling = TorchLossScaling(8.0, growth_interval=2)
        given = {
            "precision": "bf16",
            "loss_scaling": scaling,
            "max_grad_norm": 0.1 if normalize else None,
            "normalize": normalize,
        }
        setups.append(make(way, OPTIMIZERS[optimizer], dtype=torch.float32, **given))
        setups[-1].trainer.run(batches(4, 4, 4, 4, 4, dtype=torch.float32), max_epochs=1)
    assert is_graph(setups[0])
    assert [record.loss_scale for record in setups[0].records] == [8.0, 8.0, 16.0, 16.0, 32.0]
    assert_alike(*setups, tolerance=2e-3)


def note_events(trainer: Trainer) -> list[tuple[Any, ...]]:
    """Where the trainer stands at each event that can have a handler."""
    events: list[tuple[Any, ...]] = []

    def note(trainer: Trainer, name: str) -> None:
        state = trainer.state
        events.append((name, state.iteration, state.num_steps, state.num_micro_batches, state.micro_batch_in_group))

    for event in (*Events, TrainEvents.MICRO_BATCH_STARTED, TrainEvents.STEP_COMPLETED, TrainEvents.STEP_SKIPPED):
        trainer.add_event_handler(event, note, event.name)
    return events


@pytest.mark.slow
def test_events_and_metrics_are_the_same():
    """Every event fires as often and in the same order, and the metrics of a handler are the same."""
    setups = [make(way, accumulation_steps=2) for way in (True, False)]
    events = []
    for setup in setups:
        events.append(note_events(setup.trainer))
        TrainingMetrics().attach(setup.trainer, Events.ITERATION_COMPLETED)
        setup.trainer.run(batches(4, 4, 4), max_epochs=2)
    assert is_graph(setups[0])
    assert events[0] == events[1]
    names = ("loss", "grad_norm", "error", "first")
    values = [[setup.trainer.state.metrics[name] for name in names] for setup in setups]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


@pytest.mark.slow
def test_the_host_reads_once(monkeypatch):
    """An update, of one micro-batch or of three, reads one vector of the device."""
    reads: list[str] = []
    for name in ("tolist", "item", "__float__", "__bool__", "__int__"):
        ordinary = getattr(Tensor, name)

        def counting(tensor: Tensor, *, name: str = name, ordinary: Any = ordinary) -> Any:
            reads.append(name)
            return ordinary(tensor)

        monkeypatch.setattr(Tensor, name, counting)
    setup = make(accumulation_steps=[1, 3], max_grad_norm=1.0)
    of_updates: list[list[str]] = []
    setup.trainer.add_event_handler(Events.ITERATION_STARTED, reads.clear)
    setup.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: of_updates.append([*reads]))
    setup.trainer.run(batches(4, 4, 4), max_epochs=3)
    assert is_graph(setup)
    assert of_updates[-1] == of_updates[2] == ["tolist"]


# --- updates that do not step ------------------------------------------------------------------------------------------------


def poisoned(*sizes: int, where: int) -> list[Batch]:
    data = batches(*sizes)
    data[where][1][0] = math.nan
    return data


@pytest.mark.parametrize(("steps", "where"), [slow(1, 0), slow(1, 2), slow(2, 0), slow(2, 3)])
def test_a_step_that_is_skipped_leaves_no_trace(bits, steps, where):
    """Weights and the optimizer's state are the same bits as before, also where it has made no step yet."""
    name = "Adam-amsgrad" if steps == 1 else "SGD-momentum"
    setup = make(optimizer=OPTIMIZERS[name], accumulation_steps=steps, on_nonfinite="skip")
    states: list[Any] = []

    def keep() -> None:
        states.append(bits([setup.model.state_dict(), setup.optimizer.state_dict()["state"]]))

    setup.trainer.add_event_handler(Events.ITERATION_STARTED, keep)
    setup.trainer.add_event_handler(TrainEvents.STEP_SKIPPED, keep)
    setup.trainer.run(poisoned(4, 4, 4, 4, 4, 4, where=where), max_epochs=1)
    assert is_graph(setup)
    skipped = where // steps
    assert [record.skipped_reason for record in setup.records] == [
        "nonfinite" if i == skipped else None for i in range(6 // steps)
    ]
    assert states[skipped] == states[skipped + 1]
    assert states[skipped] != bits([setup.model.state_dict(), setup.optimizer.state_dict()["state"]])
    if skipped == 0:
        assert states[0][1] == {}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [nightly(1), 2])
def test_what_is_skipped_is_what_is_skipped_without_compiling(steps):
    """Buffers, counters and records too, with values that are not finite and with weights that are all zero."""

    def weighted(model: nn.Module, batch: Batch) -> ForwardOutput:
        x, y = batch
        return ForwardOutput((model(x) - y).square().sum(), (y < 100).sum())

    data = poisoned(4, 4, 4, 4, where=1)
    data[2:] = [(x, torch.full_like(y, 200.0)) for x, y in data[2:]]
    arguments: dict[str, Any] = {"forward": weighted, "net": partial(Net, norm=True), "on_nonfinite": "skip"}
    setups = [make(way, accumulation_steps=steps, **arguments) for way in (True, False)]
    for setup in setups:
        setup.trainer.run([*data, *batches(4, 4)], max_epochs=1)
    assert is_graph(setups[0])
    assert "no_samples" in {record.skipped_reason for record in setups[0].records}
    assert_alike(*setups)


@pytest.mark.slow
def test_an_overflow_lowers_the_loss_scale():
    """As without compiling: the scale falls until the gradients are finite, and no update steps before."""
    setups = []
    for way in (True, False):
        scaling = TorchLossScaling(2.0**127, max_scale=2.0**127)
        setups.append(make(way, dtype=torch.float32, loss_scaling=scaling, max_grad_norm=1.0))
        data = [(x, 4 * y) for x, y in batches(*[4] * 8, dtype=torch.float32)]
        setups[-1].trainer.run(data, max_epochs=1)
    assert is_graph(setups[0])
    assert setups[0].records[0].skipped_reason == "overflow"
    assert setups[0].records[-1].applied
    assert [one.loss_scale for one in setups[0].records] == [one.loss_scale for one in setups[1].records]
    assert counters(setups[0]) == counters(setups[1])


@pytest.mark.slow
def test_a_value_that_is_not_finite_ends_the_run():
    """With the message of an update that is not compiled, which names the module, and without a step."""
    messages = []
    for way in (True, False):
        setup = make(way)
        with torch.no_grad():
            setup.model.first.weight[0, 0] = math.nan
        with pytest.raises(NonFiniteError) as raised:
            setup.trainer.run(batches(4, 4), max_epochs=1)
        messages.append(str(raised.value))
        assert setup.optimizer.state_dict()["state"] == {}
    assert messages[0] == messages[1]
    assert "first" in messages[0]


def unlucky_loss(model: nn.Module, batch: Batch) -> ForwardOutput:
    """Of three samples it is NaN by chance, and of others it draws nothing."""
    output = summed_loss(model, batch)
    if len(batch[0]) == 3 and torch.rand(()).item() < 0.5:
        output = output._replace(loss=output.loss * math.nan)
    return output


@pytest.mark.slow
def test_a_value_that_is_not_finite_by_chance_is_found_after_graphs():
    """Graphs that draw nothing remember no random state; an update that is made without one draws the same when run again."""

    def begins_unlucky(seed: int) -> bool:
        first, second = torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist()
        return first < 0.5 < second

    setup = make(True, OPTIMIZERS["SGD"], forward=unlucky_loss)
    seed = next(filter(begins_unlucky, range(99)))
    setup.trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: torch.manual_seed(seed) and None)
    with pytest.raises(NonFiniteError, match="micro-batch 1 of 1: NaN in the loss"):
        setup.trainer.run(batches(4, 4, 3), max_epochs=1)
    assert setup.trainer.state.num_steps == 2


@pytest.mark.slow
def test_a_value_that_is_not_finite_by_chance_is_found_in_a_graph():
    """A graph that draws has the random state remembered, so that the update draws the same when it is run again."""

    def unlucky(model: nn.Module, batch: Batch) -> ForwardOutput:
        output = summed_loss(model, batch)
        return output._replace(loss=output.loss * torch.where(torch.rand(()) < 0.2, math.nan, 1.0))

    def is_unlucky_once(seed: int) -> bool:
        drawn = torch.rand(14, generator=torch.Generator().manual_seed(seed)) < 0.2
        return int(drawn.sum()) == 1 and bool(drawn[4:10].any())

    outcomes, seed = [], next(filter(is_unlucky_once, range(999)))
    for way in (True, False):
        setup = make(way, OPTIMIZERS["SGD"], forward=unlucky, accumulation_steps=2)
        torch.manual_seed(seed)
        with pytest.raises(NonFiniteError, match="of 2: NaN in the loss") as raised:
            setup.trainer.run(batches(*[4] * 40), max_epochs=2)
        assert not way or is_graph(setup)
        outcomes.append((str(raised.value), counters(setup)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == [2, 2, 0, 4]


@pytest.mark.slow
@pytest.mark.parametrize("bad", [{1, 3, 5}, {3, 4}], ids=["apart", "in a row"])
def test_failures_in_a_row_are_counted(bad):
    """An update whose graph has stepped ends a row of failures, and two of them in a row end the run."""
    outcomes = []
    for way in (True, False):
        setup = make(way, on_nonfinite="skip", give_up_after=2)
        data = batches(*[4] * 7)
        for where in bad:
            data[where][1][0] = math.nan
        with pytest.raises(GaveUpError) if bad == {3, 4} else nullcontext():
            setup.trainer.run(data, max_epochs=1)
        assert not way or is_graph(setup)
        outcomes.append(counters(setup))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][:3] == ([7, 4, 3] if bad == {1, 3, 5} else [4, 3, 1])


@pytest.mark.slow
def test_an_update_without_micro_batches_is_skipped():
    """One that a loop of the user's asks for, before and after updates that are graphs."""
    setups = [make(way) for way in (True, False)]
    for setup in setups:
        for group in ([], batches(4), batches(4, 4), [], batches(4)):
            setup.trainer.update(group)
    assert is_graph(setups[0])
    assert [record.skipped_reason for record in setups[0].records] == ["no_samples", None, None, "no_samples", None]
    assert_alike(*setups)


def noting_a_draw(found: list[float], output: UpdateOutput) -> UpdateOutput:
    found.append(torch.rand(()).item())
    return output


@pytest.mark.slow
def test_what_is_drawn_is_a_function_of_the_seed():
    """In forward, and by the output transform, as without compiling."""
    setups, drawn = [], []
    for way in (True, False):
        found: list[float] = []
        transform = partial(noting_a_draw, found)
        setup = make(way, net=partial(Net, dropout=0.5), accumulation_steps=2, seed=3, output_transform=transform)
        drawn.append(found)
        setup.trainer.run(batches(4, 4, 4), max_epochs=2)
        setups.append(setup)
    assert is_graph(setups[0])
    assert drawn[0] == drawn[1]
    assert_alike(*setups)


# --- how often it is compiled ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_number_of_compilations():
    """Four graphs for a group of several and one of one, one for evaluation, and two more for one more size."""
    backend = compiling.CountingBackend()
    setup = make({"update": True, "backend": backend}, accumulation_steps=3)
    graphs: list[int] = []
    evaluator = create_evaluator(setup.model, summed_loss)
    setup.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: graphs.append(backend.graphs))

    @setup.trainer.on(Events.EPOCH_COMPLETED)
    def _() -> None:
        for group in setup.optimizer.param_groups:
            group["lr"], group["betas"], group["eps"] = group["lr"] / 2, (0.8, 0.9), 1e-2
        evaluator.run(batches(4))

    setup.trainer.run(batches(4, 4, 4, 4, 4, 4, 4), max_epochs=3)
    assert graphs == [3, 3, 4, 5, 5, 5, 5, 5, 5]
    setup.trainer.run(batches(4, 3, 4, 3), max_epochs=5)
    assert graphs[9:] == [6, 7, 7, 7]  # a further one of three samples, and a group of it alone
    assert is_graph(setup)


@pytest.mark.slow
def test_too_many_sizes_are_no_longer_compiled(caplog):
    """Beyond torch's limit updates are those of compile=True; the numbers stay, and the log says so once."""
    setups = [make(way) for way in (True, False)]
    for setup in setups:
        with torch._dynamo.config.patch(recompile_limit=2):
            setup.trainer.run(batches(4, 3, 2, 5, 6), max_epochs=1)
    assert not is_graph(setups[0])
    assert "recompile_limit" in reasons(caplog)[0]
    assert len(reasons(caplog)) == 1
    assert_alike(*setups)


def train_and_resume(directory: Path, *, stops_at: int | None, backend: str) -> Any:
    """Weights, state and counters after eight updates; of a run that is stopped, of a trainer that resumes it."""
    options = {"options": {"cpp_wrapper": False}} if backend == "inductor" else {"backend": backend}
    made: list[Setup] = []
    for limit in [8] if stops_at is None else [stops_at, 8]:
        torch._dynamo.reset()
        net = partial(Net, norm=True, dropout=0.5)
        setup = make({"update": True, **options}, accumulation_steps=3, dtype=torch.float32, net=net)
        Checkpoint(directory, every=1).attach(setup.trainer)
        torch.manual_seed(7)
        setup.trainer.run(batches(*[4] * 7, dtype=torch.float32), max_iters=limit)
        assert is_graph(setup)
        made.append(setup)
    return [made[-1].model.state_dict(), made[-1].optimizer.state_dict(), counters(made[-1])]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", nightly("aot_eager"), nightly("inductor")])
def test_a_resumed_run_has_the_same_bits(tmp_path, bits, backend):
    """Stopped in the middle of an epoch and resumed by another trainer, with dropout and a smaller last group."""
    whole = train_and_resume(tmp_path / "whole", stops_at=None, backend=backend)
    resumed = train_and_resume(tmp_path / "resumed", stops_at=4, backend=backend)
    assert bits(whole) == bits(resumed)


@pytest.mark.slow
def test_a_checkpoint_fits_a_run_without_compiling(tmp_path):
    """And the other way round: what is saved has the same form."""
    for first, second in ((True, False), (False, True)):
        directory = tmp_path / f"{first}"
        resumed = [make(first), make(second)]
        for setup, limit in zip(resumed, (3, 6), strict=True):
            Checkpoint(directory, every=1).attach(setup.trainer)
            setup.trainer.run(batches(4, 4, 4), max_iters=limit)
        plain = make(False)
        plain.trainer.run(batches(4, 4, 4), max_iters=6)
        assert_alike(resumed[1], plain._replace(records=plain.records[3:]))


# --- what changes in a run --------------------------------------------------------------------------------------------------


def halve_rates(setup: Setup) -> None:
    """In the middle of each update, before its last micro-batch is computed."""

    def halve() -> None:
        for group in setup.optimizer.param_groups:
            group["lr"] /= 2

    setup.trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED, halve)


def at_second_epoch(change: Callable[[Setup], None], setup: Setup) -> None:
    """Does it between two epochs."""
    setup.trainer.add_event_handler(Events.EPOCH_STARTED(once=2), change, setup)


def freeze_at_first(setup: Setup) -> None:
    setup.model.first.requires_grad_(False)
    at_second_epoch(lambda setup: setup.model.first.requires_grad_(True), setup)


def freeze_later(setup: Setup) -> None:
    setup.model.first.requires_grad_(False)


def double_output(setup: Setup) -> None:
    setup.model.first.register_forward_hook(lambda module, arguments, output: 2 * output)


def replace_parameter(setup: Setup) -> None:
    """In the model alone: the optimizer has the old one, as in a mistake that is often made."""
    setup.model.last = nn.Linear(6, 1).double()


def replace_parameter_everywhere(setup: Setup) -> None:
    new = nn.Linear(6, 1).double()
    nn.init.constant_(new.weight, 0.1)
    nn.init.zeros_(new.bias)
    for old, parameter in zip(setup.model.last.parameters(), new.parameters(), strict=True):
        listed = setup.optimizer.param_groups[0]["params"]
        listed[next(i for i, one in enumerate(listed) if one is old)] = parameter
        del setup.optimizer.state[old]
    setup.model.last = new


def add_group(setup: Setup) -> None:
    setup.model.dropout = nn.Linear(6, 6).double()
    nn.init.eye_(setup.model.dropout.weight)
    nn.init.zeros_(setup.model.dropout.bias)
    setup.optimizer.add_param_group({"params": [*setup.model.dropout.parameters()], "lr": 0.01})


def add_foreign_group(setup: Setup) -> None:
    setup.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())], "lr": 0.01})


def load_state(setup: Setup) -> None:
    state = setup.optimizer.state_dict()
    for one in state["state"].values():
        one["exp_avg"] = one["exp_avg"] * 3
    setup.optimizer.load_state_dict(state)


def clear_state(setup: Setup) -> None:
    setup.optimizer.state.clear()


def count_steps(setup: Setup) -> None:
    """By a step of its own, under the wrapper of a scheduler."""
    ordinary = type(setup.optimizer).step

    def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5
        return ordinary(optimizer, closure)

    setup.optimizer.step = MethodType(step, setup.optimizer)
    LambdaLR(setup.optimizer, lambda step: 1.0)


def turn_ascending(setup: Setup) -> None:
    setup.optimizer.param_groups[0]["maximize"] = True


CHANGES: dict[str, Callable[[Setup], None]] = {
    "rates-in-an-update": halve_rates,
    "unfrozen": freeze_at_first,
    "frozen": partial(at_second_epoch, freeze_later),
    "hook-of-module": partial(at_second_epoch, double_output),
    "parameter-replaced": partial(at_second_epoch, replace_parameter),
    "parameter-replaced-everywhere": partial(at_second_epoch, replace_parameter_everywhere),
    "group-added": partial(at_second_epoch, add_group),
    "foreign-group-added": partial(at_second_epoch, add_foreign_group),
    "state-loaded": partial(at_second_epoch, load_state),
    "state-cleared": partial(at_second_epoch, clear_state),
    "step-replaced": count_steps,
    "maximize": partial(at_second_epoch, turn_ascending),
}


@pytest.mark.sampled(0, slow=6)
@pytest.mark.parametrize("steps", [nightly(1), 2])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_in_a_run_counts(name, steps):
    """From the same update on, and in the same way, as without compiling."""
    setups = [make(way, accumulation_steps=steps) for way in (True, False)]
    for setup in setups:
        torch.manual_seed(1)
        CHANGES[name](setup)
        setup.trainer.run(batches(4, 4, 4, 4), max_epochs=3)
    assert_alike(*setups)


@pytest.mark.slow
def test_what_changes_within_an_update_has_it_go_the_other_way(caplog):
    """Only that update; the later ones are graphs for what has changed."""
    setups = [make(way, accumulation_steps=2) for way in (True, False)]
    for setup in setups:
        setup.trainer.add_event_handler(TrainEvents.MICRO_BATCH_STARTED(once=4), freeze_later, setup)
        setup.trainer.run(batches(4, 4, 4, 4), max_epochs=2)
    assert len(reasons(caplog)) == 1
    assert "change within an update" in reasons(caplog)[0]
    assert is_graph(setups[0])
    assert_alike(*setups)


@pytest.mark.parametrize("way", [slow(True), False])
def test_the_record_has_the_rate_of_the_step(way):
    """Also where the output transform sets it: before the step, or after the step of a graph, for the next one."""
    made: list[torch.optim.Optimizer] = []

    def transform(output: UpdateOutput) -> UpdateOutput:
        made[0].param_groups[0]["lr"] /= 2
        return output

    setup = make(way, OPTIMIZERS["SGD"], output_transform=transform)
    made.append(setup.optimizer)
    weights = [nn.utils.parameters_to_vector(setup.model.parameters())]
    setup.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: weights.append(nn.utils.parameters_to_vector(setup.model.parameters()))
    )
    setup.trainer.run(batches(4, 4, 4), max_epochs=1)
    for before, after, record in zip(weights, weights[1:], setup.records, strict=False):
        assert (after - before).norm().item() == pytest.approx(record.learning_rates[0] * record.grad_norm, rel=1e-9)


class TwoHeads(nn.Module):
    """Which of its parameters the loss depends on is up to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.first(x))
        if len(x) == 4:
            return self.last(inner)
        return self.other(inner) if len(x) == 3 else self.last(inner) + self.other(inner)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [nightly(1), 2])
@pytest.mark.parametrize("sizes", [(4, 3), (4, 2), (2, 4)], ids=["other", "more", "fewer"])
def test_parameters_that_only_some_batches_use(sizes, steps):
    """Each update moves those that its loss depends on."""
    setups = [make(way, accumulation_steps=steps, net=TwoHeads) for way in (True, False)]
    for setup in setups:
        setup.trainer.run(batches(*sizes, *sizes), max_epochs=2)
    assert_alike(*setups)


def of_the_last_layer(model: nn.Module, batch: Batch) -> ForwardOutput:
    """A penalty, which depends on other parameters than `summed_loss`."""
    return ForwardOutput(model.get_parameter("last.weight").square().sum(), 1)


@pytest.mark.parametrize("steps", [1, 2])
def test_another_forward_in_the_first_update(steps, caplog):
    """A run that is resumed before such an update begins with it. The other updates are graphs all the same."""
    setups = [make(way) for way in (True, False)]
    for setup in setups:
        for group in (batches(3)[:1] * steps, batches(4) * steps):
            setup.trainer.update(group, forward=of_the_last_layer)
            setup.trainer.update(group)
    assert_alike(*setups)
    assert is_graph(setups[0])
    assert "other parameters than that of an earlier micro-batch" not in caplog.text


# --- errors ----------------------------------------------------------------------------------------------------------------


class Once:
    """Raises an error at its second call, and never again.

    Args:
        error: which.
        then: what it calls and returns otherwise.
    """

    def __init__(self, error: BaseException, then: Callable[..., Any] = lambda *_: None) -> None:
        self.calls, self._error, self._then = 0, error, then

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise self._error
        return self._then(*arguments)


class Disturber(Piggyback):
    """Its numbers travel with each update, and what comes back is refused once."""

    payload_size = 2

    def __init__(self) -> None:
        self.came_back: list[list[float]] = []
        self._refuse = Once(ArithmeticError("refused"), self.came_back.append)

    def payload(self) -> list[float]:
        return [1.5, 2.0]

    def on_reduced(self, sums: list[float]) -> None:
        self._refuse(sums)


def interrupt_before_numbers_are_read(setup: Setup) -> None:
    interrupt = Once(KeyboardInterrupt())
    setup.trainer.begin_section = lambda section: interrupt() if section == "reduction" else None


def fail_in_step_completed(setup: Setup) -> None:
    setup.trainer.add_event_handler(TrainEvents.STEP_COMPLETED, Once(ArithmeticError()))


def fail_after_the_scaling(setup: Setup) -> None:
    """Once it has taken note of the second update."""
    scaling = setup.trainer.process.loss_scaling
    ordinary, interrupt = scaling.update, Once(ArithmeticError())

    def update(*, overflow: bool) -> None:
        ordinary(overflow=overflow)
        interrupt()

    scaling.update = update


def refuse_sums(setup: Setup) -> None:
    setup.trainer.piggybacks.append(Disturber())


DISTURBANCES: dict[str, tuple[dict[str, Any], Callable[[Setup], None] | None]] = {
    "output-transform": ({"output_transform": lambda: Once(ArithmeticError(), lambda output: output)}, None),
    "sums-refused": ({}, refuse_sums),
    "interrupted": ({}, interrupt_before_numbers_are_read),
    "handler-of-the-step": ({}, fail_in_step_completed),
    "scaling": ({}, fail_after_the_scaling),
}


@pytest.mark.sampled(0, slow=5)
@pytest.mark.parametrize("steps", [nightly(1), 2])
@pytest.mark.parametrize("way", [True, False], ids=["graph", "plain"])
@pytest.mark.parametrize("name", DISTURBANCES)
def test_an_error_loses_no_update_and_repeats_none(name, way, steps):
    """A run that continues after it ends where one without an error does: counters say what the weights have gone through."""
    arguments, disturb = DISTURBANCES[name]
    setups = []
    for disturbed in (True, False):
        given = {argument: make_it() for argument, make_it in arguments.items()} if disturbed else {}
        scaling = TorchLossScaling(8.0, growth_interval=3)
        setup = make(way, OPTIMIZERS["SGD-momentum"], accumulation_steps=steps, loss_scaling=scaling, **given)
        if disturbed:
            if disturb is not None:
                disturb(setup)
            with pytest.raises((ArithmeticError, KeyboardInterrupt)):
                setup.trainer.run(batches(*[4] * 8), max_epochs=1)
            done = setup.trainer.state.num_steps
            assert done == setup.trainer.state.iteration == setup.trainer.state.num_micro_batches / steps
            assert done == (2 if way or name in ("handler-of-the-step", "scaling") else 1)
        setup.trainer.run(batches(*[4] * 8), max_epochs=1)
        setups.append(setup)
    assert not way or is_graph(setups[0])
    assert counters(setups[0]) == counters(setups[1])
    assert setups[0].trainer.process.state_dict() == setups[1].trainer.process.state_dict()
    for one, other in zip(setups[0].model.parameters(), setups[1].model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [nightly(1), 2])
def test_a_step_counts_whose_result_is_lost_to_an_interrupt(monkeypatch, steps):
    """Ctrl-C while a graph runs is raised once it has run, before its result is anywhere: the graph has counted its step."""
    setups = []
    for interrupted in (True, False):
        setup = make(True, OPTIMIZERS["SGD-momentum"], accumulation_steps=steps)
        setup.trainer.run(batches(*[4] * 2 * steps), max_epochs=1)
        if interrupted:
            ordinary = UpdateGraphs.end

            def end(*arguments: Any, ordinary: Callable[..., Any] = ordinary) -> Any:
                ordinary(*arguments)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(UpdateGraphs, "end", end)
                with pytest.raises(KeyboardInterrupt):
                    setup.trainer.run(batches(*[4] * 2 * steps), max_epochs=2)
            assert setup.trainer.state.num_steps == 3
        setup.trainer.run(batches(*[4] * 2 * steps), max_epochs=2)
        setups.append(setup)
    assert is_graph(setups[0])
    assert counters(setups[0]) == counters(setups[1])
    for one, other in zip(setups[0].model.parameters(), setups[1].model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


OF_INDUCTOR = {"cpp_wrapper": True, "layout_optimization": False, "realize_opcount_threshold": 2}


@pytest.mark.nightly
@pytest.mark.parametrize("compile", ["update", {"update": True, "options": OF_INDUCTOR}], ids=["default", "wrong"])
def test_convolutions_have_the_norm_of_an_update_that_is_not_compiled(compile):  # noqa: A002
    """By the options that are the default on the CPU, and by some of inductor's with which torch 2.13 compiles a wrong one."""
    norms = []
    for compiled in (compile, False):
        torch.manual_seed(0)
        parts: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
            parts += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 8))
        micro_batch = torch.randn(8, 3, 32, 32), torch.randint(8, (8,))

        def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
            x, y = micro_batch
            return ForwardOutput(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        trainer = create_trainer(model, optimizer, forward, max_grad_norm=1.0, compile=compiled)
        trainer.run([micro_batch], max_epochs=1)
        assert trainer.state.update_output is not None
        norms.append(trainer.state.update_output.grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


class Mistaken(compiling.CountingBackend):
    """Computes 1 % too much in the linear layers of one graph."""

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self.wrong = wrong

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        if self.graphs == self.wrong:
            for node in graph.graph.find_nodes(op="call_function", target=torch._C._nn.linear):
                with graph.graph.inserting_after(node):
                    more = graph.graph.call_function(torch.mul, (node, 1.01))
                node.replace_all_uses_with(more)
                more.args = (node, 1.01)
            graph.recompile()
        return super().__call__(graph, inputs, **options)


@pytest.mark.sampled(0, slow=7)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("scale", [None, 2.0**10], ids=["plain", "scaled"])
@pytest.mark.parametrize(("steps", "wrong"), [(1, 0), (4, 0), (4, 1), (4, 2)])
def test_a_graph_that_computes_something_else_is_not_used(caplog, steps, wrong, dtype, scale):
    """Each of the graphs of an update is compared with the same code; its update and all later ones are made without any."""
    setups = []
    for compiled in ({"update": True, "backend": Mistaken(wrong)}, False):
        arguments: dict[str, Any] = {} if scale is None else {"loss_scaling": TorchLossScaling(scale)}
        arguments |= {"net": partial(Net, norm=True), "accumulation_steps": steps, "max_grad_norm": 0.5}
        setup = make(compiled, dtype=dtype, **arguments)
        setup.trainer.run(batches(*[4] * 3 * steps, dtype=dtype), max_epochs=1)
        setups.append(setup)
    (reason,) = reasons(caplog)
    assert "torch has compiled it wrongly: a " in reason
    assert not is_graph(setups[0])
    assert_alike(*setups, tolerance=1e-9 if dtype is torch.float64 else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_numbers_of_handlers_travel_with_a_graph(steps: int):
    """A piggyback gets the sums over the ranks, of which there is one, in each update."""
    setup = make(accumulation_steps=steps)
    disturber = Disturber()
    setup.trainer.piggybacks.append(disturber)
    with pytest.raises(ArithmeticError, match="refused"):
        setup.trainer.run(batches(*[4] * 3 * steps), max_epochs=1)
    setup.trainer.run(batches(*[4] * 3 * steps), max_epochs=1)
    assert disturber.came_back == [[1.5, 2.0]] * 2
    assert is_graph(setup)


@pytest.mark.slow
def test_numbers_of_handlers_travel_with_an_update_that_is_skipped():
    """The graph has made no step, and the record is the one without compiling."""
    setups = [make(way, on_nonfinite="skip") for way in (True, False)]
    for setup in setups:
        disturber = Disturber()
        disturber._refuse = disturber.came_back.append
        setup.trainer.piggybacks.append(disturber)
        setup.trainer.run(poisoned(4, 4, 4, where=1), max_epochs=1)
        assert disturber.came_back == [[1.5, 2.0]] * 3
    assert is_graph(setups[0])
    assert_alike(*setups)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW-fused", "SGD-momentum"])
@pytest.mark.parametrize("net", [Net, Tempered], ids=["net", "tempered"])
def test_numbers_without_dimensions_are_written_in_float64(net, optimizer):
    """With float64 for the default dtype the counted steps have none; torch 2.13 loses what a graph writes into those."""
    torch.set_default_dtype(torch.float64)
    try:
        setups = [make(way, OPTIMIZERS[optimizer], net=net) for way in ({"update": True, "backend": "aot_eager"}, False)]
        for setup in setups:
            setup.trainer.run(batches(4, 4, 4, 4))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_alike(*setups)
    assert isinstance(setups[0].trainer.process.gather, CompiledGather) is (net is Net)


@pytest.mark.slow
def test_a_state_that_is_float64_since_it_was_loaded_is_written():
    """Its step was counted where the default dtype was float64."""
    setups = []
    for way in ({"update": True, "backend": "aot_eager"}, False):
        setup = make(way)
        saved = copy.deepcopy(setup.optimizer)
        for parameter in saved.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        saved.step()
        state = saved.state_dict()
        for one in state["state"].values():
            one["step"] = one["step"].double()
        setup.optimizer.load_state_dict(state)
        setup.trainer.run(batches(4, 4, 4, 4))
        setups.append(setup)
    assert is_graph(setups[0])
    assert_alike(*setups)


class Forgetful(compiling.CountingBackend):
    """Leaves out one of the writes of a graph, the one with this number from its end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        writes = graph.graph.find_nodes(op="call_method", target="copy_")
        for write in writes[len(writes) - self.number :][:1]:  # none in a graph of the model alone
            write.replace_all_uses_with(write.args[0])
            graph.graph.erase_node(write)
            graph.recompile()
        return super().__call__(graph, inputs, **options)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2, 9))  # the last one counts the steps
def test_a_graph_that_writes_less_is_not_used(caplog, number):
    """A parameter, a moment or a number of steps that stays as it was is noticed in the trial."""
    setups = []
    for way in ({"update": True, "backend": Forgetful(number)}, False):
        setups.append(make(way, dtype=torch.float32))
        setups[-1].trainer.run(batches(4, 4, dtype=torch.float32))
    (reason,) = reasons(caplog)
    assert "torch has compiled it wrongly: the " in reason
    assert_alike(*setups, tolerance=1e-6)


def scaled_at_random(model: nn.Module, batch: Batch) -> ForwardOutput:
    output = summed_loss(model, batch)
    return output._replace(loss=output.loss * random.uniform(0.5, 2.0))  # noqa: S311


class Unscaled(compiling.CountingBackend):
    """Takes 1 for each number of Python's."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Any:
        compiled = super().__call__(graph, inputs, **options)
        return lambda *given: compiled(*[torch.ones_like(x) if x.dim() == 0 and x.device.type == "cpu" else x for x in given])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", Unscaled()], ids=["right", "wrong"])
def test_a_graph_that_draws_from_pythons_generator_is_compared(caplog, backend):
    """Torch 2.13's inductor makes other numbers of them than the ones that were drawn."""
    setups = []
    for way in ({"update": True, "backend": backend}, False):
        random.seed(3)
        setups.append(make(way, forward=scaled_at_random))
        setups[-1].trainer.run(batches(4, 4, 4))
    assert_alike(*setups)
    assert is_graph(setups[0]) is (backend == "eager")
    assert [("wrongly" in reason) for reason in reasons(caplog)] == [True] * (backend != "eager")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "buffer"])
def test_masks_of_booleans_are_compared(kind):
    """What a graph has written is compared as it is tried, also where it is of booleans, in a micro-batch or in a buffer."""

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        x, mask = batch
        mask = model.mask if kind == "buffer" else mask
        return ForwardOutput((model(x).squeeze(1) * mask).square().sum(), len(x))

    model = nn.Linear(4, 1)
    model.register_buffer("mask", torch.tensor([True, False, True]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how = {"update": True, "backend": "eager"}
    trainer = create_trainer(model, optimizer, forward, compile=how)
    trainer.run([(torch.randn(3, 4), torch.tensor([True, False, True])) for _ in range(3)], max_epochs=1)
    assert trainer.state.num_steps == 3


@pytest.mark.slow
def test_hooks_on_saved_tensors_are_called():
    """They may change values, as compression does; updates within them are made without a graph."""
    setups = []
    for way in ({"update": True, "backend": "aot_eager"}, False):
        setups.append(make(way))
        setups[-1].trainer.run(batches(4, 4), max_epochs=1)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: 0.5 * x):
            setups[-1].trainer.run(batches(4, 4), max_epochs=2)
        setups[-1].trainer.run(batches(4, 4), max_epochs=3)
    assert is_graph(setups[0])
    assert_alike(*setups)


@pytest.mark.slow
@pytest.mark.parametrize("compile", [True, "update"])
def test_a_buffer_that_compiled_code_cannot_write_to_is_warned_of(caplog, compile):  # noqa: A002
    """Once, by its name."""
    model = Tempered()
    model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
    create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), summed_loss, compile=compile)
    assert len([record for record in caplog.records if "the buffer 'seen'" in record.message]) == 1


# --- what cannot be a graph ------------------------------------------------------------------------------------------------


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log has said of updates that cannot be a graph."""
    return [record.message for record in caplog.records if record.message.startswith('compile="update"')]


def listen(event: Any, setup: Setup) -> None:
    setup.trainer.add_event_handler(event, lambda: None)


def hook_parameter(setup: Setup) -> None:
    setup.model.first.weight.register_hook(lambda gradient: gradient)


def hook_step(setup: Setup) -> None:
    setup.optimizer.register_step_post_hook(lambda *_: None)


def attach_a_metric(setup: Setup) -> None:
    attach_metric(setup.trainer, MeanSquaredError(), "mse")


def attach_freeze(setup: Setup) -> None:
    Freeze(setup.model.last, until=2).attach(setup.trainer)


def make_rate_a_tensor(setup: Setup) -> None:
    setup.optimizer.param_groups[0]["lr"] = torch.tensor(0.05, dtype=torch.float64)


def loss_with_predictions(model: nn.Module, batch: Batch) -> ForwardOutput:
    output = summed_loss(model, batch)
    return output._replace(outputs=(model(batch[0]), batch[1]))


def loss_of_terms(model: nn.Module, batch: Batch) -> ForwardOutput:
    output = summed_loss(model, batch)
    return ForwardOutput({"squares": (output.loss, output.sample_size), "sizes": (model(batch[0]).sum(), 2 * len(batch[0]))})


def sizes_of_terms(batch: Batch) -> dict[str, int]:
    return {"squares": len(batch[1]), "sizes": 2 * len(batch[0])}


def stateful_loss(model: nn.Module, batch: Batch, state: Any) -> ForwardOutput:
    assert state.iteration > 0
    return summed_loss(model, batch)


def branching_loss(model: nn.Module, batch: Batch) -> ForwardOutput:
    assert not batch[0].sum().isnan().item()
    return summed_loss(model, batch)


def halves_of(parameters: Any) -> Any:
    first, *rest = parameters
    return [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(rest, lr=0.1)]


OBSTACLES: dict[str, tuple[dict[str, Any], Callable[[Setup], None] | None, str]] = {
    "forward-completed": ({}, partial(listen, TrainEvents.FORWARD_COMPLETED), "FORWARD_COMPLETED has a handler"),
    "backward-completed": ({}, partial(listen, TrainEvents.BACKWARD_COMPLETED), "BACKWARD_COMPLETED has a handler"),
    "gradients-reduced": ({}, partial(listen, TrainEvents.GRADIENTS_REDUCED), "GRADIENTS_REDUCED has a handler"),
    "gradients-ready": ({}, partial(listen, TrainEvents.GRADIENTS_READY), "GRADIENTS_READY has a handler"),
    "hook-of-gradient": ({}, hook_parameter, "a parameter has a hook"),
    "hook-of-step": ({}, hook_step, "the optimizer's step has a hook"),
    "metric": ({"forward": loss_with_predictions}, attach_a_metric, "a handler or a metric looks at each backward"),
    "freeze": ({}, attach_freeze, "a handler or a metric looks at each backward"),
    "rate": ({}, make_rate_a_tensor, "a tensor for its learning rate"),
    "state": ({"forward": stateful_loss}, None, "forward has a third parameter"),
    "branch": ({"forward": branching_loss}, None, "torch cannot compile it"),
    "out-of-memory": ({"on_out_of_memory": "skip"}, None, "on_out_of_memory is 'skip'"),
    "keep-gradients": ({"keep_gradients": True}, None, "keep_gradients is True"),
    "closure": ({"closure": True}, None, "closure is True"),
    "terms": (
        {"forward": loss_of_terms, "sample_sizes": sizes_of_terms},
        None,
        "sample_sizes counts micro-batches before the first forward",
    ),
    "optimizer": ({"optimizer": partial(torch.optim.RMSprop, lr=0.01)}, None, "the step of RMSprop is not known"),
    "several": ({"optimizer": halves_of}, None, "several optimizers"),
}


@pytest.mark.parametrize("name", only(["gradients-ready", "out-of-memory"], OBSTACLES))
def test_what_cannot_be_a_graph_is_said_once(caplog, bits, name):
    """Updates are those of compile=True, bit by bit, and the log has the reason once."""
    arguments, change, reason = OBSTACLES[name]
    setups = [make(way, **arguments) for way in (True, {"backend": "eager"})]
    for setup in setups:
        if change is not None:
            change(setup)
        setup.trainer.run(batches(4, 4, 4), max_epochs=1)
    assert len(reasons(caplog)) == 1
    assert reason in reasons(caplog)[0]
    assert bits(setups[0].model.state_dict()) == bits(setups[1].model.state_dict())
    assert counters(setups[0]) == counters(setups[1])


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["update", {"update": True, "mode": "default", "dynamic": False}], ids=["default", "mode"])
def test_with_any_options_an_update_is_one_graph_or_none(caplog, compile):  # noqa: A002
    """Where forward looks at a number, torch would cut the graph there; the log says so, and which line it is about."""
    setup = make(compile, forward=branching_loss, net=lambda: nn.Sequential(nn.Linear(4, 1)))
    setup.trainer.run(batches(4, 4), max_epochs=1)
    (reason,) = reasons(caplog)
    assert "torch cannot compile it" in reason
    assert not is_graph(setup)


@pytest.mark.slow
def test_updates_with_and_without_a_graph_follow_each_other(caplog):
    """A handler that comes and goes has its updates go the other way; both ways step the same optimizer."""
    setups = [make(way, accumulation_steps=2, max_grad_norm=0.1) for way in (True, False)]
    for setup in setups:
        setup.trainer.run(batches(4, 4, 4), max_iters=2)
        seen: list[int] = []
        handle = setup.trainer.add_event_handler(TrainEvents.GRADIENTS_READY, seen.append, 1)
        setup.trainer.run(batches(4, 4, 4), max_iters=4)
        handle.remove()
        setup.trainer.run(batches(4, 4, 4), max_iters=6)
        assert seen == [1, 1]
    assert len(reasons(caplog)) == 1
    assert is_graph(setups[0])
    assert_alike(*setups)


@pytest.mark.slow
def test_where_torch_compiles_nothing_for_a_while_later_updates_are_graphs(caplog):
    """As under another stance, or in a mode of the dispatcher."""
    setups = [make(way) for way in (True, False)]
    for setup in setups:
        with torch.compiler.set_stance("force_eager"):
            setup.trainer.run(batches(4, 4, 4), max_iters=1)
        setup.trainer.run(batches(4, 4, 4), max_iters=3)
    assert ["torch compiles nothing while" in reason for reason in reasons(caplog)] == [True]
    assert is_graph(setups[0])
    assert_alike(*setups)


@pytest.mark.slow
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_micro_batch_that_cannot_be_compiled_within_a_group(caplog, where):
    """What was gathered before it counts, it is announced once, and the rest is run as with compile=True."""

    def sometimes_branching(model: nn.Module, batch: Batch) -> ForwardOutput:
        return branching_loss(model, batch) if len(batch[0]) == 3 else summed_loss(model, batch)

    setups = [make(way, accumulation_steps=3, forward=sometimes_branching, seed=1) for way in (True, False)]
    sizes = [4, 4, 4]
    sizes[where] = 3
    events = []
    for setup in setups:
        events.append(note_events(setup.trainer))
        setup.trainer.run(batches(4, 4, 4, *sizes), max_epochs=1)
    assert len(reasons(caplog)) == 1
    assert events[0] == events[1]
    assert_alike(*setups)


def freeze_first(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


@pytest.mark.slow
def test_mistakes_of_forward_are_told_as_without_compiling():
    """A mean that is declared as a sum is warned of, and what forward must not return is refused with the same words."""

    def mean_loss(model: nn.Module, batch: Batch) -> ForwardOutput:
        return ForwardOutput((model(batch[0]) - batch[1]).square().mean(), len(batch[1]))

    mistaken = make(forward=mean_loss)
    mistaken.trainer.add_event_handler(Events.EPOCH_STARTED(once=2), freeze_first, mistaken.model)  # and it is looked at again
    with pytest.warns(LossDeclarationWarning, match="looks like a mean") as warned:
        mistaken.trainer.run(batches(4, 4), max_epochs=2)
    assert len(warned) == 1
    messages = []
    for way in (True, False):
        setup = make(way, forward=lambda model, batch: model(batch[0]))
        with pytest.raises(ForwardContractError, match="shape") as raised:
            setup.trainer.run(batches(4, 4), max_epochs=1)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def weights_of(setup: Setup) -> Tensor:
    return nn.utils.parameters_to_vector(setup.model.parameters()).detach()


def note_weights(setup: Setup) -> list[Tensor]:
    """Those before each update."""
    found: list[Tensor] = []
    setup.trainer.add_event_handler(Events.ITERATION_STARTED, lambda: found.append(weights_of(setup)))
    return found


REFUSED: dict[str, tuple[Any, dict[str, float]]] = {
    "negative": (-1, {}),
    "infinite": (math.inf, {}),
    "infinite-tensor": (torch.tensor(math.inf), {}),
    "name": (3, {"loss": 1.0}),
    "grouped": (3, {"train/loss": 1.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["negative", "infinite-tensor", nightly("infinite"), nightly("name"), nightly("grouped")])
def test_what_forward_must_not_return_is_refused_in_later_micro_batches_too(name, bits):
    """Not only in the one that was looked at before a graph was compiled; and no step is made."""

    def sometimes_wrong(model: nn.Module, batch: Batch) -> ForwardOutput:
        output = summed_loss(model, batch)
        return output if len(batch[0]) == 4 else ForwardOutput(output.loss, *REFUSED[name])

    outcomes = []
    for way in (True, False):
        setup = make(way, forward=sometimes_wrong)
        setup.trainer.run(batches(4, 4), max_epochs=1)
        assert not way or is_graph(setup)
        weights = note_weights(setup)
        with pytest.raises(ForwardContractError) as raised:
            setup.trainer.run(batches(4, 3), max_epochs=2)
        outcomes.append((str(raised.value), counters(setup)))
        assert bits(weights[-1]) == bits(weights_of(setup))
    assert outcomes[0] == outcomes[1]


class Assigning(Net):
    """Assigns its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return super().forward(x) * self.count


@pytest.mark.slow
def test_a_buffer_that_forward_assigns():
    """It counts the forwards of micro-batches, and not the one before the first of them."""
    setups = [make(way, net=Assigning) for way in (True, False)]
    for setup in setups:
        setup.trainer.run(batches(4, 4), max_epochs=2)
    assert is_graph(setups[0])
    assert_alike(*setups)


@pytest.mark.slow
def test_looking_at_the_first_micro_batch_leaves_no_trace():
    """Forward runs once more in a process, and what it draws and what buffers keep is put back."""
    setups = []
    for way in (True, False):
        setup = make(way, net=partial(Net, norm=True, dropout=0.5))
        torch.manual_seed(3)
        setup.trainer.run(batches(4, 4), max_epochs=2)
        setups.append(setup)
    assert is_graph(setups[0])
    assert_alike(*setups)  # the backend runs torch's own dropout


def halving_loss(model: nn.Module, batch: Batch) -> ForwardOutput:
    batch[0].mul_(0.5)
    return summed_loss(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_what_forward_writes_into_a_micro_batch_is_written_once(steps):
    """Though forward is run on the first ones before, to look at it and to compare the graph with it."""
    setups, inputs = [], []
    for way in (True, False):
        setups.append(make(way, forward=halving_loss, accumulation_steps=steps))
        inputs.append(batches(*[4] * 2 * steps))
        setups[-1].trainer.run(inputs[-1], max_epochs=1)
    assert is_graph(setups[0])
    assert_alike(*setups)
    for (one, _), (other, _) in zip(*inputs, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_it_takes_ignites_factory_and_bare_modules():
    """A Sequential, which torch does not compile by itself, is part of the graph of an update."""
    weights = []
    for way in ({"update": True, "backend": "eager"}, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = create_supervised_trainer(model, optimizer, nn.MSELoss(), compile=way)
        trainer.run(batches(4, 4, 3), max_epochs=2)
        assert not way or trainer.process.gather._obstacle is None
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-9)


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "bare": lambda squares: squares.mean(),
    "one-of-a-tuple": lambda squares: (squares.mean(),),
    "pair": lambda squares: (squares.sum(), len(squares)),
    "triple": lambda squares: (squares.sum(), torch.tensor(float(len(squares))), {"first": (squares[0].sum(), 2)}),
    "without-a-size": lambda squares: ForwardOutput(squares.mean(), logs={"first": squares[0].sum()}),
    "size-below-one": lambda squares: ForwardOutput(squares.sum(), 0.25),
    "no-size": lambda squares: (squares.sum(), 0),
}


@pytest.mark.sampled(0, slow=4)
@pytest.mark.parametrize("name", FORMS)
def test_what_forward_may_return(name):
    """Each form has the same meaning in a graph."""

    def forward(model: nn.Module, batch: Batch) -> Any:
        return FORMS[name]((model(batch[0]) - batch[1]).square())

    setups = [make(way, forward=forward, accumulation_steps=2) for way in (True, False)]
    for setup in setups:
        setup.trainer.run(batches(4, 4, 4), max_epochs=1)
    assert is_graph(setups[0])
    assert_alike(*setups)
    sizes = {"pair": 4.0, "triple": 4.0, "size-below-one": 0.25, "no-size": 0.0}
    assert [record.sample_size for record in setups[0].records] == [2 * sizes.get(name, 1.0), sizes.get(name, 1.0)]


def on_two_ranks() -> list[str]:
    """What the log says of a model in DistributedDataParallel."""
    found = messages_from_here(logging.NOTSET)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net().double(), find_unused_parameters=True)
    trainer = create_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), summed_loss, compile={"update": True, "backend": "eager"}
    )
    trainer.run(batches(4, 4), max_epochs=1)
    assert trainer.state.num_steps == 2
    return [message for message in found if message.startswith('compile="update"')]


@pytest.mark.slow
def test_on_several_ranks_the_model_alone_is_compiled():
    """Both ranks train, and say why."""
    assert (
        run_ranks(on_two_ranks)
        == [['compile="update" compiles no more than compile=True here, since gradients cross ranks']] * 2
    )


def test_what_is_not_known_is_refused():
    """Before the first batch."""
    with pytest.raises(TypeError, match=r"compile must be a bool or a mapping of torch\.compile's options, or 'update'"):
        make("updates")
    with pytest.raises(ValueError, match=r"compile\['update'\] must be True, got False"):
        make({"update": False})


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-40, nightly(1.0), nightly(1e38)])
def test_a_factor_that_float32_cannot_hold(size: float) -> None:
    """The mean is that of losses and sample sizes that are not so small."""

    def trained(size: float) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        trainer = create_trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda m, x: ForwardOutput(m(x).square().sum() * size, len(x) * size),
            max_grad_norm=1.0,
            compile="update",
        )
        trainer.run([torch.ones(2, 3)], max_epochs=1)
        return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]

    assert trained(size) == pytest.approx(trained(1.0), rel=1e-2)
