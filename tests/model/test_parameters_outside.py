"""Parameters of a criterion: one `nn.ModuleDict` of net and criterion is a model as any other, and refusals say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ignite.distributed as idist
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cuts
from bits import bit_by_bit
from ignite_train import ForwardOutput, UpdateOptions, create_evaluator, create_trainer
from ignite_train.handlers import Checkpoint, ModelEMA
from ranks import run_ranks

SIZES = [[[2, 3], [4]], [[1], []], [[3], [2, 5]]]  # by update and rank


class Tempered(nn.Module):
    """A loss with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, out: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (w * (out * self.log_temperature.exp() - y).square()).sum()


def parts() -> nn.ModuleDict:
    return nn.ModuleDict({"net": cuts.linear(), "criterion": Tempered()})


def forward(model: Any, micro_batch: cuts.Sample) -> ForwardOutput:
    x, y, w = micro_batch
    return ForwardOutput(model["criterion"](model["net"](x).squeeze(1), y, w), float(w.sum()))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def flat(model: nn.Module) -> list[float]:
    numbers: list[float] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return numbers


def by_hand() -> list[float]:
    model, start = parts(), 0
    optimizer = optimizer_of(model)
    for sizes in SIZES:
        count = sum(map(sum, sizes))
        loss, weight, *_ = forward(model, cuts.cut(cuts.samples(), [count], start)[0])
        start += count
        optimizer.zero_grad()
        (loss / weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return flat(model)


def on_rank(way: Any) -> list[float]:
    model, start = parts(), 0
    trainer = create_trainer(model, optimizer_of(model), forward, max_grad_norm=0.5, options=UpdateOptions(reduction=way))
    rank, ranks = idist.get_rank(), idist.get_world_size()
    with trainer.session():
        for sizes in SIZES:
            mine = [size for own in (sizes if ranks == 1 else sizes[rank : rank + 1]) for size in own]
            trainer.update(cuts.cut(cuts.samples(), mine, start + (0 if ranks == 1 else sum(map(sum, sizes[:rank])))))
            start += sum(map(sum, sizes))
    return flat(model)


def test_one_process_is_the_loop_by_hand() -> None:
    """The temperature is clipped and stepped with the net."""
    assert on_rank("auto") == pytest.approx(by_hand(), rel=1e-11)


@pytest.mark.slow
def test_ranks_are_the_loop_by_hand() -> None:
    """And reduced with it."""
    found = run_ranks(on_rank, "explicit")
    assert found[0] == found[1] == pytest.approx(by_hand(), rel=1e-11)


def test_it_is_saved_averaged_and_evaluated(tmp_path: Path) -> None:
    """A resumed run ends with the same bits, the average covers the temperature, and an evaluator takes the same forward."""

    def run(directory: Path, updates: int) -> Any:
        model = parts()
        trainer = create_trainer(model, optimizer_of(model), forward)
        average = ModelEMA(decay=0.5)
        average.attach(trainer)
        Checkpoint(directory, every=2).attach(trainer)
        trainer.run(cuts.cut(cuts.samples(), [2, 3, 1]), max_iters=updates)
        loss = create_evaluator(model, forward).run(cuts.cut(cuts.samples(), [5])).metrics["loss"]
        return bit_by_bit([model.state_dict(), average.state_dict()]), loss

    run(tmp_path / "a", 4)
    assert run(tmp_path / "a", 7) == run(tmp_path / "b", 7)


def test_parameters_that_the_model_lacks_are_answered_with_the_remedy() -> None:
    """In one line."""
    net, criterion = cuts.linear(), Tempered()
    optimizer = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"put a criterion that owns it into one model with the net, nn.ModuleDict\(\{"):
        create_trainer(net, optimizer, forward)


def refused() -> list[str]:
    """What DistributedDataParallel cannot do: a container, and a criterion beside it."""
    said = []
    for model in (
        DistributedDataParallel(parts()),
        nn.ModuleDict({"net": DistributedDataParallel(cuts.linear()), "criterion": Tempered()}),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            create_trainer(model, optimizer_of(model), forward)
        said.append(str(caught.value))
    return said


@pytest.mark.slow
def test_what_ddp_cannot_wrap_is_answered_with_the_remedy() -> None:
    """On all ranks, in one line, before anything is computed."""
    for container, stray in run_ranks(refused):
        assert "got a ModuleDict" in container
        assert "got 'criterion.log_temperature' outside" in stray
        assert all("UpdateOptions(reduction='explicit')" in message for message in (container, stray))
