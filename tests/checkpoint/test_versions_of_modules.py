"""A module that knows the versions of its state takes back what it has saved, and changes an older file as torch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

from bits import bit_by_bit
from ignite_train import create_trainer
from ignite_train.checkpoint import load_weights
from ignite_train.handlers import Checkpoint, ModelEMA, MomentumTeacher

DATA = [torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


class Layer(nn.Linear):
    """In version 1 its bias counted in halves; another version it does not know, as MNASNet of torchvision."""

    def __init__(self, version: int = 2) -> None:
        super().__init__(2, 2)
        self._version = version
        self.register_load_state_dict_pre_hook(self.convert)

    @staticmethod
    def convert(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *__: Any) -> None:
        if metadata.get("version") not in (1, 2):
            raise ValueError(f"version should be 1 or 2, got {metadata.get('version')}")
        if metadata["version"] == 1:
            state[f"{prefix}bias"] = state[f"{prefix}bias"] / 2


def net(version: int = 2) -> nn.Sequential:
    return nn.Sequential(Layer(version), nn.Sequential(Layer(version)))


def quantised() -> nn.Sequential:
    """The observer's eps is in the state, and torch gives it another value in a state without a version."""
    observed = FakeQuantize(observer=MovingAverageMinMaxObserver, eps=2**-12)
    return nn.Sequential(nn.Linear(2, 2), observed)


def mean_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def states(*modules: nn.Module) -> list[Any]:
    return [bit_by_bit(dict(module.state_dict())) for module in modules]


@pytest.fixture(params=[net, quantised], ids=["known-versions", "quantised"])
def make(request: pytest.FixtureRequest) -> Callable[[], nn.Module]:
    return request.param


def test_a_run_resumes(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """The model, a teacher and a module of the user's have the state that was saved, and so has a model without a run."""

    def train(max_epochs: int) -> list[nn.Module]:
        model, extra = make(), make()
        teacher = copy.deepcopy(model)
        trainer = create_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss)
        MomentumTeacher(teacher, model, 0.5).attach(trainer)
        ModelEMA(0.5).attach(trainer)
        Checkpoint(tmp_path, to_save={"extra": extra}).attach(trainer)
        trainer.run(DATA, max_epochs=max_epochs)
        return [model, teacher, extra]

    saved = train(1)
    assert states(*train(1)) == states(*saved)
    for entry, module in zip(("model", "MomentumTeacher", "extra"), saved, strict=True):
        loaded = make()
        assert load_weights(loaded, tmp_path, entry=entry) == []
        assert states(loaded) == states(module)
    assert load_weights(make(), tmp_path, entry="ModelEMA") == []


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("wrap", ["", "_orig_mod.", "module.", "module.module._orig_mod."])
def test_a_file_of_torch_tells_its_versions(version: int, wrap: str, tmp_path: Path) -> None:
    """The state is changed as torch's own `load_state_dict` changes it, whatever the model was wrapped in."""
    written, expected = net(version), net()
    expected.load_state_dict(written.state_dict())
    assert (states(expected) == states(written)) == (version == 2)
    whole: nn.Module = written
    for name in reversed(wrap.split(".")[:-1]):
        whole = nn.ModuleDict({name: whole})
    torch.save({"model": whole.state_dict()}, tmp_path / "model.pt")
    for strict in (True, False):
        model, compiled = net(), net()
        compiled[1] = torch.compile(compiled[1])  # never called
        part = nn.ModuleDict({"module": net()})
        for one in (model, compiled, part):
            assert load_weights(one, tmp_path / "model.pt", strict=strict) == []
        assert states(model, part["module"]) == states(expected, expected)
        assert [*compiled.parameters()][-1].tolist() == expected[1][0].bias.tolist()


def test_a_file_without_versions_is_as_new_as_the_model(tmp_path: Path) -> None:
    """Files of `consolidate` and of safetensors have no versions; a part of the state is loaded alike."""
    written = net()
    torch.save(dict(written.state_dict()), tmp_path / "model.pt")
    torch.save(dict(written[:1].state_dict()), tmp_path / "part.pt")
    model, other = net(), net()
    assert load_weights(model, tmp_path / "model.pt") == []
    assert states(model) == states(written)
    assert load_weights(other, tmp_path / "part.pt", strict=False) == ["1.0.weight", "1.0.bias"]
    assert states(other[0]) == states(written[0])


def test_nothing_else_than_the_version_is_taken_from_a_file(tmp_path: Path) -> None:
    """A state that torch has loaded with `assign=True` says so from then on; the parameters of the model stay its own."""
    state = net().state_dict()
    net().load_state_dict(state, assign=True)
    torch.save(state, tmp_path / "assigned.pt")
    model = net()
    own = [*model.parameters()]
    load_weights(model, tmp_path / "assigned.pt")
    assert all(one is other for one, other in zip(own, model.parameters(), strict=True))
