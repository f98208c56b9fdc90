"""Optimizers inside optimizers, and optimizers whose state has a form of its own: both resume bitwise."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bits import bit_by_bit
from ignite_train import ForwardOutput, create_trainer
from ignite_train.checkpoint.reader import CheckpointReader
from ignite_train.handlers import Checkpoint

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
@pytest.mark.parametrize("kind", [Lookahead, Sharing, OwnForm, Twice])
def test_an_optimizer_inside_another_goes_on_bitwise(kind: Any, several: bool, tmp_path: Path) -> None:
    """Its moments are in the checkpoint, though the state of the outer one does not have them."""
    whole = train(tmp_path / "whole", [7], kind, several)
    assert train(tmp_path / "parts", [3, 7], kind, several) == whole


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
