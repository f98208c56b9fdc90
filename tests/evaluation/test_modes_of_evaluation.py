"""Modules that do something in `train()`: an evaluation calls it as a loop by hand does, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from ignite.engine import Events, create_supervised_evaluator
from ignite.metrics import MeanSquaredError
from torch import Tensor, nn
from torch.optim import SGD

from control_c import at_each_place, unlike
from ignite_train import ForwardOutput, Trainer, UpdateOptions, check_forward, create_evaluator, create_trainer
from ignite_train.evaluation import evaluator as evaluators
from ignite_train.handlers import ModelEMA, Validation
from ignite_train.model import modes
from ignite_train.model.check_forward import _modes as modes_of_check

DATA = [
    (torch.randn(6, 4, generator=seeded, dtype=torch.float64), torch.randn(6, 1, generator=seeded, dtype=torch.float64))
    for seeded in map(torch.Generator().manual_seed, range(4))
]


class Adapted(nn.Linear):
    """A frozen layer with a trained adapter, which is added to its weight in eval mode, as in loralib."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, dtype=torch.float64)
        self.a = nn.Parameter(torch.randn(2, inputs, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(outputs, 2, dtype=torch.float64))
        self.weight.requires_grad_(False)
        self.is_merged = False

    def train(self, mode: bool = True) -> Adapted:  # noqa: FBT002  # as torch's
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += (self.b @ self.a).detach() * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.is_merged else out + x @ self.a.T @ self.b.T


class Cached(nn.Linear):
    """It computes its weight once in eval mode, and forgets it in training mode, as layers of normalising flows do."""

    cache: Tensor | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, dtype=torch.float64)

    def train(self, mode: bool = True) -> Cached:  # noqa: FBT002  # as torch's
        if mode:
            self.cache = None
        return super().train(mode)  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return nn.functional.linear(x, self.weight * 2, self.bias)
        if self.cache is None:
            self.cache = self.weight.detach() * 2
        return nn.functional.linear(x, self.cache, self.bias)


def model_of(kind: Callable[[int, int], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(4, 5), nn.Tanh(), kind(5, 1))


def forward(model: nn.Module, batch: Any) -> ForwardOutput:
    return ForwardOutput((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))


def trained_by(model: nn.Module) -> Trainer:
    return create_trainer(model, optimizer_of(model), forward)


def optimizer_of(model: nn.Module) -> SGD:
    return SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.02)


def mean_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(forward(model, batch).loss.item() for batch in DATA) / sum(len(x) for x, _ in DATA)


def by_hand(model: nn.Module) -> list[float]:
    """The held-out loss after each of three epochs of a loop with `train()` and `eval()`."""
    optimizer, losses = optimizer_of(model), []
    for _ in range(3):
        model.train()
        for batch in DATA:
            optimizer.zero_grad()
            (forward(model, batch).loss / len(batch[0])).backward()
            optimizer.step()
        model.eval()
        losses.append(mean_loss(model))
    return losses


class ModeRequired(nn.Linear):
    """Its `train` has no default, which torch never needs: it hands the mode on to children."""

    def train(self, mode: bool) -> ModeRequired:  # type: ignore[override]  # as torch's
        return super().train(mode)  # type: ignore[return-value]


def test_a_mode_without_a_default_is_given_to_children() -> None:
    """After an evaluation they are in training mode again."""
    model = nn.Sequential(ModeRequired(4, 1).double())
    create_evaluator(model, forward).run(DATA)
    assert [module.training for module in model.modules()] == [True, True]


def test_a_train_of_a_module_itself_is_called() -> None:
    """Not only one of its class: an adapter may be put on one layer."""
    model, calls = nn.Sequential(nn.Linear(4, 1).double()), list[bool]()

    def train(self: nn.Module, mode: bool = True) -> nn.Module:  # noqa: FBT002  # as torch's
        calls.append(mode)
        return nn.Module.train(self, mode)

    model[0].train = MethodType(train, model[0])  # type: ignore[method-assign]
    create_evaluator(model, forward).run(DATA)
    assert calls == [False, True]


@pytest.mark.parametrize("kind", [Adapted, Cached])
def test_a_validated_training_is_the_loop_by_hand(kind: Callable[[int, int], nn.Module]) -> None:
    """An adapter is trained on, and a cache is of the weights of its epoch. The rehearsal evaluates too."""
    model, losses = model_of(kind), list[float]()
    trainer, evaluator = trained_by(model), create_evaluator(model, forward)
    Validation(evaluator, DATA).attach(trainer)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: losses.append(evaluator.state.metrics["loss"]))
    trainer.run(DATA, max_epochs=3)
    assert losses == pytest.approx(by_hand(model_of(kind)), rel=1e-9)


def test_what_is_computed_in_eval_mode_is_of_the_average() -> None:
    """The adapter of the average, not that of the weights, is added to the weight; after it the weights are as before."""
    model, ema = model_of(Adapted), ModelEMA(0.9)
    trainer, evaluator = trained_by(model), create_evaluator(model, forward)
    ema.attach(trainer)
    ema.use_in(evaluator)
    trainer.run(DATA, max_epochs=3)
    with ema.swapped_in():
        expected = mean_loss(model)  # nothing is added in training mode
    before = [parameter.clone() for parameter in model.parameters()]
    assert evaluator.run(DATA).metrics["loss"] == pytest.approx(expected, rel=1e-9)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


class AlwaysEval(nn.Sequential):
    """It stays in eval mode, with what is in it, as soon as somebody calls `train()`."""

    def train(self, mode: bool = True) -> AlwaysEval:  # noqa: ARG002, FBT002  # as torch's
        return super().train(False)


def shared() -> nn.Module:
    """A module in eval mode below two parents that train, in a model that does not."""
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Sequential(norm), nn.Sequential(nn.Identity(), norm)).eval()
    for parent in model:
        parent.training = True
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[1].eval()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "frozen": frozen,
    "shared": shared,
    "always eval": lambda: nn.Sequential(AlwaysEval(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Dropout()),
    "eval": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval(),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_module_is_in_its_own_mode_again(name: str) -> None:
    """Of a part that the user has put into another mode, of one with two parents, and of one with a `train()` of its own."""
    model = MODELS[name]()
    before = [module.training for module in model.modules()]
    evaluator, seen = create_evaluator(model, lambda model, x: model(x).square().mean()), list[bool]()
    evaluator.add_event_handler(Events.ITERATION_COMPLETED, lambda: seen.extend(one.training for one in model.modules()))
    evaluator.run([torch.ones(4, 3)])
    assert not any(seen)
    assert [module.training for module in model.modules()] == before


class WithoutArgument(nn.Sequential):
    """Its `train()` and `eval()` take no argument."""

    def train(self) -> WithoutArgument:  # type: ignore[override]
        return super().train(True)

    def eval(self) -> WithoutArgument:
        return super().train(False)


class Frozen(nn.Linear):
    """It is in eval mode from the beginning and refuses to leave it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False).training = False

    def train(self, mode: bool = True) -> Frozen:  # noqa: FBT002  # as torch's
        if mode:
            raise RuntimeError("frozen")
        return super().train(False)  # type: ignore[return-value]


@pytest.mark.parametrize("way", ["evaluator", "check_forward"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: WithoutArgument(nn.Linear(3, 3), nn.Dropout()),
        lambda: nn.Sequential(Frozen(3, 3), nn.Linear(3, 3)),
        lambda: nn.Sequential(torch.export.export(nn.Linear(3, 3), (torch.ones(4, 3),)).module(), nn.Linear(3, 3)),
    ],
    ids=["without argument", "frozen", "exported"],
)
def test_train_is_called_as_a_loop_by_hand_calls_it(make: Callable[[], nn.Module], way: str) -> None:
    """Of one that takes no argument, and not of one that stays in eval mode; an exported one cannot be evaluated by hand."""
    model = make()
    before = [module.training for module in model.modules()]
    if way == "check_forward":
        check_forward(model, lambda model, x: model(x).square().mean(), [torch.ones(4, 3)])
    else:
        can_eval = not isinstance(model, nn.Sequential) or not isinstance(model[0], torch.fx.GraphModule)
        with nullcontext() if can_eval else pytest.raises(NotImplementedError):
            create_evaluator(model, lambda model, x: model(x).square().mean()).run([torch.ones(4, 3)])
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("starts_in_training", [False, True])
def test_adapters_are_as_before_wherever_a_check_of_forward_is_broken_off(starts_in_training: bool) -> None:
    """A model that begins in eval mode has them in its weights afterwards."""

    def run(pressing: Callable[[], Any]) -> Any:
        model = model_of(Adapted).train(starts_in_training)
        error = None
        try:
            with pressing():
                check_forward(model, forward, DATA[:1])
        except KeyboardInterrupt as raised:
            error = raised
        found = [module.training for module in model.modules()], [model[0].is_merged, model[2].is_merged]
        del error
        return found

    places = at_each_place(run, modes_of_check, modes.modes_of, modes.set_modes, Adapted.train)
    assert unlike(places) == []
    assert places["nowhere"] == ([starts_in_training] * 4, [not starts_in_training] * 2)


def test_adapters_are_apart_again_wherever_an_evaluation_is_broken_off() -> None:
    """By an exception, and by Ctrl-C at each place of the functions that change modes."""

    def run(pressing: Callable[[], Any], in_evaluation: Callable[[], object] = lambda: None) -> Any:
        model = model_of(Adapted)
        evaluator = create_evaluator(model, forward)
        evaluator.add_event_handler(Events.ITERATION_COMPLETED, in_evaluation)
        error = None
        try:
            with pressing():
                evaluator.run(DATA)
        except (KeyboardInterrupt, ZeroDivisionError) as raised:  # a notebook keeps it, and with it the frames that were left
            error = raised
        found = [module.training for module in model.modules()], [model[0].is_merged, model[2].is_merged]
        del error
        return found

    places = at_each_place(run, evaluators.Evaluator._run_inside, modes.modes_of, modes.set_modes, Adapted.train)
    assert unlike(places) == []
    assert places["nowhere"] == run(nullcontext, lambda: 1 // 0) == ([True] * 4, [False] * 2)


def test_check_forward_calls_train_too() -> None:
    """A model that was evaluated before it has its adapters in its weights, where they would have no gradient."""
    model, seen = model_of(Adapted).eval(), set[tuple[bool, bool]]()

    def noting(model: Any, batch: Any) -> Any:
        seen.add((model[0].training, model[0].is_merged))
        return forward(model, batch)

    weights = [parameter.clone() for parameter in model.parameters()]
    assert check_forward(model, noting, DATA).is_exact
    assert (True, True) not in seen
    assert model[0].is_merged
    assert not model[0].training
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("train_mode", [True, False])
def test_the_evaluator_of_ignite_leaves_a_run_in_its_modes(caplog: pytest.LogCaptureFixture, *, train_mode: bool) -> None:
    """It leaves the model in eval mode, from which a trainer of Ignite takes all of it, a frozen BatchNorm too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    model[1].eval()
    seen: list[list[bool]] = []

    def forward(model: nn.Module, batch: Any) -> ForwardOutput:
        seen.append([module.training for module in model.modules()])
        return ForwardOutput((model(batch[0]) - batch[1]).square().sum(), len(batch[0]))

    options = UpdateOptions(train_mode=train_mode)
    trainer = create_trainer(model, SGD(model.parameters(), lr=0.01), forward, options=options)
    evaluator = create_supervised_evaluator(model, {"mse": MeanSquaredError()})
    Validation(evaluator, DATA, score="mse").attach(trainer)
    trainer.run(DATA, max_epochs=2)
    assert seen == [[True, True, False, True, True]] * len(seen) != []
    assert "eval mode" not in caplog.text
