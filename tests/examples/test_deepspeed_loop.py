"""The loops of docs/programs.md for users of DeepSpeed make the same updates: the engine's by a stand-in, ours as printed."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn

from ignite_train import ForwardOutput, TrainState, create_trainer
from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs/programs.md"

of_a_checkout = pytest.mark.skipif(not PAGE.is_file(), reason="looks at a checkout, which is not here")


class Engine:
    """What DeepSpeed's engine does in one process without ZeRO, as read in its source: engine.py, `backward` and `step`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> None:
        self.model, self.optimizer = model, optimizer
        self.accumulation, self.clip = config["gradient_accumulation_steps"], config["gradient_clipping"]
        self.micro_steps, self.forced = 0, None

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.accumulation == 0 if self.forced is None else self.forced

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.forced = is_boundary  # and stays so

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool = True) -> Tensor:
        scaled = loss / self.accumulation if scale_wrt_gas else loss
        scaled.backward()
        return scaled

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.micro_steps += 1


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> tuple[Any, ...]:
    return Engine(model, optimizer, config), optimizer, None, None


def blocks(section: str) -> list[tuple[str, str]]:
    """The kind and the code of each block of a section of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```(py|python)\n(.*?)```", text, flags=re.DOTALL)


@of_a_checkout
def test_both_loops_make_the_same_updates() -> None:
    """After the loop with a fixed number of micro-batches, and after the one with numbers that vary."""
    start = PAGE.read_text(encoding="utf-8")
    preamble = re.findall(r"```python\n(.*?)```", start, flags=re.DOTALL)[0]
    names: dict[str, Any] = {"deepspeed": SimpleNamespace(initialize=initialize)}
    exec(preamble, names)  # noqa: S102
    theirs, ours = dict(names), dict(names)
    code = blocks("The loop of DeepSpeed")
    assert [kind for kind, _ in code] == ["py", "python", "py", "python"]
    for (_, engines), (_, trainers) in zip(code[::2], code[1::2], strict=True):
        before = nn.utils.parameters_to_vector(theirs["model"].parameters()).detach() if "model" in theirs else None
        exec(engines, theirs)  # noqa: S102
        exec(trainers, ours)  # noqa: S102
        after = [nn.utils.parameters_to_vector(names["model"].parameters()).detach() for names in (theirs, ours)]
        torch.testing.assert_close(after[1], after[0], rtol=1e-5, atol=1e-6)
        assert before is None or (after[0] - before).abs().max() > 1e-3
    returned = theirs["losses"]
    expected = [first + second for first, second in zip(returned[::2], returned[1::2], strict=True)]
    assert ours["losses"] == pytest.approx(expected, rel=1e-5)


def sum_and_mean() -> list[Any]:
    """A sum over the micro-batches of a rank, and a mean over the ranks: `scale_wrt_gas=False`."""
    asked: list[bool] = []

    def forward(model: nn.Module, x: Tensor, state: TrainState) -> ForwardOutput:
        assert state.group_size is not None
        asked.append(state.micro_batch_in_group == state.group_size - 1)
        return ForwardOutput(model(x).mean(), sample_size=1 / state.group_size)

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    wrapped = idist.auto_model(model) if idist.get_world_size() > 1 else model
    trainer = create_trainer(wrapped, torch.optim.SGD(model.parameters(), lr=1.0), forward)
    value = 10.0 ** idist.get_rank()
    with trainer.session():
        trainer.update([torch.full((2, 1), value), torch.full((4, 1), 3 * value)])
    return [model.weight.item(), asked]


@pytest.mark.slow
def test_the_sum_over_micro_batches_and_the_mean_over_ranks() -> None:
    """1 + 3 on rank 0 and 10 + 30 on rank 1 make 22, and each forward knows whether it is at the boundary."""
    assert run_ranks(sum_and_mean) == [[-22.0, [False, True]]] * 2


def test_the_sum_over_micro_batches_in_one_process() -> None:
    """1 + 3."""
    assert sum_and_mean() == [-4.0, [False, True]]
