"""The decision on the device: the step it queues is the one the host would have made, in every bit, and it leaves no trace.

No accelerator is needed: told that the CPU is none of the host's, the trainer takes the way of an accelerator on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.utils import _pytree as pytree

from bits import bit_by_bit
from ignite_train import (
    ForwardContractError,
    ForwardOutput,
    GaveUpError,
    NonFiniteError,
    StaticLossScaling,
    TorchLossScaling,
    Trainer,
    TrainEvents,
    UpdateOptions,
    create_trainer,
)
from ignite_train.device import to_host
from ignite_train.fast.folded_step import LARGEST_DIVISOR, SMALLEST_DIVISOR, FoldedStep
from ignite_train.fast.queued_step import QueuedStep, decide_on_device
from ignite_train.handlers import GradNormConsistency, GradNormMismatchError, StateConsistency, StateMismatchError
from ignite_train.model.gradients import SMALLEST_NORM
from ignite_train.ranks.messages import Piggyback, RankRequests
from ignite_train.ranks.statistics import Reduced, Totals
from ignite_train.update.decision import Rules, decide
from ranks import run_ranks
from textbook import Textbook
from tiers import accelerated
from update_options import with_options

pytestmark = accelerated

LR = 0.01
FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: AdamW(p, lr=LR, weight_decay=0.1, fused=True),
    "adam": lambda p: Adam(p, lr=LR, amsgrad=True, fused=True),
    "momentum": lambda p: SGD(p, lr=LR, momentum=0.9, nesterov=True, fused=True),
    "sgd": lambda p: SGD(p, lr=LR, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=LR, fused=True),
}
EVENTS = (
    *(TrainEvents.MICRO_BATCH_STARTED, TrainEvents.BACKWARD_COMPLETED, TrainEvents.OUT_OF_MEMORY, TrainEvents.STEP_COMPLETED),
    *(TrainEvents.STEP_SKIPPED, Events.ITERATION_COMPLETED, Events.COMPLETED),
)
HUGE = 3e38  # times itself no float32


@pytest.fixture
def elsewhere(monkeypatch) -> None:
    """The CPU counts as an accelerator."""
    monkeypatch.setattr(to_host, "_HOST", "nowhere")


@pytest.fixture
def queued(monkeypatch) -> list[bool]:
    """Of each step that was queued ahead, whether the device was to make it."""
    return _watch(monkeypatch.setattr)


def _watch(setattr_: Callable[..., None]) -> list[bool]:
    queued: list[bool] = []
    step_if = FoldedStep.step_if

    def note(self: FoldedStep, may_step: Tensor, divisor: Tensor) -> None:
        queued.append(may_step.item() == 1.0)
        step_if(self, may_step, divisor)

    setattr_(FoldedStep, "step_if", note)
    return queued


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    x, y = batch
    logs = {"samples": len(y), "first": x.sum()} | ({"five": 1.0} if len(y) == 5 else {})
    return ForwardOutput(mse_loss(model(x), y, reduction="sum"), len(y), logs)


def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
    return ForwardOutput(mse_loss(model(batch[0]), batch[1], reduction="sum"), 1)


class ShortOfMemory:
    """A forward that runs out of memory when it is called for the `when`-th time."""

    def __init__(self, when: int) -> None:
        self.when, self.calls = when, 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> ForwardOutput:
        self.calls += 1
        if self.calls == self.when:
            raise torch.OutOfMemoryError
        return forward(model, batch)


def data(spoilt: int | None) -> list[tuple[Tensor, Tensor]]:
    """Twelve micro-batches, of which two in a row have no sample; the one with number `spoilt` overflows."""
    generator = torch.Generator().manual_seed(1)
    sizes = (3, 1, 4, 2, 3, 5, 0, 0, 2, 6, 1, 1)
    batches = [(torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)) for size in sizes]
    if spoilt is not None:
        batches[spoilt] = (batches[spoilt][0], batches[spoilt][1] * HUGE)
    return batches


def train(
    name: str,
    batches: list[Any],
    *,
    forward: Callable[..., Any] = forward,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    scaled: bool = False,
    checked: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """What can be seen of a run: state of everything, outputs, events, and how it ended."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    wrapped = wrap(model)
    optimizer = FUSED[name](model.parameters())
    scaling = TorchLossScaling(2.0**10) if scaled else None
    trainer = create_trainer(
        wrapped, optimizer, forward, accumulation_steps=2, loss_scaling=scaling, **with_options(**arguments)
    )
    outputs: list[str] = []
    events: list[str] = []
    error = ""
    if checked:
        GradNormConsistency().attach(trainer)
        StateConsistency(model, optimizer).attach(trainer, Events.ITERATION_COMPLETED(every=2))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: outputs.append(repr(trainer.state.output)))
    for event in EVENTS:
        trainer.add_event_handler(event, lambda name: events.append(name), event.name)
    try:
        trainer.run(batches)
    except (NonFiniteError, GaveUpError) as raised:
        error = str(raised)
    gradients = [parameter.grad for parameter in model.parameters()]
    state = [dict(model.named_parameters()), optimizer.state_dict(), trainer.state_dict()]
    return {"state": state, "outputs": outputs, "events": events, "error": error, "gradients": gradients}


def both(patch: pytest.MonkeyPatch, *args: Any, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any], list[bool]]:
    """The run in which the host reads before each step, and the run in which steps are queued; and those steps."""
    patch.setattr(to_host, "_HOST", "nowhere")
    with patch.context() as held:
        held.setattr(QueuedStep, "_why_not_queued", lambda self, trainer: "the test")
        there = train(*args, **arguments)
    queued = _watch(patch.setattr)
    return there, train(*args, **arguments), queued


# --- the same as the host's decision ---


@pytest.mark.sampled(4)
@pytest.mark.parametrize("spoilt", [None, 0, 4], ids=["clean", "first", "later"])
@pytest.mark.parametrize("policy", ["raise", "skip", "scaled"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
@pytest.mark.parametrize("name", FUSED)
def test_the_device_decides_as_the_host_does(monkeypatch, bits, name, max_grad_norm, policy, spoilt):
    """Parameters, moments, counters, outputs, events, errors: in every bit those of the host's own decision."""
    arguments = {"max_grad_norm": max_grad_norm, "scaled": policy == "scaled"}
    arguments["on_nonfinite"] = "skip" if policy == "skip" else "raise"
    there, ahead, queued = both(monkeypatch, name, data(spoilt), **arguments)
    assert bits(ahead) == bits(there)
    assert ahead["gradients"] == [None] * 4

    fails = spoilt is not None and policy == "raise"
    plain = [spoilt != 2 * update and update != 3 for update in range(6)]  # the fourth has no sample
    before = 0 if name in ("sgd", "adagrad") else plain.index(True) + 1  # until there are moments
    assert bool(ahead["error"]) == fails
    assert queued == plain[before : spoilt // 2 + 1 if fails and spoilt is not None else None]


@pytest.mark.parametrize("name", FUSED)
def test_it_trains_as_without_an_accelerator(monkeypatch, name):
    """The numbers are those of the host's own way, and of float64 arithmetic, but for the rounding of norm and step."""
    right = train(name, data(None), max_grad_norm=0.05)
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    ours = train(name, data(None), max_grad_norm=0.05)
    assert ours["events"] == right["events"]
    expected = by_hand(name, data(None), 0.05)
    for (key, parameter), exact in zip(right["state"][0].items(), expected, strict=True):
        torch.testing.assert_close(ours["state"][0][key], parameter, rtol=1.3e-6, atol=1e-4 * LR)
        torch.testing.assert_close(parameter.double(), exact, rtol=1.3e-6, atol=1e-4 * LR)


def by_hand(name: str, batches: list[Any], max_grad_norm: float) -> list[Tensor]:
    """The parameters after the same updates, all of it in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    parameters: list[Tensor] = list(model.parameters())
    optimizer = Textbook(FUSED[name](model.parameters()), parameters)
    for start in range(0, len(batches), 2):
        x, y = (torch.cat(part).double() for part in zip(*batches[start : start + 2], strict=True))
        if len(y) > 0:
            mse_loss(model(x), y).backward()
            optimizer.clip(max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in parameters]


def test_a_factor_of_one(monkeypatch, bits):
    """Where nothing is to be scaled the host passes no divisor and the device passes one: the same bits."""
    there, ahead, queued = both(monkeypatch, "adamw", data(None), forward=mean)
    assert bits(ahead) == bits(there)
    assert queued == [True, True, False, True, True]  # the one without samples has a norm of zero, which the host takes again


@pytest.mark.parametrize("give_up_after", [None, 1])
def test_out_of_memory_is_settled_by_the_host(monkeypatch, bits, give_up_after):
    """Handlers of OUT_OF_MEMORY, and an update that gives up, come before the step: none is queued."""
    arguments: dict[str, Any] = {"on_out_of_memory": "skip", "give_up_after": give_up_after}
    monkeypatch.setattr(to_host, "_HOST", "nowhere")
    with monkeypatch.context() as held:
        held.setattr(QueuedStep, "_why_not_queued", lambda self, trainer: "the test")
        there = train("adamw", data(None), forward=ShortOfMemory(5), **arguments)
    queued = _watch(monkeypatch.setattr)
    ahead = train("adamw", data(None), forward=ShortOfMemory(5), **arguments)
    assert bits(ahead) == bits(there)
    assert bool(ahead["error"]) == (give_up_after == 1)
    assert queued == ([True] if give_up_after else [True, False, True, True])  # the False had no sample


def test_a_divisor_beyond_float32_is_left_to_the_host(elsewhere, queued):
    """A factor of 1e-42 is multiplied in beforehand, as everywhere; the device skips what it cannot divide by."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = SGD(model.parameters(), lr=1.0, fused=True)
    create_trainer(model, optimizer, lambda model, x: model(x).sum(), max_grad_norm=1e-12).run([torch.full((1, 1), 1e30)])
    assert queued == [False]
    assert model.weight.item() == pytest.approx(-1e-12, rel=1e-2)


@pytest.mark.parametrize("host", ["cpu", "nowhere"])
def test_a_factor_that_vanishes(monkeypatch, build, bits, host):
    """Scale times sample size is beyond float64: the mean is zero, and so is the step; nothing divides by it."""
    monkeypatch.setattr(to_host, "_HOST", host)
    model, _, trainer = build(
        lambda model, batch: (model(batch[0]).sum() * 1e-3, 1e300),
        optimizer=FUSED["sgd"],
        loss_scaling=StaticLossScaling(2.0**60),
    )
    before = bits(model.state_dict())
    trainer.run(data(None)[:1])
    assert trainer.state.num_steps == 1
    assert bits(model.state_dict()) == before


def test_a_sample_size_that_is_none_moves_nothing(elsewhere, queued, build, bits):
    """A sum of sample sizes below zero is refused, and nothing has moved by then."""
    model, optimizer, trainer = build(
        lambda model, batch: (model(batch[0]).sum(), torch.tensor(-1.0)), optimizer=FUSED["sgd"], on_nonfinite="skip"
    )
    before = bits([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(ForwardContractError, match="sample_size"):
        trainer.run(data(None))
    assert queued == [False]
    assert bits([model.state_dict(), optimizer.state_dict()]) == before


_any = st.floats(0.0)
_border = st.sampled_from([0.0, 1.0, math.inf, math.nan, 1.7e308, 5e-324, 3.4e38, 1.2e-38, 1e-45, 7.0])


@pytest.mark.slow
@given(
    knows=st.booleans(),
    size=_border | _any,
    loss=_border | _any,
    norm=_border | _any,
    ranks=st.integers(1, 7),
    scale=st.integers(-20, 40).map(lambda power: 2.0**power),
    clip=st.none() | st.floats(1e-30, 1e30) | st.just(1.0),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_both_decisions_are_of_one_arithmetic(knows, size, loss, norm, ranks, scale, clip):
    """Whatever the sums are, device and host skip the same updates, and divide by the same number.

    Also where the host knows the sample size, and whether something stands in the way.
    """
    on_device = [torch.tensor(number, dtype=torch.float64) for number in (size, loss, norm, 0.0)]
    numbers = Reduced(size, *on_device[1:3], None) if knows else Reduced(*on_device)
    rules = Rules(averaged_over=ranks, scales_loss=True, max_grad_norm=clip)
    plain, divisor = decide_on_device(numbers, rules, scale)
    if not size < math.inf or scale * size == 0 < size:
        assert plain.item() == 0.0  # the host raises
        return
    output = decide(Totals(size, loss, 1, 0, {}, RankRequests(), norm), rules, scale)
    factor = output.mean_factor * output.clip_coefficient
    folds = (
        norm >= SMALLEST_NORM
        and output.skipped_reason is None
        and factor > 0
        and SMALLEST_DIVISOR <= 1.0 / factor <= LARGEST_DIVISOR
    )
    assert plain.item() == float(folds)
    if folds:
        assert divisor.item() == torch.tensor(1.0 / factor, dtype=torch.float32).item()


# --- the order ---


def test_the_host_waits_for_what_came_before_the_step(monkeypatch, elsewhere, build):
    """The numbers set out, with an event behind them, before the step is queued; the host waits for that event after it."""
    order: list[str] = []

    class Event:
        def record(self, _stream: Any) -> None:
            order.append("record")

        def synchronize(self) -> None:
            order.append("wait")

    monkeypatch.setattr(to_host, "has_streams", lambda device: True)
    monkeypatch.setattr(to_host, "_new_event", lambda device: Event())
    monkeypatch.setattr(to_host, "_stream_of", lambda device: None)
    _, _, trainer = build(optimizer=FUSED["adagrad"])
    step_if, call = FoldedStep.step_if, FoldedStep.__call__
    monkeypatch.setattr(FoldedStep, "step_if", lambda *args: (order.append("queued"), step_if(*args)))
    monkeypatch.setattr(FoldedStep, "__call__", lambda *args: (order.append("stepped"), call(*args)))
    trainer.run(data(None)[:2])
    assert order == ["record", "queued", "wait"] * 2

    order.clear()
    trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: order.append("seen"))
    trainer.run(data(None)[:2], max_epochs=2)
    assert order == ["record", "wait", "seen", "stepped"] * 2
    assert trainer.state.output.sample_size == 1


@pytest.mark.parametrize(
    ("optimizer", "prepare", "count"),
    [
        ("adamw", lambda trainer, optimizer: None, 4),
        ("adagrad", lambda trainer, optimizer: None, 5),
        ("adamw", lambda trainer, optimizer: trainer.add_event_handler(TrainEvents.GRADIENTS_READY, lambda: None), 0),
        ("adamw", lambda trainer, optimizer: trainer.add_event_handler(TrainEvents.GRADIENTS_READY(once=99), lambda: None), 0),
        ("adamw", lambda trainer, optimizer: trainer.piggybacks.append(StateConsistency(nn.Linear(1, 1), optimizer)), 4),
        ("adamw", lambda trainer, optimizer: optimizer.register_step_post_hook(lambda *_: None), 0),
        ("adamw", lambda trainer, optimizer: optimizer.register_step_pre_hook(lambda *_: None), 0),
        ("adamw", lambda trainer, optimizer: optimizer.param_groups[0].update(fused=False), 0),
        ("adamw", lambda trainer, optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1), 4),
    ],
    ids=["plain", "with state", "handler", "not due", "piggyback", "post-hook", "pre-hook", "not fused", "scheduler"],
)
def test_who_keeps_the_order(elsewhere, queued, build, micro_batches, optimizer, prepare, count):
    """Whoever could tell that the step came before the reading is asked for the other order, and nobody else."""
    _, built, trainer = build(optimizer=FUSED[optimizer])
    kept = prepare(trainer, built)
    trainer.run(micro_batches)
    assert queued == [True] * count
    assert trainer.state.num_steps == 5
    del kept


class Objecting(Piggyback):
    """Objects in one update, and may raise there."""

    def __init__(self, update: int, trainer: Trainer, *, raises: bool) -> None:
        self.update, self.trainer, self.raises = update, trainer, raises

    def payload(self) -> list[float]:
        return [10.0 * self.update + self.trainer.state.iteration]

    def vetoes(self, sums: Tensor) -> Tensor:
        return sums[0] == 11 * self.update

    def on_reduced(self, sums: list[float]) -> None:
        if self.raises and sums == [11.0 * self.update]:
            raise RuntimeError("objection")


@pytest.mark.parametrize("raises", [True, False])
def test_an_objection_skips_the_step(elsewhere, queued, build, micro_batches, bits, raises):
    """The device leaves the update to the host, which hears the piggyback before it makes the step, or does not make it."""
    model, _, trainer = build(optimizer=FUSED["sgd"])
    trainer.piggybacks += [Objecting(9, trainer, raises=True), Objecting(3, trainer, raises=raises)]
    before: list[Any] = []
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), lambda: before.append(bits(model.state_dict())))
    with pytest.raises(RuntimeError, match="objection") if raises else nullcontext():
        trainer.run(micro_batches)
    assert queued == [True, True, False] + [True] * (0 if raises else 2)
    assert (bits(model.state_dict()) == before[0]) == raises
    assert trainer.state.num_steps == (2 if raises else 5)


def test_gradients_elsewhere_keep_the_order(elsewhere, build, micro_batches):
    """The divisor would have to travel to the other device, and to the CPU it would make the host wait."""
    model, _, trainer = build(optimizer=FUSED["adagrad"])
    trainer.run(micro_batches)
    model[0].weight.grad = torch.ones(8, 4)
    update: Any = trainer.process
    assert update.gather._why_not_queued(trainer) is None
    for kinds in (set(), {(torch.device(name), torch.float32) for name in ("cpu", "cuda:0")}):
        update.gather.gradients.kinds = kinds
        assert update.gather._why_not_queued(trainer) == "gradients are not on the device of the loss"


def test_float64_keeps_the_order(elsewhere, queued, build, micro_batches):
    """Gradients that are not folded are not stepped ahead."""
    _, _, trainer = build(optimizer=FUSED["adagrad"], dtype=torch.float64)
    trainer.run([(x.double(), y.double()) for x, y in micro_batches])
    assert queued == []


def test_the_order_is_said_once(elsewhere, build, micro_batches, caplog):
    """One line, beside that about folding."""
    _, _, trainer = build(optimizer=FUSED["adamw"])
    with caplog.at_level(logging.INFO, logger="ignite_train"):
        trainer.run(micro_batches)
    lines = [record.message for record in caplog.records if "queued" in record.message]
    assert len(lines) == 1
    assert lines[0].endswith(
        "at first not, since a parameter has no moments yet, and a step that was skipped would leave some behind"
    )


# --- ranks ---


def on_ranks(way: str, name: str, spoilt: int | None, scaled: bool, checked: bool) -> tuple[bool, list[bool], str]:
    """Whether both decisions come to the same on this rank, the steps queued, and the parameters."""
    rank = torch.distributed.get_rank()
    batches = [batch for number, batch in enumerate(data(spoilt)) if number // 2 % 2 == rank]
    wrap: Callable[[nn.Module], Any] = {
        "ddp": DistributedDataParallel,
        "explicit": lambda model: model,
        "fsdp": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
    }[way]
    arguments: dict[str, Any] = {"wrap": wrap, "reduction": way, "scaled": scaled, "checked": checked}
    arguments |= {"on_nonfinite": "skip", "max_grad_norm": 0.05}
    with pytest.MonkeyPatch.context() as patch:
        there, ahead, queued = both(patch, name, batches, **arguments)

    def local(run: dict[str, Any]) -> Any:
        return pytree.tree_map_only(DTensor, lambda tensor: tensor.to_local(), run)

    return bit_by_bit(local(ahead)) == bit_by_bit(local(there)), queued, repr([ahead["outputs"], ahead["events"]])


@pytest.mark.sampled(1, slow=9)
@pytest.mark.parametrize("checked", [False, True], ids=["bare", "with consistency checks"])
@pytest.mark.parametrize("scaled", [False, True], ids=["skip", "scaled"])
@pytest.mark.parametrize(
    ("way", "name"),
    [("ddp", "adamw"), ("ddp", "momentum"), ("explicit", "adamw"), ("explicit", "momentum"), ("fsdp", "adamw")],
)
def test_all_ranks_step_ahead_alike(way, name, scaled, checked):
    """On two ranks too, in every way of crossing them, overflow, empty groups and new names of logs included."""
    results = run_ranks(on_ranks, way, name, 4, scaled, checked)
    (same, queued, seen), (same_too, queued_too, seen_too) = results
    assert same
    assert same_too
    assert (queued, seen) == (queued_too, seen_too)
    assert True in queued
    assert False in queued


def mismatched(patch: pytest.MonkeyPatch, update: int, what: str) -> tuple[str, list[bool], list[bool], int]:
    """On rank 1 a gradient, or a weight, is changed from one update on; what the error says, and what has moved."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = FUSED["sgd"](model.parameters())
    trainer = create_trainer(DistributedDataParallel(model), optimizer, forward, options=UpdateOptions(reduction="ddp"))
    check: Any = GradNormConsistency() if what == "gradient" else StateConsistency(model, optimizer)
    check.attach(trainer, Events.ITERATION_COMPLETED)
    weights: list[Tensor] = []

    def disturb() -> None:
        if torch.distributed.get_rank() == 1 and trainer.state.iteration >= update:
            changed = model.bias.grad.data if what == "gradient" else model.bias.detach()  # not counted as a change
            changed *= 1.5

    trainer.moments.before_norm.append(lambda _: disturb())  # no handler of an event may change gradients unnoticed
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: weights.append(model.weight.detach().clone()))
    queued = _watch(patch.setattr)
    with pytest.raises((GradNormMismatchError, StateMismatchError)) as caught:
        trainer.run(data(None)[:6])
    moved = [not torch.equal(weights[-1], model.weight), trainer.has_handlers(TrainEvents.GRADIENTS_READY)]
    return str(caught.value), moved, queued, trainer.state.iteration


def mismatched_in_order(update: int, what: str, host: str) -> tuple[str, list[bool], list[bool], int]:
    """The same where tensors on the CPU are on the host, or on an accelerator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to_host, "_HOST", host)
        return mismatched(patch, update, what)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["gradient", "weight"])
def test_ranks_that_differ_are_noticed_before_the_step(what):
    """On both ranks, by the same message in either order, with the parameters as they were when the update began."""
    there, ahead = (run_ranks(mismatched_in_order, 3, what, host) for host in ("cpu", "nowhere"))
    messages = {message for message, *_ in (*there, *ahead)}
    assert len(messages) == 1
    assert "bias" in messages.pop()
    for _, moved, _, iteration in (*there, *ahead):
        assert moved == [False, False]
        assert iteration == 3  # the fourth was not done
    assert [queued for _, _, queued, _ in there] == [[], []]
    assert [queued for _, _, queued, _ in ahead] == [[False, True, True, False]] * 2  # the names of logs are new in the first
