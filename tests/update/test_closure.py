"""Optimizers that evaluate the loss again: the closure is the update up to its step, on every rank alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import cuts
from bits import bit_by_bit
from ignite_train import (
    ForwardOutput,
    NonFiniteError,
    StaticLossScaling,
    TorchLossScaling,
    TrainEvents,
    TrainingError,
    UpdateOptions,
    count_traffic,
    create_trainer,
)
from ignite_train.handlers import Checkpoint
from ranks import run_ranks
from tiers import only
from update_options import with_options

SIZES = [[[2, 3], [4]], [[1], []], [[3], [2, 5]]]  # by update and rank


class Sharpness(Optimizer):
    """Sharpness-aware minimisation (Foret et al., 2021) as published: the optimizer that steps is inside, with its state."""

    def __init__(self, params: Any, rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = SGD(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack(gradients).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["before"] = parameter.data.clone()
                    parameter.add_(parameter.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = self.state[parameter]["before"]
        self.base_optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


def network(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1)).to(dtype)


def make_optimizer(kind: str, model: nn.Module) -> Optimizer:
    made: dict[str, Any] = {
        "sam": lambda: Sharpness(model.parameters(), lr=0.1, momentum=0.9),
        "lbfgs": lambda: LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5),
        "wolfe": lambda: LBFGS(model.parameters(), max_iter=6, line_search_fn="strong_wolfe"),
    }
    result: Optimizer = made[kind]()
    return result


def flat(model: nn.Module) -> list[float]:
    numbers: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return numbers


def by_hand(kind: str, limit: float | None) -> tuple[list[float], list[int]]:
    """The loop on all samples of each update at once, as the optimizers' documents have it; and the evaluations of each."""
    model, start, evaluations = network(), 0, []
    optimizer = make_optimizer(kind, model)
    for sizes in SIZES:
        count, number = sum(map(sum, sizes)), 0
        batch = cuts.cut(cuts.samples(), [count], start)[0]
        start += count

        def closure(batch: Any = batch) -> Tensor:
            nonlocal number
            number += 1
            optimizer.zero_grad()
            loss, weight, *_ = cuts.forward(model, batch)
            mean: Tensor = loss / weight
            mean.backward()
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            return mean.detach()

        if kind == "sam":
            closure()
        optimizer.step(closure)  # type: ignore[arg-type]
        evaluations.append(number)
    return flat(model), evaluations


def on_rank(way: str, kind: str, limit: float | None = None, scale: float | None = None) -> Any:
    """The same on this rank's samples; with the number of evaluations and collectives of each update."""
    model = network()
    wrapped = DistributedDataParallel(model) if way in ("ddp", "small") else model
    arguments = with_options(
        max_grad_norm=limit,
        reduction={"small": "auto"}.get(way, way),
        closure=True,
        loss_scaling=None if scale is None else StaticLossScaling(scale),
    )
    trainer = create_trainer(wrapped, make_optimizer(kind, model), cuts.forward, **arguments)
    start, evaluations, collectives = 0, [], []
    rank, ranks = idist.get_rank(), idist.get_world_size()
    with trainer.session():
        for sizes in SIZES:
            mine = [size for own in (sizes if ranks == 1 else sizes[rank : rank + 1]) for size in own]
            before = 0 if ranks == 1 else sum(map(sum, sizes[:rank]))
            with count_traffic() as traffic:
                record = trainer.update(cuts.cut(cuts.samples(), mine, start + before))
            assert record.applied
            evaluations.append(record.num_evaluations)
            collectives.append(len(traffic.collectives))
            start += sum(map(sum, sizes))
    assert trainer.state.num_micro_batches == sum(
        len(own) for sizes in SIZES for own in (sizes if ranks == 1 else [sizes[rank]])
    )
    return flat(model), evaluations, collectives


@pytest.mark.parametrize("kind", ["sam", "lbfgs", "wolfe"])
@pytest.mark.parametrize(("limit", "scale"), [(None, None), (0.15, None), (None, 1024.0)], ids=["plain", "clipped", "scaled"])
def test_one_process_is_the_loop_by_hand(kind: str, limit: float | None, scale: float | None) -> None:
    """The samples of an update are cut into micro-batches here and are one batch by hand, so the sums round differently."""
    parameters, evaluations, _ = on_rank("auto", kind, limit, scale)
    expected, expected_evaluations = by_hand(kind, limit)
    assert parameters == pytest.approx(expected, rel=1e-7, abs=1e-10)
    # A line search compares rounded sums to decide whether it evaluates once more.
    assert evaluations == expected_evaluations or kind == "wolfe"
    assert max(evaluations) > 1


def all_on_ranks(way: str) -> list[Any]:
    return [on_rank(way, kind, 0.15) for kind in ("sam", "lbfgs")] + [on_rank(way, "wolfe")]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["explicit", "small", "ddp"])
def test_ranks_are_the_loop_by_hand(way: str) -> None:
    """On ragged and empty groups, with one reduction an evaluation."""
    outcomes = run_ranks(all_on_ranks, way)
    assert [one[:2] for one in outcomes[0]] == [one[:2] for one in outcomes[1]], "bitwise the same on both ranks"
    for (kind, limit), outcome in zip((("sam", 0.15), ("lbfgs", 0.15), ("wolfe", None)), outcomes[0], strict=True):
        parameters, evaluations, collectives = outcome
        expected, expected_evaluations = by_hand(kind, limit)
        assert parameters == pytest.approx(expected, rel=1e-6, abs=1e-9), kind
        assert evaluations == expected_evaluations or kind == "wolfe"
        if way != "ddp":  # which reduces by buckets
            assert collectives[1:] == evaluations[1:], "and once the names of the logs"


@pytest.mark.parametrize("kind", ["sam", "lbfgs", "wolfe"])
def test_float32_is_bitwise_the_loop_by_hand(kind: str) -> None:
    """For a bare mean loss of one micro-batch, with dropout and BatchNorm, and with as many evaluations as by hand.

    Both compute the same sums in the same order, so that even a line search evaluates equally often: the first is not repeated.
    """

    def make() -> tuple[nn.Module, Optimizer]:
        model = network(torch.float32, dropout=0.2)
        model.append(nn.BatchNorm1d(1))
        return model, make_optimizer(kind, model)

    batches = [(x.float(), y.float()[:, None]) for x, y, _ in cuts.cut(cuts.samples(), [6, 5, 7])]
    torch.manual_seed(3)
    model, optimizer = make()
    trainer = create_trainer(model, optimizer, lambda m, b: mse_loss(m(b[0]), b[1]), options=UpdateOptions(closure=True))
    evaluations: list[int] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda t: evaluations.append(t.state.update_output.num_evaluations))
    trainer.run(batches, max_epochs=2)
    found, drawn = bit_by_bit(model.state_dict()), torch.rand(())

    torch.manual_seed(3)
    model, optimizer = make()
    expected: list[int] = []
    for x, y in batches * 2:
        expected.append(0)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            expected[-1] += 1
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss.detach()

        if kind == "sam":
            closure()
        optimizer.step(closure)  # type: ignore[arg-type]
    assert found == bit_by_bit(model.state_dict())
    assert drawn == torch.rand(())
    assert evaluations == expected


def test_replay_shows_each_evaluation_the_first_one() -> None:
    """Random numbers, buffers and what forward carries are those of the first; what is left is what one forward leaves."""
    seen: list[Any] = []

    def forward(model: Any, batch: Any, state: Any) -> Tensor:
        seen.append((float(torch.rand(())), int(model[-1].num_batches_tracked), state.carried.get("count", 0)))
        state.carried["count"] = state.carried.get("count", 0) + 1
        return mse_loss(model(batch[0]), batch[1])

    ends = []
    for closure in ("replay", False):
        model = network(torch.float32)
        model.append(nn.BatchNorm1d(1))
        optimizer: Any = make_optimizer("lbfgs", model) if closure else SGD(model.parameters(), lr=0.1)
        torch.manual_seed(5)
        seen.clear()
        trainer = create_trainer(model, optimizer, forward, accumulation_steps=2, **with_options(closure=closure))
        batches = [(x.float(), y.float()[:, None]) for x, y, _ in cuts.cut(cuts.samples(), [6, 5])]
        state = trainer.run(batches)
        ends.append((float(torch.rand(())), int(model[-1].num_batches_tracked), state.carried["count"]))  # type: ignore[arg-type]
        firsts, others = seen[:2], seen[2:]
        if closure:
            assert state.update_output is not None
            assert len(seen) == 2 * state.update_output.num_evaluations > 4
            assert all(one == firsts[index % 2] for index, one in enumerate(others))
    assert ends[0] == ends[1]
    assert ends[0][1:] == (2, 2)


def test_without_replay_each_evaluation_draws_its_own() -> None:
    """As by hand. What forward carries starts from the beginning of the update all the same, and so does its place in it."""
    drawn: list[float] = []
    counts: list[int] = []
    places: list[int] = []

    def forward(model: nn.Module, batch: Any, state: Any) -> Any:
        places.append(state.micro_batch_in_group)
        drawn.append(float(torch.rand(())))
        counts.append(state.carried.get("count", 0))
        state.carried["count"] = counts[-1] + 1
        return cuts.forward(model, batch)

    model = network()
    trainer = create_trainer(
        model, make_optimizer("sam", model), forward, accumulation_steps=2, options=UpdateOptions(closure=True)
    )
    state = trainer.run(cuts.cut(cuts.samples(), [3, 1]), max_epochs=2)
    assert len({*drawn}) == len(drawn) == 8
    assert counts == [0, 1, 0, 1, 2, 3, 2, 3]
    assert (places, state.micro_batch_in_group) == ([0, 1] * 4, None)


def test_replay_leaves_the_draws_of_the_optimizer() -> None:
    """An optimizer that draws directions in its step, as AdaHessian does, draws others in each update."""
    drawn: list[tuple[str, float]] = []

    class Drawing(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(1.5)
            drawn.append(("step", float(torch.rand(()))))
            closure()
            drawn.append(("step", float(torch.rand(()))))

    def forward(model: nn.Module, batch: Any) -> Any:
        drawn.append(("forward", float(torch.rand(()))))
        return cuts.forward(model, batch)

    model = network()
    options = UpdateOptions(closure="replay")
    trainer = create_trainer(model, Drawing(model.parameters(), lr=0.1), forward, options=options)
    torch.manual_seed(1)
    trainer.run(cuts.cut(cuts.samples(), [3, 1]))
    torch.manual_seed(1)
    first, *others = (float(torch.rand(())) for _ in range(6))
    assert [number for _, number in drawn] == [first, others[0], first, *others[1:4], others[2], others[4]]


class Packed(nn.Module):
    """A linear layer; with `holds`, an attribute holds the memory in which its weight lies, with gaps."""

    def __init__(self, *, holds: bool) -> None:
        super().__init__()
        memory = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
        self.weight = nn.Parameter(torch.empty(0))
        self.weight.data = memory[:, 0]
        self.memory = memory if holds else None

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_replay_keeps_the_step_of_a_parameter_whose_memory_an_attribute_holds_too() -> None:
    """The attribute is put back for the evaluation, and what the optimizer has made of the parameter stays."""
    found = []
    for holds in (False, True):
        model = Packed(holds=holds)

        def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
            return ForwardOutput(model(x).square().sum(), len(x))

        optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3)
        trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(closure="replay"))
        trainer.run([torch.eye(6, dtype=torch.float64) * (1 + n) for n in range(4)], max_epochs=1)
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("closure", [True, "replay"])
def test_a_parameter_without_gradients_moves_along_the_history(closure: Any) -> None:
    """LBFGS moves it where it was used in an update before; forward has not changed it. Compared with torch's own loop."""
    models = [network(), network()]
    inputs = [torch.eye(3, dtype=torch.float64) * (1 + n) for n in range(4)]
    for model in models:
        model.register_parameter("factor", nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64)))

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        result = model(x)
        return ((result if x[0, 0] == 3.0 else result * model.factor) - 1.0).square().sum()

    def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
        return ForwardOutput(loss_of(model, x), 1)

    optimizers = [LBFGS(model.parameters(), lr=0.1, max_iter=3) for model in models]
    create_trainer(models[0], optimizers[0], forward, options=UpdateOptions(closure=closure)).run(inputs, max_epochs=1)
    for x in inputs:

        def again(x: Tensor = x) -> Tensor:
            optimizers[1].zero_grad()
            loss = loss_of(models[1], x)
            loss.backward()
            return loss

        optimizers[1].step(again)
    for found, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_what_fires_and_counts() -> None:
    """Events of micro-batches fire in the first evaluation, GRADIENTS_REDUCED in each, those of the update once."""
    model = network()
    optimizer = make_optimizer("sam", model)
    trainer = create_trainer(model, optimizer, cuts.forward, accumulation_steps=2, options=UpdateOptions(closure=True))
    fired: list[str] = []
    for event in (*TrainEvents, Events.ITERATION_COMPLETED):
        trainer.add_event_handler(event, lambda _, name=event.name: fired.append(name))
    state = trainer.run(cuts.cut(cuts.samples(), [3, 2]))
    micro_batch = ["MICRO_BATCH_STARTED", "FORWARD_COMPLETED", "BACKWARD_COMPLETED"]
    assert fired == [
        *micro_batch * 2,
        *("GRADIENTS_REDUCED", "GRADIENTS_READY", "GRADIENTS_REDUCED", "STEP_COMPLETED", "ITERATION_COMPLETED"),
    ]
    assert (state.num_steps, state.num_micro_batches, state.iteration) == (1, 2, 1)
    assert state.update_output is not None
    assert state.update_output.num_evaluations == 2


def test_changes_by_handlers_count_in_each_evaluation() -> None:
    """Gradients that GRADIENTS_REDUCED clamps are clamped in the second pass too."""

    def clamp(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.01, 0.01)

    model, theirs = network(), network()
    trainer = create_trainer(model, make_optimizer("sam", model), cuts.forward, options=UpdateOptions(closure=True))
    trainer.add_event_handler(TrainEvents.GRADIENTS_REDUCED, lambda: clamp(model))
    batch = cuts.cut(cuts.samples(), [4])
    trainer.run(batch)
    optimizer = make_optimizer("sam", theirs)

    def closure() -> None:
        optimizer.zero_grad()
        loss, weight, *_ = cuts.forward(theirs, batch[0])
        (loss / weight).backward()
        clamp(theirs)

    closure()
    optimizer.step(closure)  # type: ignore[arg-type]
    assert flat(model) == pytest.approx(flat(theirs), rel=1e-12)


def test_a_sum_is_minimised_as_a_sum() -> None:
    """With `normalize=False` the closure returns Σloss, as its gradients are those of the sum."""
    returned: list[float] = []

    class Looking(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            returned.append(float(closure()))
            super().step()

    model = network()
    options = UpdateOptions(closure=True, normalize=False)
    record = create_trainer(model, Looking(model.parameters(), lr=0.01), cuts.forward, options=options).update(
        cuts.cut(cuts.samples(), [4])
    )
    assert returned == [pytest.approx(record.loss * record.sample_size)]
    assert record.num_evaluations == 1


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_second_derivatives() -> None:
    """With `create_graph` the closure leaves gradients that can be differentiated, of the mean: AdaHessian's Hv."""
    products: list[Tensor] = []

    class Hessian(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            closure()
            (weight,) = (p for group in self.param_groups for p in group["params"] if p.dim() == 2)
            with torch.enable_grad():
                products.append(torch.autograd.grad(weight.grad.sum(), weight)[0])

    model = cuts.linear()
    options = UpdateOptions(closure=True, create_graph=True)
    trainer = create_trainer(model, Hessian(model.parameters(), lr=0.1), cuts.forward, accumulation_steps=2, options=options)
    batches = cuts.cut(cuts.samples(), [3, 4])
    trainer.run(batches)
    x, _, w = cuts.cut(cuts.samples(), [7])[0]
    expected = 2 * (w[:, None, None] * x[:, :, None] * x[:, None, :]).sum(0).sum(0) / w.sum()
    assert torch.allclose(products[0][0], expected, rtol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


class _ThenBad:
    """A forward that is not finite from its second call on."""

    def __init__(self) -> None:
        self.calls, self.bad = 0, True

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        output = cuts.forward(model, batch)
        return output._replace(loss=output.loss * math.inf) if self.bad and self.calls > 1 else output


@pytest.mark.parametrize("kind", ["sam", "lbfgs"])
@pytest.mark.parametrize("scaled", [True, False], ids=["overflow", "nonfinite"])
def test_a_step_that_turns_out_not_finite_leaves_no_trace(kind: str, scaled: bool) -> None:
    """Parameters, moments, also those of the optimizer inside, and options are put back; the run continues."""
    forward, model = _ThenBad(), network()
    optimizer = make_optimizer(kind, model)
    scaling = TorchLossScaling(init_scale=4.0) if scaled else None
    options = UpdateOptions(closure=True, on_nonfinite="skip")
    trainer = create_trainer(model, optimizer, forward, loss_scaling=scaling, options=options)

    def state() -> Any:
        inner = optimizer.base_optimizer.state_dict() if isinstance(optimizer, Sharpness) else None
        return bit_by_bit([model.state_dict(), optimizer.state_dict(), inner])

    batches = cuts.cut(cuts.samples(), [3, 2])
    forward.bad = False
    trainer.update(batches[:1])
    before, forward.bad = state(), True
    forward.calls = 0
    record = trainer.update(batches[1:])
    assert (record.applied, record.skipped_reason) == (False, "overflow" if scaled else "nonfinite")
    assert (record.num_evaluations, math.isfinite(record.loss)) == (2, False)
    assert state() == before
    assert trainer.state.num_skipped == 1
    forward.bad = False
    assert trainer.update(batches[1:]).applied
    assert state() != before


@pytest.mark.parametrize("where", ["evaluation", "parameters", "exception"])
def test_an_error_in_the_step_puts_everything_back(where: str) -> None:
    """Whether an evaluation is not finite, or the parameters after the step, or the optimizer fails.

    Parameters, and the options and the state of the optimizer.
    """

    class Failing(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["lr"] *= 0.5
            self.state[self.param_groups[0]["params"][0]]["steps"] = 1
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(2.0)
            closure()
            if where == "exception":
                raise KeyError("of the optimizer's own")
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(math.inf)

    forward, model = _ThenBad(), network()
    forward.bad = where == "evaluation"
    before = flat(model)
    optimizer = Failing(model.parameters(), lr=0.1, momentum=0.9)
    trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(closure=True))
    with pytest.raises(KeyError if where == "exception" else NonFiniteError) as raised:
        trainer.run(cuts.cut(cuts.samples(), [3]))
    says = [note for note in getattr(raised.value, "__notes__", []) if "the optimizer's step had made 2 evaluations" in note]
    assert len(says) == (where != "exception")
    assert flat(model) == before
    assert (optimizer.param_groups[0]["lr"], optimizer.state) == (0.1, {})
    assert (trainer.state.iteration, trainer.state.num_steps) == (0, 0)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("what", ["rate", "gradients"])
def test_a_handler_that_makes_the_step_impossible_is_told_before_it(what: str) -> None:
    """By a rate that is not finite, or by gradients that it has dropped; forward is not run again."""
    forwards: list[int] = []

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        forwards.append(1)
        return cuts.forward(model, micro_batch)

    model = network()
    before, optimizer = flat(model), LBFGS(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, forward, options=UpdateOptions(closure=True))

    @trainer.on(TrainEvents.GRADIENTS_READY)
    def disturb() -> None:
        if what == "rate":
            optimizer.param_groups[0]["lr"] = math.nan
        else:
            optimizer.zero_grad()

    told = "must have finite learning rates" if what == "rate" else "GRADIENTS_READY has dropped all gradients"
    with pytest.raises(TrainingError, match=told):
        trainer.run(cuts.cut(cuts.samples(), [3]))
    assert flat(model) == before
    assert len(forwards) == 1


@pytest.mark.parametrize("kind", ["sam", "lbfgs"])
def test_a_forward_that_writes_into_its_micro_batch_is_refused(kind: str) -> None:
    """Each evaluation would find what the one before has written; parameters are what they were."""

    def forward(model: nn.Module, micro_batch: Any) -> ForwardOutput:
        x, *rest = micro_batch
        return cuts.forward(model, (x.mul_(0.5), *rest))

    model = network()
    before = flat(model)
    trainer = create_trainer(model, make_optimizer(kind, model), forward, options=UpdateOptions(closure=True))
    with pytest.raises(ValueError, match="forward has written into its tensors"):
        trainer.run([tuple(map(torch.clone, micro_batch)) for micro_batch in cuts.cut(cuts.samples(), [3])])
    assert flat(model) == before


def test_a_parameter_that_was_not_finite_before_does_not_undo_the_step() -> None:
    """Such as a mask that the loss does not depend on; but one more does."""
    model = network()
    model.register_parameter("mask", nn.Parameter(torch.full((2,), -math.inf).double()))
    optimizer = SGD(model.parameters(), lr=0.1)
    trainer = create_trainer(model, optimizer, cuts.forward, options=UpdateOptions(closure=True, on_nonfinite="skip"))
    batches = cuts.cut(cuts.samples(), [3, 2])
    assert trainer.update(batches[:1]).applied
    before = bit_by_bit(model.state_dict())

    def spoil(*_: Any) -> None:
        model[0].bias.data.fill_(math.nan)

    handle = optimizer.register_step_post_hook(spoil)
    assert not trainer.update(batches[1:]).applied
    handle.remove()
    assert bit_by_bit(model.state_dict()) == before


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_frozen_weights_of_one_byte_may_be_in_the_optimizer(dtype: torch.dtype) -> None:
    """Torch does not tell whether such floats are finite, and no step moves them."""
    model = network()
    model[0].register_parameter("frozen", nn.Parameter(torch.ones(2).to(dtype), requires_grad=False))
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.1), cuts.forward, options=UpdateOptions(closure=True))
    assert trainer.update(cuts.cut(cuts.samples(), [3])).applied


class Around(Optimizer):
    """Leaves all to the optimizer inside."""

    def __init__(self, inside: Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside, self.param_groups = inside, inside.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside.step(closure)


class AroundList(Around):
    """Has it in a list, and the one inside refers to it."""

    def __init__(self, inside: Optimizer) -> None:
        super().__init__(inside)
        del self.inside
        self.all = [inside]
        inside.outer = self  # type: ignore[attr-defined]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.all[0].step(closure)


@pytest.mark.parametrize("around", [None, Around, AroundList])
def test_the_optimizer_inside_is_put_back_too(around: Any) -> None:
    """If its step is what leaves parameters that are not finite; also where it is inside of one that is inside."""
    model = network()
    optimizer = Sharpness(model.parameters(), lr=0.1, momentum=0.9)
    outer = around(optimizer) if around else optimizer
    trainer = create_trainer(model, outer, cuts.forward, options=UpdateOptions(closure=True, on_nonfinite="skip"))
    batches = cuts.cut(cuts.samples(), [3, 2])
    trainer.update(batches[:1])

    def state() -> Any:
        return bit_by_bit([model.state_dict(), optimizer.state_dict(), optimizer.base_optimizer.state_dict()])

    before = state()

    def spoil(*_: Any) -> None:
        next(model.parameters()).data.mul_(math.inf)

    handle = optimizer.base_optimizer.register_step_post_hook(spoil)
    record = trainer.update(batches[1:])
    handle.remove()
    assert (record.applied, math.isnan(record.grad_norm)) == (False, True)
    assert state() == before


def rank_that_fails_in_the_second_pass() -> tuple[Any, ...]:
    """Rank 1 alone has a loss that is not finite, in the second pass alone."""
    forward, model = _ThenBad(), network()
    forward.bad = idist.get_rank() == 1
    trainer = create_trainer(
        DistributedDataParallel(model),
        make_optimizer("sam", model),
        forward,
        options=UpdateOptions(closure=True, on_nonfinite="skip"),
    )
    before = flat(model)
    record = trainer.update(cuts.shard([[3], [2]]))
    return record.applied, record.num_evaluations, flat(model) == before


@pytest.mark.slow
def test_all_ranks_put_the_step_back() -> None:
    """If the evaluation of one of them is not finite."""
    assert run_ranks(rank_that_fails_in_the_second_pass) == [(False, 2, True)] * 2


def test_gradients_that_the_optimizer_has_cleared_are_evaluated_again() -> None:
    """The first call is answered without an evaluation only if nothing was touched, by whatever way."""
    touches: dict[str, Any] = {
        "nothing": lambda p: None,
        "cleared": lambda p: setattr(p, "grad", None),
        "data": lambda p: p.grad.data.zero_(),
        "negated": lambda p: p.grad.neg_(),
        "replaced": lambda p: setattr(p, "grad", -p.grad),
        "moved": lambda p: p.data.add_(0.0).mul_(1.0 + 2.0**-50),
    }
    numbers = {}
    for name, touch in touches.items():

        class Touching(SGD):
            def step(self, closure: Any = None, touch: Any = touch) -> None:  # type: ignore[override]
                touch(self.param_groups[0]["params"][0])
                closure()
                assert all(float(p.grad.norm()) > 0 for p in self.param_groups[0]["params"])

        model = network()
        trainer = create_trainer(model, Touching(model.parameters(), lr=0.1), cuts.forward, options=UpdateOptions(closure=True))
        numbers[name] = trainer.update(cuts.cut(cuts.samples(), [3])).num_evaluations
    assert numbers == {"nothing": 1, "cleared": 2, "data": 2, "negated": 2, "replaced": 2, "moved": 2}


@pytest.mark.slow
def test_full_batch_lbfgs_fits_sine_waves() -> None:
    """As torch's example of time sequence prediction: an LSTM in double, LBFGS with 20 iterations; bitwise as by hand."""
    waves = torch.sin((torch.arange(24.0).double()[None] + torch.arange(3.0).double()[:, None] * 4) / 3)
    x, y = waves[:, :-1, None], waves[:, 1:, None]

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.lstm, self.last = nn.LSTM(1, 8, batch_first=True).double(), nn.Linear(8, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.lstm(x)[0])
            return out

    model, theirs = Sequence(), Sequence()
    optimizer, other = (LBFGS(one.parameters(), lr=0.8) for one in (model, theirs))
    trainer = create_trainer(model, optimizer, lambda m, b: mse_loss(m(b[0]), b[1]), options=UpdateOptions(closure=True))
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda t: losses.append(t.state.output.loss))
    trainer.run([(x, y)], max_epochs=3)
    expected = []

    def closure() -> Tensor:
        other.zero_grad()
        loss = mse_loss(theirs(x), y)
        loss.backward()
        return loss.detach()

    for _ in range(3):
        expected.append(float(other.step(closure)))  # type: ignore[arg-type]
    assert losses == expected
    assert flat(model) == flat(theirs)
    assert losses[-1] < 0.2 * losses[0]


def saved_run(directory: Path, updates: int, kind: str) -> Any:
    model = network()
    optimizer = make_optimizer(kind, model)
    trainer = create_trainer(model, optimizer, cuts.forward, options=UpdateOptions(closure=True))
    Checkpoint(directory, every=2).attach(trainer)
    trainer.run(cuts.cut(cuts.samples(), [2, 3, 4]), max_iters=updates)
    inner = [optimizer.base_optimizer.state_dict()] if isinstance(optimizer, Sharpness) else []
    if inner:
        assert optimizer.base_optimizer.param_groups is optimizer.param_groups  # type: ignore[attr-defined]
    return bit_by_bit([model.state_dict(), optimizer.state_dict(), inner])


@pytest.mark.parametrize("kind", only(["sam"], ["sam", "lbfgs", "wolfe"]))
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    """With the history of LBFGS, and the momentum of the optimizer inside SAM, which its own `state_dict` does not have."""
    saved_run(tmp_path / "a", 4, kind)
    assert saved_run(tmp_path / "a", 7, kind) == saved_run(tmp_path / "b", 7, kind)


def test_an_optimizer_that_needs_none_runs_too() -> None:
    """AdamW evaluates the loss at the parameters that it starts from, which the update has done."""
    ends = []
    for closure in (True, False):
        model = network()
        trainer = create_trainer(
            model, AdamW(model.parameters(), lr=0.02), cuts.forward, options=UpdateOptions(closure=closure)
        )
        state = trainer.run(cuts.cut(cuts.samples(), [2, 3]))
        assert state.update_output is not None
        assert state.update_output.num_evaluations == 1
        ends.append(flat(model))
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)


def sharded_message() -> str:
    model = fully_shard(network(torch.float32), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="closure must be False") as caught:
        create_trainer(model, make_optimizer("sam", model), cuts.forward, options=UpdateOptions(closure=True))
    return str(caught.value)


@pytest.mark.slow
def test_a_sharded_model_is_refused_in_one_line() -> None:
    """Before anything is computed."""
    assert all("use DistributedDataParallel" in message and "\n" not in message for message in run_ranks(sharded_message))


class Ignoring(SGD):
    """Does not call its closure."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        super().step()


FUSED: dict[str, Any] = {
    "ignoring": lambda p: Ignoring(p, lr=0.5, fused=True),
    "sgd": lambda p: SGD(p, lr=0.5, fused=True),
    "momentum": lambda p: SGD(p, lr=0.5, momentum=0.5, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.1, fused=True),
    "sam": lambda p: Sharpness(p, lr=0.5, fused=True),
}


def stepped_with_fused_kernel(kind: str, what: str, *, closure: bool, fused: bool = True) -> list[Tensor]:
    """Parameters after two updates in which a fused kernel would go wrong."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 4))
    if what == "bfloat16":
        model = model.bfloat16()
    elif what == "gaps":
        with torch.no_grad():
            wide = torch.zeros(12, 32)
            wide[:, ::2] = model[0].weight
            model[0].weight = nn.Parameter(wide[:, ::2])
    optimizer = FUSED[kind](model.parameters())
    if not fused:
        optimizer.param_groups[0]["fused"] = None
    trainer = create_trainer(
        model, optimizer, lambda m, x: m(x).float().square().mean(), options=UpdateOptions(closure=closure)
    )

    @trainer.on(TrainEvents.GRADIENTS_REDUCED)
    def transpose() -> None:
        for parameter in model.parameters():
            if what == "strides" and parameter.dim() == 2 and parameter.grad is not None:
                parameter.grad = parameter.grad.t().contiguous().t()

    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(2), dtype=next(model.parameters()).dtype)
    trainer.run([x, x * 0.5], max_epochs=1)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("what", ["bfloat16", "strides", "gaps"])
@pytest.mark.parametrize("kind", FUSED)
def test_what_a_fused_kernel_gets_wrong(kind: str, what: str) -> None:
    """Its step is protected as one without a closure is: kernels are tried, strides are made equal, gaps are left alone."""
    found = stepped_with_fused_kernel(kind, what, closure=True)
    expected = stepped_with_fused_kernel(kind, what, closure=kind == "sam", fused=False)
    tolerance = 2.0**-7 if what == "bfloat16" else 1e-5
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
