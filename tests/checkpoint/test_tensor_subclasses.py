"""Tensors of other classes, as quantised states and weights are: stored by their plain parts, given back in the run's class."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from bits import bit_by_bit
from ignite_train import CheckpointError, ForwardOutput, TrainEvents, UpdateOptions, create_trainer
from ignite_train.checkpoint import read_checkpoint, verify
from ignite_train.handlers import Checkpoint, ModelEMA, StateMismatchError
from ranks import run_ranks
from test_other_state import reseal, stored_in

X = torch.linspace(-1, 1, 96).reshape(12, 8).cos()
LOADER = [X[i : i + 3] for i in range(0, 12, 3)]


class Coded(Tensor):
    """Numbers as codes of 8 bits and a scale."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, signed: bool) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], [self.signed]

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any = None, stride: Any = None) -> Any:
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def coded(cls, values: Tensor) -> Any:
        scale = values.abs().amax().clamp(min=1e-6) / 127
        return cls((values / scale).round().to(torch.int8), scale, signed=True)

    def plain(self) -> Tensor:
        return self.codes.float() * self.scale

    def __repr__(self, **_: Any) -> str:
        return "Coded"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if function in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            one = args[0]
            copied = cls(
                *(function(part) if function is not aten._to_copy.default else part.clone() for part in (one.codes, one.scale)),
                one.signed,
            )
            return return_and_correct_aliasing(function, args, kwargs, copied)
        if function is aten.copy_.default:
            if isinstance(args[1], Coded):
                args[0].codes.copy_(args[1].codes)
                args[0].scale.copy_(args[1].scale)
            else:
                args[0].copy_(cls.coded(args[1]))
            return args[0]
        plain = lambda value: value.plain() if isinstance(value, Coded) else value  # noqa: E731
        return function(*tree_map(plain, args), **tree_map(plain, kwargs))


class Moment(Coded):
    """Like the states of torchao it can be moved and detached, but not cloned."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.clone.default:
            raise NotImplementedError("Moment cannot be cloned")
        return super().__torch_dispatch__(function, types, args, kwargs)


class Adam8(torch.optim.Optimizer):
    """Its moment is coded from the first step on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["moment"] = Moment.coded(torch.zeros_like(parameter))
            moment = state["moment"].plain() * 0.9 + parameter.grad
            state["moment"].copy_(Coded.coded(moment))
            parameter.sub_(state["moment"].plain(), alpha=0.05)


class Net(nn.Module):
    """A layer, and a table of quantised numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("table", Coded.coded(torch.randn(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.table.plain())


def train(directory: Path, *limits: int) -> Any:
    for seed, limit in enumerate(limits):
        torch.manual_seed(seed)
        model = Net()
        optimizer = Adam8(model.parameters())
        trainer = create_trainer(model, optimizer, lambda model, x: ForwardOutput((model(x) - 1).square().sum(), len(x)))
        Checkpoint(directory, every=1, keep=9).attach(trainer)
        trainer.run(LOADER, max_iters=limit)
    moments = [state["moment"] for state in optimizer.state.values()]
    assert all(type(moment) is Moment and moment.signed for moment in moments)
    return bit_by_bit([model.layer.state_dict(), model.table.codes, model.table.scale, [m.codes for m in moments]])


@pytest.mark.slow
def test_a_quantised_state_goes_on_bitwise(tmp_path: Path) -> None:
    """Of an optimizer, where it exists from the first step on, and of a buffer, whose class the model has."""
    assert train(tmp_path / "parts", 3, 6) == train(tmp_path / "whole", 6)
    newest = max((tmp_path / "parts").glob("update-*"))
    verify(newest)
    assert read_checkpoint(newest).shapes["table"] == (8,)


@pytest.mark.parametrize(
    "name", ["os.system", "torch.nested._internal.nested_tensor.NestedTensor", "test_tensor_subclasses.Net"]
)
def test_a_class_that_the_run_does_not_have_is_refused(name: str, tmp_path: Path) -> None:
    """Nothing that a file names is imported or called."""
    train(tmp_path, 3)
    for path in tmp_path.glob("update-*"):
        index = (path / "rank-00000.json").read_text()
        assert '"test_tensor_subclasses.Coded"' in index
        forged = index.replace('"test_tensor_subclasses.Coded"', json.dumps(name)).encode()
        reseal(path, stored_in(path), index=forged)
    with pytest.raises(CheckpointError, match=rf"table is {re.escape(name)}, float32 of .* and this run has .*Coded"):
        train(tmp_path, 6)


class Based(nn.Module):
    """A frozen base of quantised weights, and a layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(Coded.coded(torch.randn(8)), requires_grad=False)
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.base.plain())


def on_ranks(flipped: bool) -> tuple[bytes, str]:
    """Weights and averages of a rank in the end, and why its run has ended; rank 1 may change a code of the frozen base."""
    rank = idist.get_rank()
    torch.manual_seed(rank)
    model = Based()
    trainer = create_trainer(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda model, x: ForwardOutput((model(x) - 1).square().sum(), len(x)),
        options=UpdateOptions(reduction="explicit"),
        protect={"state_consistency": {"every": 1}},
    )
    ema = ModelEMA(0.5)
    ema.attach(trainer)
    if flipped and rank == 1:
        trainer.add_event_handler(TrainEvents.STEP_COMPLETED(once=2), lambda: model.base.codes.bitwise_xor_(1))
    why = ""
    try:
        trainer.run(LOADER, max_epochs=1)
    except StateMismatchError as error:
        why = str(error)
    with ema.swapped_in():
        averaged = bit_by_bit(model.layer.state_dict())
    return bit_by_bit([model.layer.state_dict(), model.base.codes, model.base.scale, averaged]), why


def test_ranks_begin_alike_with_a_quantised_base_and_watch_it() -> None:
    """All of it stands in the optimizer, as `model.parameters()`, beside adapters."""
    first, second = run_ranks(on_ranks, False)
    assert first == second
    assert first[1] == ""
    for _, why in run_ranks(on_ranks, True):
        assert "the ranks differ in parameter base" in why
