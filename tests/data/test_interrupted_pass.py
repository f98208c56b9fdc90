"""Ctrl-C as a pass is opened or read past, and workers that it has ended: the next run has the bits of one run."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from ignite.engine import Events
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter
from torchdata.stateful_dataloader import StatefulDataLoader

from bits import bit_by_bit
from control_c import at_each_place, unlike
from ignite_train import ForwardOutput, ResumableLoader, Trainer, create_evaluator, create_trainer
from ignite_train.data.micro_batch_pass import MicroBatchPass
from ignite_train.data.position import DataPosition, open_loader
from ignite_train.data.run_data import RunData
from ignite_train.data.stream import Stream
from ignite_train.handlers import Validation
from ignite_train.internals import of_torch

KEPT = {"num_workers": 2, "persistent_workers": True}


def forward(model: nn.Module, x: Tensor) -> ForwardOutput:
    return ForwardOutput(model(x[:, None]).square().sum(), sample_size=len(x))


def made(user_forward: Any = forward, **arguments: Any) -> tuple[Trainer, nn.Module]:
    """A trainer whose updates are undone with their random numbers, as with a Checkpoint, and its model with dropout."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.4), nn.Linear(4, 1))
    trainer = create_trainer(model, SGD(model.parameters(), lr=1e-3), user_forward, **arguments)
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


OPENED_BY = (
    RunData.open,
    MicroBatchPass.begin,
    MicroBatchPass._read_past,
    DataPosition.opening,
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


# --- workers that are kept -------------------------------------------------------------------------------------------------


class Noisy(Dataset[Tensor]):
    """Draws in the worker processes."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index)) + torch.rand(()) * 0.1


def stop_workers(others: Sequence[Any]) -> None:
    """Ends the workers, as the stop button of a notebook does, without a word to torch: they end with status 0 in both cases.

    Not by SIGINT, which a shell has all processes ignore that it starts in the background.
    """
    for worker in multiprocessing.active_children():
        if worker not in others:
            worker.terminate()
            worker.join()


def stop(trainer: Trainer, update: int, event: Any = Events.ITERATION_STARTED, *, ends_workers: bool = False) -> None:
    """Stops the run once; the workers have all given something by then, so that they are in torch's own loop."""
    others = multiprocessing.active_children()

    def press() -> None:
        handle.remove()
        if ends_workers:
            stop_workers(others)
        raise KeyboardInterrupt

    handle = trainer.add_event_handler(event(once=update), press)


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": 4, "epoch_length": 5}], ids=["epochs", "epoch-length"])
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "new"])
@pytest.mark.parametrize("kind", ["plain", "resumable", "stateful"])
def test_the_stop_button_ends_workers_and_the_next_run_starts_others(kind: str, kept: bool, limits: dict[str, int]) -> None:
    """Each later run ended with torch's `DataLoader worker (pid(s) …) exited unexpectedly`."""
    outcomes = []
    for updates, event in (((), None), ((2, 8, 9), Events.ITERATION_STARTED), ((2, 8), Events.ITERATION_COMPLETED)):
        trainer, model = made()
        if kind == "resumable":
            loader: Any = ResumableLoader(Noisy(), 2, shuffle=True, seed=5, num_workers=2, persistent_workers=kept)
        else:
            make = StatefulDataLoader if kind == "stateful" else DataLoader
            loader = make(torch.arange(12.0), 2, shuffle=True, num_workers=2, persistent_workers=kept)
        for update in updates:
            stop(trainer, update, event, ends_workers=True)
        assert run_again(trainer, loader, **limits) == len(updates)
        outcomes.append(bits(trainer, model)[: 2 if kind == "stateful" else 3])
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_the_workers_of_a_validation_too() -> None:
    """Which the run does not read as it is stopped: each cell trained an epoch and failed."""
    outcomes = []
    for updates in ((), (7,)):
        trainer, model = made()
        held_out = DataLoader(torch.arange(8.0), 2, shuffle=True, **KEPT)
        Validation(create_evaluator(model, forward), held_out).attach(trainer)
        for update in updates:
            stop(trainer, update, ends_workers=True)
        assert run_again(trainer, DataLoader(torch.arange(12.0), 2, shuffle=True), max_epochs=3) == len(updates)
        outcomes.append(bits(trainer, model))
    assert outcomes[0] == outcomes[1]


def test_ctrl_c_while_kept_workers_answer_that_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run took a late answer for a micro-batch: `KeyError: _ResumeIteration(seed=None)`."""
    outcomes = []
    for presses in (False, True):
        trainer, model = made()
        loader = DataLoader(torch.arange(12.0), 2, shuffle=True, **KEPT)
        trainer.run(loader, max_epochs=1)
        if presses:

            def press(_: Any) -> None:
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(_MultiProcessingDataLoaderIter, "_get_data", press)
                with pytest.raises(KeyboardInterrupt):
                    trainer.run(loader, max_epochs=3)
        trainer.run(loader, max_epochs=3)
        outcomes.append(bits(trainer, model))
    assert outcomes[0] == outcomes[1]


def as_bytes(samples: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    """A micro-batch that crosses from its worker in one long message, where tensors send the names of files."""
    return np.stack([np.full(2**16, float(sample)) for sample in samples])


def of_bytes(model: nn.Module, x: np.ndarray[Any, Any]) -> ForwardOutput:
    return forward(model, torch.from_numpy(x[:, 0]).float())


class Around:
    """A loader of the user's own."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


@pytest.mark.parametrize("kind", ["training", "evaluation", "wrapped"])
def test_ctrl_c_in_the_middle_of_a_message_of_kept_workers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run waited forever, or took the rest of the message for the next one: `UnpicklingError`."""
    outcomes, read = [], Connection._recv  # type: ignore[attr-defined]
    for presses in (False, True):
        sizes: list[int] = []

        def press(connection: Any, size: int, *rest: Any, sizes: list[int] = sizes, presses: bool = presses) -> Any:
            sizes += [size] if size > 2**16 else []
            if presses and size > 2**16 and len(sizes) == 4:
                os.read(connection.fileno(), 1000)
                raise KeyboardInterrupt
            return read(connection, size, *rest)

        trainer, model = made(user_forward=of_bytes)
        evaluator = create_evaluator(model, of_bytes)
        loader = DataLoader(torch.arange(12.0), 2, shuffle=kind == "training", collate_fn=as_bytes, timeout=60, **KEPT)
        data, stops = Around(loader) if kind == "wrapped" else loader, 0
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "_recv", press)
            for _ in range(2):
                with suppress(KeyboardInterrupt):
                    stops += 1
                    evaluator.run(data) if kind == "evaluation" else trainer.run(data, max_epochs=3)
                    stops -= 1
        assert stops == presses
        # Of workers that a wrapper starts the trainer cannot take back what they draw.
        outcomes.append((18 if kind == "wrapped" else bits(trainer, model), trainer.state.iteration, evaluator.state.metrics))
        of_torch.end_workers(loader)
    assert outcomes[0] == outcomes[1]


def test_kept_workers_that_live_are_kept() -> None:
    """Also where the pass before was left in the middle."""
    trainer, _ = made()
    loader = DataLoader(torch.arange(12.0), 2, shuffle=True, **KEPT)
    trainer.run(loader, max_iters=3)
    workers = [*loader._iterator._workers]  # type: ignore[union-attr,attr-defined]
    stop(trainer, 5)
    assert run_again(trainer, loader, max_epochs=3) == 1
    assert [*loader._iterator._workers] == workers  # type: ignore[union-attr,attr-defined]
    of_torch.end_workers(loader)  # if the garbage collector ends them, torch waits for each
