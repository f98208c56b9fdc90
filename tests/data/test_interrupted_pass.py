"""Ctrl-C as a pass is opened or read past, and workers that it has ended: the next run has the bits of one run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from bits import bit_by_bit
from control_c import at_each_place, unlike
from ignite_train import ForwardOutput, Trainer, create_trainer
from ignite_train.data.micro_batch_pass import MicroBatchPass
from ignite_train.data.position import DataPosition, open_loader
from ignite_train.data.run_data import RunData
from ignite_train.data.stream import Stream

KEPT = {"num_workers": 2, "persistent_workers": True}


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x[:, None]).square().sum(), sample_size=len(x))


def made(**arguments: Any) -> tuple[Trainer, nn.Module]:
    """A trainer whose updates are undone with their random numbers, as with a Checkpoint, and its model with dropout."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.4), nn.Linear(4, 1))
    trainer = create_trainer(model, SGD(model.parameters(), lr=1e-3), forward, **arguments)
    trainer.mark_everything()
    return trainer, model


def bits(trainer: Trainer, model: nn.Module) -> Any:
    return bit_by_bit([model.state_dict(), torch.get_rng_state()]), trainer.state.iteration, random.getstate()


class Pressed(Sampler[int]):
    """Shuffles with the process's generator, and raises KeyboardInterrupt as it gives an index, counted over all passes."""

    def __init__(self, *at: int) -> None:
        self.at, self.given = at, 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        for index in torch.randperm(12).tolist():
            self.given += 1
            if self.given in self.at:
                raise KeyboardInterrupt
            yield index


def run_again(trainer: Trainer, loader: Any, **limits: Any) -> int:
    """Runs the cell until it is not stopped, and says how often it was."""
    for stops in range(9):
        try:
            trainer.run(loader, **limits)
        except KeyboardInterrupt:
            continue
        return stops
    raise AssertionError


def stop(trainer: Trainer, update: int, event: Any = Events.ITERATION_STARTED) -> None:
    def press() -> None:
        handle.remove()
        raise KeyboardInterrupt

    handle = trainer.add_event_handler(event(once=update), press)


OPENED_BY = (
    RunData.open,
    MicroBatchPass.begin,
    MicroBatchPass._read_past,
    DataPosition.find,
    DataPosition._find,
    DataPosition.open,
    DataPosition.found,
    open_loader,
    Stream._begin_pass,
    DataLoader.__iter__,
    _BaseDataLoaderIter.__init__,
    _SingleProcessDataLoaderIter.__init__,
)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["of the process", "of the loader"])
@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": 3, "epoch_length": 5}], ids=["epochs", "epoch-length"])
@pytest.mark.parametrize("stopped_at", [None, 2, 7])
def test_ctrl_c_at_each_place_as_a_pass_is_opened(stopped_at: int | None, limits: dict[str, int], own: bool) -> None:
    """At the start of an epoch, and in the middle of one, where the loader is read past what was done."""

    def run(pressing: Callable[[], Any]) -> Any:
        trainer, model = made()
        loader = DataLoader(torch.arange(12.0), 2, shuffle=True, generator=torch.Generator().manual_seed(3) if own else None)

        if stopped_at:
            stop(trainer, stopped_at)
            with pytest.raises(KeyboardInterrupt):
                trainer.run(loader, **limits)
        with suppress(KeyboardInterrupt), pressing():
            trainer.run(loader, **limits)
        trainer.run(loader, **limits)
        return bits(trainer, model)

    assert unlike(at_each_place(run, *OPENED_BY)) == []


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2}, KEPT], ids=["no workers", "workers", "kept workers"])
@pytest.mark.parametrize("at", [(1,), (7,), (15,), (9, 13, 17)], ids=str)
def test_a_cell_that_is_run_again_and_stopped_again(at: tuple[int, ...], arguments: dict[str, Any]) -> None:
    """Workers are given indices as they start, and as their next pass begins."""
    outcomes = []
    for pressed in ((), at):
        trainer, model = made()
        loader = DataLoader(torch.arange(12.0), 2, sampler=Pressed(*pressed), **arguments)
        assert run_again(trainer, loader, max_epochs=2) == len(pressed)
        outcomes.append(bits(trainer, model))
    assert outcomes[0] == outcomes[1]
