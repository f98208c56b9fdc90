"""Frozen parameters are neither in the norm nor in the step, however gradients cross the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from bits import bit_by_bit
from ignite_train import NoGradientError, Trainer, UpdateOptions, create_trainer
from ignite_train.handlers import Checkpoint, Freeze
from mistakes import Mistake, assert_one_line
from ranks import run_ranks

DATA = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(12)]
UNTIL, MAX_NORM = 2, 0.5
SETTINGS: dict[str, float] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}


def net(width: int = 4) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 2.0).square().mean()


def make(model: nn.Module, parameters: Any = None, **options: Any) -> Trainer:
    optimizer = torch.optim.SGD(parameters or model.parameters(), **SETTINGS)
    return create_trainer(model, optimizer, mean_loss, max_grad_norm=MAX_NORM, options=UpdateOptions(**options))


def by_hand(width: int = 4, ranks: int = 1, thawed: Callable[[int], bool] = lambda steps: steps >= UNTIL) -> Any:
    """A plain loop of torch: the frozen gradients are removed before the norm, and the optimizer leaves out what has none."""
    model, norms = net(width), []
    optimizer = torch.optim.SGD(model.parameters(), **SETTINGS)
    for step in range(len(DATA) // ranks):
        optimizer.zero_grad()
        mean_loss(model, torch.cat(DATA[ranks * step : ranks * step + ranks])).backward()
        if not thawed(step):
            model[0].zero_grad()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return {name: value.tolist() for name, value in model.state_dict().items()}, norms


def run(trainer: Trainer, data: Any) -> list[float]:
    norms: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: norms.append(trainer.state.update_output.grad_norm))  # type: ignore[union-attr]
    trainer.run(data, max_epochs=1)
    return norms


@pytest.mark.parametrize("until", [UNTIL, None, lambda state: state.iteration % 3 == 0], ids=["steps", "always", "function"])
def test_against_a_plain_loop(until: Any) -> None:
    """Weights and norms: no decay, no momentum and no share of the norm while frozen, and again if the function says so."""
    model = net()
    trainer = make(model)
    Freeze(model[0], until=until).attach(trainer)
    norms = run(trainer, DATA)
    thawed = {None: lambda step: False, UNTIL: lambda step: step >= UNTIL}.get(until, lambda step: (step + 1) % 3 == 0)
    weights, expected = by_hand(thawed=thawed)
    assert norms == pytest.approx(expected, rel=1e-12)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.tolist(), weights[name], rtol=1e-12, atol=1e-14)


def optimizer_with_closure(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "lbfgs":
        return torch.optim.LBFGS(model.parameters(), lr=0.02, max_iter=3)
    return TwoEvaluations(model.parameters(), lr=0.05, momentum=0.9)


class TwoEvaluations(torch.optim.SGD):
    """Steps along the gradient where a step along the gradient leads, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        evaluate = torch.enable_grad()(closure)
        evaluate()
        moves = {p: 0.1 * p.grad for group in self.param_groups for p in group["params"] if p.grad is not None}
        for parameter, move in moves.items():
            parameter.add_(move)
        loss = evaluate()
        for parameter, move in moves.items():
            parameter.sub_(move)
        super().step()
        return loss


def by_hand_with_closure(kind: str) -> dict[str, Any]:
    """A plain loop: each evaluation removes the frozen gradients, clips and leaves the rest to the optimizer."""
    model = net()
    optimizer = optimizer_with_closure(kind, model)
    for step in range(len(DATA) // 2):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = mean_loss(model, torch.cat(DATA[2 * step : 2 * step + 2]))
            loss.backward()  # type: ignore[no-untyped-call]
            if step < UNTIL:
                model[0].zero_grad()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            return loss.detach()

        optimizer.step(closure)  # type: ignore[arg-type]
    return model.state_dict()


@pytest.mark.parametrize("closure", [True, "replay"])
@pytest.mark.parametrize("kind", ["lbfgs", "two"])
def test_an_optimizer_that_evaluates_the_loss_again_moves_nothing_frozen(kind: str, closure: Any) -> None:
    """The weights are those of a plain loop, which drops the frozen gradients in each evaluation; then all of them train."""
    model = net()
    options = UpdateOptions(closure=closure)
    arguments: Any = {"max_grad_norm": MAX_NORM, "accumulation_steps": 2, "options": options}
    trainer = create_trainer(model, optimizer_with_closure(kind, model), mean_loss, **arguments)
    Freeze(model[0], until=UNTIL).attach(trainer)
    before = bit_by_bit(model[0].state_dict())
    trainer.run(DATA, max_iters=UNTIL)
    assert bit_by_bit(model[0].state_dict()) == before
    trainer.run(DATA, max_epochs=1)
    for name, value in by_hand_with_closure(kind).items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-7, atol=1e-10)


def test_the_optimizer_of_the_frozen_part_may_be_another() -> None:
    """Of several optimizers one finds nothing to step while its parameters are frozen."""
    model = net()
    optimizers = [torch.optim.SGD(part.parameters(), **SETTINGS) for part in (model[0], model[2])]
    trainer = create_trainer(model, optimizers, mean_loss, max_grad_norm=MAX_NORM)
    Freeze(model[0], until=UNTIL).attach(trainer)
    norms = run(trainer, DATA)
    weights, expected = by_hand()
    assert norms == pytest.approx(expected, rel=1e-12)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.tolist(), weights[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("limit", [MAX_NORM, {"first": MAX_NORM, "last": MAX_NORM}], ids=["one limit", "a limit each"])
def test_all_that_one_of_two_optimizers_steps(limit: Any) -> None:
    """The other one trains as it does alone, and as one optimizer over all would train it; then both train."""
    model = net()
    optimizers = {name: torch.optim.SGD(model[index].parameters(), **SETTINGS) for name, index in (("first", 0), ("last", 2))}
    trainer = create_trainer(model, optimizers, mean_loss, max_grad_norm=limit)
    Freeze(model[0], until=UNTIL).attach(trainer)
    before = bit_by_bit(model[0].state_dict())
    frozen = run(trainer, DATA[:UNTIL])
    assert bit_by_bit(model[0].state_dict()) == before
    assert frozen == pytest.approx(by_hand()[1][:UNTIL], rel=1e-12)
    trainer.run(DATA, max_epochs=2)
    assert bit_by_bit(model[0].state_dict()) != before


@pytest.mark.parametrize("joins", [False, True], ids=["requires-grad", "add-param-group"])
def test_what_is_trained_later_is_frozen_too(joins: bool) -> None:
    """A part of the module is thawed in the run, by the flag alone or by a new group, while the module is frozen."""
    model = nn.Sequential(net(), nn.Linear(1, 1).double().requires_grad_(False))
    trainer = make(model, [one for one in model.parameters() if one.requires_grad] if joins else None)
    Freeze([*model[0][0].parameters(), *model[1].parameters()], until=4).attach(trainer)
    before, moved = model[1].weight.clone(), []

    @trainer.on(Events.ITERATION_STARTED(once=2))
    def thaw() -> None:
        model.requires_grad_()
        if joins:
            trainer.optimizers["optimizer"].add_param_group({"params": [*model[1].parameters()]})

    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: moved.append(not torch.equal(model[1].weight, before)))
    trainer.run(DATA[:6])
    assert moved == [False] * 4 + [True] * 2


def test_the_gradients_of_another_trainer_are_left_alone() -> None:
    """Of parameters in the module that this trainer does not step: two trainers may have a part each."""
    model, other = net(), nn.Linear(3, 1).double()
    trainer = make(model)
    other.weight.grad = torch.ones_like(other.weight)
    Freeze([*model[0].parameters(), *other.parameters()]).attach(trainer)
    trainer.run(DATA[:2])
    assert torch.equal(other.weight.grad, torch.ones_like(other.weight))
    assert model[0].weight.grad is None


def test_what_is_not_finite_in_a_frozen_module_counts_nothing() -> None:
    """An infinite gradient of a frozen parameter neither ends the run nor skips an update."""
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient * math.inf)
    trainer = make(model)
    Freeze([model[0].weight]).attach(trainer)
    before = bit_by_bit(model[0].weight)
    assert trainer.run(DATA).num_steps == len(DATA)
    assert bit_by_bit(model[0].weight) == before


def test_skipped_updates_do_not_count() -> None:
    """`until` counts steps."""
    model = net()
    trainer = make(model, on_nonfinite="skip")
    freeze = Freeze(model[0], until=UNTIL)
    freeze.attach(trainer)
    frozen: list[bool] = []
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda: frozen.append(freeze.is_frozen(trainer.state)))
    trainer.run([DATA[0], DATA[1] * math.nan, *DATA[2:4]])
    assert frozen == [True, True, True, False]


def _wrapped(kind: str) -> tuple[nn.Module, nn.Module, Any]:
    width = 4000 if kind == "ddp" else 4  # a small one would be reduced beside the statistics
    model = net(width)
    if kind == "fsdp":
        fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model, model[0], {}
    if kind == "explicit":
        return model, model[0], {"reduction": "explicit"}
    return DistributedDataParallel(model), model[0], {}


def _on_this_rank(kind: str) -> Any:
    model, first, options = _wrapped(kind)
    trainer = make(model, **options)
    Freeze(first, until=UNTIL).attach(trainer)
    norms = run(trainer, DATA[idist.get_rank() :: 2])
    model = model.module if isinstance(model, DistributedDataParallel) else model
    state = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}
    return {name: value.tolist() for name, value in state.items()}, norms


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "small-ddp", "explicit", "fsdp"])
def test_two_ranks(kind: str) -> None:
    """The update of one process with all data, on both ranks, for each way in which gradients cross them."""
    weights, expected = by_hand(4000 if kind == "ddp" else 4, ranks=2)
    for found, norms in run_ranks(_on_this_rank, kind):
        assert norms == pytest.approx(expected, rel=1e-10)
        for name, value in found.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(weights[name]), rtol=1e-6, atol=1e-9)


def _with_closure_on_this_rank(kind: str, way: str) -> dict[str, Any]:
    model = net()
    wrapped = DistributedDataParallel(model) if way == "ddp" else model
    options = UpdateOptions(closure=True, reduction="explicit" if way == "explicit" else "auto")
    optimizer = optimizer_with_closure(kind, model)
    trainer = create_trainer(wrapped, optimizer, mean_loss, max_grad_norm=MAX_NORM, options=options)
    Freeze(model[0], until=UNTIL).attach(trainer)
    trainer.run(DATA[idist.get_rank() :: 2], max_epochs=1)
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "explicit"])
@pytest.mark.parametrize("kind", ["lbfgs", "two"])
def test_two_ranks_that_evaluate_the_loss_again(kind: str, way: str) -> None:
    """Both end with the weights of the plain loop over all data."""
    for found in run_ranks(_with_closure_on_this_rank, kind, way):
        for name, value in by_hand_with_closure(kind).items():
            torch.testing.assert_close(torch.tensor(found[name]), value.float(), rtol=1e-6, atol=1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("broken_at", [2, 3, 4], ids=["frozen", "at-the-thaw", "thawed"])
def test_resumed_it_freezes_the_same(broken_at: int, tmp_path: Path) -> None:
    """The same bits as a run that did not break off, in another process."""

    def job(directory: Path | None) -> tuple[Trainer, nn.Module]:
        model = net()
        trainer = make(model)
        if directory is not None:
            Checkpoint(directory, every=1, asynchronous=False).attach(trainer)
        Freeze(model[0], until=UNTIL).attach(trainer)
        return trainer, model

    whole, expected = job(None)
    whole.run(DATA[:6])
    trainer, _ = job(tmp_path)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=broken_at), lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(DATA[:6])
    trainer, model = job(tmp_path)
    trainer.run(DATA[:6], resume="must")
    assert bit_by_bit(model.state_dict()) == bit_by_bit(expected.state_dict())


def freeze_all_in_two() -> None:
    model = net()
    trainer = make(model)
    for part in (model[0], model[2]):
        Freeze(part).attach(trainer)
    trainer.run(DATA)


MISTAKES: dict[str, Mistake] = {
    "zero": (ValueError, "until must be at least 1", lambda: Freeze(net(), until=0)),
    "text": (TypeError, "module must be", lambda: Freeze("encoder")),  # type: ignore[arg-type]
    "other": (ValueError, "module must have parameters that the optimizer trains", lambda: Freeze(net()).attach(make(net()))),
    "all": (
        ValueError,
        "module must leave something that trains",
        lambda: (m := net()) and Freeze(m).attach(make(m)),
    ),
    "all-in-two": (NoGradientError, "freeze fewer parameters", freeze_all_in_two),
}


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes(name: str) -> None:
    """Each is answered in one line."""
    assert_one_line(MISTAKES[name])
