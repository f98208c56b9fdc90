"""Optimizers inside optimizers, and optimizers whose state has a form of its own: both resume bitwise."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from bits import bit_by_bit
from ignite_train import ForwardOutput, Trainer, create_trainer
from ignite_train.checkpoint import saved_run
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.handlers import Checkpoint, LearningRateSchedule

X = torch.linspace(-1, 1, 96).reshape(12, 8).cos()
LOADER = [X[i : i + 3] for i in range(0, 12, 3)]


class Lookahead(Optimizer):
    """Slow weights of its own, over the fast ones that an optimizer inside it moves."""

    def __init__(self, parameters: Any, inner: Any = torch.optim.Adam) -> None:
        self.optimizer = inner(parameters, lr=0.05)
        super().__init__(self.optimizer.param_groups, {"lr": 0.05})
        self.calls = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("slow", parameter.clone())
        self.optimizer.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter]["slow"]
                parameter.copy_(slow.lerp_(parameter, 0.5))


class Sharing(Lookahead):
    """Groups and state are those of the optimizer inside."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


class OwnForm(Lookahead):
    """Its state has other keys than torch's, and parameters for keys, as that of some libraries."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups = self.optimizer.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {"slow_state": self.state, "base_optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = defaultdict(dict, state["slow_state"])
        self.optimizer.load_state_dict(state["base_optimizer"])


class InContainers(Optimizer):
    """Has others in a list, and in a dictionary in it; the state that it gives is torch's, without theirs."""

    def __init__(self, parameters: Any) -> None:
        first, second, *others = parameters
        self.parts = [torch.optim.Adam([first], lr=0.05), {"second": torch.optim.SGD([second], lr=0.05, momentum=0.9)}]
        super().__init__([first, second], {"lr": 0.05})
        if others:
            self.parts.append(torch.optim.Adam(others, lr=0.05))
            self.add_param_group({"params": others})

    def step(self) -> None:  # type: ignore[override]
        for one in self.parts:
            (one["second"] if isinstance(one, dict) else one).step()


class Twice(Lookahead):
    """Has one inside that has one inside."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lambda parameters, lr: Lookahead(parameters))


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput((model(x) - 1).square().sum(), len(x))


def train(directory: Path, limits: list[int], kind: Any, several: bool) -> Any:
    for seed, limit in enumerate(limits):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        first, second = ([*part.parameters()] for part in model)
        optimizer: Any = [kind(first), torch.optim.SGD(second, lr=0.01)] if several else kind([*first, *second])
        trainer = create_trainer(model, optimizer, forward)
        Checkpoint(directory, every=1, keep=9).attach(trainer)
        trainer.run(LOADER, max_iters=limit)
    return bit_by_bit(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("kind", [Lookahead, Sharing, OwnForm, Twice, InContainers])
def test_an_optimizer_inside_another_goes_on_bitwise(kind: Any, several: bool, tmp_path: Path) -> None:
    """Its moments are in the checkpoint, though the state of the outer one does not have them."""
    whole = train(tmp_path / "whole", [7], kind, several)
    assert train(tmp_path / "parts", [3, 7], kind, several) == whole


def test_an_optimizer_inside_one_of_the_user_goes_on_bitwise(tmp_path: Path) -> None:
    """One in `to_save`, which a handler steps."""

    def run(directory: Path, *limits: int) -> Any:
        for limit in limits:
            torch.manual_seed(0)
            model, other = nn.Linear(8, 2), nn.Linear(8, 2)
            optimizer = Twice([*other.parameters()])
            trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), forward)
            trainer.add_event_handler(Events.ITERATION_COMPLETED, partial(step, other, optimizer))
            Checkpoint(directory, every=1, to_save={"other": other, "its.optimizer": optimizer}).attach(trainer)
            trainer.run(LOADER, max_iters=limit)
        return bit_by_bit(other.state_dict())

    def step(other: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        (other(X) - 1).square().sum().backward()
        optimizer.step()

    assert run(tmp_path / "parts", 3, 7) == run(tmp_path / "whole", 7)


class SharingEachGroup(Lookahead):
    """Has a list of its own, of the groups of the optimizer inside: so torch's constructor makes it."""

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


class SharingTwice(Lookahead):
    """Shares groups and state with the one inside, which does so with another, and gives the state of that."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lambda parameters, lr: Sharing(parameters))
        self._share()

    def _share(self) -> None:
        self.innermost = [self.optimizer.optimizer]
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.innermost[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        inner = self.innermost[0]
        inner.load_state_dict(state)
        self.optimizer.param_groups, self.optimizer.state = inner.param_groups, inner.state
        self._share()


class Combined(SharingTwice):
    """Has others in a list, whose groups are its own."""

    def __init__(self, parameters: Any) -> None:
        weights, others = parameters[:2], parameters[2:]
        self.innermost = [torch.optim.SGD(weights, lr=0.05, momentum=0.9), torch.optim.Adam(others, lr=0.05)]
        Optimizer.__init__(self, [{"params": parameters}], {"lr": 0.05})
        self._share()

    def _share(self) -> None:
        self.param_groups = [group for one in self.innermost for group in one.param_groups]
        self.state = {}  # type: ignore[assignment]

    def step(self) -> None:  # type: ignore[override]
        for one in self.innermost:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {"all": [one.state_dict() for one in self.innermost]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one, own in zip(self.innermost, state["all"], strict=True):
            one.load_state_dict(own)
        self._share()


class Thawed(Combined):
    """Gives and takes the whole state in torch's form, and passes a group that is added on."""

    def __init__(self, parameters: Any) -> None:
        self.innermost = []
        Optimizer.__init__(self, parameters, {"lr": 0.05})
        self.innermost = [torch.optim.Adam(parameters, lr=0.05)]

    def add_param_group(self, group: Any) -> None:
        super().add_param_group(group)
        for one in self.innermost:
            one.add_param_group({"params": self.param_groups[-1]["params"]})

    def state_dict(self) -> dict[str, Any]:
        return {**Optimizer.state_dict(self), "state": self.innermost[0].state_dict()["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Optimizer.load_state_dict(self, {**state, "state": {}})
        (inner,) = self.innermost
        inner.load_state_dict({"state": state["state"], "param_groups": inner.state_dict()["param_groups"]})


def test_one_that_gives_the_state_of_those_in_its_list_gets_a_group_in_the_run(tmp_path: Path) -> None:
    """Those in the list need not be saved then; and a handler that adds the group adds it to them too."""

    def run(directory: Path, *limits: int) -> Any:
        for limit in limits:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            model[0].requires_grad_(False)
            optimizer = Thawed([*model[1].parameters()])
            trainer = create_trainer(model, optimizer, forward)
            trainer.add_event_handler(Events.EPOCH_STARTED(once=2), partial(thaw, model[0], optimizer))
            Checkpoint(directory, every=1).attach(trainer)
            trainer.run(LOADER, max_iters=limit)
        return bit_by_bit(model.state_dict())

    def thaw(layer: nn.Module, optimizer: Optimizer) -> None:
        layer.requires_grad_(True)
        optimizer.add_param_group({"params": [*layer.parameters()]})

    assert run(tmp_path / "parts", 6, 9) == run(tmp_path / "whole", 9)


@pytest.mark.parametrize("kind", [SharingEachGroup, Sharing, OwnForm, SharingTwice, Combined])
def test_a_schedule_reaches_the_optimizer_inside_after_resuming(kind: Any, tmp_path: Path) -> None:
    """It sets the rates in the groups of the outer optimizer, and the inner one shares these groups."""

    def run(directory: Path, *limits: int) -> Any:
        for limit in limits:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            optimizer = kind([*model.parameters()])
            trainer = create_trainer(model, optimizer, forward)
            LearningRateSchedule(ExponentialLR(optimizer, 0.7)).attach(trainer)
            Checkpoint(directory, every=1).attach(trainer)
            trainer.run(LOADER, max_iters=limit)
        inside = vars(optimizer).get("innermost", [vars(optimizer).get("optimizer")])[0]
        assert optimizer.param_groups[0] is inside.param_groups[0]
        return bit_by_bit(model.state_dict())

    assert run(tmp_path / "parts", 3, 7) == run(tmp_path / "whole", 7)


@pytest.mark.parametrize("kind", [Combined, InContainers])
def test_a_checkpoint_without_what_is_in_a_list(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints had no optimizers in lists before: they are enough where the outer one gives the state of these."""
    with monkeypatch.context() as before:
        before.setattr(saved_run, "inner_optimizers", lambda _, **_options: {})
        train(tmp_path / "parts", [3], kind, several=False)
    whole, parts = train(tmp_path / "whole", [7], kind, several=False), train(tmp_path / "parts", [7], kind, several=False)
    told = "no state for it: optimizer.parts-0, optimizer.parts-2, optimizer.parts-1-0" in caplog.text
    assert (parts == whole, told) == ((False, True) if kind is InContainers else (True, False))


def test_a_group_that_a_handler_holds_is_that_of_the_optimizer_after_resuming(tmp_path: Path) -> None:
    """The constructor takes the dictionary itself, and a handler may set its rate."""

    def run(directory: Path, *limits: int) -> Any:
        for limit in limits:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            body = {"params": [*model[0].parameters()], "lr": 0.05}
            trainer = create_trainer(model, torch.optim.Adam([body, {"params": [*model[1].parameters()]}]), forward)
            trainer.add_event_handler(Events.ITERATION_COMPLETED, partial(set_rate, body))
            Checkpoint(directory, every=1).attach(trainer)
            trainer.run(LOADER, max_iters=limit)
        return bit_by_bit(model.state_dict())

    def set_rate(group: dict[str, Any], trainer: Trainer) -> None:
        group["lr"] = 0.05 / trainer.state.iteration

    assert run(tmp_path / "parts", 3, 7) == run(tmp_path / "whole", 7)


def test_an_optimizer_that_is_stepped_itself_is_saved_once(tmp_path: Path) -> None:
    """One of several that knows another of them does not have it inside."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9) for part in model)
    second.friend = first  # type: ignore[attr-defined]
    trainer = create_trainer(model, [first, second], forward)
    Checkpoint(tmp_path).attach(trainer)
    trainer.run(LOADER, max_iters=2)
    with CheckpointReader(max(tmp_path.glob("update-*"))) as stored:
        assert [name for name in stored.names() if name.startswith("optimizers/")] == ["optimizers/0", "optimizers/1"]


class Bare(Optimizer):
    """Does not call torch's `__init__`, as torch's own PostLocalSGDOptimizer and the Lookahead of some libraries."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


def test_a_wrapper_that_does_not_call_torchs_init_trains_and_resumes(tmp_path: Path) -> None:
    """It ended with an AttributeError of torch in the first update."""
    whole = train(tmp_path / "plain", [7], partial(torch.optim.SGD, lr=0.05, momentum=0.9), several=False)
    assert train(tmp_path / "bare", [7], Bare, several=False) == whole
    assert train(tmp_path / "parts", [3, 7], Bare, several=False) == whole
